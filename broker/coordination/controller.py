"""What the controller decides: a pure function from a picture of the cluster to what must be written.

It looks at levels, not at events: whatever happened (a broker gone, a topic made, an election lost and
won again), the picture is compared with what it should be, and the differences come out as decisions. A
missed or repeated event therefore changes nothing. `controller_runner.py` runs it and fences its writes.

Rules, for a topic that is not being deleted:

    state            in-sync replicas alive     decision
    none yet         some replica alive         first live replica leads, epoch 0, in-sync = live replicas
    none yet         none                       wait
    leader alive     -                          keep
    leader dead      yes                        first live in-sync replica (in replica order) leads
    leader dead      no                         no leader; the in-sync set stays, so that only it may return

A new leader means leader epoch + 1. A replica outside the in-sync set never leads (no unclean election).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from millrace.broker.replication.partition import NO_LEADER, PartitionState


@dataclass(frozen=True, slots=True)
class PartitionPicture:
    """One partition as last read; `version` is its state's znode version."""

    replicas: tuple[int, ...]
    state: PartitionState | None
    version: int = -1


@dataclass(frozen=True, slots=True)
class ClusterPicture:
    """All that the controller looks at."""

    live_brokers: frozenset[int]
    topics: Mapping[str, Mapping[int, PartitionPicture]]
    deleting: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class WriteState:
    """Write this state where the znode still has `version` (-1: where there is none yet)."""

    topic: str
    partition: int
    state: PartitionState
    version: int


@dataclass(frozen=True, slots=True)
class RemoveTopic:
    """Take the topic and everything under it out of ZooKeeper."""

    topic: str


Decision = WriteState | RemoveTopic


def decide(picture: ClusterPicture, controller_epoch: int) -> Iterator[Decision]:
    """Everything that has to be written for the cluster to be as it should."""
    for topic in sorted(picture.deleting):
        yield RemoveTopic(topic)
    for topic, partitions in picture.topics.items():
        if topic in picture.deleting:
            continue
        for number, partition in partitions.items():
            state = elect(partition, picture.live_brokers, controller_epoch)
            if state is not None:
                yield WriteState(topic, number, state, partition.version)


def elect(
    partition: PartitionPicture, live_brokers: frozenset[int], controller_epoch: int
) -> PartitionState | None:
    """The state to write for one partition, or None when it can stay as it is."""
    state = partition.state
    if state is None:
        live = tuple(broker for broker in partition.replicas if broker in live_brokers)
        return PartitionState(live[0], 0, live, controller_epoch) if live else None
    if state.leader in live_brokers:
        return None
    candidates = [broker for broker in partition.replicas if broker in state.isr and broker in live_brokers]
    if candidates:
        in_sync = tuple(broker for broker in state.isr if broker in live_brokers)
        return PartitionState(candidates[0], state.leader_epoch + 1, in_sync, controller_epoch)
    if state.leader == NO_LEADER:
        return None
    return PartitionState(NO_LEADER, state.leader_epoch + 1, state.isr, controller_epoch)
