"""The content digest: 64 bits that say what a record holds, and their sum over a window. Pure.

Called by `session`'s users (producers with `millrace.content.digest`), by `consumer`, and by the tests of the
scan's compiled twin, for which this module is the oracle (`tests/unit/audit/test_content_digest.py` has the
known answers).

A record's digest is a chain of XXH64 over its bytes as they stand on the wire (record format v2, KIP-98):

    h = XXH64(key length, key, value length, value; seed = sequence)
    for each header in order, except `_mr`:
        h = XXH64(header key length, header key, header value length, header value; seed = h)

Lengths are zigzag varints, -1 for null, so that null differs from empty and no byte can wander from the key
into the value. The sequence as seed ties content to place: two records that changed places are two wrong
ones. Offset and timestamp are not in it, because brokers may set them (LogAppendTime).

A window's digest is the sum modulo 2^64 over its records: independent of order, so that every tier can add up
what it sees. It is an error check, not a signature: XXH64 keeps nobody out.
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh64_intdigest

from millrace.audit.contract.header import HEADER_KEY
from millrace.broker.protocol.wire import zigzag

DIGEST_MASK = (1 << 64) - 1
_IDENTITY_KEY = HEADER_KEY.encode()
_NULL = zigzag(-1)
_SHORT_LENGTHS = tuple(map(zigzag, range(1 << 13)))


def _sized(content: bytes | None) -> bytes:
    """Length and bytes, as they stand in a record."""
    if content is None:
        return _NULL
    size = len(content)
    return (_SHORT_LENGTHS[size] if size < len(_SHORT_LENGTHS) else zigzag(size)) + content


def record_digest(
    sequence: int,
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str | bytes, bytes | None]] = (),
) -> int:
    """The digest of one record. Header keys as text (UTF-8) or bytes; every `_mr` header is left out.

    `sequence` 0 for a count-only record. What applications may give as text (keys, values, header values) is
    encoded by the caller as its client encodes it.
    """
    digest = xxh64_intdigest(_sized(key) + _sized(value), sequence)
    for name, content in headers:
        name_bytes = name.encode() if isinstance(name, str) else name
        if name_bytes != _IDENTITY_KEY:
            digest = xxh64_intdigest(_sized(name_bytes) + _sized(content), digest)
    return digest


def digest_sum(digests: Iterable[int]) -> int:
    """A window's digest from those of its records."""
    return sum(digests) & DIGEST_MASK


def digest_text(digest: int) -> str:
    """As events carry it: 16 hexadecimal digits."""
    return f"{digest:016x}"
