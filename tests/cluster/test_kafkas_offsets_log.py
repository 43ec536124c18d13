"""What Apache Kafka 4.1 itself leaves in `__consumer_offsets` is read by the coordinator's own loader.

Plain commits, members, transactions that were committed, aborted and left open, deleted groups, and groups of
KIP-848, whose records are of kinds that this broker does not know: they are passed over and counted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.broker.groups.journal import Journal, Memory
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.java_hash import coordinator_partition
from tests.raw_client import RawClient
from tests.waiting import Deadline, patience, until

pytestmark = [pytest.mark.java, pytest.mark.kafka]

PATIENCE_S = 90.0
OFFSETS = "__consumer_offsets"


class FetchedLog:
    """The offsets topic of a running server, as the loader reads one."""

    def __init__(self, port: int) -> None:
        self._client = RawClient(port)
        (topic,) = self._client.ask(Api.METADATA, 9, topics=[{"name": OFFSETS}]).topics
        self.count = len(topic.partitions)

    async def read_all(self, partition: int) -> AsyncIterator[memoryview]:
        offset = 0
        while True:
            fetched = self._client.fetch(PartitionFetch(OFFSETS, partition, offset, 1 << 20))
            (answer,) = fetched.partitions
            assert answer.error_code == 0
            records = memoryview(answer.records or b"")
            before = offset
            for position, header in iterate_batches(records):
                offset = header.next_offset
                yield records[position : position + header.size]
            if offset == before:
                return

    async def until_committed(self, partition: int, offset: int) -> None:
        """Everything that a consumer can fetch is."""

    def load(self, group: str) -> Memory:
        journal = Journal(self, clock_ms=lambda: 0)  # type: ignore[arg-type]  # it is not written to
        return asyncio.run(journal.read(coordinator_partition(group, self.count)))


def consumer(bootstrap: str, group: str, **settings: object) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            **{key.replace("_", "."): value for key, value in settings.items()},
        }
    )


def commit(bootstrap: str, group: str, topic: str, offset: int) -> None:
    member = consumer(bootstrap, group)
    member.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
    member.close()


def assigned(member: Consumer, topic: str) -> Consumer:
    """A member that has got its share."""
    member.subscribe([topic])
    deadline = Deadline(f"a share of {topic}", within_s=PATIENCE_S)
    while not member.assignment():
        deadline.check()
        member.poll(0.1)
    return member


def transaction(bootstrap: str, group: str, topic: str, offset: int) -> Producer:
    """A producer with an open transaction that has the group's offset in it."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"tx-{group}"})
    producer.init_transactions(patience(PATIENCE_S))
    producer.begin_transaction()
    committer = consumer(bootstrap, group)
    producer.send_offsets_to_transaction(
        [TopicPartition(topic, 0, offset)], committer.consumer_group_metadata(), PATIENCE_S
    )
    committer.close()
    return producer


def eventually_loaded(log: FetchedLog, group: str, partition: tuple[str, int], offset: int | None) -> Memory:
    """What is loaded once the marker of the group's last transaction is there."""

    def loaded() -> Memory | None:
        memory = log.load(group)
        store = memory.offsets.get(group)
        return None if store is None or store.is_unstable(partition) else memory

    memory = until(loaded, f"the marker of the last transaction of {group}", within_s=PATIENCE_S)
    found = memory.offsets[group].get(partition)
    assert (found.offset if found else None) == offset
    return memory


def test_everything_in_kafkas_own_log_is_read_or_passed_over(kafka_peer):
    bootstrap, suffix = kafka_peer.bootstrap, uuid.uuid4().hex[:8]
    topic = f"topic-{suffix}"
    plain, static, new, committed, aborted, opened, deleted = (
        f"{kind}-{suffix}"
        for kind in ("plain", "static", "new-style", "committed", "aborted", "opened", "deleted")
    )
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(patience(PATIENCE_S))
    until(
        lambda: topic in admin.list_topics(timeout=patience(PATIENCE_S)).topics,
        "the broker hears of the topic",
    )
    partition = (topic, 0)

    commit(bootstrap, plain, topic, 5)
    commit(bootstrap, deleted, topic, 5)
    admin.delete_consumer_groups([deleted])[deleted].result(patience(PATIENCE_S))
    member = assigned(consumer(bootstrap, static, group_instance_id="host-1"), topic)
    member.commit(offsets=[TopicPartition(topic, 0, 6)], asynchronous=False)
    new_style = assigned(consumer(bootstrap, new, group_protocol="consumer"), topic)
    for group in (committed, aborted):
        commit(bootstrap, group, topic, 1)
    transaction(bootstrap, committed, topic, 7).commit_transaction(patience(PATIENCE_S))
    transaction(bootstrap, aborted, topic, 7).abort_transaction(patience(PATIENCE_S))
    still_open = transaction(bootstrap, opened, topic, 7)

    log = FetchedLog(int(bootstrap.rpartition(":")[2]))
    eventually_loaded(log, committed, partition, 7)
    eventually_loaded(log, aborted, partition, 1)
    assert log.load(plain).offsets[plain].get(partition).offset == 5
    assert deleted not in log.load(deleted).offsets
    assert log.load(opened).offsets[opened].is_pending(partition)
    memory = log.load(static)
    assert memory.offsets[static].get(partition).offset == 6
    (kept,) = memory.snapshots[static].members
    assert (kept.instance_id, memory.snapshots[static].protocol_type) == ("host-1", "consumer")
    memory = log.load(new)
    assert memory.unknown > 0
    assert new not in memory.snapshots
    assert all(log.load(group).unreadable == 0 for group in (plain, static, new, committed, aborted, opened))

    still_open.abort_transaction(patience(PATIENCE_S))
    member.close()
    new_style.close()
