"""The judgement: what the aggregate holds of each stream, against what its writer was told. Pure.

Used by `witness.py` (`Seen.add`, record by record) and `run.py` (`judge`, between rounds and at the end).
Exactly once: each acknowledged record once, in the order of its numbers, unless a gap of an allowed kind
names its offset. At least once: repeats may come, but what comes for the first time comes in order.

A log that is gone can be named only up to the last end that the mirror had seen of it, and the gap's event
says that its end is open. What its writer was told of after that look may only be the last records of the
log, of which not one came.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.cluster.mirror_faults.records import SHIFTING, Gap, Journal, Stream

MOST_LINES = 20
EXPLAINS_A_DELETION = ("recreated",)
"""What may happen to records of a topic that is deleted before they were carried. The log is gone then, so
its end may have grown unseen."""

CLOCK_SLACK_MS = 2_000


@dataclass(slots=True)
class Seen:
    """What was read of one stream, so far. `absent`: numbers below the highest that did not come (yet);
    `again`: how often a number came after the first time."""

    highest: int = -1
    count: int = 0
    again: Counter[int] = field(default_factory=Counter)
    absent: set[int] = field(default_factory=set)
    breaches: list[str] = field(default_factory=list)

    def add(self, number: int, where: object) -> None:
        self.count += 1
        if number > self.highest:
            self.absent.update(range(self.highest + 1, number))
            self.highest = number
        elif number in self.absent:
            self.absent.discard(number)
            self.breaches.append(f"out of order: {number} at {where} comes after {self.highest}")
        else:
            self.again[number] += 1

    def has(self, number: int) -> bool:
        return number <= self.highest and number not in self.absent


@dataclass(slots=True)
class Verdict:
    """`missing` are numbers that were acknowledged and are neither there nor explained. `explained_count` are
    named by a gap: by its offsets, or by its open end. Repeats are `source_duplicate_count` where the
    source's own log has them."""

    missing: dict[Stream, list[int]] = field(default_factory=dict)
    explained_count: int = 0
    duplicate_count: int = 0
    source_duplicate_count: int = 0
    breaches: list[str] = field(default_factory=list)

    @property
    def lost_count(self) -> int:
        return sum(len(numbers) for numbers in self.missing.values())

    def lines(self) -> list[str]:
        lost = [
            f"lost: {stream}: {len(numbers)} acknowledged records, the first is number {numbers[0]}"
            for stream, numbers in self.missing.items()
        ]
        return (lost + self.breaches)[:MOST_LINES]


def judge(
    journals: Iterable[Journal],
    seen: Mapping[Stream, Seen],
    gaps: Sequence[Gap],
    *,
    exactly_once: bool,
    up_to: Mapping[Stream, int] | None = None,
    at_source: Mapping[Stream, Counter[int]] | None = None,
) -> Verdict:
    """`up_to` leaves out what was acknowledged after a moment: how many runs of each journal count.
    `at_source` has what the source's own log holds again, as `Seen.again` counts it."""
    verdict = Verdict()
    known = {}
    for journal in journals:
        stream = journal.stream
        known[stream] = journal
        found = seen.get(stream, Seen())
        repeats = (found.again - (at_source or {}).get(stream, Counter[int]())).total()
        verdict.duplicate_count += repeats
        verdict.source_duplicate_count += found.again.total() - repeats
        verdict.breaches += [f"{stream}: {line}" for line in found.breaches]
        if exactly_once and repeats:
            verdict.breaches.append(f"{stream}: {repeats} records came more than once")
        runs = journal.runs[: up_to.get(stream, 0)] if up_to is not None else journal.runs
        caused = [gap for gap in gaps if may_be(gap, journal)]
        for number, offset in _absent(runs, found):
            if is_explained(caused, offset, _carried_to(journal.runs, found)):
                verdict.explained_count += 1
            else:
                verdict.missing.setdefault(stream, []).append(number)
    for stream in seen:
        if stream not in known:
            verdict.breaches.append(f"{stream}: records of a stream that nobody wrote")
        elif seen[stream].highest >= known[stream].next_number:
            verdict.breaches.append(f"{stream}: number {seen[stream].highest} was never written")
    verdict.breaches += [
        f"a gap that nothing caused: {gap}"
        for gap in gaps
        if not any(may_be(gap, each) for each in known.values())
    ]
    return verdict


def _absent(runs: Sequence[tuple[int, int, int]], found: Seen) -> Iterator[tuple[int, int]]:
    """(number, offset) of what was acknowledged and did not come."""
    for number in sorted(found.absent):
        index = bisect_right(runs, number, key=lambda run: run[0]) - 1
        if index >= 0 and number < runs[index][0] + runs[index][1]:
            yield number, runs[index][2] + number - runs[index][0]
    beyond = bisect_right(runs, found.highest, key=lambda run: run[0] + run[1] - 1)
    for first, count, offset in runs[beyond:]:
        for number in range(max(first, found.highest + 1), first + count):
            yield number, offset + number - first


def _carried_to(runs: Sequence[tuple[int, int, int]], found: Seen) -> int:
    """Offset behind the last acknowledged record that came; -1 when none did."""
    index = bisect_right(runs, found.highest, key=lambda run: run[0]) - 1
    if index < 0:
        return -1
    first, count, offset = runs[index]
    return offset + min(found.highest - first, count - 1) + 1


def is_explained(caused: Sequence[Gap], offset: int, carried_to: int) -> bool:
    """Whether one of the stream's gaps names this offset, or its open end does: then it lies behind all that
    any of them names, and behind all that came, for the mirror had not heard of it when the log went."""
    if any(gap.from_offset <= offset < gap.to_offset for gap in caused):
        return True
    is_open = any(gap.has_open_end for gap in caused)
    return is_open and offset >= max(carried_to, *(gap.to_offset for gap in caused))


def may_be(gap: Gap, journal: Journal) -> bool:
    """Whether a gap of its kind was caused in this stream's life."""
    stream = journal.stream
    return (
        (gap.source, gap.topic, gap.partition) == (stream.source, stream.topic, stream.partition)
        and stream.topic == SHIFTING
        and gap.gap_class in EXPLAINS_A_DELETION
        and journal.ended_ms is not None
        and gap.at_ms >= journal.ended_ms - CLOCK_SLACK_MS
        and (journal.settled_ms is None or gap.at_ms <= journal.settled_ms)
    )
