"""AddPartitionsToTxn, versions 0 to 5: a producer says which partitions its transaction will write to.

Versions 0-3 come from clients and carry one transaction. Versions 4 and 5 come from brokers and carry
several; with `verify_only` nothing is added: a leader asks whether its partition is in the transaction
(KIP-890). A partition that does not exist refuses the whole transaction.
`server/transaction_markers.py` is the other side of version 4.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.answers import answer
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.group_requests import partition_exists
from millrace.broker.server.transaction_requests import fenced_code, partitions_of, producer_of
from millrace.broker.transactions.values import ProducerIdentity

API = Api.ADD_PARTITIONS_TO_TXN
VERSIONS = range(6)

_PRODUCER_FENCED_FROM = 2
_SEVERAL_FROM = 4


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    if version < _SEVERAL_FROM:
        errors = await _transaction(
            request.v3_and_below_transactional_id,
            ProducerIdentity(int(request.v3_and_below_producer_id), int(request.v3_and_below_producer_epoch)),
            partitions_of(request.v3_and_below_topics),
            False,
            context,
        )
        return answer(API, version, results_by_topic_v3_and_below=_results(errors, version))
    results = await asyncio.gather(
        *(
            _transaction(
                each.transactional_id,
                producer_of(each),
                partitions_of(each.topics),
                each.verify_only,
                context,
            )
            for each in request.transactions
        )
    )
    return answer(
        API,
        version,
        results_by_transaction=[
            {"transactional_id": each.transactional_id, "topic_results": _results(errors, version)}
            for each, errors in zip(request.transactions, results, strict=True)
        ],
    )


async def _transaction(
    transactional_id: str,
    producer: ProducerIdentity,
    partitions: list[TopicPartition],
    verify_only: bool,
    context: RequestContext,
) -> dict[TopicPartition, ErrorCode]:
    broker: BrokerServices = context.broker
    missing = {partition for partition in partitions if not partition_exists(context, *partition)}
    if missing:
        return {
            partition: ErrorCode.unknown_topic_or_partition
            if partition in missing
            else ErrorCode.operation_not_attempted
            for partition in partitions
        }
    if verify_only:
        return await broker.transactions.verify(transactional_id, producer, partitions)
    error = await broker.transactions.add_partitions(transactional_id, producer, partitions)
    return dict.fromkeys(partitions, error)


def _results(errors: dict[TopicPartition, ErrorCode], version: int) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, number), error in errors.items():
        code = fenced_code(error, version, _PRODUCER_FENCED_FROM)
        topics.setdefault(topic, []).append({"partition_index": number, "partition_error_code": code})
    return [{"name": topic, "results_by_partition": results} for topic, results in topics.items()]
