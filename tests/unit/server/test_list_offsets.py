"""ListOffsets: the hand-written version 0 and what every version refuses."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.errors import ProtocolError, UnknownTopicOrPartition
from millrace.broker.protocol.frames import Api, decode_request
from millrace.broker.server.answers import build_entity, request_type
from millrace.broker.server.handlers import list_offsets
from millrace.broker.server.handlers.list_offsets import (
    EARLIEST,
    LATEST,
    MOST_TIMES_V0,
    decode_v0,
    offsets_before,
)
from millrace.broker.telemetry.metrics import BrokerMetrics

NOW_MS = 10_000
SEGMENTS = [(0, 1_000), (100, 2_000), (250, 3_000)]


@pytest.mark.parametrize(
    ("timestamp", "most", "expected"),
    [
        (LATEST, 1, [300]),
        (LATEST, 10, [300, 250, 100, 0]),
        (LATEST, 2, [300, 250]),
        (EARLIEST, 1, [0]),
        (EARLIEST, 10, [0]),
        (999, 10, []),
        (1_000, 10, [0]),
        (2_500, 10, [100, 0]),
        (2_500, 1, [100]),
        (3_000, 10, [250, 100, 0]),
        (NOW_MS, 10, [300, 250, 100, 0]),
        (LATEST, 0, []),
        (LATEST, -1, []),
    ],
)
def test_offsets_before_a_time(timestamp: int, most: int, expected: list[int]) -> None:
    assert list(offsets_before(SEGMENTS, 300, timestamp, most, NOW_MS)) == expected


def test_empty_last_segment_is_no_place_of_its_own() -> None:
    assert list(offsets_before([(0, 1_000), (100, 2_000)], 100, LATEST, 10, NOW_MS)) == [100, 0]
    assert list(offsets_before([(7, 1_000)], 7, EARLIEST, 10, NOW_MS)) == [7]


class Replicas:
    """Leads t-0, whose high watermark may be behind."""

    def __init__(self, high_watermark: int, *, is_known: bool = True) -> None:
        segments = [SimpleNamespace(base_offset=base, modified_ms=at) for base, at in SEGMENTS]
        epochs = SimpleNamespace(epoch_at=lambda _offset: 3)
        log = SimpleNamespace(
            segments=segments,
            start_offset=0,
            end_offset=300,
            leader_epochs=epochs,
            max_timestamp=lambda: (260, 77),
            offset_for_time=lambda at: None if at > 5_000 else (at // 10, at),
        )
        replica = SimpleNamespace(high_watermark=high_watermark, latest_is_known=is_known, leader_epoch=4)
        self.local = SimpleNamespace(log=log, replica=replica, last_stable_offset=high_watermark - 10)

    def leader_of(self, topic: str, partition: int, _epoch: int = -1) -> Any:
        if (topic, partition) != ("t", 0):
            raise UnknownTopicOrPartition()
        return self.local

    async def on_disk_as_leader(self, local: Any, work: Any, *arguments: Any) -> Any:
        assert local is self.local
        return work(*arguments)


def services(replicas: Replicas) -> Any:
    return SimpleNamespace(
        replica_manager=replicas, metrics=BrokerMetrics(), clock=SimpleNamespace(now_ms=lambda: NOW_MS)
    )


def ask_v0(
    replicas: Replicas, *asked: tuple[int, int, int], replica_id: int = -1
) -> list[tuple[int, list[int]]]:
    body = struct.pack(">iih", replica_id, 1, 1) + b"t" + struct.pack(">i", len(asked))
    body += b"".join(struct.pack(">iqi", *one) for one in asked)
    frame = memoryview(struct.pack(">hhih", 2, 0, 9, -1) + body)
    head, position = decode_request(frame)
    answer = bytes(
        list_offsets.handle_frame(head, frame, position, SimpleNamespace(broker=services(replicas)))
    )
    size, correlation_id, topics, name_size = struct.unpack_from(">iiih", answer)
    assert (size, correlation_id, topics, name_size) == (len(answer) - 4, 9, 1, 1)
    (count,) = struct.unpack_from(">i", answer, 15)
    position, found = 19, []
    for _ in range(count):
        _, code, many = struct.unpack_from(">ihi", answer, position)
        found.append((code, list(struct.unpack_from(f">{many}q", answer, position + 10))))
        position += 10 + 8 * many
    assert position == len(answer)
    return found


def test_version_0_gives_up_to_as_many_as_asked_for() -> None:
    assert ask_v0(Replicas(300), (0, LATEST, 1), (0, EARLIEST, 1), (0, LATEST, 9)) == [
        (0, [300]),
        (0, [0]),
        (0, [300, 250, 100, 0]),
    ]


def test_version_0_shows_consumers_nothing_above_the_high_watermark() -> None:
    assert ask_v0(Replicas(120), (0, LATEST, 9)) == [(0, [120, 100, 0])]
    assert ask_v0(Replicas(120), (0, LATEST, 9), replica_id=-2) == [(0, [300, 250, 100, 0])]


def test_version_0_refuses_what_it_cannot_mean() -> None:
    assert ask_v0(Replicas(300), (0, -3, 1), (5, LATEST, 1)) == [(35, []), (3, [])]


def test_version_0_answers_a_partition_some_times_and_not_a_thousand_times() -> None:
    """A small request would be answered with megabytes."""
    some = [(0, LATEST, 9)] * MOST_TIMES_V0
    assert ask_v0(Replicas(300), *some) == [(0, [300, 250, 100, 0])] * MOST_TIMES_V0
    assert ask_v0(Replicas(300), *some, (0, EARLIEST, 1)) == [(42, [])] * (MOST_TIMES_V0 + 1)


def test_version_0_is_refused_with_more_items_than_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_offsets, "MOST_ITEMS", 4)
    assert len(ask_v0(Replicas(300), *[(0, LATEST, 9)] * 3)) == 3
    with pytest.raises(ProtocolError, match="too many items"):
        ask_v0(Replicas(300), *[(0, LATEST, 9)] * 4)


@pytest.mark.parametrize("cut", range(1, 30))
def test_version_0_cut_short_is_refused(cut: int) -> None:
    body = struct.pack(">iih", -1, 1, 1) + b"t" + struct.pack(">iiqi", 1, 0, -1, 1)
    assert decode_v0(memoryview(body), 0) == (-1, [("t", [(0, -1, 1)])])
    if cut <= len(body):
        with pytest.raises(ProtocolError):
            decode_v0(memoryview(body[:-cut]), 0)


def ask(
    replicas: Replicas, version: int, *timestamps: int, committed: bool = False, replica_id: int = -1
) -> Any:
    asked = [{"partition_index": 0, "timestamp": at, "current_leader_epoch": -1} for at in timestamps]
    fields = {
        "replica_id": replica_id,
        "isolation_level": int(committed),
        "topics": [{"name": "t", "partitions": asked}],
    }
    request = build_entity(request_type(Api.LIST_OFFSETS, version), fields)
    head = SimpleNamespace(api_key=int(Api.LIST_OFFSETS), version=version)
    context: Any = SimpleNamespace(head=head, broker=services(replicas))
    answer = asyncio.run(list_offsets.handle(request, context))
    return [
        (int(part.error_code), part.offset, getattr(part, "leader_epoch", None))
        for part in answer.topics[0].partitions
    ]


@pytest.mark.parametrize(
    ("version", "timestamp", "expected"),
    [
        (9, LATEST, (0, 200, 4)),
        (9, EARLIEST, (0, 0, 3)),
        (9, -4, (0, 0, 3)),
        (9, -5, (0, -1, -1)),
        (9, -3, (0, -1, -1)),  # the newest record is not visible yet
        (9, 1_500, (0, 150, 3)),
        (9, 2_500, (0, -1, -1)),
        (9, 9_999, (0, -1, -1)),
        (9, -6, (35, -1, -1)),
        (8, -5, (35, -1, -1)),
        (7, -4, (35, -1, -1)),
        (6, -3, (35, -1, -1)),
        (1, LATEST, (0, 200, None)),
    ],
)
def test_special_times_of_each_version(version: int, timestamp: int, expected: tuple[int, int, int]) -> None:
    assert ask(Replicas(200), version, timestamp) == [expected]


def test_committed_readers_see_the_last_stable_offset_and_replicas_the_end() -> None:
    assert ask(Replicas(200), 9, LATEST, committed=True) == [(0, 190, 4)]
    assert ask(Replicas(200), 9, LATEST, committed=True, replica_id=2) == [(0, 300, 4)]


@pytest.mark.parametrize(("version", "code"), [(9, 78), (5, 78), (4, 5), (1, 5)])
def test_new_leader_does_not_name_an_end_that_may_go_back(version: int, code: int) -> None:
    replicas = Replicas(200, is_known=False)
    assert ask(replicas, version, LATEST)[0][0] == code
    assert ask(replicas, version, EARLIEST)[0][:2] == (0, 0)
    assert ask(replicas, version, 1_500)[0][:2] == (0, 150)
    assert ask(replicas, version, 9_999)[0][0] == code


def test_partition_asked_for_twice_is_refused_once() -> None:
    assert ask(Replicas(200), 9, LATEST, EARLIEST) == [(42, -1, -1)]
