"""The hand-written produce and fetch codecs against `kio`, in every version and both directions."""

from __future__ import annotations

import contextlib
import datetime
import random
import uuid
from typing import Any

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.static.primitive import i32Timedelta

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol import frames, hot_fetch, hot_produce
from millrace.broker.server.answers import request_type
from tests import seeds

TOPIC_ID = uuid.UUID("2b6c1f0e-9a51-4a41-8f25-1f1e7f8a2d11")


def _ms(value: int) -> i32Timedelta:
    return i32Timedelta.parse(datetime.timedelta(milliseconds=value))


def _nested(entity: type, name: str) -> Any:
    """A class that is declared beside a kio entity."""
    return getattr(__import__(entity.__module__, fromlist=[name]), name)


def _records(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


@pytest.mark.parametrize("version", hot_produce.VERSIONS)
class TestProduce:
    def _kio_request(self, version: int) -> Any:
        cls = load_request_schema(0, version)
        topic, partition = _nested(cls, "TopicProduceData"), _nested(cls, "PartitionProduceData")
        return cls(
            transactional_id="txn-ü",
            acks=-1,
            timeout=_ms(1500),
            topic_data=(
                topic(
                    name="flights",
                    partition_data=(
                        partition(index=0, records=_records(300)),
                        partition(index=7, records=_records(1)),
                    ),
                ),
                topic(name="t" * 200, partition_data=(partition(index=3, records=None),)),
            ),
        )

    def test_request_of_kio_decoded_gives_its_fields(self, version: int) -> None:
        frame = memoryview(bytearray(frames.encode_request(self._kio_request(version), 9, "me")))[4:]
        head, position = frames.decode_request(frame)
        request = hot_produce.decode_request(frame, position, version)
        assert head == (0, version, 9, "me")
        assert (request.transactional_id, request.acks, request.timeout_ms) == ("txn-ü", -1, 1500)
        assert [(p.topic, p.partition, p.records and bytes(p.records)) for p in request.partitions] == [
            ("flights", 0, _records(300)),
            ("flights", 7, _records(1)),
            ("t" * 200, 3, None),
        ]
        assert request.partitions[0].records is not None
        assert not request.partitions[0].records.readonly

    def test_request_encoded_reads_in_kio_as_given(self, version: int) -> None:
        first, second = _records(130), _records(70)
        buffers = hot_produce.encode_request(
            version,
            5,
            "mirror",
            {("a", 0): first, ("b", 1): [second, first], ("a", 2): memoryview(second)},
            acks=1,
            timeout_ms=777,
        )
        frame = b"".join(buffers)
        assert int.from_bytes(frame[:4]) == len(frame) - 4
        assert any(buffer is first for buffer in buffers), "batches are passed on uncopied"
        head, position = frames.decode_request(memoryview(frame)[4:])
        request = frames.decode_entity(load_request_schema(0, version), memoryview(frame)[4:], position)
        assert head == (0, version, 5, "mirror")
        assert (request.acks, request.timeout, request.transactional_id) == (1, _ms(777), None)
        assert [(t.name, [(p.index, p.records) for p in t.partition_data]) for t in request.topic_data] == [
            ("a", [(0, first), (2, second)]),
            ("b", [(1, second + first)]),
        ]

    def test_empty_request_encoded_reads_in_kio_as_empty(self, version: int) -> None:
        frame = memoryview(b"".join(hot_produce.encode_request(version, 5, "c", {})))[4:]
        _, position = frames.decode_request(frame)
        assert frames.decode_entity(load_request_schema(0, version), frame, position).topic_data == ()

    def _answers(self, version: int) -> list[hot_produce.PartitionAnswer]:
        start = 12 if version >= 5 else -1
        answers = [
            hot_produce.PartitionAnswer("a", 0, 0, 1234, 1_600_000_000_000, start),
            hot_produce.PartitionAnswer("a", 1, 6, -1, -1, -1),
            hot_produce.PartitionAnswer("b", 2, 0, 2**40, -1, start),
        ]
        if version >= 8:
            answers.append(
                hot_produce.PartitionAnswer("b", 3, 87, -1, -1, start, "no", ((4, "bad"), (5, None)))
            )
        return answers

    def test_response_encoded_reads_in_kio_as_given(self, version: int) -> None:
        answers = self._answers(version)
        frame = hot_produce.encode_response(version, 77, answers, throttle_ms=40)
        assert int.from_bytes(frame[:4]) == len(frame) - 4
        cls = load_response_schema(0, version)
        response = frames.decode_response(cls, memoryview(frame)[4:])
        assert int.from_bytes(frame[4:8]) == 77
        assert response.throttle_time == _ms(40)
        found = []
        for topic in response.responses:
            for p in topic.partition_responses:
                time_ms = -1 if p.log_append_time is None else round(p.log_append_time.timestamp() * 1000)
                errors = tuple(
                    (e.batch_index, e.batch_index_error_message) for e in getattr(p, "record_errors", ())
                )
                found.append(
                    hot_produce.PartitionAnswer(
                        topic.name,
                        p.index,
                        p.error_code.value,
                        p.base_offset,
                        time_ms,
                        getattr(p, "log_start_offset", -1),
                        getattr(p, "error_message", None),
                        errors,
                    )
                )
        assert found == answers

    def test_response_round_trip_keeps_every_field(self, version: int) -> None:
        answers = self._answers(version)
        frame = memoryview(hot_produce.encode_response(version, 1, answers, throttle_ms=3))[4:]
        assert hot_produce.decode_response(frame, version) == (answers, 3)

    def test_mutilated_messages_raise_protocol_error_only(self, version: int) -> None:
        rng = random.Random(seeds.given())
        request = frames.encode_request(self._kio_request(version), 9, "me")[4:]
        response = hot_produce.encode_response(version, 1, self._answers(version))[4:]
        for _ in range(300):
            frame = _mutilated(rng, request)
            with contextlib.suppress(ProtocolError):
                _, position = frames.decode_request(frame)
                hot_produce.decode_request(frame, position, version)
            with contextlib.suppress(ProtocolError):
                hot_produce.decode_response(_mutilated(rng, response), version)


def _mutilated(rng: random.Random, frame: bytes) -> memoryview:
    changed = bytearray(frame)
    for _ in range(rng.randrange(1, 4)):
        changed[rng.randrange(len(changed))] = rng.choice([0, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return memoryview(changed)[: rng.randrange(len(changed) + 1)]


@pytest.mark.parametrize("version", hot_fetch.VERSIONS)
class TestFetch:
    def _topics(self, version: int) -> tuple[hot_fetch.Topic, hot_fetch.Topic]:
        if version >= hot_fetch.FIRST_WITH_TOPIC_IDS:
            return TOPIC_ID, uuid.UUID(int=5)
        return "flights", "t" * 200

    def _request(self, version: int) -> hot_fetch.FetchRequest:
        first, second = self._topics(version)

        def asked(topic: hot_fetch.Topic, partition: int, offset: int) -> hot_fetch.PartitionFetch:
            return hot_fetch.PartitionFetch(
                topic,
                partition,
                offset,
                1 << 20,
                current_leader_epoch=3 if version >= 9 else -1,
                last_fetched_epoch=2 if version >= 12 else -1,
                log_start_offset=1 if version >= 5 else -1,
            )

        return hot_fetch.FetchRequest(
            max_wait_ms=500,
            min_bytes=1,
            max_bytes=50 << 20,
            read_committed=True,
            partitions=[asked(first, 0, 2**40), asked(first, 1, 0), asked(second, 9, 5)],
            session_id=8 if version >= 7 else 0,
            session_epoch=1 if version >= 7 else -1,
            forgotten=[(first, 4), (first, 5)] if version >= 7 else [],
            rack_id="r1" if version >= 11 else "",
            replica_id=2,
            replica_epoch=6 if version >= 15 else -1,
        )

    def test_request_round_trip_keeps_every_field(self, version: int) -> None:
        request = self._request(version)
        frame = memoryview(hot_fetch.encode_request(version, 3, "c", request))[4:]
        head, position = frames.decode_request(frame)
        assert head == (1, version, 3, "c")
        assert hot_fetch.decode_request(frame, position, version) == request

    def test_request_encoded_reads_in_kio_and_kio_s_bytes_decode(self, version: int) -> None:
        request = self._request(version)
        encoded = hot_fetch.encode_request(version, 3, "c", request)
        cls = load_request_schema(1, version)
        _, position = frames.decode_request(memoryview(encoded)[4:])
        entity = frames.decode_entity(cls, memoryview(encoded)[4:], position)
        assert entity.max_wait == _ms(500)
        assert entity.isolation_level == 1
        assert entity.topics[0].partitions[0].fetch_offset == 2**40
        assert entity.topics[1].partitions[0].partition == 9
        again = memoryview(frames.encode_request(entity, 3, "c"))[4:]
        _, position = frames.decode_request(again)
        assert hot_fetch.decode_request(again, position, version) == request

    def _partitions(self, version: int) -> list[hot_fetch.PartitionData]:
        first, second = self._topics(version)
        start = 7 if version >= 5 else -1
        preferred = 4 if version >= 11 else -1
        diverging = (3, 99) if version >= 12 else None
        leader = (1, 8) if version >= 12 else None
        data = hot_fetch.PartitionData
        return [
            data(first, 0, 0, 100, 90, start, _records(5000), [(5, 6), (7, 8)], preferred),
            data(first, 1, 0, 100, 90, start, b"", None, preferred, diverging, leader),
            data(second, 2, 1, -1, -1, start, b"", []),
        ]

    def test_response_encoded_reads_in_kio_as_given(self, version: int) -> None:
        partitions = self._partitions(version)
        buffers = hot_fetch.encode_response(version, 77, partitions, throttle_ms=9, session_id=5)
        frame = b"".join(buffers)
        assert int.from_bytes(frame[:4]) == len(frame) - 4
        assert any(buffer is partitions[0].records for buffer in buffers), "records are passed on uncopied"
        response = frames.decode_response(load_response_schema(1, version), memoryview(frame)[4:])
        assert response.throttle_time == _ms(9)
        flat = [(t, p) for t in response.responses for p in t.partitions]
        assert len(flat) == len(partitions)
        for (topic, found), given in zip(flat, partitions, strict=True):
            name = topic.topic_id if version >= 13 else topic.topic
            assert name == given.topic
            assert found.partition_index == given.partition
            assert found.error_code == ErrorCode(given.error_code)
            assert (found.high_watermark, found.last_stable_offset) == (
                given.high_watermark,
                given.last_stable_offset,
            )
            assert (found.records or b"") == given.records
            aborted = found.aborted_transactions
            pairs = None if aborted is None else [(a.producer_id, a.first_offset) for a in aborted]
            assert pairs == given.aborted
            if version >= 12 and given.diverging:
                assert (found.diverging_epoch.epoch, found.diverging_epoch.end_offset) == given.diverging
                assert (
                    found.current_leader.leader_id,
                    found.current_leader.leader_epoch,
                ) == given.current_leader

    def test_response_of_kio_decoded_gives_its_fields(self, version: int) -> None:
        partitions = self._partitions(version)
        frame = b"".join(hot_fetch.encode_response(version, 7, partitions, error_code=0, session_id=5))
        cls = load_response_schema(1, version)
        entity = frames.decode_response(cls, memoryview(frame)[4:])
        encoded = frames.encode_response(frames.RequestHead(1, version, 7, None), entity)
        response = hot_fetch.decode_response(memoryview(encoded)[4:], version)
        assert response.session_id == (5 if version >= 7 else 0)
        assert response.partitions == partitions

    def test_mutilated_messages_raise_protocol_error_only(self, version: int) -> None:
        rng = random.Random(seeds.given())
        request = hot_fetch.encode_request(version, 3, "c", self._request(version))[4:]
        response = b"".join(hot_fetch.encode_response(version, 7, self._partitions(version)))[4:][:400]
        for _ in range(300):
            frame = _mutilated(rng, request)
            with contextlib.suppress(ProtocolError):
                _, position = frames.decode_request(frame)
                hot_fetch.decode_request(frame, position, version)
            with contextlib.suppress(ProtocolError):
                hot_fetch.decode_response(_mutilated(rng, response), version)


class Address:
    def __init__(self, host: str, port: int, rack: str | None) -> None:
        self.host, self.port, self.rack = host, port, rack


NODES = {4: Address("four", 9094, "r"), 5: Address("five", 9095, None), 6: Address("six", 9096, None)}


@pytest.mark.parametrize("version", [version for version in hot_produce.VERSIONS if version >= 10])
def test_produce_response_names_leaders_as_kio_reads_them(version: int) -> None:
    answers = [
        hot_produce.PartitionAnswer("t", 0, 6, error_message="moved", current_leader=(4, 9)),
        hot_produce.PartitionAnswer("t", 1, 0, 5),
        hot_produce.PartitionAnswer("t", 2, 6, current_leader=(5, 2)),
        hot_produce.PartitionAnswer("t", 3, 6, current_leader=(77, 2)),  # an address that nobody knows
    ]
    frame = memoryview(hot_produce.encode_response(version, 3, answers, 7, NODES))[4:]
    response = frames.decode_response(load_response_schema(0, version), frame)
    parts = response.responses[0].partition_responses
    leaders = [(part.current_leader.leader_id, part.current_leader.leader_epoch) for part in parts]
    assert leaders == [(4, 9), (-1, -1), (5, 2), (77, 2)]
    endpoints = [(node.node_id, node.host, node.port, node.rack) for node in response.node_endpoints]
    assert endpoints == [(4, "four", 9094, "r"), (5, "five", 9095, None)]
    decoded, throttle_ms = hot_produce.decode_response(frame, version)
    assert ([answer.current_leader for answer in decoded], throttle_ms) == (
        [(4, 9), None, (5, 2), (77, 2)],
        7,
    )


@pytest.mark.parametrize("version", [version for version in hot_produce.VERSIONS if version < 10])
def test_older_produce_response_names_no_leaders(version: int) -> None:
    answers = [hot_produce.PartitionAnswer("t", 0, 6, current_leader=(4, 9))]
    frame = memoryview(hot_produce.encode_response(version, 3, answers, 0, NODES))[4:]
    frames.decode_response(load_response_schema(0, version), frame)
    decoded, _ = hot_produce.decode_response(frame, version)
    assert decoded[0].current_leader is None


@pytest.mark.parametrize("version", [version for version in hot_fetch.VERSIONS if version >= 12])
def test_fetch_response_names_leaders_as_kio_reads_them(version: int) -> None:
    topic: Any = TOPIC_ID if version >= hot_fetch.FIRST_WITH_TOPIC_IDS else "t"
    given = [
        hot_fetch.PartitionData(topic, 0, 6, current_leader=(4, 9)),
        hot_fetch.PartitionData(topic, 1, 0, 5, 5, 0, b"records"),
        hot_fetch.PartitionData(topic, 2, 74, current_leader=(4, 9)),
    ]
    frame = memoryview(b"".join(hot_fetch.encode_response(version, 3, given, nodes=NODES)))[4:]
    response = frames.decode_response(load_response_schema(1, version), frame)
    parts = response.responses[0].partitions
    assert [part.current_leader.leader_id for part in parts] == [4, -1, 4]
    if version >= 16:
        (node,) = response.node_endpoints
        assert (node.node_id, node.host, node.port, node.rack) == (4, "four", 9094, "r")
    decoded = hot_fetch.decode_response(frame, version).partitions
    assert [part.current_leader for part in decoded] == [(4, 9), None, (4, 9)]


@pytest.mark.parametrize("version", [8, 9])
def test_topic_that_is_not_utf_8_is_one_that_does_not_exist_as_kio_reads_it(version: int) -> None:
    """The connection goes on: as in Apache Kafka, the partition's answer says so."""
    encoded = hot_produce.encode_request(version, 1, "", {("t\x7f", 0): b"x"})
    frame = memoryview(bytearray(b"".join(encoded)))[4:]
    frame[bytes(frame).index(0x7F)] = 0xFF
    _, position = frames.decode_request(frame)
    (batches,) = hot_produce.decode_request(frame, position, version).partitions
    (topic,) = frames.decode_entity(request_type(0, version), frame, position).topic_data
    assert batches.topic == topic.name == "t\ufffd"
