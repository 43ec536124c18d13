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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.replication.partition import NO_LEADER, PartitionState

NO_TOPIC_ID = uuid.UUID(int=0)
NO_CONTROLLER = -1
INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state"})


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """One partition. `state` is None until the controller has chosen a leader for the first time."""

    replicas: tuple[int, ...]
    state: PartitionState | None = None
    state_version: int = -1
    """The znode's version, which the controller's next write must match."""

    @property
    def leader(self) -> int:
        return NO_LEADER if self.state is None else self.state.leader

    @property
    def leader_epoch(self) -> int:
        return -1 if self.state is None else self.state.leader_epoch


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """One topic. `config` holds only what was set for this topic."""

    name: str
    topic_id: uuid.UUID
    partitions: Mapping[int, PartitionInfo]
    config: Mapping[str, str] = field(default_factory=dict)

    @property
    def internal(self) -> bool:
        return self.name in INTERNAL_TOPICS


class MetadataCache:
    """The picture, and who waits for it to change."""

    def __init__(self) -> None:
        self.cluster_id = ""
        self.controller_id = NO_CONTROLLER
        self.brokers: dict[int, BrokerRegistration] = {}
        self.topics: dict[str, TopicInfo] = {}
        self.topic_names: dict[uuid.UUID, str] = {}
        self.deleting: frozenset[str] = frozenset()
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def topic(self, name: str) -> TopicInfo | None:
        return self.topics.get(name)

    def partition(self, topic: str, partition: int) -> PartitionInfo | None:
        info = self.topics.get(topic)
        return None if info is None else info.partitions.get(partition)

    def name_of(self, topic_id: uuid.UUID) -> str | None:
        return self.topic_names.get(topic_id)

    def set_assignment(self, name: str, assignment: TopicAssignment) -> None:
        """A topic as its znode says. Another id is another topic: nothing of the old one stays."""
        old = self.topics.get(name)
        if old is not None and old.topic_id != assignment.topic_id:
            self.remove_topic(name)
            old = None
        known = old.partitions if old is not None else {}
        partitions = {
            number: replace(known.get(number, PartitionInfo(())), replicas=replicas)
            for number, replicas in sorted(assignment.partitions.items())
        }
        config = old.config if old is not None else {}
        self.topics[name] = TopicInfo(name, assignment.topic_id, partitions, config)
        if assignment.topic_id != NO_TOPIC_ID:
            self.topic_names[assignment.topic_id] = name

    def set_state(self, topic: str, partition: int, state: PartitionState, version: int) -> bool:
        """Take in what the controller wrote; False when it is old news."""
        info = self.topics.get(topic)
        known = None if info is None else info.partitions.get(partition)
        if info is None or known is None:
            return False
        if known.state is not None and state.leader_epoch < known.state.leader_epoch:
            return False
        partitions = dict(info.partitions)
        partitions[partition] = replace(known, state=state, state_version=version)
        self.topics[topic] = replace(info, partitions=partitions)
        return True

    def set_config(self, topic: str, config: Mapping[str, str]) -> None:
        info = self.topics.get(topic)
        if info is not None:
            self.topics[topic] = replace(info, config=dict(config))

    def remove_topic(self, name: str) -> None:
        info = self.topics.pop(name, None)
        if info is not None:
            self.topic_names.pop(info.topic_id, None)

    def set_brokers(self, registrations: Iterable[BrokerRegistration]) -> None:
        self.brokers = {registration.broker_id: registration for registration in registrations}

    async def changed(self, until: Callable[[], bool], timeout_ms: float) -> bool:
        """Wait until `until()` holds; False when `timeout_ms` passed first."""
        if until():
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (until, future)
        self._waiters.append(waiter)
        try:
            await asyncio.wait_for(future, max(timeout_ms, 0) / 1000)
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
