"""audit.yaml: every mistake is one line with path, value and expectation."""

from __future__ import annotations

from datetime import date

import pytest

from millrace.audit.config import duration_text, load_config, parse_config, parse_duration_ms, time_ms
from millrace.audit.keeping.state import Commit
from millrace.audit.runs.state_checks import check_window
from millrace.audit.spark.read_options import parse_options
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
    assert load_config(write(tmp_path, text)).clusters["ewr"].topics_here("flights") == ("ewr.flights",)


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
            r"clusters\.ewr\.tier: got 'sauce', expected source or aggregate",
        ),
        (GOOD.replace("topics:", "topicz:"), "topics: .*required|topicz: .*did you mean topics"),
        (GOOD + "window: 5 parsecs\n", "window: got '5 parsecs', expected a duration"),
        (GOOD + "window: 0s\n", "duration"),
        ("clusters: {}\ntopics: [a]\n", "clusters: .*at least one"),
        ("- a\n", "with the keys"),
        ("a: [", "valid YAML"),
        (GOOD.replace("tier: source}", "tier: source, topics: {other: x}}"), "one of topics"),
        (GOOD.replace("ewr:", "produced:"), "another name: producers are called so"),
        (
            GOOD.replace("source}", "aggregate}\n  agg: {bootstrap: ['127.0.0.1:9093'], tier: aggregate}"),
            "tier source for those that producers write to",
        ),
    ],
)
def test_wrong_config_is_one_line_that_says_what_was_expected(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(write(tmp_path, text))
    assert "\n" not in str(caught.value) and "audit.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "topics: orders\n",
            r"audit\.yaml:3: topics: got 'orders', expected a list of topics, such as \[orders",
        ),
        ("topics: {orders: x}\n", "a list of topics"),
        ("topics: []\n", "topics.*at least one"),
        (
            "topics: [flights, flights]\n",
            r"audit\.yaml:3: topics: .* several names, each once",
        ),
        (
            "topics: [flights]\ngroups:\n  ewr: [{name: g, topics: [flights, flights]}]\n",
            r"audit\.yaml:5: groups\.ewr\[0\]\.topics: got .*each once",
        ),
        (
            "topics: [flights]\ngroups: {lax: [g]}\n",
            r"audit\.yaml:4: groups\.lax: got 'lax'.*of clusters: ewr",
        ),
        (
            "topics: [flights]\ngroups:\n  ewr:\n  - search\n  - {name: g, topics: [hotels]}\n",
            r"audit\.yaml:7: groups\.ewr\[1\]\.topics: got 'hotels', expected one of topics: flights",
        ),
        (
            "topics: [flights]\ngroups:\n  ewr: [a,\n   a]\n",
            r"audit\.yaml:6: groups\.ewr\[1\]: got 'a'.* once",
        ),
    ],
)
def test_a_slip_in_topics_or_groups_names_the_line_and_what_there_is_to_write(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, GOOD.replace("topics: [flights]\n", more)))


def test_a_renaming_that_is_no_mapping_says_what_one_looks_like(tmp_path):
    text = GOOD.replace("tier: source}", "tier: source, topics: flights}")
    with pytest.raises(
        ConfigError, match=r"clusters\.ewr\.topics: got 'flights'.*such as \{flights: ewr\.flights\}"
    ):
        load_config(write(tmp_path, text))


def test_every_mistake_of_the_whole_is_told_with_its_line(tmp_path):
    text = GOOD + "groups: {lax: [g], jfk: [h]}\n"
    with pytest.raises(ConfigError, match=r"\(and 1 more\)") as caught:
        load_config(write(tmp_path, text))
    assert [str(each).partition(", expected")[0] for each in caught.value.each()] == [
        "audit.yaml:4: groups.lax: got 'lax'",
        "audit.yaml:4: groups.jfk: got 'jfk'",
    ]


def test_a_producer_of_the_roster_may_have_a_beginning(tmp_path):
    later = "{name: UA, since: 2013-01-01}, {name: DL, since: 2013-01-01T01:00:00+01:00}"
    config = load_config(write(tmp_path, f"{GOOD}producers: [AA, {later}]\n"))
    assert config.roster() == {"AA": 0, "UA": 1_356_998_400_000, "DL": 1_356_998_400_000}


@pytest.mark.parametrize(
    ("roster", "message"),
    [
        ("[AA, 7]", r"producers\[1\]: got 7, expected a producer's name, or \{name"),
        ("[{name: AA, since: soon}]", r"producers\[0\]\.since: got 'soon', expected a time such as 2013"),
        ("[{name: AA, since: 20130101}]", r"producers\[0\]\.since: got 20130101, expected a time such as"),
        ("[{name: AA, from: 1}]", r"producers\[0\]\.from: .*one of name, since"),
        ("[AA, {name: AA, since: 2013-01-01}]", r"producers\[1\]: got 'AA', expected it once"),
    ],
)
def test_a_slip_in_the_roster_names_the_line_and_what_there_is_to_write(tmp_path, roster, message):
    with pytest.raises(ConfigError, match=rf"audit\.yaml:4: {message}"):
        load_config(write(tmp_path, GOOD + f"producers: {roster}\n"))


def test_errors_that_are_found_later_know_the_line(tmp_path):
    config = load_config(write(tmp_path, GOOD + "window: 1m\n"))
    assert config.where("topics[0]") == "audit.yaml:3: topics[0]"
    with pytest.raises(
        ConfigError, match=r"audit\.yaml:4: window: got '1m', expected 10m, in which .* was counted"
    ):
        check_window(config, Commit(number=1, window_ms=600_000))
    assert (
        parse_config({"clusters": {"e": {"bootstrap": ["h:1"], "tier": "source"}}, "topics": ["a"]}).where(
            "window"
        )
        == "audit config: window"
    )


@pytest.mark.parametrize(
    ("ms", "text"),
    [(60_000, "1m"), (90_000, "90s"), (1_500, "1500ms"), (86_400_000, "1d"), (7_200_000, "2h")],
)
def test_a_length_is_told_as_it_is_written(ms, text):
    assert duration_text(ms) == text and parse_duration_ms("x", text) == ms


def test_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="readable file"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ranges": "[]", "bootstraps": "{}", "tasks": "many"},
        {"ranges": "[]", "bootstraps": "{}", "window": "1 fortnight"},
        {"ranges": "[]", "bootstraps": "{}", "colour": "red"},
        {"ranges": "[]"},
        {"ranges": "{", "bootstraps": "{}"},
        {"ranges": '[{"cluster": 1}]', "bootstraps": "{}"},
    ],
)
def test_wrong_read_option_is_one_line(options):
    with pytest.raises(ConfigError, match="option") as caught:
        parse_options(options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["100001d", "1" + "0" * 30 + "d", "9" * 5000 + "ms"], ids=("a day more", "an age", "no number")
)
def test_a_length_that_no_timer_takes_is_one_short_line(text):
    assert parse_duration_ms("--every", "00100000d") == 8_640_000_000_000
    with pytest.raises(
        ConfigError, match=r"^--every: got '.*, expected a duration .* at most 100000d$"
    ) as found:
        parse_duration_ms("--every", text)
    assert len(str(found.value)) < 200


@pytest.mark.parametrize(
    "wrong",
    ["2013", "20130101", "201301011200", "20130101120000", "1356998400", "9" * 5000, 2013, 20130101, -1],
    ids=lambda each: str(each)[:20],
)
def test_a_number_that_is_rather_a_date_is_not_taken_for_milliseconds(wrong):
    """Of any command, and of the file, where YAML makes a number of it."""
    with pytest.raises(
        ValueError,
        match=r"^a time such as .*, or milliseconds since 1970, which have 13 digits(; as milliseconds .*)?$",
    ):
        time_ms(wrong)
    for right in ("1356998400000", 1_356_998_400_000, "2013-01-01", "20130101T00", date(2013, 1, 1)):
        assert time_ms(right) == 1_356_998_400_000
    assert time_ms("0") == time_ms(0) == 0
