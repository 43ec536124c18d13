"""Message formats 0 and 1 become batches of today: what kafka-python writes in them, and what only a broker
makes of it (compaction, append times, a wrong check byte in LZ4), built by hand."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from typing import Any

import lz4.frame
import pytest

from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol.batch import parse_header, verify_crc
from millrace.broker.protocol.compression import GZIP, LZ4, SNAPPY
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.mirror.batches import old_messages
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.batches.intake import Prepared, prepare
from millrace.mirror.batches.rebatch import BatchPath, stamp_for_target
from millrace.mirror.gaps.gaps import GapClass
from tests import seeds
from tests.unit.mirror.old_entries import Content, entry, packed, written

NO_LIMIT = 1 << 30


def carried(data: bytes, from_offset: int = 0, limit: int = NO_LIMIT, counts: Any = None) -> list[Prepared]:
    def count(path: BatchPath, batches: int, _records: int, _size: int) -> None:
        if counts is not None:
            counts[path] += batches

    return list(prepare(BatchWalk(), memoryview(data), (), from_offset, limit, count))


def contents(prepared: list[Prepared]) -> list[Content]:
    """As a reader of the target sees it, under the source's offsets; every batch is looked at."""
    found: list[Content] = []
    end = 0
    for each in prepared:
        assert each.next_offset > end, "in order, and it goes on"
        end = each.next_offset
        if each.batch is None:
            continue
        batch = bytearray(each.batch)
        stamp_for_target(memoryview(batch), 7, 0, 0)
        header = parse_header(batch)
        verify_crc(batch, 0, header)
        assert header.base_offset == 0 and header.record_count == len(each.offsets)
        for offset, record in zip(each.offsets, read_records(batch), strict=True):
            found.append((offset, record.key, record.value, record.timestamp_ms))
    return found


def some(rng: random.Random, first: int, count: int, magic: int) -> list[Content]:
    return [
        (
            first + number,
            rng.choice((None, b"", b"key")),
            rng.choice((None, rng.randbytes(rng.randrange(200)))),
            1_400_000_000_000 + rng.randrange(10**6) if magic else -1,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [0, GZIP, SNAPPY, LZ4])
def test_every_message_arrives_with_its_offset_key_value_and_time(magic: int, codec: int) -> None:
    rng = random.Random(magic * 10 + codec)
    sets = [some(rng, first, 30, magic) for first in (100, 130, 160)]
    expected = [message for each in sets for message in each]
    data = b"".join(written(magic, codec, each) for each in sets)
    counts: Counter[BatchPath] = Counter()
    prepared = carried(data, 100, counts=counts)
    assert contents(prepared) == expected
    assert counts.keys() == {BatchPath.REBUILD}
    assert counts[BatchPath.REBUILD] == (3 if codec else 1), "neighbours without compression become one"
    assert all(each.batch is not None and each.batch[22] & 7 == codec for each in prepared)
    # A fetch may begin within a set, and end within one.
    assert contents(carried(data, 117)) == expected[17:]
    cut = carried(data[:-1], 100)
    assert contents(cut) == expected[: len(contents(cut))]
    assert len(contents(cut)) == (60 if codec else 89)


def test_old_and_new_batches_in_one_answer() -> None:
    rng = random.Random(3)
    old = some(rng, 0, 10, 0) + some(rng, 10, 10, 1)
    new = [Record(b"k", b"%d" % number, (), number) for number in range(5)]
    data = written(0, GZIP, old[:10]) + written(1, 0, old[10:]) + bytes(build_batch(new, base_offset=20))
    found = contents(carried(data))
    assert found[:20] == old
    assert [(offset, value) for offset, _, value, _ in found[20:]] == [(20 + n, b"%d" % n) for n in range(5)]


def test_compacted_sets_have_holes_and_the_brokers_time_counts() -> None:
    inner = b"".join(entry(place, 1, b"k", b"%d" % place, 5) for place in (0, 3, 4, 9))
    packed = zlib.compress(inner, wbits=31)
    data = entry(59, 1, None, packed, 777, attributes=GZIP | 0x08)
    expected = [(50 + place, b"k", b"%d" % place, 777) for place in (0, 3, 4, 9)]
    assert contents(carried(data, 50)) == expected
    plain = entry(3, 0, b"a", b"b") + entry(7, 0, b"c", None)
    assert contents(carried(plain)) == [(3, b"a", b"b", -1), (7, b"c", None, -1)]


def test_check_byte_that_old_clients_wrote_wrong_into_lz4() -> None:
    inner = entry(4, 0, b"k", b"v" * 100)
    for has_size in (False, True):
        frame = bytearray(lz4.frame.compress(inner, store_size=has_size, block_linked=False))
        frame[14 if has_size else 6] ^= 0x5A
        assert contents(carried(entry(4, 0, None, bytes(frame), attributes=LZ4))) == [
            (4, b"k", b"v" * 100, -1)
        ]
        of_format_1 = entry(4, 1, None, bytes(frame), attributes=LZ4)
        (each,) = carried(of_format_1)
        assert each.batch is None, "there it was right, so this is damage"


def test_a_set_over_the_targets_limit_is_split() -> None:
    messages = [(number, None, bytes(3_000), 1) for number in range(20)]
    counts: Counter[BatchPath] = Counter()
    prepared = carried(written(1, 0, messages), limit=10_000, counts=counts)
    assert contents(prepared) == messages
    assert all(each.batch is not None and len(each.batch) <= 10_000 for each in prepared)
    assert counts[BatchPath.SPLIT] == 1


def test_damage_is_told_after_what_lies_before_it() -> None:
    rng = random.Random(5)
    first, second = some(rng, 0, 5, 1), some(rng, 5, 5, 1)
    for codec in (0, GZIP):
        data = bytearray(written(1, codec, first) + written(1, codec, second))
        data[-1] ^= 1
        seen: list[Prepared] = []
        with pytest.raises(CorruptMessage, match=r"message at offset 9 has CRC"):
            for each in prepare(BatchWalk(), memoryview(bytes(data)), (), 0, NO_LIMIT, lambda *_: None):
                seen.append(each)
        assert contents(seen) == (first + second[:4] if codec == 0 else first)


def test_an_offset_that_goes_back_is_damage_and_skips_nothing() -> None:
    data = b"".join(entry(offset, 0, None, b"%d" % offset) for offset in (4, 5, 2, 7))
    seen: list[Prepared] = []
    with pytest.raises(CorruptMessage, match="claims offset 2 where 6 is expected"):
        for each in prepare(BatchWalk(), memoryview(data), (), 4, NO_LIMIT, lambda *_: None):
            seen.append(each)
    assert [offset for offset, *_ in contents(seen)] == [4, 5]


def test_what_cannot_be_read_though_its_checksum_is_right_is_a_gap_of_exact_offsets() -> None:
    rng = random.Random(6)
    first, last = some(rng, 0, 5, 1), some(rng, 10, 5, 1)
    nested = entry(
        4, 1, None, zlib.compress(entry(0, 1, None, b"x", attributes=GZIP), wbits=31), attributes=GZIP
    )
    for bad in (b"no gzip at all", zlib.compress(b"no messages", wbits=31), nested):
        wrapper = entry(9, 1, None, bad, attributes=GZIP)
        prepared = carried(written(1, GZIP, first) + wrapper + written(1, GZIP, last))
        assert contents(prepared) == first + last
        (lost,) = (each for each in prepared if each.batch is None)
        assert (lost.offsets, lost.next_offset) == (range(5, 10), 10)
        assert lost.unreadable.startswith("its checksum is right, but a message set of an old format")


def test_a_set_that_takes_too_much_room_unpacked_is_a_gap_of_its_own_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(old_messages, "MAX_DECOMPRESSED_SIZE", 100)
    data = packed(3, 1, [0, 1, 2, 3]) + entry(4, 1, b"k", b"behind")
    large, behind = carried(data)
    assert (list(large.offsets), large.gap_class) == ([0, 1, 2, 3], GapClass.UNPACKED_TOO_LARGE)
    assert list(behind.offsets) == [4]


@pytest.mark.parametrize(
    ("magic", "places"),
    [
        (0, [5, 6, 7]),  # ends before the offset that it claims
        (0, [0, 1, 2]),  # counted from 0, as only format 1 does
        (0, [3, 4, 9]),  # begins within the set before
        (1, [0, 1, 7]),  # the same, told by the last one
        (1, [0, 40]),  # begins before the log
    ],
)
def test_inner_offsets_that_cannot_be_are_a_gap_and_neither_lost_nor_asked_for_again(
    magic: int, places: list[int]
) -> None:
    rng = random.Random(8)
    first, last = some(rng, 0, 5, magic), some(rng, 10, 5, magic)
    data = written(magic, GZIP, first) + packed(9, magic, places) + written(magic, GZIP, last)
    for from_offset in (0, 5, 7, 9):
        prepared = carried(data, from_offset)
        assert contents(prepared) == [each for each in first if each[0] >= from_offset] + last
        (lost,) = (each for each in prepared if each.batch is None)
        assert (lost.offsets, lost.next_offset) == (range(max(5, from_offset), 10), 10)
        assert lost.unreadable.startswith("its checksum is right, but a message set of an old format")


def test_set_that_reaches_beyond_the_offset_that_it_claims_is_damage_whose_end_it_cannot_tell() -> None:
    rng = random.Random(8)
    first, last = some(rng, 0, 5, 0), some(rng, 10, 5, 0)
    data = written(0, GZIP, first) + packed(9, 0, [8, 9, 10]) + written(0, GZIP, last)
    with pytest.raises(CorruptMessage, match="has records at 8 to 10"):
        carried(data, 5)


def test_random_damage_never_carries_a_wrong_byte() -> None:
    seed = seeds.given()
    rng = random.Random(seed)
    for _ in range(300):
        magic, codec = rng.randrange(2), rng.choice((0, GZIP, LZ4))
        messages = some(rng, 0, 8, magic)
        data = bytearray(written(magic, codec, messages))
        place = rng.randrange(8, len(data))
        data[place] ^= 1 << rng.randrange(8)
        found: list[Prepared] = []
        try:
            for each in prepare(BatchWalk(), memoryview(bytes(data)), (), 0, NO_LIMIT, lambda *_: None):
                found.append(each)
        except CorruptMessage:
            pass
        # Offsets have no checksum in any format; one that goes back is noticed all the same.
        known = {message[1:] for message in messages}
        assert {content[1:] for content in contents(found)} <= known, seed
