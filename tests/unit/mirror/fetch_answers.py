"""Fetch answers made at random, and what a mirror has to make of them, said in plain Python.

The oracle of the compiled paths: `committed_batches` and `read_records` look at one batch and one record at
a time. Every answer comes from a seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.broker.client.committed import committed_batches
from millrace.broker.protocol import batch as batch_format
from millrace.broker.protocol.batch import (
    HEADER_SIZE,
    BatchHeader,
    pack_header,
    parse_header,
    seal,
    verify_crc,
)
from millrace.broker.protocol.compression import compress
from millrace.broker.protocol.records import read_records
from millrace.broker.protocol.wire import zigzag
from millrace.mirror.batches.coalesce import COALESCE_BELOW, BatchWalk
from millrace.mirror.batches.intake import Prepared, prepare
from millrace.mirror.batches.rebatch import BatchPath, stamp_for_target

NOW_MS = 1_700_000_000_000
NO_LIMIT = 1 << 30


class Content(NamedTuple):
    """What has to survive of a record, and where it was."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


@dataclass(frozen=True)
class Raw:
    """One record as it is written: deltas, and any attributes byte."""

    offset_delta: int
    timestamp_delta: int
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()
    attributes: int = 0

    def encode(self) -> bytes:
        body = bytearray([self.attributes])
        body += zigzag(self.timestamp_delta) + zigzag(self.offset_delta)
        for each in (self.key, self.value):
            body += nullable(each)
        body += zigzag(len(self.headers))
        for name, value in self.headers:
            body += nullable(name) + nullable(value)
        return bytes(zigzag(len(body)) + body)


def nullable(data: bytes | None) -> bytes:
    return bytes(zigzag(-1)) if data is None else bytes(zigzag(len(data)) + data)


def raw_batch(
    records: Sequence[Raw],
    *,
    base_offset: int = 0,
    codec: int = 0,
    bits: int = 0,
    last_offset_delta: int | None = None,
    base_ms: int = NOW_MS,
    max_ms: int | None = None,
    producer_id: int = -1,
    leader_epoch: int = 0,
    record_count: int | None = None,
    body: bytes | None = None,
) -> bytearray:
    """One batch as a source may hold it: holes, any bits, any deltas."""
    section = b"".join(record.encode() for record in records) if body is None else body
    packed = compress(codec, section) if codec else section
    if last_offset_delta is None:
        last_offset_delta = max((record.offset_delta for record in records), default=0)
    if max_ms is None:
        max_ms = max((base_ms + record.timestamp_delta for record in records), default=base_ms)
    made = bytearray(
        pack_header(
            size=HEADER_SIZE + len(packed),
            attributes=codec | bits,
            last_offset_delta=last_offset_delta,
            base_timestamp=base_ms,
            max_timestamp=max_ms,
            record_count=len(records) if record_count is None else record_count,
            base_offset=base_offset,
            leader_epoch=leader_epoch,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=0 if producer_id >= 0 else -1,
        )
    )
    made += packed
    seal(made)
    return made


def marker(offset: int, producer_id: int, *, abort: bool, leader_epoch: int = 0) -> bytearray:
    key = b"\x00\x00\x00\x00" if abort else b"\x00\x00\x00\x01"
    bits = batch_format.CONTROL_BIT | batch_format.TRANSACTIONAL_BIT
    return raw_batch(
        [Raw(0, 0, key, b"\x00" * 6)],
        base_offset=offset,
        bits=bits,
        producer_id=producer_id,
        leader_epoch=leader_epoch,
    )


@dataclass
class Answer:
    data: bytearray = field(default_factory=bytearray)
    aborted: list[tuple[int, int]] = field(default_factory=list)
    first_offset: int = 0
    next_offset: int = 0


def random_bytes(rng: random.Random, most: int) -> bytes | None:
    if rng.random() < 0.15:
        return None
    size = rng.choice((0, 1, 7, 63, 64, 200, most))
    return bytes(rng.choices(b"abcdefgh", k=min(size, most)))


def random_records(rng: random.Random, count: int) -> list[Raw]:
    odd_times = rng.random() < 0.2
    return [
        Raw(
            offset_delta,
            rng.choice((-5, 0, 1, 63, 64, 10**6, -(10**12), 2**40)) if odd_times else rng.randrange(0, 100),
            random_bytes(rng, 80),
            random_bytes(rng, rng.choice((300, 300, 300, 5_000))),
            tuple(
                (rng.choice((b"", b"h", b"trace-id", "ключ".encode())), random_bytes(rng, 40))
                for _ in range(rng.choice((0, 0, 1, 3)))
            ),
            attributes=rng.choice((0, 0, 0, 1, 0x80)),
        )
        for offset_delta in range(count)
    ]


def random_answer(seed: int, batches: int = 40) -> Answer:
    """Small and larger batches of all codecs, several producers, transactions that end either way, holes,
    append time, delete horizons, empty batches."""
    rng = random.Random(seed)
    offset = rng.choice((0, 5, 2**31 + 3, 2**40))
    answer = Answer(first_offset=offset)
    codec = rng.randrange(5)
    open_since: dict[int, int] = {}
    for _ in range(batches):
        if rng.random() < 0.15:
            codec = rng.randrange(5)
        if rng.random() < 0.2:
            offset += rng.randrange(1, 50)
        if open_since and rng.random() < 0.25:
            producer = rng.choice(sorted(open_since))
            is_abort = rng.random() < 0.5
            if is_abort:
                answer.aborted.append((producer, open_since[producer]))
            del open_since[producer]
            answer.data += marker(offset, producer, abort=is_abort)
            offset += 1
            continue
        count = rng.choice((1, 1, 1, 1, 2, 3, 5, 120))
        records = random_records(rng, count)
        last_delta = count - 1
        if rng.random() < 0.2:  # compaction
            records = [record for record in records if rng.random() < 0.6]
            last_delta += rng.choice((0, 0, 2))
        bits = 0
        producer = rng.choice((-1, -1, 7, 8))
        if producer >= 0 and rng.random() < 0.6:
            bits |= batch_format.TRANSACTIONAL_BIT
            open_since.setdefault(producer, offset)
        if rng.random() < 0.15:
            bits |= batch_format.LOG_APPEND_TIME_BIT
        if rng.random() < 0.1:
            bits |= batch_format.DELETE_HORIZON_BIT
        if rng.random() < 0.05:
            bits |= 0x100
        max_ms = NOW_MS + 77 if bits & batch_format.LOG_APPEND_TIME_BIT else None
        answer.data += raw_batch(
            records,
            base_offset=offset,
            codec=codec,
            bits=bits,
            last_offset_delta=last_delta,
            base_ms=rng.choice((NOW_MS, NOW_MS + 5, NOW_MS, 0, -1)),
            max_ms=max_ms,
            producer_id=producer,
            leader_epoch=rng.randrange(3) if rng.random() < 0.1 else 0,
        )
        offset += last_delta + 1
    answer.next_offset = offset
    return answer


def expected_records(answer: Answer, from_offset: int) -> list[Content]:
    """The records that have to arrive, in order."""
    expected: list[Content] = []
    for batch, _, is_data in committed_batches(memoryview(answer.data), answer.aborted):
        if is_data:
            expected += [content for content in contents(batch) if content.offset >= from_offset]
    return expected


def contents(batch: bytes | bytearray | memoryview, offsets: Sequence[int] | None = None) -> list[Content]:
    """The records of one batch; with `offsets` instead of its own."""
    records = read_records(batch)
    named = [record.offset for record in records] if offsets is None else offsets
    return [
        Content(offset, record.key, record.value, record.headers, record.timestamp_ms)
        for offset, record in zip(named, records, strict=True)
    ]


def headers_of(answer: Answer) -> list[tuple[BatchHeader, bool]]:
    return [
        (header, is_data) for _, header, is_data in committed_batches(memoryview(answer.data), answer.aborted)
    ]


def taken(
    answer: Answer,
    from_offset: int = 0,
    *,
    max_batch_size: int = NO_LIMIT,
    coalesce_below: int = COALESCE_BELOW,
    counts: Counter[BatchPath] | None = None,
) -> list[Prepared]:
    counted = Counter() if counts is None else counts

    def count(path: BatchPath, batches: int, records: int, size: int) -> None:
        counted[path] += batches

    walk = BatchWalk(coalesce_below)
    data = memoryview(bytes(answer.data))
    return list(prepare(walk, data, answer.aborted, from_offset, max_batch_size, count))


def stamped(batch: memoryview) -> bytearray:
    copy = bytearray(batch)
    stamp_for_target(memoryview(copy), 77, 3, 1_000)
    return copy


def arrived(prepared: Sequence[Prepared]) -> list[Content]:
    """The records as the target would show them, under their source offsets; checks every batch."""
    found: list[Content] = []
    for each in prepared:
        if each.batch is None:
            assert not each.offsets, "a record was held to be too large"
            continue
        batch = stamped(each.batch)
        header = parse_header(batch)
        verify_crc(batch, 0, header)
        assert header.size == len(batch)
        assert (header.base_offset, header.last_offset_delta + 1) == (0, header.record_count)
        assert header.attributes == header.compression
        records = contents(batch, each.offsets)
        assert header.max_timestamp >= max(record.timestamp_ms for record in records)
        found += records
    return found
