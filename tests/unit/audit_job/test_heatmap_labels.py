"""The drawing is wide enough for a month that begins in its last column."""

from __future__ import annotations

from millrace.audit.report.heatmap import Heatmap, Square, _as_calendar


def test_label_of_the_last_column_reaches_beyond_the_squares():
    heatmap = Heatmap("flights", "ewr", 86_400_000, width=53, height=7)
    heatmap.columns = [(0, "Jan 2013"), (52, "Jan 2014")]
    assert heatmap.label_end(14, 7) == 52 * 14 + 8 * 7 > 53 * 14


def test_heatmap_without_column_labels_needs_no_room_for_them():
    assert Heatmap("flights", "ewr", 60_000, width=60, height=1).label_end(14, 7) == 0


def test_the_last_week_of_the_calendar_is_drawn():
    """A clock may be that wrong, and the report must be written all the same."""
    last_ms = 253_402_214_400_000  # Friday, 9999-12-31
    square = Square(0, 0, last_ms, "PROVEN")
    heatmap = Heatmap("flights", "ewr", 86_400_000, width=1, height=7, squares=[square])
    _as_calendar(heatmap, last_ms, last_ms)
    assert (square.x, square.y) == (0, 4)
    assert heatmap.columns == [(0, "Dec 9999")]
