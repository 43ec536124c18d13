"""The members of one group: who they are, which ids they have, who leads, which protocol they share.

Part of the group state machine (`membership.py` is the only caller) and pure like it. All times here are of
the steady clock. The roster knows nothing of states and generations; it answers questions about members and
keeps these together:

1. every static instance id names exactly one member, and no other id is known for it;
2. the leader is a member, or None in an empty roster;
3. an id that was given out but has not joined yet (`pending`) belongs to no member;
4. the tally is that of its members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kio.schema.errors import ErrorCode

from millrace.broker.groups.subscriptions import subscribed_topics
from millrace.broker.groups.values import JoinedMember, MemberSnapshot, Protocol, Ticket


@dataclass(slots=True)
class Tally:
    """Counts over all members of a roster. Each join asks for them: in a group of thousands nobody may walk
    over the members for that."""

    joined: int = 0
    supporters: Counter[str] = field(default_factory=Counter)
    """How many members support a protocol, by its name."""

    def count(self, member: Member) -> None:
        self.joined += member.join_ticket is not None
        self.supporters.update({protocol.name for protocol in member.protocols})

    def discount(self, member: Member) -> None:
        self.joined -= member.join_ticket is not None
        for name in {protocol.name for protocol in member.protocols}:
            self.supporters[name] -= 1
            if not self.supporters[name]:
                del self.supporters[name]


@dataclass(slots=True)
class Member:
    """One member; `join_ticket` and `sync_ticket` are its requests that wait for an answer. In a roster the
    first and the protocols change through the methods alone, which keep its `tally`."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[Protocol, ...]
    expires_ms: int
    assignment: bytes = b""
    is_new: bool = True
    join_ticket: Ticket | None = None
    sync_ticket: Ticket | None = None
    tally: Tally = field(default_factory=Tally, repr=False, compare=False)

    def wait_for_join(self, ticket: Ticket) -> None:
        self.tally.joined += self.join_ticket is None
        self.join_ticket = ticket

    def take_join_ticket(self) -> Ticket | None:
        """The join that waits, if any: it is answered now."""
        self.tally.joined -= self.join_ticket is not None
        ticket, self.join_ticket = self.join_ticket, None
        return ticket

    def support(self, protocols: tuple[Protocol, ...]) -> None:
        if protocols != self.protocols:
            self.tally.discount(self)
            self.protocols = protocols
            self.tally.count(self)

    def metadata_for(self, protocol_name: str | None) -> bytes:
        for protocol in self.protocols:
            if protocol.name == protocol_name:
                return protocol.metadata
        return b""

    def may_expire(self) -> bool:
        """A member that waits for an answer of ours is not to blame for its silence."""
        return self.is_new or (self.join_ticket is None and self.sync_ticket is None)

    def touch(self, steady_ms: int) -> None:
        """A sign of life. A new member's long wait for its first generation is not shortened by it."""
        if not self.is_new:
            self.expires_ms = steady_ms + self.session_timeout_ms

    def snapshot(self, protocol_name: str | None, assignment: bytes) -> MemberSnapshot:
        return MemberSnapshot(
            self.member_id,
            self.instance_id,
            self.client_id,
            self.client_host,
            self.rebalance_timeout_ms,
            self.session_timeout_ms,
            self.metadata_for(protocol_name),
            assignment,
        )

    @classmethod
    def restore(cls, kept: MemberSnapshot, protocol_name: str | None, steady_ms: int) -> Member:
        """A member as the log remembers it, with a whole session to be heard of again."""
        return cls(
            kept.member_id,
            kept.instance_id,
            kept.client_id,
            kept.client_host,
            kept.session_timeout_ms,
            kept.rebalance_timeout_ms,
            (Protocol(protocol_name or "", kept.subscription),),
            expires_ms=steady_ms + kept.session_timeout_ms,
            assignment=kept.assignment,
            is_new=False,
        )


@dataclass(slots=True)
class Roster:
    """All members of a group, in the order in which they came."""

    members: dict[str, Member] = field(default_factory=dict)
    pending: dict[str, int] = field(default_factory=dict)
    """Ids given out with MEMBER_ID_REQUIRED -> when they lapse."""
    leader: str | None = None
    _static_ids: dict[str, str] = field(default_factory=dict)
    _tally: Tally = field(default_factory=Tally)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self.members.values()))

    def __len__(self) -> int:
        return len(self.members)

    def add(self, member: Member) -> None:
        self.members[member.member_id] = member
        member.tally = self._tally
        self._tally.count(member)
        if member.instance_id is not None:
            self._static_ids[member.instance_id] = member.member_id
        if self.leader not in self.members:
            self.leader = member.member_id

    def remove(self, member: Member) -> None:
        del self.members[member.member_id]
        self._tally.discount(member)
        member.tally = Tally()
        if member.instance_id is not None and self._static_ids.get(member.instance_id) == member.member_id:
            del self._static_ids[member.instance_id]
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)

    def rename(self, member: Member, new_id: str) -> None:
        """Give a static member the id of its new incarnation."""
        old_id = member.member_id
        # Rebuilt to keep the order of members, which decides ties in elections.
        self.members = {new_id if key == old_id else key: value for key, value in self.members.items()}
        member.member_id = new_id
        if member.instance_id is not None:
            self._static_ids[member.instance_id] = new_id
        if self.leader == old_id:
            self.leader = new_id

    def static_member(self, instance_id: str | None) -> Member | None:
        member_id = self._static_ids.get(instance_id) if instance_id is not None else None
        return self.members[member_id] if member_id is not None else None

    def refusal(self, member_id: str, instance_id: str | None) -> ErrorCode:
        """Is the sender who it says it is? FENCED_INSTANCE_ID when another took its place (KIP-345)."""
        if instance_id is not None:
            current = self.static_member(instance_id)
            if current is None:
                return ErrorCode.unknown_member_id
            if current.member_id != member_id:
                return ErrorCode.fenced_instance_id
        return ErrorCode.none if member_id in self.members else ErrorCode.unknown_member_id

    def joined_count(self) -> int:
        return self._tally.joined

    def everyone_joined(self) -> bool:
        return not self.pending and self.joined_count() == len(self.members)

    def elect_leader(self) -> bool:
        """Make sure the leader is among those who joined. False when nobody did."""
        leader = self.members.get(self.leader or "")
        if leader is not None and leader.join_ticket is not None:
            return True
        for member in self.members.values():
            if member.join_ticket is not None:
                self.leader = member.member_id
                return True
        return False

    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    def is_common(self, protocol_name: str) -> bool:
        """Whether all members support it."""
        return self._tally.supporters[protocol_name] == len(self.members)

    def select_protocol(self) -> str:
        """Each member votes for the first of its protocols that all support; ties go to the first vote."""
        votes: dict[str, int] = {}
        for member in self.members.values():
            choice = next(protocol.name for protocol in member.protocols if self.is_common(protocol.name))
            votes[choice] = votes.get(choice, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def described_to_leader(self, protocol_name: str | None) -> tuple[JoinedMember, ...]:
        return tuple(
            JoinedMember(member.member_id, member.instance_id, member.metadata_for(protocol_name))
            for member in self.members.values()
        )

    def subscribed_topics(self, protocol_name: str | None) -> frozenset[str] | None:
        """Of consumers: the topics they read; before the first generation, of the protocol each prefers."""
        return subscribed_topics(
            member.metadata_for(protocol_name) if protocol_name else member.protocols[0].metadata
            for member in self.members.values()
        )

    def deadline_ms(self) -> int | None:
        """When the first member or pending id may expire."""
        deadlines = [member.expires_ms for member in self.members.values() if member.may_expire()]
        return min([*deadlines, *self.pending.values()], default=None)

    def drop_lapsed_ids(self, steady_ms: int) -> None:
        for member_id in [lapsed for lapsed, due_ms in self.pending.items() if due_ms <= steady_ms]:
            del self.pending[member_id]

    def expired(self, steady_ms: int) -> list[Member]:
        return [m for m in self.members.values() if m.expires_ms <= steady_ms and m.may_expire()]
