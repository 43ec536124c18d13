"""What was gone before the audit's first look excuses what was in it, and nothing that came long after."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.audit.reconciliation.verdicts import Verdict, WindowVerdict
from tests.unit.audit.trap_scene import Scene, Stream

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
