"""What still holds a topic's watermark after a waiver was given, by the last run's report and state.

Called by `millrace audit waive`; no cluster is asked. The rule is that of the runs (`completeness_of`,
`Doubts.held`), asked again of what the last run told, with the waivers that there are by now:

- windows that are open, or neither proven nor waived, and streams in doubt as a whole: the report's rows;
- what living streams have promised: the facts that the state keeps;
- what could not be trusted: the summary's `untrusted` (`holds`; a report of an older program names none).

It speaks of that run alone: what the next one finds may move the watermark either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.audit.config import AuditConfig
from millrace.audit.contract.events import EventLedger, StreamFacts
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.keeping.untrusted_waivers import read_accepted, standing_accepted, told_untrusted
from millrace.audit.keeping.verdict_files import read_spans, resting_spans
from millrace.audit.keeping.waivers import (
    Standing,
    Target,
    pruned_beside,
    read_waivers,
    standing_waivers,
    target_of,
)
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA, iso_time
from millrace.audit.reconciliation.verdicts import WindowState, WindowVerdict
from millrace.audit.reconciliation.watermark import Completeness
from millrace.audit.report.folder import read_told
from millrace.audit.report.place import report_at
from millrace.audit.report.text import sentence_text, visible
from millrace.audit.runs import fact_rows
from millrace.audit.runs.reconciling import by_audited_topic
from millrace.audit.runs.untrusted import Doubt, Doubts
from millrace.audit.runs.watermarks import completeness_of
from millrace.broker.errors import MillraceError
from millrace.broker.times import time_ms

ROWS_FILE, SUMMARY_FILE = "reconciliation.parquet", "summary.json"
MOST_NAMED = 3  # streams, and kinds of what could not be trusted
MOST_TOPICS = 5


def still_held(config: AuditConfig, state: StateFolder, target: Target) -> list[str]:
    """Sentences on what still holds the watermark of the topic back from the window that was waived, or where
    it is when a stream was; none when nothing does, as far as the last run tells."""
    return _told(config, state, [target[0]], target)


def still_held_topics(config: AuditConfig, state: StateFolder, covered: Collection[str]) -> list[str]:
    """The same of the topics that things held which could not be trusted and are `covered` now."""
    try:
        with report_at(config.report, config.spark).reading((SUMMARY_FILE,)) as folder:
            summary = read_told(folder, SUMMARY_FILE)
    except (MillraceError, OSError) as problem:
        return [_not_known(str(problem))]
    told = [each.get("holds", ()) for each in summary.get("untrusted", ()) if each["what"] in covered]
    topics = [topic for topic in config.topics if any(topic in each for each in told)]
    return _told(config, state, topics) if topics else []


def _told(
    config: AuditConfig, state: StateFolder, topics: Sequence[str], target: Target | None = None
) -> list[str]:
    try:
        with report_at(config.report, config.spark).reading((ROWS_FILE, SUMMARY_FILE)) as folder:
            if not (folder / ROWS_FILE).exists():
                return [_not_known(f"there is no report in {config.report}")]
            run = _LastRun.read(config, state, folder, topics)
            held = [lines for topic in topics if (lines := run.held(topic, target))]
    except (MillraceError, OSError, pa.ArrowException) as problem:
        return [_not_known(" ".join(str(problem).split())[:200])]
    more = [f"and the watermarks of {len(held) - MOST_TOPICS} more topics"] if len(held) > MOST_TOPICS else []
    return [line for lines in held[:MOST_TOPICS] for line in lines] + more


def _not_known(why: str) -> str:
    return f"what else may hold the watermark cannot be told: {why}"


@dataclass(frozen=True, slots=True)
class _LastRun:
    """What the last run told of some topics, as the waivers of now let it be read."""

    at: str
    grace_ms: int
    window_ms: int
    before: Mapping[str, int]
    rows: ReportRows
    waivers: Sequence[Standing]
    found: Mapping[str, Completeness]
    doubts: Doubts

    @classmethod
    def read(cls, config: AuditConfig, state: StateFolder, report: Path, topics: Sequence[str]) -> _LastRun:
        """Raises StateDamaged, OSError, ArrowException."""
        summary, latest = read_told(report, SUMMARY_FILE), state.latest()
        rows = ReportRows(report / ROWS_FILE, topics)
        pruned = pruned_beside(state, latest, summary.get("at"))
        waivers = [each for each in read_waivers(state) if each.topic in topics]
        standing = standing_waivers(waivers, rows, pruned)
        at_ms = time_ms(summary["at"]) if summary.get("at") else latest.at_ms
        return cls(
            summary.get("at") or "",
            config.grace_ms,
            config.window_ms,
            latest.watermarks,
            rows,
            standing,
            completeness_of(
                rows,
                pruned,
                _streams(config, state, latest),
                [each.waiver for each in standing if each.stands],
                topics,
                over_ms=at_ms - config.grace_ms,
                spans=pa.concat_tables(
                    [
                        read_spans(state, latest.verdicts, topics),
                        resting_spans(state, latest.resting, topics),
                    ]
                ),
            ),
            _doubts(state, latest, summary),
        )

    def held(self, topic: str, target: Target | None) -> list[str]:
        """The sentences of a topic; none when its watermark passes the target, or moves on."""
        found, doubts = self.found[topic], self._doubts_of(topic)
        until_ms = self.doubts.held({topic: found.watermark_ms}, self.before)[topic]
        start_ms = target[1] if target is not None and isinstance(target[1], int) else None
        if start_ms is not None:
            end_ms = start_ms + self._length_ms(start_ms)
            if until_ms is not None and until_ms >= end_ms:
                return []
            before = found.until(end_ms)
            found = before if before.is_held or doubts else found
        elif until_ms is not None and until_ms > self.before.get(topic, -1):
            return []
        lines = [*self._lapsed(target), *self._windows(found), *_streams_in_doubt(found), *_promise(found)]
        lines += _untrusted(doubts)
        if not lines:
            return []
        where = "does not move on" if start_ms is None else f"does not pass {iso_time(start_ms)}"
        run = f"the run of {self.at}" if self.at else "the last run"
        head = f"the watermark of {visible(topic)} {where} yet; by {run} it is held by"
        return [head, *(f"  {line}" for line in lines)]

    def _doubts_of(self, topic: str) -> list[Doubt]:
        return [each for each in self.doubts.holding() if each.topic == topic]

    def _length_ms(self, start_ms: int) -> int:
        lengths = [
            pc.max(part.filter(pc.equal(part["window_start_ms"], start_ms))["window_ms"]).as_py()
            for part in self.rows.parts(["window_start_ms", "window_ms"])
        ]
        return max((each for each in lengths if each is not None), default=self.window_ms)

    def _lapsed(self, target: Target | None) -> Iterator[str]:
        if any(target_of(each.waiver) == target and not each.stands for each in self.waivers):
            yield "itself: the report has more wrong in it than the waiver is for"

    def _windows(self, found: Completeness) -> Iterator[str]:
        settled = {at: row for at, row in found.windows.items() if row.state is WindowState.SETTLED}
        if settled:
            words = Counter(str(row.verdict) for row in settled.values())
            told = ", ".join(f"{words[word]:,} {word}" for word in sorted(words))
            one = str(settled[min(settled)].verdict)
            yield f"{_counted(settled)} neither proven nor waived: {one if len(settled) == 1 else told}"
        open_ones = {at: row for at, row in found.windows.items() if row.state is not WindowState.SETTLED}
        if open_ones:
            first = "" if len(open_ones) == 1 else "the first "
            yield f"{_counted(open_ones)} still open, {first}{self._open_until(open_ones[min(open_ones)])}"

    def _open_until(self, row: WindowVerdict) -> str:
        over_ms = (row.window_start_ms or 0) + row.window_ms + self.grace_ms
        if self.at and over_ms <= time_ms(self.at):
            return "though over: not every producer has promised that it is complete"
        return f"until {iso_time(over_ms)} with its grace"


def _counted(windows: Mapping[int, WindowVerdict]) -> str:
    first = iso_time(min(windows))
    return f"window {first}," if len(windows) == 1 else f"{len(windows):,} windows, the first {first},"


def _streams_in_doubt(found: Completeness) -> Iterator[str]:
    doubts = sorted(found.doubts, key=lambda row: (row.not_before_ms or -1, row.producer, row.stream))
    for row in doubts[:MOST_NAMED]:
        since = "as a whole" if row.not_before_ms is None else f"from {iso_time(row.not_before_ms)} on"
        why = f": {sentence_text(row.reasons[0])}" if row.reasons else ""
        yield f"{_named(row.stream, row.producer)}, in doubt {since}{why}"
    if len(doubts) > MOST_NAMED:
        yield f"{len(doubts) - MOST_NAMED:,} more streams that are in doubt"


def _promise(found: Completeness) -> Iterator[str]:
    if found.promise is not None:
        told = iso_time(found.promise.no_earlier_than_ms)
        yield f"{_named(found.promise.stream, found.promise.producer)}, which may still write from {told} on"


def _named(stream: str, producer: str) -> str:
    return f"stream {stream} of {visible(producer)}" if stream else f"producer {visible(producer)}"


def _untrusted(doubts: Sequence[Doubt]) -> Iterator[str]:
    for each in doubts[:MOST_NAMED]:
        yield f"what could not be trusted: {sentence_text(each.what)} ({each.count:,})"
    if len(doubts) > MOST_NAMED:
        yield f"{len(doubts) - MOST_NAMED:,} more kinds that could not be trusted"


def _doubts(state: StateFolder, latest: Commit, summary: Mapping[str, Any]) -> Doubts:
    """What the last run could not trust, once for each topic that it holds."""
    told = summary.get("untrusted", ())
    counts = told_untrusted(latest, {each["what"]: each["count"] for each in told})
    found = [
        Doubt(each["what"], counts[each["what"]], topic) for each in told for topic in each.get("holds", ())
    ]
    return Doubts(found, standing_accepted(read_accepted(state), counts))


def _streams(config: AuditConfig, state: StateFolder, latest: Commit) -> list[StreamFacts]:
    """What the state keeps of streams, without their reports: promises are asked for."""
    ledger = EventLedger()
    if not latest.events:
        return []
    facts = state.read_table(latest.events)
    wanted = [name for name in facts.column_names if name not in ("reports", "tiers")]
    origins, _ = fact_rows.restore(facts.select(wanted), ledger)
    return by_audited_topic(config, ledger.streams.values(), origins)


@dataclass(frozen=True, slots=True)
class ReportRows:
    """The report's rows of these topics, as `row_parts.Parted`; those of windows without their details."""

    path: Path
    topics: Sequence[str]

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        names = list(VERDICT_SCHEMA.names if columns is None else columns)
        light = [name for name in names if name != "detail"]
        ours, start = pc.field("topic").isin(list(self.topics)), pc.field("window_start_ms")
        windows = self._read(light, ours & start.is_valid())
        if len(light) < len(names):
            windows = windows.append_column("detail", pa.nulls(windows.num_rows, pa.string()))
        yield windows.select(names)
        yield self._read(names, ours & start.is_null())

    def _read(self, names: Sequence[str], wanted: pc.Expression) -> pa.Table:
        return pq.read_table(self.path, columns=list(names), filters=wanted, partitioning=None)
