"""The offset map on real clusters: what the upkeep joins and forgets there, by hand and in a running mirror,
and who reads it meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from uuid import UUID

import pytest
from confluent_kafka import Producer

from millrace.broker.client.admin import alter_configs, create_topic, delete_topic
from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.client.offsets import EARLIEST
from millrace.broker.errors import FatalError
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.config import load_config, parse_config
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.offsets import map_upkeep
from millrace.mirror.offsets.map_keeper import MapKeeper
from millrace.mirror.offsets.map_reader import MapReader
from millrace.mirror.offsets.offset_map import Runs, map_partition
from millrace.mirror.offsets.translate import Outcome, Row, Translator
from millrace.mirror.offsets.translation import Answer, Translation
from millrace.mirror.topics.own_topics import OFFSET_MAP
from millrace.mirror.topics.routes import SourcePartition
from tests.cluster.mirror_process import MirrorProcess, end_offset, program_with, send, until
from tests.cluster.moving_groups import map_translations, next_places, places, stable_ends, wait_until_carried
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


SMALL_CHUNKS = {"offsets.offset_map.MAX_TAIL_SIZE": 4}
"""A chunk of the map is full after a few transactions."""
TIDY = SMALL_CHUNKS | {
    "offsets.map_upkeep.WORTH_JOINING": 3,
    "offsets.map_upkeep.MAX_CHUNK_SIZE": 30,
    "offsets.map_keeper.FIRST_AFTER_S": 0.0,
    "offsets.map_keeper.INTERVAL_S": 0.2,
    "offsets.map_keeper.CHECK_PAUSE_S": 0.1,
}
BATCHES, BATCH = 24, 3


@pytest.mark.long
@in_pairs("kafka-millrace", "millrace-kafka")
def test_map_that_a_running_mirror_tidies_translates_as_before_what_the_target_still_has(pair: Pair) -> None:
    topic = pair.unique("tidied")
    mirror = pair.mirror([topic], start=False, config_sync={"enabled": False}, group={"instance_id": "one"})
    partition, topics = SourcePartition(pair.source.name, topic, 0), {topic: 1}

    async def begin() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 1, 1)
            # Small segments, by either's means: Apache Kafka takes none of less than a megabyte.
            is_ours = pair.target.kind == "millrace"
            await create_topic(
                target, topic, 1, 1, {"segment.bytes": "200"} if is_ours else {"segment.ms": "10"}
            )

    def chunk_starts() -> list[int]:
        return asyncio.run(_chunk_starts(pair, mirror, partition))

    def check_every_offset(log_start: int = 0) -> None:
        """By what the copies' places were before the target dropped any."""
        for offset, place in enumerate(wanted):
            found = by_translator[offset]
            if place < log_start:
                assert (found.outcome, found.target_offset) == (Outcome.TOO_OLD, None), offset
            else:
                assert (found.outcome, found.target_offset) == (Outcome.EXACT, place), offset

    asyncio.run(begin())
    mirror.program = program_with(SMALL_CHUNKS)
    mirror.start()
    asyncio.run(_carry_one_by_one(pair, mirror, topic, BATCHES))
    before = chunk_starts()
    assert len(before) >= 4
    (end,) = stable_ends(pair.source, topics).values()
    (at_source,), (at_target,) = (places(each, topics).values() for each in (pair.source, pair.target))
    wanted = next_places(at_source, at_target, end)
    by_map = map_translations(pair.target, mirror.settings["name"], partition, end)
    assert by_map == [Translation(Answer.EXACT, place) for place in wanted]

    # Joined, by the mirror itself, while it carries on.
    assert mirror.terminate() == 0
    mirror.program = program_with(TIDY)
    mirror.start()
    asyncio.run(_until(lambda: len(chunk_starts()) < len(before), mirror))
    assert map_translations(pair.target, mirror.settings["name"], partition, end) == by_map
    asyncio.run(_carry_one_by_one(pair, mirror, topic, BATCHES))
    (end,) = stable_ends(pair.source, topics).values()
    wait_until_carried({partition: end}, mirror)
    (at_source,), (at_target,) = (places(each, topics).values() for each in (pair.source, pair.target))
    wanted = next_places(at_source, at_target, end)
    by_translator = asyncio.run(_rows(pair, mirror, partition, end))
    check_every_offset()

    # The target drops its first segments, and the mirror what it knew of them.
    log_start = asyncio.run(_drop_most(pair, topic))
    asyncio.run(_until(lambda: min(chunk_starts()) > 0, mirror))
    by_translator = asyncio.run(_rows(pair, mirror, partition, end))
    check_every_offset(log_start)
    notes = {row.note for row in by_translator}
    assert f"the map begins with offset {min(chunk_starts())}" in notes
    assert "the offset map was tidied" in mirror.log


async def _until(condition: Callable[[], bool], mirror: MirrorProcess) -> None:
    async def holds() -> bool:
        return await asyncio.to_thread(condition)

    await until(holds, logs_of=[mirror])


async def _carry_one_by_one(pair: Pair, mirror: MirrorProcess, topic: str, count: int) -> None:
    """Each batch is a transaction of its own."""
    async with pair.source.cluster() as source, pair.target.cluster() as target:
        first = await end_offset(source, topic, 0)
        for number in range(first, first + count * BATCH, BATCH):
            before = await end_offset(target, topic, 0)
            values = [b"%d" % each for each in range(number, number + BATCH)]
            now_ms = time.time_ns() // 1_000_000
            await send(source, topic, 0, build_batch([Record(None, each, (), now_ms) for each in values]))

            async def is_ended(before: int = before) -> bool:
                # Its records, and the marker behind them.
                return await end_offset(target, topic, 0) >= before + BATCH + 1

            await until(is_ended, logs_of=[mirror])


async def _chunk_starts(pair: Pair, mirror: MirrorProcess, partition: SourcePartition) -> list[int]:
    async with pair.target.cluster() as target:
        reader = MapReader(target, mirror.settings["name"])
        await reader.refresh_map()
        return sorted(chunk.from_offset for chunk in reader.maps[partition].chunks.values())


async def _rows(pair: Pair, mirror: MirrorProcess, partition: SourcePartition, end: int) -> list[Row]:
    """For a group at each offset up to the end: where it goes on."""
    async with pair.source.cluster() as source, pair.target.cluster() as target:
        config, name = load_config(mirror.config_path), mirror.settings["name"]
        translator = Translator(config, target, {partition.source: source}, MapReader(target, name))
        found: list[Row] = []
        for offset in range(end + 1):
            found += await translator.rows({partition.source: {partition[1:]: CommittedOffset(offset)}})
        return found


async def _drop_most(pair: Pair, topic: str) -> int:
    """The target's retention takes all but the youngest third of the log; where that begins now."""
    size = sum(file.stat().st_size for file in pair.target.log_folder(topic, 0).glob("*.log"))
    async with pair.target.cluster() as target:
        await alter_configs(target, topic, {"retention.bytes": str(size // 3)})

        async def begins_later() -> int:
            return (await target.list_offsets({(topic, 0): EARLIEST}))[topic, 0].offset

        return await until(begins_later)


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
