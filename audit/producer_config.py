"""The audited producer's settings: the `millrace.*` keys taken out of confluent-kafka's dictionary.

Called by `producer`. Everything else in the dictionary is confluent-kafka's and passes through; only what the
counts depend on is checked: every record needs a delivery report, and acknowledgement by all replicas is the
default, not a duty.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.audit.header import InvalidIdentity, encode_producer_name
from millrace.broker.errors import ConfigError

PREFIX = "millrace."
DEFAULT_EVENTS_TOPIC = "millrace.audit"
_ACKS_KEYS = ("acks", "request.required.acks")


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """The producer's own settings, and `client`: what confluent-kafka gets."""

    producer: str
    application: str
    host: str
    datacenter: str
    window_ms: int
    report_interval_ms: int
    lease_ms: int
    events_topic: str
    journal: str | None
    name_in_header: bool
    client: dict[str, Any]


def read_config(settings: Mapping[str, Any]) -> ProducerConfig:
    """Split and check the settings; raises ConfigError naming the key."""
    own = {key: value for key, value in settings.items() if key.startswith(PREFIX)}
    client = {key: value for key, value in settings.items() if not key.startswith(PREFIX)}
    _check_client(client)
    host = socket.gethostname()
    application = str(own.pop("millrace.application", None) or _script_name())
    report_interval_ms = _positive(own, "millrace.report.interval.ms", 10_000)
    journal = own.pop("millrace.journal", None)
    config = ProducerConfig(
        producer=_name(own.pop("millrace.producer", None) or f"{application}@{host}"),
        application=application,
        host=host,
        datacenter=str(own.pop("millrace.datacenter", "")),
        window_ms=_positive(own, "millrace.window.ms", 60_000),
        report_interval_ms=report_interval_ms,
        lease_ms=_positive(own, "millrace.lease.ms", max(60_000, 3 * report_interval_ms)),
        events_topic=str(own.pop("millrace.audit.topic", DEFAULT_EVENTS_TOPIC)),
        journal=None if journal is None else os.fspath(journal),
        name_in_header=_name_in_header(own.pop("millrace.identity", "full")),
        client=client,
    )
    for key, value in own.items():
        raise ConfigError(key, value, "no such setting; those of the audited producer are in its module")
    return config


def _check_client(client: dict[str, Any]) -> None:
    if client.get("transactional.id"):
        raise ConfigError(
            "transactional.id", client["transactional.id"], "no transactions in an audited producer"
        )
    if str(client.get("delivery.report.only.error", False)).lower() == "true":
        raise ConfigError(
            "delivery.report.only.error", True, "false: acknowledged records are counted by delivery reports"
        )
    acks = next((client[key] for key in _ACKS_KEYS if key in client), None)
    if acks is None:
        client["acks"] = "all"
    if acks is None or str(acks) in ("all", "-1"):
        client.setdefault("enable.idempotence", True)


def _positive(own: dict[str, Any], key: str, default: int) -> int:
    value = own.pop(key, default)
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ConfigError(key, value, "a positive number of milliseconds")
    return number


def _name(value: Any) -> str:
    try:
        encode_producer_name(str(value))
    except InvalidIdentity as error:
        raise ConfigError(
            "millrace.producer", str(value)[:40], f"a name that fits a header: {error}"
        ) from error
    return str(value)


def _name_in_header(value: Any) -> bool:
    if value not in ("full", "compact"):
        raise ConfigError("millrace.identity", value, "full or compact")
    return bool(value == "full")


def _script_name() -> str:
    """The running script without its suffix; `python` in an interactive session."""
    return Path(sys.argv[0]).stem or "python"
