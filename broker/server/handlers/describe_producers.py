"""DescribeProducers, version 0: who writes to a partition, as its leader remembers it (KIP-664)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from millrace.broker.coordination.controller_client import check_topic_name
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer_of
from millrace.broker.server.context import BrokerServices, RequestContext

API = Api.DESCRIBE_PRODUCERS
VERSIONS = range(1)


async def handle(request: Any, context: RequestContext) -> Any:
    asked: defaultdict[str, dict[int, None]] = defaultdict(dict)  # each partition once
    for topic in request.topics:
        asked[topic.name].update(dict.fromkeys(map(int, topic.partition_indexes)))
    topics: list[dict[str, Any]] = [
        {"name": name, "partitions": [_partition(name, number, context.broker) for number in numbers]}
        for name, numbers in asked.items()
    ]
    partitions = [partition for topic in topics for partition in topic["partitions"]]
    count = sum(1 + len(partition.get("active_producers", ())) for partition in partitions)
    return await answer_of(count, context.head, topics=topics)


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
