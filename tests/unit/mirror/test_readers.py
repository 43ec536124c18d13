"""Sources that come and go while a worker runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.delivery.beginnings import SeenTopic
from millrace.mirror.sources.fetch_memory import FetchBudget
from millrace.mirror.sources.readers import Readers
from tests.unit.mirror.source_stage import OLD
from tests.waiting import patience
from tests.waiting import until_async as until


def config_of(*names: str, **settings: Any) -> MirrorConfig:
    topics = {"include": ["t"]}
    sources = [
        {"cluster": name, "bootstrap": [f"127.0.0.1:{port}"], "topics": topics}
        for port, name in enumerate(names, 2)
    ]
    target = {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]}
    return parse_config({"name": "aggregate", "target": target, "sources": sources, **settings})


def readers_of(config: MirrorConfig, *names: str) -> Readers:
    async def nothing(*_: object) -> None: ...

    made = Readers(config, FetchBudget(1 << 20), lambda: 0, nothing, nothing)
    for name in names:
        add(made, config, name)
    return made


def add(readers: Readers, config: MirrorConfig, name: str) -> None:
    source = config.source(name)
    assert source is not None
    readers.add(source, Cluster(name, ["127.0.0.1:1"], request_timeout_ms=100))


def test_sources_are_read_from_the_start_or_from_when_they_come_until_they_go() -> None:
    async def story() -> None:
        config = config_of("ewr", "jfk")
        readers = readers_of(config, "ewr")
        async with asyncio.timeout(patience()), asyncio.TaskGroup() as tasks:
            readers.start(tasks)
            add(readers, config, "jfk")
            assert list(readers) == ["ewr", "jfk"]
            await until(lambda: all(each.failure for each in readers.values()), lambda: "nobody has looked")
            for name in list(readers):
                await readers.remove(name)
        assert not readers, "and what read them has ended, or the group of tasks would not"

    asyncio.run(story())


def test_source_that_comes_later_has_the_settings_of_then() -> None:
    readers = readers_of(config_of("ewr"), "ewr")
    later = config_of("ewr", "jfk", discovery_interval_ms=77_000, fetch={"max_wait_ms": 7})
    readers.take_config(later)
    add(readers, later, "jfk")
    assert {each._discovery_interval_ms for each in readers.values()} == {77_000}
    assert {each._fetch_config.max_wait_ms for each in readers.values()} == {7}


def test_what_is_seen_is_what_is_to_be_carried() -> None:
    readers = readers_of(config_of("ewr"), "ewr")
    assert readers["ewr"].seen_topics() == {}
    partitions = dict.fromkeys(range(3))
    topics = {
        name: SimpleNamespace(name=name, internal=False, partitions=partitions, topic_id=OLD)
        for name in ("t", "u")
    }
    view: Any = SimpleNamespace(topics=topics)
    readers["ewr"].view = view
    assert readers["ewr"].seen_topics() == {"t": SeenTopic(3, OLD)}
