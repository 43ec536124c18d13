"""What a follower asks a leader, over one connection: a fetch, and where the leader's log begins and ends.

Called by `replica_fetcher.py`.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.client.connection import Connection, request_schema
from millrace.broker.errors import ProtocolError, UnsupportedVersion, error_for_code
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import Api
from millrace.broker.replication.local_partition import LocalPartition

CLIENT_ID = "millrace-replica"
REQUEST_TIMEOUT_MS = 30_000

_FETCH_VERSIONS = (hot_fetch.FIRST_WITH_TOPIC_IDS, 16)
_LIST_OFFSETS_VERSIONS = (4, 7)
_EARLIEST, _LATEST = -2, -1


async def fetch(connection: Connection, request: hot_fetch.FetchRequest) -> hot_fetch.FetchResponse:
    """The leader's answer, whatever its error code. Raises UnsupportedVersion before anything is sent where
    the leader knows no topic ids, the connection's errors, and ProtocolError for what cannot be read."""
    version = connection.versions.highest(Api.FETCH, *_FETCH_VERSIONS)
    if version is None:
        raise UnsupportedVersion(f"{connection} offers no Fetch with topic ids")
    frame = await _send(connection, version, request)
    try:
        return hot_fetch.decode_response(frame, version)
    except ProtocolError as error:
        raise connection.breach(str(error)) from error


async def _send(connection: Connection, version: int, request: hot_fetch.FetchRequest) -> memoryview:
    return await connection.exchange(
        lambda correlation_id: (hot_fetch.encode_request(version, correlation_id, CLIENT_ID, request),),
        REQUEST_TIMEOUT_MS + request.max_wait_ms,
    )


async def log_bounds(connection: Connection, local: LocalPartition, broker_id: int) -> tuple[int, int]:
    """Where the leader's log begins and ends; `broker_id` is the follower's. Raises KafkaErrors,
    ProtocolError."""
    return (
        await _list_offset(connection, local, broker_id, _EARLIEST),
        await _list_offset(connection, local, broker_id, _LATEST),
    )


async def _list_offset(connection: Connection, local: LocalPartition, broker_id: int, timestamp: int) -> int:
    version = connection.versions.highest(Api.LIST_OFFSETS, *_LIST_OFFSETS_VERSIONS)
    if version is None:
        raise UnsupportedVersion(f"{connection} offers no ListOffsets")
    schema: Any = request_schema(Api.LIST_OFFSETS, version)
    partition = schema.ListOffsetsPartition(
        partition_index=local.partition,
        current_leader_epoch=local.replica.leader_epoch,
        timestamp=timestamp,
    )
    request = schema.ListOffsetsRequest(
        replica_id=broker_id,
        isolation_level=0,
        topics=(schema.ListOffsetsTopic(name=local.topic, partitions=(partition,)),),
    )
    answer = await connection.call(request, REQUEST_TIMEOUT_MS)
    part = answer.topics[0].partitions[0]
    if part.error_code:
        raise error_for_code(int(part.error_code))
    return int(part.offset)
