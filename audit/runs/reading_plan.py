"""What one run reads of each partition, and what can never be read any more. Pure.

Called by `job` between the capture and the count; `task_plan` then shares the ranges among tasks. The rules:
a partition is read on from where the last run ended, or from where its log is another one since; a source
partition is cut at the mirrors' position, so that no kept cell lies across one; what vanished since the last
run is noted, never passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from millrace.audit.config import AuditConfig
from millrace.audit.contract.events import GapEvent
from millrace.audit.contract.header import MAX_CREATED_MS
from millrace.audit.keeping.state import Commit, ReadPosition, UnreadNote
from millrace.audit.reconciliation.reconcile import ClusterPartition, Gap, Passage
from millrace.audit.reconciliation.tier_reading import NOT_BEGUN
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.log_history import holds_to
from millrace.audit.runs.resuming import note_of, position_at, resume
from millrace.audit.spark.task_plan import OffsetRange


def plan_ranges(
    captured: Capture, config: AuditConfig, before: Commit
) -> tuple[list[OffsetRange], list[UnreadNote]]:
    """What to read of each partition, and what can never be read any more.

    A source partition is cut at the mirrors' position: below it cells are kept, above it they are the tail.
    Both are cut at the bounds of the gaps that mirrors told, and at the position of each of several mirrors.
    """
    bounds: dict[ClusterPartition, list[int]] = {}
    for gap in known_gaps(captured, config):
        bounds.setdefault(gap.place, []).extend((gap.from_offset, gap.to_offset))
    for carried in passages(captured).values():
        for place, passage in carried.items():
            bounds.setdefault(place, []).append(passage.next_offset)
            for hole in passage.holes:
                bounds[place].extend(hole)
    resumed: dict[str, int] = {}
    unread: list[UnreadNote] = []
    for pin in captured.pins:
        resumed[pin.key], lost = resume(pin, before.offsets.get(pin.key), captured.vanished_ms)
        unread.extend(lost)
    for note in [*before.unread, *unread]:
        if note.cause == "truncated":
            place = (note.cluster, note.topic, note.partition)
            bounds.setdefault(place, []).extend((note.first_offset, note.end_offset))
    for began in groups_began(config, captured).values():
        for place, offset in began.items():
            bounds.setdefault(place, []).append(offset)
    positions = _passed_everywhere(captured)
    mirrored = {source for source, _, _ in positions}
    if (aggregates := config.aggregates()) and all(each.mirror == "millrace" for each in aggregates.values()):
        # Its mirror will tell positions: what is kept before it does would lie across gaps for good.
        mirrored |= config.sources().keys()
    topics_told = _topics_told(captured, config)
    ranges: list[OffsetRange] = []
    for pin in captured.pins:
        first = resumed[pin.key]
        place = (pin.cluster, pin.topic, pin.partition)
        if pin.key not in before.offsets and pin.topic_id:
            # A mirror knew another topic of this name, and the audit never saw it.
            others = [at for topic_id, at in topics_told.get(place, {}).items() if topic_id != pin.topic_id]
            if others:
                unread.append(note_of(pin, 0, 0, "recreated", max(others)))
        whole = OffsetRange(
            cluster=pin.cluster,
            tier=pin.cluster,
            topic=pin.topic,
            topic_here=pin.topic_here,
            partition=pin.partition,
            first_offset=first,
            end_offset=pin.end_offset,
            topic_id=pin.topic_id,
            bytes_per_offset=pin.bytes_per_offset,
        )
        position = positions.get((pin.cluster, pin.topic, pin.partition))
        is_source = config.clusters[pin.cluster].tier == "source"
        cut = pin.end_offset
        if is_source and position is not None and position.topic_id in ("", pin.topic_id):
            cut = min(max(position.next_offset, first), pin.end_offset)
        elif is_source and pin.cluster in mirrored:
            cut = first  # its mirror keeps positions, and has none of this partition (topic, cluster) yet
        kept, tail = replace(whole, end_offset=cut), replace(whole, first_offset=cut, tail=True)
        ranges.extend(_cut_at(kept, bounds.get(place, ())))
        if cut < pin.end_offset:
            ranges.extend(_cut_at(tail, bounds.get(place, ())))
    return ranges, unread


def plan_backfill(
    captured: Capture, config: AuditConfig, before: Commit
) -> tuple[list[OffsetRange], list[UnreadNote]]:
    """The same for a run that reads everything from the start, as if there were no state. What stood in logs
    that are gone, it cannot read as the runs before did: their notes on it, and what is gone since, hold."""
    _, now = plan_ranges(captured, config, before)
    gone = [note for note in (*before.unread, *now) if note.cause in ("recreated", "truncated")]
    ranges, unread = plan_ranges(captured, config, Commit(unread=gone))
    # Without the state every topic looks as if seen for the first time; which ones are, is said above.
    return ranges, [*gone, *(note for note in unread if note.cause != "recreated")]


def _topics_told(captured: Capture, config: AuditConfig) -> dict[ClusterPartition, dict[str, int]]:
    """The topics that mirrors knew at each place, by their ids, and a time by which each was gone if it is
    not the one that is there: now, for the one that a position is in; when the mirror saw the next one, where
    it told a gap. Other gaps do not say when."""
    told: dict[ClusterPartition, dict[str, int]] = {}
    for gap in known_gaps(captured, config):
        if gap.topic_id and gap.cause == "recreated":
            at_ms = min(gap.at_ms, captured.vanished_ms)
            of_place = told.setdefault(gap.place, {})
            of_place[gap.topic_id] = max(at_ms, of_place.get(gap.topic_id, at_ms))
    for each in captured.positions:
        if each.topic_id:
            of_place = told.setdefault((each.source, each.topic, each.partition), {})
            of_place[each.topic_id] = captured.vanished_ms
    return told


def known_gaps(captured: Capture, config: AuditConfig, aggregate: str | None = None) -> list[Gap]:
    """The mirrors' own gap events, by the places of the audited topics; for one aggregate, of the mirrors
    that carry there, as far as that is known. Under the older key of gaps an event may have been replaced by
    that of a newer topic, but not that of a topic that is there now (`Gap.known_ids`)."""
    ids: dict[str, set[str]] = {}
    for gap in captured.ledger.gaps.values():
        ids.setdefault(gap.place_key, set()).add(gap.topic_id)
    now = {(pin.cluster, pin.topic, pin.partition): pin.topic_id for pin in captured.pins}
    named = {
        (name, here): place
        for name, cluster in config.sources().items()
        for topic in config.topics
        for here, place in cluster.places(topic).items()
    }
    gaps = []
    for gap in captured.ledger.gaps.values():
        if aggregate is not None and not _is_into(captured, aggregate, gap):
            continue
        source = captured.source_names.get((gap.mirror, gap.source), gap.source)
        topic = named.get((source, gap.topic))
        if topic is not None:
            place = (source, topic, gap.partition)
            is_replaceable = gap.older_key and gap.topic_id
            known = {"", *ids[gap.place_key], now.get(place, "")} if is_replaceable else None
            gaps.append(
                Gap(
                    place,
                    gap.from_offset,
                    gap.to_offset,
                    gap.cause,
                    gap.topic_id,
                    known,
                    gap.has_open_end,
                    gap.at_ms,
                )
            )
    return gaps


def _is_into(captured: Capture, aggregate: str, gap: GapEvent) -> bool:
    """Whether the gap may be one before this aggregate."""
    here = captured.cluster_ids.get(aggregate, "")
    if gap.target and here and gap.target != here:
        return False
    return aggregate in captured.carriers.get(gap.mirror, {aggregate})


def groups_began(config: AuditConfig, captured: Capture) -> dict[str, dict[ClusterPartition, int]]:
    """{group: {place: offset of the first record that any of its members got}}, as far as they tell."""
    cluster_of = {group.name: name for name, groups in config.groups.items() for group in groups}
    places = {
        (name, here): place
        for name in config.groups
        for topic in config.topics
        for here, place in config.clusters[name].places(topic).items()
    }
    found: dict[str, dict[ClusterPartition, int]] = {group: {} for group in cluster_of}
    for event in captured.ledger.tiers.values():
        cluster = cluster_of.get(event.tier, "")
        topic = places.get((cluster, event.topic))
        if topic is None or event.cluster_id not in ("", captured.cluster_ids.get(cluster, event.cluster_id)):
            continue
        for partition, offset in event.began:
            place = (cluster, topic, partition)
            found[event.tier][place] = min(offset, found[event.tier].get(place, offset))
    return found


def _cut_at(whole: OffsetRange, bounds: Iterable[int]) -> list[OffsetRange]:
    """The range in pieces that end at these offsets, so that no cell lies across one."""
    inside = [bound for bound in bounds if whole.first_offset < bound < whole.end_offset]
    cuts = [whole.first_offset, *sorted(set(inside)), whole.end_offset]
    return [replace(whole, first_offset=first, end_offset=end) for first, end in pairwise(cuts)]


def read_until(
    captured: Capture, ranges: Iterable[OffsetRange], before: Mapping[str, ReadPosition] | None = None
) -> dict[str, ReadPosition]:
    """Where the next run goes on behind these ranges, by the partition's key. The tail is read again."""
    histories = {pin.key: pin.epochs for pin in captured.pins}
    offsets: dict[str, ReadPosition] = {}
    firsts: dict[str, int] = {}
    # A partition may be read in pieces.
    for each in sorted((each for each in ranges if not each.tail), key=lambda each: each.end_offset):
        key = f"{each.cluster}/{each.topic}/{each.partition}"
        known, first = (before or {}).get(key), firsts.setdefault(key, each.first_offset)
        offsets[key] = position_at(histories.get(key, ()), each.end_offset, each.topic_id, known, first)
    return offsets


def hidden_by_transactions(captured: Capture) -> list[UnreadNote]:
    """What lies above the last stable offset: acknowledged, and not to be read while a transaction is open.

    True of this run only; the next one reads on from there.
    """
    return [
        # No bound in time: a producer's clock may be ahead, and what it wrote just now is among it.
        note_of(pin, pin.end_offset, pin.high_watermark, "a transaction is open", MAX_CREATED_MS)
        for pin in captured.pins
        if pin.high_watermark > pin.end_offset
    ]


def _passed_everywhere(captured: Capture) -> dict[ClusterPartition, Passage]:
    """The least position of a source partition over all aggregates: below it, every aggregate has it."""
    by_aggregate = passages(captured)
    everywhere = {place for positions in by_aggregate.values() for place in positions}
    least: dict[ClusterPartition, Passage] = {}
    for positions in by_aggregate.values():
        # A mirror that keeps positions of the cluster, and has none of this partition yet, carried nothing.
        clusters = {cluster for cluster, _, _ in positions}
        least.update({each: Passage(0) for each in everywhere - set(positions) if each[0] in clusters})
    for positions in by_aggregate.values():
        for place, passage in positions.items():
            known = least.get(place)
            if known is None or passage.next_offset < known.next_offset:
                least[place] = passage
    return least


def passages(captured: Capture) -> dict[str, dict[ClusterPartition, Passage]]:
    """What was carried, by aggregate: of each mirror from where it began to its position, of several mirrors
    into one all of these together. What lies between them nobody has passed.

    The position in a topic that was deleted and made anew has passed nothing of the new one; that in a log
    which was shortened since, nothing that was written since.
    """
    return {
        aggregate: {place: _together(each) for place, each in places.items()}
        for aggregate, places in _carried(captured).items()
    }


def never_begun(captured: Capture, aggregate: str) -> list[Gap]:
    """What lies below where the first mirror of a partition began: none of it is on its way."""
    firsts = {
        place: min(carried, key=lambda each: each.first)
        for place, carried in _carried(captured).get(aggregate, {}).items()
    }
    return [
        Gap(place, 0, each.first, NOT_BEGUN, each.topic_id) for place, each in firsts.items() if each.first
    ]


class _Carried(NamedTuple):
    """Source offsets [first, end) that one mirror has carried, in the topic of this id."""

    first: int
    end: int
    topic_id: str


def _carried(captured: Capture) -> dict[str, dict[ClusterPartition, list[_Carried]]]:
    ids = {(pin.cluster, pin.topic, pin.partition): pin.topic_id for pin in captured.pins}
    histories = {(pin.cluster, pin.topic, pin.partition): pin.epochs for pin in captured.pins}
    found: dict[str, dict[ClusterPartition, list[_Carried]]] = {}
    for position in captured.positions:
        place = (position.source, position.topic, position.partition)
        topic_id = ids.get(place, "")
        next_offset = holds_to(histories.get(place, ()), position.next_offset, position.leader_epoch)
        carried = _Carried(min(position.began, next_offset), next_offset, position.topic_id)
        if topic_id and position.topic_id and topic_id != position.topic_id:
            carried = _Carried(0, 0, topic_id)
        found.setdefault(position.aggregate, {}).setdefault(place, []).append(carried)
    return found


def _together(carried: Iterable[_Carried]) -> Passage:
    holes: list[tuple[int, int]] = []
    end, topic_id = -1, ""
    for each in sorted(carried):
        if each.first > max(end, 0):
            holes.append((max(end, 0), each.first))
        if each.end > end:
            end, topic_id = each.end, each.topic_id
    return Passage(end, topic_id, tuple(holes))
