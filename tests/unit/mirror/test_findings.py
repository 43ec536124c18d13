from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from millrace.broker.client.admin import ConfigValue
from millrace.broker.protocol.operations import NOTHING, Operation, read_operations
from millrace.mirror.checks.findings import (
    Finding,
    Link,
    Selected,
    Severity,
    idle_renames,
    left_out,
    link,
    name_clashes,
    no_transactions,
    settings,
    settings_in_step,
    shared_partitions,
    sorted_findings,
    together,
    too_few_brokers,
    widths,
)
from millrace.mirror.checks.group_permissions import missing_of_groups, missing_to_list
from millrace.mirror.checks.permissions import SOURCE_OPERATIONS, Missing, as_findings, missing_of
from millrace.mirror.config import MirrorConfig, load_config, parse_config
from millrace.mirror.topics.routes import TopicSelector

TEXT = """\
name: aggregate
target: {cluster: agg, bootstrap: ["127.0.0.1:9392"]}
delivery: at_least_once
sources:
  - cluster: ewr
    bootstrap: ["127.0.0.1:9092"]
    topics:
      include: ["flights"]
    wanted_mb_per_s: 100
  - cluster: lhr
    bootstrap: ["127.0.0.1:9192"]
    topics:
      include: ["flights"]
naming:
  rename: {a.b: c, "lhr/x": c}
"""


@pytest.fixture
def config(tmp_path: Path) -> MirrorConfig:
    return configured(tmp_path)


def configured(folder: Path, more: str = "") -> MirrorConfig:
    path = folder / "mirror.yaml"
    path.write_text(TEXT + more)
    return load_config(path)


def own(value: str) -> ConfigValue:
    """What the topic itself sets."""
    return ConfigValue(value, is_set=True)


LIMIT = "max.message.bytes"
EWR = Selected("ewr", "flights", 4, "flights")
LHR = Selected("lhr", "flights", 2, "flights")


def test_a_rename_that_names_no_selected_topic_is_told_with_its_line(tmp_path: Path) -> None:
    settings = yaml.safe_load(TEXT)
    settings["naming"] = {"rename": {"flihgts": "a", "lhr/flights": "b", "ewr/fligths": "c", "x": "d"}}
    path = tmp_path / "mirror.yaml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False))
    config = load_config(path)
    told = [each.sentence for each in idle_renames(config, [EWR, LHR], {"ewr", "lhr"})]
    idle, hint = "is no topic that is selected now, so nothing is renamed by it", " (did you mean flights?)"
    assert told == [
        f"mirror.yaml:23: naming.rename.flihgts: aggregate: flihgts {idle}{hint}",
        f"mirror.yaml:25: naming.rename.ewr/fligths: ewr: fligths {idle}{hint}",
        f"mirror.yaml:26: naming.rename.x: aggregate: x {idle}",
    ]
    of_lhr = Selected("lhr", "x", 1, "d")
    assert len(idle_renames(config, [EWR, LHR, of_lhr], {"ewr", "lhr"})) == 2
    assert [each.where for each in idle_renames(config, [EWR], {"ewr"})] == ["ewr"], "lhr may have the others"


def test_a_selected_topic_is_shown_with_its_name_on_the_target_where_that_is_another() -> None:
    assert [str(EWR), str(Selected("ewr", "flights", 4, "ewr.flights"))] == [
        "flights",
        "flights → ewr.flights",
    ]


def test_topics_that_are_never_carried_are_told_with_the_reason_and_a_named_one_is_a_warning(
    config: MirrorConfig,
) -> None:
    topics = {"__consumer_offsets": True, "_schemas": False, "ewr.heartbeats": False, "flights": False}
    matched, named = (TopicSelector(include).left_out(topics) for include in ([".*"], ["_schemas"]))
    (told,) = left_out(config, "ewr", matched)
    assert (told.severity, told.place) == (Severity.OK, "mirror.yaml:8: sources[0].topics.include")
    assert told.message == (
        "never carried, though topics.include matches them: _schemas (a Schema Registry keeps its log in it, "
        "and those of two give the same numbers to different schemas: copy schemas from registry to registry)"
        "; ewr.heartbeats (MirrorMaker 2 keeps its own records in topics of such names)"
        "; __consumer_offsets (names with two underscores are a cluster's own)"
    )
    (warned,) = left_out(config, "ewr", named)
    assert (warned.severity, warned.where, warned.place) == (Severity.WARNING, "ewr/_schemas", told.place)
    assert warned.message.startswith("is named in topics.include and never carried: a Schema Registry")
    assert left_out(config, "ewr", []) == []


def test_different_partition_counts_say_what_will_happen_and_where(config: MirrorConfig) -> None:
    (finding,) = shared_partitions(config, [EWR, LHR])
    assert finding.severity is Severity.WARNING
    assert finding.where == "agg/flights"
    assert finding.place == "mirror.yaml:13: sources[1].topics.include"
    assert "flights gets 4 partitions" in finding.message
    assert str(finding).startswith(
        "warning  mirror.yaml:13: sources[1].topics.include: agg/flights: flights gets"
    )


def test_rule_for_partition_counts_settles_it(tmp_path: Path) -> None:
    assert shared_partitions(configured(tmp_path, "partition_counts: widest\n"), [EWR, LHR]) == []


def test_offset_that_keeps_sources_apart_settles_it(config: MirrorConfig) -> None:
    assert shared_partitions(config, [EWR, Selected("lhr", "flights", 2, "flights", 4)]) == []


def test_topics_of_one_source_that_meet_are_an_error(config: MirrorConfig) -> None:
    (finding,) = name_clashes(config, [Selected("ewr", "a", 1, "c"), Selected("ewr", "b", 1, "c"), LHR])
    assert finding.severity is Severity.ERROR
    assert finding.place == "mirror.yaml:14: naming"
    assert "topics a, b would all become c" in finding.message


def test_topics_of_two_sources_may_meet(config: MirrorConfig) -> None:
    assert name_clashes(config, [EWR, LHR]) == []


def test_topics_of_two_sources_may_not_meet_where_names_are_to_tell_them_apart() -> None:
    source = {"bootstrap": ["a:1"], "topics": {"include": [".*"]}}
    config = parse_config(
        {
            "name": "m",
            "target": {"cluster": "agg", "bootstrap": ["b:1"]},
            "sources": [{"cluster": "a", **source}, {"cluster": "a.b", **source}],
            "naming": {"pattern": "{cluster}.{topic}", "rename": {"mine": "a.b.d"}},
        }
    )
    meeting = [Selected("a", "b.c", 1, "a.b.c"), Selected("a.b", "c", 1, "a.b.c")]
    wanted = [Selected("a", "mine", 1, "a.b.d"), Selected("a.b", "d", 1, "a.b.d")]
    (finding,) = name_clashes(config, [*meeting, *wanted])
    assert (finding.severity, finding.where) == (Severity.ERROR, "agg")
    assert "topics a.b/c, a/b.c would all become a.b.c" in finding.message


@pytest.mark.parametrize(
    ("there", "may_widen", "severity"),
    [
        (3, True, Severity.WARNING),
        (3, False, Severity.ERROR),
        (4, False, None),
        (9, True, None),
    ],
)
def test_narrow_target_is_widened_or_an_error(
    config: MirrorConfig, there: int, may_widen: bool, severity: Severity | None
) -> None:
    found = widths(config, [EWR], {"flights": there}, may_widen)
    assert [finding.severity for finding in found] == ([] if severity is None else [severity])
    if found:
        assert "has 3 partitions, ewr/flights needs 4" in found[0].message
        assert found[0].place == "mirror.yaml:8: sources[0].topics.include"


def test_width_counts_the_partition_offset(config: MirrorConfig) -> None:
    (finding,) = widths(config, [Selected("lhr", "flights", 2, "flights", 4)], {"flights": 4}, may_widen=True)
    assert "needs 6" in finding.message
    assert widths(config, [EWR], {}, may_widen=False) == []  # it will be created


def test_target_that_compresses_again_or_stamps_is_named(config: MirrorConfig) -> None:
    found = list(
        settings(
            config,
            EWR,
            {},
            {"compression.type": own("zstd"), "message.timestamp.type": own("LogAppendTime")},
        )
    )
    assert [finding.message.split()[0] for finding in found] == ["compression.type", "message.timestamp.type"]
    assert list(settings(config, EWR, {}, {"compression.type": own("producer")})) == []


def test_smaller_limit_is_named_unless_it_will_follow_the_source(tmp_path: Path) -> None:
    def told(
        more: str,
        source: Mapping[str, ConfigValue],
        there: Mapping[str, ConfigValue] | None,
        default: str | None = "1500",
    ) -> list[str]:
        config = configured(tmp_path, more)
        defaults = {} if default is None else {LIMIT: ConfigValue(default, is_set=False)}
        expected = settings_in_step(config, EWR.target, source, there, defaults)
        return [each.message.partition(":")[0] for each in settings(config, EWR, source, expected)]

    set_here, by_default = {LIMIT: own("2000")}, {LIMIT: ConfigValue("2000", is_set=False)}
    set_there = {LIMIT: own("1000")}
    kept, lowered = (f"{LIMIT} {size} is below the source's 2000" for size in (1000, 1500))
    assert told("", set_here, set_there) == []
    # What the source's topic does not set, the target's does not keep: it has its own broker's default then.
    assert told("", by_default, set_there) == [lowered]
    assert told("", by_default, set_there, default="2000") == []
    assert told("", by_default, set_there, default=None) == [kept], "which is not known"
    for never in ("config_sync: {exclude: [max.message.bytes]}\n", "config_sync: off\n"):
        assert told(never, set_here, set_there) == told(never, by_default, set_there) == [kept]
    # A topic that the mirror has yet to make.
    assert told("", by_default, None) == told("config_sync: off\n", by_default, None) == [lowered]
    assert told("", set_here, None) == told("config_sync: off\n", set_here, None) == []
    assert told("config_sync: {exclude: [max.message.bytes]}\n", set_here, None) == [lowered]
    assert told("", by_default, None, default=None) == []


def test_smaller_limit_says_what_becomes_of_records_by_the_policy(tmp_path: Path) -> None:
    limits = {LIMIT: own("2000")}, {LIMIT: own("1000")}
    for more, words in (
        ("", "a record that is too large alone stops its partition (gaps.too_large)"),
        ("gaps: {too_large: skip}\n", "a record that is too large alone is left out (gaps.too_large)"),
    ):
        (finding,) = settings(configured(tmp_path, more), EWR, *limits)
        assert finding.message == (
            f"{LIMIT} 1000 is below the source's 2000: larger batches are split, and {words}; raise it at "
            "the target"
        )


def test_what_several_topics_have_in_common_is_told_once(config: MirrorConfig) -> None:
    names = ["flights", *"abcdef"]
    there = {"compression.type": ConfigValue("zstd", is_set=False)}
    each = [found for name in names for found in settings(config, Selected("ewr", name, 1, name), {}, there)]
    of_other = list(settings(config, LHR, {}, there))
    one, other = together([*each, *of_other])
    assert one.where == "agg/flights, agg/a, agg/b, agg/c, agg/d and 2 more"
    assert (one.message, one.severity, one.place) == (each[0].message, Severity.WARNING, each[0].place)
    assert [other] == of_other, "another line of the config"


def test_link_that_cannot_carry_what_is_wanted_says_what_bounds_it(config: MirrorConfig) -> None:
    measured = Link(0.1, 1, {"fetch.max_bytes": 8 << 20, "socket.send.buffer.bytes": 102_400})
    finding = link(config, "ewr", measured)
    assert finding.severity is Severity.WARNING
    assert finding.place == "mirror.yaml:9: sources[0].wanted_mb_per_s"
    assert "round trip 100.0 ms: at most 1 MB/s over 1 connection, " in finding.message
    assert "socket.send.buffer.bytes=102400" in finding.message
    assert "that takes 10000001 bytes" in finding.message
    assert link(config, "ewr", Link(0.0001, 1, measured.buffers)).severity is Severity.OK
    assert link(config, "ewr", Link(0.1, 100, measured.buffers)).severity is Severity.OK
    assert link(config, "lhr", measured).severity is Severity.OK  # nothing is wanted


def test_missing_transactions_offer_the_other_delivery(config: MirrorConfig) -> None:
    setting = "transaction.state.log.replication.factor"
    finding = too_few_brokers(config, setting, 3, 1)
    assert finding.severity is Severity.ERROR
    assert finding.place == "mirror.yaml:3: delivery"
    assert f"{setting}=3, and it has 1 broker, " in finding.message
    choice = "choose `delivery: at_least_once`, which repeats records after a failure"
    assert finding.message.endswith(f"; add brokers or lower {setting}; or {choice}")
    assert no_transactions(config, "a reason").message == f"it lacks transactions: a reason; {choice}"


def test_errors_come_first() -> None:
    found = [Finding(severity, "x", "y") for severity in (Severity.OK, Severity.ERROR, Severity.WARNING)]
    assert [each.severity for each in sorted_findings(found)] == list(Severity)


# --- permissions ---------------------------------------------------------------------------------


def test_bits_name_operations_and_absence_names_none() -> None:
    assert read_operations((1 << 3) | (1 << 8)) == {Operation.READ, Operation.DESCRIBE}
    assert read_operations(0) == NOTHING
    assert read_operations(-(1 << 31)) is None


def test_what_a_cluster_does_not_say_is_not_missing() -> None:
    assert missing_of(SOURCE_OPERATIONS, "flights", None, {}) == []
    named = missing_of(SOURCE_OPERATIONS, "flights", frozenset({Operation.DESCRIBE}), {})
    assert [each.operation for each in named] == [Operation.READ, Operation.DESCRIBE_CONFIGS]


def test_what_is_missing_on_groups_and_what_nobody_says() -> None:
    given = {"a": None, "b": frozenset[Operation](), "c": frozenset({Operation.DESCRIBE})}
    without = {Operation.DESCRIBE: "not seen", Operation.READ: "not committed"}
    missing = missing_of_groups(without, given)
    assert [(each.name, each.operation, each.without) for each in missing] == [
        ("b", Operation.DESCRIBE, "not seen"),
        ("b", Operation.READ, "not committed"),
        ("c", Operation.READ, "not committed"),
    ]
    assert missing_to_list(None) == missing_to_list(frozenset({Operation.DESCRIBE})) == []
    (cluster,) = missing_to_list(frozenset())
    assert (cluster.resource, cluster.name, cluster.operation) == (
        "Cluster",
        "kafka-cluster",
        Operation.DESCRIBE,
    )


def test_missing_permissions_are_listed_by_operation(config: MirrorConfig) -> None:
    missing = [Missing(Operation.READ, "Topic", name, "no records") for name in ("a", "b", "a")]
    missing.append(Missing(Operation.DESCRIBE_CONFIGS, "Topic", "a", "no settings"))
    found = as_findings(config, "ewr", "sources[0].topics", missing, Severity.ERROR)
    assert [finding.message.split(";")[0] for finding in found] == [
        "not permitted: Read on Topic a, b (no records)",
        "not permitted: DescribeConfigs on Topic a (no settings)",
    ]
    assert {finding.place for finding in found} == {"mirror.yaml:7: sources[0].topics"}


# --- lines of the config -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("sources[1].topics", "mirror.yaml:12: sources[1].topics"),
        ("sources[1].partition_offset", "mirror.yaml:10: sources[1].partition_offset"),
        ("naming.rename.a.b", "mirror.yaml:15: naming.rename.a.b"),
        ("naming.rename.lhr/x", "mirror.yaml:15: naming.rename.lhr/x"),
        ("config_sync", "mirror.yaml: config_sync"),
    ],
)
def test_place_has_the_line_of_the_deepest_part_that_the_file_has(
    config: MirrorConfig, path: str, place: str
) -> None:
    assert config.place(path) == place
