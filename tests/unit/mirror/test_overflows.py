"""Deltas and offsets that do not fit into 64 bits: as readers of the source see them, or refused by name."""

from __future__ import annotations

import pytest

from millrace.mirror.batches.coalesce import COALESCE_BELOW, BatchWalk, BeyondTheEnd
from millrace.mirror.batches.intake import prepare
from tests.unit.mirror.fetch_answers import NO_LIMIT, Answer, Raw, contents, raw_batch, taken

GREATEST, LEAST = 2**63 - 1, -(2**63)


def as_64_bits(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("codec", [0, 3])
@pytest.mark.parametrize("coalesce_below", [0, COALESCE_BELOW], ids=["apart", "merged"])
def test_times_that_overflow_are_those_that_readers_of_the_source_see(
    coalesce_below: int, codec: int
) -> None:
    """They add a base and a delta of 64 bits each, and so does whoever reads the target."""
    times = [
        (GREATEST, 1),
        (GREATEST, 0),
        (GREATEST, GREATEST),
        (LEAST, -1),
        (LEAST, LEAST),
        (1_000, GREATEST),
        (1_000, LEAST),
        (-1, 0),
    ]
    data = bytearray()
    for offset, (base_ms, delta) in enumerate(times):
        records = [Raw(0, delta, b"k", b"%d" % offset)]
        data += raw_batch(records, base_offset=offset, base_ms=base_ms, max_ms=GREATEST, codec=codec)
    prepared = taken(Answer(data, [], 0, len(times)), coalesce_below=coalesce_below)
    assert (len(prepared) == 1) == bool(coalesce_below)
    found = [
        (record.offset, as_64_bits(record.timestamp_ms))
        for each in prepared
        for record in contents(each.batch or b"", each.offsets)
    ]
    assert found == [(offset, as_64_bits(base + delta)) for offset, (base, delta) in enumerate(times)]


@pytest.mark.parametrize(("base_offset", "size"), [(GREATEST, 1), (GREATEST - 1, 3), (GREATEST - 2, 3)])
def test_a_batch_whose_offsets_overflow_is_refused_and_what_lies_before_it_is_read(
    base_offset: int, size: int
) -> None:
    data = raw_batch([Raw(0, 0, value=b"before")], base_offset=7)
    data += raw_batch([Raw(delta, 0) for delta in range(size)], base_offset=base_offset)
    found = prepare(BatchWalk(), memoryview(bytes(data)), [], 7, NO_LIMIT, lambda *_: None)
    assert list(next(found).offsets) == [7]
    with pytest.raises(BeyondTheEnd, match=f"claims to end at {base_offset + size}"):
        next(found)
