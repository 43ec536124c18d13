from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from millrace.mirror.topics.routes import (
    Answer,
    Feed,
    KnownRoutes,
    Loop,
    Naming,
    Origin,
    Route,
    TargetPartition,
    TopicSelector,
    decide,
    find_origins,
    uneven_feeds,
)
from millrace.mirror.topics.routes import find_loop as find_loop_among
from tests import seeds


@pytest.mark.parametrize(
    "topic",
    [
        "__consumer_offsets",
        "__transaction_state",
        "millrace.positions.aggregate",
        "millrace.offsets.aggregate",
        "millrace.control.aggregate",
        "millrace.routes.aggregate",
        "millrace.starts.aggregate",
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
    assert TopicSelector([".*"]).left_out({"millrace.audit": False, "flights": False}) == []


def test_what_is_never_carried_is_left_out_by_name_where_a_pattern_asks_for_it() -> None:
    there = {"flights": False, "_schemas": False, "payments.heartbeats": False, "__consumer_offsets": True}

    def left_out(*include: str, exclude: tuple[str, ...] = ()) -> dict[str, bool]:
        found = TopicSelector(include, exclude).left_out(there)
        assert all(each.reason for each in found)
        return {each.topic: each.is_named for each in found}

    assert left_out(".*") == dict.fromkeys(("__consumer_offsets", "_schemas", "payments.heartbeats"), False)
    assert left_out("flights", r"payments\..*") == {"payments.heartbeats": False}
    # Somebody expects what he names.
    assert left_out(r"payments\.heartbeats", "_schemas") == {"_schemas": True, "payments.heartbeats": True}
    assert left_out("payments.heartbeats") == {"payments.heartbeats": True}
    # Nobody asks for it.
    assert left_out("flights") == left_out(".*", exclude=("_.*", r".*\.heartbeats")) == {}


def test_topic_that_only_the_cluster_calls_internal_is_left_out_too() -> None:
    (found,) = TopicSelector([".*"]).left_out({"wasm_state": True, "flights": False})
    assert (found.topic, found.reason) == ("wasm_state", "the cluster says that it keeps it for itself")


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


def test_partition_offset_shifts_partitions_of_one_source_and_not_the_audits() -> None:
    naming = Naming(partition_offsets={"lhr": 8})
    assert naming.target_partition("ewr", "flights", 3) == TargetPartition("flights", 3)
    assert naming.target_partition("lhr", "flights", 3) == TargetPartition("flights", 11)
    assert naming.target_partition("lhr", "millrace.audit", 0) == TargetPartition("millrace.audit", 0)


def test_rename_of_one_source_wins_over_rename_of_all() -> None:
    naming = Naming("{cluster}.{topic}", {"flights": "departures", "lhr/flights": "arrivals"})
    assert naming.target_topic("ewr", "flights") == "departures"
    assert naming.target_topic("lhr", "flights") == "arrivals"
    assert naming.target_topic("lhr", "orders") == "lhr.orders"


def test_name_of_a_copy_tells_its_original() -> None:
    naming = Naming("{cluster}.{topic}", {"agg.own": "mine", "lhr/agg.here": "mine"})
    assert naming.original("ewr", "agg.flights", "agg") == "flights"
    assert naming.original("ewr", "agg.ewr.flights", "agg") == "ewr.flights"
    assert naming.original("ewr", "agg.", "agg") is None
    assert naming.original("ewr", "aggXflights", "agg") is None
    assert naming.original("ewr", "lga.flights", "agg") is None
    # Whoever names it knows what it is.
    assert naming.original("ewr", "agg.own", "agg") is None
    assert naming.original("lhr", "agg.here", "agg") is None
    assert naming.original("ewr", "agg.here", "agg") == "here"
    assert Naming("from-{cluster}_{topic}_copy").original("ewr", "from-agg_flights_copy", "agg") == "flights"
    assert Naming().original("ewr", "agg.flights", "agg") is None


# --- sources that share a topic ------------------------------------------------------------------


def test_sources_with_different_partition_counts_ask_for_a_rule() -> None:
    sentence = uneven_feeds("flights", [Feed("ewr", "flights", 4), Feed("lhr", "flights", 2)])
    assert sentence is not None
    assert "flights gets 4 partitions" in sentence
    assert "ewr to 0-3, lhr to 0-1" in sentence
    assert "`partition_counts: widest`" in sentence
    assert "`partition_offset`" in sentence


@pytest.mark.parametrize(
    "feeds",
    [
        [Feed("ewr", "flights", 4)],
        [Feed("ewr", "flights", 4), Feed("lhr", "flights", 4)],
        [Feed("ewr", "flights", 4), Feed("lhr", "flights", 2, 4)],
        [Feed("ewr", "flights", 4), Feed("lhr", "flights", 0)],
    ],
)
def test_sources_that_share_all_or_no_partitions_need_no_rule(feeds: list[Feed]) -> None:
    assert uneven_feeds("flights", feeds) is None


def test_one_partition_is_no_range() -> None:
    sentence = uneven_feeds("flights", [Feed("ewr", "flights", 4), Feed("lhr", "flights", 1, 2)])
    assert sentence is not None and "(ewr to 0-3, lhr to 2)" in sentence


def test_source_that_grew_into_the_others_partitions_is_seen() -> None:
    sentence = uneven_feeds("flights", [Feed("ewr", "flights", 9), Feed("lhr", "flights", 8, 8)])
    assert sentence is not None
    assert "ewr to 0-8, lhr to 8-15" in sentence


# --- loops ---------------------------------------------------------------------------------------


def route(source: str, target: str, topic: str = "flights", to: str | None = None, **more: object) -> Route:
    return Route(source, topic, target, to or topic, **{"mirror": f"into-{target}", **more})  # type: ignore[arg-type]


def find_loop(way: Route, others: list[Route]) -> Loop | None:
    return find_loop_among(way, KnownRoutes(others))


def test_source_that_is_the_target_is_a_loop_under_any_name() -> None:
    assert find_loop(route("A", "A"), []) is not None
    assert find_loop(route("A", "A", to="copy"), []) is not None


def test_two_mirrors_against_each_other_are_one_loop() -> None:
    there, back = route("A", "B"), route("B", "A")
    loop = find_loop(back, [there])
    assert loop is not None
    assert loop.way == (there,)
    assert (
        loop.describe({"A": "ewr", "B": "agg"}) == "ewr/flights -> agg/flights (mirror into-B) -> ewr/flights"
    )


def test_long_way_round_is_found_and_starts_at_the_target() -> None:
    routes = [route(str(number), str((number + 1) % 5)) for number in range(5)]
    loop = find_loop(routes[4], routes[:4])
    assert loop is not None
    assert [each.source_cluster_id for each in loop.way] == ["0", "1", "2", "3"]


def test_ring_whose_beginning_is_only_known_from_hearsay_is_found() -> None:
    # C reads from B and sees there nothing of A -> B but what B -> C told.
    b_to_c = route("B", "C", via=(Origin("A", (5, "B", "into-B")),), since_ms=6)
    loop = find_loop(route("C", "A", since_ms=7), [b_to_c])
    assert loop is not None
    assert loop.origin == Origin("A", (5, "B", "into-B"))
    assert loop.describe({"A": "agg"}) == "agg -> … -> C/flights (mirror into-C) -> agg/flights"


def test_local_and_aggregate_clusters_of_two_datacenters_are_no_loop() -> None:
    routes = [
        route(source, aggregate)
        for source in ("east-local", "west-local")
        for aggregate in ("east-aggregate", "west-aggregate")
    ]
    assert [find_loop(each, [other for other in routes if other != each]) for each in routes] == [None] * 4


def test_prefixed_names_break_a_loop_only_while_the_prefixed_topic_stays() -> None:
    to_b = route("A", "B", to="A.flights")
    assert find_loop(route("B", "A", to="B.flights"), [to_b]) is None
    # A record of A would come home as B.A.flights, and go out again as A.B.A.flights.
    assert find_loop(route("B", "A", topic="A.flights", to="B.A.flights"), [to_b]) is not None


def test_youngest_route_gives_way_and_exactly_one_does() -> None:
    there, back = route("A", "B", since_ms=1), route("B", "A", since_ms=2)
    first, second = find_loop(there, [back]), find_loop(back, [there])
    assert first is not None
    assert second is not None
    assert (first.is_youngest, second.is_youngest) == (False, True)
    same = [route("A", "B", since_ms=1), route("B", "A", since_ms=1)]
    loops = [find_loop(same[0], same[1:]), find_loop(same[1], same[:1])]
    assert [loop.is_youngest for loop in loops if loop is not None].count(True) == 1


def test_newcomer_gives_way_although_its_clock_is_behind() -> None:
    new, old = route("B", "A", since_ms=1), KnownRoutes([route("A", "B", since_ms=1_000)])
    assert decide(new, None, old)[0] is Answer.GIVE_WAY
    assert decide(new, new, old)[0] is Answer.GO_ON


def test_who_carries_pays_no_heed_to_proposals_and_who_proposes_does() -> None:
    mine = route("A", "B", since_ms=5)
    proposal = replace(mine, is_proposed=True)
    older, younger = (KnownRoutes([route("B", "A", since_ms=age, is_proposed=True)]) for age in (1, 1_000))
    carrier = KnownRoutes([route("B", "A", since_ms=1_000)])
    assert [decide(mine, mine, known)[0] for known in (older, younger)] == [Answer.GO_ON] * 2
    assert decide(mine, None, younger)[0] is Answer.GIVE_WAY
    assert decide(mine, proposal, older)[0] is Answer.GIVE_WAY
    assert decide(mine, proposal, younger)[0] is Answer.WAIT
    assert decide(mine, proposal, carrier)[0] is Answer.GIVE_WAY  # the clock says otherwise
    assert decide(mine, proposal, KnownRoutes())[0] is Answer.GO_ON


def mirrors_against_each_other(random: Random) -> tuple[int, list[bool]]:
    """Two mirrors whose steps (read, propose, read, settle, again) come in any order and whose clocks differ:
    how many carried at once at most, and who carries in the end."""
    own = [route("A", "B", since_ms=random.randrange(3)), route("B", "A", since_ms=random.randrange(3))]
    told: list[Route | None] = [None, None]
    carrying = [False, False]
    most = 0

    def mirror(me: int) -> Iterator[None]:
        def seen() -> KnownRoutes:
            other = told[1 - me]
            return KnownRoutes([other] if other is not None else [])

        while True:
            others = seen()
            yield
            if told[me] is None and decide(own[me], None, others)[0] is Answer.GO_ON:
                told[me] = replace(own[me], is_proposed=True)
                yield
                others = seen()
                yield
            answer = decide(own[me], told[me], others)[0]
            carrying[me] = carrying[me] and answer is Answer.GO_ON
            if told[me] is not None and answer is not Answer.WAIT:
                told[me] = own[me] if answer is Answer.GO_ON else None
            yield
            carrying[me] = answer is Answer.GO_ON and told[me] is not None
            yield

    steps = [mirror(0), mirror(1)]
    for _ in range(random.randrange(30)):
        next(steps[random.randrange(2)])
        most = max(most, sum(carrying))
    for _ in range(40):
        for each in steps:
            next(each)
            most = max(most, sum(carrying))
    return most, carrying


def test_of_two_mirrors_in_any_order_of_steps_exactly_one_carries() -> None:
    random = Random(seeds.given())
    outcomes = [mirrors_against_each_other(random) for _ in range(3_000)]
    assert {most for most, _ in outcomes} == {1}
    assert {sum(carrying) for _, carrying in outcomes} == {1}


def test_in_a_ring_known_from_hearsay_the_youngest_gives_way() -> None:
    ages = {"B": 5, "C": 6, "A": 7}
    b_to_c = route("B", "C", since_ms=ages["C"], via=(Origin("A", (ages["B"], "B", "into-B")),))
    c_to_a = route("C", "A", since_ms=ages["A"], via=(Origin("B", (ages["C"], "C", "into-C")),))
    youngest, oldest = find_loop(c_to_a, [b_to_c]), find_loop(route("A", "B", since_ms=ages["B"]), [c_to_a])
    assert youngest is not None
    assert oldest is not None
    assert youngest.is_youngest
    assert not oldest.is_youngest
    # Younger than the way it sees, older than what is further up.
    a_to_b = route("A", "B", since_ms=ages["B"], via=(Origin("C", (ages["A"], "A", "into-A")),))
    middle = find_loop(route("B", "C", since_ms=ages["C"]), [a_to_b])
    assert middle is not None
    assert not middle.is_youngest


def test_loop_of_others_ends_the_search() -> None:
    assert find_loop(route("B", "C"), [route("A", "B"), route("B", "A")]) is None


def test_origins_have_the_shortest_way() -> None:
    routes = [route("A", "C"), route("A", "B"), route("B", "C")]
    found = find_origins("C", "flights", KnownRoutes(routes))
    assert {cluster: len(way) for cluster, (way, _) in found.items()} == {"A": 1, "B": 1}
    assert find_origins("C", "orders", KnownRoutes(routes)) == {}
