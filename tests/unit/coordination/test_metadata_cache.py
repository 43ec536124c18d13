"""The picture of the cluster."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import TopicAssignment
from millrace.broker.replication.partition import NO_LEADER, PartitionState


def cache_with(topic_id: uuid.UUID) -> MetadataCache:
    cache = MetadataCache()
    cache.set_assignment("t", TopicAssignment(topic_id, {0: (1,)}))
    return cache


@pytest.mark.parametrize(("epoch", "version"), [(2, 4), (2, 6), (3, 4), (4, 4)])
def test_state_of_an_older_epoch_or_version_is_ignored(epoch: int, version: int) -> None:
    cache = cache_with(uuid.uuid4())
    assert cache.set_state("t", 0, PartitionState(1, 3, (1,), 1), 5)
    assert not cache.set_state("t", 0, PartitionState(2, epoch, (2,), 1), version)
    partition = cache.partition("t", 0)
    assert partition is not None
    assert (partition.leader, partition.state_version) == (1, 5)


def test_states_that_come_together_are_news_or_not_each_for_itself() -> None:
    topic_id = uuid.uuid4()
    cache = cache_with(topic_id)
    cache.set_assignment("t", TopicAssignment(topic_id, dict.fromkeys(range(3), (1, 2))))
    cache.set_state("t", 0, PartitionState(1, 3, (1,), 1), 5)
    new, old = PartitionState(2, 4, (2,), 1), PartitionState(2, 2, (2,), 1)
    assert cache.set_states("t", {0: (old, 4), 1: (new, 6), 9: (new, 6)})
    info = cache.topic("t")
    assert info is not None
    found = [(part.leader, part.leader_epoch, part.state_version) for part in info.partitions.values()]
    assert found == [(1, 3, 5), (2, 4, 6), (NO_LEADER, -1, -1)]
    assert not cache.set_states("t", {0: (old, 4)})
    assert cache.topic("t") is info
    assert cache.set_states("t", {0: (PartitionState(1, 3, (1, 2), 1), 5)})  # no older than what is known


def test_topic_that_is_moving_when_it_is_first_seen_is_shown_so() -> None:
    cache = MetadataCache()
    cache.set_assignment("t", TopicAssignment(uuid.uuid4(), {0: (1, 2)}, {0: (2,)}, {0: (1,)}))
    partition = cache.partition("t", 0)
    assert partition is not None
    assert (partition.replicas, partition.adding, partition.removing) == ((1, 2), (2,), (1,))


def test_state_of_an_unknown_partition_is_ignored() -> None:
    cache = cache_with(uuid.uuid4())
    assert not cache.set_state("t", 9, PartitionState(1, 0, (1,), 1), 0)
    assert not cache.set_state("other", 0, PartitionState(1, 0, (1,), 1), 0)


def test_topic_made_again_under_its_old_name_keeps_nothing() -> None:
    first, second = uuid.uuid4(), uuid.uuid4()
    cache = cache_with(first)
    cache.set_config("t", {"retention.ms": "1"})
    cache.set_state("t", 0, PartitionState(1, 3, (1,), 1), 5)
    cache.set_assignment("t", TopicAssignment(second, {0: (1,)}))
    info = cache.topic("t")
    assert info is not None
    assert (info.config, info.partitions[0].state) == ({}, None)
    assert (cache.name_of(first), cache.name_of(second)) == (None, "t")


def test_widened_topic_keeps_the_states_it_had() -> None:
    topic_id = uuid.uuid4()
    cache = cache_with(topic_id)
    cache.set_state("t", 0, PartitionState(1, 3, (1,), 1), 5)
    cache.set_assignment("t", TopicAssignment(topic_id, {0: (1,), 1: (2,)}))
    first, second = cache.partition("t", 0), cache.partition("t", 1)
    assert first is not None and second is not None
    assert (first.leader_epoch, second.state) == (3, None)


def test_waiter_wakes_when_its_condition_holds_and_not_before() -> None:
    async def scenario() -> None:
        cache = MetadataCache()
        waiting = asyncio.ensure_future(cache.changed(lambda: "t" in cache.topics, 5_000))
        await asyncio.sleep(0)
        cache.announce()
        await asyncio.sleep(0)
        assert not waiting.done()
        cache.set_assignment("t", TopicAssignment(uuid.uuid4(), {}))
        cache.announce()
        assert await waiting
        assert not await cache.changed(lambda: False, 1)

    asyncio.run(scenario())
