"""Fetch, versions 4 to 16: record batches from an offset on, by topic name or (version 13 on) by topic id.

Sessionless: session id 0 is always answered, which every client takes as "ask in full each time" (KIP-227);
a request inside a session gets FETCH_SESSION_ID_NOT_FOUND. The first batch of the first partition with
data is given whole however large it is; after that `max_bytes`, the partition's own limit and the broker's
`fetch.max.bytes` bound the answer. A request that finds less than `min_bytes` waits for appends, up to
`max_wait_ms`. Readers see up to the high watermark, with read_committed up to the last stable offset; with
a last fetched epoch (version 12 on) a reader whose log has parted from ours is told where (KIP-595).
Reads that are not in the page cache run on a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from millrace.broker.errors import FetchSessionIdNotFound, KafkaError, UnknownTopicId
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.frames import RequestHead as Head
from millrace.broker.protocol.hot_fetch import (
    FetchRequest,
    PartitionData,
    PartitionFetch,
    decode_request,
    encode_response,
)
from millrace.broker.replication.replica_manager import MustReadCold, PartitionRead
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.dispatch import Frame

API = Api.FETCH
VERSIONS = range(4, 17)
FRAME_VERSIONS = VERSIONS

NO_SESSION = 0
FULL_FETCH_EPOCHS = (-1, 0)
LONGEST_WAIT_MS = 24 * 3_600_000


def handle_frame(
    head: Head, frame: memoryview, position: int, context: RequestContext
) -> Frame | asyncio.Future[Any]:
    """Answer at once when there is enough in the page cache, or nothing to wait for."""
    request = decode_request(frame, position, head.version)
    broker = context.broker
    if request.session_id != NO_SESSION or request.session_epoch not in FULL_FETCH_EPOCHS:
        code = FetchSessionIdNotFound.code
        broker.metrics.count_error(code)
        return encode_response(head.version, head.correlation_id, [], error_code=code)
    fetch = _Fetch(request, broker)
    try:
        fetch.read()
    except MustReadCold:
        return asyncio.ensure_future(_answer_later(head, fetch, cold=True))
    if fetch.satisfied:
        return _encode(head, fetch)
    return asyncio.ensure_future(_answer_later(head, fetch, cold=False))


async def _answer_later(head: Head, fetch: _Fetch, *, cold: bool) -> Frame:
    """Read what is cold on a thread, and wait for appends as long as the request allows."""
    if cold:
        await fetch.read_cold()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(fetch.request.max_wait_ms, LONGEST_WAIT_MS) / 1000
    while not fetch.satisfied:
        remaining = deadline - loop.time()
        if remaining <= 0 or not (fetch.is_outdated or await fetch.wait(remaining)):
            break
        await fetch.read_cold()
    return _encode(head, fetch)


def _encode(head: Head, fetch: _Fetch) -> Frame:
    fetch.broker.metrics.fetch_bytes += fetch.size
    return encode_response(head.version, head.correlation_id, fetch.given)


class _Fetch:
    """One request on its way: what was asked, what has been read so far."""

    __slots__ = ("_change_count", "broker", "given", "keys", "request", "satisfied", "size")

    def __init__(self, request: FetchRequest, broker: BrokerServices) -> None:
        self.request = request
        self.broker = broker
        self.given: Sequence[PartitionData] = ()
        self.keys: list[tuple[str, int]] = []
        self.size = 0
        self.satisfied = False
        self._change_count = -1

    @property
    def is_outdated(self) -> bool:
        """Whether there was an append since the last reading began; a wait would not hear of it."""
        return self._change_count != self.broker.replica_manager.waiting_fetches.change_count

    def read(self) -> None:
        """Read from the page cache. Raises MustReadCold when a disk would have to be waited for."""
        self._take([self._read_one(asked, self.broker) for asked in self._begin()])

    async def read_cold(self) -> None:
        """The same, where a partition that is not in the page cache is read on a thread."""
        reads = []
        for asked in self._begin():
            try:
                reads.append(self._read_one(asked, self.broker))
            except MustReadCold as cold:
                try:
                    reads.append(self._counted(asked, await cold.read()))
                except KafkaError as error:
                    self.broker.metrics.count_error(error.code)
                    reads.append(PartitionData(asked.topic, asked.partition, error.code))
        self._take(reads)

    async def wait(self, timeout_seconds: float) -> bool:
        """Sleep until the missing bytes have come; False when time is up."""
        self.broker.metrics.fetch_waits += 1
        missing = max(self.request.min_bytes - self.size, 1)
        return await self.broker.replica_manager.waiting_fetches.wait(self.keys, missing, timeout_seconds)

    def _begin(self) -> Sequence[PartitionFetch]:
        self.size = 0
        self.keys = []
        self._change_count = self.broker.replica_manager.waiting_fetches.change_count
        return self.request.partitions

    def _take(self, given: list[PartitionData]) -> None:
        self.given = given
        request = self.request
        self.satisfied = (
            self.size >= request.min_bytes
            or request.max_wait_ms <= 0
            or not self.keys
            or any(part.error_code or part.diverging for part in given)
        )

    def _read_one(self, asked: PartitionFetch, broker: BrokerServices) -> PartitionData:
        topic: Any = asked.topic
        try:
            if isinstance(topic, UUID):
                topic = broker.metadata_cache.name_of(topic)
                if topic is None:
                    raise UnknownTopicId("no topic has this id")
            limit = min(self.request.max_bytes, broker.config.settings.fetch_max_bytes) - self.size
            read = broker.replica_manager.read_now(
                topic,
                asked.partition,
                asked.fetch_offset,
                min(asked.max_bytes, limit),
                at_least_one=self.size == 0,
                read_committed=self.request.read_committed,
                current_leader_epoch=asked.current_leader_epoch,
                last_fetched_epoch=asked.last_fetched_epoch,
            )
        except KafkaError as error:
            broker.metrics.count_error(error.code)
            return PartitionData(asked.topic, asked.partition, error.code)
        self.keys.append((topic, asked.partition))
        return self._counted(asked, read)

    def _counted(self, asked: PartitionFetch, read: PartitionRead) -> PartitionData:
        self.size += len(read.records)
        return PartitionData(
            asked.topic,
            asked.partition,
            read.error_code,
            read.high_watermark,
            read.last_stable_offset,
            read.log_start_offset,
            read.records,
            () if self.request.read_committed else None,
            -1,
            read.diverging,
        )
