"""A broker whose disks fail for real: an ext4 file system that is shut down (EIO), and a tmpfs that is full.

Root only: the file systems are mounted for the test. Apache Kafka's own dump tool reads what storage writes.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import struct
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from confluent_kafka import Producer

from millrace.broker.errors import DataFolderNotWritable, KafkaStorageError, NotLeaderOrFollower
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.storage import file_dump
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from tests import root_rights
from tests.cluster.three_brokers import Load, ThreeBrokers, read_all
from tests.conftest import BrokerFactory
from tests.ports import free_port
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import patience, until
from tests.wire.java_tools import JavaTools

pytestmark = pytest.mark.java

EXT4_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: every later write and fsync of the file system fails
WITHOUT_FLUSHING = 2
REFUSED = {KafkaStorageError.code, NotLeaderOrFollower.code}  # at once, and when the controller has heard


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        root_rights.lacks(f"no file system can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`ext4(name)` mounts a file system of 64 MB at a folder of that name."""
    mounted: list[Path] = []

    def make(name: str) -> Path:
        image, folder = tmp_path / f"{name}.img", tmp_path / name
        with image.open("wb") as file:
            file.truncate(64 << 20)
        if shutil.which("mkfs.ext4") is None:
            root_rights.lacks("mkfs.ext4 is not here")
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        folder.mkdir()
        _mount("-o", "loop", str(image), str(folder))
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def shut_down(folder: Path) -> None:
    """From now on the disk under the folder fails."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, EXT4_SHUTDOWN, struct.pack("I", WITHOUT_FLUSHING))
    finally:
        os.close(fd)


@pytest.fixture
def broker_of(zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[Callable[..., BrokerProcess]]:
    brokers: list[BrokerProcess] = []

    def make(*folders: Path, **settings: object) -> BrokerProcess:
        named = {key.replace("_", "."): value for key, value in settings.items()}
        broker = BrokerProcess(zookeeper.chroot(), tmp_path / "broker", settings=named)
        broker.folders = list(folders)
        brokers.append(broker)
        broker.start()
        return broker

    yield make
    for broker in brokers:
        broker.kill()


def create(client: RawClient, name: str, partition_count: int = 1, **configs: str) -> None:
    wanted = {
        "name": name,
        "num_partitions": partition_count,
        "replication_factor": 1,
        "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
    }
    answer = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000)
    assert [topic.error_code for topic in answer.topics] == [0], answer


def produce(client: RawClient, topic: str, partition: int, value: bytes = b"x") -> int:
    return client.produce({(topic, partition): batch_of(value)})[0].error_code


def values_of(port: int, name: str) -> list[float]:
    """What the broker's metrics say under a name, with its labels if it has any."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=patience(30)).read().decode()
    return [float(row.split()[-1]) for row in text.splitlines() if row.startswith(f"{name} ")]


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 90) -> None:
    until(condition, what, within_s=timeout_s)


def test_one_folder_fails_and_the_others_serve(
    ext4: Callable[[str], Path], broker_of: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    bad = ext4("bad") / "data"
    good = tmp_path / "good"
    metrics = free_port()
    broker = broker_of(bad, good, metrics_listen=f"127.0.0.1:{metrics}")

    def offline_partitions() -> float:
        (value,) = values_of(metrics, "millrace_broker_offline_partitions")
        return value

    with RawClient(broker.port) as client:
        create(client, "t", 6)
        for number in range(6):
            wait_for(lambda number=number: produce(client, "t", number) == 0, "the partitions are led")
        inside = [number for number in range(6) if (bad / f"t-{number}").exists()]
        outside = [number for number in range(6) if number not in inside]
        assert inside
        assert outside
        assert offline_partitions() == 0
        shut_down(bad.parent)
        assert produce(client, "t", inside[0]) == KafkaStorageError.code
        for number in outside:
            assert produce(client, "t", number) == 0
        for number in inside:
            assert produce(client, "t", number) in REFUSED
            assert client.fetch(PartitionFetch("t", number, 0, 1000)).partitions[0].error_code in REFUSED
        for number in outside:
            part = client.fetch(PartitionFetch("t", number, 0, 10_000)).partitions[0]
            assert (part.error_code, part.high_watermark) == (0, 2)
        described = client.ask(Api.DESCRIBE_LOG_DIRS, 4, topics=None)
        codes = {result.log_dir: result.error_code for result in described.results}
        assert codes == {str(bad): KafkaStorageError.code, str(good): 0}
        assert offline_partitions() == len(inside)
        create(client, "later", 2)
        assert all((good / f"later-{number}").exists() for number in range(2))
        for number in range(2):
            wait_for(lambda number=number: produce(client, "later", number) == 0, "new partitions are led")
    assert broker.log.count("a data folder is offline") == 1
    assert "Traceback" not in broker.log
    broker.stop()


def test_broker_ends_when_its_last_folder_fails(
    ext4: Callable[[str], Path], broker_of: Callable[..., BrokerProcess]
) -> None:
    folders = [ext4(name) / "data" for name in ("one", "two")]
    broker = broker_of(*folders)
    with RawClient(broker.port) as client:
        create(client, "t", 4)
        for number in range(4):
            wait_for(lambda number=number: produce(client, "t", number) == 0, "the partitions are led")
        places = {folder: [n for n in range(4) if (folder / f"t-{n}").exists()] for folder in folders}
        shut_down(folders[0].parent)
        assert produce(client, "t", places[folders[0]][0]) == KafkaStorageError.code
        assert produce(client, "t", places[folders[1]][0]) == 0
        shut_down(folders[1].parent)
        with suppress(ConnectionError, EOFError):  # it may be gone before it has answered
            produce(client, "t", places[folders[1]][0])
    assert broker.wait_until_ended() == DataFolderNotWritable.exit_status
    assert "every data folder is offline" in broker.log
    assert "Traceback" not in broker.log


def test_broker_starts_without_a_folder_that_cannot_be_used(
    broker_of: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    broker = broker_of(tmp_path / "file" / "data", tmp_path / "good")
    with RawClient(broker.port) as client:
        create(client, "t")
        wait_for(lambda: produce(client, "t", 0) == 0, "the partition is led")
    assert broker.log.count("a data folder is offline") == 1
    assert broker.stop() == 0


def test_full_disk_refuses_writes_until_there_is_room(
    broker_of: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder))
    try:
        metrics = free_port()
        broker = broker_of(
            folder / "data", log_retention_check_interval_ms=200, metrics_listen=f"127.0.0.1:{metrics}"
        )

        def gauge(name: str) -> float:
            labelled = f'millrace_broker_data_folder_{name}{{folder="{folder / "data"}"}}'
            return next(iter(values_of(metrics, labelled)), float("nan"))

        with RawClient(broker.port) as client:
            create(client, "t", 1, segment_bytes="300000", retention_ms="-1")
            wait_for(lambda: produce(client, "t", 0) == 0, "the partition is led")
            stored, refused = 1, 0
            for _ in range(200):
                code = produce(client, "t", 0, os.urandom(100_000))
                assert code in (0, KafkaStorageError.code)
                stored += code == 0
                refused += code != 0
            assert refused > 50
            assert "a data folder is offline" not in broker.log
            wait_for(lambda: gauge("refuses_writes") == 1, "its gauge says so")
            assert gauge("free_bytes") < 300_000
            told = [line for line in broker.log.splitlines() if "has no room and refuses writes" in line]
            assert len(told) == 1 and f"folder={folder / 'data'}" in told[0], broker.log
            assert "free_bytes=" in told[0] and "No space left on device" in told[0]
            values = [
                {
                    "resource_type": 2,
                    "resource_name": "t",
                    "configs": [{"name": "retention.bytes", "config_operation": 0, "value": "1000000"}],
                }
            ]
            client.ask(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=values, validate_only=False)
            wait_for(lambda: produce(client, "t", 0) == 0, "there is room again")
            part = client.fetch(PartitionFetch("t", 0, stored, 1 << 20)).partitions[0]
            assert part.error_code == 0
            assert part.high_watermark == stored + 1, "every acknowledged record has its offset, no other has"
            wait_for(lambda: gauge("refuses_writes") == 0, "its gauge says so, too")
            assert gauge("free_bytes") > 1_000_000
        assert broker.log.count("has room again and takes writes") == 1
        assert "Traceback" not in broker.log
        assert broker.stop() == 0
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


# -- Apache Kafka's own tool


@pytest.mark.kafka
def test_apache_kafka_s_tool_reads_what_storage_writes(tmp_path: Path) -> None:
    """Compacted segments, aborted transactions, snapshots, indexes: the tool says the same as ours."""
    config = LogConfig(
        segment_bytes=3000,
        index_interval_bytes=100,
        cleanup_policy=frozenset({"compact"}),
        min_cleanable_dirty_ratio=0.0,
    )
    manager = LogManager([tmp_path], config)
    now_ms = 1_700_000_000_000
    manager.start(now_ms)
    log = manager.create(("t", 0), now_ms=now_ms)
    rng = random.Random(4)
    sequences = {5: 0, 7: 0}
    for number in range(60):
        now_ms += 1000
        producer_id = 7 if number % 3 == 0 else 5
        records = [
            Record(
                b"k%d" % rng.randrange(8), rng.randbytes(20) if rng.random() < 0.8 else None, (), now_ms + n
            )
            for n in range(4)
        ]
        batch = build_batch(
            records,
            compression=number % 5,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=sequences[producer_id],
            transactional=producer_id == 7,
        )
        sequences[producer_id] += 4
        log.append(batch, leader_epoch=number // 20, now_ms=now_ms)
        if number % 6 == 0:
            marker = build_marker(7, 0, 2, number % 12 != 0, now_ms)
            log.append(marker, leader_epoch=number // 20, now_ms=now_ms, origin="internal")
    manager.cleaning.compact_due(now_ms, lambda tp: log.last_stable_offset(log.end_offset))
    assert manager.cleaning.compactions
    manager.close(now_ms)
    files = sorted(path for path in log.directory.iterdir() if file_dump.kind_of(path).startswith("."))
    assert {path.suffix for path in files} == {".log", ".index", ".timeindex", ".txnindex", ".snapshot"}
    shown = JavaTools("", tmp_path).raw("dump-log", "--deep-iteration", "--files", ",".join(map(str, files)))
    parts = re.split(r"^Dumping (.*)\n", shown.checked().out, flags=re.M)[1:]
    said = {Path(name): text for name, text in zip(parts[::2], parts[1::2], strict=True)}
    assert sorted(said) == files
    for path, text in said.items():
        ours = list(file_dump.dump(path, records=True))
        _compare(path.suffix, text, ours)


def _compare(kind: str, said: str, ours: list[file_dump.Row]) -> None:
    if kind == ".log":
        batches = re.findall(
            r"^baseOffset: (\d+) lastOffset: (\d+) count: (\d+) baseSequence: (-?\d+) .*?"
            r"producerId: (-?\d+) .*?deleteHorizonMs: OptionalLong(\S+) position: (\d+) \w+: (\d+) "
            r"size: (\d+) .*?compresscodec: (\w+) crc: (\d+) isvalid: true",
            said,
            flags=re.M,
        )
        expected = [
            (
                row["base_offset"],
                row["last_offset"],
                row["count"],
                row["base_sequence"],
                row["producer_id"],
                ".empty" if row["delete_horizon"] is None else f"[{row['delete_horizon']}]",
                row["position"],
                row["max_timestamp"],
                row["size"],
                row["codec"],
                int(row["crc"], 16),
            )
            for row in ours
        ]
        assert batches == [tuple(map(str, row)) for row in expected]
        offsets = re.findall(r"^\| offset: (\d+) \w+: (\d+)", said, flags=re.M)
        assert offsets == [(str(r["offset"]), str(r["timestamp"])) for row in ours for r in row["records"]]
        return
    names = {
        ".index": {"offset": "offset", "position": "position"},
        ".timeindex": {"timestamp": "timestamp", "offset": "offset"},
        ".txnindex": {
            "producerId": "producer_id",
            "firstOffset": "first_offset",
            "lastOffset": "last_offset",
            "lastStableOffset": "last_stable_offset",
        },
        ".snapshot": {
            "producerId": "producer_id",
            "producerEpoch": "producer_epoch",
            "coordinatorEpoch": "coordinator_epoch",
            "firstSequence": "first_sequence",
            "lastSequence": "last_sequence",
            "lastOffset": "last_offset",
        },
    }[kind]
    lines = [
        line for line in said.splitlines() if line.startswith(tuple(f"{n}: " for n in (*names, "version")))
    ]
    found = [dict(re.findall(r"(\w+): (-?\d+)", line)) for line in lines]
    assert [{key: int(row[key]) for key in names} for row in found] == [
        {key: row[name] for key, name in names.items()} for row in ours
    ]


def coordinator(cluster: ThreeBrokers, transactional_id: str) -> int:
    """The broker that coordinates it, once there is one."""

    def found() -> int:
        answer = cluster.ask(Api.FIND_COORDINATOR, 3, key=transactional_id, key_type=1)
        return 0 if answer.error_code else int(answer.node_id)

    return until(found, f"{transactional_id} has a coordinator")


@pytest.mark.safety
def test_a_follower_whose_disk_is_full_holds_up_nobody_and_comes_back(
    broker_factory: BrokerFactory, tmp_path: Path
) -> None:
    """Beside a load of numbered records, and with a transaction, that wait for all in sync."""
    folder = tmp_path / "small"
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder))

    def make(*, broker_id: int, **settings: object) -> BrokerProcess:
        broker = broker_factory(broker_id=broker_id, **{**settings, "start": False})
        if broker_id == 3:
            broker.folders = [folder / "data"]
        return broker

    try:
        cluster = ThreeBrokers(make)
        cluster.create_on("t", (1, 2, 3), **{"min.insync.replicas": "2", "retention.ms": "-1"})
        cluster.create_on("filler", (3,), **{"retention.ms": "-1"})
        cluster.wait_in_sync("t", 0, 1, 2, 3)
        # Who coordinates with a full disk takes no transaction on: this one's coordinator is another broker.
        transactional_id = next(
            name for name in map("app-{}".format, range(50)) if coordinator(cluster, name) != 3
        )
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": transactional_id})
        producer.init_transactions(patience(60))
        with Load(cluster.bootstrap, "t") as load:

            def is_full() -> bool:
                with RawClient(cluster.brokers[3].port) as client:
                    return produce(client, "filler", 0, os.urandom(100_000)) == KafkaStorageError.code

            wait_for(is_full, "its disk is full")
            cluster.wait_in_sync("t", 0, 1, 2)
            producer.begin_transaction()
            for number in (-1, -2):
                producer.produce("t", b"%d" % number)
            producer.commit_transaction(patience(60))
            written = len(load.acknowledged)
            wait_for(lambda: len(load.acknowledged) > written + 200, "the load goes on")
            answer = cluster.ask(
                Api.DELETE_TOPICS, 6, topics=[{"name": "filler", "topic_id": None}], timeout=60_000
            )
            assert [response.error_code for response in answer.responses] == [0]
            cluster.wait_in_sync("t", 0, 1, 2, 3)
        assert load.errors == []
        numbers = read_all(cluster.bootstrap, "t")
        assert sorted(numbers) == sorted([-1, -2, *load.acknowledged])
        assert "Traceback" not in cluster.brokers[3].log
        logs = [
            b"".join(path.read_bytes() for path in sorted((data / "t-0").glob("*.log")))
            for data in (cluster.brokers[1].data, cluster.brokers[2].data, folder / "data")
        ]
        assert logs[0] == logs[1] == logs[2]
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
