"""Metadata, versions 0 to 12: brokers, topics, leaders.

Unknown topics are created on the way where both the broker (`auto.create.topics.enable`) and the request
allow it; the answer then waits for the leaders, where Apache Kafka answers LEADER_NOT_AVAILABLE first and
lets the client ask again. There is no authorizer: who asks for the operations that it may do (versions 8 on,
KIP-430) is told all there are.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from millrace.broker.coordination.controller_client import NewTopic, check_topic_name
from millrace.broker.coordination.metadata_cache import NO_TOPIC_ID, TopicInfo
from millrace.broker.errors import (
    InvalidReplicationFactor,
    InvalidRequest,
    InvalidTopic,
    KafkaError,
    LeaderNotAvailable,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.operations import ALL_ON_CLUSTER, ALL_ON_TOPIC, NOT_ASKED
from millrace.broker.protocol.system_topics import INTERNAL_TOPICS
from millrace.broker.server.answers import NO_ERROR, answer_of
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.topic_view import partition_view

API = Api.METADATA
VERSIONS = range(13)

FIRST_WITH_CREATION_FLAG = 4
FIRST_WITH_TOPIC_IDS = 12
FIRST_WITH_OFFLINE_REPLICAS = 1
CREATION_WAIT_MS = 10_000


async def handle(request: Any, context: RequestContext) -> Any:
    broker, version = context.broker, context.head.version
    topics = await _topics(request, broker, version)
    if getattr(request, "include_topic_authorized_operations", False):
        for topic in topics:
            if topic["name"]:
                topic["topic_authorized_operations"] = ALL_ON_TOPIC
    asks_for_cluster = getattr(request, "include_cluster_authorized_operations", False)
    cache = broker.metadata_cache
    return await answer_of(
        sum(1 + len(topic["partitions"]) for topic in topics),
        context.head,
        cluster_authorized_operations=ALL_ON_CLUSTER if asks_for_cluster else NOT_ASKED,
        brokers=[
            {"node_id": known.broker_id, "host": known.host, "port": known.port, "rack": known.rack}
            for known in cache.brokers.values()
        ],
        cluster_id=cache.cluster_id,
        controller_id=cache.controller_id,
        topics=topics,
    )


async def _topics(request: Any, broker: BrokerServices, version: int) -> list[dict[str, Any]]:
    cache = broker.metadata_cache
    asked = request.topics
    if asked is None or (version == 0 and not asked):
        return [_known_topic(info, broker, version) for info in list(cache.topics.values())]
    may_create = broker.config.settings.auto_create_topics_enable and (
        version < FIRST_WITH_CREATION_FLAG or request.allow_auto_topic_creation
    )
    # As in Apache Kafka, a topic that stands there more than once is answered once.
    once = {(getattr(entry, "topic_id", None), entry.name): entry for entry in asked}.values()
    return list(await asyncio.gather(*(_topic(entry, broker, version, may_create) for entry in once)))


async def _topic(entry: Any, broker: BrokerServices, version: int, may_create: bool) -> dict[str, Any]:
    cache = broker.metadata_cache
    topic_id = getattr(entry, "topic_id", None)
    name = entry.name
    if version < FIRST_WITH_TOPIC_IDS and (name is None or topic_id not in (None, NO_TOPIC_ID)):
        return _refused(InvalidRequest.code, name or "", topic_id)
    if name is None or (topic_id not in (None, NO_TOPIC_ID) and not name):
        found = cache.name_of(topic_id) if topic_id is not None else None
        if found is None:
            return _refused(UnknownTopicId.code, None, topic_id)
        name = found
    info = cache.topic(name)
    if info is None and may_create and name not in INTERNAL_TOPICS:
        settings = broker.config.settings
        new = NewTopic(name, settings.num_partitions, settings.default_replication_factor)
        try:
            info = await broker.controller.ensure_topic(new, CREATION_WAIT_MS)
        except TopicAlreadyExists:
            return _refused(LeaderNotAvailable.code, name)
        except (InvalidTopic, InvalidReplicationFactor) as error:
            return _refused(error.code, name)
        except KafkaError:
            # Nothing was decided against the topic: let the client ask again.
            return _refused(LeaderNotAvailable.code, name)
    if info is None:
        try:
            check_topic_name(name)
        except InvalidTopic as error:
            return _refused(error.code, name)
        return _refused(UnknownTopicOrPartition.code, name)
    return _known_topic(info, broker, version)


def _refused(code: int, name: str | None, topic_id: uuid.UUID | None = None) -> dict[str, Any]:
    return {"error_code": code, "name": name, "topic_id": topic_id, "partitions": []}


def _known_topic(info: TopicInfo, broker: BrokerServices, version: int) -> dict[str, Any]:
    hide_offline = version < FIRST_WITH_OFFLINE_REPLICAS
    return {
        "error_code": NO_ERROR,
        "name": info.name,
        "topic_id": info.topic_id,
        "is_internal": info.internal,
        "partitions": [
            partition_view(broker.metadata_cache, info.name, number, partition, hide_offline=hide_offline)
            for number, partition in info.partitions.items()
        ],
    }
