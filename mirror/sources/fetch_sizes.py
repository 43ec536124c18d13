"""How much a fetch asks for: the farther behind its partitions are, the more. Pure.

Called by `source` before each fetch. An answer is a round trip and some hundred microseconds whatever its
size, and small batches are merged within one answer only: a backlog goes the faster, the more of it comes at
once. Near the log's end it changes nothing, for no answer holds more than there is; in between, a backlog
comes in several answers, so that one is fetched while the last one is on its way.

The memory rule (`fetch_memory`) has the last word: nothing here asks for more than it gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ANSWERS_OF_A_BACKLOG = 4
MOST_OF_A_LOOK = 64 << 20
"""For what stands beside one batch no more is asked for: a quarter of what the client takes as one answer,
and more than Apache Kafka gives (`fetch.max.bytes` there, 55 MiB)."""
MORE_SIZE = 64 << 10


class FetchSizes(NamedTuple):
    """Bytes: of the answer, and of each partition in it."""

    answer: int
    partition: int


def fetch_sizes(usual: FetchSizes, most: FetchSizes, behind: Sequence[int]) -> FetchSizes:
    """What to ask for where partitions are `behind` by so many bytes (0: not known).

    From `usual` on it grows with the backlog, up to `most`; where that is less than `usual` nothing grows.
    """
    return FetchSizes(
        _grown(usual.answer, most.answer, sum(behind)),
        _grown(usual.partition, most.partition, max(behind, default=0)),
    )


def larger_look(given: int, times: int = 1, needed: int = 0) -> int:
    """What to ask for after an answer of `given` bytes did not tell, for so many times; `needed`: as much,
    where that is known. Always more than the answer had, so that what follows its first batch is seen,
    however large that is."""
    return max(given + MORE_SIZE, min(MOST_OF_A_LOOK, max((given << times) + MORE_SIZE, needed)))


def _grown(usual: int, most: int, behind: int) -> int:
    return max(usual, min(most, behind // ANSWERS_OF_A_BACKLOG))
