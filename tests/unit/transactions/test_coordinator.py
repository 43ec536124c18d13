"""The coordinator around the state machine: its log, its markers, loading and unloading."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import (
    NotEnoughReplicas,
    NotLeaderOrFollower,
    RequestTimedOut,
    UnreadableRecord,
)
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.transactions.records import encode_key
from millrace.broker.transactions.values import ProducerIdentity, TransactionState
from tests.unit.transactions.coordinator_bench import NONE, ORDERS, A, B, Surroundings, run
from tests.waiting import until_async as until


def test_a_transaction_through_log_and_markers():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = await around.begun()
        assert producer == ProducerIdentity(500, 0)
        assert await coordinator.add_partitions("orders", producer, [A, B]) is NONE
        assert coordinator.verify_now("orders", producer, [A]) == {A: NONE}
        assert coordinator.open_count == 1
        assert await coordinator.end("orders", producer, True) is NONE
        await around.state_is(TransactionState.COMPLETE_COMMIT)
        assert around.log.states() == [
            TransactionState.EMPTY,
            TransactionState.ONGOING,
            TransactionState.PREPARE_COMMIT,
            TransactionState.COMPLETE_COMMIT,
        ]
        (marker,) = around.sent
        assert (marker.producer, marker.coordinator_epoch, marker.committed) == (producer, 3, True)
        assert marker.partitions == {A, B}
        assert (coordinator.committed_count, coordinator.aborted_count, coordinator.open_count) == (1, 0, 0)

    run(scenario)


def test_what_it_does_not_lead_or_has_not_read_yet():
    async def scenario(around: Surroundings) -> None:
        coordinator = around.coordinator
        producer = ProducerIdentity(500, 0)

        async def everything() -> set[ErrorCode]:
            return {
                (await coordinator.begin_producer("orders", 1, None))[0],
                await coordinator.add_partitions("orders", producer, [A]),
                await coordinator.end("orders", producer, True),
                (await coordinator.verify("orders", producer, [A]))[A],
                coordinator.describe("orders").error,
            }

        assert await everything() == {ErrorCode.not_coordinator}
        assert await coordinator.list_transactions() == (NONE, [], [])
        await around.loaded()
        await around.begun()
        around.log.reading.clear()
        loading = asyncio.ensure_future(coordinator.load(ORDERS))
        await asyncio.sleep(0)
        assert await everything() == {ErrorCode.coordinator_load_in_progress}
        assert (await coordinator.list_transactions())[0] is ErrorCode.coordinator_load_in_progress
        around.log.reading.set()
        await loading
        assert around.log.committed_checks[-1] == 1  # served only what is committed
        assert coordinator.describe("orders").error is NONE
        coordinator.unload(ORDERS)
        assert await everything() == {ErrorCode.not_coordinator}

    run(scenario)


def test_unknown_ids_and_empty_ones():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = ProducerIdentity(500, 0)
        assert await coordinator.end("orders", producer, True) is ErrorCode.invalid_producer_id_mapping
        assert coordinator.describe("orders").error is ErrorCode.transactional_id_not_found
        assert await coordinator.end("", producer, True) is ErrorCode.invalid_request
        assert coordinator.describe("").error is ErrorCode.invalid_request
        assert (await coordinator.begin_producer("", 1, None))[0] is ErrorCode.invalid_request

    run(scenario)


def test_an_id_that_no_record_has_room_for_is_refused_and_leaves_nothing():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        for _ in range(2):
            error, _ = await coordinator.begin_producer("x" * 32_768, 1, None)
            assert error is ErrorCode.invalid_request
        assert (await coordinator.begin_producer("x" * 32_767, 1, None))[0] is NONE
        assert len((await coordinator.list_transactions())[2]) == 1

    run(scenario)


def test_a_write_that_fails_unexpectedly_has_an_outcome(monkeypatch):
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()

        def broken(record):
            raise RuntimeError("a defect")

        with monkeypatch.context() as patched:
            patched.setattr("millrace.broker.transactions.coordinator.encode_value", broken)
            assert (await coordinator.begin_producer("orders", 1, None))[0] is ErrorCode.unknown_server_error
        await around.begun()  # the id is not busy for ever

    run(scenario)


@pytest.mark.parametrize("timeout_ms", [0, -1, 901])
def test_timeouts_that_are_not_allowed(timeout_ms):
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        error, _ = await coordinator.begin_producer("orders", timeout_ms, None)
        assert error is ErrorCode.invalid_transaction_timeout
        assert around.log.batches == {}

    run(scenario, max_timeout_ms=900)


def test_no_producer_id_to_be_had():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        around.id_failure = RequestTimedOut("ZooKeeper is away")
        assert (await coordinator.begin_producer("orders", 1, None))[0] is ErrorCode.coordinator_not_available
        assert await coordinator.list_transactions() == (NONE, [], [])
        assert coordinator.describe("orders").error is ErrorCode.transactional_id_not_found
        around.id_failure = None
        await around.begun()

    run(scenario)


def test_two_that_begin_at_once():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        around.log.holds = True
        both = asyncio.gather(*(coordinator.begin_producer("orders", 1, None) for _ in range(2)))
        await until(lambda: around.log.late)
        await asyncio.sleep(0.01)
        around.log.late[0].set_result(None)
        errors = sorted(error.name for error, _ in await both)
        assert errors == ["concurrent_transactions", "none"]

    run(scenario)


def test_a_refused_write_is_heard_and_changes_nothing():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = await around.begun()
        around.log.failure = NotEnoughReplicas("too few")
        assert await coordinator.add_partitions("orders", producer, [A]) is (
            ErrorCode.coordinator_not_available
        )
        assert coordinator.describe("orders").state == "Empty"
        around.log.failure = None
        assert await coordinator.add_partitions("orders", producer, [A]) is NONE

    run(scenario)


def test_a_slow_write_is_given_up_by_its_client_only():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = await around.begun()
        around.log.holds = True
        error = await coordinator.add_partitions("orders", producer, [A])
        assert error is ErrorCode.coordinator_not_available
        assert await coordinator.end("orders", producer, True) is ErrorCode.concurrent_transactions
        around.log.late[0].set_result(None)
        await around.state_is(TransactionState.ONGOING)

    run(scenario, write_timeout_ms=10)


def test_a_client_that_goes_away_stops_nothing():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = await around.begun()
        around.log.holds = True
        asking = asyncio.ensure_future(coordinator.add_partitions("orders", producer, [A]))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        around.log.late[0].set_result(None)
        await around.state_is(TransactionState.ONGOING)

    run(scenario)


def test_a_completion_that_cannot_be_written_is_written_later():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = await around.begun()
        await coordinator.add_partitions("orders", producer, [A])
        around.markers_pass.clear()
        await coordinator.end("orders", producer, False)
        around.log.failure = NotEnoughReplicas("too few")
        around.markers_pass.set()
        await asyncio.sleep(0.02)
        coordinator.retry()
        await asyncio.sleep(0.02)
        assert coordinator.describe("orders").state == "PrepareAbort"
        around.log.failure = None
        coordinator.retry()
        await around.state_is(TransactionState.COMPLETE_ABORT)
        assert coordinator.aborted_count == 1

    run(scenario)


def test_a_new_epoch_of_the_same_leadership_changes_nothing():
    """A follower died: the leader stays, in another epoch, and is told of no change."""

    async def scenario(around: Surroundings) -> None:
        producer = await decided(around)
        around.log.epochs[ORDERS] = 5
        around.markers_pass.set()
        await around.state_is(TransactionState.COMPLETE_COMMIT)  # by the answer to markers of before
        assert await around.coordinator.add_partitions("orders", producer, [B]) is NONE
        assert await around.coordinator.end("orders", producer, False) is NONE
        await around.state_is(TransactionState.COMPLETE_ABORT)
        assert [marker.coordinator_epoch for marker in around.sent] == [3, 3]

    run(scenario)


def test_a_new_epoch_while_the_log_is_being_read():
    async def scenario(around: Surroundings) -> None:
        await around.loaded()
        await around.begun()
        around.coordinator.unload(ORDERS)
        around.log.reading.clear()
        loading = asyncio.ensure_future(around.coordinator.load(ORDERS))
        await asyncio.sleep(0)
        around.log.epochs[ORDERS] = 5
        around.log.reading.set()
        await loading
        assert around.coordinator.describe("orders").error is NONE

    run(scenario)


def test_nothing_is_written_for_a_leadership_that_has_ended():
    """It may have come back in a newer epoch with a log that is not read yet: what is in memory is old."""

    async def scenario(around: Surroundings) -> None:
        await decided(around)
        around.coordinator.unload(ORDERS)
        around.log.epochs[ORDERS] = 5
        count = len(around.log.batches[ORDERS])
        around.coordinator.retry()
        around.markers_pass.set()
        around.now_ms += 10**9
        await around.coordinator.check_timeouts(around.now_ms)
        await asyncio.sleep(0.01)
        assert len(around.log.batches[ORDERS]) == count

    run(scenario)


def test_nothing_is_written_where_another_leads():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = await around.begun()
        count = len(around.log.batches[ORDERS])
        around.log.epochs[ORDERS] = -1
        around.log.failure = NotLeaderOrFollower("elsewhere")  # as the real log's append says, too
        assert await coordinator.add_partitions("orders", producer, [A]) is ErrorCode.not_coordinator
        assert len(around.log.batches[ORDERS]) == count

    run(scenario)


def test_waiting_requests_hear_of_a_lost_leadership():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = await around.begun()
        around.log.holds = True
        asking = asyncio.ensure_future(coordinator.add_partitions("orders", producer, [A]))
        await asyncio.sleep(0)
        coordinator.unload(ORDERS)
        assert await asking is ErrorCode.not_coordinator
        around.log.late[0].set_exception(NotLeaderOrFollower("elsewhere"))

    run(scenario)


def test_a_new_coordinator_ends_what_the_one_before_had_decided():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = await around.begun()
        await coordinator.add_partitions("orders", producer, [A, B])
        around.markers_pass.clear()
        await coordinator.end("orders", producer, True)
        await until(lambda: around.sent)
        coordinator.unload(ORDERS)
        around.markers_pass.set()  # an answer to the old one
        await asyncio.sleep(0.01)
        around.log.epochs[ORDERS] = 4
        other = Surroundings(around.log)
        await other.loaded()
        await other.state_is(TransactionState.COMPLETE_COMMIT)
        assert other.sent[0].coordinator_epoch == 4
        assert other.sent[0].partitions == {A, B}
        assert await other.coordinator.end("orders", producer, True) is NONE
        await other.coordinator.close()

    run(scenario)


async def decided(around: Surroundings) -> ProducerIdentity:
    """A transaction whose outcome is in the log, and whose markers are not answered."""
    coordinator = await around.loaded()
    producer = await around.begun()
    await coordinator.add_partitions("orders", producer, [A])
    around.markers_pass.clear()
    await coordinator.end("orders", producer, True)
    await until(lambda: around.sent)
    return producer


def test_a_leadership_that_ends_while_it_is_being_loaded():
    async def scenario(around: Surroundings) -> None:
        await decided(around)
        around.coordinator.unload(ORDERS)
        other = Surroundings(around.log)
        around.log.reading.clear()
        loading = asyncio.ensure_future(other.coordinator.load(ORDERS))
        await asyncio.sleep(0)
        other.coordinator.unload(ORDERS)
        around.log.reading.set()
        await loading
        assert other.coordinator.describe("orders").error is not NONE
        await asyncio.sleep(0.01)
        assert not other.sent
        await other.coordinator.close()

    run(scenario)


def test_an_answer_to_markers_of_an_earlier_epoch_counts_for_nothing():
    async def scenario(around: Surroundings) -> None:
        await decided(around)
        around.log.epochs[ORDERS] = 4
        await around.coordinator.load(ORDERS)
        around.markers_pass.set()  # only who waits now gets an answer: the markers of epoch 3
        around.markers_pass.clear()
        await until(lambda: len(around.sent) == 2)
        assert [marker.coordinator_epoch for marker in around.sent] == [3, 4]
        assert around.coordinator.describe("orders").state == "PrepareCommit"
        around.markers_pass.set()
        await around.state_is(TransactionState.COMPLETE_COMMIT)

    run(scenario)


def test_records_of_newer_software():
    async def scenario(around: Surroundings) -> None:
        await around.loaded()
        await around.begun()

        def append(key: bytes, value: bytes | None) -> None:
            around.log.append_now(ORDERS, bytes(build_batch([Record(key, value, (), 0, 0)])))

        append(b"\x00\x09something", b"else")
        await around.coordinator.load(ORDERS)  # skipped
        append(encode_key("orders"), b"\x00\x09")
        with pytest.raises(UnreadableRecord, match="offset 2: value version"):
            await around.coordinator.load(ORDERS)
        assert around.coordinator.describe("orders").error is ErrorCode.coordinator_load_in_progress

    run(scenario)


def test_timeouts_and_expiry_by_the_clock():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        producer = await around.begun()
        await coordinator.add_partitions("orders", producer, [A])
        running = asyncio.ensure_future(coordinator.run())
        await asyncio.sleep(0)
        around.now_ms += 60_001
        await around.state_is(TransactionState.COMPLETE_ABORT)
        assert coordinator.timed_out_count == 1
        around.now_ms += 10_000_000
        await until(lambda: coordinator.describe("orders").error is not NONE)
        assert around.log.states()[-1] is None
        running.cancel()
        again = Surroundings(around.log)
        await again.loaded()
        assert again.coordinator.describe("orders").error is ErrorCode.transactional_id_not_found
        await again.coordinator.close()

    run(scenario, abort_check_interval_ms=5, expiry_check_interval_ms=5, id_expiration_ms=1_000_000)


def test_others_have_their_turn_while_very_many_ids_expire(monkeypatch: pytest.MonkeyPatch):
    """Ids that were begun together are due at one and the same look, and each is a write."""
    monkeypatch.setattr("millrace.broker.transactions.coordinator.IDS_AT_ONCE", 2)

    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        names = [name for name in map(str, range(99)) if coordinator.partition_of(name) == ORDERS][:6]
        for name in names:
            assert (await coordinator.begin_producer(name, 60_000, None))[0] is NONE
        appends = len(around.log.batches[ORDERS])
        expiring = asyncio.ensure_future(coordinator.expire(around.now_ms + 1_000_001))
        seen = []
        while not expiring.done():
            await asyncio.sleep(0)
            seen.append(len(around.log.batches[ORDERS]) - appends)
        assert sorted(set(seen) - {0}) == [2, 4, 6]
        await until(lambda: all(coordinator.describe(name).error is not NONE for name in names))

    run(scenario, id_expiration_ms=1_000_000)


def test_timeouts_are_looked_for_in_time_when_the_clock_was_set_back():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        running = asyncio.ensure_future(coordinator.run())
        await asyncio.sleep(0)
        around.now_ms -= 3_600_000
        producer = await around.begun()
        await coordinator.add_partitions("orders", producer, [A])
        around.now_ms += 60_001
        await around.state_is(TransactionState.COMPLETE_ABORT)
        running.cancel()
        await coordinator.close()

    run(scenario, abort_check_interval_ms=5)


@pytest.mark.parametrize(
    ("key", "count", "partition"),
    # Apache Kafka's rule: Utils.abs(key.hashCode) % count; the hash of the third is -2^31.
    [("hello", 50, 99_162_322 % 50), ("", 50, 0), ("polygenelubricants", 50, 0), ("é𝄞", 7, 1_996_307 % 7)],
)
def test_partition_of_an_id(key, count, partition):
    assert coordinator_partition(key, count) == partition
