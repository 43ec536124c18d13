"""kafka-python's producer, audited: change one import.

    from millrace.audit.kafka_python_producer import AuditedKafkaProducer as KafkaProducer

Calls and settings are kafka-python's own; the audit's are keywords (`adapter_config`). Every record gets the
`_mr` header; reports go to the events topic through the same connection, from a thread of this module's.

What is known of a record, by kafka-python's answers:

    its future succeeded               acknowledged (acks=0 is refused)
    send() raised before taking it     it never left: its number goes to the next record. These are the errors
                                       of arguments and sizes, a timeout for metadata or memory, a closed
                                       producer
    anything else                      ambiguous: kafka-python repeats, so that even a refusal by the broker
                                       may follow on an attempt whose answer was lost

Differences from kafka-python: `transactional_id` is refused; without `timestamp_ms` the creation time is set
here; `close` reports the final counts and returns whether all of it arrived.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from functools import partial
from typing import Any

import kafka
from kafka import KafkaAdminClient, KafkaProducer
from kafka import errors as kafka_errors
from kafka.admin import NewTopic

from millrace.audit.clients.adapter_config import check_client, fail_all, log_topic_refusal, open_reporter
from millrace.audit.clients.interruption import is_refusal_by, refuse_inside
from millrace.audit.stream_reporter import FORKED, LOCKED, OutgoingEvent
from millrace.broker.protocol.system_topics import AUDIT_TOPIC_SETTINGS

_log = logging.getLogger("millrace.audit.kafka_python_producer")

_LOCKED = frozenset({"_close_reports", "report"})
"""Methods that hold a lock of the producer's (`interruption`)."""

EXIT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 60.0
FORCED_CLOSE_S = 5.0
"""How long kafka-python may take to give up what it has."""
_NOT_TAKEN = (
    AssertionError,
    TypeError,
    ValueError,
    kafka_errors.IllegalStateError,
    kafka_errors.KafkaTimeoutError,
    kafka_errors.MessageSizeTooLargeError,
)


class AuditedKafkaProducer(KafkaProducer):
    """kafka-python's KafkaProducer, audited. Raises ConfigError for a wrong `millrace_*` keyword."""

    def __init__(self, **configs: Any):
        check_client(configs)
        self._reporter = open_reporter(configs)
        self._wake = threading.Event()
        self._report_lock = threading.Lock()
        self._topic_ready = False
        self._admin_settings = dict(configs)
        try:
            super().__init__(**configs)
        except BaseException:
            self._reporter.finish()
            raise
        for name in ("key_serializer", "value_serializer"):
            if self.config[name] is not None:
                self.config[name] = _KeepingSerializer(self.config[name])
        _living.add(self)
        threading.Thread(
            target=_report_regularly,
            args=(weakref.ref(self), self._wake, self._reporter.interval_ms / 1000),
            name="millrace-audit-reports",
            daemon=True,
        ).start()

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: list[tuple[str, bytes]] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Any:
        """As kafka-python's `send`; `timestamp_ms` is the record's creation time (now)."""
        stamp = self._reporter.stamp(topic, timestamp_ms)
        try:
            stamped = [*(headers or []), stamp.header]
            future = super().send(topic, value, key, stamped, partition, stamp.created_ms)
        except BaseException as error:
            # A signal's handler may raise after the client took the record: its number is not free.
            if isinstance(error, _NOT_TAKEN) and is_refusal_by(kafka, error):
                stamp.not_taken()
            else:
                stamp.ambiguous()
            raise
        try:
            if stamp.content:
                key_bytes = self._serialized("key_serializer", key)
                stamp.contains(key_bytes, self._serialized("value_serializer", value), stamped)
        except BaseException:
            stamp.ambiguous()
            raise
        future.add_callback(_acknowledged, stamp)
        future.add_errback(_unknown, stamp)
        return future

    def report(self, timeout_s: float = 5.0) -> None:
        """Publish now what changed since the last report, rather than at the next interval.

        Raises RuntimeError in a signal's handler that would wait for what it interrupted, as does `close`.
        """
        refuse_inside(self, "report", _LOCKED)
        refuse_inside(self._reporter, "report", LOCKED)
        with self._report_lock:
            if self._make_topic(timeout_s):
                self._publish(self._reporter.report())

    def close(self, timeout: float | None = None, null_logger: bool = False) -> bool:
        """Deliver what is queued, report the final counts and that the streams are closed. Safe to repeat.

        Returns whether everything was delivered within the time (seconds; without one it is a minute after
        the last record), the last reports included; a journal keeps those that were not.
        """
        if not hasattr(self, "config"):
            return True  # its settings were refused: kafka-python's own part was never made
        if getattr(self, "_closed", True):
            super().close(timeout, null_logger)
            return True
        refuse_inside(self, "close", _LOCKED)
        refuse_inside(self._reporter, "close", LOCKED)
        deadline = time.monotonic() + (CLOSE_TIMEOUT_S if timeout is None else timeout)
        delivered = self._reporter.refusal != FORKED and self._close_reports(timeout, deadline)
        _living.discard(self)
        self._wake.set()
        try:
            super().close(_left_s(deadline), null_logger)
        except kafka_errors.KafkaTimeoutError:
            # Of records that got no answer; kafka-python is left open then, with a thread that tries on.
            delivered = False
            self._sender.force_close()
            super().close(FORCED_CLOSE_S, null_logger)
        self._reporter.finish()
        return delivered

    def _as_they_are(self, key: bytes, value: bytes) -> tuple[Any, Any]:
        """An event's key and value, past the application's serializers."""
        return (
            key if self.config["key_serializer"] is None else _Ready(key),
            value if self.config["value_serializer"] is None else _Ready(value),
        )

    def _serialized(self, serializer: str, given: Any) -> Any:
        """What this thread's last `send` made of a key or a value."""
        keeper = self.config[serializer]
        return given if keeper is None else keeper.kept.content

    def _close_reports(self, timeout: float | None, deadline: float) -> bool:
        delivered = True
        try:
            self.flush(None if timeout is None else timeout / 2)
        except kafka_errors.KafkaTimeoutError:
            delivered = False
        if not self._report_lock.acquire(timeout=_left_s(deadline)):
            return False  # a report is under way that gets no answer
        try:
            is_ready = self._make_topic(max(min(_left_s(deadline), 5.0), 0.1))
            events = self._reporter.close()
            if not is_ready:
                fail_all(events)
                return False
            # Nothing is sent after this: what kafka-python waits for metadata is now what close() may take.
            self.config["max_block_ms"] = int(_left_s(deadline) * 1000)
            futures = self._publish(events)
        finally:
            self._report_lock.release()
        try:
            self.flush(_left_s(deadline))
        except kafka_errors.KafkaTimeoutError:
            return False
        told = all(future is not None and future.succeeded() for future in futures)
        return delivered and told and not self._reporter.has_untold

    def _publish(self, events: list[OutgoingEvent]) -> list[Any]:
        """Send the events in order; after one that is not taken the others wait for the next report. One that
        is larger than a request may be keeps none back."""
        futures: list[Any] = []
        for number, event in enumerate(events):
            try:
                key, value = self._as_they_are(event.key, event.value)
                future = super().send(self._reporter.events_topic, value, key, partition=0)
            except kafka_errors.MessageSizeTooLargeError as error:
                _log.warning("report %s is refused: %s", event.key, error)
                event.too_large()
                futures.append(None)
                continue
            except Exception as error:
                _log.warning("a report could not be sent, it will be repeated: %s", error)
                fail_all(events[number:])
                futures.append(None)
                break
            future.add_callback(lambda _, event=event: event.delivered())
            future.add_errback(partial(_not_told, event))
            futures.append(future)
        return futures

    def _make_topic(self, timeout_s: float) -> bool:
        """Create the events topic where it is missing. False: the cluster cannot be reached now."""
        if self._topic_ready:
            return True
        topic = self._reporter.events_topic
        try:
            self._topic_ready = _ensure_topic(self._admin_settings, topic, timeout_s)
        except kafka_errors.KafkaError as error:
            _log.warning("events topic %s: no cluster could be asked: %s", topic, error)
        return self._topic_ready


class _Ready:
    """Bytes that no serializer shall see."""

    __slots__ = ("content",)

    def __init__(self, content: bytes):
        self.content = content


class _KeepingSerializer:
    """An application's serializer; `kept.content` is what it gave in this thread last.

    Asked twice it might give two different answers, and the digest would be of bytes that were never sent.
    """

    def __init__(self, serializer: Any):
        self._serializer = serializer
        self.kept = threading.local()

    def serialize(self, *arguments: Any) -> Any:
        if isinstance(arguments[-1], _Ready):
            return arguments[-1].content
        self.kept.content = self._serializer.serialize(*arguments)
        return self.kept.content

    def close(self) -> None:
        close = getattr(self._serializer, "close", None)
        if close is not None:
            close()


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


def _not_told(event: OutgoingEvent, error: BaseException) -> None:
    if isinstance(error, kafka_errors.MessageSizeTooLargeError):
        event.too_large()
    else:
        event.failed()


def _ensure_topic(settings: dict[str, Any], topic: str, timeout_s: float) -> bool:
    known = KafkaAdminClient.DEFAULT_CONFIG
    connection = {name: value for name, value in settings.items() if name in known}
    connection["request_timeout_ms"] = max(int(timeout_s * 1000), 1000)
    admin = KafkaAdminClient(**connection)
    try:
        if topic in admin.list_topics():
            return True
        for replication_factor in (-1, 1):
            new = NewTopic(topic, 1, replication_factor, topic_configs=AUDIT_TOPIC_SETTINGS)
            try:
                admin.create_topics([new])
                return True
            except kafka_errors.TopicAlreadyExistsError:
                return True
            except kafka_errors.InvalidReplicationFactorError:
                continue
            except kafka_errors.KafkaTimeoutError:
                return False
            except kafka_errors.KafkaError as error:
                log_topic_refusal(topic, error)
                return True
        return True
    finally:
        admin.close()


def _acknowledged(stamp: Any, metadata: Any) -> None:
    stamp.acknowledged(max(metadata.serialized_value_size, 0))


def _unknown(stamp: Any, error: Any) -> None:
    stamp.ambiguous()


def _report_regularly(
    reference: weakref.ref[AuditedKafkaProducer], wake: threading.Event, interval_s: float
) -> None:
    """The reporting thread; the first report follows the first record soon."""
    pause_s = min(interval_s, 1.0)
    while not wake.wait(pause_s):
        producer = reference()
        if producer is None or producer._reporter.refusal is not None:
            return
        try:
            producer.report()
        except Exception:
            _log.exception("the audit's report failed; the next one will hold what this one did not say")
        del producer
        pause_s = interval_s


_living: weakref.WeakSet[AuditedKafkaProducer] = weakref.WeakSet()


def _close_at_exit() -> None:
    """An application that only flushed before it ended still closes its streams."""
    for producer in list(_living):
        if producer._reporter.refusal is not None:
            continue  # a forked child's copy
        try:
            producer.close(EXIT_TIMEOUT_S)
        except Exception:
            _log.exception("an audited producer was not closed in order")  # the others are all the same


atexit.register(_close_at_exit)
