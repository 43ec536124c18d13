"""Every path against the oracle of `fetch_answers`, over answers made at random."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import lz4.frame
import pytest

from millrace.broker.errors import CorruptMessage, InvalidRecord, KafkaError
from millrace.broker.protocol import crc_kernels
from millrace.broker.protocol.batch import HEADER_SIZE, parse_header, seal, verify_crc
from millrace.broker.protocol.checksum import crc32c
from millrace.broker.protocol.rewrite import rewrite, section_of
from millrace.mirror.batches import rebatch
from millrace.mirror.batches.coalesce import COALESCE_BELOW, MERGED_SIZE, BatchWalk, StepKind, section_rows
from millrace.mirror.batches.intake import Prepared, prepare
from millrace.mirror.batches.rebatch import BatchPath, split, stamp_for_target
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.offsets.offset_runs import ranges_of
from tests.unit.mirror.fetch_answers import (
    Answer,
    Content,
    Raw,
    contents,
    expected_records,
    headers_of,
    marker,
    random_answer,
    raw_batch,
)

SEEDS = range(25)
NO_LIMIT = 1 << 30


def taken(
    answer: Answer,
    from_offset: int = 0,
    *,
    max_batch_size: int = NO_LIMIT,
    coalesce_below: int = COALESCE_BELOW,
    counts: Counter[BatchPath] | None = None,
) -> list[Prepared]:
    counted = Counter() if counts is None else counts

    def count(path: BatchPath, batches: int, records: int, size: int) -> None:
        counted[path] += batches

    walk = BatchWalk(coalesce_below)
    data = memoryview(bytes(answer.data))
    return list(prepare(walk, data, answer.aborted, from_offset, max_batch_size, count))


def stamped(batch: memoryview) -> bytearray:
    copy = bytearray(batch)
    stamp_for_target(memoryview(copy), 77, 3, 1_000)
    return copy


def arrived(prepared: Sequence[Prepared]) -> list[Content]:
    """The records as the target would show them, under their source offsets; checks every batch."""
    found: list[Content] = []
    for each in prepared:
        if each.batch is None:
            assert not each.offsets, "a record was held to be too large"
            continue
        batch = stamped(each.batch)
        header = parse_header(batch)
        verify_crc(batch, 0, header)
        assert header.size == len(batch)
        assert (header.base_offset, header.last_offset_delta + 1) == (0, header.record_count)
        assert header.attributes == header.compression
        records = contents(batch, each.offsets)
        assert header.max_timestamp >= max(record.timestamp_ms for record in records)
        found += records
    return found


@pytest.mark.parametrize("coalesce_below", [0, COALESCE_BELOW], ids=["apart", "merged"])
def test_every_committed_record_comes_out_once_in_order_and_unchanged(coalesce_below: int) -> None:
    counts: Counter[BatchPath] = Counter()
    for seed in SEEDS:
        answer = random_answer(seed)
        prepared = taken(answer, answer.first_offset, coalesce_below=coalesce_below, counts=counts)
        assert arrived(prepared) == expected_records(answer, answer.first_offset), f"seed {seed}"
        ends = [each.next_offset for each in prepared]
        assert ends == sorted(set(ends)), f"seed {seed}"
        assert ends[-1] == answer.next_offset or answer.next_offset > ends[-1], f"seed {seed}"
        assert ends[-1] == headers_of(answer)[-1][0].next_offset, f"seed {seed}"
    assert counts[BatchPath.PASS_THROUGH] and counts[BatchPath.REBUILD] and counts[BatchPath.DROP]
    assert bool(counts[BatchPath.COALESCE]) == bool(coalesce_below)
    assert sum(counts.values()) == sum(len(headers_of(random_answer(seed))) for seed in SEEDS)


def test_a_batch_keeps_the_codec_of_its_source_and_passes_untouched_where_it_can() -> None:
    for seed in SEEDS:
        answer = random_answer(seed)
        codec_of = {}
        bytes_of = {}
        position = 0
        for header, _ in headers_of(answer):
            for offset in range(header.base_offset, header.next_offset):
                codec_of[offset] = header.compression
            bytes_of[header.base_offset] = answer.data[position + HEADER_SIZE : position + header.size]
            position += header.size
        counts: Counter[BatchPath] = Counter()
        untouched = 0
        for each in taken(answer, answer.first_offset, counts=counts):
            if each.batch is not None:
                codecs = {codec_of[offset] for offset in each.offsets}
                assert codecs == {parse_header(each.batch).compression}, f"seed {seed}"
                untouched += each.batch[HEADER_SIZE:] == bytes_of.get(each.offsets[0])
        assert untouched >= counts[BatchPath.PASS_THROUGH], f"seed {seed}"


def test_what_lies_before_the_wanted_offset_is_left_out() -> None:
    for seed in SEEDS:
        answer = random_answer(seed, batches=12)
        rng = random.Random(seed)
        from_offset = rng.randrange(answer.first_offset, answer.next_offset + 1)
        prepared = taken(answer, from_offset)
        assert arrived(prepared) == expected_records(answer, from_offset), f"seed {seed}, {from_offset}"


def test_an_answer_larger_than_the_tables_goes_on_where_they_were_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millrace.mirror.batches.coalesce.MAX_STEPS", 3)
    monkeypatch.setattr("millrace.mirror.batches.coalesce.MAX_SECTIONS", 7)
    for seed in SEEDS:
        answer = random_answer(seed)
        prepared = taken(answer, answer.first_offset)
        assert arrived(prepared) == expected_records(answer, answer.first_offset), f"seed {seed}"


def test_a_cut_answer_gives_its_whole_batches() -> None:
    for seed in range(40):
        answer = random_answer(seed, batches=12)
        cut = random.Random(seed).randrange(len(answer.data))
        del answer.data[cut:]
        assert arrived(taken(answer, answer.first_offset)) == expected_records(answer, answer.first_offset)


@pytest.mark.parametrize("limit", [150, 400, 3_000])
def test_nothing_is_larger_than_the_target_takes_and_what_cannot_be_is_named(limit: int) -> None:
    too_large = 0
    for seed in SEEDS:
        answer = random_answer(seed)
        found: list[Content] = []
        prepared = taken(answer, answer.first_offset, max_batch_size=limit)
        expected = expected_records(answer, answer.first_offset)
        for each in prepared:
            assert each.batch is None or len(each.batch) <= limit
            if each.batch is None and each.offsets:
                (offset,) = each.offsets
                too_large += 1
                found += [record for record in expected if record.offset == offset]
            else:
                found += arrived([each])
        assert found == expected, f"seed {seed}"
    assert too_large


def test_runs_of_one_record_batches_become_batches_of_the_merged_size() -> None:
    for codec in range(5):
        batches = [
            raw_batch([Raw(0, index % 7, b"k", b"v%0100d" % index)], base_offset=500 + index, codec=codec)
            for index in range(3_000)
        ]
        answer = Answer(bytearray(b"".join(batches)), [], 500, 3_500)
        counts: Counter[BatchPath] = Counter()
        prepared = taken(answer, 500, counts=counts)
        assert counts == {BatchPath.COALESCE: 3_000}
        plain = 1 if codec else 2
        assert plain <= len(prepared) <= 5
        # Deltas grow with the batch, by a byte or two a record.
        limit = MERGED_SIZE * 1.05
        assert all(each.batch is not None and len(each.batch) <= limit for each in prepared)
        assert all(len(ranges_of(each.offsets)) == 1 for each in prepared)
        assert arrived(prepared) == expected_records(answer, 500)


def test_holes_are_kept_as_runs_and_control_records_end_no_run() -> None:
    data = bytearray()
    data += raw_batch([Raw(0, 0, value=b"a")], base_offset=10, producer_id=4, bits=0x10)
    data += marker(11, 4, abort=False)
    data += raw_batch([Raw(0, 0, value=b"gone")], base_offset=12, producer_id=4, bits=0x10)
    data += marker(13, 4, abort=True)
    data += raw_batch([Raw(0, 0, value=b"b"), Raw(3, 0, value=b"c")], base_offset=14)
    data += raw_batch([Raw(0, 0, value=b"d")], base_offset=18)
    data += marker(19, 4, abort=False)
    answer = Answer(data, [(4, 12)], 10, 20)
    counts: Counter[BatchPath] = Counter()
    (each,) = taken(answer, 10, counts=counts)
    assert counts == {BatchPath.COALESCE: 3, BatchPath.DROP: 4}
    assert list(ranges_of(each.offsets)) == [range(10, 11), range(14, 15), range(17, 19)]
    assert (each.next_offset, each.leader_epoch) == (20, 0)
    assert [record.value for record in arrived([each])] == [b"a", b"b", b"c", b"d"]


def test_other_codecs_are_not_even_tried() -> None:
    """Merging them would fail, and each would pass alone after all: the same batches, but dearer."""
    data = b"".join(
        raw_batch([Raw(0, 0)], base_offset=at, codec=codec) for at, codec in enumerate((0, 3, 3, 4))
    )
    walk = BatchWalk()
    kinds = [row[0] for rows in walk.rows(memoryview(data), (), 0, NO_LIMIT) for row in rows]
    assert kinds == [StepKind.PASS_THROUGH, StepKind.COALESCE, StepKind.PASS_THROUGH]


def test_a_batch_with_more_records_than_it_says_cannot_be_read() -> None:
    data = raw_batch([Raw(0, 0), Raw(1, 0)], record_count=1, bits=0x08)
    (each,) = taken(Answer(data, [], 0, 2), 0)
    assert each.batch is None and "bytes follow the last record" in each.unreadable


def test_leader_epochs_stay_apart() -> None:
    """Where each epoch began is how a log that was truncated at the source is told."""
    data = bytearray()
    for offset, epoch in enumerate((1, 1, 2, 2)):
        data += raw_batch([Raw(0, 0)], base_offset=offset, leader_epoch=epoch)
    data += marker(4, 9, abort=False, leader_epoch=3)
    prepared = taken(Answer(data, [], 0, 5), 0)
    assert [(list(each.offsets), each.next_offset, each.leader_epoch) for each in prepared] == [
        ([0, 1], 2, 1),
        ([2, 3], 4, 2),
        ([], 5, 3),
    ]


def test_append_time_and_create_time_are_both_kept_in_one_batch() -> None:
    data = raw_batch([Raw(0, 5, value=b"created")], base_offset=0, base_ms=1_000)
    data += raw_batch([Raw(0, 5, value=b"appended")], base_offset=1, base_ms=1_000, max_ms=9_000, bits=0x08)
    data += raw_batch([Raw(0, -1_001, value=b"none")], base_offset=2, base_ms=1_000)
    (each,) = taken(Answer(data, [], 0, 3), 0)
    assert [(record.value, record.timestamp_ms) for record in arrived([each])] == [
        (b"created", 1_005),
        (b"appended", 9_000),
        (b"none", -1),
    ]


def test_other_codecs_large_batches_and_unknown_bits_stay_apart() -> None:
    small = [Raw(0, 0, value=b"x")]
    large = [Raw(0, 0, value=b"x" * 40_000)]
    unlike: list[bytearray] = [
        raw_batch(small, base_offset=0),
        raw_batch(small, base_offset=1, codec=3),
        raw_batch(large, base_offset=2),
        raw_batch(small, base_offset=3),
        raw_batch(small, base_offset=4, bits=0x200),
        raw_batch(small, base_offset=5),
    ]
    counts: Counter[BatchPath] = Counter()
    prepared = taken(Answer(bytearray(b"".join(unlike)), [], 0, 6), 0, counts=counts)
    assert [list(each.offsets) for each in prepared] == [[offset] for offset in range(6)]
    assert counts == {BatchPath.PASS_THROUGH: 5, BatchPath.REBUILD: 1}


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
    prepared = taken(Answer(bytearray(b"".join(good)), [], 0, 8), 0)
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


def test_lz4_frames_of_every_kind_are_merged_with_their_neighbours() -> None:
    """Some are decoded compiled, others by the library, in any order."""
    rng, data = random.Random(3), bytearray()
    for offset in range(300):
        plain = raw_batch([Raw(0, offset, b"k", b"v%d " % offset * 9)], base_offset=offset)
        section = bytes(plain[HEADER_SIZE:])
        options = rng.choice(
            ({}, {"content_checksum": True}, {"block_checksum": True}, {"store_size": False})
        )
        frame = lz4.frame.compress(section, **options)
        batch = plain[:HEADER_SIZE] + frame
        batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
        batch[22] = 3
        seal(batch)
        data += batch
    answer = Answer(data, [], 0, 300)
    counts: Counter[BatchPath] = Counter()
    prepared = taken(answer, 0, counts=counts)
    assert counts == {BatchPath.COALESCE: 300}
    assert arrived(prepared) == expected_records(answer, 0)


def test_records_and_bytes_are_counted_by_path_as_the_source_has_them() -> None:
    small = [raw_batch([Raw(0, 0, value=b"x" * 20)], base_offset=offset) for offset in range(10)]
    large = raw_batch([Raw(at, 0, value=b"x" * 20_000) for at in range(3)], base_offset=10)
    holes = raw_batch([Raw(at, 0, value=b"x" * 20_000) for at in (0, 4)], base_offset=13)
    counts: dict[BatchPath, tuple[int, int, int]] = {}

    def count(path: BatchPath, batches: int, records: int, size: int) -> None:
        before = counts.get(path, (0, 0, 0))
        counts[path] = (before[0] + batches, before[1] + records, before[2] + size)

    data = memoryview(bytes(b"".join([*small, large, holes])))
    list(prepare(BatchWalk(), data, [], 0, NO_LIMIT, count))
    assert counts == {
        BatchPath.COALESCE: (10, 10, sum(map(len, small))),
        BatchPath.PASS_THROUGH: (1, 3, len(large)),
        BatchPath.REBUILD: (1, 2, len(holes)),
    }
    counts.clear()
    list(prepare(BatchWalk(), memoryview(bytes(large)), [], 10, 30_000, count))
    assert counts == {BatchPath.SPLIT: (1, 3, len(large))}


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


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "damaged"])
@pytest.mark.parametrize("size", [20, 40_000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("position", "value"), [(23, b"\x80\0\0\0"), (57, b"\0\0\0\0")], ids=["ends before", "no records"]
)
def test_a_batch_whose_header_hides_its_records_is_not_passed_over(
    position: int, value: bytes, size: int, is_sealed: bool
) -> None:
    """It would look like one of before the wanted offset, or like one that compaction has emptied."""
    bad, good = (raw_batch([Raw(0, 0, value=b"x" * size)], base_offset=at) for at in (5, 6))
    bad[position : position + 4] = value
    if is_sealed:
        seal(memoryview(bad))
    with pytest.raises(CorruptMessage, match="claims" if is_sealed else "has CRC"):
        taken(Answer(bad + good, [], 5, 7), 5)


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


# --- refusals ------------------------------------------------------------------------------------


def test_halving_a_coalesced_batch_finds_the_refused_record() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        codec = seed % 5
        data, offset = bytearray(), 100
        for _ in range(rng.randrange(2, 60)):
            count = rng.randrange(1, 4)
            kept = sorted(rng.sample(range(count + 2), count))
            data += raw_batch([Raw(delta, 3, value=b"%d" % (offset + delta)) for delta in kept],
                              base_offset=offset, codec=codec)  # fmt: skip
            offset += kept[-1] + 1 + rng.randrange(3)
        answer = Answer(data, [], 100, offset)
        (whole,) = taken(answer, 100)
        assert whole.batch is not None
        wanted = rng.choice(list(whole.offsets))
        batch, offsets = memoryview(stamped(whole.batch)), whole.offsets
        rest: list[Content] = []
        while True:
            halves = split(batch, offsets)
            if not halves:
                break
            assert len(halves) == 2
            for half in halves:
                assert half.batch is not None
                if wanted in half.offsets:
                    batch, offsets = memoryview(stamped(half.batch)), half.offsets
                else:
                    rest += contents(half.batch, half.offsets)
        assert list(offsets) == [wanted]
        (found,) = contents(batch, offsets)
        assert found.value == b"%d" % wanted
        assert sorted([*rest, found]) == expected_records(answer, 100)


def test_a_refused_batch_that_cannot_be_read_is_not_halved() -> None:
    data = raw_batch([], record_count=2, last_offset_delta=1, body=b"\x10\x00\x00\x00\x01")
    assert split(memoryview(data), range(2)) == []
    data = raw_batch([Raw(0, 0), Raw(1, 0)], codec=3)
    data[HEADER_SIZE : HEADER_SIZE + 4] = b"none"
    seal(data)
    assert split(memoryview(data), range(2)) == []


# --- bytes that lie ------------------------------------------------------------------------------


def test_checksums_of_the_walk_are_those_of_the_library() -> None:
    import numpy

    rng = random.Random(1)
    for size in [*range(70), 255, 1_000, 4_097]:
        data = rng.randbytes(size + 9)
        array = numpy.frombuffer(data, numpy.uint8)
        for start in (0, 3):
            expected = crc32c(data[start : start + size])
            assert crc_kernels._by_tables(array, start, start + size) == expected
            assert crc_kernels.crc32c_within(array, start, start + size) == expected


LYING = """
import random, sys
from tests.unit.mirror.test_rebatch_paths import lie
lie(random.Random(int(sys.argv[1])), int(sys.argv[2]))
"""


def test_lying_bytes_are_never_followed_out_of_the_buffer() -> None:
    """In a process of its own: the bytes end at a page that cannot be read; a read beyond them kills it."""
    done = subprocess.run([sys.executable, "-c", LYING, "5", "200"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2_000:]


def lie(rng: random.Random, rounds: int) -> None:
    outcomes: Counter[str] = Counter()
    for _ in range(rounds):
        answer = random_answer(rng.randrange(1 << 30), batches=rng.randrange(1, 8))
        for _ in range(rng.randrange(1, 4)):
            _damage(rng, answer.data)
        _seal_all(answer.data)
        guarded = _before_a_wall(bytes(answer.data))
        try:
            for each in prepare(BatchWalk(), guarded, answer.aborted, 0, NO_LIMIT, lambda *_: None):
                outcomes["unreadable"] += bool(each.unreadable)
                if each.batch is not None:
                    split(_before_a_wall(bytes(each.batch)), each.offsets)
            outcomes["read"] += 1
        except KafkaError as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["read"] and outcomes["unreadable"], outcomes
    lie_twice()


def lie_twice() -> None:
    """Every two bytes of a record that is the last thing in the buffer claim to be larger: one lie alone is
    found out by the other numbers."""
    honest = Raw(0, 0, b"kk", b"vv", ((b"h", b"x"),)).encode()
    header = parse_header(raw_batch([], record_count=1, last_offset_delta=0, body=honest))
    for first, second in itertools.combinations(range(len(honest)), 2):
        for one, other in ((0x7E, 0x7E), (0xFE, 0x7E), (0x7E, 0xFE), (0xFE, 0xFE)):
            records = bytearray(honest)
            records[first], records[second] = one, other
            guarded = _before_a_wall(bytes(records))
            row = section_rows([section_of(header, 0, len(records))])
            try:
                rewrite(guarded, row, 0)
            except InvalidRecord:
                continue


def _damage(rng: random.Random, data: bytearray) -> None:
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
        data += b"\x00"
        return
    place = rng.randrange(len(data))
    data[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _seal_all(data: bytearray) -> None:
    """Gives every batch that can be found a right checksum, so that its records are looked at."""
    position = 0
    while len(data) - position >= HEADER_SIZE:
        try:
            header = parse_header(data, position)
        except KafkaError:
            return
        if header.size > len(data) - position:
            return
        seal(memoryview(data)[position : position + header.size])
        position += header.size


def _before_a_wall(data: bytes) -> memoryview:
    """The same bytes, at the very end of memory that can be read."""
    page = mmap.PAGESIZE
    pages = -(-len(data) // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(memory, pages * page))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(wall), page, 0) == 0
    start = pages * page - len(data)
    memory[start : pages * page] = data
    return memoryview(memory)[start : pages * page]


def test_the_wall_is_one() -> None:
    code = (
        "import ctypes; from tests.unit.mirror.test_rebatch_paths import _before_a_wall;"
        "m = _before_a_wall(b'x' * 10);"
        "a = ctypes.addressof(ctypes.c_char.from_buffer(m));"
        "print(ctypes.string_at(a, 10), flush=True); ctypes.string_at(a, 11)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "b'xxxxxxxxxx'" and done.returncode < 0
