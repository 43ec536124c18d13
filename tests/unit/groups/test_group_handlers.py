"""The handlers of the group APIs: every version advertised, from the request's bytes to the answer's."""

from __future__ import annotations

import asyncio

import pytest
from kio.schema.errors import ErrorCode

from tests.unit.groups.handler_stage import JOIN, fields_of, join, sync, versions, with_broker


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
        topic = broker.controller.asked
        assert (topic.name, topic.partition_count, topic.replication_factor) == ("__consumer_offsets", 4, 3)
        assert topic.config == {
            "cleanup.policy": "compact",
            "compression.type": "producer",
            "segment.bytes": "1000",
        }

    with_broker(offsets_log, scenario)


def test_find_coordinator_without_brokers_or_leader_can_be_retried(offsets_log):
    from millrace.broker.errors import InvalidReplicationFactor

    async def scenario(broker):
        broker.controller.refusal = InvalidReplicationFactor()
        found = await broker.call("find_coordinator", 3, key="g")
        assert found.error_code is ErrorCode.coordinator_not_available
        broker.controller.refusal = None
        broker.metadata_cache.leader = -1
        found = await broker.call("find_coordinator", 3, key="g")
        assert found.error_code is ErrorCode.coordinator_not_available

    with_broker(offsets_log, scenario)


def test_find_coordinator_waits_for_elections_side_by_side(offsets_log):
    async def scenario(broker):
        waiting = most = 0

        async def changed(condition, timeout_ms):
            nonlocal waiting, most
            waiting += 1
            most = max(most, waiting)
            for _ in range(3):
                await asyncio.sleep(0)
            waiting -= 1
            return condition()

        broker.metadata_cache.changed = changed
        found = await broker.call("find_coordinator", 4, coordinator_keys=[f"g{n}" for n in range(20)])
        assert [each.key for each in found.coordinators] == [f"g{n}" for n in range(20)]
        assert most == 19, "a request about many groups of a leaderless partition would take a second each"

    with_broker(offsets_log, scenario)


def test_find_coordinator_of_transactions_and_of_share_groups(offsets_log):
    async def scenario(broker):
        found = await broker.call("find_coordinator", 4, key_type=1, coordinator_keys=["txn"])
        assert (found.coordinators[0].error_code, found.coordinators[0].node_id) == (ErrorCode.none, 7)
        assert broker.controller.asked.name == "__transaction_state"
        found = await broker.call("find_coordinator", 4, key_type=2, coordinator_keys=["share"])
        assert found.coordinators[0].error_code is ErrorCode.invalid_request

    with_broker(offsets_log, scenario)
