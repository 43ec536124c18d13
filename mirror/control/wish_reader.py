"""Follows the control topic: every worker hears every wish, at its start and from then on within moments.

Run by `worker`; `control` writes through it. What the records mean is `wishes`' rule; what a wish does to a
partition is the callbacks' part, here is only the reading.

Invariants:
- no partition is begun before the topic was read to the end that it had (`ready`): a paused partition does
  not run for a moment after a restart;
- a topic that was deleted and made again is read anew, from nothing: its old wishes are gone with it. So is
  a log that an election which was not clean has cut: what was read of it may not be there any more, and the
  end that is waited for neither. Until it has been read the old wishes hold, so nothing runs for a moment
  that is still paused.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.committed import committed_batches
from millrace.broker.client.offsets import EARLIEST, LATEST
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.client.retry import BackOff
from millrace.broker.errors import (
    LeaderNotAvailable,
    OffsetOutOfRange,
    UnknownTopicOrPartition,
    error_for_code,
)
from millrace.broker.protocol.batch import verify_crc
from millrace.broker.protocol.records import read_records
from millrace.mirror.control.wishes import Scope, Wishes, WishKind, WishRecord
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES, NewFailures, ensure_topic
from millrace.mirror.topics.own_topics import WISHES

log = structlog.get_logger("millrace.mirror.control.wish_reader")

# A long poll: an idle mirror asks once in this time, a wish is answered at once.
MAX_WAIT_MS = 2_000
READ_BACK_OFF = BackOff(first_ms=200, limit_ms=5_000)
PURPOSE = "wishes"
_ANOTHER_LOG = (OffsetOutOfRange.code, UnknownTopicOrPartition.code)


class WriteRecords(Protocol):
    """`SystemRecords.write`."""

    def __call__(
        self,
        topic: str,
        records: Sequence[WishRecord],
        *,
        partition_of: bytes | None = None,
        configs: Mapping[str, str],
    ) -> Awaitable[object]: ...


class WishReader:
    """See the module's text. `on_change(wishes)` is called after records that changed something, and once
    when all that was there has been read; `on_retry(scope)` for each retry that arrives after that."""

    def __init__(
        self,
        target: Cluster,
        topic: str,
        replication_factor: int,
        write: WriteRecords,
        on_change: Callable[[Wishes], None],
        on_retry: Callable[[Scope], None],
    ) -> None:
        self.wishes = Wishes()
        self._target = target
        self._topic = topic
        self._replication_factor = replication_factor
        self._write = write
        self._on_change = on_change
        self._on_retry = on_retry
        self._reading = Wishes()
        self._ready = asyncio.Event()
        self._log_id: object = None
        self._position = 0
        self._epoch = -1  # the leader's, of the last batch that was read
        self._end = 0

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set()

    async def ready(self) -> None:
        """Returns when every wish that was there has been read."""
        await self._ready.wait()

    async def write(self, records: Sequence[WishRecord]) -> None:
        """Returns when the target has the records. Goes on trying until it is cancelled."""
        await self._write(self._topic, records, configs=WISHES.configs)

    async def run(self) -> None:
        """Reads until cancelled; a target that is away is asked again."""
        failures, failure_count = NewFailures(), 0
        while True:
            try:
                await self._read_on()
                failure_count = 0
                failures.over()
            except CLUSTER_FAILURES as error:
                if failures.is_news(error):
                    log.warning("cannot read the wishes now", topic=self._topic, error=str(error))
                failure_count += 1
                self._target.invalidate()
                await asyncio.sleep(READ_BACK_OFF.delay_ms(failure_count, random.random()) / 1000)

    async def _read_on(self) -> None:
        view = await self._target.metadata([self._topic])
        known = view.topics.get(self._topic)
        if known is None:
            await ensure_topic(self._target, self._topic, 1, self._replication_factor, WISHES.configs)
            view = await self._target.metadata([self._topic], max_age_ms=0)
            known = view.topics.get(self._topic)
        if known is None:
            raise LeaderNotAvailable(f"{self._topic} was made and is not known everywhere yet")
        leader = view.leader(self._topic, 0)
        if leader is None:
            raise LeaderNotAvailable(f"{self._topic}-0 has no leader now")
        if known.topic_id != self._log_id:
            await self._begin(known.topic_id)
        await self._fetch(leader)

    async def _begin(self, log_id: object) -> None:
        """Reads from the first record on, and notes where the log ends now. Until that is reached, what was
        wished before still holds."""
        key = (self._topic, 0)
        self._end = (await self._target.list_offsets({key: LATEST}))[key].offset
        self._position = (await self._target.list_offsets({key: EARLIEST}))[key].offset
        self._epoch = -1
        if self._log_id is not None:
            log.warning("the control topic is read anew", topic=self._topic)
        self._reading = Wishes()
        self._log_id = log_id
        self._publish(changed=False)

    async def _fetch(self, leader: int) -> None:
        key = (self._topic, 0)
        (answer,) = await fetch(
            self._target,
            leader,
            {key: FetchPosition(self._position, last_fetched_epoch=self._epoch)},
            max_wait_ms=MAX_WAIT_MS,
            read_committed=True,
            purpose=PURPOSE,
        )
        if answer.error_code:
            if answer.error_code in _ANOTHER_LOG:
                self._log_id = ""  # no topic's id
            raise error_for_code(answer.error_code, f"{self._target}: reading {self._topic}")
        if answer.diverging is not None:
            self._log_id = ""
            return
        changed, began_at = False, self._position
        for batch, header, is_data in committed_batches(answer.records, answer.aborted):
            verify_crc(batch, 0, header)
            if is_data:
                changed |= self._take(batch)
            self._position = max(self._position, header.next_offset)
            self._epoch = header.leader_epoch
        self._publish(changed)
        if self.wishes is not self._reading and self._position == began_at:
            await self._check_end()

    async def _check_end(self) -> None:
        """The end that was noted is not reached, and nothing comes: it may have been cut off. A leader that
        waits until others have it too names no end (KIP-207), which is raised."""
        key = (self._topic, 0)
        end = (await self._target.list_offsets({key: LATEST}))[key].offset
        if end < self._end:
            log.warning("the control topic is shorter than it was", topic=self._topic, was=self._end, now=end)
            self._log_id = ""

    def _take(self, batch: memoryview) -> bool:
        """Whether anything may have changed."""
        changed = False
        for record in read_records(batch):
            if record.offset < self._position:
                continue
            wish = self._reading.apply(record.key, record.value)
            if wish is None:
                log.warning("a record is no wish that is understood here", offset=record.offset)
            if wish is None or wish.kind is not WishKind.RETRY:
                changed = True
            elif not wish.is_removal and self.wishes is self._reading:
                self._on_retry(wish.scope)
        return changed

    def _publish(self, changed: bool) -> None:
        """What has been read to the end counts."""
        if self.wishes is not self._reading and self._position >= self._end:
            self.wishes = self._reading
            self._ready.set()
            changed = True
        if changed and self.wishes is self._reading:
            self._on_change(self.wishes)
