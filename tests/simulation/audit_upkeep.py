"""What an audit that lets evidence go and looks back for so long only may say of a world. Plain Python.

`Upkeep` goes with the mutation run from look to look and knows nothing of the audit's code. The rules:

- a window is pruned only when all that is said of it is settled, and proven or waived, for as long as `keep`;
  from then on no row speaks of it. Nothing else that is said changes: no other row, and not the watermark.
  So windows that have a number of one stream in common go together. Of one of which nothing is said any more
  (a log was shortened, and what was read again each time is gone) counts what was said last.
- What comes later for it is told as what could not be trusted, to the record: copies by tier, and each report
  that tells of a sequence which was not accounted for: by a report, or as one that no report told of in a
  window that was waived. No row is made of it.
- A finding decides until it was told, as it is, for as long as the horizon reaches back, and its window has
  been over for as long; a silence, once its producer was last heard of that long ago.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tests.simulation.audit_case import Case
from tests.simulation.audit_expected import Expected, Told
from tests.simulation.audit_logs import WINDOW_MS
from tests.simulation.audit_oracle import Oracle, Shown
from tests.simulation.audit_outcome import PROVEN, RowSaid

Made = Mapping[tuple[str, str, int | None, str], int | None]
"""{(topic, stream, window, producer): when its verdict was made}"""

LATE = "records for windows whose evidence was pruned (keep)"
LATE_REPORT = "a report for a window whose evidence was pruned (keep)"


def _place(each: Shown) -> tuple[object, ...]:
    return each.cluster, each.name, each.partition, each.topic_id, each.offset, each.life


@dataclass(slots=True)
class Upkeep:
    """What is pruned, and what was said when, by the runs that were kept."""

    keep_ms: int | None = None
    windows: dict[str, set[int]] = field(default_factory=dict)
    """by stream"""
    gone: list[RowSaid] = field(default_factory=list)
    """their rows, as they were last"""
    counted: set[tuple[object, ...]] = field(default_factory=set)
    """places of the copies whose evidence went"""
    accounted: dict[str, set[int]] = field(default_factory=dict)
    """sequences of a stream's reports that are known for pruned windows"""
    late_reports: Counter[str] = field(default_factory=Counter)
    said: dict[tuple[str, int | None], tuple[str, int]] = field(default_factory=dict)
    """{(stream, window): (what its settled row said last, when that was made)}"""
    settled: dict[tuple[str, int | None], RowSaid] = field(default_factory=dict)
    """the rows themselves"""

    def remaining(self, stream: str, expected: Mapping[int | None, Expected]) -> dict[int | None, Expected]:
        pruned = self.windows.get(stream, ())
        return {start_ms: each for start_ms, each in expected.items() if start_ms not in pruned}

    def carried(self, rows: Iterable[RowSaid]) -> list[RowSaid]:
        """What was said last of windows that are not pruned and have no row now."""
        now = {(row.stream, row.start_ms) for row in rows}
        return [
            replace(row, differs=False)  # what is left of it tells nothing of contents
            for (stream, start_ms), row in self.settled.items()
            if (stream, start_ms) not in now and start_ms not in self.windows.get(stream, ())
        ]

    def late_copies(self, oracle: Oracle) -> list[Shown]:
        return [
            each
            for each in oracle.shown
            if each.rec.window in self.windows.get(each.rec.stream, ()) and _place(each) not in self.counted
        ]

    def untrusted(
        self, oracle: Oracle, told: Mapping[str, Told], topic_of: Mapping[str, str], *, dies: bool
    ) -> Counter[str]:
        """What came for pruned windows, as the summary counts it."""
        found = Counter(
            f"{LATE}, in {each.cluster}" + (f", topic {topic_of[stream]}" if stream in told else "")
            for each in self.late_copies(oracle)
            for stream in [each.rec.stream]
        )
        reports, accounted = Counter(self.late_reports), {}
        for stream, windows in self.windows.items():
            known = set(self.accounted.get(stream, ()))
            for start_ms in sorted(windows & set(told[stream].reports)) if stream in told else ():
                report = told[stream].reports[start_ms]
                sequences = {*report.acknowledged, *report.ambiguous, *report.failed}
                reports[f"{LATE_REPORT}, topic {topic_of[stream]}"] += not sequences <= known
                known |= sequences
            accounted[stream] = known
        if not dies:
            self.late_reports, self.accounted = +reports, accounted
        return found + reports

    def check_made(self, row: RowSaid, each: Expected, now_ms: int, *, dies: bool) -> None:
        """A verdict is as old as what it says, however often it was said since."""
        if row.state != "SETTLED":
            assert row.made_ms is None, "an open row was made"
            return
        assert row.made_ms is not None, "a settled row was never made"
        told = "" if each.approximate else _told_of(row, each)
        before = self.said.get((row.stream, row.start_ms))
        if before is not None and "" in (before[0], told):
            pass  # all that is laid down of such a row are bounds
        elif before is None or before[0] != told:
            assert row.made_ms == now_ms, f"made at {row.made_ms} and not now, though it was {before}"
        else:
            assert row.made_ms in (before[1], now_ms), f"made at {row.made_ms}, {before[1]} before"
        if not dies:
            self.said[row.stream, row.start_ms] = (told, row.made_ms)
            self.settled[row.stream, row.start_ms] = row

    def prune(
        self,
        going: Iterable[tuple[str, int]],
        rows: Iterable[RowSaid],
        waived: set[tuple[str, int]],
        oracle: Oracle,
        told: Mapping[str, Told],
        now_ms: int,
    ) -> None:
        """The run let these go: each must be done with, and so must its topic's whole window."""
        by_window: dict[tuple[str, int], list[RowSaid]] = {}
        for row in rows:
            if row.start_ms is not None:
                by_window.setdefault((row.topic, row.start_ms), []).append(row)
        kept = {_place(each) for each in oracle.kept}
        going, late = list(going), set(self.late_copies(oracle))
        for stream in {stream for stream, _ in going}:
            left = self.windows.get(stream, set())
            case = Case(oracle, told.get(stream, Told(stream)), late)
            for start_ms, each in case.rows().items():
                if (stream, start_ms) in going:  # it was waived with what no report told of
                    self.accounted.setdefault(stream, set()).update(each.unreported)
            for number, windows in case.windows_of().items():
                apart = {(stream, start_ms) in going for start_ms in windows - left}
                assert len(apart) < 2, (
                    f"{number} of {stream} is in {sorted(windows)}: some of them are pruned"
                )
        for stream, start_ms in going:
            now = [each for each in rows if (each.stream, each.start_ms) == (stream, start_ms)]
            row = now[0] if now else self.settled[stream, start_ms]
            for each in {row, *by_window.get((row.topic, start_ms), ())}:
                good = each.verdict in PROVEN or (row.topic, start_ms) in waived
                assert each.state == "SETTLED" and good, f"{row} is pruned, beside {each}"
                is_old = each.made_ms is not None and now_ms - each.made_ms >= (self.keep_ms or 0)
                assert is_old, f"{row} is pruned, and {each} was made just now"
            copies = [
                each for each in oracle.shown if (each.rec.stream, each.rec.window) == (stream, start_ms)
            ]
            assert all(_place(each) in kept for each in copies), f"{row} is pruned, and read again"
            self.counted.update(map(_place, copies))
            self.windows.setdefault(stream, set()).add(start_ms)
            self.gone.append(replace(row, made_ms=None, differs=False))
            report = told[stream].reports.get(start_ms) if stream in told else None
            if report is not None:
                sequences = {*report.acknowledged, *report.ambiguous, *report.failed}
                self.accounted.setdefault(stream, set()).update(sequences)


def _told_of(row: RowSaid, each: Expected) -> str:
    sets = (each.lost, each.in_flight, each.doubled, each.unreported, each.unknown, each.explained)
    counts = (each.published, each.ambiguous, each.consumed, each.extra, each.lost_count)
    return repr([row.verdict, [_plain(part) for part in (*sets, *counts)]])


def _plain(part: object) -> object:
    if isinstance(part, Mapping):
        return sorted((str(name), _plain(value)) for name, value in part.items())
    return sorted(part) if isinstance(part, set) else part


def is_older(row: RowSaid, since_ms: int | None) -> bool:
    """Whether it was told for so long that it decides no more."""
    finding = row.state == "SETTLED" and row.verdict not in PROVEN
    if since_ms is None or not finding or row.made_ms is None or row.made_ms >= since_ms:
        return False
    if row.start_ms is not None:
        return row.start_ms + WINDOW_MS <= since_ms
    begun_ms = (row.not_before_ms, row.silent_from_ms)
    return bool(row.stream) and all(at_ms is None or at_ms < since_ms for at_ms in begun_ms)
