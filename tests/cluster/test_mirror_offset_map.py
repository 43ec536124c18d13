"""The offset map on real clusters: what the upkeep joins and forgets there, and who reads it meanwhile."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from confluent_kafka import Producer

from millrace.broker.client.admin import create_topic, delete_topic
from millrace.broker.errors import FatalError
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.config import parse_config
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.offsets import map_upkeep
from millrace.mirror.offsets.map_keeper import MapKeeper
from millrace.mirror.offsets.map_reader import MapReader
from millrace.mirror.offsets.offset_map import Runs, map_partition
from millrace.mirror.offsets.translation import Answer, Translation
from millrace.mirror.topics.own_topics import OFFSET_MAP
from millrace.mirror.topics.routes import SourcePartition
from tests.cluster.mirror_process import send, until
from tests.pairs import Pair, in_pairs
from tests.record_deletion import delete_records

TOPIC_ID = UUID(int=1)
TRANSACTIONS, RECORDS = 900, 3


@in_pairs("kafka-millrace", "millrace-kafka")
def test_upkeep_leaves_every_translation_as_it_was(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_upkeep, "WORTH_JOINING", 3)
    asyncio.run(upkeep(pair))


async def upkeep(pair: Pair) -> None:
    mirror, topic = pair.unique("mirror"), pair.unique("kept")
    partition = SourcePartition("ewr", topic, 0)
    async with pair.target.cluster() as target:
        await create_topic(target, topic, 1, 1)
        for _ in range(4):
            batch = build_batch([Record(None, b"x", timestamp_ms=1) for _ in range(1_000)])
            await send(target, topic, 0, batch)
        system = SystemRecords(target, lambda: 1, 1)
        config = parse_config(
            {
                "name": mirror,
                "target": {"cluster": "agg", "bootstrap": ["agg:1"]},
                "sources": [{"cluster": "ewr", "bootstrap": ["ewr:1"], "topics": {"include": [topic]}}],
            }
        )
        keeper = MapKeeper(target, system.write, lambda: True, lambda: (config, {}))
        assert await keeper.keep() == 0  # there is no map yet
        await write_map(system, mirror, partition)

        following = MapReader(target, mirror)
        before = await translations(following, partition)
        assert before[1] == Translation(Answer.EXACT, 1)
        assert before[TRANSACTIONS * RECORDS] == Translation(Answer.EXACT, TRANSACTIONS * (RECORDS + 1) - 1)
        chunk_count = len(following.maps[partition].chunks)

        assert await keeper.keep() == chunk_count - 2  # one big one and the youngest
        assert await translations(following, partition) == before
        assert await translations(MapReader(target, mirror), partition) == before
        assert len(following.maps[partition].chunks) == 2
        assert await keeper.keep() == 0

        # Joined chunks go whole: only when the target has nothing left of what they speak of.
        end = following.maps[partition]
        oldest = min(end.chunks.values(), key=lambda chunk: chunk.from_offset)
        await delete_records(target, {(topic, 0): oldest.target_end})
        assert await keeper.keep() == 1
        after = await translations(following, partition)
        assert {each.answer for each in after[: oldest.source_end]} == {Answer.TOO_OLD}
        assert after[oldest.source_end :] == before[oldest.source_end :]


@in_pairs("kafka-millrace", "millrace-kafka")
def test_what_an_open_transaction_holds_is_waited_for(pair: Pair) -> None:
    asyncio.run(open_transaction(pair))


async def open_transaction(pair: Pair) -> None:
    mirror, partition = pair.unique("mirror"), SourcePartition("ewr", "flights", 0)
    topic, number = OFFSET_MAP.of(mirror), map_partition(partition, OFFSET_MAP.partitions)
    runs = Runs(partition, 0, 1, TOPIC_ID)
    writer = Producer({"bootstrap.servers": pair.target.bootstrap, "transactional.id": mirror})
    async with pair.target.cluster() as target:
        await create_topic(target, topic, OFFSET_MAP.partitions, 1, OFFSET_MAP.configs)
        reader = MapReader(target, mirror)
        await reader.refresh_map()
        await asyncio.to_thread(writer.init_transactions, 120)
        for end, is_committed in ((10, True), (20, False), (30, True)):
            runs.add(range(end - 10, end), 2 * end)
            ((key, value),) = runs.take_until(end)
            writer.begin_transaction()
            writer.produce(topic, value, key, partition=number)
            await asyncio.to_thread(writer.flush, 120)
            reading = asyncio.create_task(reader.refresh_map())
            done, _ = await asyncio.wait([reading], timeout=0.5)
            assert not done
            if is_committed:
                await asyncio.to_thread(writer.commit_transaction, 120)
            else:
                await asyncio.to_thread(writer.abort_transaction, 120)
                runs.restart(end - 10, 2, TOPIC_ID)
                runs.add(range(end - 10, end), 2 * end + 2)
            await reading
            (chunk, *_) = sorted(reader.maps[partition].chunks.values(), key=lambda chunk: -chunk.source_end)
            assert chunk.source_end == (end if is_committed else end - 10)


@in_pairs("kafka-millrace", "millrace-kafka")
def test_a_map_that_was_deleted_is_forgotten(pair: Pair) -> None:
    asyncio.run(deleted_map(pair))


async def deleted_map(pair: Pair) -> None:
    mirror, partition = pair.unique("mirror"), SourcePartition("ewr", "flights", 0)
    async with pair.target.cluster() as target:
        system = SystemRecords(target, lambda: 1, 1)
        await write_map(system, mirror, partition)
        reader = MapReader(target, mirror)
        await reader.refresh_map()
        assert partition in reader.maps
        await delete_topic(target, OFFSET_MAP.of(mirror))

        async def is_forgotten() -> bool:
            await reader.refresh_map()
            return reader.maps == {}

        await until(is_forgotten, lambda: str(reader.maps))
        await write_map(SystemRecords(target, lambda: 1, 1), mirror, partition)

        async def is_known() -> bool:
            await reader.refresh_map()
            return partition in reader.maps

        await until(is_known, lambda: str(reader.maps))


@in_pairs("kafka-millrace", "millrace-kafka")
def test_a_map_topic_that_somebody_else_made_too_small_is_refused(pair: Pair) -> None:
    asyncio.run(small_topic(pair))


async def small_topic(pair: Pair) -> None:
    source = {"cluster": "ewr", "bootstrap": ["h:1"], "topics": {"include": [".*"]}}
    config = parse_config(
        {
            "name": pair.unique("mirror"),
            "target": {"cluster": "dst", "bootstrap": [pair.target.bootstrap]},
            "sources": [source],
        }
    )
    async with pair.target.cluster() as target:
        await create_topic(target, OFFSET_MAP.of(config.name), 1, 1)
        with pytest.raises(FatalError, match=r"has 1 partition and needs 4; add the others"):
            await PositionsKeeper(config, target, SystemRecords(target, lambda: 1, 1)).make_topics()


async def write_map(system: SystemRecords, mirror: str, partition: SourcePartition) -> None:
    """As a worker does: a record for every transaction, the youngest chunk again and again."""
    runs = Runs(partition, 0, 1, TOPIC_ID)
    records: list[tuple[bytes, bytes | None]] = []
    for number in range(TRANSACTIONS):
        runs.add(range(number * RECORDS, (number + 1) * RECORDS), number * (RECORDS + 1))
        records += runs.take_until((number + 1) * RECORDS)
        if len(records) > 100 or number == TRANSACTIONS - 1:
            await system.write(
                OFFSET_MAP.of(mirror),
                records,
                partition=map_partition(partition, OFFSET_MAP.partitions),
                partitions=OFFSET_MAP.partitions,
                configs=OFFSET_MAP.configs,
            )
            records = []


async def translations(reader: MapReader, partition: SourcePartition) -> list[Translation]:
    await reader.refresh_map({(partition.source, partition.topic)})
    end = TRANSACTIONS * RECORDS
    return [reader.maps[partition].translate(offset, end, TOPIC_ID) for offset in range(end + 1)]
