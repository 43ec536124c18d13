"""Administration step by step, without a client library in between: its codes, and what it leaves behind."""

from __future__ import annotations

import uuid
from typing import Any

from millrace.broker.protocol.frames import Api
from tests.raw_client import RawClient, batch_of
from tests.wire.foreign_clients import error_name, wait_until

TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = range(4)
TIMEOUT_MS = 20_000
TOPIC_CONFIG, BROKER_CONFIG, DEFAULT_CONFIG = 1, 4, 5


def created(raw: RawClient, *topics: dict[str, Any], validate_only: bool = False) -> list[str]:
    answer = raw.ask(Api.CREATE_TOPICS, 7, topics=topics, timeout=TIMEOUT_MS, validate_only=validate_only)
    codes = {t.name: error_name(t.error_code) for t in answer.topics}
    return [codes[topic["name"]] for topic in topics]


def named(name: str, partitions: int = 1, factor: int = 1, **configs: str) -> dict[str, Any]:
    settings = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
    return {"name": name, "num_partitions": partitions, "replication_factor": factor, "configs": settings}


def assigned(name: str, *replicas: tuple[int, ...], first: int = 0, counts: int = -1) -> dict[str, Any]:
    assignments = [{"partition_index": first + n, "broker_ids": ids} for n, ids in enumerate(replicas)]
    return {"name": name, "num_partitions": counts, "replication_factor": counts, "assignments": assignments}


def exists(raw: RawClient, name: str) -> bool:
    (shown,) = raw.ask(Api.METADATA, 9, topics=[{"name": name}], allow_auto_topic_creation=False).topics
    return bool(shown.error_code == 0)


def test_topics_that_cannot_be_made(raw, new_topic, fresh_name):
    there = new_topic()
    name = fresh_name("topic")
    dotted = fresh_name("dotted").replace("-", ".")
    assert created(raw, named(dotted)) == ["NONE"]
    wait_until(lambda: exists(raw, dotted), "the topic with dots")
    cases = {
        "exists": named(there),
        "slash": named("no/slashes"),
        "empty name": named(""),
        "a dot": named("."),
        "two dots": named(".."),
        "too long": named("x" * 250),
        "differs from one by dots alone": named(dotted.replace(".", "_")),
        "no partitions": named(name, 0),
        "minus two partitions": named(name, -2),
        "no replicas": named(name, 1, 0),
        "more replicas than brokers": named(name, 1, 3),
        "unknown setting": named(name, no_such_setting="1"),
        "value of another kind": named(name, retention_ms="soon"),
        "value out of bounds": named(name, max_message_bytes="-5"),
        "unknown policy": named(name, cleanup_policy="burn"),
        "unknown codec": named(name, compression_type="zip"),
        "segment too small": named(name, segment_bytes="13"),
        "assignment to a broker that is not": assigned(name, (77,)),
        "assignment to a broker twice": assigned(name, (1, 1)),
        "assignment to nobody": assigned(name, ()),
        "assignment with a gap": assigned(name, (1,), first=1),
        "assignment and counts": assigned(name, (1,), counts=1),
        "assignments of different size": assigned(name, (1,), (1, 2)),
    }
    codes = {what: created(raw, topic)[0] for what, topic in cases.items()}
    twice = raw.ask(Api.CREATE_TOPICS, 7, topics=[named(name), named(name, 2)], timeout=TIMEOUT_MS)
    codes["twice in a request"] = ",".join(sorted({error_name(t.error_code) for t in twice.topics}))
    assert codes == {
        "exists": "TOPIC_ALREADY_EXISTS",
        "slash": "INVALID_TOPIC_EXCEPTION",
        "empty name": "INVALID_TOPIC_EXCEPTION",
        "a dot": "INVALID_TOPIC_EXCEPTION",
        "two dots": "INVALID_TOPIC_EXCEPTION",
        "too long": "INVALID_TOPIC_EXCEPTION",
        "differs from one by dots alone": "INVALID_TOPIC_EXCEPTION",
        "no partitions": "INVALID_PARTITIONS",
        "minus two partitions": "INVALID_PARTITIONS",
        "no replicas": "INVALID_REPLICATION_FACTOR",
        "more replicas than brokers": "INVALID_REPLICATION_FACTOR",
        "unknown setting": "INVALID_CONFIG",
        "value of another kind": "INVALID_CONFIG",
        "value out of bounds": "INVALID_CONFIG",
        "unknown policy": "INVALID_CONFIG",
        "unknown codec": "INVALID_CONFIG",
        "segment too small": "INVALID_CONFIG",
        "assignment to a broker that is not": "INVALID_REPLICA_ASSIGNMENT",
        "assignment to a broker twice": "INVALID_REPLICA_ASSIGNMENT",
        "assignment to nobody": "INVALID_REPLICA_ASSIGNMENT",
        "assignment with a gap": "INVALID_REPLICA_ASSIGNMENT",
        "assignment and counts": "INVALID_REQUEST",
        "assignments of different size": "INVALID_REPLICA_ASSIGNMENT",
        "twice in a request": "INVALID_REQUEST",
    }
    assert not exists(raw, name)


def test_least_size_of_a_segment(raw, server, fresh_name):
    def code(size: int) -> str:
        (found,) = created(raw, named(fresh_name("topic"), segment_bytes=str(size)), validate_only=True)
        return found

    assert (code(13), code(1 << 20)) == ("INVALID_CONFIG", "NONE")
    expected = server.outcome("small-segments", kafka="INVALID_CONFIG", millrace="NONE")
    assert (code(14), code((1 << 20) - 1)) == (expected, expected)


def test_settings_that_have_no_effect_or_contradict_each_other_are_looked_at_too(raw, server, fresh_name):
    """A throttle that nobody can read would be none."""

    def codes(*settings: dict[str, str]) -> list[str]:
        topics = [named(fresh_name("topic"), **each) for each in settings]
        return created(raw, *topics, validate_only=True)

    throttled = "follower.replication.throttled.replicas"
    right = [{throttled: value} for value in ("*", "", "0:1,1:2", "0:1,")]
    right += [{"preallocate": "TRUE"}, {"compression.gzip.level": "-1"}, {"min.compaction.lag.ms": "5"}]
    assert codes(*right) == ["NONE"] * len(right)
    wrong = [{throttled: value} for value in ("0-2", "*,0:1", "0:a")]
    wrong += [{"preallocate": "banana"}, {"compression.gzip.level": "0"}, {"compression.lz4.level": "18"}]
    wrong += [{"segment.jitter.ms": "-1"}, {"retention.ms": "1_000"}]
    wrong += [{"min.compaction.lag.ms": "6", "max.compaction.lag.ms": "5"}]
    assert codes(*wrong) == ["INVALID_CONFIG"] * len(wrong)
    older = [{"message.format.version": "3.0"}, {"message.downconversion.enable": "true"}]
    older += [{"message.timestamp.difference.max.ms": "1"}]
    expected = server.outcome("settings-of-older-releases", kafka="INVALID_CONFIG", millrace="NONE")
    assert codes(*older) == [expected] * len(older)


def test_validation_alone_makes_nothing(raw, fresh_name):
    name, wrong = fresh_name("topic"), fresh_name("topic")
    assert created(raw, named(name, 3), named(wrong, 1, 9), validate_only=True) == [
        "NONE",
        "INVALID_REPLICATION_FACTOR",
    ]
    assert not exists(raw, name)
    assert created(raw, named(name, 3)) == ["NONE"], "and the name is free still"


def test_answer_to_a_creation_tells_what_was_made(raw, fresh_name):
    name = fresh_name("topic")
    topic = {**named(name, 2, retention_ms="12345"), "num_partitions": -1, "replication_factor": -1}
    (made,) = raw.ask(Api.CREATE_TOPICS, 7, topics=[topic], timeout=TIMEOUT_MS).topics
    assert (made.num_partitions, made.replication_factor) == (1, 1), "the broker's defaults"
    configs = {entry.name: (entry.value, int(entry.config_source)) for entry in made.configs}
    assert configs["retention.ms"] == ("12345", TOPIC_CONFIG)
    assert configs["cleanup.policy"] == ("delete", DEFAULT_CONFIG)
    assert made.topic_id is not None


def test_partitions_are_added_but_never_taken_away(raw, new_topic, fresh_name):
    topic = new_topic(partitions=2)

    def widened(name: str, count: int, *assignments: tuple[int, ...], validate_only: bool = False) -> str:
        wanted = {
            "name": name,
            "count": count,
            "assignments": [{"broker_ids": ids} for ids in assignments] or None,
        }
        answer = raw.ask(
            Api.CREATE_PARTITIONS, 3, topics=[wanted], timeout=TIMEOUT_MS, validate_only=validate_only
        )
        return error_name(answer.results[0].error_code)

    codes = {
        "fewer": widened(topic, 1),
        "as many": widened(topic, 2),
        "none": widened(topic, 0),
        "unknown topic": widened(fresh_name("unknown"), 5),
        "too few assignments": widened(topic, 4, (1,)),
        "assignment to a broker that is not": widened(topic, 3, (77,)),
        "only validated": widened(topic, 9, validate_only=True),
        "one more": widened(topic, 3, (1,)),
    }
    assert codes == {
        "fewer": "INVALID_PARTITIONS",
        "as many": "INVALID_PARTITIONS",
        "none": "INVALID_PARTITIONS",
        "unknown topic": "UNKNOWN_TOPIC_OR_PARTITION",
        "too few assignments": "INVALID_REPLICA_ASSIGNMENT",
        "assignment to a broker that is not": "INVALID_REPLICA_ASSIGNMENT",
        "only validated": "NONE",
        "one more": "NONE",
    }

    def count() -> int:
        (shown,) = raw.ask(Api.METADATA, 9, topics=[{"name": topic}]).topics
        return len(shown.partitions)

    wait_until(lambda: count() == 3, "three partitions")


def test_topics_are_deleted_by_name_or_id(raw, new_topic, fresh_name):
    first, second = new_topic(), new_topic()
    (shown,) = raw.ask(Api.METADATA, 12, topics=[{"name": second}]).topics

    def deleted(**topic: Any) -> str:
        answer = raw.ask(Api.DELETE_TOPICS, 6, topics=[topic], timeout=TIMEOUT_MS)
        return error_name(answer.responses[0].error_code)

    codes = {
        "by name": deleted(name=first, topic_id=None),
        "again": deleted(name=first, topic_id=None),
        "by id": deleted(name=None, topic_id=shown.topic_id),
        "an id again": deleted(name=None, topic_id=shown.topic_id),
        "an id nobody has": deleted(name=None, topic_id=uuid.UUID(int=77)),
        "never there": deleted(name=fresh_name("unknown"), topic_id=None),
    }
    assert codes == {
        "by name": "NONE",
        "again": "UNKNOWN_TOPIC_OR_PARTITION",
        "by id": "NONE",
        "an id again": "UNKNOWN_TOPIC_ID",
        "an id nobody has": "UNKNOWN_TOPIC_ID",
        "never there": "UNKNOWN_TOPIC_OR_PARTITION",
    }
    wait_until(lambda: not exists(raw, first) and not exists(raw, second), "both are gone")


def test_records_are_deleted_up_to_the_end_and_not_beyond(raw, new_topic, fresh_name):
    topic, compacted = new_topic(), new_topic(cleanup_policy="compact")
    for _ in range(5):
        raw.produce({(topic, 0): batch_of(b"x", b"y")})

    def deleted(name: str, offset: int, partition: int = 0) -> tuple[str, int]:
        partitions = [{"partition_index": partition, "offset": offset}]
        answer = raw.ask(
            Api.DELETE_RECORDS, 2, topics=[{"name": name, "partitions": partitions}], timeout=TIMEOUT_MS
        )
        (found,) = answer.topics[0].partitions
        return error_name(found.error_code), found.low_watermark

    outcomes = {
        "some": deleted(topic, 3),
        "fewer than are gone": deleted(topic, 1),
        "beyond the end": deleted(topic, 11),
        "negative": deleted(topic, -5),
        "unknown topic": deleted(fresh_name("unknown"), 1),
        "unknown partition": deleted(topic, 1, partition=7),
        "compacted topic": deleted(compacted, 0),
        "all": deleted(topic, -1),
    }
    assert outcomes == {
        "some": ("NONE", 3),
        "fewer than are gone": ("NONE", 3),
        "beyond the end": ("OFFSET_OUT_OF_RANGE", -1),
        "negative": ("OFFSET_OUT_OF_RANGE", -1),
        "unknown topic": ("UNKNOWN_TOPIC_OR_PARTITION", -1),
        "unknown partition": ("UNKNOWN_TOPIC_OR_PARTITION", -1),
        "compacted topic": ("POLICY_VIOLATION", -1),
        "all": ("NONE", 10),
    }


def described(raw: RawClient, kind: int, name: str, *keys: str) -> tuple[str, dict[str, tuple[Any, int]]]:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": keys or None}
    (found,) = raw.ask(Api.DESCRIBE_CONFIGS, 4, resources=[resource], include_synonyms=True).results
    return error_name(found.error_code), {
        entry.name: (entry.value, int(entry.config_source)) for entry in found.configs
    }


def altered(
    raw: RawClient, name: str, *operations: tuple[str, int, str | None], kind: int = TOPIC, dry: bool = False
) -> str:
    configs = [{"name": key, "config_operation": what, "value": value} for key, what, value in operations]
    resource = {"resource_type": kind, "resource_name": name, "configs": configs}
    answer = raw.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource], validate_only=dry)
    return error_name(answer.responses[0].error_code)


def test_settings_are_changed_one_by_one(raw, new_topic, fresh_name):
    topic = new_topic(retention_ms=1_000_000)
    assert altered(raw, topic, ("max.message.bytes", SET, "5000"), ("retention.ms", DELETE, None)) == "NONE"

    def values(*keys: str) -> list[tuple[Any, int]]:
        code, found = described(raw, TOPIC, topic, *keys)
        assert code == "NONE"
        return [found[key] for key in keys]

    wait_until(lambda: values("max.message.bytes") == [("5000", TOPIC_CONFIG)], "the new value")
    assert values("retention.ms") == [("-1", BROKER_CONFIG)], "the broker's own setting again"
    assert altered(raw, topic, ("cleanup.policy", APPEND, "compact")) == "NONE"
    wait_until(lambda: values("cleanup.policy") == [("delete,compact", TOPIC_CONFIG)], "two policies")
    assert altered(raw, topic, ("cleanup.policy", SUBTRACT, "delete")) == "NONE"
    wait_until(lambda: values("cleanup.policy") == [("compact", TOPIC_CONFIG)], "one policy")
    assert altered(raw, topic, ("max.message.bytes", SET, "7000"), dry=True) == "NONE"
    codes = {
        "unknown topic": altered(raw, fresh_name("unknown"), ("retention.ms", SET, "1")),
        "unknown setting": altered(raw, topic, ("no.such.setting", SET, "1")),
        "value of another kind": altered(raw, topic, ("retention.ms", SET, "soon")),
        "value out of bounds": altered(raw, topic, ("min.insync.replicas", SET, "0")),
        "no value": altered(raw, topic, ("retention.ms", SET, None)),
        "append to no list": altered(raw, topic, ("retention.ms", APPEND, "1")),
        "twice": altered(raw, topic, ("retention.ms", SET, "1"), ("retention.ms", SET, "2")),
        "one good, one bad": altered(
            raw, topic, ("retention.ms", SET, "77"), ("max.message.bytes", SET, "x")
        ),
        "unknown kind": altered(raw, topic, ("retention.ms", SET, "1"), kind=77),
    }
    assert codes == {
        "unknown topic": "UNKNOWN_TOPIC_OR_PARTITION",
        "unknown setting": "INVALID_CONFIG",
        "value of another kind": "INVALID_CONFIG",
        "value out of bounds": "INVALID_CONFIG",
        "no value": "INVALID_REQUEST",
        "append to no list": "INVALID_CONFIG",
        "twice": "INVALID_REQUEST",
        "one good, one bad": "INVALID_CONFIG",
        "unknown kind": "INVALID_REQUEST",
    }
    assert values("max.message.bytes", "retention.ms") == [("5000", TOPIC_CONFIG), ("-1", BROKER_CONFIG)]


def test_settings_are_replaced_as_a_whole_by_the_older_request(raw, new_topic):
    topic = new_topic(retention_ms=1_000_000, max_message_bytes=9_000)
    resource = {
        "resource_type": TOPIC,
        "resource_name": topic,
        "configs": [{"name": "max.message.bytes", "value": "8000"}],
    }
    answer = raw.ask(Api.ALTER_CONFIGS, 2, resources=[resource], validate_only=False)
    assert error_name(answer.responses[0].error_code) == "NONE"

    def values() -> list[tuple[Any, int]]:
        _, found = described(raw, TOPIC, topic)
        return [found["max.message.bytes"], found["retention.ms"]]

    wait_until(
        lambda: values() == [("8000", TOPIC_CONFIG), ("-1", BROKER_CONFIG)], "only what was given is set"
    )


def test_every_setting_of_a_topic_has_kafkas_name_and_default(raw, server, new_topic):
    """The names of all settings a client may meet, and every default that is the same."""
    code, found = described(raw, TOPIC, new_topic())
    assert code == "NONE"
    defaults = {name: value for name, (value, source) in found.items() if source == DEFAULT_CONFIG}
    expected = {
        "cleanup.policy": "delete",
        "compression.type": "producer",
        "delete.retention.ms": "86400000",
        "file.delete.delay.ms": server.outcome("settings-without-effect", kafka="60000", millrace=None),
        "flush.messages": "9223372036854775807",
        "flush.ms": "9223372036854775807",
        "index.interval.bytes": "4096",
        "max.compaction.lag.ms": "9223372036854775807",
        "max.message.bytes": "1048588",
        "message.timestamp.after.max.ms": server.outcome(
            "future-timestamps", kafka="3600000", millrace="9223372036854775807"
        ),
        "message.timestamp.before.max.ms": "9223372036854775807",
        "message.timestamp.type": "CreateTime",
        "min.cleanable.dirty.ratio": "0.5",
        "min.compaction.lag.ms": "0",
        "preallocate": server.outcome("settings-without-effect", kafka="false", millrace=None),
        "retention.bytes": "-1",
        "segment.bytes": "1073741824",
        "segment.index.bytes": "10485760",
        "segment.jitter.ms": server.outcome("settings-without-effect", kafka="0", millrace=None),
        "segment.ms": "604800000",
        "unclean.leader.election.enable": "false",
    }
    assert {name: defaults.get(name) for name in expected} == expected
    assert found["retention.ms"] == ("-1", BROKER_CONFIG)
    assert found["min.insync.replicas"][0] == "1", (
        "whoever says so: some releases keep it as a cluster's setting"
    )


def test_descriptions_of_what_is_not(raw, new_topic, fresh_name):
    topic = new_topic()
    assert described(raw, TOPIC, fresh_name("unknown"))[0] == "UNKNOWN_TOPIC_OR_PARTITION"
    assert described(raw, TOPIC, "no/slashes")[0] == "INVALID_TOPIC_EXCEPTION"
    assert described(raw, BROKER, "77")[0] == "INVALID_REQUEST"
    assert described(raw, BROKER, "one")[0] == "INVALID_REQUEST"
    assert described(raw, TOPIC, topic, "no.such.setting") == ("NONE", {})
    code, found = described(raw, BROKER, "1", "log.retention.ms", "num.partitions")
    assert code == "NONE"
    assert found == {"log.retention.ms": ("-1", BROKER_CONFIG), "num.partitions": ("1", DEFAULT_CONFIG)}


def test_settings_of_what_is_neither_a_topic_nor_a_broker(raw, server, fresh_name):
    """Loggers of a broker (KIP-412), subscriptions to clients' metrics (KIP-714), settings of a group."""
    codes = {
        kind: (described(raw, kind, name)[0], altered(raw, name, (key, SET, value), kind=kind, dry=True))
        for kind, name, key, value in (
            (8, "1", "root", "INFO"),
            (16, fresh_name("subscription"), "interval.ms", "60000"),
            (32, fresh_name("group"), "consumer.session.timeout.ms", "45000"),
        )
    }
    assert codes == server.outcome(
        "settings-of-loggers-and-groups",
        kafka=dict.fromkeys(codes, ("NONE", "NONE")),
        millrace=dict.fromkeys(codes, ("INVALID_REQUEST", "INVALID_REQUEST")),
    )
    assert described(raw, 64, "1")[0] == "INVALID_REQUEST"


def test_cluster_is_described(raw, server):
    shown = raw.ask(Api.DESCRIBE_CLUSTER, 1, endpoint_type=1)
    assert error_name(shown.error_code) == "NONE"
    assert [(b.broker_id, b.host, b.port, b.rack) for b in shown.brokers] == [
        (1, "127.0.0.1", server.port, None)
    ]
    assert shown.controller_id == 1
    metadata = raw.ask(Api.METADATA, 9, topics=[])
    assert metadata.cluster_id == shown.cluster_id
    assert metadata.controller_id == 1


def test_log_directories_are_described(raw, server, new_topic):
    topic = new_topic(partitions=2)
    size = len(batch_of(b"x" * 1_000))
    raw.produce({(topic, 1): batch_of(b"x" * 1_000)})
    shown = raw.ask(Api.DESCRIBE_LOG_DIRS, 4, topics=[{"topic": topic, "partitions": [0, 1]}])
    (folder,) = shown.results
    assert error_name(folder.error_code) == "NONE"
    assert folder.log_dir == str(server.data)
    (found,) = folder.topics
    assert {
        p.partition_index: (p.partition_size, p.offset_lag, p.is_future_key) for p in found.partitions
    } == {
        0: (0, 0, False),
        1: (size, 0, False),
    }
    assert folder.total_bytes > folder.usable_bytes > 0


def test_leaders_are_elected_only_where_needed(raw, new_topic, fresh_name):
    topic = new_topic()

    def elected(kind: int, name: str | None, partition: int = 0) -> Any:
        asked = None if name is None else [{"topic": name, "partitions": [partition]}]
        answer = raw.ask(Api.ELECT_LEADERS, 2, election_type=kind, topic_partitions=asked, timeout=TIMEOUT_MS)
        return [
            error_name(p.error_code) for t in answer.replica_election_results for p in t.partition_result
        ] or error_name(answer.error_code)

    preferred, unclean = 0, 1
    assert elected(preferred, topic) == ["ELECTION_NOT_NEEDED"]
    assert elected(unclean, topic) == ["ELECTION_NOT_NEEDED"]
    assert elected(preferred, fresh_name("unknown")) == ["UNKNOWN_TOPIC_OR_PARTITION"]
    assert elected(preferred, topic, partition=9) == ["UNKNOWN_TOPIC_OR_PARTITION"]
    assert elected(preferred, None) == "NONE"


def test_moves_that_make_no_sense_are_refused(raw, new_topic, fresh_name):
    topic = new_topic()

    def moved(name: str, replicas: tuple[int, ...] | None, partition: int = 0) -> str:
        partitions = [{"partition_index": partition, "replicas": replicas}]
        answer = raw.ask(
            Api.ALTER_PARTITION_REASSIGNMENTS,
            0,
            timeout=TIMEOUT_MS,
            topics=[{"name": name, "partitions": partitions}],
        )
        assert error_name(answer.error_code) == "NONE"
        (found,) = answer.responses[0].partitions
        return error_name(found.error_code)

    codes = {
        "where it is": moved(topic, (1,)),
        "to a broker that is not": moved(topic, (77,)),
        "twice to one": moved(topic, (1, 1)),
        "to nobody": moved(topic, ()),
        "cancel nothing": moved(topic, None),
        "unknown topic": moved(fresh_name("unknown"), (1,)),
        "unknown partition": moved(topic, (1,), partition=9),
    }
    assert codes == {
        "where it is": "NONE",
        "to a broker that is not": "INVALID_REPLICA_ASSIGNMENT",
        "twice to one": "INVALID_REPLICA_ASSIGNMENT",
        "to nobody": "INVALID_REPLICA_ASSIGNMENT",
        "cancel nothing": "NO_REASSIGNMENT_IN_PROGRESS",
        "unknown topic": "UNKNOWN_TOPIC_OR_PARTITION",
        "unknown partition": "UNKNOWN_TOPIC_OR_PARTITION",
    }
    ongoing = raw.ask(Api.LIST_PARTITION_REASSIGNMENTS, 0, timeout=TIMEOUT_MS, topics=None)
    assert (error_name(ongoing.error_code), list(ongoing.topics)) == ("NONE", [])


def test_topic_is_described_partition_by_partition(raw, new_topic, fresh_name):
    topic, unknown = new_topic(partitions=5), fresh_name("unknown")

    def shown(limit: int, cursor: dict[str, Any] | None = None) -> Any:
        return raw.ask(
            Api.DESCRIBE_TOPIC_PARTITIONS,
            0,
            topics=[{"name": topic}],
            response_partition_limit=limit,
            cursor=cursor,
        )

    first = shown(3)
    (described_topic,) = first.topics
    assert [p.partition_index for p in described_topic.partitions] == [0, 1, 2]
    assert {(p.leader_id, p.replica_nodes, p.isr_nodes) for p in described_topic.partitions} == {
        (1, (1,), (1,))
    }
    assert (first.next_cursor.topic_name, first.next_cursor.partition_index) == (topic, 3)
    rest = shown(3, {"topic_name": topic, "partition_index": 3})
    assert [p.partition_index for p in rest.topics[0].partitions] == [3, 4]
    assert rest.next_cursor is None
    (nothing,) = raw.ask(
        Api.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": unknown}], response_partition_limit=10
    ).topics
    assert error_name(nothing.error_code) == "UNKNOWN_TOPIC_OR_PARTITION"
