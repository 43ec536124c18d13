"""What the driver learns before anything is scanned: events, pinned offsets, the mirrors' positions.

Called by `job`. The order is what makes a missing record a loss and not lag, so it is one function that reads
as the list of its steps:

1. read the events of every cluster to their ends;
2. pin the ends of the source partitions (what the events acknowledge lies below);
3. read the mirrors' positions from the aggregates (what lies below them was acknowledged there);
4. pin the ends of the aggregate partitions.

Nothing is ever taken from a cluster that did not answer: one that cannot be reached raises
ClusterUnreachable, and the job ends without a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from millrace.audit.config import AuditConfig
from millrace.audit.events import EventLedger
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import NO_TOPIC_ID, ClusterMetadata
from millrace.broker.client.offsets import EARLIEST, LATEST
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import ClusterUnreachable, ConfigError, KafkaError

EVENTS_TOPIC = "millrace.audit"
POSITIONS_PREFIX = "millrace.positions."
MAX_UNTRUSTED_POSITIONS = 100


@dataclass(frozen=True, slots=True)
class PartitionPin:
    """One partition as it was when pinned: readable offsets are [start_offset, end_offset).

    A `high_watermark` above the end tells of acknowledged records that an open transaction keeps back.
    """

    cluster: str
    topic: str
    topic_here: str
    partition: int
    topic_id: str
    start_offset: int
    end_offset: int
    high_watermark: int = -1

    @property
    def key(self) -> str:
        """`cluster/topic/partition`, the key of committed offsets."""
        return f"{self.cluster}/{self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True)
class MirrorPosition:
    """How far a mirror had carried one source partition into an aggregate."""

    aggregate: str
    mirror: str
    source: str
    topic: str
    partition: int
    next_offset: int
    topic_id: str


@dataclass(slots=True)
class Capture:
    """All of it. `origins` names the source clusters in which a stream's own events were read.

    `source_names` {(mirror, its name of a source): the audit's name}, where the cluster's id told it.
    `silent_sources` are sentences on source clusters whose producers cannot tell anything.
    """

    taken_ms: int
    ledger: EventLedger
    origins: dict[str, set[str]] = field(default_factory=dict)
    pins: list[PartitionPin] = field(default_factory=list)
    positions: list[MirrorPosition] = field(default_factory=list)
    untrusted: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    silent_sources: list[str] = field(default_factory=list)
    source_names: dict[tuple[str, str], str] = field(default_factory=dict)


async def capture(config: AuditConfig, ledger: EventLedger, clock_ms: Callable[[], int]) -> Capture:
    """Look at every cluster, in the order that the module's text gives. `ledger` may hold earlier events."""
    async with contextlib.AsyncExitStack() as stack:
        clusters = {
            name: await stack.enter_async_context(
                Cluster(name, list(cluster.bootstrap), client_id="millrace-audit")
            )
            for name, cluster in config.clusters.items()
        }
        # Taken first: a verdict may only use the time at which the newest event could have been read.
        captured = Capture(clock_ms(), ledger)
        metadata = await _describe(clusters)
        check_distinct(config, metadata)
        await asyncio.gather(*(_read_events(captured, config, clusters[name]) for name in clusters))
        await _pin(captured, config, clusters, config.sources())
        await _read_positions(captured, config, clusters, metadata)
        await _pin(captured, config, clusters, config.aggregates())
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
        for topic in {config.clusters[name].topic_here(topic) for topic in config.topics}:
            other = known.setdefault((described.cluster_id, topic), name)
            if other != name:
                raise ConfigError(
                    f"clusters.{name}.bootstrap",
                    list(config.clusters[name].bootstrap),
                    f"another cluster than clusters.{other} (both have id {described.cluster_id})",
                )


async def _read_events(captured: Capture, config: AuditConfig, cluster: Cluster) -> None:
    metadata = await cluster.metadata([EVENTS_TOPIC])
    is_source = config.clusters[cluster.name].tier == "source"
    if EVENTS_TOPIC not in metadata.topics:
        sentence = f"cluster {cluster.name} has no topic {EVENTS_TOPIC}: its producers tell nothing"
        captured.absent.append(sentence)
        if is_source:
            captured.silent_sources.append(sentence)
        return
    with _named(cluster, EVENTS_TOPIC):
        async for record in read_topic_to_end(cluster, EVENTS_TOPIC):
            origin = f"in cluster {cluster.name}, partition {record.partition}, offset {record.offset}"
            captured.ledger.add(record.key, record.value, origin)
            if is_source and record.key is not None:
                stream = _stream_of_key(record.key)
                if stream:
                    captured.origins.setdefault(stream, set()).add(cluster.name)


def _stream_of_key(key: bytes) -> str:
    """The stream that a `stream/...` or `count/...` key names; empty for other events."""
    kind, _, rest = key.decode("utf-8", "replace").partition("/")
    return rest.partition("/")[0] if kind in ("stream", "count") else ""


async def _pin(
    captured: Capture, config: AuditConfig, clusters: Mapping[str, Cluster], names: Mapping[str, object]
) -> None:
    await asyncio.gather(*(_pin_cluster(captured, config, clusters[name]) for name in names))


async def _pin_cluster(captured: Capture, config: AuditConfig, cluster: Cluster) -> None:
    described = config.clusters[cluster.name]
    here = {topic: described.topic_here(topic) for topic in config.topics}
    metadata = await cluster.metadata(sorted(set(here.values())), max_age_ms=0)
    keys = [key for name in sorted(set(here.values())) for key in metadata.partitions(name)]
    with _named(cluster, ", ".join(sorted(set(here.values())))):
        starts = await cluster.list_offsets(dict.fromkeys(keys, EARLIEST)) if keys else {}
        # The high watermark first: what is written between the two calls is not held back by anybody.
        marks = await cluster.list_offsets(dict.fromkeys(keys, LATEST)) if keys else {}
        ends = await cluster.list_offsets(dict.fromkeys(keys, LATEST), read_committed=True) if keys else {}
    for topic, name in here.items():
        if name not in metadata.topics:
            captured.absent.append(f"cluster {cluster.name} has no topic {name}")
            continue
        for _, partition in metadata.partitions(name):
            captured.pins.append(
                PartitionPin(
                    cluster=cluster.name,
                    topic=topic,
                    topic_here=name,
                    partition=partition,
                    topic_id=_topic_id(metadata.topics[name].topic_id),
                    start_offset=starts[name, partition].offset,
                    end_offset=ends[name, partition].offset,
                    high_watermark=marks[name, partition].offset,
                )
            )


def _topic_id(topic_id: uuid.UUID) -> str:
    return "" if topic_id == NO_TOPIC_ID else str(topic_id)


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
        (name, cluster.topic_here(topic)): topic
        for name, cluster in config.sources().items()
        for topic in config.topics
    }
    for aggregate in config.aggregates():
        everything = await clusters[aggregate].metadata(max_age_ms=0)
        for positions_topic in sorted(t for t in everything.topics if t.startswith(POSITIONS_PREFIX)):
            mirror = positions_topic.removeprefix(POSITIONS_PREFIX)
            newest: dict[tuple[str, str, int], MirrorPosition] = {}
            with _named(clusters[aggregate], positions_topic):
                async for record in read_topic_to_end(clusters[aggregate], positions_topic):
                    try:
                        position = _parse_position(record.key, record.value, aggregate, mirror, name_of_id)
                        if position is not None:
                            said = str(json.loads(record.key or b"")["source"])
                            captured.source_names[mirror, said] = position.source
                    except (ValueError, KeyError, TypeError) as problem:
                        _distrust_position(captured, aggregate, positions_topic, record.offset, problem)
                        continue
                    if position is not None:
                        newest[position.source, position.topic, position.partition] = position
            for (source, topic_here, _), position in newest.items():
                topic = audited.get((source, topic_here))
                if topic is not None:
                    captured.positions.append(
                        MirrorPosition(
                            aggregate=position.aggregate,
                            mirror=position.mirror,
                            source=source,
                            topic=topic,
                            partition=position.partition,
                            next_offset=position.next_offset,
                            topic_id=position.topic_id,
                        )
                    )


def _parse_position(
    key: bytes | None,
    value: bytes | None,
    aggregate: str,
    mirror: str,
    name_of_id: Mapping[str, str],
) -> MirrorPosition | None:
    """One record of a positions topic; None for a tombstone, and for offsets of a cluster that is gone.

    Raises ValueError, KeyError or TypeError.
    """
    if value is None:
        return None
    where, what = json.loads(key or b""), json.loads(value)
    if what["version"] != 1:
        raise ValueError(f"version {what['version']}")
    partition, next_offset = where["partition"], what["next_offset"]
    if type(partition) is not int or type(next_offset) is not int or next_offset < 0:
        raise ValueError("partition and next_offset are whole numbers")
    topic_id = what.get("topic_id") or ""
    # The mirror and the audit may call a cluster by different names: its own id decides.
    cluster_id, source = what.get("cluster_id"), str(where["source"])
    if cluster_id in name_of_id:
        source = name_of_id[cluster_id]
    elif cluster_id and source in name_of_id.values():
        return None
    return MirrorPosition(
        aggregate=aggregate,
        mirror=mirror,
        source=source,
        topic=str(where["topic"]),
        partition=partition,
        next_offset=next_offset,
        topic_id="" if topic_id == str(NO_TOPIC_ID) else str(topic_id),
    )


def _distrust_position(
    captured: Capture, aggregate: str, topic: str, offset: int, problem: Exception
) -> None:
    if len(captured.untrusted) < MAX_UNTRUSTED_POSITIONS:
        captured.untrusted.append(
            f"position in cluster {aggregate}, topic {topic}, offset {offset}: not readable ({problem})"
        )


@contextlib.contextmanager
def _named(cluster: Cluster, what: str):  # type: ignore[no-untyped-def]
    """Give a broker's refusal the name of the cluster and the topic it was about."""
    try:
        yield
    except KafkaError as error:
        raise ClusterUnreachable(cluster.name, f"{what} cannot be read: {error}") from error
