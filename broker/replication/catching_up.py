"""What a follower does to its log with a leader's answer: append, cut, begin anew.

`follower.py` decides, this does it. `take` is called by the fetcher's tasks for one partition at a time; it
gives back how long the partition should rest before it is asked for again. Appends go to the page cache on
the event loop, as a leader's do; large answers, and everything that waits for a disk, go to a thread, with
`LocalPartition.turn` held: roles do not change meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import structlog

from millrace.broker.errors import OffsetOutOfRange, error_for_code
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.replication.follower import (
    Answer,
    Append,
    AskBounds,
    AskLater,
    FollowerState,
    Outdated,
    StartAnew,
    Truncate,
    decide,
    realign,
    start_to_follow,
)
from millrace.broker.replication.local_partition import Flusher, LocalPartition
from millrace.broker.replication.partition import Role

log = structlog.get_logger("millrace.broker")

Bounds = Callable[[LocalPartition], Awaitable[tuple[int, int]]]
"""Asks the leader where its log begins and ends."""

EXPECTED_REST_SECONDS = 0.05
UNEXPECTED_REST_SECONDS = 1.0
LARGE_APPEND_SIZE = 1 << 20
"""From here on an append would hold up the event loop for more than about a millisecond."""


class Taken(NamedTuple):
    """What came of an answer."""

    rest_seconds: float = 0.0
    """Until the partition is to be asked for again."""
    is_all: bool = False
    """Whether nothing of the answer was left out, as of one that came too late. A leader that says everything
    once would not say it again."""


NOT_ALL = Taken()
ALL = Taken(is_all=True)


class CatchingUp:
    """See the module."""

    def __init__(
        self, on_disk: Callable[..., Awaitable[Any]], clock_ms: Callable[[], int], flusher: Flusher
    ) -> None:
        self._on_disk = on_disk
        self._clock_ms = clock_ms
        self._flusher = flusher

    async def take(self, local: LocalPartition, answer: Answer, records: Buffer, bounds: Bounds) -> Taken:
        """Do what the answer asks for. Raises what the log raises (KafkaStorageError, CorruptMessage,
        OffsetOutOfRange) and what `bounds` raises."""
        if local.turn.locked() or local.replica.role is not Role.FOLLOWER:
            return NOT_ALL
        decision = decide(answer, _position(local), local.log.leader_epochs)
        match decision:
            case Append():
                return await self._append(local, answer, records)
            case Truncate(offset):
                return await self._truncate(local, answer.leader_epoch, offset)
            case AskBounds():
                return await self._realign(local, answer.leader_epoch, bounds)
            case AskLater(code, expected):
                if expected:
                    return Taken(EXPECTED_REST_SECONDS, is_all=True)  # it is said again until it is over
                raise error_for_code(code, f"the leader answers {error_for_code(code).name}")
            case Outdated() | StartAnew():
                pass
        return NOT_ALL

    async def _append(self, local: LocalPartition, answer: Answer, records: Buffer) -> Taken:
        if len(records) >= LARGE_APPEND_SIZE:
            async with local.turn:
                if not _is_current(local, answer.leader_epoch):
                    return NOT_ALL
                await self._on_disk(self._append_now, local, records, answer.leader_epoch)
        elif len(records):
            self._append_now(local, records, answer.leader_epoch)
        replica, partition_log = local.replica, local.log
        if not _is_current(local, answer.leader_epoch):
            return NOT_ALL
        replica.follow(answer.high_watermark, partition_log.end_offset)
        start = start_to_follow(_position(local), answer.log_start_offset)
        if start is not None:
            partition_log.advance_start_offset(start)
        if partition_log.end_offset - partition_log.recovery_point >= local.flush_messages:
            self._flusher.soon(local)
        return ALL

    def _append_now(self, local: LocalPartition, records: Buffer, leader_epoch: int) -> None:
        partition_log = local.log
        try:
            partition_log.append_as_follower(records, self._clock_ms(), leader_epoch)
        except OffsetOutOfRange:
            first = parse_header(records)
            end_offset = partition_log.end_offset
            is_empty = partition_log.start_offset == end_offset
            if not (is_empty and first.base_offset < end_offset < first.next_offset):
                raise
            # The leader's log begins within this batch; an empty log takes it whole, and its start follows.
            partition_log.start_anew(first.base_offset, self._clock_ms())
            partition_log.append_as_follower(records, self._clock_ms(), leader_epoch)

    async def _truncate(self, local: LocalPartition, leader_epoch: int, offset: int) -> Taken:
        async with local.turn:
            before = local.log.end_offset
            if not _is_current(local, leader_epoch):
                return NOT_ALL
            await self._on_disk(local.log.truncate_to, offset, self._clock_ms())
            local.replica.truncated(local.log.end_offset)
        log.warning(
            "records that the leader has not were cut",
            partition=str(local),
            leader=local.replica.leader,
            leader_epoch=leader_epoch,
            was_end=before,
            end=local.log.end_offset,
        )
        return NOT_ALL if local.log.end_offset < before else Taken(UNEXPECTED_REST_SECONDS)

    async def _realign(self, local: LocalPartition, leader_epoch: int, bounds: Bounds) -> Taken:
        leader_start, leader_end = await bounds(local)
        if not _is_current(local, leader_epoch):
            return NOT_ALL
        match realign(_position(local), leader_start, leader_end):
            case Truncate(offset):
                return await self._truncate(local, leader_epoch, offset)
            case StartAnew(offset):
                async with local.turn:
                    before = local.log.end_offset
                    if not _is_current(local, leader_epoch):
                        return NOT_ALL
                    await self._on_disk(local.log.start_anew, offset, self._clock_ms())
                    local.replica.begun_anew(offset)
                log.warning(
                    "the leader has deleted what this replica was to fetch; it begins anew",
                    partition=str(local),
                    was_end=before,
                    start=offset,
                )
                return NOT_ALL
        # The leader takes the offset after all; it may be about to lead, or to change.
        return Taken(UNEXPECTED_REST_SECONDS)


def _position(local: LocalPartition) -> FollowerState:
    replica, partition_log = local.replica, local.log
    return FollowerState(
        replica.leader_epoch, partition_log.start_offset, partition_log.end_offset, replica.high_watermark
    )


def _is_current(local: LocalPartition, leader_epoch: int) -> bool:
    """Whether the replica still follows in the epoch that the answer belongs to."""
    return local.replica.role is Role.FOLLOWER and local.replica.leader_epoch == leader_epoch
