"""Moves of partitions between brokers, as an administrator asks for them (KIP-455), and their throttle
(KIP-73).

Functions on a `Cluster`, of this project or of Apache Kafka. Called by `millrace topics reassign`. Refusals
are KafkaErrors whose message names cluster and partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.controller_requests import check, controller_id, refusal, server_timeout
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.throttle_settings import (
    FOLLOWER_RATE,
    FOLLOWER_REPLICAS,
    LEADER_RATE,
    LEADER_REPLICAS,
)
from millrace.broker.protocol.topic_partition import TopicPartition

_TOPIC_RESOURCE, _BROKER_RESOURCE = 2, 4
_SET, _DELETE = 0, 1
_INCREMENTAL_ALTER_CONFIGS_VERSION = 1


@dataclass(frozen=True, slots=True)
class Moving:
    """A partition on its way: all replicas, and those of them that come and go."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...]
    removing: tuple[int, ...]

    @property
    def target(self) -> tuple[int, ...]:
        return tuple(broker for broker in self.replicas if broker not in self.removing)

    @property
    def origin(self) -> tuple[int, ...]:
        return tuple(broker for broker in self.replicas if broker not in self.adding)


async def alter_reassignments(
    cluster: Cluster, targets: Mapping[TopicPartition, tuple[int, ...] | None]
) -> dict[TopicPartition, Exception]:
    """Begin moves, or call them off (None). What was refused, with the reason; empty when all was taken."""
    refused: dict[TopicPartition, Exception] = {}

    async def attempt() -> None:
        node_id = await controller_id(cluster)
        schema = request_schema(Api.ALTER_PARTITION_REASSIGNMENTS, 0)
        by_topic: dict[str, list[Any]] = {}
        for (topic, partition), replicas in targets.items():
            wanted = schema.ReassignablePartition(partition_index=partition, replicas=replicas)
            by_topic.setdefault(topic, []).append(wanted)
        topics = tuple(
            schema.ReassignableTopic(name=topic, partitions=tuple(parts)) for topic, parts in by_topic.items()
        )
        request = schema.AlterPartitionReassignmentsRequest(timeout=server_timeout(cluster), topics=topics)
        answer = await cluster.request(request, node_id=node_id)
        check(cluster, "moving partitions", answer)
        refused.clear()
        for topic in answer.responses:
            for part in topic.partitions:
                if part.error_code:
                    key = (str(topic.name), int(part.partition_index))
                    refused[key] = refusal(cluster, f"{key[0]}-{key[1]}", part)

    await cluster.retrying(attempt)
    cluster.invalidate()
    return refused


async def list_reassignments(
    cluster: Cluster, partitions: Iterable[TopicPartition] | None = None
) -> dict[TopicPartition, Moving]:
    """The partitions that are being moved: all, or those of the ones named."""
    wanted = None if partitions is None else set(partitions)
    found: dict[TopicPartition, Moving] = {}

    async def attempt() -> None:
        node_id = await controller_id(cluster)
        schema = request_schema(Api.LIST_PARTITION_REASSIGNMENTS, 0)
        request = schema.ListPartitionReassignmentsRequest(timeout=server_timeout(cluster), topics=None)
        answer = await cluster.request(request, node_id=node_id)
        check(cluster, "listing moves", answer)
        found.clear()
        for topic in answer.topics:
            for part in topic.partitions:
                key = (str(topic.name), int(part.partition_index))
                if wanted is None or key in wanted:
                    found[key] = Moving(
                        _ids(part.replicas), _ids(part.adding_replicas), _ids(part.removing_replicas)
                    )

    await cluster.retrying(attempt)
    return found


async def set_throttle(
    cluster: Cluster,
    moves: Mapping[TopicPartition, tuple[tuple[int, ...], tuple[int, ...]]],
    bytes_per_second: int,
) -> None:
    """Let the replicas that these moves add be fetched no faster than this, by each broker and from each.

    `moves` has the old and the new replicas of every partition. Set before the moves begin. A broker is asked
    itself: one that is not there, off which partitions are moved perhaps, gets no rate.
    """
    brokers: set[int] = set()
    leaders: dict[str, list[str]] = {}
    followers: dict[str, list[str]] = {}
    for (topic, partition), (old, new) in sorted(moves.items()):
        brokers |= {*old, *new}
        leaders.setdefault(topic, []).extend(f"{partition}:{broker}" for broker in old)
        followers.setdefault(topic, []).extend(f"{partition}:{broker}" for broker in new if broker not in old)
    rate = str(bytes_per_second)
    present = (await cluster.metadata([], max_age_ms=0)).brokers.keys()
    for broker in sorted(brokers & present):
        await alter_configs(cluster, _BROKER_RESOURCE, str(broker), {LEADER_RATE: rate, FOLLOWER_RATE: rate})
    for topic in leaders:
        await alter_configs(
            cluster,
            _TOPIC_RESOURCE,
            topic,
            {LEADER_REPLICAS: ",".join(leaders[topic]), FOLLOWER_REPLICAS: ",".join(followers[topic])},
        )


async def remove_throttle(cluster: Cluster, topics: Iterable[str], *, rates: bool) -> None:
    """Take the throttle off these topics, and with `rates` off every broker."""
    for topic in topics:
        await alter_configs(cluster, _TOPIC_RESOURCE, topic, {LEADER_REPLICAS: None, FOLLOWER_REPLICAS: None})
    if rates:
        for broker in sorted((await cluster.metadata([], max_age_ms=0)).brokers):
            await alter_configs(
                cluster, _BROKER_RESOURCE, str(broker), {LEADER_RATE: None, FOLLOWER_RATE: None}
            )


async def alter_configs(
    cluster: Cluster, resource_type: int, name: str, changes: Mapping[str, str | None]
) -> None:
    """Set or unset (None) single settings of a topic or a broker; a broker is asked itself."""

    async def attempt() -> None:
        node_id = int(name) if resource_type == _BROKER_RESOURCE else await controller_id(cluster)
        schema = request_schema(Api.INCREMENTAL_ALTER_CONFIGS, _INCREMENTAL_ALTER_CONFIGS_VERSION)
        configs = tuple(
            schema.AlterableConfig(name=key, config_operation=_DELETE if value is None else _SET, value=value)
            for key, value in changes.items()
        )
        resource = schema.AlterConfigsResource(
            resource_type=resource_type, resource_name=name, configs=configs
        )
        request = schema.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
        answer = await cluster.request(request, node_id=node_id)
        what = f"broker {name}" if resource_type == _BROKER_RESOURCE else f"topic {name}"
        check(cluster, what, answer.responses[0])

    await cluster.retrying(attempt)


def _ids(brokers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(broker) for broker in brokers)
