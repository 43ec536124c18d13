"""One partition of which this broker keeps a replica: its log, its rules, and who waits for it.

Made and held by `replica_manager.py`; the replica fetcher and the keeper of the in-sync sets work on it too.
All on the event loop. `turn` is held by whoever waits for a thread in the middle of changing the log, a
follower or a large append, and by changes of role: a log is never cut while its broker begins to lead.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from millrace.broker.errors import (
    KafkaError,
    KafkaStorageError,
    MillraceError,
    NotEnoughReplicasAfterAppend,
)
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.partition import Replica
from millrace.broker.storage.log import Log


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
    """What a reader gets of one partition. `diverging` is (epoch, its end offset) of the leader's history;
    `aborted` are (producer id, first offset) of aborted transactions, for readers of committed data;
    `has_more`: the next batch was too large for what was left of the room."""

    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    records: bytes | bytearray | memoryview = b""
    diverging: tuple[int, int] | None = None
    error_code: int = 0
    aborted: tuple[tuple[int, int], ...] = ()
    has_more: bool = False


class FollowerFetch(NamedTuple):
    """Who fetches, where it is a replica: the broker's id, the epoch of its registration (-1: not said), and
    where its own log starts. `is_first`: False for a second look after waiting, which says nothing new of
    the follower."""

    broker_id: int
    broker_epoch: int = -1
    log_start_offset: int = -1
    is_first: bool = True


class WaitingAppends:
    """Appends that asked for acks=all, by the offset that the high watermark must reach.

    A client is told at once that too few replicas are left in sync, and sends again. A coordinator, whose
    memory must follow its log, waits until it is certain what becomes of the append (`until_certain`).
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, asyncio.Future[None], bool]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait_for(self, offset: int, *, until_certain: bool = False) -> asyncio.Future[None]:
        """Done when everything below `offset` is committed. Offsets come in ascending order, but for
        batches sent twice: those wait with the newest, which is later than they need."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(retrieve)
        if self._waiting and self._waiting[-1][0] > offset:
            offset = self._waiting[-1][0]
        self._waiting.append((offset, future, until_certain))
        return future

    def reached(self, high_watermark: int, *, enough_in_sync: bool) -> None:
        """Answer those whose records are committed now."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= high_watermark:
            _, future, _ = waiting.popleft()
            if future.done():
                continue
            if enough_in_sync:
                future.set_result(None)
            else:
                future.set_exception(NotEnoughReplicasAfterAppend("fewer replicas are in sync than needed"))

    def fail(self, error: KafkaError) -> None:
        """Tell all that it will not come, or not be known here."""
        while self._waiting:
            _, future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(type(error)(str(error)))

    def dismiss(self, error: KafkaError) -> None:
        """Tell those who need not be certain that it may take long, and that nobody knows how it ends."""
        patient = deque(waiting for waiting in self._waiting if waiting[2])
        impatient = [future for _, future, until_certain in self._waiting if not until_certain]
        self._waiting = patient
        for future in impatient:
            if not future.done():
                future.set_exception(type(error)(str(error)))


@dataclass(slots=True, eq=False)
class LocalPartition:
    """One local replica. `flush_messages` is kept from the log itself: it would flush on the event loop."""

    topic: str
    partition: int
    topic_id: uuid.UUID
    log: Log
    replica: Replica
    flush_messages: int
    flush: asyncio.Future[None] | None = None
    """The flush under way, if any."""
    flush_again: asyncio.Future[None] | None = None
    """The flush to come after it, for appends that it may have missed."""
    unseen_size: int = 0
    """Bytes appended since the high watermark moved last: what readers will find when it moves on."""
    held_back_size: int = 0
    """Bytes below the high watermark that readers of committed data do not see yet: no more than these."""
    stable_offset: int = 0
    """The last stable offset when they were counted last."""
    waiting: WaitingAppends = field(default_factory=WaitingAppends)
    deletions: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    """DeleteRecords requests, by the offset that the low watermark must reach."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    appending: asyncio.Task[Any] | None = None
    """The large append under way, if any: nobody else appends meanwhile (`slow_appends.py`)."""

    @property
    def key(self) -> TopicPartition:
        return self.topic, self.partition

    @property
    def last_stable_offset(self) -> int:
        """Readers of committed data see up to here: the first record of an open transaction, if any. Never
        below the log's start, which deletions may have moved past that record: who begins at the end would
        be out of range there."""
        return max(self.log.last_stable_offset(self.replica.high_watermark), self.log.start_offset)

    def begin_to_lead(self) -> None:
        """Of what an open transaction holds back already, only the log's size is known."""
        self.held_back_size = self.log.size if self.log.producers.holds_readers_back else 0
        self.stable_offset = self.last_stable_offset

    def stable_size(self, size: int) -> int:
        """How many bytes more readers of committed data may see now that the high watermark has moved over
        `size`: the end of a transaction lets them see all that it has held back. Where other transactions
        are still open it is too much: better to wake a reader twice."""
        if not self.held_back_size and not self.log.producers.holds_readers_back:
            self.stable_offset = self.replica.high_watermark
            return size
        self.held_back_size += size
        stable_offset = self.last_stable_offset
        if stable_offset <= self.stable_offset:
            return 0
        self.stable_offset, freed = stable_offset, self.held_back_size
        if stable_offset >= self.replica.high_watermark:
            self.held_back_size = 0
        return freed

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Flusher:
    """Flushes logs on threads: one flush at a time for a log, and every append covered by a later one."""

    def __init__(
        self,
        on_disk: Callable[..., Awaitable[Any]],
        clock_ms: Callable[[], int],
        flushed: Callable[[LocalPartition], None],
        failed: Callable[[LocalPartition, KafkaStorageError], None],
    ) -> None:
        self._on_disk = on_disk
        self._clock_ms = clock_ms
        self._flushed = flushed
        self._failed = failed

    def soon(self, local: LocalPartition) -> asyncio.Future[None]:
        """The flush that will cover everything appended up to now. Fails with KafkaStorageError."""
        if local.flush is None:
            local.flush = asyncio.ensure_future(self._flush(local))
            local.flush.add_done_callback(retrieve)
            return local.flush
        if local.flush_again is None:
            local.flush_again = asyncio.ensure_future(self._flush_after(local, local.flush))
            local.flush_again.add_done_callback(retrieve)
        return local.flush_again

    async def _flush_after(self, local: LocalPartition, earlier: asyncio.Future[None]) -> None:
        await asyncio.wait([earlier])
        local.flush, local.flush_again = local.flush_again, None
        await self._flush(local)

    async def _flush(self, local: LocalPartition) -> None:
        try:
            await self._on_disk(local.log.flush, self._clock_ms())
        except KafkaStorageError as error:
            self._failed(local, error)
            raise
        finally:
            # In no variable: with its error, a task that knows itself would be a cycle that holds the log.
            if local.flush is asyncio.current_task():
                local.flush = None
        self._flushed(local)


def retrieve(future: asyncio.Future[Any]) -> None:
    """A failure here has been logged or is answered elsewhere; nobody need have waited for it."""
    if not future.cancelled():
        future.exception()
