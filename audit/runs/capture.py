"""What the driver learns before anything is scanned: events, pinned offsets, the mirrors' positions.

Called by `job`. The order is what makes a missing record a loss and not lag, so it is one function that reads
as the list of its steps:

1. read the offsets that audited groups committed (a group reports before it commits, so that what lies below
   them is told by the events that are read next);
2. read the events of every cluster to their ends, on from where the last run ended, also those that a
   renaming mirror brought from another (`ewr.millrace.audit`): all that is told is one, however often it is
   read (`event_reading`);
3. pin the ends of the source partitions (what the events acknowledge lies below);
4. read the mirrors' positions from the aggregates (what lies below them was acknowledged there), and their
   routes, which say to which topic that was;
5. read the gaps that were told since (a mirror tells a gap before its position passes it), and nothing else
   of the events: what they acknowledge by now may lie above the pinned ends;
6. pin the ends of the aggregate partitions.

With each end it asks in which leader epochs the log was written: one that was shortened since somebody read
it, and has grown again, is told by nothing else (`log_history`).

Nothing is ever taken from a cluster that did not answer: one that cannot be reached raises
ClusterUnreachable, and the job ends without a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from millrace.audit.config import AuditConfig, audited_topic
from millrace.audit.contract.events import EventLedger
from millrace.audit.contract.group_counts import (
    Claim,
    claim_of,
    followed_claims,
    told_by_sessions,
    unanswered,
)
from millrace.audit.keeping.state import Commit, ReadPosition, UnreadNote
from millrace.audit.runs.event_reading import EventsRead, read_events, read_new_gaps
from millrace.audit.runs.partition_pins import PartitionPin, ends_and_epochs, naming, refusal, topic_id_of
from millrace.audit.runs.told_routes import ToldRoutes
from millrace.audit.spark.partition_sizes import bytes_per_offset
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset, fetch_offsets
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import ConfigError, UnreadableRecord
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, decode_key, decode_value
from millrace.broker.protocol.system_topics import POSITIONS_TOPIC_PREFIX, ROUTES_TOPIC_PREFIX

MAX_UNTRUSTED_POSITIONS = 100


@dataclass(frozen=True, slots=True)
class MirrorPosition:
    """How far a mirror had carried one source partition into an aggregate, from the offset on at which it
    `began` (0 where it does not tell). `leader_epoch` is that of the last batch before, -1 where it is not
    told."""

    aggregate: str
    mirror: str
    source: str
    topic: str
    partition: int
    next_offset: int
    topic_id: str
    leader_epoch: int = -1
    began: int = 0


@dataclass(slots=True)
class Capture:
    """All of it. `origins` names the source clusters in which a stream's own events were read, `events` how
    far the events were read, `events_lost` what of them was gone before.

    `source_names` {(mirror, its name of a source): the audit's name}, where the cluster's id told it.
    `carriers` {mirror: aggregates that it brings an audited topic to, under its audited name}; a mirror that
    keeps no positions is not in it. `commits` {(cluster, group): {place: next offset}},
    `gaps_to` {cluster: {partition: offset}} up to where what mirrors tell was read,
    `commit_epochs` the leader epoch that was committed with it (-1 where none was), `claims` what
    members said with their commits that their events tell of (`group_counts`), `answered` what events told
    of those sessions before any was pruned; `gone` {(cluster, place): topic} of topics that a cluster has
    not; `withheld` {(cluster, place): sentence} of those that it does not tell of, whether it has them or
    not (no permission, no leader yet); `cluster_ids` are Kafka's ("" where a cluster has none).
    `silent_sources` are sentences on source clusters whose producers cannot tell anything. `pinned_ms` is
    when the last partition had been pinned: what had vanished by then may have been written up to then.
    `known` {partition's key: position} is how far the run before had read.
    """

    taken_ms: int
    ledger: EventLedger
    origins: dict[str, set[str]] = field(default_factory=dict)
    events: EventsRead = field(default_factory=EventsRead)
    events_lost: list[UnreadNote] = field(default_factory=list)
    gaps_to: dict[str, dict[int, int]] = field(default_factory=dict)
    pins: list[PartitionPin] = field(default_factory=list)
    positions: list[MirrorPosition] = field(default_factory=list)
    untrusted: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    gone: dict[tuple[str, str], str] = field(default_factory=dict)
    withheld: dict[tuple[str, str], str] = field(default_factory=dict)
    silent_sources: list[str] = field(default_factory=list)
    source_names: dict[tuple[str, str], str] = field(default_factory=dict)
    carriers: dict[str, set[str]] = field(default_factory=dict)
    commits: dict[tuple[str, str], dict[tuple[str, str, int], int]] = field(default_factory=dict)
    commit_epochs: dict[tuple[str, str], dict[tuple[str, str, int], int]] = field(default_factory=dict)
    claims: dict[tuple[str, str], Claim] = field(default_factory=dict)
    answered: dict[tuple[str, str], int] = field(default_factory=dict)
    cluster_ids: dict[str, str] = field(default_factory=dict)
    pinned_ms: int = 0
    known: Mapping[str, ReadPosition] = field(default_factory=dict)

    @property
    def told(self) -> Collection[str]:
        """Every stream that an event names which some cluster still has."""
        return self.events.told.keys()

    @property
    def vanished_ms(self) -> int:
        """The latest creation of a record that is pinned or had vanished before it could be."""
        return max(self.taken_ms, self.pinned_ms)


def settle_claims(captured: Capture, before: Commit) -> None:
    """Put the claims that earlier runs kept beside those of the commits, and leave out those that are
    answered by the events that are known now or were before they were pruned. Before anything is pruned."""
    kept = {(group, session): claim for group, session, claim in before.claims}
    told = told_by_sessions(captured.ledger)
    for group, session, count in before.answered:
        told[group, session] = max(count, told.get((group, session), 0))
    known = {each[0]: before.at_ms for each in (*before.claims, *before.answered)}
    captured.claims = followed_claims(captured.claims, kept, known, captured.taken_ms)
    captured.answered = {place: told[place] for place in captured.claims if place in told}
    captured.claims = unanswered(captured.claims, captured.answered)


async def capture(
    config: AuditConfig,
    ledger: EventLedger,
    clock_ms: Callable[[], int],
    before: Commit | None = None,
    known: EventsRead | None = None,
) -> Capture:
    """Look at every cluster, in the order that the module's text gives. `ledger` may hold earlier events, of
    which `known` says how far they reach; `before` is the state of the last run."""
    async with contextlib.AsyncExitStack() as stack:
        clusters = {
            name: await stack.enter_async_context(
                Cluster(name, list(cluster.bootstrap), client_id="millrace-audit", security=cluster.security)
            )
            for name, cluster in config.clusters.items()
        }
        # Taken first: a verdict may only use the time at which the newest event could have been read.
        captured = Capture(clock_ms(), ledger, known={} if before is None else before.offsets)
        metadata = await _describe(clusters)
        check_distinct(config, metadata)
        captured.cluster_ids = {name: each.cluster_id or "" for name, each in metadata.items()}
        for name, groups in config.groups.items():
            for group in groups:
                told = await _committed(config, clusters[name], group.name)
                captured.commits[name, group.name] = {place: each.offset for place, each in told.items()}
                captured.commit_epochs[name, group.name] = {
                    place: each.leader_epoch for place, each in told.items()
                }
                for claim in filter(None, (claim_of(each.metadata) for each in told.values())):
                    place = (group.name, claim[0])
                    other = captured.claims.get(place, Claim(0, 0))
                    captured.claims[place] = Claim(max(claim[1], other.count), other.commits + 1)
        await read_events(captured, config, clusters, known or EventsRead(), before or Commit())
        await _pin(captured, config, clusters, config.sources())
        await _read_positions(captured, config, clusters, metadata)
        await asyncio.gather(*(read_new_gaps(captured, clusters[name]) for name in clusters))
        await _pin(captured, config, clusters, config.aggregates())
        captured.pinned_ms = clock_ms()
    captured.pins.sort(key=lambda pin: (pin.cluster, pin.topic, pin.partition))
    return captured


async def _describe(clusters: Mapping[str, Cluster]) -> dict[str, ClusterMetadata]:
    answers = await asyncio.gather(*(cluster.metadata(max_age_ms=0) for cluster in clusters.values()))
    return dict(zip(clusters, answers, strict=True))


def check_distinct(config: AuditConfig, metadata: Mapping[str, ClusterMetadata]) -> None:
    """Raise ConfigError where two tiers are one topic of one cluster: each would prove the other."""
    known: dict[tuple[str, str], str] = {}
    for name, described in metadata.items():
        if described.cluster_id is None:
            continue
        cluster = config.clusters[name]
        for here in sorted({here for topic in config.topics for here in cluster.topics_here(topic)}):
            other = known.setdefault((described.cluster_id, here), name)
            if other != name:
                raise ConfigError(
                    config.where(f"clusters.{name}.bootstrap"),
                    list(config.clusters[name].bootstrap),
                    f"another cluster than clusters.{other} (both have id {described.cluster_id})",
                )


async def _committed(
    config: AuditConfig, cluster: Cluster, group: str
) -> dict[tuple[str, str, int], CommittedOffset]:
    """How far the group has come in each audited partition of the cluster."""
    described = config.clusters[cluster.name]
    with naming(cluster, f"group {group}"):
        committed = await fetch_offsets(cluster, group)
    return {
        (cluster.name, place, partition): committed[name, partition]
        for topic in config.topics
        for here, place in described.places(topic).items()
        for name, partition in committed
        if name == here
    }


async def _pin(
    captured: Capture, config: AuditConfig, clusters: Mapping[str, Cluster], names: Mapping[str, object]
) -> None:
    await asyncio.gather(*(_pin_cluster(captured, config, clusters[name]) for name in names))


async def _pin_cluster(captured: Capture, config: AuditConfig, cluster: Cluster) -> None:
    described = config.clusters[cluster.name]
    here = [(name, place) for topic in config.topics for name, place in described.places(topic).items()]
    names = sorted({name for name, _ in here})
    metadata = await cluster.metadata(names, max_age_ms=0)
    keys = [key for name in names for key in metadata.partitions(name)]
    kept = {
        key: position.epochs
        for name, place in here
        for key in metadata.partitions(name)
        if (position := captured.known.get(f"{cluster.name}/{place}/{key[1]}")) is not None
    }
    with naming(cluster, ", ".join(names)):
        starts, marks, ends, histories, older = await ends_and_epochs(cluster, keys, kept)
    densities = await bytes_per_offset(
        cluster, {key: (starts[key].offset, marks[key].offset) for key in keys}
    )
    for name, place in here:
        if name not in metadata.topics:
            refused = refusal(metadata, name)
            if refused is None:
                captured.absent.append(f"cluster {cluster.name} has no topic {name}")
                captured.gone[cluster.name, place] = name
            else:
                withheld = f"cluster {cluster.name} does not tell of topic {name}: {refused}"
                captured.withheld[cluster.name, place] = withheld
            continue
        for _, partition in metadata.partitions(name):
            captured.pins.append(
                PartitionPin(
                    cluster=cluster.name,
                    topic=place,
                    topic_here=name,
                    partition=partition,
                    topic_id=topic_id_of(metadata.topics[name].topic_id),
                    start_offset=starts[name, partition].offset,
                    end_offset=ends[name, partition].offset,
                    high_watermark=marks[name, partition].offset,
                    bytes_per_offset=densities.get((name, partition), 0.0),
                    epochs=histories.get((name, partition), ()),
                    older_ends=older.get((name, partition), ()),
                )
            )


async def _read_positions(
    captured: Capture,
    config: AuditConfig,
    clusters: Mapping[str, Cluster],
    metadata: Mapping[str, ClusterMetadata],
) -> None:
    """Positions of all mirrors into all aggregates, keyed back to the audited topics."""
    name_of_id = {
        each.cluster_id: name
        for name, each in metadata.items()
        if each.cluster_id is not None and config.clusters[name].tier == "source"
    }
    audited = {
        (name, here): place
        for name, cluster in config.sources().items()
        for topic in config.topics
        for here, place in cluster.places(topic).items()
    }
    for aggregate in config.aggregates():
        everything = await clusters[aggregate].metadata(max_age_ms=0)
        for positions_topic in sorted(t for t in everything.topics if t.startswith(POSITIONS_TOPIC_PREFIX)):
            mirror = positions_topic.removeprefix(POSITIONS_TOPIC_PREFIX)
            newest = await _newest_positions(captured, clusters[aggregate], positions_topic, name_of_id)
            routes_topic = f"{ROUTES_TOPIC_PREFIX}{mirror}"
            routes = None
            if routes_topic in everything.topics:  # an old mirror tells none
                routes = await _told_routes(captured, clusters[aggregate], routes_topic)
            captured.carriers.setdefault(mirror, set())
            for (said, topic_here, _), position in newest.items():
                place = audited.get((position.source, topic_here))
                if place is None:
                    continue
                names = config.clusters[aggregate].topics_here(audited_topic(place))
                if routes is not None and not routes.leads_to(said, topic_here, names):
                    continue
                captured.carriers[mirror].add(aggregate)
                captured.positions.append(replace(position, topic=place))


async def _newest_positions(
    captured: Capture, cluster: Cluster, positions_topic: str, name_of_id: Mapping[str, str]
) -> dict[tuple[str, str, int], MirrorPosition]:
    """By the mirror's own name of the source, topic and partition: its last word."""
    aggregate, mirror = cluster.name, positions_topic.removeprefix(POSITIONS_TOPIC_PREFIX)
    newest: dict[tuple[str, str, int], MirrorPosition] = {}
    with naming(cluster, positions_topic):
        async for record in read_topic_to_end(cluster, positions_topic):
            try:
                position = _parse_position(record.key, record.value, aggregate, mirror, name_of_id)
            except UnreadableRecord as problem:
                _distrust_position(captured, aggregate, positions_topic, record.offset, problem)
                continue
            if position is not None and (named := decode_key(record.key)) is not None:
                said = named.source
                captured.source_names[mirror, said] = position.source
                newest[said, position.topic, position.partition] = position
    return newest


async def _told_routes(captured: Capture, cluster: Cluster, routes_topic: str) -> ToldRoutes:
    routes = ToldRoutes()
    with naming(cluster, routes_topic):
        async for record in read_topic_to_end(cluster, routes_topic):
            try:
                routes.learn(record.key, record.value)
            except (ValueError, KeyError, TypeError) as problem:
                _distrust_position(captured, cluster.name, routes_topic, record.offset, problem, "route")
    return routes


def _parse_position(
    key: bytes | None,
    value: bytes | None,
    aggregate: str,
    mirror: str,
    name_of_id: Mapping[str, str],
) -> MirrorPosition | None:
    """One record of a positions topic; None for a tombstone, and for offsets of a cluster that is gone.

    Raises UnreadableRecord.
    """
    if value is None:
        return None
    where, what = decode_key(key), decode_value(value)
    if where is None:
        raise UnreadableRecord("not the key of a position")
    # The mirror and the audit may call a cluster by different names: its own id decides.
    source = where.source
    if what.cluster_id in name_of_id:
        source = name_of_id[what.cluster_id]
    elif what.cluster_id and source in name_of_id.values():
        return None
    return MirrorPosition(
        aggregate=aggregate,
        mirror=mirror,
        source=source,
        topic=where.topic,
        partition=where.partition,
        next_offset=what.next_offset,
        topic_id="" if what.topic_id == NO_TOPIC_ID else str(what.topic_id),
        leader_epoch=what.leader_epoch,
        began=max(what.began, 0),
    )


def _distrust_position(
    captured: Capture, aggregate: str, topic: str, offset: int, problem: Exception, what: str = "position"
) -> None:
    if len(captured.untrusted) < MAX_UNTRUSTED_POSITIONS:
        captured.untrusted.append(
            f"{what} in cluster {aggregate}, topic {topic}, offset {offset}: not readable ({problem})"
        )
