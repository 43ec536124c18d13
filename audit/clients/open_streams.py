"""A producer's streams while they live: an open one for each topic, and those that were followed by another.

Held by `producer`. A topic's stream is followed by a new one when it has become long, so that one that runs
for years keeps not all its windows, and when the clock was set back behind what it has promised: the record
keeps the time that the clock shows, and the promise of the old stream stands.

Must stay true: a stream that was followed is told as closed only when nothing in it is pending; after `end`
none is opened. Safe from any thread; no callback of the application's is called from here.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from millrace.audit.clients.producer_config import TOPIC_NAME, ProducerConfig
from millrace.audit.clients.recovery import ProducerJournal
from millrace.audit.clients.session import StreamClosed, StreamSession, WindowCounts
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.contract.events import CLOSED, Event


class OpenStreams:
    """`by_topic` is looked at for every record, and is always the same dictionary."""

    def __init__(
        self, identity: ProducerIdentity, config: ProducerConfig, journal: ProducerJournal | None
    ) -> None:
        self.by_topic: dict[str, StreamSession] = {}
        self._identity, self._config, self._journal = identity, config, journal
        self._retired: list[StreamSession] = []
        self._refusal: str | None = None
        self._ended: list[StreamSession] = []
        self._lock = threading.Lock()

    def open(self, topic: str, *, clocked: bool) -> StreamSession:
        """The topic's stream, made where there is none. `clocked`: its records' times come from the clock.

        Raises TypeError, ValueError and KafkaException for what is no topic, RuntimeError after the end.
        """
        with self._lock:
            if self._refusal is not None:
                raise RuntimeError(self._refusal)
            self._check(topic)
            stream = self.by_topic.get(topic)
            if stream is None:
                stream = StreamSession(
                    self._identity,
                    topic,
                    secrets.token_hex(8),
                    window_ms=self._config.window_ms,
                    lease_ms=self._config.lease_ms,
                    promises=clocked,
                    content=self._config.content,
                )
                if self._journal is not None:
                    self._journal.opened(stream)
                self.by_topic[topic] = stream
            return stream

    def number(
        self,
        topic: str,
        timestamp: int,
        clock_ms: Callable[[], int],
        open_stream: Callable[[str, bool], StreamSession],
    ) -> tuple[StreamSession, WindowCounts, int, int]:
        """(stream, window, sequence, creation time) of a record that is in no stream's moment.

        `timestamp` is the application's, 0 for the clock's; `open_stream` opens one for a topic without (by
        `open`, the caller's way). Raises what that does, and ValueError for an impossible time.
        """
        while True:
            stream = self.by_topic.get(topic) or open_stream(topic, not timestamp)
            created_ms = stream.creation_time(timestamp) if timestamp else clock_ms()
            promise_ms = stream.promise_ms
            if promise_ms is not None and created_ms < promise_ms:
                self.retire(stream)  # The clock was set back: the promise stands, and the time.
                continue
            window = stream.current
            sequence = next(window.numbers, 0) if window.start_ms <= created_ms < window.end_ms else 0
            try:
                if not sequence:
                    window, sequence = stream.assign(created_ms)
            except StreamClosed:
                continue  # It was retired since it was looked up; the next one is open.
            return stream, window, sequence, created_ms

    def retire(self, stream: StreamSession) -> None:
        """Let the topic's next record open a new stream. Again it does nothing."""
        with self._lock:
            if self.by_topic.get(stream.topic) is stream:
                del self.by_topic[stream.topic]
                self._retired.append(stream)

    def tell_again(self, closed: StreamSession) -> None:
        """The closing of a stream was not delivered: it is told with the next reports."""
        self._retired.append(closed)

    def reports(self, clock_ms: Callable[[], int]) -> Iterator[tuple[StreamSession, list[Event], bool]]:
        """(stream, its events, whether they are its last) of all that live, made when they are asked for."""
        for stream in list(self.by_topic.values()):
            if stream.is_worn:
                self.retire(stream)
            else:
                yield stream, stream.report(clock_ms()), False
        for stream in list(self._retired):
            if stream.state == CLOSED or stream.pending_count == 0:
                self._retired.remove(stream)
                yield stream, stream.close(clock_ms()), True
            else:
                yield stream, stream.report(clock_ms()), False

    def end(self, refusal: str) -> list[StreamSession]:
        """All that live; from here on none is opened, for this reason. Safe to repeat: the same again."""
        with self._lock:
            self._refusal = refusal
            self._ended = self._ended or [*self.by_topic.values(), *self._retired]
            self.by_topic.clear()
            self._retired = []
            return list(self._ended)

    def forked(self, refusal: str) -> None:
        """In a child: they are the parent's. A thread that held the lock does not exist here."""
        self._refusal = refusal
        self._lock = threading.Lock()
        self.by_topic.clear()

    def _check(self, topic: Any) -> None:
        if not isinstance(topic, str):
            raise TypeError(f"a topic's name is a text, not {type(topic).__name__}")
        if topic == self._config.events_topic:
            raise ValueError(f"topic {topic} is for the audit's own events")
        if not TOPIC_NAME.fullmatch(topic) or topic in (".", ".."):
            raise KafkaException(KafkaError(KafkaError.TOPIC_EXCEPTION, f"illegal topic {topic[:40]!r}"))
