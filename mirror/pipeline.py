"""One source partition on its way to the target: from fetched bytes to a position that may be written.

Called by `source` (`accept`, `at_gap`), by `sink` (`delivered`, `refused`) and by `worker` (`drain`,
`close`). What may be written down is `progress`'s rule, what happens to a batch is `rebatch`'s; here they
are put together for one assignment of one partition.

    STARTING ──ready──> RUNNING ──gap (skip)──> SKIPPING ──event durable──> RUNNING
                         ^ │ └───gap (stop)──> STOPPED ──skip_gap──> SKIPPING, or ──retry──> RUNNING
                   pause v └──drain──> DRAINING ──> CLOSED          (CLOSED is reachable from everywhere)
                       PAUSED

Invariant: a stretch of offsets leaves here as batches handed to the sink, as a dropped stretch (control
records, aborted data), or as a gap with an event. There is no fourth way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from millrace.broker.client.fetch_session import FetchPosition
from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import (
    InvalidRecord,
    InvalidTimestamp,
    KafkaError,
    RecordListTooLarge,
    RecordTooLarge,
)
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position
from millrace.mirror.batches.between import BetweenHook, put_between
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.batches.intake import Prepared
from millrace.mirror.batches.rebatch import split
from millrace.mirror.delivery.gap_records import GapRecords
from millrace.mirror.delivery.on_record import OnRecord
from millrace.mirror.delivery.outgoing import Outgoing, latency_start, to_be_stamped
from millrace.mirror.delivery.progress import PartitionProgress, Span
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.gaps.gaps import Gap, GapClass, GapPolicy, class_of_refusal
from millrace.mirror.gaps.open_gaps import OpenGap, OpenGaps, Origin, Resume
from millrace.mirror.offsets.offset_map import Runs
from millrace.mirror.sharing.rates import Workload
from millrace.mirror.sources.doubt import Doubt, Found, Question
from millrace.mirror.sources.fetch_memory import Frame
from millrace.mirror.sources.lag import LagSamples
from millrace.mirror.sources.trust import Trust
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from millrace.mirror.topics.topics import TargetTopics

if TYPE_CHECKING:
    from millrace.mirror.control.metrics import MirrorMetrics

log = structlog.get_logger("millrace.mirror.pipeline")

# A partition of whose batches none has got through for so long holds memory that others could use.
STANDING_AFTER_MS = 1_000
# One record of a batch can be the reason for these, so halving the batch finds it.
SPLITTABLE = (RecordTooLarge, RecordListTooLarge, InvalidTimestamp, InvalidRecord)


class State(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    SKIPPING = "skipping"
    STOPPED = "stopped"
    DRAINING = "draining"
    CLOSED = "closed"


RUNNING = State.RUNNING  # a member is looked up slowly


@dataclass(frozen=True, slots=True)
class Shared:
    """What the pipelines of one worker have in common. With a hook `between` nothing may be merged in the
    `walk`: it is promised each batch."""

    now_ms: Callable[[], int]
    topics: TargetTopics
    gaps: GapRecords
    metrics: MirrorMetrics
    workload: Workload
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    walk: BatchWalk
    between: BetweenHook | None = None


class PartitionPipeline:
    """One assignment of one source partition. See the module's text."""

    def __init__(
        self,
        partition: SourcePartition,
        target: TargetPartition,
        sink: Sink,
        shared: Shared,
        on_moved: Callable[[PartitionPipeline], None],
    ) -> None:
        """`on_moved` is called when room was made, or a position moved; so is the sink's."""
        self.partition = partition
        self.target = target
        self.state = State.STARTING
        self.progress = PartitionProgress(0)
        self.runs = Runs(partition, 0, 0)
        self.lag = LagSamples()
        self.retry_at_ms = 0  # by the steady clock
        self._got_on_at_ms = 0  # by the steady clock
        self._delivered_at_ms: int | None = None
        self._sink = sink
        self._shared = shared
        self._now_ms = shared.now_ms
        self._between = shared.between
        self._on_moved = on_moved
        self._count = partial(shared.metrics.count_batch, partition)
        self._trust = Trust()
        self._bytes_per_offset = 0.0  # in the last answer; 0: not known
        self._record = OnRecord()
        self._settled = asyncio.Event()
        self._is_paused = self._is_draining = False
        self._gaps = OpenGaps()

    # --- life ------------------------------------------------------------------------------------

    def ready(self, start: Position) -> None:
        """`start` is on record: fetching may begin there."""
        if self.state is State.STARTING:
            self.progress = self._progress_from(start)
            self._record.go_on_from(start)
            # The map tells younger from older by this, whatever the clocks of two workers say.
            began_ms = max(self._now_ms(), start.at_ms + 1)
            self.runs = Runs(self.partition, start.next_offset, began_ms, start.topic_id, self.target)
            self._run()

    def _progress_from(self, start: Position) -> PartitionProgress:
        return PartitionProgress(
            start.next_offset,
            start.leader_epoch,
            epoch_from=start.epoch_from,
            transactional=self._sink.is_transactional,
        )

    def wants_fetch(self, steady_ms: int, cap: int) -> bool:
        """Whether to fetch now (by the steady clock), with at most `cap` bytes outstanding."""
        if self.state is not State.RUNNING or self.progress.is_blocked or steady_ms < self.retry_at_ms:
            return False
        if self.doubt.question is not None:
            return False
        outstanding = self.progress.outstanding_size
        return outstanding == 0 or (outstanding < cap and not self.stands(steady_ms))

    def wants_the_same(self, before: FetchPosition, steady_ms: int) -> bool:
        """Whether it wants to be fetched from where it was before, with nothing under way nor in doubt. So it
        is with most of many at each turn of fetching; others are looked at whole (`wants_fetch`)."""
        offset, _, epoch, topic_id = before
        progress, doubt = self.progress, self._trust.last_doubt
        return (
            offset == progress.fetch_offset
            and self.state is RUNNING
            and not progress.outstanding_size
            and steady_ms >= self.retry_at_ms
            and epoch == progress.fetched_leader_epoch
            and topic_id is self._record.origin.topic_id
            and not progress.unrecorded_gaps
            and (doubt.offset != offset or (doubt.question is None and not doubt.needed_size))
        )

    def stands(self, steady_ms: int) -> bool:
        """Whether what is under way does not get through, for whatever reason: the target refuses it, does
        not answer, has no leader for it, or the lane's transaction does not let it."""
        if self.progress.outstanding_size == 0:
            return False
        return steady_ms - self._got_on_at_ms > STANDING_AFTER_MS or self._sink.is_failing(self.target)

    def gets_on(self, steady_ms: int) -> bool:
        """Whether the target has taken something of it a moment ago."""
        return self._delivered_at_ms is not None and steady_ms - self._delivered_at_ms <= STANDING_AFTER_MS

    def may_get_on(self, steady_ms: int) -> bool:
        """Whether its leader at the target is not silent to others."""
        return self._sink.silent_ms(self.target, steady_ms) <= STANDING_AFTER_MS

    def leave_answers(self) -> None:
        """Copies what is under way out of the answers that it came in, which it would keep as a whole."""
        self._sink.leave_answers(self.target, self)

    async def drain(self, timeout_s: float) -> bool:
        """Fetches no more, whatever becomes of its gaps, and waits until everything under way is settled.
        False when time ran out: the position then stays before what is unsettled, and the next owner sends it
        again."""
        self._is_draining = True
        if self.state in (State.RUNNING, State.PAUSED, State.SKIPPING):
            self.state = State.DRAINING
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained()
        except TimeoutError:
            return False
        return True

    def pause(self) -> None:
        """Fetches no more until `unpause`. What is under way is delivered, so nothing stays open."""
        self._is_paused = True
        if self.state is State.RUNNING:
            self.state = State.PAUSED

    def unpause(self) -> None:
        self._is_paused = False
        if self.state is State.PAUSED:
            self._run()
            self._moved()

    def _run(self) -> None:
        if self._is_draining:
            self.state = State.DRAINING
        else:
            self.state = State.PAUSED if self._is_paused else State.RUNNING

    async def _drained(self) -> None:
        while not self.progress.is_drained:
            self._settled.clear()
            await self._settled.wait()

    @property
    def _is_on_record(self) -> bool:
        """Whether nothing is under way, nor, in a transactional lane, carried and not committed."""
        progress = self.progress
        return progress.is_drained and (not progress.is_transactional or progress.position_to_write() is None)

    @property
    def doubt(self) -> Doubt:
        """Of what stands at the fetch offset."""
        return self._trust.at(self.progress.fetch_offset)

    @property
    def bytes_behind(self) -> int:
        """About how much of the source's log is still to be fetched; 0 where nothing is known."""
        return int(self.lag.records_behind(self.progress.fetch_offset) * self._bytes_per_offset)

    @property
    def origin(self) -> Origin:
        """Which log its offsets belong to."""
        return self._record.origin

    @property
    def has_begun(self) -> bool:
        """Whether its start is known and its assignment has not ended."""
        return self.state not in (State.STARTING, State.CLOSED)

    def adopt(self, origin: Origin) -> None:
        """The same log, of which more is known now (its topic's id), or which goes to another target than
        before: on record with the next position."""
        self._record.origin = origin
        self.runs.topic_id = origin.topic_id
        self.progress.write_again()
        self._moved()

    def carry_by(self, sink: Sink) -> None:
        """Goes on in another lane. Only between `rewind` and the next fetch answer: nothing is under way."""
        self._sink = sink

    def position_written(self, position: Position) -> None:
        """`position` is durable (in a transactional lane: committed): the next owner goes on there."""
        self._gaps.on_record()
        self.progress.written(position.next_offset, position.leader_epoch)
        if not self._record.wrote(position, self.progress.position_leader_epoch):
            self.progress.write_again()
        self._keep_extent()
        self._moved()

    def rewind(self, position: Position | None = None) -> None:
        """The lane's transaction was aborted: everything under way is forgotten, and fetching goes on from
        the committed position (`position`, when it had to be read again).

        The sink has forgotten the batches already. A gap at the very position stays; any other is met again.
        """
        if self.state in (State.STARTING, State.CLOSED):
            return
        back_to = position or self._record.written
        is_at_gap = (
            (first := self._gaps.first) is not None
            and first.span is None
            and self.progress.fetch_offset == back_to.next_offset
        )
        self.progress.close()
        self.progress = self._progress_from(back_to)
        self._record.go_on_from(back_to)
        self._trust.forget_order()
        self.runs.restart(back_to.next_offset, self._now_ms(), back_to.topic_id)
        self._trust.forget_doubt(self.progress.fetch_offset)
        if is_at_gap:
            self._keep_extent()
        else:
            self._forget_gaps()
        self._moved()

    def close(self) -> None:
        """Ends this assignment. What was never sent is taken back; late answers change nothing."""
        self.state = State.CLOSED
        self._sink.withdraw(self.target, self)
        self.progress.close()
        self._settled.set()

    def position_to_write(self, now_ms: int) -> Position | None:
        if self.state in (State.STARTING, State.CLOSED):
            return None
        at_ms = max(now_ms, self.runs.began_ms)
        return self._record.next_position(self.progress, self.lag, self.target, at_ms)

    # --- from the source -------------------------------------------------------------------------

    def accept(self, fetched: FetchedPartition, frame: Frame | None = None) -> None:
        """Takes the batches of a good fetch answer that was asked for at the fetch offset; `frame` stands for
        its memory."""
        if self.state is not State.RUNNING or self.progress.is_blocked:
            return
        if self.progress.outstanding_size == 0:
            self._got_on_at_ms = steady_ms()
        now_ms = self._now_ms()
        stable_end = fetched.last_stable_offset
        self.lag.sample(max(stable_end, fetched.high_watermark), now_ms, stable_end)
        from_offset = self.progress.fetch_offset
        max_size = self._shared.topics.max_batch_size(self.target.topic)
        try:
            for ready in self._trust.believed(self._shared.walk, fetched, from_offset, max_size, self._count):
                self._dispatch(ready, now_ms, fetched, frame)
                if self.progress.is_blocked:
                    return
        except KafkaError as error:
            self.distrust(error)
        if (fetched_count := self.progress.fetch_offset - from_offset) > 0:
            self._bytes_per_offset = len(fetched.records) / fetched_count

    def _dispatch(self, ready: Prepared, now_ms: int, fetched: FetchedPartition, frame: Frame | None) -> None:
        batch, offsets, next_offset, leader_epoch = ready[:4]
        if batch is None:
            if not offsets:
                self.progress.fetched(next_offset, 0, 0, leader_epoch)
                self._moved()
                return
            span = self.progress.fetched(next_offset, 1, 0, leader_epoch)
            self.progress.failed(span)
            reason = ready.unreadable or "one record over the limit"
            self._gap_in_span(span, offsets[0], offsets[-1] + 1, ready.gap_class, reason)
            return
        measured_from_ms, measured_from = latency_start(ready, self.lag, now_ms)
        pieces, size = [(batch, offsets)], len(batch)
        if self._between is not None:
            pieces = put_between(self._between, self.partition, batch, offsets)
            size = sum(len(piece) for piece, _ in pieces)
        span = self.progress.fetched(next_offset, len(pieces), size, leader_epoch)
        for piece, named in pieces:
            writable, memory = to_be_stamped(piece, fetched.records, frame)
            outgoing = Outgoing(writable, named, span, self, measured_from_ms, measured_from, memory)
            self._sink.enqueue(self.target, outgoing)
        if not pieces:
            self._moved()

    def distrust(self, error: KafkaError) -> None:
        """What stands at the fetch offset is not taken, for this reason. `doubt` says what is asked next."""
        self.doubt.refused(error, steady_ms())
        self._pause()
        if self.doubt.reason:
            log.warning("fetching a batch again", of=str(self.partition), error=self.doubt.reason)

    def _pause(self) -> None:
        pause_ms = self.doubt.pause_ms
        self.retry_at_ms = steady_ms() + pause_ms if pause_ms else 0

    def take_question(self) -> Question | None:
        """What a look at the log is to find out now; `looked` follows. One look at a time."""
        return self._trust.take_question(self.progress.fetch_offset)

    def looked(self, question: Question, found: Found) -> bool:
        """What came of a look; of one that nobody waits for any more (the partition has moved, its lane went
        back) nothing does. Whether it is a gap from now on."""
        is_damage = False
        if self._trust.looked(question, found, self.progress.fetch_offset, steady_ms()):
            self._pause()
            if (end := found.damage_end) >= 0:
                self.retry_at_ms = 0
                epoch = self.progress.fetched_leader_epoch
                self.at_gap(GapClass.CORRUPT, end, question.reason, resume_at=end, resume_epoch=epoch)
                is_damage = self.gap is not None
        self._moved()
        return is_damage

    # --- from the sink ---------------------------------------------------------------------------

    def delivered(self, outgoing: Outgoing, base_offset: int, now_ms: int, steady_ms: int) -> None:
        """The target has the batch; `base_offset` is the offset of its first record there, -1 unknown (it
        was in the log already)."""
        if self.state is State.CLOSED:
            return
        self._got_on_at_ms = self._delivered_at_ms = steady_ms
        self.progress.acknowledged(outgoing.span)
        if self._between is None:  # a hook may send anything: its offsets are made up
            self.runs.add(outgoing.offsets, base_offset)
        seconds = max(0, now_ms - outgoing.measured_from_ms) / 1000
        size = outgoing.size
        self._shared.metrics.count_delivered(
            self.partition, outgoing.record_count, size, outgoing.measured_from, seconds
        )
        self._shared.workload.add(self.partition, size)
        self._moved()

    def refused(self, outgoing: Outgoing, error: KafkaError, now_ms: int) -> list[Outgoing]:
        # Also after the assignment ended: batches behind this one may still arrive, and its good records
        # must not come after them.
        halves = split(outgoing.batch, outgoing.offsets) if isinstance(error, SPLITTABLE) else []
        if halves:
            spans = self.progress.split(outgoing.span, [half.offsets[-1] + 1 for half in halves])
            return [outgoing.part(*each) for each in zip(halves, spans, strict=True)]
        if self.state is State.CLOSED:
            self._sink.withdraw(self.target, self, outgoing.offsets[-1] + 1)
            return []  # the next owner will meet it again, and may stop before what stands behind it
        self.progress.failed(outgoing.span)
        first, following = outgoing.offsets[0], outgoing.offsets[-1] + 1
        reason = str(error) if error is outgoing.fault else f"the target says: {error}"
        self._gap_in_span(outgoing.span, first, following, class_of_refusal(error), reason)
        self._moved()
        return []

    # --- gaps ------------------------------------------------------------------------------------

    @property
    def gap(self) -> Gap | None:
        """The gap that the partition is stopped at, or about to skip."""
        shown = self._gaps.stopping or self._gaps.first
        return None if shown is None else shown.gap

    def skip_gap(self) -> Gap | None:
        """Lets the gap pass at which the partition is stopped: its event becomes durable, then the partition
        goes on behind it. None when it is not stopped."""
        stopping = self._gaps.stopping
        if self.state is not State.STOPPED or stopping is None:
            return None
        log.warning("skipping as told", gap=stopping.gap.describe())
        self._gaps.let_pass(stopping)
        self.state = State.SKIPPING
        self._shared.spawn(self._pass(stopping))
        return stopping.gap

    def retry(self) -> Gap | None:
        """Tries the stretch again at which the partition is stopped; with the target's limits as they are
        now. What was sent behind it may be sent again. None when it is not stopped."""
        stopping = self._gaps.stopping
        if self.state is not State.STOPPED or stopping is None:
            return None
        self._shared.spawn(self._retry(stopping))
        return stopping.gap

    def _gap(self, first: int, following: int, gap_class: GapClass, reason: str) -> Gap:
        topic_id = self.origin.topic_id
        told = "" if topic_id == NO_TOPIC_ID else str(topic_id)
        return Gap(self.partition, first, following, gap_class, reason, self._now_ms(), told)

    def _gap_in_span(self, span: Span, first: int, following: int, gap_class: GapClass, reason: str) -> None:
        self._met(OpenGap(self._gap(first, following, gap_class, reason), span=span))

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
        if self.state not in (State.RUNNING, State.PAUSED):
            return
        if first is None:
            first = self.progress.fetch_offset
        gap = self._gap(first, max(first, following), gap_class, reason)
        self._met(OpenGap(gap, resume=Resume(resume_at, resume_epoch, origin)))

    def _keep_extent(self) -> None:
        met = self._gaps.at_fetch_offset
        if met is not None and self._record.lacks_extent(met.gap, self.lag):
            self.progress.write_again()
            self._moved()

    def _met(self, met: OpenGap) -> None:
        self._gaps.add(met)
        self._keep_extent()
        if self._shared.gaps.policy(met.gap.gap_class) is GapPolicy.SKIP or self._gaps.was_let_pass(met.gap):
            log.warning("skipping", gap=met.gap.describe())
            if met.span is None:
                self.state = State.SKIPPING
            self._shared.spawn(self._pass(met))
            return
        log.error("stopped", gap=met.gap.describe(), hint="repair it and retry, or skip it")
        met.stops = True
        self.state = State.STOPPED
        if met.span is not None:
            self._take_back(met.gap.to_offset)
        self._shared.spawn(self._shared.gaps.record(met.gap))
        self._moved()

    def _take_back(self, from_offset: int) -> None:
        """Delivers nothing behind a gap that was not sent already; what lies before it goes on."""
        withdrawn = self._sink.withdraw(self.target, self, from_offset)
        for outgoing in withdrawn:
            self.progress.taken_back(outgoing.span)
        if withdrawn:
            first = withdrawn[0]
            cut_at = max(first.offsets[0], first.span.first_offset)
            self.progress.cut(cut_at)
            self._gaps.forget_from(cut_at)

    async def _pass(self, open_gap: OpenGap) -> None:
        """Goes on behind a gap once its event is durable."""
        if open_gap.span is None:
            # In a transactional lane all that was carried must be on record too: after a jump back the same
            # offset stands for something else, and would not be news to the transaction that holds it.
            while self.state is not State.CLOSED and not self._is_on_record:
                self._settled.clear()
                await self._settled.wait()
            if self.state is State.CLOSED or open_gap not in self._gaps:
                return
        await self._shared.gaps.record(open_gap.gap)
        if self.state is State.CLOSED or open_gap not in self._gaps:
            return  # forgotten with what was under way: it will be met again
        if open_gap.span is not None:
            self.progress.gap_recorded(open_gap.span)
        elif self._gaps.first is not open_gap:
            return  # one before it is still open: `_go_on` comes back to this one
        elif open_gap.resume is not None:
            self._jump(open_gap, open_gap.resume)
        self._gaps.remove(open_gap)
        self._go_on()

    def _jump(self, behind: OpenGap, to: Resume) -> None:
        if to.origin is not None or to.offset < self.progress.position:
            self._gaps.went_back(to.offset if to.origin is None else 0, behind)
            topic_id = (to.origin or self.origin).topic_id
            self.runs.cut(to.offset, self._now_ms(), topic_id)
        self.progress.jump(to.offset, to.leader_epoch)
        self._trust.forget_doubt(self.progress.fetch_offset)
        if self._record.jump(to):
            self._trust.forget_order()
            self.lag = LagSamples()  # the ends of another log say nothing of this one

    def _go_on(self) -> None:
        """One gap fewer: to the next one, or on with fetching."""
        if self.state in (State.SKIPPING, State.STOPPED):
            at_the_end = self._gaps.at_fetch_offset
            if self._gaps.stopping is not None:
                self.state = State.STOPPED
            elif at_the_end is not None:
                self.state = State.SKIPPING
                if self._gaps.first is at_the_end:
                    self._shared.spawn(self._pass(at_the_end))
            else:
                self._run()
        self._moved()

    async def _retry(self, open_gap: OpenGap) -> None:
        if open_gap.gap.gap_class is GapClass.TOO_LARGE:
            await self._shared.topics.refresh_limits(self.target.topic)
        await self._drained()
        if self.state is not State.STOPPED or open_gap not in self._gaps:
            return
        log.warning("trying again", gap=open_gap.gap.describe())
        cut_at = self.progress.fetch_offset
        if open_gap.span is not None:
            self.progress.tried_again(open_gap.span)
            cut_at = max(open_gap.gap.from_offset, open_gap.span.first_offset)
            self.progress.cut(cut_at)
        self._forget_gaps(cut_at)
        self._moved()

    def _forget_gaps(self, from_offset: int = 0) -> None:
        """What they lie in has been forgotten and is fetched again: they will be met again."""
        self._gaps.forget_from(from_offset)
        self._trust.forget_doubt(self.progress.fetch_offset)
        self.retry_at_ms = 0
        if self.state in (State.SKIPPING, State.STOPPED):
            self._run()

    def _moved(self) -> None:
        self._settled.set()
        self._on_moved(self)
        if (lane_hears := self._sink.on_moved) is not None:
            lane_hears(self)
