"""Cells that are not there when the run would commit: the next one goes on behind their offsets, so they
would be a loss for ever."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from millrace.audit.config import parse_config
from millrace.audit.keeping.state import StateFolder
from millrace.audit.scanning import range_reader
from millrace.audit.scanning.cell_notes import uncounted
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, NOTE_READ, NoteRows, RowPlace
from millrace.audit.spark import connector_reader, spark_cells
from millrace.audit.spark.read_options import parse_options
from millrace.audit.spark.shared_state import CellsIncomplete
from millrace.audit.spark.spark_cells import RunCells
from millrace.audit.spark.task_plan import OffsetRange, plan_tasks
from millrace.audit.spark.task_reader import _read_cells
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.batch_kernels import B_LAST_OFFSET, B_MAGIC

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


def sizes(found):
    missing, too_many = found
    return sum(each.size for each in missing), too_many


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
    assert sizes(uncounted(PLANNED, notes_of(*read))) == found


def test_every_task_says_what_it_went_through():
    class Nothing:
        def read(self, range_, distrust, unread):
            unread(range_.first_offset, range_.end_offset, "compacted")
            yield from ()

    options = parse_options({"bootstraps": '{"ewr": ["h:1"]}', "ranges": "[]", "window": "1m"})
    tasks = plan_tasks(PLANNED, 3)
    assert len(tasks) == 3
    batches = [each for ranges in tasks for each in _read_cells(Nothing(), ranges, options)]
    assert uncounted(PLANNED, pa.Table.from_batches(batches)) == ([], 0)


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


def counted(tmp_path, monkeypatch, tables, rows, config=CONFIG, reader="read_pinned"):
    state = StateFolder.open(tmp_path / "state")
    frame = Written(tmp_path / "state" / "cells" / "run", tables, rows)
    where = connector_reader if reader == "read_through_connector" else spark_cells
    monkeypatch.setattr(where, reader, lambda *_: frame)
    monkeypatch.setattr(spark_cells, "Observation", lambda _: SimpleNamespace())
    monkeypatch.setattr(spark_cells, "f", SimpleNamespace(count=lambda _: SimpleNamespace(alias=str)))
    monkeypatch.setattr(spark_cells, "lit", lambda _: None)
    conf = SimpleNamespace(getAll={}, set=lambda *_: None, unset=lambda _: None)
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(master="local[2]"), conf=conf)
    RunCells(session, state, "run", [], "").count(config, PLANNED)


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


# --- through Spark's connector, which says nothing of offsets without a record ----------------------


def test_offsets_that_no_task_went_through_are_told_one_stretch_each():
    missing, too_many = uncounted(PLANNED, notes_of(piece(10, 20), piece(15, 400), piece(900_000, 999_999)))
    assert missing == [piece(0, 10), piece(400, 900_000), piece(999_999, 1_000_000), TAIL]
    assert too_many == 5


@pytest.mark.parametrize(
    ("offsets", "gone_through"),
    [
        ([0, 1, 2, 7, 8, 19], [(0, 10), (10, 20)]),  # a hole within a task's rows, and one at a cut
        ([3, 4], [(3, 5)]),
        ([12, 13], [(12, 14)]),
        ([8, 11], [(8, 10), (10, 12)]),
    ],
)
def test_task_of_the_connector_went_through_what_lies_between_its_rows(offsets, gone_through):
    ranges = [piece(0, 10), replace(piece(10, 20), tail=True)]
    batches = [rows_at(offsets[:2]), rows_at(offsets[2:])]
    options = parse_options({"bootstraps": '{"ewr": ["h:1"]}', "ranges": "[]", "window": "1m"})
    found = connector_reader.count_rows(batches, {("flights", 0): ranges}, options)
    notes = pa.Table.from_batches(list(found), CELL_SCHEMA)
    read = notes.filter(pc.equal(notes["note"], NOTE_READ)).select(["first_offset", "last_offset", "count"])
    assert [(row["first_offset"], row["last_offset"] + 1) for row in read.to_pylist()] == gone_through
    assert [row["count"] for row in read.to_pylist()] == [end - first for first, end in gone_through]


def rows_at(offsets):
    count = len(offsets)
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    columns = {
        "topic": pa.array(["flights"] * count, pa.string()),
        "partition": pa.array([0] * count, pa.int32()),
        "offset": pa.array(offsets, pa.int64()),
        "append_ms": pa.array([-1] * count, pa.int64()),
        "key": pa.array([None] * count, pa.binary()),
        "value": pa.array([None] * count, pa.binary()),
        "value_size": pa.array([-1] * count, pa.int32()),
        "headers": pa.array([None] * count, headers),
    }
    return pa.RecordBatch.from_pydict(columns)


class Log:
    """Our own reader: whole batches, those of aborted transactions and markers skipped, as `RangeReader`."""

    def __init__(self, batches, gone=()):
        self.batches, self.gone, self.asked = batches, gone, []

    def __call__(self, *_):
        return contextlib.nullcontext(self)

    def read(self, range_, distrust, unread):
        self.asked.append((range_.first_offset, range_.end_offset))
        for each in self.gone:
            unread(*each)
        for first, content, is_hidden in self.batches:
            found = range_reader.index_fetched(content)
            if found.index[-1, B_LAST_OFFSET] >= range_.first_offset and first < range_.end_offset:
                found.index[:, B_MAGIC] = 0 if is_hidden else 2
                yield found


@pytest.mark.parametrize(
    ("log", "gone", "holds"),
    [
        ([(0, 400, False), (400, 1, True), (401, 9, False)], [], False),  # the marker of a transaction
        ([(390, 20, True)], [], False),  # what was aborted
        ([(390, 11, False)], [], True),  # its last record, and others that a task has counted
        ([(401, 9, False)], [], False),  # nothing, and a batch that begins behind
        ([], [(400, 401, "compacted")], False),
        ([], [(400, 401, "expired")], True),
        ([], [(401, 402, "damaged")], False),
    ],
)
def test_stretch_without_rows_is_a_hole_where_we_read_no_record(build, monkeypatch, log, gone, holds):
    batches = []
    for first, count, is_hidden in log:
        offsets = range(first, first + count)
        records = [build.stamped(number, 1, offset) for number, offset in enumerate(offsets)]
        batches.append((first, build.batch(first, records), is_hidden))
    reader = Log(batches, gone)
    monkeypatch.setattr(range_reader, "RangeReader", reader)
    stretch = piece(400, 401)
    options = {"bootstraps": '{"ewr": ["h:1"]}', "window": "1m", "ranges": "[]"}
    assert connector_reader.holding_records(options, [stretch]) == ([stretch] if holds else [])
    assert reader.asked == [(400, 401)]


@pytest.mark.parametrize(
    ("read", "held", "told"),
    [
        ([RANGE, TAIL], [], None),
        ([RANGE, replace(TAIL, end_offset=1_000_499)], [], None),  # it ends with a marker
        ([RANGE], [TAIL], "of 1,000,500 offsets 500 were not counted"),
        ([*PLANNED, TAIL], [], "500 were counted beside the plan or twice"),
    ],
)
def test_connectors_cells_are_compared_with_the_plan_too(tmp_path, monkeypatch, read, held, told):
    asked = []

    def holding_records(_, missing):
        asked.extend(missing)
        return held

    monkeypatch.setattr(connector_reader, "holding_records", holding_records)
    config = CONFIG.model_copy(update={"reader": "spark-kafka"})
    tables = [notes_of(each) for each in read]
    refused = contextlib.nullcontext() if told is None else pytest.raises(CellsIncomplete, match=told)
    with refused:
        counted(tmp_path, monkeypatch, tables, len(read), config, "read_through_connector")
    assert asked == uncounted(PLANNED, notes_of(*read))[0]
