"""What does not work now, why, and since when. Pure.

Kept where things fail (`sources.source`, `topics.topics`, `delivery.sink`), put together by `control.status`
for the status, the metrics and the readiness: what is tried without end must not be tried in silence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

ALL_TOPICS = "*"
"""Stands for the topic where what fails is of all that a source has."""

K = TypeVar("K", bound=Hashable)

# A leader that moves, a broker that restarts: over by then, and nobody's business.
LASTING_AFTER_MS = 30_000
# Longer than any transaction may stay open by a broker's default (transaction.max.timeout.ms).
HANGING_AFTER_MS = 900_000


class Failure(NamedTuple):
    """`reason` is the newest, for people; `since_ms` is when the first of the row was (time of day)."""

    reason: str
    since_ms: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """Of a partition, or of a whole topic (`partition` None), or of ALL_TOPICS of a source."""

    source: str
    topic: str
    partition: int | None
    reason: str
    since_ms: int

    def for_ms(self, now_ms: int) -> int:
        return max(0, now_ms - self.since_ms)

    def order(self) -> tuple[int, str, str, int]:
        """The oldest first."""
        return self.since_ms, self.source, self.topic, -1 if self.partition is None else self.partition

    def describe(self, now_ms: int) -> str:
        where = self.topic if self.partition is None else f"{self.topic}-{self.partition}"
        return f"{self.source}/{where} for {self.for_ms(now_ms) // 1000} s: {self.reason}"

    def as_row(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "topic": self.topic,
            "partition": self.partition,
            "reason": self.reason,
            "since_ms": self.since_ms,
        }


class Failures(Generic[K]):
    """What fails now, by what it is of."""

    def __init__(self) -> None:
        self._failures: dict[K, Failure] = {}

    def failed(self, key: K, reason: str, now_ms: int) -> None:
        before = self._failures.get(key)
        self._failures[key] = Failure(reason, now_ms if before is None else before.since_ms)

    def over(self, key: K) -> None:
        """It works, or is nothing to us any more."""
        if self._failures:
            self._failures.pop(key, None)

    def get(self, key: K) -> Failure | None:
        return self._failures.get(key)

    def __iter__(self) -> Iterator[tuple[K, Failure]]:
        return iter(list(self._failures.items()))


def topic_troubles(failures: Iterable[tuple[tuple[str, str], Failure]]) -> list[Trouble]:
    """Of whole topics, by source and topic."""
    return [Trouble(source, topic, None, *failure) for (source, topic), failure in failures]


def held_back(held_ms: int, stable_end: int, now_ms: int) -> Failure | None:
    """What an open transaction at the source holds back, once it has for so long that nobody may end it."""
    if held_ms < HANGING_AFTER_MS:
        return None
    reason = (
        "a transaction at the source has been open for long and holds back what follows offset "
        f"{stable_end}; see kafka-transactions.sh find-hanging there"
    )
    return Failure(reason, now_ms - held_ms)
