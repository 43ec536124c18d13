import itertools

import pytest

from millrace.audit.contract.events import CLOSED, HEARTBEAT, StreamFacts
from millrace.audit.reconciliation.settled import SETTLED_SCHEMA, without
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import FELL_SILENT, Verdict, WindowState, WindowVerdict
from millrace.audit.reconciliation.watermark import Waiver, completeness
from millrace.audit.runs.watermarks import watermarks_of
from tests.settling import settle
from tests.simulation.audit_logs import GRACE_MS, WINDOW_MS
from tests.unit.audit.trap_scene import Scene, Stream, all_proven


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def row(start_ms, verdict=Verdict.PROVEN, state=WindowState.SETTLED, **changes):
    fields = {"topic": "t", "producer": "AA", "stream": "1", "window_ms": 10}
    return WindowVerdict(
        **{**fields, "window_start_ms": start_ms, "verdict": verdict, "state": state, **changes}
    )


LATER = 10**6  # all is over


def completeness_watermark(topic, rows, streams, waivers=(), over_ms=LATER):
    return completeness(topic, rows, streams, waivers, over_ms=over_ms).watermark_ms


def closed():
    return [StreamFacts("1", topic="t", state=CLOSED)]


def test_the_watermark_is_the_end_of_the_proven_prefix():
    rows = [row(20, Verdict.LOSS), row(0), row(10, Verdict.COUNT_MATCH), row(30)]
    assert completeness_watermark("t", rows, closed()) == 20


def test_nothing_proven_is_no_watermark():
    assert completeness_watermark("t", [], closed()) is None
    assert completeness_watermark("t", [row(0, Verdict.UNKNOWN)], closed()) is None
    assert completeness_watermark("other", [row(0)], closed()) is None


def test_every_stream_of_a_window_must_be_proven_and_settled():
    for other in (row(10, stream="2", verdict=Verdict.UNKNOWN), row(10, stream="2", state=WindowState.OPEN)):
        assert completeness_watermark("t", [row(0), row(10), other], []) == 10


def test_only_a_waiver_lets_it_pass_a_hole():
    rows = [row(0), row(10, Verdict.LOSS), row(20)]
    waiver = Waiver("t", 10, "ops", "replayed by hand", 5)
    assert completeness_watermark("t", rows, closed(), [waiver]) == 30
    assert completeness_watermark("t", rows, closed(), [Waiver("other", 10, "ops", "", 5)]) == 10


def test_a_waiver_of_a_window_waives_neither_a_streams_own_doubt_nor_a_promise_nor_an_open_row():
    """What no report and no tier places in a window is in none that was waived."""
    rows, streams = [row(0), row(10, Verdict.LOSS), row(20)], closed()
    waiver = Waiver("t", 10, "ops", "replayed by hand", 5)
    for not_before_ms, told in ((None, None), (5, None), (10, 10), (19, 10), (20, 20), (30, 30)):
        doubt = row(None, Verdict.UNKNOWN, stream="2", not_before_ms=not_before_ms)
        assert completeness_watermark("t", [*rows, doubt], streams, [waiver]) == told
        both = [waiver, Waiver("t", None, "ops", "killed on purpose", 5, stream="2")]
        assert completeness_watermark("t", [*rows, doubt], streams, both) == 30
    living = StreamFacts("2", topic="t", state=HEARTBEAT, no_earlier_than_ms=15)
    assert completeness_watermark("t", rows, [*streams, living], [waiver]) == 10
    half_open = [*rows, row(10, state=WindowState.OPEN, stream="2")]
    assert completeness_watermark("t", half_open, streams, [waiver]) == 10
    settled = SETTLED_SCHEMA.empty_table()
    told = watermarks_of(verdict_rows(half_open), settled, streams, [waiver], ["t"], over_ms=LATER)
    assert told == {"t": 10}
    assert watermarks_of(verdict_rows(rows), settled, streams, [waiver], ["t"], over_ms=LATER) == {"t": 30}


def test_it_does_not_pass_what_a_living_stream_has_promised():
    streams = [*closed(), StreamFacts("2", topic="t", state=HEARTBEAT, no_earlier_than_ms=15)]
    assert completeness_watermark("t", [row(0), row(10)], streams) == 10


def test_it_reaches_no_window_that_is_not_over_however_settled_it_is():
    """All streams have closed; the next one may start within that window, or long before a date that is
    ahead."""
    rows = [row(0), row(10), row(20, stream="2", window_ms=20), row(500)]
    for over_ms, told in ((9, None), (10, 10), (29, 20), (39, 20), (40, 40), (509, 40), (510, 510)):
        assert completeness_watermark("t", rows, closed(), over_ms=over_ms) == told, over_ms
    waiver = Waiver("t", 500, "ops", "known", 5)
    lost = [row(0), row(500, Verdict.LOSS)]
    assert completeness_watermark("t", lost, closed(), [waiver], over_ms=509) == 10
    held = completeness("t", rows, closed(), over_ms=29)
    assert {start_ms: row.state for start_ms, row in held.windows.items()} == {
        20: WindowState.OPEN,
        500: WindowState.OPEN,
    }
    lines = without(settle(verdict_rows(rows), None, ["t"], 1).table, [("t", 500)])
    nothing = verdict_rows([])
    assert watermarks_of(nothing, lines, [], [], ["t"], over_ms=509) == {"t": None}


def test_the_watermark_of_a_batch_job_that_closed_within_its_window_is_not_ahead_of_now(scene):
    """What the next job creates now lies above it."""
    first = Stream(scene, promises=False)
    first.send(2)
    first.send(1, ago_ms=-(10**9))
    scene.later()
    first.close()
    scene.carry()
    scene.later()
    assert all_proven(scene.audit())
    assert scene.result.watermarks["flights"] <= scene.now_ms
    scene.now_ms += WINDOW_MS - scene.now_ms % WINDOW_MS
    started_ms = scene.now_ms
    second = Stream(scene, promises=False)
    second.send(1)
    scene.later(10)
    second.close()
    scene.carry()
    scene.later(GRACE_MS)
    assert all_proven(scene.audit())
    assert scene.result.watermarks["flights"] <= started_ms


def test_a_hole_in_the_reports_stops_it_where_the_doubt_begins():
    hole = row(None, Verdict.UNKNOWN)
    assert completeness_watermark("t", [row(0), hole], closed()) is None
    silence = row(None, Verdict.UNKNOWN, not_before_ms=10)
    assert completeness_watermark("t", [row(0), row(10), silence], closed()) == 10


def test_a_waived_stream_stops_it_no_longer_and_no_other_one_is_waived_with_it():
    silence = row(None, Verdict.UNKNOWN, not_before_ms=10)
    rows = [row(0), row(10), silence]
    waiver = Waiver("t", None, "ops", "killed on purpose", 5, stream="1")
    assert completeness_watermark("t", rows, closed(), [waiver]) == 20
    assert completeness_watermark("t", [*rows, row(None, Verdict.UNKNOWN, stream="2")], [], [waiver]) is None


def test_the_promise_of_a_killed_producer_whose_silence_is_waived_holds_nobody_up():
    streams = [StreamFacts("2", topic="t", state=HEARTBEAT, no_earlier_than_ms=15)]
    silent = row(None, Verdict.UNKNOWN, stream="2", not_before_ms=15, reasons=(FELL_SILENT,))
    hole = row(None, Verdict.UNKNOWN, stream="2", reasons=("no report covers these sequences",))
    waiver = Waiver("t", None, "ops", "killed on purpose", 5, stream="2")
    assert completeness_watermark("t", [row(0), row(10), silent], streams, [waiver]) == 20
    assert completeness_watermark("t", [row(0), row(10), silent], streams) == 10
    # One that lives may still write into the window, whatever hole of it was waived.
    assert completeness_watermark("t", [row(0), row(10), hole], streams, [waiver]) == 10


def test_one_that_spoke_again_after_the_waiver_is_not_waived_again_by_itself():
    silent = row(None, Verdict.UNKNOWN, stream="2", not_before_ms=15, reasons=(FELL_SILENT,))
    waiver = Waiver("t", None, "ops", "killed on purpose", 5, stream="2")
    for at_ms, told in ((5, 20), (6, 10)):
        streams = [StreamFacts("2", topic="t", state=HEARTBEAT, no_earlier_than_ms=15, at_ms=at_ms)]
        assert completeness_watermark("t", [row(0), row(10), silent], streams, [waiver]) == told


def test_who_waives_a_hole_waives_no_promise():
    streams = [StreamFacts("2", topic="t", state=HEARTBEAT, no_earlier_than_ms=15, at_ms=4)]
    both = row(None, Verdict.UNKNOWN, stream="2", reasons=(FELL_SILENT, "a hole"))
    for reasons, silent_from_ms, told in (
        (("a hole",), None, 10),
        ((FELL_SILENT, "a hole"), 4, 20),
        ((FELL_SILENT, "a hole"), 3, 10),  # it has spoken since
    ):
        waiver = Waiver("t", None, "ops", "known", 5, "2", reasons=reasons, silent_from_ms=silent_from_ms)
        assert completeness_watermark("t", [row(0), row(10), both], streams, [waiver]) == told


def test_a_waived_silence_is_known_by_the_rows_of_the_run():
    streams = [StreamFacts("2", topic="t", state=HEARTBEAT, no_earlier_than_ms=15)]
    silent = row(None, Verdict.UNKNOWN, stream="2", not_before_ms=15, reasons=(FELL_SILENT,))
    rows, settled = verdict_rows([row(0), row(10), silent]), SETTLED_SCHEMA.empty_table()
    waiver = Waiver("t", None, "ops", "killed on purpose", 5, stream="2")
    assert watermarks_of(rows, settled, streams, [waiver], ["t"], over_ms=LATER) == {"t": 20}
    assert watermarks_of(rows, settled, streams, [], ["t"], over_ms=LATER) == {"t": 10}


def test_a_longer_window_that_is_proven_does_not_carry_it_over_a_shorter_one_that_is_not():
    """Stream 2 counts in windows of 20, stream 1 in windows of 10."""
    for held in (row(10, Verdict.LOSS), row(10, state=WindowState.OPEN)):
        rows = [row(0, stream="2", window_ms=20), row(0), held, row(20)]
        assert completeness_watermark("t", rows, []) == 10
    late = [row(0, stream="2", window_ms=20), row(0), row(10, Verdict.LOSS)]
    assert completeness_watermark("t", late, [], [Waiver("t", 10, "ops", "replayed", 5)]) == 20


def test_what_the_rows_of_a_window_come_to_holds_the_watermark_as_the_rows_do():
    """The rules see one verdict a window, of all its streams: it says what theirs would have said."""
    settled, kinds = SETTLED_SCHEMA.empty_table(), list(itertools.product(WindowState, Verdict))
    for (state, verdict), (other_state, other) in itertools.product(kinds, kinds):
        told = [
            row(0),
            row(10, verdict, state),
            row(10, other, other_state, stream="2", window_ms=20),
            row(30),
        ]
        held = completeness_watermark("t", told, [])
        assert watermarks_of(verdict_rows(told), settled, [], [], ["t"], over_ms=LATER) == {"t": held}
        assert held == (
            40
            if {verdict, other} <= {Verdict.PROVEN, Verdict.COUNT_MATCH}
            and {state, other_state} == {WindowState.SETTLED}
            else 10
        )


def test_lines_of_pruned_windows_carry_the_watermark_of_their_topic_alone():
    lines = without(settle(verdict_rows([row(0), row(10)]), None, ["t"], 1).table, [("t", 0), ("t", 10)])
    rows = verdict_rows([row(20), row(20, stream="2", window_ms=20)])
    assert watermarks_of(rows, lines, [], [], ["t", "u"], over_ms=LATER) == {"t": 40, "u": None}
    assert watermarks_of(rows.slice(0, 0), lines, [], [], ["t"], over_ms=LATER) == {"t": 20}
