"""DescribeTransactions, version 0: what a coordinator knows of transactional ids (KIP-664)."""

from __future__ import annotations

import datetime
from typing import Any

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext
from millrace.broker.transactions.markers import partitions_by_topic
from millrace.broker.transactions.values import TransactionDescription

API = Api.DESCRIBE_TRANSACTIONS
VERSIONS = range(1)

_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)


async def handle(request: Any, context: RequestContext) -> Any:
    transactions = context.broker.transactions
    return answer(
        API,
        context.head.version,
        transaction_states=[_described(transactions.describe(each)) for each in request.transactional_ids],
    )


def _described(transaction: TransactionDescription) -> dict[str, Any]:
    return {
        "error_code": transaction.error,
        "transactional_id": transaction.transactional_id,
        "transaction_state": transaction.state,
        "transaction_timeout": transaction.timeout_ms,
        # -1 where none has ever begun: kio writes it as the moment before 1970.
        "transaction_start_time": _EPOCH + datetime.timedelta(milliseconds=transaction.started_ms),
        "producer_id": transaction.producer.producer_id,
        "producer_epoch": transaction.producer.epoch,
        "topics": [
            {"topic": topic, "partitions": numbers}
            for topic, numbers in partitions_by_topic(transaction.partitions).items()
        ],
    }
