"""What one Spark task does: read its ranges, count or decode the records, yield Arrow batches.

Loaded by `spark_source` inside the worker processes only, because it pulls in the compiled scan and the
client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from millrace.audit.scanning.cell_rows import NOTE_READ, NOTE_UNREAD, NoteRows, RowPlace, cell_batches
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import (
    COMPACTED,
    DAMAGED,
    EXPIRED,
    FetchedBatches,
    RangeReader,
    offsets_of,
)
from millrace.audit.scanning.scan import MALFORMED
from millrace.audit.scanning.unpack import Unpacker
from millrace.audit.spark.read_meter import Told
from millrace.audit.spark.read_options import RECORDS, ReadOptions
from millrace.audit.spark.record_rows import RecordRows
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.protocol.batch_kernels import B_END, B_MAGIC, B_POSITION

ROWS_PER_ARROW_BATCH = 10_000


def read_task(
    ranges: Sequence[OffsetRange], options: ReadOptions, told: Told | None = None
) -> Iterator[pa.RecordBatch]:
    """Every row of the task, in the schema of the options' mode; `told` hears what cells are counted of."""
    with RangeReader(
        options.bootstraps,
        options.fetch_max_bytes,
        options.securities,
        read_committed=options.read_committed,
    ) as reader:
        if options.mode == RECORDS:
            yield from _read_records(reader, ranges, options)
        else:
            yield from _read_cells(reader, ranges, options, told)


def _place(range_: OffsetRange) -> RowPlace:
    return RowPlace(
        range_.tier, range_.cluster, range_.topic, range_.topic_id, range_.partition, range_.tail
    )  # fmt: skip


def _read_cells(
    reader: RangeReader,
    ranges: Sequence[OffsetRange],
    options: ReadOptions,
    told: Told | None = None,
) -> Iterator[pa.RecordBatch]:
    notes = NoteRows()
    unpacker = Unpacker()
    for range_ in ranges:
        place = _place(range_)
        counter = CellCounter(options.window_ms, options.chunk_offsets, options.digest)
        note_unread = partial(_note_unread, notes, place)
        byte_count = 0
        for batches in reader.read(range_, counter.distrust, note_unread):
            byte_count += len(batches.buffer)
            count_batches(counter, batches, range_.first_offset, range_.end_offset, unpacker, note_unread)
            if counter.is_full():
                yield from _take(counter, place, options)
        yield from _take(counter, place, options)
        totals = counter.totals()
        if told is not None:
            told.add(byte_count, totals.records)
        notes.add_totals(place, totals)
        notes.add_note(place, NOTE_READ, range_.size, range_.first_offset, range_.end_offset - 1)
        if len(notes) >= ROWS_PER_ARROW_BATCH:
            yield notes.flush()
    if len(notes):
        yield notes.flush()


def _take(counter: CellCounter, place: RowPlace, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    return cell_batches(place, counter.take(), options.chunk_offsets, ROWS_PER_ARROW_BATCH)


def _note_unread(notes: NoteRows, place: RowPlace, first_offset: int, end_offset: int, cause: str) -> None:
    notes.add_note(place, NOTE_UNREAD + cause, end_offset - first_offset, first_offset, end_offset - 1)


def count_batches(
    counter: CellCounter,
    batches: FetchedBatches,
    first_offset: int,
    end_offset: int,
    unpacker: Unpacker | None = None,
    unread: Callable[[int, int, str], None] | None = None,
) -> None:
    """Count a fetch's batches; `unpacker` is the task's own, whose buffer is used again. `unread` is told the
    offsets of batches whose records cannot be had: what was in them is not known, and not lost."""
    for part in (unpacker or Unpacker()).parts(batches, counter.distrust, unread):
        counter.count(part.buffer, part.index, first_offset, end_offset)
        if unread is not None:
            for row in np.flatnonzero(part.index[:, B_MAGIC] == MALFORMED).tolist():
                unread(*offsets_of(part.index[row]), DAMAGED)


def _read_records(
    reader: RangeReader, ranges: Sequence[OffsetRange], options: ReadOptions
) -> Iterator[pa.RecordBatch]:
    rows = RecordRows(options)
    for range_ in ranges:
        yield from _read_range(reader, range_, rows, options.fail_on_loss)
    if len(rows):
        yield rows.flush()


def _read_range(
    reader: RangeReader, range_: OffsetRange, rows: RecordRows, fail_on_loss: bool
) -> Iterator[pa.RecordBatch]:
    shown = range_

    def unread(first_offset: int, end_offset: int, cause: str) -> None:
        nonlocal shown
        if fail_on_loss:
            _refuse_unread(first_offset, end_offset, cause)
        elif cause == EXPIRED:
            # The log may begin within a batch now, which is given whole: what was before is deleted.
            shown = replace(range_, first_offset=end_offset)

    for batches in reader.read(range_, _refuse, unread):
        view = batches.buffer.data
        for position, end, magic in batches.index[:, [B_POSITION, B_END, B_MAGIC]].tolist():
            if magic == 2:
                yield from rows.add(shown, view[position:end])


def _refuse(reason: str) -> None:
    raise ValueError(f"records mode cannot show a {reason}; read the range in cells mode")


def _refuse_unread(first_offset: int, end_offset: int, cause: str) -> None:
    if cause == COMPACTED:
        return  # what compaction left is all that there is to show
    raise ValueError(
        f"offsets {first_offset} to {end_offset - 1} cannot be read any more: {cause}; "
        "option failOnDataLoss false passes over them"
    )
