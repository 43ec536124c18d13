"""The group coordinator: carries out what the group state machines decide, and keeps it in the log.

The broker makes one, tells it which partitions of `__consumer_offsets` it leads (`load`, `unload`), and
runs its clock (`run`, or `tick` and `sweep` with a time of the caller's). The handlers of the group APIs
call `join`, `sync`, `heartbeat`, `leave`, `commit`, `commit_transactional`, `fetch_offsets`,
`delete_offsets`, `describe`, `list_groups` and `delete_group`; that of WriteTxnMarkers calls
`transaction_ended`. Expected refusals are answers here (error codes), not exceptions.

It knows no server: time, ids and the log come from outside (`journal.OffsetsLog`). Time is two clocks (see
`values.Moment`): a steady one for the timers, the time of day for what is written down.

Invariants:

1. A group belongs to one partition of the offsets topic; only its leader answers for it, and only after
   it has read that partition to its end.
2. A committed offset, a deletion and an assignment are answered, and seen, after the whole in-sync set has
   them, never before; a write that takes too long is answered with an error and may still come true.
3. Writes reach the log in the order in which they were decided (`journal.py`), so no commit of an old
   generation comes after the new generation's record, and no removal takes a later commit with it.

Everything runs on one event loop: the only places where other requests come in between are the awaits.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TypeVar

import structlog
from kio.schema.errors import ErrorCode

from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.journal import (
    COMMIT_TIMEOUT_MS,
    Journal,
    OffsetsLog,
    Producer,
    Removal,
)
from millrace.broker.groups.offset_commits import COMMIT_FAILURES, OffsetCommits
from millrace.broker.groups.offsets import CommittedOffset
from millrace.broker.groups.owned_partition import Entry, OwnedPartition
from millrace.broker.groups.record_layout import MAX_STRING_SIZE, encode_group_key, encode_group_value
from millrace.broker.groups.subscriptions import CONSUMER_PROTOCOL_TYPE
from millrace.broker.groups.timers import GroupTimers
from millrace.broker.groups.values import (
    AnswerJoin,
    AnswerSync,
    CommitRequest,
    Decision,
    GroupDescription,
    GroupListing,
    GroupSnapshot,
    GroupState,
    JoinRequest,
    JoinResult,
    LeaveRequest,
    LeaveResult,
    Moment,
    Persist,
    SyncRequest,
    SyncResult,
    Ticket,
)
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.off_loop import SLICE_LENGTH, Compute, at_once, slices
from millrace.broker.telemetry.metrics import BrokerMetrics

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


class GroupCoordinator:
    """All groups whose offsets partition this broker leads."""

    def __init__(
        self,
        config: GroupConfig,
        offsets_log: OffsetsLog,
        *,
        clock_ms: Callable[[], int],
        steady_ms: Callable[[], int],
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
        commit_timeout_ms: int = COMMIT_TIMEOUT_MS,
        metrics: BrokerMetrics | None = None,
        compute: Compute = at_once,
    ) -> None:
        self.config = config
        self._journal = Journal(offsets_log, clock_ms, commit_timeout_ms, compute)
        self._commits = OffsetCommits(self._journal, config, clock_ms)
        self._clock_ms = clock_ms
        self._steady_ms = steady_ms
        self._new_id = new_id
        self._metrics = metrics or BrokerMetrics()
        self._partitions: dict[int, OwnedPartition] = {}
        self._tickets = itertools.count(1)
        self._waiting_joins: dict[Ticket, asyncio.Future[JoinResult]] = {}
        self._waiting_syncs: dict[Ticket, asyncio.Future[SyncResult]] = {}
        self._timers = GroupTimers(steady_ms)

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive the groups' timers and the expiry of offsets until cancelled."""
        sweep_due_ms = self._steady_ms() + self.config.offsets_retention_check_interval_ms
        sweeping: asyncio.Task[None] | None = None
        while True:
            await self._timers.wait(sweep_due_ms if sweeping is None else None)
            now = self._moment()
            self.tick(now)
            if sweeping is not None and sweeping.done():
                sweeping = sweeping.result()
            if sweeping is None and now.steady_ms >= sweep_due_ms:
                sweep_due_ms = now.steady_ms + self.config.offsets_retention_check_interval_ms
                # Beside the timers: replicas that are slow to take the removals must not hold them up.
                sweeping = self._journal.start(self.sweep(now.now_ms))
                sweeping.add_done_callback(lambda _: self._timers.stir())

    async def close(self) -> None:
        """Give up every partition and let the writes that are under way end."""
        for partition in list(self._partitions):
            self.unload(partition)
        await self._journal.drain()

    async def load(self, partition: int) -> None:
        """Become the coordinator of a partition's groups: read what the log remembers of them.

        Until that is done its groups answer COORDINATOR_LOAD_IN_PROGRESS, also after a failure: the caller
        tries again, or calls `unload`. Raises what reading raises.
        """
        began_ms = self._steady_ms()
        owned = OwnedPartition(self.config)
        if (before := self._partitions.get(partition)) is not None:
            owned.goes_on_from(before)
        self.unload(partition)
        self._partitions[partition] = owned
        memory = await self._journal.read(partition)
        groups = await self._journal.compute(partial(owned.restored, memory, self._moment()))
        if self._partitions.get(partition) is not owned:
            return  # leadership went away, or came anew, while the log was being read
        removals = owned.take_over(groups, memory)
        if removals:
            self._remove(partition, removals)
        async for entries in slices(list(groups.values())):
            if self._partitions.get(partition) is not owned:
                return
            for entry in entries:
                self._timers.follow(entry.group)
        took_ms = self._steady_ms() - began_ms
        self._metrics.group_loads += 1
        self._metrics.group_load_seconds += took_ms / 1000
        tell = log.info if owned.groups else log.debug
        tell("groups loaded", partition=partition, groups=len(owned.groups), milliseconds=took_ms)

    def unload(self, partition: int) -> None:
        """Stop coordinating a partition's groups: whoever waits hears NOT_COORDINATOR."""
        owned = self._partitions.pop(partition, None)
        if owned is None:
            return
        entries = list(owned.groups.values())
        self._close(entries[:SLICE_LENGTH])
        if len(entries) > SLICE_LENGTH:
            self._journal.start(self._close_in_turns(entries[SLICE_LENGTH:]))

    def _close(self, entries: Sequence[Entry]) -> None:
        now_ms = self._clock_ms()
        for entry in entries:
            self._carry_out(entry, entry.group.close(ErrorCode.not_coordinator, now_ms))

    async def _close_in_turns(self, entries: Sequence[Entry]) -> None:
        """Nobody finds these groups any more; who waits in one hears a moment later."""
        async for some in slices(entries):
            self._close(some)

    def tick(self, now: Moment) -> None:
        """Let everything happen in the groups that is due by now."""
        for group_id in self._timers.due(now.steady_ms):
            entry, _ = self._find(group_id)
            if entry is not None:
                self._carry_out(entry, entry.group.tick(now))
                self._timers.follow(entry.group)

    async def sweep(self, now_ms: int) -> None:
        """Forget offsets nobody has used for the retention time, by the time of day, and groups with nothing
        left."""
        removing: list[asyncio.Task[ErrorCode]] = []
        for partition, owned in list(self._partitions.items()):
            async for group_ids in slices(list(owned.groups)):
                if self._partitions.get(partition) is not owned:
                    break
                # In the log before others have their turn: a later commit must not be taken with it.
                removals = owned.expired(group_ids, now_ms)
                if removals:
                    removing.append(self._remove(partition, removals))
        await asyncio.gather(*removing)

    # -- membership ---------------------------------------------------------------------------------

    async def join(self, group_id: str, request: JoinRequest) -> JoinResult:
        """Wait for the group's next generation. The request's `new_member_id` is drawn here."""
        error = self._join_refusal(group_id, request)
        if error is not ErrorCode.none:
            return JoinResult(error, request.member_id)
        entry, error = self._find(group_id)
        if error is not ErrorCode.none:
            return JoinResult(error, request.member_id)
        now = self._moment()
        if entry is None:
            if request.member_id:
                return JoinResult(ErrorCode.unknown_member_id, request.member_id)
            entry = self._create(group_id, now.now_ms)
        ticket = next(self._tickets)
        answer: asyncio.Future[JoinResult] = asyncio.get_running_loop().create_future()
        self._waiting_joins[ticket] = answer
        self._carry_out(entry, entry.group.join(request, ticket, now))
        self._timers.follow(entry.group)
        try:
            return await answer
        finally:
            self._waiting_joins.pop(ticket, None)

    def new_member_id(self, client_id: str, instance_id: str | None) -> str:
        """An id for a member that has none: readable, and never given out twice."""
        return f"{instance_id or client_id}-{self._new_id()}"

    async def sync(self, group_id: str, request: SyncRequest) -> SyncResult:
        """Wait for the assignment of the request's generation."""
        entry, error = self._find_member_group(group_id)
        if error is ErrorCode.coordinator_load_in_progress:
            # Its rebalance has ended with the last coordinator; as in Apache Kafka it is sent to join again,
            # for to Java's consumer the error as it is would be fatal here.
            return SyncResult(ErrorCode.rebalance_in_progress)
        if entry is None:
            return SyncResult(error)
        ticket = next(self._tickets)
        answer: asyncio.Future[SyncResult] = asyncio.get_running_loop().create_future()
        self._waiting_syncs[ticket] = answer
        self._carry_out(entry, entry.group.sync(request, ticket, self._moment()))
        self._timers.follow(entry.group)
        try:
            return await answer
        finally:
            self._waiting_syncs.pop(ticket, None)

    def heartbeat(self, group_id: str, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        entry, error = self._find_member_group(group_id)
        if error is ErrorCode.coordinator_load_in_progress:
            return ErrorCode.none  # nobody expires while the group is being loaded
        if entry is None:
            return error
        error, decisions = entry.group.heartbeat(member_id, instance_id, generation, self._moment())
        if decisions:  # alone, a heartbeat only moves a deadline further away
            self._carry_out(entry, decisions)
            self._timers.follow(entry.group)
        return error

    def leave(self, group_id: str, requests: list[LeaveRequest]) -> tuple[ErrorCode, list[LeaveResult]]:
        entry, error = self._find_member_group(group_id)
        if error is ErrorCode.unknown_member_id:
            return ErrorCode.none, [LeaveResult(r.member_id, r.instance_id, error) for r in requests]
        if entry is None:
            return error, []
        if entry.group.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available, []
        results, decisions = entry.group.leave(requests, self._moment())
        self._carry_out(entry, decisions)
        self._timers.follow(entry.group)
        return ErrorCode.none, results

    # -- offsets ------------------------------------------------------------------------------------

    async def commit(
        self,
        group_id: str,
        request: CommitRequest,
        *,
        no_such_group: ErrorCode = ErrorCode.illegal_generation,
    ) -> dict[TopicPartition, ErrorCode]:
        """Put offsets in the log, then in memory. One error for each partition of the request.

        `no_such_group` is what a member of a group that does not exist hears.
        """
        if not request.offsets:
            return {}  # as in Apache Kafka, nobody hears of it: a commit of nothing makes no group
        entry, error = self._committing_group(group_id, request, no_such_group, transactional=False)
        if entry is None:
            return dict.fromkeys(request.offsets, error)
        self._metrics.group_commits += len(request.offsets)
        return await self._commits.commit(
            self.partition_of(group_id), group_id, entry.offsets, request.offsets
        )

    async def commit_transactional(
        self,
        group_id: str,
        request: CommitRequest,
        producer_id: int,
        producer_epoch: int,
        *,
        on_appended: Callable[[], None] | None = None,
    ) -> dict[TopicPartition, ErrorCode]:
        """Put offsets in the log as part of a producer's transaction: they count once it is committed.

        One error for each partition of the request. The caller has verified that the transaction is open;
        what is to be written is appended before this first waits, and `on_appended` is told.
        """
        entry, error = self._committing_group(
            group_id, request, ErrorCode.illegal_generation, transactional=True
        )
        if entry is None:
            return dict.fromkeys(request.offsets, error)
        partition = self.partition_of(group_id)
        owned = self._partitions[partition]

        def pending() -> None:
            owned.transaction_has(producer_id, group_id)
            if on_appended is not None:
                on_appended()

        self._metrics.group_commits += len(request.offsets)
        return await self._commits.commit_pending(
            partition,
            group_id,
            entry.offsets,
            request.offsets,
            Producer(producer_id, producer_epoch),
            pending,
        )

    def transaction_ended(
        self, partition: int, producer_id: int, committed: bool, marker_offset: int
    ) -> None:
        """A transaction's marker is in this partition of the offsets topic, at `marker_offset`, and the
        in-sync set has it.

        A partition that is being loaded takes it in afterwards; one of another broker needs no telling,
        for whoever loads it reads the marker. Told late, when the producer's next transaction has begun,
        it decides on nothing of that.
        """
        owned = self._partitions.get(partition)
        if owned is not None:
            owned.transaction_ended(producer_id, committed, marker_offset)

    def fetch_offsets(
        self,
        group_id: str,
        partitions: Collection[TopicPartition] | None,
        *,
        require_stable: bool = False,
    ) -> tuple[ErrorCode, dict[TopicPartition, CommittedOffset | ErrorCode | None]]:
        """The committed offset of each partition asked for (None: all that have one).

        With `require_stable` a partition whose offset is about to change, because a transaction on it is
        open or a commit is under way, has UNSTABLE_OFFSET_COMMIT instead (KIP-447).
        """
        entry, error = self._find(group_id)
        if error is not ErrorCode.none:
            return error, {}
        if entry is None:
            return error, dict.fromkeys(partitions or ())
        store = entry.offsets
        wanted = [partition for partition, _ in store.items()] if partitions is None else partitions
        return error, {
            partition: ErrorCode.unstable_offset_commit
            if require_stable and store.is_unstable(partition)
            else store.get(partition)
            for partition in wanted
        }

    async def delete_offsets(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> tuple[ErrorCode, dict[TopicPartition, ErrorCode]]:
        """Forget offsets, unless a member of the group is subscribed to the topic (KIP-496)."""
        if not group_id:
            return ErrorCode.invalid_group_id, {}
        entry, error = self._find_existing_group(group_id)
        if entry is None:
            return error, {}
        if entry.group.state is GroupState.DEAD:
            return ErrorCode.group_id_not_found, {}  # its removal is on its way to the log
        in_use: frozenset[str] | None = frozenset()
        if entry.group.state is not GroupState.EMPTY:
            if entry.group.protocol_type != CONSUMER_PROTOCOL_TYPE:
                return ErrorCode.non_empty_group, {}
            in_use = entry.group.subscribed_topics()
        answers = {
            partition: ErrorCode.group_subscribed_to_topic
            if in_use is None or partition[0] in in_use
            else ErrorCode.none
            for partition in partitions
        }
        store = entry.offsets
        going = [
            each
            for each, answer in answers.items()
            if answer is ErrorCode.none and (store.get(each) or store.may_change(each))
        ]
        error = await self._commits.remove(self.partition_of(group_id), group_id, store, going)
        return error, answers if error is ErrorCode.none else {}

    def forget_topics(self, topics: Collection[str]) -> None:
        """Topics were deleted: offsets in them mean nothing to a new topic of the same name.

        To be called before such a topic is shown to anybody: a commit in it is not told from an earlier one.
        The removals are in the log when this returns, those of a partition that is being loaded before
        anybody is answered from it; nobody waits for the other replicas to have them.
        """
        for partition, owned in self._partitions.items():
            removals = owned.removal_of_topics(topics)
            if removals:
                self._remove(partition, removals)

    # -- groups as a whole --------------------------------------------------------------------------

    def describe(self, group_id: str) -> GroupDescription:
        """What is known of a group; one that does not exist is Dead, as in Apache Kafka."""
        entry, error = self._find(group_id)
        if error is not ErrorCode.none:
            return GroupDescription(error, group_id)
        if entry is None:
            return GroupDescription(ErrorCode.none, group_id, GroupState.DEAD.value)
        return entry.group.describe()

    async def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = ()
    ) -> tuple[ErrorCode, list[GroupListing]]:
        """Groups of this broker; empty filters let everything through, letter case does not matter, nor
        do spaces around a state. Groups that come meanwhile may be missing."""
        wanted_states = {state.lower().strip() for state in states}
        wanted_types = {group_type.lower() for group_type in types}
        loading = any(not owned.loaded for owned in self._partitions.values())
        groups = [entry.group for owned in self._partitions.values() for entry in owned.groups.values()]
        listings: list[GroupListing] = []
        async for some in slices(groups):
            of_these = (
                GroupListing(group.group_id, group.protocol_type or "", group.state.value)
                for group in some
                if group.state is not GroupState.DEAD
            )
            listings += [
                listing
                for listing in of_these
                if (not wanted_states or listing.state.lower() in wanted_states)
                and (not wanted_types or listing.group_type in wanted_types)
            ]
        return ErrorCode.coordinator_load_in_progress if loading else ErrorCode.none, listings

    async def delete_group(self, group_id: str) -> ErrorCode:
        """Forget an empty group and its offsets."""
        entry, error = self._find_existing_group(group_id)
        if entry is None:
            return error
        error = entry.group.deletion_refusal()
        if error is not ErrorCode.none:
            return error
        partition = self.partition_of(group_id)
        removals = self._partitions[partition].deletion(entry, self._clock_ms())
        return await asyncio.shield(self._remove(partition, removals))

    def count_by_state(self) -> Counter[str]:
        """How many groups this broker coordinates, by the name of their state."""
        return Counter(
            entry.group.state.value for owned in self._partitions.values() for entry in owned.groups.values()
        )

    # -- finding groups -----------------------------------------------------------------------------

    def partition_of(self, group_id: str) -> int:
        """The partition of the offsets topic that a group belongs to."""
        return coordinator_partition(group_id, self._journal.partition_count())

    def _find(self, group_id: str) -> tuple[Entry | None, ErrorCode]:
        """The group, or None where it does not exist; an error where this broker cannot know."""
        owned = self._partitions.get(self.partition_of(group_id))
        if owned is None:
            return None, ErrorCode.not_coordinator
        if not owned.loaded:
            return None, ErrorCode.coordinator_load_in_progress
        return owned.groups.get(group_id), ErrorCode.none

    def _find_member_group(self, group_id: str) -> tuple[Entry | None, ErrorCode]:
        """For requests that only a member can make."""
        if not group_id:
            return None, ErrorCode.invalid_group_id
        entry, error = self._find(group_id)
        return entry, ErrorCode.unknown_member_id if entry is None and error is ErrorCode.none else error

    def _find_existing_group(self, group_id: str) -> tuple[Entry | None, ErrorCode]:
        """For requests that make sense only where the group exists."""
        entry, error = self._find(group_id)
        return entry, ErrorCode.group_id_not_found if entry is None and error is ErrorCode.none else error

    def _committing_group(
        self, group_id: str, request: CommitRequest, no_such_group: ErrorCode, *, transactional: bool
    ) -> tuple[Entry | None, ErrorCode]:
        """The group that the request may commit to, made where a consumer without a group begins one."""
        entry, error = self._find(group_id)
        if error is ErrorCode.none and (_is_too_long(group_id) or (transactional and not group_id)):
            error = ErrorCode.invalid_group_id
        if error is ErrorCode.none and entry is None:
            if request.generation >= 0:
                error = no_such_group
            else:
                entry = self._create(group_id, self._clock_ms())
        if error is ErrorCode.none and entry is not None:
            error = entry.group.check_commit(request, self._steady_ms(), transactional=transactional)
        return (entry if error is ErrorCode.none else None), error

    def _moment(self) -> Moment:
        return Moment(steady_ms=self._steady_ms(), now_ms=self._clock_ms())

    def _create(self, group_id: str, now_ms: int) -> Entry:
        return self._partitions[self.partition_of(group_id)].create(group_id, now_ms)

    def _join_refusal(self, group_id: str, request: JoinRequest) -> ErrorCode:
        if not group_id or _is_too_long(group_id):
            return ErrorCode.invalid_group_id
        least_ms, most_ms = self.config.min_session_timeout_ms, self.config.max_session_timeout_ms
        if not least_ms <= request.session_timeout_ms <= most_ms:
            return ErrorCode.invalid_session_timeout
        texts = [request.new_member_id, request.client_id, request.instance_id or "", request.protocol_type]
        if any(_is_too_long(text) for text in [*texts, *(protocol.name for protocol in request.protocols)]):
            return ErrorCode.invalid_request
        return ErrorCode.none

    # -- decisions ----------------------------------------------------------------------------------

    def _carry_out(self, entry: Entry, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case AnswerJoin(ticket, join_result):
                    _answer(self._waiting_joins.pop(ticket, None), join_result)
                case AnswerSync(ticket, sync_result):
                    _answer(self._waiting_syncs.pop(ticket, None), sync_result)
                case Persist(write_id, snapshot):
                    self._save(entry, write_id, snapshot)

    # -- the log ------------------------------------------------------------------------------------

    def _save(self, entry: Entry, write_id: int, snapshot: GroupSnapshot) -> None:
        """Put a group in the log and tell its state machine how that went."""
        group = entry.group
        record = (encode_group_key(group.group_id), encode_group_value(snapshot))
        written = self._journal.append(self.partition_of(group.group_id), [record], apply=lambda _: None)

        async def follow_up() -> None:
            error = await written
            if error is not ErrorCode.none:
                log.warning("group not saved", group=group.group_id, error=error.name)
            was_stable = group.state is GroupState.STABLE
            self._carry_out(entry, group.persisted(write_id, error, self._moment()))
            if group.state is GroupState.STABLE and not was_stable:
                self._metrics.group_rebalances += 1
            self._timers.follow(group)

        self._journal.start(follow_up())

    def _remove(self, partition: int, removals: list[Removal]) -> asyncio.Task[ErrorCode]:
        """Put removals in the log, now; memory follows, and the task has what came of it."""
        written = self._journal.append_removals(partition, removals)

        async def outcome() -> ErrorCode:
            error = await written
            if error is not ErrorCode.none:
                log.warning(
                    "removals from the offsets topic not saved", partition=partition, error=error.name
                )
            return COMMIT_FAILURES.get(error, error)

        return self._journal.start(outcome())


def _answer(waiting: asyncio.Future[Result] | None, result: Result) -> None:
    """Nobody waits where the client's connection has gone meanwhile."""
    if waiting is not None and not waiting.done():
        waiting.set_result(result)


def _is_too_long(text: str) -> bool:
    return len(text.encode()) > MAX_STRING_SIZE
