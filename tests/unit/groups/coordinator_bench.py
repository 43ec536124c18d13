"""A coordinator over an offsets topic in memory, and the requests that tests make of it."""

from __future__ import annotations

import asyncio

from kio.schema.errors import ErrorCode

from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.groups.record_layout import decode_key
from millrace.broker.groups.values import (
    CommitRequest,
    JoinRequest,
    Moment,
    OffsetToCommit,
    Protocol,
    SyncRequest,
)
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.records import read_records
from tests.waiting import patience

GROUP = "flights-readers"
WALL_MS = 1_700_000_000_000
SUBSCRIBED_TO_FLIGHTS = bytes.fromhex("0001 00000001 0007 666c6967687473 ffffffff")


class Bench:
    """A coordinator that owns every partition, with two clocks, far apart, that the test turns."""

    def __init__(self, offsets_log, **settings) -> None:
        self.log = offsets_log
        self._turned_ms, self.now_ms = 1_000, WALL_MS
        self._is_by_loop = False
        self.incarnation = 0
        self.commit_timeout_ms = settings.pop("commit_timeout_ms", 5_000)
        self.config = GroupConfig(**{"initial_rebalance_delay_ms": 0, **settings})
        self.groups = self.coordinator()

    def coordinator(self) -> GroupCoordinator:
        ids = iter(range(1_000))
        self.incarnation += 1
        prefix = self.incarnation
        return GroupCoordinator(
            self.config,
            self.log,
            clock_ms=lambda: self.now_ms,
            steady_ms=lambda: self.steady_ms,
            new_id=lambda: f"{prefix}-{next(ids)}",
            commit_timeout_ms=self.commit_timeout_ms,
        )

    def by_the_loops_clock(self) -> Bench:
        """The steady clock is that of the loop (`tests/virtual_clock.py`); nobody turns it."""
        self._is_by_loop = True
        return self

    @property
    def steady_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1000) if self._is_by_loop else self._turned_ms

    @steady_ms.setter
    def steady_ms(self, now_ms: int) -> None:
        self._turned_ms = now_ms

    def pass_time(self, milliseconds: int) -> None:
        """By both clocks; what is due happens."""
        self.steady_ms += milliseconds
        self.now_ms += milliseconds
        self.groups.tick(Moment(steady_ms=self.steady_ms, now_ms=self.now_ms))

    async def start(self) -> Bench:
        for partition in range(self.log.count):
            await self.groups.load(partition)
        return self

    async def restart(self) -> None:
        await self.groups.close()
        self.groups = self.coordinator()
        await self.start()

    def join(self, member_id: str = "", protocols: bytes = SUBSCRIBED_TO_FLIGHTS, **changes):
        request = JoinRequest(
            member_id=member_id,
            new_member_id=self.groups.new_member_id("client", None),
            instance_id=changes.get("instance_id"),
            client_id="client",
            client_host="/127.0.0.1",
            session_timeout_ms=changes.get("session_timeout_ms", 10_000),
            rebalance_timeout_ms=30_000,
            protocol_type=changes.get("protocol_type", "consumer"),
            protocols=(Protocol("range", protocols),),
            requires_known_member_id=False,
            can_skip_assignment=True,
        )
        return self.groups.join(changes.get("group", GROUP), request)

    async def stable_member(self, **changes) -> tuple[str, int]:
        joined = await self.join(**changes)
        sync = SyncRequest(joined.member_id, None, joined.generation, None, None, {joined.member_id: b"all"})
        assert (await self.groups.sync(changes.get("group", GROUP), sync)).error is ErrorCode.none
        return joined.member_id, joined.generation

    async def commit(self, offset: int, member_id="", generation=-1, topic="flights", group=GROUP, **extra):
        offsets = {(topic, 0): OffsetToCommit(offset, -1, extra.get("metadata", ""))}
        answers = await self.groups.commit(group, CommitRequest(member_id, None, generation, offsets))
        return answers[topic, 0]

    def committed(self, topic="flights", group=GROUP) -> int | None:
        _, found = self.groups.fetch_offsets(group, [(topic, 0)])
        return found[topic, 0].offset if found[topic, 0] is not None else None

    def log_records(self):
        batches = self.log.batches.get(coordinator_partition(GROUP, self.log.count), [])
        return [(decode_key(r.key), r.value) for batch in batches for r in read_records(batch)]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, patience(120)))
