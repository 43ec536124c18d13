"""Runs the controller on the broker that won `/controller`, and fences every write of a former one.

Election: a transaction raises `/controller_epoch` by one and creates the ephemeral `/controller`; either
both happen or neither. Every transaction of the controller begins with a check of `/controller_epoch`'s
znode version, so a controller that was replaced while it slept cannot write, however fresh its reads are.
While the session is suspended nothing is decided; when it is lost the office is lost with it.

Called by `server/broker.py`; woken (`wake`) by the cluster watcher after every change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.controller import (
    ClusterPicture,
    PartitionPicture,
    RemoveTopic,
    WriteState,
    decide,
)
from millrace.broker.coordination.metadata_cache import NO_CONTROLLER, MetadataCache
from millrace.broker.coordination.session import (
    Check,
    Create,
    Delete,
    NodeExists,
    NodeMissing,
    Operation,
    Session,
    SessionError,
    SessionState,
    SetData,
    VersionConflict,
)

log = structlog.get_logger("millrace.broker")

OPERATIONS_PER_TRANSACTION = 500
"""Well below ZooKeeper's limit of 1 MB a request."""

RETRY_MS = 100


class ControllerRunner:
    """Stands for election, and while in office carries out what `controller.decide` says."""

    def __init__(
        self, session: Session, cache: MetadataCache, broker_id: int, clock_ms: Callable[[], int]
    ) -> None:
        self._session = session
        self._cache = cache
        self._broker_id = broker_id
        self._clock_ms = clock_ms
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._epoch_version = -1
        self.epoch = -1
        self.in_office = False

    def start(self) -> asyncio.Task[None]:
        """Stand for election, in the task that is returned: it ends only by `stop`, or by a failure."""
        self._session.on_state(self._on_state)
        self._task = asyncio.create_task(self._run(), name="controller")
        self.wake()
        return self._task

    async def stop(self) -> None:
        """Leave the office at once, so that another broker need not wait for the session to end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.in_office and self._session.state is SessionState.CONNECTED:
            self.in_office = False
            try:
                await self._session.delete(paths.CONTROLLER)
            except (NodeMissing, SessionError) as error:
                log.debug("the controller's znode was gone already", error=str(error))

    def wake(self) -> None:
        """The cluster may have changed."""
        self._wake.set()

    def _on_state(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._resign("the ZooKeeper session was lost")
        elif state is SessionState.CONNECTED:
            self.wake()

    def _resign(self, reason: str) -> None:
        if self.in_office:
            log.warning("no longer the controller", controller_epoch=self.epoch, reason=reason)
        self.in_office = False

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._session.state is not SessionState.CONNECTED:
                continue
            try:
                if not self.in_office:
                    await self._stand_for_election()
                if self.in_office:
                    await self._carry_out()
            except VersionConflict:
                await self._check_office()
            except (SessionError, NodeMissing, NodeExists) as error:
                # The picture was out of date, or the connection is gone: look again soon.
                log.debug("the controller tries again", error=str(error))
                await asyncio.sleep(RETRY_MS / 1000)
                self.wake()

    async def _stand_for_election(self) -> None:
        if self._cache.controller_id != NO_CONTROLLER:
            return
        try:
            node = await self._session.get(paths.CONTROLLER_EPOCH)
        except NodeMissing:
            try:
                await self._session.create(paths.CONTROLLER_EPOCH, b"0")
            except NodeExists:
                log.debug("another broker made the controller epoch")
            node = await self._session.get(paths.CONTROLLER_EPOCH)
        epoch = int(node.data) + 1
        try:
            await self._session.commit(
                [
                    SetData(paths.CONTROLLER_EPOCH, str(epoch).encode(), node.version),
                    Create(
                        paths.CONTROLLER,
                        paths.encode_controller(self._broker_id, self._clock_ms()),
                        ephemeral=True,
                    ),
                ]
            )
        except (NodeExists, VersionConflict):
            # Another one was quicker, or is about to be; the watcher will say who.
            await asyncio.sleep(RETRY_MS / 1000)
            self.wake()
            return
        self.epoch, self._epoch_version, self.in_office = epoch, node.version + 1, True
        log.info("elected controller", broker_id=self._broker_id, controller_epoch=epoch)

    async def _check_office(self) -> None:
        """A write met another version: either the office is gone, or only the picture was old."""
        node = await self._session.get(paths.CONTROLLER_EPOCH)
        if node.version != self._epoch_version:
            self._resign("another controller has a higher epoch")
        await asyncio.sleep(RETRY_MS / 1000)
        self.wake()

    async def _carry_out(self) -> None:
        decisions = list(decide(self._picture(), self.epoch))
        for decision in decisions:
            if isinstance(decision, RemoveTopic):
                await self._remove_topic(decision.topic)
        await self._write_states([decision for decision in decisions if isinstance(decision, WriteState)])

    def _picture(self) -> ClusterPicture:
        cache = self._cache
        return ClusterPicture(
            live_brokers=frozenset(cache.brokers),
            topics={
                name: {
                    number: PartitionPicture(partition.replicas, partition.state, partition.state_version)
                    for number, partition in info.partitions.items()
                }
                for name, info in cache.topics.items()
            },
            deleting=cache.deleting,
        )

    async def _write_states(self, decisions: Sequence[WriteState]) -> None:
        operations: list[Operation] = []
        for topic, group in groupby(decisions, key=lambda decision: decision.topic):
            writes = list(group)
            fresh = [write for write in writes if write.version < 0]
            operations += await self._folders(topic, [write.partition for write in fresh])
            for write in writes:
                path, data = paths.state_path(topic, write.partition), paths.encode_state(write.state)
                operations.append(
                    Create(path, data) if write.version < 0 else SetData(path, data, write.version)
                )
            if len(operations) >= OPERATIONS_PER_TRANSACTION:
                await self._commit(operations)
                operations = []
        if operations:
            await self._commit(operations)
        for decision in decisions:
            log.debug("leader", topic=decision.topic, partition=decision.partition, state=str(decision.state))

    async def _folders(self, topic: str, partitions: Sequence[int]) -> list[Operation]:
        """Creations of the znodes above new states, as far as they are missing."""
        if not partitions:
            return []
        try:
            present = set(await self._session.children(paths.partitions_path(topic)))
            operations: list[Operation] = []
        except NodeMissing:
            present = set()
            operations = [Create(paths.partitions_path(topic), b"")]
        return operations + [
            Create(paths.partition_path(topic, number), b"")
            for number in partitions
            if str(number) not in present
        ]

    async def _remove_topic(self, topic: str) -> None:
        """Delete the topic's znodes in one transaction; brokers drop its logs when they see it gone."""
        doomed: list[Operation] = []
        for number in await self._children(paths.partitions_path(topic)):
            folder = f"{paths.partitions_path(topic)}/{number}"
            doomed += [Delete(f"{folder}/{child}") for child in await self._children(folder)]
            doomed.append(Delete(folder))
        for path in (
            paths.partitions_path(topic),
            paths.topic_path(topic),
            paths.topic_config_path(topic),
            paths.delete_topic_path(topic),
        ):
            if await self._session.exists(path):
                doomed.append(Delete(path))
        await self._commit(doomed)
        log.info("topic deleted", topic=topic)

    async def _children(self, path: str) -> list[str]:
        try:
            return await self._session.children(path)
        except NodeMissing:
            return []

    async def _commit(self, operations: Sequence[Operation]) -> None:
        await self._session.commit([Check(paths.CONTROLLER_EPOCH, self._epoch_version), *operations])
