"""The settings that hold now, and who is told of them."""

from __future__ import annotations

from millrace.broker.config import BrokerSettings, parse_settings
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import DEFAULT_BROKER, decode_broker_config
from millrace.broker.server.dynamic_settings import DynamicSettings


def test_parts_are_told_at_once_and_of_every_change_that_concerns_this_broker() -> None:
    cache = MetadataCache()
    dynamic = DynamicSettings(parse_settings({"log.retention.ms": "1"}), 2, cache)
    told: list[int] = []
    dynamic.follow(lambda now: told.append(now.log_retention_ms))
    cache.broker_configs = {DEFAULT_BROKER: {"log.retention.ms": "5"}}
    dynamic.refresh()
    cache.broker_configs["3"] = {"log.retention.ms": "7"}  # another broker's
    dynamic.refresh()
    cache.broker_configs["2"] = {"log.retention.ms": "6"}
    dynamic.refresh()
    late: list[int] = []
    dynamic.follow(lambda now: late.append(now.log_retention_ms))
    cache.broker_configs.clear()
    dynamic.refresh()
    assert (told, late) == ([1, 5, 6, 1], [6, 1])
    assert dynamic.current.log_retention_ms == 1


def test_value_that_cannot_be_used_leaves_what_it_would_have_replaced() -> None:
    cache = MetadataCache()
    dynamic = DynamicSettings(BrokerSettings(), 2, cache)
    cache.broker_configs = {
        DEFAULT_BROKER: {"log.retention.ms": "5"},
        "2": {"log.retention.ms": "soon", "num.partitions": "9", "log.retention.bytes": "8"},
    }
    dynamic.refresh()
    now = dynamic.current
    assert (now.log_retention_ms, now.log_retention_bytes, now.num_partitions) == (5, 8, 1)


def test_while_a_retention_that_was_set_cannot_be_known_nothing_is_removed_by_another() -> None:
    cache = MetadataCache()
    dynamic = DynamicSettings(parse_settings({"log.retention.ms": "1"}), 2, cache)
    seen: list[int] = []
    dynamic.follow(lambda _: seen.append(dynamic.log_defaults().retention_ms))
    cache.broker_configs = {DEFAULT_BROKER: {"log.retention.ms": "for ever"}}
    dynamic.refresh()
    cache.broker_configs = {DEFAULT_BROKER: {"max.connections": "many"}}  # says nothing of logs
    dynamic.refresh()
    cache.broker_configs = {DEFAULT_BROKER: {}, "2": decode_broker_config("2", b"\xff")}
    dynamic.refresh()
    assert dynamic.log_defaults().min_insync_replicas > 1000
    cache.broker_configs.clear()
    dynamic.refresh()
    assert seen == [1, -1, 1, -1, 1]
