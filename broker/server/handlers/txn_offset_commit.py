"""TxnOffsetCommit, versions 0-4: a producer commits a group's offsets as part of its transaction (KIP-98).

Called by dispatch; the rules are in `groups/membership.py` (who may commit: from version 3 a member with its
generation, KIP-447) and `groups/offsets.py` (what is pending until the transaction's marker). A topic or
partition that does not exist is refused by itself, the rest goes on. Clients below version 2 crash on
COORDINATOR_LOAD_IN_PROGRESS: they hear COORDINATOR_NOT_AVAILABLE instead (KAFKA-7296). Version 5, which adds
the group to the transaction by itself (KIP-890, part 2), is not spoken.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.groups.offset_commits import COMMIT_FAILURES
from millrace.broker.groups.values import CommitRequest, OffsetToCommit
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.system_topics import OFFSETS_TOPIC
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.answers import answer_of, item_count
from millrace.broker.server.context import RequestContext
from millrace.broker.server.group_requests import errors_by_topic, instance_id_of, partition_exists
from millrace.broker.transactions.values import ProducerIdentity
from millrace.broker.transactions.verification import NO_SEQUENCE, UNVERIFIED

API = Api.TXN_OFFSET_COMMIT
VERSIONS = range(5)

_KNOWS_LOADING_FROM = 2
_KNOWS_ABORTABLE_FROM = 4


async def handle(request: Any, context: RequestContext) -> Any:
    version = context.head.version
    errors: dict[TopicPartition, ErrorCode] = {}
    offsets: dict[TopicPartition, OffsetToCommit] = {}
    for topic in request.topics:
        for wanted in topic.partitions:
            partition = (topic.name, wanted.partition_index)
            if partition_exists(context, *partition):
                offsets[partition] = OffsetToCommit(
                    wanted.committed_offset,
                    getattr(wanted, "committed_leader_epoch", -1),
                    wanted.committed_metadata or "",
                )
            else:
                errors[partition] = ErrorCode.unknown_topic_or_partition
    if offsets:
        errors |= await _commit(request, offsets, context)
    if version < _KNOWS_LOADING_FROM:
        errors = {
            partition: ErrorCode.coordinator_not_available
            if error is ErrorCode.coordinator_load_in_progress
            else error
            for partition, error in errors.items()
        }
    topics = errors_by_topic(errors)
    return await answer_of(item_count(topics), context.head, topics=topics)


async def _commit(
    request: Any, offsets: dict[TopicPartition, OffsetToCommit], context: RequestContext
) -> dict[TopicPartition, ErrorCode]:
    """Commit, once the transaction's coordinator has said that the group's partition is in it (KIP-890)."""
    groups, gate = context.broker.groups, context.broker.transaction_gate
    producer = ProducerIdentity(request.producer_id, request.producer_epoch)
    partition = (OFFSETS_TOPIC, groups.partition_of(request.group_id))
    verified = await gate.admit(request.transactional_id, producer, {partition: NO_SEQUENCE})
    if verified[partition] is not ErrorCode.none:
        return dict.fromkeys(offsets, _as_commit_error(verified[partition], context.head.version))
    return await groups.commit_transactional(
        request.group_id,
        CommitRequest(
            getattr(request, "member_id", ""),
            instance_id_of(request),
            getattr(request, "generation_id", -1),
            offsets,
        ),
        producer.producer_id,
        producer.epoch,
        on_appended=lambda: gate.appended(partition, producer.producer_id),
    )


def _as_commit_error(error: ErrorCode, version: int) -> ErrorCode:
    """A refusal of the transaction's side as producers understand it in this answer."""
    if error in UNVERIFIED:  # the group's coordinator has not moved
        return ErrorCode.coordinator_load_in_progress
    if error is ErrorCode.producer_fenced:
        return ErrorCode.invalid_producer_epoch
    if error is ErrorCode.transaction_abortable and version < _KNOWS_ABORTABLE_FROM:
        return ErrorCode.invalid_txn_state
    return COMMIT_FAILURES.get(error, error)
