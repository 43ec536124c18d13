"""Error codes of produce, fetch and offsets, asked for without a client library in between.

Each test makes a table of cases and holds it against one expectation for both servers.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Callable
from typing import Any

import lz4.frame
import pytest
from crc32c import crc32c

from millrace.broker.protocol import batch as batch_format
from millrace.broker.protocol.compression import LZ4
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from tests.raw_client import RawClient, batch_of
from tests.wire.foreign_clients import error_name, wait_until

MAGIC_POSITION = 16
CRC_POSITION = 17
ATTRIBUTES_LOW_BYTE = 22
LAST_OFFSET_DELTA_POSITION = 23
COUNT_POSITION = 57
HOUR_MS = 3_600_000
NOBODY = uuid.UUID(int=77)


def sealed(batch: bytearray) -> bytearray:
    """The batch with a checksum that is right for what it holds."""
    struct.pack_into(">I", batch, CRC_POSITION, crc32c(bytes(batch[21:])))
    return batch


def changed(position: int, layout: str, value: int, *, batch: bytearray | None = None) -> bytearray:
    batch = batch_of(b"one", b"two") if batch is None else batch
    struct.pack_into(layout, batch, position, value)
    return sealed(batch)


def without_records() -> bytearray:
    """A batch whose header is right and says that it holds nothing."""
    batch = batch_of(b"x")[: batch_format.HEADER_SIZE]
    struct.pack_into(">i", batch, 8, batch_format.HEADER_SIZE - 12)
    struct.pack_into(">i", batch, LAST_OFFSET_DELTA_POSITION, -1)
    struct.pack_into(">i", batch, COUNT_POSITION, 0)
    return sealed(batch)


def old_message(magic: int) -> bytes:
    """A message set with one message of format 0 or 1, as clients before 0.11 sent it."""
    import zlib

    body = struct.pack(">bb", magic, 0)
    body += struct.pack(">q", 1_700_000_000_000) if magic else b""
    body += struct.pack(">i", -1) + struct.pack(">i", 3) + b"old"
    message = struct.pack(">I", zlib.crc32(body)) + body
    return struct.pack(">qi", 0, len(message)) + message


def new_producer(raw: RawClient) -> Any:
    """An idempotent producer's identity; the broker may have to get its first producer ids."""
    found: list[Any] = []

    def given() -> bool:
        found.append(
            raw.ask(Api.INIT_PRODUCER_ID, 4, transaction_timeout=60_000, producer_id=-1, producer_epoch=-1)
        )
        return found[-1].error_code == 0

    wait_until(given, "a producer id")
    return found[-1]


def of_linked_blocks() -> bytearray:
    """What Python's lz4 makes unless it is told otherwise."""
    plain = batch_of(b"one" * 40_000)
    body = lz4.frame.compress(bytes(plain[batch_format.HEADER_SIZE :]), block_linked=True)
    batch = plain[: batch_format.HEADER_SIZE] + body
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    return changed(ATTRIBUTES_LOW_BYTE, ">b", LZ4, batch=batch)


def produced(raw: RawClient, topic: str, batch: bytes | bytearray | None, **options: int) -> str:
    (answer,) = raw.produce({(topic, 0): batch}, **options)
    return error_name(answer.error_code)


def test_batches_that_are_not_what_they_say_are_refused(raw, server, readers, new_topic):
    topic = new_topic()
    damaged = batch_of(b"one", b"two")
    damaged[-1] ^= 1
    codes = {
        "good": produced(raw, topic, batch_of(b"one", b"two")),
        "no records": produced(raw, topic, without_records()),
        "no batch": produced(raw, topic, b""),
        "two batches": produced(raw, topic, batch_of(b"one") + batch_of(b"two")),
        "damaged": produced(raw, topic, damaged),
        "cut short": produced(raw, topic, batch_of(b"one")[:-5]),
        "count too high": produced(raw, topic, changed(COUNT_POSITION, ">i", 3)),
        "count too low": produced(raw, topic, changed(COUNT_POSITION, ">i", 1)),
        "count negative": produced(raw, topic, changed(COUNT_POSITION, ">i", -1)),
        "last offset too high": produced(raw, topic, changed(LAST_OFFSET_DELTA_POSITION, ">i", 7)),
        "unknown codec": produced(raw, topic, changed(ATTRIBUTES_LOW_BYTE, ">b", 7)),
        "said to be gzip": produced(raw, topic, changed(ATTRIBUTES_LOW_BYTE, ">b", 1)),
        "lz4 of linked blocks": produced(raw, topic, of_linked_blocks()),
        "control batch": produced(raw, topic, changed(ATTRIBUTES_LOW_BYTE, ">b", 0x20)),
        "format 0": produced(raw, topic, old_message(0)),
        "format 1": produced(raw, topic, old_message(1)),
        "format 3": produced(raw, topic, changed(MAGIC_POSITION, ">b", 3)),
    }
    assert codes == {
        "good": "NONE",
        "no records": "INVALID_RECORD",
        "no batch": "INVALID_RECORD",
        "two batches": "INVALID_RECORD",
        "damaged": "CORRUPT_MESSAGE",
        "cut short": "INVALID_RECORD",
        "count too high": "INVALID_RECORD",
        "count too low": "INVALID_RECORD",
        "count negative": "INVALID_RECORD",
        "last offset too high": "INVALID_RECORD",
        "unknown codec": server.outcome(
            "unreadable-batch", kafka="UNKNOWN_SERVER_ERROR", millrace="UNSUPPORTED_COMPRESSION_TYPE"
        ),
        "said to be gzip": server.outcome(
            "unreadable-batch", kafka="UNKNOWN_SERVER_ERROR", millrace="CORRUPT_MESSAGE"
        ),
        "lz4 of linked blocks": server.outcome(
            "unreadable-batch", kafka="UNKNOWN_SERVER_ERROR", millrace="INVALID_RECORD"
        ),
        "control batch": "INVALID_RECORD",
        "format 0": "INVALID_RECORD",
        "format 1": "INVALID_RECORD",
        "format 3": "CORRUPT_MESSAGE",
    }
    assert readers[0].bounds(topic, 0) == (0, 2), "nothing that was refused is stored"
    assert [record.value for record in readers[1].drain(topic)] == [b"one", b"two"]


def test_places_that_do_not_exist_and_acks_that_mean_nothing_are_refused(raw, readers, new_topic, fresh_name):
    topic = new_topic()
    readers[0].commit(fresh_name("group"), topic, 0, 0)  # from now on there is an offsets topic
    batch = batch_of(b"x")
    codes = {
        "unknown topic": produced(raw, fresh_name("unknown"), batch),
        "invalid topic": produced(raw, "no/slashes", batch),
        "acks 2": produced(raw, topic, batch, acks=2),
        "acks -2": produced(raw, topic, batch, acks=-2),
        "offsets topic": produced(raw, "__consumer_offsets", batch),
    }
    (answer,) = raw.produce({(topic, 1): batch})
    codes["partition beyond the last"] = error_name(answer.error_code)
    (answer,) = raw.produce({(topic, -1): batch})
    codes["partition -1"] = error_name(answer.error_code)
    assert codes == {
        "unknown topic": "UNKNOWN_TOPIC_OR_PARTITION",
        "invalid topic": "UNKNOWN_TOPIC_OR_PARTITION",
        "acks 2": "INVALID_REQUIRED_ACKS",
        "acks -2": "INVALID_REQUIRED_ACKS",
        "offsets topic": "INVALID_TOPIC_EXCEPTION",
        "partition beyond the last": "UNKNOWN_TOPIC_OR_PARTITION",
        "partition -1": "UNKNOWN_TOPIC_OR_PARTITION",
    }


def test_each_partition_of_a_request_succeeds_or_fails_for_itself(raw, new_topic):
    topic = new_topic(partitions=3)
    damaged = batch_of(b"x")
    damaged[-1] ^= 1
    answers = raw.produce(
        {
            (topic, 0): batch_of(b"a", b"b"),
            (topic, 1): damaged,
            (topic, 2): batch_of(b"c"),
            (topic, 9): batch_of(b"d"),
        }
    )
    assert sorted((a.partition, error_name(a.error_code), a.base_offset) for a in answers) == [
        (0, "NONE", 0),
        (1, "CORRUPT_MESSAGE", -1),
        (2, "NONE", 0),
        (9, "UNKNOWN_TOPIC_OR_PARTITION", -1),
    ]


def test_min_insync_replicas_beyond_the_replicas_there_are_asks_for_all_of_them(raw, readers, new_topic):
    """One replica cannot be two: Apache Kafka takes the smaller of the setting and the replication factor."""
    topic = new_topic(min_insync_replicas=2)
    assert produced(raw, topic, batch_of(b"acks all"), acks=-1) == "NONE"
    assert produced(raw, topic, batch_of(b"acks 1"), acks=1) == "NONE"
    assert [record.value for record in readers[0].drain(topic)] == [b"acks all", b"acks 1"]


def test_timestamps_out_of_bounds_are_refused(raw, server, new_topic):
    now_ms = int(time.time() * 1000)
    plain, strict = new_topic(), new_topic(message_timestamp_after_max_ms=1_000)
    past = new_topic(message_timestamp_before_max_ms=1_000)
    codes = {
        "now": produced(raw, plain, batch_of(b"x", timestamp_ms=now_ms)),
        "in half an hour": produced(raw, plain, batch_of(b"x", timestamp_ms=now_ms + HOUR_MS // 2)),
        "in two hours": produced(raw, plain, batch_of(b"x", timestamp_ms=now_ms + 2 * HOUR_MS)),
        "in a minute, too late": produced(raw, strict, batch_of(b"x", timestamp_ms=now_ms + 60_000)),
        "a minute ago, too early": produced(raw, past, batch_of(b"x", timestamp_ms=now_ms - 60_000)),
        "no timestamp": produced(raw, plain, batch_of(b"x", timestamp_ms=-1)),
    }
    assert codes == {
        "now": "NONE",
        "in half an hour": "NONE",
        "in two hours": server.outcome("future-timestamps", kafka="INVALID_TIMESTAMP", millrace="NONE"),
        "in a minute, too late": "INVALID_TIMESTAMP",
        "a minute ago, too early": "INVALID_TIMESTAMP",
        "no timestamp": "NONE",
    }


def test_sequences_of_an_idempotent_producer_are_held_against_what_is_stored(raw, readers, new_topic):
    topic = new_topic()
    identity = new_producer(raw)

    def send(sequence: int, *values: bytes, epoch: int = 1) -> tuple[str, int]:
        batch = batch_of(
            *values, producer_id=identity.producer_id, producer_epoch=epoch, base_sequence=sequence
        )
        (answer,) = raw.produce({(topic, 0): batch}, acks=-1)
        return error_name(answer.error_code), answer.base_offset

    assert send(0, b"a", b"b") == ("NONE", 0)
    assert send(2, b"c") == ("NONE", 2)
    assert send(0, b"a", b"b") == ("NONE", 0), "the same batch again is acknowledged, not stored"
    assert send(4, b"gap") == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)
    assert send(1, b"overlaps") == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)
    assert send(3, b"old epoch", epoch=0) == ("INVALID_PRODUCER_EPOCH", -1)
    assert send(3, b"d", epoch=2) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1), "a new epoch begins at 0"
    assert send(0, b"d", epoch=2) == ("NONE", 3)
    for number in range(1, 7):
        assert send(number, b"e%d" % number, epoch=2) == ("NONE", 3 + number)
    assert send(2, b"e2", epoch=2) == ("NONE", 5), "one of the last five"
    assert send(0, b"d", epoch=2) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1), "older than the last five"
    values = [record.value for record in readers[0].drain(topic)]
    assert values == [b"a", b"b", b"c", b"d", *(b"e%d" % n for n in range(1, 7))]


def test_fetches_that_cannot_be_answered_say_why(raw, readers, new_topic, fresh_name):
    topic = new_topic()
    raw.produce({(topic, 0): batch_of(b"a", b"b", b"c")})

    def fetched(topic: str, partition: int, offset: int, version: int = 12, **options: int) -> str:
        asked = PartitionFetch(topic, partition, offset, 1000, **options)
        return error_name(raw.fetch(asked, version=version).partitions[0].error_code)

    codes = {
        "the end": fetched(topic, 0, 3),
        "past the end": fetched(topic, 0, 4),
        "before the start": fetched(topic, 0, -1),
        "unknown partition": fetched(topic, 1, 0),
        "unknown topic": fetched(fresh_name("unknown"), 0, 0),
        "older leader epoch": fetched(topic, 0, 0, current_leader_epoch=-1),
        "newer leader epoch": fetched(topic, 0, 0, current_leader_epoch=99),
    }
    assert codes == {
        "the end": "NONE",
        "past the end": "OFFSET_OUT_OF_RANGE",
        "before the start": "OFFSET_OUT_OF_RANGE",
        "unknown partition": "UNKNOWN_TOPIC_OR_PARTITION",
        "unknown topic": "UNKNOWN_TOPIC_OR_PARTITION",
        "older leader epoch": "NONE",
        "newer leader epoch": "UNKNOWN_LEADER_EPOCH",
    }
    nobody = PartitionFetch(NOBODY, 0, 0, 1000)
    assert error_name(raw.fetch(nobody, version=13).partitions[0].error_code) == "UNKNOWN_TOPIC_ID"
    whole = raw.fetch(PartitionFetch(topic, 0, 0, 1000)).partitions[0]
    assert (whole.high_watermark, whole.last_stable_offset, whole.log_start_offset) == (3, 3, 0)


def test_first_batch_is_given_however_large_and_no_second_one_past_the_limit(raw, new_topic):
    topic = new_topic()
    batch = batch_of(b"x" * 5_000)
    for _ in range(3):
        raw.produce({(topic, 0): batch_of(b"x" * 5_000)})

    def batches(partition_limit: int, request_limit: int) -> int:
        given = raw.fetch(PartitionFetch(topic, 0, 0, partition_limit), max_bytes=request_limit).partitions[0]
        return len(given.records) // len(batch)

    assert batches(1, 1) == 1
    assert batches(2 * len(batch) + 10, 1 << 20) == 2
    assert batches(1 << 20, 2 * len(batch) + 10) == 2
    assert batches(1 << 20, 1 << 20) == 3


def test_one_answer_is_bounded_however_much_is_asked_for(raw, server, new_topic):
    topic, count = new_topic(), 12
    batch = batch_of(b"x" * 1_000_000)
    for _ in range(count):
        raw.produce({(topic, 0): batch_of(b"x" * 1_000_000)})
    given = raw.fetch(PartitionFetch(topic, 0, 0, 50 << 20), max_bytes=50 << 20).partitions[0]
    whole = count * len(batch)
    assert len(given.records) == server.outcome("fetch-size", kafka=whole, millrace=8 * len(batch))


def test_fetch_sessions(raw, new_topic):
    topic = new_topic()
    raw.produce({(topic, 0): batch_of(b"a")})
    started = raw.fetch(PartitionFetch(topic, 0, 0, 1000), session_epoch=0)
    assert started.error_code == 0
    codes = {
        "unknown session": error_name(raw.fetch(session_id=77_777, session_epoch=1).error_code),
        "session": started.session_id > 0,
    }
    if started.session_id:
        nothing_new = raw.fetch(session_id=started.session_id, session_epoch=1)
        codes["same offset again"] = [len(p.records) > 0 for p in nothing_new.partitions]
        moved = raw.fetch(PartitionFetch(topic, 0, 1, 1000), session_id=started.session_id, session_epoch=2)
        codes["at the end"] = [p.partition for p in moved.partitions]
        raw.produce({(topic, 0): batch_of(b"b")})
        news = raw.fetch(session_id=started.session_id, session_epoch=3)
        codes["news"] = [(p.partition, p.high_watermark) for p in news.partitions]
        codes["wrong epoch"] = error_name(
            raw.fetch(session_id=started.session_id, session_epoch=9).error_code
        )
    assert codes == {
        "unknown session": "FETCH_SESSION_ID_NOT_FOUND",
        "session": True,
        "same offset again": [True],
        "at the end": [],
        "news": [(0, 2)],
        "wrong epoch": "INVALID_FETCH_SESSION_EPOCH",
    }


def listed(raw: RawClient, version: int = 7) -> Callable[..., tuple[str, int, int]]:
    def ask(topic: str, timestamp_ms: int, partition: int = 0, epoch: int = -1) -> tuple[str, int, int]:
        answer = raw.ask(
            Api.LIST_OFFSETS,
            version,
            replica_id=-1,
            isolation_level=0,
            topics=[
                {
                    "name": topic,
                    "partitions": [
                        {
                            "partition_index": partition,
                            "timestamp": timestamp_ms,
                            "current_leader_epoch": epoch,
                        }
                    ],
                }
            ],
        )
        (found,) = answer.topics[0].partitions
        return error_name(found.error_code), found.offset, found.timestamp

    return ask


def test_offsets_are_listed_by_time_and_by_name(raw, new_topic, fresh_name):
    topic, empty = new_topic(), new_topic()
    base_ms = 1_700_000_000_000
    for value, shift in ((b"a", 1_000), (b"b", 9_000), (b"c", 5_000)):
        raw.produce({(topic, 0): batch_of(value, timestamp_ms=base_ms + shift)})
    ask = listed(raw)
    found = {
        "latest": ask(topic, -1),
        "earliest": ask(topic, -2),
        "highest timestamp": ask(topic, -3),
        "before all": ask(topic, base_ms),
        "between": ask(topic, base_ms + 1_001),
        "exactly": ask(topic, base_ms + 9_000),
        "after all": ask(topic, base_ms + 9_001),
        "latest of nothing": ask(empty, -1),
        "highest timestamp of nothing": ask(empty, -3),
        "time in nothing": ask(empty, base_ms),
        "unknown topic": ask(fresh_name("unknown"), -1),
        "unknown partition": ask(topic, -1, partition=5),
        "newer leader epoch": ask(topic, -1, epoch=99),
    }
    assert found == {
        "latest": ("NONE", 3, -1),
        "earliest": ("NONE", 0, -1),
        "highest timestamp": ("NONE", 1, base_ms + 9_000),
        "before all": ("NONE", 0, base_ms + 1_000),
        "between": ("NONE", 1, base_ms + 9_000),
        "exactly": ("NONE", 1, base_ms + 9_000),
        "after all": ("NONE", -1, -1),
        "latest of nothing": ("NONE", 0, -1),
        "highest timestamp of nothing": ("NONE", -1, -1),
        "time in nothing": ("NONE", -1, -1),
        "unknown topic": ("UNKNOWN_TOPIC_OR_PARTITION", -1, -1),
        "unknown partition": ("UNKNOWN_TOPIC_OR_PARTITION", -1, -1),
        "newer leader epoch": ("UNKNOWN_LEADER_EPOCH", -1, -1),
    }


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4], ids=["none", "gzip", "snappy", "lz4", "zstd"])
def test_highest_timestamp_inside_a_batch_is_found(raw, new_topic, codec):
    """The record, not the batch, whatever the codec."""
    topic = new_topic()
    base_ms = 1_700_000_000_000
    raw.produce(
        {(topic, 0): batch_of(*(b"v%d" % n for n in range(10)), timestamp_ms=base_ms, compression=codec)}
    )
    ask = listed(raw)
    assert ask(topic, -3) == ("NONE", 9, base_ms + 9)
    assert ask(topic, base_ms + 4) == ("NONE", 4, base_ms + 4)


def test_metadata_of_topics_that_are_not_there(raw, new_topic, fresh_name):
    topic, unknown = new_topic(partitions=2), fresh_name("unknown")

    def shown(*names: str, version: int = 9) -> list[tuple[str, str, int]]:
        answer = raw.ask(
            Api.METADATA, version, topics=[{"name": name} for name in names], allow_auto_topic_creation=False
        )
        return [(t.name, error_name(t.error_code), len(t.partitions)) for t in answer.topics]

    assert shown(topic) == [(topic, "NONE", 2)]
    assert shown(unknown) == [(unknown, "UNKNOWN_TOPIC_OR_PARTITION", 0)]
    assert shown("no/slashes") == [("no/slashes", "INVALID_TOPIC_EXCEPTION", 0)]
    assert shown(unknown) == [(unknown, "UNKNOWN_TOPIC_OR_PARTITION", 0)], "asking made nothing"
    (answer,) = raw.ask(Api.METADATA, 12, topics=[{"topic_id": NOBODY, "name": None}]).topics
    assert error_name(answer.error_code) == "UNKNOWN_TOPIC_ID"


def test_end_of_an_epoch(raw, new_topic, fresh_name):
    topic = new_topic()
    raw.produce({(topic, 0): batch_of(b"a", b"b")})
    (described,) = raw.ask(Api.METADATA, 9, topics=[{"name": topic}]).topics
    epoch = described.partitions[0].leader_epoch

    def ended(topic: str, asked: int, current: int = -1) -> tuple[str, int, int]:
        partition = {"partition": 0, "current_leader_epoch": current, "leader_epoch": asked}
        answer = raw.ask(
            Api.OFFSET_FOR_LEADER_EPOCH,
            4,
            replica_id=-1,
            topics=[{"topic": topic, "partitions": [partition]}],
        )
        (found,) = answer.topics[0].partitions
        return error_name(found.error_code), found.leader_epoch, found.end_offset

    assert ended(topic, epoch) == ("NONE", epoch, 2)
    assert ended(topic, epoch + 5) == ("NONE", -1, -1)
    assert ended(topic, epoch, current=epoch + 5) == ("UNKNOWN_LEADER_EPOCH", -1, -1)
    assert ended(fresh_name("unknown"), 0) == ("UNKNOWN_TOPIC_OR_PARTITION", -1, -1)
