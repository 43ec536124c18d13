"""The positions topic of a mirror on a real target: compacted, and read after that as before."""

from __future__ import annotations

import asyncio
import time

import pytest

from millrace.broker.client.admin import alter_configs, create_topic, describe_configs
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import TopicRecord, read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.delivery.checkpoints import decode_key
from millrace.mirror.delivery.positions_keeper import BARRIER
from millrace.mirror.topics.own_topics import OFFSET_MAP, POSITIONS, STARTS
from tests.cluster.gap_stories import one, values
from tests.cluster.mirror_calls import partitions
from tests.cluster.mirror_process import send, until
from tests.pairs import Pair, in_pairs

COUNT = 5
COMPACT_SOON = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}


@pytest.mark.safety
@in_pairs("millrace-kafka", "kafka-millrace")
def test_killed_mirror_goes_on_at_a_position_that_compaction_has_left_alone(pair: Pair) -> None:
    topic, name = pair.unique("compacted"), pair.unique("mirror")
    # Known by its name: it need not wait for the session of its predecessor.
    mirror = pair.mirror([topic], start=False, name=name, group={"instance_id": "one"})
    sent: list[bytes] = []

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 1, 1)

            async def send_one() -> None:
                sent.append(b"%d" % len(sent))
                await send(source, topic, 0, build_batch([one(sent[-1])]))

            async def all_there() -> bool:
                return len(await values(target, topic)) >= len(sent)

            mirror.start()
            for _ in range(COUNT):
                await send_one()
                await until(all_there, logs_of=[mirror])
            for own in (POSITIONS, STARTS, OFFSET_MAP):
                configs = await describe_configs(target, own.of(name), only_set=True)
                assert configs == own.configs
                assert configs["cleanup.policy"] == "compact"
            assert len(await positions(target, name)) > COUNT
            mirror.kill()
            await alter_configs(target, POSITIONS.of(name), COMPACT_SOON)

            async def stands_alone() -> bool:
                # What is written to is not compacted: a further record, which is no position, ends the file.
                further = Record(*BARRIER, timestamp_ms=time.time_ns() // 1_000_000)
                await send(target, POSITIONS.of(name), 0, build_batch([further]))
                return len(await positions(target, name)) == 1

            await until(stands_alone, lambda: "the positions are not compacted")
            await send_one()
            mirror.start()

            async def is_at_the_end() -> bool:
                told = [(each["position"], each["state"]) for each in partitions(mirror).values()]
                return told == [(len(sent), "running")]

            await until(is_at_the_end, lambda: str(mirror.status()), logs_of=[mirror])
            await until(all_there, logs_of=[mirror])
            assert await values(target, topic) == sent
            assert (
                f'millrace_mirror_open_gaps{{source="{pair.source.name}"}} 0.0' in mirror.get("/metrics")[1]
            )

    asyncio.run(story())


async def positions(target: Cluster, mirror: str) -> list[TopicRecord]:
    """The records of its positions topic that are one's."""
    records = read_topic_to_end(target, POSITIONS.of(mirror))
    return [record async for record in records if decode_key(record.key) is not None]
