"""Producers that set creation times themselves promise nothing, so that their windows never settle while they
live: what is unproven in one is told as soon as its end and the grace are over, and what is told as proven
speaks of the settled windows alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.audit.contract.events import GapEvent
from millrace.audit.reconciliation.verdicts import Verdict, WindowState
from tests.simulation.audit_logs import GRACE_MS, WINDOW_MS
from tests.unit.audit.trap_scene import Scene, Stream, row

THREE_DAYS_MS = 3 * 86_400_000


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def two_producers(scene: Scene) -> Stream:
    """One that closed, and of which all has arrived; the one that promises nothing has sent ten records."""
    closed, unpromised = Stream(scene), Stream(scene, promises=False)
    closed.send(9)
    closed.close()
    unpromised.send(10, ago_ms=500_000)
    unpromised.report()
    return unpromised


def look(scene: Scene, stream: Stream, later_ms: int = THREE_DAYS_MS) -> tuple[str, int]:
    scene.later(later_ms)
    stream.report()
    scene.audit()
    return scene.result.summary["verdict"], scene.result.exit_status


def test_a_partition_that_stands_still_for_days_is_no_proof(scene):
    stream = two_producers(scene)
    scene.carry(until=18)
    assert look(scene, stream) == ("UNKNOWN", 2)
    summary = scene.result.summary
    assert "1 record still on the way" in summary["sentence"] and summary["windows"]["UNKNOWN"] == 1
    assert {each["verdict"] for each in summary["producers"]} == {"PROVEN", "UNKNOWN"}
    scene.carry()
    assert look(scene, stream, 1000) == ("PROVEN", 0)


def test_a_record_that_a_gap_skipped_is_no_proof_days_later(scene):
    stream = two_producers(scene)
    scene.carry(without=(10,))
    scene.publish(GapEvent("m-agg", "ewr", "flights", 0, 18, 19, "too_large", 0), "ewr", surely=True)
    assert look(scene, stream) == ("UNKNOWN", 2)


@pytest.mark.parametrize("until", [18, None], ids=["in doubt", "all arrived"])
def test_a_window_that_is_over_and_was_never_promised_is_late_whatever_its_verdict(scene, until):
    stream = two_producers(scene)
    scene.carry(until=until)
    look(scene, stream)
    late = [(each["producer"], each["kind"]) for each in scene.result.summary["late"]]
    assert (stream.name, "report") in late and ("producer-1", "report") not in late


def test_all_arrived_is_said_of_settled_windows_alone(scene):
    stream = two_producers(scene)
    stream.send(1)
    stream.report()
    scene.carry(until=19)
    assert look(scene, stream, GRACE_MS) == ("PROVEN", 0)
    assert scene.result.summary["counts"]["acknowledged"] == 20
    assert scene.result.summary["open"] == {"windows": 2, "acknowledged": 11, "in_flight": 1}
    assert scene.result.summary["sentence"] == (
        "All 9 records that producers had acknowledged in settled windows arrived, each exactly once; "
        "2 windows are still open (11 records acknowledged, 1 still on the way)."
    )


def test_a_window_is_unknown_from_its_end_and_grace_on_until_all_has_arrived(scene):
    stream = Stream(scene, promises=False)
    (record,) = stream.send(1)
    scene.now_ms = record.window + WINDOW_MS + GRACE_MS - 1
    stream.report()
    assert row(scene.audit(), stream).state is WindowState.OPEN
    scene.later(1)
    told = row(scene.audit(), stream)
    assert (told.state, told.verdict) == (WindowState.SETTLED, Verdict.UNKNOWN)
    scene.carry()
    told = row(scene.audit(), stream)
    assert (told.state, told.verdict) == (WindowState.OPEN, Verdict.PROVEN)
