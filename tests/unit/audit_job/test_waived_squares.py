"""A square of the report that stands for several windows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millrace.audit.reconciliation.verdicts import STATES
from millrace.audit.report.drawing import Drawings
from millrace.audit.report.heatmap import Heatmap, Square
from millrace.audit.report.html import _standing

HOUR_MS = 3_600_000
LOST = ("flights", 6 * HOUR_MS)
LOST_TOO = ("flights", 7 * HOUR_MS)
OPEN_STILL = ("flights", 8 * HOUR_MS)
NEXT_DAY = ("flights", 24 * HOUR_MS)
ELSEWHERE = ("orders", 7 * HOUR_MS)


def doubts(*windows: tuple[str, int]) -> pa.Table:
    states = ["OPEN" if window == OPEN_STILL else "LOSS" for window in windows]
    return pa.table(
        {
            "topic": [topic for topic, _ in windows],
            "window_start_ms": [start_ms for _, start_ms in windows],
            "state": pa.array(map(STATES.index, states), pa.int32()),
        }
    )


@pytest.mark.parametrize(
    ("doubtful", "waived", "is_marked"),
    [
        ([LOST], [LOST], True),
        ([LOST, LOST_TOO], [LOST], False),
        ([LOST, LOST_TOO], [LOST_TOO], False),
        ([LOST, LOST_TOO], [LOST, LOST_TOO], True),
        ([LOST, OPEN_STILL], [LOST], True),
        ([LOST, NEXT_DAY, ELSEWHERE], [LOST], True),
        ([LOST, NEXT_DAY, ELSEWHERE], [NEXT_DAY, ELSEWHERE], False),
        ([LOST], [], False),
    ],
)
def test_a_day_is_marked_as_waived_when_nothing_of_it_stands(doubtful, waived, is_marked):
    drawings = Drawings(waived, _standing(doubts(*doubtful), waived))
    day = Heatmap("flights", "agg", 24 * HOUR_MS, width=1, height=1, squares=[Square(0, 0, 0, "LOSS")])
    assert bool(drawings.heatmap(day).waived) is is_marked
