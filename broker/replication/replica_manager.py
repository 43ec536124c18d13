"""The one door to this broker's partitions: every append and every read goes through here.

It finds the local replica of a partition (its log and the rules of `partition.py`) and knows who waits for
data. Called by the handlers of produce, fetch and the offset APIs, by the coordinators of groups and
transactions, and by `server/broker.py`, which brings it into the cluster with `join`. Which replicas are
here, and in which role, is kept by `hosting.py` (`hosted`).

`append_now` and `read_now` run at once on the event loop: a write goes to the page cache, a read comes from
it. What must wait for a disk (fsync, a cold read, making or deleting a log), or moves many bytes
(`slow_appends.py`), runs on threads; logs lock themselves. What belongs to replication has modules of its
own: `in_sync_sets.py` (who is in sync), `replica_fetcher.py` (what this broker follows), `high_watermarks.py`
(their checkpoint).

Invariants: only the leader appends and serves; a consumer never sees past the high watermark; an append with
acks=all is answered when the high watermark has passed it; with `visibility=flushed` the high watermark never
passes what has been flushed, here or on any follower in sync.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from millrace.broker.client.broker_connections import BrokerConnections
from millrace.broker.errors import (
    InconsistentTopicId,
    KafkaError,
    KafkaStorageError,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    PolicyViolation,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.catching_up import CatchingUp
from millrace.broker.replication.high_watermarks import HighWatermarkCheckpoints
from millrace.broker.replication.hosting import HostedPartitions, LeadershipListeners
from millrace.broker.replication.in_sync_sets import CHECKS_PER_LAG, StateWriter
from millrace.broker.replication.leading import ACKS_ALL, Leading
from millrace.broker.replication.local_partition import (
    Appended,
    FollowerFetch,
    LocalPartition,
    MustReadCold,
    PartitionRead,
)
from millrace.broker.replication.off_loop import slices
from millrace.broker.replication.partition import (
    ANY_EPOCH,
    FOR_EVER_MS,
    Role,
)
from millrace.broker.replication.reading import (
    NO_EPOCH,
    bounds_of,
    divergence,
    read_batches,
    read_to_end,
)
from millrace.broker.replication.replica_fetcher import FetchLimits, ReplicaFetchers
from millrace.broker.replication.slow_appends import Outcome, SlowAppends
from millrace.broker.replication.throttle import LeaderThrottle
from millrace.broker.storage.batch_validation import (
    Budget,
    CheckedBatch,
    Origin,
    Validation,
)
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.disk_room import DiskRoom
from millrace.broker.storage.log import AppendResult
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry.metrics import BrokerMetrics

log = structlog.get_logger("millrace.broker")

Result = TypeVar("Result")

FLUSHED = "flushed"

TO_HIGH_WATERMARK = -1
NO_FOLLOWER = -1


def _steady_ms() -> int:
    """How late a follower is must not depend on anyone setting the machine's clock."""
    return time.monotonic_ns() // 1_000_000


class ReplicaManager:
    """All local partitions. `is_known(topic, partition)` says whether the cluster has such a partition."""

    def __init__(
        self,
        broker_id: int,
        logs: LogManager,
        log_defaults: LogConfig,
        *,
        clock_ms: Callable[[], int],
        is_known: Callable[[str, int], bool],
        metrics: BrokerMetrics,
        visibility: str = "replicated",
        validation: Validation = "full",
        max_lag_ms: int = FOR_EVER_MS,
        steady_ms: Callable[[], int] = _steady_ms,
    ) -> None:
        self._broker_id = broker_id
        self._logs = logs
        self._clock_ms = clock_ms
        self._is_known = is_known
        self._only_flushed = visibility == FLUSHED
        self._validation = validation
        self._disk = ThreadPoolExecutor(4, "disk")
        # Of their own: flushes of a slow disk hold up no work on another, and wait for no processor.
        self._flushes = ThreadPoolExecutor(4, "flush")
        self._checks = ThreadPoolExecutor(2, "check")
        self.log_defaults = log_defaults
        self.listeners = LeadershipListeners()
        self._metrics = metrics
        self._max_lag_ms = max_lag_ms
        self._steady_ms = steady_ms
        self._leader_throttle = LeaderThrottle()
        self._registered: dict[int, int] | None = None
        self._checkpoints = HighWatermarkCheckpoints(logs.healthy_folders, logs.disk_failed)
        self._leading = Leading(
            self._flush_on_disk, clock_ms, steady_ms, metrics, only_flushed=self._only_flushed
        )
        self.waiting_fetches = self._leading.waiting_fetches
        self.waiting_followers = self._leading.waiting_followers
        self._fetchers: ReplicaFetchers | None = None
        self.hosted = HostedPartitions(
            broker_id,
            logs,
            log_defaults,
            self._checkpoints,
            self._leading,
            self.listeners,
            on_disk=self.on_disk,
            clock_ms=clock_ms,
            steady_ms=steady_ms,
            max_lag_ms=max_lag_ms,
        )
        self._partitions = self.hosted.partitions
        self.slow_appends = SlowAppends(
            self._partitions,
            self._checks,
            clock_ms,
            validation,
            to_append=self._to_append,
            finish=self._finish,
        )

    def join(
        self,
        write_state: StateWriter,
        connections: BrokerConnections,
        limits: FetchLimits,
        watch: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """Take part in a cluster: followers are tracked, leaders are fetched from. `watch` is given every
        task whose failure its owner must not overlook. Called once, on the event loop."""
        self._registered = {}
        self._leading.join(write_state)
        self._fetchers = ReplicaFetchers(
            self._broker_id,
            connections,
            CatchingUp(self.on_disk, self._clock_ms, self._leading.flusher),
            self._leading.flusher,
            limits,
            self._metrics,
            only_flushed=self._only_flushed,
            watch=watch,
        )
        self.hosted.join(self._fetchers, self._registered)

    def set_brokers(self, epochs: Mapping[int, int], own_epoch: int = NO_EPOCH) -> None:
        """The brokers that are registered and not about to leave, and the epochs of their registrations;
        this broker's own (-1 while it has none: it fetches nothing then)."""
        if self._registered is not None:
            self._registered.clear()
            self._registered.update(epochs)
        if self._fetchers is not None:
            self._fetchers.set_own_epoch(own_epoch)

    # -- appending -----------------------------------------------------------------------------------

    def append_now(
        self,
        topic: str,
        partition: int,
        batch: memoryview,
        acks: int,
        origin: Origin = "client",
        *,
        budget: Budget | None = None,
        checked: CheckedBatch | KafkaError | None = None,
        may_block: bool = True,
    ) -> Outcome:
        """Append one batch to the page cache; what came of it, and what to wait for before answering.

        `budget` bounds what is decompressed; `checked` is what `slow_appends.check` has found. The future is
        None when there is nothing to wait for. Raises KafkaErrors, what the budget raises, WouldBlock where a
        large append is under way, and with `may_block=False` where a file has to be opened first.
        """
        local = self._to_append((topic, partition), acks)
        partition_log = local.log
        if isinstance(checked, KafkaError):
            raise checked
        if local.appending is not None:
            raise WouldBlock(f"{local} is being appended to")
        if not may_block and partition_log.is_at_rest:
            raise WouldBlock(f"{local} has to be opened")
        result = partition_log.append(
            batch,
            leader_epoch=local.replica.leader_epoch,
            now_ms=self._clock_ms(),
            origin=origin,
            validation=self._validation,
            budget=budget,
            checked=checked,
        )
        return self._finish(local, result, len(batch), acks, is_internal=origin == "internal")

    def _to_append(self, key: TopicPartition, acks: int) -> LocalPartition:
        """The partition that this broker may append to. Raises KafkaErrors."""
        local = self._partitions.get(key) or self._missing(*key)
        replica = local.replica
        if replica.role is not Role.LEADER:
            replica.check_leader()
        if (
            acks == ACKS_ALL
            and len(replica.isr) < replica.min_insync_replicas
            and not replica.has_enough_in_sync
        ):
            raise NotEnoughReplicas(
                f"{len(replica.isr)} in-sync replicas, min.insync.replicas is {replica.min_insync_replicas}"
            )
        return local

    def _finish(
        self, local: LocalPartition, result: AppendResult, size: int, acks: int, *, is_internal: bool = False
    ) -> Outcome:
        """Tell who waits for a batch of `size` bytes that is in the log now; what its append has to wait
        for."""
        replica, partition_log = local.replica, local.log
        appended = Appended(
            result.base_offset,
            result.last_offset,
            result.log_append_time_ms,
            partition_log.start_offset,
            result.duplicate,
        )
        if result.duplicate:
            self._metrics.duplicate_batches += 1
            size = 0
        else:
            self._metrics.produce_bytes += size
            self._metrics.produce_records += result.last_offset - result.base_offset + 1
        wait: asyncio.Future[Any] | None = None
        if replica.followers or self._only_flushed:
            wait = self._leading.appended(local, size, result.last_offset, acks, is_internal=is_internal)
        elif replica.advance(partition_log.end_offset):
            self.waiting_fetches.appended(local.key, size, local.stable_size(size))
        if partition_log.end_offset - partition_log.recovery_point >= local.flush_messages:
            wait = self._leading.with_flush(local, wait, is_internal=is_internal)
        return appended, wait

    async def append(
        self,
        topic_partition: TopicPartition,
        batches: memoryview,
        acks: int = ACKS_ALL,
        timeout_ms: float = 30_000,
        origin: Origin = "internal",
    ) -> Appended:
        """As `append_now`, and wait for what there is to wait for. Raises KafkaErrors, TimeoutError."""
        await self.slow_appends.settled(topic_partition)
        appended, wait = self.append_now(*topic_partition, batches, acks, origin)
        if wait is not None:
            async with asyncio.timeout(timeout_ms / 1000):
                await asyncio.shield(wait)
        return appended

    # -- reading -------------------------------------------------------------------------------------

    def leader_of(self, topic: str, partition: int, current_leader_epoch: int = ANY_EPOCH) -> LocalPartition:
        """The local partition, if this broker leads it. Raises KafkaErrors."""
        local = self._partitions.get((topic, partition)) or self._missing(topic, partition)
        local.replica.check_leader(current_leader_epoch)
        return local

    def read_now(
        self,
        topic: str,
        partition: int,
        offset: int,
        max_bytes: int,
        *,
        at_least_one: bool,
        read_committed: bool = False,
        current_leader_epoch: int = ANY_EPOCH,
        last_fetched_epoch: int = NO_EPOCH,
        follower: FollowerFetch | None = None,
        topic_id: uuid.UUID | None = None,
    ) -> PartitionRead:
        """Whole batches from `offset` on, from the page cache. Raises MustReadCold and KafkaErrors.

        A consumer sees up to the high watermark, with `read_committed` up to the last stable offset. A
        `follower` sees all there is; that it asks for `offset` says that it has everything below. With a
        `topic_id` only the log of that very topic is read: one of the same name that is deleted may still be
        here, and its leader epochs may be the same.
        """
        local = self.leader_of(topic, partition, current_leader_epoch)
        if topic_id is not None and topic_id != local.topic_id:
            raise InconsistentTopicId(f"{topic}-{partition} is here of another topic of that name")
        partition_log, replica = local.log, local.replica
        progress = None
        if follower is not None:
            progress = replica.check_follower(follower.broker_id, current_leader_epoch, follower.broker_epoch)
        if last_fetched_epoch != NO_EPOCH and offset >= partition_log.start_offset:
            diverging = divergence(local, offset, last_fetched_epoch)
            if diverging is not None:
                return bounds_of(local)._replace(diverging=diverging)
        end_offset = partition_log.end_offset
        if not partition_log.start_offset <= offset <= end_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is not between {partition_log.start_offset} and {end_offset}"
            )
        if follower is not None and progress is not None:
            visible = end_offset
            follower_id = follower.broker_id
            if follower.is_first:
                self._leading.fetched(local, follower, progress, offset)
            if offset < end_offset and self._rests(local, follower_id):
                return bounds_of(local)
        else:
            follower_id = NO_FOLLOWER
            visible = local.last_stable_offset if read_committed else replica.high_watermark
        if offset >= visible or (max_bytes <= 0 and not at_least_one):
            return bounds_of(local)
        try:
            read = read_batches(
                local,
                offset,
                max_bytes,
                visible,
                at_least_one=at_least_one,
                with_aborted=read_committed and follower is None,
                on_disk=self.on_disk,
            )
        except MustReadCold as cold:
            # Not the error: what it was raised through would know it, a cycle for the garbage collector.
            read_cold = partial(self._read_cold, local, replica.leader_epoch, cold.read, follower_id)
            raise MustReadCold(read_cold) from None
        return read if follower is None else self._given(local, follower_id, read)

    async def _read_cold(
        self,
        local: LocalPartition,
        leader_epoch: int,
        read_cold: Callable[[], Awaitable[PartitionRead]],
        follower_id: int,
    ) -> PartitionRead:
        read = await read_cold()
        self._check_still_leads(local, leader_epoch)
        return self._given(local, follower_id, read)

    async def on_disk_as_leader(
        self, local: LocalPartition, work: Callable[..., Result], *arguments: Any
    ) -> Result:
        """`on_disk` for what is told of a log that is led now. Raises NotLeaderOrFollower."""
        leader_epoch = local.replica.leader_epoch
        found = await self.on_disk(work, *arguments)
        self._check_still_leads(local, leader_epoch)
        return found

    def _check_still_leads(self, local: LocalPartition, leader_epoch: int) -> None:
        """What a disk had is the answer only of the leader that was asked: meanwhile another may lead, and
        this log may have been cut and have gone on with what is not ours to tell."""
        replica = local.replica
        is_same = self._partitions.get((local.topic, local.partition)) is local
        if not is_same or replica.role is not Role.LEADER or replica.leader_epoch != leader_epoch:
            raise NotLeaderOrFollower(f"{local} has changed while its records were read")

    def read_all(self, topic: str, partition: int) -> AsyncIterator[memoryview]:
        """Every batch that the log holds now, in order, in runs of whole batches, for loading internal state.
        Raises KafkaErrors."""
        return read_to_end(self.leader_of(topic, partition), self.on_disk)

    def epoch_end(
        self, topic: str, partition: int, epoch: int, current_leader_epoch: int = ANY_EPOCH
    ) -> tuple[int, int]:
        """The largest epoch known that is not above `epoch`, and where it ended; (-1, -1) if none."""
        local = self.leader_of(topic, partition, current_leader_epoch)
        return local.log.leader_epochs.end_offset_for(epoch, local.log.end_offset)

    def _missing(self, topic: str, partition: int) -> LocalPartition:
        """Raise the error that fits a partition that is not here."""
        if (topic, partition) in self._logs.offline:
            raise KafkaStorageError(f"{topic}-{partition} could not be opened on this broker; see its log")
        if self._is_known(topic, partition):
            raise NotLeaderOrFollower(f"broker {self._broker_id} does not lead {topic}-{partition}")
        raise UnknownTopicOrPartition(f"there is no partition {partition} of a topic {topic}")

    # -- changing ------------------------------------------------------------------------------------

    async def delete_records(
        self, topic: str, partition: int, offset: int, timeout_ms: float = 30_000
    ) -> int:
        """Move the start of the log to `offset` (-1: the high watermark), here and on every living replica.

        The low watermark: nobody has records below it any more. Raises KafkaErrors, PolicyViolation when
        the topic's policy is compaction alone, RequestTimedOut when some replica has not followed in time
        (it will all the same).
        """
        await self.slow_appends.settled((topic, partition))  # the log's lock is its own
        local = self.leader_of(topic, partition)
        if not local.log.config.is_deleted_by_retention:
            raise PolicyViolation(f"records of {topic}-{partition} go by compaction alone (cleanup.policy)")
        if offset == TO_HIGH_WATERMARK:
            offset = local.replica.high_watermark
        if not 0 <= offset <= local.replica.high_watermark:
            raise OffsetOutOfRange(f"offset {offset} is beyond the high watermark")
        # The files go with the next retention run: deleting here would apply retention out of its turn, and
        # move the start further than was asked for.
        local.log.advance_start_offset(offset)
        return await self._leading.deleted(local, offset, timeout_ms)

    @property
    def failed_folders(self) -> Mapping[Path, str]:
        """Data folders that cannot be used, and why."""
        return self._logs.failed_folders

    def offline_partitions(self) -> dict[str, list[int]]:
        """Partitions that lie here and cannot be used, by topic."""
        found: dict[str, list[int]] = {}
        for topic, partition in sorted(self._logs.offline):
            found.setdefault(topic, []).append(partition)
        return found

    @property
    def stray_count(self) -> int:
        """Logs in the data folders that were set aside."""
        return len(self._logs.strays)

    @property
    def rooms(self) -> Mapping[Path, DiskRoom]:
        """Of each data folder that can be used."""
        return self._logs.rooms

    # -- housekeeping and figures --------------------------------------------------------------------

    async def on_disk(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run something that may wait for a disk on a thread of its own kind."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)

    async def _flush_on_disk(self, flush: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._flushes, flush, *arguments)

    def high_watermark(self, key: TopicPartition) -> int | None:
        """For retention, which must not remove what is not known to be committed: nothing of a partition
        that has no role here yet."""
        local = self._partitions.get(key)
        return 0 if local is None else local.replica.high_watermark

    def stable_offset(self, key: TopicPartition) -> int | None:
        """For compaction: below it records are committed and transactions have ended. None: not here."""
        local = self._partitions.get(key)
        return None if local is None else local.last_stable_offset

    async def check_in_sync_sets(self) -> None:
        """Take late followers out. To be called every `replica.lag.time.max.ms` / CHECKS_PER_LAG."""
        self._leading.check_in_sync_sets(self._partitions.values(), self._max_lag_ms / CHECKS_PER_LAG)

    async def checkpoint_high_watermarks(self) -> None:
        """Write `replication-offset-checkpoint` of every data folder that changed."""
        by_folder: dict[Path, dict[TopicPartition, int]] = {}
        for folder, logs in self._logs.logs_by_folder().items():
            marks = by_folder[folder] = {}
            for key in logs:
                local = self._partitions.get(key)
                known = self._checkpoints.get(folder, key) if local is None else local.replica.high_watermark
                if known > 0:
                    marks[key] = known
        await self.on_disk(self._checkpoints.write, by_folder)
        for note in self._checkpoints.notes:
            log.warning("storage", note=note)
        self._checkpoints.notes.clear()

    def set_log_defaults(self, defaults: LogConfig) -> None:
        """What topics do not set themselves. Each topic has to be applied anew to get them."""
        self.log_defaults = defaults
        self.hosted.set_log_defaults(defaults)

    def set_replication_throttle(
        self, bytes_per_second: int | None, partitions: Collection[TopicPartition] | None = None
    ) -> None:
        """Follow these partitions (None: all) together no faster than this (None: as fast as it goes)."""
        if self._fetchers is not None:
            self._fetchers.set_throttle(bytes_per_second, partitions)

    def set_leader_throttle(
        self, bytes_per_second: int | None, partitions: Collection[TopicPartition] | None = None
    ) -> None:
        """Give followers that are not in sync these partitions (None: all) together no faster than this
        (None: as fast as it goes)."""
        self._leader_throttle.set(bytes_per_second, partitions)

    def _rests(self, local: LocalPartition, follower_id: int) -> bool:
        """Whether what a follower that catches up asks for is held back: until more was paid back, or until
        others had their turn."""
        if not self._leader_throttle.applies_to(local.key) or follower_id in local.replica.isr:
            return False
        return not self._leader_throttle.gives(local.key, follower_id, self._steady_ms() / 1000)

    def _given(self, local: LocalPartition, follower_id: int, read: PartitionRead) -> PartitionRead:
        if follower_id != NO_FOLLOWER and read.records and self._leader_throttle.applies_to(local.key):
            in_sync = follower_id in local.replica.isr
            now = self._steady_ms() / 1000
            self._leader_throttle.consume(local.key, len(read.records), now, in_sync=in_sync)
        return read

    @property
    def under_replicated_count(self) -> int:
        """Led partitions some of whose replicas are not in sync."""
        return sum(local.replica.is_under_replicated for local in self._partitions.values())

    @property
    def under_min_isr_count(self) -> int:
        """Led partitions that take no acks=all write now."""
        return sum(
            local.replica.role is Role.LEADER and not local.replica.has_enough_in_sync
            for local in self._partitions.values()
        )

    def follower_lags(self) -> Mapping[TopicPartition, int]:
        """Committed records that are missing here, by followed partition."""
        return {} if self._fetchers is None else self._fetchers.lags()

    def sizes(self) -> Iterator[tuple[str, int, Path, int]]:
        """(topic, partition, data folder, size in bytes) of every local partition."""
        for local in self._partitions.values():
            yield local.topic, local.partition, local.log.directory.parent, local.log.size

    @property
    def partition_count(self) -> int:
        return len(self._partitions)

    def leaders(self) -> list[TopicPartition]:
        """Partitions that this broker leads."""
        return [key for key, local in self._partitions.items() if local.replica.role is Role.LEADER]

    async def flush_due(self) -> None:
        """Flush every log whose `flush.ms` has passed."""
        now_ms = self._clock_ms()
        due = []
        async for part in slices(list(self._partitions.values())):
            due += [
                self._leading.flusher.soon(local)
                for local in part
                if (self._only_flushed and local.log.recovery_point < local.log.end_offset)
                or local.log.needs_flush(now_ms)
            ]
        await asyncio.gather(*due, return_exceptions=True)  # each has logged its own failure

    async def leave(self) -> None:
        """Fetch no more, change no in-sync set any more, and write down the high watermarks."""
        if self._fetchers is not None:
            await self._fetchers.close()
        await self._leading.close()
        await self.checkpoint_high_watermarks()

    def close(self) -> None:
        """No more work on threads; what runs is finished first."""
        self._checks.shutdown(wait=True)
        self.slow_appends.close()
        self._flushes.shutdown(wait=True)
        self._disk.shutdown(wait=True)
