"""The audited producer: confluent-kafka's Producer that says what it published.

For applications: change one import. Calls, callbacks and settings stay confluent-kafka's; `acks=all` and
idempotence are the defaults. Every record gets the `_mr` header; counts of every topic and window go to the
events topic through the same connection. What is this module's own is configured by keys `millrace.*`:

    millrace.producer            name in headers and reports (default application@host)
    millrace.application         default: the script's name
    millrace.datacenter          default ""
    millrace.window.ms           60000
    millrace.report.interval.ms  10000
    millrace.lease.ms            silence after which it counts as dead (3 intervals, at least 60000)
    millrace.audit.topic         millrace.audit
    millrace.journal             a file's path: unreported counts survive kill -9 (default none)
    millrace.identity            full | compact (the producer's name is in the events only)

Differences from confluent-kafka: `transactional.id` and `delivery.report.only.error` are refused (counts need
every delivery report, outside of transactions); `produce_batch` goes record by record (the batch call
cannot set headers); without a `timestamp` the creation time is set here; after a fork the child's producer
refuses to work.

Threads: `produce`, `poll` and `flush` may be called from any. One thread of this module publishes the
reports; it never serves delivery callbacks, those run where the application calls `poll` or `flush`.

The per-record path allocates the header, one partial and the numbers, nothing else: it costs about as much as
confluent-kafka's own produce call, and every attribute access there is counted.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from millrace.audit.events import CLOSED, CountEvent, Event, StreamEvent, encode_event
from millrace.audit.events_topic import TopicState, ensure_events_topic
from millrace.audit.header import HEADER_KEY, encode_producer_name
from millrace.audit.journal import Journal
from millrace.audit.producer_config import ProducerConfig, read_config
from millrace.audit.recovery import ProducerJournal
from millrace.audit.session import ProducerIdentity, StreamClosed, StreamSession, WindowCounts

_log = logging.getLogger("millrace.audit.producer")

DeliveryCallback = Callable[[Any, Any], None]
MAX_WINDOWS_A_STREAM = 10_000
PURGE_TIMEOUT_S = 1.0
EXIT_TIMEOUT_S = 5.0
TOPIC_TIMEOUT_S = 5.0
MAX_TOPIC_ATTEMPTS = 3

# What confluent-kafka raises before it takes a record.
_NOT_TAKEN = (BufferError, KafkaException, NotImplementedError, OverflowError, TypeError, ValueError)

_produce = Producer.produce
_time_ns = time.time_ns


class AuditedProducer(Producer):
    """confluent-kafka's Producer, audited. Raises ConfigError for a wrong `millrace.*` setting."""

    def __init__(self, *configs: Mapping[str, Any], **settings: Any):
        merged: dict[str, Any] = {}
        for config in configs:
            merged.update(config)
        extras = {name: settings.pop(name) for name in ("logger",) if name in settings}
        merged.update(settings)
        self._config: ProducerConfig = read_config(merged)
        self._default_callback: DeliveryCallback | None = self._config.client.pop("on_delivery", None)
        super().__init__(self._config.client, **extras)
        self._journal = self._open_journal(self._config.journal)
        self._identity = ProducerIdentity(
            session=secrets.token_hex(8),
            producer=self._config.producer,
            host=self._config.host,
            application=self._config.application,
            datacenter=self._config.datacenter,
        )
        name = encode_producer_name(self._config.producer)
        self._header_name = name if self._config.name_in_header else b""
        self._suffix = (-1, b"")
        self._pack_identity = struct.Struct(f">9sQ{6 + len(self._header_name)}s").pack
        self._streams: dict[str, StreamSession] = {}
        self._retired: list[StreamSession] = []
        self._refusal: str | None = None
        self._streams_lock = threading.Lock()
        self._report_lock = threading.Lock()
        self._topic_ready = False
        self._topic_attempts = 0
        self._owed = dict(self._journal.owed) if self._journal is not None else {}
        self._wake = threading.Event()
        _living.add(self)
        if self._owed:
            self._wake.set()
        threading.Thread(
            target=_report_regularly,
            args=(weakref.ref(self), self._wake, self._config.report_interval_ms / 1000),
            name="millrace-audit-reports",
            daemon=True,
        ).start()

    def produce(
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int = -1,
        callback: DeliveryCallback | None = None,
        on_delivery: DeliveryCallback | None = None,
        timestamp: int = 0,
        headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        """Send a record as confluent-kafka's `produce` does; `timestamp` is its creation time (now).

        Raises what confluent-kafka raises; after a BufferError the record's number goes to the next record.
        """
        stream = self._streams.get(topic)
        if stream is None:
            stream = self._open_stream(topic, clocked=not timestamp)
        if timestamp:
            created_ms = timestamp
            if stream.promise_ms is not None:
                stream.forgo_promises()
        else:
            created_ms = _time_ns() // 1_000_000
            promise_ms = stream.promise_ms
            # A clock that was set back must not break the promise.
            if promise_ms is not None and created_ms < promise_ms:
                created_ms = promise_ms
        try:
            window, sequence = stream.assign(created_ms)
        except StreamClosed:
            # It was retired since it was looked up.
            self.produce(topic, value, key, partition, callback, on_delivery, timestamp, headers)
            return
        try:
            if sequence > stream.reserved:
                self._reserve(stream, window, sequence)
            # As `header.encode_identity`, at half its cost: many records share a millisecond.
            suffix_ms, suffix = self._suffix
            if suffix_ms != created_ms:
                suffix = created_ms.to_bytes(6, "big") + self._header_name
                self._suffix = (created_ms, suffix)
            identity = (HEADER_KEY, self._pack_identity(stream.prefix, sequence, suffix))
            callback = callback or on_delivery or self._default_callback
            _produce(
                self,
                topic,
                value,
                key,
                partition,
                partial(_delivered, self, stream, window, sequence, callback),
                None,
                created_ms,
                [identity] if headers is None else [*_pairs(headers), identity],
            )
        except _NOT_TAKEN:
            stream.give_back(window, sequence)
            raise
        except BaseException:
            # A signal's handler may raise after the client took the record: its number is not free.
            stream.mark_ambiguous(window, sequence)
            if self._journal is not None:
                self._journal.not_acknowledged(stream, window)
            raise

    def produce_batch(
        self,
        topic: str,
        messages: list[dict[str, Any]],
        partition: int = -1,
        callback: DeliveryCallback | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> int:
        """Send the messages one by one; returns how many were taken, and marks the others with `_error`."""
        accepted = 0
        for message in messages:
            try:
                self.produce(
                    topic,
                    message.get("value"),
                    message.get("key"),
                    message.get("partition", partition),
                    message.get("callback") or callback or on_delivery,
                    timestamp=message.get("timestamp", 0),
                    headers=message.get("headers"),
                )
                accepted += 1
            except BufferError:
                message["_error"] = KafkaError(KafkaError._QUEUE_FULL)
        return accepted

    def poll(self, timeout: float = -1) -> int:
        """Serve delivery callbacks; what they told is in the journal before this returns."""
        served: int = super().poll(timeout)
        if self._journal is not None:
            self._journal.settle()
        return served

    def flush(self, timeout: float = -1) -> int:
        """Wait until all is delivered; returns how many records are still in the queue."""
        left: int = super().flush(timeout)
        if self._journal is not None:
            self._journal.settle()
        return left

    def close(self, timeout: float = -1) -> bool:
        """Deliver what is queued, report the final counts and that the streams are closed. Safe to repeat.

        Without a timeout (seconds) it ends when every record is delivered or given up by its own timeout.
        With one, what is left then is purged. Returns whether everything was delivered, the last reports
        included; a journal keeps those that were not.
        """
        if self._refusal is not None:
            return self._refusal == _CLOSED
        deadline = math.inf if timeout < 0 else time.monotonic() + timeout
        self.flush(_seconds_left(deadline, share=2))
        with self._streams_lock:
            self._refusal = _CLOSED
            streams = [*self._streams.values(), *self._retired]
            self._streams, self._retired = {}, []
        self._wake.set()
        if self._report_lock.acquire(timeout=_seconds_left(deadline)):
            try:
                patience_s = _seconds_left(deadline, share=2, unlimited=TOPIC_TIMEOUT_S)
                self._prepare_topic(min(max(patience_s, 0.1), TOPIC_TIMEOUT_S))
                self._send_owed()
                for stream in streams:
                    self._publish(stream, stream.close(_now_ms()), deadline)
            finally:
                self._report_lock.release()
        delivered = self.flush(_seconds_left(deadline)) == 0
        if not delivered:
            self.purge()
            self.flush(PURGE_TIMEOUT_S)
        if self._journal is not None:
            self._journal.close()
        _living.discard(self)
        return bool(super().close()) and delivered

    def __exit__(self, *exception: object) -> None:
        self.close()

    def report(self) -> None:
        """Publish now what changed since the last report, rather than at the next interval."""
        with self._report_lock:
            if self._refusal is not None or not self._prepare_topic(TOPIC_TIMEOUT_S):
                return
            self._send_owed()
            for stream in list(self._streams.values()):
                if len(stream.windows) > MAX_WINDOWS_A_STREAM:
                    self._retire(stream)
                else:
                    self._publish(stream, stream.report(_now_ms()))
            for stream in list(self._retired):
                if stream.pending_count == 0:
                    self._retired.remove(stream)
                    self._publish(stream, stream.close(_now_ms()), time.monotonic() + TOPIC_TIMEOUT_S)
                else:
                    self._publish(stream, stream.report(_now_ms()))

    @staticmethod
    def _open_journal(path: str | None) -> ProducerJournal | None:
        if path is None:
            return None
        journal = Journal(path)
        if journal.set_aside is not None:
            _log.warning("journal %s is a copy of another producer's; kept as %s", path, journal.set_aside)
        return ProducerJournal(journal, _now_ms())

    def _open_stream(self, topic: str, clocked: bool) -> StreamSession:
        with self._streams_lock:
            if self._refusal is not None:
                raise RuntimeError(self._refusal)
            if topic == self._config.events_topic:
                raise ValueError(f"topic {topic} is for the audit's own events")
            stream = self._streams.get(topic)
            if stream is None:
                stream = StreamSession(
                    self._identity,
                    topic,
                    secrets.token_hex(8),
                    window_ms=self._config.window_ms,
                    lease_ms=self._config.lease_ms,
                    now_ms=_now_ms(),
                    promises=clocked,
                )
                if self._journal is not None:
                    self._journal.opened(stream)
                self._streams[topic] = stream
                self._wake.set()
            return stream

    def _retire(self, stream: StreamSession) -> None:
        """Begin a new stream for the topic, so that one that runs for years does not keep all its windows."""
        with self._streams_lock:
            self._streams.pop(stream.topic, None)
            self._retired.append(stream)

    def _reserve(self, stream: StreamSession, window: WindowCounts, sequence: int) -> None:
        if self._journal is not None:
            self._journal.reserve(stream, window, sequence)

    def _prepare_topic(self, timeout_s: float) -> bool:
        """Whether events can be sent; a cluster that answers but creates nothing must do so unasked."""
        if not self._topic_ready:
            state = ensure_events_topic(self._config.client, self._config.events_topic, timeout_s)
            self._topic_attempts += state is TopicState.UNANSWERED
            self._topic_ready = state is TopicState.READY or self._topic_attempts >= MAX_TOPIC_ATTEMPTS
        return self._topic_ready

    def _publish(self, stream: StreamSession, events: Iterable[Event], deadline: float | None = None) -> None:
        for event in events:
            if self._journal is not None and isinstance(event, CountEvent):
                self._journal.reported(stream, event)
            key, value = encode_event(event)
            if not self._send_event(key, value, partial(_event_delivered, self, stream, event), deadline):
                stream.report_again(event)

    def _send_owed(self) -> None:
        """Send the reports that an earlier session left in the journal; what fails goes out the next time."""
        owed, self._owed = self._owed, {}
        for key, value in owed.items():
            callback = partial(_owed_delivered, self, key, value)
            if not self._send_event(key.encode(), value.encode(), callback, None):
                self._owed[key] = value

    def _send_event(
        self, key: bytes, value: bytes, callback: DeliveryCallback, deadline: float | None
    ) -> bool:
        """Queue an event; False when the queue is full (until the deadline, if there is one)."""
        while True:
            try:
                _produce(self, self._config.events_topic, value, key, -1, callback)
                return True
            except BufferError:
                if deadline is None or time.monotonic() >= deadline:
                    return False
                self.poll(0.1)

    def _undelivered(
        self, stream: StreamSession, window: WindowCounts, sequence: int, error: KafkaError
    ) -> None:
        """Only a record that was purged before it was ever sent surely does not exist."""
        if error.code() == KafkaError._PURGE_QUEUE:
            stream.mark_failed(window, sequence)
        else:
            stream.mark_ambiguous(window, sequence)
        if self._journal is not None:
            self._journal.not_acknowledged(stream, window)


_CLOSED = "this producer is closed"
_FORKED = "a forked process must open its own producer: the parent's streams are not its own"
_living: weakref.WeakSet[AuditedProducer] = weakref.WeakSet()


def _delivered(
    producer: AuditedProducer,
    stream: StreamSession,
    window: WindowCounts,
    sequence: int,
    callback: DeliveryCallback | None,
    error: KafkaError | None,
    message: Any,
) -> None:
    """A record's delivery report. The sizes first: `WindowCounts.fold` goes by the number of sequences."""
    if error is None:
        window.fresh_sizes.append(len(message))
        window.fresh.append(sequence)
    else:
        producer._undelivered(stream, window, sequence, error)
    if callback is not None:
        callback(error, message)


def _event_delivered(
    producer: AuditedProducer, stream: StreamSession, event: Event, error: KafkaError | None, message: Any
) -> None:
    if error is not None:
        stream.report_again(event)
        return
    window = stream.report_delivered(event)
    journal = producer._journal
    if journal is None:
        return
    if window is not None:
        journal.delivered(stream, window)
    elif isinstance(event, StreamEvent) and event.state == CLOSED:
        journal.gone(stream)


def _owed_delivered(
    producer: AuditedProducer, key: str, value: str, error: KafkaError | None, message: Any
) -> None:
    if error is not None:
        producer._owed[key] = value
    elif producer._journal is not None:
        producer._journal.carried(key)


def _pairs(headers: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    return headers.items() if isinstance(headers, Mapping) else headers


def _now_ms() -> int:
    return _time_ns() // 1_000_000


def _seconds_left(deadline: float, *, share: int = 1, unlimited: float = -1.0) -> float:
    """A part of the time to the deadline; `unlimited` when there is none (-1: wait for ever)."""
    return unlimited if deadline == math.inf else max((deadline - time.monotonic()) / share, 0.0)


def _report_regularly(
    reference: weakref.ref[AuditedProducer], wake: threading.Event, interval_s: float
) -> None:
    """The reporting thread: at every interval, and at once when a stream opens."""
    while True:
        wake.wait(interval_s)
        wake.clear()
        producer = reference()
        if producer is None or producer._refusal is not None:
            return
        try:
            producer.report()
        except Exception:
            _log.exception("the audit's report failed; the next one will hold what this one did not say")
        del producer


def _close_at_exit() -> None:
    """An application that only flushed before it ended still closes its streams."""
    for producer in list(_living):
        producer.close(EXIT_TIMEOUT_S)


def _refuse_in_child() -> None:
    for producer in list(_living):
        producer._streams = {}
        producer._refusal = _FORKED


atexit.register(_close_at_exit)
os.register_at_fork(after_in_child=_refuse_in_child)
