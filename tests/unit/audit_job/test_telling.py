"""What a run tells, and when another run's word stays."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from millrace.audit import job as job_module
from millrace.audit.config import parse_config
from millrace.audit.contract.events import HEARTBEAT, EventLedger
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.reconciliation.settled import NUMBERED_SCHEMA, SETTLED_SCHEMA
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA, verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.report.folder import RowsAtRest
from millrace.audit.report.place import report_at
from millrace.audit.report.summary import summarise
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.reconciling import reconciler_of, streams_of
from millrace.audit.runs.run import Findings
from millrace.audit.runs.watermarks import completeness_of, document, last_told, steps_back
from millrace.audit.scanning.cell_rows import CELL_SCHEMA

STREAM = "00000000000000aa"


def proven(*starts_ms):
    return [
        WindowVerdict("flights", "B", "00000000000000bb", start_ms, 10, WindowState.SETTLED, Verdict.PROVEN)
        for start_ms in starts_ms
    ]


@pytest.mark.parametrize("tier", ["source", "aggregate"])
def test_a_promise_counts_for_the_topic_of_the_rows(tier):
    """The only cluster may be called an aggregate, and have the topic under another name."""
    cluster = {"bootstrap": ["h:1"], "tier": tier, "topics": {"flights": "prod.flights"}}
    config = parse_config({"clusters": {"c": cluster}, "topics": ["flights"], "window": "10ms"})
    ledger = EventLedger()
    facts = ledger.facts(STREAM)
    facts.topic, facts.producer, facts.state, facts.no_earlier_than_ms = "prod.flights", "A", HEARTBEAT, 15
    captured = Capture(0, ledger, {STREAM: {"c"}} if tier == "source" else {})
    told = streams_of(config, captured)
    facts_row = {"stream": STREAM, "topic": facts.topic, "origins": sorted(captured.origins.get(STREAM, ()))}
    assert reconciler_of(config, captured, [], 100).told_topic([facts_row]) == "flights"
    assert [each.topic for each in told] == ["flights"]
    rows = verdict_rows(proven(0, 10, 20, 30))
    found = completeness_of(rows, SETTLED_SCHEMA.empty_table(), told, [], ["flights"], over_ms=100)
    assert found["flights"].watermark_ms == 10


def reported(tmp_path, committed, known):
    """(what went wrong with telling it, whether there is a report) of a run that goes on from `known`."""
    state = StateFolder.open(tmp_path / "state")
    for number in range(1, committed + 1):
        state.commit(Commit(number=number))
    rows = verdict_rows(proven(0))
    found = SimpleNamespace(rows=rows, watermarks={"flights": 10})
    job = SimpleNamespace(
        state=state, only=None, now_ms=0, number=known + 1, config=SimpleNamespace(zookeeper=None)
    )
    summary = summarise(rows, tiers=["c"], at_ms=0, window_ms=10, untrusted={}, unaudited={})
    problem = job_module._report(job, found, summary, report_at(tmp_path / "report"), known, RowsAtRest())
    return problem, (tmp_path / "report" / "watermarks.json").exists()


def test_a_run_that_another_has_overtaken_tells_nothing(tmp_path):
    """Both looked at once, and this one learnt nothing, so that no commit of its own could fail."""
    assert reported(tmp_path / "alone", 3, 3) == ("", True)
    problem, is_told = reported(tmp_path / "overtaken", 4, 3)
    assert "run 4 of another audit job has ended meanwhile" in problem and not is_told


def test_a_run_that_another_overtakes_while_it_writes_says_so(tmp_path, monkeypatch):
    """Nobody knows then whose files were written last."""
    tell = job_module._tell

    def overtaken(job, *rest):
        job.state.commit(Commit(number=4))
        return tell(job, *rest)

    monkeypatch.setattr(job_module, "_tell", overtaken)
    problem, is_told = reported(tmp_path, 3, 3)
    assert "run 4 of another audit job has ended while the report was written" in problem and is_told


def test_a_step_back_is_told_by_the_next_run_where_the_one_that_made_it_died():
    """It was committed, and the report still says what others go by."""
    left = json.loads(document({"flights": 30, "hotels": 10, "rail": None}, 0, 1))
    told = last_told(left, {"flights": 20, "hotels": 20, "rail": 5})
    assert told == {"flights": 30, "hotels": 20, "rail": 5}
    assert [each["topic"] for each in steps_back(told, {"flights": 20, "hotels": 20, "rail": 5})] == [
        "flights"
    ]
    for nothing in ({}, {"watermarks": [1]}, {"watermarks": {"flights": 7, "hotels": {"watermark_ms": "9"}}}):
        assert last_told(nothing, {"flights": 20}) == {"flights": 20}


def test_a_summary_compares_with_what_was_told_last(monkeypatch):
    """The summary of a run compares with what was told last, whoever wrote it."""
    told = {"flights": 30}
    monkeypatch.setattr(job_module, "_notes", lambda job, doubts: [])
    rows = verdict_rows(proven(0))
    config = parse_config(
        {"clusters": {"c": {"bootstrap": ["h:1"], "tier": "source"}}, "topics": ["flights"]}
    )
    job = SimpleNamespace(
        config=config, now_ms=0, foreign={}, since_ms=None, told=told, before=Commit(watermarks={}), sums=[]
    )
    found = Findings(
        rows, rows, VERDICT_SCHEMA.empty_table(), NUMBERED_SCHEMA.empty_table(), [], {"flights": 20}
    )
    cells = SimpleNamespace(notes=lambda tail: CELL_SCHEMA.empty_table())
    summary = job_module._summary(job, Commit(), cells, found)
    assert [each["topic"] for each in summary["watermark_steps_back"]] == ["flights"]
