"""What a partition remembers of its idempotent producers, so that a retried batch is stored once.

Per producer id: the epoch, the last five batches (a client may have five in flight), and the offset at
which an open transaction began. Rules are Kafka's (KIP-98, KIP-360):

    same epoch, next sequence                         append
    one of the last five batches again                duplicate: answered with its first offset
    same epoch, any other sequence                    OUT_OF_ORDER_SEQUENCE_NUMBER
    newer epoch, sequence 0                           append, the old epoch is fenced
    newer epoch, other sequence                       OUT_OF_ORDER_SEQUENCE_NUMBER
    older epoch                                       INVALID_PRODUCER_EPOCH
    no state for the producer                         append, whatever the sequence

Sequences wrap from 2**31 - 1 to 0. Called by the log alone (under its lock), and by recovery. No I/O and no
clock here; snapshots are in `producer_snapshot.py`.

One difference from Apache Kafka: a producer expires when nothing was *heard* of it for
`producer.id.expiration.ms`; there, the record timestamps count, so that a replay of old data loses its
protection at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.broker.errors import InvalidProducerEpoch, OutOfOrderSequence
from millrace.broker.protocol.batch import NO_PRODUCER_EPOCH, NO_SEQUENCE, BatchHeader

REMEMBERED_BATCH_COUNT = 5
_SEQUENCE_MASK = 0x7FFFFFFF


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
        # Asked for by every fetch, which must not go through all producers to learn that none is open.
        self._open: dict[int, int] = {
            producer_id: entry.transaction_start_offset
            for producer_id, entry in self.entries.items()
            if entry.transaction_start_offset >= 0
        }

    def check(self, header: BatchHeader) -> RememberedBatch | None:
        """Decides on a producer's batch before it is stored: None to append it, or the stored batch that
        it repeats. Raises OutOfOrderSequence, InvalidProducerEpoch."""
        entry = self.entries.get(header.producer_id)
        if entry is None:
            return None
        if header.producer_epoch < entry.epoch:
            raise InvalidProducerEpoch(
                f"producer {header.producer_id} sends epoch {header.producer_epoch}, "
                f"epoch {entry.epoch} has taken its place"
            )
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

    def note(self, header: BatchHeader, now_ms: int) -> None:
        """Takes in a producer's batch that has been stored, of whatever origin."""
        entry = self.entries.get(header.producer_id)
        if entry is None:
            entry = self.entries[header.producer_id] = ProducerEntry(header.producer_epoch)
        elif entry.epoch != header.producer_epoch:
            entry.epoch = header.producer_epoch
            entry.batches.clear()
        entry.last_heard_ms = now_ms
        entry.last_timestamp_ms = header.max_timestamp
        if header.base_sequence >= 0:
            if len(entry.batches) == REMEMBERED_BATCH_COUNT:
                del entry.batches[0]
            entry.batches.append(
                RememberedBatch(
                    header.last_sequence, header.last_offset, header.last_offset_delta, header.max_timestamp
                )
            )
        if header.is_control:
            entry.transaction_start_offset = -1
            self._open.pop(header.producer_id, None)
        elif header.is_transactional and entry.transaction_start_offset < 0:
            entry.transaction_start_offset = self._open[header.producer_id] = header.base_offset

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the oldest open transaction began; None when there is none."""
        return min(self._open.values()) if self._open else None

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Forgets producers that were not heard of for `expiration_ms`, but none with an open
        transaction. Returns how many."""
        expired = [
            producer_id
            for producer_id, entry in self.entries.items()
            if entry.transaction_start_offset < 0 and now_ms - entry.last_heard_ms >= expiration_ms
        ]
        for producer_id in expired:
            del self.entries[producer_id]
        return len(expired)
