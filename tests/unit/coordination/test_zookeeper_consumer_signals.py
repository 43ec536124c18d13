"""`ZookeeperConsumer.shutdown` by a signal's handler, in the middle of what it interrupts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millrace.broker.coordination.zookeeper_consumer import consumer as consumer_module
from millrace.broker.coordination.zookeeper_consumer.consumer import ZookeeperConsumer
from millrace.broker.coordination.zookeeper_consumer.options import ConsumerOptions
from millrace.broker.coordination.zookeeper_consumer.streams import Reading, StreamQueue
from millrace.broker.protocol.records import Record, build_batch
from tests.waiting import patience, until_async

ASK_TO_END = signal.SIGUSR1


class Connector:
    """One stream with two messages, full; `before_end` happens on the event loop when the end begins."""

    def __init__(self, *_: object) -> None:
        self.options = ConsumerOptions()
        self.consumer_id = "g_c"
        self.on_room: Callable[[], None] = lambda: None
        self.holders: list[object] = []
        self.before_end: Callable[[], Any] = lambda: None
        self.queue = StreamQueue(
            "t/0", max_chunks=1, max_size=1, read_committed=True, on_room=lambda: self.on_room()
        )
        reading = Reading(("t", 0), self.queue)
        self.queue.rewind(reading, 0)
        for number in range(2):
            records = [Record(None, b"%d" % number, (), number)]
            self.queue.put(reading, 1, memoryview(build_batch(records, base_offset=number)), ())

    async def start(self) -> None:
        return

    async def create_streams(self, _subscription: object) -> dict[tuple[str, int], StreamQueue]:
        return {("t", 0): self.queue}

    async def shutdown(self, holder: object) -> None:
        self.holders.append(holder)
        assert self.queue.room >= 0  # the fetcher asks for it here
        waiting = self.before_end()
        if waiting is not None:
            await waiting
        self.queue.close()


class Interrupted:
    """A consumer whose process is told to end by a signal; `asked` counts how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(consumer_module, "ConsumerConnector", Connector)
        self.consumer = ZookeeperConsumer("zk", "g")
        self.connector: Any = self.consumer._connector
        self.asked = 0

    def end(self, *_: object) -> None:
        self.consumer.shutdown()
        self.asked += 1


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupted]:
    def give_up(*_: object) -> None:
        raise AssertionError("the consumer waits for itself")

    made = Interrupted(monkeypatch)
    before = {
        number: signal.signal(number, handler)
        for number, handler in ((ASK_TO_END, made.end), (signal.SIGALRM, give_up))
    }
    signal.setitimer(signal.ITIMER_REAL, patience(10), 1)
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_who_is_interrupted_while_it_takes_a_message_gets_it_and_then_the_end(
    interrupted: Interrupted,
) -> None:
    (stream,) = interrupted.consumer.create_message_streams({"t": 1})["t"]
    interrupted.connector.on_room = lambda: signal.raise_signal(ASK_TO_END)  # the stream's lock is held
    taken = [message.value for message in stream]
    assert interrupted.asked > 0
    assert taken[:1] in ([], [b"0"])
    assert not interrupted.consumer._thread.is_alive(), "the stream ends when all has ended"
    assert interrupted.connector.holders == [None], "what was just taken has not been worked on"


def test_who_waits_for_a_message_is_told_of_the_end(interrupted: Interrupted) -> None:
    (stream,) = interrupted.consumer.create_message_streams({"t": 1})["t"]
    assert [next(stream).value, next(stream).value] == [b"0", b"1"]
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.0, signal.pthread_kill, (main, ASK_TO_END)).start()
    assert list(stream) == []
    assert interrupted.asked == 1


def test_a_second_signal_while_the_first_ends_it_waits_for_nothing(interrupted: Interrupted) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def second() -> Any:
        signal.pthread_kill(main, ASK_TO_END)
        return until_async(lambda: interrupted.asked == 1)

    interrupted.connector.before_end = second
    signal.raise_signal(ASK_TO_END)
    assert interrupted.asked == 2
    assert interrupted.connector.holders == [main]
    assert not interrupted.consumer._thread.is_alive()


def test_who_calls_again_when_all_has_ended_hears_nothing(interrupted: Interrupted) -> None:
    interrupted.consumer.shutdown()
    interrupted.consumer.shutdown()
    assert len(interrupted.connector.holders) == 1
