"""Makes sure that the events topic exists with the settings that cumulative events need.

Called by `producer` from its reporting thread, before the first event. `compact` keeps the newest report of
every window, `delete` ends it after the retention; one partition keeps a producer's reports in their order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from enum import Enum
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.broker.protocol.system_topics import AUDIT_TOPIC_SETTINGS

_log = logging.getLogger("millrace.audit.clients.events_topic")

_CONNECTION_KEYS = (
    "bootstrap.servers",
    "metadata.broker.list",
    "client.id",
    "client.dns.lookup",
    "log_level",
)
_CONNECTION_PREFIXES = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.", "https.",
                        "socket.", "broker.address.", "oauth")  # fmt: skip
_RETRY_LATER = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_CONTROLLER,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
    }
)


class TopicState(Enum):
    """READY: it is there, or the cluster must care for it. UNANSWERED: reached, but the topic was not made in
    time. UNREACHABLE: nobody could be asked."""

    READY = "ready"
    UNANSWERED = "unanswered"
    UNREACHABLE = "unreachable"


def connection_settings(client: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a producer's settings that says how to reach the cluster."""
    return {
        key: value
        for key, value in client.items()
        if key in _CONNECTION_KEYS or key.startswith(_CONNECTION_PREFIXES)
    }


def ensure_events_topic(client: Mapping[str, Any], topic: str, timeout_s: float) -> TopicState:
    """Create the topic where it is missing. Never raises for what the cluster answers.

    READY also when it can only be left to the cluster: no right to create, no such request.
    """
    admin = AdminClient(connection_settings(client))
    try:
        if topic in admin.list_topics(timeout=timeout_s).topics:
            return TopicState.READY
    except KafkaException as unanswered:
        _log.warning("events topic %s cannot be reached yet, counts wait: %s", topic, unanswered)
        return TopicState.UNREACHABLE
    for replication_factor in (-1, 1):
        new = NewTopic(
            topic, num_partitions=1, replication_factor=replication_factor, config=AUDIT_TOPIC_SETTINGS
        )
        try:
            error = _refusal(admin.create_topics([new], request_timeout=timeout_s)[topic], timeout_s)
            if error is None or error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return TopicState.READY
            if error.code() in _RETRY_LATER:
                return TopicState.UNANSWERED
            if error.code() != KafkaError.INVALID_REPLICATION_FACTOR:
                _log.warning("events topic %s was not created: %s", topic, error.str())
                return TopicState.READY
        except TimeoutError:
            return TopicState.UNANSWERED
    return TopicState.READY


def _refusal(answer: Future[None], timeout_s: float) -> KafkaError | None:
    """Why the cluster did not do what was asked. Raises TimeoutError.

    Asks for the exception instead of having it raised: a raised one would keep the asking frame, and the
    admin client in it, until librdkafka's own thread lets go of the answer. A client that is freed there ends
    the process (`rd_kafka_destroy` asserts that it is called from elsewhere).
    """
    exception = answer.exception(timeout_s)
    if exception is None:
        return None
    if not isinstance(exception, KafkaException):
        raise RuntimeError(f"the answer about the events topic was not understood: {exception}")
    refusal: KafkaError = exception.args[0]
    return refusal
