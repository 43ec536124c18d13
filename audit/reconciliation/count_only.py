"""The weaker verdict of a producer that cannot number its records: its counts agree, or not. Pure.

Called by `reconcile` for streams whose reports only count. Every tier is compared with its upstream: short
is a loss, over is a duplicate, by number and without names. A difference that may have another cause (a part
that could not be read, a gap, what is in flight, a window still open) is UNKNOWN with that cause.
"""

from __future__ import annotations

from millrace.audit.contract.events import CLOSED
from millrace.audit.reconciliation.stream_case import StreamCase, WindowFindings
from millrace.audit.reconciliation.tier_reading import TierReading
from millrace.audit.reconciliation.verdicts import PRODUCED

UNCOUNTED = "the reports tell of fewer records than the producer says they do"


def compare_counts(case: StreamCase, rows: dict[int, WindowFindings]) -> None:
    """COUNT MATCH, SHORT or OVER for every window, hop by hop."""
    for start_ms, row in rows.items():
        row.reasons.update(case.stream.distrusted)
        row.undecided = row.undecided or bool(case.stream.distrusted)
        if start_ms not in case.reports:
            row.doubt("no report tells of this window")
            continue
        counts = {PRODUCED: sum(report.count for report in case.reports[start_ms])}
        for tier in case.tiers:
            window = case.seen[tier.name].get(start_ms)
            counts[tier.name] = 0 if window is None else window.count
            surplus = counts[tier.name] - counts[tier.upstream]
            if tier.upstream == PRODUCED and surplus >= 0:
                unsure = sum(report.ambiguous_count for report in case.reports[start_ms])
                if surplus < unsure:
                    row.doubt(f"{unsure} records of unknown fate, of which {surplus} or more arrived")
                    continue
                surplus -= unsure
            if surplus:
                _file_difference(case, row, tier, surplus)


def _file_difference(case: StreamCase, row: WindowFindings, tier: TierReading, surplus: int) -> None:
    doubts = _doubts(case, row.window_start_ms, tier, surplus)
    if doubts:
        row.doubt(*doubts)
    elif surplus < 0:
        row.missing_count[tier.hop] = -surplus
    else:
        row.extra_copies[tier.name] = surplus


def _doubts(case: StreamCase, start_ms: int, tier: TierReading, surplus: int) -> list[str]:
    """Why the difference may be neither a loss nor a duplicate."""
    unread = {tier.name: case.unread_causes(tier, start_ms)}
    upper = case.upstream_of(tier)
    if upper is not None and surplus > 0:
        unread[upper.name] = case.unread_causes(upper, start_ms)
    doubts = [
        f"part of tier {name} could not be read: {cause}"
        for name, causes in unread.items()
        for cause in causes
    ]
    more_than_told = upper is None and surplus > 0 and case.stream.state != CLOSED
    if more_than_told or not case.settled(start_ms):
        doubts.append("the producer may not have reported all")
    if upper is None and surplus > 0 and case.uncounted:
        doubts.append(UNCOUNTED)
    if upper is not None and surplus < 0:
        upstream = case.seen[upper.name].get(start_ms)
        cells = [] if upstream is None else list(upstream.cells)
        if any(tier.gap_over(cell) for cell in cells):
            doubts.append(f"a gap before tier {tier.name}")
        if not all(tier.has_passed(cell) for cell in cells):
            doubts.append(tier.idle or f"in flight to tier {tier.name}")
    return doubts
