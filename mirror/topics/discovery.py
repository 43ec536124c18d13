"""What is to be carried, as far as it is known: topics of the sources that are selected, that the guard of
routes lets in, and that the target has a place for.

Held by `worker`, which hears of each look at a source (`looked`) and shares out what is found (`partitions`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from millrace.mirror.config import MirrorConfig
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.topics.route_guard import RouteGuard
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from millrace.mirror.topics.topics import TargetTopics, WantedTopic


class Discovery:
    """See the module's text."""

    def __init__(self, config: MirrorConfig, guard: RouteGuard, topics: TargetTopics) -> None:
        self.guard = guard
        self.topics = topics
        self._naming = config.naming_rule
        # Sources of which it is known what is to be carried and what the target has a place for.
        self._looked_at: set[str] = set()

    def take_config(self, config: MirrorConfig) -> None:
        """Settings that may change while the worker runs."""
        self.guard.config = self.topics.config = config
        self._naming = config.naming_rule

    async def looked(self, reader: SourceReader, leads: Callable[[], bool]) -> None:
        """There is a new look at a source: its topics are let in or refused, and the target gets what it
        lacks for them; from who `leads` the group their settings too. Raises the clusters' failures."""
        if reader.view is None:
            return
        names = [topic.name for topic in reader.selected_topics()]
        await self.guard.admit(reader.cluster, reader.view, names)
        wanted = self._wanted(reader)
        await self.topics.ensure(reader.cluster, wanted)
        self._looked_at.add(reader.name)
        if leads():
            await self.topics.sync_configs(reader.cluster, wanted)

    def forget(self, source: str) -> None:
        """A source that is carried no more."""
        self._looked_at.discard(source)
        self.guard.forget(source)

    def unseen(self, sources: Collection[str]) -> set[str]:
        """Those of which nothing is known yet."""
        return set(sources) - self._looked_at

    def partitions(self, readers: Mapping[str, SourceReader]) -> set[SourcePartition]:
        """Every source partition that is to be carried and that the target has a place for."""
        return {
            partition
            for reader in readers.values()
            for topic in reader.selected_topics()
            if self.guard.is_admitted(reader.name, topic.name)
            for partition in (SourcePartition(reader.name, topic.name, number) for number in topic.partitions)
            if self.topics.has_partition(self.target_of(partition))
        }

    def target_of(self, partition: SourcePartition) -> TargetPartition:
        return self._naming.target_partition(*partition)

    def _wanted(self, reader: SourceReader) -> list[WantedTopic]:
        return [
            WantedTopic(
                topic,
                self._naming.target_topic(reader.name, topic.name),
                self._naming.partition_offset(reader.name, topic.name),
            )
            for topic in reader.selected_topics()
            if self.guard.is_admitted(reader.name, topic.name)
        ]
