"""The notes among the rows of cells: what was read and is in no cell, summed for the state and the summary.

Called by `job` and `spark_cells` on the files that the count wrote; which notes there are, `cell_rows` tells.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.audit.config import audited_topic
from millrace.audit.keeping.state import UnreadNote
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, NOTE_READ, NOTE_UNAUDITED, NOTE_UNREAD
from millrace.audit.spark.task_plan import OffsetRange

_ROWS_AT_ONCE = 1 << 16
IN_CLUSTER = ", in "
NOTE_SCHEMA = pa.schema(
    [
        each
        for each in CELL_SCHEMA
        if each.name in ("tier", "cluster", "topic", "topic_id", "partition", "stream", "count")
        or each.name in ("first_offset", "last_offset", "tail", "note")
    ]
)
"""What there is of a note."""


def read_notes(files: Sequence[Path]) -> pa.Table:
    """Rows that are no cells; of what files hold, only a part is in memory at a time."""
    found = [NOTE_SCHEMA.empty_table()]
    for path in files:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=NOTE_SCHEMA.names):
            rows = pa.Table.from_batches([batch])
            found.append(rows.filter(pc.is_valid(rows["note"])).cast(NOTE_SCHEMA))
    return pa.concat_tables(found)


def counts_of(notes: pa.Table, prefix: str) -> dict[str, int]:
    """By reason, cluster and audited topic: how much the notes that begin with `prefix` count."""
    found: Counter[str] = Counter()
    for row in notes.select(["note", "count", "cluster", "topic"]).to_pylist():
        if row["note"].startswith(prefix):
            reason, topic = row["note"].removeprefix(prefix), audited_topic(row["topic"])
            found[f"{reason}{IN_CLUSTER}{row['cluster']}, topic {topic}"] += row["count"]
    return dict(found)


def unaudited_of(notes: pa.Table) -> dict[str, int]:
    """By tier: how many records had no identity."""
    found: Counter[str] = Counter()
    for row in notes.select(["note", "count", "tier"]).to_pylist():
        if row["note"] == NOTE_UNAUDITED:
            found[row["tier"]] += row["count"]
    return dict(found)


Key = tuple[str, str, int, str, bool]
"""(cluster, topic, partition, topic id, whether of the tail)"""


def uncounted(planned: Iterable[OffsetRange], notes: pa.Table) -> tuple[list[OffsetRange], int]:
    """(the planned offsets that no note calls read, how many are called so more than once or without a plan).
    Cells of either kind of offset would be wrong: a loss, or a duplicate, that never was."""
    wanted: dict[Key, list[OffsetRange]] = {}
    for each in planned:
        if each.size:
            key = (each.cluster, each.topic, each.partition, each.topic_id, each.tail)
            wanted.setdefault(key, []).append(each)
    read: dict[Key, list[tuple[int, int]]] = {}
    columns = ["note", "cluster", "topic", "partition", "topic_id", "tail", "first_offset", "last_offset"]
    for row in notes.filter(pc.equal(notes["note"], NOTE_READ)).select(columns).to_pylist():
        key = (row["cluster"], row["topic"], row["partition"], row["topic_id"] or "", row["tail"])
        read.setdefault(key, []).append((row["first_offset"], row["last_offset"] + 1))
    missing: list[OffsetRange] = []
    too_many = 0
    for key in {**wanted, **read}:
        found = read.get(key, [])
        merged = _merged(found)
        of_plan = _merged((each.first_offset, each.end_offset) for each in wanted.get(key, []))
        for first, end in _without(of_plan, merged):
            missing.append(replace(wanted[key][0], first_offset=first, end_offset=end))
        too_many += _size(found) - _common(of_plan, merged)
    return missing, too_many


def _merged(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that touch or overlap made one."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(stretches):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def _common(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """How many offsets are in both; each is in order, and overlaps nowhere."""
    size = number = 0
    for first, end in some:
        while number < len(others) and others[number][1] <= first:
            number += 1
        for other_first, other_end in itertools.islice(others, number, None):
            if other_first >= end:
                break
            size += min(end, other_end) - max(first, other_first)
    return size


def _without(some: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What is in the ones and not in the others; each is in order, and overlaps nowhere."""
    number = 0
    for first, end in some:
        while number < len(others) and others[number][1] <= first:
            number += 1
        for other_first, other_end in itertools.islice(others, number, None):
            if other_first >= end:
                break
            if first < other_first:
                yield first, other_first
            first = max(first, other_end)
        if first < end:
            yield first, end


def _size(stretches: Iterable[tuple[int, int]]) -> int:
    return sum(end - first for first, end in stretches)


def unread_of(notes: pa.Table, now_ms: int) -> list[UnreadNote]:
    """The offsets that could not be read, in one note for each partition and cause: a compacted log has a
    hole in nearly every fetch."""
    found: dict[tuple[str, str, int, str], tuple[int, int]] = {}
    for row in notes.to_pylist():
        if row["note"].startswith(NOTE_UNREAD):
            key = (row["cluster"], row["topic"], row["partition"], row["note"].removeprefix(NOTE_UNREAD))
            first, end = row["first_offset"], row["last_offset"] + 1
            known_first, known_end = found.get(key, (first, end))
            found[key] = (min(first, known_first), max(end, known_end))
    return [
        UnreadNote(cluster, topic, partition, first, end, cause, now_ms)
        for (cluster, topic, partition, cause), (first, end) in sorted(found.items())
    ]


def united_notes(notes: Iterable[UnreadNote]) -> list[UnreadNote]:
    """One for each cluster, topic and cause, the one that reaches furthest in time: where in the log it was
    says nothing of a stream, and there is a new one with every run. But those of logs that were another
    before are of their own places, and stay, in their order."""
    kept: list[UnreadNote] = []
    last: dict[tuple[str, str, str], int] = {}
    for note in notes:
        key = (note.cluster, note.topic, note.cause)
        if note.cause in ("truncated", "recreated"):
            kept.append(note)
        elif key not in last:
            last[key] = len(kept)
            kept.append(note)
        elif note.until_ms > kept[last[key]].until_ms:
            kept[last[key]] = note
    return kept
