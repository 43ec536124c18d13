"""A client that asks coordinators and leaders, and waits for their answers."""

from __future__ import annotations

import asyncio
from types import ModuleType, SimpleNamespace
from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.errors import NetworkException
from millrace.broker.protocol import hot_produce
from millrace.broker.protocol.hot_produce import PartitionAnswer
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.transactions.values import ProducerIdentity
from tests.simulation.cluster.broker import Broker
from tests.simulation.cluster.clients import Client
from tests.simulation.cluster.connections import call
from tests.simulation.cluster.coordinators import DATA_TOPIC, Topics

PRODUCE_VERSION = 9
_SIZE_PREFIX = 4

UNREACHED = ErrorCode.network_exception
"""What stands for an answer that did not come."""

RETRIED = frozenset(
    {
        ErrorCode.network_exception,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.request_timed_out,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.concurrent_transactions,
        ErrorCode.kafka_storage_error,
    }
)
"""After these the same is asked again."""


class Requester(Client):
    """See the module. `topics` says which partitions there are."""

    topics: Topics

    async def pause(self, least_ms: int = 5, most_ms: int = 60) -> None:
        await asyncio.sleep(self.world.rng.randint(least_ms, most_ms) / 1000)

    def coordinator_number(self, topic: str, key: str) -> int:
        numbers = self.topics.numbers_of(topic)
        return numbers[coordinator_partition(key, len(numbers))]

    async def serve(
        self, broker: Broker | None, handler: ModuleType, version: int, timeout_ms: int = 300, **fields: Any
    ) -> Any:
        """The answer of a handler. Raises NetworkException."""
        if broker is None:
            raise NetworkException("nobody is known to lead")

        def work() -> Any:
            assert broker.coordinators is not None
            return broker.coordinators.serve(handler, version, SimpleNamespace(**fields))

        return await call(self.network, self, broker, "control", work, timeout_ms=timeout_ms)

    async def produce(
        self,
        number: int,
        producer: ProducerIdentity,
        sequence: int,
        values: list[bytes],
        *,
        transactional_id: str | None = None,
        timeout_ms: int = 400,
        late_ms: int = 0,
    ) -> PartitionAnswer:
        """One batch with acks=all to whoever leads. Raises NetworkException."""
        leader = self.leader_of(number)
        if leader is None:
            raise NetworkException("nobody is known to lead")
        batch = build_batch(
            [Record(None, value, (), self.world.now_ms) for value in values],
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            base_sequence=sequence,
            transactional=transactional_id is not None,
        )
        buffers = hot_produce.encode_request(
            PRODUCE_VERSION,
            1,
            self.name,
            {(DATA_TOPIC, number): batch},
            acks=-1,
            timeout_ms=timeout_ms,
            transactional_id=transactional_id,
        )
        frame = b"".join(bytes(buffer) for buffer in buffers)[_SIZE_PREFIX:]

        def work() -> Any:
            assert leader.coordinators is not None
            return leader.coordinators.serve_produce(frame)

        answer = await call(
            self.network, self, leader, "produce", work, timeout_ms=timeout_ms, late_ms=late_ms
        )
        answers, _ = hot_produce.decode_response(memoryview(answer)[_SIZE_PREFIX:], PRODUCE_VERSION)
        return answers[0]
