"""Members of consumer groups: they join, share partitions, commit forward, leave, are killed and replaced.

A `MemberSlot` is one place in a group: a static member keeps its instance id when it is replaced, and the one
it replaces may go on (a zombie), until it hears that it is fenced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kio.schema.errors import ErrorCode

from millrace.broker.errors import NetworkException
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.groups.offsets import CommittedOffset
from millrace.broker.groups.values import (
    CommitRequest,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    OffsetToCommit,
    Protocol,
    SyncRequest,
)
from millrace.broker.protocol.system_topics import OFFSETS_TOPIC
from tests.simulation.cluster.broker import Broker
from tests.simulation.cluster.connections import call
from tests.simulation.cluster.coordinators import DATA_TOPIC, Topics
from tests.simulation.cluster.group_promises import GroupPromises, signed
from tests.simulation.cluster.requester import Requester
from tests.simulation.cluster.world import Network, World

PARTITIONS = 3
REBALANCE_TIMEOUT_MS = 700
ASK_TIMEOUT_MS = 300

_FENCED = ErrorCode.fenced_instance_id
_OUT_OF_OFFICE = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.request_timed_out,
    }
)


class Fenced(Exception):
    """A member with the same instance id has taken this one's place."""


class Rejoin(Exception):
    """The generation is over for this member."""


class GroupMember(Requester):
    """One member, from its start until it is killed, fenced, or has left."""

    def __init__(
        self,
        world: World,
        name: str,
        group: str,
        instance: str | None,
        network: Network,
        brokers: dict[int, Broker],
        topics: Topics,
        promises: GroupPromises,
    ) -> None:
        super().__init__(world, name, network, brokers)
        self.topics = topics
        self.is_stopped = False
        self.is_done = False
        self._group, self._instance, self._promises = group, instance, promises
        self._number = self.coordinator_number(OFFSETS_TOPIC, group)
        self._session_timeout_ms = world.rng.choice((300, 900))
        self._must_know_id = world.rng.random() < 0.5
        self._member_id = ""
        self._generation = -1
        self._positions: dict[int, int] = {}
        self._may_leave = False
        self.spawn(self._work())

    def kill(self) -> None:
        self.world.note(f"{self.name} is killed")
        self.is_done = True
        self.end()

    def stop(self) -> None:
        """It is done once it has committed something more and left."""
        self.is_stopped = True

    @property
    def _who(self) -> str:
        return self._instance or self._member_id

    async def _work(self) -> None:
        try:
            while not self._may_leave:
                try:
                    await self._join()
                    await self._stay()
                except Rejoin:
                    await self.pause()
            await self._leave()
        except Fenced:
            self.world.note(f"{self.name} is fenced")
        self.is_done = True

    # -- joining -------------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Until there is an assignment, and a position in every partition of it."""
        joined = await self._ask(self._join_at, timeout_ms=2 * REBALANCE_TIMEOUT_MS)
        if joined.error is ErrorCode.member_id_required:
            self._member_id = joined.member_id
        self._check(joined.error)
        self._member_id, self._generation = joined.member_id, joined.generation
        assignments: dict[str, bytes] = {}
        if joined.leader == self._member_id and not joined.skip_assignment:
            assignments = _share_out(joined)
        request = SyncRequest(
            self._member_id,
            self._instance,
            self._generation,
            joined.protocol_type,
            joined.protocol_name,
            assignments,
        )
        synced = await self._ask(
            lambda groups: groups.sync(self._group, request), timeout_ms=2 * REBALANCE_TIMEOUT_MS
        )
        self._check(synced.error)
        partitions = list(synced.assignment)
        self._promises.assigned(self._group, self._generation, self._who, partitions)
        self.world.note(f"{self.name} has {partitions} in generation {self._generation} of {self._group}")
        self._positions = {}
        for partition in partitions:
            self._positions[partition] = await self._committed_offset(partition)

    def _join_at(self, groups: GroupCoordinator) -> Any:
        return groups.join(
            self._group,
            JoinRequest(
                member_id=self._member_id,
                new_member_id=groups.new_member_id(self.name, self._instance),
                instance_id=self._instance,
                client_id=self.name,
                client_host="/host",
                session_timeout_ms=self._session_timeout_ms,
                rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
                protocol_type="consumer",
                protocols=(Protocol("range", b""),),
                requires_known_member_id=self._must_know_id,
                can_skip_assignment=True,
            ),
        )

    async def _committed_offset(self, partition: int) -> int:
        """What the group has committed, once nothing is about to change it."""
        place = (DATA_TOPIC, partition)
        while True:

            def fetch(groups: GroupCoordinator, broker: Broker) -> int | ErrorCode:
                # A coordinator that was replaced and has not heard of it may show what it had.
                if not self._promises.is_current_leader(broker.id, self._number):
                    return ErrorCode.not_coordinator
                error, found = groups.fetch_offsets(self._group, [place], require_stable=True)
                kept = found.get(place)
                if error is not ErrorCode.none or isinstance(kept, ErrorCode):
                    return error if error is not ErrorCode.none else ErrorCode.unstable_offset_commit
                offset = kept.offset if isinstance(kept, CommittedOffset) else 0
                self._promises.shown(self._group, partition, offset)
                return offset

            found = await self._ask(fetch, with_broker=True)
            if isinstance(found, ErrorCode):
                if found is not ErrorCode.unstable_offset_commit:
                    self._check(found)
                await self.pause()
                await self._heartbeat()
                continue
            return int(found)

    # -- staying -------------------------------------------------------------------------------------

    async def _stay(self) -> None:
        """Commit forward until the generation ends."""
        rng = self.world.rng
        while not self._may_leave:
            if rng.random() < 0.6:
                await self._heartbeat()
            if self._positions:
                await self._commit()
            elif self.is_stopped:
                self._may_leave = True  # nothing to commit for
            if rng.random() < 0.02:
                await self.pause(400, 1_500)  # for longer than the session may last
            if not self.is_stopped and rng.random() < 0.02:
                await self._leave()
                raise Rejoin
            await self.pause(10, 120)

    async def _heartbeat(self) -> None:
        error = await self._ask_patiently(
            lambda groups: groups.heartbeat(self._group, self._member_id, self._instance, self._generation)
        )
        self._check(error)

    async def _commit(self) -> None:
        rng = self.world.rng
        moved = [partition for partition in self._positions if rng.random() < 0.7] or list(self._positions)
        for partition in moved:
            self._positions[partition] += rng.randint(1, 3)
        offsets = {partition: self._positions[partition] for partition in moved}
        metadata = signed(self._who, self._generation)
        request = CommitRequest(
            self._member_id,
            self._instance,
            self._generation,
            {
                (DATA_TOPIC, partition): OffsetToCommit(offset, -1, metadata)
                for partition, offset in offsets.items()
            },
        )
        try:
            answer = await self._ask(lambda groups: groups.commit(self._group, request), timeout_ms=800)
        except Rejoin:
            return  # it may have been taken; the next one goes further
        error = next(iter(answer.values()))
        if error is ErrorCode.none:
            for partition, offset in offsets.items():
                self._promises.acknowledged(self._group, partition, offset)
            self._may_leave = self.is_stopped
        elif error not in _OUT_OF_OFFICE:
            self._check(error)

    async def _leave(self) -> None:
        self.world.note(f"{self.name} leaves")
        requests = [LeaveRequest(self._member_id, self._instance)]
        try:
            await self._ask(lambda groups: groups.leave(self._group, requests))
        except Rejoin:
            return  # its session will end
        finally:
            self._member_id, self._generation = "", -1

    # -- asking --------------------------------------------------------------------------------------

    def _check(self, error: ErrorCode) -> None:
        """Raise what an error means for the membership."""
        if error is _FENCED:
            raise Fenced
        if error is ErrorCode.unknown_member_id:
            self._member_id = ""
        if error is not ErrorCode.none:
            raise Rejoin

    async def _ask(
        self, work: Callable[..., Any], *, timeout_ms: int = ASK_TIMEOUT_MS, with_broker: bool = False
    ) -> Any:
        """The answer of whoever is believed to coordinate the group. Raises Rejoin where none comes."""
        broker = self.leader_of(self._number)
        if broker is None:
            await self.pause()
            raise Rejoin

        def serve() -> Any:
            assert broker.coordinators is not None
            groups = broker.coordinators.groups
            return work(groups, broker) if with_broker else work(groups)

        try:
            return await call(self.network, self, broker, "control", serve, timeout_ms=timeout_ms)
        except NetworkException:
            raise Rejoin from None

    async def _ask_patiently(self, work: Callable[..., Any]) -> ErrorCode:
        """As `_ask`; whoever coordinates next is asked as a member of the same generation."""
        for _ in range(10):
            try:
                error: ErrorCode = await self._ask(work)
            except Rejoin:
                error = ErrorCode.request_timed_out
            if error not in _OUT_OF_OFFICE:
                return error
            await self.pause()
        return ErrorCode.request_timed_out


class Onlooker(Requester):
    """Asks for the offsets of groups that it has no part in, as a monitor of lags does."""

    def __init__(
        self,
        world: World,
        groups: list[str],
        network: Network,
        brokers: dict[int, Broker],
        topics: Topics,
        promises: GroupPromises,
    ) -> None:
        super().__init__(world, "onlooker", network, brokers)
        self.topics = topics
        self._groups, self._promises = groups, promises
        self.spawn(self._work())

    async def _work(self) -> None:
        rng = self.world.rng
        while True:
            await self.pause(20, 200)
            group, partition = rng.choice(self._groups), rng.randrange(PARTITIONS)
            broker = self.leader_of(self.coordinator_number(OFFSETS_TOPIC, group))
            if broker is not None:
                look = partial(self._look, broker, group, partition, rng.random() < 0.5)
                self.network.send(self.name, broker, look)

    def _look(self, broker: Broker, group: str, partition: int, is_patient: bool) -> None:
        """Runs in the broker: what is shown is judged there and then."""
        number, place = self.coordinator_number(OFFSETS_TOPIC, group), (DATA_TOPIC, partition)
        if broker.coordinators is None or not self._promises.is_current_leader(broker.id, number):
            return
        error, found = broker.coordinators.groups.fetch_offsets(group, [place], require_stable=is_patient)
        kept = found.get(place)
        if error is ErrorCode.none and not isinstance(kept, ErrorCode):
            self._promises.shown(group, partition, 0 if kept is None else kept.offset)


def _share_out(joined: JoinResult) -> dict[str, bytes]:
    """Each partition to one member, as bytes of its number."""
    members = sorted(member.member_id for member in joined.members)
    return {
        member_id: bytes(range(place, PARTITIONS, len(members))) for place, member_id in enumerate(members)
    }


class MemberSlot:
    """One place in a group and who is in it."""

    def __init__(
        self,
        world: World,
        group: str,
        name: str,
        is_static: bool,
        network: Network,
        brokers: dict[int, Broker],
        topics: Topics,
        promises: GroupPromises,
    ) -> None:
        self.name = name
        self.group = group
        self._world = world
        self._instance = f"instance-{name}" if is_static else None
        self._network, self._brokers, self._topics, self._promises = network, brokers, topics, promises
        self._members: list[GroupMember] = []
        self._is_stopped = False
        world.after(world.rng.randint(1, 600), self._turn)

    def stop(self) -> None:
        """Who is in it commits and leaves, or is killed: then the group must miss it."""
        self._is_stopped = True
        is_killed = self._world.rng.random() < 0.3
        for member in self._members:
            if is_killed and not member.is_done:
                member.kill()
            member.stop()

    @property
    def is_done(self) -> bool:
        return all(member.is_done for member in self._members)

    def _turn(self) -> None:
        if self._is_stopped:
            return
        rng = self._world.rng
        current = self._members[-1] if self._members else None
        if current is None or current.is_done:
            self._next()
        elif rng.random() < 0.3:
            current.kill()
            if rng.random() < 0.7:
                self._next()
        elif self._instance is not None and rng.random() < 0.2:
            self._next()  # the former goes on
        self._world.after(rng.choice((300, 1_500, 4_000)), self._turn)

    def _next(self) -> None:
        self._members.append(
            GroupMember(
                self._world,
                f"{self.name}.{len(self._members) + 1}",
                self.group,
                self._instance,
                self._network,
                self._brokers,
                self._topics,
                self._promises,
            )
        )
