"""Mirrors between real brokers, killed and stopped in mid-flow."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.broker.client.admin import create_partitions, create_topic, describe_configs
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.checkpoints import Positions
from millrace.mirror.routes import SourcePartition
from tests.cluster.mirror_process import MirrorProcess, end_offset, record_bytes, send, until
from tests.servers import BrokerProcess

pytestmark = pytest.mark.java

BrokerFactory = Callable[..., BrokerProcess]
MirrorFactory = Callable[..., MirrorProcess]
PARTITIONS = 2


@pytest.fixture
def mirror_factory(tmp_path: Path) -> Iterator[MirrorFactory]:
    mirrors: list[MirrorProcess] = []

    def make(*args: object, **kwargs: object) -> MirrorProcess:
        mirror = MirrorProcess(tmp_path / f"mirror-{len(mirrors)}", *args, **kwargs)  # type: ignore[arg-type]
        mirrors.append(mirror)
        return mirror.start()

    yield make
    for mirror in mirrors:
        mirror.kill()


class Traffic:
    """Batches of every codec for one source, each with a name of its own in it."""

    def __init__(self, source: str, cluster: Cluster, seed: int) -> None:
        self.source = source
        self.cluster = cluster
        self.random = random.Random(seed)
        self.sent: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}

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
            await send(self.cluster, "flights", partition, batch)


async def arrived(mirror: MirrorProcess, traffics: list[Traffic]) -> bool:
    """Whether all that was sent is acknowledged by the target, as the mirror that owns it all says. (The
    target's end offsets would not do: they count repeats.)"""
    positions = {
        (each["source"], each["partition"]): each["position"]
        for each in mirror.status().get("partitions", [])
    }
    for traffic in traffics:
        for partition in range(PARTITIONS):
            end = await end_offset(traffic.cluster, "flights", partition)
            if positions.get((traffic.source, partition)) != end:
                return False
    return True


async def grown(target: Cluster, before: int) -> bool:
    return await end_offset(target, "flights", 0) > before


async def ready(mirror: MirrorProcess) -> bool:
    return bool(mirror.status().get("ready"))


async def check_target(target: Cluster, traffics: list[Traffic], *, repeats_allowed: bool) -> int:
    """Every batch is there with the same record bytes, first occurrences in order; the count of repeats."""
    repeats = 0
    for partition in range(PARTITIONS):
        there = await record_bytes(target, "flights", partition)
        wanted = {section for traffic in traffics for section in traffic.sent[partition]}
        assert set(there) == wanted
        repeats += len(there) - len(set(there))
        firsts = list(dict.fromkeys(there))
        for traffic in traffics:
            mine = set(traffic.sent[partition])
            assert [section for section in firsts if section in mine] == traffic.sent[partition]
    assert repeats_allowed or repeats == 0
    return repeats


def test_kill_in_mid_flow_loses_nothing_and_keeps_order(
    broker_factory: BrokerFactory, mirror_factory: MirrorFactory
) -> None:
    ewr, jfk, agg = broker_factory(), broker_factory(), broker_factory()
    asyncio.run(kill_in_mid_flow(ewr, jfk, agg, mirror_factory))


async def kill_in_mid_flow(
    ewr: BrokerProcess, jfk: BrokerProcess, agg: BrokerProcess, mirror_factory: MirrorFactory
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    async with (
        Cluster("ewr", [ewr.bootstrap]) as source_a,
        Cluster("jfk", [jfk.bootstrap]) as source_b,
        Cluster("agg", [agg.bootstrap]) as target,
    ):
        traffics = [Traffic("ewr", source_a, seed), Traffic("jfk", source_b, seed + 1)]
        for traffic in traffics:
            await create_topic(traffic.cluster, "flights", PARTITIONS, 1, {"retention.ms": "-1"})
            await traffic.send(40)
        sources = {"ewr": ewr.bootstrap, "jfk": jfk.bootstrap}
        first = mirror_factory(agg.bootstrap, sources)

        stop = asyncio.Event()

        async def feed(traffic: Traffic) -> None:
            while not stop.is_set():
                await traffic.send(5)
                await asyncio.sleep(0.02)

        feeding = [asyncio.create_task(feed(traffic)) for traffic in traffics]
        for _ in range(2):
            before = await end_offset(target, "flights", 0)
            await until(lambda before=before: grown(target, before), lambda: first.log)
            first.kill()
            first.start()
        stop.set()
        await asyncio.gather(*feeding)
        await until(lambda: arrived(first, traffics), lambda: first.log)
        repeats = await check_target(target, traffics, repeats_allowed=True)
        print(f"repeats after two kills: {repeats}")
        topic = (await target.metadata(["flights"], max_age_ms=0)).topics["flights"]
        assert len(topic.partitions) == PARTITIONS
        await until(lambda: ready(first), lambda: first.log)
        assert first.terminate() == 0, first.log
        positions = Positions()
        async for record in read_topic_to_end(target, "millrace.positions.aggregate"):
            positions.apply(record.key, record.value)
        for traffic in traffics:
            for number in range(PARTITIONS):
                position = positions.known[SourcePartition(traffic.source, "flights", number)]
                assert position.next_offset == await end_offset(traffic.cluster, "flights", number)


def test_two_workers_share_and_a_stopped_one_hands_over_without_repeats(
    broker_factory: BrokerFactory, mirror_factory: MirrorFactory
) -> None:
    ewr, jfk, agg = broker_factory(), broker_factory(), broker_factory()
    asyncio.run(share_and_hand_over(ewr, jfk, agg, mirror_factory))


async def share_and_hand_over(
    ewr: BrokerProcess, jfk: BrokerProcess, agg: BrokerProcess, mirror_factory: MirrorFactory
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    async with (
        Cluster("ewr", [ewr.bootstrap]) as source_a,
        Cluster("jfk", [jfk.bootstrap]) as source_b,
        Cluster("agg", [agg.bootstrap]) as target,
    ):
        traffics = [Traffic("ewr", source_a, seed), Traffic("jfk", source_b, seed + 1)]
        for traffic in traffics:
            await create_topic(traffic.cluster, "flights", PARTITIONS, 1)
        sources = {"ewr": ewr.bootstrap, "jfk": jfk.bootstrap}
        workers = [mirror_factory(agg.bootstrap, sources) for _ in range(2)]
        sending = asyncio.gather(*(traffic.send(300) for traffic in traffics))

        async def shared_evenly() -> bool:
            counts = [len(worker.status().get("partitions", [])) for worker in workers]
            return counts == [2, 2] and all(worker.status().get("ready") for worker in workers)

        await until(shared_evenly, lambda: workers[0].log + workers[1].log)
        assert workers[0].terminate() == 0, workers[0].log

        async def all_with_the_other() -> bool:
            return len(workers[1].status().get("partitions", [])) == 4

        await until(all_with_the_other, lambda: workers[1].log)
        await sending
        await until(lambda: arrived(workers[1], traffics), lambda: workers[1].log)
        await check_target(target, traffics, repeats_allowed=False)
        caught_up = 'millrace_mirror_lag_records{partition="0",source="ewr",topic="flights"} 0.0'

        async def is_caught_up() -> bool:
            return caught_up in workers[1].get("/metrics")[1]

        await until(is_caught_up, lambda: workers[1].get("/metrics")[1])
        metrics = workers[1].get("/metrics")[1]
        assert 'millrace_mirror_open_gaps{source="ewr"} 0.0' in metrics
        assert metrics.count("# TYPE millrace_mirror_source_up gauge") == 1
        assert workers[1].get("/healthz")[0] == workers[1].get("/readyz")[0] == 200


def test_topics_that_appear_later_are_carried_and_internal_ones_never(
    broker_factory: BrokerFactory, mirror_factory: MirrorFactory
) -> None:
    ewr, agg = broker_factory(), broker_factory()
    asyncio.run(appear_later(ewr, agg, mirror_factory))


async def appear_later(ewr: BrokerProcess, agg: BrokerProcess, mirror_factory: MirrorFactory) -> None:
    batch = build_batch([Record(b"k", b"v", timestamp_ms=1)])
    async with Cluster("ewr", [ewr.bootstrap]) as source, Cluster("agg", [agg.bootstrap]) as target:
        mirror = mirror_factory(agg.bootstrap, {"ewr": ewr.bootstrap})

        async def is_ready() -> bool:
            return bool(mirror.status().get("generation", -1) > 0)

        await until(is_ready, lambda: mirror.log)
        for topic in ("millrace.positions.other", "orders", "millrace.audit"):
            await create_topic(source, topic, 3, 1, {"retention.ms": "123456789", "min.insync.replicas": "1"})
            await send(source, topic, 2, batch)
        for topic in ("orders", "millrace.audit"):
            await until(lambda topic=topic: grown_topic(target, topic, 2), lambda: mirror.log)
        topics = (await target.metadata(max_age_ms=0)).topics
        assert "millrace.positions.other" not in topics
        assert len(topics["orders"].partitions) == 3
        configs = await describe_configs(target, "orders", only_set=True)
        assert configs.get("retention.ms") == "123456789"
        assert "min.insync.replicas" not in configs
        await create_partitions(source, "orders", 4)
        await send(source, "orders", 3, batch)
        await until(lambda: grown_topic(target, "orders", 3), lambda: mirror.log)


async def grown_topic(target: Cluster, topic: str, partition: int) -> bool:
    return await end_offset(target, topic, partition) > 0
