"""What the audit must say of one topic, from what was done to it and the rules of its verdict table.

A `Truth` is told everything as it happens: what applications handed over and were told of it, what the source
logs held (read by a foreign client), what the mirror carried, lost and repeated, what a group got. `expected`
then gives every row of the reconciliation. Plain sets over single records; nothing of the audit's code.

What the audit could read once and keep (below the mirror's position, in a run that committed) it knows for
ever; what was gone before that nobody can know, and only such records may be UNKNOWN.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.spark.end_to_end_world import AGGREGATE, Logged

PRODUCED = "produced"
WINDOW_MS = 1000
Hop = tuple[str, str]
Key = tuple[str, int | None]
"""(producer, window start); None: the producer's own row"""


@dataclass(slots=True)
class Stream:
    """One producer's stream; names are unique, so they stand for the stream. `told` is what its events say:
    all that was acknowledged, but for a producer that died. `counted` streams have no numbers."""

    producer: str
    source: str
    counted: bool = False
    created: dict[int, int] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)
    ambiguous: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    told_windows: set[int] = field(default_factory=set)
    last_assigned: int = 0
    alive: bool = False
    silent: bool = False
    ahead: bool = False
    """its clock is so far ahead that its windows have not ended"""

    def window(self, sequence: int) -> int:
        return self.created[sequence] - self.created[sequence] % WINDOW_MS

    def in_window(self, sequences: Iterable[int], start_ms: int) -> set[int]:
        return {each for each in sequences if self.window(each) == start_ms}


@dataclass(slots=True)
class Partition:
    """One log of one incarnation of the topic in a source. `records` is everything that it ever held, `start`
    where it begins now, `kept` what committed runs of the audit know, `carried` what the mirror has passed,
    `gaps` {offset: class} what it could not carry."""

    records: dict[int, Logged] = field(default_factory=dict)
    start: int = 0
    position: int = 0
    audited_to: int | None = None
    kept: set[int] = field(default_factory=set)
    carried: set[int] = field(default_factory=set)
    gaps: dict[int, str] = field(default_factory=dict)

    def readable(self) -> set[int]:
        return {offset for offset in self.records if offset >= self.start}


@dataclass(slots=True)
class Row:
    """One row as it must be. `settled` is what its producer told, `over` its end; from then on what is not
    proven counts."""

    verdict: str = "PROVEN"
    settled: bool = True
    over: bool = True
    published: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    missing: dict[Hop, set[int]] = field(default_factory=dict)
    missing_count: dict[Hop, int] = field(default_factory=dict)
    in_flight: dict[Hop, set[int]] = field(default_factory=dict)
    duplicates: dict[str, set[int]] = field(default_factory=dict)
    extra_copies: dict[str, int] = field(default_factory=dict)
    unreported: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    explained: dict[str, set[int]] = field(default_factory=dict)
    content_differs: bool = False
    may_lag: dict[Hop, set[int]] = field(default_factory=dict)
    """of `missing`: nothing that arrived proves it of a mirror that keeps no positions"""

    @property
    def state(self) -> str:
        doubtful = self.verdict not in ("PROVEN", "COUNT_MATCH")
        return "SETTLED" if self.settled or (self.over and doubtful) else "OPEN"

    def decide(self, proven: str) -> None:
        self.verdict = proven
        if self.missing or self.missing_count or self.content_differs:
            self.verdict = "LOSS"
        elif self.extra_copies:
            self.verdict = "DUPLICATE"
        elif self.in_flight or self.unreported or self.unknown or self.explained:
            self.verdict = "UNKNOWN"


@dataclass(slots=True)
class Group:
    """What an audited consumer group got (`got`: how often each name), and what it passed: all names that lay
    in the cluster's log below its committed offsets."""

    name: str
    cluster: str
    got: Counter[str] = field(default_factory=Counter)
    passed: set[str] = field(default_factory=set)

    @property
    def tier(self) -> str:
        return f"group:{self.name}"


class Truth:
    """Of one topic. `logs` {source: {partition: Partition}} are those of the topic as it is now, `old` those
    of deleted ones, `lost`/`repeated`/`changed` the names that the mirror harms. `spoilt` {name: how} are
    those of which it harms the identity, `strange` {name: reason} those that had none in the source."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.streams: dict[str, Stream] = {}
        self.logs: dict[str, dict[int, Partition]] = {}
        self.old: list[tuple[str, Partition]] = []
        self.lost: set[str] = set()
        self.repeated: set[str] = set()
        self.changed: set[str] = set()
        self.spoilt: dict[str, str] = {}
        self.strange: dict[str, str] = {}
        self.group: Group | None = None
        self.blind: set[str] = set()
        self.content = False
        self.foreign = False

    # --- what happens ----------------------------------------------------------------------------

    def look(self, source: str, records: Iterable[Logged], partitions: int) -> None:
        """Everything that a source's log holds now."""
        logs = self.logs.setdefault(source, {})
        for number in range(partitions):
            logs.setdefault(number, Partition())
        for record in records:
            logs[record.partition].records[record.offset] = record

    def carry(self, source: str, positions: Mapping[int, int], gaps: Mapping[int, Mapping[int, str]]) -> None:
        """The mirror stands at these positions; `gaps` {partition: {offset: class}} it passed over."""
        for number, partition in self.logs[source].items():
            partition.position = positions.get(number, 0)
            partition.gaps.update(gaps.get(number, {}))
            passed = {offset for offset in partition.readable() if offset < partition.position}
            partition.carried |= passed - set(partition.gaps)

    def recreate(self, source: str) -> None:
        for partition in self.logs[source].values():
            partition.start = 1 << 62
            partition.position = 1 << 62
            self.old.append((source, partition))
        known = any(each.audited_to is not None for each in self.logs[source].values())
        self.logs[source] = {}
        if known:
            self.blind.add(source)

    def about_to_audit(self) -> None:
        """What a run notes as gone before it could read it."""
        for source, partitions in self.logs.items():
            for partition in partitions.values():
                if partition.start > (partition.audited_to or 0):
                    self.blind.add(source)

    def audited(self) -> None:
        """A run has committed: what lies below the mirror's positions is known for ever."""
        for partitions in self.logs.values():
            for partition in partitions.values():
                partition.kept |= {o for o in partition.readable() if o < partition.position}
                partition.audited_to = max(partition.position, partition.start)

    # --- what must be said ------------------------------------------------------------------------

    def expected(self) -> dict[Key, Row]:
        rows: dict[Key, Row] = {}
        for stream in self.streams.values():
            rows.update(self._counted(stream) if stream.counted else self._numbered(stream))
        return rows

    def _partitions(self, source: str) -> list[Partition]:
        old = [partition for name, partition in self.old if name == source]
        return [*self.logs.get(source, {}).values(), *old]

    def _copies_there(self, record: Logged) -> int:
        if record.name in self.lost:
            return 0
        return 2 if record.name in self.repeated else 1

    def _readable_there(self, record: Logged) -> int:
        """Copies there that can be told to be this record's."""
        unreadable = self.spoilt.get(record.name, "name") != "name" or not record.producer
        return 0 if unreadable else self._copies_there(record)

    def is_doubted(self, stream: Stream) -> bool:
        """Another producer's name stands in headers under its id."""
        if stream.producer not in {
            name.partition("#")[0] for name, how in self.spoilt.items() if how == "name"
        }:
            return False
        copies = self.arrivals()
        return any(
            how == "name" and copies[name]
            for name, how in self.spoilt.items()
            if name.partition("#")[0] == stream.producer
        )

    def arrivals(self) -> Counter[str]:
        """{name: copies} that the aggregate must hold."""
        found: Counter[str] = Counter()
        for source in self.logs:
            for partition in self._partitions(source):
                for offset in partition.carried:
                    record = partition.records[offset]
                    found[record.name] += self._copies_there(record)
        return +found

    def _numbered(self, stream: Stream) -> dict[Key, Row]:
        source = stream.source
        at_source: dict[int, list[tuple[Partition, Logged]]] = defaultdict(list)
        in_aggregate: Counter[int] = Counter()
        for partition in self._partitions(source):
            for offset, record in partition.records.items():
                if record.producer != stream.producer:
                    continue
                if offset in partition.kept or offset >= partition.start:
                    at_source[record.sequence].append((partition, record))
                if offset in partition.carried:
                    in_aggregate[record.sequence] += self._readable_there(record)
        in_aggregate = +in_aggregate
        proven = self._proven_by_arrivals(source) if self.foreign else None
        got, group = Counter[int](), self.group
        if group is not None:
            for name, count in group.got.items():
                producer, _, sequence = name.partition("#")
                if producer == stream.producer:
                    got[int(sequence)] += count
        arrived_there = set(in_aggregate) | (set(got) if group and group.cluster == AGGREGATE else set())
        arrived = set(at_source) | arrived_there | set(got)
        rows: dict[Key, Row] = {}
        everything = arrived | stream.acknowledged | stream.failed
        doubted = self.is_doubted(stream)
        for start_ms in sorted({stream.window(each) for each in everything} | stream.told_windows):
            row = rows[stream.producer, start_ms] = Row(
                settled=not (stream.alive or stream.ahead), over=not stream.ahead
            )
            mine = stream.in_window(everything, start_ms)
            row.published = len(mine & stream.acknowledged)
            row.seen = {source: len(mine & set(at_source)), AGGREGATE: len(mine & set(in_aggregate))}
            never = mine & stream.acknowledged - arrived
            if never and source in self.blind:
                row.unknown |= never
            elif never:
                row.missing[PRODUCED, source] = never
            self._file_hop(row, mine & arrived - arrived_there, (source, AGGREGATE), at_source, proven)
            self._file_copies(row, mine, source, {n: len(at) for n, at in at_source.items()}, {})
            self._file_copies(row, mine, AGGREGATE, in_aggregate, {n: len(at) for n, at in at_source.items()})
            if group is not None and group.cluster in (source, AGGREGATE):
                above = arrived_there if group.cluster == AGGREGATE else arrived
                upper = in_aggregate
                if group.cluster != AGGREGATE:
                    upper = Counter({n: len(at) for n, at in at_source.items()})
                self._file_group(row, stream, mine & above - set(got), group)
                self._file_copies(row, mine, group.tier, got, upper)
                row.seen[group.tier] = len(mine & set(got))
            row.unreported = mine & arrived - stream.acknowledged - stream.ambiguous
            if self.content and any(f"{stream.producer}#{each}" in self.changed for each in mine):
                row.content_differs = True
            row.decide("UNKNOWN" if doubted else "PROVEN")
        known = everything | stream.ambiguous
        holes = set(range(1, max(stream.last_assigned, max(known, default=0)) + 1)) - known
        if stream.silent or doubted or holes:
            rows[stream.producer, None] = Row(verdict="UNKNOWN", unknown=holes)
        return rows

    @staticmethod
    def _file_hop(
        row: Row,
        missing: set[int],
        hop: Hop,
        at_source: Mapping[int, list[tuple[Partition, Logged]]],
        proven: set[tuple[int, int]] | None,
    ) -> None:
        for sequence in missing:
            copies = at_source[sequence]
            gaps = [partition.gaps.get(record.offset) for partition, record in copies]
            if all(gaps):
                row.explained.setdefault(str(gaps[0]), set()).add(sequence)
            elif all(record.offset < partition.position for partition, record in copies):
                row.missing.setdefault(hop, set()).add(sequence)
                if proven is not None and not {(r.partition, r.offset) for _, r in copies} <= proven:
                    row.may_lag.setdefault(hop, set()).add(sequence)
            else:
                row.in_flight.setdefault(hop, set()).add(sequence)

    def _proven_by_arrivals(self, source: str) -> set[tuple[int, int]]:
        """{(partition, offset)} that a mirror which keeps the order has passed, as what arrived shows.

        Records of one producer and window in one partition are looked at together: of which all arrived, the
        last shows it. What stands in the source twice shows nothing. It is less than the audit may find out.
        """
        times = Counter(r.name for p in self.logs.get(source, {}).values() for r in p.records.values())
        found = set()
        for number, partition in self.logs.get(source, {}).items():
            together: dict[tuple[str, int], list[int]] = defaultdict(list)
            for offset in partition.kept | partition.readable():
                record = partition.records[offset]
                if not record.producer:
                    continue
                together[record.producer, record.created_ms // WINDOW_MS].append(offset)
            passed = -1
            for offsets in together.values():
                records = [partition.records[offset] for offset in offsets]
                if all(
                    record.offset in partition.carried
                    and self._readable_there(record)
                    and times[record.name] == 1
                    for record in records
                ):
                    passed = max(passed, *offsets)
            found |= {(number, o) for offsets in together.values() if max(offsets) <= passed for o in offsets}
        return found

    @staticmethod
    def _file_copies(
        row: Row, mine: set[int], tier: str, here: Mapping[int, int], above: Mapping[int, int]
    ) -> None:
        """Copies that are more here than above are named here."""
        for sequence in mine:
            extra = max(here.get(sequence, 0) - 1, 0) - max(above.get(sequence, 0) - 1, 0)
            if extra > 0:
                row.duplicates.setdefault(tier, set()).add(sequence)
                row.extra_copies[tier] = row.extra_copies.get(tier, 0) + extra

    @staticmethod
    def _file_group(row: Row, stream: Stream, missing: set[int], group: Group) -> None:
        """The group began with the first record of every partition, so it answers for all that it passed,
        although the records were created years before."""
        for sequence in missing:
            kept = row.missing if f"{stream.producer}#{sequence}" in group.passed else row.in_flight
            kept.setdefault((group.cluster, group.tier), set()).add(sequence)

    def _counted(self, stream: Stream) -> dict[Key, Row]:
        at_source: Counter[int] = Counter()
        in_aggregate: Counter[int] = Counter()
        for partition in self._partitions(stream.source):
            for offset, record in partition.records.items():
                if record.producer == stream.producer:
                    start_ms = record.created_ms - record.created_ms % WINDOW_MS
                    at_source[start_ms] += 1
                    if offset in partition.carried:
                        in_aggregate[start_ms] += self._copies_there(record)
        rows: dict[Key, Row] = {}
        told = Counter(stream.window(each) for each in stream.acknowledged)
        for start_ms in {*told, *at_source}:
            row = rows[stream.producer, start_ms] = Row(published=told[start_ms])
            row.seen = {stream.source: at_source[start_ms], AGGREGATE: in_aggregate[start_ms]}
            surplus = in_aggregate[start_ms] - at_source[start_ms]
            if surplus < 0:
                row.missing_count[stream.source, AGGREGATE] = -surplus
            elif surplus > 0:
                row.extra_copies[AGGREGATE] = surplus
            row.decide("COUNT_MATCH")
        return rows
