"""What a client may do on a cluster, as the cluster says: authorized operations and refusals.

Functions on a `Cluster`, for checks before work begins; nothing is changed by asking. A server without an
authorizer says that everything is allowed, one that is too old to say gives None, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.errors import (
    GroupAuthorizationFailed,
    TopicAuthorizationFailed,
    TransactionalIdAuthorizationFailed,
    error_for_code,
)
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.operations import NOTHING, Operation, Operations, read_operations

_METADATA_VERSIONS = (9, 12)
# Later ones have left it to DescribeCluster (KIP-700).
_METADATA_OF_CLUSTER_VERSIONS = (9, 10)
_DESCRIBE_GROUPS_VERSION = 5
_END_TXN_VERSIONS = (1, 3)

# No transaction has this producer id, so an EndTxn that passes the authorizer ends nothing.
_NO_PRODUCER_ID = -1


async def topic_operations(cluster: Cluster, topics: Sequence[str]) -> dict[str, Operations | None]:
    """By topic what may be done with it. A topic that does not exist is absent; one that may not even be
    described has no operations."""
    version = await cluster.api_version(Api.METADATA, *_METADATA_VERSIONS)
    schema = request_schema(Api.METADATA, version)
    by_id = {"topic_id": None} if version >= 10 else {}
    for_cluster = {"include_cluster_authorized_operations": False} if version <= 10 else {}
    request = schema.MetadataRequest(
        topics=tuple(schema.MetadataRequestTopic(name=name, **by_id) for name in topics),
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
        **for_cluster,
    )
    answer = await cluster.request(request)
    found: dict[str, Operations | None] = {}
    for topic in answer.topics:
        if topic.error_code == TopicAuthorizationFailed.code:
            found[str(topic.name)] = NOTHING
        elif not topic.error_code:
            found[str(topic.name)] = read_operations(int(topic.topic_authorized_operations))
    return found


async def cluster_operations(cluster: Cluster) -> Operations | None:
    """What may be done with the cluster itself."""
    version = await cluster.api_version(Api.METADATA, *_METADATA_OF_CLUSTER_VERSIONS)
    by_version = {"include_topic_authorized_operations": False, "allow_auto_topic_creation": False}
    schema = request_schema(Api.METADATA, version)
    request = schema.MetadataRequest(topics=(), include_cluster_authorized_operations=True, **by_version)
    return read_operations(int((await cluster.request(request)).cluster_authorized_operations))


async def group_operations(cluster: Cluster, group_id: str) -> Operations | None:
    """What may be done with a group, whether it exists or not. Raises what keeps its coordinator away."""
    try:
        node_id = await cluster.retrying(lambda: cluster.coordinator(group_id))
        schema = request_schema(Api.DESCRIBE_GROUPS, _DESCRIBE_GROUPS_VERSION)
        request = schema.DescribeGroupsRequest(groups=(group_id,), include_authorized_operations=True)
        (group,) = (await cluster.request(request, node_id=node_id)).groups
        if group.error_code:
            raise error_for_code(int(group.error_code))
    except GroupAuthorizationFailed:
        return NOTHING
    return read_operations(int(group.authorized_operations))


async def transactional_id_refusal(cluster: Cluster, transactional_id: str) -> Operation | None:
    """The operation that is missing to use a transactional id, None when nothing is.

    Asks for its coordinator (Describe) and ends a transaction that cannot exist (Write). Raises what keeps
    the coordinator away: a KafkaError, UnsupportedVersion where the server has no transactions.
    """
    try:
        node_id = await cluster.retrying(lambda: cluster.coordinator(transactional_id, "transaction"))
    except TransactionalIdAuthorizationFailed:
        return Operation.DESCRIBE
    version = await cluster.api_version(Api.END_TXN, *_END_TXN_VERSIONS, node_id)
    schema = request_schema(Api.END_TXN, version)
    request = schema.EndTxnRequest(
        transactional_id=transactional_id, producer_id=_NO_PRODUCER_ID, producer_epoch=0, committed=False
    )
    answer = await cluster.request(request, node_id=node_id)
    return Operation.WRITE if answer.error_code == TransactionalIdAuthorizationFailed.code else None
