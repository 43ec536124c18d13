"""The rules of one transactional id's transactions: what may be sent when, when one is closed, when it must
not be. Pure; times are of the steady clock (`mirror/steady.py`).

Two of these take turns in a lane: `alternation` says whose turn it is and when one may end. What `next_step`
says is carried out by `transactional_lane`, which reports what came of it. A transaction holds batches of the
lane's partitions, the positions after them, and, as its last act before it is committed, a fence: a commit in
the workers' group that its coordinator refuses to whoever is no member any more (KIP-447).

    NO_PRODUCER ──InitProducerId──> IDLE ──partitions added──> OPEN ──idle, full or old──> SEALED
      ^     │                       ^ ^                                   all acknowledged │
      │     └─(in doubt)─> UNREAD ──┘ │                                                    v
      │                   positions   │                  FENCING <──positions written── WRITING
      │                   read        │                     │ fence passed
      │                               │                     v
      │                               └─committed─ ENDING <─the one before is committed─ READY
      ├────────────────── refused: in doubt ──────────┘
      └── doom: OPEN, SEALED, WRITING, FENCING, READY

Rules, and why:
- *A transaction is closed as soon as nothing is queued or under way* and the source is not known to have
  more. Its age and size are limits, not timers. Where records never cease to come, but no faster than they
  are carried, something is always under way: then it is closed when the one before it is committed.
- *Positions are written only when everything that was sent is acknowledged*, and only when they are exact: a
  transaction that holds a record which its positions do not pass would bring that record twice.
- *The fence comes after the positions' acknowledgement.* Whoever owns the partitions next reads the positions
  topic as far as it goes once the group has a new generation. What passed the fence before that is in the
  log by then, so the reader waits for its outcome; what comes later does not pass.
- *Nothing but EndTxn makes a commit possible.* Until it has been sent, a transaction in any trouble is
  doomed: a new producer epoch aborts it, and what it held is carried again from the positions known. Once it
  has been sent it is asked for again until it is answered. When the answer is a refusal, nobody here knows
  the outcome: a new epoch makes it final, then the positions are *read*, never guessed. And a producer
  epoch in which a request for the end went unanswered is not used again: it may arrive late.
- *A transaction belongs to one seat.* It may go on in a later generation of the same membership, because the
  group's leader hands out nothing that a member still claims; under another member id it never is committed.
- *A size that takes the target too long is made smaller*, so that a slow target gets small transactions
  instead of ones that time out for ever.
- *Whoever blocks a transaction stays alone with it*: partitions whose batches do not get through are named,
  and the lane's other partitions leave for another lane. A leader that answers nothing says nothing either:
  when a transaction is given up, silence is blamed like a refusal.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

from millrace.mirror.topics.routes import TargetPartition

TRANSACTION_TIMEOUT_MS = 15_000
MAX_AGE_MS = 500
MAX_SIZE = 32 << 20
MIN_SIZE = 256 << 10
FIRST_SIZE = 2 << 20
# How long an open transaction waits for batches that the source is known to have.
LINGER_MS = 20
# Batches that do not get through for this long must not hold up the others.
FAILING_AFTER_MS = 2_000
# Must leave time to write positions and to end it before the coordinator aborts it.
GIVE_UP_AFTER_MS = 12_000
# How long what was sent may take from the seal to the last acknowledgement before sizes shrink, or grow.
SLOW_MS = 2_500
QUICK_MS = 1_000
# A generation that the coordinator has and the member not yet: the answer to its join is under way.
GENERATION_WAIT_MS = 20
FENCED_PAUSE_MS = 1_000
DRAGGED = "the transaction before it is not committed"


class Phase(StrEnum):
    NO_PRODUCER = "no_producer"
    UNREAD = "unread"
    IDLE = "idle"
    OPEN = "open"
    SEALED = "sealed"
    WRITING = "writing"
    FENCING = "fencing"
    READY = "ready"
    ENDING = "ending"


# All its batches are acknowledged; what is left is to commit it.
CLOSING = frozenset({Phase.WRITING, Phase.FENCING, Phase.READY, Phase.ENDING})


class Act(Enum):
    WAIT = "wait"
    REWIND = "rewind"  # forget what is under way, go back to the positions known
    BEGIN_PRODUCER = "begin_producer"  # InitProducerId
    READ_POSITIONS = "read_positions"  # and go back to what they say
    ADD_PARTITIONS = "add_partitions"
    ADD_GROUP = "add_group"
    WRITE_POSITIONS = "write_positions"
    FENCE = "fence"
    END = "end"


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in the workers' group."""

    member_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now. `until_ms`: how long WAIT may last (None: until something happens); `partitions` are
    those to add; `blamed` (REWIND) are those that stay alone; `seat` is whose the fence is."""

    act: Act
    until_ms: int | None = None
    partitions: frozenset[TargetPartition] = frozenset()
    blamed: frozenset[TargetPartition] = frozenset()
    seat: Seat | None = None


class LaneView(Protocol):
    """What the rules look at, as it is now; read only when it matters."""

    @property
    def seat(self) -> Seat | None:
        """Of the membership under which the lane's partitions were assigned; None between memberships."""
        ...

    @property
    def waiting(self) -> Collection[TargetPartition]:
        """The target partitions for which something is queued or under way."""
        ...

    @property
    def own_partitions(self) -> frozenset[TargetPartition]:
        """The mirror's own partitions that every transaction of the lane writes to."""
        ...

    @property
    def is_settled(self) -> bool:
        """Everything that was sent is acknowledged."""
        ...

    @property
    def is_exact(self) -> bool:
        """Everything that was acknowledged lies before the positions that would be written now."""
        ...

    @property
    def more_is_coming(self) -> bool:
        """A source of the lane has more than was fetched from it, or a batch waits to be sent at all."""
        ...

    @property
    def has_news(self) -> bool:
        """A position differs from the one on record."""
        ...

    @property
    def is_urgent(self) -> bool:
        """Somebody waits for the positions to be on record."""
        ...

    def failing(self) -> frozenset[TargetPartition]:
        """The target partitions whose batches do not get through now."""
        ...

    def holding_up(self) -> frozenset[TargetPartition]:
        """The target partitions for which the positions wait, whatever the reason: what was sent there is not
        acknowledged, or it is beyond the position that would be written now."""
        ...


class LaneTransaction:
    """The state of one transactional id."""

    def __init__(self, position_interval_ms: int) -> None:
        """`position_interval_ms`: how long a position that moved without data may wait."""
        self.phase = Phase.NO_PRODUCER
        self.allowance = FIRST_SIZE
        self.size = 0
        self.doomed_by = ""
        self.position_interval_ms = position_interval_ms
        self._added: frozenset[TargetPartition] = frozenset()
        self._has_group = False
        self.must_rewind = False
        self.blamed: frozenset[TargetPartition] = frozenset()
        self._in_doubt = False
        self._member_id = ""
        self._refused_generation = -1
        self.opened_at_ms = 0
        self._sealed_at_ms = 0
        self._idle_since_ms: int | None = None
        self._completes = False  # sealed within a stretch of several batches: the rest of it may follow
        self.ended_at_ms = 0
        self._not_before_ms = 0
        self._is_lost = False
        self.committed_count = 0
        self.aborted_count = 0

    # --- what the sink asks ----------------------------------------------------------------------

    def lets(self, target: TargetPartition) -> bool:
        """Whether batches for `target` may go out (see `only_again`)."""
        return self.phase in (Phase.OPEN, Phase.SEALED) and target in self._added

    @property
    def only_again(self) -> bool:
        """Whether only batches may go out that went out before."""
        return self.phase is not Phase.OPEN and not self._completes

    def sent(self, size: int, steady_ms: int) -> None:
        """A batch went out (again)."""
        self.size += size
        if self.size >= self.allowance and self.phase is Phase.OPEN:
            self._seal(steady_ms)

    def doom(self, reason: str, blamed: Collection[TargetPartition] = ()) -> None:
        """The transaction must not be committed. Without effect once its outcome is no longer in our hands,
        or when there is none."""
        if self.phase in (Phase.NO_PRODUCER, Phase.UNREAD, Phase.ENDING):
            return
        self.doomed_by = reason
        self.aborted_count += 1
        self.blamed = frozenset(blamed)
        self.must_rewind = self._is_lost = True
        self.allowance = max(MIN_SIZE, self.allowance // 2)
        self._close(Phase.NO_PRODUCER)

    # --- what to do ------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a transaction may be open at the coordinator."""
        return self.phase not in (Phase.IDLE, Phase.UNREAD)

    @property
    def holds_records(self) -> bool:
        """Whether what was sent is in a transaction that can still be doomed."""
        return self.phase in (Phase.OPEN, Phase.SEALED, Phase.WRITING, Phase.FENCING, Phase.READY)

    @property
    def is_clear(self) -> bool:
        """Whether the last transaction is decided, known to be so, and nothing is left to do about it."""
        is_done = self.phase in (Phase.IDLE, Phase.NO_PRODUCER)
        return is_done and not self.must_rewind and not self._in_doubt

    @property
    def is_unread(self) -> bool:
        """Whether the positions have to be read before anything else is carried."""
        return self._in_doubt or self.phase is Phase.UNREAD

    def next_step(
        self,
        lane: LaneView,
        steady_ms: int,
        *,
        may_open: bool = True,
        ahead: Phase | None = None,
    ) -> Step:
        """What to do now. Carry it out and report it, or (WAIT) ask again when something has changed.

        `may_open`: it has the turn. `ahead`: how far the transaction before it is, while that is not known
        to be committed."""
        if self.holds_records and not self._keeps_seat(lane.seat):
            self.doom("the seat in the group is another one")
        if self.phase is Phase.OPEN:
            step = self._while_open(lane, steady_ms, ahead)
            if step is not None:
                return step
        if self.phase is Phase.SEALED:
            step = self._while_sealed(lane, steady_ms, ahead)
            if step is not None:
                return step
        if self.phase is Phase.NO_PRODUCER:
            if self.must_rewind:
                return Step(Act.REWIND, blamed=self.blamed)
            if lane.seat is None:
                return Step(Act.WAIT)  # the id may be somebody else's by now
            if steady_ms < self._not_before_ms:
                return Step(Act.WAIT, self._not_before_ms)
            return Step(Act.BEGIN_PRODUCER)
        if self.phase is Phase.UNREAD:
            return Step(Act.READ_POSITIONS)
        if self.phase is Phase.IDLE:
            return self._while_idle(lane, steady_ms) if may_open else Step(Act.WAIT)
        if self.phase is Phase.WRITING:
            return Step(Act.WAIT)
        if self.phase is Phase.FENCING:
            return self._while_fencing(lane, steady_ms)
        if self.phase is Phase.READY:
            if ahead is not None:
                return Step(Act.WAIT)
            self.phase = Phase.ENDING
        return Step(Act.END)

    def _keeps_seat(self, seat: Seat | None) -> bool:
        return seat is not None and seat.member_id == self._member_id

    def _while_idle(self, lane: LaneView, steady_ms: int) -> Step:
        seat = lane.seat
        if seat is None:
            return Step(Act.WAIT)
        wanted = frozenset(lane.waiting)
        if not wanted:
            if not lane.has_news:
                return Step(Act.WAIT)
            due_ms = self.ended_at_ms + self.position_interval_ms
            if steady_ms < due_ms and not lane.is_urgent:
                return Step(Act.WAIT, due_ms)
        self.phase = Phase.OPEN
        self.opened_at_ms = steady_ms
        self._idle_since_ms = None
        self._member_id = seat.member_id
        self._refused_generation = -1
        self.size = 0
        return Step(Act.ADD_PARTITIONS, partitions=wanted | lane.own_partitions)

    def _while_open(self, lane: LaneView, steady_ms: int, ahead: Phase | None) -> Step | None:
        wanted = frozenset(lane.waiting)
        missing = (wanted | lane.own_partitions) - self._added
        if missing:
            return Step(Act.ADD_PARTITIONS, partitions=missing)
        if not self._has_group:
            return Step(Act.ADD_GROUP)
        seal_at_ms = self.opened_at_ms + MAX_AGE_MS
        if steady_ms >= seal_at_ms:
            self._seal(steady_ms)
            return None
        if ahead not in (None, Phase.ENDING) and not lane.is_urgent:
            # It could not be committed soon, so what comes meanwhile is carried with it.
            return Step(Act.WAIT, seal_at_ms)
        if (not lane.more_is_coming and (self.size or not wanted)) or (lane.is_urgent and not wanted):
            self._seal(steady_ms)
            return None
        if wanted:
            self._idle_since_ms = None
            return Step(Act.WAIT, seal_at_ms)
        if self._idle_since_ms is None:
            self._idle_since_ms = steady_ms
        if steady_ms >= self._idle_since_ms + LINGER_MS:
            self._seal(steady_ms)
            return None
        return Step(Act.WAIT, min(seal_at_ms, self._idle_since_ms + LINGER_MS))

    def _while_sealed(self, lane: LaneView, steady_ms: int, ahead: Phase | None) -> Step | None:
        if missing := lane.own_partitions - self._added:
            return Step(Act.ADD_PARTITIONS, partitions=missing)  # a source partition joined after the seal
        if not self._has_group:
            return Step(Act.ADD_GROUP)
        if ahead is Phase.WRITING and lane.is_settled:
            return Step(Act.WAIT)
        if lane.is_settled and lane.is_exact:
            took_ms = steady_ms - self._sealed_at_ms
            if took_ms > SLOW_MS:
                self.allowance = max(MIN_SIZE, self.allowance // 2)
            elif took_ms < QUICK_MS and self.size * 2 >= self.allowance:
                self.allowance = min(MAX_SIZE, self.allowance * 2)
            self.phase = Phase.WRITING
            return Step(Act.WRITE_POSITIONS)
        self._completes = lane.is_settled and bool(lane.waiting)
        age_ms = steady_ms - self.opened_at_ms
        if age_ms >= GIVE_UP_AFTER_MS:
            self.allowance = max(MIN_SIZE, self.allowance // 4)
            blamed = lane.failing() | lane.holding_up()
            what = "the event of a gap" if lane.is_settled else "what was sent"
            self.doom(f"the target does not acknowledge {what}", blamed)
            return None
        if age_ms < FAILING_AFTER_MS:
            return Step(Act.WAIT, self.opened_at_ms + FAILING_AFTER_MS)
        failing = lane.failing()
        if failing and not failing >= self._added - lane.own_partitions:
            self.doom("batches of some partitions do not get through", failing)
            return None
        return Step(Act.WAIT, min(steady_ms + FAILING_AFTER_MS // 4, self.opened_at_ms + GIVE_UP_AFTER_MS))

    def _while_fencing(self, lane: LaneView, steady_ms: int) -> Step:
        seat = lane.seat
        if seat is not None and seat.generation > self._refused_generation:
            return Step(Act.FENCE, seat=seat)
        if steady_ms >= self.opened_at_ms + TRANSACTION_TIMEOUT_MS:
            self.doom("the group has moved on without this worker")
            return Step(Act.REWIND)
        return Step(Act.WAIT, steady_ms + GENERATION_WAIT_MS)

    # --- what came of it -------------------------------------------------------------------------

    def producer_began(self) -> None:
        """BEGIN_PRODUCER succeeded: the last transaction is decided, whichever way."""
        self.phase = Phase.UNREAD if self._in_doubt else Phase.IDLE
        self._in_doubt = False

    def producer_refused(self, steady_ms: int, pause_ms: int) -> None:
        """BEGIN_PRODUCER failed."""
        self._not_before_ms = steady_ms + pause_ms

    def rewound(self) -> None:
        """REWIND is done. What was blamed is alone; sequences were forgotten with the rows."""
        if self.phase is Phase.IDLE:
            self.phase = Phase.NO_PRODUCER
        self.must_rewind = False
        self.blamed = frozenset()

    def positions_read(self) -> None:
        """READ_POSITIONS is done, every partition of the lane stands where they say."""
        if self.phase is Phase.UNREAD:
            self.phase = Phase.IDLE

    def partitions_added(self, partitions: Collection[TargetPartition]) -> None:
        if self.phase in (Phase.OPEN, Phase.SEALED):
            self._added |= frozenset(partitions)

    def group_added(self) -> None:
        if self.phase in (Phase.OPEN, Phase.SEALED):
            self._has_group = True

    def positions_written(self) -> None:
        """WRITE_POSITIONS is done: acknowledged by the target."""
        if self.phase is Phase.WRITING:
            self.phase = Phase.FENCING

    def fence_passed(self) -> None:
        """FENCE is done. As soon as it may, EndTxn goes out."""
        if self.phase is Phase.FENCING:
            self.phase = Phase.READY

    def drag(self) -> None:
        """The transaction before it is not committed, or not known to be: what this one holds must not be
        either, and its sequences are forgotten with the rows."""
        if self.holds_records:
            self.doom(DRAGGED)
        elif self.phase is Phase.IDLE:
            self.phase = Phase.NO_PRODUCER

    def take_lost(self) -> bool:
        """Whether a transaction was lost since this was asked last."""
        is_lost, self._is_lost = self._is_lost, False
        return is_lost

    def fence_refused(self, generation: int) -> None:
        """The group's coordinator is in another generation than the one that was named."""
        self._refused_generation = max(self._refused_generation, generation)

    def committed(self, steady_ms: int, *, is_certain: bool = True) -> None:
        """END was answered: the transaction is committed. Not certain: an earlier request for it was never
        answered, may still arrive, and would commit half of the next transaction of this epoch."""
        self.committed_count += 1
        self.ended_at_ms = steady_ms
        self._close(Phase.IDLE if is_certain else Phase.NO_PRODUCER)

    def outcome_unknown(self, reason: str) -> None:
        """END was refused: committed by an earlier request of ours, or aborted by somebody else."""
        self.doomed_by = reason
        self.aborted_count += 1
        self._in_doubt = self._is_lost = True
        self._close(Phase.NO_PRODUCER)

    def fenced(self, steady_ms: int, reason: str) -> None:
        """Somebody else holds the transactional id, or the coordinator gave the transaction up. If the seat
        is lost too, word of it is on its way: no hurry to take the id back."""
        self.doom(reason)
        self._not_before_ms = steady_ms + FENCED_PAUSE_MS

    def _seal(self, steady_ms: int) -> None:
        self.phase = Phase.SEALED
        self._sealed_at_ms = steady_ms

    def _close(self, phase: Phase) -> None:
        self.phase = phase
        self._added = frozenset()
        self._has_group = self._completes = False
