"""Two transactional ids of one lane take turns: while one commits, the other one is filled. Pure.

Called by `transactional_lane`, which carries out the steps of both; `sink` asks the one that is being filled
what it may send. The rules of one transaction are `transaction`'s; here is what holds between two that follow
each other.

    first    OPEN ── SEALED ── WRITING ── FENCING ── READY ── ENDING ────── IDLE ────── OPEN ──
    second   IDLE ──────────── OPEN ───────────────────────── SEALED ── WRITING ── FENCING ── READY ──
                               ^ has the turn                 ^ may be sealed             may end ^

Rules, and why:
- *The turn passes when every batch of the first is acknowledged.* So no batch of the second can stand before
  one of the first in a partition, although each id has its own row of sequence numbers.
- *Positions stand in the order in which they count*: those of the second are written when those of the first
  are acknowledged.
- *The second is sealed when the first is about to be committed*, if it is not full or old before. What comes
  meanwhile is carried with it: the busier the target, the fewer and larger the transactions.
- *The second ends only after the first is committed*, and is known to be. Otherwise a takeover could find
  positions that pass records of an aborted transaction.
- *A first one that is lost drags the second along*: what that holds stands behind what is missing. A second
  one that is lost waits for the first to be decided, then both begin anew: with the rows their sequence
  numbers are forgotten.
- *Nothing is opened while the outcome of another is unknown*: the positions have to be read first.
- *An id whose coordinator is away gives the turn back*: the lane then goes on with the other alone.
"""

from __future__ import annotations

from millrace.mirror.delivery.transaction import (
    CLOSING,
    DRAGGED,
    Act,
    LaneTransaction,
    LaneView,
    Phase,
    Step,
)
from millrace.mirror.topics.routes import TargetPartition


class Alternation:
    """See the module's text. Both are named by index; `filling` has the turn, `earlier` is the other."""

    def __init__(self, position_interval_ms: int) -> None:
        self.both = (LaneTransaction(position_interval_ms), LaneTransaction(position_interval_ms))
        self.turn = 0
        """Whose batches go out, or will; the other one's transaction, if it has one, is the earlier."""
        self.filling, self.earlier = self.both

    def take_interval(self, position_interval_ms: int) -> None:
        for each in self.both:
            each.position_interval_ms = position_interval_ms

    @property
    def holds_records(self) -> bool:
        """Whether what was sent is in a transaction that can still be doomed."""
        return any(each.holds_records for each in self.both)

    @property
    def may_seal(self) -> bool:
        """Whether what is being filled need not wait for the transaction before it."""
        return self.earlier.phase not in CLOSING or self.earlier.phase is Phase.ENDING

    def doom_all(self, reason: str) -> None:
        """Of every transaction that can still be doomed."""
        for each in self.both:
            if each.holds_records:
                each.doom(reason)

    def next_step(self, index: int, lane: LaneView, steady_ms: int) -> Step:
        """What to do now with one of both. REWIND is about both, whoever is asked for it."""
        self._spread()
        self._pass_turn()
        mine, other = self.both[index], self.both[1 - index]
        rewinding = self._rewinding()
        if rewinding is not None and (index == self.turn or mine.phase not in CLOSING):
            return rewinding
        if index == self.turn:
            ahead = other.phase if other.phase in CLOSING else None
            step = mine.next_step(lane, steady_ms, may_open=not other.is_unread, ahead=ahead)
        else:
            step = mine.next_step(lane, steady_ms, may_open=False)
        if mine.must_rewind:
            self._spread()
            return self._rewinding() or Step(Act.WAIT)
        return step

    @property
    def lost_by(self) -> str:
        """Why what REWIND is about was lost."""
        reasons = {each.doomed_by: None for each in self.both if each.must_rewind}
        if len(reasons) > 1:
            reasons.pop(DRAGGED, None)
        return " | ".join(reasons)

    def committed(self, index: int, steady_ms: int, *, is_certain: bool = True) -> None:
        self.both[index].committed(steady_ms, is_certain=is_certain)
        for each in self.both:
            each.ended_at_ms = steady_ms

    def rewound(self) -> None:
        for each in self.both:
            each.rewound()

    def positions_read(self) -> None:
        for each in self.both:
            each.positions_read()

    # --- between the two -------------------------------------------------------------------------

    def _spread(self) -> None:
        """A loss takes the later one along, and the sequence numbers of an idle one."""
        later, earlier = self.filling, self.earlier
        if earlier.take_lost():
            later.drag()
        if later.take_lost() and earlier.phase is Phase.IDLE:
            earlier.drag()

    def _pass_turn(self) -> None:
        filling, other = self.filling, self.earlier
        if filling.phase in CLOSING:
            passes = other.is_clear
        else:
            passes = filling.phase is Phase.NO_PRODUCER and filling.is_clear and other.phase is Phase.IDLE
        if passes:
            other.allowance = filling.allowance
            self._give_turn()

    def _give_turn(self) -> None:
        self.turn = 1 - self.turn
        self.filling, self.earlier = self.earlier, self.filling

    def _rewinding(self) -> Step | None:
        """What a lost transaction asks for; None when there is none."""
        if not any(each.must_rewind for each in self.both):
            return None
        if any(each.is_unread for each in self.both):
            self.rewound()  # by the positions, as soon as they are read
            return None
        if self.earlier.phase in CLOSING:
            return Step(Act.WAIT)
        blamed = frozenset[TargetPartition]().union(*(each.blamed for each in self.both))
        return Step(Act.REWIND, blamed=blamed)
