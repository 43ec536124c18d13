"""A replica manager as leader of followers, with real logs; who follows is played by its fetches."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication.in_sync_sets import IsWanted, StateConflict
from millrace.broker.replication.local_partition import (
    FollowerFetch,
    PartitionRead,
)
from millrace.broker.replication.partition import PartitionState
from millrace.broker.replication.replica_fetcher import FetchLimits
from millrace.broker.replication.replica_manager import ACKS_ALL, ReplicaManager
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry.metrics import BrokerMetrics
from tests.waiting import patience

TOPIC_ID = uuid.UUID(int=7)
REPLICAS = {0: (1, 2, 3)}
LAG_MS = 1_000


def batch(*values: bytes) -> memoryview:
    records = [Record(key=None, value=v, headers=(), timestamp_ms=1, offset=n) for n, v in enumerate(values)]
    return memoryview(build_batch(records))


class Bench:
    """A manager of broker 1, its clock, and the ZooKeeper that it writes to."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now_ms = 0
        self.logs = LogManager([folder], LogConfig())
        self.logs.start(0)
        self.metrics = BrokerMetrics()
        self.manager = ReplicaManager(
            1,
            self.logs,
            LogConfig(),
            clock_ms=lambda: 1_000,
            is_known=lambda _topic, _partition: True,
            metrics=self.metrics,
            max_lag_ms=LAG_MS,
            steady_ms=lambda: self.now_ms,
            **options,
        )
        self.written: list[PartitionState] = []
        self.write_gate = asyncio.Event()
        self.write_gate.set()
        self.conflict = False
        self.assigned: tuple[int, ...] = REPLICAS[0]
        """In ZooKeeper, whatever this broker has heard."""
        self.manager.join(self._write_state, None, FetchLimits(), lambda _task: None)  # type: ignore[arg-type]
        self.manager.set_brokers({1: 10, 2: 20, 3: 30}, own_epoch=-1)

    async def _write_state(
        self,
        topic: str,
        topic_id: uuid.UUID,
        partition: int,
        state: PartitionState,
        is_wanted: IsWanted,
    ) -> int:
        assert (topic, topic_id, partition) == ("t", TOPIC_ID, 0)
        await self.write_gate.wait()
        if self.conflict or not is_wanted(self.assigned):
            raise StateConflict("another state stands")
        self.written.append(state)
        return state.version + 1

    async def lead(self, *isr: int, epoch: int = 0, version: int = 0, **config: str) -> None:
        named = {key.replace("_", "."): value for key, value in config.items()}
        state = PartitionState(1, epoch, isr or (1, 2, 3), 1, version)
        await self.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, named, REPLICAS)

    def append(self, *values: bytes, acks: int = ACKS_ALL) -> asyncio.Future[None] | None:
        return self.manager.append_now("t", 0, batch(*values), acks)[1]

    def fetch(
        self,
        follower: int,
        offset: int,
        *,
        epoch: int = 0,
        start: int = 0,
        last: int = -1,
        topic_id: uuid.UUID | None = None,
    ) -> PartitionRead:
        return self.manager.read_now(
            "t",
            0,
            offset,
            1 << 20,
            at_least_one=True,
            current_leader_epoch=epoch,
            last_fetched_epoch=last,
            follower=FollowerFetch(follower, follower * 10, start),
            topic_id=topic_id,
        )

    @property
    def high_watermark(self) -> int:
        return self.manager.leader_of("t", 0).replica.high_watermark


def run(folder: Path, scenario: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        bench = Bench(folder, **options)
        try:
            async with asyncio.timeout(patience(120)):
                await scenario(bench)
        finally:
            await bench.manager.leave()
            bench.manager.close()
            bench.logs.close(0)

    asyncio.run(main())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
