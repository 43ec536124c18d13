"""The classic group protocol step by step, without a client library in between: its codes and its states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from millrace.broker.protocol.frames import Api
from tests.raw_client import RawClient
from tests.wire.foreign_clients import error_name, wait_until

pytestmark = pytest.mark.usefixtures("coordinators")

SESSION_MS = 10_000
NO_COORDINATOR = {"COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "NOT_COORDINATOR"}


def when_ready(ask: Callable[[], Any]) -> Any:
    """The first answer that is not about a coordinator that still wakes up."""
    answers: list[Any] = []

    def answered() -> bool:
        answers.append(ask())
        return error_name(answers[-1].error_code) not in NO_COORDINATOR

    wait_until(answered, "a coordinator")
    return answers[-1]


@dataclass
class Member:
    """One member of a classic group, on a connection of its own: a join may be answered late."""

    raw: RawClient
    group: str
    id: str = ""
    generation: int = -1
    instance: str | None = None

    def join(self, protocols: tuple[str, ...] = ("range",), **changes: Any) -> Any:
        fields = {
            "group_id": self.group,
            "session_timeout": SESSION_MS,
            "rebalance_timeout": SESSION_MS,
            "member_id": self.id,
            "group_instance_id": self.instance,
            "protocol_type": "consumer",
            "protocols": [{"name": name, "metadata": b"m"} for name in protocols],
            **changes,
        }
        answer = when_ready(lambda: self.raw.ask(Api.JOIN_GROUP, 7, **fields))
        if answer.error_code == 0:
            self.id, self.generation = answer.member_id, answer.generation_id
        return answer

    def enter(self, **changes: Any) -> Any:
        """Both steps of a first join."""
        answer = self.join(**changes)
        if error_name(answer.error_code) == "MEMBER_ID_REQUIRED":
            self.id = answer.member_id
            answer = self.join(**changes)
        assert answer.error_code == 0, answer
        return answer

    def sync(self, assignments: dict[str, bytes] | None = None, **changes: Any) -> Any:
        fields = {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.id,
            "group_instance_id": self.instance,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [{"member_id": m, "assignment": a} for m, a in (assignments or {}).items()],
            **changes,
        }
        return self.raw.ask(Api.SYNC_GROUP, 5, **fields)

    def heartbeat(self, **changes: Any) -> str:
        fields = {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.id,
            "group_instance_id": self.instance,
            **changes,
        }
        return error_name(self.raw.ask(Api.HEARTBEAT, 4, **fields).error_code)

    def commit(self, topic: str, offset: int, metadata: str | None = "", **changes: Any) -> str:
        partition = {
            "partition_index": 0,
            "committed_offset": offset,
            "committed_leader_epoch": -1,
            "committed_metadata": metadata,
        }
        fields = {
            "group_id": self.group,
            "generation_id_or_member_epoch": self.generation,
            "member_id": self.id,
            "group_instance_id": self.instance,
            "topics": [{"name": topic, "partitions": [partition]}],
            **changes,
        }
        answers: list[str] = []

        def answered() -> bool:
            (found,) = self.raw.ask(Api.OFFSET_COMMIT, 8, **fields).topics[0].partitions
            answers.append(error_name(found.error_code))
            return answers[-1] not in NO_COORDINATOR

        wait_until(answered, "a coordinator")
        return answers[-1]

    def leave(self, **changes: Any) -> tuple[str, list[str]]:
        members = [{"member_id": self.id, "group_instance_id": self.instance, **changes}]
        answer = self.raw.ask(Api.LEAVE_GROUP, 4, group_id=self.group, members=members)
        return error_name(answer.error_code), [error_name(m.error_code) for m in answer.members]


@pytest.fixture
def new_member(server, fresh_name) -> Any:
    """`new_member(group=None, instance=None)`: a member that has not joined yet."""
    connections: list[RawClient] = []

    def make(group: str | None = None, instance: str | None = None) -> Member:
        connections.append(RawClient(server.port))
        return Member(connections[-1], group or fresh_name("group"), instance=instance)

    yield make
    for connection in connections:
        connection.socket.close()


def state_of(raw: RawClient, group: str) -> tuple[str, str, int]:
    asked: list[Any] = []

    def answered() -> bool:
        asked.extend(raw.ask(Api.DESCRIBE_GROUPS, 5, groups=[group]).groups)
        return error_name(asked[-1].error_code) not in NO_COORDINATOR

    wait_until(answered, "a coordinator")
    shown = asked[-1]
    return error_name(shown.error_code), shown.group_state, len(shown.members)


def wait_for_state(raw: RawClient, group: str, *expected: str | int) -> None:
    """A description may show what was a moment ago: what is not yet in the offsets log is not described."""
    wait_until(lambda: state_of(raw, group) == expected, f"{group} is {expected}")


def test_joins_that_cannot_be(new_member):
    first = new_member()
    asked_for_id = first.join()
    codes = {
        "no member id yet": error_name(asked_for_id.error_code),
        "empty group id": error_name(new_member().join(group_id="").error_code),
        "session too short": error_name(new_member().join(session_timeout=10).error_code),
        "session too long": error_name(new_member().join(session_timeout=2_000_000).error_code),
        "a member id nobody gave": error_name(new_member().join(member_id="me").error_code),
        "no protocols": error_name(new_member().join(protocols=()).error_code),
        "no protocol type": error_name(new_member().join(protocol_type="").error_code),
    }
    assert asked_for_id.member_id.startswith("raw-"), "a member id begins with the client's id"
    member = new_member()
    member.enter()
    member.sync({member.id: b"all"})
    other = new_member(member.group)
    codes["other protocols"] = error_name(other.join(("cooperative-sticky",)).error_code)
    codes["other protocol type"] = error_name(other.join(protocol_type="connect").error_code)
    assert codes == {
        "no member id yet": "MEMBER_ID_REQUIRED",
        "empty group id": "INVALID_GROUP_ID",
        "session too short": "INVALID_SESSION_TIMEOUT",
        "session too long": "INVALID_SESSION_TIMEOUT",
        "a member id nobody gave": "UNKNOWN_MEMBER_ID",
        "no protocols": "INCONSISTENT_GROUP_PROTOCOL",
        "no protocol type": "INCONSISTENT_GROUP_PROTOCOL",
        "other protocols": "INCONSISTENT_GROUP_PROTOCOL",
        "other protocol type": "INCONSISTENT_GROUP_PROTOCOL",
    }


def test_life_of_a_group_of_one(raw, new_member, new_topic):
    topic, member = new_topic(), new_member()
    wait_for_state(raw, member.group, "NONE", "Dead", 0)
    joined = member.enter()
    assert (joined.leader, joined.protocol_name, joined.generation_id) == (member.id, "range", 1)
    assert [m.member_id for m in joined.members] == [member.id]
    wait_for_state(raw, member.group, "NONE", "CompletingRebalance", 1)
    assert member.heartbeat() == "NONE"
    assert member.commit(topic, 3) == "REBALANCE_IN_PROGRESS"
    synced = member.sync({member.id: b"all of it"})
    assert (error_name(synced.error_code), synced.assignment) == ("NONE", b"all of it")
    wait_for_state(raw, member.group, "NONE", "Stable", 1)
    codes = {
        "heartbeat": member.heartbeat(),
        "heartbeat of a stranger": member.heartbeat(member_id="stranger"),
        "heartbeat of an older generation": member.heartbeat(generation_id=0),
        "heartbeat of a group that is not": member.heartbeat(group_id="no-such-group"),
        "commit": member.commit(topic, 5, "note"),
        "commit of a stranger": member.commit(topic, 6, member_id="stranger"),
        "commit of an older generation": member.commit(topic, 6, generation_id_or_member_epoch=0),
        "commit without membership": member.commit(topic, 6, member_id="", generation_id_or_member_epoch=-1),
        "commit with a long note": member.commit(topic, 6, "x" * 4_097),
        "commit to a topic that is not": member.commit("no-such-topic", 1),
        "sync of a stranger": error_name(member.sync(member_id="stranger").error_code),
        "sync of an older generation": error_name(member.sync(generation_id=0).error_code),
        "sync with another protocol": error_name(member.sync(protocol_name="roundrobin").error_code),
        "sync again": error_name(member.sync().error_code),
    }
    assert codes == {
        "heartbeat": "NONE",
        "heartbeat of a stranger": "UNKNOWN_MEMBER_ID",
        "heartbeat of an older generation": "ILLEGAL_GENERATION",
        "heartbeat of a group that is not": "UNKNOWN_MEMBER_ID",
        "commit": "NONE",
        "commit of a stranger": "UNKNOWN_MEMBER_ID",
        "commit of an older generation": "ILLEGAL_GENERATION",
        "commit without membership": "UNKNOWN_MEMBER_ID",
        "commit with a long note": "OFFSET_METADATA_TOO_LARGE",
        "commit to a topic that is not": "UNKNOWN_TOPIC_OR_PARTITION",
        "sync of a stranger": "UNKNOWN_MEMBER_ID",
        "sync of an older generation": "ILLEGAL_GENERATION",
        "sync with another protocol": "INCONSISTENT_GROUP_PROTOCOL",
        "sync again": "NONE",
    }
    assert member.leave(member_id="stranger") == ("NONE", ["UNKNOWN_MEMBER_ID"])
    assert member.leave() == ("NONE", ["NONE"])
    wait_for_state(raw, member.group, "NONE", "Empty", 0)
    assert member.heartbeat() == "UNKNOWN_MEMBER_ID"


def test_second_member_makes_the_first_join_again(raw, new_member, new_topic):
    topic = new_topic()
    first = new_member()
    first.enter()
    first.sync({first.id: b"all"})
    second = new_member(first.group)
    second.id = second.join().member_id  # MEMBER_ID_REQUIRED: nothing has changed for the group
    assert first.heartbeat() == "NONE"
    second.raw.send(_join_frame(second))
    wait_until(lambda: first.heartbeat() == "REBALANCE_IN_PROGRESS", "the first member is told")
    wait_until(lambda: state_of(raw, first.group)[1] == "PreparingRebalance", "a rebalance")
    assert first.commit(topic, 1) == "NONE", "what was read before may still be committed"
    rejoined = first.join()
    assert (rejoined.generation_id, rejoined.leader) == (2, first.id)
    assert {m.member_id for m in rejoined.members} == {first.id, second.id}
    answer = _joined(second)
    assert (answer.generation_id, answer.leader, len(answer.members)) == (2, first.id, 0)
    second.generation = 2
    first.sync({first.id: b"half", second.id: b"other half"})
    assert second.sync().assignment == b"other half"
    assert second.leave() == ("NONE", ["NONE"])
    wait_until(lambda: first.heartbeat() == "REBALANCE_IN_PROGRESS", "the first member is told again")
    assert first.join().generation_id == 3


def _join_frame(member: Member) -> bytes:
    from millrace.broker.protocol.frames import encode_request
    from millrace.broker.server.answers import build_entity, request_type

    fields = {
        "group_id": member.group,
        "session_timeout": SESSION_MS,
        "rebalance_timeout": SESSION_MS,
        "member_id": member.id,
        "group_instance_id": member.instance,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"m"}],
    }
    return bytes(encode_request(build_entity(request_type(Api.JOIN_GROUP, 7), fields), 1, "raw"))


def _joined(member: Member) -> Any:
    from millrace.broker.protocol.frames import decode_response
    from millrace.broker.server.answers import response_type

    return decode_response(response_type(Api.JOIN_GROUP, 7), member.raw.receive())


def test_static_member_that_comes_twice_fences_the_first(raw, new_member, new_topic):
    topic = new_topic()
    first = new_member(instance="host-1")
    first.enter()
    first.sync({first.id: b"all"})
    again = new_member(first.group, instance="host-1")
    joined = again.enter()
    assert joined.generation_id == 1, "the same member, as far as the group can tell"
    assert again.id != first.id
    codes = {
        "heartbeat": first.heartbeat(),
        "commit": first.commit(topic, 1),
        "sync": error_name(first.sync().error_code),
        "join": error_name(first.join().error_code),
        "leave": first.leave(),
        "the new one's sync": again.sync().assignment,
        "the new one's heartbeat": again.heartbeat(),
    }
    assert codes == {
        "heartbeat": "FENCED_INSTANCE_ID",
        "commit": "FENCED_INSTANCE_ID",
        "sync": "FENCED_INSTANCE_ID",
        "join": "FENCED_INSTANCE_ID",
        "leave": ("NONE", ["FENCED_INSTANCE_ID"]),
        "the new one's sync": b"all",
        "the new one's heartbeat": "NONE",
    }
    # By its instance name alone, as an administrator removes it.
    assert again.leave(member_id="") == ("NONE", ["NONE"])
    wait_for_state(raw, first.group, "NONE", "Empty", 0)


def test_silent_member_is_removed_after_its_session(raw, new_member):
    member = new_member()
    member.enter(session_timeout=6_000)
    member.sync({member.id: b"all"})
    wait_until(lambda: state_of(raw, member.group) == ("NONE", "Empty", 0), "the session is over")
    assert member.heartbeat() == "UNKNOWN_MEMBER_ID"


def fetched(raw: RawClient, group: str, *topics: str, version: int = 8) -> Any:
    asked = [{"name": topic, "partition_indexes": [0]} for topic in topics] or None
    (shown,) = raw.ask(
        Api.OFFSET_FETCH, version, groups=[{"group_id": group, "topics": asked}], require_stable=True
    ).groups
    return error_name(shown.error_code), {
        topic.name: [(p.committed_offset, p.metadata, error_name(p.error_code)) for p in topic.partitions]
        for topic in shown.topics
    }


def test_offsets_of_groups_are_kept_read_and_deleted(raw, new_member, new_topic, fresh_name):
    topic, other, member = new_topic(), new_topic(), new_member()
    assert member.commit(topic, 7, "note") == "NONE"
    assert member.commit(other, 8, None) == "NONE"
    assert fetched(raw, member.group, topic) == ("NONE", {topic: [(7, "note", "NONE")]})
    assert fetched(raw, member.group) == (
        "NONE",
        {topic: [(7, "note", "NONE")], other: [(8, "", "NONE")]},
    )
    assert fetched(raw, fresh_name("unknown"), topic) == ("NONE", {topic: [(-1, "", "NONE")]})
    assert fetched(raw, fresh_name("unknown")) == ("NONE", {})
    assert fetched(raw, member.group, "no-such-topic") == ("NONE", {"no-such-topic": [(-1, "", "NONE")]})
    wait_for_state(raw, member.group, "NONE", "Empty", 0)

    def deleted(group: str, topic: str) -> tuple[str, list[str]]:
        answer = raw.ask(
            Api.OFFSET_DELETE,
            0,
            group_id=group,
            topics=[{"name": topic, "partitions": [{"partition_index": 0}]}],
        )
        return error_name(answer.error_code), [
            error_name(p.error_code) for t in answer.topics for p in t.partitions
        ]

    assert deleted(member.group, topic) == ("NONE", ["NONE"])
    assert fetched(raw, member.group) == ("NONE", {other: [(8, "", "NONE")]})
    assert deleted(fresh_name("unknown"), topic) == ("GROUP_ID_NOT_FOUND", [])
    assert deleted(member.group, "no-such-topic") == ("NONE", ["UNKNOWN_TOPIC_OR_PARTITION"])


def test_groups_are_deleted_only_when_empty(raw, new_member, new_topic, fresh_name):
    topic, member = new_topic(), new_member()
    member.enter()
    member.sync({member.id: b"all"})
    assert member.commit(topic, 1) == "NONE"

    def deleted(group: str) -> str:
        (result,) = raw.ask(Api.DELETE_GROUPS, 2, groups_names=[group]).results
        return error_name(result.error_code)

    assert deleted(member.group) == "NON_EMPTY_GROUP"
    member.leave()
    assert deleted(member.group) == "NONE"
    assert deleted(member.group) == "GROUP_ID_NOT_FOUND"
    assert deleted("") == "GROUP_ID_NOT_FOUND"
    assert fetched(raw, member.group, topic) == ("NONE", {topic: [(-1, "", "NONE")]})


def test_groups_are_listed_by_state(raw, new_member, new_topic):
    topic = new_topic()
    empty, stable = new_member(), new_member()
    empty.commit(topic, 1)
    stable.enter()
    stable.sync({stable.id: b"all"})

    def listed(*states: str) -> dict[str, tuple[str, str]]:
        answer = raw.ask(Api.LIST_GROUPS, 4, states_filter=states)
        assert answer.error_code == 0
        return {g.group_id: (g.protocol_type, g.group_state) for g in answer.groups}

    wait_until(lambda: listed().get(stable.group) == ("consumer", "Stable"), "the group is listed")
    everything = listed()
    assert everything[empty.group] == ("", "Empty")
    assert everything[stable.group] == ("consumer", "Stable")
    assert stable.group in listed("Stable")
    assert empty.group not in listed("Stable")
    assert empty.group in listed("Empty")
    assert stable.group in listed("stable"), "states are compared without case"


def test_coordinators_are_found_by_group_and_by_transactional_id(raw, server, fresh_name):
    def found(key_type: int, *keys: str, version: int = 4) -> list[tuple[str, int]]:
        answer = raw.ask(Api.FIND_COORDINATOR, version, key_type=key_type, coordinator_keys=keys)
        return [(error_name(c.error_code), c.port) for c in answer.coordinators]

    for key_type in (0, 1):
        wait_until(lambda: found(key_type, "x")[0][0] == "NONE", "a coordinator")  # noqa: B023
        names = [fresh_name("key") for _ in range(3)]
        assert found(key_type, *names) == [("NONE", server.port)] * 3
    assert found(7, "x") == [("INVALID_REQUEST", -1)]
