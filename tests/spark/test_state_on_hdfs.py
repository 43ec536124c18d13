"""The state on a real HDFS (a name node, a data node; `make test-hdfs`): the whole job, what a person asks of
it, and what happens to it when the file system fails, refuses, or is asked by two jobs at once.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from millrace.audit import explain, job, status
from millrace.audit.keeping.hadoop_files import FileSystemAway, HadoopFiles, StatePlaceUnsafe
from millrace.audit.keeping.state import Commit, CommitConflict, StateFolder
from millrace.audit.keeping.verdict_files import own_lines
from millrace.audit.keeping.waivers import give_waiver
from millrace.broker.errors import DiskFull, MillraceError
from tests.peers.hdfs import SUPERUSER, HdfsPeer
from tests.waiting import patience

# It fetches 56 MB and takes two minutes.
pytestmark = [pytest.mark.java, pytest.mark.long]
DAY_MS = 86_400_000
START_MS = 1_356_998_400_000
NOW_MS = START_MS + 400 * DAY_MS
FEW_TRIES = {"ipc.client.connect.max.retries": "1", "ipc.client.connect.retry.interval": "100"}


@pytest.fixture(scope="module")
def hdfs(spark, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """HDFS, with `/open` for everybody; `admin` is its file system for the superuser."""
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    for name, value in FEW_TRIES.items():
        conf.set(name, value)
    jvm = spark.sparkContext._jvm
    with HdfsPeer(tmp_path_factory.mktemp("hdfs")) as peer:
        at = jvm.java.net.URI(peer.uri)
        admin = jvm.org.apache.hadoop.fs.FileSystem.get(at, conf, SUPERUSER)

        def path(name: str):
            return jvm.org.apache.hadoop.fs.Path(f"{peer.uri}{name}")

        def allow(name: str, mode: str) -> None:
            admin.mkdirs(path(name))
            admin.setPermission(path(name), jvm.org.apache.hadoop.fs.permission.FsPermission(mode))

        allow("/open", "777")
        safe_mode = jvm.org.apache.hadoop.fs.SafeModeAction
        yield SimpleNamespace(peer=peer, admin=admin, path=path, allow=allow, safe_mode=safe_mode)
    for name in FEW_TRIES:
        conf.unset(name)


@pytest.fixture
def place(hdfs, request) -> str:
    return f"{hdfs.peer.uri}/open/{request.node.name}"


@pytest.fixture
def stream(world, place):
    """60 records, of which the mirror lost two; the state lies on HDFS."""
    world.config = world.config.model_copy(update={"state": place})
    stream = world.of_sixty()
    world.carry(stream, lose=[7, 8])
    world.position("ewr", 60)
    return stream


def audit(world, now_ms: int = NOW_MS) -> job.JobResult:
    world.flush()
    return job.run(world.config, "local[2]", clock_ms=lambda: now_ms)


def failed_in_one_line(result: job.JobResult) -> str:
    assert result.exit_status == 3 and result.summary is None
    assert "\n" not in result.problem and "\tat " not in result.problem and len(result.problem) < 500
    return result.problem


def names(files: HadoopFiles, folder: str = "") -> list[str]:
    """Everything below the folder, but for checksums."""
    found = []
    for entry in files.entries(folder):
        name = f"{folder}/{entry.name}".lstrip("/")
        found += [name, *(names(files, name) if entry.is_folder else ())]
    return found


def contents(state: StateFolder) -> dict[str, bytes]:
    """Of all that the newest run on record needs."""
    latest = state.latest()
    needed = [f"commits/{latest.number:08d}.json", latest.events, *latest.cells, *latest.verdicts]
    return {name: state.files.read(name) for name in needed}


def test_runs_questions_and_waivers(world, stream, place, hdfs):
    report = f"{hdfs.peer.uri}/open/report"
    world.config = world.config.model_copy(update={"report": report})
    first = audit(world)
    assert (first.exit_status, first.problem) == (1, "")
    made = {"index.html", "metrics.prom", "producers.parquet", "reconciliation.parquet", "summary.json"}
    assert set(names(HadoopFiles(report))) == {*made, "watermarks.json"}
    assert [each["sequences"] for each in first.summary["losses"]] == [[[7, 8]]]
    files = StateFolder.look(place).files
    before = names(files)
    again = audit(world)
    assert again.summary == first.summary and names(files) == before

    told = status.read_status(world.config)
    assert told["run"] == 1 and told["size"]["files"] >= 3 and told["state"] == place
    assert told["topics"]["flights"]["windows"]["LOSS"] == 1
    assert told["report_verdict"] == "LOSS"
    explained = explain.explain(world.config, "flights", "2013-01-01")
    assert (explained["verdict"], explained["evidence"]) == ("LOSS", None)
    give_waiver(StateFolder.open(place), "flights", START_MS, "ann", "the disk of ewr-2 was lost", NOW_MS)
    waived = audit(world)
    assert waived.exit_status == 0
    assert status.read_status(world.config)["topics"]["flights"]["waivers"] == 1
    world.send(stream, [61, 62])
    world.report(stream, report=2)
    world.carry(stream, lose=range(1, 61))
    world.position("ewr", 62)
    later = audit(world)
    assert later.summary["counts"]["seen"] == {"ewr": 62, "jfk": 0, "agg": 60}
    assert StateFolder.look(place).latest().offsets["ewr/flights/0"].next_offset == 62


CHILD = """
import json, os, signal, sys
from pathlib import Path
from millrace.audit import job
from millrace.audit.config import AuditConfig
from millrace.audit.keeping.state import StateFolder

config = AuditConfig.model_validate(json.loads(sys.argv[1]))
config = config.model_copy(update={"state": sys.argv[2], "report": Path(sys.argv[3])})
StateFolder.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
job.run(config, "local[1]", clock_ms=lambda: int(sys.argv[4]))
"""


def test_a_job_killed_before_its_commit_leaves_the_last_good_state(world, stream, place, tmp_path):
    assert audit(world).exit_status == 1
    files = StateFolder.look(place).files
    good, there = StateFolder.look(place).latest(), names(files)
    world.send(stream, range(61, 71))
    world.report(stream, report=2)
    world.flush()
    settings = world.config.model_dump(mode="json", by_alias=True)
    for name in ("window", "grace", "keep"):
        settings[name] = f"{settings[name]}ms"
    del settings["zookeeper"]
    child = [sys.executable, "-c", CHILD, json.dumps(settings), place, str(tmp_path / "child"), str(NOW_MS)]
    assert subprocess.run(child, timeout=patience(600), check=False).returncode == -signal.SIGKILL
    assert StateFolder.look(place).latest() == good
    left = set(names(files)) - set(there)
    assert any(name.startswith("verdicts/") for name in left)  # it had come as far as that
    world.carry(stream, lose=range(1, 61))
    world.position("ewr", 70)
    after = audit(world)
    assert after.summary["counts"]["seen"] == {"ewr": 70, "jfk": 0, "agg": 68}
    assert after.summary["counts"]["duplicates"] == 0
    state = StateFolder.open(place)
    state.sweep(state.latest(), now_s=time.time() + 2 * 86_400)
    assert not left & set(names(files))


def test_of_two_jobs_at_once_one_commits_and_the_other_says_so(world, stream, place, monkeypatch):
    reconcile, others = job._reconcile, []

    def meanwhile(*given):
        monkeypatch.setattr(job, "_reconcile", reconcile)
        others.append(audit(world))
        return reconcile(*given)

    monkeypatch.setattr(job, "_reconcile", meanwhile)
    told = failed_in_one_line(audit(world))
    assert "another audit job has committed run 1" in told and others[0].exit_status == 1
    assert audit(world).summary == others[0].summary
    assert {name.split("-")[0] for name in names(StateFolder.look(place).files) if "/" in name} >= {
        "cells/00000001"
    }


def test_of_many_commits_of_one_number_one_wins(hdfs, place):
    states = [StateFolder.open(place) for _ in range(4)]
    won: list[int] = []
    together = threading.Barrier(len(states))

    def commit(which: int, number: int) -> None:
        together.wait(patience(60))
        with contextlib.suppress(CommitConflict):
            states[which].commit(Commit(number=number, at_ms=which))
            won.append(which)

    for number in range(1, 9):
        won.clear()
        threads = [threading.Thread(target=commit, args=(which, number)) for which in range(len(states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(60))
        assert len(won) == 1 and states[0].latest() == Commit(number=number, at_ms=won[0])
    assert names(states[0].files, "commits") == [f"commits/{number:08d}.json" for number in range(1, 9)]


class LostAnswer:
    """A file system of which one call's answer never arrives: it is done, and told as failed or refused."""

    def __init__(self, fs, call: str, answer) -> None:
        self._fs, self._call, self._answer = fs, call, answer

    def __getattr__(self, name: str):
        original = getattr(self._fs, name)
        if name != self._call:
            return original

        def call(*given):
            original(*given)
            if isinstance(self._answer, Exception):
                raise self._answer
            return self._answer

        return call


@pytest.mark.parametrize("answer", [False, FileSystemAway("the name node failed over")])
def test_a_commit_whose_answer_was_lost_counts_as_made(hdfs, place, answer):
    state = StateFolder.open(place)
    honest = state.files._fs
    state.files._fs = LostAnswer(honest, "rename", answer)
    state.commit(Commit(number=1, at_ms=5))
    assert state.latest() == Commit(number=1, at_ms=5)
    with pytest.raises(CommitConflict):
        state.commit(Commit(number=1, at_ms=5))
    assert names(state.files, "commits") == ["commits/00000001.json"]


def test_old_evidence_is_pruned(world, stream, place):
    assert audit(world).exit_status == 1
    state = StateFolder.open(place)
    give_waiver(state, "flights", START_MS, "ann", "known", NOW_MS)
    later_ms = NOW_MS + (world.config.keep_ms or 0) + DAY_MS
    pruned = audit(world, later_ms)
    assert pruned.exit_status == 0, pruned.problem
    latest = state.latest()
    assert latest.number == 2 and own_lines(state, latest.verdicts)[1].num_rows == 6
    assert all("-folded/" in name for name in latest.cells)
    world.send(stream, [61])  # a third commit, for the last two stay with all that they name
    after = audit(world, later_ms)
    assert after.summary["losses"] == [] and state.latest().number == 3
    state.sweep(state.latest(), now_s=time.time() + 2 * 86_400)
    left = names(state.files)
    assert not [name for name in left if "/00000001" in name and not name.startswith("waivers/")]
    assert audit(world, later_ms).summary == after.summary


def test_a_name_node_that_dies_in_the_middle_is_one_line_and_the_next_run_goes_on(
    hdfs, world, stream, place, monkeypatch
):
    good = audit(world)
    kept = contents(StateFolder.look(place))
    world.send(stream, range(61, 71))
    world.report(stream, report=2)
    world.carry(stream, lose=range(1, 61))
    world.position("ewr", 70)
    for step in ("_count", "_reconcile", "keep_verdicts"):
        original = getattr(job, step)

        def dies(*given, original=original):
            hdfs.peer.kill_name_node()
            return original(*given)

        with monkeypatch.context() as cut:
            cut.setattr(job, step, dies)
            told = failed_in_one_line(audit(world))
        assert "cannot be reached" in told or "cannot reach" in told, (step, told)
        if step == "_reconcile":
            told = failed_in_one_line(audit(world))
            assert "cannot be reached" in told and "run it again" in told
            with pytest.raises(MillraceError, match="cannot be reached"):
                status.read_status(world.config)
        hdfs.peer.start_name_node()
        state = StateFolder.look(place)
        assert state.latest().number == 1 and kept.items() <= contents(state).items()
    after = audit(world)
    assert after.summary["counts"]["seen"] == {"ewr": 70, "jfk": 0, "agg": 68}
    assert after.summary["losses"] == good.summary["losses"]


def test_safe_mode_stops_the_job_with_one_line_and_no_question(hdfs, world, stream, place):
    good = audit(world)
    world.send(stream, [61])
    hdfs.admin.setSafeMode(hdfs.safe_mode.ENTER)
    try:
        told = failed_in_one_line(audit(world))
        assert "safe mode" in told and "set state:" not in told
        assert status.read_status(world.config)["run"] == 1
        with pytest.raises(MillraceError, match="safe mode"):
            StateFolder.open(place)
    finally:
        hdfs.admin.setSafeMode(hdfs.safe_mode.LEAVE)
    assert audit(world).summary["losses"] == good.summary["losses"]


def test_safe_mode_that_begins_in_the_middle(hdfs, world, stream, monkeypatch):
    for step in ("_count", "keep_verdicts"):
        original = getattr(job, step)

        def begins(*given, original=original):
            hdfs.admin.setSafeMode(hdfs.safe_mode.ENTER)
            return original(*given)

        with monkeypatch.context() as cut:
            cut.setattr(job, step, begins)
            try:
                assert "safe mode" in failed_in_one_line(audit(world)), step
            finally:
                hdfs.admin.setSafeMode(hdfs.safe_mode.LEAVE)
    assert audit(world).exit_status == 1


def test_a_folder_without_permission_is_one_line(hdfs, world, stream):
    forbidden = f"{hdfs.peer.uri}/forbidden/state"
    allowed, world.config = world.config, world.config.model_copy(update={"state": forbidden})
    told = failed_in_one_line(audit(world))
    assert "Permission denied" in told and "set state:" in told and told.count(forbidden) == 1
    hdfs.allow("/forbidden", "700")
    with pytest.raises(MillraceError, match=r"Permission denied.*AccessControlException\)$"):
        status.read_status(world.config)
    assert audit(world).exit_status == 3
    world.config = allowed
    assert audit(world).exit_status == 1


def test_a_quota_that_is_used_up_is_a_full_disk(hdfs, place):
    state = StateFolder.open(place)
    hdfs.admin.setQuota(hdfs.path(place.removeprefix(hdfs.peer.uri)), 7, 2**62)
    with pytest.raises(DiskFull, match="make room"):
        for number in range(1, 9):
            state.commit(Commit(number=number))
    kept = state.latest().number
    hdfs.admin.setQuota(hdfs.path(place.removeprefix(hdfs.peer.uri)), 2**62, 2**62)
    state.commit(Commit(number=kept + 1))
    assert names(state.files, "commits") == [f"commits/{each:08d}.json" for each in range(1, kept + 2)]


def test_a_path_is_judged_by_where_it_leads_and_not_by_its_scheme(hdfs, spark, world, stream, tmp_path):
    """Hadoop's mount table under S3A's scheme."""
    settings = {
        "fs.s3a.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
        "fs.viewfs.mounttable.bucket.link./fast": f"{hdfs.peer.uri}/open",
        "fs.viewfs.mounttable.bucket.linkFallback": tmp_path.as_uri(),
    }
    conf = spark.sparkContext._jsc.hadoopConfiguration()
    for name, value in settings.items():
        conf.set(name, value)
    try:
        files = HadoopFiles("s3a://bucket/fast/state")
        files.prepare(("commits",))  # the mount is known for what it is
        assert files.create("commits/1", b"first") and not files.create("commits/1", b"second")
        assert str(files._fs.getUri()) == hdfs.peer.uri and files.where == "s3a://bucket/fast/state"
    finally:
        for name in settings:
            conf.unset(name)
    with pytest.raises(MillraceError, match=r"(No FileSystem for scheme|not found).*spark\.jars"):
        HadoopFiles("s3a://another/state")
    world.config = world.config.model_copy(update={"state": "s3a://another/state"})
    assert "spark.jars" in failed_in_one_line(audit(world))


def test_a_store_that_leaves_the_condition_unread_is_refused(hdfs, place, monkeypatch):
    """A file system that has the option by its word, and replaces the file all the same."""
    from millrace.audit.keeping import hadoop_files

    monkeypatch.setattr(hadoop_files, "commit_rule", lambda *_: hadoop_files.Rule.CONDITIONAL)
    files = HadoopFiles(place)

    def replaces(name: str, content: bytes, _rule) -> None:
        stream = files._fs.create(files._path(name), True)
        stream.write(bytearray(content))
        stream.close()

    monkeypatch.setattr(files, "_create_at_close", replaces)
    with pytest.raises(StatePlaceUnsafe, match="replaced a file"):
        files.prepare(("commits",))
    monkeypatch.undo()
    monkeypatch.setattr(hadoop_files, "commit_rule", lambda *_: None)
    with pytest.raises(StatePlaceUnsafe, match="two jobs could both commit"):
        HadoopFiles(place).prepare(("commits",))
