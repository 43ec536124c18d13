"""Fetch requests that differ from one before on their connection in a few numbers alone, and their answers.

That is how a consumer of one partition reads on: with another correlation id and fetch offset, in a session
also with the next epoch (KIP-227). All else in its requests is compared, not decoded, and all else in the
answers is copied: reading and writing them anew is half of what a fetch costs besides its records.

Called by the server (`fetch_shortcut.py`). Pure. `hot_fetch.py` is the oracle in tests.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from millrace.broker.protocol import wire
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.hot_fetch import (
    FIRST_FLEXIBLE,
    FIRST_WITH_RACK,
    FIRST_WITH_SESSIONS,
    PartitionData,
    Topic,
    changing_positions,
    encode_response,
)

FIRST_VERSION = FIRST_WITH_SESSIONS
"""Older requests have other fields, and hardly a client."""

_BOUNDS = struct.Struct(">qqq")  # high watermark, last stable offset, log start offset
_RECORDS_SIZE = struct.Struct(">i")
_SIZE_AND_CORRELATION = struct.Struct(">ii")


class Repeated(NamedTuple):
    """What is new in a request."""

    correlation_id: int
    session_epoch: int
    fetch_offset: int


class FetchForm:
    """What a request for one partition has in common with those that follow it."""

    __slots__ = ("_layout", "_same")

    def __init__(self, frame: bytes, epoch_position: int, offset_position: int) -> None:
        """`frame` is a request, without its size, in which session epoch and fetch offset stand there."""
        between, after = offset_position - epoch_position - 4, len(frame) - offset_position - 8
        # API key and version, correlation id; all up to the session epoch, the epoch; all up to the offset,
        # the offset; the rest.
        self._layout = struct.Struct(f">4s i {epoch_position - 8}s i {between}s q {after}s")
        self._same = self._layout.unpack(frame)[::2]

    @classmethod
    def of(cls, frame: bytes, position: int, version: int) -> FetchForm | None:
        """The form of a request, without its size, that `hot_fetch` has decoded and whose body begins at
        `position`; `version` is `FIRST_VERSION` or newer. None where it is for more than one partition."""
        positions = changing_positions(memoryview(frame), position, version)
        return None if positions is None else cls(frame, *positions)

    def read(self, frame: memoryview) -> Repeated | None:
        """None where the frame differs in more."""
        if len(frame) != self._layout.size:
            return None
        fields = self._layout.unpack(frame)
        return Repeated(*fields[1::2]) if fields[::2] == self._same else None


class AnswerForm:
    """What the answers to such requests have in common where they are no refusal, tell of no other history,
    and name no aborted transactions."""

    __slots__ = ("_bounds_position", "_head", "_is_flexible", "_tail")

    def __init__(
        self, version: int, topic: Topic, partition: int, *, read_committed: bool, session_id: int
    ) -> None:
        """`version` is `FIRST_VERSION` or newer."""
        part = PartitionData(topic, partition, aborted=() if read_committed else None)
        empty = bytes(encode_response(version, 0, [part], session_id=session_id)[0])
        self._is_flexible = version >= FIRST_FLEXIBLE
        count_size, tags_size = (1, 3) if self._is_flexible else (4, 0)
        preferred_size = 4 if version >= FIRST_WITH_RACK else 0
        # Behind the bounds: how many aborted transactions, the preferred replica, how many bytes of records,
        # and the tagged fields of partition, topic and answer.
        head_size = len(empty) - tags_size - count_size
        self._head, self._tail = empty[:head_size], empty[len(empty) - tags_size :]
        self._bounds_position = head_size - preferred_size - count_size - _BOUNDS.size

    def encode(
        self,
        correlation_id: int,
        high_watermark: int,
        last_stable_offset: int,
        log_start_offset: int,
        records: Buffer,
    ) -> list[Buffer]:
        """As `hot_fetch.encode_response`, byte for byte."""
        size, tail = len(records), self._tail
        head = bytearray(self._head)
        _BOUNDS.pack_into(head, self._bounds_position, high_watermark, last_stable_offset, log_start_offset)
        head += wire.uvarint(size + 1) if self._is_flexible else _RECORDS_SIZE.pack(size)
        _SIZE_AND_CORRELATION.pack_into(head, 0, len(head) - 4 + size + len(tail), correlation_id)
        return [head, records, tail] if tail else [head, records]
