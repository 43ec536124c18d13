"""The coordinator over an offsets topic in memory: what is answered when, and what a restart brings back."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import NotEnoughReplicas, NotEnoughReplicasAfterAppend
from millrace.broker.groups.owned_partition import OwnedPartition
from millrace.broker.groups.values import CommitRequest, LeaveRequest, OffsetToCommit, SyncRequest
from millrace.broker.protocol.java_hash import coordinator_partition
from tests import virtual_clock
from tests.unit.groups.coordinator_bench import GROUP, Bench, run
from tests.waiting import until_async as until


def test_commit_is_visible_after_it_is_in_the_log_and_survives_a_restart(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        member_id, generation = await bench.stable_member()
        assert await bench.commit(42, member_id, generation, metadata="note") is ErrorCode.none
        await bench.restart()
        assert bench.committed() == 42
        assert bench.groups.describe(GROUP).state == "Stable"
        assert bench.groups.describe(GROUP).members[0].assignment == b"all"
        assert bench.groups.heartbeat(GROUP, member_id, None, generation) is ErrorCode.none
        bench.pass_time(10_001)
        assert bench.groups.describe(GROUP).state == "Empty", "its session ended: nobody came back"

    run(scenario())


def test_commit_that_is_not_yet_in_the_log_is_not_visible(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        offsets_log.gate.clear()
        committing = asyncio.create_task(bench.commit(42))
        await asyncio.sleep(0.01)
        assert bench.committed() is None
        offsets_log.gate.set()
        assert await committing is ErrorCode.none
        assert bench.committed() == 42

    run(scenario())


def test_commit_of_a_client_that_has_gone_is_remembered_all_the_same(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        offsets_log.gate.clear()
        committing = asyncio.create_task(bench.commit(42))
        await asyncio.sleep(0.01)
        committing.cancel()
        offsets_log.gate.set()
        await until(lambda: bench.committed() == 42)

    run(scenario())


def test_commit_that_cannot_be_written_is_refused_and_forgotten(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        offsets_log.failure = NotEnoughReplicas()
        assert await bench.commit(42) is ErrorCode.coordinator_not_available
        assert bench.committed() is None

    run(scenario())


def test_write_that_is_too_large_for_the_topic_is_refused_and_a_removal_never_is(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        joined = await bench.join()
        assignments = {joined.member_id: b"x" * 300}
        sync = SyncRequest(joined.member_id, None, joined.generation, None, None, assignments)
        await bench.commit(1, group="g" * 300)
        offsets_log.most_bytes = 350
        assert (await bench.groups.sync(GROUP, sync)).error is ErrorCode.unknown_server_error
        assert await bench.commit(2, group="g" * 300) is ErrorCode.invalid_commit_offset_size
        assert bench.committed(group="g" * 300) == 1
        assert await bench.groups.delete_group("g" * 300) is ErrorCode.none
        assert bench.committed(group="g" * 300) is None

    run(scenario())


def test_write_that_fails_unexpectedly_is_answered(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        offsets_log.failure = RuntimeError("broken")
        assert await bench.commit(42) is ErrorCode.unknown_server_error
        joined = await bench.join()
        sync = SyncRequest(joined.member_id, None, joined.generation, None, None, {})
        assert (await bench.groups.sync(GROUP, sync)).error is ErrorCode.unknown_server_error

    run(scenario())


def test_metadata_over_the_limit_is_refused_alone(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log, offset_metadata_max_size=4).start()
        offsets = {("a", 0): OffsetToCommit(1, -1, "12345"), ("b", 0): OffsetToCommit(2, -1, "1234")}
        answers = await bench.groups.commit(GROUP, CommitRequest("", None, -1, offsets))
        assert answers == {("a", 0): ErrorCode.offset_metadata_too_large, ("b", 0): ErrorCode.none}
        assert bench.committed("a") is None
        assert bench.committed("b") == 2

    run(scenario())


def test_commit_of_a_member_to_an_unknown_group_is_an_old_generation(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        assert await bench.commit(1, "m", 3) is ErrorCode.illegal_generation
        assert (await bench.groups.list_groups())[1] == []

    run(scenario())


def test_requests_for_groups_of_other_brokers_and_while_loading(offsets_log):
    async def scenario():
        bench = Bench(offsets_log)
        assert await bench.commit(1) is ErrorCode.not_coordinator
        assert (await bench.join()).error is ErrorCode.not_coordinator
        assert bench.groups.fetch_offsets(GROUP, None)[0] is ErrorCode.not_coordinator
        assert bench.groups.describe(GROUP).error is ErrorCode.not_coordinator
        assert await bench.groups.delete_group(GROUP) is ErrorCode.not_coordinator
        offsets_log.batches[coordinator_partition(GROUP, 4)] = []
        loading = [asyncio.create_task(bench.groups.load(n)) for n in range(4)]
        await asyncio.sleep(0)
        bench.groups._partitions[coordinator_partition(GROUP, 4)].loaded = False
        assert await bench.commit(1) is ErrorCode.coordinator_load_in_progress
        assert (await bench.groups.list_groups())[0] is ErrorCode.coordinator_load_in_progress
        assert bench.groups.heartbeat(GROUP, "m", None, 1) is ErrorCode.none
        sync = SyncRequest("m", None, 1, None, None, {})
        assert (await bench.groups.sync(GROUP, sync)).error is ErrorCode.rebalance_in_progress
        await asyncio.gather(*loading)

    run(scenario())


def test_a_load_that_failed_leaves_its_groups_loading_until_the_next_one(offsets_log, monkeypatch):
    """The log is tried again: clients that were sent elsewhere would only be sent back."""

    def unreadable(*_):
        raise KeyError("a defect")

    async def scenario():
        bench = await Bench(offsets_log).start()
        assert await bench.commit(5) is ErrorCode.none
        partition = coordinator_partition(GROUP, 4)
        with monkeypatch.context() as within:
            within.setattr(OwnedPartition, "restored", unreadable)
            with pytest.raises(KeyError):
                await bench.groups.load(partition)
        assert await bench.commit(6) is ErrorCode.coordinator_load_in_progress
        assert (await bench.join()).error is ErrorCode.coordinator_load_in_progress
        assert bench.groups.fetch_offsets(GROUP, None)[0] is ErrorCode.coordinator_load_in_progress
        await bench.groups.load(partition)
        assert bench.committed() == 5
        bench.groups.unload(partition)
        assert await bench.commit(6) is ErrorCode.not_coordinator

    run(scenario())


def test_losing_a_partition_answers_those_who_wait(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        member_id, _ = await bench.stable_member()
        waiting = asyncio.create_task(bench.join())
        await asyncio.sleep(0)
        bench.groups.unload(coordinator_partition(GROUP, 4))
        assert (await waiting).error is ErrorCode.not_coordinator
        assert bench.groups.heartbeat(GROUP, member_id, None, 1) is ErrorCode.not_coordinator

    run(scenario())


def test_rebalance_completes_by_the_tick(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log, initial_rebalance_delay_ms=3_000).start()
        joining = asyncio.create_task(bench.join())
        await asyncio.sleep(0)
        bench.pass_time(2_999)
        await asyncio.sleep(0)
        assert not joining.done()
        bench.pass_time(1)
        assert (await joining).generation == 1

    run(scenario())


@pytest.mark.parametrize("session_timeout_ms", [5_999, 1_800_001])
def test_session_timeout_out_of_bounds_is_refused(offsets_log, session_timeout_ms):
    async def scenario():
        bench = await Bench(offsets_log).start()
        joined = await bench.join(session_timeout_ms=session_timeout_ms)
        assert joined.error is ErrorCode.invalid_session_timeout

    run(scenario())


def test_unknown_groups_and_ids(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        assert (await bench.join(group="")).error is ErrorCode.invalid_group_id
        assert (await bench.join(group="x" * 40_000)).error is ErrorCode.invalid_group_id
        assert (await bench.join("stranger")).error is ErrorCode.unknown_member_id
        assert bench.groups.heartbeat(GROUP, "m", None, 1) is ErrorCode.unknown_member_id
        error, results = bench.groups.leave(GROUP, [LeaveRequest("m", None)])
        assert (error, results[0].error) == (ErrorCode.none, ErrorCode.unknown_member_id)
        assert bench.groups.describe(GROUP).state == "Dead"
        assert await bench.groups.delete_group(GROUP) is ErrorCode.group_id_not_found
        assert bench.groups.fetch_offsets(GROUP, [("t", 0)]) == (ErrorCode.none, {("t", 0): None})

    run(scenario())


def test_list_filters_by_state_and_type_without_regard_to_case(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.stable_member(group="a")
        await bench.commit(1, group="b")

        async def listed(**filters):
            return sorted(g.group_id for g in (await bench.groups.list_groups(**filters))[1])

        assert await listed() == ["a", "b"]
        assert await listed(states=["stable"]) == ["a"]
        assert await listed(states=["Empty", "Dead"]) == ["b"]
        assert await listed(types=["Classic"]) == ["a", "b"]
        assert await listed(types=["consumer"]) == []

    run(scenario())


def test_unreadable_records_are_skipped(offsets_log):
    from millrace.broker.protocol.records import Record, build_batch

    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.commit(1)
        partition = coordinator_partition(GROUP, 4)
        garbage = [
            Record(b"\x00\x01\x00", b"x", (), 0),
            Record(None, b"x", (), 0),
            Record(b"\x00\x09", b"", (), 0),
        ]
        offsets_log.append_now(partition, bytes(build_batch(garbage)))
        await bench.commit(2, topic="other")
        await bench.restart()
        assert (bench.committed(), bench.committed("other")) == (1, 2)

    run(scenario())


def test_write_that_takes_too_long_is_refused_and_comes_true_when_the_log_has_it(offsets_log):
    """It is in the leader's log, so a new coordinator would find it: memory must come to the same."""

    async def scenario():
        bench = await Bench(offsets_log, commit_timeout_ms=20).start()
        await bench.commit(1)
        offsets_log.gate.clear()
        assert await bench.commit(42) is ErrorCode.coordinator_not_available
        assert bench.committed() == 1, "not committed, not seen"
        offsets_log.gate.set()
        await until(lambda: bench.committed() == 42)
        await bench.restart()
        assert bench.committed() == 42

    run(scenario())


def test_commit_is_unstable_until_its_client_has_been_answered_and_no_longer(offsets_log):
    """The in-sync set may be too small for days; readers go on from what was committed before."""

    def stable(bench):
        _, found = bench.groups.fetch_offsets(GROUP, [("flights", 0)], require_stable=True)
        return getattr(found["flights", 0], "offset", found["flights", 0])

    async def scenario():
        bench = await Bench(offsets_log, commit_timeout_ms=20).start()
        await bench.commit(1)
        assert stable(bench) == 1
        offsets_log.gate.clear()
        committing = asyncio.create_task(bench.commit(42))
        await asyncio.sleep(0)
        assert stable(bench) is ErrorCode.unstable_offset_commit
        assert await committing is ErrorCode.coordinator_not_available
        assert stable(bench) == 1
        again = asyncio.create_task(bench.commit(43))
        await asyncio.sleep(0)
        assert stable(bench) is ErrorCode.unstable_offset_commit
        offsets_log.gate.set()
        assert await again is ErrorCode.none
        assert stable(bench) == 43
        (owned,) = [each for each in bench.groups._partitions.values() if each.groups]
        assert not owned.groups[GROUP].offsets._awaited

    virtual_clock.run(scenario())


def test_so_many_writes_wait_for_the_in_sync_set_and_no_more(offsets_log, monkeypatch):
    """Clients that give up ask again, for as long as the high watermark stands."""
    monkeypatch.setattr("millrace.broker.groups.journal.MOST_UNCERTAIN", 3)

    async def scenario():
        bench = await Bench(offsets_log, commit_timeout_ms=5).start()
        offsets_log.gate.clear()
        for offset in range(5):
            assert await bench.commit(offset) is ErrorCode.coordinator_not_available
        assert sum(map(len, offsets_log.batches.values())) == 3
        offsets_log.gate.set()
        await until(lambda: bench.committed() == 2)
        assert await bench.commit(9) is ErrorCode.none
        await bench.restart()
        assert bench.committed() == 9

    run(scenario())


def test_write_that_only_too_few_replicas_have_is_refused_but_kept(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        offsets_log.replicated_failure = NotEnoughReplicasAfterAppend()
        assert await bench.commit(42) is ErrorCode.coordinator_not_available
        offsets_log.replicated_failure = None
        assert bench.committed() == 42
        await bench.restart()
        assert bench.committed() == 42

    run(scenario())


def test_coordinator_serves_only_when_all_that_it_has_read_is_committed(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.commit(42)
        offsets_log.gate.clear()
        restarting = asyncio.create_task(bench.restart())
        await asyncio.sleep(0.05)
        error, _ = bench.groups.fetch_offsets(GROUP, [("flights", 0)])
        assert error in (ErrorCode.coordinator_load_in_progress, ErrorCode.not_coordinator)
        offsets_log.gate.set()
        await restarting
        assert bench.committed() == 42

    run(scenario())


def test_static_member_finds_its_assignment_and_generation_at_the_next_coordinator(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        first = await bench.join(instance_id="host-1")
        sync = SyncRequest(first.member_id, "host-1", 1, None, None, {first.member_id: b"all"})
        assert (await bench.groups.sync(GROUP, sync)).assignment == b"all"
        await bench.restart()
        # As the same incarnation, by its heartbeat, and as a new one, which fences the old.
        assert bench.groups.heartbeat(GROUP, first.member_id, "host-1", 1) is ErrorCode.none
        again = await bench.join(instance_id="host-1")
        assert (again.error, again.generation) == (ErrorCode.none, 1)
        synced = await bench.groups.sync(GROUP, SyncRequest(again.member_id, "host-1", 1, None, None, {}))
        assert synced.assignment == b"all"
        assert bench.groups.heartbeat(GROUP, first.member_id, "host-1", 1) is ErrorCode.fenced_instance_id
        await bench.restart()
        assert bench.groups.heartbeat(GROUP, first.member_id, "host-1", 1) is ErrorCode.fenced_instance_id
        assert bench.groups.heartbeat(GROUP, again.member_id, "host-1", 1) is ErrorCode.none

    run(scenario())


def test_commit_with_the_old_generation_is_refused_by_the_next_coordinator(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        member_id, _ = await bench.stable_member()
        joining = asyncio.create_task(bench.join())
        await asyncio.sleep(0)
        again = await bench.join(member_id)
        assert (await joining).generation == again.generation == 2
        sync = SyncRequest(again.leader, None, 2, None, None, {again.leader: b"all"})
        assert (await bench.groups.sync(GROUP, sync)).error is ErrorCode.none
        await bench.restart()
        assert await bench.commit(5, member_id, 1) is ErrorCode.illegal_generation
        assert await bench.commit(6, member_id, 2) is ErrorCode.none
        assert bench.committed() == 6

    run(scenario())


def test_figures_of_groups(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        member_id, generation = await bench.stable_member()
        await bench.commit(1, member_id, generation)
        await bench.commit(2, group="alone")
        await bench.commit(3, group="alone", generation=5, member_id="stranger")
        metrics = bench.groups._metrics
        assert (metrics.group_rebalances, metrics.group_commits) == (1, 2)
        assert bench.groups.count_by_state() == {"Stable": 1, "Empty": 1}
        assert metrics.group_loads == offsets_log.count
        assert metrics.group_load_seconds == 0.0, "the test's clock stands still"

    run(scenario())


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
def test_timers_run_on_when_the_clock_is_set(offsets_log, jump_ms):
    async def scenario():
        bench = await Bench(offsets_log, initial_rebalance_delay_ms=3_000).by_the_loops_clock().start()
        running = asyncio.create_task(bench.groups.run())
        joining = asyncio.create_task(bench.join())
        await asyncio.sleep(0)
        bench.now_ms += jump_ms
        joined = await joining
        assert bench.steady_ms == 3_000
        sync = SyncRequest(joined.member_id, None, 1, None, None, {joined.member_id: b"all"})
        assert (await bench.groups.sync(GROUP, sync)).error is ErrorCode.none
        bench.now_ms += jump_ms
        await asyncio.sleep(5)
        assert await bench.commit(1, joined.member_id, 1) is ErrorCode.none, "a sign of life"
        await asyncio.sleep(9.998)
        assert bench.groups.describe(GROUP).state == "Stable"
        await asyncio.sleep(0.003)
        assert bench.groups.describe(GROUP).state == "Empty"
        running.cancel()

    virtual_clock.run(scenario())


@pytest.mark.parametrize("instance_id", [None, "static"])
def test_session_ends_when_it_is_over_whatever_else_is_waited_for(offsets_log, instance_id):
    """Also one that begins while the coordinator waits for a later end of another."""

    async def scenario():
        bench = await Bench(offsets_log).by_the_loops_clock().start()
        running = asyncio.create_task(bench.groups.run())
        await bench.stable_member(group="patient", session_timeout_ms=60_000)
        await asyncio.sleep(0.007)
        await bench.stable_member(instance_id=instance_id, session_timeout_ms=6_013)
        await asyncio.sleep(6.012)
        assert bench.groups.describe(GROUP).state == "Stable"
        await asyncio.sleep(0.002)
        assert bench.groups.describe(GROUP).state == "Empty"
        await asyncio.sleep(60 - 6.023)
        assert bench.groups.describe("patient").state == "Stable"
        await asyncio.sleep(0.004)
        assert bench.groups.describe("patient").state == "Empty"
        running.cancel()

    virtual_clock.run(scenario())
