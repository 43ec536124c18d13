"""A transaction coordinator with its log in memory and its markers in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kio.schema.errors import ErrorCode

from millrace.broker.errors import (
    KafkaError,
    NotLeaderOrFollower,
)
from millrace.broker.protocol.batch import stamp_offset_and_epoch
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.records import read_records
from millrace.broker.transactions.config import TransactionConfig
from millrace.broker.transactions.coordinator import TransactionCoordinator
from millrace.broker.transactions.markers import Marker
from millrace.broker.transactions.records import decode_key, decode_value
from millrace.broker.transactions.values import ProducerIdentity, TransactionState
from tests.waiting import until_async as until

A, B = ("flights", 0), ("flights", 1)
NONE = ErrorCode.none
WIDTH = 4
ORDERS = coordinator_partition("orders", WIDTH)


class MemoryLog:
    """`__transaction_state` in memory. `gate` holds commits back, `failure` refuses appends, `late_failure`
    fails them afterwards."""

    def __init__(self) -> None:
        self.batches: dict[int, list[bytes]] = {}
        self.next_offset: dict[int, int] = {}
        self.epochs = dict.fromkeys(range(WIDTH), 3)
        self.failure: KafkaError | None = None
        self.late: list[asyncio.Future[None]] = []
        self.holds = False
        self.committed_checks: list[int] = []
        self.reading = asyncio.Event()
        self.reading.set()

    def partition_count(self) -> int:
        return WIDTH

    def epoch(self, partition: int) -> int:
        if self.epochs[partition] < 0:
            raise NotLeaderOrFollower("elsewhere")
        return self.epochs[partition]

    def append_now(self, partition: int, batch: bytes):
        if self.failure is not None:
            raise self.failure
        stamped = bytearray(batch)
        offset = self.next_offset.get(partition, 0)
        stamp_offset_and_epoch(stamped, offset, self.epochs[partition])
        self.batches.setdefault(partition, []).append(bytes(stamped))
        self.next_offset[partition] = offset + 1
        if not self.holds:
            return offset, None
        self.late.append(asyncio.get_running_loop().create_future())
        return offset, self.late[-1]

    async def until_committed(self, partition: int, offset: int) -> None:
        self.committed_checks.append(offset)

    async def read_all(self, partition: int) -> AsyncIterator[memoryview]:
        for batch in list(self.batches.get(partition, [])):
            await self.reading.wait()
            yield memoryview(batch)

    def states(self) -> list[TransactionState | None]:
        records = [r for batch in self.batches.get(ORDERS, []) for r in read_records(batch)]
        assert all(decode_key(record.key) == "orders" for record in records)
        return [None if r.value is None else decode_value(r.value).state for r in records]


class Surroundings:
    def __init__(self, log: MemoryLog | None = None, **config: int) -> None:
        self.log = log or MemoryLog()
        self.now_ms = 1_000
        self.sent: list[Marker] = []
        self.markers_pass = asyncio.Event()
        self.markers_pass.set()
        self.ids = iter(range(500, 600))
        self.id_failure: Exception | None = None
        self.coordinator = TransactionCoordinator(
            TransactionConfig(**config),
            self.log,
            clock_ms=lambda: self.now_ms,
            take_producer_id=self.take_producer_id,
            leader_of=lambda topic, partition: 1,
            write_markers=self.write_markers,
        )

    async def take_producer_id(self) -> int:
        await asyncio.sleep(0)
        if self.id_failure is not None:
            raise self.id_failure
        return next(self.ids)

    async def write_markers(self, broker_id: int, markers: Sequence[Marker]):
        self.sent += markers
        await self.markers_pass.wait()
        return [dict.fromkeys(marker.partitions, NONE) for marker in markers]

    async def loaded(self) -> TransactionCoordinator:
        for partition in range(WIDTH):
            await self.coordinator.load(partition)
        return self.coordinator

    async def begun(self) -> ProducerIdentity:
        error, producer = await self.coordinator.begin_producer("orders", 60_000, None)
        assert error is NONE
        return producer

    async def state_is(self, state: TransactionState) -> None:
        await until(lambda: self.coordinator.describe("orders").state == state.value)


def run(scenario, **config: int) -> None:
    async def main() -> None:
        around = Surroundings(**config)
        try:
            await scenario(around)
        finally:
            await around.coordinator.close()

    asyncio.run(main())
