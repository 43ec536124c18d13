"""Which transactional batches a leader lets in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import NetworkException, NotLeaderOrFollower
from millrace.broker.transactions.markers import NO_LEADER
from millrace.broker.transactions.values import ProducerIdentity
from millrace.broker.transactions.verification import UNUSED_FOR_MS, TransactionGate, VerificationStates

A, B = ("t", 0), ("t", 1)
NONE = ErrorCode.none
PRODUCER = ProducerIdentity(7, 2)
HERE, THERE = 1, 2


# -- the states -------------------------------------------------------------------------------------


@pytest.fixture
def states() -> VerificationStates:
    return VerificationStates()


def test_a_verified_batch_is_let_in_until_it_is_appended(states):
    token = states.begin(A, PRODUCER, 0, 0)
    assert states.refusal(A, 7, token, 0) is NONE
    states.end(A, 7)
    assert states.refusal(A, 7, token, 0) is ErrorCode.invalid_txn_state
    assert len(states) == 0


def test_an_answer_from_before_the_end_of_a_transaction_counts_for_nothing_after_it(states):
    """The coordinator agreed, the marker came, another transaction began: the old answer is not for it."""
    old = states.begin(A, PRODUCER, 0, 0)
    states.end(A, 7)
    new = states.begin(A, PRODUCER, 5, 0)
    assert states.refusal(A, 7, old, 5) is ErrorCode.invalid_txn_state
    assert states.refusal(A, 7, new, 5) is NONE


def test_producers_and_partitions_are_kept_apart(states):
    token = states.begin(A, PRODUCER, 0, 0)
    states.begin(B, PRODUCER, 0, 0)
    states.begin(A, ProducerIdentity(8, 0), 0, 0)
    states.end(B, 7)
    states.end(A, 8)
    assert states.refusal(A, 7, token, 0) is NONE


def test_a_later_batch_does_not_overtake_one_that_was_refused_for_now(states):
    states.begin(A, PRODUCER, 0, 0)
    token = states.begin(A, PRODUCER, 5, 0)
    assert states.refusal(A, 7, token, 5) is ErrorCode.out_of_order_sequence_number
    assert states.refusal(A, 7, token, 0) is NONE


def test_a_new_epoch_counts_sequences_anew(states):
    states.begin(A, PRODUCER, 0, 0)
    token = states.begin(A, ProducerIdentity(7, 3), 9, 0)
    assert states.refusal(A, 7, token, 9) is NONE
    token = states.begin(A, PRODUCER, 1, 0)  # of the old epoch: changes nothing
    assert states.refusal(A, 7, token, 9) is NONE


def test_states_that_nobody_used_expire(states):
    states.begin(A, PRODUCER, 0, 0)
    states.expire(UNUSED_FOR_MS - 1)
    assert len(states) == 1
    states.expire(UNUSED_FOR_MS)
    assert len(states) == 0


def test_a_lost_partition_is_forgotten(states):
    token = states.begin(A, PRODUCER, 0, 0)
    states.forget(A)
    assert states.refusal(A, 7, token, 0) is ErrorCode.invalid_txn_state


# -- the gate ---------------------------------------------------------------------------------------


class Surroundings:
    """A leader's logs, and a coordinator here or there."""

    def __init__(self, coordinator: int, *, enabled: bool = True) -> None:
        self.coordinator = coordinator
        self.entries: dict[tuple[str, int], dict[int, SimpleNamespace]] = {A: {}, B: {}}
        self.verified = NONE
        self.asked: list[list[tuple[str, int]]] = []
        self.failure: Exception | None = None
        self.must_ask_the_log = False
        self.gate_of_answers = asyncio.Event()
        self.gate_of_answers.set()
        self.gate = TransactionGate(
            HERE,
            self,
            clock_ms=lambda: 0,
            coordinator_of=lambda transactional_id: self.coordinator,
            verify_now=self.verify_now,
            verify_here=self.verify_here,
            verify_there=self.verify_there,
            enabled=enabled,
        )

    def leader_of(self, topic, partition):
        if (topic, partition) not in self.entries:
            raise NotLeaderOrFollower("elsewhere")
        producers = SimpleNamespace(entries=self.entries[(topic, partition)])
        return SimpleNamespace(log=SimpleNamespace(producers=producers))

    def verify(self, transactional_id, producer, partitions):
        self.asked.append(list(partitions))
        return dict.fromkeys(partitions, self.verified)

    def verify_now(self, transactional_id, producer, partitions):
        return None if self.must_ask_the_log else self.verify(transactional_id, producer, partitions)

    async def verify_here(self, transactional_id, producer, partitions):
        if self.must_ask_the_log:
            await self.gate_of_answers.wait()
        return self.verify(transactional_id, producer, partitions)

    async def verify_there(self, broker_id, transactional_id, producer, partitions):
        assert broker_id == THERE
        await self.gate_of_answers.wait()
        if self.failure is not None:
            raise self.failure
        return self.verify(transactional_id, producer, partitions)

    def opened(self, partition, epoch=PRODUCER.epoch, start=0) -> None:
        self.entries[partition][7] = SimpleNamespace(epoch=epoch, transaction_start_offset=start)


def ask(surroundings: Surroundings, sequences, *, at_once: bool):
    gate = surroundings.gate
    if at_once:
        return gate.admit_now("orders", PRODUCER, sequences)
    return asyncio.run(gate.admit("orders", PRODUCER, sequences))


@pytest.mark.parametrize("at_once", [True, False])
def test_an_open_transaction_needs_no_question(at_once):
    around = Surroundings(THERE)
    around.opened(A)
    assert ask(around, {A: 3}, at_once=at_once) == {A: NONE}
    assert not around.asked


@pytest.mark.parametrize("at_once", [True, False])
def test_a_transaction_of_another_epoch_is_not_this_one(at_once):
    around = Surroundings(HERE)
    around.opened(A, epoch=1)
    around.verified = ErrorCode.producer_fenced
    assert ask(around, {A: 3}, at_once=at_once) == {A: ErrorCode.producer_fenced}
    assert around.asked == [[A]]


@pytest.mark.parametrize("at_once", [True, False])
def test_only_what_the_log_does_not_know_is_asked_for(at_once):
    around = Surroundings(HERE)
    around.opened(A)
    around.entries[B][7] = SimpleNamespace(epoch=2, transaction_start_offset=-1)  # has ended
    errors = ask(around, {A: 3, B: 0, ("t", 9): 0}, at_once=at_once)
    assert errors == {A: NONE, B: NONE, ("t", 9): ErrorCode.not_leader_or_follower}
    assert around.asked == [[B]]


def test_a_coordinator_elsewhere_has_to_be_waited_for():
    around = Surroundings(THERE)
    assert ask(around, {A: 0}, at_once=True) is None
    assert ask(around, {A: 0}, at_once=False) == {A: NONE}


def test_a_coordinator_here_that_has_to_ask_its_log_is_waited_for():
    around = Surroundings(HERE)
    around.must_ask_the_log = True
    around.verified = ErrorCode.producer_fenced
    assert ask(around, {A: 0}, at_once=True) is None
    assert not around.asked
    assert ask(around, {A: 0}, at_once=False) == {A: ErrorCode.producer_fenced}


@pytest.mark.parametrize(
    ("coordinator", "failure", "error"),
    [
        (NO_LEADER, None, ErrorCode.coordinator_not_available),
        (THERE, NetworkException("gone"), ErrorCode.network_exception),
    ],
)
def test_a_coordinator_that_cannot_be_asked(coordinator, failure, error):
    around = Surroundings(coordinator)
    around.failure = failure
    assert ask(around, {A: 0}, at_once=False) == {A: error}


@pytest.mark.parametrize("coordinator", [HERE, THERE])
def test_a_marker_that_comes_before_the_answer_makes_it_worthless(coordinator):
    async def scenario() -> None:
        around = Surroundings(coordinator)
        around.must_ask_the_log = True
        around.gate_of_answers.clear()
        asking = asyncio.ensure_future(around.gate.admit("orders", PRODUCER, {A: 0, B: 0}))
        await asyncio.sleep(0)
        around.gate.ended(A, 7)
        around.gate_of_answers.set()
        assert await asking == {A: ErrorCode.invalid_txn_state, B: NONE}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (SimpleNamespace(epoch=2, transaction_start_offset=-1), ErrorCode.invalid_txn_state),
        (SimpleNamespace(epoch=3, transaction_start_offset=9), ErrorCode.invalid_txn_state),
        (None, ErrorCode.not_leader_or_follower),
    ],
)
def test_what_was_open_before_the_question_is_looked_at_again_after_it(found, error):
    """The client has given up and aborted while another partition was asked for: a batch behind the marker
    would open a transaction that the producer's next commit publishes."""

    async def scenario() -> None:
        around = Surroundings(THERE)
        around.opened(A)
        around.gate_of_answers.clear()
        asking = asyncio.ensure_future(around.gate.admit("orders", PRODUCER, {A: 3, B: 0}))
        await asyncio.sleep(0)
        if found is None:
            del around.entries[A]
        else:
            around.entries[A][7] = found
        around.gate_of_answers.set()
        assert await asking == {A: error, B: NONE}

    asyncio.run(scenario())


def test_a_lost_leadership_makes_the_answer_worthless():
    async def scenario() -> None:
        around = Surroundings(THERE)
        around.gate_of_answers.clear()
        asking = asyncio.ensure_future(around.gate.admit("orders", PRODUCER, {A: 0}))
        await asyncio.sleep(0)
        around.gate.lost(*A)
        around.gate_of_answers.set()
        assert await asking == {A: ErrorCode.invalid_txn_state}

    asyncio.run(scenario())


def test_a_batch_beside_it_may_have_opened_the_transaction():
    async def scenario() -> None:
        around = Surroundings(THERE)
        around.gate_of_answers.clear()
        asking = asyncio.ensure_future(around.gate.admit("orders", PRODUCER, {A: 5}))
        await asyncio.sleep(0)
        around.opened(A)
        around.gate.appended(A, 7)
        around.gate_of_answers.set()
        assert await asking == {A: NONE}

    asyncio.run(scenario())


def test_verification_may_be_turned_off():
    around = Surroundings(THERE, enabled=False)
    assert ask(around, {A: 0}, at_once=True) == {A: NONE}
