"""aiokafka's producer, audited: change one import.

    from millrace.audit.aiokafka_producer import AuditedAIOKafkaProducer as AIOKafkaProducer

Calls and settings are aiokafka's own, except that `acks="all"` and idempotence are the defaults; the audit's
settings are keywords (`adapter_config`). Every record gets the `_mr` header; reports go to the events topic
through the same connection, from a task that `start` begins and `stop` ends.

What is known of a record, by aiokafka's answers:

    its future has a result       acknowledged (acks=0 is refused)
    send() raised before taking it    it never left: its number goes to the next record. These are the errors
                                  of arguments, metadata and sizes, a full buffer, a closed producer
    anything else                 ambiguous: aiokafka repeats, so that even a refusal by the broker may follow
                                  on an attempt whose answer was lost; a future that the application cancelled
                                  says nothing either

Differences from aiokafka: `transactional_id` is refused, and so is `send_batch`, whose records can carry no
header; without `timestamp_ms` the creation time is set here; `stop` reports the final counts.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import aiokafka
from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from millrace.audit.clients.adapter_config import check_client, log_topic_refusal, open_reporter
from millrace.audit.clients.interruption import is_refusal_by
from millrace.audit.clients.loop_reports import LoopReports
from millrace.audit.stream_reporter import OutgoingEvent
from millrace.broker.protocol.system_topics import AUDIT_TOPIC_SETTINGS

_log = logging.getLogger("millrace.audit.aiokafka_producer")

TOPIC_TIMEOUT_S = 5.0
_NOT_TAKEN = (
    AssertionError,
    TypeError,
    ValueError,
    kafka_errors.IllegalOperation,
    kafka_errors.KafkaTimeoutError,
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.ProducerClosed,
    kafka_errors.UnknownTopicOrPartitionError,
)


class _Ready:
    """A key or value that was serialized already."""

    __slots__ = ("content",)

    def __init__(self, content: bytes | None):
        self.content = content


class AuditedAIOKafkaProducer(AIOKafkaProducer):
    """aiokafka's AIOKafkaProducer, audited. Raises ConfigError for a wrong `millrace_*` keyword."""

    def __init__(self, **configs: Any):
        check_client(configs)
        self._reporter = open_reporter(configs)
        configs.setdefault("acks", "all")
        if configs["acks"] in ("all", -1):
            configs.setdefault("enable_idempotence", True)
        self._serializers = (configs.get("key_serializer"), configs.get("value_serializer"))
        self._admin_settings = dict(configs)
        configs["key_serializer"] = configs["value_serializer"] = _content_of
        self._reports = LoopReports(
            self._reporter,
            self._send_event,
            self._make_topic,
            not_taken=Exception,
            too_large=kafka_errors.MessageSizeTooLargeError,
            log=_log,
        )
        try:
            super().__init__(**configs)
        except BaseException:
            self._reporter.finish()
            raise

    async def start(self) -> None:
        """Connect, and begin to report."""
        await super().start()
        self._reports.begin()

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        headers: Any = None,
    ) -> Any:
        """As aiokafka's `send`; `timestamp_ms` is the record's creation time (now)."""
        own = list(headers or ())
        if value is None and key is None:
            raise AssertionError("Need at least one: key or value")
        key_bytes, value_bytes = self._serialize_once(key, value)
        stamp = self._reporter.stamp(topic, timestamp_ms)
        try:
            stamp.contains(key_bytes, value_bytes, own)
            future = await super().send(
                topic,
                _Ready(value_bytes),
                _Ready(key_bytes),
                partition,
                stamp.created_ms,
                [*own, stamp.header],
            )
        except BaseException as error:
            # A signal's handler may raise after the client took the record: its number is not free.
            if isinstance(error, _NOT_TAKEN) and is_refusal_by(aiokafka, error):
                stamp.not_taken()
            else:
                stamp.ambiguous()
            raise
        self._reports.follow(stamp, len(value_bytes or b""), future)
        return future

    async def send_batch(self, batch: Any, topic: str, *, partition: int) -> Any:
        """Refused: the records of a prepared batch cannot carry the audit's header."""
        raise TypeError("an audited producer cannot send prepared batches: use send")

    async def report(self) -> None:
        """Publish now what changed since the last report, rather than at the next interval."""
        await self._reports.report()

    async def stop(self) -> None:
        """Deliver what is queued, report the final counts and that the streams are closed, disconnect."""
        if self._closed:
            return
        await self._reports.end(self.flush)
        await super().stop()
        self._reporter.finish()

    def _serialize_once(self, key: Any, value: Any) -> tuple[bytes | None, bytes | None]:
        """(key, value) as they are sent: a serializer asked twice might give two different answers."""
        of_key, of_value = self._serializers
        return (key if of_key is None else of_key(key)), (value if of_value is None else of_value(value))

    async def _send_event(self, event: OutgoingEvent) -> Any:
        return await super().send(
            self._reporter.events_topic, _Ready(event.value), _Ready(event.key), partition=0
        )

    async def _make_topic(self) -> bool:
        """Create the events topic where it is missing. False: the cluster cannot be reached now."""
        topic = self._reporter.events_topic
        try:
            async with asyncio.timeout(TOPIC_TIMEOUT_S):
                await _ensure_topic(self._admin_settings, topic)
            return True
        except (kafka_errors.KafkaError, TimeoutError, OSError) as error:
            _log.warning("events topic %s: no cluster could be asked: %s", topic, error)
            return False


def _content_of(ready: _Ready) -> bytes | None:
    return ready.content


async def _ensure_topic(settings: dict[str, Any], topic: str) -> None:
    known = inspect.signature(AIOKafkaAdminClient).parameters
    admin = AIOKafkaAdminClient(**{name: value for name, value in settings.items() if name in known})
    try:
        await admin.start()
        if topic in await admin.list_topics():
            return
        for replication_factor in (-1, 1):
            new = NewTopic(topic, 1, replication_factor, topic_configs=AUDIT_TOPIC_SETTINGS)
            answer = await admin.create_topics([new])
            code, reason = answer.topic_errors[0][1:3]
            error = kafka_errors.for_code(code)
            if error in (kafka_errors.NoError, kafka_errors.TopicAlreadyExistsError):
                return
            if error is not kafka_errors.InvalidReplicationFactorError:
                log_topic_refusal(topic, reason or error.__name__)
                return
    finally:
        await admin.close()
