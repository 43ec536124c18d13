"""The records of `__consumer_offsets`, held against those that Apache Kafka itself writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.broker.groups.record_layout import (
    GroupKey,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
)
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.records import Record, read_records
from tests.raw_client import RawClient
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

    commits, groups = 0, []
    # Only the group's own partition: and nothing is counted, since markers of transactions take offsets too.
    partition = coordinator_partition(group, 5)  # as wide as the peer is configured to make the topic
    for record in _records(int(kafka_peer.bootstrap.rpartition(":")[2]), partition):
        key = decode_key(record.key) if record.key is not None else None
        if record.value is None or key is None or key.group_id != group:
            continue
        if isinstance(key, OffsetKey):
            assert encode_offset_key(group, topic, 0) == record.key
            # Apache Kafka 4.1 writes value version 4, which this broker reads; it writes 3, as 3.9 does.
            committed = decode_offset_value(record.value)
            assert committed is not None
            assert committed.offset <= 3
            written_alike = encode_offset_value(committed) == record.value
            assert written_alike == (record.value[:2] == b"\x00\x03")
            commits += 1
        elif isinstance(key, GroupKey):
            assert encode_group_key(group) == record.key
            groups.append(decode_group_value(record.value))
            assert encode_group_value(groups[-1]) == record.value
    assert commits >= 1
    stable = [snapshot for snapshot in groups if snapshot.members]
    assert stable[-1].protocol_type == "consumer"
    assert stable[-1].members[0].instance_id == "host-1"


def _records(port: int, partition: int) -> Iterator[Record]:
    """Every record of a partition of the offsets topic, without control records."""
    offset, before = 0, -1
    with RawClient(port) as client:
        while offset != before:
            before = offset
            (answer,) = client.fetch(
                PartitionFetch("__consumer_offsets", partition, offset, 1 << 20)
            ).partitions
            fetched = memoryview(answer.records or b"")
            for position, header in iterate_batches(fetched):
                offset = header.next_offset
                if not header.is_control:
                    yield from read_records(fetched[position : position + header.size])
