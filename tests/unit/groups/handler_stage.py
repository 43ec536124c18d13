"""The handlers of the group APIs with a real coordinator behind them and stand-ins for the other services.

`Broker.call` takes a request through the wire format both ways, as a connection would, in any version.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.config import BrokerSettings
from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.protocol.frames import (
    RequestHead,
    decode_entity,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from millrace.broker.server.answers import _builder, request_type, response_type
from millrace.broker.transactions.values import ProducerIdentity
from tests.waiting import patience

NAMES = [
    "join_group",
    "sync_group",
    "heartbeat",
    "leave_group",
    "offset_commit",
    "offset_fetch",
    "offset_delete",
    "txn_offset_commit",
    "describe_groups",
    "list_groups",
    "delete_groups",
    "find_coordinator",
]
HANDLERS = {name: importlib.import_module(f"millrace.broker.server.handlers.{name}") for name in NAMES}


class FakeCache:
    """A cluster of broker 7 and the topic "flights", and the coordinators' topics once they are made."""

    def __init__(self) -> None:
        self.brokers = {7: SimpleNamespace(broker_id=7, host="broker.example", port=9092, leaving=False)}
        self.topics = {"flights": self.made(2)}
        self.leader = 7

    def made(self, partition_count: int) -> Any:
        return SimpleNamespace(partitions=dict.fromkeys(range(partition_count)))

    def topic(self, name: str) -> Any:
        return self.topics.get(name)

    def partition(self, name: str, number: int) -> Any:
        topic = self.topics.get(name)
        return SimpleNamespace(leader=self.leader) if topic and number in topic.partitions else None

    async def changed(self, condition: Any, timeout_ms: float) -> bool:
        return bool(condition())


class FakeController:
    """Makes a coordinators' topic at once; `refusal` is raised instead."""

    refusal: Exception | None = None

    def __init__(self, cache: FakeCache) -> None:
        self._cache = cache

    async def ensure_topic(self, topic: Any, timeout_ms: float) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.asked = topic
        self._cache.topics[topic.name] = self._cache.made(topic.partition_count)
        return self._cache.topics[topic.name]


class FakeGate:
    """Admits every append to a transaction, or refuses it with `error`; `appended` lists what it was told."""

    error = ErrorCode.none

    def __init__(self) -> None:
        self.appends: list[tuple[Any, int]] = []

    async def admit(self, transactional_id: str, producer: Any, sequences: Any) -> Any:
        assert (transactional_id, producer) == ("tx", ProducerIdentity(7, 2))
        return dict.fromkeys(sequences, self.error)

    def appended(self, partition: Any, producer_id: int) -> None:
        self.appends.append((partition, producer_id))


class Broker:
    """The services that the group handlers use, and a client that speaks any version."""

    def __init__(self, groups: GroupCoordinator) -> None:
        settings = BrokerSettings(
            offsets_topic_num_partitions=4,
            offsets_topic_replication_factor=3,
            offsets_topic_segment_bytes=1_000,
            transaction_state_log_num_partitions=4,
            transaction_state_log_replication_factor=3,
            transaction_state_log_min_isr=2,
            transaction_state_log_segment_bytes=1_000,
            given=frozenset({"offsets_topic_replication_factor", "transaction_state_log_replication_factor"}),
        )
        self.groups = groups
        self.config = SimpleNamespace(settings=settings)
        self.clock = SimpleNamespace(now_ms=lambda: 1_000, steady_ms=lambda: 1_000)
        self.metadata_cache = FakeCache()
        self.controller = FakeController(self.metadata_cache)
        self.transaction_gate = FakeGate()

    async def call(self, name: str, version: int, **fields: Any) -> Any:
        """Through the wire format both ways, as a connection would."""
        module = HANDLERS[name]
        request = _builder(request_type(module.API, version))(fields)
        frame = memoryview(encode_request(request, 5, "client"))[4:]
        head, position = decode_request(frame)
        assert head == RequestHead(int(module.API), version, 5, "client")
        decoded = decode_entity(request_type(module.API, version), frame, position)
        context = SimpleNamespace(head=head, client_address="10.0.0.1", broker=self)
        response = await module.handle(decoded, context)
        answer_frame = memoryview(encode_response(head, response))[4:]
        return decode_response(response_type(module.API, version), answer_frame)


def with_broker(offsets_log, scenario, **settings):
    async def main():
        config = GroupConfig(**{"initial_rebalance_delay_ms": 0, **settings})
        groups = GroupCoordinator(config, offsets_log, clock_ms=lambda: 1_000, steady_ms=lambda: 1_000)
        for partition in range(offsets_log.count):
            await groups.load(partition)
        await scenario(Broker(groups))

    asyncio.run(asyncio.wait_for(main(), patience(120)))


def versions(name: str) -> range:
    return HANDLERS[name].VERSIONS


def fields_of(entity: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(entity)}


JOIN = {
    "group_id": "g",
    "session_timeout": 10_000,
    "rebalance_timeout": 30_000,
    "protocol_type": "consumer",
    "protocols": [{"name": "range", "metadata": b"subscription"}],
}


async def join(broker: Broker, version: int, **changes: Any) -> Any:
    joined = await broker.call("join_group", version, **{**JOIN, **changes})
    if joined.error_code is ErrorCode.member_id_required:
        assert version >= 4
        joined = await broker.call(
            "join_group", version, **{**JOIN, "member_id": joined.member_id, **changes}
        )
    return joined


async def sync(broker: Broker, version: int, joined: Any, **changes: Any) -> Any:
    return await broker.call(
        "sync_group",
        version,
        **{
            "group_id": "g",
            "generation_id": joined.generation_id,
            "member_id": joined.member_id,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [{"member_id": joined.member_id, "assignment": b"all of it"}],
            **changes,
        },
    )
