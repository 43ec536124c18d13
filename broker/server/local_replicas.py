"""Keeps this broker's replicas in line with what the cluster has decided, one topic after the other.

`changed` is told of every round of changes that the cluster watcher has read; `follow` applies them. At the
start everything is applied once before the broker registers, and logs that nobody wants here are set
aside. What this broker cannot open is reported to the controller; what could not be made for now, on a disk
without room, is tried again. Called by `server/broker.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import structlog

from millrace.broker.coordination.cluster_watcher import ClusterChanges
from millrace.broker.coordination.dynamic_configs import replication_throttle
from millrace.broker.coordination.metadata_cache import MetadataCache, TopicInfo
from millrace.broker.coordination.offline_replicas import OfflineReporter
from millrace.broker.coordination.paths import topic_path
from millrace.broker.coordination.session import Session
from millrace.broker.errors import KafkaStorageError
from millrace.broker.protocol.throttle_settings import OF_FOLLOWER, OF_LEADER
from millrace.broker.replication.partition import PartitionState
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager

log = structlog.get_logger("millrace.broker")

NOT_REGISTERED = -1

LOGS_MADE_AT_ONCE = 16
"""Of one topic, before others have their turn: making one waits for the disk."""

FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
"""Each time that something is still missing, twice as long is waited."""


class LocalReplicas:
    """What of the cluster's picture is to be applied here, and what of it is missing."""

    def __init__(
        self,
        broker_id: int,
        session: Session,
        cache: MetadataCache,
        replicas: ReplicaManager,
        logs: LogManager,
    ) -> None:
        self._broker_id = broker_id
        self._session = session
        self._cache = cache
        self._replicas = replicas
        self._logs = logs
        self._reporter = OfflineReporter(session, broker_id)
        self._to_apply: dict[str, None] = {}
        self._being_applied: str | None = None
        self._to_make: dict[str, Sequence[int]] = {}
        """Of topics that have been applied else: the logs that have still to be made."""
        self._wake = asyncio.Event()
        self._unmade: set[str] = set()
        """Topics some of whose logs could not be made, and are not given up as offline."""
        self._pause_seconds = FIRST_RETRY_SECONDS
        self._again_at: float | None = None

    def changed(self, changes: ClusterChanges) -> None:
        """Note what is to be applied; brokers and throttles count at once."""
        for topic in (*changes.removed_topics, *changes.topics):
            self._to_apply[topic] = None
        self._wake.set()
        if changes.brokers:
            brokers = self._cache.brokers
            own = brokers.get(self._broker_id)
            self._replicas.set_brokers(
                {each.broker_id: each.epoch for each in brokers.values() if not each.leaving},
                own_epoch=NOT_REGISTERED if own is None else own.epoch,
            )
        if changes.broker_configs or changes.topics:
            fetched, given = (
                replication_throttle(self._cache, self._broker_id, each) for each in (OF_FOLLOWER, OF_LEADER)
            )
            self._replicas.set_replication_throttle(*fetched)
            self._replicas.set_leader_throttle(*given)

    def set_log_defaults(self, defaults: LogConfig) -> None:
        """What topics do not set themselves: all of them are applied anew."""
        if defaults == self._replicas.log_defaults:
            return
        self._replicas.set_log_defaults(defaults)
        for topic in self._cache.topics:
            self._to_apply[topic] = None
        self._wake.set()

    async def follow(self) -> None:
        """Apply what changes, for ever, and again what is missing."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._when_again()):
                    await self._wake.wait()
            self._wake.clear()
            if self._again_at is not None and asyncio.get_running_loop().time() >= self._again_at:
                self._again_at = None
                self._to_apply |= dict.fromkeys(sorted(self._unmade))
            await self.apply()

    def _when_again(self) -> float | None:
        """By the loop's clock, when what is missing is due."""
        if not self._unmade:
            self._pause_seconds, self._again_at = FIRST_RETRY_SECONDS, None
        elif self._again_at is None:
            self._again_at = asyncio.get_running_loop().time() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, LONGEST_RETRY_SECONDS)
        return self._again_at

    async def apply(self) -> None:
        """Apply what has changed up to now."""
        while self._to_apply or self._to_make:
            # By turns: neither changes nor what has to be made wait for the end of the other.
            for topic in tuple(self._to_apply):
                self._being_applied = topic
                del self._to_apply[topic]
                await self._apply_topic(topic)
                await self._end_turn()
            for topic in tuple(self._to_make):
                self._being_applied = topic
                await self._make_logs(topic, self._to_make.pop(topic))
                await self._end_turn()

    async def _end_turn(self) -> None:
        """Of one topic; after a reconnect this is every topic, and clients wait meanwhile."""
        self._being_applied = None
        self._cache.announce()
        await asyncio.sleep(0)

    def is_applied(self, topic: str) -> bool:
        """Whether the local replicas of a topic are as the picture of the cluster shows them."""
        return topic != self._being_applied and topic not in self._to_apply and topic not in self._to_make

    async def _apply_topic(self, topic: str) -> None:
        """All of it, and the first of the logs that have to be made: that takes the disk's time, and other
        topics' leaders do not wait for it."""
        self._unmade.discard(topic)
        self._to_make.pop(topic, None)
        info = self._cache.topic(topic)
        if info is None:
            await self._replicas.hosted.remove_topic(topic)
            return
        states = self._states_here(info, info.partitions)
        present = set(self._replicas.hosted.partitions_of(topic))
        # Logs that the start has opened only change hands. What cannot be opened comes last: whenever the
        # topic changes while its logs are made, it would be tried first again.
        missing = sorted(
            (
                number
                for number in states
                if number not in present and self._logs.get((topic, number)) is None
            ),
            key=lambda number: (topic, number) in self._logs.offline,
        )
        later = missing[LOGS_MADE_AT_ONCE:]
        for number in later:
            del states[number]
        if later:
            keys = [(topic, number) for number in missing]
            await self._replicas.on_disk(self._logs.announce, keys, info.topic_id)
        await self._apply_states(info, states)
        for number in self._replicas.hosted.partitions_of(topic):
            if not self._keeps(topic, number):  # by now
                log.info("a replica that is kept elsewhere now is removed", topic=topic, partition=number)
                await self._replicas.hosted.drop_partition(topic, number)
        if later:
            self._to_make[topic] = later

    async def _make_logs(self, topic: str, numbers: Sequence[int]) -> None:
        """Some more of the logs of a topic. Each is tried once: what cannot be opened holds up nothing."""
        info = self._cache.topic(topic)
        if info is None:
            return  # it is to be removed
        await self._apply_states(info, self._states_here(info, numbers[:LOGS_MADE_AT_ONCE]))
        if later := numbers[LOGS_MADE_AT_ONCE:]:
            self._to_make[topic] = later

    def _states_here(self, info: TopicInfo, numbers: Iterable[int]) -> dict[int, PartitionState]:
        """Those that have been decided for replicas of this broker."""
        found = {}
        for number in numbers:
            part = info.partitions.get(number)
            if part is not None and part.state is not None and self._broker_id in part.replicas:
                found[number] = part.state
        return found

    async def _apply_states(self, info: TopicInfo, states: Mapping[int, PartitionState]) -> None:
        topic, hosted = info.name, self._replicas.hosted
        assigned = {number: info.partitions[number].replicas for number in states}
        await hosted.apply_topic(topic, info.topic_id, states, info.config, assigned)
        missing = ((topic, number) for number in states if (topic, number) not in hosted.partitions)
        if any(key not in self._logs.offline for key in missing):
            self._unmade.add(topic)

    async def set_strays_aside(self) -> None:
        """Take logs out of service that nobody wants here: their topics were deleted or moved to others while
        this broker was down, or ZooKeeper is of an earlier time than they. As in Apache Kafka nothing of them
        is removed: that nobody speaks of them is no word of anyone that they may go."""
        for topic, number in sorted(self._logs.logs()):
            if self._keeps(topic, number):
                continue
            if self._cache.topic(topic) is not None:
                reason = "the cluster keeps it elsewhere"
            # Not in the picture may also mean not understood.
            elif await self._session.exists(topic_path(topic)):
                continue
            else:
                reason = "the cluster has no such topic"
            try:
                await self._replicas.on_disk(self._logs.set_aside, (topic, number), reason)
            except KafkaStorageError as error:
                log.error("a stray log stays where it is", topic=topic, partition=number, error=str(error))

    async def report_offline(self, *, anew: bool = False) -> None:
        """Tell the controller which replicas it cannot count on; `anew` after the session was another."""
        if anew:
            self._reporter.forget()
        offline = {
            topic: [number for number in numbers if self._keeps(topic, number)]
            for topic, numbers in self._replicas.offline_partitions().items()
        }
        await self._reporter.report(offline)

    def _keeps(self, topic: str, number: int) -> bool:
        """Whether the cluster wants a replica of the partition here."""
        part = self._cache.partition(topic, number)
        return part is not None and self._broker_id in part.replicas
