"""DeleteRecords, for tests in which a log begins later than it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.controller_requests import refusal, server_timeout
from millrace.broker.errors import LeaderNotAvailable
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

VERSIONS = (1, 2)


async def delete_records(cluster: Cluster, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Let partitions begin at the offsets given (-1: at the high watermark); the new first offsets."""
    lows: dict[TopicPartition, int] = {}

    async def attempt() -> None:
        missing = {key: offset for key, offset in before.items() if key not in lows}
        view = await cluster.metadata(sorted({topic for topic, _ in missing}))
        for node_id, keys in view.by_leader(missing).items():
            if node_id is None:
                raise LeaderNotAvailable(f"{cluster}: {keys[0][0]}-{keys[0][1]} has no leader now")
            await _delete_at(cluster, node_id, {key: missing[key] for key in keys}, lows)

    await cluster.retrying(attempt)
    return lows


async def _delete_at(
    cluster: Cluster,
    node_id: int,
    before: Mapping[TopicPartition, int],
    lows: dict[TopicPartition, int],
) -> None:
    version = await cluster.api_version(Api.DELETE_RECORDS, *VERSIONS, node_id)
    schema = request_schema(Api.DELETE_RECORDS, version)
    by_topic: dict[str, list[Any]] = {}
    for (topic, partition), offset in before.items():
        part = schema.DeleteRecordsPartition(partition_index=partition, offset=offset)
        by_topic.setdefault(topic, []).append(part)
    topics = tuple(
        schema.DeleteRecordsTopic(name=topic, partitions=tuple(parts)) for topic, parts in by_topic.items()
    )
    request = schema.DeleteRecordsRequest(topics=topics, timeout=server_timeout(cluster))
    answer = await cluster.request(request, node_id=node_id)
    for topic in answer.topics:
        for part in topic.partitions:
            if part.error_code:
                raise refusal(cluster, f"topic {topic.name}-{part.partition_index}", part)
            lows[str(topic.name), int(part.partition_index)] = int(part.low_watermark)
