"""Memory for large answers: whoever holds a view keeps it, and nothing is kept beyond the limit."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy
import pytest

from millrace.broker.client.frame_memory import FrameMemory
from tests import seeds
from tests.waiting import patience

KIB = 1024


def test_memory_is_used_again_and_only_when_nobody_looks_at_it() -> None:
    memory = FrameMemory(lambda: 1 << 30)
    first = memory.take(100 * KIB)
    first[:5] = b"first"
    part = first[2:5]
    seen = numpy.frombuffer(part.toreadonly(), numpy.uint8)
    del first, part  # the array looks at it still
    second = memory.take(100 * KIB)
    second[:5] = b"other"
    assert bytes(seen) == b"rst"
    assert memory.held == memory.in_use == 200 * KIB
    del seen
    assert memory.in_use == 100 * KIB
    third = memory.take(60 * KIB)
    assert (len(third), third.readonly, third.format) == (60 * KIB, False, "B")
    assert memory.held == 200 * KIB, "the first one's memory was used again"


def test_of_several_the_one_that_wastes_least_is_used() -> None:
    memory = FrameMemory(lambda: 1 << 30)
    views = [memory.take(size * KIB) for size in (800, 100, 400)]
    views.clear()
    small = memory.take(90 * KIB)
    assert memory.in_use == 100 * KIB
    large = memory.take(500 * KIB)
    assert memory.in_use == 900 * KIB
    grown = memory.take(700 * KIB)  # none is as large: the largest that is left grows
    assert memory.held == (800 + 100 + 700) * KIB
    del small, large, grown
    assert memory.in_use == 0


def test_no_more_is_kept_than_allowed_though_more_is_given() -> None:
    memory = FrameMemory(lambda: 1000 * KIB)
    views = [memory.take(400 * KIB) for _ in range(5)]
    assert memory.held == 2000 * KIB
    while views:
        views.pop()
        assert memory.held <= max(1000 * KIB, memory.in_use)
    assert memory.held == 800 * KIB


def test_what_nobody_needed_for_a_while_is_given_back() -> None:
    memory = FrameMemory(lambda: 1 << 30)
    views = [memory.take(400 * KIB) for _ in range(3)]
    views.clear()
    for _ in range(2):
        memory.rest()
        one = memory.take(400 * KIB)  # always the same one: the others rest
        del one
    assert memory.held == 400 * KIB
    kept = memory.take(400 * KIB)
    for _ in range(3):
        memory.rest()
    kept[:3] = b"abc"
    assert memory.held == 400 * KIB, "what somebody holds stays"
    del kept
    memory.rest()
    assert memory.held == 0


def test_no_view_ever_shows_what_another_holder_wrote() -> None:
    rng = random.Random(seeds.given())
    memory = FrameMemory(lambda: 40 * KIB)
    held: list[tuple[memoryview, bytes]] = []
    for number in range(3000):
        if held and rng.random() < 0.5:
            view, expected = held.pop(rng.randrange(len(held)))
            assert bytes(view) == expected
            del view
        if rng.random() < 0.02:
            memory.rest()
        frame = memory.take(rng.randint(1, 20 * KIB))
        mark = number.to_bytes(4, "big")
        frame[:] = (mark * (len(frame) // 4 + 1))[: len(frame)]
        part = frame[rng.randint(0, len(frame) // 2) :]  # a batch of it is kept, the frame is let go
        held.append((part, bytes(part)))
        del frame, part
        while len(held) > 6:
            held.pop(0)
        assert memory.held <= max(40 * KIB, memory.in_use)


@pytest.mark.parametrize("is_known", [True, False])
def test_system_that_maps_nothing_ahead_of_its_use_is_lived_with(is_known: bool) -> None:
    """As `vm.overcommit_memory=2` has it: room for the answers, and not for what they might need."""
    story = """
import mmap, resource
from millrace.broker.client.frame_memory import FrameMemory

def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE

def limit():
    resource.setrlimit(resource.RLIMIT_AS, (mapped() + (15 << 20), resource.RLIM_INFINITY))

if is_known:
    limit()
memory = FrameMemory(lambda: 1 << 30)
if not is_known:
    limit()
views = [memory.take(100_000) for _ in range(100)]
for number, view in enumerate(views):
    view[:] = bytes([number]) * len(view)
assert all(view[0] == view[-1] == number for number, view in enumerate(views))
try:
    memory.take(100 << 20)
except MemoryError as error:
    assert "no memory is left for an answer of 104857600 bytes" in str(error), error
else:
    raise SystemExit("more than there is")
del views, view
assert memory.in_use == 0
memory.take(8 << 20)[-1] = 1
print("lived")
"""
    done = subprocess.run(
        [sys.executable, "-c", f"is_known = {is_known}\n{story}"],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.stdout == "lived\n", done.stderr
