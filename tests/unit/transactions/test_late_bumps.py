"""A producer that asks for a new epoch when it is no longer its id's last (KIP-360), or asks twice."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from millrace.broker.errors import NotEnoughReplicas
from millrace.broker.transactions.values import TransactionState
from tests.unit.transactions.conftest import A, TransactionDriver


def test_a_fenced_producer_that_begins_again_leaves_its_successors_transaction_alone() -> None:
    driver = TransactionDriver()
    old, new = driver.started(), driver.started()
    driver.add(new, A)
    assert driver.begin(old)[0] is ErrorCode.producer_fenced
    assert driver.transaction.state is TransactionState.ONGOING
    assert driver.end(new) is ErrorCode.none
    assert driver.completed == [True]


def test_a_repeated_wish_for_an_epoch_leaves_the_transaction_begun_in_it_alone() -> None:
    """The first was answered; the second, of a connection that was given up, comes late."""
    driver = TransactionDriver()
    before = driver.started()
    error, bumped = driver.begin(before)
    assert (error, driver.begin(before)) == (ErrorCode.none, (ErrorCode.none, bumped))
    driver.add(bumped, A)
    assert driver.begin(before)[0] is ErrorCode.producer_fenced
    assert driver.end(bumped) is ErrorCode.none


def test_the_present_producer_has_its_own_open_transaction_aborted_also_when_that_takes_two_tries() -> None:
    driver = TransactionDriver()
    producer = driver.started()
    driver.add(producer, A)
    driver.holds_writes = True
    driver.begin(producer)
    driver.written(driver.writes[-1], ErrorCode(NotEnoughReplicas.code))
    assert driver.transaction.state is TransactionState.ONGOING
    driver.holds_writes = False
    assert driver.begin(producer)[0] is ErrorCode.concurrent_transactions
    assert driver.completed == [False]
