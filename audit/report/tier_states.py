"""What a row of the reconciliation says of one tier: one word and the counts behind it. Pure.

A row's verdict is of the whole way; each tier is painted with its own: a loss shows in the first tier without
the records, what is on the way in the tier that it has not reached, and a doubt in the tier that its reason
names. A doubt that names none is every tier's. A row that is not proven has at least one tier that is not.
Called by `summary` (counts for metrics) and `heatmap` (squares).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.audit.reconciliation.verdicts import GOOD, STATES
from millrace.audit.report.reasons import ON_THE_WAY

# Of several windows in one square the worst shows.
RANK = {state: number for number, state in enumerate(STATES)}
# Reasons that go with a loss or a duplicate, and are no doubt of their own.
_FINDINGS = ("content differs between ", "which records came once more in ")


@dataclass(frozen=True, slots=True)
class TierState:
    """One tier of one row."""

    state: str
    missing: int = 0
    duplicates: int = 0


def tier_state(row: Mapping[str, Any], detail: Mapping[str, Any], tier: str) -> TierState:
    """`row` needs `state`, `verdict`, `published`, `consumed`, `seen`; `detail` is its decoded `detail`."""
    if not detail:
        return TierState("OPEN" if row["state"] == "OPEN" else row["verdict"])
    missing = sum(
        last - first + 1
        for lost in detail.get("missing", ())
        if lost["between"][1] == tier
        for first, last in lost["sequences"]
    ) + sum(lost["count"] for lost in detail.get("missing_count", ()) if lost["between"][1] == tier)
    copies = detail.get("extra_copies", {}).get(tier, 0)
    return TierState(_word(row, detail, tier, missing, copies), missing, copies)


def _word(row: Mapping[str, Any], detail: Mapping[str, Any], tier: str, missing: int, copies: int) -> str:
    if missing or (row["verdict"] == "LOSS" and _content_differs(detail, tier)):
        return "LOSS"
    if copies:
        return "DUPLICATE"
    if row["state"] == "OPEN":
        return "OPEN"
    if _is_doubtful(row, detail, tier):
        return "UNKNOWN"
    return "COUNT_MATCH" if _is_counted(row, detail) else "PROVEN"


def _is_doubtful(row: Mapping[str, Any], detail: Mapping[str, Any], tier: str) -> bool:
    if row["verdict"] in GOOD:
        return False
    if _doubts_of(detail, tier):
        return True
    placed = {reason for name, _ in row["consumed"] for reason in _doubts_of(detail, name)}
    reasons = [each for each in detail.get("reasons", ()) if not each.startswith(_FINDINGS)]
    if detail.get("unreported") or any(each not in placed for each in reasons):
        return True  # whose it is, nothing tells
    if detail.get("explained"):
        seen = dict(row["seen"])
        complete = {name for name, count in seen.items() if count >= max(row["published"], *seen.values())}
        return tier not in complete or complete == set(seen)
    return (row["verdict"] == "UNKNOWN" or bool(detail.get("unknown"))) and not placed


def _doubts_of(detail: Mapping[str, Any], tier: str) -> list[str]:
    """The reasons that speak of the tier, and what is on its way to it."""
    group = f"group {tier.partition(':')[2]} " if tier.startswith("group:") else "\0"
    begins = (
        f"part of tier {tier} could ",
        f"contents of tier {tier} were ",
        f"tier {tier} has ",
        f"tier {tier} was ",
        group,
    )
    ends = tuple(f"{words}{tier}" for words in (ON_THE_WAY, "a gap before tier ", "before tier "))
    found = [
        reason for reason in detail.get("reasons", ()) if reason.startswith(begins) or reason.endswith(ends)
    ]
    waiting = any(held["between"][1] == tier for held in detail.get("in_flight", ()))
    return [*found, f"{ON_THE_WAY}{tier}"] if waiting else found


def _is_counted(row: Mapping[str, Any], detail: Mapping[str, Any]) -> bool:
    """Whether the producer does not number its records: then no tier of its is ever more than matched."""
    if row["verdict"] == "COUNT_MATCH" or detail.get("missing_count"):
        return True
    named, reasons = detail.get("duplicates", {}), detail.get("reasons", ())
    if any(reason.startswith((ON_THE_WAY, "part of tier ", "a gap before tier ")) for reason in reasons):
        return not detail.get("unknown")  # where numbers are in doubt, they are told
    return any(
        tier not in named and f"which records came once more in {tier}, nothing tells" not in reasons
        for tier in detail.get("extra_copies", {})
    )


def _content_differs(detail: Mapping[str, Any], tier: str) -> bool:
    """A loss of content has no missing record: its reason names the tier."""
    told = [reason for reason in detail.get("reasons", ()) if reason.startswith("content differs")]
    nothing_missing = not detail.get("missing") and not detail.get("missing_count")
    here = (f" and {tier}", f" one record in {tier}")
    return any(reason.endswith(here) for reason in told) or (nothing_missing and not told)
