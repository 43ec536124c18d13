"""Gaps: stretches of a source partition that could not be carried, and what the policy makes of them.

Called by `pipeline` and `source` when a stretch cannot be carried, by `control` and `metrics` to show it.
A gap is never silent: its event is written to the audit topic on the target before the position may pass.
The event's fields are read by the audit, which counts what the gap explains.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from millrace.mirror.routes import SourcePartition


class GapClass(StrEnum):
    """Why a stretch could not be carried. The values are those of the event's `class`."""

    EXPIRED = "expired"  # retention deleted it before it was fetched
    RECREATED = "recreated"  # the topic is another one of the same name
    TRUNCATED = "truncated"  # the source's log became shorter than what was already fetched
    TOO_LARGE = "too_large"  # a record larger than the target takes
    REFUSED = "refused"  # the target will not have it as it is
    CORRUPT = "corrupt"  # the checksum or the layout is wrong, also after fetching again
    POSITION_LOST = "position_lost"  # it was mirrored before, but its position is gone


class GapPolicy(StrEnum):
    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets `[from_offset, to_offset)` of one source partition. `reason` is for people."""

    partition: SourcePartition
    from_offset: int
    to_offset: int
    gap_class: GapClass
    reason: str
    at_ms: int

    def describe(self) -> str:
        return (
            f"{self.partition}: offsets {self.from_offset}..{self.to_offset - 1} cannot be carried "
            f"({self.gap_class.value}: {self.reason})"
        )


def gap_event(mirror: str, gap: Gap) -> tuple[bytes, bytes]:
    """Key and value of the gap's event in the audit topic. The same gap has the same key after a restart,
    so a partition that stops again at it adds nothing."""
    where = gap.partition
    key = f"gap/{mirror}/{where.source}/{where.topic}/{where.partition}/{gap.from_offset}"
    value = {
        "version": 1,
        "type": "gap",
        "mirror": mirror,
        "source": where.source,
        "topic": where.topic,
        "partition": where.partition,
        "from": gap.from_offset,
        "to": gap.to_offset,
        "class": gap.gap_class.value,
        "at_ms": gap.at_ms,
    }
    return key.encode(), json.dumps(value, separators=(",", ":")).encode()
