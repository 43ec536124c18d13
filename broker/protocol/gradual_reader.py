"""Reads an entity item by item, so that others have their turn in between when a thread does it.

`kio`'s native reader keeps the interpreter's lock from a message's first byte to its last, on whatever
thread: 30 to 90 ms for 100,000 partitions. Here it is asked for one item of an array at a time, and for one
field of what holds arrays.

Called by `frames.decode_entity` for what is large, after `entity_shape.checked`. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from kio.serial import entity_reader
from kio.serial._parse import get_field_reader

from millrace.broker.protocol.wire import read_array_size

Reader = Callable[[memoryview, int], tuple[Any, int]]
"""From the position of something to its value and its size in bytes, as `kio`'s readers."""

_readers: dict[type[Any], Reader] = {}


def gradual_reader(entity_type: type[Any]) -> Reader:
    """As `kio`'s `entity_reader`."""
    reader = _readers.get(entity_type)
    if reader is None:
        reader = _readers[entity_type] = _compile(entity_type)
    return reader


def _compile(entity_type: type[Any]) -> Reader:
    whole: Reader = entity_reader(entity_type)
    is_flexible = entity_type.__flexible__
    fields: list[tuple[str, Reader]] = []
    has_items = False
    for field in dataclasses.fields(entity_type):
        if field.metadata.get("tag") is not None:
            continue  # see below
        item_type = _item_type(field.type)
        if item_type is None:
            fields.append((field.name, get_field_reader(entity_type, field, False, False)))
        else:
            has_items = True
            fields.append((field.name, _array(gradual_reader(item_type), is_flexible)))

    def entity(buffer: memoryview, position: int) -> tuple[Any, int]:
        begin, values = position, {}
        for name, read in fields:
            values[name], size = read(buffer, position)
            position += size
        if is_flexible:
            if buffer[position]:  # tagged fields: no request that comes here has any that are known
                return whole(buffer, begin)
            position += 1
        return entity_type(**values), position - begin

    return entity if has_items else whole


def _item_type(annotation: Any) -> type[Any] | None:
    """Of an array of entities; None for any other field."""
    if get_origin(annotation) in (UnionType, Union):
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is not tuple:
        return None
    item_type: type[Any] = get_args(annotation)[0]
    return item_type if dataclasses.is_dataclass(item_type) else None


def _array(item: Reader, is_flexible: bool) -> Reader:
    def array(buffer: memoryview, position: int) -> tuple[Any, int]:
        begin = position
        count, position = read_array_size(buffer, position, is_flexible)
        if count < 0:
            return None, position - begin  # only where it may be: that was checked
        items = []
        for _ in range(count):
            value, size = item(buffer, position)
            position += size
            items.append(value)
        return tuple(items), position - begin

    return array
