"""What the tests of compaction share: a compacted log, what goes into it and what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.storage.cleaner import Cleaner, CleanerConfig, view_segments
from millrace.broker.storage.compaction_plan import plan_log
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from tests.stored_batches import batches_of

OpenLog = Callable[..., Log]
COMPACT = frozenset({"compact"})
NOW_MS = 1_000_000
RETENTION_MS = 1000


def compacted_config(**settings: Any) -> LogConfig:
    return LogConfig(
        cleanup_policy=COMPACT,
        min_cleanable_dirty_ratio=0.0,
        delete_retention_ms=RETENTION_MS,
        **settings,
    )


def put(log: Log, *pairs: tuple[str, str | None], now_ms: int = NOW_MS, **batch: Any) -> int:
    """Appends one batch of (key, value); a value of None is a tombstone. Returns its base offset."""
    records = [
        Record(key.encode(), None if value is None else value.encode(), ((("h", key.encode()),)), now_ms + n)
        for n, (key, value) in enumerate(pairs)
    ]
    return log.append(build_batch(records, **batch), leader_epoch=3, now_ms=now_ms).base_offset


def end(log: Log, producer_id: int, committed: bool, now_ms: int = NOW_MS) -> None:
    marker = build_marker(producer_id, 0, 1, committed, now_ms)
    log.append(marker, leader_epoch=3, now_ms=now_ms, origin="internal")


def roll(log: Log) -> None:
    log.config = compacted_config(index_interval_bytes=1, segment_ms=1)
    assert log.roll_if_due(log.segments[-1].created_ms + 10**6)
    log.config = compacted_config(index_interval_bytes=1)


def clean(
    log: Log, now_ms: int = NOW_MS, *, stable_offset: int | None = None, map_size: int = 1 << 20
) -> int:
    plan = plan_log(
        view_segments(log.segments, log.end_offset),
        log.config,
        cleaned_offset=log.cleaned_offset,
        start_offset=log.start_offset,
        stable_offset=log.end_offset if stable_offset is None else stable_offset,
        now_ms=now_ms,
    )
    return Cleaner(CleanerConfig(map_size=map_size)).clean(log, plan, now_ms).end_offset


def pairs(log: Log) -> list[tuple[int, str, str | None]]:
    """(offset, key, value) of every record but those of control batches."""
    found = []
    for batch in batches_of(log):
        if not parse_header(batch).is_control:
            for record in read_records(batch):
                value = None if record.value is None else record.value.decode()
                found.append((record.offset, (record.key or b"").decode(), value))
    return found
