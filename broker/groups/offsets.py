"""The offsets of groups in memory: committed, pending in transactions, and old enough to be forgotten.

Pure. `OffsetStore` is what one group has; `expired_offsets` says what of it has grown too old (KIP-211).
`coordinator.py` and `offset_commits.py` feed it what the offsets log has, `journal.py` when it reads the
log anew; both ways lead to the same state, because every change carries its place in the log.

Transactions (KIP-98, KIP-447): an offset committed in a transaction is *pending* under its producer id from
the moment it is in the log until the transaction's marker is; then it counts as committed where it stands
in the log, not where the marker does, so a plain commit that came after it wins. A marker decides on what
stands before it, whenever that is told: the next transaction may have the same epoch, and a marker may have
been written twice. A removal takes with it what is pending from before it. While anything is pending the
offset does not expire and the group stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from millrace.broker.protocol.topic_partition import TopicPartition


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """`log_offset` is where the commit stands in the offsets log: of two commits the later one wins."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int | None = None
    log_offset: int = -1


@dataclass(slots=True)
class OffsetStore:
    """The offsets of one group."""

    _offsets: dict[TopicPartition, CommittedOffset] = field(default_factory=dict)
    _pending: dict[int, dict[TopicPartition, CommittedOffset]] = field(default_factory=dict)
    """By producer id: in the log, but their transaction is open."""
    _being_written: dict[TopicPartition, int] = field(default_factory=dict)
    """How many plain commits of a partition are in the leader's log but not yet in every other's."""
    _awaited: dict[TopicPartition, int] = field(default_factory=dict)
    """How many plain commits of a partition have a client that has not been answered."""
    _removed_at: dict[TopicPartition, int] = field(default_factory=dict)
    """Of those being written, where in the log the last removal stands."""

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def is_empty(self) -> bool:
        """Nothing is committed, being written or pending: nothing would be lost with it."""
        return not (self._offsets or self._pending or self._being_written)

    # -- committed -------------------------------------------------------------------------------------

    def get(self, partition: TopicPartition) -> CommittedOffset | None:
        return self._offsets.get(partition)

    def items(self) -> Iterable[tuple[TopicPartition, CommittedOffset]]:
        return self._offsets.items()

    def put(self, partition: TopicPartition, committed: CommittedOffset) -> None:
        """Keep a commit that is in the log, unless one from further on in the log is already kept, or a
        removal is: writes may be acknowledged in another order than they were made."""
        if committed.log_offset < self._removed_at.get(partition, -1):
            return
        kept = self._offsets.get(partition)
        if kept is None or kept.log_offset <= committed.log_offset:
            self._offsets[partition] = committed

    def remove(self, partition: TopicPartition, before_log_offset: int | None = None) -> None:
        """Forget an offset, pending ones too; with a place in the log, only what stands before it."""
        for offsets in (self._offsets, *self._pending.values()):
            kept = offsets.get(partition)
            if kept is not None and (before_log_offset is None or kept.log_offset < before_log_offset):
                del offsets[partition]
        if before_log_offset is not None and partition in self._being_written:
            self._removed_at[partition] = max(before_log_offset, self._removed_at.get(partition, -1))

    # -- under way -------------------------------------------------------------------------------------

    def begin_write(self, partitions: Iterable[TopicPartition]) -> None:
        _count(self._being_written, partitions)

    def end_write(self, partitions: Iterable[TopicPartition]) -> None:
        """A write has come to its end, whichever: exactly once for each `begin_write`."""
        for partition in _count_down(self._being_written, partitions):
            self._removed_at.pop(partition, None)

    def begin_wait(self, partitions: Iterable[TopicPartition]) -> None:
        _count(self._awaited, partitions)

    def end_wait(self, partitions: Iterable[TopicPartition]) -> None:
        """A commit's client was answered, be it that this takes too long: once for each `begin_wait`."""
        _count_down(self._awaited, partitions)

    def put_pending(self, producer_id: int, partition: TopicPartition, committed: CommittedOffset) -> None:
        """Keep an offset until its transaction ends; the last one of a transaction counts."""
        self._pending.setdefault(producer_id, {})[partition] = committed

    def end_transaction(self, producer_id: int, committed: bool, marker_offset: int) -> bool:
        """The transaction's marker is in the log, at this place. Whether offsets of a later transaction of
        its producer are still pending."""
        pending = self._pending.pop(producer_id, {})
        later = {each: offset for each, offset in pending.items() if offset.log_offset > marker_offset}
        if later:
            self._pending[producer_id] = later
        if committed:
            for partition, offset in pending.items():
                if partition not in later:
                    self.put(partition, offset)
        return bool(later)

    def is_unstable(self, partition: TopicPartition) -> bool:
        """Whether who reads the partition's offset had better wait (KIP-447's UNSTABLE_OFFSET_COMMIT): a
        transaction that is open has one for it, or a write under way whose client is waiting, too. One that
        was told that it takes too long may come or not, as after any failed commit: the write can hang for as
        long as the in-sync set is too small, and readers would wait with it."""
        return self.is_pending(partition) or (partition in self._being_written and partition in self._awaited)

    def may_change(self, partition: TopicPartition) -> bool:
        """Whether another offset of the partition may be about to come, however long that takes."""
        return partition in self._being_written or self.is_pending(partition)

    def is_pending(self, partition: TopicPartition) -> bool:
        return any(partition in offsets for offsets in self._pending.values())

    @property
    def has_unstable(self) -> bool:
        """Whether any offset may be about to come: a group that has one is not forgotten."""
        return bool(self._pending or self._being_written)

    def partitions(self) -> Iterator[TopicPartition]:
        """Every partition with an offset, committed, pending or being written, once."""
        kept = itertools.chain(self._offsets, *self._pending.values(), self._being_written)
        return iter(dict.fromkeys(kept))

    def partitions_of(self, topics: Iterable[str]) -> list[TopicPartition]:
        wanted = set(topics)
        return [partition for partition in self.partitions() if partition[0] in wanted]


def _count(counts: dict[TopicPartition, int], partitions: Iterable[TopicPartition]) -> None:
    for partition in partitions:
        counts[partition] = counts.get(partition, 0) + 1


def _count_down(
    counts: dict[TopicPartition, int], partitions: Iterable[TopicPartition]
) -> list[TopicPartition]:
    """Those of which none is left."""
    gone = []
    for partition in partitions:
        left = counts[partition] - 1
        if left:
            counts[partition] = left
        else:
            del counts[partition]
            gone.append(partition)
    return gone


@dataclass(frozen=True, slots=True)
class ExpiryRule:
    """From when on an offset ages. `kept_topics` None means every topic is still in use."""

    age_from_ms: Callable[[CommittedOffset], int]
    kept_topics: frozenset[str] | None = frozenset()


def expired_offsets(
    store: OffsetStore, rule: ExpiryRule, retention_ms: int, now_ms: int
) -> list[TopicPartition]:
    """Offsets past their explicit expiry, or `retention_ms` old, whose topic no member reads any more.

    One with a transaction open on it stays: the transaction may be about to renew it.
    """
    expired: list[TopicPartition] = []
    if rule.kept_topics is None:
        return expired
    for partition, committed in store.items():
        if partition[0] in rule.kept_topics or store.may_change(partition):
            continue
        if committed.expire_timestamp_ms is not None:
            due_ms = committed.expire_timestamp_ms
        else:
            due_ms = rule.age_from_ms(committed) + retention_ms
        if now_ms >= due_ms:
            expired.append(partition)
    return expired
