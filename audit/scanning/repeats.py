"""How often records came more than once, by sequence: a bag of sequences, as bitmaps. Pure.

A record that came n times has n - 1 extra copies. A number for each such record would cost 90 bytes of
Python, and a stream may be carried twice as a whole. So the numbers are sliced by their binary digits (the
bit-sliced index of databases): `digits[k]` holds the sequences in whose number of extra copies 2^k is one of
the terms. A stream that came twice is one bitmap, which roaring keeps as a few ranges, one that came nine
times is four of them, and adding and comparing is done by whole sets, digit by digit.

Called by `cells` (a cell keeps the digits as bitmaps), `reconcile`, `content_check` and `group_counts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest

from pyroaring import BitMap64

_NONE = BitMap64()


class Repeats:
    """Extra copies by sequence. True where there are any."""

    __slots__ = ("_digits",)

    def __init__(self, digits: Iterable[BitMap64] = ()) -> None:
        """Takes the bitmaps as its own."""
        self._digits = list(digits)
        self._trim()

    @classmethod
    def of(cls, copies: Mapping[int, int]) -> Repeats:
        """Of {sequence: extra copies}, for few of them."""
        found = cls()
        for sequence, count in copies.items():
            found.add(BitMap64([sequence]), count)
        return found

    def __bool__(self) -> bool:
        return bool(self._digits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repeats) and self._digits == other._digits

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Repeats({self._digits})"

    @property
    def total(self) -> int:
        """How many extra copies there are."""
        return sum(len(digit) << place for place, digit in enumerate(self._digits))

    @property
    def sequences(self) -> BitMap64:
        """What came more than once, in a new set."""
        return BitMap64.union(*self._digits) if self._digits else BitMap64()

    def of_sequence(self, sequence: int) -> int:
        """Extra copies of one."""
        return sum(1 << place for place, digit in enumerate(self._digits) if sequence in digit)

    def each(self) -> Iterator[tuple[int, int]]:
        """(sequence, extra copies), in order; for few of them."""
        for sequence in self.sequences:
            yield sequence, self.of_sequence(sequence)

    def copy(self) -> Repeats:
        return Repeats(digit.copy() for digit in self._digits)

    def add(self, sequences: BitMap64, copies: int = 1) -> None:
        """So many more copies of each of the sequences."""
        place = 0
        while copies > 0:
            if copies & 1:
                self.add_digit(sequences, place)
            copies >>= 1
            place += 1

    def add_all(self, other: Repeats) -> None:
        for place, digit in enumerate(other._digits):
            self.add_digit(digit, place)

    def add_digit(self, sequences: BitMap64, place: int) -> None:
        """2^place more copies of each of the sequences: a sum with its carry, all of them at once."""
        carry = sequences
        while carry:
            while len(self._digits) <= place:
                self._digits.append(BitMap64())
            held = self._digits[place]
            carry, added = held & carry, carry
            held ^= added
            place += 1

    def within(self, sequences: BitMap64) -> Repeats:
        """Those of these sequences alone."""
        return Repeats(digit & sequences for digit in self._digits)

    def beyond(self, other: Repeats) -> Repeats:
        """What is more of each sequence than the other has; where that has as many, none."""
        if not other or not self:
            return self.copy()
        mine = self.sequences
        left: list[BitMap64] = []
        borrow = BitMap64()
        for minuend, digit in zip_longest(self._digits, other._digits, fillvalue=_NONE):
            subtrahend = digit & mine
            differs = minuend ^ subtrahend
            left.append(differs ^ borrow)
            borrow = (subtrahend - minuend) | (borrow - differs)
        return Repeats(digit - borrow for digit in left)  # a last borrow: the other one has more

    def _trim(self) -> None:
        while self._digits and not self._digits[-1]:
            self._digits.pop()
