"""Drives one group through virtual time, and stands in for the offsets topic."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import KafkaError, RecordTooLarge
from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.membership import Group
from millrace.broker.groups.values import (
    AnswerJoin,
    AnswerSync,
    CommitRequest,
    Decision,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    Moment,
    OffsetToCommit,
    Persist,
    Protocol,
    SyncRequest,
    SyncResult,
)
from millrace.broker.protocol.batch import stamp_offset_and_epoch
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.records import read_records

ROUND_ROBIN = (Protocol("roundrobin", b"rr"),)
WALL_MS = 1_700_000_000_000


class GroupDriver:
    """One `Group`, its two clocks, and everything it was ever answered. The clocks are far apart, so that one
    is not taken for the other; only `now_ms` may jump."""

    def __init__(self, config: GroupConfig, group: Group | None = None) -> None:
        self.group = group or Group("flights-readers", config)
        self.steady_ms, self.now_ms = 1_000, WALL_MS
        self.joins: dict[int, JoinResult] = {}
        self.syncs: dict[int, SyncResult] = {}
        self.writes: list[Persist] = []
        self.saves_at_once = True
        self.tickets = itertools.count(1)
        self.ids = itertools.count(1)

    def moment(self) -> Moment:
        return Moment(steady_ms=self.steady_ms, now_ms=self.now_ms)

    def carry_out(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case AnswerJoin(ticket, result):
                    assert ticket not in self.joins, "a ticket was answered twice"
                    self.joins[ticket] = result
                case AnswerSync(ticket, result):
                    assert ticket not in self.syncs, "a ticket was answered twice"
                    self.syncs[ticket] = result
                case Persist():
                    self.writes.append(decision)
                    if self.saves_at_once:
                        self.saved(decision)

    def saved(self, write: Persist, error: ErrorCode = ErrorCode.none) -> None:
        self.carry_out(self.group.persisted(write.write_id, error, self.moment()))

    def advance(self, milliseconds: int) -> None:
        """Let time pass, waking the group exactly when it asked to be woken."""
        end_ms = self.steady_ms + milliseconds
        while (due_ms := self.group.deadline_ms()) is not None and due_ms <= end_ms:
            self._wake(max(self.steady_ms, due_ms))
        self._wake(end_ms)

    def _wake(self, steady_ms: int) -> None:
        self.now_ms += steady_ms - self.steady_ms
        self.steady_ms = steady_ms
        self.carry_out(self.group.tick(self.moment()))

    def join(
        self,
        member_id: str = "",
        *,
        instance_id: str | None = None,
        protocols: tuple[Protocol, ...] = ROUND_ROBIN,
        protocol_type: str = "consumer",
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 30_000,
        known_id_required: bool = False,
        can_skip_assignment: bool = True,
    ) -> int:
        ticket = next(self.tickets)
        request = JoinRequest(
            member_id,
            f"m{next(self.ids)}",
            instance_id,
            "client",
            "/127.0.0.1",
            session_timeout_ms,
            rebalance_timeout_ms,
            protocol_type,
            protocols,
            known_id_required,
            can_skip_assignment,
        )
        self.carry_out(self.group.join(request, ticket, self.moment()))
        return ticket

    def sync(
        self,
        member_id: str,
        generation: int,
        assignments: dict[str, bytes] | None = None,
        instance_id: str | None = None,
        protocol_name: str | None = None,
    ) -> int:
        ticket = next(self.tickets)
        request = SyncRequest(member_id, instance_id, generation, None, protocol_name, assignments or {})
        self.carry_out(self.group.sync(request, ticket, self.moment()))
        return ticket

    def heartbeat(self, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        error, decisions = self.group.heartbeat(member_id, instance_id, generation, self.moment())
        self.carry_out(decisions)
        return error

    def leave(self, member_id: str, instance_id: str | None = None) -> ErrorCode:
        results, decisions = self.group.leave([LeaveRequest(member_id, instance_id)], self.moment())
        self.carry_out(decisions)
        return results[0].error

    def check_commit(self, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        offsets = {("flights", 0): OffsetToCommit(1, -1, "")}
        return self.group.check_commit(
            CommitRequest(member_id, instance_id, generation, offsets), self.steady_ms
        )

    def settle(self, *tickets: int) -> list[str]:
        """Let everyone whose join was answered sync, the leader assigning each member its own id."""
        joined = [self.joins[ticket] for ticket in tickets]
        assignments = {result.member_id: result.member_id.encode() for result in joined}
        leader = next(result for result in joined if result.member_id == result.leader)
        for result in joined:
            self.sync(result.member_id, result.generation, assignments if result is leader else None)
        return [result.member_id for result in joined]


@pytest.fixture
def new_driver() -> Callable[..., GroupDriver]:
    def make(group: Group | None = None, **settings: int) -> GroupDriver:
        return GroupDriver(GroupConfig(**{"initial_rebalance_delay_ms": 0, **settings}), group)

    return make


class MemoryOffsetsLog:
    """The offsets topic in memory. `failure` refuses appends; while `gate` is closed what is appended is in
    the log but not committed, and `replicated_failure` is what such writes come to."""

    def __init__(self, partition_count: int = 4) -> None:
        self.batches: dict[int, list[bytes]] = {}
        self.next_offset: dict[int, int] = {}
        self.failure: Exception | None = None
        self.replicated_failure: KafkaError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.count = partition_count
        self.most_bytes = 1 << 20
        self._waiting: set[asyncio.Task[None]] = set()

    def partition_count(self) -> int:
        return self.count

    def append_now(
        self, partition: int, batch: bytes, *, is_limited: bool = False
    ) -> tuple[int, asyncio.Future[None] | None]:
        if is_limited and len(batch) > self.most_bytes:
            raise RecordTooLarge
        if self.failure is not None:
            raise self.failure
        base_offset = self.next_offset.get(partition, 0)
        stamped = bytearray(batch)
        stamp_offset_and_epoch(stamped, base_offset, 0)
        self.batches.setdefault(partition, []).append(bytes(stamped))
        self.next_offset[partition] = base_offset + len(read_records(stamped))
        if self.gate.is_set() and self.replicated_failure is None:
            return base_offset, None
        committed = asyncio.ensure_future(self._committed(self.gate))
        self._waiting.add(committed)
        committed.add_done_callback(self._waiting.discard)
        return base_offset, committed

    async def _committed(self, gate: asyncio.Event) -> None:
        await gate.wait()
        if self.replicated_failure is not None:
            raise self.replicated_failure

    async def until_committed(self, partition: int, offset: int) -> None:
        assert offset == self.next_offset.get(partition, 0)
        await self.gate.wait()

    def append_marker(self, partition: int, producer_id: int, *, committed: bool) -> int:
        """Where it stands."""
        return self.append_now(partition, bytes(build_marker(producer_id, 0, 0, committed, 0)))[0]

    async def read_all(self, partition: int) -> AsyncIterator[memoryview]:
        for batch in list(self.batches.get(partition, [])):
            await asyncio.sleep(0)
            yield memoryview(batch)


@pytest.fixture
def offsets_log() -> MemoryOffsetsLog:
    return MemoryOffsetsLog()
