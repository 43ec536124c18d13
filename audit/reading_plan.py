"""What one run reads of each partition, and what can never be read any more. Pure.

Called by `job` between the capture and the count; `planning` then shares the ranges among tasks. The rules:
a partition is read on from where the last run ended; a source partition is cut at the mirrors' position, so
that no kept cell lies across one; what vanished since the last run is noted, never passed over.
"""

from __future__ import annotations

from dataclasses import replace

from millrace.audit.capture import Capture, PartitionPin
from millrace.audit.config import AuditConfig
from millrace.audit.planning import OffsetRange
from millrace.audit.reconcile import Passage, Place
from millrace.audit.state import Commit, ReadPosition, UnreadNote


def plan_ranges(
    captured: Capture, config: AuditConfig, before: Commit
) -> tuple[list[OffsetRange], list[UnreadNote]]:
    """What to read of each partition, and what can never be read any more.

    A source partition is cut at the mirrors' position: below it cells are kept, above it they are the tail.
    """
    positions = _passed_everywhere(captured)
    mirrored = {source for source, _, _ in positions}
    ids_told = {
        (each.source, each.topic, each.partition, each.topic_id)
        for each in captured.positions
        if each.topic_id
    }
    ranges: list[OffsetRange] = []
    unread: list[UnreadNote] = []
    for pin in captured.pins:
        first, lost = _resume(pin, before.offsets.get(pin.key), captured.taken_ms)
        unread.extend(lost)
        place = (pin.cluster, pin.topic, pin.partition)
        if pin.key not in before.offsets and any(
            told[:3] == place and pin.topic_id and told[3] != pin.topic_id for told in ids_told
        ):
            # A mirror knew another topic of this name, which the audit never looked at.
            unread.append(_note(pin, 0, 0, "recreated", captured.taken_ms))
        whole = OffsetRange(
            cluster=pin.cluster,
            tier=pin.cluster,
            topic=pin.topic,
            topic_here=pin.topic_here,
            partition=pin.partition,
            first_offset=first,
            end_offset=pin.end_offset,
            topic_id=pin.topic_id,
        )
        position = positions.get((pin.cluster, pin.topic, pin.partition))
        is_source = config.clusters[pin.cluster].tier == "source"
        cut = pin.end_offset
        if is_source and position is not None and position.topic_id in ("", pin.topic_id):
            cut = min(max(position.next_offset, first), pin.end_offset)
        elif is_source and pin.cluster in mirrored:
            cut = first  # its mirror keeps positions, and has none of this partition (or topic) yet
        ranges.append(replace(whole, end_offset=cut))
        if cut < pin.end_offset:
            ranges.append(replace(whole, first_offset=cut, tail=True))
    return ranges, unread


def _resume(pin: PartitionPin, known: ReadPosition | None, now_ms: int) -> tuple[int, list[UnreadNote]]:
    """Where reading goes on, and the offsets that were lost to the audit since it last looked."""
    if known is None:
        if pin.start_offset == 0:
            return 0, []
        return pin.start_offset, [_note(pin, 0, pin.start_offset, "expired", now_ms)]
    if known.topic_id and pin.topic_id and known.topic_id != pin.topic_id:
        # What the old topic still held is not known: its end is not known either.
        return pin.start_offset, [_note(pin, known.next_offset, known.next_offset, "recreated", now_ms)]
    if pin.end_offset < known.next_offset:
        return pin.end_offset, [_note(pin, pin.end_offset, known.next_offset, "truncated", now_ms)]
    if pin.start_offset > known.next_offset:
        return pin.start_offset, [_note(pin, known.next_offset, pin.start_offset, "expired", now_ms)]
    return known.next_offset, []


def _note(pin: PartitionPin, first: int, end: int, cause: str, now_ms: int) -> UnreadNote:
    return UnreadNote(pin.cluster, pin.topic, pin.partition, first, end, cause, now_ms)


def hidden_by_transactions(captured: Capture) -> list[UnreadNote]:
    """What lies above the last stable offset: acknowledged, and not to be read while a transaction is open.

    True of this run only; the next one reads on from there.
    """
    return [
        _note(pin, pin.end_offset, pin.high_watermark, "a transaction is open", captured.taken_ms)
        for pin in captured.pins
        if pin.high_watermark > pin.end_offset
    ]


def _passed_everywhere(captured: Capture) -> dict[Place, Passage]:
    """The least position of a source partition over all aggregates: below it, every aggregate has it."""
    by_aggregate = passages(captured)
    least: dict[Place, Passage] = {}
    for positions in by_aggregate.values():
        for place, passage in positions.items():
            known = least.get(place)
            if known is None or passage.next_offset < known.next_offset:
                least[place] = passage
    return least


def passages(captured: Capture) -> dict[str, dict[Place, Passage]]:
    """Positions by aggregate; of several mirrors into one, the furthest tells how much was carried.

    The position in a topic that was deleted and made anew has passed nothing of the new one.
    """
    ids = {(pin.cluster, pin.topic, pin.partition): pin.topic_id for pin in captured.pins}
    found: dict[str, dict[Place, Passage]] = {}
    for position in captured.positions:
        place = (position.source, position.topic, position.partition)
        carried = found.setdefault(position.aggregate, {})
        known, topic_id = carried.get(place), ids.get(place, "")
        passage = Passage(position.next_offset, position.topic_id)
        if topic_id and position.topic_id and topic_id != position.topic_id:
            passage = Passage(0, topic_id)
        if known is None or passage.next_offset > known.next_offset:
            carried[place] = passage
    return found
