"""The APIs of records and offsets in every version that the broker advertises, asked over a socket; those of
topics, settings and the cluster are in `test_broker_admin_apis.py`.
"""

from __future__ import annotations

import struct
import uuid

import pytest

from millrace.broker.errors import (
    FencedLeaderEpoch,
    FetchSessionIdNotFound,
    InvalidRequiredAcks,
    InvalidTopic,
    InvalidTransactionTimeout,
    OffsetOutOfRange,
    TransactionalIdAuthorizationFailed,
    UnknownLeaderEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.records import read_records
from millrace.broker.server.handlers import (
    delete_records,
    fetch,
    init_producer_id,
    list_offsets,
    offset_for_leader_epoch,
    produce,
)
from millrace.broker.server.registry import spoken_apis
from tests.cluster.one_broker import TIMEOUT_MS, create, topic_id_of
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess

pytestmark = pytest.mark.java


# -- what is spoken --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(5))
def test_api_versions_lists_what_the_registry_has(client: RawClient, version: int) -> None:
    answer = client.ask(Api.API_VERSIONS, version)
    listed = {(api.api_key, api.min_version, api.max_version) for api in answer.api_keys}
    assert listed == set(spoken_apis())
    assert answer.error_code == 0


def test_api_versions_in_an_unknown_version_is_answered_in_version_0(client: RawClient) -> None:
    client.send(struct.pack(">ihhih", 10 + 1, Api.API_VERSIONS, 99, 7, -1) + b"\x00")
    frame = client.receive()
    correlation_id, error_code, count = struct.unpack_from(">ihi", frame)
    assert (correlation_id, error_code) == (7, UnsupportedVersion.code)
    entries = [struct.unpack_from(">hhh", frame, 10 + 6 * number) for number in range(count)]
    assert (int(Api.API_VERSIONS), 0, 4) in entries
    assert len(frame) == 10 + 6 * count  # and nothing after it


@pytest.mark.parametrize(("api_key", "version"), [(999, 0), (Api.METADATA, 30000), (Api.PRODUCE, 1)])
def test_unknown_api_or_version_is_answered_with_unsupported_version(
    client: RawClient, api_key: int, version: int
) -> None:
    client.send(struct.pack(">ihhih", 11, api_key, version, 5, -1) + b"\x00")
    frame = bytes(client.receive())
    assert frame[:4] == struct.pack(">i", 5)
    assert struct.pack(">h", UnsupportedVersion.code) in frame[4:]
    assert client.ask(Api.API_VERSIONS, 0).error_code == 0  # and the connection goes on


# -- records ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", produce.VERSIONS)
def test_produced_batch_is_fetched_with_the_same_records(client: RawClient, topic: str, version: int) -> None:
    first = client.produce({(topic, 0): batch_of(b"a", None)}, version=version)[0]
    second = client.produce({(topic, 0): batch_of(b"b")}, version=version, acks=-1)[0]
    assert (first.error_code, first.base_offset) == (0, 0)
    assert (second.error_code, second.base_offset) == (0, 2)
    given = client.fetch(PartitionFetch(topic, 0, 0, 1 << 20)).partitions[0]
    records = [
        record
        for position, header in iterate_batches(given.records)
        for record in read_records(given.records[position : position + header.size])
    ]
    assert [(record.offset, record.value) for record in records] == [(0, b"a"), (1, None), (2, b"b")]


@pytest.mark.parametrize("version", fetch.VERSIONS)
def test_fetch_gives_what_is_from_the_offset_on(client: RawClient, topic: str, version: int) -> None:
    for value in (b"a", b"b", b"c"):
        client.produce({(topic, 0): batch_of(value)})
    name = topic_id_of(client, topic) if version >= 13 else topic
    answer = client.fetch(PartitionFetch(name, 0, 1, 1 << 20), version=version)
    given = answer.partitions[0]
    assert (given.topic, given.error_code, given.high_watermark) == (name, 0, 3)
    assert [header.base_offset for _, header in iterate_batches(given.records)] == [1, 2]


def test_produce_to_several_partitions_succeeds_or_fails_for_each(client: RawClient) -> None:
    topic = create(client, 2)
    answers = client.produce(
        {(topic, 0): batch_of(b"a"), (topic, 1): batch_of(b"b"), (topic, 7): batch_of(b"c")}
    )
    assert [(a.partition, a.error_code) for a in answers] == [
        (0, 0),
        (1, 0),
        (7, UnknownTopicOrPartition.code),
    ]


def test_produce_without_acknowledgement_is_stored(client: RawClient, topic: str) -> None:
    client.produce({(topic, 0): batch_of(b"quiet")}, acks=0)
    given = client.fetch(PartitionFetch(topic, 0, 0, 1 << 20), max_wait_ms=5_000).partitions[0]
    assert given.high_watermark == 1


def test_produce_without_acknowledgement_that_fails_closes_the_connection(client: RawClient) -> None:
    client.produce({("no-such-topic", 0): batch_of(b"x")}, acks=0)
    assert client.is_closed()


def test_produce_to_the_brokers_own_topics_is_refused(client: RawClient) -> None:
    assert client.produce({("__consumer_offsets", 0): batch_of(b"x")})[0].error_code == InvalidTopic.code


def test_produce_refuses_wrong_acks_and_transactions(client: RawClient, topic: str) -> None:
    assert client.produce({(topic, 0): batch_of(b"x")}, acks=2)[0].error_code == InvalidRequiredAcks.code
    plain = client.produce({(topic, 0): batch_of(b"x")}, transactional_id="tx")[0]
    assert plain.error_code == 0  # nothing in it belongs to a transaction
    in_none = batch_of(b"x", producer_id=1, producer_epoch=0, base_sequence=0, transactional=True)
    refused = client.produce({(topic, 0): in_none})[0]
    assert refused.error_code == TransactionalIdAuthorizationFailed.code


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: b"",
        lambda batch: bytes(batch[:-1]),
        lambda batch: bytes(batch) + b"\x00",
        lambda batch: bytes(batch) * 2,
        lambda batch: bytes(batch[:30]) + b"\xff" + bytes(batch[31:]),
        lambda batch: bytes(batch[:16]) + b"\x01" + bytes(batch[17:]),
    ],
    ids=["empty", "cut", "longer", "two batches", "wrong checksum", "old magic"],
)
def test_produce_refuses_what_is_not_one_whole_batch(client: RawClient, topic: str, spoil) -> None:  # type: ignore[no-untyped-def]
    answer = client.produce({(topic, 0): spoil(batch_of(b"value"))})[0]
    assert answer.error_code != 0
    assert client.fetch(PartitionFetch(topic, 0, 0, 1 << 20)).partitions[0].high_watermark == 0


def test_idempotent_producer_is_stored_once(client: RawClient, topic: str) -> None:
    producer_id = client.ask(Api.INIT_PRODUCER_ID, 4, transactional_id=None, producer_id=-1).producer_id

    def send(sequence: int) -> tuple[int, int]:
        batch = batch_of(b"x", producer_id=producer_id, producer_epoch=0, base_sequence=sequence)
        answer = client.produce({(topic, 0): batch}, acks=-1)[0]
        return answer.error_code, answer.base_offset

    assert [send(0), send(1), send(1), send(0)] == [(0, 0), (0, 1), (0, 1), (0, 0)]
    assert send(5)[0] != 0
    assert client.fetch(PartitionFetch(topic, 0, 0, 1 << 20)).partitions[0].high_watermark == 2


@pytest.mark.parametrize("version", init_producer_id.VERSIONS)
def test_init_producer_id_never_gives_an_id_twice(client: RawClient, version: int) -> None:
    answers = [client.ask(Api.INIT_PRODUCER_ID, version, transactional_id=None) for _ in range(3)]
    assert len({answer.producer_id for answer in answers}) == 3
    assert {(int(answer.error_code), answer.producer_epoch) for answer in answers} == {(0, 0)}
    for timeout_ms in (0, 900_001):
        refused = client.ask(
            Api.INIT_PRODUCER_ID, version, transactional_id="tx", transaction_timeout=timeout_ms
        )
        assert refused.error_code == InvalidTransactionTimeout.code


# -- fetch: how much, how long ---------------------------------------------------------------------


def test_fetch_gives_the_first_batch_however_large(client: RawClient, topic: str) -> None:
    client.produce({(topic, 0): batch_of(b"x" * 5_000)})
    client.produce({(topic, 0): batch_of(b"y")})
    given = client.fetch(PartitionFetch(topic, 0, 0, 10), max_bytes=10).partitions[0]
    assert len(list(iterate_batches(given.records))) == 1


def test_fetch_keeps_to_max_bytes_over_all_partitions(client: RawClient) -> None:
    topic = create(client, 3)
    for number in range(3):
        client.produce({(topic, number): batch_of(b"x" * 1_000)})
    asked = [PartitionFetch(topic, number, 0, 1 << 20) for number in range(3)]
    sizes = [len(part.records) for part in client.fetch(*asked, max_bytes=2_500).partitions]
    assert [size > 0 for size in sizes] == [True, True, False]


def test_fetch_waits_for_the_next_append(shared_broker: BrokerProcess, client: RawClient, topic: str) -> None:
    with RawClient(shared_broker.port) as waiting:
        waiting.socket.settimeout(0.2)
        with pytest.raises(TimeoutError):
            waiting.fetch(PartitionFetch(topic, 0, 0, 1 << 20), max_wait_ms=15_000)
        waiting.socket.settimeout(10)
        client.produce({(topic, 0): batch_of(b"now")})
        frame = waiting.receive()  # well before 15 s are over
        assert b"now" in bytes(frame)


def test_fetch_answers_empty_when_the_wait_is_over(client: RawClient, topic: str) -> None:
    client.produce({(topic, 0): batch_of(b"little")})
    answer = client.fetch(PartitionFetch(topic, 0, 0, 1 << 20), max_wait_ms=50, min_bytes=100_000)
    assert len(answer.partitions[0].records) > 0
    at_end = client.fetch(PartitionFetch(topic, 0, 1, 1 << 20), max_wait_ms=50)
    assert (at_end.partitions[0].error_code, len(at_end.partitions[0].records)) == (0, 0)


def test_fetch_out_of_range_is_refused(client: RawClient, topic: str) -> None:
    answers = [
        client.fetch(PartitionFetch(topic, 0, offset, 1 << 20), max_wait_ms=5_000).partitions[0]
        for offset in (-1, 1, 1_000)
    ]
    assert {answer.error_code for answer in answers} == {OffsetOutOfRange.code}


def test_fetch_in_a_session_that_does_not_exist_is_refused_and_a_new_one_given(
    client: RawClient, topic: str
) -> None:
    inside = client.fetch(PartitionFetch(topic, 0, 0, 1 << 20), session_id=9, session_epoch=3)
    assert inside.error_code == FetchSessionIdNotFound.code
    full = client.fetch(PartitionFetch(topic, 0, 0, 1 << 20), session_epoch=0)
    assert full.error_code == 0
    assert full.session_id > 0


def test_fetch_checks_the_leader_epoch(client: RawClient, topic: str) -> None:
    def code(epoch: int) -> int:
        asked = PartitionFetch(topic, 0, 0, 1 << 20, current_leader_epoch=epoch)
        return client.fetch(asked).partitions[0].error_code

    assert code(0) == 0
    assert code(3) == UnknownLeaderEpoch.code
    assert code(-2) == FencedLeaderEpoch.code


def test_fetch_tells_where_a_history_parted(client: RawClient, topic: str) -> None:
    client.produce({(topic, 0): batch_of(b"a", b"b")})
    agreed = client.fetch(PartitionFetch(topic, 0, 2, 1 << 20, last_fetched_epoch=0)).partitions[0]
    assert (agreed.error_code, agreed.diverging) == (0, None)
    parted = client.fetch(PartitionFetch(topic, 0, 9, 1 << 20, last_fetched_epoch=0)).partitions[0]
    assert parted.diverging == (0, 2)


def test_fetch_of_an_unknown_topic_is_refused_by_name_and_by_id(client: RawClient) -> None:
    by_name = client.fetch(PartitionFetch("none", 0, 0, 1)).partitions[0]
    by_id = client.fetch(PartitionFetch(uuid.uuid4(), 0, 0, 1), version=13).partitions[0]
    assert (by_name.error_code, by_id.error_code) == (UnknownTopicOrPartition.code, UnknownTopicId.code)


# -- offsets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", list_offsets.VERSIONS[1:])
def test_list_offsets_by_place_and_by_time(client: RawClient, topic: str, version: int) -> None:
    client.produce({(topic, 0): batch_of(b"a", b"b", timestamp_ms=1_000)})
    client.produce({(topic, 0): batch_of(b"c", timestamp_ms=5_000)})

    def offset(timestamp: int) -> tuple[int, int]:
        answer = client.ask(
            Api.LIST_OFFSETS,
            version,
            replica_id=-1,
            topics=[{"name": topic, "partitions": [{"partition_index": 0, "timestamp": timestamp}]}],
        )
        part = answer.topics[0].partitions[0]
        assert part.error_code == 0
        return part.offset, part.timestamp

    assert offset(-1) == (3, -1)
    assert offset(-2) == (0, -1)
    assert offset(1_001) == (1, 1_001)
    assert offset(1_002) == (2, 5_000)
    assert offset(9_000) == (-1, -1)
    if version >= 7:
        assert offset(-3) == (2, 5_000)


def test_list_offsets_version_0_gives_offsets_as_a_list(client: RawClient, topic: str) -> None:
    client.produce({(topic, 0): batch_of(b"a", b"b")})
    name = topic.encode()

    def ask(partition: int, timestamp: int, most: int = 1) -> tuple[int, tuple[int, ...]]:
        body = struct.pack(">iih", -1, 1, len(name)) + name
        body += struct.pack(">iiqi", 1, partition, timestamp, most)
        head = struct.pack(">hhih", Api.LIST_OFFSETS, 0, 3, -1)
        client.send(struct.pack(">i", len(head) + len(body)) + head + body)
        frame = bytes(client.receive())
        start = 4 + 4 + 2 + len(name) + 4
        number, code, count = struct.unpack_from(">ihi", frame, start)
        assert number == partition
        assert len(frame) == start + 10 + 8 * count
        return code, struct.unpack_from(f">{count}q", frame, start + 10)

    assert ask(0, -1) == (0, (2,))
    assert ask(0, -2) == (0, (0,))
    assert ask(0, -1, most=0) == (0, ())
    assert ask(5, -1) == (UnknownTopicOrPartition.code, ())


@pytest.mark.parametrize("version", offset_for_leader_epoch.VERSIONS)
def test_offset_for_leader_epoch_gives_the_epochs_end(client: RawClient, topic: str, version: int) -> None:
    client.produce({(topic, 0): batch_of(b"a", b"b")})
    answer = client.ask(
        Api.OFFSET_FOR_LEADER_EPOCH,
        version,
        topics=[
            {
                "topic": topic,
                "partitions": [
                    {"partition": 0, "leader_epoch": 0, "current_leader_epoch": -1},
                    {"partition": 0, "leader_epoch": 0, "current_leader_epoch": 9},
                    {"partition": 4, "leader_epoch": 0, "current_leader_epoch": -1},
                ],
            }
        ],
    )
    known, ahead, missing = answer.topics[0].partitions
    assert (known.error_code, known.leader_epoch, known.end_offset) == (0, 0, 2)
    assert ahead.error_code == UnknownLeaderEpoch.code
    assert missing.error_code == UnknownTopicOrPartition.code


@pytest.mark.parametrize("version", delete_records.VERSIONS)
def test_delete_records_moves_the_start(client: RawClient, topic: str, version: int) -> None:
    client.produce({(topic, 0): batch_of(b"a", b"b", b"c")})

    def delete(offset: int) -> tuple[int, int]:
        answer = client.ask(
            Api.DELETE_RECORDS,
            version,
            topics=[{"name": topic, "partitions": [{"partition_index": 0, "offset": offset}]}],
            timeout=TIMEOUT_MS,
        )
        part = answer.topics[0].partitions[0]
        return int(part.error_code), part.low_watermark

    assert delete(2) == (0, 2)
    assert client.fetch(PartitionFetch(topic, 0, 1, 1)).partitions[0].error_code == OffsetOutOfRange.code
    assert delete(9)[0] == OffsetOutOfRange.code
    assert delete(-1) == (0, 3)
