"""Which source topic goes where: selection, naming and the rule about loops. Pure.

Called by `worker` (discovery), `topics`, `route_guard` and `check`. A *route* is one edge from a topic of a
source cluster to a topic of the target cluster; partitions keep their number, or are shifted by one number
for each source.

Invariants:
- an internal topic (`internal_topics`) never has a route, whatever the include patterns say;
  `millrace.audit` is not internal: the events of the producers travel with their records;
- a pattern matches whole names (`flights` does not select `flights.tmp`);
- a route that could bring a record back to a cluster that it came from is refused, never filtered.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.mirror.topics.internal_topics import MARKED, LeftOut, why_internal


class SourcePartition(NamedTuple):
    """One partition of one source cluster: the unit of assignment, of order and of position."""

    source: str
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.source}/{self.topic}-{self.partition}"


class TargetPartition(NamedTuple):
    """Named tuples, as these two are keys of what is looked up for every batch: their hash is compiled."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class TopicSelector:
    """Include and exclude patterns of one source, as regular expressions over whole topic names."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str] = ()) -> None:
        self._include = [re.compile(pattern) for pattern in include]
        self._exclude = [re.compile(pattern) for pattern in exclude]

    def selects(self, topic: str) -> bool:
        return why_internal(topic) is None and self._matches(topic)

    def left_out(self, topics: Mapping[str, bool]) -> list[LeftOut]:
        """The topics that the patterns ask for and that are never carried, by name. `topics`: all that there
        are, and whether the cluster says that it keeps them for itself."""
        reasons = {
            topic: why_internal(topic) or (MARKED if is_marked else None)
            for topic, is_marked in topics.items()
        }
        return [
            LeftOut(topic, reason, self._names(topic))
            for topic, reason in sorted(reasons.items())
            if reason is not None and self._matches(topic)
        ]

    def _matches(self, topic: str) -> bool:
        if not any(pattern.fullmatch(topic) for pattern in self._include):
            return False
        return not any(pattern.fullmatch(topic) for pattern in self._exclude)

    def _names(self, topic: str) -> bool:
        """Whether a pattern is the very name, with or without a backslash before its dots."""
        return any(pattern.pattern.replace("\\", "") == topic for pattern in self._include)


@dataclass(frozen=True)
class Naming:
    """How a source partition is called on the target.

    `pattern` may hold `{cluster}` and must hold `{topic}`; `rename` wins over it, and in it `cluster/topic`
    over `topic`. `partition_offsets` are added to partition numbers by source cluster. The audit topic keeps
    its name and partitions under every rule: its events name their topic themselves, and a heartbeat must not
    overtake a count.
    """

    pattern: str = "{topic}"
    rename: Mapping[str, str] | None = None
    partition_offsets: Mapping[str, int] | None = None

    def target_topic(self, source: str, topic: str) -> str:
        if topic == AUDIT_TOPIC:
            return topic
        rename = self.rename or {}
        renamed = rename.get(f"{source}/{topic}", rename.get(topic))
        if renamed is not None:
            return renamed
        return self.pattern.replace("{cluster}", source).replace("{topic}", topic)

    def names_cluster(self, source: str, topic: str) -> bool:
        """Whether the name at the target says which source it is of, so that no other's may be the same. One
        that `rename` gives is as it is wanted."""
        rename = self.rename or {}
        is_renamed = topic in rename or f"{source}/{topic}" in rename
        return "{cluster}" in self.pattern and topic != AUDIT_TOPIC and not is_renamed

    def original(self, source: str, topic: str, cluster: str) -> str | None:
        """The topic of another `cluster` that a mirror with this pattern would call `topic` at the source;
        None where the pattern names no cluster, the name is not of that kind, or `rename` names the topic."""
        rename = self.rename or {}
        if "{cluster}" not in self.pattern or topic in rename or f"{source}/{topic}" in rename:
            return None
        parts = re.split(r"(\{cluster\}|\{topic\})", self.pattern)
        known = {"{cluster}": re.escape(cluster), "{topic}": "(.+)"}
        found = re.fullmatch("".join(known.get(part, re.escape(part)) for part in parts), topic)
        return found.group(1) if found is not None else None

    def partition_offset(self, source: str, topic: str) -> int:
        return 0 if topic == AUDIT_TOPIC else (self.partition_offsets or {}).get(source, 0)

    def target_partition(self, source: str, topic: str, partition: int) -> TargetPartition:
        """Where the records of a source partition go."""
        return TargetPartition(
            self.target_topic(source, topic), partition + self.partition_offset(source, topic)
        )


@dataclass(frozen=True, slots=True)
class Feed:
    """What one source topic puts into a target topic: partitions `partition_offset` and following."""

    source: str
    topic: str
    partitions: int
    partition_offset: int = 0

    @property
    def target_partitions(self) -> range:
        return range(self.partition_offset, self.partition_offset + self.partitions)


def uneven_feeds(target_topic: str, feeds: Iterable[Feed]) -> str | None:
    """What happens where sources share partitions of a topic but not all of them, and which rules there are;
    None where they share all or none. Keys are the reason: a producer picks the partition by their number."""
    by_name = sorted(feeds, key=lambda feed: (feed.source, feed.topic))
    uneven = any(
        one.target_partitions != other.target_partitions
        and max(one.partition_offset, other.partition_offset)
        < min(one.target_partitions.stop, other.target_partitions.stop)
        for one, other in itertools.combinations(by_name, 2)
    )
    if not uneven:
        return None
    width = max(feed.target_partitions.stop for feed in by_name)
    shares = ", ".join(
        f"{feed.source} to {_numbers(feed.target_partitions)}" for feed in by_name if feed.partitions
    )
    return (
        f"{target_topic} gets {width} partitions, and its sources write different ones ({shares}), so one "
        "key lies in another partition for each source. Choose: `partition_counts: widest` when that is "
        "wanted, or a `partition_offset` for a source so that they share none"
    )


def _numbers(partitions: range) -> str:
    """`0-3`, or `0` where there is one."""
    return f"{partitions[0]}" if len(partitions) == 1 else f"{partitions[0]}-{partitions[-1]}"


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """A cluster that records come from by ways that are only known from hearsay. `youngest` is the age of
    the youngest route on the way, as `Route.age`."""

    cluster_id: str
    youngest: tuple[int, str, str]


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """One edge of the flow between clusters. Clusters are named by their cluster id, not by their alias:
    two names for one cluster are exactly how loops come about.

    `mirror` and `since_ms` say who carries it since when; `via` what that mirror knows of clusters further
    up. A proposed route carries nothing yet: its mirror still looks whether others have proposed against it.
    `proposer` says which process of the mirror proposes it, and for which time (`proposals`); with
    `proposed_at_ms` it tells one proposal from the next, and is compared with nothing else. A claimed one has
    been looked at and won: its process is about to tell it as carried. A withdrawn one is none any more.
    """

    source_cluster_id: str
    source_topic: str
    target_cluster_id: str
    target_topic: str
    mirror: str = ""
    since_ms: int = 0
    via: tuple[Origin, ...] = ()
    is_proposed: bool = False
    proposed_at_ms: int = 0
    proposer: str = ""
    is_claimed: bool = False
    is_withdrawn: bool = False

    @property
    def age(self) -> tuple[int, str, str]:
        """Orders routes by age, the youngest last; the same on every worker."""
        return (self.since_ms, self.target_cluster_id, self.mirror)


@dataclass(frozen=True, slots=True)
class Loop:
    """A route whose records would come back to the cluster that they go to.

    `way` are the known routes from the target back to the route's source, in the order of the flow; empty
    when source and target are one cluster. `origin` is set where its beginning is hearsay.
    """

    route: Route
    way: tuple[Route, ...] = ()
    origin: Origin | None = None

    @property
    def is_youngest(self) -> bool:
        """Whether the route is the youngest of the loop: of those that see each other exactly one is."""
        others = [route.age for route in self.way] + ([self.origin.youngest] if self.origin else [])
        return not others or self.route.age >= max(others)

    def describe(self, names: Mapping[str, str]) -> str:
        """`agg/flights -> ewr/flights (mirror back) -> agg/flights`; `names` are clusters by their ids."""

        def place(cluster: str, topic: str) -> str:
            return f"{names.get(cluster, cluster)}/{topic}"

        target = place(self.route.target_cluster_id, self.route.target_topic)
        if not self.way and self.origin is None:
            return f"{place(self.route.source_cluster_id, self.route.source_topic)} -> {target}"
        steps = []
        if self.origin is not None:
            steps.append(f"{names.get(self.origin.cluster_id, self.origin.cluster_id)} -> …")
        elif self.way:
            steps.append(place(self.way[0].source_cluster_id, self.way[0].source_topic))
        for route in self.way:
            steps.append(f"{place(route.target_cluster_id, route.target_topic)} (mirror {route.mirror})")
        return " -> ".join([*steps, target])


class KnownRoutes:
    """Routes by where they lead to, for questions about many topics. What is withdrawn is left out."""

    def __init__(self, routes: Iterable[Route] = ()) -> None:
        self._routes = frozenset(route for route in routes if not route.is_withdrawn)
        self._into: dict[tuple[str, str], list[Route]] = {}
        for route in sorted(self._routes):
            self._into.setdefault((route.target_cluster_id, route.target_topic), []).append(route)

    @property
    def carried(self) -> KnownRoutes:
        """Without what is only proposed."""
        if not any(route.is_proposed for route in self._routes):
            return self
        return KnownRoutes(route for route in self._routes if not route.is_proposed)

    @property
    def firm(self) -> KnownRoutes:
        """What is carried, and what is claimed: who has not begun yet gives way to both."""
        if not any(route.is_proposed and not route.is_claimed for route in self._routes):
            return self
        return KnownRoutes(route for route in self._routes if route.is_claimed or not route.is_proposed)

    def into(self, cluster_id: str, topic: str) -> Sequence[Route]:
        return self._into.get((cluster_id, topic), ())


def find_origins(
    cluster_id: str, topic: str, known: KnownRoutes
) -> dict[str, tuple[tuple[Route, ...], Origin | None]]:
    """Every cluster that records of a topic may come from, by the routes known: cluster id -> the shortest
    way, in the order of the flow, and the hearsay at its beginning. Deterministic."""
    found: dict[str, tuple[tuple[Route, ...], Origin | None]] = {}
    seen = {(cluster_id, topic)}
    frontier: list[tuple[tuple[str, str], tuple[Route, ...]]] = [((cluster_id, topic), ())]
    while frontier:
        reached: list[tuple[tuple[str, str], tuple[Route, ...]]] = []
        for place, way in frontier:
            for route in known.into(*place):
                longer = (route, *way)
                found.setdefault(route.source_cluster_id, (longer, None))
                for origin in route.via:
                    found.setdefault(origin.cluster_id, (longer, origin))
                start = (route.source_cluster_id, route.source_topic)
                if start not in seen:
                    seen.add(start)
                    reached.append((start, longer))
        frontier = reached
    return found


def find_loop(route: Route, known: KnownRoutes) -> Loop | None:
    """Whether records that `route` brings to its target have been there before, in whatever topic.

    A record that comes back to a cluster under another name goes round as well, with a longer name each time.
    Routes of other mirrors belong in `known`, as far as they are: two mirrors that each look innocent make a
    loop together. That two mirrors carry the same source to two targets is none.
    """
    if route.source_cluster_id == route.target_cluster_id:
        return Loop(route)
    found = find_origins(route.source_cluster_id, route.source_topic, known).get(route.target_cluster_id)
    return None if found is None else Loop(route, found[0], found[1])


class Answer(Enum):
    """What a mirror does with a route that it wants to carry."""

    GO_ON = "go on"
    """Propose it when that has not been done, carry it when it has."""
    WAIT = "wait"
    """It stays proposed: those against it are younger and will give way, or carry and be seen to."""
    GIVE_WAY = "give way"


def decide(route: Route, told: Route | None, known: KnownRoutes) -> tuple[Answer, Loop | None]:
    """Whether a route may be carried, given what its mirror has `told` of it and what others tell. `told` is
    the route as carried, by whatever process of the mirror, or else this process's own proposal of it.

    Two mirrors that begin against each other at the same moment must not both carry, not even until they
    look again: their records would go round, once each time. So a route is proposed first, others' routes
    are read after that, and it is carried only when none of them closes a loop: of two proposals at least
    one is seen by the other. Who sees the other and is younger gives way; the older waits until the other is
    gone, or has claimed the route: it will carry. Who carries already pays no heed to proposals and claims:
    they came to nothing, or their mirror would not have begun. Where routes are carried that make a loop all
    the same (a mirror's rules were changed, hearsay came late), the youngest gives way. What was proposed and
    not settled for long is not in `known`, and is not in `told` any more (`proposals`).

    Clocks of two datacenters differ, so a route that was not told yet is the newcomer, whatever they say.
    """
    if told is not None and not told.is_proposed:
        loop = find_loop(route, known.carried)
        return (Answer.GIVE_WAY if loop is not None and loop.is_youngest else Answer.GO_ON), loop
    loop = find_loop(route, known)
    if loop is None:
        return Answer.GO_ON, None
    if told is None:
        return Answer.GIVE_WAY, loop
    firm = find_loop(route, known.firm)
    if firm is not None and firm.origin is None:
        return Answer.GIVE_WAY, firm
    return (Answer.GIVE_WAY if loop.is_youngest else Answer.WAIT), loop
