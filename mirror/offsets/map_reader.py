"""What a mirror has written about itself on its target: positions and the offset map, kept up to date.

Called by `translate`, `group_sync` and `map_keeper`. Positions are read first and the map after them, each as
far as it goes: below a position that is known here the map is then whole.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol.records import Record
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.delivery.topic_tail import TopicTail
from millrace.mirror.offsets.offset_map import decode_chunk, decode_key, map_partition
from millrace.mirror.offsets.translation import PartitionMap
from millrace.mirror.topics.own_topics import OFFSET_MAP, POSITIONS
from millrace.mirror.topics.routes import SourcePartition

log = structlog.get_logger("millrace.mirror.offsets.map_reader")


class MapReader:
    """See the module's text."""

    def __init__(self, target: Cluster, mirror: str, *, purpose: str = "offset map") -> None:
        self.positions = Positions()
        self.maps: dict[SourcePartition, PartitionMap] = {}
        self._topics: Collection[tuple[str, str]] | None = None
        self._positions_tail = TopicTail(
            target, POSITIONS.of(mirror), self._take_position, self._forget_positions, purpose
        )
        self._map_tail = TopicTail(target, OFFSET_MAP.of(mirror), self._take_chunk, self._forget_map, purpose)

    async def refresh_positions(self) -> None:
        """Reads the positions that are new. Raises the target's errors; a topic that does not exist (yet)
        leaves everything empty."""
        await self._positions_tail.advance()

    async def refresh_map(self, topics: Collection[tuple[str, str]] | None = None) -> None:
        """Reads what is new in the map, or only what is about these (source, topic): the same at each call.
        Raises the target's errors."""
        self._topics = topics
        numbers = None
        if topics is not None:
            places = (SourcePartition(source, topic, 0) for source, topic in topics)
            numbers = {map_partition(place, OFFSET_MAP.partitions) for place in places}
        await self._map_tail.advance(numbers)

    async def refresh_map_partition(self, number: int) -> int:
        """Reads one partition of the map; how many there are."""
        return await self._map_tail.advance([number])

    def _take_position(self, record: Record) -> None:
        self.positions.apply(record.key, record.value)

    def _forget_positions(self) -> None:
        self.positions = Positions()

    def _take_chunk(self, record: Record) -> None:
        key = decode_key(record.key)
        if key is None:
            return
        if self._topics is not None and (key.partition.source, key.partition.topic) not in self._topics:
            return
        map_of = self.maps.get(key.partition)
        if map_of is None:
            map_of = self.maps[key.partition] = PartitionMap()
        if record.value is None:
            map_of.remove(key)
            return
        try:
            map_of.put(decode_chunk(key, record.value))
        except UnreadableRecord as error:
            map_of.put_unreadable(key)
            log.warning("a record of the offset map cannot be read", of=str(key.partition), error=str(error))

    def _forget_map(self) -> None:
        self.maps.clear()
