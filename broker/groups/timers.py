"""When something is due in which group, and the wait for the next of it.

The group coordinator's: every group whose state machine has a deadline is followed here, and `due` names
those whose time has come. All times are those of a steady clock, in milliseconds.

A deadline mostly moves further away (each heartbeat does that), so one that is noted is not moved: the group
is looked at when it comes, and followed anew. A group is to be followed whenever its deadline may have come
nearer; then its next deadline is noted, or an earlier one.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Iterator

from millrace.broker.groups.membership import Group


class GroupTimers:
    """See the module."""

    def __init__(self, steady_ms: Callable[[], int]) -> None:
        self._steady_ms = steady_ms
        self._noted: dict[str, int] = {}
        self._soonest: list[tuple[int, str]] = []
        self._stirred = asyncio.Event()

    def follow(self, group: Group) -> None:
        """Note the group's deadline, if it has one and none is noted that comes before."""
        deadline_ms = group.deadline_ms()
        if deadline_ms is None:
            return
        noted_ms = self._noted.get(group.group_id)
        if noted_ms is None or deadline_ms < noted_ms:
            self._noted[group.group_id] = deadline_ms
            heapq.heappush(self._soonest, (deadline_ms, group.group_id))
            if self._soonest[0][0] == deadline_ms:
                self._stirred.set()

    def due(self, now_ms: int) -> Iterator[str]:
        """Groups whose time has come, soonest first; each is to be followed anew. One that is followed before
        the next is asked for, and is due already, comes again."""
        while self._soonest and self._soonest[0][0] <= now_ms:
            due_ms, group_id = heapq.heappop(self._soonest)
            if self._noted.get(group_id) == due_ms:  # otherwise an earlier deadline took this one's place
                del self._noted[group_id]
                yield group_id

    def stir(self) -> None:
        """End the wait under way: there is something else to be done."""
        self._stirred.set()

    async def wait(self, until_ms: int | None) -> None:
        """Until the next group is due, or something stirs, or `until_ms` if there is such a time."""
        ends_ms = [] if until_ms is None else [until_ms]
        if self._soonest:
            ends_ms.append(self._soonest[0][0])
        self._stirred.clear()
        wait_ms = min(ends_ms) - self._steady_ms() if ends_ms else None
        if wait_ms is not None and wait_ms <= 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                await self._stirred.wait()
