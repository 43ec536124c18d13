"""Produce requests and responses, written by hand for both sides: versions 3 to 11.

A produce request is decoded without copying a record (the batches are views into the frame, writable when
the frame is, so that the log stamps offsets in place) and encoded as a list of buffers for `writelines`
(the batches go out as they came in). `kio` is the oracle in tests.

Called by the server's produce handler and the client's `raw_produce`. Pure. Decoders raise ProtocolError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol import wire
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.leader_hints import (
    NO_TAGS,
    Leader,
    Node,
    decode_leader,
    encode_leader,
    encode_node_endpoints,
)
from millrace.broker.protocol.topic_partition import TopicPartition

VERSIONS = range(3, 12)
FIRST_FLEXIBLE = 9
_FIRST_WITH_LOG_START_OFFSET = 5
_FIRST_WITH_RECORD_ERRORS = 8
_FIRST_WITH_CURRENT_LEADER = 10

MOST_ITEMS = 10_000
"""Topics, partitions and tagged fields of one request, which is read and answered on the event loop, at some
2 µs each. No broker leads as many partitions, and producers send one batch for each."""

_TAG_CURRENT_LEADER = 0
_NO_NODES: Mapping[int, Node] = {}

_ACKS_AND_TIMEOUT = struct.Struct(">hi")
_INT32 = struct.Struct(">i")
_PARTITION_AND_SIZE = struct.Struct(">ii")
_HEAD = struct.Struct(">ihhih")  # size, API, version, correlation id, size of the client's name
_CORRELATION_ID_POSITION = 8
# What follows an answer's numbers where nothing went wrong: no record errors, no message, no tags.
_NOTHING_MORE = b"\x01\x00\x00"
_NOTHING_MORE_OLD = b"\x00\x00\x00\x00\xff\xff"
_ANSWER = struct.Struct(">ihqq")
_ANSWER_WITH_START = struct.Struct(">ihqqq")
_SIZE_AND_CORRELATION = struct.Struct(">ii")


class PartitionBatches(NamedTuple):
    """The batches of one partition in a request; `records` is None where the producer sent null."""

    topic: str
    partition: int
    records: memoryview | None


class ProduceRequest(NamedTuple):
    transactional_id: str | None
    acks: int
    timeout_ms: int
    partitions: list[PartitionBatches]


class PartitionAnswer(NamedTuple):
    """What became of one partition's batches. `record_errors` names records that caused a refusal."""

    topic: str
    partition: int
    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    error_message: str | None = None
    record_errors: tuple[tuple[int, str | None], ...] = ()
    current_leader: Leader | None = None


def decode_request(frame: memoryview, position: int, version: int) -> ProduceRequest:
    """The body of a produce request that begins at `position`."""
    budget = wire.ItemBudget(MOST_ITEMS)
    try:
        if version >= FIRST_FLEXIBLE:
            return _decode_flexible_request(frame, position, budget)
        return _decode_old_request(frame, position, budget)
    except struct.error:
        raise ProtocolError("produce request ends early") from None


def _decode_flexible_request(frame: memoryview, position: int, budget: wire.ItemBudget) -> ProduceRequest:
    transactional_id, position = wire.read_compact_string(frame, position)
    acks, timeout_ms = _ACKS_AND_TIMEOUT.unpack_from(frame, position)
    topic_count, position = wire.read_items_size(frame, position + 6, True, budget)
    partitions: list[PartitionBatches] = []
    for _ in range(topic_count):
        name, position = wire.read_compact_string(frame, position)
        topic = _not_null(name)
        partition_count, position = wire.read_items_size(frame, position, True, budget)
        for _ in range(partition_count):
            (partition,) = _INT32.unpack_from(frame, position)
            size, position = wire.read_uvarint(frame, position + 4)
            records: memoryview | None = None
            if size:
                records, position = wire.read_bytes(frame, position, size - 1)
            position = wire.skip_tagged_fields(frame, position, budget)
            partitions.append(PartitionBatches(topic, partition, records))
        position = wire.skip_tagged_fields(frame, position, budget)
    wire.skip_tagged_fields(frame, position, budget)
    return ProduceRequest(transactional_id, acks, timeout_ms, partitions)


def _decode_old_request(frame: memoryview, position: int, budget: wire.ItemBudget) -> ProduceRequest:
    transactional_id, position = wire.read_string(frame, position)
    acks, timeout_ms = _ACKS_AND_TIMEOUT.unpack_from(frame, position)
    topic_count, position = wire.read_items_size(frame, position + 6, False, budget)
    partitions: list[PartitionBatches] = []
    for _ in range(topic_count):
        name, position = wire.read_string(frame, position)
        topic = _not_null(name)
        partition_count, position = wire.read_items_size(frame, position, False, budget)
        for _ in range(partition_count):
            partition, size = _PARTITION_AND_SIZE.unpack_from(frame, position)
            position += 8
            records: memoryview | None = None
            if size != -1:
                records, position = wire.read_bytes(frame, position, size)
            partitions.append(PartitionBatches(topic, partition, records))
    return ProduceRequest(transactional_id, acks, timeout_ms, partitions)


def _not_null(topic: str | None) -> str:
    if topic is None:
        raise ProtocolError("topic name is null")
    return topic


def encode_request(
    version: int,
    correlation_id: int,
    client_id: str,
    batches: Mapping[TopicPartition, Buffer | Sequence[Buffer]],
    *,
    acks: int = -1,
    timeout_ms: int = 30_000,
    transactional_id: str | None = None,
) -> list[Buffer]:
    """A produce request as buffers to write in order, size first; `batches` are passed on, not copied.

    A partition's value is one buffer, or several that are sent as one run of batches.
    """
    flexible = version >= FIRST_FLEXIBLE
    tags = b"\x00" if flexible else b""
    topics: dict[str, list[tuple[int, Sequence[Buffer]]]] = {}
    for (topic, partition), value in batches.items():
        parts = [value] if isinstance(value, bytes | bytearray | memoryview) else value
        topics.setdefault(topic, []).append((partition, parts))
    head = bytearray(_request_head(version, client_id, transactional_id, acks, timeout_ms))
    head += wire.array_size(len(topics), flexible)
    out: list[Buffer] = [head]
    size = 0
    pending = head
    for topic, partitions in topics.items():
        pending += _topic_name(topic, flexible)
        pending += wire.array_size(len(partitions), flexible)
        for partition, parts in partitions:
            records_size = sum(map(len, parts))
            pending += _INT32.pack(partition)
            pending += wire.uvarint(records_size + 1) if flexible else _INT32.pack(records_size)
            out += parts
            size += records_size + len(pending)
            pending = bytearray(tags)
            out.append(pending)
        pending += tags
    pending += tags
    size += len(pending)
    _INT32.pack_into(head, 0, size - _INT32.size)
    _INT32.pack_into(head, _CORRELATION_ID_POSITION, correlation_id)
    return out


@lru_cache(1024)
def _request_head(
    version: int, client_id: str, transactional_id: str | None, acks: int, timeout_ms: int
) -> bytes:
    """What all requests of one producer begin with, without the request's size and correlation id."""
    flexible = version >= FIRST_FLEXIBLE
    encoded_client = client_id.encode()
    return (
        _HEAD.pack(0, Api.PRODUCE, version, 0, len(encoded_client))
        + encoded_client
        + (b"\x00" if flexible else b"")
        + (wire.compact_string(transactional_id) if flexible else wire.string(transactional_id))
        + _ACKS_AND_TIMEOUT.pack(acks, timeout_ms)
    )


@lru_cache(MOST_ITEMS)
def _topic_name(topic: str, flexible: bool) -> bytes:
    return wire.compact_string(topic) if flexible else wire.string(topic)


def encode_response(
    version: int,
    correlation_id: int,
    answers: Iterable[PartitionAnswer],
    throttle_ms: int = 0,
    nodes: Mapping[int, Node] = _NO_NODES,
) -> bytes:
    """The frame, size included, of a produce response. Answers of one topic must stand together.

    `nodes` are the brokers, for the address of any `current_leader` that is named (version 10 on).
    """
    flexible = version >= FIRST_FLEXIBLE
    topics: list[tuple[str, list[PartitionAnswer]]] = []
    for answer in answers:
        if not topics or topics[-1][0] != answer.topic:
            topics.append((answer.topic, []))
        topics[-1][1].append(answer)
    leaders: list[int] = []
    parts: list[bytes] = [b"\x00" if flexible else b"", wire.array_size(len(topics), flexible)]
    for topic, partitions in topics:
        parts.append(wire.compact_string(topic) if flexible else wire.string(topic))
        parts.append(wire.array_size(len(partitions), flexible))
        parts.extend(_encode_answer(answer, version, flexible, leaders) for answer in partitions)
        if flexible:
            parts.append(b"\x00")
    parts.append(_INT32.pack(throttle_ms))
    if flexible:
        parts.append(encode_node_endpoints(leaders, nodes) if leaders else NO_TAGS)
    body = b"".join(parts)
    return _SIZE_AND_CORRELATION.pack(len(body) + 4, correlation_id) + body


def _encode_answer(answer: PartitionAnswer, version: int, flexible: bool, leaders: list[int]) -> bytes:
    """The leader that is named, if any, is added to `leaders`."""
    _, partition, error_code, base_offset, log_append_time_ms, log_start_offset, message, errors, _ = answer
    if version < _FIRST_WITH_LOG_START_OFFSET:
        return _ANSWER.pack(partition, error_code, base_offset, log_append_time_ms)
    fixed = _ANSWER_WITH_START.pack(partition, error_code, base_offset, log_append_time_ms, log_start_offset)
    if version < _FIRST_WITH_RECORD_ERRORS:
        return fixed
    if not errors and message is None and answer.current_leader is None:  # nearly always
        return fixed + (_NOTHING_MORE if flexible else _NOTHING_MORE_OLD)
    string = wire.compact_string if flexible else wire.string
    tags = b"\x00" if flexible else b""
    out = bytearray(fixed)
    out += wire.array_size(len(errors), flexible)
    for index, error_message in errors:
        out += _INT32.pack(index) + string(error_message) + tags
    out += string(message)
    if answer.current_leader is not None and version >= _FIRST_WITH_CURRENT_LEADER:
        leaders.append(answer.current_leader[0])
        out += b"\x01" + wire.tagged_field(_TAG_CURRENT_LEADER, encode_leader(answer.current_leader))
    else:
        out += tags
    return bytes(out)


def decode_response(frame: memoryview, version: int) -> tuple[list[PartitionAnswer], int]:
    """The answers of a produce response and its throttle time in ms; `frame` begins after the size."""
    flexible = version >= FIRST_FLEXIBLE
    read_string = wire.read_compact_string if flexible else wire.read_string
    position = wire.skip_tagged_fields(frame, 4) if flexible else 4
    answers: list[PartitionAnswer] = []
    try:
        topic_count, position = wire.read_array_size(frame, position, flexible)
        for _ in range(topic_count):
            name, position = read_string(frame, position)
            topic = _not_null(name)
            partition_count, position = wire.read_array_size(frame, position, flexible)
            for _ in range(partition_count):
                answer, position = _decode_answer(frame, position, version, topic)
                answers.append(answer)
            if flexible:
                position = wire.skip_tagged_fields(frame, position)
        (throttle_ms,) = _INT32.unpack_from(frame, position)
    except struct.error:
        raise ProtocolError("produce response ends early") from None
    return answers, throttle_ms


def _decode_answer(frame: memoryview, position: int, version: int, topic: str) -> tuple[PartitionAnswer, int]:
    flexible = version >= FIRST_FLEXIBLE
    log_start_offset = -1
    if version < _FIRST_WITH_LOG_START_OFFSET:
        partition, error_code, base_offset, time_ms = _ANSWER.unpack_from(frame, position)
        position += _ANSWER.size
    else:
        partition, error_code, base_offset, time_ms, log_start_offset = _ANSWER_WITH_START.unpack_from(
            frame, position
        )
        position += _ANSWER_WITH_START.size
    message: str | None = None
    errors: list[tuple[int, str | None]] = []
    current_leader: Leader | None = None
    if flexible and frame[position : position + len(_NOTHING_MORE)] == _NOTHING_MORE:  # nearly always
        position += len(_NOTHING_MORE)
    elif version >= _FIRST_WITH_RECORD_ERRORS:
        read_string = wire.read_compact_string if flexible else wire.read_string
        count, position = wire.read_array_size(frame, position, flexible)
        for _ in range(count):
            (index,) = _INT32.unpack_from(frame, position)
            error_message, position = read_string(frame, position + 4)
            if flexible:
                position = wire.skip_tagged_fields(frame, position)
            errors.append((index, error_message))
        message, position = read_string(frame, position)
        if flexible:
            tags, position = wire.read_tagged_fields(frame, position)
            if _TAG_CURRENT_LEADER in tags and version >= _FIRST_WITH_CURRENT_LEADER:
                current_leader = decode_leader(tags[_TAG_CURRENT_LEADER])
    answer = PartitionAnswer(
        topic,
        partition,
        error_code,
        base_offset,
        time_ms,
        log_start_offset,
        message,
        tuple(errors),
        current_leader,
    )
    return answer, position
