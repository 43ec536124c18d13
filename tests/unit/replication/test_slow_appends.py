"""Large batches are written on a thread: who else appends waits, and a role changes before or after."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.errors import KafkaStorageError, NotEnoughReplicas, NotLeaderOrFollower
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication import slow_appends
from millrace.broker.replication.partition import PartitionState
from millrace.broker.replication.replica_manager import ACKS_ALL, ReplicaManager
from millrace.broker.replication.slow_appends import Outcome, is_large
from millrace.broker.server import produce_work
from millrace.broker.server.transaction_markers import MarkerWriter
from millrace.broker.storage.batch_validation import CheckedBatch
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry.metrics import BrokerMetrics
from millrace.broker.transactions.markers import Marker
from millrace.broker.transactions.values import ProducerIdentity
from tests.gated_writes import GatedWrites
from tests.stored_batches import batches_of
from tests.waiting import patience

TOPIC_ID = uuid.UUID(int=7)
LARGE = bytes(2_000)
PRODUCER = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}


def batch(value: bytes, **header: Any) -> memoryview:
    return memoryview(build_batch([Record(None, value, (), 1)], **header))


async def others_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> GatedWrites:
    monkeypatch.setattr(slow_appends, "LARGE_APPEND_SIZE", 1_000)
    return GatedWrites(monkeypatch, 1_000)


class Stage:
    def __init__(self, manager: ReplicaManager, logs: LogManager) -> None:
        self.manager = manager
        self.logs = logs

    async def apply(self, leader: int = 1, epoch: int = 0, partitions: int = 1) -> None:
        states = {number: PartitionState(leader, epoch, (1,), 1) for number in range(partitions)}
        await self.manager.hosted.apply_topic("t", TOPIC_ID, states, {})

    def append(self, value: bytes) -> int:
        return self.manager.append_now("t", 0, batch(value), 1)[0].base_offset

    async def begin(self, acks: int = 1, **header: Any) -> asyncio.Task[Outcome]:
        given = batch(LARGE, **header)
        budget = produce_work.budget_at_once()
        (checked,) = await self.manager.slow_appends.check([("t", 0, given)], budget)
        assert isinstance(checked, CheckedBatch)
        assert is_large(checked)
        return self.manager.slow_appends.begin(("t", 0), len(given), checked, acks)

    @property
    def headers(self) -> list[tuple[int, int, bool]]:
        """(offset, leader epoch, whether it is a marker) of each batch in the log."""
        log = self.logs.logs()["t", 0]
        found = [parse_header(stored) for stored in batches_of(log)]
        return [(each.base_offset, each.leader_epoch, each.is_control) for each in found]


@asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    logs = LogManager([folder], LogConfig())
    logs.start(0)
    manager = ReplicaManager(
        1, logs, LogConfig(), clock_ms=lambda: 1_000, is_known=lambda *_: True, metrics=BrokerMetrics()
    )
    try:
        yield Stage(manager, logs)
    finally:
        manager.close()
        logs.close(0)


def run(folder: Path, scenario: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with stage(folder) as on:
            await on.apply()
            await scenario(on)

    asyncio.run(main())


def test_whoever_appends_meanwhile_waits(tmp_path: Path, gated: GatedWrites) -> None:
    async def scenario(on: Stage) -> None:
        appends = on.manager.slow_appends
        appending = await on.begin()
        with pytest.raises(WouldBlock):  # from the very call on, before anything has run
            on.append(b"before its turn")
        await gated.one_has_begun()
        with pytest.raises(WouldBlock):
            on.append(b"before its turn")
        with pytest.raises(WouldBlock):
            await on.begin()
        waiting = asyncio.ensure_future(appends.settled(("t", 0)))
        deleting = asyncio.ensure_future(on.manager.delete_records("t", 0, 0))
        await others_turns()
        assert not waiting.done()
        assert not deleting.done()
        assert on.manager.read_now("t", 0, 0, 1 << 20, at_least_one=True).high_watermark == 0
        gated.may_go_on.set()
        appended, wait = await appending
        assert (appended.base_offset, wait) == (0, None)
        await waiting
        assert await deleting == 0
        assert on.append(b"after") == 1
        assert on.manager.read_now("t", 0, 0, 1 << 20, at_least_one=True).high_watermark == 2

    run(tmp_path, scenario)


def test_an_append_goes_on_when_nobody_waits_for_it_any_more(tmp_path: Path, gated: GatedWrites) -> None:
    """The client has gone; the thread has not."""

    async def scenario(on: Stage) -> None:
        handler = asyncio.ensure_future(asyncio.shield(await on.begin()))
        await gated.one_has_begun()
        handler.cancel()
        await asyncio.wait([handler])
        with pytest.raises(WouldBlock):
            on.append(b"before its turn")
        gated.may_go_on.set()
        await on.manager.slow_appends.settled(("t", 0))
        assert on.append(b"after") == 1

    run(tmp_path, scenario)


def test_a_role_changes_after_the_batch_is_in_the_log(tmp_path: Path, gated: GatedWrites) -> None:
    async def scenario(on: Stage) -> None:
        appending = await on.begin()
        await gated.one_has_begun()
        change = asyncio.ensure_future(on.apply(leader=2, epoch=1))
        await others_turns()
        assert not change.done()
        gated.may_go_on.set()
        assert (await appending)[0].base_offset == 0
        await change
        assert on.headers == [(0, 0, False)]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("leader", "header"), [(2, {}), (2, PRODUCER), (1, PRODUCER)], ids=["plain", "transactional", "leads on"]
)
def test_a_leadership_that_is_over_writes_nothing(
    tmp_path: Path, gated: GatedWrites, leader: int, header: dict[str, Any]
) -> None:
    """Nor what belongs to a transaction, where the same broker leads on: it was let in under the old one."""
    gated.may_go_on.set()

    async def scenario(on: Stage) -> None:
        local = on.manager.leader_of("t", 0)
        async with local.turn:  # a change of role that waits for a disk
            appending = await on.begin(**header)
            await asyncio.sleep(0)
            local.replica.apply(PartitionState(leader, 1, (1, 2), 2), 0, (1, 2), 0)
        with pytest.raises(NotLeaderOrFollower):
            await appending
        assert on.headers == []
        assert local.appending is None

    run(tmp_path, scenario)


def test_a_leader_that_leads_on_writes_what_waited(tmp_path: Path, gated: GatedWrites) -> None:
    """Refused, the batch behind it, of the same producer, would meet a gap in the sequence."""
    gated.may_go_on.set()
    idempotent = {**PRODUCER, "transactional": False}

    async def scenario(on: Stage) -> None:
        local = on.manager.leader_of("t", 0)
        async with local.turn:
            appending = await on.begin(**idempotent)
            await asyncio.sleep(0)
            local.replica.apply(PartitionState(1, 1, (1,), 2), 0, (1,), 0)
        assert (await appending)[0].base_offset == 0
        assert on.headers == [(0, 1, False)]

    run(tmp_path, scenario)


def test_a_log_that_is_gone_meanwhile_acknowledges_nothing(tmp_path: Path, gated: GatedWrites) -> None:
    async def scenario(on: Stage) -> None:
        appending = await on.begin()
        await gated.one_has_begun()
        on.manager.hosted._take_offline(tmp_path, "the disk is gone", [("t", 0)])
        gated.may_go_on.set()
        with pytest.raises((NotLeaderOrFollower, KafkaStorageError)):
            await appending

    run(tmp_path, scenario)


def test_too_few_in_sync_are_told_before_and_after_it_had_to_wait(tmp_path: Path, gated: GatedWrites) -> None:
    gated.may_go_on.set()

    async def scenario(on: Stage) -> None:
        local = on.manager.leader_of("t", 0)
        async with local.turn:
            appending = await on.begin(ACKS_ALL)
            await asyncio.sleep(0)
            local.replica.replicas, local.replica.min_insync_replicas = (1, 2), 2
        with pytest.raises(NotEnoughReplicas):
            await appending
        with pytest.raises(NotEnoughReplicas):
            await on.begin(ACKS_ALL)
        assert on.headers == []

    run(tmp_path, scenario)


class Gate:
    def ended(self, *_: object) -> None:
        """Not looked at here."""


def test_a_transaction_ends_behind_its_large_batch(tmp_path: Path, gated: GatedWrites) -> None:
    """Before it, the batch would open one that nobody ends. Its markers elsewhere wait for nothing: one that
    came late would end the producer's next transaction."""

    async def scenario(on: Stage) -> None:
        await on.apply(partitions=2)
        writer = MarkerWriter(on.manager, None, Gate(), lambda: 1_000)  # type: ignore[arg-type]
        elsewhere = on.manager.leader_of("t", 1)
        on.manager.append_now("t", 1, batch(b"v", **PRODUCER), 1)
        appending = await on.begin(**PRODUCER)
        await gated.one_has_begun()
        both = frozenset({("t", 0), ("t", 1)})
        marker = Marker("orders", ProducerIdentity(7, 0), 0, True, both)
        ending = asyncio.ensure_future(writer.write_here([marker]))
        await others_turns()
        assert not ending.done()
        assert elsewhere.last_stable_offset == 2
        gated.may_go_on.set()
        await appending
        ((one, other),) = [list(outcome.values()) for outcome in await ending]
        assert (one, other) == (0, 0)
        assert on.headers == [(0, 0, False), (1, 0, True)]
        assert on.manager.leader_of("t", 0).last_stable_offset == 2

    run(tmp_path, scenario)


def test_cold_reads_keep_no_large_append_waiting(tmp_path: Path, gated: GatedWrites) -> None:
    """They have threads of their own, and may have to wait for a disk that hangs."""
    gated.may_go_on.set()
    hangs = threading.Event()

    async def scenario(on: Stage) -> None:
        reads = [asyncio.ensure_future(on.manager.on_disk(hangs.wait, patience(30))) for _ in range(8)]
        await others_turns()
        try:
            async with asyncio.timeout(patience(20)):
                await (await on.begin())
        finally:
            hangs.set()
            await asyncio.gather(*reads)

    run(tmp_path, scenario)
