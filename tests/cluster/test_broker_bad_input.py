"""What peers may do to a broker: garbage, lies about sizes, silence. None of it may cost the others."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.broker.protocol.hot_fetch import encode_request as encode_fetch_request
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess, ZooKeeper

pytestmark = pytest.mark.java


@pytest.fixture(scope="module")
def shared(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    settings = {"message.max.bytes": 2_000_000}
    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"), settings=settings)
    try:
        yield broker.start()
    finally:
        broker.kill()


def create(client: RawClient, name: str) -> None:
    wanted = {"name": name, "num_partitions": 1, "replication_factor": 1}
    answer = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=20_000)
    assert answer.topics[0].error_code == 0, answer


def end_offset(client: RawClient, topic: str) -> int:
    given = client.fetch(PartitionFetch(topic, 0, 0, 1)).partitions[0]
    assert given.error_code == 0, given
    return given.high_watermark


def resident_mib(broker: BrokerProcess) -> float:
    assert broker.process is not None
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        struct.pack(">i", 2_000_000_000),
        struct.pack(">i", -1),
        struct.pack(">i", 0),
        struct.pack(">ihhih", 10, 3, 12, 1, 30_000),
        struct.pack(">ihhih", 14, 3, 9, 1, -1) + b"\x00\xff\xff\xff\x7f"[:4],
        struct.pack(">ihhihi", 14, 3, 1, 1, -1, 2**31 - 1),
        struct.pack(">ihhihi", 14, 3, 1, 1, -1, -7),
        struct.pack(">ihhihhhii", 22, 0, 7, 1, -1, -1, 1, 1000, 2**31 - 1),
    ],
    ids=[
        "http",
        "tls",
        "2 GB",
        "negative",
        "zero",
        "client id",
        "varint",
        "array",
        "negative array",
        "produce",
    ],
)
def test_garbage_closes_the_connection_and_nothing_else(shared: BrokerProcess, garbage: bytes) -> None:
    before, logged = resident_mib(shared), shared.log.count("connection closed")
    for _ in range(20):
        with RawClient(shared.port) as peer:
            peer.send(garbage)
            peer.socket.settimeout(5)
            assert peer.is_closed()
    with RawClient(shared.port) as client:
        assert client.ask(Api.API_VERSIONS, 0).error_code == 0
    assert resident_mib(shared) < before + 8
    assert shared.log.count("connection closed") - logged <= 2  # counted, not repeated


def test_many_large_announcements_cost_no_memory(shared: BrokerProcess) -> None:
    before = resident_mib(shared)
    peers = [RawClient(shared.port) for _ in range(100)]
    try:
        for peer in peers:
            peer.send(struct.pack(">i", 99 << 20) + bytes(1000))
        with RawClient(shared.port) as client:
            assert client.ask(Api.API_VERSIONS, 0).error_code == 0
        assert resident_mib(shared) < before + 20
    finally:
        for peer in peers:
            peer.socket.close()


def test_reader_that_does_not_read_is_bounded_and_alone(shared: BrokerProcess) -> None:
    with RawClient(shared.port) as client, RawClient(shared.port) as stalled:
        create(client, "large")
        for _ in range(8):
            assert client.produce({("large", 0): batch_of(os.urandom(1_000_000))})[0].error_code == 0
        before = resident_mib(shared)
        stalled.socket.setblocking(False)
        # Hundreds of pipelined fetches of 8 MB each, and not a byte read.
        asked = FetchRequest(0, 1, 50 << 20, False, [PartitionFetch("large", 0, 0, 8 << 20)])
        request = encode_fetch_request(12, 1, "raw", asked)
        for _ in range(500):
            try:
                stalled.socket.send(request)
            except BlockingIOError:
                break
        started = time.monotonic()
        assert end_offset(client, "large") == 8
        assert time.monotonic() - started < 5
        assert resident_mib(shared) < before + 60


def test_requests_in_one_write_are_answered_in_order(shared: BrokerProcess) -> None:
    with RawClient(shared.port) as client:
        create(client, "order")
        requests = b""
        for number in range(40):
            # Every third one has to wait on the way (a control request), the others are answered at once.
            if number % 3 == 0:
                requests += struct.pack(">ihhihi", 14, Api.METADATA, 1, number, -1, 0)
            else:
                requests += struct.pack(">ihhih", 10, Api.API_VERSIONS, 0, number, -1)
        for position in range(0, len(requests), 17):
            client.send(requests[position : position + 17])
        answered = [struct.unpack_from(">i", client.receive())[0] for _ in range(40)]
        assert answered == list(range(40))
