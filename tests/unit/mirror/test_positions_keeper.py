"""Positions as whoever takes over reads them, and in what order they get on record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import OffsetOutOfRange
from millrace.broker.protocol.mirror_positions import LOST, Position
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.config import parse_config
from millrace.mirror.delivery import positions_keeper
from millrace.mirror.delivery.at_least_once import AtLeastOnce
from millrace.mirror.delivery.checkpoints import Positions, encode_key, encode_records
from millrace.mirror.delivery.positions_keeper import BARRIER, PositionsKeeper
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.topics.internal_topics import why_internal
from millrace.mirror.topics.own_topics import OFFSET_MAP, OWN_TOPICS, POSITIONS, OwnTopic
from millrace.mirror.topics.routes import SourcePartition
from tests.unit.client.test_read_to_end import Topic
from tests.unit.mirror.pipeline_stage import ORIGIN, answer, batch, started

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


class Writing:
    """`SystemRecords` over a topic written out by hand; `ends` are the offsets behind what is written."""

    def __init__(self, *ends: int) -> None:
        self.ends = list(ends)
        self.written: list[tuple[str, object]] = []
        self.refused: dict[str, str] = {}

    async def write(self, topic: str, records: object, **_: object) -> int:
        self.written.append((topic, records))
        return self.ends.pop(0)


def on_record(offset: int, next_offset: int) -> bytes:
    rows = encode_records([(WHERE, at(next_offset))])
    return bytes(build_batch([Record(key, value) for key, value in rows], base_offset=offset))


def test_positions_of_an_open_transaction_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be about to be committed: who went on at the position before it would carry it all again."""
    topic = Topic({0: on_record(0, 10), 1: on_record(1, 20)}, 0, 2, POSITIONS.of(CONFIG.name))
    topic.stable_ends = [1, 1, 1, 1, 2]
    assert read_from(topic, Writing(2), monkeypatch).known == {WHERE: at(20)}


def test_end_that_a_replaced_leader_tells_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know of what was written since, and answers as before. Who went on at a position before
    the newest one would carry the same records again."""
    topic = Topic({0: on_record(0, 10), 1: on_record(1, 20)}, 0, 1, POSITIONS.of(CONFIG.name))
    topic.grown_end = 3
    topic.batches[2] = bytes(build_batch([Record(*BARRIER)], base_offset=2))
    writing = Writing(3)
    assert read_from(topic, writing, monkeypatch) == Positions({WHERE: at(20)})
    assert writing.written == [(topic.name, [BARRIER])]


def test_barrier_that_is_lost_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it may have gone what stood before it: an election that was not clean."""
    monkeypatch.setattr(positions_keeper, "READ_PAUSE_S", 0)
    topic = Topic({0: on_record(0, 10), 1: on_record(1, 20)}, 0, 2, POSITIONS.of(CONFIG.name))
    topic.errors = [OffsetOutOfRange.code]
    writing = Writing(3, 2)
    assert read_from(topic, writing, monkeypatch) == Positions({WHERE: at(20)})
    assert len(writing.written) == 2


def read_from(topic: Topic, writing: Writing, monkeypatch: pytest.MonkeyPatch) -> Positions:
    async def read() -> Positions:
        async with topic.serve() as target:
            keeper = PositionsKeeper(CONFIG, target, cast(SystemRecords, writing))

            async def made() -> None:
                """The topics are there."""

            monkeypatch.setattr(keeper, "make_topics", made)
            return await keeper.read()

    return asyncio.run(read())


def test_of_a_key_that_was_written_often_the_newest_record_alone_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are read at every assignment, while partitions wait."""
    others = [SourcePartition("ewr", "flights", number) for number in (1, 2)]
    gone, unreadable = (encode_key(each) for each in others)
    rows = [row for number in range(500) for row in encode_records([(WHERE, at(number))])]
    rows[100:100] = [(gone, b"{}"), (unreadable, None)]
    rows += [(unreadable, LOST), (gone, None), (None, b"of another kind"), *encode_records([(WHERE, at(7))])]
    decoded: list[bytes | None] = []
    apply = Positions.apply

    def applied(self: Positions, key: bytes | None, value: bytes | None) -> None:
        decoded.append(key)
        apply(self, key, value)

    async def read(*_: object, **__: object) -> AsyncIterator[Any]:
        for key, value in rows:
            yield SimpleNamespace(key=key, value=value)

    async def made() -> None:
        """The topics are there."""

    async def story() -> Positions:
        async with Cluster("agg", ["127.0.0.1:1"]) as agg:
            keeper = PositionsKeeper(CONFIG, agg, cast(SystemRecords, Writing(1)))
            monkeypatch.setattr(keeper, "make_topics", made)
            return await keeper.read()

    monkeypatch.setattr(positions_keeper, "read_topic_to_end", read)
    monkeypatch.setattr(Positions, "apply", applied)
    found = asyncio.run(story())
    expected = Positions()
    for key, value in rows:
        apply(expected, key, value)
    assert found == expected == Positions({WHERE: at(7)}, set(others))
    assert len(decoded) == 4


@pytest.mark.parametrize("topic", OWN_TOPICS)
def test_topics_that_are_read_as_tables_are_compacted_early(topic: OwnTopic) -> None:
    """By a cluster's defaults a reader of the positions goes through a gigabyte that says one thing."""
    assert topic.configs["cleanup.policy"] == "compact"
    assert int(topic.configs["segment.bytes"]) <= 32 << 20
    assert float(topic.configs["min.cleanable.dirty.ratio"]) <= 0.1


def test_own_topics_have_their_names_for_good_and_are_never_carried() -> None:
    """What is on record under another name would be lost; no mirror may go by another's records."""
    names = {topic.of("m") for topic in OWN_TOPICS}
    assert names == {f"millrace.{kind}.m" for kind in ("positions", "starts", "routes", "control", "offsets")}
    assert [name for name in names if why_internal(name) is None] == []
    assert why_internal("millrace.audit") is None, "what the audit is told goes to the aggregate"


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
            delivery = AtLeastOnce(CONFIG, agg, PositionsKeeper(CONFIG, agg, system), system, lambda: 0)
            await delivery.settle([pipeline])

    asyncio.run(story())
    assert written == [OFFSET_MAP.of(CONFIG.name), POSITIONS.of(CONFIG.name)]
