"""Responses of every version from plain values, and what dispatch makes of requests it cannot serve."""

from __future__ import annotations

import asyncio
import random
import struct
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import InvalidTopic, ProtocolError, UnknownServerError, UnsupportedVersion
from millrace.broker.protocol.frames import Api, decode_response
from millrace.broker.server import answers
from millrace.broker.server.answers import answer, build_entity, errors_of, request_type, response_type
from millrace.broker.server.dispatch import Dispatcher, Handler
from millrace.broker.server.registry import MODULES, handlers, spoken_apis
from millrace.broker.telemetry.metrics import BrokerMetrics
from tests import seeds


def test_fields_of_newer_versions_are_left_out_and_missing_ones_are_empty() -> None:
    old = answer(
        Api.METADATA, 0, brokers=[{"node_id": 1, "host": "h", "port": 9, "rack": "r"}], cluster_id="c"
    )
    assert (old.brokers[0].host, old.topics) == ("h", ())
    assert not hasattr(old, "cluster_id")
    new = answer(Api.METADATA, 12, throttle_time=1_500)
    assert (new.throttle_time, new.cluster_id, new.controller_id) == (timedelta(seconds=1.5), None, -1)


def test_spoken_ranges_are_those_of_the_handlers() -> None:
    spoken = {api.api_key: api for api in spoken_apis()}
    assert len(spoken) == len(MODULES)
    for handler in handlers():
        assert spoken[handler.api_key].last == handler.versions[-1]
        assert spoken[handler.api_key].first <= handler.versions[0]
        for version in handler.versions:
            if version not in handler.frame_versions:
                assert request_type(handler.api_key, version)


# -- dispatch ----------------------------------------------------------------------------------------


def dispatcher(handle: Any) -> Dispatcher:
    served = [Handler(int(Api.METADATA), range(10), range(0), handle, None)]
    return Dispatcher([*served, *handlers()[13:14]], SimpleNamespace(spoken=spoken_apis()), BrokerMetrics())


def frame_of(api: Api, version: int, **fields: Any) -> memoryview:
    from millrace.broker.protocol.frames import encode_request

    return memoryview(encode_request(build_entity(request_type(api, version), fields), 9, "c"))[4:]


def dispatch_metadata(handle: Any) -> Any:
    async def scenario() -> Any:
        return await dispatcher(handle).dispatch(frame_of(Api.METADATA, 9, topics=[{"name": "t"}]), "h")

    frame = asyncio.run(scenario())
    return decode_response(response_type(Api.METADATA, 9), memoryview(frame)[4:])


def test_refusal_raised_by_a_handler_is_answered_and_the_connection_goes_on() -> None:
    async def refuse(_request: Any, _context: Any) -> Any:
        raise InvalidTopic("no")

    async def fail(_request: Any, _context: Any) -> Any:
        raise RuntimeError("a mistake of ours")

    assert [topic.error_code for topic in dispatch_metadata(refuse).topics] == [
        ErrorCode.invalid_topic_exception
    ]
    assert [topic.error_code for topic in dispatch_metadata(fail).topics] == [ErrorCode.unknown_server_error]
    metrics = BrokerMetrics()
    served = Handler(int(Api.METADATA), range(10), range(0), fail, None)

    async def scenario() -> None:
        request = frame_of(Api.METADATA, 9, topics=[{"name": "t"}])
        await Dispatcher([served], None, metrics).dispatch(request, "h")

    asyncio.run(scenario())
    assert metrics.error_counts == {UnknownServerError.code: 1}


@pytest.mark.parametrize("most", [0, 1_000], ids=["on a thread", "on the loop"])
def test_every_code_in_an_answer_is_counted(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(answers, "MOST_ITEMS_AT_ONCE", most)

    async def some(_request: Any, context: Any) -> Any:
        partitions = [{"partition_index": number, "error_code": 5 * (number % 2)} for number in range(4)]
        topics = [
            {"error_code": 0, "name": "t", "partitions": partitions},
            {"error_code": 3, "name": "nobodys", "partitions": []},
        ]
        return await answers.answer_of(3, context.head, topics=topics)

    metrics = BrokerMetrics()
    served = Handler(int(Api.METADATA), range(10), range(0), some, None)

    async def scenario() -> None:
        request = frame_of(Api.METADATA, 9, topics=[{"name": "t"}])
        await Dispatcher([served], None, metrics).dispatch(request, "h")

    asyncio.run(scenario())
    assert metrics.error_counts == {5: 2, 3: 1}


def test_codes_are_found_wherever_a_schema_has_a_place_for_one() -> None:
    at_the_top = answer(Api.HEARTBEAT, 4, error_code=25)
    deep = answer(
        Api.ADD_PARTITIONS_TO_TXN,
        4,
        results_by_transaction=[
            {
                "transactional_id": "t",
                "topic_results": [
                    {"results_by_partition": [{"partition_error_code": code} for code in (55, 0)]}
                ],
            }
        ],
    )
    nowhere = answer(Api.METADATA, 9, topics=[])
    frames = (b"", bytearray(b"1"), [b"2"], None)
    assert [errors_of(each) for each in (at_the_top, deep, nowhere, *frames)] == [[25], [55], *[[]] * 5]


@pytest.mark.parametrize(("api_key", "version"), [(500, 0), (-1, 0), (3, -1), (1, 900)])
def test_what_has_no_schema_is_answered_with_code_35(api_key: int, version: int) -> None:
    frame = struct.pack(">hhih", api_key, version, 77, -1) + b"\x00"
    answered = dispatcher(None).dispatch(memoryview(frame), "h")
    assert isinstance(answered, bytes)
    size, correlation_id = struct.unpack_from(">ii", answered)
    assert (size, correlation_id) == (len(answered) - 4, 77)
    assert struct.pack(">h", UnsupportedVersion.code) in answered[8:]


def test_random_bytes_never_raise_anything_but_a_protocol_error() -> None:
    rng = random.Random(seeds.given())

    async def nothing(_request: Any, _context: Any) -> Any:
        return None

    served = [
        handler._replace(handle=nothing, handle_frame=None, frame_versions=range(0))
        for handler in handlers()
        if handler.api_key not in (Api.PRODUCE, Api.FETCH, Api.LIST_OFFSETS)
    ]
    table = Dispatcher(served, None, BrokerMetrics())

    async def scenario() -> None:
        for _ in range(3_000):
            handler = rng.choice(served)
            head = struct.pack(">hhih", handler.api_key, rng.choice(handler.versions), 1, -1)
            body = rng.randbytes(rng.choice([0, 1, 3, 10, 60]))
            if rng.random() < 0.5:
                body = body.replace(b"\x80", b"\x00") + b"\x7f\xff\xff\xff"
            try:
                answered = table.dispatch(memoryview(head + body), "h")
            except ProtocolError:
                continue
            await answered  # type: ignore[misc]

    asyncio.run(scenario())


def test_failure_of_a_hot_handler_is_answered_and_logged_once() -> None:
    def fail(*_arguments: Any) -> Any:
        raise RuntimeError("a mistake of ours")

    metrics = BrokerMetrics()
    served = Handler(int(Api.METADATA), range(10), range(10), None, fail)
    request = frame_of(Api.METADATA, 9, topics=[{"name": "t"}])
    answered = Dispatcher([served], None, metrics).dispatch(request, "h")
    assert isinstance(answered, bytes)
    assert metrics.error_counts == {UnknownServerError.code: 1}
