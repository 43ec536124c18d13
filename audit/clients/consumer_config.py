"""The audited consumer's settings: the `millrace.*` keys taken out of confluent-kafka's dictionary.

Called by `consumer`. Everything else is confluent-kafka's and passes through, except that librdkafka does
not store offsets by itself: `stores_offsets` says whether the consumer does that for it after each report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.audit.clients.producer_config import refuse_unknown
from millrace.audit.contract.event_json import MAX_TEXT_SIZE
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.system_topics import AUDIT_TOPIC

PREFIX = "millrace."
KEYS = (
    "millrace.window.ms",
    "millrace.report.interval.ms",
    "millrace.report.timeout.ms",
    "millrace.audit.topic",
    "millrace.content.digest",
)
_MAX_MS = 1 << 40
_TRUE, _FALSE = ("true", "1"), ("false", "0", "none")


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """The consumer's own settings, and `client`: what confluent-kafka gets."""

    group: str
    window_ms: int
    report_interval_ms: int
    report_timeout_ms: int
    events_topic: str
    content: bool
    stores_offsets: bool
    client: dict[str, Any] = field(repr=False)


def read_consumer_config(settings: Mapping[str, Any]) -> ConsumerConfig:
    """Split and check the settings; raises ConfigError naming the key."""
    own = {key: value for key, value in settings.items() if key.startswith(PREFIX)}
    client = {key: value for key, value in settings.items() if not key.startswith(PREFIX)}
    refuse_unknown(own, KEYS)
    stores_offsets = _flag("enable.auto.offset.store", client.get("enable.auto.offset.store", True))
    client["enable.auto.offset.store"] = False
    return ConsumerConfig(
        group=_name("group.id", client.get("group.id")),
        window_ms=_milliseconds(own, "millrace.window.ms", 60_000),
        report_interval_ms=_milliseconds(own, "millrace.report.interval.ms", 5_000),
        report_timeout_ms=_milliseconds(own, "millrace.report.timeout.ms", 30_000),
        events_topic=_name("millrace.audit.topic", own.pop("millrace.audit.topic", AUDIT_TOPIC)),
        content=_flag("millrace.content.digest", own.pop("millrace.content.digest", False)),
        stores_offsets=stores_offsets,
        client=client,
    )


def _milliseconds(own: dict[str, Any], key: str, default: int) -> int:
    value = own.pop(key, default)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if not 1 <= number <= _MAX_MS:
        raise ConfigError(key, value, "a positive number of milliseconds")
    return number


def _flag(key: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in (*_TRUE, *_FALSE):
        raise ConfigError(key, value, "true or false")
    return text in _TRUE


def _name(key: str, value: Any) -> str:
    """A group or topic, as an event can carry it."""
    if not isinstance(value, str) or not value.isprintable() or not 1 <= len(value.encode()) <= MAX_TEXT_SIZE:
        raise ConfigError(key, value, f"a printable name of 1 to {MAX_TEXT_SIZE} bytes")
    return value
