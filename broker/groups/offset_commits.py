"""Writes of offsets: what a commit, a transactional commit and a removal leave in the log, then in memory.

`coordinator.py` has checked that the request may be made and has found the group's store; here each kind
of change becomes records, and memory follows when they are committed (`journal.py`). Transactional commits
become pending at once and count from the transaction's marker on (`offsets.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from kio.schema.errors import ErrorCode

from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.journal import Journal, Producer, Removal
from millrace.broker.groups.offsets import CommittedOffset, OffsetStore
from millrace.broker.groups.record_layout import MAX_STRING_SIZE, encode_offset_key, encode_offset_value
from millrace.broker.groups.values import OffsetToCommit
from millrace.broker.protocol.topic_partition import TopicPartition

COMMIT_FAILURES = {
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas_after_append: ErrorCode.coordinator_not_available,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.kafka_storage_error: ErrorCode.not_coordinator,
    ErrorCode.message_too_large: ErrorCode.invalid_commit_offset_size,
    ErrorCode.record_list_too_large: ErrorCode.invalid_commit_offset_size,
}
"""What a client hears when its commit could not be written, or not in time."""


class OffsetCommits:
    """The writes of offsets of one coordinator."""

    def __init__(self, journal: Journal, config: GroupConfig, clock_ms: Callable[[], int]) -> None:
        self._journal = journal
        self._config = config
        self._clock_ms = clock_ms

    async def commit(
        self,
        log_partition: int,
        group_id: str,
        store: OffsetStore,
        offsets: Mapping[TopicPartition, OffsetToCommit],
    ) -> dict[TopicPartition, ErrorCode]:
        """Commit offsets; an error for each partition. Memory changes when the in-sync set has them."""
        answers, accepted = self._accepted(offsets)
        if not accepted:
            return answers

        def apply(base_offset: int) -> None:
            for partition, committed in _placed(accepted, base_offset).items():
                store.put(partition, committed)

        written = self._journal.append(
            log_partition,
            _records(group_id, accepted),
            apply=apply,
            appended=lambda _: store.begin_write(accepted),
            ended=lambda: store.end_write(accepted),
        )
        store.begin_wait(accepted)
        written.add_done_callback(lambda _: store.end_wait(accepted))
        error = await asyncio.shield(written)
        return answers | dict.fromkeys(accepted, COMMIT_FAILURES.get(error, error))

    async def commit_pending(
        self,
        log_partition: int,
        group_id: str,
        store: OffsetStore,
        offsets: Mapping[TopicPartition, OffsetToCommit],
        producer: Producer,
        on_pending: Callable[[], None],
    ) -> dict[TopicPartition, ErrorCode]:
        """Put offsets in the log as part of a transaction; `on_pending` is told once they are there."""
        answers, accepted = self._accepted(offsets)
        if not accepted:
            return answers

        def appended(base_offset: int) -> None:
            # At once, not when committed: the marker that decides about them may be the next thing written.
            for partition, committed in _placed(accepted, base_offset).items():
                store.put_pending(producer.producer_id, partition, committed)
            on_pending()

        written = self._journal.append(
            log_partition,
            _records(group_id, accepted),
            apply=lambda _: None,
            appended=appended,
            producer=producer,
        )
        error = await asyncio.shield(written)
        return answers | dict.fromkeys(accepted, COMMIT_FAILURES.get(error, error))

    async def remove(
        self, log_partition: int, group_id: str, store: OffsetStore, partitions: Collection[TopicPartition]
    ) -> ErrorCode:
        """Forget offsets, committed and pending; a commit made after this call stays."""
        removals = [offset_removal(group_id, store, partition) for partition in partitions]
        error = await asyncio.shield(self._journal.append_removals(log_partition, removals))
        return COMMIT_FAILURES.get(error, error)

    def _accepted(
        self, offsets: Mapping[TopicPartition, OffsetToCommit]
    ) -> tuple[dict[TopicPartition, ErrorCode], dict[TopicPartition, CommittedOffset]]:
        """Refuse what is too long for itself; the rest with the time of now."""
        now_ms = self._clock_ms()
        answers: dict[TopicPartition, ErrorCode] = {}
        accepted: dict[TopicPartition, CommittedOffset] = {}
        for partition, wanted in offsets.items():
            answers[partition] = ErrorCode.none
            if _is_too_long(wanted.metadata, self._config.offset_metadata_max_size):
                answers[partition] = ErrorCode.offset_metadata_too_large
                continue
            accepted[partition] = CommittedOffset(
                wanted.offset, wanted.leader_epoch, wanted.metadata, now_ms, wanted.expire_timestamp_ms
            )
        return answers, accepted


def offset_removal(group_id: str, store: OffsetStore, partition: TopicPartition) -> Removal:
    """The tombstone of a group's offset."""
    return Removal(encode_offset_key(group_id, *partition), partial(store.remove, partition))


def _is_too_long(metadata: str, limit: int) -> bool:
    """Apache Kafka counts the units of UTF-16; the log counts bytes in 16 bits."""
    units = len(metadata.encode("utf-16-le", "surrogatepass")) // 2
    return units > limit or len(metadata.encode()) > MAX_STRING_SIZE


def _records(
    group_id: str, offsets: Mapping[TopicPartition, CommittedOffset]
) -> list[tuple[bytes, bytes | None]]:
    return [
        (encode_offset_key(group_id, *partition), encode_offset_value(committed))
        for partition, committed in offsets.items()
    ]


def _placed(
    offsets: Mapping[TopicPartition, CommittedOffset], base_offset: int
) -> dict[TopicPartition, CommittedOffset]:
    """The same offsets with their places in the log."""
    return {
        partition: replace(committed, log_offset=log_offset)
        for log_offset, (partition, committed) in enumerate(offsets.items(), base_offset)
    }
