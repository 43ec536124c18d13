"""Virtual time, and a network that misbehaves. Everything random comes from one seeded generator."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

TRACE_LENGTH = 4_000
Action = Callable[..., None]


class World:
    """The clock, the events to come, and the last things that happened."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 0
        self.trace: deque[str] = deque(maxlen=TRACE_LENGTH)
        self.abandoned: list[Any] = []
        """What dead processes were at: not to be cleared away while the history goes on."""
        self._events: list[tuple[int, int, Action, tuple[Any, ...]]] = []
        self._count = 0
        self._failure: BaseException | None = None

    def after(self, delay_ms: float, action: Action, *arguments: Any) -> None:
        self._count += 1
        delay = round(delay_ms)
        at_ms = self.now_ms + delay if delay > 0 else self.now_ms
        heappush(self._events, (at_ms, self._count, action, arguments))

    def run(self, until_ms: int) -> None:
        events = self._events
        while events and events[0][0] <= until_ms:
            self.now_ms, _, action, arguments = heappop(events)
            action(*arguments)
            if self._failure is not None:
                raise self._failure
        self.now_ms = until_ms

    def fail(self, failure: BaseException) -> None:
        """Something went wrong where raising it would end nothing but a task: the history ends with it."""
        self._failure = self._failure or failure

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now_ms:>7} {text}")


class Process:
    """Something that can be killed and frozen. What reaches a frozen process waits; what was sent to an
    earlier life never arrives (its connection is gone)."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.is_alive = False
        self.is_frozen = False
        self._held: list[tuple[int, Action, tuple[Any, ...]]] = []

    def deliver(self, life: int, action: Action, *arguments: Any) -> None:
        """Run something in this process, if it is still the one that was meant."""
        if life != self.life or not self.is_alive:
            return
        if self.is_frozen:
            self._held.append((life, action, arguments))
            return
        self._run(action, arguments)

    def _run(self, action: Action, arguments: tuple[Any, ...]) -> None:
        action(*arguments)

    def later(self, delay_ms: float, action: Action, *arguments: Any) -> None:
        """A timer of this process."""
        self.world.after(delay_ms, self.deliver, self.life, action, *arguments)

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        held, self._held = self._held, []
        for life, action, arguments in held:
            self.deliver(life, action, *arguments)

    def end(self) -> None:
        self.life += 1
        self.is_alive = self.is_frozen = False
        self._held.clear()


class Network:
    """Messages between processes: each on its own way, so later ones may come earlier, twice, or never."""

    def __init__(self, world: World, *, loss: float, duplication: float, slowest_ms: int) -> None:
        self._world = world
        self._loss, self._duplication, self._slowest_ms = loss, duplication, slowest_ms
        self._cut: set[frozenset[str]] = set()
        self._last_arrival_ms: dict[tuple[str, str, str], float] = {}

    def cut(self, one: str, other: str) -> None:
        self._cut.add(frozenset((one, other)))

    def heal(self) -> None:
        self._cut.clear()

    def calm(self) -> None:
        """From now on nothing is lost or doubled."""
        self._loss = self._duplication = 0.0

    def reaches(self, one: str, other: str) -> bool:
        return not self._cut or frozenset((one, other)) not in self._cut

    def send(self, source: str, target: Process, action: Action, *arguments: Any) -> None:
        rng = self._world.rng
        copies = 1
        if self._loss and rng.random() < self._loss:
            copies = 0
        elif self._duplication and rng.random() < self._duplication:
            copies = 2
        for _ in range(copies):
            delay = rng.randint(1, self._slowest_ms) if rng.random() < 0.2 else rng.randint(1, 3)
            self._world.after(delay, self._arrive, source, target, target.life, action, arguments)

    def send_in_order(
        self, channel: str, source: str, target: Process, action: Action, *arguments: Any
    ) -> None:
        """As `send`, over a connection: late or never, but not twice, and none overtakes another."""
        rng = self._world.rng
        if self._loss and rng.random() < self._loss:
            return
        delay = rng.randint(1, self._slowest_ms) if rng.random() < 0.2 else rng.randint(1, 3)
        key = (channel, source, target.name)
        arrival_ms = max(self._world.now_ms + delay, self._last_arrival_ms.get(key, 0))
        self._last_arrival_ms[key] = arrival_ms
        self._world.after(
            arrival_ms - self._world.now_ms, self._arrive, source, target, target.life, action, arguments
        )

    def _arrive(
        self, source: str, target: Process, life: int, action: Action, arguments: tuple[Any, ...]
    ) -> None:
        if self.reaches(source, target.name):
            target.deliver(life, action, *arguments)
