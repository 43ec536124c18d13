"""The state on a Hadoop file system: the whole job through Hadoop's own API, at `file:///`; and what a job
that was cut off at any step leaves to the next one."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import shutil
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from millrace.audit import explain, job, status
from millrace.audit.keeping import hadoop_files, verdict_files
from millrace.audit.keeping.hadoop_files import FileSystemFailed, HadoopFiles
from millrace.audit.keeping.state import STATE_VERSION, Commit, CommitConflict, StateFolder
from millrace.audit.keeping.state_files import LocalFiles, StatePlaceUnsafe
from millrace.audit.keeping.verdict_files import row_files
from millrace.audit.runs import event_reading
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.broker.errors import MillraceError
from tests.waiting import patience

pytestmark = pytest.mark.java
START_MS = 1_356_998_400_000
NOW_MS = START_MS + 400 * 86_400_000


def audit(world, **more) -> job.JobResult:
    world.flush()
    return job.run(world.config, "local[2]", clock_ms=lambda: NOW_MS, **more)


@pytest.fixture
def stream(world):
    """One producer whose 60 records were carried; 58 of them, once two are lost."""
    stream = world.of_sixty()
    world.carry(stream, lose=[7, 8])
    world.position("ewr", 60)
    return stream


@pytest.fixture
def hadoop_place(spark, tmp_path) -> str:
    return f"file://{tmp_path}/remote-state"


def test_the_whole_job_runs_with_its_state_at_a_uri(
    spark, world, stream, hadoop_place, tmp_path, monkeypatch
):
    monkeypatch.setattr(verdict_files, "PART_ROWS", 1)  # rows are read while the report is written
    there = f"file://{tmp_path}/remote-report"
    world.config = world.config.model_copy(update={"state": hadoop_place, "report": there})
    first = audit(world)
    assert (first.exit_status, first.problem) == (1, "")
    report = tmp_path / "remote-report"
    assert json.loads((report / "summary.json").read_text()).items() > first.summary.items()
    assert status.read_status(world.config)["report_verdict"] == "LOSS"
    assert explain.explain(world.config, "flights", "2013-01-01")["verdict"] == "LOSS"
    told = {path.name: path.read_bytes() for path in report.iterdir() if not path.name.endswith(".crc")}
    assert {"index.html", "metrics.prom", "producers.parquet", "watermarks.json"} <= set(told)
    assert [each["sequences"] for each in first.summary["losses"]] == [[[7, 8]]]
    before = sorted(path.name for path in (tmp_path / "remote-state").rglob("*"))
    second = audit(world)
    assert second.summary == first.summary
    assert sorted(path.name for path in (tmp_path / "remote-state").rglob("*")) == before

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    world.config = world.config.model_copy(update={"state": f"file://{tmp_path}/remote-report/index.html/no"})
    verdict = (report / "summary.json").read_bytes()
    failed = audit(world)
    assert failed.exit_status == 3 and "cannot be written" in failed.problem
    assert "last run failed" in (report / "index.html").read_text()
    assert failed.problem in json.loads((report / "last_failure.json").read_text())["sentence"]
    assert (report / "summary.json").read_bytes() == verdict
    world.config = world.config.model_copy(update={"state": hadoop_place})
    monkeypatch.setattr(job, "_reconcile", dies)
    world.send(stream, [61])
    with pytest.raises(KeyboardInterrupt):
        audit(world)
    assert sorted(path.name for path in (tmp_path / "remote-state").rglob("*")) == before
    monkeypatch.undo()
    world.carry(stream, lose=range(1, 61))
    world.position("ewr", 61)
    third = audit(world)
    assert third.summary["counts"]["seen"] == {"ewr": 61, "jfk": 0, "agg": 59}
    names = {path.name for path in report.iterdir() if not path.name.endswith(".crc")}
    assert names == set(told), "the failure is gone, and nothing is left aside"


def test_a_runs_rows_are_brought_from_a_uri_once_and_never_read_through_the_gateway(
    spark, world, stream, hadoop_place, monkeypatch
):
    monkeypatch.setattr(verdict_files, "PART_ROWS", 1)
    brought, read, at_hand, source = [], [], HadoopFiles.at_hand, HadoopFiles.source

    def bring(self, name, copy):
        brought.append(name)
        return at_hand(self, name, copy)

    def look(self, name):
        read.append(name)
        return source(self, name)

    monkeypatch.setattr(HadoopFiles, "at_hand", bring)
    monkeypatch.setattr(HadoopFiles, "source", look)
    world.config = world.config.model_copy(update={"state": hadoop_place})
    found = audit(world)
    assert (found.exit_status, found.summary["counts"]["missing"]) == (1, 2)
    latest = StateFolder.look(hadoop_place).latest()
    assert sorted(brought) == sorted(row_files(latest.verdicts)) and row_files(read) == []


def test_of_many_commits_of_one_number_one_wins_through_hadoop(spark, hadoop_place):
    states = [StateFolder.open(hadoop_place) for _ in range(4)]
    won: list[int] = []
    together = threading.Barrier(len(states))

    def commit(which: int, number: int) -> None:
        together.wait()
        with contextlib.suppress(CommitConflict):
            states[which].commit(Commit(number=number, at_ms=which))
            won.append(which)

    for number in (1, 2, 3):
        won.clear()
        threads = [threading.Thread(target=commit, args=(which, number)) for which in range(len(states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience(60))
        assert len(won) == 1 and states[0].latest() == Commit(number=number, at_ms=won[0])
    assert [entry.name for entry in states[0].files.entries("commits")] == [
        "00000001.json",
        "00000002.json",
        "00000003.json",
    ]


def test_both_kinds_of_files_keep_the_same_promises(spark, hadoop_place, tmp_path):
    for files in (LocalFiles(tmp_path / "local"), HadoopFiles(hadoop_place)):
        files.prepare(("commits", "cells"))
        assert files.create("commits/1", b"first") and not files.create("commits/1", b"second")
        assert files.read("commits/1") == b"first"
        files.write("cells/a", b"\x00\xff" * 1000)
        assert files.read("cells/a") == b"\x00\xff" * 1000
        assert files.at_hand("cells/a", tmp_path / "copy").read_bytes() == b"\x00\xff" * 1000
        with pytest.raises(FileNotFoundError):
            files.at_hand("cells/b", tmp_path / "none").read_bytes()
        (entry,) = files.entries("cells")
        assert (entry.name, entry.size, entry.is_folder) == ("a", 2000, False)
        assert [each.name for each in files.entries("")] == ["cells", "commits"]
        files.remove("cells")
        files.remove("cells")
        assert files.entries("cells") == []
        with pytest.raises(FileNotFoundError):
            files.read("cells/a")


def test_a_link_whose_answer_was_lost_is_ours_and_a_place_without_links_is_refused(
    spark, hadoop_place, tmp_path, monkeypatch
):
    files = HadoopFiles(hadoop_place)
    files.prepare(("commits",))
    put, place = HadoopFiles._put, tmp_path / "remote-state"

    def and_linked(self, name, content):
        put(self, name, content)
        (place / "commits" / "1").hardlink_to(place / name)

    monkeypatch.setattr(HadoopFiles, "_put", and_linked)
    assert files.create("commits/1", b"first")
    monkeypatch.undo()
    assert not files.create("commits/1", b"second") and files.read("commits/1") == b"first"
    assert [entry.name for entry in files.entries("commits")] == ["1"]

    def refused(self, temporary, name):
        raise FileSystemFailed(f"{hadoop_place}: Operation not permitted (FileSystemException)")

    monkeypatch.setattr(HadoopFiles, "_link", refused)
    with pytest.raises(StatePlaceUnsafe, match=r"no hard links \(Operation not permitted.*set state:"):
        StateFolder.open(hadoop_place)
    assert {entry.name for entry in files.entries("") if not entry.is_folder} == set()


def test_a_store_that_creates_at_close_gives_the_name_once_and_its_lost_answer_is_looked_up(
    spark, hadoop_place, monkeypatch
):
    """As Google's and S3's: there is no name aside, and what is refused may be the second try of our own."""
    monkeypatch.setattr(hadoop_files, "commit_rule", lambda *_: hadoop_files.Rule.GENERATION)
    files = HadoopFiles(hadoop_place)
    files.prepare(("commits",))
    assert [entry.name for entry in files.entries("")] == ["commits"], "the probe is gone"
    assert files.create("commits/1", b"first") and not files.create("commits/1", b"second")
    assert files.read("commits/1") == b"first"

    create = HadoopFiles._create_at_close
    lost = FileSystemFailed(f"{hadoop_place}: connection reset (SocketException)")

    def answer_is_lost(self, name, content, rule):
        create(self, name, content, rule)
        raise lost

    monkeypatch.setattr(HadoopFiles, "_create_at_close", answer_is_lost)
    assert files.create("commits/2", b"ours")
    assert not files.create("commits/1", b"second") and files.read("commits/1") == b"first"

    def fails(self, name, content, rule):
        raise lost

    monkeypatch.setattr(HadoopFiles, "_create_at_close", fails)
    with pytest.raises(FileSystemFailed, match="connection reset"):
        files.create("commits/3", b"nobody's")
    monkeypatch.undo()

    # A store that does not know the option says so before anything is written.
    monkeypatch.setattr(hadoop_files, "commit_rule", lambda *_: hadoop_files.Rule.CONDITIONAL)
    unknowing = HadoopFiles(hadoop_place)
    with pytest.raises(MillraceError) as refused:
        unknowing.prepare(("commits",))
    assert hadoop_files.CONDITIONAL_CREATE in str(refused.value) and "\n" not in str(refused.value)
    assert [entry.name for entry in files.entries("")] == ["commits"]


class Killed(BaseException):
    """The process is gone: nothing that it meant to do afterwards happens."""


class CutOff:
    """A state's files that end the job at the n-th step that changes something, before or after it."""

    def __init__(self, files: LocalFiles, step: int, *, after: bool) -> None:
        self._files, self._left, self._after, self.dead = files, step, after, False
        self.where, self.root = files.where, files.root

    def __getattr__(self, name: str):
        call = getattr(self._files, name)
        if not callable(call):
            return call

        def step(*args: object):
            if self.dead:
                raise Killed
            if name in ("write", "create", "flush"):
                self._left -= 1
                if self._left == 0:
                    self.dead = True
                    if self._after:
                        call(*args)
                    raise Killed
            return call(*args)

        return step


def test_a_job_cut_off_at_any_step_leaves_the_next_one_the_same_verdicts(spark, world, stream, monkeypatch):
    """The steps that change the state: facts, cells made durable, verdicts made durable, the lines that no
    stream has, the commit."""
    undisturbed = audit(world)
    original = StateFolder.open.__func__
    for step, after in ((1, False), (2, False), (3, False), (4, False), (5, False), (5, True)):
        state = world.config.report.parent / f"cut-{step}-{after}"
        world.config = world.config.model_copy(update={"state": state})

        def opened(cls, place, step=step, after=after):
            folder = original(cls, place)
            folder.files = CutOff(folder.files, step, after=after)
            return folder

        with monkeypatch.context() as cut:
            cut.setattr(StateFolder, "open", classmethod(opened))
            cut.setattr(shutil, "rmtree", lambda *_, **__: None)
            with pytest.raises(Killed):
                audit(world)
        assert StateFolder.open(state).latest().number == after
        next_one = audit(world)
        assert (next_one.exit_status, next_one.summary) == (undisturbed.exit_status, undisturbed.summary)


def test_events_are_read_once_but_those_of_a_job_that_was_cut_off_again(
    spark, world, stream, tmp_path, monkeypatch
):
    read, original = {}, event_reading.read_topic_to_end

    def noted(cluster, topic, **options):
        if "until" in options:
            read[cluster.name] = (options["since"][0], options["until"][0])
        return original(cluster, topic, **options)

    def dies(*_):
        raise Killed

    monkeypatch.setattr(event_reading, "read_topic_to_end", noted)
    assert audit(world).exit_status == 1
    state = StateFolder.open(world.config.state)
    first, (begin, end) = state.latest(), read["ewr"]
    assert begin == 0 < end == first.events_read["ewr/millrace.audit/0"].next_offset
    world.send(stream, range(61, 71))
    world.report(stream, report=2)
    with monkeypatch.context() as cut, pytest.raises(Killed):
        cut.setattr(StateFolder, "commit", dies)
        audit(world)
    assert read["ewr"][0] == end and state.latest() == first
    world.carry(stream, lose=range(1, 61))
    world.position("ewr", 70)
    read.clear()
    after = audit(world)
    assert read["ewr"][0] == end < read["ewr"][1]
    assert (after.summary["counts"]["acknowledged"], after.summary["counts"]["missing"]) == (70, 2)
    again = audit(world)
    assert again.summary == after.summary and len(set(read["ewr"])) == 1
    assert state.latest().number == 2, "nothing was learnt"
    world.config = world.config.model_copy(update={"state": tmp_path / "anew"})
    whole = audit(world)
    assert read["ewr"][0] == 0 and whole.summary["counts"] == after.summary["counts"]
    anew = StateFolder.open(tmp_path / "anew").latest()
    assert anew.events_digest == state.latest().events_digest, "the facts are the same"


def test_a_disk_that_is_full_is_one_line_and_the_last_good_state_stays(spark, world, stream, monkeypatch):
    assert audit(world).exit_status == 1
    before = StateFolder.open(world.config.state).latest()
    world.send(stream, range(61, 71))
    world.report(stream, report=2)
    original = LocalFiles.write

    def full(self, name: str, content: bytes) -> None:
        if name.startswith("verdicts/"):
            raise OSError(errno.ENOSPC, "No space left on device", str(self.root / name))
        original(self, name, content)

    monkeypatch.setattr(LocalFiles, "write", full)
    failed = audit(world)
    assert failed.exit_status == 3 and failed.summary is None
    assert "No space left" in failed.problem and "make room" in failed.problem and "\n" not in failed.problem
    assert StateFolder.open(world.config.state).latest() == before
    monkeypatch.undo()
    world.carry(stream, lose=range(1, 61))
    world.position("ewr", 70)
    after = audit(world)
    assert after.summary["counts"]["seen"] == {"ewr": 70, "jfk": 0, "agg": 68}
    assert after.summary["counts"]["duplicates"] == 0


@pytest.mark.parametrize("lenient", ["false", "true"])
def test_verdicts_that_cannot_be_read_again_are_one_line_and_the_last_good_state_stays(
    spark, world, stream, request, lenient
):
    """Also where Spark is set to pass over such files."""
    for name in ("spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles"):
        request.addfinalizer(functools.partial(spark.conf.unset, name))
        spark.conf.set(name, lenient)
    assert audit(world).exit_status == 1
    state = StateFolder.open(world.config.state)
    latest = state.latest()
    path = world.config.state / row_files(latest.verdicts)[0]
    path.with_name(f".{path.name}.crc").unlink()
    whole = path.read_bytes()
    for content in (whole[:-20], None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        failed = audit(world)
        assert failed.exit_status == 3 and "\n" not in failed.problem
        assert str(path) in failed.problem and "state" in failed.problem
        assert state.latest() == latest
    path.write_bytes(whole)
    damaged = world.config.state / latest.cells[0]
    damaged.with_name(f".{damaged.name}.crc").unlink()
    counts = pq.ParquetFile(damaged).metadata.row_group(0).column(CELL_SCHEMA.get_field_index("count"))
    content = bytearray(damaged.read_bytes())
    begin = counts.dictionary_page_offset if counts.has_dictionary_page else counts.data_page_offset
    last = begin + counts.total_compressed_size - 1
    content[last] ^= 1
    damaged.write_bytes(content)
    failed = audit(world)
    assert failed.exit_status == 3 and f"{damaged} cannot be read; " in failed.problem
    assert "name another folder as state to begin anew: every run on record needs it" in failed.problem
    content[last] ^= 1
    damaged.write_bytes(content)
    assert audit(world).exit_status == 1


@pytest.mark.parametrize("remote", [False, True], ids=["local", "uri"])
def test_a_state_that_lacks_a_file_or_is_newer_is_one_line_and_stays_as_it_is(
    spark, world, stream, tmp_path, remote
):
    """Each kind of file in turn. The report keeps the last verdict, and beside it tells of the failure."""
    place = tmp_path / "kept"
    world.config = world.config.model_copy(update={"state": f"file://{place}" if remote else place})
    assert audit(world).exit_status == 1
    world.send(stream, [61])
    world.report(stream, report=2)
    second = audit(world)
    assert second.exit_status == 1
    state = StateFolder.open(world.config.state)
    latest = state.latest()
    (lines,) = [name for name in latest.verdicts if name.endswith("lines.parquet")]
    commit = f"commits/{latest.number:08d}.json"
    verdict = (world.config.report / "summary.json").read_bytes()

    def failed_by(said: str, needed: str) -> None:
        kept = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
        failed = audit(world)
        assert failed.exit_status == 3 and failed.summary is None
        assert said in failed.problem and needed in failed.problem and "\n" not in failed.problem
        assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == kept
        assert (world.config.report / "summary.json").read_bytes() == verdict
        told = json.loads((world.config.report / "last_failure.json").read_text())
        assert failed.problem in told["sentence"]

    for name in (latest.cells[0], latest.events, row_files(latest.verdicts)[0], lines):
        path = place / name
        whole = path.read_bytes()
        path.unlink()
        way = (
            f"move {state.where}/{commit} away" if name != latest.cells[0] else "every run on record needs it"
        )
        failed_by(f"{state.where}/{name} is not there", way)
        path.write_bytes(whole)
    content = json.loads((place / commit).read_text())
    newer = {**content, "commit": {**content["commit"], "version": STATE_VERSION + 1}}
    (place / f"commits/.{latest.number:08d}.json.crc").unlink(missing_ok=True)
    (place / commit).write_text(json.dumps(newer))
    failed_by(f"{state.where}/{commit} has format version {STATE_VERSION + 1}", "use the newer program")
    (place / commit).write_text(json.dumps(content))
    (place / "commits").rename(tmp_path / "commits")
    (place / "commits").mkdir()
    failed_by(f"{state.where}/commits has no commit", "is of run 2; restore the commits")
    (place / "commits").rmdir()
    (tmp_path / "commits").rename(place / "commits")
    assert state.latest() == latest
    assert audit(world).exit_status == 1

    # The way that is named leads back: what the run had read is read again, and said again.
    (place / latest.events).unlink()
    (place / commit).rename(tmp_path / "moved away")
    assert state.latest().number == latest.number - 1
    assert audit(world).summary == second.summary
    assert state.latest().number == latest.number
    assert audit(world).summary == second.summary


def test_what_a_person_mistyped_is_named(spark, world, stream, tmp_path: Path):
    (tmp_path / "file").touch()
    config = world.config
    world.config = config.model_copy(update={"report": tmp_path / "file" / "report"})
    failed = audit(world)
    assert failed.exit_status == 3 and "set report:" in failed.problem
    world.config = config.model_copy(update={"topics": ["flihgts"]})
    doubtful = audit(world)
    assert doubtful.exit_status == 2 and "flihgts" in json.dumps(doubtful.summary["untrusted"])
