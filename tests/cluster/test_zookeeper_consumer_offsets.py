"""Offsets and streams of the old model's consumer, against real brokers and a real ZooKeeper."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from kazoo.client import KazooClient

from millrace.broker.coordination.zookeeper_consumer import (
    AsyncZookeeperConsumer,
    ConsumerClosed,
    ConsumerTimeout,
    Message,
    NotOwned,
    StreamsExist,
    ZookeeperConsumer,
)
from millrace.broker.errors import ConfigError, ZooKeeperUnreachable
from millrace.broker.protocol.frames import Api
from tests.cluster.zookeeper_consumer_tools import (
    FAST,
    GROUP,
    committed,
    create,
    eventually,
    fill,
    looking_into,
    numbered,
    stream_of,
    take,
)
from tests.conftest import BrokerFactory
from tests.ports import free_port
from tests.raw_client import RawClient
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import patience

pytestmark = pytest.mark.java


@pytest.fixture
def peek(broker: BrokerProcess) -> Iterator[KazooClient]:
    """A look into ZooKeeper beside the consumers."""
    with looking_into(broker.zookeeper) as client:
        yield client


# -- offsets -----------------------------------------------------------------------------------------


def test_a_group_without_offsets_starts_at_smallest_or_largest(
    broker: BrokerProcess, peek: KazooClient
) -> None:
    create(broker, "orders", 1)
    fill(broker, "orders", 0, "old")
    with ZookeeperConsumer(broker.zookeeper, "archive", **FAST) as smallest:
        assert next(stream_of(smallest)).value == b"old"
    settings = {**FAST, "auto_offset_reset": "largest", "auto_commit_enable": False}
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as largest:
        stream = stream_of(largest)
        # The place is written at once: after a crash, the next one must not begin at a later end.
        eventually(lambda: committed(peek) == 1, "the start offset is not written")
        fill(broker, "orders", 0, "new")
        assert next(stream).value == b"new"
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as largest:
        assert next(stream_of(largest)).value == b"new"


def test_automatic_commits_leave_out_the_message_in_hand(broker: BrokerProcess, peek: KazooClient) -> None:
    create(broker, "orders", 1)
    fill(broker, "orders", 0, *numbered(10))
    consumer = ZookeeperConsumer(broker.zookeeper, GROUP, **FAST)
    stream = stream_of(consumer)
    take(stream, 4)
    eventually(lambda: committed(peek) == 3, "no automatic commit")
    time.sleep(0.3)  # three more intervals: the fourth message is still being worked on
    assert committed(peek) == 3
    # Asked by the thread that took it, it counts.
    consumer.commit_offsets()
    assert committed(peek) == 4
    take(stream, 2)
    another = threading.Thread(target=consumer.commit_offsets)
    another.start()
    another.join()
    assert committed(peek) == 5
    take(stream, 1)
    consumer.shutdown()
    assert committed(peek) == 7
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as successor:
        assert next(stream_of(successor)).offset == 7


def test_an_error_in_the_block_leaves_its_message_uncommitted(
    broker: BrokerProcess, peek: KazooClient
) -> None:
    create(broker, "orders", 1)
    fill(broker, "orders", 0, *numbered(10))
    with (
        pytest.raises(ZeroDivisionError),
        ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer,
    ):
        for message in stream_of(consumer):
            assert message.offset < 5
            _ = 1 / (4 - message.offset)
    assert committed(peek) == 4


def test_without_automatic_commits_only_commit_offsets_writes(
    broker: BrokerProcess, peek: KazooClient
) -> None:
    create(broker, "orders", 1)
    fill(broker, "orders", 0, *numbered(10))
    settings = {**FAST, "auto_commit_enable": False}
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as consumer:
        take(stream_of(consumer), 8)
    assert committed(peek) == 0
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as consumer:
        assert [each.offset for each in take(stream_of(consumer), 8)] == list(range(8))
        consumer.commit_offsets()
    assert committed(peek) == 8


def test_rewind_goes_back_and_forth(broker: BrokerProcess, peek: KazooClient) -> None:
    create(broker, "orders", 2)
    for partition in range(2):
        for start in range(0, 100, 10):
            fill(broker, "orders", partition, *numbered(10, start))
    settings = {**FAST, "auto_commit_interval_ms": 60_000}
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as consumer:
        stream = stream_of(consumer)
        first = take(stream, 200)
        assert {each.offset for each in first} == set(range(100))
        assert consumer.rewind("orders", 1, 42) == 42
        again = take(stream, 58)
        assert [(each.partition, each.offset) for each in again] == [(1, at) for at in range(42, 100)]
        assert consumer.rewind("orders", 0) == 0, "to what was committed"
        consumer.commit_offsets()
        assert committed(peek, partition=0) == 0 and committed(peek, partition=1) == 100
        assert consumer.rewind("orders", 0, 97) == 97
        assert [each.offset for each in take(stream, 3)] == [97, 98, 99]
        assert consumer.rewind("orders", 0, "smallest") == 0
        assert next(stream).offset == 0
        assert consumer.rewind("orders", 0, "largest") == 100
        fill(broker, "orders", 0, "new")
        assert next(stream).value == b"new"
        with pytest.raises(NotOwned):
            consumer.rewind("orders", 7, 0)
        with pytest.raises(ConfigError):
            consumer.rewind("orders", 0, "yesterday")
        with pytest.raises(ConfigError):
            consumer.rewind("orders", 0, -5)


def test_an_offset_that_retention_has_passed_goes_on_at_smallest_or_largest(
    broker_factory: BrokerFactory,
) -> None:
    broker = broker_factory(log_retention_check_interval_ms=200)
    create(broker, "orders", 1, segment_bytes="2000", retention_bytes="4000", retention_ms="-1")
    settings = {**FAST, "auto_commit_interval_ms": 60_000}
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as consumer:
        fill(broker, "orders", 0, "first")
        assert next(stream_of(consumer)).value == b"first"
    for number in range(20):
        fill(broker, "orders", 0, str(number) * 500)

    def log_start() -> int:
        with RawClient(broker.port) as client:
            asked = [{"partition_index": 0, "timestamp": -2}]
            answer = client.ask(
                Api.LIST_OFFSETS, 5, replica_id=-1, topics=[{"name": "orders", "partitions": asked}]
            )
        return int(answer.topics[0].partitions[0].offset)

    start = eventually(lambda: log_start() if log_start() > 5 else 0, "retention does not begin")
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as consumer:
        stream = stream_of(consumer)
        assert next(stream).offset >= start
        consumer.rewind("orders", 0, 1)  # while it runs
        assert next(stream).offset >= start
        consumer.rewind("orders", 0, 1_000_000)
        assert next(stream).offset >= start
    with ZookeeperConsumer(
        broker.zookeeper, GROUP, **{**settings, "auto_offset_reset": "largest"}
    ) as consumer:
        stream = stream_of(consumer)
        consumer.rewind("orders", 0, 1)
        came = threading.Event()

        def write() -> None:
            """Again and again: nothing tells when the consumer has found the end."""
            while not came.wait(0.3):
                fill(broker, "orders", 0, "newest")

        writer = threading.Thread(target=write)
        writer.start()
        try:
            assert next(stream).value == b"newest"
        finally:
            came.set()
            writer.join()


# -- streams -----------------------------------------------------------------------------------------


def test_a_stalled_stream_holds_little_and_stops_no_other(broker: BrokerProcess) -> None:
    create(broker, "slow", 1)
    create(broker, "quick", 1)
    big = ["x" * 10_000] * 20
    for _ in range(50):
        fill(broker, "slow", 0, *big)
        fill(broker, "quick", 0, *big)
    settings = {**FAST, "queued_max_bytes": 1 << 20, "fetch_message_max_bytes": 300_000}
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as consumer:
        streams = consumer.create_message_streams({"slow": 1, "quick": 1})
        assert len(take(streams["quick"][0], 1000)) == 1000
        queue = streams["slow"][0]._queue
        assert 0 < sum(chunk.size for chunk in queue._chunks) <= (1 << 20) + 300_000
        assert len(take(streams["slow"][0], 1000)) == 1000


def test_a_batch_larger_than_the_fetch_size_is_delivered(broker: BrokerProcess) -> None:
    create(broker, "orders", 2)
    for partition in range(2):
        fill(broker, "orders", partition, *["y" * 100_000] * 5)
    settings = {**FAST, "fetch_message_max_bytes": 1_000, "queued_max_bytes": 1_000}
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as consumer:
        assert len(take(stream_of(consumer), 10)) == 10


def test_a_timeout_is_raised_and_the_stream_goes_on(broker: BrokerProcess) -> None:
    create(broker, "orders", 1)
    with ZookeeperConsumer(broker.zookeeper, GROUP, **{**FAST, "consumer_timeout_ms": 200}) as consumer:
        stream = stream_of(consumer)
        with pytest.raises(ConsumerTimeout, match="200 ms"):
            next(stream)
        fill(broker, "orders", 0, "late")
        assert next(stream).value == b"late"
        with pytest.raises(StreamsExist):
            consumer.create_message_streams({"orders": 1})


def test_shutdown_ends_waiting_streams(broker: BrokerProcess) -> None:
    create(broker, "orders", 1)
    consumer = ZookeeperConsumer(broker.zookeeper, GROUP, **FAST)
    stream = stream_of(consumer)
    seen: list[Message] = []
    reader = threading.Thread(target=lambda: seen.extend(stream))
    reader.start()
    fill(broker, "orders", 0, "only")
    eventually(lambda: consumer._connector._readings["orders", 0].delivered == 1, "nothing is delivered")
    consumer.shutdown()
    consumer.shutdown()
    reader.join(patience(60))
    assert not reader.is_alive() and [each.value for each in seen] == [b"only"]
    with pytest.raises(ConsumerClosed):
        consumer.commit_offsets()


def test_a_broker_that_comes_back_at_another_port_is_followed(broker: BrokerProcess) -> None:
    create(broker, "orders", 1)
    fill(broker, "orders", 0, "before")
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        stream = stream_of(consumer)
        assert next(stream).value == b"before"
        broker.stop()
        broker.port = free_port()
        broker.start()
        fill(broker, "orders", 0, "after")
        assert next(stream).value == b"after"


def test_the_asynchronous_face_does_the_same(broker: BrokerProcess, peek: KazooClient) -> None:
    create(broker, "orders", 2)
    for partition in range(2):
        fill(broker, "orders", partition, *numbered(5))

    async def read() -> list[Message]:
        seen = []
        async with AsyncZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
            (stream,) = (await consumer.create_message_streams({"orders": 1}))["orders"]
            async for message in stream:
                seen.append(message)
                if len(seen) == 7:
                    await consumer.commit_offsets()
                if len(seen) == 10:
                    break
            assert consumer.owned_partitions() == {("orders", 0): 0, ("orders", 1): 0}
            await consumer.rewind("orders", 0, 3)
            assert (await anext(stream)).offset == 3
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return seen

    seen = asyncio.run(read())
    assert {(each.partition, each.offset) for each in seen} == {(p, at) for p in range(2) for at in range(5)}
    assert committed(peek, partition=0) == 4 and committed(peek, partition=1) == 5

    async def time_out() -> None:
        settings = {**FAST, "consumer_timeout_ms": 100}
        async with AsyncZookeeperConsumer(broker.zookeeper, "another", **settings) as consumer:
            (stream,) = await consumer.create_message_streams_by_filter(include="nothing", streams=1)
            with pytest.raises(ConsumerTimeout):
                await anext(stream)

    asyncio.run(time_out())


def test_zookeeper_that_is_not_there_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ZooKeeperUnreachable, match=address):
        ZookeeperConsumer(address, GROUP, zookeeper_connection_timeout_ms=300)


@pytest.mark.parametrize("address", ["127.0.0.1:abc/x", "", ":/", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"zookeeper: got .*, expected host:port"):
        ZookeeperConsumer(address, GROUP, **FAST)


def test_a_chroot_that_is_no_path_is_refused(zookeeper: ZooKeeper) -> None:
    with pytest.raises(ConfigError, match=r"zookeeper: got '/a/\.\./b', expected a path"):
        ZookeeperConsumer(f"{zookeeper.chroot().partition('/')[0]}/a/../b", GROUP, **FAST)
