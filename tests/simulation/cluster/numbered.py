"""Idempotent producers: numbered records, several batches on the way at once, each sent until it is written.

A record is `numbered`-th of its producer in its partition, so that the log itself tells of what is missing,
twice or out of order.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from millrace.broker.errors import NetworkException
from millrace.broker.server.handlers import init_producer_id
from millrace.broker.transactions.values import ProducerIdentity
from tests.simulation.cluster.broker import Broker
from tests.simulation.cluster.coordinators import Topics
from tests.simulation.cluster.exactly_once import ExactlyOnce, numbered
from tests.simulation.cluster.requester import RETRIED, UNREACHED, Requester
from tests.simulation.cluster.truth import Violation
from tests.simulation.cluster.world import Network, World

_SENT_AGAIN = RETRIED | {ErrorCode.out_of_order_sequence_number}

MOST_UNDER_WAY = 5
"""As many as a broker remembers."""


@dataclass(frozen=True, slots=True)
class _Batch:
    sequence: int
    counts: range

    def values(self, name: str) -> list[bytes]:
        return [numbered(name, count) for count in self.counts]


class NumberedProducer(Requester):
    """See the module; one partition."""

    def __init__(
        self,
        world: World,
        name: str,
        partition: int,
        network: Network,
        brokers: dict[int, Broker],
        topics: Topics,
        promises: ExactlyOnce,
    ) -> None:
        super().__init__(world, name, network, brokers)
        self.topics = topics
        self.is_stopped = False
        self.is_done = False
        self._partition, self._promises = partition, promises
        self._producer = ProducerIdentity()
        self._under_way: list[_Batch] = []
        self._acknowledged: set[_Batch] = set()
        self._sent = 0
        self._is_known = False
        self.spawn(self._work())

    async def _work(self) -> None:
        while not self._producer.producer_id >= 0:
            await self._begin()
        while self._under_way or not self.is_stopped:
            self._add()
            outcomes = await asyncio.gather(*map(self._send, self._under_way))
            self._take(outcomes)
            await self.pause(2, 50)
        self.is_done = True

    async def _begin(self) -> None:
        try:
            answer = await self.serve(
                self.leader_of(self._partition),
                init_producer_id,
                4,
                transactional_id=None,
                producer_id=-1,
                producer_epoch=-1,
            )
        except NetworkException:
            await self.pause()
            return
        if answer.error_code is ErrorCode.none:
            self._producer = ProducerIdentity(int(answer.producer_id), int(answer.producer_epoch))

    def _add(self) -> None:
        """New batches behind those that are under way; only one until the partition knows the producer: whom
        it does not know, it lets begin with any sequence."""
        most = self.world.rng.randint(0, MOST_UNDER_WAY) if self._is_known else 1
        while len(self._under_way) < most and not self.is_stopped:
            counts = range(self._sent + 1, self._sent + 1 + self.world.rng.randint(1, 3))
            self._under_way.append(_Batch(self._sent, counts))
            self._sent = counts[-1]

    async def _send(self, batch: _Batch) -> ErrorCode:
        if batch in self._acknowledged:
            return ErrorCode.none
        try:
            answer = await self.produce(
                self._partition, self._producer, batch.sequence, batch.values(self.name), timeout_ms=400
            )
        except NetworkException:
            return UNREACHED
        return ErrorCode(answer.error_code)

    def _take(self, outcomes: list[ErrorCode]) -> None:
        """A gap in the sequence closes when what comes before is sent again. What was acknowledged keeps its
        place until all before it was too: a broker would forget the earlier one."""
        for batch, error in zip(self._under_way, outcomes, strict=True):
            if error is ErrorCode.none:
                self._is_known = True
                self._acknowledged.add(batch)
                self._promises.acknowledged(self.name, self._partition, batch.counts)
            elif error not in _SENT_AGAIN and self._promises.is_judged:
                raise Violation(f"{self.name} hears {error.name} to sequence {batch.sequence}")
        while self._under_way and self._under_way[0] in self._acknowledged:
            self._acknowledged.remove(self._under_way.pop(0))
