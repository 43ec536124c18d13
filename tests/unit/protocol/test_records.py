"""Hostile records sections, each refused for its reason by the kernel and by the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.broker.errors import InvalidRecord, RecordTooLarge
from millrace.broker.protocol import records as records_module
from millrace.broker.protocol.batch import HEADER_SIZE
from millrace.broker.protocol.records import (
    MOST_NAMED,
    Record,
    build_batch,
    recompress,
    refused_records,
    scan_records,
    validate_records,
)
from millrace.broker.protocol.wire import zigzag
from tests import records_oracle


def _record(body: bytes) -> bytes:
    return zigzag(len(body)) + body


def _body(
    *,
    timestamp: bytes = b"\x00",
    offset: int = 0,
    key: bytes = b"\x01",
    value: bytes = b"\x01",
    headers: bytes = b"\x00",
) -> bytes:
    return b"\x00" + timestamp + zigzag(offset) + key + value + headers


GOOD = _record(_body())
LONG_VARINT = b"\xff" * 10

HOSTILE = {
    "a record of length 0": (_record(b""), 1),
    "a negative length": (zigzag(-5) + b"\x00" * 6, 1),
    "a length beyond the section": (zigzag(100) + _body(), 1),
    "a length of 2 GB": (zigzag(2**31 - 1) + _body(), 1),
    "a length varint that never ends": (LONG_VARINT + b"\xff" * 10, 1),
    "a length varint of 33 bits": (b"\xff\xff\xff\xff\x1f" + _body(), 1),
    "a timestamp of 65 bits": (_record(_body(timestamp=b"\xff" * 9 + b"\x02")), 1),
    "offsets that begin at 1": (_record(_body(offset=1)), 1),
    "offsets that repeat": (GOOD + GOOD, 2),
    "a key beyond its record": (_record(_body(key=zigzag(50))), 1),
    "a key of size -2": (_record(_body(key=zigzag(-2))), 1),
    "a key that reaches into the next record": (
        _record(_body(key=zigzag(8))) + _record(_body(offset=1)),
        2,
    ),
    "a value of 2 GB": (_record(_body(value=zigzag(2**31 - 1))), 1),
    "a negative header count": (_record(_body(headers=zigzag(-1))), 1),
    "two billion headers": (_record(_body(headers=zigzag(2**31 - 1))), 1),
    "a header without a key": (_record(_body(headers=zigzag(1) + b"\x01\x01")), 1),
    "a header that is cut": (_record(_body(headers=zigzag(1) + zigzag(3) + b"ab")), 1),
    "bytes after the fields": (_record(_body() + b"\x00"), 1),
    "bytes after the last record": (GOOD + b"\x00", 1),
    "a record less than announced": (GOOD + b"\x00" * 7, 2),
    "a record more than announced": (GOOD + _record(_body(offset=1)), 1),
    "no record": (b"", 0),
    "a negative count": (GOOD, -1),
    "two billion records": (GOOD, 2**31 - 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_section_is_refused(name: str) -> None:
    section, count = HOSTILE[name]
    with pytest.raises(InvalidRecord):
        validate_records(section, count)
    with pytest.raises(InvalidRecord):
        records_oracle.check_records(section, count)


def test_good_section_gives_least_and_greatest_timestamp() -> None:
    batch = build_batch([Record(b"k", None, (), t) for t in (1000, 990, 1500)])
    assert validate_records(memoryview(batch)[HEADER_SIZE:], 3) == (-10, 500, 0)


def test_records_without_a_key_are_counted_and_an_empty_key_is_one() -> None:
    section = build_batch([Record(b"k", b"v"), Record(None, b"v"), Record(b"", b"v"), Record(None, None)])
    assert validate_records(section[HEADER_SIZE:], 4) == (0, 0, 2)


def test_refused_records_are_found_by_key_and_by_time_as_far_as_there_is_room() -> None:
    base = 1_000
    batch = build_batch(
        [Record(key, b"v", (), time) for key, time in ((b"k", base), (None, base), (b"", 899), (b"k", 1_101))]
    )
    section = bytes(batch[HEADER_SIZE:])

    def found(times: range, *, keys_required: bool = True, unset: int = -1 - base) -> list[tuple[int, str]]:
        return refused_records(section, 4, keys_required=keys_required, times=times, unset=unset)

    assert found(range(-100, 101)) == [(1, "no key"), (2, "too old"), (3, "too new")]
    assert found(range(-101, 102)) == [(1, "no key")]
    assert found(range(-101, 102), keys_required=False) == []
    assert found(range(-100, 102), keys_required=False, unset=-101) == []
    many = build_batch([Record(None, None)] * (MOST_NAMED + 1))[HEADER_SIZE:]
    named = refused_records(many, MOST_NAMED + 1, keys_required=True, times=range(1), unset=-1)
    assert [place for place, _ in named] == list(range(MOST_NAMED))


def test_scan_takes_sparse_offsets() -> None:
    section = _record(_body(offset=3)) + _record(_body(offset=9))
    assert scan_records(section, 2).offset_delta.tolist() == [3, 9]


def test_scan_refuses_an_offset_of_33_bits() -> None:
    too_long = b"\x00\x00" + b"\x80\x80\x80\x80\x10" + b"\x01\x01\x00"
    with pytest.raises(InvalidRecord, match="too long"):
        scan_records(_record(too_long), 1)


def test_scan_of_a_count_that_cannot_be_allocates_nothing() -> None:
    with pytest.raises(InvalidRecord, match="announces"):
        scan_records(GOOD, 2**31 - 1)


def test_columns_have_their_types() -> None:
    columns = scan_records(GOOD, 1)
    assert columns.offset_delta.dtype == columns.key_size.dtype == np.int32
    assert columns.timestamp_delta.dtype == columns.value_position.dtype == np.int64


def test_empty_batch_is_not_built() -> None:
    with pytest.raises(ValueError, match="at least one"):
        build_batch([])


def test_plain_records_are_not_compressed_into_more_than_readers_decompress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = build_batch([Record(None, bytes(1000), (), 0)])
    size = len(batch) - HEADER_SIZE
    monkeypatch.setattr(records_module, "MAX_DECOMPRESSED_SIZE", size)
    recompress(batch, 1)
    monkeypatch.setattr(records_module, "MAX_DECOMPRESSED_SIZE", size - 1)
    recompress(batch, 0)
    with pytest.raises(RecordTooLarge):
        recompress(batch, 1)
