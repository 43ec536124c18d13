"""Records that can be told apart, and what is known of them.

A value is `producer:number:padding`, unique in the run; numbers of one producer ascend. The shapes here are
what `checks.py` judges: contents as they were read, and what each part of the load has written down.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

EVENTS, ORDERS, COPIES = "events", "orders", "copies"
TOPICS: Mapping[str, int] = {EVENTS: 3, ORDERS: 2, COPIES: 3}
TRANSFORMERS = "transformers"
READERS = "readers"


class Found(NamedTuple):
    """A record as it was read."""

    offset: int
    value: bytes


Contents = Mapping[tuple[str, int], list[Found]]
"""What the visible part of each partition, (topic, partition), holds, in the order of reading."""


class Identity(NamedTuple):
    producer: str
    number: int


def value_of(producer: str, number: int, draw: random.Random) -> bytes:
    """With padding of a random length, so that batches and segments end anywhere."""
    return f"{producer}:{number}:{'x' * draw.randint(0, 150)}".encode()


def identity_of(value: bytes) -> Identity:
    """Raises ValueError for a value that the load never made."""
    producer, number, _ = value.split(b":", 2)
    return Identity(producer.decode(), int(number))


@dataclass(slots=True)
class ProducerJournal:
    """What one idempotent producer knows: where it sent each number, and where the acknowledged ones are.
    `unknown` are those it gave up on: there or not, but never twice."""

    name: str
    topic: str
    sent: dict[int, int] = field(default_factory=dict)
    acknowledged: dict[int, tuple[int, int]] = field(default_factory=dict)
    """number → (partition, offset)."""
    unknown: dict[int, str] = field(default_factory=dict)


class Outcome(Enum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"
    """All of it or nothing."""


@dataclass(slots=True)
class Transaction:
    """What one transaction wrote: (partition, number) in the order of sending."""

    name: str
    records: list[tuple[int, int]] = field(default_factory=list)
    outcome: Outcome = Outcome.OPEN


@dataclass(slots=True)
class TransactionJournal:
    """All transactions of one transactional producer."""

    name: str
    topic: str
    transactions: list[Transaction] = field(default_factory=list)


@dataclass(slots=True)
class GroupJournal:
    """What a group's members saw and what commits were acknowledged to them."""

    name: str
    seen: dict[tuple[str, int, int], bytes] = field(default_factory=dict)
    """(topic, partition, offset) → value."""
    contradictions: list[str] = field(default_factory=list)
    """An offset that had another value when it was seen again."""
    committed: dict[tuple[str, int], int] = field(default_factory=dict)
    """The highest offset whose commit was acknowledged."""

    def saw(self, topic: str, partition: int, offset: int, value: bytes) -> None:
        known = self.seen.setdefault((topic, partition, offset), value)
        if known != value:
            self.contradictions.append(
                f"{topic}-{partition}@{offset} was {known[:40]!r} and then {value[:40]!r}"
            )

    def acknowledged(self, topic: str, partition: int, offset: int) -> None:
        key = (topic, partition)
        self.committed[key] = max(offset, self.committed.get(key, -1))
