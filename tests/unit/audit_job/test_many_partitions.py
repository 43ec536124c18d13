"""What a plan costs for each of many partitions: as much as for each of few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.audit.config import parse_config
from millrace.audit.contract.events import EventLedger
from millrace.audit.keeping.state import Commit
from millrace.audit.runs.capture import Capture, MirrorPosition
from millrace.audit.runs.partition_pins import PartitionPin
from millrace.audit.runs.reading_plan import plan_ranges
from millrace.audit.spark.kafka_options import Subscription
from millrace.audit.spark.pinning import partitions_of
from millrace.broker.client.metadata import NO_TOPIC_ID, ClusterMetadata, TopicMetadata
from millrace.broker.errors import ConfigError

COUNT = 500
CONFIG = parse_config(
    {
        "clusters": {
            "ewr": {"bootstrap": ["h:1"], "tier": "source"},
            "agg": {"bootstrap": ["h:2"], "tier": "aggregate"},
        },
        "topics": ["flights"],
    }
)


class Name(str):
    """One that counts how often any is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.fixture
def comparisons(monkeypatch):
    monkeypatch.setattr(Name, "compared", 0)
    return lambda: Name.compared


def test_no_partitions_plan_looks_at_the_positions_of_all(comparisons):
    captured = Capture(5, EventLedger())
    numbers = range(COUNT)
    captured.pins = [PartitionPin("ewr", "flights", "flights", each, "t1", 0, 10) for each in numbers]
    captured.positions = [
        MirrorPosition("agg", "m", Name("ewr"), "flights", each, 5, "t0" if each == 7 else "t1")
        for each in numbers
    ]
    ranges, unread = plan_ranges(captured, CONFIG, Commit())
    assert sum(each.tail for each in ranges) == COUNT
    assert [(note.partition, note.cause) for note in unread] == [(7, "recreated")]
    assert comparisons() < 50 * COUNT


def there(name: str) -> ClusterMetadata:
    topic = TopicMetadata(name, NO_TOPIC_ID, False, dict.fromkeys(range(COUNT), SimpleNamespace(leader=1)))  # type: ignore[arg-type]
    return ClusterMetadata("id", 1, {}, {name: topic})


def test_a_pattern_is_found_in_names_and_leaves_internal_topics_out():
    topics = [("x.flights", False), ("flights", False), ("__flights", True), ("hotels", False)]
    leaders: Any = {0: SimpleNamespace(leader=1)}
    view = ClusterMetadata(
        "id", 1, {}, {name: TopicMetadata(name, NO_TOPIC_ID, hidden, leaders) for name, hidden in topics}
    )
    wanted = Subscription("subscribePattern", pattern="fl.*s$")
    assert partitions_of(wanted, view, "ewr") == [("flights", 0), ("x.flights", 0)]


def test_named_partitions_are_not_searched_for_among_all(comparisons):
    named = tuple((Name("flights"), each) for each in reversed(range(COUNT)))
    wanted = Subscription("assign", topics=("flights",), partitions=named)
    assert partitions_of(wanted, there("flights"), "ewr") == list(named)
    assert comparisons() < 50 * COUNT


def test_partition_that_is_not_there_is_told_with_those_that_are():
    wanted = Subscription("assign", topics=("flights",), partitions=(("flights", COUNT),))
    with pytest.raises(ConfigError, match=f"flights-{COUNT}.* a partition of it, 0 to {COUNT - 1}"):
        partitions_of(wanted, there("flights"), "ewr")
    every = Subscription("subscribe", topics=("flights",))
    assert partitions_of(every, there("flights"), "ewr") == [("flights", each) for each in range(COUNT)]
