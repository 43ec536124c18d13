"""Members of a group and its coordinator, both the product's own, over a network that loses and delays.

Used by `test_group_members`. `GroupMember` asks through a `Line`, which hands requests to the broker's
handlers over a real `GroupCoordinator`; the group's log is in memory, time is the virtual loop's. What a
worker does with its share is as in the mirror: it keeps its work through a rebalance and names it when it
joins, and the leader gives nobody what another has named.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Coroutine, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from millrace.broker.client.group_member import GroupMember
from millrace.broker.errors import ClusterUnreachable, RequestTimedOut
from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.server.handlers import heartbeat, join_group, leave_group, sync_group
from tests.unit.groups.conftest import MemoryOffsetsLog

if TYPE_CHECKING:
    from tests.simulation.test_group_members import History

GROUP = "workers"
PARTITIONS = frozenset(f"flights-{number}" for number in range(6))
TAKING, WORKING, GIVING_BACK, JOINING = "taking its share", "working", "giving back", "joining"
PHASES = {TAKING, WORKING, GIVING_BACK, JOINING}
"""What a worker with a seat is at."""
HANDLERS = {
    "JoinGroupRequest": (join_group, 7),
    "SyncGroupRequest": (sync_group, 5),
    "HeartbeatRequest": (heartbeat, 4),
    "LeaveGroupRequest": (leave_group, 4),
}


class Office:
    """The coordinator, which may be replaced by one that reads the same log."""

    def __init__(self, rng: random.Random) -> None:
        self._log = MemoryOffsetsLog(1)
        self._config = GroupConfig(initial_rebalance_delay_ms=rng.choice((0, 3_000)))
        self._ids = itertools.count(1)
        self._timers: asyncio.Task[None] | None = None

    @property
    def members(self) -> set[str]:
        return {member.member_id for member in self.groups.describe(GROUP).members}

    async def open(self) -> None:
        self.groups = GroupCoordinator(
            self._config,
            self._log,
            clock_ms=_now_ms,
            steady_ms=_now_ms,
            new_id=lambda: str(next(self._ids)),
        )
        await self.groups.load(0)
        self._timers = asyncio.create_task(self.groups.run())

    async def close(self) -> None:
        assert self._timers is not None
        self._timers.cancel()
        await self.groups.close()

    async def serve(self, request: Any, client_id: str) -> Any:
        handler, version = HANDLERS[type(request).__name__]
        head = SimpleNamespace(api_key=handler.API, version=version, client_id=client_id)
        context: Any = SimpleNamespace(
            broker=SimpleNamespace(groups=self.groups), head=head, client_address="worker"
        )
        return await handler.handle(request, context)


def _now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1000)


class Line:
    """What a member uses of a `Cluster`: one worker's way to the coordinator. On a connection (one for each
    purpose) nothing is read while an answer to what was read before is held back."""

    name, trouble = "ewr", None

    def __init__(self, history: History, name: str) -> None:
        self._history, self._name = history, name
        self.request_timeout_ms = history.random.choice((2_000, 30_000))
        self._turns: dict[str, asyncio.Lock] = {}
        self.is_cut = self.is_refused = False
        self.loss = 0.0

    def __str__(self) -> str:
        return self.name

    async def coordinator(self, _group_id: str) -> int:
        return await self.connection(1, "")

    async def connection(self, _node_id: int, _purpose: str) -> int:
        await self._travel()
        if self.is_refused:
            raise ClusterUnreachable("refused")
        if self.is_cut:
            await asyncio.sleep(self.request_timeout_ms / 1000)
            raise ClusterUnreachable("no answer")
        return 1

    def forget_coordinator(self, _group_id: str) -> None:
        """It is always the same."""

    def close_purpose(self, purpose: str) -> None:
        self._turns.pop(purpose, None)

    async def request(self, request: Any, *, node_id: int, purpose: str, timeout_ms: float | None) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        turn = self._turns.setdefault(purpose, asyncio.Lock())
        self._history.spawn(self._carry(turn, request, answer))
        try:
            async with asyncio.timeout((timeout_ms or self.request_timeout_ms) / 1000):
                return await answer
        except TimeoutError:
            raise RequestTimedOut("not answered") from None

    async def _carry(self, turn: asyncio.Lock, request: Any, answer: asyncio.Future[Any]) -> None:
        """It goes on when the sender has given it up."""
        await self._travel()
        if self._is_lost():
            return
        async with turn:
            answered = await self._history.office.serve(request, self._name)
        await self._travel()
        if not (answer.done() or self._is_lost()):
            answer.set_result(answered)

    def _is_lost(self) -> bool:
        return self.is_cut or self.is_refused or self._history.random.random() < self.loss

    async def _travel(self) -> None:
        rng = self._history.random
        await asyncio.sleep(rng.choice((0.001, 0.001, 0.02, 0.5 if self.loss else 0.001)) * rng.random())


class Worker:
    """One process, from its start to its death."""

    def __init__(self, history: History, name: str, session_ms: int, rebalance_ms: int) -> None:
        self._history, self.name = history, name
        self.carries: frozenset[str] = frozenset()
        self.phase = JOINING
        self.is_alive = True
        self.no_member_since_s: float | None = None
        self.stands_still_s = 0.0
        """How long the next piece of its work takes."""
        self.line = Line(history, name)
        cluster: Any = self.line
        self.member = GroupMember(
            cluster,
            GROUP,
            protocol_type="mirror",
            protocols=lambda: [("v1", json.dumps(sorted(self.carries)).encode())],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
            assign=self._assign,
            session_timeout_ms=session_ms,
            rebalance_timeout_ms=rebalance_ms,
            rng=random.Random(history.random.random()),
        )
        self.member.start()
        history.spawn(self.member.wait())

    def kill(self) -> None:
        self.is_alive = False
        self.carries = frozenset()
        self.member.abandon()

    async def _work(self) -> None:
        length_s, self.stands_still_s = self.stands_still_s, 0.0
        await asyncio.sleep(length_s or self._history.random.random())

    async def _on_assign(self, share: bytes) -> None:
        self.phase = TAKING
        given = frozenset(json.loads(share or b"[]"))
        assert self.carries <= given, f"{self.name} is not given what it named: {self.carries - given}"
        await self._work()
        self.carries = given
        self.phase = WORKING

    async def _on_revoke(self) -> None:
        self.phase = GIVING_BACK
        await self._work()
        self.phase = JOINING

    async def _on_lost(self) -> None:
        self._history.lost_while[self.phase] += 1
        self.carries = frozenset()
        self.phase = JOINING

    async def _assign(self, members: Mapping[str, bytes]) -> dict[str, bytes]:
        """Everyone keeps what it names; the rest goes to those who have least."""
        shares = {member: set(json.loads(named)) for member, named in sorted(members.items())}
        named = [partition for share in shares.values() for partition in share]
        assert len(named) == len(set(named)), f"two members of one generation carry the same: {shares}"
        await self._work()
        for partition in sorted(PARTITIONS - set(named)):
            min(shares.values(), key=len).add(partition)
        return {member: json.dumps(sorted(share)).encode() for member, share in shares.items()}


Act = Callable[[], None]
Story = Coroutine[Any, Any, Any]
