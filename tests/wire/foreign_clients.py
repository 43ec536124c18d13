"""Three independent Kafka clients behind one face, so that one test tells the same story to each.

confluent-kafka (librdkafka, C), kafka-python and aiokafka (two separate Python implementations). An
adapter only translates names: it adds no retries, and it waits for nothing but the client's own answers.
Every adapter works against any Kafka-protocol address.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiokafka
import confluent_kafka
import kafka

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
PATIENCE_S = 30.0
LARGEST_REQUEST = 8 << 20
HEARTBEAT_INTERVAL_MS = 300
SESSION_TIMEOUT_MS = 6_000


@dataclass(frozen=True)
class Sent:
    """A record as it is handed to a client."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = 1_357_034_400_000
    partition: int = 0


@dataclass(frozen=True)
class Received:
    """A record as a client hands it out."""

    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int
    partition: int
    offset: int

    def as_sent(self) -> Sent:
        return Sent(self.value, self.key, self.headers, self.timestamp_ms, self.partition)


class Refused(Exception):
    """The broker, or the client on its own, refused a record; `reason` is the error's name."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)


class GroupMember:
    """A group member in a thread of its own; the test reads its attributes.

    A subclass fills `_run`: subscribe, then until `_leaving` is set keep `assigned` true, append to
    `records`, and commit what was appended.
    """

    def __init__(self, bootstrap: str, group: str, topic: str, **options: Any) -> None:
        self.bootstrap = bootstrap
        self.group = group
        self.topic = topic
        self.options = options
        self.assigned: frozenset[int] = frozenset()
        self.records: list[Received] = []
        self.failure: str | None = None
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Commit, leave the group, and end the thread."""
        self._leaving.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"a member of {self.group} does not come to its end"
        assert self.failure is None, self.failure

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception:
            self.failure = traceback.format_exc()

    def _run(self) -> None:
        raise NotImplementedError


class ForeignClient(ABC):
    """One client library."""

    name: str
    sends_null_headers = False
    sends_null_records = False
    """Whether a record without both key and value may be sent; any client must be able to read one."""
    member_type: type[GroupMember]

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    @abstractmethod
    def produce(
        self,
        topic: str,
        records: Sequence[Sent],
        codec: str = "none",
        *,
        acks: int = -1,
        idempotent: bool = False,
    ) -> list[int]:
        """Send all records, wait for every acknowledgement; the offsets. Raises Refused."""

    @abstractmethod
    def consume(self, topic: str, partitions: Sequence[int], count: int, start: int = 0) -> list[Received]:
        """Read `count` records from offset `start` of each partition on, then stop."""

    @abstractmethod
    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        """Offset of the first record at or after the time, None when there is none."""

    @abstractmethod
    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """First offset, and the next one to be written."""

    @abstractmethod
    def committed(self, group: str, topic: str, partition: int) -> int | None:
        """The group's committed offset."""

    def member(self, group: str, topic: str, **options: Any) -> GroupMember:
        return self.member_type(self.bootstrap, group, topic, **options)


# -- confluent-kafka --------------------------------------------------------------------------------


def _from_confluent(message: Any) -> Received:
    error = message.error()
    if error is not None:
        raise Refused(error.name())
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
        consumer.subscribe([self.topic])
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


class Confluent(ForeignClient):
    name = "confluent-kafka"
    sends_null_headers = True
    sends_null_records = True
    member_type = ConfluentMember

    def produce(self, topic, records, codec="none", *, acks=-1, idempotent=False):
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "compression.type": codec,
                "acks": acks,
                "enable.idempotence": idempotent,
                "linger.ms": 5,
                "message.max.bytes": LARGEST_REQUEST,
                "message.timeout.ms": int(PATIENCE_S * 1000),
            }
        )
        offsets: list[int] = [-1] * len(records)
        refusals: list[str] = []

        def delivered(number: int) -> Callable[[Any, Any], None]:
            def report(error: Any, message: Any) -> None:
                if error is not None:
                    refusals.append(error.name())
                else:
                    offsets[number] = message.offset()

            return report

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
        assert producer.flush(PATIENCE_S) == 0
        if refusals:
            raise Refused(refusals[0])
        return offsets

    def consume(self, topic, partitions, count, start=0):
        consumer = self._consumer("unused")
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, start) for partition in partitions])
        received: list[Received] = []
        try:
            deadline = time.monotonic() + PATIENCE_S
            while len(received) < count:
                assert time.monotonic() < deadline, f"{len(received)} of {count} records"
                received += [_from_confluent(m) for m in consumer.consume(count - len(received), 0.2)]
        finally:
            consumer.close()
        return received

    def offset_for_time(self, topic, partition, timestamp_ms):
        consumer = self._consumer("unused")
        try:
            asked = confluent_kafka.TopicPartition(topic, partition, timestamp_ms)
            (found,) = consumer.offsets_for_times([asked], timeout=PATIENCE_S)
        finally:
            consumer.close()
        assert found.error is None
        return found.offset if found.offset >= 0 else None

    def bounds(self, topic, partition):
        consumer = self._consumer("unused")
        try:
            partition_of = confluent_kafka.TopicPartition(topic, partition)
            low, high = consumer.get_watermark_offsets(partition_of, timeout=PATIENCE_S)
        finally:
            consumer.close()
        return low, high

    def committed(self, group, topic, partition):
        consumer = self._consumer(group)
        try:
            (found,) = consumer.committed(
                [confluent_kafka.TopicPartition(topic, partition)], timeout=PATIENCE_S
            )
        finally:
            consumer.close()
        return found.offset if found.offset >= 0 else None

    def _consumer(self, group: str) -> Any:
        return confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": group,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
            }
        )


# -- kafka-python -----------------------------------------------------------------------------------


def _from_python(record: Any) -> Received:
    """kafka-python and aiokafka name the fields of a record alike."""
    return Received(
        record.value, record.key, tuple(record.headers), record.timestamp, record.partition, record.offset
    )


class KafkaPythonMember(GroupMember):
    def _run(self) -> None:
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            metadata_max_age_ms=1_000,
            **self.options,
        )
        # A kafka-python leader that knows nothing of the topic yet assigns nothing, and stays with that.
        consumer.partitions_for_topic(self.topic)
        consumer.subscribe([self.topic])
        while not self._leaving.is_set():
            polled = consumer.poll(timeout_ms=50)
            self.assigned = frozenset(p.partition for p in consumer.assignment())
            if polled:
                self.records += [_from_python(record) for records in polled.values() for record in records]
                consumer.commit_async()
        # When a rebalance comes first, whoever gets the partition reads the last records again.
        with contextlib.suppress(kafka.errors.RebalanceInProgressError, kafka.errors.CommitFailedError):
            if self.records:
                consumer.commit()
        consumer.close()


class KafkaPython(ForeignClient):
    name = "kafka-python"
    member_type = KafkaPythonMember

    def produce(self, topic, records, codec="none", *, acks=-1, idempotent=False):
        producer = kafka.KafkaProducer(
            bootstrap_servers=self.bootstrap,
            compression_type=None if codec == "none" else codec,
            acks="all" if acks == -1 else acks,
            enable_idempotence=idempotent,
            max_request_size=LARGEST_REQUEST,
            linger_ms=5,
            retries=0 if not idempotent else 5,
        )
        try:
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
            producer.flush(PATIENCE_S)
            return [future.get(PATIENCE_S).offset for future in futures]
        except kafka.errors.KafkaError as error:
            raise Refused(type(error).__name__) from error
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
            deadline = time.monotonic() + PATIENCE_S
            while len(received) < count:
                assert time.monotonic() < deadline, f"{len(received)} of {count} records"
                for records in consumer.poll(timeout_ms=200, max_records=count - len(received)).values():
                    received += map(_from_python, records)
        finally:
            consumer.close()
        return received

    def offset_for_time(self, topic, partition, timestamp_ms):
        consumer = self._consumer(None)
        try:
            asked = kafka.TopicPartition(topic, partition)
            found = consumer.offsets_for_times({asked: timestamp_ms})[asked]
        finally:
            consumer.close()
        return None if found is None else found.offset

    def bounds(self, topic, partition):
        consumer = self._consumer(None)
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

    def _consumer(self, group: str | None) -> Any:
        return kafka.KafkaConsumer(
            bootstrap_servers=self.bootstrap,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="none",
            max_partition_fetch_bytes=LARGEST_REQUEST,
        )


# -- aiokafka ---------------------------------------------------------------------------------------


class AioKafkaMember(GroupMember):
    def _run(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        consumer = aiokafka.AIOKafkaConsumer(
            self.topic,
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            metadata_max_age_ms=1_000,
            **self.options,
        )
        await consumer.start()
        try:
            while not self._leaving.is_set():
                polled = await consumer.getmany(timeout_ms=50)
                self.assigned = frozenset(p.partition for p in consumer.assignment())
                if polled:
                    self.records += [
                        _from_python(record) for records in polled.values() for record in records
                    ]
                    try:
                        await consumer.commit()
                    except aiokafka.errors.CommitFailedError:
                        continue  # a rebalance came first: whoever gets the partition reads it again
        finally:
            await consumer.stop()


class AioKafka(ForeignClient):
    name = "aiokafka"
    member_type = AioKafkaMember

    def produce(self, topic, records, codec="none", *, acks=-1, idempotent=False):
        async def send() -> list[int]:
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=self.bootstrap,
                compression_type=None if codec == "none" else codec,
                acks="all" if acks == -1 else acks,
                enable_idempotence=idempotent,
                max_request_size=LARGEST_REQUEST,
                linger_ms=5,
            )
            await producer.start()
            try:
                futures = [
                    await producer.send(
                        topic,
                        value=record.value,
                        key=record.key,
                        headers=list(record.headers),
                        timestamp_ms=record.timestamp_ms,
                        partition=record.partition,
                    )
                    for record in records
                ]
                sent = [await asyncio.wait_for(future, PATIENCE_S) for future in futures]
                return [metadata.offset if metadata is not None else -1 for metadata in sent]
            except aiokafka.errors.KafkaError as error:
                raise Refused(type(error).__name__) from error
            finally:
                await producer.stop()

        return asyncio.run(send())

    def consume(self, topic, partitions, count, start=0):
        async def read(consumer: Any) -> list[Received]:
            assigned = [aiokafka.TopicPartition(topic, partition) for partition in partitions]
            consumer.assign(assigned)
            for partition in assigned:
                consumer.seek(partition, start)
            received: list[Received] = []
            while len(received) < count:
                polled = await consumer.getmany(timeout_ms=200, max_records=count - len(received))
                received += [_from_python(record) for records in polled.values() for record in records]
            return received

        return self._with_consumer(None, read)

    def offset_for_time(self, topic, partition, timestamp_ms):
        async def ask(consumer: Any) -> int | None:
            asked = aiokafka.TopicPartition(topic, partition)
            found = (await consumer.offsets_for_times({asked: timestamp_ms}))[asked]
            return None if found is None else found.offset

        return self._with_consumer(None, ask)

    def bounds(self, topic, partition):
        async def ask(consumer: Any) -> tuple[int, int]:
            asked = aiokafka.TopicPartition(topic, partition)
            first = (await consumer.beginning_offsets([asked]))[asked]
            return first, (await consumer.end_offsets([asked]))[asked]

        return self._with_consumer(None, ask)

    def committed(self, group, topic, partition):
        async def ask(consumer: Any) -> int | None:
            consumer.assign([aiokafka.TopicPartition(topic, partition)])
            found: int | None = await consumer.committed(aiokafka.TopicPartition(topic, partition))
            return found

        return self._with_consumer(group, ask)

    def _with_consumer(self, group: str | None, work: Callable[[Any], Any]) -> Any:
        async def run() -> Any:
            consumer = aiokafka.AIOKafkaConsumer(
                bootstrap_servers=self.bootstrap,
                group_id=group,
                enable_auto_commit=False,
                auto_offset_reset="none",
                max_partition_fetch_bytes=LARGEST_REQUEST,
            )
            await consumer.start()
            try:
                return await asyncio.wait_for(work(consumer), PATIENCE_S)
            finally:
                await consumer.stop()

        return asyncio.run(run())


CLIENTS: tuple[type[ForeignClient], ...] = (Confluent, KafkaPython, AioKafka)
