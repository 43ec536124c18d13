"""OffsetForLeaderEpoch, versions 2 to 4: where a leader epoch ended.

Readers ask to find out whether their history is still the leader's (KIP-320).
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from millrace.broker.errors import KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.replication.off_loop import slices
from millrace.broker.server.answers import NO_ERROR, answer_of, item_count
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.OFFSET_FOR_LEADER_EPOCH
VERSIONS = range(2, 5)


async def handle(request: Any, context: RequestContext) -> Any:
    asked = [(topic.topic, each) for topic in request.topics for each in topic.partitions]
    found: list[dict[str, Any]] = []
    async for some in slices(asked):
        found += [_look_up(topic, each, context.broker) for topic, each in some]
    by_partition = iter(found)
    topics = [
        {"topic": topic.topic, "partitions": list(islice(by_partition, len(topic.partitions)))}
        for topic in request.topics
    ]
    return await answer_of(item_count(topics), context.head, topics=topics)


def _look_up(topic: str, asked: Any, broker: BrokerServices) -> dict[str, Any]:
    try:
        epoch, end_offset = broker.replica_manager.epoch_end(
            topic, asked.partition, asked.leader_epoch, asked.current_leader_epoch
        )
    except KafkaError as error:
        return {"partition": asked.partition, "error_code": error.code}
    return {
        "partition": asked.partition,
        "error_code": NO_ERROR,
        "leader_epoch": epoch,
        "end_offset": end_offset,
    }
