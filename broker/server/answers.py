"""Builds `kio` responses of any version from plain values, so that a handler is written once.

A handler gives the fields of the newest version it speaks, nested messages as dictionaries; fields that
the asked version does not have are left out, fields that were not given take the schema's default (zero,
empty, null). Error codes are given as plain integers, times as milliseconds. Called by handlers and by
`error_answers.py`.

The dispatcher counts the error codes that go to clients, and finds them in the answer (`errors_of`).

What has very many items is made and encoded on a thread (`answer_of`): `kio` writes in Python, some 10 µs for
each item, and everyone else would wait.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from kio.index import load_payload_module
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from millrace.broker.protocol.frames import RequestHead, encode_response

NO_ERROR = 0

MOST_ITEMS_AT_ONCE = 1_000
"""Of an answer that is made on the event loop."""


@cache
def request_type(api_key: int, version: int) -> type[Any]:
    """The `kio` class of a request. Raises KioIndexError for what kio does not know."""
    return _payload_class(api_key, version, EntityType.request)


@cache
def response_type(api_key: int, version: int) -> type[Any]:
    """The `kio` class of a response."""
    return _payload_class(api_key, version, EntityType.response)


def _payload_class(api_key: int, version: int, kind: EntityType) -> type[Any]:
    module = load_payload_module(api_key, version, kind)  # type: ignore[arg-type]
    for value in vars(module).values():
        if isinstance(value, type) and getattr(value, "__type__", None) is kind:
            return value
    raise LookupError(f"kio's {module.__name__} holds no {kind.name}")


def answer(api_key: int, version: int, **fields: Any) -> Any:
    """A response of this version. Unknown names are left out: they belong to other versions."""
    return build_entity(response_type(api_key, version), fields)


class AnswerFrame(bytes):
    """An answer that was encoded on a thread; `errors` are the codes in it."""

    errors: list[int]


async def answer_of(item_count: int, head: RequestHead, **fields: Any) -> Any:
    """As `answer`; with too many items for the event loop it is the answer's frame, made on a thread. Until
    then nobody may change what is in `fields`."""
    if item_count <= MOST_ITEMS_AT_ONCE:
        return answer(head.api_key, head.version, **fields)

    def encoded() -> bytes:
        entity = answer(head.api_key, head.version, **fields)
        frame = AnswerFrame(encode_response(head, entity))
        frame.errors = errors_of(entity)
        return frame

    return await asyncio.to_thread(encoded)


def item_count(topics: Sequence[Mapping[str, Any]]) -> int:
    """Of an answer by topics and `partitions`."""
    return sum(1 + len(topic["partitions"]) for topic in topics)


def errors_of(response: Any) -> list[int]:
    """The error codes in a response, also in one that `answer_of` has encoded; none of other frames."""
    if isinstance(response, AnswerFrame):
        return response.errors
    found: list[int] = []
    kind: type[Any] = type(response)
    if dataclasses.is_dataclass(kind) and (look := _look_for_errors(kind)) is not None:
        look(response, found)
    return found


Look = Callable[[Any, list[int]], None]


@cache
def _look_for_errors(entity_type: type[Any]) -> Look | None:
    """Adds the codes in an instance of this class to a list; None where it has no place for any."""
    codes: list[str] = []
    parts: list[tuple[str, bool, Look]] = []
    for field in dataclasses.fields(entity_type):
        if field.metadata.get("kafka_type") == "error_code":
            codes.append(field.name)
            continue
        inner = _without_none(field.type)
        is_many = get_origin(inner) is tuple
        inner = get_args(inner)[0] if is_many else inner
        if dataclasses.is_dataclass(inner) and (look := _look_for_errors(inner)) is not None:  # type: ignore[arg-type]
            parts.append((field.name, is_many, look))
    if not codes and not parts:
        return None

    def add(entity: Any, found: list[int]) -> None:
        for name in codes:
            if code := getattr(entity, name).value:
                found.append(code)
        for name, is_many, look in parts:
            part = getattr(entity, name)
            if part is not None:
                for each in part if is_many else (part,):
                    look(each, found)

    return add


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (UnionType, Union):
        return next(part for part in get_args(annotation) if part is not NoneType)
    return annotation


def build_entity(entity_type: type[Any], fields: Mapping[str, Any]) -> Any:
    """An entity of this class from plain values, by the rules above."""
    return _builder(entity_type)(fields)


Build = Callable[[Any], Any]
_builders: dict[type[Any], Build] = {}


def _builder(entity_type: type[Any]) -> Build:
    """The way from a mapping to an instance of this class, compiled once."""
    build = _builders.get(entity_type)
    if build is None:
        build = _builders[entity_type] = _compile(entity_type)
    return build


def _compile(entity_type: type[Any]) -> Build:
    plan: list[tuple[str, Build, Any, bool]] = []
    for field in dataclasses.fields(entity_type):
        convert, implicit = _converter(field.type, field.metadata.get("kafka_type", ""))
        has_default = field.default is not dataclasses.MISSING
        plan.append((field.name, convert, implicit, has_default))

    def build(values: Mapping[str, Any]) -> Any:
        arguments = {}
        for name, convert, implicit, has_default in plan:
            if name in values:
                arguments[name] = convert(values[name])
            elif not has_default:
                arguments[name] = implicit
        return entity_type(**arguments)

    return build


def _converter(annotation: Any, kafka_type: str) -> tuple[Build, Any]:
    """How to turn a plain value into the field's, and what stands for an absent one."""
    origin = get_origin(annotation)
    if origin in (UnionType, Union):
        convert, _ = _converter(_without_none(annotation), kafka_type)
        return (lambda value: None if value is None else convert(value)), None
    if origin is tuple:
        inner = get_args(annotation)[0]
        convert, _ = _converter(inner, kafka_type)
        if convert is _same:
            return tuple, ()
        return (lambda values: tuple(convert(value) for value in values)), ()
    if dataclasses.is_dataclass(annotation):
        build = _builder(annotation)  # type: ignore[arg-type]
        return build, build({})
    if kafka_type == "error_code":
        return ErrorCode, ErrorCode.none
    if kafka_type.startswith("timedelta"):
        return _milliseconds, datetime.timedelta(0)
    if kafka_type.startswith("datetime"):
        return _moment, _moment(0)
    implicit: Any = {"string": "", "bytes": b"", "records": b"", "bool": False, "float64": 0.0}.get(
        kafka_type, 0
    )
    return _same, implicit


def _same(value: Any) -> Any:
    return value


def _milliseconds(value: Any) -> datetime.timedelta:
    return datetime.timedelta(milliseconds=value)


def _moment(value: Any) -> datetime.datetime:
    if isinstance(value, datetime.datetime):
        return value
    return datetime.datetime.fromtimestamp(value / 1000, datetime.UTC)
