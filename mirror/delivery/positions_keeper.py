"""The positions topic and the offset map's topic, as the worker's deliveries use them: made, read, encoded.

Called by `at_least_once`, `exactly_once` and its lanes. Who writes when is theirs to say; here is what is
written, where, and how it is read back: up to a record that the reader itself has just put there, past every
transaction that was open then.

- The end that a broker tells may be too low: one that was replaced as leader, and does not know it, answers
  as before. But it acknowledges no write for all in-sync replicas. So whatever was on record when the
  reader's own record (the *barrier*) was written stands before that one.
- A transaction that its writer can still commit would otherwise be missed, and what it held carried twice.
  Usually it is over within its timeout; one that nobody ends holds up everything, so what is waited for is
  told (`trouble`), in the log at intervals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.open_transactions import open_transactions
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import FatalError
from millrace.broker.protocol.mirror_positions import LOST, Position
from millrace.broker.wording import count_of
from millrace.mirror.config import MirrorConfig
from millrace.mirror.delivery.checkpoints import Positions, encode_key, encode_records
from millrace.mirror.delivery.system_records import (
    CLUSTER_FAILURES,
    KeyAndValue,
    NewFailures,
    SystemRecords,
    ensure_topic,
    refuse_expiring_topic,
)
from millrace.mirror.offsets.offset_map import decode_key, map_partition
from millrace.mirror.pipeline import PartitionPipeline
from millrace.mirror.topics.own_topics import OFFSET_MAP, POSITIONS
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

log = structlog.get_logger("millrace.mirror.positions")

READ_PAUSE_S = 0.2
# The mirror's own transactions end within 15 s at the latest, by their timeout.
TOLD_AFTER_S = 10.0
TOLD_AGAIN_AFTER_S = 30.0
# Of no partition, so nobody takes it for a position; a tombstone, so nothing of it stays.
BARRIER: KeyAndValue = (b'{"barrier":1}', None)
Records = list[KeyAndValue]


@dataclass(frozen=True)
class Writing:
    """What one write (or one transaction) puts on record: positions of pipelines, and the records for it."""

    moved: tuple[tuple[PartitionPipeline, Position], ...]
    records: Mapping[TargetPartition, Records]


class PositionsKeeper:
    """See the module's text. Holds no positions itself."""

    def __init__(self, config: MirrorConfig, target: Cluster, system: SystemRecords) -> None:
        self._target = target
        self._system = system
        self._replication_factor = config.target.replication_factor
        self.positions = TargetPartition(POSITIONS.of(config.name), 0)
        self._offsets_topic = OFFSET_MAP.of(config.name)
        self._trouble: dict[object, str] = {}  # of each reading that is under way

    @property
    def trouble(self) -> str:
        """What a reading waits for, once it has been for long; otherwise empty."""
        return next(iter(self._trouble.values()), "")

    async def make_topics(self) -> None:
        """Makes sure that both topics are there. Raises FatalError when positions would expire in theirs, or
        the other was made by somebody else with too few partitions."""
        factor = self._replication_factor
        await ensure_topic(self._target, self.positions.topic, 1, factor, POSITIONS.configs)
        name = self._offsets_topic
        count = await ensure_topic(self._target, name, OFFSET_MAP.partitions, factor, OFFSET_MAP.configs)
        if count < OFFSET_MAP.partitions:
            raise FatalError(
                f"cluster {self._target.name}: topic {name} has {count_of(count, 'partition')} and needs "
                f"{OFFSET_MAP.partitions}; add the others, or delete it if it was made by mistake"
            )
        await refuse_expiring_topic(self._target, self.positions.topic)

    async def read(self) -> Positions:
        """All positions, once every transaction that is open now is decided. Asks until it gets them."""
        telling = asyncio.get_running_loop().create_task(self._tell_of_waiting())
        try:
            return await self._read()
        finally:
            telling.cancel()
            self._trouble.pop(telling, None)

    async def _tell_of_waiting(self) -> None:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        began, pause_s = loop.time(), TOLD_AFTER_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = TOLD_AGAIN_AFTER_S
            reason = self._trouble[me] = await self._waits_for()
            log.warning("the positions are still being read", reason=reason, for_s=round(loop.time() - began))

    async def _waits_for(self) -> str:
        topic, partition = self.positions.topic, self.positions.partition
        if refused := self._system.failures.get((topic, partition)):
            return f"{topic}-{partition} takes no record ({refused.reason})"
        try:
            found = await open_transactions(self._target, topic, partition)
        except CLUSTER_FAILURES as error:
            return f"{topic}-{partition} has not been read to its end ({error})"
        if not found:
            return f"{topic}-{partition} has not been read to its end"
        first = found[0]
        which = f"{topic}-{partition}: an open transaction {first}"
        if first.is_in_hand:
            return f"{which} is not ended by its producer, nor by its timeout yet"
        # Never an abort as such: it may be about to be committed, and a part of it would then be gone.
        return (
            f"{which} is not over; if it stays past its timeout, see what kafka-transactions.sh find-hanging "
            f"--broker-id {first.leader} names: abort nothing else"
        )

    async def _read(self) -> Positions:
        failures = NewFailures()
        while True:
            try:
                await self.make_topics()
                positions = await self._on_record()
                if not positions.known and (mapped := await self._mapped() - positions.unreadable):
                    # Another worker of a mirror that begins now may have begun since: its first position
                    # stands before its first chunk of the map.
                    positions = await self._on_record()
                    await self._mark_lost(positions, mapped)
                return positions
            except CLUSTER_FAILURES as error:
                if failures.is_news(error):
                    log.warning("cannot read the positions yet", error=str(error))
                await asyncio.sleep(READ_PAUSE_S)

    async def _on_record(self) -> Positions:
        """Up to a barrier that is written now."""
        topic, positions = self.positions.topic, Positions()
        end = {self.positions.partition: await self._write([BARRIER])}
        # In the order of the newest records: of a key that was written a thousand times one is decoded.
        newest: dict[bytes | None, bytes | None] = {}
        async for record in read_topic_to_end(self._target, topic, until=end):
            newest.pop(record.key, None)
            newest[record.key] = record.value
        for key, value in newest.items():
            positions.apply(key, value)
        return positions

    async def _mapped(self) -> set[SourcePartition]:
        """The partitions that the offset map knows of: they were mirrored."""
        found: set[SourcePartition] = set()
        async for record in read_topic_to_end(self._target, self._offsets_topic):
            if (key := decode_key(record.key)) is not None:
                found.add(key.partition)
        return found

    async def _mark_lost(self, positions: Positions, mapped: set[SourcePartition]) -> None:
        """Positions are gone, all of them, when the offset map knows of partitions: somebody deleted the
        topic, or emptied it. To begin anew in silence would lose records or repeat them all. That they are
        lost is put on record before any is written anew: so whoever finds no position, but marks of another
        worker, which may be a part of them, adds what is missing, and nobody takes them for the whole."""
        lost = mapped - positions.known.keys() - positions.unreadable
        if not lost:
            return
        log.error("the positions are gone", topic=self.positions.topic, partitions=len(lost))
        await self._write([(encode_key(partition), LOST) for partition in sorted(lost)])
        positions.unreadable |= lost

    async def _write(self, records: Records) -> int:
        """Outside of any transaction; gives the offset behind them."""
        return await self._system.write(self.positions.topic, records, configs=POSITIONS.configs)

    def map_of(self, partition: SourcePartition) -> TargetPartition:
        """Where the offset map of a source partition is written."""
        return TargetPartition(self._offsets_topic, map_partition(partition, OFFSET_MAP.partitions))

    def gather(
        self,
        pipelines: Iterable[PartitionPipeline],
        starts: Iterable[tuple[SourcePartition, Position]],
        now_ms: int,
    ) -> Writing:
        """What is new in these pipelines, taken out of their offset runs, and first positions (`starts`)."""
        moved = tuple(
            (pipeline, position)
            for pipeline in pipelines
            if (position := pipeline.position_to_write(now_ms)) is not None
        )
        records: dict[TargetPartition, Records] = {}
        for pipeline, position in moved:
            chunks = pipeline.runs.take_until(position.next_offset)
            if chunks:
                records.setdefault(self.map_of(pipeline.partition), []).extend(chunks)
        positions = [*starts, *((pipeline.partition, position) for pipeline, position in moved)]
        if positions:
            records[self.positions] = list(encode_records(positions))
        return Writing(moved, records)
