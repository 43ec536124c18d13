"""Reading a small topic whole: from its beginning to where it ended when the reading began.

For topics that are read as a table (positions, audit events): the ends are pinned first, so the reading
ends although others write, and whatever was acknowledged before the call is in it.

Offsets have holes (compaction, control batches, aborted transactions), so an end is reached by position and
never by counting: a position is the offset after the last batch seen, data or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import NamedTuple

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.committed import committed_batches
from millrace.broker.client.offsets import EARLIEST, LATEST, local_start
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition, fetch
from millrace.broker.errors import (
    KafkaError,
    LeaderNotAvailable,
    OffsetOutOfRange,
    RequestTimedOut,
    UnknownTopicOrPartition,
    error_for_code,
)
from millrace.broker.protocol.batch import verify_crc
from millrace.broker.protocol.records import read_fields
from millrace.broker.protocol.topic_partition import TopicPartition

_MAX_WAIT_MS = 100
# Of what lies in a remote store alone: Apache Kafka gives nothing out of it to those that do not wait (before
# KIP-1018).
_STORE_WAIT_MS = 500
_PARTITION_MAX_BYTES = 4 << 20
# Who reads a table has other things to do meanwhile: a heartbeat's answer, for one, waits for its turn.
RECORDS_A_TURN = 500
# Empty answers in a row from a leader whose high watermark says that there is more, before a hole that
# reaches the pinned end is believed, if it is one of the leader's own disk: a store that is away is no hole.
_HOLE_AFTER_EMPTY_COUNT = 3
# After so long in which a leader has nothing more to give and its high watermark is below the pinned end, it
# is asked where the log ends.
_SHORT_FOR_SECONDS = 30.0


class TopicRecord(NamedTuple):
    """A record and where it stood."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


async def read_topic_to_end(
    cluster: Cluster,
    topic: str,
    *,
    read_committed: bool = True,
    since: Mapping[int, int] | None = None,
    until: Mapping[int, int] | None = None,
) -> AsyncIterator[TopicRecord]:
    """Every record of the topic up to the ends of its partitions at the time of the call.

    With `read_committed` these are the last stable offsets: what is in an open transaction is left out.
    `since` {partition: offset} begins later. `until` has the ends that the caller pinned before, of the
    partitions that it wants: every transaction that has written below them is waited for.

    In order within a partition, partitions mixed. CRCs are checked. Retries through leader changes and lost
    connections as long as the cluster answers at all within its request timeout; records are given once.
    Raises UnknownTopicOrPartition (also for a partition of `until` that is not there), CorruptMessage,
    ClusterUnreachable, OffsetOutOfRange where a partition has become shorter than it was at the time of the
    call, RequestTimedOut where a remote store gives nothing for that long, …
    """
    view = await cluster.metadata([topic], max_age_ms=0)
    partitions = view.partitions(topic)
    if not partitions:
        code = view.topic_errors.get(topic, UnknownTopicOrPartition.code)
        raise error_for_code(code, f"{cluster}: topic {topic}: {error_for_code(code)}")
    # The end first: a beginning that moves between the two questions then only skips what has expired.
    if until is not None:
        if unknown := until.keys() - {partition for _, partition in partitions}:
            # Its records are wanted, and an answer that does not know it is no word that it has none.
            raise UnknownTopicOrPartition(f"{cluster}: {topic}-{min(unknown)} does not exist now")
        ends = {key: until[key[1]] for key in partitions if key[1] in until}
    else:
        latest = dict.fromkeys(partitions, LATEST)
        told = await cluster.list_offsets(latest, read_committed)
        ends = {key: each.offset for key, each in told.items()}
    begins = await cluster.list_offsets(dict.fromkeys(partitions, EARLIEST))
    first = {key: max(begins[key].offset, (since or {}).get(key[1], 0)) for key in partitions}
    reading = {
        key: _Reading(key, first[key], end, read_committed) for key, end in ends.items() if first[key] < end
    }
    loop = asyncio.get_running_loop()
    while reading:
        for fetched in await cluster.retrying(lambda: _fetch_round(cluster, reading, read_committed)):
            key = (fetched.topic, fetched.partition)
            if fetched.error_code:
                begins = await cluster.list_offsets({key: EARLIEST})
                reading[key].skip_to_begin(begins[key].offset)
            now = loop.time()
            since_turn = 0
            for records in reading[key].take(fetched, now):
                for record in records:
                    yield record
                since_turn += len(records)
                if since_turn >= RECORDS_A_TURN:
                    since_turn = 0
                    await asyncio.sleep(0)
            if reading[key].looks_short(now):
                await _check_end(cluster, reading[key])
            if reading[key].looks_like_a_hole:
                await _check_hole(cluster, reading[key], now)
            if reading[key].is_done:
                del reading[key]


async def _check_end(cluster: Cluster, reading: _Reading) -> None:
    """Raises OffsetOutOfRange where an election that was not clean has taken the pinned end.

    A new leader that has all of it, and waits for others to have it too, refuses to name an end (KIP-207).
    """
    try:
        found = await cluster.list_offsets({reading.key: LATEST})
    except KafkaError as error:
        if not error.retriable:
            raise
        return
    if found[reading.key].offset < reading.end:
        raise reading.is_short(f"its end is {found[reading.key].offset}")


async def _check_hole(cluster: Cluster, reading: _Reading, now: float) -> None:
    """Takes what is not given up to the pinned end for a hole; raises RequestTimedOut where it lies in a
    remote store, which has given nothing for the request timeout."""
    if reading.position >= await local_start(cluster, reading.key):
        reading.position = reading.end
        return
    reading.max_wait_ms = _STORE_WAIT_MS
    if now - reading.empty_since >= cluster.request_timeout_ms / 1000:
        topic, partition = reading.key
        raise RequestTimedOut(
            f"{cluster}: {topic}-{partition}: nothing is given of its remote store, at offset "
            f"{reading.position}, within {cluster.request_timeout_ms:.0f} ms"
        )


async def _fetch_round(
    cluster: Cluster, reading: Mapping[TopicPartition, _Reading], read_committed: bool
) -> list[FetchedPartition]:
    """One fetch from every leader: the answers that are of use, those with OffsetOutOfRange among them.

    Raises an error only when there is no such answer; a retriable one where there is the choice.
    """
    view = await cluster.metadata(sorted({topic for topic, _ in reading}))
    groups = view.by_leader(reading)
    leaderless = groups.pop(None, [])
    asked = [
        fetch(
            cluster,
            node_id,
            {key: FetchPosition(reading[key].position) for key in keys},
            max_wait_ms=max(reading[key].max_wait_ms for key in keys),
            partition_max_bytes=_PARTITION_MAX_BYTES,
            read_committed=read_committed,
            purpose="read to end",
        )
        for node_id, keys in groups.items()
        if node_id is not None
    ]
    useful: list[FetchedPartition] = []
    problems: list[BaseException] = []
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, BaseException):
            problems.append(answer)
            continue
        is_empty = not any(each.records for each in answer)
        for each in answer:
            if each.error_code in (0, OffsetOutOfRange.code):
                # Beside the records of others an empty one says nothing: they may have taken all the room.
                if is_empty or each.records or each.error_code:
                    useful.append(each)
            else:
                plain = error_for_code(each.error_code)
                where = f"{cluster}: reading {each.topic}-{each.partition}"
                problems.append(error_for_code(each.error_code, f"{where}: {plain}"))
    if useful:
        return useful
    if leaderless:
        cluster.invalidate()
        topic, partition = min(leaderless)
        problems.append(LeaderNotAvailable(f"{cluster}: {topic}-{partition} has no leader now"))
    problems.sort(key=lambda error: isinstance(error, KafkaError) and error.retriable)
    raise problems[0]


class _Reading:
    """One partition's way to its pinned end."""

    def __init__(self, key: TopicPartition, position: int, end: int, read_committed: bool) -> None:
        self.key = key
        self.position = position
        self.end = end
        self.max_wait_ms = _MAX_WAIT_MS
        self.empty_since = 0.0
        self._read_committed = read_committed
        self._empty_count = 0
        self._short_since: float | None = None

    @property
    def is_done(self) -> bool:
        return self.position >= self.end

    def take(self, fetched: FetchedPartition, now: float) -> Iterator[list[TopicRecord]]:
        """The records of an answer that lie between the position and the end, batch by batch; moves the
        position, behind the last one. `now` is in seconds of one steady clock. Raises CorruptMessage."""
        before = self.position
        aborted = fetched.aborted if self._read_committed else ()
        for batch, header, is_data in committed_batches(fetched.records, aborted):
            verify_crc(batch, 0, header)
            if is_data or (not self._read_committed and not header.is_control):
                yield self._wanted(batch)
            self.position = max(self.position, header.next_offset)
        self._note_progress(fetched, now, self.position > before)

    def _wanted(self, batch: memoryview) -> list[TopicRecord]:
        topic, partition = self.key
        return [
            TopicRecord(topic, partition, *fields)
            for fields in read_fields(batch)
            if self.position <= fields[0] < self.end
        ]

    def skip_to_begin(self, begin: int) -> None:
        """The position is out of range. Retention took what was to be read next, or the partition became
        shorter than its pinned end: the latter raises OffsetOutOfRange."""
        if begin > self.position:
            self.position = begin
            return
        raise self.is_short(f"offset {self.position} is not there any more")

    def is_short(self, now: str) -> OffsetOutOfRange:
        """The error to raise; `now` says what is there instead."""
        topic, partition = self.key
        return OffsetOutOfRange(
            f"{topic}-{partition} ended at offset {self.end} when reading began, now {now}: "
            "it was truncated or made anew"
        )

    def _note_progress(self, fetched: FetchedPartition, now: float, moved: bool) -> None:
        """Counts the answers with nothing from a leader that has the end."""
        if fetched.error_code:
            return
        stable = fetched.last_stable_offset if self._read_committed else fetched.high_watermark
        self._empty_count = 0 if moved or stable < self.end else self._empty_count + 1
        if self._empty_count == 1:
            self.empty_since = now
        if moved or fetched.high_watermark >= self.end:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now

    @property
    def looks_like_a_hole(self) -> bool:
        """Whether to ask if there is one up to the end."""
        return self._empty_count >= _HOLE_AFTER_EMPTY_COUNT

    def looks_short(self, now: float) -> bool:
        """Whether to ask where the log ends; not again at once."""
        if self._short_since is None or now - self._short_since < _SHORT_FOR_SECONDS:
            return False
        self._short_since = now
        return True
