"""The values that cross the border of the group state machine: requests in, results and decisions out.

`membership.py` takes these requests and returns these decisions; `coordinator.py` carries the
decisions out; `offsets.py` writes `GroupSnapshot` to the log and reads it back. Plain frozen data, no
rules.

A *ticket* names a request that waits for its answer. The state machine never looks inside one: it
hands the same ticket back in the decision that answers it, and answers each ticket exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kio.schema.errors import ErrorCode

from millrace.broker.protocol.topic_partition import TopicPartition

Ticket = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When something happens, in milliseconds by two clocks. Never taken apart into a bare "now".

    `steady_ms` never jumps: for how long something has lasted or may last (sessions, rebalances), as Apache
    Kafka's timers do it (its hiResClockMs). It means nothing to another process or after a restart.
    `now_ms` is the time of day since the epoch, which may be set back or forward: only for what is written
    down, or compared with what was.
    """

    steady_ms: int
    now_ms: int


class GroupState(Enum):
    """States of a classic group; the values are the names that Apache Kafka shows to clients."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way of sharing the work that a member offers: an assignor's name and its metadata."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A member (or a client that wants to become one) asks to take part in the next generation.

    `new_member_id` is the id to give to a client that has none; the caller draws it, since the state
    machine draws no random numbers. `requires_known_member_id` is true from JoinGroup v4 (KIP-394),
    `can_skip_assignment` from v9 (KIP-814).
    """

    member_id: str
    new_member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[Protocol, ...]
    requires_known_member_id: bool
    can_skip_assignment: bool


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """A member asks for its assignment; the leader's request carries everyone's."""

    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None
    protocol_name: str | None
    assignments: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class JoinedMember:
    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinResult:
    error: ErrorCode
    member_id: str
    generation: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True)
class SyncResult:
    error: ErrorCode
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """A member as `__consumer_offsets` remembers it."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """A generation of a group as `__consumer_offsets` remembers it; no members means Empty."""

    protocol_type: str
    generation: int
    protocol_name: str | None
    leader: str | None
    state_since_ms: int
    members: tuple[MemberSnapshot, ...]


@dataclass(frozen=True, slots=True)
class AnswerJoin:
    ticket: Ticket
    result: JoinResult


@dataclass(frozen=True, slots=True)
class AnswerSync:
    ticket: Ticket
    result: SyncResult


@dataclass(frozen=True, slots=True)
class Persist:
    """Write the snapshot to the log, then report to `Group.persisted` with the same `write_id`."""

    write_id: int
    snapshot: GroupSnapshot


Decision = AnswerJoin | AnswerSync | Persist


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """An empty member id with an instance id names a static member by its instance."""

    member_id: str
    instance_id: str | None


@dataclass(frozen=True, slots=True)
class LeaveResult:
    member_id: str
    instance_id: str | None
    error: ErrorCode


@dataclass(frozen=True, slots=True)
class DescribedMember:
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True)
class GroupDescription:
    error: ErrorCode
    group_id: str
    state: str = ""
    protocol_type: str = ""
    protocol_name: str = ""
    members: tuple[DescribedMember, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupListing:
    group_id: str
    protocol_type: str
    state: str
    group_type: str = "classic"


@dataclass(frozen=True, slots=True)
class OffsetToCommit:
    """One partition of an OffsetCommit request; `expire_timestamp_ms` only from requests before v5."""

    offset: int
    leader_epoch: int
    metadata: str
    expire_timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """A negative generation with an empty member id comes from a consumer that assigns itself."""

    member_id: str
    instance_id: str | None
    generation: int
    offsets: dict[TopicPartition, OffsetToCommit]
