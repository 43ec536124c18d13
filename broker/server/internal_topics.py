"""The brokers' own topics as coordinators need them, on top of the replica manager.

`InternalTopicLog` is one such topic as a log to write and to read to its end; `CoordinatorLoader` tells a
coordinator which partitions of it this broker leads. Made by `broker.py`, once for groups
(`__consumer_offsets`) and once for transactions (`__transaction_state`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import KafkaError, UnreadableRecord
from millrace.broker.replication.replica_manager import ACKS_ALL, ReplicaManager
from millrace.broker.storage.batch_validation import check_size

log = structlog.get_logger("millrace.broker")

COMMITTED_POLL_SECONDS = 0.02
"""Only a new leader with uncommitted records waits, and only before it serves."""
TELL_AFTER_SECONDS = 10.0
"""Until then it is the usual course of a change of leaders."""

FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 10.0


class InternalTopicLog:
    """Appends reach the log in the order of the calls."""

    def __init__(
        self,
        topic: str,
        replica_manager: ReplicaManager,
        cache: MetadataCache,
        default_partition_count: int,
        *,
        loads_from_too_few: bool = False,
    ) -> None:
        """`loads_from_too_few`: a new leader may answer from what its whole in-sync set has while that is
        smaller than `min.insync.replicas`, when nothing can be called committed."""
        self._topic = topic
        self._replica_manager = replica_manager
        self._cache = cache
        self._default_partition_count = default_partition_count
        self._loads_from_too_few = loads_from_too_few

    def partition_count(self) -> int:
        """How wide the topic is; before it exists, how wide it will be made."""
        info = self._cache.topic(self._topic)
        return self._default_partition_count if info is None else len(info.partitions)

    def epoch(self, partition: int) -> int:
        """The leader epoch in which this broker leads the partition. Raises KafkaErrors when it does not."""
        return self._replica_manager.leader_of(self._topic, partition).replica.leader_epoch

    def append_now(
        self, partition: int, batch: bytes, *, is_limited: bool = False
    ) -> tuple[int, asyncio.Future[None] | None]:
        """Append one batch at once: its base offset, and what is done when the whole ISR has it (None: it
        has). With `is_limited` no larger one than the topic takes of clients. Raises KafkaError when nothing
        was appended; the future fails with one when leadership went."""
        if is_limited:
            check_size(len(batch), self._replica_manager.leader_of(self._topic, partition).log.config)
        writable = memoryview(bytearray(batch))  # the log stamps offsets in place
        appended, committed = self._replica_manager.append_now(
            self._topic, partition, writable, ACKS_ALL, "internal"
        )
        return appended.base_offset, committed

    async def until_committed(self, partition: int, offset: int) -> None:
        """Wait until everything below `offset` is committed. Raises NotLeaderOrFollower."""
        now = asyncio.get_running_loop().time
        tell_at = now() + TELL_AFTER_SECONDS
        while True:
            local = self._replica_manager.leader_of(self._topic, partition)
            if local.replica.high_watermark >= offset:
                return
            if (
                self._loads_from_too_few
                and not local.replica.has_enough_in_sync
                and local.replica.in_sync_end(local.log.end_offset) >= offset
            ):
                return
            if now() >= tell_at:
                tell_at = math.inf
                log.warning(
                    "a coordinator waits for its log: too few of the replicas have all of it",
                    topic=self._topic,
                    partition=partition,
                    in_sync=list(local.replica.isr),
                    needed=local.replica.effective_min_insync,
                )
            await asyncio.sleep(COMMITTED_POLL_SECONDS)

    def read_all(self, partition: int) -> AsyncIterator[memoryview]:
        """Every batch, from the start of the partition to its end, in runs of whole batches."""
        return self._replica_manager.read_all(self._topic, partition)


class CoordinatorLoader:
    """Calls `load` and `unload` as the leadership of the topic's partitions comes and goes.

    A load that fails, for whatever reason, is tried again, more and more slowly, until it succeeds or
    leadership is gone: its clients would otherwise be turned away until the next election. A reason is told
    once, until it is another. `what` names them in log lines.
    """

    def __init__(
        self,
        topic: str,
        what: str,
        load: Callable[[int], Awaitable[None]],
        unload: Callable[[int], None],
        *,
        first_retry_seconds: float = FIRST_RETRY_SECONDS,
    ) -> None:
        self._topic = topic
        self._what = what
        self._load = load
        self._unload = unload
        self._first_retry_seconds = first_retry_seconds
        self._loading: dict[int, asyncio.Task[None]] = {}

    def gained(self, topic: str, partition: int) -> None:
        """A listener of the replica manager. The next epoch of the same leadership is no news to it."""
        if topic != self._topic:
            return
        self._cancel(partition)
        task = asyncio.get_running_loop().create_task(self._until_loaded(partition))
        self._loading[partition] = task
        task.add_done_callback(lambda done: self._ended(partition, done))

    def lost(self, topic: str, partition: int) -> None:
        if topic == self._topic:
            self._cancel(partition)
            self._unload(partition)

    async def close(self) -> None:
        """Load no more."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self, partition: int) -> None:
        task = self._loading.pop(partition, None)
        if task is not None:
            task.cancel()

    def _ended(self, partition: int, task: asyncio.Task[None]) -> None:
        if self._loading.get(partition) is task:
            del self._loading[partition]

    async def _until_loaded(self, partition: int) -> None:
        pause, told = self._first_retry_seconds, ""
        while True:
            try:
                await self._load(partition)
                return
            except Exception as error:
                if repr(error) != told:
                    told = repr(error)
                    self._tell(partition, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_RETRY_SECONDS)

    def _tell(self, partition: int, error: Exception) -> None:
        what = f"{self._what} cannot be loaded; trying again and again"
        if isinstance(error, KafkaError | OSError | UnreadableRecord):
            log.error(what, topic=self._topic, partition=partition, error=str(error))
        else:
            what = f"{what}: this is a defect of the broker, please report it"
            log.error(what, topic=self._topic, partition=partition, exc_info=error)
