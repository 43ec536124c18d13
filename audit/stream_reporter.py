"""The plain stream API: audit the records of any client, in any program that can send records with headers.

For adapters (`kafka_python_producer`, `aiokafka_producer`, `client_producer`) and for applications with a
client of their own. Nothing here sends or waits: the caller sends what it is given and tells what became of
it.

    reporter = StreamReporter({"millrace.producer": "AA@ewr"})
    stamp = reporter.stamp("flights")                # before the record is handed to the client
    client.send("flights", value, headers=[*headers, stamp.header], timestamp=stamp.created_ms)
    stamp.acknowledged(len(value))                   # or ambiguous(), failed(), not_taken()
    for event in reporter.report():                  # every reporter.interval_ms
        client.send(reporter.events_topic, event.value, key=event.key)
        event.delivered()                            # or event.failed(), too_large(): it is said again
    for event in reporter.close(): ...               # the last word; then reporter.finish()

Which fate a client's error means is the caller's to say; when in doubt `ambiguous`. `failed` and `not_taken`
are for records that surely never left: a record wrongly called failed that exists after all makes its window
UNKNOWN, one wrongly called acknowledged looks lost. The events topic is compacted, has one partition, and
must be made with `system_topics.AUDIT_TOPIC_SETTINGS`.

Settings are the `millrace.*` keys of `producer`; `sequenced=False` makes a count-only producer
(`count_stream`), which has no journal. Safe to call from any thread.
"""

from __future__ import annotations

import logging
import operator
import os
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.audit.clients.count_stream import CountStream
from millrace.audit.clients.interruption import refuse_inside
from millrace.audit.clients.producer_config import PREFIX, TOPIC_NAME, ProducerConfig, read_config
from millrace.audit.clients.recovery import open_journal
from millrace.audit.clients.session import StreamClosed, StreamSession
from millrace.audit.clients.told_stream import MAX_REFUSALS, UNTOLD, ProducerIdentity
from millrace.audit.contract.content_digest import record_digest
from millrace.audit.contract.events import CLOSED, CountEvent, Event, StreamEvent
from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_producer_name
from millrace.broker.errors import ConfigError

_log = logging.getLogger("millrace.audit.stream_reporter")

SETTLE_INTERVAL = 1024
FORKED = "a forked process must open its own producer: the parent's streams are not its own"
ENDED = "this producer is closed"
LOCKED = frozenset({"_open", "_retire", "close", "report"})
"""Methods that hold the reporter's lock (`interruption`)."""


class RecordStamp:
    """One record's place in the audit: what to send with it, and where to tell its fate, once.

    `header` is (key, value) for the record's headers, after the application's own; `created_ms` belongs into
    the record's timestamp.
    """

    __slots__ = ("_reporter", "_stream", "_told", "_window", "created_ms", "digest", "header", "sequence")

    def __init__(
        self,
        reporter: StreamReporter,
        stream: Any,
        window: Any,
        sequence: int,
        created_ms: int,
        header: bytes,
    ):
        self._reporter, self._stream, self._window = reporter, stream, window
        self._told = False
        self.sequence, self.created_ms = sequence, created_ms
        self.header = (HEADER_KEY, header)
        self.digest = 0

    @property
    def content(self) -> bool:
        """Whether `contains` is to be told."""
        return bool(self._stream.content)

    def contains(
        self,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str | bytes, bytes | None]] = (),
    ) -> None:
        """What the record holds, as bytes; does nothing unless `millrace.content.digest` is set."""
        if self._stream.content:
            self.digest = record_digest(self.sequence, key, value, headers)

    def acknowledged(self, size: int) -> None:
        """The cluster has the record; `size` is of its value in bytes."""
        if self._tell():
            stream = self._stream
            if self.sequence:
                self._window.acknowledge(self.sequence, size, self.digest)
            else:
                stream.acknowledge(self._window, 0, size, self.digest)
            self._reporter._acknowledged()

    def ambiguous(self) -> None:
        """Nobody knows whether the record exists."""
        if self._tell():
            self._stream.mark_ambiguous(self._window, self.sequence)
            self._reporter._not_acknowledged(self._stream, self._window)

    def failed(self) -> None:
        """The record surely was never sent."""
        if self._tell():
            self._stream.mark_failed(self._window, self.sequence)
            self._reporter._not_acknowledged(self._stream, self._window)

    def not_taken(self) -> None:
        """The client refused the record at once: its number goes to the next one."""
        if self._tell():
            self._stream.give_back(self._window, self.sequence)

    def _tell(self) -> bool:
        told, self._told = self._told, True
        return not told


@dataclass(frozen=True, slots=True)
class OutgoingEvent:
    """A record for the events topic. In the order they come: a stream's word follows its counts."""

    key: bytes
    value: bytes
    _on_delivered: Callable[[], None]
    _on_failed: Callable[[], None]
    _on_too_large: Callable[[], None]

    def delivered(self) -> None:
        """The cluster has it."""
        self._on_delivered()

    def failed(self) -> None:
        """It has not, or nobody knows: cumulative events can be said again."""
        self._on_failed()

    def too_large(self) -> None:
        """It has not, and takes no record of that size: it is told a few times more, then given up, and the
        audit is told that."""
        self._on_too_large()


class StreamReporter:
    """All streams of one producer start. Raises ConfigError for a wrong setting."""

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        sequenced: bool = True,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ):
        self._config: ProducerConfig = read_config(dict(settings or {}))
        for key, value in (settings or {}).items():
            if not key.startswith(PREFIX):
                raise ConfigError(key, value, f"a setting of the audit, which begins with {PREFIX}")
        if self._config.journal is not None and not sequenced:
            raise ConfigError(
                "millrace.journal", self._config.journal, "none: a count-only producer keeps no journal"
            )
        self._clock_ms = clock_ms
        self._kind: Any = StreamSession if sequenced else CountStream
        self._content = self._config.content
        self._identity = ProducerIdentity(
            session=secrets.token_hex(8),
            producer=self._config.producer,
            host=self._config.host,
            application=self._config.application,
            datacenter=self._config.datacenter,
        )
        name = encode_producer_name(self._config.producer)
        self._header_name = name if self._config.name_in_header or not sequenced else b""
        self._streams: dict[str, Any] = {}
        self._retired: list[Any] = []
        # Closed ones of which an event was not delivered: their closing is told again.
        self._closed_untold: set[Any] = set()
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._unsettled = 0
        self._journal = open_journal(self._config.journal, time.time_ns() // 1_000_000)
        self._owed: dict[str, str] = dict(self._journal.owed) if self._journal is not None else {}
        self._owed_refusals: Counter[str] = Counter()
        # Whether counts were given up, because no report of their size is taken.
        self.has_untold = False
        _living.add(self)

    @property
    def events_topic(self) -> str:
        return self._config.events_topic

    @property
    def content(self) -> bool:
        """Whether records' digests are asked for (`RecordStamp.contains`)."""
        return self._content

    @property
    def interval_ms(self) -> int:
        """How often `report` should be called."""
        return self._config.report_interval_ms

    @property
    def refusal(self) -> str | None:
        """Why nothing can be stamped any more, in a sentence; None while it works."""
        return self._refusal

    def stamp(self, topic: str, created_ms: int | None = None) -> RecordStamp:
        """Number a record that is about to be handed to the client. `created_ms` is its creation time (now).

        Raises TypeError for a time that is no whole number and a topic that is no text, ValueError for an
        impossible time, an illegal topic and the events' own, RuntimeError after the end or a fork.
        """
        if created_ms is not None:
            created_ms = operator.index(created_ms)
        while True:
            stream = self._streams.get(topic) or self._open(topic, clocked=created_ms is None)
            if created_ms is not None:
                moment_ms = created_ms
                if stream.promise_ms is not None:
                    stream.forgo_promises()
            else:
                moment_ms = self._clock_ms()
                if moment_ms < (stream.promise_ms or 0):
                    self._retire(stream)  # The clock was set back: the promise stands, and the time.
                    continue
            try:
                window, sequence = stream.assign(moment_ms)
            except StreamClosed:
                continue  # retired, or closed, since it was looked up
            try:
                if self._journal is not None and sequence > stream.reserved:
                    self._journal.reserve(stream, window, sequence)
                header = encode_identity(stream.prefix, sequence, moment_ms, self._header_name)
                return RecordStamp(self, stream, window, sequence, moment_ms, header)
            except BaseException:
                stream.give_back(window, sequence)
                raise

    def report(self) -> list[OutgoingEvent]:
        """What to publish now; empty after the end.

        Raises RuntimeError in a signal's handler that would wait for what it interrupted, as does `close`.
        """
        refuse_inside(self, "report", LOCKED)
        with self._lock:
            if self._refusal is not None:
                return []
            outgoing = self._take_owed()
            while self._closed_untold:
                self._retired.append(self._closed_untold.pop())
            for stream in list(self._streams.values()):
                if stream.is_worn:
                    self._follow(stream)
                else:
                    self._tell(stream, stream.report, outgoing)
            for stream in list(self._retired):
                done = stream.pending_count == 0
                if self._tell(stream, stream.close if done else stream.report, outgoing) and done:
                    self._retired.remove(stream)
            return outgoing

    def close(self) -> list[OutgoingEvent]:
        """The last events; what has no fate by now is ambiguous. Nothing is stamped any more."""
        refuse_inside(self, "close", LOCKED)
        with self._lock:
            if self._refusal is not None:
                return []
            self._refusal = ENDED
            streams = [*self._streams.values(), *self._retired, *self._closed_untold]
            self._streams, self._retired = {}, []
            outgoing = self._take_owed()
            for stream in streams:
                self.has_untold |= not self._tell(stream, stream.close, outgoing)
            return outgoing

    def finish(self) -> None:
        """Let go of the journal, after the last events' fates are known or given up. Safe to repeat."""
        _living.discard(self)
        if self._journal is not None:
            self._journal.close()

    def _open(self, topic: str, clocked: bool) -> Any:
        with self._lock:
            if self._refusal is not None:
                raise RuntimeError(self._refusal)
            if not isinstance(topic, str):
                raise TypeError(f"a topic's name is a text, not {type(topic).__name__}")
            if topic == self._config.events_topic:
                raise ValueError(f"topic {topic} is for the audit's own events")
            if not TOPIC_NAME.fullmatch(topic) or topic in (".", ".."):
                raise ValueError(f"illegal topic {topic[:40]!r}")
            stream = self._streams.get(topic)
            if stream is None:
                stream = self._kind(
                    self._identity,
                    topic,
                    secrets.token_hex(8),
                    window_ms=self._config.window_ms,
                    lease_ms=self._config.lease_ms,
                    promises=clocked,
                    content=self._content,
                )
                if self._journal is not None:
                    self._journal.opened(stream)
                self._streams[topic] = stream
            return stream

    def _retire(self, stream: Any) -> None:
        with self._lock:
            self._follow(stream)

    def _follow(self, stream: Any) -> None:
        """A new stream for the topic. Again it does nothing."""
        topic: str = stream.topic
        if self._streams.get(topic) is stream:
            del self._streams[topic]
            self._retired.append(stream)

    def _acknowledged(self) -> None:
        if self._journal is not None:
            self._unsettled += 1
            if self._unsettled >= SETTLE_INTERVAL:
                self._unsettled = 0
                self._journal.settle()

    def _not_acknowledged(self, stream: Any, window: Any) -> None:
        if self._journal is not None:
            self._journal.not_acknowledged(stream, window)

    def _take_owed(self) -> list[OutgoingEvent]:
        """The reports that an earlier start left in the journal; what fails goes out the next time."""
        owed, self._owed = self._owed, {}
        return [self._owed_event(key, value) for key, value in owed.items()]

    def _owed_event(self, key: str, value: str) -> OutgoingEvent:
        def delivered() -> None:
            if self._journal is not None:
                self._journal.carried(key)

        def failed() -> None:
            self._owed[key] = value

        def too_large() -> None:
            self._owed_refusals[key] += 1
            if self._owed_refusals[key] < MAX_REFUSALS:
                failed()
            else:
                self._given_up(key, "the next start with this journal tries again")

        return OutgoingEvent(key.encode(), value.encode(), delivered, failed, too_large)

    def _tell(self, stream: Any, make: Callable[[int], list[Event]], outgoing: list[OutgoingEvent]) -> bool:
        """Add a stream's events. Returns whether they could be made: where not, no other stream is kept back,
        and what they would have told is told next time."""
        events: list[Event] = []
        told: list[OutgoingEvent] = []
        try:
            events = make(self._clock_ms())
            for event in events:
                if self._journal is not None and isinstance(event, CountEvent):
                    self._journal.reported(stream, event)
                told.append(self._outgoing_event(stream, event))
        except Exception:
            for event in events:
                stream.report_again(event)
            _log.exception("stream %s of topic %s cannot be reported now", stream.stream, stream.topic)
            return False
        outgoing += told
        return True

    def _outgoing_event(self, stream: Any, event: Event) -> OutgoingEvent:
        def delivered() -> None:
            window = stream.report_delivered(event)
            if self._journal is None:
                return
            if window is not None:
                self._journal.delivered(stream, window)
            elif isinstance(event, StreamEvent) and event.state == CLOSED and stream.is_told:
                self._journal.gone(stream)

        def failed() -> None:
            stream.report_again(event)
            if stream.state == CLOSED:
                self._closed_untold.add(stream)

        def too_large() -> None:
            if stream.report_too_large(event):
                self._given_up(event.key, UNTOLD)
            if stream.state == CLOSED:
                self._closed_untold.add(stream)

        key, value = stream.encoded(event)
        return OutgoingEvent(key, value, delivered, failed, too_large)

    def _given_up(self, key: str, outlook: str) -> None:
        self.has_untold = True
        _log.error("report %s is too large for topic %s: %s", key, self.events_topic, outlook)


_living: weakref.WeakSet[StreamReporter] = weakref.WeakSet()


def _refuse_in_child() -> None:
    for reporter in list(_living):
        reporter._lock = threading.Lock()
        reporter._streams, reporter._retired = {}, []
        reporter._closed_untold = set()
        reporter._refusal = FORKED
        journal, reporter._journal = reporter._journal, None
        if journal is not None:
            journal.abandon()


os.register_at_fork(after_in_child=_refuse_in_child)
