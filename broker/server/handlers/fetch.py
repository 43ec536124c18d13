"""Fetch, versions 4 to 17: record batches from an offset on, by topic name or (version 13 on) by topic id.

The first batch of the first partition with data is given whole however large it is; after that `max_bytes`,
the partition's own limit and what the broker can hold for slow readers (`fetch.max.bytes`, less when much is
unread: see `memory_limits.py`) bound the answer. A request that finds less than `min_bytes` waits for
appends, up to `max_wait_ms`; it keeps no records meanwhile. Readers see up to the high watermark, with
read_committed up to the last stable offset; with a last fetched epoch (version 12 on) a reader whose log has
parted from ours is told where (KIP-595). Reads that are not in the page cache run on a thread.

Every partition costs some 4 µs, and a request may name as many as it has room for: of more than
`MOST_AT_ONCE` some are read, then others have their turn, and frames are read and written on a thread.

A request in a session is seen through `fetch_sessions.py` (KIP-227); the plain one costs a comparison. One
that is like an earlier one of its connection may not come here at all (`fetch_shortcut.py`). A
client over its quota is answered empty, with a throttle time. Followers (`replica_id` of 0 and up) have no
quota; a follower's fetch that does not wait ends its fetch of the same partition that does, so that it can
ask for more partitions at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from uuid import UUID

from millrace.broker.errors import (
    FencedLeaderEpoch,
    KafkaError,
    KafkaStorageError,
    NotLeaderOrFollower,
    UnknownTopicId,
)
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.frames import RequestHead as Head
from millrace.broker.protocol.hot_fetch import (
    FIRST_WITH_TOPIC_IDS,
    VERSIONS,
    FetchRequest,
    PartitionData,
    PartitionFetch,
    decode_request,
    encode_response,
)
from millrace.broker.protocol.session_epochs import FINAL_EPOCH, NO_SESSION
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.local_partition import FollowerFetch, MustReadCold, PartitionRead
from millrace.broker.replication.off_loop import Turns
from millrace.broker.replication.waiting_requests import WaitEnd
from millrace.broker.server import fetch_shortcut
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.dispatch import KEPT_FRAME_SIZE, Answered, Throttled
from millrace.broker.server.fetch_sessions import SessionFetch
from millrace.broker.telemetry.garbage import left_alone, look_at_time

API = Api.FETCH
FRAME_VERSIONS = VERSIONS

CONSUMER = -1
LONGEST_WAIT_MS = 24 * 3_600_000

MOST_AT_ONCE = 4_000
"""Partitions that are read in one turn of the event loop: some 10 ms."""
LARGEST_FRAME_AT_ONCE = 128 << 10
"""Bytes of a request that names no more than that."""
LONGEST_WAIT_OF_LARGE_MS = 1_000
"""Of a fetch of more than `MOST_AT_ONCE`, whatever it asks for; readers wait for half a second as a rule.
Garbage is left alone meanwhile: to look through what such a fetch has made takes 0.7 ms for a thousand
partitions, all in one turn, and for long garbage cannot be left alone."""

FIRST_WITH_STORAGE_ERROR = 6
FIRST_WITH_CURRENT_LEADER = 16
NAMES_LEADER = frozenset({NotLeaderOrFollower.code, FencedLeaderEpoch.code})
"""Refusals that tell who leads instead (KIP-951)."""


def handle_frame(
    head: Head, frame: memoryview, position: int, context: RequestContext
) -> Answered | Coroutine[Any, Any, Any] | asyncio.Future[Any]:
    """Answer at once when there is enough in the page cache, or nothing to wait for."""
    if len(frame) > LARGEST_FRAME_AT_ONCE:
        kept = frame if len(frame) >= KEPT_FRAME_SIZE else memoryview(bytes(frame))
        return _handle_large(head, kept, position, context)
    request = decode_request(frame, position, head.version)
    fetch_shortcut.note(head, frame, position, request, context.broker, context.memory)
    if len(request.partitions) > 1:
        request = _once_each(request)
    return _handle(head, request, context)


async def _handle_large(
    head: Head, frame: memoryview, position: int, context: RequestContext
) -> Answered | asyncio.Future[Any]:
    """While it is decoded, the connection's next requests wait: they may be of the same session. Of more than
    `LARGEST_FRAME_AT_ONCE` bytes garbage is left alone from here on."""
    with left_alone():
        request = await asyncio.to_thread(_decoded, frame, position, head.version)
        answer = _handle(head, request, context)
        await asyncio.sleep(0)  # it begins, and leaves its garbage alone itself
    return answer


def _decoded(frame: memoryview, position: int, version: int) -> FetchRequest:
    return _once_each(decode_request(frame, position, version))


def _once_each(request: FetchRequest) -> FetchRequest:
    """As in Apache Kafka, of a partition that stands there more than once what is said last counts, once."""
    partitions = {(asked.topic, asked.partition): asked for asked in request.partitions}
    if len(partitions) == len(request.partitions):
        return request
    return request._replace(partitions=list(partitions.values()))


def _handle(head: Head, request: FetchRequest, context: RequestContext) -> Answered | asyncio.Future[Any]:
    broker = context.broker
    session: SessionFetch | None = None
    if request.session_epoch != FINAL_EPOCH or request.session_id != NO_SESSION:
        uses_ids = head.version >= FIRST_WITH_TOPIC_IDS
        resolved = broker.fetch_sessions.resolve(request, uses_ids, broker.clock.steady_ms())
        if isinstance(resolved, tuple):
            code, session_id = resolved
            broker.metrics.count_error(code)
            return encode_response(
                head.version, head.correlation_id, [], error_code=code, session_id=session_id
            )
        session = resolved
    fetch = _Fetch(head, request, broker, session)
    if fetch.is_large:
        return asyncio.ensure_future(_answer_later(head, fetch, cold=True))
    try:
        fetch.read()
    except MustReadCold:
        return asyncio.ensure_future(_answer_later(head, fetch, cold=True))
    if fetch.satisfied:
        if request.replica_id >= 0:
            fetch.end_earlier_waits()
        return _encode(head, fetch)
    return asyncio.ensure_future(_answer_later(head, fetch, cold=False))


async def _answer_later(head: Head, fetch: _Fetch, *, cold: bool) -> Answered:
    """Read what is cold on a thread, and wait for appends as long as the request allows."""
    if fetch.is_large:
        with left_alone():
            return await _answer_large(head, fetch)
    await _complete(fetch, cold=cold)
    return _encode(head, fetch)


async def _answer_large(head: Head, fetch: _Fetch) -> Answered:
    try:
        await _complete(fetch, cold=True)
        encode, throttle_ms = _accounted(head, fetch)
        frame = await asyncio.to_thread(encode)
        return Throttled(frame, throttle_ms) if throttle_ms else frame
    finally:
        _let_go_beside(fetch)


def _let_go_beside(fetch: _Fetch) -> None:
    """On a thread; nobody waits for it, and garbage is left alone from now on until it has ended."""
    alone = ExitStack()
    alone.enter_context(left_alone())

    def let_go() -> None:
        with alone:
            fetch.let_go()

    try:
        asyncio.get_running_loop().run_in_executor(None, let_go)
    except RuntimeError:
        alone.close()  # the broker ends


async def _complete(fetch: _Fetch, *, cold: bool) -> None:
    """Read until there is enough, or time is up."""
    if cold:
        await fetch.read_cold()
        if fetch.satisfied and fetch.request.replica_id >= 0:
            fetch.end_earlier_waits()
    loop = asyncio.get_running_loop()
    longest_ms = LONGEST_WAIT_OF_LARGE_MS if fetch.is_large else LONGEST_WAIT_MS
    deadline = loop.time() + min(fetch.request.max_wait_ms, longest_ms) / 1000
    while not fetch.satisfied:
        remaining = deadline - loop.time()
        if remaining <= 0:
            break
        if fetch.is_outdated:
            await fetch.read_cold()
            continue
        in_time, touched = await fetch.wait(remaining)
        await fetch.read_again(touched)
        if not in_time:
            break


def _encode(head: Head, fetch: _Fetch) -> Answered:
    broker = fetch.broker
    if fetch.session is None and not broker.quotas.fetch.active:
        broker.metrics.fetch_bytes += fetch.size
        nodes = broker.metadata_cache.brokers
        return encode_response(head.version, head.correlation_id, fetch.given or (), nodes=nodes)
    encode, throttle_ms = _accounted(head, fetch)
    return Throttled(encode(), throttle_ms) if throttle_ms else encode()


def _accounted(head: Head, fetch: _Fetch) -> tuple[Callable[[], list[Buffer]], int]:
    """What writes the answer, also on a thread, once the session and the quota know of it; the throttle
    time."""
    broker, session, size = fetch.broker, fetch.session, fetch.size
    steady_ms = broker.clock.steady_ms()
    quota = broker.quotas.fetch
    throttle_ms = 0
    if quota.active and fetch.request.replica_id == CONSUMER:
        throttle_ms = quota.charge(head.client_id, size, steady_ms)
    error_code, session_id, given = 0, NO_SESSION, fetch.given or ()
    if throttle_ms:
        # The client comes back for the same data when it may.
        quota.take_back(head.client_id, size, steady_ms)
        given = ()
        if session is not None:
            error_code, session_id, given = session.finish_empty()
    elif session is not None:
        error_code, session_id, given = session.finish(given, steady_ms)
    if error_code:
        broker.metrics.count_error(error_code)
    if given:
        broker.metrics.fetch_bytes += size
    encode = partial(
        encode_response,
        head.version,
        head.correlation_id,
        given,
        throttle_ms=throttle_ms,
        error_code=error_code,
        session_id=session_id,
        nodes=broker.metadata_cache.brokers,
    )
    return encode, throttle_ms


class _Fetch:
    """One request on its way: what was asked, what has been read so far."""

    __slots__ = (
        "_change_count",
        "_head",
        "_is_first",
        "_limit",
        "_min_size",
        "_reached_size",
        "_waits",
        "asked",
        "broker",
        "given",
        "is_large",
        "keys",
        "request",
        "satisfied",
        "session",
        "size",
    )

    def __init__(
        self, head: Head, request: FetchRequest, broker: BrokerServices, session: SessionFetch | None
    ) -> None:
        self._head = head
        self.request = request
        self.broker = broker
        self.session = session
        self.given: Sequence[PartitionData] | None = ()
        self._limit = 0
        self._min_size = 0
        self.keys: list[TopicPartition] = []
        self.size = 0
        self._reached_size = 0
        """Counts towards `min_bytes`: what was read, and the room that no whole batch fits into."""
        self.satisfied = False
        self.asked: Sequence[PartitionFetch] = request.partitions if session is None else session.partitions
        self.is_large = len(self.asked) > MOST_AT_ONCE
        """Whether others are to have their turn before all of it is read."""
        self._change_count = -1
        replicas = broker.replica_manager
        # A follower waits for the log's end, everyone else for the high watermark.
        self._waits = replicas.waiting_fetches if request.replica_id < 0 else replicas.waiting_followers
        self._is_first = True

    @property
    def is_outdated(self) -> bool:
        """Whether there was an append since the last reading began; a wait would not hear of it."""
        return self._change_count != self._waits.change_count

    def read(self) -> None:
        """Read from the page cache. Raises MustReadCold when a disk would have to be waited for."""
        self._begin()
        self._take([self._read_one(asked, self.broker) for asked in self.asked])

    async def read_cold(self) -> None:
        """The same, where a partition that is not in the page cache is read on a thread, and others have
        their turn while very many are read."""
        self._begin()
        with self._waits.noting_changes() as changed:
            given = await self._read_in_turns()
        # On a busy broker something has changed meanwhile, always: to read all again would never end. What
        # has come besides what was read is found when the wait ends.
        self._change_count = self._waits.change_count
        self._take(given)
        if not self.satisfied and not self.size:
            await self.read_again(changed)

    async def _read_in_turns(self) -> list[PartitionData]:
        given, turns = [], Turns()
        for asked in self.asked:
            given.append(await self._read_one_cold(asked))
            if await turns.maybe():
                look_at_time()
        return given

    async def read_again(self, touched: set[TopicPartition]) -> None:
        """After a wait: only what has changed, where nothing had been read before."""
        if self.given is None:
            await self.read_cold()
        elif touched:
            # Nobody waits after a refusal, so all that is asked for has its key, in the same order.
            given, keys = list(self.given), self.keys
            self._begin()
            for number, key in enumerate(keys):
                if key in touched:
                    given[number] = await self._read_one_cold(self.asked[number])
            self.keys = keys
            self._take(given)

    async def _read_one_cold(self, asked: PartitionFetch) -> PartitionData:
        try:
            return self._read_one(asked, self.broker)
        except MustReadCold as cold:
            read_cold = cold.read
        try:
            return self._counted(asked, await read_cold())
        except KafkaError as error:
            return self._refused(asked, error)

    def end_earlier_waits(self) -> None:
        """Where this follower's fetch does not wait, its waiting fetch of these partitions is answered now.
        One that came in the same piece of the stream has still to begin its wait, which it does before the
        loop comes to this."""
        if self.request.max_wait_ms > 0:
            return
        for key in self.keys:
            asyncio.get_running_loop().call_soon(self._waits.give_up, key, self.request.replica_id)

    async def wait(self, timeout_seconds: float) -> WaitEnd:
        """Sleep until the missing bytes have come, or time is up. Records that were read are let go of
        meanwhile: `given` is None then."""
        self.broker.metrics.fetch_waits += 1
        missing = max(self._min_size - self._reached_size, 1)
        if self.size:
            self.given = None
        return await self._waits.wait(
            self.keys,
            missing,
            timeout_seconds,
            self.request.replica_id,
            read_committed=self.request.read_committed,
        )

    def let_go(self) -> None:
        """Free what was asked for and given, once it is written: very many objects in one go hold up all
        threads for as long as it takes."""
        for objects in (self.given, self.asked, self.keys):
            while objects and isinstance(objects, list):
                del objects[-MOST_AT_ONCE:]

    def _begin(self) -> None:
        self.size = self._reached_size = 0
        self.keys = []
        broker, request = self.broker, self.request
        self._change_count = self._waits.change_count
        limit = min(request.max_bytes, broker.backlog.answer_limit)
        if broker.quotas.fetch.active and request.replica_id == CONSUMER:
            limit = min(limit, broker.quotas.fetch.most_at_once(self._head.client_id))
        self._limit = limit
        # What an answer cannot hold need not be waited for.
        self._min_size = min(request.min_bytes, limit)

    def _take(self, given: list[PartitionData]) -> None:
        self.given = given
        self._is_first = False
        request = self.request
        self.satisfied = (
            self._reached_size >= self._min_size
            or request.max_wait_ms <= 0
            or not self.keys
            or any(part.error_code or part.diverging for part in given)
        )

    def _read_one(self, asked: PartitionFetch, broker: BrokerServices) -> PartitionData:
        topic: Any = asked.topic
        topic_id: UUID | None = None
        try:
            if isinstance(topic, UUID):
                topic_id, topic = topic, broker.metadata_cache.name_of(topic)
                if topic is None:
                    raise UnknownTopicId("no topic has this id")
            self.keys.append((topic, asked.partition))
            read = broker.replica_manager.read_now(
                topic,
                asked.partition,
                asked.fetch_offset,
                min(asked.max_bytes, self._limit - self.size),
                at_least_one=self.size == 0,
                read_committed=self.request.read_committed,
                current_leader_epoch=asked.current_leader_epoch,
                last_fetched_epoch=asked.last_fetched_epoch,
                follower=None if self.request.replica_id < 0 else self._follower(asked),
                topic_id=topic_id,
            )
        except KafkaError as error:
            return self._refused(asked, error)
        return self._counted(asked, read)

    def _follower(self, asked: PartitionFetch) -> FollowerFetch:
        request = self.request
        return FollowerFetch(
            request.replica_id, request.replica_epoch, asked.log_start_offset, self._is_first
        )

    def _refused(self, asked: PartitionFetch, error: KafkaError) -> PartitionData:
        code = error.code
        if code == KafkaStorageError.code and self._head.version < FIRST_WITH_STORAGE_ERROR:
            code = NotLeaderOrFollower.code  # old clients do not know the other as worth another try
        self.broker.metrics.count_error(code)
        leader = None
        if self._head.version >= FIRST_WITH_CURRENT_LEADER and code in NAMES_LEADER:
            leader = self.broker.metadata_cache.leader_of(asked.topic, asked.partition)
        return PartitionData(asked.topic, asked.partition, code, current_leader=leader)

    def _counted(self, asked: PartitionFetch, read: PartitionRead) -> PartitionData:
        size = len(read.records)
        room = min(asked.max_bytes, self._limit - self.size)
        # As in Apache Kafka, whose answers end in the middle of a batch: what is there fills the room.
        self._reached_size += max(size, room) if read.has_more else size
        self.size += size
        return PartitionData(
            asked.topic,
            asked.partition,
            read.error_code,
            read.high_watermark,
            read.last_stable_offset,
            read.log_start_offset,
            read.records,
            read.aborted if self.request.read_committed else None,
            -1,
            read.diverging,
        )
