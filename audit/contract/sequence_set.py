"""Sets of sequences: roaring bitmaps, ranges, and their JSON form in events. Pure.

Used by `session` and `journal` (building), `events` (reading what anybody may have written), `reconcile`.

In JSON a set is `[[first, last], ...]`, ascending, inclusive; or, when that would take more than 64 ranges,
`{"base": n, "roaring": "<base64>"}`: a portable 32-bit roaring bitmap of `sequence - base`.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap, BitMap64

from millrace.audit.contract.header import MAX_SEQUENCE
from millrace.audit.reconciliation.verdicts import Ranges
from millrace.audit.scanning.cells import BASE_STEP, decode_bitmap
from millrace.broker.errors import MillraceError

MAX_JSON_RANGES = 64
MAX_READ_RANGES = 1 << 20
MAX_ARRAY_SIZE = 1 << 23
# More records than this in one stream and window are a claim, not a count: it must not make the audit
# allocate. A stream's own set of all that is settled grows beyond it in ten days of 10,000 records/s.
MAX_TRUSTED_CARDINALITY = 1 << 33


class InvalidSequenceSet(MillraceError):
    """Not a set of sequences: not ascending, below 1, too large, or not readable."""


def from_ranges(ranges: Ranges) -> BitMap64:
    """The set that inclusive ranges describe."""
    sequences = BitMap64()
    for first, last in ranges:
        sequences.add_range(first, last + 1)
    return sequences


def joined_ranges(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Rows (first, last) of runs of so many numbers each, in any order, ascending, those that touch as one;
    None where two have a number in common."""
    firsts, counts = firsts.astype(np.int64), counts.astype(np.int64)
    order = np.argsort(firsts)
    firsts, lasts = firsts[order], (firsts + counts - 1)[order]
    if (firsts[1:] <= lasts[:-1]).any():
        return None
    begins = np.concatenate(([True], firsts[1:] != lasts[:-1] + 1))[: len(firsts)]
    ends = np.concatenate((begins[1:], [True]))[: len(firsts)]
    return np.stack((firsts[begins], lasts[ends]), axis=1)


def to_ranges(sequences: BitMap64) -> Ranges:
    """Inclusive ranges, ascending.

    Costs the smaller of the set's size and the number of its holes, or, where both are large, the number of
    ranges: a set that a stranger made up of two thousand million members must not make the audit allocate.
    """
    count = len(sequences)
    if count == 0:
        return ()
    first, last = sequences.min(), sequences.max()
    holes_count = last - first + 1 - count
    if holes_count == 0:
        return ((first, last),)
    if min(holes_count, count) > MAX_ARRAY_SIZE:
        return _to_ranges_by_steps(sequences, first, last)
    if holes_count < count:
        holes = _to_ranges_by_array(_span(first, last) - sequences)
        firsts = [first, *(hole_last + 1 for _, hole_last in holes)]
        lasts = [*(hole_first - 1 for hole_first, _ in holes), last]
        return tuple(zip(firsts, lasts, strict=True))
    return _to_ranges_by_array(sequences)


def _span(first: int, last: int) -> BitMap64:
    span = BitMap64()
    span.add_range(first, last + 1)
    return span


def _to_ranges_by_steps(sequences: BitMap64, first: int, last: int) -> Ranges:
    """From each range's start to the next absent number, and from there to the next start."""
    absent = sequences.flip(first, last + 2)
    ranges: list[tuple[int, int]] = []
    while True:
        after = absent.next_set_bit(first)
        ranges.append((first, after - 1))
        if after > last:
            return tuple(ranges)
        first = sequences.next_set_bit(after)


def _to_ranges_by_array(sequences: BitMap64) -> Ranges:
    members = np.frombuffer(sequences.to_array(), dtype=np.uint64)
    if members.size == 0:
        return ()
    breaks = np.flatnonzero(np.diff(members) != 1)
    firsts = members[np.concatenate(([0], breaks + 1))]
    lasts = members[np.concatenate((breaks, [members.size - 1]))]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def complement_ranges(sequences: BitMap64, last: int) -> Ranges:
    """The sequences of 1..last that the set lacks. `last` may be any number: nothing of it is allocated."""
    missing: list[tuple[int, int]] = []
    expected = 1
    for first_held, last_held in to_ranges(sequences):
        if first_held > last:
            break
        if first_held > expected:
            missing.append((expected, first_held - 1))
        expected = last_held + 1
    if expected <= last:
        missing.append((expected, last))
    return tuple(missing)


def to_json(sequences: BitMap64) -> list[list[int]] | dict[str, Any]:
    """The set as an event carries it. A set wider than 2^32 falls back to ranges, however many."""
    ranges = to_ranges(sequences)
    base = ranges[0][0] // BASE_STEP * BASE_STEP if ranges else 0
    if len(ranges) <= MAX_JSON_RANGES or ranges[-1][1] - base >= BASE_STEP:
        return [list(pair) for pair in ranges]
    if len(sequences) > MAX_ARRAY_SIZE:
        bitmap = BitMap()
        for first, last in ranges:
            bitmap.add_range(first - base, last - base + 1)
    else:
        members = np.frombuffer(sequences.to_array(), dtype=np.uint64) - np.uint64(base)
        bitmap = BitMap(members.astype(np.uint32))
    bitmap.run_optimize()
    return {"base": base, "roaring": base64.b64encode(bitmap.serialize()).decode("ascii")}


def from_json(value: Any, *, is_own: bool = False) -> BitMap64:
    """Read a set that anybody may have written; raises InvalidSequenceSet. What a state or a journal keeps
    (`is_own`) is read whatever its size."""
    if isinstance(value, list):
        return _from_json_ranges(value, is_own)
    if isinstance(value, dict):
        return _from_json_roaring(value)
    raise InvalidSequenceSet("a set of sequences is a list of ranges or a roaring bitmap")


def _from_json_ranges(ranges: list[Any], is_own: bool) -> BitMap64:
    if len(ranges) > MAX_READ_RANGES and not is_own:
        raise InvalidSequenceSet(f"{len(ranges)} ranges, at most {MAX_READ_RANGES} are read")
    sequences = BitMap64()
    before, total = 0, 0
    for pair in ranges:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(bound) is int for bound in pair)):
            raise InvalidSequenceSet("a range is [first, last]")
        first, last = pair
        if not before < first <= last <= MAX_SEQUENCE:
            raise InvalidSequenceSet(f"impossible range [{first}, {last}] after {before}")
        before = last
        total += last - first + 1
        if total > MAX_TRUSTED_CARDINALITY and not is_own:
            raise InvalidSequenceSet(f"more than {MAX_TRUSTED_CARDINALITY} sequences in one set")
        sequences.add_range(first, last + 1)
    return sequences


def _from_json_roaring(value: dict[str, Any]) -> BitMap64:
    base, encoded = value.get("base"), value.get("roaring")
    if type(base) is not int or not isinstance(encoded, str):
        raise InvalidSequenceSet("a bitmap is {base, roaring}")
    if not 0 <= base <= MAX_SEQUENCE - BASE_STEP:
        raise InvalidSequenceSet(f"impossible base {base}")
    try:
        sequences = decode_bitmap(base, base64.b64decode(encoded, validate=True))
    except (binascii.Error, ValueError, IndexError) as error:
        raise InvalidSequenceSet("the roaring bitmap cannot be read") from error
    if 0 in sequences:
        raise InvalidSequenceSet("sequence 0 in a set")
    return sequences
