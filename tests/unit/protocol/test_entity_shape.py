"""The check before `kio` reads, with `kio`'s own writer as the judge of what is well formed."""

from __future__ import annotations

import dataclasses
import datetime
import random
import struct
import subprocess
import sys
from io import BytesIO
from typing import Any

import pytest
from kio.serial import entity_reader, entity_writer

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol import gradual_reader
from millrace.broker.protocol.entity_shape import NO_LIMIT, checked
from millrace.broker.protocol.frames import Api, decode_entity
from millrace.broker.server.answers import build_entity, request_type, response_type
from tests.fuzz.frames import Seeds
from tests.waiting import patience


def known_types() -> list[type[Any]]:
    found = []
    for api_key in range(93):
        for version in range(25):
            for type_of in (request_type, response_type):
                try:
                    found.append(type_of(api_key, version))
                except LookupError:
                    continue
                except Exception as error:
                    assert "Failed mapping" in str(error) or "nknown" in type(error).__name__, error
    return found


TYPES = known_types()


def written(entity: Any) -> bytes:
    out = BytesIO()
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


def random_entity(entity_type: type[Any], rng: random.Random) -> Any:
    return build_entity(entity_type, Seeds([], rng)._fields(entity_type, 0))


def end_of(entity_type: type[Any], data: bytes) -> None:
    """The check passes exactly when nothing is missing: a byte less must be refused."""
    assert checked(entity_type, memoryview(data), 0, NO_LIMIT) == (memoryview(data), 0)
    assert checked(entity_type, memoryview(data), 0, NO_LIMIT, mends=True) == (memoryview(data), 0)
    if data:
        with pytest.raises(ProtocolError):
            checked(entity_type, memoryview(data[:-1]), 0, NO_LIMIT)


def test_every_message_of_every_version_passes_and_a_byte_less_does_not() -> None:
    rng = random.Random(3)
    assert len(TYPES) > 550
    for entity_type in TYPES:
        for _ in range(4):
            entity = random_entity(entity_type, rng)
            data = written(entity)
            end_of(entity_type, data)
            decoded = decode_entity(entity_type, data, 0)
            assert decode_entity(entity_type, written(decoded), 0) == decoded
            assert decode_entity(entity_type, data, 0, gradually=True) == decoded


def test_a_reader_beside_which_others_go_on_is_native_for_one_item_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The native one keeps the interpreter's lock until it returns."""
    sizes: list[int] = []

    def counting(entity_type: type[Any]) -> Any:
        native = entity_reader(entity_type)

        def read(buffer: memoryview, position: int) -> Any:
            found = native(buffer, position)
            sizes.append(found[1])
            return found

        return read

    monkeypatch.setattr(gradual_reader, "_readers", {})
    monkeypatch.setattr(gradual_reader, "entity_reader", counting)
    partitions = [{"partition_index": number, "committed_offset": 0} for number in range(10)]
    topics = [{"name": f"t{number}", "partitions": partitions} for number in range(5)]
    entity = build_entity(request_type(Api.OFFSET_COMMIT, 8), {"group_id": "g", "topics": topics})
    assert decode_entity(type(entity), written(entity), 0, gradually=True) == entity
    assert len(sizes) == 50 and max(sizes) < 30


def test_unknown_tagged_fields_are_left_out() -> None:
    """Any newer peer may send some, in any structure (KIP-482)."""
    rng = random.Random(5)
    count = 0
    for entity_type in TYPES:
        entity = random_entity(entity_type, rng)
        data = written(entity)
        has_tags = any("tag" in field.metadata for field in dataclasses.fields(entity_type))
        if entity_type.__flexible__ and not has_tags:
            count += 1
            more = data[:-1] + b"\x02\x63\x03abc\xe8\x07\x00"
            assert decode_entity(entity_type, more, 0) == decode_entity(entity_type, data, 0)
            assert decode_entity(entity_type, more, 0, gradually=True) == decode_entity(entity_type, data, 0)
    assert count > 250


def test_unknown_tagged_fields_inside_a_known_one() -> None:
    """CurrentLeader (tag 0 of a partition in a produce response) with a field of a later version."""
    entity_type = response_type(Api.PRODUCE, 10)
    leader = struct.pack(">ii", 4, 9)
    head = b"\x02\x02t\x02" + struct.pack(">ihqqq", 0, 6, -1, -1, -1) + b"\x01\x00"
    tail = b"\x00" + bytes(4) + b"\x00"
    plain = head + b"\x01\x00\x09" + leader + b"\x00" + tail
    newer = head + b"\x02\x00\x0d" + leader + b"\x01\x05\x02ab" + b"\x07\x01z" + tail
    decoded = decode_entity(entity_type, newer, 0)
    assert decoded == decode_entity(entity_type, plain, 0)
    assert decoded.responses[0].partition_responses[0].current_leader.leader_id == 4


def test_unknown_tagged_fields_inside_an_array() -> None:
    fields = b"\x01\x58\x01z"  # one field, tag 88, one byte
    plain = b"\x03" + b"\x02a\x00" + b"\x02b\x00" + b"\x01\x00\x00\x00"
    entity_type = request_type(Api.METADATA, 9)
    tagged = b"\x03" + b"\x02a" + fields + b"\x02b" + fields + b"\x01\x00\x00" + fields
    assert decode_entity(entity_type, tagged, 0) == decode_entity(entity_type, plain, 0)


@pytest.mark.parametrize("position", [0, 7])
def test_counts_that_lie_are_refused_before_memory_is_taken(position: int) -> None:
    """Each of these ends a process that lets `kio` read it."""
    frames = {
        (Api.ALTER_CLIENT_QUOTAS, 1): "45ced4b5c32fb5cea3487fffffff",
        (Api.LIST_GROUPS, 4): "fda693d87dd37605b32d",
        (Api.DELETE_GROUPS, 2): "8fa2d3cf5b0a6e0c00ed83",
        (Api.METADATA, 9): "ffffffff7f00",
        (Api.METADATA, 1): "7fffffff",
    }
    for (api, version), data in frames.items():
        with pytest.raises(ProtocolError):
            decode_entity(request_type(api, version), bytes(position) + bytes.fromhex(data), position)


def test_process_survives_what_random_bytes_announce() -> None:
    """In a process of its own: the failure would be its end."""
    program = """
import random
from millrace.broker.errors import ProtocolError
from millrace.broker.protocol.frames import decode_entity
from tests.unit.protocol.test_entity_shape import TYPES
rng = random.Random(9)
for _ in range(5_000):
    data = rng.randbytes(rng.choice([1, 3, 10, 60])) + rng.choice([b"", b"\\x7f\\xff\\xff\\xff"])
    try:
        decode_entity(rng.choice(TYPES), data, 0)
    except (ProtocolError, ValueError, KeyError):
        pass
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(120)
    )
    assert done.stdout == "alive\n", done.stderr[-500:]


def test_null_where_an_array_must_be_is_refused() -> None:
    with pytest.raises(ProtocolError, match="topic_names is null"):
        decode_entity(request_type(Api.DELETE_TOPICS, 5), b"\x00\x00\x00\x00\x00\x00", 0)
    assert decode_entity(request_type(Api.METADATA, 9), b"\x00\x01\x00\x00\x00", 0).topics is None


def test_items_are_bounded() -> None:
    entity_type = request_type(Api.DELETE_GROUPS, 2)
    data = written(build_entity(entity_type, {"groups_names": ["g"] * 100}))
    decode_entity(entity_type, data, 0, most_items=100)
    with pytest.raises(ProtocolError, match="too many items"):
        decode_entity(entity_type, data, 0, most_items=99)


def legacy(text: bytes) -> bytes:
    return struct.pack(">h", len(text)) + text


def commit_v2(retention_ms: int, metadata: bytes, group: bytes = b"g") -> bytes:
    return (
        legacy(group)
        + struct.pack(">i", -1)
        + legacy(b"")
        + struct.pack(">qi", retention_ms, 1)
        + legacy(b"t")
        + struct.pack(">iiq", 1, 0, 5)
        + legacy(metadata)
    )


def test_strings_that_are_not_utf_8_are_read_as_apache_kafka_reads_them() -> None:
    read = decode_entity(request_type(Api.OFFSET_COMMIT, 2), commit_v2(-1, b"\xff\xfe", b"gr\xe9"), 0)
    assert read.group_id == "gr\ufffd"
    assert read.topics[0].name == "t"
    assert read.topics[0].partitions[0].committed_metadata == "\ufffd\ufffd"
    with pytest.raises(ProtocolError, match="not UTF-8"):  # there is no room for what would replace it
        decode_entity(request_type(Api.OFFSET_COMMIT, 2), commit_v2(-1, b"\xff" * 20_000), 0)


def test_compact_strings_too_with_unknown_tagged_fields_around() -> None:
    unknown = b"\x01\x05\x00"
    body = b"\x04gr\xe9" + struct.pack(">i", 7) + b"\x02m\x00" + unknown  # heartbeat v4
    read = decode_entity(request_type(Api.HEARTBEAT, 4), body, 0)
    assert (read.group_id, read.generation_id, read.member_id) == ("gr\ufffd", 7, "m")
    assert read.group_instance_id is None


@pytest.mark.parametrize(("told", "read"), [(0, 0), (27, 27), (134, -1), (200, -1), (-2, -1), (32_767, -1)])
def test_error_codes_of_newer_releases_are_unknown_server_errors(told: int, read: int) -> None:
    answered = response_type(Api.HEARTBEAT, 1)
    assert decode_entity(answered, struct.pack(">ih", 0, told), 0).error_code == read
    parts = struct.pack(">iihih", 2, 0, told, 1, 0)
    body = struct.pack(">i", 1) + legacy(b"t") + parts
    (topic,) = decode_entity(response_type(Api.OFFSET_COMMIT, 2), body, 0).topics
    assert [(part.partition_index, part.error_code) for part in topic.partitions] == [(0, read), (1, 0)]


@pytest.mark.parametrize("sign", [1, -1])
def test_times_longer_than_are_counted_become_the_longest(sign: int) -> None:
    for time_ms in (sign * (2**63 - 1), sign * 8 * 10**16, sign * (2**63 // 1000 + 1)):
        read = decode_entity(request_type(Api.OFFSET_COMMIT, 2), commit_v2(time_ms, b""), 0)
        assert read.retention_time // datetime.timedelta(milliseconds=1) == sign * (2**63 // 1000)
        assert read.topics[0].partitions[0].committed_offset == 5
