"""The same bytes to Apache Kafka and to this broker: the same error code, or both close the connection.

`DIFFERENCES` lists where the two part, each under its entry in the list for users
(`tests/wire/differences.py`). What comes back is cut down to one of "closed", "silent" or the error codes of
the answer, in their order.
"""

from __future__ import annotations

import struct
import uuid
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zstandard
from crc32c import crc32c

from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.frames import Api, decode_response, encode_request
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.server.answers import build_entity, request_type, response_type
from tests.peers.kafka import KafkaPeer
from tests.raw_client import RawClient
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import patience, until
from tests.wire.subjects import Apart

pytestmark = pytest.mark.java

TOPIC = "bad-input"
Outcome = str | tuple[int, ...]
Reader = Callable[[memoryview], tuple[int, ...]]

# Positions within a batch.
LENGTH, MAGIC, CRC, ATTRIBUTES, LAST_DELTA = 8, 16, 17, 21, 23
PRODUCER_ID, COUNT, RECORDS = 43, 57, 61


@pytest.fixture(scope="module")
def broker(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    running = BrokerProcess(zookeeper.chroot(), tmp_path_factory.mktemp("broker"))
    try:
        yield running.start()
    finally:
        running.kill()


@pytest.fixture(scope="module")
def ports(broker: BrokerProcess, kafka_peer: KafkaPeer) -> tuple[int, int]:
    """Kafka's and ours, each with the topic."""
    found = int(kafka_peer.bootstrap.rpartition(":")[2]), broker.port
    for port in found:
        with RawClient(port) as client:
            # The groups' topic is made when somebody first looks for a coordinator.
            until(lambda: find_coordinator(client) == 0)
            wanted = {"name": TOPIC, "num_partitions": 2, "replication_factor": 1}
            made = client.ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000)
            assert made.topics[0].error_code in (0, 36), made
            until(lambda: client.produce({(TOPIC, 0): good()})[0].error_code == 0)
    return found


def find_coordinator(client: RawClient) -> int:
    answer = client.ask(Api.FIND_COORDINATOR, 3, key="g", key_type=0)
    return int(answer.error_code)


def outcome(port: int, frame: bytes, read: Reader, within_s: float | None = None) -> Outcome:
    """What a peer sees after it sent the frame on a connection of its own."""
    with RawClient(port) as client:
        client.socket.settimeout(within_s or patience())
        try:
            client.send(frame)
            return read(client.receive())
        except (EOFError, ConnectionError):
            return "closed"
        except TimeoutError:
            return "silent"


def good(*values: bytes, compression: int = 0, **options: Any) -> bytearray:
    records = [
        Record(key=b"k", value=value, headers=(), timestamp_ms=1_700_000_000_000 + number)
        for number, value in enumerate(values or (b"value",))
    ]
    return build_batch(records, compression=compression, **options)


def sealed(batch: bytearray) -> bytes:
    """With a length and a checksum that fit."""
    struct.pack_into(">i", batch, LENGTH, len(batch) - 12)
    struct.pack_into(">I", batch, CRC, crc32c(bytes(batch[ATTRIBUTES:])))
    return bytes(batch)


def changed(position: int, layout: str, value: int, *values: bytes, **options: Any) -> bytes:
    batch = good(*values, **options)
    struct.pack_into(layout, batch, position, value)
    return sealed(batch)


def with_section(codec: int, section: bytes, count: int = 1) -> bytes:
    """A batch whose records are these bytes."""
    batch = good()[:RECORDS] + section
    struct.pack_into(">h", batch, ATTRIBUTES, codec)
    struct.pack_into(">i", batch, LAST_DELTA, count - 1)
    struct.pack_into(">i", batch, COUNT, count)
    return sealed(bytearray(batch))


def gzip(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=31)
    return made.compress(data) + made.flush()


def records_of(batch: bytearray) -> bytes:
    return bytes(batch[RECORDS:])


def flipped() -> bytes:
    batch = good()
    batch[-1] ^= 1
    return bytes(batch)


def unsealed(position: int, layout: str, value: int) -> bytes:
    batch = good()
    struct.pack_into(layout, batch, position, value)
    return bytes(batch)


GZIP, SNAPPY, LZ4, ZSTD = range(1, 5)

BATCHES: dict[str, bytes] = {
    "good": bytes(good()),
    "no bytes": b"",
    "wrong checksum": flipped(),
    "cut short": bytes(good())[:-5],
    "header cut short": bytes(good())[:40],
    "length announces more": unsealed(LENGTH, ">i", 10_000),
    "length announces less": unsealed(LENGTH, ">i", 30),
    "negative length": unsealed(LENGTH, ">i", -1),
    "huge length": unsealed(LENGTH, ">i", 2**31 - 1),
    "magic 9": unsealed(MAGIC, ">b", 9),
    "negative magic": unsealed(MAGIC, ">b", -1),
    "two batches": bytes(good()) + bytes(good()),
    "bytes behind the batch": bytes(good()) + b"more",
    "count announces more": changed(COUNT, ">i", 2),
    "count announces less": changed(COUNT, ">i", 1, b"a", b"b"),
    "count of two billion": changed(COUNT, ">i", 2_000_000_000),
    "negative count": changed(COUNT, ">i", -1),
    "no records": changed(COUNT, ">i", 0),
    "last offset too large": changed(LAST_DELTA, ">i", 5),
    "last offset too small": changed(LAST_DELTA, ">i", 0, b"a", b"b"),
    "negative last offset": changed(LAST_DELTA, ">i", -3),
    "codec 7": changed(ATTRIBUTES, ">h", 7),
    "control batch": changed(ATTRIBUTES, ">h", 0x20),
    "transactional without id": changed(ATTRIBUTES, ">h", 0x10),
    "record length announces more": with_section(0, b"\x7e" + records_of(good())[1:]),
    "record ends early": with_section(0, records_of(good())[:-2]),
    "record of negative length": with_section(0, b"\x01" + records_of(good())[1:]),
    "offset delta of a record": with_section(0, b"\x18\x00\x00\x0a\x02k\x0avalue\x00"),
    "gzip of nothing readable": with_section(GZIP, b"this is not gzip at all"),
    "snappy of nothing readable": with_section(SNAPPY, b"this is not snappy at all"),
    "lz4 of nothing readable": with_section(LZ4, b"this is not lz4 at all"),
    "zstd of nothing readable": with_section(ZSTD, b"this is not zstd at all"),
    "gzip cut short": with_section(GZIP, gzip(records_of(good(bytes(10_000))))[:-12]),
    "gzip count announces more": with_section(GZIP, gzip(records_of(good())), 2),
    "gzip count announces less": with_section(GZIP, gzip(records_of(good(b"a", b"b"))), 1),
    "gzip good": with_section(GZIP, gzip(records_of(good()))),
    "zstd good": with_section(ZSTD, zstandard.compress(records_of(good()))),
    "too large": sealed(good(bytes(1_100_000))),
    "sequence without producer": changed(RECORDS - 8, ">i", 5),
    "producer epoch without sequence": changed(PRODUCER_ID, ">q", 77),
}


def produce(
    batch: bytes | None, *, topic: str = TOPIC, partition: int = 0, acks: int = 1, version: int = 9
) -> Any:
    frame = b"".join(
        hot_produce.encode_request(
            version, 1, "bad", {(topic, partition): batch or b""}, acks=acks, timeout_ms=5_000
        )
    )
    return frame, lambda answer: tuple(
        part.error_code for part in hot_produce.decode_response(answer, version)[0]
    )


def produce_twice(*, version: int = 9) -> Any:
    """The same partition twice in one request."""
    batch = bytes(good())
    both = {(TOPIC, 0): batch, (TOPIC, 1): batch}
    frame = bytearray(b"".join(hot_produce.encode_request(version, 1, "bad", both, acks=1, timeout_ms=5_000)))
    # The second partition's number: its size, as a varint of one more, and the batch itself follow.
    at = frame.rindex(batch) - (2 if len(batch) > 126 else 1) - 4
    assert frame[at : at + 4] == b"\x00\x00\x00\x01"
    frame[at + 3] = 0
    return bytes(frame), lambda answer: tuple(
        part.error_code for part in hot_produce.decode_response(answer, version)[0]
    )


def fetch(*partitions: PartitionFetch, version: int = 12, session: tuple[int, int] = (0, -1)) -> Any:
    request = FetchRequest(0, 1, 1 << 20, False, partitions, *session)

    def read(answer: memoryview) -> tuple[int, ...]:
        response = hot_fetch.decode_response(answer, version)
        return (response.error_code, *(part.error_code for part in response.partitions))

    return hot_fetch.encode_request(version, 1, "bad", request), read


def ask(api: Api, version: int, codes: Callable[[Any], list[int]], **fields: Any) -> Any:
    frame = encode_request(build_entity(request_type(api, version), fields), 1, "bad")
    return bytes(frame), lambda answer: tuple(
        int(code) for code in codes(decode_response(response_type(api, version), answer))
    )


def raw(body: bytes, size: int | None = None) -> Any:
    """Bytes that nobody can answer with a schema: code 0 stands for any answer."""
    return struct.pack(">i", len(body) if size is None else size) + body, lambda _answer: (0,)


def head(api: int, version: int) -> bytes:
    return struct.pack(">hhih", api, version, 1, -1)


def api_versions_0(answer: memoryview) -> tuple[int, ...]:
    (code,) = struct.unpack_from(">h", answer, 4)
    return (int(code),)


def list_offsets(version: int, *timestamps: int, partition: int = 0, topic: str = TOPIC) -> Any:
    asked = [{"partition_index": partition, "timestamp": at, "current_leader_epoch": -1} for at in timestamps]

    def codes(response: Any) -> list[int]:
        return [part.error_code for each in response.topics for part in each.partitions]

    return ask(
        Api.LIST_OFFSETS,
        version,
        codes,
        replica_id=-1,
        isolation_level=0,
        topics=[{"name": topic, "partitions": asked}],
    )


def delete_records(*offsets: int, partition: int = 1) -> Any:
    asked = [{"partition_index": partition, "offset": offset} for offset in offsets]

    def codes(response: Any) -> list[int]:
        return [part.error_code for each in response.topics for part in each.partitions]

    return ask(Api.DELETE_RECORDS, 2, codes, topics=[{"name": TOPIC, "partitions": asked}], timeout=5_000)


def widen(*counts: int) -> Any:
    wanted = [{"name": TOPIC, "count": count, "assignments": None} for count in counts]

    def codes(response: Any) -> list[int]:
        return [each.error_code for each in response.results]

    return ask(Api.CREATE_PARTITIONS, 3, codes, topics=wanted, timeout=5_000, validate_only=True)


def here(partition: int = 0, offset: int = 0, **options: Any) -> PartitionFetch:
    return PartitionFetch(options.pop("topic", TOPIC), partition, offset, 1 << 20, **options)


CASES: dict[str, Any] = {
    **{f"batch: {name}": produce(batch) for name, batch in BATCHES.items()},
    **{
        f"acks=0: {name}": produce(BATCHES[name], acks=0)
        for name in ("wrong checksum", "count announces more")
    },
    "produce: null records": produce(None, version=3),
    "produce: unknown topic": produce(bytes(good()), topic="no-such-topic-here"),
    "produce: partition 99": produce(bytes(good()), partition=99),
    "produce: partition -1": produce(bytes(good()), partition=-1),
    "produce: acks 5": produce(bytes(good()), acks=5),
    "produce: acks -2": produce(bytes(good()), acks=-2),
    "produce: zstd in version 3": produce(BATCHES["zstd good"], version=3),
    "produce: zstd in version 7": produce(BATCHES["zstd good"], version=7),
    "produce: twice": produce_twice(),
    "produce: internal topic": produce(bytes(good()), topic="__consumer_offsets"),
    "fetch: unknown topic": fetch(here(topic="no-such-topic-here")),
    "fetch: partition 99": fetch(here(99)),
    "fetch: partition -1": fetch(here(-1)),
    "fetch: beyond the end": fetch(here(0, 10**9)),
    "fetch: negative offset": fetch(here(0, -5)),
    "fetch: newer leader epoch": fetch(here(current_leader_epoch=1_000)),
    "fetch: unknown id": fetch(here(topic=uuid.uuid4()), version=13),
    "fetch: session 5 epoch 3": fetch(version=12, session=(5, 3)),
    "fetch: session 0 epoch 3": fetch(version=12, session=(0, 3)),
    "fetch: twice": fetch(here(), here()),
    "fetch: one after the other": fetch(here(0, 10**9), here(1)),
    "list offsets: unknown topic": list_offsets(5, -1, topic="no-such-topic-here"),
    "list offsets: partition 99": list_offsets(5, -1, partition=99),
    "list offsets: twice": list_offsets(5, -1, -2),
    "list offsets: -3 in version 6": list_offsets(6, -3),
    "list offsets: -3 in version 7": list_offsets(7, -3),
    "list offsets: -4 in version 7": list_offsets(7, -4),
    "list offsets: -4 in version 8": list_offsets(8, -4),
    "list offsets: -5 in version 9": list_offsets(9, -5),
    "list offsets: -10": list_offsets(9, -10),
    "delete records: twice": delete_records(0, 0),
    "create partitions: twice": widen(3, 4),
    "bytes: http": (b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n", lambda _answer: (0,)),
    "bytes: tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600), lambda _answer: (0,)),
    "bytes: two gigabytes": raw(b"", 2_000_000_000),
    "bytes: negative size": raw(b"", -1),
    "bytes: one byte": raw(b"x"),
    "bytes: five bytes": raw(b"\x00\x03\x00\x01\x00"),
    "bytes: half a request": raw(head(Api.METADATA, 9), 500),
    "header: client id of 30,000": raw(struct.pack(">hhih", Api.METADATA, 9, 1, 30_000)),
    "header: client id of -7": raw(struct.pack(">hhih", Api.METADATA, 1, 1, -7) + bytes(8)),
    "header: unknown api": raw(head(500, 0) + bytes(8)),
    "header: negative api": raw(head(-3, 0) + bytes(8)),
    "header: unknown version": raw(head(Api.METADATA, 90) + bytes(8)),
    "header: negative version": raw(head(Api.METADATA, -1) + bytes(8)),
    "header: version 0 of offset commit": raw(head(Api.OFFSET_COMMIT, 0) + bytes(30)),
    "header: api versions 99": (struct.pack(">ihhihb", 11, 18, 99, 1, -1, 0), api_versions_0),
    "header: api versions -1": (struct.pack(">ihhihb", 11, 18, -1, 1, -1, 0), api_versions_0),
    "body: cut short": raw(head(Api.METADATA, 1)),
    "body: two billion topics": raw(head(Api.METADATA, 1) + struct.pack(">i", 2**31 - 1)),
    "body: two billion topics, compact": raw(
        head(Api.METADATA, 9) + b"\x00\xff\xff\xff\xff\x07\x00\x00\x00\x00"
    ),
    "body: -7 topics": raw(head(Api.METADATA, 1) + struct.pack(">i", -7)),
    "body: null where an array must be": raw(head(Api.DELETE_TOPICS, 3) + struct.pack(">ii", -1, 0)),
    "body: null topic name": raw(head(Api.METADATA, 1) + struct.pack(">ih", 1, -1)),
    "body: varint of nine bytes": raw(head(Api.METADATA, 9) + b"\x00" + b"\xff" * 9 + b"\x01"),
    "body: unknown tagged field": raw(
        head(Api.METADATA, 9) + b"\x00" + b"\x01\x00\x00\x00" + b"\x01\x63\x02ab"
    ),
    "body: more than the request": raw(head(Api.METADATA, 1) + struct.pack(">i", 0) + b"more"),
    "body: produce of two billion topics": raw(
        head(Api.PRODUCE, 3) + struct.pack(">hhii", -1, -1, 1_000, 2**31 - 1)
    ),
    "body: produce of -7 topics": raw(head(Api.PRODUCE, 3) + struct.pack(">hhii", -1, -1, 1_000, -7)),
    "body: fetch of two billion topics": raw(
        head(Api.FETCH, 4) + struct.pack(">iiiibi", -1, 0, 1, 1_000, 0, 2**31 - 1)
    ),
}

UNANSWERED, SILENT_S = {"bytes: half a request"}, 1.0
"""The rest may come yet: both go on waiting."""

UNKNOWN_SERVER_ERROR, CORRUPT_MESSAGE, UNSUPPORTED_COMPRESSION_TYPE, INVALID_RECORD = (
    (-1,),
    (2,),
    (76,),
    (87,),
)

DIFFERENCES: dict[str, Apart[Outcome]] = {
    **{
        f"header: {what}": Apart("unsupported-version", kafka="closed", millrace=(0,))
        for what in (
            "unknown api",
            "negative api",
            "unknown version",
            "negative version",
            "version 0 of offset commit",
        )
    },
    **{
        f"batch: {what}": Apart("unreadable-batch", kafka=UNKNOWN_SERVER_ERROR, millrace=code)
        for what, code in {
            "huge length": INVALID_RECORD,
            "codec 7": UNSUPPORTED_COMPRESSION_TYPE,
            "gzip of nothing readable": CORRUPT_MESSAGE,
            "snappy of nothing readable": CORRUPT_MESSAGE,
            "lz4 of nothing readable": CORRUPT_MESSAGE,
            "zstd of nothing readable": CORRUPT_MESSAGE,
            "gzip cut short": CORRUPT_MESSAGE,
        }.items()
    },
    "batch: bytes behind the batch": Apart("bytes-behind-a-batch", kafka=(0,), millrace=INVALID_RECORD),
    "produce: twice": Apart("partition-twice", kafka=(0,), millrace=(42, 42)),
    "delete records: twice": Apart("deleted-from-twice", kafka=(0,), millrace=(42, 42)),
    "batch: offset delta of a record": Apart("offsets-within-a-batch", kafka=(0,), millrace=INVALID_RECORD),
    "header: client id of -7": Apart("negative-lengths", kafka=(0,), millrace="closed"),
    "body: -7 topics": Apart("negative-lengths", kafka=(0,), millrace="closed"),
}


@pytest.mark.parametrize("name", CASES)
def test_same_outcome(ports: tuple[int, int], name: str) -> None:
    frame, read = CASES[name]
    within_s = SILENT_S if name in UNANSWERED else None
    kafka, ours = (outcome(port, frame, read, within_s) for port in ports)
    apart = DIFFERENCES.get(name)
    if apart is None:
        assert ours == kafka, f"Kafka: {kafka}, ours: {ours}"
    else:
        assert (kafka, ours) == (apart.kafka, apart.millrace), apart.difference


def test_every_difference_is_of_a_case():
    assert set(DIFFERENCES) <= set(CASES)


def test_both_still_serve(ports: tuple[int, int]) -> None:
    for port in ports:
        with RawClient(port) as client:
            assert client.produce({(TOPIC, 0): good()})[0].error_code == 0


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
def test_decompression_bomb(ports: tuple[int, int], codec: int) -> None:
    """Some KB that become one good record of 100 MB. What it costs: `test_broker_bad_input.py`."""
    pack = gzip if codec == GZIP else zstandard.compress
    bomb = with_section(codec, pack(records_of(good(bytes(100 << 20)))))
    assert len(bomb) < 200_000
    apart = Apart("decompressed-size", kafka=(0,), millrace=(10,))
    assert tuple(outcome(port, *produce(bomb)) for port in ports) == (apart.kafka, apart.millrace)
