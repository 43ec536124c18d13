"""The broker's configuration: what is accepted, and what is said about the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millrace.broker.config import BrokerSettings, load_config, parse_settings
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.address import Address
from millrace.broker.storage.log_config import SETTINGS, LogConfig, Setting

GOOD = {"id": 1, "listen": "127.0.0.1:9092", "zookeeper": "127.0.0.1:2181/dc1", "data": ["d"]}


def test_file_and_overrides_are_laid_over_each_other(tmp_path: Path) -> None:
    file = tmp_path / "broker.yaml"
    file.write_text(
        "id: 1\nlisten: 127.0.0.1:9092\nzookeeper: a:1,b:2/x\ndata: /one\n"
        "settings:\n  log.segment.bytes: 1000\n  num.partitions: 3\n"
    )
    config = load_config(file, {"id": "7", "num.partitions": "4", "auto.create.topics.enable": "false"})
    assert (config.id, config.listen, config.data) == (7, Address("127.0.0.1", 9092), [Path("/one")])
    settings = config.settings
    assert (settings.log_segment_bytes, settings.num_partitions) == (1000, 4)
    assert settings.auto_create_topics_enable is False


def test_coarser_units_count_only_where_the_finer_is_not_given() -> None:
    assert load_config(None, {**GOOD, "log.retention.hours": 2}).settings.log_retention_ms == 7_200_000
    assert load_config(None, {**GOOD, "log.retention.hours": -1}).settings.log_retention_ms == -1
    both = load_config(None, {**GOOD, "log.retention.hours": 2, "log.retention.ms": 5})
    assert both.settings.log_retention_ms == 5


@pytest.mark.parametrize(
    ("wrong", "path", "words"),
    [
        ({"id": "one"}, "id", "whole number"),
        ({"id": -1}, "id", "whole number"),
        ({"listen": "nowhere"}, "listen", "host:port"),
        ({"listen": "h:99999"}, "listen", "host:port"),
        ({"zookeeper": "localhost"}, "zookeeper", "host:port"),
        ({"data": []}, "data", "folders"),
        ({"log.segment.bytes": "many"}, "settings.log.segment.bytes", "whole number"),
        ({"log.segment.bytes": 1}, "settings.log.segment.bytes", "from 14"),
        ({"log.cleanup.policy": "burn"}, "settings.log.cleanup.policy", "delete, compact"),
        ({"auto.create.topics.enable": "yes"}, "settings.auto.create.topics.enable", "true or false"),
        ({"log.segment.byte": 1}, "settings.log.segment.byte", "log.segment.bytes"),
        ({"lissten": "h:1"}, "settings.lissten", "known setting"),
        (
            {"advertised.listeners": "h:1"},
            "settings.advertised.listeners",
            "did you mean advertised, which stands beside settings?",
        ),
    ],
)
def test_mistake_is_named_with_path_value_and_expectation(
    wrong: dict[str, object], path: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {**GOOD, **wrong})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(path)
    assert repr(next(iter(wrong.values()))) in message
    assert words in message


def test_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^zookeeper: got nothing, expected host:port"):
        load_config(None, {key: value for key, value in GOOD.items() if key != "zookeeper"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id: [1", "valid YAML"),
        ("- a\n- b\n", "a mapping"),
        ("id: 1\nport: 9\n", "one of id, listen"),
        ("settings: 3\n", "a mapping"),
    ],
)
def test_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "broker.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file, {key: value for key, value in GOOD.items() if key not in text})


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml.*a readable file"):
        load_config(tmp_path / "none.yaml")


def test_every_setting_has_kafkas_name() -> None:
    texts = BrokerSettings().texts()
    assert texts["log.segment.bytes"] == str(1 << 30)
    assert texts["auto.create.topics.enable"] == "true"


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.broker_name)
def test_defaults_of_topics_have_the_bounds_of_their_settings(setting: Setting) -> None:
    texts = BrokerSettings().texts()
    assert LogConfig.from_broker_config(texts) == LogConfig()
    assert setting.parse(texts[setting.broker_name]) == setting.parse(setting.default)
    for text in ("-2", str(2**31), str(2**63), "some", "1.5"):
        try:
            setting.parse(text)
        except ValueError:
            with pytest.raises(ConfigError, match=re.escape(setting.expected)):
                parse_settings({setting.broker_name: text})
        else:
            assert parse_settings({setting.broker_name: text}).texts()[setting.broker_name] == text
