"""Readers that wait for data: a fetch that found too little sleeps here until an append wakes it.

`replica_manager.py` registers a waiting fetch with the partitions it reads and the bytes it still misses,
and calls `appended` whenever readers may see more of a partition. A waiter is woken once and told which
partitions something happened to; what it finds there, it reads itself. All on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from millrace.broker.protocol.topic_partition import TopicPartition

ANY_CONSUMER = -1

MANY_PARTITIONS = 4_000
"""A fetch of more does not stand with each: 100,000 would take 80 ms. It is asked at every change instead."""


class WaitEnd(NamedTuple):
    """How a wait ended: whether before its time, and the partitions in which anything changed meanwhile."""

    in_time: bool
    touched: set[TopicPartition]


class WaitingFetch:
    """One fetch request at rest. `woken` is done when enough may have come, or something changed."""

    __slots__ = ("keys", "missing_size", "read_committed", "reader", "touched", "woken")

    def __init__(
        self,
        keys: Mapping[TopicPartition, object],
        missing_size: int,
        reader: int,
        woken: asyncio.Future[None],
        *,
        read_committed: bool,
    ) -> None:
        self.keys = keys
        self.missing_size = missing_size
        self.reader = reader
        self.read_committed = read_committed
        self.touched: set[TopicPartition] = set()
        self.woken = woken


class WaitingFetches:
    """All waiting fetches by partition."""

    def __init__(self) -> None:
        self._by_partition: dict[TopicPartition, dict[WaitingFetch, None]] = {}
        self._of_many: dict[WaitingFetch, None] = {}
        self._noted: list[set[TopicPartition]] = []
        self.change_count = 0
        """Grows with every append and disturbance: by it, who has read and is about to wait sees whether
        something came in between, of which nobody could wake it."""

    def __len__(self) -> int:
        of_few = {waiter for waiters in self._by_partition.values() for waiter in waiters}
        return len(of_few) + len(self._of_many)

    async def wait(
        self,
        keys: Iterable[TopicPartition],
        missing_size: int,
        timeout_seconds: float,
        reader: int = ANY_CONSUMER,
        *,
        read_committed: bool = False,
    ) -> WaitEnd:
        """Sleep until `missing_size` more bytes are visible in the partitions together, or time is up.
        `reader` is the broker id of a follower."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        asked = dict.fromkeys(keys)
        waiter = WaitingFetch(asked, missing_size, reader, woken, read_committed=read_committed)
        self._enter(waiter)
        timer = loop.call_later(timeout_seconds, _expire, waiter)
        try:
            await waiter.woken
        except TimeoutError:
            return WaitEnd(False, waiter.touched)
        finally:
            timer.cancel()
            self._leave(waiter)
        return WaitEnd(True, waiter.touched)

    def _enter(self, waiter: WaitingFetch) -> None:
        if len(waiter.keys) > MANY_PARTITIONS:
            self._of_many[waiter] = None
            return
        for key in waiter.keys:
            self._by_partition.setdefault(key, {})[waiter] = None

    def _leave(self, waiter: WaitingFetch) -> None:
        if self._of_many.pop(waiter, waiter) is None:
            return
        for key in waiter.keys:
            waiters = self._by_partition.get(key)
            if waiters is not None:
                waiters.pop(waiter, None)
                if not waiters:
                    del self._by_partition[key]

    def _waiting_for(self, key: TopicPartition) -> Iterable[WaitingFetch]:
        waiters: Iterable[WaitingFetch] = self._by_partition.get(key, ())
        if self._of_many:
            return [*waiters, *(waiter for waiter in self._of_many if key in waiter.keys)]
        return waiters

    @contextmanager
    def noting_changes(self) -> Iterator[set[TopicPartition]]:
        """The partitions that change meanwhile: for who reads with others' turns in between, and has to look
        at these again before it waits."""
        changed: set[TopicPartition] = set()
        self._noted.append(changed)
        try:
            yield changed
        finally:
            self._noted = [noted for noted in self._noted if noted is not changed]

    def appended(self, key: TopicPartition, size: int, stable_size: int | None = None) -> None:
        """`size` more bytes of the partition may be read now, by readers of committed data `stable_size`."""
        self.change_count += 1
        for noted in self._noted:
            noted.add(key)
        if stable_size is None:
            stable_size = size
        for waiter in self._waiting_for(key):
            waiter.missing_size -= stable_size if waiter.read_committed else size
            waiter.touched.add(key)
            if waiter.missing_size <= 0 and not waiter.woken.done():
                waiter.woken.set_result(None)

    def disturbed(self, key: TopicPartition) -> None:
        """The partition changed hands or is gone: whoever waits must look again."""
        self.change_count += 1
        for noted in self._noted:
            noted.add(key)
        for waiter in self._waiting_for(key):
            waiter.touched.add(key)
            if not waiter.woken.done():
                waiter.woken.set_result(None)

    def give_up(self, key: TopicPartition, reader: int) -> None:
        """`reader` wants its waiting fetch of the partition answered now, as if its time were up."""
        for waiter in self._waiting_for(key):
            if waiter.reader == reader:
                _expire(waiter)


def _expire(waiter: WaitingFetch) -> None:
    if not waiter.woken.done():
        waiter.woken.set_exception(TimeoutError())
