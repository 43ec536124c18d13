"""Target topics: created like the source's, widened with it, and the limits the target sets.

Called by `worker` after every discovery. Several workers may do the same at once: a topic that exists by
now is what was wanted. Partitions are only ever added; when sources merge into one topic, the widest counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from millrace.broker.client.admin import create_partitions, create_topic, describe_configs
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import TopicMetadata
from millrace.broker.errors import InvalidPartitions, KafkaError, TopicAlreadyExists

log = structlog.get_logger("millrace.mirror.topics")

# Settings that belong to the target, not to the data.
TARGET_OWN_CONFIGS = frozenset(
    {
        "min.insync.replicas",
        "compression.type",
        "message.timestamp.type",
        "message.timestamp.difference.max.ms",
        "message.timestamp.before.max.ms",
        "message.timestamp.after.max.ms",
        "message.format.version",
        "message.downconversion.enable",
        "unclean.leader.election.enable",
        "leader.replication.throttled.replicas",
        "follower.replication.throttled.replicas",
        "remote.storage.enable",
        "local.retention.ms",
        "local.retention.bytes",
    }
)
DEFAULT_MAX_BATCH_SIZE = 1_048_588
LIMITS_MAX_AGE_MS = 60_000


class TargetTopics:
    """What is known of the target's topics, and the way to make them fit."""

    def __init__(self, target: Cluster, replication_factor: int, now_ms: Callable[[], int]) -> None:
        self._target = target
        self._replication_factor = replication_factor
        self._now_ms = now_ms
        self._max_batch_size: dict[str, int] = {}
        self._limits_read_at_ms: dict[str, int] = {}
        self._partition_counts: dict[str, int] = {}
        self._one_at_a_time = asyncio.Lock()

    def max_batch_size(self, topic: str) -> int:
        """The target's max.message.bytes for a topic, or Kafka's default while it is not known."""
        return self._max_batch_size.get(topic, DEFAULT_MAX_BATCH_SIZE)

    def has_partition(self, topic: str, partition: int) -> bool:
        return partition < self._partition_counts.get(topic, 0)

    async def ensure(self, source: Cluster, topics: list[tuple[TopicMetadata, str]]) -> None:
        """Makes sure that the target has each (source topic, target name), as wide as the source's.

        One topic that the target refuses is logged and left out; the others go on.
        """
        async with self._one_at_a_time:
            names = sorted({name for _, name in topics})
            # The topics are looked up each time: one that was deleted on the target is made again.
            view = await self._target.metadata(names, max_age_ms=0)
            for name in names:
                known = view.topics.get(name)
                self._partition_counts[name] = len(known.partitions) if known else 0
            for topic, name in topics:
                try:
                    await self._ensure_one(source, topic, name)
                except KafkaError as error:
                    log.warning("the target has not taken the topic", topic=name, error=str(error))

    async def _ensure_one(self, source: Cluster, topic: TopicMetadata, name: str) -> None:
        wanted, there = len(topic.partitions), self._partition_counts[name]
        if there == 0:
            configs = await describe_configs(source, topic.name, only_set=True)
            carried = {
                key: value
                for key, value in configs.items()
                if value is not None and key not in TARGET_OWN_CONFIGS
            }
            try:
                await create_topic(self._target, name, wanted, self._replication_factor, carried)
                log.info("topic created", topic=name, partitions=wanted, like=f"{source.name}/{topic.name}")
                self._partition_counts[name] = wanted
            except TopicAlreadyExists:
                # Another worker or another source was first; how wide is seen at the next look.
                view = await self._target.metadata([name], max_age_ms=0)
                known = view.topics.get(name)
                self._partition_counts[name] = len(known.partitions) if known else 0
        elif there < wanted:
            try:
                await create_partitions(self._target, name, wanted)
            except InvalidPartitions:
                log.debug("another worker was first", topic=name)
            self._partition_counts[name] = wanted
        await self._read_limits(name)

    async def _read_limits(self, name: str) -> None:
        now_ms = self._now_ms()
        if now_ms - self._limits_read_at_ms.get(name, -LIMITS_MAX_AGE_MS) < LIMITS_MAX_AGE_MS:
            return
        configs = await describe_configs(self._target, name)
        limit = configs.get("max.message.bytes")
        if limit is not None:
            self._max_batch_size[name] = int(limit)
        self._limits_read_at_ms[name] = now_ms
