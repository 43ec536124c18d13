"""A small idempotent producer of records, for events, positions and tests; the mirror does not use it.

`send` puts a record into its partition's open batch and gives a future that resolves when the batch is
acknowledged by all in-sync replicas. A batch goes out when it is `linger_ms` old or full; each partition
has one batch under way at a time, so order holds and a retry is the same bytes under the same sequence,
which the broker recognises (KIP-98).

Where a batch must be given up (`delivery_timeout_ms`, or a refusal), its records' futures get the error and
the partition goes on under a new producer id: the old one's sequence would have a gap. Whether the records
of a batch given up after a lost connection were written is not known; the error says so.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import ProduceOutcome, init_producer_id, produce
from millrace.broker.client.retry import REQUEST_BACK_OFF
from millrace.broker.errors import (
    ClusterUnreachable,
    DuplicateSequence,
    KafkaError,
    LeaderNotAvailable,
    MillraceError,
    ProtocolError,
    error_for_code,
)
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.protocol.topic_partition import TopicPartition

# What a record and a header take in a batch beside their own bytes, at most.
_RECORD_OVERHEAD = 32
_HEADER_OVERHEAD = 10


class Acknowledgement(NamedTuple):
    """Where a record was written. `offset` is -1 when the broker only knew it for a repeated one."""

    topic: str
    partition: int
    offset: int


@dataclass(slots=True, eq=False)
class _Batch:
    opened_at: float
    records: list[Record] = field(default_factory=list)
    answers: list[asyncio.Future[Acknowledgement]] = field(default_factory=list)
    size: int = 0


@dataclass(slots=True, eq=False)
class _Partition:
    """A partition's batches (the last one is open, `under_way` has left the queue), its producer id and
    sequence, and the task that sends the batches one after another."""

    key: TopicPartition
    queue: deque[_Batch] = field(default_factory=deque)
    under_way: _Batch | None = None
    identity: tuple[int, int] | None = None
    next_sequence: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    sender: asyncio.Task[None] | None = None


class Producer:
    """See the module's text. An async context manager; `close` sends what is still there."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        linger_ms: float = 5,
        batch_size: int = 256 << 10,
        compression: int = 0,
        delivery_timeout_ms: int = 120_000,
        rng: random.Random | None = None,
    ) -> None:
        """`batch_size` bounds a batch before compression, `compression` is a codec id (0 none, 1 gzip,
        2 snappy, 3 lz4, 4 zstd)."""
        self._cluster = cluster
        self._linger_s = linger_ms / 1000
        self._batch_size = batch_size
        self._compression = compression
        self._delivery_timeout_s = delivery_timeout_ms / 1000
        self._rng = rng or random.Random()
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._counts: dict[str, int] = {}
        self._flushing_count = 0
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def send(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> asyncio.Future[Acknowledgement]:
        """Accept a record; await the future that is returned to know its fate.

        Without `partition` a key decides by Kafka's own hash, so that the same key is always at the same
        place, whoever writes; a record without a key joins an open batch, or a random partition. Raises
        what finding the topic's partitions raises.
        """
        if self._closed:
            raise RuntimeError("the producer is closed")
        if partition is None:
            partition = self._choose(topic, key, await self._partition_count(topic))
            if self._closed:
                raise RuntimeError("the producer was closed meanwhile")
        where = self._partitions.setdefault((topic, partition), _Partition((topic, partition)))
        now_ms = time.time_ns() // 1_000_000 if timestamp_ms is None else timestamp_ms
        record = Record(key, value, tuple(headers), now_ms)
        return self._enqueue(where, record)

    async def flush(self) -> None:
        """Send everything now and wait until each record's fate is known (the futures tell which)."""
        batches = [batch for each in self._partitions.values() for batch in (each.under_way, *each.queue)]
        answers = [answer for batch in batches if batch is not None for answer in batch.answers]
        self._flushing_count += 1
        try:
            for each in self._partitions.values():
                each.wake.set()
            if answers:
                await asyncio.wait(answers)
        finally:
            self._flushing_count -= 1

    async def close(self) -> None:
        """Flush, then stop."""
        self._closed = True
        await self.flush()
        senders = [each.sender for each in self._partitions.values() if each.sender is not None]
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)

    # --- filling batches ----------------------------------------------------------------------------

    async def _partition_count(self, topic: str) -> int:
        if topic not in self._counts:

            async def attempt() -> int:
                view = await self._cluster.metadata([topic])
                if topic in view.topic_errors:
                    code = view.topic_errors[topic]
                    raise error_for_code(code, f"{self._cluster}: topic {topic}: {error_for_code(code)}")
                return len(view.topics[topic].partitions)

            self._counts[topic] = await self._cluster.retrying(attempt)
        return self._counts[topic]

    def _choose(self, topic: str, key: bytes | None, count: int) -> int:
        if key is not None:
            return partition_for_key(key, count)
        for number in range(count):
            where = self._partitions.get((topic, number))
            if where is not None and where.queue:
                return number
        return self._rng.randrange(count)

    def _enqueue(self, where: _Partition, record: Record) -> asyncio.Future[Acknowledgement]:
        loop = asyncio.get_running_loop()
        size = _RECORD_OVERHEAD + len(record.key or b"") + len(record.value or b"")
        size += sum(len(name) + len(value or b"") + _HEADER_OVERHEAD for name, value in record.headers)
        if not where.queue or where.queue[-1].size + size > self._batch_size:
            where.queue.append(_Batch(loop.time()))
        batch = where.queue[-1]
        answer: asyncio.Future[Acknowledgement] = loop.create_future()
        batch.records.append(record)
        batch.answers.append(answer)
        batch.size += size
        where.wake.set()
        if where.sender is None:
            where.sender = loop.create_task(self._send_batches(where))
        return answer

    # --- sending them -------------------------------------------------------------------------------

    async def _send_batches(self, where: _Partition) -> None:
        while True:
            await self._until_due(where)
            where.under_way = where.queue.popleft()
            try:
                await self._deliver(where, where.under_way)
            except Exception as error:
                # The root of a task: these records, and all after them, would wait for their fate for ever.
                where.identity = None
                self._give_up(where.under_way, error)
            where.under_way = None

    async def _until_due(self, where: _Partition) -> None:
        """Wait until there is a batch that is full, old enough, or to be flushed."""
        loop = asyncio.get_running_loop()
        while True:
            where.wake.clear()
            wait_s: float | None = None
            if where.queue:
                wait_s = where.queue[0].opened_at + self._linger_s - loop.time()
                if len(where.queue) > 1 or self._flushing_count or wait_s <= 0:
                    return
            try:
                async with asyncio.timeout(wait_s):
                    await where.wake.wait()
            except TimeoutError:
                return

    async def _deliver(self, where: _Partition, batch: _Batch) -> None:
        """Send one batch until it is acknowledged or must be given up; tell its records."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._delivery_timeout_s
        encoded: bytearray | None = None
        for failure_count in itertools.count(1):
            try:
                if where.identity is None:
                    where.identity = await init_producer_id(self._cluster)
                    where.next_sequence = 0
                if encoded is None:
                    encoded = self._encode(where, batch)
                outcome = await self._attempt(where.key, encoded)
                break
            except MillraceError as error:
                pause_s = REQUEST_BACK_OFF.delay_ms(failure_count, self._rng.random()) / 1000
                if not _may_retry(error) or loop.time() + pause_s >= deadline:
                    where.identity = None
                    self._give_up(batch, error)
                    return
            await asyncio.sleep(pause_s)
        where.next_sequence = (where.next_sequence + len(batch.records)) & 0x7FFFFFFF
        topic, partition = where.key
        for delta, answer in enumerate(batch.answers):
            if not answer.done():
                offset = outcome.base_offset + delta if outcome.base_offset >= 0 else -1
                answer.set_result(Acknowledgement(topic, partition, offset))

    def _encode(self, where: _Partition, batch: _Batch) -> bytearray:
        if where.identity is None:
            raise AssertionError("a batch is encoded under a producer id")
        producer_id, producer_epoch = where.identity
        return build_batch(
            batch.records,
            compression=self._compression,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=where.next_sequence,
        )

    async def _attempt(self, key: TopicPartition, encoded: bytearray) -> ProduceOutcome:
        topic, partition = key
        view = await self._cluster.metadata([topic])
        node_id = view.leader(topic, partition)
        if node_id is None:
            self._cluster.invalidate()
            raise LeaderNotAvailable(f"{self._cluster}: {topic}-{partition} has no leader now")
        outcomes = await produce(self._cluster, node_id, {key: encoded}, purpose="producer")
        outcome = outcomes[key]
        # Repeated after a lost answer, and so old by now that the broker knows no offset: it was written.
        if outcome.error_code not in (0, DuplicateSequence.code):
            plain = outcome.error_message or str(error_for_code(outcome.error_code))
            raise error_for_code(outcome.error_code, f"{self._cluster}: {topic}-{partition}: {plain}")
        return outcome

    def _give_up(self, batch: _Batch, error: Exception) -> None:
        for answer in batch.answers:
            if not answer.done():
                answer.set_exception(type(error)(*error.args) if isinstance(error, KafkaError) else error)
                # Seen, as far as the event loop is concerned: who does not await a record's future does
                # not want to know.
                answer.exception()


def _may_retry(error: MillraceError) -> bool:
    if isinstance(error, KafkaError):
        return error.retriable
    return isinstance(error, ProtocolError | ClusterUnreachable)


def partition_for_key(key: bytes, count: int) -> int:
    """The partition that Apache Kafka's own producers choose: murmur2 of the key, made positive."""
    return (murmur2(key) & 0x7FFFFFFF) % count


def murmur2(data: bytes) -> int:
    """32-bit MurmurHash2 with the seed that Kafka uses, as an unsigned number."""
    mask, multiplier = 0xFFFFFFFF, 0x5BD1E995
    value = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        word = word * multiplier & mask
        word = (word ^ word >> 24) * multiplier & mask
        value = value * multiplier & mask ^ word
    rest = data[whole:]
    if rest:
        value = (value ^ int.from_bytes(rest, "little")) * multiplier & mask
    value = (value ^ value >> 13) * multiplier & mask
    return value ^ value >> 15
