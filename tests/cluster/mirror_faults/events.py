"""Does what `plan.py` drew: begins each event at its time, ends it at its time, on the main thread."""

from __future__ import annotations

import heapq
import itertools
import signal
import time
from collections.abc import Callable, Sequence

from tests.cluster.faults.faults import BALLAST, fill
from tests.cluster.mirror_faults.load import Load
from tests.cluster.mirror_faults.places import Places
from tests.cluster.mirror_faults.plan import SLOW_BYTES_PER_S, Event
from tests.cluster.mirror_faults.records import SHIFTING

STEP_S = 0.05
BURST_BATCHES = 150
"""For each stream: some 7 MB in all, which a link at 1 MB/s cannot take in an event's time."""

Step = Callable[[], None]


class Events:
    """`run` returns when every event of the round is over and everything is started again."""

    def __init__(self, places: Places, load: Load) -> None:
        self._places, self._load = places, load
        self._steps: list[tuple[float, int, Step]] = []
        self._numbers = itertools.count()

    def run(self, events: Sequence[Event]) -> None:
        begun = time.monotonic()
        for event in events:
            self._at(begun + event.begin_s, lambda event=event: self._begin(event))  # type: ignore[misc]
        while self._steps:
            due, _, step = heapq.heappop(self._steps)
            while time.monotonic() < due:
                time.sleep(min(STEP_S, max(0.0, due - time.monotonic())))
                self._places.tend()
            step()

    def _at(self, due: float, step: Step) -> None:
        heapq.heappush(self._steps, (due, next(self._numbers), step))

    def _begin(self, event: Event) -> None:
        self._places.timeline.note(f"begins: {event}")
        end = getattr(self, f"_{event.kind.name.lower()}")(event)

        def ended() -> None:
            end()
            self._places.timeline.note(f"ends:   {event}")

        self._at(time.monotonic() + event.length_s, ended)

    # -- each kind begins, and returns its end -------------------------------------------------------

    def _kill_worker(self, event: Event) -> Step:
        self._places.kill_worker(event.nodes[0])
        return lambda: self._places.start_worker(event.nodes[0])

    def _freeze_worker(self, event: Event) -> Step:
        worker = self._places.workers[event.nodes[0]]
        worker.signal(signal.SIGSTOP)
        return lambda: worker.signal(signal.SIGCONT)

    def _kill_source(self, event: Event) -> Step:
        self._places.kill_server(event.nodes[0])
        return lambda: self._places.start_server(event.nodes[0])

    _kill_target = _kill_source

    def _cut_source(self, event: Event) -> Step:
        self._places.network.cut(*event.nodes, both_ways=True)
        return lambda: self._places.network.heal(*event.nodes)

    _cut_target = _cut_source

    def _slow_target(self, event: Event) -> Step:
        self._places.network.slow(event.nodes[0], SLOW_BYTES_PER_S)
        self._load.hurry(BURST_BATCHES)
        return lambda: self._places.network.slow(event.nodes[0], None)

    def _disk_full(self, event: Event) -> Step:
        assert self._places.disk is not None
        path = self._places.disk / BALLAST
        # Apache Kafka ends when its only disk is full; nobody starts it again before there is room.
        self._places.meant_to_run.discard(event.nodes[0])
        fill(path)

        def end() -> None:
            path.unlink(missing_ok=True)
            self._places.meant_to_run.add(event.nodes[0])
            self._places.tend()

        return end

    def _recreate(self, event: Event) -> Step:
        self._load.recreate(event.nodes[0], SHIFTING)
        return lambda: None
