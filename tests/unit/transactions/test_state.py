"""Every transition and refusal of one transactional id."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.transactions.state import LAST_EPOCH
from millrace.broker.transactions.values import ProducerIdentity, TransactionRecord, TransactionState
from tests.unit.transactions.conftest import PENDING, TIMEOUT_MS, A, B

State = TransactionState
NONE = ErrorCode.none


def states(driver):
    return [record.state if record else None for record in driver.log]


# -- beginning --------------------------------------------------------------------------------------


def test_first_producer_gets_a_fresh_id_and_epoch_0(driver):
    assert driver.begin() == (NONE, ProducerIdentity(4_000, 0))
    record = driver.log[0]
    assert (record.state, record.timeout_ms, record.started_ms, record.partitions) == (
        State.EMPTY,
        TIMEOUT_MS,
        -1,
        frozenset(),
    )
    assert record.updated_ms == driver.now_ms


def test_each_further_producer_gets_the_next_epoch_of_the_same_id(driver):
    driver.started()
    assert driver.begin() == (NONE, ProducerIdentity(4_000, 1))
    assert driver.begin(timeout_ms=5_000) == (NONE, ProducerIdentity(4_000, 2))
    assert driver.transaction.record.timeout_ms == 5_000


def test_nothing_happens_before_a_producer_id_is_there(driver):
    decisions = driver.transaction.begin_producer(TIMEOUT_MS, None, 1, 0)
    driver.carry_out(decisions)
    assert driver.needs_id == {1}
    assert driver.transaction.is_blank
    assert not driver.writes


def test_an_older_producer_is_fenced_by_a_newer_one(driver):
    old = driver.started()
    new = driver.started()
    assert driver.add(old, A) is ErrorCode.producer_fenced
    assert driver.end(old) is ErrorCode.producer_fenced
    assert driver.verify(old) is ErrorCode.producer_fenced
    assert driver.add(new, A) is NONE


@pytest.mark.parametrize("producer", [ProducerIdentity(9, 0), ProducerIdentity(-1, -1)])
def test_another_producer_id_is_not_mapped(driver, producer):
    driver.started()
    assert driver.add(producer, A) is ErrorCode.invalid_producer_id_mapping
    assert driver.end(producer) is ErrorCode.invalid_producer_id_mapping
    assert driver.verify(producer) is ErrorCode.invalid_producer_id_mapping


def test_nobody_is_mapped_to_an_id_that_never_began(driver):
    assert driver.add(ProducerIdentity(-1, -1), A) is ErrorCode.invalid_producer_id_mapping


def test_a_producer_that_begins_with_an_open_transaction_aborts_it_first(driver):
    old = driver.started()
    driver.add(old, A, B)
    assert driver.begin() == (ErrorCode.concurrent_transactions, ProducerIdentity())
    assert driver.markers[0].producer == ProducerIdentity(old.producer_id, 1)
    assert driver.markers[0].committed is False
    assert driver.markers[0].partitions == {A, B}
    assert driver.end(old) is ErrorCode.producer_fenced
    # The fencing epoch is given to nobody.
    assert driver.begin() == (NONE, ProducerIdentity(old.producer_id, 2))
    assert states(driver)[1:4] == [State.ONGOING, State.PREPARE_ABORT, State.COMPLETE_ABORT]
    assert states(driver)[-1] is State.EMPTY


def test_beginning_waits_until_the_markers_are_there(driver):
    old = driver.started()
    driver.add(old, A)
    driver.holds_markers = True
    assert driver.end(old) is NONE
    assert driver.begin()[0] is ErrorCode.concurrent_transactions
    driver.marked(driver.markers[0])
    assert driver.begin() == (NONE, ProducerIdentity(old.producer_id, 1))


def test_a_write_under_way_keeps_everyone_else_waiting(driver):
    producer = driver.started()
    driver.holds_writes = True
    assert driver.add(producer, A) is PENDING
    assert driver.add(producer, A) is ErrorCode.concurrent_transactions
    assert driver.end(producer) is ErrorCode.concurrent_transactions
    assert driver.begin()[0] is ErrorCode.concurrent_transactions
    # Not there before it is written.
    assert driver.verify(producer) is ErrorCode.transaction_abortable
    assert driver.transaction.state is State.EMPTY
    driver.written(driver.writes[-1])
    assert driver.transaction.state is State.ONGOING
    assert driver.verify(producer) is NONE


# -- beginning again (KIP-360) ----------------------------------------------------------------------


def test_the_present_producer_may_raise_its_own_epoch(driver):
    producer = driver.started()
    assert driver.begin(producer) == (NONE, replace(producer, epoch=1))


def test_a_repeated_raise_gets_the_same_epoch(driver):
    producer = driver.started()
    raised = driver.begin(producer)
    assert driver.begin(producer) == raised
    assert driver.begin(producer) == raised
    assert driver.begin(raised[1]) == (NONE, replace(producer, epoch=2))


def test_a_producer_that_was_replaced_may_not_raise(driver):
    producer = driver.started()
    driver.begin(producer)
    driver.started()  # somebody else
    assert driver.begin(producer)[0] is ErrorCode.producer_fenced
    assert driver.begin(replace(producer, epoch=1))[0] is ErrorCode.producer_fenced


def test_a_stranger_may_not_raise(driver):
    driver.started()
    assert driver.begin(ProducerIdentity(77, 0))[0] is ErrorCode.producer_fenced


def test_a_producer_whose_id_was_forgotten_begins_anew(driver):
    assert driver.begin(ProducerIdentity(77, 5)) == (NONE, ProducerIdentity(4_000, 0))


# -- exhausted epochs -------------------------------------------------------------------------------


def restored(new_driver, **fields):
    from millrace.broker.transactions.state import Transaction

    record = TransactionRecord(
        **{"producer_id": 7, "epoch": 3, "timeout_ms": TIMEOUT_MS, "state": State.EMPTY, "updated_ms": 1}
        | fields
    )
    driver = new_driver(Transaction.restore("orders", record))
    driver.log.append(record)
    return driver


def test_the_last_epoch_is_never_given_to_a_client(new_driver):
    driver = restored(new_driver, epoch=LAST_EPOCH - 2)
    assert driver.begin() == (NONE, ProducerIdentity(7, LAST_EPOCH - 1))
    assert driver.begin() == (NONE, ProducerIdentity(4_000, 0))


def test_the_last_epoch_fences(new_driver):
    driver = restored(new_driver, epoch=LAST_EPOCH - 1)
    driver.add(ProducerIdentity(7, LAST_EPOCH - 1), A)
    assert driver.begin()[0] is ErrorCode.concurrent_transactions
    assert driver.markers[0].producer == ProducerIdentity(7, LAST_EPOCH)
    assert driver.begin() == (NONE, ProducerIdentity(4_000, 0))


def test_a_producer_with_the_last_epoch_gets_a_new_id_and_may_repeat_that(new_driver):
    driver = restored(new_driver, epoch=LAST_EPOCH - 1)
    exhausted = ProducerIdentity(7, LAST_EPOCH - 1)
    fresh = driver.begin(exhausted)
    assert fresh == (NONE, ProducerIdentity(4_000, 0))
    assert driver.begin(exhausted) == fresh
    assert driver.begin(exhausted) == fresh
    assert driver.begin(ProducerIdentity(7, 3))[0] is ErrorCode.producer_fenced


def test_an_older_producer_of_an_exhausted_id_is_fenced(new_driver):
    driver = restored(new_driver, epoch=LAST_EPOCH - 1)
    assert driver.begin(ProducerIdentity(7, 5))[0] is ErrorCode.producer_fenced


# -- a transaction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_a_transaction_from_begin_to_end(driver, committed):
    producer = driver.started()
    driver.now_ms = 2_000
    assert driver.add(producer, A) is NONE
    driver.now_ms = 3_000
    assert driver.add(producer, B) is NONE
    assert driver.end(producer, committed) is NONE
    assert driver.markers[0].committed is committed
    assert driver.markers[0].producer == producer
    assert driver.markers[0].partitions == {A, B}
    assert driver.completed == [committed]
    prepare = State.PREPARE_COMMIT if committed else State.PREPARE_ABORT
    complete = State.COMPLETE_COMMIT if committed else State.COMPLETE_ABORT
    assert states(driver) == [State.EMPTY, State.ONGOING, State.ONGOING, prepare, complete]
    assert [record.started_ms for record in driver.log] == [-1, 2_000, 2_000, 2_000, 2_000]
    assert driver.log[-1].partitions == frozenset()
    assert driver.log[-2].partitions == {A, B}
    # And the next one.
    driver.now_ms = 9_000
    assert driver.add(producer, A) is NONE
    assert driver.log[-1].started_ms == 9_000


def test_partitions_that_are_in_already_change_nothing(driver):
    producer = driver.started()
    driver.add(producer, A, B)
    driver.now_ms += 5_000
    assert driver.add(producer, B) is NONE
    assert driver.log[-1] == driver.log[-2]


def test_the_outcome_is_sent_only_after_it_is_written(driver):
    producer = driver.started()
    driver.add(producer, A)
    driver.holds_writes = True
    assert driver.end(producer) is PENDING
    assert not driver.markers
    driver.written(driver.writes[-1])
    assert driver.markers


def test_the_end_is_repeated_with_the_same_answer(driver):
    producer = driver.started()
    driver.add(producer, A)
    assert driver.end(producer) is NONE
    assert driver.end(producer) is NONE
    assert driver.end(producer, committed=False) is ErrorCode.invalid_txn_state


def test_a_decided_transaction_does_not_change_its_mind(driver):
    producer = driver.started()
    driver.add(producer, A)
    driver.holds_markers = True
    driver.end(producer)
    assert driver.end(producer, committed=False) is ErrorCode.concurrent_transactions
    assert driver.add(producer, B) is ErrorCode.concurrent_transactions
    assert driver.verify(producer) is ErrorCode.concurrent_transactions
    driver.marked(driver.markers[0])
    assert driver.completed == [True]


def test_nothing_to_end(driver):
    producer = driver.started()
    assert driver.end(producer) is ErrorCode.invalid_txn_state
    assert driver.end(producer, committed=False) is ErrorCode.invalid_txn_state


def test_a_transaction_is_complete_when_the_last_partition_is_marked(driver):
    producer = driver.started()
    driver.add(producer, A, B)
    driver.holds_markers = True
    driver.end(producer)
    markers = driver.markers[0]
    driver.marked(markers, A)
    driver.marked(markers, A)
    assert driver.transaction.describe().partitions == (B,)
    assert not driver.completed
    driver.marked(markers, B)
    assert driver.completed == [True]
    driver.marked(markers, B)
    assert driver.completed == [True]


def test_a_marker_of_an_earlier_producer_completes_nothing(driver):
    producer = driver.started()
    driver.add(producer, A)
    driver.holds_markers = True
    driver.begin()  # fences: markers of epoch 1
    driver.carry_out(driver.transaction.marked(producer, {A}, driver.now_ms))
    assert not driver.completed
    driver.marked(driver.markers[0])
    assert driver.completed == [False]


def test_a_transaction_without_partitions_ends_at_once(driver):
    producer = driver.started()
    driver.add(producer)
    assert driver.transaction.state is State.ONGOING
    assert driver.end(producer) is NONE
    assert driver.completed == [True]
    assert not driver.markers


def test_verification_wants_the_partition_in_the_open_transaction(driver):
    producer = driver.started()
    assert driver.verify(producer, A) is ErrorCode.transaction_abortable
    driver.add(producer, A)
    assert driver.verify(producer, A) is NONE
    assert driver.verify(producer, B) is ErrorCode.transaction_abortable
    driver.end(producer)
    assert driver.verify(producer, A) is ErrorCode.transaction_abortable


# -- failed writes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "heard"),
    [
        (ErrorCode.not_enough_replicas, ErrorCode.coordinator_not_available),
        (ErrorCode.unknown_topic_or_partition, ErrorCode.coordinator_not_available),
        (ErrorCode.request_timed_out, ErrorCode.coordinator_not_available),
        (ErrorCode.not_leader_or_follower, ErrorCode.not_coordinator),
        (ErrorCode.kafka_storage_error, ErrorCode.not_coordinator),
        (ErrorCode.record_list_too_large, ErrorCode.unknown_server_error),
    ],
)
def test_what_was_not_written_did_not_happen(driver, failure, heard):
    producer = driver.started()
    driver.add(producer, A)
    driver.holds_writes = True
    ticket = next(driver.tickets)
    driver.carry_out(driver.transaction.end(producer, True, ticket, driver.now_ms))
    driver.written(driver.writes[-1], failure)
    assert driver.answers[ticket].error is heard
    assert driver.transaction.state is State.ONGOING
    assert not driver.markers
    driver.holds_writes = False
    assert driver.end(producer, committed=False) is NONE
    assert driver.completed == [False]


def test_what_too_few_replicas_have_is_so_all_the_same(driver):
    producer = driver.started()
    driver.holds_writes = True
    ticket = next(driver.tickets)
    driver.carry_out(driver.transaction.add_partitions(producer, [A], ticket, driver.now_ms))
    driver.written(driver.writes[-1], ErrorCode.not_enough_replicas_after_append)
    assert driver.answers[ticket].error is ErrorCode.coordinator_not_available
    assert driver.transaction.state is State.ONGOING  # as a new coordinator would read it


def test_a_decision_on_too_few_replicas_sends_no_markers_until_it_is_safe(driver):
    producer = driver.started()
    driver.add(producer, A)
    driver.holds_writes = True
    driver.end(producer)
    driver.written(driver.writes[-1], ErrorCode.not_enough_replicas_after_append)
    assert not driver.markers
    assert driver.end(producer, committed=False) is ErrorCode.concurrent_transactions
    for failure in (ErrorCode.not_enough_replicas, ErrorCode.not_enough_replicas_after_append):
        driver.retry()
        driver.written(driver.writes[-1], failure)
        assert not driver.markers
        assert driver.end(producer, committed=False) is ErrorCode.concurrent_transactions
    driver.retry()
    driver.written(driver.writes[-1])
    assert driver.markers[0].committed is True


def test_a_completion_that_fails_is_written_again_until_it_succeeds(driver):
    producer = driver.started()
    driver.add(producer, A)
    driver.holds_markers = True
    driver.end(producer)
    driver.holds_writes = True
    driver.marked(driver.markers[0])
    for failure in (ErrorCode.not_enough_replicas, ErrorCode.kafka_storage_error):
        driver.written(driver.writes[-1], failure)
        count = len(driver.writes)
        assert not driver.completed
        driver.retry()
        assert len(driver.writes) == count + 1
        driver.retry()
        assert len(driver.writes) == count + 1  # one at a time
    driver.written(driver.writes[-1])
    assert driver.completed == [True]
    driver.retry()
    assert driver.transaction.state is State.COMPLETE_COMMIT


def test_a_write_that_takes_too_long_goes_on_without_its_client(driver):
    producer = driver.started()
    driver.holds_writes = True
    ticket = next(driver.tickets)
    driver.carry_out(driver.transaction.add_partitions(producer, [A], ticket, driver.now_ms))
    driver.carry_out(driver.transaction.give_up(driver.writes[-1].write_id))
    assert driver.answers[ticket].error is ErrorCode.coordinator_not_available
    assert driver.add(producer, A) is ErrorCode.concurrent_transactions
    driver.written(driver.writes[-1])
    assert driver.transaction.state is State.ONGOING


def test_a_fence_that_fails_shuts_the_old_producer_out_and_is_tried_again_with_the_same_epoch(driver):
    old = driver.started()
    driver.add(old, A)
    driver.holds_writes = True
    ticket = next(driver.tickets)
    driver.carry_out(driver.transaction.begin_producer(TIMEOUT_MS, None, ticket, driver.now_ms))
    driver.written(driver.writes[-1], ErrorCode.not_enough_replicas)
    assert driver.answers[ticket].error is ErrorCode.coordinator_not_available
    driver.holds_writes = False
    assert driver.add(old, B) is ErrorCode.producer_fenced
    assert driver.end(old) is ErrorCode.producer_fenced
    assert driver.log[-1] == driver.log[1]  # what confirms that does not write the fence in passing
    assert driver.begin()[0] is ErrorCode.concurrent_transactions
    assert driver.markers[0].producer.epoch == 1
    assert driver.begin() == (NONE, ProducerIdentity(old.producer_id, 2))


def test_a_late_outcome_of_an_earlier_write_changes_nothing(driver):
    producer = driver.started()
    first = driver.writes[0]
    driver.add(producer, A)
    driver.carry_out(driver.transaction.written(first.write_id, NONE, driver.now_ms))
    assert driver.transaction.state is State.ONGOING


# -- answers that the log confirms ------------------------------------------------------------------


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


# -- time -------------------------------------------------------------------------------------------


def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_fenced(driver):
    producer = driver.started()
    driver.add(producer, A)
    driver.now_ms += TIMEOUT_MS
    driver.check_timeout()
    assert driver.timeouts == 0
    driver.now_ms += 1
    driver.check_timeout()
    assert driver.timeouts == 1
    assert driver.completed == [False]
    assert driver.markers[0].producer == replace(producer, epoch=1)
    assert driver.end(producer) is ErrorCode.producer_fenced
    assert driver.begin(producer)[0] is ErrorCode.producer_fenced
    assert driver.begin() == (NONE, replace(producer, epoch=2))


def test_only_open_transactions_time_out(driver):
    producer = driver.started()
    driver.now_ms += 10 * TIMEOUT_MS
    driver.check_timeout()
    driver.add(producer, A)
    driver.holds_markers = True
    driver.end(producer)
    driver.now_ms += 10 * TIMEOUT_MS
    driver.check_timeout()
    assert driver.timeouts == 0


def test_a_transaction_whose_next_state_is_being_written_does_not_time_out(driver):
    producer = driver.started()
    driver.add(producer, A)
    driver.now_ms += 10 * TIMEOUT_MS
    driver.holds_writes = True
    driver.end(producer)
    driver.check_timeout()
    assert driver.timeouts == 0
    driver.holds_writes = False
    driver.written(driver.writes[-1])
    assert driver.completed == [True]


def test_an_id_that_nobody_uses_is_forgotten_with_a_tombstone(driver):
    driver.started()
    driver.now_ms += 99_999
    driver.expire()
    assert not driver.forgotten
    driver.now_ms += 1
    driver.expire()
    assert driver.forgotten
    assert driver.log[-1] is None


def test_an_id_in_use_is_not_forgotten(driver):
    producer = driver.started()
    driver.add(producer, A)
    driver.now_ms += 1_000_000
    driver.expire()
    assert not driver.forgotten
    driver.holds_markers = True
    driver.end(producer)
    driver.now_ms += 1_000_000
    driver.expire()
    assert not driver.forgotten


def test_an_id_whose_tombstone_fails_stays(driver):
    producer = driver.started()
    driver.now_ms += 100_000
    driver.holds_writes = True
    driver.expire()
    assert driver.add(producer, A) is ErrorCode.concurrent_transactions
    driver.written(driver.writes[-1], ErrorCode.not_enough_replicas)
    driver.holds_writes = False
    assert not driver.forgotten
    assert driver.add(producer, A) is NONE


# -- another coordinator ----------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
def test_a_new_coordinator_ends_what_was_decided(driver, committed):
    producer = driver.started()
    driver.add(producer, A, B)
    driver.holds_markers = True
    driver.end(producer, committed)
    other = driver.restarted()
    assert other.markers[0].committed is committed
    assert other.markers[0].partitions == {A, B}
    assert other.begin()[0] is ErrorCode.concurrent_transactions
    other.marked(other.markers[0])
    assert other.completed == [committed]
    assert other.end(producer, committed) is NONE


def test_a_new_coordinator_lets_an_open_transaction_go_on(driver):
    producer = driver.started()
    driver.add(producer, A)
    other = driver.restarted()
    assert not other.markers
    assert other.add(producer, B) is NONE
    assert other.end(producer) is NONE
    assert other.markers[0].partitions == {A, B}


def test_a_new_coordinator_fences_the_epochs_before(driver):
    old = driver.started()
    new = driver.started()
    other = driver.restarted()
    assert other.add(old, A) is ErrorCode.producer_fenced
    assert other.add(new, A) is NONE


def test_closing_answers_whoever_waits_once_and_does_no_more(driver):
    producer = driver.started()
    driver.holds_writes = True
    ticket = next(driver.tickets)
    driver.carry_out(driver.transaction.add_partitions(producer, [A], ticket, driver.now_ms))
    driver.carry_out(driver.transaction.close(ErrorCode.not_coordinator))
    assert driver.answers[ticket].error is ErrorCode.not_coordinator
    driver.written(driver.writes[-1])
    driver.retry()
    driver.now_ms += 10 * TIMEOUT_MS
    driver.check_timeout()
    driver.expire()
    assert len(driver.writes) == 2


def test_a_transaction_that_kafka_4_began_is_completed_by_its_rule(new_driver):
    """KIP-890: the epoch in the record is the bumped one, and an exhausted id has its successor beside it."""
    driver = restored(
        new_driver,
        epoch=LAST_EPOCH,
        state=State.PREPARE_COMMIT,
        partitions=frozenset({A}),
        next_producer_id=8,
        client_version=2,
        started_ms=1,
    )
    driver.carry_out(driver.transaction.resume(driver.now_ms))
    assert driver.markers[0].producer == ProducerIdentity(7, LAST_EPOCH)
    assert driver.completed == [True]
    assert driver.transaction.producer == ProducerIdentity(8, 0)
    assert driver.log[-1].previous_producer_id == 7
    assert driver.add(ProducerIdentity(8, 0), A) is NONE


def test_description(driver):
    producer = driver.started()
    driver.add(producer, B, A)
    described = driver.transaction.describe()
    assert (described.state, described.timeout_ms, described.started_ms) == ("Ongoing", TIMEOUT_MS, 1_000)
    assert (described.producer, described.partitions) == (producer, (A, B))
