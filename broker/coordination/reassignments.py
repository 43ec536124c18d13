"""Moves partitions to other brokers (KIP-455): begins, calls off and lists moves. The shell of
`reassignment.py`.

A move stands in the topic's own znode, so any broker may begin it: the topic's znode and the states that
change with it are written in one transaction, tied to the versions that were read; as many partitions at once
as a transaction takes. The controller ends it.
Called by the handlers of AlterPartitionReassignments and ListPartitionReassignments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.controller_client import LARGEST_ZNODE, check_replicas
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.coordination.paths import TopicAssignment
from millrace.broker.coordination.picture import allows_unclean
from millrace.broker.coordination.reassignment import PlannedMove, begin_move, cancel_move
from millrace.broker.coordination.session import (
    Check,
    NodeMissing,
    Operation,
    Session,
    SessionError,
    SetData,
    VersionConflict,
    operation_bytes,
)
from millrace.broker.coordination.transactions import MOST_OPERATIONS, cut
from millrace.broker.errors import (
    InvalidReplicaAssignment,
    KafkaError,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.topic_partition import TopicPartition

log = structlog.get_logger("millrace.broker")

Target = tuple[int, ...] | None
"""The brokers that a partition is to move to, the preferred leader first; None calls a move off."""


class Reassignments:
    """One per broker; stateless but for what ZooKeeper holds."""

    def __init__(
        self,
        session: Session,
        cache: MetadataCache,
        *,
        unclean_by_default: Callable[[], bool] = lambda: False,
    ) -> None:
        self._session = session
        self._cache = cache
        self._unclean_by_default = unclean_by_default

    async def alter(
        self, topic: str, targets: Mapping[int, Target], timeout_ms: float
    ) -> dict[int, KafkaError | None]:
        """Begin or call off moves of one topic's partitions; what was refused, by partition.

        Waits until this broker's picture shows what was written, not until the data has moved.
        """
        results: dict[int, KafkaError | None] = {}
        version = -1
        try:
            while left := {number: target for number, target in targets.items() if number not in results}:
                try:
                    answered, version = await self._alter(topic, left)
                except VersionConflict:
                    continue
                results |= answered
        except NodeMissing:
            missing = UnknownTopicOrPartition(f"there is no topic {topic}")
            return results | dict.fromkeys(left, missing)
        except SessionError as error:
            failure = RequestTimedOut(f"ZooKeeper did not take the change: {error}")
            return results | dict.fromkeys(left, failure)

        def shown() -> bool:
            info = self._cache.topic(topic)
            return info is None or info.version >= version

        await self._cache.changed(shown, timeout_ms)
        return {number: results[number] for number in targets}

    def moving(self) -> dict[TopicPartition, PartitionInfo]:
        """Every partition that is being moved, as this broker knows it."""
        return {
            (name, number): partition
            for name, info in self._cache.topics.items()
            for number, partition in info.partitions.items()
            if partition.is_moving
        }

    async def _alter(
        self, topic: str, targets: Mapping[int, Target]
    ) -> tuple[dict[int, KafkaError | None], int]:
        """Begin or call off as many of these as one transaction takes; what was answered, and the version of
        the topic's znode."""
        if topic in self._cache.deleting:
            raise NodeMissing(topic)
        removals = await self._session.get(paths.DELETE_TOPICS)
        node = await self._session.get(paths.topic_path(topic))
        assignment = paths.decode_topic(node.data)
        results: dict[int, KafkaError | None] = {}
        planned: dict[int, PlannedMove] = {}
        operations: dict[int, Operation] = {}
        numbers = list(targets)[:MOST_OPERATIONS]
        pictures = await asyncio.gather(*(self._read(topic, number, assignment) for number in numbers))
        for number, partition in zip(numbers, pictures, strict=True):
            try:
                if partition is None:
                    raise UnknownTopicOrPartition(f"there is no partition {number} of a topic {topic}")
                move = self._plan(topic, number, partition, targets[number])
            except KafkaError as error:
                results[number] = error
                continue
            planned[number] = move
            if partition.state_version >= 0:
                path = paths.state_path(topic, number)
                operations[number] = (
                    Check(path, partition.state_version)
                    if move.state is None
                    else SetData(path, paths.encode_state(move.state), partition.state_version)
                )
        whole = SetData(paths.topic_path(topic), paths.encode_topic(_with_moves(assignment, planned)))
        if planned and len(whole.data) > LARGEST_ZNODE:
            refusal = InvalidReplicaAssignment(
                f"with these moves the znode of {topic} would have {len(whole.data)} bytes, more than "
                f"ZooKeeper takes ({LARGEST_ZNODE}): move fewer of its partitions at a time"
            )
            return results | dict.fromkeys(planned, refusal), node.version
        fitting = set(next(cut(list(operations.values()), beside=operation_bytes(whole)), ()))
        planned = {
            number: move
            for number, move in planned.items()
            if number not in operations or operations[number] in fitting
        }
        if not planned:
            return results, node.version
        written = paths.encode_topic(_with_moves(assignment, planned))
        await self._session.commit(
            [
                # A topic that was made anew meanwhile may have the versions of the one that was read.
                Check(paths.DELETE_TOPICS, removals.version),
                SetData(paths.topic_path(topic), written, node.version),
                *fitting,
            ]
        )
        for number, move in planned.items():
            results[number] = None
            log.info(
                "a partition moves" if move.adding or move.removing else "a partition stays where it is",
                topic=topic,
                partition=number,
                replicas=list(move.replicas),
                adding=list(move.adding),
                removing=list(move.removing),
            )
        return results, node.version + 1

    async def _read(self, topic: str, number: int, assignment: TopicAssignment) -> PartitionInfo | None:
        """A partition as it stands now, not as the picture shows it: the plan must fit what is written.
        None where the topic has no such partition."""
        replicas = assignment.partitions.get(number)
        if replicas is None:
            return None
        adding, removing = assignment.adding.get(number, ()), assignment.removing.get(number, ())
        try:
            node = await self._session.get(paths.state_path(topic, number))
        except NodeMissing:
            return PartitionInfo(replicas, None, -1, adding, removing)
        return PartitionInfo(replicas, paths.decode_state(node.data), node.version, adding, removing)

    def _plan(self, topic: str, number: int, partition: PartitionInfo, target: Target) -> PlannedMove:
        info = self._cache.topic(topic)
        unclean = info is not None and allows_unclean(info, self._unclean_by_default())
        alive = frozenset(
            broker for broker in self._cache.brokers if self._cache.is_alive(broker, topic, number)
        )
        if target is None:
            return cancel_move(partition, alive, unclean=unclean)
        check_replicas(target, self._cache.brokers, f"{topic}-{number}")
        return begin_move(partition, target, alive, unclean=unclean)


def _with_moves(assignment: TopicAssignment, moves: Mapping[int, PlannedMove]) -> TopicAssignment:
    partitions, adding, removing = (
        dict(assignment.partitions),
        dict(assignment.adding),
        dict(assignment.removing),
    )
    for number, move in moves.items():
        partitions[number] = move.replicas
        for lists, brokers in ((adding, move.adding), (removing, move.removing)):
            lists.pop(number, None)
            if brokers:
                lists[number] = brokers
    return replace(assignment, partitions=partitions, adding=adding, removing=removing)
