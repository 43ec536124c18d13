"""Which positions speak of an audited topic, and consumer groups as tiers."""

from __future__ import annotations

import json

import pytest
from pyroaring import BitMap64

from millrace.audit.config import parse_config
from millrace.audit.contract.event_values import TierEvent
from millrace.audit.contract.group_counts import GroupDoubt
from millrace.audit.reconciliation.online_tiers import BEGAN, SILENT, add_groups, online_groups
from millrace.audit.reconciliation.tier_reading import Passage, TierReading
from millrace.audit.runs.told_routes import ToldRoutes
from millrace.broker.errors import ConfigError
from millrace.mirror.topics.route_records import encode_key, encode_proposal_key

KEY = json.dumps({"source": "ewr", "topic": "flights"}).encode()
PLACE = ("ewr", "flights", 0)


def route(target: str, version: int = 1) -> bytes:
    return json.dumps({"version": version, "cluster_id": "E", "target_topic": target}).encode()


def test_a_position_counts_only_when_all_that_was_told_leads_to_the_topic():
    routes = ToldRoutes()
    assert not routes.leads_to("ewr", "flights", ["flights"]), "nothing was told of it"
    routes.learn(KEY, route("flights"))
    assert routes.leads_to("ewr", "flights", ["flights"])
    assert not routes.leads_to("ewr", "flights", ["other"])
    routes.learn(KEY, None)
    assert routes.leads_to("ewr", "flights", ["flights"]), "what was carried before lies where it was told"
    routes.learn(KEY, route("other"))
    assert not routes.leads_to("ewr", "flights", ["flights"]), "part of it went elsewhere"
    assert routes.leads_to("ewr", "flights", ["flights", "other"])


@pytest.mark.parametrize("value", [b"{", b"[]", b"{}", route("flights", 2)])
def test_a_route_that_cannot_be_read_is_refused_and_leads_nowhere(value):
    routes = ToldRoutes()
    with pytest.raises((ValueError, KeyError, TypeError)):
        routes.learn(KEY, value)
    assert not routes.leads_to("ewr", "flights", ["flights"])


def test_what_a_mirror_merely_proposes_is_no_route_and_no_riddle():
    """Each of them would be a thing that could not be trusted, and nothing were ever proven."""
    routes = ToldRoutes()
    routes.learn(encode_proposal_key("ewr", "flights"), route("other"))
    routes.learn(encode_proposal_key("ewr", "flights"), None)
    assert not routes.leads_to("ewr", "flights", ["other"])
    routes.learn(encode_key("ewr", "flights"), route("flights"))
    assert routes.leads_to("ewr", "flights", ["flights"])


def told(sequences, start_ms=0, group="billing", **more):
    fields = {
        "tier": group, "stream": "01", "topic": "flights", "producer": "AA", "window_start_ms": start_ms,
        "window_ms": 1000, "report": 1, "count": len(sequences), "byte_count": 0,
        "seen": BitMap64(sequences), "at_ms": 1, "session": "0" * 16,
    }  # fmt: skip
    return TierEvent(**{**fields, **more})


def tiers_of(events, commits, clusters=None, doubts=None, cluster_ids=None, topics=None):
    groups = online_groups(commits, {PLACE: "id"}, events, doubts or {}, cluster_ids, topics)
    tiers = [TierReading("ewr"), TierReading("agg", "ewr")]
    seen = add_groups(groups, tiers, clusters or {"ewr": "ewr", "agg": "agg"}, events, "flights", [], 1000)
    return tiers[2:], seen


def test_a_group_is_a_tier_below_its_cluster_with_what_it_committed():
    ((tier,), seen) = tiers_of([told([1, 2, 3])], {("ewr", "billing"): {PLACE: 3}})
    assert (tier.name, tier.upstream, tier.passed) == ("group:billing", "ewr", {PLACE: Passage(3, "id")})
    assert seen["group:billing"][0].sequences == BitMap64([1, 2, 3])
    assert [each.cause for each in tier.unread] == [BEGAN] and tier.unread[0].until_ms == 0


def test_a_namesake_that_reads_another_cluster_testifies_for_itself_only():
    """Mirrors carry the events along; what the namesake got would hide what this group has lost."""
    events = [
        told([1, 2], start_ms=1000, cluster_id="source's"),
        told([3], start_ms=1000, cluster_id="aggregate's", session="1" * 16, window_ms=700),
        told([4], start_ms=0, cluster_id="aggregate's", session="1" * 16),
    ]
    commits = {("ewr", "billing"): {PLACE: 3}}
    ((tier,), seen) = tiers_of(events, commits, cluster_ids={"ewr": "source's"})
    assert list(seen["group:billing"]) == [1000]
    assert seen["group:billing"][1000].sequences == BitMap64([1, 2])
    assert [(each.cause, each.until_ms) for each in tier.unread] == [(BEGAN, 1000)]
    ((_,), seen) = tiers_of(events[:1], commits, cluster_ids={"ewr": ""})
    assert seen["group:billing"][1000].sequences == BitMap64([1, 2])


def test_a_group_that_never_told_anything_loses_nothing():
    ((tier,), seen) = tiers_of([], {("ewr", "billing"): {PLACE: 3}})
    assert [each.cause for each in tier.unread] == [SILENT] and tier.unread[0].until_ms is None
    assert seen == {"group:billing": {}}


def test_a_topic_that_a_group_is_not_said_to_read_is_no_matter_of_the_group():
    commits = {("ewr", "billing"): {("ewr", "orders", 0): 3}}
    assert tiers_of([], commits, topics={"billing": ["orders"]}) == ([], {})
    ((tier,), _) = tiers_of([], commits, topics={"billing": ["orders", "flights"]})
    assert tier.idle == (
        "group billing has committed nothing of topic flights, which the config says it reads"
    )


def test_a_topic_of_which_a_group_shows_nothing_is_named_where_it_is_not_said_what_it_reads():
    commits = {("ewr", "billing"): {("ewr", "orders", 0): 3}}
    elsewhere = [told([1], topic="orders")]
    ((tier,), _) = tiers_of(elsewhere, commits)
    assert tier.idle == "group billing does not read topic flights; name its topics"
    ((tier,), _) = tiers_of([*elsewhere, told([1])], commits)
    assert tier.idle == "", "it told of it"
    ((tier,), _) = tiers_of(elsewhere, {("ewr", "billing"): {PLACE: 3}})
    assert tier.idle == "", "it committed"


def test_a_group_of_another_cluster_says_nothing_of_the_stream():
    tiers, seen = tiers_of([told([1])], {("jfk", "billing"): {}})
    assert tiers == [] and seen == {}


def test_what_is_missing_of_the_testimony_makes_its_absences_unknown():
    gone = {"billing": [GroupDoubt("a report is gone")]}
    ((tier,), _) = tiers_of([told([1])], {("ewr", "billing"): {}}, doubts=gone)
    assert "a report is gone" in {each.cause for each in tier.unread}
    ((tier,), _) = tiers_of([told([1], window_ms=700)], {("ewr", "billing"): {}})
    assert any("another length" in each.cause for each in tier.unread)


CLUSTERS = {
    "ewr": {"bootstrap": ["h:1"], "tier": "source"},
    "agg": {"bootstrap": ["h:2"], "tier": "aggregate"},
}


def test_the_new_keys_have_their_defaults_and_meanings():
    plain = parse_config({"clusters": CLUSTERS, "topics": ["flights"]})
    assert (plain.content, plain.groups, plain.zookeeper, plain.reader) == (False, {}, None, "millrace")
    assert plain.keep_ms == 30 * 86_400_000
    full = parse_config(
        {
            "clusters": {
                **CLUSTERS,
                "agg": {**CLUSTERS["agg"], "topics": {"flights": ["a", "b"]}, "mirror": "foreign"},
            },
            "topics": ["flights"],
            "groups": {"agg": ["billing", {"name": "search", "topics": ["flights"]}]},
            "keep": "forever",
            "content": True,
            "zookeeper": {"connect": "zk1:2181,zk2:2181/chroot"},
            "state": "s3a://bucket/audit/",
        }
    )
    assert full.clusters["agg"].topics_here("flights") == ("a", "b")
    assert full.clusters["agg"].places("flights") == {"a": "flights@a", "b": "flights@b"}
    assert full.clusters["ewr"].places("flights") == {"flights": "flights"}
    assert [(each.name, each.topics) for each in full.groups["agg"]] == [
        ("billing", None),
        ("search", ["flights"]),
    ]
    assert full.group_names() == {"billing", "search"}
    assert full.keep_ms is None and full.state == "s3a://bucket/audit"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": {"lax": ["g"]}}, "one of clusters"),
        ({"groups": {"ewr": []}}, "groups"),
        ({"groups": {"ewr": ["g"], "agg": ["g"]}}, r"groups\.agg\[0\]: got 'g'.*of one cluster; groups\.ewr"),
        ({"groups": {"ewr": ["g", {"name": "g"}]}}, r"groups\.ewr\[1\]: got 'g', expected it once"),
        ({"groups": "billing"}, r"such as \{agg: \[billing\]\}"),
        ({"groups": {"ewr": "billing"}}, "a list of groups"),
        ({"groups": {"ewr": [7]}}, "a group's name, or"),
        ({"groups": {"ewr": [{"name": "g", "topics": "flights"}]}}, "a list of topics"),
        ({"groups": {"ewr": [{"name": "g", "topics": []}]}}, r"groups\.ewr\[0\]\.topics.*at least one"),
        ({"groups": {"ewr": [{"name": "g", "topics": ["hotels"]}]}}, "one of topics: flights"),
        ({"groups": {"ewr": [{"topics": ["flights"]}]}}, r"groups\.ewr\[0\]\.name.*required"),
        ({"keep": "3 moons"}, "duration"),
        ({"zookeeper": {"connect": "zk"}}, "host:port"),
        ({"zookeeper": {"connect": "zk:2181/"}}, "host:port"),
        ({"zookeeper": {"connect": "zk:2181", "path": "audit"}}, "path"),
        ({"reader": "java"}, "spark-kafka"),
        ({"content": "perhaps"}, "content"),
        ({"clusters": {**CLUSTERS, "ewr": {**CLUSTERS["ewr"], "mirror": "foreign"}}}, "aggregate"),
        ({"clusters": {**CLUSTERS, "agg": {**CLUSTERS["agg"], "topics": {"flights": []}}}}, "each once"),
        (
            {"clusters": {**CLUSTERS, "agg": {**CLUSTERS["agg"], "topics": {"flights": ["a", "a"]}}}},
            "each once",
        ),
    ],
)
def test_a_wrong_new_key_is_one_line(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config({"clusters": CLUSTERS, "topics": ["flights"], **change})
    assert "\n" not in str(caught.value)


def test_what_a_group_passed_and_never_got_is_lost_on_its_own_hop_and_the_rest_is_on_its_way():
    import numpy as np
    import pyarrow as pa

    from millrace.audit.contract.events import CLOSED, OPENED, CountEvent, EventLedger, StreamEvent
    from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler
    from millrace.audit.runs.fact_rows import facts_table
    from millrace.audit.scanning.cell_rows import CELL_SCHEMA
    from millrace.audit.spark.spark_cells import verdicts_of
    from tests.cells import encode_bitmaps

    about = {"stream": "01" * 8, "session": "0" * 16, "topic": "flights", "producer": "AA", "window_ms": 1000}
    ledger = EventLedger()
    numbers = {1000: list(range(1, 11)), 2000: list(range(11, 21))}
    for start_ms, sequences in numbers.items():
        ledger.learn(
            CountEvent(
                **about, window_start_ms=start_ms, report=1, count=10, byte_count=0, at_ms=1,
                acknowledged=BitMap64(sequences), ambiguous=BitMap64(), failed=BitMap64(),
            )
        )  # fmt: skip
    for state, at_ms, last in ((OPENED, 500, 0), (CLOSED, 3000, 20)):
        ledger.learn(
            StreamEvent(
                **about, state=state, host="", application="", datacenter="", last_assigned=last,
                last_settled=last, no_earlier_than_ms=None, lease_ms=60, at_ms=at_ms,
            )
        )  # fmt: skip
    events = [
        told([1], 0, stream="02" * 8),  # of another stream: the group counts since then
        told([1, 2, 3, 5, 6, 7, 8, 9, 10], 1000, stream="01" * 8),
    ]
    ledger.learn_all(events)
    cells = []
    for start_ms, sequences in numbers.items():
        ((base, bitmap),) = encode_bitmaps(np.array(sequences, dtype=np.uint64))
        first = sequences[0] - 1
        cells.append(
            {
                **dict.fromkeys(CELL_SCHEMA.names), "tier": "ewr", "cluster": "ewr", "topic": "flights",
                "partition": 0, "stream": "01" * 8, "producer": "AA", "window_start_ms": start_ms,
                "chunk_start": 0, "count": 10, "byte_count": 0, "first_offset": first,
                "last_offset": first + 9, "first_append_ms": -1, "last_append_ms": -1, "base": base,
                "bitmap": bitmap, "repeats": [], "unsequenced_count": 0, "tail": False,
            }
        )  # fmt: skip
    groups = online_groups({("ewr", "billing"): {PLACE: 10}}, {PLACE: ""}, ledger.tiers.values(), {})
    reconciler = Reconciler(
        clusters=[ClusterReading("ewr", True, {"flights": "flights"}, (), {"flights": "flights"})],
        passed={}, gaps={}, window_ms=1000, grace_ms=0, now_ms=10_000, topics=("flights",), groups=groups,
    )  # fmt: skip
    facts = facts_table(ledger, {"01" * 8: {"ewr"}}, None, {"billing"}).filter(
        pa.array([stream == "01" * 8 for stream in facts_streams(ledger)])
    )
    rows = verdicts_of(reconciler, pa.Table.from_pylist(cells, CELL_SCHEMA), facts).to_pylist()
    first, second = rows
    detail = json.loads(first["detail"])
    assert first["verdict"] == "LOSS"
    assert detail["missing"][0]["between"] == ["ewr", "group:billing"]
    assert detail["missing"][0]["sequences"] == [[4, 4]]
    assert second["verdict"] == "UNKNOWN" and second["in_flight"] == 10


def test_a_group_began_when_it_got_its_first_record_and_not_when_that_record_was_created():
    """It begins at the log's end at 900 s; one of its first records was made long ago, by a device that was
    offline. What lay in the log before, it never had to read."""
    ((tier,), _) = tiers_of(
        [
            told([1], 1000, first_append_ms=900_005, last_append_ms=900_005),
            told([1], 901_000, stream="02", first_append_ms=901_005, last_append_ms=901_005),
        ],
        {("ewr", "billing"): {PLACE: 10}},
    )
    assert [each.until_ms for each in tier.unread if each.cause == BEGAN] == [900_005]
    ((tier,), _) = tiers_of([told([1], 1000)], {("ewr", "billing"): {PLACE: 10}})
    assert [each.until_ms for each in tier.unread if each.cause == BEGAN] == [1000], "no append time is told"


def test_a_stream_of_which_only_a_group_tells_has_a_row():
    """Its records expired and its producer's events are lost: without a row all would look proven."""
    from millrace.audit.contract.events import EventLedger
    from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler
    from millrace.audit.runs.fact_rows import facts_table
    from millrace.audit.scanning.cell_rows import CELL_SCHEMA
    from millrace.audit.spark.spark_cells import verdicts_of

    def rows_of(topic: str) -> list[dict]:
        ledger = EventLedger()
        ledger.learn(told([1, 2], 1000, stream="01" * 8, topic=topic))
        groups = online_groups({("agg", "billing"): {PLACE: 10}}, {}, ledger.tiers.values(), {})
        reconciler = Reconciler(
            clusters=[
                ClusterReading("ewr", True, {"flights": "flights"}, (), {"flights": "flights"}),
                ClusterReading("agg", False, {"all": "flights"}, (), {"flights": "all"}),
            ],
            passed={}, gaps={}, window_ms=1000, grace_ms=0, now_ms=10_000, topics=("flights",), groups=groups,
        )  # fmt: skip
        facts = facts_table(ledger, {}, None, {"billing"})
        return verdicts_of(reconciler, CELL_SCHEMA.empty_table(), facts).to_pylist()

    window, own = rows_of("all")
    assert (window["topic"], window["producer"], window["verdict"]) == ("flights", "AA", "UNKNOWN")
    assert window["window_start_ms"] == 1000 and window["unreported"] == 2
    assert own["window_start_ms"] is None and own["verdict"] == "UNKNOWN"
    assert rows_of("another") == []


def test_a_group_that_got_records_of_two_names_under_one_stream_proves_nothing():
    from millrace.audit.contract.events import EventLedger
    from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler
    from millrace.audit.runs.doubtful_names import doubtful_names
    from millrace.audit.runs.fact_rows import facts_table
    from millrace.audit.scanning.cell_rows import CELL_SCHEMA
    from millrace.audit.spark.spark_cells import verdicts_of

    def doubts(*names: str) -> list[str]:
        ledger = EventLedger()
        for number, name in enumerate(names, start=1):
            ledger.learn(told([number], 1000 * number, stream="01" * 8, producer=name))
        groups = online_groups({("ewr", "billing"): {PLACE: 10}}, {}, ledger.tiers.values(), {})
        reconciler = Reconciler(
            clusters=[ClusterReading("ewr", True, {"flights": "flights"}, (), {"flights": "flights"})],
            passed={}, gaps={}, window_ms=1000, grace_ms=0, now_ms=10_000, topics=("flights",), groups=groups,
        )  # fmt: skip
        facts = facts_table(ledger, {}, None, {"billing"})
        rows = verdicts_of(reconciler, CELL_SCHEMA.empty_table(), facts)
        return [reason for reason, stream, topic in doubtful_names(rows) if stream and topic == "flights"]

    assert doubts("AA", "", "AA") == []
    sentence = "two producers use one stream id: it is known as {}, record headers name {}"
    assert doubts("AA", "", "ZZ") == [sentence.format("AA", "ZZ")]


def facts_streams(ledger) -> list[str]:
    return sorted({*ledger.streams, *(event.stream for event in ledger.tiers.values())})
