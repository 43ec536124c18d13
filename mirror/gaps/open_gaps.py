"""The gaps that one assignment of a source partition has met and not passed. Pure.

Held by `pipeline`, which stops at them or lets them pass. They stand in the order of their offsets: those
that lie in a fetched stretch, then at most one at the fetch offset, behind everything that was fetched.

A gap is forgotten when what it lies in is forgotten (an aborted transaction, another try): it will be met
again, and recorded under the same key. What an operator let pass is remembered, so nobody is asked twice, but
not where fetching goes back over it or on in another log: other records have its offsets then.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position
from millrace.mirror.delivery.progress import Span
from millrace.mirror.gaps.gaps import Gap


@dataclass(frozen=True, slots=True)
class Origin:
    """Which log the offsets belong to."""

    cluster_id: str
    topic_id: UUID = NO_TOPIC_ID

    @classmethod
    def of(cls, position: Position) -> Origin:
        return cls(position.cluster_id, position.topic_id)


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a partition goes on behind a gap; `origin` when that is in another log."""

    offset: int
    leader_epoch: int = -1
    origin: Origin | None = None


@dataclass(slots=True, eq=False)
class OpenGap:
    """One gap: in a fetched stretch (`span`), or at the fetch offset (`resume` says where to go on)."""

    gap: Gap
    span: Span | None = None
    resume: Resume | None = None
    stops: bool = False


class OpenGaps:
    """See the module's text."""

    def __init__(self) -> None:
        self._open: list[OpenGap] = []
        self._let_pass: list[Gap] = []
        self._went_back_by: Gap | None = None

    def __contains__(self, open_gap: OpenGap) -> bool:
        return open_gap in self._open

    @property
    def first(self) -> OpenGap | None:
        return self._open[0] if self._open else None

    @property
    def stopping(self) -> OpenGap | None:
        """The first that an operator has to decide about."""
        return next((each for each in self._open if each.stops), None)

    @property
    def at_fetch_offset(self) -> OpenGap | None:
        return self._open[-1] if self._open and self._open[-1].span is None else None

    def add(self, met: OpenGap) -> None:
        # A refusal of what was sent before may be heard of after a gap behind it was met.
        self._open.append(met)
        self._open.sort(key=lambda each: (each.span is None, each.gap.from_offset))

    def remove(self, passed: OpenGap) -> None:
        self._open.remove(passed)

    def forget_from(self, offset: int) -> None:
        """What lies from `offset` on is fetched again, and its gaps are met again: their spans are gone, and
        the gap at the fetch offset must not be passed from before it."""
        self._open = [each for each in self._open if each.span is not None and each.gap.from_offset < offset]

    def let_pass(self, stopping: OpenGap) -> None:
        """An operator said so."""
        stopping.stops = False
        self._let_pass.append(stopping.gap)

    def went_back(self, offset: int, by: OpenGap) -> None:
        """Behind `by` fetching goes on at `offset`, where other records stand now (0: in another log). Until
        that is on record `by` itself may be met again."""
        self._let_pass = [each for each in self._let_pass if each.to_offset <= offset or _tells(each, by.gap)]
        self._went_back_by = by.gap

    def on_record(self) -> None:
        """A position is, of after `went_back`: whatever looks like that gap is another one."""
        if (by := self._went_back_by) is not None:
            self._let_pass = [each for each in self._let_pass if not _tells(each, by)]
            self._went_back_by = None

    def was_let_pass(self, gap: Gap) -> bool:
        """Whether `gap` lies within one of its class and topic that an operator let pass."""
        return any(_tells(told, gap) for told in self._let_pass)


def _tells(told: Gap, gap: Gap) -> bool:
    """Whether what was said of `told` holds for `gap`."""
    return (
        (gap.gap_class, gap.topic_id) == (told.gap_class, told.topic_id)
        and told.from_offset <= gap.from_offset
        and gap.to_offset <= told.to_offset
    )
