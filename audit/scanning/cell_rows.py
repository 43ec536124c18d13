"""Cells as Arrow rows: what the Spark source yields, Parquet keeps, and reconciliation reads back.

One row is either a cell (`note` null) or a *note*: a count of records, or a range of offsets, that is in no
cell and must not vanish. Notes:

    read                 offsets first_offset..last_offset that a task has gone through to their end; the job
                         compares them with what it had planned
    records              everything read of a range, in `count`
    unaudited            records without a `_mr` header, in `count`
    untrusted: <reason>  what could not be read, in `count`
    unread: <class>      offsets first_offset..last_offset that retention or truncation took before the read

A cell whose partition and offsets are -1 is a united one (`cell_union`). What came more than once in a cell
is in `again`, by the digits of its extra copies (`cells.Cell`); `repeats` is null but in rows of older
programs (`old_repeats`).

Pure. Column names are those of `cells.Cell`; `tail` marks offsets that no mirror has passed yet (they are
read again by the next job instead of being kept).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.audit.scanning.cell_columns import column_of, decimals
from millrace.audit.scanning.cells import Cell
from millrace.audit.scanning.old_repeats import in_sets

if TYPE_CHECKING:  # the compiled scan is not needed to read rows
    from millrace.audit.scanning.counting import CountedCells, ScanTotals

NOTE_READ = "read"
NOTE_RECORDS = "records"
NOTE_UNAUDITED = "unaudited"
NOTE_UNTRUSTED = "untrusted: "
NOTE_UNREAD = "unread: "

_REPEAT = pa.struct([pa.field("sequence", pa.int64()), pa.field("extra", pa.int64())])

CELL_SCHEMA = pa.schema(
    [
        ("tier", pa.string()),
        ("cluster", pa.string()),
        ("topic", pa.string()),
        ("topic_id", pa.string()),
        ("partition", pa.int32()),
        ("stream", pa.string()),
        ("producer", pa.string()),
        ("window_start_ms", pa.int64()),
        ("chunk_start", pa.int64()),
        ("count", pa.int64()),
        ("byte_count", pa.int64()),
        ("first_offset", pa.int64()),
        ("last_offset", pa.int64()),
        ("first_append_ms", pa.int64()),
        ("last_append_ms", pa.int64()),
        ("base", pa.int64()),
        ("bitmap", pa.binary()),
        ("repeats", pa.list_(_REPEAT)),
        ("again", pa.list_(pa.binary())),
        ("unsequenced_count", pa.int64()),
        ("digest", pa.decimal128(20, 0)),
        ("tail", pa.bool_()),
        ("note", pa.string()),
    ]
)

CELL_DDL = (
    "tier string, cluster string, topic string, topic_id string, partition int, stream string, "
    "producer string, window_start_ms bigint, chunk_start bigint, count bigint, byte_count bigint, "
    "first_offset bigint, last_offset bigint, first_append_ms bigint, last_append_ms bigint, base bigint, "
    "bitmap binary, repeats array<struct<sequence: bigint, extra: bigint>>, again array<binary>, "
    "unsequenced_count bigint, digest decimal(20,0), tail boolean, note string"
)


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a row was counted."""

    tier: str
    cluster: str
    topic: str
    topic_id: str
    partition: int
    tail: bool


def cell_batches(
    place: RowPlace, counted: CountedCells, chunk_offsets: int, most_rows: int
) -> Iterator[pa.RecordBatch]:
    """The rows of cells that were counted at one place, at most so many at a time."""
    from millrace.audit.scanning import scan

    count = len(counted)
    if not count:
        return
    groups = counted.groups
    high = groups[:, scan.G_HIGH]
    is_numbered = high != scan.COUNT_ONLY
    base = np.where(is_numbered, high << 32, 0)
    producers = pa.DictionaryArray.from_arrays(
        pa.array(counted.producer_numbers), pa.array(counted.producers, pa.string())
    )
    records = groups[:, scan.G_COUNT]
    columns: dict[str, Any] = {
        "tier": place.tier,
        "cluster": place.cluster,
        "topic": place.topic,
        "topic_id": place.topic_id,
        "partition": place.partition,
        "stream": _hexadecimal(groups[:, scan.G_STREAM]),
        "producer": producers.cast(pa.string()),
        "window_start_ms": groups[:, scan.G_WINDOW],
        "chunk_start": groups[:, scan.G_CHUNK] * chunk_offsets,
        "count": records,
        "byte_count": groups[:, scan.G_BYTES],
        "first_offset": groups[:, scan.G_FIRST_OFFSET],
        "last_offset": groups[:, scan.G_LAST_OFFSET],
        "first_append_ms": groups[:, scan.G_FIRST_APPEND],
        "last_append_ms": groups[:, scan.G_LAST_APPEND],
        "base": base,
        "bitmap": counted.bitmaps.to_column(),
        "repeats": None,
        "again": pa.ListArray.from_arrays(
            pa.array(counted.again_bounds, pa.int32()), counted.again.to_column()
        ),
        "unsequenced_count": np.where(is_numbered, 0, records),
        "digest": decimals(groups[:, scan.G_DIGEST], counted.digested),
        "tail": place.tail,
        "note": None,
    }
    batch = pa.RecordBatch.from_arrays(
        [column_of(columns[each.name], each.type, count) for each in CELL_SCHEMA], schema=CELL_SCHEMA
    )
    for first in range(0, count, most_rows):
        yield batch.slice(first, most_rows)


_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


def _hexadecimal(numbers: NDArray[np.int64]) -> pa.Array:
    """Each as the 16 digits of its 64 bits."""
    octets = np.ascontiguousarray(numbers).astype(">i8").view(np.uint8)
    digits = _DIGITS[np.column_stack((octets >> 4, octets & 0xF)).ravel()]
    bounds = np.arange(len(numbers) + 1, dtype=np.int32) * 16
    return pa.Array.from_buffers(
        pa.string(), len(numbers), [None, pa.py_buffer(bounds), pa.py_buffer(digits)]
    )


@dataclass(slots=True)
class NoteRows:
    """Collects notes; `flush` gives them as one RecordBatch."""

    _columns: dict[str, list[object]] = field(
        default_factory=lambda: {name: [] for name in CELL_SCHEMA.names}
    )

    def __len__(self) -> int:
        return len(self._columns["tier"])

    def add_note(
        self, place: RowPlace, note: str, count: int, first_offset: int = -1, last_offset: int = -1
    ) -> None:
        self._add(
            place, note=note, count=count, first_offset=first_offset, last_offset=last_offset, stream=""
        )

    def add_totals(self, place: RowPlace, totals: ScanTotals) -> None:
        """Notes of what a range's counter read."""
        if totals.records:
            self.add_note(place, NOTE_RECORDS, totals.records)
        if totals.unaudited:
            self.add_note(place, NOTE_UNAUDITED, totals.unaudited)
        for reason, count in totals.untrusted.items():
            self.add_note(place, NOTE_UNTRUSTED + reason, count)

    def flush(self) -> pa.RecordBatch:
        columns = self._columns
        self._columns = {name: [] for name in CELL_SCHEMA.names}
        return pa.RecordBatch.from_arrays(
            [pa.array(columns[field_.name], field_.type) for field_ in CELL_SCHEMA], schema=CELL_SCHEMA
        )

    def _add(self, place: RowPlace, **values: object) -> None:
        values.update(
            tier=place.tier,
            cluster=place.cluster,
            topic=place.topic,
            topic_id=place.topic_id,
            partition=place.partition,
            tail=place.tail,
        )
        for name, column in self._columns.items():
            column.append(values.get(name))


def cells_of(table: pa.Table | pa.RecordBatch) -> Iterator[Cell]:
    """The cells among the rows; notes are left out."""
    rows = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
    for row in in_sets(rows).to_pylist():
        if row["note"] is not None:
            continue
        yield Cell(
            tier=row["tier"],
            cluster=row["cluster"],
            topic=row["topic"],
            partition=row["partition"],
            stream=row["stream"],
            producer=row["producer"] or "",
            window_start_ms=row["window_start_ms"],
            chunk_start=row["chunk_start"],
            count=row["count"],
            byte_count=row["byte_count"],
            first_offset=row["first_offset"],
            last_offset=row["last_offset"],
            first_append_ms=row["first_append_ms"],
            last_append_ms=row["last_append_ms"],
            base=row["base"],
            bitmap=row["bitmap"] or b"",
            again=tuple(row.get("again") or ()),
            unsequenced_count=row["unsequenced_count"] or 0,
            digest=None if row["digest"] is None else int(row["digest"]),
            topic_id=row["topic_id"] or "",
        )
