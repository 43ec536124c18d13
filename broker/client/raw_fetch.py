"""Fetching whole record batches, as they lie in the log.

`fetch` asks one leader for many partitions at once, with a long poll, and gives the bytes back as views of
the answer's frame: nothing is decoded, decompressed or copied. Called by the mirror, the audit's reader and
`read_to_end`.

No fetch sessions: a request names every partition, and every partition is answered. A server over whose quota
this client is answers with no partition at all and a throttle time: that is asked again when it is over, so
callers never see it. Versions 4 to 17 are
spoken (leader-epoch checks begin at 9, the diverging epoch at 12, topics go by id from 13 on). Topics are
asked for by id when the caller knows all of them and the server speaks it: then a topic that was deleted and
created again answers with an error, never with the records of its namesake. Otherwise they go by name.

The records of a partition begin with the batch that *contains* the offset asked for, so its first records
may be older; and the last batch may be cut (`iterate_batches` skips it). Both are the protocol's own rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.errors import ProtocolError, error_for_code
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

_VERSIONS = (4, 17)
_VERSIONS_BY_NAME = (4, hot_fetch.FIRST_WITH_TOPIC_IDS - 1)


class FetchPosition(NamedTuple):
    """Where to read on. `current_leader_epoch` fences old leaders; `last_fetched_epoch` (of the last batch
    before `offset`) makes the leader say where this reader's history leaves its own; -1 asks for neither.
    `topic_id` says which topic of that name is meant."""

    offset: int
    current_leader_epoch: int = -1
    last_fetched_epoch: int = -1
    topic_id: UUID = NO_TOPIC_ID


@dataclass(frozen=True, slots=True)
class FetchedPartition:
    """One partition of an answer.

    `error_code` is Kafka's (0: none). Offsets are -1 where the server does not say. `aborted` holds
    (producer id, first offset) of aborted transactions in the range, when reading committed. `diverging`
    is (epoch, end offset): histories part there, go back. `records` is a view of memory that belongs to the
    caller and is freed with its last view.
    """

    topic: str
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...]
    diverging: tuple[int, int] | None
    records: memoryview


async def tells_diverging_epoch(cluster: Cluster, node_id: int) -> bool:
    """Whether a broker's answers to a fetch say where this reader's history leaves its own (KIP-595)."""
    return await cluster.api_version(Api.FETCH, *_VERSIONS, node_id) >= hot_fetch.FIRST_WITH_DIVERGING_EPOCH


async def fetch(
    cluster: Cluster,
    node_id: int,
    positions: Mapping[TopicPartition, FetchPosition],
    *,
    min_bytes: int = 1,
    max_wait_ms: int = 500,
    max_bytes: int = 50 << 20,
    partition_max_bytes: int = 1 << 20,
    read_committed: bool = True,
    purpose: str = "fetch",
) -> list[FetchedPartition]:
    """Fetch from one broker: the answer comes when `min_bytes` are there or `max_wait_ms` are over.

    `max_bytes` and `partition_max_bytes` bound the answer, except that its first batch always comes whole.
    Partitions are served in the order given, so a fair caller rotates them. Fetches that must not wait for
    each other's long polls need different values of `purpose` (a connection each).

    Errors of partitions are in the answer, and noted in the cluster's metadata. Raises the connection's
    errors (NetworkException, RequestTimedOut, ProtocolError), ClusterUnreachable, and the KafkaError of an
    answer that is refused as a whole. A partition that the server's answer leaves out is a ProtocolError.
    """
    connection = await cluster.connection(node_id, purpose)
    names = {at.topic_id: topic for (topic, _), at in positions.items()}
    by_id = NO_TOPIC_ID not in names
    version = cluster.highest_version(connection, Api.FETCH, _VERSIONS if by_id else _VERSIONS_BY_NAME)
    by_id = version >= hot_fetch.FIRST_WITH_TOPIC_IDS
    request = hot_fetch.FetchRequest(
        max_wait_ms,
        min_bytes,
        max_bytes,
        read_committed,
        [
            hot_fetch.PartitionFetch(
                at.topic_id if by_id else topic,
                partition,
                at.offset,
                partition_max_bytes,
                at.current_leader_epoch,
                at.last_fetched_epoch,
            )
            for (topic, partition), at in positions.items()
        ],
    )
    while True:
        frame = await cluster.exchange(
            connection,
            lambda correlation_id: (
                hot_fetch.encode_request(version, correlation_id, cluster.client_id, request),
            ),
            # The server may rightly be silent for the whole long poll, and want nothing more before.
            cluster.request_timeout_ms + max_wait_ms + connection.throttle_left_ms,
        )
        try:
            answer = hot_fetch.decode_response(frame, version)
        except ProtocolError as error:
            raise connection.breach(str(error)) from error
        connection.throttle(answer.throttle_ms)
        if answer.error_code:
            plain = error_for_code(answer.error_code)
            raise error_for_code(answer.error_code, f"{connection}: fetch is refused: {plain}")
        if answer.partitions or not positions or not answer.throttle_ms:
            break
    fetched = []
    for given in answer.partitions:
        topic = names.get(given.topic) if isinstance(given.topic, UUID) else given.topic
        if topic is None:
            raise connection.breach(f"fetch answers for topic {given.topic}, which was not asked for")
        fetched.append(_checked(cluster, topic, given))
    if {(each.topic, each.partition) for each in fetched} != positions.keys():
        raise connection.breach("the fetch answer is not about the partitions that were asked for")
    return fetched


def _checked(cluster: Cluster, topic: str, given: hot_fetch.PartitionData) -> FetchedPartition:
    if given.error_code:
        cluster.observe(given.error_code)
    return FetchedPartition(
        topic,
        given.partition,
        given.error_code,
        given.high_watermark,
        given.last_stable_offset,
        given.log_start_offset,
        tuple(given.aborted or ()),
        given.diverging,
        memoryview(given.records),
    )
