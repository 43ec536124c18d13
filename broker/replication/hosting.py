"""The replicas that this broker hosts: which partitions have one here, and what each is in its partition.

Called by `server/local_replicas.py` with what the cluster has decided about a topic (`apply_topic`,
`remove_topic`, `drop_partition`). Opens, makes and deletes their logs, gives each replica its role, starts
and stops its fetching, and takes out of service what lies on a disk that has failed. `replica_manager.py`
appends to and reads from `partitions`.

Invariants: all on the event loop but for the work on disks, and a partition's role changes only while its
`turn` is held; a partition that is no longer in `partitions` is neither served nor fetched; a topic that was
made anew never gets the log of its predecessor; who is in sync is never given an empty log.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import structlog

from millrace.broker.errors import KafkaError, KafkaStorageError, NotLeaderOrFollower
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.high_watermarks import HighWatermarkCheckpoints
from millrace.broker.replication.leading import Leading
from millrace.broker.replication.local_partition import LocalPartition
from millrace.broker.replication.off_loop import Turns
from millrace.broker.replication.partition import PartitionState, Replica, Role, Transition, leads_on
from millrace.broker.replication.replica_fetcher import ReplicaFetchers
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry import garbage

log = structlog.get_logger("millrace.broker")

LONGEST = 2**63 - 1

AT_ONCE = 200
"""Partitions that are brought here in one go, where their logs are there already."""
OBJECTS_OF_PARTITION = 75
"""About; those that the garbage collector looks at."""


@dataclass(slots=True)
class LeadershipListeners:
    """Who must know when this broker begins or ceases to lead a partition, and when replicas here can no
    longer be used (`ReplicaManager.offline_partitions` says which)."""

    gained: list[Callable[[str, int], None]] = field(default_factory=list)
    lost: list[Callable[[str, int], None]] = field(default_factory=list)
    offline: list[Callable[[], None]] = field(default_factory=list)


def _of_log(config: LogConfig) -> LogConfig:
    """`flush.messages` is kept from the log itself: it would flush on the event loop."""
    return replace(config, flush_messages=LONGEST)


class HostedPartitions:
    """See the module. `on_disk` runs work that may wait for a disk on a thread."""

    def __init__(
        self,
        broker_id: int,
        logs: LogManager,
        log_defaults: LogConfig,
        checkpoints: HighWatermarkCheckpoints,
        leading: Leading,
        listeners: LeadershipListeners,
        *,
        on_disk: Callable[..., Awaitable[Any]],
        clock_ms: Callable[[], int],
        steady_ms: Callable[[], int],
        max_lag_ms: int,
    ) -> None:
        self.partitions: dict[TopicPartition, LocalPartition] = {}
        """This very mapping for as long as the broker runs: appends and reads look partitions up in it."""
        self._broker_id = broker_id
        self._logs = logs
        self._log_defaults = log_defaults
        self._checkpoints = checkpoints
        self._leading = leading
        self._listeners = listeners
        self._on_disk = on_disk
        self._clock_ms = clock_ms
        self._steady_ms = steady_ms
        self._max_lag_ms = max_lag_ms
        self._numbers: dict[str, set[int]] = {}
        self._unusable: dict[str, str] = {}
        """Topics with settings that cannot be used, and why; said once."""
        self._fetchers: ReplicaFetchers | None = None
        self._registered: Mapping[int, int] | None = None

    def join(self, fetchers: ReplicaFetchers, registered: Mapping[int, int]) -> None:
        """Take part in a cluster: replicas that follow are fetched, leaders know which brokers are registered
        (broker id -> epoch, kept up to date by its owner), and disks that fail are heard of. On the loop."""
        loop = asyncio.get_running_loop()
        self._fetchers = fetchers
        self._registered = registered

        def on_folder_failure(folder: Path, reason: str, partitions: list[TopicPartition]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._take_offline, folder, reason, partitions)

        def on_log_failure(key: TopicPartition, reason: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._take_log_offline, key, reason)

        self._logs.on_folder_failure = on_folder_failure
        self._logs.on_log_failure = on_log_failure

    def set_log_defaults(self, defaults: LogConfig) -> None:
        """For the topics that are applied from now on."""
        self._log_defaults = defaults

    async def apply_topic(
        self,
        topic: str,
        topic_id: uuid.UUID,
        states: Mapping[int, PartitionState],
        topic_config: Mapping[str, str],
        replicas: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Take in what the cluster decided about this broker's replicas of a topic.

        `states` has the partitions whose replicas include this broker and that have a leader or had one.
        `replicas` has their assignment; without it the in-sync sets stand for the replicas.
        """
        config = self._config_of(topic, topic_config)
        left, turns = iter(states.items()), Turns()
        while part := dict(islice(left, AT_ONCE)):
            await self._apply_part(topic, topic_id, part, config, replicas or {}, turns)

    async def _apply_part(
        self,
        topic: str,
        topic_id: uuid.UUID,
        states: Mapping[int, PartitionState],
        config: LogConfig,
        replicas: Mapping[int, tuple[int, ...]],
        turns: Turns,
    ) -> None:
        missing: dict[TopicPartition, bool] = {}
        for partition, state in states.items():
            local = self.partitions.get((topic, partition))
            if local is not None and local.topic_id != topic_id:
                await self._drop(local)
                local = None
            if local is None:
                # Whoever is in sync from an earlier epoch has had records; an empty log would be a loss.
                missing[topic, partition] = state.leader_epoch == 0 or self._broker_id not in state.isr
        if missing:
            made_count = await self._open(topic_id, config, missing)
            garbage.keep(OBJECTS_OF_PARTITION * made_count)
        log_config = _of_log(config)
        for partition, state in states.items():
            await turns.maybe()
            local = self.partitions.get((topic, partition))
            if local is None:
                continue
            local.flush_messages = config.flush_messages
            local.log.config = log_config
            local.replica.min_insync_replicas = config.min_insync_replicas
            async with local.turn:
                if self.partitions.get(local.key) is local:
                    self._apply_state(local, state, replicas.get(partition, ()))

    def _config_of(self, topic: str, topic_config: Mapping[str, str]) -> LogConfig:
        config, unusable = LogConfig.usable_part(topic_config, self._log_defaults)
        reason = "; ".join(unusable.values())
        if reason and self._unusable.get(topic) != reason:
            log.error(
                "a topic's settings cannot be used: nothing of it is deleted or compacted until they can",
                topic=topic,
                error=reason,
            )
        if reason:
            self._unusable[topic] = reason
        elif self._unusable.pop(topic, None) is not None:
            log.info("the settings of a topic can be used again", topic=topic)
        return config

    def partitions_of(self, topic: str) -> list[int]:
        """Numbers of the topic's partitions that have a replica here."""
        return sorted(self._numbers.get(topic, ()))

    async def drop_partition(self, topic: str, partition: int) -> None:
        """The replica is kept elsewhere now: stop serving and fetching it, and delete its log."""
        local = self.partitions.get((topic, partition))
        if local is not None:
            await self._drop(local)

    def _apply_state(self, local: LocalPartition, state: PartitionState, replicas: tuple[int, ...]) -> None:
        led, led_epoch = local.replica.role is Role.LEADER, local.replica.leader_epoch
        match local.replica.apply(state, local.log.end_offset, replicas, self._steady_ms()):
            case Transition.LEAD:
                self._lead(local, led=led, led_epoch=led_epoch)
            case Transition.FOLLOW:
                self._follow(local, led=led)
            case Transition.CONTINUE:
                self._leading.in_sync_set_changed(local)
                return
            case Transition.IGNORE:
                return
        self._leading.waiting_fetches.disturbed(local.key)
        self._leading.waiting_followers.disturbed(local.key)

    def _lead(self, local: LocalPartition, *, led: bool, led_epoch: int) -> None:
        replica = local.replica
        if self._fetchers is not None:
            self._fetchers.forget(local.key)
        local.log.begin_epoch(replica.leader_epoch)
        local.begin_to_lead()
        self._leading.advance(local)
        log.debug("leading", topic=local.topic, partition=local.partition, epoch=replica.leader_epoch)
        if led and leads_on(led_epoch, replica.leader_epoch):
            return  # a new epoch of one's own leadership is no news to a coordinator
        if led:
            log.info("leading again", topic=local.topic, partition=local.partition)
            for lost in self._listeners.lost:
                lost(*local.key)
        for gained in self._listeners.gained:
            gained(*local.key)

    def _follow(self, local: LocalPartition, *, led: bool) -> None:
        local.log.forget_empty_epochs()
        if led:
            log.info("no longer leading", topic=local.topic, partition=local.partition)
            self._resign(local, NotLeaderOrFollower("another broker leads this partition now"))
        if self._fetchers is not None:
            self._fetchers.follow(local)

    def _resign(self, local: LocalPartition, error: KafkaError) -> None:
        self._leading.resigned(local, error)
        for lost in self._listeners.lost:
            lost(*local.key)

    async def _open(
        self, topic_id: uuid.UUID, config: LogConfig, missing: Mapping[TopicPartition, bool]
    ) -> int:
        """Bring partitions of one topic here, with logs made where they are missing (and whether each is
        new); what cannot be had is offline. How many there are more."""
        made_count = 0
        log_config = _of_log(config)
        create = partial(
            self._logs.create_all, missing, log_config, now_ms=self._clock_ms(), topic_id=topic_id
        )
        found: Mapping[TopicPartition, Log | KafkaStorageError] = await self._on_disk(create)
        for key, opened in found.items():
            if isinstance(opened, Log) and opened.failure is not None:
                # Meanwhile, when there was no partition yet to be taken out of service (`_take_log_offline`).
                opened = KafkaStorageError(opened.failure)
            if isinstance(opened, KafkaStorageError):
                log.error("a partition is offline", topic=key[0], partition=key[1], reason=str(opened))
                self._tell_offline()
                continue
            # A log that the start has opened has the defaults; retention looks at every log that is hosted.
            opened.config = log_config
            replica = Replica(
                self._broker_id,
                min_insync_replicas=config.min_insync_replicas,
                max_lag_ms=self._max_lag_ms,
                registered=self._registered,
            )
            known = self._checkpoints.get(opened.directory.parent, key)
            replica.high_watermark = min(max(known, opened.start_offset), opened.end_offset)
            local = LocalPartition(*key, topic_id, opened, replica, config.flush_messages)
            self.partitions[key] = local
            self._numbers.setdefault(key[0], set()).add(key[1])
            made_count += 1
        return made_count

    async def remove_topic(self, topic: str) -> None:
        """The topic was deleted: stop serving its partitions and delete their logs."""
        self._unusable.pop(topic, None)
        for number in self.partitions_of(topic):
            await self.drop_partition(topic, number)
        # Also what could not be opened: its folder would keep a new topic of this name offline.
        for key in [key for key in self._logs.offline if key[0] == topic]:
            await self._delete_log(key)

    async def _drop(self, local: LocalPartition) -> None:
        async with local.turn:
            self._let_go(local, NotLeaderOrFollower("this broker keeps no replica of the partition any more"))
        await self._delete_log(local.key)

    def _let_go(self, local: LocalPartition, error: KafkaError) -> None:
        """Serve the partition no more, and fetch it no more."""
        if self.partitions.get(local.key) is not local:
            return
        del self.partitions[local.key]
        self._numbers[local.topic].discard(local.partition)
        if not self._numbers[local.topic]:
            del self._numbers[local.topic]
        if self._fetchers is not None:
            self._fetchers.forget(local.key)
        led = local.replica.role is Role.LEADER
        local.replica.let_go()
        if led:
            self._resign(local, error)
        self._leading.waiting_fetches.disturbed(local.key)
        self._leading.waiting_followers.disturbed(local.key)

    def _take_offline(self, folder: Path, reason: str, partitions: Collection[TopicPartition]) -> None:
        """A data folder cannot be trusted any more: what was in it is not served from here."""
        log.error("a data folder is offline", folder=str(folder), reason=reason, partitions=len(partitions))
        for key in partitions:
            local = self.partitions.get(key)
            if local is not None and local.log.directory.parent == folder:
                self._let_go(local, KafkaStorageError(f"the data folder of {local} is offline"))
        self._tell_offline()

    def _take_log_offline(self, key: TopicPartition, reason: str) -> None:
        """A log failed alone: it is not served from here, and the controller is to hear of it."""
        log.error("a log failed, its partition is offline", topic=key[0], partition=key[1], reason=reason)
        local = self.partitions.get(key)
        if local is not None and local.log.failure is not None:
            self._let_go(local, KafkaStorageError(f"the log of {local} is offline"))
        self._tell_offline()

    def _tell_offline(self) -> None:
        for offline in self._listeners.offline:
            offline()

    async def _delete_log(self, key: TopicPartition) -> None:
        try:
            await self._on_disk(self._logs.delete, key)
        except KafkaStorageError as error:
            log.error("a log stays on the disk", topic=key[0], partition=key[1], error=str(error))
