"""The replica manager over real logs in a temporary folder."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.errors import (
    KafkaError,
    KafkaStorageError,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication import high_watermarks, hosting, off_loop
from millrace.broker.replication.local_partition import LocalPartition, MustReadCold, PartitionRead
from millrace.broker.replication.partition import PartitionState, Replica
from millrace.broker.replication.replica_manager import ACKS_ALL, ReplicaManager
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.log import Log, LogRead
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.storage.segment import Segment
from millrace.broker.telemetry.metrics import BrokerMetrics

TOPIC_ID = uuid.UUID(int=7)
Scenario = Callable[[ReplicaManager], Awaitable[None]]


def batch(*values: bytes, **header: Any) -> memoryview:
    records = [Record(key=None, value=v, headers=(), timestamp_ms=1, offset=n) for n, v in enumerate(values)]
    return memoryview(build_batch(records, **header))


def led(epoch: int = 0, leader: int = 1) -> dict[int, PartitionState]:
    return {0: PartitionState(leader, epoch, (1,), 1)}


def run(tmp_path: Path, scenario: Scenario, **options: str) -> None:
    async def main() -> None:
        logs = LogManager([tmp_path], LogConfig())
        logs.start(0)
        manager = ReplicaManager(
            1,
            logs,
            LogConfig(),
            clock_ms=lambda: 1_000,
            is_known=lambda topic, _partition: topic == "elsewhere",
            metrics=BrokerMetrics(),
            **options,  # type: ignore[arg-type]
        )
        try:
            await scenario(manager)
        finally:
            manager.close()
            logs.close(0)

    asyncio.run(main())


def append(manager: ReplicaManager, *values: bytes, acks: int = 1) -> int:
    return manager.append_now("t", 0, batch(*values), acks)[0].base_offset


def test_leader_appends_and_serves_up_to_the_high_watermark(tmp_path: Path) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        assert [append(manager, b"a", b"b"), append(manager, b"c", acks=ACKS_ALL)] == [0, 2]
        read = manager.read_now("t", 0, 0, 1 << 20, at_least_one=True)
        assert (read.high_watermark, read.last_stable_offset, read.log_start_offset) == (3, 3, 0)
        assert len(read.records) == len(batch(b"a", b"b")) + len(batch(b"c"))
        batches = [bytes(view) async for view in manager.read_all("t", 0)]
        assert b"".join(batches) == bytes(read.records)

    run(tmp_path, scenario)


def test_reader_of_committed_data_stops_at_an_open_transaction_and_is_told_of_aborted_ones(
    tmp_path: Path,
) -> None:
    def offsets(found: PartitionRead) -> list[int]:
        return [header.base_offset for _, header in iterate_batches(memoryview(found.records))]

    async def scenario(manager: ReplicaManager) -> None:
        def read(*, read_committed: bool) -> PartitionRead:
            return manager.read_now("t", 0, 0, 1 << 20, at_least_one=True, read_committed=read_committed)

        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        append(manager, b"before")
        producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
        manager.append_now("t", 0, batch(b"of the transaction", **producer), 1)
        append(manager, b"behind")
        assert offsets(read(read_committed=False)) == [0, 1, 2]
        committed = read(read_committed=True)
        assert (offsets(committed), committed.last_stable_offset, committed.aborted) == ([0], 1, ())
        marker = memoryview(build_marker(7, 0, 0, False, 1_000))
        manager.append_now("t", 0, marker, 1, "internal")
        ended = read(read_committed=True)
        assert (offsets(ended), ended.aborted) == ([0, 1, 2, 3], ((7, 1),))
        assert read(read_committed=False).aborted == ()

    run(tmp_path, scenario)


def test_what_a_transaction_holds_back_is_counted_where_followers_are_waited_for_too(tmp_path: Path) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {}, {0: (1, 2)})

        def appended(data: bytes | bytearray) -> list[tuple[int, int | None]]:
            told.clear()
            manager.append_now("t", 0, memoryview(bytearray(data)), 1, "internal")
            return list(told)

        told: list[tuple[int, int | None]] = []
        manager.waiting_fetches.appended = (  # type: ignore[method-assign]
            lambda _key, size, stable_size=None: told.append((size, stable_size))
        )
        open_batch = build_batch(
            [Record(None, b"x" * 1_000, (), 1)],
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
            transactional=True,
        )
        marker = build_marker(7, 0, 1, True, 1)
        plain = bytes(batch(b"v"))
        assert appended(plain) == [(len(plain), len(plain))]
        assert appended(open_batch) == [(len(open_batch), 0)]
        assert appended(plain) == [(len(plain), 0)]
        assert appended(marker) == [(len(marker), len(open_batch) + len(plain) + len(marker))]
        assert appended(plain) == [(len(plain), len(plain))]

    run(tmp_path, scenario)


def test_partition_that_is_not_here_gets_the_error_that_fits(tmp_path: Path) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        with pytest.raises(UnknownTopicOrPartition):
            append(manager, b"x")
        with pytest.raises(NotLeaderOrFollower):
            manager.append_now("elsewhere", 0, batch(b"x"), 1)
        await manager.hosted.apply_topic("t", TOPIC_ID, led(leader=2), {})
        with pytest.raises(NotLeaderOrFollower):
            append(manager, b"x")
        with pytest.raises(NotLeaderOrFollower):
            manager.read_now("t", 0, 0, 1, at_least_one=True)

    run(tmp_path, scenario)


def test_too_few_in_sync_replicas_refuse_acks_all_before_anything_is_written(tmp_path: Path) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {"min.insync.replicas": "2"}, {0: (1, 2)})
        with pytest.raises(NotEnoughReplicas):
            append(manager, b"x", acks=ACKS_ALL)
        assert append(manager, b"y", acks=1) == 0

    run(tmp_path, scenario)


def test_leadership_is_told_once_when_it_comes_and_when_it_goes(tmp_path: Path) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        told: list[tuple[str, str, int]] = []
        manager.listeners.gained.append(lambda topic, number: told.append(("gained", topic, number)))
        manager.listeners.lost.append(lambda topic, number: told.append(("lost", topic, number)))
        for states in (led(0), led(0), led(1, leader=-1), led(1, leader=-1), led(2)):
            await manager.hosted.apply_topic("t", TOPIC_ID, states, {})
        await manager.hosted.remove_topic("t")
        assert [kind for kind, _, _ in told] == ["gained", "lost", "gained", "lost"]

    run(tmp_path, scenario)


def test_leadership_that_was_away_between_two_looks_is_told_as_lost_and_gained(tmp_path: Path) -> None:
    """Another broker may have led in the epoch that is missing: what it wrote a coordinator has to read, and
    what it told others outranks what is told in the epoch before."""

    async def scenario(manager: ReplicaManager) -> None:
        told: list[str] = []
        manager.listeners.gained.append(lambda _topic, _number: told.append("gained"))
        manager.listeners.lost.append(lambda _topic, _number: told.append("lost"))
        for epoch, expected in ((0, ["gained"]), (1, []), (2, []), (4, ["lost", "gained"]), (5, [])):
            told.clear()
            await manager.hosted.apply_topic("t", TOPIC_ID, led(epoch), {})
            assert told == expected, epoch

    run(tmp_path, scenario)


def test_new_epoch_is_on_record_for_the_next_reader(tmp_path: Path) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(0), {})
        append(manager, b"a", b"b")
        await manager.hosted.apply_topic("t", TOPIC_ID, led(4), {})
        append(manager, b"c")
        assert manager.epoch_end("t", 0, 0) == (0, 2)
        assert manager.epoch_end("t", 0, 4) == (4, 3)
        parted = manager.read_now("t", 0, 3, 1, at_least_one=True, last_fetched_epoch=0)
        assert parted.diverging == (0, 2)

    run(tmp_path, scenario)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_consumer_of_a_leader_epoch_that_is_not_known_here_reads_nothing(tmp_path: Path, offset: int) -> None:
    """The log was restored from a backup, and went on: what it has behind `offset` is something else than
    what followed there. A reader that names no epoch asks for no comparison."""

    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(4), {})
        append(manager, b"a", b"b", b"c")
        with pytest.raises(OffsetOutOfRange, match="leader epoch 7 is not known here"):
            manager.read_now("t", 0, offset, 1, at_least_one=True, last_fetched_epoch=7)
        for known in (4, -1):
            read = manager.read_now("t", 0, offset, 1, at_least_one=True, last_fetched_epoch=known)
            assert (read.diverging, bool(read.records)) == (None, offset < 3)

    run(tmp_path, scenario)


def test_others_have_their_turn_while_a_topic_of_many_partitions_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(off_loop, "TURN_SECONDS", -1.0)

    async def scenario(manager: ReplicaManager) -> None:
        states = dict.fromkeys(range(5), PartitionState(1, 0, (1,), 1))
        await manager.hosted.apply_topic("t", TOPIC_ID, states, {})
        turns, anew = 0, dict.fromkeys(states, PartitionState(1, 1, (1,), 1))
        applied = asyncio.ensure_future(manager.hosted.apply_topic("t", TOPIC_ID, anew, {}))
        while not applied.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 5
        epochs = [manager.hosted.partitions["t", number].replica.leader_epoch for number in states]
        assert epochs == [1] * 5

    run(tmp_path, scenario)


def test_a_partition_that_goes_is_freed_at_once_with_all_that_it_had(tmp_path: Path) -> None:
    """In a cycle it would stay for ever: what was made to stay is not looked through by the garbage collector
    (`telemetry/garbage.py`). And its files would stay open."""

    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        append(manager, b"a")
        assert {each.__name__ for each in alive()} == {"LocalPartition", "Replica", "Log", "Segment"}
        await manager.hosted.remove_topic("t")
        await asyncio.sleep(0)
        assert alive() == []

    def alive() -> list[type]:
        return [type(it) for it in gc.get_objects() if type(it) in (LocalPartition, Replica, Log, Segment)]

    gc.collect()  # of tests before
    gc.disable()
    try:
        run(tmp_path, scenario)
    finally:
        gc.enable()


def test_what_partitions_leave_to_the_garbage_collector_is_looked_at_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr(hosting, "AT_ONCE", 2)

    async def scenario(manager: ReplicaManager) -> None:
        monkeypatch.setattr(
            hosting.garbage, "keep", lambda count: kept.append((count, len(manager.hosted.partitions)))
        )
        for count in (5, 6):
            states = dict.fromkeys(range(count), PartitionState(1, 0, (1,), 1))
            await manager.hosted.apply_topic("t", TOPIC_ID, states, {})
        # Was in sync, and its log is nowhere: not made, now or later.
        gone = {0: PartitionState(1, 5, (1,), 1)}
        monkeypatch.setattr(manager.hosted._logs, "create_all", refused)
        await manager.hosted.apply_topic("u", uuid.UUID(int=9), gone, {})
        assert sorted(number for _, number in manager.hosted.partitions) == [0, 1, 2, 3, 4, 5]

    def refused(wanted: Any, *_: object, **__: object) -> dict[Any, KafkaStorageError]:
        return {key: KafkaStorageError(f"{key} may lie in a folder that is offline") for key in wanted}

    run(tmp_path, scenario)
    each = hosting.OBJECTS_OF_PARTITION
    assert kept == [(2 * each, 2), (2 * each, 4), (each, 5), (each, 6), (0, 6)]


def test_topic_of_another_id_begins_empty(tmp_path: Path) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        append(manager, b"old")
        await manager.hosted.apply_topic("t", uuid.UUID(int=8), led(), {})
        assert append(manager, b"new") == 0

    run(tmp_path, scenario)


def test_flush_messages_is_awaited_and_never_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    threads: list[str] = []
    flush = Log.flush

    def noted(log: Log, now_ms: int) -> None:
        threads.append(threading.current_thread().name)
        flush(log, now_ms)

    monkeypatch.setattr(Log, "flush", noted)

    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {"flush.messages": "2"})
        _, first = manager.append_now("t", 0, batch(b"a"), 1)
        _, second = manager.append_now("t", 0, batch(b"b"), 1)
        _, third = manager.append_now("t", 0, batch(b"c"), 1)
        assert first is None
        assert second is not None and third is not None
        await second
        await third
        assert manager.leader_of("t", 0).log.recovery_point == 3

    run(tmp_path, scenario)
    assert threads and all(name.startswith("flush") for name in threads[:2])


def test_flushed_visibility_hides_records_until_they_are_durable(tmp_path: Path) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        append(manager, b"a")
        hidden = manager.read_now("t", 0, 0, 1, at_least_one=True)
        assert (hidden.high_watermark, bytes(hidden.records)) == (0, b"")
        reader = asyncio.ensure_future(manager.waiting_fetches.wait([("t", 0)], 1, 10))
        await asyncio.sleep(0)
        appended = await manager.append(("t", 0), batch(b"b"))
        assert appended.base_offset == 1
        assert await reader
        assert manager.read_now("t", 0, 0, 1, at_least_one=True).high_watermark == 2

    run(tmp_path, scenario, visibility="flushed")


def test_failed_flush_fails_those_who_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {"flush.messages": "1"})

        def broken(_log: Log, _now_ms: int) -> None:
            raise KafkaStorageError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(Log, "flush", broken)
            with pytest.raises(KafkaError, match="the disk is gone"):
                await manager.append(("t", 0), batch(b"a"), origin="client")

    run(tmp_path, scenario)


@pytest.mark.parametrize(("visibility", "config"), [("flushed", {}), ("replicated", {"flush.messages": "1"})])
def test_refused_flush_is_told_to_clients_and_does_not_end_the_brokers_own_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visibility: str, config: dict[str, str]
) -> None:
    """They are in the log and will be committed, so what a coordinator does upon that must follow."""

    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), config)
        with monkeypatch.context() as patch:
            patch.setattr(Segment, "write_index_tails", full)
            _, of_client = manager.append_now("t", 0, batch(b"a"), ACKS_ALL)
            _, internal = manager.append_now("t", 0, batch(b"b"), ACKS_ALL, "internal")
            assert of_client is not None and internal is not None
            with pytest.raises(KafkaStorageError):
                await of_client
            await manager.flush_due()
            assert visibility != "flushed" or not internal.done()
        assert manager.leader_of("t", 0).log.failure is None
        await manager.flush_due()
        await internal
        assert manager.high_watermark(("t", 0)) == 2

    def full(_segment: Segment) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run(tmp_path, scenario, visibility=visibility)


@pytest.mark.parametrize(("visibility", "config"), [("flushed", {}), ("replicated", {"flush.messages": "1"})])
def test_failed_sync_ends_the_brokers_own_appends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visibility: str, config: dict[str, str]
) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), config)
        monkeypatch.setattr(os, "fdatasync", fails)
        with pytest.raises(KafkaStorageError):
            await manager.append(("t", 0), batch(b"a"))

    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    run(tmp_path, scenario, visibility=visibility)


def test_after_a_failed_flush_nothing_is_acknowledged_and_no_mark_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports a lost page once: a second flush would succeed, and prove nothing."""

    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        await manager.append(("t", 0), batch(b"durable"))
        local = manager.leader_of("t", 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails)
            with pytest.raises(KafkaStorageError):
                await manager.append(("t", 0), batch(b"lost"))
        with pytest.raises(KafkaStorageError):
            manager.append_now("t", 0, batch(b"next"), ACKS_ALL)
        await manager.flush_due()
        assert (local.log.recovery_point, local.replica.high_watermark) == (1, 1)

    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    run(tmp_path, scenario, visibility="flushed")


def test_disk_that_takes_no_high_watermarks_is_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        append(manager, b"a")
        for number, failed in ((errno.ENOSPC, []), (errno.EIO, [tmp_path])):
            with monkeypatch.context() as patch:
                patch.setattr(high_watermarks, "write_offsets", fails_by(number))
                await manager.checkpoint_high_watermarks()
            assert list(manager.failed_folders) == failed
        with pytest.raises(KafkaStorageError):
            append(manager, b"b")

    def fails_by(number: int) -> Callable[..., None]:
        def fails(*_: object) -> None:
            raise OSError(number, "failed")

        return fails

    run(tmp_path, scenario)


def test_cold_read_is_left_to_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        append(manager, b"a")
        warm = Log.read

        def cold(log: Log, *arguments: object, may_block: bool = True, **named: object) -> object:
            if not may_block:
                raise WouldBlock("cold")
            return warm(log, *arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(Log, "read", cold)
        with pytest.raises(MustReadCold) as caught:
            manager.read_now("t", 0, 0, 1 << 20, at_least_one=True)
        read = await caught.value.read()
        assert len(read.records) == len(batch(b"a"))

    run(tmp_path, scenario)


@pytest.mark.safety
@pytest.mark.parametrize("is_cold", [False, True], ids=["on the loop", "on a thread"])
def test_no_aborted_record_comes_without_its_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cold: bool
) -> None:
    """Retention comes between the two."""

    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {"segment.bytes": "100"})
        producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
        manager.append_now("t", 0, batch(b"of the transaction", **producer), 1)
        manager.append_now("t", 0, memoryview(build_marker(7, 0, 0, False, 1_000)), 1, "internal")
        append(manager, b"behind")
        warm = Log.read

        def read(log: Log, *arguments: Any, may_block: bool = True, **named: Any) -> LogRead:
            if is_cold and not may_block:
                raise WouldBlock("cold")
            found = warm(log, *arguments, **named)
            assert log.delete_old_segments(LogConfig().retention_ms * 2)
            return found

        monkeypatch.setattr(Log, "read", read)
        asked = {"at_least_one": True, "read_committed": True}
        with pytest.raises(OffsetOutOfRange):
            try:
                manager.read_now("t", 0, 0, 1 << 20, **asked)
            except MustReadCold as cold:
                await cold.read()

    run(tmp_path, scenario)


def test_deleted_topic_takes_its_damaged_partition_with_it(tmp_path: Path) -> None:
    """Otherwise a topic made anew in its name would stay offline."""
    folder = tmp_path / "t-0"
    folder.mkdir()
    (folder / f"{0:020d}.log").write_bytes(b"no batch, and the folder is marked clean")
    (tmp_path / ".kafka_cleanshutdown").write_bytes(b"{}")

    async def scenario(manager: ReplicaManager) -> None:
        await manager.hosted.apply_topic("t", TOPIC_ID, led(), {})
        with pytest.raises(KafkaError):
            manager.append_now("t", 0, batch(b"a"), ACKS_ALL)
        await manager.hosted.remove_topic("t")
        await manager.hosted.apply_topic("t", uuid.UUID(int=8), led(), {})
        assert manager.append_now("t", 0, batch(b"a"), ACKS_ALL)[0].base_offset == 0

    run(tmp_path, scenario)
