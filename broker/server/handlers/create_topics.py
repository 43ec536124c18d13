"""CreateTopics, versions 2 to 7.

Any broker takes the request (Apache Kafka: the controller only): the change is a write to ZooKeeper that the
controller acts upon, wherever it is. A replication factor may be as high as brokers are alive.
The answer (version 5 on) has every setting of the topic, with where its value comes from.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from millrace.broker.coordination.controller_client import NewTopic
from millrace.broker.errors import InvalidConfig, InvalidRequest, KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.broker_settings import describe_topic
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.CREATE_TOPICS
VERSIONS = range(2, 8)

DEFAULT_COUNT = -1


async def handle(request: Any, context: RequestContext) -> Any:
    repeated = {name for name, count in Counter(topic.name for topic in request.topics).items() if count > 1}
    timeout_ms = request.timeout.total_seconds() * 1000
    topics = await asyncio.gather(
        *(
            _create(topic, context.broker, timeout_ms, request.validate_only, topic.name in repeated)
            for topic in request.topics
        )
    )
    return answer(API, context.head.version, topics=topics)


async def _create(
    topic: Any, broker: BrokerServices, timeout_ms: float, validate_only: bool, repeated: bool
) -> dict[str, Any]:
    try:
        if repeated:
            raise InvalidRequest(f"topic {topic.name} stands more than once in the request")
        new = _new_topic(topic, broker)
        if validate_only:
            planned = broker.controller.plan_topic(new)
            topic_id, replicas = None, list(planned.partitions.values())
        else:
            info = await broker.controller.create_topic(new, timeout_ms)
            topic_id, replicas = info.topic_id, [part.replicas for part in info.partitions.values()]
    except KafkaError as error:
        return {"name": topic.name, "error_code": error.code, "error_message": str(error), "configs": []}
    return {
        "name": topic.name,
        "topic_id": topic_id,
        "error_code": NO_ERROR,
        "num_partitions": len(replicas),
        "replication_factor": len(replicas[0]),
        "configs": describe_topic(new.config, broker),
    }


def _new_topic(topic: Any, broker: BrokerServices) -> NewTopic:
    settings = broker.config.settings
    assignment = {part.partition_index: tuple(part.broker_ids) for part in topic.assignments}
    if assignment and (topic.num_partitions != DEFAULT_COUNT or topic.replication_factor != DEFAULT_COUNT):
        raise InvalidRequest("an assignment of replicas leaves no room for counts: both must be -1")
    without_value = [entry.name for entry in topic.configs if entry.value is None]
    if without_value:
        raise InvalidConfig(f"no value given: {', '.join(without_value)}")
    count, factor = topic.num_partitions, topic.replication_factor
    return NewTopic(
        topic.name,
        settings.num_partitions if count == DEFAULT_COUNT else count,
        settings.default_replication_factor if factor == DEFAULT_COUNT else factor,
        assignment,
        {entry.name: entry.value for entry in topic.configs},
    )
