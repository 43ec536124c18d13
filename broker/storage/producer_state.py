"""What a partition remembers of its idempotent and transactional producers.

Per producer id: the epoch, the last five batches (a client may have five in flight), the epoch of the last
coordinator that ended a transaction, and the offset at which an open transaction began. Rules are Kafka's
(KIP-98, KIP-360):

    same epoch, next sequence                         append
    one of the last five batches again                duplicate: answered with its first offset
    same epoch, any other sequence                    OUT_OF_ORDER_SEQUENCE_NUMBER
    newer epoch, sequence 0                           append, the old epoch is fenced
    newer epoch, other sequence                       OUT_OF_ORDER_SEQUENCE_NUMBER
    older epoch                                       INVALID_PRODUCER_EPOCH
    no state for the producer                         append, whatever the sequence
    behind a batch that the disk has refused          KAFKA_STORAGE_ERROR, until that one is there
    no transaction, while the producer has one open   INVALID_TXN_STATE
    marker of an older producer epoch                 INVALID_PRODUCER_EPOCH
    marker of an older coordinator                    TRANSACTION_COORDINATOR_FENCED

A transaction holds readers of committed data back from its first record on until its marker lies below the
high watermark: before that, a change of leaders may take the marker away again. Sequences wrap from
2**31 - 1 to 0. Called by the log alone (under its lock), and by recovery. No I/O and no clock here; snapshots
are in `producer_snapshot.py`.

Two differences from Apache Kafka. Its disk that refuses one batch takes no more at all; here the next may
fit, or room be made meanwhile, and what was sent behind a refused batch would meet a gap: OUT_OF_ORDER lets
librdkafka take a new epoch and send again, under it, what other partitions may have already. And a producer
expires when nothing was *heard* of it for
`producer.id.expiration.ms`; there, the record timestamps count, so that a replay of old data loses its
protection at once.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.broker.errors import (
    InvalidProducerEpoch,
    InvalidTxnState,
    KafkaStorageError,
    OutOfOrderSequence,
    TransactionCoordinatorFenced,
)
from millrace.broker.protocol.batch import NO_PRODUCER_EPOCH, NO_SEQUENCE, BatchHeader
from millrace.broker.protocol.control_records import Marker
from millrace.broker.storage.transaction_index import AbortedTransaction

REMEMBERED_BATCH_COUNT = 5
_SEQUENCE_MASK = 0x7FFFFFFF
_UNREPLICATED_COUNT = 1024


class RememberedBatch(NamedTuple):
    """A batch that was stored; `first_sequence` follows from the last and the number of records."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp_ms: int

    @property
    def first_sequence(self) -> int:
        return (self.last_sequence - self.offset_delta) & _SEQUENCE_MASK

    @property
    def first_offset(self) -> int:
        return self.last_offset - self.offset_delta


@dataclass(slots=True)
class ProducerEntry:
    """State of one producer id. `batches` is oldest first."""

    epoch: int
    batches: list[RememberedBatch] = field(default_factory=list)
    last_heard_ms: int = 0
    last_timestamp_ms: int = -1
    coordinator_epoch: int = -1
    transaction_start_offset: int = -1

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


class ProducerState:
    """The producers of one partition, up to `end_offset` (the offset after the last batch noted)."""

    def __init__(self, entries: dict[int, ProducerEntry] | None = None, end_offset: int = 0):
        self.entries: dict[int, ProducerEntry] = entries or {}
        self.end_offset = end_offset
        # Producer -> where its open transaction began. Transactions begin in the order of offsets, so the
        # first is the oldest: a fetch asks for it and must not go through all producers.
        opened = sorted(
            (entry.transaction_start_offset, producer_id)
            for producer_id, entry in self.entries.items()
            if entry.transaction_start_offset >= 0
        )
        self._open: dict[int, int] = {producer_id: start for start, producer_id in opened}
        # (first offset, marker's offset) of ended transactions whose marker may be above the high watermark.
        self._unreplicated: deque[tuple[int, int]] = deque()
        self._unreplicated_lock = threading.Lock()
        # Producer -> epoch and first sequence of the oldest batch that the disk has refused.
        self._refused: dict[int, tuple[int, int]] = {}
        self._refused_long_since: set[int] = set()  # before `expire` looked last

    def check(self, header: BatchHeader) -> RememberedBatch | None:
        """Decides on a producer's batch before it is stored: None to append it, or the stored batch that
        it repeats. Raises OutOfOrderSequence, InvalidProducerEpoch, KafkaStorageError for a batch behind
        one that was `refused`."""
        if self._refused:
            self._check_refused(header)
        entry = self.entries.get(header.producer_id)
        if entry is None:
            return None
        if header.producer_epoch < entry.epoch:
            raise _fenced(header.producer_id, header.producer_epoch, entry.epoch)
        stored = self._check_sequence(entry, header)
        if stored is None and entry.transaction_start_offset >= 0 and not header.is_transactional:
            raise InvalidTxnState(
                f"producer {header.producer_id} sends a batch outside of its transaction, which is open "
                f"since offset {entry.transaction_start_offset}"
            )
        return stored

    def check_epoch(self, header: BatchHeader) -> None:
        """Decides on a batch without sequence numbers that the broker writes for a producer (a group's
        offsets in a transaction). Raises InvalidProducerEpoch."""
        entry = self.entries.get(header.producer_id)
        if entry is not None and header.producer_epoch < entry.epoch:
            raise _fenced(header.producer_id, header.producer_epoch, entry.epoch)

    def check_marker(self, marker: Marker) -> None:
        """Decides on a marker before it is stored. Raises InvalidProducerEpoch for an older producer and
        TransactionCoordinatorFenced for an older coordinator than those known."""
        entry = self.entries.get(marker.producer_id)
        if entry is None:
            return
        if marker.producer_epoch < entry.epoch:
            raise _fenced(marker.producer_id, marker.producer_epoch, entry.epoch)
        if marker.coordinator_epoch < entry.coordinator_epoch:
            raise TransactionCoordinatorFenced(
                f"a coordinator of epoch {marker.coordinator_epoch} ends a transaction of producer "
                f"{marker.producer_id}, epoch {entry.coordinator_epoch} has taken its place"
            )

    def refused(self, header: BatchHeader) -> None:
        """The disk has not taken this batch: what its producer has sent behind it has to wait for it."""
        epoch, _ = self._refused.get(header.producer_id, (NO_PRODUCER_EPOCH, NO_SEQUENCE))
        if header.producer_epoch > epoch:
            self._refused[header.producer_id] = header.producer_epoch, header.base_sequence

    def _check_refused(self, header: BatchHeader) -> None:
        epoch, sequence = self._refused.get(header.producer_id, (NO_PRODUCER_EPOCH, NO_SEQUENCE))
        distance = (header.base_sequence - sequence) & _SEQUENCE_MASK
        if epoch == header.producer_epoch and 0 < distance <= _SEQUENCE_MASK // 2:
            raise KafkaStorageError(
                f"producer {header.producer_id} sends sequence {header.base_sequence}, and the disk has "
                f"refused its sequence {sequence} before"
            )

    def _check_sequence(self, entry: ProducerEntry, header: BatchHeader) -> RememberedBatch | None:
        if header.producer_epoch > entry.epoch:
            if header.base_sequence != 0 and entry.epoch != NO_PRODUCER_EPOCH:
                raise OutOfOrderSequence(
                    f"producer {header.producer_id} begins epoch {header.producer_epoch} "
                    f"with sequence {header.base_sequence}, not 0"
                )
            return None
        last_sequence = entry.last_sequence
        if last_sequence == NO_SEQUENCE:
            # Only a marker was seen in this epoch: the first batch begins at 0.
            in_order = header.base_sequence == 0
        else:
            in_order = header.base_sequence == (last_sequence + 1) & _SEQUENCE_MASK
        if in_order:
            return None
        for batch in entry.batches:
            if batch.last_sequence == header.last_sequence and batch.first_sequence == header.base_sequence:
                return batch
        raise OutOfOrderSequence(
            f"producer {header.producer_id} sends sequence {header.base_sequence}, "
            f"the last stored is {last_sequence}"
        )

    def note(
        self, header: BatchHeader, now_ms: int, marker: Marker | None = None
    ) -> AbortedTransaction | None:
        """Takes in a producer's batch that has been stored, of whatever origin; `marker` is what a control
        batch says (None when compaction has emptied it). Returns the transaction that it aborted, if any.
        """
        if header.is_control and marker is None:
            return None  # all of that transaction is gone from the log
        entry = self.entries.get(header.producer_id)
        if entry is None:
            entry = self.entries[header.producer_id] = ProducerEntry(header.producer_epoch)
        elif entry.epoch != header.producer_epoch:
            entry.epoch = header.producer_epoch
            entry.batches.clear()
        entry.last_heard_ms = now_ms
        entry.last_timestamp_ms = header.max_timestamp
        if self._refused:
            self._refused.pop(header.producer_id, None)
        if marker is not None:
            return self._end_transaction(entry, header, marker)
        if header.base_sequence >= 0:
            if len(entry.batches) == REMEMBERED_BATCH_COUNT:
                del entry.batches[0]
            entry.batches.append(
                RememberedBatch(
                    header.last_sequence, header.last_offset, header.last_offset_delta, header.max_timestamp
                )
            )
        if header.is_transactional and entry.transaction_start_offset < 0:
            entry.transaction_start_offset = self._open[header.producer_id] = header.base_offset
        return None

    def _end_transaction(
        self, entry: ProducerEntry, header: BatchHeader, marker: Marker
    ) -> AbortedTransaction | None:
        entry.coordinator_epoch = marker.coordinator_epoch
        first_offset, entry.transaction_start_offset = entry.transaction_start_offset, -1
        if first_offset < 0:
            return None  # the transaction has no records here
        del self._open[header.producer_id]
        with self._unreplicated_lock:
            self._unreplicated.append((first_offset, header.last_offset))
            if len(self._unreplicated) > _UNREPLICATED_COUNT:
                self._merge_unreplicated()
        if marker.committed:
            return None
        stable = next(iter(self._open.values()), header.last_offset + 1)
        return AbortedTransaction(header.producer_id, first_offset, header.last_offset, stable)

    def _merge_unreplicated(self) -> None:
        # A follower may go on for long without being asked. Two as one hold readers back longer, never less.
        half = [self._unreplicated.popleft() for _ in range(_UNREPLICATED_COUNT // 2)]
        self._unreplicated.appendleft((min(first for first, _ in half), half[-1][1]))

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the oldest open transaction began; None when there is none."""
        try:
            return next(iter(self._open.values()), None)
        except RuntimeError:
            return self.first_unstable_offset  # another thread ended one just then

    @property
    def holds_readers_back(self) -> bool:
        """Whether the last stable offset may be below the high watermark. Cheap: asked at every append."""
        return bool(self._open or self._unreplicated)

    def last_stable_offset(self, high_watermark: int) -> int:
        """Up to where readers of committed data may see: the high watermark, the start of the oldest open
        transaction, or the start of an ended one whose marker is not below the high watermark."""
        first = self.first_unstable_offset
        stable = high_watermark if first is None else min(high_watermark, first)
        if self._unreplicated:
            with self._unreplicated_lock:
                while self._unreplicated and self._unreplicated[0][1] < high_watermark:
                    self._unreplicated.popleft()
                if self._unreplicated:
                    stable = min(stable, *(first for first, _ in self._unreplicated))
        return stable

    def last_batches(self) -> dict[int, tuple[int | None, int]]:
        """Of each producer, the last offset of its last batch (None when only a marker is remembered) and its
        epoch: what compaction must keep at least a header of."""
        return {
            producer_id: (entry.batches[-1].last_offset if entry.batches else None, entry.epoch)
            for producer_id, entry in self.entries.items()
        }

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Forgets producers that were not heard of for `expiration_ms`, but none with an open
        transaction. Returns how many. Of one of which the disk has never taken anything nothing is kept from
        one call to the next but one."""
        expired = [
            producer_id
            for producer_id, entry in self.entries.items()
            if entry.transaction_start_offset < 0 and now_ms - entry.last_heard_ms >= expiration_ms
        ]
        for producer_id in expired:
            del self.entries[producer_id]
            self._refused.pop(producer_id, None)
        for producer_id in self._refused_long_since - self.entries.keys():
            self._refused.pop(producer_id, None)
        self._refused_long_since = set(self._refused)
        return len(expired)


def _fenced(producer_id: int, epoch: int, known_epoch: int) -> InvalidProducerEpoch:
    return InvalidProducerEpoch(
        f"producer {producer_id} sends epoch {epoch}, epoch {known_epoch} has taken its place"
    )
