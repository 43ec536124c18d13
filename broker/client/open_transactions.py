"""Which transactions are open on a partition, and whose they are (KIP-664).

For whoever waits for a last stable offset that does not move: asked of the partition's leader
(DescribeProducers) and of every broker as coordinator (ListTransactions). Used by the mirror's
`positions_keeper` to name what it waits for; nothing is decided by it.

What no broker shows may have a coordinator all the same: one that is away or still loads its log, one of a
partition that has no leader now, or one that this user may not ask about (DESCRIBE on the transactional id).
So it is never said that a transaction has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.errors import (
    LeaderNotAvailable,
    MillraceError,
    ProtocolError,
    error_for_code,
)
from millrace.broker.protocol.frames import Api

_DESCRIBE_PRODUCERS_VERSION = 0
_LIST_TRANSACTIONS_VERSION = 0


# Of Kafka's words for states: its producer, its timeout or its coordinator ends a transaction in these.
_BEING_ENDED = frozenset(("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"))


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """`transactional_id` and `state` (Kafka's words: Ongoing, PrepareCommit, …) are None where no broker
    shows it; `silent` are the brokers that could not be asked about it, or refused to say. `leader` is the
    broker that leads the partition."""

    producer_id: int
    start_offset: int
    leader: int
    transactional_id: str | None = None
    state: str | None = None
    silent: tuple[int, ...] = ()

    @property
    def is_in_hand(self) -> bool:
        """Whether a coordinator has it, and brings it to an end."""
        return self.state in _BEING_ENDED

    def __str__(self) -> str:
        if self.transactional_id is not None:
            return f"from offset {self.start_offset} of {self.transactional_id} ({self.state})"
        which = f"from offset {self.start_offset} of producer {self.producer_id}"
        if self.silent:
            brokers = ", ".join(f"broker {node_id}" for node_id in self.silent)
            return f"{which} ({brokers} did not say whose it is)"
        return f"{which} (no coordinator shows whose it is)"


async def open_transactions(cluster: Cluster, topic: str, partition: int) -> list[OpenTransaction]:
    """By their first offset. Raises KafkaErrors (UnsupportedVersion: before Apache Kafka 3.0),
    ClusterUnreachable, and ProtocolError for an answer about something else."""
    view = await cluster.metadata([topic])
    leader = view.leader(topic, partition)
    if leader is None:
        raise LeaderNotAvailable(f"{cluster}: {topic}-{partition} has no leader now")
    await cluster.api_version(Api.DESCRIBE_PRODUCERS, 0, _DESCRIBE_PRODUCERS_VERSION, leader)
    schema = request_schema(Api.DESCRIBE_PRODUCERS, _DESCRIBE_PRODUCERS_VERSION)
    asked = schema.TopicRequest(name=topic, partition_indexes=(partition,))
    answer = await cluster.request(schema.DescribeProducersRequest(topics=(asked,)), node_id=leader)
    part = _only_part(answer, topic, partition)
    if part is None:
        raise ProtocolError(
            f"{cluster}: broker {leader} says nothing of the producers of {topic}-{partition}"
        )
    if part.error_code:
        code = int(part.error_code)
        raise error_for_code(code, f"{cluster}: producers of {topic}-{partition}: {error_for_code(code)}")
    starts = {
        int(each.producer_id): int(each.current_txn_start_offset)
        for each in part.active_producers
        if int(each.current_txn_start_offset) >= 0
    }
    owners, silent = await _owners(cluster, starts) if starts else ({}, ())
    return [
        OpenTransaction(producer_id, start, leader, *owners[producer_id])
        if producer_id in owners
        else OpenTransaction(producer_id, start, leader, silent=silent)
        for producer_id, start in sorted(starts.items(), key=lambda each: each[1])
    ]


def _only_part(answer: Any, topic: str, partition: int) -> Any:
    """What the answer says of the one partition that was asked for; None: nothing."""
    for each in answer.topics:
        for part in each.partitions:
            if (each.name, int(part.partition_index)) == (topic, partition):
                return part
    return None


async def _owners(
    cluster: Cluster, producer_ids: Iterable[int]
) -> tuple[dict[int, tuple[str, str]], tuple[int, ...]]:
    """(Producer id -> (transactional id, state), as far as the brokers answer; the brokers that do not)."""
    schema = request_schema(Api.LIST_TRANSACTIONS, _LIST_TRANSACTIONS_VERSION)
    request = schema.ListTransactionsRequest(
        state_filters=(), producer_id_filters=tuple(sorted(producer_ids))
    )
    found: dict[int, tuple[str, str]] = {}
    silent: list[int] = []
    # As they are now: a broker that has come since would be left out, with all that it coordinates.
    for node_id in sorted((await cluster.metadata([], max_age_ms=0)).brokers):
        try:
            answer = await cluster.request(request, node_id=node_id)
        except MillraceError:
            silent.append(node_id)
            continue
        if answer.error_code:  # it still loads its log, or does not serve yet
            silent.append(node_id)
        for each in answer.transaction_states:
            found[int(each.producer_id)] = (str(each.transactional_id), str(each.transaction_state))
    return found, tuple(silent)
