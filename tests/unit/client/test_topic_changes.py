"""Topics that are made, widened and deleted while the server takes longer than it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client import admin
from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import InvalidPartitions, KafkaError, TopicAlreadyExists, UnknownTopicOrPartition

TIMED_OUT, EXISTS, NO_INCREASE, UNKNOWN, NOT_CONTROLLER = 7, 36, 37, 3, 41


class Answering(Cluster):
    """A cluster whose controller gives these answers to requests for changes, one after the other."""

    def __init__(self, codes: list[int], partition_count: int) -> None:
        super().__init__("c", ["127.0.0.1:1"], client_id="x", request_timeout_ms=60_000)
        self.codes = codes
        self._count = partition_count

    async def metadata(self, *_: Any, **__: Any) -> Any:
        parts = {number: SimpleNamespace(leader=1) for number in range(self._count)}
        topics = {"t": SimpleNamespace(partitions=parts)}
        return SimpleNamespace(controller_id=1, brokers={1: None}, topics=topics, topic_errors={})

    async def api_version(self, _api: int, _least: int, most: int, _node: int | None = None) -> int:
        return most

    async def request(self, request: Any, **_: Any) -> Any:
        result = SimpleNamespace(error_code=self.codes.pop(0), error_message=None)
        return SimpleNamespace(topics=[result], results=[result], responses=[result])


def create(cluster: Cluster) -> Awaitable[None]:
    return admin.create_topic(cluster, "t", 8)


def create_by_default(cluster: Cluster) -> Awaitable[None]:
    return admin.create_topic(cluster, "t", -1)


def ask_to_create(cluster: Cluster) -> Awaitable[None]:
    return admin.create_topic(cluster, "t", 8, validate_only=True)


def widen(cluster: Cluster) -> Awaitable[None]:
    return admin.create_partitions(cluster, "t", 8)


def ask_to_widen(cluster: Cluster) -> Awaitable[None]:
    return admin.create_partitions(cluster, "t", 8, validate_only=True)


def delete(cluster: Cluster) -> Awaitable[None]:
    return admin.delete_topic(cluster, "t")


Change = Callable[[Cluster], Awaitable[None]]


def carry_out(change: Change, codes: list[int], there: int) -> None:
    cluster = Answering(codes, there)

    async def run() -> None:
        try:
            await change(cluster)
        finally:
            await cluster.close()

    asyncio.run(run())
    assert cluster.codes == []


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (create, [TIMED_OUT, EXISTS]),
        (create, [TIMED_OUT, NOT_CONTROLLER, EXISTS]),
        (create_by_default, [TIMED_OUT, EXISTS]),
        (widen, [TIMED_OUT, NO_INCREASE]),
        (delete, [TIMED_OUT, UNKNOWN]),
    ],
)
def test_change_that_the_server_has_begun_is_no_refusal_at_the_next_attempt(
    change: Change, codes: list[int]
) -> None:
    carry_out(change, codes, 8)


@pytest.mark.parametrize(
    ("change", "codes", "there", "refusal"),
    [
        (create, [EXISTS], 8, TopicAlreadyExists),
        (create, [NOT_CONTROLLER, EXISTS], 8, TopicAlreadyExists),
        (create, [TIMED_OUT, EXISTS], 4, TopicAlreadyExists),
        (ask_to_create, [TIMED_OUT, EXISTS], 8, TopicAlreadyExists),
        (widen, [NO_INCREASE], 8, InvalidPartitions),
        (widen, [TIMED_OUT, NO_INCREASE], 9, InvalidPartitions),
        (ask_to_widen, [TIMED_OUT, NO_INCREASE], 8, InvalidPartitions),
        (delete, [UNKNOWN], 8, UnknownTopicOrPartition),
        (delete, [NOT_CONTROLLER, UNKNOWN], 8, UnknownTopicOrPartition),
    ],
)
def test_what_is_not_the_changes_own_trace_is_refused(
    change: Change, codes: list[int], there: int, refusal: type[KafkaError]
) -> None:
    with pytest.raises(refusal):
        carry_out(change, codes, there)
