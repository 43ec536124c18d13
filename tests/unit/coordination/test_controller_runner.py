"""The controller's office over a ZooKeeper that loses answers, connections, and itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from millrace.broker.coordination import paths
from millrace.broker.coordination.broker_registry import deregister
from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.coordination.metadata_cache import NO_CONTROLLER, MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.coordination.session import (
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    Operation,
    SessionError,
    SessionState,
    SetData,
    VersionConflict,
)
from millrace.broker.replication.partition import PartitionState
from tests.waiting import patience, source_of, until_async

OWN_ID = 1
OWN_SESSION, OTHER_SESSION = 77, 78
STATE = paths.state_path("t", 0)


class Keeper:
    """One session, and the few znodes it sees. `loses` has the names of calls whose next answer is lost with
    the connection, after they were carried out; `is_silent` answers nothing any more; `before_delete` happens
    before something is deleted."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.state = SessionState.CONNECTED
        self.id = OWN_SESSION
        self.session_timeout_ms = 100
        self.loses: list[str] = []
        self.is_silent = False
        self.before_delete: Callable[[], None] = lambda: None
        self.asked: list[str] = []
        self._listeners: list[Callable[[SessionState], None]] = []

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append(listener)

    def turn(self, state: SessionState) -> None:
        """What the client library has found out about its connection."""
        self.state = state
        for listener in self._listeners:
            listener(state)

    def put(self, path: str, data: bytes, version: int = 0, owner: int = 0) -> None:
        self.nodes[path] = Node(data, version, owner, 1)

    async def _answer(self, name: str) -> None:
        self.asked.append(name)
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        if name in self.loses:
            self.loses.remove(name)
            raise SessionError("ConnectionLoss")

    async def get(self, path: str, _watch: object = None) -> Node:
        await self._answer("get")
        if path not in self.nodes:
            raise NodeMissing(path)
        return self.nodes[path]

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        if path in self.nodes:
            raise NodeExists(path)
        self.put(path, data, owner=self.id if ephemeral else 0)
        await self._answer("create")

    async def delete(self, path: str, _version: int = -1) -> None:
        self.before_delete()
        if not self.is_silent:
            if path not in self.nodes:
                raise NodeMissing(path)
            del self.nodes[path]
        await self._answer("delete")

    async def commit(self, operations: Sequence[Operation]) -> None:
        if any(isinstance(operation, Delete) for operation in operations):
            self.before_delete()
        for operation in operations:
            match operation:
                case Create(path) if path in self.nodes:
                    raise NodeExists(path)
                case SetData(path, _, version) | Check(path, version) if self.nodes[path].version != version:
                    raise VersionConflict(path)
        for operation in operations:
            match operation:
                case Create(path, data, ephemeral):
                    self.put(path, data, owner=self.id if ephemeral else 0)
                case SetData(path, data, version):
                    self.put(path, data, version + 1)
                case Delete(path):
                    del self.nodes[path]
        await self._answer("commit")


class Office:
    """A controller over `keeper`. `look` is what the watcher does: it shows who holds the office."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.cache = MetadataCache()
        session: Any = keeper
        self.runner = ControllerRunner(session, self.cache, OWN_ID, lambda: 0)
        self.look()

    def look(self) -> None:
        node = self.keeper.nodes.get(paths.CONTROLLER)
        self.cache.controller_id = NO_CONTROLLER if node is None else paths.decode_controller(node.data)
        self.runner.wake()

    def lose_leader(self) -> None:
        """Partition 0 of topic "t", whose leader is gone while this broker is in sync."""
        self.cache.set_broker(BrokerRegistration(OWN_ID, "h", 9092, None))
        self.cache.set_assignment("t", TopicAssignment(uuid4(), {0: (2, OWN_ID)}))
        state = PartitionState(2, 4, (2, OWN_ID), 1)
        self.keeper.put(STATE, paths.encode_state(state), version=6)
        self.cache.set_state("t", 0, state, 6)
        self.runner.wake()

    def leader(self) -> int:
        return paths.decode_state(self.keeper.nodes[STATE].data).leader

    async def until(self, condition: Callable[[], bool], *, looks: bool = True) -> None:
        def holds() -> bool:
            if looks:
                self.look()
            return condition()

        await until_async(holds, lambda: source_of(condition))

    async def stays_quiet(self) -> None:
        """Asks ZooKeeper nothing, however often it is woken."""
        asked = len(self.keeper.asked)
        for _ in range(50):
            self.look()
            await asyncio.sleep(0)
        assert self.keeper.asked[asked:] == []


def test_an_election_whose_answer_is_lost_does_not_leave_the_office_empty() -> None:
    async def run() -> None:
        keeper = Keeper()
        keeper.loses = ["commit"]
        office = Office(keeper)
        office.runner.start()
        await office.until(lambda: office.runner.in_office)
        assert keeper.nodes[paths.CONTROLLER].owner == OWN_SESSION
        assert int(keeper.nodes[paths.CONTROLLER_EPOCH].data) == office.runner.epoch
        await office.runner.stop()

    asyncio.run(run())


def test_an_office_that_its_own_broker_does_not_know_of_is_given_back() -> None:
    keeper = Keeper()
    keeper.put(paths.CONTROLLER_EPOCH, b"1")
    keeper.put(paths.CONTROLLER, paths.encode_controller(OWN_ID, 0), owner=OWN_SESSION)
    office = Office(keeper)
    office.runner._may_be_elected = True
    asyncio.run(office.runner._stand_for_election())
    assert paths.CONTROLLER not in keeper.nodes and not office.runner.in_office


def test_an_election_that_is_undone_takes_no_office_from_another() -> None:
    """Between the look at who holds the office and its removal another broker is elected."""

    async def run() -> None:
        keeper = Keeper()
        keeper.loses = ["commit"]
        office = Office(keeper)

        def another_is_elected() -> None:
            epoch = keeper.nodes[paths.CONTROLLER_EPOCH]
            keeper.put(paths.CONTROLLER_EPOCH, b"9", epoch.version + 1)
            keeper.put(paths.CONTROLLER, paths.encode_controller(2, 0), owner=OTHER_SESSION)
            keeper.before_delete = lambda: None

        keeper.before_delete = another_is_elected
        office.runner.start()
        await office.until(lambda: keeper.nodes.get(paths.CONTROLLER_EPOCH, Node(b"", 0, 0, 1)).data == b"9")
        await office.until(lambda: office.cache.controller_id != OWN_ID)
        for _ in range(20):
            office.look()
            await asyncio.sleep(0)
        assert keeper.nodes[paths.CONTROLLER].owner == OTHER_SESSION and not office.runner.in_office
        await office.runner.stop()

    asyncio.run(run())


def test_the_office_of_ones_own_earlier_life_is_left_to_its_session() -> None:
    async def run() -> None:
        keeper = Keeper()
        keeper.loses = ["commit"]
        office = Office(keeper)
        office.runner.start()
        await office.until(lambda: not keeper.loses)
        keeper.put(paths.CONTROLLER, paths.encode_controller(OWN_ID, 0), owner=OTHER_SESSION)
        asked = len(keeper.asked)
        await office.until(lambda: len(keeper.asked) > asked)
        for _ in range(20):
            office.look()
            await asyncio.sleep(0)
        assert paths.CONTROLLER in keeper.nodes and not office.runner.in_office
        del keeper.nodes[paths.CONTROLLER]
        await office.until(lambda: office.runner.in_office)
        await office.runner.stop()

    asyncio.run(run())


def test_a_connection_that_is_lost_while_the_office_is_looked_after_ends_no_controller() -> None:
    async def run() -> None:
        keeper = Keeper()
        office = Office(keeper)
        task = office.runner.start()
        await office.until(lambda: office.runner.in_office)

        async def carry_out() -> None:
            keeper.loses = ["get"]
            office.runner._carry_out = unhindered  # type: ignore[method-assign]
            raise VersionConflict("another state was written")

        unhindered = office.runner._carry_out
        office.runner._carry_out = carry_out  # type: ignore[method-assign]
        await office.until(lambda: task.done() or (not keeper.loses and keeper.asked.count("get") > 2))
        assert not task.done() and office.runner.in_office
        await office.runner.stop()

    asyncio.run(run())


def test_who_stops_does_not_wait_for_a_zookeeper_that_is_gone() -> None:
    async def run() -> None:
        keeper = Keeper()
        office = Office(keeper)
        office.runner.start()
        await office.until(lambda: office.runner.in_office)
        keeper.put(paths.broker_path(OWN_ID), b"", owner=OWN_SESSION)
        keeper.is_silent = True
        session: Any = keeper
        async with asyncio.timeout(patience()):
            await office.runner.stop()
            await deregister(session, OWN_ID)

    asyncio.run(run())


def test_a_suspended_controller_decides_nothing_until_its_session_goes_on() -> None:
    async def run() -> None:
        office = Office(Keeper())
        office.runner.start()
        await office.until(lambda: office.runner.in_office)
        office.keeper.turn(SessionState.SUSPENDED)
        office.lose_leader()
        await office.stays_quiet()
        assert office.runner.in_office and office.leader() == 2
        office.keeper.turn(SessionState.CONNECTED)
        # The connection alone wakes it: the watcher may have nothing new to tell.
        await office.until(lambda: office.leader() == OWN_ID, looks=False)
        await office.runner.stop()

    asyncio.run(run())


def test_a_controller_whose_session_is_lost_decides_nothing_before_it_is_elected_again() -> None:
    async def run() -> None:
        office = Office(Keeper())
        office.runner.start()
        await office.until(lambda: office.runner.in_office)
        office.keeper.turn(SessionState.LOST)
        assert not office.runner.in_office
        office.lose_leader()
        await office.stays_quiet()
        office.keeper.nodes[paths.CONTROLLER] = Node(paths.encode_controller(2, 0), 0, OTHER_SESSION, 1)
        office.look()
        office.keeper.turn(SessionState.CONNECTED)
        await office.stays_quiet()
        assert office.leader() == 2 and not office.runner.in_office
        del office.keeper.nodes[paths.CONTROLLER]
        await office.until(lambda: office.leader() == OWN_ID)
        assert office.runner.epoch == 2
        await office.runner.stop()

    asyncio.run(run())


def test_who_is_suspended_does_not_stand_for_election() -> None:
    async def run() -> None:
        office = Office(Keeper())
        office.keeper.turn(SessionState.SUSPENDED)
        office.runner.start()
        await office.stays_quiet()
        assert not office.runner.in_office and paths.CONTROLLER not in office.keeper.nodes
        office.keeper.turn(SessionState.CONNECTED)
        await office.until(lambda: office.runner.in_office, looks=False)
        await office.runner.stop()

    asyncio.run(run())
