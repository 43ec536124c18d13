"""Commit files: atomic, guarded, one winner."""

from __future__ import annotations

import json
import os

import pytest

from millrace.audit.state import Commit, CommitConflict, ReadPosition, StateDamaged, StateFolder, UnreadNote
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
    envelope["commit"]["version"] = 2
    path.write_text(json.dumps(envelope))
    with pytest.raises(StateDamaged, match="format version 2"):
        state.latest()


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
