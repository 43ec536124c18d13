"""Checks that bytes have the shape of an entity before `kio` reads them.

`kio`'s native reader takes memory for as many array items as a peer announces, and the process ends when the
system has not got it; it also reads null where an array cannot be null, and stumbles over tagged fields that
it does not know, which the protocol allows any newer peer to send. So every length and count is compared
here with the bytes that are there, nulls are refused where the schema has none, and unknown tagged fields are
cut out.

With `mends` values that Apache Kafka takes and `kio` does not are replaced by the nearest that it does, as
Kafka's own readers do: bytes of a string that are not UTF-8 by U+FFFD, error codes of newer releases by
UNKNOWN_SERVER_ERROR; times that are longer than 292,000 years become so long. It takes longer, and is for
what `kio` has failed at.

The way through an entity is compiled once from its class; runs of fields of fixed size are one step.
Called by `frames.decode_entity`, thus for every message that is not written by hand. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from kio.schema.errors import ErrorCode

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol.wire import (
    compact_string,
    read_array_size,
    read_tag_count,
    read_uvarint,
    string,
    tagged_field,
    uvarint,
)

NO_LIMIT = 2**31

_SIZES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "error_code": 2,
    "int32": 4,
    "uint32": 4,
    "timedelta_i32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "timedelta_i64": 8,
    "datetime_i64": 8,
    "uuid": 16,
}
_NULL_STRUCT = 0xFF

_LONGEST_STRING = 2**15 - 1

_KNOWN_CODES = frozenset(int(code) for code in ErrorCode)
_UNKNOWN_SERVER_ERROR = (-1).to_bytes(2, "big", signed=True)
_LONGEST_TIME_MS = (2**63 - 1) // 1000
"""`kio` counts microseconds in 64 bits."""


class _Walk:
    """One message on its way through the check."""

    __slots__ = ("buffer", "cuts", "items_left", "size")

    def __init__(self, buffer: memoryview, most_items: int) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.items_left = most_items
        self.cuts: list[tuple[int, int, bytes]] = []
        """(begin, end, what stands there instead): of tagged fields with some that are not known, and of what
        was mended."""

    def take(self, count: int, name: str) -> None:
        """Array items and tagged fields cost alike."""
        self.items_left -= count
        if self.items_left < 0:
            raise ProtocolError(f"{name}: the message holds too many items")

    def advance(self, position: int, size: int) -> int:
        end = position + size
        if size < 0 or end > self.size:
            raise ProtocolError(f"message announces {size} bytes, {self.size - position} are there")
        return end


Step = Callable[[_Walk, int], int]
"""From the position of something to the position after it."""


class _Shape:
    """How to pass over a value: `fixed_size` where that is always the same, `step` otherwise."""

    __slots__ = ("fixed_size", "step")

    def __init__(self, fixed_size: int | None, step: Step | None = None) -> None:
        self.fixed_size = fixed_size
        if step is None:
            assert fixed_size is not None
            step = _fixed(fixed_size)
        self.step = step


_shapes: dict[tuple[type[Any], bool], _Shape] = {}


def checked(
    entity_type: type[Any], buffer: memoryview, position: int, most_items: int, *, mends: bool = False
) -> tuple[memoryview, int]:
    """The buffer and position to read the entity at: as given, or a copy without what is not known, mended
    if that is wanted.

    Raises ProtocolError.
    """
    walk = _Walk(buffer, most_items)
    shape = _shapes.get((entity_type, mends)) or _shape_of(entity_type, mends)
    try:
        shape.step(walk, position)
    except ProtocolError as error:
        raise ProtocolError(f"{entity_type.__name__} cannot be read: {error}") from None
    if not walk.cuts:
        return buffer, position
    return memoryview(_without(buffer, position, len(buffer), walk.cuts)), 0


def _without(buffer: memoryview, begin: int, end: int, cuts: list[tuple[int, int, bytes]]) -> bytes:
    """The bytes from `begin` to `end`, each cut replaced by what stands in its place."""
    out = bytearray()
    for first, last, instead in cuts:
        out += buffer[begin:first]
        out += instead
        begin = last
    out += buffer[begin:end]
    return bytes(out)


def _shape_of(entity_type: type[Any], mends: bool) -> _Shape:
    shape = _shapes.get((entity_type, mends))
    if shape is None:
        shape = _shapes[entity_type, mends] = _compile(entity_type, mends)
    return shape


def _compile(entity_type: type[Any], mends: bool) -> _Shape:
    is_flexible = entity_type.__flexible__
    steps: list[Step] = []
    tagged: dict[int, Step] = {}
    fixed_size, is_fixed = 0, not is_flexible
    for field in dataclasses.fields(entity_type):
        kind = field.metadata.get("kafka_type", "")
        shape = _field_shape(field.type, kind, is_flexible, field.name, mends)
        tag = field.metadata.get("tag")
        if tag is not None:
            tagged[tag] = shape.step
        elif shape.fixed_size is not None:
            fixed_size += shape.fixed_size
        else:
            is_fixed = False
            if fixed_size:
                steps.append(_fixed(fixed_size))
            steps.append(shape.step)
            fixed_size = 0
    if is_fixed:
        return _Shape(fixed_size)
    if fixed_size:
        steps.append(_fixed(fixed_size))
    if is_flexible:
        steps.append(_tagged_fields(tagged))

    def entity(walk: _Walk, position: int) -> int:
        for step in steps:
            position = step(walk, position)
        return position

    return _Shape(None, entity)


def _field_shape(annotation: Any, kind: str, is_flexible: bool, name: str, mends: bool) -> _Shape:
    is_nullable = False
    if get_origin(annotation) in (UnionType, Union):
        is_nullable = True
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is tuple:
        item = _field_shape(get_args(annotation)[0], kind, is_flexible, name, mends)
        return _Shape(None, _array(item, is_flexible, is_nullable, name))
    if dataclasses.is_dataclass(annotation):
        shape = _shape_of(annotation, mends)  # type: ignore[arg-type]
        return _Shape(None, _nullable_struct(shape.step)) if is_nullable else shape
    if mends and kind in _MENDS:
        return _Shape(None, _mended(_MENDS[kind], _SIZES[kind]))
    if mends and kind == "string":
        return _Shape(None, _mended_string(is_flexible))
    if kind in _SIZES:
        return _Shape(_SIZES[kind])
    if kind == "string":
        return _Shape(None, _sized(2, is_flexible))
    if kind in ("bytes", "records"):
        return _Shape(None, _sized(4, is_flexible))
    raise TypeError(f"field {name}: no way through {annotation} of kind {kind!r} is known")


def _fixed(size: int) -> Step:
    return lambda walk, position: walk.advance(position, size)


def _sized(length_size: int, is_flexible: bool) -> Step:
    """A string or bytes with its length before it; whether null is allowed is `kio`'s to judge."""

    def compact(walk: _Walk, position: int) -> int:
        size, position = read_uvarint(walk.buffer, position)
        return walk.advance(position, size - 1) if size else position

    def plain(walk: _Walk, position: int) -> int:
        begin = walk.advance(position, length_size)
        size = int.from_bytes(walk.buffer[position:begin], "big", signed=True)
        return begin if size == -1 else walk.advance(begin, size)

    return compact if is_flexible else plain


def _known_code(walk: _Walk, position: int, end: int) -> bytes | None:
    code = int.from_bytes(walk.buffer[position:end], "big", signed=True)
    return None if code in _KNOWN_CODES else _UNKNOWN_SERVER_ERROR


def _counted_time(walk: _Walk, position: int, end: int) -> bytes | None:
    time_ms = int.from_bytes(walk.buffer[position:end], "big", signed=True)
    if -_LONGEST_TIME_MS <= time_ms <= _LONGEST_TIME_MS:
        return None
    longest = _LONGEST_TIME_MS if time_ms > 0 else -_LONGEST_TIME_MS
    return longest.to_bytes(8, "big", signed=True)


Mend = Callable[[_Walk, int, int], bytes | None]
"""What is to stand in the place of a value; None where it can stay."""

_MENDS: dict[str, Mend] = {"error_code": _known_code, "timedelta_i64": _counted_time}


def _mended(mend: Mend, size: int) -> Step:
    def mended(walk: _Walk, position: int) -> int:
        end = walk.advance(position, size)
        instead = mend(walk, position, end)
        if instead is not None:
            walk.cuts.append((position, end, instead))
        return end

    return mended


def _mended_string(is_flexible: bool) -> Step:
    step = _sized(2, is_flexible)

    def mended(walk: _Walk, position: int) -> int:
        end = step(walk, position)
        begin = read_uvarint(walk.buffer, position)[1] if is_flexible else position + 2
        try:
            str(walk.buffer[begin:end], "utf-8")
        except UnicodeDecodeError:
            text = str(walk.buffer[begin:end], "utf-8", "replace")
            if not is_flexible and len(text.encode()) > _LONGEST_STRING:
                raise ProtocolError("a string is not UTF-8") from None
            walk.cuts.append((position, end, compact_string(text) if is_flexible else string(text)))
        return end

    return mended


def _array(item: _Shape, is_flexible: bool, is_nullable: bool, name: str) -> Step:
    step, item_size = item.step, item.fixed_size

    def array(walk: _Walk, position: int) -> int:
        count, position = read_array_size(walk.buffer, position, is_flexible)
        if count < 0:
            if not is_nullable:
                raise ProtocolError(f"{name} is null")
            return position
        walk.take(count, name)
        if item_size is not None:
            return walk.advance(position, count * item_size)
        for _ in range(count):
            position = step(walk, position)
        return position

    return array


def _nullable_struct(step: Step) -> Step:
    """A byte says whether the fields follow."""

    def struct_or_null(walk: _Walk, position: int) -> int:
        begin = walk.advance(position, 1)
        return begin if walk.buffer[position] == _NULL_STRUCT else step(walk, begin)

    return struct_or_null


def _tagged_fields(known: dict[int, Step]) -> Step:
    def tagged_fields(walk: _Walk, position: int) -> int:
        if position < walk.size and walk.buffer[position] == 0:  # nearly always
            return position + 1
        begin = position
        count, position = read_tag_count(walk.buffer, position)
        walk.take(count, "tagged fields")
        kept: list[bytes] = []
        is_whole = True
        for _ in range(count):
            tag, position = read_uvarint(walk.buffer, position)
            size, position = read_uvarint(walk.buffer, position)
            end = walk.advance(position, size)
            step = known.get(tag)
            if step is None:
                is_whole = False
            else:
                cut_count = len(walk.cuts)
                if step(walk, position) != end:
                    raise ProtocolError(f"tagged field {tag} has not the size it announces")
                cuts = walk.cuts[cut_count:]
                del walk.cuts[cut_count:]
                is_whole = is_whole and not cuts
                kept.append(tagged_field(tag, _without(walk.buffer, position, end, cuts)))
            position = end
        if not is_whole:
            walk.cuts.append((begin, position, uvarint(len(kept)) + b"".join(kept)))
        return position

    return tagged_fields
