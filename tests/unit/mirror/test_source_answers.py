"""What a source's answers are taken for: other logs, damage, lag of what is not fetched, and the throttle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.client.offsets import EARLIEST
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.broker.errors import (
    CorruptMessage,
    InconsistentTopicId,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    RequestTimedOut,
    UnknownTopicId,
)
from millrace.broker.protocol.batch import seal, stamp_offset_and_epoch
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.config import FetchConfig
from millrace.mirror.delivery.checkpoints import Position
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import State
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources import source_logs as logs_module
from millrace.mirror.sources.epochs import EpochHistory
from millrace.mirror.sources.fetch_memory import MIN_FETCH_SIZE, FetchBudget, HeldMemory
from millrace.mirror.sources.lag import LagSamples
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.sources.source_logs import SourceLogs
from millrace.mirror.topics.routes import SourcePartition
from tests.unit.mirror.old_entries import entry, packed
from tests.waiting import until_async as until

OLD, NEW = UUID(int=7), UUID(int=8)


class Source:
    """A source cluster: one partition, its bounds, and the topic's id now."""

    def __init__(self, topic_id: UUID = OLD, earliest: int = 0, latest: int = 100) -> None:
        self.topic_id, self.earliest, self.latest = topic_id, earliest, latest
        self.failing = False
        self.observed: list[int] = []
        self.fetch_version = 17
        self.leader_epoch = 4

    async def metadata(self, *_: object, **__: object) -> Any:
        return self.view()

    def view(self) -> Any:
        topic = SimpleNamespace(
            name="t",
            internal=False,
            topic_id=self.topic_id,
            partitions={0: SimpleNamespace(leader_epoch=self.leader_epoch)},
        )
        return SimpleNamespace(cluster_id="c", topics={"t": topic}, leader=lambda *_: 1)

    async def list_offsets(self, wanted: dict[Any, int], _committed: bool = False) -> Any:
        if self.failing:
            raise RequestTimedOut("on purpose")
        return {
            key: SimpleNamespace(offset=self.earliest if at == EARLIEST else self.latest)
            for key, at in wanted.items()
        }

    async def api_version(self, *_: object) -> int:
        return self.fetch_version

    def observe(self, code: int) -> None:
        self.observed.append(code)

    def close_purpose(self, _purpose: str, _node: int) -> None: ...


def pipeline_at(offset: int, *, epoch: int = 0, topic_id: UUID = OLD, **more: Any) -> Any:
    progress = SimpleNamespace(
        outstanding_size=0, fetch_offset=offset, fetched_leader_epoch=epoch, epochs=EpochHistory(epoch, 0)
    )
    made = SimpleNamespace(
        partition=SourcePartition("ewr", "t", 0),
        state=State.RUNNING,
        progress=progress,
        retry_at_ms=0,
        lag=LagSamples(),
        origin=Origin("c", topic_id),
        damage=None,
        is_out_of_order=False,
        passes_over=False,
        needed_size=0,
        bytes_behind=0,
        gaps=[],
        accepted=[],
    )
    made.at_gap = lambda gap_class, to, reason, **rest: made.gaps.append((gap_class.value, to, rest))
    made.accept = lambda answer, _frame=None: made.accepted.append(answer)
    made.stands = lambda *_: False
    made.wants_fetch = lambda *_: True
    for name, value in more.items():
        setattr(made, name, value)
    return made


def reader_of(source: Source, now_ms: Callable[[], int] = lambda: 0) -> SourceReader:
    async def nothing(*_: object) -> None: ...

    config: Any = SimpleNamespace(
        cluster="ewr", topics=SimpleNamespace(include=["t"], exclude=[]), connections=1
    )
    cluster: Any = source
    return SourceReader(config, cluster, FetchConfig(), FetchBudget(1 << 20), 10, now_ms, nothing, nothing)


def logs_of(source: Source) -> SourceLogs:
    async def nothing(*_: object) -> None: ...

    cluster: Any = source
    return SourceLogs("ewr", cluster, lambda: 5_000, nothing)


def answered(code: int = 0, diverging: tuple[int, int] | None = None) -> FetchedPartition:
    return FetchedPartition("t", 0, code, 100, 100, 0, (), diverging, memoryview(b""))


async def taken(reader: SourceReader, pipeline: Any, answer: FetchedPartition, **asked: Any) -> None:
    position = FetchPosition(
        **{"offset": pipeline.progress.fetch_offset, "topic_id": pipeline.origin.topic_id, **asked}
    )
    async with asyncio.TaskGroup() as reader._tasks:
        reader._take(pipeline, position, answer)


# --- which log it is ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [UnknownTopicId, InconsistentTopicId, OffsetOutOfRange])
def test_another_topic_of_the_name_is_found_at_once(error: Any) -> None:
    pipeline = pipeline_at(40)
    pipeline.lag.sample(55, 0)
    asyncio.run(taken(reader_of(Source(NEW, latest=500)), pipeline, answered(error.code)))
    assert pipeline.gaps == [("recreated", 55, {"resume_at": 0, "origin": Origin("c", NEW)})]
    assert pipeline.retry_at_ms > 0


def test_answer_of_a_broker_that_has_not_heard_of_the_topic_yet_is_no_gap() -> None:
    pipeline = pipeline_at(40)
    asyncio.run(taken(reader_of(Source()), pipeline, answered(UnknownTopicId.code)))
    assert pipeline.gaps == []


def test_bounds_tell_what_expired_and_what_was_cut() -> None:
    pipeline = pipeline_at(40)
    out_of_range = answered(OffsetOutOfRange.code)
    asyncio.run(taken(reader_of(Source(earliest=60)), pipeline, out_of_range))
    asyncio.run(taken(reader_of(Source(latest=30)), pipeline, out_of_range))
    assert pipeline.gaps == [
        ("expired", 60, {"resume_at": 60}),
        ("truncated", 40, {"first": 30, "resume_at": 30}),
    ]


def test_epoch_that_the_source_never_had_means_another_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where topics have no ids nothing else tells: the offset lies within the log of the namesake."""
    source = Source(NO_TOPIC_ID)

    async def epoch_ends(_cluster: object, asked: dict[Any, int]) -> Any:
        return dict.fromkeys(asked, (-1, -1))

    monkeypatch.setattr(logs_module, "epoch_ends", epoch_ends)
    pipeline, reader = pipeline_at(40, epoch=9, topic_id=NO_TOPIC_ID), reader_of(source)
    for _ in range(2):
        asyncio.run(taken(reader, pipeline, answered(OffsetOutOfRange.code)))
        assert pipeline.gaps == []
    asyncio.run(taken(reader, pipeline, answered(OffsetOutOfRange.code)))
    assert pipeline.gaps == [("recreated", 40, {"resume_at": 0})]


@pytest.mark.parametrize(
    ("answers", "gap"),
    [
        # Of the epochs 3 (from 0 on), 5 (from 60 on) and 9 (from 80 on) it has the first two, or fewer.
        ({9: (-1, -1), 5: (5, 200), 3: (3, 60)}, (80, 5)),
        ({9: (-1, -1), 5: (5, 70), 3: (3, 60)}, (70, 5)),
        ({9: (-1, -1), 5: (4, 200), 3: (3, 50)}, (60, 3)),
        ({9: (-1, -1), 5: (-1, -1), 3: (3, 200)}, (60, 3)),
        ({9: (-1, -1), 5: (-1, -1), 3: (-1, -1)}, None),
    ],
)
def test_log_that_was_restored_from_a_backup_is_cut_where_histories_part(
    monkeypatch: pytest.MonkeyPatch,
    answers: dict[int, tuple[int, int]],
    gap: tuple[int, int] | None,
) -> None:
    """It has grown past the position since, and never had the epoch of what was fetched last (KIP-101)."""

    async def epoch_ends(_cluster: object, asked: dict[Any, int]) -> Any:
        ((key, epoch),) = asked.items()
        return {key: answers[epoch]}

    monkeypatch.setattr(logs_module, "epoch_ends", epoch_ends)
    source = Source(latest=500)
    pipeline, reader = pipeline_at(90, epoch=9), reader_of(source)
    pipeline.progress.epochs = EpochHistory(3, 0)
    pipeline.progress.epochs.fetched(5, 60)
    pipeline.progress.epochs.fetched(9, 80)
    for _ in range(3):
        assert pipeline.gaps == []
        asyncio.run(taken(reader, pipeline, answered(OffsetOutOfRange.code)))
    if gap is None:
        assert pipeline.gaps == [("recreated", 90, {"resume_at": 0})]
    else:
        first, epoch = gap
        assert pipeline.gaps == [
            ("truncated", 90, {"first": first, "resume_at": first, "resume_epoch": epoch})
        ]


def test_answer_for_the_same_offset_of_the_log_before_is_not_taken() -> None:
    pipeline = pipeline_at(0, topic_id=NEW)
    asyncio.run(taken(reader_of(Source(NEW)), pipeline, answered(), topic_id=OLD))
    assert pipeline.accepted == []
    asyncio.run(taken(reader_of(Source(NEW)), pipeline, answered()))
    assert len(pipeline.accepted) == 1


def test_diverging_epoch_goes_back_to_where_our_own_history_left() -> None:
    pipeline = pipeline_at(90, epoch=3)
    pipeline.progress.epochs.fetched(5, 60)
    asyncio.run(taken(reader_of(Source()), pipeline, answered(diverging=(4, 80))))
    assert pipeline.gaps == [("truncated", 90, {"first": 60, "resume_at": 60, "resume_epoch": 3})]


def test_moved_leader_is_no_gap() -> None:
    pipeline, source = pipeline_at(40), Source()
    asyncio.run(taken(reader_of(source), pipeline, answered(NotLeaderOrFollower.code)))
    assert pipeline.gaps == []
    assert source.observed == [NotLeaderOrFollower.code]


def test_fetches_name_the_log_that_the_position_is_of() -> None:
    reader = reader_of(Source(NEW))
    loop = source_module._FetchLoop(HeldMemory(reader._budget))
    loop.partitions["t", 0] = pipeline_at(40, epoch=3)
    positions, _ = reader._positions(loop, 1 << 20)
    assert positions == {("t", 0): FetchPosition(40, -1, 3, OLD)}


def test_partition_that_needs_more_of_an_answer_is_asked_for_alone_and_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[set[int], int, int]] = []

    async def fetch(
        _cluster: object, _node: int, positions: Any, *, max_bytes: int, partition_max_bytes: int, **_: object
    ) -> Any:
        asked.append(({number for _, number in positions}, max_bytes, partition_max_bytes))
        raise asyncio.CancelledError

    monkeypatch.setattr(source_module, "fetch", fetch)
    reader = reader_of(Source())
    loop = source_module._FetchLoop(HeldMemory(reader._budget))
    for number in range(4):
        loop.partitions["t", number] = pipeline_at(40, needed_size=9 << 20 if number == 2 else 0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(reader._fetch_from(source_module._Way(1, 0), loop))
    assert asked == [({2}, 9 << 20, 9 << 20)]


def asked_of_an_older_source(
    monkeypatch: pytest.MonkeyPatch, ends: list[dict[Any, tuple[int, int]]], rounds: int, *, version: int = 11
) -> tuple[Any, list[int], list[FetchPosition]]:
    """A pipeline at 90 whose last epoch is 5, from 60 on, at a source that answers `ends` when it is asked
    for epochs; after half of the `rounds` the partition has another leader epoch. The pipeline, the epochs
    that were asked for, and the positions that were fetched."""
    source = Source()
    source.fetch_version = version
    reader, pipeline = reader_of(source), pipeline_at(90, epoch=5)
    pipeline.progress.epochs = EpochHistory(3, 0)
    pipeline.progress.epochs.fetched(5, 60)
    fetched: list[FetchPosition] = []
    questions: list[int] = []
    taken_rounds = 0

    def wants_fetch(*_: object) -> bool:
        nonlocal taken_rounds
        taken_rounds += 1
        source.leader_epoch = 4 if taken_rounds <= rounds // 2 else 6
        reader.view = source.view()
        if taken_rounds > rounds:
            raise asyncio.CancelledError
        return not pipeline.gaps

    async def epoch_ends(_cluster: object, asked: dict[Any, int]) -> Any:
        questions.extend(asked.values())
        return ends[min(len(questions), len(ends)) - 1]

    async def fetch(_cluster: object, _node: int, positions: Any, **_: object) -> Any:
        fetched.extend(positions.values())
        return []

    async def at_once(*_: object) -> None: ...

    monkeypatch.setattr(source_module, "fetch", fetch)
    monkeypatch.setattr(source_module, "epoch_ends", epoch_ends)
    monkeypatch.setattr(reader, "_until_changed", at_once)
    pipeline.wants_fetch = wants_fetch
    loop = source_module._FetchLoop(HeldMemory(reader._budget))
    loop.partitions["t", 0] = pipeline
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(reader._fetch_from(source_module._Way(1, 0), loop))
    return pipeline, questions, fetched


def test_older_source_is_asked_for_its_history_under_every_leader_epoch(monkeypatch) -> None:
    """KIP-320: its fetches do not say where histories part, and are refused under another epoch."""
    pipeline, questions, fetched = asked_of_an_older_source(monkeypatch, [{("t", 0): (5, 100)}], 6)
    assert pipeline.gaps == []
    assert questions == [5, 5]
    assert [at.current_leader_epoch for at in fetched] == [4, 4, 4, 6, 6, 6]


@pytest.mark.parametrize(
    ("answer", "parts_at", "epoch"), [((5, 80), 80, 5), ((4, 70), 60, 3), ((3, 40), 40, 3)]
)
def test_what_an_older_source_lost_and_wrote_anew_is_a_gap(monkeypatch, answer, parts_at, epoch) -> None:
    """Its log may have outgrown the position since: by offsets alone nothing would be missing."""
    ends = [{("t", 0): (5, 100)}, {("t", 0): answer}]
    pipeline, questions, fetched = asked_of_an_older_source(monkeypatch, ends, 6)
    assert pipeline.gaps == [
        ("truncated", 90, {"first": parts_at, "resume_at": parts_at, "resume_epoch": epoch})
    ]
    assert questions == [5, 5] and len(fetched) == 3


def test_source_whose_fetches_tell_is_not_asked_for_epochs(monkeypatch) -> None:
    _, questions, fetched = asked_of_an_older_source(monkeypatch, [{}], 4, version=12)
    assert questions == [] and {at.current_leader_epoch for at in fetched} == {-1}


def test_partitions_are_spread_over_a_brokers_connections_and_stay_where_they_are(monkeypatch) -> None:
    """A connection carries no more than a socket buffer in a round trip: several carry several times that."""
    asked: dict[str, set[tuple[str, int]]] = {}
    closed: list[tuple[str, int]] = []

    async def fetch(_cluster: object, node: int, positions: Any, *, purpose: str, **_: object) -> Any:
        assert node == 1
        asked.setdefault(purpose, set()).update(positions)
        await asyncio.sleep(0)
        return []

    async def story() -> None:
        reader = reader_of(Source())
        reader.cluster.close_purpose = lambda purpose, node: closed.append((purpose, node))
        reader.config.connections = 4
        budget = reader._budget
        async with asyncio.TaskGroup() as reader._tasks:
            reader.view = reader.cluster.view()
            for number in range(8):
                pipeline = pipeline_at(40)
                pipeline.partition = SourcePartition("ewr", "t", number)
                reader.add(pipeline)
            await until(lambda: sum(map(len, asked.values())) == 8)
            assert budget.loop_count == 4 and sorted(map(len, asked.values())) == [2, 2, 2, 2]
            before = {purpose: set(keys) for purpose, keys in asked.items()}
            asked.clear()
            reader.remove(reader._pipelines["t", 0])
            reader._place()
            assert {key for keys in before.values() for key in keys} == {("t", number) for number in range(8)}
            assert all(
                set(loop.partitions) == before[way.purpose] - {("t", 0)}
                for way, loop in reader._loops.items()
            )
            config: Any = SimpleNamespace(**vars(reader.config) | {"connections": 1})
            reader.reconfigure(config, FetchConfig(), 10)
            assert budget.loop_count == 1 and len(closed) == 3
            await until(
                lambda: any(keys == {("t", number) for number in range(1, 8)} for keys in asked.values())
            )
            for loop in reader._loops.values():
                assert loop.task is not None
                loop.task.cancel()

    monkeypatch.setattr(source_module, "fetch", fetch)
    asyncio.run(story())


def test_leader_that_moves_is_followed_while_the_target_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a look at the source brings is asked of the target, which may be away for long."""
    leader, fetched_from, looks = 1, set[int](), 0

    async def fetch(_cluster: object, node: int, *_: object, **__: object) -> Any:
        fetched_from.add(node)
        await asyncio.sleep(0)
        return []

    async def never(_reader: SourceReader) -> None:
        nonlocal looks
        looks += 1
        await asyncio.Event().wait()

    async def story() -> None:
        nonlocal leader
        source = Source()
        view = source.view
        source.view = lambda: SimpleNamespace(  # type: ignore[method-assign]
            cluster_id="c", topics=view().topics, leader=lambda *_: leader
        )
        reader = reader_of(source)
        reader._on_view = never
        reader.add(pipeline_at(40))
        running = asyncio.create_task(reader.run())
        await until(lambda: fetched_from == {1})
        leader = 2
        await until(lambda: fetched_from == {1, 2})
        assert looks == 1, "one at a time"
        assert reader.is_connected
        running.cancel()
        await asyncio.wait([running])

    monkeypatch.setattr(source_module, "fetch", fetch)
    asyncio.run(story())


def test_target_that_fails_is_asked_again_with_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    async def on_view(_reader: SourceReader) -> None:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise RequestTimedOut("the target is away")

    async def story() -> None:
        reader = reader_of(Source())
        reader._on_view = on_view
        running = asyncio.create_task(reader.run())
        await until(lambda: looks > 3)
        assert (reader.is_connected, reader.failure) == (True, None)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(story())


def test_every_loop_may_fetch_and_a_source_that_goes_gives_its_share_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = FetchBudget(1 << 20)
    budget.loop_count = 2  # of another source

    async def fetch(*_: object, **__: object) -> Any:
        await asyncio.Event().wait()

    async def story() -> None:
        reader = reader_of(Source())
        reader._budget = budget
        reader.config.connections = 30
        for number in range(30):
            pipeline = pipeline_at(40)
            pipeline.partition = SourcePartition("ewr", "t", number)
            reader.add(pipeline)
        running = asyncio.create_task(reader.run())
        await until(lambda: budget.loop_count == 32)
        assert budget.share == 2 * MIN_FETCH_SIZE
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    monkeypatch.setattr(source_module, "fetch", fetch)
    asyncio.run(story())
    assert budget.loop_count == 2


# --- where to begin -----------------------------------------------------------------------------------


def begun(source: Source, known: Position, **more: Any) -> Any:
    pipeline = pipeline_at(0, state=State.STARTING)

    def ready(offset: int, epoch: int, origin: Origin, began: int) -> None:
        pipeline.began, pipeline.first = (offset, epoch, origin), began
        pipeline.state = State.RUNNING

    pipeline.ready = ready
    asyncio.run(logs_of(source).begin(pipeline, known, is_lost=False, start="latest"))
    return pipeline


def test_position_of_another_topic_is_a_gap_up_to_the_end_that_was_known() -> None:
    pipeline = begun(Source(NEW, earliest=3), Position(40, "c", OLD, 2, 0, 55, 900))
    assert pipeline.began == (40, 2, Origin("c", OLD))
    assert pipeline.gaps == [("recreated", 55, {"resume_at": 3, "origin": Origin("c", NEW)})]


def test_end_of_the_log_is_known_from_the_beginning() -> None:
    """It may be gone before the first fetch."""
    recorded: list[Position] = []

    async def record(_partition: SourcePartition, position: Position) -> None:
        recorded.append(position)

    pipeline = pipeline_at(0, state=State.STARTING)
    pipeline.ready = lambda *_: setattr(pipeline, "state", State.RUNNING)
    source: Any = Source(latest=100)
    logs = SourceLogs("ewr", source, lambda: 5_000, record)
    asyncio.run(logs.begin(pipeline, None, is_lost=False, start="earliest"))
    assert [(each.next_offset, each.log_end) for each in recorded] == [(0, 100)]
    assert pipeline.lag.log_end == 100
    # Known already, and grown since: what was on record is not the last that is known.
    assert begun(Source(latest=100), Position(40, "c", OLD, 2, 0, 55, 900)).lag.log_end == 100
    assert begun(Source(NEW, latest=3), Position(40, "c", OLD, 2, 0, 55, 900)).lag.log_end == 55


def test_a_position_keeps_the_place_where_the_mirroring_began() -> None:
    """Whoever reads positions must know that nothing of what was there before was carried."""
    recorded: list[Position] = []

    async def record(_partition: SourcePartition, position: Position) -> None:
        recorded.append(position)

    pipeline = pipeline_at(0, state=State.STARTING)
    pipeline.ready = lambda *given: setattr(pipeline, "state", State.RUNNING)
    source: Any = Source(latest=100)
    logs = SourceLogs("ewr", source, lambda: 5_000, record)
    asyncio.run(logs.begin(pipeline, None, is_lost=False, start="latest"))
    assert [(each.next_offset, each.began) for each in recorded] == [(100, 100)]
    assert begun(source, Position(100, "c", OLD, 2, 0, began=40)).first == 40


def test_position_without_an_id_takes_the_one_that_the_source_has_by_now() -> None:
    pipeline = begun(Source(NEW), Position(40, "c", NO_TOPIC_ID, 2, 0))
    assert (pipeline.began, pipeline.gaps) == ((40, 2, Origin("c", NEW)), [])
    pipeline = begun(Source(NO_TOPIC_ID), Position(40, "c", OLD, 2, 0))
    assert (pipeline.began, pipeline.gaps) == ((40, 2, Origin("c", OLD)), [])


def test_retry_at_a_recreated_log_still_knows_how_much_the_old_one_held() -> None:
    pipeline = begun(Source(NEW), Position(40, "c", OLD, 2, 0, 55, 900))
    pipeline.progress.fetch_offset, pipeline.gaps[:] = 40, []
    asyncio.run(logs_of(Source(NEW)).explain(pipeline_of(pipeline, OLD)))
    assert pipeline.gaps == [("recreated", 55, {"resume_at": 0, "origin": Origin("c", NEW)})]


def pipeline_of(pipeline: Any, topic_id: UUID) -> Any:
    pipeline.origin = Origin("c", topic_id)
    return pipeline


def test_waiting_goes_on_where_the_last_owner_left_it() -> None:
    pipeline = begun(Source(), Position(40, "c", OLD, 2, 0, 55, 900))
    pipeline.lag.sample(100, 5_000)
    assert pipeline.lag.seconds_behind(40, 5_900) == 5.0


# --- damage -------------------------------------------------------------------------------------------


def batches_at(*bases: int) -> list[bytearray]:
    made = [build_batch([Record(b"k", b"v", timestamp_ms=1)]) for _ in bases]
    for base, batch in zip(bases, made, strict=True):
        stamp_offset_and_epoch(memoryview(batch), base, 0)
    return made


@pytest.mark.parametrize(
    ("damaged", "end"),
    [
        ([10], 12),
        ([10, 12, 15], 40),
        ([10, 40], 12),
        ([10, 12, 15, 40], 99),
        ([10, 12, 15, 40, 99], 100),
        ([], None),
    ],
)
@pytest.mark.parametrize("how", ["checksum", "error"])
def test_damage_ends_at_the_first_batch_that_is_whole(
    monkeypatch: pytest.MonkeyPatch, damaged: list[int], end: int | None, how: str
) -> None:
    """A compacted log with holes: batches of one record at these offsets, the log ends at 100."""
    bases = [9, 10, 12, 15, 40, 99]
    log = dict(zip(bases, batches_at(*bases), strict=True))
    for base in damaged:
        log[base][-1] ^= 1

    async def fetch(_cluster: object, _node: int, positions: Any, **_: object) -> list[FetchedPartition]:
        (asked,) = positions.values()
        found = next((base for base in bases if base >= asked.offset), None)
        if found in damaged and how == "error":
            return [answered(CorruptMessage.code)]
        data = b"" if found is None else bytes(log[found])
        return [with_records(data)]

    monkeypatch.setattr(logs_module, "fetch", fetch)
    pipeline = pipeline_at(10, epoch=4, damage="bad")
    asyncio.run(logs_of(Source()).survey(pipeline))
    expected = [] if end is None else [("corrupt", end, {"resume_at": end, "resume_epoch": 4})]
    assert pipeline.gaps == expected


def test_damage_in_a_log_of_old_formats_ends_with_the_damaged_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a source gives them out: from the entry on that holds the offset."""
    whole = [
        (9, entry(9, 0, None, b"a")),
        (14, packed(14, 1, [0, 1, 2, 3, 4])),
        (15, entry(15, 1, b"k", b"b")),
        (20, packed(20, 0, [17, 18, 20])),
        (99, packed(99, 1, [0, 1])),
    ]
    for damaged, end in [(14, 15), (15, 17), (20, 98), (99, 100)]:
        log = dict(whole)
        log[damaged] = log[damaged][:-1] + bytes([log[damaged][-1] ^ 1])

        async def fetch(
            _cluster: object, _node: int, positions: Any, log: dict[int, bytes] = log, **_: object
        ) -> list[FetchedPartition]:
            (asked,) = positions.values()
            return [with_records(b"".join(data for last, data in log.items() if last >= asked.offset))]

        monkeypatch.setattr(logs_module, "fetch", fetch)
        first = max((last + 1 for last in log if last < damaged), default=0)
        pipeline = pipeline_at(first, epoch=4, damage="bad")
        asyncio.run(logs_of(Source()).survey(pipeline))
        assert pipeline.gaps == [("corrupt", end, {"resume_at": end, "resume_epoch": 4})]


@pytest.mark.parametrize(("bases", "end"), [((10, 11), 11), ((10,), 100)])
def test_damage_of_a_batchs_own_offset_ends_with_the_next_batch_or_the_log(
    monkeypatch: pytest.MonkeyPatch, bases: tuple[int, ...], end: int
) -> None:
    """The offset is not under the checksum, so the batch looks whole."""
    log = dict(zip(bases, batches_at(*bases), strict=True))
    log[10][:8] = (10 + (1 << 29)).to_bytes(8, "big")

    async def fetch(_cluster: object, _node: int, positions: Any, **_: object) -> list[FetchedPartition]:
        (asked,) = positions.values()
        return [with_records(b"".join(data for base, data in log.items() if base >= asked.offset))]

    monkeypatch.setattr(logs_module, "fetch", fetch)
    pipeline = pipeline_at(10, epoch=4, damage="bad")
    asyncio.run(logs_of(Source()).survey(pipeline))
    assert pipeline.gaps == [("corrupt", end, {"resume_at": end, "resume_epoch": 4})]


def test_batch_that_its_own_header_hides_is_damage_up_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum is right, and it claims to end before it begins."""
    bad, good = batches_at(10, 11)
    bad[23] = 0x80
    seal(memoryview(bad))

    async def fetch(_cluster: object, _node: int, positions: Any, **_: object) -> list[FetchedPartition]:
        (asked,) = positions.values()
        return [with_records(bytes(bad + good) if asked.offset <= 10 else bytes(good))]

    monkeypatch.setattr(logs_module, "fetch", fetch)
    pipeline = pipeline_at(10, epoch=4, damage="bad")
    asyncio.run(logs_of(Source()).survey(pipeline))
    assert pipeline.gaps == [("corrupt", 11, {"resume_at": 11, "resume_epoch": 4})]


def with_records(data: bytes) -> FetchedPartition:
    return FetchedPartition("t", 0, 0, 100, 100, 0, (), None, memoryview(data))


def test_source_that_finds_nothing_behind_a_wrong_length_has_lost_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (bad,) = batches_at(10)
    bad[-1] ^= 1

    async def fetch(_cluster: object, _node: int, positions: Any, **_: object) -> list[FetchedPartition]:
        (asked,) = positions.values()
        return [with_records(bytes(bad) if asked.offset <= 10 else b"")]

    monkeypatch.setattr(logs_module, "fetch", fetch)
    pipeline = pipeline_at(10, damage="bad")
    asyncio.run(logs_of(Source()).survey(pipeline))
    assert [gap[:2] for gap in pipeline.gaps] == [("corrupt", 100)]


def test_source_that_can_read_nothing_is_in_trouble_and_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(*_: object, **__: object) -> list[FetchedPartition]:
        return [answered(CorruptMessage.code)]

    monkeypatch.setattr(logs_module, "fetch", fetch)
    pipeline = pipeline_at(10, damage="bad")
    asyncio.run(logs_of(Source()).survey(pipeline))
    assert (pipeline.gaps, pipeline.damage) == ([], None)


# --- lag and rate -------------------------------------------------------------------------------------


def test_log_ends_are_noted_of_this_log_alone() -> None:
    source = Source(OLD, latest=70)
    mine, of_the_namesake = pipeline_at(40), pipeline_at(40, topic_id=NEW)
    asyncio.run(logs_of(source).sample_ends([mine, of_the_namesake], source.view()))
    assert (mine.lag.log_end, mine.lag.sampled_at_ms) == (70, 5_000)
    assert of_the_namesake.lag.log_end == -1


def test_log_end_of_a_topic_made_again_since_the_last_look_is_not_taken_for_this_logs() -> None:
    source = Source(NEW, latest=4)
    before = Source(OLD).view()
    pipeline = pipeline_at(40)
    pipeline.lag.sample(70, 4_000)
    asyncio.run(logs_of(source).sample_ends([pipeline], before))
    assert pipeline.lag.log_end == 70


def test_source_that_does_not_answer_for_a_log_end_costs_only_the_sample() -> None:
    source = Source()
    source.failing = True
    pipeline = pipeline_at(40)
    asyncio.run(logs_of(source).sample_ends([pipeline], source.view()))
    assert pipeline.lag.log_end == -1


def test_throttled_source_is_asked_for_less_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual clock: each fetch brings all that it asked for."""
    now_ms = 0
    sizes: list[tuple[int, int]] = []
    reader = reader_of(Source(), lambda: now_ms)
    reader.set_rate(200_000)

    async def fetch(_cluster: object, _node: int, positions: Any, *, max_bytes: int, **_: object) -> Any:
        sizes.append((now_ms, max_bytes))
        if len(sizes) == 20:
            raise asyncio.CancelledError
        return [with_records(bytes(max_bytes))]

    async def until_changed(_loop: object, limit_ms: int) -> None:
        nonlocal now_ms
        now_ms += limit_ms

    monkeypatch.setattr(source_module, "fetch", fetch)
    monkeypatch.setattr(reader, "_until_changed", until_changed)
    loop = source_module._FetchLoop(HeldMemory(reader._budget))
    loop.partitions["t", 0] = pipeline_at(40)

    async def story() -> None:
        await reader._fetch_from(source_module._Way(1, 0), loop)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(story())
    read = sum(size for _, size in sizes[:-1])
    assert abs(read / 200 - sizes[-1][0]) < 1_100, sizes
    assert max(size for _, size in sizes) <= 200_000
    reader.set_rate(None)
    assert reader.rate is None
