"""What the watcher shows of a cluster, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from millrace.broker.coordination import paths
from millrace.broker.coordination.cluster_watcher import ClusterWatcher
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import TopicAssignment
from millrace.broker.coordination.session import Node, NodeMissing

TOPIC = paths.encode_topic(TopicAssignment(uuid4(), {0: (1,)}))


class Nodes:
    """A session over a few nodes; `before_read` is called with every path that is read."""

    def __init__(self, nodes: dict[str, bytes], before_read: Callable[[str], None]) -> None:
        self._nodes, self._before_read = nodes, before_read

    def on_state(self, _listener: object) -> None:
        return

    async def get(self, path: str, _watch: object = None) -> Node:
        await asyncio.sleep(0)
        self._before_read(path)
        if path not in self._nodes:
            raise NodeMissing(path)
        return Node(self._nodes[path], version=0, owner=0, created_zxid=1)

    async def exists(self, path: str, _watch: object = None) -> bool:
        return path in self._nodes

    async def children(self, path: str, _watch: object = None) -> list[str]:
        return [name.removeprefix(f"{path}/") for name in self._nodes if name.rpartition("/")[0] == path]


def watched(nodes: dict[str, bytes], before_read: Callable[[MetadataCache, str], None]) -> MetadataCache:
    cache = MetadataCache()

    async def read() -> None:
        session: Any = Nodes(nodes, lambda path: before_read(cache, path))
        watcher = ClusterWatcher(session, cache, lambda _changes: None)
        await watcher.start()
        await watcher.stop()

    asyncio.run(read())
    return cache


def test_a_new_topic_is_never_shown_without_its_settings() -> None:
    shown: list[str] = []

    def before_read(cache: MetadataCache, path: str) -> None:
        if path == paths.topic_config_path("t"):
            shown.extend(cache.topics)

    settings = {"cleanup.policy": "compact"}
    cache = watched(
        {paths.topic_path("t"): TOPIC, paths.topic_config_path("t"): paths.encode_config(settings)},
        before_read,
    )
    assert shown == [], "the topic was there before its settings were read"
    topic = cache.topic("t")
    assert topic is not None
    assert dict(topic.config) == settings


def test_a_topic_whose_settings_cannot_be_understood_is_shown_all_the_same() -> None:
    cache = watched(
        {paths.topic_path("t"): TOPIC, paths.topic_config_path("t"): b"{not json"}, lambda *_: None
    )
    assert cache.topic("t") is not None
