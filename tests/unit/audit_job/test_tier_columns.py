"""What a tier counts in each row, whether all rows tell of the same tiers or not."""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millrace.audit.report.plain import tier_column

COUNTS = pa.map_(pa.string(), pa.int64())


def looked_up(rows: pa.Table, tier: str) -> list[int | None]:
    return pc.map_lookup(rows["consumed"], pa.scalar(tier), "first").to_pylist()


def drawn(luck: random.Random) -> pa.Table:
    names = ["a", "b", "c"][: luck.randint(0, 3)]
    alike, rows = luck.random() < 0.5, list[list[tuple[str, int | None]] | None]()
    for _ in range(luck.randint(0, 12)):
        here = names if alike else luck.sample(names, luck.randint(0, len(names)))
        told = [(name, luck.choice((None, luck.randint(0, 9)))) for name in here]
        rows.append(None if not alike and luck.random() < 0.1 else told)
    column = pa.array(rows, COUNTS)
    part = column.slice(luck.randint(0, len(column)), luck.randint(0, 8))
    return pa.table({"consumed": pa.chunked_array([part, column.slice(0, 0), column], COUNTS)})


@pytest.mark.parametrize("seed", range(60))
def test_a_column_is_what_arrow_looks_up(seed: int) -> None:
    luck = random.Random(seed)
    rows = drawn(luck)
    for table in (rows, rows.slice(luck.randint(0, 4)), rows.slice(1, 2)):
        for tier in ("a", "b", "z"):
            assert tier_column(table, tier).to_pylist() == looked_up(table, tier)


def test_rows_that_tell_of_the_same_tiers_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pa.table({"consumed": pa.array([[("a", 1), ("b", 2)], [("a", 3), ("b", 4)]], COUNTS)})
    monkeypatch.delattr(pc, "map_lookup")
    assert tier_column(rows, "b").to_pylist() == [2, 4] and tier_column(rows, "c").to_pylist() == [None, None]
