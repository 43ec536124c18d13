"""Keeps the offset map small: joins its records and forgets what the target no longer holds.

Run by `worker`; it works in the worker that leads the mirror's group, every few minutes, one partition of the
map at a time. What is joined and what is forgotten is `map_upkeep`'s rule. The records it writes repeat what
the map says already, so nobody has to wait for it, and two that work at the same time do no harm.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import EARLIEST
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.offsets.map_reader import MapReader
from millrace.mirror.offsets.map_upkeep import plan_upkeep
from millrace.mirror.topics.own_topics import OFFSET_MAP
from millrace.mirror.topics.routes import Naming, SourcePartition, TargetPartition

log = structlog.get_logger("millrace.mirror.offsets.map_keeper")

FIRST_AFTER_S = 60.0
INTERVAL_S = 600.0
CHECK_PAUSE_S = 5.0
PURPOSE = "offset map upkeep"
# Planning is work for the processor: the loop has its turn between partitions.
PARTITIONS_A_TURN = 50


class WriteRecords(Protocol):
    """`SystemRecords.write`."""

    def __call__(
        self,
        topic: str,
        records: Sequence[tuple[bytes, bytes | None]],
        *,
        partition: int = 0,
        partitions: int = 1,
        configs: Mapping[str, str],
    ) -> Awaitable[object]: ...


class MapKeeper:
    """See the module's text. `run` goes on until it is cancelled."""

    def __init__(
        self,
        mirror: str,
        naming: Naming,
        target: Cluster,
        write: WriteRecords,
        is_leader: Callable[[], bool],
    ) -> None:
        self._mirror = mirror
        self._naming = naming
        self._target = target
        self._write = write
        self._is_leader = is_leader

    async def run(self) -> None:
        due_at = time.monotonic() + FIRST_AFTER_S
        while True:
            await asyncio.sleep(CHECK_PAUSE_S)
            if time.monotonic() < due_at or not self._is_leader():
                continue
            due_at = time.monotonic() + INTERVAL_S * random.uniform(0.8, 1.2)
            try:
                await self.keep()
            except CLUSTER_FAILURES as error:
                log.warning("the offset map was not tidied; trying again later", error=str(error))

    async def keep(self) -> int:
        """One round; how many records the map lost. Raises what the target says."""
        saved = 0
        for number in range(OFFSET_MAP.partitions):
            reader = MapReader(self._target, self._mirror, purpose=PURPOSE)
            if not await reader.refresh_map_partition(number):
                return 0
            starts = await self._starts(reader.maps)
            for turn, (partition, map_of) in enumerate(reader.maps.items()):
                start = starts.get(self._target_of(partition), -1)
                for batch in plan_upkeep(list(map_of.chunks.values()), start):
                    await self._write(
                        OFFSET_MAP.of(self._mirror),
                        batch,
                        partition=number,
                        partitions=OFFSET_MAP.partitions,
                        configs=OFFSET_MAP.configs,
                    )
                    saved += sum(1 if value is None else -1 for _, value in batch)
                if turn % PARTITIONS_A_TURN == 0:
                    await asyncio.sleep(0)
        self._target.close_purpose(PURPOSE)
        if saved:
            log.info("the offset map was tidied", records_less=saved)
        return saved

    def _target_of(self, partition: SourcePartition) -> TargetPartition:
        return self._naming.target_partition(partition.source, partition.topic, partition.partition)

    async def _starts(self, partitions: Iterable[SourcePartition]) -> dict[TargetPartition, int]:
        """Where the target's logs begin; what the target does not have (now) is left out."""
        targets = {self._target_of(partition) for partition in partitions}
        view = await self._target.metadata(sorted({target.topic for target in targets}), max_age_ms=0)
        there = {
            (target.topic, target.partition): EARLIEST
            for target in targets
            if target.topic in view.topics and target.partition in view.topics[target.topic].partitions
        }
        begins = await self._target.list_offsets(there) if there else {}
        return {TargetPartition(*key): found.offset for key, found in begins.items()}
