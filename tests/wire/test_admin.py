"""Administration through foreign clients: topics, settings, groups, offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import ConfigResource, NewPartitions, NewTopic, OffsetSpec
from kafka import KafkaAdminClient

from millrace.broker.protocol.frames import Api
from tests.raw_client import RawClient, is_served
from tests.waiting import patience
from tests.wire.foreign_clients import CLIENTS, PATIENCE_S, Refused, Sent, wait_until


def error_name(future) -> str:
    with pytest.raises(KafkaException) as refused:
        future.result(patience(PATIENCE_S))
    return refused.value.args[0].name()


def topics_of(admin) -> dict:
    return admin.list_topics(timeout=PATIENCE_S).topics


def partition_count(admin, topic) -> int:
    """0 while nobody knows of the topic: a broker may hear of a change after the controller has answered."""
    known = topics_of(admin)
    return len(known[topic].partitions) if topic in known else 0


def test_topics_are_made_described_widened_and_deleted(admin, fresh_name):
    topic = fresh_name("topic")
    new = NewTopic(topic, 3, 1, config={"retention.ms": "12345", "cleanup.policy": "compact"})
    admin.create_topics([new])[topic].result(patience(PATIENCE_S))
    wait_until(lambda: partition_count(admin, topic) == 3, "three partitions")
    assert error_name(admin.create_topics([new])[topic]) == "TOPIC_ALREADY_EXISTS"

    resource = ConfigResource("topic", topic)
    (described,) = admin.describe_configs([resource]).values()
    configs = described.result(patience(PATIENCE_S))
    assert configs["retention.ms"].value == "12345"
    assert configs["cleanup.policy"].value == "compact"
    assert not configs["retention.ms"].is_default
    assert configs["segment.bytes"].is_default

    admin.create_partitions([NewPartitions(topic, 5)])[topic].result(patience(PATIENCE_S))
    wait_until(lambda: partition_count(admin, topic) == 5, "five partitions")
    assert error_name(admin.create_partitions([NewPartitions(topic, 2)])[topic]) == "INVALID_PARTITIONS"

    admin.delete_topics([topic])[topic].result(patience(PATIENCE_S))
    wait_until(lambda: topic not in topics_of(admin), "the topic is gone")
    assert error_name(admin.delete_topics([topic])[topic]) == "UNKNOWN_TOPIC_OR_PART"


@pytest.mark.parametrize(
    ("name", "partitions", "replicas", "config", "error"),
    [
        ("no/slashes", 1, 1, {}, "TOPIC_EXCEPTION"),
        ("x" * 250, 1, 1, {}, "TOPIC_EXCEPTION"),
        ("none", 0, 1, {}, "INVALID_PARTITIONS"),
        ("too-many-replicas", 1, 3, {}, "INVALID_REPLICATION_FACTOR"),
        ("unknown-setting", 1, 1, {"no.such.setting": "1"}, "INVALID_CONFIG"),
        ("wrong-setting", 1, 1, {"retention.ms": "soon"}, "INVALID_CONFIG"),
    ],
)
def test_topic_that_cannot_be_is_refused_with_its_own_error(admin, name, partitions, replicas, config, error):
    made = admin.create_topics([NewTopic(name, partitions, replicas, config=config)])
    assert error_name(made[name]) == error
    assert name not in topics_of(admin)


def test_topic_made_again_under_its_name_is_empty(server, admin, readers, new_topic):
    client = readers[0]
    topic = new_topic()
    client.produce(topic, [Sent(b"old")])
    admin.delete_topics([topic])[topic].result(patience(PATIENCE_S))
    wait_until(lambda: topic not in topics_of(admin), "the topic is gone")
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(patience(PATIENCE_S))
    wait_until(lambda: is_served(server.port, topic, 1), "the new topic is served")
    assert client.bounds(topic, 0) == (0, 0)
    assert client.produce(topic, [Sent(b"new")]) == [0]
    assert [record.value for record in client.consume(topic, [0], 1)] == [b"new"]


def test_settings_are_altered_and_take_effect(admin, readers, new_topic):
    topic = new_topic()
    resource = ConfigResource("topic", topic, set_config={"max.message.bytes": "1000"})
    (altered,) = admin.alter_configs([resource]).values()
    altered.result(patience(PATIENCE_S))

    def limit() -> str:
        (described,) = admin.describe_configs([ConfigResource("topic", topic)]).values()
        return described.result(patience(PATIENCE_S))["max.message.bytes"].value

    wait_until(lambda: limit() == "1000", "the new limit")
    with pytest.raises(Refused) as refused:
        readers[0].produce(topic, [Sent(bytes(1_000))])
    assert refused.value.reason == "MESSAGE_TOO_LARGE"


def test_records_below_an_offset_are_deleted(admin, readers, new_topic):
    client, topic = readers[0], new_topic()
    client.produce(topic, [Sent(b"%d" % number) for number in range(10)])
    (deleted,) = admin.delete_records([TopicPartition(topic, 0, 6)]).values()
    assert deleted.result(patience(PATIENCE_S)).low_watermark == 6
    for reader in readers:
        assert reader.bounds(topic, 0) == (6, 10)
        assert [record.offset for record in reader.consume(topic, [0], 4, start=6)] == [6, 7, 8, 9]


def test_offsets_by_specification(admin, readers, new_topic):
    client, topic = readers[0], new_topic()
    times_ms = [5_000, 9_000, 7_000]
    client.produce(topic, [Sent(b"x", timestamp_ms=1_700_000_000_000 + time_ms) for time_ms in times_ms])

    def offset(spec) -> int:
        (found,) = admin.list_offsets({TopicPartition(topic, 0): spec}).values()
        return found.result(patience(PATIENCE_S)).offset

    assert offset(OffsetSpec.earliest()) == 0
    assert offset(OffsetSpec.latest()) == 3
    assert offset(OffsetSpec.max_timestamp()) == 1
    assert offset(OffsetSpec.for_timestamp(1_700_000_000_000 + 6_000)) == 1


def test_groups_are_listed_described_and_deleted(admin, client, new_topic, fresh_name):
    topic, group = new_topic(), fresh_name("group")
    client.produce(topic, [Sent(b"x")])
    member = client.member(group, topic)
    wait_until(lambda: bool(member.records), "the member reads")

    seen: list[Any] = []

    def is_in(state: ConsumerGroupState) -> bool:
        seen.append(admin.describe_consumer_groups([group])[group].result(patience(PATIENCE_S)))
        return bool(seen[-1].state == state)

    # A client that reads already may join once more, when it hears of the topic's partitions anew.
    wait_until(lambda: is_in(ConsumerGroupState.STABLE), "the group is stable")
    described = seen[-1]
    listed = {g.group_id: g for g in admin.list_consumer_groups().result(patience(PATIENCE_S)).valid}
    assert group in listed
    (shown,) = described.members
    assert described.partition_assignor in ("range", "roundrobin")
    assert [(p.topic, p.partition) for p in shown.assignment.topic_partitions] == [(topic, 0)]
    assert shown.host.lstrip("/") == "127.0.0.1"
    assert error_name(admin.delete_consumer_groups([group])[group]) == "NON_EMPTY_GROUP"

    # A commit that such a join overtakes is refused; what was read is read and committed again after it.
    wait_until(lambda: client.committed(group, topic, 0) == 1, "what was read is committed")
    member.leave()
    wait_until(lambda: is_in(ConsumerGroupState.EMPTY), "the group is empty")
    assert client.committed(group, topic, 0) == 1
    admin.delete_consumer_groups([group])[group].result(patience(PATIENCE_S))
    assert client.committed(group, topic, 0) is None
    assert error_name(admin.delete_consumer_groups([group])[group]) == "GROUP_ID_NOT_FOUND"


def test_offsets_of_an_empty_group_are_set_and_read(admin, readers, new_topic, fresh_name):
    topic, group = new_topic(), fresh_name("group")
    readers[0].produce(topic, [Sent(b"%d" % number) for number in range(5)])
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 3)])
    (altered,) = admin.alter_consumer_group_offsets([wanted]).values()
    altered.result(patience(PATIENCE_S))
    for reader in readers:
        assert reader.committed(group, topic, 0) == 3
    (listed,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
    assert [
        (p.topic, p.partition, p.offset) for p in listed.result(patience(PATIENCE_S)).topic_partitions
    ] == [(topic, 0, 3)]


@pytest.mark.parametrize("library", [c for c in CLIENTS if c.admin_type], ids=lambda library: library.name)
def test_every_admin_client_is_told_what_is_refused(bootstrap, new_topic, fresh_name, library):
    """Under the names that the protocol has for it; the same cases as through confluent-kafka above."""
    there, unknown, name = new_topic(partitions=2), fresh_name("unknown"), fresh_name("topic")
    admin = library.admin_type(bootstrap)
    cases: dict[str, tuple[Callable[[], None], str]] = {
        "exists": (lambda: admin.create_topic(there), "TOPIC_ALREADY_EXISTS"),
        "slash": (lambda: admin.create_topic("no/slashes"), "INVALID_TOPIC_EXCEPTION"),
        "no partitions": (lambda: admin.create_topic(name, 0), "INVALID_PARTITIONS"),
        "replicas": (lambda: admin.create_topic(name, 1, 3), "INVALID_REPLICATION_FACTOR"),
        "setting": (lambda: admin.create_topic(name, 1, 1, {"no.such": "1"}), "INVALID_CONFIG"),
        "value": (lambda: admin.create_topic(name, 1, 1, {"retention.ms": "soon"}), "INVALID_CONFIG"),
        "fewer": (lambda: admin.add_partitions(there, 1), "INVALID_PARTITIONS"),
        "no topic to widen": (lambda: admin.add_partitions(unknown, 2), "UNKNOWN_TOPIC_OR_PARTITION"),
        "unknown setting": (lambda: admin.alter_topic(there, "no.such", "1"), "INVALID_CONFIG"),
        "wrong value": (lambda: admin.alter_topic(there, "retention.ms", "soon"), "INVALID_CONFIG"),
        "no topic to alter": (
            lambda: admin.alter_topic(unknown, "retention.ms", "1"),
            "UNKNOWN_TOPIC_OR_PARTITION",
        ),
        "no topic to delete": (lambda: admin.delete_topic(unknown), "UNKNOWN_TOPIC_OR_PARTITION"),
    }
    told: dict[str, str] = {}
    try:
        for case, (attempt, _) in cases.items():
            try:
                attempt()
                told[case] = "nothing"
            except Refused as refused:
                told[case] = refused.reason
    finally:
        admin.close()
    assert told == {case: reason for case, (_, reason) in cases.items()}


@pytest.mark.parametrize("library", [c for c in CLIENTS if c.admin_type], ids=lambda library: library.name)
def test_every_admin_client_makes_alters_widens_and_deletes_topics(admin, bootstrap, fresh_name, library):
    topic = fresh_name("topic")
    other = library.admin_type(bootstrap)

    def retention() -> str:
        (described,) = admin.describe_configs([ConfigResource("topic", topic)]).values()
        return str(described.result(patience(PATIENCE_S))["retention.ms"].value)

    try:
        other.create_topic(topic, 2, 1, {"retention.ms": "12345"})
        wait_until(lambda: partition_count(admin, topic) == 2, "two partitions")
        assert retention() == "12345"
        other.add_partitions(topic, 3)
        wait_until(lambda: partition_count(admin, topic) == 3, "three partitions")
        other.alter_topic(topic, "retention.ms", "54321")
        wait_until(lambda: retention() == "54321", "the new setting")
        other.delete_topic(topic)
        wait_until(lambda: partition_count(admin, topic) == 0, "the topic is gone")
    finally:
        other.close()


def test_kafka_python_administers_too(bootstrap, fresh_name):
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        topic = fresh_name("topic")
        admin.create_topics({topic: {"num_partitions": 2, "replication_factor": 1}})
        wait_until(lambda: topic in admin.list_topics(), "the topic is listed")
        wait_until(lambda: len(admin.describe_topics([topic])[0]["partitions"]) == 2, "two partitions")
        assert admin.describe_cluster()["brokers"]
        admin.delete_topics([topic])
        wait_until(lambda: topic not in admin.list_topics(), "the topic is gone")
    finally:
        admin.close()


ON_CLUSTER = {
    "ALTER",
    "ALTER_CONFIGS",
    "CLUSTER_ACTION",
    "CREATE",
    "DESCRIBE",
    "DESCRIBE_CONFIGS",
    "IDEMPOTENT_WRITE",
}
ON_TOPIC = ON_CLUSTER - {"CLUSTER_ACTION", "IDEMPOTENT_WRITE"} | {"DELETE", "READ", "WRITE"}


def test_who_asks_what_it_may_do_is_told_everything(admin, new_topic):
    """KIP-430, by a server without an authorizer."""
    topic = new_topic()

    def operations(described: Any) -> set[str]:
        return {operation.name for operation in described.authorized_operations or ()}

    for asks in (True, False):
        cluster = admin.describe_cluster(include_authorized_operations=asks).result(patience(PATIENCE_S))
        (found,) = admin.describe_topics(
            TopicCollection([topic]), include_authorized_operations=asks
        ).values()
        assert operations(cluster) == (ON_CLUSTER if asks else set())
        assert operations(found.result(patience(PATIENCE_S))) == (ON_TOPIC if asks else set())


def test_every_api_leaves_out_what_may_be_done_where_nobody_asks(server, new_topic):
    topic, not_asked = new_topic(), -(2**31)
    on_topic, on_cluster = 0b1101_1111_1000, 0b1_1111_1010_0000
    with RawClient(server.port) as raw:
        for asks in (False, True):
            of_topics = {"include_topic_authorized_operations": asks}
            of_both = {**of_topics, "include_cluster_authorized_operations": asks}
            for version, asked in ((8, of_both), (10, of_both), (12, of_topics)):
                named = {"name": topic, "topic_id": None} if version >= 10 else {"name": topic}
                answer = raw.ask(
                    Api.METADATA, version, topics=[named], allow_auto_topic_creation=False, **asked
                )
                (found,) = answer.topics
                assert found.topic_authorized_operations == (on_topic if asks else not_asked)
                if version <= 10:
                    assert answer.cluster_authorized_operations == (on_cluster if asks else not_asked)
            answer = raw.ask(Api.DESCRIBE_CLUSTER, 0, include_cluster_authorized_operations=asks)
            assert answer.cluster_authorized_operations == (on_cluster if asks else not_asked)
        answer = raw.ask(
            Api.DESCRIBE_TOPIC_PARTITIONS,
            0,
            topics=[{"name": topic}],
            response_partition_limit=10,
            cursor=None,
        )
        assert [found.topic_authorized_operations for found in answer.topics] == [on_topic]
