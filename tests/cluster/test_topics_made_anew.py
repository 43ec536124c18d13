"""Topics that come, go and come again in a real ZooKeeper: what was meant for one never reaches another of
its name, and two who make it at once do not mix their settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from uuid import uuid4

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.controller_client import ControllerClient, NewTopic
from millrace.broker.coordination.reassignments import Reassignments
from millrace.broker.coordination.session import Operation, VersionConflict
from millrace.broker.errors import (
    InvalidConfig,
    InvalidPartitions,
    RequestTimedOut,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from millrace.broker.replication.partition import PartitionState
from millrace.broker.server.topic_settings import DELETE, SET, Change, increments, replacement
from millrace.broker.storage.log_config import UNREADABLE, LogConfig
from tests.cluster.zookeeper_cluster import BROKER, Coordination, story
from tests.servers import ZooKeeper

pytestmark = pytest.mark.java

KEPT = {"retention.ms": "-1"}
ONE_PARTITION = {0: (BROKER,)}
LED = PartitionState(BROKER, 0, (BROKER,), 1)


async def made_anew(cluster: Coordination, config: dict[str, str]) -> None:
    """The whole way: the controller removes topic "t", somebody makes it again."""
    await cluster.ask_for_removal("t", await cluster.topic_id("t"))
    await cluster.carry_out(["t"])
    await cluster.make("t", ONE_PARTITION, config, state=LED)


def before_commit(cluster: Coordination, act: Callable[[], Awaitable[None]]) -> None:
    """Just before the session's next transaction."""
    commit = cluster.session.commit

    async def later(operations: Sequence[Operation]) -> None:
        cluster.session.commit = commit  # type: ignore[method-assign]
        await act()
        await commit(operations)

    cluster.session.commit = later  # type: ignore[method-assign]


# -- coming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
def test_who_comes_second_changes_no_settings_of_the_topic(zookeeper: ZooKeeper, is_first: bool) -> None:
    """A producer's Metadata makes a topic by the defaults beside whoever makes it with settings."""

    async def told(cluster: Coordination) -> None:
        async def other() -> None:
            await cluster.make("t", ONE_PARTITION, KEPT)

        if is_first:
            await other()
        else:
            before_commit(cluster, other)
        with pytest.raises(TopicAlreadyExists):
            await cluster.client.create_topic(NewTopic("t"), 0)
        assert await cluster.settings("t") == KEPT

    story(zookeeper, told)


def test_topic_and_settings_come_in_one_transaction(zookeeper: ZooKeeper) -> None:
    async def told(cluster: Coordination) -> None:
        with pytest.raises(RequestTimedOut, match="accepted"):
            await cluster.client.create_topic(NewTopic("t", config=KEPT), 0)
        topic = await cluster.session.get(paths.topic_path("t"))
        settings = await cluster.session.get(paths.topic_config_path("t"))
        assert topic.created_zxid == settings.created_zxid
        assert paths.decode_config(settings.data) == KEPT

    story(zookeeper, told)


def test_settings_that_were_left_without_a_topic_are_not_the_next_ones(zookeeper: ZooKeeper) -> None:
    async def told(cluster: Coordination) -> None:
        left = paths.encode_config({"cleanup.policy": "compact"})
        await cluster.session.create(paths.topic_config_path("t"), left)
        with pytest.raises(RequestTimedOut, match="accepted"):
            await cluster.client.create_topic(NewTopic("t", config=KEPT), 0)
        assert await cluster.settings("t") == KEPT

    story(zookeeper, told)


# -- going -----------------------------------------------------------------------------------------


def test_a_late_request_to_delete_spares_the_topic_that_was_made_anew(zookeeper: ZooKeeper) -> None:
    async def told(cluster: Coordination) -> None:
        old = await cluster.make("t", ONE_PARTITION, state=LED)
        await cluster.ask_for_removal("t", old)
        await cluster.carry_out(["t"])
        assert not await cluster.session.exists(paths.topic_path("t"))
        await cluster.make("t", ONE_PARTITION, KEPT, state=LED)
        await cluster.ask_for_removal("t", old)
        await cluster.carry_out(["t"])
        assert not await cluster.session.exists(paths.delete_topic_path("t")), "the request stands for ever"
        assert await cluster.session.exists(paths.state_path("t", 0))
        assert await cluster.settings("t") == KEPT

    story(zookeeper, told)


def test_a_request_for_a_topic_that_is_gone_takes_no_settings_of_the_next(zookeeper: ZooKeeper) -> None:
    """The next one is made after the controller's look at the topic, and before any at its settings."""

    async def told(cluster: Coordination) -> None:
        await cluster.session.create(paths.delete_topic_path("t"))
        exists = cluster.session.exists

        async def come() -> None:
            if not await exists(paths.topic_path("t")):
                await cluster.make("t", ONE_PARTITION, KEPT)

        async def after_come(path: str, watch: Callable[[], None] | None = None) -> bool:
            if path == paths.topic_config_path("t"):
                await come()
            return await exists(path, watch)

        await cluster.controller._stand_for_election()
        before_commit(cluster, come)
        cluster.session.exists = after_come  # type: ignore[method-assign]
        await cluster.carry_out(["t"])
        assert await cluster.settings("t") == KEPT

    story(zookeeper, told)


def test_a_topic_that_changed_since_the_controller_looked_is_looked_at_again(zookeeper: ZooKeeper) -> None:
    """Whoever has changed it may have made another of it."""

    async def told(cluster: Coordination) -> None:
        await cluster.ask_for_removal("t", await cluster.make("t", ONE_PARTITION))
        path = paths.topic_path("t")
        other = paths.encode_topic(paths.TopicAssignment(uuid4(), ONE_PARTITION))

        async def change() -> None:
            await cluster.session.set(path, other)

        await cluster.controller._stand_for_election()
        before_commit(cluster, change)
        with pytest.raises(VersionConflict):
            await cluster.carry_out(["t"])
        await cluster.carry_out(["t"])
        assert (await cluster.session.get(path)).data == other

    story(zookeeper, told)


@pytest.mark.parametrize("data", [b"", b"null", b"{not json"])
def test_a_mark_without_an_id_as_other_tools_set_it_means_the_topic_of_this_name(
    zookeeper: ZooKeeper, data: bytes
) -> None:
    async def told(cluster: Coordination) -> None:
        await cluster.make("t", ONE_PARTITION, state=LED)
        await cluster.session.create(paths.delete_topic_path("t"), data)
        await cluster.carry_out(["t"])
        for path in (paths.topic_path("t"), paths.topic_config_path("t"), paths.delete_topic_path("t")):
            assert not await cluster.session.exists(path)

    story(zookeeper, told)


def test_a_mark_that_names_a_topic_nobody_can_tell_is_dropped(zookeeper: ZooKeeper) -> None:
    async def told(cluster: Coordination) -> None:
        await cluster.make("t", ONE_PARTITION)
        await cluster.session.create(paths.delete_topic_path("t"), b'{"version":1,"topic_id":"?"}')
        await cluster.carry_out(["t"])
        assert await cluster.session.exists(paths.topic_path("t"))
        assert not await cluster.session.exists(paths.delete_topic_path("t"))

    story(zookeeper, told)


def test_who_asks_for_a_deletion_names_the_topic_that_stands(zookeeper: ZooKeeper) -> None:
    """Also over a mark that names the one before, and which the controller would only drop."""

    async def told(cluster: Coordination) -> None:
        topic_id = await cluster.make("t", ONE_PARTITION)
        await cluster.show("t")
        with pytest.raises(UnknownTopicId):
            await cluster.client.delete_topic("t", 0, uuid4())
        assert not await cluster.session.exists(paths.delete_topic_path("t"))
        await cluster.ask_for_removal("t", uuid4())
        with pytest.raises(RequestTimedOut, match="not gone yet"):
            await cluster.client.delete_topic("t", 0, topic_id)
        mark = await cluster.session.get(paths.delete_topic_path("t"))
        assert paths.decode_deletion(mark.data) == topic_id
        await cluster.carry_out(["t"])
        assert not await cluster.session.exists(paths.topic_path("t"))
        with pytest.raises(UnknownTopicOrPartition):
            await cluster.client.delete_topic("t", 0)

    story(zookeeper, told)


def test_a_deletion_waits_until_the_topic_that_it_names_is_shown(zookeeper: ZooKeeper) -> None:
    """A picture that still shows the one before would else tell at once that the new one is gone."""

    async def told(cluster: Coordination) -> None:
        await cluster.make("t", ONE_PARTITION, state=LED)
        await cluster.show("t")
        await made_anew(cluster, KEPT)
        with pytest.raises(RequestTimedOut, match="made anew just now"):
            await cluster.client.delete_topic("t", 0)
        asked = asyncio.create_task(cluster.client.delete_topic("t", 60_000))
        marked = paths.delete_topic_path("t")
        for _ in range(20):
            assert not asked.done() and not await cluster.session.exists(marked)
        await cluster.show("t")
        cluster.cache.announce()
        while not await cluster.session.exists(marked):
            assert not asked.done()
        await cluster.carry_out(["t"])
        assert not asked.done()
        cluster.cache.remove_topic("t")
        cluster.cache.announce()
        await asked

    story(zookeeper, told)


def test_who_hears_that_a_topic_is_gone_already_can_make_it_anew(zookeeper: ZooKeeper) -> None:
    """Another's deletion was quicker, and the picture here does not show it yet."""

    async def told(cluster: Coordination) -> None:
        topic_id = await cluster.make("t", ONE_PARTITION)
        await cluster.show("t")
        await cluster.ask_for_removal("t", topic_id)
        await cluster.carry_out(["t"])
        asked = asyncio.create_task(cluster.client.delete_topic("t", 60_000))
        for _ in range(20):
            assert not await cluster.session.exists(paths.topic_path("t"))
        assert not asked.done()
        cluster.cache.remove_topic("t")
        cluster.cache.announce()
        with pytest.raises(UnknownTopicOrPartition):
            await asked

    story(zookeeper, told)


def test_a_controller_writes_no_states_by_the_picture_of_a_topic_that_it_removed(
    zookeeper: ZooKeeper,
) -> None:
    async def told(cluster: Coordination) -> None:
        await cluster.make("t", ONE_PARTITION)
        await cluster.show("t")
        await cluster.ask_for_removal("t", await cluster.topic_id("t"))
        await cluster.carry_out(["t"])
        await cluster.make("t", ONE_PARTITION)
        await cluster.carry_out([])
        assert not await cluster.session.exists(paths.partitions_path("t"))
        await cluster.show("t")
        await cluster.carry_out([])
        assert await cluster.session.exists(paths.state_path("t", 0)), "the new one is its business again"

    story(zookeeper, told)


# -- changes that are on their way meanwhile -------------------------------------------------------


def test_settings_that_are_altered_while_the_topic_is_made_anew_are_the_new_ones(
    zookeeper: ZooKeeper,
) -> None:
    async def told(cluster: Coordination) -> None:
        await cluster.make("t", ONE_PARTITION, {"cleanup.policy": "compact"}, state=LED)
        await cluster.show("t")
        before_commit(cluster, lambda: made_anew(cluster, KEPT))
        cluster.cache.changed = at_once  # type: ignore[method-assign]
        await cluster.client.alter_topic_config("t", lambda present: {**present, "segment.bytes": "100000"})
        assert await cluster.settings("t") == {**KEPT, "segment.bytes": "100000"}

    story(zookeeper, told)


LARGE = ("segment.bytes", SET, "100000")
ALL_ANEW = [(UNREADABLE, DELETE, None), ("retention.ms", SET, "-1")]


@pytest.mark.parametrize("change", [increments(ALL_ANEW, {}), replacement(KEPT.items())])
def test_settings_that_cannot_be_read_are_mended_by_who_gives_them_all(
    zookeeper: ZooKeeper, change: Change
) -> None:
    """A change of a few would put defaults in the place of the others, which nobody can read."""

    async def told(cluster: Coordination) -> None:
        client = ControllerClient(cluster.session, cluster.cache, LogConfig.from_topic_config)
        await cluster.make("t", ONE_PARTITION, {})
        await cluster.session.set(paths.topic_config_path("t"), b"{not json")
        await cluster.show("t")
        cluster.cache.changed = at_once  # type: ignore[method-assign]
        with pytest.raises(InvalidConfig, match="/config/topics/t in ZooKeeper"):
            await client.alter_topic_config("t", increments([LARGE], {}))
        await client.alter_topic_config("t", change)
        assert await cluster.settings("t") == KEPT

    story(zookeeper, told)


def test_settings_that_were_spoilt_while_they_were_known_are_mended_by_any_change(
    zookeeper: ZooKeeper,
) -> None:
    async def told(cluster: Coordination) -> None:
        client = ControllerClient(cluster.session, cluster.cache, LogConfig.from_topic_config)
        await cluster.make("t", ONE_PARTITION, KEPT)
        await cluster.show("t")
        await cluster.session.set(paths.topic_config_path("t"), b"{not json")
        cluster.cache.changed = at_once  # type: ignore[method-assign]
        await client.alter_topic_config("t", increments([LARGE], {}))
        assert await cluster.settings("t") == {**KEPT, "segment.bytes": "100000"}

    story(zookeeper, told)


def test_settings_that_are_altered_while_the_topic_is_deleted_leave_nothing(zookeeper: ZooKeeper) -> None:
    async def told(cluster: Coordination) -> None:
        await cluster.make("t", ONE_PARTITION, state=LED)
        await cluster.show("t")

        async def gone() -> None:
            await cluster.ask_for_removal("t", await cluster.topic_id("t"))
            await cluster.carry_out(["t"])

        before_commit(cluster, gone)
        with pytest.raises(UnknownTopicOrPartition):
            await cluster.client.alter_topic_config("t", lambda _present: KEPT)
        assert not await cluster.session.exists(paths.topic_config_path("t"))

    story(zookeeper, told)


def test_partitions_and_moves_of_a_topic_do_not_reach_the_one_that_was_made_anew(
    zookeeper: ZooKeeper,
) -> None:
    async def told(cluster: Coordination) -> None:
        await cluster.make("t", {0: (BROKER,), 1: (BROKER,)}, state=LED)
        await cluster.show("t")
        before_commit(cluster, lambda: made_anew(cluster, KEPT))
        with pytest.raises(InvalidPartitions, match="1 partition by now"):
            await cluster.client.create_partitions("t", 3, None, 0)

        await cluster.show("t")
        before_commit(cluster, lambda: made_anew(cluster, KEPT))
        cluster.cache.deleting = frozenset()
        await Reassignments(cluster.session, cluster.cache).alter("t", {0: (BROKER,)}, 0)
        # As it was read, the topic of before would stand here again, with its id.
        made = await cluster.session.get(paths.topic_path("t"))
        shown = cluster.cache.topic("t")
        assert shown is not None and paths.decode_topic(made.data).topic_id != shown.topic_id

    story(zookeeper, told)


async def at_once(_until: Callable[[], bool], _timeout_ms: float) -> bool:
    """Nobody reads this picture: what would be waited for never shows."""
    return True
