"""Broker settings that may be changed while brokers run, kept in `/config/brokers/<id or <default>>`.

One table says which; the config handlers check and describe by it, and `server/broker.py` applies what the
metadata cache shows. A setting that is not in the table is read at start only. Pure.

The throttle of moving replicas (KIP-73): a rate per broker, and per topic the replicas that it holds for, as
`partition:broker` pairs or `*`. It is applied where a replica is fetched, so it is the follower's rate that
counts; the leader's is kept for tools that set both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import InvalidConfig
from millrace.broker.protocol.throttle_settings import FOLLOWER_RATE, FOLLOWER_REPLICAS, LEADER_RATE
from millrace.broker.protocol.topic_partition import TopicPartition

EVERY_REPLICA = "*"

LONGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class DynamicSetting:
    """One setting. `default` is what holds while nobody has set it, as Kafka writes it; `parse` raises
    ValueError with a value it cannot take; `kind` is Kafka's name of its type."""

    default: str
    parse: Callable[[str], object]
    expected: str
    kind: str = "long"


def _rate(text: str) -> int:
    value = int(text)
    if not 0 <= value <= LONGEST:
        raise ValueError
    return value


DYNAMIC_SETTINGS: Mapping[str, DynamicSetting] = {
    name: DynamicSetting(str(LONGEST), _rate, "bytes per second, 0 or more")
    for name in (LEADER_RATE, FOLLOWER_RATE)
}


def check_dynamic(config: Mapping[str, str], fixed: Mapping[str, object]) -> None:
    """Raises InvalidConfig for what cannot be changed while a broker runs; `fixed` are the settings that
    are read at start."""
    for name, value in config.items():
        setting = DYNAMIC_SETTINGS.get(name)
        if setting is None:
            if name in fixed:
                raise InvalidConfig(
                    f"{name} is read when a broker starts; change its file and start it again"
                )
            raise InvalidConfig(f"unknown broker setting {name}")
        try:
            setting.parse(value.strip())
        except ValueError:
            raise InvalidConfig(f"{name}: got {value!r}, expected {setting.expected}") from None


def throttled_partitions(text: str, broker_id: int, partitions: Mapping[int, object]) -> frozenset[int]:
    """Partitions of a topic whose replica on this broker is throttled. Raises ValueError."""
    text = text.strip()
    if text == EVERY_REPLICA:
        return frozenset(partitions)
    pairs = [pair.split(":") for pair in text.split(",") if pair.strip()]
    return frozenset(int(number) for number, broker in pairs if int(broker) == broker_id)


def replication_throttle(
    cache: MetadataCache, broker_id: int
) -> tuple[int | None, frozenset[TopicPartition]]:
    """Bytes per second that this broker may fetch of these partitions; None for no limit."""
    text = cache.broker_config(broker_id).get(FOLLOWER_RATE)
    try:
        rate = None if text is None else _rate(text.strip())
    except ValueError:
        rate = None
    if rate is None or rate == LONGEST:
        return None, frozenset()
    throttled: set[TopicPartition] = set()
    for name, info in cache.topics.items():
        replicas = info.config.get(FOLLOWER_REPLICAS)
        if replicas:
            try:
                numbers = throttled_partitions(replicas, broker_id, info.partitions)
            except ValueError:
                continue
            throttled |= {(name, number) for number in numbers}
    return rate, frozenset(throttled)
