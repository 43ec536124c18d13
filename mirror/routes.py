"""Which source topic goes where: selection, naming and the loop guard. Pure.

Called by `topics` (discovery), `assignment` and `check`. A *route* is one edge from a topic of a source
cluster to a topic of the target cluster; partitions keep their number.

Invariants:
- an internal topic never has a route, whatever the include patterns say; `millrace.audit` is not
  internal: the events of the producers travel with their records;
- a pattern matches whole names (`flights` does not select `flights.tmp`);
- a set of routes that could bring a record back to a topic it came from is refused, never filtered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

AUDIT_TOPIC = "millrace.audit"
POSITIONS_TOPIC_PREFIX = "millrace.positions."

# Topics that a cluster (ours or a peer's software) keeps for itself. Carrying them would either break the
# target (`__consumer_offsets`) or make one mirror follow the book-keeping of another.
INTERNAL_TOPICS = (
    re.compile(r"__.*"),  # __consumer_offsets, __transaction_state, __cluster_metadata, __share_group_state
    re.compile(r"millrace\.positions\..*"),
    re.compile(r"millrace\.offsets\..*"),
    re.compile(r"heartbeats|.*\.heartbeats"),  # MirrorMaker 2
    re.compile(r"mm2-.*\.internal|.*\.checkpoints\.internal|mm2-offset-syncs\..*"),  # MirrorMaker 2
    re.compile(r"connect-(configs|offsets|status)"),
    re.compile(r"_schemas|_confluent.*|_redpanda.*"),
)


@dataclass(frozen=True, slots=True, order=True)
class SourcePartition:
    """One partition of one source cluster: the unit of assignment, of order and of position."""

    source: str
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.source}/{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, order=True)
class TargetPartition:
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def is_internal(topic: str) -> bool:
    return any(pattern.fullmatch(topic) for pattern in INTERNAL_TOPICS)


def positions_topic(mirror: str) -> str:
    return f"{POSITIONS_TOPIC_PREFIX}{mirror}"


class TopicSelector:
    """Include and exclude patterns of one source, as regular expressions over whole topic names."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str] = ()) -> None:
        self._include = [re.compile(pattern) for pattern in include]
        self._exclude = [re.compile(pattern) for pattern in exclude]

    def selects(self, topic: str) -> bool:
        if is_internal(topic):
            return False
        if not any(pattern.fullmatch(topic) for pattern in self._include):
            return False
        return not any(pattern.fullmatch(topic) for pattern in self._exclude)


@dataclass(frozen=True)
class Naming:
    """How a source topic is called on the target.

    `pattern` may hold `{cluster}` and must hold `{topic}`; `rename` wins over it. The audit topic keeps its
    name under every rule: its events name their topic themselves.
    """

    pattern: str = "{topic}"
    rename: Mapping[str, str] | None = None

    @property
    def is_identity(self) -> bool:
        return self.pattern == "{topic}" and not self.rename

    def target_topic(self, source: str, topic: str) -> str:
        if topic == AUDIT_TOPIC:
            return topic
        if self.rename and topic in self.rename:
            return self.rename[topic]
        return self.pattern.replace("{cluster}", source).replace("{topic}", topic)


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """One edge of the flow between clusters. Clusters are named by their cluster id, not by their alias:
    two names for one cluster are exactly how loops come about."""

    source_cluster_id: str
    source_topic: str
    target_cluster_id: str
    target_topic: str


def find_loops(routes: Iterable[Route]) -> list[list[tuple[str, str]]]:
    """Every way along the routes from a (cluster id, topic) back to itself, each once.

    Routes of other mirrors belong in `routes` too, as far as they are known: two mirrors that each look
    innocent make a loop together. Deterministic: sorted input, sorted output.
    """
    following: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for route in routes:
        start = (route.source_cluster_id, route.source_topic)
        following.setdefault(start, set()).add((route.target_cluster_id, route.target_topic))
    loops: list[list[tuple[str, str]]] = []
    reported: set[frozenset[tuple[str, str]]] = set()
    for start in sorted(following):
        way = _way_back(start, following)
        if way is not None and frozenset(way) not in reported:
            reported.add(frozenset(way))
            loops.append(way)
    return loops


def _way_back(
    start: tuple[str, str], following: Mapping[tuple[str, str], set[tuple[str, str]]]
) -> list[tuple[str, str]] | None:
    """The shortest way from `start` to itself, breadth first, or None."""
    came_from: dict[tuple[str, str], tuple[str, str]] = {}
    frontier = [start]
    while frontier:
        reached: list[tuple[str, str]] = []
        for place in frontier:
            for neighbour in sorted(following.get(place, ())):
                if neighbour == start:
                    way = [place]
                    while way[-1] != start:
                        way.append(came_from[way[-1]])
                    return way[::-1]
                if neighbour not in came_from:
                    came_from[neighbour] = place
                    reached.append(neighbour)
        frontier = reached
    return None
