"""How a worker's batches and positions reach the target: what `at_least_once` and `exactly_once` both are.

Called by `worker`, which decides which partitions are carried; a delivery decides through which sink, and
when a position is on record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.delivery.transaction import Seat
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.troubles import Failure


@dataclass(frozen=True, slots=True)
class TransactionCounts:
    """Since the worker began. `open_seconds` is the sum over committed transactions."""

    committed: int = 0
    aborted: int = 0
    open_seconds: float = 0.0
    last_open_seconds: float = 0.0


class Delivery(Protocol):
    """One worker's way to the target."""

    @property
    def sinks(self) -> Collection[Sink]: ...

    @property
    def lane_limit(self) -> int:
        """How many lanes it may have, 0 without transactions."""
        ...

    @property
    def slot(self) -> int | None:
        """The worker's number within the mirror, which its transactional ids are made of."""
        ...

    async def run(self) -> None:
        """Goes on until cancelled. What comes out of here is a broken rule."""
        ...

    def take_config(self, config: MirrorConfig) -> None:
        """Settings that may change while the worker runs."""
        ...

    def seated(self, slot: int, seat: Callable[[], Seat | None]) -> None:
        """The group has given this worker a share; `seat` tells its place in the group, as it is now."""
        ...

    def sink_of(self, partition: SourcePartition) -> Sink:
        """The sink of a partition that is about to begin; `began` follows."""
        ...

    def began(self, pipeline: PartitionPipeline) -> None: ...

    async def settle(self, pipelines: Iterable[PartitionPipeline]) -> None:
        """Returns when everything that these have settled is on record."""
        ...

    def left(self, pipeline: PartitionPipeline) -> None:
        """Its assignment ends; called before it closes."""
        ...

    async def lost(self) -> None:
        """The seat in the group is gone. Returns when nothing that was under way can be committed here."""
        ...

    async def close(self) -> None:
        """An orderly end: transactions that are still open are aborted."""
        ...

    async def read_positions(self) -> Positions: ...

    async def record_start(self, partition: SourcePartition, position: Position) -> None:
        """Returns when a first position is on record. Raises KafkaError when the seat is lost meanwhile."""
        ...

    async def fence(self, slots: Mapping[int, int], timeout_s: float) -> dict[int, int]:
        """Ends what earlier holders of the slots (and their lane counts) left open; gives back those for
        which that is not known to be done."""
        ...

    def standing(self) -> Iterator[tuple[SourcePartition, Failure]]:
        """The partitions of which no transaction is committed though there is something: why, and since when.
        What is written outside of transactions is `SystemRecords`'."""
        ...

    def transactions(self) -> TransactionCounts: ...
