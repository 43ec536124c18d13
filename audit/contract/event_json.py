"""Events as JSON: one table for each type says how every field is written and what is believed of it. Pure.

Called by everything that publishes events (`encode_event`) and by `event_ledger`, the job's state and tools
(`decode_event`). The tables are the contract: EVENTS.md is tested against them.

Invariant: whatever bytes a stranger wrote, `decode_event` returns an event whose fields are all within their
ranges, None, or raises InvalidEvent with the name of the field. Texts of JSON that readers disagree about
(duplicate keys, NaN, another encoding than UTF-8) are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from millrace.audit.contract import sequence_set
from millrace.audit.contract.content_digest import digest_text
from millrace.audit.contract.event_values import (
    EVENT_VERSION,
    STATE_RANK,
    CountEvent,
    Event,
    GapEvent,
    InvalidEvent,
    StreamEvent,
    TierEvent,
)
from millrace.audit.contract.header import MAX_CREATED_MS, MAX_PRODUCER_NAME_SIZE, MAX_SEQUENCE
from millrace.broker.protocol import gap_events

MAX_TEXT_SIZE = 1024
MAX_TOPIC_SIZE = 249
MAX_UNTOLD = 100
_REQUIRED: Any = object()
_HEXADECIMAL = frozenset("0123456789abcdef")


class _Refused(ValueError):
    """What a field is not."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a field's value is read (raises _Refused) and written."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of the JSON object. `absent`: what its absence means; `quiet`: so it is not written then."""

    name: str
    kind: _Kind
    attribute: str = ""
    absent: Any = _REQUIRED
    quiet: bool = False

    @property
    def target(self) -> str:
        return self.attribute or self.name


def _text(low: int = 0, high: int = MAX_TEXT_SIZE) -> _Kind:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not low <= len(value.encode("utf-8", "replace")) <= high:
            raise _Refused(f"is not a text of {low} to {high} bytes")
        if not value.isprintable():
            raise _Refused("has control characters")
        return value

    return _Kind(read)


def _integer(low: int = 0, high: int = MAX_SEQUENCE) -> _Kind:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _Refused(f"is not a whole number from {low} to {high}")
        return value

    return _Kind(read)


def _read_hexadecimal(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 16 or not _HEXADECIMAL.issuperset(value):
        raise _Refused("is not 16 hexadecimal digits, lower case")
    return value


def _read_state(value: Any) -> str:
    if not isinstance(value, str) or value not in STATE_RANK:
        raise _Refused("is not a stream state: opened, heartbeat or closed")
    return value


def _read_truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Refused("is neither true nor false")
    return value


def _read_sequences(value: Any) -> Any:
    try:
        return sequence_set.from_json(value)
    except sequence_set.InvalidSequenceSet as error:
        raise _Refused(str(error)) from error


def _read_places(value: Any) -> tuple[tuple[int, int], ...]:
    places: dict[int, int] = {}
    for each in value if isinstance(value, list | tuple) else (None,):
        if (
            not isinstance(each, list | tuple)
            or len(each) != 2
            or not all(type(part) is int for part in each)
        ):
            raise _Refused("is not a list of [partition, offset]")
        partition, offset = each
        if not (0 <= partition < 1 << 31 and 0 <= offset <= MAX_SEQUENCE) or partition in places:
            raise _Refused("is not a list of [partition, offset], each partition once")
        places[partition] = offset
    return tuple(sorted(places.items()))


def _read_times(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_UNTOLD:
        raise _Refused(f"is not a list of at most {MAX_UNTOLD} times")
    return tuple(_TIME_MS.read(each) for each in value)


def _or_null(kind: _Kind) -> _Kind:
    return _Kind(
        lambda value: None if value is None else kind.read(value),
        lambda value: None if value is None else kind.write(value),
    )


_HEX = _Kind(_read_hexadecimal)
_STATE = _Kind(_read_state)
_TRUTH = _Kind(_read_truth)
_DIGEST = _or_null(_Kind(lambda value: int(_read_hexadecimal(value), 16), digest_text))
_SEQUENCES = _Kind(_read_sequences, sequence_set.to_json)
_TIMES_MS = _Kind(_read_times, list)
_PLACES = _Kind(_read_places, lambda value: [list(each) for each in value])
_NAME, _TOPIC, _TEXT = _text(1), _text(1, MAX_TOPIC_SIZE), _text()
_PRODUCER = _text(1, MAX_PRODUCER_NAME_SIZE)
_COUNT = _integer()
_TIME_MS = _integer(0, MAX_CREATED_MS)
_LENGTH_MS = _integer(1, MAX_CREATED_MS)

_STREAM_FIELDS = (
    _Field("state", _STATE),
    _Field("stream", _HEX),
    _Field("session", _HEX),
    _Field("topic", _TOPIC),
    _Field("producer", _PRODUCER),
    _Field("host", _TEXT, absent=""),
    _Field("application", _TEXT, absent=""),
    _Field("datacenter", _TEXT, absent=""),
    _Field("window_ms", _LENGTH_MS),
    _Field("last_assigned", _COUNT),
    _Field("last_settled", _COUNT),
    _Field("no_earlier_than_ms", _or_null(_TIME_MS), absent=None),
    _Field("lease_ms", _TIME_MS),
    _Field("at_ms", _TIME_MS),
    _Field("untold", _TIMES_MS, absent=(), quiet=True),
)
_COUNT_FIELDS = (
    _Field("stream", _HEX),
    _Field("session", _HEX),
    _Field("topic", _TOPIC),
    _Field("producer", _PRODUCER),
    _Field("window_start_ms", _TIME_MS),
    _Field("window_ms", _LENGTH_MS),
    _Field("report", _COUNT),
    _Field("count", _COUNT),
    _Field("bytes", _COUNT, "byte_count"),
    _Field("acknowledged", _SEQUENCES, absent=[]),
    _Field("ambiguous", _SEQUENCES, absent=[]),
    _Field("failed", _SEQUENCES, absent=[]),
    _Field("digest", _DIGEST, absent=None),
    _Field("at_ms", _TIME_MS),
    _Field("sequenced", _TRUTH, absent=True, quiet=True),
    _Field("ambiguous_count", _COUNT, absent=0, quiet=True),
)
_GAP_KINDS = {
    "mirror": _NAME,
    "source": _NAME,
    "topic": _TOPIC,
    "partition": _integer(0, (1 << 31) - 1),
    "from_offset": _COUNT,
    "to_offset": _COUNT,
    "cause": _TEXT,
    "at_ms": _TIME_MS,
    "topic_id": _TEXT,
    "target": _TEXT,
    "has_open_end": _TRUTH,
}
_GAP_FIELDS = tuple(
    _Field(
        name,
        _GAP_KINDS[attribute],
        attribute,
        absent=gap_events.QUIET.get(attribute, _REQUIRED),
        quiet=attribute in gap_events.QUIET,
    )
    for attribute, name in gap_events.FIELDS.items()
)
_TIER_FIELDS = (
    _Field("tier", _NAME),
    _Field("session", _HEX),
    _Field("topic", _TOPIC),
    _Field("stream", _HEX),
    _Field("producer", _text(0, MAX_PRODUCER_NAME_SIZE), absent=""),
    _Field("window_start_ms", _TIME_MS),
    _Field("window_ms", _LENGTH_MS),
    _Field("report", _COUNT),
    _Field("count", _COUNT),
    _Field("bytes", _COUNT, "byte_count"),
    _Field("seen", _SEQUENCES, absent=[]),
    _Field("repeats", _SEQUENCES, absent=[]),
    _Field("unsequenced", _COUNT, absent=0),
    _Field("digest", _DIGEST, absent=None),
    _Field("first_ms", _or_null(_TIME_MS), "first_append_ms", absent=None),
    _Field("last_ms", _or_null(_TIME_MS), "last_append_ms", absent=None),
    _Field("session_count", _COUNT, absent=0),
    _Field("cluster_id", _TEXT, absent="", quiet=True),
    _Field("began", _PLACES, absent=(), quiet=True),
    _Field("at_ms", _TIME_MS),
)


def _refuse(sentence: str) -> NoReturn:
    raise InvalidEvent(sentence)


def _check_stream(event: StreamEvent) -> None:
    if event.last_settled > event.last_assigned:
        _refuse(f"field last_settled is more than last_assigned, {event.last_assigned}")


def _check_window(event: CountEvent | TierEvent) -> None:
    if event.window_start_ms % event.window_ms:
        _refuse(f"window_start_ms {event.window_start_ms} is no multiple of window_ms {event.window_ms}")


def _check_count(event: CountEvent) -> None:
    _check_window(event)
    sets = (event.acknowledged, event.ambiguous, event.failed)
    if not event.sequenced and any(sets):
        _refuse("a report without sequences names some")
    if event.sequenced and event.ambiguous_count:
        _refuse("field ambiguous_count is for reports without sequences")
    if event.sequenced and len(event.acknowledged) != event.count:
        _refuse(f"count is {event.count}, but {len(event.acknowledged)} sequences are acknowledged")
    if len(sets[0] | sets[1] | sets[2]) != sum(map(len, sets)):
        _refuse("a sequence is acknowledged, ambiguous and failed at once")


def _check_gap(event: GapEvent) -> None:
    if event.to_offset < event.from_offset:
        _refuse(f"field to is less than from, {event.from_offset}")


def _check_tier(event: TierEvent) -> None:
    _check_window(event)
    extra = event.count - event.unsequenced - len(event.seen)
    if extra < len(event.repeats) or (extra > 0 and not event.repeats):
        _refuse(
            f"count is {event.count}, which {len(event.seen)} sequences, {len(event.repeats)} of them "
            f"repeated, and {event.unsequenced} records without one do not explain"
        )
    if not event.repeats.issubset(event.seen):
        _refuse("a sequence is repeated that was not seen")
    first_ms, last_ms = event.first_append_ms, event.last_append_ms
    if (first_ms is None) != (last_ms is None) or (first_ms or 0) > (last_ms or 0):
        _refuse("fields first_ms and last_ms are not a span of time")


@dataclass(frozen=True, slots=True)
class _Shape:
    """A type of event: its name in JSON, its class, its fields in the order they are written."""

    name: str
    value: type
    fields: tuple[_Field, ...]
    check: Callable[[Any], None]


_SHAPES = (
    _Shape("stream", StreamEvent, _STREAM_FIELDS, _check_stream),
    _Shape("count", CountEvent, _COUNT_FIELDS, _check_count),
    _Shape(gap_events.TYPE, GapEvent, _GAP_FIELDS, _check_gap),
    _Shape("tier", TierEvent, _TIER_FIELDS, _check_tier),
)
_BY_NAME = {shape.name: shape for shape in _SHAPES}
_BY_VALUE = {shape.value: shape for shape in _SHAPES}

FIELD_NAMES: dict[str, tuple[str, ...]] = {
    shape.name: tuple(field.name for field in shape.fields) for shape in _SHAPES
}
"""{type: names of its fields in JSON, beside `version` and `type`}"""


def encode_event(event: Event) -> tuple[bytes, bytes]:
    """(record key, record value)."""
    shape = _BY_VALUE[type(event)]
    body: dict[str, Any] = {"version": EVENT_VERSION, "type": shape.name}
    for field in shape.fields:
        value = getattr(event, field.target)
        if not (field.quiet and value == field.absent):
            body[field.name] = field.kind.write(value)
    return event.key.encode(), json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def event_to_keep(event: Event) -> dict[str, Any]:
    """The JSON of an event and its `key`, which a gap's value does not tell."""
    key, value = encode_event(event)
    return {**json.loads(value), "key": key.decode()}


def kept_event(kept: Mapping[str, Any]) -> Event | None:
    """What `event_to_keep` made; without a key, of a time when gaps had only the older one. Raises
    InvalidEvent."""
    event = decode_event(json.dumps(kept).encode())
    if isinstance(event, GapEvent) and kept.get("key", event.place_key) == event.place_key:
        return replace(event, older_key=True)
    return event


def known_types() -> list[str]:
    """The types of events that are read here, with the version of each."""
    return [f"event {name} {EVENT_VERSION}" for name in _BY_NAME]


def decode_event(value: bytes | memoryview | None) -> Event | None:
    """Read a record's value; None for a tombstone and for a type not known here. Raises InvalidEvent."""
    if value is None:
        return None
    body = _parse(bytes(value))
    version = body.get("version")
    if type(version) is not int:
        raise InvalidEvent("field version is not a whole number")
    if version != EVENT_VERSION:
        raise InvalidEvent(f"version {str(version)[:20]}, this reader knows {EVENT_VERSION}")
    name = body.get("type")
    if not isinstance(name, str):
        raise InvalidEvent("field type is not a text")
    shape = _BY_NAME.get(name)
    if shape is None:
        return None
    event: Event = shape.value(**{field.target: _read(field, body) for field in shape.fields})
    shape.check(event)
    return event


def _read(field: _Field, body: dict[str, Any]) -> Any:
    value = body.get(field.name, field.absent)
    if value is _REQUIRED:
        raise InvalidEvent(f"field {field.name} is missing")
    try:
        return field.kind.read(value)
    except _Refused as error:
        raise InvalidEvent(f"field {field.name} {error}") from error


def _parse(value: bytes) -> dict[str, Any]:
    try:
        body = json.loads(
            value.decode("utf-8"), object_pairs_hook=_object_once, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidEvent("not JSON") from error
    if not isinstance(body, dict):
        raise InvalidEvent("not a JSON object")
    return body


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Which of two equal names counts is every reader's own choice, so neither does."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise InvalidEvent("a field comes twice in one object")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidEvent(f"{name} is not JSON")
