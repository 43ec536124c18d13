"""The batches of a fetch as plain bytes, whatever they were compressed with, ready for the scan.

Called by `task_reader`, one `Unpacker` a task. Records of many small batches are unpacked side by side into
one buffer, which is used again and again: the scan is then called once for all of them, what it reads is
still in the processor's cache, and memory does not grow with the data. A producer's usual batch is 16 KB; a
Python step for each would cost more than unpacking it.

A part that is given out is valid until the next one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from millrace.audit.scanning.range_reader import DAMAGED, FetchedBatches, offsets_of
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.batch import COMPRESSION_MASK
from millrace.broker.protocol.batch_kernels import B_ATTRIBUTES, B_END, B_MAGIC, B_POSITION, B_RECORDS
from millrace.broker.protocol.compression import LZ4, NONE, decompress
from millrace.broker.protocol.lz4_kernels import NO_ROOM, SLACK, unpack_frames

MAX_DECOMPRESSED_SIZE = 256 << 20  # a batch that unpacks to more is refused, not believed
BUFFER_SIZE = 1 << 20  # stays in the processor's cache
_ALONE_PART = (
    4  # unpacked by a library and as large as this part of the buffer, records are not copied together
)


class Unpacker:
    """Not thread-safe; one for each task."""

    def __init__(self, buffer_size: int = BUFFER_SIZE) -> None:
        self._buffer = np.empty(buffer_size + SLACK, np.uint8)
        self._plain = self._buffer.view()
        self._plain.flags.writeable = False
        self._room = buffer_size
        self._unread: Callable[[int, int, str], None] | None = None

    def parts(
        self,
        batches: FetchedBatches,
        distrust: Callable[[str], None],
        unread: Callable[[int, int, str], None] | None = None,
    ) -> Iterator[FetchedBatches]:
        """The fetch's uncompressed batches where they are, then the others unpacked, some or many at a time.

        Rows that are to be skipped (B_MAGIC not 2) are left out. `distrust` is told of batches that cannot be
        unpacked, `unread` of their offsets: what they held is not known.
        """
        self._unread = unread
        index = batches.index
        codecs = index[:, B_ATTRIBUTES] & COMPRESSION_MASK
        wanted = index[:, B_MAGIC] == 2
        packed = wanted & (codecs != NONE)
        if not packed.any():
            yield batches
            return
        plain = wanted & ~packed
        if plain.any():
            yield FetchedBatches(batches.buffer, index[plain])
        lz4 = packed & (codecs == LZ4)
        if lz4.any():
            yield from self._unpack_lz4(batches.buffer, index[lz4], distrust)
        others = packed & ~lz4
        if others.any():
            yield from self._unpack_by_library(batches.buffer, index[others], distrust)

    def _unpack_lz4(
        self, source: NDArray[np.uint8], index: NDArray[np.int64], distrust: Callable[[str], None]
    ) -> Iterator[FetchedBatches]:
        row, last = 0, len(index)
        while row < last:
            done, why = unpack_frames(source, index, B_RECORDS, row, self._buffer, 0)
            if done > row:
                index[row:done, B_POSITION] = index[row:done, B_RECORDS]
                yield FetchedBatches(self._plain, index[row:done])
                row = done
                if row == last or why == NO_ROOM:
                    continue
            if row < last:
                yield from self._unpack_by_library(source, index[row : row + 1], distrust)
                row += 1

    def _unpack_by_library(
        self, source: NDArray[np.uint8], index: NDArray[np.int64], distrust: Callable[[str], None]
    ) -> Iterator[FetchedBatches]:
        view, out = source.data, self._buffer.data
        done, used = 0, 0
        sizes: list[int] = []  # of rows from `done` on, one behind the other in the buffer
        for row, (first, end, attributes) in enumerate(index[:, [B_RECORDS, B_END, B_ATTRIBUTES]].tolist()):
            try:
                section = decompress(attributes & COMPRESSION_MASK, view[first:end], MAX_DECOMPRESSED_SIZE)
            except KafkaError as problem:
                distrust(f"batch that cannot be decompressed ({type(problem).__name__})")
                index[row, B_MAGIC] = 0
                sizes.append(0)
                if self._unread is not None:
                    self._unread(*offsets_of(index[row]), DAMAGED)
                continue
            size = len(section)
            alone = size * _ALONE_PART > self._room
            if (alone or used + size > self._room) and sizes:
                yield self._placed(index[done:row], sizes)
                done, used, sizes = row, 0, []
            if alone:
                own = np.frombuffer(section, np.uint8)
                own.flags.writeable = False
                index[row, B_POSITION], index[row, B_RECORDS], index[row, B_END] = 0, 0, size
                yield FetchedBatches(own, index[row : row + 1])
                done = row + 1
                continue
            out[used : used + size] = section
            used += size
            sizes.append(size)
        if sizes:
            yield self._placed(index[done:], sizes)

    def _placed(self, index: NDArray[np.int64], sizes: list[int]) -> FetchedBatches:
        """Rows whose records are in the buffer one behind the other."""
        ends = np.cumsum(sizes)
        index[:, B_END] = ends
        index[:, B_POSITION] = index[:, B_RECORDS] = ends - sizes
        return FetchedBatches(self._plain, index)
