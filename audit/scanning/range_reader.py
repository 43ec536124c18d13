"""Reading pinned offset ranges of partitions as whole batches, from code that is not asynchronous.

Spark calls a partition reader as a plain generator, the client is asyncio: `RangeReader` runs the client's
loop in a thread of its own and keeps the *next* fetch in flight while the caller works on the current one
(the scan releases the GIL). Called by `spark_source` inside Spark's Python workers.

Invariants:
- read_committed: control batches and batches of aborted transactions are marked as skipped, by the rule of
  KIP-98 (an aborted producer's batches from its first offset until its abort marker); without it, which only
  records mode asks for, control batches alone;
- a batch whose CRC is wrong, or of an old format, is marked as skipped and told to `distrust`; so are bytes
  that are no batch at all, or that the broker itself finds damaged, and reading goes on at the first offset
  behind them that has one;
- no header that cannot be believed says where to read on, nor what is aborted behind it;
- every offset of the range is read or told to `unread`; a partition that stops answering raises one
  `ClusterUnreachable` line, so that a job never takes silence for an empty log, nor a remote store (KIP-405)
  that gives nothing for a hole; so does one of another topic than was pinned, under the same name.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from millrace.audit.scanning.credentials import Login, security_of
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.client.offsets import EARLIEST, LATEST, local_start
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition, fetch
from millrace.broker.errors import ClusterUnreachable, KafkaError, ProtocolError, error_for_code
from millrace.broker.protocol.batch import CONTROL_BIT, HEADER_SIZE, TRANSACTIONAL_BIT
from millrace.broker.protocol.batch_index import damaged_rows, index_of
from millrace.broker.protocol.batch_kernels import (
    B_ATTRIBUTES,
    B_BASE_OFFSET,
    B_CHECK,
    B_COUNT,
    B_LAST_OFFSET,
    B_MAGIC,
    B_POSITION,
    B_PRODUCER_ID,
    CRC_WRONG,
)

FETCH_WAIT_MS = 500
# A fetch that stays in the processor's cache from the socket to the scan costs both sides half of one that
# does not; only where the way is long is more asked for at once.
FIRST_FETCH_BYTES = 2 << 20
LONG_WAY_S = 0.05
PATIENCE_S = 30.0  # how long a partition may give nothing below its own end before the job gives up
RETRY_WAIT_S = 0.1
# Empty answers before a hole that reaches the pinned end is believed, if it is one of the leader's own disk.
HOLE_AFTER_EMPTY_COUNT = 3
DAMAGED_AFTER_COUNT = 5  # answers "corrupt" before it is believed: another leader may have whole bytes
_SMALLEST_BATCH = 61
_OFFSET_OUT_OF_RANGE = 1
_CORRUPT_MESSAGE = 2
_ABORT_MARKER = 0
_STORE_AWAY = "its remote store gives nothing"
COMPACTED, DAMAGED, EXPIRED = "compacted", "damaged", "expired"
REFUSED = "stretch of bytes that its broker finds corrupt"
NO_BATCH = "stretch of bytes that is no batch"
WRONG_CRC = "batch with a wrong CRC"
UNSENT = "stretch of offsets for which its broker sends nothing, and has records behind it"

T = TypeVar("T")


@dataclass(slots=True)
class FetchedBatches:
    """Whole batches of one fetch. Rows of `index` whose B_MAGIC is not 2 are to be skipped."""

    buffer: NDArray[np.uint8]
    index: NDArray[np.int64]


class RangeReader:
    """A client thread for the clusters named in `bootstraps`; use as a context manager."""

    def __init__(
        self,
        bootstraps: Mapping[str, Sequence[str]],
        fetch_max_bytes: int,
        securities: Mapping[str, Login] | None = None,
        *,
        read_committed: bool = True,
    ) -> None:
        self._bootstraps = bootstraps
        self._securities = securities or {}
        self._read_committed = read_committed
        self._fetch_max_bytes = fetch_max_bytes
        self._fetch_bytes = min(FIRST_FETCH_BYTES, fetch_max_bytes)
        self._clusters: dict[str, Cluster] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="millrace-fetch", daemon=True)

    def __enter__(self) -> RangeReader:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for cluster in self._clusters.values():
            self._submit(cluster.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def read(
        self,
        range_: OffsetRange,
        distrust: Callable[[str], None],
        unread: Callable[[int, int, str], None],
    ) -> Iterator[FetchedBatches]:
        """Yield the range's batches in order; the arrays live as long as the caller keeps them."""
        aborted = AbortedTransactions()
        offset = range_.first_offset
        pending = self._submit(self._fetch(range_, offset))
        try:
            while True:
                fetched = pending.result()
                is_damaged_at_end = True
                if fetched is None:
                    # Compaction leaves nothing up to the end, or damage hides what is behind it: to Apache
                    # Kafka a batch that would reach beyond its file is the end of the file.
                    resume = self._submit(self._first_readable(range_, offset)).result()
                    if resume < range_.end_offset:
                        distrust(UNSENT)
                    unread(offset, resume, DAMAGED if resume < range_.end_offset else COMPACTED)
                    offset = resume
                    batches = None
                elif fetched.error_code == _OFFSET_OUT_OF_RANGE:
                    start = min(max(fetched.log_start_offset, offset), range_.end_offset)
                    # Retention moved past the position since it was pinned. An end that moved *below* it
                    # means a truncated log: nothing of the range can be read any more.
                    resume = start if start > offset else range_.end_offset
                    unread(offset, resume, EXPIRED if start > offset else "truncated")
                    offset = resume
                    batches = None
                else:
                    batches = leading_batches(fetched.records, offset)
                    if batches is None:
                        is_refused = fetched.error_code == _CORRUPT_MESSAGE
                        distrust(REFUSED if is_refused else what_is_damaged(fetched.records))
                        resume = self._submit(self._first_readable(range_, offset)).result()
                        unread(offset, resume, DAMAGED)
                        offset = resume
                    else:
                        if fetched.aborted or aborted:
                            batches = until_damage(batches)
                        is_damaged_at_end = not is_believed(batches.index)[-1]
                        hole = hole_within(batches.index, offset, range_.end_offset)
                        if hole is not None:
                            unread(*hole, COMPACTED)
                        # Whatever it says, never fetch this one again.
                        offset = max(offset + 1, int(batches.index[-1, B_LAST_OFFSET]) + 1)
                if offset < range_.end_offset:
                    pending = self._submit(self._fetch(range_, offset))
                if fetched is not None and batches is not None:
                    aborted.learn(fetched.aborted)
                    mark_skipped(batches, aborted, distrust, unread)
                    yield batches
                if is_damaged_at_end:
                    # A marker may be among what is damaged: the broker tells anew what is aborted behind it.
                    aborted = AbortedTransactions()
                if offset >= range_.end_offset:
                    return
        finally:
            pending.cancel()

    async def _first_readable(self, range_: OffsetRange, damaged: int) -> int:
        """The first offset behind a damaged one at which a fetch finds a batch; the range's end if none does.

        By doubling the step and then halving it: damage is taken for one stretch, as what a disk lost is.
        """

        async def is_readable(offset: int) -> bool:
            found = await self._fetch(range_, offset)
            return found is not None and leading_batches(found.records, offset) is not None

        low, step = damaged, 1
        while not await is_readable(high := min(damaged + step, range_.end_offset)):
            if high == range_.end_offset:
                return high
            low, step = high, 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if await is_readable(middle) else (middle, high)
        return high

    async def _fetch(self, range_: OffsetRange, offset: int) -> FetchedPartition | None:
        """One fetch with at least one whole batch, or OffsetOutOfRange; retries what may heal.

        None where a leader that has the range's end keeps sending nothing of its own disk: a hole reaches to
        the end. One that keeps sending less than the batch that it begins with has damaged bytes: they are
        given as such, and so is the answer of one that keeps finding them corrupt itself (it sends none of
        them). OffsetOutOfRange is given where the log does not hold the offset.
        """
        deadline = time.monotonic() + PATIENCE_S
        reason = "no answer"
        fresh_metadata = False
        empty_count = corrupt_count = 0
        while time.monotonic() < deadline:
            try:
                fetched = await self._fetch_once(range_, offset, fresh_metadata)
                if not fetched.error_code:
                    if holds_whole_batch(fetched.records):
                        return fetched
                    reason = "no records"
                    readable = fetched.last_stable_offset if self._read_committed else fetched.high_watermark
                    empty_count += readable >= range_.end_offset
                    if empty_count < HOLE_AFTER_EMPTY_COUNT:
                        continue  # the broker long-polled: no need to wait here
                    if len(fetched.records):
                        return fetched
                    if not await self._is_remote(range_, offset):
                        return None
                    reason = _STORE_AWAY  # so Apache Kafka ends a fetch that has waited long enough for it
                elif fetched.error_code == _OFFSET_OUT_OF_RANGE:
                    if fetched.log_start_offset < 0:
                        # Apache Kafka does not say where its log begins, when it has not what was asked for.
                        fetched = replace(fetched, log_start_offset=await self._listed(range_, EARLIEST))
                    if offset < fetched.log_start_offset or await self._listed(range_, LATEST) < offset:
                        return fetched
                    # Apache Kafka says so of a place that its remote store has no word of now.
                    is_remote = await self._is_remote(range_, offset)
                    reason = _STORE_AWAY if is_remote else "out of range, says its leader, in whose log it is"
                else:
                    corrupt_count += fetched.error_code == _CORRUPT_MESSAGE
                    if corrupt_count >= DAMAGED_AFTER_COUNT:
                        return replace(fetched, records=memoryview(b""))
                    problem = error_for_code(fetched.error_code)
                    if not problem.retriable:
                        raise problem
                    reason = str(problem)
            except ProtocolError as error:
                reason = str(error)
            except KafkaError as error:
                if not error.retriable:
                    raise ClusterUnreachable(range_.cluster, f"{range_.place}: {error}") from error
                reason = str(error)
            fresh_metadata = True
            await asyncio.sleep(RETRY_WAIT_S)
        remedy = "check the partition's leader"
        if reason == _STORE_AWAY:
            remedy = "check its tiered storage; if it is slow, raise remote.fetch.max.wait.ms of the brokers"
        raise ClusterUnreachable(
            range_.cluster,
            f"{range_.place} gave nothing at offset {offset}, below its end {range_.end_offset}, for "
            f"{PATIENCE_S:.0f} s ({reason}); {remedy}",
        )

    async def _fetch_once(self, range_: OffsetRange, offset: int, fresh_metadata: bool) -> FetchedPartition:
        cluster = await self._cluster(range_.cluster)
        if fresh_metadata:
            metadata = await cluster.metadata([range_.topic_here], max_age_ms=0)
        else:
            metadata = await cluster.metadata([range_.topic_here])
        topic = metadata.topics.get(range_.topic_here)
        pinned_id = UUID(range_.topic_id) if range_.topic_id else NO_TOPIC_ID
        if topic is not None and NO_TOPIC_ID != topic.topic_id != pinned_id != NO_TOPIC_ID:
            raise ClusterUnreachable(
                range_.cluster,
                f"topic {range_.topic_here} was deleted and made anew while it was read; run the audit again",
            )
        partition = topic.partitions.get(range_.partition) if topic else None
        if partition is None or partition.leader < 0:
            raise error_for_code(5, f"{range_.place} has no leader")
        key = (range_.topic_here, range_.partition)
        asked_bytes, asked_s = self._fetch_bytes, time.monotonic()
        answers = await fetch(
            cluster,
            partition.leader,
            {key: FetchPosition(offset, topic_id=pinned_id)},
            min_bytes=1,
            max_wait_ms=FETCH_WAIT_MS,
            max_bytes=asked_bytes,
            partition_max_bytes=asked_bytes,
            read_committed=self._read_committed,
        )
        took_s = time.monotonic() - asked_s
        for answer in answers:
            if (answer.topic, answer.partition) == key:
                if took_s > LONG_WAY_S and len(answer.records) > asked_bytes // 2:  # full, not waited for
                    self._fetch_bytes = min(2 * asked_bytes, self._fetch_max_bytes)
                return answer
        raise error_for_code(5, f"{range_.place} was not in the answer")

    async def _listed(self, range_: OffsetRange, at: int) -> int:
        cluster = await self._cluster(range_.cluster)
        key = (range_.topic_here, range_.partition)
        return (await cluster.list_offsets({key: at}))[key].offset

    async def _is_remote(self, range_: OffsetRange, offset: int) -> bool:
        """Whether the leader has the offset in a remote store alone, which may be away."""
        cluster = await self._cluster(range_.cluster)
        return offset < await local_start(cluster, (range_.topic_here, range_.partition))

    async def _cluster(self, name: str) -> Cluster:
        cluster = self._clusters.get(name)
        if cluster is None:
            cluster = connect(name, self._bootstraps[name], self._securities)
            await cluster.__aenter__()
            self._clusters[name] = cluster
        return cluster

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def connect(name: str, bootstrap: Sequence[str], securities: Mapping[str, Login]) -> Cluster:
    """A client of a cluster, for whoever runs in Spark's workers. Raises ConfigError where the files that its
    security section names are not on this machine."""
    security = security_of(name, securities.get(name, {}))
    return Cluster(name, list(bootstrap), client_id="millrace-audit", security=security)


def hole_within(index: NDArray[np.int64], first_offset: int, end_offset: int) -> tuple[int, int] | None:
    """The least range that holds every offset of [first_offset, the last batch's end) without a record.

    Only compaction makes such holes: a log gives every record, marker and aborted record its own offset. None
    where there is no hole, which is nearly always.
    """
    lasts, bases = index[:, B_LAST_OFFSET], index[:, B_BASE_OFFSET]
    expected = np.concatenate(([first_offset], lasts[:-1] + 1))
    before = bases > expected
    hollow = index[:, B_COUNT] < lasts - bases + 1
    rows = np.flatnonzero((before & (index[:, B_MAGIC] == 2)) | (hollow & is_believed(index)))
    if not len(rows):
        return None
    first, last = int(rows[0]), int(rows[-1])
    start = max(int(expected[first] if before[first] else bases[first]), first_offset)
    end = min(int(lasts[last] + 1 if hollow[last] else bases[last]), end_offset)
    return (start, end) if start < end else None


def holds_whole_batch(records: memoryview) -> bool:
    """Whether at least one whole batch is there (an answer may be empty, or cut inside its first batch)."""
    if len(records) < _SMALLEST_BATCH:
        return False
    return int.from_bytes(records[8:12], "big", signed=True) + 12 <= len(records)


def index_fetched(records: memoryview | bytes | bytearray) -> FetchedBatches:
    """The batch index of a fetch answer's bytes."""
    return FetchedBatches(*index_of(records))


def leading_batches(records: memoryview | bytes | bytearray, offset: int) -> FetchedBatches | None:
    """The batches that an answer to a fetch from `offset` begins with, as far as each follows on the last.

    What comes behind is asked for again, and begins the next answer. None where nothing does: the bytes are
    damaged. A batch's CRC does not cover its offset and length, so that a damaged one may look whole.

    What a header that cannot be believed names as its last offset is replaced by what is known: it reaches to
    the batch that follows. Where none does, one of an old format ends with its own offset, and one with a
    wrong CRC is left for the next answer.
    """
    batches = index_fetched(records)
    index = batches.index
    if not len(index):
        return None
    damaged_rows(batches.buffer, index)  # fills B_CHECK
    doubted = ~is_believed(index)
    bases, lasts = index[:, B_BASE_OFFSET], index[:, B_LAST_OFFSET]
    nexts = np.append(bases[1:], 0)
    lasts[doubted] = np.maximum(bases, nexts - 1)[doubted]
    follows = (lasts >= bases) & (bases >= 0)
    follows[0] &= bool(lasts[0] >= offset)
    follows[1:] &= bases[1:] > lasts[:-1]
    count = len(index) if follows.all() else int(np.argmin(follows))
    if 0 < count < len(index):
        # Of the two that do not fit, the former is misplaced where it alone seems to leave out offsets.
        before = int(lasts[count - 2]) if count > 1 else offset - 1
        count -= bool(bases[count - 1] > before + 1 and bases[count] > before)
    while count and index[count - 1, B_CHECK] == CRC_WRONG:
        count -= 1
    if not count:
        return None
    if doubted[count - 1]:
        lasts[count - 1] = bases[count - 1]
    return FetchedBatches(batches.buffer, index[:count])


def is_believed(index: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each row whose B_CHECK is known: whether its header says what it was written with."""
    return (index[:, B_MAGIC] == 2) & (index[:, B_CHECK] != CRC_WRONG)


def until_damage(batches: FetchedBatches) -> FetchedBatches:
    """Up to where a batch follows on one that cannot be believed, which may have been a marker."""
    believed = is_believed(batches.index)
    ends = np.flatnonzero(believed[1:] & ~believed[:-1])
    return FetchedBatches(batches.buffer, batches.index[: ends[0] + 1]) if len(ends) else batches


def what_is_damaged(records: memoryview | bytes | bytearray) -> str:
    """What an answer begins with whose first bytes cannot be read."""
    batches = index_fetched(records)
    damaged = damaged_rows(batches.buffer, batches.index)
    return WRONG_CRC if len(damaged) and damaged[0] == 0 else NO_BATCH


def offsets_of(batch: NDArray[np.int64]) -> tuple[int, int]:
    """[first offset, end offset) that a batch's header names; a damaged one may name any."""
    base = int(batch[B_BASE_OFFSET])
    return base, max(base, int(batch[B_LAST_OFFSET])) + 1


class AbortedTransactions:
    """Which producers' batches belong to an aborted transaction at the current place of a partition."""

    def __init__(self) -> None:
        self._ahead: dict[int, list[int]] = {}
        self._active: set[int] = set()
        self._ended: dict[int, int] = {}

    def learn(self, aborted: Sequence[tuple[int, int]]) -> None:
        """Take the (producer id, first offset) pairs of a fetch; the same pair may come with many fetches."""
        for producer_id, first_offset in aborted:
            ahead = self._ahead.setdefault(producer_id, [])
            if first_offset not in ahead and first_offset > self._ended.get(producer_id, -1):
                ahead.append(first_offset)

    def __bool__(self) -> bool:
        return bool(self._ahead or self._active)

    def hides(self, producer_id: int, base_offset: int) -> bool:
        """Whether a transactional data batch is to be skipped."""
        starts = self._ahead.get(producer_id)
        if starts and any(first <= base_offset for first in starts):
            self._ahead[producer_id] = [first for first in starts if first > base_offset]
            self._active.add(producer_id)
        return producer_id in self._active

    def end(self, producer_id: int, marker_offset: int) -> None:
        """A marker of the producer was passed: what it aborted before lies behind."""
        self._active.discard(producer_id)
        self._ended[producer_id] = marker_offset
        starts = self._ahead.get(producer_id)
        if starts:
            self._ahead[producer_id] = [first for first in starts if first > marker_offset]


def mark_skipped(
    batches: FetchedBatches,
    aborted: AbortedTransactions,
    distrust: Callable[[str], None],
    unread: Callable[[int, int, str], None] | None = None,
) -> None:
    """Set B_MAGIC to 0 in the rows that must not be counted; `unread` is told the offsets of damaged ones,
    and of those of an old format as far as they can be known."""
    index = batches.index
    view = batches.buffer.data
    old = np.flatnonzero(index[:, B_MAGIC] != 2)
    for row in np.union1d(old, damaged_rows(batches.buffer, index)).tolist():
        distrust("batch of an old format" if index[row, B_MAGIC] != 2 else WRONG_CRC)
        index[row, B_MAGIC] = 0
        if unread is not None:
            unread(*offsets_of(index[row]), DAMAGED)
    attributes = index[:, B_ATTRIBUTES]
    if not aborted and not (attributes & CONTROL_BIT).any():
        return
    for row in np.flatnonzero(attributes & (TRANSACTIONAL_BIT | CONTROL_BIT)).tolist():
        if index[row, B_MAGIC] != 2:
            continue
        producer_id = int(index[row, B_PRODUCER_ID])
        if attributes[row] & CONTROL_BIT:
            index[row, B_MAGIC] = 0
            if _control_type(view, int(index[row, B_POSITION])) == _ABORT_MARKER:
                aborted.end(producer_id, int(index[row, B_LAST_OFFSET]))
        elif aborted.hides(producer_id, int(index[row, B_BASE_OFFSET])):
            index[row, B_MAGIC] = 0


def _control_type(view: memoryview, position: int) -> int:
    """The type of a control batch's one record: its key is version int16, type int16 (0 abort, 1 commit).

    A control record is small, so every varint before the key is one byte: length, attributes, timestamp
    delta, offset delta, key size.
    """
    key = position + HEADER_SIZE + 5
    return int.from_bytes(view[key + 2 : key + 4], "big")
