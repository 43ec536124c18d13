"""The offset map's chunks have an order, that of the assignments that wrote them, also where the clock of the
next owner is behind the last one's."""

from __future__ import annotations

import asyncio

from millrace.broker.protocol.mirror_positions import Position, decode_value, encode_value
from millrace.mirror.delivery.beginnings import Start
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.offsets.map_upkeep import plan_upkeep
from millrace.mirror.offsets.offset_map import decode_chunk, decode_key
from millrace.mirror.offsets.translation import Answer, PartitionMap, Translation
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.pipeline_stage import Around, Target, answer, batch, pipeline_of
from tests.unit.mirror.source_stage import OLD, Source, logs_of

HOUR_MS = 3_600_000
EWR = SourcePartition("ewr", "t", 0)


class Owner:
    """A worker that carries the partition for a while, by a clock of its own; what it writes into the map and
    as the position."""

    def __init__(self, map_of: dict[bytes, bytes], now_ms: int) -> None:
        self.map_of = map_of
        self.target, self.around = Target(), Around(GapClass.TRUNCATED)
        self.around.now = now_ms
        self.pipeline = pipeline_of(EWR, TargetPartition("t", 0), self.target, self.around)

    async def begin(self, position: Position) -> None:
        recorded = decode_value(encode_value(position))
        await logs_of(Source(OLD)).begin(self.pipeline, recorded, is_lost=False, start=Start("earliest"))
        assert self.pipeline.progress.fetch_offset == position.next_offset

    def carry(self, source: int, target: int, count: int = 1) -> None:
        self.pipeline.accept(answer(batch(source, [9] * count), end=1 << 30))
        outgoing = self.target.queue.pop(0)
        self.pipeline.delivered(outgoing, target, self.around.now, 0)

    def write(self) -> Position:
        position = self.pipeline.position_to_write(self.around.now)
        assert position is not None
        self.map_of |= dict(self.pipeline.runs.take_until(position.next_offset))
        self.pipeline.position_written(position)
        return position

    async def log_is_cut(self, at: int) -> None:
        end = self.pipeline.progress.fetch_offset
        self.pipeline.at_gap(GapClass.TRUNCATED, end, "another history", first=at, resume_at=at)
        await self.around.rest()


def table(map_of: dict[bytes, bytes]) -> PartitionMap:
    made = PartitionMap()
    for key, value in map_of.items():
        named = decode_key(key)
        assert named is not None
        made.put(decode_chunk(named, value))
    return made


START = Position(0, "c", OLD, 0, 0, began=0)


def test_a_cut_makes_nothing_void_of_what_a_later_owner_carries() -> None:
    async def story() -> None:
        map_of: dict[bytes, bytes] = {}
        ahead = Owner(map_of, now_ms=10 * HOUR_MS)
        await ahead.begin(START)
        ahead.carry(0, target=0, count=10)
        ahead.write()
        await ahead.log_is_cut(at=5)
        position = ahead.write()

        later = Owner(map_of, now_ms=9 * HOUR_MS)
        await later.begin(position)
        later.carry(5, target=10, count=5)
        position = later.write()
        last = Owner(map_of, now_ms=8 * HOUR_MS)
        await last.begin(position)
        last.carry(10, target=15, count=5)
        last.write()
        found = [table(map_of).translate(offset, 15, OLD) for offset in (0, 6, 11, 15)]
        assert found == [Translation(Answer.EXACT, target) for target in (0, 11, 16, 20)]

    asyncio.run(story())


def test_a_chunk_that_its_owner_writes_again_is_joined_with_no_other() -> None:
    """Upkeep reads the map, then the owner writes more under the same key, then upkeep's batch arrives."""

    async def story() -> None:
        map_of: dict[bytes, bytes] = {}
        ahead = Owner(map_of, now_ms=10 * HOUR_MS)
        await ahead.begin(START)
        ahead.carry(0, target=0)
        position = ahead.write()

        later = Owner(map_of, now_ms=9 * HOUR_MS)
        await later.begin(position)
        places = {0: 0}

        def carry_one() -> None:
            source = len(places)
            places[source] = 1_000 * source
            later.carry(source, target=places[source])
            later.write()

        while len(map_of) < 45 or len(next(reversed(map_of.values()))) < 200:
            carry_one()
        batches = plan_upkeep(list(table(map_of).chunks.values()), {None: -1})
        assert batches, "there is something to join"
        count = len(map_of)
        while len(map_of) == count:  # until that chunk is full, and never written again
            carry_one()
        for key, value in (record for each in batches for record in each):
            map_of.pop(key, None)
            if value is not None:
                map_of[key] = value
        whole = table(map_of)
        for source, target in places.items():
            assert whole.translate(source, len(places), OLD) == Translation(Answer.EXACT, target)

    asyncio.run(story())
