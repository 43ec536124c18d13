"""Markers whose end is told late: another partition of the same request was slow, and the transaction's
coordinator has had them written again meanwhile, by another request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.system_topics import OFFSETS_TOPIC
from millrace.broker.replication.local_partition import Appended
from millrace.broker.server.transaction_markers import MarkerWriter
from millrace.broker.transactions.markers import Marker
from millrace.broker.transactions.values import ProducerIdentity
from tests.unit.groups.coordinator_bench import run
from tests.unit.groups.test_transactional_offsets import PARTITION, TransactionalBench

SLOW = ("slow", 0)


class Partitions:
    """Stands for the replica manager: the offsets topic in memory, and a partition whose followers take as
    long as the test wants."""

    def __init__(self, offsets_log: Any) -> None:
        self._offsets_log = offsets_log
        self.slow_appends = SimpleNamespace(is_under_way=lambda _key: False)
        self.followed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def append_now(
        self, topic: str, partition: int, batch: memoryview, acks: int, origin: str
    ) -> tuple[Appended, asyncio.Future[None] | None]:
        if topic != OFFSETS_TOPIC:
            return Appended(0, 0, -1, 0, False), self.followed
        base_offset, committed = self._offsets_log.append_now(partition, bytes(batch))
        return Appended(base_offset, base_offset, -1, 0, False), committed


class Gate:
    def ended(self, partition: Any, producer_id: int) -> None:
        """Not looked at here."""


def marker(producer_id: int, partition: Any, coordinator_epoch: int, *, committed: bool = True) -> Marker:
    producer = ProducerIdentity(producer_id, 0)
    return Marker("", producer, coordinator_epoch, committed, frozenset({partition}))


@pytest.mark.parametrize("moves_meanwhile", [False, True])
def test_a_marker_that_is_told_late_decides_on_no_offsets_of_the_next_transaction(
    offsets_log: Any, moves_meanwhile: bool
) -> None:
    async def scenario() -> None:
        bench = await TransactionalBench(offsets_log).start()
        partitions: Any = Partitions(offsets_log)
        gate: Any = Gate()

        def write(*markers: Marker) -> Any:
            return MarkerWriter(partitions, bench.groups, gate, lambda: 0).write_here(markers)

        own = (OFFSETS_TOPIC, PARTITION)
        await bench.commit_in_transaction(5)
        # One request holds the marker and another producer's, whose partition is slow.
        first = asyncio.ensure_future(write(marker(7, own, 1), marker(8, SLOW, 1)))
        await asyncio.sleep(0)
        # The transaction's coordinator is another one by now, and has it written again, alone.
        (outcome,) = await write(marker(7, own, 2))
        assert outcome == {own: ErrorCode.none}
        assert bench.fetch(stable=True) == 5
        # So the producer goes on.
        await bench.commit_in_transaction(9)
        if moves_meanwhile:
            loading = asyncio.ensure_future(bench.groups.load(PARTITION))
            await asyncio.sleep(0)
            partitions.followed.set_result(None)
            await first
            await loading
        else:
            partitions.followed.set_result(None)
            await first
        assert bench.fetch() == 5, "the next transaction is still open"
        assert bench.fetch(stable=True) is ErrorCode.unstable_offset_commit
        await write(marker(7, own, 2, committed=False))
        assert bench.fetch(stable=True) == 5, "and is aborted"
        await bench.commit_in_transaction(11)
        await write(marker(7, own, 2))
        assert bench.fetch(stable=True) == 11

    run(scenario())
