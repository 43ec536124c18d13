"""Giving back the compiler's pages: which mappings are named, and that kernels go on working after it."""

from __future__ import annotations

import subprocess
import sys

from millrace.broker.telemetry.memory import clean_mappings

SMAPS = """\
1000-3000 r--p 00000000 fe:00 12 /venv/llvmlite/binding/libllvmlite.so
Rss:                   8 kB
Anonymous:             0 kB
3000-5000 r-xp 00002000 fe:00 12                 /venv/a b/llvmlite/libllvmlite.so
Rss:                   4 kB
Anonymous:             0 kB
5000-6000 r--p 00004000 fe:00 12 /venv/llvmlite/binding/libllvmlite.so
Rss:                   4 kB
Anonymous:             4 kB
6000-7000 rw-p 00005000 fe:00 12 /venv/llvmlite/binding/libllvmlite.so
Rss:                   4 kB
Anonymous:             0 kB
7000-8000 r-xp 00000000 fe:00 13 /lib/libc.so.6
Rss:                   4 kB
Anonymous:             0 kB
8000-9000 rw-p 00000000 00:00 0
Rss:                   4 kB
Anonymous:             4 kB
"""

RELEASING = """
from millrace.broker.protocol.records import Record, build_batch, validate_records, warm_kernels
from millrace.broker.telemetry.memory import release_compiler_pages
import psutil
resident_size = lambda: psutil.Process().memory_info().rss
warm_kernels()
before = resident_size()
released = release_compiler_pages()
assert validate_records(build_batch([Record(b"k", b"v")])[61:], 1) == (0, 0, 0)
print(before, released, resident_size())
"""


def test_only_clean_mappings_of_the_library_are_named() -> None:
    assert list(clean_mappings(SMAPS, "llvmlite")) == [(0x1000, 0x3000, 8192), (0x3000, 0x5000, 4096)]


def test_release_shrinks_the_process_and_kernels_still_run() -> None:
    out = subprocess.run([sys.executable, "-c", RELEASING], check=True, capture_output=True, text=True).stdout
    before, released, after = map(int, out.split())
    assert released > 30_000_000
    assert after < before - 20_000_000
