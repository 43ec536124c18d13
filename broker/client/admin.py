"""Topics and their settings: create, delete, describe, widen, trim.

Functions on a `Cluster`. Topic changes go to the controller and are repeated while there is none; an
answer of "already exists" after a lost connection is left to the caller, who alone knows whether that is
fine. After an answer of REQUEST_TIMED_OUT, which says that the change is under way, it is the change's own
trace that the next attempt meets, and no refusal, where the topic is as it was asked for. Every refusal is
a KafkaError whose message names cluster and topic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.controller_requests import (
    check,
    controller_id,
    refusal,
    refusal_of_code,
    server_timeout,
)
from millrace.broker.client.metadata import TopicMetadata
from millrace.broker.errors import (
    InvalidPartitions,
    KafkaError,
    LeaderNotAvailable,
    RequestTimedOut,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
    error_for_code,
)
from millrace.broker.protocol.frames import Api

_CREATE_TOPICS_VERSIONS = (5, 7)
_DELETE_TOPICS_VERSIONS = (1, 5)
_CREATE_PARTITIONS_VERSIONS = (2, 3)
# From version 1 on an answer says where a value comes from; Apache Kafka before 2.8 does not know 4.
_DESCRIBE_CONFIGS_VERSIONS = (1, 4)
_INCREMENTAL_ALTER_CONFIGS_VERSION = 1

_TOPIC_RESOURCE, _BROKER_RESOURCE = 2, 4
_SET_ON_TOPIC = 1
# So that an answer about thousands of topics stays within what a client accepts in one frame.
_TOPICS_A_REQUEST = 200
_SET, _DELETE = 0, 1
_ANY_COUNT = -1


class _UnderWay:
    """Whether the server has said of a change that it goes on, and only takes longer than was waited for."""

    is_known = False

    def check(self, cluster: Cluster, what: str, result: Any) -> None:
        """As `controller_requests.check`."""
        try:
            check(cluster, what, result)
        except RequestTimedOut:
            self.is_known = True
            raise


async def create_topic(
    cluster: Cluster,
    name: str,
    partitions: int = 1,
    replication_factor: int = 1,
    configs: Mapping[str, str] | None = None,
    *,
    validate_only: bool = False,
) -> None:
    """Create a topic and wait until every partition has a leader. -1 takes the broker's default.

    With `validate_only` nothing is created: the refusals alone.

    Raises TopicAlreadyExists, InvalidTopic, InvalidPartitions, InvalidReplicationFactor, InvalidConfig, …
    """
    under_way = _UnderWay()

    async def attempt() -> None:
        node_id = await controller_id(cluster)
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
        request = schema.CreateTopicsRequest(
            topics=(topic,), timeout=server_timeout(cluster), validate_only=validate_only
        )
        answer = await cluster.request(request, node_id=node_id)
        under_way.check(cluster, f"topic {name}", answer.topics[0])

    refused: TopicAlreadyExists | None = None
    try:
        await cluster.retrying(attempt)
    except TopicAlreadyExists as error:
        if validate_only or not under_way.is_known:
            raise
        refused = error
    if not validate_only:
        topic = await wait_for_topic(cluster, name)
        if refused is not None and partitions not in (_ANY_COUNT, len(topic.partitions)):
            raise refused


async def wait_for_topic(cluster: Cluster, name: str) -> TopicMetadata:
    """The topic, once each of its partitions has a leader; the last refusal after the request timeout."""

    async def attempt() -> TopicMetadata:
        view = await cluster.metadata([name], max_age_ms=0)
        if name in view.topic_errors:
            raise refusal_of_code(cluster, f"topic {name}", view.topic_errors[name])
        topic = view.topics[name]
        without = [number for number, each in topic.partitions.items() if each.leader < 0]
        if without:
            raise LeaderNotAvailable(f"{cluster}: topic {name}: no leader yet for partitions {without}")
        return topic

    return await cluster.retrying(attempt)


async def delete_topic(cluster: Cluster, name: str) -> None:
    """Delete a topic. Raises UnknownTopicOrPartition when there is none."""
    under_way = _UnderWay()

    async def attempt() -> None:
        node_id = await controller_id(cluster)
        version = await cluster.api_version(Api.DELETE_TOPICS, *_DELETE_TOPICS_VERSIONS, node_id)
        schema = request_schema(Api.DELETE_TOPICS, version)
        request = schema.DeleteTopicsRequest(topic_names=(name,), timeout=server_timeout(cluster))
        answer = await cluster.request(request, node_id=node_id)
        under_way.check(cluster, f"topic {name}", answer.responses[0])

    # Retriable for producers and consumers, who may be early; to delete it is an answer.
    try:
        await cluster.retrying(attempt, final=(UnknownTopicOrPartition,))
    except UnknownTopicOrPartition:
        if not under_way.is_known:
            raise
    cluster.invalidate()


async def create_partitions(
    cluster: Cluster, name: str, total_count: int, *, validate_only: bool = False
) -> None:
    """Widen a topic to `total_count` partitions; with `validate_only` only ask whether that would go."""
    under_way = _UnderWay()

    async def attempt() -> None:
        node_id = await controller_id(cluster)
        version = await cluster.api_version(Api.CREATE_PARTITIONS, *_CREATE_PARTITIONS_VERSIONS, node_id)
        schema = request_schema(Api.CREATE_PARTITIONS, version)
        topic = schema.CreatePartitionsTopic(name=name, count=total_count, assignments=None)
        request = schema.CreatePartitionsRequest(
            topics=(topic,), timeout=server_timeout(cluster), validate_only=validate_only
        )
        answer = await cluster.request(request, node_id=node_id)
        under_way.check(cluster, f"topic {name}", answer.results[0])

    try:
        await cluster.retrying(attempt)
    except InvalidPartitions:
        if validate_only or not under_way.is_known:
            raise
        if len((await wait_for_topic(cluster, name)).partitions) != total_count:
            raise
    cluster.invalidate()


async def describe_configs(cluster: Cluster, topic: str, *, only_set: bool = False) -> dict[str, str | None]:
    """A topic's settings as text. `only_set` leaves out those that come from the broker's defaults.

    Sensitive values are None. Raises UnknownTopicOrPartition for a topic that does not exist.
    """
    version = await cluster.api_version(Api.DESCRIBE_CONFIGS, *_DESCRIBE_CONFIGS_VERSIONS)
    schema = request_schema(Api.DESCRIBE_CONFIGS, version)
    resource = schema.DescribeConfigsResource(
        resource_type=_TOPIC_RESOURCE, resource_name=topic, configuration_keys=None
    )
    request = schema.DescribeConfigsRequest(resources=(resource,))
    answer = await cluster.request(request)
    result = answer.results[0]
    check(cluster, f"topic {topic}", result)
    return {
        each.name: each.value
        for each in result.configs
        if not only_set or int(each.config_source) == _SET_ON_TOPIC
    }


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """A setting as it counts; `is_set` when the resource itself says so, and no default. Sensitive: None."""

    value: str | None
    is_set: bool


async def describe_topics_configs(
    cluster: Cluster, topics: Sequence[str], keys: Sequence[str] | None = None
) -> dict[str, dict[str, ConfigValue] | KafkaError]:
    """The settings of many topics, all or those named in `keys`, in few requests. A topic that the cluster
    does not describe has its refusal instead."""
    version = await cluster.api_version(Api.DESCRIBE_CONFIGS, *_DESCRIBE_CONFIGS_VERSIONS)
    schema = request_schema(Api.DESCRIBE_CONFIGS, version)
    found: dict[str, dict[str, ConfigValue] | KafkaError] = {}
    for first in range(0, len(topics), _TOPICS_A_REQUEST):
        resources = tuple(
            schema.DescribeConfigsResource(
                resource_type=_TOPIC_RESOURCE,
                resource_name=topic,
                configuration_keys=None if keys is None else tuple(keys),
            )
            for topic in topics[first : first + _TOPICS_A_REQUEST]
        )
        answer = await cluster.request(schema.DescribeConfigsRequest(resources=resources))
        for result in answer.results:
            name = str(result.resource_name)
            if result.error_code:
                found[name] = refusal(cluster, f"topic {name}", result)
                continue
            found[name] = {
                each.name: ConfigValue(each.value, int(each.config_source) == _SET_ON_TOPIC)
                for each in result.configs
            }
    return found


async def describe_broker_configs(
    cluster: Cluster, node_id: int, keys: Sequence[str]
) -> dict[str, str | None]:
    """Some settings of one broker, as that broker says. Raises ClusterAuthorizationFailed, …"""
    version = await cluster.api_version(Api.DESCRIBE_CONFIGS, *_DESCRIBE_CONFIGS_VERSIONS, node_id)
    schema = request_schema(Api.DESCRIBE_CONFIGS, version)
    resource = schema.DescribeConfigsResource(
        resource_type=_BROKER_RESOURCE, resource_name=str(node_id), configuration_keys=tuple(keys)
    )
    answer = await cluster.request(schema.DescribeConfigsRequest(resources=(resource,)), node_id=node_id)
    result = answer.results[0]
    if result.error_code:
        code = int(result.error_code)
        plain = result.error_message or str(error_for_code(code))
        raise error_for_code(code, f"{cluster}: broker {node_id}: {plain}")
    return {each.name: each.value for each in result.configs}


async def alter_configs(
    cluster: Cluster, topic: str, changes: Mapping[str, str | None], *, validate_only: bool = False
) -> None:
    """Set a topic's settings, or give them back to the defaults (None); the others stay.

    With `validate_only` nothing changes. Raises InvalidConfig, UnknownTopicOrPartition, …
    """

    async def attempt() -> None:
        node_id = await controller_id(cluster)
        schema = request_schema(Api.INCREMENTAL_ALTER_CONFIGS, _INCREMENTAL_ALTER_CONFIGS_VERSION)
        configs = tuple(
            schema.AlterableConfig(name=key, config_operation=_DELETE if value is None else _SET, value=value)
            for key, value in changes.items()
        )
        resource = schema.AlterConfigsResource(
            resource_type=_TOPIC_RESOURCE, resource_name=topic, configs=configs
        )
        request = schema.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=validate_only)
        answer = await cluster.request(request, node_id=node_id)
        check(cluster, f"topic {topic}", answer.responses[0])

    await cluster.retrying(attempt, final=(UnknownTopicOrPartition,))
