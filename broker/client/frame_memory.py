"""Memory for large answers, used again and again.

A `Cluster` that is given a `FrameMemory` receives its large answers into it (`connection._begin_frame`). The
C library's heap would take and give back megabytes by the moment at which buffers happen to be freed, and
keep holes between them: what a process holds then follows chance. Here it grows to what was under way at
most and stays there, and pages that were touched once are not cleared by the kernel anew.

A block belongs to whoever holds a view of it, or a view of such a view; it comes back by itself when the last
one is gone (`weakref.finalize` on what exports the memory). So nobody has to say that he is done, and a view
that was forgotten somewhere costs memory, never wrong bytes.

Where the system maps no memory ahead of its use (`vm.overcommit_memory=2`, `ulimit -v`), a block holds only
what was asked for, and is exchanged for a larger one when that is needed.

What must stay true: a block is given to nobody while a view of it lives; what lies unused is never more than
`limit()` in all with what is in use.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

SMALLEST = 32 << 10
"""Answers below this many bytes are left to the C library: a heap of small ones has no holes that matter."""
# What a block can hold at least; pages that no answer reached take no memory.
_LEAST_CAPACITY = 16 << 20
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@dataclass(slots=True, eq=False)
class _Block:
    """`touched` bytes of the mapping have pages; `era` is when it was used last."""

    memory: mmap.mmap
    touched: int
    era: int


class FrameMemory:
    """See the module's text. Not for several threads at once.

    `limit` gives how many bytes may be kept in all, in use or not. More is given out when it is asked for,
    but not kept.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._free: list[_Block] = []
        # A count and not a set that is summed up: collecting garbage may give blocks back at any moment.
        self._in_use = 0
        self._era = 0
        self._maps_ahead = _may_map_ahead()

    @property
    def held(self) -> int:
        """Bytes of memory, in use or not."""
        return sum(block.touched for block in self._free) + self.in_use

    @property
    def in_use(self) -> int:
        """Bytes of the blocks that somebody holds."""
        return self._in_use

    def take(self, size: int) -> memoryview:
        """Writable memory of `size` bytes, whose content is anything. Raises MemoryError."""
        block = self._fitting(size)
        if block is None:
            block = _Block(self._map(size), 0, 0)
        block.touched, block.era = max(block.touched, size), self._era
        self._in_use += block.touched
        self._drop_excess()
        exporter = (ctypes.c_ubyte * len(block.memory)).from_buffer(block.memory)
        weakref.finalize(exporter, self._back, block).atexit = False
        return memoryview(cast(bytes, exporter)).cast("B")[:size]

    def _map(self, size: int) -> mmap.mmap:
        least = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        ahead = max(_LEAST_CAPACITY, 1 << (size - 1).bit_length())
        for capacity in (ahead if self._maps_ahead else least, least):
            try:
                return mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError:
                self._maps_ahead = False
                self._free.clear()  # what lies unused may be what is missing
        raise MemoryError(
            f"no memory is left for an answer of {size} bytes: give the process more (ulimit -v, the limit "
            "of its container, vm.overcommit_ratio), or fetch less at once"
        )

    def rest(self) -> None:
        """Called every few minutes: gives back what nobody needed since the call before the last."""
        self._free = [block for block in self._free if block.era >= self._era]
        self._era += 1

    def _fitting(self, size: int) -> _Block | None:
        """Of the free blocks the one with the fewest pages that hold `size` bytes; if none has as many, the
        one with the most. Of equal ones that which came back last, so that the others can be given back."""
        best: _Block | None = None
        for block in reversed(self._free):
            if len(block.memory) < size:
                continue
            if best is None or _rank(block, size) < _rank(best, size):
                best = block
        if best in self._free:  # it may just have been dropped: then it is as good, and ours alone
            self._free.remove(best)
        return best

    def _back(self, block: _Block) -> None:
        self._in_use -= block.touched
        self._free.append(block)
        self._drop_excess()

    def _drop_excess(self) -> None:
        excess = self.held - self._limit()
        while excess > 0 and self._free:
            excess -= self._free.pop(0).touched  # its mapping ends with it


def _may_map_ahead() -> bool:
    """Whether memory that is mapped and not touched costs nothing."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    try:
        return _OVERCOMMIT.read_text().strip() != "2"
    except OSError:
        return True


def _rank(block: _Block, size: int) -> tuple[bool, int]:
    is_short = block.touched < size
    return is_short, -block.touched if is_short else block.touched
