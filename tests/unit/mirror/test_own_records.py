"""The mirror's own records: cut by size, and an end with a reason where the target will never take them."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.broker.errors import FatalError, InvalidTimestamp, PolicyViolation, RecordTooLarge
from millrace.broker.protocol.mirror_positions import LOST
from millrace.broker.protocol.records import read_records
from millrace.mirror.delivery import positions_keeper
from millrace.mirror.delivery.checkpoints import Positions, encode_key, encode_records
from millrace.mirror.delivery.system_records import BATCH_SIZE, SystemRecords, cut_by_size
from millrace.mirror.offsets.offset_map import Runs
from millrace.mirror.topics.routes import SourcePartition
from tests.unit.mirror.lane_stage import Stage, position, until
from tests.unit.mirror.own_records_stage import OwnTarget

TOPIC = "millrace.positions.m"
MANY = 5_000
DEFAULT_LIMIT = 1_048_588  # Apache Kafka's max.message.bytes


def partition(number: int) -> SourcePartition:
    return SourcePartition("ewr", "flights.of.an.airline.with.a.long.name", number)


POSITIONS = list(encode_records([(partition(number), position(number)) for number in range(MANY)]))


class Target(OwnTarget):
    """Takes batches up to `limit` bytes, and refuses all others with `code`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int, code: int = RecordTooLarge.code) -> None:
        super().__init__(monkeypatch)
        self.limit, self.code = limit, code
        self.taken: list[tuple[bytes | None, bytes | None]] = []
        self.asked_count = 0

    async def produce(self, _node: int, batches: dict[Any, Any]) -> dict[Any, ProduceOutcome]:
        ((key, batch),) = batches.items()
        self.asked_count += 1
        if len(batch) > self.limit:
            return {key: ProduceOutcome(self.code)}
        self.taken += [(record.key, record.value) for record in read_records(batch)]
        return {key: ProduceOutcome()}


def write(target: Any, *times: int) -> None:
    async def story() -> None:
        records = SystemRecords(target, lambda: 0, 1)
        for _ in times or (1,):
            await records.write(TOPIC, POSITIONS, configs={})

    asyncio.run(story())


def test_cut_keeps_the_order_and_a_large_record_stands_alone() -> None:
    records = [(b"k", b"x" * size) for size in (10, 10, 500, 10, 10, 10)]
    batches = cut_by_size(records, 120)
    assert [[len(value or b"") for _, value in batch] for batch in batches] == [
        [10, 10],
        [500],
        [10, 10],
        [10],
    ]
    assert cut_by_size([], 120) == []


def test_positions_of_many_partitions_fit_a_target_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(len(key) + len(value) for key, value in POSITIONS) > DEFAULT_LIMIT
    target = Target(monkeypatch, DEFAULT_LIMIT)
    write(target)
    assert target.taken == POSITIONS
    assert target.asked_count <= 2 * sum(len(key) + len(value) for key, value in POSITIONS) / BATCH_SIZE + 1


def test_target_that_takes_less_gets_smaller_batches_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(monkeypatch, 20_000)
    write(target, 1, 2)
    assert target.taken == POSITIONS * 2
    first, refused_at_first = target.asked_count, 5
    assert first < 2 * sum(len(k) + len(v) + 40 for k, v in POSITIONS) / 8_000 + refused_at_first


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            RecordTooLarge.code,
            "takes no record of .* bytes .*; raise its max.message.bytes",
        ),
        (PolicyViolation.code, "refuses the mirror's own records for good .*configs"),
    ],
)
def test_answer_that_cannot_change_ends_the_process_with_its_reason(
    code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FatalError, match=f"cluster agg: topic {TOPIC} {told}"):
        write(Target(monkeypatch, 100, code))


def test_time_that_is_refused_is_another_at_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's clock is ahead of what the target takes, and is set right."""
    target = Target(monkeypatch, 100, InvalidTimestamp.code)

    def now_ms() -> int:
        if target.asked_count == 2:
            target.limit = 1 << 20
        return 0

    asyncio.run(SystemRecords(target, now_ms, 1).write(TOPIC, POSITIONS[:9], configs={}))  # type: ignore[arg-type]
    assert (target.taken, target.asked_count) == (POSITIONS[:9], 3)


# --- in a transaction -------------------------------------------------------------------------------


@pytest.mark.parametrize(("many", "limit"), [(2_500, 500_000), (1_000, 60_000)])
def test_first_positions_of_many_partitions_are_committed_together(
    many: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.mirror.delivery.transaction.FENCED_PAUSE_MS", 1)

    async def story() -> None:
        async with Stage(monkeypatch) as stage:
            stage.target.own_limit = limit
            lane = stage.lane
            starts = [
                asyncio.create_task(lane.record_start(partition(number), position(number)))
                for number in range(many)
            ]
            await until(lambda: all(start.done() for start in starts))
            assert len(stage.target.positions()) == many
            assert stage.target.committed_count == 1
            batches = stage.target.own_batches
            last_begin = max(at for at, (sequence, _) in enumerate(batches) if sequence == 0)
            sequences, counts = zip(*batches[last_begin:], strict=True)
            assert sequences == (0, *accumulate(counts[:-1]))
            assert sum(counts) == many

    asyncio.run(story())


def test_lane_whose_positions_are_never_taken_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.mirror.delivery.transaction.FENCED_PAUSE_MS", 1)

    async def story() -> None:
        stage = Stage(monkeypatch)
        stage.target.own_limit = 10
        running = asyncio.create_task(stage.lane.run())
        start = asyncio.create_task(stage.lane.record_start(partition(0), position(0)))
        async with asyncio.timeout(5):
            await asyncio.wait([running])
        start.cancel()
        assert running.exception() is not None
        with pytest.raises(BaseExceptionGroup) as ended:
            running.result()
        assert ended.group_contains(FatalError, match="takes no record of .* raise its max.message.bytes")

    asyncio.run(story())


# --- positions that are gone ------------------------------------------------------------------------


def kept(records: object, read: object, monkeypatch: pytest.MonkeyPatch) -> Positions:
    """What a keeper makes of the topics, which it reads by `read` and writes by `records`."""
    config: Any = SimpleNamespace(name="m", target=SimpleNamespace(replication_factor=1))
    target: Any = SimpleNamespace(name="agg")
    keeper = positions_keeper.PositionsKeeper(config, target, cast(SystemRecords, records))

    async def there() -> None: ...

    monkeypatch.setattr(positions_keeper, "read_topic_to_end", read)
    monkeypatch.setattr(keeper, "make_topics", there)
    return asyncio.run(keeper.read())


def test_worker_that_begins_while_another_does_takes_nothing_of_it_for_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers of a new mirror: the other puts its first position on record, and carries, between this
    one's reading of the positions and of the map."""
    logs: dict[str, list[tuple[bytes, bytes | None]]] = {TOPIC: [], "millrace.offsets.m": []}
    other = partition(0)

    class Records:
        async def write(self, topic: str, records: list[tuple[bytes, bytes | None]], **_: object) -> int:
            logs[topic] += records
            return len(logs[topic])

    async def read(_cluster: object, topic: str, *, until: dict[int, int] | None = None) -> Any:
        if topic != TOPIC:
            runs = Runs(other, 0, 0)
            runs.add([0], 0)
            logs[TOPIC] += encode_records([(other, position(0)), (other, position(1))])
            logs[topic] += runs.take_until(1)
        end = len(logs[topic]) if until is None else until[0]
        for key, value in logs[topic][:end]:
            yield SimpleNamespace(key=key, value=value)

    assert kept(Records(), read, monkeypatch) == Positions({other: position(1)})
    assert LOST not in [value for _, value in logs[TOPIC]]


def test_marks_of_lost_positions_that_are_a_part_of_them_are_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are written in several batches, and another worker may read in between."""
    written: list[bytes] = []

    class Records:
        async def write(self, _topic: str, records: list[tuple[bytes, bytes | None]], **_: object) -> int:
            if records != [positions_keeper.BARRIER]:
                assert {value for _, value in records} == {LOST}
                written.extend(key for key, _ in records)
            return 1

    async def read(_cluster: object, topic: str, **_: object) -> Any:
        keys = [(encode_key(partition(0)), LOST)]
        if topic != TOPIC:
            keys = [(next(iter(chunks(number)))[0], b"") for number in range(3)]
        for key, value in keys:
            yield SimpleNamespace(key=key, value=value)

    def chunks(number: int) -> Any:
        runs = Runs(partition(number), 0, 0)
        runs.add([0], 0)
        return runs.take_until(1)

    positions = kept(Records(), read, monkeypatch)
    assert positions.unreadable == {partition(0), partition(1), partition(2)}
    assert written == [encode_key(partition(1)), encode_key(partition(2))]
