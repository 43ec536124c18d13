"""What was gone before the audit's first look excuses what was in it, and nothing that came long after; and a
gap excuses what is in it, and nothing beside it, whenever the audit read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.audit.contract.events import GapEvent
from millrace.audit.reconciliation.verdicts import Verdict, WindowVerdict
from tests.unit.audit.trap_scene import Scene, Stream, row
from tests.unit.audit.trap_scenes import MIRROR_HOP

MANY_DAYS_MS = 300 * 86_400_000


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def looked_at_late(scene: Scene, cluster: str, **more: bool) -> Stream:
    """A producer that runs; retention had taken its first records when the audit looked first."""
    stream = Stream(scene, **more)
    stream.send(3)
    stream.report()
    scene.carry()
    log = scene.source() if cluster == "ewr" else scene.aggregate()
    log.start = log.end
    scene.later()
    stream.report()
    scene.audit()
    return stream


def newest(rows: list[WindowVerdict], stream: Stream) -> WindowVerdict:
    found = [row for row in rows if row.stream == stream.id and row.window_start_ms is not None]
    return max(found, key=lambda row: row.window_start_ms)


def loses(scene: Scene, stream: Stream, cluster: str) -> WindowVerdict:
    """Number 5, on its way into the cluster."""
    scene.later(MANY_DAYS_MS)
    stream.report()
    stream.send(1)
    stream.send(1, written=0 if cluster == "ewr" else 1)
    stream.report()
    scene.carry(without=(5,))
    scene.later()
    stream.report()
    return newest(scene.audit(), stream)


@pytest.mark.parametrize(("cluster", "above"), [("ewr", "produced"), ("agg", "ewr")])
def test_a_running_producer_that_loses_a_record_long_after_the_first_look_has_lost_it(scene, cluster, above):
    found = loses(scene, looked_at_late(scene, cluster), cluster)
    assert found.missing == {(above, cluster): ((5, 5),)}


def test_what_expired_in_its_own_time_is_not_known(scene):
    stream = looked_at_late(scene, "agg")
    oldest = min((row for row in scene.audit() if row.stream == stream.id), key=lambda row: row.published)
    assert oldest.verdict is Verdict.UNKNOWN and not oldest.missing


def test_a_producer_that_sets_creation_times_itself_may_have_dated_what_expired_ahead(scene):
    stream = looked_at_late(scene, "agg", promises=False)
    found = loses(scene, stream, "agg")
    assert (found.verdict, found.missing, found.unknown) == (Verdict.UNKNOWN, {}, ((5, 5),))


def test_a_loss_beside_a_gap_is_one_also_where_the_audit_read_before_the_mirror_told_anything(scene):
    """What it kept then would lie across the gap for good."""
    stream = Stream(scene)
    stream.send(5)
    stream.close()
    scene.later()
    assert row(scene.audit(), stream).in_flight == {MIRROR_HOP: ((1, 5),)}
    scene.publish(GapEvent("m-agg", "ewr", "flights", 0, 1, 3, "too_large", scene.now_ms), "ewr", surely=True)
    scene.carry(without=(2, 3, 5))
    scene.later()
    found = row(scene.audit(), stream)
    assert (found.explained, found.missing) == ({"too_large": ((2, 3),)}, {MIRROR_HOP: ((5, 5),)})
