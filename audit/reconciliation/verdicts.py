"""Verdicts: what the audit says of one stream in one window, and how verdicts fold into one. Pure values.

Built by `reconcile`, read by the job, the report, `watermark` and the exit status.

`Verdict` is the one table of what there is to say: report, metrics, console and exit statuses are made of its
rows. Ranking, worst first: LOSS, DUPLICATE, UNKNOWN, COUNT_MATCH, PROVEN. Everything that is neither a named
loss, a named duplicate nor a proof is UNKNOWN; the row's sets say which kind it is: in flight, unreported,
explained by a gap, or not knowable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

Ranges = tuple[tuple[int, int], ...]
"""Sequences as inclusive (first, last) ranges, ascending and apart."""

Hop = tuple[str, str]
"""(the last tier that had a record, the first tier without it)"""

PRODUCED = "produced"
"""The name of the tier before all clusters: what producers reported as acknowledged."""

FELL_SILENT = "the producer fell silent: what it sent after its last report is not known"
"""A reason in a stream's own row."""

COMPARED, NOT_COMPARED, DIFFERS = "compared", "not compared", "differs"
"""What became of the comparison of contents in a window; empty where nobody asked for it."""


class Verdict(IntEnum):
    """A row each: rank (worst is greatest, so that `max` folds verdicts), title, what is said of one record
    or window, what of several windows, the colour's name in the page, and the exit status."""

    PROVEN = 0, "Proven", "proven", "proven", "proven", 0
    COUNT_MATCH = 1, "The counts agree", "counts agree", "matched by count", "proven", 0
    UNKNOWN = 2, "Not proven yet", "unknown", "unknown", "unknown", 2
    DUPLICATE = 3, "Records arrived twice", "twice", "with duplicates", "duplicate", 1
    LOSS = 4, "Records were lost", "lost", "with losses", "loss", 1

    title: str
    told: str
    told_of_many: str
    tone: str
    exit_status: int

    def __new__(
        cls, rank: int, title: str, told: str, told_of_many: str, tone: str, exit_status: int
    ) -> Verdict:
        row = int.__new__(cls, rank)
        row._value_ = rank
        row.title, row.told, row.told_of_many = title, told, told_of_many
        row.tone, row.exit_status = tone, exit_status
        return row

    def __str__(self) -> str:
        return self.name

    @property
    def is_good(self) -> bool:
        """Whether nothing needs attention."""
        return self.exit_status == 0


class WindowState(StrEnum):
    """OPEN: more may come. SETTLED: grace is over, and the stream promised, closed or outlived its lease; or
    its verdict is no proof. A proof waits for a promise, a doubt does not: not every producer promises."""

    OPEN = "OPEN"
    SETTLED = "SETTLED"


OPEN = str(WindowState.OPEN)
OPEN_TOLD, OPEN_TONE = "still open", "open"
"""What is said of windows that have no verdict yet."""

VERDICTS = tuple(str(verdict) for verdict in sorted(Verdict))
"""The words, best first."""

GOOD = tuple(word for word in VERDICTS if Verdict[word].is_good)

STATES = (*(word for word in reversed(VERDICTS) if word not in GOOD), OPEN, *reversed(GOOD))
"""What a window can look like, worst first: the verdicts, and OPEN before those that need no attention."""

COUNTS = ("published", "missing", "duplicates", "in_flight", "unreported", "unknown", "explained")
"""What a row, or the line that is left of it, has a number of records for."""


def range_count(ranges: Ranges) -> int:
    """How many sequences the ranges hold."""
    return sum(last - first + 1 for first, last in ranges)


@dataclass(frozen=True, slots=True)
class WindowVerdict:
    """One row of the reconciliation.

    `window_start_ms` None is the stream's own row: sequences that no report and no tier places in a window
    (a lost report, a lost tail). `published` is the producer's acknowledged count; `consumed` counts
    records per tier, repeats included, as a plain counting audit would; `seen` counts distinct records per
    tier.

    `missing` names lost sequences by the hop that lost them, each in one hop only. `duplicates` names
    sequences by the first tier where (more) extra copies appear, `extra_copies` how many copies those are.
    `in_flight` may still arrive. `unreported` were seen but no report tells of them. `explained` are
    missing by a known cause (class of gap). `unknown` cannot be known; `reasons` say why. For count-only
    streams `missing_count`/`extra_copies` hold what the sets cannot name. `not_before_ms`, in a stream's
    own row: windows that end by then are not in doubt. `silent_from_ms`, there: when a producer that fell
    silent was last heard of, which tells one silence from another, whatever else is in doubt.

    `promised`: no more is to come, as its producer has said or because it is over. `content_checked` is empty
    where no tier and no report told a digest, else COMPARED (every hop into a tier that has records held the
    same content), NOT_COMPARED (some hop could not be compared: repeats, other sets, a producer without
    digests; no proof where contents are audited) or DIFFERS (the verdict is LOSS). `differing` names by tier
    the sequences of which it holds copies that are not alike. `shared` (first start in ms, last, count): so
    many windows of the stream in this stretch have numbers in common, this one among them, and the evidence
    of none of them says anything without the others.
    `revision` numbers the settled verdicts of a window, from 1; 0 while nobody has numbered them.
    """

    topic: str
    producer: str
    stream: str
    window_start_ms: int | None
    window_ms: int
    state: WindowState
    verdict: Verdict
    published: int = 0
    ambiguous: int = 0
    consumed: Mapping[str, int] = field(default_factory=dict)
    seen: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[Hop, Ranges] = field(default_factory=dict)
    duplicates: Mapping[str, Ranges] = field(default_factory=dict)
    extra_copies: Mapping[str, int] = field(default_factory=dict)
    in_flight: Mapping[Hop, Ranges] = field(default_factory=dict)
    unreported: Ranges = ()
    unknown: Ranges = ()
    explained: Mapping[str, Ranges] = field(default_factory=dict)
    missing_count: Mapping[Hop, int] = field(default_factory=dict)
    not_before_ms: int | None = None
    reasons: tuple[str, ...] = ()
    content_checked: str = ""
    differing: Mapping[str, Ranges] = field(default_factory=dict)
    revision: int = 0
    shared: tuple[int, int, int] | None = None
    promised: bool = True
    silent_from_ms: int | None = None


@dataclass(slots=True)
class Fold:
    """How the verdicts of many rows become one, wherever they do: for the report, each topic and producer in
    it, and the exit status."""

    worst: Verdict = Verdict.PROVEN
    settled: int = 0

    def add(self, verdict: Verdict, state: str, rows: int = 1) -> None:
        """So many rows of one verdict; `state` is a WindowState or its text."""
        if state == WindowState.SETTLED:
            self.settled += rows
        elif verdict < Verdict.DUPLICATE:
            return
        self.worst = max(self.worst, verdict)

    def join(self, other: Fold) -> None:
        """Add the rows of another."""
        self.settled += other.settled
        self.worst = max(self.worst, other.worst)

    def verdict(self, untrusted: bool = False) -> Verdict:
        """The worst of the settled rows, and of losses and duplicates wherever they are.

        No settled row at all is UNKNOWN: nothing arrived and nobody reported is the loudest alarm, not a
        proof. Nor is anything a proof beside something that could not be trusted.
        """
        return max(self.worst, Verdict.UNKNOWN) if untrusted or not self.settled else self.worst


def status_of(verdict: Verdict) -> int:
    """The exit status: 0 proven or matched by count, 1 loss or duplicate, 2 unknown."""
    return verdict.exit_status
