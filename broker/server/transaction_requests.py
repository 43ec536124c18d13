"""What the handlers of the transaction APIs read from a request, and say, in the same way."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.transactions.values import ProducerIdentity


def producer_of(request: Any) -> ProducerIdentity:
    return ProducerIdentity(int(request.producer_id), int(request.producer_epoch))


def fenced_code(error: ErrorCode, version: int, known_from: int) -> ErrorCode:
    """PRODUCER_FENCED is younger than the APIs (KIP-588): clients before it know INVALID_PRODUCER_EPOCH."""
    if error is ErrorCode.producer_fenced and version < known_from:
        return ErrorCode.invalid_producer_epoch
    return error


def partitions_of(topics: Any) -> list[TopicPartition]:
    """The partitions of a request's topics, each once, in order."""
    return list(dict.fromkeys((topic.name, int(number)) for topic in topics for number in topic.partitions))
