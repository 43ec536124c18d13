"""Requests of transactional producers: let in, refused with the right error, never overtaken."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    NotEnoughReplicas,
    TransactionAbortable,
)
from millrace.broker.protocol.hot_produce import PartitionBatches
from millrace.broker.server import transactional_produce
from millrace.broker.server.transactional_produce import TransactionalAppends, copied
from tests.raw_client import batch_of

NONE = ErrorCode.none


class Gate:
    """Answers at once (`at_once`), or when a waiting request is released."""

    def __init__(self, at_once: ErrorCode | None = NONE) -> None:
        self.at_once = at_once
        self.asked: list[dict] = []
        self.waiting: list[asyncio.Future[ErrorCode]] = []
        self.noted: list[tuple] = []

    def admit_now(self, transactional_id, producer, sequences):
        self.asked.append(dict(sequences))
        return None if self.at_once is None else dict.fromkeys(sequences, self.at_once)

    async def admit(self, transactional_id, producer, sequences):
        self.waiting.append(asyncio.get_running_loop().create_future())
        return dict.fromkeys(sequences, await self.waiting[-1])

    def appended(self, partition, producer_id):
        self.noted.append((partition, producer_id))


def batch(
    sequence=0, *, partition=0, producer_id=7, producer_epoch=1, transactional=True
) -> PartitionBatches:
    records = batch_of(
        b"x",
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=sequence,
        transactional=transactional,
    )
    return PartitionBatches("t", partition, memoryview(records))


@pytest.mark.parametrize(
    ("error", "version", "refusal"),
    [
        (ErrorCode.invalid_txn_state, 9, InvalidTxnState),
        (ErrorCode.transaction_abortable, 10, InvalidTxnState),
        (ErrorCode.transaction_abortable, 11, TransactionAbortable),
        (ErrorCode.producer_fenced, 11, InvalidProducerEpoch),
        (ErrorCode.invalid_producer_id_mapping, 11, InvalidProducerIdMapping),
        (ErrorCode.concurrent_transactions, 11, NotEnoughReplicas),
        (ErrorCode.network_exception, 11, NotEnoughReplicas),
        (ErrorCode.coordinator_load_in_progress, 11, NotEnoughReplicas),
        (ErrorCode.coordinator_not_available, 11, NotEnoughReplicas),
        (ErrorCode.not_coordinator, 11, NotEnoughReplicas),
    ],
)
def test_errors_as_producers_understand_them(error, version, refusal):
    refusals = TransactionalAppends(Gate(error)).admit_now("orders", version, [batch()])
    assert {partition: type(each) for partition, each in refusals.items()} == {("t", 0): refusal}


def test_plain_batches_in_a_transactional_request_need_no_question():
    gate = Gate()
    partitions = [batch(transactional=False), PartitionBatches("t", 1, None)]
    assert TransactionalAppends(gate).admit_now("orders", 9, partitions) == {}
    assert not gate.asked
    TransactionalAppends(gate).appended(partitions[0])
    assert not gate.noted


def test_malformed_batches_are_left_to_the_append():
    damaged = batch()
    damaged.records[16] = 9  # the magic
    short = PartitionBatches("t", 1, memoryview(bytearray(20)))
    assert TransactionalAppends(Gate()).admit_now("orders", 9, [damaged, short]) == {}


def noting(name: str, order: list[str]):
    """An `append` that takes all."""

    async def append(_refusals: object, _first: int, end: int) -> int:
        order.append(name)
        return end

    return append


def test_one_request_one_producer():
    with pytest.raises(InvalidProducerIdMapping):
        TransactionalAppends(Gate()).admit_now("orders", 9, [batch(), batch(partition=1, producer_id=8)])


def test_each_partition_is_asked_for_with_its_base_sequence():
    gate = Gate()
    TransactionalAppends(gate).admit_now("orders", 9, [batch(3), batch(5, partition=1)])
    assert gate.asked == [{("t", 0): 3, ("t", 1): 5}]


def test_requests_are_appended_in_the_order_in_which_they_came():
    async def scenario() -> None:
        gate = Gate(at_once=None)
        appends = TransactionalAppends(gate)
        order: list[str] = []
        assert appends.admit_now("orders", 9, [batch()]) is None
        first = asyncio.ensure_future(appends.in_turn("orders", 9, [batch()], noting("first", order)))
        await asyncio.sleep(0)
        gate.at_once = NONE  # the log would let it in by now: it waits for the first all the same
        assert appends.admit_now("orders", 9, [batch(1)]) is None
        second = asyncio.ensure_future(appends.in_turn("orders", 9, [batch(1)], noting("second", order)))
        # Other producers don't wait for this one.
        assert appends.admit_now("others", 9, [batch(producer_id=8)]) == {}
        await asyncio.sleep(0)
        gate.waiting[0].set_result(NONE)
        await first
        assert appends.admit_now("orders", 9, [batch(2)]) is None  # the second has not had its turn
        await asyncio.sleep(0)
        gate.waiting[1].set_result(NONE)
        await second
        assert order == ["first", "second"]
        assert appends.admit_now("orders", 9, [batch(2)]) == {}

    asyncio.run(scenario())


def test_a_producer_whose_epoch_is_over_holds_up_nobody_while_that_is_being_confirmed():
    async def scenario() -> None:
        gate = Gate(at_once=None)
        appends = TransactionalAppends(gate)
        old = appends.in_turn("orders", 9, [batch()], noting("", []))
        gate.at_once = NONE
        assert appends.admit_now("orders", 9, [batch(producer_epoch=2)]) == {}
        await asyncio.sleep(0)
        gate.waiting[0].set_result(ErrorCode.producer_fenced)
        await old

    asyncio.run(scenario())


def test_a_request_has_its_place_before_its_task_runs():
    """Two requests of one read: the second, whose partition is open already, must not go first."""

    async def scenario() -> None:
        gate = Gate(at_once=None)
        appends = TransactionalAppends(gate)
        first = appends.in_turn("orders", 9, [batch()], noting("", []))
        gate.at_once = NONE
        assert appends.admit_now("orders", 9, [batch(1)]) is None
        first.cancel()  # also one that never began leaves its place
        await asyncio.wait([first])
        await asyncio.sleep(0)
        assert appends.admit_now("orders", 9, [batch(1)]) == {}

    asyncio.run(scenario())


def test_a_client_that_goes_away_lets_the_next_one_through():
    async def scenario() -> None:
        gate = Gate(at_once=None)
        appends = TransactionalAppends(gate)
        order: list[str] = []
        going = asyncio.ensure_future(appends.in_turn("orders", 9, [batch()], noting("gone", order)))
        await asyncio.sleep(0)
        next_one = asyncio.ensure_future(appends.in_turn("orders", 9, [batch()], noting("next", order)))
        await asyncio.sleep(0)
        going.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        gate.waiting[1].set_result(NONE)
        await next_one
        assert order == ["next"]

    asyncio.run(scenario())


def test_what_waits_is_copied():
    original = batch()
    (copy,) = copied([original])
    original.records[0] = 99
    assert copy.records[0] == 0
    assert copied([PartitionBatches("t", 0, None)]) == [PartitionBatches("t", 0, None)]


def test_behind_a_batch_that_was_waited_for_each_is_asked_about_anew():
    """Whatever took its time: the transaction could have ended meanwhile."""

    async def scenario() -> None:
        gate = Gate()
        taken: list[tuple[int, int, list[int]]] = []

        async def append(refusals, first: int, end: int) -> int:
            taken.append((first, end, sorted(partition for _, partition in refusals)))
            return first + 1

        partitions = [batch(partition=number) for number in range(3)]
        whole = TransactionalAppends(gate).in_turn("orders", 9, partitions, append)
        for number, answer in enumerate([NONE, ErrorCode.invalid_txn_state, NONE]):
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(gate.waiting) == number + 1
            gate.waiting[number].set_result(answer)
        await whole
        assert taken == [(0, 3, []), (1, 3, [1, 2]), (2, 3, [])]

    asyncio.run(scenario())


def test_others_have_their_turn_in_a_request_of_very_many_batches(monkeypatch):
    """And each part is asked about right before its append: the transaction could end in between."""
    monkeypatch.setattr(transactional_produce, "BATCHES_AT_ONCE", 2)

    async def scenario() -> None:
        gate = Gate(at_once=None)
        done: list[tuple[str, int]] = []
        partitions = [batch(partition=number) for number in range(5)]

        async def append(refusals, first: int, end: int) -> int:
            refused = {partition for _, partition in refusals}
            done.extend(
                ("refused" if each.partition in refused else "appended", each.partition)
                for each in partitions[first:end]
            )
            return end

        whole = TransactionalAppends(gate).in_turn("orders", 9, partitions, append)
        for number, answer in enumerate([NONE, NONE, ErrorCode.invalid_txn_state]):
            for _ in range(5):
                await asyncio.sleep(0)
            assert (len(gate.waiting), len(done)) == (number + 1, 2 * number)
            gate.waiting[number].set_result(answer)
        await whole
        assert done == [*(("appended", number) for number in range(4)), ("refused", 4)]

    asyncio.run(scenario())
