"""What one Spark task does: read its ranges, count or decode the records, yield Arrow batches.

Loaded by `spark_source` inside the worker processes only, because it pulls in the compiled scan and the
client; `pin_ranges` is the one part that runs at planning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.audit.contract.header import HEADER_KEY, InvalidIdentity, decode_identity
from millrace.audit.scanning.cell_rows import NOTE_READ, NOTE_UNREAD, NoteRows, Place, cell_batches
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import (
    COMPACTED,
    DAMAGED,
    FetchedBatches,
    RangeReader,
    connect,
    offsets_of,
)
from millrace.audit.scanning.scan import B_END, B_MAGIC, B_POSITION, MALFORMED
from millrace.audit.scanning.unpack import Unpacker
from millrace.audit.spark.partition_sizes import bytes_per_offset
from millrace.audit.spark.spark_source import ReadOptions
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.client.offsets import EARLIEST, LATEST
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.records import read_records

ROWS_PER_ARROW_BATCH = 10_000

_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
RECORD_SCHEMA = pa.schema(
    [
        ("cluster", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp_ms", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(_HEADER)),
        ("stream", pa.string()),
        ("sequence", pa.int64()),
        ("created_ms", pa.int64()),
        ("producer", pa.string()),
    ]
)


def read_task(ranges: Sequence[OffsetRange], options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Every row of the task, in the schema of the options' mode."""
    read = _read_records if options.mode == "records" else _read_cells
    with RangeReader(options.bootstraps, options.fetch_max_bytes, options.securities) as reader:
        yield from read(reader, ranges, options)


async def pin_ranges(options: ReadOptions) -> list[OffsetRange]:
    """Every partition of the topics from its start to its last stable offset, as they are now."""
    ((name, bootstrap),) = options.bootstraps.items()
    async with connect(name, bootstrap, options.securities) as cluster:
        metadata = await cluster.metadata(list(options.topics))
        for topic in options.topics:
            if topic not in metadata.topics:
                raise ConfigError("option topics", topic, f"a topic that cluster {name} has")
        keys = [key for topic in options.topics for key in metadata.partitions(topic)]
        starts = await cluster.list_offsets(dict.fromkeys(keys, EARLIEST))
        ends = await cluster.list_offsets(dict.fromkeys(keys, LATEST), read_committed=True)
        bounds = {key: (starts[key].offset, ends[key].offset) for key in keys}
        densities = await bytes_per_offset(cluster, bounds)
    return [
        OffsetRange(
            cluster=name,
            tier=options.tier,
            topic=topic,
            topic_here=topic,
            partition=number,
            first_offset=starts[topic, number][0],
            end_offset=ends[topic, number][0],
            topic_id=str(metadata.topics[topic].topic_id),
            bytes_per_offset=densities.get((topic, number), 0.0),
        )
        for topic, number in keys
    ]


def _place(range_: OffsetRange) -> Place:
    return Place(
        range_.tier, range_.cluster, range_.topic, range_.topic_id, range_.partition, range_.tail
    )  # fmt: skip


def _read_cells(
    reader: RangeReader, ranges: Sequence[OffsetRange], options: ReadOptions
) -> Iterator[pa.RecordBatch]:
    notes = NoteRows()
    unpacker = Unpacker()
    for range_ in ranges:
        place = _place(range_)
        counter = CellCounter(options.window_ms, options.chunk_offsets, options.digest)
        note_unread = partial(_note_unread, notes, place)
        for batches in reader.read(range_, counter.distrust, note_unread):
            count_batches(counter, batches, range_.first_offset, range_.end_offset, unpacker, note_unread)
            if counter.is_full():
                yield from _take(counter, place, options)
        yield from _take(counter, place, options)
        notes.add_totals(place, counter.totals())
        notes.add_note(place, NOTE_READ, range_.size, range_.first_offset, range_.end_offset - 1)
        if len(notes) >= ROWS_PER_ARROW_BATCH:
            yield notes.flush()
    if len(notes):
        yield notes.flush()


def _take(counter: CellCounter, place: Place, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    return cell_batches(place, counter.take(), options.chunk_offsets, ROWS_PER_ARROW_BATCH)


def _note_unread(notes: NoteRows, place: Place, first_offset: int, end_offset: int, cause: str) -> None:
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
    rows: list[dict[str, Any]] = []
    for range_ in ranges:
        for batches in reader.read(range_, _refuse, _refuse_unread):
            view = batches.buffer.data
            for position, end, magic in batches.index[:, [B_POSITION, B_END, B_MAGIC]].tolist():
                if magic == 2:
                    rows.extend(_record_rows(range_, view[position:end]))
                if len(rows) >= ROWS_PER_ARROW_BATCH:
                    yield pa.RecordBatch.from_pylist(rows, RECORD_SCHEMA)
                    rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, RECORD_SCHEMA)


def _record_rows(range_: OffsetRange, batch: memoryview) -> Iterator[dict[str, Any]]:
    for record in read_records(batch):
        if not range_.first_offset <= record.offset < range_.end_offset:
            continue
        stamped = [value for key, value in record.headers if key == HEADER_KEY]
        identity = None
        if stamped:
            try:
                identity = decode_identity(stamped[-1])
            except InvalidIdentity:
                identity = None  # the row shows the header as it is
        yield {
            "cluster": range_.cluster,
            "topic": range_.topic,
            "partition": range_.partition,
            "offset": record.offset,
            "timestamp_ms": record.timestamp_ms,
            "key": record.key,
            "value": record.value,
            "headers": [{"key": key, "value": value} for key, value in record.headers],
            "stream": identity.stream if identity else None,
            "sequence": identity.sequence if identity else None,
            "created_ms": identity.created_ms if identity else None,
            "producer": identity.producer if identity else None,
        }


def _refuse(reason: str) -> None:
    raise ValueError(f"records mode cannot show a {reason}; read the range in cells mode")


def _refuse_unread(first_offset: int, end_offset: int, cause: str) -> None:
    if cause == COMPACTED:
        return  # what compaction left is all that there is to show
    raise ValueError(f"offsets {first_offset} to {end_offset - 1} cannot be read any more: {cause}")
