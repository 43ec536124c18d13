"""Answers go out in the order of their requests, and no client makes the broker keep too many of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from millrace.broker.errors import ProtocolError, Unanswered
from millrace.broker.server.connection import MOST_PENDING, SEND_HIGH_WATER, Connection
from millrace.broker.server.dispatch import Throttled
from millrace.broker.server.memory_limits import (
    STALL_SECONDS,
    UNBOUNDED,
    AnswerBacklog,
)
from millrace.broker.server.receive_buffer import LANDING_SIZE
from millrace.broker.telemetry.logs import RateLimit
from tests.unit.server.connection_stage import (
    BUFFER_SIZE,
    LARGEST_REQUEST,
    QUEUE_SIZE,
    NotingTransport,
    Server,
    request,
)
from tests.waiting import until_async as until


def test_answers_keep_the_order_of_requests() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        futures = {body: loop.create_future() for body in (b"1", b"3")}
        server = Server(lambda body: futures.get(body, b"<" + body + b">"))
        server.receive(b"".join(request(body) for body in (b"0", b"1", b"2", b"3", b"4")))
        assert bytes(server.transport.written) == b"<0>"
        futures[b"3"].set_result([b"<", b"3>"])
        await asyncio.sleep(0)
        assert bytes(server.transport.written) == b"<0>"
        futures[b"1"].set_result(None)  # nothing to send for this one
        await asyncio.sleep(0)
        assert bytes(server.transport.written) == b"<0><2><3><4>"

    asyncio.run(scenario())


def test_a_request_that_is_given_up_closes_the_connection() -> None:
    """The answers behind it would wait for their turn for ever, and so would their client."""

    async def scenario() -> None:
        given_up = asyncio.get_running_loop().create_future()
        server = Server(lambda body: given_up if body == b"1" else b"<" + body + b">")
        server.receive(request(b"1") + request(b"2"))
        given_up.cancel()
        await asyncio.sleep(0)
        assert server.transport.aborted and bytes(server.transport.written) == b""

    asyncio.run(scenario())


def test_control_request_runs_alone() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def control() -> bytes:
            await release.wait()
            return b"<control>"

        server = Server(lambda body: control() if body == b"control" else b"<" + body + b">")
        server.receive(request(b"control") + request(b"next"))
        await asyncio.sleep(0)
        assert server.seen == [b"control"]
        release.set()
        await until(lambda: bytes(server.transport.written) == b"<control><next>")

    asyncio.run(scenario())


def test_what_is_left_to_be_waited_for_holds_up_no_request_behind_it() -> None:
    async def scenario() -> None:
        acknowledged = asyncio.get_running_loop().create_future()

        async def heavy() -> asyncio.Future[bytes]:
            return acknowledged

        server = Server(lambda body: heavy() if body == b"heavy" else b"<" + body + b">")
        server.receive(request(b"heavy") + request(b"next"))
        assert server.seen == [b"heavy"]
        await until(lambda: server.seen == [b"heavy", b"next"])
        assert bytes(server.transport.written) == b""
        acknowledged.set_result(b"<heavy>")
        await until(lambda: bytes(server.transport.written) == b"<heavy><next>")

    asyncio.run(scenario())


def test_full_buffer_behind_a_waiting_request_pauses_reading() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        release = loop.create_future()

        async def control() -> bytes:
            await release
            return b""

        server = Server(lambda body: control() if body == b"control" else b"")
        rest = b"".join(request(b"x" * 100) for _ in range(4_000))
        taken = server.receive(request(b"control") + rest)
        assert not server.transport.reading
        assert taken < LANDING_SIZE + BUFFER_SIZE < len(rest)
        release.set_result(None)
        await until(lambda: server.transport.reading)
        server.receive((request(b"control") + rest)[taken:])
        assert len(server.seen) == 4_001

    asyncio.run(scenario())


def test_peer_that_does_not_read_is_not_answered_further() -> None:
    backlog = AnswerBacklog(UNBOUNDED, LARGEST_REQUEST, 1 << 20)
    server = Server(lambda _body: bytes(100_000), backlog=backlog)
    server.transport.stalled = server.connection
    server.receive(request(b"x" * 100) * 4_000)
    seen = len(server.seen)
    assert (1 << 20) - 100_000 <= len(server.transport.written) - SEND_HIGH_WATER <= (1 << 20) + 200_000
    assert not server.transport.reading
    assert len(server.transport.written) - SEND_HIGH_WATER <= backlog.held + 100_000
    server.transport.stalled = None
    server.transport.unread_size = 0
    server.connection.resume_writing()
    assert len(server.seen) > seen
    assert server.transport.reading
    assert backlog.held == 0


def test_backlog_of_all_shrinks_what_one_may_queue() -> None:
    backlog = AnswerBacklog(8 << 20, LARGEST_REQUEST, 1 << 20)
    server = Server(lambda _body: bytes(100_000), backlog=backlog)
    server.transport.stalled = server.connection
    backlog.set("somebody else", 8 << 20, 0.0)
    server.receive(request(b"x" * 100) * 1_000)
    assert len(server.transport.written) <= SEND_HIGH_WATER + (256 << 10) + 200_000


def test_reading_some_is_progress() -> None:
    backlog = AnswerBacklog(1 << 20, LARGEST_REQUEST, 1 << 20)
    server = Server(lambda _body: bytes(1 << 20), backlog=backlog)
    server.transport.stalled = server.connection
    server.receive(request(b"x"))
    began = server.connection.last_active
    server.connection.look_at_reader(began + 1)
    server.connection.look_at_reader(began + STALL_SECONDS - 1)
    assert backlog.overdue(began + STALL_SECONDS + 1) == [server.connection]
    server.transport.unread_size += 1_000  # more is queued
    server.connection.look_at_reader(began + STALL_SECONDS)
    server.transport.unread_size -= 1_000  # it reads
    server.connection.look_at_reader(began + STALL_SECONDS + 1)
    assert backlog.overdue(began + STALL_SECONDS + 2) == []
    server.connection.connection_lost(None)
    assert backlog.held == 0


def test_throttled_client_is_answered_at_once_and_then_not_heard_for_a_while() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        server = Server(lambda body: Throttled(b"<slow>", 60) if body == b"slow" else b"<" + body + b">")
        server.receive(request(b"slow") + request(b"next") + request(b"more"))
        began = loop.time()
        assert bytes(server.transport.written) == b"<slow>"
        assert server.seen == [b"slow"]
        assert server.metrics.throttled_requests == 1
        await until(lambda: len(server.seen) == 3)
        assert loop.time() - began >= 0.059
        assert bytes(server.transport.written) == b"<slow><next><more>"

        silent = Server(lambda _body: Throttled(None, 60_000))
        silent.receive(request(b"acks=0") * 2)
        assert len(silent.seen) == 1
        silent.connection.connection_lost(None)
        assert silent.connection._muted is None  # the timer would keep it in memory

    asyncio.run(scenario())


def test_throttled_answer_waits_for_its_turn() -> None:
    async def scenario() -> None:
        first = asyncio.get_running_loop().create_future()
        server = Server(lambda body: first if body == b"first" else Throttled(b"<slow>", 30))
        server.receive(request(b"first") + request(b"slow"))
        assert bytes(server.transport.written) == b""
        assert server.metrics.throttled_requests == 0
        first.set_result(Throttled([b"<fi", b"rst>"], 10))
        await asyncio.sleep(0)
        assert bytes(server.transport.written) == b"<first><slow>"
        assert server.metrics.throttled_requests == 2
        server.receive(request(b"third"))
        assert len(server.seen) == 2
        await until(lambda: len(server.seen) == 3)

    asyncio.run(scenario())


def test_refused_connection_is_dropped_before_it_says_a_word() -> None:
    server = Server(lambda _body: b"")
    refused = Connection(
        server,  # type: ignore[arg-type]
        server.metrics,
        server.connection._limits,
        RateLimit(lambda: 0.0),
        server.gone.append,
        lambda connection: connection.client_address != "10.0.0.1",
    )
    transport = NotingTransport()
    refused.connection_made(transport)  # type: ignore[arg-type]
    assert transport.aborted
    assert server.metrics.connections_opened == 1


def test_answers_that_wait_for_their_turn_are_bounded() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        first = loop.create_future()
        server = Server(lambda body: first if body == b"first" else bytes(4_000))
        server.receive(request(b"first") + request(b"large") * 10)
        assert len(server.seen) == 1 + 3  # 12,000 bytes parked are more than the queue may hold
        first.set_result(b"")
        await asyncio.sleep(0)
        assert len(server.seen) == 11
        assert len(server.transport.written) == 40_000

    asyncio.run(scenario())


def test_requests_are_taken_up_again_when_others_have_left_more_room_meanwhile() -> None:
    async def scenario() -> None:
        first = asyncio.get_running_loop().create_future()
        backlog = AnswerBacklog(8 << 20, LARGEST_REQUEST, 1 << 20)
        backlog.set("somebody else", 8 << 20, 0.0)
        server = Server(lambda body: first if body == b"first" else bytes(150_000), backlog=backlog)
        server.receive(request(b"first") + request(b"large") * 4)
        assert len(server.seen) == 1 + 2  # for want of room the others are not taken yet
        backlog.set("somebody else", 0, 1.0)
        first.set_result(b"")
        await asyncio.sleep(0)
        assert len(server.seen) == 5
        assert len(server.transport.written) == 600_000

    asyncio.run(scenario())


def test_requests_under_way_are_bounded() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[bytes]] = []

        def wait(_body: bytes) -> asyncio.Future[bytes]:
            futures.append(loop.create_future())
            return futures[-1]

        server = Server(wait)
        server.receive(request(b"x") * (MOST_PENDING + 5))
        assert len(futures) == MOST_PENDING
        futures[0].set_result(b"")
        await asyncio.sleep(0)
        assert len(futures) == MOST_PENDING + 1
        server.connection.connection_lost(None)
        assert all(future.done() for future in futures)  # nobody is left to answer
        assert server.gone == [server.connection]

    asyncio.run(scenario())


def test_peer_that_is_gone_is_not_waited_with() -> None:
    """A fetch may wait for a day; who has ended the connection reads no answer, and the socket would stay."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        waits = [loop.create_future(), loop.create_future()]
        server = Server(lambda body: waits[int(body)])
        server.receive(request(b"0") + request(b"1"))
        assert not server.connection.eof_received(), "the transport closes"
        assert all(wait.cancelled() for wait in waits)
        await asyncio.sleep(0)
        assert not server.transport.aborted and server.metrics.closes == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("rest", [b"", b"\0", request(b"never whole")[:-1]])
def test_peer_that_went_in_the_middle_of_a_request_is_counted_and_told_of(rest: bytes) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()

        async def control() -> bytes:
            await gate.wait()
            return b"answer"

        for answer in (lambda _: b"answer", lambda _: control()):
            server = Server(answer)
            server.receive(request(b"whole") + rest)
            with structlog.testing.capture_logs() as lines:
                goes_on = server.connection.eof_received()
                gate.set()
                if goes_on:
                    await until(lambda server=server: server.transport.closed)
            told = [line["received"] for line in lines if "middle of a request" in line["event"]]
            assert told == [len(rest)] * bool(rest)
            assert server.metrics.closes == ({"protocol: cut": 1} if rest else {})
            assert bytes(server.transport.written) == b"answer"

    asyncio.run(scenario())


def test_all_that_a_peer_sent_before_it_went_is_carried_out() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        gate, waits = asyncio.Event(), []

        async def control() -> bytes:
            await gate.wait()
            return b"answer"

        def answer(body: bytes) -> Any:
            if body == b"alone":
                return control()
            waits.append(loop.create_future())
            return waits[-1]

        server = Server(answer)
        many = MOST_PENDING + 3
        server.receive(request(b"alone") + b"".join(request(b"append") for _ in range(many)))
        assert server.connection.eof_received(), "requests wait for their turn"
        assert server.seen == [b"alone"]
        gate.set()
        await until(lambda: server.transport.closed)
        assert server.seen == [b"alone"] + [b"append"] * many
        assert all(wait.cancelled() for wait in waits)
        assert bytes(server.transport.written) == b"answer"
        assert not Server(lambda _body: b"").connection.eof_received()

    asyncio.run(scenario())


@pytest.mark.safety
def test_requests_that_many_others_held_up_are_carried_out_when_their_peer_goes() -> None:
    """The answers that they waited for are given up, and so nothing else would take them up."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        waits: list[asyncio.Future[bytes]] = []

        def answer(body: bytes) -> Any:
            if body == b"acks=0":
                return None
            waits.append(loop.create_future())
            return waits[-1]

        server = Server(answer)
        many = MOST_PENDING + 3
        server.receive(request(b"acks=all") * many + request(b"acks=0"))
        assert len(server.seen) == MOST_PENDING
        assert not server.connection.eof_received(), "the transport closes"
        assert server.seen == [b"acks=all"] * many + [b"acks=0"]
        assert all(wait.cancelled() for wait in waits)

    asyncio.run(scenario())


@pytest.mark.safety
def test_an_answer_that_comes_as_its_peer_goes_holds_up_no_request_behind_it() -> None:
    """It is more than may wait to be sent; but nobody is to have it."""

    async def scenario() -> None:
        fetched, gate = asyncio.get_running_loop().create_future(), asyncio.Event()

        async def alone() -> bytes:
            await gate.wait()
            return b""

        answers: dict[bytes, Callable[[], Any]] = {b"fetch": lambda: fetched, b"alone": alone}
        server = Server(lambda body: answers.get(body, lambda: None)())
        server.receive(request(b"fetch") + request(b"alone") + request(b"acks=0"))
        fetched.set_result(bytes(2 * QUEUE_SIZE))
        assert server.connection.eof_received(), "a request is under way"
        gate.set()
        await until(lambda: server.transport.closed)
        assert server.seen == [b"fetch", b"alone", b"acks=0"]

    asyncio.run(scenario())


def test_bytes_that_come_or_go_are_no_idleness() -> None:
    async def scenario() -> None:
        waiting = asyncio.get_running_loop().create_future()
        server = Server(lambda _body: waiting)
        moments = [server.connection.idle_since]
        whole = request(b"a large one")
        for piece in (whole[:5], whole[5:9], whole[9:]):
            server.receive(piece)
            moments.append(server.connection.idle_since)
        waiting.set_result(b"answer")
        await asyncio.sleep(0)
        moments.append(server.connection.idle_since)
        assert moments == sorted(set(moments))

    asyncio.run(scenario())


def test_protocol_error_of_a_later_answer_closes() -> None:
    async def scenario() -> None:
        async def broken() -> bytes:
            raise ProtocolError("no")

        server = Server(lambda _body: broken())
        server.receive(request(b"x"))
        await until(lambda: server.transport.aborted)
        assert server.metrics.connections_closed_for_protocol == 1

    asyncio.run(scenario())


def test_request_that_failed_and_cannot_be_answered_closes_and_is_told_once() -> None:
    async def scenario() -> None:
        async def failing() -> bytes:
            raise Unanswered("no place to say so")

        def failing_at_once(_body: bytes) -> bytes:
            raise Unanswered("no place to say so")

        for answer in (lambda _body: failing(), failing_at_once):
            server = Server(answer)
            with structlog.testing.capture_logs() as lines:
                server.receive(request(b"x"))
                await until(lambda server=server: server.transport.aborted)
            assert server.metrics.closes == {"failure": 1}
            assert server.metrics.connections_closed_for_protocol == 0
            assert not server.transport.written
            assert [line["event"] for line in lines] == ["connection closed: its request failed"]

    asyncio.run(scenario())
