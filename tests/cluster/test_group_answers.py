"""The whole answers of the group APIs, in every version, held against Apache Kafka's own.

One history of requests, good and bad, goes to both servers on a bare socket; each answer must be the same but
for what cannot be (ids that servers draw, times, which broker it is). `DIFFERENT` lists what is meant to
differ, and fails when it no longer does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.frames import Api
from tests.raw_client import RawClient
from tests.servers import BrokerProcess
from tests.waiting import until

pytestmark = [pytest.mark.java, pytest.mark.kafka]

PATIENCE_S = 90.0
NO_COORDINATOR = {
    ErrorCode.coordinator_not_available,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.not_coordinator,
}
SUBSCRIBED_TO_A = bytes.fromhex("0001 00000001 0001 61 ffffffff")
UNTOLD = {"throttle_time", "node_id", "host", "port", "authorized_operations"}
"""Fields that are about the server and not about the group."""

DIFFERENT: dict[str, str] = {}
"""Label of a step -> why Millrace answers otherwise."""


def plain(value: Any, names: dict[str, str]) -> Any:
    """An answer as plain data in a fixed order, with drawn ids by the names that the history gave them."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name), names)
            for field in dataclasses.fields(value)
            if field.name not in UNTOLD
        }
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple | list):
        return sorted((plain(each, names) for each in value), key=repr)
    return names.get(value, value) if isinstance(value, str) else value


class History:
    """The requests to one server, and its answers by their labels."""

    def __init__(self, port: int) -> None:
        self.client = RawClient(port)
        self.answers: dict[str, Any] = {}
        self.names: dict[str, str] = {}

    def ask(self, label: str, api: Api, version: int, **fields: Any) -> Any:
        answer = self.client.ask(api, version, **fields)
        label = f"{label}, {api.name} v{version}"
        assert label not in self.answers, f"two steps are called {label}"
        self.answers[label] = plain(answer, self.names)
        return answer

    def until_coordinated(self, group: str) -> None:
        def is_coordinated() -> bool:
            self.client.ask(Api.FIND_COORDINATOR, 0, key=group)
            found = self.client.ask(Api.DESCRIBE_GROUPS, 0, groups=[group]).groups[0].error_code
            return found not in NO_COORDINATOR

        until(is_coordinated, f"{group} has a coordinator", within_s=PATIENCE_S)

    def until_led(self, *topics: str) -> None:
        def are_led() -> bool:
            named = [{"name": topic} for topic in topics]
            shown = self.client.ask(Api.METADATA, 9, topics=named, allow_auto_topic_creation=False).topics
            return not any(topic.error_code or any(p.error_code for p in topic.partitions) for topic in shown)

        until(are_led, f"{topics} are led", within_s=PATIENCE_S)

    def member(self, label: str, group: str, kind: str = "consumer", instance: str | None = None) -> str:
        """Join, sync and hold all there is; the member's id."""
        fields = {
            "group_id": group,
            "session_timeout": 300_000,
            "rebalance_timeout": 300_000,
            "protocol_type": kind,
            "group_instance_id": instance,
            "protocols": [{"name": "range", "metadata": SUBSCRIBED_TO_A}],
        }
        joined = self.client.ask(Api.JOIN_GROUP, 9, **fields)
        if joined.error_code is ErrorCode.member_id_required:
            self.names[joined.member_id] = label
            joined = self.client.ask(Api.JOIN_GROUP, 9, **fields | {"member_id": joined.member_id})
        self.names[joined.member_id] = label
        self.answers[f"{label} joined"] = plain(joined, self.names)
        self.ask(
            f"{label} synced",
            Api.SYNC_GROUP,
            5,
            group_id=group,
            generation_id=joined.generation_id,
            member_id=joined.member_id,
            group_instance_id=instance,
            protocol_type=kind,
            protocol_name="range",
            assignments=[{"member_id": joined.member_id, "assignment": b"all"}],
        )
        return joined.member_id


def commit_fields(group: str, *partitions: tuple[str, int], generation: int = -1, **changes: Any) -> Any:
    topics = [
        {
            "name": topic,
            "partitions": [
                {
                    "partition_index": number,
                    "committed_offset": 7,
                    "committed_leader_epoch": -1,
                    "committed_metadata": "note",
                }
            ],
        }
        for topic, number in partitions
    ]
    fields = {
        "group_id": group,
        "generation_id_or_member_epoch": generation,
        "topics": topics,
        "retention_time": -1,
    }
    return fields | changes


def deletion(group: str, *partitions: tuple[str, int]) -> dict[str, Any]:
    topics = [{"name": topic, "partitions": [{"partition_index": number}]} for topic, number in partitions]
    return {"group_id": group, "topics": topics}


def tell(history: History) -> None:
    """The history, told to one server. Topic a has two partitions, b has one."""
    ask = history.ask
    history.client.ask(
        Api.CREATE_TOPICS,
        5,
        topics=[
            {"name": "a", "num_partitions": 2, "replication_factor": 1},
            {"name": "b", "num_partitions": 1, "replication_factor": 1},
        ],
        timeout=30_000,
    )
    history.until_led("a", "b")
    for group in ("alone", "readers", "connect", "static", "nobody", "", "pending"):
        history.until_coordinated(group)

    _commits(history)
    member = history.member("reader", "readers")
    static = history.member("static one", "static", instance="host-1")
    history.member("worker", "connect", kind="connect")
    ask(
        "by a member",
        Api.OFFSET_COMMIT,
        8,
        **commit_fields("readers", ("a", 0), ("b", 0), generation=1, member_id=member),
    )
    ask("by an outsider", Api.OFFSET_COMMIT, 8, **commit_fields("readers", ("a", 0)))
    ask(
        "by a fenced one",
        Api.OFFSET_COMMIT,
        8,
        **commit_fields("static", ("a", 0), generation=1, member_id="old", group_instance_id="host-1"),
    )
    ask(
        "by an instance nobody knows",
        Api.OFFSET_COMMIT,
        8,
        **commit_fields("static", ("a", 0), generation=1, member_id=static, group_instance_id="host-2"),
    )

    for version in range(6):
        ask("every kind", Api.DESCRIBE_GROUPS, version, groups=["readers", "static", "connect", "alone"])
        ask("none such", Api.DESCRIBE_GROUPS, version, groups=["nobody", ""])
        ask("none at all", Api.DESCRIBE_GROUPS, version, groups=[])
        ask("twice", Api.DESCRIBE_GROUPS, version, groups=["alone", "alone"])
        ask("unfiltered", Api.LIST_GROUPS, version)
    for version in (4, 5):
        for states in (["Stable"], ["stable"], [" EMPTY "], ["Empty", "Dead"], ["NoSuchState"], [""]):
            ask(f"in states {states}", Api.LIST_GROUPS, version, states_filter=states)
    for types in (["classic"], ["Classic"], ["consumer"], ["nosuch"], ["classic", "nosuch"], [""]):
        ask(f"of types {types}", Api.LIST_GROUPS, 5, types_filter=types)
    ask("of type and state", Api.LIST_GROUPS, 5, types_filter=["classic"], states_filter=["Empty"])

    _fetches(history)
    _deletions(history, member)


def _commits(history: History) -> None:
    ask = history.ask
    for version in range(2, 10):
        ask(f"alone {version}", Api.OFFSET_COMMIT, version, **commit_fields("alone", ("a", 0), ("a", 9)))
        ask("no such topic", Api.OFFSET_COMMIT, version, **commit_fields("alone", ("x", 0)))
        ask("no such group", Api.OFFSET_COMMIT, version, **commit_fields("nobody", ("a", 0), generation=3))
        ask("nothing", Api.OFFSET_COMMIT, version, **commit_fields("alone"))
    ask("stranger in an empty group", Api.OFFSET_COMMIT, 8, **commit_fields("alone", ("a", 0), member_id="m"))
    ask(
        "stranger with a generation",
        Api.OFFSET_COMMIT,
        8,
        **commit_fields("alone", ("a", 0), member_id="m", generation=0),
    )
    long = commit_fields("alone", ("a", 0), ("b", 0))
    long["topics"][0]["partitions"][0]["committed_metadata"] = "x" * 4097
    ask("long note", Api.OFFSET_COMMIT, 8, **long)
    wide = commit_fields("alone", ("a", 1))
    wide["topics"][0]["partitions"][0]["committed_metadata"] = "ß" * 4096
    ask("wide note", Api.OFFSET_COMMIT, 8, **wide)
    negative = commit_fields("alone", ("a", 0))
    negative["topics"][0]["partitions"][0]["committed_offset"] = -1
    ask("negative offset", Api.OFFSET_COMMIT, 8, **negative)


def _fetches(history: History) -> None:
    wanted = [
        {"name": "a", "partition_indexes": [0, 1, 9]},
        {"name": "x", "partition_indexes": [0]},
    ]
    for version in range(1, 10):
        for group in ("alone", "readers", "nobody"):
            for label, topics in (("some", wanted), ("none", []), ("all", None)):
                if topics is None and version == 1:
                    continue
                history.ask(
                    f"{label} of {group}",
                    Api.OFFSET_FETCH,
                    version,
                    group_id=group,
                    topics=topics,
                    groups=[{"group_id": group, "topics": topics, "member_epoch": -1}],
                )
    history.ask(
        "several groups",
        Api.OFFSET_FETCH,
        8,
        groups=[
            {"group_id": group, "topics": None, "member_epoch": -1}
            for group in ("alone", "readers", "nobody")
        ],
        require_stable=True,
    )


def _deletions(history: History, member: str) -> None:
    ask = history.ask
    ask("subscribed and not", Api.OFFSET_DELETE, 0, **deletion("readers", ("a", 0), ("b", 0), ("x", 0)))
    ask("of another kind", Api.OFFSET_DELETE, 0, **deletion("connect", ("a", 0)))
    ask("of no group", Api.OFFSET_DELETE, 0, **deletion("nobody", ("a", 0)))
    ask("of no group and no topic", Api.OFFSET_DELETE, 0, **deletion("nobody", ("x", 0)))
    ask("of the empty name", Api.OFFSET_DELETE, 0, **deletion("", ("a", 0)))
    ask("never committed", Api.OFFSET_DELETE, 0, **deletion("alone", ("b", 0), ("a", 9)))
    ask("committed", Api.OFFSET_DELETE, 0, **deletion("alone", ("a", 0)))
    ask("nothing named", Api.OFFSET_DELETE, 0, **deletion("alone"))
    ask("what is left", Api.OFFSET_FETCH, 7, group_id="alone", topics=None)
    ask("last of all", Api.OFFSET_DELETE, 0, **deletion("alone", ("a", 1), ("b", 0)))
    ask("after the last", Api.DESCRIBE_GROUPS, 5, groups=["alone"])
    for version in range(3):
        ask("used, unknown, unnamed", Api.DELETE_GROUPS, version, groups_names=["readers", "nobody", ""])
        ask("twice", Api.DELETE_GROUPS, version, groups_names=["nobody", "nobody"])
        ask("none", Api.DELETE_GROUPS, version, groups_names=[])
    for version in range(6):
        if version < 3:
            ask("stranger", Api.LEAVE_GROUP, version, group_id="readers", member_id="stranger")
            ask("of no group", Api.LEAVE_GROUP, version, group_id="nobody", member_id="stranger")
        else:
            members = [{"member_id": "stranger"}, {"member_id": "", "group_instance_id": "host-9"}]
            ask("stranger", Api.LEAVE_GROUP, version, group_id="readers", members=members)
            ask("of no group", Api.LEAVE_GROUP, version, group_id="nobody", members=members)
            ask("nobody", Api.LEAVE_GROUP, version, group_id="readers", members=[])
    for version in range(5):
        beat = {"generation_id": 1, "member_id": member}
        ask("in time", Api.HEARTBEAT, version, group_id="readers", **beat)
        ask("of no group", Api.HEARTBEAT, version, group_id="nobody", **beat)
        ask("of the empty name", Api.HEARTBEAT, version, group_id="", **beat)
        ask("old", Api.HEARTBEAT, version, group_id="readers", generation_id=0, member_id=member)
        ask("stranger", Api.HEARTBEAT, version, group_id="readers", generation_id=1, member_id="stranger")
    static = {"group_id": "static", "members": [{"member_id": "", "group_instance_id": "host-1"}]}
    ask("by its instance", Api.LEAVE_GROUP, 5, **static)
    ask("by its instance, again", Api.LEAVE_GROUP, 5, **static)
    ask("goes", Api.LEAVE_GROUP, 2, group_id="readers", member_id=member)
    ask("left", Api.DESCRIBE_GROUPS, 5, groups=["readers", "static"])
    ask("left", Api.LIST_GROUPS, 5)
    ask("empty", Api.DELETE_GROUPS, 2, groups_names=["readers", "readers", "static"])
    ask("deleted", Api.DELETE_GROUPS, 2, groups_names=["readers"])
    ask("deleted", Api.DESCRIBE_GROUPS, 5, groups=["readers"])
    ask("deleted", Api.OFFSET_FETCH, 7, group_id="readers", topics=None)
    ask("deleted", Api.LIST_GROUPS, 5)


@pytest.fixture(scope="module")
def kafka_port(tmp_path_factory) -> Iterator[int]:
    """A node of its own: the history lists every group there is."""
    from tests.kafka_fixture import JVM_OPTIONS, SAME_SETTINGS
    from tests.peers.kafka import KafkaPeer

    directory = tmp_path_factory.mktemp("kafka")
    with KafkaPeer(directory, settings=SAME_SETTINGS, jvm_options=JVM_OPTIONS) as peer:
        yield int(peer.bootstrap.rpartition(":")[2])


@pytest.fixture(scope="module")
def millrace_port(zookeeper, tmp_path_factory) -> Iterator[int]:
    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"))
    try:
        yield broker.start().port
    finally:
        broker.kill()


def told(port: int) -> dict[str, Any]:
    history = History(port)
    with history.client:
        tell(history)
    return history.answers


def test_answers_are_apache_kafkas(kafka_port, millrace_port):
    theirs, ours = told(kafka_port), told(millrace_port)
    assert theirs.keys() == ours.keys()
    differing = {label for label in theirs if theirs[label] != ours[label]}
    told_of = [
        f"{label}\n  kafka    {theirs[label]}\n  millrace {ours[label]}" for label in sorted(differing)
    ]
    assert differing == DIFFERENT.keys(), "\n".join(told_of)
