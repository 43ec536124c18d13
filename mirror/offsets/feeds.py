"""Which source partitions have records in a target partition: by what is on record. Pure.

Called by `translate` and `map_keeper`. Where records went was the config's word then: names and partition
offsets change, and sources leave it. So positions and the map's chunks say it themselves, and what older
programs wrote without it is taken for what it may be: of a source in the config for what that says now, of
any other for a possible feeder of every target.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.offsets.offset_map import Chunk
from millrace.mirror.offsets.translation import Scope
from millrace.mirror.topics.routes import SourcePartition, TargetPartition, TopicSelector


class Feeds:
    """See the module's text."""

    def __init__(self, config: MirrorConfig) -> None:
        self._naming = config.naming_rule
        self._selectors = {
            each.cluster: TopicSelector(each.topics.include, each.topics.exclude) for each in config.sources
        }

    def selects(self, source: str, topic: str) -> bool:
        """Whether the mirror carries the topic, by its config."""
        return source in self._selectors and self._selectors[source].selects(topic)

    def target_now(self, partition: SourcePartition) -> TargetPartition | None:
        """By the config; None for a source that it lacks, whatever the names of others are."""
        return self._naming.target_partition(*partition) if partition.source in self._selectors else None

    def feeds_now(self, partition: SourcePartition, target: TargetPartition) -> bool:
        return self.target_now(partition) == target and self.selects(partition.source, partition.topic)

    def untold(self, partition: SourcePartition, positions: Positions) -> TargetPartition | None:
        """Where chunks went that do not say it; None: nobody knows. They are older than all that do."""
        position = positions.known.get(partition)
        if position is not None and position.targets:
            return TargetPartition(*position.targets[0])
        return self.target_now(partition)

    def scope(self, partition: SourcePartition, target: TargetPartition, positions: Positions) -> Scope:
        """What the map's chunks of `partition` have to be of, to say something of `target`."""
        return Scope(target, self.untold(partition, positions))

    def candidates(
        self, targets: Iterable[TargetPartition], positions: Positions
    ) -> dict[TargetPartition, set[SourcePartition]]:
        """What may have records in each of these; of some `has_left` says that they are gone."""
        found: dict[TargetPartition, set[SourcePartition]] = {target: set() for target in targets}
        for partition in {*positions.known, *positions.unreadable}:
            position = positions.known.get(partition)
            told = position.targets if position is not None else ()
            now = self.target_now(partition)
            if now is None and not told:
                went_to: Collection[TopicPartition] = list(found)
            else:
                went_to = [*told, now] if now is not None else told
            for each in went_to:
                if (target := TargetPartition(*each)) in found:
                    found[target].add(partition)
        return found


def has_left(chunks: Iterable[Chunk], scope: Scope, log_start: int) -> bool:
    """Whether of all that these chunks say nothing is at the target any more, whose log begins at
    `log_start`."""
    return all(
        scope.is_elsewhere(chunk)
        or not chunk.head.run_count
        or (chunk.target_end <= log_start and not chunk.head.last_unknown)
        for chunk in chunks
    )
