"""Positions as whoever takes over reads them, and in what order they get on record."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.config import parse_config
from millrace.mirror.delivery.at_least_once import AtLeastOnce
from millrace.mirror.delivery.checkpoints import Position, Positions, encode_records
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.offsets.offset_map import offsets_topic
from millrace.mirror.topics.routes import SourcePartition, positions_topic
from tests.unit.client.test_read_to_end import Topic
from tests.unit.mirror.test_pipeline_gaps import ORIGIN, answer, batch, started

CONFIG = parse_config(
    {
        "name": "aggregate",
        "delivery": "at_least_once",
        "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
        "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
    }
)
WHERE = SourcePartition("ewr", "flights", 0)


def at(next_offset: int) -> Position:
    return Position(next_offset, ORIGIN.cluster_id, ORIGIN.topic_id, 0, 0)


def on_record(offset: int, next_offset: int) -> bytes:
    rows = encode_records([(WHERE, at(next_offset))])
    return bytes(build_batch([Record(key, value) for key, value in rows], base_offset=offset))


def test_positions_of_an_open_transaction_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be about to be committed: who went on at the position before it would carry it all again."""
    topic = Topic({0: on_record(0, 10), 1: on_record(1, 20)}, 0, 2, positions_topic(CONFIG.name))
    topic.stable_ends = [1, 1, 1, 1, 2]

    async def read() -> Positions:
        async with topic.serve() as target:
            keeper = PositionsKeeper(CONFIG, target)

            async def made() -> None:
                """The topics are there."""

            monkeypatch.setattr(keeper, "make_topics", made)
            return await keeper.read()

    assert asyncio.run(read()).known == {WHERE: at(20)}


def test_at_least_once_the_offset_map_is_on_record_before_the_position() -> None:
    """Below a position an offset without a run was never carried: so the map must not be behind."""
    written: list[str] = []

    async def write(topic: str, _records: object, **_: object) -> None:
        written.append(topic)

    async def story() -> None:
        pipeline, target, _ = started()
        pipeline.accept(answer(batch(0, [5] * 10), end=10))
        target.acknowledge()
        async with Cluster("agg", ["127.0.0.1:1"]) as agg:
            system: Any = SimpleNamespace(write=write)
            delivery = AtLeastOnce(CONFIG, agg, PositionsKeeper(CONFIG, agg), system, lambda: 0)
            await delivery.settle([pipeline])

    asyncio.run(story())
    assert written == [offsets_topic(CONFIG.name), positions_topic(CONFIG.name)]
