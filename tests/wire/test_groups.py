"""Consumer groups through each foreign client: sharing, rebalancing, committing, coming back.

Members run in threads of their own (`foreign_clients.GroupMember`); the tests wait for what they see.
"""

from __future__ import annotations

from collections import Counter

import pytest
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor

from tests.wire.foreign_clients import ForeignClient, GroupMember, Sent, wait_until

PARTITIONS = 4


def numbered(first: int, count: int) -> list[Sent]:
    return [
        Sent(b"%d" % number, timestamp_ms=1_700_000_000_000 + number, partition=number % PARTITIONS)
        for number in range(first, first + count)
    ]


def seen(*members: GroupMember) -> Counter[int]:
    return Counter(int(record.value or b"-1") for member in members for record in member.records)


def wait_for_records(numbers: range, *members: GroupMember) -> None:
    def arrived() -> bool:
        failures = [member.failure for member in members if member.failure]
        assert not failures, failures[0]
        return set(numbers) <= set(seen(*members))

    wait_until(arrived, f"records {numbers} at the members")


def wait_for_shares(*members: GroupMember) -> None:
    def shared() -> bool:
        failures = [member.failure for member in members if member.failure]
        assert not failures, failures[0]
        held = sorted(partition for member in members for partition in member.assigned)
        return held == list(range(PARTITIONS)) and all(member.assigned for member in members)

    wait_until(shared, f"{PARTITIONS} partitions shared by {len(members)} members")


def assert_committed(client: ForeignClient, group: str, topic: str) -> None:
    for partition in range(PARTITIONS):
        assert client.committed(group, topic, partition) == client.bounds(topic, partition)[1]


def test_two_members_share_rebalance_and_lose_nothing(client, new_topic, fresh_name):
    topic, group = new_topic(PARTITIONS), fresh_name("group")
    client.produce(topic, numbered(0, 100))
    first = client.member(group, topic)
    wait_for_records(range(100), first)
    assert first.assigned == set(range(PARTITIONS))

    second = client.member(group, topic)
    wait_for_shares(first, second)
    client.produce(topic, numbered(100, 100))
    wait_for_records(range(200), first, second)
    by_second = {int(r.value) for r in second.records}
    assert {number % PARTITIONS for number in by_second} <= second.assigned

    first.leave()
    wait_for_shares(second)
    client.produce(topic, numbered(200, 100))
    wait_for_records(range(200, 300), second)
    second.leave()
    assert set(seen(first, second)) == set(range(300))
    assert_committed(client, group, topic)


def test_member_that_comes_back_goes_on_after_its_commit(client, new_topic, fresh_name):
    topic, group = new_topic(PARTITIONS), fresh_name("group")
    client.produce(topic, numbered(0, 40))
    before = client.member(group, topic)
    wait_for_records(range(40), before)
    before.leave()
    assert_committed(client, group, topic)
    client.produce(topic, numbered(40, 40))
    after = client.member(group, topic)
    wait_for_records(range(40, 80), after)
    after.leave()
    assert seen(after) == dict.fromkeys(range(40, 80), 1), "nothing from before the commit again"


def test_group_and_partition_without_commits_have_none(client, new_topic, fresh_name):
    topic = new_topic(PARTITIONS)
    assert client.committed(fresh_name("group"), topic, 0) is None


def test_members_of_different_libraries_work_in_one_group(readers, new_topic, fresh_name):
    """They meet on the one assignor that all three offer, "range" or "roundrobin"."""
    topic, group = new_topic(PARTITIONS), fresh_name("group")
    confluent, kafka_python, _ = readers
    first = confluent.member(group, topic, partition_assignment_strategy="range")
    wait_for_shares(first)
    second = kafka_python.member(group, topic)
    wait_for_shares(first, second)
    confluent.produce(topic, numbered(0, 100))
    wait_for_records(range(100), first, second)
    assert first.records
    assert second.records
    first.leave()
    wait_for_shares(second)
    second.leave()


@pytest.mark.parametrize(
    ("library", "strategy"),
    [("confluent-kafka", "cooperative-sticky"), ("kafka-python", [CooperativeStickyAssignor])],
    ids=["confluent-kafka", "kafka-python"],
)
def test_cooperative_members_rebalance_without_losing_records(
    readers, new_topic, fresh_name, library, strategy
):
    topic, group = new_topic(PARTITIONS), fresh_name("group")
    client = next(reader for reader in readers if reader.name == library)
    first = client.member(group, topic, partition_assignment_strategy=strategy)
    wait_for_shares(first)
    second = client.member(group, topic, partition_assignment_strategy=strategy)
    wait_for_shares(first, second)
    moved = set().union(*first.revoked)
    assert (len(moved), moved) == (PARTITIONS // 2, second.assigned), "only what moves is given up"
    client.produce(topic, numbered(0, 100))
    wait_for_records(range(100), first, second)
    assert seen(first, second) == dict.fromkeys(range(100), 1)
    first.leave()
    wait_for_shares(second)
    second.leave()


@pytest.mark.parametrize("library", ["confluent-kafka", "kafka-python", "aiokafka"])
def test_static_member_that_restarts_gets_its_partitions_back(readers, new_topic, fresh_name, library):
    topic, group = new_topic(PARTITIONS), fresh_name("group")
    client = next(reader for reader in readers if reader.name == library)
    stays = client.member(group, topic, group_instance_id="stays")
    wait_for_shares(stays)
    restarts = client.member(group, topic, group_instance_id="restarts")
    wait_for_shares(stays, restarts)
    held = restarts.assigned, stays.assigned
    restarts.leave()  # a static member does not send LeaveGroup
    back = client.member(group, topic, group_instance_id="restarts")
    wait_for_shares(stays, back)
    assert (back.assigned, stays.assigned) == held
    client.produce(topic, numbered(0, 40))
    wait_for_records(range(40), stays, back)
    back.leave()
    stays.leave()


# aiokafka tells its static name to whom it joins and to nobody after: it is never told that it was fenced.
@pytest.mark.parametrize("library", ["confluent-kafka", "kafka-python"])
def test_second_process_with_a_static_name_fences_the_first(readers, new_topic, fresh_name, library):
    topic, group = new_topic(PARTITIONS), fresh_name("group")
    client = next(reader for reader in readers if reader.name == library)
    first = client.member(group, topic, group_instance_id="host-1")
    wait_for_shares(first)
    # kafka-python's member is told by the answer to a commit, so it needs something to commit.
    client.produce(topic, numbered(0, 40))
    wait_for_records(range(40), first)
    second = client.member(group, topic, group_instance_id="host-1")
    wait_for_shares(second)
    wait_until(lambda: first.failure is not None, "the first is told")
    assert first.refusal in ("FENCED_INSTANCE_ID", "_FATAL")
    client.produce(topic, numbered(40, 40))
    wait_for_records(range(40, 80), second)
    second.leave()


def test_eager_members_give_everything_back_and_cooperative_ones_only_what_moves(
    readers, new_topic, fresh_name
):
    """What a member of either kind is asked to give up when a second one comes."""
    given_up: dict[str, set[int]] = {}
    for strategy in ("range", "cooperative-sticky"):
        topic, group = new_topic(PARTITIONS), fresh_name("group")
        first = readers[0].member(group, topic, partition_assignment_strategy=strategy)
        wait_for_shares(first)
        second = readers[0].member(group, topic, partition_assignment_strategy=strategy)
        wait_for_shares(first, second)
        given_up[strategy] = set().union(*first.revoked)
        kept = set(range(PARTITIONS)) - given_up[strategy]
        assert kept <= first.assigned
        second.leave()
        wait_for_shares(first)
        first.leave()
    assert given_up["range"] == set(range(PARTITIONS))
    assert len(given_up["cooperative-sticky"]) == PARTITIONS // 2


def test_member_that_goes_silent_loses_its_partitions(readers, new_topic, fresh_name):
    """It does not say goodbye: after its session the other one has everything."""
    topic, group = new_topic(PARTITIONS), fresh_name("group")
    silent = readers[1].member(group, topic, max_poll_interval_ms=6_000)
    wait_for_shares(silent)
    other = readers[0].member(group, topic, partition_assignment_strategy="range")
    wait_for_shares(silent, other)
    silent.fall_silent()
    wait_until(lambda: other.assigned == set(range(PARTITIONS)), "all partitions")
    readers[0].produce(topic, numbered(0, 40))
    wait_for_records(range(40), other)
    assert not silent.records
    other.leave()
    silent.leave()
