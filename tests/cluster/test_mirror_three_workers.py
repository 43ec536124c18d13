"""Three workers of one mirror under load: of twelve partitions those move that have to, and no others, and
whoever comes and goes, to the target's coordinators they are the same few transactional ids.
"""

from __future__ import annotations

import asyncio
import re

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.groups import describe_group
from millrace.mirror.delivery.exactly_once import MAX_LANES_FACTOR, transactional_ids
from tests.cluster.fed_workers import (
    GROUP,
    Feed,
    finish,
    logs,
    owners,
    until_flowing,
    until_shared,
)
from tests.cluster.mirror_process import MirrorProcess, committed_data, end_offset, until
from tests.cluster.transactional import known_ids, told_timeout_ms
from tests.pairs import Pair, in_pairs

PARTITIONS = 12
LANES = 2
# Less than a kilobyte a second of each partition: by their rates there is nothing to level.
MOST, PAUSE_S = 2, 0.2


@in_pairs("millrace-millrace", "kafka-kafka")
def test_who_joins_gets_its_share_and_who_dies_leaves_its_own_and_nothing_else_moves(pair: Pair) -> None:
    topic, name = pair.unique("three"), pair.unique("mirror")

    def worker(*, start: bool = True) -> MirrorProcess:
        return pair.mirror([topic], start=start, name=name, group=GROUP, lanes=LANES)

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, PARTITIONS, 1)
            workers = [worker(), worker(), worker(start=False)]
            await until_shared(workers[:2], PARTITIONS)
            feed = Feed(source, topic, PARTITIONS, most=MOST, pause_s=PAUSE_S)
            await until_flowing(target, feed, workers, least=0)
            before, told = await owners(workers[:2]), [moved(each) for each in workers]
            workers[2].start()
            await until_shared(workers, PARTITIONS)
            now = await owners(workers)
            assert now[0] < before[0] and now[1] < before[1], logs(workers)
            assert now[2] == (before[0] - now[0]) | (before[1] - now[1])
            assert moves_since(told, workers) == [(2, 0), (2, 0), (0, 4)], logs(workers)

            # What the leader knew of the others dies with it.
            (leader,) = (each for each in workers if each.status()["leader"])
            heirs = [each for each in workers if each is not leader]
            before, told = await owners(heirs), [moved(each) for each in heirs]
            leader.kill()
            await until_shared(heirs, PARTITIONS)
            now = await owners(heirs)
            assert now[0] > before[0] and now[1] > before[1], logs(workers)
            assert moves_since(told, heirs) == [(0, 2), (0, 2)], logs(workers)

            leader.start()
            await until_shared(workers, PARTITIONS)
            assert await asyncio.to_thread(heirs[0].terminate) == 0, heirs[0].log
            heirs[0].start()
            await until_shared(workers, PARTITIONS)
            await knows_them_by_their_lanes(target, feed, name, workers)
            await finish(target, feed, workers)

    asyncio.run(story())


def moved(worker: MirrorProcess) -> tuple[int, int]:
    """How many partitions a worker had to give up by now, and how many came, by what its log says of each
    time that the work was shared out."""
    shares = re.findall(r" assigned .*\bgoing=(\d+) coming=(\d+)", worker.log)
    return sum(int(going) for going, _ in shares), sum(int(coming) for _, coming in shares)


def moves_since(before: list[tuple[int, int]], workers: list[MirrorProcess]) -> list[tuple[int, int]]:
    return [
        (going - gone, coming - came)
        for (gone, came), (going, coming) in zip(before, map(moved, workers), strict=True)
    ]


def ids_of(mirror: str, lanes: int) -> dict[str, tuple[int, int]]:
    """(Slot, number) of the lane of each transactional id of three workers that have so many lanes."""
    return {
        each: (slot, number)
        for slot in range(3)
        for number in range(lanes)
        for each in transactional_ids(mirror, slot, number)
    }


async def knows_them_by_their_lanes(
    target: Cluster, feed: Feed, mirror: str, workers: list[MirrorProcess]
) -> None:
    """Each lane carries partitions that no other does, under its ids. Those of the lanes that a worker may
    make for partitions that block theirs are fenced with it when it leaves: known, and never used."""
    usual, most = ids_of(mirror, LANES), ids_of(mirror, LANES * MAX_LANES_FACTOR)
    prefix = f"millrace.{mirror}."

    async def all_carry() -> bool:
        known = await known_ids(target, prefix)
        return all(each in known and known[each].state != "Empty" for each in usual)

    await until(all_carry, logs_of=workers)
    known = await known_ids(target, prefix)
    assert usual.keys() <= known.keys() <= most.keys()
    assert {name for name, told in known.items() if told.state != "Empty"} == usual.keys()
    assert {await told_timeout_ms(target, each) for each in usual} == {15_000}
    assert (await describe_group(target, f"millrace-mirror.{mirror}")).protocol_type == "millrace-mirror"

    lane_of = {known[each].producer_id: lane for each, lane in usual.items()}
    assert len(lane_of) == len(usual)
    since = [await end_offset(target, feed.topic, number) for number in range(PARTITIONS)]

    async def lanes() -> list[set[tuple[int, int]]]:
        """By which lanes each partition has been carried since."""
        return [
            {
                lane_of[header.producer_id]
                async for _, header in committed_data(target, feed.topic, number, at)
            }
            for number, at in enumerate(since)
        ]

    async def all_have_come() -> bool:
        return all(await lanes())

    await until(all_have_come, logs_of=workers)
    found = await lanes()
    assert all(len(each) == 1 for each in found), found
    assert set.union(*found) == set(usual.values())
