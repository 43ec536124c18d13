"""What a source says of its logs beside the fetching: where they begin and end, and which they are.

Called by `source`: where a partition that was just assigned goes on (`begin`), why a fetch offset is not
known there any more (`explain`), and how far behind a partition is that nobody fetches now (`sample_ends`).
What it finds becomes a position or a gap; what may be skipped is not decided here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.leader_epochs import epoch_ends
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.client.offsets import EARLIEST, LATEST
from millrace.broker.client.retry import BackOff
from millrace.broker.errors import InconsistentTopicId, UnknownTopicOrPartition, UnsupportedVersion
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.delivery.beginnings import Start
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES, NewFailures
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.steady import steady_ms
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.troubles import Failures

log = structlog.get_logger("millrace.mirror.sources.source_logs")

# After a question that the source did not answer, until the next one.
SOURCE_BACK_OFF = BackOff(first_ms=100, limit_ms=5_000)
SAMPLE_TIMEOUT_S = 5.0
# An offset within the log that is said to be out of range: the log may have moved between the two answers.
# Said this often in a row, it is the epoch of what was fetched that the source does not know.
MAX_UNEXPLAINED = 3
UNEXPLAINED_PAUSE_MS = 5_000
ANEW = 0
"""Where a topic that was made anew goes on: what retention has taken of it by then, maybe long after it was
looked at, is a gap of its own."""


class SourceLogs:
    """The logs of one source cluster."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        now_ms: Callable[[], int],
        record_start: Callable[[SourcePartition, Position], Awaitable[None]],
        failures: Failures[TopicPartition] | None = None,
    ) -> None:
        """`record_start` returns when a first position is durable. `failures` are told what cannot begin, by
        topic and partition."""
        self._failures: Failures[TopicPartition] = Failures() if failures is None else failures
        self._name = name
        self._cluster = cluster
        self._now_ms = now_ms
        self._record_start = record_start
        self._unexplained: dict[SourcePartition, tuple[int, int]] = {}  # offset, how often in a row
        self._origins: dict[str, Origin] = {}  # of topics, as they were told last

    # --- which they are ----------------------------------------------------------------------------

    def looked(self, view: ClusterMetadata) -> None:
        """A look at the source gave this."""
        cluster_id = view.cluster_id or ""
        self._origins.update((each.name, Origin(cluster_id, each.topic_id)) for each in view.topics.values())

    def is_gone(self, pipeline: PartitionPipeline) -> bool:
        """Whether the name of a partition's topic was another one's when it was told last: what is fetched by
        name is that one's. A partition may be in the log that is gone, at an offset that the other has: when
        it goes back to its position, or tries a gap again."""
        now = self._origins.get(pipeline.partition.topic)
        return now is not None and is_other_log(pipeline.origin, now)

    # --- where to begin --------------------------------------------------------------------------

    async def begin(
        self, pipeline: PartitionPipeline, known: Position | None, *, is_lost: bool, start: Start
    ) -> None:
        """Finds where a newly assigned partition goes on. Tries until it is known or the assignment ends.
        `start` counts only for a partition that was never mirrored before."""
        failures, failure_count = NewFailures(), 0
        key = (pipeline.partition.topic, pipeline.partition.partition)
        while pipeline.state is State.STARTING:
            try:
                await self._begin(pipeline, known, is_lost, start)
            except CLUSTER_FAILURES as error:
                self._failures.failed(key, f"it cannot begin: {error}", self._now_ms())
                if failures.is_news(error):
                    log.warning("cannot begin yet", of=str(pipeline.partition), error=str(error))
                failure_count += 1
                await asyncio.sleep(SOURCE_BACK_OFF.delay_ms(failure_count, random.random()) / 1000)
        self._failures.over(key)  # also where it is nothing to us any more

    async def _begin(
        self, pipeline: PartitionPipeline, known: Position | None, is_lost: bool, start: Start
    ) -> None:
        partition = pipeline.partition
        origin, earliest, latest = await self._log_of(partition)
        if is_lost:
            pipeline.ready(_start(earliest, origin))
            reason = "the positions topic holds no readable position of it"
            pipeline.at_gap(GapClass.POSITION_LOST, latest, reason, resume_at=latest)
        elif known is not None:
            recorded = Origin.of(known)
            is_other = is_other_log(recorded, origin)
            now = recorded if is_other else joined(recorded, origin)
            pipeline.ready(known)
            if not is_other and (now != recorded or pipeline.target not in known.targets):
                pipeline.adopt(now)  # with the next commit: it may stand here for long
            if is_other:
                reason = "the position is of another topic or cluster of this name"
                following = max(known.next_offset, known.log_end)
                pipeline.at_gap(GapClass.RECREATED, following, reason, resume_at=ANEW, origin=origin)
        else:
            first = await self._first(partition, start, origin, earliest, latest)
            if pipeline.state is not State.STARTING:
                # Lost meanwhile: what was just found may lie beyond what the new owner has delivered, and
                # as the newest record it would be believed.
                return
            # Durable before the first record is carried: otherwise a crash could make `latest` mean a
            # later offset the next time, and what lies between would be lost.
            first = replace(first, at_ms=self._now_ms(), began=first.next_offset, targets=(pipeline.target,))
            await self._record_start(partition, first)
            pipeline.ready(first)
            if is_other_log(Origin.of(first), origin):
                reason = "the topic was made anew after this source was first looked at"
                pipeline.at_gap(GapClass.RECREATED, ANEW, reason, resume_at=ANEW, origin=origin)
        if known is not None:
            pipeline.lag.resume(known.next_offset, known.waiting_since_ms, known.log_end)
        if not is_other_log(pipeline.origin, origin) and not _may_be_another(pipeline, origin, latest):
            # The log may be gone before the first fetch: what it held is told by a gap's event all the same.
            pipeline.lag.sample(latest, self._now_ms())

    async def _first(
        self, partition: SourcePartition, start: Start, origin: Origin, earliest: int, latest: int
    ) -> Position:
        """Where `start` leads: in this log, or at the beginning of the one that is owed and gone."""
        owed = Origin(origin.cluster_id, start.topic_id)
        if is_other_log(owed, origin):
            return _start(0, owed)
        offset = earliest if start.at == "earliest" else latest
        if isinstance(start.at, int):
            key = (partition.topic, partition.partition)
            found = (await self._cluster.list_offsets({key: start.at}))[key].offset
            offset = found if found >= 0 else latest
        return replace(_start(offset, joined(owed, origin)), log_end=latest)

    # --- why it cannot go on ---------------------------------------------------------------------

    async def explain(
        self, pipeline: PartitionPipeline, leader_epoch: int = -1, *, is_of_id: bool = False
    ) -> None:
        """Finds out why the source does not know the fetch offset, or the topic, of a running partition.
        `leader_epoch` is the one that the refused fetch named, so the leader's own (KIP-320); -1: none.
        `is_of_id`: it was the topic's id that was refused. Until the source names another, from whichever
        broker, the bounds that it tells may be another log's, and nothing is cut or expired by them."""
        asked_at = (pipeline.origin, pipeline.progress.fetch_offset)
        try:
            origin, earliest, latest = await self._log_of(pipeline.partition)
        except CLUSTER_FAILURES as error:
            log.warning("asking again", of=str(pipeline.partition), error=str(error))
            return
        offset = pipeline.progress.fetch_offset
        if (pipeline.origin, offset) != asked_at:
            return
        if is_other_log(pipeline.origin, origin):
            pipeline.at_gap(
                GapClass.RECREATED,
                max(offset, pipeline.lag.log_end),
                "the topic was deleted and created again",
                resume_at=ANEW,
                origin=origin,
            )
        elif is_of_id:
            log.debug("asking again which topic it is", of=str(pipeline.partition))
        elif offset < earliest:
            pipeline.at_gap(
                GapClass.EXPIRED, earliest, "retention deleted it before it was fetched", resume_at=earliest
            )
        elif offset > latest and 0 <= leader_epoch <= pipeline.progress.fetched_leader_epoch:
            pipeline.at_gap(
                GapClass.RECREATED,
                max(offset, pipeline.lag.log_end),
                f"the topic was deleted and created again: its log ends at {latest} in leader epoch "
                f"{leader_epoch}, in which more was fetched",
                resume_at=ANEW,
                origin=origin,
            )
        elif offset > latest:
            await self._leave_shorter(pipeline, earliest, latest)
        else:
            await self._leave_unexplained(pipeline, earliest)

    def found(self, partition: SourcePartition) -> None:
        """The source answers a fetch of it, or it is nothing to us any more: what it was said of before is no
        row any longer."""
        if self._unexplained:
            self._unexplained.pop(partition, None)

    async def doubt(self, pipeline: PartitionPipeline) -> None:
        """The leader knows nothing of the epoch of what was fetched last, though it knows its own."""
        asked_at = (pipeline.origin, pipeline.progress.fetch_offset)
        try:
            _, earliest, _ = await self._log_of(pipeline.partition)
        except CLUSTER_FAILURES as error:
            log.warning("asking again", of=str(pipeline.partition), error=str(error))
            return
        if (pipeline.origin, pipeline.progress.fetch_offset) == asked_at:
            await self._leave_unexplained(pipeline, earliest)

    async def _leave_shorter(self, pipeline: PartitionPipeline, earliest: int, latest: int) -> None:
        """The log ends before what was fetched. Where histories part its epochs tell: it may have gone on
        since it was cut. Its end counts for a source that keeps none."""
        offset = pipeline.progress.fetch_offset
        parted: tuple[int, int] | None = latest, -1
        if pipeline.progress.fetched_leader_epoch >= 0:
            try:
                parted = await self._parted(pipeline)
            except UnsupportedVersion:
                log.debug("the source keeps no epochs", of=str(pipeline.partition))
            except CLUSTER_FAILURES as error:
                log.warning("asking again", of=str(pipeline.partition), error=str(error))
                return
        if pipeline.progress.fetch_offset != offset:
            return
        if parted is not None and parted[0] >= offset:  # two answers that contradict each other
            log.warning("fetching again what should be there", of=str(pipeline.partition), offset=offset)
            return
        self._at_parting(pipeline, parted, earliest, f"the source's log now ends at {latest}")

    @staticmethod
    def _at_parting(
        pipeline: PartitionPipeline, parted: tuple[int, int] | None, earliest: int, found: str
    ) -> None:
        """The gap between what was fetched and a history that is another from `parted` on (`_parted`)."""
        offset = pipeline.progress.fetch_offset
        if parted is not None:
            parts_at, epoch = parted
            pipeline.at_gap(
                GapClass.TRUNCATED,
                offset,
                found if epoch < 0 else f"{found}, and has another history from offset {parts_at} on",
                first=parts_at,
                resume_at=parts_at,
                resume_epoch=epoch,
            )
            return
        pipeline.at_gap(
            GapClass.RECREATED,
            max(offset, pipeline.lag.log_end),
            "the source has never seen the leader epoch of what was fetched: its log is another one",
            resume_at=ANEW if pipeline.origin.topic_id == NO_TOPIC_ID else earliest,
        )

    async def _leave_unexplained(self, pipeline: PartitionPipeline, earliest: int) -> None:
        """What the source does not know is the epoch of what was fetched last: it says so, or that an offset
        within its log is out of range. A log that was restored from a backup has an older history."""
        offset = pipeline.progress.fetch_offset
        before, count = self._unexplained.get(pipeline.partition, (offset, 0))
        count = count + 1 if before == offset else 1
        self._unexplained[pipeline.partition] = (offset, count)
        if count < MAX_UNEXPLAINED or pipeline.progress.fetched_leader_epoch < 0:
            log.warning("fetching again what should be there", of=str(pipeline.partition), offset=offset)
            return
        try:
            parted = await self._parted(pipeline)
        except CLUSTER_FAILURES as error:
            log.warning("asking again", of=str(pipeline.partition), error=str(error))
            return
        if pipeline.progress.fetch_offset != offset:
            return
        if parted is not None and parted[0] >= offset:
            # It knows what was fetched, so this is its log: what follows is kept from us for now (Apache
            # Kafka says so of a place that its remote store has no word of).
            if count == MAX_UNEXPLAINED:
                log.warning(
                    "waiting for what the source does not find in its log",
                    of=str(pipeline.partition),
                    offset=offset,
                )
            pipeline.retry_at_ms = steady_ms() + UNEXPLAINED_PAUSE_MS
            return
        self.found(pipeline.partition)
        self._at_parting(pipeline, parted, earliest, "the source's log goes on")

    async def _parted(self, pipeline: PartitionPipeline) -> tuple[int, int] | None:
        """Where the source's history leaves what was fetched, and the epoch to go on with: by the newest of
        our epochs that it can tell of. None when there is none. Raises UnsupportedVersion, and
        InconsistentTopicId when the log is another one by then: epochs are asked for by name."""
        key = (pipeline.partition.topic, pipeline.partition.partition)
        progress = pipeline.progress
        origin, ours = pipeline.origin, progress.epochs.newest_first()
        parted = None
        for epoch in ours:
            found, end = (await epoch_ends(self._cluster, {key: epoch}))[key]
            if found >= 0 and end >= 0 and min(ours) <= found:
                parted = progress.epochs.parts_at(found, end, progress.fetch_offset)
                break
        await self._still(origin, pipeline.partition)
        return parted

    # --- how far behind --------------------------------------------------------------------------

    async def sample_ends(self, pipelines: Iterable[PartitionPipeline], view: ClusterMetadata) -> None:
        """Notes the log ends of partitions that are not fetched now. One topic that cannot be answered for
        holds up no other for long; a topic of that name that is another one says nothing, also one that was
        made since `view`: ends are asked for by name, so the topic's id is looked at before and after."""
        by_topic: dict[str, dict[TopicPartition, PartitionPipeline]] = {}
        for pipeline in pipelines:
            key = (pipeline.partition.topic, pipeline.partition.partition)
            topic = view.topics.get(key[0])
            if topic is None or view.leader(*key) is None:
                continue
            if not is_other_log(pipeline.origin, Origin(view.cluster_id or "", topic.topic_id)):
                by_topic.setdefault(key[0], {})[key] = pipeline
        for topic_name, wanted in by_topic.items():
            try:
                async with asyncio.timeout(SAMPLE_TIMEOUT_S):
                    stable = await self._cluster.list_offsets(dict.fromkeys(wanted, LATEST), True)
                    ends = await self._cluster.list_offsets(dict.fromkeys(wanted, LATEST))
                    later = await self._cluster.metadata([topic_name], max_age_ms=0)
            except CLUSTER_FAILURES as error:
                log.debug("no log ends", source=self._name, topic=topic_name, error=str(error))
                continue
            topic = later.topics.get(topic_name)
            if topic is None:
                continue
            now, now_ms = Origin(later.cluster_id or "", topic.topic_id), self._now_ms()
            for key, pipeline in wanted.items():
                if not is_other_log(pipeline.origin, now) and not _may_be_another(
                    pipeline, now, ends[key].offset
                ):
                    pipeline.lag.sample(ends[key].offset, now_ms, stable[key].offset)

    async def _log_of(self, partition: SourcePartition) -> tuple[Origin, int, int]:
        """Which log it is now, its first offset and its end (the high watermark). They are asked for by name,
        so which it is is looked at before and after: raises InconsistentTopicId where that changed."""
        before = await self._origin(partition)
        key = (partition.topic, partition.partition)
        earliest = (await self._cluster.list_offsets({key: EARLIEST}))[key].offset
        latest = (await self._cluster.list_offsets({key: LATEST}))[key].offset
        return await self._still(before, partition), earliest, latest

    async def _origin(self, partition: SourcePartition) -> Origin:
        view = await self._cluster.metadata([partition.topic], max_age_ms=0)
        self.looked(view)
        topic = view.topics.get(partition.topic)
        if topic is None:
            raise UnknownTopicOrPartition(f"{partition} does not exist now")
        return Origin(view.cluster_id or "", topic.topic_id)

    async def _still(self, before: Origin, partition: SourcePartition) -> Origin:
        """`before`, with what is known by now. Raises InconsistentTopicId when the log is another one."""
        now = await self._origin(partition)
        if is_other_log(before, now):
            raise InconsistentTopicId(f"the topic of {partition} was another one when it was asked about")
        return joined(before, now)


def joined(before: Origin, now: Origin) -> Origin:
    """The same log, with what either side knows of it."""
    topic_id = before.topic_id if now.topic_id == NO_TOPIC_ID else now.topic_id
    return Origin(now.cluster_id or before.cluster_id, topic_id)


def _start(offset: int, origin: Origin) -> Position:
    """A place in this log that nobody has put on record yet."""
    return Position(offset, origin.cluster_id, origin.topic_id, -1, -1)


def _may_be_another(pipeline: PartitionPipeline, now: Origin, end: int) -> bool:
    """A log that ends before what was fetched is cut or, where ids do not tell, another one. How far this one
    went is told by the gap that follows, so such an end is not noted."""
    has_ids = NO_TOPIC_ID not in (pipeline.origin.topic_id, now.topic_id)
    return not has_ids and end < pipeline.progress.fetch_offset


def is_other_log(before: Origin, now: Origin) -> bool:
    """Whether offsets of `before` mean nothing in `now`. What one side does not know proves nothing."""
    if before.cluster_id and now.cluster_id and before.cluster_id != now.cluster_id:
        return True
    return NO_TOPIC_ID not in (before.topic_id, now.topic_id) and before.topic_id != now.topic_id
