from __future__ import annotations

import pytest

from millrace.broker.client.admin import ConfigValue
from millrace.mirror.topics.topic_configs import (
    TARGET_OWN_CONFIGS,
    carried,
    deciding_source,
    differences,
    follows_its_source,
    settings_to_begin_with,
)


def set_to(value: str | None) -> ConfigValue:
    return ConfigValue(value, is_set=True)


def default(value: str | None) -> ConfigValue:
    return ConfigValue(value, is_set=False)


def test_only_what_the_source_sets_is_carried() -> None:
    source = {"retention.ms": set_to("1000"), "segment.bytes": default("5"), "secret": set_to(None)}
    assert carried(source) == {"retention.ms": "1000"}


def test_audit_topic_is_made_to_keep_gaps_for_a_season_whatever_its_source_is() -> None:
    source = {"retention.ms": set_to("1000"), "segment.bytes": set_to("5")}
    assert settings_to_begin_with("flights", source) == {"retention.ms": "1000", "segment.bytes": "5"}
    made = settings_to_begin_with("millrace.audit", source)
    assert made == {"cleanup.policy": "compact,delete", "retention.ms": "7776000000", "segment.bytes": "5"}


@pytest.mark.parametrize("key", sorted(TARGET_OWN_CONFIGS))
def test_target_keeps_its_own_settings(key: str) -> None:
    assert carried({key: set_to("x")}) == {}
    assert differences({key: set_to("x")}, {key: default("y")}) == {}
    assert differences({}, {key: set_to("y")}) == {}


def test_named_settings_are_excluded_both_ways() -> None:
    assert differences({"retention.ms": set_to("1")}, {}, ["retention.ms"]) == {}
    assert differences({}, {"retention.ms": set_to("1")}, ["retention.ms"]) == {}


def test_only_differences_are_written() -> None:
    source = {"retention.ms": set_to("1000"), "cleanup.policy": set_to("compact")}
    assert differences(source, {"retention.ms": set_to("1000"), "cleanup.policy": set_to("delete")}) == {
        "cleanup.policy": "compact"
    }
    assert differences(source, dict(source)) == {}


def test_default_of_the_same_value_is_not_the_same() -> None:
    # The target's default may change; what the source says must stay.
    source = {"retention.ms": set_to("1000")}
    assert differences(source, {"retention.ms": default("1000")}) == {"retention.ms": "1000"}


def test_setting_removed_at_the_source_is_removed_at_the_target() -> None:
    target = {"retention.ms": set_to("1000"), "segment.bytes": default("5")}
    assert differences({"retention.ms": default("7")}, target) == {"retention.ms": None}
    assert differences({}, target) == {"retention.ms": None}


def test_setting_that_the_source_keeps_secret_is_left_alone() -> None:
    assert differences({"secret": set_to(None)}, {"secret": set_to("mine")}) == {}


def test_settings_of_the_audit_topic_are_the_mirrors_own() -> None:
    assert not follows_its_source("millrace.audit")
    assert follows_its_source("flights")


def test_first_source_of_the_config_decides_once_it_was_seen() -> None:
    order = ["ewr", "lhr", "nrt"]
    assert deciding_source(["lhr", "ewr"], order, order) == "ewr"
    assert deciding_source(["lhr"], order, ["ewr", "lhr"]) == "lhr"
    # ewr may feed the topic too: nobody knows yet.
    assert deciding_source(["lhr"], order, ["lhr"]) is None
    assert deciding_source([], order, order) is None
