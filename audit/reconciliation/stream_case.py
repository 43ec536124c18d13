"""One stream's evidence, put together: what was reported, what each tier holds, what a window is found to be.

Built by `reconcile` once a stream; its rules, here and in `missing`, `count_only` and `content_check`, read a
`StreamCase` and write into `WindowFindings`. Pure.

A acknowledged, U ambiguous, F failed; S(t) seen in tier t or in any tier below it: who arrived in the
aggregate was in the source, even if retention took it from there since. P the numbers of windows whose
evidence is pruned, of which there were records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyroaring import BitMap64

from millrace.audit.contract.events import CLOSED, UNANNOUNCED, CountEvent, StreamFacts
from millrace.audit.contract.producer_names import name_doubts, names_in
from millrace.audit.contract.sequence_set import to_ranges
from millrace.audit.reconciliation.tier_reading import TierReading, UnreadRange
from millrace.audit.reconciliation.verdicts import PRODUCED, Hop, Ranges, Verdict, WindowState, WindowVerdict
from millrace.audit.scanning.cells import SeenByWindow, SeenSet

TOLD_TWICE = "one sequence is acknowledged in two windows: two producers use one stream id"


def union(sets: Iterable[BitMap64]) -> BitMap64:
    """All of them together, in a new set."""
    total = BitMap64()
    for sequences in sets:
        total |= sequences
    return total


def settled_until_ms(stream: StreamFacts, grace_ms: int, now_ms: int) -> float | None:
    """Nothing more can come into windows that end by then, as far as anybody promised; None where nobody has
    promised anything, infinity where the stream is over."""
    if stream.state == UNANNOUNCED:
        return None
    calm_ms = now_ms - grace_ms
    if stream.state == CLOSED or stream.lapsed(now_ms, grace_ms):
        return math.inf if stream.at_ms <= calm_ms else calm_ms
    return None if stream.no_earlier_than_ms is None else min(stream.no_earlier_than_ms, calm_ms)


@dataclass(slots=True)
class WindowFindings:
    """A window's findings while they are collected. `undecided`: whatever else is found, it is no proof."""

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
    content_checked: str = ""
    differing: dict[str, Ranges] = field(default_factory=dict)
    shared: tuple[int, int, int] | None = None

    def doubt(self, *reasons: str) -> None:
        """Nothing is proven here, for these reasons; what was found stands."""
        self.undecided = True
        self.reasons.update(reasons)

    def verdict(self, proven: Verdict) -> Verdict:
        if self.missing or self.missing_count or self.content_lost:
            return Verdict.LOSS
        if self.extra_copies:
            return Verdict.DUPLICATE
        if self.in_flight or self.explained or self.unknown or self.unreported or self.undecided:
            return Verdict.UNKNOWN
        return proven


class StreamCase:
    """One stream's facts and sightings, with the unions that several rules need."""

    def __init__(
        self,
        stream: StreamFacts,
        seen: Mapping[str, SeenByWindow],
        tiers: Sequence[TierReading],
        window_ms: int,
        grace_ms: int,
        now_ms: int,
    ):
        self.stream, self.tiers = stream, tiers
        self.window_ms, self.grace_ms, self.now_ms = window_ms, grace_ms, now_ms
        self.seen = _refile(seen, tiers, window_ms)
        self.reports: dict[int, list[CountEvent]] = {}
        told = list(stream.windows.values())
        for report in told:
            start_ms = report.window_start_ms - report.window_start_ms % window_ms
            self.reports.setdefault(start_ms, []).append(report)
        self.conflicts = list(stream.conflicts)
        self.conflicts += [each for each in self._doubtful_names() if each not in self.conflicts]
        self.acknowledged = BitMap64()
        for report in told:
            if not self.acknowledged.isdisjoint(report.acknowledged) and TOLD_TWICE not in self.conflicts:
                self.conflicts.append(TOLD_TWICE)
            self.acknowledged |= report.acknowledged
        self.accounted = stream.accounted
        self.reportable = self.acknowledged | union(report.ambiguous for report in told)
        self.reportable |= self.accounted
        self.reported = self.reportable | union(report.failed for report in told)
        self.arrived: dict[str, BitMap64] = {}
        for tier in reversed(tiers):
            below = [self.arrived[lower.name] for lower in tiers if lower.upstream == tier.name]
            own = (window.sequences for window in self.seen[tier.name].values())
            self.arrived[tier.name] = union([*below, *own])
        self.anywhere = union(self.arrived.values())
        self._settled_until_ms = settled_until_ms(stream, grace_ms, now_ms)
        self.alive = stream.state not in (CLOSED, UNANNOUNCED) and not stream.lapsed(now_ms, grace_ms)

    def _doubtful_names(self) -> list[str]:
        """What the records' headers say of their producer, against what the events say of it."""
        told = self.stream.producer
        kept: set[str] = set()
        for windows in self.seen.values():
            kept.update(*(each.producers for each in windows.values()))
        names = {name for each in kept - {"", told} for name in names_in(each)}
        return name_doubts(told, names) if names else []

    @property
    def uncounted(self) -> int:
        """How many records of a producer that only counts are in no report, though it said that they were.

        A living stream answers for what it called settled, a dead one for everything.
        """
        stream = self.stream
        told = sum(report.count + report.ambiguous_count for report in stream.windows.values())
        return max((stream.last_settled if self.alive else stream.last_assigned) - told, 0)

    def window_starts(self) -> set[int]:
        return set(self.reports).union(*self.seen.values())

    def members(self, start_ms: int) -> BitMap64:
        """Every sequence that a report or a tier files in this window."""
        filed = [report.acknowledged for report in self.reports.get(start_ms, ())]
        filed += [windows[start_ms].sequences for windows in self.seen.values() if start_ms in windows]
        return union(filed)

    def expected(self, tier: TierReading) -> BitMap64:
        """What the tier should hold: in the first one A, below it everything that its upstream had, so that a
        record is missing in one hop only, and an ambiguous or unreported one that was lost later is named."""
        return self.acknowledged if tier.upstream == PRODUCED else self.arrived[tier.upstream]

    def upstream_of(self, tier: TierReading) -> TierReading | None:
        """The tier above; None for the first one."""
        return next((upper for upper in self.tiers if upper.name == tier.upstream), None)

    def unread_causes(self, tier: TierReading, start_ms: int, *, cut_off: bool = True) -> list[str]:
        """Why the tier may have held records of this window that the audit never saw; of what is cut off for
        good (`UnreadRange.cut_off`) only where that is asked for.

        What was gone before the stream opened and before the window began held none of them: the opening may
        be told late, so it is not enough. A producer's clock and the auditor's are compared here: they may
        differ by the grace, and one that is further ahead of now is not believed.
        """
        opened_ms = self.stream.opened_at_ms
        if opened_ms is not None and opened_ms > self.now_ms + self.grace_ms:
            opened_ms = None
        since_ms = None if opened_ms is None else min(opened_ms, start_ms) - self.grace_ms
        # Who promises has given no creation times but those of its clock (`UnreadRange.by_window`).
        promised_ms = self.stream.no_earlier_than_ms
        if promised_ms is not None and promised_ms > self.now_ms + self.grace_ms:
            promised_ms = None
        by_clock_ms = None if promised_ms is None else min(promised_ms, start_ms) - self.grace_ms

        def may_hold(unread: UnreadRange) -> bool:
            until_ms = unread.until_ms
            if until_ms is None:
                return True
            if unread.by_window and by_clock_ms is not None and by_clock_ms > until_ms:
                return False
            return since_ms is None or since_ms <= until_ms

        return sorted(
            {each.cause for each in tier.unread if may_hold(each) and (cut_off or not each.cut_off)}
        )

    def settled(self, start_ms: int) -> bool:
        """Nothing more can come into this window, as far as anybody promised."""
        until_ms = self._settled_until_ms
        return until_ms is not None and start_ms + self.window_ms <= until_ms

    def _state(self, start_ms: int, verdict: Verdict) -> WindowState:
        is_over = self.now_ms >= start_ms + self.window_ms + self.grace_ms
        if self.settled(start_ms) or (is_over and verdict > Verdict.COUNT_MATCH):
            return WindowState.SETTLED
        return WindowState.OPEN

    def verdict(self, found: WindowFindings) -> WindowVerdict:
        """The window's row."""
        stream, start_ms = self.stream, found.window_start_ms
        reports = self.reports.get(start_ms, [])
        windows = {tier.name: self.seen[tier.name].get(start_ms) for tier in self.tiers}
        if self.conflicts:
            found.doubt(*self.conflicts)
        verdict = found.verdict(Verdict.PROVEN if stream.sequenced else Verdict.COUNT_MATCH)
        return WindowVerdict(
            topic=stream.topic,
            producer=stream.producer,
            stream=stream.stream,
            window_start_ms=start_ms,
            window_ms=self.window_ms,
            state=self._state(start_ms, verdict),
            verdict=verdict,
            published=sum(report.count for report in reports),
            ambiguous=sum(len(report.ambiguous) for report in reports),
            consumed={name: window.count if window else 0 for name, window in windows.items()},
            seen={name: _distinct_count(window) for name, window in windows.items()},
            missing=found.missing,
            duplicates=found.duplicates,
            extra_copies=found.extra_copies,
            in_flight=found.in_flight,
            unreported=found.unreported,
            unknown=to_ranges(found.unknown),
            explained={cause: to_ranges(found.explained[cause]) for cause in sorted(found.explained)},
            missing_count=found.missing_count,
            content_checked=found.content_checked,
            differing=found.differing,
            shared=found.shared,
            promised=self.settled(start_ms),
            reasons=tuple(sorted(found.reasons)),
        )


def _distinct_count(window: SeenSet | None) -> int:
    return 0 if window is None else len(window.sequences) + window.unsequenced_count


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
