"""Codecs by property: what is built reads back, kernels agree with the oracle, garbage is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.broker.errors import CorruptMessage, InvalidRecord, KafkaError, ProtocolError, RecordTooLarge
from millrace.broker.protocol import batch as batch_format
from millrace.broker.protocol import compression, wire
from millrace.broker.protocol.checksum import crc32c, crc32c_reference
from millrace.broker.protocol.records import (
    Record,
    build_batch,
    read_records,
    recompress,
    scan_records,
    validate_records,
    warm_kernels,
    whole_batches,
)
from tests import records_oracle, seeds

warm_kernels()  # not within an example's time

nullable = st.none() | st.binary(max_size=40)
headers = st.lists(st.tuples(st.text(max_size=8), nullable), max_size=3).map(tuple)
timestamps = st.integers(0, 2**45) | st.just(-1)
records = st.lists(
    st.builds(Record, key=nullable, value=nullable, headers=headers, timestamp_ms=timestamps),
    min_size=1,
    max_size=8,
)
codecs = st.sampled_from(sorted(compression.CODEC_NAMES))


@given(records, codecs)
def test_batch_built_and_read_gives_its_records(given_records: list[Record], codec: int) -> None:
    batch = build_batch(given_records, compression=codec, base_offset=2**40)
    header = batch_format.parse_header(batch)
    batch_format.verify_crc(batch, 0, header)
    found = read_records(batch)
    assert [(r.key, r.value, r.headers, r.timestamp_ms) for r in found] == [
        (r.key, r.value, r.headers, r.timestamp_ms) for r in given_records
    ]
    assert [r.offset for r in found] == [2**40 + n for n in range(len(given_records))]
    assert header.record_count == len(given_records) == header.last_offset_delta + 1
    assert header.max_timestamp == max(r.timestamp_ms for r in given_records)


@given(records, codecs, codecs)
def test_recompressed_batch_keeps_its_records(given_records: list[Record], first: int, second: int) -> None:
    batch = build_batch(given_records, compression=first, producer_id=9, producer_epoch=1, base_sequence=5)
    changed = recompress(batch, second)
    header = batch_format.parse_header(changed)
    batch_format.verify_crc(changed, 0, header)
    assert header.compression == second
    assert read_records(changed) == read_records(batch)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 1, 5)


@given(records)
def test_scan_gives_the_columns_of_the_oracle(given_records: list[Record]) -> None:
    section = bytes(build_batch(given_records)[batch_format.HEADER_SIZE :])
    columns = scan_records(section, len(given_records))
    for number, raw in enumerate(records_oracle.iterate_records(section, len(given_records))):
        assert columns.offset_delta[number] == raw.offset_delta
        assert columns.timestamp_delta[number] == raw.timestamp_delta
        for size, position, field in (
            (columns.key_size[number], columns.key_position[number], raw.key),
            (columns.value_size[number], columns.value_position[number], raw.value),
        ):
            assert (None if size < 0 else section[position : position + size]) == field
        assert columns.headers_count[number] == len(raw.headers)


@settings(max_examples=seeds.examples(400))
@given(
    records,
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([0, 1, 2, 3, 14, 0x7F, 0x80, 0xFF])), max_size=3),
    st.none() | st.integers(0, 400),
    st.integers(-1, 1),
)
def test_kernel_accepts_exactly_what_the_oracle_accepts(
    given_records: list[Record],
    changes: list[tuple[int, int]],
    cut: int | None,
    count_change: int,
) -> None:
    section = bytearray(build_batch(given_records)[batch_format.HEADER_SIZE :])
    for position, value in changes:
        section[position % len(section)] = value
    section = section[:cut]
    count = len(given_records) + count_change
    try:
        expected = records_oracle.check_records(section, count)
    except InvalidRecord:
        with pytest.raises(InvalidRecord):
            validate_records(section, count)
    else:
        assert validate_records(section, count) == expected
    try:
        list(records_oracle.iterate_records(section, max(count, 0)))
    except InvalidRecord:
        with pytest.raises(InvalidRecord):
            scan_records(section, max(count, 0))
    else:
        scan_records(section, max(count, 0))


@given(st.lists(records, min_size=1, max_size=4), st.integers(0, 4000), st.integers(-1, 40))
def test_whole_batches_ends_where_iteration_ends(runs: list[list[Record]], cut: int, end_offset: int) -> None:
    data = bytearray()
    offset = 0
    for run in runs:
        data += build_batch(run, base_offset=offset)
        offset += len(run)
    data = data[:cut]
    size, next_offset, following = whole_batches(data, end_offset)
    expected_size, expected_next = 0, -1
    for position, header in batch_format.iterate_batches(data):
        if header.base_offset >= end_offset:
            break
        expected_size, expected_next = position + header.size, header.next_offset
    assert (size, next_offset) == (expected_size, expected_next)
    if following:
        assert following == batch_format.parse_header(data, size).size > len(data) - size


@given(st.binary(max_size=3000), codecs)
def test_compression_round_trip_keeps_the_bytes(data: bytes, codec: int) -> None:
    packed = compression.compress(codec, data)
    assert bytes(compression.decompress(codec, packed, max(len(data), 1))) == data
    if codec and len(data) > 1:
        with pytest.raises(RecordTooLarge):
            compression.decompress(codec, packed, len(data) - 1)


@given(st.binary(max_size=200), st.integers(1, 4))
def test_decompressing_garbage_raises_a_kafka_error_or_gives_bounded_bytes(data: bytes, codec: int) -> None:
    try:
        assert len(compression.decompress(codec, data, 1000)) <= 1000
    except KafkaError as error:
        assert isinstance(error, CorruptMessage | RecordTooLarge)


@given(st.integers(-(2**63), 2**63 - 1))
def test_zigzag_round_trip_gives_the_number(value: int) -> None:
    encoded = wire.zigzag(value)
    assert records_oracle.read_varint(encoded, 0, len(encoded), 64) == (value, len(encoded))


@given(st.integers(0, 2**32 - 1))
def test_uvarint_round_trip_gives_the_number(value: int) -> None:
    encoded = wire.uvarint(value)
    assert wire.read_uvarint(encoded, 0) == (value, len(encoded))
    with pytest.raises(ProtocolError):
        wire.read_uvarint(encoded[:-1], 0)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc_of_hardware_equals_the_reference(first: bytes, second: bytes) -> None:
    assert crc32c(first) == crc32c_reference(first)
    assert crc32c(second, crc32c(first)) == crc32c_reference(first + second)
    assert crc32c_reference(second, crc32c_reference(first)) == crc32c(first + second)
