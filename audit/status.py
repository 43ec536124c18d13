"""`audit status`: where an audit stands, from its state and its last report; no cluster is asked.

`read_status(config)` gives one dictionary (the command's `--json`), `lines(status)` a table of at most 79
columns for a terminal:

    state, run, at, report_verdict, report_at
    size            {files, bytes} of what the newest commit names
    topics          {topic: {watermark, windows {verdict: settled rows}, pruned (windows), waivers (standing),
                     lapsed (waivers that no longer stand)}}
    waivers         as in `summary.json`
    untrusted       how many things could not be trusted
    untrusted_waivers  as in `summary.json`
    last_failure    {at, sentence} when the last run failed, else null
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.config import AuditConfig
from millrace.audit.keeping.state import StateFolder
from millrace.audit.keeping.untrusted_waivers import read_accepted, standing_accepted, told_untrusted
from millrace.audit.keeping.verdict_files import SettledLines, read_spans, resting_spans
from millrace.audit.keeping.waivers import read_waivers, standing_waivers
from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.spans import window_counts
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import VERDICTS, Verdict
from millrace.audit.report.failure import FILE_NAME as LAST_FAILURE
from millrace.audit.report.folder import read_told
from millrace.audit.report.place import report_at
from millrace.audit.report.text import byte_size, visible
from millrace.audit.runs.resting_files import read_sums

WIDTH = 79


def read_status(config: AuditConfig) -> dict[str, Any]:
    """Raises StateDamaged, DataFolderNotWritable."""
    state = StateFolder.look(config.state, config.spark)
    latest = state.latest()
    settled = SettledLines(state, latest.verdicts, resting_spans(state, latest.resting))
    standing = standing_waivers(read_waivers(state), settled)
    files, size = state.size(latest)
    topics: dict[str, dict[str, Any]] = {}
    for topic in config.topics:
        here = [each for each in standing if each.waiver.topic == topic]
        topics[topic] = {
            "watermark": iso_time(latest.watermarks.get(topic)),
            "windows": {},
            "pruned": 0,
            "waivers": sum(each.stands for each in here),
            "lapsed": sum(not each.stands for each in here),
        }
    for row in _of_spans(read_spans(state, latest.verdicts)):
        if row["topic"] in topics:
            topics[row["topic"]]["pruned"] += row["windows"]
    for row in _counted(settled):
        held = topics.get(row["topic"])
        if held is None:
            continue
        if row["folded"]:
            held["pruned"] += row["count_all"]
        else:
            held["windows"][row["verdict"]] = held["windows"].get(row["verdict"], 0) + row["count_all"]
    for each in read_sums(state, latest.resting):
        for told in each.told["tally"]["topics"]:
            if told["topic"] in topics:
                windows, proven = topics[told["topic"]]["windows"], str(Verdict.PROVEN)
                windows[proven] = windows.get(proven, 0) + told["windows"]
    with report_at(config.report, config.spark).reading(("summary.json", LAST_FAILURE)) as folder:
        report, failure = read_told(folder, "summary.json"), read_told(folder, LAST_FAILURE)
    counts = {each["what"]: each["count"] for each in report.get("untrusted", ())}
    doubts = told_untrusted(latest, counts)
    return {
        "state": state.where,
        "run": latest.number,
        "at": iso_time(latest.at_ms) if latest.number else None,
        "report_verdict": report.get("verdict"),
        "report_at": report.get("at"),
        "size": {"files": files, "bytes": size},
        "topics": topics,
        "waivers": [each.told() for each in standing],
        "untrusted": sum(doubts.values()),
        "untrusted_waivers": [each.told() for each in standing_accepted(read_accepted(state), doubts)],
        "last_failure": {name: failure[name] for name in ("at", "sentence")}
        if {"at", "sentence"} <= set(failure)
        else None,
    }


def _of_spans(spans: pa.Table) -> list[dict[str, Any]]:
    """How many windows each topic has in them."""
    counted = spans.append_column("windows", window_counts(spans)).group_by("topic")
    return [
        {"topic": row["topic"], "windows": row["windows_sum"]}
        for row in counted.aggregate([("windows", "sum")]).to_pylist()
    ]


def _counted(settled: Rows) -> Iterator[dict[str, Any]]:
    """How many windows there are of each topic, verdict and kind of line."""
    for part in parts_of(settled):
        windows = part.filter(pc.is_valid(part["window_start_ms"]))
        counted = windows.group_by(["topic", "verdict", "folded"]).aggregate([([], "count_all")])
        yield from counted.to_pylist()


def lines(status: Mapping[str, Any]) -> list[str]:
    """The status for a terminal."""
    failed = []
    if status.get("last_failure"):
        failed = [f"FAILED    the last run, {status['last_failure']['at']}:"]
        failed += textwrap.wrap(
            visible(status["last_failure"]["sentence"], 400),
            WIDTH,
            initial_indent=" " * 10,
            subsequent_indent=" " * 10,
        )
    if not status["run"]:
        return [*failed, _cut(f"no run has been kept yet in {status['state']}")]
    size = status["size"]
    told = [
        *failed,
        _cut(f"state     {status['state']}"),
        f"          run {status['run']}, {status['at']}, {byte_size(size['bytes'])} in {size['files']} files",
    ]
    if status["report_verdict"]:
        told.append(f"report    {status['report_verdict']}, {status['report_at']}")
    if status["untrusted"]:
        told.append(f"doubts    {status['untrusted']:,} things could not be trusted")
    told += ["", _row("topic", "complete until", list(VERDICTS), "waived")]
    for topic, held in status["topics"].items():
        counts = [_short(held["windows"].get(word, 0)) for word in VERDICTS]
        waived = f"{held['waivers']}" + (f" (-{held['lapsed']})" if held["lapsed"] else "")
        told.append(_row(topic, held["watermark"] or "nothing yet", counts, waived))
    open_ones, accepted = status["waivers"], status.get("untrusted_waivers", [])
    if open_ones or accepted:
        told += ["", "waivers"]
    for each in open_ones:
        what = each["window_start"] or f"stream {each['stream']}"
        lapsed = "" if each["stands"] else "LAPSED, it is worse now: "
        told.append(_cut(f"  {each['topic']} {what}: {lapsed}{each['who']}: {each['why']}"))
    for each in accepted:
        lapsed = "" if each["stands"] else "LAPSED, more came: "
        named = visible(each["untrusted"])
        told.append(_cut(f"  not trusted, {named}: {lapsed}{each['who']}: {each['why']}"))
    return told


_SHORT_WORDS = {"COUNT_MATCH": "MATCH", "DUPLICATE": "TWICE"}


def _row(topic: str, watermark: str, counts: list[str], waived: str) -> str:
    columns = "".join(f"{_SHORT_WORDS.get(count, count):>8}" for count in counts)
    name = topic if len(topic) <= 11 else f"{topic[:10]}…"
    return f"{name:<11} {watermark:<20}{columns} {waived}"[:WIDTH].rstrip()


def _short(count: int) -> str:
    if count < 100_000:
        return str(count)
    return f"{count / 1000:.0f}k" if count < 10_000_000 else f"{count / 1_000_000:.0f}M"


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
