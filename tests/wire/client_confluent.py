"""confluent-kafka: librdkafka, the C client that most languages wrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, OffsetSpec

from tests.waiting import Deadline, patience
from tests.wire.client_face import (
    FETCH_WAIT_MS,
    HEARTBEAT_INTERVAL_MS,
    LARGEST_REQUEST,
    PATIENCE_S,
    SESSION_TIMEOUT_MS,
    ForeignClient,
    GroupMember,
    Received,
    Refused,
    TransactionalProducer,
    error_name,
)


def reason_of(error: Any) -> Refused:
    """librdkafka's own errors are negative; its name for UNKNOWN_SERVER_ERROR is "UNKNOWN"."""
    code = error.code()
    return Refused(error_name(code) if code > 0 else "UNKNOWN_SERVER_ERROR" if code == -1 else error.name())


def _from_confluent(message: Any) -> Received:
    error = message.error()
    if error is not None:
        raise reason_of(error)
    return Received(
        message.value(),
        message.key(),
        tuple(message.headers() or ()),
        message.timestamp()[1],
        message.partition(),
        message.offset(),
    )


class ConfluentMember(GroupMember):
    def _run(self) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": self.group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": SESSION_TIMEOUT_MS,
                "heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
                "topic.metadata.refresh.interval.ms": 1_000,
                **{name.replace("_", "."): value for name, value in self.options.items()},
            }
        )
        consumer.subscribe([self.topic], on_revoke=self._revoke)
        while not self._leaving.is_set():
            message = consumer.poll(0.05)
            self.assigned = frozenset(p.partition for p in consumer.assignment())
            if message is not None:
                self.records.append(_from_confluent(message))
                consumer.commit(message=message, asynchronous=True)
        read_to = {r.partition: r.offset + 1 for r in self.records if r.partition in self.assigned}
        if read_to:
            offsets = [confluent_kafka.TopicPartition(self.topic, *place) for place in read_to.items()]
            consumer.commit(offsets=offsets, asynchronous=False)
        consumer.close()

    def _revoke(self, _: Any, partitions: Any) -> None:
        self.revoked.append(frozenset(partition.partition for partition in partitions))


class ConfluentTransactions(TransactionalProducer):
    def __init__(self, bootstrap, transactional_id, timeout_ms=60_000):
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": timeout_ms,
                "message.timeout.ms": min(timeout_ms, int(PATIENCE_S * 1000)),
                "linger.ms": 5,
                "log_level": 2,
            }
        )
        self._try(self._producer.init_transactions, PATIENCE_S)

    def begin(self):
        self._try(self._producer.begin_transaction)

    def send(self, topic, records):
        return produce_all(self._producer, topic, records)

    def send_offsets(self, group, offsets):
        # The metadata of a member that subscribed to nothing: what a manually assigned consumer has.
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": "127.0.0.1:1", "group.id": group, "log_level": 0}
        )
        places = [confluent_kafka.TopicPartition(*place, offset) for place, offset in offsets.items()]
        try:
            metadata = consumer.consumer_group_metadata()
            self._try(self._producer.send_offsets_to_transaction, places, metadata, PATIENCE_S)
        finally:
            consumer.close()

    def commit(self):
        self._try(self._producer.commit_transaction, PATIENCE_S)

    def abort(self):
        self._try(self._producer.abort_transaction, PATIENCE_S)

    def close(self):
        del self._producer  # librdkafka says nothing when it goes: the transaction stays open

    @staticmethod
    def _try(call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except confluent_kafka.KafkaException as error:
            raise reason_of(error.args[0]) from error


def produce_all(producer: Any, topic: str, records: Any) -> list[int]:
    """Send and wait; the offsets. The first refusal is raised when all have their answer."""
    offsets: list[int] = [-1] * len(records)
    refusals: list[Any] = []

    def delivered(number: int) -> Callable[[Any, Any], None]:
        def report(error: Any, message: Any) -> None:
            if error is not None:
                refusals.append(error)
            else:
                offsets[number] = message.offset()

        return report

    try:
        for number, record in enumerate(records):
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                headers=list(record.headers),
                timestamp=record.timestamp_ms,
                partition=record.partition,
                on_delivery=delivered(number),
            )
        assert producer.flush(patience(PATIENCE_S)) == 0
    except confluent_kafka.KafkaException as error:
        raise reason_of(error.args[0]) from error
    if refusals:
        raise reason_of(refusals[0])
    return offsets


class Confluent(ForeignClient):
    name = "confluent-kafka"
    sends_null_headers = True
    sends_null_records = True
    member_type = ConfluentMember
    transactional_type = ConfluentTransactions

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
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "compression.type": codec,
                "acks": acks,
                "enable.idempotence": idempotent,
                "linger.ms": 5,
                "message.max.bytes": largest_request,
                "message.timeout.ms": int(PATIENCE_S * 1000),
                **({} if retries is None else {"retries": retries}),
            }
        )
        return produce_all(producer, topic, records)

    def consume(self, topic, partitions, count, start=0):
        consumer = self._consumer("unused")
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, start) for partition in partitions])
        received: list[Received] = []
        try:
            deadline = Deadline(lambda: f"{len(received)} of {count} records", within_s=PATIENCE_S)
            while len(received) < count:
                deadline.check()
                received += [_from_confluent(m) for m in consumer.consume(count - len(received), 0.2)]
        finally:
            consumer.close()
        return received

    def drain(self, topic, partition=0, *, committed=False):
        consumer = self._consumer(
            "unused",
            {
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
            },
        )
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0)])
        received: list[Received] = []
        try:
            deadline = Deadline(lambda: f"the end of {topic}, {len(received)} came", within_s=PATIENCE_S)
            while True:
                deadline.check()
                message = consumer.poll(0.2)
                if message is None:
                    continue
                error = message.error()
                if error is not None and error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                    return received
                received.append(_from_confluent(message))
        finally:
            consumer.close()

    def first_read(self, topic, start, reset):
        consumer = self._consumer("unused", {"auto.offset.reset": reset})
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, start)])
        try:
            deadline = Deadline(f"something is read from {topic}", within_s=PATIENCE_S)
            while (message := consumer.poll(0.2)) is None:
                deadline.check()
            return _from_confluent(message)
        finally:
            consumer.close()

    def offset_for_time(self, topic, partition, timestamp_ms):
        consumer = self._consumer("unused")
        try:
            asked = confluent_kafka.TopicPartition(topic, partition, timestamp_ms)
            (found,) = consumer.offsets_for_times([asked], timeout=patience(PATIENCE_S))
        finally:
            consumer.close()
        assert found.error is None
        return found.offset if found.offset >= 0 else None

    def bounds(self, topic, partition, *, committed=False):
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 2})
        place = confluent_kafka.TopicPartition(topic, partition)
        level = (
            confluent_kafka.IsolationLevel.READ_COMMITTED
            if committed
            else confluent_kafka.IsolationLevel.READ_UNCOMMITTED
        )
        low, high = (
            admin.list_offsets({place: spec}, isolation_level=level)[place]
            .result(patience(PATIENCE_S))
            .offset
            for spec in (OffsetSpec.earliest(), OffsetSpec.latest())
        )
        return low, high

    def committed(self, group, topic, partition):
        consumer = self._consumer(group)
        try:
            (found,) = consumer.committed(
                [confluent_kafka.TopicPartition(topic, partition)], timeout=patience(PATIENCE_S)
            )
        finally:
            consumer.close()
        return found.offset if found.offset >= 0 else None

    def commit(self, group, topic, partition, offset, metadata=""):
        consumer = self._consumer(group)
        place = confluent_kafka.TopicPartition(topic, partition, offset, metadata)
        try:
            (done,) = consumer.commit(offsets=[place], asynchronous=False)
        except confluent_kafka.KafkaException as error:
            raise reason_of(error.args[0]) from error
        finally:
            consumer.close()
        if done.error is not None:
            raise reason_of(done.error)

    def _consumer(self, group: str, options: Mapping[str, Any] | None = None) -> Any:
        return confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": group,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "fetch.wait.max.ms": FETCH_WAIT_MS,
                **(options or {}),
            }
        )
