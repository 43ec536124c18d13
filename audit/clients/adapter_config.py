"""What the adapters for other clients have in common: the audit's settings as keywords, and their checks.

Called by `kafka_python_producer`, `aiokafka_producer` and `client_producer`. Keywords are the `millrace.*`
keys of `producer` with underscores: `millrace_producer="AA@ewr"`, `millrace_window_ms=60_000`; and
`millrace_sequenced=False` for a count-only producer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from millrace.audit.clients.producer_config import KEYS, refuse_unknown
from millrace.audit.stream_reporter import OutgoingEvent, StreamReporter
from millrace.broker.errors import ConfigError

_log = logging.getLogger("millrace.audit.adapters")
_PREFIX = "millrace_"
_KEYS = {key.replace(".", "_"): key for key in KEYS}
_SEQUENCED = "millrace_sequenced"
_NOBODY_ANSWERS = (0, "0")


def open_reporter(keywords: dict[str, Any]) -> StreamReporter:
    """Take the audit's keywords out of a client's, and make the reporter. Raises ConfigError."""
    own = {name: keywords.pop(name) for name in list(keywords) if name.startswith(_PREFIX)}
    refuse_unknown(own, [*_KEYS, _SEQUENCED])
    sequenced = own.pop(_SEQUENCED, True)
    if not isinstance(sequenced, bool):
        raise ConfigError(_SEQUENCED, sequenced, "True, or False for a count-only producer")
    return StreamReporter({_KEYS[name]: value for name, value in own.items()}, sequenced=sequenced)


def check_client(keywords: Mapping[str, Any]) -> None:
    """Refuse what the counts could not be honest with. Raises ConfigError."""
    if keywords.get("transactional_id") is not None:
        raise ConfigError(
            "transactional_id", keywords["transactional_id"], "none: for transactions take AuditedProducer"
        )
    if "acks" in keywords and keywords["acks"] in _NOBODY_ANSWERS:
        raise ConfigError("acks", keywords["acks"], "all or 1: with 0 nobody says that a record arrived")


def fail_all(events: Iterable[OutgoingEvent]) -> None:
    """None of the events was sent."""
    for event in events:
        event.failed()


def log_topic_refusal(topic: str, reason: object) -> None:
    """The events topic is left to the cluster; it may be there, or made by the first event."""
    _log.warning("events topic %s was not created: %s", topic, reason)
