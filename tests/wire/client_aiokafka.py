"""aiokafka, a client written in Python on asyncio; every call here runs a loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import aiokafka
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.waiting import patience
from tests.wire.client_face import (
    FETCH_WAIT_MS,
    HEARTBEAT_INTERVAL_MS,
    LARGEST_REQUEST,
    PATIENCE_S,
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


class AioKafkaMember(GroupMember):
    def _run(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        settings: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "group_id": self.group,
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
            "metadata_max_age_ms": 1_000,
        }
        consumer = aiokafka.AIOKafkaConsumer(self.topic, **settings | self.options)
        await consumer.start()
        try:
            while not self._leaving.is_set():
                polled = await consumer.getmany(timeout_ms=50)
                self.assigned = frozenset(p.partition for p in consumer.assignment())
                if polled:
                    self.records += [handed_out(record) for records in polled.values() for record in records]
                    try:
                        await consumer.commit()
                    except aiokafka.errors.CommitFailedError:
                        continue  # a rebalance came first: whoever gets the partition reads it again
        finally:
            await consumer.stop()


class AioKafkaTransactions(TransactionalProducer):
    """The producer lives on a loop in a thread of its own, as it must stay alive between calls."""

    def __init__(self, bootstrap, transactional_id, timeout_ms=60_000):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._producer = self._run(self._start(bootstrap, transactional_id, timeout_ms))

    @staticmethod
    async def _start(bootstrap: str, transactional_id: str, timeout_ms: int) -> Any:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            linger_ms=5,
        )
        await producer.start()
        return producer

    def begin(self):
        self._run(self._producer.begin_transaction())

    def send(self, topic, records):
        return self._run(produce_all(self._producer, topic, records))

    def send_offsets(self, group, offsets):
        places = {aiokafka.TopicPartition(*place): offset for place, offset in offsets.items()}
        self._run(self._producer.send_offsets_to_transaction(places, group))

    def commit(self):
        self._run(self._producer.commit_transaction())

    def abort(self):
        self._run(self._producer.abort_transaction())

    def close(self):
        with contextlib.suppress(Exception):
            self._run(self._producer.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patience(PATIENCE_S))
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(patience(PATIENCE_S))
        except aiokafka.errors.KafkaError as error:
            raise refused(error) from error


class AioKafkaAdmin(ForeignAdmin):
    """Most of its calls hand out what the broker has answered, error codes and all."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    def create_topic(self, name, partitions=1, replicas=1, configs=None):
        new = NewTopic(name, partitions, replicas, topic_configs=dict(configs or {}))
        ((_, code, *_),) = self._call(lambda admin: admin.create_topics([new])).topic_errors
        _check(code)

    def add_partitions(self, topic, total):
        self._call(lambda admin: admin.create_partitions({topic: NewPartitions(total)}))

    def alter_topic(self, topic, name, value):
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})
        (answer,) = self._call(lambda admin: admin.alter_configs([resource]))
        ((code, *_),) = answer.resources
        _check(code)

    def delete_topic(self, topic):
        ((_, code),) = self._call(lambda admin: admin.delete_topics([topic])).topic_error_codes
        _check(code)

    def close(self):
        """Every call had a client of its own."""

    def _call(self, work: Callable[[Any], Any]) -> Any:
        async def run() -> Any:
            admin = AIOKafkaAdminClient(bootstrap_servers=self._bootstrap)
            await admin.start()
            try:
                return await asyncio.wait_for(work(admin), patience(PATIENCE_S))
            except aiokafka.errors.KafkaError as error:
                raise refused(error) from error
            finally:
                await admin.close()

        return asyncio.run(run())


def _check(code: int) -> None:
    if code:
        raise Refused(error_name(code))


async def produce_all(producer: Any, topic: str, records: Any) -> list[int]:
    """Send and wait; the offsets, -1 where the client is told none."""
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
    sent = [await asyncio.wait_for(future, patience(PATIENCE_S)) for future in futures]
    return [metadata.offset if metadata is not None else -1 for metadata in sent]


class AioKafka(ForeignClient):
    name = "aiokafka"
    sends_null_headers = True
    member_type = AioKafkaMember
    transactional_type = AioKafkaTransactions
    admin_type = AioKafkaAdmin

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
        async def send() -> list[int]:
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=self.bootstrap,
                compression_type=None if codec == "none" else codec,
                acks="all" if acks == -1 else acks,
                enable_idempotence=idempotent,
                max_request_size=largest_request,
                linger_ms=5,
            )
            await producer.start()
            try:
                return await produce_all(producer, topic, records)
            except aiokafka.errors.KafkaError as error:
                raise refused(error) from error
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
                received += [handed_out(record) for records in polled.values() for record in records]
            return received

        return self._with_consumer(None, read)

    def drain(self, topic, partition=0, *, committed=False):
        async def read(consumer: Any) -> list[Received]:
            place = aiokafka.TopicPartition(topic, partition)
            consumer.assign([place])
            await consumer.seek_to_beginning(place)
            end = (await consumer.end_offsets([place]))[place]
            received: list[Received] = []
            while await consumer.position(place) < end:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    received += map(handed_out, records)
            return received

        return self._with_consumer(None, read, isolation_level=_level(committed))

    def first_read(self, topic, start, reset):
        async def read(consumer: Any) -> Received:
            place = aiokafka.TopicPartition(topic, 0)
            consumer.assign([place])
            consumer.seek(place, start)
            return handed_out(await consumer.getone())

        return self._with_consumer(None, read, auto_offset_reset={"error": "none"}.get(reset, reset))

    def offset_for_time(self, topic, partition, timestamp_ms):
        async def ask(consumer: Any) -> int | None:
            asked = aiokafka.TopicPartition(topic, partition)
            found = (await consumer.offsets_for_times({asked: timestamp_ms}))[asked]
            return None if found is None else found.offset

        return self._with_consumer(None, ask)

    def bounds(self, topic, partition, *, committed=False):
        async def ask(consumer: Any) -> tuple[int, int]:
            asked = aiokafka.TopicPartition(topic, partition)
            first = (await consumer.beginning_offsets([asked]))[asked]
            return first, (await consumer.end_offsets([asked]))[asked]

        return self._with_consumer(None, ask, isolation_level=_level(committed))

    def committed(self, group, topic, partition):
        async def ask(consumer: Any) -> int | None:
            consumer.assign([aiokafka.TopicPartition(topic, partition)])
            found: int | None = await consumer.committed(aiokafka.TopicPartition(topic, partition))
            return found

        return self._with_consumer(group, ask)

    def commit(self, group, topic, partition, offset, metadata=""):
        async def write(consumer: Any) -> None:
            place = aiokafka.TopicPartition(topic, partition)
            consumer.assign([place])
            await consumer.commit({place: (offset, metadata)})

        self._with_consumer(group, write)

    def _with_consumer(self, group: str | None, work: Callable[[Any], Any], **options: Any) -> Any:
        settings: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "group_id": group,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "fetch_max_wait_ms": FETCH_WAIT_MS,
            "max_partition_fetch_bytes": LARGEST_REQUEST,
        }

        async def run() -> Any:
            consumer = aiokafka.AIOKafkaConsumer(**settings | options)
            await consumer.start()
            try:
                return await asyncio.wait_for(work(consumer), patience(PATIENCE_S))
            except aiokafka.errors.KafkaError as error:
                raise refused(error) from error
            finally:
                await consumer.stop()

        return asyncio.run(run())


def _level(committed: bool) -> str:
    return "read_committed" if committed else "read_uncommitted"
