"""DeleteRecords, versions 0 to 2: move a partition's start forward; whole segments before it are removed.

Offset -1 means the high watermark. As in Apache Kafka the records are out of reach at once, and their bytes
go when the last segment that holds any of them may go. A partition that stands in a request twice is
refused: what is deleted is gone, and which of the offsets was meant nobody can tell.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from typing import Any

from millrace.broker.errors import InvalidRequest, KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.replication.off_loop import slices
from millrace.broker.server.answers import NO_ERROR, answer_of, item_count
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.DELETE_RECORDS
VERSIONS = range(3)


async def handle(request: Any, context: RequestContext) -> Any:
    asked = [(topic.name, each) for topic in request.topics for each in topic.partitions]
    times = Counter((topic, each.partition_index) for topic, each in asked)
    deletions: list[asyncio.Task[dict[str, Any]]] = []
    try:
        async for some in slices(asked):  # all at once, as each may wait for followers
            deletions += [
                asyncio.create_task(
                    _delete(
                        topic,
                        each.partition_index,
                        each.offset,
                        request,
                        context.broker,
                        times[topic, each.partition_index] > 1,
                    )
                )
                for topic, each in some
            ]
        done = iter(await asyncio.gather(*deletions))
    finally:
        for deletion in deletions:
            deletion.cancel()
    topics = [
        {"name": topic.name, "partitions": list(islice(done, len(topic.partitions)))}
        for topic in request.topics
    ]
    return await answer_of(item_count(topics), context.head, topics=topics)


async def _delete(
    topic: str, partition: int, offset: int, request: Any, broker: BrokerServices, repeated: bool
) -> dict[str, Any]:
    timeout_ms = request.timeout.total_seconds() * 1000
    try:
        if repeated:
            raise InvalidRequest(f"{topic}-{partition} stands more than once in the request")
        low_watermark = await broker.replica_manager.delete_records(topic, partition, offset, timeout_ms)
    except KafkaError as error:
        return {"partition_index": partition, "low_watermark": -1, "error_code": error.code}
    return {"partition_index": partition, "low_watermark": low_watermark, "error_code": NO_ERROR}
