"""kafka-python, a client written in Python on threads."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import kafka
from kafka.admin import ConfigResource, ConfigResourceType
from kafka.structs import OffsetAndMetadata

from tests.waiting import Deadline, patience
from tests.wire.client_face import (
    FETCH_WAIT_MS,
    HEARTBEAT_INTERVAL_MS,
    LARGEST_REQUEST,
    PATIENCE_S,
    POLL_S,
    SESSION_TIMEOUT_MS,
    ForeignAdmin,
    ForeignClient,
    GroupMember,
    Received,
    Refused,
    TransactionalProducer,
    error_name,
    handed_out,
    refused,
)


class Committing:
    """Commits what was read, one commit after the other, until the last one is accepted.

    A commit that a rebalance overtook is refused, so it takes another; and each that is overtaken makes this
    library join anew, so there are never two on their way. Of a name that another has taken it tells
    whoever commits (its heartbeats just end), so a named member commits `always`.
    """

    def __init__(self, consumer: kafka.KafkaConsumer, *, always: bool) -> None:
        self._consumer = consumer
        self._always = always
        self._future: Any = None
        self._is_more_read = False

    def go_on(self, is_more_read: bool) -> None:
        """Raises what kafka-python does of a commit that was refused for good."""
        self._is_more_read |= is_more_read
        if self._future is not None and not self._future.is_done:
            return
        was_refused = self._future is not None and self._future.failed()
        if self._is_more_read or was_refused or self._always:
            self._is_more_read = False
            self._future = self._consumer.commit_async()


class _Revoked(kafka.ConsumerRebalanceListener):
    """Notes what is taken from a member."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._member.revoked.append(frozenset(place.partition for place in revoked))

    def on_partitions_assigned(self, assigned: Any) -> None: ...


class KafkaPythonMember(GroupMember):
    def _run(self) -> None:
        settings: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "group_id": self.group,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
            "metadata_max_age_ms": 1_000,
        }
        consumer = kafka.KafkaConsumer(**settings | self.options)
        consumer.subscribe([self.topic], listener=_Revoked(self))
        # Wait until it knows the topic. A leader that learns of its partitions between joining and assigning
        # joins once more, and version 3.0.12 forgets that second join, heartbeats and all, if `poll` returns
        # before it is through: from then on it is a member of nothing and does not notice.
        consumer.topics()
        committing = Committing(consumer, always="group_instance_id" in self.options)
        while not self._leaving.is_set():
            if self.silent:
                time.sleep(POLL_S)
                continue
            polled = consumer.poll(timeout_ms=50)
            self.assigned = frozenset(p.partition for p in consumer.assignment())
            self.records += [handed_out(record) for records in polled.values() for record in records]
            committing.go_on(bool(polled))
        # When a rebalance comes first, whoever gets the partition reads the last records again.
        with contextlib.suppress(kafka.errors.RebalanceInProgressError, kafka.errors.CommitFailedError):
            if self.records:
                consumer.commit()
        consumer.close()


class KafkaPythonTransactions(TransactionalProducer):
    def __init__(self, bootstrap, transactional_id, timeout_ms=60_000):
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            linger_ms=5,
            request_timeout_ms=int(PATIENCE_S * 1000),
            max_block_ms=int(PATIENCE_S * 1000),
        )
        try:
            self._producer.init_transactions()
        except kafka.errors.KafkaError as error:
            self._producer.close(timeout=0)
            raise refused(error) from error

    def begin(self):
        with _refusals():
            self._producer.begin_transaction()

    def send(self, topic, records):
        with _refusals():
            return produce_all(self._producer, topic, records)

    def send_offsets(self, group, offsets):
        places = {
            kafka.TopicPartition(*place): OffsetAndMetadata(offset, "", -1)
            for place, offset in offsets.items()
        }
        with _refusals():
            self._producer.send_offsets_to_transaction(places, group)

    def commit(self):
        with _refusals():
            self._producer.commit_transaction()

    def abort(self):
        with _refusals():
            self._producer.abort_transaction()

    def close(self):
        self._producer.close(timeout=0)


class KafkaPythonAdmin(ForeignAdmin):
    def __init__(self, bootstrap: str) -> None:
        self._admin = kafka.KafkaAdminClient(bootstrap_servers=bootstrap)

    def create_topic(self, name, partitions=1, replicas=1, configs=None):
        wanted = {
            "num_partitions": partitions,
            "replication_factor": replicas,
            "configs": dict(configs or {}),
        }
        with _refusals():
            self._admin.create_topics({name: wanted})

    def add_partitions(self, topic, total):
        with _refusals():
            self._admin.create_partitions({topic: total})

    def alter_topic(self, topic, name, value):
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})
        answer = self._admin.alter_configs([resource], raise_on_unknown=False)["topic"][topic]
        if answer != "OK":  # "[Error 40] InvalidConfigurationError: …"
            raise Refused(error_name(int(answer.removeprefix("[Error ").partition("]")[0])))

    def delete_topic(self, topic):
        with _refusals():
            self._admin.delete_topics([topic])

    def close(self):
        self._admin.close()


@contextlib.contextmanager
def _refusals() -> Any:
    try:
        yield
    except kafka.errors.KafkaError as error:
        raise refused(error) from error


def produce_all(producer: Any, topic: str, records: Any) -> list[int]:
    """Send and wait; the offsets."""
    futures = [
        producer.send(
            topic,
            value=record.value,
            key=record.key,
            headers=list(record.headers),
            timestamp_ms=record.timestamp_ms,
            partition=record.partition,
        )
        for record in records
    ]
    producer.flush(patience(PATIENCE_S))
    return [future.get(PATIENCE_S).offset for future in futures]


class KafkaPython(ForeignClient):
    name = "kafka-python"
    member_type = KafkaPythonMember
    transactional_type = KafkaPythonTransactions
    admin_type = KafkaPythonAdmin

    def produce(
        self,
        topic,
        records,
        codec="none",
        *,
        acks=-1,
        idempotent=False,
        largest_request=LARGEST_REQUEST,
        retries=None,
    ):
        producer = kafka.KafkaProducer(
            bootstrap_servers=self.bootstrap,
            compression_type=None if codec == "none" else codec,
            acks="all" if acks == -1 else acks,
            enable_idempotence=idempotent,
            max_request_size=largest_request,
            linger_ms=5,
            retries=(0 if not idempotent else 5) if retries is None else retries,
        )
        try:
            with _refusals():
                return produce_all(producer, topic, records)
        finally:
            producer.close(timeout=5)

    def consume(self, topic, partitions, count, start=0):
        consumer = self._consumer(None)
        try:
            assigned = [kafka.TopicPartition(topic, partition) for partition in partitions]
            consumer.assign(assigned)
            for partition in assigned:
                consumer.seek(partition, start)
            received: list[Received] = []
            deadline = Deadline(lambda: f"{len(received)} of {count} records", within_s=PATIENCE_S)
            while len(received) < count:
                deadline.check()
                with _refusals():
                    polled = consumer.poll(timeout_ms=200, max_records=count - len(received))
                for records in polled.values():
                    received += map(handed_out, records)
        finally:
            consumer.close()
        return received

    def drain(self, topic, partition=0, *, committed=False):
        consumer = self._consumer(None, isolation_level=_level(committed))
        try:
            place = kafka.TopicPartition(topic, partition)
            consumer.assign([place])
            consumer.seek_to_beginning(place)
            end = consumer.end_offsets([place])[place]
            received: list[Received] = []
            deadline = Deadline(lambda: f"offset {end} of {topic}, {len(received)} came", within_s=PATIENCE_S)
            while consumer.position(place) < end:
                deadline.check()
                for records in consumer.poll(timeout_ms=200).values():
                    received += map(handed_out, records)
        finally:
            consumer.close()
        return received

    def first_read(self, topic, start, reset):
        consumer = self._consumer(None, auto_offset_reset={"error": "none"}.get(reset, reset))
        try:
            place = kafka.TopicPartition(topic, 0)
            consumer.assign([place])
            consumer.seek(place, start)
            deadline = Deadline(f"something is read from {topic}", within_s=PATIENCE_S)
            with _refusals():
                while not (polled := consumer.poll(timeout_ms=200, max_records=1)):
                    deadline.check()
            return handed_out(polled[place][0])
        finally:
            consumer.close()

    def offset_for_time(self, topic, partition, timestamp_ms):
        consumer = self._consumer(None)
        try:
            asked = kafka.TopicPartition(topic, partition)
            found = consumer.offsets_for_times({asked: timestamp_ms})[asked]
        finally:
            consumer.close()
        return None if found is None else found.offset

    def bounds(self, topic, partition, *, committed=False):
        consumer = self._consumer(None, isolation_level=_level(committed))
        try:
            asked = kafka.TopicPartition(topic, partition)
            return consumer.beginning_offsets([asked])[asked], consumer.end_offsets([asked])[asked]
        finally:
            consumer.close()

    def committed(self, group, topic, partition):
        consumer = self._consumer(group)
        try:
            return consumer.committed(kafka.TopicPartition(topic, partition))
        finally:
            consumer.close()

    def commit(self, group, topic, partition, offset, metadata=""):
        consumer = self._consumer(group)
        place = kafka.TopicPartition(topic, partition)
        try:
            consumer.assign([place])
            with _refusals():
                consumer.commit({place: OffsetAndMetadata(offset, metadata, -1)})
        finally:
            consumer.close()

    def _consumer(self, group: str | None, **options: Any) -> Any:
        settings: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "group_id": group,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "fetch_max_wait_ms": FETCH_WAIT_MS,
            "max_partition_fetch_bytes": LARGEST_REQUEST,
        }
        return kafka.KafkaConsumer(**settings | options)


def _level(committed: bool) -> str:
    return "read_committed" if committed else "read_uncommitted"
