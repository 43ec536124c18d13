"""ListOffsets, versions 0 to 9: where a partition begins and ends, and the offset that belongs to a time.

Special timestamps: -1 the end (high watermark; last stable offset for read_committed), -2 the start, -3 the
record with the largest timestamp (version 7 on), -4 the start of what is local (the same here), -5 the last
tiered offset (none here). Version 0 is written by hand, as the schemas begin at 1; old monitoring tools
speak nothing else. It gives one offset where Apache Kafka may list older segments' too.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from millrace.broker.errors import KafkaError, ProtocolError
from millrace.broker.protocol import wire
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.frames import RequestHead as Head
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.dispatch import Frame

API = Api.LIST_OFFSETS
VERSIONS = range(10)
FRAME_VERSIONS = range(1)

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
CONSUMER = -1
READ_COMMITTED = 1


async def handle(request: Any, context: RequestContext) -> Any:
    committed = getattr(request, "isolation_level", 0) == READ_COMMITTED
    topics = []
    for topic in request.topics:
        partitions = [
            await _look_up(
                topic.name,
                asked.partition_index,
                asked.timestamp,
                getattr(asked, "current_leader_epoch", -1),
                committed,
                request.replica_id,
                context.broker,
            )
            for asked in topic.partitions
        ]
        topics.append({"name": topic.name, "partitions": partitions})
    return answer(API, context.head.version, topics=topics)


async def _look_up(
    topic: str,
    partition: int,
    timestamp: int,
    current_leader_epoch: int,
    committed: bool,
    replica_id: int,
    broker: BrokerServices,
) -> dict[str, Any]:
    found = {"partition_index": partition, "error_code": NO_ERROR, "timestamp": -1, "offset": -1}
    try:
        local = broker.replica_manager.leader_of(topic, partition, current_leader_epoch)
        visible = local.last_stable_offset if committed else local.replica.high_watermark
        end = local.log.end_offset if replica_id != CONSUMER else visible
        if timestamp == LATEST:
            return found | {"offset": end, "leader_epoch": local.replica.leader_epoch}
        if timestamp in (EARLIEST, EARLIEST_LOCAL):
            offset, at_ms = local.log.start_offset, -1
        elif timestamp == MAX_TIMESTAMP:
            newest = await broker.replica_manager.on_disk(local.log.max_timestamp)
            offset, at_ms = newest or (-1, -1)
        elif timestamp == LATEST_TIERED:
            offset, at_ms = -1, -1
        else:
            place = await broker.replica_manager.on_disk(local.log.offset_for_time, timestamp)
            offset, at_ms = place or (-1, -1)
        if offset < 0 or (timestamp not in (EARLIEST, EARLIEST_LOCAL) and offset >= end):
            return found
    except KafkaError as error:
        broker.metrics.count_error(error.code)
        return found | {"error_code": error.code}
    epoch = local.log.leader_epochs.epoch_at(offset)
    return found | {"offset": offset, "timestamp": at_ms, "leader_epoch": epoch}


# -- version 0, by hand ------------------------------------------------------------------------------

_ASKED_V0 = struct.Struct(">iqi")  # partition, timestamp, most offsets wanted
_GIVEN_V0 = struct.Struct(">ih")
_REPLICA_ID_SIZE = 4


def handle_frame(
    head: Head, frame: memoryview, position: int, context: RequestContext
) -> Frame | asyncio.Future[Any]:
    """Version 0: several offsets where later versions give one."""
    return asyncio.ensure_future(_answer_v0(head, decode_v0(frame, position), context.broker))


def decode_v0(frame: memoryview, position: int) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """Topics with (partition, timestamp, most offsets wanted). Raises ProtocolError."""
    topics = []
    position += _REPLICA_ID_SIZE
    try:
        topic_count, position = wire.read_array_size(frame, position, False)
        for _ in range(topic_count):
            name, position = wire.read_string(frame, position)
            if name is None:
                raise ProtocolError("topic name is null")
            count, position = wire.read_array_size(frame, position, False)
            asked = []
            for _ in range(count):
                asked.append(_ASKED_V0.unpack_from(frame, position))
                position += _ASKED_V0.size
            topics.append((name, asked))
    except struct.error:
        raise ProtocolError("list offsets request ends early") from None
    return topics


async def _answer_v0(
    head: Head, topics: list[tuple[str, list[tuple[int, int, int]]]], broker: BrokerServices
) -> Frame:
    out = bytearray(struct.pack(">iii", 0, head.correlation_id, len(topics)))
    for name, asked in topics:
        out += wire.string(name) + struct.pack(">i", len(asked))
        for partition, timestamp, most in asked:
            found = await _look_up(name, partition, timestamp, -1, False, CONSUMER, broker)
            offsets = [found["offset"]] if found["offset"] >= 0 and most > 0 else []
            out += _GIVEN_V0.pack(partition, found["error_code"])
            out += struct.pack(f">i{len(offsets)}q", len(offsets), *offsets)
    struct.pack_into(">i", out, 0, len(out) - 4)
    return out
