"""Znode payloads, against Apache Kafka's own and there and back."""

from __future__ import annotations

import json
import uuid

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.paths import BrokerRegistration, ProducerIdBlock, TopicAssignment
from millrace.broker.replication.partition import PartitionState


def test_broker_of_apache_kafka_is_understood() -> None:
    data = (
        b'{"features":{},"listener_security_protocol_map":{"PLAINTEXT":"PLAINTEXT"},'
        b'"endpoints":["PLAINTEXT://h:9092"],"jmx_port":-1,"port":9092,"host":"h","version":5,'
        b'"timestamp":"1416974968782","rack":"r1"}'
    )
    assert paths.decode_broker(3, data) == BrokerRegistration(3, "h", 9092, "r1")


@pytest.mark.parametrize("rack", [None, "r1"])
def test_broker_survives_the_round_trip(rack: str | None) -> None:
    broker = BrokerRegistration(1, "::1", 9092, rack)
    data = paths.encode_broker(broker, 5)
    assert paths.decode_broker(1, data) == broker
    assert json.loads(data)["endpoints"] == ["PLAINTEXT://[::1]:9092"]


def test_topic_survives_the_round_trip_and_old_topics_have_no_id() -> None:
    topic = TopicAssignment(uuid.uuid4(), {0: (1, 2), 10: (2,), 2: (3,)})
    assert paths.decode_topic(paths.encode_topic(topic)) == topic
    old = paths.decode_topic(b'{"version":1,"partitions":{"0":[0]}}')
    assert old == TopicAssignment(uuid.UUID(int=0), {0: (0,)})


def test_state_is_written_as_apache_kafka_writes_it() -> None:
    state = PartitionState(leader=1, leader_epoch=2, isr=(1, 3), controller_epoch=4)
    data = paths.encode_state(state)
    assert data == b'{"controller_epoch":4,"leader":1,"version":1,"leader_epoch":2,"isr":[1,3]}'
    assert paths.decode_state(data) == state


def test_other_payloads_survive_the_round_trip() -> None:
    block = ProducerIdBlock(1, 1000, 1999)
    assert paths.decode_producer_id_block(paths.encode_producer_id_block(block)) == block
    assert paths.decode_config(paths.encode_config({"a": "1"})) == {"a": "1"}
    assert paths.decode_controller(paths.encode_controller(3, 0)) == 3
    assert paths.decode_cluster_id(paths.encode_cluster_id("x")) == "x"


@pytest.mark.parametrize("data", [b"", b"null", b"1", b"please", b"\xff", b"{}", b'{"version":1}'])
def test_a_mark_of_deletion_that_names_no_topic_means_whichever_has_the_name(data: bytes) -> None:
    """Apache Kafka looks at the presence of the znode alone, and people write into it what they like."""
    assert paths.decode_deletion(data) is None


@pytest.mark.parametrize("topic_id", [b"7", b'"x"', b'"!!!!"', b"[]"])
def test_a_mark_of_deletion_that_names_a_topic_nobody_can_tell_is_no_mark_of_any(topic_id: bytes) -> None:
    with pytest.raises(ValueError):
        paths.decode_deletion(b'{"version":1,"topic_id":' + topic_id + b"}")


@pytest.mark.parametrize(
    "decode",
    [
        lambda data: paths.decode_broker(1, data),
        paths.decode_topic,
        paths.decode_state,
        paths.decode_controller,
        paths.decode_cluster_id,
        paths.decode_producer_id_block,
    ],
)
@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"7", b'{"isr":3,"partitions":3}', b'{"partitions":{"0":null}}', b"\xff"]
)
def test_payload_that_makes_no_sense_is_a_value_error(decode, data: bytes) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError):
        decode(data)


def test_moving_partitions_stand_in_kafkas_fields() -> None:
    moving = paths.TopicAssignment(
        uuid.UUID(int=7), {0: (3, 1, 2), 1: (1, 2)}, adding={0: (3,)}, removing={0: (1,)}
    )
    payload = json.loads(paths.encode_topic(moving))
    assert payload["partitions"] == {"0": [3, 1, 2], "1": [1, 2]}
    assert (payload["adding_replicas"], payload["removing_replicas"]) == ({"0": [3]}, {"0": [1]})
    assert paths.decode_topic(paths.encode_topic(moving)) == moving
    # Before version 2 of the payload there were no such fields.
    old = paths.decode_topic(b'{"version":1,"partitions":{"0":[1]}}')
    assert (old.partitions, old.adding, old.removing) == ({0: (1,)}, {}, {})


def test_leaving_is_told_only_by_a_broker_that_leaves() -> None:
    staying = paths.BrokerRegistration(1, "h", 9092, "r")
    assert "leaving" not in json.loads(paths.encode_broker(staying, 5))
    leaving = paths.BrokerRegistration(1, "h", 9092, "r", leaving=True)
    assert paths.decode_broker(1, paths.encode_broker(leaving, 5)) == leaving


def test_lists_of_partitions_come_back() -> None:
    asked = frozenset({("t", 1), ("t", 0), ("u", 5)})
    assert paths.decode_partitions(paths.encode_partitions(asked)) == asked
    assert json.loads(paths.encode_partitions([("t", 1)])) == {
        "version": 1,
        "partitions": [{"topic": "t", "partition": 1}],
    }
    offline = paths.encode_offline({"t": [3, 0], "u": [1]})
    assert paths.decode_offline(offline) == {("t", 0), ("t", 3), ("u", 1)}
    for wrong in (b"{}", b'{"partitions":5}', b'{"partitions":[5]}'):
        with pytest.raises(ValueError, match=r"lacks|expected|not"):
            paths.decode_partitions(wrong)
