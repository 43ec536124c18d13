"""Membership in a group: join, share out work, keep the seat, leave. For any protocol type.

The broker's coordinator decides who is in; one member, the leader, shares out the work with the caller's
`assign`; each member gets its share as bytes in `on_assign`. The mirror's workers use it with a protocol
type of their own, consumers with "consumer".

States, as one task runs through them (`_run`):

    state      leaves by                                       to
    joining    join and sync succeed                           assigned (on_assign)
               unknown member, illegal generation              joining, under a new member id
                                                               (on_lost first, if a seat was held)
               retriable error, lost connection                joining, after a pause
               no word of the coordinator for too long         joining, under a new member id
                                                               (on_lost first, if a seat was held)
               refusal that trying again cannot cure           failed
    assigned   heartbeat says that the group rebalances,
               or `rejoin()` is called                         joining (on_revoke first)
               heartbeat says that this is no member,
               or none got through for a session timeout       joining (on_lost first)
               close()                                         left (on_revoke first)

Heartbeats run all the time between sync and the next join, also while `on_assign` and `on_revoke` work, so
that draining takes as long as it must (up to the rebalance timeout). A member that has not reached the
coordinator for a session timeout calls itself lost, because by then others may have its work. That holds in
every state: `on_assign` (and `on_revoke`, where there is an `on_lost`) is cancelled when the seat is lost
meanwhile, and who kept its work through a rebalance is lost when it cannot join again. Only while the
coordinator holds an answer back does silence mean nothing, for a rebalance timeout: it keeps the seats of
those who wait.

A static member (`instance_id`, KIP-345) keeps its seat when it ends: who joins under the name within the
session timeout takes the seat over, with the share that was last given out and in the same generation, and
whoever had it before is refused everything (FENCED_INSTANCE_ID). The group may also begin a generation
without a static member that is late, where a dynamic one would lose its seat: what it kept through the
rebalance may then be others', so a member that finds such a generation behind it was lost (`on_lost`). One
that ends within a join leaves all the same: it may have become the leader, for whose shares all would wait
until its session is over. That holds between two tries, too, where the first one's request was not answered.
(Apache Kafka's own consumer never sends LeaveGroup for a static member, so there all wait: for the rebalance
timeout, as whoever joins needs no heartbeats, and then for the session of the leader that nobody is.)

Rebalances are eager: everything is given back before anything is given out. What is asked of the coordinator
is in `group_requests.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets, fetch_offsets
from millrace.broker.client.group_requests import GroupRequests
from millrace.broker.client.join_steps import HELD_BACK, WAITED_FOR, JoinStep
from millrace.broker.client.retry import REQUEST_BACK_OFF
from millrace.broker.errors import (
    AccessRefused,
    ClusterUnreachable,
    FencedInstanceId,
    IllegalGeneration,
    KafkaError,
    MemberIdRequired,
    MillraceError,
    ProtocolError,
    RebalanceInProgress,
    RequestTimedOut,
    UnknownMemberId,
)
from millrace.broker.protocol.topic_partition import TopicPartition

log = structlog.get_logger("millrace.broker.client.group_member")

OnAssign: TypeAlias = Callable[[bytes], Awaitable[None]]
OnRevoke: TypeAlias = Callable[[], Awaitable[None]]
Assign: TypeAlias = Callable[[Mapping[str, bytes]], Mapping[str, bytes] | Awaitable[Mapping[str, bytes]]]

# The seat is gone, but there is another to be had.
_NOT_A_MEMBER = (UnknownMemberId, IllegalGeneration)
# How long a seat is waited for before that is told, and told again.
_TOLD_AFTER_S = 10.0
_TOLD_AGAIN_AFTER_S = 30.0
# A step of a join that takes longer than this is told.
_LONG_S = 5.0


class GroupMember:
    """See the module's text. An async context manager: entering joins in the background, leaving leaves.

    `protocols` are (name, metadata) in order of preference, or a function that gives them anew at each join.
    `assign(members)` runs on the leader: metadata by member id in, share by member id out (plain or async;
    members it leaves out get an empty share; `protocol` is the one chosen). Callbacks run one at a time, and
    an error in one ends the membership: `wait()` raises it.
    """

    def __init__(
        self,
        cluster: Cluster,
        group_id: str,
        *,
        protocol_type: str,
        protocols: Sequence[tuple[str, bytes]] | Callable[[], Sequence[tuple[str, bytes]]],
        on_assign: OnAssign,
        on_revoke: OnRevoke,
        assign: Assign,
        on_lost: OnRevoke | None = None,
        instance_id: str | None = None,
        session_timeout_ms: int = 10_000,
        rebalance_timeout_ms: int = 60_000,
        heartbeat_interval_ms: int | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.cluster = cluster
        self.group_id = group_id
        self.protocol_type = protocol_type
        self.instance_id = instance_id
        self.member_id = ""
        self.generation = -1
        self.protocol: str | None = None
        self.is_leader = False
        self._protocols = protocols
        self._on_assign = on_assign
        self._on_revoke = on_revoke
        self._on_lost = on_lost or on_revoke
        # Whoever keeps work through a rebalance must hear that the seat was lost within one; with plain
        # `on_revoke` everything was given back before.
        self._on_lost_within_join = on_lost
        self._assign = assign
        self._session_timeout_ms = session_timeout_ms
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self._heartbeat_interval_ms = heartbeat_interval_ms or max(1, session_timeout_ms // 3)
        self._rng = rng or random.Random()
        self._requests = GroupRequests(
            cluster,
            group_id,
            protocol_type,
            instance_id,
            session_timeout_ms,
            rebalance_timeout_ms,
            purpose=f"group {group_id} {id(self):x}",
        )
        self._wake = asyncio.Event()
        self._wants_rejoin = False
        self._closing = False
        self._lost_by: MillraceError | None = None
        self._heard_at = 0.0  # the coordinator has taken this for a member so late at least
        self._trouble = ""
        self._not_let_in = asyncio.Event()
        self._step: JoinStep | None = None  # None: a share is held, or nothing was begun
        self._step_began_at = 0.0
        # When a join last had a turn; whether it had none for a session since it was begun.
        self._turned_at, self._was_frozen = math.inf, False
        # A try has ended in which the others wait for this member, as far as is known here.
        self._left_waiting = False
        # A join under the instance id went out: its seat, or one of before, may be there under an unknown id.
        self._may_sit_by_name = False
        self._task: asyncio.Task[None] | None = None

    # --- for the caller -----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to join, in the background."""
        if self._task is not None:
            raise RuntimeError(f"the member of group {self.group_id} was started before")
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def trouble(self) -> str:
        """Why there is no seat now, while it is joined in vain; otherwise empty."""
        if self._closing:
            return ""
        since_s = asyncio.get_running_loop().time() - self._step_began_at
        if self._step is None or since_s <= _LONG_S:
            return self._trouble
        away = self.cluster.trouble or ""
        if self._step is JoinStep.REACHING:
            return self._trouble or away
        return f"{self._step.value}; {away}" if away else self._step.value

    @property
    def holds_seat(self) -> bool:
        """Whether the coordinator still keeps this member's seat, as far as the clock tells: also who was
        frozen for longer than that hears it here, before any task has had its turn."""
        now, session_s = asyncio.get_running_loop().time(), self._session_timeout_ms / 1000
        was_frozen = self._was_frozen or now - self._turned_at >= session_s
        return self.generation >= 0 and not was_frozen and now < self._seat_ends_at()

    def rejoin(self) -> None:
        """Make the group share out its work anew (the caller's metadata or the work itself changed)."""
        self._wants_rejoin = True
        self._wake.set()

    async def wait(self) -> None:
        """Wait until the membership ends: by `close`, or by the error that this raises."""
        if self._task is None:
            raise RuntimeError(f"the member of group {self.group_id} was not started")
        await asyncio.shield(self._task)

    def abandon(self) -> None:
        """Stop at once, with no word to the coordinator: the process ends by an error."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()

    async def close(self, *, leave: bool | None = None) -> None:
        """Give the share back (`on_revoke`), leave the group, stop. Idempotent; raises nothing of the past.

        `leave` says whether to tell the coordinator: by default dynamic members do, so that the others need
        not wait for a session timeout, and static ones only within a join, so that a restart finds its seat.
        """
        self._closing = True
        self._wake.set()
        if self._task is None:
            return
        await asyncio.wait([self._task])
        is_waited_for = self._step in WAITED_FOR or self._left_waiting
        if leave if leave is not None else self.instance_id is None or is_waited_for:
            await self._leave()
        self._requests.hang_up()
        if not self._task.cancelled():
            self._task.exception()  # seen: `wait` is where it is raised

    async def commit(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """Commit as this member of this generation; see `group_offsets.commit_offsets`."""
        await commit_offsets(
            self.cluster,
            self.group_id,
            offsets,
            generation=self.generation,
            member_id=self.member_id,
            instance_id=self.instance_id,
        )

    async def committed(
        self, partitions: Collection[TopicPartition] | None = None
    ) -> dict[TopicPartition, CommittedOffset]:
        """What the group has committed; see `group_offsets.fetch_offsets`."""
        return await fetch_offsets(self.cluster, self.group_id, partitions)

    # --- the states ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._closing:
            share = await self._join_until_assigned()
            if share is None:
                return
            await self._hold(share)

    async def _join_until_assigned(self) -> bytes | None:
        """The share of this member; None when it was closed before it got one."""
        telling = asyncio.get_running_loop().create_task(self._tell_of_waiting())
        try:
            share = await self._join_again_and_again()
            if share is not None:
                self._step, self._was_frozen = None, False
            return share
        finally:
            telling.cancel()
            self._trouble = ""
            self._not_let_in.clear()

    async def _join_again_and_again(self) -> bytes | None:
        failure_count, pause_s = 0, 0.0
        while not self._closing:
            try:
                await self._until_closing(asyncio.sleep(pause_s))
                pause_s = 0.0
                self._wants_rejoin = False
                self._enter(JoinStep.REACHING)
                return await self._until_closing(self._join_and_sync())
            except (MemberIdRequired, RebalanceInProgress):
                continue  # the very next join waits in the server: no pause is needed
            except (KafkaError, ProtocolError, ClusterUnreachable) as error:
                self._trouble = str(error)
                if isinstance(error, AccessRefused):
                    self._not_let_in.set()
                if self._step in WAITED_FOR or self._step is JoinStep.RECORDING:
                    self._left_waiting = True
                self._enter(JoinStep.REACHING)
                if isinstance(error, _NOT_A_MEMBER):
                    if self.generation >= 0 and self._on_lost_within_join is not None:
                        await self._on_lost_within_join()
                    self._forget_seat()
                elif isinstance(error, KafkaError) and not error.retriable:
                    raise
                failure_count += 1
                pause_s = REQUEST_BACK_OFF.delay_ms(failure_count, self._rng.random()) / 1000
        return None

    def _enter(self, step: JoinStep) -> None:
        self._step = step
        self._step_began_at = asyncio.get_running_loop().time()

    async def _tell_of_waiting(self) -> None:
        """One line at intervals: what is waited for may never come, and nothing else would say so. A login or
        a certificate that is refused is told at once: it takes somebody who changes it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TOLD_AFTER_S):
                await self._not_let_in.wait()
        while True:
            log.warning(
                "no seat in the group yet",
                cluster=self.cluster.name,
                group=self.group_id,
                waiting_s=round(loop.time() - began),
                reason=self.trouble or "it is asked for",
            )
            await asyncio.sleep(_TOLD_AGAIN_AFTER_S)

    async def _hold(self, share: bytes) -> None:
        """The assigned state: callbacks with heartbeats beside them, until the share must be given back."""
        self._lost_by = None
        self._wake.clear()
        if self._closing or self._wants_rejoin:
            self._wake.set()
        heartbeats = asyncio.get_running_loop().create_task(self._heartbeat_until_lost())
        # However they end: nobody holds a share for which no seat is kept.
        heartbeats.add_done_callback(lambda _: self._wake.set())
        try:
            await self._while_seated(self._on_assign(share), heartbeats)
            await self._wake.wait()
            if self._lost_by is None:
                if self._on_lost_within_join is None or heartbeats.done():
                    await self._on_revoke()
                else:
                    await self._while_seated(self._on_revoke(), heartbeats)
                    if self._lost_by is not None:
                        await self._on_lost()
            else:
                await self._on_lost()
        finally:
            heartbeats.cancel()
            await asyncio.wait([heartbeats])
        if not heartbeats.cancelled() and (error := heartbeats.exception()) is not None:
            raise error
        if isinstance(self._lost_by, FencedInstanceId):
            raise self._lost_by
        if self._lost_by is not None:
            self._forget_seat()

    @staticmethod
    async def _while_seated(work: Awaitable[None], heartbeats: asyncio.Task[None]) -> None:
        """Do the work, or cancel it when the heartbeats end: what it is for may be others' by then."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, heartbeats], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def _heartbeat_until_lost(self) -> None:
        """Keep the seat. Ends when it is lost; a rebalance only wakes the holder, and the seat is kept."""
        loop = asyncio.get_running_loop()
        session_s = self._session_timeout_ms / 1000
        while self._lost_by is None:
            await asyncio.sleep(self._heartbeat_interval_ms / 1000)
            sent_at = loop.time()
            try:
                async with asyncio.timeout_at(self._heard_at + session_s):
                    await self._requests.heartbeat(self.member_id, self.generation)
                self._heard_at = sent_at
            except RebalanceInProgress:
                self._heard_at = sent_at
                self._wake.set()
            except (*_NOT_A_MEMBER, FencedInstanceId) as error:
                self._lost_by = error
            except TimeoutError:
                silence = f"no heartbeat got through for {self._session_timeout_ms} ms"
                self._lost_by = RequestTimedOut(f"{self.cluster}: group {self.group_id}: {silence}")
            except (KafkaError, ProtocolError, ClusterUnreachable) as error:
                if isinstance(error, KafkaError) and not error.retriable:
                    raise

    async def _until_closing(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do the work, or stop it when the member is closed meanwhile (then None), or when the seat that it
        had is over: then `on_lost`, and RequestTimedOut is raised."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        is_over = False
        try:
            while not (task.done() or self._closing or is_over):
                self._turned_at = loop.time()
                self._wake.clear()
                left_s = self._seat_ends_at() - loop.time()
                waiting = loop.create_task(self._wake.wait())
                try:
                    # A request that goes out meanwhile changes how long the seat lasts.
                    limit_s = max(0.0, min(left_s, self._heartbeat_interval_ms / 1000))
                    await asyncio.wait([task, waiting], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                self._was_frozen |= loop.time() - self._turned_at >= self._session_timeout_ms / 1000
                is_over = loop.time() >= self._seat_ends_at()
        finally:
            self._turned_at = math.inf
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if not task.cancelled():
            return task.result()
        if is_over and not self._closing:
            await self._lose_seat_within_join()
        return None

    def _seat_ends_at(self) -> float:
        """Until when the coordinator keeps the seat of a member that joins again, as far as is known here;
        for ever where there is none, or nothing is kept through a rebalance."""
        if self.generation < 0 or self._on_lost_within_join is None:
            return math.inf
        session_s = self._session_timeout_ms / 1000
        if self._step not in HELD_BACK:
            return self._heard_at + session_s
        return self._step_began_at + self._rebalance_timeout_ms / 1000 + session_s

    async def _lose_seat_within_join(self) -> None:
        what = "not answered" if self._step in HELD_BACK else "not reached"
        # A request that is still out there would hold up all that follow on its connection.
        self._requests.hang_up()
        if self._on_lost_within_join is not None:
            await self._on_lost_within_join()
        self._forget_seat()
        raise RequestTimedOut(f"{self.cluster}: group {self.group_id}: {what} while joining again; seat lost")

    def _hear(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    def _forget_seat(self) -> None:
        self.member_id = ""
        self.generation = -1
        self.is_leader = False
        self._may_sit_by_name = False
        self._left_waiting = False

    # --- requests -----------------------------------------------------------------------------------

    async def _join_and_sync(self) -> bytes:
        answer = await self._join()
        self._enter(JoinStep.SHARING if answer.leader == self.member_id else JoinStep.REACHING)
        if self._was_passed_over(int(answer.generation_id)) and self._on_lost_within_join is not None:
            await self._on_lost_within_join()
            self._wants_rejoin = True  # what it has just claimed it has no more
        self.generation = int(answer.generation_id)
        self.protocol = answer.protocol_name
        self.is_leader = answer.leader == self.member_id
        shares: Mapping[str, bytes] = {}
        if self.is_leader:
            members = {each.member_id: bytes(each.metadata) for each in answer.members}
            assigned = self._assign(members)
            shares = await assigned if inspect.isawaitable(assigned) else assigned
            shares = {member_id: shares.get(member_id, b"") for member_id in members}
        return await self._sync(shares)

    def _was_passed_over(self, generation: int) -> bool:
        """Whether the group had a generation without this member, which was static and late: its leader went
        by an old claim of it. Or with it, and the answer was lost: that is not told apart."""
        return self.instance_id is not None and 0 <= self.generation < generation - 1

    async def _join(self) -> Any:
        protocols = self._protocols() if callable(self._protocols) else self._protocols
        # The answer comes when every member has joined, or at the rebalance timeout.
        answer = await self._requests.join(self.member_id, protocols, self._joining)
        self._enter(JoinStep.REACHING)
        self._left_waiting = False
        if answer.error_code == MemberIdRequired.code:
            self.member_id = answer.member_id
        self._requests.check(answer, "join")
        self._hear()
        self.member_id = answer.member_id
        self._may_sit_by_name = False
        return answer

    def _joining(self) -> None:
        """A request to join goes out."""
        self._enter(JoinStep.JOINING)
        if not self.member_id and self.instance_id is not None:
            self._may_sit_by_name = True

    async def _sync(self, shares: Mapping[str, bytes]) -> bytes:
        step = JoinStep.RECORDING if self.is_leader else JoinStep.FOLLOWING
        # The answer comes when the leader has shared out the work.
        answer = await self._requests.sync(
            self.member_id, self.generation, self.protocol, shares, lambda: self._enter(step)
        )
        if answer.error_code in (0, RebalanceInProgress.code):
            self._hear()
        self._requests.check(answer, "sync")
        return bytes(answer.assignment)

    async def _leave(self) -> None:
        """Tell the coordinator; nothing depends on it, the session timeout says the same later."""
        if not self.member_id and not self._may_sit_by_name:
            return
        member_id = self.member_id
        self._forget_seat()
        # While a request is out, the server may hold its answer back.
        with contextlib.suppress(MillraceError, TimeoutError):
            await self._requests.leave(member_id, beside=self._step is not None)
