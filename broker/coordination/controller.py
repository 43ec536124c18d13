"""What the controller decides: a pure function from a picture of the cluster to what must be written.

It looks at levels, not at events: whatever happened (a broker gone, a topic made, an election lost and
won again), the picture is compared with what it should be, and the differences come out as decisions. A
missed or repeated event therefore changes nothing, and once the decisions are carried out there are none
any more. `controller_runner.py` runs it and fences its writes.

A replica is *alive* where its broker is registered and has not reported it offline; it *stays* if that
broker is not in its controlled shutdown. Rules, for a partition of a topic that is not being deleted:

    who is there                             decision
    (no state yet) some replica stays        the first leads, epoch 0, in sync = those who stay
    (no state yet) none                      wait
    assigned in-sync members stay            they are the in-sync set; the old leader leads if it is among
                                             them, else the first in the order of the replicas
    no such member, but the leader is alive  it keeps leading (it is leaving, or not assigned any more): no
                                             one else has what it has
    no such member, but others are alive     the first of them leads
    no member alive, unclean allowed, some   that replica leads, alone in sync: what only the lost members
    replica stays                            had is lost
    nobody                                   no leader; the in-sync set stays as it was, so that only its
                                             members may return

A partition with a state that cannot be read is left alone: nobody knows whom it names, and it must not be
written over.

Whatever changes comes with leader epoch + 1: it ends the leader's own changes to the in-sync set, and fences
fetches of a broker that was just taken out of it. The in-sync set is never empty.

Preferred leaders: where an election was asked for, and for every broker that leads too few of the partitions
it should (`imbalanced`), the first replica takes over as soon as it is in sync and stays.

Moves (KIP-455): replicas are the target and the old ones together until the whole target is in sync. Then in
one step the replicas become the target, the in-sync set shrinks to it, and a member of it leads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.partition import NO_LEADER, PartitionState

PREFERRED, UNCLEAN = "preferred", "unclean"
"""The two kinds of election that an administrator may ask for (KIP-460)."""


@dataclass(frozen=True, slots=True)
class ElectionRequest:
    """Someone asked for these elections, in a znode of this version."""

    partitions: frozenset[TopicPartition]
    version: int


@dataclass(frozen=True, slots=True)
class ClusterPicture:
    """All that the controller looks at. `topic_versions` are those of the znodes with the replicas."""

    live_brokers: frozenset[int]
    topics: Mapping[str, Mapping[int, PartitionInfo]]
    deleting: frozenset[str] = frozenset()
    leaving: frozenset[int] = frozenset()
    """Brokers in their controlled shutdown; alive all the same."""
    offline: Mapping[int, frozenset[TopicPartition]] = field(default_factory=dict)
    """Replicas that a live broker cannot serve, by broker."""
    unclean_topics: frozenset[str] = frozenset()
    """Topics with `unclean.leader.election.enable`."""
    requests: Mapping[str, ElectionRequest] = field(default_factory=dict)
    """By kind: PREFERRED, UNCLEAN."""
    rebalancing: frozenset[TopicPartition] = frozenset()
    """Partitions whose preferred leader is due by `auto.leader.rebalance.enable`."""
    topic_versions: Mapping[str, int] = field(default_factory=dict)

    def alive(self, topic: str, number: int, partition: PartitionInfo) -> frozenset[int]:
        """Brokers that run and can serve this partition, assigned to it or in its in-sync set."""
        members = partition.state.isr if partition.state is not None else ()
        return frozenset(
            broker
            for broker in (*partition.replicas, *members)
            if broker in self.live_brokers
            and (not self.offline or (topic, number) not in self.offline.get(broker, ()))
        )


@dataclass(frozen=True, slots=True)
class WriteState:
    """Write this state where the znode still has `version` (-1: where there is none yet)."""

    topic: str
    partition: int
    state: PartitionState
    version: int


@dataclass(frozen=True, slots=True)
class CompleteMoves:
    """Partitions of a topic that have arrived: their replicas become `replicas`, and the states are written,
    of each partition together, only while the topic's znode has `version`."""

    topic: str
    replicas: Mapping[int, tuple[int, ...]]
    states: tuple[WriteState, ...]
    version: int


@dataclass(frozen=True, slots=True)
class RemoveTopic:
    """Take the topic and everything under it out of ZooKeeper."""

    topic: str


@dataclass(frozen=True, slots=True)
class ClearRequest:
    """The elections of this kind are done, or cannot be: forget the request, if it still has `version`."""

    kind: str
    version: int


Decision = WriteState | CompleteMoves | RemoveTopic | ClearRequest

LOOKED_AT_ONCE = 1_000
"""Partitions, in about a millisecond where nothing is to be done; then whoever asked for decisions may let
others have their turn."""

_NOTHING_ASKED = ElectionRequest(frozenset(), -1)


def decide(picture: ClusterPicture, controller_epoch: int) -> Iterator[Decision | None]:
    """Everything that has to be written for the cluster to be as it should, and None now and then between
    (`LOOKED_AT_ONCE`)."""
    looked_at = 0
    for topic in sorted(picture.deleting):
        yield RemoveTopic(topic)
    preferred = picture.requests.get(PREFERRED, _NOTHING_ASKED).partitions | picture.rebalancing
    unclean = picture.requests.get(UNCLEAN, _NOTHING_ASKED).partitions
    steady = picture.live_brokers - picture.leaving
    for topic, partitions in picture.topics.items():
        if topic in picture.deleting:
            continue
        arrived: dict[int, WriteState] = {}
        for number, partition in partitions.items():
            looked_at += 1
            if looked_at % LOOKED_AT_ONCE == 0:
                yield None
            if partition.is_unreadable:
                continue
            if not picture.offline and (topic, number) not in preferred and _is_settled(partition, steady):
                continue
            alive = picture.alive(topic, number, partition)
            state = elect(
                partition,
                alive,
                controller_epoch,
                leaving=picture.leaving,
                unclean=topic in picture.unclean_topics or (topic, number) in unclean,
                preferred=(topic, number) in preferred,
            )
            if state is not None:
                yield WriteState(topic, number, state, partition.state_version)
                continue
            state = arrive(partition, alive - picture.leaving, controller_epoch)
            if state is not None:
                arrived[number] = WriteState(topic, number, state, partition.state_version)
        if arrived:
            yield CompleteMoves(
                topic,
                {number: partitions[number].target for number in arrived},
                tuple(arrived.values()),
                picture.topic_versions.get(topic, -1),
            )
    for kind, request in picture.requests.items():
        yield ClearRequest(kind, request.version)


def _is_settled(partition: PartitionInfo, steady: frozenset[int]) -> bool:
    """Whether nothing is to be done, seen at a glance: it is so for nearly all partitions at any time, and
    the controller looks at all of them after every change. `steady` brokers live and do not leave."""
    state = partition.state
    if state is None or partition.adding or partition.removing or state.leader not in state.isr:
        return False
    return all(broker in steady and broker in partition.replicas for broker in state.isr)


def elect(
    partition: PartitionInfo,
    alive: frozenset[int],
    controller_epoch: int,
    *,
    leaving: frozenset[int] = frozenset(),
    unclean: bool = False,
    preferred: bool = False,
) -> PartitionState | None:
    """The state to write for one partition, or None when it can stay as it is.

    `unclean` allows a leader from outside the in-sync set when no member of it is alive; `preferred` asks for
    the first replica to lead if it may.
    """
    state = partition.state
    staying = [broker for broker in partition.replicas if broker in alive and broker not in leaving]
    if state is None:
        return PartitionState(staying[0], 0, tuple(staying), controller_epoch) if staying else None
    in_sync = tuple(broker for broker in state.isr if broker in staying)
    members = tuple(broker for broker in state.isr if broker in alive)
    if in_sync:
        first = next(broker for broker in staying if broker in in_sync)
        keeps = state.leader in in_sync and not (preferred and first == partition.replicas[0])
        leader, isr = state.leader if keeps else first, in_sync
    elif members:
        leader, isr = state.leader if state.leader in members else members[0], members
    elif unclean and staying:
        leader, isr = staying[0], (staying[0],)
    else:
        leader, isr = NO_LEADER, state.isr
    if (leader, isr) == (state.leader, state.isr):
        return None
    return PartitionState(leader, state.leader_epoch + 1, isr, controller_epoch)


def arrive(partition: PartitionInfo, staying: frozenset[int], controller_epoch: int) -> PartitionState | None:
    """The state with which a move ends; None while it goes on, or where nothing moves.

    A member of the target must be there to lead; that the others are in sync is enough.
    """
    state, target = partition.state, partition.target
    if not partition.is_moving or state is None or not set(target) <= set(state.isr):
        return None
    able = [broker for broker in target if broker in staying]
    if not able:
        return None
    leader = state.leader if state.leader in able else able[0]
    isr = tuple(broker for broker in state.isr if broker in target)
    return PartitionState(leader, state.leader_epoch + 1, isr, controller_epoch)


def imbalanced(picture: ClusterPicture, most_percent: int) -> frozenset[TopicPartition]:
    """Partitions that their preferred leaders should take back: those of brokers that do not lead more than
    `most_percent` % of what they should, as far as they could (`leader.imbalance.per.broker.percentage`)."""
    preferred: Counter[int] = Counter()
    led_by_others: dict[int, list[TopicPartition]] = {}
    for topic, partitions in picture.topics.items():
        if topic in picture.deleting:
            continue
        for number, partition in partitions.items():
            if partition.is_unreadable or partition.is_moving:
                continue
            if not partition.replicas or partition.state is None:
                continue
            first = partition.replicas[0]
            preferred[first] += 1
            if partition.state.leader != first:
                led_by_others.setdefault(first, []).append((topic, number))
    return frozenset(
        key
        for broker, keys in led_by_others.items()
        if len(keys) * 100 > most_percent * preferred[broker]
        for key in keys
        if _may_lead(picture, broker, key)
    )


def _may_lead(picture: ClusterPicture, broker: int, key: TopicPartition) -> bool:
    partition = picture.topics[key[0]][key[1]]
    return (
        partition.state is not None
        and broker in partition.state.isr
        and broker not in picture.leaving
        and broker in picture.alive(*key, partition)
    )
