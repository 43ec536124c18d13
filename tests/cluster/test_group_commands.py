"""`millrace groups` and `millrace topics` as an operator uses them, against this broker and Apache Kafka."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from millrace.deploy import cli
from tests.threads import meanwhile
from tests.waiting import patience, until

PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def own_broker(zookeeper, tmp_path_factory) -> Iterator[str]:
    from tests.servers import BrokerProcess

    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"))
    try:
        yield broker.start().bootstrap
    finally:
        broker.kill()


@pytest.fixture(params=["millrace", pytest.param("kafka", marks=[pytest.mark.java, pytest.mark.kafka])])
def bootstrap(request) -> str:
    if request.param == "kafka":
        return request.getfixturevalue("kafka_peer").bootstrap
    return request.getfixturevalue("own_broker")


class Operator:
    """Runs commands against one cluster, as from a shell."""

    def __init__(self, bootstrap: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.bootstrap = bootstrap
        self._capsys = capsys

    def run(self, *words: str) -> str:
        """The output of a command that must succeed."""
        self._capsys.readouterr()
        status = cli.run([*words, "--bootstrap", self.bootstrap])
        out, err = self._capsys.readouterr()
        assert (status, err) == (0, ""), err
        return out

    def json(self, *words: str):
        return json.loads(self.run(*words, "--json"))

    def refused(self, *words: str) -> str:
        """The one line of a command that must fail without having said anything else."""
        self._capsys.readouterr()
        status = cli.run([*words, "--bootstrap", self.bootstrap])
        out, err = self._capsys.readouterr()
        assert status == 1, out + err
        assert out == ""
        assert err.count("\n") == 1
        return err

    def offsets(self, group: str) -> dict[tuple[str, int], int | None]:
        rows = self.json("groups", "describe", group)["partitions"]
        return {(row["topic"], row["partition"]): row["committed"] for row in rows}


@pytest.fixture
def operator(bootstrap, capsys) -> Operator:
    return Operator(bootstrap, capsys)


@pytest.fixture
def names() -> Callable[[str], str]:
    suffix = uuid.uuid4().hex[:8]
    return lambda kind: f"{kind}-{suffix}"


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until(condition, what, within_s=PATIENCE_S)


def produce(
    bootstrap: str, topic: str, count: int, partitions: int = 2, timestamp_ms: int = 1_000_000
) -> None:
    """`count` records to each partition; record n has the time `timestamp_ms` + n seconds."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(count):
        for partition in range(partitions):
            producer.produce(topic, b"x", partition=partition, timestamp=timestamp_ms + 1_000 * number)
    assert producer.flush(patience(PATIENCE_S)) == 0


def commit(bootstrap: str, group: str, topic: str, offsets: dict[int, int]) -> None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    consumer.commit(
        offsets=[TopicPartition(topic, number, offset) for number, offset in offsets.items()],
        asynchronous=False,
    )
    consumer.close()


def member(
    bootstrap: str, group: str, topic: str, client_id: str, **settings
) -> AbstractContextManager[None]:
    """A member of the group for as long as the block runs."""

    def consume(ended: threading.Event) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "client.id": client_id,
                "auto.offset.reset": "earliest",
                **settings,
            }
        )
        consumer.subscribe([topic])
        while not ended.is_set():
            consumer.poll(0.1)
        consumer.close()

    return meanwhile(consume)


def test_groups_from_birth_to_deletion(operator, names):
    topic, group = names("topic"), names("group")
    operator.run("topics", "create", topic, "--partitions", "3")
    produce(operator.bootstrap, topic, 10)

    with member(operator.bootstrap, group, topic, "reader-1", **{"enable.auto.commit": False}):
        wait_until(
            lambda: group in operator.run("groups", "list", "--state", "stable"), "the group is stable"
        )
        (listed,) = [row for row in operator.json("groups", "list") if row["group"] == group]
        assert (listed["state"], listed["type"], listed["protocol"]) == ("Stable", "classic", "consumer")
        described = operator.json("groups", "describe", group)
        assert described["state"] == "Stable"
        assert [each["client_id"] for each in described["members"]] == ["reader-1"]
        assert [row["partition"] for row in described["partitions"]] == [0, 1, 2]
        assert {row["end"] for row in described["partitions"]} == {10, 0}
        assert {row["committed"] for row in described["partitions"]} == {None}
        (holder,) = {row["member"] for row in described["partitions"]}
        table = operator.run("groups", "describe", group).splitlines()
        assert table[0].startswith(f"{group}  Stable, 1 member, assignor range, coordinator ")
        titles = ["TOPIC", "PARTITION", "COMMITTED", "END", "LAG", "MEMBER", "HOST", "CLIENT", "ID"]
        assert table[1].split() == titles
        assert table[2].split() == [topic, "0", "-", "10", "-", holder, "/127.0.0.1", "reader-1"]

        reset = operator.refused("groups", "reset", group, "--to-earliest", "--execute", "--topic", topic)
        assert f"group {group} cannot be reset: it is Stable with 1 member (reader-1 at 127.0.0.1)" in reset
        assert "cannot be deleted" in operator.refused("groups", "delete", group, "--yes")
        assert operator.offsets(group) == {(topic, number): None for number in range(3)}

    wait_until(lambda: operator.json("groups", "describe", group)["state"] == "Empty", "the member has left")
    commit(operator.bootstrap, group, topic, {0: 4, 1: 10})
    described = operator.json("groups", "describe", group)
    assert [(row["committed"], row["lag"], row["member"]) for row in described["partitions"]] == [
        (4, 6, None),
        (10, 0, None),
    ]
    assert described["lag"] == 6

    out = operator.run("groups", "delete", group, "--yes", "--offsets", "--topic", f"{topic}:1")
    assert out == f"deleted 1 offset of group {group}\n"
    assert operator.offsets(group) == {(topic, 0): 4}
    assert operator.run("groups", "delete", group, "--yes") == f"deleted group {group}\n"
    assert f"there is no group {group}" in operator.refused("groups", "describe", group)
    assert f"there is no group {group}" in operator.refused("groups", "delete", group, "--yes")
    assert "there is no group" in operator.refused(
        "groups", "delete", group, "--yes", "--offsets", "--topic", topic
    )
    assert group not in operator.run("groups", "list")


@pytest.mark.parametrize(
    "bootstrap",
    ["millrace", pytest.param("kafka", marks=[pytest.mark.java, pytest.mark.kafka, pytest.mark.long])],
    indirect=True,
)
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (["--to-earliest"], [0, 0]),
        (["--to-latest"], [10, 10]),
        (["--to-offset", "3"], [3, 3]),
        (["--to-offset", "99"], [10, 10]),
        (["--shift-by", "-2"], [2, 8]),
        (["--shift-by", "-5"], [0, 5]),
        (["--shift-by", "1"], [5, 10]),
        (["--to-timestamp", "0"], [0, 0]),
        (["--to-timestamp", "1970-01-01T00:16:43.5"], [4, 4]),
        (["--to-timestamp", "1970-01-01T01:16:43.5+01:00"], [4, 4]),
        (["--to-timestamp", "2100-01-01"], [10, 10]),
        (["--to-latest", "--topic", "TOPIC:1"], [4, 10]),
    ],
)
def test_reset_shows_first_and_does_it_when_told(operator, names, target, expected):
    topic, group = names("topic"), names("group")
    operator.run("topics", "create", topic, "--partitions", "2")
    produce(operator.bootstrap, topic, 10)
    commit(operator.bootstrap, group, topic, {0: 4, 1: 10})
    target = [word.replace("TOPIC", topic) for word in target]

    before = operator.offsets(group)
    shown = operator.json("groups", "reset", group, *target)
    assert shown["executed"] is False
    assert operator.offsets(group) == before
    out = operator.run("groups", "reset", group, *target)
    assert out.splitlines()[-1].startswith("dry run: ")
    out = operator.run("groups", "reset", group, *target, "--execute")
    assert out.splitlines()[-1].endswith(f"of group {group} set")
    after = operator.offsets(group)
    assert [after[topic, 0], after[topic, 1]] == expected
    new = {(row["topic"], row["partition"]): row["new"] for row in shown["partitions"]}
    assert after == before | new


def test_reset_of_a_group_that_does_not_exist_needs_topics(operator, names):
    topic, group = names("topic"), names("group")
    operator.run("topics", "create", topic)
    produce(operator.bootstrap, topic, 5, partitions=1)
    assert f"there is no group {group}" in operator.refused("groups", "reset", group, "--to-latest")
    refused = operator.refused("groups", "reset", group, "--to-latest", "--topic", topic + "x")
    assert f"there is no topic {topic}x" in refused
    refused = operator.refused("groups", "reset", group, "--to-latest", "--topic", f"{topic}:0,7")
    assert "has partitions 0 to 0, not 7" in refused
    shifted = operator.json("groups", "reset", group, "--shift-by", "1", "--topic", topic)
    assert shifted["partitions"][0]["note"] == "nothing is committed that could be shifted"
    operator.run("groups", "reset", group, "--to-latest", "--topic", topic, "--execute")
    assert operator.offsets(group) == {(topic, 0): 5}


def test_offsets_of_a_topic_that_members_read_are_not_deleted(operator, names):
    topic, group = names("topic"), names("group")
    operator.run("topics", "create", topic)
    produce(operator.bootstrap, topic, 5, partitions=1)
    commit(operator.bootstrap, group, topic, {0: 1})
    with member(operator.bootstrap, group, topic, "reader", **{"enable.auto.commit": False}):
        wait_until(
            lambda: group in operator.run("groups", "list", "--state", "Stable"), "the group is stable"
        )
        refused = operator.refused("groups", "delete", group, "--yes", "--offsets", "--topic", topic)
        assert f"members of group {group} read {topic} now" in refused
    assert operator.offsets(group) == {(topic, 0): 1}


def test_group_with_offsets_in_a_deleted_topic_can_still_be_described(operator, names):
    topic, other, group = names("topic"), names("other"), names("group")
    for name in (topic, other):
        operator.run("topics", "create", name)
        produce(operator.bootstrap, name, 5, partitions=1)
        commit(operator.bootstrap, group, name, {0: 1})
    operator.run("topics", "delete", topic, "--yes")
    wait_until(lambda: topic not in operator.run("topics", "list"), "the topic is gone")
    described = operator.json("groups", "describe", group)
    assert {row["topic"]: row["lag"] for row in described["partitions"]}[other] == 4
    assert operator.json("groups", "reset", group, "--to-latest")["partitions"][0]["topic"] == other


@pytest.mark.kafka
@pytest.mark.java
def test_groups_of_kip_848_are_described_and_deleted_too(kafka_peer, capsys, names):
    operator = Operator(kafka_peer.bootstrap, capsys)
    topic, group = names("topic"), names("group")
    operator.run("topics", "create", topic)
    with member(operator.bootstrap, group, topic, "new-style", **{"group.protocol": "consumer"}):
        wait_until(
            lambda: group in operator.run("groups", "list", "--state", "Stable"), "the group is stable"
        )
        described = operator.json("groups", "describe", group)
        assert (described["type"], described["state"]) == ("consumer", "Stable")
        wait_until(
            lambda: (
                [row["client_id"] for row in operator.json("groups", "describe", group)["partitions"]]
                == ["new-style"]
            ),
            "its member is shown at its partition",
        )
        refused = operator.refused("groups", "reset", group, "--to-latest", "--topic", topic, "--execute")
        assert "cannot be reset: it is Stable with 1 member (new-style at" in refused
    wait_until(lambda: operator.json("groups", "describe", group)["state"] == "Empty", "the member has left")
    operator.run("groups", "delete", group, "--yes")


def test_a_topic_is_widened_and_never_narrowed(operator, names):
    topic = names("topic")
    operator.run("topics", "create", topic, "--partitions", "2")
    out = operator.run("topics", "configure", topic, "--partitions", "4", "--dry-run")
    assert out.startswith("partitions: 2 -> 4\ndry run")
    out = operator.run("topics", "configure", topic, "--partitions", "3", "retention.ms=5000")
    assert out.endswith("-> 5000\npartitions: 2 -> 3\n")
    wait_until(lambda: len(operator.json("topics", "describe", topic)["partitions"]) == 3, "it is widened")
    assert topic in operator.refused("topics", "configure", topic, "--partitions", "2")
    missing = operator.refused("topics", "configure", topic + "x", "--partitions", "2")
    assert f"there is no topic {topic}x" in missing


def test_topics_are_configured_and_described(operator, names):
    topic = names("topic")
    out = operator.run("topics", "create", topic, "--partitions", "2", "--set", "retention.ms=1000000")
    assert out == f"created {topic} with 2 partitions of 1 replica\n"
    assert "max.message.bytes = " not in operator.run("topics", "describe", topic)
    assert "max.message.bytes = " in operator.run("topics", "describe", topic, "--all-configs")

    out = operator.run("topics", "configure", topic, "retention.ms=5000", "--dry-run")
    assert out.splitlines()[0] == "retention.ms: 1000000 -> 5000"
    assert operator.json("topics", "describe", topic)["configs"]["retention.ms"] == "1000000"
    operator.run("topics", "configure", topic, "retention.ms=5000", "cleanup.policy=compact,delete")

    def configs() -> dict[str, str]:
        described = operator.json("topics", "describe", topic)
        return {key: described["configs"][key] for key in described["changed_configs"]}

    changed = {"retention.ms": "5000", "cleanup.policy": "compact,delete"}
    wait_until(lambda: configs() == changed, "the change is seen")
    out = operator.run("topics", "configure", topic, "--delete", "retention.ms")
    assert out == "retention.ms: 5000 -> its default\n"
    wait_until(lambda: configs() == {"cleanup.policy": "compact,delete"}, "the change is seen")
    out = operator.run("topics", "configure", topic, "--delete", "retention.ms")
    assert out == "retention.ms: was not set\n"
    assert "no setting retention.msec" in operator.refused(
        "topics", "configure", topic, "--delete", "retention.msec"
    )

    assert topic in operator.refused("topics", "configure", topic, "retention.ms=soon")
    assert topic in operator.refused("topics", "configure", topic, "no.such.setting=1")
    missing = operator.refused("topics", "configure", topic + "x", "retention.ms=1")
    assert topic + "x" in missing

    described = operator.json("topics", "describe", topic)
    assert described["problems"] is None
    assert [sorted(row) for row in described["partitions"]] == [
        ["end_offset", "first_offset", "isr", "leader", "offline", "partition", "replicas"]
    ] * 2
    assert {tuple(row["replicas"]) for row in described["partitions"]} == {
        (described["partitions"][0]["leader"],)
    }
    assert topic in operator.run("topics", "list")
    operator.run("topics", "delete", topic, "--yes")
    wait_until(lambda: topic not in operator.run("topics", "list"), "the topic is gone")
    assert f"there is no topic {topic}" in operator.refused("topics", "describe", topic)
