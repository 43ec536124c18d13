"""Keeps the offset map small: joins its records and forgets what the target no longer holds.

Run by `worker`; it works in the worker that leads the mirror's group, every few minutes, one partition of the
map at a time. What is joined and what is forgotten is `map_upkeep`'s rule. The records it writes repeat what
the map says already, so nobody has to wait for it, and two that work at the same time do no harm.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.offsets.feeds import Feeds
from millrace.mirror.offsets.log_starts import log_starts
from millrace.mirror.offsets.map_reader import MapReader
from millrace.mirror.offsets.map_upkeep import plan_upkeep
from millrace.mirror.offsets.translation import PartitionMap
from millrace.mirror.topics.own_topics import OFFSET_MAP
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

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
        target: Cluster,
        write: WriteRecords,
        is_leader: Callable[[], bool],
        settings: Callable[[], tuple[MirrorConfig, Mapping[str, Cluster]]],
    ) -> None:
        """`settings`: as in `GroupSync`."""
        self._settings = settings
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
        config, _ = self._settings()
        positions = MapReader(self._target, config.name, purpose=PURPOSE)
        await positions.refresh_positions()
        feeds = Feeds(config)
        for number in range(OFFSET_MAP.partitions):
            reader = MapReader(self._target, config.name, purpose=PURPOSE)
            if not await reader.refresh_map_partition(number):
                return 0
            untold = {partition: feeds.untold(partition, positions.positions) for partition in reader.maps}
            starts = await self._starts(reader.maps, untold)
            for turn, (partition, map_of) in enumerate(reader.maps.items()):
                chunks = list(map_of.chunks.values())
                for batch in plan_upkeep(chunks, starts, untold[partition]):
                    await self._write(
                        OFFSET_MAP.of(config.name),
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

    async def _starts(
        self,
        maps: Mapping[SourcePartition, PartitionMap],
        untold: Mapping[SourcePartition, TargetPartition | None],
    ) -> dict[TargetPartition | None, int]:
        targets = {
            chunk.key.target or untold[partition]
            for partition, map_of in maps.items()
            for chunk in map_of.chunks.values()
        }
        starts = await log_starts(self._target, {target for target in targets if target is not None})
        return {target: starts.get(target, -1) for target in targets if target is not None}
