"""Changes of very many partitions: as many transactions as a real ZooKeeper needs, and a refusal where one is
too small for what must be in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from millrace.broker.coordination import controller_client, paths, reassignments, transactions
from millrace.broker.coordination.controller_client import NewTopic
from millrace.broker.coordination.paths import BrokerRegistration
from millrace.broker.coordination.reassignments import Reassignments
from millrace.broker.coordination.session import (
    LARGEST_REQUEST,
    Check,
    Create,
    Operation,
    RequestTooLarge,
    SessionError,
    SetData,
    operation_bytes,
)
from millrace.broker.errors import InvalidConfig, InvalidPartitions, InvalidReplicaAssignment
from millrace.broker.replication.partition import PartitionState
from tests.cluster.zookeeper_cluster import BROKER, Coordination, story
from tests.servers import ZooKeeper

pytestmark = pytest.mark.java

LONG_NAME = "t" * 249
PARTITIONS = 2_800
"""Under the longest name, their states are more than ZooKeeper takes in one request."""

LED = PartitionState(BROKER, 0, (BROKER,), 1)
ARRIVED = PartitionState(BROKER, 0, (2, BROKER), 1)
"""The state of a partition that moves to broker 2, once that has all of it."""

TOO_LONG = {"leader.replication.throttled.replicas": "1:1," * 300_000}


def with_two_brokers(cluster: Coordination) -> None:
    for number in (BROKER, 2):
        cluster.cache.set_broker(BrokerRegistration(number, "h", number))


def test_a_large_topic_gets_its_leaders_and_goes_again(zookeeper: ZooKeeper) -> None:
    """Each step (folders, states, their removal) is more than one request of ZooKeeper's size."""

    async def told(cluster: Coordination) -> None:
        count = 3_300
        topic_id = await cluster.make(LONG_NAME, dict.fromkeys(range(count), (BROKER,)))
        await cluster.show(LONG_NAME)
        made = Create(paths.partition_path(LONG_NAME, 0), b"")
        assert count * operation_bytes(made) > LARGEST_REQUEST
        await cluster.carry_out([])
        assert len(await cluster.session.children(paths.partitions_path(LONG_NAME))) == count
        info = cluster.cache.topic(LONG_NAME)
        assert info is not None and {part.leader for part in info.partitions.values()} == {BROKER}
        await cluster.ask_for_removal(LONG_NAME, topic_id)
        await cluster.carry_out([LONG_NAME])
        assert not await cluster.session.exists(paths.topic_path(LONG_NAME))

    story(zookeeper, told)


def test_all_partitions_of_a_large_topic_arrive_at_once(zookeeper: ZooKeeper) -> None:
    async def told(cluster: Coordination) -> None:
        with_two_brokers(cluster)
        everywhere = dict.fromkeys(range(PARTITIONS), (BROKER,))
        await cluster.make(LONG_NAME, everywhere, state=ARRIVED, to=(2,))
        await cluster.show(LONG_NAME, ARRIVED)
        written = [
            SetData(paths.state_path(LONG_NAME, number), paths.encode_state(ARRIVED)) for number in everywhere
        ]
        assert sum(map(operation_bytes, written)) > LARGEST_REQUEST
        await cluster.carry_out([])
        node = await cluster.session.get(paths.topic_path(LONG_NAME))
        assignment = paths.decode_topic(node.data)
        assert set(assignment.partitions.values()) == {(2,)}
        assert (assignment.adding, assignment.removing) == ({}, {})
        for number in (0, PARTITIONS // 2, PARTITIONS - 1):
            state = paths.decode_state((await cluster.session.get(paths.state_path(LONG_NAME, number))).data)
            assert (state.leader, state.leader_epoch, state.isr) == (2, 1, (2,))

    story(zookeeper, told)


def test_more_partitions_than_one_transaction_takes_begin_to_move(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(cluster: Coordination) -> None:
        with_two_brokers(cluster)
        await cluster.make("t", dict.fromkeys(range(5), (BROKER,)), state=LED)
        whole = dict.fromkeys(range(5), (2,))
        for most in ("MOST_OPERATIONS", "MOST_BYTES"):
            monkeypatch.undo()
            if most == "MOST_OPERATIONS":
                monkeypatch.setattr(reassignments, most, 2)
            else:
                monkeypatch.setattr(transactions, most, 1)
            before = await cluster.session.get(paths.topic_path("t"))
            answers = await Reassignments(cluster.session, cluster.cache).alter("t", {**whole, 9: (2,)}, 0)
            assert list(answers) == [0, 1, 2, 3, 4, 9]
            assert [number for number, error in answers.items() if error is not None] == [9]
            after = await cluster.session.get(paths.topic_path("t"))
            assert after.version - before.version == {"MOST_OPERATIONS": 3, "MOST_BYTES": 5}[most]
            assignment = paths.decode_topic(after.data)
            assert assignment.adding == whole
            assert assignment.removing == dict.fromkeys(range(5), (BROKER,))

    story(zookeeper, told)


def test_a_change_that_cannot_be_carried_out_holds_up_no_other(zookeeper: ZooKeeper) -> None:
    async def told(cluster: Coordination) -> None:
        with_two_brokers(cluster)
        for topic in ("fails", "moves"):
            await cluster.make(topic, {0: (BROKER,)}, state=ARRIVED, to=(2,))
            await cluster.show(topic)
        doomed = await cluster.make("doomed", {0: (BROKER,)}, state=LED)
        await cluster.ask_for_removal("doomed", doomed)
        commit = cluster.session.commit

        async def refused(operations: Sequence[Operation]) -> None:
            if any(operation.path == paths.topic_path("fails") for operation in operations):
                raise SessionError("the connection was lost")
            await commit(operations)

        await cluster.controller._stand_for_election()
        cluster.session.commit = refused  # type: ignore[method-assign]
        with pytest.raises(SessionError, match="was lost"):
            await cluster.carry_out(["doomed"])
        assert not await cluster.session.exists(paths.topic_path("doomed"))
        await cluster.show("moves")
        part = cluster.cache.partition("moves", 0)
        assert part is not None and (part.replicas, part.leader) == ((2,), 2)

    story(zookeeper, told)


def test_more_partitions_than_a_znode_can_name_are_refused(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(cluster: Coordination) -> None:
        with pytest.raises(InvalidPartitions, match="more than ZooKeeper takes"):
            await cluster.client.create_topic(NewTopic("t", 100_000), 0)
        await cluster.make("t", {0: (BROKER,)})
        await cluster.show("t")
        monkeypatch.setattr(controller_client, "LARGEST_ZNODE", 500)
        with pytest.raises(InvalidPartitions, match="more than ZooKeeper takes"):
            await cluster.client.create_partitions("t", 100, None, 0)

    story(zookeeper, told)


def test_settings_longer_than_zookeeper_takes_are_refused_before_it_hears_of_them(
    zookeeper: ZooKeeper,
) -> None:
    async def told(cluster: Coordination) -> None:
        heard = []
        cluster.session.on_state(heard.append)
        with pytest.raises(InvalidConfig, match="settings of topic t are too long"):
            await cluster.client.create_topic(NewTopic("t", config=TOO_LONG), 0)
        await cluster.make("t", {0: (BROKER,)})
        await cluster.show("t")
        with pytest.raises(InvalidConfig, match="settings of topic t are too long"):
            await cluster.client.alter_topic_config("t", lambda _present: TOO_LONG)
        path, data = paths.topic_config_path("t"), paths.encode_config(TOO_LONG)
        for refused in (cluster.session.set(path, data), cluster.session.create(f"{path}2", data)):
            with pytest.raises(RequestTooLarge, match=f"its first znode is {path}"):
                await refused
        assert await cluster.settings("t") == {}
        assert heard == [], "the connection was broken"

    story(zookeeper, told)


def test_more_moves_than_the_topics_znode_can_name_are_refused(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(cluster: Coordination) -> None:
        with_two_brokers(cluster)
        await cluster.make("t", {0: (BROKER,), 1: (BROKER,)}, state=LED)
        before = await cluster.session.get(paths.topic_path("t"))
        monkeypatch.setattr(reassignments, "LARGEST_ZNODE", len(before.data) + 1)
        answers = await Reassignments(cluster.session, cluster.cache).alter("t", {0: (2,), 1: (2,)}, 0)
        assert [type(error) for error in answers.values()] == [InvalidReplicaAssignment] * 2
        assert "move fewer of its partitions at a time" in str(answers[0])
        assert await cluster.session.get(paths.topic_path("t")) == before

    story(zookeeper, told)


def test_the_largest_request_that_is_let_through_is_one_that_zookeeper_takes(zookeeper: ZooKeeper) -> None:
    async def told(cluster: Coordination) -> None:
        heard = []
        cluster.session.on_state(heard.append)
        roots = [f"/{'r' * 200}{number:03}" for number in range(500)]
        for start in range(0, len(roots), 100):
            await cluster.session.commit([Create(root, b"") for root in roots[start : start + 100]])
        operations: Sequence[Operation] = [Check(root, 0) for root in roots]
        chroot = cluster.session._chroot
        size = sum(operation_bytes(each) + len(chroot) for each in operations)
        filled = SetData(roots[0], b"")
        room = LARGEST_REQUEST - size - operation_bytes(filled) - len(chroot)
        await cluster.session.commit([*operations, replace(filled, data=b"x" * room)])
        assert len((await cluster.session.get(roots[0])).data) == room
        assert heard == []

    story(zookeeper, told)
