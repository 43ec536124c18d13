import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.audit.contract.header import (
    FIXED_SIZE,
    MAX_CREATED_MS,
    MAX_SEQUENCE,
    InvalidIdentity,
    RecordIdentity,
    decode_identity,
    encode_identity,
    encode_prefix,
    encode_producer_name,
    identity_packer,
    identity_suffix,
    window_start_ms,
)

names = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=100)
streams = st.binary(min_size=8, max_size=8).map(bytes.hex)


@given(streams, st.integers(0, MAX_SEQUENCE), st.integers(0, MAX_CREATED_MS), names)
def test_an_identity_comes_back_as_it_was_written(stream, sequence, created_ms, name):
    value = encode_identity(encode_prefix(stream), sequence, created_ms, encode_producer_name(name))
    assert decode_identity(value) == RecordIdentity(stream, sequence, created_ms, name)
    assert len(value) == FIXED_SIZE + len(name.encode())
    suffix = identity_suffix(created_ms, name.encode())
    assert identity_packer(name.encode())(encode_prefix(stream), sequence, suffix) == value


def test_the_layout_is_the_documented_one():
    value = encode_identity(encode_prefix("0102030405060708"), 0x11, 0x0000_0102_0304, b"AA@ewr")
    assert value.hex() == "0101020304050607080000000000000011000001020304" + b"AA@ewr".hex()


@given(st.binary(max_size=FIXED_SIZE - 1))
def test_a_header_cut_short_is_refused(value):
    with pytest.raises(InvalidIdentity, match="bytes"):
        decode_identity(value)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_refused_but_never_fail_otherwise(value):
    try:
        identity = decode_identity(value)
    except InvalidIdentity:
        return
    assert identity.sequence <= MAX_SEQUENCE and identity.producer.isprintable()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "0 bytes"),
        (b"\x02" + bytes(22), "version 2"),
        (b"\x01" + bytes(8) + b"\x80" + bytes(13), "impossible sequence"),
        (b"\x01" + bytes(22) + b"\xff\xfe", "UTF-8"),
        (b"\x01" + bytes(22) + b"a\nb", "control"),
        (b"\x01" + bytes(22) + b"a" * 10_240, "10240 bytes"),
    ],
)
def test_an_untrustworthy_header_is_refused_with_its_reason(value, reason):
    with pytest.raises(InvalidIdentity, match=reason):
        decode_identity(value)


def test_a_window_starts_at_a_multiple_of_its_length():
    assert window_start_ms(119_999, 60_000) == 60_000
    assert window_start_ms(120_000, 60_000) == 120_000
