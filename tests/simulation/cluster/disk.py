"""A partition's log on a virtual disk: records with their epochs, and how far they are flushed.

A killed process loses nothing (the page cache survives it). A loss of power keeps what was flushed and some
part of the rest, cut anywhere: a torn tail. A flush that fails has lost pages for good, which shows when the
process ends; the next one says nothing of them, so that until then the log is offline.

Records come one by one (plain producers) or in real batches, which stay whole; for these the log keeps the
product's own `ProducerState`, as the product's log does, and makes it anew from what is left after a
truncation or a start.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from millrace.broker.protocol.batch import BatchHeader, parse_header, stamp_offset_and_epoch
from millrace.broker.protocol.control_records import Marker, parse_marker
from millrace.broker.protocol.records import read_records
from millrace.broker.storage.leader_epochs import LeaderEpochCache
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.producer_state import ProducerState
from millrace.broker.storage.transaction_index import AbortedTransaction

CLIENT = "client"


class DiskFailed(Exception):
    """A flush failed."""


class VirtualEpochs(LeaderEpochCache):
    """The real rules of the leader epochs, without the file."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    def _store(self, entries: list[tuple[int, int]]) -> None:
        self._entries = self._filed = entries
        self.latest_epoch = entries[-1][0] if entries else -1

    def reload(self) -> None:
        """A process starts: what was only begun is forgotten."""
        self._entries = self._filed


class StoredBatch(NamedTuple):
    """A real batch with its place in the log; `marker` is what a control batch says."""

    header: BatchHeader
    marker: Marker | None
    data: bytes


class Stored(NamedTuple):
    """One record in a log; `batch` is what it came in, if it came in a real one."""

    epoch: int
    payload: object
    batch: StoredBatch | None = None


class Written(NamedTuple):
    """Where a batch went. `duplicate`: it was there already."""

    base_offset: int
    last_offset: int
    duplicate: bool = False


class VirtualLog:
    """Offsets `start_offset` to `end_offset`; everything below `flushed` survives a loss of power."""

    config = LogConfig()

    def __init__(self) -> None:
        self.start_offset = 0
        self.end_offset = 0
        self.flushed = 0
        self.is_offline = False
        self.failing: float | None = None
        """The next flush fails, behind this part of what it was to bring to the disk."""
        self._lost_from: int | None = None
        self.epochs = VirtualEpochs()
        self.producers = ProducerState()
        self._aborted: list[AbortedTransaction] = []
        self._batches: list[StoredBatch] = []
        self._records: dict[int, Stored] = {}

    # -- append --------------------------------------------------------------------------------------

    def append(self, epoch: int, payloads: list[object]) -> int:
        """As a leader: stamps the epoch; the first record's offset."""
        base = self.end_offset
        self.epochs.assign(epoch, base)
        for payload in payloads:
            self._records[self.end_offset] = Stored(epoch, payload)
            self.end_offset += 1
        return base

    def append_batch(self, epoch: int, batch: bytes, now_ms: int, origin: str) -> Written:
        """As a leader, in the order of `Log.append`. Raises what the producer state refuses."""
        header = parse_header(batch)
        marker = None
        if header.producer_id >= 0:
            if origin == CLIENT:
                known = self.producers.check(header)
                if known is not None:
                    return Written(known.first_offset, known.last_offset, duplicate=True)
            elif header.is_control:
                marker = parse_marker(batch)
                self.producers.check_marker(marker)
            else:
                self.producers.check_epoch(header)
        base = self.end_offset
        stamped = bytearray(batch)
        stamp_offset_and_epoch(stamped, base, epoch)
        stored = StoredBatch(header._replace(base_offset=base, leader_epoch=epoch), marker, bytes(stamped))
        payloads: list[object] = (
            [marker] if header.is_control else [(one.key, one.value) for one in read_records(stored.data)]
        )
        self.append_stored(base, [Stored(epoch, payload, stored) for payload in payloads], now_ms)
        return Written(base, self.end_offset - 1)

    def append_stored(self, offset: int, records: list[Stored], now_ms: int = 0) -> None:
        """As a follower: records as the leader has them."""
        if offset != self.end_offset:
            raise AssertionError(f"a follower's log ends at {self.end_offset}, records begin at {offset}")
        for record in records:
            self.epochs.assign(record.epoch, self.end_offset)
            self._records[self.end_offset] = record
            if record.batch is not None and record.batch.header.base_offset == self.end_offset:
                self._batches.append(record.batch)
                self._note(record.batch, now_ms)
            self.end_offset += 1

    def _note(self, batch: StoredBatch, now_ms: int) -> None:
        if batch.header.producer_id >= 0:
            aborted = self.producers.note(batch.header, now_ms, batch.marker)
            if aborted is not None:
                self._aborted.append(aborted)

    def recover(self, now_ms: int) -> None:
        """The producers as the log itself tells of them: after a start, and after a truncation."""
        while self._batches and self._batches[-1].header.base_offset >= self.end_offset:
            self._batches.pop()
        self.producers = ProducerState()
        self._aborted.clear()
        for batch in self._batches:
            self._note(batch, now_ms)

    # -- read ----------------------------------------------------------------------------------------

    def get(self, offset: int) -> Stored | None:
        return self._records.get(offset) if self.start_offset <= offset < self.end_offset else None

    def read(self, offset: int, end_offset: int, most: int) -> list[Stored]:
        """About `most` records: batches stay whole."""
        limit = min(end_offset, self.end_offset)
        end = self._batch_end(min(limit, offset + most), limit)
        return [self._records[at] for at in range(offset, end)]

    def _batch_end(self, offset: int, limit: int) -> int:
        following = self._records.get(offset) if offset < limit else None
        if following is None or following.batch is None or following.batch.header.base_offset == offset:
            return offset
        return following.batch.header.next_offset

    def batches(self) -> list[bytes]:
        """Every real batch from the log's start on."""
        return [batch.data for batch in self._batches if batch.header.base_offset >= self.start_offset]

    def last_stable_offset(self, high_watermark: int) -> int:
        return self.producers.last_stable_offset(high_watermark)

    def aborted_transactions(self, from_offset: int, end_offset: int) -> list[tuple[int, int]]:
        """(producer id, first offset) of the aborted transactions that touch the range."""
        return [
            (one.producer_id, one.first_offset)
            for one in self._aborted
            if one.last_offset >= from_offset and one.first_offset < end_offset
        ]

    # -- the disk ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Raises DiskFailed when it fails, and from then on."""
        if self.failing is not None and self.flushed < self.end_offset:
            self._lost_from = self.flushed + int((self.end_offset - self.flushed) * self.failing)
            self.is_offline, self.failing = True, None
        if self.is_offline:
            raise DiskFailed
        self.flushed = self.end_offset

    def advance_start(self, offset: int) -> None:
        if offset > self.start_offset:
            self.start_offset = offset
            self.epochs.truncate_from_start(offset)

    def truncate_to(self, offset: int, now_ms: int = 0) -> None:
        """A batch that is cut goes as a whole."""
        if offset >= self.end_offset:
            return
        batch = self._records[offset].batch if offset in self._records else None
        if batch is not None:
            offset = batch.header.base_offset
        if offset <= self.start_offset:
            self.start_anew(offset)
            return
        for at in range(offset, self.end_offset):
            del self._records[at]
        self.end_offset = offset
        self.flushed = min(self.flushed, offset)
        if self._lost_from is not None and self._lost_from >= offset:
            self._lost_from = None
        self.epochs.truncate_from_end(offset)
        self.recover(now_ms)

    def start_anew(self, offset: int) -> None:
        self._records.clear()
        self._batches.clear()
        self._aborted.clear()
        self.producers = ProducerState()
        self.start_offset = self.end_offset = self.flushed = offset
        self._lost_from = None
        self.epochs.clear()

    def delete(self) -> None:
        """What is made in its place is empty, and nothing is wrong with it."""
        self.start_anew(0)
        self.is_offline, self.failing = False, None

    def lose_power(self, kept: int) -> None:
        """`kept`: how far the disk got, at least to what was flushed."""
        self.truncate_to(max(kept, self.flushed))
        self.lose_pages()
        self.flushed = self.end_offset

    def lose_pages(self) -> None:
        """The process is over: what a failed flush did not bring to the disk is missing from now on."""
        self.is_offline = False
        if self._lost_from is not None:
            self.truncate_to(self._lost_from)
            self._lost_from = None
