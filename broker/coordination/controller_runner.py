"""Runs the controller on the broker that won `/controller`, and fences every write of a former one.

Election: a transaction raises `/controller_epoch` by one and creates the ephemeral `/controller`; either
both happen or neither. Every transaction of the controller begins with a check of `/controller_epoch`'s
znode version, so a controller that was replaced while it slept cannot write, however fresh its reads are.
While the session is suspended nothing is decided; when it is lost the office is lost with it.

Transactions are bounded (`transactions.py`): a topic with many partitions takes several. A topic goes in an
order that a crash in between leaves for the next controller to continue: first what is below it, last its own
znode together with the mark that asks for its deletion. A mark names the topic by its id: one that was made
anew under the same name is not what was to be deleted. Only the controller removes topics, so one that it has
found there is there until it removes it itself.

No state holds up another, nor what else is to be done: one that is not as it was read is left for the next
look, and one that cannot be read for an operator (`controller.py`). What fails again and again is said aloud.

A state that was written is shown to the metadata cache at once, and `written` hears of its topic: it is what
the watch would bring, later, and the broker that is the controller need not wait for that to lead.

Called by `server/broker.py`; woken (`wake`) by the cluster watcher after every change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from uuid import UUID

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.cluster_watcher import ELECTION_PATHS
from millrace.broker.coordination.controller import (
    ClearRequest,
    ClusterPicture,
    CompleteMoves,
    RemoveTopic,
    WriteState,
    decide,
    imbalanced,
)
from millrace.broker.coordination.metadata_cache import NO_CONTROLLER, MetadataCache
from millrace.broker.coordination.picture import picture_of
from millrace.broker.coordination.session import (
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    Operation,
    Session,
    SessionError,
    SessionState,
    SetData,
    VersionConflict,
    operation_bytes,
)
from millrace.broker.coordination.transactions import cut
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.off_loop import Turns

log = structlog.get_logger("millrace.broker")

READS_AT_ONCE = 100
WRITES_AT_ONCE = 500
RETRY_MS = 100
FAILURES_TOLD = 20
"""So many times the same failure in a row, some seconds long, is no picture that is merely out of date."""

_OVERTAKEN = (VersionConflict, NodeExists, NodeMissing)
"""A state is not as the picture has it: written, made or deleted by someone else."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """What an operator may choose; the names are Kafka's."""

    unclean_leader_election: bool = False
    auto_leader_rebalance: bool = True
    imbalance_check_interval_ms: int = 300_000
    imbalance_per_broker_percent: int = 10


class ControllerRunner:
    """Stands for election, and while in office carries out what `controller.decide` says."""

    def __init__(
        self,
        session: Session,
        cache: MetadataCache,
        broker_id: int,
        clock_ms: Callable[[], int],
        settings: ControllerSettings | None = None,
        written: Callable[[set[str]], None] = lambda _topics: None,
    ) -> None:
        self._session = session
        self._cache = cache
        self._broker_id = broker_id
        self._clock_ms = clock_ms
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._settings = settings or ControllerSettings()
        self._written = written
        self._rebalance_timer: asyncio.TimerHandle | None = None
        self._rebalance_due = False
        self._epoch_version = -1
        self._failure = ""
        self._failure_count = 0
        self._removed: set[UUID] = set()
        """Topics that this broker has removed, as long as its picture still shows them."""
        self._may_be_elected = False
        """The answer to an election was lost with the connection."""
        self.epoch = -1
        self.in_office = False

    def set_unclean_by_default(self, allowed: bool) -> None:
        """Whether topics that say nothing themselves may be led from outside their in-sync sets."""
        if allowed != self._settings.unclean_leader_election:
            self._settings = replace(self._settings, unclean_leader_election=allowed)
            self.wake()

    def start(self) -> asyncio.Task[None]:
        """Stand for election, in the task that is returned: it ends only by `stop`, or by a failure."""
        self._session.on_state(self._on_state)
        self._task = asyncio.create_task(self._run(), name="controller")
        self._wait_for_imbalance()
        self.wake()
        return self._task

    def _wait_for_imbalance(self) -> None:
        """Look after the preferred leaders once more when the interval has passed."""
        if self._settings.auto_leader_rebalance:
            delay = self._settings.imbalance_check_interval_ms / 1000
            self._rebalance_timer = asyncio.get_running_loop().call_later(delay, self._look_for_imbalance)

    def _look_for_imbalance(self) -> None:
        self._rebalance_due = True
        self._wait_for_imbalance()
        self.wake()

    async def stop(self) -> None:
        """Leave the office at once, so that another broker need not wait for the session to end."""
        if self._rebalance_timer is not None:
            self._rebalance_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.in_office and self._session.state is SessionState.CONNECTED:
            self.in_office = False
            try:
                # A ZooKeeper that does not answer for so long has ended the session, and the office with it.
                async with asyncio.timeout(self._session.session_timeout_ms / 1000):
                    await self._session.delete(paths.CONTROLLER)
            except (NodeMissing, SessionError) as error:
                log.debug("the controller's znode was gone already", error=str(error))
            except TimeoutError:
                log.warning("left the controller's office without ZooKeeper's answer")

    def wake(self) -> None:
        """The cluster may have changed."""
        self._wake.set()

    def _on_state(self, state: SessionState) -> None:
        if state is SessionState.LOST:
            self._resign("the ZooKeeper session was lost")
        elif state is SessionState.CONNECTED:
            self.wake()

    def _resign(self, reason: str) -> None:
        if self.in_office:
            log.warning("no longer the controller", controller_epoch=self.epoch, reason=reason)
        self.in_office = False

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._session.state is not SessionState.CONNECTED:
                continue
            try:
                try:
                    if not self.in_office:
                        await self._stand_for_election()
                    if self.in_office:
                        await self._carry_out()
                        self._failure = ""
                except VersionConflict as error:
                    self._note(error)
                    await self._check_office()
            except (SessionError, NodeMissing, NodeExists) as error:
                # The picture was out of date, or the connection is gone: look again soon.
                self._note(error)
                await asyncio.sleep(RETRY_MS / 1000)
                self.wake()

    def _note(self, error: Exception) -> None:
        """One failure is usual, and many of the same are told once."""
        self._failure_count = self._failure_count + 1 if str(error) == self._failure else 1
        self._failure = str(error)
        if self._failure_count == FAILURES_TOLD:
            log.warning("the controller fails again and again", times=FAILURES_TOLD, error=self._failure)
        else:
            log.debug("the controller tries again", error=self._failure)

    async def _stand_for_election(self) -> None:
        if self._may_be_elected and self._cache.controller_id == self._broker_id:
            await self._undo_unknown_election()
        if self._cache.controller_id != NO_CONTROLLER:
            return
        try:
            node = await self._session.get(paths.CONTROLLER_EPOCH)
        except NodeMissing:
            try:
                await self._session.create(paths.CONTROLLER_EPOCH, b"0")
            except NodeExists:
                log.debug("another broker made the controller epoch")
            node = await self._session.get(paths.CONTROLLER_EPOCH)
        epoch = int(node.data) + 1
        try:
            await self._session.commit(
                [
                    SetData(paths.CONTROLLER_EPOCH, str(epoch).encode(), node.version),
                    Create(
                        paths.CONTROLLER,
                        paths.encode_controller(self._broker_id, self._clock_ms()),
                        ephemeral=True,
                    ),
                ]
            )
        except SessionError:
            self._may_be_elected = True
            raise
        except (NodeExists, VersionConflict):
            # Another one was quicker, or is about to be; the watcher will say who.
            await asyncio.sleep(RETRY_MS / 1000)
            self.wake()
            return
        self.epoch, self._epoch_version, self.in_office = epoch, node.version + 1, True
        self._may_be_elected = False
        log.info("elected controller", broker_id=self._broker_id, controller_epoch=epoch)

    async def _undo_unknown_election(self) -> None:
        """An election of unknown outcome has happened: all brokers, this one too, take it for the controller,
        and nobody would ever be in office."""
        epoch = await self._session.get(paths.CONTROLLER_EPOCH)
        node = await self._session.get(paths.CONTROLLER)
        if node.owner == self._session.id:
            log.info("elected controller without hearing of it; the election is held again")
            # Who is elected meanwhile has raised the epoch: the office that would be taken away is another's.
            await self._session.commit(
                [Check(paths.CONTROLLER_EPOCH, epoch.version), Delete(paths.CONTROLLER)]
            )

    async def _still_in_office(self) -> None:
        """Raises VersionConflict when another controller has been elected."""
        node = await self._session.get(paths.CONTROLLER_EPOCH)
        if node.version != self._epoch_version:
            raise VersionConflict(paths.CONTROLLER_EPOCH)

    async def _check_office(self) -> None:
        """A write met another version: either the office is gone, or only the picture was old."""
        try:
            await self._still_in_office()
        except VersionConflict:
            self._resign("another controller has a higher epoch")
        await asyncio.sleep(RETRY_MS / 1000)
        self.wake()

    async def _carry_out(self) -> None:
        turns = Turns()
        picture = self._picture()
        rebalancing: frozenset[TopicPartition] = frozenset()
        if self._rebalance_due:
            self._rebalance_due = False
            rebalancing = imbalanced(picture, self._settings.imbalance_per_broker_percent)
            if rebalancing:
                log.info("preferred leaders take their partitions back", partitions=len(rebalancing))
        states: list[WriteState] = []
        doomed: list[RemoveTopic] = []
        after: list[CompleteMoves | ClearRequest] = []
        for decision in decide(replace(picture, rebalancing=rebalancing), self.epoch):
            await turns.maybe()
            match decision:
                case RemoveTopic():
                    doomed.append(decision)
                case WriteState():
                    states.append(decision)
                case CompleteMoves() | ClearRequest():
                    after.append(decision)
        overtaken = await self._write_states(states)
        # Each for itself: one that cannot be carried out must keep no other waiting. Removals come last.
        failures: list[SessionError | NodeMissing | NodeExists | VersionConflict] = []
        if overtaken:
            names = ", ".join(f"{topic}-{number}" for topic, number in sorted(overtaken)[:3])
            failures.append(
                VersionConflict(f"{len(overtaken)} states were written by others meanwhile: {names}")
            )
        for decision in (*after, *doomed):
            if isinstance(decision, ClearRequest) and overtaken & picture.requests[decision.kind].partitions:
                continue  # what was asked for has not been done yet
            try:
                await self._finish(decision)
            except (SessionError, NodeMissing, NodeExists, VersionConflict) as error:
                failures.append(error)
        if failures:
            # What does not match may be the version of the office itself: that is looked after first.
            raise next((error for error in failures if isinstance(error, VersionConflict)), failures[0])

    def _picture(self) -> ClusterPicture:
        """Without the topics that have been removed: what stands under their names by now is others'."""
        picture = picture_of(self._cache, unclean_by_default=self._settings.unclean_leader_election)
        self._removed.intersection_update(self._cache.topic_names)
        if not self._removed:
            return picture
        gone = {self._cache.name_of(topic_id) for topic_id in self._removed}
        topics = {name: partitions for name, partitions in picture.topics.items() if name not in gone}
        return replace(picture, topics=topics)

    async def _finish(self, decision: CompleteMoves | ClearRequest | RemoveTopic) -> None:
        match decision:
            case CompleteMoves():
                await self._complete_moves(decision)
            case ClearRequest(kind, version):
                await self._commit([Delete(ELECTION_PATHS[kind], version)])
            case RemoveTopic(topic):
                await self._remove_topic(topic)

    async def _write_states(self, decisions: Sequence[WriteState]) -> set[TopicPartition]:
        """A state that someone else has written meanwhile (a leader its in-sync set) holds up no other. Those
        are returned."""
        overtaken: set[TopicPartition] = set()
        ids = {name: info.topic_id for name, info in self._cache.topics.items()}
        for start in range(0, len(decisions), WRITES_AT_ONCE):
            overtaken |= await self._write_some(decisions[start : start + WRITES_AT_ONCE], ids)
        return overtaken

    async def _write_some(
        self, decisions: Sequence[WriteState], ids: Mapping[str, UUID]
    ) -> set[TopicPartition]:
        overtaken: set[TopicPartition] = set()
        for topic, group in groupby(decisions, key=lambda decision: decision.topic):
            new = [write.partition for write in group if write.version < 0]
            try:
                for chunk in cut(await self._folders(topic, new)):
                    await self._commit(chunk)
            except _OVERTAKEN as error:
                await self._still_in_office()
                log.debug("the folders of states are not as they were read", topic=topic, error=str(error))
        written = 0
        for operations in cut([_write(decision) for decision in decisions]):
            writes = decisions[written : written + len(operations)]
            written += len(operations)
            try:
                await self._commit(operations)
            except _OVERTAKEN:
                overtaken |= await self._write_one_by_one(writes, ids)
            else:
                self._show(writes, ids)
        return overtaken

    def _show(self, writes: Sequence[WriteState], ids: Mapping[str, UUID]) -> None:
        shown = set()
        for topic, written in groupby(writes, key=lambda write: write.topic):
            info = self._cache.topic(topic)
            # A topic that was made anew meanwhile has states of its own.
            if info is None or info.topic_id != ids.get(topic):
                continue
            states = {write.partition: (write.state, write.version + 1) for write in written}
            if self._cache.set_states(topic, states):
                shown.add(topic)
        self._written(shown)
        self._cache.announce()

    async def _write_one_by_one(
        self, decisions: Sequence[WriteState], ids: Mapping[str, UUID]
    ) -> set[TopicPartition]:
        await self._still_in_office()
        overtaken = set()
        for decision in decisions:
            try:
                await self._commit([_write(decision)])
                self._show([decision], ids)
            except _OVERTAKEN:
                log.debug("a state was overtaken", topic=decision.topic, partition=decision.partition)
                overtaken.add((decision.topic, decision.partition))
        return overtaken

    async def _complete_moves(self, moves: CompleteMoves) -> None:
        """The new replicas and states of partitions of one topic, of as many at once as a transaction takes.
        There is no moment at which an in-sync member is not a replica, or the other way round."""
        path = paths.topic_path(moves.topic)
        node = await self._session.get(path)
        if node.version != moves.version:
            raise VersionConflict(path)
        assignment, version = paths.decode_topic(node.data), node.version
        # What has arrived is told in fewer bytes than what moves: the znode only shrinks.
        beside = operation_bytes(SetData(path, node.data))
        arrived = iter(moves.states)
        for states in cut([_write(state) for state in moves.states], beside=beside):
            done = {each.partition: moves.replicas[each.partition] for each in islice(arrived, len(states))}
            assignment = replace(
                assignment,
                partitions={**assignment.partitions, **done},
                adding=_without(assignment.adding, done),
                removing=_without(assignment.removing, done),
            )
            await self._commit([SetData(path, paths.encode_topic(assignment), version), *states])
            version += 1
            for number, replicas in done.items():
                log.info(
                    "a partition has moved", topic=moves.topic, partition=number, replicas=list(replicas)
                )

    async def _folders(self, topic: str, partitions: Sequence[int]) -> list[Operation]:
        """Creations of the znodes above new states, as far as they are missing."""
        if not partitions:
            return []
        try:
            present = set(await self._session.children(paths.partitions_path(topic)))
            operations: list[Operation] = []
        except NodeMissing:
            present = set()
            operations = [Create(paths.partitions_path(topic), b"")]
        return operations + [
            Create(paths.partition_path(topic, number), b"")
            for number in partitions
            if str(number) not in present
        ]

    async def _remove_topic(self, topic: str) -> None:
        """Delete the topic's znodes; brokers drop its logs when they see it gone. Every transaction holds
        only while the mark stands that asks for it."""
        mark_path, topic_path = paths.delete_topic_path(topic), paths.topic_path(topic)
        try:
            mark = await self._session.get(mark_path)
        except NodeMissing:
            return
        fence = Check(mark_path, mark.version)
        try:
            found = await self._session.get(topic_path)
            topic_id = _meant(mark, found)
        except (NodeMissing, ValueError) as error:
            log.info("a deletion is dropped: what it names is not there", topic=topic, error=str(error))
            await self._commit([fence, Delete(mark_path)])
            return
        folder = paths.partitions_path(topic)
        numbers = await self._children(folder)
        doomed: list[Operation] = []
        for start in range(0, len(numbers), READS_AT_ONCE):
            chunk = numbers[start : start + READS_AT_ONCE]
            below = await asyncio.gather(*(self._children(f"{folder}/{number}") for number in chunk))
            for number, children in zip(chunk, below, strict=True):
                doomed += [Delete(f"{folder}/{number}/{child}") for child in children]
                doomed.append(Delete(f"{folder}/{number}"))
        for operations in cut(doomed):
            await self._commit([fence, *operations])
        beside = [
            Delete(path)
            for path in (folder, paths.topic_config_path(topic))
            if await self._session.exists(path)
        ]
        counted = SetData(paths.DELETE_TOPICS, b"")
        await self._commit([fence, *beside, Delete(topic_path, found.version), Delete(mark_path), counted])
        if topic_id is not None:
            self._removed.add(topic_id)
        log.info("topic deleted", topic=topic, topic_id=str(topic_id))

    async def _children(self, path: str) -> list[str]:
        try:
            return await self._session.children(path)
        except NodeMissing:
            return []

    async def _commit(self, operations: Sequence[Operation]) -> None:
        await self._session.commit([Check(paths.CONTROLLER_EPOCH, self._epoch_version), *operations])


def _meant(mark: Node, topic: Node) -> UUID | None:
    """The id of a topic that a mark asks to delete; None where the mark names none (other tools' do not) and
    the topic cannot be understood. Raises ValueError when another topic is meant."""
    named = paths.decode_deletion(mark.data)
    try:
        found = paths.decode_topic(topic.data).topic_id
    except ValueError:
        found = None
    if named not in (None, found):
        raise ValueError(f"the topic {named} is gone, {found} has its name")
    return found


def _write(decision: WriteState) -> Operation:
    path, data = paths.state_path(decision.topic, decision.partition), paths.encode_state(decision.state)
    return Create(path, data) if decision.version < 0 else SetData(path, data, decision.version)


def _without(replicas: Mapping[int, tuple[int, ...]], numbers: Container[int]) -> dict[int, tuple[int, ...]]:
    return {number: ids for number, ids in replicas.items() if number not in numbers}
