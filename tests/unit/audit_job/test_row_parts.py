"""What is asked of rows part by part is what is asked of all at once."""

from __future__ import annotations

from collections import Counter

import pyarrow.parquet as pq
import pytest

from millrace.audit.reconciliation.horizon import split_older
from millrace.audit.reconciliation.row_parts import Rows, View, parts_of
from millrace.audit.reconciliation.settled import (
    LINE_COLUMNS,
    LINE_SCHEMA,
    SETTLED_SCHEMA,
    lines_digest,
    lines_of,
    number_rows,
    rows_of,
)
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA
from millrace.audit.report import plain, tally
from millrace.audit.report.console import console_lines
from millrace.audit.report.document import SummaryDocument
from millrace.audit.report.folder import write_report
from millrace.audit.report.html import by_hop, render
from millrace.audit.report.metrics import metrics_text
from millrace.audit.report.plain import by_producer
from millrace.audit.report.summary import summarise
from millrace.audit.runs.doubtful_names import doubtful_names
from millrace.audit.runs.watermarks import watermarks_of
from tests.browser.report_data import HOUR_MS, START_MS, TIERS, rich
from tests.settling import Windows


@pytest.fixture(scope="module")
def made():
    return rich(2)


def test_the_page_and_the_reports_files_are_the_same_however_rows_come(made, monkeypatch, tmp_path):
    """Also where hardly a row fits the page, and the others are lines for each producer."""
    summary, rows = made
    ordered = [(name, "ascending") for name in ("topic", "producer", "stream", "window_start_ms")]
    for most_bytes in (plain.MOST_BYTES, 2_000):
        monkeypatch.setattr(plain, "MOST_BYTES", most_bytes)
        monkeypatch.setattr(plain, "MOST_ROWS", most_bytes // 16)
        assert render(summary, Windows(rows, 7)) == render(summary, rows)
    write_report(tmp_path, summary, Windows(rows, 7))
    found = pq.read_table(tmp_path / "reconciliation.parquet")
    assert found.sort_by(ordered) == rows.select(VERDICT_SCHEMA.names).sort_by(ordered)
    told = pq.read_table(tmp_path / "producers.parquet").sort_by(ordered[:2] + ordered[3:])
    assert told == by_producer(rows).sort_by(ordered[:2] + ordered[3:])


def test_watermarks_names_lines_and_findings_of_the_past_are_the_same_however_rows_come(made):
    numbered = number_rows(made[1], LINE_SCHEMA.empty_table(), 100)
    days = Windows(numbered, 5)
    report, parted = rows_of(numbered), View(days, rows_of, ["state"])
    topics, pruned = report["topic"].unique().to_pylist(), SETTLED_SCHEMA.empty_table()
    told = [watermarks_of(each, pruned, [], [], topics, over_ms=10**15) for each in (parted, report)]
    assert told[0] == told[1]
    assert [*doubtful_names(parted)] == [*doubtful_names(report)]
    assert lines_digest(View(days, lines_of, LINE_COLUMNS, makes=True)) == lines_digest(lines_of(numbered))
    whole = [texts(each) for each in split_older(report, 10**15)]
    assert [texts(each) for each in split_older(parted, 10**15)] == whole and all(whole)


def texts(rows: Rows) -> list[str]:
    found = parts_of(rows, ["stream", "window_start_ms", "verdict"])
    return sorted(str(row) for part in found for row in part.to_pylist())


def test_of_very_many_findings_the_greatest_are_named_and_the_others_summed(made, monkeypatch):
    """However the rows come, and the page, the metrics and the console have all records of each hop."""
    _, rows = made
    settings = {"tiers": TIERS, "at_ms": START_MS, "window_ms": HOUR_MS, "untrusted": {}, "unaudited": {}}
    whole = summarise(rows, **settings)
    monkeypatch.setattr(tally, "MOST_NAMED", 2)
    few = summarise(rows, **settings)
    assert summarise(Windows(rows, 7), **settings) == few
    SummaryDocument.model_validate(few)
    for kind, where in (("losses", "lost_between"), ("duplicates", "tier")):
        greatest = sorted(whole[kind], key=lambda each: -each["count"])[:2]
        assert sorted(each["count"] for each in few[kind]) == sorted(each["count"] for each in greatest)
        assert len(few[kind]) + sum(each["findings"] for each in few[f"{kind}_more"]) == len(whole[kind])
        assert hops(few[kind], few[f"{kind}_more"], where) == hops(whole[kind], (), where)
    told, all_of_them = metrics_text(few), metrics_text(whole)
    assert told == all_of_them and few["sentence"] == whole["sentence"]
    shown = [(each["where"], each["count"]) for each in by_hop(few["losses"], 5, few["losses_more"])]
    assert shown == [(each["where"], each["count"]) for each in by_hop(whole["losses"], 5)]
    page = render(few, rows)
    assert "at least" in page and "more are named in reconciliation.parquet" in page
    lines = list(console_lines(few, "index.html", "audit.yaml", 1))
    assert any("all named in reconciliation.parquet" in line for line in lines)


def test_of_a_hops_losses_the_greatest_come_first_and_those_without_a_name_count_with_it():
    losses = [
        {"topic": "flights", "producer": "AA", "window_start": None, "lost_between": hop, "count": count}
        for hop, counts in ((["ewr", "agg"], (1, 5, 3)), (["jfk", "agg"], (2, 6)))
        for count in counts
    ]
    more = [{"topic": "flights", "lost_between": ["jfk", "agg"], "findings": 4, "count": 9}]
    told = by_hop(losses, 100, more)
    assert [(each["where"][0], each["count"], each["rest"]) for each in told] == [
        ("jfk", 17, 4),
        ("ewr", 9, 0),
    ]
    assert [[each["count"] for each in group["items"]] for group in told] == [[6, 2], [5, 3, 1]]


def test_revisions_beyond_those_that_are_named_are_counted_wherever_they_are_told(made):
    _, rows = made
    change = {"topic": "flights", "producer": "AA", "window_start": None, "revision": 2}
    change |= {"before": "LOSS", "after": "PROVEN"}
    settings = {"tiers": TIERS, "at_ms": START_MS, "window_ms": HOUR_MS, "untrusted": {}, "unaudited": {}}
    told = summarise(rows, revisions=[change] * 101, revised_more=7, **settings)
    SummaryDocument.model_validate(told)
    assert "millrace_audit_revisions 108.0" in metrics_text(told)
    assert "8 more are in reconciliation.parquet." in render(told, rows)
    few = summarise(rows, revisions=[change] * 101, **settings)
    assert "revisions_more" not in few and "1 more are in summary.json." in render(few, rows)


def hops(named, more, where):
    found = Counter()
    for each in (*named, *more):
        found[each["topic"], str(tuple(each[where]))] += each["count"]
    return found
