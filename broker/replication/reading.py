"""Reading one local partition: what a reader may see of it, from the page cache or from the disk.

Called by `replica_manager.py`, which knows the partitions and who leads them. A read from the page cache runs
on the event loop; where a disk would have to be waited for, MustReadCold carries the read that waits on a
thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import structlog

from millrace.broker.errors import KafkaStorageError, OffsetOutOfRange
from millrace.broker.replication.local_partition import LocalPartition, MustReadCold, PartitionRead
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.log import LogRead

log = structlog.get_logger("millrace.broker")

OnDisk = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs something that may wait for a disk on a thread."""

NO_EPOCH = -1
"""A reader that names no last fetched epoch asks for no comparison of histories."""

READ_ALL_SIZE = 1 << 20


def bounds_of(local: LocalPartition) -> PartitionRead:
    """An answer without records."""
    return PartitionRead(local.replica.high_watermark, local.last_stable_offset, local.log.start_offset)


def divergence(local: LocalPartition, offset: int, last_fetched_epoch: int) -> tuple[int, int] | None:
    """Where the reader's history parts from the leader's; None while they agree (KIP-595). Raises
    OffsetOutOfRange where they cannot be compared, for a consumer as for a follower (as Apache Kafka does):
    of a log that is older than what was read from it, what stands behind that is something else."""
    epoch, end_offset = local.log.leader_epochs.end_offset_for(last_fetched_epoch, local.log.end_offset)
    if epoch == NO_EPOCH:
        raise OffsetOutOfRange(f"leader epoch {last_fetched_epoch} is not known here")
    return (epoch, end_offset) if epoch < last_fetched_epoch or end_offset < offset else None


def read_batches(
    local: LocalPartition,
    offset: int,
    max_bytes: int,
    visible: int,
    *,
    at_least_one: bool,
    with_aborted: bool,
    on_disk: OnDisk,
) -> PartitionRead:
    """Whole batches from `offset` on and below `visible`. Raises MustReadCold and KafkaErrors."""
    bounds = bounds_of(local)
    try:
        read = _read(local, offset, max_bytes, visible, at_least_one, may_block=False)
    except WouldBlock:

        def read_whole() -> PartitionRead:
            read = _read(local, offset, max_bytes, visible, at_least_one)
            return _with_records(bounds, local, offset, read, visible, with_aborted)

        async def read_cold() -> PartitionRead:
            found: PartitionRead = await on_disk(read_whole)
            return found

        raise MustReadCold(read_cold) from None
    return _with_records(bounds, local, offset, read, visible, with_aborted)


async def read_to_end(local: LocalPartition, on_disk: OnDisk) -> AsyncIterator[memoryview]:
    """Every batch that the log holds now, in order, in runs of whole batches."""
    offset, end_offset = local.log.start_offset, local.log.end_offset
    while offset < end_offset:
        read = await on_disk(partial(_read, local, offset, READ_ALL_SIZE, end_offset))
        if read.next_offset <= offset:
            return
        yield read.data
        offset = read.next_offset


def _read(
    local: LocalPartition,
    offset: int,
    max_bytes: int,
    end_offset: int,
    at_least_one: bool = True,
    may_block: bool = True,
) -> LogRead:
    """What the log has; a disk that fails takes this partition only. Raises KafkaErrors, WouldBlock."""
    try:
        return local.log.read(
            offset, max_bytes, end_offset=end_offset, at_least_one=at_least_one, may_block=may_block
        )
    except OSError as error:
        log.error("a read failed", topic=local.topic, partition=local.partition, error=str(error))
        raise KafkaStorageError(f"{local.topic}-{local.partition} cannot be read: {error}") from error


def _with_records(
    bounds: PartitionRead,
    local: LocalPartition,
    offset: int,
    read: LogRead,
    visible: int,
    with_aborted: bool,
) -> PartitionRead:
    """What was read, with the bounds and the aborted transactions. Raises OffsetOutOfRange where retention
    has overtaken the read."""
    aborted = local.log.aborted_transactions(offset, read.next_offset) if with_aborted else ()
    if with_aborted and offset < local.log.start_offset:
        # Removed after the batches were read, and maybe with it what says that they were aborted: the start
        # moves before that goes. A truncation beside this is seen by who asks (`ReplicaManager._read_cold`).
        raise OffsetOutOfRange(f"{local}: offset {offset} was removed just now")
    high_watermark, last_stable_offset, start_offset, *_ = bounds
    has_more = read.next_offset < visible
    return PartitionRead(
        high_watermark, last_stable_offset, start_offset, read.data, None, 0, aborted, has_more
    )
