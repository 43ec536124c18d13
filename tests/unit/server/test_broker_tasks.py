"""What the broker makes of changes in the cluster, and of its own tasks that fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from millrace.broker.config import load_config
from millrace.broker.coordination.cluster_watcher import ClusterChanges
from millrace.broker.coordination.paths import TopicAssignment
from millrace.broker.server.broker import Broker

CONFIG = {"id": 1, "listen": "127.0.0.1:9092", "zookeeper": "127.0.0.1:2181/dc1", "data": ["d"]}


def _broker() -> Any:
    """A broker that was not started, with stand-ins for the parts that this is about."""
    broker: Any = Broker(load_config(None, CONFIG))
    done: list[tuple[str, str]] = []

    async def forget_topics(topics: set[str]) -> None:
        done.extend(("forget", topic) for topic in topics)

    async def apply_topic(topic: str, *_: object) -> None:
        done.append(("apply", topic))

    async def remove_topic(topic: str) -> None:
        done.append(("remove", topic))

    broker._groups = SimpleNamespace(forget_topics=forget_topics)
    broker._replicas = SimpleNamespace(apply_topic=apply_topic, remove_topic=remove_topic)
    broker._controller = SimpleNamespace(wake=lambda: None)
    broker.done = done
    return broker


def test_offsets_of_a_deleted_topic_do_not_pass_to_one_made_at_once_in_its_name() -> None:
    async def scenario() -> Any:
        broker = _broker()
        # Deleted and made again before this broker came to look at it.
        broker._cache.set_assignment("t", TopicAssignment(uuid4(), {0: (1,)}))
        broker._on_cluster_changes(ClusterChanges(topics={"t"}, removed_topics={"t"}))
        await broker._apply_topics()
        broker._on_cluster_changes(ClusterChanges(topics={"t"}))
        await broker._apply_topics()
        return broker.done

    assert asyncio.run(scenario()) == [("forget", "t"), ("apply", "t"), ("apply", "t")]


def test_deleted_topic_is_removed_and_forgotten() -> None:
    async def scenario() -> Any:
        broker = _broker()
        broker._on_cluster_changes(ClusterChanges(removed_topics={"t"}))
        await broker._apply_topics()
        return broker.done

    assert set(asyncio.run(scenario())) == {("forget", "t"), ("remove", "t")}


def test_task_of_a_part_that_fails_ends_the_broker() -> None:
    async def fail() -> None:
        raise RuntimeError("on purpose")

    async def scenario() -> None:
        broker = _broker()
        broker._watch(asyncio.get_running_loop().create_task(fail()))
        await asyncio.wait_for(broker.serve_until_stopped(), 5)

    with pytest.raises(RuntimeError, match="on purpose"):
        asyncio.run(scenario())
