"""What the events that are left say of a stream, and what a row should say: values of `audit_oracle`."""

from __future__ import annotations

from dataclasses import dataclass, field

from millrace.audit.contract.event_values import CountEvent


@dataclass
class Told:
    """What the events that are left say of a stream."""

    stream: str
    state: str = ""
    at_ms: int = 0
    opened_ms: int | None = None
    promise_ms: int | None = None
    last_assigned: int = 0
    last_settled: int = 0
    clusters: set[str] = field(default_factory=set)
    reports: dict[int, CountEvent] = field(default_factory=dict)

    @property
    def counted_only(self) -> bool:
        return bool(self.reports) and not any(report.sequenced for report in self.reports.values())

    def sets(self, name: str) -> set[int]:
        return {s for report in self.reports.values() for s in getattr(report, name)}


@dataclass
class Expected:
    """One window's row as it should be."""

    verdict: str = "PROVEN"
    settled: bool = False
    """by what its producer told"""
    over: bool = False
    """its end and the grace: from then on what is not proven counts"""
    lost: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    in_flight: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    explained: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    unreported: set[int] = field(default_factory=set)
    doubled: dict[str, set[int]] = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)
    lost_count: dict[tuple[str, str], int] = field(default_factory=dict)
    undecided: bool = False
    differs: bool = False
    content_open: bool = False
    """some came again: whether their copies can be compared depends on their cells"""
    contents_vary: bool = False
    answered_for: set[int] = field(default_factory=set)
    """lost by a group that had begun with their partition; unknown where their cell lies across that"""
    published: int = 0
    ambiguous: int = 0
    consumed: dict[str, int] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    """missing, and whether they are called lost, in flight, explained or unknown depends on their cell"""
    open_copies: dict[str, set[int]] = field(default_factory=dict)
    """by tier: in several windows there; how many copies are filed where is not laid down"""
    approximate: bool = False
    """of records that are only counted, the same as `open`"""
    softened: bool = False
    """compared, but for what a group's cells leave open"""
    silent: bool = False
    not_before_ms: int | None = None
    """in a stream's own row: windows that end by then are not in doubt"""
    silent_from_ms: int | None = None
    """when the producer that fell silent was last heard of"""
    proven: str = "PROVEN"

    def decide(self, proven: str) -> None:
        self.verdict = self.proven = proven
        if any(self.lost.values()) or self.lost_count or self.differs:
            self.verdict = "LOSS"
        elif self.extra:
            self.verdict = "DUPLICATE"
        elif (
            any(self.in_flight.values())
            or self.explained
            or self.unknown
            or self.unreported
            or self.undecided
        ):
            self.verdict = "UNKNOWN"

    @property
    def state(self) -> str:
        doubtful = self.verdict not in ("PROVEN", "COUNT_MATCH")
        return "SETTLED" if self.settled or (self.over and doubtful) else "OPEN"
