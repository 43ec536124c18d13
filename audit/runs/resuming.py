"""Where a run goes on reading a partition, and what it can never read any more. Pure.

Called by `reading_plan` for the audited topics and by `event_reading` for the events topics: the rules of a
log that was shortened, expired or made anew since are the same.
"""

from __future__ import annotations

from dataclasses import replace

from millrace.audit.keeping.state import ReadPosition, UnreadNote
from millrace.audit.runs.log_history import parts_at, until
from millrace.audit.runs.partition_pins import PartitionPin
from millrace.broker.client.leader_epochs import EpochStarts


def resume(pin: PartitionPin, known: ReadPosition | None, now_ms: int) -> tuple[int, list[UnreadNote]]:
    """Where reading goes on, and the offsets that were lost to the audit since it last looked."""
    if known is None:
        if pin.start_offset == 0:
            return 0, []
        return pin.start_offset, [note_of(pin, 0, pin.start_offset, "expired", now_ms)]
    if known.topic_id and pin.topic_id and known.topic_id != pin.topic_id:
        # What the old topic still held is not known: its end is not known either.
        return pin.start_offset, [note_of(pin, known.next_offset, known.next_offset, "recreated", now_ms)]
    parts = parts_at(known.epochs, known.next_offset, pin.epochs, pin.older_ends)
    goes_on = pin.end_offset if parts is None else min(max(parts, pin.start_offset), pin.end_offset)
    if goes_on < known.next_offset:
        note = note_of(pin, goes_on, known.next_offset, "truncated", now_ms)
        lost = [replace(note, epoch=known.epochs[-1][0] if known.epochs else -1)]
        if goes_on == pin.start_offset > 0:
            # The histories may part below what is left, and what stood there in the new one is gone.
            lost.append(note_of(pin, 0, goes_on, "expired", now_ms))
        return goes_on, lost
    if pin.start_offset > known.next_offset:
        return pin.start_offset, [note_of(pin, known.next_offset, pin.start_offset, "expired", now_ms)]
    return known.next_offset, []


def position_at(
    history: EpochStarts, end_offset: int, topic_id: str, known: ReadPosition | None, first_offset: int
) -> ReadPosition:
    """Where the next run goes on; `known` is where the one before had ended, `first_offset` where this one
    went on."""
    epochs = until(history, end_offset) or until(_known_still(known, topic_id, first_offset), end_offset)
    return ReadPosition(end_offset, topic_id, epochs)


def _known_still(known: ReadPosition | None, topic_id: str, first_offset: int) -> EpochStarts:
    """Epochs of what was read before, where a leader does not tell now (it has just begun, or is older than
    the others), or only of later ones. Nothing is known of what follows: -1 is no epoch."""
    if known is None or known.topic_id != topic_id:
        return ()
    epochs = until(known.epochs, first_offset)
    if not epochs or epochs[-1][0] < 0:
        return epochs
    return (*epochs, (-1, min(known.next_offset, first_offset)))


def note_of(pin: PartitionPin, first: int, end: int, cause: str, now_ms: int) -> UnreadNote:
    return UnreadNote(pin.cluster, pin.topic, pin.partition, first, end, cause, now_ms)
