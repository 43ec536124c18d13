from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
import yaml

from millrace.broker.errors import ConfigError
from millrace.broker.protocol.address import Address
from millrace.mirror.batches.coalesce import COALESCE_BELOW, MERGED_SIZE
from millrace.mirror.config import load_config, load_control, parse_config
from millrace.mirror.gaps.gaps import GapClass, GapPolicy


def settings(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "name": "aggregate",
        "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:9392"]},
        "sources": [
            {"cluster": "ewr", "bootstrap": ["127.0.0.1:9092"], "topics": {"include": ["flights"]}},
        ],
    }
    return {**base, **changes}


def source(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "cluster": "ewr",
        "bootstrap": ["127.0.0.1:9092"],
        "topics": {"include": ["flights"]},
    }
    return {**base, **changes}


def test_smallest_config_gets_defaults() -> None:
    config = parse_config(settings())
    assert config.delivery == "exactly_once"
    assert config.lanes == 4
    assert config.naming_rule.target_topic("ewr", "flights") == "flights"
    assert config.control.listen == Address("127.0.0.1", 8090)
    assert config.in_flight_bytes == 64 << 20
    assert config.group_id == "millrace-mirror.aggregate"
    assert config.gaps.policy(GapClass.EXPIRED) is GapPolicy.STOP


def test_gap_policy_of_one_class_wins_over_default() -> None:
    config = parse_config(settings(gaps={"expired": "skip"}))
    assert config.gaps.policy(GapClass.EXPIRED) is GapPolicy.SKIP
    assert config.gaps.policy(GapClass.CORRUPT) is GapPolicy.STOP


def test_batches_are_merged_unless_they_are_to_pass_through() -> None:
    below, merged = parse_config(settings()).coalescing
    assert (below, merged) == (COALESCE_BELOW, MERGED_SIZE)
    sizes = {"coalesce_below": 4_000, "coalesce_bytes": 20_000}
    assert parse_config(settings(batches="auto")).coalescing == (below, merged)
    assert parse_config(settings(batches=sizes)).coalescing == (4_000, 20_000)
    assert parse_config(settings(batches="pass_through")).coalescing == (0, merged)
    assert parse_config(settings(batches={"mode": "pass_through", **sizes})).coalescing == (0, 20_000)
    assert parse_config(settings(coalesce_below=5_000)).coalescing == (5_000, merged), "its older name"


def test_workers_that_share_a_file_take_their_names_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parse_config(settings()).group.instance_id is None, "no name: the seat ends with the process"
    assert parse_config(settings(group={"instance_id": "a-1"})).group.instance_id == "a-1"
    shared = settings(group={"instance_id": {"env": "MIRROR_WORKER"}})
    monkeypatch.setenv("MIRROR_WORKER", "b-2")
    assert parse_config(shared).group.instance_id == "b-2"
    for wrong in ("", "b 2"):
        monkeypatch.setenv("MIRROR_WORKER", wrong)
        with pytest.raises(ConfigError, match=r"group\.instance_id"):
            parse_config(shared)


def test_topic_settings_follow_or_not_in_one_word() -> None:
    for written, is_on in ((True, True), (False, False), ({"enabled": False}, False), ({}, True)):
        assert parse_config(settings(config_sync=written)).config_sync.enabled is is_on


def test_older_name_of_a_key_is_taken_and_not_offered() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(settings(colaesce_below=1))
    assert "batches" in caught.value.expected
    assert "coalesce_below" not in caught.value.expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        ("1970-01-01T00:00:01Z", 1000),
        ("1970-01-01T00:00:01", 1000),
        ("2026-11-21", 1_795_219_200_000),
        (date(2026, 11, 21), 1_795_219_200_000),
        (1_795_219_200_000, 1_795_219_200_000),
        (0, 0),
    ],
)
def test_start_takes_ends_and_times(written: object, expected: object) -> None:
    assert parse_config(settings(sources=[source(start=written)])).sources[0].start == expected


@pytest.mark.parametrize(
    ("changes", "path", "value", "expected"),
    [
        ({"name": "a b"}, "name", "a b", "a name of letters"),
        ({"nmae": "x"}, "nmae", "x", "one of name, target"),
        ({"config_sync": "sometimes"}, "config_sync", "sometimes", "a mapping"),
        ({"sources": []}, "sources", (), "at least one"),
        (
            {"sources": [source(bootstrap=["nowhere"])]},
            "sources[0].bootstrap[0]",
            "nowhere",
            "host:port, such as",
        ),
        ({"sources": [source(bootstrap=["h:70000"])]}, "sources[0].bootstrap[0]", "h:70000", "host:port"),
        ({"sources": [source(topics={"include": ["("]})]}, "sources[0].topics.include[0]", "(", "a regular"),
        ({"sources": [source(start="soon")]}, "sources[0].start", "soon", "earliest, latest or a time"),
        ({"sources": [source(start=-1)]}, "sources[0].start", -1, "earliest, latest or a time"),
        (
            {"sources": [source(start="1969-12-31T23:59:59.999Z")]},
            "sources[0].start",
            "1969-12-31T23:59:59.999Z",
            "no record has a time before 1970",
        ),
        (
            {"sources": [source(start=1_795_500_000)]},
            "sources[0].start",
            1_795_500_000,
            "13 digits; as milliseconds it is 1970-01-21T18:45:00Z",
        ),
        ({"sources": [source(start=10**20 - 1)]}, "sources[0].start", 10**20 - 1, "earliest, latest or"),
        ({"sources": [source(), source()]}, "sources[1].cluster", "ewr", "no other cluster"),
        ({"sources": [source(cluster="agg")]}, "sources[0].cluster", "agg", "no other cluster"),
        (
            {"sources": [source(bootstrap=["127.0.0.1:9392"])]},
            "sources[0].bootstrap",
            "127.0.0.1:9392",
            "not the target's",
        ),
        ({"delivery": "at_most_once"}, "delivery", "at_most_once", "exactly_once"),
        ({"naming": "{cluster}"}, "naming", "{cluster}", "identity"),
        ({"naming": "{nonsense}.{topic}"}, "naming", "{nonsense}.{topic}", "identity"),
        ({"naming": {"rename": {"a": "b c"}}}, "naming.rename.a", "b c", "a topic's name"),
        *(
            ({"naming": {"rename": {"a": name}}}, "naming.rename.a", name, f"another name: {reason}")
            for name, reason in (
                ("__consumer_offsets", "names with two underscores are a cluster's own"),
                ("millrace.positions.other", "a mirror keeps its own records in topics of such names"),
                ("millrace.audit", "the audit's events are in it"),
            )
        ),
        ({"partition_counts": "narrowest"}, "partition_counts", "narrowest", "widest"),
        ({"sources": [source(partition_offset=-1)]}, "sources[0].partition_offset", -1, "0 or more"),
        ({"gaps": {"expired": "ignore"}}, "gaps.expired", "ignore", "stop or skip"),
        ({"in_flight_bytes": 1}, "in_flight_bytes", 1, "1048576 or more"),
        ({"control": {"listen": "8090"}}, "control.listen", "8090", "host:port"),
        ({"batches": "split"}, "batches", "split", "auto or pass_through"),
        ({"batches": {"coalesce_bytes": 1}}, "batches.coalesce_bytes", 1, "1024 or more"),
        (
            {"batches": {"coalesce_below": 1}, "coalesce_below": 2},
            "coalesce_below",
            2,
            "batches.coalesce_below alone",
        ),
    ],
)
def test_wrong_setting_is_named_with_path_value_and_expectation(
    changes: dict[str, object], path: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(settings(**changes))
    error = caught.value
    assert error.path == f"mirror.yaml: {path}"
    assert error.value == value or list(error.value) == list(value)  # type: ignore[call-overload]
    assert expected in error.expected
    assert "\n" not in str(error)


def test_unknown_cluster_in_a_rename_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mirror.yaml"
    path.write_text(
        """\
name: aggregate
target: {cluster: agg, bootstrap: ["127.0.0.1:9392"]}
sources:
  - {cluster: ewr, bootstrap: ["127.0.0.1:9092"], topics: {include: [flights]}}
naming:
  rename:
    flights.eu: arrivals
    nyc/flights.eu: departures
    ewr/flights: mine
    erw/flights: yours
    agg/flights: ours
"""
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.lines() == [
        "mirror.yaml:8: naming.rename.nyc/flights.eu: got 'nyc', expected a source's cluster: one of ewr",
        "mirror.yaml:10: naming.rename.erw/flights: got 'erw', expected a source's cluster: one of ewr "
        "(did you mean ewr?)",
        "mirror.yaml:11: naming.rename.agg/flights: got 'agg', expected a source's cluster: one of ewr",
    ]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*.tmp", "(nothing to repeat at position 0; whatever a name begins with is .*)"),
        ("(a)\\2", "(invalid group reference 2 at position 4)"),
        ("a{99999999999999999999}", "(the repetition number is too large)"),
        ("(" * 9_000 + ")" * 9_000, "(maximum recursion depth exceeded"),
    ],
)
def test_what_is_wrong_with_a_pattern_is_told(pattern: str, words: str) -> None:
    for topics in ({"include": [pattern]}, {"include": [".*"], "exclude": [pattern]}):
        for wrong in (source(topics=topics), source(groups=topics)):
            with pytest.raises(ConfigError) as caught:
                parse_config(settings(sources=[wrong]))
            assert caught.value.expected.startswith(f"a regular expression {words}")


def test_pattern_that_does_not_compile_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mirror.yaml"
    path.write_text(
        """\
name: aggregate
target: {cluster: agg, bootstrap: ["127.0.0.1:9392"]}
sources:
  - cluster: ewr
    bootstrap: ["127.0.0.1:9092"]
    topics:
      include:
        - flights
        - "orders("
"""
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        "mirror.yaml:9: sources[0].topics.include[1]: got 'orders(', expected a regular expression "
        "(missing ), unterminated subpattern at position 6)"
    )


def test_clash_between_sections_has_a_line_too(tmp_path: Path) -> None:
    path = tmp_path / "mirror.yaml"
    path.write_text(
        """\
name: aggregate
target: {cluster: agg, bootstrap: ["127.0.0.1:9392"]}
sources:
  - cluster: ewr
    bootstrap: ["127.0.0.1:9392"]
    topics: {include: [flights]}
"""
    )
    with pytest.raises(ConfigError, match=r"mirror\.yaml:5: sources\[0\]\.bootstrap: "):
        load_config(path)


def test_partition_offsets_and_patterns_reach_the_naming() -> None:
    config = parse_config(
        settings(
            sources=[source(), source(cluster="lhr", partition_offset=8)],
            naming={"pattern": "all.{topic}", "rename": {"lhr/flights": "arrivals"}},
        )
    )
    rule = config.naming_rule
    assert str(rule.target_partition("lhr", "flights", 1)) == "arrivals-9"
    assert str(rule.target_partition("ewr", "flights", 1)) == "all.flights-1"


def test_who_speaks_with_a_worker_needs_no_secret_of_a_cluster(tmp_path: Path) -> None:
    """It may be another user in another shell; the token of the calls is the caller's, too."""
    path, token = tmp_path / "mirror.yaml", tmp_path / "token"
    token.write_text("a token\n")
    sasl = {"mechanism": "PLAIN", "username": "mirror", "password": {"env": "MILLRACE_NOT_SET"}}
    secured = {
        "protocol": "SASL_SSL",
        "ssl": {"ca": "gone.pem"},
        "sasl": sasl,
    }
    whole = settings(
        sources=[source(security=secured)],
        control={"listen": "127.0.0.1:7", "token": {"file": "token"}},
        group={"instance_id": {"env": "MILLRACE_NOT_SET"}},
    )
    whole["target"] = {"cluster": "agg", "bootstrap": ["127.0.0.1:9392"], "security": secured}
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(ConfigError, match=r"gone\.pem.*No such file.*\(and 4 more\)"):
        load_config(path)
    control = load_control(path)
    assert control.listen == Address("127.0.0.1", 7)
    assert control.token is not None and control.token.read() == "a token"
    # Every other mistake is told with its line, as ever.
    for key, value in (("target", "agg"), ("sources", "ewr"), ("sources", ["ewr"]), ("name", "a b")):
        path.write_text(yaml.safe_dump({**whole, key: value}))
        with pytest.raises(ConfigError, match=rf"^mirror\.yaml:\d+: {key}"):
            load_control(path)
    token.unlink()
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(ConfigError, match=r"control\.token.*No such file"):
        load_control(path)


def test_topic_that_keeps_its_name_may_be_said_to() -> None:
    """Beside a rule that gives others a prefix it is natural to say so; it changes nothing."""
    rename = {"millrace.audit": "millrace.audit", "ewr/__internal": "__internal"}
    parse_config(settings(naming={"rename": rename}))


def test_missing_key_is_named() -> None:
    wrong = settings()
    del wrong["target"]
    with pytest.raises(ConfigError, match=r"mirror\.yaml: target: got nothing, expected a value"):
        parse_config(wrong)


def test_several_errors_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"\(and 1 more\)"):
        parse_config(settings(name="a b", unknown=1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "valid YAML"),
        ("- 1", "a mapping"),
        (None, "a readable file"),
    ],
)
def test_unreadable_file_is_one_line(tmp_path: Path, text: str | None, expected: str) -> None:
    path = tmp_path / "mirror.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_file_of_the_readme_loads(tmp_path: Path) -> None:
    path = tmp_path / "mirror.yaml"
    path.write_text(
        """
name: aggregate
target: {cluster: agg, bootstrap: ["127.0.0.1:9392"]}
sources:
  - cluster: ewr
    bootstrap: ["127.0.0.1:9092"]
    topics: {include: ["flights", "orders\\\\..*"], exclude: [".*\\\\.tmp"]}
    start: 2024-01-31T00:00:00Z
naming: "{cluster}.{topic}"
control: {listen: "127.0.0.1:8090"}
"""
    )
    config = load_config(path)
    assert config.sources[0].start == 1706659200000
    assert config.naming_rule.target_topic("ewr", "flights") == "ewr.flights"
