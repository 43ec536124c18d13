"""Topics of one source that get one name on the target, between real clusters: never mixed, and said."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import time
from typing import Any

import yaml

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_process import send, until
from tests.pairs import Pair, in_pairs

END_WITHIN_S = 90.0


async def fill(source: Cluster, topic: str, count: int = 10) -> None:
    await create_topic(source, topic, 1, 1)
    now_ms = time.time_ns() // 1_000_000
    await send(source, topic, 0, build_batch([Record(b"k", topic.encode(), (), now_ms)] * count))


async def values(target: Cluster, topic: str) -> list[bytes]:
    try:
        return [record.value or b"" async for record in read_topic_to_end(target, topic)]
    except KafkaError:
        return []


@in_pairs("kafka-millrace", "millrace-kafka")
def test_clash_at_start_carries_nothing_while_a_source_keeps_the_check_waiting(pair: Pair) -> None:
    one, two, mixed = pair.unique("flights"), pair.unique("orders"), pair.unique("mixed")
    mirror = pair.mirror([one, two], start=False, naming={"rename": {one: mixed, two: mixed}})
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and says nothing
        (source,) = mirror.settings["sources"]
        other = {**source, "cluster": "silent", "bootstrap": [f"127.0.0.1:{silent.getsockname()[1]}"]}
        mirror.settings["sources"].append(other)
        mirror.config_path.write_text(yaml.safe_dump(mirror.settings))

        async def story() -> None:
            async with pair.source.cluster() as source, pair.target.cluster() as target:
                await fill(source, one)
                await fill(source, two)
                mirror.start()
                assert mirror.process is not None
                assert await asyncio.to_thread(mirror.process.wait, END_WITHIN_S) == 2, mirror.log
                last = mirror.log.strip().splitlines()[-1]
                words = (
                    rf"mirror\.yaml:\d+: naming: src: topics {one}, {two} would all become {mixed}; give them"
                )
                assert re.search(words, last), last
                assert await values(target, mixed) == []

        asyncio.run(story())


@in_pairs("millrace-kafka", "kafka-millrace")
def test_clash_that_appears_later_is_refused_and_settled_by_a_reload(pair: Pair) -> None:
    old, dup = pair.unique("old"), pair.unique("dup")
    mirror = pair.mirror([old, dup], naming={"rename": {old: dup}})

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:

            async def arrived(wanted: list[bytes]) -> None:
                async def is_there() -> bool:
                    return await values(target, dup) == wanted

                await until(is_there, lambda: f"{mirror.log}\n{mirror.status()}")

            async def refused(*topics: str) -> list[Any]:
                async def said() -> list[Any] | None:
                    found = mirror.status().get("refused_topics", [])
                    return [found] if [each["topic"] for each in found] == list(topics) else None

                return (await until(lambda: said(), logs_of=[mirror]))[0]

            await fill(source, old)
            await arrived([old.encode()] * 10)
            await fill(source, dup)
            (reason,) = await refused(dup)
            assert reason["source"] == pair.source.name
            assert re.match(r"mirror\.yaml:\d+: naming: it would become ", reason["reason"]), reason
            assert f"{old} is carried under that name" in reason["reason"]
            now_ms = time.time_ns() // 1_000_000
            await send(source, old, 0, build_batch([Record(b"k", b"more", (), now_ms)]))
            await arrived([old.encode()] * 10 + [b"more"])
            assert mirror.log.count("topic refused") == 1, mirror.log

            # Somebody says which of them is meant.
            mirror.settings["sources"][0]["topics"] = {"include": [dup]}
            mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
            assert mirror.process is not None
            mirror.process.send_signal(signal.SIGHUP)
            await refused()
            await arrived([old.encode()] * 10 + [b"more"] + [dup.encode()] * 10)

            # And back: again the one that is carried stays.
            mirror.settings["sources"][0]["topics"] = {"include": [dup, old]}
            mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
            mirror.process.send_signal(signal.SIGHUP)
            (reason,) = await refused(old)
            assert f"{dup} is carried under that name" in reason["reason"]

    asyncio.run(story())
