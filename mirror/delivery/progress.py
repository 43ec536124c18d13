"""The commit rules of one source partition: which position may be written down. Pure.

Called by `pipeline`, one `PartitionProgress` for each assignment of a source partition to this worker (and a
new one after each aborted transaction). A fetched stretch of offsets is a *span* `[first, next)`; it stands
for zero or more *pieces* that have to be acknowledged by the target: zero for control batches and aborted
data, one for a batch, several only where a `between` hook made several batches of one.

    fetched ──pieces──> open ──all acknowledged──> settled ──all before it settled──> settled_position moves
                          └──failed──> blocked (policy stop), or settled once its gap is recorded (skip)

Two positions: `settled_position`, the end of the settled prefix, is what may be written next; `position` is
what readers of the target can rely on. In a transactional lane they differ until the transaction that holds
the records and the position is committed; otherwise they are the same.

Invariants (checked by the simulation):
- spans follow each other without a hole: what was fetched is settled, or the position waits before it;
- the settled prefix never passes a piece that the target has not acknowledged, nor a gap that has not been
  recorded;
- it only grows, and a value handed out by `position_to_write` was true when it was handed out;
- `is_exact` says that the settled prefix holds *all* that was acknowledged: only then may a transaction with
  those records be committed together with the position, otherwise the rest would be sent again;
- after `close` nothing moves: a late acknowledgement of a lost assignment changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.mirror.sources.epochs import EpochHistory


class BrokenCommitRule(RuntimeError):
    """The shell around the rules did something that could lose a record. Ends the process."""


@dataclass(slots=True, eq=False)
class Span:
    """A stretch of source offsets on its way to the target."""

    first_offset: int
    next_offset: int
    outstanding: int
    size: int
    last_leader_epoch: int
    unrecorded_gaps: int = 0
    acknowledged: int = 0


class PartitionProgress:
    """What one assignment of one source partition has fetched, delivered and may write down."""

    def __init__(
        self, position: int, leader_epoch: int = -1, *, epoch_from: int = -1, transactional: bool = False
    ) -> None:
        """`position`, its `leader_epoch` and `epoch_from` are what the positions topic says."""
        self.is_transactional = transactional
        self._spans: deque[Span] = deque()
        self._position = position
        self._committed = position
        self._committed_epoch = leader_epoch
        self._position_epoch = leader_epoch
        self._written = position
        self.epochs = EpochHistory(leader_epoch, epoch_from if 0 <= epoch_from <= position else position)
        # Read at each turn of fetching; they change here alone.
        self.fetch_offset = position
        self.fetched_leader_epoch = leader_epoch
        """Of the last fetched batch: proof for the source that our log is its log."""
        self.outstanding_size = 0
        """Bytes of the spans that are not settled."""
        self.unrecorded_gaps = 0
        """Of failed pieces. While there is one, fetching further would only pile up behind it."""
        self._closed = False

    @property
    def position(self) -> int:
        """The next source offset that readers of the target do not see yet: what is behind it is committed,
        or (without transactions) acknowledged."""
        return self._committed if self.is_transactional else self._position

    @property
    def settled_position(self) -> int:
        """The next source offset that the target has not acknowledged."""
        return self._position

    @property
    def position_leader_epoch(self) -> int:
        """The leader epoch of the last batch before `settled_position` (-1 unknown)."""
        return self._position_epoch

    @property
    def committed(self) -> tuple[int, int]:
        """The position last written for good, and the leader epoch that was written with it."""
        return self._committed, self._committed_epoch

    @property
    def is_exact(self) -> bool:
        """Whether nothing is acknowledged beyond the settled prefix."""
        return not any(span.acknowledged for span in self._spans)

    @property
    def is_drained(self) -> bool:
        """Nothing that was fetched still waits for an acknowledgement (failed pieces never will)."""
        return all(span.outstanding == 0 for span in self._spans)

    @property
    def is_blocked(self) -> bool:
        return self.unrecorded_gaps > 0

    def fetched(self, next_offset: int, pieces: int, size: int = 0, leader_epoch: int = -1) -> Span:
        """Takes the stretch from the fetch offset up to `next_offset` under way."""
        if self._closed or self.unrecorded_gaps:
            raise BrokenCommitRule("a partition that was closed or stopped at a gap must not fetch on")
        if next_offset <= self.fetch_offset:
            raise BrokenCommitRule(f"offset {next_offset} is not after {self.fetch_offset}")
        span = Span(self.fetch_offset, next_offset, pieces, size, leader_epoch)
        self._spans.append(span)
        self.fetch_offset = next_offset
        if leader_epoch > self.fetched_leader_epoch:
            self.fetched_leader_epoch = leader_epoch
            self.epochs.fetched(leader_epoch, span.first_offset)
        self.outstanding_size += size
        if not pieces:
            self._advance()
        return span

    def acknowledged(self, span: Span) -> None:
        """One piece of `span` is in the target's log."""
        if self._closed:
            return
        if span.outstanding <= 0:
            raise BrokenCommitRule("a piece was acknowledged twice")
        span.outstanding -= 1
        span.acknowledged += 1
        self._advance()

    def split(self, span: Span, next_offsets: Sequence[int]) -> list[Span]:
        """One piece of `span` was replaced by smaller ones, which end before `next_offsets`; the span of
        each. A span of one piece is cut, so that the position can stand between them; where a span has
        several pieces, nobody knows which offsets are whose, and it stays one."""
        if self._closed:
            return [span] * len(next_offsets)
        if span.outstanding != 1 or span.acknowledged or span.unrecorded_gaps:
            span.outstanding += len(next_offsets) - 1
            return [span] * len(next_offsets)
        ends = [*next_offsets[:-1], span.next_offset]
        place = self._spans.index(span)
        part_size = span.size // len(ends)
        parts: list[Span] = []
        first = span.first_offset
        for end in ends:
            parts.append(Span(first, end, 1, part_size, span.last_leader_epoch))
            first = end
        parts[-1].size += span.size - part_size * len(ends)
        del self._spans[place]
        for shift, part in enumerate(parts):
            self._spans.insert(place + shift, part)
        return parts

    def failed(self, span: Span) -> None:
        """One piece of `span` can never be delivered: the position waits before it (`skip` lets it pass)."""
        if self._closed:
            return
        if span.outstanding <= 0:
            raise BrokenCommitRule("a piece failed after it was acknowledged")
        span.outstanding -= 1
        span.unrecorded_gaps += 1
        self.unrecorded_gaps += 1

    def gap_recorded(self, span: Span) -> None:
        """The gap that `span` leaves is durable and the policy says skip: the position may pass it."""
        if self._closed:
            return
        if span.unrecorded_gaps <= 0:
            raise BrokenCommitRule("a gap was recorded for a span that did not fail")
        span.unrecorded_gaps -= 1
        self.unrecorded_gaps -= 1
        self._advance()

    def taken_back(self, span: Span) -> None:
        """One piece of `span` was never sent and never will be: `cut` follows, at the first such piece."""
        if not self._closed:
            span.outstanding -= 1

    def tried_again(self, span: Span) -> None:
        """The gap of `span` is not final: `cut` follows, at the gap."""
        if not self._closed:
            self.unrecorded_gaps -= span.unrecorded_gaps
            span.unrecorded_gaps = 0

    def cut(self, offset: int) -> None:
        """Forgets what was fetched from `offset` on, so that it is fetched again. A span that `offset` lies
        in keeps its part before it. Late answers for what was forgotten change nothing."""
        if self._closed:
            return
        if not self._position <= offset <= self.fetch_offset:
            raise BrokenCommitRule(f"cannot cut at {offset}, outside {self._position}..{self.fetch_offset}")
        spans = self._spans
        while spans and spans[-1].first_offset >= offset:
            span = spans.pop()
            self.outstanding_size -= span.size
            self.unrecorded_gaps -= span.unrecorded_gaps
        if spans:
            spans[-1].next_offset = min(spans[-1].next_offset, offset)
        self.fetch_offset = offset
        epochs = [span.last_leader_epoch for span in spans if span.last_leader_epoch >= 0]
        self.fetched_leader_epoch = epochs[-1] if epochs else self._position_epoch
        self.epochs.cut(offset)
        self._advance()

    def jump(self, offset: int, leader_epoch: int = -1) -> None:
        """Continues at `offset` after a recorded gap that no fetched batch stands for (expired, truncated,
        re-created). May go backwards: a re-created log starts again at its own beginning."""
        if self._spans:
            raise BrokenCommitRule("a partition jumps only when all that it fetched is settled")
        self._position = self.fetch_offset = offset
        self._position_epoch = self.fetched_leader_epoch = leader_epoch
        self.epochs = EpochHistory(leader_epoch, offset)
        self._written = -1

    def position_to_write(self) -> int | None:
        """The position, when it differs from the last one written."""
        if self._closed or self._position == self._written:
            return None
        return self._position

    def write_again(self) -> None:
        """What is on record with the position is no longer all that is to be said with it."""
        self._written = -1

    def written(self, position: int, leader_epoch: int = -1) -> None:
        """`position` is on record for good: the next owner will go on there."""
        self._written = self._committed = position
        self._committed_epoch = leader_epoch

    def close(self) -> None:
        self._closed = True
        self._spans.clear()
        self.outstanding_size = 0

    def _advance(self) -> None:
        spans = self._spans
        while spans and not (spans[0].outstanding or spans[0].unrecorded_gaps):
            span = spans.popleft()
            self._position = span.next_offset
            if span.last_leader_epoch >= 0:
                self._position_epoch = span.last_leader_epoch
            self.outstanding_size -= span.size
