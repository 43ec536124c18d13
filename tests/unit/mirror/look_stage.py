"""What looks at a source's log are answered with, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from tests.unit.mirror.test_misplaced_batches import Log

Looked = Callable[[FetchPosition, FetchedPartition], FetchedPartition]


class Looks(list[int]):
    """The offsets that looks have asked for; each is answered as the log has it."""

    def __call__(self, asked: FetchPosition, given: FetchedPartition) -> FetchedPartition:
        self.append(asked.offset)
        return given


def refused(given: FetchedPartition, code: int) -> FetchedPartition:
    nothing = memoryview(b"")
    return replace(given, error_code=code, high_watermark=-1, last_stable_offset=-1, records=nothing)


def refusing(code: int | None, numbers: Collection[int]) -> Looked:
    """Looks with these numbers are answered with an error, or (None) with nothing; the first has number 0."""
    count = -1

    def looked(_asked: FetchPosition, given: FetchedPartition) -> FetchedPartition:
        nonlocal count
        count += 1
        if count not in numbers:
            return given
        return replace(given, records=memoryview(b"")) if code is None else refused(given, code)

    return looked


def told(events: list[tuple[int, int, str]]) -> set[int]:
    return {offset for first, following, _ in events for offset in range(first, following)}


def lone(log: Log) -> Log:
    log.most_given = 1
    return log
