from __future__ import annotations

import pytest

from millrace.mirror.routes import Naming, Route, TopicSelector, find_loops


@pytest.mark.parametrize(
    "topic",
    [
        "__consumer_offsets",
        "__transaction_state",
        "millrace.positions.aggregate",
        "millrace.offsets.aggregate",
        "heartbeats",
        "ewr.heartbeats",
        "mm2-offsets.ewr.internal",
        "ewr.checkpoints.internal",
        "connect-configs",
        "_schemas",
    ],
)
def test_internal_topic_is_never_selected(topic: str) -> None:
    assert not TopicSelector([".*"]).selects(topic)


def test_audit_topic_is_carried() -> None:
    assert TopicSelector([".*"]).selects("millrace.audit")


def test_patterns_match_whole_names() -> None:
    selector = TopicSelector(["flights", r"orders\..*"], [r".*\.tmp"])
    assert selector.selects("flights")
    assert selector.selects("orders.eu")
    assert not selector.selects("flights.tmp")
    assert not selector.selects("myflights")
    assert not selector.selects("orders.tmp")


def test_naming_rules_give_target_names() -> None:
    assert Naming().target_topic("ewr", "flights") == "flights"
    assert Naming("{cluster}.{topic}").target_topic("ewr", "flights") == "ewr.flights"
    renamed = Naming(rename={"flights": "departures"})
    assert renamed.target_topic("ewr", "flights") == "departures"
    assert renamed.target_topic("ewr", "orders") == "orders"


@pytest.mark.parametrize("naming", [Naming(), Naming("{cluster}.{topic}"), Naming(rename={"a": "b"})])
def test_audit_topic_keeps_its_name(naming: Naming) -> None:
    assert naming.target_topic("ewr", "millrace.audit") == "millrace.audit"


def test_route_to_itself_is_a_loop() -> None:
    assert find_loops([Route("A", "flights", "A", "flights")]) == [[("A", "flights")]]


def test_two_mirrors_against_each_other_are_one_loop() -> None:
    routes = [Route("A", "flights", "B", "flights"), Route("B", "flights", "A", "flights")]
    assert find_loops(routes) == [[("A", "flights"), ("B", "flights")]]


def test_long_way_round_is_found() -> None:
    routes = [Route(str(number), "t", str((number + 1) % 5), "t") for number in range(5)]
    assert len(find_loops(routes)) == 1
    assert len(find_loops(routes)[0]) == 5


def test_local_and_aggregate_clusters_of_two_datacenters_are_no_loop() -> None:
    routes = [
        Route(source, "flights", aggregate, "flights")
        for source in ("east-local", "west-local")
        for aggregate in ("east-aggregate", "west-aggregate")
    ]
    assert find_loops(routes) == []


def test_renamed_topic_breaks_a_loop() -> None:
    routes = [Route("A", "flights", "B", "A.flights"), Route("B", "flights", "A", "B.flights")]
    assert find_loops(routes) == []
