"""Batches that cannot be read, whose checksum says so or does not: they stop nobody else, and are named."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol.batch import HEADER_SIZE, seal
from millrace.mirror.batches import rebatch
from millrace.mirror.batches.coalesce import COALESCE_BELOW, BatchWalk
from millrace.mirror.batches.intake import prepare
from millrace.mirror.batches.rebatch import BatchPath, split
from millrace.mirror.gaps.gaps import GapClass
from tests.unit.mirror.fetch_answers import NO_LIMIT, Answer, Raw, marker, raw_batch, taken


def test_a_batch_with_more_records_than_it_says_cannot_be_read() -> None:
    data = raw_batch([Raw(0, 0), Raw(1, 0)], record_count=1, bits=0x08)
    (each,) = taken(Answer(data, [], 0, 2), 0)
    assert each.batch is None and "bytes follow the last record" in each.unreadable


@pytest.mark.parametrize("codec", range(5))
def test_a_malformed_batch_in_a_run_stops_only_itself(codec: int) -> None:
    """Its checksum is right: a producer wrote it so, or somebody patched a log."""
    good = [
        raw_batch([Raw(0, 0, value=b"v%d" % index)], base_offset=index, codec=codec) for index in range(5)
    ]
    good[2] = raw_batch([Raw(0, 0, value=b"bad")], base_offset=2, codec=codec, body=b"\x10\x00\x00\x00\x01")
    answer = Answer(bytearray(b"".join(good)), [], 0, 5)
    counts: Counter[BatchPath] = Counter()
    prepared = taken(answer, 0, counts=counts)
    # Alone it is what its header says, and the target says no.
    assert [list(each.offsets) for each in prepared] == [[0], [1], [2], [3], [4]]
    assert counts == {BatchPath.PASS_THROUGH: 5}
    # With a hole it has to be read here, and cannot be: its offsets are named, the others are carried.
    good[2] = raw_batch(
        [], base_offset=2, codec=codec, record_count=2, last_offset_delta=3, body=b"\x10\x00\x01"
    )
    good[3:] = [raw_batch([Raw(0, 0, value=b"v")], base_offset=6, codec=codec), marker(7, 3, abort=False)]
    counts.clear()
    prepared = taken(Answer(bytearray(b"".join(good)), [], 0, 8), 0, counts=counts)
    assert counts == {BatchPath.PASS_THROUGH: 3, BatchPath.UNREADABLE: 1, BatchPath.DROP: 1}
    assert [(list(each.offsets), each.next_offset, each.batch is None) for each in prepared] == [
        ([0], 1, False),
        ([1], 2, False),
        ([2, 3, 4, 5], 6, True),
        ([6], 8, False),
    ]
    assert [bool(each.unreadable) for each in prepared] == [False, False, True, False]


def test_what_cannot_be_read_is_named_from_the_wanted_offset_on() -> None:
    data = raw_batch([], base_offset=10, record_count=2, last_offset_delta=9, bits=0x08, body=b"\x10\x00")
    (each,) = taken(Answer(data, [], 10, 20), 13)
    assert (each.batch, list(each.offsets), each.next_offset) == (None, list(range(13, 20)), 20)
    assert "more records than its bytes can hold" in each.unreadable


def test_an_end_of_a_transaction_that_cannot_be_read_is_named() -> None:
    """Whether what follows it was aborted is not known: the walk goes no further with what it knew."""
    data = raw_batch([Raw(0, 0, value=b"gone")], base_offset=5, producer_id=4, bits=0x10)
    data += raw_batch([], base_offset=6, producer_id=4, bits=0x30, record_count=1, body=b"\x10\x00")
    data += raw_batch([Raw(0, 0, value=b"behind")], base_offset=7)
    prepared = taken(Answer(data, [(4, 5)], 5, 8), 5)
    assert [(list(each.offsets), each.next_offset, bool(each.unreadable)) for each in prepared] == [
        ([], 6, False),
        ([6], 7, True),
    ]


def test_a_batch_that_takes_too_much_room_unpacked_is_a_gap_of_its_own_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is wrong with it: 70 KB of zstd may hold 70 MB. It passes as it is, but with holes it has to be
    written anew."""
    monkeypatch.setattr(rebatch, "MAX_DECOMPRESSED_SIZE", 10_000)
    records = [Raw(delta, 0, value=b"x" * 6_000) for delta in (0, 2)]
    large = raw_batch(records, base_offset=5, codec=4)
    behind = raw_batch([Raw(0, 0, value=b"behind")], base_offset=8)
    prepared = taken(Answer(large + behind, [], 5, 9), 5)
    assert [(list(each.offsets), each.batch is None) for each in prepared] == [
        ([5, 6, 7], True),
        ([8], False),
    ]
    assert prepared[0].gap_class is GapClass.UNPACKED_TOO_LARGE
    assert "has to be written anew" in prepared[0].unreadable
    dense = raw_batch([Raw(delta, 0, value=b"x" * 6_000) for delta in (0, 1)], base_offset=5, codec=4)
    (passed,) = taken(Answer(dense, [], 5, 7), 5)
    assert passed.batch is not None


def test_a_batch_whose_records_are_malformed_is_a_gap_of_damage() -> None:
    data = raw_batch([], base_offset=10, record_count=2, last_offset_delta=9, bits=0x08, body=b"\x10\x00")
    (each,) = taken(Answer(data, [], 10, 20), 10)
    assert (each.batch, each.gap_class) == (None, GapClass.CORRUPT)


def test_a_bomb_in_a_run_is_not_unpacked_whole() -> None:
    """1 KB of zstd may hold a gigabyte; it passes as it is, since nobody needs to look inside."""
    bomb = raw_batch(
        [], base_offset=1, codec=4, record_count=1, last_offset_delta=0, body=b"\x00" * (16 << 20)
    )
    assert len(bomb) < 1024
    small = [raw_batch([Raw(0, 0, value=b"x")], base_offset=offset, codec=4) for offset in (0, 2)]
    counts: Counter[BatchPath] = Counter()
    taken(Answer(small[0] + bomb + small[1], [], 0, 3), 0, counts=counts)
    assert counts == {BatchPath.PASS_THROUGH: 3}


def test_lz4_bombs_in_a_run_are_not_unpacked_together() -> None:
    """Four kilobytes hold a megabyte at most, and a run of them would fill any memory."""
    bombs = [
        raw_batch([], base_offset=at, codec=3, record_count=1, last_offset_delta=0, body=b"\0" * 900_000)
        for at in range(8)
    ]
    assert max(map(len, bombs)) < COALESCE_BELOW // 2
    counts: Counter[BatchPath] = Counter()
    taken(Answer(bytearray(b"".join(bombs)), [], 0, 8), 0, counts=counts)
    assert counts == {BatchPath.PASS_THROUGH: 8}


@pytest.mark.parametrize("size", [200, 40_000], ids=["small", "large"])
def test_a_wrong_checksum_stops_at_its_batch(size: int) -> None:
    batches = [raw_batch([Raw(0, 0, value=b"x" * size)], base_offset=offset) for offset in range(4)]
    batches[2][-1] ^= 1
    data = memoryview(bytes(b"".join(batches)))
    seen: list[int] = []
    with pytest.raises(CorruptMessage, match="offset 2 has CRC"):
        for each in prepare(BatchWalk(), data, [], 0, NO_LIMIT, lambda *_: None):
            seen += each.offsets
    assert seen == [0, 1]


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "damaged"])
@pytest.mark.parametrize("size", [20, 40_000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("position", "value"), [(23, b"\x80\0\0\0"), (57, b"\0\0\0\0")], ids=["ends before", "no records"]
)
def test_a_batch_whose_header_hides_its_records_is_not_passed_over(
    position: int, value: bytes, size: int, is_sealed: bool, codec: int
) -> None:
    """It would look like one of before the wanted offset, or like one that compaction has emptied."""
    content = random.Random(1).randbytes(size)
    bad, good = (raw_batch([Raw(0, 0, value=content)], base_offset=at, codec=codec) for at in (5, 6))
    bad[position : position + 4] = value
    if is_sealed:
        seal(memoryview(bad))
    with pytest.raises(CorruptMessage, match="claims" if is_sealed else "has CRC"):
        taken(Answer(bad + good, [], 5, 7), 5)


@pytest.mark.parametrize("codec", range(1, 5))
def test_a_compressed_batch_that_compaction_has_emptied_is_passed_over(codec: int) -> None:
    """Its codec may have left the stream of nothing; what cannot be read at all is no such stream."""
    emptied = [
        raw_batch([], base_offset=at, codec=codec, record_count=0, last_offset_delta=1) for at in (5, 9)
    ]
    assert all(len(each) > HEADER_SIZE for each in emptied)
    good = [raw_batch([Raw(0, 0, value=b"v")], base_offset=at, codec=codec) for at in (7, 8, 11)]
    data = emptied[0] + good[0] + good[1] + emptied[1] + good[2]
    prepared = taken(Answer(data, [], 5, 12), 5)
    assert [list(each.offsets) for each in prepared if each.batch is not None] == [[7, 8], [11]]
    assert prepared[-1].next_offset == 12
    assert not any(each.unreadable for each in prepared)
    emptied[1][HEADER_SIZE:] = bytes(len(emptied[1]) - HEADER_SIZE - 1) + b"x"
    seal(emptied[1])
    with pytest.raises(CorruptMessage):
        taken(Answer(good[0] + good[1] + emptied[1] + good[2], [], 7, 12), 7)


def test_a_large_batch_of_before_the_wanted_offset_is_passed_over_only_by_its_checksum() -> None:
    """A fetch may begin within a batch: what its header says of its end must be true."""
    records = [Raw(delta, 0, value=b"x" * 12_000) for delta in range(4)]
    bad, good = raw_batch(records, base_offset=5), raw_batch([Raw(0, 0)], base_offset=9)
    assert [list(each.offsets) for each in taken(Answer(bad + good, [], 5, 10), 7)] == [[7, 8], [9]]
    assert [list(each.offsets) for each in taken(Answer(bad + good, [], 5, 10), 9)] == [[9]]
    bad[26] = 1
    with pytest.raises(CorruptMessage, match="has CRC"):
        taken(Answer(bad + good, [], 5, 10), 7)


def test_a_damaged_end_of_a_transaction_is_not_said_to_have_a_right_checksum() -> None:
    """It can be fetched again, and be right then."""
    data = raw_batch(
        [], base_offset=5, producer_id=4, bits=0x30, record_count=1, body=b"\x10\x00" + bytes(40_000)
    )
    data[-1] ^= 1
    with pytest.raises(CorruptMessage, match="has CRC"):
        taken(Answer(data, [(4, 5)], 5, 6), 5)


def test_a_batch_with_offsets_outside_it_cannot_be_read() -> None:
    for deltas in ((0, 5), (3, 2), (1, 1), (-1, 2)):
        data = raw_batch([Raw(delta, 0) for delta in deltas], base_offset=8, last_offset_delta=3)
        (each,) = taken(Answer(data, [], 8, 12), 8)
        assert (each.batch, each.offsets) == (None, range(8, 12))
        assert "its offset is not where its batch says" in each.unreadable


def test_a_refused_batch_that_cannot_be_read_is_not_halved() -> None:
    data = raw_batch([], record_count=2, last_offset_delta=1, body=b"\x10\x00\x00\x00\x01")
    assert split(memoryview(data), range(2)) == []
    data = raw_batch([Raw(0, 0), Raw(1, 0)], codec=3)
    data[HEADER_SIZE : HEADER_SIZE + 4] = b"none"
    seal(data)
    assert split(memoryview(data), range(2)) == []
