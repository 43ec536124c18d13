"""One line for the operator, now and then, about batches that a producer may not write.

A damaged or lying batch is answered with its error code and counted by it; who sends such a thing is worth
knowing before its owner asks. Refusals that clients meet in normal operation (a moved leader, an unknown
topic, a full disk that is reported elsewhere) stay out of the log. Called by `handlers/produce.py`.
"""

from __future__ import annotations

import time

import structlog

from millrace.broker.errors import (
    CorruptMessage,
    InvalidRecord,
    InvalidTimestamp,
    KafkaError,
    RecordListTooLarge,
    RecordTooLarge,
    UnsupportedCompressionType,
    UnsupportedForMessageFormat,
)
from millrace.broker.protocol.frames import RequestHead
from millrace.broker.telemetry.logs import RateLimit

log = structlog.get_logger("millrace.broker")

WORTH_TELLING = frozenset(
    error.code
    for error in (
        CorruptMessage,
        InvalidRecord,
        InvalidTimestamp,
        RecordTooLarge,
        RecordListTooLarge,
        UnsupportedCompressionType,
        UnsupportedForMessageFormat,
    )
)

_complaints = RateLimit(time.monotonic)


def note(topic: str, partition: int, error: KafkaError, head: RequestHead, client_address: str) -> None:
    """A batch was refused with `error`; says so where it points at a producer that needs looking after."""
    if error.code not in WORTH_TELLING:
        return
    held_back = _complaints.take(error.name)
    if held_back is not None:
        log.warning(
            "a batch was refused; look after its producer",
            topic=topic,
            partition=partition,
            error=error.name,
            reason=str(error),
            client_id=head.client_id,
            client=client_address,
            held_back=held_back,
        )
