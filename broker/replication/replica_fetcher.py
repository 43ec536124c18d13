"""Fetches from the leaders what the replicas on this broker follow: two lanes per leader, one for partitions
that bring records and one for the idle rest (`lanes.py`), each with one task and one connection.

`ReplicaFetchers.follow` gives a partition to the lanes of its leader, `forget` takes it away. A lane asks for
all its partitions in one Fetch with a long poll, of which only what is new goes over the line
(`follower_session.py`), gives each partition's answer to `catching_up.py`, and asks
again from where the logs end then: a fetch at offset X tells the leader that everything below X is here.
Where only flushed records count, what was appended is flushed before that is said.

A partition is in the care of one lane at a time. It changes over when its answer has been taken, and is asked
for there at once: a long poll under way is ended by a fetch that does not wait (see `handlers/fetch.py`).

A leader that cannot be reached is tried again for as long as it leads. A partition that fails (a damaged
batch, a disk) rests for a moment and does not hold up the others. All on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import structlog

from millrace.broker.client.broker_connections import BrokerConnections
from millrace.broker.client.connection import Connection
from millrace.broker.errors import (
    KafkaError,
    MillraceError,
    NetworkException,
    ProtocolError,
    error_for_code,
)
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.session_epochs import ENDED, FINAL_EPOCH, FULL, NO_SESSION
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.catching_up import LARGE_APPEND_SIZE, CatchingUp, Taken
from millrace.broker.replication.follower import Answer
from millrace.broker.replication.follower_session import FollowerSession
from millrace.broker.replication.lanes import NEVER, Lane, is_sweep_due, lane_of
from millrace.broker.replication.leader_questions import fetch, log_bounds
from millrace.broker.replication.local_partition import Flusher, LocalPartition
from millrace.broker.replication.off_loop import Turns
from millrace.broker.replication.partition import Role
from millrace.broker.replication.throttle import ReplicationThrottle
from millrace.broker.telemetry.metrics import BrokerMetrics

log = structlog.get_logger("millrace.broker")

PURPOSES = {Lane.BUSY: "replica", Lane.IDLE: "replica-idle"}

NO_EPOCH = -1

BACKOFF_SECONDS = 0.25
"""Between two attempts to reach a leader."""
EXPECTED_REST_SECONDS = 0.05
"""For a partition whose leader is about to change, or to learn that it leads."""
FAILED_REST_SECONDS = 1.0
LONGEST_REST_SECONDS = 1.0
"""Of a lane that has partitions, none of which is due."""
FLUSH_WAIT_SECONDS = 1.0
"""So long the other partitions wait for one's flush."""
ADDED_DELAY_SECONDS = 0.1
"""Partitions often come many at a time; so long a wait goes on for more to come."""


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """`replica.fetch.*`: what one fetch asks for."""

    partition_max_bytes: int = 1 << 20
    response_max_bytes: int = 10 << 20
    min_bytes: int = 1
    max_wait_ms: int = 500


@dataclass(slots=True, eq=False)
class Following:
    """One partition in the care of a lane. `ready_at` and `records_at` are in the loop's time."""

    local: LocalPartition
    ready_at: float = 0.0
    records_at: float = NEVER
    """When it brought records last."""
    lag: int = 0
    """Records that the leader has committed and this broker has not got yet."""
    is_caught_up: bool = False
    """Whether there were none at the leader's last answer."""
    failure: str = ""
    """What was logged last; said once, not at every attempt."""


class ReplicaFetchers:
    """All partitions that this broker follows."""

    def __init__(
        self,
        broker_id: int,
        connections: BrokerConnections,
        catching_up: CatchingUp,
        flusher: Flusher,
        limits: FetchLimits,
        metrics: BrokerMetrics,
        *,
        only_flushed: bool,
        watch: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.broker_id = broker_id
        self.connections = connections
        self.catching_up = catching_up
        self.flusher = flusher
        self.limits = limits
        self.metrics = metrics
        self.only_flushed = only_flushed
        self.own_epoch = NO_EPOCH
        """The epoch of this broker's registration; fetches wait until there is one, so that a leader can
        tell them from those of an earlier run."""
        self.throttle = ReplicationThrottle()
        self._watch = watch
        self._by_leader: dict[int, LeaderFetcher] = {}

    def set_own_epoch(self, epoch: int) -> None:
        """This broker is registered, or not any more."""
        self.own_epoch = epoch
        for fetcher in self._by_leader.values():
            fetcher.wake()

    def follow(self, local: LocalPartition) -> None:
        """Fetch the partition from the leader that its replica knows, from the next request on."""
        leader = local.replica.leader
        self.forget(local.key, but_not=leader)
        if leader < 0:
            return
        fetcher = self._by_leader.get(leader)
        if fetcher is None:
            fetcher = self._by_leader[leader] = LeaderFetcher(leader, self)
            for task in fetcher.tasks:
                self._watch(task)
        fetcher.add(local)

    def forget(self, key: TopicPartition, *, but_not: int = -1) -> None:
        """Fetch the partition no more (or from no other leader than `but_not`)."""
        for leader, fetcher in list(self._by_leader.items()):
            if leader != but_not and fetcher.remove(key) and fetcher.is_empty:
                del self._by_leader[leader]
                fetcher.cancel()

    def set_throttle(
        self, bytes_per_second: int | None, partitions: Collection[TopicPartition] | None
    ) -> None:
        """Fetch these partitions (None: all) together no faster than this (None: as fast as it goes)."""
        if self.throttle.set(bytes_per_second, partitions):
            for fetcher in self._by_leader.values():
                fetcher.hurry()

    def lags(self) -> dict[TopicPartition, int]:
        """For each followed partition, the committed records that are still missing here."""
        return {
            key: following.lag
            for fetcher in self._by_leader.values()
            for key, following in fetcher.partitions()
        }

    async def close(self) -> None:
        tasks = [task for fetcher in self._by_leader.values() for task in fetcher.tasks]
        for fetcher in self._by_leader.values():
            fetcher.cancel()
        self._by_leader.clear()
        await asyncio.gather(*tasks, return_exceptions=True)


class LeaderFetcher:
    """Everything that is fetched from one leader: its two lanes."""

    def __init__(self, leader: int, owner: ReplicaFetchers) -> None:
        self.leader = leader
        self._interruption = ""
        self._lanes = {lane: LaneFetcher(lane, self, owner) for lane in Lane}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return [lane.task for lane in self._lanes.values()]

    @property
    def is_empty(self) -> bool:
        return not any(lane.partitions for lane in self._lanes.values())

    def partitions(self) -> Iterator[tuple[TopicPartition, Following]]:
        for lane in self._lanes.values():
            yield from lane.partitions.items()

    def add(self, local: LocalPartition) -> None:
        for lane in self._lanes.values():
            known = lane.partitions.get(local.key)
            if known is not None and known.local is local:
                known.ready_at = 0.0  # a new epoch: what made it rest is over
                lane.interrupt(ADDED_DELAY_SECONDS)
                return
        self.remove(local.key)
        self._lanes[Lane.IDLE].receive([Following(local)], ADDED_DELAY_SECONDS)

    def remove(self, key: TopicPartition) -> bool:
        found = [lane.let_go(key) for lane in self._lanes.values()]
        return any(found)

    def change_over(self, lane: Lane, leaving: Collection[Following]) -> None:
        """These partitions of `lane` belong into the other one. None of them is being asked for."""
        for following in leaving:
            self._lanes[lane].let_go(following.local.key)
        self._lanes[Lane.IDLE if lane is Lane.BUSY else Lane.BUSY].receive(leaving)

    def wake(self) -> None:
        for lane in self._lanes.values():
            lane.wake.set()

    def hurry(self) -> None:
        """What made partitions rest may be over."""
        for _, following in self.partitions():
            following.ready_at = 0.0
        self.wake()

    def cancel(self) -> None:
        for lane in self._lanes.values():
            lane.cancel()

    # -- what is said about it -----------------------------------------------------------------------

    def interrupted(self, error: MillraceError) -> None:
        if not self._interruption:
            log.warning("replication is interrupted", leader=self.leader, reason=str(error))
        self._interruption = str(error)

    def resumed(self) -> None:
        if self._interruption:
            log.info("replication goes on", leader=self.leader)
        self._interruption = ""


class LaneFetcher:
    """One lane: one task, and one fetch at a time that names all its partitions that are due."""

    def __init__(self, lane: Lane, leader: LeaderFetcher, owner: ReplicaFetchers) -> None:
        self.lane = lane
        self.leader = leader
        self.owner = owner
        self.partitions: dict[TopicPartition, Following] = {}
        self.wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._swept_at = self._loop.time()
        self._polling: tuple[Connection, hot_fetch.FetchRequest] | None = None
        """While a fetch is under way that nobody has ended yet: its connection, and what would end it."""
        self._ending: set[asyncio.Task[None]] = set()
        self._interrupting: asyncio.TimerHandle | None = None
        self._is_cancelled = False
        self._session = FollowerSession[Following]()
        self.task = self._loop.create_task(self._run(), name=f"replica-fetcher-{leader.leader}-{lane.value}")

    def receive(self, followings: Iterable[Following], delay_seconds: float = 0.0) -> None:
        """These partitions belong here from now on; nobody else asks for them."""
        for following in followings:
            self.partitions[following.local.key] = following
        self.interrupt(delay_seconds)

    def let_go(self, key: TopicPartition) -> bool:
        """Ask for it no more, and hold nothing of it. Whether it was here."""
        following = self.partitions.pop(key, None)
        if following is not None:
            self._session.let_go((following.local.topic_id, following.local.partition))
        return following is not None

    def interrupt(self, delay_seconds: float = 0.0) -> None:
        """There are partitions to be asked for that the fetch under way, if any, does not name: end it."""
        self.wake.set()
        if not delay_seconds:
            self._end_poll()
        elif self._interrupting is None and self._polling is not None:
            self._interrupting = self._loop.call_later(delay_seconds, self._end_poll)

    def _end_poll(self) -> None:
        if self._interrupting is not None:
            self._interrupting.cancel()
            self._interrupting = None
        if self._polling is not None:
            ending = self._loop.create_task(self._ask_at_once(*self._polling))
            self._polling = None
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._interrupting is not None:
            self._interrupting.cancel()
            self._interrupting = None
        for task in (self.task, *self._ending):
            task.cancel()

    async def _run(self) -> None:
        pause_seconds = 0.0
        while True:
            try:
                pause_seconds = await self._next_round(pause_seconds)
            except asyncio.CancelledError:
                if self._is_cancelled or _is_cancelled_itself():
                    # Not raised: with its task, which `self` knows, the error would be a cycle that holds all
                    # logs that were asked for last (see `telemetry/garbage.py`).
                    return
                # Nobody cancelled this task, but something that it waited for: ending so, in silence, it
                # would leave its partitions behind for ever.
                log.error("a round of replication was cancelled", leader=self.leader.leader, exc_info=True)
                pause_seconds = BACKOFF_SECONDS

    async def _next_round(self, pause_seconds: float) -> float:
        """After a pause; how long the next is."""
        if pause_seconds:
            await asyncio.sleep(pause_seconds)
        self.wake.clear()
        # One time for both: who is not due by the one clock must not be past its rest by the other.
        now = self._loop.time()
        try:
            if due := await self._due(now):
                await self._round(due)
            else:
                await self._rest(now)
        except (KafkaError, ProtocolError) as error:
            self.leader.interrupted(error)
            return BACKOFF_SECONDS
        return 0.0

    # -- which partitions, and when ------------------------------------------------------------------

    async def _due(self, now: float) -> list[Following]:
        """Who may be asked for now; what has to be flushed first is flushed here."""
        if self.owner.own_epoch == NO_EPOCH:
            return []
        ready = [following for following in self.partitions.values() if self._is_ready(following, now)]
        if self.owner.only_flushed:
            ready = await self._flushed(ready)
        return ready

    def _is_ready(self, following: Following, now: float) -> bool:
        replica = following.local.replica
        if replica.role is not Role.FOLLOWER or replica.leader != self.leader.leader:
            return False
        if following.ready_at > now or following.local.turn.locked():
            return False
        if following.is_caught_up:
            # Who is in sync is not held back, as in Apache Kafka: every acks=all write waits for it, and it
            # would be late in the end and out of sync. Settings stay behind when a move is over.
            return True
        resumes_at = self.owner.throttle.resumes_at(following.local.key, now)
        if resumes_at > now:
            following.ready_at = resumes_at
            return False
        return True

    async def _flushed(self, ready: list[Following]) -> list[Following]:
        dirty = [each for each in ready if each.local.log.recovery_point < each.local.log.end_offset]
        if not dirty:
            return ready
        flushes = [self.owner.flusher.soon(each.local) for each in dirty]
        await asyncio.wait(flushes, timeout=FLUSH_WAIT_SECONDS)
        late = [each for each in dirty if each.local.log.recovery_point < each.local.log.end_offset]
        for each in late:
            self._delay(each, EXPECTED_REST_SECONDS)
        return [each for each in ready if each not in late]

    async def _rest(self, now: float) -> None:
        """Until a partition is added, or the first that was not due at `now` may be. Whatever keeps one from
        being due, it is looked at again: nothing is left waiting for a wake that nobody owes it."""
        rests = [following.ready_at - now for following in self.partitions.values()]
        seconds = min((rest for rest in rests if rest > 0), default=LONGEST_REST_SECONDS)
        if any(following.local.turn.locked() for following in self.partitions.values()):
            seconds = min(seconds, EXPECTED_REST_SECONDS)
        try:
            async with asyncio.timeout(seconds if rests else None):
                await self.wake.wait()
        except TimeoutError:
            return

    def _delay(self, following: Following, seconds: float) -> None:
        following.ready_at = self._loop.time() + seconds

    # -- one request and its answer ------------------------------------------------------------------

    async def _round(self, due: list[Following]) -> None:
        """One fetch of these partitions. Raises KafkaErrors and ProtocolError where the leader is away."""
        owner = self.owner
        connection = await owner.connections.get(self.leader.leader, PURPOSES[self.lane])
        if self.wake.is_set():
            return  # there is more to ask for than was known
        # A flush and the connection were waited for: some may have been let go of, or be another lane's.
        due = [each for each in due if self.partitions.get(each.local.key) is each]
        if not due:
            return
        try:
            response = await self._exchange(connection, due)
            if response is not None:
                self.leader.resumed()
                await self._take_all(connection, response)
        except BaseException:
            self._session.end()  # something that was answered may not have been taken
            raise
        self._change_over()

    async def _take_all(self, connection: Connection, response: hot_fetch.FetchResponse) -> None:
        owner = self.owner
        now = self._loop.time()
        taken_size, turns = 0, Turns()
        for given in response.partitions:
            known = self._session.asked((given.topic, given.partition))
            if known is None:
                raise connection.breach(
                    f"a partition that was not asked for: {given.topic}-{given.partition}"
                )
            following, question = known
            if following is None or self.partitions.get(following.local.key) is not following:
                continue  # let go of meanwhile, and perhaps already asked for anew
            size = len(given.records)
            if size:
                following.records_at = now
                owner.metrics.replicated_bytes += size
                owner.throttle.consume(following.local.key, size, now, in_sync=following.is_caught_up)
                # Who got something stands at the end next time: the answer's size is bounded.
                self.partitions[following.local.key] = self.partitions.pop(following.local.key)
            if not await self._take(connection, following, question, given):
                self._session.let_go((given.topic, given.partition))
            taken_size += size
            if await turns.maybe():
                taken_size = 0
            elif taken_size >= LARGE_APPEND_SIZE:
                taken_size = 0
                await asyncio.sleep(0)

    def _change_over(self) -> None:
        """After an answer, when nothing is being asked for: let go of who belongs into the other lane."""
        now = self._loop.time()
        if not is_sweep_due(self.lane, self._swept_at, now):
            return
        self._swept_at = now
        leaving = [
            each for each in self.partitions.values() if lane_of(each.records_at, now) is not self.lane
        ]
        if leaving:
            self.leader.change_over(self.lane, leaving)

    def _question(self, following: Following) -> hot_fetch.PartitionFetch:
        local = following.local
        return hot_fetch.PartitionFetch(
            local.topic_id,
            local.partition,
            local.log.end_offset,
            self.owner.limits.partition_max_bytes,
            local.replica.leader_epoch,
            local.log.leader_epochs.latest_epoch,
            local.log.start_offset,
        )

    async def _exchange(self, connection: Connection, due: list[Following]) -> hot_fetch.FetchResponse | None:
        """The leader's answer; None where it knows nothing of the session: it is to be asked in full."""
        limits = self.owner.limits
        wanted = self._session.want((each, self._question(each)) for each in due)
        request = hot_fetch.FetchRequest(
            limits.max_wait_ms,
            limits.min_bytes,
            limits.response_max_bytes,
            False,
            wanted.partitions,
            wanted.session_id,
            wanted.session_epoch,
            wanted.forgotten,
            replica_id=self.owner.broker_id,
            replica_epoch=self.owner.own_epoch,
        )
        self._polling = connection, self._ending_of(request, due[0])
        try:
            response = await fetch(connection, request)
        finally:
            self._polling = None
        if wanted.session_epoch != FULL and response.error_code in ENDED:
            self._session.end()
            return None
        if response.error_code:
            raise error_for_code(response.error_code)
        self._session.answered(response.session_id)
        return response

    def _ending_of(self, request: hot_fetch.FetchRequest, asked: Following) -> hot_fetch.FetchRequest:
        """What ends this fetch: of a partition that it asks for, without a wait, in no session."""
        return request._replace(
            max_wait_ms=0,
            max_bytes=0,
            partitions=[self._question(asked)],
            session_id=NO_SESSION,
            session_epoch=FINAL_EPOCH,
            forgotten=(),
        )

    async def _ask_at_once(self, connection: Connection, request: hot_fetch.FetchRequest) -> None:
        """End the fetch under way: one that does not wait is answered after it. That answer says nothing new;
        if it fails, so does the other."""
        with suppress(KafkaError, ProtocolError):
            await fetch(connection, request)

    async def _take(
        self,
        connection: Connection,
        following: Following,
        question: hot_fetch.PartitionFetch,
        given: hot_fetch.PartitionData,
    ) -> bool:
        """Do what one partition's answer asks for; whatever goes wrong there stays there. Whether all that
        the answer says was taken."""
        local = following.local
        answer = Answer(
            question.current_leader_epoch,
            question.fetch_offset,
            question.last_fetched_epoch,
            given.error_code,
            given.high_watermark,
            given.log_start_offset,
            given.diverging,
        )
        try:
            taken = await self.owner.catching_up.take(
                local, answer, given.records, self._bounds_of(connection)
            )
        except (NetworkException, ProtocolError):
            raise
        except (MillraceError, OSError) as error:
            self._failed(following, str(error))
            taken = Taken(FAILED_REST_SECONDS)
        except Exception as error:
            log.exception("replication of a partition failed", partition=str(local))
            self._failed(following, repr(error))
            taken = Taken(FAILED_REST_SECONDS)
        else:
            if given.error_code == 0:
                following.failure = ""
                following.lag = max(0, given.high_watermark - local.log.end_offset)
                following.is_caught_up = following.lag == 0
        if taken.rest_seconds > 0:
            self._delay(following, taken.rest_seconds)
        return taken.is_all

    def _bounds_of(self, connection: Connection) -> Callable[[LocalPartition], Awaitable[tuple[int, int]]]:
        return lambda local: log_bounds(connection, local, self.owner.broker_id)

    def _failed(self, following: Following, reason: str) -> None:
        if reason != following.failure:
            log.error("a partition is not replicated", partition=str(following.local), reason=reason)
        following.failure = reason


def _is_cancelled_itself() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
