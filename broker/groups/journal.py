"""The offsets topic as the group coordinator writes and reads it: in order, and to the end.

`coordinator.py` decides what is to be written; here it becomes record batches, and batches become groups
and offsets again.

Invariants:

1. Writes reach the log in the order in which they were decided: every write is one task, made at the
   moment of the decision, and tasks begin in the order they are made.
2. A write, and what follows it in memory, goes on even when the client that asked for it has gone.
3. A write always has an outcome: whatever goes wrong becomes an error code.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Protocol, TypeVar

import structlog
from kio.schema.errors import ErrorCode

from millrace.broker.errors import KafkaError
from millrace.broker.groups.offsets import (
    GroupKey,
    OffsetKey,
    OffsetStore,
    UnreadableRecord,
    decode_group_value,
    decode_key,
    decode_offset_value,
)
from millrace.broker.groups.values import GroupSnapshot
from millrace.broker.protocol.records import Record, build_batch, read_records

TOMBSTONES_PER_BATCH = 1_000
"""Keeps a batch of removals far below the largest message allowed."""

Result = TypeVar("Result")
Written = asyncio.Task[tuple[ErrorCode, int]]
"""A write under way: its error, or the offset that its first record got."""

log = structlog.get_logger(__name__)


class OffsetsLog(Protocol):
    """The offsets topic as the broker provides it."""

    def partition_count(self) -> int:
        """How many partitions the topic has; what it would be made with while it does not exist."""
        ...

    async def append(self, partition: int, batch: bytes) -> int:
        """Append one record batch; the base offset once it is committed. Raises KafkaError.

        Batches must reach the log in the order of the calls.
        """
        ...

    def read_all(self, partition: int) -> AsyncIterator[memoryview]:
        """Every record batch of the partition, from its start to its end, in order."""
        ...


class Journal:
    """All writes of one coordinator."""

    def __init__(self, offsets_log: OffsetsLog, clock_ms: Callable[[], int]) -> None:
        self._log = offsets_log
        self._clock_ms = clock_ms
        self._under_way: set[asyncio.Task[object]] = set()

    def partition_count(self) -> int:
        return self._log.partition_count()

    def append(self, partition: int, records: Sequence[tuple[bytes, bytes | None]]) -> Written:
        """Begin to write keys and values as one batch."""
        now_ms = self._clock_ms()
        batch = bytes(build_batch([Record(key, value, (), now_ms, 0) for key, value in records]))

        async def write() -> tuple[ErrorCode, int]:
            try:
                return ErrorCode.none, await self._log.append(partition, batch)
            except KafkaError as error:
                return ErrorCode(error.code), -1
            except Exception:
                # The root of a task: members that wait for this write must hear of it all the same.
                log.exception("write to the offsets topic failed", partition=partition)
                return ErrorCode.unknown_server_error, -1

        return self.start(write())

    def append_tombstones(self, partition: int, keys: Sequence[bytes]) -> list[Written]:
        """Begin to write removals, in as many batches as they need."""
        return [
            self.append(partition, [(key, None) for key in keys[start : start + TOMBSTONES_PER_BATCH]])
            for start in range(0, len(keys), TOMBSTONES_PER_BATCH)
        ]

    def start(self, work: Coroutine[object, object, Result]) -> asyncio.Task[Result]:
        """Run what follows a write; whoever awaits it shields it from its own cancellation."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def drain(self) -> None:
        """Wait until nothing is being written."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def read(self, partition: int) -> tuple[dict[str, GroupSnapshot], dict[str, OffsetStore]]:
        """What the log remembers: groups with members or a past, and offsets, each by group id."""
        snapshots: dict[str, GroupSnapshot] = {}
        offsets: dict[str, OffsetStore] = {}
        unreadable = 0
        async for batch in self._log.read_all(partition):
            for record in read_records(batch):
                try:
                    _remember(record, snapshots, offsets)
                except UnreadableRecord:
                    unreadable += 1
        if unreadable:
            log.warning("records of the offsets topic skipped", partition=partition, unreadable=unreadable)
        return snapshots, {group_id: store for group_id, store in offsets.items() if len(store)}


def _remember(record: Record, snapshots: dict[str, GroupSnapshot], offsets: dict[str, OffsetStore]) -> None:
    """Take in one record of the offsets topic. Raises UnreadableRecord."""
    match decode_key(record.key) if record.key is not None else None:
        case OffsetKey(group_id, topic, partition):
            store = offsets.setdefault(group_id, OffsetStore())
            if record.value is None:
                store.remove((topic, partition))
            elif (committed := decode_offset_value(record.value, record.offset)) is not None:
                store.put((topic, partition), committed)
        case GroupKey(group_id):
            if record.value is None:
                snapshots.pop(group_id, None)
            elif (snapshot := decode_group_value(record.value)) is not None:
                snapshots[group_id] = snapshot
