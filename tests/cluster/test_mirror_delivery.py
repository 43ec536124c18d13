"""Mirrors of two sources into one aggregate, killed and stopped in mid-flow; batches of every codec."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.topics.own_topics import POSITIONS
from millrace.mirror.topics.routes import SourcePartition
from tests import seeds
from tests.cluster.mirror_process import MirrorProcess, end_offset, record_bytes, send, until
from tests.pairs import End, Pair, in_pairs

PARTITIONS = 2
KILLS = 2 if os.environ.get("MILLRACE_PAIRS") else 1  # the second, too, by `make test-pairs`
# A killed worker's place in the group is free when its session is over. Neighbours stay apart: these tests
# look at batches.
SETTINGS = {"group": {"session_timeout_ms": 3_000, "rebalance_timeout_ms": 10_000}, "batches": "pass_through"}


class Traffic:
    """Batches of every codec for one source, each with a name of its own in it."""

    def __init__(self, source: str, cluster: Cluster, topic: str, seed: int) -> None:
        self.source = source
        self.cluster = cluster
        self.topic = topic
        self.random = random.Random(seed)
        self.sent: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
        self._stop = asyncio.Event()

    async def send(self, count: int) -> None:
        for _ in range(count):
            partition = self.random.randrange(PARTITIONS)
            number = len(self.sent[partition])
            records = [
                Record(
                    f"{self.source}/{partition}/{number}/{index}".encode(),
                    self.random.randbytes(self.random.randrange(200)),
                    (("h", b"1"),),
                    timestamp_ms=1_356_998_400_000 + number,
                )
                for index in range(self.random.randint(1, 20))
            ]
            batch = build_batch(records, compression=self.random.randrange(5))
            self.sent[partition].append(bytes(batch[61:]))
            await send(self.cluster, self.topic, partition, batch)

    async def flow(self) -> None:
        """Until `stop`."""
        while not self._stop.is_set():
            await self.send(5)
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        self._stop.set()


async def arrived(mirror: MirrorProcess, traffics: list[Traffic]) -> bool:
    """Whether all that was sent is acknowledged by the target, as the mirror that owns it all says. (The
    target's end offsets would not do: they count repeats.)"""
    positions = {
        (each["source"], each["partition"]): each["position"]
        for each in mirror.status().get("partitions", [])
    }
    for traffic in traffics:
        for partition in range(PARTITIONS):
            end = await end_offset(traffic.cluster, traffic.topic, partition)
            if positions.get((traffic.source, partition)) != end:
                return False
    return True


async def ready(mirror: MirrorProcess) -> bool:
    return bool(mirror.status().get("ready"))


async def check_target(target: Cluster, traffics: list[Traffic], *, repeats_allowed: bool) -> int:
    """Every batch is there with the same record bytes, first occurrences in order; the count of repeats."""
    repeats = 0
    for partition in range(PARTITIONS):
        there = await record_bytes(target, traffics[0].topic, partition)
        wanted = {section for traffic in traffics for section in traffic.sent[partition]}
        assert set(there) == wanted
        repeats += len(there) - len(set(there))
        firsts = list(dict.fromkeys(there))
        for traffic in traffics:
            mine = set(traffic.sent[partition])
            assert [section for section in firsts if section in mine] == traffic.sent[partition]
    assert repeats_allowed or repeats == 0
    return repeats


async def begin(first: Cluster, second: Cluster, topic: str, ends: tuple[End, End]) -> list[Traffic]:
    """The topic, in both sources, and its traffics; the seed is printed."""
    seed = seeds.given()
    for cluster in (first, second):
        await create_topic(cluster, topic, PARTITIONS, 1, {"retention.ms": "-1"})
    return [
        Traffic(end.name, cluster, topic, seed + number)
        for number, (end, cluster) in enumerate(zip(ends, (first, second), strict=True))
    ]


@pytest.mark.safety
@in_pairs("millrace-millrace", "kafka-kafka")
def test_kill_in_mid_flow_repeats_nothing(pair: Pair, second_source: End) -> None:
    asyncio.run(kill_in_mid_flow(pair, second_source, "exactly_once"))


@pytest.mark.safety
@in_pairs("millrace-kafka", "kafka-millrace")
def test_kill_in_mid_flow_loses_nothing_at_least_once(pair: Pair, second_source: End) -> None:
    asyncio.run(kill_in_mid_flow(pair, second_source, "at_least_once"))


async def kill_in_mid_flow(pair: Pair, second_source: End, delivery: str) -> None:
    topic = pair.unique("flights")
    async with (
        pair.source.cluster() as first,
        second_source.cluster() as second,
        pair.target.cluster() as target,
    ):
        traffics = await begin(first, second, topic, (pair.source, second_source))
        for traffic in traffics:
            await traffic.send(20)
        mirror = pair.mirror([topic], also=[second_source], delivery=delivery, **SETTINGS)
        flowing = [asyncio.create_task(traffic.flow()) for traffic in traffics]
        for _ in range(KILLS):
            before = await end_offset(target, topic, 0)

            async def has_grown(before: int = before) -> bool:
                return await end_offset(target, topic, 0) > before

            await until(has_grown, logs_of=[mirror])
            mirror.kill()
            mirror.start()
        for traffic in traffics:
            traffic.stop()
        await asyncio.gather(*flowing)
        await until(lambda: arrived(mirror, traffics), logs_of=[mirror])
        repeats = await check_target(target, traffics, repeats_allowed=delivery == "at_least_once")
        print(f"repeats after {KILLS} kills: {repeats}")
        assert len((await target.metadata([topic], max_age_ms=0)).topics[topic].partitions) == PARTITIONS
        await until(lambda: ready(mirror), logs_of=[mirror])
        assert mirror.terminate() == 0, mirror.log
        positions = Positions()
        async for record in read_topic_to_end(target, POSITIONS.of(mirror.settings["name"])):
            positions.apply(record.key, record.value)
        for traffic in traffics:
            for number in range(PARTITIONS):
                position = positions.known[SourcePartition(traffic.source, topic, number)]
                assert position.next_offset == await end_offset(traffic.cluster, topic, number)


@in_pairs("kafka-kafka", "millrace-millrace")
def test_two_workers_share_and_a_stopped_one_hands_over_at_once(pair: Pair, second_source: End) -> None:
    """Nothing is repeated, and the handover aborts no transaction."""
    topic, name = pair.unique("flights"), pair.unique("mirror")
    # At ease: no session ends here but by a word.
    settings = SETTINGS | {"group": {"session_timeout_ms": 10_000, "rebalance_timeout_ms": 10_000}}

    async def story() -> None:
        async with (
            pair.source.cluster() as first,
            second_source.cluster() as second,
            pair.target.cluster() as target,
        ):
            traffics = await begin(first, second, topic, (pair.source, second_source))
            leaving, heir = (
                pair.mirror([topic], name=name, also=[second_source], **settings) for _ in range(2)
            )

            async def shared_evenly() -> bool:
                counts = [len(worker.status().get("partitions", [])) for worker in (leaving, heir)]
                return counts == [2, 2] and all(worker.status().get("ready") for worker in (leaving, heir))

            await until(shared_evenly, logs_of=[leaving, heir])
            # Where the second came while a first position was being written, that was aborted, and rightly.
            aborted_before = heir.status()["transactions"]["aborted"]
            flowing = [asyncio.create_task(traffic.flow()) for traffic in traffics]
            first_moving = leaving.status()["partitions"][0]["partition"]

            async def has_grown(before: int) -> bool:
                return await end_offset(target, topic, first_moving) > before

            await until(lambda: has_grown(0), logs_of=[leaving])
            assert await asyncio.to_thread(leaving.terminate) == 0, leaving.log

            async def all_with_the_other() -> bool:
                return len(heir.status().get("partitions", [])) == 4

            await until(all_with_the_other, logs_of=[heir])
            for traffic in traffics:
                traffic.stop()
            await asyncio.gather(*flowing)
            await until(lambda: arrived(heir, traffics), logs_of=[heir])
            await check_target(target, traffics, repeats_allowed=False)
            assert heir.status()["transactions"]["aborted"] == aborted_before, heir.log
            source, metrics = pair.source.name, ""
            caught_up = f'millrace_mirror_lag_records{{partition="0",source="{source}",topic="{topic}"}} 0.0'

            async def is_caught_up() -> bool:
                nonlocal metrics
                metrics = heir.get("/metrics")[1]
                return caught_up in metrics

            await until(is_caught_up, lambda: metrics)
            assert f'millrace_mirror_open_gaps{{source="{source}"}} 0.0' in metrics
            assert metrics.count("# TYPE millrace_mirror_source_up gauge") == 1
            assert heir.get("/healthz")[0] == heir.get("/readyz")[0] == 200

    asyncio.run(story())
