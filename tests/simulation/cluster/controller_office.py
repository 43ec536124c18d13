"""The office of controller, as every broker of the simulation may come to hold it.

What is decided is the product's (`controller.decide`). Here is what its shell does: standing for election,
looking again when something has changed, writing decisions behind a check of the controller's epoch, giving
up the office when that check fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.broker.coordination.controller import (
    ClusterPicture,
    WriteState,
    decide,
)
from millrace.broker.coordination.partition_info import PartitionInfo
from tests.simulation.cluster.zookeeper import Check, Make, Refused, Set, VirtualZooKeeper

if TYPE_CHECKING:
    from tests.simulation.cluster.broker import Broker

CONTROLLER, CONTROLLER_EPOCH, STATES = "/controller", "/controller_epoch", "/state/"


class ControllerOffice:
    """One broker's way into the office and out of it; all of it is forgotten with the session."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.forget()

    def forget(self) -> None:
        """The session is over, or the process: whoever held the office holds it no more."""
        self._held: tuple[int, int] | None = None
        self._is_deciding = self._is_standing = False

    def wake(self) -> None:
        broker = self._broker
        if broker.is_registered and not self._is_deciding:
            self._is_deciding = True
            broker.later(broker.world.rng.randint(2, 20), self._work)

    def _work(self) -> None:
        broker = self._broker
        self._is_deciding = False
        if not broker.is_registered or broker.is_suspended:
            if broker.is_registered:
                broker.later(100, self.wake)
            return
        if self._held is None:
            if broker.controller is None and not self._is_standing:
                self._is_standing = True
                broker.ask(self._stand_for_election, self._elected)
            return
        epoch, epoch_version = self._held
        picture = ClusterPicture(
            live_brokers=frozenset(broker.brokers),
            topics={"t": {number: self._picture_of(number) for number in broker.rules.replicas}},
            offline={
                each: frozenset(("t", number) for number in numbers)
                for each, numbers in broker.offline.items()
            },
        )
        for decision in decide(picture, epoch):
            if isinstance(decision, WriteState):
                self._write_state(decision, epoch_version)

    def _picture_of(self, number: int) -> PartitionInfo:
        replicas = self._broker.rules.replicas[number]
        known = self._broker.states.get(number)
        return PartitionInfo(replicas, None) if known is None else PartitionInfo(replicas, *known)

    def _stand_for_election(self, zookeeper: VirtualZooKeeper) -> tuple[int, int]:
        node = zookeeper.read(CONTROLLER_EPOCH)
        if node is None:
            zookeeper.commit([Make(CONTROLLER_EPOCH, 0)])
            node = zookeeper.read(CONTROLLER_EPOCH)
        assert node is not None
        epoch, version = node[0] + 1, node[1]
        zookeeper.commit(
            [Set(CONTROLLER_EPOCH, epoch, version), Make(CONTROLLER, self._broker.id, ephemeral=True)]
        )
        self._broker.truth.controller_elected(epoch)
        return epoch, version + 1

    def _elected(self, result: Any) -> None:
        broker = self._broker
        self._is_standing = False
        if isinstance(result, Refused):
            broker.later(100, self.wake)
            return
        self._held = result
        broker.world.note(f"{broker.name} is the controller, epoch {result[0]}")
        self.wake()

    def _write_state(self, decision: WriteState, epoch_version: int) -> None:
        path = f"{STATES}{decision.partition}"
        operations: list[Any] = self._fence(epoch_version)
        if decision.version < 0:
            operations.append(Make(path, decision.state))
        else:
            operations.append(Set(path, decision.state, decision.version))

        def write(zookeeper: VirtualZooKeeper) -> None:
            zookeeper.commit(operations)
            self._broker.truth.controller_wrote(self._broker.id, decision.state.controller_epoch)

        def answered(result: Any) -> None:
            if isinstance(result, Refused):
                self._broker.ask(lambda zookeeper: zookeeper.read(CONTROLLER_EPOCH), self._check_office)

        self._broker.ask(write, answered)

    def _fence(self, epoch_version: int) -> list[Any]:
        """What every write of a controller begins with."""
        return [Check(CONTROLLER_EPOCH, epoch_version)]

    def _check_office(self, found: Any) -> None:
        broker = self._broker
        if self._held is not None and found[1] != self._held[1]:
            broker.world.note(f"{broker.name} is no longer the controller")
            self._held = None
        for number in broker.logs:
            broker.on_watch(f"{STATES}{number}")
        broker.later(100, self.wake)
