"""Bytes that claim more than there is: compiled loops check no bound by themselves.

Everything is read in memory that ends at a page which cannot be read: a read beyond it kills the process.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import subprocess
import sys
from collections import Counter

from millrace.broker.errors import InvalidRecord, KafkaError
from millrace.broker.protocol.batch import HEADER_SIZE, parse_header, seal
from millrace.broker.protocol.rewrite import rewrite, section_of
from millrace.mirror.batches.coalesce import BatchWalk, section_rows
from millrace.mirror.batches.intake import prepare
from millrace.mirror.batches.rebatch import split
from tests.unit.mirror.fetch_answers import NO_LIMIT, Raw, random_answer, raw_batch

LYING = """
import random, sys
from tests.unit.mirror.test_lying_bytes import lie
lie(random.Random(int(sys.argv[1])), int(sys.argv[2]))
"""


def test_lying_bytes_are_never_followed_out_of_the_buffer() -> None:
    """In a process of its own: the bytes end at a page that cannot be read; a read beyond them kills it."""
    done = subprocess.run([sys.executable, "-c", LYING, "5", "200"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2_000:]


def lie(rng: random.Random, rounds: int) -> None:
    outcomes: Counter[str] = Counter()
    for _ in range(rounds):
        answer = random_answer(rng.randrange(1 << 30), batches=rng.randrange(1, 8))
        for _ in range(rng.randrange(1, 4)):
            _damage(rng, answer.data)
        _seal_all(answer.data)
        guarded = _before_a_wall(bytes(answer.data))
        try:
            for each in prepare(BatchWalk(), guarded, answer.aborted, 0, NO_LIMIT, lambda *_: None):
                outcomes["unreadable"] += bool(each.unreadable)
                if each.batch is not None:
                    split(_before_a_wall(bytes(each.batch)), each.offsets)
            outcomes["read"] += 1
        except KafkaError as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["read"] and outcomes["unreadable"], outcomes
    lie_twice()


def lie_twice() -> None:
    """Every two bytes of a record that is the last thing in the buffer claim to be larger: one lie alone is
    found out by the other numbers."""
    honest = Raw(0, 0, b"kk", b"vv", ((b"h", b"x"),)).encode()
    header = parse_header(raw_batch([], record_count=1, last_offset_delta=0, body=honest))
    for first, second in itertools.combinations(range(len(honest)), 2):
        for one, other in ((0x7E, 0x7E), (0xFE, 0x7E), (0x7E, 0xFE), (0xFE, 0xFE)):
            records = bytearray(honest)
            records[first], records[second] = one, other
            guarded = _before_a_wall(bytes(records))
            row = section_rows([section_of(header, 0, len(records))])
            try:
                rewrite(guarded, row, 0)
            except InvalidRecord:
                continue


def _damage(rng: random.Random, data: bytearray) -> None:
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
        data += b"\x00"
        return
    place = rng.randrange(len(data))
    data[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _seal_all(data: bytearray) -> None:
    """Gives every batch that can be found a right checksum, so that its records are looked at."""
    position = 0
    while len(data) - position >= HEADER_SIZE:
        try:
            header = parse_header(data, position)
        except KafkaError:
            return
        if header.size > len(data) - position:
            return
        seal(memoryview(data)[position : position + header.size])
        position += header.size


def _before_a_wall(data: bytes) -> memoryview:
    """The same bytes, at the very end of memory that can be read."""
    page = mmap.PAGESIZE
    pages = -(-len(data) // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(memory, pages * page))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(wall), page, 0) == 0
    start = pages * page - len(data)
    memory[start : pages * page] = data
    return memoryview(memory)[start : pages * page]


def test_the_wall_is_one() -> None:
    code = (
        "import ctypes; from tests.unit.mirror.test_lying_bytes import _before_a_wall;"
        "m = _before_a_wall(b'x' * 10);"
        "a = ctypes.addressof(ctypes.c_char.from_buffer(m));"
        "print(ctypes.string_at(a, 10), flush=True); ctypes.string_at(a, 11)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "b'xxxxxxxxxx'" and done.returncode < 0
