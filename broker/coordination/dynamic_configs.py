"""Broker settings that may be changed while brokers run, kept in `/config/brokers/<id or <default>>`.

One table says which; the config handlers check and describe by it, `server/dynamic_settings.py` hands what
holds to the parts of the broker. What was set for one broker wins over what was set for all, that over the
file a broker was started with (KIP-226). A setting that is not in the table is read at start only. Pure.

They are Kafka's, as far as they exist here: the defaults of the topics' settings, the cleaner's pace, limits
of connections, how long producers are remembered, whether transactions are verified, and the throttle of
moving replicas (KIP-73): a rate per broker, and per topic the replicas that it holds for, as
`partition:broker` pairs or `*`. It is applied where a replica is fetched, so it is the follower's rate that
counts; the leader's is kept for tools that set both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from millrace.broker.config import SETTING_FIELDS, BrokerSettings, parse_setting
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import ConfigError, InvalidConfig, InvalidRequest
from millrace.broker.protocol.throttle_settings import (
    EVERY_REPLICA,
    FOLLOWER_RATE,
    LEADER_RATE,
    ThrottleSettings,
)
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage.log_config import SETTINGS, UNREADABLE

LONGEST = 2**63 - 1

RATES = (LEADER_RATE, FOLLOWER_RATE)
"""Dynamic settings that no file can give."""

MAX_PER_IP, PER_IP_OVERRIDES = "max.connections.per.ip", "max.connections.per.ip.overrides"

CHANGEABLE = frozenset(
    {
        *(setting.broker_name for setting in SETTINGS.values()),
        "log.cleaner.backoff.ms",
        "log.cleaner.dedupe.buffer.size",
        "log.cleaner.io.max.bytes.per.second",
        "max.connections",
        MAX_PER_IP,
        PER_IP_OVERRIDES,
        "producer.id.expiration.ms",
        "transaction.partition.verification.enable",
    }
)
"""Settings of a broker's file that may be set while it runs, too."""

if unknown := CHANGEABLE - SETTING_FIELDS.keys():
    raise RuntimeError(f"no settings of a broker: {unknown}")


def check_dynamic(config: Mapping[str, str]) -> None:
    """Raises InvalidRequest, as Apache Kafka does, for what cannot be changed while a broker runs and for
    values that cannot be; InvalidConfig for names that nobody knows."""
    fixed = sorted(name for name in config if name in SETTING_FIELDS and name not in CHANGEABLE)
    if fixed:
        raise InvalidRequest(
            f"cannot be changed while a broker runs: {', '.join(fixed)}; change its file and start it again"
        )
    for name, text in config.items():
        parse_dynamic(name, text)
    if config.get(MAX_PER_IP, "").strip() == "0" and not config.get(PER_IP_OVERRIDES, "").strip():
        raise InvalidRequest(f"{MAX_PER_IP}: got '0', expected 1 or more, or {PER_IP_OVERRIDES} beside it")


def parse_dynamic(name: str, text: str) -> object:
    """The value of one setting. Raises as `check_dynamic` does."""
    if name in RATES:
        try:
            return _rate(text.strip())
        except ValueError:
            raise InvalidRequest(f"{name}: got {text!r}, expected bytes per second, 0 or more") from None
    if name == UNREADABLE:
        raise InvalidConfig(
            f"the broker's settings cannot be read ({text}): set those that are to hold, and delete {name}"
        )
    if name not in CHANGEABLE:
        if name in SETTING_FIELDS:
            raise InvalidRequest(f"{name} cannot be changed while a broker runs")
        raise InvalidConfig(f"unknown broker setting {name}")
    try:
        return parse_setting(name, text)
    except ConfigError as error:
        raise InvalidRequest(str(error)) from None


def usable(config: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What can be used of settings that somebody wrote into ZooKeeper, and why the others cannot, by name:
    one that nobody understands weakens no other."""
    good: dict[str, str] = {}
    bad: dict[str, str] = {}
    for name, text in config.items():
        try:
            parse_dynamic(name, text)
        except (InvalidRequest, InvalidConfig) as error:
            bad[name] = str(error)
        else:
            good[name] = text
    return good, bad


def settings_in_force(settings: BrokerSettings, levels: Iterable[Mapping[str, str]]) -> BrokerSettings:
    """A broker's settings under those that were set while it runs; of `levels`, each `usable`, later ones
    win."""
    values = {
        SETTING_FIELDS[name].name: parse_setting(name, text)
        for level in levels
        for name, text in level.items()
        if name in CHANGEABLE
    }
    return dataclasses.replace(settings, **values)  # type: ignore[arg-type]


def _rate(text: str) -> int:
    value = int(text)
    if not 0 <= value <= LONGEST:
        raise ValueError
    return value


def throttled_partitions(text: str, broker_id: int, partitions: Mapping[int, object]) -> frozenset[int]:
    """Partitions of a topic whose replica on this broker is throttled. Raises ValueError."""
    text = text.strip()
    if text == EVERY_REPLICA:
        return frozenset(partitions)
    pairs = [pair.split(":") for pair in text.split(",") if pair.strip()]
    return frozenset(int(number) for number, broker in pairs if int(broker) == broker_id)


def replication_throttle(
    cache: MetadataCache, broker_id: int, settings: ThrottleSettings
) -> tuple[int | None, frozenset[TopicPartition]]:
    """Bytes per second of these partitions that this broker may fetch, or give; None for no limit."""
    text = cache.broker_config(broker_id).get(settings.rate)
    try:
        rate = None if text is None else _rate(text.strip())
    except ValueError:
        rate = None
    if rate is None or rate == LONGEST:
        return None, frozenset()
    throttled: set[TopicPartition] = set()
    for name, info in cache.topics.items():
        replicas = info.config.get(settings.replicas)
        if replicas:
            try:
                numbers = throttled_partitions(replicas, broker_id, info.partitions)
            except ValueError:
                continue
            throttled |= {(name, number) for number in numbers}
    return rate, frozenset(throttled)
