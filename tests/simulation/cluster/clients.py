"""Producers and consumers of the virtual cluster. They learn of leaders from any broker, late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.simulation.cluster.broker import ACKS_ALL, Broker, Refusal
from tests.simulation.cluster.loop import LoopProcess
from tests.simulation.cluster.truth import Truth
from tests.simulation.cluster.world import Network, World


class Client(LoopProcess):
    """Knows the brokers, and asks one of them who leads."""

    def __init__(self, world: World, name: str, network: Network, brokers: Mapping[int, Broker]) -> None:
        super().__init__(world, name)
        self.live()
        self.network, self.brokers = network, brokers

    def leader_of(self, partition: int) -> Broker | None:
        """As some living broker believes."""
        asked = self.world.rng.choice(list(self.brokers.values()))
        known = asked.states.get(partition) if asked.is_alive else None
        return self.brokers.get(known[0].leader) if known is not None else None


class Producer(Client):
    """Sends records that nobody else sends, with acks=all or 1, and never the same one twice."""

    def __init__(
        self, world: World, name: str, network: Network, brokers: Mapping[int, Broker], partitions: int
    ) -> None:
        super().__init__(world, name, network, brokers)
        self._partitions = partitions
        self._sent = 0
        self.is_stopped = False
        self.later(world.rng.randint(1, 50), self._send)

    def _send(self) -> None:
        if self.is_stopped:
            return
        rng = self.world.rng
        partition = rng.randrange(self._partitions)
        leader = self.leader_of(partition)
        if leader is not None:
            payloads: list[object] = []
            for _ in range(rng.randint(1, 3)):
                self._sent += 1
                payloads.append((self.name, self._sent))
            acks = ACKS_ALL if rng.random() < 0.8 else 1
            self.network.send(self.name, leader, leader.produce, partition, payloads, acks, lambda _: None)
        self.later(rng.randint(3, 40), self._send)


class Consumer(Client):
    """Reads every partition from its start, up to the high watermark."""

    def __init__(
        self,
        world: World,
        name: str,
        network: Network,
        brokers: Mapping[int, Broker],
        partitions: int,
        truth: Truth,
    ) -> None:
        super().__init__(world, name, network, brokers)
        self._truth = truth
        self._offsets = dict.fromkeys(range(partitions), 0)
        self.later(world.rng.randint(1, 50), self._ask)

    def _ask(self) -> None:
        for partition, offset in self._offsets.items():
            leader = self.leader_of(partition)
            if leader is not None:
                self.network.send(self.name, leader, self._consume_at, leader, partition, offset)
        self.later(self.world.rng.randint(10, 60), self._ask)

    def _consume_at(self, leader: Broker, partition: int, offset: int) -> None:
        """Runs in the leader; what it shows is checked there and then, whether or not it arrives here."""

        def answer(result: Any) -> None:
            if isinstance(result, Refusal):
                return
            start, records = result
            self._truth.consumed(partition, start, records)
            self.network.send(leader.name, self, self._took, partition, start, len(records))

        leader.consume(partition, offset, answer)

    def _took(self, partition: int, start: int, count: int) -> None:
        self._offsets[partition] = start + count
