"""Producing whole record batches, and the producer ids that make it idempotent.

`produce` sends batches to one leader without touching them: they go to the socket from where they lie. A
standard broker takes exactly one batch for each partition in a request. Called by the mirror's sink and by
`producer.py`. Versions 3 to 9 are spoken.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kio.static.primitive import i32Timedelta

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import Bytes, request_schema
from millrace.broker.errors import ConcurrentTransactions, KafkaError, ProtocolError, error_for_code
from millrace.broker.protocol import hot_produce
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

_VERSIONS = (3, 9)
_INIT_PRODUCER_ID_VERSIONS = (2, 4)
_FIRST_WITH_HOLDER = 3


class ProduceOutcome(NamedTuple):
    """What became of one partition's batch. `error_code` is Kafka's (0: written); offsets and time are -1
    where the server does not say, as with acks=0."""

    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    error_message: str | None = None


async def produce(
    cluster: Cluster,
    node_id: int,
    batches: Mapping[TopicPartition, Bytes | Sequence[Bytes]],
    *,
    acks: int = -1,
    timeout_ms: int = 30_000,
    transactional_id: str | None = None,
    purpose: str = "produce",
) -> dict[TopicPartition, ProduceOutcome]:
    """Send one batch for each partition to their leader and wait for what became of them.

    `acks` is 0 (no answer: every outcome is empty), 1, or -1 (all in-sync replicas, within `timeout_ms`).
    A batch is one buffer or several that together are one batch; they must not change before this returns.
    Calls may run at the same time: they are pipelined in the order in which they were made.

    Errors of partitions are in the outcomes, and noted in the cluster's metadata. Raises the connection's
    errors: whether the batches were written is then not known. A partition that the server's answer leaves
    out is a ProtocolError.
    """
    connection = await cluster.connection(node_id, purpose)
    version = cluster.highest_version(connection, Api.PRODUCE, _VERSIONS)

    def encode(correlation_id: int) -> Sequence[Bytes]:
        return hot_produce.encode_request(
            version,
            correlation_id,
            cluster.client_id,
            batches,
            acks=acks,
            timeout_ms=timeout_ms,
            transactional_id=transactional_id,
        )

    if acks == 0:
        await connection.post(encode, cluster.request_timeout_ms + timeout_ms)
        return dict.fromkeys(batches, ProduceOutcome())
    frame = await cluster.exchange(connection, encode, cluster.request_timeout_ms + timeout_ms)
    try:
        answers, throttle_ms = hot_produce.decode_response(frame, version)
    except ProtocolError as error:
        raise connection.breach(str(error)) from error
    if throttle_ms:
        connection.throttle(throttle_ms)
    outcomes: dict[TopicPartition, ProduceOutcome] = {}
    for answer in answers:
        if answer.error_code:
            cluster.observe(answer.error_code)
        outcomes[answer.topic, answer.partition] = ProduceOutcome._make(answer[2:7])
    if outcomes.keys() != batches.keys():
        raise connection.breach("the produce answer is not about the partitions that were sent")
    return outcomes


async def init_producer_id(
    cluster: Cluster,
    transactional_id: str | None = None,
    *,
    timeout_ms: int = 60_000,
    retry_ms: float | None = None,
    holder: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """A producer id and its epoch. With a transactional id: its own, older holders are fenced and their open
    transaction is aborted; `timeout_ms` is then how long a transaction may stay open. `holder`: who asks has
    this id and epoch, and is refused where another has the transactional id by now (KIP-360).

    Retries while coordinators move and an older transaction ends, for `retry_ms` (the cluster's request
    timeout, when it is not given). Raises KafkaError.
    """

    async def attempt() -> tuple[int, int]:
        try:
            return await ask()
        except KafkaError as error:
            if transactional_id is not None and not isinstance(error, ConcurrentTransactions):
                cluster.forget_coordinator(transactional_id, "transaction")
            raise

    async def ask() -> tuple[int, int]:
        node_id = None
        if transactional_id is not None:
            node_id = await cluster.coordinator(transactional_id, "transaction")
        lowest, highest = _INIT_PRODUCER_ID_VERSIONS
        lowest = lowest if holder is None else _FIRST_WITH_HOLDER
        version = await cluster.api_version(Api.INIT_PRODUCER_ID, lowest, highest, node_id)
        schema = request_schema(Api.INIT_PRODUCER_ID, version)
        limit = i32Timedelta.parse(datetime.timedelta(milliseconds=timeout_ms))
        of_holder = {} if holder is None else {"producer_id": holder[0], "producer_epoch": holder[1]}
        request = schema.InitProducerIdRequest(
            transactional_id=transactional_id, transaction_timeout=limit, **of_holder
        )
        answer = await cluster.request(request, node_id=node_id)
        code = int(answer.error_code)
        if code:
            raise error_for_code(code, f"{cluster}: no producer id: {error_for_code(code)}")
        return int(answer.producer_id), int(answer.producer_epoch)

    return await cluster.retrying(attempt, timeout_ms=retry_ms)
