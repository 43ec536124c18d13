"""Asks for changes of the cluster: topics made, widened, deleted, their settings altered.

A change is a write to ZooKeeper; the controller, wherever it is, sees it and does the rest (leaders,
removal), so any broker may take such a request. A topic and its settings come into being in one transaction,
and a change of either holds only while no topic was removed since it was read: what was meant for a topic
never reaches one that was made anew under its name. Every method waits until this broker's picture shows the
result, or the caller's timeout has passed. Called by the admin handlers, by Metadata (auto-creation) and by
FindCoordinator (the offsets topic). Expected refusals are raised as KafkaErrors.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.assignment import assign_replicas
from millrace.broker.coordination.dynamic_configs import check_dynamic
from millrace.broker.coordination.metadata_cache import MetadataCache, TopicInfo, takers_of_replicas
from millrace.broker.coordination.paths import TopicAssignment
from millrace.broker.coordination.session import (
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    Operation,
    RequestTooLarge,
    Session,
    SessionError,
    SetData,
    VersionConflict,
)
from millrace.broker.errors import (
    CoordinatorNotAvailable,
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidTopic,
    RequestTimedOut,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from millrace.broker.replication.partition import NO_LEADER
from millrace.broker.storage.log_config import UNREADABLE
from millrace.broker.wording import count_of

log = structlog.get_logger("millrace.broker")

_LEGAL_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")

MOST_PARTITIONS = 100_000
"""Far above what one broker can hold; keeps a mistyped number from filling ZooKeeper."""

LARGEST_ZNODE = 1_000_000
"""ZooKeeper closes the connection on a request of more than 1 MiB (jute.maxbuffer): refuse it before."""


@dataclass(frozen=True, slots=True)
class NewTopic:
    """What is asked for. `partition_count` counts only without an explicit `assignment`; `shortage`, if any,
    is told to operators once the topic is made: what it lacks of what settings want, and what to do later."""

    name: str
    partition_count: int = 1
    replication_factor: int = 1
    assignment: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    shortage: Mapping[str, Any] = field(default_factory=dict)


def check_topic_name(name: str) -> None:
    """Raises InvalidTopic for a name that could not be a folder or a metric."""
    if name in (".", ".."):
        raise InvalidTopic(f"topic name {name!r} is a folder's")
    if not _LEGAL_TOPIC.fullmatch(name):
        raise InvalidTopic(
            f"topic name {name[:260]!r} has other characters than ASCII letters, digits, '.', '_' and '-', "
            "or not 1 to 249 of them"
        )


def check_replicas(replicas: Sequence[int], live_brokers: Container[int], where: str) -> None:
    """Raises InvalidReplicaAssignment unless these are one or more different, live brokers."""
    if not replicas:
        raise InvalidReplicaAssignment(f"{where} names no replicas")
    if len(set(replicas)) != len(replicas):
        raise InvalidReplicaAssignment(f"{where} names a broker twice: {list(replicas)}")
    dead = [broker for broker in replicas if broker not in live_brokers]
    if dead:
        raise InvalidReplicaAssignment(f"{where} names brokers that are not alive: {dead}")


def _factor(info: TopicInfo) -> int:
    """Replicas of each partition, as the topic's first one has them; those that leave do not count."""
    first = info.partitions[0]
    return len([broker for broker in first.replicas if broker not in first.removing])


def _checked_size(assignment: TopicAssignment) -> bytes:
    data = paths.encode_topic(assignment)
    if len(data) > LARGEST_ZNODE:
        raise InvalidPartitions(
            f"{len(assignment.partitions)} partitions with their replicas are {len(data)} bytes, more than "
            f"ZooKeeper takes for one topic ({LARGEST_ZNODE}): spread them over several topics"
        )
    return data


def _too_large(topic: str, error: RequestTooLarge) -> InvalidConfig:
    return InvalidConfig(f"the settings of topic {topic} are too long: {error}")


class ControllerClient:
    """`check_config` raises InvalidConfig for topic settings that no log could use; `is_applied` says
    whether this broker's own replicas of a topic are as its picture of the cluster shows them."""

    def __init__(
        self,
        session: Session,
        cache: MetadataCache,
        check_config: Callable[[Mapping[str, str]], object],
        is_applied: Callable[[str], bool] = lambda _topic: True,
    ) -> None:
        self._session = session
        self._cache = cache
        self._check_config = check_config
        self._is_applied = is_applied

    # -- topics --------------------------------------------------------------------------------------

    def plan_topic(self, topic: NewTopic) -> TopicAssignment:
        """Check everything that can be checked without writing; the assignment that would be written."""
        check_topic_name(topic.name)
        if topic.name in self._cache.topics:
            raise TopicAlreadyExists(f"topic {topic.name} exists already")
        likeness = topic.name.replace(".", "_")
        twin = next((name for name in self._cache.topics if name.replace(".", "_") == likeness), None)
        if twin is not None:
            raise InvalidTopic(
                f"topic {topic.name} collides with {twin}: '.' and '_' are one in metric names"
            )
        self._check_config(topic.config)
        if topic.assignment:
            partitions = self._checked_assignment(topic.assignment)
        else:
            if not 1 <= topic.partition_count <= MOST_PARTITIONS:
                raise InvalidPartitions(
                    f"{topic.partition_count} partitions; expected 1 to {MOST_PARTITIONS}"
                )
            partitions = self._assign(topic.partition_count, topic.replication_factor)
        return TopicAssignment(uuid.uuid4(), partitions)

    async def create_topic(self, topic: NewTopic, timeout_ms: float) -> TopicInfo:
        """Create, and wait until every partition has a leader.

        Raises TopicAlreadyExists, InvalidTopic, InvalidPartitions, InvalidReplicationFactor,
        InvalidReplicaAssignment, InvalidConfig, RequestTimedOut.
        """
        assignment = self.plan_topic(topic)
        created = [
            Create(paths.topic_path(topic.name), _checked_size(assignment)),
            Create(paths.topic_config_path(topic.name), paths.encode_config(topic.config)),
        ]
        try:
            try:
                await self._session.commit(created)
            except NodeExists:
                # The topic, which comes first; or else settings that were left without one.
                await self._session.commit([created[0], Delete(created[1].path), created[1]])
        except NodeExists:
            raise TopicAlreadyExists(f"topic {topic.name} exists already") from None
        except RequestTooLarge as error:
            raise _too_large(topic.name, error) from None
        except (SessionError, NodeMissing) as error:
            raise RequestTimedOut(f"ZooKeeper did not take the topic: {error}") from None
        log.info(
            "topic created",
            topic=topic.name,
            partitions=len(assignment.partitions),
            topic_id=str(assignment.topic_id),
        )
        if topic.shortage:
            log.warning(
                "a topic has fewer replicas than wanted: too few brokers", topic=topic.name, **topic.shortage
            )
        await self._wait_for_leaders(topic.name, len(assignment.partitions), timeout_ms)
        return self._known(topic.name)

    async def ensure_topic(self, topic: NewTopic, timeout_ms: float) -> TopicInfo:
        """The topic, created when it is missing; someone else may be creating it at the same time."""
        if topic.name not in self._cache.topics:
            try:
                return await self.create_topic(topic, timeout_ms)
            except TopicAlreadyExists:
                if not await self._cache.changed(lambda: topic.name in self._cache.topics, timeout_ms):
                    raise CoordinatorNotAvailable(f"topic {topic.name} is still being created") from None
        await self._wait_for_leaders(topic.name, len(self._known(topic.name).partitions), timeout_ms)
        return self._known(topic.name)

    async def delete_topic(
        self, name: str, timeout_ms: float, topic_id: uuid.UUID | None = None
    ) -> uuid.UUID:
        """Mark the topic that has this name (and id) now for deletion, and wait until it is gone; its id.

        Raises UnknownTopicOrPartition, UnknownTopicId, RequestTimedOut.
        """
        shown = self._known(name)
        try:
            found = paths.decode_topic((await self._session.get(paths.topic_path(name))).data).topic_id
            if topic_id not in (None, found):
                raise UnknownTopicId(f"there is no topic with id {topic_id}")
            # What is not shown yet would look as if it were gone already.
            known = await self._cache.changed(
                lambda: self._shows(name, found) or name not in self._cache.topics, timeout_ms
            )
            if not known:
                raise RequestTimedOut(f"topic {name} was made anew just now: ask again")
            await self._mark_for_deletion(name, found)
        except NodeMissing:
            # Who hears that it is gone may make it anew, which is refused while it is shown.
            await self._cache.changed(lambda: not self._shows(name, shown.topic_id), timeout_ms)
            raise UnknownTopicOrPartition(f"there is no topic {name}") from None
        except SessionError as error:
            raise RequestTimedOut(f"ZooKeeper did not take the deletion: {error}") from None
        if not await self._cache.changed(lambda: not self._shows(name, found), timeout_ms):
            raise RequestTimedOut(f"topic {name} is marked for deletion and not gone yet")
        return found

    def _shows(self, name: str, topic_id: uuid.UUID) -> bool:
        info = self._cache.topic(name)
        return info is not None and info.topic_id == topic_id

    async def _mark_for_deletion(self, name: str, topic_id: uuid.UUID) -> None:
        """By its id: the mark of a request that comes late must not take a topic that was made anew."""
        path, wanted = paths.delete_topic_path(name), paths.encode_deletion(topic_id)
        while True:
            try:
                await self._session.create(path, wanted)
                return
            except NodeExists:
                log.debug("the topic is being deleted already", topic=name)
            try:
                mark = await self._session.get(path)
                if mark.data not in (b"", wanted):
                    await self._session.set(path, wanted, mark.version)
                return
            except (NodeMissing, VersionConflict):
                continue

    async def create_partitions(
        self,
        name: str,
        count: int,
        assignment: Sequence[tuple[int, ...]] | None,
        timeout_ms: float,
        *,
        validate_only: bool = False,
    ) -> None:
        """Widen a topic to `count` partitions; `assignment` names the replicas of the new ones."""
        info = self._known(name)
        present = len(info.partitions)
        if count <= present or count > MOST_PARTITIONS:
            raise InvalidPartitions(f"topic {name} has {present} partitions; {count} is no increase")
        if assignment is not None:
            if len(assignment) != count - present:
                raise InvalidReplicaAssignment(
                    f"{len(assignment)} assignments for {count - present} partitions"
                )
            added = self._checked_assignment(
                dict(enumerate(assignment, start=present)), first=present, factor=_factor(info)
            )
        else:
            added = self._assign(count - present, _factor(info), first=present)
        if validate_only:
            return

        async def widen(topic: Node) -> Sequence[Operation]:
            old = paths.decode_topic(topic.data)
            if len(old.partitions) != present:
                count = count_of(len(old.partitions), "partition")
                raise InvalidPartitions(f"topic {name} has {count} by now")
            data = _checked_size(replace(old, partitions={**old.partitions, **added}))
            return [SetData(paths.topic_path(name), data, topic.version)]

        await self._change_topic(name, widen)
        log.info("partitions added", topic=name, partitions=count)
        await self._wait_for_leaders(name, count, timeout_ms)

    # -- settings ------------------------------------------------------------------------------------

    async def alter_topic_config(
        self,
        name: str,
        change: Callable[[Mapping[str, str]], Mapping[str, str]],
        *,
        validate_only: bool = False,
    ) -> None:
        """Replace a topic's settings by `change(settings)`. Where they cannot be read, that is a change of
        what is shown in their place. Raises InvalidConfig, UnknownTopicOrPartition."""
        info = self._known(name)
        config = dict(change(info.config))
        self._check_config(config)
        if validate_only:
            return
        path = paths.topic_config_path(name)

        async def altered(topic: Node) -> Sequence[Operation]:
            nonlocal config
            try:
                node = await self._session.get(path)
            except NodeMissing:
                node = None
            config = dict(change({} if node is None else self._present_config(name, topic, node)))
            self._check_config(config)
            data = paths.encode_config(config)
            return [Create(path, data) if node is None else SetData(path, data, node.version)]

        await self._change_topic(name, altered)
        log.info("topic settings altered", topic=name, config=config)

        def shown() -> bool:
            now = self._cache.topic(name)
            return now is None or (dict(now.config) == config and self._is_applied(name))

        await self._cache.changed(shown, 5_000)

    def _present_config(self, name: str, topic: Node, settings: Node) -> Mapping[str, str]:
        """What stands in the znode, or else what is shown of this very topic: as it was read last, or with
        the mark that only who knows of it takes away."""
        present = paths.decode_topic_config(name, settings.data)
        shown = self._cache.topic(name)
        if UNREADABLE not in present or shown is None:
            return present
        return shown.config if shown.topic_id == paths.decode_topic(topic.data).topic_id else present

    async def alter_broker_config(
        self,
        name: str,
        change: Callable[[Mapping[str, str]], Mapping[str, str]],
        *,
        validate_only: bool = False,
    ) -> None:
        """Replace the settings that a broker (or `paths.DEFAULT_BROKER`: every one) has been given while it
        runs by `change(settings)`. Raises InvalidRequest, InvalidConfig (see `check_dynamic`)."""
        config = dict(change(self._cache.broker_configs.get(name, {})))
        check_dynamic(config)
        if validate_only:
            return
        path = paths.broker_config_path(name)
        try:
            await self._session.create(path, paths.encode_config(config))
        except NodeExists:

            def altered(data: bytes) -> bytes:
                nonlocal config
                config = dict(change(paths.decode_broker_config(name, data)))
                check_dynamic(config)
                return paths.encode_config(config)

            await self._rewrite(path, altered)
        except SessionError as error:
            raise RequestTimedOut(f"ZooKeeper did not take the settings: {error}") from None
        log.info("broker settings altered", broker=name, config=config)
        await self._cache.changed(lambda: self._cache.broker_configs.get(name) == config, 5_000)

    # -- shared --------------------------------------------------------------------------------------

    def _known(self, name: str) -> TopicInfo:
        info = self._cache.topic(name)
        if info is None:
            raise UnknownTopicOrPartition(f"there is no topic {name}")
        return info

    def _assign(
        self, partition_count: int, replication_factor: int, *, first: int = 0
    ) -> dict[int, tuple[int, ...]]:
        known = self._cache.brokers
        brokers = takers_of_replicas(known)
        start, shift = (random.randrange(len(brokers)), random.randrange(len(brokers))) if brokers else (0, 0)
        racks = {broker: known[broker].rack for broker in brokers}
        return assign_replicas(
            brokers, partition_count, replication_factor, start=start, first=first, shift=shift, racks=racks
        )

    def _checked_assignment(
        self, assignment: Mapping[int, tuple[int, ...]], *, first: int = 0, factor: int | None = None
    ) -> dict[int, tuple[int, ...]]:
        """Replicas as someone else has chosen them; `factor` is how many the topic's partitions have."""
        if sorted(assignment) != list(range(first, first + len(assignment))):
            raise InvalidReplicaAssignment("partitions must be numbered without gaps")
        for number, replicas in assignment.items():
            check_replicas(replicas, self._cache.brokers, f"partition {number}")
            factor = len(replicas) if factor is None else factor
            if len(replicas) != factor:
                raise InvalidReplicaAssignment(
                    f"partition {number} names {len(replicas)} replicas where other partitions have {factor}"
                )
        return dict(assignment)

    async def _wait_for_leaders(self, name: str, count: int, timeout_ms: float) -> None:
        def led() -> bool:
            info = self._cache.topic(name)
            return (
                info is not None
                and len(info.partitions) >= count
                and self._is_applied(name)
                and all(partition.leader != NO_LEADER for partition in info.partitions.values())
            )

        if not await self._cache.changed(led, timeout_ms):
            raise RequestTimedOut(f"topic {name} was accepted; not every partition has a leader yet")

    async def _change_topic(self, name: str, plan: Callable[[Node], Awaitable[Sequence[Operation]]]) -> None:
        """Write what `plan` makes of the topic's znode, as often as someone else writes in between. It holds
        only while no topic was removed since the reading: the versions of a topic that was made anew may be
        those of the one before."""
        while True:
            try:
                removals = await self._session.get(paths.DELETE_TOPICS)
                operations = await plan(await self._session.get(paths.topic_path(name)))
                await self._session.commit([Check(paths.DELETE_TOPICS, removals.version), *operations])
            except (VersionConflict, NodeExists):
                continue
            except NodeMissing:
                raise UnknownTopicOrPartition(f"there is no topic {name}") from None
            except RequestTooLarge as error:
                raise _too_large(name, error) from None
            except SessionError as error:
                raise RequestTimedOut(f"ZooKeeper did not take the change: {error}") from None
            return

    async def _rewrite(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Read, change and write back, until no one else wrote in between."""
        while True:
            try:
                node = await self._session.get(path)
                await self._session.set(path, change(node.data), node.version)
            except VersionConflict:
                continue
            except NodeMissing:
                raise UnknownTopicOrPartition(f"{path} is gone") from None
            except SessionError as error:
                raise RequestTimedOut(f"ZooKeeper did not take the change: {error}") from None
            return
