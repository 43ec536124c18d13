"""One history: a cluster, a load, faults in random order, then calm, and the verdict.

Everything follows from the seed. After the faults everyone is started again, the network heals, and the
cluster must come back to full replication by itself: a history that ends without a leader, or with a replica
that never catches up, fails like one that loses a record.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.cluster.assignment import ASSIGNMENT, assigned_now
from tests.simulation.cluster.broker import BROKERS, STATES, Broker, Rules
from tests.simulation.cluster.clients import Consumer, Producer
from tests.simulation.cluster.disk import VirtualLog
from tests.simulation.cluster.loads import Loads, draw_topics
from tests.simulation.cluster.operators import Operators
from tests.simulation.cluster.product_log import product_log
from tests.simulation.cluster.truth import Truth, Violation
from tests.simulation.cluster.world import Network, World
from tests.simulation.cluster.zookeeper import NAME, Make, VirtualZooKeeper, ZNode

SETTLE_MS = 25_000
CHECK_EVERY_MS = 200
RECKONED_WITH_MS = 100
"""A controller that decides has not heard yet of a broker that came (back) later than this."""


@dataclass(slots=True)
class Outcome:
    """What a history came to; `violation` is None when all is well."""

    seed: int
    violation: str | None
    acknowledged: int
    committed: int
    excused: int
    events: dict[str, int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)


class History:
    """See the module. `load` (one of `loads.py`): what runs on the cluster, and `moves`: whether replicas
    move (`operators.py`), whatever the seed says."""

    def __init__(self, seed: int, load: int | None = None, moves: bool | None = None) -> None:
        self.seed = seed
        self.world = world = World(seed)
        rng = world.rng
        self.network = Network(
            world,
            loss=rng.choice((0.0, 0.01, 0.05)),
            duplication=rng.choice((0.0, 0.02)),
            slowest_ms=rng.choice((10, 60, 200)),
        )
        has_moves = random.Random(f"moves {seed}").random() < 0.5 if moves is None else moves
        broker_ids = list(range(1, rng.choice((3, 3, 3, 4, 5)) + has_moves + 1))
        partitions = rng.choice((1, 2, 3))
        topics = draw_topics(rng, partitions, load)
        factor = rng.choice((2, 3, 3))
        session_timeout_ms = rng.choice((600, 1_500))
        self.rules = Rules(
            replicas={
                number: tuple(rng.sample(broker_ids, min(factor, len(broker_ids))))
                for number in topics.numbers
            },
            min_insync=rng.choice((1, 1, 2)),
            max_lag_ms=rng.choice((300, 1_000)),
            session_timeout_ms=session_timeout_ms,
            only_flushed=rng.random() < 0.3,
            topics=topics,
            has_moves=has_moves,
        )
        self._zookeeper = zookeeper = VirtualZooKeeper(
            world, self.network, session_timeout_ms=session_timeout_ms
        )
        logs = {broker: {number: VirtualLog() for number in self.rules.replicas} for broker in broker_ids}
        self._registered_ms: dict[str, int] = {}
        self.truth = Truth(logs, only_flushed=self.rules.only_flushed)
        zookeeper.on_write = self._on_write
        if has_moves:
            zookeeper.commit([Make(ASSIGNMENT, assigned_now(zookeeper, self.rules.replicas))])
        self.brokers = {
            broker: Broker(world, broker, self.network, zookeeper, self.rules, self.truth, logs[broker])
            for broker in broker_ids
        }
        for broker in self.brokers.values():
            broker.peers = self.brokers
        self.truth.is_uninterrupted = lambda broker, number: self.brokers[broker].is_uninterrupted(number)
        self.truth.is_running = lambda broker, number: (
            self.brokers[broker].is_alive
            and not self.brokers[broker].is_leaving
            and self.brokers[broker].is_registered  # not only an earlier life, whose session goes on
            and world.now_ms - self._registered_ms.get(f"{BROKERS}{broker}", world.now_ms) >= RECKONED_WITH_MS
            and not logs[broker][number].is_offline
        )
        self.producers = [
            Producer(world, f"producer-{number}", self.network, self.brokers, partitions)
            for number in range(2)
        ]
        Consumer(world, "consumer", self.network, self.brokers, partitions, self.truth)
        self.loads = Loads(world, self.network, self.brokers, self.truth, topics)
        self._operators = Operators(world, self.brokers, list(self.rules.replicas))
        self._faults = self._draw_faults()
        if has_moves:
            self._faults += self._operators.actions
        self.events: dict[str, int] = {}
        self._faulty_until = rng.choice((4_000, 8_000, 15_000))

    def _on_write(self, path: str, node: ZNode | None) -> None:
        if path.startswith(STATES) and node is not None:
            number = int(path.removeprefix(STATES))
            self.truth.state_written(number, node.value, self._replicas()[number])
        elif path.startswith(BROKERS):
            self._registered_ms.pop(path, None)
            if node is not None:
                self._registered_ms[path] = self.world.now_ms

    def run(self) -> Outcome:
        violation = None
        with product_log(self.world):
            violation = self._run()
        return Outcome(
            self.seed,
            violation,
            sum(map(len, self.truth.acknowledged.values())),
            sum(map(len, self.truth.committed.values())),
            self.truth.excused_count,
            self.events,
            list(self.world.trace),
        )

    def _run(self) -> str | None:
        try:
            for broker in self.brokers.values():
                self.world.after(self.world.rng.randint(0, 200), broker.start)
            self.world.after(500, self._fault)
            self.world.run(self._faulty_until)
            self._calm()
            self._settle()
        except Violation as broken:
            return str(broken)
        return None

    # -- faults --------------------------------------------------------------------------------------

    def _fault(self) -> None:
        if self.world.now_ms >= self._faulty_until:
            return
        rng = self.world.rng
        happen = rng.choice(self._faults)
        self.events[happen.__name__] = self.events.get(happen.__name__, 0) + 1
        happen()
        self.world.after(rng.choice((30, 150, 400, 1_000, 2_500)), self._fault)

    def _draw_faults(self) -> tuple[Callable[[], None], ...]:
        """What may happen. Where more than replication is judged, power is rarely lost (what it may take
        along leaves nothing to judge), and no records are deleted."""
        faults = [self._kill, self._kill, self._stop, self._freeze, self._fail_flush]
        faults += [self._cut, self._cut, self._isolate, self._cut_from_zookeeper]
        if self._may_set_clocks:
            faults.append(self._set_clock)
        if not self.loads.are_coordinated:
            return (*faults, self._lose_power, self._lose_power, self._black_out, self._delete_records)
        if self.rules.only_flushed or self.world.rng.random() < 0.2:
            return (*faults, self._lose_power, self._lose_power, self._black_out)
        return tuple(faults)

    @property
    def _may_set_clocks(self) -> bool:
        """When a transaction began is written down: with the clock set back, it rightly ends an hour late."""
        return self.loads.are_coordinated and not self.rules.topics.transactions

    def _any_alive(self) -> Broker | None:
        """Where there are coordinators, often one of theirs."""
        alive = [broker for broker in self.brokers.values() if broker.is_alive]
        coordinating = [broker for broker in alive if self.loads.is_coordinator(broker)]
        if coordinating and self.world.rng.random() < 0.5:
            alive = coordinating
        return self.world.rng.choice(alive) if alive else None

    def _return(self, broker: Broker) -> None:
        delay = self.world.rng.choice((50, 200, 700, 2_000, 4_000))
        self.world.after(delay, self._start, broker)

    def _start(self, broker: Broker) -> None:
        if not broker.is_alive:
            broker.start()

    def _kill(self) -> None:
        broker = self._any_alive()
        if broker is not None:
            broker.crash(power=False)
            self._return(broker)

    def _lose_power(self) -> None:
        broker = self._any_alive()
        if broker is not None:
            broker.crash(power=True)
            self._return(broker)

    def _black_out(self) -> None:
        """The whole room."""
        if self.world.rng.random() < 0.6:
            return
        for broker in self.brokers.values():
            if broker.is_alive:
                broker.crash(power=True)
                self._return(broker)

    def _stop(self) -> None:
        broker = self._any_alive()
        if broker is not None:
            self._stop_in_order(broker)

    def _stop_in_order(self, broker: Broker) -> None:
        if self.rules.has_moves and self.world.rng.random() < 0.7:
            broker.leave(lambda: self._return(broker))
        else:
            broker.shut_down()
            self._return(broker)

    def _replicas(self) -> dict[int, tuple[int, ...]]:
        """As they stand in ZooKeeper."""
        now = assigned_now(self._zookeeper, self.rules.replicas)
        return {number: assigned.replicas for number, assigned in now.items()}

    def _fail_flush(self) -> None:
        """The next one of some log. Its broker is stopped for it some time later."""
        broker = self._any_alive()
        if broker is not None:
            hosted = [number for number, replicas in self._replicas().items() if broker.id in replicas]
            if hosted:
                broker.logs[self.world.rng.choice(hosted)].failing = self.world.rng.random()
                self.world.after(self.world.rng.choice((500, 1_500, 4_000)), self._attend_to_disk, broker)

    def _attend_to_disk(self, broker: Broker) -> None:
        if broker.is_alive and not broker.is_frozen and broker.failed.numbers:
            broker.shut_down()
            self._return(broker)

    def _freeze(self) -> None:
        broker = self._any_alive()
        if broker is not None and not broker.is_frozen:
            self.world.note(f"{broker.name} freezes")
            broker.freeze()
            self.world.after(self.world.rng.choice((100, 500, 2_500)), self._thaw, broker)

    def _thaw(self, broker: Broker) -> None:
        if broker.is_frozen:
            self.world.note(f"{broker.name} thaws")
            broker.thaw()

    def _set_clock(self) -> None:
        broker = self._any_alive()
        if broker is not None:
            self._set_clock_of(broker)

    def _set_clock_of(self, broker: Broker) -> None:
        """By an hour or a day; a clock that nobody sets goes on."""
        broker.clock_shift_ms += self.world.rng.choice((-86_400_000, -3_600_000, 3_600_000, 86_400_000))
        self.world.note(f"{broker.name}'s clock is set")

    def _cut(self) -> None:
        one, other = self.world.rng.sample(list(self.brokers.values()), 2)
        self.world.note(f"the network between {one.name} and {other.name} is cut")
        self.network.cut(one.name, other.name)
        self.world.after(self.world.rng.choice((200, 900, 2_500)), self.network.heal)

    def _isolate(self) -> None:
        """From the other brokers; clients and ZooKeeper still reach it."""
        broker = self._any_alive()
        if broker is not None:
            self.world.note(f"the network between {broker.name} and all other brokers is cut")
            for other in self.brokers.values():
                if other is not broker:
                    self.network.cut(broker.name, other.name)
            self.world.after(self.world.rng.choice((500, 900, 2_500)), self.network.heal)

    def _cut_from_zookeeper(self) -> None:
        broker = self._any_alive()
        if broker is not None:
            self.world.note(f"the network between {broker.name} and ZooKeeper is cut")
            self.network.cut(broker.name, NAME)
            self.world.after(self.world.rng.choice((200, 900, 2_500)), self.network.heal)

    def _delete_records(self) -> None:
        broker = self._any_alive()
        if broker is not None and not broker.is_frozen:
            number = self.world.rng.choice(list(self.rules.replicas))
            broker.delete_records(number, self.world.rng.random())

    # -- the end -------------------------------------------------------------------------------------

    def _calm(self) -> None:
        self.world.note("calm")
        self.network.heal()
        self.network.calm()
        for broker in self.brokers.values():
            for log in broker.logs.values():
                log.failing = None
            if broker.is_frozen:
                broker.thaw()
            if broker.is_alive and broker.failed.numbers:
                broker.shut_down()
            self._start(broker)
        # Starts that were planned before find their broker alive.

    def _settle(self) -> None:
        """Run until every partition is led and fully replicated, with nobody sending any more at the end."""
        self.world.run(self.world.now_ms + 2_000)
        for producer in self.producers:
            producer.is_stopped = True
        self.loads.stop()
        if self._may_set_clocks:
            for broker in self.brokers.values():
                self._set_clock_of(broker)
        deadline = self.world.now_ms + SETTLE_MS
        while unsettled := self._unsettled():
            if self.world.now_ms > deadline:
                raise Violation(f"the cluster does not become whole: {unsettled}")
            self.world.run(self.world.now_ms + CHECK_EVERY_MS)
        self.loads.check()
        for number, replicas in self._replicas().items():
            state = self.truth.states[number]
            self.truth.check_nothing_lost(number, state.leader, state.isr)
            self.truth.check_replicas(
                number,
                {broker: self.brokers[broker].replicas[number].high_watermark for broker in replicas},
            )

    def _unsettled(self) -> str:
        """What is still to be waited for; empty when all is well."""
        if not all(self._is_whole(number) for number in self.rules.replicas):
            return self._picture()
        return self.loads.unsettled()

    def _is_whole(self, number: int) -> bool:
        state = self.truth.states.get(number)
        assigned = assigned_now(self._zookeeper, self.rules.replicas)[number]
        if state is None or assigned.adding or assigned.removing:
            return False
        if set(state.isr) != set(assigned.replicas):
            return False
        leader = self.brokers.get(state.leader)
        if leader is None or not leader.is_alive:
            return False
        end = leader.logs[number].end_offset
        return all(
            self.brokers[broker].logs[number].end_offset == end
            and self.brokers[broker].replicas[number].high_watermark == end
            for broker in state.isr
        )

    def _picture(self) -> str:
        return "; ".join(
            f"{number}: {self.truth.states.get(number)} {assigned} "
            + ", ".join(
                f"{broker}: {self.brokers[broker].logs[number].start_offset}"
                f"..{self.brokers[broker].logs[number].end_offset}"
                f" hw {self.brokers[broker].replicas[number].high_watermark}"
                for broker in assigned.replicas
                if number in self.brokers[broker].replicas
            )
            for number, assigned in assigned_now(self._zookeeper, self.rules.replicas).items()
        )
