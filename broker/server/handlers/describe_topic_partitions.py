"""DescribeTopicPartitions, version 0 (KIP-966): topics with their partitions, page by page.

Topics come in the order of their names, all of them when none are named. At most
`response_partition_limit` partitions (and never more than `MOST_PARTITIONS`) are in one answer; `next_cursor`
says where the next begins. There are no eligible leader replicas here: those fields are empty (null, which
the schema allows, breaks the Java admin client). There is no authorizer: whatever can be done to a topic may
be, and nobody has to ask for that to be told.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.coordination.controller_client import check_topic_name
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import InvalidRequest, InvalidTopic, UnknownTopicOrPartition
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.operations import ALL_ON_TOPIC
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import RequestContext
from millrace.broker.server.topic_view import partition_view

API = Api.DESCRIBE_TOPIC_PARTITIONS
VERSIONS = range(1)

MOST_PARTITIONS = 2_000
"""As Kafka's `max.request.partition.size.limit`."""


async def handle(request: Any, context: RequestContext) -> Any:
    cache, cursor = context.broker.metadata_cache, request.cursor
    names = sorted({topic.name for topic in request.topics} or cache.topics)
    first = 0
    if cursor is not None:
        if cursor.partition_index < 0:
            # The answer has no field for an error of the whole request.
            refused = [{"error_code": InvalidRequest.code, "name": name} for name in names]
            return answer(API, context.head.version, topics=refused, next_cursor=None)
        names = [name for name in names if name >= cursor.topic_name]
        if names and names[0] == cursor.topic_name:
            first = cursor.partition_index
    room = max(min(request.response_partition_limit, MOST_PARTITIONS), 1)
    topics: list[dict[str, Any]] = []
    next_cursor = None
    for name in names:
        if room <= 0:
            next_cursor = {"topic_name": name, "partition_index": first}
            break
        entry, rest = _topic(cache, name, first, room)
        topics.append({**entry, "topic_authorized_operations": ALL_ON_TOPIC})
        if rest is not None:
            next_cursor = {"topic_name": name, "partition_index": rest}
            break
        room -= len(entry["partitions"])
        first = 0
    return answer(API, context.head.version, topics=topics, next_cursor=next_cursor)


def _topic(cache: MetadataCache, name: str, first: int, room: int) -> tuple[dict[str, Any], int | None]:
    """Partitions from `first` on, at most `room` of them, and the number of the one after them, if any."""
    info = cache.topic(name)
    if info is None:
        code = UnknownTopicOrPartition.code
        try:
            check_topic_name(name)
        except InvalidTopic as error:
            code = error.code
        return {"error_code": code, "name": name, "partitions": []}, None
    numbers = sorted(number for number in info.partitions if number >= first)
    shown, rest = numbers[:room], numbers[room:]
    entry = {
        "error_code": NO_ERROR,
        "name": name,
        "topic_id": info.topic_id,
        "is_internal": info.internal,
        "partitions": [
            {
                **partition_view(cache, name, number, info.partitions[number]),
                "eligible_leader_replicas": (),
                "last_known_elr": (),
            }
            for number in shown
        ],
    }
    return entry, rest[0] if rest else None
