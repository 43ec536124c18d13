"""The client against real servers: Apache Kafka and Millrace's own broker, the same tests for both."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from millrace.broker.client import admin
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.fetch_session import FetchSession, LogEnds
from millrace.broker.client.group_member import GroupMember
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets, fetch_offsets
from millrace.broker.client.offsets import EARLIEST, EARLIEST_LOCAL, LATEST
from millrace.broker.client.producer import Producer
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.client.raw_produce import init_producer_id, produce
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import (
    IllegalGeneration,
    InconsistentTopicId,
    OffsetOutOfRange,
    TopicAlreadyExists,
    UnknownMemberId,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.batch import HEADER_SIZE, iterate_batches, verify_crc
from millrace.broker.protocol.records import Record, build_batch
from tests.record_deletion import delete_records
from tests.waiting import patience, until_async

_numbers = itertools.count()


@pytest.fixture(
    params=[
        pytest.param("kafka", marks=[pytest.mark.java, pytest.mark.kafka]),
        pytest.param("millrace", marks=pytest.mark.java),
    ]
)
def bootstrap(request: pytest.FixtureRequest) -> str:
    """The address of a server of each kind."""
    server = request.getfixturevalue("kafka_peer" if request.param == "kafka" else "shared_broker")
    return str(server.bootstrap)


@pytest.fixture
def topic() -> str:
    """A name that no other test uses."""
    return f"flights-{os.getpid()}-{next(_numbers)}"


def run(bootstrap: str, test: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Cluster("ewr", [bootstrap], request_timeout_ms=60_000) as ewr:
            await asyncio.wait_for(test(ewr), patience(180))

    uvloop.run(main())


def batch(count: int = 3, size: int = 200, compression: int = 0) -> bytearray:
    records = [
        Record(
            b"key-%d" % number, os.urandom(size), (("h", b"x"), ("null", None)), 1_700_000_000_000 + number
        )
        for number in range(count)
    ]
    return build_batch(records, compression=compression)


async def leader(ewr: Cluster, topic: str, partition: int = 0) -> int:
    found = (await ewr.metadata([topic])).leader(topic, partition)
    assert found is not None
    return found


async def made(ewr: Cluster, topic: str, partition_count: int = 1) -> int:
    """Make a topic and wait until its leader serves it, which may be a moment after the metadata names it;
    the leader's node id. Its records are older than any default retention."""
    await admin.create_topic(ewr, topic, partition_count, 1, {"retention.ms": "-1"})
    node = await leader(ewr, topic)
    positions = {(topic, number): FetchPosition(0) for number in range(partition_count)}

    async def is_served() -> bool:
        return not any(each.error_code for each in await fetch(ewr, node, positions, max_wait_ms=0))

    await until_async(is_served, f"{topic} is served", every_s=0.01)
    return node


async def widened(ewr: Cluster, topic: str, partition_count: int) -> None:
    """Wait until the metadata shows that many partitions: brokers learn of them after the controller."""

    async def is_shown() -> bool:
        return len((await admin.wait_for_topic(ewr, topic)).partitions) == partition_count

    await until_async(is_shown, f"{partition_count} partitions of {topic}", every_s=0.01)


async def gone(ewr: Cluster, topic: str) -> None:
    async def is_gone() -> bool:
        return topic not in (await ewr.metadata(max_age_ms=0)).topics

    await until_async(is_gone, f"{topic} is gone", every_s=0.01)


def test_topics_are_made_described_changed_and_deleted(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        await admin.create_topic(ewr, topic, 3, 1, {"retention.ms": "-1"})
        with pytest.raises(TopicAlreadyExists, match=f"cluster ewr: topic {topic}"):
            await admin.create_topic(ewr, topic, 3, 1)
        known = (await ewr.metadata(max_age_ms=0)).topics[topic]
        assert sorted(known.partitions) == [0, 1, 2]
        assert known.topic_id.int
        assert (await admin.describe_configs(ewr, topic))["retention.ms"] == "-1"
        await admin.create_partitions(ewr, topic, 5)
        await widened(ewr, topic, 5)
        await admin.delete_topic(ewr, topic)
        await gone(ewr, topic)
        with pytest.raises(UnknownTopicOrPartition):
            await admin.delete_topic(ewr, topic)

    run(bootstrap, test)


def test_batches_come_back_as_they_were_sent(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        node = await made(ewr, topic, 2)
        sent = [batch(3, compression=codec) for codec in range(5)]
        for each in sent:
            outcomes = await produce(ewr, node, {(topic, 0): each, (topic, 1): memoryview(each)})
            assert {outcome.error_code for outcome in outcomes.values()} == {0}
        fetched = await fetch(ewr, node, {(topic, 0): FetchPosition(0), (topic, 1): FetchPosition(4)})
        by_partition = {each.partition: each for each in fetched}
        assert [each.error_code for each in fetched] == [0, 0]
        assert by_partition[0].high_watermark == 15
        found = [
            bytes(by_partition[0].records[at : at + each.size])
            for at, each in iterate_batches(by_partition[0].records)
        ]
        # Base offset and leader epoch are the server's; everything from the magic on is untouched.
        assert [each[16:] for each in found] == [bytes(each[16:]) for each in sent]
        first = next(iterate_batches(by_partition[1].records))[1]
        assert first.base_offset == 3
        for at, header in iterate_batches(by_partition[1].records):
            verify_crc(by_partition[1].records, at, header)
        ends = await ewr.list_offsets({(topic, 0): LATEST, (topic, 1): EARLIEST})
        assert (ends[topic, 0].offset, ends[topic, 1].offset) == (15, 0)
        local = await ewr.list_offsets({(topic, 0): EARLIEST_LOCAL})
        assert local[topic, 0].offset == 0, "it has no remote store"
        by_time = await ewr.list_offsets({(topic, 0): 1_700_000_000_002})
        assert by_time[topic, 0][:2] == (2, 1_700_000_000_002)

    run(bootstrap, test)


def test_large_requests_are_pipelined_and_keep_their_order(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        node = await made(ewr, topic)
        sent = [batch(1, size=700_000) for _ in range(20)]
        outcomes = await asyncio.gather(*[produce(ewr, node, {(topic, 0): each}) for each in sent])
        assert [outcome[topic, 0].base_offset for outcome in outcomes] == list(range(20))
        offset, found = 0, []
        while offset < 20:
            (fetched,) = await fetch(
                ewr, node, {(topic, 0): FetchPosition(offset)}, partition_max_bytes=3 << 20
            )
            for at, header in iterate_batches(fetched.records):
                found.append(bytes(fetched.records[at + HEADER_SIZE : at + header.size]))
                offset = header.next_offset
        assert found == [bytes(each[HEADER_SIZE:]) for each in sent]

    run(bootstrap, test)


def test_fetch_in_a_session_is_answered_what_is_new(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        node = await made(ewr, topic, 4)
        session = FetchSession()
        topic_id = (await ewr.metadata([topic])).topics[topic].topic_id
        positions = {(topic, number): FetchPosition(0, topic_id=topic_id) for number in range(4)}

        async def asked(max_wait_ms: int = 0) -> dict[int, tuple[int, int]]:
            fetched = await fetch(ewr, node, positions, session=session, max_wait_ms=max_wait_ms)
            return {each.partition: (each.error_code, each.high_watermark) for each in fetched}

        assert await asked() == dict.fromkeys(range(4), (0, 0))
        assert await asked() == {}
        assert session.quiet() == dict.fromkeys(positions, LogEnds(0, 0))
        await produce(ewr, node, {(topic, 2): batch()})
        assert await asked(max_wait_ms=60_000) == {2: (0, 3)}
        assert session.had_room() == {(topic, 0), (topic, 1)}
        assert await asked() == {2: (0, 3)}, "from the same offset"
        assert session.had_room() == {(topic, 0), (topic, 1), (topic, 3)}, "it is read last now"
        positions[topic, 2] = FetchPosition(3, topic_id=topic_id)
        assert await asked() == {}
        positions[topic, 1] = FetchPosition(1, topic_id=topic_id)
        del positions[topic, 0]
        for _ in range(2):
            assert await asked() == {1: (OffsetOutOfRange.code, -1)}
        positions[topic, 0] = positions[topic, 1] = FetchPosition(0, topic_id=topic_id)
        assert await asked() == {0: (0, 0), 1: (0, 0)}
        await fetch(ewr, node, {(topic, 3): positions[topic, 3]}, max_wait_ms=0)
        assert await asked() == {}, "one fetch alone meanwhile is none of the session"
        assert not session.said_all
        session.end()
        assert await asked() == {0: (0, 0), 1: (0, 0), 2: (0, 3), 3: (0, 0)}
        await admin.delete_topic(ewr, topic)
        await gone(ewr, topic)

        gone_codes = {UnknownTopicId.code, UnknownTopicOrPartition.code, InconsistentTopicId.code}

        async def is_told() -> bool:
            return {code for code, _ in (await asked()).values()} <= gone_codes

        await until_async(is_told, "no topic has this id", every_s=0.01)
        await made(ewr, topic, 4)
        await produce(ewr, node, {(topic, 0): batch()})
        for _ in range(2):
            said = await asked()
            assert said.keys() == {0, 1, 2, 3}
            assert {code for code, _ in said.values()} <= gone_codes, "its namesake gives nothing"
            del positions[topic, 3]
            await asked()
            positions[topic, 3] = positions[topic, 0]  # by the id alone now

    run(bootstrap, test)


def test_refusals_are_told_by_partition(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        node = await made(ewr, topic)
        damaged = batch()
        damaged[-1] ^= 1
        outcomes = await produce(ewr, node, {(topic, 0): damaged, (topic, 9): batch()})
        assert (outcomes[topic, 0].error_code, outcomes[topic, 9].error_code) == (2, 3)
        fetched = await fetch(ewr, node, {(topic, 0): FetchPosition(10), (topic, 9): FetchPosition(0)})
        assert {each.partition: each.error_code for each in fetched} == {0: OffsetOutOfRange.code, 9: 3}

    run(bootstrap, test)


def test_long_poll_ends_when_data_comes(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        node = await made(ewr, topic)
        polling = asyncio.create_task(fetch(ewr, node, {(topic, 0): FetchPosition(0)}, max_wait_ms=3_600_000))
        await asyncio.sleep(0.1)
        assert not polling.done()
        await produce(ewr, node, {(topic, 0): batch()})
        (fetched,) = await asyncio.wait_for(polling, patience())
        assert fetched.high_watermark == 3

    run(bootstrap, test)


def test_producer_and_reading_to_the_end_meet(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        await admin.create_topic(ewr, topic, 3)
        async with Producer(ewr, compression=4, batch_size=2000) as producer:
            futures = [
                await producer.send(
                    topic, key=b"%d" % (number % 17), value=b"v%d" % number, headers=[("n", None)]
                )
                for number in range(500)
            ]
            places = await asyncio.gather(*futures)
        read = {(each.partition, each.offset): each async for each in read_topic_to_end(ewr, topic)}
        assert len(read) == 500
        for number, place in enumerate(places):
            record = read[place.partition, place.offset]
            assert (record.key, record.value) == (b"%d" % (number % 17), b"v%d" % number)
            assert record.headers == (("n", None),)

    run(bootstrap, test)


def test_sequence_gap_is_refused_and_a_repeat_is_not_written_twice(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        node = await made(ewr, topic)
        producer_id, epoch = await init_producer_id(ewr)
        assert (await init_producer_id(ewr))[0] != producer_id

        def numbered(sequence: int) -> bytearray:
            return build_batch(
                [Record(None, b"v", (), 1)],
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=sequence,
            )

        codes = []
        for sequence in (0, 1, 1, 3):
            outcome = (await produce(ewr, node, {(topic, 0): numbered(sequence)}))[topic, 0]
            codes.append((outcome.error_code, outcome.base_offset))
        assert codes == [(0, 0), (0, 1), (0, 1), (45, -1)]

    run(bootstrap, test)


def test_trimmed_partition_begins_later(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        node = await made(ewr, topic)
        await produce(ewr, node, {(topic, 0): batch(10)})
        assert await delete_records(ewr, {(topic, 0): 4}) == {(topic, 0): 4}
        assert [each.offset async for each in read_topic_to_end(ewr, topic)] == list(range(4, 10))

    run(bootstrap, test)


def test_group_shares_out_work_and_keeps_offsets(bootstrap: str, topic: str) -> None:
    async def test(ewr: Cluster) -> None:
        await admin.create_topic(ewr, topic)
        shares: dict[str, bytes] = {}

        def member(name: str) -> GroupMember:
            async def on_assign(share: bytes) -> None:
                shares[name] = share

            async def on_revoke() -> None:
                shares.pop(name, None)

            return GroupMember(
                ewr,
                f"group-{topic}",
                protocol_type="millrace-test",
                protocols=[("halves", name.encode())],
                on_assign=on_assign,
                on_revoke=on_revoke,
                assign=lambda members: {
                    member_id: metadata + b" of %d" % len(members) for member_id, metadata in members.items()
                },
                session_timeout_ms=6000,
                heartbeat_interval_ms=100,
            )

        async def until(expected: dict[str, bytes]) -> None:
            await until_async(lambda: shares == expected, lambda: f"{expected}; there is {shares}")

        async with member("one") as one:
            await until({"one": b"one of 1"})
            old_generation = one.generation
            async with member("two"):
                await until({"one": b"one of 2", "two": b"two of 2"})
                await one.commit({(topic, 0): CommittedOffset(42, 0, "note")})
                with pytest.raises(IllegalGeneration):
                    await commit_offsets(
                        ewr,
                        one.group_id,
                        {(topic, 0): CommittedOffset(1)},
                        generation=old_generation,
                        member_id=one.member_id,
                    )
            await until({"one": b"one of 1"})
            assert await one.committed() == {(topic, 0): CommittedOffset(42, 0, "note")}
            with pytest.raises(UnknownMemberId):
                await commit_offsets(ewr, one.group_id, {(topic, 0): CommittedOffset(1)})
        await commit_offsets(ewr, one.group_id, {(topic, 0): CommittedOffset(7)})
        assert (await fetch_offsets(ewr, one.group_id, [(topic, 0)]))[topic, 0].offset == 7
        assert await fetch_offsets(ewr, f"no-such-{topic}", [(topic, 0)]) == {}

    run(bootstrap, test)


def test_static_member_that_ends_within_its_first_join_is_not_waited_for(bootstrap: str, topic: str) -> None:
    """It knows no member id yet: its instance id takes it out (KIP-345), past the join that is held back."""

    async def test(ewr: Cluster) -> None:
        counts: list[int] = []
        given_back, may_join = asyncio.Event(), asyncio.Event()

        def member(name: str) -> GroupMember:
            async def on_assign(share: bytes) -> None:
                counts.append(int(share))

            async def on_revoke() -> None:
                given_back.set()
                await may_join.wait()

            return GroupMember(
                ewr,
                f"group-{topic}",
                protocol_type="millrace-test",
                protocols=[("count", b"")],
                on_assign=on_assign,
                on_revoke=on_revoke,
                assign=lambda members: dict.fromkeys(members, b"%d" % len(members)),
                instance_id=name,
                session_timeout_ms=30_000,
                heartbeat_interval_ms=100,
            )

        async def until(expected: list[int]) -> None:
            await until_async(lambda: counts == expected, lambda: f"{expected}; there is {counts}")

        async with member("one"):
            await until([1])
            two = member("two")
            two.start()
            await given_back.wait()  # so the coordinator has the join of two, and holds its answer back
            await two.close()
            may_join.set()
            await until([1, 1])

    run(bootstrap, test)
