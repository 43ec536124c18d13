"""Sets of numbers in compiled loops, against pyroaring and plain sets, and against bytes that lie."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from millrace.audit.scanning.set_kernels import (
    SMALL_SET_BYTES,
    merge_runs,
    read_sets,
    set_sizes,
    write_sets,
)
from tests import seeds

TOP = (1 << 32) - 1
runs_of_a_set = st.lists(
    st.tuples(
        st.integers(0, 200) | st.integers(65_500, 65_600) | st.integers(TOP - 70_000, TOP), st.integers(1, 90)
    ),
    max_size=12,
)


def ordered(runs) -> np.ndarray:
    return np.array(sorted(runs), np.int64).reshape(-1, 3)


def written(sets: list[set[int]]) -> list[bytes]:
    """Each set's bitmap, by the kernels."""
    runs = ordered((number, each, each) for number, of in enumerate(sets) for each in of)
    kept, _ = merge_runs(runs, np.empty_like(runs))
    runs = np.ascontiguousarray(runs[:kept])
    rows = np.searchsorted(runs[:, 0], np.arange(len(sets) + 1))
    offsets = np.zeros(len(sets) + 1, np.int64)
    set_sizes(runs, rows, offsets[1:])
    offsets = np.cumsum(offsets)
    content = np.full(int(offsets[-1]) + 8, 0xAA, np.uint8)
    write_sets(runs, rows, offsets, content)
    assert (content[offsets[-1] :] == 0xAA).all()
    return [content[first:end].tobytes() for first, end in itertools.pairwise(offsets)]


def read(bitmaps: list[bytes]) -> list[set[int] | None]:
    """Each bitmap's set, None where the kernel leaves it to the library."""
    data = np.frombuffer(b"".join(bitmaps), np.uint8)
    ends = np.cumsum([len(each) for each in bitmaps])
    begins = ends - [len(each) for each in bitmaps]
    runs = np.full((len(data) // 2 + 1, 3), -1, np.int64)
    unread = np.zeros(len(bitmaps), np.int64)
    made = read_sets(data, begins, ends, np.arange(len(bitmaps)), runs, unread)
    found: list[set[int] | None] = [None if each else set() for each in unread.tolist()]
    for number, first, last in runs[:made].tolist():
        members = found[number]
        if members is not None:
            members.update(range(first, last + 1))
    return found


def members(runs: np.ndarray) -> list[tuple[int, int]]:
    return [(number, each) for number, first, last in runs.tolist() for each in range(first, last + 1)]


@given(st.lists(runs_of_a_set, max_size=5))
def test_merged_runs_are_the_union_and_what_came_again_is_told_as_often(sets):
    table = ordered(
        (number, first, min(first + size - 1, TOP)) for number, of in enumerate(sets) for first, size in of
    )
    truth = Counter(members(table))
    again = np.empty_like(table)
    kept, found = merge_runs(table, again)
    assert members(table[:kept]) == sorted(truth)
    for before, after in itertools.pairwise(table[:kept].tolist()):
        assert before[0] != after[0] or before[2] + 1 < after[1], "they touch"
    copies = Counter(members(again[:found]))
    assert copies == Counter({place: count - 1 for place, count in truth.items() if count > 1})


@settings(max_examples=50)
@given(st.lists(runs_of_a_set, max_size=4))
def test_bitmaps_are_those_that_the_library_reads(sets):
    members = [{v for first, size in of for v in range(first, min(first + size, TOP + 1))} for of in sets]
    for each, bitmap in zip(members, written(members), strict=True):
        assert bitmap == b"" if not each else set(BitMap.deserialize(bitmap)) == each


def test_every_kind_of_container_is_as_small_as_the_library_makes_it():
    rng = random.Random(seeds.given())
    sets = [
        {7},
        {0, TOP},
        set(range(5, 40_000)),
        set(range(0, 130_000, 2)),  # bits
        {1, *range(1 << 16, 300_000), TOP},
        {each << 16 for each in range(9)},
        set(rng.sample(range(70_000), 9_000)),
        set(range(100)) - {50},
    ]
    for each, bitmap in zip(sets, written(sets), strict=True):
        library = BitMap(each)
        library.run_optimize()
        assert set(BitMap.deserialize(bitmap)) == each and len(bitmap) <= len(library.serialize()) + 2


def test_small_bitmaps_of_either_writer_are_read():
    rng = random.Random(seeds.given())
    sets = []
    for _ in range(200):
        first = rng.choice((0, 65_530, TOP - 200))
        members = set(range(first, first + rng.randrange(1, 150)))
        sets.append(members | {rng.randrange(1 << rng.randrange(1, 33)) for _ in range(rng.randrange(40))})
    bitmaps, expected = [], []
    for each, ours in zip(sets, written(sets), strict=True):
        plain, optimised = BitMap(each), BitMap(each)
        optimised.run_optimize()
        for bitmap in (ours, plain.serialize(), optimised.serialize()):
            if len(bitmap) <= SMALL_SET_BYTES:
                bitmaps.append(bitmap)
                expected.append(each)
    assert read(bitmaps) == expected and len(bitmaps) > 300


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 11, 14])
def test_a_bitmap_that_is_cut_short_is_left_to_the_library(keep):
    for whole in written([{1, 2, 3, 4, 9}, {1, 70_000}]):
        assert read([whole[:keep], whole]) == [None, set(BitMap.deserialize(whole))]


def test_damaged_bitmaps_are_never_read_beyond_their_end_and_never_differ_from_the_library():
    rng = random.Random(seeds.given())
    wholes = written([{1, 2, 3, 4, 9}, {1, 70_000}, set(range(80)), {each << 16 for each in range(9)}])
    fence = b"\xff" * 64
    for _ in range(3_000):
        damaged = bytearray(rng.choice(wholes))
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (_, found, _) = read([fence, bytes(damaged), fence])
        if found is not None:
            assert found == set(BitMap.deserialize(bytes(damaged)))
