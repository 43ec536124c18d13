"""The state's upkeep: when it is looked at, and what happens to cells, doubts and pruned windows."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyroaring import BitMap64

from millrace.audit.contract.group_counts import Claim
from millrace.audit.keeping import upkeep
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.keeping.verdict_files import SettledLines
from millrace.audit.keeping.waivers import Standing
from millrace.audit.reconciliation.row_parts import parts_of
from millrace.audit.reconciliation.settled import (
    LINE_SCHEMA,
    lines_of,
    number_rows,
)
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.reconciliation.watermark import Waiver
from millrace.audit.runs import resting
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.fact_rows import PrunedWindows
from millrace.audit.runs.next_commit import keep_verdicts, leaving_no_trace
from millrace.audit.runs.run import Findings
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.spark.spark_cells import folded
from tests.unit.audit_job.upkeep_stage import KEEP_MS, STREAM, cell, ledger_of, row, run_of


def test_it_is_looked_at_from_time_to_time_or_when_files_are_many():
    before = Commit(number=3, folded_ms=100)
    assert not upkeep.is_due(before, 3, 300, 109)
    assert upkeep.is_due(before, 3, 300, 110)
    assert upkeep.is_due(before, upkeep.FOLD_FILES, None, 100)
    assert upkeep.is_due(before, 3, None, 100 + upkeep.FOLD_EVERY_MS), "whatever is kept for ever, too"
    assert not upkeep.is_due(before, 3, None, 99 + upkeep.FOLD_EVERY_MS)
    assert upkeep.is_due(before, 3, 10**15, 100 + upkeep.FOLD_EVERY_MS), "and for long"


class Cells:
    """A run's, of which none is of the tail."""

    def windows_of_tail(self):
        return set()

    def loose_files(self):
        return ["cells/new"]

    def fold(self, plan, rows, *, whole, resting=None):
        return ["cells/folded"], []


def test_what_the_roster_owes_of_a_pruned_window_is_in_its_line_and_nowhere_else(tmp_path):
    """Counted twice, it would be more than the window was waived for."""
    state = StateFolder.open(tmp_path)
    owed = verdict_rows([row(at, Verdict.UNKNOWN, stream="", unreported=((1, 2),)) for at in (0, 10)])
    rows = pa.concat_tables([verdict_rows([row(0)]), owed])
    numbered, nothing = number_rows(rows, LINE_SCHEMA.empty_table(), 0), rows.slice(0, 0)
    waived = [Standing(Waiver("flights", 0, "ops", "known", 1), stands=True)]
    findings = Findings(numbered, numbered, nothing, numbered, waived, {})
    captured = Capture(10**12, ledger_of((0, [1, 2, 3]), last=3))
    of_roster = lines_of(number_rows(owed, LINE_SCHEMA.empty_table(), 0))
    after = Commit(number=2, cells=["cells/new"])
    keep_verdicts(run_of(state, captured, owed=of_roster), after, Cells(), findings)
    kept = pa.concat_tables(parts_of(SettledLines(state, after.verdicts), ["window_start_ms", "folded"]))
    assert [tuple(line.values()) for line in kept.to_pylist()] == [(10, False), (0, True)]


@pytest.mark.parametrize(
    ("loose", "may_unite", "is_folded"),
    [
        (["cells/a-folded/1", "cells/b/1"], True, True),
        (["cells/a-folded/1", "cells/b-folded/1"], True, False),
        (["cells/a/1", "cells/b/1"], False, False),
        (["cells/a/1"] * upkeep.FOLD_FILES, False, True),
        ([], True, False),
    ],
    ids=["new cells", "folded already", "places decide", "many files", "none"],
)
def test_cells_of_proven_windows_are_united_once_a_day(tmp_path, monkeypatch, loose, may_unite, is_folded):
    """They may be one for each record; but what a fold has made stays as it is until there is more."""
    monkeypatch.setattr("millrace.audit.keeping.uniting.may_unite", lambda *_: may_unite)

    class OfSomeDays(Cells):
        def loose_files(self):
            return loose

    state = StateFolder.open(tmp_path)
    captured = Capture(10**12, ledger_of((10**12 - 20, [1, 2, 3]), last=3))
    rows = verdict_rows([row(10**12 - 20)])
    numbered = number_rows(rows, LINE_SCHEMA.empty_table(), 10**12)
    findings = Findings(rows, rows, rows.slice(0, 0), numbered, [], {})
    after = Commit(cells=["cells/new"])
    keep_verdicts(run_of(state, captured), after, OfSomeDays(), findings)
    assert after.cells == (["cells/folded"] if is_folded else ["cells/new"])
    assert (after.folded_ms == 10**12) is is_folded
    assert state.files.entries("verdicts") or not is_folded


@pytest.mark.parametrize(
    ("loose", "rest_rows", "is_kept"),
    [(["cells/a/1"] * upkeep.FOLD_FILES, 9, True), ([], 1, True), ([], 9, False)],
    ids=["many files", "laid to rest", "not folded"],
)
def test_what_came_late_is_kept_as_a_count_when_a_fold_takes_its_cells(
    tmp_path, monkeypatch, loose, rest_rows, is_kept
):
    """Whatever it folds for, also where nothing is pruned; while its cells stay, the next run counts them."""
    monkeypatch.setattr(resting, "REST_ROWS", rest_rows)

    class Loose(Cells):
        def loose_files(self):
            return loose

    state, what = StateFolder.open(tmp_path), f"{upkeep.LATE}, in agg, topic flights"
    captured = Capture(10**12, ledger_of((10**12 - 20, [1, 2, 3]), last=3))
    numbered = number_rows(verdict_rows([row(10**12 - 20)]), LINE_SCHEMA.empty_table(), 10**12)
    findings = Findings(numbered, numbered, numbered.slice(0, 0), numbered, [], {})
    job = run_of(state, captured, late={what: 3}, late_again={what: 1})
    after = Commit(cells=["cells/new"], untrusted={what: 4})
    keep_verdicts(job, after, Loose(), findings)
    assert after.untrusted == {what: 6 if is_kept else 4}
    assert bool(after.resting) is (rest_rows == 1)


def test_the_cells_of_a_stream_that_is_forgotten_go_with_it(tmp_path):
    """Pruned and forgotten in one fold: what stays of its cells would come back as a stranger's."""
    state = StateFolder.open(tmp_path)
    cells = pa.Table.from_pylist([cell(0, [1, 2, 3])], CELL_SCHEMA)
    left = []

    class Folded(Cells):
        def fold(self, plan, rows, *, whole, resting=None):
            assert whole, "the window may have cells anywhere"
            table = state.read_table(plan)
            left.append(folded(cells, table.filter(pc.equal(table["stream"], STREAM))))
            return super().fold(plan, rows, whole=whole)

    captured = Capture(10**12, ledger_of((0, [1, 2, 3]), last=3))
    rows = verdict_rows([row(0)])
    numbered = number_rows(rows, LINE_SCHEMA.empty_table(), 0)
    findings = Findings(rows, rows, rows.slice(0, 0), numbered, [], {})
    job, after = run_of(state, captured), Commit(cells=["cells/new"])
    ended, lasting = (("billing", "0" * 16, Claim(5, 0, at_ms)) for at_ms in (-(10**9), 10**12))
    after.claims = [ended, lasting]
    keep_verdicts(job, after, Folded(), findings)
    assert [each.num_rows for each in left] == [0] and after.claims == [lasting]
    assert after.cells == ["cells/folded"] and state.read_table(after.events).num_rows == 0
    with leaving_no_trace(job):
        state.commit(replace(after, number=2))
    assert len(list((tmp_path / "events").iterdir())) == 1


def test_old_counts_of_unaudited_records_end_and_doubts_never_do():
    old, new, strange = (f"unaudited/{name}" for name in ("old", "new", "strange"))
    before = {old: 1, new: 2, strange: 3, "malformed batch, in ewr": 4}
    counts, ages = upkeep.aged(before, {old: 0, new: 900, "malformed batch, in ewr": 0}, KEEP_MS, KEEP_MS)
    assert counts == {new: 2, strange: 3, "malformed batch, in ewr": 4}
    assert ages == {new: 900, strange: KEEP_MS, "malformed batch, in ewr": 0}
    assert upkeep.aged({old: 1}, {old: 0}, None, 10**15)[0] == {old: 1}


def test_pruned_windows_are_read_back_as_they_were():
    left = PrunedWindows(10, BitMap64([0, 7]), BitMap64(range(1, 100_000)), True)
    back = PrunedWindows.decode(left.encode())
    assert (back.window_ms, back.windows, back.sequences, back.counted) == (
        10,
        left.windows,
        left.sequences,
        True,
    )
    left.add(20, 25)
    assert left.windows == BitMap64([0, 2, 3, 4, 7])
