"""What a broker makes of changes in the cluster: which topics are applied and which removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from millrace.broker.coordination.cluster_watcher import ClusterChanges
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import TopicAssignment
from millrace.broker.replication.partition import PartitionState
from millrace.broker.server.local_replicas import LOGS_MADE_AT_ONCE, LONGEST_RETRY_SECONDS, LocalReplicas
from tests import virtual_clock
from tests.waiting import patience


class Parts:
    """Local replicas with stand-ins that write down what they are told, in `done`."""

    def __init__(self) -> None:
        self.cache = MetadataCache()
        self.done: list[tuple[str, str]] = []
        self.made: dict[str, set[int]] = {}
        self.hosted: set[tuple[str, int]] = set()
        self.announced: list[tuple[str, int]] = []
        self.unopenable: set[int] = set()
        hosted = SimpleNamespace(
            apply_topic=self._apply,
            remove_topic=self._remove,
            partitions_of=lambda topic: sorted(self.made.get(topic, ())),
            partitions=self.hosted,
        )
        replicas: Any = SimpleNamespace(
            hosted=hosted,
            set_replication_throttle=lambda *_: None,
            set_leader_throttle=lambda *_: None,
            on_disk=self._on_disk,
        )
        self.opened: dict[tuple[str, int], object] = {}
        self.offline: dict[tuple[str, int], str] = {}
        logs: Any = SimpleNamespace(
            get=self.opened.get,
            offline=self.offline,
            announce=lambda keys, _topic_id: self.announced.extend(keys),
        )
        session: Any = SimpleNamespace()
        self.local = LocalReplicas(1, session, self.cache, replicas, logs)

    def show(self, topic: str, count: int) -> None:
        """A topic whose partitions are all led here."""
        self.cache.set_assignment(topic, TopicAssignment(uuid4(), dict.fromkeys(range(count), (1,))))
        for number in range(count):
            self.cache.set_state(topic, number, PartitionState(1, 0, (1,), 1), 0)

    async def _apply(self, topic: str, _topic_id: object, states: dict[int, object], *_: object) -> None:
        self.done.append(("apply", topic))
        made = set(states) - self.unopenable
        self.made.setdefault(topic, set()).update(made)
        self.hosted.update((topic, number) for number in made)

    async def _on_disk(self, work: Callable[..., None], *given: Any) -> None:
        work(*given)

    async def _remove(self, topic: str) -> None:
        self.done.append(("remove", topic))


def test_topic_that_was_made_anew_at_once_is_applied_and_not_removed() -> None:
    async def scenario() -> list[tuple[str, str]]:
        parts = Parts()
        # Deleted and made again before this broker came to look at it.
        parts.cache.set_assignment("t", TopicAssignment(uuid4(), {0: (1,)}))
        parts.local.changed(ClusterChanges(topics={"t"}, removed_topics={"t"}))
        await parts.local.apply()
        return parts.done

    assert asyncio.run(scenario()) == [("apply", "t")]


def test_deleted_topic_is_removed() -> None:
    async def scenario() -> list[tuple[str, str]]:
        parts = Parts()
        parts.local.changed(ClusterChanges(removed_topics={"t"}))
        await parts.local.apply()
        return parts.done

    assert asyncio.run(scenario()) == [("remove", "t")]


def test_logs_that_the_start_has_opened_are_taken_over_in_one_go() -> None:
    """Only making a log takes time; gone through a few at a time, a thousand would be gone through often."""

    async def scenario() -> list[tuple[str, str]]:
        parts = Parts()
        count = 5 * LOGS_MADE_AT_ONCE
        parts.show("t", count)
        parts.opened.update({("t", number): object() for number in range(count)})
        parts.local.changed(ClusterChanges(topics={"t"}))
        await parts.local.apply()
        assert parts.made["t"] == set(range(count))
        return parts.done

    assert asyncio.run(scenario()) == [("apply", "t")]


def test_a_large_new_topic_does_not_hold_up_the_leaders_of_others() -> None:
    """Its logs are made a few at a time; those that cannot be made are tried once, and all others are."""

    async def scenario() -> Parts:
        parts = Parts()
        parts.unopenable = set(range(LOGS_MADE_AT_ONCE + 3))
        parts.show("large", 5 * LOGS_MADE_AT_ONCE)
        parts.show("small", 1)
        parts.local.changed(ClusterChanges(topics={"large"}))
        parts.local.changed(ClusterChanges(topics={"small"}))
        await asyncio.wait_for(parts.local.apply(), patience())
        return parts

    parts = asyncio.run(scenario())
    order = [topic for what, topic in parts.done if what == "apply"]
    assert order.index("small") <= 1
    assert order.count("large") == 5
    assert parts.made["large"] == set(range(5 * LOGS_MADE_AT_ONCE)) - parts.unopenable
    assert parts.local.is_applied("large")
    assert parts.announced == [("large", number) for number in range(5 * LOGS_MADE_AT_ONCE)]


def test_what_changes_while_logs_are_made_is_applied_to_those_that_are_left() -> None:
    async def scenario() -> Parts:
        parts = Parts()
        count = 5 * LOGS_MADE_AT_ONCE
        parts.show("t", count)
        topic_id = parts.cache.topics["t"].topic_id
        apply, rounds = parts.local._replicas.hosted.apply_topic, 0

        async def applied(*given: Any) -> None:
            nonlocal rounds
            rounds += 1
            await apply(*given)
            assert not parts.local.is_applied("t")
            if rounds == 2:  # the last log goes elsewhere, and nobody has said so yet
                moved = dict.fromkeys(range(count), (1,)) | {count - 1: (2,)}
                parts.cache.set_assignment("t", TopicAssignment(topic_id, moved))
            elif rounds == 3:  # there are two more now
                grown = dict.fromkeys(range(count + 2), (1,)) | {count - 1: (2,)}
                parts.cache.set_assignment("t", TopicAssignment(topic_id, grown))
                for number in range(count, count + 2):
                    parts.cache.set_state("t", number, PartitionState(1, 0, (1,), 1), 0)
                parts.local.changed(ClusterChanges(topics={"t"}))

        parts.local._replicas.hosted.apply_topic = applied  # type: ignore[method-assign]
        parts.local.changed(ClusterChanges(topics={"t"}))
        await asyncio.wait_for(parts.local.apply(), patience())
        return parts

    parts = asyncio.run(scenario())
    count = 5 * LOGS_MADE_AT_ONCE
    assert parts.made["t"] == {*range(count - 1), count, count + 1}
    assert parts.local.is_applied("t")


def test_a_topic_is_applied_once_no_log_of_it_is_left_to_be_made() -> None:
    async def scenario() -> Parts:
        parts = Parts()
        parts.show("large", 3 * LOGS_MADE_AT_ONCE)
        parts.show("small", 1)
        apply = parts.local._replicas.hosted.apply_topic

        async def applied(topic: str, *given: Any) -> None:
            await apply(topic, *given)
            if topic == "small":
                assert not parts.local.is_applied("large"), "there are logs to be made"
                # By now they are there, whoever has made them.
                parts.opened.update({("large", number): object() for number in range(3 * LOGS_MADE_AT_ONCE)})
                parts.local.changed(ClusterChanges(topics={"large"}))

        parts.local._replicas.hosted.apply_topic = applied  # type: ignore[method-assign]
        parts.local.changed(ClusterChanges(topics={"large"}))
        parts.local.changed(ClusterChanges(topics={"small"}))
        await asyncio.wait_for(parts.local.apply(), patience())
        return parts

    parts = asyncio.run(scenario())
    assert [topic for _, topic in parts.done] == ["large", "small", "large", "large"], (
        "some of its logs, then all"
    )
    assert parts.made["large"] == set(range(3 * LOGS_MADE_AT_ONCE))
    assert parts.local.is_applied("large")


def test_logs_are_made_also_while_topics_change_all_the_time() -> None:
    """Another one, and the very topic, some of whose logs cannot be opened."""

    async def scenario() -> Parts:
        parts = Parts()
        count = 5 * LOGS_MADE_AT_ONCE
        parts.show("large", count)
        parts.show("busy", count)
        parts.unopenable = set(range(3 * LOGS_MADE_AT_ONCE))
        parts.offline.update(
            {(topic, number): "" for topic in ("large", "busy") for number in parts.unopenable}
        )
        apply = parts.local._replicas.hosted.apply_topic
        made = {number for number in range(count) if number not in parts.unopenable}

        async def applied(topic: str, *given: Any) -> None:
            await apply(topic, *given)
            if (parts.made["large"], parts.made.get("busy")) != (made, made):
                assert len(parts.done) < 100, "nothing else is made"
                parts.local.changed(ClusterChanges(topics={"busy"}))

        parts.local._replicas.hosted.apply_topic = applied  # type: ignore[method-assign]
        parts.local.changed(ClusterChanges(topics={"large"}))
        await asyncio.wait_for(parts.local.apply(), patience())
        return parts

    parts = asyncio.run(scenario())
    assert parts.local.is_applied("large") and parts.local.is_applied("busy")


def test_what_could_not_be_made_is_tried_again_and_what_is_offline_is_not() -> None:
    """A disk without room refuses a new log for now; nothing in the cluster changes when there is room."""

    async def scenario() -> tuple[Parts, list[tuple[str, str]], list[tuple[str, str]]]:
        parts = Parts()
        parts.show("t", 2)
        parts.unopenable = {0, 1}
        following = asyncio.create_task(parts.local.follow())
        parts.local.changed(ClusterChanges(topics={"t"}))
        await asyncio.sleep(0.5)
        assert parts.done == [("apply", "t")]
        assert parts.local.is_applied("t"), "who waits for the topic does not wait for the disk"
        parts.local.changed(ClusterChanges())
        await asyncio.sleep(10 * LONGEST_RETRY_SECONDS)
        without_room = list(parts.done)
        parts.unopenable, parts.offline["t", 1] = {1}, "its disk has failed"
        await asyncio.sleep(LONGEST_RETRY_SECONDS)
        with_room = list(parts.done)
        await asyncio.sleep(10 * LONGEST_RETRY_SECONDS)
        following.cancel()
        return parts, without_room, with_room

    parts, without_room, with_room = virtual_clock.run(scenario())
    assert 10 <= len(without_room) <= 16, "with growing pauses"
    assert len(with_room) == len(without_room) + 1
    assert parts.made["t"] == {0}
    assert parts.done == with_room
