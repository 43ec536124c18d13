"""What translation looks at, without servers: clusters with logs, and what a mirror has written of itself."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from millrace.broker.client.offsets import EARLIEST
from millrace.broker.errors import LeaderNotAvailable
from millrace.broker.protocol.mirror_positions import Position, encode_value
from millrace.mirror.delivery.checkpoints import Positions, encode_key
from millrace.mirror.offsets.offset_map import Runs, decode_chunk, decode_key
from millrace.mirror.offsets.translation import PartitionMap
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

ID = UUID(int=7)
FAR = 5_000


class Clusters:
    """Source and target at once: every topic has the id ID, but for `topic_ids`, and logs from `begins` (0)
    to `ends` (FAR)."""

    def __init__(self, name: str = "any") -> None:
        self.name = name
        self.begins: dict[tuple[str, int], int] = {}
        self.ends: dict[tuple[str, int], int] = {}
        self.leaderless: set[tuple[str, int]] = set()
        self.topic_ids: dict[str, UUID] = {}

    async def metadata(self, topics: Collection[str], **_: object) -> Any:
        found = {
            topic: SimpleNamespace(topic_id=self.topic_ids.get(topic, ID), partitions=range(9))
            for topic in topics
        }
        return SimpleNamespace(topics=found, leader=self._leader)

    def _leader(self, *key: Any) -> int | None:
        return None if key in self.leaderless else 1

    async def list_offsets(self, asked: dict[tuple[str, int], int], *_: object, **__: object) -> Any:
        if self.leaderless & asked.keys():
            raise LeaderNotAvailable("after all the tries that there are")
        return {
            key: SimpleNamespace(
                offset=self.begins.get(key, 0) if at == EARLIEST else self.ends.get(key, FAR)
            )
            for key, at in asked.items()
        }


class OnRecord:
    """What the mirror has written about itself, as `MapReader` gives it."""

    def __init__(self) -> None:
        self.positions = Positions()
        self.maps: dict[SourcePartition, PartitionMap] = {}
        self._began_ms = 0
        self.asked_of: set[tuple[str, str]] | None = None

    async def refresh_positions(self) -> None: ...

    async def refresh_map(self, topics: set[tuple[str, str]] | None = None) -> None:
        self.asked_of = topics

    def position(
        self, partition: SourcePartition, offset: int, *targets: TargetPartition, began: int = 0
    ) -> None:
        value = encode_value(Position(offset, "c", ID, 0, 1, began=began, targets=targets))
        self.positions.apply(encode_key(partition), value)

    def carried(
        self, partition: SourcePartition, offsets: range, to: TargetPartition | None, target_offset: int
    ) -> None:
        """By an assignment of its own; `to` is what the map says of where."""
        self._began_ms += 1
        runs = Runs(partition, offsets.start, self._began_ms, ID, to)
        runs.add(offsets, target_offset)
        self.write(runs, offsets.stop)

    def write(self, runs: Runs, position: int) -> None:
        """What an assignment has to put on record below a position."""
        for raw, value in runs.take_until(position):
            key = decode_key(raw)
            assert key is not None
            self.maps.setdefault(key.partition, PartitionMap()).put(decode_chunk(key, value))
