"""What an exception says that came out of a call of confluent-kafka's client.

Callbacks of the application run within those calls, and so do handlers of signals: what they raise comes out
of the call in place of the client's answer, a KafkaException of their own too, which may hold anything.
"""

from __future__ import annotations

from confluent_kafka import KafkaError


def kafka_error(error: BaseException) -> KafkaError | None:
    """The KafkaError that an exception carries, None for one that carries none."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, KafkaError) else None


def is_fatal(error: BaseException) -> bool:
    """Whether the client works no more."""
    carried = kafka_error(error)
    return carried is not None and bool(carried.fatal() or carried.code() == KafkaError._FATAL)
