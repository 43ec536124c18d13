"""How much memory fetched batches may keep, and how much they do. Pure.

Held by `worker` (`FetchBudget`, one for all sources) and by each fetch loop of `source` (`HeldMemory`). A
batch that passes through is a view of its fetch answer's frame, and a view keeps the whole frame: one of
3 KB may keep megabytes. So frames are counted, each as a whole until its last batch is gone, and what a
rebuilt or copied batch takes for itself beside them.

    a loop's share = floor + ordinary room
    ordinary room    for every partition that wants a fetch, while the loop's answers keep less than that
    floor            for those alone that get on, while others stand (`PartitionPipeline.stands`), or while
                     partitions that have left the loop keep all, by batches that are under way

So partitions whose target does not take anything, for whatever reason, can fill the ordinary room: the others
go on in the floor. Of which kind one is that has nothing under way is known only when it has tried, so there
it gets the smallest fetch, until something of it was delivered: where a target takes nothing at all, its
partitions would each take the floor, one after the other. And each loop may hold one answer in any case, so
no source waits for another's target partitions.

Shares change when loops begin and end, so what all of them keep and have asked for bounds each of them, too.
A batch comes whole, whatever its size, so each loop may exceed that by one answer. Where what stands has
filled everything, nobody would ever find out who does not: there one answer at a time is fetched for those
that get on; and for those that try, unless their leader at the target is silent, with pauses that grow from a
second to a minute while what was tried before is kept still (`FetchLoop`). No other way leads beyond the
limit, but copies of batches of 64 KiB in all, for each loop, that leave answers which others keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MIN_FETCH_SIZE = 64 << 10
# The part of a share that is kept for those that get on while others stand.
FLOOR_PART = 8


class FetchBudget:
    """The worker's `in_flight_bytes`, shared equally by the fetch loops that are running."""

    def __init__(self, total_size: int) -> None:
        self._total_size = total_size
        self._loop_count = 0
        self.held_size = 0
        """Bytes that fetched batches keep now, of all loops, those that have ended too."""
        self.asked_size = 0
        """Bytes that answers may bring which are waited for."""
        self._share_out()

    def resize(self, total_size: int) -> None:
        self._total_size = total_size
        self._share_out()

    @property
    def loop_count(self) -> int:
        return self._loop_count

    @loop_count.setter
    def loop_count(self, count: int) -> None:
        self._loop_count = count
        self._share_out()

    def _share_out(self) -> None:
        self.share = max(2 * MIN_FETCH_SIZE, self._total_size // max(1, self._loop_count))
        """At least twice the smallest fetch: with more loops than that allows, `in_flight_bytes` is exceeded
        rather than nothing carried."""
        self.floor = max(MIN_FETCH_SIZE, self.share // FLOOR_PART)
        self.most_of_a_partition = max(MIN_FETCH_SIZE, self.share // 4)
        """One partition cannot take the others' room."""
        self.most_of_a_fetch = max(MIN_FETCH_SIZE, (self.share - self.floor) // 2)
        """Half of the ordinary room: an answer counts until its last batch is gone, and the next one is to be
        fetched meanwhile."""

    def left(self, held_size: int) -> int:
        """What a loop whose answers keep `held_size` may fetch at most, the floor included."""
        return min(self.share - held_size, self._total_size - self.held_size - self.asked_size)

    def room(self, held_size: int, moving_size: int, *, some_stand: bool) -> int:
        """What a loop may fetch whose answers keep `held_size`, `moving_size` of it for partitions that get
        on. Less than MIN_FETCH_SIZE: nothing now."""
        left = self.left(held_size)
        room = min(self.share - self.floor - held_size, left)
        if some_stand or not held_size:
            most = max(left, 0 if moving_size else MIN_FETCH_SIZE)
            return max(room, min(self.floor - moving_size, most))
        return room


class HeldMemory:
    """What the answers of one fetch loop keep."""

    def __init__(self, budget: FetchBudget) -> None:
        self.size = 0
        self._budget = budget

    def take(self, size: int, *, is_shared: bool = True) -> Frame:
        """Counts `size` bytes until the Frame is gone."""
        return Frame(self, size, is_shared=is_shared)

    @contextmanager
    def asking(self, size: int) -> Iterator[None]:
        """While an answer of at most `size` bytes is waited for: nobody else may take that room."""
        self._budget.asked_size += size
        try:
            yield
        finally:
            self._budget.asked_size -= size

    def add(self, size: int) -> None:
        self.size += size
        self._budget.held_size += size


class Frame:
    """Stands for memory: whoever keeps a view of that keeps this too. `is_shared`: others may have a part in
    it. Nobody has to say that he is done, so no way that a batch can go is forgotten."""

    __slots__ = ("_held", "is_shared", "size")

    def __init__(self, held: HeldMemory, size: int, *, is_shared: bool) -> None:
        self._held, self.size, self.is_shared = held, size, is_shared
        held.add(size)

    def apart(self, size: int) -> Frame:
        """For a batch of this answer that has memory of its own."""
        return self._held.take(size, is_shared=False)

    def __del__(self) -> None:
        self._held.add(-self.size)
