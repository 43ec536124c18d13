"""Giving back memory that only loading needed.

Loading numba maps LLVM, a library of over 100 MB, and touches most of its pages. Once the kernels are
loaded none of them is needed again; they are clean pages of a file, so this process can drop its hold on
them at once and get them back from the page cache should they ever be touched. A broker's resident memory
falls by more than half.

`MADV_DONTNEED` rather than `MADV_PAGEOUT`: the latter skips pages that another process maps too, and on
one machine several brokers and mirrors share the library. It would throw changed pages away, so only
mappings that cannot be written and have no private copy of any page (relocations make such) are named.

Called at start-up, after the kernels are warm. `trim_heap` is called by the listener when large buffers have
been freed: the C library keeps such pages for itself otherwise. Linux only; elsewhere both do nothing.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4
_MAPPINGS = Path("/proc/self/smaps")
_COMPILER_LIBRARY = "llvmlite"
_MAPPING_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)$")


def release_compiler_pages() -> int:
    """Drops this process's hold on the pages of LLVM's library; returns how many bytes that were, 0 where
    it is not supported."""
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        mappings = list(clean_mappings(_MAPPINGS.read_text(), _COMPILER_LIBRARY))
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    released_size = 0
    for start, end, size in mappings:
        if madvise(start, end - start, _MADV_DONTNEED) == 0:
            released_size += size
    return released_size


def trim_heap() -> None:
    """Gives free pages of the C library's heap back to the system; a few ms for 100 MB."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def clean_mappings(smaps: str, library: str) -> Iterator[tuple[int, int, int]]:
    """(start, end, resident size) of each mapping of `library` in the text of /proc/self/smaps that cannot
    be written and holds no page of its own."""
    start = end = resident_size = 0
    is_candidate = False
    for line in smaps.splitlines():
        head = _MAPPING_HEAD.match(line)
        if head is not None:
            start, end = int(head[1], 16), int(head[2], 16)
            is_candidate = library in head[4] and "w" not in head[3]
        elif line.startswith("Rss:"):
            resident_size = int(line.split()[1]) * 1024
        elif line.startswith("Anonymous:") and is_candidate and int(line.split()[1]) == 0:
            yield start, end, resident_size
