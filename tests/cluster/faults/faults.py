"""Does what `plan.py` drew: begins each fault at its time, ends it at its time, and heals everything.

All on the main thread, in one loop of due steps; a step that is not possible yet (a broker that is still
stopping) is put off by a moment.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.faults import power
from tests.cluster.faults.cluster import NODES, ZOOKEEPER, Broker, Cluster, freeze, thaw
from tests.cluster.faults.plan import Fault, Kind
from tests.waiting import patience

STEP_S = 0.05
STOP_TIMEOUT_S = 30.0
AGAIN_S = 0.3
SHORT = 10
STANDING_S, WALKING_S = 0.4, 0.15
BALLAST = "ballast"
BALLAST_CHUNK = 1 << 20

Step = Callable[[], bool]
"""Does something; False: not yet."""


class Faults:
    """`run` takes one round's faults; `problems` is what went wrong with the brokers meanwhile."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._steps: list[tuple[float, int, Step]] = []
        self._numbers = itertools.count()
        self.problems: list[str] = []

    def run(self, faults: Sequence[Fault]) -> None:
        """Returns when every fault is over, with every process running again or starting."""
        now = time.monotonic()
        for fault in faults:
            self._at(now + fault.begin_s, lambda fault=fault: self._begin(fault))
        while self._steps:
            due, _, step = self._steps[0]
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(min(wait, STEP_S))
                self._cluster.tend()
                continue
            heapq.heappop(self._steps)
            if not step():
                self._at(time.monotonic() + STEP_S, step)

    def _at(self, due: float, step: Step) -> None:
        heapq.heappush(self._steps, (due, next(self._numbers), step))

    def _begin(self, fault: Fault) -> bool:
        self._cluster.timeline.note(f"begins: {fault}")
        end = getattr(self, f"_{fault.kind.name.lower()}")(fault)

        def ended() -> bool:
            if not end():
                return False
            self._cluster.timeline.note(f"ends:   {fault}")
            return True

        self._at(time.monotonic() + fault.length_s, ended)
        return True

    def _broker(self, fault: Fault) -> Broker:
        return next(each for each in self._cluster.brokers.values() if each.node == fault.nodes[-1])

    # -- each kind begins, and returns its end -------------------------------------------------------

    def _kill(self, fault: Fault) -> Step:
        broker = self._broker(fault)
        self._end_at_once(broker)

        def again() -> bool:
            self._cluster.timeline.note(f"killed again: {broker.node}")
            self._end_at_once(broker)
            return self._launch(broker)

        def end() -> bool:
            if fault.variant and fault.kind is Kind.KILL:
                self._at(time.monotonic() + AGAIN_S + fault.length_s / 2, again)
            return self._launch(broker)

        return end

    def _power(self, fault: Fault) -> Step:
        broker = self._broker(fault)
        self._end_at_once(broker)
        lost = power.fail(broker.data, random.Random(str(fault)))
        self._cluster.timeline.note(f"{lost} bytes of {broker.node} were not flushed and are gone")
        return lambda: self._launch(broker)

    def _shutdown(self, fault: Fault) -> Step:
        broker = self._broker(fault)
        broker.meant_to_run = False
        broker.stopping_since = time.monotonic()
        broker.signal(signal.SIGTERM)

        def cut_short() -> bool:
            if not broker.meant_to_run:
                broker.kill()
            return True

        if fault.variant and fault.kind is Kind.SHUTDOWN:
            self._at(time.monotonic() + fault.length_s / SHORT, cut_short)
        return lambda: self._launch_once_ended(broker)

    def _move(self, fault: Fault) -> Step:
        broker = self._broker(fault)
        begun = self._kill(fault) if fault.variant else self._shutdown(fault)

        def end() -> bool:
            if broker.is_running and not self._has_overstayed(broker):
                return False
            broker.move()
            return begun()

        return end

    def _freeze(self, fault: Fault) -> Step:
        broker = self._broker(fault)
        freeze(broker)
        return walk_on(broker)

    _pause = _freeze

    def _stutter(self, fault: Fault) -> Step:
        broker = self._broker(fault)
        over = time.monotonic() + fault.length_s

        def stand() -> bool:
            if time.monotonic() < over:
                freeze(broker)
                self._at(time.monotonic() + STANDING_S, walk)
            return True

        def walk() -> bool:
            thaw(broker)
            self._at(time.monotonic() + WALKING_S, stand)
            return True

        stand()
        return walk_on(broker)

    def _cut(self, fault: Fault) -> Step:
        self._cluster.network.cut(*fault.nodes, both_ways=not fault.variant)

        def end() -> bool:
            self._cluster.network.heal(*fault.nodes)
            return True

        return end

    _cut_zookeeper = _cut

    def _isolate(self, fault: Fault) -> Step:
        node = fault.nodes[-1]
        others = [other for other in NODES if other != node and not (fault.variant and other == ZOOKEEPER)]
        for other in others:
            self._cluster.network.cut(node, other, both_ways=True)

        def end() -> bool:
            for other in others:
                self._cluster.network.heal(node, other)
            return True

        return end

    def _zookeeper_restart(self, fault: Fault) -> Step:
        server = self._cluster.zookeeper
        server.kill()

        def end() -> bool:
            server.launch()
            return True

        return end

    def _zookeeper_pause(self, fault: Fault) -> Step:
        server = self._cluster.zookeeper
        freeze(server)

        def end() -> bool:
            thaw(server)
            return True

        return end

    def _disk_full(self, fault: Fault) -> Step:
        folder = self._cluster.small_disk
        assert folder is not None
        fill(folder / BALLAST)

        def end() -> bool:
            (folder / BALLAST).unlink(missing_ok=True)
            return True

        return end

    # -- brokers again -------------------------------------------------------------------------------

    def _end_at_once(self, broker: Broker) -> None:
        broker.meant_to_run = False
        broker.kill()

    def _launch(self, broker: Broker) -> bool:
        self._cluster.launch(broker)
        return True

    def _launch_once_ended(self, broker: Broker) -> bool:
        if broker.is_running and not self._has_overstayed(broker):
            return False
        assert broker.process is not None
        if broker.process.returncode not in (0, -signal.SIGKILL):
            self.problems.append(f"broker {broker.id} was asked to stop: status {broker.process.returncode}")
        return self._launch(broker)

    def _has_overstayed(self, broker: Broker) -> bool:
        """Whether a broker that was asked to stop had its time; it is killed then."""
        assert broker.stopping_since is not None
        if time.monotonic() - broker.stopping_since < patience(STOP_TIMEOUT_S):
            return False
        self.problems.append(f"broker {broker.id} did not stop within {STOP_TIMEOUT_S:.0f} s")
        broker.kill()
        return True


def walk_on(broker: Broker) -> Step:
    def end() -> bool:
        thaw(broker)
        return True

    return end


def fill(path: Path) -> None:
    """Write until there is no room left, to the last byte."""
    size = BALLAST_CHUNK
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        while size:
            try:
                os.write(descriptor, bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
    finally:
        os.close(descriptor)
