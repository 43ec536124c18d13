"""The office of controller, as every broker of the simulation may come to hold it.

What is decided is the product's (`controller.decide`). Here is what its shell does: standing for election,
looking again when something has changed, writing decisions behind a check of the controller's epoch, giving
up the office when that check fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from millrace.broker.coordination.controller import (
    ClearRequest,
    ClusterPicture,
    CompleteMoves,
    WriteState,
    decide,
)
from tests.simulation.cluster.assignment import ASSIGNMENT, ELECTION, STATES, Assigned
from tests.simulation.cluster.zookeeper import Check, Make, Refused, Remove, Set, VirtualZooKeeper

if TYPE_CHECKING:
    from tests.simulation.cluster.broker import Broker

CONTROLLER, CONTROLLER_EPOCH = "/controller", "/controller_epoch"


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
            topics={"t": {number: broker.assignment.info(number) for number in broker.rules.replicas}},
            leaving=broker.leaving,
            requests=broker.assignment.requests,
            topic_versions={"t": broker.assignment.version},
            offline={
                each: frozenset(("t", number) for number in numbers)
                for each, numbers in broker.offline.items()
            },
        )
        for decision in decide(picture, epoch):
            match decision:
                case WriteState():
                    self._write([self._state(decision)], epoch_version)
                case CompleteMoves():
                    self._complete_moves(decision, epoch_version)
                case ClearRequest():
                    self._write([Check(ELECTION, decision.version), Remove(ELECTION)], epoch_version)

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

    def _state(self, decision: WriteState) -> Any:
        path = f"{STATES}{decision.partition}"
        if decision.version < 0:
            return Make(path, decision.state)
        return Set(path, decision.state, decision.version)

    def _complete_moves(self, decision: CompleteMoves, epoch_version: int) -> None:
        """The replicas and the states together, where no one has written either since."""
        states = [self._state(each) for each in decision.states]

        def assign(zookeeper: VirtualZooKeeper) -> Any:
            known, _, _ = zookeeper.read(ASSIGNMENT) or ({}, -1, -1)
            arrived = {number: Assigned(replicas) for number, replicas in decision.replicas.items()}
            return Set(ASSIGNMENT, known | arrived, decision.version)

        self._broker.world.note(f"{self._broker.name} ends moves: {dict(decision.replicas)}")
        self._write(states, epoch_version, assign)  # the replicas first: who reads the states knows them

    def _write(
        self,
        operations: list[Any],
        epoch_version: int,
        first: Callable[[VirtualZooKeeper], Any] | None = None,
    ) -> None:
        fence = self._fence(epoch_version)
        epoch = self._held[0] if self._held is not None else -1

        def write(zookeeper: VirtualZooKeeper) -> None:
            before = [first(zookeeper)] if first is not None else []
            zookeeper.commit([*fence, *before, *operations])
            self._broker.truth.controller_wrote(self._broker.id, epoch)

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
