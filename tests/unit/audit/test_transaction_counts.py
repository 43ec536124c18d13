"""Records of a transaction: pending until its end, whichever thread serves their reports, and when."""

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.audit.clients.session import StreamSession
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.clients.transaction_counts import OpenTransaction, Outcome
from millrace.audit.contract.events import CountEvent

IDENTITY = ProducerIdentity("00000000000000cd", "AA@ewr")


def session():
    return StreamSession(IDENTITY, "flights", "00000000000000ab", window_ms=1000, lease_ms=60_000)


def fates(stream):
    newest = {e.window_start_ms: e for e in stream.close(0) if isinstance(e, CountEvent)}
    return {
        name: {s for event in newest.values() for s in getattr(event, name)}
        for name in ("acknowledged", "ambiguous", "failed")
    }


EXPECTED = {Outcome.COMMITTED: "acknowledged", Outcome.ABORTED: "failed", Outcome.UNKNOWN: "ambiguous"}


@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_end_decides(outcome):
    stream, transaction = session(), OpenTransaction()
    holds = {}
    for number in range(10):
        window, sequence = stream.assign(number * 300)
        hold = holds.setdefault(window.start_ms, transaction.hold(stream, window))
        hold.acknowledge(sequence, 1)
    assert stream.pending_count == 10
    transaction.end(outcome)
    assert stream.pending_count == 0
    transaction.end(Outcome.COMMITTED)
    told = fates(stream)
    assert told.pop(EXPECTED[outcome]) == set(range(1, 11)) and not any(told.values())


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "land", "end"]), st.sampled_from(list(Outcome))), max_size=60
    ),
    st.integers(0, 1 << 30),
)
def test_each_record_goes_the_way_of_the_transaction_it_was_sent_in(steps, seed):
    dice = random.Random(seed)
    stream, transaction = session(), OpenTransaction()
    waiting, members, outcomes = [], {}, {}
    for step, outcome in steps:
        if step == "send":
            window, sequence = stream.assign(dice.randrange(3000))
            waiting.append((transaction, transaction.hold(stream, window), sequence))
            members[sequence] = transaction
        elif step == "end":
            transaction.end(outcome)
            outcomes[transaction] = outcome
            transaction = OpenTransaction()
        elif waiting:
            its, hold, sequence = waiting.pop(dice.randrange(len(waiting)))
            hold.acknowledge(sequence, 1)
            its.landed()
    for its, hold, sequence in waiting:
        hold.acknowledge(sequence, 1)
        its.landed()
    told = fates(stream)
    for sequence, its in members.items():
        # What is still open when the producer ends is in doubt.
        assert sequence in told[EXPECTED[outcomes.get(its, Outcome.UNKNOWN)]]
    assert sum(map(len, told.values())) == len(members)


def test_reports_that_land_while_the_transaction_ends_are_all_counted():
    for _ in range(50):
        stream, transaction = session(), OpenTransaction()
        window, _ = stream.assign(0)
        numbers = [1, *(stream.assign(0)[1] for _ in range(199))]
        hold = transaction.hold(stream, window)

        def land(part, hold=hold, transaction=transaction):
            for sequence in part:
                hold.acknowledge(sequence, 1)
                transaction.landed()

        threads = [threading.Thread(target=land, args=(numbers[start::2],)) for start in (0, 1)]
        for thread in threads:
            thread.start()
        transaction.end(Outcome.COMMITTED)
        for thread in threads:
            thread.join()
        assert fates(stream)["acknowledged"] == set(numbers)
