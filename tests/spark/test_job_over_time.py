"""The job over many runs: late data, waivers, watermarks, pruning, folding, a backfill, groups and routes."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kazoo.client import KazooClient

from millrace.audit import explain, job
from millrace.audit.config import ZooKeeperConfig
from millrace.audit.keeping import upkeep, verdict_files
from millrace.audit.keeping.state import StateFolder, guarded
from millrace.audit.keeping.untrusted_waivers import accept
from millrace.audit.keeping.waivers import give_waiver
from millrace.audit.reconciliation import spans
from millrace.audit.runs import next_commit
from millrace.audit.spark import spark_cells, task_plan
from millrace.audit.status import lines, read_status
from tests.ports import free_port
from tests.waiting import patience

pytestmark = pytest.mark.java
DAY_MS = 86_400_000
START_MS = 1_356_998_400_000
NOW_MS = START_MS + 400 * DAY_MS


def audit(world, now_ms=NOW_MS, **more) -> job.JobResult:
    world.flush()
    return job.run(world.config, "local[2]", clock_ms=lambda: now_ms, **more)


@pytest.fixture
def stream(world):
    stream = SimpleNamespace(
        source="ewr", producer="UA@ewr", stream="00000000000000aa", topic="flights", partition=0, sent=[]
    )
    world.send(stream, range(1, 41))
    world.report(stream)
    idle = SimpleNamespace(
        source="jfk", producer="B6@jfk", stream="ee" * 8, topic="flights", partition=0, sent=[]
    )
    world.report(idle)  # or a source cluster without events would be in doubt
    return stream


def written(config) -> dict:
    """The findings in summary.json; what the run took is another thing each time."""
    told = json.loads((config.report / "summary.json").read_text())
    assert set(told.pop("run")) == {"records", "bytes", "seconds", "state_bytes", "state_files"}
    return told


def watermark(world) -> str | None:
    """What the report tells, and ZooKeeper where it is told there."""
    told = json.loads((world.config.report / "watermarks.json").read_text())
    found = told["watermarks"]["flights"]["watermark"]
    if world.config.zookeeper is not None:
        client = KazooClient(world.config.zookeeper.connect, timeout=20)
        client.start(timeout=patience(60))
        try:
            content, _ = client.get("/millrace/audit/flights/watermark")
        finally:
            client.stop()
            client.close()
        assert json.loads(content)["watermark"] == found
    return found


def test_late_data_revises_a_waiver_lets_the_watermark_pass_and_worse_takes_it_back(
    spark, world, stream, zookeeper
):
    told_at = ZooKeeperConfig(connect=zookeeper.chroot(), timeout="20s")
    world.config = world.config.model_copy(update={"zookeeper": told_at})
    world.carry(stream, lose=[15])
    world.position("ewr", 40)
    first = audit(world)
    assert first.exit_status == 1 and watermark(world) == "2013-01-02T00:00:00Z"
    state = StateFolder.open(world.config.state)
    give_waiver(state, "flights", START_MS + DAY_MS, "ops@here", "15 was replayed by hand", NOW_MS)
    second = audit(world)
    assert second.exit_status == 0 and second.summary["verdict"] == "LOSS"
    assert watermark(world) == "2013-01-05T00:00:00Z"
    (told,) = second.summary["waivers"]
    assert (told["who"], told["stands"]) == ("ops@here", True)
    # A copy arrives late in the window that was waived, and one in a window that was proven.
    world.carry(stream, lose=[each for each in range(1, 41) if each not in (12, 31)])
    third = audit(world)
    assert third.exit_status == 1 and watermark(world) == "2013-01-02T00:00:00Z"
    assert [each["stands"] for each in third.summary["waivers"]] == [False]
    revised = {each["window_start"]: each for each in third.summary["revisions"]}
    assert revised["2013-01-04T00:00:00Z"]["before"] == "PROVEN"
    assert revised["2013-01-04T00:00:00Z"]["after"] == "DUPLICATE"
    assert {each["revision"] for each in revised.values()} == {2}
    assert third.summary["watermark_steps_back"] == [
        {"topic": "flights", "before": "2013-01-05T00:00:00Z", "after": "2013-01-02T00:00:00Z"}
    ]
    away = ZooKeeperConfig(connect=f"127.0.0.1:{free_port()}", timeout="1s")
    world.config = world.config.model_copy(update={"zookeeper": away})
    fourth = audit(world)
    assert "watermark_steps_back" not in fourth.summary and fourth.exit_status == 1
    assert fourth.problem.startswith(f"the watermarks were not told to ZooKeeper at {away.connect}: ")
    assert "\n" not in fourth.problem


@pytest.mark.long
def test_old_proofs_are_folded_away_and_what_comes_late_for_them_is_told_and_not_judged(
    spark, world, stream, monkeypatch
):
    monkeypatch.setattr(verdict_files, "PART_ROWS", 1)  # the driver reads window by window
    # Too many rows for one file: there is one for each of the four days.
    monkeypatch.setattr(task_plan, "SHUFFLED_ROWS", 2)
    world.config = world.config.model_copy(update={"keep_ms": 10 * DAY_MS})
    world.carry(stream, lose=[15])
    world.position("ewr", 40)
    first = audit(world)
    later = NOW_MS + 11 * DAY_MS
    second = audit(world, later)
    assert second.summary["losses"] == first.summary["losses"] and second.exit_status == 1
    assert second.summary["counts"]["acknowledged"] == 40  # this run still saw all the evidence
    assert watermark(world) == "2013-01-02T00:00:00Z"
    state = StateFolder.open(world.config.state)
    kept = state.latest()
    assert all("-folded/" in name for name in kept.cells)
    days = {name.split("/")[2] for name in verdict_files.row_files(kept.verdicts)}
    assert days >= {f"day=2013-01-0{day}" for day in (1, 2, 3, 4)}
    windows = {
        start for name in kept.cells for start in state.read_table(name)["window_start_ms"].to_pylist()
    }
    assert windows == {START_MS + DAY_MS}, "the evidence of the loss stays"
    third = audit(world, later)
    assert third.exit_status == 1 and third.summary["counts"]["acknowledged"] == 10
    assert [each["sequences"] for each in third.summary["losses"]] == [[[15, 15]]]
    assert watermark(world) == "2013-01-02T00:00:00Z" and third.summary["untrusted"] == []
    # A copy of a record whose evidence is gone: told, no verdict; and the rest is as it was.
    world.carry(stream, lose=[each for each in range(1, 41) if each != 33])
    fourth = audit(world, later)
    assert [each["what"] for each in fourth.summary["untrusted"]] == [f"{upkeep.LATE}, in agg, topic flights"]
    assert fourth.summary["losses"] == third.summary["losses"] and fourth.summary["duplicates"] == []
    # The backfill of that time range looks at the clusters anew, and finds it.
    before = StateFolder.open(world.config.state).latest()
    backfill = audit(world, later, only=(START_MS + 3 * DAY_MS, START_MS + 4 * DAY_MS))
    assert [each["sequences"] for each in backfill.summary["duplicates"]] == [[[33, 33]]]
    assert backfill.exit_status == 1 and backfill.summary["losses"] == []
    assert StateFolder.open(world.config.state).latest() == before
    assert written(world.config) == fourth.summary


def test_pruned_windows_of_days_that_are_over_are_summed_up_and_all_else_stays_as_it_was(
    spark, world, stream, monkeypatch
):
    """Windows are a day long here: a `day` is 400 of them."""
    summed = functools.partial(spans.sum_up, day_ms=400 * DAY_MS)
    monkeypatch.setattr(next_commit, "sum_up", summed)
    monkeypatch.setattr(spark_cells, "DAY_MS", 400 * DAY_MS)
    world.config = world.config.model_copy(update={"keep_ms": 10 * DAY_MS})
    world.carry(stream)
    world.position("ewr", 40)
    assert audit(world).exit_status == 0
    state = StateFolder.open(world.config.state)
    later_ms = NOW_MS + 11 * DAY_MS
    told = []
    for day, lines_left, windows in ((0, 4, 0), (1, 0, 4), (2, 0, 4)):
        found = audit(world, later_ms + day * DAY_MS)
        assert found.exit_status == (2 if day else 0) and found.summary["untrusted"] == [], found.problem
        latest = state.latest()
        assert verdict_files.own_lines(state, latest.verdicts)[1].num_rows == lines_left
        kept = verdict_files.read_spans(state, latest.verdicts)
        assert sum(spans.window_counts(kept).to_pylist()) == windows
        assert read_status(world.config)["topics"]["flights"]["pruned"] == 4
        told.append((found.summary["watermarks"], watermark(world)))
    assert told.count(told[0]) == len(told) and told[0][1] == "2013-01-05T00:00:00Z"
    assert "all windows from 2013-01-01T00:00:00Z to 2013-01-05T00:00:00Z" in "\n".join(
        explain.lines(explain.explain(world.config, "flights", "2013-01-03"))
    )
    # What comes late for one of them is told as it is of a window with a line of its own.
    world.carry(stream, lose=[each for each in range(1, 41) if each != 33])
    late = audit(world, later_ms + 3 * DAY_MS)
    assert [each["what"] for each in late.summary["untrusted"]] == [f"{upkeep.LATE}, in agg, topic flights"]
    assert late.summary["duplicates"] == [] and late.exit_status == 2


def test_spark_finds_the_windows_of_spans_as_arrow_does(spark):
    kinds = [("flights", 60_000), ("flights", 300_000), ("hotels", 60_000)]
    made = [
        dict.fromkeys(spans.SPAN_SCHEMA.names, 0)
        | {"topic": topic, "window_ms": length, "verdict": "PROVEN", "start_ms": first * length}
        | {"end_ms": end * length}
        for topic, length in kinds
        for first, end in ((0, 3), (5, 9), (1_435, 1_440), (1_440, 1_445))
    ]
    table = pa.Table.from_pylist(made, spans.SPAN_SCHEMA)
    windows = pa.table(
        {
            "topic": [topic for topic in ("flights", "hotels", "trains") for _ in range(8_000)],
            "window_start_ms": [minute * 60_000 for _ in range(3) for minute in range(8_000)],
        }
    )
    lines = spark.createDataFrame(windows.append_column("pruned", pa.repeat(False, windows.num_rows)))
    found = spark_cells.in_spans(lines, spark.createDataFrame(table)).toArrow()
    assert found.column_names == ["topic", "window_start_ms", "pruned"]
    ordered = found.sort_by([("topic", "ascending"), ("window_start_ms", "ascending")])
    expected = spans.are_in(windows, table).to_pylist()
    assert ordered["pruned"].to_pylist() == expected and 0 < sum(expected) < len(expected)


@pytest.mark.long
def test_a_state_of_version_5_is_carried_over_once_and_its_revisions_go_on(spark, world, stream):
    """It has lines in one file, and no rows; before version 5 they did not tell what was open."""
    world.carry(stream, lose=[15, 16])
    world.position("ewr", 40)
    first = audit(world)
    state = StateFolder.open(world.config.state)
    new = state.latest()
    lines = pa.concat_tables(verdict_files.SettledLines(state, new.verdicts).parts())
    state.write_table("verdicts/old.parquet", lines.drop_columns(["open"]))
    old = {**json.loads(state.files.read("commits/00000001.json"))["commit"], "version": 5}
    old |= {"verdicts": "verdicts/old.parquet", "verdicts_digest": "of another program"}
    state.files.remove("commits/00000001.json")
    state.files.remove("verdicts/" + new.verdicts[0].split("/")[1])
    assert state.files.create("commits/00000001.json", guarded("commit", old))
    told = read_status(world.config)["topics"]["flights"]["windows"]
    assert told == {word: count for word, count in first.summary["windows"].items() if word != "OPEN"}
    world.carry(stream, lose=[each for each in range(1, 41) if each != 16])
    second = audit(world)
    changed = [(each["revision"], each["before"], each["after"]) for each in second.summary["revisions"]]
    assert changed == [(2, "LOSS", "LOSS")] and second.summary["counts"]["missing"] == 1
    kept = state.latest()
    assert kept.number == 2 and all("/day=" in name or "lines" in name for name in kept.verdicts)
    rows = pq.read_table(world.config.report / "reconciliation.parquet")
    assert sorted(rows["revision"].to_pylist())[-2:] == [1, 2]
    assert audit(world).summary == second.summary and state.latest() == kept


@pytest.mark.long
def test_cells_of_proven_windows_lose_their_places_and_a_late_copy_is_named_all_the_same(
    spark, world, stream, monkeypatch
):
    monkeypatch.setattr(upkeep, "FOLD_FILES", 2)
    world.carry(stream, lose=range(16, 41))
    world.position("ewr", 15)
    assert audit(world).summary["counts"]["in_flight"] == 25
    world.carry(stream, lose=range(1, 16))
    world.position("ewr", 40)
    second = audit(world)
    assert second.exit_status == 0 and second.summary["verdict"] == "PROVEN"
    state = StateFolder.open(world.config.state)

    rows = [row for name in state.latest().cells for row in state.read_table(name).to_pylist()]
    assert sum(row["count"] for row in rows) == 80
    united = {(row["tier"], row["window_start_ms"], row["count"]) for row in rows if row["partition"] < 0}
    # Two runs have read a part each of the second day; of the others there is one cell, which stays.
    assert united == {("ewr", START_MS + DAY_MS, 10), ("agg", START_MS + DAY_MS, 10)}
    assert audit(world).summary == second.summary
    world.carry(stream, lose=[each for each in range(1, 41) if each != 12])
    fourth = audit(world)
    assert fourth.exit_status == 1 and fourth.summary["losses"] == []
    assert [each["sequences"] for each in fourth.summary["duplicates"]] == [[[12, 12]]]
    revised = {each["window_start"]: each["before"] for each in fourth.summary["revisions"]}
    assert revised["2013-01-02T00:00:00Z"] == "PROVEN"


def test_cells_that_take_few_bytes_in_a_file_are_shuffled_by_how_many_they_are(
    spark, world, stream, monkeypatch
):
    parts = []
    asked, setting = spark_cells.shuffle_count_of, "spark.sql.shuffle.partitions"

    def noted(*given, **more) -> int:
        parts.append(asked(*given, **more))
        return parts[-1]

    monkeypatch.setattr(spark_cells, "shuffle_count_of", noted)
    monkeypatch.setattr(task_plan, "SHUFFLED_ROWS", 2)
    before = spark.conf.get(setting)
    world.carry(stream, lose=[15])
    world.position("ewr", 40)
    found = audit(world)
    assert [each["sequences"] for each in found.summary["losses"]] == [[[15, 15]]]
    state = StateFolder.open(world.config.state)
    kept = state.latest()
    rows = sum(state.read_table(name).num_rows for name in kept.cells)
    assert max(parts) >= rows // 2 > 2 and len(verdict_files.row_files(kept.verdicts)) > 1
    assert spark.conf.get(setting) == before, "a user goes on with the session"
    parts.clear()
    monkeypatch.setattr(task_plan, "SHUFFLED_ROWS", 1 << 20)
    assert audit(world).summary == found.summary
    assert set(parts) <= {1, int(before)}


def test_how_far_a_foreign_mirror_came_is_shuffled_by_how_many_cells_there_are(
    spark, world, stream, monkeypatch
):
    parts = []
    asked, setting = spark_cells.arrival_passages, "spark.sql.shuffle.partitions"

    def noted(*given):
        parts.append(int(spark.conf.get(setting)))
        return asked(*given)

    monkeypatch.setattr(spark_cells, "arrival_passages", noted)
    monkeypatch.setattr(task_plan, "SHUFFLED_ROWS", 2)
    before = spark.conf.get(setting)
    agg = world.config.clusters["agg"].model_copy(update={"mirror": "foreign"})
    world.config = world.config.model_copy(update={"clusters": {**world.config.clusters, "agg": agg}})
    world.carry(stream, lose=[15])
    for _ in range(2):  # counted now, and kept from before
        found = audit(world)
        assert [each["sequences"] for each in found.summary["losses"]] == [[[15, 15]]]
        kept = StateFolder.open(world.config.state)
        rows = sum(kept.read_table(name).num_rows for name in kept.latest().cells)
        assert parts.pop() >= rows // 2 > int(before) and not parts
    assert spark.conf.get(setting) == before, "a user goes on with the session"


def test_cells_of_many_runs_become_few_files_and_the_verdicts_stay(spark, world, stream, monkeypatch):
    monkeypatch.setattr(upkeep, "FOLD_FILES", 2)
    world.carry(stream, lose=[15])
    world.position("ewr", 40)
    first = audit(world)
    state = StateFolder.open(world.config.state)
    files = len(state.latest().cells)
    world.produced.clear()
    world.clusters["agg"].produce("flights", b"not audited")
    second = audit(world)
    assert second.summary["losses"] == first.summary["losses"]
    assert second.summary["counts"] == first.summary["counts"]
    assert second.summary["unaudited"] == {"agg": 1}
    assert len(state.latest().cells) == 1 <= files
    assert audit(world).summary == second.summary
    # What an earlier fold made large is left as it is, and counts all the same.
    (large,) = state.latest().cells
    monkeypatch.setattr(task_plan, "FOLDED_FILE_BYTES", 100)
    monkeypatch.setattr(upkeep, "FOLD_FILES", 1)
    world.carry(stream, lose=[each for each in range(1, 41) if each != 33])
    third = audit(world)
    assert third.summary["losses"] == first.summary["losses"]
    assert [each["sequences"] for each in third.summary["duplicates"]] == [[[33, 33]]]
    assert large in state.latest().cells and len(state.latest().cells) > 1
    assert all("-folded/" in name for name in state.latest().cells)
    assert audit(world).summary == third.summary


def test_a_mirror_that_carries_the_topic_elsewhere_proves_nothing_about_it(spark, world, stream):
    """Its position would make lag a loss: the audited topic is filled by another mirror, which keeps none."""
    world.position("ewr", 40)
    key = json.dumps({"source": "ewr", "topic": "flights"}).encode()
    route = {"version": 1, "cluster_id": "", "target_topic": "flights-copy", "since_ms": 1, "via": []}
    world.clusters["agg"].produce("millrace.routes.test", json.dumps(route).encode(), key=key)
    elsewhere = audit(world)
    assert elsewhere.exit_status == 2 and elsewhere.summary["losses"] == []
    assert elsewhere.summary["counts"]["in_flight"] == 40


def test_a_topic_under_several_names_in_the_aggregate_is_one_tier(spark, world, stream):
    clusters = dict(world.config.clusters)
    clusters["agg"] = clusters["agg"].model_copy(
        update={"topics": {"flights": ("ewr.flights", "jfk.flights")}}
    )
    world.config = world.config.model_copy(update={"clusters": clusters})
    other = SimpleNamespace(
        source="jfk", producer="B6@jfk", stream="ffffffffffffff01", topic="flights", partition=0, sent=[]
    )
    world.send(other, range(1, 21))
    world.report(other)
    for each, name in ((stream, "ewr.flights"), (other, "jfk.flights")):
        each.topic = name
        world.carry(each, lose=[4])
    world.position("ewr", 40)
    world.position("jfk", 20)
    result = audit(world)
    assert result.summary["counts"]["seen"] == {"ewr": 40, "jfk": 20, "agg": 58}
    assert sorted((each["producer"], each["sequences"]) for each in result.summary["losses"]) == [
        ("B6@jfk", [[4, 4]]),
        ("UA@ewr", [[4, 4]]),
    ]
    assert audit(world).summary == result.summary
    keys = set(StateFolder.open(world.config.state).latest().offsets)
    assert {"agg/flights@ewr.flights/0", "agg/flights@jfk.flights/0"} < keys
    one_name = clusters["agg"].model_copy(update={"topics": {"flights": ("ewr.flights",)}})
    world.config = world.config.model_copy(update={"clusters": {**clusters, "agg": one_name}})
    assert "another state" in audit(world).problem or "use another" in audit(world).problem


@pytest.mark.long
def test_what_is_not_understood_holds_the_watermark_until_a_person_accepts_it(spark, world, stream):
    def strange(count: int) -> None:
        for _ in range(count):
            world.clusters["ewr"].produce("flights", b"?", headers=[("_mr", b"\x02" + bytes(30))])

    world.carry(stream)
    world.position("ewr", 1000)
    strange(100)
    first = audit(world)
    assert first.exit_status == 2 and first.summary["verdict"] == "UNKNOWN" and watermark(world) is None
    header = "header of an unknown version, in ewr, topic flights"
    assert first.summary["untrusted"] == [{"what": header, "count": 100, "holds": ["flights"]}]
    accept(StateFolder.open(world.config.state), "unknown version", {header: 100}, "ops", "a trial", NOW_MS)
    # However old it gets; what was accepted is no doubt, and pruned.
    late_ms = NOW_MS + world.config.keep_ms + DAY_MS
    second = audit(world, late_ms)
    assert second.exit_status == 0 and watermark(world) == "2013-01-05T00:00:00Z"
    assert any("(100) could not be trusted; ops accepted it" in each for each in second.summary["notes"])
    strange(1)  # one more than was accepted
    third = audit(world, late_ms)
    assert third.exit_status == 2 and not third.summary["untrusted_waivers"][0]["stands"]
    back = [{"what": header, "count": 101, "holds": ["flights"]}]
    assert third.summary["untrusted"] == back, "the pruned ones come back"
    assert watermark(world) == "2013-01-05T00:00:00Z", "it goes on no further, and not back"


def test_a_stream_that_contradicts_itself_stands_under_what_could_not_be_trusted(spark, world, stream):
    world.carry(stream)
    world.position("ewr", 1000)
    world.event("ewr", replace(world.count_event(stream, START_MS, [1, 2], 9), producer="ZZ@ewr"))
    result = audit(world)
    assert result.exit_status == 2 and result.summary["verdict"] == "UNKNOWN"
    told = [each["what"] for each in result.summary["untrusted"]]
    assert (
        "two producers use one stream id: stream 00000000000000aa of UA@ewr, topic flights" in told
        or "two producers use one stream id: stream 00000000000000aa of ZZ@ewr, topic flights" in told
    )


def test_a_failed_run_stands_on_the_page_until_the_next_good_one(spark, world, stream):
    world.carry(stream)
    world.position("ewr", 1000)
    assert audit(world).summary["verdict"] == "PROVEN"
    newest = world.config.state / "commits" / "00000001.json"
    before = newest.read_text()
    body = json.loads(before)
    body["commit"]["version"] = 99
    newest.write_text(json.dumps(body))
    failed = audit(world)
    assert failed.exit_status == 3 and "format version 99" in failed.problem
    page = (world.config.report / "index.html").read_text()
    assert 'id="failed"' in page and "format version 99" in page and "PROVEN" in page
    newest.write_text(before)
    told = "\n".join(lines(read_status(world.config)))
    assert told.startswith("FAILED    the last run") and "format version 99" in told
    assert audit(world).exit_status == 0
    assert 'id="failed"' not in (world.config.report / "index.html").read_text()
    assert read_status(world.config)["last_failure"] is None


def test_another_window_than_the_states_is_refused_and_nothing_changes(spark, world, stream):
    world.carry(stream, lose=[15])
    world.position("ewr", 1000)
    lost = audit(world)
    assert lost.exit_status == 1
    counted = world.config
    before = sorted(str(path) for path in counted.state.rglob("*"))
    world.config = counted.model_copy(update={"window_ms": DAY_MS // 2})
    refused = audit(world)
    assert (refused.exit_status, refused.summary) == (3, None)
    assert refused.problem.endswith(
        f"window: got '12h', expected 1d, in which {counted.state} was counted; "
        "for another window use another state"
    )
    assert sorted(str(path) for path in counted.state.rglob("*")) == before
    assert written(counted) == lost.summary
    assert "for another window use another state" in (counted.report / "index.html").read_text()


@pytest.mark.long
def test_in_a_state_of_its_own_another_window_finds_the_same(spark, world, stream):
    world.carry(stream, lose=[15])
    world.position("ewr", 1000)
    lost = audit(world)
    counted = world.config
    world.config = counted.model_copy(
        update={"window_ms": DAY_MS // 2, "state": counted.state.with_name("state-12h")}
    )
    anew = audit(world)
    assert anew.exit_status == 1
    assert [each["sequences"] for each in anew.summary["losses"]] == [[[15, 15]]]
    world.config = counted
    assert audit(world).summary == lost.summary
