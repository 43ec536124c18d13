"""The parts of a broker that transactions need, made and joined together in one place.

Called by `broker.py` at start. The layers below know nothing of each other: the coordinator gets its log, its
producer ids and its way to other brokers from here, the gate its way to the coordinator.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from millrace.broker.client.broker_connections import BrokerConnections
from millrace.broker.config import BrokerSettings
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.protocol.system_topics import TRANSACTIONS_TOPIC
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.off_loop import Compute, at_once
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.server.coordinator_topics import partition_leader, transaction_coordinator
from millrace.broker.server.internal_topics import CoordinatorLoader, InternalTopicLog
from millrace.broker.server.transaction_markers import MarkerWriter, verify_there, write_there
from millrace.broker.server.transactional_produce import TransactionalAppends
from millrace.broker.transactions.config import TransactionConfig
from millrace.broker.transactions.coordinator import TransactionCoordinator
from millrace.broker.transactions.markers import Marker, Outcome
from millrace.broker.transactions.values import ProducerIdentity
from millrace.broker.transactions.verification import Errors, TransactionGate


@dataclass(frozen=True, slots=True)
class TransactionParts:
    """`loader` and `gate` listen to the replica manager."""

    coordinator: TransactionCoordinator
    gate: TransactionGate
    appends: TransactionalAppends
    marker_writer: MarkerWriter
    loader: CoordinatorLoader

    async def close(self) -> None:
        """Coordinate nothing any more."""
        await self.loader.close()
        await self.coordinator.close()


def build_transactions(
    broker_id: int,
    settings: BrokerSettings,
    *,
    replica_manager: ReplicaManager,
    cache: MetadataCache,
    groups: GroupCoordinator,
    peers: BrokerConnections,
    take_producer_id: Callable[[], Awaitable[int]],
    clock_ms: Callable[[], int],
    compute: Compute = at_once,
) -> TransactionParts:
    """Make the parts and have them hear of leaderships."""

    async def write_markers(leader: int, markers: Sequence[Marker]) -> list[Outcome]:
        if leader == broker_id:
            return await marker_writer.write_here(markers)
        return await write_there(peers, leader, markers)

    async def verify(
        leader: int,
        transactional_id: str,
        producer: ProducerIdentity,
        partitions: Collection[TopicPartition],
    ) -> Errors:
        return await verify_there(peers, leader, transactional_id, producer, partitions)

    coordinator = TransactionCoordinator(
        TransactionConfig.from_settings(settings),
        InternalTopicLog(
            TRANSACTIONS_TOPIC, replica_manager, cache, settings.transaction_state_log_num_partitions
        ),
        clock_ms=clock_ms,
        take_producer_id=take_producer_id,
        leader_of=lambda topic, number: partition_leader(cache, topic, number),
        write_markers=write_markers,
        compute=compute,
    )
    gate = TransactionGate(
        broker_id,
        replica_manager,
        clock_ms=clock_ms,
        coordinator_of=lambda transactional_id: transaction_coordinator(cache, transactional_id),
        verify_now=coordinator.verify_now,
        verify_here=coordinator.verify,
        verify_there=verify,
        enabled=settings.transaction_partition_verification_enable,
    )
    marker_writer = MarkerWriter(replica_manager, groups, gate, clock_ms)
    loader = CoordinatorLoader(TRANSACTIONS_TOPIC, "transactions", coordinator.load, coordinator.unload)
    replica_manager.listeners.gained.append(loader.gained)
    replica_manager.listeners.lost.append(loader.lost)
    replica_manager.listeners.lost.append(gate.lost)
    return TransactionParts(coordinator, gate, TransactionalAppends(gate), marker_writer, loader)
