"""The records of `__consumer_offsets`, held against those that Apache Kafka itself writes."""

from __future__ import annotations

import pytest

from millrace.broker.groups.offsets import (
    GroupKey,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
    partition_of_group,
)
from tests.wire.foreign_clients import Confluent, Sent, wait_until


@pytest.mark.java
@pytest.mark.kafka
def test_kafkas_own_records_are_read_and_would_be_written_alike(kafka_peer, fresh_name):
    client = Confluent(kafka_peer.bootstrap)
    topic, group = fresh_name("topic"), fresh_name("gruppe-ß")
    client.produce(topic, [Sent(b"x") for _ in range(3)])
    member = client.member(group, topic, group_instance_id="host-1")
    wait_until(lambda: len(member.records) == 3, "the member reads")
    wait_until(lambda: client.committed(group, topic, 0) == 3, "the commit is taken")
    member.leave()

    partition_count = 5  # as the peer is configured
    records = [
        record
        for partition in range(partition_count)
        for record in client.consume(
            "__consumer_offsets", [partition], client.bounds("__consumer_offsets", partition)[1]
        )
    ]
    commits, groups = 0, []
    for record in records:
        key = decode_key(record.key)
        if record.value is None or key is None or key.group_id != group:
            continue
        assert record.partition == partition_of_group(group, partition_count)
        if isinstance(key, OffsetKey):
            assert encode_offset_key(group, topic, 0) == record.key
            # Apache Kafka 4.1 writes value version 4, which this broker neither writes nor reads.
            committed = decode_offset_value(record.value)
            assert committed is None or encode_offset_value(committed) == record.value
            commits += 1
        elif isinstance(key, GroupKey):
            assert encode_group_key(group) == record.key
            groups.append(decode_group_value(record.value))
            assert encode_group_value(groups[-1]) == record.value
    assert commits >= 1
    stable = [snapshot for snapshot in groups if snapshot.members]
    assert stable[-1].protocol_type == "consumer"
    assert stable[-1].members[0].instance_id == "host-1"
