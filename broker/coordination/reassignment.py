"""How a partition begins to move to other brokers, and how a move is called off (KIP-455). Pure.

A move is written into the topic's znode by whichever broker took the request, together with the partition's
state where that has to change with it; `controller.py` ends the move when the whole target is in sync. What
is planned here never loses an in-sync member that no other has the data of: a move or a way back that would
do so is refused, unless the topic allows unclean elections.

Called by `reassignments.py` (the shell) with what was read from ZooKeeper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.errors import InvalidReplicaAssignment, NoReassignmentInProgress
from millrace.broker.replication.partition import NO_LEADER, PartitionState


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """What is to be written for one partition; `state` is None where it stays."""

    replicas: tuple[int, ...]
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    state: PartitionState | None = None


def begin_move(
    partition: PartitionInfo, target: tuple[int, ...], alive: frozenset[int], *, unclean: bool = False
) -> PlannedMove:
    """Towards `target`, from where the partition is or, if it is moving already, from where it came from.

    Raises InvalidReplicaAssignment when a move that this one replaces cannot be left without losing data.
    """
    origin = original_replicas(partition)
    removing = tuple(broker for broker in origin if broker not in target)
    adding = tuple(broker for broker in target if broker not in origin)
    replicas = (*target, *removing)
    return PlannedMove(replicas, adding, removing, _state_for(partition, replicas, alive, unclean))


def cancel_move(partition: PartitionInfo, alive: frozenset[int], *, unclean: bool = False) -> PlannedMove:
    """Back to where the partition came from.

    Raises NoReassignmentInProgress, and InvalidReplicaAssignment when no original replica is in sync.
    """
    if not partition.is_moving:
        raise NoReassignmentInProgress("the partition is not being moved")
    origin = original_replicas(partition)
    return PlannedMove(origin, state=_state_for(partition, origin, alive, unclean))


def original_replicas(partition: PartitionInfo) -> tuple[int, ...]:
    """The replicas before the move that is under way."""
    return tuple(broker for broker in partition.replicas if broker not in partition.adding)


def _state_for(
    partition: PartitionInfo, replicas: tuple[int, ...], alive: frozenset[int], unclean: bool
) -> PartitionState | None:
    """The state with only `replicas` in sync; None where that is so already and no replica goes.

    One that goes deletes its log. In a new epoch, as in Apache Kafka's controller, what it has fetched says
    nothing any more, should it come back: its leader may be about to take it in for that, or hear of it late.
    """
    state = partition.state
    if state is None:
        return None
    if set(state.isr) <= set(replicas):
        goes = not set(partition.replicas) <= set(replicas)
        return replace(state, leader_epoch=state.leader_epoch + 1) if goes else None
    in_sync = tuple(broker for broker in state.isr if broker in replicas)
    if not in_sync:
        if not unclean:
            raise InvalidReplicaAssignment(
                f"only brokers {list(state.isr)} have all of the data: the way back would lose some of it"
            )
        in_sync = tuple(broker for broker in replicas if broker in alive)[:1] or replicas[:1]
    able = [broker for broker in replicas if broker in in_sync and broker in alive]
    leader = state.leader if state.leader in able else next(iter(able), NO_LEADER)
    return PartitionState(leader, state.leader_epoch + 1, in_sync, state.controller_epoch)
