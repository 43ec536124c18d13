"""The commit rules of one source partition: which position may be written down. Pure.

Called by `pipeline`, one `PartitionProgress` for each assignment of a source partition to this worker. A
fetched stretch of offsets is a *span* `[first, next)`; it stands for zero or more *pieces* that have to be
acknowledged by the target (zero for control batches and aborted data, several where a batch was split).

    fetched ──pieces──> open ──all acknowledged──> settled ──all before it settled──> position moves
                          └──failed──> blocked (policy stop), or settled once its gap is recorded (skip)

Invariants (checked by the simulation):
- spans follow each other without a hole: what was fetched is settled, or the position waits before it;
- `position` is the end of the settled prefix: it never passes a piece that the target has not acknowledged,
  nor a gap that has not been recorded;
- `position` only grows, and a value handed out by `position_to_write` was true when it was handed out;
- after `close` nothing moves: a late acknowledgement of a lost assignment changes nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


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

    @property
    def settled(self) -> bool:
        return self.outstanding == 0 and self.unrecorded_gaps == 0


class PartitionProgress:
    """What one assignment of one source partition has fetched, delivered and may write down."""

    def __init__(self, position: int, leader_epoch: int = -1) -> None:
        """`position` is what the positions topic says."""
        self._spans: deque[Span] = deque()
        self._position = position
        self._position_epoch = leader_epoch
        self._written = position
        self._fetch_offset = position
        self._fetched_epoch = leader_epoch
        self._outstanding_size = 0
        self._unrecorded_gaps = 0
        self._closed = False

    @property
    def position(self) -> int:
        """The next source offset whose record the target has not acknowledged."""
        return self._position

    @property
    def position_leader_epoch(self) -> int:
        """The leader epoch of the last batch before `position` (-1 unknown)."""
        return self._position_epoch

    @property
    def fetch_offset(self) -> int:
        return self._fetch_offset

    @property
    def fetched_leader_epoch(self) -> int:
        """The leader epoch of the last fetched batch: proof for the source that our log is its log."""
        return self._fetched_epoch

    @property
    def outstanding_size(self) -> int:
        """Bytes of the spans that are not settled."""
        return self._outstanding_size

    @property
    def is_drained(self) -> bool:
        """Nothing that was fetched still waits for an acknowledgement (failed pieces never will)."""
        return all(span.outstanding == 0 for span in self._spans)

    @property
    def is_blocked(self) -> bool:
        """A piece failed and its gap is not recorded: fetching further would only pile up behind it."""
        return self._unrecorded_gaps > 0

    def fetched(self, next_offset: int, pieces: int, size: int = 0, leader_epoch: int = -1) -> Span:
        """Takes the stretch from the fetch offset up to `next_offset` under way."""
        if self._closed or self._unrecorded_gaps:
            raise BrokenCommitRule("a partition that was closed or stopped at a gap must not fetch on")
        if next_offset <= self._fetch_offset:
            raise BrokenCommitRule(f"offset {next_offset} is not after {self._fetch_offset}")
        span = Span(self._fetch_offset, next_offset, pieces, size, leader_epoch)
        self._spans.append(span)
        self._fetch_offset = next_offset
        if leader_epoch >= 0:
            self._fetched_epoch = leader_epoch
        self._outstanding_size += size
        self._advance()
        return span

    def acknowledged(self, span: Span) -> None:
        """One piece of `span` is in the target's log."""
        if self._closed:
            return
        if span.outstanding <= 0:
            raise BrokenCommitRule("a piece was acknowledged twice")
        span.outstanding -= 1
        self._advance()

    def split(self, span: Span, pieces: int) -> None:
        """One piece of `span` was replaced by `pieces` smaller ones."""
        if not self._closed:
            span.outstanding += pieces - 1

    def failed(self, span: Span) -> None:
        """One piece of `span` can never be delivered: the position waits before it (`skip` lets it pass)."""
        if self._closed:
            return
        if span.outstanding <= 0:
            raise BrokenCommitRule("a piece failed after it was acknowledged")
        span.outstanding -= 1
        span.unrecorded_gaps += 1
        self._unrecorded_gaps += 1

    def gap_recorded(self, span: Span) -> None:
        """The gap that `span` leaves is durable and the policy says skip: the position may pass it."""
        if self._closed:
            return
        if span.unrecorded_gaps <= 0:
            raise BrokenCommitRule("a gap was recorded for a span that did not fail")
        span.unrecorded_gaps -= 1
        self._unrecorded_gaps -= 1
        self._advance()

    def jump(self, offset: int, leader_epoch: int = -1) -> None:
        """Continues at `offset` after a recorded gap that no fetched batch stands for (expired, truncated,
        re-created). May go backwards: a re-created log starts again at its own beginning."""
        if self._spans:
            raise BrokenCommitRule("a partition jumps only when all that it fetched is settled")
        self._position = self._fetch_offset = offset
        self._position_epoch = self._fetched_epoch = leader_epoch
        self._written = -1

    def position_to_write(self) -> int | None:
        """The position, when it differs from the last one written."""
        if self._closed or self._position == self._written:
            return None
        return self._position

    def written(self, position: int) -> None:
        self._written = position

    def close(self) -> None:
        self._closed = True
        self._spans.clear()
        self._outstanding_size = 0

    def _advance(self) -> None:
        spans = self._spans
        while spans and spans[0].settled:
            span = spans.popleft()
            self._position = span.next_offset
            if span.last_leader_epoch >= 0:
                self._position_epoch = span.last_leader_epoch
            self._outstanding_size -= span.size
