"""Topics and their settings: create, delete, describe, widen, trim.

Functions on a `Cluster`. Topic changes go to the controller and are repeated while there is none; an
answer of "already exists" after a lost connection is left to the caller, who alone knows whether that is
fine. Every refusal is a KafkaError whose message names cluster and topic.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from kio.static.primitive import i32Timedelta

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.metadata import TopicMetadata, TopicPartition
from millrace.broker.errors import LeaderNotAvailable, NotController, UnknownTopicOrPartition, error_for_code
from millrace.broker.protocol.frames import Api

_CREATE_TOPICS_VERSIONS = (5, 7)
_DELETE_TOPICS_VERSION = 5
_CREATE_PARTITIONS_VERSIONS = (2, 3)
_DELETE_RECORDS_VERSION = 2
_DESCRIBE_CONFIGS_VERSION = 4
_INCREMENTAL_ALTER_CONFIGS_VERSION = 1

_TOPIC_RESOURCE = 2
_SET, _DELETE = 0, 1


async def create_topic(
    cluster: Cluster,
    name: str,
    partitions: int = 1,
    replication_factor: int = 1,
    configs: Mapping[str, str] | None = None,
) -> None:
    """Create a topic and wait until every partition has a leader. -1 takes the broker's default.

    Raises TopicAlreadyExists, InvalidTopic, InvalidPartitions, InvalidReplicationFactor, InvalidConfig, …
    """

    async def attempt() -> None:
        node_id = await _controller(cluster)
        version = await cluster.api_version(Api.CREATE_TOPICS, *_CREATE_TOPICS_VERSIONS, node_id)
        schema = request_schema(Api.CREATE_TOPICS, version)
        settings = tuple(
            schema.CreatableTopicConfig(name=key, value=value) for key, value in (configs or {}).items()
        )
        topic = schema.CreatableTopic(
            name=name,
            num_partitions=partitions,
            replication_factor=replication_factor,
            assignments=(),
            configs=settings,
        )
        request = schema.CreateTopicsRequest(topics=(topic,), timeout=_timeout(cluster), validate_only=False)
        answer = await cluster.request(request, node_id=node_id)
        _check(cluster, name, answer.topics[0])

    await cluster.retrying(attempt)
    await wait_for_topic(cluster, name)


async def wait_for_topic(cluster: Cluster, name: str) -> TopicMetadata:
    """The topic, once each of its partitions has a leader; the last refusal after the request timeout."""

    async def attempt() -> TopicMetadata:
        view = await cluster.metadata([name], max_age_ms=0)
        if name in view.topic_errors:
            raise _refusal(cluster, name, view.topic_errors[name])
        topic = view.topics[name]
        without = [number for number, each in topic.partitions.items() if each.leader < 0]
        if without:
            raise LeaderNotAvailable(f"{cluster}: topic {name}: no leader yet for partitions {without}")
        return topic

    return await cluster.retrying(attempt)


async def delete_topic(cluster: Cluster, name: str) -> None:
    """Delete a topic. Raises UnknownTopicOrPartition when there is none."""

    async def attempt() -> None:
        node_id = await _controller(cluster)
        schema = request_schema(Api.DELETE_TOPICS, _DELETE_TOPICS_VERSION)
        request = schema.DeleteTopicsRequest(topic_names=(name,), timeout=_timeout(cluster))
        answer = await cluster.request(request, node_id=node_id)
        _check(cluster, name, answer.responses[0])

    # Retriable for producers and consumers, who may be early; to delete it is an answer.
    await cluster.retrying(attempt, final=(UnknownTopicOrPartition,))
    cluster.invalidate()


async def create_partitions(cluster: Cluster, name: str, total_count: int) -> None:
    """Widen a topic to `total_count` partitions."""

    async def attempt() -> None:
        node_id = await _controller(cluster)
        version = await cluster.api_version(Api.CREATE_PARTITIONS, *_CREATE_PARTITIONS_VERSIONS, node_id)
        schema = request_schema(Api.CREATE_PARTITIONS, version)
        topic = schema.CreatePartitionsTopic(name=name, count=total_count, assignments=None)
        request = schema.CreatePartitionsRequest(
            topics=(topic,), timeout=_timeout(cluster), validate_only=False
        )
        answer = await cluster.request(request, node_id=node_id)
        _check(cluster, name, answer.results[0])

    await cluster.retrying(attempt)
    cluster.invalidate()


async def delete_records(cluster: Cluster, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Let partitions begin at the offsets given (-1: at the high watermark); the new first offsets."""
    lows: dict[TopicPartition, int] = {}

    async def attempt() -> None:
        missing = {key: offset for key, offset in before.items() if key not in lows}
        view = await cluster.metadata(sorted({topic for topic, _ in missing}))
        for node_id, keys in view.by_leader(missing).items():
            if node_id is None:
                raise LeaderNotAvailable(f"{cluster}: {keys[0][0]}-{keys[0][1]} has no leader now")
            await _delete_records_at(cluster, node_id, {key: missing[key] for key in keys}, lows)

    await cluster.retrying(attempt)
    return lows


async def _delete_records_at(
    cluster: Cluster,
    node_id: int,
    before: Mapping[TopicPartition, int],
    lows: dict[TopicPartition, int],
) -> None:
    schema = request_schema(Api.DELETE_RECORDS, _DELETE_RECORDS_VERSION)
    by_topic: dict[str, list[Any]] = {}
    for (topic, partition), offset in before.items():
        part = schema.DeleteRecordsPartition(partition_index=partition, offset=offset)
        by_topic.setdefault(topic, []).append(part)
    topics = tuple(
        schema.DeleteRecordsTopic(name=topic, partitions=tuple(parts)) for topic, parts in by_topic.items()
    )
    request = schema.DeleteRecordsRequest(topics=topics, timeout=_timeout(cluster))
    answer = await cluster.request(request, node_id=node_id)
    for topic in answer.topics:
        for part in topic.partitions:
            if part.error_code:
                raise _refusal(cluster, f"{topic.name}-{part.partition_index}", int(part.error_code))
            lows[str(topic.name), int(part.partition_index)] = int(part.low_watermark)


async def list_topics(cluster: Cluster, *, internal: bool = False) -> dict[str, TopicMetadata]:
    """Every topic by name, as the cluster says now; internal ones only on request."""
    view = await cluster.metadata(max_age_ms=0)
    return {name: topic for name, topic in sorted(view.topics.items()) if internal or not topic.internal}


async def describe_configs(cluster: Cluster, topic: str, *, only_set: bool = False) -> dict[str, str | None]:
    """A topic's settings as text. `only_set` leaves out those that come from the broker's defaults.

    Sensitive values are None. Raises UnknownTopicOrPartition for a topic that does not exist.
    """
    schema = request_schema(Api.DESCRIBE_CONFIGS, _DESCRIBE_CONFIGS_VERSION)
    resource = schema.DescribeConfigsResource(
        resource_type=_TOPIC_RESOURCE, resource_name=topic, configuration_keys=None
    )
    request = schema.DescribeConfigsRequest(resources=(resource,))
    answer = await cluster.request(request)
    result = answer.results[0]
    _check(cluster, topic, result)
    set_on_topic = 1
    return {
        each.name: each.value
        for each in result.configs
        if not only_set or int(each.config_source) == set_on_topic
    }


async def alter_configs(cluster: Cluster, topic: str, changes: Mapping[str, str | None]) -> None:
    """Set a topic's settings, or give them back to the defaults (None); the others stay."""

    async def attempt() -> None:
        node_id = await _controller(cluster)
        schema = request_schema(Api.INCREMENTAL_ALTER_CONFIGS, _INCREMENTAL_ALTER_CONFIGS_VERSION)
        configs = tuple(
            schema.AlterableConfig(name=key, config_operation=_DELETE if value is None else _SET, value=value)
            for key, value in changes.items()
        )
        resource = schema.AlterConfigsResource(
            resource_type=_TOPIC_RESOURCE, resource_name=topic, configs=configs
        )
        request = schema.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=False)
        answer = await cluster.request(request, node_id=node_id)
        _check(cluster, topic, answer.responses[0])

    await cluster.retrying(attempt)


async def _controller(cluster: Cluster) -> int:
    view = await cluster.metadata([])
    if view.controller_id not in view.brokers:
        raise NotController(f"{cluster}: it has no controller now")
    return view.controller_id


def _timeout(cluster: Cluster) -> i32Timedelta:
    # The server's own limit: shorter than ours, so that its answer comes before we give up.
    return i32Timedelta.parse(datetime.timedelta(milliseconds=cluster.request_timeout_ms * 3 // 4))


def _check(cluster: Cluster, name: str, result: Any) -> None:
    """Raise what the part of an answer about `name` says, if it says an error."""
    if result.error_code:
        raise _refusal(cluster, name, int(result.error_code), result.error_message)


def _refusal(cluster: Cluster, name: str, code: int, message: str | None = None) -> Exception:
    plain = message or str(error_for_code(code))
    return error_for_code(code, f"{cluster}: topic {name}: {plain}")
