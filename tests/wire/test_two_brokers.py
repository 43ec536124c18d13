"""Two brokers, one of which dies: leaders move, `acks=all` waits for enough replicas or is refused."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from tests.waiting import patience
from tests.wire.foreign_clients import CLIENTS, PATIENCE_S, Confluent, KafkaPython, Refused, Sent, wait_until
from tests.wire.java_tools import JavaTools

ASKED_AGAIN_S = 10
"""librdkafka may ask a broker that has just been killed, and wait for its answer for as long as it may."""


def partition_of(admin: AdminClient, topic: str) -> tuple[int, set[int], set[int]]:
    """Leader, replicas and in-sync replicas of partition 0, as far as they are known yet."""
    try:
        topics = admin.list_topics(timeout=ASKED_AGAIN_S).topics
    except KafkaException as error:
        if error.args[0].code() != KafkaError._TIMED_OUT:
            raise
        return -1, set(), set()
    if topic not in topics or not topics[topic].partitions:
        return -1, set(), set()
    shown = topics[topic].partitions[0]
    return shown.leader, set(shown.replicas), set(shown.isrs)


def test_writes_wait_for_enough_replicas_and_leaders_move(mortal_pair, fresh_name, tmp_path):
    first, second = mortal_pair
    both = f"{first.bootstrap},{second.bootstrap}"
    admin = AdminClient({"bootstrap.servers": both, "log_level": 0})
    wait_until(lambda: set(admin.list_topics(timeout=PATIENCE_S).brokers) == {1, 2}, "both brokers")
    strict, loose = fresh_name("strict"), fresh_name("loose")
    made = admin.create_topics(
        [
            NewTopic(strict, 1, replica_assignment=[[1, 2]], config={"min.insync.replicas": "2"}),
            NewTopic(loose, 1, replica_assignment=[[2, 1]], config={"min.insync.replicas": "1"}),
        ]
    )
    for future in made.values():
        future.result(patience(PATIENCE_S))
    wait_until(lambda: partition_of(admin, strict) == (1, {1, 2}, {1, 2}), "the first leads")
    wait_until(lambda: partition_of(admin, loose) == (2, {1, 2}, {1, 2}), "the second leads")
    client = Confluent(both)
    assert client.produce(strict, [Sent(b"both")]) == [0]
    assert client.produce(loose, [Sent(b"both")], idempotent=True) == [0]

    second.kill()
    wait_until(lambda: partition_of(admin, strict)[2] == {1}, "the second is not in sync any more")
    wait_until(lambda: partition_of(admin, loose) == (1, {1, 2}, {1}), "the first leads both")
    for library in (Confluent, KafkaPython):  # aiokafka tries again, whatever it is told
        with pytest.raises(Refused) as refused:
            library(first.bootstrap).produce(strict, [Sent(b"refused")], retries=0)
        assert refused.value.reason == "NOT_ENOUGH_REPLICAS", library.name
    told = JavaTools(first.bootstrap, tmp_path).raw(
        "verifiable-producer",
        *("--bootstrap-server", first.bootstrap, "--topic", strict, "--max-messages", "1", "--acks", "-1"),
    )
    (refusal,) = [each for each in map(json.loads, told.lines) if each["name"] == "producer_send_error"]
    assert refusal["exception"].endswith("NotEnoughReplicasException"), refusal
    assert client.produce(strict, [Sent(b"first alone")], acks=1) == [1]
    assert client.produce(loose, [Sent(b"first alone")], idempotent=True) == [1]
    assert [r.value for r in client.consume(loose, [0], 2)] == [b"both", b"first alone"]

    second.start()
    wait_until(lambda: partition_of(admin, strict)[2] == {1, 2}, "in sync again")
    wait_until(lambda: partition_of(admin, loose)[2] == {1, 2}, "in sync again")
    assert client.produce(strict, [Sent(b"both again")]) == [2]
    for library in CLIENTS:
        reader = library(both)
        assert [r.value for r in reader.drain(strict)] == [b"both", b"first alone", b"both again"]
        assert [r.value for r in reader.drain(loose)] == [b"both", b"first alone"]


def test_a_partition_is_moved_by_apache_kafkas_own_command(mortal_pair, fresh_name, tmp_path):
    both = ",".join(broker.bootstrap for broker in mortal_pair)
    admin = AdminClient({"bootstrap.servers": both, "log_level": 0})
    wait_until(lambda: set(admin.list_topics(timeout=PATIENCE_S).brokers) == {1, 2}, "both brokers")
    topic = fresh_name("moved")
    admin.create_topics([NewTopic(topic, 1, replica_assignment=[[1]])])[topic].result(patience(PATIENCE_S))
    wait_until(lambda: partition_of(admin, topic) == (1, {1}, {1}), "the first leads")
    client = Confluent(both)
    values = [b"%d" % number * 1_000 for number in range(200)]
    client.produce(topic, [Sent(value) for value in values])

    java = JavaTools(both, tmp_path)
    plan = tmp_path / "moves.json"
    plan.write_text(
        json.dumps({"version": 1, "partitions": [{"topic": topic, "partition": 0, "replicas": [2]}]})
    )
    command = ("reassign-partitions", "--reassignment-json-file", str(plan))
    begun = java.run(*command, "--execute", "--throttle", "50000000").checked().out
    assert "Successfully started partition reassignment" in begun
    assert "The inter-broker throttle limit was set to 50000000 B/s" in begun

    def is_over() -> bool:
        said = java.run(*command, "--verify").checked().out
        return f"Reassignment of partition {topic}-0 is completed." in said and "Clearing" in said

    wait_until(is_over, "the command says that it is over, and takes the throttles away")
    wait_until(lambda: partition_of(admin, topic) == (2, {2}, {2}), "the second has it alone")
    left = java.run("configs", "--describe", "--entity-type", "brokers", "--entity-name", "2").checked().out
    assert "throttled" not in left
    assert [record.value for record in client.drain(topic)] == values
