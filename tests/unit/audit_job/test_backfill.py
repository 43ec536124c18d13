"""A backfill of windows whose evidence was pruned: they are computed as if they had never been."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

from pyroaring import BitMap64

from millrace.audit import job as job_module
from millrace.audit.contract.events import EventLedger
from millrace.audit.keeping import upkeep
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.reconciliation.reconcile import PRUNED_BEFORE
from millrace.audit.reconciliation.settled import rows_of, unnumbered
from millrace.audit.runs import backfill
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.fact_rows import PrunedWindows, facts_table, stream_events
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from tests.settling import OnePart
from tests.unit.audit_job.upkeep_stage import (
    STREAM,
    WINDOW_MS,
    cell,
    ledger_of,
    pruned_at,
    run_of,
    verdict_table,
)

REPORTS = ((0, [1, 2, 3]), (10, [4, 5, 6]))


def backfilled(tmp_path, monkeypatch, only, pruned=(0,), cells=None, told=(0, 10), reports=REPORTS, **kind):
    """A backfill of a stream of which some windows were `pruned`; reports of those `told` are there again."""
    ledger = ledger_of(*reports, **kind)
    left = pruned_at(ledger, *pruned)
    state = StateFolder.open(tmp_path)
    state.write_table("events/e.parquet", facts_table(ledger, {STREAM: {"ewr"}}, left))

    async def capture(config, ledger, clock_ms, before, known):
        again = ledger_of(*reports, **kind).streams[STREAM]
        ledger.learn_all([*stream_events(again), *(again.windows[start_ms] for start_ms in told)])
        return Capture(10_000, ledger, {STREAM: {"ewr"}})

    monkeypatch.setattr(job_module, "capture", capture)
    before = Commit(number=1, window_ms=WINDOW_MS, events="events/e.parquet")
    settings = run_of(state, Capture(0, EventLedger())).config
    job = job_module._prepare(settings, state, before, lambda: 0, only)
    sequenced = kind.get("sequenced", True)
    cells = cells or [cell(start_ms, numbers, sequenced) for start_ms, numbers in reports]
    found = SimpleNamespace(
        notes=lambda tail: CELL_SCHEMA.empty_table(),
        reconcile=lambda *_: OnePart(unnumbered(verdict_table(job.facts, cells))),
    )
    (rows,) = job_module._reconcile(job, Commit(), found).parts()
    rows = rows_of(rows)
    return job, (rows if only is None else backfill.rows_between(rows, only)).to_pylist()


def test_a_backfill_of_all_that_was_pruned_of_a_stream_has_its_rows(tmp_path, monkeypatch):
    job, rows = backfilled(tmp_path, monkeypatch, (0, 10))
    assert job.pruned == {}
    assert [(each["window_start_ms"], each["verdict"]) for each in rows] == [(0, "PROVEN")]


def test_a_backfill_takes_only_what_it_does_not_read_again_off_the_total_of_who_only_counts(
    tmp_path, monkeypatch
):
    def judged(last):
        folder = tmp_path / str(last)
        _, rows = backfilled(folder, monkeypatch, (0, 10), pruned=(0, 10), last=last, sequenced=False)
        return [(each["window_start_ms"], each["verdict"]) for each in rows]

    assert judged(6) == [(0, "COUNT_MATCH")]
    assert (None, "UNKNOWN") in judged(8), "a report of 2 records is lost"


def test_a_backfill_calls_no_record_of_another_pruned_window_late(tmp_path, monkeypatch):
    """It reads the clusters from their beginning, so that all of them come again."""
    job, _ = backfilled(tmp_path, monkeypatch, (10, 20), told=(10,))
    assert set(job.pruned) == {STREAM} and job.late == {}
    job, _ = backfilled(tmp_path / "run", monkeypatch, None)
    assert job.late == {f"{upkeep.LATE}, in ewr, topic flights": 3}, "a run reads what is new"


def verdict_of_0(tmp_path, monkeypatch, only=(0, 10), **given):
    _, rows = backfilled(tmp_path, monkeypatch, only, pruned=(0, 10), **given)
    (first,) = (each for each in rows if each["window_start_ms"] == 0)
    detail = json.loads(first["detail"])
    return first["verdict"], [each["sequences"] for each in detail.get("missing", ())], detail.get("reasons")


def test_a_backfill_of_part_of_what_was_pruned_proves_it_or_names_the_loss(tmp_path, monkeypatch):
    """One old day: its own numbers are told again, and accounted for by nothing else."""
    assert verdict_of_0(tmp_path / "whole", monkeypatch) == ("PROVEN", [], None)
    cells = [cell(0, [1, 3]), cell(10, [4, 5, 6])]
    assert verdict_of_0(tmp_path / "lost", monkeypatch, cells=cells) == ("LOSS", [[[2, 2]]], None)
    told_of = {"told": (0,), "cells": [cell(0, [1, 3])]}
    assert verdict_of_0(tmp_path / "alone", monkeypatch, **told_of) == ("LOSS", [[[2, 2]]], None)


def test_a_backfill_does_not_prove_a_pruned_window_whose_report_is_gone(tmp_path, monkeypatch):
    """Which numbers it had is not known; one of the whole stream calls them unreported."""
    told_of = {"told": (10,)}
    assert verdict_of_0(tmp_path / "part", monkeypatch, **told_of)[0] == "UNKNOWN"
    rows = ((0, [1, 2, 3]), (10, [4, 5, 6]), (20, [7]))
    _, found = backfilled(
        tmp_path / "more", monkeypatch, (0, 10), pruned=(0, 10, 20), told=(10,), reports=rows, last=7
    )
    (first,) = (each for each in found if each["window_start_ms"] == 0)
    assert (first["verdict"], json.loads(first["detail"])["reasons"]) == ("UNKNOWN", [PRUNED_BEFORE])


def test_a_record_of_a_backfill_that_lies_in_another_pruned_window_is_not_called_lost(tmp_path, monkeypatch):
    """Its time was changed on the way; the two windows were waived and pruned together."""
    cells = [cell(0, [1, 3]), cell(10, [2, 4, 5, 6])]
    verdict, missing, reasons = verdict_of_0(tmp_path, monkeypatch, cells=cells)
    assert (verdict, missing) == ("UNKNOWN", []) and "time was changed" in " ".join(reasons)


def test_a_backfill_takes_whole_rows_of_who_reports_in_longer_windows():
    """Reports of 30 ms, and an audit of 10 ms: a row, and what is pruned of it, is three of its windows."""
    ledger = ledger_of((0, [1, 2]), (30, [3]), last=3)
    facts = ledger.streams[STREAM]
    for start_ms, report in list(facts.windows.items()):
        del facts.windows[start_ms]
        facts.windows[start_ms] = replace(report, window_ms=30)
    left = {STREAM: PrunedWindows(WINDOW_MS)}
    for start_ms in (0, 30, 60):
        left[STREAM].add(start_ms, 30)
    left[STREAM].sequences |= BitMap64([1, 2, 3, 4])
    del facts.windows[30]
    found = backfill.left_pruned(left, ledger, (10, 20))[STREAM]
    assert (sorted(found.windows), sorted(found.sequences)) == ([3, 4, 5, 6, 7, 8], [3, 4])
