"""The rules of one replica of a partition: who leads, in which epoch, and how far readers may see.

Pure: values in, decisions out; no log, no clock, no network. `replica_manager.py` holds one `Replica`
per local partition, feeds it the states that the controller wrote and the positions of the logs, and
does what it decides. `PartitionState` is what the controller writes to ZooKeeper for each partition.

Invariants:
- a leader epoch only grows; a state with an older epoch than the one known is ignored;
- the high watermark only grows within one leadership, and never passes the leader's log end;
- with one replica the in-sync set is the leader itself, and the high watermark is its log end (or its
  last flushed offset where only flushed records may be seen).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from millrace.broker.errors import FencedLeaderEpoch, NotLeaderOrFollower, UnknownLeaderEpoch

NO_LEADER = -1
ANY_EPOCH = -1
"""A request that names no leader epoch asks for no check."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """What the controller decided for one partition. `isr` is ordered as the replicas are."""

    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    controller_epoch: int


class Role(Enum):
    """What this broker does for the partition."""

    NONE = "none"
    LEADER = "leader"
    FOLLOWER = "follower"


class Transition(Enum):
    """What a newly learnt state asks this broker to do."""

    IGNORE = "ignore"
    LEAD = "lead"
    """Begin to lead in a new epoch: record the epoch at the log's end, then serve."""
    CONTINUE = "continue"
    """Still leader in the same epoch; only the in-sync set changed."""
    FOLLOW = "follow"
    """Another broker leads (or none): stop serving, and fetch from it where there is one."""


@dataclass(slots=True)
class Replica:
    """The local replica of one partition and what is known of the others."""

    broker_id: int
    role: Role = Role.NONE
    leader: int = NO_LEADER
    leader_epoch: int = -1
    isr: tuple[int, ...] = ()
    high_watermark: int = 0
    follower_ends: dict[int, int] = field(default_factory=dict)
    """Log end of every follower in the in-sync set, as its last fetch told; empty with one replica."""

    def apply(self, state: PartitionState, log_end_offset: int) -> Transition:
        """Take in what the controller wrote. A state from an older epoch changes nothing."""
        if state.leader_epoch < self.leader_epoch:
            return Transition.IGNORE
        same_epoch = state.leader_epoch == self.leader_epoch and state.leader == self.leader
        self.leader, self.leader_epoch, self.isr = state.leader, state.leader_epoch, state.isr
        if state.leader != self.broker_id:
            became = self.role is not Role.FOLLOWER or not same_epoch
            self.role = Role.FOLLOWER
            return Transition.FOLLOW if became else Transition.IGNORE
        if same_epoch and self.role is Role.LEADER:
            return Transition.CONTINUE
        self.role = Role.LEADER
        self.follower_ends = {broker: 0 for broker in state.isr if broker != self.broker_id}
        self.high_watermark = min(self.high_watermark, log_end_offset)
        return Transition.LEAD

    def check_leader(self, current_leader_epoch: int = ANY_EPOCH) -> None:
        """Raise unless this broker leads, in the epoch the request believes in (KIP-320)."""
        if current_leader_epoch != ANY_EPOCH and current_leader_epoch != self.leader_epoch:
            if current_leader_epoch < self.leader_epoch:
                raise FencedLeaderEpoch(f"the partition is in leader epoch {self.leader_epoch}")
            raise UnknownLeaderEpoch(f"this broker knows leader epoch {self.leader_epoch}")
        if self.role is not Role.LEADER:
            raise NotLeaderOrFollower(f"broker {self.broker_id} does not lead this partition")

    def advance(self, log_end_offset: int) -> bool:
        """Move the high watermark to the smallest end of the in-sync set. True when it moved."""
        reached = high_watermark(log_end_offset, self.follower_ends)
        if reached <= self.high_watermark:
            return False
        self.high_watermark = reached
        return True


def high_watermark(leader_end: int, follower_ends: Mapping[int, int]) -> int:
    """The offset below which every in-sync replica has the record."""
    return min(leader_end, *follower_ends.values()) if follower_ends else leader_end


def may_accept_all(isr_count: int, min_insync_replicas: int) -> bool:
    """Whether a write that asks for acks=all may be taken: enough replicas must be in sync."""
    return isr_count >= min_insync_replicas
