"""Which windows the state may let go: what is proven or waived, for long enough, as a whole."""

from __future__ import annotations

from dataclasses import replace

from pyroaring import BitMap64

from millrace.audit.keeping import upkeep
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState
from tests.settling import settle
from tests.unit.audit_job.upkeep_stage import KEEP_MS, STREAM, WINDOW_MS, pruned_of, row


def prunable(*verdicts, waived=(), held_back=(), settled_ms=0, now_ms=KEEP_MS, before=None):
    rows = verdict_rows(verdicts)
    settled = settle(rows, before, ["flights"], settled_ms).table
    going = upkeep.prunable(settled, rows, set(waived), set(held_back), KEEP_MS, now_ms)
    found = {}
    for each in going.to_pylist():
        found.setdefault((each["topic"], each["window_start_ms"]), {})[each["stream"]] = each["window_ms"]
    return found


def test_only_what_is_proven_or_waived_for_long_enough_may_go():
    proven = {("flights", 0): {STREAM: WINDOW_MS}}
    assert prunable(row(0), row(10, Verdict.LOSS)) == proven
    assert prunable(row(0), now_ms=KEEP_MS - 1) == {}
    assert prunable(row(0, Verdict.LOSS), waived=[("flights", 0)]) == proven
    assert prunable(row(0, Verdict.COUNT_MATCH)) == proven
    assert prunable(row(0, Verdict.UNKNOWN)) == {}


def test_one_stream_that_is_not_done_keeps_the_whole_window():
    for other in (row(0, Verdict.LOSS, stream="02"), row(0, state=WindowState.OPEN, stream="02")):
        assert prunable(row(0), other) == {}


def test_a_window_whose_cells_are_read_again_stays():
    assert prunable(row(0), held_back=[(STREAM, 0)]) == {}


def test_rows_are_pruned_part_by_part_and_only_of_waived_ones_details_are_read():
    lost = row(20, Verdict.LOSS, published=3, missing={("a", "b"): ((7, 7),)})
    pruned, lines, asked = pruned_of(row(0, published=2), row(0, published=1, stream="02"), row(10), lost)
    assert {stream: list(left.windows) for stream, left in pruned.items()} == {STREAM: [0, 1], "02": [0]}
    assert [(each["window_start_ms"], each["published"]) for each in sorted(lines, key=str)] == [
        (0, 3),
        (10, 0),
    ]
    (columns,) = asked.columns
    assert "detail" not in columns and "seen" not in columns
    held, lines, _ = pruned_of(row(0), row(10), held_back=[(STREAM, 10)])
    assert list(held[STREAM].windows) == [0] and len(lines) == 1


def test_where_a_mirror_keeps_no_positions_a_topic_with_a_loss_keeps_what_arrived_later():
    """That is all that says of the lost record that it does not come any more."""
    lost = row(0, Verdict.LOSS, missing={("a", "b"): ((7, 7),)})
    elsewhere = replace(row(30), topic="orders")
    rows = (lost, row(10), row(20, stream="02"), elsewhere)

    def going(**more):
        return {stream: list(left.windows) for stream, left in pruned_of(*rows, **more)[0].items()}

    assert going() == {STREAM: [1, 3], "02": [2]}
    assert going(places_decide=True) == {STREAM: [3]}
    assert going(places_decide=True, waived=[("flights", 0)]) == {STREAM: [0, 1, 3], "02": [2]}
    young = row(40, Verdict.UNKNOWN, state=WindowState.OPEN)
    still_asked = replace(row(0, Verdict.UNKNOWN, stream=""), producer="BB")
    pruned, _, _ = pruned_of(row(10), young, still_asked, places_decide=True)
    assert list(pruned[STREAM].windows) == [1], (
        "what is open is younger, and the roster's rows have no records"
    )


def test_what_no_report_told_of_in_a_waived_window_is_accounted_for():
    """Else it would be a hole of the reports as soon as the window's row is gone."""
    unreported = row(0, Verdict.UNKNOWN, unreported=((4, 6),))
    other = row(10, Verdict.UNKNOWN, unreported=((8, 9),))
    pruned, lines, _ = pruned_of(unreported, other, waived=[("flights", 0)])
    assert (list(pruned[STREAM].windows), pruned[STREAM].sequences) == ([0], BitMap64([4, 5, 6]))
    assert [each["verdict"] for each in lines] == ["UNKNOWN"]


def test_windows_that_have_numbers_in_common_go_together_or_not_at_all():
    """Whatever stays for one stream, stays for all, and with what these have in common with it."""
    together, further = {"shared": (0, 10, 2)}, {"shared": (10, 20, 2)}
    moved = [row(start_ms, Verdict.UNKNOWN, **together) for start_ms in (0, 10)]
    beside = [row(start_ms, Verdict.UNKNOWN, stream="02", **further) for start_ms in (10, 20)]
    alone = row(30, Verdict.UNKNOWN, reasons=('"shared":',), duplicates={"shared": ((1, 1),)})
    waived = [("flights", start_ms) for start_ms in (0, 10, 20, 30)]

    def going(*waived, **more):
        pruned = pruned_of(*moved, *beside, alone, waived=waived, **more)[0]
        return {stream: list(left.windows) for stream, left in pruned.items()}

    assert going(*waived) == {STREAM: [0, 1, 3], "02": [1, 2]}
    assert going(*waived[:2], waived[3]) == {STREAM: [3]}
    assert going(*waived[1:]) == {STREAM: [3]}
    assert going(*waived, held_back=[(STREAM, 0)]) == {STREAM: [3]}


def test_a_revision_begins_the_time_anew():
    before = settle(verdict_rows([row(0)]), None, ["flights"], 0).table
    changed = row(0, published=3)
    assert prunable(changed, before=before, settled_ms=500, now_ms=KEEP_MS) == {}
    assert prunable(changed, before=before, settled_ms=500, now_ms=KEEP_MS + 500)
