"""Following a topic of the mirror's own: all of it first, then what was added since.

Called by `map_reader`. `advance` reads as far as the topic goes at that moment, open transactions included:
it waits until they are decided. So what a transaction wrote to two topics is seen in both by whoever reads
one after the other, in any order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from uuid import UUID

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.committed import committed_batches
from millrace.broker.client.offsets import EARLIEST, LATEST
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition, fetch
from millrace.broker.errors import (
    KafkaError,
    LeaderNotAvailable,
    OffsetOutOfRange,
    RequestTimedOut,
    error_for_code,
)
from millrace.broker.protocol.batch import verify_crc
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID
from millrace.broker.protocol.records import Record, read_records

MAX_WAIT_MS = 100
PARTITION_MAX_BYTES = 4 << 20
# A worker that reads this carries batches meanwhile.
RECORDS_A_TURN = 200
# A transaction of a worker that was killed ends by its timeout (15 s), or earlier by fencing.
LIMIT_S = 45.0


class TopicTail:
    """See the module's text. `on_reset` is called when the topic is another one than before: what was read
    of the old one is void."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        on_record: Callable[[Record], None],
        on_reset: Callable[[], None],
        purpose: str,
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._on_record = on_record
        self._on_reset = on_reset
        self._purpose = purpose
        self._topic_id: UUID | None = None
        self._positions: dict[int, int] = {}

    async def advance(self, numbers: Collection[int] | None = None) -> int:
        """Reads on, all partitions or only `numbers` (the same at each call); gives the partition count, 0
        while there is no such topic.

        Raises what the cluster says, and RequestTimedOut when a transaction stays open too long.
        """
        view = await self._cluster.metadata([self._topic], max_age_ms=0)
        known = view.topics.get(self._topic)
        if known is None:
            self._reset(None)
            return 0
        if self._topic_id not in (None, NO_TOPIC_ID, known.topic_id) and known.topic_id != NO_TOPIC_ID:
            self._reset(known.topic_id)
        self._topic_id = known.topic_id
        wanted = [number for number in known.partitions if numbers is None or number in numbers]
        ends = await self._cluster.list_offsets({(self._topic, number): LATEST for number in wanted})
        new = {(self._topic, number): EARLIEST for number in wanted if number not in self._positions}
        if new:
            begins = await self._cluster.list_offsets(new)
            self._positions |= {number: begins[self._topic, number].offset for _, number in new}
        left = {number: ends[self._topic, number].offset for number in wanted}
        if any(self._positions[number] > end for number, end in left.items()):
            self._reset(self._topic_id)  # the log lost what had been read
            return await self.advance(numbers)
        try:
            to_read = sum(end - self._positions[number] for number, end in left.items())
            async with asyncio.timeout(LIMIT_S + to_read / 100_000):
                await self._read_until(left)
        except TimeoutError:
            raise RequestTimedOut(
                f"{self._cluster}: a transaction on topic {self._topic} stays open; ask again later"
            ) from None
        return len(known.partitions)

    def _reset(self, topic_id: UUID | None) -> None:
        if self._positions or self._topic_id is not None:
            self._on_reset()
        self._positions.clear()
        self._topic_id = topic_id

    async def _read_until(self, ends: dict[int, int]) -> None:
        while left := [number for number, end in ends.items() if self._positions[number] < end]:
            for answer in await self._cluster.retrying(lambda left=left: self._fetch(left)):  # type: ignore[misc]
                if answer.error_code == OffsetOutOfRange.code:
                    await self._skip_what_is_gone(answer.partition)
                else:
                    await self._take(answer)

    async def _fetch(self, numbers: Collection[int]) -> list[FetchedPartition]:
        """One fetch from each leader; raises only where no answer is of use."""
        view = await self._cluster.metadata([self._topic])
        groups = view.by_leader([(self._topic, number) for number in numbers])
        useful: list[FetchedPartition] = []
        problem: KafkaError | None = None
        if groups.pop(None, []):
            self._cluster.invalidate()
            problem = LeaderNotAvailable(f"{self._cluster}: topic {self._topic}: a partition has no leader")
        for node_id, keys in groups.items():
            answers = await fetch(
                self._cluster,
                node_id or 0,
                {key: FetchPosition(self._positions[key[1]]) for key in keys},
                max_wait_ms=MAX_WAIT_MS,
                partition_max_bytes=PARTITION_MAX_BYTES,
                read_committed=True,
                purpose=self._purpose,
            )
            for answer in answers:
                if answer.error_code in (0, OffsetOutOfRange.code):
                    useful.append(answer)
                else:
                    what = f"{self._cluster}: reading {self._topic}-{answer.partition}"
                    problem = error_for_code(
                        answer.error_code, f"{what}: {error_for_code(answer.error_code)}"
                    )
        if problem is not None and not useful:
            raise problem
        return useful

    async def _skip_what_is_gone(self, number: int) -> None:
        key = (self._topic, number)
        begin = (await self._cluster.list_offsets({key: EARLIEST}))[key].offset
        self._positions[number] = max(begin, self._positions[number])

    async def _take(self, answer: FetchedPartition) -> None:
        since_turn = 0
        position = self._positions[answer.partition]
        for batch, header, is_data in committed_batches(answer.records, answer.aborted):
            verify_crc(batch, 0, header)
            if is_data:
                for record in read_records(batch):
                    if record.offset >= position:
                        self._on_record(record)
            position = max(position, header.next_offset)
            since_turn += header.record_count
            if since_turn >= RECORDS_A_TURN:
                since_turn = 0
                await asyncio.sleep(0)
        self._positions[answer.partition] = position
