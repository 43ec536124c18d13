"""Comparison of contents: the same sequences must hold the same bytes at every tier. Pure.

Called by `reconcile` for numbered streams. Digests are sums over a window's records, so two tiers can be
compared only where both hold exactly the same set, each once; what cannot be compared is told, and proves
presence all the same. The definition of a record's digest is in `content_digest`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyroaring import BitMap64

from millrace.audit.contract.content_digest import digest_sum
from millrace.audit.contract.events import CountEvent
from millrace.audit.reconciliation.stream_case import StreamCase, WindowFindings, union
from millrace.audit.reconciliation.verdicts import COMPARED, DIFFERS, NOT_COMPARED, PRODUCED
from millrace.audit.scanning.cells import SeenSet


@dataclass(frozen=True, slots=True)
class _Digested:
    """A set of records and the sum of their digests."""

    sequences: BitMap64
    digest: int


def check_content(case: StreamCase, rows: dict[int, WindowFindings]) -> None:
    """Compare every tier with its upstream, window by window; name the hops between which content differs."""
    for start_ms, row in rows.items():
        digested = {PRODUCED: _of_reports(case.reports.get(start_ms, []))}
        windows = {tier.name: case.seen[tier.name].get(start_ms) for tier in case.tiers}
        digested.update({name: _of_window(window) for name, window in windows.items()})
        if all(each is None for each in digested.values()) and not _was_asked(windows.values()):
            continue
        row.content_checked = COMPARED
        differs = False
        for tier in case.tiers:
            window = windows[tier.name]
            if window is None or not window.count:
                continue
            above, here = digested[tier.upstream], digested[tier.name]
            if above is None or here is None or above.sequences != here.sequences:
                row.content_checked = NOT_COMPARED
            elif above.digest != here.digest:
                differs = True
                row.reasons.add(f"content differs between {tier.upstream} and {tier.name}")
        if differs:
            row.content_checked = DIFFERS
            row.content_lost = True


def _was_asked(windows: object) -> bool:
    """Whether some tier was read with digests, even where repeats make its sum useless."""
    return any(window is not None and window.digest is not None and window.count for window in windows)  # type: ignore[attr-defined]


def _of_reports(reports: list[CountEvent]) -> _Digested | None:
    digests = [report.digest for report in reports if report.digest is not None]
    if not reports or len(digests) != len(reports):
        return None
    return _Digested(union(report.acknowledged for report in reports), digest_sum(digests))


def _of_window(window: SeenSet | None) -> _Digested | None:
    if window is None or window.digest is None or not window.count:
        return None
    if window.repeats or window.unsequenced_count:
        return None
    return _Digested(window.sequences, window.digest)
