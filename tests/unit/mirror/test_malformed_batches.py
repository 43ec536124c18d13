"""Records that nobody can read, under a right checksum: passed on, and looked at when the target fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lz4.frame
import pytest

from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.broker.errors import (
    CorruptMessage,
    InvalidRecord,
    OutOfOrderSequence,
    UnknownServerError,
)
from millrace.broker.protocol.batch import HEADER_SIZE, LOG_OVERHEAD, parse_header, seal
from millrace.broker.protocol.compression import compress
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.batches import rebatch
from millrace.mirror.batches.coalesce import BatchWalk
from millrace.mirror.batches.rebatch import fault_of, split
from millrace.mirror.delivery import sink as sink_module
from millrace.mirror.delivery.lane import Identity
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.fetch_answers import Raw, raw_batch
from tests.unit.mirror.pipeline_stage import SECOND, Around, answer, at, pipeline_of
from tests.waiting import until_async as until

GZIP, LZ4 = 1, 3
TARGET = TargetPartition("flights", 0)


def with_section(section: bytes, *, codec: int, base_offset: int = 0) -> bytearray:
    """A batch of two records that has this for them, compressed or not."""
    made = raw_batch([Raw(0, 0), Raw(1, 0)], base_offset=base_offset, codec=codec, base_ms=SECOND)
    made[HEADER_SIZE:] = section
    made[8:LOG_OVERHEAD] = (len(made) - LOG_OVERHEAD).to_bytes(4, "big")
    seal(made)
    return made


def plain(*deltas: int, size: int = 50) -> bytes:
    return bytes(raw_batch([Raw(delta, 0, value=b"x" * size) for delta in deltas])[HEADER_SIZE:])


MALFORMED: dict[str, Callable[[int], bytes]] = {
    "garbage": lambda _: b"\xde\xad\xbe\xef" * 20,
    "cut": lambda codec: compress(codec, plain(0, 1))[:-9],
    "one record of two": lambda codec: compress(codec, plain(0)),
    "more than its records": lambda codec: compress(codec, plain(0, 1) + b"\x00\x01"),
    "offsets": lambda codec: compress(codec, plain(0, 7)),
}


@pytest.mark.parametrize("codec", range(5))
def test_records_that_nobody_can_read_are_found(codec: int) -> None:
    """Apache Kafka 4.1 answers UNKNOWN_SERVER_ERROR to most of them, INVALID_RECORD to the others."""
    assert fault_of(memoryview(with_section(compress(codec, plain(0, 1)), codec=codec))) is None
    for name, section in MALFORMED.items():
        batch = memoryview(with_section(section(codec), codec=codec))
        assert isinstance(fault_of(batch), CorruptMessage), name
        assert split(batch, [0, 1]) == [], name


def test_records_that_take_too_much_room_are_not_called_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebatch, "MAX_DECOMPRESSED_SIZE", 50)
    assert fault_of(memoryview(with_section(compress(GZIP, plain(0, 1)), codec=GZIP))) is None


def test_records_that_java_cannot_read_are_written_anew() -> None:
    section = lz4.frame.compress(plain(0, 1, size=100_000), block_linked=True)
    batch = memoryview(with_section(section, codec=LZ4))
    fault = fault_of(batch)
    assert isinstance(fault, InvalidRecord) and "blocks depend on each other" in str(fault)
    halves = [piece.batch for piece in split(batch, [0, 1])]
    assert [None if each is None else fault_of(each) for each in halves] == [None, None]


MOST_SENT = 8


class Broker:
    """One partition's log as Apache Kafka keeps it: sequences are followed, and records are read."""

    def __init__(self, code: int) -> None:
        self.code = code  # for what it cannot read
        self.failures = 0  # of its own, which are over then
        self.log: list[bytes] = []
        self.sent: list[int] = []
        self.next_sequence = 0

    async def produce(
        self, _cluster: object, _node: int, batches: dict[Any, Any], **_: object
    ) -> dict[Any, ProduceOutcome]:
        ((target, batch),) = batches.items()
        header = parse_header(batch)
        self.sent.append(header.record_count)
        code = 0
        if header.base_sequence != self.next_sequence:
            code = OutOfOrderSequence.code
        elif isinstance(fault_of(batch), CorruptMessage):
            code = self.code
        elif self.failures:
            self.failures -= 1
            code = UnknownServerError.code
        else:
            self.log.append(bytes(batch[HEADER_SIZE:]))
            self.next_sequence += header.record_count
        return {target: ProduceOutcome(code, -1 if code else 0)}


class Stage:
    """A pipeline that is carried by a real sink to a `Broker`, in a transaction or not."""

    def __init__(
        self, patch: pytest.MonkeyPatch, code: int, *skipped: GapClass, in_transaction: bool
    ) -> None:
        self.broker = Broker(code)
        self.around = Around(*skipped)
        self.around.walk = BatchWalk(0)
        self.looked = 0
        self.doomed: list[str] = []

        async def metadata(*_: object, **__: object) -> Any:
            return SimpleNamespace(leader=lambda *_: 1)

        async def init_producer_id(*_: object) -> tuple[int, int]:
            return 7, 0

        def look(batch: memoryview) -> Any:
            self.looked += 1
            return fault_of(batch)

        patch.setattr(sink_module, "init_producer_id", init_producer_id)
        patch.setattr(sink_module, "produce", self.broker.produce)
        patch.setattr(sink_module, "fault_of", look)
        cluster: Any = SimpleNamespace(metadata=metadata, close_purpose=lambda _: None)
        filling = SimpleNamespace(
            lets=lambda _: True, only_again=False, sent=lambda *_: None, doom=self.doomed.append
        )
        alternation: Any = SimpleNamespace(filling=filling) if in_transaction else None
        self.sink = Sink(cluster, self.around.now_ms, alternation=alternation)
        if in_transaction:
            self.sink.renew(Identity(7, 0))
        where = SourcePartition("ewr", *TARGET)
        self.pipeline: PartitionPipeline = pipeline_of(where, TARGET, self.sink, self.around)
        self.pipeline.ready(at(0))


def told(
    patch: pytest.MonkeyPatch,
    code: int,
    *skipped: GapClass,
    in_transaction: bool,
    until_: Callable[[Stage], object],
    failures: int = 0,
) -> Stage:
    """Three batches, the second of which cannot be read (but where the target fails by itself)."""
    stages: list[Stage] = []

    async def story() -> None:
        stage = Stage(patch, code, *skipped, in_transaction=in_transaction)
        stages.append(stage)
        stage.broker.failures = failures
        running = asyncio.create_task(stage.sink.run())
        section = compress(GZIP, plain(0, 1)) if failures else MALFORMED["garbage"](GZIP)
        second = with_section(section, codec=GZIP, base_offset=2)
        batches = [build(0, b"a"), second, build(4, b"b")]
        stage.pipeline.accept(answer(*batches, end=6))
        await until(lambda: until_(stage) or len(stage.broker.sent) > MOST_SENT)
        await stage.around.rest()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())
    return stages[0]


def build(base_offset: int, value: bytes) -> bytearray:
    made = bytearray(build_batch([Record(b"k", value, timestamp_ms=SECOND)] * 2))
    made[:8] = base_offset.to_bytes(8, "big")
    return made


EITHER_WAY = pytest.mark.parametrize("in_transaction", [False, True])


@EITHER_WAY
@pytest.mark.parametrize("code", [UnknownServerError.code, InvalidRecord.code])
def test_malformed_batch_that_the_target_fails_at_is_a_gap_of_damage_as_a_whole(
    code: int, in_transaction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_over(stage: Stage) -> bool:
        return stage.pipeline.progress.position_to_write() == 6

    stage = told(monkeypatch, code, GapClass.CORRUPT, in_transaction=in_transaction, until_=is_over)
    assert stage.around.events == [(2, 4, "corrupt")]
    assert stage.broker.log == [bytes(build(0, each)[HEADER_SIZE:]) for each in (b"a", b"b")]
    assert (stage.looked, stage.doomed) == (1, [])


@EITHER_WAY
def test_malformed_batch_stops_its_partition_where_that_is_the_policy(
    in_transaction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = UnknownServerError.code
    stage = told(
        monkeypatch,
        code,
        in_transaction=in_transaction,
        until_=lambda stage: stage.pipeline.state is State.STOPPED and stage.around.events,
    )
    gap = stage.pipeline.gap
    assert gap is not None and (gap.from_offset, gap.to_offset, gap.gap_class) == (2, 4, GapClass.CORRUPT)
    assert gap.reason.startswith("its checksum is right, but gzip data cannot be decompressed")
    assert stage.broker.log == [bytes(build(0, b"a")[HEADER_SIZE:])]
    assert (stage.pipeline.progress.position_to_write(), stage.doomed) == (2, [])


@EITHER_WAY
def test_batch_that_is_whole_is_sent_until_the_target_fails_no_more(
    in_transaction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error without a meaning of its own is no word about the batch. It is looked at once."""
    stage = told(
        monkeypatch,
        0,
        GapClass.CORRUPT,
        in_transaction=in_transaction,
        until_=lambda stage: stage.pipeline.progress.position_to_write() == 6,
        failures=2,
    )
    assert len(stage.broker.log) == 3 and stage.around.events == []
    assert (stage.looked, stage.doomed) == (1, [])
