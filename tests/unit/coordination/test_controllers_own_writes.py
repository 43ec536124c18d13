"""What a controller has written is shown on its own broker before any watch brings it; what it cannot write
holds up nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from millrace.broker.coordination import controller_runner, paths
from millrace.broker.coordination.controller_runner import FAILURES_TOLD, ControllerRunner
from millrace.broker.coordination.metadata_cache import Election, MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.coordination.session import (
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    Operation,
    SessionState,
    SetData,
    VersionConflict,
)
from millrace.broker.errors import MillraceError
from millrace.broker.replication import off_loop
from millrace.broker.replication.partition import NO_LEADER, PartitionState

OWN_ID = 1
PARTITIONS = 3
EPOCH_VERSION = 5


class States:
    """A session that knows versions of state znodes, and nothing else of what it takes. `on_commit` happens
    after a transaction was carried out, before its answer arrives."""

    id = 77

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.written: dict[str, PartitionState] = {}
        self.deleted: list[str] = []
        self.on_commit: Callable[[], None] = lambda: None

    state = SessionState.CONNECTED

    async def commit(self, operations: Sequence[Operation]) -> None:
        if isinstance(operations[-1], Delete):
            self.deleted.append(operations[-1].path)
        for each in operations:
            if isinstance(each, Create):
                raise NodeExists(each.path)
            if isinstance(each, SetData) and each.path not in self.versions:
                raise NodeMissing(each.path)
        writes = [each for each in operations if isinstance(each, SetData)]
        for write in writes:
            if self.versions[write.path] != write.version:
                raise VersionConflict(write.path)
        for write in writes:
            self.versions[write.path] += 1
            self.written[write.path] = paths.decode_state(write.data)
        self.on_commit()
        await asyncio.sleep(0)

    async def children(self, _path: str) -> list[str]:
        return [str(number) for number in range(PARTITIONS)]

    async def get(self, path: str, _watch: object = None) -> Node:
        if path != paths.CONTROLLER_EPOCH:
            raise NodeMissing(path)
        return Node(b"2", version=EPOCH_VERSION, owner=0, created_zxid=1)


class Office:
    """A controller whose broker has come back: its partitions, three of topic "t", have no leader."""

    def __init__(self) -> None:
        self.session = States()
        self.cache = MetadataCache()
        self.cache.set_broker(BrokerRegistration(OWN_ID, "h", 9092, None))
        self.told: list[set[str]] = []
        self.make_topic(uuid4())
        for number in range(PARTITIONS):
            state = PartitionState(NO_LEADER, 4, (OWN_ID,), 1)
            self.cache.set_state("t", number, state, 6)
            self.session.versions[paths.state_path("t", number)] = 6
        session: Any = self.session
        self.runner = ControllerRunner(session, self.cache, OWN_ID, lambda: 0, written=self.told.append)
        self.runner.epoch, self.runner._epoch_version = 2, EPOCH_VERSION

    def make_topic(self, topic_id: UUID) -> None:
        assigned = TopicAssignment(topic_id, dict.fromkeys(range(PARTITIONS), (OWN_ID,)))
        self.cache.set_assignment("t", assigned)

    def shown(self) -> list[tuple[int, int, int]]:
        """Leader, leader epoch and version of each partition."""
        info = self.cache.topic("t")
        assert info is not None
        return [(part.leader, part.leader_epoch, part.state_version) for part in info.partitions.values()]

    def carry_out(self) -> None:
        asyncio.run(self.runner._carry_out())


def test_very_many_states_are_written_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one go would hold up everyone."""
    monkeypatch.setattr(controller_runner, "WRITES_AT_ONCE", 2)
    office, shown = Office(), []
    office.session.on_commit = lambda: shown.append([leader for leader, _, _ in office.shown()])
    office.carry_out()
    assert shown == [[NO_LEADER] * 3, [OWN_ID, OWN_ID, NO_LEADER]]
    assert office.shown() == [(OWN_ID, 5, 7)] * PARTITIONS


def test_others_have_their_turn_while_it_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(off_loop, "TURN_SECONDS", -1.0)
    office, turns = Office(), []

    async def carry_out() -> None:
        carried = asyncio.ensure_future(office.runner._carry_out())
        while not office.session.written and not carried.done():
            turns.append(len(turns))
            await asyncio.sleep(0)
        await carried

    asyncio.run(carry_out())
    assert len(turns) > PARTITIONS
    assert office.shown() == [(OWN_ID, 5, 7)] * PARTITIONS


def test_leaders_that_were_elected_are_shown_and_told_of_at_once() -> None:
    office = Office()
    office.carry_out()
    assert office.shown() == [(OWN_ID, 5, 7)] * PARTITIONS
    assert office.told == [{"t"}]
    office.session.written.clear()
    office.carry_out()
    assert office.session.written == {}, "what it has written itself is not decided again"


def test_a_topic_that_was_made_anew_meanwhile_keeps_its_own_states() -> None:
    office = Office()
    office.session.on_commit = lambda: office.make_topic(uuid4())
    office.carry_out()
    assert office.shown() == [(NO_LEADER, -1, -1)] * PARTITIONS
    assert office.told == [set()]


def test_newer_states_that_were_read_meanwhile_stay() -> None:
    office = Office()
    newer = PartitionState(2, 9, (2,), 3)
    office.session.on_commit = lambda: office.cache.set_state("t", 0, newer, 8) and None
    office.carry_out()
    assert office.shown() == [(2, 9, 8), (OWN_ID, 5, 7), (OWN_ID, 5, 7)]


def test_what_another_has_overtaken_is_not_shown() -> None:
    office = Office()
    office.session.versions[paths.state_path("t", 1)] = 7  # a write that this broker has not heard of
    with pytest.raises(VersionConflict):
        office.carry_out()
    part = office.cache.partition("t", 1)
    assert part is not None and part.leader == NO_LEADER
    assert office.shown()[0] == office.shown()[2] == (OWN_ID, 5, 7), "the others went through one by one"
    office.session.written.clear()
    with pytest.raises(VersionConflict):
        office.carry_out()
    assert office.session.written == {}, "and are not decided again"


def test_check_of_the_office_comes_first() -> None:
    """The fence is in the same transaction as what is shown."""
    office = Office()
    seen: list[Operation] = []
    commit = office.session.commit

    async def noted(operations: Sequence[Operation]) -> None:
        seen.extend(operations[:1])
        await commit(operations)

    office.session.commit = noted  # type: ignore[method-assign]
    office.carry_out()
    assert seen and all(isinstance(each, Check) and each.path == paths.CONTROLLER_EPOCH for each in seen)


def test_a_state_that_is_there_unknown_or_gone_holds_up_no_other() -> None:
    office = Office()
    del office.session.versions[paths.state_path("t", 0)]
    office.cache.set_assignment("u", TopicAssignment(uuid4(), {0: (OWN_ID,)}))  # its state is not known
    with pytest.raises(MillraceError) as failed:
        office.carry_out()
    assert str(failed.value).endswith("written by others meanwhile: t-0, u-0")
    assert office.shown()[1:] == [(OWN_ID, 5, 7)] * 2


def test_a_state_that_is_overtaken_holds_up_only_the_election_that_was_asked_for_it() -> None:
    office = Office()
    office.session.versions[paths.state_path("t", 1)] = 7
    office.cache.elections["preferred"] = Election(frozenset({("t", 0)}), 3)
    office.cache.elections["unclean"] = Election(frozenset({("t", 1)}), 3)
    with pytest.raises(VersionConflict):
        office.carry_out()
    assert office.session.deleted == [paths.PREFERRED_ELECTION]


def test_a_state_that_cannot_be_read_is_left_as_it_is() -> None:
    office = Office()
    office.cache.set_unreadable("t", 1, True)
    office.carry_out()
    assert [*office.session.written] == [paths.state_path("t", number) for number in (0, 2)]
    mended = PartitionState(NO_LEADER, 4, (OWN_ID,), 1)
    office.cache.set_state("t", 1, mended, 8)
    office.session.versions[paths.state_path("t", 1)] = 8
    office.carry_out()
    assert office.shown() == [(OWN_ID, 5, 7), (OWN_ID, 5, 9), (OWN_ID, 5, 7)]


def test_what_fails_again_and_again_is_said_aloud_once() -> None:
    office = Office()
    with capture_logs() as said:
        for _ in range(3 * FAILURES_TOLD):
            office.runner._note(VersionConflict("t-1"))
        office.runner._note(NodeExists("u-0"))
    loud = [each for each in said if each["log_level"] == "warning"]
    assert [each["error"] for each in loud] == ["t-1"]
