"""The sockets' side of kazoo's threads, as kazoo uses it: what is ready, what timed out, what is gone."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest
from kazoo.handlers.utils import selector_select

from millrace.broker.coordination.session import PollingHandler

Pair = tuple[socket.socket, socket.socket]

SELECTS = [
    pytest.param(PollingHandler().select, id="own"),
    pytest.param(selector_select, id="kazoo"),
]
"""kazoo's own is held against the same expectations."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.mark.parametrize("select", SELECTS)
def test_what_can_be_read_and_written_is_ready(select, pair: Pair) -> None:
    left, right = pair
    assert select([left, right], [], [], 0) == ([], [], [])
    right.send(b"x")
    assert select([left, right], [], [], None) == ([left], [], [])
    assert select([], [left], [], 5) == ([], [left], [])


@pytest.mark.parametrize("select", SELECTS)
def test_what_cannot_be_written_is_waited_for_in_vain(select, pair: Pair) -> None:
    left, _ = pair
    left.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            left.send(bytes(1 << 16))
    assert select([left], [left], [], 0.001) == ([], [], [])


@pytest.mark.parametrize("select", SELECTS)
def test_an_end_is_something_to_read(select, pair: Pair) -> None:
    left, right = pair
    right.close()
    assert select([left], [], [], 5)[0] == [left]
    assert left.recv(1) == b""


@pytest.mark.parametrize("select", SELECTS)
def test_what_was_closed_here_is_a_wrong_call(select, pair: Pair) -> None:
    left, _ = pair
    left.close()
    with pytest.raises(TypeError):
        select([left], [], [], 0)


@pytest.mark.parametrize("select", SELECTS)
def test_descriptors_may_be_many(select, pair: Pair) -> None:
    left, right = pair
    high = 2_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, high + 1), hard))
    try:
        os.dup2(left.fileno(), high)
        with socket.socket(fileno=high) as far:
            right.send(b"x")
            assert select([far], [], [], 5)[0] == [far]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
