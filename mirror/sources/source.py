"""One source cluster: discovery, and a fetch loop for each connection to each of its brokers.

Called by `worker`. Hands fetched batches to the pipelines and turns what a source says about a log (out of
range, another topic id, a diverging epoch) into gaps. It holds no rule about what may be skipped.

Fetches name the topic by the id of the log that the position is of, wherever the source speaks it (Apache
Kafka 3.1 and later): a topic that was deleted and created again refuses them, so nothing of it is ever read
at the old one's offsets. By name, on older servers, only its id or its leader epochs tell, one look later
(once it is told, nothing more is taken at the old one's); an id is adopted as soon as the source has one.
Where neither tells, the log and `check` say so.

Where histories part a fetch's answer says (KIP-595). Servers whose fetches cannot (Apache Kafka before 2.7)
are asked before (`histories`).

The memory of what is under way is bounded (`fetch_memory`): each fetch loop has an equal share of the
worker's budget and fetches only while its answers keep less than that, so a slow target slows fetching. The
next fetch is under way while the last one's batches are being produced.

A source that is away is asked again with growing pauses, for ever; nobody else waits for it, and following
its leaders waits for no other cluster.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.fetch_session import LogEnds
from millrace.broker.client.metadata import ClusterMetadata, TopicMetadata
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition, fetch, tells_diverging_epoch
from millrace.broker.errors import (
    CorruptMessage,
    InconsistentTopicId,
    OffsetOutOfRange,
    UnknownTopicId,
    error_for_code,
)
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.config import FetchConfig, SourceConfig
from millrace.mirror.delivery.beginnings import SeenTopic, Start
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES, NewFailures
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.sources.doubt import Question, ToldDamage
from millrace.mirror.sources.epochs import untold
from millrace.mirror.sources.fetch_loop import FetchLoop, Way, way_number
from millrace.mirror.sources.fetch_memory import MIN_FETCH_SIZE, FetchBudget, Frame
from millrace.mirror.sources.histories import Histories
from millrace.mirror.sources.rate import TokenBucket
from millrace.mirror.sources.silence import Silences
from millrace.mirror.sources.source_logs import SOURCE_BACK_OFF, SourceLogs, is_other_log, joined
from millrace.mirror.sources.survey import Surveyor
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition, TopicSelector
from millrace.mirror.troubles import ALL_TOPICS, Failure, Failures

log = structlog.get_logger("millrace.mirror.sources.source")

# Looks that somebody asked for are so far apart at least.
LOOK_APART_S = 0.05
ERROR_PAUSE_MS = 250
MANY_REFUSALS = 40
# A partition that is not fetched (paused, stopped, waiting for room) is asked for its log end this often.
SAMPLE_INTERVAL_MS = 2_000
# Not fetched, because somebody said so or until a gap is passed.
STANDING = (State.PAUSED, State.SKIPPING, State.STOPPED)
# Answers that say: the log that you read is not here, or not as you know it.
ANOTHER_LOG = frozenset(error.code for error in (OffsetOutOfRange, UnknownTopicId, InconsistentTopicId))


class SourceReader:
    """See the module's text. `run` goes on until it is cancelled."""

    def __init__(
        self,
        config: SourceConfig,
        cluster: Cluster,
        fetch_config: FetchConfig,
        budget: FetchBudget,
        discovery_interval_ms: int,
        now_ms: Callable[[], int],
        on_view: Callable[[SourceReader], Awaitable[None]],
        record_start: Callable[[SourcePartition, Position], Awaitable[None]],
    ) -> None:
        self.name = config.cluster
        self.config = config
        self.cluster = cluster
        self.selector = TopicSelector(config.topics.include, config.topics.exclude)
        self.view: ClusterMetadata | None = None
        self.is_connected = False
        self.was_connected = False
        self._has_told_of_ids = False
        self.failure: str | None = None  # why the last look at the source failed
        self._fetch_config = fetch_config
        self._budget = budget
        self._discovery_interval_ms = discovery_interval_ms
        self._now_ms = now_ms
        self._on_view = on_view
        self._refusals: dict[TopicPartition, int] = {}  # of a partition's fetches, in a row
        self.failures: Failures[TopicPartition] = Failures()  # of what is begun and fetched here
        self.view_failures: Failures[str] = Failures()  # of what follows from a look; by ALL_TOPICS alone
        self._silences: Silences[TopicPartition] = Silences()
        self._logs = SourceLogs(config.cluster, cluster, now_ms, record_start, self.failures)
        self._histories = Histories(cluster)
        self._bucket = TokenBucket()
        self._surveyor = Surveyor(cluster, self._bucket.spend)
        self._pipelines: dict[TopicPartition, PartitionPipeline] = {}
        self._loops: dict[Way, FetchLoop] = {}
        self._look_again = asyncio.Event()
        self._has_new_view = asyncio.Event()
        self.has_looked = asyncio.Event()  # once `view` is there, or the source is read no more
        self._tasks = asyncio.TaskGroup()

    # --- what is carried -------------------------------------------------------------------------

    def selected_topics(self) -> list[TopicMetadata]:
        """The topics of the last look that are to be mirrored."""
        if self.view is None:
            return []
        return [
            topic
            for name, topic in sorted(self.view.topics.items())
            if not topic.internal and self.selector.selects(name)
        ]

    def seen_topics(self) -> dict[str, SeenTopic]:
        """These topics, as they are put on record."""
        return {
            each.name: SeenTopic(max(each.partitions, default=-1) + 1, each.topic_id)
            for each in self.selected_topics()
        }

    def add(self, pipeline: PartitionPipeline) -> None:
        self._pipelines[pipeline.partition.topic, pipeline.partition.partition] = pipeline
        self._place()

    def remove(self, pipeline: PartitionPipeline) -> None:
        key = (pipeline.partition.topic, pipeline.partition.partition)
        if self._pipelines.get(key) is pipeline:
            del self._pipelines[key]
            self._refusals.pop(key, None)
            self.failures.over(key)
            self._silences.over(key)
            self._histories.forget(key)
            self._logs.found(pipeline.partition)
            for loop in self._loops.values():
                if loop.partitions.pop(key, None) is not None:
                    loop.session.end()  # its next owner here is told all

    def moved(self, pipeline: PartitionPipeline) -> None:
        """Room was made: the loop of this partition may go on."""
        key = (pipeline.partition.topic, pipeline.partition.partition)
        for loop in self._loops.values():
            if key in loop.partitions:
                loop.changed.set()

    def status(self) -> dict[str, Any]:
        """For /status. `starting`: it has neither answered nor failed so far; `error`: why it does not
        answer, in one line; `over_quota`: it wants nothing more from here now; `throttled_ms`: for how long
        it wanted that so far, over all connections."""
        trouble = self.cluster.trouble or self.failure
        is_unknown = not self.was_connected and trouble is None
        return {
            "cluster": self.name,
            "connected": self.is_connected,
            "starting": is_unknown,
            "error": trouble,
            "over_quota": self.cluster.is_throttled,
            "throttled_ms": self.cluster.throttled_ms,
        }

    def reconfigure(self, config: SourceConfig, fetch: FetchConfig, discovery_interval_ms: int) -> None:
        """Takes settings that were read again: which topics, how large a fetch, how often to look."""
        self.config = config
        self.selector = TopicSelector(config.topics.include, config.topics.exclude)
        self._fetch_config = fetch
        self._discovery_interval_ms = discovery_interval_ms
        self._place()
        self._look_again.set()

    def set_rate(self, bytes_per_second: float | None) -> None:
        """Limits what this worker fetches of this source, from the next fetch on. Raises ValueError for a
        limit that is not above zero."""
        self._bucket.set_rate(bytes_per_second, self._now_ms())
        for loop in self._loops.values():
            loop.changed.set()

    async def seen(self, coming: Iterable[PartitionPipeline]) -> None:
        """Returns once there was a look at the source, however late; until then these cannot begin."""
        if not self.has_looked.is_set():
            for each in coming:
                key = (each.partition.topic, each.partition.partition)
                self.failures.failed(key, "it cannot begin: its source was never reached", self._now_ms())
        await self.has_looked.wait()

    async def begin(
        self, pipeline: PartitionPipeline, known: Position | None, *, is_lost: bool, start: Start
    ) -> None:
        """Finds where a newly assigned partition goes on, then lets it run (see `SourceLogs.begin`)."""
        await self._logs.begin(pipeline, known, is_lost=is_lost, start=start)
        if pipeline.state not in (State.STARTING, State.CLOSED):
            self.add(pipeline)

    async def run(self) -> None:
        """Goes on until cancelled, or until something fails that nobody foresaw: a fetch loop that ended in
        silence would leave its partitions behind for ever."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._discover())
                self._tasks.create_task(self._tell_of_views())
                self._tasks.create_task(self._keep_log_ends())
        finally:
            # Their share of the bytes in flight is the other sources' again.
            self._budget.loop_count -= len(self._loops)
            self._loops.clear()

    # --- discovery -------------------------------------------------------------------------------

    async def _discover(self) -> None:
        failure_count = 0
        while True:
            self._look_again.clear()
            try:
                self.view = await self.cluster.metadata(max_age_ms=0)
                self.failure = None
                self._place()
                self._logs.looked(self.view)
                self._check_origins(self.view)
                self._tell_of_missing_ids()
                self._has_new_view.set()
                self.has_looked.set()
                self.is_connected = self.was_connected = True
                failure_count = 0
            except CLUSTER_FAILURES as error:
                self.failure = str(error)
                if failure_count == 0:
                    log.warning("discovery fails; trying again", source=self.name, error=str(error))
                failure_count += 1
            pause_s = self._discovery_interval_ms / 1000
            try:
                async with asyncio.timeout(pause_s):
                    await self._look_again.wait()
                await asyncio.sleep(min(pause_s, LOOK_APART_S * (1 + failure_count)))
            except TimeoutError:
                continue

    async def _tell_of_views(self) -> None:
        """What follows from a look (topics to admit, to make and to widen) asks the target too, which may be
        slow or away: beside the looking, as this source's leaders are followed all the same. What comes
        meanwhile is one look; what fails is done anew with the next."""
        failures = NewFailures()
        while True:
            await self._has_new_view.wait()
            self._has_new_view.clear()
            try:
                await self._on_view(self)
                failures.over()
                self.view_failures.over(ALL_TOPICS)
            except CLUSTER_FAILURES as error:
                reason = f"no topic can be let in or prepared: {error}"
                self.view_failures.failed(ALL_TOPICS, reason, self._now_ms())
                if failures.is_news(error):
                    log.warning("cannot prepare topics; trying again", source=self.name, error=str(error))

    def _check_origins(self, view: ClusterMetadata) -> None:
        for (name, _), pipeline in self._pipelines.items():
            topic = view.topics.get(name)
            if topic is not None and pipeline.state is State.RUNNING:
                now = Origin(view.cluster_id or "", topic.topic_id)
                if is_other_log(pipeline.origin, now):
                    self._resolve(pipeline, is_of_id=True)
                elif pipeline.origin.topic_id == NO_TOPIC_ID != now.topic_id:
                    # The source has learnt to tell. Whether it is still this log the fetches say, by epochs.
                    pipeline.adopt(joined(pipeline.origin, now))

    def _tell_of_missing_ids(self) -> None:
        """Once: what a source cannot tell is not found out by looking longer."""
        if not self._has_told_of_ids and (reason := untold(self.selected_topics())) is not None:
            self._has_told_of_ids = True
            log.warning("a topic made anew may pass unseen", source=self.name, reason=reason)

    async def _keep_log_ends(self) -> None:
        """Lag goes on being true of what is not fetched now."""
        interval_ms = max(SAMPLE_INTERVAL_MS, 2 * self._fetch_config.max_wait_ms)
        while True:
            await asyncio.sleep(interval_ms / 1000)
            self._forget_what_stands()
            now_ms = self._now_ms()
            old = [
                pipeline
                for pipeline in self._pipelines.values()
                if pipeline.state is not State.CLOSED
                # One that was taken later than now is from before the clock was set back.
                and not 0 <= now_ms - pipeline.lag.sampled_at_ms < interval_ms
            ]
            if old and self.view is not None:
                await self._logs.sample_ends(old, self.view)

    def _forget_what_stands(self) -> None:
        """What is not fetched now is not tried in vain either."""
        for key, pipeline in self._pipelines.items():
            if pipeline.state is not State.RUNNING:
                self._silences.over(key)
            if pipeline.state in STANDING:
                self.failures.over(key)

    def _place(self) -> None:
        """Gives each pipeline to the loop of its leader; loops begin and end as needed."""
        if self.view is None:
            return
        wanted: dict[Way, dict[TopicPartition, PartitionPipeline]] = {}
        for key, pipeline in self._pipelines.items():
            leader = self.view.leader(*key)
            if leader is None:
                self._not_answered(key, pipeline, "the source names no leader of it now")
            else:
                way = Way(leader, way_number(*key, self.config.connections))
                wanted.setdefault(way, {})[key] = pipeline
        for way in list(self._loops):
            if way not in wanted:
                loop = self._loops.pop(way)
                self._budget.loop_count -= 1
                if loop.task is not None:
                    loop.task.cancel()
                self.cluster.close_purpose(way.purpose, way.node)
        for way, partitions in wanted.items():
            known = self._loops.get(way)
            if known is None:
                known = self._loops[way] = FetchLoop(self._budget)
                self._budget.loop_count += 1
                known.task = self._tasks.create_task(self._fetch_from(way, known))
            if known.partitions != partitions:
                known.partitions = partitions
                known.changed.set()

    # --- fetching --------------------------------------------------------------------------------

    async def _fetch_from(self, way: Way, loop: FetchLoop) -> None:
        failure_count = 0
        while True:
            loop.changed.clear()
            wait_ms = self._bucket.wait_ms(MIN_FETCH_SIZE, self._now_ms())
            if wait_ms:
                await loop.until_changed(wait_ms)
                continue
            at_ms = steady_ms()
            room = loop.room(at_ms)
            positions, limit_ms = loop.positions(room, at_ms)
            if not positions:
                await loop.until_changed(ERROR_PAUSE_MS)
                continue
            if (allowed := self._bucket.room(self._now_ms())) is not None:
                room = min(room, allowed)
            asked = {key: loop.partitions[key] for key in positions}
            sizes = loop.sizes(self._fetch_config, room)
            session = None if loop.is_for_one else loop.session
            try:
                if loop.tells_where_histories_part is None:
                    loop.tells_where_histories_part = await tells_diverging_epoch(self.cluster, way.node)
                if not loop.tells_where_histories_part:
                    positions = await self._compare(asked, positions)
                    if not positions:
                        continue
                with loop.held.asking(sizes.answer):
                    answers = await fetch(
                        self.cluster,
                        way.node,
                        positions,
                        min_bytes=1,
                        max_wait_ms=min(limit_ms, self._fetch_config.max_wait_ms),
                        max_bytes=sizes.answer,
                        partition_max_bytes=sizes.partition,
                        read_committed=True,
                        purpose=way.purpose,
                        session=session,
                    )
            except CLUSTER_FAILURES as error:
                if self.is_connected:
                    log.warning("the source does not answer", source=self.name, error=str(error))
                self.is_connected = False
                for key, pipeline in asked.items():
                    if loop.partitions.get(key) is pipeline:  # nor has left, nor moved to another leader
                        self._not_answered(key, pipeline, f"its leader does not answer: {error}")
                loop.tells_where_histories_part = None
                failure_count += 1
                self._look_again.set()
                await asyncio.sleep(SOURCE_BACK_OFF.delay_ms(failure_count, random.random()) / 1000)
                continue
            failure_count = 0
            self.is_connected = self.was_connected = True
            self._take_all(loop, asked, positions, answers)
            del answers  # or they would keep their memory until the next ones are there
            if session is not None and (quiet := loop.quiet(steady_ms())):
                with_room = session.had_room()
                for key, ends in quiet.items():
                    self._nothing_new(asked[key], positions[key], ends, had_room=key in with_room)

    def _not_answered(self, key: TopicPartition, pipeline: PartitionPipeline, reason: str) -> None:
        """Told of each partition: that others answer says nothing of it. The next answer ends it."""
        if pipeline.state is State.RUNNING:
            self.failures.failed(key, reason, self._now_ms())

    def _take_all(
        self,
        loop: FetchLoop,
        asked: Mapping[TopicPartition, PartitionPipeline],
        positions: Mapping[TopicPartition, FetchPosition],
        answers: list[FetchedPartition],
    ) -> None:
        size = sum(len(answer.records) for answer in answers)
        frame = loop.held.take(size)
        with_room: set[TopicPartition] | None = None
        for answer in answers:
            self._bucket.spend(len(answer.records))
            key = (answer.topic, answer.partition)
            had_room = not size or loop.is_for_one
            if not had_room and not len(answer.records):
                with_room = loop.session.had_room() if with_room is None else with_room
                had_room = key in with_room
            if not self._take(asked[key], positions[key], answer, frame, had_room=had_room):
                loop.session.end()  # what was not taken would not be said again

    async def _compare(
        self,
        asked: Mapping[TopicPartition, PartitionPipeline],
        positions: Mapping[TopicPartition, FetchPosition],
    ) -> dict[TopicPartition, FetchPosition]:
        """Those positions that are of their leader's history; the others go back to where histories part."""
        compared = await self._histories.compare(
            positions, {key: self._leader_epoch(*key) for key in positions}
        )
        for key, diverging in compared.parted.items():
            if not self._is_as_asked(asked[key], positions[key]):
                continue
            if diverging is None:
                asked[key].retry_at_ms = steady_ms() + ERROR_PAUSE_MS
                self._tasks.create_task(self._logs.doubt(asked[key]))
            else:
                self._parted(asked[key], diverging)
        return compared.ours

    def _leader_epoch(self, topic: str, partition: int) -> int:
        known = self.view.topics.get(topic) if self.view is not None else None
        found = known.partitions.get(partition) if known is not None else None
        return -1 if found is None else found.leader_epoch

    def _take(
        self,
        pipeline: PartitionPipeline,
        asked: FetchPosition,
        answer: FetchedPartition,
        frame: Frame | None = None,
        *,
        had_room: bool = True,
    ) -> bool:
        """Whether it was of what is asked for still."""
        if not self._is_as_asked(pipeline, asked):
            return False
        if code := answer.error_code:
            self._refused(pipeline, code, asked.current_leader_epoch)
        elif self._logs.is_gone(pipeline):
            pipeline.retry_at_ms = steady_ms() + ERROR_PAUSE_MS
            self._resolve(pipeline, is_of_id=True)
        else:
            self._accept(pipeline, asked, answer, frame, had_room=had_room)
        return True

    def _accept(
        self,
        pipeline: PartitionPipeline,
        asked: FetchPosition,
        answer: FetchedPartition,
        frame: Frame | None,
        *,
        had_room: bool,
    ) -> None:
        if self._refusals:
            self._refusals.pop((answer.topic, answer.partition), None)
        self._logs.found(pipeline.partition)
        key = (answer.topic, answer.partition)
        if answer.diverging is not None:
            self.failures.over(key)
            epoch = asked.current_leader_epoch
            if asked.topic_id == NO_TOPIC_ID and 0 <= epoch <= pipeline.progress.fetched_leader_epoch:
                # While it has the leader under whom we fetched, a log is not cut: it is another one.
                pipeline.retry_at_ms = steady_ms() + ERROR_PAUSE_MS
                self._resolve(pipeline, epoch, is_of_id=False)
                return
            self._parted(pipeline, answer.diverging)
            return
        now_ms = self._now_ms()
        silence = self._silences.answered(
            key, asked.offset, answer.last_stable_offset,
            gives=len(answer.records) > 0, had_room=had_room, now_ms=now_ms,
        )  # fmt: skip
        pipeline.accept(answer, frame)
        self._tell(key, pipeline, silence, now_ms)
        self._answer(pipeline)

    def _nothing_new(
        self, pipeline: PartitionPipeline, asked: FetchPosition, ends: LogEnds, *, had_room: bool
    ) -> None:
        """A partition that the last answer did not name, as nothing has changed since one did."""
        if not self._is_as_asked(pipeline, asked) or self._logs.is_gone(pipeline):
            return
        self._logs.found(pipeline.partition)
        now_ms, key = self._now_ms(), (pipeline.partition.topic, pipeline.partition.partition)
        if self._refusals:
            self._refusals.pop(key, None)  # an error would be said again
        # A stable end that moves alone is not said: while a transaction is open, `_keep_log_ends` asks.
        stable_end = ends.last_stable_offset
        if 0 <= ends.high_watermark <= stable_end:
            pipeline.lag.sample(stable_end, now_ms, stable_end)
        silence = self._silences.answered(
            key, asked.offset, stable_end, gives=False, had_room=had_room, now_ms=now_ms
        )
        self._tell(key, pipeline, silence, now_ms)

    def _tell(
        self, key: TopicPartition, pipeline: PartitionPipeline, silence: Failure | None, now_ms: int
    ) -> None:
        """What is to be told of a partition that was answered well."""
        if reason := pipeline.doubt.reason:
            self.failures.failed(key, f"what the source gives is not taken: {reason}", now_ms)
        elif silence is not None:
            self.failures.failed(key, silence.reason, silence.since_ms)
        else:
            self.failures.over(key)

    @staticmethod
    def _is_as_asked(pipeline: PartitionPipeline, asked: FetchPosition) -> bool:
        """Not drained, closed or moved while the answer was under way, nor moved to another log."""
        return (
            pipeline.state is State.RUNNING
            and pipeline.progress.fetch_offset == asked.offset
            and pipeline.origin.topic_id == asked.topic_id
        )

    @staticmethod
    def _parted(pipeline: PartitionPipeline, diverging: tuple[int, int]) -> None:
        """The leader's newest (epoch, end offset) that is not above ours: histories part there, or before."""
        offset = pipeline.progress.fetch_offset
        parts_at, resume_epoch = pipeline.progress.epochs.parts_at(*diverging, offset)
        pipeline.at_gap(
            GapClass.TRUNCATED,
            offset,
            f"the source's log was cut at {parts_at} and went on differently",
            first=parts_at,
            resume_at=parts_at,
            resume_epoch=resume_epoch,
        )

    def _refused(self, pipeline: PartitionPipeline, code: int, leader_epoch: int) -> None:
        pipeline.retry_at_ms = steady_ms() + ERROR_PAUSE_MS
        key, error = (pipeline.partition.topic, pipeline.partition.partition), error_for_code(code)
        self.failures.failed(key, f"the source refuses the fetch: {error}", self._now_ms())
        if code in ANOTHER_LOG:
            self._resolve(pipeline, leader_epoch, is_of_id=code != OffsetOutOfRange.code)
            return
        if code == CorruptMessage.code:
            pipeline.distrust(ToldDamage(f"the source says: {error}"))
            self._answer(pipeline)
            return
        self.cluster.observe(code)
        self._look_again.set()
        count = self._refusals.get(key, 0) + 1
        if count == 1 and not error.retriable:
            count = MANY_REFUSALS  # that will not go away by itself
        self._refusals[key] = count
        # What goes on is told once; a leader that moves is no news.
        if count == MANY_REFUSALS:
            log.warning("a fetch is refused; asking again", of=str(pipeline.partition), error=str(error))

    def _answer(self, pipeline: PartitionPipeline) -> None:
        """Looks, beside the fetch loop, at what a partition does not believe."""
        if (question := pipeline.take_question()) is not None:
            self._tasks.create_task(self._look(pipeline, question))

    async def _look(self, pipeline: PartitionPipeline, question: Question) -> None:
        asked: Question | None = question
        while asked is not None:
            found = await self._surveyor.look(pipeline.partition, pipeline.origin.topic_id, asked)
            if pipeline.looked(asked, found):
                self.failures.over((pipeline.partition.topic, pipeline.partition.partition))
            asked = pipeline.take_question()  # one that came up meanwhile, elsewhere

    def _resolve(self, pipeline: PartitionPipeline, leader_epoch: int = -1, *, is_of_id: bool) -> None:
        """Finds out, beside the fetch loop, what became of a log."""
        self._tasks.create_task(self._logs.explain(pipeline, leader_epoch, is_of_id=is_of_id))
