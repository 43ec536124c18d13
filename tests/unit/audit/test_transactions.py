"""How a transaction ended, where a callback of the application's raises in place of the client's answer."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from millrace.audit.clients.transaction_counts import Outcome
from millrace.audit.clients.transactions import Transactions

READY, IN_TRANSACTION, COMMITTING = "Ready", "InTransaction", "CommittingTransaction"


class Client:
    """One that has transactions; what its callbacks raise comes out of its calls."""

    def __init__(self) -> None:
        self.state, self.raising = READY, []
        self.refuses: list[KafkaError] = []

    def begin(self) -> None:
        self._check(READY)
        self.state = IN_TRANSACTION

    def commit(self, timeout_s: float) -> None:
        self._end(COMMITTING)

    def abort(self, timeout_s: float) -> None:
        self._end("AbortingTransaction")

    def _end(self, underway: str) -> None:
        answer = None
        try:
            self._check(IN_TRANSACTION, underway)
            self.state = underway
            if self.refuses:
                raise KafkaException(self.refuses.pop(0))
            self.state = READY
        except KafkaException as error:
            answer = error
        if self.raising:
            answer = self.raising.pop(0)
        if answer is not None:
            raise answer

    def _check(self, *states: str) -> None:
        if self.state not in states:
            raise KafkaException(KafkaError(KafkaError._STATE, f"Operation not valid in state {self.state}"))


def opened() -> tuple[Client, Transactions]:
    client, transactions = Client(), Transactions(True, None)
    transactions.begin(client.begin)
    return client, transactions


CALLBACKS = [
    KafkaException("text"),
    KafkaException(),
    KafkaException(KafkaError(KafkaError._FAIL)),
    OSError(),
]
TIMEOUT = KafkaError(KafkaError._TIMED_OUT, retriable=True)


@pytest.mark.safety
@pytest.mark.parametrize("raised", CALLBACKS, ids=repr)
@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.ABORTED])
def test_a_transaction_that_ended_has_ended_whatever_a_callback_raises(raised, outcome):
    client, transactions = opened()
    transaction, client.raising = transactions.open, [raised]
    with pytest.raises(type(raised)) as told:
        transactions.finish(client.commit if outcome is Outcome.COMMITTED else client.abort, -1, outcome)
    assert told.value is raised
    assert (transactions.open, transaction.outcome) == (None, outcome)


@pytest.mark.safety
@pytest.mark.parametrize("raised", CALLBACKS, ids=repr)
def test_one_that_did_not_end_is_open_and_the_next_call_ends_it(raised):
    client, transactions = opened()
    transaction, client.raising, client.refuses = transactions.open, [raised], [TIMEOUT, TIMEOUT]
    with pytest.raises(type(raised)):
        transactions.finish(client.commit, -1, Outcome.COMMITTED)
    assert (transactions.open, transaction.outcome, client.state) == (transaction, None, COMMITTING)
    with pytest.raises(KafkaException):
        transactions.finish(client.abort, -1, Outcome.ABORTED)  # too late for that
    assert transaction.outcome is None
    transactions.finish(client.commit, -1, Outcome.COMMITTED)
    assert transaction.outcome is Outcome.COMMITTED


def test_what_can_be_tried_again_is_not_asked_twice():
    """The answer is the application's then: it tries again itself."""
    client, transactions = opened()
    client.refuses = [TIMEOUT]
    with pytest.raises(KafkaException):
        transactions.finish(client.commit, -1, Outcome.COMMITTED)
    assert client.state == COMMITTING and transactions.open is not None
    transactions.finish(client.commit, -1, Outcome.COMMITTED)
    assert transactions.open is None


@pytest.mark.safety
def test_where_every_answer_was_hidden_the_next_call_tells_by_the_clients_state():
    client, transactions = opened()
    transaction, client.raising = transactions.open, [LookupError(), LookupError()]
    with pytest.raises(LookupError):
        transactions.finish(client.commit, -1, Outcome.COMMITTED)
    assert transaction.outcome is None
    with pytest.raises(KafkaException):
        transactions.finish(client.abort, -1, Outcome.ABORTED)
    assert transaction.outcome is Outcome.COMMITTED


@pytest.mark.safety
def test_and_a_new_one_that_begins_tells_it_too():
    client, transactions = opened()
    transaction, client.raising = transactions.open, [LookupError(), LookupError()]
    with pytest.raises(LookupError):
        transactions.finish(client.commit, -1, Outcome.COMMITTED)
    transactions.begin(client.begin)
    assert transaction.outcome is Outcome.COMMITTED and transactions.open is not transaction


@pytest.mark.safety
def test_one_that_was_asked_for_both_ends_without_an_answer_has_an_unknown_one():
    client, transactions = opened()
    transaction, client.raising = transactions.open, [LookupError() for _ in range(4)]
    for call, outcome in ((client.commit, Outcome.COMMITTED), (client.abort, Outcome.ABORTED)):
        with pytest.raises(LookupError):
            transactions.finish(call, -1, outcome)
    transactions.begin(client.begin)
    assert transaction.outcome is Outcome.UNKNOWN


def test_before_closing_a_callbacks_error_keeps_no_transaction_open_and_comes_out_later():
    client, transactions = opened()
    raised = []
    client.raising = [CALLBACKS[2]]
    assert transactions.abort_open(client.abort, -1, raised)
    assert raised == [CALLBACKS[2]] and transactions.open is None


def test_and_one_that_the_client_cannot_abort_is_left(caplog):
    client, transactions = opened()
    raised, client.refuses = [], [TIMEOUT]
    assert not transactions.abort_open(client.abort, -1, raised)
    assert raised == [] and "was not aborted" in caplog.text


def test_an_abort_that_a_callbacks_error_ended_early_is_called_again():
    client, transactions = opened()
    raised, client.raising, client.refuses = [], [CALLBACKS[2]], [TIMEOUT, TIMEOUT]
    assert transactions.abort_open(client.abort, -1, raised)
    assert raised == [CALLBACKS[2]] and client.state == READY
