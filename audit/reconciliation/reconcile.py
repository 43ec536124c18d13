"""Reconciliation of one stream by sets: what was acknowledged against what each tier saw. Pure.

Called by the job, once for each stream that has events or cells; by `audit explain`; by the mutation test,
whose known truth its rows must equal. The order of everything given does not matter, and nothing is netted:
a loss never cancels a duplicate. What the job must supply, and in which order it must read it, is told in
`tier_reading`; the sets that the rules speak of are put together in `stream_case`.

- expected in the first tier: A. Expected in a tier with an upstream tier: S(upstream), so that a record is
  missing in one hop only, and an ambiguous or unreported one that was lost later is named as well;
- missing = expected - S(t) - P: lost, in flight, explained by a gap, or unknown where the tier could not be
  read (`missing`); what became of the numbers of pruned windows was told when they were pruned;
- unreported = S - (A + U + P): also what the producer called failed, and what is there all the same;
- every sequence up to the last one assigned must be in A + U + F + P, or seen, or still pending in a living
  stream;
  what is not is a hole in the reports, UNKNOWN, in the stream's own row because its window is not known
  either;
- a record lies in one window, in its producer's report and at every tier; where it does not, its identity was
  changed on the way, and no window is proven that has a number of another one;
- a producer that does not number its records is judged by its counts (`count_only`);
- contents are compared where digests are given (`content_check`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pyroaring import BitMap64

from millrace.audit.contract.events import CLOSED, UNANNOUNCED, StreamFacts
from millrace.audit.contract.sequence_set import complement_ranges, to_ranges
from millrace.audit.reconciliation.content_check import check_content
from millrace.audit.reconciliation.count_only import UNCOUNTED, compare_counts
from millrace.audit.reconciliation.missing import file_missing
from millrace.audit.reconciliation.stream_case import StreamCase, WindowFindings, union
from millrace.audit.reconciliation.tier_reading import (
    ClusterPartition,
    Gap,
    Passage,
    TierReading,
    UnreadRange,
    check_order,
    passage_by_arrivals,
)
from millrace.audit.reconciliation.verdicts import (
    FELL_SILENT,
    PRODUCED,
    Ranges,
    Verdict,
    WindowState,
    WindowVerdict,
)
from millrace.audit.scanning.cells import SeenByWindow, SeenSet
from millrace.audit.scanning.repeats import Repeats

NOT_COVERED = "no report covers these sequences"
TOO_LARGE_TO_TELL = "a report was too large for the events topic: its counts were never told"
IN_BOTH = "has a sequence of this window in another one as well"
MOVED = "has records of this window in another one: their time was changed"
PRUNED_BEFORE = "a record came late that has the number of one in a window whose evidence is pruned (keep)"
UNTOLD = "no stream event was read: a lost tail would not show"
OF_STREAM = frozenset({UNTOLD, FELL_SILENT, UNCOUNTED, NOT_COVERED, TOO_LARGE_TO_TELL})
"""What is said of a stream as a whole and is no contradiction: its windows may be proven all the same."""

__all__ = [
    "ClusterPartition",
    "Gap",
    "Passage",
    "TierReading",
    "UnreadRange",
    "passage_by_arrivals",
    "reconcile_stream",
]


def reconcile_stream(
    stream: StreamFacts,
    seen: Mapping[str, SeenByWindow],
    tiers: Sequence[TierReading],
    *,
    window_ms: int,
    grace_ms: int,
    now_ms: int,
    content: bool = False,
) -> list[WindowVerdict]:
    """One row per window, ascending, then the stream's own row (window_start_ms None) where it has one.

    `tiers` are in order, a tier after its upstream; tiers of `seen` that it does not name are not looked at.
    `window_ms` is the audit's window. A producer that reports in windows of another length is reconciled in
    the shortest window that both lengths divide. With `content` nothing is proven whose contents were not
    compared. Raises ValueError for tiers in a wrong order.
    """
    check_order(tiers)
    common_ms = math.lcm(window_ms, *stream.windows.lengths())
    case = StreamCase(stream, seen, tiers, common_ms, grace_ms, now_ms)
    rows = {start_ms: WindowFindings(start_ms) for start_ms in case.window_starts()}
    if stream.sequenced:
        file_missing(case, rows)
        _file_duplicates(case, rows)
        _file_unreported(case, rows)
        _file_unnumbered(case, rows)
        _file_moved(case, rows)
    else:
        compare_counts(case, rows)
    check_content(case, rows, asked=content)
    verdicts = [case.verdict(rows[start_ms]) for start_ms in sorted(rows)]
    own = _own_row(case)
    return verdicts if own is None else [*verdicts, own]


def _file_duplicates(case: StreamCase, rows: dict[int, WindowFindings]) -> None:
    """Name extra copies at the first tier that has them; what the upstream had already is not named again."""
    extra = {PRODUCED: Repeats()}
    for tier in case.tiers:
        windows = case.seen[tier.name]
        filed = _extra_copies(windows)
        extra[tier.name] = Repeats()
        for copies in filed.values():
            extra[tier.name].add_all(copies)
        is_of_several = _is_of_several_topics(tier, windows)
        above = extra[tier.upstream]
        for start_ms, copies in filed.items():
            new = copies.beyond(above)
            surplus = _loose_surplus(windows.get(start_ms), copies, above)
            gone = {"recreated", "truncated"}.intersection(case.unread_causes(tier, start_ms))
            if is_of_several:  # whatever a producer's clock says of when it wrote
                gone.add("recreated")
            if gone and (new or surplus):
                certain = Repeats()
                if gone == {"recreated"}:
                    certain = _copies_in_one_topic(windows.get(start_ms)).beyond(above).within(new.sequences)
                if certain != new or surplus:
                    rows[start_ms].doubt(
                        f"tier {tier.name} was {min(gone)}: a copy may lie in the log that is gone"
                    )
                new, surplus = certain, 0
            if new:
                rows[start_ms].duplicates[tier.name] = to_ranges(new.sequences)
            if surplus and not new:
                rows[start_ms].reasons.add(f"which records came once more in {tier.name}, nothing tells")
            if new or surplus:
                rows[start_ms].extra_copies[tier.name] = new.total + surplus


def _is_of_several_topics(tier: TierReading, windows: SeenByWindow) -> bool:
    """Whether a topic was made anew in which the stream has records, and it has some of another id, too."""
    if not any(unread.cause == "recreated" for unread in tier.unread):
        return False
    topics = {(cell.cluster, cell.topic_id) for window in windows.values() for cell in window.cells}
    return len(topics) > len({cluster for cluster, _ in topics})


def _copies_in_one_topic(window: SeenSet | None) -> Repeats:
    """Extra copies beside one in the very same topic; of topics of one name, each by its id."""
    by_topic: dict[tuple[str, str], SeenSet] = {}
    for cell in () if window is None else window.cells:
        by_topic.setdefault((cell.cluster, cell.topic_id), SeenSet()).add(cell)
    found = Repeats()
    for each in by_topic.values():
        found.add_all(each.repeats)
    return found


def _loose_surplus(window: SeenSet | None, copies: Repeats, above: Repeats) -> int:
    """How many of a window's loose copies the upstream cannot have had already, however they are shared out:
    what it had is not laid to this tier."""
    if window is None or not window.loose_copies:
        return 0
    room = above.within(window.loose).beyond(copies)
    return max(window.loose_copies - room.total, 0)


def _extra_copies(windows: SeenByWindow) -> dict[int, Repeats]:
    """By window; a sequence that is filed in two windows is a repeat in the later one."""
    filed = {
        start_ms: window.repeats.copy()
        for start_ms, window in windows.items()
        if window.repeats or window.loose_copies
    }
    before = BitMap64()
    for start_ms in sorted(windows):
        sequences = windows[start_ms].sequences
        if not before.isdisjoint(sequences):
            filed.setdefault(start_ms, Repeats()).add(before & sequences)
        before |= sequences
    return filed


def _file_unreported(case: StreamCase, rows: dict[int, WindowFindings]) -> None:
    """What is there although no report says that it may be."""
    unreported = case.anywhere - case.reportable
    if not unreported:
        return
    denied = unreported & case.reported
    untold = {start_ms - start_ms % case.window_ms for start_ms in case.stream.untold}
    for start_ms, row in rows.items():
        members = case.members(start_ms) & unreported
        row.unreported = to_ranges(members)
        if members and start_ms in untold:
            row.reasons.add(TOO_LARGE_TO_TELL)
        if not members.isdisjoint(denied):
            row.reasons.add("records are there that the producer reported as never sent")


def _file_unnumbered(case: StreamCase, rows: dict[int, WindowFindings]) -> None:
    """Records without numbers, and no report that says so: sets cannot tell of them, so nothing is proven."""
    for windows in case.seen.values():
        for start_ms, window in windows.items():
            if window.unsequenced_count:
                rows[start_ms].doubt("records without numbers that no report tells of")


def _file_moved(case: StreamCase, rows: dict[int, WindowFindings]) -> None:
    """Numbers that are filed in two windows, by a report or any tier: the time in a record's identity was
    changed, or two records have one number and one of them is gone. Which window has the record nobody can
    tell, so nothing is proven of either. What retention took from the tiers between makes no difference.

    The same goes for a number of a window whose evidence is pruned."""
    filed = {start_ms: case.members(start_ms) for start_ms in sorted(rows)}
    if case.accounted:
        for start_ms, numbers in filed.items():
            if not numbers.isdisjoint(case.accounted):
                rows[start_ms].doubt(PRUNED_BEFORE)
                numbers -= case.accounted
    twice = _in_several_windows(filed.values())
    if not twice:
        return
    shared = {start_ms: numbers & twice for start_ms, numbers in filed.items()}
    shared = {start_ms: numbers for start_ms, numbers in shared.items() if numbers}
    for start_ms, together in _sharing(shared):
        rows[start_ms].shared = together
    told = _where_moved(case, shared, twice)
    for start_ms in shared:
        rows[start_ms].doubt(*told.get(start_ms, ()))


def _sharing(shared: Mapping[int, BitMap64]) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """(window, (first, last, count) of the windows that go with it). `shared` are their numbers, ascending;
    they are cut wherever no number lies on both sides."""
    ends: dict[int, BitMap64] = {}
    later = BitMap64()
    for start_ms in reversed(list(shared)):
        ends[start_ms] = shared[start_ms] - later
        later |= shared[start_ms]
    pending, stretch = BitMap64(), list[int]()
    for start_ms, numbers in shared.items():
        stretch.append(start_ms)
        pending |= numbers
        pending -= ends[start_ms]
        if not pending:
            for each in stretch:
                yield each, (stretch[0], start_ms, len(stretch))
            stretch = []


def _where_moved(case: StreamCase, shared: Mapping[int, BitMap64], twice: BitMap64) -> dict[int, list[str]]:
    """By window: which tiers file its numbers in two windows, or in another one than their upstream; where
    that lacks them, every tier that has them."""
    reasons: dict[int, list[str]] = {}
    holders: dict[int, list[str]] = {}
    nothing = BitMap64()
    reported = {
        start_ms: union(report.acknowledged for report in case.reports.get(start_ms, ())) & twice
        for start_ms in shared
    }
    filed = {PRODUCED: reported}
    for tier in case.tiers:
        windows = case.seen[tier.name]
        filed[tier.name] = {each: windows[each].sequences & twice for each in shared if each in windows}
        here, above = filed[tier.name], filed[tier.upstream]
        all_here, all_above = union(here.values()), union(above.values())
        in_both = _in_several_windows(here.values())
        for start_ms, numbers in shared.items():
            mine, theirs = here.get(start_ms, nothing), above.get(start_ms, nothing)
            if not mine.isdisjoint(in_both):
                reasons.setdefault(start_ms, []).append(f"tier {tier.name} {IN_BOTH}")
            if not ((theirs - mine).isdisjoint(all_here) and (mine - theirs).isdisjoint(all_above)):
                reasons.setdefault(start_ms, []).append(f"tier {tier.name} {MOVED}")
            if not numbers.isdisjoint(all_here):
                holders.setdefault(start_ms, []).append(f"tier {tier.name} {MOVED}")
    return holders | reasons


def _in_several_windows(windows: Iterable[BitMap64]) -> BitMap64:
    before, found = BitMap64(), BitMap64()
    for sequences in windows:
        if not before.isdisjoint(sequences):
            found |= before & sequences
        before |= sequences
    return found


def _own_row(case: StreamCase) -> WindowVerdict | None:
    """The stream's row beside its windows: holes in the reports, silence, no announcement."""
    stream, reasons = case.stream, list(case.conflicts)
    unknown: Ranges = ()
    not_before_ms: int | None = None
    silent_from_ms: int | None = None
    if stream.state == UNANNOUNCED:
        reasons.append(UNTOLD)
    elif stream.state != CLOSED and not case.alive:
        reasons.append(FELL_SILENT)
        not_before_ms, silent_from_ms = stream.no_earlier_than_ms, stream.at_ms
    if stream.sequenced:
        unknown = complement_ranges(case.reported | case.anywhere, _accountable(case))
    elif case.uncounted:
        reasons.append(UNCOUNTED)
    if unknown:
        reasons.append(TOO_LARGE_TO_TELL if stream.untold else NOT_COVERED)
    if unknown or case.conflicts or (case.uncounted and not stream.sequenced):
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
        silent_from_ms=silent_from_ms,
        reasons=tuple(reasons),
    )


def _accountable(case: StreamCase) -> int:
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
