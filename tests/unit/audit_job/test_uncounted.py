"""Cells that are not there when the run would commit: the next one goes on behind their offsets, so they
would be a loss for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.audit.config import parse_config
from millrace.audit.keeping.state import StateFolder
from millrace.audit.scanning.cell_notes import uncounted
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, NOTE_READ, NoteRows, RowPlace
from millrace.audit.spark import spark_cells
from millrace.audit.spark.read_options import parse_options
from millrace.audit.spark.shared_state import CellsIncomplete
from millrace.audit.spark.spark_cells import RunCells
from millrace.audit.spark.task_plan import OffsetRange, plan_tasks
from millrace.audit.spark.task_reader import _read_cells
from millrace.broker.errors import ConfigError

RANGE = OffsetRange("ewr", "ewr", "flights", "flights", 0, 0, 1_000_000, "id")
TAIL = OffsetRange("ewr", "ewr", "flights", "flights", 0, 1_000_000, 1_000_500, "id", tail=True)
PLANNED = [RANGE, TAIL]
CONFIG = parse_config({"clusters": {"ewr": {"bootstrap": ["h:1"], "tier": "source"}}, "topics": ["flights"]})


def notes_of(*ranges):
    rows = NoteRows()
    for each in ranges:
        place = RowPlace(each.tier, each.cluster, each.topic, each.topic_id, each.partition, each.tail)
        rows.add_note(place, NOTE_READ, each.size, each.first_offset, each.end_offset - 1)
    return pa.Table.from_batches([rows.flush()], CELL_SCHEMA)


def piece(first, end):
    return OffsetRange("ewr", "ewr", "flights", "flights", 0, first, end, "id")


@pytest.mark.parametrize(
    ("read", "found"),
    [
        ([RANGE, TAIL], (0, 0)),
        ([TAIL, piece(400, 1_000_000), piece(0, 400)], (0, 0)),
        ([], (1_000_500, 0)),
        ([RANGE], (500, 0)),
        ([TAIL, piece(0, 400), piece(500, 1_000_000)], (100, 0)),
        ([*PLANNED, piece(300, 400)], (0, 100)),
        ([*PLANNED, RANGE], (0, 1_000_000)),
        ([*PLANNED, piece(1_000_000, 1_000_010)], (0, 10)),
    ],
)
def test_what_was_counted_is_compared_with_what_was_planned(read, found):
    assert uncounted(PLANNED, notes_of(*read)) == found


def test_every_task_says_what_it_went_through():
    class Nothing:
        def read(self, range_, distrust, unread):
            unread(range_.first_offset, range_.end_offset, "compacted")
            yield from ()

    options = parse_options({"bootstraps": '{"ewr": ["h:1"]}', "ranges": "[]", "window": "1m"})
    tasks = plan_tasks(PLANNED, 3)
    assert len(tasks) == 3
    batches = [each for ranges in tasks for each in _read_cells(Nothing(), ranges, options)]
    assert uncounted(PLANNED, pa.Table.from_batches(batches)) == (0, 0)


class Written:
    """Spark's frame of cells, as far as a run uses it: its tasks wrote these tables, and told of `rows`."""

    def __init__(self, folder, tables, rows):
        self.folder, self.tables, self.rows = folder, tables, rows
        self.write = self

    def observe(self, seen, *_):
        seen.get = {"rows": self.rows}
        return self

    def parquet(self, uri):
        for number, table in enumerate(self.tables):
            self.folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, self.folder / f"part-{number}.parquet")


def counted(tmp_path, monkeypatch, tables, rows):
    state = StateFolder.open(tmp_path / "state")
    frame = Written(tmp_path / "state" / "cells" / "run", tables, rows)
    monkeypatch.setattr(spark_cells, "read_pinned", lambda *_: frame)
    monkeypatch.setattr(spark_cells, "Observation", lambda _: SimpleNamespace())
    monkeypatch.setattr(spark_cells, "f", SimpleNamespace(count=lambda _: SimpleNamespace(alias=str)))
    monkeypatch.setattr(spark_cells, "lit", lambda _: None)
    conf = SimpleNamespace(getAll={}, set=lambda *_: None)
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(master="local[2]"), conf=conf)
    RunCells(session, state, "run", [], "").count(CONFIG, PLANNED)


def test_a_run_whose_cells_are_all_there_goes_on(tmp_path, monkeypatch):
    counted(tmp_path, monkeypatch, [notes_of(RANGE), notes_of(TAIL)], 2)


@pytest.mark.parametrize(
    ("tables", "rows", "error", "told"),
    [
        ([], 0, CellsIncomplete, "of 1,000,500 offsets 1,000,500 were not counted"),
        ([], 2, ConfigError, "2 rows of cells were written there, 0 are found here"),
        ([[TAIL]], 1, CellsIncomplete, "1,000,000 were not counted, by the cells"),
        ([PLANNED, [TAIL]], 3, CellsIncomplete, "500 were counted beside the plan or twice"),
    ],
)
def test_a_run_without_its_cells_ends_before_it_commits(tmp_path, monkeypatch, tables, rows, error, told):
    with pytest.raises(error, match=told):
        counted(tmp_path, monkeypatch, [notes_of(*each) for each in tables], rows)
