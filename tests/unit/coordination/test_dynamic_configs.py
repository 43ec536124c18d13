"""Broker settings that change while brokers run, and the throttle that they make."""

from __future__ import annotations

import uuid

import pytest

from millrace.broker.config import parse_settings
from millrace.broker.coordination.dynamic_configs import (
    check_dynamic,
    replication_throttle,
    settings_in_force,
    usable,
)
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import DEFAULT_BROKER, TopicAssignment
from millrace.broker.errors import InvalidConfig, InvalidRequest
from millrace.broker.protocol.throttle_settings import OF_FOLLOWER, OF_LEADER, ThrottleSettings

RATE = OF_FOLLOWER.rate
SIDES = [("follower", OF_FOLLOWER), ("leader", OF_LEADER)]


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        ({RATE: "fast"}, InvalidRequest, "expected bytes per second"),
        ({RATE: "-1"}, InvalidRequest, "expected bytes per second"),
        ({"num.partitions": "5"}, InvalidRequest, "cannot be changed while a broker runs: num.partitions;"),
        ({"log.retention.ms": "soon"}, InvalidRequest, "log.retention.ms: got 'soon', expected a whole"),
        ({"max.connections.per.ip": "0"}, InvalidRequest, "overrides beside it"),
        ({"log.retention.m": "5"}, InvalidConfig, "unknown broker setting"),
    ],
)
def test_what_cannot_be_changed_is_refused_with_the_reason(
    config: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        check_dynamic({"log.retention.bytes": "7", **config})


def test_what_can_be_changed_is_taken() -> None:
    check_dynamic({RATE: "1", "log.retention.ms": "-1", "log.cleanup.policy": "compact,delete"})
    check_dynamic({"max.connections.per.ip": "0", "max.connections.per.ip.overrides": "10.0.0.1:5"})


def test_one_brokers_setting_wins_over_that_of_all_and_that_over_the_file() -> None:
    settings = parse_settings({"log.retention.ms": "1", "log.segment.bytes": "1000", "num.partitions": "9"})
    every = {"log.retention.ms": "2", "log.retention.bytes": "20", RATE: "5"}
    own = {"log.retention.ms": "3"}
    now = settings_in_force(settings, [every, own])
    assert (now.log_retention_ms, now.log_retention_bytes, now.log_segment_bytes) == (3, 20, 1000)
    assert settings_in_force(settings, [every, {}]).log_retention_ms == 2
    assert settings_in_force(settings, [{}, {}]) == settings


def test_setting_that_nobody_understands_weakens_no_other() -> None:
    good, bad = usable(
        {"log.retention.ms": "soon", "log.retention.bytes": "5", "num.partitions": "3", "x": "y"}
    )
    assert good == {"log.retention.bytes": "5"}
    assert bad.keys() == {"log.retention.ms", "num.partitions", "x"}


@pytest.mark.parametrize(("side", "settings"), SIDES)
def test_throttle_is_the_brokers_own_rate_over_that_of_all(side: str, settings: ThrottleSettings) -> None:
    rate, replicas = f"{side}.replication.throttled.rate", f"{side}.replication.throttled.replicas"
    other = "leader" if side == "follower" else "follower"
    cache = MetadataCache()
    for name in ("moving", "all", "free"):
        cache.set_assignment(name, TopicAssignment(uuid.uuid4(), {0: (1, 2), 1: (2, 3)}))
    cache.set_config("moving", {replicas: "0:2,1:3"})
    cache.set_config("all", {replicas: "*"})
    cache.set_config("free", {f"{other}.replication.throttled.replicas": "*"})
    cache.broker_configs = {"2": {f"{other}.replication.throttled.rate": "1"}}
    assert replication_throttle(cache, 2, settings) == (None, frozenset())
    cache.broker_configs = {DEFAULT_BROKER: {rate: "100"}, "3": {rate: "7"}}
    assert replication_throttle(cache, 2, settings) == (100, {("moving", 0), ("all", 0), ("all", 1)})
    assert replication_throttle(cache, 3, settings) == (7, {("moving", 1), ("all", 0), ("all", 1)})
