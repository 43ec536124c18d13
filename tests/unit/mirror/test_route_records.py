from __future__ import annotations

import itertools
import json
from dataclasses import replace
from uuid import uuid4

from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.topics.route_records import (
    WITHDRAWN,
    encode_key,
    encode_proposal_key,
    encode_value,
    known_origins,
    read_routes,
    routes_of_positions,
)
from millrace.mirror.topics.routes import KnownRoutes, Origin, Route, SourcePartition

ROUTE = Route("A", "flights", "B", "ewr.flights", "aggregate", 17, (Origin("Z", (3, "A", "up")),))


def records(*routes: tuple[str, Route | None]) -> list[tuple[bytes | None, bytes | None]]:
    return [
        (encode_key("ewr", topic), None if route is None else encode_value(route)) for topic, route in routes
    ]


def test_route_is_read_as_it_was_told() -> None:
    told = read_routes(records(("flights", ROUTE)), mirror="aggregate", cluster_id="B")
    assert told == {("ewr", "flights"): ROUTE}


def test_proposal_is_told_apart_and_older_readers_take_it_for_a_route() -> None:
    proposal = replace(ROUTE, is_proposed=True, proposed_at_ms=7)
    told = read_routes(records(("flights", proposal)), mirror="aggregate", cluster_id="B")
    assert told == {("ewr", "flights"): proposal}
    assert json.loads(encode_value(proposal)) == json.loads(encode_value(ROUTE)) | {
        "proposed": True,
        "proposed_at_ms": 7,
    }


def test_newest_record_counts_and_a_tombstone_ends_a_route() -> None:
    newer = Route("A", "flights", "B", "flights", "aggregate", 18)
    told = read_routes(records(("flights", ROUTE), ("flights", newer)), mirror="aggregate", cluster_id="B")
    assert told == {("ewr", "flights"): newer}
    assert read_routes(records(("flights", ROUTE), ("flights", None)), mirror="x", cluster_id="B") == {}


def test_what_is_not_understood_is_passed_over_and_replaces_what_was_before() -> None:
    later = encode_value(ROUTE).replace(b'"version":1', b'"version":2')
    read = read_routes(
        [
            (b"nonsense", b"{}"),
            (None, None),
            *records(("flights", ROUTE), ("orders", ROUTE)),
            (encode_key("ewr", "flights"), later),
            (encode_key("ewr", "orders"), b'{"version":1,"via":3}'),
            *(
                (encode_key("ewr", "via"), b'{"version":1,"via":[%s]}' % via)
                for via in (b"[]", b'["A",1e999]')
            ),
        ],
        mirror="aggregate",
        cluster_id="B",
    )
    assert read == {}


def test_positions_alone_tell_of_routes_by_the_sources_name() -> None:
    positions = Positions()
    positions.known[SourcePartition("ewr", "flights", 3)] = Position(9, "A", uuid4(), 0, 1)
    assert routes_of_positions(positions, mirror="old", cluster_id="B") == {
        ("ewr", "flights"): Route("A", "flights", "B", "flights", "old", 0)
    }


def test_hearsay_carries_the_youngest_age_of_the_way() -> None:
    own = Route("B", "flights", "C", "flights", "mine", 30)
    up = Route("A", "flights", "B", "flights", "up", 20, (Origin("Z", (25, "A", "far")),))
    assert known_origins(own, KnownRoutes([up])) == (
        Origin("A", (20, "B", "up")),
        Origin("Z", (25, "A", "far")),
    )


def test_proposal_never_hides_what_is_carried_and_is_taken_back_alone() -> None:
    """In either order, and also when compaction has kept only the newest record of each key."""
    proposal = replace(ROUTE, is_proposed=True, proposed_at_ms=7, proposer="9f-1")
    other = replace(proposal, proposer="3c-1", is_claimed=True)
    carried = (encode_key("ewr", "flights"), encode_value(ROUTE))
    proposed = (encode_proposal_key("ewr", "flights", "9f-1"), encode_value(proposal))
    beside = (encode_proposal_key("ewr", "flights", "3c-1"), encode_value(other))
    expected = {
        ("ewr", "flights"): ROUTE,
        ("ewr", "flights", "9f-1"): proposal,
        ("ewr", "flights", "3c-1"): other,
    }
    for log in itertools.permutations([carried, proposed, beside]):
        assert read_routes(log, mirror="aggregate", cluster_id="B") == expected
        for end in (None, WITHDRAWN):
            told = read_routes([*log, (proposed[0], end)], mirror="aggregate", cluster_id="B")
            gone = told.pop(("ewr", "flights", "9f-1"), None)
            assert gone is None if end is None else gone is not None and gone.is_withdrawn
            assert told == {key: route for key, route in expected.items() if key[2:] != ("9f-1",)}
    alone = read_routes([carried, proposed, (carried[0], None)], mirror="aggregate", cluster_id="B")
    assert alone == {("ewr", "flights", "9f-1"): proposal}


def test_what_is_withdrawn_counts_for_nothing_and_older_readers_find_no_route_in_it() -> None:
    withdrawn = replace(ROUTE, is_proposed=True, proposer="9f-1", is_withdrawn=True)
    assert encode_value(withdrawn) == WITHDRAWN
    assert KnownRoutes([withdrawn]).into("B", "ewr.flights") == ()
    assert "cluster_id" not in json.loads(WITHDRAWN), "what they cannot read they pass over"


def test_proposals_of_older_versions_are_read_as_before_and_they_can_read_ours() -> None:
    proposal = replace(ROUTE, is_proposed=True, proposed_at_ms=7)
    old = b'{"proposal":["ewr","flights"]}'
    assert encode_proposal_key("ewr", "flights") == old
    told = read_routes([(old, encode_value(proposal))], mirror="aggregate", cluster_id="B")
    assert told == {("ewr", "flights", ""): proposal}
    # They look at these two fields of a key and of a value, and at nothing beside them.
    assert json.loads(encode_proposal_key("ewr", "flights", "9f-1"))["proposal"] == ["ewr", "flights"]
    claim = replace(proposal, proposer="9f-1", is_claimed=True)
    assert json.loads(encode_value(claim)) == json.loads(encode_value(proposal)) | {"claimed": True}
