"""Markers reach every partition's leader, however often that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import NetworkException
from millrace.broker.transactions.markers import NO_LEADER, Marker, MarkerSender
from millrace.broker.transactions.values import ProducerIdentity
from tests.waiting import until_async

A, B, C = ("t", 0), ("t", 1), ("t", 2)
NONE = ErrorCode.none


def marker(*partitions, transactional_id="orders", producer_id=1) -> Marker:
    return Marker(transactional_id, ProducerIdentity(producer_id, 0), 5, True, frozenset(partitions))


class Cluster:
    """Leaders, what they answer, and what was sent to them."""

    def __init__(self) -> None:
        self.leaders: dict[tuple[str, int], int | None] = {A: 1, B: 1, C: 2}
        self.requests: list[tuple[int, list[Marker]]] = []
        self.answers: dict[int, list[object]] = {}
        self.gates: dict[int, asyncio.Event] = {}
        self.done: list[tuple[str, frozenset]] = []
        self.wanted = True
        self.sender = MarkerSender(
            lambda topic, partition: self.leaders[(topic, partition)],
            self.write,
            report=self.report,
            is_wanted=lambda marker: self.wanted,
            retry_seconds=0.001,
        )

    async def write(self, broker_id: int, markers: Sequence[Marker]):
        self.requests.append((broker_id, list(markers)))
        if broker_id in self.gates:
            await self.gates[broker_id].wait()
        planned = self.answers.get(broker_id)
        answer = planned.pop(0) if planned else {}
        if isinstance(answer, Exception):
            raise answer
        return [{p: answer.get(p, NONE) for p in marker.partitions} for marker in markers]

    def report(self, marker: Marker, partitions: frozenset) -> None:
        self.done.append((marker.transactional_id, partitions))

    def partitions_done(self) -> set:
        return {partition for _, partitions in self.done for partition in partitions}

    async def until(self, holds) -> None:
        await until_async(holds)


def run(scenario) -> None:
    async def main() -> None:
        cluster = Cluster()
        try:
            await scenario(cluster)
        finally:
            await cluster.sender.close()

    asyncio.run(main())


def test_each_leader_gets_its_share():
    async def scenario(cluster: Cluster) -> None:
        cluster.sender.send(marker(A, B, C))
        await cluster.until(lambda: cluster.partitions_done() == {A, B, C})
        assert sorted((broker, sorted(ms[0].partitions)) for broker, ms in cluster.requests) == [
            (1, [A, B]),
            (2, [C]),
        ]

    run(scenario)


def test_what_comes_up_while_a_request_is_under_way_goes_together():
    async def scenario(cluster: Cluster) -> None:
        cluster.gates[1] = asyncio.Event()
        cluster.sender.send(marker(A, transactional_id="first"))
        await cluster.until(lambda: len(cluster.requests) == 1)
        for number in range(5):
            cluster.sender.send(marker(A, transactional_id=f"next-{number}"))
        cluster.sender.send(marker(C, transactional_id="elsewhere"))
        await cluster.until(lambda: ("elsewhere", frozenset({C})) in cluster.done)
        cluster.gates[1].set()
        await cluster.until(lambda: len(cluster.done) == 7)
        assert [len(markers) for broker, markers in cluster.requests if broker == 1] == [1, 5]

    run(scenario)


@pytest.mark.parametrize(
    "error",
    [
        ErrorCode.not_leader_or_follower,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.request_timed_out,
        ErrorCode.kafka_storage_error,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.unknown_server_error,
    ],
)
def test_what_was_not_written_is_sent_again_to_the_leader_of_then(error):
    async def scenario(cluster: Cluster) -> None:
        cluster.answers[1] = [{A: error}]
        cluster.gates[1] = asyncio.Event()
        cluster.sender.send(marker(A, B))
        await cluster.until(lambda: len(cluster.requests) == 1)
        cluster.leaders[A] = 2
        cluster.gates[1].set()
        await cluster.until(lambda: cluster.partitions_done() == {A, B})
        assert cluster.done == [("orders", frozenset({B})), ("orders", frozenset({A}))]
        assert cluster.requests[-1][0] == 2
        assert cluster.requests[-1][1][0].partitions == {A}
        assert cluster.sender.retry_count >= 1

    run(scenario)


@pytest.mark.parametrize("failure", [NetworkException("gone"), RuntimeError("a defect")])
def test_a_broker_that_cannot_be_reached_is_asked_again(failure):
    async def scenario(cluster: Cluster) -> None:
        cluster.answers[1] = [failure, failure]
        cluster.sender.send(marker(A))
        await cluster.until(lambda: cluster.partitions_done() == {A})
        assert len(cluster.requests) == 3

    run(scenario)


def test_a_partition_without_a_leader_waits_for_one():
    async def scenario(cluster: Cluster) -> None:
        cluster.leaders[A] = NO_LEADER
        cluster.sender.send(marker(A))
        await asyncio.sleep(0.01)
        assert not cluster.requests
        assert cluster.sender.waiting_count == 1
        cluster.leaders[A] = 2
        await cluster.until(lambda: cluster.partitions_done() == {A})

    run(scenario)


def test_a_deleted_partition_needs_no_marker():
    async def scenario(cluster: Cluster) -> None:
        cluster.leaders[A] = None
        cluster.sender.send(marker(A))
        assert cluster.done == [("orders", frozenset({A}))]
        assert not cluster.requests

    run(scenario)


def test_a_partition_that_knows_a_later_epoch_is_done():
    async def scenario(cluster: Cluster) -> None:
        cluster.answers[1] = [{A: ErrorCode.invalid_producer_epoch}]
        cluster.sender.send(marker(A))
        await cluster.until(lambda: cluster.partitions_done() == {A})
        assert len(cluster.requests) == 1

    run(scenario)


def test_a_newer_coordinator_is_left_to_do_it():
    async def scenario(cluster: Cluster) -> None:
        cluster.answers[1] = [{A: ErrorCode.transaction_coordinator_fenced}]
        cluster.sender.send(marker(A, B))
        await cluster.until(lambda: len(cluster.requests) == 1)
        await asyncio.sleep(0.01)
        assert not cluster.done and len(cluster.requests) == 1
        assert cluster.sender.waiting_count == 0

    run(scenario)


def test_markers_that_nobody_wants_any_more_are_dropped():
    async def scenario(cluster: Cluster) -> None:
        cluster.answers[1] = [NetworkException("gone")] * 1_000
        cluster.sender.send(marker(A))
        await cluster.until(lambda: len(cluster.requests) >= 2)
        cluster.wanted = False
        await cluster.until(lambda: cluster.sender.waiting_count == 0)
        count = len(cluster.requests)
        await asyncio.sleep(0.01)
        assert len(cluster.requests) == count
        cluster.sender.send(marker(C))
        assert len(cluster.requests) == count

    run(scenario)
