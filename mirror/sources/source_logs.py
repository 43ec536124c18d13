"""What a source says of its logs beside the fetching: where they begin and end, which they are, what is bad.

Called by `source`: where a partition that was just assigned goes on (`begin`), why a fetch offset is not
known there any more (`explain`), how far a damaged stretch goes (`survey`), and how far behind a partition is
that nobody fetches now (`sample_ends`). What it finds becomes a position or a gap; what may be skipped is not
decided here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.leader_epochs import epoch_ends
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.client.offsets import EARLIEST, LATEST
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition, fetch
from millrace.broker.errors import (
    CorruptMessage,
    KafkaStorageError,
    LeaderNotAvailable,
    UnknownServerError,
    UnknownTopicOrPartition,
    UnsupportedVersion,
    error_for_code,
)
from millrace.broker.protocol.batch import HEADER_SIZE
from millrace.mirror.batches.old_messages import NO_END
from millrace.mirror.batches.placement import Beginning, beginning_at
from millrace.mirror.delivery.checkpoints import NO_TOPIC_ID, Position
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES, NewFailures
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.sources.fetch_sizes import MORE_SIZE, MOST_OF_A_LOOK, larger_look
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.troubles import Failures

log = structlog.get_logger("millrace.mirror.sources.source_logs")

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
SAMPLE_TIMEOUT_S = 5.0
# An offset within the log that is said to be out of range: the log may have moved between the two answers.
# Said this often in a row, it is the epoch of what was fetched that the source does not know.
MAX_UNEXPLAINED = 3
# What a source says of a place in a log that it cannot read, while it can read others.
CANNOT_GIVE = frozenset(error.code for error in (CorruptMessage, KafkaStorageError, UnknownServerError))


class SourceLogs:
    """The logs of one source cluster."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        now_ms: Callable[[], int],
        record_start: Callable[[SourcePartition, Position], Awaitable[None]],
        failures: Failures[tuple[str, int]] | None = None,
    ) -> None:
        """`record_start` returns when a first position is durable. `failures` are told what cannot begin, by
        topic and partition."""
        self._failures: Failures[tuple[str, int]] = Failures() if failures is None else failures
        self._name = name
        self._cluster = cluster
        self._now_ms = now_ms
        self._record_start = record_start
        self._unexplained: dict[SourcePartition, tuple[int, int]] = {}  # offset, how often in a row

    # --- where to begin --------------------------------------------------------------------------

    async def begin(
        self, pipeline: PartitionPipeline, known: Position | None, *, is_lost: bool, start: str | int
    ) -> None:
        """Finds where a newly assigned partition goes on. Tries until it is known or the assignment ends.
        `start` counts only for a partition that was never mirrored before."""
        failures, failure_count = NewFailures(), 0
        key = (pipeline.partition.topic, pipeline.partition.partition)
        while pipeline.state is State.STARTING:
            try:
                await self._begin(pipeline, known, is_lost, start)
                self._failures.over(key)
            except CLUSTER_FAILURES as error:
                self._failures.failed(key, f"it cannot begin: {error}", self._now_ms())
                if failures.is_news(error):
                    log.warning("cannot begin yet", of=str(pipeline.partition), error=str(error))
                failure_count += 1
                pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failure_count, 10))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _begin(
        self, pipeline: PartitionPipeline, known: Position | None, is_lost: bool, start: str | int
    ) -> None:
        partition = pipeline.partition
        origin, earliest, latest = await self._log_of(partition)
        if is_lost:
            pipeline.ready(earliest, -1, origin)
            reason = "the positions topic holds no readable position of it"
            pipeline.at_gap(GapClass.POSITION_LOST, latest, reason, resume_at=latest)
        elif known is not None:
            recorded = Origin(known.cluster_id, known.topic_id)
            is_other = is_other_log(recorded, origin)
            now = recorded if is_other else joined(recorded, origin)
            pipeline.ready(known.next_offset, known.leader_epoch, now, known.began)
            if is_other:
                reason = "the position is of another topic or cluster of this name"
                following = max(known.next_offset, known.log_end)
                pipeline.at_gap(GapClass.RECREATED, following, reason, resume_at=earliest, origin=origin)
        else:
            offset = earliest if start == "earliest" else latest
            if isinstance(start, int):
                key = (partition.topic, partition.partition)
                found = (await self._cluster.list_offsets({key: start}))[key].offset
                offset = found if found >= 0 else latest
            if pipeline.state is not State.STARTING:
                # Lost meanwhile: what was just found may lie beyond what the new owner has delivered, and
                # as the newest record it would be believed.
                return
            # Durable before the first record is carried: otherwise a crash could make `latest` mean a
            # later offset the next time, and what lies between would be lost.
            first = Position(
                offset, origin.cluster_id, origin.topic_id, -1, self._now_ms(), latest, began=offset
            )
            await self._record_start(partition, first)
            pipeline.ready(offset, -1, origin, offset)
        if known is not None:
            pipeline.lag.resume(known.next_offset, known.waiting_since_ms, known.log_end)
        if not is_other_log(pipeline.origin, origin) and not _may_be_another(pipeline, origin, latest):
            # The log may be gone before the first fetch: what it held is told by a gap's event all the same.
            pipeline.lag.sample(latest, self._now_ms())

    # --- why it cannot go on ---------------------------------------------------------------------

    async def explain(self, pipeline: PartitionPipeline, leader_epoch: int = -1) -> None:
        """Finds out why the source does not know the fetch offset, or the topic, of a running partition.
        `leader_epoch` is the one that the refused fetch named, so the leader's own (KIP-320); -1: none."""
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
                resume_at=earliest,
                origin=origin,
            )
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
                resume_at=earliest,
                origin=origin,
            )
        elif offset > latest:
            pipeline.at_gap(
                GapClass.TRUNCATED,
                offset,
                f"the source's log now ends at {latest}",
                first=latest,
                resume_at=latest,
            )
        else:
            await self._leave_unexplained(pipeline, earliest)

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
        del self._unexplained[pipeline.partition]
        if pipeline.progress.fetch_offset != offset:
            return
        if parted is not None:
            pipeline.at_gap(
                GapClass.TRUNCATED,
                offset,
                f"the source's log has another history from offset {parted[0]} on",
                first=parted[0],
                resume_at=parted[0],
                resume_epoch=parted[1],
            )
            return
        pipeline.at_gap(
            GapClass.RECREATED,
            max(offset, pipeline.lag.log_end),
            "the source has never seen the leader epoch of what was fetched: its log is another one",
            resume_at=earliest,
        )

    async def _parted(self, pipeline: PartitionPipeline) -> tuple[int, int] | None:
        """Where the source's history leaves what was fetched, and the epoch to go on with: by the newest of
        our epochs that it can tell of. None when there is none."""
        key = (pipeline.partition.topic, pipeline.partition.partition)
        progress = pipeline.progress
        ours = progress.epochs.newest_first()
        for epoch in ours:
            try:
                found, end = (await epoch_ends(self._cluster, {key: epoch}))[key]
            except UnsupportedVersion:
                return None
            if found >= 0 and end >= 0 and min(ours) <= found:
                return progress.epochs.parts_at(found, end, progress.fetch_offset)
        return None

    async def survey(self, pipeline: PartitionPipeline) -> None:
        """Finds where a damaged stretch at the fetch offset ends: at the first batch behind it that the
        source can give and whose checksum is right. The damaged batch's own header is not believed."""
        first, origin, reason = pipeline.progress.fetch_offset, pipeline.origin, pipeline.damage
        pipeline.damage = None
        try:
            end = await self._end_of_damage(pipeline, first)
        except CLUSTER_FAILURES as error:
            log.warning("asking again", of=str(pipeline.partition), error=str(error))
            return
        is_same = (pipeline.progress.fetch_offset, pipeline.origin) == (first, origin)
        if end is not None and is_same and reason is not None:
            key = (pipeline.partition.topic, pipeline.partition.partition)
            self._failures.over(key)  # from now on it is a gap
            pipeline.retry_at_ms = 0
            epoch = pipeline.progress.fetched_leader_epoch
            pipeline.at_gap(GapClass.CORRUPT, end, reason, resume_at=end, resume_epoch=epoch)

    async def _end_of_damage(self, pipeline: PartitionPipeline, first: int) -> int | None:
        """None when nothing is damaged after all, or nothing can be read at all. Looks further and further
        ahead, then halves what lies between, so that damage farther on is left to its own gap."""
        key = (pipeline.partition.topic, pipeline.partition.partition)
        log_end = (await self._cluster.list_offsets({key: LATEST}, True))[key].offset
        found = await self._readable_at(pipeline, first, log_end)
        if found is not None:
            if pipeline.is_cleared_in_vain:
                return found.next_offset
            # A batch whose offset was wrong is passed over by the source itself, once it is asked for.
            is_damaged = found.is_behind or pipeline.is_out_of_order or _is_doubtful(found, pipeline)
            end = _good_from(found, pipeline)
            if is_damaged and end > first:
                return end
            pipeline.cleared()
            return None
        bad = good = end = first
        while end <= first:
            if good >= log_end:
                return None
            bad, good = good, min(log_end, good + max(1, good - first))
            found = await self._readable_at(pipeline, good, log_end)
            end = first if found is None else _good_from(found, pipeline)
        while bad + 1 < good:
            middle = (bad + good) // 2
            found = await self._readable_at(pipeline, middle, log_end)
            if found is None or _good_from(found, pipeline) <= first:
                bad = middle
            else:
                good, end = middle, _good_from(found, pipeline)
        return end

    async def _readable_at(self, pipeline: PartitionPipeline, offset: int, log_end: int) -> Beginning | None:
        """The batch that holds `offset`, or the next one, or an empty one at the log's end; None when the
        source cannot give it as it was written. Raises what makes the source unreachable."""
        key = (pipeline.partition.topic, pipeline.partition.partition)
        nothing = Beginning(offset, offset, True, False)
        answer = await self._look(pipeline, offset, MORE_SIZE)
        if answer.error_code in CANNOT_GIVE:
            return None
        if answer.error_code:
            raise error_for_code(answer.error_code)
        if not len(answer.records):
            # Nothing below the log's end: behind a wrong length the source does not find its own batches.
            return nothing if offset >= log_end else None
        found = beginning_at(answer.records, offset, max(log_end, answer.high_watermark))
        is_all = False
        while (found is None or not found.is_vouched_for) and not is_all:
            # More of the log may tell more, and it may have grown since its end was asked for.
            larger = await self._look(pipeline, offset, larger_look(len(answer.records)))
            is_all = len(larger.records) <= len(answer.records) or len(larger.records) >= MOST_OF_A_LOOK
            if len(larger.records) > len(answer.records):
                answer = larger
            log_end = (await self._cluster.list_offsets({key: LATEST}))[key].offset
            found = beginning_at(answer.records, offset, max(log_end, answer.high_watermark))
        if found is None:
            return nothing if offset >= log_end else None
        stable_end = answer.last_stable_offset
        if found.next_offset >= (log_end if stable_end < 0 else min(log_end, stable_end)):
            found = found._replace(is_vouched_for=True)  # as nothing can be given behind it
        if pipeline.stands_alone and not found.is_vouched_for:
            is_contradicted = await self._is_contradicted(pipeline, offset, found, answer.records)
            found = found._replace(is_vouched_for=not is_contradicted)
        pipeline.passes_over |= found.is_behind
        return found

    async def _is_contradicted(
        self, pipeline: PartitionPipeline, offset: int, found: Beginning, given: memoryview
    ) -> bool:
        """Whether the source gives another batch where the one that it gives alone at `offset` claims to lie:
        it finds them by its index and its files' names, which were there before the damage. Only that speaks
        against a lone one, for healthy logs have such, too: the last one of a file, from which no answer goes
        on, and each where the source's limit for an answer is smaller than two batches."""
        last = await self._look(pipeline, found.next_offset - 1, MORE_SIZE)
        behind = await self._look(pipeline, found.next_offset, MORE_SIZE)
        at_last = beginning_at(last.records, found.next_offset - 1, NO_END)
        at_end = beginning_at(behind.records, found.next_offset, NO_END)
        header = _header_of(found, given)
        is_another = at_last is not None and _header_of(at_last, last.records) != header
        if not is_another and (at_end is None or at_end.base_offset >= found.next_offset):
            return False
        # Unless compaction has put that one in its place meanwhile.
        again = await self._look(pipeline, offset, MORE_SIZE)
        at_offset = beginning_at(again.records, offset, NO_END)
        return at_offset is not None and _header_of(at_offset, again.records) == header

    async def _look(self, pipeline: PartitionPipeline, offset: int, size: int) -> FetchedPartition:
        """About `size` bytes of what the source has from `offset` on, and at least one batch."""
        key = (pipeline.partition.topic, pipeline.partition.partition)
        view = await self._cluster.metadata([key[0]])
        leader = view.leader(*key)
        if leader is None:
            raise LeaderNotAvailable(f"{pipeline.partition} has no leader now")
        (answer,) = await fetch(
            self._cluster,
            leader,
            {key: FetchPosition(offset, topic_id=pipeline.origin.topic_id)},
            max_wait_ms=0,
            max_bytes=size,
            partition_max_bytes=size,
            purpose="survey",
        )
        return answer

    # --- how far behind --------------------------------------------------------------------------

    async def sample_ends(self, pipelines: Iterable[PartitionPipeline], view: ClusterMetadata) -> None:
        """Notes the log ends of partitions that are not fetched now. One topic that cannot be answered for
        holds up no other for long; a topic of that name that is another one says nothing, also one that was
        made since `view`: ends are asked for by name, so the topic's id is looked at before and after."""
        by_topic: dict[str, dict[tuple[str, int], PartitionPipeline]] = {}
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
        """Which log it is now, its first offset and its end (the high watermark)."""
        view = await self._cluster.metadata([partition.topic], max_age_ms=0)
        topic = view.topics.get(partition.topic)
        if topic is None:
            raise UnknownTopicOrPartition(f"{partition} does not exist now")
        key = (partition.topic, partition.partition)
        earliest = (await self._cluster.list_offsets({key: EARLIEST}))[key].offset
        latest = (await self._cluster.list_offsets({key: LATEST}))[key].offset
        return Origin(view.cluster_id or "", topic.topic_id), earliest, latest


def _good_from(found: Beginning, pipeline: PartitionPipeline) -> int:
    """Where what was found is good."""
    return found.next_offset if _is_doubtful(found, pipeline) else found.base_offset


def _header_of(found: Beginning, given: memoryview) -> memoryview:
    return given[found.position : found.position + HEADER_SIZE]


def _is_doubtful(found: Beginning, pipeline: PartitionPipeline) -> bool:
    """Where offsets contradict each other and nothing but this one batch is to be had, it may as well be the
    wrong one: it is damage, too."""
    return (pipeline.is_out_of_order or pipeline.stands_alone) and not found.is_vouched_for


def joined(before: Origin, now: Origin) -> Origin:
    """The same log, with what either side knows of it."""
    topic_id = before.topic_id if now.topic_id == NO_TOPIC_ID else now.topic_id
    return Origin(now.cluster_id or before.cluster_id, topic_id)


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
