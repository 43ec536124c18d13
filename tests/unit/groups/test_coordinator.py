"""The coordinator over an offsets topic in memory: what is answered when, and what a restart brings back."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import NotEnoughReplicas
from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.groups.offsets import GroupKey, OffsetKey, decode_key, partition_of_group
from millrace.broker.groups.values import (
    CommitRequest,
    JoinRequest,
    LeaveRequest,
    OffsetToCommit,
    Protocol,
    SyncRequest,
)
from millrace.broker.protocol.records import read_records

GROUP = "flights-readers"
SUBSCRIBED_TO_FLIGHTS = bytes.fromhex("0001 00000001 0007 666c6967687473 ffffffff")


class Bench:
    """A coordinator that owns every partition, with a clock that the test turns."""

    def __init__(self, offsets_log, **settings) -> None:
        self.log = offsets_log
        self.now_ms = 1_000
        self.config = GroupConfig(**{"initial_rebalance_delay_ms": 0, **settings})
        self.groups = self.coordinator()

    def coordinator(self) -> GroupCoordinator:
        ids = iter(range(1_000))
        return GroupCoordinator(
            self.config, self.log, clock_ms=lambda: self.now_ms, new_id=lambda: str(next(ids))
        )

    async def start(self) -> Bench:
        for partition in range(self.log.count):
            await self.groups.load(partition)
        return self

    async def restart(self) -> None:
        await self.groups.close()
        self.groups = self.coordinator()
        await self.start()

    def join(self, member_id: str = "", protocols: bytes = SUBSCRIBED_TO_FLIGHTS, **changes):
        request = JoinRequest(
            member_id=member_id,
            new_member_id=self.groups.new_member_id("client", None),
            instance_id=None,
            client_id="client",
            client_host="/127.0.0.1",
            session_timeout_ms=changes.get("session_timeout_ms", 10_000),
            rebalance_timeout_ms=30_000,
            protocol_type=changes.get("protocol_type", "consumer"),
            protocols=(Protocol("range", protocols),),
            requires_known_member_id=False,
            can_skip_assignment=True,
        )
        return self.groups.join(changes.get("group", GROUP), request)

    async def stable_member(self, **changes) -> tuple[str, int]:
        joined = await self.join(**changes)
        sync = SyncRequest(joined.member_id, None, joined.generation, None, None, {joined.member_id: b"all"})
        assert (await self.groups.sync(changes.get("group", GROUP), sync)).error is ErrorCode.none
        return joined.member_id, joined.generation

    async def commit(self, offset: int, member_id="", generation=-1, topic="flights", group=GROUP, **extra):
        offsets = {(topic, 0): OffsetToCommit(offset, -1, extra.get("metadata", ""))}
        answers = await self.groups.commit(group, CommitRequest(member_id, None, generation, offsets))
        return answers[topic, 0]

    def committed(self, topic="flights", group=GROUP) -> int | None:
        _, found = self.groups.fetch_offsets(group, [(topic, 0)])
        return found[topic, 0].offset if found[topic, 0] is not None else None

    def log_records(self):
        batches = self.log.batches.get(partition_of_group(GROUP, self.log.count), [])
        return [(decode_key(r.key), r.value) for batch in batches for r in read_records(batch)]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 10))


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
        bench.now_ms += 10_001
        bench.groups.tick(bench.now_ms)
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
        await asyncio.sleep(0.01)
        assert bench.committed() == 42

    run(scenario())


def test_commit_that_cannot_be_written_is_refused_and_forgotten(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        offsets_log.failure = NotEnoughReplicas()
        assert await bench.commit(42) is ErrorCode.coordinator_not_available
        assert bench.committed() is None

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
        assert bench.groups.list_groups()[1] == []

    run(scenario())


def test_requests_for_groups_of_other_brokers_and_while_loading(offsets_log):
    async def scenario():
        bench = Bench(offsets_log)
        assert await bench.commit(1) is ErrorCode.not_coordinator
        assert (await bench.join()).error is ErrorCode.not_coordinator
        assert bench.groups.fetch_offsets(GROUP, None)[0] is ErrorCode.not_coordinator
        assert bench.groups.describe(GROUP).error is ErrorCode.not_coordinator
        assert await bench.groups.delete_group(GROUP) is ErrorCode.not_coordinator
        offsets_log.batches[partition_of_group(GROUP, 4)] = []
        loading = [asyncio.create_task(bench.groups.load(n)) for n in range(4)]
        await asyncio.sleep(0)
        bench.groups._partitions[partition_of_group(GROUP, 4)].loaded = False
        assert await bench.commit(1) is ErrorCode.coordinator_load_in_progress
        assert bench.groups.list_groups()[0] is ErrorCode.coordinator_load_in_progress
        assert bench.groups.heartbeat(GROUP, "m", None, 1) is ErrorCode.none
        await asyncio.gather(*loading)

    run(scenario())


def test_losing_a_partition_answers_those_who_wait(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        member_id, _ = await bench.stable_member()
        waiting = asyncio.create_task(bench.join())
        await asyncio.sleep(0)
        bench.groups.unload(partition_of_group(GROUP, 4))
        assert (await waiting).error is ErrorCode.not_coordinator
        assert bench.groups.heartbeat(GROUP, member_id, None, 1) is ErrorCode.not_coordinator

    run(scenario())


def test_rebalance_completes_by_the_tick(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log, initial_rebalance_delay_ms=3_000).start()
        joining = asyncio.create_task(bench.join())
        await asyncio.sleep(0)
        bench.groups.tick(bench.now_ms + 2_999)
        await asyncio.sleep(0)
        assert not joining.done()
        bench.now_ms += 3_000
        bench.groups.tick(bench.now_ms)
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
        assert [g.group_id for g in bench.groups.list_groups()[1]] == ["living"]
        await bench.restart()
        assert bench.committed() is None

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
        assert bench.groups.list_groups()[1] == []

    run(scenario())


def test_offsets_of_deleted_topics_are_forgotten(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.commit(1)
        await bench.commit(2, topic="other")
        await bench.groups.forget_topics(["flights"])
        await bench.restart()
        assert (bench.committed(), bench.committed("other")) == (None, 2)

    run(scenario())


def test_list_filters_by_state_and_type_without_regard_to_case(offsets_log):
    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.stable_member(group="a")
        await bench.commit(1, group="b")

        def listed(**filters):
            return sorted(g.group_id for g in bench.groups.list_groups(**filters)[1])

        assert listed() == ["a", "b"]
        assert listed(states=["stable"]) == ["a"]
        assert listed(states=["Empty", "Dead"]) == ["b"]
        assert listed(types=["Classic"]) == ["a", "b"]
        assert listed(types=["consumer"]) == []

    run(scenario())


def test_unreadable_records_are_skipped(offsets_log):
    from millrace.broker.protocol.records import Record, build_batch

    async def scenario():
        bench = await Bench(offsets_log).start()
        await bench.commit(1)
        partition = partition_of_group(GROUP, 4)
        garbage = [
            Record(b"\x00\x01\x00", b"x", (), 0),
            Record(None, b"x", (), 0),
            Record(b"\x00\x09", b"", (), 0),
        ]
        await offsets_log.append(partition, bytes(build_batch(garbage)))
        await bench.commit(2, topic="other")
        await bench.restart()
        assert (bench.committed(), bench.committed("other")) == (1, 2)

    run(scenario())
