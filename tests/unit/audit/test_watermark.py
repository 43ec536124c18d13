from millrace.audit.events import CLOSED, HEARTBEAT, StreamFacts
from millrace.audit.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.watermark import Waiver, completeness_watermark


def row(start_ms, verdict=Verdict.PROVEN, state=WindowState.SETTLED, **changes):
    fields = {"topic": "t", "producer": "AA", "stream": "1", "window_ms": 10}
    return WindowVerdict(
        **{**fields, "window_start_ms": start_ms, "verdict": verdict, "state": state, **changes}
    )


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


def test_it_does_not_pass_what_a_living_stream_has_promised():
    streams = [*closed(), StreamFacts("2", topic="t", state=HEARTBEAT, no_earlier_than_ms=15)]
    assert completeness_watermark("t", [row(0), row(10)], streams) == 10


def test_a_hole_in_the_reports_stops_it_where_the_doubt_begins():
    hole = row(None, Verdict.UNKNOWN)
    assert completeness_watermark("t", [row(0), hole], closed()) is None
    silence = row(None, Verdict.UNKNOWN, not_before_ms=10)
    assert completeness_watermark("t", [row(0), row(10), silence], closed()) == 10
