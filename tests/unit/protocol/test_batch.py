"""Batch headers: layout, what is refused, what may be stamped."""

from __future__ import annotations

import pytest

from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol import batch as batch_format
from millrace.broker.protocol.batch import iterate_batches, parse_header, verify_crc
from millrace.broker.protocol.checksum import crc32, crc32c, crc32c_reference
from millrace.broker.protocol.records import Record, build_batch, read_records

# A batch of one record ("k" -> "v", header h=x, time 1000) whose layout was written down by hand.
LITERAL = bytes.fromhex(
    "0000000000000005"  # base offset 5
    "0000003e"  # length 62: 49 of header, 13 of records
    "00000002"  # leader epoch 2
    "02"  # magic
    "00000000"  # CRC, filled below
    "0000"  # attributes
    "00000000"  # last offset delta
    "00000000000003e8"  # base timestamp
    "00000000000003e8"  # max timestamp
    "ffffffffffffffff"  # producer id
    "ffff"  # producer epoch
    "ffffffff"  # base sequence
    "00000001"  # record count
    "18"  # record length 12
    "00"  # attributes
    "00"  # timestamp delta
    "00"  # offset delta
    "026b"  # key
    "0276"  # value
    "02"  # one header
    "0268"  # its key
    "0278"  # its value
)


def _literal() -> bytearray:
    batch = bytearray(LITERAL)
    batch[17:21] = crc32c_reference(batch[21:]).to_bytes(4)
    return batch


def test_batch_built_has_the_literal_bytes() -> None:
    built = build_batch([Record(b"k", b"v", (("h", b"x"),), 1000)], base_offset=5, leader_epoch=2)
    assert built == _literal()


def test_literal_batch_reads_as_its_fields() -> None:
    header = parse_header(_literal())
    verify_crc(_literal(), 0, header)
    assert (header.base_offset, header.size, header.leader_epoch) == (5, len(LITERAL), 2)
    assert (header.last_offset, header.next_offset, header.record_count) == (5, 6, 1)
    assert read_records(_literal()) == [Record(b"k", b"v", (("h", b"x"),), 1000, 5)]


def test_checksums_have_their_known_values() -> None:
    assert crc32c(b"123456789") == crc32c_reference(b"123456789") == 0xE3069283
    assert crc32(b"123456789") == 0xCBF43926


@pytest.mark.parametrize(
    ("position", "value"),
    [(16, b"\x01"), (8, b"\x00\x00\x00\x30"), (8, b"\xff\xff\xff\xff")],
    ids=["magic 1", "length below a header", "negative length"],
)
def test_wrong_header_is_refused(position: int, value: bytes) -> None:
    batch = _literal()
    batch[position : position + len(value)] = value
    with pytest.raises(CorruptMessage):
        parse_header(batch)


@pytest.mark.parametrize("size", [0, 12, 60])
def test_short_header_is_refused(size: int) -> None:
    with pytest.raises(CorruptMessage, match="61 bytes"):
        parse_header(_literal()[:size])


def test_any_flipped_bit_under_the_crc_is_noticed() -> None:
    for position in range(17, len(LITERAL)):
        batch = _literal()
        batch[position] ^= 0x10
        with pytest.raises(CorruptMessage):
            verify_crc(batch, 0, parse_header(batch))


def test_stamping_offset_and_epoch_leaves_the_crc_right() -> None:
    batch = _literal()
    batch_format.stamp_offset_and_epoch(memoryview(batch), 2**50, 7)
    header = parse_header(batch)
    verify_crc(batch, 0, header)
    assert (header.base_offset, header.leader_epoch) == (2**50, 7)


def test_log_append_time_stamp_is_the_time_of_every_record() -> None:
    batch = build_batch([Record(b"a", b"1", (), 10), Record(b"b", b"2", (), 20)])
    batch_format.stamp_timestamps(batch, 5000, log_append_time=True)
    verify_crc(batch, 0, parse_header(batch))
    assert [record.timestamp_ms for record in read_records(batch)] == [5000, 5000]


def test_iteration_ends_without_error_at_a_cut_batch() -> None:
    two = bytes(_literal()) * 2
    for cut in range(len(LITERAL), len(two)):
        assert [position for position, _ in iterate_batches(two[:cut])] == [0]
    assert [position for position, _ in iterate_batches(two)] == [0, len(LITERAL)]


def test_last_sequence_wraps() -> None:
    header = parse_header(build_batch([Record(b"k", b"v")] * 3, producer_id=1, base_sequence=2**31 - 2))
    assert header.last_sequence == 0
    assert parse_header(_literal()).last_sequence == -1
