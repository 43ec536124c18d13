"""A cluster that a test can change, and a client of it; what tests of finding and of following one share."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from kio.schema.heartbeat.v4.request import HeartbeatRequest

from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.frames import Api, RequestHead
from tests.unit.client.scripted_server import (
    Handler,
    Peer,
    ScriptedServer,
    brokerlike,
    metadata_answer,
    response,
)

HEARTBEAT = HeartbeatRequest(group_id="g", generation_id=1, member_id="m")


class FakeBroker:
    """A server whose metadata a test can change, and that counts what it is asked."""

    def __init__(self, handlers: Mapping[Api, Handler] | None = None, versions: Any = None) -> None:
        self.brokers: dict[int, int] = {}
        self.topics: dict[str, dict[int, int]] = {"flights": {0: 1, 1: 1}}
        self.metadata_count = 0
        self.handlers: dict[Api, Handler] = {
            Api.METADATA: self.metadata,
            Api.HEARTBEAT: lambda head, request: response(Api.HEARTBEAT, head.version, error_code=0),
            **(handlers or {}),
        }
        ranges = versions or {int(api): (0, 12) for api in Api}
        self.server = ScriptedServer(brokerlike(self.handlers, ranges))

    async def __aenter__(self) -> FakeBroker:
        await self.server.__aenter__()
        self.brokers = {1: self.server.port}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.__aexit__()

    def metadata(self, head: RequestHead, request: Any) -> Any:
        self.metadata_count += 1
        names = [topic.name for topic in request.topics] if request.topics is not None else list(self.topics)
        known = {name: self.topics[name] for name in names if name in self.topics}
        unknown = tuple(name for name in names if name not in self.topics)
        return metadata_answer(head.version, self.brokers, known, unknown=unknown)


def cluster(*addresses: str, **options: Any) -> Cluster:
    options.setdefault("request_timeout_ms", 3000)
    options.setdefault("rng", random.Random(5))
    return Cluster("ewr", addresses, **options)


async def hold(peer: Peer) -> None:
    await peer.reader.read()
