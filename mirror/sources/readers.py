"""The sources that a worker reads, by name: they come and go while it runs.

Held by `worker`, told of new settings by it. Who takes a source away has given up its partitions first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping

from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.config import MirrorConfig, SourceConfig
from millrace.mirror.sources.fetch_memory import FetchBudget
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.topics.routes import SourcePartition


class Readers(Mapping[str, SourceReader]):
    """See the module's text. `on_view` and `record_start` as in `SourceReader`."""

    def __init__(
        self,
        config: MirrorConfig,
        budget: FetchBudget,
        now_ms: Callable[[], int],
        on_view: Callable[[SourceReader], Awaitable[None]],
        record_start: Callable[[SourcePartition, Position], Awaitable[None]],
    ) -> None:
        self._config = config
        self._budget = budget
        self._now_ms = now_ms
        self._on_view = on_view
        self._record_start = record_start
        self._readers: dict[str, SourceReader] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def __getitem__(self, name: str) -> SourceReader:
        return self._readers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Reads from now on, what is there and what comes."""
        self._tasks = tasks
        for name, reader in self._readers.items():
            self._running[name] = tasks.create_task(reader.run())

    def add(self, source: SourceConfig, cluster: Cluster) -> None:
        """A further source; its partitions come with the next rebalance."""
        reader = self._readers[source.cluster] = SourceReader(
            source,
            cluster,
            self._config.fetch,
            self._budget,
            self._config.discovery_interval_ms,
            self._now_ms,
            self._on_view,
            self._record_start,
        )
        if self._tasks is not None:
            self._running[source.cluster] = self._tasks.create_task(reader.run())

    async def remove(self, name: str) -> None:
        """Ends its reading and closes its connections."""
        reader = self._readers.pop(name)
        reader.has_looked.set()  # or who waits for that would for ever
        if (task := self._running.pop(name, None)) is not None:
            task.cancel()
            await asyncio.wait([task])
        await reader.cluster.close()

    def take_config(self, config: MirrorConfig) -> None:
        """Settings that were read again; sources that come or go by them are added and removed apart."""
        self._config = config
        for name, reader in self._readers.items():
            if (source := config.source(name)) is not None:
                if source.security != reader.config.security:
                    reader.cluster.take_security(source.security)
                reader.reconfigure(source, config.fetch, config.discovery_interval_ms)
