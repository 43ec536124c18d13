"""Commit files: atomic, guarded, one winner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from millrace.audit.keeping import state_files
from millrace.audit.keeping.state import (
    STATE_VERSION,
    Commit,
    CommitConflict,
    ReadPosition,
    StateDamaged,
    StateFolder,
    UnreadNote,
    guarded,
)
from millrace.audit.keeping.state_files import StatePlaceUnsafe
from millrace.audit.keeping.untrusted_waivers import accept
from millrace.audit.keeping.work_folder import work_folder
from millrace.broker.errors import DataFolderNotWritable


def commit(number: int, next_offset: int = 5) -> Commit:
    return Commit(
        number=number,
        cells=["cells/run/a.parquet"],
        events="events/run.parquet",
        offsets={"ewr/flights/0": ReadPosition(next_offset, "id")},
        unread=[UnreadNote("ewr", "flights", 0, 1, 2, "expired", 9)],
    )


def test_empty_folder_is_an_empty_state(tmp_path):
    assert StateFolder.open(tmp_path).latest() == Commit()


def test_committed_state_is_read_back_whole(tmp_path):
    state = StateFolder.open(tmp_path)
    state.commit(commit(1))
    state.commit(commit(2, 9))
    assert StateFolder.open(tmp_path).latest() == commit(2, 9)


def test_second_job_with_the_same_number_stops_and_changes_nothing(tmp_path):
    state = StateFolder.open(tmp_path)
    state.commit(commit(1))
    with pytest.raises(CommitConflict, match="another audit job has committed run 1"):
        state.commit(commit(1, 99))
    assert state.latest() == commit(1)
    assert [path.name for path in (tmp_path / "commits").iterdir()] == ["00000001.json"]


def test_flipped_digit_in_the_newest_commit_is_an_error_and_not_an_older_state(tmp_path):
    state = StateFolder.open(tmp_path)
    state.commit(commit(1))
    state.commit(commit(2))
    path = tmp_path / "commits" / "00000002.json"
    path.write_text(path.read_text().replace('"next_offset": 5', '"next_offset": 6'))
    with pytest.raises(StateDamaged, match="CRC"):
        state.latest()


def test_torn_commit_is_an_error(tmp_path):
    state = StateFolder.open(tmp_path)
    state.commit(commit(1))
    path = tmp_path / "commits" / "00000001.json"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(StateDamaged, match="not a commit file"):
        state.latest()


def test_state_of_a_newer_program_is_refused_with_its_version(tmp_path):
    state = StateFolder.open(tmp_path)
    state.commit(commit(1))
    path = tmp_path / "commits" / "00000001.json"
    envelope = json.loads(path.read_text())
    envelope["commit"]["version"] = STATE_VERSION + 1
    path.write_text(json.dumps(envelope))
    with pytest.raises(StateDamaged, match=f"format version {STATE_VERSION + 1}"):
        state.latest()


def test_a_state_whose_commits_are_gone_is_no_empty_one(tmp_path):
    state = StateFolder.open(tmp_path)
    (tmp_path / "cells" / "00000001-abc").mkdir()
    assert state.latest() == Commit(), "the first run died before it could commit"
    (tmp_path / "verdicts" / "00000002-def").mkdir()
    with pytest.raises(StateDamaged, match=r"commits has no commit, and \S+00000002-def is of run 2"):
        state.latest()


def test_a_file_that_the_commit_names_and_that_is_gone_is_named_with_the_way_back(tmp_path):
    state = StateFolder.open(tmp_path)
    state.commit(replace(commit(1), events="events/before.parquet"))
    state.commit(commit(2))
    state.files.write("cells/run/a.parquet", b"")
    with pytest.raises(
        StateDamaged, match=r"events/run\.parquet is not there, .* move \S+00000002\.json away to go back one"
    ):
        state.require_files(commit(2))
    state.files.write("events/run.parquet", b"")
    state.require_files(commit(2))
    state.files.remove("cells/run")
    with pytest.raises(StateDamaged, match=r"cells/run/a\.parquet is not there"):
        state.require_files(commit(1))


def test_sweep_removes_old_files_of_dead_runs_only(tmp_path):
    state = StateFolder.open(tmp_path)
    for name in ("cells/run", "cells/dead", "cells/running"):
        (tmp_path / name).mkdir()
    (tmp_path / "events/dead.parquet").touch()
    for name in ("cells/run", "cells/dead", "events/dead.parquet"):
        os.utime(tmp_path / name, (0, 0))
    state.sweep(commit(1))
    assert sorted(path.name for path in (tmp_path / "cells").iterdir()) == ["run", "running"]
    assert list((tmp_path / "events").iterdir()) == []


def test_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "state").touch()
    with pytest.raises(DataFolderNotWritable, match="set state:"):
        StateFolder.open(tmp_path / "state")


def test_a_state_of_version_1_is_read_as_it_is(tmp_path):
    state = StateFolder.open(tmp_path)
    old = {
        "version": 1, "number": 4, "at_ms": 7, "window_ms": 60_000, "cells": ["cells/run/a.parquet"],
        "events": "events/run.parquet", "events_digest": "d", "unread": [], "gaps": [], "tiers": [],
        "offsets": {"ewr/flights/0": {"next_offset": 5, "topic_id": "id"}}, "untrusted": {"what": 1},
    }  # fmt: skip
    (tmp_path / "commits" / "00000004.json").write_bytes(guarded("commit", old))
    known = state.latest()
    assert (known.number, known.verdicts, known.watermarks) == (4, [], {})
    assert known.offsets == {"ewr/flights/0": ReadPosition(5, "id")} and known.untrusted == {"what": 1}


def test_an_audit_every_ten_minutes_keeps_the_rows_of_an_hour(tmp_path):
    """Each run writes all of them anew."""
    state = StateFolder.open(tmp_path)
    now_s = time.time()
    for number in range(1, 31):
        made = replace(
            commit(number),
            cells=[f"cells/run{number // 10}/a.parquet"],
            events=f"events/run{number}.parquet",
            verdicts=[f"verdicts/run{number}/a.parquet"],
        )
        (tmp_path / "cells" / f"run{number // 10}").mkdir(exist_ok=True)
        (tmp_path / "verdicts" / f"run{number}").mkdir()
        (tmp_path / made.verdicts[0]).touch()
        (tmp_path / made.events).touch()
        state.commit(made)
        os.utime(tmp_path / "commits" / f"{number:08}.json", (0, now_s + number * 600))
        state.sweep(made, now_s + number * 600)
    kept = set(range(25, 31))
    assert {int(path.stem) for path in (tmp_path / "commits").iterdir()} == kept
    assert {int(path.name[3:]) for path in (tmp_path / "verdicts").iterdir()} == kept
    assert {int(path.stem[3:]) for path in (tmp_path / "events").iterdir()} == kept
    assert sorted(path.name for path in (tmp_path / "cells").iterdir()) == ["run2", "run3"]
    last = tmp_path / "commits" / "00000029.json"
    os.utime(last, (0, 0))
    state.sweep(state.latest(), now_s + 10 * 86_400)
    assert {int(path.stem) for path in (tmp_path / "commits").iterdir()} == {29, 30}


def test_an_old_commit_that_is_damaged_goes_and_takes_nothing_with_it(tmp_path):
    state = StateFolder.open(tmp_path)
    for number in (1, 2, 3):
        state.commit(replace(commit(number), events=f"events/run{number}.parquet"))
        (tmp_path / "events" / f"run{number}.parquet").touch()
    damaged = tmp_path / "commits" / "00000001.json"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    os.utime(damaged, (0, 0))
    state.sweep(state.latest())
    assert not damaged.exists() and len(list((tmp_path / "events").iterdir())) == 3


def test_files_of_a_commit_of_the_last_hour_outlive_a_compaction(tmp_path):
    """A run that began before it may still read them."""
    state = StateFolder.open(tmp_path)
    state.commit(commit(1))
    folded = commit(2)
    folded.cells = ["cells/run-folded/a.parquet"]
    state.commit(folded)
    state.commit(replace(folded, number=3))
    for name in ("run", "run-folded"):
        (tmp_path / "cells" / name).mkdir()
        os.utime(tmp_path / "cells" / name, (0, 0))
    os.utime(tmp_path / "commits" / "00000002.json", (0, 0))
    state.sweep(state.latest())
    assert (tmp_path / "cells" / "run").exists()
    os.utime(tmp_path / "commits" / "00000001.json", (0, 0))
    state.sweep(state.latest())
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["run-folded"]
    assert sorted(path.name for path in (tmp_path / "commits").iterdir()) == [
        "00000002.json",
        "00000003.json",
    ]


def test_work_folders_of_dead_runs_go_after_a_day(tmp_path):
    state = StateFolder.open(tmp_path)
    for name in (".work-1-old", ".work-2-new"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".work-1-old", (0, 0))
    state.sweep(commit(1))
    assert [path.name for path in tmp_path.glob(".work-*")] == [".work-2-new"]


@pytest.mark.parametrize("written", ["cells/00000008-0a/_temporary/part.parquet", "verdicts/00000008-0a/day"])
def test_nothing_of_a_run_that_still_writes_is_swept(tmp_path, written):
    """A look back over everything may count for longer than a day, and wrote its facts when it began."""
    state = StateFolder.open(tmp_path)
    for name in (
        "events/00000008-0a.parquet",
        "cells/00000008-0a/part.parquet",
        "events/00000008-0b.parquet",
    ):
        state.files.write(name, b"")
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    state.files.write(written, b"")
    state.sweep(commit(9))
    assert [entry.name for entry in state.files.entries("events")] == ["00000008-0a.parquet"]
    assert (tmp_path / "cells/00000008-0a/part.parquet").exists() and (tmp_path / written).exists()


def made_old(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (0, 0))


def test_what_dead_runs_with_a_state_elsewhere_left_here_goes_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = [tmp_path / f"millrace-audit-{name}" for name in ("dead", "young", "living", "strangers")]
    for folder in made:
        (folder / "spark").mkdir(parents=True)
        (folder / "in-use").touch()
    dead, young, living, strangers = made
    (strangers / "in-use").unlink()
    for folder in (dead, living):
        os.utime(folder / "in-use", (0, 0))
    with (living / "in-use").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with work_folder("hdfs://nn/state") as work:
            assert sorted(tmp_path.iterdir()) == sorted([young, living, strangers, work])
    assert not work.exists()


def test_the_work_folder_of_a_run_that_lives_stays_however_long_nothing_changed_in_it(tmp_path):
    state = StateFolder.open(tmp_path)
    with work_folder(tmp_path) as work:
        made_old(work)
        state.sweep(commit(1))
        assert work.exists()
    assert not work.exists()
    with pytest.raises(KeyboardInterrupt), work_folder(tmp_path) as work:
        copied = tmp_path / ".work-1-killed"
        shutil.copytree(work, copied)
        raise KeyboardInterrupt
    made_old(copied)
    state.sweep(commit(1))
    assert not copied.exists(), "nobody holds its lock"


def test_a_work_folder_is_as_old_as_the_newest_file_in_it(tmp_path):
    """Where a file system has no locks, or an older program works in it."""
    state = StateFolder.open(tmp_path)
    for name in (".work-1-old", ".work-2-new"):
        (tmp_path / name / "local" / "blockmgr").mkdir(parents=True)
        made_old(tmp_path / name)
    (tmp_path / ".work-2-new" / "local" / "blockmgr" / "shuffle_0.data").touch()
    state.sweep(commit(1))
    assert [path.name for path in tmp_path.glob(".work-*")] == [".work-2-new"]


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    state = StateFolder.open(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        state.commit(commit(1))
    with pytest.raises(OSError, match="No space left"):
        state.files.write("events/run.parquet", b"x" * 100)
    monkeypatch.undo()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert state.latest() == Commit()


@pytest.fixture
def lost_answers(monkeypatch):
    """link(2) to a server that does it, and whose next answer is lost once something is put in here."""
    link, left = os.link, []

    def linked(path, second):
        link(path, second)
        if left:
            left.clear()
            raise FileExistsError(errno.EEXIST, "File exists", str(path), None, str(second))

    monkeypatch.setattr(state_files.os, "link", linked)
    return left


def test_a_commit_whose_answer_was_lost_is_ours_and_no_other_jobs(tmp_path, lost_answers):
    state = StateFolder.open(tmp_path)
    lost_answers.append(1)
    assert state.files.create("commits/00000001.json", guarded("commit", {}))
    lost_answers.append(1)
    with pytest.raises(CommitConflict):
        state.commit(commit(1))
    assert [entry.name for entry in state.files.entries("commits")] == ["00000001.json"]


def test_a_waiver_whose_answer_was_lost_is_kept_once(tmp_path, lost_answers):
    state = StateFolder.open(tmp_path)
    lost_answers.append(1)
    accept(state, "header", {"header": 1}, "ann", "known", 5)
    assert [entry.name.endswith(".1.untrusted") for entry in state.files.entries("waivers")] == [True]


def test_an_error_after_the_name_was_given_makes_no_failure_of_the_commit(tmp_path, monkeypatch):
    """A folder that has nothing to be synced, and the other name of the file that cannot be taken away."""
    state = StateFolder.open(tmp_path)
    fsync, unlink = os.fsync, Path.unlink

    def of_files_alone(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    def failing(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    told = []
    monkeypatch.setattr(state_files.os, "fsync", of_files_alone)
    for number, rest in ((1, unlink), (2, failing)):
        monkeypatch.setattr(Path, "unlink", rest)
        with contextlib.suppress(OSError):
            state.commit(commit(number))
            told.append(number)
    assert told == [1, 2] and state.latest() == commit(2)


def test_a_folder_that_cannot_be_synced_is_an_error(tmp_path, monkeypatch):
    state = StateFolder.open(tmp_path)
    fsync = os.fsync

    def of_files_alone(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EIO, "Input/output error")
        fsync(handle)

    monkeypatch.setattr(state_files.os, "fsync", of_files_alone)
    with pytest.raises(OSError, match="Input/output"):
        state.commit(commit(1))


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_a_place_without_hard_links_is_refused_before_the_run(tmp_path, monkeypatch, number):
    def refused(path, second):
        raise OSError(number, os.strerror(number), str(path), None, str(second))

    monkeypatch.setattr(state_files.os, "link", refused)
    with pytest.raises(StatePlaceUnsafe, match=r"no hard links \(.+\).*set state: to a folder") as caught:
        StateFolder.open(tmp_path)
    assert "\n" not in str(caught.value) and caught.value.exit_status == 3
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_place_where_the_probe_cannot_be_made_is_told_as_that(tmp_path, monkeypatch):
    def refused(path, **_):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "touch", refused)
    with pytest.raises(DataFolderNotWritable, match="Operation not permitted"):
        StateFolder.open(tmp_path)


def test_a_file_and_its_name_are_durable_before_a_commit_names_it(tmp_path, monkeypatch):
    state = StateFolder.open(tmp_path)
    synced = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(state_files.os, "fsync", noted)
    state.write_table("events/run.parquet", pa.table({"value": [1]}))
    assert synced == [str(tmp_path / "events" / "run.parquet"), str(tmp_path / "events")]
    state.commit(commit(1))
    assert synced[2].startswith(str(tmp_path / "commits" / ".")) and synced[3:] == [str(tmp_path / "commits")]


def test_the_way_back_one_run_is_open_however_old_that_run_is(tmp_path):
    """Told when the newest commit is damaged: move it away. An audit may run once a week."""
    state = StateFolder.open(tmp_path)
    state.commit(commit(1))
    folded = replace(commit(2), cells=["cells/run-folded/a.parquet"], events="events/folded.parquet")
    state.commit(folded)
    (tmp_path / "events" / "run.parquet").touch()
    for name in ("run", "run-folded"):
        (tmp_path / "cells" / name).mkdir()
    for path in [*tmp_path.rglob("cells/*"), *tmp_path.rglob("events/*"), *tmp_path.rglob("commits/*")]:
        os.utime(path, (0, 0))
    state.sweep(state.latest())
    (tmp_path / "commits" / "00000002.json").unlink()
    back = state.latest()
    assert back.number == 1 and (tmp_path / "cells" / "run").exists()
    assert (tmp_path / back.events).exists()


def test_a_file_that_is_damaged_inside_is_told_with_the_way_back(tmp_path):
    """A column of numbers takes every value: only the checksums of its pages tell."""
    state = StateFolder.open(tmp_path)
    table = pa.table({"n": pa.array(range(5000), pa.int64())})
    state.write_table("events/run.parquet", table)
    state.commit(commit(1))
    state.commit(replace(commit(2), events="events/new.parquet"))
    column = pq.ParquetFile(tmp_path / "events/run.parquet").metadata.row_group(0).column(0)
    path = tmp_path / "events" / "run.parquet"
    whole = path.read_bytes()
    begin = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    end = begin + column.total_compressed_size
    for at in range(end - 2000, end, 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        for wanted in (None, pc.field("n") > 3):
            with pytest.raises(StateDamaged, match=r"events/run.parquet cannot be read \(.*; restore it$"):
                state.read_table("events/run.parquet", wanted)
    path.write_bytes(whole)
    assert state.read_table("events/run.parquet") == table


def test_the_way_back_is_to_the_last_run_that_does_without_the_file(tmp_path):
    state = StateFolder.open(tmp_path)
    state.commit(commit(1))
    for number in (2, 3):
        state.commit(replace(commit(number), cells=["cells/run/a.parquet", "cells/new/a.parquet"]))
    state.commit(replace(commit(4), events="events/new.parquet", cells=["cells/new/a.parquet"]))
    commits = f"{tmp_path}/commits"
    assert (
        state.way_back("events/new.parquet")
        == f"restore it, or move {commits}/00000004.json away to go back one run"
    )
    assert state.way_back("cells/new/a.parquet") == (
        f"restore it, or move {commits}/00000002.json and all later ones away to go back 3 runs"
    )
    (tmp_path / "commits" / "00000001.json").unlink()
    assert state.way_back("cells/new/a.parquet") == (
        "restore it, or name another folder as state to begin anew: every run on record needs it"
    )
    assert state.way_back("cells/unknown") == "restore it"
