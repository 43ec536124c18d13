"""What transactions leave in the `__transaction_state` log, in Apache Kafka's own layout.

Pure. The coordinator writes value version 0, as Apache Kafka does while its feature `transaction.version` is
0 (all of 3.x). Version 1 is what Apache Kafka 4 leaves; it is written again where version 0 has no room for
what decides how the transaction is completed.

Layout (big endian; string = i16 size + UTF-8; array = i32 count, null = -1):

    key              version i16 = 0, transactional id string
    value version 0  version i16, producer id i64, producer epoch i16, timeout ms i32, state i8,
                     partitions array|null of (topic string, array of partition i32),
                     last update ms i64, start ms i64
    value version 1  the same with compact strings and arrays, tagged fields after each topic and at the
                     end: 0 previous producer id i64, 1 next producer id i64, 2 client version i16; a tag is
                     left out where it says nothing (-1, -1, 0)

`partitions` is null in state Empty. A record without a value is a tombstone. Keys of unknown versions come
from newer software and are skipped; a value of an unknown version is an error, because a transaction that is
silently not loaded would stay open for ever.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable

from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.protocol.wire import uvarint
from millrace.broker.transactions.values import NO_PRODUCER_ID, TransactionRecord, TransactionState

LATEST_VALUE_VERSION = 1
_KEY_VERSION = 0
_HEAD = struct.Struct(">hqhib")
_TIMES = struct.Struct(">qq")
_TAG_PREVIOUS_ID, _TAG_NEXT_ID, _TAG_CLIENT_VERSION = range(3)


def encode_key(transactional_id: str) -> bytes:
    return struct.pack(">h", _KEY_VERSION) + _string(transactional_id)


def encode_value(record: TransactionRecord, version: int | None = None) -> bytes:
    """`version` is 0, 1, or None for the oldest that keeps the next producer id and the client's version.
    Version 0 leaves them out, and the previous producer id, which only helps a client to repeat itself."""
    if version is None:
        version = int(record.next_producer_id != NO_PRODUCER_ID or record.client_version != 0)
    head = _HEAD.pack(version, record.producer_id, record.epoch, record.timeout_ms, record.state.code)
    times = _TIMES.pack(record.updated_ms, record.started_ms)
    topics = None if record.state is TransactionState.EMPTY else _by_topic(record.partitions)
    if version == 0:
        return head + _old_topics(topics) + times
    return head + _compact_topics(topics) + times + _tags(record)


def _by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    topics: defaultdict[str, list[int]] = defaultdict(list)
    for topic, partition in sorted(partitions):
        topics[topic].append(partition)
    return topics


def _old_topics(topics: dict[str, list[int]] | None) -> bytes:
    if topics is None:
        return struct.pack(">i", -1)
    parts = [struct.pack(">i", len(topics))]
    for topic, partitions in topics.items():
        parts += [_string(topic), struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)]
    return b"".join(parts)


def _compact_topics(topics: dict[str, list[int]] | None) -> bytes:
    if topics is None:
        return b"\x00"
    parts = [uvarint(len(topics) + 1)]
    for topic, partitions in topics.items():
        name = topic.encode()
        parts += [uvarint(len(name) + 1), name, uvarint(len(partitions) + 1)]
        parts += [struct.pack(f">{len(partitions)}i", *partitions), b"\x00"]
    return b"".join(parts)


def _tags(record: TransactionRecord) -> bytes:
    tags: list[tuple[int, bytes]] = []
    if record.previous_producer_id != NO_PRODUCER_ID:
        tags.append((_TAG_PREVIOUS_ID, struct.pack(">q", record.previous_producer_id)))
    if record.next_producer_id != NO_PRODUCER_ID:
        tags.append((_TAG_NEXT_ID, struct.pack(">q", record.next_producer_id)))
    if record.client_version:
        tags.append((_TAG_CLIENT_VERSION, struct.pack(">h", record.client_version)))
    encoded = [uvarint(len(tags))]
    for number, value in tags:
        encoded += [uvarint(number), uvarint(len(value)), value]
    return b"".join(encoded)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">h", len(encoded)) + encoded


# -- decoding ---------------------------------------------------------------------------------------


def decode_key(key: bytes | None) -> str | None:
    """The transactional id; None for a key of a version this code does not know. Raises UnreadableRecord."""
    if key is None:
        raise UnreadableRecord("a record of the transaction log has no key")
    reader = _Reader(key)
    return reader.string() if reader.number(">h") == _KEY_VERSION else None


def decode_value(value: bytes) -> TransactionRecord:
    """Raises UnreadableRecord, also for a version this code does not know."""
    reader = _Reader(value)
    version = reader.number(">h")
    if not 0 <= version <= LATEST_VALUE_VERSION:
        raise UnreadableRecord(f"value version {version} is not 0 to {LATEST_VALUE_VERSION}")
    producer_id, epoch, timeout_ms, code = reader.numbers(">qhib")
    try:
        state = TransactionState.from_code(code)
    except ValueError as error:
        raise UnreadableRecord(str(error)) from None
    partitions = reader.topics(compact=version > 0)
    updated_ms, started_ms = reader.numbers(_TIMES.format)
    tags = reader.tags() if version > 0 else {}
    return TransactionRecord(
        producer_id,
        epoch,
        timeout_ms,
        state,
        partitions,
        started_ms,
        updated_ms,
        previous_producer_id=_tagged(tags, _TAG_PREVIOUS_ID, ">q", NO_PRODUCER_ID),
        next_producer_id=_tagged(tags, _TAG_NEXT_ID, ">q", NO_PRODUCER_ID),
        client_version=_tagged(tags, _TAG_CLIENT_VERSION, ">h", 0),
    )


def _tagged(tags: dict[int, bytes], number: int, layout: str, default: int) -> int:
    return _Reader(tags[number]).number(layout) if number in tags else default


class _Reader:
    """Reads fields one after another; whatever does not fit raises UnreadableRecord."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def number(self, layout: str) -> int:
        return self.numbers(layout)[0]

    def string(self) -> str:
        return self._text(self.number(">h"))

    def topics(self, *, compact: bool) -> frozenset[TopicPartition]:
        count = self._uvarint() - 1 if compact else self.number(">i")
        partitions: set[TopicPartition] = set()
        for _ in range(self._count(count)):
            topic = self._text(self._uvarint() - 1) if compact else self.string()
            size = self._count(self._uvarint() - 1 if compact else self.number(">i"))
            partitions.update((topic, number) for number in self.numbers(f">{size}i"))
            if compact:
                self.tags()
        return frozenset(partitions)

    def tags(self) -> dict[int, bytes]:
        return {self._uvarint(): self._take(self._uvarint()) for _ in range(self._count(self._uvarint()))}

    def _count(self, count: int) -> int:
        """A count that the rest of the record could hold; -1 (null) is as good as none."""
        if not -1 <= count <= len(self._data) - self._position:
            raise UnreadableRecord(f"{count} elements announced at byte {self._position}")
        return max(count, 0)

    def _uvarint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            (byte,) = self._take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise UnreadableRecord(f"a varint before byte {self._position} has no end")

    def _text(self, size: int) -> str:
        try:
            return self._take(size).decode()
        except UnicodeDecodeError:
            raise UnreadableRecord(f"text is not UTF-8 before byte {self._position}") from None

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if size < 0 or end > len(self._data):
            raise UnreadableRecord(f"field of {size} bytes at byte {self._position} of {len(self._data)}")
        taken = self._data[self._position : end]
        self._position = end
        return taken
