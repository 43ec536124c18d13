"""The mirror's own records under producer ids: what is late on its way never stands behind what is newer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.broker.errors import (
    ClusterAuthorizationFailed,
    InvalidTimestamp,
    NetworkException,
    NotEnoughReplicasAfterAppend,
    OutOfOrderSequence,
    RecordTooLarge,
    UnknownMemberId,
)
from millrace.broker.protocol.batch import NO_SEQUENCE, parse_header
from millrace.broker.protocol.records import read_records
from millrace.mirror.delivery.system_records import SystemRecords
from tests.unit.mirror.own_records_stage import OwnTarget
from tests.waiting import until_async as until

TOPIC = "millrace.offsets.m"
LOST = "taken, and the answer lost"
HELD = "taken, and not answered"


class Leader(OwnTarget):
    """A partition's log as Apache Kafka keeps it: of a producer id the newest sequence is known, and told as
    written where it was. `plan` is what becomes of the next requests: an error code, `LOST` or `HELD`; `late`
    is what a connection that is closed long since brings after all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *plan: int | str) -> None:
        super().__init__(monkeypatch)
        self.plan = list(plan)
        self.values: list[bytes | None] = []
        self.asked: list[tuple[int, int]] = []  # producer id and sequence of each request
        self.identities = 0
        self.gives_ids = True
        self._known: dict[int, tuple[int, int, int]] = {}  # producer id -> sequence, count, offset
        self.late: Callable[[], ProduceOutcome] | None = None

    async def new_identity(self) -> tuple[int, int]:
        if not self.gives_ids:
            raise ClusterAuthorizationFailed("no right to write idempotently")
        self.identities += 1
        return self.identities, 0

    def append(self, batch: bytearray) -> ProduceOutcome:
        header = parse_header(batch)
        producer_id, sequence = header.producer_id, header.base_sequence
        if producer_id >= 0:
            known = self._known.get(producer_id)
            if known is not None and sequence == known[0]:
                return ProduceOutcome(0, known[2])
            if sequence != (0 if known is None else known[0] + known[1]):
                return ProduceOutcome(OutOfOrderSequence.code)
            self._known[producer_id] = sequence, header.record_count, len(self.values)
        offset = len(self.values)
        self.values += [record.value for record in read_records(batch)]
        return ProduceOutcome(0, offset)

    async def produce(self, _node: int, batches: dict[Any, Any]) -> dict[Any, ProduceOutcome]:
        ((where, batch),) = batches.items()
        header = parse_header(batch)
        self.asked.append((header.producer_id, header.base_sequence))
        fate = self.plan.pop(0) if self.plan else 0
        if isinstance(fate, int) and fate:
            return {where: ProduceOutcome(fate)}
        taken = bytearray(batch)
        if fate == "late":
            self.late = lambda: self.append(taken)
            raise NetworkException("the connection is lost")
        outcome = self.append(taken)
        if fate == LOST:
            raise NetworkException("the connection is lost")
        if fate == HELD:
            await asyncio.Event().wait()
        return {where: outcome}


def write(leader: Leader, *batches: list[bytes]) -> list[int]:
    """The ends that are told."""

    async def story() -> list[int]:
        cluster: Any = leader
        records = SystemRecords(cluster, lambda: 1_000, 1)
        return [
            await records.write(TOPIC, [(b"k", value) for value in batch], configs={}) for batch in batches
        ]

    return asyncio.run(story())


@pytest.mark.parametrize("fate", [LOST, NotEnoughReplicasAfterAppend.code])
def test_after_an_unknown_outcome_the_same_sequence_goes_again(
    fate: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = Leader(monkeypatch, 0, fate)
    assert write(leader, [b"1", b"2"], [b"3"], [b"4"]) == [2, 3, 4]
    assert leader.values == [b"1", b"2", b"3", b"4"]
    assert leader.asked == [(1, 0), (1, 2), (1, 2), (1, 3)]


def test_what_is_late_on_its_way_does_not_come_behind_what_is_newer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest record of a key wins: an older chunk of the offset map in the place of a newer one says of
    offsets that were carried that they were not."""
    leader = Leader(monkeypatch, "late")
    write(leader, [b"older"], [b"newer"])
    assert leader.late is not None
    leader.late()
    assert leader.values == [b"older", b"newer"]


@pytest.mark.parametrize("code", [RecordTooLarge.code, InvalidTimestamp.code])
def test_refused_after_an_unknown_outcome_its_sequence_is_never_used_again(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next batch is taken for the one that was written."""
    leader = Leader(monkeypatch, LOST, code)
    write(leader, [b"1", b"2"], [b"3"])
    assert leader.values[-3:] == [b"1", b"2", b"3"]
    assert leader.asked[2] == (2, 0)


def test_cancelled_write_leaves_its_sequence_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to the same records either: they would be told the place of those that were written before."""
    leader = Leader(monkeypatch, HELD)

    async def story() -> int:
        cluster: Any = leader
        records = SystemRecords(cluster, lambda: 1_000, 1)
        first = asyncio.create_task(records.write(TOPIC, [(b"k", b"barrier")], configs={}))
        await until(lambda: bool(leader.values))
        first.cancel()
        await asyncio.wait([first])
        leader.values.append(b"of another")
        return await records.write(TOPIC, [(b"k", b"barrier")], configs={})

    assert asyncio.run(story()) == 3
    assert leader.values == [b"barrier", b"of another", b"barrier"]


def test_leave_to_write_is_asked_for_before_each_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may write no more finds that out in the middle of his tries, and leaves no sequence to others."""
    leader = Leader(monkeypatch, LOST, LOST)
    asked = 0

    def permit() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise UnknownMemberId("lost")

    async def story() -> int:
        cluster: Any = leader
        records = SystemRecords(cluster, lambda: 1_000, 1)
        with pytest.raises(UnknownMemberId):
            await records.write(TOPIC, [(b"k", b"1")], configs={}, permit=permit)
        return await records.write(TOPIC, [(b"k", b"2")], configs={}, permit=permit)

    assert asyncio.run(story()) == 2
    assert leader.values == [b"1", b"2"]
    assert (asked, leader.asked) == (4, [(1, 0), (2, 0), (2, 0)])


def test_sequence_that_the_target_does_not_know_any_more_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = Leader(monkeypatch, 0, OutOfOrderSequence.code)
    assert write(leader, [b"1"], [b"2"]) == [1, 2]
    assert leader.asked == [(1, 0), (1, 1), (2, 0)]


def test_each_partition_has_its_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(monkeypatch)
    leader.partitions = 2

    async def story() -> None:
        cluster: Any = leader
        records = SystemRecords(cluster, lambda: 1_000, 1)
        for partition in (0, 1, 0, 1):
            await records.write(TOPIC, [(b"k", b"v")], partition=partition, partitions=2, configs={})

    asyncio.run(story())
    assert leader.asked == [(1, 0), (2, 0), (1, 1), (2, 1)]


def test_who_may_not_write_idempotently_writes_without_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Apache Kafka 2.8 it is a right of its own, which a mirror with transactions does not need."""
    leader = Leader(monkeypatch)
    leader.gives_ids = False
    assert write(leader, [b"1"], [b"2"]) == [1, 2]
    assert leader.asked == [(-1, NO_SEQUENCE)] * 2
