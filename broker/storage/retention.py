"""Which old segments a log may drop. Pure: the log does the dropping.

Whole segments only, from the oldest on, and never past the first that must stay. The active segment goes
only by age, when all before it go too; the log rolls a new one first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millrace.broker.storage.log_config import LogConfig


class SegmentFacts(NamedTuple):
    """What decides over a segment. `newest_ms` is its greatest timestamp (or its file's time when records
    carry none), `next_base_offset` the base of the segment after it, or the log's end."""

    size: int
    newest_ms: int
    next_base_offset: int


def droppable_count(
    segments: Sequence[SegmentFacts],
    config: LogConfig,
    *,
    now_ms: int,
    start_offset: int,
    high_watermark: int,
) -> int:
    """How many of `segments` (oldest first, the active one last) may go.

    A segment goes when all of it lies below the log's start offset (DeleteRecords), and, under the delete
    policy, when it is too old or when the log is too large even without it. Records at or above the high
    watermark always stay.
    """
    by_start = by_age = by_size = 0
    for facts in segments[:-1]:
        if facts.next_base_offset > start_offset:
            break
        by_start += 1
    if config.is_deleted_by_retention:
        by_age = _too_old_count(segments, config, now_ms)
        by_size = _too_large_count(segments, config)
    count = max(by_start, by_age, by_size)
    while count and segments[count - 1].next_base_offset > high_watermark:
        count -= 1
    return count


def _too_old_count(segments: Sequence[SegmentFacts], config: LogConfig, now_ms: int) -> int:
    if config.retention_ms < 0:
        return 0
    count = 0
    for facts in segments:
        if facts.size == 0 or now_ms - facts.newest_ms <= config.retention_ms:
            break
        count += 1
    return count


def _too_large_count(segments: Sequence[SegmentFacts], config: LogConfig) -> int:
    if config.retention_bytes < 0:
        return 0
    excess = sum(facts.size for facts in segments) - config.retention_bytes
    count = 0
    for facts in segments[:-1]:
        if excess < facts.size:
            break
        excess -= facts.size
        count += 1
    return count
