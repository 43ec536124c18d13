"""What operators do to a cluster while everything else goes on: they move partitions to other brokers, change
their minds, and have preferred leaders take over. Any broker may be asked."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.cluster.broker import Broker
from tests.simulation.cluster.world import World


class Operators:
    """See the module."""

    def __init__(self, world: World, brokers: dict[int, Broker], numbers: list[int]) -> None:
        self._world, self._brokers, self._numbers = world, brokers, numbers

    @property
    def actions(self) -> tuple[Callable[[], None], ...]:
        return self.move, self.move, self.move, self.prefer

    def move(self) -> None:
        """And now and then back, or on to others, before it is over."""
        rng = self._world.rng
        number = rng.choice(self._numbers)
        self._alter(number, self._target())
        if rng.random() < 0.4:
            again = None if rng.random() < 0.6 else self._target()
            self._world.after(rng.choice((10, 50, 200, 600)), self._alter, number, again)

    def _target(self) -> tuple[int, ...]:
        rng = self._world.rng
        return tuple(rng.sample(list(self._brokers), rng.choice((2, 2, 3))))

    def _alter(self, number: int, target: tuple[int, ...] | None) -> None:
        broker = self._any()
        if broker is not None:
            broker.assignment.alter(number, target)

    def prefer(self) -> None:
        broker = self._any()
        if broker is not None:
            broker.assignment.ask_for_preferred(frozenset(self._numbers))

    def _any(self) -> Broker | None:
        able = [each for each in self._brokers.values() if each.is_alive and not each.is_frozen]
        return self._world.rng.choice(able) if able else None
