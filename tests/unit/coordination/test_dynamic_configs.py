"""Broker settings that change while brokers run, and the throttle that they make."""

from __future__ import annotations

import uuid

import pytest

from millrace.broker.coordination.dynamic_configs import check_dynamic, replication_throttle
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import DEFAULT_BROKER, TopicAssignment
from millrace.broker.errors import InvalidConfig

RATE = "follower.replication.throttled.rate"
REPLICAS = "follower.replication.throttled.replicas"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({RATE: "fast"}, "expected bytes per second"),
        ({RATE: "-1"}, "expected bytes per second"),
        ({"log.retention.ms": "5"}, "is read when a broker starts"),
        ({"log.retention.m": "5"}, "unknown broker setting"),
    ],
)
def test_what_cannot_be_changed_is_refused_with_the_reason(config: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        check_dynamic(config, {"log.retention.ms": 0})


def test_throttle_is_the_brokers_own_rate_over_that_of_all() -> None:
    cache = MetadataCache()
    for name in ("moving", "all", "free"):
        cache.set_assignment(name, TopicAssignment(uuid.uuid4(), {0: (1, 2), 1: (2, 3)}))
    cache.set_config("moving", {REPLICAS: "0:2,1:3"})
    cache.set_config("all", {REPLICAS: "*"})
    assert replication_throttle(cache, 2) == (None, frozenset())
    cache.broker_configs = {DEFAULT_BROKER: {RATE: "100"}, "3": {RATE: "7"}}
    assert replication_throttle(cache, 2) == (100, {("moving", 0), ("all", 0), ("all", 1)})
    assert replication_throttle(cache, 3) == (7, {("moving", 1), ("all", 0), ("all", 1)})
