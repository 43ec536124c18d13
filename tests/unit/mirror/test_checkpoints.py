from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from millrace.broker.errors import UnreadableRecord
from millrace.broker.protocol.mirror_positions import LOST, Position, decode_value, encode_value
from millrace.mirror.delivery.checkpoints import Positions, encode_key
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

WHERE = SourcePartition("ewr", "flights", 0)
POSITION = Position(42, "cluster-a", UUID("12345678-1234-5678-1234-567812345678"), 3, 1_700_000_000_000)


def test_format_is_the_documented_one() -> None:
    assert encode_key(WHERE) == b'{"source":"ewr","topic":"flights","partition":0}'
    assert encode_value(POSITION) == (
        b'{"version":1,"next_offset":42,"cluster_id":"cluster-a",'
        b'"topic_id":"12345678-1234-5678-1234-567812345678","leader_epoch":3,"at_ms":1700000000000,'
        b'"log_end":-1,"waiting_since_ms":-1}'
    )
    assert decode_value(encode_value(POSITION)) == POSITION
    later = replace(POSITION, began=7)
    assert encode_value(later).endswith(b'"waiting_since_ms":-1,"began":7}')
    assert decode_value(encode_value(later)) == later
    told = replace(later, targets=(TargetPartition("agg.flights", 4), TargetPartition("flights", 0)))
    assert encode_value(told).endswith(b'"began":7,"targets":[["agg.flights",4],["flights",0]]}')
    assert decode_value(encode_value(told)) == told


def test_newest_record_of_a_key_counts() -> None:
    positions = Positions()
    positions.apply(encode_key(WHERE), encode_value(POSITION))
    later = Position(43, "cluster-a", POSITION.topic_id, 3, 0)
    positions.apply(encode_key(WHERE), encode_value(later))
    assert positions.known == {WHERE: later}


def test_unreadable_position_is_lost_and_not_absent() -> None:
    positions = Positions()
    positions.apply(encode_key(WHERE), encode_value(POSITION))
    positions.apply(encode_key(WHERE), b"{}")
    assert positions.known == {}
    assert positions.unreadable == {WHERE}


def test_position_that_is_marked_as_lost_is_lost() -> None:
    positions = Positions()
    positions.apply(encode_key(WHERE), LOST)
    assert (positions.known, positions.unreadable) == ({}, {WHERE})


def test_removed_position_is_lost_too() -> None:
    positions = Positions()
    positions.apply(encode_key(WHERE), encode_value(POSITION))
    positions.apply(encode_key(WHERE), None)
    assert positions.known == {}
    assert positions.unreadable == {WHERE}


@pytest.mark.parametrize(
    "key",
    [
        None,
        b"",
        b"[]",
        b"{}",
        b'{"source":"a","topic":"b","partition":"0"}',
        encode_key(SourcePartition("a", "b", 1 << 31)),
    ],
)
def test_foreign_key_is_ignored(key: bytes | None) -> None:
    positions = Positions()
    positions.apply(key, encode_value(POSITION))
    assert positions == Positions()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b"7",
        encode_value(POSITION).replace(b'"version":1', b'"version":2'),
        encode_value(POSITION).replace(b'"next_offset":42', b'"next_offset":-1'),
        encode_value(POSITION).replace(b'"next_offset":42', b'"next_offset":1e999'),
        encode_value(POSITION).replace(b'"next_offset":42', b'"next_offset":9223372036854775808'),
        encode_value(replace(POSITION, leader_epoch=1 << 31)),
        encode_value(replace(POSITION, log_end=-2)),
        encode_value(POSITION).replace(b'"topic_id":"1', b'"topic_id":"x'),
        *(
            encode_value(POSITION).replace(b"}", b',"targets":' + targets + b"}")
            for targets in (b"7", b'["flights"]', b'[["flights",-1]]', b'[["flights",true]]', b"[[0,0]]")
        ),
    ],
)
def test_value_that_cannot_be_understood_is_an_unreadable_record(value: bytes) -> None:
    with pytest.raises(UnreadableRecord):
        decode_value(value)
