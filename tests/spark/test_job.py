"""The whole job on Spark, against clusters in memory: what happened must be what it says."""

from __future__ import annotations

import asyncio
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millrace.audit import explain, job
from millrace.audit.config import RosterMember
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.spark.kafka_options import parse_source
from millrace.audit.spark.pinning import pin_ranges
from millrace.audit.spark.run_steps import RunSteps
from millrace.audit.spark.spark_source import read_pinned
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.errors import JavaMissing
from tests.ports import free_port

pytestmark = pytest.mark.java
NOW_MS = 1_356_998_400_000 + 400 * 86_400_000


def audit(world) -> job.JobResult:
    world.flush()
    return job.run(world.config, "local[2]", clock_ms=lambda: NOW_MS)


@pytest.fixture
def streams(world):
    """Two producers in two datacenters: 200 and 100 records, reported in full."""
    from_ewr = world_stream("ewr", "UA@ewr", "00000000000000aa")
    from_jfk = world_stream("jfk", "B6@jfk", "ffffffffffffff01")
    world.send(from_ewr, range(1, 201))
    world.send(from_jfk, range(1, 101))
    world.report(from_ewr)
    world.report(from_jfk)
    return from_ewr, from_jfk


def world_stream(source: str, producer: str, stream: str):
    from types import SimpleNamespace

    return SimpleNamespace(
        source=source, producer=producer, stream=stream, topic="flights", partition=0, sent=[]
    )


def test_everything_carried_is_proven_and_a_rerun_changes_nothing(spark, world, streams):
    for stream in streams:
        world.carry(stream)
    world.position("ewr", 200)
    world.position("jfk", 100)
    first = audit(world)
    assert (first.exit_status, first.problem) == (0, "")
    assert first.summary["verdict"] == "PROVEN"
    assert first.summary["counts"] == {
        "acknowledged": 300,
        "seen": {"ewr": 200, "jfk": 100, "agg": 300},
        "missing": 0,
        "duplicates": 0,
        "unreported": 0,
        "unknown": 0,
        "explained": 0,
        "in_flight": 0,
    }
    before = sorted(str(path) for path in world.config.state.rglob("*"))
    second = audit(world)
    assert second.summary == first.summary
    assert (first.cost.records, second.cost.records) == (600, 0)
    assert "millrace_audit_run_records 0.0" in (world.config.report / "metrics.prom").read_text()
    assert sorted(str(path) for path in world.config.state.rglob("*")) == before


def test_where_nothing_was_sent_nothing_is_proven_and_a_rerun_changes_nothing(spark, world):
    first = audit(world)
    assert (first.exit_status, first.summary["verdict"]) == (2, "UNKNOWN")
    before = sorted(str(path) for path in world.config.state.rglob("*"))
    assert audit(world).summary == first.summary
    assert sorted(str(path) for path in world.config.state.rglob("*")) == before


def test_lost_and_repeated_records_are_named_with_the_hop_and_never_netted(spark, world, streams):
    from_ewr, from_jfk = streams
    world.carry(from_ewr, lose=[5, 17, 18], repeat=[33, 34, 35])
    world.carry(from_jfk)
    world.position("ewr", 200)
    world.position("jfk", 100)
    result = audit(world)
    assert result.exit_status == 1
    named = [(each["producer"], each["sequences"], each["lost_between"]) for each in result.summary["losses"]]
    assert named == [("UA@ewr", [[5, 5]], ["ewr", "agg"]), ("UA@ewr", [[17, 18]], ["ewr", "agg"])]
    doubled = [(each["producer"], each["sequences"], each["tier"]) for each in result.summary["duplicates"]]
    assert doubled == [("UA@ewr", [[33, 35]], "agg")]
    assert result.summary["counts"]["seen"]["agg"] == 297
    rows = pq.read_table(world.config.report / "reconciliation.parquet").to_pylist()
    assert sum(row["missing"] for row in rows) == 3 and sum(row["duplicates"] for row in rows) == 3
    assert sum(row["published"] for row in rows) == 300
    saved = json.loads((world.config.report / "summary.json").read_text())
    cost = saved.pop("run")
    assert saved == result.summary
    assert cost == asdict(result.cost) and cost["records"] == 600 and cost["state_files"] >= 3
    assert 600 * len("record 1") < cost["bytes"] < 100_000 and cost["seconds"] > 0 < cost["state_bytes"]
    page = (world.config.report / "index.html").read_text()
    assert "Records were lost" in page and "http:" not in page and "https:" not in page
    told = "\n".join(explain.lines(explain.explain(world.config, "flights", "2013-01-02")))
    assert "LOST between ewr and agg: 17-18" in told and "before it 16 was seen" in told


def test_record_lost_before_its_source_cluster_is_blamed_on_that_hop(spark, world):
    stream = world_stream("ewr", "UA@ewr", "00000000000000aa")
    world.send(stream, range(1, 8))
    world.send(stream, [8], reaches_source=False)
    world.send(stream, range(9, 11))
    world.report(stream)
    world.carry(stream, lose=[8])
    world.position("ewr", 9)
    result = audit(world)
    (loss,) = result.summary["losses"]
    assert loss["lost_between"] == ["produced", "ewr"] and loss["sequences"] == [[8, 8]]


def test_lag_is_not_loss_and_turns_into_proof_when_the_mirror_catches_up(spark, world, streams):
    from_ewr, from_jfk = streams
    world.carry(from_ewr, lose=range(151, 201))
    world.carry(from_jfk)
    world.position("ewr", 150)
    world.position("jfk", 100)
    lagging = audit(world)
    assert (lagging.exit_status, lagging.summary["verdict"]) == (2, "UNKNOWN")
    assert lagging.summary["losses"] == [] and lagging.summary["counts"]["in_flight"] == 50
    assert StateFolder.open(world.config.state).latest().offsets["ewr/flights/0"].next_offset == 150
    world.carry(from_ewr, lose=range(1, 151))
    world.position("ewr", 200)
    caught_up = audit(world)
    assert (caught_up.exit_status, caught_up.summary["verdict"]) == (0, "PROVEN")
    assert caught_up.summary["counts"]["seen"] == {"ewr": 200, "jfk": 100, "agg": 300}


def test_nothing_at_all_in_the_aggregate_is_a_loss_of_everything_passed(spark, world, streams):
    world.position("ewr", 200)
    world.position("jfk", 100)
    result = audit(world)
    assert result.exit_status == 1 and result.summary["counts"]["missing"] == 300


def test_unreadable_event_is_shown_and_forbids_proven(spark, world, streams):
    for stream in streams:
        world.carry(stream)
    world.position("ewr", 200)
    world.position("jfk", 100)
    world.clusters["ewr"].produce("millrace.audit", b"not json", key=b"count/00000000000000aa/0")
    result = audit(world)
    assert result.exit_status == 2 and result.summary["verdict"] == "UNKNOWN"
    assert any("not JSON" in each["what"] for each in result.summary["untrusted"])


def test_corrupt_identity_is_counted_and_forbids_proven(spark, world, streams):
    for stream in streams:
        world.carry(stream)
    world.position("ewr", 200)
    world.position("jfk", 100)
    world.clusters["agg"].produce("flights", b"?", headers=[("_mr", b"\x09" * 30)])
    result = audit(world)
    assert result.exit_status == 2
    assert any("unknown version" in each["what"] for each in result.summary["untrusted"])


def test_producer_of_the_roster_that_never_reported_is_unknown(spark, world, streams):
    for stream in streams:
        world.carry(stream)
    world.position("ewr", 200)
    world.position("jfk", 100)
    members = [RosterMember(name=name) for name in ("UA@ewr", "AA@lga")]
    world.config = world.config.model_copy(update={"producers": members})
    result = audit(world)
    assert result.exit_status == 2
    assert {row["producer"]: row["verdict"] for row in result.summary["producers"]}["AA@lga"] == "UNKNOWN"


def test_cluster_that_cannot_be_reached_is_one_line_and_leaves_no_verdict(spark, world, streams, monkeypatch):
    from millrace.broker.client import cluster

    address = f"127.0.0.1:{free_port()}"
    clusters = dict(world.config.clusters)
    clusters["jfk"] = clusters["jfk"].model_copy(update={"bootstrap": [address]})
    world.config = world.config.model_copy(update={"clusters": clusters})
    original = cluster.Cluster.__init__
    monkeypatch.setattr(
        cluster.Cluster,
        "__init__",
        lambda self, *args, **more: original(self, *args, **{**more, "request_timeout_ms": 500}),
    )
    result = audit(world)
    assert result.exit_status == 3 and result.summary is None
    assert "jfk" in result.problem and "\n" not in result.problem
    assert StateFolder.open(world.config.state).latest() == Commit()
    assert not (world.config.report / "summary.json").exists()


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_job_that_dies_while_reconciling_leaves_nothing_behind(spark, world, streams, monkeypatch):
    for stream in streams:
        world.carry(stream)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "_reconcile", dies)
    with pytest.raises(KeyboardInterrupt):
        audit(world)
    state = world.config.state
    assert StateFolder.open(state).latest() == Commit()
    assert [path for path in state.rglob("*") if path.is_file()] == []


def test_of_two_jobs_at_once_one_stops_with_a_line(spark, world, streams, monkeypatch):
    for stream in streams:
        world.carry(stream)
    world.position("ewr", 200)
    world.position("jfk", 100)
    original = job._reconcile

    def overtaken(*step):
        monkeypatch.setattr(job, "_reconcile", original)
        assert audit(world).exit_status == 0
        kept.update(contents(world.config.state / "commits"))
        return original(*step)

    kept: dict[Path, bytes] = {}
    monkeypatch.setattr(job, "_reconcile", overtaken)
    slower = audit(world)
    assert slower.exit_status == 3 and "another audit job has committed run 1" in slower.problem
    assert kept and contents(world.config.state / "commits") == kept
    latest = StateFolder.open(world.config.state).latest()
    found = {str(path.relative_to(world.config.state)) for path in contents(world.config.state / "cells")}
    assert {name for name in found if not Path(name).name.startswith((".", "_"))} == set(latest.cells)
    after = audit(world)
    assert after.exit_status == 0 and after.summary["counts"]["duplicates"] == 0


def test_missing_java_is_one_line_that_says_what_to_install(world, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    result = job.run(world.config)
    assert result.exit_status == 3 and "install Java 17" in result.problem and "\n" not in result.problem
    assert os.environ["PATH"] == str(tmp_path)
    assert JavaMissing.exit_status == 13


def test_records_mode_shows_every_record_with_its_identity(spark, world, streams):
    world.flush()
    cluster = world.clusters["ewr"]
    rows = (
        spark.read.format("millrace")
        .option("kafka.bootstrap.servers", cluster.bootstrap)
        .option("subscribe", "flights")
        .option("includeIdentity", "true")
        .load()
    )
    found = rows.select("identity.sequence", "identity.stream", "value").collect()
    assert sorted(row.sequence for row in found) == list(range(1, 201))
    assert {row.stream for row in found} == {"00000000000000aa"}
    assert bytes(found[0].value).startswith(b"record ")


def test_pinned_ranges_give_the_cells_that_the_source_gives(spark, world, streams):
    world.flush()
    bootstrap = world.clusters["ewr"].bootstrap
    options = {"kafka.bootstrap.servers": bootstrap, "subscribe": "flights", "mode": "cells"}
    planned = spark.read.format("millrace").options(**options).load()
    pinned = read_pinned(
        spark,
        {
            "bootstraps": json.dumps({"cluster": [bootstrap]}),
            "ranges": json.dumps([asdict(range_) for range_ in pinned_ranges(bootstrap)]),
            "tasks": "1",
        },
    )
    cells = ["stream", "window_start_ms", "count", "first_offset", "last_offset", "bitmap", "note"]
    rows = [sorted(map(str, frame.select(cells).collect())) for frame in (planned, pinned)]
    assert rows[0] == rows[1] and len(rows[0]) > 1


def pinned_ranges(bootstrap: str) -> list[OffsetRange]:
    source = parse_source({"kafka.bootstrap.servers": bootstrap, "subscribe": "flights"})
    return asyncio.run(pin_ranges(source))


def test_reconciling_is_told_with_the_tasks_of_its_stages_while_it_lasts(spark, world, monkeypatch):
    stream = world.of_sixty()
    world.carry(stream)
    world.position("ewr", 60)
    world.flush()
    often = {**RunSteps.__init__.__kwdefaults__, "every_s": 0.01}
    monkeypatch.setattr(RunSteps.__init__, "__kwdefaults__", often)
    said: list[str] = []
    result = job.run(world.config, "local[2]", clock_ms=lambda: NOW_MS, progress=said.append)
    assert result.summary is not None, result.problem
    pattern = r"reconciling: [\d.]+ m?s so far, (\d+) of (\d+) tasks done"
    told = [re.fullmatch(pattern, line) for line in said]
    assert [each for each in told if each and 0 <= int(each[1]) <= int(each[2])]
    steps = [line for line in said if " so far" not in line and "% read" not in line]
    assert steps == [
        "reading events and pinning offsets",
        "counting 120 records",
        "reconciling",
        "summing up the verdicts",
        "keeping the state",
        "writing the report",
    ]
