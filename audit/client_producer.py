"""Millrace's own asynchronous producer, audited.

    async with Cluster(["127.0.0.1:9092"]) as cluster, AuditedClientProducer(cluster) as producer:
        answer = await producer.send("flights", key=b"AA1", value=b"...")

Calls and settings are those of `broker.client.producer.Producer`; the audit's are keywords
(`adapter_config`). Every record gets the `_mr` header; reports go to the events topic through the same
connections, from a task that the first record begins and `close` ends.

What is known of a record: its future has a result: acknowledged; `send` raised: it never left, and its number
goes to the next record; any other end of the future is ambiguous, because the producer repeats a batch whose
answer was lost before it gives up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from millrace import broker
from millrace.audit.clients.adapter_config import log_topic_refusal, open_reporter
from millrace.audit.clients.interruption import is_refusal_by
from millrace.audit.clients.loop_reports import LoopReports
from millrace.audit.stream_reporter import OutgoingEvent
from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.producer import Acknowledgement, Producer
from millrace.broker.errors import (
    InvalidReplicationFactor,
    KafkaError,
    MillraceError,
    RecordTooLarge,
    TopicAlreadyExists,
)
from millrace.broker.protocol.system_topics import AUDIT_TOPIC_SETTINGS

_log = logging.getLogger("millrace.audit.client_producer")


class AuditedClientProducer(Producer):
    """See the module's text. Raises ConfigError for a wrong `millrace_*` keyword."""

    def __init__(self, cluster: Cluster, **settings: Any) -> None:
        self._reporter = open_reporter(settings)
        super().__init__(cluster, **settings)
        self._reports = LoopReports(
            self._reporter,
            self._send_event,
            self._make_topic,
            not_taken=MillraceError,
            too_large=RecordTooLarge,
            log=_log,
        )

    async def send(
        self,
        topic: str,
        *,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> asyncio.Future[Acknowledgement]:
        """As the plain producer's `send`; `timestamp_ms` is the record's creation time (now)."""
        self._reports.begin()
        stamp = self._reporter.stamp(topic, timestamp_ms)
        try:
            headers = tuple(headers)
            stamp.contains(key, value, headers)
            answer = await super().send(
                topic,
                key=key,
                value=value,
                headers=(*headers, stamp.header),
                timestamp_ms=stamp.created_ms,
                partition=partition,
            )
        except BaseException as error:
            # Nothing is taken before the last step, which cannot fail; a handler of a signal may, after it.
            is_own = isinstance(error, Exception | asyncio.CancelledError)
            if is_own and is_refusal_by(broker, error):
                stamp.not_taken()
            else:
                stamp.ambiguous()
            raise
        self._reports.follow(stamp, len(value or b""), answer)
        return answer

    async def report(self) -> None:
        """Publish now what changed since the last report, rather than at the next interval."""
        await self._reports.report()

    async def close(self) -> None:
        """Send what is still there, report the final counts and that the streams are closed, stop."""
        if self._closed:
            return
        await self._reports.end(self.flush)
        await super().close()
        self._reporter.finish()

    async def _send_event(self, event: OutgoingEvent) -> asyncio.Future[Acknowledgement]:
        return await super().send(self._reporter.events_topic, key=event.key, value=event.value, partition=0)

    async def _make_topic(self) -> bool:
        """Create the events topic where it is missing. False: the cluster cannot be reached now."""
        topic = self._reporter.events_topic
        for replication_factor in (-1, 1):
            try:
                await create_topic(self._cluster, topic, 1, replication_factor, AUDIT_TOPIC_SETTINGS)
            except TopicAlreadyExists:
                pass
            except InvalidReplicationFactor:
                continue
            except KafkaError as error:
                log_topic_refusal(topic, error)
            except MillraceError as error:
                _log.warning("events topic %s: no cluster could be asked: %s", topic, error)
                return False
            break
        return True
