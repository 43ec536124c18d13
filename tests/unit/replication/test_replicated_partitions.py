"""The replica manager as leader of followers: real logs, followers played by their fetches."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import (
    InconsistentTopicId,
    KafkaStorageError,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    RequestTimedOut,
    UnknownLeaderEpoch,
)
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication import hosting
from millrace.broker.replication.in_sync_sets import StateConflict
from millrace.broker.replication.local_partition import (
    FollowerFetch,
    LocalPartition,
    MustReadCold,
    PartitionRead,
)
from millrace.broker.replication.partition import PartitionState
from millrace.broker.replication.replica_fetcher import FetchLimits
from millrace.broker.replication.replica_manager import ACKS_ALL, ReplicaManager
from millrace.broker.server.internal_topics import COMMITTED_POLL_SECONDS, InternalTopicLog
from millrace.broker.storage.log_config import UNREADABLE, LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry.metrics import BrokerMetrics
from tests.waiting import patience, until_async

TOPIC_ID = uuid.UUID(int=7)
REPLICAS = {0: (1, 2, 3)}
LAG_MS = 1_000


def batch(*values: bytes) -> memoryview:
    records = [Record(key=None, value=v, headers=(), timestamp_ms=1, offset=n) for n, v in enumerate(values)]
    return memoryview(build_batch(records))


class Bench:
    """A manager of broker 1, its clock, and the ZooKeeper that it writes to."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now_ms = 0
        self.logs = LogManager([folder], LogConfig())
        self.logs.start(0)
        self.metrics = BrokerMetrics()
        self.manager = ReplicaManager(
            1,
            self.logs,
            LogConfig(),
            clock_ms=lambda: 1_000,
            is_known=lambda _topic, _partition: True,
            metrics=self.metrics,
            max_lag_ms=LAG_MS,
            steady_ms=lambda: self.now_ms,
            **options,
        )
        self.written: list[PartitionState] = []
        self.write_gate = asyncio.Event()
        self.write_gate.set()
        self.conflict = False
        self.manager.join(self._write_state, None, FetchLimits(), lambda _task: None)  # type: ignore[arg-type]
        self.manager.set_brokers({1: 10, 2: 20, 3: 30}, own_epoch=-1)

    async def _write_state(
        self,
        topic: str,
        topic_id: uuid.UUID,
        partition: int,
        state: PartitionState,
        is_wanted: Callable[[], bool],
    ) -> int:
        assert (topic, topic_id, partition) == ("t", TOPIC_ID, 0)
        await self.write_gate.wait()
        if self.conflict or not is_wanted():
            raise StateConflict("another state stands")
        self.written.append(state)
        return state.version + 1

    async def lead(self, *isr: int, epoch: int = 0, version: int = 0, **config: str) -> None:
        named = {key.replace("_", "."): value for key, value in config.items()}
        state = PartitionState(1, epoch, isr or (1, 2, 3), 1, version)
        await self.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, named, REPLICAS)

    def append(self, *values: bytes, acks: int = ACKS_ALL) -> asyncio.Future[None] | None:
        return self.manager.append_now("t", 0, batch(*values), acks)[1]

    def fetch(
        self,
        follower: int,
        offset: int,
        *,
        epoch: int = 0,
        start: int = 0,
        last: int = -1,
        topic_id: uuid.UUID | None = None,
    ) -> PartitionRead:
        return self.manager.read_now(
            "t",
            0,
            offset,
            1 << 20,
            at_least_one=True,
            current_leader_epoch=epoch,
            last_fetched_epoch=last,
            follower=FollowerFetch(follower, follower * 10, start),
            topic_id=topic_id,
        )

    @property
    def high_watermark(self) -> int:
        return self.manager.leader_of("t", 0).replica.high_watermark


def run(folder: Path, scenario: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        bench = Bench(folder, **options)
        try:
            async with asyncio.timeout(patience(120)):
                await scenario(bench)
        finally:
            await bench.manager.leave()
            bench.manager.close()
            bench.logs.close(0)

    asyncio.run(main())


@pytest.mark.parametrize("is_opened_before", [True, False])
def test_a_log_is_hosted_with_its_own_settings_from_the_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_opened_before: bool
) -> None:
    """Retention, on its thread, looks at whatever is hosted; a start opens logs with the defaults."""
    of_hosted: list[LogConfig] = []

    class Noted(LocalPartition):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            of_hosted.append(self.log.config)

    async def scenario(bench: Bench) -> None:
        if is_opened_before:
            bench.logs.create(("t", 0), topic_id=TOPIC_ID)
        monkeypatch.setattr(hosting, "LocalPartition", Noted)
        await bench.lead(1, retention_ms="-1")
        assert [config.retention_ms for config in of_hosted] == [-1]

    run(tmp_path, scenario)


def test_settings_that_cannot_be_used_keep_everything(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, cleanup_policy="compact", retention_ms="for ever")
        config = bench.manager.leader_of("t", 0).log.config
        assert (config.retention_ms, config.retention_bytes, config.is_compacted) == (-1, -1, False)

    run(tmp_path, scenario)


def test_a_setting_that_cannot_be_used_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, min_insync_replicas="2", flush_messages="7", segment_bytes="a lot")
        local = bench.manager.leader_of("t", 0)
        assert (local.replica.min_insync_replicas, local.flush_messages) == (2, 7)
        assert local.log.config.retention_ms == -1

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    "settings",
    [
        {UNREADABLE: "/config/topics/t in ZooKeeper: no JSON"},
        {"min.insync.replicas": "two", "flush.messages": "always"},
    ],
    ids=["unreadable", "unusable"],
)
def test_what_protects_acknowledged_records_is_at_its_strictest_while_it_is_not_known(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, **{name.replace(".", "_"): value for name, value in settings.items()})
        local = bench.manager.leader_of("t", 0)
        assert (local.replica.effective_min_insync, local.flush_messages) == (len(local.replica.replicas), 1)
        await bench.lead(1, 2, epoch=1)
        assert (local.replica.effective_min_insync, local.log.config) == (1, hosting._of_log(LogConfig()))

    run(tmp_path, scenario)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_acks_all_is_answered_when_the_whole_in_sync_set_has_it(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        assert bench.append(b"one", acks=1) is None
        wait = bench.append(b"two", b"three")
        assert wait is not None
        assert len(bench.fetch(2, 0).records) > 0  # a follower sees what no consumer does
        assert bench.manager.read_now("t", 0, 0, 99, at_least_one=True).records == b""
        bench.fetch(2, 3)
        assert not wait.done()
        bench.fetch(3, 1)
        assert bench.high_watermark == 1
        assert not wait.done()
        consumer = asyncio.ensure_future(bench.manager.waiting_fetches.wait([("t", 0)], 1, 10))
        await turns()
        bench.fetch(3, 3)
        assert wait.done() and wait.exception() is None
        assert await consumer

    run(tmp_path, scenario)


def test_follower_that_waits_is_woken_by_the_append(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        follower = asyncio.ensure_future(bench.manager.waiting_followers.wait([("t", 0)], 1, 10))
        consumer = asyncio.ensure_future(bench.manager.waiting_fetches.wait([("t", 0)], 1, 10))
        await turns()
        bench.append(b"x", acks=1)
        assert await follower
        assert not consumer.done()
        consumer.cancel()

    run(tmp_path, scenario)


def test_second_look_of_a_fetch_says_nothing_new_of_the_follower(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2)
        bench.fetch(2, 0)
        bench.now_ms = 700
        bench.manager.read_now(
            "t", 0, 0, 9, at_least_one=True, current_leader_epoch=0, follower=FollowerFetch(2, 20, 0, False)
        )
        assert bench.manager.leader_of("t", 0).replica.followers[2].fetched_ms == 0

    run(tmp_path, scenario)


def test_in_sync_set_that_becomes_too_small_fails_what_was_appended(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(min_insync_replicas="3")
        wait = bench.append(b"x")
        assert wait is not None
        bench.fetch(2, 1)
        bench.now_ms = LAG_MS + 1
        bench.fetch(2, 1)
        await bench.manager.check_in_sync_sets()
        with pytest.raises(NotEnoughReplicasAfterAppend):
            await asyncio.wait_for(asyncio.shield(wait), patience())
        assert [state.isr for state in bench.written] == [(1, 2)]
        assert bench.metrics.isr_shrinks == 1
        assert (bench.manager.under_replicated_count, bench.manager.under_min_isr_count) == (1, 1)
        assert bench.high_watermark == 0

    run(tmp_path, scenario)


def test_coordinator_waits_for_the_fate_of_its_write_when_too_few_are_in_sync(tmp_path: Path) -> None:
    """Its memory follows the log: a write that may still be lost must not be called committed."""

    async def scenario(bench: Bench) -> None:
        await bench.lead(min_insync_replicas="3")
        _, wait = bench.manager.append_now("t", 0, batch(b"x"), ACKS_ALL, "internal")
        assert wait is not None
        bench.fetch(2, 1)
        bench.now_ms = LAG_MS + 1
        bench.fetch(2, 1)
        await bench.manager.check_in_sync_sets()
        await turns()
        assert bench.manager.under_min_isr_count == 1
        assert not wait.done()
        bench.fetch(3, 1)
        await asyncio.wait_for(asyncio.shield(wait), patience())
        assert bench.high_watermark == 1

    run(tmp_path, scenario)


def test_smaller_in_sync_set_that_is_large_enough_answers_at_once(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        wait = bench.append(b"x")
        assert wait is not None
        bench.fetch(2, 1)
        bench.now_ms = LAG_MS + 1
        bench.fetch(2, 1)
        bench.write_gate.clear()
        await bench.manager.check_in_sync_sets()
        await turns()
        assert not wait.done(), "before the change stands, the late one counts"
        bench.write_gate.set()
        await asyncio.wait_for(wait, patience())

    run(tmp_path, scenario)


def test_change_that_met_another_state_waits_for_it(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        bench.now_ms = LAG_MS + 1
        bench.conflict = True
        await bench.manager.check_in_sync_sets()
        await turns()
        replica = bench.manager.leader_of("t", 0).replica
        assert replica.pending is not None
        assert replica.isr == (1, 2, 3)
        bench.conflict = False
        await bench.manager.check_in_sync_sets()
        await turns()
        assert bench.written == []
        await bench.lead(1, 3, version=4)
        await bench.manager.check_in_sync_sets()
        await turns()
        assert [(state.isr, state.version) for state in bench.written] == [((1,), 4)]

    run(tmp_path, scenario)


def test_broker_that_was_held_up_blames_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        await bench.lead()
        await bench.manager.check_in_sync_sets()
        bench.now_ms = 60_000
        later = loop.time() + 60
        monkeypatch.setattr(loop, "time", lambda: later)
        await bench.manager.check_in_sync_sets()
        replica = bench.manager.leader_of("t", 0).replica
        assert replica.pending is None
        await bench.manager.check_in_sync_sets()
        assert replica.pending is not None

    run(tmp_path, scenario)


def test_epoch_in_which_nothing_was_written_is_forgotten_by_a_follower(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(epoch=2)
        bench.append(b"a", acks=1)
        await bench.lead(epoch=5, version=1)
        log = bench.manager.leader_of("t", 0).log
        assert log.leader_epochs.entries == [(2, 0), (5, 1)]
        state = PartitionState(2, 6, (2,), 1, 9)
        await bench.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, {}, REPLICAS)
        assert log.leader_epochs.entries == [(2, 0)]

    run(tmp_path, scenario)


def test_follower_that_has_caught_up_joins(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1)
        bench.append(b"a", b"b", acks=1)
        bench.now_ms = 5 * LAG_MS
        bench.fetch(2, 0)
        await turns()
        assert bench.written == []
        bench.fetch(2, 2)
        await turns()
        assert [state.isr for state in bench.written] == [(1, 2)]
        assert bench.metrics.isr_expands == 1

    run(tmp_path, scenario)


def test_lost_leadership_fails_who_waits(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        wait = bench.append(b"x")
        deletion = asyncio.ensure_future(bench.manager.delete_records("t", 0, 0))
        await turns()
        state = PartitionState(2, 1, (2,), 1, 9)
        bench.manager.set_brokers({1: 10}, own_epoch=-1)  # keeps the fetcher's task at rest
        await bench.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, {}, REPLICAS)
        assert wait is not None
        with pytest.raises(NotLeaderOrFollower):
            await wait
        with pytest.raises(NotLeaderOrFollower):
            await deletion

    run(tmp_path, scenario)


def test_follower_of_another_history_is_told_where_they_part(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(epoch=2)
        bench.append(b"a", b"b", acks=1)
        await bench.lead(epoch=5, version=1)
        bench.append(b"c", acks=1)
        assert bench.fetch(2, 3, epoch=5, last=2).diverging == (2, 2)
        assert bench.fetch(2, 3, epoch=5, last=4).diverging == (2, 2)
        assert bench.manager.leader_of("t", 0).replica.followers[2].end_offset == -1
        assert bench.fetch(2, 3, epoch=5, last=5).diverging is None
        assert bench.manager.leader_of("t", 0).replica.followers[2].end_offset == 3
        with pytest.raises(OffsetOutOfRange):
            bench.fetch(2, 3, epoch=5, last=9)
        with pytest.raises(OffsetOutOfRange):
            bench.fetch(2, 4, epoch=5)
        with pytest.raises(UnknownLeaderEpoch):
            bench.fetch(4, 3, epoch=5)

    run(tmp_path, scenario)


def test_records_are_deleted_when_every_living_replica_has_deleted_them(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        bench.append(b"a", b"b", b"c", acks=1)
        bench.fetch(2, 3)
        bench.fetch(3, 3)
        bench.manager.set_brokers({1: 10, 2: 20})
        deletion = asyncio.ensure_future(bench.manager.delete_records("t", 0, 2))
        await turns()
        assert not deletion.done()
        assert bench.fetch(2, 3, start=0).log_start_offset == 2
        await turns()
        assert not deletion.done()
        bench.fetch(2, 3, start=2)
        assert await deletion == 2
        with pytest.raises(RequestTimedOut):
            await bench.manager.delete_records("t", 0, 3, 1)

    run(tmp_path, scenario)


def test_high_watermark_survives_a_restart(tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        await bench.lead()
        bench.append(b"a", b"b", b"c", acks=1)
        bench.append(b"d", acks=1)
        bench.fetch(2, 4)
        bench.fetch(3, 3)
        assert bench.high_watermark == 3

    async def after(bench: Bench) -> None:
        await bench.lead(epoch=1, version=3)
        assert bench.high_watermark == 3
        assert not bench.manager.leader_of("t", 0).replica.latest_is_known

    run(tmp_path, before)
    assert (tmp_path / "replication-offset-checkpoint").read_text() == "0\n1\nt 0 3\n"
    run(tmp_path, after)


def test_retention_takes_nothing_of_a_partition_without_a_role(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert bench.manager.high_watermark(("t", 0)) == 0
        await bench.lead()
        bench.append(b"a", acks=1)
        assert bench.manager.high_watermark(("t", 0)) == 0

    run(tmp_path, scenario)


def test_failed_data_folder_takes_its_partitions_offline_and_nothing_else(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        told: list[dict[str, list[int]]] = []
        bench.manager.listeners.offline.append(lambda: told.append(bench.manager.offline_partitions()))
        lost: list[str] = []
        bench.manager.listeners.lost.append(lambda topic, number: lost.append(f"{topic}-{number}"))
        await bench.lead()
        wait = bench.append(b"x")
        bench.logs.offline["t", 0] = "the disk is gone"
        assert bench.logs.on_folder_failure is not None
        await asyncio.to_thread(bench.logs.on_folder_failure, tmp_path, "the disk is gone", [("t", 0)])
        await turns()
        assert wait is not None
        with pytest.raises(KafkaStorageError):
            await wait
        with pytest.raises(KafkaStorageError):
            bench.append(b"y")
        assert (told, lost) == ([{"t": [0]}], ["t-0"])

    run(tmp_path, scenario)


def test_only_what_all_in_sync_have_flushed_is_visible_with_flushed_visibility(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        assert bench.append(b"a", acks=1) is None
        for follower in (2, 3):
            bench.fetch(follower, 1)
        assert bench.high_watermark == 0, "the leader has not flushed it"
        wait = bench.append(b"b")
        assert wait is not None
        await until_async(lambda: bench.high_watermark == 1)
        assert bench.manager.leader_of("t", 0).log.recovery_point == 2
        for follower in (2, 3):
            bench.fetch(follower, 2)
        assert wait.done()
        assert bench.high_watermark == 2

    run(tmp_path, scenario, visibility="flushed")


def test_a_whole_partition_is_read_in_runs_of_whole_batches_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.broker.replication.reading.READ_ALL_SIZE", 300)
    loop_thread = threading.get_ident()

    async def scenario(bench: Bench) -> None:
        await bench.lead(1)
        for _ in range(50):
            bench.append(b"x", acks=1)
        partition_log = bench.manager.leader_of("t", 0).log
        reader = partition_log.read
        readers: set[int] = set()

        def read(*arguments: Any, **options: Any) -> Any:
            readers.add(threading.get_ident())
            return reader(*arguments, **options)

        monkeypatch.setattr(partition_log, "read", read)
        offsets = []
        runs = 0
        async for run_of_batches in bench.manager.read_all("t", 0):
            runs += 1
            offsets += [header.base_offset for _, header in iterate_batches(run_of_batches)]
        assert offsets == list(range(50))
        assert 10 < runs < 50
        assert loop_thread not in readers

    run(tmp_path, scenario)


@pytest.mark.parametrize("from_too_few", [True, False])
def test_a_coordinator_that_loads_from_an_in_sync_set_that_is_too_small(
    tmp_path: Path, from_too_few: bool
) -> None:
    """Two of three brokers are gone and min.insync.replicas is 2: groups go on reading, as with Apache Kafka;
    the outcome of a transaction must be safe before anything follows from it."""

    async def scenario(bench: Bench) -> None:
        await bench.manager.hosted.apply_topic(
            "t", TOPIC_ID, {0: PartitionState(2, 0, (1, 2), 1, 0)}, {"min.insync.replicas": "2"}, REPLICAS
        )
        following = bench.logs.get(("t", 0))
        assert following is not None
        following.append(batch(b"a"), leader_epoch=0, now_ms=1)
        log = InternalTopicLog("t", bench.manager, MetadataCache(), 1, loads_from_too_few=from_too_few)
        await bench.lead(1, 2, epoch=1, version=1, min_insync_replicas="2")
        loading = asyncio.ensure_future(log.until_committed(0, 1))
        await asyncio.wait([loading], timeout=3 * COMMITTED_POLL_SECONDS)
        assert not loading.done(), "a member of the in-sync set may lack it"
        await bench.lead(1, epoch=2, version=2, min_insync_replicas="2")
        await asyncio.wait([loading], timeout=10 * COMMITTED_POLL_SECONDS)
        assert (loading.done(), bench.high_watermark) == (from_too_few, 0)
        bench.fetch(2, 1, epoch=2)
        await bench.lead(1, 2, epoch=2, version=3, min_insync_replicas="2")
        await asyncio.wait_for(loading, patience())

    run(tmp_path, scenario)


def test_one_replica_makes_nobody_wait(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        state = PartitionState(1, 0, (1,), 1, 0)
        await bench.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, {}, {0: (1,)})
        assert bench.append(b"x") is None
        assert bench.high_watermark == 1

    run(tmp_path, scenario)


# -- what a leader reads for others ------------------------------------------------------------------


def test_only_the_log_of_the_very_topic_is_read(tmp_path: Path) -> None:
    """A topic that was made anew begins with the same epochs: a follower that knows it already, and asks by
    its id, would fill its log with the records of the one that is deleted here next."""

    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, 3)
        bench.append(b"old", acks=1)
        with pytest.raises(InconsistentTopicId):
            bench.fetch(2, 0, topic_id=uuid.UUID(int=8))
        assert bench.fetch(2, 0, topic_id=TOPIC_ID).records

    run(tmp_path, scenario)


@pytest.mark.parametrize("change", ["deposed", "another epoch", "made anew"])
def test_what_a_disk_had_is_no_answer_of_a_leader_that_was_replaced_meanwhile(
    tmp_path: Path, change: str
) -> None:
    """The log may have been cut on the way, and have gone on with another leader's records, or with its list
    of aborted transactions in pieces."""

    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, 3, epoch=1)
        bench.append(b"old", acks=1)
        file = bench.manager.leader_of("t", 0).log._segments.active.file
        file.was_used()
        file.rest()
        with pytest.raises(MustReadCold) as cold:
            bench.fetch(3, 0, epoch=1)
        state = PartitionState(1 if change == "another epoch" else 2, 2, (1, 2, 3), 1, 1)
        if change == "made anew":
            state = PartitionState(1, 1, (1, 2, 3), 1, 0)
        topic_id = uuid.UUID(int=8) if change == "made anew" else TOPIC_ID
        await bench.manager.hosted.apply_topic("t", topic_id, {0: state}, {}, REPLICAS)
        with pytest.raises((NotLeaderOrFollower, KafkaStorageError)):
            await cold.value.read()

    run(tmp_path, scenario)


@pytest.mark.parametrize("change", ["deposed", "another epoch", "none"])
def test_what_a_disk_said_of_a_time_is_no_answer_of_a_leader_that_was_replaced_meanwhile(
    tmp_path: Path, change: str
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, 3, epoch=1)
        bench.append(b"old", acks=1)
        local = bench.manager.leader_of("t", 0)
        is_asked, may_answer = threading.Event(), threading.Event()

        def look() -> int:
            is_asked.set()
            may_answer.wait()
            return 7

        answer = asyncio.ensure_future(bench.manager.on_disk_as_leader(local, look))
        await asyncio.to_thread(is_asked.wait)
        if change != "none":
            leader = 1 if change == "another epoch" else 2
            state = PartitionState(leader, 2, (1, 2, 3), 1, 1)
            await bench.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, {}, REPLICAS)
        may_answer.set()
        if change == "none":
            assert await answer == 7
        else:
            with pytest.raises(NotLeaderOrFollower):
                await answer

    run(tmp_path, scenario)
