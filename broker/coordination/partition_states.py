"""A leader's changes of its partitions' states in ZooKeeper: another in-sync set, everything else as it was.

The replica manager calls `PartitionStates.write`. A write is tied to the version of the state that the
change was based on, to the topic's id and to the replicas: a controller's decision in between, a topic made
anew under the same name, or a replica that was to join and is none any more, makes it fail. Where the
connection breaks while an answer is due, nobody knows whether the write happened; then the znode is read,
when the session is back, until that is certain. While the session is away nothing is written, so a high
watermark that needs another in-sync set stands still.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.session import (
    Check,
    NodeMissing,
    Session,
    SessionError,
    SessionState,
    SetData,
    VersionConflict,
)
from millrace.broker.replication.in_sync_sets import IsWanted, StateConflict
from millrace.broker.replication.partition import PartitionState

log = structlog.get_logger("millrace.broker")

RETRY_SECONDS = 0.1
MOVED_TOPIC_RETRY_SECONDS = 0.05


class PartitionStates:
    """Writes states over one session, and shows them to the cache at once: the watch may take a while."""

    def __init__(self, session: Session, cache: MetadataCache, announce: Callable[[], None]) -> None:
        self._session = session
        self._cache = cache
        self._announce = announce

    async def write(
        self,
        topic: str,
        topic_id: UUID,
        partition: int,
        state: PartitionState,
        is_wanted: IsWanted = lambda _replicas: True,
    ) -> int:
        """The version at which `state` stands now. It is asked before each attempt whether it `is_wanted`
        still: attempts may take as long as ZooKeeper is away. Raises StateConflict when another state stands,
        or nobody wants it."""
        if state.version < 0:
            raise StateConflict("the version of the state is not known")
        uncertain = False
        while True:
            if self._session.state is not SessionState.CONNECTED:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                if uncertain and await self._stands(topic, partition, state):
                    version = state.version + 1
                else:
                    version = await self._write(topic, topic_id, partition, state, is_wanted)
            except SessionError as error:
                log.debug("a state may not have been written", topic=topic, error=str(error))
                uncertain = True
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except NodeMissing:
                raise StateConflict("the topic is gone") from None
            except VersionConflict:
                raise StateConflict("another state was written meanwhile") from None
            self._cache.set_state(topic, partition, replace(state, version=version), version)
            self._announce()
            return version

    async def _stands(self, topic: str, partition: int, state: PartitionState) -> bool:
        """Whether a write of unknown outcome has happened. Raises VersionConflict when neither the state
        before it stands nor this one."""
        node = await self._session.get(paths.state_path(topic, partition))
        if node.version == state.version:
            return False
        if node.version == state.version + 1 and paths.decode_state(node.data) == state:
            return True
        raise VersionConflict(paths.state_path(topic, partition))

    async def _write(
        self,
        topic: str,
        topic_id: UUID,
        partition: int,
        state: PartitionState,
        is_wanted: IsWanted,
    ) -> int:
        path = paths.state_path(topic, partition)
        while True:
            node = await self._session.get(paths.topic_path(topic))
            assignment = paths.decode_topic(node.data)
            if assignment.topic_id != topic_id:
                raise StateConflict("the topic was deleted and made anew")
            if not is_wanted(tuple(assignment.partitions.get(partition, ()))):
                raise StateConflict("what it was for has passed")
            try:
                await self._session.commit(
                    [
                        Check(paths.topic_path(topic), node.version),
                        SetData(path, paths.encode_state(state), state.version),
                    ]
                )
            except VersionConflict:
                # Either the state is another one, or only the topic's replicas have changed meanwhile: to
                # give up then would leave a change pending that no newer state ever ends.
                if (await self._session.get(path)).version != state.version:
                    raise
                await asyncio.sleep(random.uniform(0, MOVED_TOPIC_RETRY_SECONDS))
            else:
                return state.version + 1
