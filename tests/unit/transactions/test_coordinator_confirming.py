"""The coordinator asks its log before it says anything final: it may have been replaced."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from kio.schema.errors import ErrorCode
from structlog.testing import capture_logs

from millrace.broker.errors import (
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
)
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.transactions.records import encode_key, encode_value
from millrace.broker.transactions.values import ProducerIdentity, TransactionRecord, TransactionState
from tests.unit.transactions.coordinator_bench import NONE, ORDERS, WIDTH, A, B, Surroundings, run
from tests.waiting import until_async as until


async def committed(around: Surroundings) -> ProducerIdentity:
    """A producer whose transaction is committed everywhere."""
    coordinator = await around.loaded()
    producer = await around.begun()
    await coordinator.add_partitions("orders", producer, [A])
    await coordinator.end("orders", producer, True)
    await around.state_is(TransactionState.COMPLETE_COMMIT)
    return producer


STRANGER = ProducerIdentity(77, 0)


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda c, producer: c.end("orders", producer, True), NONE),
        (lambda c, producer: c.end("orders", producer, False), ErrorCode.invalid_txn_state),
        (lambda c, producer: c.end("orders", STRANGER, True), ErrorCode.invalid_producer_id_mapping),
        (lambda c, producer: c.end("unknown", producer, True), ErrorCode.invalid_producer_id_mapping),
        (lambda c, producer: c.begin_producer("orders", 1, STRANGER), ErrorCode.producer_fenced),
    ],
)
def test_a_coordinator_that_has_been_replaced_and_does_not_know_it_says_nothing_final(ask, answer):
    """Its followers have another leader: what it appends is never acknowledged."""

    async def scenario(around: Surroundings) -> None:
        producer = await committed(around)
        around.log.holds = True
        asking = asyncio.ensure_future(ask(around.coordinator, producer))
        await until(lambda: around.log.late or asking.done())
        assert not asking.done()
        around.log.late[0].set_exception(NotLeaderOrFollower("elsewhere"))
        heard = await asking
        assert heard in (ErrorCode.not_coordinator, (ErrorCode.not_coordinator, ProducerIdentity()))
        around.log.holds = False  # it was no other after all
        heard = await ask(around.coordinator, producer)
        assert heard in (answer, (answer, ProducerIdentity()))
        assert around.coordinator.describe("orders").state == "CompleteCommit"

    run(scenario)


async def opened(around: Surroundings) -> ProducerIdentity:
    """A producer that another has followed, and whose follower has partition A in a transaction."""
    coordinator = await around.loaded()
    old = await around.begun()
    await coordinator.add_partitions("orders", await around.begun(), [A])
    return old


@pytest.mark.parametrize(
    ("transactional_id", "epoch", "partition", "refusal"),
    [
        ("orders", 0, A, ErrorCode.producer_fenced),
        ("orders", 1, B, ErrorCode.transaction_abortable),
        ("unknown", 1, A, ErrorCode.invalid_producer_id_mapping),
    ],
)
def test_a_leader_hears_from_memory_that_it_may_append_and_only_from_the_log_that_it_may_not(
    transactional_id, epoch, partition, refusal
):
    """The leader may be the same broker, and as little the leader any more as it is the coordinator."""

    async def scenario(around: Surroundings) -> None:
        coordinator = around.coordinator
        producer = replace(await opened(around), epoch=epoch)
        around.log.holds = True
        assert coordinator.verify_now("orders", replace(producer, epoch=1), [A]) == {A: NONE}
        assert await coordinator.verify("orders", replace(producer, epoch=1), [A]) == {A: NONE}
        assert not around.log.late
        assert coordinator.verify_now(transactional_id, producer, [partition]) is None
        asking = asyncio.ensure_future(coordinator.verify(transactional_id, producer, [partition]))
        await until(lambda: around.log.late or asking.done())
        assert not asking.done()
        around.log.late[0].set_exception(NotLeaderOrFollower("elsewhere"))
        assert await asking == {partition: ErrorCode.not_coordinator}
        around.log.holds = False
        assert await coordinator.verify(transactional_id, producer, [partition]) == {partition: refusal}

    run(scenario)


def test_a_leader_is_refused_for_now_while_a_transition_is_being_written():
    """What would confirm the refusal would undo the transition in the log."""

    async def scenario(around: Surroundings) -> None:
        coordinator = around.coordinator
        producer = replace(await opened(around), epoch=1)
        around.log.holds = True
        adding = asyncio.ensure_future(coordinator.add_partitions("orders", producer, [B]))
        await until(lambda: around.log.late)
        assert await coordinator.verify("orders", producer, [B]) == {B: ErrorCode.concurrent_transactions}
        around.log.late[0].set_result(None)
        assert await adding is NONE
        assert coordinator.verify_now("orders", producer, [B]) == {B: NONE}

    run(scenario)


def test_a_final_answer_that_takes_long_to_confirm_is_given_up_and_holds_up_nobody():
    async def scenario(around: Surroundings) -> None:
        producer = await committed(around)
        around.log.holds = True
        error = await around.coordinator.end("orders", producer, True)
        assert error is ErrorCode.coordinator_not_available
        around.log.holds = False
        assert await around.coordinator.add_partitions("orders", producer, [A]) is NONE

    run(scenario, write_timeout_ms=10)


def test_a_final_answer_that_is_being_confirmed_is_for_the_next_coordinator_when_this_one_stops():
    async def scenario(around: Surroundings) -> None:
        producer = await committed(around)
        around.log.holds = True
        asking = asyncio.gather(
            around.coordinator.end("orders", producer, True),
            around.coordinator.end("orders", STRANGER, True),
            around.coordinator.end("unknown", producer, True),
        )
        await until(lambda: len(around.log.late) == 3 or asking.done())
        around.coordinator.unload(ORDERS)
        around.coordinator.unload(coordinator_partition("unknown", WIDTH))
        assert set(await asking) == {ErrorCode.not_coordinator}

    run(scenario)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_answer_that_is_not_confirmed_is_no_state_that_was_not_saved(is_late):
    """Clients that ask often while too few replicas are in sync fill neither the log nor the memory."""

    async def scenario(around: Surroundings) -> None:
        producer = await committed(around)
        around.log.holds = is_late
        around.log.failure = None if is_late else NotEnoughReplicas("too few")
        with capture_logs() as lines:
            for ask in (
                around.coordinator.end("orders", STRANGER, True),
                around.coordinator.end("unknown", producer, True),
            ):
                assert await ask is ErrorCode.coordinator_not_available
            for late in around.log.late:
                late.set_exception(NotEnoughReplicasAfterAppend("too few"))
            await until(lambda: not around.coordinator._under_way)
        assert [(line["event"], line["log_level"]) for line in lines] == [
            ("an answer was not confirmed", "debug")
        ] * 2
        assert not around.coordinator._unsaved

    run(scenario, write_timeout_ms=10)


def test_a_producer_id_that_nobody_can_have_is_refused_without_asking_the_log():
    """As a client asks that wants to know no more than whether it may end a transaction."""
    nobody = ProducerIdentity(-1, 0)

    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()

        async def heard(transactional_id: str) -> set[ErrorCode]:
            return {
                await coordinator.end(transactional_id, nobody, False),
                await coordinator.add_partitions(transactional_id, nobody, [A]),
                (await coordinator.verify(transactional_id, nobody, [A]))[A],
            }

        producer = await around.begun()
        around.log.holds = True
        adding = asyncio.ensure_future(coordinator.add_partitions("orders", producer, [A]))
        await until(lambda: around.log.late)
        written = {partition: len(batches) for partition, batches in around.log.batches.items()}
        for transactional_id in ("orders", "unknown"):
            assert await heard(transactional_id) == {ErrorCode.invalid_producer_id_mapping}
        assert {partition: len(batches) for partition, batches in around.log.batches.items()} == written
        assert sum(len(owned.transactions) for owned in coordinator._partitions.values()) == 1
        around.log.late[0].set_result(None)
        assert await adding is NONE

    run(scenario)


def test_what_kafka_4_decided_is_completed_as_kafka_4_would_also_after_an_answer_was_confirmed():
    """KIP-890: its producer goes on under the id that is in the record, whoever has repeated the record."""
    fenced, successor = ProducerIdentity(5, 3), ProducerIdentity(9, 0)
    decided = TransactionRecord(
        5,
        32_767,
        60_000,
        TransactionState.PREPARE_COMMIT,
        frozenset({A}),
        started_ms=1,
        updated_ms=2,
        previous_producer_id=5,
        next_producer_id=9,
        client_version=2,
    )

    async def scenario(around: Surroundings) -> None:
        left = Record(encode_key("orders"), encode_value(decided, 1), (), 0, 0)
        around.log.append_now(ORDERS, bytes(build_batch([left])))
        around.markers_pass.clear()
        coordinator = await around.loaded()
        assert await coordinator.end("orders", fenced, True) is ErrorCode.producer_fenced
        coordinator.unload(ORDERS)
        other = Surroundings(around.log)
        await other.loaded()
        await other.state_is(TransactionState.COMPLETE_COMMIT)
        assert await other.coordinator.add_partitions("orders", successor, [A]) is NONE
        await other.coordinator.close()

    run(scenario)


def test_an_id_that_nobody_has_begun_with_leaves_nothing_behind():
    async def scenario(around: Surroundings) -> None:
        coordinator = await around.loaded()
        around.log.holds = True
        asking = asyncio.ensure_future(coordinator.end("orders", STRANGER, True))
        await until(lambda: around.log.late or asking.done())
        assert coordinator.describe("orders").error is ErrorCode.transactional_id_not_found
        around.log.late[0].set_result(None)
        assert await asking is ErrorCode.invalid_producer_id_mapping
        assert around.log.states() == [None]
        around.log.holds = False
        await until(lambda: not coordinator._partitions[ORDERS].transactions)
        assert await coordinator.end("x" * 32_768, STRANGER, True) is ErrorCode.invalid_producer_id_mapping
        await around.begun()

    run(scenario)
