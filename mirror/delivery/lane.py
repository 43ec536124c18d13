"""The order and sequence rules of one target partition. Pure; times are of the steady clock.

Called by `sink`, one `TargetLane` for each target partition; every source partition that merges into it
queues here, so that one idempotent producer speaks to the partition with one row of sequence numbers.

    waiting ──next_to_send──> in flight ──acknowledged──> gone
       ^                          │
       └── retry, same sequence ──┴── refused ──> gone (its gap belongs to the pipeline)

Rules, and why:
- Only the first five batches of the row are ever sent: a broker remembers the last five of a producer, and
  must still know the first one when it comes again. One that is acknowledged before the first keeps its
  place in the row, and so in the count, until its turn.
- A batch keeps its sequence for every retry: it may be in the log although the answer said otherwise, and
  then so may the ones behind it. Only when a batch was refused for good (it is in no log, so nothing behind
  it is) do the ones behind it move up; they count as never sent, and those that nobody wants any more leave.
- A refusal says nothing of an earlier try whose outcome nobody knows: limits and timestamps are looked at
  before duplicates. So the sequence of a batch that may be in the log is never given to another, which would
  be taken for its duplicate: the batch goes out once more under a new identity, and a refusal there is final.
  Nor do others move up while one of them may be in the log; they too get a new identity.
- What is acknowledged never stands at the head of the row, however it came there: nothing would be sent.
- After any failure nothing new is sent until every batch in flight is answered; then the row is sent again
  from its first batch on. So a batch can never overtake one of its own lane.
- Only one is in flight until the first batch of the row is settled: after a failure, because the broker
  must not be led more than five batches past the one that failed (it would not know it again); for a new
  identity and after a long rest, because a broker without state for a producer accepts *any* sequence, so
  a second batch could slip in before a failed first one.
- Only one is in flight, too, while the timestamps are old (`replayed_after_ms`): Apache Kafka forgets a
  producer by the timestamp of its last batch, not by when it came (`producer.id.expiration.ms`, a day), so
  one that replays old data is forgotten with batches under way, and of these a later one would be taken
  although an earlier one failed. A batch that was new when it came may be old when it is sent, so that is
  judged each time it is. In a transaction nothing waits for that: nobody is forgotten while his is open, and
  a row that was taken up in its middle is told by the next sequence, and aborted.
- An out-of-order answer to the first batch of the row means that the broker lost the producer's state: the
  lane asks for a new identity and sends the row again under it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Generic, TypeVar

from millrace.broker.client.retry import BackOff

MAX_IN_FLIGHT = 5
# A broker forgets an idle producer after producer.id.expiration.ms (a day, in tests of others minutes).
REST_AFTER_MS = 60_000
# What Apache Kafka has of that by default.
EXPIRATION_MS = 24 * 3_600_000
NEVER_MS = -(1 << 63)
BACK_OFF = BackOff(first_ms=50, limit_ms=5_000)
SEQUENCE_MODULUS = 1 << 31


def replayed_after_ms(expiration_ms: int) -> int:
    """How old a batch is, at least, behind which nothing else may go out, where a broker forgets its producer
    at `expiration_ms`: half of that, and no more than by default, for it may be lowered at any moment. A
    request is given up within the time between the two."""
    return min(expiration_ms // 2, expiration_ms - REST_AFTER_MS, EXPIRATION_MS // 2)


class Outcome(Enum):
    """What the target's answer (or the lack of one) means for a batch."""

    ACKNOWLEDGED = "acknowledged"  # in the log, now or already
    RETRY = "retry"  # nobody knows whether it is in the log: send it again with the same sequence
    NOT_TAKEN = "not_taken"  # not in the log by this request, but may be by the next: as RETRY
    OUT_OF_ORDER = "out_of_order"  # the broker expected another sequence
    REFUSED = "refused"  # not in the log and never will be as it is


@dataclass(frozen=True, slots=True)
class Identity:
    """An idempotent producer's id and epoch, as InitProducerId gave them."""

    producer_id: int
    producer_epoch: int


class Item:
    """One batch of the row, as far as its order goes; what it is made of is its class's own (`Outgoing`)."""

    __slots__ = (
        "base_sequence",
        "identity",
        "in_doubt",
        "in_flight",
        "is_acknowledged",
        "is_replayed",
        "is_unwanted",
        "newest_ms",
        "record_count",
        "size",
        "was_sent",
    )

    def __init__(self, record_count: int, size: int, newest_ms: int = 0) -> None:
        """`newest_ms`: the newest of its records' timestamps. Records without any have -1, and count as older
        than all others, as they do at the target."""
        self.record_count = record_count
        self.size = size
        self.newest_ms = newest_ms
        self.is_replayed = False  # when it was sent: the target may forget its producer by it
        self.base_sequence = -1
        self.identity: Identity | None = None
        self.in_flight = False
        self.was_sent = False
        self.is_acknowledged = False
        self.in_doubt = False  # may be in the log under its sequence, although no answer said so
        self.is_unwanted = False  # leaves the row as soon as it is known not to be in the log


T = TypeVar("T", bound=Item)


class TargetLane(Generic[T]):
    """The row of batches that one worker has for one target partition."""

    def __init__(self, identity: Identity) -> None:
        self._row: deque[T] = deque()
        self._in_flight = 0
        self._replayed_in_flight = 0
        # Of those that are acknowledged under this identity, the last one in the log.
        self._last_was_replayed = False
        self._identity = identity
        self._next_sequence = 0  # of the next batch that has none
        self._confirmed_at_ms = -1  # when this identity last had an acknowledgement
        self._recovering = False
        self._failure_count = 0  # of its first batch, in a row
        self.retry_at_ms = 0  # nothing goes out before
        self.needs_identity = False
        # Where the rows of other identities stand, by producer id: its epoch, next sequence, confirmed at,
        # whether its last batch was replayed.
        self._others: dict[int, tuple[int, int, int, bool]] = {}

    def __len__(self) -> int:
        return len(self._row)

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def has_unsent(self) -> bool:
        """Whether a batch waits that was never sent."""
        return bool(self._row) and not self._row[-1].was_sent

    @property
    def is_failing(self) -> bool:
        """The last answers were failures: fetching more for this lane would only fill memory."""
        return self._failure_count > 0

    def at_rest(self) -> Iterator[T]:
        """What no request that is under way holds."""
        return (item for item in self._row if not item.in_flight)

    def enqueue(self, item: T) -> None:
        self._row.append(item)

    def replace(self, item: T, instead: Iterable[T]) -> None:
        """Puts smaller batches in the place of a refused one.

        Called in the same breath as the REFUSED answer, through `answered`'s `on_refused`.
        """
        place = self._row.index(item)
        del self._row[place]
        for shift, new in enumerate(instead):
            self._row.insert(place + shift, new)

    @property
    def is_unsettled(self) -> bool:
        """Whether a batch that was sent is not known to be in the log."""
        return any(item.was_sent and not item.is_acknowledged for item in islice(self._row, MAX_IN_FLIGHT))

    def next_to_send(
        self,
        steady_ms: int,
        max_size: int | None = None,
        *,
        only_again: bool = False,
        replayed_before_ms: int = NEVER_MS,
    ) -> T | None:
        """The batch to send now, stamped with identity and sequence, counted as in flight; or None. With
        `only_again` none that was never sent before. By a batch whose timestamps lie before
        `replayed_before_ms` (a time of day) the target may forget the producer."""
        if self.needs_identity or steady_ms < self.retry_at_ms or self._in_flight == MAX_IN_FLIGHT:
            return None
        if self._recovering and self._in_flight == 0:
            self._recovering = False
        if self._recovering or (self._in_flight and self._may_be_forgotten):
            return None
        item = self._first_unsent(self._window(steady_ms))
        if item is None or (max_size is not None and item.size > max_size):
            return None
        if only_again and not item.was_sent:
            return None
        if item.base_sequence < 0 or item.identity is not self._identity:
            item.identity = self._identity
            item.base_sequence = self._next_sequence
            self._next_sequence = (self._next_sequence + item.record_count) % SEQUENCE_MODULUS
            item.in_doubt = False
        item.in_flight = item.was_sent = True
        item.is_replayed = item.newest_ms < replayed_before_ms
        self._in_flight += 1
        self._replayed_in_flight += item.is_replayed
        return item

    def answered(
        self,
        item: T,
        outcome: Outcome,
        steady_ms: int,
        *,
        random_unit: float = 0.5,
        on_refused: Callable[[T], None] | None = None,
    ) -> Outcome:
        """Takes the answer for one batch in flight; tells what it came to. `random_unit`, from [0, 1),
        spreads the rest after a failure.

        ACKNOWLEDGED and REFUSED batches have left the row; RETRY ones will be sent again, also where the
        answer was a refusal that says nothing of an earlier try.
        """
        if not item.in_flight:
            raise RuntimeError("an answer for a batch that is not in flight")
        is_first = self._row[0] is item
        # Answers come in the order of the requests, so the first failure is the cause and the failures
        # behind it are its consequences: their sequence was ahead of what the broker expected.
        is_cause = is_first and not self._recovering
        item.in_flight = False
        self._in_flight -= 1
        self._replayed_in_flight -= item.is_replayed
        # Its sequence is another's by now, and may be in the log all the same.
        if item.base_sequence < 0 and outcome in (Outcome.ACKNOWLEDGED, Outcome.RETRY):
            self.needs_identity = True
        if outcome is Outcome.ACKNOWLEDGED:
            self._acknowledge(item, steady_ms)
            return outcome
        self._recovering = True
        self._confirmed_at_ms = -1
        item.in_doubt |= outcome is Outcome.RETRY
        if outcome is Outcome.REFUSED and is_cause and not item.in_doubt:
            self._move_up(item)
            if on_refused is not None:
                on_refused(item)
            self._leave(item)
            return outcome
        if is_cause:
            self.needs_identity |= outcome in (Outcome.OUT_OF_ORDER, Outcome.REFUSED)
            if outcome is not Outcome.REFUSED:
                self._back_off(steady_ms, random_unit)
        if item.is_unwanted and not item.was_sent:
            self._leave(item)
            return Outcome.REFUSED
        return Outcome.RETRY

    def renew(self, identity: Identity) -> None:
        """Starts a new row of sequence numbers under another identity, once nothing is in flight."""
        if self._in_flight:
            raise RuntimeError("an identity changes only when nothing is in flight")
        self._identity = identity
        self._next_sequence = 0
        self._confirmed_at_ms = -1
        self._last_was_replayed = False
        self.needs_identity = False

    def switch(self, identity: Identity) -> None:
        """Goes on under `identity`, with the sequence numbers that it had here, once everything that was sent
        under the present one is acknowledged. One of another epoch begins anew."""
        if self._in_flight or self.is_unsettled:
            raise RuntimeError("another identity takes over only when all that was sent is acknowledged")
        mine = self._identity
        if mine.producer_id >= 0:
            self._others[mine.producer_id] = (
                *(mine.producer_epoch, self._next_sequence, self._confirmed_at_ms),
                self._last_was_replayed,
            )
        nothing = (-1, 0, -1, False)
        epoch, sequence, confirmed_at_ms, was_replayed = self._others.pop(identity.producer_id, nothing)
        self.renew(identity)
        if epoch == identity.producer_epoch:
            self._next_sequence, self._confirmed_at_ms = sequence, confirmed_at_ms
            self._last_was_replayed = was_replayed

    def withdraw(self, belongs: Callable[[T], bool]) -> list[T]:
        """Takes out the batches that `belongs` picks, from the last one back to the last that was sent.

        One that was sent stays: its sequence number may be in the target's log already. And what stands
        before a sent one stays with it, otherwise the later one would arrive without the earlier. One that
        is in flight behind a refused batch is not in the log: it leaves when its answer is there (and should
        the answer say otherwise, nobody hears of it but through `is_unwanted`).
        """
        gone: list[T] = []
        for item in reversed(self._row):
            if belongs(item):
                if item.was_sent:
                    break
                gone.append(item)
        for item in gone:
            if item.in_flight:
                item.is_unwanted = True
            else:
                self._leave(item)
        gone.reverse()
        return gone

    def _first_unsent(self, window: int) -> T | None:
        for item in islice(self._row, window):
            if not item.in_flight and not item.is_acknowledged:
                return item
        return None

    @property
    def _may_be_forgotten(self) -> bool:
        """Whether the target may stop to know this producer before what is in flight has come."""
        return self._last_was_replayed or self._replayed_in_flight > 0

    def _window(self, steady_ms: int) -> int:
        if self._confirmed_at_ms < 0:
            return 1
        if self._in_flight == 0 and steady_ms - self._confirmed_at_ms > REST_AFTER_MS:
            self._confirmed_at_ms = -1
            return 1
        return MAX_IN_FLIGHT

    def _acknowledge(self, item: T, steady_ms: int) -> None:
        item.is_acknowledged = True
        self._last_was_replayed = self._last_in_log(item).is_replayed
        # When the first batch failed and one behind it did not, the first is in the log: its retry will be
        # told that it is a duplicate.
        self._shed_acknowledged()
        if not self._recovering:
            self._confirmed_at_ms = steady_ms
            self._failure_count = 0

    def _last_in_log(self, item: T) -> T:
        """An answer that was lost comes last, when its batch is sent again; in the log it comes first."""
        last, is_behind = item, False
        for each in islice(self._row, MAX_IN_FLIGHT):
            if each is item:
                is_behind = True
            elif is_behind and each.is_acknowledged and each.identity is self._identity:
                last = each
        return last

    def _leave(self, item: T) -> None:
        if item in self._row:
            self._row.remove(item)
        self._shed_acknowledged()

    def _shed_acknowledged(self) -> None:
        while self._row and self._row[0].is_acknowledged:
            self._row.popleft()

    def _move_up(self, refused: T) -> None:
        """The sequence of a refused batch was not used: whatever stands behind it takes its place."""
        self._next_sequence = refused.base_sequence
        if any(item.is_acknowledged or item.in_doubt for item in self._row):
            # In the log behind a batch that is not, or perhaps so: no sequence of this identity fits now.
            self.needs_identity = True
        for item in self._row:
            item.base_sequence = -1
            item.was_sent = item.is_acknowledged

    def _back_off(self, steady_ms: int, random_unit: float) -> None:
        self._failure_count += 1
        self.retry_at_ms = steady_ms + int(BACK_OFF.delay_ms(self._failure_count, random_unit))
