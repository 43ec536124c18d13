"""The offsets topic as the group coordinator needs it, on top of the replica manager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import KafkaError, RequestTimedOut
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.groups.offsets import OFFSETS_TOPIC
from millrace.broker.replication.replica_manager import ACKS_ALL, ReplicaManager

log = structlog.get_logger("millrace.broker")

COMMIT_TIMEOUT_MS = 5_000


class ReplicatedOffsetsLog:
    """Appends reach the log in the order of the calls: the append itself happens before the first await."""

    def __init__(
        self, replica_manager: ReplicaManager, cache: MetadataCache, default_partition_count: int
    ) -> None:
        self._replica_manager = replica_manager
        self._cache = cache
        self._default_partition_count = default_partition_count

    def partition_count(self) -> int:
        """How wide the offsets topic is; before it exists, how wide it will be made."""
        info = self._cache.topic(OFFSETS_TOPIC)
        return self._default_partition_count if info is None else len(info.partitions)

    async def append(self, partition: int, batch: bytes) -> int:
        """The base offset, once the batch is committed. Raises KafkaError."""
        writable = memoryview(bytearray(batch))  # the log stamps offsets in place
        try:
            appended = await self._replica_manager.append(
                (OFFSETS_TOPIC, partition), writable, ACKS_ALL, COMMIT_TIMEOUT_MS
            )
        except TimeoutError:
            raise RequestTimedOut("the offsets were not committed in time") from None
        return appended.base_offset

    def read_all(self, partition: int) -> AsyncIterator[memoryview]:
        """Every batch, from the start of the partition to its end."""
        return self._replica_manager.read_all(OFFSETS_TOPIC, partition)


class GroupLoader:
    """Loads and unloads the groups of offsets partitions as their leadership comes and goes."""

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups
        self._loading: set[asyncio.Task[None]] = set()

    def gained(self, topic: str, partition: int) -> None:
        if topic == OFFSETS_TOPIC:
            task = asyncio.ensure_future(self._load(partition))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)

    def lost(self, topic: str, partition: int) -> None:
        if topic == OFFSETS_TOPIC:
            self._groups.unload(partition)

    async def _load(self, partition: int) -> None:
        try:
            await self._groups.load(partition)
        except (KafkaError, OSError, ValueError) as error:
            log.error("groups cannot be loaded", partition=partition, error=str(error))
