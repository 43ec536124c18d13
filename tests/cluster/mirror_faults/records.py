"""Records that can be told apart, and what their writer knows of them. Pure.

A record's key is its identity, `source/topic/incarnation/partition/number`, and its value, headers and
timestamp follow from that, so that whoever reads it can tell that not a byte has changed. An incarnation is
one life of a topic: deleted and created again, it is another one. Numbers ascend within a stream (all but
the number).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.broker.protocol.records import Record

FLIGHTS, SHIFTING, AUDITED = "flights", "shifting", "audited"
PARTITIONS_AUDITED = 2
TOPICS = {FLIGHTS: 3, SHIFTING: 2}
"""And their partitions. SHIFTING is the one that is deleted and created again."""
ALL_TOPICS = TOPICS | {AUDITED: PARTITIONS_AUDITED}
"""With the one that audited producers write (`audited_load.py`)."""

FIRST_MS = 1_700_000_000_000
LEAST_SIZE, SIZES = 100, 800
PATTERN = bytes(range(256)) * 8


class Stream(NamedTuple):
    """Where order is promised."""

    source: str
    topic: str
    incarnation: int
    partition: int

    def __str__(self) -> str:
        return f"{self.source}/{self.topic}/{self.incarnation}/{self.partition}"


class Gap(NamedTuple):
    """What a gap's event says."""

    source: str
    topic: str
    partition: int
    from_offset: int
    to_offset: int
    gap_class: str
    at_ms: int
    has_open_end: bool = False


def record_of(stream: Stream, number: int) -> Record:
    key = f"{stream}/{number}".encode()
    mixed = number * 2_654_435_761 + stream.partition * 97 & 0xFFFFFFFF
    start = mixed % 256
    value = PATTERN[start : start + LEAST_SIZE + mixed // 256 % SIZES]
    return Record(key, value, (("number", b"%d" % number), ("none", None)), FIRST_MS + number)


def identity_of(key: bytes | None) -> tuple[Stream, int]:
    """Raises ValueError for a key that the load never made."""
    source, topic, incarnation, partition, number = (key or b"").decode().split("/")
    return Stream(source, topic, int(incarnation), int(partition)), int(number)


@dataclass(slots=True)
class Journal:
    """What one stream's writer was told. `runs`: (first number, count, first offset) of every acknowledged
    batch, in order; a number that is in none may be in the source or not."""

    stream: Stream
    next_number: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    ended_ms: int | None = None
    """When its topic was deleted."""
    settled_ms: int | None = None
    """When, after that, it was found whole or explained: later gaps are not its."""

    def take(self, count: int) -> Sequence[int]:
        """Numbers for one batch, which are never used again."""
        first = self.next_number
        self.next_number += count
        return range(first, first + count)

    def acknowledged(self, numbers: Sequence[int], base_offset: int) -> None:
        self.runs.append((numbers[0], len(numbers), base_offset))

    @property
    def acknowledged_count(self) -> int:
        return sum(count for _, count, _ in self.runs)
