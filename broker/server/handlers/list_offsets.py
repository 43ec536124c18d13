"""ListOffsets, versions 0 to 9: where a partition begins and ends, and the offset that belongs to a time.

Special timestamps: -1 the end (high watermark; last stable offset for read_committed), -2 the start, -3 the
record with the largest timestamp (version 7 on), -4 the start of what is local (8; the same here), -5 the
last tiered offset (9; none here). A leader whose high watermark has not reached the beginning of its own
epoch does not know the end yet: OFFSET_NOT_AVAILABLE, and LEADER_NOT_AVAILABLE before version 5 (KIP-207).

Version 0 is written by hand, as the schemas begin at 1; old monitoring tools speak nothing else. It gives up
to as many offsets as are asked for, newest first: the end, and the starts of older segments. A time there is
compared with when a segment was last written, as in Apache Kafka. It may name a partition more than once, for
its beginning and its end, but not very often: each is looked up in, and answered with, all of its segments.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

from millrace.broker.errors import (
    InvalidRequest,
    KafkaError,
    LeaderNotAvailable,
    OffsetNotAvailable,
    ProtocolError,
    UnsupportedVersion,
)
from millrace.broker.protocol import wire
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.frames import RequestHead as Head
from millrace.broker.replication.off_loop import SLICE_LENGTH
from millrace.broker.server.answers import NO_ERROR, answer_of, item_count
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.dispatch import MOST_ITEMS, Frame

API = Api.LIST_OFFSETS
VERSIONS = range(10)
FRAME_VERSIONS = range(1)

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
FIRST_VERSION_WITH = {LATEST: 0, EARLIEST: 0, MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9}
CONSUMER = -1
READ_COMMITTED = 1
FIRST_WITH_OFFSET_NOT_AVAILABLE = 5
MOST_TIMES_V0 = 10


async def handle(request: Any, context: RequestContext) -> Any:
    times = Counter(
        (topic.name, asked.partition_index) for topic in request.topics for asked in topic.partitions
    )
    topics = []
    turns = 0
    for topic in request.topics:
        partitions = []
        # One answer for each partition, however often it was asked for.
        for asked in {asked.partition_index: asked for asked in topic.partitions}.values():
            turns += 1
            if turns % SLICE_LENGTH == 0:
                await asyncio.sleep(0)
            given = {"partition_index": asked.partition_index, "error_code": NO_ERROR}
            try:
                if times[topic.name, asked.partition_index] > 1:
                    raise InvalidRequest(f"{topic.name}-{asked.partition_index} is asked for more than once")
                found = await _look_up(topic.name, asked, request, context)
                given |= dict(zip(("offset", "timestamp", "leader_epoch"), found, strict=True))
            except KafkaError as error:
                given |= {"error_code": error.code, "offset": -1, "timestamp": -1, "leader_epoch": -1}
            partitions.append(given)
        topics.append({"name": topic.name, "partitions": partitions})
    return await answer_of(item_count(topics), context.head, topics=topics)


async def _look_up(topic: str, asked: Any, request: Any, context: RequestContext) -> tuple[int, int, int]:
    """(offset, timestamp, leader epoch) that belong to what is asked for; -1 each for none. Raises
    KafkaErrors."""
    version, replicas, timestamp = context.head.version, context.broker.replica_manager, asked.timestamp
    if timestamp < 0 and version < FIRST_VERSION_WITH.get(timestamp, version + 1):
        raise UnsupportedVersion(f"timestamp {timestamp} has no meaning in version {version}")
    epoch = getattr(asked, "current_leader_epoch", -1)
    local = replicas.leader_of(topic, asked.partition_index, epoch)
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        offset = local.log.start_offset
        return offset, -1, local.log.leader_epochs.epoch_at(offset)
    if timestamp == LATEST_TIERED:
        return -1, -1, -1
    place: tuple[int, int] | None = None
    if timestamp == MAX_TIMESTAMP:
        place = await replicas.on_disk_as_leader(local, local.log.max_timestamp)
    elif timestamp != LATEST:
        place = await replicas.on_disk_as_leader(local, local.log.offset_for_time, timestamp)
    if request.replica_id != CONSUMER:
        end, is_known = local.log.end_offset, True
    else:
        is_known = local.replica.latest_is_known
        committed = getattr(request, "isolation_level", 0) == READ_COMMITTED
        end = local.last_stable_offset if committed else local.replica.high_watermark
    if timestamp == LATEST and is_known:
        return end, -1, local.replica.leader_epoch
    if place is None or place[0] >= end:
        if not is_known:
            raise _not_available(version)
        return -1, -1, -1
    return *place, local.log.leader_epochs.epoch_at(place[0])


def _not_available(version: int) -> KafkaError:
    reason = "the high watermark has not reached the beginning of this leader's epoch yet"
    if version >= FIRST_WITH_OFFSET_NOT_AVAILABLE:
        return OffsetNotAvailable(reason)
    return LeaderNotAvailable(reason)


# -- version 0, by hand ------------------------------------------------------------------------------

_ASKED_V0 = struct.Struct(">iqi")  # partition, timestamp, most offsets wanted
_GIVEN_V0 = struct.Struct(">ih")
_INT32 = struct.Struct(">i")

AskedV0 = tuple[int, int, int]
"""(partition, timestamp, most offsets wanted)"""


def handle_frame(
    head: Head, frame: memoryview, position: int, context: RequestContext
) -> Frame | asyncio.Future[Any]:
    """Version 0: several offsets where later versions give one."""
    replica_id, topics = decode_v0(frame, position)
    broker = context.broker
    times = Counter((name, partition) for name, asked in topics for partition, _, _ in asked)
    out = bytearray(struct.pack(">iii", 0, head.correlation_id, len(topics)))
    for name, asked in topics:
        out += wire.string(name) + _INT32.pack(len(asked))
        for partition, timestamp, most in asked:
            error_code = NO_ERROR
            offsets: Sequence[int] = ()
            try:
                if times[name, partition] > MOST_TIMES_V0:
                    raise InvalidRequest(f"{name}-{partition} is asked for more than {MOST_TIMES_V0} times")
                offsets = _look_up_v0(name, partition, timestamp, most, replica_id, broker)
            except KafkaError as error:
                broker.metrics.count_error(error.code)
                error_code = error.code
            out += _GIVEN_V0.pack(partition, error_code)
            out += struct.pack(f">i{len(offsets)}q", len(offsets), *offsets)
    _INT32.pack_into(out, 0, len(out) - _INT32.size)
    return out


def decode_v0(frame: memoryview, position: int) -> tuple[int, list[tuple[str, list[AskedV0]]]]:
    """The replica id (-1 for consumers) and what is asked for by topic. Raises ProtocolError."""
    topics = []
    items_left = MOST_ITEMS
    try:
        (replica_id,) = _INT32.unpack_from(frame, position)
        topic_count, position = wire.read_array_size(frame, position + _INT32.size, False)
        for _ in range(topic_count):
            name, position = wire.read_string(frame, position)
            if name is None:
                raise ProtocolError("topic name is null")
            count, position = wire.read_array_size(frame, position, False)
            items_left -= 1 + count
            if items_left < 0:
                raise ProtocolError("list offsets request holds too many items")
            asked = []
            for _ in range(count):
                asked.append(_ASKED_V0.unpack_from(frame, position))
                position += _ASKED_V0.size
            topics.append((name, asked))
    except struct.error:
        raise ProtocolError("list offsets request ends early") from None
    return replica_id, topics


def _look_up_v0(
    topic: str, partition: int, timestamp: int, most: int, replica_id: int, broker: BrokerServices
) -> Sequence[int]:
    """Offsets, newest first. Raises KafkaErrors."""
    if timestamp < EARLIEST:
        raise UnsupportedVersion(f"timestamp {timestamp} has no meaning in version 0")
    local = broker.replica_manager.leader_of(topic, partition)
    first = local.log.start_offset
    starts = [(max(segment.base_offset, first), segment.modified_ms) for segment in local.log.segments]
    offsets = offsets_before(starts, local.log.end_offset, timestamp, most, broker.clock.now_ms())
    visible = local.replica.high_watermark
    if replica_id == CONSUMER and offsets and offsets[0] > visible:
        return [visible, *(offset for offset in offsets if offset <= visible)]
    return offsets


def offsets_before(
    starts: Sequence[tuple[int, int]], end_offset: int, timestamp: int, most: int, now_ms: int
) -> Sequence[int]:
    """The newest `most` places of a log that had been reached at a time, newest first.

    `starts` are (first offset, when last written in ms) of its segments, oldest first; the end counts as
    written now. Apache Kafka's rule for version 0.
    """
    places = [*starts, (end_offset, now_ms)] if starts and end_offset > starts[-1][0] else list(starts)
    if timestamp == EARLIEST:
        places = places[:1]
    elif timestamp != LATEST:
        while places and places[-1][1] > timestamp:
            places.pop()
    return sorted((offset for offset, _ in places[max(len(places) - max(most, 0), 0) :]), reverse=True)
