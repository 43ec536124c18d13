"""Reconciliation of one stream by sets: what was acknowledged against what each tier saw. Pure.

Called by the job, once for each stream that has events or cells; by `audit explain`; by the mutation test,
whose known truth its rows must equal. The order of everything given does not matter, and nothing is netted:
a loss never cancels a duplicate.

**What the job must supply, so that a missing record is a loss and not lag.** In this order:

1. read the events of all clusters to their ends;
2. pin the end offsets of the source tier (a record acknowledged in the events lies below them);
3. read the mirror's positions (everything below a position was acknowledged by the aggregate);
4. pin the end offsets of the aggregate tier; then scan both tiers up to their pins.

Then a sequence that was acknowledged and is not in the source tier is lost between `produced` and source, and
one that is in the source tier below the position and not in the aggregate is lost between these two. A
record's exact offset is not kept: its cell bounds it. `TierReading.passed` gives the positions (of step 3)
of the *upstream* partitions; a cell whose `last_offset` is below the position was passed in whole; one that
begins at or after it is in flight in whole; one that lies across is not decidable, and in flight until it
is. Therefore chunks should be cut at the positions known when they are scanned (then at most the chunk
where a mirror lagged in an earlier run lies across, and only until the position leaves it), and at the
bounds of gaps. Replacing a cell by finer ones from a second read is always allowed. A position at the log's
end decides everything.

For a mirror that keeps no positions, `passage_by_arrivals` derives them from later records that were seen
downstream.

**Sets.** A acknowledged, U ambiguous, F failed; S(t) seen in tier t or in any tier below it (who arrived in
the aggregate was in the source, even if retention took it from there since).

- expected in the first tier: A. Expected in a tier with an upstream tier: S(upstream), so that a record is
  missing in one hop only, and an ambiguous or unreported one that was lost later is named as well;
- missing = expected - S(t): lost, in flight, explained by a gap, or unknown where the tier could not be read;
- unreported = S - (A + U + F);
- every sequence up to the last one assigned must be in A + U + F, or seen, or still pending in a living
  stream;
  what is not is a hole in the reports, UNKNOWN, in the stream's own row because its window is not known
  either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyroaring import BitMap64

from millrace.audit.cells import Cell, SeenByWindow, SeenSet
from millrace.audit.events import CLOSED, UNANNOUNCED, CountEvent, StreamFacts
from millrace.audit.sequence_set import complement_ranges, to_ranges
from millrace.audit.verdicts import PRODUCED, Hop, Ranges, Verdict, WindowState, WindowVerdict

Place = tuple[str, str, int]
"""(cluster, topic, partition), as in `Cell.place`"""


@dataclass(frozen=True, slots=True)
class Passage:
    """How far an upstream partition had been carried into a tier: every offset below `next_offset`.

    `topic_id` is the upstream topic's id when that was said ("" = not known). Cells of another id belong to a
    deleted topic of the same name; nothing of it can arrive any more.
    """

    next_offset: int
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """Upstream offsets [from_offset, to_offset) that were never carried; `cause` is the gap event's class."""

    place: Place
    from_offset: int
    to_offset: int
    cause: str


@dataclass(frozen=True, slots=True)
class UnreadRange:
    """Offsets of the tier itself that the audit could not read, and why: retention, truncation, unreachable.

    `until_ms`: everything in it was appended before this time (None: no bound is known). A stream that opened
    later has no record in it.
    """

    place: Place
    from_offset: int
    to_offset: int
    cause: str
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class TierReading:
    """What is known of a tier for one topic beside its cells; `passed` and `gaps` are of upstream offsets."""

    name: str
    upstream: str = PRODUCED
    passed: Mapping[Place, Passage] = field(default_factory=dict)
    gaps: Sequence[Gap] = ()
    unread: Sequence[UnreadRange] = ()

    @property
    def hop(self) -> Hop:
        return (self.upstream, self.name)


def reconcile_stream(
    stream: StreamFacts,
    seen: Mapping[str, SeenByWindow],
    tiers: Sequence[TierReading],
    *,
    window_ms: int,
    grace_ms: int,
    now_ms: int,
) -> list[WindowVerdict]:
    """One row per window, ascending, then the stream's own row (window_start_ms None) where it has one.

    `tiers` are in order, a tier after its upstream; tiers of `seen` that it does not name are not looked at.
    `window_ms` is the audit's window. A producer that reports in windows of another length is reconciled in
    the shortest window that both lengths divide. Raises ValueError for tiers in a wrong order.
    """
    _check_order(tiers)
    common_ms = math.lcm(window_ms, *{report.window_ms for report in stream.windows.values()})
    case = _Case(stream, _refile(seen, tiers, common_ms), tiers, common_ms, grace_ms, now_ms)
    rows = {start_ms: _Row(start_ms) for start_ms in case.window_starts()}
    if stream.sequenced:
        _file_missing(case, rows)
        _file_duplicates(case, rows)
        _file_unreported(case, rows)
        _file_unnumbered(case, rows)
        _check_content(case, rows)
    else:
        _compare_counts(case, rows)
    verdicts = [case.verdict(rows[start_ms]) for start_ms in sorted(rows)]
    own = _own_row(case)
    return verdicts if own is None else [*verdicts, own]


def roster_rows(
    roster: Iterable[str], streams: Iterable[StreamFacts], topic: str, window_ms: int
) -> list[WindowVerdict]:
    """A row for every producer that must report on the topic and has not: UNKNOWN, never an empty PROVEN."""
    heard = {facts.producer for facts in streams if facts.topic == topic}
    return [
        WindowVerdict(
            topic=topic,
            producer=name,
            stream="",
            window_start_ms=None,
            window_ms=window_ms,
            state=WindowState.SETTLED,
            verdict=Verdict.UNKNOWN,
            reasons=("a producer of the roster has never reported",),
        )
        for name in sorted(set(roster) - heard)
    ]


def passage_by_arrivals(
    upstream_cells: Iterable[Cell], arrived: Mapping[str, BitMap64]
) -> dict[Place, Passage]:
    """Positions of a mirror that keeps none: below which offsets a later record of the partition was seen.

    `arrived` is {stream: sequences seen downstream}. Sound only for a mirror that keeps the order within a
    partition. A cell proves its `last_offset` when all of its sequences arrived, else its `first_offset`.
    What stands at several offsets proves nothing: any of its copies may be the one that arrived.
    """
    passages: dict[Place, Passage] = {}
    upstream_cells = list(upstream_cells)
    copied = _in_several_cells(upstream_cells)
    for cell in upstream_cells:
        sequences = cell.sequences() - copied.get(cell.stream, BitMap64())
        downstream = arrived.get(cell.stream)
        if not sequences or downstream is None or sequences.isdisjoint(downstream):
            continue
        whole = cell.count == len(sequences) and sequences.issubset(downstream)
        next_offset = cell.last_offset + 1 if whole else cell.first_offset
        known = passages.get(cell.place)
        if known is None or next_offset > known.next_offset:
            passages[cell.place] = Passage(next_offset, cell.topic_id)
    return passages


def _in_several_cells(cells: Iterable[Cell]) -> dict[str, BitMap64]:
    """{stream: sequences that more than one cell holds}."""
    held: dict[str, BitMap64] = {}
    copied: dict[str, BitMap64] = {}
    for cell in cells:
        sequences, before = cell.sequences(), held.setdefault(cell.stream, BitMap64())
        if not before.isdisjoint(sequences):
            copied[cell.stream] = copied.get(cell.stream, BitMap64()) | (before & sequences)
        before |= sequences
    return copied


@dataclass(slots=True)
class _Row:
    """A window's findings while they are collected."""

    window_start_ms: int
    missing: dict[Hop, Ranges] = field(default_factory=dict)
    missing_count: dict[Hop, int] = field(default_factory=dict)
    in_flight: dict[Hop, Ranges] = field(default_factory=dict)
    explained: dict[str, BitMap64] = field(default_factory=dict)
    unknown: BitMap64 = field(default_factory=BitMap64)
    unreported: Ranges = ()
    duplicates: dict[str, Ranges] = field(default_factory=dict)
    extra_copies: dict[str, int] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)
    undecided: bool = False
    content_lost: bool = False

    def verdict(self, proven: Verdict) -> Verdict:
        if self.missing or self.missing_count or self.content_lost:
            return Verdict.LOSS
        if self.extra_copies:
            return Verdict.DUPLICATE
        if self.in_flight or self.explained or self.unknown or self.unreported or self.undecided:
            return Verdict.UNKNOWN
        return proven


class _Case:
    """One stream's facts, with the unions that several rules need."""

    def __init__(
        self,
        stream: StreamFacts,
        seen: dict[str, SeenByWindow],
        tiers: Sequence[TierReading],
        window_ms: int,
        grace_ms: int,
        now_ms: int,
    ):
        self.stream, self.seen, self.tiers = stream, seen, tiers
        self.window_ms, self.grace_ms, self.now_ms = window_ms, grace_ms, now_ms
        self.reports: dict[int, list[CountEvent]] = {}
        for report in stream.windows.values():
            start_ms = report.window_start_ms - report.window_start_ms % window_ms
            self.reports.setdefault(start_ms, []).append(report)
        self.acknowledged = _union(report.acknowledged for report in stream.windows.values())
        self.reported = _union(
            part
            for report in stream.windows.values()
            for part in (report.acknowledged, report.ambiguous, report.failed)
        )
        self.arrived: dict[str, BitMap64] = {}
        for tier in reversed(tiers):
            below = [self.arrived[lower.name] for lower in tiers if lower.upstream == tier.name]
            own = (window.sequences for window in seen[tier.name].values())
            self.arrived[tier.name] = _union([*below, *own])
        self.anywhere = _union(self.arrived.values())
        self.alive = stream.state not in (CLOSED, UNANNOUNCED) and not stream.lapsed(now_ms, grace_ms)

    def window_starts(self) -> set[int]:
        return set(self.reports).union(*self.seen.values())

    def members(self, start_ms: int) -> BitMap64:
        """Every sequence that a report or a tier files in this window."""
        filed = [report.acknowledged for report in self.reports.get(start_ms, ())]
        filed += [windows[start_ms].sequences for windows in self.seen.values() if start_ms in windows]
        return _union(filed)

    def expected(self, tier: TierReading) -> BitMap64:
        return self.acknowledged if tier.upstream == PRODUCED else self.arrived[tier.upstream]

    def unread_causes(self, tier: TierReading, start_ms: int) -> list[str]:
        """Why the tier may have held records of this window that the audit never saw.

        What was gone before the stream opened and before the window began held none of them: the opening may
        be told late, so it is not enough. A producer's clock and the auditor's are compared here: they may
        differ by the grace.
        """
        opened_ms = self.stream.opened_at_ms
        since_ms = None if opened_ms is None else min(opened_ms, start_ms) - self.grace_ms
        return sorted(
            {
                unread.cause
                for unread in tier.unread
                if unread.until_ms is None or since_ms is None or since_ms <= unread.until_ms
            }
        )

    def settled(self, start_ms: int) -> bool:
        """Nothing more can come into this window, as far as anybody promised."""
        stream = self.stream
        if stream.state == UNANNOUNCED:
            return False
        end_ms = start_ms + self.window_ms
        calm = self.now_ms >= min(end_ms, stream.at_ms) + self.grace_ms
        if stream.state == CLOSED or stream.lapsed(self.now_ms, self.grace_ms):
            return calm
        promised = stream.no_earlier_than_ms is not None and stream.no_earlier_than_ms >= end_ms
        return promised and self.now_ms >= end_ms + self.grace_ms

    def verdict(self, row: _Row) -> WindowVerdict:
        stream, start_ms = self.stream, row.window_start_ms
        reports = self.reports.get(start_ms, [])
        windows = {tier.name: self.seen[tier.name].get(start_ms) for tier in self.tiers}
        row.reasons.update(stream.conflicts)
        row.undecided = row.undecided or bool(stream.conflicts)
        proven = Verdict.PROVEN if stream.sequenced else Verdict.COUNT_MATCH
        return WindowVerdict(
            topic=stream.topic,
            producer=stream.producer,
            stream=stream.stream,
            window_start_ms=start_ms,
            window_ms=self.window_ms,
            state=WindowState.SETTLED if self.settled(start_ms) else WindowState.OPEN,
            verdict=row.verdict(proven),
            published=sum(report.count for report in reports),
            ambiguous=sum(len(report.ambiguous) for report in reports),
            consumed={name: window.count if window else 0 for name, window in windows.items()},
            seen={name: _distinct_count(window) for name, window in windows.items()},
            missing=row.missing,
            duplicates=row.duplicates,
            extra_copies=row.extra_copies,
            in_flight=row.in_flight,
            unreported=row.unreported,
            unknown=to_ranges(row.unknown),
            explained={cause: to_ranges(sequences) for cause, sequences in row.explained.items()},
            missing_count=row.missing_count,
            reasons=tuple(sorted(row.reasons)),
        )


def _distinct_count(window: SeenSet | None) -> int:
    return 0 if window is None else len(window.sequences) + window.unsequenced_count


def _check_order(tiers: Sequence[TierReading]) -> None:
    above = {PRODUCED}
    for tier in tiers:
        if tier.upstream not in above or tier.name in above:
            raise ValueError(f"tier {tier.name} must come once, after its upstream tier {tier.upstream}")
        above.add(tier.name)


def _union(sets: Iterable[BitMap64]) -> BitMap64:
    total = BitMap64()
    for sequences in sets:
        total |= sequences
    return total


def _refile(
    seen: Mapping[str, SeenByWindow], tiers: Sequence[TierReading], window_ms: int
) -> dict[str, SeenByWindow]:
    """The tiers' windows, summed to the length used here (usually they have it already)."""
    refiled: dict[str, SeenByWindow] = {}
    for tier in tiers:
        windows = seen.get(tier.name, {})
        if all(start_ms % window_ms == 0 for start_ms in windows):
            refiled[tier.name] = dict(windows)
            continue
        refiled[tier.name] = {}
        for start_ms, window in windows.items():
            start_ms -= start_ms % window_ms
            refiled[tier.name].setdefault(start_ms, SeenSet()).merge(window)
    return refiled


def _file_missing(case: _Case, rows: dict[int, _Row]) -> None:
    """Find what each tier lacks of what its upstream had, and say for every sequence why."""
    for tier in case.tiers:
        missing = case.expected(tier) - case.arrived[tier.name]
        if not missing:
            continue
        fate = _Fate(missing) if tier.upstream == PRODUCED else _fate_by_offsets(case, tier, missing)
        for start_ms, row in rows.items():
            members = case.members(start_ms) & missing
            if members:
                _file_fate(row, tier, fate, members, case.unread_causes(tier, start_ms))


@dataclass(slots=True)
class _Fate:
    """Missing sequences by what became of them; each in one set."""

    lost: BitMap64
    in_flight: BitMap64 = field(default_factory=BitMap64)
    explained: dict[str, BitMap64] = field(default_factory=dict)
    unknown: BitMap64 = field(default_factory=BitMap64)


def _file_fate(row: _Row, tier: TierReading, fate: _Fate, members: BitMap64, causes: list[str]) -> None:
    lost, in_flight = members & fate.lost, members & fate.in_flight
    if lost and causes:
        row.unknown |= lost
        row.reasons.update(f"part of tier {tier.name} could not be read: {cause}" for cause in causes)
    elif lost:
        row.missing[tier.hop] = to_ranges(lost)
    if in_flight:
        row.in_flight[tier.hop] = to_ranges(in_flight)
    for cause, sequences in fate.explained.items():
        if not members.isdisjoint(sequences):
            row.explained[cause] = row.explained.get(cause, BitMap64()) | (members & sequences)
    unknown = members & fate.unknown
    if unknown:
        row.unknown |= unknown
        row.reasons.add(f"a gap or an unknown offset before tier {tier.name}")


def _fate_by_offsets(case: _Case, tier: TierReading, missing: BitMap64) -> _Fate:
    """Where the upstream tier's cells put the missing sequences, relative to positions and gaps.

    A record that stands at several upstream offsets (a duplicate) is lost only when no copy can still come
    and at least one copy has no explanation.
    """
    passed, in_flight, unsure = BitMap64(), BitMap64(), BitMap64()
    explained: dict[str, BitMap64] = {}
    for window in case.seen[tier.upstream].values():
        if window.sequences.isdisjoint(missing):
            continue
        for cell in window.cells:
            members = cell.sequences() & missing
            if not members:
                continue
            gap = _gap_over(cell, tier.gaps)
            if gap is not None and _lies_within(cell, gap):
                explained[gap.cause] = explained.get(gap.cause, BitMap64()) | members
            elif not _is_passed(cell, tier.passed.get(cell.place)):
                in_flight |= members
            elif gap is not None:
                unsure |= members
            else:
                passed |= members
    unsure -= in_flight
    lost = passed - in_flight - unsure
    placed = lost | in_flight | unsure
    explained = {cause: sequences - placed for cause, sequences in explained.items()}
    without_place = missing - placed - _union(explained.values())
    return _Fate(lost, in_flight, {c: s for c, s in explained.items() if s}, unsure | without_place)


def _is_passed(cell: Cell, passage: Passage | None) -> bool:
    if passage is None:
        return False
    if cell.topic_id and passage.topic_id and cell.topic_id != passage.topic_id:
        return True
    return cell.last_offset < passage.next_offset


def _gap_over(cell: Cell, gaps: Sequence[Gap]) -> Gap | None:
    """A gap that touches the cell; one that holds it whole is preferred."""
    touching = [
        gap
        for gap in gaps
        if gap.place == cell.place
        and gap.from_offset <= cell.last_offset
        and cell.first_offset < gap.to_offset
    ]
    return max(touching, key=lambda gap: _lies_within(cell, gap), default=None)


def _lies_within(cell: Cell, gap: Gap) -> bool:
    return gap.from_offset <= cell.first_offset and cell.last_offset < gap.to_offset


def _file_duplicates(case: _Case, rows: dict[int, _Row]) -> None:
    """Name extra copies at the first tier that has them; what the upstream had already is not named again."""
    extra: dict[str, dict[int, int]] = {PRODUCED: {}}
    for tier in case.tiers:
        filed = _extra_copies(case.seen[tier.name])
        extra[tier.name] = {}
        for copies in filed.values():
            for sequence, count in copies.items():
                extra[tier.name][sequence] = extra[tier.name].get(sequence, 0) + count
        for start_ms, copies in filed.items():
            new = {
                sequence: count - extra[tier.upstream].get(sequence, 0)
                for sequence, count in copies.items()
                if count > extra[tier.upstream].get(sequence, 0)
            }
            if new:
                row = rows[start_ms]
                row.duplicates[tier.name] = to_ranges(BitMap64(new))
                row.extra_copies[tier.name] = sum(new.values())


def _extra_copies(windows: SeenByWindow) -> dict[int, dict[int, int]]:
    """{window: {sequence: extra copies}}; a sequence filed in two windows is a repeat in the later one."""
    filed = {start_ms: dict(window.repeats) for start_ms, window in windows.items() if window.repeats}
    before = BitMap64()
    for start_ms in sorted(windows):
        sequences = windows[start_ms].sequences
        if not before.isdisjoint(sequences):
            copies = filed.setdefault(start_ms, {})
            for sequence in before & sequences:
                copies[sequence] = copies.get(sequence, 0) + 1
        before |= sequences
    return filed


def _file_unreported(case: _Case, rows: dict[int, _Row]) -> None:
    unreported = case.anywhere - case.reported
    if not unreported:
        return
    for start_ms, row in rows.items():
        row.unreported = to_ranges(case.members(start_ms) & unreported)


def _file_unnumbered(case: _Case, rows: dict[int, _Row]) -> None:
    """Records without numbers, and no report that says so: sets cannot tell of them, so nothing is proven."""
    for windows in case.seen.values():
        for start_ms, window in windows.items():
            if window.unsequenced_count:
                rows[start_ms].undecided = True
                rows[start_ms].reasons.add("records without numbers that no report tells of")


def _check_content(case: _Case, rows: dict[int, _Row]) -> None:
    """Compare content digests where a tier holds exactly the set that was digested above it."""
    for start_ms, row in rows.items():
        reports = case.reports.get(start_ms, [])
        above: tuple[str, BitMap64, int] | None = None
        if len(reports) == 1 and reports[0].digest is not None:
            above = (PRODUCED, reports[0].acknowledged, reports[0].digest)
        for tier in case.tiers:
            window = case.seen[tier.name].get(start_ms)
            if window is None or window.digest is None or window.repeats or not window.cells:
                continue
            if above is not None and above[1] == window.sequences and above[2] != window.digest:
                row.content_lost = True
                row.reasons.add(f"content differs between {above[0]} and {tier.name}")
            above = (tier.name, window.sequences, window.digest)


def _compare_counts(case: _Case, rows: dict[int, _Row]) -> None:
    """The weaker verdict of a producer that cannot number its records: the counts agree, or not."""
    for start_ms, row in rows.items():
        if case.stream.distrusted:
            row.undecided = True
            row.reasons.update(case.stream.distrusted)
        if start_ms not in case.reports:
            row.undecided = True
            row.reasons.add("no report tells of this window")
            continue
        above = sum(report.count for report in case.reports.get(start_ms, ()))
        counts = {PRODUCED: above}
        for tier in case.tiers:
            window = case.seen[tier.name].get(start_ms)
            counts[tier.name] = 0 if window is None else window.count
            surplus = counts[tier.name] - counts[tier.upstream]
            if surplus:
                _file_count_difference(case, row, tier, surplus)


def _file_count_difference(case: _Case, row: _Row, tier: TierReading, surplus: int) -> None:
    start_ms = row.window_start_ms
    causes = case.unread_causes(tier, start_ms)
    doubts = [f"part of tier {tier.name} could not be read: {cause}" for cause in causes]
    if surplus > 0:
        above = [upper for upper in case.tiers if upper.name == tier.upstream]
        for cause in sorted({cause for upper in above for cause in case.unread_causes(upper, start_ms)}):
            doubts.append(f"part of tier {tier.upstream} could not be read: {cause}")
    if not case.settled(row.window_start_ms):
        doubts.append("the window is still open")
    if case.stream.state != CLOSED and surplus > 0 and tier.upstream == PRODUCED:
        doubts.append("the producer may not have reported all")
    if surplus < 0 and tier.upstream != PRODUCED:
        upstream = case.seen[tier.upstream].get(row.window_start_ms)
        cells = [] if upstream is None else upstream.cells
        if any(_gap_over(cell, tier.gaps) for cell in cells):
            doubts.append(f"a gap before tier {tier.name}")
        if not all(_is_passed(cell, tier.passed.get(cell.place)) for cell in cells):
            doubts.append(f"in flight to tier {tier.name}")
    if doubts:
        row.undecided = True
        row.reasons.update(doubts)
    elif surplus < 0:
        row.missing_count[tier.hop] = -surplus
    else:
        row.extra_copies[tier.name] = surplus


def _own_row(case: _Case) -> WindowVerdict | None:
    """The stream's row beside its windows: holes in the reports, silence, no announcement."""
    stream, reasons = case.stream, list(case.stream.conflicts)
    unknown: Ranges = ()
    not_before_ms: int | None = None
    if stream.state == UNANNOUNCED:
        reasons.append("no stream event was read: a lost tail would not show")
    elif stream.state != CLOSED and not case.alive:
        reasons.append("the producer fell silent: what it sent after its last report is not known")
        not_before_ms = stream.no_earlier_than_ms
    if stream.sequenced:
        unknown = complement_ranges(case.reported | case.anywhere, _accountable(case))
    if unknown:
        reasons.append("no report covers these sequences")
        not_before_ms = None
    if not reasons:
        return None
    return WindowVerdict(
        topic=stream.topic,
        producer=stream.producer,
        stream=stream.stream,
        window_start_ms=None,
        window_ms=case.window_ms,
        state=WindowState.SETTLED,
        verdict=Verdict.UNKNOWN,
        unknown=unknown,
        not_before_ms=not_before_ms,
        reasons=tuple(reasons),
    )


def _accountable(case: _Case) -> int:
    """The last sequence that must be accounted for by now.

    A living stream answers for what it called settled, at once: it sends its counts before that word, and a
    stream that beats more often than the grace would never answer for a lost report otherwise. A dead one
    answers for everything.
    """
    stream = case.stream
    if not case.alive:
        known = case.reported | case.anywhere
        return max(stream.last_assigned, known.max() if known else 0)
    return stream.last_settled
