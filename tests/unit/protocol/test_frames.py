"""Request and response headers, and the rule of each API's flexible versions."""

from __future__ import annotations

import datetime

import pytest
from kio.index import load_request_schema
from kio.schema.api_versions.v3.response import ApiVersion, ApiVersionsResponse
from kio.schema.errors import ErrorCode
from kio.schema.index import api_key_map, schema_name_map
from kio.schema.metadata.v1.request import MetadataRequest as MetadataRequestV1
from kio.schema.metadata.v12.request import MetadataRequest
from kio.static.primitive import i16, i32Timedelta

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol import frames
from millrace.broker.protocol.frames import Api, RequestHead

REQUEST = MetadataRequest(
    topics=None, allow_auto_topic_creation=True, include_topic_authorized_operations=False
)


@pytest.mark.parametrize("api", list(Api))
def test_flexible_versions_are_the_schemas(api: Api) -> None:
    for version in schema_name_map[api_key_map[api]]:
        assert load_request_schema(api, version).__flexible__ is frames.is_flexible(api, version)


@pytest.mark.parametrize("client_id", [None, "", "mirror-é"])
@pytest.mark.parametrize("request_entity", [REQUEST, MetadataRequestV1(topics=())])
def test_request_round_trip_keeps_head_and_body(client_id: str | None, request_entity: object) -> None:
    frame = frames.encode_request(request_entity, 41, client_id)
    assert int.from_bytes(frame[:4]) == len(frame) - 4
    view = memoryview(bytearray(frame))[4:]
    head, position = frames.decode_request(view)
    version = type(request_entity).__version__  # type: ignore[attr-defined]
    assert head == RequestHead(Api.METADATA, version, 41, client_id)
    assert frames.decode_entity(type(request_entity), view, position) == request_entity


def test_api_versions_response_has_no_tagged_fields_in_its_header() -> None:
    response = ApiVersionsResponse(
        error_code=ErrorCode.none,
        api_keys=(ApiVersion(api_key=i16(0), min_version=i16(3), max_version=i16(9)),),
        throttle_time=i32Timedelta.parse(datetime.timedelta()),
    )
    frame = memoryview(frames.encode_response(RequestHead(Api.API_VERSIONS, 3, 7, None), response))[4:]
    assert bytes(frame[:6]) == b"\x00\x00\x00\x07\x00\x00", "correlation id, then at once the error code"
    assert frames.decode_response(ApiVersionsResponse, frame) == response


def test_unknown_version_of_api_versions_is_read_as_flexible() -> None:
    frame = bytearray(frames.encode_request(REQUEST, 1, "c"))[4:]
    frame[0:4] = Api.API_VERSIONS.to_bytes(2) + (99).to_bytes(2)
    head, position = frames.decode_request(memoryview(frame))
    assert (head.api_key, head.version, position) == (18, 99, 12)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00" * 9,
        b"\x00\x03\x00\x01\x00\x00\x00\x01\x00\x05abc",  # client id announced longer than it is
        b"\x00\x03\x00\x01\x00\x00\x00\x01\xff\xfe",  # negative size that is not null
        b"\x00\x03\x00\x0c\x00\x00\x00\x01\x00\x01a",  # flexible, tagged fields are missing
        b"\x00\x03\x00\x0c\x00\x00\x00\x01\x00\x01a\x01\x00\xff\xff\xff\xff\x0f",  # a tag of 4 GB
    ],
)
def test_malformed_request_header_raises_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.decode_request(memoryview(frame))


def test_malformed_body_raises_protocol_error() -> None:
    frame = memoryview(frames.encode_request(REQUEST, 1, "c"))[4:]
    _, position = frames.decode_request(frame)
    with pytest.raises(ProtocolError, match="MetadataRequest"):
        frames.decode_entity(MetadataRequest, frame[:-2], position)


def test_client_id_that_is_not_utf_8_is_read_as_apache_kafka_reads_it() -> None:
    head, position = frames.decode_request(memoryview(b"\x00\x03\x00\x01\x00\x00\x00\x01\x00\x02a\xe9"))
    assert (head.client_id, position) == ("a\ufffd", 12)
