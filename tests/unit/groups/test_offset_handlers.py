"""The handlers of committed offsets: every version advertised, from the request's bytes to the answer's."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.protocol.java_hash import coordinator_partition
from tests.unit.groups.handler_stage import join, sync, versions, with_broker


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


def test_commit_of_nothing_that_exists_makes_no_group(offsets_log):
    async def scenario(broker):
        unknown = {"name": "unknown", "partitions": [{"partition_index": 0, "committed_offset": 1}]}
        for topics in ([unknown], []):
            await broker.call(
                "offset_commit", 8, group_id="g", generation_id_or_member_epoch=-1, topics=topics
            )
            await broker.call("txn_offset_commit", 3, **TRANSACTIONAL_COMMIT | {"topics": topics})
        assert broker.groups.describe("g").state == "Dead"
        assert await broker.groups.delete_group("g") is ErrorCode.group_id_not_found

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


TRANSACTIONAL_COMMIT = {
    "transactional_id": "tx",
    "group_id": "g",
    "producer_id": 7,
    "producer_epoch": 2,
    "generation_id": -1,
    "topics": [{"name": "flights", "partitions": [{"partition_index": 0, "committed_offset": 1}]}],
}


@pytest.mark.parametrize("version", versions("txn_offset_commit"))
def test_txn_offset_commit_every_version(offsets_log, version):
    async def scenario(broker):
        partitions = [
            {"partition_index": number, "committed_offset": 40 + number, "committed_leader_epoch": 3}
            for number in (0, 1, 2)
        ]
        wanted = TRANSACTIONAL_COMMIT | {"topics": [{"name": "flights", "partitions": partitions}]}
        committed = await broker.call("txn_offset_commit", version, **wanted)
        errors = {p.partition_index: p.error_code for p in committed.topics[0].partitions}
        assert errors == {0: ErrorCode.none, 1: ErrorCode.none, 2: ErrorCode.unknown_topic_or_partition}
        partition = ("__consumer_offsets", coordinator_partition("g", offsets_log.count))
        assert broker.transaction_gate.appends == [(partition, 7)]

        asked = {
            "groups": [{"group_id": "g", "topics": [{"name": "flights", "partition_indexes": [0]}]}],
            "require_stable": True,
        }
        unstable = await broker.call("offset_fetch", 9, **asked)
        (partition,) = unstable.groups[0].topics[0].partitions
        assert (partition.error_code, partition.committed_offset) == (ErrorCode.unstable_offset_commit, -1)
        for number in range(offsets_log.count):
            broker.groups.transaction_ended(number, 7, True, offsets_log.next_offset.get(number, 0))
        stable = await broker.call("offset_fetch", 9, **asked)
        (partition,) = stable.groups[0].topics[0].partitions
        assert (partition.error_code, partition.committed_offset) == (ErrorCode.none, 40)
        assert partition.committed_leader_epoch == (3 if version >= 2 else -1)

        if version >= 3:
            joined = await join(broker, 9)
            await sync(broker, 5, joined)
            member = {"member_id": joined.member_id, "generation_id": 7}
            refused = await broker.call("txn_offset_commit", version, **wanted | member)
            assert refused.topics[0].partitions[-1].error_code is ErrorCode.illegal_generation

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("txn_offset_commit"))
def test_txn_offset_commit_while_loading(offsets_log, version):
    async def scenario(broker):
        for owned in broker.groups._partitions.values():
            owned.loaded = False
        committed = await broker.call(
            "txn_offset_commit",
            version,
            **TRANSACTIONAL_COMMIT,
        )
        assert committed.topics[0].partitions[0].error_code is (
            ErrorCode.coordinator_not_available if version < 2 else ErrorCode.coordinator_load_in_progress
        )

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize(
    ("error", "version", "heard"),
    [
        (ErrorCode.transaction_abortable, 4, ErrorCode.transaction_abortable),
        (ErrorCode.transaction_abortable, 3, ErrorCode.invalid_txn_state),
        (ErrorCode.network_exception, 3, ErrorCode.coordinator_load_in_progress),
        (ErrorCode.network_exception, 1, ErrorCode.coordinator_not_available),
        (ErrorCode.not_coordinator, 3, ErrorCode.coordinator_load_in_progress),
        (ErrorCode.not_leader_or_follower, 3, ErrorCode.not_coordinator),
        (ErrorCode.producer_fenced, 3, ErrorCode.invalid_producer_epoch),
    ],
)
def test_txn_offset_commit_outside_a_transaction_is_not_written(offsets_log, error, version, heard):
    async def scenario(broker):
        broker.transaction_gate.error = error
        committed = await broker.call("txn_offset_commit", version, **TRANSACTIONAL_COMMIT)
        assert committed.topics[0].partitions[0].error_code is heard
        assert not any(offsets_log.batches.values())
        assert broker.transaction_gate.appends == []

    with_broker(offsets_log, scenario)


@pytest.mark.parametrize("version", versions("offset_commit"))
def test_offset_commit_of_a_member_of_no_group(offsets_log, version):
    async def scenario(broker):
        committed = await broker.call(
            "offset_commit",
            version,
            group_id="g",
            generation_id_or_member_epoch=3,
            member_id="m",
            topics=[{"name": "flights", "partitions": [{"partition_index": 0, "committed_offset": 1}]}],
        )
        assert committed.topics[0].partitions[0].error_code is (
            ErrorCode.illegal_generation if version < 9 else ErrorCode.group_id_not_found
        )

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
