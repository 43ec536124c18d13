"""Reading the offsets topic anew: fast, off the event loop, and what decoding every record in order gives."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from millrace.broker.errors import CorruptMessage, InvalidRecord, UnreadableRecord
from millrace.broker.groups import offsets_replay
from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.groups.membership import Group
from millrace.broker.groups.offsets import CommittedOffset, OffsetStore
from millrace.broker.groups.offsets_replay import Memory, OffsetsReplay
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
from millrace.broker.groups.values import GroupSnapshot
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.compression import LZ4
from millrace.broker.protocol.control_records import COMMIT, build_marker, control_type
from millrace.broker.protocol.records import Record, build_batch, read_records
from tests import seeds

GROUPS = ("g", "gruppe-ä", "")
TOPICS = ("t", "тема")


def in_order(batches: list[bytes]) -> Memory:
    """Every record of every batch, decoded one after the other."""
    memory = Memory()
    for batch in batches:
        header = parse_header(batch)
        if header.is_control:
            kind = control_type(memoryview(batch))
            for group_id in memory.open_transactions.pop(header.producer_id, ()):
                memory.offsets[group_id].end_transaction(
                    header.producer_id, kind == COMMIT, header.base_offset
                )
            continue
        for record in read_records(batch):
            try:
                remember(record, header, memory)
            except UnreadableRecord:
                memory.unreadable += 1
    return memory


def remember(record: Record, header: Any, memory: Memory) -> None:
    match decode_key(record.key) if record.key is not None else None:
        case OffsetKey(group_id, topic, partition):
            store = memory.offsets.setdefault(group_id, OffsetStore())
            if record.value is None:
                store.remove((topic, partition), before_log_offset=record.offset)
            elif (committed := decode_offset_value(record.value, record.offset)) is None:
                memory.unknown += 1
            elif header.is_transactional:
                store.put_pending(header.producer_id, (topic, partition), committed)
                memory.open_transactions.setdefault(header.producer_id, set()).add(group_id)
            else:
                store.put((topic, partition), committed)
        case GroupKey(group_id):
            if record.value is None:
                memory.snapshots.pop(group_id, None)
            elif (snapshot := decode_group_value(record.value)) is None:
                memory.unknown += 1
            else:
                memory.snapshots[group_id] = snapshot
        case None:
            memory.unknown += 1


def said(memory: Memory) -> Any:
    """What is remembered, without what is empty."""
    offsets = {group: dict(store.items()) for group, store in memory.offsets.items()}
    pending = {
        (group, producer_id, partition): committed
        for group, store in memory.offsets.items()
        for producer_id, each in store._pending.items()
        for partition, committed in each.items()
    }
    told = {group for groups in memory.open_transactions.values() for group in groups}
    assert {group for group, _, _ in pending} <= told
    return (
        memory.snapshots,
        {group: kept for group, kept in offsets.items() if kept},
        pending,
        memory.unreadable,
        memory.unknown,
    )


def a_key(rng: random.Random) -> bytes | None:
    group, topic = rng.choice(GROUPS), rng.choice(TOPICS)
    plain = encode_offset_key(group, topic, rng.randrange(2))
    return rng.choice(
        [
            *[plain] * 8,
            b"\0\0" + plain[2:],  # version 0 is of the same offset
            plain + b"more",
            plain[:-1],
            plain[:5] + b"\xff" + plain[6:],
            encode_group_key(group),
            b"\0\x03" + plain[2:],
            b"\0",
            None,
        ]
    )


def a_value(rng: random.Random, key: bytes | None) -> bytes | None:
    if key is not None and key[:2] == b"\0\x02":
        snapshot = GroupSnapshot("consumer", rng.randrange(9), "range", None, 5, ())
        return rng.choice([encode_group_value(snapshot), b"\0\x09", b"\0\x03\0", None])
    commit = CommittedOffset(rng.randrange(99), 1, rng.choice(("", "m", "ü")), 7, rng.choice((None, 9)))
    value = encode_offset_value(commit)
    old = struct.pack(">hqh", rng.choice((0, 2)), 5, 0) + struct.pack(">q", 7)
    return rng.choice([*[value] * 6, value + b"more", value[:-9], b"\0\x09", b"\0", old, None, None])


def history(rng: random.Random) -> list[bytes]:
    batches = []
    offset = 0
    for _ in range(rng.randrange(1, 60)):
        producer_id = rng.randrange(3)
        if rng.random() < 0.15:
            batch = bytearray(build_marker(producer_id, 0, 0, rng.random() < 0.6, 0))
        else:
            is_transactional = rng.random() < 0.3
            records = []
            for _ in range(rng.randrange(1, 5)):
                key = a_key(rng)
                headers = (("h", b"v"),) if rng.random() < 0.05 else ()
                records.append(Record(key, a_value(rng, key), headers, 1))
            batch = build_batch(
                records,
                compression=LZ4 if rng.random() < 0.1 else 0,
                producer_id=producer_id if is_transactional else -1,
                producer_epoch=0 if is_transactional else -1,
                transactional=is_transactional,
            )
        batch[:8] = offset.to_bytes(8, "big")
        offset = parse_header(batch).next_offset + rng.choice((0, 0, 3))  # compaction leaves holes
        batches.append(bytes(batch))
    return batches


def replayed(batches: list[bytes], rng: random.Random) -> OffsetsReplay:
    replay = OffsetsReplay()
    first = 0
    while first < len(batches):
        end = first + rng.randrange(1, 20)
        replay.take(memoryview(b"".join(batches[first:end])))
        first = end
    return replay


def test_memory_is_what_decoding_every_record_in_order_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seeds.given())
    for _ in range(seeds.runs(600)):
        monkeypatch.setattr("millrace.broker.groups.offsets_replay.COLUMN_SIZE", rng.choice((3, 7, 1000)))
        batches = history(rng)
        replay = replayed(batches, rng)
        assert replay.end_offset == parse_header(batches[-1]).next_offset
        assert said(replay.memory()) == said(in_order(batches))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda batch: batch.__setitem__(16, 9), CorruptMessage),
        (lambda batch: batch.__setitem__(57, 0x7F), InvalidRecord),
        (lambda batch: batch.__setitem__(61, 0x7F), InvalidRecord),
    ],
    ids=["magic", "record count", "record length"],
)
def test_a_damaged_batch_fails_the_load(change: Callable[[bytearray], None], error: type[Exception]) -> None:
    """It is tried again: a coordinator that goes on without it would answer from less than there is."""
    good = build_batch([Record(encode_offset_key("g", "t", 0), None, (), 1)])
    bad = bytearray(good)
    change(bad)
    with pytest.raises(error):
        OffsetsReplay().take(memoryview(bytes(good + bad)))


class OneRunLog:
    """A log of 500 groups with their offsets, given in one run."""

    def __init__(self) -> None:
        value = encode_offset_value(CommittedOffset(5, -1, "", 7))
        records = [Record(encode_offset_key(f"g{n}", "t", 0), value, (), 1) for n in range(500)]
        self.run = memoryview(bytes(build_batch(records)))

    def partition_count(self) -> int:
        return 1

    async def until_committed(self, _partition: int, offset: int) -> None:
        assert offset == 500

    async def read_all(self, _partition: int) -> AsyncIterator[memoryview]:
        yield self.run


def test_a_load_decodes_nothing_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            threads.add(threading.get_ident())
            return work(*arguments, **options)

        return noted

    replay = "millrace.broker.groups.offsets_replay"
    monkeypatch.setattr(f"{replay}.decode_offset_value", noting(decode_offset_value))
    monkeypatch.setattr(f"{replay}._kernels", noting(offsets_replay._kernels))
    monkeypatch.setattr("millrace.broker.groups.owned_partition.Group", noting(Group))

    async def scenario() -> None:
        log: Any = OneRunLog()
        groups = GroupCoordinator(
            GroupConfig(), log, clock_ms=lambda: 1, steady_ms=lambda: 1, compute=asyncio.to_thread
        )
        await groups.load(0)
        assert len(groups._partitions[0].groups) == 500
        await groups.close()

    asyncio.run(scenario())
    assert threads and threading.get_ident() not in threads
