"""Why something is unknown and what to do about it, in words that fit the tier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.audit.config import parse_config
from millrace.audit.contract.events import EventLedger
from millrace.audit.reconciliation.reconcile import reconcile_stream
from millrace.audit.reconciliation.tier_reading import Gap, Passage, TierReading, UnreadRange
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import PRODUCED, Verdict, WindowState
from millrace.audit.report.html import render
from millrace.audit.report.notes import told, window_notes
from millrace.audit.report.reasons import UNREPORTED, advice
from millrace.audit.report.summary import summarise
from millrace.audit.report.tier_states import tier_state
from millrace.audit.runs.backfill import report_folder, sentence
from millrace.audit.scanning.cells import merge_cells
from tests.browser.report_data import HOUR_MS, START_MS, TIERS, row
from tests.unit.audit.test_reconcile import MINUTE_MS, NOW_MS, PLACE, cells, facts

HOP, TO_GROUP = ("ewr", "agg"), ("agg", "group:billing")
IDLE = "group billing does not read topic orders; name its topics"


def summary_of(*rows: Any, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"untrusted": {}, "unaudited": {}, **more}
    return summarise(verdict_rows(rows), tiers=TIERS, at_ms=START_MS, window_ms=HOUR_MS, **fields)


def unknown(**more: Any) -> Any:
    return row("a@ewr", 0, verdict=Verdict.UNKNOWN, **more)


def told_of(*rows: Any) -> list[str]:
    return [each["reason"] for each in summary_of(*rows)["reasons"]]


def test_what_is_on_its_way_unreported_or_in_a_gap_is_among_the_reasons() -> None:
    assert told_of(unknown(in_flight={HOP: ((1, 2),)})) == ["in flight to tier agg"]
    assert told_of(unknown(unreported=((5, 6),))) == [UNREPORTED]
    assert told_of(unknown(explained={"too_large": ((1, 1),)})) == [
        "a gap that the mirror recorded: too_large"
    ]
    both = unknown(in_flight={HOP: ((1, 2),), TO_GROUP: ((9, 9),)}, reasons=(IDLE,))
    assert sorted(told_of(both)) == [IDLE, "in flight to tier agg"], "told once, and by its own cause"


@pytest.mark.parametrize(
    ("hops", "reasons", "words"),
    [
        ([HOP], (), "when the mirror has caught up"),
        ([TO_GROUP], (), "when group billing has committed them"),
        ([HOP, TO_GROUP], (), "when the mirror has caught up"),
        ([TO_GROUP], (IDLE,), "groups: {cluster: [{name"),
    ],
)
def test_the_next_step_for_records_on_their_way_fits_the_tier(hops: Any, reasons: Any, words: str) -> None:
    found = summary_of(unknown(in_flight=dict.fromkeys(hops, ((1, 2),)), reasons=reasons))
    assert words in found["next"]
    assert ("mirror" in found["next"]) == (HOP in hops)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("part of tier agg could not be read: expired", "run it more often, or keep data longer"),
        ("part of tier agg could not be read: recreated", "made anew"),
        ("part of tier agg could not be read: truncated", "millrace audit waive"),
        ("part of tier agg could not be read: a transaction is open", "when it has ended"),
        ("part of tier group:g could not be read: the group has not reported", "AuditedConsumer"),
        ("part of tier group:g could not be read: the group's first report is later", "began to count"),
        ("part of tier group:g could not be read: consumer 1 counted 3 records", "next report"),
        ("in flight to tier group:g", "group has read"),
        ("in flight to tier agg", "mirror has caught up"),
        ("a gap before tier agg", "mirror"),
        (UNREPORTED, "If it keeps a journal"),
        ("the producer fell silent: what it sent after its last report is not known", "With a journal"),
        (IDLE, "name: the group"),
        ("group g has committed nothing of topic t, which the config says it reads", "subscribe"),
    ],
)
def test_every_reason_has_advice_that_fits_its_tier(reason: str, words: str) -> None:
    assert words in advice(reason)
    if "group" in reason:
        assert "mirror" not in advice(reason)


def test_what_retention_took_has_a_next_step() -> None:
    found = summary_of(unknown(unknown=((3, 9),), reasons=("part of tier agg could not be read: expired",)))
    assert found["next"].startswith("Part of tier agg could not be read: expired. Records were deleted")
    assert "millrace audit waive" in found["next"]


def states(each: Any) -> dict[str, str]:
    (told_row,) = verdict_rows([each]).to_pylist()
    detail = json.loads(told_row["detail"])
    return {tier: tier_state(told_row, detail, tier).state for tier, _ in told_row["consumed"]}


@pytest.mark.parametrize(
    ("more", "ewr", "agg"),
    [
        ({"verdict": Verdict.LOSS, "missing_count": {HOP: 3}}, "COUNT_MATCH", "LOSS"),
        ({"verdict": Verdict.LOSS, "missing_count": {(PRODUCED, "ewr"): 3}}, "LOSS", "COUNT_MATCH"),
        ({"verdict": Verdict.DUPLICATE, "extra_copies": {"agg": 3}}, "COUNT_MATCH", "DUPLICATE"),
        ({"verdict": Verdict.UNKNOWN, "reasons": ("in flight to tier agg",)}, "COUNT_MATCH", "UNKNOWN"),
        ({"verdict": Verdict.UNKNOWN, "reasons": ("a gap before tier agg",)}, "COUNT_MATCH", "UNKNOWN"),
        (
            {"verdict": Verdict.UNKNOWN, "reasons": ("part of tier ewr could not be read: expired",)},
            "UNKNOWN",
            "COUNT_MATCH",
        ),
        ({"verdict": Verdict.UNKNOWN, "reasons": ("no report tells of this window",)}, "UNKNOWN", "UNKNOWN"),
        ({"verdict": Verdict.UNKNOWN}, "UNKNOWN", "UNKNOWN"),
        ({"verdict": Verdict.LOSS, "missing": {HOP: ((1, 2),)}}, "PROVEN", "LOSS"),
        (
            {
                "verdict": Verdict.LOSS,
                "missing": {HOP: ((1, 2),)},
                "reasons": ("two producers use one stream id",),
            },
            "UNKNOWN",
            "LOSS",
        ),
        (
            {
                "verdict": Verdict.UNKNOWN,
                "unknown": ((1, 2),),
                "reasons": ("part of tier agg could not be read: expired",),
            },
            "PROVEN",
            "UNKNOWN",
        ),
        ({"verdict": Verdict.UNKNOWN, "in_flight": {HOP: ((1, 2),)}}, "PROVEN", "UNKNOWN"),
        ({"verdict": Verdict.UNKNOWN, "unreported": ((1, 2),)}, "UNKNOWN", "UNKNOWN"),
        (
            {
                "verdict": Verdict.UNKNOWN,
                "explained": {"too_large": ((1, 2),)},
                "seen": {"ewr": 1000, "agg": 998},
            },
            "PROVEN",
            "UNKNOWN",
        ),
        ({"verdict": Verdict.UNKNOWN, "explained": {"expired": ((1, 2),)}}, "UNKNOWN", "UNKNOWN"),
        ({"verdict": Verdict.UNKNOWN, "state": WindowState.OPEN, "reasons": ("x",)}, "OPEN", "OPEN"),
    ],
)
def test_each_tier_is_painted_with_its_own_verdict(more: Any, ewr: str, agg: str) -> None:
    found = states(row("a@ewr", 0, **more))
    assert (found["ewr"], found["agg"]) == (ewr, agg)


def test_reasons_of_a_counting_producer_are_those_that_tiers_are_painted_by() -> None:
    """The words come from `count_only`; were they changed there, every tier would be painted unknown."""
    stream = facts({0: 10}, count_only=True, last=10)
    readings = [
        TierReading("ewr"),
        TierReading("agg", "ewr", passed={PLACE: Passage(0)}),
        TierReading("late", "ewr", passed={PLACE: Passage(0)}, idle=IDLE),
    ]
    seen = merge_cells(cells("ewr", range(1, 11), cluster="ewr"))
    (found, *_) = reconcile_stream(stream, seen, readings, window_ms=MINUTE_MS, grace_ms=0, now_ms=NOW_MS)
    assert found.verdict is Verdict.UNKNOWN
    assert set(found.reasons) == {"in flight to tier agg", IDLE}


def test_a_group_that_does_not_read_the_topic_is_named_in_the_row() -> None:
    readings = [TierReading("ewr"), TierReading("group:billing", "ewr", idle=IDLE)]
    seen = merge_cells(cells("ewr", range(1, 11), cluster="ewr"))
    (found,) = reconcile_stream(
        facts({0: range(1, 11)}), seen, readings, window_ms=MINUTE_MS, grace_ms=0, now_ms=NOW_MS
    )
    assert found.verdict is Verdict.UNKNOWN and found.reasons == (IDLE,)
    assert found.in_flight == {("ewr", "group:billing"): ((1, 10),)}


def test_reasons_of_numbered_records_are_those_that_tiers_are_painted_by() -> None:
    seen = merge_cells(cells("ewr", range(1, 11), cluster="ewr"))
    gap, gone = Gap(PLACE, 5, 6, "too_large"), UnreadRange(PLACE, 0, 0, "expired")
    for reading in (
        TierReading("agg", "ewr", passed={PLACE: Passage(1000)}, gaps=[gap]),
        TierReading("agg", "ewr", passed={PLACE: Passage(1000)}, unread=[gone]),
    ):
        (found,) = reconcile_stream(
            facts({0: range(1, 11)}),
            seen,
            [TierReading("ewr"), reading],
            window_ms=MINUTE_MS,
            grace_ms=0,
            now_ms=NOW_MS,
        )
        assert found.verdict is Verdict.UNKNOWN and found.reasons
        painted = states(found)
        assert painted == {"ewr": "PROVEN", "agg": "UNKNOWN"}, found.reasons


def test_windows_of_another_length_are_told_and_change_no_verdict(tmp_path: Path) -> None:
    other = {0: {"window_ms": 600_000}}
    streams = [facts({0: range(1, 3)}, reports=other), facts({0: range(1, 3)})]
    (note,) = told(window_notes(streams, ["flights"], MINUTE_MS))
    assert note == (
        "Producer AA counts in topic flights with windows of 10m, where the config says 1m: these are "
        "compared in the shortest length that both divide."
    )
    assert list(window_notes(streams, ["orders"], MINUTE_MS)) == []
    assert list(window_notes(EventLedger().streams.values(), ["flights"], MINUTE_MS)) == []
    rows = verdict_rows([row("a@ewr", 0)])
    summary = summary_of(row("a@ewr", 0), notes=[note])
    assert summary["verdict"] == "PROVEN" and summary["notes"] == [note]
    assert "windows of 10m, where the config says 1m" in render(summary, rows)


def test_a_backfill_names_its_windows_and_says_when_they_are_more_than_was_asked_for() -> None:
    config = parse_config(
        {
            "clusters": {"ewr": {"bootstrap": ["h:1"], "tier": "source"}},
            "topics": ["orders"],
            "window": "1h",
            "report": "/r",
        }
    )
    only = (1_356_998_400_000 + 60_000, 1_357_002_000_000 + 1)  # 2013-01-01, 00:01 to 01:00 and a bit
    assert sentence(config, only) == (
        "backfill of the windows from 2013-01-01T00:00:00Z to 2013-01-01T02:00:00Z "
        "(asked: from 2013-01-01T00:01:00Z to 2013-01-01T01:00:00Z; windows are computed whole)"
    )
    assert report_folder(config, only).name == "backfill-20130101T000000Z-20130101T020000Z"
    assert sentence(config, (0, HOUR_MS)).endswith("1970-01-01T01:00:00Z")
    assert report_folder(config, None) == Path("/r")
