"""Reading the events topics on from where the last run ended.

Called by `capture`. Events are cumulative and what they say is kept, merged (`fact_rows`), so that an event
is read once. Must stay true: a run that reads on knows what one would that reads all there is. So with the
facts goes what else a reading of all would tell:

- which streams the topics still have an event of (`told`), by the offset of the newest: as long as it is not
  below the log's begin, the stream may come back and is not forgotten;
- what could not be believed (`doubted`), by its offset: it is told until the log's begin has passed it.

And where the facts cannot stand for what was read, it is read anew, from the beginning: a topic that was made
anew; all of them where the state is of an older program, or of one that knew fewer types of events, where
more groups are audited than then (events of others are not kept), and where a group's session or commit
speaks of more records than are told of (its events may have been pruned). A topic that was away begins anew.

What was there and cannot be read any more is lost to the audit: offsets that expired before they were read,
and what a shortened log had (`resuming`). A hole of compaction is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millrace.audit.config import AuditConfig
from millrace.audit.contract.event_json import known_types
from millrace.audit.contract.event_ledger import MAX_UNTRUSTED_KEPT, Distrusted, EventLedger
from millrace.audit.contract.group_counts import Claims, told_and_claimed
from millrace.audit.keeping.state import Commit, ReadPosition, UnreadNote
from millrace.audit.runs.partition_pins import PartitionPin, ends_and_epochs, naming, refusal, topic_id_of
from millrace.audit.runs.resuming import position_at, resume
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.client.read_to_end import TopicRecord, read_topic_to_end
from millrace.broker.errors import ClusterUnreachable
from millrace.broker.protocol.system_topics import AUDIT_TOPIC

if TYPE_CHECKING:
    from millrace.audit.runs.capture import Capture

GAPS_TOPIC = AUDIT_TOPIC
"""Where mirrors tell their gaps, wherever producers tell their counts."""

Told = dict[str, dict[str, int]]
"""{stream: {partition's key: offset of the newest event that names it}}"""

_LOST = {
    "expired": "events that had expired before they were read",
    "truncated": "events of a log that was shortened",
}


@dataclass(slots=True)
class EventsRead:
    """How far the events topics were read, and what is known of what lies below. `positions` by the
    partition's key, `ways` what the reading went by (`ways_of`), `doubted` {(partition's key, what): offset}.
    """

    positions: dict[str, ReadPosition] = field(default_factory=dict)
    ways: list[str] = field(default_factory=list)
    doubted: dict[tuple[str, Distrusted], int] = field(default_factory=dict)
    told: Told = field(default_factory=dict)

    def doubts(self) -> list[tuple[str, int, Distrusted]]:
        """As a commit keeps them: in order, so that equal ones are equal."""
        found = [(place, offset, what) for (place, what), offset in self.doubted.items()]
        return sorted(
            found, key=lambda each: (each[0], each[1], each[2].told, each[2].sentence, each[2].named)
        )


def ways_of(config: AuditConfig) -> list[str]:
    """What decides which events are kept, and as what: a run with one more reads all of them anew."""
    kept = [f"group {name}" for name in config.group_names()]
    return sorted([*kept, *(f"source {name}" for name in config.sources()), *known_types()])


def events_known(config: AuditConfig, before: Commit, told: Told) -> EventsRead:
    """What the run before knew of the events; nothing, where it went by less than this one."""
    if not set(ways_of(config)) <= set(before.events_ways):
        return EventsRead()
    doubted = {(place, what): offset for place, offset, what in before.events_doubted}
    return EventsRead(before.events_read, before.events_ways, doubted, told)


def to_keep(read: EventsRead, ledger: EventLedger) -> EventsRead:
    """What the next run is to know. Of more doubts than are kept by name it would not know which are left:
    it reads all anew."""
    return read if ledger.untrusted_count <= MAX_UNTRUSTED_KEPT else EventsRead()


def lost_counts(notes: Iterable[UnreadNote]) -> dict[str, int]:
    """{what could not be trusted: offsets} of events that were gone before they could be read."""
    counts: dict[str, int] = {}
    for note in notes:
        what = f"{_LOST[note.cause]}, in cluster {note.cluster}, {note.topic}-{note.partition}"
        counts[what] = counts.get(what, 0) + note.end_offset - note.first_offset
    return counts


async def read_events(
    captured: Capture,
    config: AuditConfig,
    clusters: Mapping[str, Cluster],
    known: EventsRead,
    before: Commit,
) -> None:
    """Teach the capture's ledger the events of all clusters, up to their ends; of what is `known`, only what
    is new. Raises ClusterUnreachable."""
    reading = _Reading(captured, config, known)
    await reading.all_of(clusters)
    if reading.has_skipped and _speak_of_more(captured, config, reading.sessions, before):
        captured.ledger.forget_doubts()
        reading = _Reading(captured, config, EventsRead())
        await reading.all_of(clusters)
    captured.absent.extend((*reading.absent, *reading.unheld))
    captured.silent_sources.extend(reading.absent)


def _speak_of_more(
    captured: Capture, config: AuditConfig, sessions: Collection[tuple[str, str]], before: Commit
) -> bool:
    """Whether a session that told something now, or a commit, says that there were more events than are
    known. A claim that was open before has been looked for."""
    told, claimed = told_and_claimed(captured.ledger)
    groups = config.group_names()
    if any(claimed.get(each, 0) > told.get(each, 0) for each in sessions if each[0] in groups):
        return True
    known = {(group, session): claim.count for group, session, claim in before.claims}
    for group, session, count in before.answered:
        known[group, session] = max(count, known.get((group, session), 0))
    claims: Claims = captured.claims
    return any(claim.count > max(told.get(place, 0), known.get(place, 0)) for place, claim in claims.items())


class _Reading:
    """One reading of all clusters' events topics, on from what is known."""

    def __init__(self, captured: Capture, config: AuditConfig, known: EventsRead) -> None:
        self._captured, self._config, self._known = captured, config, known
        self._read = captured.events = EventsRead(ways=ways_of(config))
        self._groups = config.group_names()
        self.has_skipped = False
        self.absent: list[str] = []
        self.unheld: list[str] = []
        self.sessions: set[tuple[str, str]] = set()

    async def all_of(self, clusters: Mapping[str, Cluster]) -> None:
        await asyncio.gather(*(self._of_cluster(cluster) for cluster in clusters.values()))

    async def _of_cluster(self, cluster: Cluster) -> None:
        elsewhere = self._config.clusters[cluster.name].told_elsewhere(self._config.audit_topic)
        for topic in dict.fromkeys((self._config.audit_topic, GAPS_TOPIC, *elsewhere)):
            await self._of_topic(cluster, topic)

    async def _of_topic(self, cluster: Cluster, topic: str) -> None:
        metadata = await cluster.metadata([topic], max_age_ms=0)
        teller = _teller(self._config, cluster.name, topic)
        if topic not in metadata.topics:
            self._note_absent(metadata, cluster.name, topic, teller)
            return
        topic_id = topic_id_of(metadata.topics[topic].topic_id)
        keys = metadata.partitions(topic)
        with naming(cluster, topic):
            read_to = {key: self._known.positions.get(f"{cluster.name}/{topic}/{key[1]}") for key in keys}
            kept = {key: position.epochs for key, position in read_to.items() if position is not None}
            starts, marks, ends, histories, older = await ends_and_epochs(cluster, keys, kept)
            since: dict[int, int] = {}
            pins: dict[int, PartitionPin] = {}
            for key in keys:
                pin = pins[key[1]] = PartitionPin(
                    cluster=cluster.name,
                    topic=topic,
                    topic_here=topic,
                    partition=key[1],
                    topic_id=topic_id,
                    start_offset=starts[key].offset,
                    end_offset=ends[key].offset,
                    high_watermark=marks[key].offset,
                    epochs=histories.get(key, ()),
                    older_ends=older.get(key, ()),
                )
                since[pin.partition] = self._resumed(pin, teller)
            until = {partition: pin.end_offset for partition, pin in pins.items()}
            places = {partition: pin.key for partition, pin in pins.items()}
            async for record in read_topic_to_end(cluster, topic, since=since, until=until):
                self._take(places[record.partition], cluster, record, teller)
        if topic == GAPS_TOPIC:
            self._captured.gaps_to[cluster.name] = until
        for pin in pins.values():
            known = self._known.positions.get(pin.key)
            first = since[pin.partition]
            self._read.positions[pin.key] = position_at(pin.epochs, pin.end_offset, topic_id, known, first)

    def _note_absent(self, metadata: ClusterMetadata, cluster: str, topic: str, teller: str) -> None:
        own = (self._config.audit_topic, GAPS_TOPIC)
        is_named = topic in (self._config.clusters[cluster].events or ())
        refused = refusal(metadata, topic) if topic in own or is_named else None
        if refused is not None:
            raise ClusterUnreachable(cluster, f"{topic} cannot be read: {refused}")
        if topic == self._config.audit_topic and teller:  # an aggregate need not have producers
            self.absent.append(f"cluster {cluster} has no topic {topic}: its producers tell nothing")
        if is_named:
            self.unheld.append(f"cluster {cluster} has no topic {topic}, which should hold events")

    def _resumed(self, pin: PartitionPin, teller: str) -> int:
        """The offset from which on the partition is read; what is known of the rest is put in its place."""
        known = self._known.positions.get(pin.key)
        if known is None:
            return pin.start_offset
        first, lost = resume(pin, known, self._captured.taken_ms)
        if any(each.cause == "recreated" for each in lost):
            return first
        self._captured.events_lost.extend(lost)
        self.has_skipped = self.has_skipped or first > pin.start_offset
        there = range(pin.start_offset, first)
        for stream, offsets in self._known.told.items():
            if offsets.get(pin.key, -1) in there:
                self._read.told.setdefault(stream, {})[pin.key] = offsets[pin.key]
        for (place, what), offset in self._known.doubted.items():
            if place == pin.key and offset in there:
                self._captured.ledger.recall(what)
                self._read.doubted[place, what] = offset
                if teller and what.names_stream:
                    self._captured.origins.setdefault(what.named, set()).add(teller)
        return first

    def _take(self, place: str, cluster: Cluster, record: TopicRecord, teller: str) -> None:
        ledger = self._captured.ledger
        kind, stream = "count", ledger.add_plain(record.key, record.value)
        if not stream:
            ledger.add(record.key, record.value, origin_of(cluster, record))
            for what in ledger.take_doubted():
                if what.told or what.named in self._groups:
                    self._read.doubted[place, what] = record.offset
            kind, stream = ("", "") if record.key is None else stream_of_key(record.key)
            if not stream:
                return
        self._read.told.setdefault(stream, {})[place] = record.offset
        if kind == "tier":
            self.sessions.add(_session_of_key(record.key or b""))
        elif teller:
            self._captured.origins.setdefault(stream, set()).add(teller)


def _teller(config: AuditConfig, cluster: str, topic: str) -> str:
    """The source cluster whose producers' word a topic holds: the cluster that it lies in, or the one that a
    renaming mirror brought it from, by the name that it gave to it, as if it were read there; "" for none."""
    if topic in (config.audit_topic, GAPS_TOPIC):
        return cluster if config.clusters[cluster].tier == "source" else ""
    prefix = topic.removesuffix(config.audit_topic).rstrip(".")
    return prefix if topic.endswith(f".{config.audit_topic}") and prefix in config.sources() else ""


async def read_new_gaps(captured: Capture, cluster: Cluster) -> None:
    """What mirrors told of gaps since the events were read. They write it outside of transactions, and it
    counts from then on: nobody else's open one may hide it."""
    metadata = await cluster.metadata([GAPS_TOPIC], max_age_ms=0)
    if GAPS_TOPIC not in metadata.topics:
        refused = refusal(metadata, GAPS_TOPIC)
        if refused is not None or cluster.name in captured.gaps_to:
            # Positions are newer than the gaps that are known: losses would be made up.
            why = refused or "it was there a moment ago"
            raise ClusterUnreachable(cluster.name, f"{GAPS_TOPIC} cannot be read: {why}")
        return
    since = captured.gaps_to.get(cluster.name, {})
    with naming(cluster, GAPS_TOPIC):
        async for record in read_topic_to_end(cluster, GAPS_TOPIC, read_committed=False, since=since):
            if record.key is not None and stream_of_key(record.key)[0] == "gap":
                captured.ledger.add(record.key, record.value, origin_of(cluster, record))


def origin_of(cluster: Cluster, record: TopicRecord) -> str:
    return f"in cluster {cluster.name}, partition {record.partition}, offset {record.offset}"


def stream_of_key(key: bytes) -> tuple[str, str]:
    """(type of event, stream that its key names); no stream where it speaks of none."""
    kind, _, rest = key.decode("utf-8", "replace").partition("/")
    if kind == "tier":  # .../stream/window; a group's name may have slashes
        return kind, rest.rpartition("/")[0].rpartition("/")[2]
    return kind, rest.partition("/")[0] if kind in ("stream", "count") else ""


def _session_of_key(key: bytes) -> tuple[str, str]:
    """(group, session) of a group's event."""
    parts = key.decode("utf-8", "replace").partition("/")[2].rsplit("/", 4)
    return parts[0], parts[1] if len(parts) > 1 else ""
