"""Starting, stopping, being killed, and everything that may keep a broker from starting."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.coordination import paths
from millrace.broker.coordination.session import Session
from millrace.broker.errors import (
    BrokerIdTaken,
    ConfigError,
    DataFolderNotWritable,
    KafkaStorageError,
    NotLeaderOrFollower,
    OutOfOrderSequence,
    PortTaken,
    ZooKeeperUnreachable,
)
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.records import Record, build_batch
from tests.conftest import BrokerFactory
from tests.ports import free_port
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import patience, until, until_async

pytestmark = pytest.mark.java

TIMEOUT_MS = 60_000


def create(client: RawClient, *names: str, partition_count: int = 1, **configs: str) -> None:
    wanted = [
        {
            "name": name,
            "num_partitions": partition_count,
            "replication_factor": 1,
            "configs": [{"name": key, "value": value} for key, value in configs.items()],
        }
        for name in names
    ]
    answer = client.ask(Api.CREATE_TOPICS, 7, topics=wanted, timeout=TIMEOUT_MS)
    assert [topic.error_code for topic in answer.topics] == [0] * len(names), answer


def end_offset(client: RawClient, topic: str, partition: int = 0) -> int:
    """Where the log ends; the broker may be about to be elected its leader."""

    def answered() -> Any:
        given = client.fetch(PartitionFetch(topic, partition, 0, 1)).partitions[0]
        return None if given.error_code == NotLeaderOrFollower.code else given

    given = until(answered, f"{topic}-{partition} is led")
    assert given.error_code == 0, given
    return int(given.high_watermark)


def one_line(broker: BrokerProcess) -> str:
    """The error line of a broker that did not start; anything like a traceback is a failure."""
    assert "Traceback" not in broker.log
    lines = [line for line in broker.log.splitlines() if line.startswith("millrace")]
    assert len(lines) == 1, broker.log
    return lines[0]


def test_stopped_broker_comes_back_with_its_records(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        create(client, "kept", partition_count=2)
        client.produce({("kept", 1): batch_of(b"a", b"b")})
    assert broker.stop() == 0
    assert (broker.data / ".kafka_cleanshutdown").exists()
    broker.start()
    with RawClient(broker.port) as client:
        assert [end_offset(client, "kept", number) for number in (0, 1)] == [0, 2]
        client.produce({("kept", 1): batch_of(b"c")})
        assert end_offset(client, "kept", 1) == 3


def test_killed_broker_keeps_what_it_acknowledged(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        create(client, "kept")
        for number in range(20):
            assert client.produce({("kept", 0): batch_of(b"%d" % number)}, acks=-1)[0].error_code == 0
    broker.kill()
    broker.start()  # waits for the dead one's session, then takes the id
    with RawClient(broker.port) as client:
        assert end_offset(client, "kept") == 20
        assert client.produce({("kept", 0): batch_of(b"more")}, acks=-1)[0].base_offset == 20


def test_broker_that_ends_before_it_has_joined_again_does_not_hide_how_it_ended_before(
    broker: BrokerProcess,
) -> None:
    """What a crash took is missing at the next start, too: it must leave the in-sync sets, and the mark of a
    clean end would let it stay."""
    with RawClient(broker.port) as client:
        create(client, "kept")
    broker.kill()
    broker.launch()
    until(lambda: "the broker id is still registered" in broker.log, "it waits for the dead one's session")
    assert broker.stop() == 0
    assert not (broker.data / ".kafka_cleanshutdown").exists()
    broker.start()
    assert broker.stop() == 0
    assert (broker.data / ".kafka_cleanshutdown").exists()


def test_reader_of_records_that_a_crash_took_is_told_so(broker: BrokerProcess) -> None:
    """A power loss takes what was never flushed, and its offsets are given again. The reader (a mirror) that
    had the lost records must not take the new ones for those."""
    with RawClient(broker.port) as client:
        create(client, "cut")
        sizes = [len(batch_of(b"%d" % number)) for number in range(10)]
        for number in range(10):
            assert client.produce({("cut", 0): batch_of(b"%d" % number)}, acks=-1)[0].error_code == 0
        epoch = client.fetch(PartitionFetch("cut", 0, 10, 1 << 20, last_fetched_epoch=0)).partitions[0]
        assert (epoch.error_code, epoch.diverging) == (0, None)
    broker.kill()
    broker.end_session()
    os.truncate(broker.data / "cut-0" / f"{0:020d}.log", sum(sizes[:6]))
    broker.start()
    with RawClient(broker.port) as client:
        assert end_offset(client, "cut") == 6
        for number in range(10):
            answer = client.produce({("cut", 0): batch_of(b"new %d" % number)}, acks=-1)[0]
            assert (answer.error_code, answer.base_offset) == (0, 6 + number)
        given = client.fetch(PartitionFetch("cut", 0, 10, 1 << 20, last_fetched_epoch=0)).partitions[0]
        assert given.diverging == (0, 6)


def test_stop_with_waiting_readers_is_quick(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        create(client, "quiet")
        client.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.fetch(PartitionFetch("quiet", 0, 0, 1), max_wait_ms=3_600_000)
        assert broker.stop() == 0  # the reader would wait for an hour
        client.socket.settimeout(patience(30))
        assert client.is_closed()


def test_same_broker_id_twice_is_refused(broker: BrokerProcess, broker_factory: BrokerFactory) -> None:
    second = broker_factory(zookeeper_path=broker.zookeeper, broker_id=broker.id, start=False)
    second.launch()
    assert second.wait_until_ended() == BrokerIdTaken.exit_status
    line = one_line(second)
    assert f"broker id {broker.id} is in use" in line
    assert broker.bootstrap in line


def test_taken_port_is_refused(broker_factory: BrokerFactory) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        broker = broker_factory(start=False)
        broker.port = holder.getsockname()[1]
        broker.launch()
        assert broker.wait_until_ended() == PortTaken.exit_status
    assert f"127.0.0.1:{broker.port}" in one_line(broker)


def test_unreachable_zookeeper_is_refused(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = {"zookeeper.connection.timeout.ms": 700}
    broker = BrokerProcess(f"{address}/nowhere", tmp_path, settings=settings)
    broker.launch()
    assert broker.wait_until_ended() == ZooKeeperUnreachable.exit_status
    assert address in one_line(broker)


@pytest.mark.parametrize("folder", ["file", "/proc/nothing"])
def test_unusable_data_folder_is_refused(broker_factory: BrokerFactory, tmp_path: Path, folder: str) -> None:
    broker = broker_factory(start=False)
    if folder == "file":
        broker.data.write_text("not a folder")
    else:
        broker.data = Path(folder)
    broker.launch()
    assert broker.wait_until_ended() == DataFolderNotWritable.exit_status
    assert str(broker.data) in one_line(broker)


def test_unknown_setting_is_refused(broker_factory: BrokerFactory) -> None:
    broker = broker_factory(start=False)
    broker.settings["log.segment.byte"] = "1"
    broker.launch()
    assert broker.wait_until_ended() == ConfigError.exit_status
    assert "log.segment.bytes" in one_line(broker)  # the nearest one that exists


def test_data_of_another_cluster_is_refused(
    broker: BrokerProcess, broker_factory: BrokerFactory, zookeeper: ZooKeeper
) -> None:
    with RawClient(broker.port) as client:
        create(client, "precious")
        client.produce({("precious", 0): batch_of(b"x")})
    broker.stop()
    lost = broker_factory(zookeeper_path=zookeeper.chroot(), start=False)
    lost.data = broker.data
    lost.launch()
    assert lost.wait_until_ended() == ConfigError.exit_status
    assert "cluster.id" in one_line(lost)
    broker.start()
    with RawClient(broker.port) as client:
        assert end_offset(client, "precious") == 1


def test_torn_tail_is_cut_and_the_rest_served(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        create(client, "torn")
        for value in (b"a", b"b", b"c"):
            client.produce({("torn", 0): batch_of(value)})
    broker.kill()
    broker.end_session()
    segment = broker.data / "torn-0" / f"{0:020d}.log"
    os.truncate(segment, segment.stat().st_size - 5)
    broker.start()
    with RawClient(broker.port) as client:
        assert end_offset(client, "torn") == 2
        assert client.produce({("torn", 0): batch_of(b"d")})[0].base_offset == 2


def test_partition_that_cannot_be_opened_is_offline_alone(broker: BrokerProcess) -> None:
    with RawClient(broker.port) as client:
        create(client, "bad", "good")
        for topic in ("bad", "good"):
            client.produce({(topic, 0): batch_of(b"x")})
    broker.stop()
    # A folder where the segment's file should be cannot be repaired by cutting.
    segment = broker.data / "bad-0" / f"{0:020d}.log"
    content = segment.read_bytes()
    segment.unlink()
    segment.mkdir()
    broker.start()
    with RawClient(broker.port) as client:
        assert end_offset(client, "good") == 1
        until(
            lambda: client.produce({("bad", 0): batch_of(b"y")})[0].error_code == KafkaStorageError.code,
            "the partition is refused",
        )
    assert "a partition is offline" in broker.log
    broker.stop()
    segment.rmdir()
    segment.write_bytes(content)
    broker.start()
    with RawClient(broker.port) as client:
        assert end_offset(client, "bad") == 1


def strays(broker: BrokerProcess, topic: str) -> list[Path]:
    return sorted(broker.data.glob(f"{topic}-0.*-stray"))


def test_log_of_a_topic_deleted_while_the_broker_was_down_is_set_aside(
    broker_factory: BrokerFactory,
) -> None:
    first = broker_factory(broker_id=1)
    with RawClient(first.port) as client:
        create(client, "doomed")
    second = broker_factory(zookeeper_path=first.zookeeper, broker_id=2)
    assert (first.data / "doomed-0").is_dir()
    first.stop()
    with RawClient(second.port) as client:
        until(
            lambda: client.ask(Api.METADATA, 9, topics=[]).controller_id == 2, "there is a controller again"
        )
        answer = client.ask(Api.DELETE_TOPICS, 6, topics=[{"name": "doomed"}], timeout=TIMEOUT_MS)
        assert answer.responses[0].error_code == 0
    first.start()
    assert not (first.data / "doomed-0").exists()
    (stray,) = strays(first, "doomed")
    assert stray.name in first.log


def test_zookeeper_of_an_earlier_time_costs_no_records(broker: BrokerProcess) -> None:
    """What it does not know is set aside with its records, and is there again once it is known again."""
    with RawClient(broker.port) as client:
        create(client, "newer")
        client.produce({("newer", 0): batch_of(b"x", b"y")})
    broker.stop()

    async def known(nodes: dict[str, bytes]) -> dict[str, bytes]:
        """Takes the topic's znodes away and returns them, or puts `nodes` there."""
        session = Session(broker.zookeeper, session_timeout_ms=20_000, connection_timeout_ms=30_000)
        await session.start()
        try:
            wanted = [
                paths.topic_config_path("newer"),
                paths.topic_path("newer"),
                paths.partitions_path("newer"),
                paths.partition_path("newer", 0),
                paths.state_path("newer", 0),
            ]
            if nodes:
                for path in wanted:
                    await session.create(path, nodes[path])
                return nodes
            taken = {path: (await session.get(path)).data for path in wanted}
            for path in reversed(wanted):
                await session.delete(path)
            return taken
        finally:
            await session.stop()

    nodes = asyncio.run(known({}))
    broker.start()
    assert not (broker.data / "newer-0").exists()
    (stray,) = strays(broker, "newer")
    assert stray.name in broker.log
    broker.stop()
    asyncio.run(known(nodes))
    stray.rename(broker.data / "newer-0")
    broker.start()
    with RawClient(broker.port) as client:
        assert end_offset(client, "newer") == 2


def test_compacted_log_without_a_mark_of_its_holes_is_recovered_whole(broker: BrokerProcess) -> None:
    """As another broker's compaction leaves one, whose folder was moved here: its settings say that it has
    holes, and nothing else does."""
    with RawClient(broker.port) as client:
        wanted = {
            "name": "compacted",
            "num_partitions": 1,
            "replication_factor": 1,
            "configs": [{"name": "cleanup.policy", "value": "compact"}],
        }
        client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=TIMEOUT_MS)
    broker.kill()
    broker.end_session()
    records = [Record(b"k", b"v", (), 1)]
    held = build_batch(records, leader_epoch=0) + build_batch(records, base_offset=7, leader_epoch=0)
    (broker.data / "compacted-0" / f"{0:020d}.log").write_bytes(held)
    broker.start()
    with RawClient(broker.port) as client:
        assert end_offset(client, "compacted") == 8


def test_logs_are_flushed_by_count_and_by_time_and_otherwise_left_to_the_system(
    broker_factory: BrokerFactory,
) -> None:
    broker = broker_factory(
        log_flush_interval_ms=100,
        log_flush_scheduler_interval_ms=20,
        log_flush_offset_checkpoint_interval_ms=20,
    )
    never = str(2**63 - 1)

    def flushed(topic: str) -> int:
        """Below this offset the broker's own file says that all is on the disk."""
        path = broker.data / "recovery-point-offset-checkpoint"
        rows = [line.split() for line in path.read_text().splitlines()[2:]] if path.exists() else []
        return next((int(offset) for name, _, offset in rows if name == topic), 0)

    with RawClient(broker.port) as client:
        create(client, "timed")
        create(client, "counted", **{"flush.ms": never, "flush.messages": "3"})
        create(client, "left", **{"flush.ms": never})

        def write(topic: str, count: int) -> None:
            for _ in range(count):
                assert client.produce({(topic, 0): batch_of(b"x")})[0].error_code == 0

        write("counted", 2)
        write("left", 50)
        write("timed", 2)
        until(lambda: flushed("timed") == 2, "a log is flushed when its time is over")
        assert (flushed("counted"), flushed("left")) == (0, 0)
        write("counted", 1)
        until(lambda: flushed("counted") == 3, "a log is flushed when it has so many records more")
        assert flushed("left") == 0


def test_a_silent_producer_is_forgotten_when_its_time_is_over(broker_factory: BrokerFactory) -> None:
    """`producer.id.expiration.ms`: by default a day."""
    broker = broker_factory(log_retention_check_interval_ms=20, log_retention_ms=-1)

    def send(number: int) -> int:
        numbered = batch_of(b"x", producer_id=4_242, producer_epoch=0, base_sequence=number)
        with RawClient(broker.port) as client:
            return client.produce({("kept", 0): numbered})[0].error_code

    with RawClient(broker.port) as client:
        create(client, "kept")
    assert (send(0), send(7)) == (0, OutOfOrderSequence.code)
    broker.stop()
    broker.settings["producer.id.expiration.ms"] = 1
    broker.start()
    with RawClient(broker.port) as client:
        assert end_offset(client, "kept") == 1
    until(lambda: send(7) == 0, "it begins anew wherever it is")


def test_offsets_are_forgotten_when_their_time_is_over(broker_factory: BrokerFactory) -> None:
    """Clients of before OffsetCommit 5 say how long theirs are to be kept; all others' are kept for
    `offsets.retention.minutes`, of which one is the least."""
    broker = broker_factory(offsets_retention_minutes=1, offsets_retention_check_interval_ms=20)
    with RawClient(broker.port) as client:
        create(client, "read", partition_count=2)
        until(
            lambda: client.ask(Api.FIND_COORDINATOR, 3, key="g", key_type=0).error_code == 0,
            "there is a coordinator",
        )

        def committed() -> list[int]:
            asked = [{"name": "read", "partition_indexes": (0, 1)}]
            answer = client.ask(Api.OFFSET_FETCH, 5, group_id="g", topics=asked)
            return [int(part.committed_offset) for part in answer.topics[0].partitions]

        def commit(partition: int, kept_ms: int) -> bool:
            part = {"partition_index": partition, "committed_offset": 5, "committed_metadata": None}
            answer = client.ask(
                Api.OFFSET_COMMIT,
                2,
                group_id="g",
                generation_id_or_member_epoch=-1,
                member_id="",
                retention_time=kept_ms,
                topics=[{"name": "read", "partitions": [part]}],
            )
            return bool(answer.topics[0].partitions[0].error_code == 0)

        for partition, kept_ms in ((0, 1), (1, -1)):
            until(lambda at=partition, kept=kept_ms: commit(at, kept), "an offset is committed")
        until(lambda: committed()[0] == -1, "what was to be kept for a millisecond is gone")
        assert committed() == [-1, 5]


def test_metrics_are_served_where_asked_for(broker_factory: BrokerFactory) -> None:
    port = free_port()
    broker = broker_factory(metrics_listen=f"127.0.0.1:{port}")
    with RawClient(broker.port) as client:
        create(client, "counted")
        client.produce({("counted", 0): batch_of(b"a", b"b")})
    with socket.create_connection(("127.0.0.1", port), timeout=patience(30)) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert "millrace_broker_produce_records_total 2.0" in text
    assert 'millrace_broker_requests_total{api="create_topics"} 1.0' in text
    assert "millrace_broker_controller 1.0" in text
    assert "millrace_broker_stray_logs 0.0" in text


# -- ZooKeeper's session -----------------------------------------------------------------------------


def test_lost_session_is_followed_by_a_new_registration(broker: BrokerProcess) -> None:
    assert broker.process is not None

    async def owner() -> int:
        session = Session(broker.zookeeper, session_timeout_ms=5_000, connection_timeout_ms=30_000)
        await session.start()
        try:
            await until_async(
                lambda: session.exists("/brokers/ids/1"), "the broker is registered", every_s=0.05
            )
            return (await session.get("/brokers/ids/1")).owner
        finally:
            await session.stop()

    async def wait_until_expired(old: int) -> None:
        session = Session(broker.zookeeper, session_timeout_ms=5_000, connection_timeout_ms=30_000)
        await session.start()
        try:
            gone = asyncio.Event()
            if await session.exists("/brokers/ids/1", gone.set):
                await asyncio.wait_for(gone.wait(), patience())
        finally:
            await session.stop()

    with RawClient(broker.port) as client:
        create(client, "before")
    first = asyncio.run(owner())
    broker.process.send_signal(19)  # SIGSTOP: the process sleeps through its session's end
    try:
        asyncio.run(wait_until_expired(first))
    finally:
        broker.process.send_signal(18)
    second = asyncio.run(owner())
    assert second != first
    with RawClient(broker.port) as client:
        create(client, "after")
        for topic in ("after", "before"):
            until(
                lambda topic=topic: client.produce({(topic, 0): batch_of(b"x")}, acks=-1)[0].error_code == 0,
                f"{topic} is led again",
            )
