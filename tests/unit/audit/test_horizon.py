"""What decides the verdict today, and what was told for long enough: the horizon, and doubts that end."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from millrace.audit.reconciliation.horizon import DEFAULT_HORIZON_MS, split_older
from millrace.audit.reconciliation.reconcile import NOT_COVERED
from millrace.audit.reconciliation.row_parts import parts_of
from millrace.audit.reconciliation.settled import unnumbered
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import FELL_SILENT, Verdict, WindowState, WindowVerdict
from millrace.audit.report.sentences import older_findings
from tests.unit.audit.trap_scene import Scene, Stream, own, row

DAY_MS = 86_400_000
MONTH_MS = DEFAULT_HORIZON_MS + DAY_MS


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def killed_by_sigterm(scene: Scene) -> tuple[Stream, Stream]:
    """Two producers; one has told all that it sent when it dies without a last word, the other goes on."""
    killed, living = Stream(scene), Stream(scene)
    for stream in (killed, living):
        stream.send(3)
    scene.later()
    for stream in (killed, living):
        stream.report()
    scene.carry()
    goes_on(scene, living)
    return killed, living


def goes_on(scene: Scene, living: Stream, by_ms: int = 100_000) -> None:
    scene.later(by_ms)
    living.send(1)
    scene.later()
    living.report()
    scene.carry()


def test_a_stream_that_was_killed_is_in_doubt_only_after_its_promise(scene):
    killed, _ = killed_by_sigterm(scene)
    rows = scene.audit()
    assert killed.session.last_settled == killed.session.last_assigned == 3
    assert (row(rows, killed).verdict, row(rows, killed).state) == (Verdict.PROVEN, WindowState.SETTLED)
    assert own(rows, killed).reasons == (FELL_SILENT,)
    assert own(rows, killed).not_before_ms == killed.session.promise_ms
    watermark = scene.result.watermarks["flights"]
    proven = row(rows, killed)
    assert proven.window_start_ms + proven.window_ms <= watermark <= killed.session.promise_ms


def test_a_stream_that_was_killed_long_ago_decides_no_more_and_stays_in_the_report(scene):
    killed, living = killed_by_sigterm(scene)
    scene.audit()
    assert (scene.result.exit_status, scene.result.summary["verdict"]) == (2, "UNKNOWN")
    held = scene.result.watermarks
    goes_on(scene, living, MONTH_MS)
    rows = scene.audit()
    assert own(rows, killed).verdict is Verdict.UNKNOWN, "what nobody knows is not proven by waiting"
    assert (scene.result.exit_status, scene.result.summary["verdict"]) == (0, "PROVEN")
    assert scene.result.summary["older"]["streams"] == 1
    assert "1 stream in doubt" in older_findings(scene.result.summary)
    assert scene.result.watermarks == held, "only a waiver lets the watermark pass"


def test_a_silence_of_today_decides_though_a_hole_of_its_producer_is_history(scene):
    """Their row is one: it was made when the hole was found, and a hole has no beginning."""
    stream, living = Stream(scene), Stream(scene)
    for each in (stream, living):
        each.send(3, written=0 if each is stream else 1)
    scene.later()
    stream.report(lost=True)
    living.report()
    for by_ms in (100_000, MONTH_MS):
        scene.later(by_ms)
        stream.send(1)
        goes_on(scene, living)
        stream.report()
        scene.carry()
        rows = scene.audit()
        assert own(rows, stream).reasons == (NOT_COVERED,)
    assert scene.result.exit_status == 0, "the hole is history"
    last_ms = scene.now_ms
    goes_on(scene, living)
    rows = scene.audit()
    assert own(rows, stream).reasons == (FELL_SILENT, NOT_COVERED)
    assert (own(rows, stream).not_before_ms, own(rows, stream).silent_from_ms) == (None, last_ms)
    assert (scene.result.exit_status, scene.result.summary["verdict"]) == (2, "UNKNOWN")
    assert "older" not in scene.result.summary
    goes_on(scene, living, MONTH_MS)
    scene.audit()
    assert scene.result.exit_status == 0 and scene.result.summary["older"]["streams"] == 1


def test_what_was_lost_long_before_the_first_look_decides_until_it_was_told_for_long(scene):
    stream = Stream(scene)
    stream.send(3)
    stream.close()
    scene.carry(without=(2,))
    scene.later(10 * MONTH_MS)
    scene.audit()
    assert (scene.result.exit_status, scene.result.summary["verdict"]) == (1, "LOSS")
    assert "older" not in scene.result.summary
    scene.later(MONTH_MS)
    scene.audit()
    (loss,) = scene.result.summary["older"]["losses"]
    assert loss["sequences"] == [[2, 2]] and scene.result.summary["losses"] == []
    assert scene.result.exit_status == 2, "nothing that is not history is settled"


SINCE_MS = 1000


def found(verdict: Verdict, start_ms: int | None = 0, stream: str = "01", **more: object) -> WindowVerdict:
    return WindowVerdict("flights", "AA", stream, start_ms, 10, WindowState.SETTLED, verdict, **more)


@pytest.mark.parametrize(
    ("each", "made_ms", "is_older"),
    [
        (found(Verdict.LOSS), 999, True),
        (found(Verdict.LOSS), 1000, False),  # told for not so long, however old it is
        (found(Verdict.UNKNOWN, 990), 999, True),
        (found(Verdict.UNKNOWN, 991), 999, False),  # a window that a wrong clock put into the future
        (found(Verdict.PROVEN), 1, False),
        (found(Verdict.COUNT_MATCH), 1, False),
        (found(Verdict.UNKNOWN, None), 999, True),
        (found(Verdict.UNKNOWN, None, not_before_ms=999), 999, True),
        (found(Verdict.UNKNOWN, None, not_before_ms=1000), 999, False),  # silent again, and not known since
        (found(Verdict.UNKNOWN, None, silent_from_ms=999), 999, True),
        (found(Verdict.UNKNOWN, None, silent_from_ms=1000), 999, False),  # beside a hole of long ago
        (found(Verdict.UNKNOWN, None, stream=""), 1, False),  # a producer of the roster is missed today
        (found(Verdict.DUPLICATE, 0, stream=""), 1, True),
    ],
)
def test_a_finding_is_history_when_it_was_told_for_long_and_is_of_long_ago(each, made_ms, is_older):
    beside = found(Verdict.PROVEN, 2000)
    rows = unnumbered(verdict_rows([beside, each, beside]))
    rows = rows.set_column(rows.num_columns - 1, "settled_ms", pa.array([None, made_ms, None], pa.int64()))
    deciding, older = (pa.concat_tables(parts_of(each)) for each in split_older(rows, SINCE_MS))
    assert (deciding.num_rows, older.num_rows) == ((2, 1) if is_older else (3, 0))
    assert not is_older or older["verdict"].to_pylist() == [str(each.verdict)]
    assert split_older(rows, None)[1].num_rows == 0
