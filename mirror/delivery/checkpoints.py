"""Positions: how far each source partition is delivered, as records in a compacted topic of the target.

Called by `worker`: read to the end when partitions are assigned, written for the acknowledged prefix.
The format is final:

    topic  millrace.positions.<mirror>, one partition, cleanup.policy=compact
    key    {"source":"ewr","topic":"flights","partition":0}
    value  {"version":1,"next_offset":n,"cluster_id":…,"topic_id":"uuid","leader_epoch":n,"at_ms":…,
            "log_end":n,"waiting_since_ms":n,"began":n}

Kafka refuses committed offsets for topics that its cluster does not have, and forgets those of an empty
group; records in a compacted topic do neither.

Invariants:
- a position that is written is a lower bound of what the target holds, so a late write by a worker that
  lost a partition can only cause repeats;
- a record that cannot be understood, or that was removed, is a *lost* position: the partition must not start
  again in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

from millrace.broker.errors import UnreadableRecord
from millrace.mirror.topics.routes import SourcePartition

VERSION = 1
NO_TOPIC_ID = UUID(int=0)
# Says of a partition that it was mirrored, and that nobody knows how far.
LOST = b'{"version":1,"lost":true}'


@dataclass(frozen=True, slots=True)
class Position:
    """`next_offset` is the source offset to fetch next; `leader_epoch` that of the last batch before it.

    Of the source's log when this was written, as far as it was known (-1): `log_end`, and since when a record
    has been waiting at `next_offset`. The next owner's lag and gaps begin with them.

    `at_ms` is when this was written. It never goes back from one owner to the next, whatever their clocks
    say: the offset map's chunks are put in order by it (`offset_map`).

    `began` is the source offset at which this topic's mirroring began: below it nothing was carried by this
    mirror. -1 where it is not known, in positions of older programs."""

    next_offset: int
    cluster_id: str
    topic_id: UUID
    leader_epoch: int
    at_ms: int
    log_end: int = -1
    waiting_since_ms: int = -1
    began: int = -1


@dataclass
class Positions:
    """What the positions topic says: the newest record of each key."""

    known: dict[SourcePartition, Position] = field(default_factory=dict)
    unreadable: set[SourcePartition] = field(default_factory=set)

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Takes one record, in offset order. A key of another kind is not for this version: ignored."""
        partition = decode_key(key)
        if partition is None:
            return
        self.unreadable.discard(partition)
        self.known.pop(partition, None)
        if value is None:
            # It was mirrored once, whoever removed this: to begin anew in silence would be a gap, or repeats.
            self.unreadable.add(partition)
            return
        try:
            self.known[partition] = decode_value(value)
        except UnreadableRecord:
            self.unreadable.add(partition)


def encode_key(partition: SourcePartition) -> bytes:
    key = {"source": partition.source, "topic": partition.topic, "partition": partition.partition}
    return json.dumps(key, separators=(",", ":")).encode()


def decode_key(key: bytes | None) -> SourcePartition | None:
    """The partition that a key names, or None when it is no key of this format."""
    try:
        fields = json.loads(key or b"")
        source, topic, partition = fields["source"], fields["topic"], fields["partition"]
    except (ValueError, TypeError, KeyError):
        return None
    if not (isinstance(source, str) and isinstance(topic, str) and type(partition) is int):
        return None
    return SourcePartition(source, topic, partition)


def encode_value(position: Position) -> bytes:
    value = {
        "version": VERSION,
        "next_offset": position.next_offset,
        "cluster_id": position.cluster_id,
        "topic_id": str(position.topic_id),
        "leader_epoch": position.leader_epoch,
        "at_ms": position.at_ms,
        "log_end": position.log_end,
        "waiting_since_ms": position.waiting_since_ms,
    }
    if position.began >= 0:
        value["began"] = position.began
    return json.dumps(value, separators=(",", ":")).encode()


def decode_value(value: bytes) -> Position:
    """Raises UnreadableRecord when the value is not a position of a version known here."""
    try:
        fields = json.loads(value)
        if fields["version"] != VERSION:
            raise UnreadableRecord(f"a position of version {fields['version']!r}")
        position = Position(
            int(fields["next_offset"]),
            str(fields["cluster_id"]),
            UUID(fields["topic_id"]),
            int(fields["leader_epoch"]),
            int(fields["at_ms"]),
            int(fields.get("log_end", -1)),
            int(fields.get("waiting_since_ms", -1)),
            int(fields.get("began", -1)),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UnreadableRecord(f"not a position: {error}") from None
    if position.next_offset < 0:
        raise UnreadableRecord(f"a position before the log: {position.next_offset}")
    return position


def encode_records(positions: Iterable[tuple[SourcePartition, Position]]) -> list[tuple[bytes, bytes]]:
    return [(encode_key(partition), encode_value(position)) for partition, position in positions]
