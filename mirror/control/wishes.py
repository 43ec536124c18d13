"""Wishes of operators: what is paused, how fast a source may be read, which gaps may be let pass. Pure.

A wish is a record in the compacted topic `millrace.control.<mirror>` (one partition) on the target, so it
holds for every worker of the mirror and outlives all of them. `control` makes the records, `wish_reader`
reads them on every worker and asks here what they come to.

    key                                                             value, with version and at_ms
    {"wish":"pause","source":"ewr","topic":"flights","partition":0} {"paused":true}
    {"wish":"throttle","source":"ewr"}                              {"bytes_per_second":1000000}
    {"wish":"skip","source":"ewr","topic":"flights","partition":0}  {"from":7,"class":"expired"}
    {"wish":"retry","source":"ewr","topic":null,"partition":null}   {}

Rules:
- *the newest word about a partition counts*, however wide it was said: after `pause ewr` and then `resume
  ewr/flights` only flights goes on; a later `pause ewr` stops it again. The log's order is the order of
  words;
- a skip names one gap, by its first offset and its class: another gap of the same partition is not skipped;
- a retry counts only when it is seen to arrive: a worker that starts has tried everything anyway;
- what cannot be understood is no wish: it is left out, and said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol.foreign_json import read_json
from millrace.mirror.gaps.gaps import Gap
from millrace.mirror.topics.routes import SourcePartition

VERSION = 1
# Bytes/s; up to here a float holds every whole number.
MAX_RATE = 1 << 53

WishRecord: TypeAlias = tuple[bytes, bytes | None]
"""Key and value as they are written; the value None removes the wish."""


class WishKind(StrEnum):
    PAUSE = "pause"
    THROTTLE = "throttle"
    SKIP = "skip"
    RETRY = "retry"


@dataclass(frozen=True, slots=True, order=True)
class Scope:
    """Partitions that a wish is about; None stands for all sources, topics or partitions."""

    source: str | None = None
    topic: str | None = None
    partition: int | None = None

    def covers(self, partition: SourcePartition) -> bool:
        return (
            self.source in (None, partition.source)
            and self.topic in (None, partition.topic)
            and self.partition in (None, partition.partition)
        )

    def contains(self, other: Scope) -> bool:
        """Whether everything that `other` is about is meant here too."""
        return (
            self.source in (None, other.source)
            and self.topic in (None, other.topic)
            and self.partition in (None, other.partition)
        )

    def overlaps(self, other: Scope) -> bool:
        """Whether there may be a partition that both are about."""
        return all(
            mine is None or its is None or mine == its
            for mine, its in (
                (self.source, other.source),
                (self.topic, other.topic),
                (self.partition, other.partition),
            )
        )

    def __str__(self) -> str:
        """As the command line takes it: `ewr`, `ewr/flights`, `ewr/flights:0`, `*/flights`, `all`."""
        if self == Scope():
            return "all"
        text = self.source or "*"
        if self.topic is not None:
            text += f"/{self.topic}"
        if self.partition is not None:
            text += f":{self.partition}"
        return text


@dataclass(frozen=True, slots=True)
class Wish:
    """One record that was understood. `fields` is empty where the record removes the wish."""

    kind: WishKind
    scope: Scope
    fields: Mapping[str, Any]

    @property
    def is_removal(self) -> bool:
        return not self.fields


class Wishes:
    """What the control topic comes to. `apply` takes its records in their order."""

    def __init__(self) -> None:
        # In the order in which they were last said, oldest first.
        self._pauses: dict[Scope, bool] = {}
        self._rates: dict[str, float] = {}
        self._skips: dict[SourcePartition, tuple[int, str]] = {}

    def apply(self, key: bytes | None, value: bytes | None) -> Wish | None:
        """Takes one record. None when it is no wish that is understood here; it then changes nothing, but a
        wish that it replaces is gone."""
        kind, scope = decode_key(key)
        if kind is None:
            return None
        self._forget(kind, scope)
        if value is None:
            return Wish(kind, scope, {})
        try:
            fields = decode_value(value)
            self._remember(kind, scope, fields)
        except (UnreadableRecord, ValueError, KeyError, TypeError, OverflowError):
            return None
        return Wish(kind, scope, fields)

    def is_paused(self, partition: SourcePartition) -> bool:
        for scope, paused in reversed(self._pauses.items()):
            if scope.covers(partition):
                return paused
        return False

    def rate_of(self, source: str) -> float | None:
        """Bytes/s for the whole mirror, or None: as fast as it goes."""
        return self._rates.get(source)

    def skips(self, gap: Gap) -> bool:
        return self._skips.get(gap.partition) == (gap.from_offset, gap.gap_class.value)

    @property
    def paused_scopes(self) -> dict[Scope, list[Scope]]:
        """What was said to pause and not taken back as a whole, in order, each with what was later let go on
        of it. Of that, what was paused again stands for itself."""
        said = list(self._pauses.items())
        found = {}
        for at, (scope, paused) in enumerate(said):
            resumed = [
                other for other, is_paused in said[at + 1 :] if not is_paused and scope.overlaps(other)
            ]
            if paused and not any(other.contains(scope) for other in resumed):
                found[scope] = sorted(resumed, key=str)
        return dict(sorted(found.items(), key=lambda each: str(each[0])))

    @property
    def skipped_partitions(self) -> Mapping[SourcePartition, int]:
        """Partitions with a wish to skip that has not been taken away, and the first offset of its gap."""
        return {partition: first for partition, (first, _) in self._skips.items()}

    def pause_records(self, scope: Scope, *, paused: bool, at_ms: int) -> list[WishRecord]:
        """The records that pause `scope`, or let it go on. Narrower words become moot and are removed, so the
        topic holds no more than one record for each scope that still says something."""
        narrower = [other for other in self._pauses if other != scope and scope.contains(other)]
        records: list[WishRecord] = [
            (encode_key(WishKind.PAUSE, other), None) for other in sorted(narrower, key=str)
        ]
        records.append((encode_key(WishKind.PAUSE, scope), encode_value(at_ms, paused=paused)))
        return records

    def _forget(self, kind: WishKind, scope: Scope) -> None:
        if kind is WishKind.PAUSE:
            self._pauses.pop(scope, None)
        elif kind is WishKind.THROTTLE:
            self._rates.pop(scope.source or "", None)
        elif kind is WishKind.SKIP:
            self._skips.pop(_only_partition(scope), None)

    def _remember(self, kind: WishKind, scope: Scope, fields: Mapping[str, Any]) -> None:
        if kind is WishKind.PAUSE:
            if not isinstance(fields["paused"], bool):
                raise TypeError("paused is true or false")
            self._pauses[scope] = fields["paused"]
        elif kind is WishKind.THROTTLE:
            rate = float(fields["bytes_per_second"])
            if not 1 <= rate <= MAX_RATE or scope.source is None:
                raise ValueError("a rate that can be counted with, of one source")
            self._rates[scope.source] = rate
        elif kind is WishKind.SKIP:
            self._skips[_only_partition(scope)] = (int(fields["from"]), str(fields["class"]))


def _only_partition(scope: Scope) -> SourcePartition:
    return SourcePartition(
        scope.source or "", scope.topic or "", -1 if scope.partition is None else scope.partition
    )


def throttle_record(source: str, bytes_per_second: float | None, at_ms: int) -> WishRecord:
    key = encode_key(WishKind.THROTTLE, Scope(source))
    return key, None if bytes_per_second is None else encode_value(at_ms, bytes_per_second=bytes_per_second)


def skip_record(partition: SourcePartition, from_offset: int, gap_class: str, at_ms: int) -> WishRecord:
    scope = Scope(partition.source, partition.topic, partition.partition)
    return encode_key(WishKind.SKIP, scope), encode_value(at_ms, **{"from": from_offset, "class": gap_class})


def skipped_record(partition: SourcePartition) -> WishRecord:
    """Takes a wish to skip away, once the position behind its gap is written."""
    scope = Scope(partition.source, partition.topic, partition.partition)
    return encode_key(WishKind.SKIP, scope), None


def retry_record(scope: Scope, at_ms: int) -> WishRecord:
    return encode_key(WishKind.RETRY, scope), encode_value(at_ms)


def encode_key(kind: WishKind, scope: Scope) -> bytes:
    key: dict[str, Any] = {"wish": kind.value, "source": scope.source}
    if kind is not WishKind.THROTTLE:
        key |= {"topic": scope.topic, "partition": scope.partition}
    return json.dumps(key, separators=(",", ":")).encode()


def encode_value(at_ms: int, **fields: Any) -> bytes:
    return json.dumps({"version": VERSION, "at_ms": at_ms, **fields}, separators=(",", ":")).encode()


def decode_key(key: bytes | None) -> tuple[WishKind | None, Scope]:
    """The kind None: no key of this format."""
    try:
        fields = read_json(key or b"")
        kind = WishKind(fields["wish"])
        source, topic, partition = fields["source"], fields.get("topic"), fields.get("partition")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, Scope()
    names_are_text = all(part is None or isinstance(part, str) for part in (source, topic))
    if not names_are_text or not (partition is None or type(partition) is int):
        return None, Scope()
    return kind, Scope(source, topic, partition)


def decode_value(value: bytes) -> Mapping[str, Any]:
    """Raises UnreadableRecord when the value is not a wish of a version known here."""
    try:
        fields = read_json(value)
    except ValueError as error:
        raise UnreadableRecord(f"not a wish: {error}") from None
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise UnreadableRecord("a wish of another version")
    return fields
