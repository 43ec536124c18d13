"""Rows of a table as the records that they were: the scan must count both alike."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest

from millrace.audit.contract.header import encode_identity, encode_prefix
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import index_fetched
from millrace.audit.scanning.row_records import records_of
from millrace.broker.protocol.batch_kernels import B_ATTRIBUTES, B_MAX_MS
from millrace.broker.protocol.records import build_batch, read_records
from tests import seeds
from tests.cells import rows_of

NAMES = [b"p"] * 20 + [b"", b"another", b"n" * 300, b"a\nb"]
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
ROWS = pa.schema(
    [
        ("offset", pa.int64()),
        ("append_ms", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("value_size", pa.int32()),
        ("headers", HEADERS),
    ]
)


class Record:
    """What a producer wrote."""

    def __init__(self, rng: random.Random, offset: int, sequence: int) -> None:
        self.offset = offset
        self.timestamp_ms = 1_700_000_000_000 + offset
        self.key = rng.choice([None, b"", b"k" * rng.randrange(1, 300)])
        self.value = rng.choice([None, b"", rng.randbytes(rng.randrange(1, 400))])
        identity = encode_identity(
            encode_prefix(f"{rng.randrange(1, 4):016x}"), sequence, 60_000 * sequence, rng.choice(NAMES)
        )
        stamped = rng.choice([identity, identity, identity, identity[:11], b"\x07" + identity[1:], None, b""])
        more = [("trace", rng.choice([None, b"", b"x" * 200])), ("é" * 70, b"y")]
        self.headers = rng.choice([[], [("_mr", stamped)], [*more, ("_mr", b"old"), ("_mr", stamped), *more]])


def row(record: Record, *, append_ms: int = -1) -> dict:
    return {
        "offset": record.offset,
        "append_ms": append_ms,
        "key": record.key,
        "value": record.value,
        "value_size": -1 if record.value is None else len(record.value),
        "headers": [{"key": key, "value": value} for key, value in record.headers] or None,
    }


def cells(counter: CellCounter) -> list:
    return sorted(
        (
            (c.stream, c.window_start_ms, c.chunk, c.count, c.byte_count, c.first_offset, c.last_offset,
             c.first_append_ms, c.last_append_ms, c.producer, sorted(c.sequences), c.repeats, c.digest)
            for c in rows_of(counter.take())
        ),
        key=str,
    )  # fmt: skip


@pytest.mark.parametrize("digest", [False, True])
def test_random_records_are_counted_as_in_the_batch_that_a_broker_holds(digest):
    rng = random.Random(seeds.given())
    offset, records = 0, []
    for sequence in range(1, 400):
        offset += rng.choice([1, 1, 1, 2, 7])  # markers and aborted records leave holes
        records.append(Record(rng, offset, sequence))
    counters = [CellCounter(120_000, 256, digest=digest) for _ in range(2)]
    for first in range(0, len(records), 50):
        part = records[first : first + 50]
        # A batch's offsets are dense on the wire: one for each record, with its own base.
        for record in part:
            batch = bytearray(build_batch([record], base_offset=record.offset))
            fetched = index_fetched(bytes(batch))
            counters[0].count(fetched.buffer, fetched.index, 0, 1 << 62)
        rows = pa.RecordBatch.from_pylist([row(each) for each in part], ROWS)
        if not digest:  # keys and values do not travel then
            rows = rows.set_column(2, "key", pa.nulls(len(part), pa.binary()))
            rows = rows.set_column(3, "value", pa.nulls(len(part), pa.binary()))
        made = records_of(rows, content=digest)
        counters[1].count(made.buffer, made.index, 0, 1 << 62)
    assert counters[0].totals() == counters[1].totals()
    assert counters[0].totals().records == len(records)
    expected, found = cells(counters[0]), cells(counters[1])
    assert expected == found and len(expected) > 3
    assert any(cell[-1] is not None for cell in found) == digest


def test_append_times_are_those_of_the_rows():
    rng = random.Random(1)
    records = [Record(rng, offset, offset + 1) for offset in range(6)]
    times = [5, 5, 9, 9, -1, 9]
    rows = pa.RecordBatch.from_pylist(
        [row(record, append_ms=at) for record, at in zip(records, times, strict=True)], ROWS
    )
    index = records_of(rows, content=True).index
    assert index[:, B_MAX_MS].tolist() == [5, 9, -1, 9]
    assert (index[:, B_ATTRIBUTES] & 8 > 0).tolist() == [True, True, False, True]


def test_slices_and_empty_rows():
    rng = random.Random(2)
    records = [Record(rng, offset, offset + 1) for offset in range(30)]
    whole = pa.RecordBatch.from_pylist([row(each) for each in records], ROWS)
    for first, count in ((0, 30), (11, 7), (29, 1), (5, 0)):
        made = records_of(whole.slice(first, count), content=True)
        counter = CellCounter(60_000, 1 << 20)
        counter.count(made.buffer, made.index, 0, 1 << 62)
        assert counter.totals().records == count
    assert np.diff(made.index[:, 0]).size == 0


def test_the_bytes_are_those_of_the_protocol():
    record = Record(random.Random(3), 0, 1)
    record.headers = [("_mr", b"1"), ("n", None), ("e", b"")]
    record.timestamp_ms = 0
    batch = bytes(build_batch([record], base_offset=0))
    made = records_of(pa.RecordBatch.from_pylist([row(record)], ROWS), content=True)
    assert made.buffer.tobytes() == batch[61:]
    assert list(read_records(batch)[0].headers) == record.headers
