"""A stream's facts as one Parquet row: what producers said, kept beyond the events' own retention.

Written by `job` at each run (all streams, so one file is enough), read by Spark for reconciliation and by
`explain`. The row holds the events in their own documented JSON, merged: two stream events (first and newest
word) and the newest report per window; so a later version of the audit can read what an earlier one kept.
Reports that say no more than some numbers are packed beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyroaring import BitMap64

from millrace.audit.contract import sequence_set
from millrace.audit.contract.events import (
    OPENED,
    UNANNOUNCED,
    CountEvent,
    Event,
    EventLedger,
    StreamEvent,
    StreamFacts,
    TierEvent,
    decode_event,
    encode_event,
)

FACT_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("topic", pa.string()),
        ("origins", pa.list_(pa.string())),
        ("facts", pa.binary()),
        ("reports", pa.binary()),
        ("tiers", pa.binary()),
        ("pruned", pa.binary()),
        ("resting", pa.binary()),
    ]
)
KEPT_SCHEMA = FACT_SCHEMA.append(pa.field("merged", pa.binary()))
"""The rows of the file. `reports` are the plain ones (`contract.window_reports`); up to the state's version 8
they stood among the events in `facts`. `merged` is what the next run's reading of events goes on from and no
verdict asks: what the events that are kept do not tell any more, and where the stream's newest event is in
each events topic. Before version 7 of the state there was none, and all events were read again."""
FACT_DDL = (
    "stream string, topic string, origins array<string>, facts binary, reports binary, tiers binary, "
    "pruned binary, resting binary"
)


def encode_facts(facts: StreamFacts) -> bytes:
    """The stream's events but for its plain reports, one JSON text a line, then its conflicts."""
    events: list[Event] = [*stream_events(facts), *facts.windows.others()]
    lines = [encode_event(event)[1] for event in events]
    lines.append(json.dumps({"conflicts": facts.conflicts, "distrusted": facts.distrusted}).encode())
    return b"\n".join(lines)


def decode_facts(stream: str, content: bytes, reports: bytes | None = None) -> StreamFacts:
    """The facts again, with the plain `reports` that were packed; raises InvalidEvent for what was never
    written."""
    facts = StreamFacts(stream)
    if reports:
        facts.adopt_reports(reports)
    *events, last = content.split(b"\n")
    for line in events:
        event = decode_event(line)
        if isinstance(event, StreamEvent):
            facts.learn_stream(event)
        elif event is not None:
            facts.learn_count(event)  # type: ignore[arg-type]
    kept = json.loads(last)
    facts.conflicts.extend(each for each in kept["conflicts"] if each not in facts.conflicts)
    facts.distrusted.extend(each for each in kept["distrusted"] if each not in facts.distrusted)
    return facts


_IDENTITY = ("topic", "producer", "session", "host", "application", "datacenter")
_MERGED = ("closed_at_ms", "alive_at_ms", "_numbered", "_only_counted", "_window_ms")


def encode_merged(facts: StreamFacts, told: Mapping[str, int]) -> bytes:
    """What only the driver needs of a stream; `told` {partition's key: offset of its newest event}."""
    names = (*_IDENTITY, *_MERGED)
    body = {"told": dict(sorted(told.items())), **{name.strip("_"): getattr(facts, name) for name in names}}
    return json.dumps(body, separators=(",", ":")).encode()


def restore_merged(facts: StreamFacts, content: bytes | None) -> dict[str, int]:
    """Put it back into the facts, which `decode_facts` made; returns `told`."""
    if not content:
        return {}
    body = json.loads(content)
    for name in _MERGED:
        setattr(facts, name, body[name.strip("_")])
    if not facts.topic and not facts.producer:  # all that it told is pruned
        for name in _IDENTITY:
            setattr(facts, name, body[name])
    if not facts.windows:
        facts.frame_reports()
    return dict(body["told"])


_own = partial(sequence_set.from_json, is_own=True)


@dataclass(slots=True)
class PrunedWindows:
    """What is left of a stream's windows whose evidence was folded away: their numbers, and the sequences
    that were accounted for in them, so that no hole shows. Of these `ambiguous` and `failed` were reported as
    that; all others were acknowledged, or there unreported. `window_ms` is the audit's; `counted` marks a
    producer that does not number its records; `topic` is the audited one, which of a stream that no event
    tells of only its cells did. `first_report_ms` is the start of the first of them that was reported:
    records alone do not say that their producer told of the time after them. `sources` are the source
    clusters that had their records, as far as that is known.

    Of windows at rest (`runs.resting`) the same is left for whoever judges the others, and more elsewhere."""

    window_ms: int
    windows: BitMap64 = field(default_factory=BitMap64)
    sequences: BitMap64 = field(default_factory=BitMap64)
    counted: bool = False
    told: dict[int, int] | None = field(default_factory=dict)
    topic: str = ""
    ambiguous: BitMap64 = field(default_factory=BitMap64)
    failed: BitMap64 = field(default_factory=BitMap64)
    first_report_ms: int | None = None
    sources: frozenset[str] = frozenset()

    def add(self, start_ms: int, length_ms: int) -> None:
        """A row's window, which may be several of the audit's."""
        self.windows.update(range(start_ms // self.window_ms, -(-(start_ms + length_ms) // self.window_ms)))

    def copy(self) -> PrunedWindows:
        told = None if self.told is None else dict(self.told)
        windows, sequences = self.windows.copy(), self.sequences.copy()
        ambiguous, failed = self.ambiguous.copy(), self.failed.copy()
        return PrunedWindows(
            self.window_ms,
            windows,
            sequences,
            self.counted,
            told,
            self.topic,
            ambiguous,
            failed,
            self.first_report_ms,
            self.sources,
        )

    def add_all(self, other: PrunedWindows) -> None:
        """What is left of other windows of the stream."""
        certain = self.certain | other.certain
        self.windows |= other.windows
        self.sequences |= other.sequences
        self.ambiguous = (self.ambiguous | other.ambiguous) - certain
        self.failed = (self.failed | other.failed) - certain - self.ambiguous
        self.counted = self.counted or other.counted
        self.told = None if self.told is None or other.told is None else {**self.told, **other.told}
        self.topic = self.topic or other.topic
        self.sources |= other.sources
        firsts = [each for each in (self.first_report_ms, other.first_report_ms) if each is not None]
        self.first_report_ms = min(firsts, default=None)

    def take_away(self, other: PrunedWindows) -> None:
        """Some of the windows again, which have no number in common with the others."""
        self.windows -= other.windows
        self.sequences -= other.sequences

    def account_for(self, report: CountEvent) -> None:
        """The sequences of a pruned window's report, as it tells them: a newer one may know more."""
        known_ms, start_ms = self.first_report_ms, report.window_start_ms
        self.first_report_ms = start_ms if known_ms is None else min(known_ms, start_ms)
        unsure = (report.ambiguous | report.failed) - report.acknowledged
        unsure -= (self.sequences & unsure) - self.ambiguous - self.failed  # there are records of these
        self.sequences |= report.acknowledged | unsure
        self.ambiguous -= report.acknowledged
        self.failed -= report.acknowledged
        self.ambiguous |= unsure & report.ambiguous
        self.failed |= unsure - report.ambiguous
        self.failed -= self.ambiguous

    def account_for_acknowledged(self, numbers: BitMap64, first_report_ms: int) -> None:
        """The same for reports that only acknowledge, these numbers together, of which the first is of this
        window."""
        known_ms = self.first_report_ms
        self.first_report_ms = first_report_ms if known_ms is None else min(known_ms, first_report_ms)
        self.sequences |= numbers
        self.ambiguous -= numbers
        self.failed -= numbers

    @property
    def certain(self) -> BitMap64:
        """Those that there are records of, whatever became of them: acknowledged, or seen."""
        return self.sequences - self.ambiguous - self.failed

    def has(self, start_ms: int) -> bool:
        return start_ms // self.window_ms in self.windows

    def have(self, starts_ms: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The same of many."""
        numbers = starts_ms // self.window_ms
        return np.isin(numbers, np.array((BitMap64(numbers) & self.windows).to_array(), np.int64))

    @property
    def end_ms(self) -> int:
        """Where the last one ends; 0 where there is none."""
        return (int(self.windows.max()) + 1) * self.window_ms if self.windows else 0

    def encode(self) -> bytes:
        body = {
            "window_ms": self.window_ms,
            "windows": [list(each) for each in sequence_set.to_ranges(self.windows)],
            "sequences": sequence_set.to_json(self.sequences),
            "counted": self.counted,
            "told": None if self.told is None else sorted(self.told.items()),
            "topic": self.topic,
            "ambiguous": sequence_set.to_json(self.ambiguous),
            "failed": sequence_set.to_json(self.failed),
            "first_report_ms": self.first_report_ms,
            **({"sources": sorted(self.sources)} if self.sources else {}),
        }
        return json.dumps(body, separators=(",", ":")).encode()

    @staticmethod
    def decode(content: bytes) -> PrunedWindows:
        body = json.loads(content)
        return PrunedWindows(
            body["window_ms"],
            sequence_set.from_ranges(tuple((first, last) for first, last in body["windows"])),
            _own(body["sequences"]),
            body["counted"],
            None if body.get("told") is None else dict(body["told"]),
            body.get("topic", ""),  # an older program kept none
            _own(body.get("ambiguous", [])),
            # Nor did it keep apart how they were reported: none of them is taken for one that may be there.
            _own(body.get("failed", body["sequences"])),
            body.get("first_report_ms"),  # nor which of its windows were reported
            frozenset(body.get("sources", ())),
        )


def facts_of(row: Mapping[str, Any], pruned: PrunedWindows | None) -> StreamFacts:
    """A stream's facts as reconciliation wants them: sequences of windows that are not judged, which its row
    calls `pruned` or at rest (`left_of`), count as accounted for.

    Those that were not acknowledged are put in as one report, in the first such window; who reconciles leaves
    the rows of these windows out.
    """
    facts = decode_facts(row["stream"], row["facts"], row.get("reports"))
    if pruned is not None and not facts.topic:
        facts.topic = pruned.topic
    if pruned is not None and pruned.counted and not facts.windows:
        facts._only_counted = True  # the reports that said so are gone
    if pruned is not None and not facts.sequenced:
        # The producer's total has the pruned windows in it; what an older program pruned is not known.
        gone = facts.last_assigned if pruned.told is None else sum(pruned.told.values())
        facts.last_assigned = max(facts.last_assigned - gone, 0)
        facts.last_settled = max(facts.last_settled - gone, 0)
    if pruned is not None and pruned.sequences and facts.sequenced:
        start_ms = pruned.windows.min() * pruned.window_ms
        facts.accounted = pruned.certain
        facts.windows[start_ms] = CountEvent(
            stream=facts.stream,
            session=facts.session,
            topic=facts.topic,
            producer=facts.producer,
            window_start_ms=start_ms,
            window_ms=pruned.window_ms,
            report=0,
            count=0,
            byte_count=0,
            acknowledged=BitMap64(),
            ambiguous=pruned.ambiguous,
            failed=pruned.failed,
            at_ms=0,
        )
    return facts


def pruned_of(row: Mapping[str, Any]) -> PrunedWindows | None:
    content = row.get("pruned")
    return PrunedWindows.decode(content) if content else None


def resting_of(row: Mapping[str, Any]) -> PrunedWindows | None:
    content = row.get("resting")
    return PrunedWindows.decode(content) if content else None


def left_of(rows: Sequence[Mapping[str, Any]]) -> PrunedWindows | None:
    """Of a stream's windows that are not judged, by its row if it has one: pruned ones, those at rest."""
    if not rows:
        return None
    pruned, resting = pruned_of(rows[0]), resting_of(rows[0])
    if pruned is None or resting is None:
        return pruned or resting
    pruned.add_all(resting)
    return pruned


def tier_events_of(rows: Sequence[Mapping[str, Any]]) -> list[TierEvent]:
    """What groups told of the stream."""
    found = []
    for row in rows:
        for line in (row.get("tiers") or b"").splitlines():
            event = decode_event(line)
            if isinstance(event, TierEvent):
                found.append(event)
    return found


def stream_events(facts: StreamFacts) -> Iterator[StreamEvent]:
    """Events that, merged, say the same of the stream as a whole."""
    if facts.state != UNANNOUNCED:
        newest = StreamEvent(
            state=facts.state,
            stream=facts.stream,
            session=facts.session,
            topic=facts.topic,
            producer=facts.producer,
            host=facts.host,
            application=facts.application,
            datacenter=facts.datacenter,
            window_ms=1,
            last_assigned=facts.last_assigned,
            last_settled=min(facts.last_settled, facts.last_assigned),
            no_earlier_than_ms=facts.no_earlier_than_ms,
            lease_ms=facts.lease_ms,
            at_ms=facts.at_ms,
            untold=facts.untold,
        )
        if facts.opened_at_ms is not None and (facts.opened_at_ms, OPENED) != (facts.at_ms, facts.state):
            yield replace(
                newest,
                state=OPENED,
                at_ms=facts.opened_at_ms,
                last_assigned=0,
                last_settled=0,
                no_earlier_than_ms=None,
                untold=(),
            )
        yield newest


def facts_table(
    ledger: EventLedger,
    origins: Mapping[str, set[str]],
    pruned: Mapping[str, PrunedWindows] | None = None,
    groups: Collection[str] = (),
    told: Mapping[str, Mapping[str, int]] | None = None,
    resting: Mapping[str, PrunedWindows] | None = None,
) -> pa.Table:
    """Every stream that any event named (KEPT_SCHEMA), ordered, so that equal facts give equal tables.
    `groups` are the audited ones; what others told is not kept. `told` is where streams' newest events are.
    """
    pruned, resting, told = pruned or {}, resting or {}, told or {}
    tiers: dict[str, list[bytes]] = {}
    for _, event in sorted(ledger.tiers.items()):
        if event.tier in groups:
            tiers.setdefault(event.stream, []).append(encode_event(event)[1])
    streams = sorted({*ledger.streams, *tiers, *pruned, *resting})
    facts = {stream: ledger.streams.get(stream) or StreamFacts(stream) for stream in streams}
    return pa.table(
        {
            "stream": streams,
            "topic": [facts[stream].topic for stream in streams],
            "origins": [sorted(origins.get(stream, ())) for stream in streams],
            "facts": [encode_facts(facts[stream]) for stream in streams],
            "reports": [facts[stream].windows.pack() or None for stream in streams],
            "tiers": [b"\n".join(tiers[stream]) if stream in tiers else None for stream in streams],
            "pruned": [pruned[stream].encode() if stream in pruned else None for stream in streams],
            "resting": [resting[stream].encode() if stream in resting else None for stream in streams],
            "merged": [encode_merged(facts[stream], told.get(stream, {})) for stream in streams],
        },
        schema=KEPT_SCHEMA,
    )


def restore_pruned(table: pa.Table, name: str = "pruned") -> dict[str, PrunedWindows]:
    """By stream: what of it an earlier run had folded away, or laid to rest (`name` "resting")."""
    if name not in table.column_names:
        return {}  # written by an older program
    rows = table.select(["stream", name]).to_pylist()
    return {row["stream"]: PrunedWindows.decode(row[name]) for row in rows if row[name]}


def restore(table: pa.Table, ledger: EventLedger) -> tuple[dict[str, set[str]], dict[str, dict[str, int]]]:
    """Teach an empty ledger what an earlier run knew; returns (the streams' origins, where their newest
    events are)."""
    origins: dict[str, set[str]] = {}
    told: dict[str, dict[str, int]] = {}
    for row in table.to_pylist():
        stream = row["stream"]
        facts = decode_facts(stream, row["facts"], row.get("reports"))
        told[stream] = restore_merged(facts, row.get("merged"))
        ledger.adopt(facts)
        origins[stream] = set(row["origins"] or ())
        ledger.learn_all(tier_events_of([row]))
    return origins, told


def digest(table: pa.Table) -> str:
    """Equal for equal facts: tells whether anything was learnt."""
    content = hashlib.sha256()
    for column in table.columns:
        for value in column.to_pylist():
            content.update(repr(value).encode())
    return content.hexdigest()
