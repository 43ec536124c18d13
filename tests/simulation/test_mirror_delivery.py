"""The mirror's delivery rules (`progress` and `lane`) against a model of an idempotent broker.

Each history drives a worker with two source partitions that merge into one target partition through lost
requests, lost answers, retriable errors, refusals, brokers that forget producers, revocations and kills. A
`capricious` target also lowers its limits at any moment, so that a batch which may be in the log is refused
when it comes again (limits and timestamps are looked at before duplicates), forgets producers with batches
under way, and elects leaders that lack the end of its log. One that is given old data (`replayed`) forgets
producers with batches under way as Apache Kafka does: those whose last batch has old timestamps.

What must hold, whatever happens:

- a position that was written never passes a record that the target's log does not hold (or a gap that was
  recorded, or what the target lost after it had acknowledged it);
- in the end every record is in the target's log, first occurrences in their source's order (but for a target
  that forgets producers with batches under way: it takes the later one first);
- without kills, revocations and forgetting brokers nothing is there twice, and one identity is enough.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from millrace.mirror.delivery.lane import REST_AFTER_MS, Identity, Item, Outcome, TargetLane
from millrace.mirror.delivery.progress import PartitionProgress, Span
from tests import seeds
from tests.simulation import histories

HISTORY_COUNT = seeds.runs(500)
OLD_BEFORE_MS = 1_000
SOURCES = ("ewr", "jfk")
Record = tuple[str, int]


class Appended(NamedTuple):
    producer_id: int
    base_sequence: int
    records: list[Record]
    is_replayed: bool


@dataclass
class ModelBroker:
    """One partition with Kafka's idempotence: five batches remembered for each producer, and any sequence
    taken from a producer it does not know."""

    batches: list[Appended] = field(default_factory=list)
    producers: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)
    replaying: set[int] = field(default_factory=set)
    """Producers whose last batch has old timestamps."""

    @property
    def log(self) -> list[Record]:
        return [record for batch in self.batches for record in batch.records]

    def append(
        self,
        producer_id: int,
        base_sequence: int,
        records: list[Record],
        *,
        is_replayed: bool = False,
    ) -> Outcome:
        recent = self.producers.get(producer_id)
        if recent is not None:
            if (base_sequence, len(records)) in recent:
                return Outcome.ACKNOWLEDGED
            last_base, last_count = recent[-1]
            if base_sequence != last_base + last_count:
                return Outcome.OUT_OF_ORDER
        self.batches.append(Appended(producer_id, base_sequence, records, is_replayed))
        self._note(self.batches[-1])
        return Outcome.ACKNOWLEDGED

    def _note(self, batch: Appended) -> None:
        recent = self.producers.setdefault(batch.producer_id, deque(maxlen=5))
        recent.append((batch.base_sequence, len(batch.records)))
        (self.replaying.add if batch.is_replayed else self.replaying.discard)(batch.producer_id)

    def lose_end(self, count: int) -> set[Record]:
        """The last batches are gone, and producers known as what is left tells of them; what was lost."""
        kept = max(0, len(self.batches) - count)
        lost = {record for batch in self.batches[kept:] for record in batch.records}
        del self.batches[kept:]
        self.producers.clear()
        self.replaying.clear()
        for batch in self.batches:
            self._note(batch)
        return lost

    def forget_by_timestamps(self) -> None:
        for producer_id in self.replaying:
            self.producers.pop(producer_id, None)


class Batch(Item):
    def __init__(
        self,
        source: str,
        offsets: Sequence[int],
        span: Span,
        assignment: Assignment,
        size: int = 0,
        *,
        is_replayed: bool = False,
    ) -> None:
        super().__init__(len(offsets), size or len(offsets), OLD_BEFORE_MS - is_replayed)
        self.source = source
        self.offsets = offsets
        self.span = span
        self.assignment = assignment

    @property
    def records(self) -> list[Record]:
        return [(self.source, offset) for offset in self.offsets]


@dataclass(eq=False)
class Assignment:
    progress: PartitionProgress
    is_open: bool = True


@dataclass(eq=False)
class Sent:
    batch: Batch
    producer_id: int
    base_sequence: int
    outcome: Outcome | None = None


class History:
    """One seeded run."""

    def __init__(
        self, seed: int, *, harsh: bool, capricious: bool = False, replayed: float | None = None
    ) -> None:
        """`replayed`: the part of the batches whose timestamps are old, where a target looks at them."""
        self.random = random.Random(seed)
        self.harsh = harsh
        self.capricious = capricious
        self.replayed = replayed
        self.broker = ModelBroker()
        self.source_ends = {source: self.random.randint(5, 40) for source in SOURCES}
        self.poison = {source: set() for source in SOURCES}
        for source in SOURCES:
            if self.random.random() < 0.3:
                self.poison[source] = {self.random.randrange(self.source_ends[source])}
        self.control = {
            source: {offset for offset in range(self.source_ends[source]) if self.random.random() < 0.05}
            for source in SOURCES
        }
        # What no record is expected for: control batches, and refused records once their gap is recorded.
        self.recorded_gaps: dict[str, set[int]] = {source: set(self.control[source]) for source in SOURCES}
        self.written = dict.fromkeys(SOURCES, 0)
        self.acknowledged: set[Record] = set()
        self.gone: set[Record] = set()
        """What the target has lost although it had acknowledged it: nobody sends it again."""
        self.unanswered: list[Batch] = []
        self.late: list[tuple[int, int, Batch]] = []
        self.next_producer_id = 0
        self.now_ms = 0
        self.start_worker()

    def start_worker(self) -> None:
        self.lane: TargetLane[Batch] = TargetLane(self.new_identity())
        self.wire: deque[Sent] = deque()
        self.unrecorded: list[tuple[Assignment, Batch]] = []
        self.assignments = {source: Assignment(PartitionProgress(self.written[source])) for source in SOURCES}

    def new_identity(self) -> Identity:
        self.next_producer_id += 1
        return Identity(self.next_producer_id, 0)

    # --- what can happen -------------------------------------------------------------------------

    def fetch(self) -> None:
        source = self.random.choice(SOURCES)
        assignment = self.assignments[source]
        progress = assignment.progress
        first = progress.fetch_offset
        if first >= self.source_ends[source] or progress.is_blocked:
            return
        if first in self.control[source]:
            progress.fetched(first + 1, 0)
            return
        following = min(self.source_ends[source], first + self.random.randint(1, 4))
        following = min([offset for offset in self.control[source] if offset > first] + [following])
        offsets = list(range(first, following))
        span = progress.fetched(following, 1, len(offsets))
        is_replayed = self.replayed is not None and self.random.random() < self.replayed
        self.lane.enqueue(Batch(source, offsets, span, assignment, is_replayed=is_replayed))

    def send(self) -> None:
        batch = self.lane.next_to_send(self.now_ms, replayed_before_ms=OLD_BEFORE_MS)
        if batch is not None:
            assert batch.identity is not None
            assert self.lane.in_flight <= 5
            self.wire.append(Sent(batch, batch.identity.producer_id, batch.base_sequence))

    def serve(self) -> None:
        """The broker works on the oldest request that it has not worked on."""
        for sent in self.wire:
            if sent.outcome is None:
                batch = sent.batch
                roll = self.random.random()
                if roll < 0.08:
                    sent.outcome = Outcome.RETRY
                elif self.poison[batch.source] & set(batch.offsets):
                    sent.outcome = Outcome.REFUSED
                else:
                    sent.outcome = self.broker.append(
                        sent.producer_id,
                        sent.base_sequence,
                        batch.records,
                        is_replayed=batch.is_replayed,
                    )
                    if roll < 0.12 and sent.outcome is Outcome.ACKNOWLEDGED:
                        sent.outcome = Outcome.RETRY  # appended, but not replicated in time
                return

    def answer(self) -> None:
        if self.wire and self.wire[0].outcome is not None:
            sent = self.wire.popleft()
            assert sent.outcome is not None
            self.take_answer(sent.batch, sent.outcome)

    def cut(self) -> None:
        """The connection is lost; of what was on it the broker has seen some."""
        self.lose_answers()
        while self.wire:
            sent = self.wire.popleft()
            if self.capricious and sent.outcome is None and self.random.random() < 0.5:
                self.late.append((sent.producer_id, sent.base_sequence, sent.batch))
            self.take_answer(sent.batch, Outcome.RETRY)

    def lose_answers(self) -> None:
        """Of what is on the wire the target sees some; its answers reach nobody."""
        for _ in range(self.random.randint(0, len(self.wire))):
            self.serve()
        self.gone -= self.answers_under_way() - self.acknowledged

    def answers_under_way(self) -> set[Record]:
        """What the target has acknowledged and the sender does not know yet."""
        answers = (sent.batch for sent in self.wire if sent.outcome is Outcome.ACKNOWLEDGED)
        return {record for batch in answers for record in batch.records}

    def take_answer(self, batch: Batch, outcome: Outcome) -> None:
        result = self.lane.answered(batch, outcome, self.now_ms, on_refused=self.refused)
        if outcome is Outcome.RETRY:
            self.unanswered.append(batch)
        if result is Outcome.ACKNOWLEDGED:
            self.acknowledged.update(batch.records)
            batch.assignment.progress.acknowledged(batch.span)
        if self.lane.needs_identity and not self.lane.in_flight:
            self.lane.renew(self.new_identity())

    def refused(self, batch: Batch) -> None:
        if len(batch.offsets) > 1:
            half = len(batch.offsets) // 2
            parts = [batch.offsets[:half], batch.offsets[half:]]
            spans = batch.assignment.progress.split(batch.span, [part[-1] + 1 for part in parts])
            self.lane.replace(
                batch,
                [
                    Batch(batch.source, part, span, batch.assignment)
                    for part, span in zip(parts, spans, strict=True)
                ],
            )
            return
        if not batch.assignment.is_open:
            return
        batch.assignment.progress.failed(batch.span)
        self.unrecorded.append((batch.assignment, batch))

    def record_gap(self) -> None:
        if self.unrecorded:
            assignment, batch = self.unrecorded.pop(self.random.randrange(len(self.unrecorded)))
            self.recorded_gaps[batch.source].update(batch.offsets)
            assignment.progress.gap_recorded(batch.span)

    def write_position(self) -> None:
        source = self.random.choice(SOURCES)
        progress = self.assignments[source].progress
        position = progress.position_to_write()
        if position is not None:
            self.written[source] = position
            progress.written(position)
            self.check_position(source)

    def reassign(self) -> None:
        """A partition is revoked, with or without a drain, and comes back with the written position."""
        source = self.random.choice(SOURCES)
        assignment = self.assignments[source]
        self.lane.withdraw(lambda batch: batch.assignment is assignment)
        assignment.progress.close()
        assignment.is_open = False
        self.assignments[source] = Assignment(PartitionProgress(self.written[source]))

    def kill(self) -> None:
        self.lose_answers()
        self.start_worker()

    def forget(self) -> None:
        """Brokers forget producers that rest."""
        if not self.wire:
            self.now_ms += REST_AFTER_MS + 1
            self.broker.producers.clear()

    def refuse_more(self) -> None:
        """The target's limit is lowered, or a timestamp bound is crossed, for a record that may be in its
        log already."""
        source = self.random.choice(SOURCES)
        offset = self.random.randrange(self.source_ends[source])
        if self.unanswered:
            batch = self.unanswered[-1]
            source, offset = batch.source, self.random.choice(batch.offsets)
        self.poison[source].add(offset)

    def arrive_late(self) -> None:
        """The target reads a request from a connection that the sender has given up."""
        if self.late:
            producer_id, base_sequence, batch = self.late.pop(0)
            if not self.poison[batch.source] & set(batch.offsets):
                self.broker.append(producer_id, base_sequence, batch.records)

    def forget_now(self) -> None:
        """A broker forgets producers whose batches are under way."""
        self.broker.producers.clear()

    def lose_end(self) -> None:
        """The target elects a leader that lacks the end of the log."""
        answered = self.acknowledged | self.answers_under_way()
        self.gone |= self.broker.lose_end(self.random.randint(1, 3)) & answered

    # --- running and checking --------------------------------------------------------------------

    def check_position(self, source: str) -> None:
        there = {offset for name, offset in (*self.broker.log, *self.gone) if name == source}
        there |= self.recorded_gaps[source]
        missing = set(range(self.written[source])) - there
        assert not missing, f"position {self.written[source]} of {source} passes {sorted(missing)}"

    def run(self) -> None:
        calm = [
            self.fetch,
            self.send,
            self.send,
            self.serve,
            self.answer,
            self.write_position,
            self.record_gap,
        ]
        rough = [*calm * 4, self.cut]
        steps = rough
        if self.harsh:
            steps = [*rough * 3, self.reassign, self.kill, self.forget]
        if self.capricious:
            steps = [*steps, self.refuse_more, self.forget_now, self.cut, self.arrive_late, self.lose_end]
        if self.replayed is not None:
            steps = [*steps, self.broker.forget_by_timestamps]
        for _ in range(self.random.randint(50, 400)):
            self.now_ms += self.random.randint(0, 40)
            self.random.choice(steps)()
        for _ in range(10_000):
            self.now_ms += 10
            for step in calm:
                step()
            if all(self.written[source] >= self.source_ends[source] for source in SOURCES):
                return
        raise AssertionError(f"not delivered in the end: {self.written} of {self.source_ends}")

    def check_log(self) -> None:
        loses_state = self.harsh or self.capricious or self.replayed is not None
        if not (loses_state or any(self.poison.values())):
            assert self.next_producer_id == 1, "a new identity was needed although no state was lost"
        for source in SOURCES:
            self.check_position(source)
            if self.capricious:
                continue
            order = [offset for name, offset in self.broker.log if name == source]
            firsts = list(dict.fromkeys(order))
            assert firsts == sorted(firsts), f"{source} arrived out of order: {firsts}"
            if not self.harsh and self.replayed is None:
                assert len(firsts) == len(order), f"{source} has repeats: {order}"


def run(seed: int, *, harsh: bool, capricious: bool = False, replayed: float | None = None) -> None:
    history = History(seed, harsh=harsh, capricious=capricious, replayed=replayed)
    try:
        history.run()
        history.check_log()
    except Exception as error:
        kind = f"harsh={harsh}, capricious={capricious}, replayed={replayed}"
        told = f"History(seed={seed}, {kind}) broke a rule: {error}"
        raise AssertionError(told) from error
    histories.went_through("deliveries")


@pytest.mark.parametrize("harsh", [False, True], ids=["failing_network", "kills_and_revocations"])
def test_random_histories_lose_nothing_and_keep_order(harsh: bool) -> None:
    first_seed = seeds.given()
    for seed in range(first_seed, first_seed + HISTORY_COUNT):
        run(seed, harsh=harsh)


@pytest.mark.parametrize("harsh", [False, True], ids=["failing_network", "kills_and_revocations"])
def test_late_refusals_forgotten_producers_and_lost_ends_lose_and_stall_nothing(harsh: bool) -> None:
    """Some of the first 500 show a loss when the sequence of a refused batch goes to the next one although it
    may be in the log, and some stand still when what is acknowledged stays at the head of its row."""
    first_seed = seeds.given()
    for seed in range(first_seed, first_seed + HISTORY_COUNT):
        run(seed, harsh=harsh, capricious=True)


@pytest.mark.parametrize("replayed", [0.3, 1.0])
@pytest.mark.parametrize("harsh", [False, True], ids=["failing_network", "kills_and_revocations"])
def test_replayed_data_keeps_its_order_where_producers_are_forgotten_by_timestamps(
    harsh: bool, replayed: float
) -> None:
    first_seed = seeds.given()
    for seed in range(first_seed, first_seed + HISTORY_COUNT // 2):
        run(seed, harsh=harsh, replayed=replayed)


def test_a_lost_answer_that_is_made_up_for_says_nothing_of_what_came_after_it() -> None:
    """The last batch in the log is an old one, and of two answers that of the one before it comes later."""
    run(2801195, harsh=False, replayed=0.3)
