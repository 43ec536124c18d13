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
from tests.cluster.mirror_process import MirrorProcess, end_offset, send, until
from tests.conftest import BrokerFactory
from tests.pairs import Pair, in_pairs
from tests.peers.kafka import KafkaPeer

NOW_MS = int(time.time() * 1000)


def one(value: bytes) -> bytearray:
    return build_batch([Record(b"k", value, timestamp_ms=NOW_MS)])


async def values(cluster: Cluster, topic: str) -> list[bytes]:
    try:
        return [record.value or b"" async for record in read_topic_to_end(cluster, topic)]
    except KafkaError:
        return []


@pytest.mark.java
@pytest.mark.kafka
@pytest.mark.pairs
def test_two_datacenters_with_local_and_aggregate_clusters_have_every_record_once(
    broker_factory: BrokerFactory, kafka_peer: KafkaPeer, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Each datacenter has a local and an aggregate cluster and a mirror of its own; both mirrors have the
    same name and carry both locals under the same topic names. East is Millrace, west Apache Kafka, so all
    four pairs are in it."""
    locals_ = {"east": broker_factory().bootstrap, "west": kafka_peer.bootstrap}
    aggregates = {
        "east-all": broker_factory().bootstrap,
        "west-all": request.getfixturevalue("pair_kafka_target").bootstrap,
    }
    topic, name = f"flights-{time.time_ns()}", f"aggregate-{time.time_ns()}"
    mirrors = [
        MirrorProcess(tmp_path / target, address, locals_, topics=[topic], target_name=target, name=name)
        for target, address in aggregates.items()
    ]

    async def story() -> None:
        async with AsyncExitStack() as stack:
            sent: list[bytes] = []
            for local, address in locals_.items():
                source = await stack.enter_async_context(Cluster(local, [address]))
                await create_topic(source, topic, 2, 1)
                for number in range(50):
                    sent.append(f"{local}-{number}".encode())
                    await send(source, topic, number % 2, one(sent[-1]))
            for mirror in mirrors:
                status, said = check(mirror)
                assert status == 0, said
                mirror.start()
            targets = [
                await stack.enter_async_context(Cluster(each, [address]))
                for each, address in aggregates.items()
            ]
            for target, mirror in zip(targets, mirrors, strict=True):

                async def all_there(target: Cluster = target) -> bool:
                    return len(await values(target, topic)) >= len(sent)

                await until(all_there, logs_of=[mirror])
            # Once both are known to each other's side nothing is refused, and nothing comes twice.
            for mirror in mirrors:
                status, said = check(mirror)
                assert status == 0, said
                assert "topic refused" not in mirror.log
            for local, address in locals_.items():
                source = await stack.enter_async_context(Cluster(local, [address]))
                assert len(await values(source, topic)) == 50
            for target in targets:
                assert sorted(await values(target, topic)) == sorted(sent)

    try:
        asyncio.run(story())
    finally:
        for mirror in mirrors:
            mirror.kill()


def back(pair: Pair, topics: Sequence[str], **more: object) -> MirrorProcess:
    """A mirror from the pair's target to its source."""
    mirror = MirrorProcess(
        pair.folder / f"back-{len(pair.mirrors)}",
        pair.source.bootstrap,
        {pair.target.name: pair.target.bootstrap},
        topics=topics,
        target_name=pair.source.name,
        **{"name": pair.unique("back"), **more},
    )
    pair.mirrors.append(mirror)
    return mirror


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
            closing = back(pair, [topic])
            status, said = check(closing)
            name, home = there.settings["name"], f"{pair.source.name}/{topic}"
            sentence = (
                f"records of {topic} would go round: {home} -> {pair.target.name}/{topic} (mirror {name}) -> "
                f"{home}; exclude the topic here or in mirror {name}"
            )
            assert status == 2, said
            assert sentence in said
            (line,) = (line for line in said.splitlines() if sentence in line)
            lines = closing.config_path.read_text().splitlines()
            number = int(line.split("mirror.yaml:")[1].split(":")[0])
            assert "include" in lines[number - 1], (line, lines)
            # The same sentence at start, in one line and with the same status.
            closing.start()
            assert closing.process is not None
            assert await asyncio.to_thread(closing.process.wait, 180) == 2
            last = closing.log.strip().splitlines()[-1]
            assert last.startswith("millrace mirror: mirror.yaml:")
            assert sentence in last
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
