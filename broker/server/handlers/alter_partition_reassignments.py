"""AlterPartitionReassignments, version 0 (KIP-455): move partitions to other brokers, or call that off.

Any broker takes the request. It answers when the move stands in ZooKeeper; how far it has come is for
ListPartitionReassignments.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.errors import InvalidRequest, KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.ALTER_PARTITION_REASSIGNMENTS
VERSIONS = range(1)


async def handle(request: Any, context: RequestContext) -> Any:
    version, broker = context.head.version, context.broker
    timeout_ms = request.timeout.total_seconds() * 1000
    responses = [await _alter(topic, broker, timeout_ms) for topic in request.topics]
    return answer(API, version, error_message=None, responses=responses)


async def _alter(topic: Any, broker: BrokerServices, timeout_ms: float) -> dict[str, Any]:
    targets = {
        part.partition_index: None if part.replicas is None else tuple(part.replicas)
        for part in topic.partitions
    }
    if len(targets) < len(topic.partitions):
        refused = InvalidRequest(f"a partition of {topic.name} stands more than once in the request")
        results: dict[int, KafkaError | None] = dict.fromkeys(targets, refused)
    else:
        results = await broker.reassignments.alter(topic.name, targets, timeout_ms)
    return {
        "name": topic.name,
        "partitions": [
            {
                "partition_index": number,
                "error_code": NO_ERROR if error is None else error.code,
                "error_message": None if error is None else str(error),
            }
            for number, error in results.items()
        ],
    }
