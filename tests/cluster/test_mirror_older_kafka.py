"""An Apache Kafka from before topic ids, as the source and as the target of a mirror that delivers exactly
once (`make test-older-kafka`; tests/peers/older_kafka.xml has its version).

Topics go by their names there, a fetch does not say where histories part (the leader is asked for the end of
an epoch), and nobody tells who has a transaction open.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from millrace.broker.client.admin import (
    alter_configs,
    create_partitions,
    create_topic,
    delete_topic,
    describe_configs,
)
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets, fetch_offsets
from millrace.broker.errors import TopicAlreadyExists
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.records import build_batch
from tests.cluster.gap_stories import SKIP, STOP, GapStory, has_lost_its_end, one
from tests.cluster.mirror_calls import check
from tests.cluster.mirror_process import MirrorProcess, end_offset, record_bytes, send, until
from tests.cluster.test_mirror_delivery import PARTITIONS, Traffic, arrived, check_target
from tests.pairs import SETTINGS, SOURCE_NAME, TARGET_NAME, End, Kind, Pair
from tests.peers.kafka import KafkaPeer
from tests.peers.older_kafka import OlderKafkaPeer
from tests.servers import ZooKeeper

# It fetches 30 MB and takes three minutes.
pytestmark = [pytest.mark.java, pytest.mark.kafka, pytest.mark.long]

AS_SOURCE, AS_TARGET = ("older-millrace", "older-kafka"), ("millrace-older", "kafka-older")
NEWEST_FETCH = 11
"""From 12 on a fetch tells where histories part, from 13 on it names topics by their ids."""
NEWEST_METADATA = 9
"""From 10 on topics have ids."""
GROUP = {"session_timeout_ms": 3_000, "rebalance_timeout_ms": 10_000}
SHOWN = [b"%d" % number for number in range(6)]
LATER = [b"later %d" % number for number in range(8)]
KEPT = 3


@pytest.fixture(scope="module")
def older(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OlderKafkaPeer]:
    folder = tmp_path_factory.mktemp("older")
    with OlderKafkaPeer(folder, zookeeper.chroot(), settings=SETTINGS) as peer:
        yield peer


@pytest.fixture
def pair(request: pytest.FixtureRequest, older: OlderKafkaPeer, tmp_path: Path) -> Iterator[Pair]:
    """Of `older` and an end as other tests have it."""
    roles = {"source": SOURCE_NAME, "target": TARGET_NAME}

    def end(role: str, kind: Kind | str) -> End:
        if kind != "older":
            found: End = request.getfixturevalue(f"pair_{kind}_{role}")
            return found
        return End("kafka", roles[role], older.bootstrap, older.directory / "data", older)

    source, target = (end(*each) for each in zip(roles, request.param.split("-"), strict=True))
    made = Pair(request.param, source, target, tmp_path)
    try:
        yield made
    finally:
        made.stop_mirrors()


def between(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", names, indirect=True)


async def is_fine(mirror: MirrorProcess) -> None:
    """`millrace mirror check` has nothing against it, but that it tells no topic ids. A server that never had
    a transaction makes their log first, and meanwhile cannot be looked at in full."""
    said = ""

    async def nothing_is_said() -> bool:
        nonlocal said
        status, said = await asyncio.to_thread(check, mirror)
        assert status == 0, said
        lines = [line for line in said.splitlines() if line and "it tells no topic ids" not in line]
        return all(line.startswith("ok ") for line in lines)

    await until(nothing_is_said, lambda: said)
    assert "selects 1 topic" in said


async def restart(server: KafkaPeer) -> None:
    """A crash. Its process is started by the main thread: the kernel ends it with the thread that did."""
    server.kill()
    server.launch()
    await asyncio.to_thread(server.wait_until_serving)


def test_it_is_as_old_as_it_should_be(older: OlderKafkaPeer) -> None:
    async def story() -> None:
        async with Cluster("older", [older.bootstrap]) as cluster:
            assert await cluster.api_version(Api.FETCH, 0, 17) == NEWEST_FETCH
            assert await cluster.api_version(Api.METADATA, 0, 13) == NEWEST_METADATA

    asyncio.run(story())


@between(*AS_SOURCE, *AS_TARGET)
def test_each_record_arrives_once_although_mirror_and_broker_are_killed(
    pair: Pair, older: OlderKafkaPeer
) -> None:
    """Batches of every codec, byte by byte."""
    topic, seed = pair.unique("flights"), random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    mirror = pair.mirror([topic], start=False, group=GROUP, batches="pass_through")

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, PARTITIONS, 1, {"retention.ms": "-1"})
            await is_fine(mirror)
            traffic = Traffic(pair.source.name, source, topic, seed)
            await traffic.send(20)
            mirror.start()

            async def has_grown(than: int) -> bool:
                return await end_offset(target, topic, 0) > than

            flowing = asyncio.create_task(traffic.flow())
            await until(lambda: has_grown(0), logs_of=[mirror])
            mirror.kill()
            mirror.start()
            before = await end_offset(target, topic, 0)
            await until(lambda: has_grown(before), logs_of=[mirror])
            # Batches that a crash leaves unanswered would be sent twice by this test's own producer.
            traffic.stop()
            await flowing
            if pair.target.server is older:
                await traffic.send(20)
            await restart(older)
            await traffic.send(20)
            await until(lambda: arrived(mirror, [traffic]), logs_of=[mirror])
            assert await check_target(target, [traffic], repeats_allowed=False) == 0
            assert [each.get("gap") for each in mirror.status()["partitions"]] == [None] * PARTITIONS
            assert await asyncio.to_thread(mirror.terminate) == 0, mirror.log

    asyncio.run(story())


@between("older-kafka", "millrace-older")
def test_settings_partitions_and_groups_follow_the_source(pair: Pair) -> None:
    topic, group, progress = pair.unique("flights"), pair.unique("billing"), pair.unique("progress")
    more = {"progress_group": progress, "groups": {"include": [group], "interval_ms": 1_000}}
    mirror = MirrorProcess(
        pair.folder / "following",
        pair.target.bootstrap,
        {pair.source.name: pair.source.bootstrap},
        topics=[topic],
        target_name=pair.target.name,
        each_source=more,
        name=pair.unique("mirror"),
        config_sync={"interval_ms": 500},
    )
    pair.mirrors.append(mirror)

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 1, 1, {"retention.ms": "700000000"})
            await send(source, topic, 0, build_batch([one(b"%d" % number) for number in range(10)]))
            await commit_offsets(source, group, {(topic, 0): CommittedOffset(4)})
            mirror.start()

            async def setting_is(value: str) -> bool:
                if topic not in (await target.metadata([topic], max_age_ms=0)).topics:
                    return False
                return (await describe_configs(target, topic))["retention.ms"] == value

            await until(lambda: setting_is("700000000"), logs_of=[mirror])
            await alter_configs(source, topic, {"retention.ms": "800000000"})
            await until(lambda: setting_is("800000000"), logs_of=[mirror])
            await create_partitions(source, topic, 2)
            await send(source, topic, 1, build_batch([one(b"first of the second")]))

            async def all_there() -> bool:
                return [len(await record_bytes(target, topic, number)) for number in (0, 1)] == [1, 1]

            await until(all_there, logs_of=[mirror])
            for number in (0, 1):
                there = await record_bytes(target, topic, number)
                assert there == await record_bytes(source, topic, number)

            async def committed(cluster: Cluster, name: str, offsets: dict[int, int]) -> bool:
                found = await fetch_offsets(cluster, name)
                return {key: at.offset for key, at in found.items()} == {
                    (topic, number): offset for number, offset in offsets.items()
                }

            await until(lambda: committed(target, group, {0: 4}), logs_of=[mirror])
            await until(lambda: committed(source, progress, {0: 10, 1: 1}), logs_of=[mirror])

    asyncio.run(story())


@between("older-millrace")
def test_topic_made_anew_is_known_by_its_leader_epoch(pair: Pair) -> None:
    """Nothing names the new topic; in the same epoch the old one cannot have become shorter."""

    async def story() -> None:
        async with GapStory(pair, config={"group": GROUP}) as gap:
            await gap.create_source()
            await gap.send(*SHOWN)
            gap.start()
            for policy in (STOP, SKIP):
                await gap.has(policy, *SHOWN)
            await delete_topic(gap.source, gap.topic)

            async def is_made_anew() -> bool:
                """Its name is free some time after nobody is told of it any more."""
                try:
                    await gap.create_source()
                except TopicAlreadyExists:
                    return False
                return True

            await until(is_made_anew)
            await gap.send(*LATER[:KEPT])
            await gap.is_stopped_at("recreated", len(SHOWN), len(SHOWN))
            await gap.has(SKIP, *SHOWN, *LATER[:KEPT])
            await gap.has_skipped("recreated", len(SHOWN), len(SHOWN))

    asyncio.run(story())


def test_source_with_an_unclean_election(
    zookeeper: ZooKeeper, pair_millrace_target: End, tmp_path: Path
) -> None:
    """The second broker never heard of what the first had shown, leads, and its log grows beyond the mirror's
    position before that asks: only the leader's word on the epoch tells."""
    chroot = zookeeper.chroot()
    first, second = (
        OlderKafkaPeer(tmp_path / f"broker-{number}", chroot, settings=SETTINGS, node_id=number)
        for number in (1, 2)
    )

    async def story() -> None:
        source = End("kafka", SOURCE_NAME, first.bootstrap, first.directory / "data", first)
        pair = Pair("older-millrace", source, pair_millrace_target, tmp_path)
        gap = GapStory(pair, config={"group": GROUP})
        # Either of the two is alone at some time.
        ways_in = [first.bootstrap, second.bootstrap]
        gap.source = Cluster(SOURCE_NAME, ways_in)
        for mirror in gap.mirrors.values():
            mirror.settings["sources"][0]["bootstrap"] = ways_in
            mirror.config_path.write_text(yaml.safe_dump(mirror.settings))

        async def is_led(leader: int, *in_sync: int) -> bool:
            view = await gap.source.metadata([gap.topic], max_age_ms=0)
            if gap.topic not in view.topics:
                return False
            partition = view.topics[gap.topic].partitions[0]
            return (partition.leader, sorted(partition.isr)) == (leader, list(in_sync))

        try:
            async with gap:
                unclean = {"unclean.leader.election.enable": "true"}
                await create_topic(gap.source, gap.topic, 1, 2, unclean)
                await gap.send(*SHOWN[:KEPT])
                second.kill()
                await until(lambda: is_led(1, 1), logs_of=[second.log_file])
                await gap.send(*SHOWN[KEPT:])
                gap.start()
                for policy in (STOP, SKIP):
                    await gap.has(policy, *SHOWN)
                first.kill()
                second.launch()
                await until(lambda: is_led(2, 2), logs_of=[second.log_file])
                await gap.send(*LATER)
                await has_lost_its_end(gap, SHOWN, KEPT, LATER)
        finally:
            pair.stop_mirrors()

    try:
        first.launch()
        second.launch()
        first.wait_until_serving()
        second.wait_until_serving()
        asyncio.run(story())
    finally:
        first.kill()
        second.kill()
