"""Who asks for a producer id as its holder says so, to servers that can tell."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.raw_produce import init_producer_id
from millrace.broker.errors import UnsupportedVersion
from millrace.broker.protocol.frames import Api, RequestHead
from tests.unit.client.cluster_stage import FakeBroker, cluster
from tests.unit.client.scripted_server import coordinator_answer, response


class Coordinator:
    def __init__(self, highest: int = 4) -> None:
        self.asked: list[Any] = []
        versions = {int(api): (0, 12) for api in Api} | {int(Api.INIT_PRODUCER_ID): (0, highest)}
        handlers = {Api.INIT_PRODUCER_ID: self.begin, Api.FIND_COORDINATOR: self.find}
        self.broker = FakeBroker(handlers, versions)

    def begin(self, head: RequestHead, request: Any) -> Any:
        self.asked.append(request)
        return response(Api.INIT_PRODUCER_ID, head.version, error_code=0, producer_id=7, producer_epoch=5)

    def find(self, head: RequestHead, request: Any) -> Any:
        return coordinator_answer(head.version, self.broker.server.port)

    def ask(self, **how: Any) -> tuple[int, int]:
        async def main() -> tuple[int, int]:
            async with self.broker, cluster(self.broker.server.address) as ewr:
                return await init_producer_id(ewr, "m.0", **how)

        return asyncio.run(main())


def test_holder_is_named_and_nobody_where_there_is_none() -> None:
    for holder in (None, (7, 4)):
        coordinator = Coordinator()
        assert coordinator.ask(holder=holder) == (7, 5)
        (asked,) = coordinator.asked
        assert (asked.producer_id, asked.producer_epoch) == (holder or (-1, -1))


def test_a_server_that_cannot_tell_holders_apart_is_asked_for_nothing() -> None:
    """It would take the id from whoever has it."""
    coordinator = Coordinator(highest=2)
    with pytest.raises(UnsupportedVersion):
        coordinator.ask(holder=(7, 4))
    assert coordinator.asked == []
