"""Reconciliation inside Spark: one stream's facts and cells in, its verdicts out as Arrow rows.

`Reconciler` is handed to `cogroup(...).applyInArrow` by `job`, travels to the workers by pickle, and calls
the pure `reconcile.reconcile_stream`. The rows are `reconciliation.parquet`:

    topic, producer, stream   the stream; `stream` 16 hexadecimal digits
    window_start              ISO 8601 UTC; null in the stream's own row (what no window can be named for)
    window_start_ms, window_ms, state (OPEN, SETTLED), verdict
    published                 acknowledged by the producer, by its count events
    consumed, seen            map tier -> records with repeats, distinct records
    missing, duplicates, in_flight, unreported, unknown, explained, ambiguous    how many sequences or copies
    detail                    JSON: the same by name, as ranges, with hops, reasons, append times
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyroaring import BitMap64

from millrace.audit.cell_rows import cells_of
from millrace.audit.cells import Cell, merge_cells
from millrace.audit.events import StreamFacts
from millrace.audit.fact_rows import decode_facts
from millrace.audit.reconcile import (
    Gap,
    Passage,
    Place,
    TierReading,
    UnreadRange,
    passage_by_arrivals,
    reconcile_stream,
)
from millrace.audit.verdicts import PRODUCED, Ranges, Verdict, WindowVerdict, range_count

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
        ("detail", pa.string()),
    ]
)

VERDICT_DDL = (
    "topic string, producer string, stream string, window_start string, window_start_ms bigint, "
    "window_ms bigint, state string, verdict string, published bigint, ambiguous bigint, "
    "consumed map<string,bigint>, seen map<string,bigint>, missing bigint, duplicates bigint, "
    "in_flight bigint, unreported bigint, unknown bigint, explained bigint, detail string"
)


def iso_time(at_ms: int | None) -> str | None:
    """`2013-01-01T00:00:00Z`; milliseconds only where there are any. None for a time beyond the calendar."""
    if at_ms is None:
        return None
    try:
        moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    spec = "milliseconds" if at_ms % 1000 else "seconds"
    return moment.isoformat(timespec=spec).replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """What the job knows of one cluster's tier for every topic."""

    name: str
    is_source: bool
    topics: Mapping[str, str]  # the cluster's own topic name -> the audited topic
    unread: Sequence[UnreadRange] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # the audited topic -> the cluster's own name


@dataclass(frozen=True, slots=True)
class Reconciler:
    """Everything but the stream itself. `passed` and `gaps` are by aggregate, of source offsets.

    An aggregate without positions has no entry in `passed`: a foreign mirror, judged by later arrivals.
    """

    clusters: Sequence[ClusterReading]
    passed: Mapping[str, Mapping[Place, Passage]]
    gaps: Mapping[str, Sequence[Gap]]
    window_ms: int
    grace_ms: int
    now_ms: int
    topics: Sequence[str] = field(default_factory=tuple)

    def rows(self, cells: pa.Table, facts: pa.Table) -> pa.Table:
        """The verdicts of one stream from its cells and its row of facts."""
        verdicts = self.verdicts(list(cells_of(cells)), facts.to_pylist())
        return pa.Table.from_pylist([_row(*each) for each in verdicts], VERDICT_SCHEMA)

    def verdicts(
        self, cells: Sequence[Cell], facts_rows: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[WindowVerdict, dict[str, list[int]]]]:
        """Each window's verdict, with {tier: [first, last]} append times where brokers kept them."""
        stream = cells[0].stream if cells else facts_rows[0]["stream"]
        origins: set[str] = set()
        if facts_rows:
            facts = decode_facts(stream, facts_rows[0]["facts"])
            origins = set(facts_rows[0]["origins"] or ())
        else:
            facts = StreamFacts(stream)
        topic = self._topic(facts, cells, origins)
        if topic is None:
            return
        facts.topic = topic
        if not facts.producer:
            facts.producer = next((cell.producer for cell in cells if cell.producer), "")
        if any(cell.topic != topic and not self._is_reread(cell, topic) for cell in cells):
            facts.conflicts.append("records of this stream lie in more than one topic")
        cells = [cell for cell in cells if cell.topic == topic]
        sources = self._sources_of(cells, origins)
        cells, tiers = self._tiers(cells, sources, topic)
        seen = merge_cells(cells)
        for verdict in reconcile_stream(
            facts, seen, tiers, window_ms=self.window_ms, grace_ms=self.grace_ms, now_ms=self.now_ms
        ):
            append_ms = {}
            for tier, windows in seen.items():
                window = windows.get(verdict.window_start_ms) if verdict.window_start_ms is not None else None
                if window is not None and window.last_append_ms >= 0:
                    append_ms[tier] = [window.first_append_ms, window.last_append_ms]
            yield verdict, append_ms

    def _is_reread(self, cell: Cell, topic: str) -> bool:
        """Whether the cluster merges both topics into one: then the record was counted under either name."""
        return any(
            cluster.names.get(cell.topic, cell.topic) == cluster.names.get(topic, topic)
            for cluster in self.clusters
            if cluster.name == cell.cluster
        )

    def _topic(self, facts: StreamFacts, cells: Sequence[Cell], origins: set[str]) -> str | None:
        """The audited topic; None for a stream of a topic that this audit does not look at."""
        if not facts.topic:
            return min(cell.topic for cell in cells) if cells else None
        for cluster in self.clusters:
            if cluster.name in origins and facts.topic in cluster.topics:
                return cluster.topics[facts.topic]
        if facts.topic in self.topics:
            return facts.topic
        return min((cell.topic for cell in cells), default=None)

    def _sources_of(self, cells: Sequence[Cell], origins: set[str]) -> list[str]:
        """The source clusters this stream was produced to: where its records or its events are."""
        held = {cell.cluster for cell in cells} or set()
        return [
            cluster.name
            for cluster in self.clusters
            if cluster.is_source and (cluster.name in held or cluster.name in origins)
        ]

    def _tiers(
        self, cells: Sequence[Cell], sources: Sequence[str], topic: str
    ) -> tuple[Sequence[Cell], list[TierReading]]:
        """The stream's own chain of tiers; several source clusters of one stream become one tier."""
        tiers: list[TierReading] = []
        upstream = PRODUCED
        if sources:
            upstream = "+".join(sources)
            if len(sources) > 1:
                cells = [replace(each, tier=upstream) if each.cluster in sources else each for each in cells]
            unread = [
                each
                for cluster in self.clusters
                if cluster.name in sources
                for each in cluster.unread
                if each.place[1] == topic
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
                    gaps=[gap for gap in self.gaps.get(cluster.name, ()) if gap.place[1] == topic],
                    unread=[*elsewhere, *(each for each in cluster.unread if each.place[1] == topic)],
                )
            )
        return cells, tiers

    def _passed(
        self, aggregate: str, cells: Sequence[Cell], sources: Sequence[str]
    ) -> Mapping[Place, Passage]:
        known = self.passed.get(aggregate)
        if known:
            return known
        arrived: dict[str, BitMap64] = {}
        for cell in cells:
            if cell.cluster == aggregate:
                arrived[cell.stream] = arrived.get(cell.stream, BitMap64()) | cell.sequences()
        return passage_by_arrivals([cell for cell in cells if cell.cluster in sources], arrived)


def _lists(ranges: Ranges) -> list[list[int]]:
    return [[first, last] for first, last in ranges]


def _hops(by_hop: Mapping[tuple[str, str], Ranges]) -> list[dict[str, Any]]:
    return [{"between": list(hop), "sequences": _lists(ranges)} for hop, ranges in by_hop.items()]


def _total(groups: Iterable[Ranges]) -> int:
    return sum(range_count(ranges) for ranges in groups)


def _row(verdict: WindowVerdict, append_ms: Mapping[str, list[int]]) -> dict[str, Any]:
    detail = {
        "missing": _hops(verdict.missing),
        "missing_count": [
            {"between": list(hop), "count": count} for hop, count in verdict.missing_count.items()
        ],
        "duplicates": {tier: _lists(ranges) for tier, ranges in verdict.duplicates.items()},
        "extra_copies": dict(verdict.extra_copies),
        "in_flight": _hops(verdict.in_flight),
        "unreported": _lists(verdict.unreported),
        "unknown": _lists(verdict.unknown),
        "explained": {cause: _lists(ranges) for cause, ranges in verdict.explained.items()},
        "reasons": list(verdict.reasons),
        "append_ms": dict(append_ms),
    }
    return {
        "topic": verdict.topic,
        "producer": verdict.producer,
        "stream": verdict.stream,
        "window_start": iso_time(verdict.window_start_ms),
        "window_start_ms": verdict.window_start_ms,
        "window_ms": verdict.window_ms,
        "state": str(verdict.state),
        "verdict": str(Verdict(verdict.verdict)),
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
        "detail": json.dumps({name: value for name, value in detail.items() if value}, separators=(",", ":")),
    }


def verdict_rows(verdicts: Iterable[WindowVerdict]) -> pa.Table:
    """Rows of verdicts that were made on the driver (the roster's)."""
    return pa.Table.from_pylist([_row(each, {}) for each in verdicts], VERDICT_SCHEMA)
