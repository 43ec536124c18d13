"""Records cross every pair of clusters as they were sent: batches, codecs, keys, headers, null values."""

from __future__ import annotations

import asyncio
import random

import pytest
import yaml

from millrace.broker.client.admin import create_topic
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets, fetch_offsets
from millrace.broker.protocol.records import Record, build_batch
from tests import seeds
from tests.cluster.mirror_calls import check
from tests.cluster.mirror_process import end_offset, record_bytes, send, until
from tests.pairs import Pair, in_pairs

PARTITIONS = 2


@pytest.mark.safety
@in_pairs("kafka-millrace", "millrace-kafka", "kafka-kafka")
def test_record_bytes_survive(pair: Pair) -> None:
    asyncio.run(carry(pair))


async def carry(pair: Pair) -> None:
    rng = random.Random(seeds.given())
    topic, group = pair.unique("flights"), pair.unique("progress")
    mirror = pair.mirror([topic], start=False)
    mirror.settings["sources"][0]["progress_group"] = group
    mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
    mirror.start()
    async with pair.source.cluster() as source, pair.target.cluster() as target:
        await create_topic(source, topic, PARTITIONS, 1, {"retention.ms": "-1"})
        for number in range(200):
            records = [
                Record(rng.randbytes(5), rng.randbytes(rng.randrange(300)), (("h", None),), number)
                for _ in range(rng.randint(1, 20))
            ]
            await send(source, topic, number % PARTITIONS, build_batch(records, compression=number % 5))
        for partition in range(PARTITIONS):
            end = await end_offset(source, topic, partition)

            async def all_there(partition: int = partition, end: int = end) -> bool:
                return await end_offset(target, topic, partition) >= end

            await until(all_there, logs_of=[mirror])
            sent = await record_bytes(source, topic, partition)
            assert await record_bytes(target, topic, partition) == sent
            for end_of_pair in (pair.source, pair.target):
                assert any(end_of_pair.log_folder(topic, partition).glob("*.log"))
        ends = {(topic, number): await end_offset(source, topic, number) for number in range(PARTITIONS)}

        async def is_told() -> bool:
            found = await fetch_offsets(source, group)
            return {key: committed.offset for key, committed in found.items()} == ends

        # Tools at the source see the mirror there as a group that has read everything.
        await until(is_told, logs_of=[mirror])


@in_pairs("kafka-millrace", "millrace-millrace")
def test_offsets_of_a_real_group_at_the_source_are_never_overwritten(pair: Pair) -> None:
    """Its consumers are down, so that the source would take a commit from anybody."""

    async def story() -> None:
        topic, group = pair.unique("flights"), pair.unique("billing")
        mirror = pair.mirror([topic], start=False)
        mirror.settings["sources"][0]["progress_group"] = group
        mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 1, 1)
            await send(source, topic, 0, build_batch([Record(None, b"1"), Record(None, b"2")]))
            mine = {(topic, 0): CommittedOffset(1)}
            await commit_offsets(source, group, mine)
            status, said = await asyncio.to_thread(check, mirror)
            assert status == 0, said
            (line,) = (each for each in said.splitlines() if group in each)
            assert line.startswith("warning ")
            assert f"(1, such as {topic}-0 at 1)" in line
            mirror.start()

            async def is_refused() -> bool:
                return "progress is not committed" in mirror.log and await end_offset(target, topic, 0) >= 2

            await until(is_refused, logs_of=[mirror])
            assert {key: at.offset for key, at in (await fetch_offsets(source, group)).items()} == {
                key: at.offset for key, at in mine.items()
            }

    asyncio.run(story())
