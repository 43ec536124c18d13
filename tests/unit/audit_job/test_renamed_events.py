"""Events that a renaming mirror carried: another witness of what their producers told, counted once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from millrace.audit.contract.events import EventLedger, encode_event
from millrace.audit.keeping.state import Commit
from millrace.audit.runs import event_reading, partition_pins
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.event_reading import EventsRead, read_events
from millrace.broker.errors import ClusterUnreachable, ConfigError, TopicAuthorizationFailed
from tests.unit.audit_job.test_doubtful_captures import (
    STREAM,
    FakeCluster,
    cell,
    config,
    events,
    pin,
    verdicts,
)

RENAMED = {"agg": {"topics": {"flights": "ewr.flights"}, "mirror": "foreign"}}
MIRRORED = "ewr.millrace.audit"


class Told(FakeCluster):
    """A cluster with topics of events: {topic: events}."""

    def __init__(self, name, held, refused=()):
        super().__init__(name, topics=list(held), refused=refused)
        self.held = held

    async def list_offsets(self, timestamps, read_committed=False):
        return {
            (topic, 0): SimpleNamespace(
                offset=0 if at == partition_pins.EARLIEST else len(self.held[topic]), leader_epoch=0
            )
            for (topic, _), at in timestamps.items()
        }


def captured_of(monkeypatch, held, settings, refused=()):
    """What is learned of clusters {name: {topic: events}}."""

    async def read(cluster, topic, since, until):
        for offset in range(since[0], until[0]):
            key, value = encode_event(cluster.held[topic][offset])
            yield SimpleNamespace(key=key, value=value, offset=offset, partition=0)

    async def histories(cluster, newest):
        return dict.fromkeys(newest, ((0, 0),))

    monkeypatch.setattr(event_reading, "read_topic_to_end", read)
    monkeypatch.setattr(partition_pins, "epoch_histories", histories)
    captured = Capture(10_000_000, EventLedger())
    clusters = {name: Told(name, topics, refused if name == "agg" else ()) for name, topics in held.items()}
    asyncio.run(read_events(captured, settings, clusters, EventsRead(), Commit()))
    captured.pins = [pin(end=0), pin("agg")]
    return captured


@pytest.mark.parametrize(
    ("topics", "named", "found"),
    [
        ({"flights": "ewr.flights"}, None, (MIRRORED,)),
        ({"flights": ["ewr.flights", "jfk.flights"]}, None, (MIRRORED, "jfk.millrace.audit")),
        ({"flights": "flights_of_ewr"}, None, ()),
        ({}, None, ()),
        ({"flights": "flights_of_ewr"}, "audit_of_ewr", ("audit_of_ewr",)),
        ({"flights": "ewr.flights"}, ["millrace.audit"], ()),
    ],
)
def test_events_topics_of_a_renaming_mirror_are_known_by_its_default_or_named(topics, named, found):
    fields = {"topics": topics, **({} if named is None else {"events": named})}
    settings = config(clusters={"agg": fields})
    assert settings.clusters["agg"].told_elsewhere(settings.audit_topic) == found


def test_events_that_the_source_lost_are_read_where_the_mirror_brought_them(monkeypatch):
    """Its disk is gone, with what no mirror had carried: exactly that is lost, before the source."""
    settings = config(clusters=RENAMED)
    held = {"ewr": {"millrace.audit": []}, "agg": {MIRRORED: events([1, 2, 3])}}
    captured = captured_of(monkeypatch, held, settings)
    assert captured.origins == {STREAM: {"ewr"}}
    rows = verdicts(captured, [cell("agg", [1, 2])], settings)
    assert rows[0].missing == {("produced", "ewr"): ((3, 3),)}


def test_events_that_are_read_at_the_source_and_renamed_count_once(monkeypatch):
    settings, told = config(clusters=RENAMED), events([1, 2, 3])
    both = captured_of(monkeypatch, {"ewr": {"millrace.audit": told}, "agg": {MIRRORED: told}}, settings)
    alone = captured_of(monkeypatch, {"ewr": {"millrace.audit": told}, "agg": {}}, settings)
    assert both.ledger.streams == alone.ledger.streams
    assert (both.origins, both.told) == (alone.origins, alone.told)


def test_a_newer_report_counts_wherever_it_is_read(monkeypatch):
    """The mirror lags behind, or the source has lost its newest events: the union is what was told."""
    settings = config(clusters=RENAMED)
    held = {"ewr": {"millrace.audit": events([1, 2])[:1]}, "agg": {MIRRORED: events([1, 2])[1:]}}
    facts = captured_of(monkeypatch, held, settings).ledger.facts(STREAM)
    assert (facts.state, [report.count for report in facts.windows.values()]) == ("closed", [2])


def test_a_name_that_is_no_sources_says_nothing_of_where_a_stream_was_produced(monkeypatch):
    settings = config(clusters={"agg": {"topics": {"flights": "old.flights"}, "mirror": "foreign"}})
    captured = captured_of(monkeypatch, {"agg": {"old.millrace.audit": events([1])}}, settings)
    assert captured.told == {STREAM} and captured.origins == {}


def test_an_events_topic_that_was_named_and_is_not_there_is_told(monkeypatch):
    fields = {"agg": {**RENAMED["agg"], "events": "audit_of_ewr"}}
    captured = captured_of(monkeypatch, {"agg": {}}, config(clusters=fields))
    assert captured.absent == ["cluster agg has no topic audit_of_ewr, which should hold events"]
    assert captured_of(monkeypatch, {"agg": {}}, config(clusters=RENAMED)).absent == []


def test_only_a_topic_that_was_named_must_be_readable(monkeypatch):
    """A broker answers this for whatever it has not allowed, there or not."""
    refused = {MIRRORED: TopicAuthorizationFailed.code}
    captured_of(monkeypatch, {"agg": {}}, config(clusters=RENAMED), refused)
    named = config(clusters={"agg": {**RENAMED["agg"], "events": MIRRORED}})
    with pytest.raises(ClusterUnreachable, match=f"{MIRRORED} cannot be read"):
        captured_of(monkeypatch, {"agg": {}}, named, refused)


def test_names_of_events_topics_are_checked():
    with pytest.raises(ConfigError, match=r"clusters\.agg\.events"):
        config(clusters={"agg": {"events": []}})
