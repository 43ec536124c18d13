"""`summary.json` is what its schema tells, and its parts add up to each other."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from millrace.audit.reconciliation.verdict_rows import Evidence, evident_rows, iso_time
from millrace.audit.reconciliation.verdicts import DIFFERS, Verdict, WindowState
from millrace.audit.report import document
from millrace.audit.report import tally as tally_module
from millrace.audit.report.console import console_lines
from millrace.audit.report.folder import note_failure, write_report
from millrace.audit.report.latency import Latencies, percentile
from millrace.audit.report.metrics import metrics_text
from millrace.audit.report.sentences import older_findings, sentence
from millrace.audit.report.summary import exit_status, summarise
from tests.browser.report_data import CONTROL, HOUR_MS, START_MS, TIERS, rich, row, without

SCHEMA = Path(document.__file__).with_name("summary.schema.json")


@pytest.fixture(scope="module")
def made() -> tuple[dict[str, Any], pa.Table]:
    return rich(3)


def summary_of(*rows: Any, **more: Any) -> dict[str, Any]:
    pairs = [each if isinstance(each, tuple) else (each, Evidence()) for each in rows]
    settings: dict[str, Any] = {"at_ms": START_MS, "window_ms": HOUR_MS, "untrusted": {}, "unaudited": {}}
    return summarise(evident_rows(pairs), tiers=TIERS, **{**settings, **more})


def test_the_summary_is_what_the_schema_tells(made: tuple[dict[str, Any], pa.Table]) -> None:
    document.SummaryDocument.model_validate(json.loads(json.dumps(made[0])))
    assert SCHEMA.read_text("utf-8") == document.schema_text(), "make it anew from report.document"
    told = set(json.loads(SCHEMA.read_text("utf-8"))["properties"])
    there_at_times = {"watermark_steps_back", "untrusted_waivers", "older", "run", "rows_at_rest"}
    more = {f"{each}_more" for each in ("losses", "duplicates", "differing", "revisions", "late")}
    assert set(made[0]) == told - there_at_times - more


def test_the_readme_shows_the_sentence_that_is_told_of_its_losses() -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text("utf-8")
    hops = re.findall(r"^lost .* between (\w+) and (\w+)$", text, re.M)
    losses = [{"lost_between": hop} for hop in hops]
    counts = {"missing": len(hops), "acknowledged": 336_776, "duplicates": 3, "seen": {"agg": 336_769}}
    told = {"verdict": "LOSS", "counts": counts, "losses": losses, "content": {"differs": 0}}
    assert f"\nLOSS   {sentence(told)}\n" in text


def test_a_loss_by_contents_is_named_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no missing record, but it is a finding like any other: where, and what to do."""
    monkeypatch.setattr(tally_module, "MOST_NAMED", 2)
    where = "content differs between ewr and agg"
    rows = [
        row("a@ewr", hour, count=5, verdict=Verdict.LOSS, content_checked=DIFFERS, reasons=(where,))
        for hour in range(3)
    ]
    waived = (rows[0].topic, START_MS)
    summary = summary_of(
        *rows, older=evident_rows([(rows[0], Evidence())]), waived=[waived], since_ms=START_MS
    )
    document.SummaryDocument.model_validate(json.loads(json.dumps(summary)))
    assert len(summary["differing"]) == 2
    first, second = summary["differing"]
    topic = rows[0].topic
    at = iso_time(START_MS)
    assert (first["topic"], first["producer"], first["window_start"]) == (topic, "a@ewr", at)
    assert (first["where"], first.get("waived"), second.get("waived")) == ([where], True, None)
    assert summary["differing_more"] == [{"topic": topic, "where": [where], "findings": 1}]
    assert summary["losses"] == [] and summary["next"] == f"millrace audit explain {topic} {at}"
    told = list(console_lines(summary, "index.html", "audit.yaml", 1))
    assert f"  differs      {topic} {at}, a@ewr: {where}, waived" in told
    assert not any(each.strip().startswith("unknown") for each in told)
    assert older_findings(summary).startswith("other content in 1 window: of before ")


def test_an_unknown_word_is_not_what_the_schema_tells(made: tuple[dict[str, Any], pa.Table]) -> None:
    with pytest.raises(ValidationError):
        document.SummaryDocument.model_validate({**made[0], "verdict": "FINE"})


def test_totals_agree_with_rows_topics_tiers_and_names(made: tuple[dict[str, Any], pa.Table]) -> None:
    summary, rows = made
    counts = summary["counts"]
    for name in ("missing", "duplicates", "unreported", "unknown", "explained", "in_flight"):
        assert (
            counts[name] == sum(rows[name].to_pylist()) == sum(each[name] for each in summary["topics"]) > 0
        )
    assert counts["acknowledged"] == sum(rows["published"].to_pylist())
    assert counts["missing"] == sum(each["count"] for each in summary["losses"])
    assert counts["duplicates"] == sum(each["count"] for each in summary["duplicates"])
    tiers = [tier for topic in summary["topics"] for tier in topic["tiers"]]
    assert sum(tier["missing"] for tier in tiers) == counts["missing"]
    seen: Counter[str] = Counter()
    for tier in tiers:
        seen[tier["tier"]] += tier["seen"]
    assert seen == counts["seen"]
    assert sum(summary["windows"].values()) == rows.num_rows - 1  # one row names no window
    windows: Counter[str] = Counter()
    for topic in summary["topics"]:
        windows.update(topic["windows"])
    assert windows == summary["windows"]


def test_rows_that_arrow_sums_say_what_they_say_one_by_one(
    made: tuple[dict[str, Any], pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"at_ms": START_MS, "window_ms": HOUR_MS, "untrusted": {}, "unaudited": {}}
    summed = summarise(made[1], tiers=TIERS, **settings)
    none = pa.array([False] * made[1].num_rows, pa.bool_())
    monkeypatch.setattr(tally_module, "is_calm", lambda rows: none)
    assert summarise(made[1], tiers=TIERS, **settings) == summed


def test_the_summary_is_the_same_however_the_rows_are_cut_and_ordered(
    made: tuple[dict[str, Any], pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"at_ms": START_MS, "window_ms": HOUR_MS, "untrusted": {}, "unaudited": {}}
    settings["waived"] = {(each["topic"], START_MS) for each in made[0]["losses"]}
    whole = summarise(made[1], tiers=TIERS, **settings)
    assert whole["losses"] and whole["reasons"] and whole["late"] and whole["latency"]
    backwards = made[1].take(list(reversed(range(made[1].num_rows))))
    for part_rows in (7, 500):
        monkeypatch.setattr(tally_module, "PART_ROWS", part_rows)
        assert summarise(made[1], tiers=TIERS, **settings) == whole
        assert summarise(backwards, tiers=TIERS, **settings) == whole


def test_late_records_and_late_reports_are_named_the_latest_first(
    made: tuple[dict[str, Any], pa.Table],
) -> None:
    late = made[0]["late"]
    assert [each["by_ms"] for each in late] == sorted((each["by_ms"] for each in late), reverse=True)
    kinds = {(each["producer"], each["kind"]) for each in late}
    assert kinds == {("slow-1@jfk", "report"), ("batch-1@ewr", "records")}
    (records,) = (each for each in late if each["kind"] == "records")
    assert records["by_ms"] == 4 * HOUR_MS


def test_what_is_within_the_grace_is_not_late() -> None:
    end_ms = START_MS + HOUR_MS
    times = Evidence({"ewr": [START_MS, end_ms + 5_000]})
    assert summary_of((row("a@ewr", 0), times), grace_ms=5_000)["late"] == []
    assert len(summary_of((row("a@ewr", 0), times), grace_ms=4_999)["late"]) == 1


def test_late_windows_are_counted_also_of_a_topic_whose_are_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One noisy topic must not make the figures of another vanish."""
    monkeypatch.setattr(tally_module, "MOST_LATE", 2)
    rows = [row("a@ewr", hour) for hour in range(4)]
    rows.append(replace(row("b@ewr", 0), topic="quiet"))
    summary = summary_of(
        *((each, Evidence({"ewr": [0, (each.window_start_ms or 0) + 2 * HOUR_MS]})) for each in rows)
    )
    noisy = rows[0].topic
    assert [each["topic"] for each in summary["late"]] == [noisy, noisy]
    assert summary["late_more"] == [
        {"topic": noisy, "kind": "records", "windows": 2},
        {"topic": "quiet", "kind": "records", "windows": 1},
    ]
    told = [
        line for line in metrics_text(summary).splitlines() if line.startswith("millrace_audit_late_windows{")
    ]
    assert sorted(line.rpartition(" ")[2] for line in told) == ["1.0", "4.0"]
    document.SummaryDocument.model_validate(json.loads(json.dumps(summary)))


def test_latency_is_told_by_hop_and_never_between_two_sources() -> None:
    times = Evidence(
        {"jfk": [1_000, 5_000], "ewr": [1_000, 5_000], "agg": [1_250, 5_900], "group:billing": [1_300, 6_000]}
    )
    told = summary_of((row("a@ewr", 0), times))["latency"]
    assert {tuple(each["between"]) for each in told} == {("jfk", "agg"), ("agg", "group:billing")}
    to_agg = next(each for each in told if each["between"][1] == "agg")
    assert (to_agg["p50_ms"], to_agg["p99_ms"], to_agg["max_ms"], to_agg["windows"]) == (250, 900, 900, 1)


def test_latency_of_a_stream_with_two_sources_is_from_both_as_one_tier() -> None:
    latencies = Latencies({"agg": ["ewr", "jfk"], "ewr": ["produced"], "jfk": ["produced"]})
    latencies.add("t", {"ewr+jfk": [0, 100], "agg": [10, 130]})
    assert latencies.told()[0]["between"] == ["ewr+jfk", "agg"]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_percentiles_are_nearest_ranks(share: float, value: int) -> None:
    assert percentile([(each, 1) for each in range(1, 101)], share) == value


@pytest.mark.parametrize(("share", "value"), [(0.3, 1), (0.31, 40), (0.5, 50), (0.98, 98), (1.0, 99)])
def test_a_sample_counts_as_often_as_it_was_seen(share: float, value: int) -> None:
    assert percentile([(1, 30), (40, 10), (50, 10), (98, 48), (99, 2)], share) == value


def test_a_total_loss_is_said_as_one() -> None:
    nothing = {"ewr": 1000, "agg": 0}
    missing = {("ewr", "agg"): ((1, 1000),)}
    lost = row("a@ewr", 0, verdict=Verdict.LOSS, missing=missing, consumed=nothing, seen=nothing)
    assert summary_of(lost)["sentence"] == "All 1,000 acknowledged records were lost between ewr and agg."


def test_a_topic_that_lost_everything_is_told_before_whatever_else_was_found() -> None:
    nothing = {"ewr": 1000, "agg": 0}
    all_of_it = {"missing": {("ewr", "agg"): ((1, 1000),)}, "consumed": nothing, "seen": nothing}
    rows = [
        row("a@ewr", 0, verdict=Verdict.LOSS, missing={("ewr", "agg"): ((7, 7),)}, **without("agg", 1)),
        row("b@ewr", 1, verdict=Verdict.DUPLICATE, extra_copies={"agg": 2}),
        row("c@ewr", 2, verdict=Verdict.UNKNOWN, unknown=((1, 9),)),
        row("d@ewr", 3, topic="returns", verdict=Verdict.LOSS, **all_of_it),
    ]
    for order in (rows, rows[::-1]):
        summary = summary_of(*order)
        assert summary["sentence"].startswith(
            "Nothing that was acknowledged of topic returns arrived in agg. 1,001 of 4,000 acknowledged"
        )
        assert exit_status(summary) == 1
        first, *_ = console_lines(summary, "index.html", "audit.yaml", 1)
        assert "Nothing that was acknowledged of topic returns arrived in agg" in first


def test_a_topic_of_which_something_arrived_or_is_on_its_way_is_no_total_loss() -> None:
    one_came = {"ewr": 1000, "agg": 1}
    missing = {("ewr", "agg"): ((2, 1000),)}
    lost = row("a@ewr", 0, verdict=Verdict.LOSS, missing=missing, consumed=one_came, seen=one_came)
    none_yet = {"ewr": 1000, "agg": 0}
    on_its_way = {("ewr", "agg"): ((1, 1000),)}
    under_way = row(
        "b@ewr",
        0,
        topic="returns",
        state=WindowState.OPEN,
        in_flight=on_its_way,
        consumed=none_yet,
        seen=none_yet,
    )
    assert summary_of(lost, under_way)["sentence"].startswith("999 of 2,000 acknowledged")


def test_as_many_lost_as_were_acknowledged_need_not_be_the_same_ones() -> None:
    both = dict.fromkeys(("ewr", "jfk", "agg", "group:billing"), 1000)
    missing = {("ewr", "agg"): ((1001, 2000),)}
    lost = row(
        "a@ewr",
        0,
        verdict=Verdict.LOSS,
        missing=missing,
        consumed=both,
        seen=both,
        unreported=((1001, 2000),),
    )
    assert summary_of(lost)["sentence"].startswith("1,000 of 1,000 acknowledged")


def test_a_loss_of_content_alone_is_said_and_never_as_lost_records() -> None:
    changed = row("a@ewr", 0, verdict=Verdict.LOSS, content_checked="differs")
    summary = summary_of(changed)
    assert summary["sentence"] == "In 1 window records arrived with other content than was sent."
    assert summary["content"] == {"compared": 0, "not_compared": 0, "differs": 1}


def test_the_next_step_names_the_window_to_look_at() -> None:
    lost = row("a@ewr", 3, verdict=Verdict.LOSS, missing={("ewr", "agg"): ((1, 1),)})
    assert summary_of(lost)["next"] == "millrace audit explain orders 2026-03-02T03:00:00Z"
    assert summary_of(row("a@ewr", 0))["next"] == ""
    waiting = row("a@ewr", 3, verdict=Verdict.UNKNOWN, in_flight={("ewr", "agg"): ((1, 1),)})
    assert "caught up" in summary_of(waiting)["next"]


def test_an_open_topic_is_not_called_proven() -> None:
    summary = summary_of(row("a@ewr", 0, state=WindowState.OPEN), row("a@ewr", 0, topic="flights"))
    assert {each["topic"]: each["verdict"] for each in summary["topics"]} == {
        "flights": "PROVEN",
        "orders": "UNKNOWN",
    }


def test_a_producer_whose_windows_are_all_open_is_not_called_proven() -> None:
    """Killed a moment ago, it has told of nothing yet; a loss in it is told all the same."""
    summary = summary_of(
        row("open@ewr", 0, state=WindowState.OPEN),
        row("lost@ewr", 0, state=WindowState.OPEN, verdict=Verdict.LOSS, missing={("ewr", "agg"): ((1, 1),)}),
        row("both@ewr", 0),
        row("both@ewr", 1, state=WindowState.OPEN, verdict=Verdict.UNKNOWN),
    )
    assert {each["producer"]: each["verdict"] for each in summary["producers"]} == {
        "open@ewr": "UNKNOWN",
        "lost@ewr": "LOSS",
        "both@ewr": "PROVEN",
    }


def test_the_folder_is_written_whole_and_what_cannot_be_utf8_is_escaped(tmp_path: Path) -> None:
    rows = evident_rows([(row(CONTROL, 0), Evidence())])
    summary = summary_of(row(CONTROL, 0), untrusted={"half \ud800 a pair": 1})
    write_report(tmp_path, summary, rows)
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == summary
    assert pq.read_table(tmp_path / "reconciliation.parquet").num_rows == 1
    assert "half \\ud800 a pair" in (tmp_path / "index.html").read_text("utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "index.html",
        "metrics.prom",
        "producers.parquet",
        "reconciliation.parquet",
        "summary.json",
    ]


def test_programs_find_a_row_for_each_producer_and_window_whose_sums_agree_with_the_sets(tmp_path) -> None:
    """A producer has a stream for each of its starts; what is lost in one is not made up for by another."""
    consumed = {"ewr": 10, "agg": 9}
    lost = row("a@ewr", 0, verdict=Verdict.LOSS, missing={("ewr", "agg"): ((1, 1),)}, published=10)
    again = replace(row("a@ewr", 0), stream="ff" * 8, published=3, consumed={"ewr": 3, "agg": 4})
    twice = replace(again, verdict=Verdict.DUPLICATE, duplicates={"agg": ((3, 3),)}, extra_copies={"agg": 1})
    verdicts = [
        replace(lost, consumed=consumed),
        twice,
        row("a@ewr", 1, state=WindowState.OPEN, consumed={}),
        replace(row("b@jfk", 0), published=2, consumed={"jfk": 2}),
    ]
    rows = evident_rows([(each, Evidence()) for each in verdicts])
    write_report(tmp_path, summary_of(*verdicts), rows)
    found = pq.read_table(tmp_path / "producers.parquet").to_pylist()
    assert [
        (each["producer"], each["window_start"][11:13], each["streams"], each["state"], each["verdict"])
        for each in found
    ] == [
        ("a@ewr", "00", 2, "SETTLED", "LOSS"),
        ("a@ewr", "01", 1, "OPEN", "PROVEN"),
        ("b@jfk", "00", 1, "SETTLED", "PROVEN"),
    ]
    first = found[0]
    assert (first["published"], first["missing"], first["duplicates"]) == (13, 1, 1)
    assert [dict(each["consumed"]) for each in found] == [{"ewr": 13, "agg": 13}, {}, {"jfk": 2}]
    detailed = pq.read_table(tmp_path / "reconciliation.parquet")
    for name in ("published", "missing", "duplicates", "in_flight", "unreported", "unknown", "explained"):
        assert sum(each[name] for each in found) == sum(detailed[name].to_pylist()), name
    nothing = evident_rows([])
    write_report(tmp_path, summary_of(), nothing)
    assert pq.read_table(tmp_path / "producers.parquet").num_rows == 0


def test_a_failed_run_is_told_and_the_last_good_verdict_stays(tmp_path: Path) -> None:
    summary = summary_of(row("a@ewr", 0))
    write_report(tmp_path, summary, evident_rows([(row("a@ewr", 0), Evidence())]))
    before = (tmp_path / "summary.json").read_bytes()
    page = (tmp_path / "index.html").read_text("utf-8")
    note_failure(tmp_path, 8_000, "first")
    note_failure(tmp_path, 9_000, "cluster <agg> cannot\nbe reached")
    told = json.loads((tmp_path / "last_failure.json").read_text("utf-8"))
    assert told == {"version": 1, "at": "1970-01-01T00:00:09Z", "sentence": "cluster <agg> cannot be reached"}
    shown = (tmp_path / "index.html").read_text("utf-8")
    assert shown.count('id="failed"') == 1 and "1970-01-01 00:00:09" in shown
    assert "cluster &lt;agg&gt; cannot be reached. What stands below" in shown
    assert summary["sentence"] in shown and len(shown) < len(page) + 500
    assert "millrace_audit_last_run_status 3.0" in (tmp_path / "metrics.prom").read_text("utf-8")
    assert (tmp_path / "summary.json").read_bytes() == before
    note_failure(tmp_path / "new", 9_000, "why")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "metrics.prom",
        "last_failure.json",
        "index.html",
    }
    assert "No run has ended well yet" in (tmp_path / "new" / "index.html").read_text("utf-8")
    note_failure(tmp_path / "new", 9_001, "why again")
    assert "why again" in (tmp_path / "new" / "index.html").read_text("utf-8")
    write_report(tmp_path, summary, evident_rows([(row("a@ewr", 0), Evidence())]))
    assert not (tmp_path / "last_failure.json").exists()
    assert (tmp_path / "index.html").read_text("utf-8") == page
    (tmp_path / "file").write_text("")
    note_failure(tmp_path / "file", 9_000, "why")


def test_the_exit_status_is_the_summarys() -> None:
    assert exit_status({"exit_status": 1}) == 1
    assert summary_of(row("a@ewr", 0))["exit_status"] == 0
