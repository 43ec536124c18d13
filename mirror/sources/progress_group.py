"""The mirror's positions as commits of a consumer group on the source, for tools that show lag there.

Run by every worker for what it carries, where a source has `progress_group`. Best effort and for the eyes
only: nothing reads it back, and a source that takes no commits holds up nothing.

What must stay true: nobody's own offsets are overwritten. A group that somebody consumes in refuses commits
from outside, but one whose consumers are down would take them, and its consumers would go on elsewhere. So
every commit names its mirror in its metadata, and where the group has another's, nothing is committed and the
mirror says so (`check` says it before).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets, fetch_offsets
from millrace.broker.client.groups import describe_group
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.wording import count_of
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.pipeline import PartitionPipeline

log = structlog.get_logger("millrace.mirror.sources.progress_group")

INTERVAL_S = 2.0
TIMEOUT_S = 5.0
# Kafka forgets what a group without members has committed after a week (offsets.retention.minutes).
COMMIT_AGAIN_AFTER_MS = 86_400_000


class ProgressGroups:
    """See the module's text. `run` goes on until it is cancelled."""

    def __init__(
        self,
        now_ms: Callable[[], int],
        settings: Callable[[], tuple[MirrorConfig, Mapping[str, Cluster]]],
        owned: Callable[[], Iterable[PartitionPipeline]],
    ) -> None:
        """`settings`: the config and the sources' clusters as they are now; both may change."""
        self._now_ms = now_ms
        self._settings = settings
        self._owned = owned
        # By source, group and partition: the offset committed last, and when.
        self._committed: dict[tuple[str, str, TopicPartition], tuple[int, int]] = {}
        self._failing: dict[tuple[str, str], str] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            config, clusters = self._settings()
            named = {each.cluster: each.progress_group for each in config.sources if each.progress_group}
            if not named:
                continue
            positions = self._positions()
            await asyncio.gather(
                *(
                    self._commit(name, clusters[name], group, config.name, positions.get(name, {}))
                    for name, group in named.items()
                    if name in clusters
                )
            )

    def _positions(self) -> dict[str, dict[TopicPartition, int]]:
        """By source: the next offset that readers of the target do not see yet."""
        found: dict[str, dict[TopicPartition, int]] = {}
        for pipeline in self._owned():
            if pipeline.has_begun:
                where = pipeline.partition
                found.setdefault(where.source, {})[where.topic, where.partition] = pipeline.progress.position
        return found

    async def _commit(
        self, source: str, cluster: Cluster, group: str, mirror: str, positions: Mapping[TopicPartition, int]
    ) -> None:
        now_ms = self._now_ms()
        news = {
            key: offset
            for key, offset in positions.items()
            if is_due(self._committed.get((source, group, key)), offset, now_ms)
        }
        if not news:
            return
        mark = mark_of(mirror)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                # Each time: consumers of that name may have come and gone meanwhile.
                failure = await whose(cluster, group, mirror) or ""
                if not failure:
                    await commit_offsets(
                        cluster,
                        group,
                        {key: CommittedOffset(offset, -1, mark) for key, offset in news.items()},
                    )
        except CLUSTER_FAILURES as error:
            failure = str(error) or type(error).__name__
        if failure:
            if self._failing.get((source, group)) != failure:
                log.warning("progress is not committed", source=source, group=group, error=failure)
            self._failing[source, group] = failure
            return
        self._failing.pop((source, group), None)
        self._committed |= {(source, group, key): (offset, now_ms) for key, offset in news.items()}


def mark_of(mirror: str) -> str:
    """What the mirror's commits have as metadata; tools show it."""
    return f"millrace mirror {mirror}"


async def whose(cluster: Cluster, group: str, mirror: str) -> str | None:
    """Why the group is not the mirror's to commit in, for people; None when it is, or nobody's yet. Raises
    what the cluster raises."""
    described = await describe_group(cluster, group)
    offsets = {} if described.members else await fetch_offsets(cluster, group)
    return another_owner(group, len(described.members), described.protocol_type, offsets, mirror)


def another_owner(
    group: str,
    member_count: int,
    protocol_type: str,
    offsets: Mapping[TopicPartition, CommittedOffset],
    mirror: str,
) -> str | None:
    """See `whose`. Pure."""
    advice = "choose a name for progress_group that nothing else uses"
    if member_count:
        return f"{group} is a group with {count_of(member_count, 'member')} of its own; {advice}"
    others = {key: at for key, at in offsets.items() if at.metadata != mark_of(mirror)}
    if others:
        (topic, partition), committed = min(others.items(), key=lambda item: item[0])
        return (
            f"{group} has offsets that are not this mirror's ({len(others)}, such as {topic}-{partition} at "
            f"{committed.offset}), and its consumers would go on at the wrong place; {advice}"
        )
    if protocol_type:
        return f"{group} is a group of members that are away now (type {protocol_type}); {advice}"
    return None


def is_due(committed: tuple[int, int] | None, offset: int, now_ms: int) -> bool:
    """Whether `offset` is to be committed; `committed` is (offset, time) of the last commit."""
    return committed is None or committed[0] != offset or now_ms - committed[1] >= COMMIT_AGAIN_AFTER_MS
