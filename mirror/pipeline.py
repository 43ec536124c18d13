"""One source partition on its way to the target: from fetched bytes to a position that may be written.

Called by `source` (`accept`, `at_gap`), by `sink` (`delivered`, `refused`) and by `worker` (`drain`,
`close`). What may be written down is `progress`'s rule, what happens to a batch is `rebatch`'s; here they
are put together for one assignment of one partition.

    STARTING ──ready──> RUNNING ──at_gap (skip)──> SKIPPING ──event durable──> RUNNING
                           │  └──at_gap (stop)──> STOPPED
                           └──drain──> DRAINING ──> CLOSED          (CLOSED is reachable from everywhere)

Invariant: a stretch of offsets leaves here as batches handed to the sink, as a dropped stretch (control
records, aborted data), or as a gap with an event. There is no fourth way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias
from uuid import UUID

import structlog

from millrace.broker.client.committed import committed_batches
from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import (
    CorruptMessage,
    InvalidRecord,
    InvalidTimestamp,
    KafkaError,
    RecordListTooLarge,
    RecordTooLarge,
)
from millrace.broker.protocol.batch import BatchHeader, iterate_batches, verify_crc
from millrace.mirror.checkpoints import NO_TOPIC_ID, Position
from millrace.mirror.gaps import Gap, GapClass, GapPolicy
from millrace.mirror.lag import LagSamples
from millrace.mirror.progress import PartitionProgress, Span
from millrace.mirror.rebatch import BatchPath, Piece, choose_path, rebuild, split
from millrace.mirror.routes import SourcePartition, TargetPartition
from millrace.mirror.sink import Outgoing, Sink

log = structlog.get_logger("millrace.mirror.pipeline")

# A seam for tests and the demo: gets each batch that is about to be produced and gives the buffers to
# produce instead of it. Arguments: source cluster, topic, partition, one whole dense batch.
BetweenHook: TypeAlias = Callable[[str, str, int, memoryview], Sequence[bytes | bytearray | memoryview]]

Buffer: TypeAlias = bytes | bytearray | memoryview

# A batch whose checksum is wrong is fetched this often before it counts as corrupt at the source.
MAX_CORRUPT_FETCHES = 3
# A record whose creation time is older than this is being replayed: latency cannot be told from it.
LIVE_DATA_MS = 3_600_000
# One record of a batch can be the reason for these, so halving the batch finds it.
SPLITTABLE = (RecordTooLarge, RecordListTooLarge, InvalidTimestamp, InvalidRecord)


class State(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    SKIPPING = "skipping"
    STOPPED = "stopped"
    DRAINING = "draining"
    CLOSED = "closed"


class Surroundings(Protocol):
    """What a pipeline needs of the worker."""

    def now_ms(self) -> int: ...

    def policy(self, gap_class: GapClass) -> GapPolicy: ...

    async def record_gap(self, gap: Gap) -> None:
        """Returns when the gap's event is durable on the target."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...

    def max_batch_size(self, topic: str) -> int: ...

    def moved(self, pipeline: PartitionPipeline) -> None:
        """Room was made, or a position moved."""
        ...

    def count_batch(self, partition: SourcePartition, path: BatchPath) -> None: ...

    def count_delivered(
        self, partition: SourcePartition, records: int, size: int, measured_from: str, seconds: float
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Which log the offsets belong to."""

    cluster_id: str
    topic_id: UUID = NO_TOPIC_ID


class PartitionPipeline:
    """One assignment of one source partition. See the module's text."""

    def __init__(
        self,
        partition: SourcePartition,
        target: TargetPartition,
        sink: Sink,
        surroundings: Surroundings,
        between: BetweenHook | None = None,
    ) -> None:
        self.partition = partition
        self.target = target
        self.state = State.STARTING
        self.progress = PartitionProgress(0)
        self.origin = Origin("")
        self.lag = LagSamples()
        self.gap: Gap | None = None
        self.retry_at_ms = 0
        self._sink = sink
        self._around = surroundings
        self._between = between
        self._corrupt_fetches = 0
        self._settled = asyncio.Event()

    # --- life ------------------------------------------------------------------------------------

    def ready(self, position: int, leader_epoch: int, origin: Origin) -> None:
        """The position is known (and written): fetching may begin."""
        if self.state is State.STARTING:
            self.progress = PartitionProgress(position, leader_epoch)
            self.origin = origin
            self.state = State.RUNNING

    def wants_fetch(self, now_ms: int, cap: int) -> bool:
        """Whether to fetch now, with at most `cap` bytes outstanding."""
        if self.state is not State.RUNNING or self.progress.is_blocked or now_ms < self.retry_at_ms:
            return False
        outstanding = self.progress.outstanding_size
        return outstanding == 0 or (outstanding < cap and not self._sink.is_failing(self.target))

    async def drain(self, timeout_ms: int) -> bool:
        """Fetches no more and waits until everything under way is settled. False when time ran out: the
        position then stays before what is unsettled, and the next owner sends it again."""
        if self.state in (State.RUNNING, State.SKIPPING):
            self.state = State.DRAINING
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while not self.progress.is_drained:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            return False
        return True

    def resume(self) -> None:
        """Goes on after a drain that turned out not to be needed."""
        if self.state is State.DRAINING:
            self.state = State.RUNNING

    def close(self) -> None:
        """Ends this assignment. What was never sent is taken back; late answers change nothing."""
        self.state = State.CLOSED
        self._sink.withdraw(self.target, self)
        self.progress.close()

    def position_to_write(self, now_ms: int) -> Position | None:
        if self.state in (State.STARTING, State.CLOSED):
            return None
        offset = self.progress.position_to_write()
        if offset is None:
            return None
        epoch = self.progress.position_leader_epoch
        return Position(offset, self.origin.cluster_id, self.origin.topic_id, epoch, now_ms)

    # --- from the source -------------------------------------------------------------------------

    def accept(self, fetched: FetchedPartition) -> None:
        """Takes the batches of a good fetch answer that was asked for at the fetch offset."""
        if self.state is not State.RUNNING or self.progress.is_blocked:
            return
        now_ms = self._around.now_ms()
        end = fetched.last_stable_offset
        self.lag.sample(end if end >= 0 else fetched.high_watermark, now_ms)
        data = fetched.records
        try:
            for batch, header, is_data in committed_batches(data, fetched.aborted):
                self._accept_batch(batch, header, is_data, now_ms)
                if self.progress.is_blocked:
                    return
        except KafkaError as error:
            self._corrupt(data, error, now_ms)

    def _accept_batch(self, batch: memoryview, header: BatchHeader, is_data: bool, now_ms: int) -> None:
        verify_crc(batch, 0, header)
        from_offset = self.progress.fetch_offset
        if header.next_offset <= from_offset:
            return  # the source may begin before the offset that was asked for
        max_size = self._around.max_batch_size(self.target.topic)
        path = choose_path(header, from_offset=from_offset, max_batch_size=max_size)
        pieces: list[Piece] = []
        if not is_data or path is BatchPath.DROP:
            path = BatchPath.DROP
        elif path is BatchPath.PASS_THROUGH:
            pieces = [Piece(batch, range(header.base_offset, header.next_offset))]
        else:
            pieces = rebuild(batch, header, from_offset=from_offset, max_batch_size=max_size)
        self._corrupt_fetches = 0
        self._around.count_batch(self.partition, path)
        measured_from_ms, measured_from = self._latency_start(header, now_ms)
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            next_offset = header.next_offset if is_last else piece.offsets[-1] + 1
            self._dispatch(piece, next_offset, header.leader_epoch, measured_from_ms, measured_from)
            if self.progress.is_blocked:
                return
        if not pieces:
            self.progress.fetched(header.next_offset, 0, 0, header.leader_epoch)
            self._moved()

    def _dispatch(
        self, piece: Piece, next_offset: int, leader_epoch: int, measured_from_ms: int, measured_from: str
    ) -> None:
        if piece.batch is None:
            span = self.progress.fetched(next_offset, 1, 0, leader_epoch)
            self.progress.failed(span)
            self._gap_in_span(
                span, piece.offsets[0], piece.offsets[-1] + 1, GapClass.TOO_LARGE, "one record over the limit"
            )
            return
        outgoing: list[tuple[memoryview, Sequence[int]]] = [(_writable(piece.batch), piece.offsets)]
        if self._between is not None:
            outgoing = self._ask_between(piece.batch, piece.offsets)
        size = sum(len(batch) for batch, _ in outgoing)
        span = self.progress.fetched(next_offset, len(outgoing), size, leader_epoch)
        for batch, offsets in outgoing:
            self._sink.enqueue(
                self.target, Outgoing(batch, offsets, span, self, measured_from_ms, measured_from)
            )
        if not outgoing:
            self._moved()

    def _ask_between(
        self, batch: memoryview, offsets: Sequence[int]
    ) -> list[tuple[memoryview, Sequence[int]]]:
        if self._between is None:
            raise RuntimeError("no hook to ask")
        where = self.partition
        outgoing: list[tuple[memoryview, Sequence[int]]] = []
        for buffer in self._between(where.source, where.topic, where.partition, batch):
            for position, header in iterate_batches(buffer):
                given = memoryview(buffer)[position : position + header.size]
                # The hook may have added or removed records; only the count must be right.
                named = offsets if header.record_count == len(offsets) else range(header.record_count)
                outgoing.append((_writable(given), named))
        return outgoing

    def _latency_start(self, header: BatchHeader, now_ms: int) -> tuple[int, str]:
        """Where the end-to-end latency of a batch begins, and how that is known.

        `append`: the source stamped its append time. `create`: the newest record's creation time, when the
        data is live. `seen`: replayed data; since this worker first saw that the source's log holds it.
        """
        if header.is_log_append_time:
            return header.max_timestamp, "append"
        if 0 <= now_ms - header.max_timestamp <= LIVE_DATA_MS:
            return header.max_timestamp, "create"
        return self.lag.first_seen_ms(header.base_offset) or now_ms, "seen"

    def _corrupt(self, data: memoryview, error: KafkaError, now_ms: int) -> None:
        """A batch that cannot be trusted. It is fetched again first: the wire may have been at fault."""
        self._corrupt_fetches += 1
        self.retry_at_ms = now_ms + 100 * self._corrupt_fetches
        if self._corrupt_fetches < MAX_CORRUPT_FETCHES:
            log.warning("fetching a batch again", of=str(self.partition), error=str(error))
            return
        self._corrupt_fetches = 0
        first, following = self.progress.fetch_offset, _end_of_corrupt(data, self.progress.fetch_offset)
        if following is None:
            # Nobody can say where the next batch begins: there is nothing to skip to.
            self._stop_at(Gap(self.partition, first, first + 1, GapClass.CORRUPT, str(error), now_ms))
            return
        span = self.progress.fetched(following, 1, 0, -1)
        self.progress.failed(span)
        self._gap_in_span(span, first, following, GapClass.CORRUPT, str(error))

    # --- from the sink ---------------------------------------------------------------------------

    def delivered(self, outgoing: Outgoing, now_ms: int) -> None:
        if self.state is State.CLOSED:
            return
        self.progress.acknowledged(outgoing.span)
        seconds = max(0, now_ms - outgoing.measured_from_ms) / 1000
        records, size = len(outgoing.offsets), len(outgoing.batch)
        self._around.count_delivered(self.partition, records, size, outgoing.measured_from, seconds)
        self._moved()

    def refused(self, outgoing: Outgoing, error: KafkaError, now_ms: int) -> list[Outgoing]:
        # Also after the assignment ended: batches behind this one may still arrive, and its good records
        # must not come after them.
        halves = split(outgoing.batch, outgoing.offsets) if isinstance(error, SPLITTABLE) else []
        if halves:
            self.progress.split(outgoing.span, len(halves))
            start, how = outgoing.measured_from_ms, outgoing.measured_from
            return [
                Outgoing(half.batch, half.offsets, outgoing.span, self, start, how)
                for half in halves
                if half.batch is not None
            ]
        if self.state is State.CLOSED:
            return []  # the next owner will meet it again
        self.progress.failed(outgoing.span)
        gap_class = GapClass.REFUSED
        if isinstance(error, RecordTooLarge | RecordListTooLarge):
            gap_class = GapClass.TOO_LARGE
        elif isinstance(error, CorruptMessage):
            gap_class = GapClass.CORRUPT
        first, following = outgoing.offsets[0], outgoing.offsets[-1] + 1
        self._gap_in_span(outgoing.span, first, following, gap_class, f"the target says: {error}")
        self._moved()
        return []

    # --- gaps ------------------------------------------------------------------------------------

    def _gap_in_span(self, span: Span, first: int, following: int, gap_class: GapClass, reason: str) -> None:
        gap = Gap(self.partition, first, following, gap_class, reason, self._around.now_ms())
        if self._around.policy(gap_class) is GapPolicy.STOP:
            self._stop_at(gap)
            return
        log.warning("skipping", gap=gap.describe())
        self.gap = gap
        self._around.spawn(self._skip_span(span, gap))

    async def _skip_span(self, span: Span, gap: Gap) -> None:
        await self._around.record_gap(gap)
        if self.state is not State.CLOSED:
            self.progress.gap_recorded(span)
            if not self.progress.is_blocked:
                self.gap = None
        self._moved()

    def at_gap(
        self,
        gap_class: GapClass,
        following: int,
        reason: str,
        *,
        resume_at: int,
        first: int | None = None,
        resume_epoch: int = -1,
        origin: Origin | None = None,
    ) -> None:
        """A gap that no fetched batch stands for, from `first` (the fetch offset) to `following`. With
        policy skip the partition goes on at `resume_at`, in the log that `origin` names."""
        if self.state is not State.RUNNING:
            return
        if first is None:
            first = self.progress.fetch_offset
        gap = Gap(self.partition, first, max(first, following), gap_class, reason, self._around.now_ms())
        if self._around.policy(gap_class) is GapPolicy.STOP:
            self._stop_at(gap)
            return
        log.warning("skipping", gap=gap.describe())
        self.gap = gap
        self.state = State.SKIPPING
        self._around.spawn(self._jump(gap, resume_at, resume_epoch, origin))

    async def _jump(self, gap: Gap, resume_at: int, resume_epoch: int, origin: Origin | None) -> None:
        while not self.progress.is_drained:
            self._settled.clear()
            await self._settled.wait()
        await self._around.record_gap(gap)
        if self.state not in (State.SKIPPING, State.DRAINING) or self.progress.is_blocked:
            return
        self.progress.jump(resume_at, resume_epoch)
        self.origin = origin or self.origin
        self.gap = None
        if self.state is State.SKIPPING:
            self.state = State.RUNNING
        self._moved()

    def _stop_at(self, gap: Gap) -> None:
        """Delivers nothing behind the gap that was not already sent, and waits for an operator."""
        log.error("stopped", gap=gap.describe(), hint="set the policy for this class to skip, or repair it")
        self.state = State.STOPPED
        self.gap = gap
        for outgoing in self._sink.withdraw(self.target, self):
            self.progress.failed(outgoing.span)
        self._around.spawn(self._around.record_gap(gap))
        self._moved()

    def _moved(self) -> None:
        self._settled.set()
        self._around.moved(self)


def _writable(batch: memoryview) -> memoryview:
    """The batch in memory that may be stamped in place; a copy only where it is read-only."""
    return memoryview(bytearray(batch)) if batch.readonly else batch


def _end_of_corrupt(data: memoryview, fetch_offset: int) -> int | None:
    """The offset after the batch that holds `fetch_offset`, as far as its header can be believed."""
    try:
        for _, header in iterate_batches(data):
            if header.next_offset > fetch_offset:
                return header.next_offset
    except KafkaError:
        return None
    return None
