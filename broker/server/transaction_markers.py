"""The ends of transactions, written: into this broker's partitions, or by another broker into its own.

`MarkerWriter.write_here` is what WriteTxnMarkers does, and what the coordinator calls for partitions that its
own broker leads; `write_there` is the request to another broker, `verify_there` the one by which a leader
asks a coordinator on another broker about a transaction (KIP-890). A marker is reported written when all
in-sync replicas have it, and after the groups whose offsets it commits know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import structlog
from kio.schema.errors import ErrorCode

from millrace.broker.client.broker_connections import BrokerConnections
from millrace.broker.errors import KafkaError, error_for_code
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.system_topics import OFFSETS_TOPIC
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.replica_manager import ACKS_ALL, ReplicaManager
from millrace.broker.server.answers import build_entity, request_type
from millrace.broker.transactions.markers import Marker, Outcome, partitions_by_topic
from millrace.broker.transactions.values import ProducerIdentity
from millrace.broker.transactions.verification import TransactionGate

log = structlog.get_logger("millrace.broker")

WRITE_TIMEOUT_MS = 10_000
"""How long a leader waits for its followers before it says so; the coordinator then asks again."""

REQUEST_TIMEOUT_MS = 30_000
VERIFY_TIMEOUT_MS = 10_000

NOT_APPENDED = -1

_MARKERS_VERSION = 1
_VERIFY_VERSION = 4
MARKERS_PURPOSE, VERIFY_PURPOSE = "markers", "verification"


class MarkerWriter:
    """Writes markers into the partitions that this broker leads."""

    def __init__(
        self,
        replica_manager: ReplicaManager,
        groups: GroupCoordinator,
        gate: TransactionGate,
        clock_ms: Callable[[], int],
    ) -> None:
        self._replica_manager = replica_manager
        self._groups = groups
        self._gate = gate
        self._clock_ms = clock_ms

    async def write_here(self, markers: Sequence[Marker]) -> list[Outcome]:
        """Append the markers; for each of them an error by partition.

        At once, but to a partition into which a large batch is on its way: a marker that waited for one of
        another partition could end its producer's next transaction, if this request was given up meanwhile
        and another has told its marker as written.
        """
        outcomes: list[Outcome] = [{} for _ in markers]
        offsets: dict[tuple[int, TopicPartition], int] = {}
        waits: dict[asyncio.Future[None], list[tuple[int, TopicPartition]]] = {}
        slow_appends = self._replica_manager.slow_appends
        held: dict[TopicPartition, list[int]] = {}

        def append(index: int, partition: TopicPartition) -> None:
            error, offset, wait = self._append(markers[index], partition)
            outcomes[index][partition] = error
            offsets[index, partition] = offset
            if wait is not None:
                waits.setdefault(wait, []).append((index, partition))

        async def append_held(partition: TopicPartition, indexes: list[int]) -> None:
            await slow_appends.settled(partition)
            for index in indexes:
                append(index, partition)

        for index, marker in enumerate(markers):
            for partition in sorted(marker.partitions):
                if slow_appends.is_under_way(partition):
                    held.setdefault(partition, []).append(index)
                else:
                    append(index, partition)
        if held:
            await asyncio.gather(*(append_held(*each) for each in held.items()))
        if waits:
            await asyncio.wait(waits, timeout=WRITE_TIMEOUT_MS / 1000)
            for wait, places in waits.items():
                for index, partition in places:
                    outcomes[index][partition] = _outcome(wait)
        for (index, (topic, number)), offset in offsets.items():
            if topic == OFFSETS_TOPIC and outcomes[index][topic, number] is ErrorCode.none:
                marker = markers[index]
                self._groups.transaction_ended(number, marker.producer.producer_id, marker.committed, offset)
        return outcomes

    def _append(
        self, marker: Marker, partition: TopicPartition
    ) -> tuple[ErrorCode, int, asyncio.Future[None] | None]:
        """An error, or the marker's place in the log and what is to be waited for."""
        producer = marker.producer
        batch = build_marker(
            producer.producer_id,
            producer.epoch,
            marker.coordinator_epoch,
            marker.committed,
            self._clock_ms(),
        )
        try:
            appended, wait = self._replica_manager.append_now(
                *partition, memoryview(batch), ACKS_ALL, "internal"
            )
        except KafkaError as error:
            log.info(
                "a transaction marker was not written",
                topic=partition[0],
                partition=partition[1],
                producer_id=producer.producer_id,
                error=str(error),
            )
            return ErrorCode(error.code), NOT_APPENDED, None
        self._gate.ended(partition, producer.producer_id)
        return ErrorCode.none, appended.base_offset, wait


def _outcome(wait: asyncio.Future[None]) -> ErrorCode:
    if not wait.done():
        return ErrorCode.request_timed_out
    if wait.cancelled():
        return ErrorCode.not_leader_or_follower
    error = wait.exception()
    if error is None:
        return ErrorCode.none
    return (
        ErrorCode(error.code) if isinstance(error, KafkaError) else ErrorCode.not_enough_replicas_after_append
    )


async def write_there(peers: BrokerConnections, broker_id: int, markers: Sequence[Marker]) -> list[Outcome]:
    """Have another broker append them. Raises MillraceError when it cannot be asked."""
    request = build_entity(
        request_type(Api.WRITE_TXN_MARKERS, _MARKERS_VERSION),
        {
            "markers": [
                {
                    "producer_id": marker.producer.producer_id,
                    "producer_epoch": marker.producer.epoch,
                    "transaction_result": marker.committed,
                    "topics": _topics(marker.partitions),
                    "coordinator_epoch": marker.coordinator_epoch,
                }
                for marker in markers
            ]
        },
    )
    connection = await peers.get(broker_id, MARKERS_PURPOSE)
    response = await connection.call(request, REQUEST_TIMEOUT_MS)
    by_producer: dict[int, Outcome] = {}
    for result in response.markers:
        by_producer.setdefault(int(result.producer_id), {}).update(_errors(result.topics))
    return [by_producer.get(marker.producer.producer_id, {}) for marker in markers]


async def verify_there(
    peers: BrokerConnections,
    broker_id: int,
    transactional_id: str,
    producer: ProducerIdentity,
    partitions: Collection[TopicPartition],
) -> dict[TopicPartition, ErrorCode]:
    """Ask the coordinator on another broker. Raises MillraceError when it cannot be asked."""
    request = build_entity(
        request_type(Api.ADD_PARTITIONS_TO_TXN, _VERIFY_VERSION),
        {
            "transactions": [
                {
                    "transactional_id": transactional_id,
                    "producer_id": producer.producer_id,
                    "producer_epoch": producer.epoch,
                    "verify_only": True,
                    "topics": _topics(partitions),
                }
            ]
        },
    )
    connection = await peers.get(broker_id, VERIFY_PURPOSE)
    response = await connection.call(request, VERIFY_TIMEOUT_MS)
    if response.error_code is not ErrorCode.none:
        raise error_for_code(int(response.error_code))
    errors: dict[TopicPartition, ErrorCode] = {}
    for result in response.results_by_transaction:
        for topic in result.topic_results:
            for entry in topic.results_by_partition:
                errors[(topic.name, int(entry.partition_index))] = ErrorCode(entry.partition_error_code)
    return errors


def _topics(partitions: Collection[TopicPartition]) -> list[dict[str, Any]]:
    return [
        # WriteTxnMarkers and AddPartitionsToTxn name the same field differently.
        {"name": topic, "partition_indexes": numbers, "partitions": numbers}
        for topic, numbers in partitions_by_topic(partitions).items()
    ]


def _errors(topics: Any) -> Outcome:
    return {
        (topic.name, int(entry.partition_index)): ErrorCode(entry.error_code)
        for topic in topics
        for entry in topic.partitions
    }
