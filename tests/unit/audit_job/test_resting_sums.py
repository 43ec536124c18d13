"""What the report says of windows at rest is what it would say of their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from millrace.audit.keeping.state import Resting, StateDamaged, StateFolder
from millrace.audit.reconciliation.row_keys import WINDOW, is_among
from millrace.audit.reconciliation.settled import (
    LINE_SCHEMA,
    SETTLED_SCHEMA,
    lines_of,
    number_rows,
    revised,
    revisions_of,
)
from millrace.audit.reconciliation.spans import NO_SPANS, SPAN_SCHEMA
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA
from millrace.audit.report.folder import RowsAtRest, write_report
from millrace.audit.report.heatmap import Windows, heatmaps, overview
from millrace.audit.report.html import render
from millrace.audit.report.plain import PlainRows, by_producer, fold, tier_names
from millrace.audit.report.resting_sums import RestingSums, Summing
from millrace.audit.report.summary import summarise
from millrace.audit.runs import resting_files
from millrace.audit.runs.resting import Laid
from tests.browser.report_data import HOUR_MS, START_MS, TIERS, rich

AT_MS = START_MS + 337 * HOUR_MS
SETTINGS: dict[str, Any] = {
    "tiers": TIERS, "at_ms": AT_MS, "grace_ms": 60_000, "window_ms": HOUR_MS, "untrusted": {}, "unaudited": {}
}  # fmt: skip


def split(rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """(the rows of windows that do not rest, those of windows that do)."""
    rests = pc.and_(pc.equal(rows["verdict"], "PROVEN"), pc.equal(rows["state"], "SETTLED"))
    rests = pc.and_(pc.and_(rests, pc.equal(rows["content"], "")), pc.is_valid(rows["window_start_ms"]))
    stays = rows.filter(pc.invert(rests)).select(WINDOW)
    rests = pc.and_not(rests, is_among(rows.select(WINDOW), stays))
    return rows.filter(pc.invert(rests)), rows.filter(rests)


def parts(rows: pa.Table, count: int) -> Iterator[pa.Table]:
    """Some windows each."""
    numbers = pc.bit_wise_and(pc.divide(rows["window_start_ms"], HOUR_MS), count - 1)
    for number in range(count):
        yield rows.filter(pc.equal(numbers, number))


def sums_of(rows: pa.Table, count: int = 4) -> RestingSums:
    summing = Summing(TIERS, tier_names(rows, []), AT_MS - HOUR_MS, SETTINGS["grace_ms"])
    for part in parts(rows, count):
        summing.add(part)
    made = summing.sums(HOUR_MS, (SETTLED_SCHEMA.empty_table(), 0))
    return RestingSums(json.loads(json.dumps(made.told)), made.producers, made.squares)


@pytest.fixture(scope="module")
def made() -> tuple[dict[str, Any], pa.Table]:
    return rich(6)


def test_the_summary_is_that_of_all_rows(made: tuple[dict[str, Any], pa.Table]) -> None:
    living, laid = split(made[1])
    assert laid.num_rows > living.num_rows > 0
    first, second = parts(laid, 2)
    told = [sums_of(each).told["tally"] for each in (first, second)]
    together = summarise(living, resting=told, **SETTINGS)
    assert together == summarise(made[1], **SETTINGS)
    assert together["latency"] and together["late"], "what is estimated of their times, too"
    assert summarise(living, resting=told[:1], **SETTINGS) != together


def test_late_windows_at_rest_are_told_with_the_others(
    made: tuple[dict[str, Any], pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: the latest by name, the others by number."""
    monkeypatch.setattr("millrace.audit.report.tally.MOST_LATE", 5)
    living, laid = split(made[1])
    prompt = {**SETTINGS, "grace_ms": 0}
    sums = []
    for part in parts(laid, 2):
        summing = Summing(TIERS, tier_names(laid, []), AT_MS, 0)
        summing.add(part)
        sums.append(summing.sums(HOUR_MS, (SETTLED_SCHEMA.empty_table(), 0)).told["tally"])
    found = summarise(living, resting=sums, **prompt)
    assert found == summarise(made[1], **prompt) and found["late_more"]


def test_squares_and_lines_of_the_page_are_those_of_all_rows(
    made: tuple[dict[str, Any], pa.Table],
) -> None:
    living, laid = split(made[1])
    tiers = tier_names(made[1], [each["name"] for each in TIERS])
    sums = [sums_of(each) for each in parts(laid, 2)]
    whole, joined = Windows(tiers), Windows(tiers)
    whole.add_all(made[1])
    joined.add_all(living)
    for each in sums:
        joined.join(each.squares, each.told["window_ms"])
    assert overview(joined) == overview(whole) and heatmaps(joined) == heatmaps(whole)
    plain, other = PlainRows(tiers), PlainRows(tiers)
    plain.add(fold(made[1], tiers))
    other.add(fold(living, tiers))
    for each in sums:
        other.join(each.producers, each.told["tiers"], each.told["window_ms"])
    assert (other.total, other.lengths) == (plain.total, plain.lengths)
    assert other.behind(0) == plain.behind(0)


def test_the_page_shows_what_did_not_rest_and_sums_up_the_others(
    made: tuple[dict[str, Any], pa.Table],
) -> None:
    living, laid = split(made[1])
    sums = sums_of(laid)
    alone = Summing([], ["agg"], 0, 0).sums(HOUR_MS, (SETTLED_SCHEMA.empty_table(), 0))
    page = render(made[0], living, [sums, alone])
    (data,) = (line for line in page.splitlines() if '"rest":' in line)
    table = json.loads(data[data.index("{") : data.rindex("}") + 1])["table"]
    assert len(table["rows"]) == fold(living, ["ewr"]).num_rows
    assert sum(line[4] for line in table["rest"]) == fold(laid, ["ewr"]).num_rows
    assert sum(line[6] for line in table["rest"]) == pc.sum(laid["published"]).as_py()
    assert table["total"] == fold(made[1], ["ewr"]).num_rows


def test_revisions_are_those_that_were_made_last_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.audit.reconciliation.settled.MOST_REVISED", 3)
    nothing = dict.fromkeys(SETTLED_SCHEMA.names) | {"folded": False, "open": False, "stream": "a"}
    lines = [
        nothing | {"topic": "t", "producer": "p", "window_start_ms": at, "settled_ms": made_ms}
        | {"revision": revision, "before": "UNKNOWN", "verdict": "PROVEN"}
        for at, made_ms, revision in ((0, 9, 2), (1, 3, 1), (2, 8, 3), (3, 2, 2), (4, 7, 2), (5, 1, 2))
    ]  # fmt: skip
    whole = pa.Table.from_pylist(lines, SETTLED_SCHEMA)
    rows, count = revised(whole.slice(2, 3))
    found = revisions_of(whole.slice(0, 2), [(rows.to_pylist(), count), ([lines[5]], 1)])
    assert found == revisions_of(whole) and found[1] == 2


def test_files_of_rows_at_rest_are_written_once_and_go_with_their_windows(
    made: tuple[dict[str, Any], pa.Table], tmp_path: Path
) -> None:
    summary, rows = made
    numbered = number_rows(rows, LINE_SCHEMA.empty_table(), 7)
    living, laid = split(numbered)
    pieces = laid.group_by([*WINDOW, "window_ms"]).aggregate([])
    leaving = pa.Table.from_pylist(
        [
            dict.fromkeys(SPAN_SCHEMA.names, 0)
            | {"topic": each["topic"], "verdict": "PROVEN", "window_ms": HOUR_MS}
            | {"start_ms": each["window_start_ms"], "end_ms": each["window_start_ms"] + HOUR_MS}
            for each in pieces.to_pylist()
        ],
        SPAN_SCHEMA,
    )
    at_rest = RowsAtRest((), leaving, {"00000002-0a": laid})
    names = {f"{kind}-00000002-0a.parquet" for kind in ("reconciliation", "producers")}
    assert set(at_rest.names()) == names
    assert at_rest.told() == {"rows_at_rest": ["reconciliation-00000002-0a.parquet"]}
    write_report(tmp_path, summary, numbered, at_rest)
    ordered = [(name, "ascending") for name in ("topic", "producer", "stream", "window_start_ms")]
    for name, theirs in (("reconciliation", living), ("reconciliation-00000002-0a", laid)):
        found = pq.read_table(tmp_path / f"{name}.parquet")
        assert found.sort_by(ordered) == theirs.select(VERDICT_SCHEMA.names).sort_by(ordered)
    told = pq.read_table(tmp_path / "producers-00000002-0a.parquet")
    assert told["published"].to_pylist() == by_producer(laid)["published"].to_pylist()
    (tmp_path / "producers-00000002-0a.parquet").write_bytes(b"as it was")
    write_report(tmp_path, summary, living, RowsAtRest((), NO_SPANS, {"00000002-0a": laid}), names)
    assert (tmp_path / "producers-00000002-0a.parquet").read_bytes() == b"as it was"
    there = {path.name for path in tmp_path.iterdir()} | {"reconciliation-mine.parquet"}
    assert at_rest.stale(there) == [] and set(RowsAtRest().stale(there)) == names
    assert RowsAtRest().told() == {}


def test_sums_that_cannot_be_believed_are_told_with_the_way_back(
    made: tuple[dict[str, Any], pa.Table], tmp_path: Path
) -> None:
    _, laid = split(made[1])
    state, files = StateFolder.open(tmp_path), Resting(7, "verdicts/1-ab", (), ())
    sums = sums_of(laid)
    resting_files.write(state, files, pa.table({"stream": ["a"]}), Laid(NO_SPANS, {}, sums))
    (found,) = resting_files.read_sums(state, [files])
    assert found.told == sums.told and found.squares == sums.squares
    assert found.producers == sums.producers
    path = tmp_path / files.sums
    told = path.read_text()
    path.write_text(told.replace('"windows": ', '"windows": 1', 1))
    with pytest.raises(StateDamaged, match=r"resting-sums\.json is damaged"):
        resting_files.read_sums(state, [files])
    path.unlink()
    with pytest.raises(StateDamaged, match=r"resting-sums\.json cannot be read"):
        resting_files.read_sums(state, [files])


def test_what_is_summed_up_is_proven(made: tuple[dict[str, Any], pa.Table]) -> None:
    lines = lines_of(number_rows(split(made[1])[1], LINE_SCHEMA.empty_table(), 7))
    assert lines["verdict"].unique().to_pylist() == ["PROVEN"]
    told = sums_of(split(made[1])[1]).told["tally"]
    assert told["windows"] == lines.num_rows and told["totals"]["missing"] == 0
