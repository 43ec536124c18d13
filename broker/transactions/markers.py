"""Sends the outcome of transactions to the leaders of their partitions, until every one has it.

The coordinator hands over a `Marker` with its partitions; each leader gets its share in WriteTxnMarkers
requests, one under way for each broker, in which everything that has come up meanwhile goes together. What
was not written is sent again, to whoever leads by then. `report` hears of every partition that is done:
marked, or deleted.

No network here: `write(broker_id, markers)` does that. Invariants: a marker is given up only when its
coordinator no longer wants it (`is_wanted`) or a leader knows a newer coordinator; a leader that does not
answer holds up nobody else's markers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import structlog
from kio.schema.errors import ErrorCode

from millrace.broker.errors import MillraceError
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.partition import NO_LEADER
from millrace.broker.transactions.values import ProducerIdentity

RETRY_SECONDS = 0.1
"""A partition without a leader, or a leader that does not know it yet, needs about an election's time."""

MARKERS_PER_REQUEST = 1_000

_DONE = {
    ErrorCode.none,
    # Nothing of this transaction can be there: the partition refused its data.
    ErrorCode.unsupported_for_message_format,
    ErrorCode.unsupported_version,
    # The partition has seen a later epoch of this producer, which only follows when this one's end is there.
    ErrorCode.invalid_producer_epoch,
}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Marker:
    """The outcome of one producer's transaction, for some of its partitions."""

    transactional_id: str
    producer: ProducerIdentity
    coordinator_epoch: int
    committed: bool
    partitions: frozenset[TopicPartition]


Outcome = dict[TopicPartition, ErrorCode]
Write = Callable[[int, Sequence[Marker]], Awaitable[list[Outcome]]]
"""Have a broker append markers: for each of them, an error by partition. Raises MillraceError."""

LeaderOf = Callable[[str, int], int | None]
"""The broker that leads a partition, NO_LEADER while there is none, None when there is no such partition."""


class MarkerSender:
    """See the module. Everything runs on one event loop."""

    def __init__(
        self,
        leader_of: LeaderOf,
        write: Write,
        *,
        report: Callable[[Marker, frozenset[TopicPartition]], None],
        is_wanted: Callable[[Marker], bool],
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._leader_of = leader_of
        self._write = write
        self._report = report
        self._is_wanted = is_wanted
        self._retry_seconds = retry_seconds
        self._queues: defaultdict[int, list[Marker]] = defaultdict(list)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._later: set[asyncio.TimerHandle] = set()
        self._closed = False
        self.retry_count = 0
        """Shares of markers that had to be sent again."""

    @property
    def waiting_count(self) -> int:
        """Shares of markers that wait for their turn or for a leader."""
        return sum(map(len, self._queues.values())) + len(self._later)

    def send(self, marker: Marker) -> None:
        """Begin to send; what was sent of it before is sent again, which does no harm."""
        if self._closed or not self._is_wanted(marker):
            return
        shares: defaultdict[int | None, set[TopicPartition]] = defaultdict(set)
        for partition in sorted(marker.partitions):
            shares[self._leader_of(*partition)].add(partition)
        for leader, partitions in shares.items():
            share = replace(marker, partitions=frozenset(partitions))
            if leader is None:
                log.info(
                    "a transaction's partitions are gone; they need no marker",
                    transactional_id=marker.transactional_id,
                    partitions=sorted(partitions),
                )
                self._report(share, share.partitions)
            elif leader == NO_LEADER:
                self._send_later(share)
            else:
                self._queues[leader].append(share)
                if leader not in self._tasks:
                    self._tasks[leader] = asyncio.get_running_loop().create_task(self._serve(leader))

    async def close(self) -> None:
        """Send no more."""
        self._closed = True
        for timer in self._later:
            timer.cancel()
        self._later.clear()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _send_later(self, marker: Marker) -> None:
        self.retry_count += 1

        def again() -> None:
            self._later.discard(timer)
            self.send(marker)

        timer = asyncio.get_running_loop().call_later(self._retry_seconds, again)
        self._later.add(timer)

    async def _serve(self, broker_id: int) -> None:
        """Send everything that is queued for one broker, request after request."""
        queue = self._queues[broker_id]
        try:
            while queue:
                batch = [marker for marker in queue[:MARKERS_PER_REQUEST] if self._is_wanted(marker)]
                del queue[:MARKERS_PER_REQUEST]
                if batch:
                    await self._send_batch(broker_id, batch)
        finally:
            del self._tasks[broker_id]

    async def _send_batch(self, broker_id: int, batch: list[Marker]) -> None:
        try:
            outcomes = await self._write(broker_id, batch)
        except MillraceError as error:
            log.info("transaction markers not delivered; trying again", broker=broker_id, error=str(error))
            outcomes = [{} for _ in batch]
        except Exception:
            # The root of a task: markers that are dropped here would leave their transactions open.
            log.exception("sending transaction markers failed; trying again", broker=broker_id)
            outcomes = [{} for _ in batch]
        for marker, outcome in zip(batch, outcomes, strict=True):
            self._settle(broker_id, marker, outcome)

    def _settle(self, broker_id: int, marker: Marker, outcome: Outcome) -> None:
        """Report what is done; what is not is sent again."""
        if ErrorCode.transaction_coordinator_fenced in outcome.values():
            log.warning(
                "a newer coordinator ends this transaction",
                transactional_id=marker.transactional_id,
                coordinator_epoch=marker.coordinator_epoch,
                broker=broker_id,
            )
            return
        done = frozenset(p for p in marker.partitions if outcome.get(p) in _DONE)
        if done:
            self._report(replace(marker, partitions=done), done)
        rest = marker.partitions - done
        if rest:
            log.debug(
                "transaction markers to be sent again",
                transactional_id=marker.transactional_id,
                broker=broker_id,
                errors=sorted({_name(outcome.get(partition)) for partition in rest}),
            )
            self._send_later(replace(marker, partitions=rest))


def _name(error: ErrorCode | None) -> str:
    return "no answer" if error is None else error.name


def partitions_by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Topic -> partition numbers, in order, as requests carry them."""
    topics: defaultdict[str, list[int]] = defaultdict(list)
    for topic, partition in sorted(partitions):
        topics[topic].append(partition)
    return dict(topics)
