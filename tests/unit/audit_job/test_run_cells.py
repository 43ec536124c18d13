"""What a run does with the files of cells that Spark has written, before anything is read from them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.audit.config import parse_config
from millrace.audit.keeping.state import StateFolder
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, NOTE_READ, NOTE_RECORDS, NoteRows, RowPlace
from millrace.audit.spark import spark_cells, task_plan
from millrace.audit.spark.spark_cells import RunCells
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.errors import ConfigError

OFFSETS, WRITTEN = 5, 8
CONFIG = parse_config(
    {
        "clusters": {
            "ewr": {"bootstrap": ["h:1"], "tier": "source"},
            "agg": {"bootstrap": ["h:2"], "tier": "aggregate"},
        },
        "topics": ["flights"],
    }
)
RANGE = OffsetRange("ewr", "source", "flights", "flights", 0, 0, OFFSETS)


class Executors:
    """Spark's face to a run: they write WRITTEN rows, first one for each offset that they have read; `found`
    of them are where the driver looks."""

    def __init__(self, found: int) -> None:
        self.found = found
        self.get = {"rows": WRITTEN}
        self.write = self

    def observe(self, *_: object) -> Executors:
        return self

    def parquet(self, uri: str) -> None:
        folder = Path(urlsplit(uri).path)
        folder.mkdir()
        rows = NoteRows()
        place = RowPlace(RANGE.tier, RANGE.cluster, RANGE.topic, RANGE.topic_id, RANGE.partition, RANGE.tail)
        for number in range(self.found):
            if number < OFFSETS:
                rows.add_note(place, NOTE_READ, 1, number, number)
            else:
                rows.add_note(place, NOTE_RECORDS, 1)
        pq.write_table(pa.Table.from_batches([rows.flush()], CELL_SCHEMA), folder / "part-0.parquet")


def counted(executors: Executors, place: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(spark_cells, "read_pinned", lambda *_: executors)
    patch.setattr(spark_cells, "Observation", lambda _: executors)
    # What is to be observed is a column, and those need a running JVM.
    patch.setattr(spark_cells, "f", SimpleNamespace(count=lambda _: SimpleNamespace(alias=str)))
    patch.setattr(spark_cells, "lit", int)
    conf = SimpleNamespace(getAll={}, set=lambda *_: None, unset=lambda _: None)
    session = SimpleNamespace(sparkContext=SimpleNamespace(master="local[2]"), conf=conf)
    RunCells(session, StateFolder.open(place), "run", [], "").count(CONFIG, [RANGE])  # type: ignore[arg-type]


def test_cells_that_executors_wrote_to_a_disk_of_their_own_stop_the_run(tmp_path, monkeypatch):
    counted(Executors(WRITTEN), tmp_path / "shared", monkeypatch)
    with pytest.raises(ConfigError, match="8 rows of cells were written there, 6 are found here"):
        counted(Executors(6), tmp_path / "alone", monkeypatch)


def test_cells_are_durable_before_anything_names_them(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    counted(Executors(WRITTEN), tmp_path, monkeypatch)
    folder = tmp_path / "cells" / "run"
    assert synced == [str(folder / "part-0.parquet"), str(folder), str(folder.parent)]


def test_a_fold_leaves_large_files_of_earlier_folds_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(task_plan, "FOLDED_FILE_BYTES", 100)
    state = StateFolder.open(tmp_path)
    files = {
        "cells/1-folded/a.parquet": 90,
        "cells/1-folded/b.parquet": 30,  # large together: the rest of what was cut into even files
        "cells/2-folded/a.parquet": 49,
        "cells/3-folded/a.parquet": 95,
        "cells/3-folded/b.parquet": 4,
        "cells/4/a.parquet": 500,
        "cells/5/a.parquet": 1,
    }
    for name, size in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
        for beside in (f".{path.name}.crc", "_SUCCESS", "._SUCCESS.crc"):  # as Hadoop leaves them
            (path.parent / beside).touch()
    kept = [name for name in files if "/5/" not in name]
    cells = RunCells(None, state, "5", kept, "")  # type: ignore[arg-type]
    assert cells.loose_files() == [name for name in files if "/1-folded/" not in name]


def test_a_fold_leaves_files_of_many_rows_as_they_are_however_small(tmp_path, monkeypatch):
    monkeypatch.setattr(task_plan, "FOLDED_FILE_ROWS", 10)
    state, rows = StateFolder.open(tmp_path), NoteRows()
    place = RowPlace(RANGE.tier, RANGE.cluster, RANGE.topic, RANGE.topic_id, RANGE.partition, RANGE.tail)
    for number in range(6):
        rows.add_note(place, NOTE_READ, 1, number, number)
    six = pa.Table.from_batches([rows.flush()], CELL_SCHEMA)
    files = {
        "cells/1-folded/a.parquet": six,
        "cells/1-folded/b.parquet": six.slice(0, 4),  # ten of twenty, together
        "cells/2-folded/a.parquet": six.slice(0, 4),
    }
    for name, table in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / name)
    cells = RunCells(None, state, "5", list(files), "")  # type: ignore[arg-type]
    assert cells.loose_files() == ["cells/2-folded/a.parquet"]
