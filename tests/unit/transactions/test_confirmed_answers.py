"""One transactional id: what a client takes for final is said when the log has confirmed it."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.transactions.values import ProducerIdentity, TransactionState
from tests.unit.transactions.conftest import PENDING, TIMEOUT_MS, A, B

State = TransactionState
NONE = ErrorCode.none


def at_rest(driver):
    """A producer that another has followed, and its follower, whose transaction is committed."""
    old = driver.started()
    producer = driver.started()
    driver.add(producer, A)
    driver.end(producer)
    return old, producer


def in_a_transaction(driver):
    old = driver.started()
    producer = driver.started()
    driver.add(producer, A, B)
    return old, producer


def with_markers_out(driver):
    old, producer = in_a_transaction(driver)
    driver.holds_markers = True
    driver.end(producer)
    return old, producer


STRANGER = ProducerIdentity(77, 0)
FINAL = {
    "end repeated": (at_rest, lambda d, old, now: d.end(now), NONE),
    "end otherwise": (at_rest, lambda d, old, now: d.end(now, committed=False), ErrorCode.invalid_txn_state),
    "end, fenced": (at_rest, lambda d, old, now: d.end(old), ErrorCode.producer_fenced),
    "end, fenced, open": (in_a_transaction, lambda d, old, now: d.end(old), ErrorCode.producer_fenced),
    "end, fenced, markers": (with_markers_out, lambda d, old, now: d.end(old), ErrorCode.producer_fenced),
    "end, stranger": (at_rest, lambda d, old, now: d.end(STRANGER), ErrorCode.invalid_producer_id_mapping),
    "added already": (in_a_transaction, lambda d, old, now: d.add(now, B), NONE),
    "add, fenced": (in_a_transaction, lambda d, old, now: d.add(old, A), ErrorCode.producer_fenced),
    "add, fenced, markers": (with_markers_out, lambda d, old, now: d.add(old, A), ErrorCode.producer_fenced),
    "add, stranger": (at_rest, lambda d, old, now: d.add(STRANGER, A), ErrorCode.invalid_producer_id_mapping),
    "begin, fenced": (at_rest, lambda d, old, now: d.begin(old)[0], ErrorCode.producer_fenced),
    "begin, stranger": (at_rest, lambda d, old, now: d.begin(STRANGER)[0], ErrorCode.producer_fenced),
}


@pytest.fixture(params=FINAL)
def final(request, driver):
    """(ask, the answer that memory has): a question of which the client takes the answer for final."""
    before, question, answer = FINAL[request.param]
    old, producer = before(driver)
    return lambda: question(driver, old, producer), answer


def test_a_final_answer_waits_until_the_log_has_taken_the_last_record_again(driver, final):
    ask, answer = final
    last = driver.log[-1]
    driver.holds_writes = True
    driver.now_ms += 5_000
    assert ask() is PENDING
    assert driver.writes[-1].record == last
    driver.written(driver.writes[-1])
    assert driver.answers[max(driver.answers)].error is answer


@pytest.mark.parametrize(
    ("failure", "heard"),
    [
        (ErrorCode.not_leader_or_follower, ErrorCode.not_coordinator),
        (ErrorCode.not_enough_replicas, ErrorCode.coordinator_not_available),
        (ErrorCode.not_enough_replicas_after_append, ErrorCode.coordinator_not_available),
    ],
)
def test_an_answer_that_the_log_does_not_confirm_is_not_given(driver, final, failure, heard):
    ask, _ = final
    before = driver.transaction.record
    driver.holds_writes = True
    ask()
    driver.written(driver.writes[-1], failure)
    assert driver.answers[max(driver.answers)].error is heard
    assert driver.transaction.record == before
    count = len(driver.writes)
    driver.retry()
    assert len(driver.writes) == count  # the client asks again


def test_an_answer_that_is_confirmed_too_late_is_asked_for_again(driver, final):
    ask, _ = final
    driver.holds_writes = True
    ask()
    driver.carry_out(driver.transaction.give_up(driver.writes[-1].write_id))
    assert driver.answers[max(driver.answers)].error is ErrorCode.coordinator_not_available
    driver.written(driver.writes[-1])  # answers nobody


def test_closing_answers_those_whose_answer_is_not_confirmed(driver, final):
    ask, _ = final
    driver.holds_writes = True
    ask()
    ask()
    driver.carry_out(driver.transaction.close(ErrorCode.not_coordinator))
    last = sorted(driver.answers)[-2:]
    assert {driver.answers[ticket].error for ticket in last} == {ErrorCode.not_coordinator}
    driver.written(driver.writes[-1])  # answers nobody


def test_each_answer_is_confirmed_by_a_write_that_began_after_its_question(driver):
    _, producer = in_a_transaction(driver)
    driver.holds_writes = True
    driver.add(producer, A)
    first = driver.writes[-1]
    driver.add(producer, B)
    second = driver.writes[-1]
    assert first.write_id != second.write_id
    count = len(driver.answers)
    driver.written(first)
    assert len(driver.answers) == count + 1
    driver.written(second)
    assert len(driver.answers) == count + 2


def test_an_answer_that_is_being_confirmed_holds_up_nothing(driver):
    _, producer = in_a_transaction(driver)
    driver.holds_writes = True
    driver.add(producer, A)
    confirming = driver.writes[-1]
    driver.end(producer)
    assert driver.writes[-1].record.state is State.PREPARE_COMMIT
    driver.written(confirming)
    assert driver.answers[max(driver.answers)].error is NONE
    driver.written(driver.writes[-1])
    driver.written(driver.writes[-1])  # of the completion
    assert driver.completed == [True]


def test_an_overdue_transaction_is_aborted_while_an_answer_is_being_confirmed(driver):
    _, producer = in_a_transaction(driver)
    driver.holds_writes = True
    driver.add(producer, A)
    driver.now_ms += TIMEOUT_MS + 1
    driver.check_timeout()
    assert driver.timeouts == 1
    assert driver.writes[-1].record.state is State.PREPARE_ABORT


def test_nobody_is_told_anything_final_while_a_transition_is_being_written(driver):
    """What would confirm it would undo the transition in the log."""
    old, producer = in_a_transaction(driver)
    driver.holds_writes = True
    driver.end(producer)
    count = len(driver.writes)
    assert driver.end(old) is ErrorCode.concurrent_transactions
    assert driver.add(old, A) is ErrorCode.concurrent_transactions
    assert driver.begin(old)[0] is ErrorCode.concurrent_transactions
    assert driver.end(producer, committed=False) is ErrorCode.concurrent_transactions
    assert len(driver.writes) == count


def test_that_an_id_is_not_known_is_confirmed_by_a_tombstone(driver):
    driver.holds_writes = True
    assert driver.end(STRANGER) is PENDING
    assert not driver.transaction.is_blank
    assert driver.writes[-1].record is None
    driver.written(driver.writes[-1])
    assert driver.answers[1].error is ErrorCode.invalid_producer_id_mapping
    assert driver.transaction.is_blank
    assert not driver.forgotten
