"""What runs on a cluster beside plain producers (streams, idempotent producers, groups), and its verdict.

Most histories have one kind of load, so that each stays short; which, the seed says.
"""

from __future__ import annotations

import random

from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.system_topics import OFFSETS_TOPIC
from millrace.broker.replication.partition import Role
from tests.simulation.cluster.broker import Broker
from tests.simulation.cluster.committed_reader import CommittedReader
from tests.simulation.cluster.coordinators import Coordinators, Topics
from tests.simulation.cluster.disk import Stored
from tests.simulation.cluster.exactly_once import ExactlyOnce
from tests.simulation.cluster.group_members import MemberSlot, Onlooker
from tests.simulation.cluster.group_promises import GroupPromises
from tests.simulation.cluster.numbered import NumberedProducer
from tests.simulation.cluster.streams import Stream, committed_offset
from tests.simulation.cluster.truth import Truth
from tests.simulation.cluster.world import Network, World

REPLICATION, STREAMS, GROUPS, ALL = range(4)
WEIGHTS = (8, 6, 4, 2)
GONE = ("Empty", "Dead")
"""States of a group that nobody is in."""


def draw_topics(rng: random.Random, data: int, wanted: int | None) -> Topics:
    """How wide the topics are: coordinators' topics are there where they have something to do."""
    load = rng.choices((REPLICATION, STREAMS, GROUPS, ALL), WEIGHTS)[0]
    if wanted is not None:
        load = wanted
    if load == REPLICATION:
        return Topics(data)
    if load == GROUPS:
        return Topics(1, offsets=rng.choice((1, 2)))
    return Topics(data, transactions=rng.choice((1, 1, 2)), offsets=1, are_groups_on=load == ALL)


class Loads:
    """See the module."""

    def __init__(
        self, world: World, network: Network, brokers: dict[int, Broker], truth: Truth, topics: Topics
    ) -> None:
        self._brokers, self._truth, self._topics = brokers, truth, topics
        self.are_coordinated = topics.are_coordinated
        self.promises = ExactlyOnce(truth, topics.data)
        self._streams: list[Stream] = []
        self._numbered: list[NumberedProducer] = []
        self._slots: list[MemberSlot] = []
        self._reader: CommittedReader | None = None
        self.group_promises = GroupPromises(truth)
        if not topics.are_coordinated:
            return
        self.promises.is_current_leader = self.group_promises.is_current_leader = self._is_current_leader
        truth.on_committed = self._committed
        if topics.are_groups_on:
            self._begin_groups(world, network)
        if topics.transactions:
            self._begin_streams(world, network)

    def _begin_groups(self, world: World, network: Network) -> None:
        rng = world.rng
        groups = ["group-a", "group-b"][: rng.choice((1, 1, 2))]
        Onlooker(world, groups, network, self._brokers, self._topics, self.group_promises)
        for group in groups:
            is_static = rng.random() < 0.4
            for place in range(rng.choice((1, 2, 2, 3))):
                name = f"{group}-{place}"
                self._slots.append(
                    MemberSlot(
                        world,
                        group,
                        name,
                        is_static,
                        network,
                        self._brokers,
                        self._topics,
                        self.group_promises,
                    )
                )

    def _begin_streams(self, world: World, network: Network) -> None:
        brokers, truth, topics = self._brokers, self._truth, self._topics
        for number in range(world.rng.choice((1, 2))):
            name = f"stream-{number}"
            self._streams.append(Stream(world, name, network, brokers, topics, self.promises))
        for number in range(world.rng.choice((0, 1, 1))):
            name, partition = f"numbered-{number}", world.rng.randrange(topics.data)
            self._numbered.append(
                NumberedProducer(world, name, partition, network, brokers, topics, self.promises)
            )
        self._reader = CommittedReader(world, network, brokers, topics.data, truth, self.promises)

    def _committed(self, number: int, offset: int, record: Stored) -> None:
        if number in self._topics.numbers_of(OFFSETS_TOPIC):
            self.group_promises.committed(record)
        else:
            self.promises.committed(number, offset, record)

    def _is_current_leader(self, broker: int, number: int) -> bool:
        """Whether what the broker believes of its leadership is so."""
        state, replica = self._truth.states.get(number), self._brokers[broker].replicas[number]
        return state is not None and (state.leader, state.leader_epoch) == (broker, replica.leader_epoch)

    def is_coordinator(self, broker: Broker) -> bool:
        """Whether it leads a partition of a coordinators' topic, or believes so."""
        internal = self._topics.numbers[self._topics.data :]
        return any(broker.replicas[number].role is Role.LEADER for number in internal)

    # -- the end -------------------------------------------------------------------------------------

    def stop(self) -> None:
        for stream in self._streams:
            stream.stop()
        for producer in self._numbered:
            producer.is_stopped = True
        for slot in self._slots:
            slot.stop()

    def unsettled(self) -> str:
        """What is not at rest yet; empty when all is. Nothing is waited for that was lost with the power."""
        if not self.are_coordinated or not self.promises.is_judged:
            return ""
        for slot in self._slots:
            if not slot.is_done:
                return f"{slot.name} cannot commit and leave"
        for group in {slot.group for slot in self._slots}:
            # Who was killed is missed when its session is over, and not before.
            coordinators = self._coordinators_of(group)
            if coordinators is None or coordinators.groups.describe(group).state not in GONE:
                return f"members of {group} who are gone are in it still"
        for stream in self._streams:
            if not stream.is_done:
                return f"a producer of {stream.id} cannot come to its end"
            if self._committed_offset(stream.group) is None:
                return f"the offset of {stream.group} is not to be had"
        for producer in self._numbered:
            if not producer.is_done:
                return f"{producer.name} cannot get rid of its records"
        hanging = self.promises.open_transactions()
        if hanging:
            return f"transactions hang: {hanging} (partition: producer ids)"
        for number in range(self._topics.data):
            leader = self._leader(number)
            log, high_watermark = leader.logs[number], leader.replicas[number].high_watermark
            stable = log.last_stable_offset(high_watermark)
            if stable != log.end_offset:
                return f"the last stable offset of {number} is {stable}, the log ends at {log.end_offset}"
            if self._reader is not None and self._reader.offsets[number] < stable:
                return f"a reader of committed data stands at {self._reader.offsets[number]} in {number}"
        return ""

    def check(self) -> None:
        """The verdict."""
        if not self.are_coordinated or not self.promises.is_judged:
            return
        self.promises.check_promises()
        for stream in self._streams:
            self.promises.check_stream(stream.id, self._committed_offset(stream.group) or 0)

    def _leader(self, number: int) -> Broker:
        return self._brokers[self._truth.states[number].leader]

    def _coordinators_of(self, group: str) -> Coordinators | None:
        numbers = self._topics.numbers_of(OFFSETS_TOPIC)
        return self._leader(numbers[coordinator_partition(group, len(numbers))]).coordinators

    def _committed_offset(self, group: str) -> int | None:
        coordinators = self._coordinators_of(group)
        return None if coordinators is None else committed_offset(coordinators.groups, group)
