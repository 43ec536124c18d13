"""`audit explain <topic> <window>`: why a window has its verdict, from the last report and the state folder.

`explain` gives the whole answer as a dictionary (`--json`), `lines` the same for a person, `run` both steps;
nothing is read from any cluster. For each stream of the window: what the producer acknowledged, what each
tier saw and where, and for whatever is missing the last tier that had it, the first that has not, and the
offsets between which its neighbours lie. Offsets are those of cells: a record's own offset is not kept, and
of a united cell (`cell_union`) neither partition nor offsets (null).

`window` is a time inside the window, or a stream's id for what no window can be named for (a lost tail, a
producer that fell silent). A window whose evidence was pruned is told by the line that is left of it.

    {topic, window_start, window_ms, at, verdict, waivers [...], pruned null or {verdict, settled_at, counts},
     streams: [{producer, stream, window_start, window_ms, verdict, state, why, revision, content, published,
                ambiguous,
                tiers [{tier, consumed, distinct, appended, cells [{partition, offsets, sequences}]}],
                missing [{between, sequences, count, places}], duplicates [{tier, sequences, count}],
                in_flight [{between, sequences}], explained {cause: sequences}, unreported, unknown,
                differing {tier: sequences of which copies are not alike}, reasons [{reason, advice}]}]}
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.audit.config import NAME_MARK, SHOWN, AuditConfig
from millrace.audit.contract.group_counts import TIER_PREFIX
from millrace.audit.contract.sequence_set import to_ranges
from millrace.audit.keeping.state import StateFolder
from millrace.audit.keeping.state_files import open_files
from millrace.audit.keeping.verdict_files import own_lines, read_spans, resting_spans
from millrace.audit.keeping.waivers import is_stream, pruned_beside, read_waivers, standing_waivers
from millrace.audit.reconciliation.neighbours import Neighbourhood
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import COUNTS, Verdict
from millrace.audit.report.place import report_at
from millrace.audit.report.reasons import advice, reasons_of
from millrace.audit.report.sentences import hop_name, records
from millrace.audit.report.text import length
from millrace.audit.runs.watermark_holds import ReportRows
from millrace.audit.scanning.cell_rows import cells_of
from millrace.audit.scanning.cells import Cell
from millrace.broker.errors import ConfigError, MillraceError
from millrace.broker.times import time_ms

MOST_RANGES = 12
ROWS_FILE = "reconciliation.parquet"
MOST_PROVEN = 12  # streams that are told in full where nothing is wrong; beside a finding, none
MOST_CELLS = 12  # of one tier; more are summed up
_NEAREST = 3


def explain(config: AuditConfig, topic: str, window: str) -> dict[str, Any]:
    """The whole answer. Raises ConfigError naming what there is instead."""
    if topic not in config.topics:
        close = difflib.get_close_matches(topic, config.topics, 1, 0.5)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError("topic", topic, f"one of {', '.join(config.topics)}{meant}")
    with report_at(config.report, config.spark).reading((ROWS_FILE, "summary.json")) as folder:
        return _explained(config, topic, window, folder)


def _explained(config: AuditConfig, topic: str, window: str, report: Path) -> dict[str, Any]:
    path = report / ROWS_FILE
    if not path.exists():
        raise ConfigError("report", f"{config.report}/{ROWS_FILE}", "a report; run the audit first")
    summary = _summary(report / "summary.json")
    state = _State(config.state, config.spark)
    asked: int | None = None
    if is_stream(window):
        rows = _read(path, (pc.field("topic") == topic) & (pc.field("stream") == window)).to_pylist()
        rows = [row for row in rows if row["window_start_ms"] is None]
        if not rows:
            raise ConfigError(
                "window", window, f"a stream of topic {topic} with something that no window can be named for"
            )
    else:
        asked = parse_window(window)
        rows = _rows_of_window(path, topic, asked) or state.rows_at_rest(topic, asked)
    pruned = None if asked is None else state.pruned(topic, asked)
    if not rows and pruned is None:
        raise ConfigError("window", window, _known_windows(path, state, topic, asked or 0))
    start_ms, window_ms = _span_of(rows or ([pruned] if pruned else []))
    streams = sorted({row["stream"] for row in rows})
    cells = [] if start_ms is None or not streams else state.cells(topic, start_ms, window_ms, streams)
    asked_for = {iso_time(row["window_start_ms"]) for row in rows if asked is not None} or {
        iso_time(start_ms)
    }
    verdicts = [row["verdict"] for row in rows] or [pruned["verdict"] if pruned else "UNKNOWN"]
    return {
        "topic": topic,
        "window_start": iso_time(start_ms),
        "window_ms": window_ms,
        "at": summary.get("at"),
        "verdict": max(verdicts, key=lambda word: Verdict[word]),
        "waivers": [
            each
            for each in state.waivers(path, summary.get("at"), topic) or summary.get("waivers", ())
            if each["topic"] == topic and (each.get("stream") in streams or each["window_start"] in asked_for)
        ],
        "pruned": None if pruned is None else _pruned(pruned),
        "evidence": state.problem,
        "streams": [
            _stream(row, [cell for cell in cells if _is_of(cell, row)])
            for row in sorted(
                rows, key=lambda row: (-Verdict[row["verdict"]], row["producer"], row["stream"])
            )
        ],
    }


def parse_window(text: str) -> int:
    """A time in a window, where a stream's id might stand as well."""
    return parse_time("window", text, ", or a stream's 16 digits")


def parse_time(where: str, text: str, otherwise: str = "") -> int:
    """A time given as an option (`time_ms`); `where` is named in the error."""
    try:
        return time_ms(text)
    except ValueError as problem:
        raise ConfigError(where, text[:SHOWN], f"{problem}{otherwise}") from problem


def _read(path: Path, wanted: pc.Expression) -> pa.Table:
    return pq.read_table(path, filters=wanted)


def _summary(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows_of_window(path: Path, topic: str, at_ms: int) -> list[dict[str, Any]]:
    """The rows of all windows that the time lies in: those of a stream that counts in longer ones are others.
    What lies further back than the longest is not read, for its details may be large."""
    here = pc.field("topic") == topic
    lengths = pq.read_table(path, columns=["window_ms"], filters=here, partitioning=None)
    longest_ms = pc.max(lengths["window_ms"]).as_py() or 0
    start = pc.field("window_start_ms")
    near = (start <= at_ms) & (start > at_ms - longest_ms)
    return _read(path, here & near & (start + pc.field("window_ms") > at_ms)).to_pylist()


def _span_of(windows: Sequence[Mapping[str, Any]]) -> tuple[int | None, int]:
    """(start, length) of the windows together; none of a row that no window can be named for."""
    starts = [each["window_start_ms"] for each in windows]
    if None in starts or not starts:
        return None, windows[0]["window_ms"] if windows else 0
    end_ms = max(each["window_start_ms"] + each["window_ms"] for each in windows)
    return min(starts), end_ms - min(starts)


def _is_of(cell: Cell, row: Mapping[str, Any]) -> bool:
    start_ms = row["window_start_ms"]
    return cell.stream == row["stream"] and start_ms <= cell.window_start_ms < start_ms + row["window_ms"]


def _known_windows(path: Path, state: _State, topic: str, at_ms: int) -> str:
    """What to ask for instead: the nearest windows of the topic."""
    table = pq.read_table(path, columns=["window_start_ms"], filters=pc.field("topic") == topic)
    starts = [*pc.unique(table["window_start_ms"]).drop_null().to_pylist(), *state.near_at_rest(topic, at_ms)]
    if not starts:
        return f"a window of topic {topic}, of which the last report has none"
    nearest = sorted(sorted(starts, key=lambda start: abs(start - at_ms))[:_NEAREST])
    there = ", ".join(str(iso_time(each)) for each in nearest)
    return f"a window of topic {topic} in the last report; the nearest: {there}"


class _State:
    """What is kept of a window. Its report can be explained without: then `problem` says why."""

    def __init__(self, place: Path | str, settings: Mapping[str, str]) -> None:
        self._place = place
        self._settings = settings
        self.problem: str | None = None

    def _open(self) -> StateFolder:
        return StateFolder(open_files(self._place, self._settings))

    def pruned(self, topic: str, at_ms: int) -> dict[str, Any] | None:
        """The line that is left of a window whose evidence was pruned, or the span that it is in."""
        try:
            folder = self._open()
            latest = folder.latest()
            if not latest.verdicts:
                return None
            _, table = own_lines(folder, latest.verdicts, [topic])
            spans = read_spans(folder, latest.verdicts, [topic])
        except (MillraceError, OSError) as problem:
            self.problem = str(problem)
            return None
        start_ms = table["window_start_ms"]
        here = pc.and_(
            pc.less_equal(start_ms, at_ms), pc.greater(pc.add(start_ms, table["window_ms"]), at_ms)
        )
        for line in table.filter(here).slice(0, 1).to_pylist():
            return dict(line)
        for span in spans.filter(_hold(spans, at_ms)).slice(0, 1).to_pylist():
            window_ms = span["window_ms"]
            begun = (at_ms - span["start_ms"]) // window_ms
            return {**span, "window_start_ms": span["start_ms"] + begun * window_ms}
        return None

    def rows_at_rest(self, topic: str, at_ms: int) -> list[dict[str, Any]]:
        """The rows of a window that the report has none of, because it is at rest."""
        start, end = pc.field("window_start_ms"), pc.field("window_start_ms") + pc.field("window_ms")
        wanted = (pc.field("topic") == topic) & (start <= at_ms) & (end > at_ms)
        found: list[dict[str, Any]] = []
        try:
            folder = self._open()
            for each in folder.latest().resting:
                spans = resting_spans(folder, [each], [topic])
                if spans.num_rows and pc.any(_hold(spans, at_ms)).as_py():
                    tables = [folder.read_table(name, wanted) for name in each.rows]
                    found += [row for table in tables for row in table.to_pylist()]
        except (MillraceError, OSError) as problem:
            self.problem = str(problem)
        return found

    def near_at_rest(self, topic: str, at_ms: int) -> list[int]:
        """The beginnings of windows at rest: of each stretch of them that which is nearest."""
        try:
            folder = self._open()
            spans = resting_spans(folder, folder.latest().resting, [topic]).to_pylist()
        except (MillraceError, OSError) as problem:
            self.problem = str(problem)
            return []
        last = [(each["start_ms"], each["end_ms"] - each["window_ms"], each["window_ms"]) for each in spans]
        return [first + (min(max(at_ms, first), end) - first) // step * step for first, end, step in last]

    def waivers(self, report: Path, report_at: str | None, topic: str) -> list[dict[str, Any]]:
        """What people waived of the topic until now, by what the last report says of it and what is left of
        pruned windows: as the run judges them."""
        try:
            rows = ReportRows(report, [topic])
            folder = self._open()
            pruned = pruned_beside(folder, folder.latest(), report_at)
            given = [each for each in read_waivers(folder) if each.topic == topic]
            return [each.told() for each in standing_waivers(given, rows, pruned)]
        except (MillraceError, OSError) as problem:
            self.problem = str(problem)
            return []

    def cells(self, topic: str, start_ms: int, window_ms: int, streams: Sequence[str]) -> list[Cell]:
        """The kept cells of the window (a row's window may span several of the audit's own)."""
        wanted = (
            ((pc.field("topic") == topic) | pc.starts_with(pc.field("topic"), f"{topic}{NAME_MARK}"))
            & (pc.field("window_start_ms") >= start_ms)
            & (pc.field("window_start_ms") < start_ms + window_ms)
            & pc.field("stream").isin(streams)
            & ~pc.field("tail")
        )
        found: list[Cell] = []
        try:
            folder = self._open()
            latest = folder.latest()
            names = list(latest.cells)
            for each in latest.resting:
                if pc.any(_hold(resting_spans(folder, [each], [topic]), start_ms)).as_py():
                    names += each.cells
            for name in names:
                found.extend(cells_of(folder.read_table(name, wanted)))
        except (MillraceError, OSError) as problem:
            self.problem = str(problem)
        return found


def _hold(spans: pa.Table, at_ms: int) -> pa.ChunkedArray:
    """Which of the spans the time lies in."""
    return pc.and_(pc.less_equal(spans["start_ms"], at_ms), pc.greater(spans["end_ms"], at_ms))


def _pruned(line: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "verdict": line["verdict"],
        "settled_at": iso_time(line["settled_ms"]),
        "counts": {name: line[name] for name in COUNTS},
        "from": iso_time(line.get("start_ms")),
        "until": iso_time(line.get("end_ms")),
    }


def _stream(row: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    detail = json.loads(row["detail"])
    around = Neighbourhood(cells)
    told: dict[str, Any] = {
        "producer": row["producer"],
        "stream": row["stream"],
        "window_start": iso_time(row["window_start_ms"]),
        "window_ms": row["window_ms"],
        "verdict": row["verdict"],
        "state": row["state"],
        "why": "",
        "revision": row.get("revision", 0),
        "content": row.get("content") or "",
        "published": row["published"],
        "ambiguous": row["ambiguous"],
        "tiers": [_tier(row, detail, tier, count, cells) for tier, count in row["consumed"]],
        "missing": [_missing(lost, around) for lost in detail.get("missing", ())]
        + [
            {"between": lost["between"], "sequences": [], "count": lost["count"], "places": []}
            for lost in detail.get("missing_count", ())
        ],
        "duplicates": [
            {"tier": tier, "sequences": detail.get("duplicates", {}).get(tier, []), "count": copies}
            for tier, copies in detail.get("extra_copies", {}).items()
        ],
        "in_flight": detail.get("in_flight", []),
        "explained": detail.get("explained", {}),
        "unreported": detail.get("unreported", []),
        "unknown": detail.get("unknown", []),
        "differing": detail.get("differing", {}),
        "reasons": [{"reason": reason, "advice": advice(reason)} for reason in reasons_of(detail)],
    }
    told["why"] = _why(told)
    return told


def _tier(
    row: Mapping[str, Any], detail: Mapping[str, Any], tier: str, count: int, cells: Sequence[Cell]
) -> dict[str, Any]:
    here = [cell for cell in cells if cell.tier == tier or cell.tier in tier.split("+")]
    appended = detail.get("append_ms", {}).get(tier)
    return {
        "tier": tier,
        "consumed": count,
        "distinct": dict(row["seen"]).get(tier, 0),
        "appended": None if appended is None else [iso_time(each) for each in appended],
        "cells": [
            {
                "cluster": cell.cluster,
                "partition": cell.partition if cell.has_place else None,
                "offsets": [cell.first_offset, cell.last_offset] if cell.has_place else None,
                "records": cell.count,
                "sequences": [list(each) for each in to_ranges(cell.sequences())],
            }
            for cell in sorted(here, key=lambda cell: (cell.cluster, cell.partition, cell.first_offset))
        ],
    }


def _missing(lost: Mapping[str, Any], around: Neighbourhood) -> dict[str, Any]:
    """Places as the run that judged it knew them; of further ranges what the kept cells say."""
    places = list(lost.get("places", ()))
    upstream, downstream = lost["between"]
    for first, last in lost["sequences"][len(places) : MOST_RANGES]:
        places.append(around.around((upstream, downstream), first, last))
    return {
        "between": lost["between"],
        "sequences": lost["sequences"],
        "count": sum(last - first + 1 for first, last in lost["sequences"]),
        "places": places,
    }


def _why(told: Mapping[str, Any]) -> str:
    """The verdict of one stream in words."""
    missing = sum(lost["count"] for lost in told["missing"])
    copies = sum(each["count"] for each in told["duplicates"])
    match told["verdict"]:
        case "PROVEN":
            how = "acknowledged and seen in every tier, each once"
            text = (
                "empty: nothing was sent"
                if not told["published"]
                else f"all {records(told['published'])} {how}"
            )
        case "COUNT_MATCH":
            text = "every tier counts as many as the producer; without numbers a loss and a copy would cancel"
        case "LOSS" if missing:
            text = f"{records(missing)} lost" + (f", {copies:,} extra copies" if copies else "")
        case "LOSS":
            text = "all records are there, with other content than was sent"
            if copies:
                extra = f"{copies:,} extra {'copy' if copies == 1 else 'copies'}"
                text = f"nothing missing, {extra}; contents differ"
        case "DUPLICATE":
            text = f"nothing lost, {copies:,} extra {'copy' if copies == 1 else 'copies'}"
        case _:
            text = _doubt(told)
    if told["state"] == "OPEN":
        text += "; the window is still open, more may come"
    return text


def _doubt(told: Mapping[str, Any]) -> str:
    waiting = sum(_size(each["sequences"]) for each in told["in_flight"])
    parts = [
        f"{records(number)} {words}"
        for number, words in (
            (waiting, "still on the way"),
            (sum(_size(each) for each in told["explained"].values()), "missing for a known cause"),
            (_size(told["unreported"]), "seen that no report tells of"),
            (_size(told["unknown"]), "that cannot be told"),
        )
        if number
    ]
    return "not proven: " + (", ".join(parts) or "see the reasons")


def _size(ranges: Sequence[Sequence[int]]) -> int:
    return sum(last - first + 1 for first, last in ranges)


def lines(told: Mapping[str, Any], everything: bool = False) -> Iterator[str]:
    """The explanation for a terminal: what is not proven first, and of the proven as many as help.
    `everything`: all of them."""
    if told["window_start"] is None:
        yield f"{told['topic']}, what no window can be named for: {told['verdict']}"
    else:
        window = f"window {told['window_start']} of {length(told['window_ms'])}"
        yield f"{told['topic']}, {window}: {told['verdict']}"
    if told["at"]:
        yield f"as of the audit of {told['at']}"
    for waiver in told["waivers"]:
        lapsed = "" if waiver.get("stands", True) else " (lapsed: it has got worse since)"
        what = f" (stream {waiver['stream']})" if waiver.get("stream") else ""
        verdict = f", when it was {waiver['verdict']}" if waiver.get("verdict") else ""
        who, why = _plain(waiver["who"]), _plain(waiver["why"])
        yield f"WAIVED{what}{lapsed} by {who} at {waiver['at']}{verdict}: {why}"
    if told["pruned"] is not None:
        yield from _pruned_lines(told["pruned"], bool(told["streams"]))
    if told["evidence"]:
        yield f"(the state's cells could not be read: {told['evidence']})"
    findings = [each for each in told["streams"] if Verdict[each["verdict"]] > Verdict.COUNT_MATCH]
    shown = max(len(findings), 0 if findings else MOST_PROVEN)
    for stream in told["streams"][: None if everything else shown]:
        yield ""
        yield from _stream_lines(stream, told["window_ms"])
    rest = [] if everything else told["streams"][shown:]
    if rest:
        words = (
            "proven" if all(each["verdict"] == "PROVEN" for each in rest) else "proven, or equal in number"
        )
        published = records(sum(each["published"] for each in rest))
        yield ""
        yield f"{len(rest):,} more streams are {words}, with {published} (--all shows them)"


def _pruned_lines(pruned: Mapping[str, Any], has_rows: bool) -> Iterator[str]:
    counts = ", ".join(
        f"{name.replace('_', ' ')} {count:,}" for name, count in pruned["counts"].items() if count
    )
    if pruned["from"] is None:
        yield (
            f"PRUNED: settled as {pruned['verdict']} at {pruned['settled_at']}, older than the config's "
            f"`keep`; its cells are gone and only its counts are kept ({counts or 'nothing was sent'})"
        )
    else:
        yield (
            f"PRUNED: settled as {pruned['verdict']}, as all windows from {pruned['from']} to "
            f"{pruned['until']} were by {pruned['settled_at']}, older than the config's `keep`; their cells "
            f"are gone and only their counts together are kept ({counts or 'nothing was sent'})"
        )
    if has_rows:
        yield "What came for it since is counted below and does not change that verdict."


def _stream_lines(told: Mapping[str, Any], window_ms: int) -> Iterator[str]:
    """`window_ms` is what all of them cover together."""
    name = _plain(told["producer"]) or "(no name)"
    stream = f", stream {told['stream']}" if told["stream"] else ""
    own = "" if told["window_ms"] == window_ms else ", in its window " + told["window_start"]
    own += f" of {length(told['window_ms'])}" if own else ""
    yield f"producer {name}{stream}: {told['verdict']} ({told['state']}{own})"
    yield f"  {told['why']}"
    if told["revision"] > 1:
        yield f"  revision {told['revision']}: late data changed an earlier verdict"
    if told["content"]:
        yield f"  content {told['content']}"
    ambiguous = f", {told['ambiguous']:,} more may have been sent" if told["ambiguous"] else ""
    yield f"  {'acknowledged':<13} {records(told['published'])}{ambiguous}"
    for tier in told["tiers"]:
        yield from _tier_lines(tier)
    for lost in told["missing"]:
        yield from _loss_lines(lost)
    for each in told["duplicates"]:
        copies = f"{each['count']:,} extra {'copy' if each['count'] == 1 else 'copies'}"
        yield f"  TWICE in {each['tier']}, and not before: {_text(each['sequences'])} ({copies})"
    for tier, ranges in told["differing"].items():
        yield f"  NOT ALIKE in {tier}: copies of {_text(ranges)}"
    for waiting in told["in_flight"]:
        hop = " to ".join(hop_name(tier) for tier in waiting["between"])
        who = "the group has" if waiting["between"][1].startswith(TIER_PREFIX) else "the mirror has"
        yield f"  ON THE WAY from {hop}: {_text(waiting['sequences'])} ({who} not passed them yet)"
    for cause, ranges in told["explained"].items():
        yield f"  EXPLAINED by {_plain(cause)}: {_text(ranges)}"
    for kind, words in (("unreported", "seen, but no report tells of them"), ("unknown", "nobody can tell")):
        if told[kind]:
            yield f"  {kind.upper()}: {_text(told[kind])} ({words})"
    for each in told["reasons"]:
        yield f"  because {_plain(each['reason'])}"
        if each["advice"]:
            yield f"    {each['advice']}"


def _tier_lines(told: Mapping[str, Any]) -> Iterator[str]:
    yield f"  {told['tier']:<13} {told['consumed']:,} records, {told['distinct']:,} distinct" + (
        f", appended {told['appended'][0]} to {told['appended'][1]}" if told["appended"] else ""
    )
    if told["tier"].startswith(TIER_PREFIX) and told["consumed"] and not told["cells"]:
        yield "    counted by the consumers of the group themselves, so without offsets"
    for cell in told["cells"][:MOST_CELLS]:
        where = "several partitions together"  # once nothing was missing, nobody asks for offsets
        if cell["offsets"] is not None:
            first, last = cell["offsets"]
            where = f"partition {cell['partition']}, offsets {first}-{last}"
        yield f"    {where}: {_text(cell['sequences'])}"
    rest = told["cells"][MOST_CELLS:]
    if rest:
        yield f"    and {sum(cell['records'] for cell in rest):,} records in {len(rest)} more stretches"


def _loss_lines(lost: Mapping[str, Any]) -> Iterator[str]:
    upstream, downstream = (hop_name(tier) for tier in lost["between"])
    if not lost["sequences"]:
        yield f"  LOST {lost['count']:,} between {upstream} and {downstream} (not numbered: cannot be named)"
        return
    yield f"  LOST between {upstream} and {downstream}: {_text(lost['sequences'])}"
    for place in lost["places"][:MOST_RANGES]:
        span = _span(*place["sequences"])
        for held in place["held"]:
            yield f"    {span}: {upstream} has it in {_place(held)}"
        if place.get("held_more"):
            yield f"    {span}: and in {place['held_more']} more stretches"
        near = [
            f"{word} it {place[word]['sequence']} was seen ({_place(place[word])})"
            for word in ("before", "after")
            if word in place
        ]
        yield f"    {span}: in {downstream}, {'; '.join(near) or 'nothing else of this stream was seen'}"


def _place(place: Mapping[str, Any]) -> str:
    first, last = place["offsets"]
    return f"partition {place['partition']}, offsets {first}-{last}"


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _text(ranges: Sequence[Sequence[int]]) -> str:
    shown = ", ".join(_span(first, last) for first, last in ranges[:MOST_RANGES])
    rest = len(ranges) - MOST_RANGES
    return (shown or "nothing numbered") + (f" and {rest} more ranges" if rest > 0 else "")


def _plain(text: str) -> str:
    """A stranger's text, harmless to a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text[:1000])
