"""OffsetForLeaderEpoch, versions 2 to 4: where a leader epoch ended.

Readers ask to find out whether their history is still the leader's (KIP-320).
"""

from __future__ import annotations

from typing import Any

from millrace.broker.errors import KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.OFFSET_FOR_LEADER_EPOCH
VERSIONS = range(2, 5)


async def handle(request: Any, context: RequestContext) -> Any:
    topics = [
        {
            "topic": topic.topic,
            "partitions": [_look_up(topic.topic, asked, context.broker) for asked in topic.partitions],
        }
        for topic in request.topics
    ]
    return answer(API, context.head.version, topics=topics)


def _look_up(topic: str, asked: Any, broker: BrokerServices) -> dict[str, Any]:
    try:
        epoch, end_offset = broker.replica_manager.epoch_end(
            topic, asked.partition, asked.leader_epoch, asked.current_leader_epoch
        )
    except KafkaError as error:
        broker.metrics.count_error(error.code)
        return {"partition": asked.partition, "error_code": error.code}
    return {
        "partition": asked.partition,
        "error_code": NO_ERROR,
        "leader_epoch": epoch,
        "end_offset": end_offset,
    }
