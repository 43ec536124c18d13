"""Carries out changes of the in-sync sets of the partitions that this broker leads.

`partition.py` decides who joins and who is late; this writes it through `write_state`, which is given by
`server/broker.py` (`coordination/partition_states.py`), and hands the outcome back to the rules. A change
stays pending until its outcome is known: meanwhile the high watermark waits for both sets.

One change of a partition at a time; at most `WRITES_AT_ONCE` of all partitions together, so that a lost
broker that was a follower of thousands does not flood ZooKeeper. All on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from uuid import UUID

import structlog

from millrace.broker.errors import MillraceError
from millrace.broker.replication.local_partition import LocalPartition
from millrace.broker.replication.partition import NO_VERSION, IsrChange, PartitionState, Role
from millrace.broker.telemetry.metrics import BrokerMetrics

log = structlog.get_logger("millrace.broker")

WRITES_AT_ONCE = 64
CHECKS_PER_LAG = 2
"""Followers are looked at this often within `replica.lag.time.max.ms`, as in Apache Kafka."""


class StateConflict(MillraceError):
    """The state in ZooKeeper is another one than the change was based on, and the watch brings it; or the
    change is not wanted any more."""


IsWanted = Callable[[tuple[int, ...]], bool]
"""Whether a change that has not been written is wanted still, where these are the partition's replicas."""

StateWriter = Callable[[str, UUID, int, PartitionState, IsWanted], Awaitable[int]]
"""(topic, topic id, partition, new state, is it wanted still?): writes it where the znode still has the
version `state.version`, the topic still has that id and its replicas are those that were shown to the last
one; gives the new version. Returns only when the outcome is certain, however long the session is away. Raises
StateConflict, also where it is wanted no more."""


class InSyncSets:
    """See the module. `changed(local)` is called when a written set counts."""

    def __init__(
        self,
        write_state: StateWriter | None,
        changed: Callable[[LocalPartition], None],
        metrics: BrokerMetrics,
    ) -> None:
        self._write_state = write_state
        self._changed = changed
        self._metrics = metrics
        self._slots = asyncio.Semaphore(WRITES_AT_ONCE)
        self._writing: set[asyncio.Task[None]] = set()
        self._last_check: float | None = None

    def fetched(self, local: LocalPartition, follower_id: int) -> None:
        """A follower outside the in-sync set has fetched: it may have caught up."""
        change = local.replica.expansion_due(follower_id)
        if change is not None:
            self._begin(local, change)

    def shrink(self, partitions: Iterable[LocalPartition], steady_ms: int, interval_ms: float) -> None:
        """Take out who is late. To be called every `interval_ms`; a call that comes much later than that
        says that this broker itself was away (a paused process), with the followers' fetches still unread:
        nobody is blamed then."""
        now = asyncio.get_running_loop().time()
        since, self._last_check = self._last_check, now
        if since is not None and (now - since) * 1000 > interval_ms * 2 + 1000:
            log.warning(
                "this broker was held up; followers are not judged by it", seconds=round(now - since, 1)
            )
            return
        for local in partitions:
            if local.replica.role is Role.LEADER and len(local.replica.isr) > 1:
                change = local.replica.shrink_due(local.log.end_offset, steady_ms)
                if change is not None:
                    self._begin(local, change)

    def _begin(self, local: LocalPartition, change: IsrChange) -> None:
        if self._write_state is None or change.state.version == NO_VERSION:
            return
        local.replica.begin(change)
        task = asyncio.ensure_future(self._write(self._write_state, local, change))
        self._writing.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # Nobody knows what stands: the change stays pending, and readers wait for both sets.
            log.error("an in-sync set was not changed: a defect of the broker", exc_info=task.exception())

    async def _write(self, write_state: StateWriter, local: LocalPartition, change: IsrChange) -> None:
        def is_wanted(replicas: tuple[int, ...]) -> bool:
            if not change.fits(replicas):
                local.replica.called_off(change)
            return local.replica.pending is change

        async with self._slots:
            try:
                version = await write_state(
                    local.topic, local.topic_id, local.partition, change.state, is_wanted
                )
            except StateConflict as error:
                # The newer state is on its way here; until it is applied, the change stays pending.
                log.debug("an in-sync set was not changed", partition=str(local), reason=str(error))
                return
        self._count(local, change)
        if local.replica.written(change, version):
            self._changed(local)

    def _count(self, local: LocalPartition, change: IsrChange) -> None:
        if change.removed:
            self._metrics.isr_shrinks += 1
            log.warning(
                "replicas are late and out of sync",
                partition=str(local),
                brokers=list(change.removed),
                in_sync=list(change.state.isr),
            )
        else:
            self._metrics.isr_expands += 1
            log.info(
                "a replica has caught up and is in sync",
                partition=str(local),
                broker=change.added[0],
                in_sync=list(change.state.isr),
            )

    async def close(self) -> None:
        """Give up what is being written; ZooKeeper may or may not have it."""
        for task in list(self._writing):
            task.cancel()
        await asyncio.gather(*self._writing, return_exceptions=True)
