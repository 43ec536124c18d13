"""audit.yaml: every mistake is one line with path, value and expectation."""

from __future__ import annotations

import pytest

from millrace.audit.config import load_config
from millrace.audit.spark_source import parse_options
from millrace.broker.errors import ConfigError

GOOD = "clusters:\n  ewr: {bootstrap: ['127.0.0.1:9092'], tier: source}\ntopics: [flights]\n"


def write(tmp_path, text):
    path = tmp_path / "audit.yaml"
    path.write_text(text)
    return path


def test_small_config_has_the_documented_defaults(tmp_path):
    config = load_config(write(tmp_path, GOOD))
    assert (config.window_ms, config.grace_ms, config.producers) == (60_000, 30_000, [])
    assert config.state == tmp_path / "audit-state" and config.report == tmp_path / "audit-report"


def test_renamed_topic_is_known_by_its_cluster(tmp_path):
    text = GOOD.replace("tier: source}", "tier: source, topics: {flights: ewr.flights}}")
    assert load_config(write(tmp_path, text)).clusters["ewr"].topic_here("flights") == "ewr.flights"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD.replace("127.0.0.1:9092", "127.0.0.1"),
            r"clusters\.ewr\.bootstrap\[0\]: got '127\.0\.0\.1'.*host:port",
        ),
        (GOOD.replace("9092", "99999"), "host:port"),
        (
            GOOD.replace("source", "sauce"),
            r"clusters\.ewr\.tier: got 'sauce', expected 'source' or 'aggregate'",
        ),
        (GOOD.replace("topics:", "topicz:"), "topics: .*required|topicz: .*no such key"),
        (GOOD + "window: 5 parsecs\n", "window: got '5 parsecs', expected a duration"),
        (GOOD + "window: 0s\n", "duration"),
        ("clusters: {}\ntopics: [a]\n", "clusters: .*at least one"),
        ("- a\n", "with the keys"),
        ("a: [", "valid YAML"),
        (GOOD.replace("tier: source}", "tier: source, topics: {other: x}}"), "one of topics"),
    ],
)
def test_wrong_config_is_one_line_that_says_what_was_expected(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(write(tmp_path, text))
    assert "\n" not in str(caught.value) and "audit.yaml" in str(caught.value)


def test_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="readable file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bootstrap": "h:1"},
        {"bootstrap": "h", "topics": "t"},
        {"bootstrap": "h:1", "topics": "t", "mode": "rows"},
        {"bootstrap": "h:1", "topics": "t", "tasks": "0"},
        {"bootstrap": "h:1", "topics": "t", "tasks": "many"},
        {"bootstrap": "h:1", "topics": "t", "window": "1 fortnight"},
        {"bootstrap": "h:1", "topics": "t", "colour": "red"},
        {"ranges": "[]"},
        {"ranges": "{", "bootstraps": "{}"},
        {"ranges": '[{"cluster": 1}]', "bootstraps": "{}"},
    ],
)
def test_wrong_read_option_is_one_line(options):
    with pytest.raises(ConfigError, match="option ") as caught:
        parse_options(options)
    assert "\n" not in str(caught.value)
