"""What is asked of rows part by part is what is asked of all at once."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from millrace.audit.reconciliation.horizon import split_older
from millrace.audit.reconciliation.row_parts import Rows, View, parts_of
from millrace.audit.reconciliation.settled import (
    LINE_SCHEMA,
    SETTLED_SCHEMA,
    lines_digest,
    lines_of,
    number_rows,
    rows_of,
)
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA
from millrace.audit.report import plain
from millrace.audit.report.folder import write_report
from millrace.audit.report.html import render
from millrace.audit.report.plain import by_producer
from millrace.audit.runs.doubtful_names import doubtful_names
from millrace.audit.runs.watermarks import watermarks_of
from tests.browser.report_data import rich
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
    assert watermarks_of(parted, pruned, [], [], topics) == watermarks_of(report, pruned, [], [], topics)
    assert [*doubtful_names(parted)] == [*doubtful_names(report)]
    assert lines_digest(View(days, lines_of, None)) == lines_digest(lines_of(numbered))
    whole = [texts(each) for each in split_older(report, 10**15)]
    assert [texts(each) for each in split_older(parted, 10**15)] == whole and all(whole)


def texts(rows: Rows) -> list[str]:
    found = parts_of(rows, ["stream", "window_start_ms", "verdict"])
    return sorted(str(row) for part in found for row in part.to_pylist())
