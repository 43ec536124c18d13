"""Which brokers keep a partition: as it stands in ZooKeeper, how it is changed, and as one broker knows it.

A history without moves has its replicas from `Rules`, and ZooKeeper is not asked. With moves they stand in
one znode for all partitions, as those of a topic do. What is planned is the product's (`reassignment`), and
so is how a move ends (`controller.arrive`); here is the shell's part: the write, tied to what was read, and
what a broker does with a replica that is not its any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.broker.coordination.controller import PREFERRED, ElectionRequest
from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.coordination.reassignment import PlannedMove, begin_move, cancel_move
from millrace.broker.errors import KafkaError
from tests.simulation.cluster.zookeeper import Check, Make, Set, VirtualZooKeeper

if TYPE_CHECKING:
    from tests.simulation.cluster.broker import Broker

ASSIGNMENT, ELECTION, STATES = "/assignment", "/election", "/state/"


@dataclass(frozen=True, slots=True)
class Assigned:
    """Of one partition, as in a topic's znode."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()


def assigned_now(zookeeper: VirtualZooKeeper, replicas: Mapping[int, tuple[int, ...]]) -> dict[int, Assigned]:
    """All partitions' as they stand now; `replicas` where nothing moves."""
    node = zookeeper.nodes.get(ASSIGNMENT)
    if node is None:
        return {number: Assigned(each) for number, each in replicas.items()}
    return dict(node.value)


class Assignment:
    """What one broker knows of it, and asks for."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.forget()

    def forget(self) -> None:
        rules = self._broker.rules
        self.version = -1
        self._known = {number: Assigned(each) for number, each in rules.replicas.items()}
        self.requests: dict[str, ElectionRequest] = {}

    def replicas(self, number: int) -> tuple[int, ...]:
        return self._known[number].replicas

    def is_here(self, number: int) -> bool:
        return self._broker.id in self.replicas(number)

    def info(self, number: int) -> PartitionInfo:
        """With the state, as far as the broker knows it."""
        known = self._broker.states.get(number)
        state, version = (None, -1) if known is None else known
        return _info(self._known[number], state, version)

    def read(self) -> None:
        if self._broker.rules.has_moves:
            self._broker.ask(lambda zookeeper: zookeeper.read(ASSIGNMENT), self._took)
            self._broker.ask(lambda zookeeper: zookeeper.read(ELECTION), self._took_election)

    def _took(self, found: tuple[Any, int, int] | None) -> None:
        assert found is not None
        value, version, _ = found
        if version > self.version:
            self._known, self.version = dict(value), version
            self._broker.reassigned()

    def _took_election(self, found: tuple[Any, int, int] | None) -> None:
        self.requests = {} if found is None else {PREFERRED: ElectionRequest(found[0], found[1])}
        self._broker.office.wake()

    def ask_for_preferred(self, numbers: frozenset[int]) -> None:
        """Whoever asks while somebody's wish is not done is refused."""
        wished = frozenset(("t", number) for number in numbers)
        self._broker.ask(lambda zookeeper: zookeeper.commit([Make(ELECTION, wished)]), lambda _: None)

    def alter(self, number: int, target: tuple[int, ...] | None) -> None:
        """Begins a move, or (None) calls one off: what is refused changes nothing."""
        broker = self._broker
        alive = frozenset(
            each for each in broker.brokers if number not in broker.offline.get(each, frozenset())
        )

        def work(zookeeper: VirtualZooKeeper) -> str:
            value, version, _ = zookeeper.read(ASSIGNMENT) or ({}, -1, -1)
            found = zookeeper.read(f"{STATES}{number}")
            if found is None:
                return "nobody has led it yet"
            partition = _info(value[number], found[0], found[1])
            try:
                plan = (
                    cancel_move(partition, alive) if target is None else begin_move(partition, target, alive)
                )
            except KafkaError as error:
                return str(error)
            path = f"{STATES}{number}"
            zookeeper.commit(
                [
                    Set(ASSIGNMENT, value | {number: _assigned(plan)}, version),
                    Check(path, found[1]) if plan.state is None else Set(path, plan.state, found[1]),
                ]
            )
            return f"goes to {plan.replicas}, adding {plan.adding}, removing {plan.removing}"

        broker.ask(work, lambda result: broker.world.note(f"{number} is to move to {target}: {result}"))


def _assigned(plan: PlannedMove) -> Assigned:
    return Assigned(plan.replicas, plan.adding, plan.removing)


def _info(assigned: Assigned, state: Any, version: int) -> PartitionInfo:
    return PartitionInfo(assigned.replicas, state, version, assigned.adding, assigned.removing)
