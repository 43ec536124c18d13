"""The replica manager as leader of followers: real logs, followers played by their fetches."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.broker.errors import (
    KafkaStorageError,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    RequestTimedOut,
    UnknownLeaderEpoch,
)
from millrace.broker.replication.local_partition import (
    FollowerFetch,
)
from millrace.broker.replication.partition import PartitionState
from millrace.broker.replication.replica_manager import ACKS_ALL
from tests.unit.replication.replicated_stage import LAG_MS, REPLICAS, TOPIC_ID, Bench, batch, run, turns
from tests.waiting import patience, until_async


def test_acks_all_is_answered_when_the_whole_in_sync_set_has_it(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        assert bench.append(b"one", acks=1) is None
        wait = bench.append(b"two", b"three")
        assert wait is not None
        assert len(bench.fetch(2, 0).records) > 0  # a follower sees what no consumer does
        assert bench.manager.read_now("t", 0, 0, 99, at_least_one=True).records == b""
        bench.fetch(2, 3)
        assert not wait.done()
        bench.fetch(3, 1)
        assert bench.high_watermark == 1
        assert not wait.done()
        consumer = asyncio.ensure_future(bench.manager.waiting_fetches.wait([("t", 0)], 1, 10))
        await turns()
        bench.fetch(3, 3)
        assert wait.done() and wait.exception() is None
        assert await consumer

    run(tmp_path, scenario)


def test_follower_that_waits_is_woken_by_the_append(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        follower = asyncio.ensure_future(bench.manager.waiting_followers.wait([("t", 0)], 1, 10))
        consumer = asyncio.ensure_future(bench.manager.waiting_fetches.wait([("t", 0)], 1, 10))
        await turns()
        bench.append(b"x", acks=1)
        assert await follower
        assert not consumer.done()
        consumer.cancel()

    run(tmp_path, scenario)


def test_second_look_of_a_fetch_says_nothing_new_of_the_follower(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2)
        bench.fetch(2, 0)
        bench.now_ms = 700
        bench.manager.read_now(
            "t", 0, 0, 9, at_least_one=True, current_leader_epoch=0, follower=FollowerFetch(2, 20, 0, False)
        )
        assert bench.manager.leader_of("t", 0).replica.followers[2].fetched_ms == 0

    run(tmp_path, scenario)


def test_in_sync_set_that_becomes_too_small_fails_what_was_appended(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(min_insync_replicas="3")
        wait = bench.append(b"x")
        assert wait is not None
        bench.fetch(2, 1)
        bench.now_ms = LAG_MS + 1
        bench.fetch(2, 1)
        await bench.manager.check_in_sync_sets()
        with pytest.raises(NotEnoughReplicasAfterAppend):
            await asyncio.wait_for(asyncio.shield(wait), patience())
        assert [state.isr for state in bench.written] == [(1, 2)]
        assert bench.metrics.isr_shrinks == 1
        assert (bench.manager.under_replicated_count, bench.manager.under_min_isr_count) == (1, 1)
        assert bench.high_watermark == 0

    run(tmp_path, scenario)


def test_coordinator_waits_for_the_fate_of_its_write_when_too_few_are_in_sync(tmp_path: Path) -> None:
    """Its memory follows the log: a write that may still be lost must not be called committed."""

    async def scenario(bench: Bench) -> None:
        await bench.lead(min_insync_replicas="3")
        _, wait = bench.manager.append_now("t", 0, batch(b"x"), ACKS_ALL, "internal")
        assert wait is not None
        bench.fetch(2, 1)
        bench.now_ms = LAG_MS + 1
        bench.fetch(2, 1)
        await bench.manager.check_in_sync_sets()
        await turns()
        assert bench.manager.under_min_isr_count == 1
        assert not wait.done()
        bench.fetch(3, 1)
        await asyncio.wait_for(asyncio.shield(wait), patience())
        assert bench.high_watermark == 1

    run(tmp_path, scenario)


def test_smaller_in_sync_set_that_is_large_enough_answers_at_once(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        wait = bench.append(b"x")
        assert wait is not None
        bench.fetch(2, 1)
        bench.now_ms = LAG_MS + 1
        bench.fetch(2, 1)
        bench.write_gate.clear()
        await bench.manager.check_in_sync_sets()
        await turns()
        assert not wait.done(), "before the change stands, the late one counts"
        bench.write_gate.set()
        await asyncio.wait_for(wait, patience())

    run(tmp_path, scenario)


def test_change_that_met_another_state_waits_for_it(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        bench.now_ms = LAG_MS + 1
        bench.conflict = True
        await bench.manager.check_in_sync_sets()
        await turns()
        replica = bench.manager.leader_of("t", 0).replica
        assert replica.pending is not None
        assert replica.isr == (1, 2, 3)
        bench.conflict = False
        await bench.manager.check_in_sync_sets()
        await turns()
        assert bench.written == []
        await bench.lead(1, 3, version=4)
        await bench.manager.check_in_sync_sets()
        await turns()
        assert [(state.isr, state.version) for state in bench.written] == [((1,), 4)]

    run(tmp_path, scenario)


def test_broker_that_was_held_up_blames_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        await bench.lead()
        await bench.manager.check_in_sync_sets()
        bench.now_ms = 60_000
        later = loop.time() + 60
        monkeypatch.setattr(loop, "time", lambda: later)
        await bench.manager.check_in_sync_sets()
        replica = bench.manager.leader_of("t", 0).replica
        assert replica.pending is None
        await bench.manager.check_in_sync_sets()
        assert replica.pending is not None

    run(tmp_path, scenario)


def test_epoch_in_which_nothing_was_written_is_forgotten_by_a_follower(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(epoch=2)
        bench.append(b"a", acks=1)
        await bench.lead(epoch=5, version=1)
        log = bench.manager.leader_of("t", 0).log
        assert log.leader_epochs.entries == [(2, 0), (5, 1)]
        state = PartitionState(2, 6, (2,), 1, 9)
        await bench.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, {}, REPLICAS)
        assert log.leader_epochs.entries == [(2, 0)]

    run(tmp_path, scenario)


def test_follower_that_is_no_replica_any_more_does_not_join_and_others_do(tmp_path: Path) -> None:
    """The news of its replicas has not come here."""

    async def scenario(bench: Bench) -> None:
        await bench.lead(1)
        bench.append(b"a", acks=1)
        bench.assigned = (1, 3)
        bench.fetch(2, 1)
        await turns()
        bench.fetch(3, 1)
        await turns()
        assert [state.isr for state in bench.written] == [(1, 3)]

    run(tmp_path, scenario)


def test_follower_that_has_caught_up_joins(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1)
        bench.append(b"a", b"b", acks=1)
        bench.now_ms = 5 * LAG_MS
        bench.fetch(2, 0)
        await turns()
        assert bench.written == []
        bench.fetch(2, 2)
        await turns()
        assert [state.isr for state in bench.written] == [(1, 2)]
        assert bench.metrics.isr_expands == 1

    run(tmp_path, scenario)


def test_lost_leadership_fails_who_waits(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        wait = bench.append(b"x")
        deletion = asyncio.ensure_future(bench.manager.delete_records("t", 0, 0))
        await turns()
        state = PartitionState(2, 1, (2,), 1, 9)
        bench.manager.set_brokers({1: 10}, own_epoch=-1)  # keeps the fetcher's task at rest
        await bench.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, {}, REPLICAS)
        assert wait is not None
        with pytest.raises(NotLeaderOrFollower):
            await wait
        with pytest.raises(NotLeaderOrFollower):
            await deletion

    run(tmp_path, scenario)


def test_follower_of_another_history_is_told_where_they_part(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(epoch=2)
        bench.append(b"a", b"b", acks=1)
        await bench.lead(epoch=5, version=1)
        bench.append(b"c", acks=1)
        assert bench.fetch(2, 3, epoch=5, last=2).diverging == (2, 2)
        assert bench.fetch(2, 3, epoch=5, last=4).diverging == (2, 2)
        assert bench.manager.leader_of("t", 0).replica.followers[2].end_offset == -1
        assert bench.fetch(2, 3, epoch=5, last=5).diverging is None
        assert bench.manager.leader_of("t", 0).replica.followers[2].end_offset == 3
        with pytest.raises(OffsetOutOfRange):
            bench.fetch(2, 3, epoch=5, last=9)
        with pytest.raises(OffsetOutOfRange):
            bench.fetch(2, 4, epoch=5)
        with pytest.raises(UnknownLeaderEpoch):
            bench.fetch(4, 3, epoch=5)

    run(tmp_path, scenario)


def test_records_are_deleted_when_every_living_replica_has_deleted_them(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        bench.append(b"a", b"b", b"c", acks=1)
        bench.fetch(2, 3)
        bench.fetch(3, 3)
        bench.manager.set_brokers({1: 10, 2: 20})
        deletion = asyncio.ensure_future(bench.manager.delete_records("t", 0, 2))
        await turns()
        assert not deletion.done()
        assert bench.fetch(2, 3, start=0).log_start_offset == 2
        await turns()
        assert not deletion.done()
        bench.fetch(2, 3, start=2)
        assert await deletion == 2
        with pytest.raises(RequestTimedOut):
            await bench.manager.delete_records("t", 0, 3, 1)

    run(tmp_path, scenario)


def test_high_watermark_survives_a_restart(tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        await bench.lead()
        bench.append(b"a", b"b", b"c", acks=1)
        bench.append(b"d", acks=1)
        bench.fetch(2, 4)
        bench.fetch(3, 3)
        assert bench.high_watermark == 3

    async def after(bench: Bench) -> None:
        await bench.lead(epoch=1, version=3)
        assert bench.high_watermark == 3
        assert not bench.manager.leader_of("t", 0).replica.latest_is_known

    run(tmp_path, before)
    assert (tmp_path / "replication-offset-checkpoint").read_text() == "0\n1\nt 0 3\n"
    run(tmp_path, after)


def test_retention_takes_nothing_of_a_partition_without_a_role(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert bench.manager.high_watermark(("t", 0)) == 0
        await bench.lead()
        bench.append(b"a", acks=1)
        assert bench.manager.high_watermark(("t", 0)) == 0

    run(tmp_path, scenario)


def test_failed_data_folder_takes_its_partitions_offline_and_nothing_else(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        told: list[dict[str, list[int]]] = []
        bench.manager.listeners.offline.append(lambda: told.append(bench.manager.offline_partitions()))
        lost: list[str] = []
        bench.manager.listeners.lost.append(lambda topic, number: lost.append(f"{topic}-{number}"))
        await bench.lead()
        wait = bench.append(b"x")
        bench.logs.offline["t", 0] = "the disk is gone"
        assert bench.logs.on_folder_failure is not None
        await asyncio.to_thread(bench.logs.on_folder_failure, tmp_path, "the disk is gone", [("t", 0)])
        await turns()
        assert wait is not None
        with pytest.raises(KafkaStorageError):
            await wait
        with pytest.raises(KafkaStorageError):
            bench.append(b"y")
        assert (told, lost) == ([{"t": [0]}], ["t-0"])

    run(tmp_path, scenario)


def test_only_what_all_in_sync_have_flushed_is_visible_with_flushed_visibility(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead()
        assert bench.append(b"a", acks=1) is None
        for follower in (2, 3):
            bench.fetch(follower, 1)
        assert bench.high_watermark == 0, "the leader has not flushed it"
        wait = bench.append(b"b")
        assert wait is not None
        await until_async(lambda: bench.high_watermark == 1)
        assert bench.manager.leader_of("t", 0).log.recovery_point == 2
        for follower in (2, 3):
            bench.fetch(follower, 2)
        assert wait.done()
        assert bench.high_watermark == 2

    run(tmp_path, scenario, visibility="flushed")


def test_one_replica_makes_nobody_wait(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        state = PartitionState(1, 0, (1,), 1, 0)
        await bench.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, {}, {0: (1,)})
        assert bench.append(b"x") is None
        assert bench.high_watermark == 1

    run(tmp_path, scenario)
