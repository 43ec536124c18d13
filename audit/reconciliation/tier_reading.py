"""What is known of a tier beside its records: how far its mirror or group came, gaps, parts not read. Pure.

Built by the job (from the capture) and by tests, read by `reconcile`. A tier is a cluster, several source
clusters taken as one, or an online consumer group (`group:<name>`), whose records are told by its events.

**What the job must supply, so that a missing record is a loss and not lag.** In this order:

1. read the offsets that online groups have committed, where groups are audited;
2. read the events of all clusters to their ends;
3. pin the end offsets of the source tier (a record acknowledged in the events lies below them);
4. read the mirror's positions (everything below a position was acknowledged by the aggregate);
5. pin the end offsets of the aggregate tier; then scan both tiers up to their pins.

Then a sequence that was acknowledged and is not in the source tier is lost between `produced` and source, and
one that is in the source tier below the position and not in the aggregate is lost between these two. A group
tells what it saw before it commits, so what it committed before its events were read and has not told, it has
not seen.

A record's exact offset is not kept: its cell bounds it. `TierReading.passed` gives the positions (of steps 1
and 4) of the *upstream* partitions; a cell whose `last_offset` is below the position was passed in whole; one
that begins at or after it is in flight in whole; one that lies across is not decidable, and in flight until
it is. Therefore chunks should be cut at the positions known when they are scanned (then at most the chunk
where a mirror lagged in an earlier run lies across, and only until the position leaves it), and at the bounds
of gaps. Replacing a cell by finer ones from a second read is always allowed. A position at the log's end
decides everything.

For a mirror that keeps no positions, `passage_by_arrivals` derives them from later records that were seen
downstream.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pyroaring import BitMap64

from millrace.audit.reconciliation.verdicts import PRODUCED, Hop
from millrace.audit.scanning.cells import Cell

NOT_BEGUN = "not begun"
"""The cause of what lies before the place at which a partition's first mirror began; no gap event has it."""

ClusterPartition = tuple[str, str, int]
"""(cluster, topic, partition), as in `Cell.place`"""


@dataclass(frozen=True, slots=True)
class Passage:
    """How far an upstream partition had been carried into a tier: every offset below `next_offset`, but for
    the `holes` [from, to) that none of its mirrors has passed (one that began at the log's end).

    `topic_id` is the upstream topic's id when that was said ("" = not known). Cells of another id belong to a
    deleted topic of the same name; nothing of it can arrive any more.
    """

    next_offset: int
    topic_id: str = ""
    holes: tuple[tuple[int, int], ...] = ()

    def covers(self, cell: Cell) -> bool:
        """Whether nothing of the cell can arrive any more."""
        if cell.topic_id and self.topic_id and cell.topic_id != self.topic_id:
            return True
        if any(first <= cell.last_offset and cell.first_offset < end for first, end in self.holes):
            return False
        return cell.last_offset < self.next_offset


@dataclass(frozen=True, slots=True)
class Gap:
    """Upstream offsets [from_offset, to_offset) that were never carried; `cause` is the gap event's class.

    `topic_id` is that of the topic in which they are ("" = not told: of whichever topic had the name). The
    events of topics of one name have one key, in its older form, when they begin at one offset, so that the
    newest may have taken the place of an older topic's: of which topics that cannot be, `known_ids` says
    (None: of none, the event took no other's place).

    `has_open_end`: the log is gone, and nobody knows how far it went beyond `to_offset`. What was in the same
    topic behind that was not carried either; another topic of the name says nothing, and has those offsets.
    `at_ms`: when the mirror told it.
    """

    place: ClusterPartition
    from_offset: int
    to_offset: int
    cause: str
    topic_id: str = ""
    known_ids: Collection[str] | None = None
    has_open_end: bool = False
    at_ms: int = 0

    def touches(self, cell: Cell) -> bool:
        if self.place != cell.place or self.from_offset > cell.last_offset:
            return False
        if self._is_of(cell):
            return self._goes_on_over(cell) or cell.first_offset < self.to_offset
        return self.known_ids is not None and cell.topic_id not in self.known_ids

    def holds(self, cell: Cell) -> bool:
        """Whether every record of the cell lies in the gap."""
        return (
            self.place == cell.place
            and self._is_of(cell)
            and self.from_offset <= cell.first_offset
            and (self._goes_on_over(cell) or cell.last_offset < self.to_offset)
        )

    def _goes_on_over(self, cell: Cell) -> bool:
        """Whether the cell is in the very log whose end nobody knows."""
        return self.has_open_end and self.topic_id != "" and cell.topic_id == self.topic_id

    def _is_of(self, cell: Cell) -> bool:
        return not self.topic_id or cell.topic_id in ("", self.topic_id)


@dataclass(frozen=True, slots=True)
class UnreadRange:
    """Offsets of the tier itself that the audit could not read, and why: retention, truncation, unreachable.

    `until_ms`: everything in it was appended before this time (None: no bound is known). A stream that opened
    later has no record in it. `cut_off`: what it held and no tier below has is lost, and was not read by
    anybody who still may pass it on. `by_window`: nor has a stream that opened before, in windows
    that began later, as long as the creation times are those of its clock.
    """

    place: ClusterPartition
    from_offset: int
    to_offset: int
    cause: str
    until_ms: int | None = None
    cut_off: bool = False
    by_window: bool = False


@dataclass(frozen=True, slots=True)
class TierReading:
    """What is known of a tier for one topic beside its cells; `passed` and `gaps` are of upstream offsets.

    `idle` says why nothing may ever come into the tier; "" where something has. `began` are the upstream
    offsets from which on a group got everything.
    """

    name: str
    upstream: str = PRODUCED
    passed: Mapping[ClusterPartition, Passage] = field(default_factory=dict)
    gaps: Sequence[Gap] = ()
    unread: Sequence[UnreadRange] = ()
    idle: str = ""
    began: Mapping[ClusterPartition, int] = field(default_factory=dict)

    @property
    def hop(self) -> Hop:
        return (self.upstream, self.name)

    def has_passed(self, cell: Cell) -> bool:
        """Whether everything of this upstream cell that could come here has come."""
        passage = self.passed.get(cell.place)
        return cell.has_place and passage is not None and passage.covers(cell)

    def answers_for(self, cell: Cell) -> bool:
        """Whether all of this upstream cell came after the group had begun with the partition as it is."""
        first, passage = self.began.get(cell.place), self.passed.get(cell.place)
        if first is None or passage is None:
            return False
        return cell.first_offset >= first and passage.topic_id in ("", cell.topic_id)

    def gap_over(self, cell: Cell) -> Gap | None:
        """A gap that touches the upstream cell; one that holds it whole is preferred."""
        touching = [gap for gap in self.gaps if gap.touches(cell)]
        return max(touching, key=lambda gap: gap.holds(cell), default=None)


def check_order(tiers: Sequence[TierReading]) -> None:
    """Raise ValueError unless every tier comes once, after its upstream."""
    above = {PRODUCED}
    for tier in tiers:
        if tier.upstream not in above or tier.name in above:
            raise ValueError(f"tier {tier.name} must come once, after its upstream tier {tier.upstream}")
        above.add(tier.name)


Arrivals = Mapping[tuple[str, int], BitMap64]
"""{(stream, window_start_ms): sequences seen downstream}"""


def arrivals_of(cells: Iterable[Cell]) -> Arrivals:
    """What the cells hold."""
    arrived: dict[tuple[str, int], BitMap64] = {}
    for cell in cells:
        window = (cell.stream, cell.window_start_ms)
        arrived[window] = arrived.get(window, BitMap64()) | cell.sequences()
    return arrived


def passage_by_arrivals(upstream_cells: Iterable[Cell], arrived: Arrivals) -> dict[ClusterPartition, Passage]:
    """Positions of a mirror that keeps none: below which offsets a later record of the partition was seen.

    What arrived with the same number in another window is another record, whose identity was changed on the
    way: it proves nothing. Sound only for a mirror that keeps the order within a partition. A cell proves its
    `last_offset` when all of its sequences arrived, else its `first_offset`. What stands at several offsets
    proves nothing: any of its copies may be the one that arrived, and one may stand in a united cell, which
    proves nothing itself. A partition of two topics of one name (ids) has no passage: their offsets cannot be
    compared.
    """
    passages: dict[ClusterPartition, Passage] = {}
    upstream_cells = list(upstream_cells)
    ids: dict[ClusterPartition, set[str]] = {}
    for cell in upstream_cells:
        ids.setdefault(cell.place, set()).add(cell.topic_id)
    upstream_cells = [cell for cell in upstream_cells if not cell.has_place or len(ids[cell.place]) == 1]
    copied = _in_several_cells(upstream_cells)
    for cell in upstream_cells:
        sequences = cell.sequences() - copied.get(cell.stream, BitMap64())
        downstream = arrived.get((cell.stream, cell.window_start_ms)) if cell.has_place else None
        if not sequences or downstream is None or sequences.isdisjoint(downstream):
            continue
        whole = cell.count == len(sequences) and sequences.issubset(downstream)
        next_offset = cell.last_offset + 1 if whole else cell.first_offset
        known = passages.get(cell.place)
        if known is None or next_offset > known.next_offset:
            passages[cell.place] = Passage(next_offset, cell.topic_id)
    return passages


def _in_several_cells(cells: Iterable[Cell]) -> dict[str, BitMap64]:
    """{stream: sequences that more than one cell holds}."""
    held: dict[str, BitMap64] = {}
    copied: dict[str, BitMap64] = {}
    for cell in cells:
        sequences, before = cell.sequences(), held.setdefault(cell.stream, BitMap64())
        if not before.isdisjoint(sequences):
            copied[cell.stream] = copied.get(cell.stream, BitMap64()) | (before & sequences)
        before |= sequences
    return copied
