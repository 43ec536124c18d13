"""CreatePartitions, versions 0 to 3: more partitions for a topic. Any broker takes the request."""

from __future__ import annotations

import asyncio
from typing import Any

from millrace.broker.errors import KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.CREATE_PARTITIONS
VERSIONS = range(4)


async def handle(request: Any, context: RequestContext) -> Any:
    timeout_ms = request.timeout.total_seconds() * 1000
    results = await asyncio.gather(
        *(_widen(topic, context.broker, timeout_ms, request.validate_only) for topic in request.topics)
    )
    return answer(API, context.head.version, results=results)


async def _widen(
    topic: Any, broker: BrokerServices, timeout_ms: float, validate_only: bool
) -> dict[str, Any]:
    assignment = None
    if topic.assignments is not None:
        assignment = [tuple(part.broker_ids) for part in topic.assignments]
    try:
        await broker.controller.create_partitions(
            topic.name, topic.count, assignment, timeout_ms, validate_only=validate_only
        )
    except KafkaError as error:
        broker.metrics.count_error(error.code)
        return {"name": topic.name, "error_code": error.code, "error_message": str(error)}
    return {"name": topic.name, "error_code": NO_ERROR}
