"""ElectLeaders, versions 0 to 2 (KIP-460): the preferred leaders, or any live ones at the price of data.

Any broker takes the request. Version 0 knows preferred elections only. Without a list of partitions all are
meant, and only those that needed an election are answered.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.coordination.controller import PREFERRED, UNCLEAN
from millrace.broker.errors import ElectionNotNeeded, InvalidRequest, KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.answers import NO_ERROR, answer, answer_of
from millrace.broker.server.context import RequestContext

API = Api.ELECT_LEADERS
VERSIONS = range(3)

KINDS = {0: PREFERRED, 1: UNCLEAN}


async def handle(request: Any, context: RequestContext) -> Any:
    broker, version = context.broker, context.head.version
    kind = KINDS.get(getattr(request, "election_type", 0))
    if kind is None:
        return answer(API, version, error_code=InvalidRequest.code)
    asked = request.topic_partitions
    cache = broker.metadata_cache
    if asked is None:
        keys = [(name, number) for name, info in cache.topics.items() for number in info.partitions]
    else:
        keys = [(topic.topic, number) for topic in asked for number in topic.partitions]
    results = await broker.elections.elect(kind, keys, request.timeout.total_seconds() * 1000)
    if asked is None:
        results = {key: error for key, error in results.items() if not isinstance(error, ElectionNotNeeded)}
    return await answer_of(len(results), context.head, replica_election_results=_by_topic(results))


def _by_topic(results: dict[TopicPartition, KafkaError | None]) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, number), error in results.items():
        topics.setdefault(topic, []).append(
            {
                "partition_id": number,
                "error_code": NO_ERROR if error is None else error.code,
                "error_message": None if error is None else str(error),
            }
        )
    return [{"topic": topic, "partition_result": parts} for topic, parts in topics.items()]
