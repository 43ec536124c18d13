"""What the coordinator forgets, by request or by age: groups, offsets, and what comes in between."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import NotEnoughReplicas
from millrace.broker.groups.owned_partition import OwnedPartition
from millrace.broker.groups.record_layout import GroupKey, OffsetKey
from millrace.broker.groups.values import LeaveRequest
from millrace.broker.protocol.java_hash import coordinator_partition
from tests import virtual_clock
from tests.unit.groups.coordinator_bench import GROUP, Bench, run


def test_deleted_group_is_gone_after_a_restart_too(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        member_id, generation = await bench.stable_member()
        await bench.commit(42, member_id, generation)
        assert await bench.groups.delete_group(GROUP) is ErrorCode.non_empty_group
        bench.groups.leave(GROUP, [LeaveRequest(member_id, None)])
        # In the same breath: the removal must come after the record that the empty group left.
        assert await bench.groups.delete_group(GROUP) is ErrorCode.none
        assert bench.committed() is None
        tombstones = [key for key, value in bench.log_records()[-2:] if value is None]
        assert tombstones == [OffsetKey(GROUP, "flights", 0), GroupKey(GROUP)]
        await bench.restart()
        assert bench.committed() is None
        assert bench.groups.describe(GROUP).state == "Dead"

    run(scenario())


def test_offsets_of_subscribed_topics_cannot_be_deleted_others_can(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        member_id, generation = await bench.stable_member()
        await bench.commit(1, member_id, generation)
        await bench.commit(2, member_id, generation, topic="former")
        error, answers = await bench.groups.delete_offsets(GROUP, [("flights", 0), ("former", 0)])
        assert error is ErrorCode.none
        assert answers == {
            ("flights", 0): ErrorCode.group_subscribed_to_topic,
            ("former", 0): ErrorCode.none,
        }
        await bench.restart()
        assert (bench.committed(), bench.committed("former")) == (1, None)
        assert (await bench.groups.delete_offsets("nobody", []))[0] is ErrorCode.group_id_not_found

    run(scenario())


def test_offsets_of_members_of_another_kind_cannot_be_deleted(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.stable_member(protocol_type="connect")
        assert (await bench.groups.delete_offsets(GROUP, [("t", 0)]))[0] is ErrorCode.non_empty_group

    run(scenario())


def test_deletion_takes_a_first_commit_with_it_whose_client_was_told_that_it_takes_too_long(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log, commit_timeout_ms=20).start()
        offsets_log.gate.clear()
        assert await bench.commit(1) is ErrorCode.coordinator_not_available
        deleting = asyncio.create_task(bench.groups.delete_offsets(GROUP, [("flights", 0)]))
        await asyncio.sleep(0)
        offsets_log.gate.set()
        assert (await deleting)[0] is ErrorCode.none
        await bench.groups._journal.drain()
        assert bench.committed() is None
        await bench.restart()
        assert bench.committed() is None

    virtual_clock.run(scenario())


def test_commit_made_while_a_deletion_is_written_wins(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.commit(1)
        offsets_log.gate.clear()
        deleting = asyncio.create_task(bench.groups.delete_offsets(GROUP, [("flights", 0)]))
        await asyncio.sleep(0.01)
        held_back, offsets_log.gate = offsets_log.gate, asyncio.Event()
        offsets_log.gate.set()
        await bench.commit(2)
        held_back.set()
        await deleting
        assert bench.committed() == 2
        await bench.restart()
        assert bench.committed() == 2

    run(scenario())


def test_sweep_forgets_what_nobody_used_for_the_retention_time(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log, offsets_retention_ms=100_000).start()
        await bench.commit(1, group=GROUP)
        member_id, generation = await bench.stable_member(group="living")
        await bench.commit(2, member_id, generation, group="living")
        bench.now_ms += 99_999
        await bench.groups.sweep(bench.now_ms)
        assert bench.committed() == 1
        bench.now_ms += 1
        await bench.groups.sweep(bench.now_ms)
        assert bench.committed() is None
        assert bench.committed(group="living") == 2
        assert [g.group_id for g in (await bench.groups.list_groups())[1]] == ["living"]
        await bench.restart()
        assert bench.committed() is None

    run(scenario())


@pytest.mark.parametrize("before", [None, 1], ids=["the first", "renewed"])
@pytest.mark.parametrize("had_members", [False, True])
def test_commit_under_way_is_not_swept_away_with_its_group(offsets_log, before, had_members):
    """It is acknowledged when the replicas have it, after the sweep has looked at what is committed."""

    async def scenario():
        bench = await Bench(offsets_log, offsets_retention_ms=100_000).start()
        if had_members:
            member_id, _ = await bench.stable_member()
            bench.groups.leave(GROUP, [LeaveRequest(member_id, None)])
        if before is not None:
            await bench.commit(before)
        bench.now_ms += 100_000
        offsets_log.gate.clear()
        committing = asyncio.create_task(bench.commit(2))
        await asyncio.sleep(0)
        sweeping = asyncio.create_task(bench.groups.sweep(bench.now_ms))
        await asyncio.sleep(0)
        offsets_log.gate.set()
        await sweeping
        assert await committing is ErrorCode.none
        assert bench.committed() == 2
        await bench.restart()
        assert bench.committed() == 2

    run(scenario())


def test_offsets_of_an_emptied_group_age_from_the_day_it_emptied(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log, offsets_retention_ms=100_000).start()
        member_id, generation = await bench.stable_member()
        await bench.commit(1, member_id, generation)
        bench.now_ms += 90_000
        bench.groups.leave(GROUP, [LeaveRequest(member_id, None)])
        await asyncio.sleep(0.01)
        await bench.restart()
        bench.now_ms += 99_000
        await bench.groups.sweep(bench.now_ms)
        assert bench.committed() == 1
        bench.now_ms += 1_000
        await bench.groups.sweep(bench.now_ms)
        assert bench.committed() is None
        assert (await bench.groups.list_groups())[1] == []

    run(scenario())


def test_offsets_of_deleted_topics_are_forgotten(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.commit(1)
        await bench.commit(2, topic="other")
        bench.groups.forget_topics(["flights"])
        await bench.restart()
        assert (bench.committed(), bench.committed("other")) == (None, 2)

    run(scenario())


@pytest.mark.safety
def test_offsets_of_a_deleted_topic_are_forgotten_also_if_the_log_takes_no_removal(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.commit(1)
        await bench.commit(2, topic="other")
        offsets_log.failure = NotEnoughReplicas()
        bench.groups.forget_topics(["flights"])
        assert (bench.committed(), bench.committed("other")) == (None, 2)
        offsets_log.failure = None
        await bench.commit(3)
        assert bench.committed() == 3

    run(scenario())


@pytest.mark.safety
def test_a_topic_that_is_deleted_while_its_offsets_are_loaded_is_forgotten(offsets_log):
    """Or who reads a new topic of this name would begin in the middle of it."""

    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.commit(1)
        await bench.commit(2, topic="other")
        await bench.groups.close()
        bench.groups = bench.coordinator()
        offsets_log.gate.clear()
        loading = asyncio.create_task(bench.groups.load(coordinator_partition(GROUP, 4)))
        await asyncio.sleep(0)
        assert bench.groups.fetch_offsets(GROUP, None)[0] is ErrorCode.coordinator_load_in_progress
        bench.groups.forget_topics(["flights"])
        offsets_log.gate.set()
        await loading
        assert (bench.committed(), bench.committed("other")) == (None, 2)
        await bench.restart()
        assert (bench.committed(), bench.committed("other")) == (None, 2)

    run(scenario())


@pytest.mark.safety
def test_a_topic_that_is_deleted_while_a_load_fails_is_forgotten_by_the_next_try(offsets_log, monkeypatch):
    def unreadable(*_):
        raise KeyError("a defect")

    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.commit(1)
        await bench.commit(2, topic="other")
        partition = coordinator_partition(GROUP, 4)
        with monkeypatch.context() as within:
            within.setattr(OwnedPartition, "restored", unreadable)
            with pytest.raises(KeyError):
                await bench.groups.load(partition)
            bench.groups.forget_topics(["flights"])
            with pytest.raises(KeyError):
                await bench.groups.load(partition)
        await bench.groups.load(partition)
        assert (bench.committed(), bench.committed("other")) == (None, 2)
        await bench.commit(3)  # in a new topic of that name
        await bench.groups.load(partition)
        assert (bench.committed(), bench.committed("other")) == (3, 2)

    run(scenario())


@pytest.mark.safety
@pytest.mark.parametrize("removal", ["topic", "group"])
def test_removal_takes_a_first_commit_that_is_under_way_with_it(offsets_log, removal):
    async def scenario():
        bench = await Bench(offsets_log).start()
        offsets_log.gate.clear()
        committing = asyncio.create_task(bench.commit(1))
        await asyncio.sleep(0)
        removing = []
        if removal == "topic":
            bench.groups.forget_topics(["flights"])
        else:
            removing.append(asyncio.create_task(bench.groups.delete_group(GROUP)))
        await asyncio.sleep(0)
        offsets_log.gate.set()
        assert await committing is ErrorCode.none
        await asyncio.gather(*removing)
        await bench.groups._journal.drain()
        assert bench.committed() is None
        await bench.restart()
        assert bench.committed() is None

    run(scenario())


def test_deletion_that_cannot_be_written_leaves_the_group_as_it_is(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log, offsets_retention_ms=1).start()
        member_id, generation = await bench.stable_member()
        await bench.commit(1, member_id, generation)
        bench.groups.leave(GROUP, [LeaveRequest(member_id, None)])
        await asyncio.sleep(0.01)
        offsets_log.failure = NotEnoughReplicas()
        assert await bench.groups.delete_group(GROUP) is ErrorCode.coordinator_not_available
        error, _ = await bench.groups.delete_offsets(GROUP, [("flights", 0)])
        assert error is ErrorCode.coordinator_not_available
        bench.now_ms += 1_000
        await bench.groups.sweep(bench.now_ms)
        assert (bench.committed(), bench.groups.describe(GROUP).state) == (1, "Empty")
        offsets_log.failure = None
        joined = await bench.join()
        assert joined.error is ErrorCode.none

    run(scenario())


def test_nobody_joins_a_group_whose_removal_is_being_written(offsets_log):
    """The member would be lost with it: it is asked to come again."""

    async def scenario():
        bench = await Bench(offsets_log).start()
        member_id, _ = await bench.stable_member()
        bench.groups.leave(GROUP, [LeaveRequest(member_id, None)])
        await asyncio.sleep(0.01)
        offsets_log.gate.clear()
        deleting = asyncio.create_task(bench.groups.delete_group(GROUP))
        await asyncio.sleep(0.01)
        assert (await bench.join()).error is ErrorCode.coordinator_not_available
        assert (await bench.groups.list_groups())[1] == []
        leaving = bench.groups.leave(GROUP, [LeaveRequest(member_id, None)])
        assert leaving == (ErrorCode.coordinator_not_available, [])
        deleted = await bench.groups.delete_offsets(GROUP, [("flights", 0)])
        assert deleted == (ErrorCode.group_id_not_found, {})
        offsets_log.gate.set()
        assert await deleting is ErrorCode.none
        assert (await bench.join()).generation == 1

    run(scenario())


def test_offsets_are_swept_in_time_when_the_clock_was_set_back(offsets_log):
    async def scenario():
        settings = {"offsets_retention_ms": 100_000, "offsets_retention_check_interval_ms": 600_000}
        bench = await Bench(offsets_log, **settings).by_the_loops_clock().start()
        running = asyncio.create_task(bench.groups.run())
        await asyncio.sleep(0)
        for _ in range(2):  # one sweep is not the last
            bench.now_ms -= 3_600_000
            await bench.commit(1)
            bench.now_ms += 100_000
            await asyncio.sleep(599.999)
            assert bench.committed() == 1
            await asyncio.sleep(0.002)
            assert bench.committed() is None
        running.cancel()

    virtual_clock.run(scenario())
