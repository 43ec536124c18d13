"""What a connection has received and not handed out yet, and the memory that this is in.

Received bytes land in one piece of memory that all connections share (`LandingArea`): it stays in the
processor's cache, where a buffer for each connection would not. What is left of them, a part of a frame or
what has to wait, moves to a block of the connection's own, and so do frames that are larger than the landing
area. That block grows as bytes arrive, never because a frame announces a size, and shrinks again when it is
not needed. All beyond its first size is taken from the memory of all requests (`memory_limits.py`).

Owned by `connection.py`, which looks for frames in `view[start:end]` by itself and moves `start` behind each:
a call for each frame would cost more than finding it. It receives so: `space`, then for bytes in the landing
area `enter_landing`, the frames, `leave_landing`, for others `end`, the frames; then `make_room`.

Invariants: no byte that is not handed out is lost, or comes out of order; while `is_pinned` no byte is moved;
what the block has beyond its first size is what was taken of the memory, whenever nothing is being parsed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable

from millrace.broker.server.memory_limits import RequestMemory

LANDING_SIZE = 256 << 10
"""Most bytes that are received at once: so many that system calls do not count, so few that a core's cache
holds them."""

MOST_MOVED = 16 << 10
"""How much of an unfinished frame may be moved to the landing area to go on there."""

MAPPED_SIZE = 1 << 20
"""From here on a connection's own block is memory mapped for it alone: no byte of it is touched before it is
received, and to grow moves none. Doubled and copied, 64 MiB hold the event loop for a tenth of a second."""

Block = bytearray | mmap.mmap
Own = tuple[Block, memoryview]
"""A connection's own block and the view of it."""

_size_at = struct.Struct(">i").unpack_from


def new_block(capacity: int) -> Block:
    if capacity < MAPPED_SIZE:
        return bytearray(capacity)
    return mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class LandingArea:
    """Memory into which every connection receives, one after the other.

    It is a connection's from its `get_buffer` to the end of its `buffer_updated`, which event loops call back
    to back.
    """

    __slots__ = ("block", "usable_size", "view")

    def __init__(self, first_size: int) -> None:
        """A connection's own block has `first_size`, or twice, four times ... as much."""
        self.usable_size = first_size
        while 2 * self.usable_size <= LANDING_SIZE:
            self.usable_size *= 2
        self.block = bytearray(self.usable_size)
        self.view = memoryview(self.block)


class ReceiveBuffer:
    """See the module."""

    __slots__ = (
        "_first_size",
        "_grows_to",
        "_landing",
        "_memory",
        "_peak",
        "_room_came",
        "block",
        "end",
        "is_landing",
        "is_pinned",
        "start",
        "view",
    )

    def __init__(
        self, first_size: int, landing: LandingArea, memory: RequestMemory, room_came: Callable[[], None]
    ) -> None:
        """`room_came` is called when there is memory again that `make_room` had to do without."""
        self._first_size = first_size
        self._landing = landing
        self._memory = memory
        self._room_came = room_came
        self.block: Block = bytearray()
        """What is parsed: the connection's own, or for a moment the landing area."""
        self.view = memoryview(self.block)
        self.start = 0
        """First byte not yet handed out."""
        self.end = 0
        """First byte not yet received."""
        self.is_landing = False
        """The next bytes come to the landing area, after what is kept here."""
        self.is_pinned = False
        """A frame in the block is still being worked on."""
        self._grows_to = 0  # what the block is to have room for once nobody receives into it
        self._peak = 0  # how full the block has been since it was last looked at

    # -- receiving -----------------------------------------------------------------------------------

    def space(self, is_stalled: Callable[[], bool]) -> memoryview:
        """Where the next bytes are to be received; never empty after a `make_room` that found some.
        `is_stalled` says whether frames have to wait: then they would only leave the landing area again."""
        if self._grows_to:
            self._resize(self._grows_to)
        kept = self.end - self.start
        landing = self._landing
        usable = landing.usable_size
        # What cannot be parsed at once must find its place in the connection's own block.
        own = max(len(self.block), self._first_size)
        if own < usable and not self._memory.has_room(usable - own):
            usable = own
        self.is_landing = kept <= min(MOST_MOVED, usable // 2) and own <= usable and not is_stalled()
        if self.is_landing:
            if kept:
                landing.view[:kept] = self.view[self.start : self.end]
            return landing.view[kept:usable]
        if not self.block:
            self._resize(self._first_size)
        return self.view[self.end :]

    def enter_landing(self, size: int) -> Own:
        """So many bytes have come to the landing area: `start` and `end` are places there from now on. What
        is returned is for `leave_landing`."""
        self.is_landing = False
        own = self.block, self.view
        self.start, self.end = 0, self.end - self.start + size
        self.block, self.view = self._landing.block, self._landing.view
        return own

    def leave_landing(self, own: Own, *, is_closed: bool) -> bool:
        """Back to the connection's own block with what has not been handed out, if there is a connection any
        more. Whether `make_room` is due."""
        landed = self.view[self.start : self.end]
        kept = 0 if is_closed else len(landed)
        self.block, self.view = own
        self.start = self.end = 0
        if not kept:
            return bool(self._memory.waiting)
        capacity = max(len(self.block), self._first_size)
        while capacity < kept:
            capacity *= 2
        if capacity > len(self.block):
            extra = capacity - max(len(self.block), self._first_size)
            if extra and not self._memory.take(self, extra, self._room_came):
                raise RuntimeError("bytes were received for which there was no room")
            self._resize(capacity)
        self.view[:kept] = landed
        self.end = kept
        self._peak = max(self._peak, kept)
        return kept == len(self.block) or bool(self._memory.waiting)

    def make_room(self, is_stalled: Callable[[], bool]) -> bool:
        """Leave free space after what has been received. False: nothing may be received until this was asked
        again, as there is no memory for it, or as frames have to wait (`is_stalled`)."""
        self._peak = max(self._peak, self.end)
        if self.is_pinned:
            return self.end < len(self.block)
        if self.start == self.end:
            self.start = self.end = 0
        waiting = self._memory.waiting
        if waiting and self not in waiting:
            self.give_room_back()
        capacity = len(self.block)
        if capacity and self.end == capacity:
            if self.start > 0:
                # The move is within one block; memoryview assignment allows the overlap.
                kept = self.end - self.start
                self.view[:kept] = self.view[self.start : self.end]
                self.start, self.end = 0, kept
            elif not self._grows_to and (is_stalled() or not self._grow()):
                return False
            # Otherwise one frame fills the block and goes on: its bytes are here, so the room is earned.
        return True

    # -- memory --------------------------------------------------------------------------------------

    def _grow(self) -> bool:
        """Twice the room; False when all connections together hold too much, and this one must wait."""
        capacity = len(self.block)
        kept = self.end - self.start
        (size,) = _size_at(self.block, self.start) if kept >= 4 else (0,)
        if not self._memory.take(self, capacity, self._room_came, request_size=size):
            return False
        if 2 * capacity < MAPPED_SIZE:
            self._resize(2 * capacity)
        else:
            self._grows_to = 2 * capacity
        return True

    @property
    def extra_size(self) -> int:
        """What the block has beyond its first size; counted in the memory of all requests."""
        return max(max(len(self.block), self._grows_to) - self._first_size, 0)

    def shrink(self) -> None:
        """Give back what has not been needed since the last call; to be called now and then."""
        wanted, self._peak = self._peak, self.end
        if wanted <= len(self.block) // 2:
            self.give_room_back(wanted)

    def give_room_back(self, wanted: int = 0) -> None:
        """Shrink the block to what is in it, or to `wanted` bytes where that is more."""
        if self.is_pinned:
            return
        extra = self.extra_size
        needed = max(self.end - self.start, wanted)
        smaller = self._first_size if needed else 0
        while smaller < needed + 1 and needed:
            smaller *= 2
        if smaller < len(self.block):
            self._resize(smaller)
            self._memory.give_back(self, extra - self.extra_size, whole=smaller <= self._first_size)

    def release(self) -> None:
        """The connection has ended: all memory is given back, and nothing is received any more."""
        self._memory.give_back(self, self.extra_size, whole=True)
        self._room_came = _nobody  # or the connection and this would keep each other
        self.block = bytearray()
        self.view = memoryview(self.block)
        self.start = self.end = self._grows_to = 0

    def _resize(self, capacity: int) -> None:
        self._grows_to = 0
        if self.start == 0 and self._is_remapped(capacity):
            return
        grown = new_block(capacity)
        kept = self.end - self.start
        grown[:kept] = self.view[self.start : self.end]
        self.view.release()
        self.block, self.view = grown, memoryview(grown)
        self.start, self.end = 0, kept

    def _is_remapped(self, capacity: int) -> bool:
        """Whether the block could be given another size without a copy."""
        block = self.block
        if isinstance(block, bytearray) or capacity < MAPPED_SIZE:
            return False
        self.view.release()
        try:
            block.resize(capacity)
        except BufferError:  # somebody holds a view of what was received before
            return False
        finally:
            self.view = memoryview(block)
        return True


def _nobody() -> None:
    """Who hears of room that has come once the connection has ended."""
