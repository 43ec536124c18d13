"""What a partition does not believe of what it was given, and what it asks next. Pure.

Held by `pipeline`, one for each fetch offset. The rule:

    an answer is not taken      →  what was asked for is asked for again, with growing pauses; the third
                                   time the log is looked at
    the source says that what   →  the same, but the log is looked at only when it has said so for a while:
    it has there is damaged        there is nothing to see but its word
    a batch for which nothing   →  the log is looked at, at once
    in its answer speaks
    what stands beside that     →  it is looked at again; what could not be read three times, and for a while,
    one cannot be read             is passed over, and the next that can counts

Any other error is no word of the log and makes no doubt: Apache Kafka answers UNKNOWN_SERVER_ERROR where its
remote store is away, which may last, and its own consumer asks again (`FetchCollector`), as `source` does.

A look (`survey`) is bound to its offset and to this doubt, and nothing is fetched until it ends: with damage,
which becomes a gap; with a batch that is in order, and that very one is taken when it is fetched again; or
with nothing, which is a refused answer like any other. Whatever is refused again and again has a `reason`,
which becomes the partition's trouble.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from millrace.broker.errors import CorruptMessage, KafkaError
from millrace.mirror.batches.coalesce import BeyondTheEnd, OutOfOrder, Unvouched
from millrace.mirror.batches.placement import Buffer, Suspect, holds

# The wire may have been at fault: what is refused is fetched this often before the log is looked at.
MAX_REFUSALS = 3
# Looks at the log that find nothing wrong with what is refused all the same; then it is damage.
MAX_TIMES_IN_ORDER = 2
MAX_PAUSE_MS = 5_000
PAUSE_MS = 100
# What a source only says to be damaged, or does not give, it must have said so often and for so long, too:
# a leader that moves or a store that is away for a moment is no damage.
TOLD_DAMAGE_LASTS_MS = 10_000


class ToldDamage(CorruptMessage):
    """The source's own word (CORRUPT_MESSAGE), in place of a batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What a look at the log has to find out; equal to none but itself, so no late answer is taken for
    another's.

    `suspect`: a whole batch, of which to find out whether it stands where it claims to; without one, where
    the next good batch from `offset` on begins. `needed_size`: an answer of so many bytes may tell (0: not
    known). `is_out_of_order`: offsets there contradict each other. `is_last`: looks found nothing wrong, and
    it is refused still. `taken_from`: the base offset of what was taken last and ends at `offset` (-1: not
    known). `may_pass_over`: what stands beside the suspect could not be read by the looks before
    this one, for as long as counts.
    """

    offset: int
    reason: str
    suspect: Suspect | None = None
    needed_size: int = 0
    is_out_of_order: bool = False
    is_last: bool = False
    taken_from: int = -1
    may_pass_over: bool = False


class Found(NamedTuple):
    """What a look tells: `damage_end`, the offset of the first good batch behind damage (-1: no damage);
    `is_in_order`, of the batch with that `mark` (none: nothing stands there); or neither, and why
    (`is_neighbour_unreadable`: what stands beside the suspect is not given).
    `needed_size`: with so many bytes an answer shows it too (0: any). `misplaced_up_to`: a batch that cannot
    be believed stands before a good one and claims to reach up to that offset, so the source may give it
    first until then (-1: none does)."""

    damage_end: int = -1
    is_in_order: bool = False
    mark: bytes = b""
    why_not: str = ""
    is_neighbour_unreadable: bool = False
    needed_size: int = 0
    misplaced_up_to: int = -1


@dataclass(slots=True)
class Doubt:
    """Of what stands at one fetch offset, so the first batch that is taken ends it.

    `reason`: why it is not taken, for people. `needed_size`: the next answer has to hold at least as much (0:
    whatever comes). `question`: to be answered before anything is fetched. `trusted`: the mark of the batch
    that a look found in order.
    """

    offset: int
    reason: str = ""
    needed_size: int = 0
    is_out_of_order: bool = False
    question: Question | None = None
    trusted: bytes = b""
    was_beyond_the_end: bool = False
    refusal_count: int = 0
    refused_since_ms: int = 0  # by the steady clock
    unreadable_count: int = 0  # looks in a row
    unreadable_since_ms: int = 0  # by the steady clock
    in_order_count: int = 0
    taken_from: int = -1

    @property
    def pause_ms(self) -> int:
        """How long to wait before the next fetch."""
        return min(MAX_PAUSE_MS, PAUSE_MS * self.refusal_count)

    def trusts(self, answer: Buffer) -> bool:
        """Whether the answer has the batch that a look found in order; another one may not be."""
        return bool(self.trusted) and holds(answer, self.trusted)

    def refused(self, error: KafkaError, steady_ms: int) -> None:
        """An answer was not taken, for this reason."""
        if self.refusal_count == 0:
            self.refused_since_ms = steady_ms
        if isinstance(error, Unvouched):
            if self.in_order_count:  # what was found in order does not come
                self.refusal_count += 1
                self.reason = str(error)
            self._ask(str(error), steady_ms, error)
            return
        if isinstance(error, BeyondTheEnd) and not self.was_beyond_the_end:
            # A source reads its end before the batches, and both may have grown in between.
            self.was_beyond_the_end = True
            return
        self.is_out_of_order |= isinstance(error, OutOfOrder)
        self.refusal_count += 1
        self.reason = str(error)
        if isinstance(error, ToldDamage):
            is_enough = _has_lasted(self.refusal_count, self.refused_since_ms, steady_ms)
        else:
            is_enough = self.refusal_count >= MAX_REFUSALS
        if is_enough:
            self._ask(self.reason, steady_ms)

    def answered(self, found: Found, steady_ms: int) -> None:
        """The look has ended that was asked for."""
        question, self.question = self.question, None
        if found.is_in_order:
            self.trusted = found.mark
            self.needed_size = found.needed_size
            self.in_order_count += 1
        elif found.damage_end < 0 and question is not None:
            if self.unreadable_count == 0:
                self.unreadable_since_ms = steady_ms
            self.unreadable_count = self.unreadable_count + 1 if found.is_neighbour_unreadable else 0
            self.refusal_count += 1
            self.reason = f"{question.reason}, and to look at it fails: {found.why_not}"

    def _ask(self, reason: str, steady_ms: int, of: Unvouched | None = None) -> None:
        self.question = Question(
            self.offset,
            reason,
            of.suspect if of else None,
            of.needed_size if of else 0,
            self.is_out_of_order,
            self.is_out_of_order and self.in_order_count >= MAX_TIMES_IN_ORDER,
            self.taken_from,
            _has_lasted(self.unreadable_count, self.unreadable_since_ms, steady_ms),
        )


def _has_lasted(count: int, since_ms: int, steady_ms: int) -> bool:
    return count >= MAX_REFUSALS and steady_ms - since_ms >= TOLD_DAMAGE_LASTS_MS
