"""What is known of one partition of the cluster. Values only: the metadata cache holds them, and the
controller and those who plan moves decide by the very same: nobody copies a cluster to look at it."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.broker.replication.partition import NO_LEADER, PartitionState


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """One partition. `state` is None until the controller has chosen a leader for the first time."""

    replicas: tuple[int, ...]
    state: PartitionState | None = None
    state_version: int = -1
    """The znode's version, which the controller's next write must match."""
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    """Replicas that come and go while the partition moves to other brokers (KIP-455)."""
    is_unreadable: bool = False
    """What stands in the znode now is no state; `state` is what stood there before, if that is known."""

    @property
    def is_moving(self) -> bool:
        return bool(self.adding or self.removing)

    @property
    def target(self) -> tuple[int, ...]:
        """The replicas that are to remain."""
        return tuple(broker for broker in self.replicas if broker not in self.removing)

    @property
    def leader(self) -> int:
        return NO_LEADER if self.state is None else self.state.leader

    @property
    def leader_epoch(self) -> int:
        return -1 if self.state is None else self.state.leader_epoch
