"""The offsets topic as the group coordinator writes and reads it: in order, and to the end.

`coordinator.py` and `offset_commits.py` decide what is to be written; here it becomes record batches, and by
`offsets_replay.py` batches become groups and offsets again.

Invariants:

1. Writes reach the log in the order in which they were decided: the append happens in the call itself.
2. What follows a write in memory happens if and only if the whole in-sync set has the write: also when the
   client that asked has gone, and also when it was told that this takes too long. So memory never differs
   from what a new coordinator would read.
3. A write always has an outcome: whatever goes wrong becomes an error code.
4. So many writes of a partition wait for the in-sync set, and no more (`MOST_UNCERTAIN`): the next one is
   refused before it is in the log, with what it would have heard in the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import structlog
from kio.schema.errors import ErrorCode

from millrace.broker.errors import KafkaError
from millrace.broker.groups.offsets_replay import Memory, OffsetsReplay
from millrace.broker.protocol.batch import NO_PRODUCER_EPOCH, NO_PRODUCER_ID
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication.off_loop import Compute, at_once

TOMBSTONES_PER_BATCH = 1_000
"""Keeps a batch of removals far below the largest message allowed."""

COMMIT_TIMEOUT_MS = 5_000
"""How long a client waits for the in-sync set: Apache Kafka's `offsets.commit.timeout.ms`."""

MOST_UNCERTAIN = 5_000
"""Writes of a partition that wait for the in-sync set. Each holds some 5 KB until it is certain, also when
the client that asked has given up and asks again: while the high watermark stands, memory would grow with
every try."""

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


class OffsetsLog(Protocol):
    """The offsets topic as the broker provides it."""

    def partition_count(self) -> int:
        """How many partitions the topic has; what it would be made with while it does not exist."""
        ...

    def append_now(
        self, partition: int, batch: bytes, *, is_limited: bool = False
    ) -> tuple[int, asyncio.Future[None] | None]:
        """Append one record batch: its base offset, and what is done once it is committed (None: it is).
        With `is_limited` one that is too large for the topic is refused.

        Raises KafkaError when nothing was appended. A future that fails with NOT_ENOUGH_REPLICAS_AFTER_APPEND
        says that the batch is committed all the same, by fewer than there should be.
        """
        ...

    async def until_committed(self, partition: int, offset: int) -> None:
        """Wait until everything below `offset` is committed. Raises KafkaError when it cannot be."""
        ...

    def read_all(self, partition: int) -> AsyncIterator[memoryview]:
        """Every record batch of the partition, from its start to its end, in order: runs of whole batches."""
        ...


@dataclass(frozen=True, slots=True)
class Producer:
    """Who a transactional write belongs to."""

    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Removal:
    """A tombstone to be written, and what follows it: `appended()` when the log has taken it, `apply(its
    place in the log)` when it is committed."""

    key: bytes
    apply: Callable[[int], None]
    appended: Callable[[], None] | None = None


class Journal:
    """All writes of one coordinator."""

    def __init__(
        self,
        offsets_log: OffsetsLog,
        clock_ms: Callable[[], int],
        commit_timeout_ms: int = COMMIT_TIMEOUT_MS,
        compute: Compute = at_once,
    ) -> None:
        self.compute = compute
        self._log = offsets_log
        self._clock_ms = clock_ms
        self._commit_timeout_ms = commit_timeout_ms
        self._under_way: set[asyncio.Task[object]] = set()
        self._uncertain_count: Counter[int] = Counter()  # by partition

    def partition_count(self) -> int:
        return self._log.partition_count()

    def append(
        self,
        partition: int,
        records: Sequence[tuple[bytes, bytes | None]],
        *,
        apply: Callable[[int], None],
        appended: Callable[[int], None] | None = None,
        ended: Callable[[], None] | None = None,
        producer: Producer | None = None,
        is_limited: bool = True,
    ) -> asyncio.Task[ErrorCode]:
        """Write keys and values as one batch, now; the task says what to tell who asked for it.

        `appended(base offset)` is called at once when the log has taken the batch. Then `apply(base offset)`
        follows when it is committed, and `ended()` after that, or when it is certain that it will not be;
        both also when the task has long ended with REQUEST_TIMED_OUT. What a client can make as large as its
        request is limited by what the topic takes of clients; a removal is not, or it would never succeed.
        """
        if self._uncertain_count[partition] >= MOST_UNCERTAIN:
            return self.start(_refused(ErrorCode.request_timed_out))
        now_ms = self._clock_ms()
        batch = bytes(
            build_batch(
                [Record(key, value, (), now_ms, 0) for key, value in records],
                producer_id=producer.producer_id if producer else NO_PRODUCER_ID,
                producer_epoch=producer.producer_epoch if producer else NO_PRODUCER_EPOCH,
                transactional=producer is not None,
            )
        )
        try:
            base_offset, committed = self._log.append_now(partition, batch, is_limited=is_limited)
        except KafkaError as error:
            return self.start(_refused(ErrorCode(error.code)))
        except Exception:
            # Members that wait for this write must hear of it all the same.
            log.exception("write to the offsets topic failed", partition=partition)
            return self.start(_refused(ErrorCode.unknown_server_error))
        if appended is not None:
            appended(base_offset)

        async def follow() -> ErrorCode:
            error = ErrorCode.none if committed is None else await self._outcome(partition, committed)
            try:
                if error in (ErrorCode.none, ErrorCode.not_enough_replicas_after_append):
                    apply(base_offset)
            finally:
                if ended is not None:
                    ended()
            return error

        following = self.start(follow())
        return following if committed is None else self.start(self._in_time(following))

    async def _outcome(self, partition: int, committed: asyncio.Future[None]) -> ErrorCode:
        self._uncertain_count[partition] += 1
        try:
            await asyncio.shield(committed)
        except KafkaError as error:
            return ErrorCode(error.code)
        except Exception:
            log.exception("write to the offsets topic failed", partition=partition)
            return ErrorCode.unknown_server_error
        finally:
            self._uncertain_count[partition] -= 1
        return ErrorCode.none

    async def _in_time(self, following: asyncio.Task[ErrorCode]) -> ErrorCode:
        """What a client hears: it does not wait for ever, but the write goes on (invariant 2)."""
        done, _ = await asyncio.wait([following], timeout=self._commit_timeout_ms / 1000)
        return following.result() if done else ErrorCode.request_timed_out

    def append_removals(self, partition: int, removals: Sequence[Removal]) -> asyncio.Task[ErrorCode]:
        """Write tombstones now, in as many batches as they need; the task has the first error of any."""
        writes = []
        for first in range(0, len(removals), TOMBSTONES_PER_BATCH):
            batch = removals[first : first + TOMBSTONES_PER_BATCH]
            writes.append(
                self.append(
                    partition,
                    [(removal.key, None) for removal in batch],
                    appended=partial(_appended, batch),
                    apply=partial(_removed, batch),
                    is_limited=False,
                )
            )

        async def outcome() -> ErrorCode:
            errors = [await write for write in writes]
            return next((error for error in errors if error is not ErrorCode.none), ErrorCode.none)

        return self.start(outcome())

    def start(self, work: Coroutine[object, object, Result]) -> asyncio.Task[Result]:
        """Run what follows a write; whoever awaits it shields it from its own cancellation."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def drain(self) -> None:
        """Wait until nothing is being written any more, but no longer than a client would."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=self._commit_timeout_ms / 1000)

    async def read(self, partition: int) -> Memory:
        """What the log remembers, once all of it is committed (or as safe as it can be while too few replicas
        are in sync): a coordinator answers from nothing less."""
        replay = OffsetsReplay()
        async for run in self._log.read_all(partition):
            await self.compute(partial(replay.take, run))
        await self._log.until_committed(partition, replay.end_offset)
        memory: Memory = await self.compute(replay.memory)
        if memory.unreadable:
            log.warning(
                "records of the offsets topic skipped", partition=partition, unreadable=memory.unreadable
            )
        if memory.unknown:
            log.info(
                "records of newer software in the offsets topic left alone",
                partition=partition,
                records=memory.unknown,
            )
        return memory


def _appended(batch: Sequence[Removal], _base_offset: int) -> None:
    for removal in batch:
        if removal.appended is not None:
            removal.appended()


def _removed(batch: Sequence[Removal], base_offset: int) -> None:
    for log_offset, removal in enumerate(batch, base_offset):
        removal.apply(log_offset)


async def _refused(error: ErrorCode) -> ErrorCode:
    return error
