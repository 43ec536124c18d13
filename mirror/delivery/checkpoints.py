"""Positions: how far each source partition is delivered, as records in a compacted topic of the target.

Called by `worker`: read to the end when partitions are assigned, written for the acknowledged prefix. The
format is `mirror_positions`, which the audit reads too.

Kafka refuses committed offsets for topics that its cluster does not have, and forgets those of an empty
group; records in a compacted topic do neither.

Invariants:
- a position that is written is a lower bound of what the target holds, so a late write by a worker that
  lost a partition can only cause repeats;
- a record that cannot be understood, or that was removed, is a *lost* position: the partition must not start
  again in silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol import mirror_positions
from millrace.broker.protocol.mirror_positions import (
    Position,
    decode_value,
    encode_value,
)
from millrace.mirror.topics.routes import SourcePartition


@dataclass
class Positions:
    """What the positions topic says: the newest record of each key."""

    known: dict[SourcePartition, Position] = field(default_factory=dict)
    unreadable: set[SourcePartition] = field(default_factory=set)

    def copy(self) -> Positions:
        return Positions(dict(self.known), set(self.unreadable))

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
    return mirror_positions.encode_key(partition.source, partition.topic, partition.partition)


def decode_key(key: bytes | None) -> SourcePartition | None:
    """The partition that a key names, or None when it is no key of this format."""
    named = mirror_positions.decode_key(key)
    return None if named is None else SourcePartition(*named)


def encode_records(positions: Iterable[tuple[SourcePartition, Position]]) -> list[tuple[bytes, bytes]]:
    return [(encode_key(partition), encode_value(position)) for partition, position in positions]
