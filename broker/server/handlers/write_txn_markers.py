"""WriteTxnMarkers, version 1: a transaction coordinator has transactions ended in partitions led here.

Also what an operator's tool sends to abort a hanging transaction. The work is in
`server/transaction_markers.py`. Version 0, which Apache Kafka 3.9 still speaks, has no schema in kio; KIP-896
has dropped it.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext
from millrace.broker.server.transaction_requests import producer_of
from millrace.broker.transactions.markers import Marker, Outcome

API = Api.WRITE_TXN_MARKERS
VERSIONS = range(1, 2)


async def handle(request: Any, context: RequestContext) -> Any:
    markers = [
        Marker(
            "",  # the coordinator's own affair
            producer_of(each),
            int(each.coordinator_epoch),
            bool(each.transaction_result),
            frozenset(
                (topic.name, int(number)) for topic in each.topics for number in topic.partition_indexes
            ),
        )
        for each in request.markers
    ]
    outcomes = await context.broker.marker_writer.write_here(markers)
    by_producer: dict[int, Outcome] = {}
    for marker, outcome in zip(markers, outcomes, strict=True):
        by_producer.setdefault(marker.producer.producer_id, {}).update(outcome)
    return answer(
        API,
        context.head.version,
        markers=[
            {"producer_id": producer_id, "topics": _topics(outcome)}
            for producer_id, outcome in by_producer.items()
        ],
    )


def _topics(outcome: Outcome) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, number), error in sorted(outcome.items(), key=lambda item: item[0]):
        topics.setdefault(topic, []).append({"partition_index": number, "error_code": ErrorCode(error)})
    return [{"name": topic, "partitions": partitions} for topic, partitions in topics.items()]
