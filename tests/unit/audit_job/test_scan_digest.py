"""Content digests summed by the scan, against the definition in `content_digest`."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from millrace.audit.contract.content_digest import digest_sum, record_digest
from millrace.audit.scanning.cell_rows import RowPlace, cell_batches, cells_of
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import index_fetched
from millrace.audit.scanning.scan import G_DIGEST
from millrace.audit.scanning.xxh64 import xxh64
from millrace.audit.spark.task_reader import count_batches
from millrace.broker.protocol.compression import LZ4, compress
from tests.cells import CountedRow, rows_of
from tests.unit.audit.content_vectors import DIGEST_SUM, VECTORS

EVERYTHING = (0, 1 << 62)
field = st.none() | st.binary(max_size=300)
headers = st.lists(st.tuples(st.binary(max_size=20).filter(lambda key: key != b"_mr"), field), max_size=4)


def rows(content: bytes, digest: bool = True) -> list[CountedRow]:
    counter = CellCounter(1 << 40, 1 << 20, digest=digest)
    count_batches(counter, index_fetched(content), *EVERYTHING)
    return rows_of(counter.take())


def stamped(build, delta, sequence, key, value, others, at: int = 0) -> bytes:
    """A record whose `_mr` header stands before the others[at]."""
    others = [(name.encode() if isinstance(name, str) else name, content) for name, content in others]
    others.insert(at, (b"_mr", build.identity(1, sequence, 1000)))
    return build.record(delta, others, value=value, key=key)


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(0, 30), st.integers(0, (1 << 64) - 1))
def test_hash_of_any_stretch_is_that_of_the_library(content, first, seed):
    buffer = np.frombuffer(content + b"!", np.uint8)
    buffer.flags.writeable = False
    first = min(first, len(content))
    assert xxh64(buffer, first, len(content), seed) == xxh64_intdigest(content[first:], seed)


def test_known_answers(build):
    for sequence, key, value, others, digest in VECTORS:
        for at in range(len(others) + 1):
            (row,) = rows(build.batch(0, [stamped(build, 0, sequence, key, value, others, at)]))
            assert row.digest == digest


def test_cells_hold_the_sums_of_their_records(build):
    records = [stamped(build, i, *each[:4]) for i, each in enumerate(VECTORS)]
    plain = rows(build.batch(0, records))
    assert len(plain) == 3, "count-only, usual, and beyond 2^32"
    assert digest_sum(row.digest or 0 for row in plain) == DIGEST_SUM
    packed = bytearray(build.batch(0, [bytes(compress(LZ4, b"".join(records)))], attributes=LZ4))
    packed[57:61] = len(records).to_bytes(4, "big")
    assert digest_sum(row.digest or 0 for row in rows(bytes(packed))) == DIGEST_SUM


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, (1 << 32) - 1), field, field, headers), min_size=1, max_size=20))
def test_any_records_sum_to_what_the_definition_says(content):
    from tests.unit.audit_job.conftest import Builder

    build = Builder()
    rng = random.Random(1)
    records = [
        stamped(build, i, sequence, key, value, others, rng.randrange(len(others) + 1))
        for i, (sequence, key, value, others) in enumerate(content)
    ]
    (row,) = rows(build.batch(0, records))
    assert row.digest == digest_sum(record_digest(*each) for each in content)


def test_repeats_and_every_identity_header_are_left_to_their_rules(build):
    twice = stamped(build, 0, 5, b"k", b"v", ())
    (row,) = rows(build.batch(0, [twice, twice]))
    assert row.digest == 2 * record_digest(5, b"k", b"v") % (1 << 64)
    forwarded = build.record(
        0, [(b"_mr", build.identity(9, 1, 1)), (b"_mr", build.identity(1, 5, 1000))], value=b"v", key=b"k"
    )
    (row,) = rows(build.batch(0, [forwarded]))
    assert row.digest == record_digest(5, b"k", b"v")


def test_no_digest_where_none_was_asked_for(build):
    (row,) = rows(build.batch(0, [build.stamped(0, 1, 1)]), digest=False)
    assert row.digest is None


def test_no_digest_where_a_length_is_not_written_in_the_shortest_way(build):
    """Whoever copies such a record may write it shorter: another digest would not mean another content."""
    plain = build.stamped(0, 1, 1, value=b"value")
    odd = plain[:1] + plain[1:].replace(bytes((10,)) + b"value", bytes((0x8A, 0)) + b"value")
    odd = build.varint(len(odd) - 1) + odd[1:]
    (row,) = rows(build.batch(0, [build.stamped(0, 1, 2), odd]))
    assert row.count == 2 and row.digest is None


def test_digest_reaches_the_cell_on_disk_whole(build):
    counter = CellCounter(1 << 40, 1 << 20, digest=True)
    count_batches(counter, index_fetched(build.batch(0, [build.stamped(0, 1, 1)])), *EVERYTHING)
    counted = counter.take()
    counted.groups[0, G_DIGEST] = -1  # as the kernel's 64 bits are, taken with a sign
    (batch,) = cell_batches(RowPlace("t", "c", "x", "", 0, False), counted, 1 << 20, 10)
    (cell,) = cells_of(batch)
    assert cell.digest == (1 << 64) - 1
