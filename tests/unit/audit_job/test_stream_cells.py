"""A stream's cells as columns hold what the same cells hold one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from millrace.audit.scanning import old_repeats, stream_cells
from millrace.audit.scanning.cells import BASE_STEP, Cell, CellList, SeenByWindow, merge_cells
from millrace.audit.scanning.set_kernels import SMALL_SET_BYTES
from millrace.audit.scanning.stream_cells import StreamCells
from tests import seeds
from tests.cells import again_of, count_repeats, encode_bitmaps, old_table_of, table_of

FEW = stream_cells.FEW_CELLS


@pytest.fixture(autouse=True)
def few_as_many(monkeypatch):
    """Few cells are added up one by one, which would show nothing here."""
    monkeypatch.setattr(stream_cells, "FEW_CELLS", 0)


def cells_of(rng: random.Random, count: int) -> list[Cell]:
    """Cells of one stream whose sets overlap, small ones and large ones, of one place or of many."""
    cells = []
    for number in range(count):
        sequences = [
            rng.randrange(1, rng.choice((5, 300, 2 * BASE_STEP))) for _ in range(rng.choice((1, 4, 300)))
        ]
        first = rng.choice((1, 200, BASE_STEP - 30))
        sequences += range(first, first + rng.choice((0, 1, 60, 5_000)))
        distinct, repeats = count_repeats(np.array(sequences, np.uint64))
        for base, bitmap in encode_bitmaps(distinct):
            cells.append(
                Cell(
                    tier=rng.choice(("ewr", "agg")),
                    cluster="ewr",
                    topic="flights",
                    partition=number,
                    stream="0" * 16,
                    producer=rng.choice(("AA", "AA", "AA", "", "BB")),
                    window_start_ms=60_000 * rng.randrange(3),
                    chunk_start=0,
                    count=rng.randrange(1, 100),
                    byte_count=rng.randrange(1000),
                    first_offset=number,
                    last_offset=number + 5,
                    first_append_ms=rng.choice((-1, 5, 9)),
                    last_append_ms=rng.choice((-1, 9, 12)),
                    base=base,
                    bitmap=bitmap,
                    again=again_of(repeats, base),
                    unsequenced_count=rng.choice((0, 0, 3)),
                    digest=rng.choice((1 << 63, (1 << 64) - 1, 7)),
                    topic_id="id",
                )
            )
    return cells


@pytest.mark.parametrize("count", [1, 2, 30])
def test_columns_add_up_to_what_the_cells_do_one_by_one(count):
    rng = random.Random(seeds.given())
    for _ in range(20):
        cells = cells_of(rng, count)
        if rng.random() < 0.5:
            cells = [replace(each, digest=rng.choice((None, each.digest))) for each in cells]
        assert StreamCells(table_of(cells)).seen() == merge_cells(cells)
    assert {len(each.bitmap) > SMALL_SET_BYTES for each in cells_of(rng, 50)} == {True, False}


def test_many_cells_are_added_up_without_making_one_of_them(monkeypatch):
    cells = cells_of(random.Random(seeds.given()), 2 * FEW)
    table, whole = table_of(cells), merge_cells(cells)

    def made(rows: pa.Table) -> None:
        raise AssertionError(f"{rows.num_rows} cells were made one by one")

    monkeypatch.setattr(stream_cells, "FEW_CELLS", FEW)
    monkeypatch.setattr(stream_cells, "cells_of", made)
    found = sums(StreamCells(table).seen())
    assert found == sums(whole) and sum(map(len, found.values())) == 6


def sums(seen: dict[str, SeenByWindow]) -> dict[str, SeenByWindow]:
    """Without the cells, which an older program's are in an order of their own."""
    return {
        tier: {start_ms: replace(each, cells=CellList()) for start_ms, each in windows.items()}
        for tier, windows in seen.items()
    }


@pytest.mark.parametrize("pairs_at_once", [1, 100, 1 << 20])
@pytest.mark.parametrize("few", [0, 1000])
def test_cells_that_an_older_program_kept_add_up_to_the_same(few, pairs_at_once, monkeypatch):
    """It kept a pair for each record that came again, beside which a newer one's cells may lie."""
    monkeypatch.setattr(stream_cells, "FEW_CELLS", few)
    monkeypatch.setattr(old_repeats, "PAIRS_AT_ONCE", pairs_at_once)
    cells = cells_of(random.Random(4), 30)
    assert any(each.again for each in cells)
    old = old_table_of(cells)
    as_spark_reads_it = pa.concat_tables([old, table_of([])], promote_options="default")
    for kept in (old, as_spark_reads_it):
        assert sums(StreamCells(kept).seen()) == sums(merge_cells(cells))
    mixed = pa.concat_tables([old_table_of(cells[:15]), table_of(cells[15:])], promote_options="default")
    assert sums(StreamCells(mixed).seen()) == sums(merge_cells(cells))
    assert {len(each.again) for each in StreamCells(mixed)} == {len(each.again) for each in cells}


def test_an_old_cell_that_repeats_what_it_cannot_hold_stops_the_run():
    cells = [replace(each, again=()) for each in cells_of(random.Random(5), 1)]
    table = table_of(cells)
    pairs = pa.array([[{"sequence": BASE_STEP * 5, "extra": 1}]] * len(table), table["repeats"].type)
    table = table.set_column(table.schema.get_field_index("repeats"), "repeats", pairs)
    with pytest.raises(ValueError, match="cannot hold"):
        StreamCells(table).seen()


def test_count_only_cells_have_counts_and_no_sequences():
    rng = random.Random(1)
    cells = [replace(each, bitmap=b"", again=(), unsequenced_count=each.count) for each in cells_of(rng, 5)]
    assert StreamCells(table_of(cells)).seen() == merge_cells(cells)


def test_no_cells_hold_nothing():
    assert StreamCells(table_of([])).seen() == {} and not StreamCells(table_of([]))


def test_a_bitmap_that_cannot_be_read_stops_the_run_and_is_never_taken_for_an_empty_one():
    cells = cells_of(random.Random(1), 3)
    cells[1] = replace(cells[1], bitmap=b"no bitmap at all")
    with pytest.raises(ValueError):
        StreamCells(table_of(cells)).seen()


def test_cells_of_several_clusters_become_one_tier_and_the_others_stay():
    cells = [replace(each, cluster=name, tier=name) for name in ("ewr", "jfk", "agg")
             for each in cells_of(random.Random(2), 2)]  # fmt: skip
    table = StreamCells(table_of(cells))
    assert table.places == {(name, "flights") for name in ("ewr", "jfk", "agg")}
    expected = [replace(each, tier="ewr+jfk") if each.cluster != "agg" else each for each in cells]
    assert table.as_one_tier("ewr+jfk", ["ewr", "jfk"]).seen() == merge_cells(expected)


def test_cells_are_those_of_one_topic_whatever_its_place_is_called():
    cells = cells_of(random.Random(3), 4)
    mixed = [replace(each, topic=name) for each in cells for name in ("flights", "trains")]
    table = StreamCells(table_of(mixed))
    assert list(table.of_topic("trains")) == [each for each in mixed if each.topic == "trains"]
    assert len(table.of_topic("ships")) == 0
