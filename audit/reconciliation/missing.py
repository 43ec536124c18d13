"""What became of a record that one tier had and the next one has not. Pure.

Called by `reconcile` for numbered streams: lost, in flight, explained by a gap, or unknown. The offsets of
the upstream tier's cells decide, by what `TierReading` knows of its mirror or group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pyroaring import BitMap64

from millrace.audit.contract.sequence_set import to_ranges
from millrace.audit.reconciliation.online_tiers import BEGAN
from millrace.audit.reconciliation.stream_case import StreamCase, WindowFindings, union
from millrace.audit.reconciliation.tier_reading import TierReading
from millrace.audit.reconciliation.verdicts import PRODUCED


@dataclass(slots=True)
class _Fate:
    """Missing sequences by what became of them; each in one set."""

    lost: BitMap64
    in_flight: BitMap64 = field(default_factory=BitMap64)
    explained: dict[str, BitMap64] = field(default_factory=dict)
    unknown: BitMap64 = field(default_factory=BitMap64)
    answered_for: BitMap64 = field(default_factory=BitMap64)  # whenever the group's first report was


def file_missing(case: StreamCase, rows: dict[int, WindowFindings]) -> None:
    """Find what each tier lacks of what its upstream had, and say for every sequence why."""
    for tier in case.tiers:
        missing = case.expected(tier) - case.arrived[tier.name] - case.accounted
        if not missing:
            continue
        fate = _Fate(missing) if tier.upstream == PRODUCED else _fate_by_offsets(case, tier, missing)
        for start_ms, row in rows.items():
            members = case.members(start_ms) & missing
            if members:
                _file_fate(row, tier, fate, members, case.unread_causes(tier, start_ms, cut_off=False))


def _file_fate(
    row: WindowFindings, tier: TierReading, fate: _Fate, members: BitMap64, causes: list[str]
) -> None:
    lost, in_flight = members & fate.lost, members & fate.in_flight
    unsure = BitMap64() if not causes else lost - fate.answered_for if causes == [BEGAN] else lost
    if unsure:
        row.unknown |= unsure
        row.reasons.update(f"part of tier {tier.name} could not be read: {cause}" for cause in causes)
        lost -= unsure
    if lost:
        row.missing[tier.hop] = to_ranges(lost)
    if in_flight:
        row.in_flight[tier.hop] = to_ranges(in_flight)
        if tier.idle:
            row.reasons.add(tier.idle)
    for cause, sequences in fate.explained.items():
        if not members.isdisjoint(sequences):
            row.explained[cause] = row.explained.get(cause, BitMap64()) | (members & sequences)
    unknown = members & fate.unknown
    if unknown:
        row.unknown |= unknown
        row.reasons.add(f"a gap or an unknown offset before tier {tier.name}")


def _fate_by_offsets(case: StreamCase, tier: TierReading, missing: BitMap64) -> _Fate:
    """Where the upstream tier's cells put the missing sequences, relative to positions and gaps.

    A record that stands at several upstream offsets (a duplicate) is lost only when no copy can still come
    and at least one copy has no explanation.
    """
    passed, in_flight, unsure, answered_for = BitMap64(), BitMap64(), BitMap64(), BitMap64()
    explained: dict[str, BitMap64] = {}
    for window in case.seen[tier.upstream].values():
        if window.sequences.isdisjoint(missing):
            continue
        for cell in window.cells:
            members = cell.sequences() & missing
            if not members:
                continue
            if not cell.has_place:  # united when nothing was missing: of a tier that came later nobody knows
                unsure |= members
                continue
            if tier.answers_for(cell):
                answered_for |= members
            gap = tier.gap_over(cell)
            if gap is not None and gap.holds(cell):
                explained[gap.cause] = explained.get(gap.cause, BitMap64()) | members
            elif not tier.has_passed(cell):
                in_flight |= members
            elif gap is not None:
                unsure |= members
            else:
                passed |= members
    unsure -= in_flight
    lost = passed - in_flight - unsure
    placed = lost | in_flight | unsure
    explained = {cause: sequences - placed for cause, sequences in explained.items()}
    without_place = missing - placed - union(explained.values())
    explained = {cause: sequences for cause, sequences in explained.items() if sequences}
    return _Fate(lost, in_flight, explained, unsure | without_place, answered_for)
