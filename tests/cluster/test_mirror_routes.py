"""Loops between real mirrors are refused, and what is none is carried: once, everywhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_calls import check
from tests.cluster.mirror_process import MirrorProcess, end_offset, record_bytes, send, until
from tests.cluster.test_mirror_delivery import PARTITIONS, SETTINGS, Traffic, arrived, check_target
from tests.conftest import BrokerFactory
from tests.pairs import End, Pair, in_pairs
from tests.peers.kafka import KafkaPeer
from tests.waiting import patience

NOW_MS = int(time.time() * 1000)


def one(value: bytes) -> bytearray:
    return build_batch([Record(b"k", value, timestamp_ms=NOW_MS)])


async def values(cluster: Cluster, topic: str) -> list[bytes]:
    try:
        return [record.value or b"" async for record in read_topic_to_end(cluster, topic)]
    except KafkaError:
        return []


def says_with_its_line(closing: MirrorProcess, said: str, sentence: str) -> bool:
    """Whether one line says so, and names the line of the config that selects the topic."""
    (line,) = (line for line in said.splitlines() if sentence in line)
    number = int(line.split("mirror.yaml:")[1].split(":")[0])
    return "include" in closing.config_path.read_text().splitlines()[number - 1]


async def is_refused(closing: MirrorProcess, sentence: str) -> None:
    """By `check`, and the same at its start, in one line and with the same status."""
    status, said = await asyncio.to_thread(check, closing)
    assert status == 2, said
    assert says_with_its_line(closing, said, sentence), said
    closing.start()
    assert closing.process is not None
    assert await asyncio.to_thread(closing.process.wait, patience(120)) == 2, closing.log
    last = closing.log.strip().splitlines()[-1]
    assert last.startswith("millrace mirror: mirror.yaml:")
    assert says_with_its_line(closing, last, sentence)


async def opened(stack: AsyncExitStack, addresses: dict[str, str]) -> list[Cluster]:
    """Clients of these clusters, which the stack closes."""
    return [await stack.enter_async_context(Cluster(name, [at])) for name, at in addresses.items()]


@pytest.mark.java
@pytest.mark.kafka
@pytest.mark.pairs
@pytest.mark.safety
def test_two_datacenters_with_local_and_aggregate_clusters_have_every_record_once(
    broker_factory: BrokerFactory, kafka_peer: KafkaPeer, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each datacenter has a local and an aggregate cluster and a mirror of its own; both mirrors have the
    same name and carry both locals under the same topic names, under load all the time, also while one of
    them is killed and away. East is Millrace, west Apache Kafka, so all four pairs are in it. A third mirror,
    from an aggregate to the other datacenter's local cluster, would send everything round."""
    east, east_all = (broker_factory(group_min_session_timeout_ms=1_000).bootstrap for _ in range(2))
    locals_ = {"east": east, "west": kafka_peer.bootstrap}
    aggregates = {
        "east-all": east_all,
        "west-all": request.getfixturevalue("pair_kafka_target").bootstrap,
    }
    topic, name = f"flights-{time.time_ns()}", f"aggregate-{time.time_ns()}"

    def mirror_of(sources: dict[str, str], target: str, address: str, name: str = name) -> MirrorProcess:
        folder, more = tmp_path / f"to-{target}", {"name": name, **SETTINGS}
        return MirrorProcess(folder, address, sources, topics=[topic], target_name=target, **more)

    mirrors = [mirror_of(locals_, target, address) for target, address in aggregates.items()]
    closing = mirror_of({"west-all": aggregates["west-all"]}, "east", east, f"third-{name}")

    async def story() -> None:
        async with AsyncExitStack() as stack:
            sources, targets = [await opened(stack, each) for each in (locals_, aggregates)]
            traffics = [Traffic(each.name, each, topic, seed) for seed, each in enumerate(sources)]
            for traffic in traffics:
                await create_topic(traffic.cluster, topic, PARTITIONS, 1)
                await traffic.send(10)
            for mirror in mirrors:
                status, said = check(mirror)
                assert status == 0, said
                mirror.start()
            flows = [asyncio.create_task(traffic.flow()) for traffic in traffics]

            async def until_grown(target: Cluster, mirror: MirrorProcess) -> None:
                """By what is committed: a position on record is then behind the first records."""
                there = await end_offset(target, topic, 0, read_committed=True)

                async def has_grown() -> bool:
                    return await end_offset(target, topic, 0, read_committed=True) > there + 200

                await until(has_grown, logs_of=[mirror])

            for target, mirror in zip(targets, mirrors, strict=True):
                await until_grown(target, mirror)
            survivor, killed = mirrors
            killed.kill()
            await until_grown(targets[0], survivor)
            killed.start()
            await until_grown(targets[1], killed)
            for traffic in traffics:
                traffic.stop()
            await asyncio.gather(*flows)
            for mirror in mirrors:
                await until(lambda mirror=mirror: arrived(mirror, traffics), logs_of=[mirror])
            await is_refused(
                closing,
                f"records of {topic} would go round: east/{topic} -> west-all/{topic} (mirror {name}) -> "
                f"east/{topic}; exclude the topic here or in mirror {name}",
            )
            # Once both are known to each other's side nothing is refused, and nothing comes twice or back.
            for mirror, target in zip(mirrors, targets, strict=True):
                status, said = check(mirror)
                assert status == 0, said
                assert "topic refused" not in mirror.log
                await check_target(target, traffics, repeats_allowed=False)
            for traffic in traffics:
                for partition, sent in traffic.sent.items():
                    assert await record_bytes(traffic.cluster, topic, partition) == sent

    try:
        asyncio.run(story())
    finally:
        for mirror in (*mirrors, closing):
            mirror.kill()


def between(pair: Pair, source: End, target: End, topics: Sequence[str], **more: object) -> MirrorProcess:
    """A mirror that ends with the test."""
    mirror = MirrorProcess(
        pair.folder / f"between-{len(pair.mirrors)}",
        target.bootstrap,
        {source.name: source.bootstrap},
        topics=topics,
        target_name=target.name,
        **{"name": pair.unique("between"), **more},
    )
    pair.mirrors.append(mirror)
    return mirror


def back(pair: Pair, topics: Sequence[str], **more: object) -> MirrorProcess:
    """A mirror from the pair's target to its source."""
    return between(pair, pair.target, pair.source, topics, **more)


@in_pairs("kafka-millrace", "millrace-millrace")
def test_mirror_that_would_close_a_loop_does_not_start_and_says_why(pair: Pair) -> None:
    async def story() -> None:
        topic = pair.unique("flights")
        there = pair.mirror([topic])
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 1, 1)
            await send(source, topic, 0, one(b"first"))

            async def arrived() -> bool:
                return await end_offset(target, topic, 0) >= 1

            await until(arrived, logs_of=[there])
            name, home = there.settings["name"], f"{pair.source.name}/{topic}"
            await is_refused(
                back(pair, [topic]),
                f"records of {topic} would go round: {home} -> {pair.target.name}/{topic} (mirror {name}) -> "
                f"{home}; exclude the topic here or in mirror {name}",
            )
            assert await end_offset(source, topic, 0) == 1

    asyncio.run(story())


@in_pairs("millrace-kafka", "kafka-millrace")
def test_ring_of_three_clusters_is_not_closed(pair: Pair, second_source: End) -> None:
    """Whoever would close it sees one of the other two alone, which tells of the third."""

    async def story() -> None:
        topic = pair.unique("ring")
        there = pair.mirror([topic])
        onwards = between(pair, pair.target, second_source, [topic])
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 1, 1)
            await send(source, topic, 0, one(b"first"))

            async def arrived_at(where: Cluster) -> bool:
                return await end_offset(where, topic, 0) >= 1

            await until(lambda: arrived_at(target), logs_of=[there])
            onwards.start()
            async with second_source.cluster() as last:
                await until(lambda: arrived_at(last), logs_of=[onwards])
            name, home = onwards.settings["name"], pair.source.name
            await is_refused(
                between(pair, second_source, pair.source, [topic]),
                f"records of {topic} would go round: {home} -> … -> {second_source.name}/{topic} (mirror "
                f"{name}) -> {home}/{topic}; exclude the topic here or in mirror {name}",
            )
            assert await end_offset(source, topic, 0) == 1

    asyncio.run(story())


@in_pairs("millrace-kafka", "kafka-millrace")
def test_topic_that_appears_later_and_would_go_round_is_refused_and_the_rest_goes_on(pair: Pair) -> None:
    async def story() -> None:
        stem = pair.unique("later")
        there = pair.mirror([f"{stem}.there", f"{stem}.both"], start=False)
        other = back(pair, [rf"{stem}\.back", rf"{stem}\.both"])
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, f"{stem}.there", 1, 1)
            await create_topic(target, f"{stem}.back", 1, 1)
            there.start()
            other.start()

            def says() -> str:
                return there.log + other.log

            async def arrive(where: Cluster, topic: str, count: int) -> None:
                async def all_there() -> bool:
                    return len(await values(where, topic)) >= count

                await until(all_there, says)

            await send(source, f"{stem}.there", 0, one(b"1"))
            await send(target, f"{stem}.back", 0, one(b"1"))
            await arrive(target, f"{stem}.there", 1)
            await arrive(source, f"{stem}.back", 1)

            await create_topic(source, f"{stem}.both", 1, 1)
            await send(source, f"{stem}.both", 0, one(b"once"))
            await arrive(target, f"{stem}.both", 1)

            async def is_refused() -> bool:
                return "topic refused" in other.log

            await until(is_refused, says)

            async def is_shown() -> bool:
                return bool(other.status().get("refused_topics"))

            await until(is_shown, says)
            (refused,) = other.status()["refused_topics"]
            assert refused["topic"] == f"{stem}.both"
            assert f"records of {stem}.both would go round" in refused["reason"]
            # The rest goes on, on both sides, and the topic goes on one way.
            await send(source, f"{stem}.both", 0, one(b"twice"))
            await send(source, f"{stem}.there", 0, one(b"2"))
            await send(target, f"{stem}.back", 0, one(b"2"))
            await arrive(target, f"{stem}.both", 2)
            await arrive(target, f"{stem}.there", 2)
            await arrive(source, f"{stem}.back", 2)
            assert await values(source, f"{stem}.both") == [b"once", b"twice"]
            assert await values(target, f"{stem}.both") == [b"once", b"twice"]
            assert there.status()["refused_topics"] == []

    asyncio.run(story())


@in_pairs("millrace-kafka", "millrace-millrace")
def test_of_two_mirrors_that_begin_against_each_other_at_once_one_goes_on(pair: Pair) -> None:
    async def story() -> None:
        topic = pair.unique("flights")
        there, other = pair.mirror([topic], start=False), back(pair, [topic])
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            for cluster, value in ((source, b"of the source"), (target, b"of the target")):
                await create_topic(cluster, topic, 1, 1)
                await send(cluster, topic, 0, one(value))
            there.start()
            other.start()

            def gave_way(mirror: MirrorProcess) -> bool:
                """It has ended by its check, or it goes on without the topic."""
                assert mirror.process is not None
                status = mirror.process.poll()
                assert status in (None, 2), mirror.log
                return status == 2 or bool(mirror.status().get("refused_topics"))

            async def is_settled() -> bool:
                both = {len(await values(source, topic)), len(await values(target, topic))}
                return both == {1, 2} and gave_way(there) != gave_way(other)

            await until(is_settled, logs_of=[there, other])
            # The one that goes on carries; nothing of it comes back.
            winner, home, away = (other, target, source) if gave_way(there) else (there, source, target)
            await send(home, topic, 0, one(b"later"))

            async def carried() -> bool:
                return len(await values(away, topic)) == 3

            await until(carried, logs_of=[winner])
            assert len(await values(home, topic)) == 2

    asyncio.run(story())


@pytest.mark.long
@in_pairs("millrace-kafka", "kafka-millrace")
def test_mirrors_in_both_directions_with_prefixed_names_carry_each_record_once(pair: Pair) -> None:
    """`{cluster}.{topic}` both ways, and patterns that select the other's copies: each copy would come home
    under a longer name, and go out again, without end."""

    async def story() -> None:
        stem = pair.unique("both-ways")
        patterns, naming = [rf"(.*\.)?{stem}-\w+"], "{cluster}.{topic}"
        there = MirrorProcess(
            pair.folder / f"there-{len(pair.mirrors)}",
            pair.target.bootstrap,
            {pair.source.name: pair.source.bootstrap},
            topics=patterns,
            target_name=pair.target.name,
            name=pair.unique("there"),
            naming=naming,
        )
        pair.mirrors.append(there)
        other = back(pair, patterns, naming=naming)
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            copies = {
                there: (target, f"{pair.source.name}.{stem}-there"),
                other: (source, f"{pair.target.name}.{stem}-back"),
            }
            await create_topic(source, f"{stem}-there", 1, 1)
            await create_topic(target, f"{stem}-back", 1, 1)
            await send(source, f"{stem}-there", 0, one(b"1"))
            await send(target, f"{stem}-back", 0, one(b"1"))
            there.start()
            other.start()

            async def each_refuses_the_others_copy() -> bool:
                for mirror, sibling in ((there, other), (other, there)):
                    refused = {each["topic"] for each in mirror.status().get("refused_topics", ())}
                    if copies[sibling][1] not in refused:
                        return False
                return True

            await until(each_refuses_the_others_copy, logs_of=[there, other])

            async def each_is_carried() -> bool:
                return all([await values(cluster, topic) for cluster, topic in copies.values()])

            await until(each_is_carried, logs_of=[there, other])
            for cluster, topic in copies.values():
                assert await values(cluster, topic) == [b"1"]
            for cluster, copy in ((source, copies[there][1]), (target, copies[other][1])):
                names = (await cluster.metadata(max_age_ms=0)).topics
                assert not [name for name in names if name.endswith(f".{copy}")]
            # Both are found by `check` as well: whoever is started anew says so.
            for mirror, sibling in ((there, other), (other, there)):
                _, said = check(mirror)
                assert f"records of {copies[sibling][1]} would go round" in said

    asyncio.run(story())
