"""What a world's clusters answered while an audit looked, taken down where they answer.

Filled by `audit_product`, read by `audit_oracle`: in a world that goes on meanwhile, the oracle can know what
a run was shown from nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.audit_logs import Log

if TYPE_CHECKING:
    from tests.simulation.audit_world import Mirror

ClusterPartition = tuple[str, str, int]


@dataclass(slots=True)
class Pinned:
    """A partition's offsets as they were told: readable ones are [start, stable_end)."""

    start: int = 0
    stable_end: int = 0
    end: int = -1


@dataclass(slots=True)
class Answers:
    """One run's. `pinned_ms` is when it had all ends, `read_ms` when it read what was pinned; `positions` are
    (next offset, topic id) by aggregate and source partition, `behind` the offsets below a log's start that
    came all the same, with the batch in which it starts."""

    pins: dict[ClusterPartition, Pinned] = field(default_factory=dict)
    positions: dict[tuple[str, ClusterPartition], tuple[int, str]] = field(default_factory=dict)
    behind: dict[ClusterPartition, set[int]] = field(default_factory=dict)
    pinned_ms: int = 0
    read_ms: int = 0

    def tell_offset(self, log: Log, offset: int, *, start: bool, stable: bool) -> None:
        """An answer to ListOffsets."""
        if start:
            self.pins[log.place] = Pinned(offset)
        elif stable:
            self.pins[log.place].stable_end = offset
        elif self.pins[log.place].end < 0:  # asked twice: what counts was told before the stable end
            self.pins[log.place].end = offset

    def tell_batches(self, log: Log, base: int, first: int, end: int) -> None:
        """A fetch was answered with batches from `base` on, of which offsets [first, end) were asked for."""
        behind = range(max(base, first), min(log.start, end))
        self.behind.setdefault(log.place, set()).update(behind)

    def tell_positions(self, mirror: Mirror) -> None:
        """A mirror's positions topic was read."""
        for log in mirror.logs():
            told = mirror.position(log)
            if told is not None:
                self.positions[mirror.aggregate, log.place] = told
