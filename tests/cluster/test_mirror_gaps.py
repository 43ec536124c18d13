"""What cannot be carried is written down with exact offsets, and skipped only where the policy says so."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.client.admin import alter_configs, create_topic, delete_records, delete_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_process import MirrorProcess, end_offset, send, until
from tests.servers import BrokerProcess

pytestmark = pytest.mark.java

# Retention is on in these tests: records of another year would not stay.
NOW_MS = int(time.time() * 1000)

BrokerFactory = Callable[..., BrokerProcess]


@pytest.fixture
def mirror(broker_factory: BrokerFactory, tmp_path: Path) -> Iterator[Callable[..., MirrorProcess]]:
    started: list[MirrorProcess] = []

    def start(source: BrokerProcess, target: BrokerProcess, **gaps: str) -> MirrorProcess:
        folder = tmp_path / f"mirror-{len(started)}"
        process = MirrorProcess(folder, target.bootstrap, {"ewr": source.bootstrap}, gaps=gaps)
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.kill()


def one(value: bytes) -> bytearray:
    return build_batch([Record(b"k", value, timestamp_ms=NOW_MS)])


async def values(cluster: Cluster, topic: str) -> list[bytes | None]:
    return [record.value async for record in read_topic_to_end(cluster, topic)]


async def gap_events(cluster: Cluster) -> list[dict[str, Any]]:
    try:
        return [
            json.loads(record.value or b"")
            async for record in read_topic_to_end(cluster, "millrace.audit")
            if (record.key or b"").startswith(b"gap/")
        ]
    except KafkaError:
        return []


async def carried(target: Cluster, count: int) -> bool:
    return await end_offset(target, "flights", 0) >= count


def test_expired_stretch_is_skipped_by_policy_with_exact_offsets(
    broker_factory: BrokerFactory, mirror: Callable[..., MirrorProcess]
) -> None:
    ewr, agg = broker_factory(), broker_factory()

    async def story() -> None:
        async with Cluster("ewr", [ewr.bootstrap]) as source, Cluster("agg", [agg.bootstrap]) as target:
            await create_topic(source, "flights", 1, 1)
            await send(source, "flights", 0, one(b"0"))
            process = mirror(ewr, agg, expired="skip")
            await until(lambda: carried(target, 1), lambda: process.log)
            assert process.terminate() == 0, process.log
            for number in range(1, 10):
                await send(source, "flights", 0, one(b"%d" % number))
            await delete_records(source, {("flights", 0): 7})
            process = mirror(ewr, agg, expired="skip")
            await until(lambda: carried(target, 4), lambda: process.log)
            assert await values(target, "flights") == [b"0", b"7", b"8", b"9"]
            (event,) = await gap_events(target)
            assert {key: event[key] for key in ("type", "mirror", "source", "topic", "partition")} == {
                "type": "gap",
                "mirror": "aggregate",
                "source": "ewr",
                "topic": "flights",
                "partition": 0,
            }
            assert (event["class"], event["from"], event["to"]) == ("expired", 1, 7)

    asyncio.run(story())


def test_recreated_topic_stops_by_default_and_nothing_of_it_is_carried(
    broker_factory: BrokerFactory, mirror: Callable[..., MirrorProcess]
) -> None:
    ewr, agg = broker_factory(), broker_factory()

    async def story() -> None:
        async with Cluster("ewr", [ewr.bootstrap]) as source, Cluster("agg", [agg.bootstrap]) as target:
            await create_topic(source, "flights", 1, 1)
            await send(source, "flights", 0, one(b"old"))
            process = mirror(ewr, agg)
            await until(lambda: carried(target, 1), lambda: process.log)
            assert process.terminate() == 0, process.log
            await delete_topic(source, "flights")

            async def is_gone() -> bool:
                return "flights" not in (await source.metadata(max_age_ms=0)).topics

            await until(is_gone, lambda: "the topic stays")
            await create_topic(source, "flights", 1, 1)
            for _ in range(3):
                await send(source, "flights", 0, one(b"new"))
            process = mirror(ewr, agg)

            async def stopped() -> bool:
                states = [each["state"] for each in process.status().get("partitions", [])]
                return states == ["stopped"] and bool(await gap_events(target))

            await until(stopped, lambda: process.log)
            assert process.status()["partitions"][0]["gap"]["class"] == "recreated"
            assert 'millrace_mirror_open_gaps{source="ewr"} 1.0' in process.get("/metrics")[1]
            assert [event["class"] for event in await gap_events(target)] == ["recreated"]
            assert await values(target, "flights") == [b"old"]

    asyncio.run(story())


def test_record_over_the_target_limit_is_named_and_its_neighbours_are_carried(
    broker_factory: BrokerFactory, mirror: Callable[..., MirrorProcess]
) -> None:
    ewr, agg = broker_factory(), broker_factory()

    async def story() -> None:
        async with Cluster("ewr", [ewr.bootstrap]) as source, Cluster("agg", [agg.bootstrap]) as target:
            for cluster in (source, target):
                await create_topic(cluster, "flights", 1, 1)
            await alter_configs(target, "flights", {"max.message.bytes": "1000"})
            sizes = [10, 10, 5_000, 10]
            records = [
                Record(b"k", bytes([65 + index]) * size, timestamp_ms=NOW_MS)
                for index, size in enumerate(sizes)
            ]
            await send(source, "flights", 0, build_batch(records))
            await send(source, "flights", 0, one(b"after"))
            process = mirror(ewr, agg, too_large="skip")
            await until(lambda: carried(target, 4), lambda: process.log)
            assert await values(target, "flights") == [b"A" * 10, b"B" * 10, b"D" * 10, b"after"]
            (event,) = await gap_events(target)
            assert (event["class"], event["from"], event["to"]) == ("too_large", 2, 3)

    asyncio.run(story())


@pytest.mark.parametrize("killed", ["source", "target"])
def test_broker_killed_in_mid_flow_costs_nothing(
    broker_factory: BrokerFactory, mirror: Callable[..., MirrorProcess], killed: str
) -> None:
    ewr, agg = broker_factory(), broker_factory()
    broker = ewr if killed == "source" else agg

    async def story() -> None:
        async with Cluster("ewr", [ewr.bootstrap]) as source, Cluster("agg", [agg.bootstrap]) as target:
            await create_topic(source, "flights", 1, 1)
            process = mirror(ewr, agg)

            async def feed() -> None:
                for number in range(600):
                    await send(source, "flights", 0, one(b"%d" % number))

            feeding = asyncio.create_task(feed())
            await until(lambda: carried(target, 50), lambda: process.log)
            broker.kill()
            await asyncio.sleep(0.5)
            await asyncio.to_thread(broker.start)
            await feeding
            end = await end_offset(source, "flights", 0)
            await until(lambda: carried(target, end), lambda: process.log)
            # Not the numbers 0..599: this test's own producer repeats what it is not sure of.
            assert await values(target, "flights") == await values(source, "flights")

    asyncio.run(story())
