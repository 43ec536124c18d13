"""The identity header that an audited producer puts on every record.

Encoded by `producer` and `stream_reporter`, once a record; read by consumers that count online. The Spark
reader's batch scan reads it in compiled code, from the places that are named here.

One record header, key `_mr`, value:

    byte 0        version, 1
    bytes 1-8     stream id: random, one per producer start and topic
    bytes 9-16    sequence, unsigned 64-bit big-endian: 1, 2, 3, ... in the order of `produce` calls; kept
                  through retries; 0 = a count-only producer, which cannot number its records
    bytes 17-22   creation time in milliseconds since 1970, unsigned 48-bit big-endian
    bytes 23-     the producer's name in UTF-8; empty for `identity: compact`, where only the events tell it

A record belongs to the window of its creation time *in this header*, so that every tier files it in the same
window whatever a broker's clock or LogAppendTime did to the record's own timestamp.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from millrace.broker.errors import MillraceError

HEADER_KEY = "_mr"
HEADER_VERSION = 1
STREAM_AT, SEQUENCE_AT, CREATED_AT, FIXED_SIZE = 1, 9, 17, 23
"""Where stream, sequence, creation time and the producer's name begin. (A compiled scan that is kept on disk
has them as they were: who changes them touches `scanning/scan.py` too.)"""
MAX_PRODUCER_NAME_SIZE = 249  # as the names of topics
MAX_SEQUENCE = (1 << 63) - 1
MAX_CREATED_MS = (1 << 48) - 1


class InvalidIdentity(MillraceError):
    """A `_mr` header that cannot be trusted: cut short, of a future version, or with an impossible name."""


@dataclass(frozen=True, slots=True)
class RecordIdentity:
    """Who made a record. `stream` is 16 hexadecimal digits; `sequence` 0 means count-only."""

    stream: str
    sequence: int
    created_ms: int
    producer: str


def encode_prefix(stream: str) -> bytes:
    """The nine bytes that stay the same for a whole stream."""
    stream_bytes = bytes.fromhex(stream)
    if len(stream_bytes) != 8:
        raise ValueError(f"a stream id has 16 hexadecimal digits, not {stream!r}")
    return bytes((HEADER_VERSION,)) + stream_bytes


def encode_identity(prefix: bytes, sequence: int, created_ms: int, producer: bytes = b"") -> bytes:
    """The header's value. Sequence and time are written as one integer: half the cost of a struct call."""
    return prefix + ((sequence << 48) | created_ms).to_bytes(14, "big") + producer


def identity_packer(name: bytes) -> Callable[[bytes, int, bytes], bytes]:
    """`encode_identity` of one producer, at half its cost: called with a stream's prefix, a sequence and what
    `identity_suffix` makes once for all records of a millisecond."""
    return struct.Struct(f">9sQ{6 + len(name)}s").pack


def identity_suffix(created_ms: int, name: bytes) -> bytes:
    """The header's end behind the sequence."""
    return created_ms.to_bytes(6, "big") + name


def decode_identity(value: bytes | memoryview | None) -> RecordIdentity:
    """Read a header's value; raises InvalidIdentity."""
    if value is None or len(value) < FIXED_SIZE:
        size = 0 if value is None else len(value)
        raise InvalidIdentity(f"header {HEADER_KEY} has {size} bytes, at least {FIXED_SIZE} were expected")
    if value[0] != HEADER_VERSION:
        raise InvalidIdentity(
            f"header {HEADER_KEY} has version {value[0]}, this reader knows {HEADER_VERSION}"
        )
    sequence = int.from_bytes(value[SEQUENCE_AT:CREATED_AT], "big")
    if sequence > MAX_SEQUENCE:
        raise InvalidIdentity(f"header {HEADER_KEY} has the impossible sequence {sequence}")
    return RecordIdentity(
        stream=bytes(value[STREAM_AT:SEQUENCE_AT]).hex(),
        sequence=sequence,
        created_ms=int.from_bytes(value[CREATED_AT:FIXED_SIZE], "big"),
        producer=decode_producer_name(bytes(value[FIXED_SIZE:])),
    )


def decode_producer_name(name: bytes) -> str:
    """A producer's name as text; raises InvalidIdentity for one that no audited producer writes."""
    if len(name) > MAX_PRODUCER_NAME_SIZE:
        raise InvalidIdentity(
            f"producer name of {len(name)} bytes, at most {MAX_PRODUCER_NAME_SIZE} are taken"
        )
    try:
        text = name.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidIdentity("producer name is not UTF-8") from error
    if not text.isprintable():
        raise InvalidIdentity("producer name has control characters")
    return text


def encode_producer_name(name: str) -> bytes:
    """The name's bytes for the header, checked by the rule that readers apply."""
    encoded = name.encode("utf-8")
    decode_producer_name(encoded)
    return encoded


def window_start_ms(created_ms: int, window_ms: int) -> int:
    """The start of the window that a creation time falls into."""
    return created_ms - created_ms % window_ms
