"""Where a reset puts a group's offset, and that it never leaves the partition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millrace.broker.client.groups import assigned_partitions
from millrace.broker.client.offset_reset import Target, TargetKind, new_offset

OFFSETS = st.integers(0, 2**40)


def reset(kind: TargetKind, value: int = 0, committed: int | None = 50, at_time: int | None = None):
    return new_offset(Target(kind, value), first=10, end=100, committed=committed, at_time=at_time)


def test_each_kind_of_target():
    assert reset(TargetKind.EARLIEST) == (10, "")
    assert reset(TargetKind.LATEST) == (100, "")
    assert reset(TargetKind.OFFSET, 42) == (42, "")
    assert reset(TargetKind.OFFSET, 9) == (10, "9 is before the first offset")
    assert reset(TargetKind.OFFSET, 101) == (100, "101 is after the end")
    assert reset(TargetKind.SHIFT, -5) == (45, "")
    assert reset(TargetKind.SHIFT, -41) == (10, "9 is before the first offset")
    assert reset(TargetKind.SHIFT, 1, committed=None).offset is None
    assert reset(TargetKind.TIMESTAMP, 1_000, at_time=33) == (33, "")
    assert reset(TargetKind.TIMESTAMP, 1_000) == (100, "no record is as young: the end")


@given(st.sampled_from(TargetKind), st.integers(-(2**41), 2**41), OFFSETS, OFFSETS, st.none() | OFFSETS)
def test_no_offset_is_set_outside_the_partition(kind, value, first, size, committed):
    at_time = first + size // 2
    new = new_offset(Target(kind, value), first=first, end=first + size, committed=committed, at_time=at_time)
    assert new.offset is None or first <= new.offset <= first + size


def test_assignment_of_a_consumer_is_read():
    two_topics = bytes.fromhex("0001 00000002 0001 62 00000001 00000000 0001 61 00000002 00000003 00000001")
    assert assigned_partitions(two_topics + b"user data") == (("a", 1), ("a", 3), ("b", 0))


@given(st.binary(max_size=40))
def test_assignment_of_something_else_is_none(garbage):
    assert isinstance(assigned_partitions(garbage), tuple)
    assert assigned_partitions(b"\x00\x01\x7f\xff\xff\xff" + b"\xff\xff" * 4) == ()
