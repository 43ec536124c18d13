"""Windows at rest, through the whole job: nothing that is said changes, and what comes for them wakes
them."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from millrace.audit import explain
from millrace.audit.keeping import upkeep
from millrace.audit.keeping.state import StateFolder
from millrace.audit.keeping.verdict_files import own_lines, read_spans
from millrace.audit.keeping.waivers import give_waiver
from millrace.audit.reconciliation.spans import window_counts
from millrace.audit.runs import resting
from millrace.audit.status import read_status
from millrace.broker.errors import ConfigError
from tests.spark.test_job_over_time import DAY_MS, NOW_MS, START_MS, audit, stream, watermark, written

__all__ = ["stream"]
pytestmark = pytest.mark.java


def rows_of(path) -> list[tuple[int, str]]:
    table = pq.read_table(path, columns=["window_start_ms", "verdict"])
    return sorted((row["window_start_ms"], row["verdict"]) for row in table.to_pylist())


def test_windows_rest_once_they_are_proven_and_wake_when_a_record_comes(spark, world, stream, monkeypatch):
    monkeypatch.setattr(resting, "REST_ROWS", 1)
    world.carry(stream)
    world.position("ewr", 40)
    first = audit(world)
    assert first.exit_status == 0
    report, state = world.config.report, StateFolder.open(world.config.state)
    judged = rows_of(report / "reconciliation.parquet")
    assert [verdict for _, verdict in judged] == ["PROVEN"] * 4
    second = audit(world, NOW_MS + DAY_MS)
    (laid,) = state.latest().resting
    apart = report / f"reconciliation-{laid.name}.parquet"
    assert second.summary["rows_at_rest"] == [apart.name]
    assert rows_of(apart) == judged and rows_of(report / "reconciliation.parquet") == []
    # A copy of a record: its window is judged again with all that lay down with it.
    world.carry(stream, lose=[each for each in range(1, 41) if each != 33])
    third = audit(world, NOW_MS + DAY_MS + 1)
    assert third.exit_status == 1 and state.latest().resting == []
    assert [each["sequences"] for each in third.summary["duplicates"]] == [[[33, 33]]]
    assert third.summary["windows"] == {"DUPLICATE": 1, "PROVEN": 3}
    (revised,) = third.summary["revisions"]
    assert (revised["before"], revised["after"], revised["revision"]) == ("PROVEN", "DUPLICATE", 2)
    assert watermark(world) == "2013-01-04T00:00:00Z" and not apart.exists()
    assert [at for at, _ in rows_of(report / "reconciliation.parquet")] == [at for at, _ in judged]
    assert written(world.config) == third.summary


@pytest.mark.long
def test_what_is_said_of_windows_at_rest_is_what_was_said_of_them_until_they_are_pruned(
    spark, world, stream, monkeypatch
):
    monkeypatch.setattr(resting, "REST_ROWS", 1)
    world.carry(stream)
    world.position("ewr", 40)
    first = audit(world)
    report, state = world.config.report, StateFolder.open(world.config.state)
    judged, page = rows_of(report / "reconciliation.parquet"), (report / "index.html").read_text()
    second = audit(world, NOW_MS + DAY_MS)
    (laid,) = state.latest().resting
    assert state.latest().cells == [] and laid.cells
    third = audit(world, NOW_MS + DAY_MS)
    assert third.cost.records == 0 and state.latest().number == 2
    apart_from = {"at": "", "rows_at_rest": []}
    for found in (second, third):
        assert {**found.summary, **apart_from} == {**first.summary, **apart_from}
        assert watermark(world) == "2013-01-05T00:00:00Z"
    assert pq.read_table(report / f"producers-{laid.name}.parquet")["published"].to_pylist() == [10] * 4
    assert (report / "index.html").read_text().count('class="PROVEN"') == page.count('class="PROVEN"')
    status = read_status(world.config)["topics"]["flights"]
    assert (status["windows"], status["pruned"]) == ({"PROVEN": 4}, 0)
    told = explain.explain(world.config, "flights", "2013-01-03")
    assert told["verdict"] == "PROVEN" and told["pruned"] is None and told["evidence"] is None
    (of_stream,) = told["streams"]
    assert [[cell["records"] for cell in tier["cells"]] for tier in of_stream["tiers"]] == [[10], [10]]
    with pytest.raises(ConfigError, match=r"2013-01-03T00:00:00Z, 2013-01-04T00:00:00Z$"):
        explain.explain(world.config, "flights", "2013-02-03")
    with pytest.raises(ConfigError, match="one that is not proven: this one is PROVEN"):
        give_waiver(state, "flights", START_MS, "ops", "why not", NOW_MS)

    world.carry(stream, lose=[each for each in range(1, 41) if each != 33])
    fourth = audit(world, NOW_MS + DAY_MS + 1)
    # The others rest again; what was found stays.
    fifth = audit(world, NOW_MS + 2 * DAY_MS + 1)
    sixth = audit(world, NOW_MS + 2 * DAY_MS + 1)
    for found in (fifth, sixth):
        assert found.summary["windows"] == fourth.summary["windows"] == {"DUPLICATE": 1, "PROVEN": 3}
        assert found.summary["duplicates"] == fourth.summary["duplicates"] and found.exit_status == 1
        assert found.summary["revisions"] == fourth.summary["revisions"]
        assert watermark(world) == "2013-01-04T00:00:00Z"
    assert rows_of(report / "reconciliation.parquet") == [(START_MS + 3 * DAY_MS, "DUPLICATE")]
    backfill = audit(world, NOW_MS + 3 * DAY_MS, only=(START_MS, START_MS + DAY_MS))
    assert backfill.exit_status == 0 and backfill.summary["counts"]["acknowledged"] == 10

    # Evidence that is kept no longer: what rested is pruned then, and the copy is not.
    seventh = audit(world, NOW_MS + 40 * DAY_MS, horizon_ms=None)
    assert seventh.summary["windows"] == fourth.summary["windows"]  # it told them once more
    eighth = audit(world, NOW_MS + 40 * DAY_MS, horizon_ms=None)
    assert eighth.summary["windows"] == {"DUPLICATE": 1} and state.latest().resting == []
    assert "rows_at_rest" not in eighth.summary and list(report.glob("reconciliation-*.parquet")) == []
    names = state.latest().verdicts
    left = own_lines(state, names)[1].num_rows + sum(window_counts(read_spans(state, names)).to_pylist())
    assert left == 3 and watermark(world) == "2013-01-04T00:00:00Z"
    assert len(judged) == 4


@pytest.mark.long
def test_what_came_late_stays_told_when_the_fold_that_takes_it_only_lays_windows_to_rest(
    spark, world, stream, monkeypatch
):
    world.config = world.config.model_copy(update={"keep_ms": 10 * DAY_MS})
    world.carry(stream)
    world.position("ewr", 40)
    assert audit(world).exit_status == 0
    assert audit(world, NOW_MS + 11 * DAY_MS).exit_status == 0
    monkeypatch.setattr(resting, "REST_ROWS", 1)
    world.send(stream, range(41, 61))
    world.report(stream)
    world.carry(stream, lose=[each for each in range(1, 41) if each != 33])
    world.position("ewr", 60)
    state = StateFolder.open(world.config.state)
    told = [{"what": f"{upkeep.LATE}, in agg, topic flights", "count": 1, "holds": ["flights"]}]
    for day in (12, 13):
        found = audit(world, NOW_MS + day * DAY_MS)
        assert (found.summary["untrusted"], found.exit_status) == (told, 2)
        assert found.summary["windows"] == {"PROVEN": 2} and found.summary["duplicates"] == []
        (laid,) = state.latest().resting
        kept = [name for files in (state.latest().cells, laid.cells) for name in files]
        assert sum(state.read_table(name).num_rows for name in kept) == 4, "none of what came late"


@pytest.mark.long
def test_all_that_rests_is_judged_anew_by_another_configuration(spark, world, stream, monkeypatch):
    monkeypatch.setattr(resting, "REST_ROWS", 1)
    world.carry(stream)
    world.position("ewr", 40)
    audit(world)
    audit(world, NOW_MS + DAY_MS)
    state = StateFolder.open(world.config.state)
    (laid,) = state.latest().resting
    by = state.latest().resting_by
    world.config = world.config.model_copy(update={"grace_ms": 60_000})
    monkeypatch.setattr(resting, "REST_ROWS", 1 << 30)
    found = audit(world, NOW_MS + DAY_MS)
    assert found.exit_status == 0 and found.summary["windows"] == {"PROVEN": 4}
    assert state.latest().resting == [] and state.latest().resting_by != by
    assert set(state.latest().cells) >= set(laid.cells)
    assert [row[1] for row in rows_of(world.config.report / "reconciliation.parquet")] == ["PROVEN"] * 4
    assert json.loads((world.config.report / "summary.json").read_text())["revisions"] == []
