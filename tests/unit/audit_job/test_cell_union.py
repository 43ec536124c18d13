"""Cells of proven windows lose their places and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyroaring import BitMap64

from millrace.audit.config import parse_config
from millrace.audit.contract.event_values import CLOSED, CountEvent
from millrace.audit.contract.events import EventLedger, StreamFacts
from millrace.audit.keeping import uniting
from millrace.audit.reconciliation.neighbours import Neighbourhood
from millrace.audit.reconciliation.reconcile import Gap, Passage, passage_by_arrivals, reconcile_stream
from millrace.audit.reconciliation.tier_reading import TierReading, arrivals_of
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.runs.capture import Capture, MirrorPosition
from millrace.audit.runs.fact_rows import PrunedWindows
from millrace.audit.scanning import stream_cells
from millrace.audit.scanning.cell_rows import CELL_SCHEMA, cells_of
from millrace.audit.scanning.cell_union import unite
from millrace.audit.scanning.cells import BASE_STEP, NO_PLACE, Cell, merge_cells
from millrace.audit.scanning.set_kernels import SMALL_SET_BYTES
from millrace.audit.scanning.stream_cells import StreamCells
from millrace.audit.spark.spark_cells import folded
from tests import seeds
from tests.cells import again_of, encode_bitmaps, table_of

STREAM, MINUTE_MS = "0" * 16, 60_000
UNITED = {"partition": NO_PLACE, "chunk_start": NO_PLACE, "first_offset": NO_PLACE, "last_offset": NO_PLACE}


def cell(sequences, partition=0, **changes) -> Cell:
    ((base, bitmap),) = encode_bitmaps(np.array(sorted(sequences), np.uint64))
    fields = {
        "tier": "ewr", "cluster": "ewr", "topic": "flights", "partition": partition, "stream": STREAM,
        "producer": "AA", "window_start_ms": 0, "chunk_start": 0, "count": len(sequences), "byte_count": 10,
        "first_offset": 100 * partition, "last_offset": 100 * partition + 9, "base": base, "bitmap": bitmap,
        "topic_id": "id",
    }  # fmt: skip
    return Cell(**{**fields, **changes})


def windows(*starts_ms: int, length_ms: int = MINUTE_MS) -> pa.Table:
    return pa.table({"window_start_ms": starts_ms, "window_ms": [length_ms] * len(starts_ms)})


def united(cells, *starts_ms: int, tail: list[Cell] | None = None, length_ms: int = MINUTE_MS) -> list[Cell]:
    held = table_of(tail or [])
    at = CELL_SCHEMA.get_field_index("tail")
    held = held.set_column(at, CELL_SCHEMA.field(at), pa.array([True] * len(held), pa.bool_()))
    return list(
        cells_of(unite(pa.concat_tables([table_of(cells), held]), windows(*starts_ms, length_ms=length_ms)))
    )


def sums(cells):
    """What is judged by, apart from the cells themselves."""
    seen = merge_cells(cells)
    return {
        (tier, start_ms): (
            each.sequences, each.repeats, each.count, each.byte_count, each.unsequenced_count, each.digest,
            each.first_append_ms, each.last_append_ms, each.producers,
        )
        for tier, of in seen.items() for start_ms, each in of.items()
    }  # fmt: skip


def test_the_cells_of_a_proven_window_become_one_without_a_place():
    cells = [
        cell([1, 5], 0, digest=7, first_append_ms=5, last_append_ms=6),
        cell([2, 3], 1, digest=(1 << 64) - 1, first_append_ms=-1, last_append_ms=-1),
        cell([4], 2, digest=1 << 63, first_append_ms=2, last_append_ms=9),
    ]
    (one,) = united(cells, 0)
    assert one == cell(
        [1, 2, 3, 4, 5], **UNITED, count=5, byte_count=30, first_append_ms=2, last_append_ms=9,
        digest=(1 << 63) + 6, bitmap=one.bitmap,
    )  # fmt: skip
    assert list(one.sequences()) == [1, 2, 3, 4, 5] and not one.has_place


def test_windows_that_are_not_proven_keep_every_cell_as_it_is():
    cells = [cell([1], 0), cell([2], 1), cell([3], 0, window_start_ms=MINUTE_MS)]
    assert united(cells) == cells and united(cells, MINUTE_MS) == cells


def test_a_window_with_cells_that_are_read_again_keeps_its_places():
    cells = [cell([1], 0), cell([2], 1)]
    assert united(cells, 0, tail=[cell([3], 1)]) == cells
    both = [*cells, *(replace(each, window_start_ms=MINUTE_MS) for each in cells)]
    tail = [cell([3], 1, window_start_ms=MINUTE_MS)]
    assert united(both, 0, length_ms=2 * MINUTE_MS, tail=tail) == both, "a row may tell of several windows"
    assert len(united(both, 0, MINUTE_MS, tail=tail)) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"tier": "agg", "cluster": "agg"},
        {"topic": "trains"},
        {"topic_id": "another"},
        {"producer": "BB"},
        {"window_start_ms": MINUTE_MS},
        {"base": BASE_STEP},
    ],
)
def test_only_cells_of_one_key_become_one(changes):
    cells = [cell([1], 0), cell([2], 1, **changes)]
    assert sorted(united(cells, 0, MINUTE_MS), key=str) == sorted(cells, key=str)


@pytest.mark.parametrize(
    "doubtful",
    [
        cell([1], 1),
        cell([2], 1, count=2),
        cell([2], 1, again=again_of({2: 1}), count=2),
        cell([2], 1, bitmap=b"", unsequenced_count=1),
        cell([2], 1, bitmap=b"no bitmap"),
    ],
)
def test_what_is_in_any_doubt_stays_as_it_is(doubtful):
    cells = [cell([1], 0), doubtful]
    assert sorted(united(cells, 0), key=str) == sorted(cells, key=str)


def test_large_sets_are_united_too():
    cells = [cell(range(number, 60_000, 7), number) for number in range(1, 8)]
    assert len(cells[0].bitmap) > SMALL_SET_BYTES
    (one,) = united(cells, 0)
    assert list(one.sequences()) == list(range(1, 60_000)) and len(one.bitmap) < 50
    overlapping = [*cells[:-1], cell([*range(7, 60_000, 7), 1], 7)]
    assert united(overlapping, 0) == overlapping


def test_sets_are_united_in_whatever_order_their_windows_lie():
    """The large ones of a window behind as many small ones of the next."""
    later = [cell([number], number, window_start_ms=MINUTE_MS) for number in range(90_001, 90_008)]
    large = [cell(range(number, 60_000, 7), number) for number in range(1, 8)]
    assert len(large[0].bitmap) > SMALL_SET_BYTES > len(later[0].bitmap)
    found = {each.window_start_ms: list(each.sequences()) for each in united([*later, *large], 0, MINUTE_MS)}
    assert found == {0: list(range(1, 60_000)), MINUTE_MS: list(range(90_001, 90_008))}


def test_sums_are_the_same_before_and_after_and_with_what_comes_later(monkeypatch):
    monkeypatch.setattr(stream_cells, "FEW_CELLS", 0)
    rng = random.Random(seeds.given())
    for _ in range(30):
        numbers = list(range(1, 400))
        rng.shuffle(numbers)
        cells = []
        while numbers:
            part, numbers = numbers[: rng.randrange(1, 9)], numbers[9:]
            where = rng.choice(("ewr", "agg"))
            cells.append(
                cell(
                    part, rng.randrange(9), tier=where, cluster=where, producer=rng.choice(("", "AA")),
                    window_start_ms=MINUTE_MS * rng.randrange(3), digest=rng.choice((None, 1, 1 << 63)),
                    last_append_ms=rng.choice((-1, 8)), topic_id=rng.choice(("", "id")),
                )
            )  # fmt: skip
        once = united(cells, 0, MINUTE_MS)
        late = [
            cell([rng.randrange(1, 500)], 3, window_start_ms=MINUTE_MS * rng.randrange(3)) for _ in range(5)
        ]
        assert len(once) < len(cells)
        assert sums(once) == sums(cells) and sums([*once, *late]) == sums([*cells, *late])
        assert StreamCells(table_of([*once, *late])).seen() == merge_cells([*once, *late])
        again = united([*once, *cells[:0]], 0, MINUTE_MS, 2 * MINUTE_MS)
        assert sums(again) == sums(cells) and len(again) <= len(once)


def test_united_cells_are_written_as_any_others():
    table = unite(table_of([cell([1], 0), cell([2], 1)]), windows(0))
    assert table.schema == CELL_SCHEMA and table.num_rows == 1
    table.validate(full=True)
    assert pc.all(pc.invert(table["tail"])).as_py() and table["note"].null_count == 1


def test_nobody_knows_what_has_passed_of_a_cell_without_a_place():
    nowhere = cell([1, 2], **UNITED)
    place = ("ewr", "flights", NO_PLACE)
    tier = TierReading(
        "agg", "ewr", passed={place: Passage(1 << 40, "id")}, began={place: 0},
        gaps=[Gap(("ewr", "flights", 0), 0, 1 << 40, "expired")],
    )  # fmt: skip
    assert not tier.has_passed(nowhere) and tier.gap_over(nowhere) is None


def test_an_arrival_of_what_also_stands_in_a_united_cell_proves_no_passage():
    """Either copy may be the one that arrived: were it the later one's, lag would be called a loss."""
    cells = [cell([1, 2], **UNITED), cell([2], 3), cell([9], 4)]
    arrived = arrivals_of([cell([1, 2, 9], tier="agg", cluster="agg")])
    assert set(passage_by_arrivals(cells, arrived)) == {("ewr", "flights", 4)}


def test_a_loss_is_told_without_the_places_that_are_not_known():
    around = Neighbourhood([cell([1, 2, 3], **UNITED), cell([4], 5), cell([1, 4], 5, tier="agg")])
    told = around.around(("ewr", "agg"), 2, 4)
    assert [each["partition"] for each in told["held"]] == [5]
    assert "after" not in Neighbourhood([cell([9], **UNITED, tier="agg")]).around(("ewr", "agg"), 1, 1)


def test_what_a_tier_that_was_added_later_lacks_of_a_united_window_is_unknown_and_neither_lost_nor_proven():
    report = CountEvent(
        STREAM, STREAM, "flights", "AA", 0, MINUTE_MS, 1, 3, 0, BitMap64([1, 2, 3]), BitMap64(), BitMap64(), 0
    )
    facts = StreamFacts(STREAM, state=CLOSED, last_assigned=3, last_settled=3)
    facts.learn_count(report)
    place = {("ewr", "flights", each): Passage(1 << 40, "id") for each in (0, NO_PLACE)}
    tiers = [TierReading("ewr"), TierReading("agg", "ewr", passed=place)]
    seen = merge_cells([cell([1, 2], **UNITED), cell([3], 0)])
    (row,) = reconcile_stream(facts, seen, tiers, window_ms=MINUTE_MS, grace_ms=0, now_ms=1 << 40)
    assert row.missing == {("ewr", "agg"): ((3, 3),)} and row.unknown == ((1, 2),) and not row.in_flight
    assert row.reasons == ("a gap or an unknown offset before tier agg",)


CONFIG = {
    "clusters": {
        "ewr": {"bootstrap": ["h:1"], "tier": "source"},
        "agg": {"bootstrap": ["h:2"], "tier": "aggregate"},
        "lake": {"bootstrap": ["h:3"], "tier": "aggregate"},
    },
    "topics": ["flights"],
}


def test_nothing_is_united_while_arrivals_tell_how_far_a_mirror_is():
    positions = [MirrorPosition(name, "m", "ewr", "flights", 0, 5, "") for name in ("agg", "lake")]
    captured = Capture(0, EventLedger(), positions=positions)
    assert uniting.may_unite(parse_config(CONFIG), captured)
    assert not uniting.may_unite(parse_config(CONFIG), replace(captured, positions=positions[:1]))
    foreign = {**CONFIG["clusters"], "lake": {**CONFIG["clusters"]["lake"], "mirror": "foreign"}}
    assert not uniting.may_unite(parse_config({**CONFIG, "clusters": foreign}), captured)


def test_windows_are_united_only_where_this_run_found_them_settled_and_proven():
    def row(start_ms, state=WindowState.SETTLED, verdict=Verdict.PROVEN, stream=STREAM):
        return WindowVerdict("flights", "AA", stream, start_ms, MINUTE_MS, state, verdict)

    others = [each for each in Verdict if each is not Verdict.PROVEN]
    rows = verdict_rows(
        [
            row(0),
            row(1, WindowState.OPEN),
            row(None),
            row(3, stream=""),
            *(row(4 + number, verdict=each) for number, each in enumerate(others)),
        ]
    )
    proven = uniting.proven_windows(rows)
    window = {"window_start_ms": 0, "window_ms": MINUTE_MS}
    assert proven.to_pylist() == [{"topic": "flights", "stream": STREAM, **window}]
    left = PrunedWindows(MINUTE_MS, BitMap64([7]))
    plan = uniting.fold_plan({"b" * 16: left}, proven)
    assert plan.schema == uniting.PLAN_SCHEMA and plan["stream"].to_pylist() == ["b" * 16, STREAM]
    cells = table_of([cell([1], 0, window_start_ms=each * MINUTE_MS) for each in (7, 8)])
    (kept,) = cells_of(folded(cells, plan.slice(0, 1)))
    assert kept.window_start_ms == 8 * MINUTE_MS, "what is pruned goes, as ever"
