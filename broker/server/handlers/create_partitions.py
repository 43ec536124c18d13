"""CreatePartitions, versions 0 to 3: more partitions for a topic. Any broker takes the request. A topic that
stands there more than once is refused, once, as in Apache Kafka."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from millrace.broker.errors import InvalidRequest, KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.CREATE_PARTITIONS
VERSIONS = range(4)


async def handle(request: Any, context: RequestContext) -> Any:
    timeout_ms = request.timeout.total_seconds() * 1000
    times = Counter(topic.name for topic in request.topics)
    by_name = {topic.name: topic for topic in request.topics}
    results = await asyncio.gather(
        *(
            _widen(topic, context.broker, timeout_ms, request.validate_only, times[name] > 1)
            for name, topic in by_name.items()
        )
    )
    return answer(API, context.head.version, results=results)


async def _widen(
    topic: Any, broker: BrokerServices, timeout_ms: float, validate_only: bool, repeated: bool
) -> dict[str, Any]:
    assignment = None
    if topic.assignments is not None:
        assignment = [tuple(part.broker_ids) for part in topic.assignments]
    try:
        if repeated:
            raise InvalidRequest(f"topic {topic.name} stands more than once in the request")
        await broker.controller.create_partitions(
            topic.name, topic.count, assignment, timeout_ms, validate_only=validate_only
        )
    except KafkaError as error:
        return {"name": topic.name, "error_code": error.code, "error_message": str(error)}
    return {"name": topic.name, "error_code": NO_ERROR}
