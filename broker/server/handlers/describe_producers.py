"""DescribeProducers, version 0: who writes to a partition, as its leader remembers it (KIP-664)."""

from __future__ import annotations

from typing import Any

from millrace.broker.coordination.controller_client import check_topic_name
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.DESCRIBE_PRODUCERS
VERSIONS = range(1)


async def handle(request: Any, context: RequestContext) -> Any:
    return answer(
        API,
        context.head.version,
        topics=[
            {
                "name": topic.name,
                "partitions": [
                    _partition(topic.name, int(number), context.broker) for number in topic.partition_indexes
                ],
            }
            for topic in request.topics
        ],
    )


def _partition(topic: str, number: int, broker: BrokerServices) -> dict[str, Any]:
    try:
        check_topic_name(topic)
        local = broker.replica_manager.leader_of(topic, number)
    except KafkaError as error:
        return {"partition_index": number, "error_code": error.code, "error_message": str(error)}
    return {
        "partition_index": number,
        "error_code": NO_ERROR,
        "active_producers": [
            {
                "producer_id": producer_id,
                "producer_epoch": entry.epoch,
                "last_sequence": entry.last_sequence,
                "last_timestamp": entry.last_timestamp_ms,
                "coordinator_epoch": entry.coordinator_epoch,
                "current_txn_start_offset": entry.transaction_start_offset,
            }
            for producer_id, entry in list(local.log.producers.entries.items())
        ],
    }
