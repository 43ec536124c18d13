"""The records of the offsets topic byte by byte, and when offsets grow too old."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.broker.errors import UnreadableRecord
from millrace.broker.groups.offsets import (
    CommittedOffset,
    ExpiryRule,
    OffsetStore,
    expired_offsets,
)
from millrace.broker.groups.record_layout import (
    GroupKey,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
)
from millrace.broker.groups.subscriptions import subscribed_topics
from millrace.broker.groups.values import GroupSnapshot, MemberSnapshot
from millrace.broker.protocol.java_hash import coordinator_partition

TEXT = st.text(max_size=20)
INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
MEMBERS = st.builds(
    MemberSnapshot,
    TEXT,
    st.none() | TEXT,
    TEXT,
    TEXT,
    st.integers(0, 2**31 - 1),  # older logs have none, and then it is the session's
    INT32,
    st.binary(max_size=20),
    st.binary(max_size=20),
)


def test_offset_key_and_value_layout():
    assert encode_offset_key("g", "topic", 7) == bytes.fromhex("0001 0001 67 0005 746f706963 00000007")
    value = encode_offset_value(CommittedOffset(5, 2, "hi", 1_000))
    assert value == bytes.fromhex("0003 0000000000000005 00000002 0002 6869 00000000000003e8")
    with_expiry = encode_offset_value(CommittedOffset(5, 2, "hi", 1_000, 2_000))
    assert with_expiry == bytes.fromhex("0001 0000000000000005 0002 6869 00000000000003e8 00000000000007d0")


def test_group_key_and_value_layout():
    assert encode_group_key("g") == bytes.fromhex("0002 0001 67")
    member = MemberSnapshot("m", None, "c", "/h", 60_000, 10_000, b"\x01", b"\x02\x03")
    value = encode_group_value(GroupSnapshot("consumer", 3, "range", "m", 9, (member,)))
    assert value == bytes.fromhex(
        "0003 0008 636f6e73756d6572 00000003 0005 72616e6765 0001 6d 0000000000000009 00000001"
        "0001 6d ffff 0001 63 0002 2f68 0000ea60 00002710 00000001 01 00000002 0203"
    )
    empty = encode_group_value(GroupSnapshot("consumer", 4, None, None, 9, ()))
    assert empty == bytes.fromhex("0003 0008 636f6e73756d6572 00000004 ffff ffff 0000000000000009 00000000")


def test_older_value_versions_are_read():
    tail = struct.pack(">h2sq", 2, b"hi", 1_000)
    for version in (0, 2):
        assert decode_offset_value(struct.pack(">hq", version, 5) + tail) == CommittedOffset(
            5, -1, "hi", 1_000
        )
    version_1 = struct.pack(">hq", 1, 5) + tail + struct.pack(">q", 2_000)
    assert decode_offset_value(version_1) == CommittedOffset(5, -1, "hi", 1_000, 2_000)
    member_0 = bytes.fromhex("0001 6d 0001 63 0002 2f68 00002710 00000001 01 00000000")
    group_0 = bytes.fromhex("0000 0001 74 00000003 0001 70 0001 6d 00000001") + member_0
    expected = MemberSnapshot("m", None, "c", "/h", 10_000, 10_000, b"\x01", b"")
    assert decode_group_value(group_0) == GroupSnapshot("t", 3, "p", "m", -1, (expected,))


def test_versions_of_newer_software_are_skipped():
    assert decode_key(struct.pack(">hh", 3, 0)) is None
    assert decode_offset_value(struct.pack(">h", 5)) is None
    assert decode_group_value(struct.pack(">h", 5)) is None


def test_flexible_values_of_kafka_4_are_read_and_their_tagged_fields_passed_over():
    # version, offset, leader epoch, "hi" as size + 1, time; two tagged fields of sizes 2 and 0
    value = bytes.fromhex("0004 0000000000000005 00000002 03 6869 00000000000003e8 02 00 02 abcd 8101 00")
    assert decode_offset_value(value) == CommittedOffset(5, 2, "hi", 1_000)
    member = "02 6d 00 02 63 03 2f68 0000ea60 00002710 02 01 03 0203 00"  # without an instance id
    static = "02 6e 03 6831 02 63 03 2f68 0000ea60 00002710 01 01 01 05 01 ff"  # with one, and a tagged field
    group = bytes.fromhex(
        f"0004 09 636f6e73756d6572 00000003 06 72616e6765 02 6d 0000000000000009 03 {static} {member} 00"
    )
    assert decode_group_value(group) == GroupSnapshot(
        "consumer",
        3,
        "range",
        "m",
        9,
        (
            MemberSnapshot("n", "h1", "c", "/h", 60_000, 10_000, b"", b""),
            MemberSnapshot("m", None, "c", "/h", 60_000, 10_000, b"\x01", b"\x02\x03"),
        ),
    )
    empty = bytes.fromhex("0004 09 636f6e73756d6572 00000004 00 00 0000000000000009 01 00")
    assert decode_group_value(empty) == GroupSnapshot("consumer", 4, None, None, 9, ())


@given(TEXT, TEXT, INT32, INT64, st.integers(-1, 2**31 - 1), TEXT, INT64, st.none() | st.integers(0, 2**62))
def test_commit_survives_the_log(group, topic, partition, offset, epoch, metadata, at_ms, expiry_ms):
    assert decode_key(encode_offset_key(group, topic, partition)) == OffsetKey(group, topic, partition)
    committed = CommittedOffset(offset, epoch if expiry_ms is None else -1, metadata, at_ms, expiry_ms, 12)
    assert decode_offset_value(encode_offset_value(committed), 12) == committed


@given(TEXT, TEXT, INT32, st.none() | TEXT, st.none() | TEXT, INT64, st.lists(MEMBERS, max_size=3))
def test_group_survives_the_log(group, kind, generation, protocol, leader, since_ms, members):
    assert decode_key(encode_group_key(group)) == GroupKey(group)
    snapshot = GroupSnapshot(kind, generation, protocol, leader, since_ms, tuple(members))
    assert decode_group_value(encode_group_value(snapshot)) == snapshot


@given(st.binary(max_size=60))
def test_garbage_is_unreadable_but_never_a_crash(garbage):
    for decode in (decode_key, decode_offset_value, decode_group_value):
        with contextlib.suppress(UnreadableRecord):
            decode(garbage)


def test_cut_record_is_unreadable():
    value = encode_offset_value(CommittedOffset(5, 2, "hi", 1_000))
    with pytest.raises(UnreadableRecord):
        decode_offset_value(value[:-1])


@pytest.mark.parametrize(
    ("group_id", "java_absolute_hash_code"),
    [
        ("", 0),
        ("a", 97),
        ("console-consumer-12345", 158_455_506),
        ("polygenelubricants", 0),  # the hash code is -2^31, of which Java has no absolute value
        ("gruppe-ß-2-674201250", 1_830_089_166),  # the hash code is negative; a live Kafka put it there
        ("grüße", 98_768_023),
        ("\N{FACE WITH TEARS OF JOY}", 1_772_901),
    ],
)
def test_group_belongs_to_the_partition_that_java_computes(group_id, java_absolute_hash_code):
    assert coordinator_partition(group_id, 50) == java_absolute_hash_code % 50
    assert coordinator_partition(group_id, 7) == java_absolute_hash_code % 7


def test_later_commit_in_the_log_wins_whatever_the_order_of_acknowledgement():
    store = OffsetStore()
    store.put(("t", 0), CommittedOffset(20, -1, "", 0, log_offset=8))
    store.put(("t", 0), CommittedOffset(10, -1, "", 0, log_offset=7))
    assert store.get(("t", 0)).offset == 20
    store.remove(("t", 0), before_log_offset=8)
    assert store.get(("t", 0)).offset == 20
    store.remove(("t", 0), before_log_offset=9)
    assert store.get(("t", 0)) is None


@pytest.mark.safety
def test_later_removal_in_the_log_wins_over_a_commit_that_is_acknowledged_after_it():
    store, place = OffsetStore(), ("flights", 0)
    store.begin_write([place])
    store.remove(place, 6)
    store.put(place, CommittedOffset(1, -1, "", 0, None, log_offset=5))
    assert store.get(place) is None
    store.begin_write([place])
    store.put(place, CommittedOffset(2, -1, "", 0, None, log_offset=7))
    store.end_write([place])
    store.end_write([place])
    assert store.get(place).offset == 2
    store.remove(place, 8)
    assert store.is_empty


def test_offset_in_a_transaction_counts_from_its_marker_on():
    store = OffsetStore()
    store.put(("t", 0), CommittedOffset(1, -1, "", 0, log_offset=1))
    store.put_pending(7, ("t", 0), CommittedOffset(2, -1, "", 0, log_offset=2))
    store.put_pending(7, ("t", 0), CommittedOffset(3, -1, "", 0, log_offset=3))
    store.put_pending(8, ("t", 1), CommittedOffset(9, -1, "", 0, log_offset=4))
    assert store.get(("t", 0)).offset == 1
    assert store.is_unstable(("t", 0))
    assert store.is_unstable(("t", 1))
    assert not store.end_transaction(7, True, 5)
    assert (store.get(("t", 0)).offset, store.get(("t", 1))) == (3, None)
    assert not store.is_unstable(("t", 0))
    assert not store.end_transaction(8, False, 6)
    assert store.get(("t", 1)) is None
    assert not store.has_unstable
    assert not store.end_transaction(8, True, 7)
    assert store.get(("t", 1)) is None, "a marker that comes again decides on nothing"


def test_marker_decides_on_what_stands_before_it_alone():
    """It may be told when the producer's next transaction has begun, under the same epoch."""
    store = OffsetStore()
    store.put_pending(7, ("t", 0), CommittedOffset(2, -1, "", 0, log_offset=2))
    store.put_pending(7, ("t", 1), CommittedOffset(3, -1, "", 0, log_offset=4))
    assert store.end_transaction(7, True, 3)
    assert (store.get(("t", 0)).offset, store.get(("t", 1))) == (2, None)
    assert store.is_unstable(("t", 1))
    assert store.end_transaction(7, False, 3), "nor does it take them away"
    assert not store.end_transaction(7, True, 5)
    assert store.get(("t", 1)).offset == 3


def test_transactional_offset_counts_where_it_stands_in_the_log_not_where_its_marker_does():
    store = OffsetStore()
    store.put_pending(7, ("t", 0), CommittedOffset(10, -1, "", 0, log_offset=5))
    store.put(("t", 0), CommittedOffset(20, -1, "", 0, log_offset=6))
    store.end_transaction(7, True, 7)
    assert store.get(("t", 0)).offset == 20


def test_removal_takes_what_is_pending_from_before_it():
    store = OffsetStore()
    store.put_pending(7, ("t", 0), CommittedOffset(10, -1, "", 0, log_offset=5))
    store.put_pending(8, ("t", 0), CommittedOffset(11, -1, "", 0, log_offset=7))
    store.remove(("t", 0), before_log_offset=6)
    store.end_transaction(7, True, 8)
    assert store.get(("t", 0)) is None
    store.end_transaction(8, True, 9)
    assert store.get(("t", 0)).offset == 11


def test_offset_with_an_open_transaction_does_not_expire():
    store = OffsetStore()
    store.put(("t", 0), CommittedOffset(1, -1, "", 0, log_offset=0))
    store.put_pending(7, ("t", 0), CommittedOffset(2, -1, "", 0, log_offset=1))
    rule = ExpiryRule(lambda committed: committed.commit_timestamp_ms)
    assert expired_offsets(store, rule, 1_000, 10_000) == []
    store.end_transaction(7, False, 2)
    assert expired_offsets(store, rule, 1_000, 10_000) == [("t", 0)]


def test_offset_that_a_write_may_renew_does_not_expire_also_when_nobody_waits_for_the_write():
    store = OffsetStore()
    store.put(("t", 0), CommittedOffset(1, -1, "", 0, log_offset=0))
    store.begin_write([("t", 0)])
    store.begin_wait([("t", 0)])
    assert (store.is_unstable(("t", 0)), store.may_change(("t", 0))) == (True, True)
    store.end_wait([("t", 0)])
    assert (store.is_unstable(("t", 0)), store.may_change(("t", 0))) == (False, True)
    rule = ExpiryRule(lambda committed: committed.commit_timestamp_ms)
    assert expired_offsets(store, rule, 1_000, 10_000) == []
    store.end_write([("t", 0)])
    assert expired_offsets(store, rule, 1_000, 10_000) == [("t", 0)]


def test_offsets_expire_by_age_by_their_own_expiry_and_not_while_in_use():
    store = OffsetStore()
    store.put(("old", 0), CommittedOffset(1, -1, "", 1_000))
    store.put(("young", 0), CommittedOffset(1, -1, "", 1_001))
    store.put(("explicit", 0), CommittedOffset(1, -1, "", 1_000, expire_timestamp_ms=1_500))
    store.put(("kept", 0), CommittedOffset(1, -1, "", 0))
    rule = ExpiryRule(lambda committed: committed.commit_timestamp_ms, frozenset({"kept"}))
    assert expired_offsets(store, rule, 1_000, 1_999) == [("explicit", 0)]
    assert expired_offsets(store, rule, 1_000, 2_000) == [("old", 0), ("explicit", 0)]
    everything_in_use = ExpiryRule(lambda committed: 0, None)
    assert expired_offsets(store, everything_in_use, 1_000, 10**12) == []


def subscription(*topics: str) -> bytes:
    named = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 1, len(topics)) + named + struct.pack(">i", -1)


def test_subscribed_topics_are_the_union_of_the_members():
    assert subscribed_topics([subscription("a", "b"), subscription("b", "c")]) == {"a", "b", "c"}
    assert subscribed_topics([]) == frozenset()


@pytest.mark.parametrize(
    "broken",
    [b"", b"\x00", subscription("a")[:8], struct.pack(">hi", 0, 2**31 - 1), struct.pack(">hih", 0, 1, -5)],
)
def test_subscription_that_cannot_be_read_means_any_topic(broken):
    assert subscribed_topics([subscription("a"), broken]) is None
