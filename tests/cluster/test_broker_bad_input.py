"""What peers may do to a broker: garbage, lies about sizes, silence. None of it may cost the others.

Each is answered, counted and told of; what it costs in memory is the peak meanwhile, not what is left of it.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
import zlib
from collections.abc import Iterator

import lz4.frame
import pytest
import zstandard
from crc32c import crc32c

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.broker.protocol.hot_fetch import encode_request as encode_fetch_request
from tests.conftest import BrokerFactory
from tests.ports import free_port
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import patience

pytestmark = pytest.mark.java

NOT_SPOKEN = "connection closed: the peer does not speak the protocol"
REFUSED = "a batch was refused"
TOLD_AGAIN_AFTER_S = 10
"""Of each kind of mistake the log has one line in so many seconds."""


@pytest.fixture(scope="module")
def shared(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    settings = {"message.max.bytes": 2_000_000, "metrics.listen": f"127.0.0.1:{free_port()}"}
    broker = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"), settings=settings)
    try:
        yield broker.start()
    finally:
        broker.kill()


def create(client: RawClient, name: str) -> None:
    wanted = {"name": name, "num_partitions": 1, "replication_factor": 1}
    answer = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000)
    assert answer.topics[0].error_code == 0, answer


def counted(broker: BrokerProcess, name: str, value: str) -> float:
    """The counter of this name whose one label has this value."""
    host, _, port = str(broker.settings["metrics.listen"]).rpartition(":")
    with socket.create_connection((host, int(port)), timeout=patience(30)) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = b"".join(iter(lambda: connection.recv(65_536), b""))
    found = re.search(
        rf'^millrace_broker_{name}_total{{\w+="{re.escape(value)}"}} (\S+)$', text.decode(), re.M
    )
    return 0.0 if found is None else float(found[1])


def end_offset(client: RawClient, topic: str) -> int:
    given = client.fetch(PartitionFetch(topic, 0, 0, 1)).partitions[0]
    assert given.error_code == 0, given
    return given.high_watermark


@pytest.mark.parametrize(
    ("garbage", "kind"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "size"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), "size"),
        (struct.pack(">i", 2_000_000_000), "size"),
        (struct.pack(">i", -1), "size"),
        (struct.pack(">i", 0), "size"),
        (struct.pack(">ihhih", 10, 3, 12, 1, 30_000), "header"),
        (struct.pack(">ihhih", 14, 3, 9, 1, -1) + b"\x00\xff\xff\xff\x7f"[:4], "body"),
        (struct.pack(">ihhihi", 14, 3, 1, 1, -1, 2**31 - 1), "body"),
        (struct.pack(">ihhihi", 14, 3, 1, 1, -1, -7), "body"),
        (struct.pack(">ihhihhhii", 22, 0, 7, 1, -1, -1, 1, 1000, 2**31 - 1), "body"),
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
def test_garbage_closes_the_connection_and_nothing_else(
    shared: BrokerProcess, garbage: bytes, kind: str
) -> None:
    logged = shared.log.count(NOT_SPOKEN)
    ended = counted(shared, "connections_ended", f"protocol: {kind}")
    with shared.most_memory(8):
        for _ in range(20):
            with RawClient(shared.port) as peer:
                peer.send(garbage)
                peer.socket.settimeout(patience(30))
                assert peer.is_closed()
        with RawClient(shared.port) as client:
            assert client.ask(Api.API_VERSIONS, 0).error_code == 0
    assert counted(shared, "connections_ended", f"protocol: {kind}") == ended + 20
    told = [line for line in shared.log.splitlines() if NOT_SPOKEN in line]
    assert len(told) - logged <= 2  # counted, not repeated
    assert told and all(re.search(r"client=127\.0\.0\.1 reason=.{10}", line) for line in told), told


def test_size_that_is_allowed_is_a_setting_and_named(broker_factory: BrokerFactory) -> None:
    broker = broker_factory(socket_request_max_bytes=200_000)
    with RawClient(broker.port) as client:
        create(client, "t")
        assert client.produce({("t", 0): batch_of(bytes(199_000))})[0].error_code == 0
        assert end_offset(client, "t") == 1
    with RawClient(broker.port) as peer:
        peer.send(struct.pack(">i", 200_001))
        peer.socket.settimeout(patience(30))
        assert peer.is_closed()
    (line,) = [line for line in broker.log.splitlines() if NOT_SPOKEN in line]
    assert "socket.request.max.bytes is 200000" in line


def test_many_large_announcements_cost_no_memory(shared: BrokerProcess) -> None:
    peers = [RawClient(shared.port) for _ in range(100)]
    try:
        with shared.most_memory(20):
            for peer in peers:
                peer.send(struct.pack(">i", 99 << 20) + bytes(1000))
            with RawClient(shared.port) as client:
                assert client.ask(Api.API_VERSIONS, 0).error_code == 0
    finally:
        for peer in peers:
            peer.socket.close()


def test_reader_that_does_not_read_is_bounded_and_alone(shared: BrokerProcess) -> None:
    with RawClient(shared.port) as client, RawClient(shared.port) as stalled:
        create(client, "large")
        for _ in range(8):
            assert client.produce({("large", 0): batch_of(os.urandom(1_000_000))})[0].error_code == 0
        stalled.socket.setblocking(False)
        # Hundreds of pipelined fetches of 8 MB each, and not a byte read.
        asked = FetchRequest(0, 1, 50 << 20, False, [PartitionFetch("large", 0, 0, 8 << 20)])
        request = encode_fetch_request(12, 1, "raw", asked)
        with shared.most_memory(60):
            for _ in range(500):
                try:
                    stalled.socket.send(request)
                except BlockingIOError:
                    break
            assert end_offset(client, "large") == 8


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


# -- batches ----------------------------------------------------------------------------------------------

ATTRIBUTES, CRC, COUNT, RECORDS = 21, 17, 57, 61
GZIP, SNAPPY, LZ4, ZSTD = range(1, 5)
CORRUPT_MESSAGE, UNKNOWN_TOPIC_OR_PARTITION, MESSAGE_TOO_LARGE, UNSUPPORTED_CODEC, INVALID_RECORD = (
    2,
    3,
    10,
    76,
    87,
)
BOMB = bytes(256 << 20)
BOMB_MIB = 140
"""A batch is decompressed up to 64 MiB; a buffer that grows is there twice for a moment."""


def sealed(batch: bytearray) -> bytes:
    """With a length and a checksum that fit."""
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">I", batch, CRC, crc32c(bytes(batch[ATTRIBUTES:])))
    return bytes(batch)


def changed(position: int, layout: str, value: int) -> bytes:
    batch = batch_of(b"value")
    struct.pack_into(layout, batch, position, value)
    return sealed(batch)


def with_records(codec: int, section: bytes) -> bytes:
    """A batch of one record, which is these bytes."""
    batch = batch_of(b"")[:RECORDS] + section
    struct.pack_into(">h", batch, ATTRIBUTES, codec)
    return sealed(batch)


def wrong_checksum() -> bytes:
    batch = batch_of(b"value")
    batch[-1] ^= 1
    return bytes(batch)


def gzip(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=31)
    return made.compress(data) + made.flush()


def snappy_lie() -> bytes:
    """A block that says it holds 2 GB: Snappy packs nothing so tight that a bomb of it could be sent."""
    return b"\xff\xff\xff\xff\x07" + b"\x00a"


@pytest.mark.parametrize(
    ("error", "code", "batches", "times", "mib"),
    [
        ("CORRUPT_MESSAGE", CORRUPT_MESSAGE, [wrong_checksum], 500, 8),
        (
            "INVALID_RECORD",
            INVALID_RECORD,
            [lambda count=count: changed(COUNT, ">i", count) for count in (2, 0, -1, 2_000_000_000)],
            500,
            8,
        ),
        (
            "MESSAGE_TOO_LARGE",
            MESSAGE_TOO_LARGE,
            [
                lambda: with_records(GZIP, gzip(BOMB)),
                lambda: with_records(SNAPPY, snappy_lie()),
                lambda: with_records(LZ4, lz4.frame.compress(BOMB)),
                lambda: with_records(ZSTD, zstandard.compress(BOMB)),
            ],
            2,
            BOMB_MIB,
        ),
    ],
    ids=["wrong checksum", "count that lies", "bomb"],
)
def test_bad_batch_is_refused_counted_and_told_of_and_costs_nothing(
    shared: BrokerProcess, error: str, code: int, batches: list, times: int, mib: int
) -> None:
    """One code for each: Apache Kafka's, or of the list of differences (`test_bad_input_like_kafka.py`)."""
    topic = f"bad-{code}"
    before, started = counted(shared, "errors", str(code)), time.monotonic()
    with RawClient(shared.port) as client:
        create(client, topic)
        for make in batches:
            batch = make()
            with shared.most_memory(mib):
                answers = {client.produce({(topic, 0): batch})[0].error_code for _ in range(times)}
            assert answers == {code}
        assert counted(shared, "errors", str(code)) == before + len(batches) * times
        assert end_offset(client, topic) == 0
    told = [line for line in shared.log.splitlines() if REFUSED in line and error in line]
    assert 1 <= len(told) <= 1 + (time.monotonic() - started) / TOLD_AGAIN_AFTER_S
    named = rf"topic={topic} partition=0 error={error} reason=.+ client_id=raw client=127\.0\.0\.1"
    assert all(re.search(named, line) for line in told), told


def test_unknown_topics_and_partitions_are_counted_and_not_told_of(shared: BrokerProcess) -> None:
    """Clients meet them whenever a topic is removed: the log would be theirs."""
    with RawClient(shared.port) as client:
        create(client, "narrow")
        before, logged = counted(shared, "errors", str(UNKNOWN_TOPIC_OR_PARTITION)), shared.log
        with shared.most_memory(8):
            for place in (("no-such-topic", 0), ("narrow", 99), ("narrow", -1)):
                for _ in range(200):
                    (answer,) = client.produce({place: batch_of(b"x")})
                    assert answer.error_code == UNKNOWN_TOPIC_OR_PARTITION
        assert counted(shared, "errors", str(UNKNOWN_TOPIC_OR_PARTITION)) == before + 600
    assert REFUSED not in shared.log.removeprefix(logged)


def test_validation_of_headers_alone_takes_what_is_sealed_and_refuses_the_rest(
    broker_factory: BrokerFactory,
) -> None:
    """`record.validation=header`: the records are their producer's affair, the batch is not."""
    broker = broker_factory(record_validation="header")
    refused = {
        CORRUPT_MESSAGE: wrong_checksum(),
        INVALID_RECORD: changed(COUNT, ">i", 2),
        UNSUPPORTED_CODEC: changed(ATTRIBUTES, ">h", 7),
        MESSAGE_TOO_LARGE: bytes(batch_of(bytes(1_100_000))),
    }
    with RawClient(broker.port) as client:
        create(client, "t")
        for codec in range(5):
            assert client.produce({("t", 0): batch_of(b"value", compression=codec)})[0].error_code == 0
        assert client.produce({("t", 0): with_records(GZIP, b"no gzip at all")})[0].error_code == 0
        for code, batch in refused.items():
            assert client.produce({("t", 0): batch})[0].error_code == code
        assert end_offset(client, "t") == 6
