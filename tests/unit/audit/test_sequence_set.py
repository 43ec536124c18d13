from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap, BitMap64

from millrace.audit.contract import sequence_set
from millrace.audit.contract.header import MAX_SEQUENCE
from millrace.audit.contract.sequence_set import (
    MAX_JSON_RANGES,
    InvalidSequenceSet,
    complement_ranges,
    from_json,
    from_ranges,
    to_json,
    to_ranges,
)
from millrace.audit.scanning.cells import decode_bitmap

bases = st.sampled_from([0, 1000, (1 << 32) - 50, 5 << 32, (1 << 40) + 7])
sets = st.builds(
    lambda base, members: {base + member for member in members}, bases, st.sets(st.integers(1, 400))
)


def expand(ranges):
    return {sequence for first, last in ranges for sequence in range(first, last + 1)}


@given(sets)
def test_ranges_hold_exactly_the_set_ascending_and_apart(members):
    ranges = to_ranges(BitMap64(members))
    assert expand(ranges) == members
    assert all(before[1] + 1 < after[0] for before, after in pairwise(ranges))
    assert set(from_ranges(ranges)) == members


@given(sets.filter(bool), st.integers(0, 20))
def test_a_set_too_large_to_list_gives_the_same_ranges_and_json(members, limit):
    sequences = BitMap64(members)
    ranges, value = to_ranges(sequences), to_json(sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_set, "MAX_ARRAY_SIZE", limit)
        assert to_ranges(sequences) == ranges
        assert to_json(sequences) == value


def test_a_set_of_thousands_of_millions_costs_its_ranges_only(monkeypatch):
    """As an event of 100 bytes can claim it: to list its members would take 32 GB."""
    monkeypatch.setattr(sequence_set, "_to_ranges_by_array", None)
    claim = [[1, 1 << 32], [1 << 33, (1 << 33) + (1 << 32) - 1]]
    sequences = from_json(claim)
    assert to_json(sequences) == claim
    many = [[number << 22, (number << 22) + (1 << 21)] for number in range(1, 1000)]
    value = to_json(from_json(many))
    assert isinstance(value, dict) and from_json(value) == from_json(many)


@given(sets)
def test_json_comes_back_and_stays_small(members):
    value = to_json(BitMap64(members))
    assert set(from_json(value)) == members
    ranges = to_ranges(BitMap64(members))
    assert isinstance(value, list) == (len(ranges) <= MAX_JSON_RANGES) or value == [list(r) for r in ranges]


@given(st.sets(st.integers(1, 100)), st.integers(0, 120))
def test_the_complement_is_what_is_missing_up_to_the_last(members, last):
    assert expand(complement_ranges(BitMap64(members), last)) == set(range(1, last + 1)) - members


def test_the_complement_up_to_an_absurd_last_allocates_nothing():
    assert complement_ranges(BitMap64([5]), MAX_SEQUENCE) == ((1, 4), (6, MAX_SEQUENCE))


@given(sets.filter(bool))
def test_a_bitmap_of_any_base_is_read(members):
    base = min(members)
    bitmap = BitMap(member - base for member in members)
    assert set(decode_bitmap(base, bitmap.serialize())) == members


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        [[2, 1]],
        [[0, 3]],
        [[-3, 3]],
        [[1, 3], [3, 5]],
        [[1, 1 << 63]],
        [[1, 1 << 62]],
        [[1 << 63, 1 << 63]],
        [[1]],
        [[1, 2.0]],
        [[True, True]],
        ["1-2"],
        {"base": 0},
        {"base": -1, "roaring": ""},
        {"base": 1 << 63, "roaring": ""},
        {"base": 0, "roaring": "%%%"},
        {"base": 0, "roaring": "AAAA"},
        {"base": 0, "roaring": "OjAAAAEAAAAAAAAAEAAAAAAA"},
    ],
)
def test_an_impossible_set_is_refused(value):
    with pytest.raises(InvalidSequenceSet):
        from_json(value)
