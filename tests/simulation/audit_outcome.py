"""What a whole run should say beside its rows: watermarks, verdict, exit status and totals. Plain Python.

Made by the mutation run from what was expected of each row; knows nothing of the audit's code. The rules are
those of its design: a topic's watermark is the end of the longest prefix of windows of which every stream's
row is settled and proven, or settled and waived; it jumps no hole, goes beyond no promise of a stream that
may still write, into no window that is not over with its grace and into no doubt of a stream's own (whatever
windows are waived), and does not move forward while something that could belong to the topic could not be
trusted: what names no topic could to any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from tests.simulation.audit_expected import Told
from tests.simulation.audit_logs import GRACE_MS, LEASE_MS, WINDOW_MS

RANKING = ("PROVEN", "COUNT_MATCH", "UNKNOWN", "DUPLICATE", "LOSS")
PROVEN = RANKING[:2]


@dataclass(frozen=True, slots=True)
class RowSaid:
    """One row as it should be; `start_ms` None is the stream's own."""

    topic: str
    stream: str
    start_ms: int | None
    verdict: str
    state: str
    silent: bool = False
    not_before_ms: int | None = None
    missing: int = 0
    copies: int = 0
    doubtful: int = 0
    made_ms: int | None = None
    """when its verdict was made, where it is settled"""
    silent_from_ms: int | None = None
    differs: bool = False
    """in contents"""
    producer: str = ""
    """of the roster, where it is one's"""

    @property
    def is_telling(self) -> bool:
        """Settled, or a loss or duplicate wherever it is."""
        return self.state == "SETTLED" or self.verdict in ("LOSS", "DUPLICATE")


Sums = tuple[int, int, int, int, float]
"""(rank of the worst verdict, missing, extra copies, doubtful, in how many contents differ) of rows of one
window"""


def sums_of(rows: Iterable[RowSaid]) -> Sums:
    told = list(rows)
    return (
        max((RANKING.index(row.verdict) for row in told), default=0),
        sum(row.missing for row in told),
        sum(row.copies for row in told),
        sum(row.doubtful for row in told),
        sum(row.differs for row in told),
    )


def _ended_ms(told: Told, now_ms: int) -> int | None:
    """When a stream closed, or its lease ran out without a word; None for one that lives."""
    if told.state == "closed":
        return told.at_ms
    silent = told.state and now_ms > told.at_ms + LEASE_MS + GRACE_MS
    return told.at_ms + LEASE_MS if silent else None


def _speaks_for(told: Told, start_ms: int, now_ms: int) -> bool:
    if start_ms in told.reports:
        return True
    if not told.state:
        return False
    opened_ms = told.opened_ms
    if opened_ms is None:
        opened_ms = min([told.at_ms, *told.reports])
    began = start_ms + WINDOW_MS > opened_ms - GRACE_MS
    ended_ms = _ended_ms(told, now_ms)
    return began and (ended_ms is None or start_ms <= ended_ms + GRACE_MS)


@dataclass(slots=True)
class Outcome:
    """All rows of a run, and what they come to. `untrusted` counts by the summary's own words."""

    told: Mapping[str, Told]
    topic_of: Mapping[str, str]
    untrusted: Mapping[str, int]
    rows: list[RowSaid] = field(default_factory=list)
    waivers: Mapping[tuple[str, int], Sums] = field(default_factory=dict)
    """{(topic, window): what was said of it when it was waived}"""
    gone: list[RowSaid] = field(default_factory=list)
    """rows of windows that were pruned: nobody is told of them any more"""
    carried: list[RowSaid] = field(default_factory=list)
    """rows that were settled once, of which nothing is said now: who waives a window waives them, too"""
    older: set[RowSaid] = field(default_factory=set)
    """those of `rows` that decide no more"""
    now_ms: int = 0
    """when the run looked"""

    def waived(self) -> set[tuple[str, int]]:
        """Windows whose waiver stands: nothing that is told of them by now is worse, in any way."""
        return {
            target
            for target, given in self.waivers.items()
            if all(now <= then for now, then in zip(sums_of(self._telling(target)), given, strict=True))
        }

    def waivable(self) -> dict[tuple[str, int], Sums]:
        """Windows that a person may go on without, and what is settled of them."""
        targets = {(row.topic, row.start_ms) for row in self.rows if row.start_ms is not None}
        settled = {
            target: sums_of(
                row
                for row in [*self._telling(target), *self.carried]
                if row.state == "SETTLED" and (row.topic, row.start_ms) == target
            )
            for target in targets
        }
        found = {target: told for target, told in settled.items() if told[0] >= len(PROVEN)}
        for target, (rank, missing, *counts, differing) in found.items():
            if RANKING[rank] == "LOSS" and not missing and not differing:
                # Contents differed, in as many rows as nobody speaks of any more.
                found[target] = (rank, missing, *counts, inf)
        return found

    def _telling(self, target: tuple[str, int]) -> list[RowSaid]:
        told = [*self.rows, *self.gone]
        return [row for row in told if (row.topic, row.start_ms) == target and row.is_telling]

    def owed(self, topic: str, roster: Mapping[str, int], name_of: Mapping[str, str]) -> list[RowSaid]:
        """What producers of the roster {name: since when} leave unsaid: each must tell of every settled
        window that is not over when it is entered. A stream tells of those that it reported, and of all from
        its opening to its end, within the grace; of one that fell silent, its lease is the end."""
        rows = []
        windows = sorted(
            {row.start_ms for row in self.rows if row.topic == topic and row.state == "SETTLED"} - {None}
        )
        for name, since_ms in roster.items():
            told = [
                each
                for stream, each in self.told.items()
                if name_of.get(stream) == name and self.topic_of.get(stream) == topic
                if each.state or each.reports
            ]
            asked = [start_ms for start_ms in windows if start_ms + WINDOW_MS > since_ms]
            if not told:
                never = RowSaid(topic, "", None, "UNKNOWN", "SETTLED", producer=name)
                rows += [never] if asked or not since_ms else []
                continue
            ends = [_ended_ms(each, self.now_ms) for each in told]
            ended_ms = None if None in ends else max(ends)
            for start_ms in asked:
                if ended_ms is not None and start_ms >= ended_ms + GRACE_MS:
                    until_ms = max(ended_ms, since_ms)
                    row = RowSaid(topic, "", None, "UNKNOWN", "SETTLED", not_before_ms=until_ms)
                    rows.append(replace(row, producer=name))
                    break
                if not any(_speaks_for(each, start_ms, self.now_ms) for each in told):
                    rows.append(RowSaid(topic, "", start_ms, "UNKNOWN", "SETTLED", producer=name))
        return rows

    def verdict(self) -> str:
        """The worst of what is settled, and of losses and duplicates wherever they are."""
        return self._verdict(self.rows)

    def _verdict(self, rows: Iterable[RowSaid]) -> str:
        told = [row.verdict for row in rows if row.is_telling and row not in self.older]
        if self.untrusted or not any(row.state == "SETTLED" for row in self.rows if row not in self.older):
            told.append("UNKNOWN")
        return max(told, key=RANKING.index, default="PROVEN")

    def exit_status(self) -> int:
        """The same without what is waived."""
        waived = self.waived()
        rest = [row for row in self.rows if (row.topic, row.start_ms) not in waived]
        return {"PROVEN": 0, "COUNT_MATCH": 0, "UNKNOWN": 2}.get(self._verdict(rest), 1)

    def windows(self, *, older: bool = False) -> dict[str, int]:
        """{OPEN or verdict: how many windows}, of those that decide, or of those that are older."""
        return dict(
            Counter(
                row.verdict if row.state == "SETTLED" else "OPEN"
                for row in self.rows
                if row.start_ms is not None and (row in self.older) == older
            )
        )

    def watermark(self, topic: str, before_ms: int | None) -> int | None:
        """Of this topic, whose last one was told as `before_ms`."""
        found = self.proven_to(topic)
        if any(what.endswith(f", topic {topic}") or ", topic " not in what for what in self.untrusted):
            return None if found is None or before_ms is None else min(found, before_ms)
        return found

    def proven_to(self, topic: str) -> int | None:
        """The same, were all of it to be trusted."""
        rows = [row for row in self.rows if row.topic == topic]
        silent = {row.stream for row in rows if row.silent}
        bounds = [
            told.promise_ms
            for stream, told in self.told.items()
            if self.topic_of.get(stream) == topic and stream not in silent
            if told.state != "closed" and told.promise_ms is not None
        ]
        bounds += [
            -1 if row.not_before_ms is None else row.not_before_ms for row in rows if row.start_ms is None
        ]
        waived = {start_ms for name, start_ms in self.waived() if name == topic}
        good: dict[int, bool] = {}
        for row in rows:
            if row.start_ms is not None:
                passes = row.state == "SETTLED" and (row.verdict in PROVEN or row.start_ms in waived)
                good[row.start_ms] = good.get(row.start_ms, True) and passes
        for row in self.gone:
            if row.topic == topic and row.start_ms is not None:
                good.setdefault(row.start_ms, True)
        watermark = None
        for start_ms in sorted(good):
            end_ms = start_ms + WINDOW_MS
            is_over = end_ms + GRACE_MS <= self.now_ms
            if not good[start_ms] or not is_over or any(end_ms > bound for bound in bounds):
                break
            watermark = end_ms
        return watermark
