"""A group's committed offsets: writing and reading them, as a member or from outside.

Outside means generation -1 and no member id: the coordinator takes such a commit only while the group has
no members (tools, restored positions). `group_member.GroupMember` commits with its generation.
OffsetCommit is spoken in version 8, OffsetFetch in version 7.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.errors import CoordinatorNotAvailable, KafkaError, NotCoordinator, error_for_code
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

_OFFSET_COMMIT_VERSION = 8
_OFFSET_FETCH_VERSION = 7


class CommittedOffset(NamedTuple):
    """`offset` is the next record to read."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""


async def commit_offsets(
    cluster: Cluster,
    group_id: str,
    offsets: Mapping[TopicPartition, CommittedOffset],
    *,
    generation: int = -1,
    member_id: str = "",
    instance_id: str | None = None,
) -> None:
    """Commit, retrying while the coordinator moves. Raises the first refusal (IllegalGeneration,
    UnknownMemberId, RebalanceInProgress, FencedInstanceId, … tell a member that it is one no longer)."""

    async def attempt() -> None:
        schema = request_schema(Api.OFFSET_COMMIT, _OFFSET_COMMIT_VERSION)
        by_topic: dict[str, list[Any]] = {}
        for (topic, partition), committed in offsets.items():
            part = schema.OffsetCommitRequestPartition(
                partition_index=partition,
                committed_offset=committed.offset,
                committed_leader_epoch=committed.leader_epoch,
                committed_metadata=committed.metadata,
            )
            by_topic.setdefault(topic, []).append(part)
        request = schema.OffsetCommitRequest(
            group_id=group_id,
            generation_id_or_member_epoch=generation,
            member_id=member_id,
            group_instance_id=instance_id,
            topics=tuple(
                schema.OffsetCommitRequestTopic(name=topic, partitions=tuple(parts))
                for topic, parts in by_topic.items()
            ),
        )
        answer = await ask_coordinator(cluster, group_id, request, purpose="control")
        for topic in answer.topics:
            for part in topic.partitions:
                if part.error_code:
                    subject = f"{topic.name}-{part.partition_index}"
                    raise group_refusal(cluster, group_id, int(part.error_code), f"commit of {subject}")

    if offsets:
        await cluster.retrying(attempt)


async def fetch_offsets(
    cluster: Cluster,
    group_id: str,
    partitions: Collection[TopicPartition] | None = None,
    *,
    require_stable: bool = False,
) -> dict[TopicPartition, CommittedOffset]:
    """What the group has committed for these partitions, or for all (None); those without are absent.

    `require_stable` waits for offsets in open transactions to be decided.
    """

    async def attempt() -> dict[TopicPartition, CommittedOffset]:
        schema = request_schema(Api.OFFSET_FETCH, _OFFSET_FETCH_VERSION)
        topics: tuple[Any, ...] | None = None
        if partitions is not None:
            by_topic: dict[str, list[int]] = {}
            for topic, partition in partitions:
                by_topic.setdefault(topic, []).append(partition)
            topics = tuple(
                schema.OffsetFetchRequestTopic(name=topic, partition_indexes=tuple(numbers))
                for topic, numbers in by_topic.items()
            )
        request = schema.OffsetFetchRequest(group_id=group_id, topics=topics, require_stable=require_stable)
        answer = await ask_coordinator(cluster, group_id, request, purpose="control")
        if answer.error_code:
            raise group_refusal(cluster, group_id, int(answer.error_code), "offsets")
        found: dict[TopicPartition, CommittedOffset] = {}
        for topic in answer.topics:
            for part in topic.partitions:
                if part.error_code:
                    subject = f"offset of {topic.name}-{part.partition_index}"
                    raise group_refusal(cluster, group_id, int(part.error_code), subject)
                if part.committed_offset >= 0:
                    found[str(topic.name), int(part.partition_index)] = CommittedOffset(
                        int(part.committed_offset), int(part.committed_leader_epoch), part.metadata or ""
                    )
        return found

    return await cluster.retrying(attempt)


async def ask_coordinator(
    cluster: Cluster,
    group_id: str,
    request: Any,
    *,
    purpose: str,
    timeout_ms: float | None = None,
    on_reached: Callable[[], None] | None = None,
) -> Any:
    """Send a request to the group's coordinator; a lost connection makes it be looked up again. `on_reached`
    is called when the way to it is open, just before the request goes out."""
    node_id = await cluster.coordinator(group_id)
    try:
        if on_reached is not None:
            await cluster.connection(node_id, purpose)
            on_reached()
        return await cluster.request(request, node_id=node_id, purpose=purpose, timeout_ms=timeout_ms)
    except Exception:
        cluster.forget_coordinator(group_id)
        raise


def group_refusal(cluster: Cluster, group_id: str, code: int, subject: str) -> KafkaError:
    """The error for a code in an answer about a group; codes about the coordinator make it be looked up."""
    if code in (NotCoordinator.code, CoordinatorNotAvailable.code):
        cluster.forget_coordinator(group_id)
    return error_for_code(code, f"{cluster}: group {group_id}: {subject}: {error_for_code(code)}")
