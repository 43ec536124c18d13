"""Any log of a source, fetched in answers that are cut anywhere, through a real pipeline: the records that
leave it are those of the log, in order, unchanged.

The oracle reads the whole log one record at a time (`fetch_answers.expected_records`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.protocol.batch import (
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    parse_header,
    verify_crc,
)
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.batches.rebatch import stamp_for_target
from millrace.mirror.sources import survey
from millrace.mirror.sources.doubt import Found, Question
from millrace.mirror.topics.routes import SourcePartition
from tests.unit.mirror.fetch_answers import (
    NOW_MS,
    Answer,
    Content,
    Raw,
    contents,
    expected_records,
    marker,
    raw_batch,
)
from tests.unit.mirror.pipeline_stage import at, pipeline_of, started
from tests.unit.mirror.source_stage import OLD, Source, surveyor_of

MOST_ANSWERS = 2_000


@dataclass(frozen=True)
class Written:
    """One step of a producer's: `times` batches of `count` records each, or (`ends`) the end of its
    transaction."""

    producer: int  # -1: none
    ends: bool = False
    aborts: bool = False
    in_transaction: bool = False
    times: int = 1
    count: int = 1
    records: tuple[Raw, ...] = ()
    left_out: int = 0  # every so-manieth record is gone
    hole_before: int = 0
    codec: int = 0
    bits: int = 0
    base_ms: int = NOW_MS


octets = st.one_of(st.none(), st.just(b""), st.binary(max_size=90), st.just(b"long" * 700))
raw_records = st.builds(
    Raw,
    offset_delta=st.just(0),
    timestamp_delta=st.one_of(st.integers(-3, 200), st.integers(-(2**44), 2**44)),
    key=octets,
    value=octets,
    headers=st.lists(st.tuples(st.sampled_from((b"", b"h", b"trace-id")), octets), max_size=3).map(tuple),
    attributes=st.sampled_from((0, 0, 0x80)),
)
data = st.builds(
    Written,
    producer=st.sampled_from((-1, -1, 7, 8)),
    in_transaction=st.booleans(),
    times=st.sampled_from((1, 1, 2, 7, 60)),
    count=st.sampled_from((1, 1, 1, 2, 5, 40)),
    records=st.lists(raw_records, min_size=1, max_size=3).map(tuple),
    left_out=st.sampled_from((0, 0, 0, 2, 3)),
    hole_before=st.sampled_from((0, 0, 0, 1, 30)),
    codec=st.sampled_from((0, 0, 0, 1, 2, 3, 3, 4)),
    bits=st.sampled_from((0, 0, 0, LOG_APPEND_TIME_BIT, DELETE_HORIZON_BIT, 0x100)),
    base_ms=st.sampled_from((NOW_MS, NOW_MS + 5, 0, -1)),
)
large = st.builds(
    Written,
    producer=st.just(-1),
    count=st.just(5_000),
    records=st.just((Raw(0, 1, b"k", b"v"),)),
    codec=st.sampled_from((0, 3)),
)
end = st.builds(Written, producer=st.sampled_from((7, 8)), ends=st.just(True), aborts=st.booleans())
steps = st.lists(st.one_of(data, data, data, end), min_size=1, max_size=8)


@dataclass
class Log:
    batches: list[tuple[int, bytearray]] = field(default_factory=list)  # the offset after it, and the batch
    aborted: list[tuple[int, int, int]] = field(default_factory=list)  # producer, first offset, its end's
    end: int = 0

    def add(self, made: bytearray) -> None:
        self.end = parse_header(made).next_offset
        self.batches.append((self.end, made))

    def answer(self, offset: int, size: int) -> FetchedPartition:
        """As a broker gives it: the first batch whole, then as many bytes as were asked for."""
        wanted = [made for following, made in self.batches if following > offset]
        whole = bytearray().join(wanted)
        found = memoryview(whole[: max(size, len(wanted[0]))])
        aborted = tuple((producer, first) for producer, first, last in self.aborted if last >= offset)
        return FetchedPartition("flights", 0, 0, self.end, self.end, 0, aborted, None, found)


def written(steps: list[Written]) -> Log:
    log = Log()
    open_since: dict[int, int] = {}
    offset = 3
    for step in [*steps, *(Written(producer, ends=True, aborts=producer == 8) for producer in (7, 8))]:
        if step.ends:
            if step.producer in open_since:
                first = open_since.pop(step.producer)
                if step.aborts:
                    log.aborted.append((step.producer, first, offset))
                log.add(marker(offset, step.producer, abort=step.aborts))
                offset = log.end
            continue
        offset += step.hole_before
        bits = step.bits
        if step.producer >= 0 and step.in_transaction:
            bits |= TRANSACTIONAL_BIT
            open_since.setdefault(step.producer, offset)
        for _ in range(step.times):
            log.add(batch_of(step, offset, bits))
            offset = log.end
    return log


def batch_of(step: Written, offset: int, bits: int) -> bytearray:
    kept = [at for at in range(step.count) if not step.left_out or at % step.left_out]
    given = [step.records[at % len(step.records)] for at in kept]
    records = [
        Raw(at, raw.timestamp_delta, raw.key, raw.value, raw.headers, raw.attributes)
        for at, raw in zip(kept, given, strict=True)
    ]
    return raw_batch(
        records,
        base_offset=offset,
        codec=step.codec,
        bits=bits,
        last_offset_delta=step.count - 1,
        base_ms=step.base_ms,
        max_ms=NOW_MS + 77 if bits & LOG_APPEND_TIME_BIT else None,
        producer_id=step.producer,
    )


def carried(log: Log, sizes: list[int], limit: int, walk: BatchWalk) -> list[Content]:
    """What arrives at a target that takes batches of up to `limit` bytes."""
    plain, target, around = started()
    around.limit, around.walk = limit, walk
    pipeline = pipeline_of(plain.partition, plain.target, target, around)
    pipeline.ready(at(3))
    found: list[Content] = []
    for number in range(MOST_ANSWERS):
        if pipeline.progress.settled_position == log.end:
            return found
        size = max(sizes[number % len(sizes)], pipeline.doubt.needed_size)
        pipeline.accept(log.answer(pipeline.progress.fetch_offset, size))
        if (question := pipeline.take_question()) is not None:
            told = looked_at(log, question, sizes[-1])
            assert told.is_in_order, told
            pipeline.looked(question, told)
        assert pipeline.gap is None
        while target.queue:
            outgoing = target.queue[0]
            stamp_for_target(outgoing.batch, 9, 0, 0)
            verify_crc(outgoing.batch, 0, parse_header(outgoing.batch))
            assert len(outgoing.batch) <= limit
            found += contents(outgoing.batch, outgoing.offsets)
            target.acknowledge()
    raise AssertionError("it stands still")


def looked_at(log: Log, question: Question, most_given: int) -> Found:
    """By a real look, at a source that gives no more than `most_given` bytes, or one batch."""

    async def fetch(*given: Any, max_bytes: int, **_: Any) -> list[FetchedPartition]:
        (asked,) = given[2].values()
        return [log.answer(asked.offset, min(max_bytes, most_given))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "fetch", fetch)
        surveyor = surveyor_of(Source(latest=log.end))
        return asyncio.run(surveyor.look(SourcePartition("ewr", "t", 0), OLD, question))


def expected(log: Log) -> list[Content]:
    whole = bytearray().join(made for _, made in log.batches)
    aborted = [(producer, first) for producer, first, _ in log.aborted]
    return expected_records(Answer(whole, aborted), 3)


LIMITS = st.sampled_from((1 << 20, 20_000))
SIZES = st.lists(st.one_of(st.integers(1, 3_000), st.integers(1, 200_000)), min_size=1, max_size=4)
WALKS = st.sampled_from(((32 << 10, 128 << 10), (12 << 10, 2 << 10), (1 << 20, 1 << 20), (0, 128 << 10)))


@settings(max_examples=150)
@given(steps, SIZES, LIMITS, WALKS)
def test_every_committed_record_arrives_once_in_order_whatever_the_log_and_the_answers(
    steps: list[Written], sizes: list[int], limit: int, walk: tuple[int, int]
) -> None:
    log = written(steps)
    if log.batches:
        assert carried(log, sizes, limit, BatchWalk(*walk)) == expected(log)


@settings(max_examples=5)
@given(st.lists(st.one_of(data, large), min_size=1, max_size=2), large, LIMITS)
def test_batches_of_thousands_of_records_beside_tiny_ones_arrive_whole(
    steps: list[Written], last: Written, limit: int
) -> None:
    log = written([*steps, last])
    assert carried(log, [50_000], limit, BatchWalk()) == expected(log)
