"""Where a group's offsets are to be set: the rule behind `millrace groups reset`, as in Kafka's own tool.

Pure: `Target` is what was asked for, `new_offset` decides for one partition. No offset is ever set outside
what the partition holds, between its first and its end offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class TargetKind(Enum):
    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIMESTAMP = "timestamp"
    SHIFT = "shift"


@dataclass(frozen=True, slots=True)
class Target:
    """`value` is the offset, the time in ms since 1970, or by how many records to shift (negative: back)."""

    kind: TargetKind
    value: int = 0


class NewOffset(NamedTuple):
    """`offset` None leaves the partition as it is; `note` says what is out of the ordinary."""

    offset: int | None
    note: str = ""


def new_offset(
    target: Target, *, first: int, end: int, committed: int | None, at_time: int | None = None
) -> NewOffset:
    """`at_time` is the first offset at or after the target's time, None where there is none so young."""
    match target.kind:
        case TargetKind.EARLIEST:
            return NewOffset(first)
        case TargetKind.LATEST:
            return NewOffset(end)
        case TargetKind.TIMESTAMP:
            if at_time is None:
                return NewOffset(end, "no record is as young: the end")
            return NewOffset(at_time)
        case TargetKind.SHIFT:
            if committed is None:
                return NewOffset(None, "nothing is committed that could be shifted")
            wanted = committed + target.value
        case TargetKind.OFFSET:
            wanted = target.value
    if wanted < first:
        return NewOffset(first, f"{wanted} is before the first offset")
    if wanted > end:
        return NewOffset(end, f"{wanted} is after the end")
    return NewOffset(wanted)
