"""The one word of the summary, and what a script learns from the exit status."""

from __future__ import annotations

import pytest

from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.report.html import render
from millrace.audit.report.metrics import metrics_text
from millrace.audit.report.summary import exit_status, summarise


def summary_of(*rows, untrusted=None):
    table = verdict_rows(rows)
    made = summarise(table, tiers=["agg"], at_ms=0, window_ms=1000, untrusted=untrusted or {}, unaudited={})
    assert render(made, table) and metrics_text(made)
    return made


def row(verdict, state=WindowState.SETTLED, start_ms=0):
    return WindowVerdict("flights", "AA", "ab", start_ms, 1000, state, verdict, published=3)


@pytest.mark.parametrize(
    ("rows", "verdict", "status"),
    [
        ([Verdict.PROVEN], "PROVEN", 0),
        ([Verdict.PROVEN, Verdict.COUNT_MATCH], "COUNT_MATCH", 0),
        ([Verdict.COUNT_MATCH, Verdict.UNKNOWN], "UNKNOWN", 2),
        ([Verdict.UNKNOWN, Verdict.DUPLICATE], "DUPLICATE", 1),
        ([Verdict.DUPLICATE, Verdict.LOSS], "LOSS", 1),
        ([], "UNKNOWN", 2),
    ],
)
def test_the_worst_word_wins_and_sets_the_exit_status(rows, verdict, status):
    made = summary_of(*(row(each) for each in rows))
    assert (made["verdict"], exit_status(made)) == (verdict, status)


def test_matching_counts_are_never_told_as_each_exactly_once():
    assert "exactly once" in summary_of(row(Verdict.PROVEN))["sentence"]
    assert "exactly once" not in summary_of(row(Verdict.COUNT_MATCH))["sentence"]


def test_open_windows_prove_nothing_but_a_loss_in_one_is_told():
    assert summary_of(row(Verdict.PROVEN, WindowState.OPEN))["verdict"] == "UNKNOWN"
    lost = summary_of(row(Verdict.PROVEN), row(Verdict.LOSS, WindowState.OPEN, 1000))
    assert lost["verdict"] == "LOSS"


def test_a_proof_beside_something_that_cannot_be_trusted_is_none():
    assert summary_of(row(Verdict.PROVEN), untrusted={"malformed batch": 1})["verdict"] == "UNKNOWN"
