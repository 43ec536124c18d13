"""What reconciliation needs beside cells and facts, put together from a capture and the state. Pure.

Called by `job`. A `Reconciler` (`verdict_rows`) travels to Spark's workers with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.config import AuditConfig, audited_topic
from millrace.audit.contract.events import StreamFacts
from millrace.audit.contract.group_counts import group_doubts
from millrace.audit.contract.header import MAX_CREATED_MS
from millrace.audit.keeping.state import UnreadNote
from millrace.audit.reconciliation.online_tiers import OnlineGroup, online_groups
from millrace.audit.reconciliation.reconcile import ClusterPartition, Gap, Passage, UnreadRange
from millrace.audit.reconciliation.roster import roster_rows
from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.spans import NO_SPANS
from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler
from millrace.audit.reconciliation.verdicts import WindowState, WindowVerdict
from millrace.audit.runs.capture import Capture, MirrorPosition
from millrace.audit.runs.fact_rows import PrunedWindows
from millrace.audit.runs.log_history import holds_to
from millrace.audit.runs.reading_plan import (
    groups_began,
    hidden_by_transactions,
    known_gaps,
    never_begun,
    passages,
)
from millrace.broker.client.leader_epochs import EpochStarts


def reconciler_of(
    config: AuditConfig,
    captured: Capture,
    unread: Iterable[UnreadNote],
    now_ms: int,
    arrivals: Mapping[str, Mapping[ClusterPartition, Passage]] | None = None,
    read: Iterable[str] = (),
) -> Reconciler:
    """`unread` are the state's notes and this run's; `arrivals` {aggregate: passages} of foreign mirrors;
    `read` are the keys of all partitions that were read by now."""
    by_cluster: dict[str, list[UnreadRange]] = {}
    unread = [*unread, *hidden_by_transactions(captured), *_gone(captured, read), *_withheld(captured)]
    for each in unread:
        by_cluster.setdefault(each.cluster, []).append(
            UnreadRange(
                (each.cluster, each.topic, each.partition),
                each.first_offset,
                each.end_offset,
                each.cause,
                each.until_ms,
                _is_cut_off(each, config, captured, unread),
                by_window=True,
            )
        )
    passed: dict[str, Mapping[ClusterPartition, Passage]] = {
        name: found
        for name, found in passages(captured).items()
        if config.clusters[name].mirror == "millrace"
    }
    return Reconciler(
        clusters=[
            ClusterReading(
                name=name,
                is_source=cluster.tier == "source",
                topics={here: topic for topic in config.topics for here in cluster.topics_here(topic)},
                unread=by_cluster.get(name, ()),
                names={topic: "\0".join(cluster.topics_here(topic)) for topic in config.topics},
            )
            for name, cluster in config.clusters.items()
        ],
        passed={**passed, **(arrivals or {})},
        gaps={
            name: [
                *gaps_of(config, captured, name),
                *_given_again(name, config, captured, unread),
                *never_begun(captured, name),
            ]
            for name in config.aggregates()
        },
        window_ms=config.window_ms,
        grace_ms=config.grace_ms,
        now_ms=now_ms,
        topics=tuple(config.topics),
        groups=groups_of(config, captured, unread),
        content=config.content,
    )


def roster_of(
    config: AuditConfig,
    captured: Capture,
    rows: Rows,
    pruned: Mapping[str, PrunedWindows],
    now_ms: int,
    resting: pa.Table = NO_SPANS,
) -> list[WindowVerdict]:
    """Rows for the producers that the config names and that are silent, beside the others' `rows`
    (`verdict_rows.VERDICT_SCHEMA`). `resting` are windows that have no rows (SPAN_SCHEMA)."""
    windows = _settled_windows(rows) if config.roster() else {}
    for span in resting.to_pylist() if config.roster() else ():
        starts = range(span["start_ms"], span["end_ms"], span["window_ms"])
        here = windows.setdefault(span["topic"], set())
        here.update((start_ms, start_ms + span["window_ms"]) for start_ms in starts)
    first_reports = {
        stream: left.first_report_ms for stream, left in pruned.items() if left.first_report_ms is not None
    }
    return [
        row
        for topic in config.topics
        for row in roster_rows(
            config.roster(),
            streams_of(config, captured),
            topic,
            config.window_ms,
            windows=windows.get(topic, ()),
            pruned_reports=first_reports,
            grace_ms=config.grace_ms,
            now_ms=now_ms,
        )
    ]


def _settled_windows(rows: Rows) -> dict[str, set[tuple[int, int]]]:
    """[start, end) of each topic's settled windows; one that a wrong clock put into the future is open."""
    names = ["topic", "window_start_ms", "window_ms"]
    windows: dict[str, set[tuple[int, int]]] = {}
    for part in parts_of(rows, [*names, "state"]):
        settled = pc.equal(part["state"], str(WindowState.SETTLED))
        of_windows = part.filter(pc.and_(settled, pc.is_valid(part["window_start_ms"])))
        for topic, start_ms, length_ms in _distinct(of_windows, names):
            windows.setdefault(topic, set()).add((start_ms, start_ms + length_ms))
    return windows


def _distinct(rows: pa.Table, names: list[str]) -> Iterator[tuple[Any, ...]]:
    found = rows.select(names).group_by(names).aggregate([])
    return zip(*(found[name].to_pylist() for name in names), strict=True)


def _gone(captured: Capture, read: Iterable[str]) -> list[UnreadNote]:
    """Topics that were read and that their cluster has not any more: what stood in them since is not lost, as
    far as anybody can tell. One that was never seen there excuses nothing: a total loss is the loudest."""
    known = {(cluster, place) for cluster, place, _ in (key.rsplit("/", 2) for key in read)}
    return [
        UnreadNote(
            cluster, place, -1, 0, 0, f"topic {name} is not on cluster {cluster} any more", MAX_CREATED_MS
        )
        for (cluster, place), name in captured.gone.items()
        if (cluster, place) in known
    ]


def _withheld(captured: Capture) -> list[UnreadNote]:
    """Topics that a cluster does not tell of. True of this run only."""
    return [
        UnreadNote(cluster, place, -1, 0, 0, sentence, MAX_CREATED_MS)
        for (cluster, place), sentence in captured.withheld.items()
    ]


def _is_cut_off(
    note: UnreadNote, config: AuditConfig, captured: Capture, unread: Iterable[UnreadNote]
) -> bool:
    """Whether what stood in a truncated source log, and is in no tier below, is surely lost.

    It is not in the log any more, and no retention took it; so it is lost, unless it is still on its way or
    was in a part of the aggregate that could not be read. A mirror that has told a position in what was
    written since has nothing of before on its way: it carries a partition in order. Groups may still tell.
    """
    if note.cause != "truncated" or note.epoch < 0 or note.cluster not in config.sources():
        return False
    if config.groups.get(note.cluster):
        return False
    topic, place = audited_topic(note.topic), (note.cluster, note.topic, note.partition)
    topic_ids = {(pin.cluster, pin.topic, pin.partition): pin.topic_id for pin in captured.pins}
    history = _histories(captured).get(place, ())
    for name, aggregate in config.aggregates().items():
        told = _positions_at(captured, name, place)
        if aggregate.mirror != "millrace" or not told:
            return False
        if not all(_is_later(note, each, history) and _stands_in(history, each) for each in told):
            return False
        if any(position.topic_id != topic_ids.get(place, "") for position in told):
            return False
        if any(each.cluster == name and audited_topic(each.topic) == topic for each in unread):
            return False
    return True


def _is_later(note: UnreadNote, position: MirrorPosition, history: EpochStarts) -> bool:
    """Whether the position is told of what was written since the log was truncated. A newer epoch alone does
    not say so: the log that is gone may have gone on in one that the audit never saw."""
    return 0 <= note.epoch < position.leader_epoch and _has(history, position.leader_epoch)


def _has(history: EpochStarts, epoch: int) -> bool:
    return any(each == epoch for each, _ in history)


def _stands_in(history: EpochStarts, position: MirrorPosition) -> bool:
    return holds_to(history, position.next_offset, position.leader_epoch) == position.next_offset


def _histories(captured: Capture) -> dict[ClusterPartition, EpochStarts]:
    return {(pin.cluster, pin.topic, pin.partition): pin.epochs for pin in captured.pins}


def _given_again(
    aggregate: str, config: AuditConfig, captured: Capture, unread: Iterable[UnreadNote]
) -> list[Gap]:
    """Source offsets that were given out twice, where a position does not tell in which of the two logs it
    is: one from before the truncation has not passed what came after it."""
    histories = _histories(captured)
    notes: dict[ClusterPartition, list[UnreadNote]] = {}
    for note in unread:
        place = (note.cluster, note.topic, note.partition)
        if note.cause == "recreated":
            notes.pop(place, None)  # they are of a topic that is gone, with its offsets and epochs
        elif note.cause == "truncated" and note.cluster in config.sources():
            notes.setdefault(place, []).append(note)
    gaps = []
    for place, note in ((place, note) for place, each in notes.items() for note in each):
        history = histories.get(place, ())
        told = _positions_at(captured, aggregate, place)
        end = max((_unsure_to(note, each, history) for each in told), default=note.end_offset)
        if end > note.first_offset:
            gaps.append(Gap(place, note.first_offset, end, "truncated"))
    return gaps


def _unsure_to(note: UnreadNote, position: MirrorPosition, history: EpochStarts) -> int:
    """Up to where of the note's offsets the position may be one of either log; `passages` tells the rest."""
    if position.next_offset <= note.first_offset:
        return note.first_offset
    if position.leader_epoch < 0 or not history:
        return note.end_offset
    # A log that was shortened and went on in the epoch that it had.
    if _has(history, position.leader_epoch) and not _is_later(note, position, history):
        return min(note.end_offset, holds_to(history, position.next_offset, position.leader_epoch))
    return note.first_offset


def _positions_at(captured: Capture, aggregate: str, place: ClusterPartition) -> list[MirrorPosition]:
    return [
        position
        for position in captured.positions
        if position.aggregate == aggregate and (position.source, position.topic, position.partition) == place
    ]


def groups_of(config: AuditConfig, captured: Capture, unread: Iterable[UnreadNote] = ()) -> list[OnlineGroup]:
    """The audited groups as tiers. A commit in a log that was shortened since has passed nothing that was
    written since (`holds_to`); one without an epoch is not believed beyond where the log was shortened."""
    if not captured.commits:
        return []
    histories = _histories(captured)
    shortened: dict[ClusterPartition, int] = {}
    for note in unread:
        if note.cause == "truncated":
            place = (note.cluster, note.topic, note.partition)
            shortened[place] = min(note.first_offset, shortened.get(place, note.first_offset))
    commits: dict[tuple[str, str], dict[ClusterPartition, int]] = {}
    for key, offsets in captured.commits.items():
        commits[key] = {}
        for place, offset in offsets.items():
            epoch, history = captured.commit_epochs.get(key, {}).get(place, -1), histories.get(place, ())
            if epoch < 0 or not history:
                offset = min(offset, shortened.get(place, offset))
            commits[key][place] = holds_to(history, offset, epoch)
    # Offsets of another log than the one that is there now say nothing of where the group began in it.
    other = {
        (note.cluster, note.topic, note.partition)
        for note in unread
        if note.cause in ("truncated", "recreated")
    }
    began = groups_began(config, captured)
    groups = online_groups(
        commits,
        {(pin.cluster, pin.topic, pin.partition): pin.topic_id for pin in captured.pins},
        captured.ledger.tiers.values(),
        group_doubts(captured.ledger, captured.claims),
        captured.cluster_ids,
        {group.name: group.topics for groups in config.groups.values() for group in groups},
    )
    return [
        replace(group, began={p: at for p, at in began.get(group.group, {}).items() if p not in other})
        for group in groups
    ]


def gaps_of(config: AuditConfig, captured: Capture, aggregate: str) -> list[Gap]:
    """The mirrors' own gap events, by places of audited topics; of mirrors that carry to this aggregate, as
    far as that is known."""
    return known_gaps(captured, config, aggregate)


def tiers_of(config: AuditConfig) -> list[dict[str, object]]:
    """The tiers in their order, for the summary: each with those that it is compared with."""
    from millrace.audit.contract.group_counts import tier_name
    from millrace.audit.reconciliation.verdicts import PRODUCED

    tiers: list[dict[str, object]] = []
    for name, cluster in config.clusters.items():
        upstream = list(config.sources()) or [PRODUCED]
        tiers.append({"name": name, "upstream": upstream if cluster.tier == "aggregate" else [PRODUCED]})
    for name, groups in config.groups.items():
        tiers.extend({"name": tier_name(group.name), "upstream": [name]} for group in groups)
    return tiers


def streams_of(config: AuditConfig, captured: Capture) -> list[StreamFacts]:
    """What events told, by the audited topics (`by_audited_topic`)."""
    return by_audited_topic(config, captured.ledger.streams.values(), captured.origins)


def by_audited_topic(
    config: AuditConfig, streams: Iterable[StreamFacts], origins_of: Mapping[str, Collection[str]]
) -> list[StreamFacts]:
    """A producer knows its topic by its own cluster's name: the streams by the audited one. One of an audited
    topic's name in a cluster where another topic is the audited one has none. `origins_of` {stream: clusters
    that told of it}. A cluster alone that is an aggregate has its producers all the same."""
    found = []
    sources = config.sources() or config.clusters
    for facts in streams:
        origins = set(origins_of.get(facts.stream, ())) & set(sources)
        named = [
            topic
            for name, cluster in sources.items()
            for topic in config.topics
            if facts.topic in cluster.topics_here(topic) and (not origins or name in origins)
        ]
        if named or (origins and facts.topic in config.topics):
            facts = replace(facts, topic=named[0] if named else "")
        found.append(facts)
    return found
