"""CreateTopics, versions 2 to 7.

Any broker takes the request (Apache Kafka: the controller only): the change is a write to ZooKeeper that the
controller acts upon, wherever it is. One replica for each partition; a higher replication factor is refused.
The settings in the answer (version 5 on) are those set for the topic; defaults are left to DescribeConfigs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from millrace.broker.coordination.controller_client import NewTopic
from millrace.broker.errors import InvalidRequest, KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.CREATE_TOPICS
VERSIONS = range(2, 8)

DEFAULT_COUNT = -1
DYNAMIC_TOPIC_CONFIG = 1


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
            assignment = broker.controller.plan_topic(new)
            topic_id, partition_count = None, len(assignment.partitions)
        else:
            info = await broker.controller.create_topic(new, timeout_ms)
            topic_id, partition_count = info.topic_id, len(info.partitions)
    except KafkaError as error:
        broker.metrics.count_error(error.code)
        return {"name": topic.name, "error_code": error.code, "error_message": str(error), "configs": []}
    return {
        "name": topic.name,
        "topic_id": topic_id,
        "error_code": NO_ERROR,
        "num_partitions": partition_count,
        "replication_factor": 1,
        "configs": [
            {"name": name, "value": value, "config_source": DYNAMIC_TOPIC_CONFIG}
            for name, value in new.config.items()
        ],
    }


def _new_topic(topic: Any, broker: BrokerServices) -> NewTopic:
    settings = broker.config.settings
    assignment = {part.partition_index: tuple(part.broker_ids) for part in topic.assignments}
    if assignment and (topic.num_partitions != DEFAULT_COUNT or topic.replication_factor != DEFAULT_COUNT):
        raise InvalidRequest("an assignment of replicas leaves no room for counts: both must be -1")
    count, factor = topic.num_partitions, topic.replication_factor
    return NewTopic(
        topic.name,
        settings.num_partitions if count == DEFAULT_COUNT else count,
        settings.default_replication_factor if factor == DEFAULT_COUNT else factor,
        assignment,
        {entry.name: entry.value for entry in topic.configs if entry.value is not None},
    )
