"""Target topics: created like the source's, widened with it, kept in step with its settings; and the limits
that the target sets.

Called by `discovery` after every look at a source, and by `pipeline` for the limits. Several workers may do
the same at once: a topic that exists by now is what was wanted. Partitions are only ever added; when sources
merge into one topic, the widest counts. Only settings that differ are written (`topic_configs` has the rule).

Invariant: one topic that the target refuses, wholly or in a setting, holds up no other. What it refuses is
logged once and tried again at every look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from millrace.broker.client.admin import (
    ConfigValue,
    alter_configs,
    create_partitions,
    create_topic,
    describe_topics_configs,
)
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import TopicMetadata
from millrace.broker.errors import (
    InvalidConfig,
    InvalidPartitions,
    KafkaError,
    PolicyViolation,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.topics.routes import Feed, TargetPartition, uneven_feeds
from millrace.mirror.topics.topic_configs import (
    deciding_source,
    differences,
    follows_its_source,
    settings_to_begin_with,
)
from millrace.mirror.troubles import Failures

log = structlog.get_logger("millrace.mirror.topics.topics")

# The largest size that a batch can say; no target takes more.
NO_LIMIT = (1 << 31) - 1
LIMITS_MAX_AGE_MS = 60_000
LIMITS_PAUSE_S = 0.2
LIMIT_KEY = "max.message.bytes"
# What a target says to a setting that it does not know, or that its administrators allow nobody.
REFUSED_SETTINGS = (InvalidConfig, PolicyViolation)
# Without it a compacted topic would become one whose records expire: then rather none.
KEPT_ALWAYS = {"cleanup.policy"}


@dataclass(frozen=True, slots=True)
class WantedTopic:
    """A source topic and its place on the target."""

    topic: TopicMetadata
    target: str
    partition_offset: int = 0

    @property
    def source_width(self) -> int:
        return max(self.topic.partitions, default=-1) + 1

    @property
    def width(self) -> int:
        """How many partitions the target needs for it."""
        return self.partition_offset + self.source_width


class TargetTopics:
    """What is known of the target's topics, and the way to make them fit. `steady_ms`: for how long something
    has been known."""

    def __init__(
        self,
        config: MirrorConfig,
        target: Cluster,
        steady_ms: Callable[[], int],
        now_ms: Callable[[], int],
    ) -> None:
        self._target = target
        self.config = config
        self._steady_ms = steady_ms
        self._now_ms = now_ms
        self._max_batch_size: dict[str, int] = {}
        self._limits_read_at_ms: dict[str, int] = {}
        self._partition_counts: dict[str, int] = {}
        self._feeds: dict[str, dict[str, WantedTopic]] = {}
        self._seen_sources: set[str] = set()
        self._synced_at_ms: dict[str, int] = {}
        self._said: dict[tuple[str, str], str] = {}
        self.failures: Failures[tuple[str, str]] = Failures()  # of topics that the target does not take
        self._one_at_a_time = asyncio.Lock()

    def max_batch_size(self, topic: str) -> int:
        """The target's max.message.bytes for a topic. While that is not known, or may not be asked (any
        more), there is none: the target itself says what is too large, and nothing is given up by a guess."""
        return self._max_batch_size.get(topic, NO_LIMIT)

    def has_partition(self, target: TargetPartition) -> bool:
        return target.partition < self._partition_counts.get(target.topic, 0)

    async def ensure(self, source: Cluster, wanted: Sequence[WantedTopic]) -> None:
        """Makes sure that the target has each topic, as wide as its sources ask for.

        One topic that the target refuses is logged and left out; the others go on. Raises what makes the
        target unreachable.
        """
        self._note_feeds(source.name, wanted)
        if not wanted:
            return
        names = sorted({each.target for each in wanted})
        # The topics are looked up each time: one that was deleted on the target is made again.
        view = await self._target.metadata(names, max_age_ms=0)
        for name in names:
            known = view.topics.get(name)
            self._partition_counts[name] = len(known.partitions) if known else 0
        missing = [each.topic.name for each in wanted if self._partition_counts[each.target] == 0]
        # Not under the lock: a source that answers slowly holds up no other.
        configs = await describe_topics_configs(source, missing) if missing else {}
        async with self._one_at_a_time:
            for each in wanted:
                try:
                    await self._ensure_one(source, each, configs)
                    self._well("topic", each.target)
                    self.failures.over((source.name, each.topic.name))
                except KafkaError as error:
                    reason = f"the target has not taken {each.target}: {error}"
                    self.failures.failed((source.name, each.topic.name), reason, self._now_ms())
                    self._say("topic", each.target, "the target has not taken the topic", str(error))
            await self._read_limits(names)

    async def sync_configs(self, source: Cluster, wanted: Sequence[WantedTopic]) -> None:
        """Brings the settings of the topics in step, when the interval has passed since the last time.

        Topics that another source decides about are left to it. Failures of one topic are logged.
        """
        steady_ms = self._steady_ms()
        last_ms = self._synced_at_ms.get(source.name)
        config = self.config.config_sync
        if not config.enabled or (last_ms is not None and steady_ms - last_ms < config.interval_ms):
            return
        mine = [
            each
            for each in wanted
            if follows_its_source(each.target)
            and self._partition_counts.get(each.target, 0)
            and self._decides(source, each)
        ]
        if mine:
            here = await describe_topics_configs(source, [each.topic.name for each in mine])
            there = await describe_topics_configs(self._target, [each.target for each in mine])
            for each in mine:
                await self._sync_one(each, here.get(each.topic.name), there.get(each.target))
        self._synced_at_ms[source.name] = steady_ms

    async def _ensure_one(
        self, source: Cluster, wanted: WantedTopic, configs: dict[str, dict[str, ConfigValue] | KafkaError]
    ) -> None:
        name, there = wanted.target, self._partition_counts[wanted.target]
        self._warn_of_uneven_feeds(name)
        if there == 0:
            found = configs.get(wanted.topic.name)
            if found is None:
                return  # another source topic of this name on the target was first; seen at the next look
            if isinstance(found, KafkaError):
                # Without the source's settings a compacted topic would be made one that expires.
                raise found
            try:
                settings = settings_to_begin_with(name, found, self.config.config_sync.exclude)
                await self._create(source, wanted, settings)
                self._partition_counts[name] = wanted.width
            except TopicAlreadyExists:
                # Another worker or another source was first; how wide is seen at the next look.
                view = await self._target.metadata([name], max_age_ms=0)
                known = view.topics.get(name)
                self._partition_counts[name] = len(known.partitions) if known else 0
        elif there < wanted.width:
            try:
                await create_partitions(self._target, name, wanted.width)
                log.info("topic widened", topic=name, partitions=wanted.width, before=there)
            except InvalidPartitions:
                log.debug("another worker was first", topic=name)
            self._partition_counts[name] = wanted.width

    async def _create(self, source: Cluster, wanted: WantedTopic, configs: dict[str, str]) -> None:
        factor = self.config.target.replication_factor
        try:
            await create_topic(self._target, wanted.target, wanted.width, factor, configs)
        except REFUSED_SETTINGS as error:
            accepted = await self._accepted_configs(wanted, configs)
            if len(accepted) == len(configs) or KEPT_ALWAYS & (configs.keys() - accepted.keys()):
                raise
            await create_topic(self._target, wanted.target, wanted.width, factor, accepted)
            log.warning(
                "the target does not take all settings of the source",
                topic=wanted.target,
                left_out=",".join(sorted(set(configs) - set(accepted))),
                error=str(error),
            )
        log.info(
            "topic created",
            topic=wanted.target,
            partitions=wanted.width,
            like=f"{source.name}/{wanted.topic.name}",
        )

    async def _accepted_configs(self, wanted: WantedTopic, configs: dict[str, str]) -> dict[str, str]:
        """The settings that the target would take, each tried alone; nothing is created."""
        accepted: dict[str, str] = {}
        factor = self.config.target.replication_factor
        for key, value in configs.items():
            try:
                await create_topic(
                    self._target, wanted.target, wanted.width, factor, {key: value}, validate_only=True
                )
                accepted[key] = value
            except REFUSED_SETTINGS:
                continue
        return accepted

    async def _sync_one(
        self,
        wanted: WantedTopic,
        here: dict[str, ConfigValue] | KafkaError | None,
        there: dict[str, ConfigValue] | KafkaError | None,
    ) -> None:
        for found in (here, there):
            if isinstance(found, UnknownTopicOrPartition) or found is None:
                return  # it went away since the last look
            if isinstance(found, KafkaError):
                self._say("configs", wanted.target, "settings cannot be kept in step", str(found))
                return
        if isinstance(here, dict) and isinstance(there, dict):
            self._note_limit(wanted.target, there)
            changes = differences(here, there, self.config.config_sync.exclude)
            await self._alter(wanted.target, changes)

    async def _alter(self, name: str, changes: dict[str, str | None]) -> None:
        """Writes the changes; when the target refuses them together, each alone."""
        if not changes:
            self._all_well_with_settings(name)
            return
        try:
            await alter_configs(self._target, name, changes)
        except REFUSED_SETTINGS as error:
            if len(changes) > 1:
                for key, value in changes.items():
                    await self._alter(name, {key: value})
                return
            ((key, value),) = changes.items()
            self._say(f"config {key}", name, f"the target does not take {key}={value}", str(error))
            return
        except KafkaError as error:
            self._say("configs", name, "settings cannot be kept in step", str(error))
            return
        self._well("configs", name)
        for key in changes:
            self._well(f"config {key}", name)
        shown = ", ".join(
            f"{key}={value}" if value is not None else f"{key} removed" for key, value in changes.items()
        )
        log.info("settings changed like the source's", topic=name, changes=shown)
        if LIMIT_KEY in changes:
            self._limits_read_at_ms.pop(name, None)

    # --- what feeds what -------------------------------------------------------------------------

    def _note_feeds(self, source: str, wanted: Sequence[WantedTopic]) -> None:
        self._seen_sources.add(source)
        for key, _ in self.failures:
            if key[0] == source and key[1] not in {each.topic.name for each in wanted}:
                self.failures.over(key)
        for feeds in self._feeds.values():
            feeds.pop(source, None)
        for each in wanted:
            self._feeds.setdefault(each.target, {}).setdefault(source, each)

    def _decides(self, source: Cluster, wanted: WantedTopic) -> bool:
        feeds = self._feeds.get(wanted.target, {})
        order = [each.cluster for each in self.config.sources]
        return feeds.get(source.name) is wanted and source.name == deciding_source(
            feeds, order, self._seen_sources
        )

    def _warn_of_uneven_feeds(self, name: str) -> None:
        if self.config.partition_counts is not None:
            return
        feeds = [
            Feed(source, each.topic.name, each.source_width, each.partition_offset)
            for source, each in self._feeds.get(name, {}).items()
            if self.config.source(source) is not None
        ]
        sentence = uneven_feeds(name, feeds)
        if sentence is None:
            self._well("uneven", name)
        else:
            self._say("uneven", name, "sources have different numbers of partitions", sentence)

    # --- limits ----------------------------------------------------------------------------------

    async def refresh_limits(self, topic: str) -> None:
        """Returns when `max_batch_size` is what the target says now, however long that takes."""
        while True:
            self._limits_read_at_ms.pop(topic, None)
            try:
                await self._read_limits([topic])
                return
            except CLUSTER_FAILURES as error:
                log.warning("cannot read the target's limits yet", topic=topic, error=str(error))
                await asyncio.sleep(LIMITS_PAUSE_S)

    async def _read_limits(self, names: Sequence[str]) -> None:
        steady_ms = self._steady_ms()
        old = [
            name
            for name in names
            if self._partition_counts.get(name, 0)
            and steady_ms - self._limits_read_at_ms.get(name, -LIMITS_MAX_AGE_MS) >= LIMITS_MAX_AGE_MS
        ]
        if not old:
            return
        for name, found in (await describe_topics_configs(self._target, old, [LIMIT_KEY])).items():
            if isinstance(found, dict):
                self._note_limit(name, found)
            else:
                self._max_batch_size.pop(name, None)  # it may have been raised since
                self._say("limit", name, "the target's limits cannot be read", str(found))

    def _note_limit(self, name: str, configs: dict[str, ConfigValue]) -> None:
        self._well("limit", name)
        limit = configs.get(LIMIT_KEY)
        if limit is not None and limit.value is not None:
            self._max_batch_size[name] = int(limit.value)
        else:
            self._max_batch_size.pop(name, None)
        self._limits_read_at_ms[name] = self._steady_ms()

    # --- saying things once ----------------------------------------------------------------------

    def _say(self, about: str, name: str, event: str, reason: str) -> None:
        if self._said.get((about, name)) != reason:
            self._said[about, name] = reason
            log.warning(event, topic=name, reason=reason)

    def _well(self, about: str, name: str) -> None:
        self._said.pop((about, name), None)

    def _all_well_with_settings(self, name: str) -> None:
        for about, of in list(self._said):
            if of == name and about.startswith("config"):
                self._well(about, name)
