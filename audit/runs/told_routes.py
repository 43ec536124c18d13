"""Where a mirror carries a topic to: what it tells in `millrace.routes.<mirror>` on its target. Pure.

A position says how far a mirror had come in a source partition, not into which topic it carried the records.
So a position counts for an audited topic only when every target that was ever told for its source topic is
one of the names under which that topic lies in the aggregate: a mirror that carries it elsewhere proves
nothing about it, and neither does one that changed its target on the way. Format of a record (version 1):

    key    {"source":"ewr","topic":"flights"}
    value  {"version":1,"cluster_id":…,"target_topic":…,…}      null: no longer carried
    key    {"proposal":["ewr","flights"],…}                     nothing is carried by it: not looked at

Called by `capture`.
"""

from __future__ import annotations

from collections.abc import Collection

from millrace.broker.protocol.foreign_json import read_json

VERSION = 1


class ToldRoutes:
    """Every target topic that one mirror told, by (its name of the source, source topic)."""

    def __init__(self) -> None:
        self._targets: dict[tuple[str, str], set[str]] = {}

    def learn(self, key: bytes | None, value: bytes | None) -> None:
        """Take one record, in any order. Raises ValueError, KeyError or TypeError for what is no route.

        A tombstone takes nothing back: what was carried before lies where it was told to lie.
        """
        where = read_json(key or b"")
        if "proposal" in where:
            return
        told = self._targets.setdefault((str(where["source"]), str(where["topic"])), set())
        if value is None:
            return
        route = read_json(value)
        if route["version"] != VERSION:
            raise ValueError(f"version {route['version']}")
        told.add(str(route["target_topic"]))

    def leads_to(self, source: str, topic: str, names: Collection[str]) -> bool:
        """Whether all that the mirror carried of the topic went to one of these names."""
        targets = self._targets.get((source, topic), set())
        return bool(targets) and targets.issubset(names)
