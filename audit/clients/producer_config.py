"""The audited producer's settings: the `millrace.*` keys taken out of confluent-kafka's dictionary.

Called by `producer`. Everything else in the dictionary is confluent-kafka's and passes through, but for what
the counts need: acknowledgement by all replicas and idempotence are defaults where the application's own
settings allow them, and every record has a delivery report (`delivery.report.only.error` then only decides
which of them the application hears of).

With `producer.type` the dictionary is one of Kafka 0.7's producer, whose names differ:

    producer.type     sync: `send` waits for the answers; async: it only queues
    broker.list       id:host:port,... the brokers to begin with
    queue.time        ms that a record may wait for others (linger.ms)
    queue.size        records in the queue
    batch.size        records (not bytes) in a batch
    compression.codec 0 none, 1 gzip, 2 snappy
    partitioner.class, serializer.class     as `partitioner` and `encoder`: callables, or objects with the
                      methods `partition(key, count)` and `to_message(data)`
    callback.handler  as `on_delivery`
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.audit.contract.header import MAX_PRODUCER_NAME_SIZE, InvalidIdentity, encode_producer_name
from millrace.broker.errors import ConfigError
from millrace.broker.expectations import one_of
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.system_topics import AUDIT_TOPIC

PREFIX = "millrace."
KEYS = (
    "millrace.producer",
    "millrace.application",
    "millrace.datacenter",
    "millrace.window.ms",
    "millrace.report.interval.ms",
    "millrace.lease.ms",
    "millrace.audit.topic",
    "millrace.journal",
    "millrace.identity",
    "millrace.content.digest",
)
TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")

MIN_WINDOW_MS, MAX_WINDOW_MS = 100, 7 * 24 * 3_600_000
MAX_INTERVAL_MS = 3_600_000
MAX_LEASE_MS = 30 * 24 * 3_600_000

_ACKS_KEYS = ("acks", "request.required.acks")
_RETRIES_KEYS = ("retries", "message.send.max.retries")
_IN_FLIGHT_KEYS = ("max.in.flight.requests.per.connection", "max.in.flight")
MAX_IN_FLIGHT_OF_IDEMPOTENCE = 5
_CODECS_07 = {"0": "none", "1": "gzip", "2": "snappy"}


@dataclass(frozen=True, slots=True)
class PreparationConfig:
    """The callables that the application set: `preparation` uses them."""

    partitioner: Callable[[Any, int], int] | None = None
    encoder: Callable[[Any], Any] | None = None
    key_serializer: Callable[[Any, Any], Any] | None = None
    value_serializer: Callable[[Any, Any], Any] | None = None

    def __bool__(self) -> bool:
        return any((self.partitioner, self.encoder, self.key_serializer, self.value_serializer))


@dataclass(frozen=True, slots=True)
class ProducerConfig:
    """The producer's own settings, and `client`: what confluent-kafka gets.

    `sent_once`: the client never sends a record twice. `only_errors`: the application hears of errors only.
    """

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
    content: bool
    transactional: bool
    sent_once: bool
    only_errors: bool
    send_waits: bool
    preparation: PreparationConfig
    on_delivery: Callable[[Any, Any], None] | None
    client: dict[str, Any] = field(repr=False)


def read_config(settings: Mapping[str, Any]) -> ProducerConfig:
    """Split and check the settings; raises ConfigError naming the key."""
    own = {key: value for key, value in settings.items() if key.startswith(PREFIX)}
    client = {key: value for key, value in settings.items() if not key.startswith(PREFIX)}
    refuse_unknown(own, KEYS)
    send_waits = _translate_old_names(client)
    _set_defaults(client)
    host = socket.gethostname()
    application = own.pop("millrace.application", None)
    application = _text("millrace.application", application) if application else _fitting(_script_name())
    producer = own.pop("millrace.producer", None)
    interval_ms = _milliseconds(own, "millrace.report.interval.ms", 10_000, 1, MAX_INTERVAL_MS)
    journal = own.pop("millrace.journal", None)
    return ProducerConfig(
        producer=_text("millrace.producer", producer) if producer else _fitting(f"{application}@{host}"),
        application=application,
        host=_fitting(host),
        datacenter=_text("millrace.datacenter", own.pop("millrace.datacenter", "")),
        window_ms=_milliseconds(own, "millrace.window.ms", 60_000, MIN_WINDOW_MS, MAX_WINDOW_MS),
        report_interval_ms=interval_ms,
        lease_ms=_milliseconds(
            own, "millrace.lease.ms", max(60_000, 3 * interval_ms), interval_ms + 1, MAX_LEASE_MS
        ),
        events_topic=_topic("millrace.audit.topic", own.pop("millrace.audit.topic", AUDIT_TOPIC)),
        journal=None if journal is None else _path("millrace.journal", journal),
        name_in_header=_one_of("millrace.identity", own.pop("millrace.identity", "full"), "full", "compact"),
        content=_flag("millrace.content.digest", own.pop("millrace.content.digest", False)),
        transactional=bool(client.get("transactional.id")),
        sent_once=_is_sent_once(client),
        only_errors=_flag("delivery.report.only.error", client.pop("delivery.report.only.error", False)),
        send_waits=send_waits,
        preparation=PreparationConfig(
            partitioner=_pop_callable(client, "partitioner", or_text=True),
            encoder=_pop_callable(client, "encoder"),
            key_serializer=_pop_callable(client, "key.serializer"),
            value_serializer=_pop_callable(client, "value.serializer"),
        ),
        on_delivery=_pop_callable(client, "on_delivery"),
        client=client,
    )


def refuse_unknown(own: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ConfigError for the first of the keys that is none of those that there are."""
    for key, value in own.items():
        if key not in known:
            raise ConfigError(key, value, one_of(known, key))


def _translate_old_names(client: dict[str, Any]) -> bool:
    """Give Kafka 0.7's settings their present names; returns whether `send` waits."""
    if "producer.type" not in client:
        return True
    waits = _one_of("producer.type", client.pop("producer.type"), "sync", "async")
    if "broker.list" in client:
        brokers = str(client.pop("broker.list"))
        client["bootstrap.servers"] = ",".join(_without_id(broker.strip()) for broker in brokers.split(","))
    renamed = {
        "queue.time": "linger.ms",
        "queue.size": "queue.buffering.max.messages",
        "batch.size": "batch.num.messages",
        "partitioner.class": "partitioner",
        "serializer.class": "encoder",
        "callback.handler": "on_delivery",
    }
    for old, new in renamed.items():
        if old in client:
            client[new] = client.pop(old)
    for key, method in (("partitioner", "partition"), ("encoder", "to_message")):
        if hasattr(client.get(key), method):
            client[key] = getattr(client[key], method)
    if "compression.codec" in client:
        codec = str(client["compression.codec"])
        client["compression.codec"] = _CODECS_07.get(codec, codec)
    return waits


def _without_id(broker: str) -> str:
    """`host:port` of Kafka 0.7's `id:host:port`."""
    for written in (broker, broker.partition(":")[2]):
        with contextlib.suppress(ValueError):
            return str(Address.parse(written))
    raise ConfigError("broker.list", broker, "id:host:port, such as 0:127.0.0.1:9092 or 0:[::1]:9092")


def _set_defaults(client: dict[str, Any]) -> None:
    of_topics = client.get("default.topic.config")
    settings = [client, of_topics] if isinstance(of_topics, Mapping) else [client]
    acks = [str(each[key]) for each in settings for key in _ACKS_KEYS if key in each]
    for key in _ACKS_KEYS:
        if any(0 in _numbers(each, (key,)) for each in settings):
            raise ConfigError(key, 0, "all or 1: with 0 nobody says that a record arrived")
    if not acks:
        client["acks"] = "all"
    if (
        all(each in ("all", "-1") for each in acks)
        and all(each != 0 for each in _numbers(client, _RETRIES_KEYS))
        and all(
            each is not None and each <= MAX_IN_FLIGHT_OF_IDEMPOTENCE
            for each in _numbers(client, _IN_FLIGHT_KEYS)
        )
        and client.get("queuing.strategy", "fifo") == "fifo"
    ):
        client.setdefault("enable.idempotence", True)


def _is_sent_once(client: Mapping[str, Any]) -> bool:
    retries = _numbers(client, _RETRIES_KEYS)
    return bool(retries) and all(each == 0 for each in retries)


def _numbers(client: Mapping[str, Any], keys: tuple[str, ...]) -> list[int | None]:
    """Those of the keys that are set; None for what is no plain number, which is the client's to judge."""
    found: list[int | None] = []
    for key in keys:
        if key in client:
            try:
                found.append(int(client[key]))
            except (TypeError, ValueError):
                found.append(None)
    return found


def _milliseconds(own: dict[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = own.pop(key, default)
    try:
        number = int(value)
        exact = not isinstance(value, bool) and number == float(value)
    except (TypeError, ValueError, OverflowError):
        number, exact = 0, False
    if not exact or not low <= number <= high:
        raise ConfigError(key, value, f"a whole number of milliseconds from {low} to {high}")
    return number


def _text(key: str, value: Any) -> str:
    """A name as headers and events take it."""
    text = str(value)
    try:
        encode_producer_name(text)
    except InvalidIdentity as error:
        raise ConfigError(key, text[:40], f"a name that fits a header: {error}") from error
    except UnicodeEncodeError as error:
        raise ConfigError(key, ascii(text[:40]), "a name that UTF-8 can write") from error
    return text


def _fitting(name: str) -> str:
    """A name that the machine gave, not a person: made to fit."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in name)
    return printable.encode("utf-8", "replace")[:MAX_PRODUCER_NAME_SIZE].decode("utf-8", "ignore")


def _topic(key: str, value: Any) -> str:
    if not TOPIC_NAME.fullmatch(str(value)) or value in (".", ".."):
        raise ConfigError(key, str(value)[:40], "a topic's name: at most 249 of letters, digits, . _ -")
    return str(value)


def _path(key: str, value: Any) -> str:
    try:
        return os.fsdecode(os.fspath(value))
    except TypeError as error:
        raise ConfigError(key, value, "a file's path") from error


def _one_of(key: str, value: Any, yes: str, no: str) -> bool:
    if value not in (yes, no):
        raise ConfigError(key, value, f"{yes} or {no}")
    return bool(value == yes)


def _flag(key: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false"):
        raise ConfigError(key, value, "true or false")
    return text == "true"


def _pop_callable(client: dict[str, Any], key: str, *, or_text: bool = False) -> Any:
    """A callable that the application set; a text stays where it is, as a setting of the client's own."""
    value = client.get(key)
    if or_text and isinstance(value, str):
        return None
    client.pop(key, None)
    if value is not None and not callable(value):
        raise ConfigError(key, value, "something that can be called")
    return value


def _script_name() -> str:
    """The running script without its suffix; `python` in an interactive session."""
    return Path(sys.argv[0]).stem or "python"
