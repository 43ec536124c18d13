"""Which logs are to be compacted, how far, and in which groups of segments. Pure.

Rules are Apache Kafka's. A log is clean up to some offset and dirty beyond; it is compacted when the dirty
part's share of bytes passes `min.cleanable.dirty.ratio`, or when a dirty record has waited longer than
`max.compaction.lag.ms`. Never compacted: the active segment, whatever is at or above the last stable offset,
and records younger than `min.compaction.lag.ms`; whole segments only.

The rules for transactions (KIP-98): records of an aborted transaction go at once; a marker goes only when
none of its transaction's records were met any more, and then after `delete.retention.ms`.

Called by the log manager and the cleaner.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from millrace.broker.protocol.batch import NO_TIMESTAMP, BatchHeader
from millrace.broker.protocol.control_records import Marker
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.transaction_index import AbortedTransaction

_MAX_RELATIVE_OFFSET = 2**31 - 1


class SegmentView(NamedTuple):
    """What the plan needs of a segment. `next_base` is the base of the one after it, or the log's end."""

    base_offset: int
    next_base: int
    size: int
    index_size: int
    first_timestamp: int
    newest_ms: int


class Plan(NamedTuple):
    """What to compact: from `first_dirty` up to `first_uncleanable`, a segment's base."""

    first_dirty: int
    first_uncleanable: int
    dirty_ratio: float
    is_overdue: bool
    is_due: bool


def plan_log(
    segments: Sequence[SegmentView],
    config: LogConfig,
    *,
    cleaned_offset: int,
    start_offset: int,
    stable_offset: int,
    now_ms: int,
) -> Plan:
    """The plan for a log; `segments` oldest first, the active one last."""
    first_dirty = max(cleaned_offset, start_offset)
    closed = segments[:-1]
    first_uncleanable = segments[0].base_offset
    for segment in closed:
        is_young = (
            config.min_compaction_lag_ms > 0
            and segment.next_base > first_dirty
            and segment.newest_ms > now_ms - config.min_compaction_lag_ms
        )
        if is_young or segment.next_base > stable_offset:
            break
        first_uncleanable = segment.next_base
    cleanable = [s for s in closed if s.next_base <= first_uncleanable]
    dirty = [s for s in cleanable if s.next_base > first_dirty]
    total_size = sum(segment.size for segment in cleanable)
    ratio = sum(segment.size for segment in dirty) / total_size if total_size else 0.0
    oldest_ms = min((s.first_timestamp for s in dirty if s.first_timestamp != NO_TIMESTAMP), default=None)
    is_overdue = oldest_ms is not None and now_ms - oldest_ms > config.max_compaction_lag_ms
    is_due = bool(dirty) and (is_overdue or ratio > config.min_cleanable_dirty_ratio)
    return Plan(first_dirty, first_uncleanable, ratio, is_overdue, is_due)


def group_segments(
    segments: Sequence[SegmentView], *, max_size: int, max_index_size: int
) -> list[tuple[int, int]]:
    """Runs of neighbours, as (first number, count), that fit into one segment each: small ones merge."""
    groups: list[tuple[int, int]] = []
    start = size = index_size = 0
    for number, segment in enumerate(segments):
        begins = number > start and (
            size + segment.size > max_size
            or index_size + segment.index_size > max_index_size
            or segment.next_base - 1 - segments[start].base_offset > _MAX_RELATIVE_OFFSET
        )
        if begins:
            groups.append((start, number - start))
            start, size, index_size = number, 0, 0
        size += segment.size
        index_size += segment.index_size
    if segments:
        groups.append((start, len(segments) - start))
    return groups


class TransactionFilter:
    """Follows the transactions through the batches of a log, in order, and says what may go."""

    def __init__(self) -> None:
        self._coming: list[tuple[int, AbortedTransaction]] = []
        self._aborted: dict[int, tuple[AbortedTransaction, bool]] = {}  # and whether records were met
        self._committed: set[int] = set()
        self.kept_aborts: list[AbortedTransaction] = []
        """Aborted transactions whose marker stays because records were met: what belongs in the new index.
        Emptied by whoever writes it."""

    def expect(self, transactions: Iterable[AbortedTransaction]) -> None:
        """Tells of aborted transactions that the batches to come may belong to; twice does no harm."""
        for transaction in transactions:
            heapq.heappush(self._coming, (transaction.first_offset, transaction))

    def discards(self, header: BatchHeader) -> bool:
        """Whether a data batch belongs to an aborted transaction."""
        self._advance(header.last_offset)
        if not header.is_transactional:
            return False
        aborted = self._aborted.get(header.producer_id)
        if aborted is None or header.base_offset > aborted[0].last_offset:
            self._committed.add(header.producer_id)
            return False
        self._aborted[header.producer_id] = (aborted[0], True)
        return True

    def discards_marker(self, header: BatchHeader, marker: Marker | None) -> bool:
        """Whether a control batch says nothing any more: none of its transaction's records were met."""
        self._advance(header.last_offset)
        if marker is None:
            return header.record_count == 0
        if marker.committed:
            is_empty = header.producer_id not in self._committed
            self._committed.discard(header.producer_id)
            return is_empty
        transaction, had_records = self._aborted.pop(header.producer_id, (None, False))
        if transaction is None or not had_records:
            return True
        self.kept_aborts.append(transaction)
        return False

    def _advance(self, offset: int) -> None:
        while self._coming and self._coming[0][0] <= offset:
            transaction = heapq.heappop(self._coming)[1]
            known = self._aborted.get(transaction.producer_id)
            is_next = known is None or known[0].last_offset < transaction.first_offset
            if is_next and transaction.last_offset >= offset:
                self._aborted[transaction.producer_id] = (transaction, False)
