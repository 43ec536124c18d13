"""The short way of a fetch that is like an earlier one on its connection.

A consumer of one partition asks for the same again and again, from another offset on, in a session or in
none. Its second such request makes a `FetchShortcut`, by which those that follow are answered before anybody
decodes them: the log is read at once, and the answer written by a form. What is not plain goes the usual way
from its beginning: a refusal, bytes that are not in the page cache, nothing to give yet, aborted
transactions, a quota on fetching, a session that has other partitions too. The attempt costs little then, and
no reader is told anything by it.

Made by the fetch handler; called by the dispatcher.
"""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

from millrace.broker.errors import KafkaError
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.frames import Api, RequestHead
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.broker.protocol.repeated_fetch import FIRST_VERSION, AnswerForm, FetchForm
from millrace.broker.protocol.session_epochs import FINAL_EPOCH, NO_SESSION
from millrace.broker.replication.local_partition import MustReadCold
from millrace.broker.server.context import BrokerServices, ConnectionMemory

LARGEST_FRAME = 1 << 10
"""Bytes of a request that are kept for a connection's life; names are shorter."""


def note(
    head: RequestHead,
    frame: memoryview,
    position: int,
    request: FetchRequest,
    broker: BrokerServices,
    memory: ConnectionMemory,
) -> None:
    """`request` goes the usual way; `position` is where its body begins. Remembers it, and makes the short
    way for those to come where it is like the last one that was remembered."""
    if memory.shortcut is not None and memory.shortcut.fits(frame):
        return  # it was not plain this time
    if not _may_be_short(head, request) or len(frame) > LARGEST_FRAME:
        return
    last, memory.last_fetch = memory.last_fetch, bytes(frame)
    if len(last) != len(frame):
        return
    form = FetchForm.of(memory.last_fetch, position, head.version)
    if form is not None and form.read(memoryview(last)) is not None:
        memory.shortcut, memory.last_fetch = FetchShortcut(form, head.version, request, broker), b""


def _may_be_short(head: RequestHead, request: FetchRequest) -> bool:
    """Of a consumer, for one partition, and content with whatever there is: to know how much there is, it has
    to be read."""
    return (
        head.version >= FIRST_VERSION
        and request.replica_id < 0
        and len(request.partitions) == 1
        and not request.forgotten
        and request.min_bytes <= 1
    )


class FetchShortcut:
    """See the module."""

    __slots__ = ("_answers", "_asked", "_broker", "_form", "_max_bytes", "_read_committed", "_session_id")

    api_key: ClassVar[int] = Api.FETCH

    def __init__(self, form: FetchForm, version: int, request: FetchRequest, broker: BrokerServices) -> None:
        (asked,) = request.partitions
        self._form = form
        self._asked = asked
        self._max_bytes = request.max_bytes
        self._read_committed = request.read_committed
        self._session_id = request.session_id
        self._broker = broker
        self._answers = AnswerForm(
            version,
            asked.topic,
            asked.partition,
            read_committed=request.read_committed,
            session_id=request.session_id,
        )

    def fits(self, frame: memoryview) -> bool:
        """Whether the request is one of these."""
        return self._form.read(frame) is not None

    def answer(self, frame: memoryview) -> list[Buffer] | None:
        """The whole answer; None where the request has to go the usual way."""
        new = self._form.read(frame)
        broker, asked, session_id = self._broker, self._asked, self._session_id
        if new is None or broker.quotas.fetch.active:
            return None
        sessions, key = broker.fetch_sessions, (asked.topic, asked.partition)
        if session_id == NO_SESSION:
            if new.session_epoch != FINAL_EPOCH:
                return None
        elif not sessions.is_of_one(session_id, new.session_epoch, key):
            return None
        topic, topic_id = asked.topic, None
        if isinstance(topic, UUID):
            topic_id, name = topic, broker.metadata_cache.name_of(topic)
            if name is None:
                return None
            topic = name
        try:
            read = broker.replica_manager.read_now(
                topic,
                asked.partition,
                new.fetch_offset,
                min(asked.max_bytes, self._max_bytes, broker.backlog.answer_limit),
                at_least_one=True,
                read_committed=self._read_committed,
                current_leader_epoch=asked.current_leader_epoch,
                last_fetched_epoch=asked.last_fetched_epoch,
                topic_id=topic_id,
            )
        except (KafkaError, MustReadCold):
            return None
        size = len(read.records)
        if not size or read.aborted:
            return None
        high_watermark, start_offset = read.high_watermark, read.log_start_offset
        if session_id != NO_SESSION:
            asked = PartitionFetch(*key, new.fetch_offset, *asked[3:])
            steady_ms = broker.clock.steady_ms()
            sessions.go_on(session_id, asked, high_watermark, start_offset, steady_ms)
        broker.metrics.fetch_bytes += size
        return self._answers.encode(
            new.correlation_id, high_watermark, read.last_stable_offset, start_offset, read.records
        )
