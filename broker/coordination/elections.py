"""Asks the controller to elect leaders (KIP-460): the preferred ones, or any live one at the price of data.

The request is a znode that the controller carries out and deletes; a request that comes while another is
pending is merged into it. What can be answered from this broker's picture of the cluster is answered at once.
Called by the ElectLeaders handler; any broker takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from millrace.broker.coordination import paths
from millrace.broker.coordination.cluster_watcher import ELECTION_PATHS
from millrace.broker.coordination.controller import PREFERRED
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.coordination.session import (
    NodeExists,
    NodeMissing,
    Session,
    SessionError,
    VersionConflict,
)
from millrace.broker.errors import (
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    KafkaError,
    PreferredLeaderNotAvailable,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.topic_partition import TopicPartition

SETTLING_MS = 1_000
"""How long the outcome may take to arrive here once the controller has dealt with a request."""


class Elections:
    """`elect` answers for each partition what kept it from getting its leader, None where it has it."""

    def __init__(self, session: Session, cache: MetadataCache) -> None:
        self._session = session
        self._cache = cache

    async def elect(
        self, kind: str, partitions: Iterable[TopicPartition], timeout_ms: float
    ) -> dict[TopicPartition, KafkaError | None]:
        """`kind` is `controller.PREFERRED` or `controller.UNCLEAN`."""
        results: dict[TopicPartition, KafkaError | None] = {}
        asked: set[TopicPartition] = set()
        for key in partitions:
            results[key] = self._refusal(kind, key)
            if results[key] is None:
                asked.add(key)
        if not asked:
            return results
        deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        try:
            await self._ask(kind, asked)
        except SessionError as error:
            failure = RequestTimedOut(f"ZooKeeper did not take the request: {error}")
            return results | dict.fromkeys(asked, failure)

        def left() -> float:
            return (deadline - asyncio.get_running_loop().time()) * 1000

        def elected() -> bool:
            return all(self._is_elected(kind, key) for key in asked)

        dealt_with = self._dealt_with(kind, asked)
        await self._cache.changed(lambda: elected() or dealt_with(), left())
        timed_out = not dealt_with() and not elected()
        await self._cache.changed(elected, min(SETTLING_MS, left()))
        for key in asked:
            if not self._is_elected(kind, key):
                results[key] = (
                    RequestTimedOut(f"no leader was elected for {key[0]}-{key[1]} in time")
                    if timed_out
                    else self._refusal(kind, key)
                )
        return results

    def _dealt_with(self, kind: str, asked: set[TopicPartition]) -> Callable[[], bool]:
        """Whether the request has been seen here and has gone since."""
        seen = False

        def gone() -> bool:
            nonlocal seen
            pending = self._cache.elections.get(kind)
            stands = pending is not None and bool(asked & pending.partitions)
            seen = seen or stands
            return seen and not stands

        return gone

    def _refusal(self, kind: str, key: TopicPartition) -> KafkaError | None:
        """Why there is nothing to elect, or nobody."""
        partition = self._cache.partition(*key)
        if partition is None or key[0] in self._cache.deleting:
            return UnknownTopicOrPartition(f"there is no partition {key[1]} of a topic {key[0]}")
        if self._is_elected(kind, key):
            return ElectionNotNeeded(f"{key[0]}-{key[1]} has the leader it should have")
        if kind == PREFERRED:
            if not self._may_lead(partition, partition.replicas[0], key):
                return PreferredLeaderNotAvailable(
                    f"broker {partition.replicas[0]}, the preferred leader of {key[0]}-{key[1]}, is not "
                    "alive or not in sync"
                )
        elif not any(self._cache.is_alive(broker, *key) for broker in partition.replicas):
            return EligibleLeadersNotAvailable(f"no replica of {key[0]}-{key[1]} is alive")
        return None

    def _may_lead(self, partition: PartitionInfo, broker: int, key: TopicPartition) -> bool:
        in_sync = partition.state is None or broker in partition.state.isr
        return in_sync and self._cache.is_alive(broker, *key) and not self._cache.brokers[broker].leaving

    def _is_elected(self, kind: str, key: TopicPartition) -> bool:
        partition = self._cache.partition(*key)
        if partition is None:
            return False
        if kind == PREFERRED:
            return partition.leader == partition.replicas[0]
        return self._cache.is_alive(partition.leader, *key)

    async def _ask(self, kind: str, asked: set[TopicPartition]) -> None:
        path = ELECTION_PATHS[kind]
        while True:
            try:
                await self._session.create(path, paths.encode_partitions(asked))
                return
            except NodeExists:
                pass
            try:
                node = await self._session.get(path)
                together = asked | paths.decode_partitions(node.data)
                await self._session.set(path, paths.encode_partitions(together), node.version)
                return
            except (NodeMissing, VersionConflict):
                continue
