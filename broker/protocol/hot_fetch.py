"""Fetch requests and responses, written by hand for both sides: versions 4 to 17.

A fetch response is encoded as a list of buffers around the log's own bytes and decoded into views of the
frame: no record byte is copied on either side. `kio` is the oracle in tests.

Topics go by name up to version 12 and by id from 13 on; the type of `topic` says which (`str` or `UUID`).

Called by the server's fetch handler and the client's `raw_fetch`. Pure. Decoders raise ProtocolError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple
from uuid import UUID

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol import wire
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.leader_hints import Node, encode_leader, encode_node_endpoints

VERSIONS = range(4, 18)
FIRST_FLEXIBLE = 12
FIRST_WITH_TOPIC_IDS = 13
FIRST_WITH_DIVERGING_EPOCH = 12
_FIRST_WITH_LOG_START_OFFSET = 5
FIRST_WITH_SESSIONS = 7
_FIRST_WITH_LEADER_EPOCH = 9
FIRST_WITH_RACK = 11
_FIRST_WITH_REPLICA_STATE = 15
_FIRST_WITH_NODES = 16

MOST_ITEMS = 100_000
"""Topics of one request, and partitions, forgotten ones and tagged fields: no broker leads as many, and each
costs memory and time until it is answered."""

_NO_NODES: Mapping[int, Node] = {}

_TAG_REPLICA_STATE = 1
_TAG_DIVERGING_EPOCH = 0
_TAG_CURRENT_LEADER = 1

_INT32 = struct.Struct(">i")
_HEAD = struct.Struct(">ihhih")
_LIMITS = struct.Struct(">iiib")  # max wait, min bytes, max bytes, isolation level
_SESSION = struct.Struct(">ii")
_REPLICA_STATE = struct.Struct(">iq")
_EPOCH_AND_OFFSET = struct.Struct(">iq")
_LEADER = struct.Struct(">ii")
_ABORTED = struct.Struct(">qq")
_SIZE_AND_CORRELATION = struct.Struct(">ii")

# One partition of a request, from the first version that has these fields.
_ASKED_V4 = struct.Struct(">iqi")
_ASKED_V5 = struct.Struct(">iqqi")
_ASKED_V9 = struct.Struct(">iiqqi")
_ASKED_V12 = struct.Struct(">iiqiqi")
# The fixed part of one partition of a response.
_GIVEN_V4 = struct.Struct(">ihqq")
_GIVEN_V5 = struct.Struct(">ihqqq")

Topic = str | UUID


class PartitionFetch(NamedTuple):
    """What is asked of one partition."""

    topic: Topic
    partition: int
    fetch_offset: int
    max_bytes: int
    current_leader_epoch: int = -1
    last_fetched_epoch: int = -1
    log_start_offset: int = -1


class FetchRequest(NamedTuple):
    """`session_epoch` -1 asks for no session; `forgotten` are (topic, partition) that leave a session."""

    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    read_committed: bool
    partitions: Sequence[PartitionFetch]
    session_id: int = 0
    session_epoch: int = -1
    forgotten: Sequence[tuple[Topic, int]] = ()
    rack_id: str = ""
    replica_id: int = -1
    replica_epoch: int = -1


class PartitionData(NamedTuple):
    """What is given of one partition. `aborted` is None where the request read uncommitted."""

    topic: Topic
    partition: int
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    records: Buffer = b""
    aborted: Sequence[tuple[int, int]] | None = None
    preferred_read_replica: int = -1
    diverging: tuple[int, int] | None = None
    current_leader: tuple[int, int] | None = None


class FetchResponse(NamedTuple):
    throttle_ms: int
    error_code: int
    session_id: int
    partitions: list[PartitionData]


def decode_request(frame: memoryview, position: int, version: int) -> FetchRequest:
    """The body of a fetch request that begins at `position`."""
    try:
        return _decode_request(frame, position, version)
    except struct.error:
        raise ProtocolError("fetch request ends early") from None


def _decode_request(frame: memoryview, position: int, version: int) -> FetchRequest:
    flexible = version >= FIRST_FLEXIBLE
    replica_id = replica_epoch = session_epoch = -1
    session_id = 0
    if version < _FIRST_WITH_REPLICA_STATE:
        (replica_id,) = _INT32.unpack_from(frame, position)
        position += 4
    max_wait_ms, min_bytes, max_bytes, isolation_level = _LIMITS.unpack_from(frame, position)
    position += _LIMITS.size
    if version >= FIRST_WITH_SESSIONS:
        session_id, session_epoch = _SESSION.unpack_from(frame, position)
        position += _SESSION.size
    partitions: list[PartitionFetch] = []
    topics, budget = wire.ItemBudget(MOST_ITEMS), wire.ItemBudget(MOST_ITEMS)
    topic_count, position = wire.read_items_size(frame, position, flexible, topics)
    for _ in range(topic_count):
        topic, position = _read_topic(frame, position, version)
        partition_count, position = wire.read_items_size(frame, position, flexible, budget)
        for _ in range(partition_count):
            asked, position = _read_asked(frame, position, version, topic, budget)
            partitions.append(asked)
        if flexible:
            position = wire.skip_tagged_fields(frame, position, budget)
    forgotten: list[tuple[Topic, int]] = []
    if version >= FIRST_WITH_SESSIONS:
        position = _read_forgotten(frame, position, version, forgotten, topics, budget)
    rack_id = ""
    if version >= FIRST_WITH_RACK:
        read_string = wire.read_compact_string if flexible else wire.read_string
        rack, position = read_string(frame, position)
        rack_id = rack or ""
    if flexible:
        tags, _ = wire.read_tagged_fields(frame, position)
        if version >= _FIRST_WITH_REPLICA_STATE and _TAG_REPLICA_STATE in tags:
            replica_id, replica_epoch = _REPLICA_STATE.unpack_from(tags[_TAG_REPLICA_STATE])
    return FetchRequest(
        max_wait_ms,
        min_bytes,
        max_bytes,
        isolation_level == 1,
        partitions,
        session_id,
        session_epoch,
        forgotten,
        rack_id,
        replica_id,
        replica_epoch,
    )


def changing_positions(frame: memoryview, position: int, version: int) -> tuple[int, int] | None:
    """Where session epoch (i32) and fetch offset (i64) stand in a request that `decode_request` has read, and
    whose body begins at `position`. None unless it has one topic, and that one partition. `version` is
    `FIRST_WITH_SESSIONS` or newer."""
    flexible = version >= FIRST_FLEXIBLE
    if version < _FIRST_WITH_REPLICA_STATE:
        position += _INT32.size
    position += _LIMITS.size + _SESSION.size
    epoch_position = position - _INT32.size
    topic_count, position = wire.read_array_size(frame, position, flexible)
    if topic_count != 1:
        return None
    _, position = _read_topic(frame, position, version)
    partition_count, position = wire.read_array_size(frame, position, flexible)
    # Behind the partition's number, and the leader epoch where there is one.
    ahead = 2 if version >= _FIRST_WITH_LEADER_EPOCH else 1
    return (epoch_position, position + ahead * _INT32.size) if partition_count == 1 else None


def _read_topic(frame: memoryview, position: int, version: int) -> tuple[Topic, int]:
    if version >= FIRST_WITH_TOPIC_IDS:
        view, position = wire.read_bytes(frame, position, wire.UUID_SIZE)
        return _topic_id(bytes(view)), position
    read_string = wire.read_compact_string if version >= FIRST_FLEXIBLE else wire.read_string
    topic, position = read_string(frame, position)
    if topic is None:
        raise ProtocolError("topic name is null")
    return topic, position


@lru_cache(maxsize=8192)
def _topic_id(encoded: bytes) -> UUID:
    """Remembered, because to make one costs more than all else that is read of a partition."""
    return UUID(bytes=encoded)


def _read_asked(
    frame: memoryview, position: int, version: int, topic: Topic, budget: wire.ItemBudget
) -> tuple[PartitionFetch, int]:
    leader_epoch = last_epoch = start_offset = -1
    if version >= FIRST_FLEXIBLE:
        partition, leader_epoch, offset, last_epoch, start_offset, size = _ASKED_V12.unpack_from(
            frame, position
        )
        position = wire.skip_tagged_fields(frame, position + _ASKED_V12.size, budget)
    elif version >= _FIRST_WITH_LEADER_EPOCH:
        partition, leader_epoch, offset, start_offset, size = _ASKED_V9.unpack_from(frame, position)
        position += _ASKED_V9.size
    elif version >= _FIRST_WITH_LOG_START_OFFSET:
        partition, offset, start_offset, size = _ASKED_V5.unpack_from(frame, position)
        position += _ASKED_V5.size
    else:
        partition, offset, size = _ASKED_V4.unpack_from(frame, position)
        position += _ASKED_V4.size
    return PartitionFetch(topic, partition, offset, size, leader_epoch, last_epoch, start_offset), position


def _read_forgotten(
    frame: memoryview,
    position: int,
    version: int,
    forgotten: list[tuple[Topic, int]],
    topics: wire.ItemBudget,
    budget: wire.ItemBudget,
) -> int:
    flexible = version >= FIRST_FLEXIBLE
    topic_count, position = wire.read_items_size(frame, position, flexible, topics)
    for _ in range(topic_count):
        topic, position = _read_topic(frame, position, version)
        count, position = wire.read_items_size(frame, position, flexible, budget)
        for _ in range(count):
            forgotten.append((topic, _INT32.unpack_from(frame, position)[0]))
            position += 4
        if flexible:
            position = wire.skip_tagged_fields(frame, position, budget)
    return position


def encode_request(version: int, correlation_id: int, client_id: str, request: FetchRequest) -> bytes:
    """The frame, size included, of a fetch request. Topics must fit the version (names or ids)."""
    flexible = version >= FIRST_FLEXIBLE
    tags = b"\x00" if flexible else b""
    encoded_client = client_id.encode()
    out = bytearray(_HEAD.size)
    out += encoded_client + tags
    if version < _FIRST_WITH_REPLICA_STATE:
        out += _INT32.pack(request.replica_id)
    out += _LIMITS.pack(
        request.max_wait_ms, request.min_bytes, request.max_bytes, int(request.read_committed)
    )
    if version >= FIRST_WITH_SESSIONS:
        out += _SESSION.pack(request.session_id, request.session_epoch)
    topics: dict[Topic, list[PartitionFetch]] = {}
    for asked in request.partitions:
        topics.setdefault(asked.topic, []).append(asked)
    out += wire.array_size(len(topics), flexible)
    for topic, partitions in topics.items():
        out += _encode_topic(topic, version)
        out += wire.array_size(len(partitions), flexible)
        for asked in partitions:
            out += _encode_asked(asked, version) + tags
        out += tags
    if version >= FIRST_WITH_SESSIONS:
        forgotten: dict[Topic, list[int]] = {}
        for topic, partition in request.forgotten:
            forgotten.setdefault(topic, []).append(partition)
        out += wire.array_size(len(forgotten), flexible)
        for topic, numbers in forgotten.items():
            out += _encode_topic(topic, version) + wire.array_size(len(numbers), flexible)
            out += b"".join(map(_INT32.pack, numbers)) + tags
    if version >= FIRST_WITH_RACK:
        out += wire.compact_string(request.rack_id) if flexible else wire.string(request.rack_id)
    if version >= _FIRST_WITH_REPLICA_STATE and request.replica_id != -1:
        state = _REPLICA_STATE.pack(request.replica_id, request.replica_epoch) + b"\x00"
        out += b"\x01" + wire.tagged_field(_TAG_REPLICA_STATE, state)
    else:
        out += tags
    _HEAD.pack_into(out, 0, len(out) - 4, Api.FETCH, version, correlation_id, len(encoded_client))
    return bytes(out)


def _encode_topic(topic: Topic, version: int) -> bytes:
    if version >= FIRST_WITH_TOPIC_IDS:
        if not isinstance(topic, UUID):
            raise ValueError(f"fetch version {version} names topics by id, got {topic!r}")
        return topic.bytes
    if not isinstance(topic, str):
        raise ValueError(f"fetch version {version} names topics by name, got {topic!r}")
    return wire.compact_string(topic) if version >= FIRST_FLEXIBLE else wire.string(topic)


def _encode_asked(asked: PartitionFetch, version: int) -> bytes:
    _, partition, offset, size, leader_epoch, last_epoch, start_offset = asked
    if version >= FIRST_FLEXIBLE:
        return _ASKED_V12.pack(partition, leader_epoch, offset, last_epoch, start_offset, size)
    if version >= _FIRST_WITH_LEADER_EPOCH:
        return _ASKED_V9.pack(partition, leader_epoch, offset, start_offset, size)
    if version >= _FIRST_WITH_LOG_START_OFFSET:
        return _ASKED_V5.pack(partition, offset, start_offset, size)
    return _ASKED_V4.pack(partition, offset, size)


def encode_response(
    version: int,
    correlation_id: int,
    partitions: Iterable[PartitionData],
    *,
    throttle_ms: int = 0,
    error_code: int = 0,
    session_id: int = 0,
    nodes: Mapping[int, Node] = _NO_NODES,
) -> list[Buffer]:
    """A fetch response as buffers to write in order, size first; records are passed on, not copied.

    Partitions of one topic must stand together. `nodes` are the brokers, for the address of any
    `current_leader` that is named (version 16 on).
    """
    flexible = version >= FIRST_FLEXIBLE
    tags = b"\x00" if flexible else b""
    topics: list[tuple[Topic, list[PartitionData]]] = []
    for given in partitions:
        if not topics or topics[-1][0] != given.topic:
            topics.append((given.topic, []))
        topics[-1][1].append(given)
    pending = bytearray(_SIZE_AND_CORRELATION.size)
    pending += tags + _INT32.pack(throttle_ms)
    if version >= FIRST_WITH_SESSIONS:
        pending += struct.pack(">hi", error_code, session_id)
    pending += wire.array_size(len(topics), flexible)
    out: list[Buffer] = [pending]
    leaders: list[int] = []
    head = pending
    for topic, given_partitions in topics:
        pending += _encode_topic(topic, version)
        pending += wire.array_size(len(given_partitions), flexible)
        for given in given_partitions:
            _append_given(pending, given, version)
            if len(given.records):
                out.append(given.records)
                pending = bytearray()
                out.append(pending)
            if flexible:
                pending += _encode_given_tags(given)
                if given.current_leader is not None:
                    leaders.append(given.current_leader[0])
        pending += tags
    if leaders and version >= _FIRST_WITH_NODES:
        pending += encode_node_endpoints(leaders, nodes)
    else:
        pending += tags
    size = sum(map(len, out)) - _INT32.size
    _SIZE_AND_CORRELATION.pack_into(head, 0, size, correlation_id)
    if not len(pending):
        out.pop()
    return out


def _append_given(out: bytearray, given: PartitionData, version: int) -> None:
    flexible = version >= FIRST_FLEXIBLE
    if version >= _FIRST_WITH_LOG_START_OFFSET:
        out += _GIVEN_V5.pack(
            given.partition,
            given.error_code,
            given.high_watermark,
            given.last_stable_offset,
            given.log_start_offset,
        )
    else:
        out += _GIVEN_V4.pack(
            given.partition, given.error_code, given.high_watermark, given.last_stable_offset
        )
    if given.aborted is None:
        out += wire.array_size(-1, flexible)
    else:
        out += wire.array_size(len(given.aborted), flexible)
        for producer_id, first_offset in given.aborted:
            out += _ABORTED.pack(producer_id, first_offset)
            if flexible:
                out.append(0)
    if version >= FIRST_WITH_RACK:
        out += _INT32.pack(given.preferred_read_replica)
    out += wire.uvarint(len(given.records) + 1) if flexible else _INT32.pack(len(given.records))


def _encode_given_tags(given: PartitionData) -> bytes:
    if given.diverging is None and given.current_leader is None:
        return b"\x00"
    fields: list[bytes] = []
    if given.diverging is not None:
        value = _EPOCH_AND_OFFSET.pack(*given.diverging) + b"\x00"
        fields.append(wire.tagged_field(_TAG_DIVERGING_EPOCH, value))
    if given.current_leader is not None:
        fields.append(wire.tagged_field(_TAG_CURRENT_LEADER, encode_leader(given.current_leader)))
    return wire.uvarint(len(fields)) + b"".join(fields)


def decode_response(frame: memoryview, version: int) -> FetchResponse:
    """A fetch response; `frame` begins after the size. Records are views into the frame."""
    flexible = version >= FIRST_FLEXIBLE
    error_code = session_id = 0
    partitions: list[PartitionData] = []
    try:
        position = wire.skip_tagged_fields(frame, 4) if flexible else 4
        (throttle_ms,) = _INT32.unpack_from(frame, position)
        position += 4
        if version >= FIRST_WITH_SESSIONS:
            error_code, session_id = struct.unpack_from(">hi", frame, position)
            position += 6
        topic_count, position = wire.read_array_size(frame, position, flexible)
        for _ in range(topic_count):
            topic, position = _read_topic(frame, position, version)
            count, position = wire.read_array_size(frame, position, flexible)
            for _ in range(count):
                given, position = _read_given(frame, position, version, topic)
                partitions.append(given)
            if flexible:
                position = wire.skip_tagged_fields(frame, position)
    except struct.error:
        raise ProtocolError("fetch response ends early") from None
    return FetchResponse(throttle_ms, error_code, session_id, partitions)


def _read_given(frame: memoryview, position: int, version: int, topic: Topic) -> tuple[PartitionData, int]:
    flexible = version >= FIRST_FLEXIBLE
    log_start_offset = preferred = -1
    if version >= _FIRST_WITH_LOG_START_OFFSET:
        partition, error_code, high, stable, log_start_offset = _GIVEN_V5.unpack_from(frame, position)
        position += _GIVEN_V5.size
    else:
        partition, error_code, high, stable = _GIVEN_V4.unpack_from(frame, position)
        position += _GIVEN_V4.size
    aborted: list[tuple[int, int]] | None = None
    aborted_count, position = wire.read_array_size(frame, position, flexible)
    if aborted_count >= 0:
        aborted = []
        for _ in range(aborted_count):
            aborted.append(_ABORTED.unpack_from(frame, position))
            position += _ABORTED.size
            if flexible:
                position = wire.skip_tagged_fields(frame, position)
    if version >= FIRST_WITH_RACK:
        (preferred,) = _INT32.unpack_from(frame, position)
        position += 4
    if flexible:
        size, position = wire.read_uvarint(frame, position)
        size -= 1
    else:
        (size,) = _INT32.unpack_from(frame, position)
        position += 4
    records = frame[:0]
    if size > 0:
        records, position = wire.read_bytes(frame, position, size)
    elif size < -1:
        raise ProtocolError(f"records announce {size} bytes")
    diverging = current_leader = None
    if flexible:
        tags, position = wire.read_tagged_fields(frame, position)
        if _TAG_DIVERGING_EPOCH in tags:
            diverging = _EPOCH_AND_OFFSET.unpack_from(tags[_TAG_DIVERGING_EPOCH])
        if _TAG_CURRENT_LEADER in tags:
            current_leader = _LEADER.unpack_from(tags[_TAG_CURRENT_LEADER])
    given = PartitionData(
        topic,
        partition,
        error_code,
        high,
        stable,
        log_start_offset,
        records,
        aborted,
        preferred,
        diverging,
        current_leader,
    )
    return given, position
