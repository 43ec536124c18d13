"""Three real brokers, one partition on each of them: what acks=all promises, and what a follower does.

The tests speak the protocol through `RawClient`, pause and kill processes, and compare the bytes of the
logs on disk.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.coordination.session import Session
from millrace.broker.errors import (
    NotEnoughReplicas,
    NotEnoughReplicasAfterAppend,
    NotLeaderOrFollower,
    OutOfOrderSequence,
    RequestTimedOut,
)
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.records import read_records
from tests.conftest import BrokerFactory
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess
from tests.waiting import until

pytestmark = pytest.mark.java

LAG_MS = 2_000
"""Where a test waits for a follower to be late."""
NEVER_LATE_MS = 60_000
"""Everywhere else: on a busy machine a healthy follower may stand still for seconds, and whoever is out of
the in-sync set is not in what acks=all promises."""
ALL = -1
EARLIEST, LATEST = -2, -1


def eventually(probe: Callable[[], Any], what: str, logs_of: Iterable[BrokerProcess] = ()) -> Any:
    """The first true value of `probe`; a broker that is just away is no answer."""
    return until(probe, what, retry=(OSError, EOFError), logs_of=logs_of)


class Cluster:
    """Brokers 1 to 3 and one topic `t` with one partition, or more, on all of them."""

    def __init__(self, factory: BrokerFactory, **settings: object) -> None:
        named = {
            "replica_lag_time_max_ms": NEVER_LATE_MS,
            "auto_leader_rebalance_enable": "false",
            **settings,
        }
        first = factory(broker_id=1, **named)
        self.zookeeper = first.zookeeper
        others = [
            factory(broker_id=number, zookeeper_path=first.zookeeper, start=False, **named)
            for number in (2, 3)
        ]
        for other in others:
            other.launch()
        for other in others:
            other.wait_until_serving()
        self.brokers = {broker.id: broker for broker in (first, *others)}
        eventually(lambda: len(self.metadata().brokers) == 3, "three brokers are there")

    def create(self, partitions: int = 1, topic: str = "t", **config: str) -> None:
        named = [{"name": key.replace("_", "."), "value": value} for key, value in config.items()]
        wanted = {"name": topic, "num_partitions": -1, "replication_factor": -1, "configs": named}
        wanted["assignments"] = [
            {"partition_index": number, "broker_ids": (1, 2, 3)} for number in range(partitions)
        ]
        with RawClient(self.brokers[1].port) as client:
            answer = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=20_000)
        assert answer.topics[0].error_code == 0, answer
        self.wait_for_isr(1, 2, 3, topic=topic)

    def metadata(self, via: int = 0) -> Any:
        alive = [broker for broker in self.brokers.values() if is_running(broker)]
        broker = self.brokers[via] if via else alive[0]
        with RawClient(broker.port) as client:
            return client.ask(Api.METADATA, 12, topics=[], allow_auto_topic_creation=False)

    def state(self, topic: str = "t", partition: int = 0) -> dict[str, Any]:
        """The partition's state as it stands in ZooKeeper."""

        async def read() -> bytes:
            session = Session(self.zookeeper, session_timeout_ms=5_000, connection_timeout_ms=5_000)
            await session.start()
            try:
                path = f"/brokers/topics/{topic}/partitions/{partition}/state"
                return (await session.get(path)).data
            finally:
                await session.stop()

        return json.loads(asyncio.run(read()))

    def wait_for_isr(self, *brokers: int, topic: str = "t") -> None:
        eventually(
            lambda: sorted(self.state(topic)["isr"]) == sorted(brokers),
            f"in sync are {brokers}",
            self.brokers.values(),
        )

    def leader(self, *, but_not: int = 0) -> BrokerProcess:
        def probe() -> BrokerProcess | None:
            leader = self.state()["leader"]
            broker = self.brokers.get(leader)
            if broker is None or leader == but_not:
                return None
            return broker if list_offset(broker, EARLIEST)[0] == 0 else None

        return eventually(probe, "a broker leads", self.brokers.values())

    def log_of(self, broker: int, topic: str = "t", partition: int = 0) -> bytes:
        """Everything in the log of a partition, as it lies on the disk."""
        folder = self.brokers[broker].data / f"{topic}-{partition}"
        return b"".join(path.read_bytes() for path in sorted(folder.glob("*.log")))

    def wait_until_logs_agree(self, *brokers: int) -> bytes:
        def same() -> bytes | None:
            logs = {self.log_of(broker) for broker in brokers}
            return logs.pop() if len(logs) == 1 else None

        return eventually(same, f"the logs of {brokers} are the same", self.brokers.values())


def is_running(broker: BrokerProcess) -> bool:
    return broker.process is not None and broker.process.poll() is None


def produce(
    broker: BrokerProcess, *values: bytes, acks: int = ALL, timeout_ms: int = 20_000
) -> tuple[int, int]:
    """(error code, base offset)."""
    batches = {("t", 0): batch_of(*values)}
    with RawClient(broker.port) as client:
        client.socket.settimeout(timeout_ms / 1000 + 10)
        answer = client.produce(batches, acks=acks, timeout_ms=timeout_ms)[0]
    return answer.error_code, answer.base_offset


def values_of(log: bytes) -> list[bytes | None]:
    found: list[bytes | None] = []
    for position, header in iterate_batches(log):
        found += [record.value for record in read_records(log[position : position + header.size])]
    return found


def consume(broker: BrokerProcess, offset: int = 0) -> list[bytes | None]:
    with RawClient(broker.port) as client:
        part = client.fetch(PartitionFetch("t", 0, offset, 50 << 20)).partitions[0]
    assert part.error_code == 0, part
    return values_of(bytes(part.records))


def list_offset(broker: BrokerProcess, timestamp: int) -> tuple[int, int]:
    """(error code, offset)."""
    asked = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}
    with RawClient(broker.port) as client:
        topics = [{"name": "t", "partitions": [asked]}]
        answer = client.ask(Api.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=topics)
    part = answer.topics[0].partitions[0]
    return int(part.error_code), int(part.offset)


def pause(broker: BrokerProcess) -> None:
    assert broker.process is not None
    broker.process.send_signal(signal.SIGSTOP)


def resume(broker: BrokerProcess) -> None:
    assert broker.process is not None
    broker.process.send_signal(signal.SIGCONT)


@pytest.mark.safety
def test_what_was_acknowledged_survives_the_leader(broker_factory: BrokerFactory) -> None:
    cluster = Cluster(broker_factory)
    cluster.create(min_insync_replicas="2")
    first = cluster.leader()
    sent = [b"%d" % number for number in range(50)]
    for value in sent:
        assert produce(first, value)[0] == 0
    # acks=all: it is on every disk's page cache the moment it is acknowledged.
    assert {values_of(cluster.log_of(number)) == sent for number in (1, 2, 3)} == {True}
    # A follower serves nobody but says so.
    follower = cluster.brokers[next(number for number in (1, 2, 3) if number != first.id)]
    with RawClient(follower.port) as client:
        refused = client.fetch(PartitionFetch("t", 0, 0, 1 << 20)).partitions[0]
    assert refused.error_code == NotLeaderOrFollower.code
    first.kill()
    second = cluster.leader(but_not=first.id)
    eventually(lambda: list_offset(second, LATEST) == (0, 50), "the new leader knows its high watermark")
    assert consume(second) == sent
    assert produce(second, b"after")[1] == 50
    # The old leader comes back as a follower, catches up and is in sync again.
    first.start()
    cluster.wait_for_isr(1, 2, 3)
    log = cluster.wait_until_logs_agree(1, 2, 3)
    assert values_of(log) == [*sent, b"after"]
    assert produce(second, b"all three")[0] == 0


@pytest.mark.safety
def test_numbers_of_an_idempotent_producer_go_on_at_the_next_leader(broker_factory: BrokerFactory) -> None:
    """Who had no answer sends again: what was there already is where it was, and a gap is refused."""
    cluster = Cluster(broker_factory)
    cluster.create(min_insync_replicas="2")
    first = cluster.leader()
    with RawClient(first.port) as client:
        given = client.ask(Api.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout=60_000)
    assert given.error_code == 0

    def send(broker: BrokerProcess, number: int) -> tuple[int, int]:
        numbered = batch_of(
            b"%d" % number,
            producer_id=int(given.producer_id),
            producer_epoch=int(given.producer_epoch),
            base_sequence=number,
        )
        with RawClient(broker.port) as client:
            answer = client.produce({("t", 0): numbered}, acks=ALL)[0]
        return answer.error_code, answer.base_offset

    assert [send(first, number) for number in range(3)] == [(0, 0), (0, 1), (0, 2)]
    first.kill()
    second = cluster.leader(but_not=first.id)
    assert [send(second, number) for number in (2, 0)] == [(0, 2), (0, 0)]
    assert send(second, 9)[0] == OutOfOrderSequence.code
    assert [send(second, number) for number in (3, 3)] == [(0, 3), (0, 3)]
    eventually(lambda: list_offset(second, LATEST) == (0, 4), "the end is known")
    assert consume(second) == [b"0", b"1", b"2", b"3"]


def test_no_new_partition_is_left_behind(broker_factory: BrokerFactory) -> None:
    cluster = Cluster(broker_factory)
    for number in range(60):
        # Followers often ask before the leader knows that it leads, and rest: each such rest must end.
        topic = f"new-{number}"
        cluster.create(topic=topic)
        with RawClient(cluster.brokers[1].port) as client:
            batches = {(topic, 0): batch_of(b"to all")}

            def all_have_it(client: RawClient = client, batches: Any = batches) -> bool:
                answer = client.produce(batches, acks=ALL, timeout_ms=10_000)[0]
                assert answer.error_code in (0, NotLeaderOrFollower.code, RequestTimedOut.code), answer
                return answer.error_code == 0

            eventually(all_have_it, f"{topic} is followed by all")


def test_a_follower_that_was_away_catches_up(broker_factory: BrokerFactory) -> None:
    cluster = Cluster(broker_factory)
    cluster.create(partitions=3)
    first = cluster.leader()
    assert produce(first, b"before")[0] == 0
    cluster.brokers[3].kill()
    cluster.wait_for_isr(1, 2)
    big = [bytes([65 + number % 26]) * 100_000 for number in range(40)]
    for value in big:
        assert produce(first, value)[0] == 0
    cluster.brokers[3].start()
    cluster.wait_for_isr(1, 2, 3)
    assert values_of(cluster.wait_until_logs_agree(1, 2, 3)) == [b"before", *big]


@pytest.mark.safety
def test_records_that_only_a_dead_leader_had_are_cut_when_it_returns(broker_factory: BrokerFactory) -> None:
    # From the pause to the kill no session may end: the leader, alone in sync, would be right to commit.
    cluster = Cluster(broker_factory, zookeeper_session_timeout_ms=4_000)
    cluster.create()
    first = cluster.leader()
    others = [number for number in (1, 2, 3) if number != first.id]
    committed = [b"committed %d" % number for number in range(5)]
    assert produce(first, *committed)[0] == 0
    for number in others:
        pause(cluster.brokers[number])
    # Nobody fetches: all but the first, which may answer a fetch that waited, are in the leader's log alone.
    for number in range(7):
        assert produce(first, b"lost %d" % number, acks=1) == (0, 5 + number)
    assert consume(first) == committed
    first.kill()
    for number in others:
        resume(cluster.brokers[number])
    second = cluster.leader(but_not=first.id)
    _, base_offset = eventually(
        lambda: [answer for answer in [produce(second, b"other", b"history")] if answer[0] == 0],
        "the new leader goes on",
    )[0]
    assert base_offset in (5, 6)
    kept = [*committed, b"lost 0"][:base_offset]
    assert len(values_of(cluster.log_of(first.id))) == 12
    first.start()
    cluster.wait_for_isr(1, 2, 3)
    log = cluster.wait_until_logs_agree(1, 2, 3)
    assert values_of(log) == [*kept, b"other", b"history"]
    assert "records that the leader has not were cut" in first.log
    # Its own leader epoch is on record where the histories met.
    checkpoint = (first.data / "t-0" / "leader-epoch-checkpoint").read_text().split("\n")
    epochs = [tuple(map(int, line.split())) for line in checkpoint[2:] if line]
    assert base_offset in (epochs[-1][1], epochs[-2][1]), epochs


def test_a_write_is_refused_where_too_few_are_in_sync(broker_factory: BrokerFactory) -> None:
    cluster = Cluster(broker_factory, zookeeper_session_timeout_ms=20_000, replica_lag_time_max_ms=LAG_MS)
    cluster.create(min_insync_replicas="2")
    first = cluster.leader()
    others = [broker for broker in cluster.brokers.values() if broker.id != first.id]
    assert produce(first, b"committed")[0] == 0
    for other in others:
        pause(other)
    # Appended while three were in sync: after it only one is left.
    code, _ = produce(first, b"in doubt", timeout_ms=NEVER_LATE_MS)
    assert code == NotEnoughReplicasAfterAppend.code  # and not that its time was up
    assert produce(first, b"refused")[0] == NotEnoughReplicas.code
    assert produce(first, b"taken", acks=1) == (0, 2)
    # Under min.insync.replicas nothing new is shown (KIP-966).
    assert consume(first) == [b"committed"]
    for other in others:
        resume(other)
    cluster.wait_for_isr(1, 2, 3)
    assert produce(first, b"again")[0] == 0
    assert consume(first) == [b"committed", b"in doubt", b"taken", b"again"]


def test_how_many_must_be_in_sync_and_who_may_be_elected_is_changed_under_way(
    broker_factory: BrokerFactory,
) -> None:
    cluster = Cluster(broker_factory)
    cluster.create()
    first = cluster.leader()
    others = [broker for broker in cluster.brokers.values() if broker.id != first.id]
    assert produce(first, b"by all")[0] == 0
    for other in others:
        other.kill()
    cluster.wait_for_isr(first.id)
    assert produce(first, b"by one")[0] == 0
    configure(first, "min.insync.replicas", "2")
    eventually(lambda: produce(first, b"refused")[0] == NotEnoughReplicas.code, "two are needed", [first])
    configure(first, "min.insync.replicas", None)
    eventually(lambda: produce(first, b"by one again")[0] == 0, "one is enough again", [first])
    first.kill()
    second = others[0]
    second.start()
    # It was out of sync when it went, and what it lacks was acknowledged.
    eventually(lambda: cluster.state()["leader"] == -1, "nobody leads", [second])
    assert produce(second, b"refused")[0] == NotLeaderOrFollower.code
    configure(second, "unclean.leader.election.enable", "true")
    assert cluster.leader().id == second.id
    assert consume(second) == [b"by all"]
    first.start()
    cluster.wait_for_isr(first.id, second.id)
    assert values_of(cluster.wait_until_logs_agree(first.id, second.id)) == [b"by all"]


def configure(broker: BrokerProcess, name: str, value: str | None) -> None:
    """A setting of the topic: set, or taken away."""
    change = {"name": name, "config_operation": 0 if value is not None else 1, "value": value}
    resources = [{"resource_type": 2, "resource_name": "t", "configs": [change]}]
    with RawClient(broker.port) as client:
        answer = client.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=resources)
    assert [int(response.error_code) for response in answer.responses] == [0]


def test_a_paused_follower_leaves_the_in_sync_set_and_comes_back(broker_factory: BrokerFactory) -> None:
    cluster = Cluster(broker_factory, zookeeper_session_timeout_ms=20_000, replica_lag_time_max_ms=LAG_MS)
    cluster.create()
    first = cluster.leader()
    other = next(broker for broker in cluster.brokers.values() if broker.id != first.id)
    third = next(broker.id for broker in cluster.brokers.values() if broker.id not in (first.id, other.id))
    assert produce(first, b"one")[0] == 0
    epoch = cluster.state()["leader_epoch"]
    paused = time.monotonic()
    pause(other)
    # acks=all waits for the paused one until it is declared late, and not longer. (It had fetched up to half
    # a second before the pause.)
    code, _ = produce(first, b"too soon", timeout_ms=200)
    assert code == RequestTimedOut.code or time.monotonic() - paused > LAG_MS / 1000 - 0.5
    assert produce(first, b"two")[0] == 0
    cluster.wait_for_isr(first.id, third)
    assert cluster.state()["leader_epoch"] == epoch
    assert produce(first, b"three")[0] == 0  # while the other still stands still
    resume(other)
    cluster.wait_for_isr(1, 2, 3)
    assert values_of(cluster.wait_until_logs_agree(1, 2, 3)) == [b"one", b"too soon", b"two", b"three"]


def test_deleted_records_are_deleted_everywhere(broker_factory: BrokerFactory) -> None:
    cluster = Cluster(broker_factory)
    cluster.create()
    first = cluster.leader()
    for number in range(6):
        assert produce(first, b"%d" % number, b"%d'" % number)[0] == 0
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "offset": 7}]}]
    with RawClient(first.port) as client:
        answer = client.ask(Api.DELETE_RECORDS, 2, topics=topics, timeout=10_000)
    part = answer.topics[0].partitions[0]
    assert (part.error_code, part.low_watermark) == (0, 7)
    # A replica without any data begins at the leader's start, in the middle of a batch.
    victim = next(broker for broker in cluster.brokers.values() if broker.id != first.id)
    victim.stop()
    for path in (victim.data / "t-0").iterdir():
        path.unlink()
    (victim.data / "t-0").rmdir()
    victim.start()
    cluster.wait_for_isr(1, 2, 3)
    first.kill()
    second = cluster.leader(but_not=first.id)
    eventually(lambda: list_offset(second, LATEST) == (0, 12), "the end is known")
    assert list_offset(second, EARLIEST) == (0, 7)


def test_damaged_batch_is_not_replicated_and_holds_up_no_other_partition(
    broker_factory: BrokerFactory,
) -> None:
    cluster = Cluster(broker_factory)
    cluster.create(partitions=2)
    first = cluster.leader()
    follower = cluster.brokers[3]
    follower.kill()
    cluster.wait_for_isr(1, 2)
    for number in range(4):
        assert produce(first, b"value %d" % number)[0] == 0
    path = first.data / "t-0" / f"{0:020d}.log"
    log = bytearray(path.read_bytes())
    positions = [position for position, _ in iterate_batches(log)]
    log[positions[2] + 70] ^= 0xFF  # within the third batch's records
    path.write_bytes(log)
    follower.start()
    with RawClient(first.port) as client:
        batches = {("t", 1): batch_of(b"healthy")}
        assert client.produce(batches, acks=ALL)[0].error_code == 0
    eventually(lambda: 3 in cluster.state(partition=1)["isr"], "the other partition is in sync")
    eventually(lambda: "a partition is not replicated" in follower.log, "the follower says so")
    assert values_of(cluster.log_of(3)) == [b"value 0", b"value 1"]
    assert cluster.state()["isr"] == [1, 2]


def test_high_watermarks_are_on_the_disk_in_kafkas_format(broker_factory: BrokerFactory) -> None:
    cluster = Cluster(broker_factory, replica_high_watermark_checkpoint_interval_ms=200)
    cluster.create()
    first = cluster.leader()
    assert produce(first, b"a", b"b", b"c")[0] == 0

    def checkpoint(broker: BrokerProcess) -> list[str]:
        path: Path = broker.data / "replication-offset-checkpoint"
        return path.read_text().split("\n") if path.exists() else []

    for broker in cluster.brokers.values():
        eventually(
            lambda broker=broker: checkpoint(broker)[:3] == ["0", "1", "t 0 3"],
            "the high watermark is checkpointed",
        )


def test_with_flushed_visibility_the_leader_counts_only_what_followers_have_flushed(
    broker_factory: BrokerFactory,
) -> None:
    cluster = Cluster(broker_factory, visibility="flushed", log_flush_scheduler_interval_ms=600_000)
    cluster.create(min_insync_replicas="3")
    first = cluster.leader()
    for number in range(20):
        assert produce(first, b"%d" % number)[0] == 0
    assert consume(first) == [b"%d" % number for number in range(20)]
    # acks=1 flushes nothing on the leader: followers have it, and yet nobody sees it.
    assert produce(first, b"unflushed", acks=1)[0] == 0
    eventually(lambda: len(values_of(cluster.log_of(2))) == 21, "the follower has it")
    assert len(consume(first)) == 20
    assert produce(first, b"flushed")[0] == 0
    assert len(consume(first)) == 22
