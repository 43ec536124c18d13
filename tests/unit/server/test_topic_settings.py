"""Topic settings in the protocol's words."""

from __future__ import annotations

import pytest

from millrace.broker.errors import InvalidConfig, InvalidRequest
from millrace.broker.server.broker_settings import broker_config_name
from millrace.broker.server.topic_settings import (
    APPEND,
    DELETE,
    DYNAMIC_TOPIC_CONFIG,
    SET,
    SUBTRACT,
    describe_topic_config,
    increments,
    replacement,
)
from millrace.broker.storage.log_config import UNREADABLE, LogConfig

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
    assert replacement([("a", "1"), ("b", None)])({"c": "3"}) == {"a": "1"}


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
