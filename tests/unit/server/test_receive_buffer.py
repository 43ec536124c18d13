"""What a connection has received takes as much memory as it must, and gives it back."""

from __future__ import annotations

import random
import struct

import pytest

from millrace.broker.server import receive_buffer
from millrace.broker.server.connection_limits import ConnectionLimits
from millrace.broker.server.memory_limits import UNBOUNDED, AnswerBacklog, RequestMemory
from millrace.broker.server.receive_buffer import MAPPED_SIZE, Block, new_block
from tests import seeds
from tests.unit.server.connection_stage import BUFFER_SIZE, LARGEST_REQUEST, QUEUE_SIZE, Server, request


def test_announced_size_alone_takes_no_memory() -> None:
    server = Server(lambda _body: b"")
    server.receive(struct.pack(">i", LARGEST_REQUEST) + bytes(100))
    assert len(server.connection.received.block) == BUFFER_SIZE


def test_buffer_shrinks_to_what_is_used() -> None:
    server = Server(lambda _body: b"")
    server.receive(request(bytes(500_000)))
    assert len(server.connection.received.block) >= 500_000
    server.connection.received.shrink()
    assert len(server.connection.received.block) >= 500_000  # it was needed since the last look
    server.receive(request(bytes(20_000))[:10_000])
    server.connection.received.shrink()
    assert BUFFER_SIZE < len(server.connection.received.block) <= 16_384  # half a frame is here
    server.receive(request(bytes(20_000))[10_000:])
    server.connection.received.shrink()
    server.connection.received.shrink()
    assert len(server.connection.received.block) == 0
    server.receive(request(b"after"))
    assert server.seen[-1] == b"after"


def test_whole_requests_need_no_memory_of_the_connection() -> None:
    server = Server(lambda _body: b"")
    server.receive(request(bytes(1_000)) * 100)
    assert len(server.seen) == 100
    assert len(server.connection.received.block) == 0


def test_buffer_counts_in_the_memory_of_all_requests() -> None:
    memory = RequestMemory()
    server = Server(lambda _body: b"", memory=memory)
    server.receive(request(bytes(500_000))[:-1])
    assert memory.used == len(server.connection.received.block) - BUFFER_SIZE > 400_000
    server.receive(b"x")
    server.connection.received.shrink()
    server.connection.received.shrink()
    assert memory.used == 0
    server.receive(request(bytes(500_000))[:-1])
    server.connection.connection_lost(None)
    assert memory.used == 0


@pytest.mark.parametrize("is_held", [False, True])
def test_a_buffer_that_is_grown_without_a_copy_keeps_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    """Also, then by a copy, while somebody still looks at what was received before."""
    made: list[int] = []

    def making(capacity: int) -> Block:
        made.append(capacity)
        return new_block(capacity)

    monkeypatch.setattr(receive_buffer, "new_block", making)
    rng = random.Random(seeds.given())
    limits = ConnectionLimits(
        request_max_size=16 << 20,
        receive_buffer_size=BUFFER_SIZE,
        backlog=AnswerBacklog(UNBOUNDED, LARGEST_REQUEST, QUEUE_SIZE),
        memory=RequestMemory(),
    )
    bodies = [rng.randbytes(size) for size in (MAPPED_SIZE - 12, 2 * MAPPED_SIZE + 1, 10, 5 * MAPPED_SIZE)]
    held: list[memoryview] = []
    server = Server(lambda _body: b"", limits=limits)
    for number, body in enumerate(bodies):
        stream = request(body)
        at = rng.randrange(1, len(stream))
        server.receive(stream[:at])
        if is_held:
            held.append(server.connection.received.view[:4])
        server.receive(stream[at:])
        assert server.seen[number] == body
        server.connection.received.shrink()
    assert len(server.connection.received.block) >= 5 * MAPPED_SIZE
    assert is_held or max(made) == MAPPED_SIZE
    server.connection.received.shrink()
    server.connection.received.shrink()
    assert len(server.connection.received.block) == 0 == limits.memory.used
