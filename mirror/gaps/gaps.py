"""Gaps: stretches of a source partition that could not be carried, and what the policy makes of them.

Called by `pipeline` and `source` when a stretch cannot be carried, by `control` and `metrics` to show it.
A gap is never silent: its event is written to the audit topic on the target before the position may pass.
The event's fields are read by the audit, which counts what the gap explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from millrace.broker.errors import CorruptMessage, KafkaError, RecordListTooLarge, RecordTooLarge
from millrace.broker.protocol.gap_events import GapEvent, encode_gap
from millrace.mirror.topics.routes import SourcePartition


class GapClass(StrEnum):
    """Why a stretch could not be carried. The values are those of the event's `class`."""

    EXPIRED = "expired"  # retention deleted it before it was fetched
    RECREATED = "recreated"  # the topic is another one of the same name
    TRUNCATED = "truncated"  # the source's log became shorter than what was already fetched
    TOO_LARGE = "too_large"  # a record larger than the target takes
    REFUSED = "refused"  # the target will not have it as it is
    UNPACKED_TOO_LARGE = "unpacked_too_large"  # its records take more room, unpacked, than is given to any
    CORRUPT = "corrupt"  # the checksum or the layout is wrong, also after fetching again, or the records are
    POSITION_LOST = "position_lost"  # it was mirrored before, but its position is gone


def class_of_refusal(error: KafkaError) -> GapClass:
    """Of a batch that cannot be divided any more, by what the target said of it."""
    if isinstance(error, RecordTooLarge | RecordListTooLarge):
        return GapClass.TOO_LARGE
    return GapClass.CORRUPT if isinstance(error, CorruptMessage) else GapClass.REFUSED


class GapPolicy(StrEnum):
    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets `[from_offset, to_offset)` of one source partition. `reason` is for people; `topic_id` is that
    of the topic they are in, "" where the source has none.

    Of a log that is gone (`has_open_end`) `to_offset` is the last end that the mirror had seen: records that
    were written after that look, and before the log went, are not carried either."""

    partition: SourcePartition
    from_offset: int
    to_offset: int
    gap_class: GapClass
    reason: str
    at_ms: int
    topic_id: str = ""

    @property
    def has_open_end(self) -> bool:
        """Whether more than is known of may have stood behind `to_offset`."""
        return self.gap_class is GapClass.RECREATED

    @property
    def extent(self) -> str:
        """`offsets 10..19`; of an open end, which may be all that is known, that more may have come."""
        known = f"offsets {self.from_offset}..{self.to_offset - 1}"
        if not self.has_open_end:
            return known
        if self.to_offset <= self.from_offset:
            return f"what came from offset {self.from_offset} on, if anything did,"
        return f"{known} and what came after them, if anything did,"

    def describe(self) -> str:
        """One line, what and why."""
        return f"{self.partition}: {self.extent} cannot be carried ({self.gap_class.value}: {self.reason})"


def gap_event(mirror: str, gap: Gap, target_id: str = "") -> tuple[bytes, bytes]:
    """Key and value of the gap's event in the audit topic of the target, whose cluster id is told ("" where
    it has none): a mirror of the same name into another cluster may have carried what this one could not.

    The same gap has the same key after a restart, so a partition that stops again at it adds nothing.
    """
    where = gap.partition
    event = GapEvent(
        mirror=mirror,
        source=where.source,
        topic=where.topic,
        partition=where.partition,
        from_offset=gap.from_offset,
        to_offset=gap.to_offset,
        cause=gap.gap_class.value,
        at_ms=gap.at_ms,
        topic_id=gap.topic_id,
        target=target_id,
        has_open_end=gap.has_open_end,
    )
    return encode_gap(event)
