"""Fetching whole record batches, as they lie in the log.

`fetch` asks one leader for many partitions at once, with a long poll, and gives the bytes back as views of
the answer's frame: nothing is decoded, decompressed or copied. Called by the mirror, the audit's reader and
`read_to_end`.

Without a session a request names every partition, and every partition is answered; who fetches again and
again gives a `FetchSession`, and is answered what is new. A server over whose quota this client is answers
with no partition at all and a throttle time: where all were asked for, that is asked again when it is over,
so callers never see it. A session that the server does not know any more is begun anew, unseen too.

Versions 4 to 17 are spoken (sessions begin at 7, leader-epoch checks at 9, the diverging epoch at 12, topics
go by id from 13 on). Topics are asked for by id when the caller knows all of them and the server speaks it:
then a topic that was deleted and created again answers with an error, never with the records of its namesake.
Otherwise they go by name.

The records of a partition begin with the batch that *contains* the offset asked for, so its first records
may be older; and the last batch may be cut (`iterate_batches` skips it). Both are the protocol's own rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import Connection
from millrace.broker.client.fetch_session import Answer, FetchSession, LogEnds, Wanted
from millrace.broker.client.fetch_session import FetchPosition as FetchPosition  # callers need both
from millrace.broker.errors import ProtocolError, error_for_code
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.session_epochs import ENDED
from millrace.broker.protocol.topic_partition import TopicPartition

_VERSIONS = (4, 17)
_VERSIONS_BY_NAME = (4, hot_fetch.FIRST_WITH_TOPIC_IDS - 1)


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
    session: FetchSession | None = None,
) -> list[FetchedPartition]:
    """Fetch from one broker: the answer comes when `min_bytes` are there or `max_wait_ms` are over.

    `max_bytes` and `partition_max_bytes` bound the answer, except that its first batch always comes whole.
    Partitions are served in the order given, so a fair caller rotates them; in a session the server does.
    Fetches that must not wait for each other's long polls need different values of `purpose` (a connection
    each). With a `session` only those are answered of which something is new; it tells who is quiet, and who
    does not take an answer ends it.

    Errors of partitions are in the answer, and noted in the cluster's metadata. Raises the connection's
    errors (NetworkException, RequestTimedOut, ProtocolError), ClusterUnreachable, and the KafkaError of an
    answer that is refused as a whole. A partition that an answer in full leaves out is a ProtocolError.
    """
    session = session or FetchSession(lasts=False)
    limits = hot_fetch.FetchRequest(max_wait_ms, min_bytes, max_bytes, read_committed, ())
    try:
        connection = await cluster.connection(node_id, purpose)
        return await _fetch(cluster, connection, positions, session, limits, partition_max_bytes)
    except BaseException:
        session.end()  # something that was answered may not have been taken
        raise


async def _fetch(
    cluster: Cluster,
    connection: Connection,
    positions: Mapping[TopicPartition, FetchPosition],
    session: FetchSession,
    limits: hot_fetch.FetchRequest,
    partition_max_bytes: int,
) -> list[FetchedPartition]:
    version = cluster.highest_version(
        connection, Api.FETCH, _VERSIONS if session.have_ids(positions) else _VERSIONS_BY_NAME
    )
    by_id = version >= hot_fetch.FIRST_WITH_TOPIC_IDS
    while True:
        wanted = session.want(positions, partition_max_bytes, by_id=by_id)
        answer = await _exchange(
            cluster, connection, version, _said(wanted, limits, partition_max_bytes, by_id=by_id)
        )
        connection.throttle(answer.throttle_ms)
        if answer.error_code in ENDED and not session.said_all:
            session.end()
            continue
        if answer.error_code:
            plain = error_for_code(answer.error_code)
            raise error_for_code(answer.error_code, f"{connection}: fetch is refused: {plain}")
        if answer.partitions or not positions or not answer.throttle_ms or not session.said_all:
            break
    fetched = []
    for given in answer.partitions:
        key = session.key_of(given.topic, given.partition)
        if key is None:
            raise connection.breach(
                f"fetch answers for {given.topic}-{given.partition}, which was not asked for"
            )
        fetched.append(_checked(cluster, key[0], given))
    named = [
        Answer(
            (each.topic, each.partition),
            LogEnds(each.high_watermark, each.last_stable_offset),
            len(each.records) > 0,
        )
        for each in fetched
    ]
    if not session.answered(answer.session_id, named, is_throttled=answer.throttle_ms > 0):
        raise connection.breach("the fetch answer is not about the partitions that were asked for")
    return fetched


def _said(
    wanted: Wanted, limits: hot_fetch.FetchRequest, partition_max_bytes: int, *, by_id: bool
) -> hot_fetch.FetchRequest:
    return limits._replace(
        partitions=[
            hot_fetch.PartitionFetch(
                at.topic_id if by_id else topic,
                partition,
                at.offset,
                partition_max_bytes,
                at.current_leader_epoch,
                at.last_fetched_epoch,
            )
            for (topic, partition), at in wanted.partitions
        ],
        session_id=wanted.session_id,
        session_epoch=wanted.session_epoch,
        forgotten=wanted.forgotten,
    )


async def _exchange(
    cluster: Cluster, connection: Connection, version: int, request: hot_fetch.FetchRequest
) -> hot_fetch.FetchResponse:
    frame = await cluster.exchange(
        connection,
        lambda correlation_id: (
            hot_fetch.encode_request(version, correlation_id, cluster.client_id, request),
        ),
        # The server may rightly be silent for the whole long poll, and want nothing more before.
        cluster.request_timeout_ms + request.max_wait_ms + connection.throttle_left_ms,
    )
    try:
        return hot_fetch.decode_response(frame, version)
    except ProtocolError as error:
        raise connection.breach(str(error)) from error


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
