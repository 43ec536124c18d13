"""What a group has decided and not handed out yet: answers to those who wait, and writes to the log.

Part of the group state machine (`membership.py` is the only caller) and pure like it. Every method that takes
an event puts its decisions in here, in order, and the last thing it does is to take them all.

Invariants: a ticket is answered once, because the one place that answers it takes it from its member; the
outcome of a write is heard once, and not at all after `forget_writes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kio.schema.errors import ErrorCode

from millrace.broker.groups.roster import Member
from millrace.broker.groups.values import (
    AnswerJoin,
    AnswerSync,
    Decision,
    GroupSnapshot,
    JoinResult,
    Moment,
    Persist,
    SyncResult,
    Ticket,
)

_PERSIST_FAILURES = {
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas_after_append: ErrorCode.coordinator_not_available,
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.kafka_storage_error: ErrorCode.not_coordinator,
    ErrorCode.request_timed_out: ErrorCode.rebalance_in_progress,
    ErrorCode.message_too_large: ErrorCode.unknown_server_error,
    ErrorCode.record_list_too_large: ErrorCode.unknown_server_error,
}
"""What a member hears when the group's record could not be written."""


@dataclass(slots=True)
class _PendingWrite:
    """What to do when a snapshot is in the log, or could not be written."""

    succeeded: Callable[[Moment], None]
    failed: Callable[[ErrorCode, Moment], None]


@dataclass(slots=True)
class Outbox:
    """See the module."""

    _decisions: list[Decision] = field(default_factory=list)
    _writes: dict[int, _PendingWrite] = field(default_factory=dict)
    _write_id: int = 0

    def take(self) -> list[Decision]:
        """Everything decided since the last time, in order."""
        decisions, self._decisions = self._decisions, []
        return decisions

    def answer_join(self, ticket: Ticket, result: JoinResult) -> None:
        """For a request that does not wait (or whose ticket the caller has taken from its member)."""
        self._decisions.append(AnswerJoin(ticket, result))

    def answer_sync(self, ticket: Ticket, result: SyncResult) -> None:
        """For a request that does not wait."""
        self._decisions.append(AnswerSync(ticket, result))

    def end_join(self, member: Member, result: JoinResult) -> None:
        """The answer to the join of a member, if it waits for one."""
        ticket = member.take_join_ticket()
        if ticket is not None:
            self.answer_join(ticket, result)

    def end_sync(self, member: Member, result: SyncResult) -> None:
        """The answer to the sync of a member, if it waits for one."""
        if member.sync_ticket is not None:
            ticket, member.sync_ticket = member.sync_ticket, None
            self.answer_sync(ticket, result)

    def refuse(self, member: Member, error: ErrorCode) -> None:
        """Whatever a member waits for, it hears this."""
        self.end_join(member, JoinResult(error, member.member_id))
        self.end_sync(member, SyncResult(error))

    def persist(
        self,
        snapshot: GroupSnapshot,
        succeeded: Callable[[Moment], None],
        failed: Callable[[ErrorCode, Moment], None],
    ) -> None:
        """Write a snapshot; one of the two is called with the moment at which its fate was known."""
        self._write_id += 1
        self._writes[self._write_id] = _PendingWrite(succeeded, failed)
        self._decisions.append(Persist(self._write_id, snapshot))

    def persisted(self, write_id: int, error: ErrorCode, now: Moment) -> bool:
        """The fate of a write is known. False when nobody here waits for it any more."""
        write = self._writes.pop(write_id, None)
        if write is None:
            return False
        if error is ErrorCode.none:
            write.succeeded(now)
        else:
            write.failed(_PERSIST_FAILURES.get(error, error), now)
        return True

    def forget_writes(self) -> None:
        """Their outcome concerns another coordinator now."""
        self._writes.clear()
