"""A producer's transaction, step by step: partitions, group, offsets, end (KIP-98, KIP-447).

The requests that a transactional producer sends beside its batches. The producer's id and epoch come from
`raw_produce.init_producer_id`, the batches go out by `raw_produce.produce`. Called by the mirror's
transactional lanes; holds no state, so whoever calls decides what may be sent when.

Spoken are the versions of transactions of version 1 (KIP-890, part 1), which Millrace and every Apache Kafka
since 2.5 take: AddPartitionsToTxn 0-3, AddOffsetsToTxn 0-3, TxnOffsetCommit 3, EndTxn 0-3.

What a coordinator says while it is busy or moving (CONCURRENT_TRANSACTIONS while the markers of the last
transaction are written, COORDINATOR_*, NOT_COORDINATOR, lost connections) is tried again within `timeout_ms`.
Every request may be repeated: its effect is the same. Anything else is raised: InvalidProducerEpoch and
ProducerFenced (another producer has the id, or the transaction took too long), InvalidTxnState,
InvalidProducerIdMapping; of the group IllegalGeneration, UnknownMemberId, FencedInstanceId. When the time is
over the last failure is raised: whether the request had its effect is then not known.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.client.retry import BackOff
from millrace.broker.errors import (
    ClusterUnreachable,
    CoordinatorNotAvailable,
    KafkaError,
    NetworkException,
    NotCoordinator,
    OperationNotAttempted,
    ProtocolError,
    RequestTimedOut,
    error_for_code,
)
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

T = TypeVar("T")

_ADD_PARTITIONS_VERSIONS = (0, 3)
_ADD_OFFSETS_VERSIONS = (0, 3)
_TXN_OFFSET_COMMIT_VERSIONS = (3, 3)
_END_TXN_VERSIONS = (0, 3)
_INIT_PRODUCER_ID_VERSIONS = (0, 4)

# Markers take a few milliseconds: whoever waits for them asks soon.
_BACK_OFF = BackOff(first_ms=1, limit_ms=250, factor=2, jitter=0.2)
_MOVED = frozenset({NotCoordinator.code, CoordinatorNotAvailable.code})


@dataclass(frozen=True, slots=True)
class TransactionalProducer:
    """Who speaks: a transactional id, and the producer id and epoch that InitProducerId gave for it."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Member:
    """A seat in a group, as the fence against those who had it before (KIP-447)."""

    member_id: str
    generation: int
    instance_id: str | None = None


async def require_transactions(cluster: Cluster) -> None:
    """Raises UnsupportedVersion when the cluster's brokers do not speak what a transaction needs."""
    connection = await cluster.connection()
    for api, versions in (
        (Api.INIT_PRODUCER_ID, _INIT_PRODUCER_ID_VERSIONS),
        (Api.ADD_PARTITIONS_TO_TXN, _ADD_PARTITIONS_VERSIONS),
        (Api.ADD_OFFSETS_TO_TXN, _ADD_OFFSETS_VERSIONS),
        (Api.TXN_OFFSET_COMMIT, _TXN_OFFSET_COMMIT_VERSIONS),
        (Api.END_TXN, _END_TXN_VERSIONS),
    ):
        cluster.highest_version(connection, api, versions)


async def add_partitions(
    cluster: Cluster,
    producer: TransactionalProducer,
    partitions: Collection[TopicPartition],
    *,
    timeout_ms: float,
    purpose: str = "control",
) -> dict[TopicPartition, KafkaError]:
    """AddPartitionsToTxn: batches for these partitions are part of the transaction from now on; the first
    call opens it. Gives the partitions that were refused for a reason of their own (unknown, not allowed);
    when there are any, none of the others was added."""
    by_topic: dict[str, list[int]] = {}
    for topic, partition in partitions:
        by_topic.setdefault(topic, []).append(partition)

    async def attempt() -> dict[TopicPartition, KafkaError]:
        def request(version: int) -> Any:
            schema = request_schema(Api.ADD_PARTITIONS_TO_TXN, version)
            return schema.AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=producer.transactional_id,
                v3_and_below_producer_id=producer.producer_id,
                v3_and_below_producer_epoch=producer.producer_epoch,
                v3_and_below_topics=tuple(
                    schema.AddPartitionsToTxnTopic(name=name, partitions=tuple(numbers))
                    for name, numbers in by_topic.items()
                ),
            )

        answer = await _ask(
            cluster, producer, Api.ADD_PARTITIONS_TO_TXN, _ADD_PARTITIONS_VERSIONS, request, purpose
        )
        codes = {
            (str(topic.name), int(result.partition_index)): int(result.partition_error_code)
            for topic in answer.results_by_topic_v3_and_below
            for result in topic.results_by_partition
        }
        refused: dict[TopicPartition, KafkaError] = {}
        for where, code in codes.items():
            if code in (0, OperationNotAttempted.code):
                continue
            error = _error(cluster, producer, code, f"partition {where[0]}-{where[1]}")
            if not _is_about_partition(error):
                raise error
            refused[where] = error
        return refused

    return await _until(cluster, attempt, timeout_ms)


async def add_group(
    cluster: Cluster,
    producer: TransactionalProducer,
    group_id: str,
    *,
    timeout_ms: float,
    purpose: str = "control",
) -> None:
    """AddOffsetsToTxn: the transaction will commit offsets of this group."""

    async def attempt() -> None:
        def request(version: int) -> Any:
            return request_schema(Api.ADD_OFFSETS_TO_TXN, version).AddOffsetsToTxnRequest(
                transactional_id=producer.transactional_id,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                group_id=group_id,
            )

        answer = await _ask(
            cluster, producer, Api.ADD_OFFSETS_TO_TXN, _ADD_OFFSETS_VERSIONS, request, purpose
        )
        if answer.error_code:
            raise _error(cluster, producer, int(answer.error_code), f"group {group_id}")

    await _until(cluster, attempt, timeout_ms)


async def commit_offsets_as(
    cluster: Cluster,
    producer: TransactionalProducer,
    group_id: str,
    member: Member,
    offsets: Mapping[TopicPartition, CommittedOffset],
    *,
    timeout_ms: float,
    purpose: str = "control",
) -> None:
    """TxnOffsetCommit: offsets of the group, as a member of a generation; they count when the transaction is
    committed. The group's coordinator refuses whoever is no member, or of an older generation."""

    async def attempt() -> None:
        try:
            node_id = await cluster.coordinator(group_id)
            connection = await cluster.connection(node_id, purpose)
            version = cluster.highest_version(connection, Api.TXN_OFFSET_COMMIT, _TXN_OFFSET_COMMIT_VERSIONS)
            schema = request_schema(Api.TXN_OFFSET_COMMIT, version)
            by_topic: dict[str, list[Any]] = {}
            for (topic, partition), committed in offsets.items():
                part = schema.TxnOffsetCommitRequestPartition(
                    partition_index=partition,
                    committed_offset=committed.offset,
                    committed_leader_epoch=committed.leader_epoch,
                    committed_metadata=committed.metadata,
                )
                by_topic.setdefault(topic, []).append(part)
            request = schema.TxnOffsetCommitRequest(
                transactional_id=producer.transactional_id,
                group_id=group_id,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                generation_id=member.generation,
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                topics=tuple(
                    schema.TxnOffsetCommitRequestTopic(name=topic, partitions=tuple(parts))
                    for topic, parts in by_topic.items()
                ),
            )
            answer = await cluster.request(request, node_id=node_id, purpose=purpose)
        except KafkaError:
            cluster.forget_coordinator(group_id)
            raise
        for topic in answer.topics:
            for part in topic.partitions:
                code = int(part.error_code)
                if code in _MOVED:
                    cluster.forget_coordinator(group_id)
                if code:
                    raise error_for_code(
                        code, f"{cluster}: group {group_id}, transactional commit: {error_for_code(code)}"
                    )

    await _until(cluster, attempt, timeout_ms)


async def end_transaction(
    cluster: Cluster,
    producer: TransactionalProducer,
    *,
    commit: bool,
    timeout_ms: float,
    purpose: str = "control",
) -> bool:
    """EndTxn. Returns when the outcome is in the coordinator's log; the markers follow by themselves.

    Gives whether every request was answered. One that was not may still be on its way, and would end the
    next transaction of the same producer epoch: begin a new epoch first.
    """
    is_certain = True

    async def attempt() -> None:
        def request(version: int) -> Any:
            return request_schema(Api.END_TXN, version).EndTxnRequest(
                transactional_id=producer.transactional_id,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                committed=commit,
            )

        nonlocal is_certain
        try:
            answer = await _ask(cluster, producer, Api.END_TXN, _END_TXN_VERSIONS, request, purpose)
        except (NetworkException, RequestTimedOut, ProtocolError):
            is_certain = False
            raise
        if answer.error_code:
            raise _error(cluster, producer, int(answer.error_code), "end of the transaction")

    await _until(cluster, attempt, timeout_ms)
    return is_certain


async def _ask(
    cluster: Cluster,
    producer: TransactionalProducer,
    api: Api,
    versions: tuple[int, int],
    request: Callable[[int], Any],
    purpose: str,
) -> Any:
    """One request to the transactional id's coordinator; a failure makes the coordinator be looked up."""
    name = producer.transactional_id
    try:
        node_id = await cluster.coordinator(name, "transaction")
        connection = await cluster.connection(node_id, purpose)
        version = cluster.highest_version(connection, api, versions)
        return await cluster.request(request(version), node_id=node_id, purpose=purpose)
    except (KafkaError, ProtocolError, ClusterUnreachable):
        cluster.forget_coordinator(name, "transaction")
        raise


def _error(cluster: Cluster, producer: TransactionalProducer, code: int, subject: str) -> KafkaError:
    if code in _MOVED:
        cluster.forget_coordinator(producer.transactional_id, "transaction")
    return error_for_code(
        code, f"{cluster}: transaction of {producer.transactional_id}: {subject}: {error_for_code(code)}"
    )


def _is_about_partition(error: KafkaError) -> bool:
    return error.name in (
        "UNKNOWN_TOPIC_OR_PARTITION",
        "TOPIC_AUTHORIZATION_FAILED",
        "INVALID_TOPIC_EXCEPTION",
    )


async def _until(cluster: Cluster, attempt: Callable[[], Awaitable[T]], timeout_ms: float) -> T:
    """Repeats what may be repeated until the time is over; then the last failure is raised."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    failure_count = 0
    while True:
        try:
            return await attempt()
        except (KafkaError, ProtocolError, ClusterUnreachable) as error:
            failure_count += 1
            pause_s = _BACK_OFF.delay_ms(failure_count, random.random()) / 1000
            is_final = isinstance(error, KafkaError) and not error.retriable
            if is_final or loop.time() + pause_s >= deadline:
                raise
            if isinstance(error, KafkaError):
                cluster.observe(error.code)
        await asyncio.sleep(pause_s)
