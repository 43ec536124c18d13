"""What foreign clients do wrong, or at the edge: the broker answers with the protocol's own error."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from tests.waiting import patience
from tests.wire.foreign_clients import CODECS, PATIENCE_S, Refused, Sent, wait_until

LARGEST_BATCH = 1_048_588
"""Apache Kafka's default for max.message.bytes: 1 MiB and the 12 bytes before a batch's own size."""

BATCH_OVERHEAD = 61 + 11
"""A batch's header, and what surrounds a record's value of about 1 MB and no key."""


def test_batch_of_exactly_the_largest_size_is_taken_and_one_byte_more_is_refused(client, readers, new_topic):
    topic = new_topic()
    value = bytes(LARGEST_BATCH - BATCH_OVERHEAD)
    assert client.produce(topic, [Sent(value)]) == [0]
    for reader in readers:
        (record,) = reader.consume(topic, [0], 1)
        assert record.value == value
    with pytest.raises(Refused) as refused:
        client.produce(topic, [Sent(value + b"\0")])
    assert refused.value.reason == "MESSAGE_TOO_LARGE"
    assert client.bounds(topic, 0) == (0, 1)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
def test_limit_counts_compressed_bytes(readers, new_topic, codec):
    topic = new_topic(max_message_bytes=100_000)
    value = b"flight " * 150_000
    client = readers[0]
    assert client.produce(topic, [Sent(value)], codec) == [0]
    (record,) = client.consume(topic, [0], 1)
    assert record.value == value


def test_first_write_makes_the_topic(client, fresh_name):
    topic = fresh_name("made-by-writing")
    assert client.produce(topic, [Sent(b"first")]) == [0]
    assert [record.value for record in client.consume(topic, [0], 1)] == [b"first"]


def test_compacted_topic_refuses_records_without_a_key(client, new_topic):
    topic = new_topic(cleanup_policy="compact")
    assert client.produce(topic, [Sent(b"value", b"key")]) == [0]
    with pytest.raises(Refused) as refused:
        client.produce(topic, [Sent(b"value")])
    # An INVALID_RECORD, which aiokafka does not know.
    assert refused.value.reason == ("UnknownError" if client.name == "aiokafka" else "INVALID_RECORD")
    assert client.bounds(topic, 0) == (0, 1)


def test_reading_past_the_end_is_told_apart_from_having_nothing_to_read(readers, new_topic):
    topic = new_topic()
    confluent = readers[0]
    confluent.produce(topic, [Sent(b"x")])
    with pytest.raises(Refused) as refused:
        confluent.consume(topic, [0], 1, start=1_000)
    assert refused.value.reason in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE")


def call(bootstrap: str, frame: bytes) -> bytes:
    """Send raw bytes on a connection of their own; what comes back until silence or the end."""
    host, _, port = bootstrap.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=patience(30)) as connection:
        connection.sendall(frame)
        connection.settimeout(30)
        answer = b""
        try:
            while len(answer) < 4 or len(answer) < 4 + struct.unpack(">i", answer[:4])[0]:
                received = connection.recv(65_536)
                if not received:
                    return answer
                answer += received
        except ConnectionResetError:
            return b""
        return answer


def request(api_key: int, version: int, body: bytes) -> bytes:
    head = struct.pack(">hhih", api_key, version, 77, 2) + b"me"
    return struct.pack(">i", len(head) + len(body)) + head + body


def produce_request(topic: str, batch: bytes) -> bytes:
    """Produce version 3, which is not flexible: no transactional id, acks from all, 5 s."""
    name = struct.pack(">h", len(topic)) + topic.encode()
    body = struct.pack(">hhii", -1, -1, 5_000, 1) + name + struct.pack(">iii", 1, 0, len(batch)) + batch
    return request(0, 3, body)


def produce_error(answer: bytes, topic: str) -> int:
    """The error code in a produce answer of version 3: after size, correlation id, counts and names."""
    (code,) = struct.unpack_from(">h", answer, 4 + 4 + 4 + 2 + len(topic) + 4 + 4)
    return int(code)


def good_batch() -> bytearray:
    from millrace.broker.protocol.records import Record, build_batch

    return bytearray(build_batch([Record(b"k", b"v" * 100, (), 1_700_000_000_000)]))


def with_valid_checksum(batch: bytearray) -> bytes:
    from crc32c import crc32c

    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    return bytes(batch)


def test_damaged_batches_are_refused_and_nothing_is_stored(bootstrap, readers, new_topic):
    topic = new_topic()
    assert produce_error(call(bootstrap, produce_request(topic, bytes(good_batch()))), topic) == 0

    flipped = good_batch()
    flipped[-1] ^= 1
    unknown_codec = good_batch()
    unknown_codec[22] |= 7
    lying_count = good_batch()
    struct.pack_into(">i", lying_count, 57, 2_000_000_000)
    old_magic = good_batch()
    old_magic[16] = 9
    batches = {
        "wrong checksum": bytes(flipped),
        "unknown codec": with_valid_checksum(unknown_codec),
        "lying count": with_valid_checksum(lying_count),
        "unknown magic": with_valid_checksum(old_magic),
        "cut short": bytes(good_batch()[:-10]),
    }
    codes = {
        what: produce_error(call(bootstrap, produce_request(topic, b)), topic) for what, b in batches.items()
    }
    assert all(code != 0 for code in codes.values()), codes
    assert codes["wrong checksum"] == 2
    assert readers[0].bounds(topic, 0) == (0, 1)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
        struct.pack(">i", 2**31 - 1) + b"x" * 100,
        struct.pack(">i", -5),
        struct.pack(">ihhih", 10, 3, 9, 1, -1),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    ],
    ids=["http", "two gigabytes announced", "negative size", "body cut short", "tls"],
)
def test_garbage_closes_the_connection_and_the_broker_goes_on(bootstrap, readers, new_topic, garbage):
    assert call(bootstrap, garbage) == b""
    topic = new_topic()
    assert readers[0].produce(topic, [Sent(b"still here")]) == [0]


def test_unsupported_version_of_api_versions_is_answered_in_version_0(bootstrap):
    head = struct.pack(">hhihb", 18, 99, 77, -1, 0)
    answer = call(bootstrap, struct.pack(">i", len(head)) + head)
    correlation_id, error_code, api_count = struct.unpack_from(">ihi", answer, 4)
    assert (correlation_id, error_code) == (77, 35)
    assert api_count >= 1


def test_idle_clients_do_not_disturb(bootstrap, readers, new_topic):
    host, _, port = bootstrap.rpartition(":")
    idle = [socket.create_connection((host, int(port)), timeout=patience(30)) for _ in range(50)]
    try:
        for connection in idle[::2]:
            connection.sendall(b"\x00\x00")  # half of a size, then silence
        topic = new_topic()
        readers[0].produce(topic, [Sent(b"x")])
        wait_until(lambda: readers[0].bounds(topic, 0) == (0, 1), "the record is readable")
    finally:
        for connection in idle:
            connection.close()


def test_what_is_too_large_for_the_client_never_leaves_it(client, readers, new_topic):
    topic = new_topic()
    with pytest.raises(Refused) as refused:
        client.produce(topic, [Sent(bytes(60_000))], largest_request=50_000)
    assert refused.value.reason == "MESSAGE_TOO_LARGE"
    assert readers[0].bounds(topic, 0) == (0, 0)


def test_limit_of_a_topic_is_its_own(client, readers, new_topic):
    small, large = new_topic(max_message_bytes=2_000), new_topic(max_message_bytes=4 << 20)
    with pytest.raises(Refused) as refused:
        client.produce(small, [Sent(bytes(2_000))])
    assert refused.value.reason == "MESSAGE_TOO_LARGE"
    assert client.produce(small, [Sent(bytes(1_000))]) == [0]
    value = random.Random(7).randbytes(3 << 20)
    assert client.produce(large, [Sent(value)]) == [0]
    for reader in readers:
        assert [record.value for record in reader.consume(large, [0], 1)] == [value], reader.name


def test_writing_to_a_topic_that_was_deleted(client, readers, admin, new_topic):
    """It is made again by the write: an empty topic of the same name, which is another topic."""
    topic = new_topic(partitions=3)
    client.produce(topic, [Sent(b"old", partition=2)])
    admin.delete_topics([topic])[topic].result(patience(PATIENCE_S))
    wait_until(lambda: topic not in admin.list_topics(timeout=PATIENCE_S).topics, "the topic is gone")
    assert client.produce(topic, [Sent(b"new")]) == [0]
    (shown,) = [t for name, t in admin.list_topics(timeout=PATIENCE_S).topics.items() if name == topic]
    assert len(shown.partitions) == 1, "the broker's default"
    for reader in readers:
        assert [record.value for record in reader.drain(topic)] == [b"new"], reader.name


def test_writing_to_a_partition_that_is_not_there(readers, new_topic):
    topic = new_topic(partitions=2)
    with pytest.raises(Refused) as refused:
        readers[0].produce(topic, [Sent(b"x", partition=2)])
    assert refused.value.reason == "_UNKNOWN_PARTITION"


def test_committed_offset_without_a_member_and_its_note(client, readers, new_topic, fresh_name):
    topic, group = new_topic(), fresh_name("group")
    client.commit(group, topic, 0, 41, "note")
    assert {reader.committed(group, topic, 0) for reader in readers} == {41}
    with pytest.raises(Refused) as refused:
        client.commit(group, topic, 0, 42, "x" * 4_097)
    assert refused.value.reason in ("OFFSET_METADATA_TOO_LARGE", "CommitFailedError")
    assert {reader.committed(group, topic, 0) for reader in readers} == {41}
