"""Which events a seed brings: pure, so that a seed says all that is random about a run but its timing.

Kinds are dealt like cards (every kind comes once before any comes again), alone or two at once. Two events
of one round never befall the same thing: a process, a link and the target's disk belong to one event at a
time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

SOURCES = ("ewr", "jfk")
TARGET = "agg"
WORKERS = ("worker-1", "worker-2")
SPARED = "worker-3"
"""Beside them in a long run, and nothing befalls it: its memory is looked at."""

SESSION_TIMEOUT_MS = 4_000
SLOW_BYTES_PER_S = 1_000_000
SHARE_OF_PAIRS = 0.35
LATEST_BEGIN_S = 1.5


class Kind(Enum):
    KILL_WORKER = "SIGKILL of a worker, and a start again"
    FREEZE_WORKER = "SIGSTOP of a worker past its session"
    KILL_SOURCE = "SIGKILL of a source's broker, and a start again"
    KILL_TARGET = "SIGKILL of the target's broker, and a start again"
    CUT_SOURCE = "a worker cut off from a source"
    CUT_TARGET = "a worker cut off from the target"
    SLOW_TARGET = "the target's link at 1 MB/s, with a burst to carry"
    DISK_FULL = "the target's disk is full"
    RECREATE = "a topic deleted and created again at a source"


LENGTHS_S: dict[Kind, tuple[float, float]] = {
    Kind.KILL_WORKER: (0.1, 3.0),
    Kind.FREEZE_WORKER: (SESSION_TIMEOUT_MS / 1000 + 1.0, SESSION_TIMEOUT_MS / 1000 + 2.5),
    Kind.KILL_SOURCE: (0.1, 3.0),
    Kind.KILL_TARGET: (0.1, 3.0),
    Kind.CUT_SOURCE: (1.0, 7.0),
    Kind.CUT_TARGET: (1.0, 7.0),
    Kind.SLOW_TARGET: (3.0, 5.0),
    Kind.DISK_FULL: (1.0, 4.0),
    Kind.RECREATE: (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Event:
    """`nodes` are whom it befalls: a worker, a source, the target, or a worker and the end it is cut off
    from."""

    kind: Kind
    nodes: tuple[str, ...]
    begin_s: float
    length_s: float

    def __str__(self) -> str:
        return f"{self.kind.name} {' '.join(self.nodes)} ({self.length_s:.1f} s)"

    @property
    def things(self) -> frozenset[str]:
        """What nothing else may befall meanwhile."""
        if self.kind in (Kind.CUT_SOURCE, Kind.CUT_TARGET):
            return frozenset({"-".join(self.nodes)})
        return frozenset(self.nodes)


SAMPLE = (
    (
        Event(Kind.KILL_WORKER, (WORKERS[0],), begin_s=0.0, length_s=0.5),
        Event(Kind.RECREATE, (SOURCES[0],), begin_s=0.2, length_s=0.0),
    ),
    (Event(Kind.KILL_TARGET, (TARGET,), begin_s=0.0, length_s=0.2),),
)
"""The rounds of the gate: none of them needs a network of its own."""


def rounds(seed: int, count: int, kinds: Sequence[Kind]) -> Iterator[tuple[Event, ...]]:
    """The events of one round after the other, `count` of them in all. `kinds` are those that can be done
    here."""
    draw = random.Random(f"mirror faults {seed}")
    deck: list[Kind] = []
    left = count
    while left:
        chosen: list[Event] = []
        wanted = 2 if left > 1 and draw.random() < SHARE_OF_PAIRS else 1
        while len(chosen) < wanted:
            if not deck:
                deck = draw.sample(list(kinds), len(kinds))
            event = _event(deck.pop(), draw)
            if any(event.things & other.things for other in chosen):
                deck.insert(0, event.kind)  # its turn comes later, in other company
                if all(kind is event.kind for kind in deck):
                    break
                continue
            chosen.append(event)
        left -= len(chosen)
        yield tuple(sorted(chosen, key=lambda event: event.begin_s))


def _event(kind: Kind, draw: random.Random) -> Event:
    worker, source = draw.choice(WORKERS), draw.choice(SOURCES)
    nodes = {
        Kind.KILL_WORKER: (worker,),
        Kind.FREEZE_WORKER: (worker,),
        Kind.KILL_SOURCE: (source,),
        Kind.RECREATE: (source,),
        Kind.CUT_SOURCE: (worker, source),
        Kind.CUT_TARGET: (worker, TARGET),
    }.get(kind, (TARGET,))
    return Event(kind, nodes, draw.uniform(0, LATEST_BEGIN_S), draw.uniform(*LENGTHS_S[kind]))
