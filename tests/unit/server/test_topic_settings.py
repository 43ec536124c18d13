"""Topic settings in the protocol's words."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.config import BrokerSettings
from millrace.broker.errors import InvalidConfig, InvalidRequest
from millrace.broker.server.broker_settings import broker_config_name
from millrace.broker.server.handlers import alter_configs, create_topics, incremental_alter_configs
from millrace.broker.server.topic_settings import (
    APPEND,
    DELETE,
    DYNAMIC_TOPIC_CONFIG,
    SET,
    SUBTRACT,
    TOPIC,
    describe_topic_config,
    increments,
    replacement,
)
from millrace.broker.storage.log_config import UNREADABLE, LogConfig
from millrace.broker.telemetry.metrics import BrokerMetrics

DEFAULTS = {"cleanup.policy": "delete"}


def test_increments_apply_one_after_the_other() -> None:
    change = increments(
        [("retention.ms", SET, "5"), ("segment.bytes", DELETE, None), ("cleanup.policy", APPEND, "compact")],
        DEFAULTS,
    )
    assert change({"segment.bytes": "9"}) == {"retention.ms": "5", "cleanup.policy": "delete,compact"}
    assert change({"cleanup.policy": "compact"})["cleanup.policy"] == "compact"


def test_subtracting_takes_only_what_is_named() -> None:
    change = increments([("cleanup.policy", SUBTRACT, "delete")], DEFAULTS)
    assert change({"cleanup.policy": "compact,delete"}) == {"cleanup.policy": "compact"}


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([("retention.ms", SET, "1"), ("retention.ms", SET, "2")], InvalidRequest),
        ([("retention.ms", SET, None)], InvalidRequest),
        ([("retention.ms", 9, "1")], InvalidRequest),
        ([("retention.ms", APPEND, "1")], InvalidConfig),
    ],
)
def test_increments_that_make_no_sense_are_refused(
    steps: list[tuple[str, int, str | None]], error: type[Exception]
) -> None:
    with pytest.raises(error):
        increments(steps, DEFAULTS)


def test_replacement_forgets_what_is_not_given() -> None:
    assert replacement([("a", "1")])({"c": "3"}) == {"a": "1"}


@pytest.mark.parametrize("given", [[("a", "1"), ("b", None)], [("a", "1"), ("a", "1")]])
def test_replacement_that_says_nothing_certain_is_refused(given: list[tuple[str, str | None]]) -> None:
    """As in Apache Kafka: what a client leaves empty it may have meant to keep."""
    with pytest.raises(InvalidRequest):
        replacement(given)


@pytest.mark.parametrize("handler", [alter_configs, incremental_alter_configs])
def test_of_a_resource_that_stands_more_than_once_nothing_is_changed(handler: Any) -> None:
    altered: list[str] = []

    async def alter_topic_config(name: str, _change: Any, *, validate_only: bool) -> None:
        altered.append(name)

    entry = SimpleNamespace(name="retention.ms", config_operation=SET, value="1")
    request = SimpleNamespace(
        resources=[
            SimpleNamespace(resource_type=TOPIC, resource_name=name, configs=[entry]) for name in "aba"
        ],
        validate_only=False,
    )
    broker = SimpleNamespace(
        controller=SimpleNamespace(alter_topic_config=alter_topic_config),
        metrics=BrokerMetrics(),
        replica_manager=SimpleNamespace(log_defaults=LogConfig()),
    )
    context = SimpleNamespace(head=SimpleNamespace(version=1), broker=broker)
    response = asyncio.run(handler.handle(request, context))
    assert [int(each.error_code) for each in response.responses] == [
        InvalidRequest.code,
        0,
        InvalidRequest.code,
    ]
    assert altered == ["b"]


def test_a_new_topic_is_refused_settings_without_a_value() -> None:
    topic = SimpleNamespace(
        name="t",
        assignments=[],
        num_partitions=1,
        replication_factor=1,
        configs=[SimpleNamespace(name="retention.ms", value=None)],
    )
    request = SimpleNamespace(topics=[topic], timeout=timedelta(seconds=1), validate_only=True)
    broker = SimpleNamespace(config=SimpleNamespace(settings=BrokerSettings()), metrics=BrokerMetrics())
    context: Any = SimpleNamespace(head=SimpleNamespace(version=7), broker=broker)
    (created,) = asyncio.run(create_topics.handle(request, context)).topics
    assert int(created.error_code) == InvalidConfig.code


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("follower.replication.throttled.replicas", ["*", "", "0:1", "0:1, 12:3,"], ["0-2", "*,0:1"]),
        ("preallocate", ["TRUE"], ["banana", ""]),
        ("compression.gzip.level", ["-1", "9"], ["0", "999"]),
        ("segment.jitter.ms", ["0"], ["-1", "soon"]),
    ],
)
def test_what_changes_nothing_here_is_refused_where_kafka_would(
    name: str, right: list[str], wrong: list[str]
) -> None:
    for value in [None, *right]:
        assert LogConfig.given_by_administrator({name: value}) == LogConfig()
    for value in wrong:
        with pytest.raises(InvalidConfig, match=f"^{name}: got '{re.escape(value)}', expected "):
            LogConfig.given_by_administrator({name: value})
        assert LogConfig.usable_part({name: value}) == (LogConfig(), {}), "as older programs have taken it"


def test_lags_that_contradict_each_other_are_refused_whichever_is_given() -> None:
    defaults = LogConfig(max_compaction_lag_ms=1000)
    for settings in (
        {"min.compaction.lag.ms": "60000", "max.compaction.lag.ms": "1000"},
        {"min.compaction.lag.ms": "60000"},
    ):
        with pytest.raises(
            InvalidConfig, match=r"min.compaction.lag.ms: got 60000, expected no more than .*1000"
        ):
            LogConfig.given_by_administrator(settings, defaults)
    assert LogConfig.given_by_administrator({"min.compaction.lag.ms": "1000"}, defaults)


def test_what_changes_nothing_here_is_taken_and_described_as_it_was_set() -> None:
    config = {"preallocate": "true", "file.delete.delay.ms": "0"}
    assert LogConfig.from_topic_config(config) == LogConfig()
    described = describe_topic_config(config, LogConfig())
    assert {entry["name"]: entry["value"] for entry in described if entry["name"] in config} == config
    assert not any(entry["name"] in config for entry in describe_topic_config({}, LogConfig()))


def test_what_cannot_be_used_is_described_so_that_it_can_be_taken_away() -> None:
    config = {UNREADABLE: "why", "retention.ms": "for ever", "min.insync.replicas": "2"}
    entries = {entry["name"]: entry for entry in describe_topic_config(config, LogConfig())}
    for name, value in config.items():
        assert (entries[name]["value"], entries[name]["config_source"]) == (value, DYNAMIC_TOPIC_CONFIG)


def test_many_settings_in_one_request_are_compared_a_few_times_each() -> None:
    """Each with each, 6,000 kept everyone waiting for seconds."""
    compared = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(f"name-{number}") for number in range(2_000)]
    change = increments([(name, SET, "v") for name in names], {})
    assert len(change({})) == len(names)
    assert compared < 10 * len(names)
    with pytest.raises(InvalidRequest, match="name-7"):
        increments([(name, SET, "v") for name in [*names, Name("name-7")]], {})


def test_brokers_settings_are_of_an_id_in_plain_digits() -> None:
    assert (broker_config_name(""), broker_config_name("07")) == ("<default>", "7")
    for name in ("²", "٣", "-1", "one"):
        with pytest.raises(InvalidRequest, match="no broker id"):
            broker_config_name(name)
