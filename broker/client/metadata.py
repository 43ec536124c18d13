"""What a cluster says of itself: brokers, topics, partitions and their leaders, as plain values.

`cluster.py` reads them from Metadata answers (versions 9 to 12 are alike but for the topic ids, which
begin at 10); everything in this package and the mirror works with these.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.broker.client.connection import request_schema
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

NO_TOPIC_ID = uuid.UUID(int=0)


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker as it advertises itself."""

    host: str
    port: int
    rack: str | None = None

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


@dataclass(frozen=True, slots=True)
class PartitionMetadata:
    """`leader` is -1 and `error` not 0 while the partition has none. `offline` are those of `replicas` that
    their brokers cannot use, or whose brokers are gone."""

    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    error: int = 0
    offline: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """A topic that exists. `topic_id` is the zero UUID where the server knows no topic ids."""

    name: str
    topic_id: uuid.UUID
    internal: bool
    partitions: dict[int, PartitionMetadata]


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """One view of the cluster. `topics` holds those that exist; `topic_errors` the Kafka error codes of
    those that were asked for and could not be described."""

    cluster_id: str | None
    controller_id: int
    brokers: dict[int, Broker]
    topics: dict[str, TopicMetadata] = field(default_factory=dict)
    topic_errors: dict[str, int] = field(default_factory=dict)

    def leader(self, topic: str, partition: int) -> int | None:
        """The node to produce to and fetch from; None while nobody leads or the partition is unknown."""
        known = self.topics.get(topic)
        found = known.partitions.get(partition) if known else None
        return None if found is None or found.leader < 0 else found.leader

    def partitions(self, topic: str) -> list[TopicPartition]:
        """Every partition of the topic, in order; empty when it is unknown."""
        known = self.topics.get(topic)
        return [(topic, number) for number in sorted(known.partitions)] if known else []

    def by_leader(self, partitions: Iterable[TopicPartition]) -> dict[int | None, list[TopicPartition]]:
        """Partitions grouped by their leaders; those without one under None."""
        groups: dict[int | None, list[TopicPartition]] = {}
        for topic, partition in partitions:
            groups.setdefault(self.leader(topic, partition), []).append((topic, partition))
        return groups

    def narrowed(self, topics: Iterable[str]) -> ClusterMetadata:
        """The same view of these topics alone."""
        return ClusterMetadata(
            self.cluster_id,
            self.controller_id,
            self.brokers,
            {name: self.topics[name] for name in topics if name in self.topics},
            {name: self.topic_errors[name] for name in topics if name in self.topic_errors},
        )


def metadata_request(version: int, topics: Sequence[str] | None) -> Any:
    """A request of version 9 to 12 about these topics, or all (None); it never creates any."""
    schema = request_schema(Api.METADATA, version)
    by_id = {"topic_id": None} if version >= 10 else {}
    for_cluster = {"include_cluster_authorized_operations": False} if version <= 10 else {}
    named = None
    if topics is not None:
        named = tuple(schema.MetadataRequestTopic(name=name, **by_id) for name in topics)
    return schema.MetadataRequest(
        topics=named,
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
        **for_cluster,
    )


def read_metadata(response: Any) -> ClusterMetadata:
    """Read a Metadata answer of version 9 to 12."""
    topics: dict[str, TopicMetadata] = {}
    errors: dict[str, int] = {}
    for topic in response.topics:
        if topic.error_code:
            errors[str(topic.name)] = int(topic.error_code)
            continue
        topics[str(topic.name)] = TopicMetadata(
            name=str(topic.name),
            topic_id=getattr(topic, "topic_id", None) or NO_TOPIC_ID,
            internal=topic.is_internal,
            partitions={int(each.partition_index): _read_partition(each) for each in topic.partitions},
        )
    brokers = {int(each.node_id): Broker(each.host, int(each.port), each.rack) for each in response.brokers}
    return ClusterMetadata(response.cluster_id, int(response.controller_id), brokers, topics, errors)


def _read_partition(each: Any) -> PartitionMetadata:
    return PartitionMetadata(
        leader=int(each.leader_id),
        leader_epoch=int(each.leader_epoch),
        replicas=tuple(int(node) for node in each.replica_nodes),
        isr=tuple(int(node) for node in each.isr_nodes),
        error=int(each.error_code),
        offline=tuple(int(node) for node in each.offline_replicas),
    )


def merge_topics(known: ClusterMetadata, news: ClusterMetadata) -> ClusterMetadata:
    """`news` about some topics laid over what was known; brokers and controller are those of `news`."""

    def without(old: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: each
            for name, each in old.items()
            if name not in news.topics and name not in news.topic_errors
        }

    return ClusterMetadata(
        news.cluster_id,
        news.controller_id,
        news.brokers,
        {**without(known.topics), **news.topics},
        {**without(known.topic_errors), **news.topic_errors},
    )
