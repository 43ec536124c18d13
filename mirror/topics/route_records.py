"""What a mirror tells other mirrors about its routes: records in a compacted topic of its target. Pure.

Called by `route_guard` and `check`. A mirror that reads from this cluster finds there where the records of a
topic come from, also by ways whose clusters it cannot reach, and refuses to carry them back. The format:

    topic  millrace.routes.<mirror>, one partition, cleanup.policy=compact
    key    {"source":"ewr","topic":"flights"}
    value  {"version":1,"cluster_id":…,"target_topic":…,"since_ms":n,"via":[[id, since_ms, target, mirror]]}
    key    {"proposal":["ewr","flights"],"by":"9f…-3"}
    value  the same with "proposed":true,"proposed_at_ms":n: nothing is carried yet (`routes.decide`)
           with "claimed":true as well: it has won, and is about to be told as carried
           {"version":1,"withdrawn":true}: it counts no longer; a tombstone follows minutes later

A proposal never hides a route that is told as carried, in whatever order they were written. `by` names one
proposal of one process: workers of a mirror that propose at once leave each other's alone, and a name that
was withdrawn, or has been passed over, is never used again, so anybody of the mirror may clear it away.
Proposals of older versions have no `by`, or stand under the key of the route itself, and count as well;
older versions understand the new ones, all of a mirror as one.

`via` are clusters further up, each with the age of the youngest route on the way from it. A tombstone: no
longer carried. Positions tell the same less well: not the name on the target, and nothing of further up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from millrace.broker.protocol.foreign_json import read_json
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.topics.routes import KnownRoutes, Origin, Route, find_origins

VERSION = 1

RouteKey = tuple[str, ...]
"""A source cluster, as its mirror calls it, and a topic of it; of a proposal its proposer too."""

WITHDRAWN = b'{"version":1,"withdrawn":true}'
"""The value of a proposal that counts no longer. Older versions find no route in it, and none is there. It
stays for a while before a tombstone: what reads slowly meets it, also when tombstones are cleaned away."""


def encode_key(source: str, topic: str) -> bytes:
    return json.dumps({"source": source, "topic": topic}, separators=(",", ":")).encode()


def encode_proposal_key(source: str, topic: str, proposer: str = "") -> bytes:
    """A key of its own: a proposal that is written late, or taken back, leaves what is carried alone, and
    what others propose. Without a proposer it is the key of an older version."""
    where: dict[str, object] = {"proposal": [source, topic]}
    if proposer:
        where["by"] = proposer
    return json.dumps(where, separators=(",", ":")).encode()


def encode_value(route: Route) -> bytes:
    if route.is_withdrawn:
        return WITHDRAWN
    value: dict[str, object] = {
        "version": VERSION,
        "cluster_id": route.source_cluster_id,
        "target_topic": route.target_topic,
        "since_ms": route.since_ms,
        "via": [[origin.cluster_id, *origin.youngest] for origin in route.via],
    }
    if route.is_proposed:
        value |= {"proposed": True, "proposed_at_ms": route.proposed_at_ms}
    if route.is_claimed:
        value["claimed"] = True
    return json.dumps(value, separators=(",", ":")).encode()


def read_routes(
    records: Iterable[tuple[bytes | None, bytes | None]], *, mirror: str, cluster_id: str
) -> dict[RouteKey, Route]:
    """The routes that a routes topic on the cluster `cluster_id` tells of, from its records in order: what is
    carried, and each proposal beside it, also those that are withdrawn. What cannot be understood is passed
    over: it only adds to the picture."""
    routes: dict[RouteKey, Route] = {}
    for key, value in records:
        try:
            where = read_json(key or b"")
            name: RouteKey
            if "proposal" in where:
                source, topic = where["proposal"]
                proposer = str(where.get("by", ""))
                name = (str(source), str(topic), proposer)
            else:
                name, proposer = (str(where["source"]), str(where["topic"])), ""
            routes.pop(name, None)
            if value is not None:
                routes[name] = _route(read_json(value), name[1], mirror, cluster_id, proposer)
        except (ValueError, TypeError, LookupError, OverflowError):
            continue
    return routes


def _route(fields: Mapping[str, object], topic: str, mirror: str, cluster_id: str, proposer: str) -> Route:
    if fields["version"] != VERSION:
        raise ValueError(f"a route of version {fields['version']!r}")
    if fields.get("withdrawn") is True:
        return Route(
            "", topic, cluster_id, "", mirror, is_proposed=True, proposer=proposer, is_withdrawn=True
        )
    via = fields["via"]
    if not isinstance(via, list):
        raise ValueError("via is no list")
    origins = tuple(Origin(str(each[0]), (int(each[1]), str(each[2]), str(each[3]))) for each in via)
    since_ms, proposed_at_ms = fields["since_ms"], fields.get("proposed_at_ms", 0)
    if type(since_ms) is not int or type(proposed_at_ms) is not int:
        raise ValueError("since_ms or proposed_at_ms is no number")
    is_proposed = fields.get("proposed") is True
    return Route(
        str(fields["cluster_id"]),
        topic,
        cluster_id,
        str(fields["target_topic"]),
        mirror,
        since_ms,
        origins,
        is_proposed=is_proposed,
        proposed_at_ms=proposed_at_ms if is_proposed else 0,
        proposer=proposer,
        is_claimed=is_proposed and fields.get("claimed") is True,
    )


def routes_of_positions(positions: Positions, *, mirror: str, cluster_id: str) -> dict[RouteKey, Route]:
    """The routes of a mirror that left positions on the cluster `cluster_id` and no routes. Its names on the
    target are not known and taken to be the source's; its routes count as the oldest."""
    return {
        (partition.source, partition.topic): Route(
            position.cluster_id, partition.topic, cluster_id, partition.topic, mirror
        )
        for partition, position in positions.known.items()
    }


def known_origins(route: Route, known: KnownRoutes) -> tuple[Origin, ...]:
    """What a mirror tells of the clusters above its source: `Route.via` of its own route."""
    found = find_origins(route.source_cluster_id, route.source_topic, known)
    origins = []
    for cluster_id, (way, hearsay) in found.items():
        ages = [each.age for each in way] + ([hearsay.youngest] if hearsay else [])
        origins.append(Origin(cluster_id, max(ages)))
    return tuple(sorted(origins))
