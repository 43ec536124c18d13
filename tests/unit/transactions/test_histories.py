"""Random histories of one transactional id: clients, failing writes, late markers, coordinators that die.

The log is what a coordinator reads after a restart, in the layout of its records; a write that was under way
when the old one died may be in it or not.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kio.schema.errors import ErrorCode

from millrace.broker.transactions.records import decode_value, encode_value
from millrace.broker.transactions.state import LAST_EPOCH, Transaction
from millrace.broker.transactions.values import (
    NO_PRODUCER_ID,
    Answer,
    Completed,
    Forget,
    NeedProducerId,
    ProducerIdentity,
    SendMarkers,
    TransactionRecord,
    TransactionState,
    Write,
)
from tests import seeds

PARTITIONS = [("t", number) for number in range(3)]
STRANGER = ProducerIdentity(77, 0)
SUCCESSOR = ProducerIdentity(50, 0)
PASTS = [
    None,
    TransactionRecord(1, LAST_EPOCH - 4, 10, TransactionState.EMPTY, updated_ms=0),
    TransactionRecord(1, LAST_EPOCH - 1, 10, TransactionState.EMPTY, updated_ms=0),
    TransactionRecord(  # by Apache Kafka 4: another producer id takes over at its end (KIP-890)
        1,
        LAST_EPOCH,
        10,
        TransactionState.PREPARE_COMMIT,
        frozenset(PARTITIONS[:2]),
        started_ms=-5,
        updated_ms=0,
        previous_producer_id=1,
        next_producer_id=SUCCESSOR.producer_id,
        client_version=2,
    ),
]
NOT_IN_LOG = [ErrorCode.not_enough_replicas, ErrorCode.not_leader_or_follower]
RETRIED = {
    ErrorCode.concurrent_transactions,
    ErrorCode.coordinator_not_available,
    ErrorCode.not_coordinator,
}


def stored(record: TransactionRecord | None) -> TransactionRecord | None:
    """What a new coordinator would read where `record` was written."""
    return None if record is None else decode_value(encode_value(record))


class TransactionHistories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.transaction = Transaction("id")
        self.now_ms = 0
        self.ticket = 0
        self.next_producer_id = 100
        self.log: list[TransactionRecord | None] = []
        self.writing: list[Write] = []  # in the order of the log
        self.ended: Write | None = None  # what all in-sync replicas have been found to have just now
        self.decided_at: dict[int, int] = {}
        self.asked_at: dict[int, int] = {}
        self.markers: SendMarkers | None = None
        self.known: list[ProducerIdentity] = []  # identities that clients hold
        self.asked: dict[int, tuple[str, ProducerIdentity | None]] = {}
        self.given: dict[ProducerIdentity, ProducerIdentity | None] = {}
        self.outcomes: dict[int, bool] = {}
        self.marked: dict[int, set[tuple[str, int]]] = {}
        self.unanswered: set[int] = set()

    # -- carrying out

    def ask(self, kind: str, former: ProducerIdentity | None = None) -> int:
        self.ticket += 1
        self.asked[self.ticket] = (kind, former)
        self.asked_at[self.ticket] = self.now_ms
        self.unanswered.add(self.ticket)
        return self.ticket

    def carry_out(self, decisions) -> None:
        for decision in decisions:
            match decision:
                case Answer(ticket, error, producer):
                    self.unanswered.remove(ticket)  # exactly once
                    kind, former = self.asked[ticket]
                    if error not in RETRIED:
                        assert self.ended is not None, "answered from memory"
                        assert self.decided_at[self.ended.write_id] >= self.asked_at[ticket]
                    if kind == "begin" and error is ErrorCode.none:
                        self.given_out(producer, former)
                case NeedProducerId():
                    raise AssertionError("an id was offered")
                case Write():
                    assert all(write.confirms for write in self.writing), "beside a transition"
                    if decision.confirms:
                        last = self.log[-1] if self.log else None
                        assert stored(decision.record) == last, "what confirms an answer changes the log"
                    self.writing.append(decision)
                    self.decided_at[decision.write_id] = self.now_ms
                case SendMarkers(producer, committed, partitions):
                    decided = self.log[-1]
                    assert decided is not None and decided.state.is_preparing, "not decided in the log"
                    assert (decided.producer_id, decided.epoch) == (producer.producer_id, producer.epoch)
                    assert committed == (decided.state is TransactionState.PREPARE_COMMIT)
                    assert partitions <= decided.partitions
                    before = self.outcomes.setdefault(decided.started_ms, committed)
                    assert before == committed, "a transaction changed its mind"
                    self.markers = decision
                case Completed():
                    # Since the decision all its partitions have got their marker.
                    decided = next(r for r in reversed(self.log) if r is not None and r.state.is_preparing)
                    assert decided.partitions <= self.marked.get(decided.started_ms, set())
                case Forget():
                    self.transaction = Transaction("id")
                    self.known.clear()

    def given_out(self, producer: ProducerIdentity, former: ProducerIdentity | None) -> None:
        assert producer.epoch < LAST_EPOCH
        if producer in self.given:
            assert former is not None and former == self.given[producer], "two clients got one epoch"
        self.given[producer] = former
        self.known.append(producer)

    def event(self, decisions) -> None:
        self.carry_out(decisions)
        self.now_ms += 1

    # -- clients

    @initialize(past=st.sampled_from(PASTS))
    def begins_with_a_past(self, past: TransactionRecord | None) -> None:
        if past is None:
            return
        self.log.append(past)
        self.transaction = Transaction.restore("id", past)
        self.known.append(ProducerIdentity(1, min(past.epoch, LAST_EPOCH - 1)))
        if past.next_producer_id != NO_PRODUCER_ID:
            self.known.append(SUCCESSOR)
        self.given = dict.fromkeys(self.known)
        self.event(self.transaction.resume(self.now_ms))

    def callers(self) -> list[ProducerIdentity]:
        """Who asks: one of the latest, or one that the log does not know."""
        return [*self.known[-3:], STRANGER]

    @rule(again=st.booleans(), data=st.data())
    def begin(self, again: bool, data: st.DataObject) -> None:
        former = data.draw(st.sampled_from([*self.known, STRANGER])) if again else None
        ticket = self.ask("begin", former)
        self.next_producer_id += 1
        self.event(self.transaction.begin_producer(10, former, ticket, self.now_ms, self.next_producer_id))

    @rule(data=st.data(), partitions=st.sets(st.sampled_from(PARTITIONS), max_size=3))
    def add(self, data: st.DataObject, partitions: set) -> None:
        producer = data.draw(st.sampled_from(self.callers()))
        self.event(self.transaction.add_partitions(producer, partitions, self.ask("add"), self.now_ms))

    @rule(data=st.data(), committed=st.booleans())
    def end(self, data: st.DataObject, committed: bool) -> None:
        producer = data.draw(st.sampled_from(self.callers()))
        self.event(self.transaction.end(producer, committed, self.ask("end"), self.now_ms))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        producer = data.draw(st.sampled_from(self.known))
        for partition, error in self.transaction.verify(producer, PARTITIONS).items():
            if error is ErrorCode.none:
                # Open, or its end is being written: the leader refuses what comes after the marker.
                last = self.log[-1]
                assert last is not None and partition in last.partitions
                assert partition not in self.marked.get(last.started_ms, set())

    @rule()
    def refuse_a_leader(self) -> None:
        self.event(self.transaction.confirm(self.ask("confirm")))

    # -- the log, the partitions, time

    @precondition(lambda self: self.writing)
    @rule(outcome=st.sampled_from(["ok", "ok", "ok", "too few", *NOT_IN_LOG]))
    def write_ends(self, outcome) -> None:
        write = self.writing.pop(0)
        error = {"ok": ErrorCode.none, "too few": ErrorCode.not_enough_replicas_after_append}.get(
            outcome, outcome
        )
        if outcome in ("ok", "too few"):
            self.log.append(stored(write.record))
        self.ended = write if error is ErrorCode.none else None
        self.event(self.transaction.written(write.write_id, error, self.now_ms))
        self.ended = None

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def write_is_late(self, data: st.DataObject) -> None:
        write = data.draw(st.sampled_from(self.writing))
        self.event(self.transaction.give_up(write.write_id))

    @precondition(lambda self: self.markers is not None)
    @rule(data=st.data())
    def partitions_are_marked(self, data: st.DataObject) -> None:
        markers = self.markers
        done = data.draw(st.sets(st.sampled_from(sorted(markers.partitions))))
        decided = next(r for r in reversed(self.log) if r is not None and r.state.is_preparing)
        self.marked.setdefault(decided.started_ms, set()).update(done)
        self.event(self.transaction.marked(markers.producer, done, self.now_ms))

    @rule(late_by=st.integers(0, 30))
    def time_passes(self, late_by: int) -> None:
        self.now_ms += late_by
        self.event(self.transaction.time_out(self.now_ms))

    @rule()
    def retry(self) -> None:
        self.event(self.transaction.retry())

    @rule()
    def expire(self) -> None:
        self.event(self.transaction.expire(self.now_ms, 40))

    @rule(landed=st.integers(0, 3))
    def coordinator_dies(self, landed: int) -> None:
        self.event(self.transaction.close(ErrorCode.not_coordinator))
        assert not self.unanswered
        self.log += [stored(write.record) for write in self.writing[:landed]]
        self.writing.clear()
        self.decided_at.clear()
        record = self.log[-1] if self.log else None
        self.markers = None
        if record is None:
            self.transaction = Transaction("id")
            self.known.clear()
            return
        self.transaction = Transaction.restore("id", record)
        self.event(self.transaction.resume(self.now_ms))

    # -- what always holds

    @invariant()
    def memory_is_the_log(self) -> None:
        """What is visible is what a new coordinator would read, but for the epoch of a fence under way."""
        if not self.log or self.log[-1] is None:
            assert self.transaction.is_changing or self.transaction.record.producer_id == NO_PRODUCER_ID
            return
        visible, written = self.transaction.record, self.log[-1]
        if self.transaction.is_changing and self.transaction.state is TransactionState.ONGOING:
            return
        if self.transaction.state is TransactionState.ONGOING:
            assert written.state is TransactionState.ONGOING
            assert visible.epoch in (written.epoch, written.epoch + 1)
            assert visible.partitions == written.partitions
        else:
            assert (visible.state, visible.producer_id, visible.epoch) == (
                written.state,
                written.producer_id,
                written.epoch,
            )

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """Whoever waits, waits for a write under way."""
        assert len(self.unanswered) <= len(self.writing)


TestTransactionHistories = TransactionHistories.TestCase
TestTransactionHistories.settings = settings(
    max_examples=seeds.examples(150), stateful_step_count=60, deadline=None
)
