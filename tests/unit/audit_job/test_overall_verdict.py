"""The one word of the summary, and what a script learns from the exit status."""

from __future__ import annotations

from itertools import combinations_with_replacement, product

import pytest

from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import (
    Verdict,
    WindowState,
    WindowVerdict,
    status_of,
)
from millrace.audit.report.console import console_lines
from millrace.audit.report.html import render
from millrace.audit.report.metrics import metrics_text
from millrace.audit.report.summary import exit_status, summarise
from tests.verdicts import overall_verdict


def summed(table, untrusted=None, **more):
    settings = {"tiers": ["agg"], "at_ms": 0, "window_ms": 1000, "unaudited": {}}
    return summarise(table, untrusted=untrusted or {}, **settings, **more)


def summary_of(*rows, **more):
    table = verdict_rows(rows)
    made = summed(table, **more)
    assert render(made, table) and metrics_text(made)
    return made


def row(verdict, state=WindowState.SETTLED, start_ms=0, **more):
    return WindowVerdict("flights", "AA", "ab", start_ms, 1000, state, verdict, published=3, **more)


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


@pytest.mark.parametrize("untrusted", [{}, {"malformed batch": 1}])
def test_report_topic_producer_and_status_say_what_all_rows_fold_into(untrusted):
    """Whatever two rows say, settled or open: one rule for the word, each part of it and the status."""
    kinds = list(product(Verdict, WindowState))
    for first, second in combinations_with_replacement(kinds, 2):
        rows = [row(*first), row(*second, start_ms=1000)]
        made = summed(verdict_rows(rows), untrusted)
        folded = overall_verdict(rows, bool(untrusted))
        assert (made["verdict"], exit_status(made)) == (str(folded), status_of(folded)), (first, second)
        parts = {each["verdict"] for name in ("topics", "producers") for each in made[name]}
        assert parts == {str(overall_verdict(rows))}, (first, second)


def test_what_is_waived_keeps_its_word_and_does_not_decide_the_status():
    lost, silent = row(Verdict.LOSS), row(Verdict.UNKNOWN, start_ms=None)
    rows = verdict_rows([lost, silent, row(Verdict.PROVEN, start_ms=1000)])
    waived = [("flights", 0), ("flights", "ab")]
    assert [exit_status(summed(rows, waived=waived[:number])) for number in range(3)] == [1, 2, 0]
    assert summed(rows, waived=waived)["verdict"] == "LOSS"
    assert exit_status(summed(verdict_rows([lost]), waived=[("hotels", 0)])) == 1
    doubted = summed(verdict_rows([row(Verdict.PROVEN)]), {"malformed batch": 1}, in_doubt=False)
    assert (doubted["verdict"], exit_status(doubted)) == ("UNKNOWN", 0)


def test_what_is_older_than_the_horizon_is_told_and_decides_nothing():
    lost = row(Verdict.LOSS, missing={("ewr", "agg"): ((2, 2),)})
    older = verdict_rows([lost, row(Verdict.UNKNOWN, start_ms=None)])
    rows = verdict_rows([row(Verdict.PROVEN, start_ms=1000)])
    made = summed(rows, older=older, since_ms=1000)
    assert (made["verdict"], exit_status(made), made["counts"]["missing"]) == ("PROVEN", 0, 0)
    told = "1 record lost, 1 stream in doubt: of before 1970-01-01T00:00:01Z"
    assert any(told in line for line in console_lines(made, "page", "audit.yaml", 0))
    assert told in render(made, rows) and metrics_text(made)
    doubted = summed(rows, {"malformed batch": 1}, doubted=False, older_untrusted=["malformed batch"])
    assert (doubted["verdict"], exit_status(doubted), doubted["untrusted"][0]["older"]) == ("PROVEN", 0, True)
    assert "not in the verdict" in render(doubted, rows)


def test_a_loss_that_is_waived_stays_in_the_report_as_waived():
    lost = row(Verdict.LOSS, missing={("ewr", "agg"): ((2, 2),)})
    made = summed(verdict_rows([lost, row(Verdict.LOSS, start_ms=1000)]), waived=[("flights", 0)])
    assert [each.get("waived", False) for each in made["losses"]] == [True]
    assert any("#2, waived" in line for line in console_lines(made, "page", "audit.yaml", 1))


def test_nothing_lost_is_not_said_beside_what_is_not_proven():
    twice = row(Verdict.DUPLICATE, extra_copies={"agg": 1})
    assert summary_of(twice)["sentence"] == "Nothing of 3 records was lost, but 1 extra copy arrived."
    waiting = row(Verdict.UNKNOWN, start_ms=1000, in_flight={("ewr", "agg"): ((1, 2),)})
    assert summary_of(twice, waiting)["sentence"] == (
        "No loss was found among 6 records, but 1 extra copy arrived, and not all is proven: 2 records still "
        "on the way."
    )
    still_open = summary_of(twice, row(Verdict.PROVEN, WindowState.OPEN, 1000))["sentence"]
    assert still_open.endswith("and not all is proven: 1 window is still open (3 records acknowledged).")
