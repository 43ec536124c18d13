"""Which faults a seed brings: pure, so that a seed says everything that is random about a run but its timing.

Kinds are dealt like cards: every kind comes once before any comes again, so that twenty rounds have all of
them several times, in ever other company. Two faults of one round never contradict each other: a broker's
process is the matter of one fault at a time, and so are a pair's connection, ZooKeeper and the small disk.
A power failure comes alone: of two at once, or of one whose broker is the last in sync, nobody can promise
anything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

from tests.cluster.faults.cluster import BROKERS, ZOOKEEPER, node_name

LATEST_BEGIN_S = 2.5
MOST_AT_ONCE = 3


class Kind(Enum):
    """What can go wrong, and what may be done to brokers at any time."""

    KILL = "SIGKILL, and a start again"
    POWER = "SIGKILL, and what was not flushed is gone"
    FREEZE = "SIGSTOP past the session timeout"
    PAUSE = "SIGSTOP within the session timeout"
    STUTTER = "stopped and continued again and again"
    SHUTDOWN = "controlled shutdown, and a start again"
    MOVE = "a restart on another port"
    CUT = "a cut between two brokers"
    CUT_ZOOKEEPER = "a cut between a broker and ZooKeeper"
    ISOLATE = "a broker that only its clients reach"
    ZOOKEEPER_RESTART = "ZooKeeper is killed and started with the same data"
    ZOOKEEPER_PAUSE = "ZooKeeper stands still"
    DISK_FULL = "a full disk"


LENGTHS_S: dict[Kind, tuple[float, float]] = {
    Kind.KILL: (0.1, 4.0),
    Kind.POWER: (0.1, 4.0),
    Kind.FREEZE: (4.0, 5.5),
    Kind.PAUSE: (0.3, 1.5),
    Kind.STUTTER: (2.0, 5.0),
    Kind.SHUTDOWN: (0.1, 3.0),
    Kind.MOVE: (0.1, 2.0),
    Kind.CUT: (2.0, 6.0),
    Kind.CUT_ZOOKEEPER: (1.0, 6.0),
    Kind.ISOLATE: (2.0, 6.0),
    Kind.ZOOKEEPER_RESTART: (0.1, 2.5),
    Kind.ZOOKEEPER_PAUSE: (1.0, 5.0),
    Kind.DISK_FULL: (1.0, 5.0),
}

OF_A_PROCESS = (
    Kind.KILL,
    Kind.POWER,
    Kind.FREEZE,
    Kind.PAUSE,
    Kind.STUTTER,
    Kind.SHUTDOWN,
    Kind.MOVE,
)


VARIANTS = {
    Kind.KILL: "and again",
    Kind.SHUTDOWN: "cut short",
    Kind.MOVE: "killed",
    Kind.CUT: "one way",
    Kind.CUT_ZOOKEEPER: "one way",
    Kind.ISOLATE: "but for ZooKeeper",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`nodes` are whom it befalls. `variant` is a coin for what a kind leaves open: a cut has one way or two,
    a killed broker is killed again as it starts, a shutdown is cut short, a move begins with a kill, a broker
    that is cut off keeps ZooKeeper."""

    kind: Kind
    nodes: tuple[str, ...]
    begin_s: float
    length_s: float
    variant: bool

    def __str__(self) -> str:
        how = f", {VARIANTS[self.kind]}" if self.variant and self.kind in VARIANTS else ""
        return f"{self.kind.name} {' '.join(self.nodes)} ({self.length_s:.1f} s{how})"


def rounds(seed: int, kinds: Sequence[Kind]) -> Iterator[tuple[Fault, ...]]:
    """The faults of one round after the other, for ever. `kinds` are those that can be done here."""
    draw = random.Random(f"faults {seed}")
    deck: list[Kind] = []
    while True:
        chosen: list[Fault] = []
        taken: set[tuple[str, ...]] = set()
        postponed: list[Kind] = []
        for _ in range(draw.randint(1, MOST_AT_ONCE)):
            if not deck:
                deck = draw.sample(list(kinds), len(kinds))
            kind = deck.pop()
            if kind is Kind.POWER and chosen:
                postponed.append(kind)
                continue
            nodes = _nodes(kind, draw, taken)
            if nodes is None:
                postponed.append(kind)
                continue
            taken.add(nodes)
            chosen.append(
                Fault(
                    kind,
                    nodes,
                    draw.uniform(0, LATEST_BEGIN_S),
                    draw.uniform(*LENGTHS_S[kind]),
                    draw.random() < 0.4,
                )
            )
            if kind is Kind.POWER:
                break
        deck = postponed + deck
        if chosen:
            yield tuple(sorted(chosen, key=lambda fault: fault.begin_s))


def _nodes(kind: Kind, draw: random.Random, taken: set[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Somebody whom nothing like it befalls in this round yet; None when there is nobody."""
    brokers = [node_name(number) for number in BROKERS]
    possible: list[tuple[str, ...]]
    if kind in OF_A_PROCESS:
        possible = [(broker,) for broker in brokers]
    elif kind is Kind.CUT:
        possible = [*combinations(brokers, 2), *combinations(reversed(brokers), 2)]
        possible = [pair for pair in possible if pair[::-1] not in taken]
    elif kind is Kind.CUT_ZOOKEEPER:
        possible = [(broker, ZOOKEEPER) for broker in brokers]
    elif kind is Kind.ISOLATE:
        possible = [("network", broker) for broker in brokers]
    elif kind is Kind.DISK_FULL:
        possible = [("disk", brokers[-1])]
    else:
        possible = [(ZOOKEEPER,)]
    free = [nodes for nodes in possible if nodes not in taken]
    return draw.choice(free) if free else None
