"""Logs as the audit's world has them: batches as a broker keeps them, and the same record by record.

Used by `audit_world` and what belongs to it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from millrace.audit.contract.content_digest import record_digest
from millrace.audit.contract.events import Event, encode_event
from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_prefix
from millrace.broker.protocol.batch import seal, stamp_timestamps
from millrace.broker.protocol.records import Record, build_batch

WINDOW_MS, GRACE_MS, LEASE_MS = 1000, 500, 4000
NO_IDENTITY = ""


@dataclass(frozen=True, slots=True)
class Rec:
    """One record as it stands somewhere.

    `content` numbers its bytes, -1 is a tombstone; `stream` "" has no identity that can be read. `producer`
    is the name in its header, "" for none.
    """

    stream: str
    sequence: int
    created_ms: int
    content: int = 0
    producer: str = ""

    @property
    def value(self) -> bytes | None:
        return None if self.content < 0 else b"v%d" % self.content

    @property
    def digest(self) -> int:
        return record_digest(self.sequence, None, self.value, ())

    @property
    def window(self) -> int:
        return self.created_ms - self.created_ms % WINDOW_MS


@dataclass(slots=True)
class Copy:
    """A record at an offset. `state` is written, open (its transaction is) or aborted."""

    offset: int
    rec: Rec
    state: str = "written"


@dataclass(slots=True)
class Batch:
    base: int
    last: int
    data: bytes


class Log:
    """One partition: batches as a broker keeps them, and the same record by record."""

    def __init__(self, cluster: str, name: str, partition: int, topic_id: uuid.UUID):
        self.cluster, self.name, self.partition, self.topic_id = cluster, name, partition, topic_id
        self.batches: list[Batch] = []
        self.copies: list[Copy] = []
        self.start = self.end = 0
        self.open_pid, self.open_from = -1, -1
        self.aborted: list[tuple[int, int, int]] = []
        self.calm: list[int] = []  # batches that begin here are in no transaction
        self.epochs: list[tuple[int, int]] = []  # none: its broker does not tell
        self.cuts: list[int] = []

    @property
    def place(self) -> tuple[str, str, int]:
        return (self.cluster, self.name, self.partition)

    @property
    def stable_end(self) -> int:
        """The last stable offset."""
        return self.open_from if self.open_from >= 0 else self.end

    def append(self, recs: list[Rec], *, append_ms: int | None = None, pid: int = -1) -> None:
        """One batch; with a `pid`, part of that producer's transaction."""
        if self.open_from < 0:
            self.calm.append(self.end)
        if pid >= 0 and self.open_from < 0:
            self.open_pid, self.open_from = pid, self.end
        records = [Record(None, rec.value, _headers(rec), rec.created_ms) for rec in recs]
        batch = build_batch(
            records,
            base_offset=self.end,
            producer_id=pid,
            producer_epoch=0,
            base_sequence=0,
            transactional=pid >= 0,
            compression=4 if len(recs) > 5 else 0,
        )
        if append_ms is not None:
            stamp_timestamps(batch, append_ms, log_append_time=True)
            seal(batch)
        state = "open" if pid >= 0 else "written"
        self.copies += [Copy(self.end + i, rec, state) for i, rec in enumerate(recs)]
        self._add(bytes(batch), len(recs))

    def end_transaction(self, commit: bool) -> None:
        """A control batch, and what the transaction wrote becomes visible or never will."""
        marker = Record(b"\0\0\0\1" if commit else b"\0\0\0\0", b"\0" * 6, (), 0)
        batch = build_batch(
            [marker], base_offset=self.end, producer_id=self.open_pid, transactional=True, control=True
        )
        if not commit:
            self.aborted.append((self.open_pid, self.open_from, self.end))
        for copy in self.copies:
            if copy.state == "open":
                copy.state = "written" if commit else "aborted"
        self._add(bytes(batch), 1)
        self.open_pid, self.open_from = -1, -1

    def shorten(self, cut: int) -> None:
        """Another leader, whose log ends here, and who gives the offsets from here on out again."""
        self.batches = [batch for batch in self.batches if batch.last < cut]
        self.copies = [copy for copy in self.copies if copy.offset < cut]
        self.aborted = [each for each in self.aborted if each[1] < cut]
        self.calm = [offset for offset in self.calm if offset < cut]
        if self.epochs:
            newest = self.epochs[-1][0]
            self.epochs = [*(each for each in self.epochs if each[1] < cut), (newest + 1, cut)]
        self.end = cut
        self.cuts.append(cut)

    def history(self) -> tuple[tuple[int, int], ...]:
        """What its leader tells of its epochs: from its start on."""
        later = [(epoch, first) for epoch, first in self.epochs if first > self.start]
        spanning = [epoch for epoch, first in self.epochs if first <= self.start]
        return (*((epoch, self.start) for epoch in spanning[-1:]), *later)

    def epoch_before(self, offset: int) -> int:
        """In which epoch the last record before the offset was written; -1 when there is none."""
        return max((epoch for epoch, first in self.epochs if first < offset), default=-1)

    def visible(self, first: int, end: int, behind: Collection[int] = ()) -> Iterable[Copy]:
        """What a committed reader gets of [first, end); `behind` are offsets below the start that it got."""
        return (
            copy
            for copy in self.copies
            if copy.state == "written"
            and first <= copy.offset < end
            and (copy.offset >= self.start or copy.offset in behind)
        )

    def _add(self, data: bytes, count: int) -> None:
        self.batches.append(Batch(self.end, self.end + count - 1, data))
        self.end += count


def _headers(rec: Rec) -> tuple[tuple[str, bytes | None], ...]:
    if rec.stream == NO_IDENTITY:
        return ((HEADER_KEY, b"\x07broken"),)
    prefix, name = encode_prefix(rec.stream), rec.producer.encode()
    return ((HEADER_KEY, encode_identity(prefix, rec.sequence, rec.created_ms, name)),)


@dataclass(slots=True)
class Sent:
    """An event that its sender believes delivered. `where` the cluster; `lost` the events topic lost it."""

    event: Event
    where: str
    lost: bool = False
    record: tuple[bytes, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.record = encode_event(self.event)
