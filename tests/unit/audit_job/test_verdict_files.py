"""A run's verdicts in files: what is read of them in parts, what counts no more, what an older state has."""

from __future__ import annotations

import os
import shutil

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from millrace.audit.keeping import verdict_files
from millrace.audit.keeping.state import Commit, StateDamaged, StateFolder, guarded
from millrace.audit.keeping.verdict_files import (
    RowFiles,
    SettledLines,
    cuts_of,
    own_lines,
)
from millrace.audit.reconciliation.row_parts import Beside, parts_of
from millrace.audit.reconciliation.settled import (
    LINE_SCHEMA,
    SETTLED_SCHEMA,
    lines_of,
    number_rows,
    unnumbered,
    without,
)
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict

DAY_MS = 86_400_000
RUN = "verdicts/00000001-run"


def verdict(start_ms, stream="01", topic="flights", **more):
    return WindowVerdict(
        topic=topic, producer="AA", stream=stream, window_start_ms=start_ms, window_ms=10,
        **{"state": WindowState.SETTLED, "verdict": Verdict.PROVEN, "consumed": {"agg": 5}, **more},
    )  # fmt: skip


def rows_of_streams(count=3, windows=8):
    told = [verdict(start * 10, f"{stream:02}") for start in range(windows) for stream in range(count)]
    told += [verdict(None, "00", verdict=Verdict.UNKNOWN), verdict(10 + DAY_MS, "01")]
    return number_rows(verdict_rows(told), LINE_SCHEMA.empty_table(), 7)


def written(place, rows, files=2, row_group=4):
    """As executors write them: each has some streams, in a file a day, in the order of windows."""
    state = StateFolder.open(place)
    names = []
    for task in range(files):
        mine = pc.equal(pc.bit_wise_and(pc.cast(rows["stream"], pa.int64()), files - 1), task)
        theirs = rows.filter(mine).sort_by("window_start_ms")
        starts = theirs["window_start_ms"]
        for day, here in (
            ("1970-01-01", pc.less(starts, DAY_MS)),
            ("1970-01-02", pc.greater_equal(starts, DAY_MS)),
            ("none", pc.is_null(starts)),
        ):
            part = theirs.filter(pc.fill_null(here, False))
            if part.num_rows:
                names.append(f"{RUN}/day={day}/part-{task}.parquet")
                (place / names[-1]).parent.mkdir(parents=True, exist_ok=True)
                pq.write_table(part, place / names[-1], row_group_size=row_group)
    return state, names


@pytest.mark.parametrize("most", [1, 6, 10, 1000])
def test_rows_are_read_in_parts_of_whole_windows_and_all_of_them_once(tmp_path, monkeypatch, most):
    monkeypatch.setattr(verdict_files, "PART_ROWS", most)
    rows = rows_of_streams()
    read = RowFiles(*written(tmp_path, rows))
    parts = list(read.parts())
    order = [(name, "ascending") for name in ("topic", "producer", "stream", "window_start_ms")]
    assert pa.concat_tables(parts).sort_by(order) == rows.sort_by(order)
    assert [part.sort_by(order) for part in parts] == parts
    starts = [set(part["window_start_ms"].to_pylist()) for part in parts]
    assert sum(map(len, starts)) == len(set().union(*starts)), "no window is in two parts"
    assert len(parts) == {1: 10, 6: 6, 10: 4, 1000: 1}[most]
    names = ["verdict", "window_start_ms", "stream"]
    for part, told in zip(parts, read.parts(names), strict=True):
        assert told.column_names == names
        assert sorted(map(str, told.to_pylist())) == sorted(map(str, part.select(names).to_pylist()))


def test_a_part_reads_no_more_of_a_file_than_its_windows_are_in(tmp_path, monkeypatch):
    monkeypatch.setattr(verdict_files, "PART_ROWS", 6)
    read = RowFiles(*written(tmp_path, rows_of_streams(), files=1))
    parts, touched = read.parts(), []
    original = pq.ParquetFile.read_row_groups
    next(parts)

    def noted(self, groups, **more):
        touched.append(groups)
        return original(self, groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", noted)
    next(parts)
    assert touched == [[1, 2]], "of the six that there are"


def test_the_rosters_rows_are_in_the_parts_of_their_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(verdict_files, "PART_ROWS", 6)
    read = RowFiles(*written(tmp_path, rows_of_streams()))
    owed = unnumbered(verdict_rows([verdict(10, ""), verdict(70, ""), verdict(None, ""), verdict(990, "")]))
    together = Beside(read, owed)
    for columns in (None, ["stream", "window_start_ms"], ["stream"]):
        of_roster = [part["stream"].to_pylist().count("") for part in together.parts(columns)]
        assert of_roster == [1, 0, 0, 1, 0, 1, 1]
    counts = [part.num_rows for part in parts_of(together, ["verdict"])]
    assert sum(counts) == 26 + 4


def test_cuts_keep_windows_whole_however_many_rows_one_has():
    counts = {0: 3, 10: 3, 20: 9, 30: 1, 40: 2, None: 50}
    assert list(cuts_of(counts, 6)) == [(0, 10), (20, 20), (30, 40)]
    assert list(cuts_of({}, 6)) == [] and list(cuts_of({None: 2}, 6)) == []


def test_rows_of_windows_that_the_run_pruned_count_no_more(tmp_path):
    """And what came later for a window that was pruned before does."""
    rows = rows_of_streams()
    state, names = written(tmp_path, rows)
    lines = lines_of(rows)
    both = without(lines, [("flights", 0), ("flights", 10)])
    now = both.filter(pc.and_(both["folded"], pc.equal(both["window_start_ms"], 0)))
    earlier = both.filter(pc.and_(both["folded"], pc.equal(both["window_start_ms"], 10)))
    state.write_table(f"{RUN}/lines.parquet", earlier)
    state.write_table(f"{RUN}/pruned.parquet", now)
    names += [f"{RUN}/lines.parquet", f"{RUN}/pruned.parquet"]
    kept = pa.concat_tables(parts_of(SettledLines(state, names)))
    told = sorted(zip(kept["window_start_ms"].to_pylist(), kept["folded"].to_pylist(), strict=True), key=str)
    assert told.count((0, True)) == 1 and told.count((0, False)) == 0
    assert told.count((10, True)) == 1 and told.count((10, False)) == 3
    owed, pruned = own_lines(state, names, ["flights"])
    assert owed.num_rows == 0 and sorted(pruned["window_start_ms"].to_pylist()) == [0, 10]
    assert own_lines(state, names, ["other"])[1].num_rows == 0


def test_a_state_of_version_5_has_one_file_of_lines_which_is_read_as_that(tmp_path):
    state = StateFolder.open(tmp_path)
    owed = verdict(10, "", verdict=Verdict.UNKNOWN)
    rows = verdict_rows([verdict(0), verdict(10), owed])
    lines = without(lines_of(number_rows(rows, LINE_SCHEMA.empty_table(), 7)), [("flights", 0)])
    state.write_table("verdicts/old.parquet", lines.drop_columns(["open"]))
    body = {"version": 5, "number": 1, "verdicts": "verdicts/old.parquet", "offsets": {}, "unread": []}
    state.files.write("commits/00000001.json", guarded("commit", body))
    latest = state.latest()
    assert latest.verdicts == ["verdicts/old.parquet"] and ("verdicts", "old.parquet") in latest.rooms()
    kept = pa.concat_tables(parts_of(SettledLines(state, latest.verdicts)))
    assert kept["window_start_ms"].to_pylist() == [0, 10, 10]
    owed, pruned = own_lines(state, latest.verdicts)
    assert (owed["stream"].to_pylist(), pruned["window_start_ms"].to_pylist()) == ([""], [0])
    assert state.size(latest)[0] == 1


def test_a_file_of_rows_that_is_cut_short_or_gone_is_one_line(tmp_path):
    state, names = written(tmp_path, rows_of_streams())
    (tmp_path / names[0]).write_bytes((tmp_path / names[0]).read_bytes()[:-20])
    state.commit(Commit(number=1))
    state.commit(Commit(number=2, verdicts=list(names)))
    with pytest.raises(StateDamaged, match=r"00000002\.json away to go back one run"):
        list(RowFiles(state, names).parts())
    (tmp_path / names[0]).unlink()
    with pytest.raises(StateDamaged, match="cannot be read"):
        list(RowFiles(state, names).parts())


def test_files_of_days_are_counted_swept_and_durable_as_one_run(tmp_path, monkeypatch):
    state, names = written(tmp_path, rows_of_streams())
    straggler = tmp_path / RUN / "_temporary" / "0" / "attempt-2" / "day=1970-01-01" / "part-0.parquet"
    straggler.parent.mkdir(parents=True)
    straggler.touch()
    assert state.files_in(RUN) == sorted(names), "and nothing of a task that Spark gave up"
    shutil.rmtree(tmp_path / RUN / "_temporary")
    commit = Commit(number=1, verdicts=names)
    assert commit.rooms() == {("verdicts", "00000001-run")}
    assert state.size(commit)[0] == len(names)
    synced = []
    monkeypatch.setattr("os.fsync", lambda handle: synced.append(pathname(handle)))
    state.files.flush(names)
    assert [each for each in synced if each.endswith(".parquet")] == [str(tmp_path / name) for name in names]
    assert synced[-2:] == [str(tmp_path / RUN), str(tmp_path / "verdicts")]
    state.sweep(commit, now_s=10**12)
    assert state.files_in(RUN) == sorted(names)
    state.sweep(Commit(number=1), now_s=10**12)
    assert not (tmp_path / RUN).exists()


def pathname(handle):
    return os.readlink(f"/proc/self/fd/{handle}")


def test_nothing_written_is_nothing_read(tmp_path):
    state = StateFolder.open(tmp_path)
    assert sum(part.num_rows for part in RowFiles(state, []).parts()) == 0
    assert sum(part.num_rows for part in SettledLines(state, []).parts()) == 0
    assert own_lines(state, [])[1].schema == SETTLED_SCHEMA
