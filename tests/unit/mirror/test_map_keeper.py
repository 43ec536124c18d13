"""Upkeep of the offset map forgets only what its own target partition no longer has."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position
from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.offsets import map_keeper
from millrace.mirror.offsets.offset_map import Chunk, Runs, decode_chunk, decode_key
from millrace.mirror.offsets.translation import PartitionMap
from millrace.mirror.topics.own_topics import OFFSET_MAP
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from millrace.mirror.worker import Worker

LGA = SourcePartition("lga", "flights", 0)
# Of ewr, whose retention has moved its log on; and of lga.
OLD, OWN = TargetPartition("flights", 0), TargetPartition("flights", 4)


def config(*, lga: bool) -> MirrorConfig:
    sources: list[dict[str, Any]] = [
        {"cluster": "ewr", "bootstrap": ["a:1"], "topics": {"include": ["flights"]}}
    ]
    if lga:
        more = {"cluster": "lga", "bootstrap": ["c:1"], "topics": {"include": ["flights"]}}
        sources.append(more | {"partition_offset": 4})
    return parse_config(
        {
            "name": "m",
            "delivery": "at_least_once",
            "target": {"cluster": "agg", "bootstrap": ["b:1"]},
            "sources": sources,
        }
    )


class Agg:
    """The target: OLD begins at 5,000,000, and OWN at `own_start`. Also what stands for its readers."""

    name = "agg"

    def __init__(self) -> None:
        self.own_start = 0
        self.positions = Positions()
        self.map_of_lga = PartitionMap()
        self.forgotten: list[int] = []

    async def metadata(self, topics: list[str], **_: object) -> Any:
        topic = SimpleNamespace(partitions=range(8))
        return SimpleNamespace(topics=dict.fromkeys(topics, topic), leader=lambda *_: 1)

    async def list_offsets(self, asked: dict[tuple[str, int], int]) -> Any:
        starts = {OLD: 5_000_000, OWN: self.own_start}
        return {key: SimpleNamespace(offset=starts[TargetPartition(*key)]) for key in asked}

    def close_purpose(self, _: str) -> None: ...

    def reader(self, *_: object, **__: object) -> Any:
        """As `MapReader`: all of the map is in its first partition."""

        async def refresh_positions() -> None: ...

        async def refresh_map_partition(number: int) -> int:
            made.maps = {LGA: self.map_of_lga} if number == 0 else {}
            return OFFSET_MAP.partitions

        made = SimpleNamespace(
            positions=self.positions,
            refresh_positions=refresh_positions,
            refresh_map_partition=refresh_map_partition,
        )
        return made

    async def write(self, _topic: str, records: list[tuple[bytes, bytes | None]], **_: object) -> None:
        for raw, value in records:
            key = decode_key(raw)
            assert key is not None and value is None
            self.forgotten.append(key.from_offset)


def chunks(target: TargetPartition | None) -> list[Chunk]:
    """Three assignments of 1,000 records each."""
    found = []
    for first in (0, 1_000, 2_000):
        runs = Runs(LGA, first, 1 + first, target=target)
        runs.add(range(first, first + 1_000), first)
        for raw, value in runs.take_until(first + 1_000):
            key = decode_key(raw)
            assert key is not None
            found.append(decode_chunk(key, value))
    return found


@pytest.mark.parametrize("is_told", [True, False])
def test_source_that_a_reload_has_brought_keeps_its_map(
    monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Where its records go is its partition offset's word, which came with it."""
    agg: Any = Agg()
    monkeypatch.setattr(map_keeper, "MapReader", agg.reader)
    for chunk in chunks(OWN if is_told else None):
        agg.map_of_lga.put(chunk)

    async def story() -> None:
        ewr: Any = SimpleNamespace(name="ewr")
        worker = Worker(config(lga=False), agg, {"ewr": ewr}, lambda: 1_000)
        keeper = worker._map_keeper
        keeper._write = agg.write
        await keeper.keep()
        assert agg.forgotten == [], "of a source that the config lacks nobody knows it, but its chunks"
        worker.take_config(config(lga=True))
        await keeper.keep()
        assert agg.forgotten == []
        agg.own_start = 2_000
        await keeper.keep()
        assert agg.forgotten == [0, 1_000]

    asyncio.run(story())


def test_chunks_that_do_not_say_where_they_went_go_by_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says it of a source that the config lacks by now."""
    agg: Any = Agg()
    monkeypatch.setattr(map_keeper, "MapReader", agg.reader)
    for chunk in chunks(None):
        agg.map_of_lga.put(chunk)
    agg.positions.known[LGA] = Position(3_000, "c", NO_TOPIC_ID, 0, 1, targets=(OWN, OLD))
    keeper = map_keeper.MapKeeper(agg, agg.write, lambda: True, lambda: (config(lga=False), {}))
    asyncio.run(keeper.keep())
    assert agg.forgotten == []
    agg.own_start = 1_000
    asyncio.run(keeper.keep())
    assert agg.forgotten == [0]
