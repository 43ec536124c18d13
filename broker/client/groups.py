"""Groups from outside: which there are, who is in them, deleting them and their offsets.

Functions on a `Cluster`, for tools. Their offsets are read and written by `group_offsets.py`. ListGroups asks
every broker, since each knows its own groups only; the rest asks the group's coordinator. Groups of KIP-848
("consumer", which Apache Kafka 4 has beside the "classic" ones) are described by their own API.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.group_offsets import ask_coordinator, group_refusal
from millrace.broker.errors import (
    GroupIdNotFound,
    KafkaError,
    MillraceError,
    UnsupportedVersion,
    error_for_code,
)
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

_LIST_GROUPS_VERSIONS = (3, 5)
_STATES_FROM = 4
_TYPES_FROM = 5
_DESCRIBE_GROUPS_VERSION = 5
_CONSUMER_GROUP_DESCRIBE_VERSION = 0
# The second where the server knows the request, and its groups of that kind are switched off.
_NO_SUCH_GROUP = (GroupIdNotFound.code, UnsupportedVersion.code)
_DELETE_GROUPS_VERSION = 2
_OFFSET_DELETE_VERSION = 0

CLASSIC, CONSUMER = "classic", "consumer"
DEAD, EMPTY = "Dead", "Empty"
STATES = (
    "Stable",
    EMPTY,
    "PreparingRebalance",
    "CompletingRebalance",
    "Assigning",
    "Reconciling",
    "NotReady",
    DEAD,
)
"""Of groups of any protocol, as Apache Kafka calls them."""
CONSUMER_PROTOCOL_TYPE = "consumer"


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """`state` and `kind` are empty where the server is too old to say."""

    group_id: str
    protocol_type: str
    state: str
    kind: str
    coordinator: int


@dataclass(frozen=True, slots=True)
class GroupList:
    """`unreachable` says of each broker that did not answer why: its groups are missing."""

    groups: tuple[ListedGroup, ...]
    unreachable: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Member:
    """`assigned` is empty while the group rebalances, and where members are no consumers."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    assigned: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """A group; state Dead means that there is none."""

    group_id: str
    state: str
    kind: str
    protocol_type: str
    assignor: str
    members: tuple[Member, ...]
    coordinator: int

    @property
    def exists(self) -> bool:
        return self.state != DEAD


async def list_groups(cluster: Cluster, states: Sequence[str] = ()) -> GroupList:
    """Every group of the cluster, by name. A broker that cannot be asked is named, the others' groups come.

    `states` keeps those in one of these states. Raises UnsupportedVersion where the server cannot filter.
    """
    view = await cluster.metadata([], max_age_ms=0)
    node_ids = sorted(view.brokers)
    answers = await asyncio.gather(
        *(_groups_at(cluster, node_id, states) for node_id in node_ids), return_exceptions=True
    )
    groups: dict[str, ListedGroup] = {}
    unreachable: dict[int, str] = {}
    for node_id, answer in zip(node_ids, answers, strict=True):
        if isinstance(answer, MillraceError):
            unreachable[node_id] = str(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            groups |= {each.group_id: each for each in answer}
    return GroupList(tuple(groups[name] for name in sorted(groups)), unreachable)


async def _groups_at(cluster: Cluster, node_id: int, states: Sequence[str]) -> list[ListedGroup]:
    async def attempt() -> list[ListedGroup]:
        least = _STATES_FROM if states else _LIST_GROUPS_VERSIONS[0]
        version = await cluster.api_version(Api.LIST_GROUPS, least, _LIST_GROUPS_VERSIONS[1], node_id)
        filters: dict[str, Any] = {"states_filter": tuple(states)} if version >= _STATES_FROM else {}
        if version >= _TYPES_FROM:
            filters["types_filter"] = ()
        request = request_schema(Api.LIST_GROUPS, version).ListGroupsRequest(**filters)
        answer = await cluster.request(request, node_id=node_id)
        if answer.error_code:
            raise error_for_code(int(answer.error_code), f"{cluster}: groups of broker {node_id}")
        return [
            ListedGroup(
                str(each.group_id),
                each.protocol_type,
                getattr(each, "group_state", ""),
                getattr(each, "group_type", ""),
                node_id,
            )
            for each in answer.groups
        ]

    return await cluster.retrying(attempt)


async def describe_group(cluster: Cluster, group_id: str) -> Group:
    """A group with its members; one that does not exist has the state Dead. Raises KafkaErrors."""

    async def attempt() -> Group:
        schema = request_schema(Api.DESCRIBE_GROUPS, _DESCRIBE_GROUPS_VERSION)
        request = schema.DescribeGroupsRequest(groups=(group_id,), include_authorized_operations=False)
        answer = await ask_coordinator(cluster, group_id, request, purpose="control")
        (described,) = answer.groups
        if described.error_code:
            raise group_refusal(cluster, group_id, int(described.error_code), "description")
        coordinator = await cluster.coordinator(group_id)
        if described.group_state == DEAD:
            return await _consumer_group(cluster, group_id, coordinator)
        is_consumer = described.protocol_type == CONSUMER_PROTOCOL_TYPE
        return Group(
            group_id,
            described.group_state,
            CLASSIC,
            described.protocol_type,
            described.protocol_data,
            tuple(
                Member(
                    each.member_id,
                    each.group_instance_id,
                    each.client_id,
                    each.client_host,
                    assigned_partitions(each.member_assignment) if is_consumer else (),
                )
                for each in described.members
            ),
            coordinator,
        )

    return await cluster.retrying(attempt)


async def _consumer_group(cluster: Cluster, group_id: str, coordinator: int) -> Group:
    """What is no classic group may be one of KIP-848, which DescribeGroups calls Dead."""
    absent = Group(group_id, DEAD, "", "", "", (), coordinator)
    connection = await cluster.connection(coordinator)
    if not connection.versions.offers(Api.CONSUMER_GROUP_DESCRIBE, _CONSUMER_GROUP_DESCRIBE_VERSION):
        return absent
    schema = request_schema(Api.CONSUMER_GROUP_DESCRIBE, _CONSUMER_GROUP_DESCRIBE_VERSION)
    request = schema.ConsumerGroupDescribeRequest(group_ids=(group_id,), include_authorized_operations=False)
    answer = await ask_coordinator(cluster, group_id, request, purpose="control")
    (described,) = answer.groups
    if described.error_code in _NO_SUCH_GROUP:
        return absent
    if described.error_code:
        raise group_refusal(cluster, group_id, int(described.error_code), "description")
    return Group(
        group_id,
        described.group_state,
        CONSUMER,
        CONSUMER_PROTOCOL_TYPE,
        described.assignor_name,
        tuple(
            Member(
                each.member_id,
                each.instance_id,
                each.client_id,
                each.client_host,
                tuple(
                    (str(topic.topic_name), int(partition))
                    for topic in each.assignment.topic_partitions
                    for partition in topic.partitions
                ),
            )
            for each in described.members
        ),
        coordinator,
    )


async def delete_group(cluster: Cluster, group_id: str) -> None:
    """Forget a group and its offsets. Raises NonEmptyGroup, GroupIdNotFound."""

    async def attempt() -> None:
        schema = request_schema(Api.DELETE_GROUPS, _DELETE_GROUPS_VERSION)
        request = schema.DeleteGroupsRequest(groups_names=(group_id,))
        answer = await ask_coordinator(cluster, group_id, request, purpose="control")
        (result,) = answer.results
        if result.error_code:
            raise group_refusal(cluster, group_id, int(result.error_code), "deletion")

    await cluster.retrying(attempt)


async def delete_offsets(
    cluster: Cluster, group_id: str, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, KafkaError | None]:
    """Forget a group's offsets; what was refused for single partitions (GroupSubscribedToTopic, …).

    Raises the refusal of the whole (GroupIdNotFound, NonEmptyGroup).
    """
    by_topic: dict[str, list[int]] = {}
    for topic, partition in partitions:
        by_topic.setdefault(topic, []).append(partition)

    async def attempt() -> dict[TopicPartition, KafkaError | None]:
        schema = request_schema(Api.OFFSET_DELETE, _OFFSET_DELETE_VERSION)
        topics = tuple(
            schema.OffsetDeleteRequestTopic(
                name=topic,
                partitions=tuple(
                    schema.OffsetDeleteRequestPartition(partition_index=number) for number in sorted(numbers)
                ),
            )
            for topic, numbers in by_topic.items()
        )
        request = schema.OffsetDeleteRequest(group_id=group_id, topics=topics)
        answer = await ask_coordinator(cluster, group_id, request, purpose="control")
        if answer.error_code:
            raise group_refusal(cluster, group_id, int(answer.error_code), "deletion of offsets")
        outcome: dict[TopicPartition, KafkaError | None] = {}
        for topic in answer.topics:
            for part in topic.partitions:
                error = None
                if part.error_code:
                    error = group_refusal(
                        cluster, group_id, int(part.error_code), f"{topic.name}-{part.partition_index}"
                    )
                outcome[str(topic.name), int(part.partition_index)] = error
        return outcome

    return await cluster.retrying(attempt)


def assigned_partitions(assignment: bytes) -> tuple[TopicPartition, ...]:
    """The partitions in a consumer's assignment (version i16, topics i32 count of: name i16-string,
    partitions i32 count of i32; what follows is not read). Empty where it cannot be read: members may use
    the field as they like."""
    found: list[TopicPartition] = []
    try:
        (topic_count,) = struct.unpack_from(">i", assignment, 2)
        position = 6
        for _ in range(topic_count):
            (size,) = struct.unpack_from(">h", assignment, position)
            if size < 0:
                return ()
            topic = assignment[position + 2 : position + 2 + size].decode()
            position += 2 + size
            (count,) = struct.unpack_from(">i", assignment, position)
            numbers = struct.unpack_from(f">{count}i", assignment, position + 4) if count > 0 else ()
            position += 4 + 4 * max(count, 0)
            found += [(topic, number) for number in numbers]
    except (struct.error, UnicodeDecodeError, ValueError):
        return ()
    return tuple(sorted(found))


def holders(members: Iterable[Member]) -> Mapping[TopicPartition, Member]:
    """Which member each assigned partition belongs to."""
    return {partition: member for member in members for partition in member.assigned}
