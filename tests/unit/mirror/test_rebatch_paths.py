"""Every path against the oracle of `fetch_answers`, over answers made at random."""

from __future__ import annotations

import random
from collections import Counter

import lz4.frame
import pytest

from millrace.broker.protocol import crc_kernels
from millrace.broker.protocol.batch import HEADER_SIZE, parse_header, seal
from millrace.broker.protocol.checksum import crc32c
from millrace.mirror.batches.coalesce import COALESCE_BELOW, MERGED_SIZE, BatchWalk, StepKind
from millrace.mirror.batches.intake import prepare
from millrace.mirror.batches.rebatch import BatchPath, split
from millrace.mirror.offsets.offset_runs import ranges_of
from tests.unit.mirror.fetch_answers import (
    NO_LIMIT,
    Answer,
    Content,
    Raw,
    arrived,
    contents,
    expected_records,
    headers_of,
    marker,
    random_answer,
    raw_batch,
    stamped,
    taken,
)

SEEDS = range(25)


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
            for index in range(6_000)
        ]
        answer = Answer(bytearray(b"".join(batches)), [], 500, 6_500)
        counts: Counter[BatchPath] = Counter()
        prepared = taken(answer, 500, counts=counts)
        assert counts == {BatchPath.COALESCE: 6_000}
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
    # What lies between those that are merged, and behind them, is carried by none.
    counts.clear()
    between = [small[0], marker(1, 9, abort=False), marker(2, 9, abort=False), small[3]]
    data = memoryview(bytes(b"".join([*between, marker(4, 9, abort=False)])))
    list(prepare(BatchWalk(), data, [], 0, NO_LIMIT, count))
    assert counts == {
        BatchPath.COALESCE: (2, 2, len(small[0]) + len(small[3])),
        BatchPath.DROP: (3, 0, 0),
    }


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
