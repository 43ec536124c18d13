"""Revisions of settled verdicts, and the one line that stays of a pruned window."""

from __future__ import annotations

from millrace.audit.reconciliation.settled import revisions_of, settle, settled_now, table_digest, without
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict

TOPICS = ["flights"]
LOST = {("ewr", "agg"): ((3, 3),)}


def rows(*verdicts):
    return verdict_rows(verdicts)


def row(start_ms=0, verdict=Verdict.PROVEN, state=WindowState.SETTLED, stream="01", **more):
    fields = {"topic": "flights", "producer": "AA", "window_ms": 10, "published": 5, "consumed": {"agg": 5}}
    return WindowVerdict(
        **{**fields, **more}, stream=stream, window_start_ms=start_ms, state=state, verdict=verdict
    )


def test_a_verdict_that_stays_keeps_its_number_and_the_time_it_was_made():
    first = settle(rows(row()), None, TOPICS, 100)
    second = settle(rows(row()), first.table, TOPICS, 200)
    assert second.numbers.to_pylist() == [1]
    assert second.table.to_pylist()[0]["settled_ms"] == 100
    assert table_digest(first.table) == table_digest(second.table)
    assert revisions_of(second.table) == []


def test_late_data_makes_a_numbered_revision_that_names_both_verdicts():
    first = settle(rows(row()), None, TOPICS, 100)
    changed = row(verdict=Verdict.DUPLICATE, extra_copies={"agg": 1}, duplicates={"agg": ((3, 3),)})
    second = settle(rows(changed), first.table, TOPICS, 200)
    assert second.numbers.to_pylist() == [2] and table_digest(first.table) != table_digest(second.table)
    (told,) = revisions_of(second.table)
    assert (told["revision"], told["before"], told["after"]) == (2, "PROVEN", "DUPLICATE")
    assert told["window_start"] == "1970-01-01T00:00:00Z"
    third = settle(rows(changed), second.table, TOPICS, 300)
    assert third.numbers.to_pylist() == [2] and revisions_of(third.table) == [told]


def test_more_of_the_same_is_a_revision_too_but_reasons_and_places_are_not():
    lost = {("ewr", "agg"): ((3, 3),)}
    first = settle(rows(row(verdict=Verdict.LOSS, missing=lost)), None, TOPICS, 1)
    same = settle(rows(row(verdict=Verdict.LOSS, missing=lost, reasons=("why",))), first.table, TOPICS, 2)
    assert same.numbers.to_pylist() == [1]
    more = row(verdict=Verdict.LOSS, missing={("ewr", "agg"): ((3, 4),)})
    assert settle(rows(more), same.table, TOPICS, 3).numbers.to_pylist() == [2]


def test_an_open_window_has_no_number_and_one_that_opens_again_keeps_its_last_verdict():
    first = settle(rows(row(state=WindowState.OPEN)), None, TOPICS, 1)
    assert first.numbers.to_pylist() == [0] and first.table.num_rows == 0
    settled = settle(rows(row()), first.table, TOPICS, 2)
    again = settle(rows(row(state=WindowState.OPEN)), settled.table, TOPICS, 3)
    assert again.numbers.to_pylist() == [1] and revisions_of(again.table) == []
    assert again.table.to_pylist() == [{**settled.table.to_pylist()[0], "open": True}]


def test_an_unknown_that_is_proven_by_now_is_open_until_its_producer_promises_and_then_revised():
    """It counts as nothing meanwhile: not as the doubt that is gone, and not as a proof."""
    doubted = settle(rows(row(verdict=Verdict.UNKNOWN, in_flight=LOST)), None, TOPICS, 1)
    assert settled_now(doubted.table).num_rows == 1
    arrived = settle(rows(row(state=WindowState.OPEN)), doubted.table, TOPICS, 2)
    assert settled_now(arrived.table).num_rows == 0
    promised = settle(rows(row()), arrived.table, TOPICS, 3)
    assert promised.numbers.to_pylist() == [2] and settled_now(promised.table).num_rows == 1
    assert [(each["before"], each["after"]) for each in revisions_of(promised.table)] == [
        ("UNKNOWN", "PROVEN")
    ]


def test_a_table_of_an_older_program_has_no_windows_that_are_open_again():
    first = settle(rows(row()), None, TOPICS, 1).table
    assert settled_now(first.drop_columns(["open"])).num_rows == 1
    assert settle(rows(row()), first.drop_columns(["open"]), TOPICS, 2).table == first


def test_a_streams_own_row_goes_when_its_doubt_is_gone_and_a_topic_that_is_not_audited_goes_too():
    own = row(None, Verdict.UNKNOWN)
    first = settle(rows(row(), own), None, TOPICS, 1)
    assert first.table.num_rows == 2
    second = settle(rows(row()), first.table, TOPICS, 2)
    assert second.table["window_start_ms"].to_pylist() == [0]
    assert settle(rows(), second.table, ["other"], 3).table.num_rows == 0


def test_pruned_windows_become_one_line_with_the_sums_of_their_streams():
    table = settle(rows(row(), row(stream="02", published=7), row(10)), None, TOPICS, 1).table
    folded = without(table, [("flights", 0)])
    line, other = folded.to_pylist()
    assert (line["folded"], line["stream"], line["published"], line["verdict"]) == (True, "", 12, "PROVEN")
    assert (other["folded"], other["window_start_ms"]) == (False, 10)
    # It stays, whatever the rows say, and the streams' own lines do not come back.
    after = settle(rows(row(10)), folded, TOPICS, 9).table.to_pylist()
    assert [each["folded"] for each in after] == [True, False]
