"""A mirror's positions as records: how far each source partition is delivered, in a compacted topic. Pure.

Written and read by mirrors (`mirror/delivery/checkpoints.py`), read by the audit. The format is final:

    topic  millrace.positions.<mirror>, one partition, cleanup.policy=compact
    key    {"source":"ewr","topic":"flights","partition":0}
    value  {"version":1,"next_offset":n,"cluster_id":…,"topic_id":"uuid","leader_epoch":n,"at_ms":…,
            "log_end":n,"waiting_since_ms":n,"began":n,"epoch_from":n,"targets":[["flights",0]]}
           {"version":1,"lost":true}: it was mirrored, and nobody knows how far

A key of another kind is no position. `log_end`, `waiting_since_ms`, `began`, `epoch_from` and `targets` are
missing in positions of older programs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol.foreign_json import read_json
from millrace.broker.protocol.topic_partition import TopicPartition

VERSION = 1
NO_TOPIC_ID = UUID(int=0)
LOST = b'{"version":1,"lost":true}'


class PositionKey(NamedTuple):
    """A partition of a source, which is named as its mirror calls it."""

    source: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Position:
    """`next_offset` is the source offset to fetch next; `leader_epoch` that of the last batch before it.

    Of the source's log when this was written, as far as it was known (-1): `log_end`, and since when a record
    has been waiting at `next_offset`. The next owner's lag and gaps begin with them.

    `at_ms` is when this was written. It never goes back from one owner to the next, whatever their clocks
    say: the offset map's chunks are put in order by it (`offset_map`).

    `began` is the source offset at which this topic's mirroring began: below it nothing was carried by this
    mirror. -1 where it is not known, in positions of older programs.

    `epoch_from` is the first offset that was fetched in `leader_epoch`, -1 where it is not known: where the
    source's history went on differently from before that epoch, what it has from there on is another's.

    `targets` are the target partitions that its records went to, in the order of the first ones: names and
    partition offsets of a config change, and sources leave it. Empty where that is not known, in positions
    of older programs."""

    next_offset: int
    cluster_id: str
    topic_id: UUID
    leader_epoch: int
    at_ms: int
    log_end: int = -1
    waiting_since_ms: int = -1
    began: int = -1
    epoch_from: int = -1
    targets: tuple[TopicPartition, ...] = field(default=(), kw_only=True)


def encode_key(source: str, topic: str, partition: int) -> bytes:
    key = {"source": source, "topic": topic, "partition": partition}
    return json.dumps(key, separators=(",", ":")).encode()


def decode_key(key: bytes | None) -> PositionKey | None:
    """The partition that a key names, or None when it is no key of this format."""
    try:
        fields = read_json(key or b"")
        source, topic, partition = fields["source"], fields["topic"], fields["partition"]
    except (ValueError, TypeError, KeyError):
        return None
    if not (isinstance(source, str) and isinstance(topic, str) and type(partition) is int):
        return None
    if not 0 <= partition < 1 << 31:
        return None
    return PositionKey(source, topic, partition)


def encode_value(position: Position) -> bytes:
    value: dict[str, object] = {
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
    if position.epoch_from >= 0:
        value["epoch_from"] = position.epoch_from
    if position.targets:
        value["targets"] = position.targets
    return json.dumps(value, separators=(",", ":")).encode()


def decode_value(value: bytes) -> Position:
    """Raises UnreadableRecord when the value is not a position of a version known here."""
    try:
        fields = read_json(value)
        if fields["version"] != VERSION:
            raise UnreadableRecord(f"a position of version {fields['version']!r}")
        if fields.get("lost"):
            raise UnreadableRecord("a position that its mirror lost")
        cluster_id = fields["cluster_id"]
        if not isinstance(cluster_id, str):
            raise UnreadableRecord("not a position: cluster_id is no text")
        position = Position(
            _whole(fields, "next_offset"),
            cluster_id,
            UUID(fields["topic_id"]),
            *(_whole(fields, name) for name in ("leader_epoch", "at_ms")),
            *(_whole(fields, name, -1) for name in ("log_end", "waiting_since_ms", "began", "epoch_from")),
            targets=tuple(read_target(each) for each in fields.get("targets", ())),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableRecord(f"not a position: {error}") from None
    if position.next_offset < 0:
        raise UnreadableRecord(f"a position before the log: {position.next_offset}")
    return position


def read_target(told: object) -> TopicPartition:
    """A target partition as records tell it: `["flights",0]`. Raises ValueError for anything else."""
    match told:
        case [str(topic), int(partition)] if type(partition) is int and 0 <= partition < 1 << 31:
            return topic, partition
    raise ValueError(f"no topic and partition: {told!r}")


def _whole(fields: dict[str, object], name: str, absent: int | None = None) -> int:
    value = fields[name] if absent is None else fields.get(name, absent)
    if type(value) is not int:
        raise ValueError(f"{name} is no whole number")
    if not -1 <= value < 1 << (31 if name == "leader_epoch" else 63):
        raise ValueError(f"{name} is no number of the protocol's")
    return value
