"""The records of `__consumer_offsets`, byte by byte, in Apache Kafka's own layout.

Pure: keys and values from and to bytes. `journal.py` and `coordinator.py` call it in the broker; tools such
as Burrow read the same records, so what is written is what Apache Kafka 3.9 writes by default, and what is
read is everything that any Apache Kafka up to 4.1 has left in a log.

Layout (big endian; string = i16 size + UTF-8, null = -1; bytes = i32 size):

    offset commit key    version i16 = 1 (0 too when read), group string, topic string, partition i32
    offset commit value  version i16 = 3, offset i64, leader epoch i32, metadata string, commit time ms i64
                         version i16 = 1, offset i64, metadata string, commit time ms i64, expiry ms i64
                         (0 and 2, when read: offset i64, metadata string, commit time ms i64)
    group metadata key   version i16 = 2, group string
    group metadata value version i16 = 3, protocol type string, generation i32, protocol string|null,
                         leader string|null, state since ms i64, members i32 count of: member id string,
                         instance id string|null, client id string, client host string,
                         rebalance timeout ms i32, session timeout ms i32, subscription bytes,
                         assignment bytes
                         (when read: 0 lacks the rebalance timeout, 0-1 the state's time, 0-2 the instance)
    both values, version 4 (KIP-915; read only): the fields of version 3 with sizes and counts as unsigned
                         varints of one more than the size (0 = null), and tagged fields, which are passed
                         over, at the end of each structure

A record without a value is a tombstone: the offset, or the group's membership, is forgotten. A commit
with an explicit expiry (requests before v5 may carry one) is written as value version 1, every other
as 3, as Apache Kafka does. Keys and values of unknown versions come from newer software (keys from 3 on are
those of KIP-848's groups): they are skipped, so that going back to an older version loses no more than it
must.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from millrace.broker.errors import UnreadableRecord
from millrace.broker.groups.offsets import CommittedOffset
from millrace.broker.groups.values import GroupSnapshot, MemberSnapshot

MAX_STRING_SIZE = 32_767
"""A text's bytes are counted in 16 bits."""

_OFFSET_KEY_VERSION = 1
_GROUP_KEY_VERSION = 2
_OFFSET_VALUE_VERSION = 3
_OFFSET_VALUE_VERSION_WITH_EXPIRY = 1
_GROUP_VALUE_VERSION = 3
_FLEXIBLE_FROM = 4
_NEWEST_VALUE_VERSION = 4
_LARGEST_VARINT_BYTES = 5

_VERSION_AND_SIZE = struct.Struct(">hh")
_SIZE = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")
_USUAL_VALUE = struct.Struct(">hqih")


@dataclass(frozen=True, slots=True)
class OffsetKey:
    group_id: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class GroupKey:
    group_id: str


# -- encoding ---------------------------------------------------------------------------------------


def encode_offset_key(group_id: str, topic: str, partition: int) -> bytes:
    return (
        struct.pack(">h", _OFFSET_KEY_VERSION)
        + _string(group_id)
        + _string(topic)
        + struct.pack(">i", partition)
    )


def encode_offset_value(committed: CommittedOffset) -> bytes:
    metadata = _string(committed.metadata)
    if committed.expire_timestamp_ms is not None:
        return (
            struct.pack(">hq", _OFFSET_VALUE_VERSION_WITH_EXPIRY, committed.offset)
            + metadata
            + struct.pack(">qq", committed.commit_timestamp_ms, committed.expire_timestamp_ms)
        )
    return (
        struct.pack(">hqi", _OFFSET_VALUE_VERSION, committed.offset, committed.leader_epoch)
        + metadata
        + struct.pack(">q", committed.commit_timestamp_ms)
    )


def encode_group_key(group_id: str) -> bytes:
    return struct.pack(">h", _GROUP_KEY_VERSION) + _string(group_id)


def encode_group_value(snapshot: GroupSnapshot) -> bytes:
    parts = [
        struct.pack(">h", _GROUP_VALUE_VERSION),
        _string(snapshot.protocol_type),
        struct.pack(">i", snapshot.generation),
        _string(snapshot.protocol_name),
        _string(snapshot.leader),
        struct.pack(">qi", snapshot.state_since_ms, len(snapshot.members)),
    ]
    for member in snapshot.members:
        parts += [
            _string(member.member_id),
            _string(member.instance_id),
            _string(member.client_id),
            _string(member.client_host),
            struct.pack(">ii", member.rebalance_timeout_ms, member.session_timeout_ms),
            struct.pack(">i", len(member.subscription)),
            member.subscription,
            struct.pack(">i", len(member.assignment)),
            member.assignment,
        ]
    return b"".join(parts)


def _string(text: str | None) -> bytes:
    if text is None:
        return b"\xff\xff"
    encoded = text.encode()
    return struct.pack(">h", len(encoded)) + encoded


# -- decoding ---------------------------------------------------------------------------------------


def decode_key(key: bytes) -> OffsetKey | GroupKey | None:
    """None for a key of a version this code does not know. Raises UnreadableRecord."""
    usual = _usual_offset_key(key)
    if usual is not None:
        return usual
    reader = _Reader(key)
    version = reader.int16()
    if version in (0, _OFFSET_KEY_VERSION):
        return OffsetKey(reader.string(), reader.string(), reader.int32())
    if version == _GROUP_KEY_VERSION:
        return GroupKey(reader.string())
    return None


def decode_offset_value(value: bytes, log_offset: int = -1) -> CommittedOffset | None:
    """None for a value of a version this code does not know. Raises UnreadableRecord."""
    usual = _usual_offset_value(value, log_offset)
    if usual is not None:
        return usual
    reader = _Reader(value)
    version = reader.value_version()
    if version is None:
        return None
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= _OFFSET_VALUE_VERSION else -1
    metadata = reader.string()
    commit_timestamp_ms = reader.int64()
    expire_ms = reader.int64() if version == _OFFSET_VALUE_VERSION_WITH_EXPIRY else -1
    reader.end_of_structure()
    return CommittedOffset(
        offset,
        leader_epoch,
        metadata,
        commit_timestamp_ms,
        expire_ms if expire_ms >= 0 else None,
        log_offset,
    )


def _usual_offset_key(key: bytes) -> OffsetKey | None:
    """A key as this broker and Apache Kafka write it, read at once: a load reads as many as there are live
    offsets. None for what has to be gone through field by field."""
    try:
        version, size = _VERSION_AND_SIZE.unpack_from(key)
        if version != _OFFSET_KEY_VERSION or size < 0:
            return None
        (topic_size,) = _SIZE.unpack_from(key, 4 + size)
        if topic_size < 0:
            return None
        topic_end = 6 + size + topic_size
        (partition,) = _INT32.unpack_from(key, topic_end)
        return OffsetKey(key[4 : 4 + size].decode(), key[6 + size : topic_end].decode(), partition)
    except (struct.error, UnicodeDecodeError):
        return None


def _usual_offset_value(value: bytes, log_offset: int) -> CommittedOffset | None:
    """The same for a value."""
    try:
        version, offset, leader_epoch, size = _USUAL_VALUE.unpack_from(value)
        if version != _OFFSET_VALUE_VERSION or size < 0:
            return None
        metadata_end = _USUAL_VALUE.size + size
        (commit_timestamp_ms,) = _INT64.unpack_from(value, metadata_end)
        metadata = value[_USUAL_VALUE.size : metadata_end].decode() if size else ""
    except (struct.error, UnicodeDecodeError):
        return None
    return CommittedOffset(offset, leader_epoch, metadata, commit_timestamp_ms, None, log_offset)


def decode_group_value(value: bytes) -> GroupSnapshot | None:
    """None for a value of a version this code does not know. Raises UnreadableRecord."""
    reader = _Reader(value)
    version = reader.value_version()
    if version is None:
        return None
    protocol_type = reader.string()
    generation = reader.int32()
    protocol_name = reader.nullable_string()
    leader = reader.nullable_string()
    state_since_ms = reader.int64() if version >= 2 else -1
    members = tuple(_read_member(reader, version) for _ in range(reader.count()))
    reader.end_of_structure()
    return GroupSnapshot(protocol_type, generation, protocol_name, leader, state_since_ms, members)


def _read_member(reader: _Reader, version: int) -> MemberSnapshot:
    member_id = reader.string()
    instance_id = reader.nullable_string() if version >= 3 else None
    client_id = reader.string()
    client_host = reader.string()
    rebalance_timeout_ms = reader.int32() if version >= 1 else -1
    session_timeout_ms = reader.int32()
    subscription, assignment = reader.sized_bytes(), reader.sized_bytes()
    reader.end_of_structure()
    return MemberSnapshot(
        member_id,
        instance_id,
        client_id,
        client_host,
        rebalance_timeout_ms if rebalance_timeout_ms >= 0 else session_timeout_ms,
        session_timeout_ms,
        subscription,
        assignment,
    )


class _Reader:
    """Reads big-endian fields one after another; whatever does not fit raises UnreadableRecord."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._flexible = False

    def value_version(self) -> int | None:
        """The version of a value, which says how the rest is laid out; None for one that is not known."""
        version = self.int16()
        self._flexible = version >= _FLEXIBLE_FROM
        return version if 0 <= version <= _NEWEST_VALUE_VERSION else None

    def int16(self) -> int:
        return int.from_bytes(self._take(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self._take(4), "big", signed=True)

    def int64(self) -> int:
        return int.from_bytes(self._take(8), "big", signed=True)

    def count(self) -> int:
        """How many elements follow; null counts as none."""
        return max(self._varint() - 1 if self._flexible else self.int32(), 0)

    def sized_bytes(self) -> bytes:
        return self._take(self._varint() - 1 if self._flexible else self.int32())

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise UnreadableRecord(f"null where text must be, at byte {self._position}")
        return text

    def nullable_string(self) -> str | None:
        size = self._varint() - 1 if self._flexible else self.int16()
        if size == -1:
            return None
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise UnreadableRecord(f"text is not UTF-8 before byte {self._position}") from error

    def end_of_structure(self) -> None:
        """Pass over the tagged fields, which newer software may have added."""
        if not self._flexible:
            return
        for _ in range(self._varint()):
            self._varint()  # the tag
            self._take(self._varint())

    def _varint(self) -> int:
        number = 0
        for place in range(_LARGEST_VARINT_BYTES):
            byte = self._take(1)[0]
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return number
        raise UnreadableRecord(f"a number is too long, before byte {self._position}")

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if size < 0 or end > len(self._data):
            raise UnreadableRecord(f"field of {size} bytes at byte {self._position} of {len(self._data)}")
        taken = self._data[self._position : end]
        self._position = end
        return taken
