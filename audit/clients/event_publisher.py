"""Sends a producer's events to its cluster, and keeps those that were not delivered for the next time.

Called by `producer` from its reporting thread, and when it closes. The application's client is given with
every call and never kept, nor polled: its callbacks are the application's. Events go through it but in four
cases, for which a second client is opened: an event of a transactional producer must not wait for a
transaction, nor be aborted with it; a client that had a fatal error takes nothing any more, while its counts
must still be told, and the second one is then followed by another; a client whose queue is full has room when
the application polls, which is as likely to fill it at once; where the cluster refused a batch as too large,
each event goes in a batch of its own, which shows whose fault it is.

Must stay true: what a report tells is in the journal before it is sent (`ProducerJournal.reported`); an event
that was not delivered is told again, and one of an earlier session stays owed until it is delivered; one that
is larger than the client or the cluster takes keeps no other one back, and is given up after a few times.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from millrace.audit.clients.client_errors import is_fatal, kafka_error
from millrace.audit.clients.events_topic import TopicState, connection_settings, ensure_events_topic
from millrace.audit.clients.producer_life import drain
from millrace.audit.clients.recovery import ProducerJournal
from millrace.audit.clients.session import StreamSession
from millrace.audit.clients.told_stream import MAX_REFUSALS, UNTOLD
from millrace.audit.contract.events import CLOSED, CountEvent, Event, StreamEvent

_log = logging.getLogger("millrace.audit.clients.event_publisher")

MAX_TOPIC_ATTEMPTS = 3
PURGE_TIMEOUT_S = 1.0
OWN_CONNECTION = {"acks": "all", "enable.idempotence": True, "batch.num.messages": 1}

_TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})

_produce = Producer.produce
Delivered = Callable[[KafkaError | None], None]


class EventPublisher:
    """One producer's way to the events topic. Not thread-safe but for the callbacks: the caller locks.

    `settings` are the application's; what is changed in them later (credentials) is used from then on.
    """

    def __init__(
        self,
        topic: str,
        settings: Mapping[str, Any],
        journal: ProducerJournal | None,
        *,
        transactional: bool = False,
        extras: Mapping[str, Any] | None = None,
    ):
        self._topic = topic
        self._settings = settings
        self._journal = journal
        self._extras = dict(extras or {})
        self.own_connection: Producer | None = None
        self._owed = dict(journal.owed) if journal is not None else {}
        self._refusals: Counter[str] = Counter()
        self._alone = transactional
        self._topic_ready = False
        self._topic_attempts = 0
        # Events that the application's client has and whose delivery reports were not served yet.
        self._in_flight: set[object] = set()
        self._undelivered: dict[StreamSession, KafkaError | None] = {}

    @property
    def owes(self) -> bool:
        """Events of an earlier session wait to be sent, if it is only for the next start."""
        return bool(self._owed) or any(count >= MAX_REFUSALS for count in self._refusals.values())

    @property
    def in_flight(self) -> int:
        """How many events are in the queue of the application's client."""
        return len(self._in_flight)

    def take_undelivered(self) -> dict[StreamSession, KafkaError | None]:
        """The streams of which an event was not delivered since the last call, and why (None: no room)."""
        undelivered = {}
        while self._undelivered:
            stream, error = self._undelivered.popitem()
            undelivered[stream] = error
        return undelivered

    def prepare_topic(self, timeout_s: float) -> bool:
        """Whether events can be sent; a cluster that answers but creates nothing must do so unasked."""
        if not self._topic_ready:
            state = ensure_events_topic(self._settings, self._topic, timeout_s)
            self._topic_attempts += state is TopicState.UNANSWERED
            self._topic_ready = state is TopicState.READY or self._topic_attempts >= MAX_TOPIC_ATTEMPTS
        return self._topic_ready

    def publish(
        self, client: Producer, stream: StreamSession, events: list[Event], deadline: float | None = None
    ) -> None:
        """Send a stream's events; with a deadline (monotonic seconds) it waits for room in the queue.

        One that is refused is told again next time, and so is everything from where there is no room.
        """
        unsent = list(events)
        try:
            while unsent:
                event = unsent[0]
                if self._journal is not None and isinstance(event, CountEvent):
                    self._journal.reported(stream, event)
                key, value = stream.encoded(event)
                try:
                    if not self._send(client, key, value, partial(self._delivered, stream, event), deadline):
                        return
                except KafkaException as refusal:
                    _log.warning("report %s is refused: %s", key.decode(), refusal)
                    self._not_delivered(stream, event, kafka_error(refusal))
                unsent.pop(0)
        finally:
            for event in unsent:
                self._not_delivered(stream, event, None)

    def publish_end(self, client: Producer, stream: StreamSession, now_ms: int, deadline: float) -> None:
        """Close a stream and send its last events; if that is interrupted, all of them at the next time."""
        events = stream.close(now_ms)
        try:
            self.publish(client, stream, events, deadline)
        except BaseException:  # a signal's handler has raised, perhaps before any was sent
            for event in events:
                stream.report_again(event)
            raise

    def publish_owed(self, client: Producer) -> None:
        """Send what an earlier session still owes, in its order."""
        for key, value in list(self._owed.items()):
            del self._owed[key]
            sent, refused = False, None
            try:
                delivered = partial(self._owed_delivered, key, value)
                sent = self._send(client, key.encode(), value.encode(), delivered, None)
                if not sent:
                    return
            except KafkaException as refusal:
                refused = kafka_error(refusal)
                _log.warning("report %s is refused: %s", key, refusal)
            finally:
                if not sent:
                    self._owe_again(key, value, refused)

    def _owe_again(self, key: str, value: str, error: KafkaError | None) -> None:
        """What is too large is sent a few times; the journal keeps it for the next start."""
        self._alone = self._alone or _is_too_large(error)
        self._refusals[key] += _is_too_large(error)
        if self._refusals[key] < MAX_REFUSALS:
            self._owed[key] = value
        else:
            _log.error(
                "report %s is too large for topic %s: the next start with this journal tries again",
                key,
                self._topic,
            )

    def serve(self, timeout_s: float = 0) -> None:
        """Learn what became of events that went through the connection of their own."""
        own = self.own_connection
        if own is None:
            return
        try:
            own.poll(timeout_s)
        except KafkaException as error:
            # Without an `error_cb` the client raises a fatal error from here, once, and works no more.
            if not is_fatal(error):
                raise
            self._give_up(own, error)

    def set_credentials(self, username: str, password: str) -> None:
        if self.own_connection is not None:
            self.own_connection.set_sasl_credentials(username, password)

    def _send(
        self, client: Producer, key: bytes, value: bytes, delivered: Delivered, deadline: float | None
    ) -> bool:
        """Queue an event; False when the queue is full, of the connection of its own too (until the deadline,
        if there is one)."""
        while True:
            try:
                self._hand_over(client, key, value, delivered)
                return True
            except BufferError:
                if self.own_connection is None:
                    self._connect()
                elif deadline is None or time.monotonic() >= deadline:
                    return False
                else:
                    self.serve(0.1)

    def _hand_over(self, client: Producer, key: bytes, value: bytes, delivered: Delivered) -> None:
        own = self.own_connection
        if own is None and self._alone:
            own = self._connect()
        if own is None:
            token = object()

            def settled(error: KafkaError | None, _: Any) -> None:
                self._in_flight.discard(token)
                delivered(error)

            self._in_flight.add(token)
            try:
                _produce(client, self._topic, value, key, -1, settled)
                return
            except KafkaException as error:
                self._in_flight.discard(token)
                _log.warning("reports go through a connection of their own now: %s", error)
                own = self._connect()
            except BaseException:
                self._in_flight.discard(token)
                raise
        try:
            _produce(own, self._topic, value, key, -1, lambda error, _: delivered(error))
        except KafkaException as error:
            if not is_fatal(error):
                raise
            self._give_up(own, error)
            _produce(self._connect(), self._topic, value, key, -1, lambda error, _: delivered(error))

    def _give_up(self, own: Producer, error: KafkaException) -> None:
        """It works no more. What it had and did not deliver is told again."""
        _log.warning("reports go through another connection now: %s", error)
        self.own_connection = None
        own.purge()
        drain(own, PURGE_TIMEOUT_S, [])

    def _connect(self) -> Producer:
        settings = {**connection_settings(self._settings), **OWN_CONNECTION}
        self.own_connection = Producer(settings, **self._extras)
        return self.own_connection

    def _delivered(self, stream: StreamSession, event: Event, error: KafkaError | None) -> None:
        if error is not None:
            self._not_delivered(stream, event, error)
            return
        window = stream.report_delivered(event)
        if self._journal is None:
            return
        if window is not None:
            self._journal.delivered(stream, window)
        elif isinstance(event, StreamEvent) and event.state == CLOSED and stream.is_told:
            self._journal.gone(stream)

    def _not_delivered(self, stream: StreamSession, event: Event, error: KafkaError | None) -> None:
        self._alone = self._alone or _is_too_large(error)
        if not _is_too_large(error):
            stream.report_again(event)
        elif stream.report_too_large(event):
            _log.error("report %s is too large for topic %s: %s", event.key, self._topic, UNTOLD)
        self._undelivered[stream] = error

    def _owed_delivered(self, key: str, value: str, error: KafkaError | None) -> None:
        if error is not None:
            self._owe_again(key, value, error)
        elif self._journal is not None:
            self._journal.carried(key)


def _is_too_large(error: KafkaError | None) -> bool:
    return error is not None and error.code() in _TOO_LARGE
