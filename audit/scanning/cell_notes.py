"""The notes among the rows of cells: what was read and is in no cell, summed for the state and the summary.

Called by `job` and `spark_cells` on the files that the count wrote; which notes there are, `cell_rows` tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.audit.config import audited_topic
from millrace.audit.keeping.state import UnreadNote
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, NOTE_UNAUDITED, NOTE_UNREAD


def read_notes(files: Sequence[Path]) -> pa.Table:
    """Rows that are no cells."""
    wanted = pc.is_valid(pc.field("note"))
    tables = [pq.ParquetFile(path).read().filter(wanted) for path in files]
    return pa.concat_tables(tables) if tables else CELL_SCHEMA.empty_table()


def counts_of(notes: pa.Table, prefix: str) -> dict[str, int]:
    """By reason, cluster and audited topic: how much the notes that begin with `prefix` count."""
    found: Counter[str] = Counter()
    for row in notes.select(["note", "count", "cluster", "topic"]).to_pylist():
        if row["note"].startswith(prefix):
            reason, topic = row["note"].removeprefix(prefix), audited_topic(row["topic"])
            found[f"{reason}, in {row['cluster']}, topic {topic}"] += row["count"]
    return dict(found)


def unaudited_of(notes: pa.Table) -> dict[str, int]:
    """By tier: how many records had no identity."""
    found: Counter[str] = Counter()
    for row in notes.select(["note", "count", "tier"]).to_pylist():
        if row["note"] == NOTE_UNAUDITED:
            found[row["tier"]] += row["count"]
    return dict(found)


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
