"""The consumer of the old model against real brokers and a real ZooKeeper."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from millrace.broker.coordination.zookeeper_consumer import (
    CommitFailed,
    ConsumerClosed,
    ConsumerIdTaken,
    ConsumerTimeout,
    MessageStream,
    RebalanceFailed,
    ZookeeperConsumer,
)
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.zookeeper_consumer_process import ConsumerProcess
from tests.cluster.zookeeper_consumer_tools import (
    FAST,
    GROUP,
    committed,
    create,
    end_session_of,
    eventually,
    fill,
    looking_into,
    numbered,
    owners,
    stream_of,
    take,
)
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess
from tests.waiting import patience

pytestmark = pytest.mark.java


@pytest.fixture
def peek(broker: BrokerProcess) -> Iterator[KazooClient]:
    """A look into ZooKeeper beside the consumers."""
    with looking_into(broker.zookeeper) as client:
        yield client


# -- the registry ------------------------------------------------------------------------------------


def test_the_registry_holds_what_tools_of_the_old_model_read(
    broker: BrokerProcess, peek: KazooClient
) -> None:
    create(broker, "orders", 3)
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        consumer.create_message_streams({"orders": 2})
        assert consumer.consumer_id.startswith(f"{GROUP}_")
        (name,) = peek.get_children(f"/consumers/{GROUP}/ids")
        assert name == consumer.consumer_id
        data, stat = peek.get(f"/consumers/{GROUP}/ids/{name}")
        registration = json.loads(data)
        assert abs(int(registration.pop("timestamp")) - time.time() * 1000) < 60_000
        assert registration == {"version": 1, "subscription": {"orders": 2}, "pattern": "static"}
        assert stat.ephemeralOwner != 0
        assert owners(peek) == {0: f"{name}-0", 1: f"{name}-0", 2: f"{name}-1"}
        assert peek.exists(f"/consumers/{GROUP}/owners/orders/0").ephemeralOwner != 0
        assert consumer.owned_partitions() == {("orders", 0): 0, ("orders", 1): 0, ("orders", 2): 1}
        # Where the group begins is written before anything is delivered.
        eventually(lambda: committed(peek) == 0, "the start offset is not written")
        assert peek.exists(f"/consumers/{GROUP}/offsets/orders/0").ephemeralOwner == 0
    assert peek.get_children(f"/consumers/{GROUP}/ids") == []
    assert owners(peek) == {}


def test_messages_come_whole_whatever_their_codec(broker: BrokerProcess) -> None:
    create(broker, "orders", 1)
    expected = []
    with RawClient(broker.port) as client:
        for codec in range(5):
            records = [
                Record(
                    key=None if number % 3 == 0 else b"k%d" % number,
                    value=None if number % 4 == 0 else b"v" * number,
                    headers=(("h", b"1"), ("h", None)) if number % 5 == 0 else (),
                    timestamp_ms=1_700_000_000_000 + number,
                )
                for number in range(20)
            ]
            assert client.produce({("orders", 0): build_batch(records, compression=codec)})[0].error_code == 0
            expected += [(each.key, each.value, each.headers, each.timestamp_ms) for each in records]
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        messages = take(stream_of(consumer), len(expected))
    assert [(each.key, each.value, each.headers, each.timestamp_ms) for each in messages] == expected
    assert [each.offset for each in messages] == list(range(100))
    assert {(each.topic, each.partition) for each in messages} == {("orders", 0)}


# -- sharing -----------------------------------------------------------------------------------------


def test_two_processes_share_and_one_takes_over_when_the_other_is_killed(
    broker: BrokerProcess, peek: KazooClient, tmp_path: Path
) -> None:
    create(broker, "orders", 4)
    plan = {"zookeeper": broker.zookeeper, "group": GROUP, "streams": {"orders": 1}, "options": FAST}
    stop, produced = threading.Event(), []

    def produce() -> None:
        with RawClient(broker.port) as client:
            while not stop.wait(0.01):
                number = len(produced)
                client.produce({("orders", number % 4): batch_of(str(number).encode())}, acks=-1)
                produced.append(str(number))

    producer = threading.Thread(target=produce)
    producer.start()
    processes = []
    try:
        for number in range(2):
            processes.append(ConsumerProcess(tmp_path, f"consumer-{number}", **plan))
        first, second = processes
        everything = {("orders", number) for number in range(4)}

        def are_sharing() -> bool:
            return len(first.owned) == len(second.owned) == 2 and first.owned | second.owned == everything

        eventually(are_sharing, "two processes do not share four partitions")
        eventually(lambda: len(first.messages) > 40 and len(second.messages) > 40, "no flow")
        eventually(lambda: all(committed(peek, partition=each) for each in range(4)), "no automatic commits")
        lost = first.owned
        # The survivor may have read some of them before the other came.
        before = len(second.messages)
        first.kill()
        at_the_kill = {key: committed(peek, partition=key[1]) or 0 for key in lost}
        eventually(lambda: second.owned == everything, "the survivor does not take over")
        count = len(produced)
        eventually(lambda: len(produced) > count + 40, "the producer stands")
        stop.set()
        producer.join()
        expected = set(produced)

        def delivered() -> set[str]:
            return {value for each in processes for _, value in each.messages}

        eventually(lambda: delivered() == expected, "messages were lost")
        for topic, partition in lost:
            offsets = [at[2] for at, _ in second.messages[before:] if at[:2] == (topic, partition)]
            assert offsets == list(range(offsets[0], offsets[0] + len(offsets))), "holes or repetitions"
            assert offsets[0] == at_the_kill[topic, partition] > 0, "not where it was committed"
    finally:
        stop.set()
        producer.join()
        for process in processes:
            process.kill()


def test_a_partition_feeds_one_stream_and_idle_streams_wait(broker: BrokerProcess, peek: KazooClient) -> None:
    create(broker, "orders", 4)
    for partition in range(4):
        fill(broker, "orders", partition, *numbered(10))
    consumers = [
        ZookeeperConsumer(broker.zookeeper, GROUP, consumer_id=name, **{**FAST, "consumer_timeout_ms": 300})
        for name in ("a", "b", "c")
    ]
    try:
        streams = [consumer.create_message_streams({"orders": 2})["orders"] for consumer in consumers]
        expected = [
            {("orders", 0): 0, ("orders", 1): 1},
            {("orders", 2): 0, ("orders", 3): 1},
            {},
        ]
        eventually(
            lambda: [consumer.owned_partitions() for consumer in consumers] == expected,
            "four partitions over three consumers of two streams",
        )
        assert owners(peek) == {0: f"{GROUP}_a-0", 1: f"{GROUP}_a-1", 2: f"{GROUP}_b-0", 3: f"{GROUP}_b-1"}
        for partition, stream in enumerate([*streams[0], *streams[1]]):
            given = take(stream, 10)
            assert [(each.partition, each.offset) for each in given] == [(partition, n) for n in range(10)]
        for stream in (*streams[0], *streams[1], *streams[2]):
            with pytest.raises(ConsumerTimeout):
                next(stream)
        consumers[0].shutdown()
        eventually(
            lambda: consumers[2].owned_partitions() == {("orders", 2): 0, ("orders", 3): 1},
            "the idle consumer does not move up",
        )
    finally:
        for consumer in consumers:
            consumer.shutdown()


def test_a_new_topic_that_matches_the_filter_is_read(broker: BrokerProcess, peek: KazooClient) -> None:
    create(broker, "log-a", 1)
    create(broker, "other", 1)
    fill(broker, "log-a", 0, "a")
    fill(broker, "other", 0, "no")
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        (stream,) = consumer.create_message_streams_by_filter(include="log-.*")
        assert next(stream).value == b"a"
        (name,) = peek.get_children(f"/consumers/{GROUP}/ids")
        registration = json.loads(peek.get(f"/consumers/{GROUP}/ids/{name}")[0])
        assert registration["pattern"] == "white_list"
        assert registration["subscription"] == {"log-.*": 1}
        create(broker, "log-b", 2)
        fill(broker, "log-b", 1, "b")
        message = next(stream)
        assert (message.topic, message.partition, message.value) == ("log-b", 1, b"b")
        assert set(consumer.owned_partitions()) == {("log-a", 0), ("log-b", 0), ("log-b", 1)}


def test_an_excluding_filter_leaves_out_what_matches_and_internal_topics(broker: BrokerProcess) -> None:
    create(broker, "kept", 1)
    create(broker, "secret-1", 1)
    create(broker, "__consumer_offsets", 1)
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        consumer.create_message_streams_by_filter(exclude="secret.*")
        assert set(consumer.owned_partitions()) == {("kept", 0)}


def test_a_topic_may_come_later_and_grow(broker: BrokerProcess) -> None:
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        stream = stream_of(consumer)
        assert consumer.owned_partitions() == {}
        create(broker, "orders", 1)
        fill(broker, "orders", 0, "first")
        assert next(stream).value == b"first"
        with RawClient(broker.port) as client:
            client.ask(Api.CREATE_PARTITIONS, 3, topics=[{"name": "orders", "count": 3}], timeout=60_000)
        eventually(lambda: len(consumer.owned_partitions()) == 3, "new partitions are not taken")
        fill(broker, "orders", 2, "second")
        assert next(stream).value == b"second"


# -- conflicts and lost sessions -----------------------------------------------------------------------


def test_a_claim_that_another_session_holds_is_tried_again_until_it_is_free(
    broker: BrokerProcess, peek: KazooClient
) -> None:
    create(broker, "orders", 2)
    fill(broker, "orders", 1, "x")
    path = f"/consumers/{GROUP}/owners/orders/1"
    peek.create(path, b"someone-0", ephemeral=True, makepath=True)
    made: list[MessageStream] = []
    settings = {**FAST, "rebalance_backoff_ms": 3_600_000}
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as consumer:
        maker = threading.Thread(target=lambda: made.append(stream_of(consumer)))
        maker.start()
        seen: set[frozenset[int]] = set()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            seen.add(frozenset(owners(peek)))
            time.sleep(0.01)
        # What it could get (partition 0) is given back while it waits.
        assert frozenset({1}) in seen
        assert owners(peek)[1] == "someone-0" and not made
        peek.delete(path)
        # It does not sleep the back-off to its end, which is in an hour.
        eventually(lambda: len(consumer.owned_partitions()) == 2, "the claim is tried again")
        maker.join()
        assert next(made[0]).value == b"x"


def test_a_claim_that_never_succeeds_fails_and_leaves_the_group(
    broker: BrokerProcess, peek: KazooClient
) -> None:
    create(broker, "orders", 2)
    peek.create(f"/consumers/{GROUP}/owners/orders/1", b"someone-0", ephemeral=True, makepath=True)
    settings = {**FAST, "rebalance_max_retries": 41, "rebalance_backoff_ms": 100}
    consumer = ZookeeperConsumer(broker.zookeeper, GROUP, **settings)
    begun = time.monotonic()
    with pytest.raises(RebalanceFailed, match="orders-1"):
        consumer.create_message_streams({"orders": 1})
    assert time.monotonic() - begun > 3.0
    eventually(
        lambda: not peek.get_children(f"/consumers/{GROUP}/ids") and set(owners(peek)) == {1},
        "it has left, with what it owned",
    )
    with pytest.raises(RebalanceFailed):
        consumer.commit_offsets()
    consumer.shutdown()


def test_streams_raise_when_a_later_rebalance_fails(broker: BrokerProcess, peek: KazooClient) -> None:
    create(broker, "orders", 1)
    peek.create(f"/consumers/{GROUP}/owners/late/0", b"someone-0", ephemeral=True, makepath=True)
    settings = {**FAST, "rebalance_max_retries": 41, "rebalance_backoff_ms": 100}
    with ZookeeperConsumer(broker.zookeeper, GROUP, **settings) as consumer:
        streams = consumer.create_message_streams({"orders": 1, "late": 1})
        create(broker, "late", 1)
        with pytest.raises(RebalanceFailed, match="late-0"):
            next(streams["orders"][0])


def test_a_lost_session_is_followed_by_a_new_registration(broker: BrokerProcess, peek: KazooClient) -> None:
    create(broker, "orders", 2)
    for partition in range(2):
        fill(broker, "orders", partition, *numbered(5))
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        stream = stream_of(consumer)
        before = take(stream, 10)
        consumer.commit_offsets()
        old = peek.exists(f"/consumers/{GROUP}/ids/{consumer.consumer_id}").ephemeralOwner
        end_session_of(consumer)

        def is_back() -> bool:
            stat = peek.exists(f"/consumers/{GROUP}/ids/{consumer.consumer_id}")
            return stat is not None and stat.ephemeralOwner != old and len(owners(peek)) == 2

        eventually(is_back, "it does not come back after its session was lost")
        for partition in range(2):
            fill(broker, "orders", partition, *numbered(5, 5))
        after = take(stream, 10)
    # Nothing is lost, and as nobody else committed meanwhile nothing comes twice.
    for partition in range(2):
        offsets = [each.offset for each in before + after if each.partition == partition]
        assert offsets == list(range(10))


def test_one_who_lost_its_session_cannot_put_the_group_back(broker: BrokerProcess, peek: KazooClient) -> None:
    """The other owner has committed further; the stale consumer's position must not be written."""
    create(broker, "orders", 1)
    fill(broker, "orders", 0, *numbered(10))
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        stream = stream_of(consumer)
        take(stream, 3)
        path = f"/consumers/{GROUP}/owners/orders/0"
        # As if the session had been lost without this consumer knowing yet.
        peek.delete(path)
        peek.create(path, b"other-0", ephemeral=True)
        peek.set(f"/consumers/{GROUP}/offsets/orders/0", b"9")
        with pytest.raises(CommitFailed, match="orders-0 was not written: the partition is another's now"):
            consumer.commit_offsets()
        assert committed(peek) == 9


def test_an_offset_that_a_tool_wrote_is_overwritten_by_the_owner(
    broker: BrokerProcess, peek: KazooClient
) -> None:
    create(broker, "orders", 1)
    fill(broker, "orders", 0, *numbered(10))
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        stream = stream_of(consumer)
        take(stream, 3)
        peek.set(f"/consumers/{GROUP}/offsets/orders/0", b"9")
        consumer.commit_offsets()
        assert committed(peek) == 3


def test_zookeeper_out_of_reach_stops_reading_until_it_is_back(
    broker_factory: BrokerFactory, zookeeper: Any
) -> None:
    broker = broker_factory(zookeeper_session_timeout_ms=30_000)
    create(broker, "orders", 1)
    fill(broker, "orders", 0, *numbered(5))
    with ZookeeperConsumer(broker.zookeeper, GROUP, **FAST) as consumer:
        stream = stream_of(consumer)
        take(stream, 5)
        zookeeper.pause()
        try:
            eventually(lambda: not consumer.owned_partitions(), "it reads on beyond its session's time")
        finally:
            zookeeper.resume()
        eventually(consumer.owned_partitions, "it does not come back")
        fill(broker, "orders", 0, "after")
        read = [next(stream).value.decode()]
        while read[-1] != "after":
            read.append(next(stream).value.decode())
    # What was read last may not have been committed any more and comes again; nothing is left out.
    assert read[:-1] == numbered(5)[5 - len(read[:-1]) :]


def test_shutdown_without_zookeeper_ends_also_the_calls_of_other_threads(
    broker_factory: BrokerFactory, zookeeper: Any
) -> None:
    broker = broker_factory(zookeeper_session_timeout_ms=60_000)
    create(broker, "orders", 1)
    fill(broker, "orders", 0, *numbered(5))
    consumer = ZookeeperConsumer(broker.zookeeper, GROUP, **FAST)
    take(stream_of(consumer), 5)
    outcomes: list[BaseException | None] = []

    def commit() -> None:
        try:
            consumer.commit_offsets()
            outcomes.append(None)
        except (CommitFailed, ConsumerClosed) as error:
            outcomes.append(error)

    zookeeper.pause()
    try:
        committer = threading.Thread(target=commit)
        committer.start()
        consumer.shutdown()
        committer.join(patience())
        assert not committer.is_alive() and outcomes[0] is not None
    finally:
        zookeeper.resume()


def test_a_consumer_id_in_use_is_refused(broker: BrokerProcess) -> None:
    create(broker, "orders", 1)
    with (
        ZookeeperConsumer(broker.zookeeper, GROUP, consumer_id="same", **FAST) as first,
        ZookeeperConsumer(broker.zookeeper, GROUP, consumer_id="same", **FAST) as second,
    ):
        stream_of(first)
        with pytest.raises(ConsumerIdTaken, match="billing_same"):
            stream_of(second)
