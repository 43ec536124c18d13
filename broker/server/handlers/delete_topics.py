"""DeleteTopics, versions 1 to 6: by name, and by id from version 6 on.

Any broker takes the request; it waits until the controller has removed the topic. Internal topics may be
deleted here as in Apache Kafka, which leaves that to ACLs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from millrace.broker.errors import KafkaError, TopicDeletionDisabled, UnknownTopicId
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.DELETE_TOPICS
VERSIONS = range(1, 7)

FIRST_WITH_TOPIC_IDS = 6


async def handle(request: Any, context: RequestContext) -> Any:
    version, broker = context.head.version, context.broker
    if version >= FIRST_WITH_TOPIC_IDS:
        asked = [(topic.name, topic.topic_id) for topic in request.topics]
    else:
        asked = [(name, None) for name in request.topic_names]
    timeout_ms = request.timeout.total_seconds() * 1000
    responses = await asyncio.gather(
        *(_delete(name, topic_id, broker, timeout_ms) for name, topic_id in asked)
    )
    return answer(API, version, responses=responses)


async def _delete(
    name: str | None, topic_id: Any, broker: BrokerServices, timeout_ms: float
) -> dict[str, Any]:
    result = {"name": name, "topic_id": topic_id, "error_code": NO_ERROR}
    try:
        if not broker.config.settings.delete_topic_enable:
            raise TopicDeletionDisabled("delete.topic.enable is false on this broker")
        asked_id = topic_id if name is None else None
        if name is None:
            name = broker.metadata_cache.name_of(topic_id)
            if name is None:
                raise UnknownTopicId(f"there is no topic with id {topic_id}")
        deleted_id = await broker.controller.delete_topic(name, timeout_ms, asked_id)
    except KafkaError as error:
        return result | {"error_code": error.code, "error_message": str(error)}
    return result | {"name": name, "topic_id": deleted_id}
