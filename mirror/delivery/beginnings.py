"""What a mirror has begun, on record apart from its positions: a position that is lost is then never taken
for one that never was, and a source's first run stays what it was.

Called by `worker`, around the positions. Whatever may happen to the positions topic (somebody deletes or
empties it, a disk is lost), a partition that is on record here and has no position there is a lost one: a
gap, not a new beginning, which would skip or repeat in silence. The format is final:

    topic  millrace.starts.<mirror>, one partition, cleanup.policy=compact
    key    {"source":"ewr","topic":"flights","partition":0}   value {"version":1}
           the partition's first position is on record
    key    {"source":"ewr","topic":"flights"}
    value  {"version":1,"partitions":3,"topic_id":"uuid"}
           so many partitions were there when the source was first looked at, and of which topic: where it is
           another one by the time that a partition begins, what the first one held is a gap. No id: of a
           source without ids, or written by an older program
    key    {"source":"ewr"}                                   value {"version":1,"at_ms":…}
           when that was; written behind all its topics, so where it is they are whole

Order, none of it can be left out: a source's first look is durable before a partition of it has a first
position, however late a worker sees the source; the mark of a partition is written when that position is
durable, and before a record of it is carried. A reader reads marks before positions, so each mark that it has
seen has its position to be seen; and where it sees positions of a source without a first look, it looks for
that once more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.foreign_json import read_json
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID
from millrace.mirror.delivery.checkpoints import Positions, decode_key, encode_key
from millrace.mirror.delivery.system_records import (
    CLUSTER_FAILURES,
    NewFailures,
    SystemRecords,
    Waiting,
    ensure_topic,
    refuse_expiring_topic,
)
from millrace.mirror.topics.own_topics import STARTS
from millrace.mirror.topics.routes import SourcePartition

log = structlog.get_logger("millrace.mirror.delivery.beginnings")

READ_PAUSE_S = 0.2
_MARK = b'{"version":1}'


@dataclass(frozen=True, slots=True)
class SeenTopic:
    """A topic of a source as it was looked at."""

    partitions: int
    topic_id: UUID = NO_TOPIC_ID


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a source had when this mirror first looked at it, and when that was."""

    at_ms: int
    topics: Mapping[str, SeenTopic]

    def seen(self, partition: SourcePartition) -> SeenTopic | None:
        """The topic, if it had this partition then."""
        topic = self.topics.get(partition.topic)
        return topic if topic is not None and partition.partition < topic.partitions else None


@dataclass(frozen=True, slots=True)
class Start:
    """Where a partition begins that was never begun: `at` as a source's `start`. `topic_id`: of the topic
    that is owed, which another one of its name is not; NO_TOPIC_ID: whichever it is."""

    at: str | int
    topic_id: UUID = NO_TOPIC_ID


@dataclass
class Begun:
    """What the topic says: the newest record of each key. Records of another kind are ignored."""

    partitions: set[SourcePartition] = field(default_factory=set)
    first_looks: dict[str, FirstLook] = field(default_factory=dict)
    _topics: dict[str, dict[str, SeenTopic]] = field(default_factory=dict)

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Takes one record, in offset order."""
        if (partition := decode_key(key)) is not None:
            if value is None:
                self.partitions.discard(partition)
            else:
                self.partitions.add(partition)
            return
        try:
            named, told = read_json(key or b""), read_json(value or b"")
            source = str(named["source"])
            if "topic" in named:
                seen = SeenTopic(int(told["partitions"]), UUID(told.get("topic_id", str(NO_TOPIC_ID))))
                self._topics.setdefault(source, {})[str(named["topic"])] = seen
            else:
                at_ms = int(told["at_ms"])
                if 0 <= at_ms < 1 << 63:
                    self.first_looks[source] = FirstLook(at_ms, self._topics.setdefault(source, {}))
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError):
            return

    def lost(self, positions: Positions) -> set[SourcePartition]:
        """Those that were begun and whose positions are gone."""
        return self.partitions - positions.known.keys() - positions.unreadable

    def start(self, partition: SourcePartition, configured: str | int, *, is_first: bool) -> Start:
        """Where a partition that was never begun begins. `start` is for the first run (`is_first`: of its
        source it begins now); what has appeared since begins with its first record. For what was there and
        comes late, `latest` means the time of the first run. What was there is owed, by the topic's id."""
        look = self.first_looks.get(partition.source)
        seen = None if look is None else look.seen(partition)
        topic_id = NO_TOPIC_ID if seen is None else seen.topic_id
        if is_first:
            return Start(configured, topic_id)
        if look is None or seen is None:
            return Start("earliest")
        return Start(look.at_ms if configured == "latest" else configured, topic_id)


def encode_first_look(source: str, look: FirstLook) -> list[tuple[bytes, bytes]]:
    rows = []
    for topic, seen in sorted(look.topics.items()):
        told: dict[str, object] = {"version": 1, "partitions": seen.partitions}
        if seen.topic_id != NO_TOPIC_ID:
            told["topic_id"] = str(seen.topic_id)
        rows.append((_encode({"source": source, "topic": topic}), _encode(told)))
    return [*rows, (_encode({"source": source}), _encode({"version": 1, "at_ms": look.at_ms}))]


def encode_marks(partitions: Iterable[SourcePartition]) -> list[tuple[bytes, bytes]]:
    return [(encode_key(partition), _MARK) for partition in sorted(partitions)]


def _encode(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


class Beginnings:
    """The topic of one mirror. `now_ms`: the time of day."""

    def __init__(
        self, mirror: str, target: Cluster, system: SystemRecords, factor: int, now_ms: Callable[[], int]
    ) -> None:
        self._topic = STARTS.of(mirror)
        self._target = target
        self._system = system
        self._replication_factor = factor
        self._now_ms = now_ms
        self._unmarked: set[SourcePartition] = set()
        self._marking = asyncio.Lock()
        self._looking = asyncio.Lock()
        self._looked_at: set[str] = set()  # sources whose first look is known to be on record

    async def read(self) -> Begun:
        """All of it. To be read before the positions. Asks until it gets it; raises FatalError where the
        topic lets its records expire."""
        failures = NewFailures()
        while True:
            begun = Begun()
            try:
                await ensure_topic(self._target, self._topic, 1, self._replication_factor, STARTS.configs)
                await refuse_expiring_topic(self._target, self._topic)
                async for record in read_topic_to_end(self._target, self._topic):
                    begun.apply(record.key, record.value)
                return begun
            except CLUSTER_FAILURES as error:
                if failures.is_news(error):
                    log.warning("cannot read yet what was begun", topic=self._topic, error=str(error))
                await asyncio.sleep(READ_PAUSE_S)

    async def take_stock(
        self, begun: Begun, positions: Positions, coming: Iterable[SourcePartition]
    ) -> set[str]:
        """Lost positions are noted as such in `positions`; positions without a mark (of a version that set
        none, or of a worker that was killed between the two) get theirs. Gives the sources that nothing is on
        record of: none of their partitions may begin before their first look is (`first_look`)."""
        lost = begun.lost(positions)
        if lost:
            log.error("positions are gone", topic=self._topic, partitions=len(lost))
            positions.unreadable |= lost
        sources = {each.source for each in coming}
        seen = {each.source for each in (*positions.known, *positions.unreadable)}
        if (sources & seen) - begun.first_looks.keys():
            # Another worker may have begun between the reading of this and of the positions.
            begun.first_looks.update((await self.read()).first_looks)
        if unmarked := positions.known.keys() - begun.partitions:
            await self._write(encode_marks(unmarked))
        return sources - seen - begun.first_looks.keys()

    async def first_look(
        self, source: str, topics: Mapping[str, SeenTopic], waiting: Waiting = tuple
    ) -> tuple[Begun, bool]:
        """What was begun by now, the first look at this source with it, and whether that is this one. Another
        worker may have seen the source first. `waiting` says which partitions wait for it to be on record."""
        async with self._looking:
            begun = await self.read()
            is_first = source not in begun.first_looks
            if is_first:
                begun.first_looks[source] = FirstLook(self._now_ms(), dict(topics))
                await self._write(encode_first_look(source, begun.first_looks[source]), waiting)
            self._looked_at.add(source)
            return begun, is_first

    async def nothing_seen(self, source: str) -> None:
        """The source has nothing that is to be carried. If that is the first look, all that comes has
        appeared since, and `latest` would skip what it holds by the time that it is seen."""
        if source not in self._looked_at:
            await self.first_look(source, {})

    async def mark(self, partition: SourcePartition) -> None:
        """Returns when it is on record that the partition has begun. Those that come together are written
        together."""
        self._unmarked.add(partition)
        async with self._marking:
            if partition not in self._unmarked:
                return  # whoever was before has written it
            marked, self._unmarked = self._unmarked, set()
            try:
                await self._write(encode_marks(marked), lambda: marked | self._unmarked)
            except BaseException:
                self._unmarked |= marked
                raise

    async def _write(self, records: list[tuple[bytes, bytes]], waiting: Waiting = tuple) -> None:
        await self._system.write(self._topic, records, configs=STARTS.configs, waiting=waiting)
