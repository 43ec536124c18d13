"""The handlers of the group APIs: every version advertised, from the request's bytes to the answer's."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.protocol.frames import (
    RequestHead,
    decode_entity,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from millrace.broker.server.answers import _builder, request_type, response_type

NAMES = [
    "join_group",
    "sync_group",
    "heartbeat",
    "leave_group",
    "offset_commit",
    "offset_fetch",
    "offset_delete",
    "describe_groups",
    "list_groups",
    "delete_groups",
    "find_coordinator",
]
HANDLERS = {name: importlib.import_module(f"millrace.broker.server.handlers.{name}") for name in NAMES}


class FakeController:
    """Makes the offsets topic at once; `refusal` is raised instead."""

    refusal: Exception | None = None

    async def ensure_topic(self, topic: Any, timeout_ms: float) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.asked = topic
        leads = SimpleNamespace(leader=7)
        return SimpleNamespace(partitions=dict.fromkeys(range(topic.partition_count), leads))


class Broker:
    """The services that the group handlers use, and a client that speaks any version."""

    def __init__(self, groups: GroupCoordinator) -> None:
        registration = SimpleNamespace(broker_id=7, host="broker.example", port=9092)
        settings = SimpleNamespace(
            offsets_topic_num_partitions=4,
            offsets_topic_replication_factor=1,
            offsets_topic_segment_bytes=1_000,
        )
        self.groups = groups
        self.config = SimpleNamespace(settings=settings)
        self.clock = SimpleNamespace(now_ms=lambda: 1_000)
        self.controller = FakeController()
        self.metadata_cache = SimpleNamespace(
            brokers={7: registration},
            partition=lambda topic, number: object() if topic == "flights" and number < 2 else None,
        )

    async def call(self, name: str, version: int, **fields: Any) -> Any:
        """Through the wire format both ways, as a connection would."""
        module = HANDLERS[name]
        request = _builder(request_type(module.API, version))(fields)
        frame = memoryview(encode_request(request, 5, "client"))[4:]
        head, position = decode_request(frame)
        assert head == RequestHead(int(module.API), version, 5, "client")
        decoded = decode_entity(request_type(module.API, version), frame, position)
        context = SimpleNamespace(head=head, client_address="10.0.0.1", broker=self)
        response = await module.handle(decoded, context)
        answer_frame = memoryview(encode_response(head, response))[4:]
        return decode_response(response_type(module.API, version), answer_frame)


def with_broker(offsets_log, scenario, **settings):
    async def main():
        config = GroupConfig(**{"initial_rebalance_delay_ms": 0, **settings})
        groups = GroupCoordinator(config, offsets_log, clock_ms=lambda: 1_000)
        for partition in range(offsets_log.count):
            await groups.load(partition)
        await scenario(Broker(groups))

    asyncio.run(asyncio.wait_for(main(), 10))


def versions(name: str) -> range:
    return HANDLERS[name].VERSIONS


def fields_of(entity: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(entity)}


JOIN = {
    "group_id": "g",
    "session_timeout": 10_000,
    "rebalance_timeout": 30_000,
    "protocol_type": "consumer",
    "protocols": [{"name": "range", "metadata": b"subscription"}],
}


async def join(broker: Broker, version: int, **changes: Any) -> Any:
    joined = await broker.call("join_group", version, **{**JOIN, **changes})
    if joined.error_code is ErrorCode.member_id_required:
        assert version >= 4
        joined = await broker.call(
            "join_group", version, **{**JOIN, "member_id": joined.member_id, **changes}
        )
    return joined


async def sync(broker: Broker, version: int, joined: Any, **changes: Any) -> Any:
    return await broker.call(
        "sync_group",
        version,
        **{
            "group_id": "g",
            "generation_id": joined.generation_id,
            "member_id": joined.member_id,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [{"member_id": joined.member_id, "assignment": b"all of it"}],
            **changes,
        },
    )


@pytest.mark.parametrize("version", versions("join_group"))
def test_join_group_every_version(offsets_log, version):
    async def scenario(broker):
        joined = await join(broker, version)
        assert (joined.error_code, joined.generation_id) == (ErrorCode.none, 1)
        assert (joined.protocol_name, joined.leader) == ("range", joined.member_id)
        assert [member.metadata for member in joined.members] == [b"subscription"]
        assert joined.member_id.startswith("client-")
        refused = await broker.call("join_group", version, **{**JOIN, "member_id": "stranger"})
        assert refused.error_code is ErrorCode.unknown_member_id
        assert refused.protocol_name == (None if version >= 7 else "")

    with_broker(offsets_log, scenario)


def test_join_group_before_rebalance_timeouts_uses_the_session_timeout(offsets_log):
    async def scenario(broker):
        await join(broker, 0)
        (member,) = broker.groups._find("g")[0].group.roster
        assert member.rebalance_timeout_ms == member.session_timeout_ms == 10_000

    with_broker(offsets_log, scenario)


def test_static_leader_skips_the_assignment_from_version_9(offsets_log):
    async def scenario(broker):
        joined = await join(broker, 9, group_instance_id="host-1")
        await sync(broker, 5, joined, group_instance_id="host-1")
        back = await join(broker, 9, group_instance_id="host-1")
        assert (back.skip_assignment, back.leader, back.generation_id) == (True, back.member_id, 1)
        assert back.members[0].group_instance_id == "host-1"

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("sync_group"))
def test_sync_group_every_version(offsets_log, version):
    async def scenario(broker):
        synced = await sync(broker, version, await join(broker, 9))
        assert (synced.error_code, synced.assignment) == (ErrorCode.none, b"all of it")
        if "protocol_name" in fields_of(synced):
            assert (synced.protocol_type, synced.protocol_name) == ("consumer", "range")

    with_broker(offsets_log, scenario)


def test_sync_group_without_its_protocol_is_refused_from_version_5(offsets_log):
    async def scenario(broker):
        joined = await join(broker, 9)
        synced = await sync(broker, 5, joined, protocol_name=None)
        assert synced.error_code is ErrorCode.inconsistent_group_protocol
        assert (await sync(broker, 4, joined)).error_code is ErrorCode.none

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("heartbeat"))
def test_heartbeat_every_version(offsets_log, version):
    async def scenario(broker):
        joined = await join(broker, 9)
        fields = {"group_id": "g", "generation_id": 1, "member_id": joined.member_id}
        assert (await broker.call("heartbeat", version, **fields)).error_code is ErrorCode.none
        fields["generation_id"] = 0
        assert (await broker.call("heartbeat", version, **fields)).error_code is ErrorCode.illegal_generation

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("leave_group"))
def test_leave_group_every_version(offsets_log, version):
    async def scenario(broker):
        joined = await join(broker, 9)
        fields = {
            "group_id": "g",
            "member_id": joined.member_id,
            "members": [{"member_id": joined.member_id}],
        }
        left = await broker.call("leave_group", version, **fields)
        again = await broker.call("leave_group", version, **fields)
        assert left.error_code is ErrorCode.none
        if version < 3:
            assert again.error_code is ErrorCode.unknown_member_id
        else:
            assert left.members[0].error_code is ErrorCode.none
            assert again.error_code is ErrorCode.none
            assert again.members[0].error_code is ErrorCode.unknown_member_id

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("offset_commit"))
def test_offset_commit_every_version(offsets_log, version):
    async def scenario(broker):
        partitions = [
            {
                "partition_index": number,
                "committed_offset": 40 + number,
                "committed_leader_epoch": 3,
                "committed_metadata": "note" if number == 0 else None,
            }
            for number in (0, 1, 2)
        ]
        committed = await broker.call(
            "offset_commit",
            version,
            group_id="g",
            generation_id_or_member_epoch=-1,
            retention_time=5_000,
            topics=[{"name": "flights", "partitions": partitions}],
        )
        errors = {p.partition_index: p.error_code for p in committed.topics[0].partitions}
        assert errors == {0: ErrorCode.none, 1: ErrorCode.none, 2: ErrorCode.unknown_topic_or_partition}
        _, found = broker.groups.fetch_offsets("g", None)
        kept = found["flights", 0]
        assert (kept.offset, kept.metadata) == (40, "note")
        assert kept.leader_epoch == (3 if version >= 6 else -1)
        assert kept.expire_timestamp_ms == (6_000 if version <= 4 else None)
        assert found["flights", 1].metadata == ""

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("offset_fetch"))
def test_offset_fetch_every_version(offsets_log, version):
    async def scenario(broker):
        partition = {"partition_index": 0, "committed_offset": 40, "committed_leader_epoch": 3}
        await broker.call(
            "offset_commit",
            9,
            group_id="g",
            generation_id_or_member_epoch=-1,
            topics=[{"name": "flights", "partitions": [partition]}],
        )
        wanted = [{"name": "flights", "partition_indexes": [0, 1]}]

        async def fetch(topics: Any) -> Any:
            groups = [{"group_id": "g", "topics": topics}, {"group_id": "nobody", "topics": topics}]
            fetched = await broker.call("offset_fetch", version, group_id="g", topics=topics, groups=groups)
            if version < 8:
                return fetched
            assert [group.group_id for group in fetched.groups] == ["g", "nobody"]
            assert all(p.committed_offset == -1 for t in fetched.groups[1].topics for p in t.partitions)
            return fetched.groups[0]

        answers = (await fetch(wanted)).topics[0].partitions
        assert [(p.partition_index, p.committed_offset) for p in answers] == [(0, 40), (1, -1)]
        assert all(p.error_code is ErrorCode.none for p in answers)
        if version >= 5:
            assert [p.committed_leader_epoch for p in answers] == [3, -1]
        if version >= 2:
            everything = (await fetch(None)).topics
            assert [(t.name, [p.partition_index for p in t.partitions]) for t in everything] == [
                ("flights", [0])
            ]

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("offset_fetch"))
def test_offset_fetch_from_another_broker_says_so(offsets_log, version):
    async def scenario(broker):
        for partition in range(offsets_log.count):
            broker.groups.unload(partition)
        wanted = [{"name": "flights", "partition_indexes": [0]}]
        fetched = await broker.call(
            "offset_fetch", version, group_id="g", topics=wanted, groups=[{"group_id": "g", "topics": wanted}]
        )
        holder = fetched.groups[0] if version >= 8 else fetched
        error = holder.error_code if version >= 2 else holder.topics[0].partitions[0].error_code
        assert error is ErrorCode.not_coordinator

    with_broker(offsets_log, scenario)


def test_offset_delete(offsets_log):
    async def scenario(broker):
        topics = [{"name": "flights", "partitions": [{"partition_index": 0}, {"partition_index": 9}]}]
        missing = await broker.call("offset_delete", 0, group_id="g", topics=topics)
        assert missing.error_code is ErrorCode.group_id_not_found
        partition = {"partition_index": 0, "committed_offset": 40}
        await broker.call(
            "offset_commit",
            9,
            group_id="g",
            generation_id_or_member_epoch=-1,
            topics=[{"name": "flights", "partitions": [partition]}],
        )
        deleted = await broker.call("offset_delete", 0, group_id="g", topics=topics)
        assert deleted.error_code is ErrorCode.none
        errors = {p.partition_index: p.error_code for p in deleted.topics[0].partitions}
        assert errors == {0: ErrorCode.none, 9: ErrorCode.unknown_topic_or_partition}
        assert broker.groups.fetch_offsets("g", None)[1] == {}

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("describe_groups"))
def test_describe_groups_every_version(offsets_log, version):
    async def scenario(broker):
        await sync(broker, 5, await join(broker, 9, group_instance_id="host-1"), group_instance_id="host-1")
        described = await broker.call(
            "describe_groups", version, groups=["g", "nobody"], include_authorized_operations=True
        )
        group, nobody = described.groups
        assert (group.group_state, group.protocol_type, group.protocol_data) == (
            "Stable",
            "consumer",
            "range",
        )
        (member,) = group.members
        assert (member.client_id, member.client_host) == ("client", "/10.0.0.1")
        assert (member.member_metadata, member.member_assignment) == (b"subscription", b"all of it")
        assert (nobody.group_state, nobody.error_code) == ("Dead", ErrorCode.none)
        if version >= 3:
            assert group.authorized_operations == 328
        if version >= 4:
            assert member.group_instance_id == "host-1"

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("list_groups"))
def test_list_groups_every_version(offsets_log, version):
    async def scenario(broker):
        await join(broker, 9)
        (listed,) = (await broker.call("list_groups", version)).groups
        assert (listed.group_id, listed.protocol_type) == ("g", "consumer")
        if version >= 4:
            assert listed.group_state == "CompletingRebalance"
            assert not (await broker.call("list_groups", version, states_filter=["Stable"])).groups
        if version >= 5:
            assert listed.group_type == "classic"
            assert not (await broker.call("list_groups", version, types_filter=["consumer"])).groups

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("delete_groups"))
def test_delete_groups_every_version(offsets_log, version):
    async def scenario(broker):
        joined = await join(broker, 9)
        refused = await broker.call("delete_groups", version, groups_names=["g", "nobody"])
        errors = {result.group_id: result.error_code for result in refused.results}
        assert errors == {"g": ErrorCode.non_empty_group, "nobody": ErrorCode.group_id_not_found}
        await broker.call("leave_group", 5, group_id="g", members=[{"member_id": joined.member_id}])
        (deleted,) = (await broker.call("delete_groups", version, groups_names=["g"])).results
        assert deleted.error_code is ErrorCode.none

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("find_coordinator"))
def test_find_coordinator_every_version(offsets_log, version):
    async def scenario(broker):
        found = await broker.call("find_coordinator", version, key="g", coordinator_keys=["g", "h"])
        answers = found.coordinators if version >= 4 else [found]
        assert len(answers) == (2 if version >= 4 else 1)
        for each in answers:
            assert (each.error_code, each.node_id) == (ErrorCode.none, 7)
            assert (each.host, each.port) == ("broker.example", 9092)
        assert broker.controller.asked.config["cleanup.policy"] == "compact"

    with_broker(offsets_log, scenario)


def test_find_coordinator_without_brokers_can_be_retried_and_for_transactions_is_refused(offsets_log):
    from millrace.broker.errors import InvalidReplicationFactor

    async def scenario(broker):
        found = await broker.call("find_coordinator", 4, key_type=1, coordinator_keys=["txn"])
        assert found.coordinators[0].error_code is ErrorCode.invalid_request
        broker.controller.refusal = InvalidReplicationFactor()
        found = await broker.call("find_coordinator", 3, key="g")
        assert found.error_code is ErrorCode.coordinator_not_available

    with_broker(offsets_log, scenario)
