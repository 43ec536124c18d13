"""The state machine of one group: who is a member, of which generation, with which assignment.

Pure: events come in with a `Moment`, decisions come out (`values.py`); it never reads a clock, waits,
draws random numbers or does I/O. `coordinator.py` is its only caller in the broker; the tests drive it
through virtual time. Who the members are is in `roster.py`, what has been decided and whom it answers in
`outbox.py`, how long a generation waits for members in `join_wait.py`.

States and the events that move between them (as in Apache Kafka's classic protocol):

    Empty                --join-->                  PreparingRebalance
    PreparingRebalance   --all joined | deadline--> CompletingRebalance   (Empty when nobody is left)
    CompletingRebalance  --assignment persisted-->  Stable
    CompletingRebalance  --join, leave, expiry-->   PreparingRebalance
    Stable               --join, leave, expiry-->   PreparingRebalance
    Empty                --delete-->                Dead

Invariants:

1. A generation has one assignment: it becomes visible in one step, after it is in the log, and only if
   the group is still in the generation it was made for.
2. Requests of an older generation are refused (ILLEGAL_GENERATION), of an older static member with the
   same instance id too (FENCED_INSTANCE_ID).
3. Every ticket is answered exactly once: on completion, on removal, or when a newer request of the
   same member replaces it.
4. A member that waits for an answer does not expire; a dynamic member that does not rejoin before the
   rebalance deadline is removed, a static one stays until its session ends.

Timers: `deadline_ms()` is the soonest time at which `tick()` has something to do. Calling `tick` too often
is harmless. All of them go by the steady clock of the `Moment`: the wall clock may be set back by an hour,
and a join would wait an hour longer, or forward, and every member would expire. That one is only for what is
written down, `state_since_ms`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kio.schema.errors import ErrorCode

from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.join_wait import JoinWait
from millrace.broker.groups.outbox import Outbox
from millrace.broker.groups.roster import Member, Roster
from millrace.broker.groups.subscriptions import CONSUMER_PROTOCOL_TYPE
from millrace.broker.groups.values import (
    CommitRequest,
    Decision,
    DescribedMember,
    GroupDescription,
    GroupSnapshot,
    GroupState,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    Moment,
    SyncRequest,
    SyncResult,
    Ticket,
)

NEW_MEMBER_JOIN_TIMEOUT_MS = 300_000
"""A new member that waits for its first generation is forgotten after this, whatever its session:
its client may be long gone, and nothing heartbeats for it yet."""

_CAN_REBALANCE = {GroupState.EMPTY, GroupState.COMPLETING_REBALANCE, GroupState.STABLE}


def _nothing(*_: object) -> None:
    """A write whose outcome changes nothing here."""


@dataclass(slots=True)
class Group:
    """One group. Every method that takes an event returns the decisions to carry out, in order."""

    group_id: str
    config: GroupConfig
    state: GroupState = GroupState.EMPTY
    state_since_ms: int = 0
    generation: int = 0
    protocol_type: str | None = None
    protocol_name: str | None = None
    roster: Roster = field(default_factory=Roster)
    _unsynced_ids: set[str] = field(default_factory=set, init=False)  # have not asked for an assignment
    _sync_deadline_ms: int | None = field(default=None, init=False)
    _join_wait: JoinWait | None = field(default=None, init=False)
    _assigned_generation: int = field(default=-1, init=False)  # whose assignment is being written
    _outbox: Outbox = field(default_factory=Outbox, init=False)

    @classmethod
    def restore(cls, group_id: str, snapshot: GroupSnapshot, config: GroupConfig, now: Moment) -> Group:
        """The group as the log remembers it."""
        roster = Roster()
        for kept in snapshot.members:
            roster.add(Member.restore(kept, snapshot.protocol_name, now.steady_ms))
        if snapshot.leader in roster.members:
            roster.leader = snapshot.leader
        return cls(
            group_id,
            config,
            state=GroupState.STABLE if snapshot.members else GroupState.EMPTY,
            state_since_ms=snapshot.state_since_ms,
            generation=snapshot.generation,
            protocol_type=snapshot.protocol_type or None,
            protocol_name=snapshot.protocol_name,
            roster=roster,
        )

    # -- events: membership -------------------------------------------------------------------------

    def join(self, request: JoinRequest, ticket: Ticket, now: Moment) -> list[Decision]:
        """A JoinGroup request; its answer comes now or when the rebalance completes."""
        error = self._join_error(request)
        namesake = self.roster.static_member(request.instance_id)
        if error is not ErrorCode.none:
            self._outbox.answer_join(ticket, JoinResult(error, request.member_id))
            if error is ErrorCode.group_max_size_reached and request.member_id in self.roster.members:
                self._remove(self.roster.members[request.member_id], now)
        elif request.member_id:
            self._join_with_id(request, ticket, now)
        elif namesake is not None:
            self._replace_static_member(namesake, request, ticket, now)
        elif request.instance_id is None and request.requires_known_member_id:
            self.roster.pending[request.new_member_id] = now.steady_ms + request.session_timeout_ms
            self._outbox.answer_join(ticket, JoinResult(ErrorCode.member_id_required, request.new_member_id))
        else:
            self._add_member(request.new_member_id, request, ticket, now)
        return self._advance(now)

    def sync(self, request: SyncRequest, ticket: Ticket, now: Moment) -> list[Decision]:
        """A SyncGroup request; the leader's begins the write that makes the generation's assignment."""
        error = self._sync_error(request)
        if error is not ErrorCode.none:
            self._outbox.answer_sync(ticket, SyncResult(error))
            return self._advance(now)
        member = self.roster.members[request.member_id]
        self._unsynced_ids.discard(member.member_id)
        if self.state is GroupState.STABLE:
            member.touch(now.steady_ms)
            self._outbox.answer_sync(ticket, self._assignment_of(member))
            return self._advance(now)
        # A request that still waits is one its client gave up on.
        self._outbox.end_sync(member, SyncResult(ErrorCode.rebalance_in_progress))
        member.sync_ticket = ticket
        if member.member_id == self.roster.leader and self._assigned_generation != self.generation:
            # Once per generation: a leader that repeats itself must not put another assignment in the log.
            self._assigned_generation = self.generation
            self._persist_assignments(request.assignments)
        return self._advance(now)

    def heartbeat(
        self, member_id: str, instance_id: str | None, generation: int, now: Moment
    ) -> tuple[ErrorCode, list[Decision]]:
        error = self._member_error(member_id, instance_id)
        if error is ErrorCode.none and generation != self.generation:
            error = ErrorCode.illegal_generation
        if error is ErrorCode.none:
            self.roster.members[member_id].touch(now.steady_ms)
            if self.state is GroupState.PREPARING_REBALANCE:
                error = ErrorCode.rebalance_in_progress
        return error, self._advance(now)

    def leave(self, requests: list[LeaveRequest], now: Moment) -> tuple[list[LeaveResult], list[Decision]]:
        results = [
            LeaveResult(request.member_id, request.instance_id, self._leave_one(request, now))
            for request in requests
        ]
        return results, self._advance(now)

    def check_commit(
        self, request: CommitRequest, steady_ms: int, *, transactional: bool = False
    ) -> ErrorCode:
        """May these offsets be committed? A member's plain commit also counts as a sign of life.

        In a transaction the producer's epoch fences, so that a request without member and generation is
        taken whoever is in the group (clients before KIP-447), and so is a member's while the others join.
        """
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        if request.generation < 0 and self.state is GroupState.EMPTY:
            return ErrorCode.none
        if request.generation < 0 and not request.member_id and request.instance_id is None:
            # Only members may commit while there are members: a consumer that assigns itself would
            # overwrite their offsets.
            return ErrorCode.none if transactional else ErrorCode.unknown_member_id
        error = self._member_error(request.member_id, request.instance_id)
        if error is not ErrorCode.none:
            return error
        if request.generation != self.generation:
            return ErrorCode.illegal_generation
        if transactional:
            return ErrorCode.none
        if self.state is GroupState.COMPLETING_REBALANCE:
            # The member has the new generation but not yet its assignment: it cannot have read anything.
            return ErrorCode.rebalance_in_progress
        self.roster.members[request.member_id].touch(steady_ms)
        return ErrorCode.none

    def deletion_refusal(self) -> ErrorCode:
        """Why the group cannot be deleted now, if it cannot."""
        if self.state is GroupState.DEAD:
            return ErrorCode.group_id_not_found
        return ErrorCode.none if self.state is GroupState.EMPTY else ErrorCode.non_empty_group

    def bury(self, now_ms: int) -> None:
        """The log has an empty group's tombstone: it is Dead, and whoever holds it forgets it."""
        self._enter(GroupState.DEAD, now_ms)

    def close(self, error: ErrorCode, now_ms: int) -> list[Decision]:
        """This broker no longer coordinates the group: everyone who waits is told so."""
        for member in self.roster:
            self._outbox.refuse(member, error)
        self._outbox.forget_writes()
        self._join_wait = None
        self._sync_deadline_ms = None
        self._enter(GroupState.DEAD, now_ms)
        return self._outbox.take()

    # -- events: time and the log -------------------------------------------------------------------

    def deadline_ms(self) -> int | None:
        """When, by the steady clock, `tick` must be called next; None when nothing is being waited for."""
        deadlines = [
            self.roster.deadline_ms(),
            self._sync_deadline_ms,
            self._join_wait.deadline_ms if self._join_wait is not None else None,
        ]
        return min((deadline_ms for deadline_ms in deadlines if deadline_ms is not None), default=None)

    def tick(self, now: Moment) -> list[Decision]:
        """Let everything that is due by now happen."""
        self.roster.drop_lapsed_ids(now.steady_ms)
        for member in self.roster.expired(now.steady_ms):
            self._remove(member, now)
        if self._sync_deadline_ms is not None and self._sync_deadline_ms <= now.steady_ms:
            self._expire_unsynced(now)
        return self._advance(now)

    def persisted(self, write_id: int, error: ErrorCode, now: Moment) -> list[Decision]:
        """The outcome of an earlier `Persist`."""
        return self._advance(now) if self._outbox.persisted(write_id, error, now) else []

    # -- what others may know -----------------------------------------------------------------------

    def is_forgettable(self) -> bool:
        """Nobody is in the group or about to join it."""
        return self.state is GroupState.EMPTY and not self.roster.pending

    def describe(self) -> GroupDescription:
        """Metadata and assignments are told only while they are settled, as in Apache Kafka."""
        stable = self.state is GroupState.STABLE
        members = tuple(
            DescribedMember(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.metadata_for(self.protocol_name) if stable else b"",
                member.assignment if stable else b"",
            )
            for member in self.roster
        )
        return GroupDescription(
            ErrorCode.none,
            self.group_id,
            self.state.value,
            self.protocol_type or "",
            (self.protocol_name or "") if stable else "",
            members,
        )

    def subscribed_topics(self) -> frozenset[str] | None:
        """Topics that members are subscribed to; None when that cannot be known."""
        if self.protocol_type != CONSUMER_PROTOCOL_TYPE:
            return None
        return self.roster.subscribed_topics(self.protocol_name)

    def snapshot(self) -> GroupSnapshot:
        return self._snapshot_with({member.member_id: member.assignment for member in self.roster})

    # -- joining ------------------------------------------------------------------------------------

    def _join_error(self, request: JoinRequest) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        if not self._has_room_for(request):
            return ErrorCode.group_max_size_reached
        if not self._supports(request):
            return ErrorCode.inconsistent_group_protocol
        if not request.member_id:
            return ErrorCode.none
        if request.member_id in self.roster.pending and request.instance_id is None:
            return ErrorCode.none
        return self._member_error(request.member_id, request.instance_id)

    def _supports(self, request: JoinRequest) -> bool:
        if not request.protocol_type or not request.protocols:
            return False
        if not len(self.roster):
            return True
        return request.protocol_type == self.protocol_type and any(
            self.roster.is_common(protocol.name) for protocol in request.protocols
        )

    def _has_room_for(self, request: JoinRequest) -> bool:
        member = self.roster.members.get(request.member_id) or self.roster.static_member(request.instance_id)
        if self.state is GroupState.EMPTY:
            return True
        if self.state is GroupState.PREPARING_REBALANCE:
            # Who joins first has the place: members of the last generation must hurry too.
            has_joined = member is not None and member.join_ticket is not None
            return has_joined or self.roster.joined_count() < self.config.max_size
        return member is not None or len(self.roster) < self.config.max_size

    def _join_with_id(self, request: JoinRequest, ticket: Ticket, now: Moment) -> None:
        if request.member_id in self.roster.pending:
            del self.roster.pending[request.member_id]
            self._add_member(request.member_id, request, ticket, now)
            return
        member = self.roster.members[request.member_id]
        unchanged = member.protocols == request.protocols
        leads = member.member_id == self.roster.leader
        if unchanged and self.state is GroupState.COMPLETING_REBALANCE:
            # Its answer was lost on the way: the same answer again.
            self._outbox.answer_join(ticket, self._generation_for(member))
        elif unchanged and self.state is GroupState.STABLE and not leads:
            member.touch(now.steady_ms)
            self._outbox.answer_join(ticket, self._generation_for(member))
        else:
            # New metadata, or the leader has seen something change (partitions of a topic, say).
            self._update_member(member, request, ticket)
            self._prepare_rebalance(now)

    def _add_member(self, member_id: str, request: JoinRequest, ticket: Ticket, now: Moment) -> None:
        if not len(self.roster):
            self.protocol_type = request.protocol_type
        if self._join_wait is not None and self.generation == 0:
            self._join_wait.newcomer()
        self.roster.add(
            Member(
                member_id,
                request.instance_id,
                request.client_id,
                request.client_host,
                request.session_timeout_ms,
                request.rebalance_timeout_ms,
                request.protocols,
                expires_ms=now.steady_ms + NEW_MEMBER_JOIN_TIMEOUT_MS,
                join_ticket=ticket,
            )
        )
        self._prepare_rebalance(now)

    def _update_member(self, member: Member, request: JoinRequest, ticket: Ticket) -> None:
        # The client gave up on a request that waits still.
        self._outbox.end_join(member, JoinResult(ErrorCode.rebalance_in_progress, member.member_id))
        member.wait_for_join(ticket)
        member.support(request.protocols)
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.client_id, member.client_host = request.client_id, request.client_host

    def _replace_static_member(
        self, member: Member, request: JoinRequest, ticket: Ticket, now: Moment
    ) -> None:
        """A static member came back without its id (a restart): it takes the old one's place (KIP-345)."""
        old_id, old_leader = member.member_id, self.roster.leader
        before = (member.protocols, member.session_timeout_ms, member.rebalance_timeout_ms)
        self._outbox.refuse(member, ErrorCode.fenced_instance_id)
        self._rename(member, request.new_member_id)
        self._update_member(member, request, ticket)
        member.touch(now.steady_ms)
        if self.state is not GroupState.STABLE or self.roster.select_protocol() != self.protocol_name:
            self._prepare_rebalance(now)
            return
        # The assignment still fits: no rebalance, only the new id must be remembered before it is used.
        generation = self.generation

        def current() -> bool:
            """Otherwise a rebalance, a leave or a still newer incarnation answers the ticket."""
            settled = self.state is GroupState.STABLE and self.generation == generation
            return settled and member.join_ticket == ticket

        def succeeded(now: Moment) -> None:
            if not current():
                return
            skips = request.can_skip_assignment and self.roster.leader == member.member_id
            # An older client that finds itself leader would assign anew, without a rebalance: it is
            # told the leader's old id instead.
            leader = self.roster.leader if request.can_skip_assignment else old_leader
            member.touch(now.steady_ms)
            result = self._generation_result(member, leader, tells_members=skips, skips=skips)
            self._outbox.end_join(member, result)

        def failed(error: ErrorCode, now: Moment) -> None:
            if not current():
                return
            self._rename(member, old_id)
            protocols, member.session_timeout_ms, member.rebalance_timeout_ms = before
            member.support(protocols)
            member.touch(now.steady_ms)
            self._outbox.end_join(member, JoinResult(error, ""))

        self._outbox.persist(self.snapshot(), succeeded, failed)

    def _rename(self, member: Member, new_id: str) -> None:
        if member.member_id in self._unsynced_ids:
            self._unsynced_ids.remove(member.member_id)
            self._unsynced_ids.add(new_id)
        self.roster.rename(member, new_id)

    # -- rebalancing --------------------------------------------------------------------------------

    def _prepare_rebalance(self, now: Moment) -> None:
        if self.state not in _CAN_REBALANCE:
            return
        if self.state is GroupState.COMPLETING_REBALANCE:
            self._drop_assignments(ErrorCode.rebalance_in_progress, now)
        self._unsynced_ids.clear()
        self._sync_deadline_ms = None
        timeout_ms = self.roster.rebalance_timeout_ms()
        if self.state is GroupState.EMPTY:
            self._join_wait = JoinWait.first(
                now.steady_ms, self.config.initial_rebalance_delay_ms, timeout_ms
            )
        else:
            self._join_wait = JoinWait.again(now.steady_ms, timeout_ms)
        self._enter(GroupState.PREPARING_REBALANCE, now.now_ms)

    def _advance(self, now: Moment) -> list[Decision]:
        """After any event: complete a rebalance that can be completed, then hand out the decisions."""
        if self._join_wait is not None and self._join_wait.is_over(
            now.steady_ms, self.roster.everyone_joined
        ):
            self._complete_join(now)
        return self._outbox.take()

    def _complete_join(self, now: Moment) -> None:
        for member in self.roster:
            if member.join_ticket is None and member.instance_id is None:
                self._forget(member)
        if len(self.roster) and not self.roster.elect_leader():
            # Only static members that may come back: their sessions decide, not this deadline.
            self._join_wait = JoinWait.again(now.steady_ms, max(self.roster.rebalance_timeout_ms(), 1))
            return
        self._join_wait = None
        self.generation += 1
        if not len(self.roster):
            self.protocol_name = None
            self._enter(GroupState.EMPTY, now.now_ms)
            self._outbox.persist(self.snapshot(), succeeded=_nothing, failed=_nothing)
            return
        self.protocol_name = self.roster.select_protocol()
        self._enter(GroupState.COMPLETING_REBALANCE, now.now_ms)
        self._unsynced_ids = set(self.roster.members)
        self._sync_deadline_ms = now.steady_ms + self.roster.rebalance_timeout_ms()
        for member in self.roster:
            member.is_new = False
            member.touch(now.steady_ms)
            if member.join_ticket is not None:
                self._outbox.end_join(member, self._generation_for(member))

    def _generation_for(self, member: Member) -> JoinResult:
        leads = member.member_id == self.roster.leader
        return self._generation_result(member, self.roster.leader, tells_members=leads, skips=False)

    def _generation_result(
        self, member: Member, leader: str | None, *, tells_members: bool, skips: bool
    ) -> JoinResult:
        return JoinResult(
            ErrorCode.none,
            member.member_id,
            self.generation,
            self.protocol_type,
            self.protocol_name,
            leader or "",
            self.roster.described_to_leader(self.protocol_name) if tells_members else (),
            skips,
        )

    # -- assignments --------------------------------------------------------------------------------

    def _sync_error(self, request: SyncRequest) -> ErrorCode:
        error = self._member_error(request.member_id, request.instance_id)
        if error is not ErrorCode.none:
            return error
        if request.generation != self.generation:
            return ErrorCode.illegal_generation
        if request.protocol_type is not None and request.protocol_type != self.protocol_type:
            return ErrorCode.inconsistent_group_protocol
        if request.protocol_name is not None and request.protocol_name != self.protocol_name:
            return ErrorCode.inconsistent_group_protocol
        if self.state is GroupState.PREPARING_REBALANCE:
            return ErrorCode.rebalance_in_progress
        return ErrorCode.none

    def _persist_assignments(self, assignments: dict[str, bytes]) -> None:
        """Write the leader's assignment; members hear of it when it is in the log (invariant 1)."""
        generation = self.generation
        complete = {member_id: assignments.get(member_id, b"") for member_id in self.roster.members}

        def current() -> bool:
            return self.state is GroupState.COMPLETING_REBALANCE and self.generation == generation

        def succeeded(now: Moment) -> None:
            if not current():
                return
            self._enter(GroupState.STABLE, now.now_ms)
            for member in self.roster:
                member.assignment = complete[member.member_id]
                if member.sync_ticket is not None:
                    member.touch(now.steady_ms)
                    self._outbox.end_sync(member, self._assignment_of(member))

        def failed(error: ErrorCode, now: Moment) -> None:
            if current():
                self._drop_assignments(error, now)
                self._prepare_rebalance(now)

        self._outbox.persist(self._snapshot_with(complete), succeeded, failed)

    def _drop_assignments(self, error: ErrorCode, now: Moment) -> None:
        for member in self.roster:
            member.assignment = b""
            if member.sync_ticket is not None:
                member.touch(now.steady_ms)
                self._outbox.end_sync(member, SyncResult(error))

    def _assignment_of(self, member: Member) -> SyncResult:
        return SyncResult(ErrorCode.none, self.protocol_type, self.protocol_name, member.assignment)

    def _expire_unsynced(self, now: Moment) -> None:
        """Members that joined but did not ask for their assignment in time hold the others up: out."""
        self._sync_deadline_ms = None
        late = [member for member in self.roster if member.member_id in self._unsynced_ids]
        self._unsynced_ids.clear()
        for member in late:
            self._remove(member, now)

    # -- leaving ------------------------------------------------------------------------------------

    def _leave_one(self, request: LeaveRequest, now: Moment) -> ErrorCode:
        member_id = request.member_id
        if not member_id and (namesake := self.roster.static_member(request.instance_id)) is not None:
            member_id = namesake.member_id
        if member_id in self.roster.pending and request.instance_id is None:
            del self.roster.pending[member_id]
            return ErrorCode.none
        error = self._member_error(member_id, request.instance_id)
        if error is ErrorCode.none:
            self._remove(self.roster.members[member_id], now)
        return error

    def _remove(self, member: Member, now: Moment) -> None:
        self._forget(member)
        self._prepare_rebalance(now)

    def _forget(self, member: Member) -> None:
        self._outbox.refuse(member, ErrorCode.unknown_member_id)
        self._unsynced_ids.discard(member.member_id)
        self.roster.remove(member)

    # -- small steps --------------------------------------------------------------------------------

    def _member_error(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        return self.roster.refusal(member_id, instance_id)

    def _enter(self, state: GroupState, now_ms: int) -> None:
        self.state = state
        self.state_since_ms = now_ms

    def _snapshot_with(self, assignments: dict[str, bytes]) -> GroupSnapshot:
        return GroupSnapshot(
            self.protocol_type or "",
            self.generation,
            self.protocol_name,
            self.roster.leader,
            self.state_since_ms,
            tuple(m.snapshot(self.protocol_name, assignments[m.member_id]) for m in self.roster),
        )
