"""What groups leave in the `__consumer_offsets` log, in Apache Kafka's own layout, and the offsets in memory.

Three nouns, all pure: the log's records (`encode_*`, `decode_key`, `decode_*_value`), the offsets of
one group (`OffsetStore`), and when an offset is old enough to be forgotten (`expired_offsets`).
`coordinator.py` is the only caller in the broker; tools such as Burrow read the same records.

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

A record without a value is a tombstone: the offset, or the group's membership, is forgotten. A commit
with an explicit expiry (requests before v5 may carry one) is written as value version 1, every other
as 3, as Apache Kafka does. Keys and values of unknown versions come from newer software: they are
skipped, so that going back to an older version loses no more than it must.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from millrace.broker.groups.values import GroupSnapshot, MemberSnapshot

TopicPartition = tuple[str, int]

OFFSETS_TOPIC = "__consumer_offsets"

_OFFSET_KEY_VERSION = 1
_GROUP_KEY_VERSION = 2
_OFFSET_VALUE_VERSION = 3
_OFFSET_VALUE_VERSION_WITH_EXPIRY = 1
_GROUP_VALUE_VERSION = 3


class UnreadableRecord(ValueError):
    """A record of the offsets topic whose bytes do not fit its version's layout."""


@dataclass(frozen=True, slots=True)
class OffsetKey:
    group_id: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class GroupKey:
    group_id: str


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """`log_offset` is where the commit stands in the offsets log: of two commits the later one wins."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int | None = None
    log_offset: int = -1


def partition_of_group(group_id: str, partition_count: int) -> int:
    """The absolute value of Java's String.hashCode (over UTF-16 code units), modulo the partition count.

    Java has no absolute value of -2^31; Apache Kafka takes 0 for it.
    """
    code = 0
    for (unit,) in struct.iter_unpack(">H", group_id.encode("utf-16-be", "surrogatepass")):
        code = (code * 31 + unit) & 0xFFFFFFFF
    signed = code - (1 << 32) if code >= 1 << 31 else code
    return 0 if signed == -(1 << 31) else abs(signed) % partition_count


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
    reader = _Reader(key)
    version = reader.int16()
    if version in (0, _OFFSET_KEY_VERSION):
        return OffsetKey(reader.string(), reader.string(), reader.int32())
    if version == _GROUP_KEY_VERSION:
        return GroupKey(reader.string())
    return None


def decode_offset_value(value: bytes, log_offset: int = -1) -> CommittedOffset | None:
    """None for a value of a version this code does not know. Raises UnreadableRecord."""
    reader = _Reader(value)
    version = reader.int16()
    if not 0 <= version <= _OFFSET_VALUE_VERSION:
        return None
    offset = reader.int64()
    leader_epoch = reader.int32() if version == _OFFSET_VALUE_VERSION else -1
    metadata = reader.string()
    commit_timestamp_ms = reader.int64()
    expire_ms = reader.int64() if version == _OFFSET_VALUE_VERSION_WITH_EXPIRY else -1
    return CommittedOffset(
        offset,
        leader_epoch,
        metadata,
        commit_timestamp_ms,
        expire_ms if expire_ms >= 0 else None,
        log_offset,
    )


def decode_group_value(value: bytes) -> GroupSnapshot | None:
    """None for a value of a version this code does not know. Raises UnreadableRecord."""
    reader = _Reader(value)
    version = reader.int16()
    if not 0 <= version <= _GROUP_VALUE_VERSION:
        return None
    protocol_type = reader.string()
    generation = reader.int32()
    protocol_name = reader.nullable_string()
    leader = reader.nullable_string()
    state_since_ms = reader.int64() if version >= 2 else -1
    members = tuple(_read_member(reader, version) for _ in range(reader.int32()))
    return GroupSnapshot(protocol_type, generation, protocol_name, leader, state_since_ms, members)


def _read_member(reader: _Reader, version: int) -> MemberSnapshot:
    member_id = reader.string()
    instance_id = reader.nullable_string() if version >= 3 else None
    client_id = reader.string()
    client_host = reader.string()
    rebalance_timeout_ms = reader.int32() if version >= 1 else -1
    session_timeout_ms = reader.int32()
    return MemberSnapshot(
        member_id,
        instance_id,
        client_id,
        client_host,
        rebalance_timeout_ms if version >= 1 else session_timeout_ms,
        session_timeout_ms,
        reader.sized_bytes(),
        reader.sized_bytes(),
    )


class _Reader:
    """Reads big-endian fields one after another; whatever does not fit raises UnreadableRecord."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def int16(self) -> int:
        return int.from_bytes(self._take(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self._take(4), "big", signed=True)

    def int64(self) -> int:
        return int.from_bytes(self._take(8), "big", signed=True)

    def sized_bytes(self) -> bytes:
        return self._take(self.int32())

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise UnreadableRecord(f"null where text must be, at byte {self._position}")
        return text

    def nullable_string(self) -> str | None:
        size = self.int16()
        if size == -1:
            return None
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise UnreadableRecord(f"text is not UTF-8 before byte {self._position}") from error

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if size < 0 or end > len(self._data):
            raise UnreadableRecord(f"field of {size} bytes at byte {self._position} of {len(self._data)}")
        taken = self._data[self._position : end]
        self._position = end
        return taken


# -- the offsets of one group -----------------------------------------------------------------------


@dataclass(slots=True)
class OffsetStore:
    """The committed offsets of one group."""

    _offsets: dict[TopicPartition, CommittedOffset] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._offsets)

    def get(self, partition: TopicPartition) -> CommittedOffset | None:
        return self._offsets.get(partition)

    def items(self) -> Iterable[tuple[TopicPartition, CommittedOffset]]:
        return self._offsets.items()

    def put(self, partition: TopicPartition, committed: CommittedOffset) -> None:
        """Keep a commit that is in the log, unless one from further on in the log is already kept:
        writes may be acknowledged in another order than they were made."""
        kept = self._offsets.get(partition)
        if kept is None or kept.log_offset <= committed.log_offset:
            self._offsets[partition] = committed

    def remove(self, partition: TopicPartition, before_log_offset: int | None = None) -> None:
        """Forget an offset; with a place in the log, only one that was committed before it."""
        kept = self._offsets.get(partition)
        if kept is not None and (before_log_offset is None or kept.log_offset < before_log_offset):
            del self._offsets[partition]

    def partitions_of(self, topics: Iterable[str]) -> list[TopicPartition]:
        wanted = set(topics)
        return [partition for partition in self._offsets if partition[0] in wanted]


@dataclass(frozen=True, slots=True)
class ExpiryRule:
    """From when on an offset ages. `kept_topics` None means every topic is still in use."""

    age_from_ms: Callable[[CommittedOffset], int]
    kept_topics: frozenset[str] | None = frozenset()


def expired_offsets(
    store: OffsetStore, rule: ExpiryRule, retention_ms: int, now_ms: int
) -> list[TopicPartition]:
    """Offsets past their explicit expiry, or `retention_ms` old, whose topic no member reads any more."""
    expired: list[TopicPartition] = []
    if rule.kept_topics is None:
        return expired
    for partition, committed in store.items():
        if partition[0] in rule.kept_topics:
            continue
        if committed.expire_timestamp_ms is not None:
            due_ms = committed.expire_timestamp_ms
        else:
            due_ms = rule.age_from_ms(committed) + retention_ms
        if now_ms >= due_ms:
            expired.append(partition)
    return expired
