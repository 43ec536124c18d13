"""What a leader does beside its log: lets followers and the high watermark follow, and answers who waits.

`replica_manager.py` calls it after every append, fetch and flush, and when a role or an in-sync set changed.
Consumers wait for the high watermark, followers for the end of the log, appends with acks=all for the high
watermark to pass them, DeleteRecords for the low watermark. All on the event loop.

Invariant: an append is called committed only by the high watermark, and only while enough replicas are in
sync; one whose leader lost its place is never called committed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog

from millrace.broker.errors import (
    KafkaError,
    KafkaStorageError,
    NotEnoughReplicasAfterAppend,
    RequestTimedOut,
)
from millrace.broker.replication.in_sync_sets import InSyncSets, StateWriter
from millrace.broker.replication.local_partition import Flusher, FollowerFetch, LocalPartition, retrieve
from millrace.broker.replication.partition import FollowerProgress, Role
from millrace.broker.replication.waiting_requests import WaitingFetches
from millrace.broker.telemetry.metrics import BrokerMetrics

log = structlog.get_logger("millrace.broker")

ACKS_ALL = -1


class Leading:
    """See the module. `steady_ms` is a clock that nobody sets: how late a follower is depends on it."""

    def __init__(
        self,
        flush_on_disk: Callable[..., Awaitable[Any]],
        clock_ms: Callable[[], int],
        steady_ms: Callable[[], int],
        metrics: BrokerMetrics,
        *,
        only_flushed: bool,
    ) -> None:
        self._steady_ms = steady_ms
        self._metrics = metrics
        self._only_flushed = only_flushed
        self._in_sync_sets = InSyncSets(None, self.in_sync_set_changed, metrics)
        self.flusher = Flusher(flush_on_disk, clock_ms, self._flushed, self._flush_failed)
        self.waiting_fetches = WaitingFetches()
        """Consumers."""
        self.waiting_followers = WaitingFetches()

    def join(self, write_state: StateWriter) -> None:
        """From now on in-sync sets can be changed."""
        self._in_sync_sets = InSyncSets(write_state, self.in_sync_set_changed, self._metrics)

    def appended(
        self, local: LocalPartition, size: int, last_offset: int, acks: int, *, is_internal: bool = False
    ) -> asyncio.Future[None] | None:
        """A batch of `size` bytes (0: it was there already) ends at `last_offset`. What acks=all has to
        wait for, if anything; a batch of the broker's own waits until its fate is certain."""
        replica = local.replica
        if size:
            local.unseen_size += size
            if replica.followers:
                self.waiting_followers.appended(local.key, size)
        self.advance(local)
        if acks != ACKS_ALL or replica.high_watermark > last_offset:
            return None
        if self._only_flushed:
            self.flusher.soon(local)
        return local.waiting.wait_for(last_offset + 1, until_certain=is_internal)

    def with_flush(
        self, local: LocalPartition, committed: asyncio.Future[None] | None, *, is_internal: bool = False
    ) -> asyncio.Future[Any]:
        """What an append waits for where `flush.messages` is reached: a flush, besides `committed`. For one
        of the broker's own it is enough that the flush was tried, as long as the log is in use: the batch is
        in the log, and what follows from it has to follow."""
        flush = self.flusher.soon(local)
        if is_internal:
            flush = asyncio.ensure_future(_tried(local, flush))
        both: asyncio.Future[Any] = flush if committed is None else asyncio.gather(committed, flush)
        both.add_done_callback(retrieve)
        return both

    def advance(self, local: LocalPartition) -> None:
        """Move a led partition's high watermark as far as it goes, and tell who waits for it."""
        replica = local.replica
        own_end = local.log.recovery_point if self._only_flushed else local.log.end_offset
        if replica.advance(own_end, self._steady_ms()):
            local.waiting.reached(replica.high_watermark, enough_in_sync=replica.has_enough_in_sync)
            size = local.unseen_size
            if replica.high_watermark >= own_end:
                local.unseen_size = 0  # else some of it is still to come: better to wake a reader twice
            size = max(size, 1)
            self.waiting_fetches.appended(local.key, size, local.stable_size(size))

    def fetched(
        self, local: LocalPartition, follower: FollowerFetch, progress: FollowerProgress, offset: int
    ) -> None:
        """A follower has everything below `offset`: it may join the in-sync set, the high watermark may
        move, and a deletion may have reached everyone."""
        progress.fetched(
            offset, follower.log_start_offset, local.log.end_offset, self._steady_ms(), follower.broker_epoch
        )
        if follower.broker_id not in local.replica.isr:
            self._in_sync_sets.fetched(local, follower.broker_id)
        self.advance(local)
        if local.deletions:
            self._answer_deletions(local)

    def in_sync_set_changed(self, local: LocalPartition) -> None:
        """The in-sync set of a led partition is another one: fewer may be waited for, or too few be left."""
        self.advance(local)
        replica = local.replica
        if not replica.has_enough_in_sync:
            in_sync, needed = len(replica.isr), replica.min_insync_replicas
            local.waiting.dismiss(
                NotEnoughReplicasAfterAppend(
                    f"{in_sync} in-sync replicas are left, min.insync.replicas is {needed}"
                )
            )
        if local.deletions:
            self._answer_deletions(local)

    def check_in_sync_sets(self, partitions: Iterable[LocalPartition], interval_ms: float) -> None:
        """Take late followers out; called every `interval_ms`."""
        leading = [local for local in partitions if local.replica.followers]
        for local in leading:
            self.advance(local)  # who was waited for as it was about to join may be late by now
        self._in_sync_sets.shrink(leading, self._steady_ms(), interval_ms)

    def resigned(self, local: LocalPartition, error: KafkaError) -> None:
        """This broker leads the partition no more: nobody will learn here what has become of his request."""
        local.unseen_size = 0
        local.waiting.fail(error)
        for _, everywhere in local.deletions:
            if not everywhere.done():
                everywhere.set_exception(type(error)(str(error)))

    async def deleted(self, local: LocalPartition, offset: int, timeout_ms: float) -> int:
        """The log starts at `offset` now: wait until every living replica's does. The low watermark. Raises
        KafkaErrors, RequestTimedOut when some replica has not followed in time (it will all the same)."""
        if local.replica.low_watermark(local.log.start_offset) < offset:
            # Who waits for data hears of the new start now.
            self.waiting_followers.disturbed(local.key)
            everywhere: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            everywhere.add_done_callback(retrieve)
            waiting = (offset, everywhere)
            local.deletions.append(waiting)
            try:
                async with asyncio.timeout(max(timeout_ms, 0) / 1000):
                    await everywhere
            except TimeoutError:
                raise RequestTimedOut("not every replica has deleted the records yet") from None
            finally:
                local.deletions.remove(waiting)
        return local.replica.low_watermark(local.log.start_offset)

    def _answer_deletions(self, local: LocalPartition) -> None:
        low_watermark = local.replica.low_watermark(local.log.start_offset)
        for offset, everywhere in local.deletions:
            if offset <= low_watermark and not everywhere.done():
                everywhere.set_result(None)

    def _flushed(self, local: LocalPartition) -> None:
        if self._only_flushed and local.replica.role is Role.LEADER:
            self.advance(local)

    def _flush_failed(self, local: LocalPartition, error: KafkaStorageError) -> None:
        if not local.log.is_retired:  # deleted meanwhile: nobody misses it
            log.error("a flush failed", topic=local.topic, partition=local.partition, error=str(error))
        if self._only_flushed and local.log.failure is None:
            # It is tried again, and may well be committed then.
            local.waiting.dismiss(error)
        elif self._only_flushed:
            local.waiting.fail(error)

    async def close(self) -> None:
        """Change no in-sync set any more."""
        await self._in_sync_sets.close()


async def _tried(local: LocalPartition, flush: asyncio.Future[None]) -> None:
    """Until the flush has succeeded, or was refused and the log is in use nevertheless."""
    try:
        await asyncio.shield(flush)
    except KafkaStorageError:
        if local.log.failure is not None:
            raise
