"""Writing the mirror's own records to the target: positions and gap events.

Called by `worker`. These topics are compacted and the newest record of a key wins, so a write that is
repeated does no harm, as long as nothing newer stands before it. So writes of one partition go out one after
the other, and after an uncertain failure again under the same producer id and sequence: a request that was
long on its way is a duplicate then, and not the newest record of its keys (KIP-98).

Batches are cut by size, smaller ones where the target says that one is too large. An answer that will be the
same for ever ends the process (FatalError): whoever waits for the partition would wait for nothing. Any other
is told until the records are written, as the trouble of each partition that waits for them (`standing`).
"""

from __future__ import annotations

import asyncio
import binascii
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import structlog

from millrace.broker.client.admin import create_topic, describe_configs
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import init_producer_id, produce
from millrace.broker.client.retry import BackOff
from millrace.broker.errors import (
    ClusterAuthorizationFailed,
    ClusterUnreachable,
    FatalError,
    InvalidRecord,
    InvalidTimestamp,
    KafkaError,
    LeaderNotAvailable,
    PolicyViolation,
    ProtocolError,
    RecordListTooLarge,
    RecordTooLarge,
    TopicAlreadyExists,
    UnsupportedCompressionType,
    UnsupportedForMessageFormat,
    error_for_code,
)
from millrace.broker.protocol.batch import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.troubles import Failure, Failures

log = structlog.get_logger("millrace.mirror.delivery.system_records")

CLUSTER_FAILURES = (KafkaError, ClusterUnreachable, ProtocolError, OSError, TimeoutError)
TOO_LARGE = (RecordTooLarge, RecordListTooLarge)
# Answers to a produce request that are about the batch itself and will be the same for ever.
UNCHANGING = (
    *TOO_LARGE,
    InvalidTimestamp,
    InvalidRecord,
    PolicyViolation,
    UnsupportedForMessageFormat,
    UnsupportedCompressionType,
)
# Of the mirror's own records all but their time, which is another at the next try: a clock can be set right.
LASTING = tuple(error for error in UNCHANGING if error is not InvalidTimestamp)
# Of a batch of the mirror's own records: a quarter of what a target takes by default.
BATCH_SIZE = 256 << 10
# At most, of what a record takes beside key and value.
RECORD_OVERHEAD = 40
KeyAndValue: TypeAlias = tuple[bytes, bytes | None]
Waiting: TypeAlias = Callable[[], Iterable[SourcePartition]]
WRITE_BACK_OFF = BackOff(first_ms=100, limit_ms=5_000)


class NewFailures:
    """Of something that is tried without end: which failures are news, each kind once. What persists may be
    another than what it began with, and nothing else would tell."""

    def __init__(self) -> None:
        self._told: set[type[BaseException]] = set()

    def is_news(self, error: BaseException) -> bool:
        is_news = type(error) not in self._told
        self._told.add(type(error))
        return is_news

    def over(self) -> None:
        """It has worked: all is news again."""
        self._told.clear()


def _size(record: KeyAndValue) -> int:
    return len(record[0]) + len(record[1] or b"") + RECORD_OVERHEAD


def cut_by_size(records: Iterable[KeyAndValue], limit: int) -> list[list[KeyAndValue]]:
    """The records in order, in batches of at most `limit` bytes; a record that is larger stands alone."""
    batches: list[list[KeyAndValue]] = []
    room = 0
    for record in records:
        room -= _size(record)
        if not batches or room < 0:
            batches.append([])
            room = limit - _size(record)
        batches[-1].append(record)
    return batches


def smaller_limit(cluster: str, topic: str, batch: Sequence[KeyAndValue], error: KafkaError) -> int:
    """The next limit to cut by, after a batch was refused for good. Raises FatalError where it was not for
    its size, or where it is one record."""
    where = f"cluster {cluster}: topic {topic}"
    if not isinstance(error, TOO_LARGE):
        raise FatalError(f"{where} refuses the mirror's own records for good ({error}); correct its configs")
    size = sum(map(_size, batch))
    if len(batch) == 1:
        raise FatalError(f"{where} takes no record of {size} bytes ({error}); raise its max.message.bytes")
    log.warning("the target takes no batch of that size; going on with smaller ones", topic=topic, size=size)
    return size // 2


async def ensure_topic(
    cluster: Cluster, topic: str, partitions: int, replication_factor: int, configs: Mapping[str, str]
) -> int:
    """Creates a topic of the mirror's own unless it is there; gives its partition count."""
    view = await cluster.metadata([topic], max_age_ms=0)
    if topic not in view.topics:
        try:
            await create_topic(cluster, topic, partitions, replication_factor, configs)
        except TopicAlreadyExists:
            log.debug("another worker was first", topic=topic)
        view = await cluster.metadata([topic], max_age_ms=0)
    known = view.topics.get(topic)
    if known is None:
        raise LeaderNotAvailable(f"cluster {cluster.name}: topic {topic} was created but is not there yet")
    return len(known.partitions)


async def refuse_expiring_topic(cluster: Cluster, topic: str) -> None:
    """Raises FatalError when a topic that must keep its records for ever lets them expire.

    A topic of that name that somebody else made (automatic creation is enough) would lose the position of an
    idle partition by retention, and a lost position must never be taken for a new partition.
    """
    policy = (await describe_configs(cluster, topic)).get("cleanup.policy")
    if policy is not None and policy != "compact":
        raise FatalError(
            f"cluster {cluster.name}: topic {topic} has cleanup.policy={policy}, so positions would expire; "
            "set it to compact"
        )


@dataclass(slots=True)
class _Producer:
    """Of one partition: the producer id with its epoch, the sequence of what is written next, and the batch
    that may have been written under it already."""

    identity: tuple[int, int]
    next_sequence: int = 0
    in_doubt: Sequence[KeyAndValue] | None = None

    def written(self, count: int) -> None:
        self.next_sequence = (self.next_sequence + count) & 0x7FFFFFFF
        self.in_doubt = None


# Where the target gives nobody an id who may not write idempotently (before Apache Kafka 2.8 a right of its
# own): as well as can be without.
_NOBODY = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


class SystemRecords:
    """Writes records, in small batches, and does not give up for want of patience."""

    def __init__(self, cluster: Cluster, now_ms: Callable[[], int], replication_factor: int) -> None:
        self._cluster = cluster
        self._now_ms = now_ms
        self._replication_factor = replication_factor
        self._locks: dict[TopicPartition, asyncio.Lock] = {}
        self._producers: dict[TopicPartition, _Producer] = {}
        self._partition_counts: dict[str, int] = {}
        self._limits: dict[str, int] = {}  # of a batch's size, where a topic takes less than usual
        self.failures: Failures[TopicPartition] = Failures()  # of what is being written, until it is
        self._waiting: dict[object, tuple[TopicPartition, Waiting]] = {}  # by write that is under way

    async def write(
        self,
        topic: str,
        records: Sequence[KeyAndValue],
        *,
        partition_of: bytes | None = None,
        partition: int = 0,
        partitions: int = 1,
        configs: Mapping[str, str],
        waiting: Waiting = tuple,
        permit: Callable[[], None] = lambda: None,
    ) -> int:
        """Returns when all in-sync replicas have the records; gives the offset behind the last of them. The
        topic is created when it is missing, with `partitions` partitions. With `partition_of` the partition
        follows from that key, otherwise it is `partition`. `waiting` says, whenever it is asked meanwhile,
        which source partitions wait for it. `permit` is asked before each try: what it raises ends the
        writing, whose last try may have been taken all the same."""
        where, this_write = (topic, partition), object()
        self._waiting[this_write] = where, waiting
        try:
            async with self._locks.setdefault(where, asyncio.Lock()):
                return await self._write(where, records, partition_of, partitions, configs, permit)
        finally:
            del self._waiting[this_write]

    def standing(self) -> Iterator[tuple[SourcePartition, Failure]]:
        """The source partitions that wait for what is not taken: why, and since when; once for each topic."""
        told: dict[tuple[SourcePartition, str], Failure] = {}
        for where, waiting in self._waiting.values():
            if (failure := self.failures.get(where)) is not None:
                reason = f"{where[0]} takes no record of it: {failure.reason}"
                told |= {(each, where[0]): Failure(reason, failure.since_ms) for each in waiting()}
        for (partition, _), failure in told.items():
            yield partition, failure

    async def _write(
        self,
        where: TopicPartition,
        records: Sequence[KeyAndValue],
        partition_of: bytes | None,
        partitions: int,
        configs: Mapping[str, str],
        permit: Callable[[], None],
    ) -> int:
        topic, partition = where
        failures, failure_count, end = NewFailures(), 0, 0
        limit = self._limits.get(topic, BATCH_SIZE)
        left = deque(cut_by_size(records, limit))
        try:
            while left:
                permit()
                try:
                    end = await self._attempt(topic, left[0], partition_of, partition, partitions, configs)
                    left.popleft()
                except CLUSTER_FAILURES as error:
                    if (lower := self._limits.get(topic, BATCH_SIZE)) < limit:
                        limit, left = lower, deque(cut_by_size(chain.from_iterable(left), lower))
                    if failures.is_news(error):
                        log.warning("writing again later", topic=topic, error=str(error))
                    failure_count += 1
                    self.failures.failed(where, str(error), self._now_ms())
                    self._partition_counts.pop(topic, None)
                    await asyncio.sleep(WRITE_BACK_OFF.delay_ms(failure_count, random.random()) / 1000)
        finally:
            self.failures.over(where)
        return end

    async def _attempt(
        self,
        topic: str,
        records: Sequence[KeyAndValue],
        partition_of: bytes | None,
        partition: int,
        partitions: int,
        configs: Mapping[str, str],
    ) -> int:
        """Writes one batch, the same one until it is written or refused; gives the offset behind it."""
        count = self._partition_counts.get(topic)
        if count is None:
            count = await ensure_topic(self._cluster, topic, partitions, self._replication_factor, configs)
            self._partition_counts[topic] = count
        if partition_of is not None:
            partition = binascii.crc32(partition_of) % count
        view = await self._cluster.metadata([topic])
        leader = view.leader(topic, partition)
        if leader is None:
            self._cluster.invalidate()
            raise LeaderNotAvailable(f"{topic}-{partition} has no leader now")
        producer = await self._producer((topic, partition), records)
        now_ms = self._now_ms()
        batch = build_batch(
            [Record(key, value, timestamp_ms=now_ms) for key, value in records],
            producer_id=producer.identity[0],
            producer_epoch=producer.identity[1],
            base_sequence=NO_SEQUENCE if producer.identity == _NOBODY else producer.next_sequence,
        )
        outcomes = await produce(self._cluster, leader, {(topic, partition): batch})
        outcome = outcomes[topic, partition]
        if code := outcome.error_code:
            self._cluster.observe(code)
            error = error_for_code(code, outcome.error_message or "")
            if not error.retriable:
                # Refused, but an earlier try may have been taken: its sequence is not to be another batch's.
                del self._producers[topic, partition]
            if isinstance(error, LASTING):
                self._limits[topic] = smaller_limit(self._cluster.name, topic, records, error)
            raise error
        producer.written(len(records))
        return outcome.base_offset + len(records)

    async def _producer(self, where: TopicPartition, records: Sequence[KeyAndValue]) -> _Producer:
        """For this batch: with the sequence that it had before, or one that no other batch ever had. One of
        equal records is another batch: a duplicate's answer is the place of the first."""
        producer = self._producers.get(where)
        if producer is None or not (producer.in_doubt is None or producer.in_doubt is records):
            producer = self._producers[where] = _Producer(await self._new_identity())
        producer.in_doubt = records
        return producer

    async def _new_identity(self) -> tuple[int, int]:
        try:
            return await init_producer_id(self._cluster)
        except ClusterAuthorizationFailed:
            return _NOBODY
