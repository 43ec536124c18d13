"""What this broker knows of its cluster: live brokers, topics, leaders, settings. A picture in memory.

`cluster_watcher.py` keeps it true to ZooKeeper; Metadata, the controller and every handler that resolves
a topic read it. Reads never wait. `changed` lets a handler wait until the picture shows what it asked for
(a topic created, a leader elected). All use is on the event loop.

Invariants: `topic_names` is the inverse of the topics' ids; a partition's state never goes back to an
older leader epoch while its topic id stays the same.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.coordination.paths import DEFAULT_BROKER, BrokerRegistration, TopicAssignment
from millrace.broker.protocol.system_topics import INTERNAL_TOPICS
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.partition import NO_LEADER, PartitionState

NO_TOPIC_ID = uuid.UUID(int=0)
NO_CONTROLLER = -1


@dataclass(frozen=True, slots=True)
class Election:
    """Partitions for which someone asked for an election, and the version of the znode that says so."""

    partitions: frozenset[TopicPartition]
    version: int


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """One topic. `config` holds only what was set for this topic."""

    name: str
    topic_id: uuid.UUID
    partitions: Mapping[int, PartitionInfo]
    config: Mapping[str, str] = field(default_factory=dict)
    version: int = -1
    """The topic's znode version, which a change of its replicas must match."""

    @property
    def internal(self) -> bool:
        return self.name in INTERNAL_TOPICS


def _is_news(known: PartitionInfo, state: PartitionState, version: int) -> bool:
    return known.state is None or (
        state.leader_epoch >= known.state.leader_epoch and version >= known.state_version
    )


def _placed(
    known: PartitionInfo | None, replicas: tuple[int, ...], adding: tuple[int, ...], removing: tuple[int, ...]
) -> PartitionInfo:
    if known is None:
        return PartitionInfo(replicas, adding=adding, removing=removing)
    return replace(known, replicas=replicas, adding=adding, removing=removing)


def takers_of_replicas(brokers: Mapping[int, BrokerRegistration]) -> list[int]:
    """Ids of the brokers that new replicas are placed on: one that is about to end only where there is no
    other."""
    return sorted(broker for broker in brokers if not brokers[broker].leaving) or sorted(brokers)


class MetadataCache:
    """The picture, and who waits for it to change."""

    def __init__(self) -> None:
        self.cluster_id = ""
        self.controller_id = NO_CONTROLLER
        self.brokers: dict[int, BrokerRegistration] = {}
        self.topics: dict[str, TopicInfo] = {}
        self.topic_names: dict[uuid.UUID, str] = {}
        self.deleting: frozenset[str] = frozenset()
        self.offline: dict[int, frozenset[TopicPartition]] = {}
        self.broker_configs: dict[str, dict[str, str]] = {}
        self.elections: dict[str, Election] = {}
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def topic(self, name: str) -> TopicInfo | None:
        return self.topics.get(name)

    def partition(self, topic: str, partition: int) -> PartitionInfo | None:
        info = self.topics.get(topic)
        return None if info is None else info.partitions.get(partition)

    def leader_of(self, topic: str | uuid.UUID, partition: int) -> tuple[int, int] | None:
        """(broker id, leader epoch), for clients that ask the wrong broker; None where nobody leads."""
        name = self.name_of(topic) if isinstance(topic, uuid.UUID) else topic
        info = None if name is None else self.partition(name, partition)
        return None if info is None or info.leader == NO_LEADER else (info.leader, info.leader_epoch)

    def name_of(self, topic_id: uuid.UUID) -> str | None:
        return self.topic_names.get(topic_id)

    def is_alive(self, broker_id: int, topic: str, partition: int) -> bool:
        """Whether the broker runs and its disk still has this replica."""
        return broker_id in self.brokers and (topic, partition) not in self.offline.get(
            broker_id, frozenset()
        )

    def broker_config(self, broker_id: int) -> dict[str, str]:
        """Settings of a broker that were changed while it runs: its own over those of all brokers."""
        return {
            **self.broker_configs.get(DEFAULT_BROKER, {}),
            **self.broker_configs.get(str(broker_id), {}),
        }

    def set_assignment(self, name: str, assignment: TopicAssignment, version: int = -1) -> None:
        """A topic as its znode says. Another id is another topic: nothing of the old one stays."""
        old = self.topics.get(name)
        if old is not None and old.topic_id != assignment.topic_id:
            self.remove_topic(name)
            old = None
        known = old.partitions if old is not None else {}
        partitions = {
            number: _placed(
                known.get(number),
                replicas,
                assignment.adding.get(number, ()),
                assignment.removing.get(number, ()),
            )
            for number, replicas in sorted(assignment.partitions.items())
        }
        config = old.config if old is not None else {}
        self.topics[name] = TopicInfo(name, assignment.topic_id, partitions, config, version)
        if assignment.topic_id != NO_TOPIC_ID:
            self.topic_names[assignment.topic_id] = name

    def set_state(self, topic: str, partition: int, state: PartitionState, version: int) -> bool:
        """Take in what the controller wrote; False when it is old news."""
        return self.set_states(topic, {partition: (state, version)})

    def set_states(self, topic: str, states: Mapping[int, tuple[PartitionState, int]]) -> bool:
        """As `set_state`, of several partitions: (state, version) by number; False when all are old news."""
        info = self.topics.get(topic)
        if info is None:
            return False
        new: dict[int, PartitionInfo] = {}
        for partition, (state, version) in states.items():
            known = info.partitions.get(partition)
            if known is not None and _is_news(known, state, version):
                new[partition] = replace(
                    known, state=replace(state, version=version), state_version=version, is_unreadable=False
                )
        if not new:
            return False
        self.topics[topic] = replace(info, partitions={**info.partitions, **new})
        return True

    def set_unreadable(self, topic: str, partition: int, is_unreadable: bool) -> None:
        """Whether what stands in the state's znode cannot be understood."""
        info = self.topics.get(topic)
        known = None if info is None else info.partitions.get(partition)
        if info is not None and known is not None and known.is_unreadable != is_unreadable:
            partitions = {**info.partitions, partition: replace(known, is_unreadable=is_unreadable)}
            self.topics[topic] = replace(info, partitions=partitions)

    def set_config(self, topic: str, config: Mapping[str, str]) -> None:
        info = self.topics.get(topic)
        if info is not None:
            self.topics[topic] = replace(info, config=dict(config))

    def remove_topic(self, name: str) -> None:
        info = self.topics.pop(name, None)
        if info is not None:
            self.topic_names.pop(info.topic_id, None)

    def set_broker(self, registration: BrokerRegistration) -> bool:
        """A broker as it registered itself; False when that is known. In the order of their ids."""
        if self.brokers.get(registration.broker_id) == registration:
            return False
        known = {**self.brokers, registration.broker_id: registration}
        self.brokers = dict(sorted(known.items()))
        return True

    def remove_broker(self, broker_id: int) -> bool:
        """A broker that is not registered any more; False when it was not known."""
        if broker_id not in self.brokers:
            return False
        self.brokers = {known: each for known, each in self.brokers.items() if known != broker_id}
        return True

    async def changed(self, until: Callable[[], bool], timeout_ms: float) -> bool:
        """Wait until `until()` holds; False when `timeout_ms` passed first."""
        if until():
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (until, future)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(max(timeout_ms, 0) / 1000):
                await future
        except TimeoutError:
            return until()
        finally:
            self._waiters.remove(waiter)
        return True

    def announce(self) -> None:
        """Called by the watcher after each round of changes."""
        for until, future in self._waiters:
            if not future.done() and until():
                future.set_result(None)
