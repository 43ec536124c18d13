"""Of which log a source's answers are: the one that is mirrored, another of its name, or one that was cut."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.client.raw_fetch import FetchPosition
from millrace.broker.errors import (
    InconsistentTopicId,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    UnknownTopicId,
    UnsupportedVersion,
)
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.sources import histories as histories_module
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources import source_logs as logs_module
from millrace.mirror.sources.epochs import EpochHistory
from millrace.mirror.sources.fetch_loop import FetchLoop, Way
from tests.unit.mirror.source_stage import NEW, OLD, Source, answered, pipeline_at, reader_of, taken


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


@pytest.mark.parametrize("epoch", [0, -1])
def test_bounds_tell_what_expired_and_what_was_cut(monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """What was cut at a source that keeps no epochs, or whose records have none."""

    async def keeps_none(*_: object) -> Any:
        raise UnsupportedVersion("OffsetForLeaderEpoch 2")

    monkeypatch.setattr(logs_module, "epoch_ends", keeps_none)
    pipeline = pipeline_at(40, epoch=epoch)
    out_of_range = answered(OffsetOutOfRange.code)
    asyncio.run(taken(reader_of(Source(earliest=60)), pipeline, out_of_range))
    asyncio.run(taken(reader_of(Source(latest=30)), pipeline, out_of_range))
    assert pipeline.gaps == [
        ("expired", 60, {"resume_at": 60}),
        ("truncated", 40, {"first": 30, "resume_at": 30, "resume_epoch": -1}),
    ]


class NamesakeBeforeItsName(Source):
    """The topic was made anew: the new one's leader answers already, by name, and the metadata of `rounds`
    looks still have the old one's id."""

    def __init__(self, rounds: int, earliest: int, latest: int) -> None:
        super().__init__(OLD, earliest, latest)
        self.rounds = rounds

    def view(self) -> Any:
        self.topic_id = OLD if self.rounds > 0 else NEW
        self.rounds -= 1
        return super().view()


@pytest.mark.parametrize("bounds", [(0, 30), (60, 500)])
@pytest.mark.parametrize(
    ("error", "rounds"),
    [(OffsetOutOfRange, 1), (UnknownTopicId, 1), (UnknownTopicId, 2), (InconsistentTopicId, 2)],
)
def test_bounds_of_a_namesake_cut_nothing_and_expire_nothing(
    error: Any, rounds: int, bounds: tuple[int, int]
) -> None:
    pipeline, reader = pipeline_at(40), reader_of(NamesakeBeforeItsName(rounds, *bounds))
    pipeline.lag.sample(55, 0)
    asyncio.run(taken(reader, pipeline, answered(error.code)))
    assert pipeline.gaps == []
    asyncio.run(taken(reader, pipeline, answered(error.code)))
    assert pipeline.gaps == [("recreated", 55, {"resume_at": 0, "origin": Origin("c", NEW)})]


def test_look_that_saw_another_topic_is_no_word_of_how_far_this_one_goes() -> None:
    """One broker names the new topic, the next one that is asked still the old one."""
    source = NamesakeBeforeItsName(2, 0, 30)
    reader, pipeline = reader_of(source), pipeline_at(40)

    async def looked() -> None:
        reader.add(pipeline)
        async with asyncio.TaskGroup() as reader._tasks:
            reader._check_origins(Source(NEW).view())

    asyncio.run(looked())
    assert pipeline.gaps == []


def test_epochs_of_a_namesake_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made while they are asked for."""
    source = Source(latest=30)

    async def epoch_ends(_cluster: object, asked: dict[Any, int]) -> Any:
        source.topic_id = NEW
        return {key: (epoch, 20) for key, epoch in asked.items()}

    monkeypatch.setattr(logs_module, "epoch_ends", epoch_ends)
    pipeline, reader = pipeline_at(40, epoch=3), reader_of(source)
    asyncio.run(taken(reader, pipeline, answered(OffsetOutOfRange.code)))
    assert pipeline.gaps == []
    asyncio.run(taken(reader, pipeline, answered(OffsetOutOfRange.code)))
    assert pipeline.gaps == [("recreated", 40, {"resume_at": 0, "origin": Origin("c", NEW)})]


def test_what_is_said_of_an_offset_counts_in_a_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def epoch_ends(_cluster: object, asked: dict[Any, int]) -> Any:
        return dict.fromkeys(asked, (-1, -1))

    monkeypatch.setattr(logs_module, "epoch_ends", epoch_ends)
    pipeline, reader = pipeline_at(40, epoch=9), reader_of(Source())
    for code in (OffsetOutOfRange.code, OffsetOutOfRange.code, 0, OffsetOutOfRange.code):
        asyncio.run(taken(reader, pipeline, answered(code)))
        assert pipeline.gaps == []
    for _ in range(2):
        asyncio.run(taken(reader, pipeline, answered(OffsetOutOfRange.code)))
    assert pipeline.gaps == [("recreated", 40, {"resume_at": 0})]


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


@pytest.mark.parametrize("latest", [500, 85])
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
    latest: int,
) -> None:
    """It went on since, maybe past the position, and never had the epoch of what was fetched last
    (KIP-101)."""

    async def epoch_ends(_cluster: object, asked: dict[Any, int]) -> Any:
        ((key, epoch),) = asked.items()
        return {key: answers[epoch]}

    monkeypatch.setattr(logs_module, "epoch_ends", epoch_ends)
    source = Source(latest=latest)
    pipeline, reader = pipeline_at(90, epoch=9), reader_of(source)
    pipeline.progress.epochs = EpochHistory(3, 0)
    pipeline.progress.epochs.fetched(5, 60)
    pipeline.progress.epochs.fetched(9, 80)
    for _ in range(3 if latest >= 90 else 1):
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
    monkeypatch.setattr(histories_module, "epoch_ends", epoch_ends)
    monkeypatch.setattr(FetchLoop, "until_changed", at_once)
    pipeline.wants_fetch = wants_fetch
    loop = FetchLoop(reader._budget)
    loop.partitions["t", 0] = pipeline
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(reader._fetch_from(Way(1, 0), loop))
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
