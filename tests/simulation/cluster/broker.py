"""One broker: what the shells do around the pure rules, as messages over the virtual network.

The decisions are the product's: `Replica` and `follower.decide` for replication, `controller.decide` and
`restarted` for the control plane. Here is only what the shells add: when to ask, whom to tell, what to do
with an answer. A broker keeps its logs and its checkpointed high watermarks through every kind of end. Its
fetches as a follower are in `fetching.py`, what it does for its own followers in `leading.py`, its way into
the controller's office in `controller_office.py`, what it knows of the replicas' places in `assignment.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from millrace.broker.coordination import broker_registry
from millrace.broker.errors import (
    KafkaError,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
)
from millrace.broker.replication.local_partition import WaitingAppends
from millrace.broker.replication.partition import (
    PartitionState,
    Replica,
    Role,
    Transition,
    leads_on,
)
from tests.simulation.cluster.assignment import ASSIGNMENT, ELECTION, Assignment
from tests.simulation.cluster.controller_office import CONTROLLER, STATES, ControllerOffice
from tests.simulation.cluster.coordinators import Coordinators, Topics
from tests.simulation.cluster.disk import VirtualLog
from tests.simulation.cluster.failed_logs import OFFLINE, FailedLogs
from tests.simulation.cluster.fetching import Fetching
from tests.simulation.cluster.leading import READ_MOST, Leading
from tests.simulation.cluster.loop import LoopProcess
from tests.simulation.cluster.truth import Truth
from tests.simulation.cluster.world import Network, World
from tests.simulation.cluster.zookeeper import (
    Make,
    Refused,
    Session,
    Set,
    VirtualZooKeeper,
)

ACKS_ALL = -1
BROKERS = "/ids/"
HAND_OVER_MS = 1_500
"""A broker that leaves waits for the others for so long at most."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What all brokers of one history are set to."""

    replicas: dict[int, tuple[int, ...]]
    """At the beginning."""
    min_insync: int
    max_lag_ms: int
    session_timeout_ms: int
    only_flushed: bool
    topics: Topics
    """What the numbers of the partitions stand for."""
    has_moves: bool = False
    """Replicas move to other brokers, preferred leaders are asked for, and brokers that stop in order hand
    over first."""


class Refusal(NamedTuple):
    """A client's request was not done."""

    error: KafkaError


class Written(NamedTuple):
    offset: int


@dataclass(slots=True)
class _Waiting:
    """An append that waits for the high watermark to pass it."""

    offset: int
    payloads: list[object]
    answer: Callable[[Any], None]


class Broker(LoopProcess):
    """See the module."""

    def __init__(
        self,
        world: World,
        broker_id: int,
        network: Network,
        zookeeper: VirtualZooKeeper,
        rules: Rules,
        truth: Truth,
        logs: dict[int, VirtualLog],
    ) -> None:
        super().__init__(world, f"broker-{broker_id}")
        self.id = broker_id
        self.logs = logs
        self.checkpoints = dict.fromkeys(logs, 0)
        self.peers: dict[int, Broker] = {}
        self.was_clean = False
        self.network, self._zookeeper, self.rules, self.truth = network, zookeeper, rules, truth
        self.fetching = Fetching(self)
        self.leading = Leading(self)
        self.office = ControllerOffice(self)
        self.assignment = Assignment(self)
        self.failed = FailedLogs(self)
        self._forget()

    def _forget(self) -> None:
        """All that is only in memory."""
        self.replicas: dict[int, Replica] = {}
        self.states: dict[int, tuple[PartitionState, int]] = {}
        self.brokers: dict[int, int] = {}
        self.leaving: frozenset[int] = frozenset()
        self.staying: dict[int, int] = {}
        """The brokers without those that leave: these are taken into no in-sync set."""
        self.is_leaving = False
        self.offline: dict[int, frozenset[int]] = {}
        self.controller: int | None = None
        self._waiting: dict[int, list[_Waiting]] = {number: [] for number in self.logs}
        self.waiting_appends = {number: WaitingAppends() for number in self.logs}
        self.coordinators: Coordinators | None = None
        self.fetching.forget()
        self.office.forget()
        self.assignment.forget()
        self.session: Session | None = None
        self._last_pong_ms = 0
        self.clock_shift_ms = 0
        """How far somebody has set this machine's clock; the steady one knows nothing of it."""
        self._is_joined = self.is_registered = False

    def is_uninterrupted(self, number: int) -> bool:
        """Whether what it had of the partition, in memory and in the page cache, when it joined the cluster
        is there still."""
        return not self.logs[number].is_offline and (self._is_joined if self.is_alive else self.was_clean)

    # -- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self.live()
        self._forget()
        self.world.note(f"{self.name} starts")
        for number in self.logs:
            replica = self._new_replica()
            replica.high_watermark = min(self.checkpoints[number], self.logs[number].end_offset)
            self.replicas[number] = replica
            self.logs[number].epochs.reload()
            self.logs[number].recover(self.world.now_ms)
        if self.rules.topics.are_coordinated:
            self.loop.run(self._start_coordinators)
        self._connect()
        self.later(self.rules.session_timeout_ms / 3, self._ping)
        self.later(self.rules.max_lag_ms / 2, self.leading.check_in_sync_sets)
        self.later(self.world.rng.randint(50, 400), self._housekeep)

    def _new_replica(self) -> Replica:
        replica = Replica(self.id)
        replica.max_lag_ms = self.rules.max_lag_ms
        replica.min_insync_replicas = self.rules.min_insync
        replica.registered = self.staying
        return replica

    def _start_coordinators(self) -> None:
        self.coordinators = Coordinators(self)

    def crash(self, *, power: bool) -> None:
        """The process is gone; with `power`, also what was not flushed."""
        self.world.note(f"{self.name} {'loses power' if power else 'is killed'}")
        self.was_clean = False
        if self.session is not None:
            self.session.close()
        self.end()
        for log in self.logs.values():
            if power:
                log.lose_power(self.world.rng.randint(log.flushed, log.end_offset))
            else:
                log.lose_pages()
        self.truth.interrupted()

    def leave(self, then: Callable[[], None]) -> None:
        """A controlled shutdown (`controlled_shutdown`): the others take over what they can, then an orderly
        end, and what the caller wants to happen `then`."""
        self.world.note(f"{self.name} leaves")
        self.is_leaving = True
        path = f"{BROKERS}{self.id}"

        def mark(zookeeper: VirtualZooKeeper) -> None:
            node = zookeeper.nodes.get(path)
            if node is not None and node.owner == zookeeper.acting:
                zookeeper.commit([Set(path, (self.id, True), node.version)])

        self.ask(mark, lambda _: None)
        self._leave_when_handed_over(self.world.now_ms + HAND_OVER_MS, then)

    def _leave_when_handed_over(self, deadline_ms: int, then: Callable[[], None]) -> None:
        if self._holds_anything() and self.world.now_ms < deadline_ms:
            self.later(20, self._leave_when_handed_over, deadline_ms, then)
        else:
            self.shut_down()
            then()

    def _holds_anything(self) -> bool:
        """As `controlled_shutdown.still_held`."""
        others = set(self.brokers) - self.leaving - {self.id}
        return any(
            self.id in state.isr
            and any(
                each in others
                and each in self.assignment.replicas(number)
                and number not in self.offline.get(each, frozenset())
                for each in state.isr
            )
            for number, (state, _) in self.states.items()
        )

    def shut_down(self) -> None:
        """An orderly end: everything is flushed and the id given back. (Leaders are not moved first.)"""
        self.world.note(f"{self.name} stops")
        flushed = [self.failed.flush(number) for number in self.logs]
        # One that has not left the in-sync sets yet says nothing better of the end before.
        self.was_clean = all(flushed) and (self._is_joined or self.was_clean)
        for number in self.logs:
            self.checkpoints[number] = self.replicas[number].high_watermark
        if self.coordinators is not None:
            self.loop.run(self.coordinators.unload)
        if self.session is not None:
            self.session.leave()
        self.end()
        if not self.was_clean:
            for log in self.logs.values():
                log.lose_pages()
            self.truth.interrupted()

    # -- the session ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        self.session = self._zookeeper.connect(self, self.on_watch, self._on_expired, self._on_pong)
        self._last_pong_ms = self.world.now_ms
        self._read_everything(self._on_first_picture)

    def _ping(self) -> None:
        if self.session is not None:
            self.session.ping()
        self.later(self.rules.session_timeout_ms / 3, self._ping)

    def _on_pong(self) -> None:
        was_suspended = self.is_suspended
        self._last_pong_ms = self.world.now_ms
        if was_suspended and self._is_joined:
            self._read_everything(lambda: None)

    @property
    def is_suspended(self) -> bool:
        return self.world.now_ms - self._last_pong_ms > self.rules.session_timeout_ms * 2 / 3

    def _on_expired(self) -> None:
        session = self.session
        if session is None or not session.is_over:
            return
        self.world.note(f"{self.name} learns that its session is lost")
        session.close()
        self.office.forget()
        self.is_registered = False
        self.brokers.pop(self.id, None)
        self.staying.pop(self.id, None)
        self._connect()

    def ask(self, work: Callable[[VirtualZooKeeper], Any], answer: Callable[[Any], None]) -> None:
        """A request whose answer counts only within the same session."""
        session = self.session
        if session is None:
            return

        def answered(result: Any) -> None:
            if self.session is session:
                answer(result)

        session.ask(work, answered)

    # -- the picture of the cluster ------------------------------------------------------------------

    def _read_everything(self, then: Callable[[], None]) -> None:
        for number in self.logs:
            self.on_watch(f"{STATES}{number}")
        self.on_watch(CONTROLLER)
        self.on_watch(OFFLINE)
        self.assignment.read()
        self.ask(lambda zookeeper: zookeeper.below(BROKERS), lambda found: self._took_brokers(found, then))

    def on_watch(self, path: str) -> None:
        if path.startswith(STATES):
            number = int(path.removeprefix(STATES))
            self.ask(lambda zookeeper: zookeeper.read(path), lambda found: self._took_state(number, found))
        elif path.startswith(BROKERS):
            self.ask(
                lambda zookeeper: zookeeper.below(BROKERS),
                lambda found: self._took_brokers(found, lambda: None),
            )
        elif path.startswith(OFFLINE):
            self.ask(lambda zookeeper: zookeeper.below(OFFLINE), self._took_offline)
        elif path in (ASSIGNMENT, ELECTION):
            self.assignment.read()
        elif path == CONTROLLER:
            self.ask(lambda zookeeper: zookeeper.read(CONTROLLER), self._took_controller)

    def _took_brokers(self, found: dict[str, tuple[Any, int, int]], then: Callable[[], None]) -> None:
        # The rules hold a reference to this very mapping.
        self.brokers.clear()
        self.brokers.update({value[0]: created for value, _, created in found.values()})
        self.leaving = frozenset(value[0] for value, _, _ in found.values() if value[1])
        self.staying.clear()
        self.staying.update({each: at for each, at in self.brokers.items() if each not in self.leaving})
        then()
        self.office.wake()

    def reassigned(self) -> None:
        """Partitions have other replicas now."""
        for number in self.logs:
            if self._is_joined and not self.assignment.is_here(number):
                self._drop(number)
            elif self._is_joined and number in self.states:
                self._apply(number)
        self.office.wake()

    def _drop(self, number: int) -> None:
        """A replica that is kept elsewhere now is removed, with its log; one that has failed already stays
        for whoever looks after its disk."""
        if self.logs[number].is_offline:
            return
        if self.replicas[number].leader_epoch < 0 and not self.logs[number].end_offset:
            return  # it never was here
        self.world.note(f"{self.name} removes its replica of {number}")
        self.failed.let_go(number, NotLeaderOrFollower("the replica is kept elsewhere now"))
        self.logs[number].delete()
        self.checkpoints[number] = 0
        self.replicas[number] = self._new_replica()

    def _took_offline(self, found: dict[str, tuple[Any, int, int]]) -> None:
        self.offline = dict(node[0] for node in found.values())
        self.office.wake()

    def _took_controller(self, found: tuple[Any, int, int] | None) -> None:
        self.controller = None if found is None else found[0]
        self.office.wake()

    def _took_state(self, number: int, found: tuple[Any, int, int] | None) -> None:
        if found is None:
            return
        state, version, _ = found
        known = self.states.get(number)
        if known is not None and known[1] >= version:
            return
        self.states[number] = (state, version)
        if self._is_joined:
            self._apply(number)
        self.office.wake()

    def _on_first_picture(self) -> None:
        if self._is_joined:
            self._register()
        else:
            self._leave_in_sync_sets()

    def _leave_in_sync_sets(self) -> None:
        """The rule of a restarted broker, one partition after the other; then it registers."""
        for number, (state, version) in self.states.items():
            alive = frozenset(self.brokers)
            left = broker_registry.restarted(
                state, self.assignment.replicas(number), self.id, alive, was_clean=self.was_clean
            )
            if left is not None and not self._has_left(number, state):
                self.ask(
                    lambda zookeeper, number=number, left=left, version=version: (
                        zookeeper.commit([Set(f"{STATES}{number}", left, version)]),
                        zookeeper.read(f"{STATES}{number}"),
                    ),
                    lambda result, number=number: self._left(number, result),
                )
                return
        self._join()

    def _has_left(self, number: int, state: PartitionState) -> bool:
        return self._left_states.get(number) == (state.leader_epoch, state.isr)

    @property
    def _left_states(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        return self.__dict__.setdefault(f"_left_{self.life}", {})

    def _left(self, number: int, result: Any) -> None:
        if isinstance(result, Refused):
            self.ask(
                lambda zookeeper: zookeeper.read(f"{STATES}{number}"),
                lambda found: (self._took_state(number, found), self._leave_in_sync_sets()),
            )
            return
        state, version, _ = result[1]
        self.states[number] = (state, version)
        self._left_states[number] = (state.leader_epoch, state.isr)
        self._leave_in_sync_sets()

    def _join(self) -> None:
        self._is_joined = True
        for number in self.logs:
            if not self.assignment.is_here(number):
                self._drop(number)
        for number in self.states:
            self._apply(number)
        self._register()

    def _register(self) -> None:
        self.ask(
            lambda zookeeper: zookeeper.commit(
                [Make(f"{BROKERS}{self.id}", (self.id, self.is_leaving), ephemeral=True)]
            ),
            self._registered,
        )

    def _registered(self, result: Any) -> None:
        if isinstance(result, Refused):
            # The former session has not ended yet.
            self.later(30, self._register)
            return
        self.is_registered = True
        self.failed.report()
        self.on_watch(BROKERS)
        self.on_watch(CONTROLLER)

    # -- roles ---------------------------------------------------------------------------------------

    def _apply(self, number: int) -> None:
        state, version = self.states[number]
        replica, log = self.replicas[number], self.logs[number]
        if not self.assignment.is_here(number) or log.is_offline:
            return
        stamped = replace(state, version=version)
        led, led_epoch = replica.role is Role.LEADER, replica.leader_epoch
        match replica.apply(stamped, log.end_offset, self.assignment.replicas(number), self.world.now_ms):
            case Transition.LEAD:
                self.world.note(f"{self.name} leads {number} in epoch {state.leader_epoch}, isr {state.isr}")
                log.epochs.begin(state.leader_epoch, log.end_offset)
                self.advance(number)
                if self.coordinators is not None and not (led and leads_on(led_epoch, state.leader_epoch)):
                    if led:
                        self.coordinators.lost(number)
                    self.coordinators.gained(number)
            case Transition.FOLLOW:
                log.epochs.truncate_from_end(log.end_offset)
                self.forget_waiting(number)
                if led:
                    self.waiting_appends[number].fail(NotLeaderOrFollower("another broker leads now"))
                    if self.coordinators is not None:
                        self.coordinators.lost(number)
                self.fetching.fetch(number)
            case Transition.CONTINUE:
                self.in_sync_set_changed(number)
            case Transition.IGNORE:
                return

    def advance(self, number: int) -> None:
        replica, log = self.replicas[number], self.logs[number]
        if replica.role is not Role.LEADER:
            return
        before = replica.high_watermark
        own_end = log.flushed if self.rules.only_flushed else log.end_offset
        if replica.advance(own_end, self.world.now_ms):
            self.truth.shown(self.id, number, before, replica.high_watermark)
            self.waiting_appends[number].reached(
                replica.high_watermark, enough_in_sync=replica.has_enough_in_sync
            )
        waiting = self._waiting[number]
        for one in list(waiting):
            end = one.offset + len(one.payloads)
            if replica.high_watermark >= end:
                waiting.remove(one)
                if replica.has_enough_in_sync:
                    self.truth.acknowledge(number, one.offset, one.payloads)
                    one.answer(Written(one.offset))

    def forget_waiting(self, number: int) -> None:
        """Who waits for the partition's high watermark gets no answer from here."""
        self._waiting[number].clear()

    def in_sync_set_changed(self, number: int) -> None:
        self.advance(number)
        if not self.replicas[number].has_enough_in_sync:
            self.waiting_appends[number].dismiss(NotEnoughReplicasAfterAppend("too few are left in sync"))

    # -- clients -------------------------------------------------------------------------------------

    def produce(self, number: int, payloads: list[object], acks: int, answer: Callable[[Any], None]) -> None:
        replica, log = self.replicas[number], self.logs[number]
        try:
            replica.check_leader()
        except KafkaError as error:
            answer(Refusal(error))
            return
        if acks == ACKS_ALL and not replica.has_enough_in_sync:
            return
        base = log.append(replica.leader_epoch, payloads)
        if acks == ACKS_ALL:
            self._waiting[number].append(_Waiting(base, payloads, answer))
        else:
            answer(Written(base))
        if self.rules.only_flushed:
            self.later(self.world.rng.randint(1, 10), self.flush, number)
        self.advance(number)

    def consume(self, number: int, offset: int, answer: Callable[[Any], None]) -> None:
        """(offset of the first record, records) up to the high watermark."""
        replica, log = self.replicas[number], self.logs[number]
        try:
            replica.check_leader()
        except KafkaError as error:
            answer(Refusal(error))
            return
        if not log.start_offset <= offset <= log.end_offset:
            answer((max(log.start_offset, min(offset, replica.high_watermark)), []))
            return
        answer((offset, log.read(offset, replica.high_watermark, READ_MOST)))

    def delete_records(self, number: int, share: float) -> None:
        """Move the log's start somewhere towards the high watermark."""
        replica, log = self.replicas[number], self.logs[number]
        if replica.role is Role.LEADER:
            span = replica.high_watermark - log.start_offset
            log.advance_start(log.start_offset + int(span * share))

    # -- disk ----------------------------------------------------------------------------------------

    def flush(self, number: int) -> None:
        if self.failed.flush(number):
            self.advance(number)

    def _housekeep(self) -> None:
        """A background flush and a checkpoint, now and then."""
        for number in self.logs:
            if self.world.rng.random() < 0.5:
                self.flush(number)
            if self.world.rng.random() < 0.5:
                self.checkpoints[number] = self.replicas[number].high_watermark
        self.failed.report()
        self.later(self.world.rng.randint(100, 800), self._housekeep)
