"""Sources and targets of several brokers: one is killed, one moves, one that was left behind is elected, and
clusters of different sizes fill one aggregate.

The brokers are the module's own; each test leaves them running.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.committed import committed_batches
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.records import Record, build_batch, read_records
from tests.cluster.gap_stories import NOW_MS, SKIP, STOP, GapStory, has_lost_its_end
from tests.cluster.mirror_process import MirrorProcess, record_bytes, send, until
from tests.cluster.several_brokers import ThreeKafkas, brokers_of, end_of, move, three_millraces
from tests.cluster.three_brokers import ThreeBrokers
from tests.conftest import BrokerFactory
from tests.pairs import Kind, Pair, in_pairs
from tests.ports import free_port

Several = Callable[[Kind], ThreeBrokers]
BATCHES = 20
# The group's coordinator may be on the broker that is killed: its move shall end no session.
GROUP = {"session_timeout_ms": 15_000, "rebalance_timeout_ms": 15_000}


@pytest.fixture(scope="module")
def several_kafkas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeBrokers]:
    kafkas = ThreeKafkas(tmp_path_factory.mktemp("several-kafkas"))
    yield kafkas
    kafkas.kill()


@pytest.fixture(scope="module")
def several_millraces(module_broker_factory: BrokerFactory) -> ThreeBrokers:
    return three_millraces(module_broker_factory)


@pytest.fixture
def several(request: pytest.FixtureRequest) -> Several:
    """`several(kind)`: the three brokers of that kind."""
    return lambda kind: request.getfixturevalue(f"several_{kind}s")


def one(value: bytes) -> bytearray:
    return build_batch([Record(b"k", value, timestamp_ms=NOW_MS)])


@in_pairs("kafka-millrace", "millrace-kafka")
def test_partition_without_a_leader_holds_up_no_other(pair: Pair, several: Several) -> None:
    """Both partitions begin in one lane; the target's broker that has one of them is killed."""
    cluster = several(pair.target.kind)
    topic = pair.unique("leaderless")
    cluster.create_on(topic, (2,), (3,))
    pair = replace(pair, target=end_of(cluster, pair.target.kind, pair.target.name))
    mirror = pair.mirror([topic], start=False, lanes=1, group=GROUP, of_target={"replication_factor": 2})

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 2, 1)
            mirror.start()
            sent = [0, 0]

            async def send_some(partition: int) -> None:
                await send(source, topic, partition, one(str(sent[partition]).encode()))
                sent[partition] += 1

            async def arrived(partition: int) -> bool:
                values = await committed_values(target, topic, partition)
                assert values == [str(number).encode() for number in range(len(values))]
                return len(values) == sent[partition]

            for partition in (0, 1):
                await send_some(partition)
                await until(lambda partition=partition: arrived(partition), logs_of=[mirror])
            cluster.brokers[3].kill()
            for _ in range(20):
                await send_some(0)
                await send_some(1)
            await until(lambda: arrived(0), logs_of=[mirror])
            await send_some(0)
            await until(lambda: arrived(0), logs_of=[mirror])
            cluster.brokers[3].launch()
            await asyncio.to_thread(cluster.brokers[3].wait_until_serving)
            for partition in (0, 1):
                await until(lambda partition=partition: arrived(partition), logs_of=[mirror])

    asyncio.run(story())


async def committed_values(cluster: Cluster, topic: str, partition: int) -> list[bytes]:
    """What read_committed sees of one partition now."""
    values: list[bytes] = []
    offset = 0
    view = await cluster.metadata([topic])
    leader = view.leader(topic, partition)
    while leader is not None:
        (answer,) = await fetch(cluster, leader, {(topic, partition): FetchPosition(offset)}, max_wait_ms=10)
        for batch, header, is_data in committed_batches(answer.records, answer.aborted):
            if is_data:
                values += [record.value or b"" for record in read_records(batch)]
            offset = header.next_offset
        if offset >= answer.last_stable_offset:
            return values
    return values


@in_pairs("millrace-kafka", "kafka-millrace")
def test_unclean_election(pair: Pair, several: Several) -> None:
    """The source's log lost records which it had shown, and that a mirror had carried. It grows beyond the
    mirror's position again before the mirror asks, so no offset is out of range: only the leader epoch of the
    last batch that was fetched tells (KIP-595)."""
    three = several(pair.source.kind)
    pair = replace(pair, source=end_of(three, pair.source.kind, pair.source.name))
    shown, later, kept = [b"%d" % number for number in range(6)], [b"later %d" % n for n in range(8)], 3

    async def story() -> None:
        async with GapStory(pair) as gap:
            three.create_on(gap.topic, (2, 3), unclean_leader_election_enable="true")
            await gap.send(*shown[:kept])
            await asyncio.to_thread(three.wait_in_sync, gap.topic, 0, 2, 3)
            three.brokers[3].kill()
            await asyncio.to_thread(three.wait_in_sync, gap.topic, 0, 2)
            await gap.send(*shown[kept:])
            gap.start()
            for policy in (STOP, SKIP):
                await gap.has(policy, *shown)
            three.brokers[2].kill()
            three.brokers[3].launch()
            await asyncio.to_thread(three.wait_led, gap.topic, 0, 3)
            await gap.send(*later)
            await has_lost_its_end(gap, shown, kept, later)
            # The old leader comes back, truncates its own log, and nothing of it appears again.
            three.brokers[2].launch()
            await asyncio.to_thread(three.wait_in_sync, gap.topic, 0, 2, 3)
            await gap.send(b"last")
            for policy in (STOP, SKIP):
                await gap.has(policy, *shown, *later, b"last")

    asyncio.run(story())


@in_pairs("millrace-millrace", "kafka-millrace", "millrace-kafka")
@pytest.mark.parametrize("which", ["source", "target"])
def test_mirror_follows_a_broker_to_another_port_and_another_host(
    pair: Pair, several: Several, which: str
) -> None:
    """Only the first broker is named: of the one that moves, the mirror knows what the cluster has told."""
    moving = getattr(pair, which)
    cluster = several(moving.kind)
    topic = pair.unique("moved")
    cluster.create_on(topic, (1,), (2,))
    pair = replace(pair, **{which: end_of(cluster, moving.kind, moving.name)})
    # This test looks at batches: neighbours stay apart.
    mirror = pair.mirror([topic], start=False, batches="pass_through", group=GROUP)

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            if which == "target":
                await create_topic(source, topic, 2, 1)
            mirror.start()
            sent: dict[int, list[bytes]] = {0: [], 1: []}

            async def send_all(name: str) -> None:
                for count in range(BATCHES):
                    for number, batches in sent.items():
                        batch = one(f"{name}/{number}/{count}".encode())
                        batches.append(bytes(batch[61:]))
                        await send(source, topic, number, batch)

            async def all_arrived() -> bool:
                # Offsets say nothing of it: the ends of transactions have some too.
                return all(
                    [
                        len(await record_bytes(target, topic, number)) >= len(batches)
                        for number, batches in sent.items()
                    ]
                )

            async def is_there() -> bool:
                return topic in (await target.metadata([topic], max_age_ms=0)).topics

            await send_all("before")
            await until(is_there, logs_of=[mirror])
            await until(all_arrived, logs_of=[mirror])
            for host in ("127.0.0.1", "127.0.0.2"):
                move(cluster.brokers[2], free_port(), host)
                await send_all(f"at {host}")
                await until(all_arrived, logs_of=[mirror])
            for number, batches in sent.items():
                assert await record_bytes(target, topic, number) == batches

    asyncio.run(story())


@in_pairs("millrace-millrace", "millrace-kafka")
def test_sources_of_one_two_and_three_brokers_fill_one_aggregate(
    pair: Pair, several: Several, module_broker_factory: BrokerFactory, tmp_path: Path
) -> None:
    """The sources know nothing of each other: no broker has another cluster's address, and none is ever
    connected to one."""
    kind, topic = pair.source.kind, pair.unique("flights-of-three")
    with brokers_of(kind, module_broker_factory, tmp_path, 2) as two:
        sources = {
            "one": (pair.source.bootstrap, 1, 1),
            "two": (two.brokers[1].bootstrap, 4, 2),
            "three": (several(kind).brokers[1].bootstrap, 7, 3),
        }
        mirror = MirrorProcess(
            tmp_path / "mirror",
            pair.target.bootstrap,
            {name: address for name, (address, _, _) in sources.items()},
            topics=[re.escape(topic)],
            name=pair.unique("three"),
        )
        pair.mirrors.append(mirror)
        clusters = {
            "one": [pair.source.pid],
            "two": pids_of(two),
            "three": pids_of(several(kind)),
            "target": [pair.target.pid],
        }
        asyncio.run(fill_one_aggregate(pair, topic, sources, mirror, clusters))


def pids_of(several: ThreeBrokers) -> list[int]:
    found = [broker.process.pid for broker in several.brokers.values() if broker.process is not None]
    assert len(found) == len(several.brokers)
    return found


def connected(clusters: Mapping[str, Sequence[int]]) -> set[tuple[str, str]]:
    """Which cluster's processes have a connection to a port that another's listen at."""
    listens: dict[int, str] = {}
    connects: set[tuple[str, int]] = set()
    for name, pids in clusters.items():
        for pid in pids:
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    listens[each.laddr.port] = name
                elif each.raddr:
                    connects.add((name, each.raddr.port))
    return {(name, listens[port]) for name, port in connects if port in listens and listens[port] != name}


async def fill_one_aggregate(
    pair: Pair,
    topic: str,
    sources: dict[str, tuple[str, int, int]],
    mirror: MirrorProcess,
    clusters: dict[str, list[int]],
) -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(pair.target.cluster())
        sent: list[tuple[int, bytes]] = []
        for name, (address, partitions, replicas) in sources.items():
            source = await stack.enter_async_context(Cluster(name, [address]))
            await create_topic(source, topic, partitions, replicas)
            for number in range(5 * partitions):
                value = f"{name}/{number % partitions}/{number}".encode()
                await send(source, topic, number % partitions, one(value))
                sent.append((number % partitions, value))
        mirror.start()
        assert mirror.process is not None
        looks = {**clusters, "mirror": [mirror.process.pid]}
        seen: set[tuple[str, str]] = set()

        async def all_there() -> list[tuple[int, bytes]]:
            seen.update(connected(looks))
            try:
                got = [
                    (record.partition, record.value or b"")
                    async for record in read_topic_to_end(target, topic)
                ]
            except KafkaError:
                return []
            return got if len(got) >= len(sent) else []

        got = await until(all_there, logs_of=[mirror])
        assert Counter(got) == Counter(sent)
        assert {(who, to) for who, to in seen if who in clusters} == set()
        assert {("mirror", name) for name in clusters} <= seen, "whoever carries it is"
        for name, (_, partitions, _) in sources.items():
            for partition in range(partitions):
                start = f"{name}/{partition}/".encode()
                order = [int(value.split(b"/")[2]) for _, value in got if value.startswith(start)]
                assert order == sorted(order)
        assert "`partition_counts: widest`" in mirror.log
