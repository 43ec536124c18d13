from __future__ import annotations

import struct

import pytest

from millrace.broker.protocol.batch import HEADER_SIZE, parse_header, seal, verify_crc
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.mirror.batches.rebatch import BatchPath, choose_path, rebuild, split, stamp_for_target

RECORDS = [
    Record(b"k%d" % index, b"v" * index, (("h", b"x"), ("n", None)), timestamp_ms=1_000 + index)
    for index in range(6)
]
NO_LIMIT = 1 << 30


def batch(compression: int = 0, base_offset: int = 100, **fields: object) -> bytearray:
    return build_batch(RECORDS, compression=compression, base_offset=base_offset, **fields)  # type: ignore[arg-type]


def with_attributes(data: bytearray, bits: int) -> bytearray:
    (attributes,) = struct.unpack_from(">h", data, 21)
    struct.pack_into(">h", data, 21, attributes | bits)
    seal(data)
    return data


def sparse(data: bytearray, extra: int) -> bytearray:
    """As if compaction had removed the last records: the offsets reach further than the count."""
    (delta,) = struct.unpack_from(">i", data, 23)
    struct.pack_into(">i", data, 23, delta + extra)
    seal(data)
    return data


@pytest.mark.parametrize("compression", range(5))
def test_pass_through_keeps_record_bytes(compression: int) -> None:
    data = batch(compression, producer_id=9, producer_epoch=1, base_sequence=5, leader_epoch=4)
    records = bytes(data[HEADER_SIZE:])
    header = parse_header(data)
    assert choose_path(header, from_offset=100, max_batch_size=NO_LIMIT) is BatchPath.PASS_THROUGH
    stamp_for_target(memoryview(data), 77, 3, 1_000)
    stamped = parse_header(data)
    verify_crc(data, 0, stamped)
    assert bytes(data[HEADER_SIZE:]) == records
    assert (stamped.base_offset, stamped.leader_epoch) == (0, -1)
    assert (stamped.producer_id, stamped.producer_epoch, stamped.base_sequence) == (77, 3, 1_000)
    assert stamped.compression == compression
    assert (stamped.base_timestamp, stamped.max_timestamp) == (1_000, 1_005)


def test_stamp_clears_what_only_a_source_may_say() -> None:
    data = with_attributes(batch(compression=4), 0x10 | 0x40)
    stamp_for_target(memoryview(data), 1, 0, 0)
    assert parse_header(data).attributes == 4


@pytest.mark.parametrize("bits", [0, 0x10 | 0x40], ids=["plain", "from_a_transaction"])
def test_stamp_sets_the_bit_of_the_mirrors_own_transaction(bits: int) -> None:
    data = with_attributes(batch(compression=4), bits)
    stamp_for_target(memoryview(data), 1, 0, 0, transactional=True)
    assert parse_header(data).attributes == 4 | 0x10
    verify_crc(data, 0, parse_header(data))


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (batch(), BatchPath.PASS_THROUGH),
        (with_attributes(batch(), 0x10), BatchPath.PASS_THROUGH),
        (with_attributes(batch(), 0x40), BatchPath.PASS_THROUGH),
        (with_attributes(batch(), 0x20), BatchPath.DROP),
        (with_attributes(batch(), 0x08), BatchPath.REBUILD),
        (with_attributes(batch(), 0x100), BatchPath.REBUILD),
        (sparse(batch(), 3), BatchPath.REBUILD),
    ],
    ids=["plain", "transactional", "horizon", "control", "append_time", "unknown_bit", "sparse"],
)
def test_path_follows_from_the_header(data: bytearray, path: BatchPath) -> None:
    assert choose_path(parse_header(data), from_offset=100, max_batch_size=NO_LIMIT) is path


def test_batch_over_the_limit_or_before_the_offset_is_rebuilt() -> None:
    header = parse_header(batch())
    assert choose_path(header, from_offset=100, max_batch_size=header.size) is BatchPath.PASS_THROUGH
    assert choose_path(header, from_offset=100, max_batch_size=header.size - 1) is BatchPath.REBUILD
    assert choose_path(header, from_offset=101, max_batch_size=NO_LIMIT) is BatchPath.REBUILD


def content(record: Record) -> tuple[object, ...]:
    return record.key, record.value, record.headers, record.timestamp_ms


@pytest.mark.parametrize("compression", range(5))
def test_rebuild_keeps_records_and_codec(compression: int) -> None:
    data = sparse(batch(compression), 3)
    (piece,) = rebuild(memoryview(data), parse_header(data), from_offset=102, max_batch_size=NO_LIMIT)
    assert piece.batch is not None
    stamp_for_target(piece.batch, 1, 0, 0)
    header = parse_header(piece.batch)
    verify_crc(piece.batch, 0, header)
    assert header.compression == compression
    assert header.last_offset_delta + 1 == header.record_count == 4
    assert list(piece.offsets) == [102, 103, 104, 105]
    assert [content(record) for record in read_records(piece.batch)] == [
        content(record) for record in RECORDS[2:]
    ]


def test_rebuild_of_append_time_gives_the_time_that_consumers_saw() -> None:
    data = with_attributes(batch(), 0x08)
    (piece,) = rebuild(memoryview(data), parse_header(data), from_offset=0, max_batch_size=NO_LIMIT)
    assert piece.batch is not None
    assert not parse_header(piece.batch).is_log_append_time
    assert {record.timestamp_ms for record in read_records(piece.batch)} == {1_005}


def test_rebuild_splits_to_the_limit_and_names_what_cannot_be_split() -> None:
    records = [Record(None, b"x" * size, timestamp_ms=1) for size in (10, 10, 900, 10)]
    data = build_batch(records, base_offset=50)
    pieces = rebuild(memoryview(data), parse_header(data), from_offset=50, max_batch_size=200)
    assert [offset for piece in pieces for offset in piece.offsets] == [50, 51, 52, 53]
    assert [list(piece.offsets) for piece in pieces if piece.batch is None] == [[52]]
    assert all(len(piece.batch) <= 200 for piece in pieces if piece.batch is not None)


def test_rebuild_without_wanted_records_gives_nothing() -> None:
    data = batch()
    assert rebuild(memoryview(data), parse_header(data), from_offset=106, max_batch_size=NO_LIMIT) == []


def test_split_halves_with_their_offsets() -> None:
    data = batch(compression=3)
    first, second = split(memoryview(data), range(100, 106))
    assert list(first.offsets) == [100, 101, 102]
    assert list(second.offsets) == [103, 104, 105]
    assert second.batch is not None
    assert [record.key for record in read_records(second.batch)] == [b"k3", b"k4", b"k5"]
    assert split(memoryview(build_batch(RECORDS[:1])), range(1)) == []
