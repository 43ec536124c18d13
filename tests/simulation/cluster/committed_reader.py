"""A consumer of committed data: what each leader shows it is checked where it is shown."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.broker.errors import KafkaError
from tests.simulation.cluster.broker import READ_MOST, Broker
from tests.simulation.cluster.clients import Client
from tests.simulation.cluster.exactly_once import ExactlyOnce
from tests.simulation.cluster.truth import Truth
from tests.simulation.cluster.world import Network, World


class CommittedReader(Client):
    """Reads the first `partitions` partitions from their starts, up to the last stable offset."""

    def __init__(
        self,
        world: World,
        network: Network,
        brokers: Mapping[int, Broker],
        partitions: int,
        truth: Truth,
        promises: ExactlyOnce,
    ) -> None:
        super().__init__(world, "committed-reader", network, brokers)
        self._truth, self._promises = truth, promises
        self.offsets = dict.fromkeys(range(partitions), 0)
        self.later(world.rng.randint(1, 50), self._ask)

    def _ask(self) -> None:
        for partition, offset in self.offsets.items():
            leader = self.leader_of(partition)
            if leader is not None:
                self.network.send(self.name, leader, self._read_at, leader, partition, offset)
        self.later(self.world.rng.randint(10, 80), self._ask)

    def _read_at(self, leader: Broker, partition: int, offset: int) -> None:
        """Runs in the leader."""
        replica, log = leader.replicas[partition], leader.logs[partition]
        try:
            replica.check_leader()
        except KafkaError:
            return
        visible = log.last_stable_offset(replica.high_watermark)
        if not log.start_offset <= offset < visible:
            return
        records = log.read(offset, visible, READ_MOST)
        end = offset + len(records)
        self._truth.consumed(partition, offset, records)
        self._promises.served(partition, offset, records, log.aborted_transactions(offset, end))
        self.network.send(leader.name, self, self._took, partition, end)

    def _took(self, partition: int, end: int) -> None:
        self.offsets[partition] = max(self.offsets[partition], end)
