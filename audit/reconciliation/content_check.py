"""Comparison of contents: the same records must hold the same bytes at every tier. Pure.

Called by `reconcile`. Digests are sums over a window's records, so two tiers can be compared only where both
hold the same records, each as often; beyond that only where a digest is of one record alone, because its cell
holds nothing else (keys that are hashed over partitions). The definition of a record's digest is in
`content_digest`.

What must stay true: where contents are audited (`asked`), a window is proven only if every tier that has it
was compared with its upstream. What could not be compared is named with its reason, and UNKNOWN at best; of
a producer that only counts, whose counts agree, it is named: COUNT_MATCH claims nothing of contents. Where
nobody asked, presence is proven all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pyroaring import BitMap64

from millrace.audit.contract.content_digest import DIGEST_MASK, digest_sum
from millrace.audit.contract.events import CountEvent
from millrace.audit.contract.sequence_set import to_ranges
from millrace.audit.reconciliation.stream_case import StreamCase, WindowFindings, union
from millrace.audit.reconciliation.verdicts import COMPARED, DIFFERS, NOT_COMPARED, PRODUCED, Verdict
from millrace.audit.scanning.cells import SeenSet
from millrace.audit.scanning.repeats import Repeats

MAX_COPIES_LOOKED_AT = 10_000
"""Of so many sequences of a window that came again, the copies are compared one by one."""

NO_REPORT = "no report tells of this window"
NOT_TOLD = "its producer told no digests"
NOT_READ = "it was read, or told, without digests"
FATE_UNKNOWN = "it has records of unknown fate, of which no digest was told"
OTHER_RECORDS = "they do not hold the same records"
MIXED = "some of its records have numbers and some have none"
COPIES = "it has copies, and a sum does not tell what each of them holds"


@dataclass(frozen=True, slots=True)
class _Digested:
    """Records and the sum of their digests, None for a reason (`why`). `count` is with copies; `copies`
    {sequence: the digests of those that are known one by one}."""

    why: str = ""
    digest: int | None = None
    sequences: BitMap64 = field(default_factory=BitMap64)
    count: int = 0
    repeats: Repeats = field(default_factory=Repeats)
    copies: Mapping[int, list[int]] = field(default_factory=dict)

    def each_copy_of(self, sequence: int) -> int | None:
        """What every copy of it here holds, where that is known of all and the same; else None."""
        known = self.copies.get(sequence, [])
        if len(known) != 1 + self.repeats.of_sequence(sequence) or len(set(known)) != 1:
            return None
        return known[0]


def check_content(case: StreamCase, rows: dict[int, WindowFindings], *, asked: bool) -> None:
    """Compare every tier with its upstream, window by window; name the hops between which content differs,
    and the sequences whose copies in one tier do."""
    for start_ms, row in rows.items():
        windows = {tier.name: case.seen[tier.name].get(start_ms) for tier in case.tiers}
        held = {name: window for name, window in windows.items() if window is not None and window.count}
        reports = case.reports.get(start_ms, [])
        told_by_reports = any(report.digest is not None for report in reports)
        by_tiers = any(window.digest is not None for window in held.values())
        if not (told_by_reports or by_tiers or (asked and held)):
            continue
        again = _came_again(held.values())
        digested = {PRODUCED: _of_reports(reports, case.stream.sequenced)}
        digested.update({name: _of_window(held.get(name), case.stream.sequenced, again) for name in windows})
        _compare(case, row, digested, held, asked=asked)


def _compare(
    case: StreamCase,
    row: WindowFindings,
    digested: Mapping[str, _Digested],
    held: Mapping[str, SeenSet],
    *,
    asked: bool,
) -> None:
    not_compared: dict[str, str] = {}
    as_produced, blamed = set(), set()
    for tier in case.tiers:
        if tier.name not in held:
            continue
        here = digested[tier.name]
        if among := [each for each, known in here.copies.items() if len(set(known)) > 1]:
            blamed.add(tier.name)
            row.differing[tier.name] = to_ranges(BitMap64(among))
            row.reasons.add(f"content differs between copies of one record in {tier.name}")
        # What an upstream has lost since is compared with what was produced.
        sums = {
            above: _expected(digested[above], here, ambiguous=_has_ambiguous(case, row, above))
            for above in dict.fromkeys((tier.upstream, PRODUCED))
        }
        known = {above: expected for above, expected in sums.items() if isinstance(expected, int)}
        if here.digest is not None and known.get(PRODUCED) == here.digest:
            as_produced.add(tier.name)
        if not known:
            not_compared[tier.name] = (
                f"contents of tier {tier.name} were not compared with {tier.upstream}: {sums[tier.upstream]}"
            )
        for above, expected in known.items():
            if expected != here.digest and (above == tier.upstream or tier.upstream not in blamed):
                blamed.add(tier.name)
                row.reasons.add(f"content differs between {above} and {tier.name}")
                break
    for name in as_produced:
        for above in _ways_up(case, name):  # what arrived as it was produced came through them
            not_compared.pop(above, None)
    row.content_checked = DIFFERS if blamed else NOT_COMPARED if not_compared else COMPARED
    row.content_lost = row.content_lost or bool(blamed)
    # Whatever else keeps the window from a proof is told; that it was not compared either is no news.
    if asked and not_compared and row.verdict(Verdict.PROVEN) in (Verdict.PROVEN, Verdict.DUPLICATE):
        row.reasons.update(not_compared.values())
        row.undecided = row.undecided or case.stream.sequenced


def _ways_up(case: StreamCase, name: str) -> Iterator[str]:
    """The tiers above one, nearest first."""
    upstream = {tier.name: tier.upstream for tier in case.tiers}
    while (name := upstream[name]) != PRODUCED:
        yield name


def _expected(above: _Digested, here: _Digested, *, ambiguous: bool) -> int | str:
    """The sum that the tier must have if it holds what its upstream holds, or why that is not known."""
    if above.digest is None or here.digest is None:
        return above.why or here.why
    if above.sequences != here.sequences:
        return FATE_UNKNOWN if ambiguous else OTHER_RECORDS
    if not above.sequences and above.count != here.count:
        return FATE_UNKNOWN if ambiguous else OTHER_RECORDS
    expected = above.digest
    for sign, differing in (
        (1, here.repeats.beyond(above.repeats)),
        (-1, above.repeats.beyond(here.repeats)),
    ):
        for sequence, copies in differing.each():
            held = above.each_copy_of(sequence)
            held = here.each_copy_of(sequence) if held is None else held
            if held is None:
                return COPIES
            expected += sign * copies * held
    return expected & DIGEST_MASK


def _has_ambiguous(case: StreamCase, row: WindowFindings, upstream: str) -> bool:
    return upstream == PRODUCED and any(
        report.ambiguous or report.ambiguous_count for report in case.reports.get(row.window_start_ms, ())
    )


def _came_again(windows: Iterable[SeenSet]) -> frozenset[int]:
    """The sequences whose copies are worth a look one by one; none where they are too many."""
    repeats = [window.repeats.sequences for window in windows if window.digest is not None]
    if sum(map(len, repeats)) > MAX_COPIES_LOOKED_AT:
        return frozenset()
    return frozenset().union(*repeats)


def _of_reports(reports: list[CountEvent], sequenced: bool) -> _Digested:
    if not reports:
        return _Digested(why=NO_REPORT)
    digests = [report.digest for report in reports if report.digest is not None]
    if len(digests) != len(reports):
        return _Digested(why=NOT_TOLD)
    sequences = union(report.acknowledged for report in reports) if sequenced else BitMap64()
    return _Digested("", digest_sum(digests), sequences, sum(report.count for report in reports))


def _of_window(window: SeenSet | None, sequenced: bool, again: frozenset[int]) -> _Digested:
    if window is None:  # its upstream has the window, or there would be none
        return _Digested(why=OTHER_RECORDS)
    copies = _known_copies(window, again) if again else {}
    if bool(window.unsequenced_count) if sequenced else bool(window.sequences):
        return _Digested(MIXED, copies=copies)
    if window.loose_copies:
        return _Digested(COPIES, copies=copies)
    if window.digest is None:
        # Members of a group that got a record twice tell no sum: theirs are of first copies.
        return _Digested(COPIES if window.repeats else NOT_READ, copies=copies)
    return _Digested("", window.digest, window.sequences, window.count, window.repeats, copies)


def _known_copies(window: SeenSet, again: frozenset[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for cell in window.cells:
        if cell.count == 1 and cell.digest is not None and not cell.unsequenced_count:
            (sequence,) = cell.sequences()
            if sequence in again:
                found.setdefault(sequence, []).append(cell.digest)
    return found
