"""The content digest: known answers, an XXH64 written from its specification, bytes of real batches."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.audit.contract.content_digest import digest_sum, digest_text, record_digest
from millrace.audit.contract.header import HEADER_KEY, encode_identity, encode_prefix
from millrace.broker.protocol.batch import HEADER_SIZE
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.protocol.wire import zigzag
from tests.unit.audit.content_vectors import DIGEST_SUM, VECTORS

PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
WORD = (1 << 64) - 1

field = st.none() | st.binary(max_size=300)
headers = st.lists(st.tuples(st.text(max_size=20).filter(lambda key: key != HEADER_KEY), field), max_size=4)
sequences = st.integers(0, (1 << 63) - 1)


def _turn(word, bits):
    return (word << bits | word >> 64 - bits) & WORD


def _round(lane, word):
    return _turn(lane + word * PRIMES[1] & WORD, 31) * PRIMES[0] & WORD


def slow_xxh64(data, seed):
    """XXH64, word by word, from the specification's text."""
    rest = 0
    if len(data) >= 32:
        lanes = [seed + PRIMES[0] + PRIMES[1] & WORD, seed + PRIMES[1] & WORD, seed, seed - PRIMES[0] & WORD]
        while rest + 32 <= len(data):
            words = struct.unpack_from("<4Q", data, rest)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            rest += 32
        turned = zip(lanes, (1, 7, 12, 18), strict=True)
        total = sum(_turn(lane, bits) for lane, bits in turned) & WORD
        for lane in lanes:
            total = ((total ^ _round(0, lane)) * PRIMES[0] + PRIMES[3]) & WORD
    else:
        total = seed + PRIMES[4] & WORD
    total = total + len(data) & WORD
    while rest + 8 <= len(data):
        (word,) = struct.unpack_from("<Q", data, rest)
        total = (_turn(total ^ _round(0, word), 27) * PRIMES[0] + PRIMES[3]) & WORD
        rest += 8
    if rest + 4 <= len(data):
        (word,) = struct.unpack_from("<I", data, rest)
        total = (_turn(total ^ word * PRIMES[0] & WORD, 23) * PRIMES[1] + PRIMES[2]) & WORD
        rest += 4
    for byte in data[rest:]:
        total = _turn(total ^ byte * PRIMES[4] & WORD, 11) * PRIMES[0] & WORD
    total = (total ^ total >> 33) * PRIMES[1] & WORD
    total = (total ^ total >> 29) * PRIMES[2] & WORD
    return total ^ total >> 32


def slow_digest(sequence, key, value, named):
    def sized(content):
        return zigzag(-1) if content is None else zigzag(len(content)) + content

    digest = slow_xxh64(sized(key) + sized(value), sequence)
    for name, content in named:
        digest = slow_xxh64(sized(name.encode()) + sized(content), digest)
    return digest


@pytest.mark.parametrize(("sequence", "key", "value", "named", "digest"), VECTORS)
def test_the_known_answers(sequence, key, value, named, digest):
    assert record_digest(sequence, key, value, named) == digest
    assert slow_digest(sequence, key, value, named) == digest


def test_a_windows_digest_is_the_sum():
    assert digest_sum(digest for *_, digest in VECTORS) == DIGEST_SUM
    assert digest_text(0x1F) == "000000000000001f"


@given(st.binary(max_size=200), st.integers(0, WORD))
def test_the_librarys_xxh64_is_the_specifications(data, seed):
    import xxhash

    assert xxhash.xxh64_intdigest(data, seed) == slow_xxh64(data, seed)


@given(sequences, field, field, headers)
def test_what_is_hashed_stands_in_the_record_as_it_is(sequence, key, value, named):
    """The first link covers contiguous bytes of a record: a compiled reader hashes them in place."""
    identity = encode_identity(encode_prefix("00000000000000ab"), sequence, 1000, b"AA")
    record = Record(key, value, ((HEADER_KEY, identity), *named), 1000)
    wire = bytes(build_batch([record]))[HEADER_SIZE:]
    size = 0
    while wire[size] & 0x80:
        size += 1
    body = wire[size + 1 :]
    assert body[:3] == b"\0\0\0"  # attributes, timestamp delta, offset delta
    covered = (0 if key is None else len(key)) + (0 if value is None else len(value))
    first_size = covered + len(zigzag(-1 if key is None else len(key)))
    first_size += len(zigzag(-1 if value is None else len(value)))
    first = slow_xxh64(body[3 : 3 + first_size], sequence)
    assert record_digest(sequence, key, value) == first
    assert record_digest(sequence, key, value, record.headers) == slow_digest(sequence, key, value, named)


@given(sequences, field, field, headers)
def test_the_identity_header_is_left_out_wherever_it_stands(sequence, key, value, named):
    digest = record_digest(sequence, key, value, named)
    for place in range(len(named) + 1):
        stamped = [*named[:place], (HEADER_KEY, b"anything"), *named[place:]]
        assert record_digest(sequence, key, value, stamped) == digest
        as_bytes = [(name.encode(), content) for name, content in stamped]
        assert record_digest(sequence, key, value, as_bytes) == digest
