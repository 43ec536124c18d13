"""Source and target of three brokers each, all on all three: leaders are killed in turn under load, others of
the in-sync replicas take over, and the target has what the source has, once and in its order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import LATEST
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.frames import Api
from millrace.mirror.delivery.exactly_once import transactional_ids
from millrace.mirror.topics.own_topics import POSITIONS
from tests.cluster.fed_workers import seen
from tests.cluster.mirror_process import MirrorProcess, until
from tests.cluster.several_brokers import brokers_of, end_of
from tests.cluster.three_brokers import Load, ThreeBrokers
from tests.conftest import BrokerFactory
from tests.pairs import Pair, in_pairs

REPLICAS = {
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}
# Each led by 2 or 3, the brokers that may be killed, and when one of them is away by the other.
PLACES = ((2, 3, 1), (3, 2, 1), (2, 3, 1))
PARTITIONS = len(PLACES)
# The group's coordinator may be on the broker that is killed: its move shall end no session.
GROUP = {"session_timeout_ms": 15_000, "rebalance_timeout_ms": 15_000}
NONE = -1
Leader = Callable[[], Awaitable[int]]


@pytest.mark.long
@pytest.mark.safety
@in_pairs("kafka-millrace", "millrace-kafka")
def test_leaders_that_are_killed_in_turn_cost_nothing(
    pair: Pair, broker_factory: BrokerFactory, tmp_path: Path
) -> None:
    with (
        brokers_of(pair.source.kind, broker_factory, tmp_path / "source", **REPLICAS) as source,
        brokers_of(pair.target.kind, broker_factory, tmp_path / "target", **REPLICAS) as target,
    ):
        ends = replace(
            pair,
            source=end_of(source, pair.source.kind, pair.source.name),
            target=end_of(target, pair.target.kind, pair.target.name),
        )
        asyncio.run(kill_in_turn(ends, source, target))


async def kill_in_turn(pair: Pair, source: ThreeBrokers, target: ThreeBrokers) -> None:
    topic = pair.unique("replicated")
    for cluster in (source, target):
        cluster.create_on(topic, *PLACES)
    async with pair.source.cluster() as of_source, pair.target.cluster() as of_target:
        name = await name_coordinated_elsewhere(pair, of_target)
        positions = POSITIONS.of(name)
        target.create_on(positions, PLACES[1], cleanup_policy="compact")
        mirror = pair.mirror([topic], name=name, group=GROUP, lanes=1, of_target={"replication_factor": 3})

        with Load(source.bootstrap, topic) as loading:
            await goes_on(of_target, topic, mirror, loading)
            for cluster, leader in (
                (source, lambda: leader_of(source, topic)),
                (target, lambda: leader_of(target, topic)),
                (target, lambda: leader_of(target, positions)),
                (target, lambda: coordinator_of(of_target, name)),
            ):
                killed = await leader()
                assert killed in (2, 3)
                cluster.brokers[killed].kill()

                async def is_elected(killed: int = killed, leader: Leader = leader) -> bool:
                    return await leader() not in (killed, NONE)

                await until(is_elected, logs_of=[mirror])
                await goes_on(of_target, topic, mirror, loading)
                cluster.brokers[killed].launch()
                await asyncio.to_thread(wait_until_whole, cluster)
                await goes_on(of_target, topic, mirror, loading)
        assert loading.errors == []

        async def all_there() -> bool:
            sent, there = await seen(of_source, topic, PARTITIONS), await seen(of_target, topic, PARTITIONS)
            return all(len(has) >= len(wanted) for has, wanted in zip(there, sent, strict=True))

        await until(all_there, logs_of=[mirror])
        sent = await seen(of_source, topic, PARTITIONS)
        assert sorted(number for numbers in sent for number in numbers) == sorted(loading.acknowledged)
        assert await seen(of_target, topic, PARTITIONS) == sent


async def name_coordinated_elsewhere(pair: Pair, target: Cluster) -> str:
    """A mirror's name: its first lane's transactions have a coordinator that may be killed."""
    while True:
        name = pair.unique("mirror")
        if await coordinator_of(target, name) != 1:
            return name


async def coordinator_of(target: Cluster, mirror: str) -> int:
    key = transactional_ids(mirror, 0, 0)[0]
    target.forget_coordinator(key, "transaction")
    return await target.retrying(lambda: target.coordinator(key, "transaction"))


async def leader_of(cluster: ThreeBrokers, topic: str) -> int:
    """Of partition 0."""
    return int((await asyncio.to_thread(cluster.partitions, topic))[0].leader_id)


async def goes_on(target: Cluster, topic: str, mirror: MirrorProcess, loading: Load) -> None:
    """Until in each partition something is committed that was not acknowledged to the load by now."""
    ends = await target.list_offsets(dict.fromkeys(((topic, n) for n in range(PARTITIONS)), LATEST), True)
    since = {number: end.offset for (_, number), end in ends.items()}
    newest = max(loading.acknowledged)

    async def is_more() -> bool:
        records = [record async for record in read_topic_to_end(target, topic, since=since)]
        return len({each.partition for each in records if int(each.value or b"") > newest}) == PARTITIONS

    await until(is_more, logs_of=[mirror])


def wait_until_whole(cluster: ThreeBrokers) -> None:
    """All replicas are in sync, and each partition is led by the broker that is meant to."""
    for topic in cluster.ask(Api.METADATA, 12, topics=None, allow_auto_topic_creation=False).topics:
        numbers = sorted(int(part.partition_index) for part in topic.partitions)
        for number in numbers:
            cluster.wait_in_sync(topic.name, number, 1, 2, 3)
        cluster.elect_in_the_end(topic.name, *numbers)
