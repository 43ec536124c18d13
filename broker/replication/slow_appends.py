"""Appends that take their time: batches are checked on a thread, and large ones are written on one, too.

To copy a batch into the page cache takes 1 to 3 ms for each MB of it, in which nobody else would be served.
While a large one is under way (`LocalPartition.appending`) nobody else appends to its partition, not even the
marker that ends its transaction: whoever may have to wait calls `settled` first. Roles do not change
meanwhile (`LocalPartition.turn`); a batch of a transaction goes into the log under the epoch of the
leadership that let it in, or not at all. Each data folder has a thread for this, so that a disk which is slow
or hangs keeps nobody waiting whose log is on another, and readers of cold data keep no append waiting.

Held by `replica_manager.py`; called by the produce handler, the writer of markers and DeleteRecords.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeGuard

import structlog

from millrace.broker.errors import KafkaError, NotLeaderOrFollower, UnknownServerError
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.local_partition import Appended, LocalPartition, retrieve
from millrace.broker.replication.partition import ANY_EPOCH, Role
from millrace.broker.storage.batch_validation import Budget, CheckedBatch, Validation, check_batch
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.log import AppendResult, Log

log = structlog.get_logger("millrace.broker")

LARGE_APPEND_SIZE = 4 << 20
"""Bytes of a batch that are too many for the event loop."""

NO_ACKS = 0

ToAppend = Callable[[TopicPartition, int], LocalPartition]
"""The partition that this broker may append to with these `acks`. Raises KafkaErrors."""

Outcome = tuple[Appended, asyncio.Future[None] | None]
Finish = Callable[[LocalPartition, AppendResult, int, int], Outcome]
"""(partition, what the log has said, the batch's size, acks): who waits is told, and what the append has to
wait for."""


def is_large(checked: CheckedBatch | KafkaError | None) -> TypeGuard[CheckedBatch]:
    """Whether it is for `SlowAppends.begin`."""
    return isinstance(checked, CheckedBatch) and len(checked.batch) > LARGE_APPEND_SIZE


class SlowAppends:
    """See the module. On the event loop; `validation` as the broker's setting."""

    def __init__(
        self,
        partitions: Mapping[TopicPartition, LocalPartition],
        checks: Executor,
        clock_ms: Callable[[], int],
        validation: Validation,
        *,
        to_append: ToAppend,
        finish: Finish,
    ) -> None:
        self._partitions = partitions
        self._checks = checks
        self._writers: dict[Path, ThreadPoolExecutor] = {}
        self._clock_ms = clock_ms
        self._validation = validation
        self._to_append = to_append
        self._finish = finish

    async def check(
        self, batches: Sequence[tuple[str, int, memoryview | None]], budget: Budget
    ) -> list[CheckedBatch | KafkaError | None]:
        """Check batches of clients on a thread, as `ReplicaManager.append_now` does on the event loop, and
        open the files that they go to; what either append is to be given with each of them. None for one that
        it will refuse without looking into it."""
        now_ms = self._clock_ms()
        jobs: list[tuple[memoryview, Log] | None] = []
        for topic, partition, batch in batches:
            local = self._partitions.get((topic, partition))
            is_led = local is not None and local.replica.role is Role.LEADER
            jobs.append((batch, local.log) if local is not None and is_led and batch else None)

        def check_all() -> list[CheckedBatch | KafkaError | None]:
            return [job and self._checked(*job, now_ms, budget) for job in jobs]

        return await asyncio.get_running_loop().run_in_executor(self._checks, check_all)

    def _checked(
        self, batch: memoryview, partition_log: Log, now_ms: int, budget: Budget
    ) -> CheckedBatch | KafkaError:
        try:
            partition_log.wake()
            config = partition_log.config
            return check_batch(batch, config, now_ms=now_ms, validation=self._validation, budget=budget)
        except KafkaError as error:
            return error
        except Exception:
            log.exception("a batch could not be checked")
            return UnknownServerError("the batch could not be checked; see the broker's log")

    def is_under_way(self, key: TopicPartition) -> bool:
        """Whether a large batch is on its way into the partition's log."""
        local = self._partitions.get(key)
        return local is not None and local.appending is not None

    async def settled(self, key: TopicPartition) -> None:
        """Until none is. Nothing is waited for where there is none; who came first goes on first."""
        while (local := self._partitions.get(key)) is not None and local.appending is not None:
            await asyncio.wait([local.appending])

    def begin(
        self, key: TopicPartition, size: int, checked: CheckedBatch, acks: int
    ) -> asyncio.Task[Outcome]:
        """Append a large batch, which came as `size` bytes, on a thread; else as `ReplicaManager.append_now`.
        From this very call on nobody else appends, and it goes on to its end whatever becomes of who waits
        for it. Raises KafkaErrors, and WouldBlock where another is under way."""
        local = self._to_append(key, acks)
        if local.appending is not None:
            raise WouldBlock(f"{local} is being appended to")
        epoch = local.replica.leader_epoch if checked.header.is_transactional else ANY_EPOCH
        append = self._append(local, epoch, size, checked, acks)
        local.appending = task = asyncio.get_running_loop().create_task(append)
        task.add_done_callback(retrieve)
        return task

    async def _append(
        self, local: LocalPartition, epoch: int, size: int, checked: CheckedBatch, acks: int
    ) -> Outcome:
        try:
            async with local.turn:
                self._check_same(local, acks)
                leader_epoch = local.replica.leader_epoch
                if epoch not in (ANY_EPOCH, leader_epoch):
                    raise NotLeaderOrFollower(f"{local} has changed hands while a batch waited")
                append = partial(
                    local.log.append,
                    checked.batch,
                    leader_epoch=leader_epoch,
                    now_ms=self._clock_ms(),
                    checked=checked,
                )
                result = await asyncio.get_running_loop().run_in_executor(self._writer_of(local), append)
                # A folder that failed meanwhile has waited for no turn.
                self._check_same(local, NO_ACKS)
                return self._finish(local, result, size, acks)
        finally:
            local.appending = None

    def _check_same(self, local: LocalPartition, acks: int) -> None:
        """Whether this is still what this broker leads. Raises KafkaErrors."""
        if self._to_append(local.key, acks) is not local:
            raise NotLeaderOrFollower(f"{local} was made anew while a batch was about to be written")

    def _writer_of(self, local: LocalPartition) -> ThreadPoolExecutor:
        folder = local.log.directory.parent
        writer = self._writers.get(folder)
        if writer is None:
            writer = self._writers[folder] = ThreadPoolExecutor(1, "append")
        return writer

    def close(self) -> None:
        """What is under way is finished first."""
        for writer in self._writers.values():
            writer.shutdown(wait=True)
