"""Reconciliation inside Spark: one stream's facts and cells in, its verdicts out as Arrow rows.

`Reconciler` is handed to `cogroup(...).applyInArrow` by `job`, travels to the workers by pickle, and calls
the pure `reconcile.reconcile_stream`. The rows are `reconciliation.parquet`:

    topic, producer, stream   the stream; `stream` 16 hexadecimal digits
    window_start              ISO 8601 UTC; null in the stream's own row (what no window can be named for)
    window_start_ms, window_ms, state (OPEN, SETTLED), verdict
    published                 acknowledged by the producer, by its count events
    consumed, seen            map tier -> records with repeats, distinct records
    missing, duplicates, in_flight, unreported, unknown, explained, ambiguous    how many sequences or copies
    content                   compared, not compared or differs; "" where content is not audited
    revision                  1 for the first settled verdict of the window, +1 whenever late data changed it,
                              0 while nobody has numbered it
    detail                    JSON: the same by name, as ranges, with hops, reasons, append times, and for
                              what is lost where it was last had and which neighbours arrived; `shared`
                              [first start in ms, last start, count] of windows that have numbers in common;
                              in a stream's own row since when it is in doubt (`not_before_ms`) and silent
                              (`silent_from_ms`)
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.config import audited_topic
from millrace.audit.contract.events import StreamFacts, TierEvent
from millrace.audit.contract.producer_names import name_doubts, names_in, plain
from millrace.audit.reconciliation.neighbours import Neighbourhood
from millrace.audit.reconciliation.online_tiers import OnlineGroup, add_groups
from millrace.audit.reconciliation.reconcile import (
    ClusterPartition,
    Gap,
    Passage,
    TierReading,
    UnreadRange,
    passage_by_arrivals,
    reconcile_stream,
)
from millrace.audit.reconciliation.said import said_of
from millrace.audit.reconciliation.tier_reading import arrivals_of
from millrace.audit.reconciliation.verdicts import (
    PRODUCED,
    VERDICTS,
    Hop,
    Ranges,
    Verdict,
    WindowState,
    WindowVerdict,
    range_count,
)
from millrace.audit.runs.fact_rows import PrunedWindows, facts_of, left_of, tier_events_of
from millrace.audit.scanning.cells import SeenByWindow

if TYPE_CHECKING:  # compiled loops, which only who reconciles needs
    from millrace.audit.scanning.stream_cells import StreamCells

_ELSEWHERE = UnreadRange(("", "", -1), 0, 0, "no audited source cluster knows of this stream")

_COUNTS = pa.map_(pa.string(), pa.int64())

VERDICT_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("producer", pa.string()),
        ("stream", pa.string()),
        ("window_start", pa.string()),
        ("window_start_ms", pa.int64()),
        ("window_ms", pa.int64()),
        ("state", pa.string()),
        ("verdict", pa.string()),
        ("published", pa.int64()),
        ("ambiguous", pa.int64()),
        ("consumed", _COUNTS),
        ("seen", _COUNTS),
        ("missing", pa.int64()),
        ("duplicates", pa.int64()),
        ("in_flight", pa.int64()),
        ("unreported", pa.int64()),
        ("unknown", pa.int64()),
        ("explained", pa.int64()),
        ("content", pa.string()),
        ("revision", pa.int32()),
        ("detail", pa.string()),
    ]
)

VERDICT_DDL = (
    "topic string, producer string, stream string, window_start string, window_start_ms bigint, "
    "window_ms bigint, state string, verdict string, published bigint, ambiguous bigint, "
    "consumed map<string,bigint>, seen map<string,bigint>, missing bigint, duplicates bigint, "
    "in_flight bigint, unreported bigint, unknown bigint, explained bigint, content string, revision int, "
    "detail string"
)

ROW_SCHEMA = VERDICT_SCHEMA.append(pa.field("said", pa.string()))
ROW_DDL = f"{VERDICT_DDL}, said string"
"""Rows on their way to the report, with the digest that a revision is known by: `said`, null in open ones."""


def iso_time(at_ms: int | None) -> str | None:
    """`2013-01-01T00:00:00Z`; milliseconds only where there are any. None for a time beyond the calendar."""
    if at_ms is None:
        return None
    try:
        moment = datetime.fromtimestamp(at_ms // 1000, UTC).replace(microsecond=at_ms % 1000 * 1000)
    except (OverflowError, ValueError, OSError):
        return None
    spec = "milliseconds" if at_ms % 1000 else "seconds"
    return moment.isoformat(timespec=spec).replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a row tells beside its verdict. `append_ms` {tier: [first, last]} where brokers kept append times;
    `places` where lost records were last had (`neighbours`)."""

    append_ms: Mapping[str, list[int]] = field(default_factory=dict)
    places: Mapping[Hop, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """What the job knows of one cluster's tier for every topic."""

    name: str
    is_source: bool
    topics: Mapping[str, str]  # the cluster's own topic name -> the audited topic
    unread: Sequence[UnreadRange] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # the audited topic -> the cluster's own name


@dataclass(frozen=True, slots=True)
class _Given:
    """What there is of a stream: its facts, cells and chain of tiers, the sources and topic that it was
    produced to, and groups' events of it."""

    facts: StreamFacts
    cells: StreamCells
    tiers: list[TierReading]
    sources: list[str]
    topic: str
    events: Sequence[TierEvent]


@dataclass(frozen=True, slots=True)
class Reconciler:
    """Everything but the stream itself. `passed` and `gaps` are by aggregate, of source offsets.

    An aggregate without positions has no entry in `passed`: a foreign mirror, judged by later arrivals.
    """

    clusters: Sequence[ClusterReading]
    passed: Mapping[str, Mapping[ClusterPartition, Passage]]
    gaps: Mapping[str, Sequence[Gap]]
    window_ms: int
    grace_ms: int
    now_ms: int
    topics: Sequence[str] = field(default_factory=tuple)
    groups: Sequence[OnlineGroup] = ()
    content: bool = False

    def rows(
        self, cells: pa.Table, facts_rows: Sequence[Mapping[str, Any]], left: PrunedWindows | None
    ) -> pa.Table:
        """The verdicts of one stream from its cells and its row of facts, of which `left` is what it says of
        windows that are not judged (ROW_SCHEMA)."""
        from millrace.audit.reconciliation.plain_windows import plain_columns, plain_windows

        given = self._given(cells, facts_rows, left)
        if given is None:
            return ROW_SCHEMA.empty_table()
        plain = None
        if not self.groups and not self.content and self._knows_passages():
            plain = plain_windows(given.facts, given.cells, given.tiers, self.window_ms)
        if plain is None:
            return evident_rows(self._judged(given, given.cells))
        columns = plain_columns(plain, given.facts, self.window_ms, self.grace_ms, self.now_ms)
        plain.take_out_of(given.facts)
        rest = evident_rows(self._judged(given, plain.rest))
        found = pa.table([columns[name] for name in ROW_SCHEMA.names], ROW_SCHEMA)
        if not rest.num_rows:
            return found
        return pa.concat_tables([found, rest]).sort_by("window_start_ms")  # the stream's own row last

    def own_cells(
        self, cells: pa.Table, facts_rows: Sequence[Mapping[str, Any]]
    ) -> tuple[pa.Table, dict[tuple[str, str], int]]:
        """(a stream's cells without, {(topic, tier): how many records are in} those that lie in other topics
        than its events name: somebody copied its records with their headers. Of a stream whose own topic is
        not audited, all of them do."""
        name, told = _name(facts_rows), self.told_topic(facts_rows)
        foreign: Counter[tuple[str, str]] = Counter()
        if told is None and not (name and _is_one_producers(facts_of(facts_rows[0], left_of(facts_rows)))):
            return cells, foreign
        clusters, places = (cells[name].unique().to_pylist() for name in ("cluster", "topic"))
        if told is not None and all(self._is_in(*each, told) for each in itertools.product(clusters, places)):
            return cells, foreign
        others: set[tuple[str, str]] = set()
        found = cells.group_by(["cluster", "topic", "tier"]).aggregate([("count", "sum")])
        for row in found.to_pylist():
            cluster, place = row["cluster"], row["topic"]
            if told is None or not self._is_in(cluster, place, told):
                foreign[audited_topic(place), row["tier"]] += row["count_sum"]
                others.add((cluster, place))
        mine = pa.repeat(True, cells.num_rows)
        for cluster, place in others:
            is_there = pc.and_(pc.equal(cells["cluster"], cluster), pc.equal(cells["topic"], place))
            mine = pc.and_not(mine, is_there)
        return (cells.filter(mine) if others else cells), foreign

    def verdicts(
        self, rows: pa.Table, facts_rows: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[WindowVerdict, Evidence]]:
        """Each window's verdict with its evidence; none for a stream whose events name a topic that is not
        audited. Records in other topics than the stream's events name are not its; where no event names one,
        nobody knows which are."""
        given = self._given(rows, facts_rows, left_of(facts_rows))
        if given is not None:
            yield from self._judged(given, given.cells)

    def _given(
        self, rows: pa.Table, facts_rows: Sequence[Mapping[str, Any]], left: PrunedWindows | None
    ) -> _Given | None:
        from millrace.audit.scanning.stream_cells import StreamCells

        cells = StreamCells(rows)
        stream = cells.stream if cells else facts_rows[0]["stream"]
        origins = _origins(facts_rows)
        facts = facts_of(facts_rows[0], left) if facts_rows else StreamFacts(stream)
        events = tier_events_of(facts_rows) if self.groups else []
        told = self._told_topic(facts.topic, origins) if facts.topic else None
        if told is None and facts.topic and _is_one_producers(facts):
            return None
        topic = told or self._guessed_topic(cells, events)
        if topic is None:
            return None
        facts.topic = topic
        if not facts.producer:
            names = [*cells.producers, *(event.producer for event in events)]
            facts.producer = plain(next((each for kept in names for each in names_in(kept)), ""))
        facts.conflicts.extend(
            name_doubts(facts.producer, (event.producer for event in events if event.producer))
        )
        if told is None and not all(self._is_in(*place, topic) for place in cells.places):
            facts.conflicts.append("records of this stream lie in more than one topic")
        cells = cells.of_topic(topic)
        sources = self._sources_of(cells, origins | (left.sources if left is not None else set()))
        cells, tiers = self._tiers(cells, sources, topic)
        return _Given(facts, cells, tiers, sources, topic, events)

    def _judged(self, given: _Given, cells: StreamCells) -> Iterator[tuple[WindowVerdict, Evidence]]:
        """The verdicts of what is given, with these of its cells."""
        facts, tiers = given.facts, given.tiers
        seen = cells.seen()
        if self.groups:
            seen = {**seen, **self._add_groups(tiers, given.sources, given.topic, given.events)}
        around = Neighbourhood(given.cells)
        # As records go: the first that a row names is where they came from.
        places = {each.name: number for number, each in enumerate(tiers)}
        order = sorted(seen, key=lambda tier: places.get(tier, len(places)))
        for verdict in reconcile_stream(
            facts,
            seen,
            tiers,
            window_ms=self.window_ms,
            grace_ms=self.grace_ms,
            now_ms=self.now_ms,
            content=self.content,
        ):
            append_ms: dict[str, list[int]] = {}
            for tier in order:
                window = None if verdict.window_start_ms is None else seen[tier].get(verdict.window_start_ms)
                if window is not None and window.last_append_ms >= 0:
                    append_ms[tier] = [window.first_append_ms, window.last_append_ms]
            yield verdict, Evidence(append_ms, dict(around.places(verdict.missing)))

    def _is_in(self, cluster: str, place: str, topic: str) -> bool:
        """Whether the cluster's place is the topic's, or is merged with it into one by the cluster: then each
        record was counted under either name."""
        return audited_topic(place) == topic or self._is_reread(cluster, place, topic)

    def _is_reread(self, cluster: str, place: str, topic: str) -> bool:
        return any(
            each.names.get(audited_topic(place), place) == each.names.get(topic, topic)
            for each in self.clusters
            if each.name == cluster
        )

    def told_topic(self, facts_rows: Sequence[Mapping[str, Any]]) -> str | None:
        """The audited topic that the stream's events name; None where they name none."""
        name = _name(facts_rows)
        return self._told_topic(name, _origins(facts_rows)) if name else None

    def _told_topic(self, name: str, origins: set[str]) -> str | None:
        """The audited topic that a stream's events call by this name; None where they name none of them.

        A producer names its topic as its own cluster does; which that is, nobody knows of a stream whose
        events came with a mirror.
        """
        own = [cluster for cluster in self.clusters if cluster.name in origins]
        for cluster in own:
            if name in cluster.topics:
                return cluster.topics[name]
        if own:
            return None
        if name in self.topics:
            return name
        return min((each.topics[name] for each in self.clusters if name in each.topics), default=None)

    def _guessed_topic(self, cells: StreamCells, events: Sequence[TierEvent]) -> str | None:
        """The audited topic of a stream of which no event says for sure, by where its records are."""
        # An aggregate may merge topics; its source tells which of them it was.
        sources = {cluster.name for cluster in self.clusters if cluster.is_source}
        places = cells.places
        told = [each for each in places if each[0] in sources] or places
        topics = {audited_topic(place) for _, place in told} or self._topics_of_groups(events)
        return min(topics, default=None)

    def _topics_of_groups(self, events: Sequence[TierEvent]) -> set[str]:
        """The audited topics that groups got a stream from: it may be all that is left of the stream."""
        return {
            topic
            for group in self.groups
            for event in group.testimony(events)
            for cluster in self.clusters
            if cluster.name == group.cluster
            for topic in self.topics
            if event.topic in cluster.names.get(topic, topic).split("\0")
        }

    def _sources_of(self, cells: StreamCells, origins: set[str]) -> list[str]:
        """The source clusters this stream was produced to: where its records or its events are, or those of
        its windows that are not judged."""
        held = cells.clusters
        return [
            cluster.name
            for cluster in self.clusters
            if cluster.is_source and (cluster.name in held or cluster.name in origins)
        ]

    def _tiers(
        self, cells: StreamCells, sources: Sequence[str], topic: str
    ) -> tuple[StreamCells, list[TierReading]]:
        """The stream's own chain of tiers; several source clusters of one stream become one tier."""
        tiers: list[TierReading] = []
        upstream = PRODUCED
        if sources:
            upstream = "+".join(sources)
            if len(sources) > 1:
                cells = cells.as_one_tier(upstream, sources)
            unread = [
                each
                for cluster in self.clusters
                if cluster.name in sources
                for each in cluster.unread
                if audited_topic(each.place[1]) == topic
            ]
            tiers.append(TierReading(name=upstream, unread=unread))
        # Produced into a cluster that is not audited: how far it is on its way here cannot be known.
        elsewhere = [] if sources or not any(cluster.is_source for cluster in self.clusters) else [_ELSEWHERE]
        for cluster in self.clusters:
            if cluster.is_source:
                continue
            tiers.append(
                TierReading(
                    name=cluster.name,
                    upstream=upstream,
                    passed=self._passed(cluster.name, cells, sources),
                    gaps=[
                        gap for gap in self.gaps.get(cluster.name, ()) if audited_topic(gap.place[1]) == topic
                    ],
                    unread=[
                        *elsewhere,
                        *(each for each in cluster.unread if audited_topic(each.place[1]) == topic),
                    ],
                )
            )
        return cells, tiers

    def _add_groups(
        self, tiers: list[TierReading], sources: Sequence[str], topic: str, events: Sequence[TierEvent]
    ) -> dict[str, SeenByWindow]:
        chain = {each.name: each.name for each in self.clusters if not each.is_source}
        chain |= {name: "+".join(sources) for name in sources}
        # By topic and not by name: topics that are merged by a rename have one name here.
        names = [name for each in self.clusters for name in each.names.get(topic, topic).split("\0")]
        return add_groups(self.groups, tiers, chain, events, topic, names, self.window_ms)

    def _knows_passages(self) -> bool:
        """Whether no aggregate is judged by the arrivals of all of a stream's cells (`_passed`)."""
        return all(self.passed.get(each.name) for each in self.clusters if not each.is_source)

    def _passed(
        self, aggregate: str, cells: StreamCells, sources: Sequence[str]
    ) -> Mapping[ClusterPartition, Passage]:
        known = self.passed.get(aggregate)
        if known:
            return known
        arrived = arrivals_of(cell for cell in cells if cell.cluster == aggregate)
        return passage_by_arrivals([cell for cell in cells if cell.cluster in sources], arrived)


def _is_one_producers(facts: StreamFacts) -> bool:
    """Whether the name of its topic can be believed: two producers of one stream id may write to two."""
    return not facts.conflicts


def _origins(facts_rows: Sequence[Mapping[str, Any]]) -> set[str]:
    return set(facts_rows[0]["origins"] or ()) if facts_rows else set()


def _name(facts_rows: Sequence[Mapping[str, Any]]) -> str:
    """What the stream's producer calls its topic."""
    return (facts_rows[0]["topic"] or "") if facts_rows else ""


_NO_EVIDENCE = Evidence()


def _lists(ranges: Ranges) -> list[list[int]]:
    return [[first, last] for first, last in ranges]


def _hops(
    by_hop: Mapping[Hop, Ranges], places: Mapping[Hop, list[dict[str, Any]]] | None = None
) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    for hop, ranges in by_hop.items():
        told.append({"between": list(hop), "sequences": _lists(ranges)})
        if places and places.get(hop):
            told[-1]["places"] = places[hop]
    return told


def _total(groups: Iterable[Ranges]) -> int:
    return sum(range_count(ranges) for ranges in groups)


def _row(verdict: WindowVerdict, evidence: Evidence = _NO_EVIDENCE) -> dict[str, Any]:
    detail = {
        "missing": _hops(verdict.missing, evidence.places),
        "missing_count": [
            {"between": list(hop), "count": count} for hop, count in verdict.missing_count.items()
        ],
        "duplicates": {tier: _lists(ranges) for tier, ranges in verdict.duplicates.items()},
        "extra_copies": dict(verdict.extra_copies),
        "in_flight": _hops(verdict.in_flight),
        "unreported": _lists(verdict.unreported),
        "unknown": _lists(verdict.unknown),
        "explained": {cause: _lists(ranges) for cause, ranges in verdict.explained.items()},
        "differing": {tier: _lists(ranges) for tier, ranges in verdict.differing.items()},
        "reasons": list(verdict.reasons),
        "append_ms": dict(evidence.append_ms),
        "not_before_ms": verdict.not_before_ms,
        "silent_from_ms": verdict.silent_from_ms,
        "unpromised": not verdict.promised,
        "shared": list(verdict.shared or ()),
    }
    detail = {name: value for name, value in detail.items() if value}
    return {
        "topic": verdict.topic,
        "producer": verdict.producer,
        "stream": verdict.stream,
        "window_start": iso_time(verdict.window_start_ms),
        "window_start_ms": verdict.window_start_ms,
        "window_ms": verdict.window_ms,
        "state": str(verdict.state),
        "verdict": VERDICTS[verdict.verdict],
        "published": verdict.published,
        "ambiguous": verdict.ambiguous,
        "consumed": list(verdict.consumed.items()),
        "seen": list(verdict.seen.items()),
        "missing": _total(verdict.missing.values()) + sum(verdict.missing_count.values()),
        "duplicates": sum(verdict.extra_copies.values()),
        "in_flight": _total(verdict.in_flight.values()),
        "unreported": range_count(verdict.unreported),
        "unknown": range_count(verdict.unknown),
        "explained": _total(verdict.explained.values()),
        "content": verdict.content_checked,
        "revision": verdict.revision,
        "detail": json.dumps(detail, separators=(",", ":")),
        "said": said_of(verdict, detail) if verdict.state == WindowState.SETTLED else None,
    }


def counting_row(
    state: str, topic: str, stream: str, counts: Mapping[str, int], again: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """A row that carries how many records of a stream are in a `state` of their own, {tier: n}, from a worker
    to the driver; no such row leaves the job. `again` are those of them that the next run reads again."""
    numbers = (
        "published",
        "ambiguous",
        "missing",
        "duplicates",
        "in_flight",
        "unreported",
        "unknown",
        "explained",
    )
    return {
        **dict.fromkeys(numbers, 0),
        "topic": topic,
        "producer": "",
        "stream": stream,
        "window_ms": 1,
        "state": state,
        "verdict": str(Verdict.UNKNOWN),
        "consumed": list(counts.items()),
        "seen": list((again or {}).items()),
        "content": "",
        "revision": 0,
        "detail": "{}",
    }


def verdict_rows(verdicts: Iterable[WindowVerdict]) -> pa.Table:
    """Rows (ROW_SCHEMA) of verdicts that were made on the driver (the roster's)."""
    return pa.Table.from_pylist([_row(each) for each in verdicts], ROW_SCHEMA)


def evident_rows(verdicts: Iterable[tuple[WindowVerdict, Evidence]]) -> pa.Table:
    """Rows (ROW_SCHEMA) of verdicts with their evidence."""
    return pa.Table.from_pylist([_row(*each) for each in verdicts], ROW_SCHEMA)
