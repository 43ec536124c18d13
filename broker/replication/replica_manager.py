"""The one door to this broker's partitions: every append and every read goes through here.

It holds the local replica of each partition (its log and the rules of `partition.py`), takes in what the
controller decided (`apply_topic`, `remove_topic`), and knows who waits for data. Called by the handlers of
produce, fetch and the offset APIs, by the group coordinator, and by `server/broker.py`.

`append_now` and `read_now` run at once on the event loop: a write goes to the page cache, a read comes from
it. What must wait for a disk (fsync, a cold read, making or deleting a log) runs on threads; logs lock
themselves. Invariants: only the leader appends and serves; a reader never sees past the high watermark;
with `visibility=flushed` the high watermark never passes what has been flushed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog

from millrace.broker.errors import (
    KafkaError,
    KafkaStorageError,
    MillraceError,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.replication.partition import (
    ANY_EPOCH,
    PartitionState,
    Replica,
    Role,
    Transition,
    may_accept_all,
)
from millrace.broker.replication.waiting_requests import PartitionKey, WaitingFetches
from millrace.broker.storage.batch_validation import Origin, Validation
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.storage.segment import WouldBlock
from millrace.broker.telemetry.metrics import BrokerMetrics

log = structlog.get_logger("millrace.broker")

Result = TypeVar("Result")

ACKS_ALL = -1
READ_ALL_SIZE = 1 << 20
LONGEST = 2**63 - 1
FLUSHED = "flushed"

# A reader that names no last fetched epoch, or the end of the log, asks for no comparison of histories.
NO_EPOCH = -1
TO_HIGH_WATERMARK = -1


class MustReadCold(MillraceError):
    """The bytes are not in the page cache: await `read()` instead, which waits on a thread."""

    def __init__(self, read: Callable[[], Awaitable[PartitionRead]]) -> None:
        super().__init__("the bytes are not in the page cache")
        self.read = read


class Appended(NamedTuple):
    """Where a batch went."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int
    log_start_offset: int
    duplicate: bool


class PartitionRead(NamedTuple):
    """What a reader gets of one partition. `diverging` is (epoch, its end offset) of the leader's history."""

    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    records: bytes | bytearray | memoryview = b""
    diverging: tuple[int, int] | None = None
    error_code: int = 0


@dataclass(slots=True)
class LocalPartition:
    """One partition of which this broker keeps a replica."""

    topic: str
    partition: int
    topic_id: uuid.UUID
    log: Log
    replica: Replica
    flush_messages: int
    """`flush.messages`, which is kept from the log itself: it would flush on the event loop."""
    flush: asyncio.Future[None] | None = None
    """The flush under way, if any."""
    flush_again: asyncio.Future[None] | None = None
    """The flush to come after it, for appends that it may have missed."""

    @property
    def last_stable_offset(self) -> int:
        """Readers of committed data see up to here: the first record of an open transaction, if any."""
        unstable = self.log.first_unstable_offset
        high_watermark = self.replica.high_watermark
        return high_watermark if unstable is None else min(unstable, high_watermark)


@dataclass(slots=True)
class LeadershipListeners:
    """Who must know when this broker begins or ceases to lead a partition."""

    gained: list[Callable[[str, int], None]] = field(default_factory=list)
    lost: list[Callable[[str, int], None]] = field(default_factory=list)


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
    ) -> None:
        self._broker_id = broker_id
        self._logs = logs
        self._clock_ms = clock_ms
        self._is_known = is_known
        self._only_flushed = visibility == FLUSHED
        self._validation = validation
        self._partitions: dict[PartitionKey, LocalPartition] = {}
        self._disk = ThreadPoolExecutor(4, "disk")
        self.log_defaults = log_defaults
        self.waiting_fetches = WaitingFetches()
        self.listeners = LeadershipListeners()
        self._metrics = metrics

    # -- appending -----------------------------------------------------------------------------------

    def append_now(
        self, topic: str, partition: int, batch: memoryview, acks: int, origin: Origin = "client"
    ) -> tuple[Appended, asyncio.Future[None] | None]:
        """Append one batch to the page cache; what came of it, and what to wait for before answering.

        The future is None when there is nothing to wait for. Raises KafkaErrors.
        """
        local = self._partitions.get((topic, partition)) or self._missing(topic, partition)
        replica, partition_log = local.replica, local.log
        if replica.role is not Role.LEADER:
            replica.check_leader()
        if acks == ACKS_ALL and not may_accept_all(
            len(replica.isr), partition_log.config.min_insync_replicas
        ):
            raise NotEnoughReplicas(
                f"{len(replica.isr)} in-sync replicas, min.insync.replicas is "
                f"{partition_log.config.min_insync_replicas}"
            )
        now_ms = self._clock_ms()
        result = partition_log.append(
            batch,
            leader_epoch=replica.leader_epoch,
            now_ms=now_ms,
            origin=origin,
            validation=self._validation,
        )
        appended = Appended(
            result.base_offset,
            result.last_offset,
            result.log_append_time_ms,
            partition_log.start_offset,
            result.duplicate,
        )
        if result.duplicate:
            self._metrics.duplicate_batches += 1
        else:
            self._metrics.produce_bytes += len(batch)
            self._metrics.produce_records += result.last_offset - result.base_offset + 1
            if not self._only_flushed and replica.advance(partition_log.end_offset):
                self.waiting_fetches.appended((topic, partition), len(batch))
        if self._only_flushed and acks == ACKS_ALL and replica.high_watermark <= result.last_offset:
            return appended, self._flush_soon(local)
        if partition_log.end_offset - partition_log.recovery_point >= local.flush_messages:
            return appended, self._flush_soon(local)
        return appended, None

    async def append(
        self,
        topic_partition: PartitionKey,
        batches: memoryview,
        acks: int = ACKS_ALL,
        timeout_ms: float = 30_000,
        origin: Origin = "internal",
    ) -> Appended:
        """As `append_now`, and wait for what there is to wait for. Raises KafkaErrors, TimeoutError."""
        appended, wait = self.append_now(*topic_partition, batches, acks, origin)
        if wait is not None:
            await asyncio.wait_for(asyncio.shield(wait), timeout_ms / 1000)
        return appended

    def _flush_soon(self, local: LocalPartition) -> asyncio.Future[None]:
        """The flush that will cover everything appended up to now; one runs at a time for a log."""
        if local.flush is None:
            local.flush = asyncio.ensure_future(self._flush(local))
            local.flush.add_done_callback(_retrieve)
            return local.flush
        if local.flush_again is None:
            local.flush_again = asyncio.ensure_future(self._flush_after(local, local.flush))
            local.flush_again.add_done_callback(_retrieve)
        return local.flush_again

    async def _flush_after(self, local: LocalPartition, earlier: asyncio.Future[None]) -> None:
        await asyncio.wait([earlier])
        local.flush, local.flush_again = local.flush_again, None
        await self._flush(local)

    async def _flush(self, local: LocalPartition) -> None:
        current = asyncio.current_task()
        try:
            await self.on_disk(local.log.flush, self._clock_ms())
        except KafkaStorageError as error:
            log.error("a flush failed", topic=local.topic, partition=local.partition, error=str(error))
            raise
        finally:
            if local.flush is current:
                local.flush = None
        if self._only_flushed:
            before = local.replica.high_watermark
            if local.replica.advance(local.log.recovery_point):
                grown = local.replica.high_watermark - before
                self.waiting_fetches.appended((local.topic, local.partition), max(grown, READ_ALL_SIZE))

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
    ) -> PartitionRead:
        """Whole batches from `offset` on, from the page cache. Raises MustReadCold and KafkaErrors."""
        local = self.leader_of(topic, partition, current_leader_epoch)
        visible = local.last_stable_offset if read_committed else local.replica.high_watermark
        bounds = PartitionRead(local.replica.high_watermark, local.last_stable_offset, local.log.start_offset)
        if last_fetched_epoch != NO_EPOCH:
            diverging = self._divergence(local, offset, last_fetched_epoch)
            if diverging is not None:
                return bounds._replace(diverging=diverging)
        if not local.log.start_offset <= offset <= local.log.end_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is not between {local.log.start_offset} and {local.log.end_offset}"
            )
        if offset >= visible or (max_bytes <= 0 and not at_least_one):
            return bounds
        read = partial(_read, local, offset, max(max_bytes, 0), end_offset=visible, at_least_one=at_least_one)
        try:
            return bounds._replace(records=read(may_block=False))
        except WouldBlock:

            async def read_cold() -> PartitionRead:
                return bounds._replace(records=await self.on_disk(read))

            raise MustReadCold(read_cold) from None

    async def read_all(self, topic: str, partition: int) -> AsyncIterator[memoryview]:
        """Every batch that the log holds now, in order, for loading internal state."""
        local = self.leader_of(topic, partition)
        offset, end_offset = local.log.start_offset, local.log.end_offset
        while offset < end_offset:
            view = await self.on_disk(partial(_read, local, offset, READ_ALL_SIZE, end_offset=end_offset))
            next_offset = offset
            for position, header in iterate_batches(view):
                next_offset = header.next_offset
                yield view[position : position + header.size]
            if next_offset <= offset:
                return
            offset = next_offset

    def _divergence(
        self, local: LocalPartition, offset: int, last_fetched_epoch: int
    ) -> tuple[int, int] | None:
        """Where the reader's history parts from the leader's; None while they agree (KIP-595)."""
        epoch, end_offset = local.log.leader_epochs.end_offset_for(last_fetched_epoch, local.log.end_offset)
        if epoch == NO_EPOCH:
            return None
        return (epoch, end_offset) if epoch < last_fetched_epoch or end_offset < offset else None

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

    async def delete_records(self, topic: str, partition: int, offset: int) -> int:
        """Move the start of the log to `offset` (-1: the high watermark). The new start offset."""
        local = self.leader_of(topic, partition)
        if offset == TO_HIGH_WATERMARK:
            offset = local.replica.high_watermark
        if not 0 <= offset <= local.replica.high_watermark:
            raise OffsetOutOfRange(f"offset {offset} is beyond the high watermark")
        # The files go with the next retention run: deleting here would apply retention out of its turn, and
        # move the start further than was asked for.
        local.log.advance_start_offset(offset)
        return local.log.start_offset

    async def apply_topic(
        self,
        topic: str,
        topic_id: uuid.UUID,
        states: Mapping[int, PartitionState],
        topic_config: Mapping[str, str],
    ) -> None:
        """Take in what the cluster decided about this broker's replicas of a topic.

        `states` has the partitions whose replicas include this broker and that have a leader or had one.
        """
        try:
            config = LogConfig.from_topic_config(topic_config, self.log_defaults)
        except KafkaError as error:
            log.error("topic settings are ignored", topic=topic, error=str(error))
            config = self.log_defaults
        for partition, state in states.items():
            local = self._partitions.get((topic, partition))
            if local is not None and local.topic_id != topic_id:
                await self._drop(local)
                local = None
            if local is None:
                local = await self._open(topic, partition, topic_id, config)
                if local is None:
                    continue
            local.flush_messages = config.flush_messages
            local.log.config = _without_inline_flush(config)
            self._apply_state(local, state)

    def _apply_state(self, local: LocalPartition, state: PartitionState) -> None:
        readable = local.log.recovery_point if self._only_flushed else local.log.end_offset
        key = (local.topic, local.partition)
        led = local.replica.role is Role.LEADER
        match local.replica.apply(state, readable):
            case Transition.LEAD:
                try:
                    local.log.leader_epochs.assign(state.leader_epoch, local.log.end_offset)
                except OSError as error:
                    # The next batch carries the epoch; a later start finds it there.
                    log.warning("a leader epoch was not checkpointed", partition=str(key), error=str(error))
                local.replica.advance(readable)
                log.debug("leading", topic=local.topic, partition=local.partition, epoch=state.leader_epoch)
                for gained in self.listeners.gained:
                    gained(*key)
            case Transition.FOLLOW:
                if led:
                    log.info("no longer leading", topic=local.topic, partition=local.partition)
                    for lost in self.listeners.lost:
                        lost(*key)
            case Transition.CONTINUE | Transition.IGNORE:
                return
        self.waiting_fetches.disturbed(key)

    async def _open(
        self, topic: str, partition: int, topic_id: uuid.UUID, config: LogConfig
    ) -> LocalPartition | None:
        """The partition's log, made where it is missing; None when it cannot be had."""
        key = (topic, partition)
        create = partial(self._logs.create, key, config, now_ms=self._clock_ms(), topic_id=topic_id)
        try:
            opened = await self.on_disk(create)
        except KafkaStorageError as error:
            log.error("a partition is offline", topic=topic, partition=partition, reason=str(error))
            return None
        local = LocalPartition(
            topic, partition, topic_id, opened, Replica(self._broker_id), config.flush_messages
        )
        self._partitions[key] = local
        return local

    async def remove_topic(self, topic: str) -> None:
        """The topic was deleted: stop serving its partitions and delete their logs."""
        for local in [local for local in self._partitions.values() if local.topic == topic]:
            await self._drop(local)
        # Also what could not be opened: its folder would keep a new topic of this name offline.
        for key in [key for key in self._logs.offline if key[0] == topic]:
            await self._delete_log(key)

    async def _drop(self, local: LocalPartition) -> None:
        key = (local.topic, local.partition)
        del self._partitions[key]
        led = local.replica.role is Role.LEADER
        local.replica.role = Role.NONE
        if led:
            for lost in self.listeners.lost:
                lost(*key)
        self.waiting_fetches.disturbed(key)
        await self._delete_log(key)

    async def _delete_log(self, key: PartitionKey) -> None:
        try:
            await self.on_disk(self._logs.delete, key)
        except KafkaStorageError as error:
            log.error("a log stays on the disk", topic=key[0], partition=key[1], error=str(error))

    # -- housekeeping and figures --------------------------------------------------------------------

    async def on_disk(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run something that may wait for a disk on a thread of its own kind."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)

    def high_watermark(self, key: PartitionKey) -> int | None:
        """For retention, which must not remove what readers have not been allowed to see."""
        local = self._partitions.get(key)
        return None if local is None else local.replica.high_watermark

    def sizes(self) -> Iterator[tuple[str, int, Path, int]]:
        """(topic, partition, data folder, size in bytes) of every local partition."""
        for local in self._partitions.values():
            yield local.topic, local.partition, local.log.directory.parent, local.log.size

    @property
    def partition_count(self) -> int:
        return len(self._partitions)

    def leaders(self) -> list[PartitionKey]:
        """Partitions that this broker leads."""
        return [key for key, local in self._partitions.items() if local.replica.role is Role.LEADER]

    async def flush_due(self) -> None:
        """Flush every log whose `flush.ms` has passed."""
        now_ms = self._clock_ms()
        due = [
            self._flush_soon(local)
            for local in self._partitions.values()
            if (self._only_flushed and local.log.recovery_point < local.log.end_offset)
            or local.log.needs_flush(now_ms)
        ]
        await asyncio.gather(*due, return_exceptions=True)  # each has logged its own failure

    def close(self) -> None:
        """No more work on threads; what runs is finished first."""
        self._disk.shutdown(wait=True)


def _read(local: LocalPartition, offset: int, max_bytes: int, **options: Any) -> memoryview:
    """What the log has; a disk that fails takes this partition only. Raises KafkaErrors, WouldBlock."""
    try:
        return local.log.read(offset, max_bytes, **options).data
    except OSError as error:
        log.error("a read failed", topic=local.topic, partition=local.partition, error=str(error))
        raise KafkaStorageError(f"{local.topic}-{local.partition} cannot be read: {error}") from error


def _without_inline_flush(config: LogConfig) -> LogConfig:
    return replace(config, flush_messages=LONGEST)


def _retrieve(flush: asyncio.Future[None]) -> None:
    """A failed flush has been logged; nobody need have waited for it."""
    if not flush.cancelled():
        flush.exception()
