"""No answer to a request that came to nothing says nothing: for every API and version that kio knows, the
error code stands in each item that the request names, or the connection is closed."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin
from uuid import UUID

import pytest
import structlog
from kio.schema.errors import ErrorCode
from kio.schema.index import api_key_map, schema_name_map

from millrace.broker.errors import (
    InvalidRequest,
    KafkaError,
    ProtocolError,
    Unanswered,
    UnknownServerError,
    UnsupportedVersion,
)
from millrace.broker.protocol.frames import Api, decode_response, encode_request
from millrace.broker.server.answers import build_entity, request_type, response_type
from millrace.broker.server.dispatch import Dispatcher, Frame, Handler
from millrace.broker.server.registry import handlers, spoken_apis
from millrace.broker.telemetry.metrics import BrokerMetrics

KNOWN = [
    (key, version) for key, name in sorted(api_key_map.items()) for version in sorted(schema_name_map[name])
]
SPOKEN = {handler.api_key: handler for handler in handlers()}
REFUSED = [
    (key, version)
    for key, version in KNOWN
    if key != Api.API_VERSIONS and (key not in SPOKEN or version not in SPOKEN[key].versions)
]
FAILING = [(key, version) for key, version in KNOWN if key in SPOKEN and version in SPOKEN[key].versions]

NAMED: dict[int, list[tuple[str, str]]] = {
    Api.PRODUCE: [
        ("topic_data.name", "responses.name"),
        ("topic_data.topic_id", "responses.topic_id"),
        ("topic_data.partition_data.index", "responses.partition_responses.index"),
    ],
    Api.FETCH: [
        ("topics.topic", "responses.topic"),
        ("topics.partitions.partition", "responses.partitions.partition_index"),
    ],
    Api.LIST_OFFSETS: [("topics.name",) * 2, ("topics.partitions.partition_index",) * 2],
    Api.METADATA: [("topics.name",) * 2, ("topics.topic_id",) * 2],
    Api.OFFSET_COMMIT: [
        ("topics.name",) * 2,
        ("topics.topic_id",) * 2,
        ("topics.partitions.partition_index",) * 2,
    ],
    Api.OFFSET_FETCH: [
        ("topics.name",) * 2,
        ("topics.partition_indexes", "topics.partitions.partition_index"),
        ("groups.group_id",) * 2,
    ],
    Api.FIND_COORDINATOR: [("coordinator_keys", "coordinators.key")],
    Api.DESCRIBE_GROUPS: [("groups", "groups.group_id")],
    Api.CREATE_TOPICS: [("topics.name",) * 2],
    Api.DELETE_TOPICS: [
        ("topic_names", "responses.name"),
        ("topics.name", "responses.name"),
        ("topics.topic_id", "responses.topic_id"),
    ],
    Api.DELETE_RECORDS: [("topics.name",) * 2, ("topics.partitions.partition_index",) * 2],
    Api.OFFSET_FOR_LEADER_EPOCH: [("topics.topic",) * 2, ("topics.partitions.partition",) * 2],
    Api.ADD_PARTITIONS_TO_TXN: [
        ("v3_and_below_topics.name", "results_by_topic_v3_and_below.name"),
        (
            "v3_and_below_topics.partitions",
            "results_by_topic_v3_and_below.results_by_partition.partition_index",
        ),
    ],
    Api.WRITE_TXN_MARKERS: [
        ("markers.producer_id",) * 2,
        ("markers.topics.name",) * 2,
        ("markers.topics.partition_indexes", "markers.topics.partitions.partition_index"),
    ],
    Api.TXN_OFFSET_COMMIT: [("topics.name",) * 2, ("topics.partitions.partition_index",) * 2],
    Api.CREATE_ACLS: [],
    Api.DELETE_ACLS: [],
    Api.DESCRIBE_CONFIGS: [
        ("resources.resource_type", "results.resource_type"),
        ("resources.resource_name", "results.resource_name"),
    ],
    Api.ALTER_CONFIGS: [
        ("resources.resource_type", "responses.resource_type"),
        ("resources.resource_name", "responses.resource_name"),
    ],
    Api.INCREMENTAL_ALTER_CONFIGS: [
        ("resources.resource_type", "responses.resource_type"),
        ("resources.resource_name", "responses.resource_name"),
    ],
    Api.CREATE_PARTITIONS: [("topics.name", "results.name")],
    Api.DELETE_GROUPS: [("groups_names", "results.group_id")],
    Api.ELECT_LEADERS: [
        ("topic_partitions.topic", "replica_election_results.topic"),
        ("topic_partitions.partitions", "replica_election_results.partition_result.partition_id"),
    ],
    Api.ALTER_CLIENT_QUOTAS: [
        ("entries.entity.entity_type",) * 2,
        ("entries.entity.entity_name",) * 2,
    ],
    Api.DESCRIBE_PRODUCERS: [
        ("topics.name",) * 2,
        ("topics.partition_indexes", "topics.partitions.partition_index"),
    ],
    Api.DESCRIBE_TRANSACTIONS: [("transactional_ids", "transaction_states.transactional_id")],
    Api.DESCRIBE_TOPIC_PARTITIONS: [("topics.name",) * 2],
}
"""Where a request names what the response repeats; as far as a version has both. The last is the item."""

CLOSED = {
    Api.ALTER_REPLICA_LOG_DIRS: {1, 2},
    Api.DESCRIBE_LOG_DIRS: {1, 2},  # lists folders, of which the request names none
    Api.ALTER_USER_SCRAM_CREDENTIALS: {0},
    **{key: {0, 1} for key in (69, 77, 83, 84, 85, 86, 87, 89, 90)},  # share groups and other newer ones
}
"""Their answers have no place for the code, or nothing is known here of their items; all but the second are
not spoken."""


# -- a request that names two of everything ----------------------------------------------------------


def two_of_each(entity_type: type[Any]) -> Any:
    """An instance in which every array has two items, and no two items a name in common."""
    return _instance(entity_type, itertools.count(1))


def _instance(entity_type: type[Any], numbers: Iterator[int]) -> Any:
    values = {
        field.name: _value(field.type, field.metadata.get("kafka_type", ""), numbers)
        for field in dataclasses.fields(entity_type)
    }
    return build_entity(entity_type, {name: value for name, value in values.items() if value is not ...})


def _value(annotation: Any, kafka_type: str, numbers: Iterator[int]) -> Any:
    origin = get_origin(annotation)
    if origin in (UnionType, Union):
        return _value(
            next(part for part in get_args(annotation) if part is not NoneType), kafka_type, numbers
        )
    if origin is tuple:
        inner = get_args(annotation)[0]
        return [_value(inner, kafka_type, numbers) for _ in range(2)]
    if dataclasses.is_dataclass(annotation):
        names = {field.name: field for field in dataclasses.fields(annotation)}
        return {
            name: value
            for name, field in names.items()
            if (value := _value(field.type, field.metadata.get("kafka_type", ""), numbers)) is not ...
        }
    number = next(numbers)
    simple: dict[str, Any] = {"string": f"n{number}", "uuid": UUID(int=number), "bytes": b"", "records": b""}
    if kafka_type in simple:
        return simple[kafka_type]
    return number % 100 if kafka_type.startswith(("int", "uint")) else ...


def at(value: Any, path: str) -> list[Any] | None:
    """Every value at a dotted path, in order; None where the version has no such field."""
    values = [value]
    for name in path.split("."):
        if not all(hasattr(each, name) for each in values):
            return None
        parts = [getattr(each, name) for each in values]
        values = [item for part in parts for item in (part if isinstance(part, tuple) else (part,))]
    return values


def codes_of(value: Any) -> list[int]:
    if isinstance(value, ErrorCode):
        return [int(value)]
    if isinstance(value, tuple):
        return [code for item in value for code in codes_of(item)]
    if dataclasses.is_dataclass(value):
        return [code for field in dataclasses.fields(value) for code in codes_of(getattr(value, field.name))]
    return []


def said(key: int, version: int, frame: Frame, request: Any, code: int) -> None:
    """The frame says `code` where a client reads it."""
    assert isinstance(frame, bytes)
    response = decode_response(response_type(key, version), memoryview(frame)[4:])
    if hasattr(response, "error_code"):
        assert int(response.error_code) == code
        return
    pairs = [(at(request, asked), at(response, given)) for asked, given in NAMED[key]]
    shared = [(asked, given) for asked, given in pairs if asked is not None and given is not None]
    for asked, given in shared:
        assert given == asked
    codes = codes_of(response)
    assert set(codes) == {code}
    items = 2 if key in (Api.CREATE_ACLS, Api.DELETE_ACLS, Api.ALTER_CLIENT_QUOTAS) else len(shared[-1][1])
    assert len(codes) == items >= 2


def asked_of(table: Dispatcher, request: Any) -> Frame:
    """What a dispatcher answers to a request."""

    async def ask() -> Any:
        frame = memoryview(encode_request(request, 9, "c"))[4:]
        answer = table.dispatch(frame, "h")
        return await answer if asyncio.iscoroutine(answer) else answer

    with structlog.testing.capture_logs():
        return asyncio.run(ask())


# -- what is not spoken ------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "version"), REFUSED)
def test_version_that_is_not_spoken_is_said_in_each_item_or_closes_the_connection(
    key: int, version: int
) -> None:
    table = Dispatcher(handlers(), None, BrokerMetrics())
    request = two_of_each(request_type(key, version))
    try:
        frame = asked_of(table, request)
    except ProtocolError as error:
        assert error.kind == "version"
        assert version in CLOSED.get(key, ()), error
    else:
        said(key, version, frame, request, UnsupportedVersion.code)


def test_produce_of_a_version_that_is_not_spoken_and_wants_no_answer_closes_the_connection() -> None:
    kind = request_type(Api.PRODUCE, 12)
    request = build_entity(kind, {"acks": 0, "topic_data": [{"name": "t", "partition_data": [{"index": 0}]}]})
    with pytest.raises(ProtocolError) as refused:
        asked_of(Dispatcher(handlers(), None, BrokerMetrics()), request)
    assert refused.value.kind == "acks=0"


# -- what fails --------------------------------------------------------------------------------------


def failing(key: int, failure: Exception) -> Dispatcher:
    """A dispatcher whose handler of this API fails."""
    handler = SPOKEN[key]

    async def fail(_request: Any, _context: Any) -> Any:
        raise failure

    def fail_at_once(*_arguments: Any) -> Any:
        raise failure

    broken = Handler(key, handler.versions, handler.frame_versions, fail, fail_at_once)
    return Dispatcher([broken], None, BrokerMetrics())


@pytest.mark.parametrize("failure", [RuntimeError("a mistake of ours"), InvalidRequest("no")])
@pytest.mark.parametrize(("key", "version"), FAILING)
def test_failed_request_is_said_in_each_item_or_closes_the_connection(
    key: int, version: int, failure: Exception
) -> None:
    request = two_of_each(request_type(key, version))
    code = failure.code if isinstance(failure, KafkaError) else UnknownServerError.code
    table = failing(key, failure)
    try:
        frame = asked_of(table, request)
    except Unanswered as error:
        assert error.__cause__ is failure
        assert version in CLOSED.get(key, ()), error
    else:
        said(key, version, frame, request, code)


@pytest.mark.parametrize("fields", [{"topics": None}, {"topics": []}])
def test_failed_request_that_names_nothing_closes_the_connection(fields: dict[str, Any]) -> None:
    request = build_entity(request_type(Api.METADATA, 12), fields)
    with pytest.raises(Unanswered, match="metadata request of version 12"):
        asked_of(failing(Api.METADATA, RuntimeError("a mistake of ours")), request)


def test_failed_request_of_a_version_without_a_schema_closes_the_connection() -> None:
    """ListOffsets 0 is written by hand: nothing is known here of its items."""

    def fail(*_arguments: Any) -> Any:
        raise RuntimeError("a mistake of ours")

    table = Dispatcher([Handler(Api.LIST_OFFSETS, range(1), range(1), None, fail)], None, BrokerMetrics())
    with pytest.raises(Unanswered):
        table.dispatch(memoryview(b"\x00\x02\x00\x00\x00\x00\x00\x09\xff\xff"), "h")


def test_every_api_of_which_items_are_known_is_asked() -> None:
    spoken = {api.api_key for api in spoken_apis()}
    assert {key for key, _ in FAILING} == spoken
    assert not set(CLOSED) & set(NAMED)
