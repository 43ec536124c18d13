"""The coordinators of groups and of transactions in one broker: the product's own, shells and all.

They run on the broker's virtual loop over its virtual logs. Of the product only what is below them is
replaced: the replica manager (`VirtualReplicas`, over the broker's replicas and logs), the connections to
other brokers (`VirtualPeers`), the picture of the cluster (`Picture`). Requests are served by the product's
handlers.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from millrace.broker.config import BrokerSettings
from millrace.broker.coordination.metadata_cache import MetadataCache, TopicInfo
from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.coordination.session import SessionError
from millrace.broker.errors import (
    NetworkException,
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    UnknownTopicOrPartition,
)
from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.protocol import frames
from millrace.broker.protocol.system_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from millrace.broker.replication.hosting import LeadershipListeners
from millrace.broker.replication.local_partition import Appended
from millrace.broker.replication.partition import Replica
from millrace.broker.server.handlers import add_partitions_to_txn, produce, write_txn_markers
from millrace.broker.server.internal_topics import CoordinatorLoader, InternalTopicLog
from millrace.broker.server.transaction_parts import build_transactions
from millrace.broker.telemetry.metrics import BrokerMetrics
from tests.simulation.cluster.connections import call
from tests.simulation.cluster.disk import VirtualLog
from tests.simulation.cluster.zookeeper import Make, Set, VirtualZooKeeper

if TYPE_CHECKING:
    from tests.simulation.cluster.broker import Broker

ACKS_ALL = -1
CLIENT, INTERNAL = "client", "internal"
DATA_TOPIC = "t"
PRODUCER_IDS = "/producer_ids"
PEER_TIMEOUT_MS = 700
WRITE_TIMEOUT_MS = 600
EPOCH_MS = 1_700_000_000_000
"""The time of day when a history begins: far from what the steady clock says."""
MARKERS_VERSION, VERIFY_VERSION = 1, 4

GROUPS = GroupConfig(
    initial_rebalance_delay_ms=30, min_session_timeout_ms=100, offsets_retention_check_interval_ms=2**40
)


@dataclass(frozen=True, slots=True)
class Topics:
    """The partitions of the data topic come first, then those of the coordinators' topics (0: none)."""

    data: int
    transactions: int = 0
    offsets: int = 0
    are_groups_on: bool = True

    @property
    def are_coordinated(self) -> bool:
        return self.transactions + self.offsets > 0

    @property
    def numbers(self) -> range:
        return range(self.data + self.transactions + self.offsets)

    def numbers_of(self, topic: str) -> range:
        """Raises KeyError."""
        first, count = {
            DATA_TOPIC: (0, self.data),
            TRANSACTIONS_TOPIC: (self.data, self.transactions),
            OFFSETS_TOPIC: (self.data + self.transactions, self.offsets),
        }[topic]
        return range(first, first + count)

    def place_of(self, number: int) -> tuple[str, int]:
        for topic in (DATA_TOPIC, TRANSACTIONS_TOPIC, OFFSETS_TOPIC):
            numbers = self.numbers_of(topic)
            if number in numbers:
                return topic, number - numbers[0]
        raise KeyError(number)


class LocalReplica(NamedTuple):
    """As much of `LocalPartition` as its users above replication look at."""

    replica: Replica
    log: VirtualLog


class VirtualSlowAppends:
    """No batch is large here."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def check(self, batches: Sequence[Any], _budget: object) -> list[None]:
        """What is in batches is not looked at here; that takes its time all the same."""
        await asyncio.sleep(self._broker.world.rng.choice((0, 2)) / 1000)
        return [None] * len(batches)

    def is_under_way(self, _key: tuple[str, int]) -> bool:
        return False

    async def settled(self, _key: tuple[str, int]) -> None:
        pass


class VirtualReplicas:
    """The replica manager of one life of a broker, as coordinators and handlers know it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.listeners = LeadershipListeners()
        self.slow_appends = VirtualSlowAppends(broker)

    def _number(self, topic: str, partition: int) -> int:
        numbers = self._broker.rules.topics.numbers_of(topic)
        if not 0 <= partition < len(numbers):
            raise UnknownTopicOrPartition(f"{topic}-{partition}")
        return numbers[partition]

    def leader_of(self, topic: str, partition: int) -> LocalReplica:
        number = self._number(topic, partition)
        replica = self._broker.replicas[number]
        replica.check_leader()
        return LocalReplica(replica, self._broker.logs[number])

    def append_now(
        self, topic: str, partition: int, batch: memoryview, acks: int, origin: str = CLIENT, **_: object
    ) -> tuple[Appended, asyncio.Future[None] | None]:
        broker, number = self._broker, self._number(topic, partition)
        local = self.leader_of(topic, partition)
        replica, log = local.replica, local.log
        if acks == ACKS_ALL and not replica.has_enough_in_sync:
            raise NotEnoughReplicas(f"{len(replica.isr)} in-sync replicas")
        written = log.append_batch(replica.leader_epoch, bytes(batch), broker.world.now_ms, origin)
        base, last = written.base_offset, written.last_offset
        appended = Appended(base, last, -1, log.start_offset, written.duplicate)
        broker.advance(number)
        if acks != ACKS_ALL:
            return appended, None
        records = [log.get(offset) for offset in range(base, last + 1)]

        def acknowledge(done: asyncio.Future[None] | None) -> None:
            failure = None if done is None or done.cancelled() else done.exception()
            if failure is None or (
                # What a coordinator is told so is committed all the same: its memory follows it.
                origin == INTERNAL and isinstance(failure, NotEnoughReplicasAfterAppend)
            ):
                payloads = [record.payload for record in records if record is not None]
                broker.truth.acknowledge(number, base, payloads)

        if replica.high_watermark > last:
            acknowledge(None)
            return appended, None
        if broker.rules.only_flushed:
            broker.later(broker.world.rng.randint(1, 10), broker.flush, number)
        wait = broker.waiting_appends[number].wait_for(last + 1, until_certain=origin == INTERNAL)
        wait.add_done_callback(acknowledge)
        return appended, wait

    async def read_all(self, topic: str, partition: int) -> AsyncIterator[memoryview]:
        """What the log has now; the disk takes its time."""
        batches = self.leader_of(topic, partition).log.batches()
        rng = self._broker.world.rng
        await asyncio.sleep(rng.choice((0, 2, 40)) / 1000)
        for batch in batches:
            yield memoryview(batch)
        await asyncio.sleep(rng.choice((0, 2, 40)) / 1000)


class _Partitions(Mapping[int, PartitionInfo]):
    """A topic's partitions as the broker knows them at the moment of asking."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._broker, self._numbers = broker, broker.rules.topics.numbers_of(topic)

    def __getitem__(self, partition: int) -> PartitionInfo:
        if not 0 <= partition < len(self._numbers):
            raise KeyError(partition)
        return self._broker.assignment.info(self._numbers[partition])

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._numbers)))

    def __len__(self) -> int:
        return len(self._numbers)


class Picture(MetadataCache):
    """The metadata cache, true to what the broker has heard so far."""

    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self.brokers = broker.brokers  # type: ignore[assignment]  # only asked who is in it
        self.topics = {
            topic: TopicInfo(topic, uuid.UUID(int=number), _Partitions(broker, topic))
            for number, topic in enumerate((DATA_TOPIC, TRANSACTIONS_TOPIC, OFFSETS_TOPIC), 1)
        }


class _PeerConnection(NamedTuple):
    """A connection to another broker, for one purpose."""

    broker: Broker
    peer: Broker
    purpose: str

    async def call(self, request: Any, timeout_ms: float) -> Any:
        def serve() -> Any:
            assert self.peer.coordinators is not None
            return self.peer.coordinators.serve_peer(request)

        timeout_ms = min(timeout_ms, PEER_TIMEOUT_MS)
        return await call(
            self.broker.network, self.broker, self.peer, self.purpose, serve, timeout_ms=timeout_ms
        )


class VirtualPeers:
    """The connections to the other brokers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def get(self, broker_id: int, purpose: str) -> _PeerConnection:
        if broker_id not in self._broker.brokers:
            raise NetworkException(f"broker {broker_id} is not registered")
        return _PeerConnection(self._broker, self._broker.peers[broker_id], purpose)


class Coordinators:
    """The parts of one life of a broker that are above replication, joined together as in the product."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        topics = broker.rules.topics
        self.replicas: Any = VirtualReplicas(broker)
        self.picture = Picture(broker)
        ids = itertools.count(1)
        self.groups = GroupCoordinator(
            GROUPS,
            InternalTopicLog(OFFSETS_TOPIC, self.replicas, self.picture, topics.offsets),
            clock_ms=self._now_ms,
            steady_ms=self._steady_ms,
            new_id=lambda: f"{broker.id}.{broker.life}.{next(ids)}",
            commit_timeout_ms=WRITE_TIMEOUT_MS,
        )
        self._group_loader = CoordinatorLoader(OFFSETS_TOPIC, "groups", self.groups.load, self.groups.unload)
        self.replicas.listeners.gained.append(self._group_loader.gained)
        self.replicas.listeners.lost.append(self._group_loader.lost)
        settings = BrokerSettings(
            transaction_abort_timed_out_transaction_cleanup_interval_ms=150,
            transaction_state_log_num_partitions=max(topics.transactions, 1),
        )
        parts = build_transactions(
            broker.id,
            settings,
            replica_manager=self.replicas,
            cache=self.picture,
            groups=self.groups,
            peers=VirtualPeers(broker),  # type: ignore[arg-type]
            take_producer_id=self.take_producer_id,
            clock_ms=self._now_ms,
        )
        parts.coordinator.config = replace(parts.coordinator.config, write_timeout_ms=WRITE_TIMEOUT_MS)
        self.transactions = parts.coordinator
        self._services = SimpleNamespace(
            clock=SimpleNamespace(now_ms=self._now_ms, steady_ms=self._steady_ms),
            groups=self.groups,
            marker_writer=parts.marker_writer,
            metadata_cache=self.picture,
            metrics=BrokerMetrics(),
            producer_ids=SimpleNamespace(take=self.take_producer_id),
            quotas=SimpleNamespace(produce=SimpleNamespace(active=False)),
            config=SimpleNamespace(settings=BrokerSettings()),
            replica_manager=self.replicas,
            transaction_gate=parts.gate,
            transactional_appends=parts.appends,
            transactions=parts.coordinator,
        )
        if topics.offsets:
            broker.spawn(self.groups.run())
        if topics.transactions:
            broker.spawn(parts.coordinator.run())

    def _now_ms(self) -> int:
        """The time of day as this broker's machine has it."""
        return EPOCH_MS + self._broker.world.now_ms + self._broker.clock_shift_ms

    def _steady_ms(self) -> int:
        return self._broker.world.now_ms

    # -- leadership ----------------------------------------------------------------------------------

    def gained(self, number: int) -> None:
        for listener in self.replicas.listeners.gained:
            listener(*self._broker.rules.topics.place_of(number))

    def lost(self, number: int) -> None:
        for listener in self.replicas.listeners.lost:
            listener(*self._broker.rules.topics.place_of(number))

    def unload(self) -> None:
        """An orderly end: whoever waits is told."""
        for number in self._broker.rules.topics.numbers:
            self.lost(number)

    # -- requests ------------------------------------------------------------------------------------

    def _context(self, head: Any) -> Any:
        return SimpleNamespace(head=head, broker=self._services, client_address="client")

    async def serve(self, handler: ModuleType, version: int, request: Any) -> Any:
        """A request in the shape of its message; the answer in the shape of its own."""
        return await handler.handle(
            request, self._context(SimpleNamespace(api_key=handler.API, version=version))
        )

    def serve_peer(self, request: Any) -> Any:
        if type(request).__name__ == "WriteTxnMarkersRequest":
            return self.serve(write_txn_markers, MARKERS_VERSION, request)
        return self.serve(add_partitions_to_txn, VERIFY_VERSION, request)

    async def serve_produce(self, frame: bytes) -> bytes:
        """A produce request as it comes over the wire, without its size."""
        received = memoryview(bytearray(frame))
        head, position = frames.decode_request(received)
        answer: Any = produce.handle_frame(head, received, position, self._context(head))
        return await answer if asyncio.isfuture(answer) else answer

    # -- producer ids --------------------------------------------------------------------------------

    async def take_producer_id(self) -> int:
        """An id that nobody has had, from ZooKeeper. Raises SessionError."""
        taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def take(zookeeper: VirtualZooKeeper) -> int:
            node = zookeeper.read(PRODUCER_IDS)
            value, version, _ = node or (0, -1, 0)
            zookeeper.commit(
                [Make(PRODUCER_IDS, 1) if node is None else Set(PRODUCER_IDS, value + 1, version)]
            )
            return value + 1

        self._broker.ask(take, lambda result: None if taken.done() else taken.set_result(result))
        try:
            return await asyncio.wait_for(taken, PEER_TIMEOUT_MS / 1000)
        except TimeoutError:
            raise SessionError("ZooKeeper does not answer") from None
