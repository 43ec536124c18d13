"""A new topic is seen within one discovery interval, which is by default shorter than the 5 s promised."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.errors import ClusterUnreachable
from millrace.mirror.config import parse_config
from millrace.mirror.sources.fetch_memory import FetchBudget
from millrace.mirror.sources.source import SourceReader
from tests import virtual_clock

PROMISED_S = 5.0
CONFIG = parse_config(
    {
        "name": "aggregate",
        "target": {"cluster": "agg", "bootstrap": ["b:1"]},
        "sources": [{"cluster": "ewr", "bootstrap": ["a:1"], "topics": {"include": ["flights.*"]}}],
    }
)


class Source:
    """A cluster whose topics are as the test says."""

    trouble = None
    is_throttled = False
    throttled_ms = 0

    def __init__(self, *topics: str) -> None:
        self.names = list(topics)
        self.is_away = False

    async def metadata(self, *_: object, **__: object) -> Any:
        if self.is_away:
            raise ClusterUnreachable("ewr", "no server answers")
        topics = {
            name: SimpleNamespace(name=name, internal=False, topic_id=UUID(int=7), partitions={})
            for name in self.names
        }
        return SimpleNamespace(cluster_id="c", topics=topics, brokers={})


def test_default_interval_keeps_the_promise() -> None:
    assert CONFIG.discovery_interval_ms / 1000 <= PROMISED_S / 2, "the rest is for its making and sharing out"


@pytest.mark.parametrize("was_away", [False, True])
def test_new_topic_is_seen_within_one_interval(was_away: bool) -> None:
    source, seen = Source("flights"), dict[str, float]()

    async def story() -> None:
        loop = asyncio.get_running_loop()
        found = asyncio.Event()

        async def on_view(reader: SourceReader) -> None:
            for topic in reader.selected_topics():
                seen.setdefault(topic.name, loop.time())
            if "flights.new" in seen:
                found.set()

        async def nothing(*_: object) -> None:
            return None

        cluster: Any = source
        reader = SourceReader(
            CONFIG.sources[0],
            cluster,
            CONFIG.fetch,
            FetchBudget(1 << 20),
            CONFIG.discovery_interval_ms,
            lambda: int(loop.time() * 1000),
            on_view,
            nothing,
        )
        running = loop.create_task(reader.run())
        await asyncio.sleep(0.001)
        assert "flights" in seen
        if was_away:  # for a minute: it is not asked more and more seldom
            source.is_away = True
            await asyncio.sleep(60)
            assert "no server answers" in reader.status()["error"]
            source.is_away = False
        made_at = loop.time()
        source.names.append("flights.new")
        await asyncio.wait_for(found.wait(), 60)
        assert seen["flights.new"] - made_at <= CONFIG.discovery_interval_ms / 1000 + 0.01
        running.cancel()
        await asyncio.wait([running])
        assert (reader.status()["starting"], reader.status()["error"]) == (False, None)

    virtual_clock.run(story())


def test_source_that_has_not_been_asked_is_neither_up_nor_down() -> None:
    cluster: Any = Source()
    view: Any = None
    reader = SourceReader(CONFIG.sources[0], cluster, CONFIG.fetch, FetchBudget(1), 10, lambda: 0, view, view)
    told = {"cluster": "ewr", "connected": False, "starting": True, "error": None}
    assert reader.status() == {**told, "over_quota": False, "throttled_ms": 0}
