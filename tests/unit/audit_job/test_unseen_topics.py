"""Topics of the config that the audit cannot look at: misspelt ones, and those that a cluster keeps from it.
Neither is a proof, and what nobody looked at is not lost."""

from __future__ import annotations

import asyncio

import pytest

from millrace.audit.keeping.state import Commit
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.report.reasons import advice
from millrace.audit.runs import capture as capture_module
from millrace.audit.runs.event_reading import EventsRead, read_events
from millrace.audit.runs.partition_pins import PartitionPin
from millrace.audit.runs.untrusted import doubts_of
from millrace.broker.errors import ClusterUnreachable, LeaderNotAvailable, TopicAuthorizationFailed
from tests.unit.audit_job.test_doubtful_captures import (
    FakeCluster,
    captured_of,
    cell,
    config,
    no_sizes,
    pin,
    position,
    verdicts,
)
from tests.verdicts import overall_verdict


def judged(captured, cells, settings):
    rows = verdicts(captured, cells, settings)
    doubts = doubts_of(settings, captured, Commit(), {}, {}, verdict_rows(rows), [], captured.taken_ms)
    return rows, doubts


def carried():
    """Topic flights, of which all has arrived."""
    return captured_of(positions=[position(2)]), [cell("ewr", [1, 2]), cell("agg", [1, 2])]


def test_a_misspelt_topic_is_named_and_ends_in_unknown():
    captured, cells = carried()
    rows, doubts = judged(captured, cells, config(topics=["flights", "ordres"]))
    assert [(each.what, each.topic) for each in doubts.all] == [
        ("no source cluster has topic ordres, and no producer tells of it", "ordres")
    ]
    assert overall_verdict(rows, bool(doubts.holding())) is Verdict.UNKNOWN
    assert doubts.held({"flights": 7, "ordres": None}, {}) == {"flights": 7, "ordres": None}


def test_a_misspelt_topic_that_somebody_made_by_reading_it_is_no_topic_of_a_producer():
    captured, cells = carried()
    captured.pins.append(PartitionPin("agg", "ordres", "ordres", 0, "id", 0, 0))
    assert judged(captured, cells, config(topics=["flights", "ordres"]))[1].holding()


def test_a_topic_that_is_there_and_empty_or_that_a_producer_tells_of_is_no_doubt():
    captured, cells = carried()
    captured.pins.append(PartitionPin("ewr", "orders", "orders", 0, "id", 0, 0))
    assert not judged(captured, cells, config(topics=["flights", "orders"]))[1].all
    lost_everywhere = captured_of(pins=[])
    rows, doubts = judged(lost_everywhere, [], config())
    assert rows[0].missing == {("produced", "ewr"): ((1, 2),)} and not doubts.all


@pytest.mark.parametrize("refusal", [TopicAuthorizationFailed, LeaderNotAvailable])
@pytest.mark.parametrize("cluster", ["ewr", "agg"])
def test_a_topic_that_a_cluster_does_not_tell_of_is_not_a_loss_of_everything(monkeypatch, cluster, refusal):
    monkeypatch.setattr(capture_module, "bytes_per_offset", no_sizes)
    captured = captured_of(pins=[pin()] if cluster == "agg" else [], positions=[position(2)])
    refusing = FakeCluster(cluster, refused={"flights": refusal.code})
    asyncio.run(capture_module._pin_cluster(captured, config(), refusing))
    rows, doubts = judged(captured, [cell("ewr", [1, 2])] if cluster == "agg" else [], config())
    assert (rows[0].verdict, rows[0].missing, rows[0].unknown) == (Verdict.UNKNOWN, {}, ((1, 2),))
    told = f"cluster {cluster} does not tell of topic flights: {refusal()}"
    assert rows[0].reasons == (f"part of tier {cluster} could not be read: {told}",)
    assert [each.what for each in doubts.holding()] == [told] and not captured.absent
    assert "allowed" in advice(rows[0].reasons[0])


def test_events_that_may_not_be_read_end_the_job(monkeypatch):
    """Without them there is no word of producers or gaps, and what they explain would read as lost."""
    refusing = FakeCluster("agg", refused={"millrace.audit": TopicAuthorizationFailed.code})
    with pytest.raises(ClusterUnreachable, match=r"agg: millrace\.audit cannot be read: topic authorization"):
        asyncio.run(read_events(captured_of(), config(), {"agg": refusing}, EventsRead(), Commit()))
