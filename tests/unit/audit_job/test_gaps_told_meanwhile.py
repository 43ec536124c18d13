"""A mirror gives up offsets while the audit looks: between its reading of the events and of the positions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from millrace.audit.contract.events import GapEvent, encode_event
from millrace.audit.keeping.state import Commit
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.runs import event_reading
from millrace.audit.runs.event_reading import EventsRead
from millrace.broker.errors import ClusterUnreachable, LeaderNotAvailable
from tests.unit.audit.trap_scene import Scene, Stream, row
from tests.unit.audit_job.test_doubtful_captures import FakeCluster, captured_of, config, events


@pytest.mark.parametrize("cluster", ["agg", "ewr"])
def test_a_gap_that_is_told_after_the_events_were_read_is_no_loss(tmp_path, cluster):
    scene = Scene(tmp_path)
    stream = Stream(scene)
    stream.send(5)
    stream.close()
    scene.later()
    steps = []

    def meanwhile(what):
        steps.append(what)
        if what.startswith("millrace.positions") and not scene.mirrors[0].lanes:
            gap = GapEvent("m-agg", "ewr", "flights", 0, 2, 3, "too_large", scene.now_ms)
            scene.publish(gap, cluster, surely=True)
            scene.carry(without=(3,))

    found = row(scene.product.run(between=meanwhile).rows, stream)
    assert (found.verdict, found.missing) == (Verdict.UNKNOWN, {})
    assert found.explained == {"too_large": ((3, 3),)}
    positions = steps.index("millrace.positions.m-agg")
    assert "millrace.audit" in steps[:positions] and "millrace.audit, since" in steps[positions:]


def test_of_what_was_told_since_only_gaps_are_learnt_and_whatever_hides_them(monkeypatch):
    """What producers acknowledge by now may lie above the pinned ends. A mirror's gap counts as soon as it is
    written; its own open transaction before it hides it from readers of committed data."""
    gap = GapEvent("m", "ewr", "flights", 0, 2, 3, "too_large", 0)
    log = [encode_event(each) for each in (*events([1, 2]), *events([1, 2, 3], at_ms=9), gap)]
    asked = []

    async def read(cluster, topic, read_committed=True, since=None, until=None):
        asked.append((read_committed, since, until))
        end = until[0] if read_committed else len(log)
        for offset, (key, value) in list(enumerate(log))[(since or {}).get(0, 0) : end]:
            yield SimpleNamespace(key=key, value=value, offset=offset, partition=0)

    monkeypatch.setattr(event_reading, "read_topic_to_end", read)
    captured = captured_of()
    captured.ledger.streams.clear()
    cluster = FakeCluster("agg", topics=["millrace.audit"], ends={True: 2})
    asyncio.run(event_reading.read_events(captured, config(), {"agg": cluster}, EventsRead(), Commit()))
    before = captured.ledger.streams.copy()
    asyncio.run(event_reading.read_new_gaps(captured, cluster))
    assert asked == [(True, {0: 0}, {0: 2}), (False, {0: 2}, None)]
    assert list(captured.ledger.gaps.values()) == [gap]
    (facts,) = captured.ledger.streams.values()
    assert facts is next(iter(before.values())) and facts.last_assigned == 2


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        (FakeCluster("agg", refused={"millrace.audit": LeaderNotAvailable.code}), "leader"),
        (FakeCluster("agg"), "it was there a moment ago"),
    ],
)
def test_gaps_that_cannot_be_read_again_end_the_run(cluster, told):
    """Positions would be newer than the gaps that are known, and what a gap explains would be lost."""
    captured = captured_of()
    captured.gaps_to["agg"] = {}
    with pytest.raises(ClusterUnreachable, match=f"millrace.audit cannot be read: .*{told}"):
        asyncio.run(event_reading.read_new_gaps(captured, cluster))


def test_a_cluster_that_has_no_events_tells_of_no_gaps():
    asyncio.run(event_reading.read_new_gaps(captured_of(), FakeCluster("agg")))
