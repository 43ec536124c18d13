"""The group coordinator: carries out what the group state machines decide, and keeps it in the log.

The broker makes one, tells it which partitions of `__consumer_offsets` it leads (`load`, `unload`), and
runs its clock (`run`, or `tick` and `sweep` with a time of the caller's). The handlers of the group APIs
call `join`, `sync`, `heartbeat`, `leave`, `commit`, `fetch_offsets`, `delete_offsets`, `describe`,
`list_groups` and `delete_group`; expected refusals are answers here (error codes), not exceptions.

It knows no server: time, ids and the log come from outside (`journal.OffsetsLog`).

Invariants:

1. A group belongs to one partition of the offsets topic; only its leader answers for it, and only after
   it has read that partition to its end.
2. A committed offset, a deletion and an assignment are answered after the log has them, never before.
3. Writes reach the log in the order in which they were decided (`journal.py`), so no commit of an old
   generation comes after the new generation's record, and no removal takes a later commit with it.

Everything runs on one event loop: the only places where other requests come in between are the awaits.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog
from kio.schema.errors import ErrorCode

from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.journal import Journal, OffsetsLog
from millrace.broker.groups.membership import Group
from millrace.broker.groups.offsets import (
    CommittedOffset,
    ExpiryRule,
    OffsetStore,
    TopicPartition,
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
    expired_offsets,
    partition_of_group,
)
from millrace.broker.groups.subscriptions import CONSUMER_PROTOCOL_TYPE
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
    Persist,
    SyncRequest,
    SyncResult,
    Ticket,
)

TICK_INTERVAL_MS = 50
"""How late a timer of a group may be."""

MAX_STRING_SIZE = 32_767
"""The offsets topic counts a text's bytes in 16 bits."""

_COMMIT_FAILURES = {
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas_after_append: ErrorCode.coordinator_not_available,
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.kafka_storage_error: ErrorCode.not_coordinator,
    ErrorCode.message_too_large: ErrorCode.invalid_commit_offset_size,
    ErrorCode.record_list_too_large: ErrorCode.invalid_commit_offset_size,
}
"""What a client hears when its commit could not be written."""

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Entry:
    """What is kept of one group."""

    group: Group
    offsets: OffsetStore = field(default_factory=OffsetStore)


@dataclass(slots=True)
class _OwnedPartition:
    """A partition of the offsets topic that this broker leads."""

    loaded: bool = False
    groups: dict[str, _Entry] = field(default_factory=dict)


class GroupCoordinator:
    """All groups whose offsets partition this broker leads."""

    def __init__(
        self,
        config: GroupConfig,
        offsets_log: OffsetsLog,
        *,
        clock_ms: Callable[[], int],
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self.config = config
        self._journal = Journal(offsets_log, clock_ms)
        self._clock_ms = clock_ms
        self._new_id = new_id
        self._partitions: dict[int, _OwnedPartition] = {}
        self._tickets = itertools.count(1)
        self._waiting_joins: dict[Ticket, asyncio.Future[JoinResult]] = {}
        self._waiting_syncs: dict[Ticket, asyncio.Future[SyncResult]] = {}
        self._due_ms: dict[str, int] = {}
        self._due_heap: list[tuple[int, str]] = []

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Drive the groups' timers and the expiry of offsets until cancelled."""
        sweep_due_ms = self._clock_ms() + self.config.offsets_retention_check_interval_ms
        while True:
            await asyncio.sleep(TICK_INTERVAL_MS / 1000)
            now_ms = self._clock_ms()
            self.tick(now_ms)
            if now_ms >= sweep_due_ms:
                sweep_due_ms = now_ms + self.config.offsets_retention_check_interval_ms
                await self.sweep(now_ms)

    async def close(self) -> None:
        """Give up every partition and let the writes that are under way end."""
        for partition in list(self._partitions):
            self.unload(partition)
        await self._journal.drain()

    async def load(self, partition: int) -> None:
        """Become the coordinator of a partition's groups: read what the log remembers of them.

        Until this returns its groups answer COORDINATOR_LOAD_IN_PROGRESS. Raises what reading raises;
        the partition is then not owned.
        """
        owned = _OwnedPartition()
        self.unload(partition)
        self._partitions[partition] = owned
        try:
            snapshots, offsets = await self._journal.read(partition)
        except BaseException:
            if self._partitions.get(partition) is owned:
                del self._partitions[partition]
            raise
        if self._partitions.get(partition) is not owned:
            return  # leadership went away, or came anew, while the log was being read
        now_ms = self._clock_ms()
        for group_id in snapshots.keys() | offsets.keys():
            snapshot = snapshots.get(group_id)
            if snapshot is not None:
                group = Group.restore(group_id, snapshot, self.config, now_ms)
            else:
                group = Group(group_id, self.config, state_since_ms=now_ms)
            owned.groups[group_id] = _Entry(group, offsets.get(group_id, OffsetStore()))
            self._schedule(group)
        owned.loaded = True
        log.debug("groups loaded", partition=partition, groups=len(owned.groups))

    def unload(self, partition: int) -> None:
        """Stop coordinating a partition's groups: whoever waits hears NOT_COORDINATOR."""
        owned = self._partitions.pop(partition, None)
        if owned is None:
            return
        now_ms = self._clock_ms()
        for entry in owned.groups.values():
            self._carry_out(entry, entry.group.close(ErrorCode.not_coordinator, now_ms))

    def tick(self, now_ms: int) -> None:
        """Let everything happen in the groups that is due by now."""
        while self._due_heap and self._due_heap[0][0] <= now_ms:
            due_ms, group_id = heapq.heappop(self._due_heap)
            if self._due_ms.get(group_id) != due_ms:
                continue  # an earlier deadline took this one's place
            del self._due_ms[group_id]
            entry, _ = self._find(group_id)
            if entry is not None:
                self._carry_out(entry, entry.group.tick(now_ms))
                self._schedule(entry.group)

    async def sweep(self, now_ms: int) -> None:
        """Forget offsets nobody has used for the retention time, and groups with nothing left."""
        for partition, owned in list(self._partitions.items()):
            if owned.loaded:
                await self._bury(partition, self._expire(owned, now_ms))

    # -- membership ---------------------------------------------------------------------------------

    async def join(self, group_id: str, request: JoinRequest) -> JoinResult:
        """Wait for the group's next generation. The request's `new_member_id` is drawn here."""
        error = self._join_refusal(group_id, request)
        if error is not ErrorCode.none:
            return JoinResult(error, request.member_id)
        entry, error = self._find(group_id)
        if error is not ErrorCode.none:
            return JoinResult(error, request.member_id)
        now_ms = self._clock_ms()
        if entry is None:
            if request.member_id:
                return JoinResult(ErrorCode.unknown_member_id, request.member_id)
            entry = self._create(group_id, now_ms)
        ticket = next(self._tickets)
        answer: asyncio.Future[JoinResult] = asyncio.get_running_loop().create_future()
        self._waiting_joins[ticket] = answer
        self._carry_out(entry, entry.group.join(request, ticket, now_ms))
        self._schedule(entry.group)
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
        if entry is None:
            return SyncResult(error)
        ticket = next(self._tickets)
        answer: asyncio.Future[SyncResult] = asyncio.get_running_loop().create_future()
        self._waiting_syncs[ticket] = answer
        self._carry_out(entry, entry.group.sync(request, ticket, self._clock_ms()))
        self._schedule(entry.group)
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
        error, decisions = entry.group.heartbeat(member_id, instance_id, generation, self._clock_ms())
        if decisions:  # alone, a heartbeat only moves a deadline further away
            self._carry_out(entry, decisions)
            self._schedule(entry.group)
        return error

    def leave(self, group_id: str, requests: list[LeaveRequest]) -> tuple[ErrorCode, list[LeaveResult]]:
        entry, error = self._find_member_group(group_id)
        if error is ErrorCode.unknown_member_id:
            return ErrorCode.none, [LeaveResult(r.member_id, r.instance_id, error) for r in requests]
        if entry is None:
            return error, []
        results, decisions = entry.group.leave(requests, self._clock_ms())
        self._carry_out(entry, decisions)
        self._schedule(entry.group)
        return ErrorCode.none, results

    # -- offsets ------------------------------------------------------------------------------------

    async def commit(self, group_id: str, request: CommitRequest) -> dict[TopicPartition, ErrorCode]:
        """Put offsets in the log, then in memory. One error for each partition of the request."""
        now_ms = self._clock_ms()
        entry, error = self._find(group_id)
        if error is ErrorCode.none and _is_too_long(group_id):
            error = ErrorCode.invalid_group_id
        if error is ErrorCode.none and entry is None:
            if request.generation >= 0:
                error = ErrorCode.illegal_generation
            else:
                entry = self._create(group_id, now_ms)
        if error is ErrorCode.none and entry is not None:
            error = entry.group.check_commit(request, now_ms)
        if error is not ErrorCode.none or entry is None:
            return dict.fromkeys(request.offsets, error)

        answers = dict.fromkeys(request.offsets, ErrorCode.none)
        committed: dict[TopicPartition, CommittedOffset] = {}
        for partition, wanted in request.offsets.items():
            if len(wanted.metadata.encode()) > self.config.offset_metadata_max_size:
                answers[partition] = ErrorCode.offset_metadata_too_large
                continue
            committed[partition] = CommittedOffset(
                wanted.offset, wanted.leader_epoch, wanted.metadata, now_ms, wanted.expire_timestamp_ms
            )
        if committed:
            error = await self._keep(group_id, entry.offsets, committed)
            answers.update(dict.fromkeys(committed, error))
        return answers

    def fetch_offsets(
        self, group_id: str, partitions: Collection[TopicPartition] | None
    ) -> tuple[ErrorCode, dict[TopicPartition, CommittedOffset | None]]:
        """The committed offset of each partition asked for (None: all that have one)."""
        entry, error = self._find(group_id)
        if error is not ErrorCode.none:
            return error, {}
        if partitions is None:
            return error, dict(entry.offsets.items()) if entry is not None else {}
        if entry is None:
            return error, dict.fromkeys(partitions)
        return error, {partition: entry.offsets.get(partition) for partition in partitions}

    async def delete_offsets(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> tuple[ErrorCode, dict[TopicPartition, ErrorCode]]:
        """Forget offsets, unless a member of the group is subscribed to the topic (KIP-496)."""
        entry, error = self._find_existing_group(group_id)
        if entry is None:
            return error, {}
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
        going = [p for p, answer in answers.items() if answer is ErrorCode.none and entry.offsets.get(p)]
        error = await self._forget_offsets(entry, going)
        return error, answers if error is ErrorCode.none else {}

    async def forget_topics(self, topics: Collection[str]) -> None:
        """Topics were deleted: offsets in them mean nothing to a new topic of the same name."""
        for partition, owned in list(self._partitions.items()):
            keys = []
            for group_id, entry in owned.groups.items():
                for gone in entry.offsets.partitions_of(topics):
                    entry.offsets.remove(gone)
                    keys.append(encode_offset_key(group_id, *gone))
            await self._bury(partition, keys)

    # -- groups as a whole --------------------------------------------------------------------------

    def describe(self, group_id: str) -> GroupDescription:
        """What is known of a group; one that does not exist is Dead, as in Apache Kafka."""
        entry, error = self._find(group_id)
        if error is not ErrorCode.none:
            return GroupDescription(error, group_id)
        if entry is None:
            return GroupDescription(ErrorCode.none, group_id, GroupState.DEAD.value)
        return entry.group.describe()

    def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = ()
    ) -> tuple[ErrorCode, list[GroupListing]]:
        """Groups of this broker; empty filters let everything through, letter case does not matter."""
        wanted_states = {state.lower() for state in states}
        wanted_types = {group_type.lower() for group_type in types}
        listings = [
            GroupListing(group_id, entry.group.protocol_type or "", entry.group.state.value)
            for owned in self._partitions.values()
            for group_id, entry in owned.groups.items()
        ]
        loading = any(not owned.loaded for owned in self._partitions.values())
        return ErrorCode.coordinator_load_in_progress if loading else ErrorCode.none, [
            listing
            for listing in listings
            if (not wanted_states or listing.state.lower() in wanted_states)
            and (not wanted_types or listing.group_type in wanted_types)
        ]

    async def delete_group(self, group_id: str) -> ErrorCode:
        """Forget an empty group and its offsets."""
        entry, error = self._find_existing_group(group_id)
        if entry is None:
            return error
        error = entry.group.delete(self._clock_ms())
        if error is not ErrorCode.none:
            return error
        partition = self._partition_of(group_id)
        self._partitions[partition].groups.pop(group_id, None)
        keys = [encode_offset_key(group_id, *gone) for gone, _ in entry.offsets.items()]
        return await self._bury(partition, [*keys, encode_group_key(group_id)])

    # -- finding groups -----------------------------------------------------------------------------

    def _partition_of(self, group_id: str) -> int:
        return partition_of_group(group_id, self._journal.partition_count())

    def _find(self, group_id: str) -> tuple[_Entry | None, ErrorCode]:
        """The group, or None where it does not exist; an error where this broker cannot know."""
        owned = self._partitions.get(self._partition_of(group_id))
        if owned is None:
            return None, ErrorCode.not_coordinator
        if not owned.loaded:
            return None, ErrorCode.coordinator_load_in_progress
        return owned.groups.get(group_id), ErrorCode.none

    def _find_member_group(self, group_id: str) -> tuple[_Entry | None, ErrorCode]:
        """For requests that only a member can make."""
        if not group_id:
            return None, ErrorCode.invalid_group_id
        entry, error = self._find(group_id)
        return entry, ErrorCode.unknown_member_id if entry is None and error is ErrorCode.none else error

    def _find_existing_group(self, group_id: str) -> tuple[_Entry | None, ErrorCode]:
        """For requests that make sense only where the group exists."""
        entry, error = self._find(group_id)
        return entry, ErrorCode.group_id_not_found if entry is None and error is ErrorCode.none else error

    def _create(self, group_id: str, now_ms: int) -> _Entry:
        entry = _Entry(Group(group_id, self.config, state_since_ms=now_ms))
        self._partitions[self._partition_of(group_id)].groups[group_id] = entry
        return entry

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

    def _carry_out(self, entry: _Entry, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case AnswerJoin(ticket, join_result):
                    _answer(self._waiting_joins.pop(ticket, None), join_result)
                case AnswerSync(ticket, sync_result):
                    _answer(self._waiting_syncs.pop(ticket, None), sync_result)
                case Persist(write_id, snapshot):
                    self._save(entry, write_id, snapshot)

    def _schedule(self, group: Group) -> None:
        deadline_ms = group.deadline_ms()
        if deadline_ms is None:
            return
        due_ms = self._due_ms.get(group.group_id)
        if due_ms is None or deadline_ms < due_ms:
            self._due_ms[group.group_id] = deadline_ms
            heapq.heappush(self._due_heap, (deadline_ms, group.group_id))

    # -- the log ------------------------------------------------------------------------------------

    def _save(self, entry: _Entry, write_id: int, snapshot: GroupSnapshot) -> None:
        """Put a group in the log and tell its state machine how that went."""
        group = entry.group
        record = (encode_group_key(group.group_id), encode_group_value(snapshot))
        written = self._journal.append(self._partition_of(group.group_id), [record])

        async def follow_up() -> None:
            error, _ = await written
            if error is not ErrorCode.none:
                log.warning("group not saved", group=group.group_id, error=error.name)
            self._carry_out(entry, group.persisted(write_id, error, self._clock_ms()))
            self._schedule(group)

        self._journal.start(follow_up())

    async def _keep(
        self,
        group_id: str,
        store: OffsetStore,
        committed: dict[TopicPartition, CommittedOffset],
    ) -> ErrorCode:
        """Put committed offsets in the log, then in memory."""
        records = [
            (encode_offset_key(group_id, *partition), encode_offset_value(value))
            for partition, value in committed.items()
        ]
        written = self._journal.append(self._partition_of(group_id), records)

        async def follow_up() -> ErrorCode:
            error, base_offset = await written
            if error is not ErrorCode.none:
                return _COMMIT_FAILURES.get(error, error)
            for log_offset, (partition, value) in enumerate(committed.items(), base_offset):
                store.put(partition, replace(value, log_offset=log_offset))
            return ErrorCode.none

        return await asyncio.shield(self._journal.start(follow_up()))

    async def _forget_offsets(self, entry: _Entry, partitions: list[TopicPartition]) -> ErrorCode:
        """Put removals in the log, then take the offsets out of memory."""
        group_id = entry.group.group_id
        keys = [encode_offset_key(group_id, *partition) for partition in partitions]
        written = self._journal.append_tombstones(self._partition_of(group_id), keys)

        async def follow_up() -> ErrorCode:
            log_offset = 0
            for tombstones in written:
                error, log_offset = await tombstones
                if error is not ErrorCode.none:
                    return _COMMIT_FAILURES.get(error, error)
            for partition in partitions:
                entry.offsets.remove(partition, before_log_offset=log_offset)
            return ErrorCode.none

        return await asyncio.shield(self._journal.start(follow_up()))

    async def _bury(self, partition: int, keys: list[bytes]) -> ErrorCode:
        """Put removals in the log of what is no longer in memory."""
        for tombstones in self._journal.append_tombstones(partition, keys):
            error, _ = await asyncio.shield(tombstones)
            if error is not ErrorCode.none:
                log.warning(
                    "removals from the offsets topic not saved", partition=partition, error=error.name
                )
                return _COMMIT_FAILURES.get(error, error)
        return ErrorCode.none

    def _expire(self, owned: _OwnedPartition, now_ms: int) -> list[bytes]:
        """Drop from memory what is too old; the keys of what was dropped."""
        keys = []
        for group_id, entry in list(owned.groups.items()):
            group = entry.group
            gone = expired_offsets(
                entry.offsets, _expiry_rule(group), self.config.offsets_retention_ms, now_ms
            )
            for partition in gone:
                entry.offsets.remove(partition)
                keys.append(encode_offset_key(group_id, *partition))
            if not len(entry.offsets) and group.is_forgettable():
                group.delete(now_ms)
                del owned.groups[group_id]
                if group.generation > 0:
                    keys.append(encode_group_key(group_id))
        return keys


def _expiry_rule(group: Group) -> ExpiryRule:
    """KIP-211: offsets age from when the group became empty; those of a group without members, or of
    a topic that no consumer of the group reads any more, from their commit; others not at all."""
    if group.protocol_type is None:
        return ExpiryRule(lambda committed: committed.commit_timestamp_ms)
    if group.state is GroupState.EMPTY:
        since_ms = group.state_since_ms
        return ExpiryRule(lambda committed: since_ms if since_ms >= 0 else committed.commit_timestamp_ms)
    if group.state is GroupState.STABLE and group.protocol_type == CONSUMER_PROTOCOL_TYPE:
        return ExpiryRule(lambda committed: committed.commit_timestamp_ms, group.subscribed_topics())
    return ExpiryRule(lambda committed: committed.commit_timestamp_ms, kept_topics=None)


def _answer(waiting: asyncio.Future[Result] | None, result: Result) -> None:
    """Nobody waits where the client's connection has gone meanwhile."""
    if waiting is not None and not waiting.done():
        waiting.set_result(result)


def _is_too_long(text: str) -> bool:
    return len(text.encode()) > MAX_STRING_SIZE
