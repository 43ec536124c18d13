"""No list is null in what goes to Python: Spark would pass all rows of a batch again at each."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millrace.audit.keeping.state import StateFolder
from millrace.audit.keeping.verdict_files import LINES
from millrace.audit.reconciliation.settled import SETTLED_SCHEMA
from millrace.audit.runs.at_rest import AtRest
from millrace.audit.runs.fact_rows import KEPT_SCHEMA
from millrace.audit.spark.arrow_lists import with_lists
from millrace.audit.spark.spark_cells import RunCells
from tests.cells import again_of, table_of
from tests.unit.audit_job.test_cell_union import cell

pytestmark = pytest.mark.java


def test_lists_that_are_null_become_empty_and_all_else_stays(spark) -> None:
    ddl = "id int, some array<binary>, pairs array<struct<sequence: bigint, extra: bigint>>, note string"
    rows = [(1, None, None, None), (2, [b"a", None], [(5, 6)], "n"), (3, [], None, None)]
    given = spark.createDataFrame(rows, ddl)
    found = with_lists(given)
    assert found.columns == given.columns and found.dtypes == given.dtypes
    assert found.orderBy("id").toArrow().to_pylist() == [
        {"id": 1, "some": [], "pairs": [], "note": None},
        {"id": 2, "some": [b"a", None], "pairs": [{"sequence": 5, "extra": 6}], "note": "n"},
        {"id": 3, "some": [], "pairs": [], "note": None},
    ]


def test_cells_facts_and_lines_have_none(spark, tmp_path) -> None:
    state = StateFolder.open(tmp_path)
    stream = "0" * 16
    cells = table_of([cell([1, 2]), cell([3], 1, again=again_of({3: 1}), count=2)])
    assert cells["repeats"].null_count == 2, "as counting leaves them"
    facts = pa.Table.from_pylist([{"stream": stream, "topic": "flights"}], KEPT_SCHEMA)
    line = {"topic": "flights", "stream": stream, "producer": "AA", "window_start_ms": 0}
    lines = pa.Table.from_pylist([line], SETTLED_SCHEMA)
    for name, table in (
        ("cells/1/a.parquet", cells),
        ("events/1.parquet", facts),
        (f"verdicts/1/{LINES}", lines),
    ):
        state.write_table(name, table)
    given = RunCells(spark, state, "2", ["cells/1/a.parquet"], "events/1.parquet")
    assert sorted(map(len, given.all().toArrow()["again"].to_pylist())) == [0, 1]
    assert given.all().filter("repeats is null or again is null").count() == 0
    told = given._told(["flights"], [f"verdicts/1/{LINES}"], AtRest())
    assert sorted(row.line is None for row in told.collect()) == [False, True]
    assert told.filter("origins is null").count() == 0
