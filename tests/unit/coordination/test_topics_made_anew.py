"""A topic comes with its settings, and goes only as the one that was meant: by what is sent to ZooKeeper."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.controller_client import ControllerClient, NewTopic
from millrace.broker.coordination.controller_runner import ControllerRunner
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.coordination.session import (
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    Operation,
    SessionError,
    SetData,
    VersionConflict,
)
from millrace.broker.errors import RequestTimedOut

OWN_ID = 1
TOPIC, MARK = paths.topic_path("t"), paths.delete_topic_path("t")


class Znodes:
    """A session and all that there is, by path. `before_commit` is what others do before a transaction."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.before_commit: Callable[[], None] = lambda: None
        self.put(paths.CONTROLLER_EPOCH, b"2")
        self.put(paths.DELETE_TOPICS, b"")

    def put(self, path: str, data: bytes) -> None:
        known = self.nodes.get(path)
        self.nodes[path] = Node(data, known.version + 1 if known else 0, 0, 1)

    async def get(self, path: str, _watch: object = None) -> Node:
        if path not in self.nodes:
            raise NodeMissing(path)
        return self.nodes[path]

    async def exists(self, path: str, _watch: object = None) -> bool:
        return path in self.nodes

    async def children(self, path: str) -> list[str]:
        raise NodeMissing(path)

    async def commit(self, operations: Sequence[Operation]) -> None:
        self.before_commit()
        for each in operations:
            if isinstance(each, Create):
                if each.path in self.nodes:
                    raise NodeExists(each.path)
            elif each.version not in (-1, (await self.get(each.path)).version):
                raise VersionConflict(each.path)
        for each in operations:
            match each:
                case Create(path, data) | SetData(path, data):
                    self.put(path, data)
                case Delete(path):
                    del self.nodes[path]
                case Check():
                    continue


def test_topic_and_settings_come_in_one_transaction() -> None:
    """Who ends, or loses the connection, between two would leave a topic whose log goes by the defaults."""
    sent: list[list[str]] = []

    async def commit(operations: Sequence[Operation]) -> None:
        sent.append([each.path for each in operations])
        raise SessionError("ConnectionLoss")

    session: Any = Znodes()
    session.commit = commit
    cache = MetadataCache()
    cache.set_broker(BrokerRegistration(OWN_ID, "h", 9092, None))
    client = ControllerClient(session, cache, lambda _: None)
    with pytest.raises(RequestTimedOut, match="ConnectionLoss"):
        asyncio.run(client.create_topic(NewTopic("t", config={"cleanup.policy": "compact"}), 0))
    assert sent == [[TOPIC, paths.topic_config_path("t")]]


def encoded() -> bytes:
    return paths.encode_topic(TopicAssignment(uuid4(), {0: (OWN_ID,)}))


def test_a_topic_that_changed_since_the_controller_looked_is_not_removed() -> None:
    """Whoever has changed it may have made another of it."""
    znodes, other = Znodes(), encoded()
    znodes.put(TOPIC, encoded())
    znodes.put(MARK, b"")
    znodes.before_commit = lambda: znodes.put(TOPIC, other)
    session: Any = znodes
    controller = ControllerRunner(session, MetadataCache(), OWN_ID, lambda: 0)
    controller._epoch_version = 0
    with pytest.raises(VersionConflict):
        asyncio.run(controller._remove_topic("t"))
    assert znodes.nodes[TOPIC].data == other
    znodes.before_commit = lambda: None
    asyncio.run(controller._remove_topic("t"))
    assert not {TOPIC, MARK} & znodes.nodes.keys()
