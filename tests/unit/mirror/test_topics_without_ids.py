"""Sources that tell no topic ids (Apache Kafka before 2.8), or fetch by name all the same: what leader epochs
tell of a topic that was deleted and created again, what nothing tells, and the ids once they come."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.client.raw_fetch import FetchPosition
from millrace.broker.errors import OffsetOutOfRange
from millrace.broker.protocol.mirror_positions import Position
from millrace.mirror.checks import check
from millrace.mirror.checks.findings import Severity
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.sources import histories as histories_module
from millrace.mirror.sources import source_logs as logs_module
from millrace.mirror.sources.epochs import untold
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.pipeline_stage import Around, Target, pipeline_of
from tests.unit.mirror.source_stage import NEW, OLD, Source, answered, logs_of, pipeline_at, reader_of, taken
from tests.unit.mirror.test_findings import configured

KEY = ("t", 0)
NAMELESS = Origin("c", NO_TOPIC_ID)
Answers = dict[int, tuple[int, int]]


def older(leader_epoch: int, **bounds: int) -> Source:
    source = Source(NO_TOPIC_ID, **bounds)
    source.fetch_version, source.leader_epoch = 11, leader_epoch
    return source


def telling(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> None:
    """What the source says when it is asked where epochs end."""

    async def epoch_ends(_cluster: object, asked: dict[Any, int]) -> Any:
        return {key: answers[epoch] for key, epoch in asked.items()}

    monkeypatch.setattr(histories_module, "epoch_ends", epoch_ends)
    monkeypatch.setattr(logs_module, "epoch_ends", epoch_ends)


def compared(source: Source, pipeline: Any, rounds: int = 1) -> dict[Any, FetchPosition]:
    """What is fetched after a comparison of epochs, and what the others are found to be."""
    reader = reader_of(source)
    reader.view = source.view()
    ours: dict[Any, FetchPosition] = {}

    async def story() -> None:
        nonlocal ours
        for _ in range(rounds):
            progress = pipeline.progress
            at = FetchPosition(progress.fetch_offset, -1, progress.fetched_leader_epoch, NO_TOPIC_ID)
            async with asyncio.TaskGroup() as reader._tasks:
                ours = await reader._compare({KEY: pipeline}, {KEY: at})

    asyncio.run(story())
    return ours


def test_log_that_never_had_the_epoch_of_what_was_fetched_is_another_one(monkeypatch) -> None:
    """Its offsets reach farther than ours, so no fetch would be refused."""
    telling(monkeypatch, {5: (-1, -1), 0: (0, 500)})
    pipeline = pipeline_at(40, epoch=5, topic_id=NO_TOPIC_ID)
    pipeline.lag.sample(55, 0)
    source = older(0, earliest=3, latest=500)
    assert compared(source, pipeline) == {} and pipeline.gaps == [], "told once may be a leader that moves"
    assert pipeline.retry_at_ms > 0
    assert compared(source, pipeline, rounds=3) == {}
    assert pipeline.gaps == [("recreated", 55, {"resume_at": 0})]


def test_what_is_fetched_by_name_is_not_taken_for_the_topic_that_is_known_to_be_gone() -> None:
    """Sources that tell ids and fetch by name (Apache Kafka 2.8 to 3.0): a partition that goes back to its
    position in the old log, or tries the gap again, stands at an offset that the new one has."""
    source = Source(NEW, latest=3)
    source.fetch_version = 12
    reader = reader_of(source)
    pipeline = pipeline_at(0, topic_id=OLD)

    async def story() -> None:
        reader._logs.looked(source.view())
        await taken(reader, pipeline, answered())
        assert (pipeline.accepted, pipeline.retry_at_ms > 0) == ([], True)
        assert pipeline.gaps == [("recreated", 0, {"resume_at": 0, "origin": Origin("c", NEW)})]
        pipeline.origin = Origin("c", NEW)
        await taken(reader, pipeline, answered())
        assert len(pipeline.accepted) == 1

    asyncio.run(story())


def test_topic_that_was_told_wrongly_is_fetched_again_once_it_is_told_rightly() -> None:
    """By a broker that was behind: nobody has to wait for the next look."""
    source = Source(OLD)
    reader = reader_of(source)
    pipeline = pipeline_at(0, topic_id=OLD)

    async def story() -> None:
        reader._logs.looked(Source(NEW).view())
        for _ in range(2):
            await taken(reader, pipeline, answered())
        assert (len(pipeline.accepted), pipeline.gaps) == (1, [])

    asyncio.run(story())


def test_log_without_any_epochs_is_fetched_from(monkeypatch) -> None:
    """As those of old message formats, whatever ours says."""
    telling(monkeypatch, {5: (-1, -1), 7: (-1, -1)})
    pipeline = pipeline_at(40, epoch=5, topic_id=NO_TOPIC_ID)
    assert compared(older(7), pipeline, rounds=4) == {KEY: FetchPosition(40, 7, 5, NO_TOPIC_ID)}
    assert pipeline.gaps == []


def test_log_that_is_shorter_in_its_leaders_own_epoch_is_left_to_the_fetch(monkeypatch) -> None:
    """What is known of the leader may be old; the fetch names the epoch, and the leader compares."""
    telling(monkeypatch, {5: (5, 30)})
    pipeline = pipeline_at(40, epoch=5, topic_id=NO_TOPIC_ID)
    assert compared(older(5), pipeline) == {KEY: FetchPosition(40, 5, 5, NO_TOPIC_ID)}
    assert pipeline.gaps == []


@pytest.mark.parametrize(
    ("leader_epoch", "gap"),
    [
        (5, ("recreated", 55, {"resume_at": 0, "origin": NAMELESS})),
        (0, ("recreated", 55, {"resume_at": 0, "origin": NAMELESS})),
        (6, ("truncated", 40, {"first": 30, "resume_at": 30, "resume_epoch": 5})),
        (-1, ("truncated", 40, {"first": 30, "resume_at": 30, "resume_epoch": 5})),
    ],
)
def test_log_that_became_shorter_without_a_new_leader_epoch_was_made_anew(
    monkeypatch: pytest.MonkeyPatch, leader_epoch: int, gap: tuple[Any, ...]
) -> None:
    """The gap reaches to the old log's end, and the new one is carried from its first offset on."""
    pipeline = pipeline_at(40, epoch=5, topic_id=NO_TOPIC_ID)
    pipeline.lag.sample(55, 0)
    telling(monkeypatch, {5: (5, 30)})
    reader = reader_of(older(5, earliest=3, latest=30))
    refused = answered(OffsetOutOfRange.code)
    asyncio.run(taken(reader, pipeline, refused, current_leader_epoch=leader_epoch))
    assert pipeline.gaps == [gap]


@pytest.mark.parametrize(
    ("leader_epoch", "gap"),
    [
        (5, ("recreated", 55, {"resume_at": 0, "origin": NAMELESS})),
        (6, ("truncated", 40, {"first": 30, "resume_at": 30, "resume_epoch": 5})),
        (-1, ("truncated", 40, {"first": 30, "resume_at": 30, "resume_epoch": 5})),
    ],
)
def test_topic_made_anew_whose_leader_says_that_histories_part_is_not_a_log_that_was_cut(
    leader_epoch: int, gap: tuple[Any, ...]
) -> None:
    """Apache Kafka 2.7, whose fetches tell where (KIP-595), and no ids yet: it would go on at the new log's
    end, and what stands before would never be carried."""
    pipeline = pipeline_at(40, epoch=5, topic_id=NO_TOPIC_ID)
    pipeline.lag.sample(55, 0)
    source = older(5, earliest=0, latest=30)
    source.fetch_version = 12
    answer = answered(diverging=(5, 30))
    asyncio.run(taken(reader_of(source), pipeline, answer, current_leader_epoch=leader_epoch))
    assert pipeline.gaps == [gap]


def test_topic_of_a_known_id_that_parts_under_its_leader_is_cut() -> None:
    pipeline = pipeline_at(40, epoch=5)
    asyncio.run(taken(reader_of(Source()), pipeline, answered(diverging=(5, 30)), current_leader_epoch=5))
    assert pipeline.gaps == [("truncated", 40, {"first": 30, "resume_at": 30, "resume_epoch": 5})]


def test_end_of_a_shorter_log_is_not_noted_as_the_end_of_what_was_fetched() -> None:
    pipeline = pipeline_at(40, epoch=5, topic_id=NO_TOPIC_ID)
    pipeline.lag.sample(55, 0)
    source = older(5, latest=30)
    asyncio.run(logs_of(source).sample_ends([pipeline], source.view()))
    assert pipeline.lag.log_end == 55


def test_id_is_adopted_when_the_source_has_one() -> None:
    """It was upgraded: from now on the id tells, to the next owner of the position too."""
    around = Around()
    pipeline = pipeline_of(SourcePartition("ewr", "t", 0), TargetPartition("t", 0), Target(), around)
    pipeline.ready(Position(0, "cluster", NO_TOPIC_ID, -1, -1))
    assert pipeline.position_to_write(0) is None
    source = Source(UUID(int=9))
    view = source.view()
    view.cluster_id = "cluster"
    reader = reader_of(source)
    reader._pipelines[KEY] = pipeline
    view.topics = {KEY[0]: view.topics["t"]}
    reader._check_origins(view)
    position = pipeline.position_to_write(0)
    assert position is not None and position.topic_id == UUID(int=9)
    assert (pipeline.origin, pipeline.runs.topic_id) == (Origin("cluster", UUID(int=9)), UUID(int=9))
    assert around.events == []


# --- what nothing tells -------------------------------------------------------------------------------


def topic(topic_id: UUID, leader_epoch: int) -> Any:
    return SimpleNamespace(
        name="flights",
        internal=False,
        topic_id=topic_id,
        partitions={0: SimpleNamespace(leader_epoch=leader_epoch, leader=1)},
    )


@pytest.mark.parametrize(
    ("topic_id", "leader_epoch", "said"),
    [
        (UUID(int=7), 4, None),
        (NO_TOPIC_ID, 4, "no topic ids"),
        (NO_TOPIC_ID, -1, "neither topic ids nor leader epochs"),
    ],
)
def test_check_and_the_log_say_what_a_source_does_not_tell(
    tmp_path: Path, topic_id: UUID, leader_epoch: int, said: str | None
) -> None:
    flights = topic(topic_id, leader_epoch)
    assert (untold([flights]) is None) == (said is None)
    views: Any = {"ewr": SimpleNamespace(topics={"flights": flights})}
    found = check._select(configured(tmp_path), 0, check._Picture({}, views))
    warnings = [each for each in found if each.severity is Severity.WARNING]
    reader = reader_of(Source())
    reader.selected_topics = lambda: [flights]  # type: ignore[method-assign]
    with capture_logs() as logs:
        reader._tell_of_missing_ids()
        reader._tell_of_missing_ids()
    if said is None:
        assert (warnings, logs) == ([], [])
    else:
        (warning,), (line,) = warnings, logs
        assert said in warning.message and warning.place.endswith("sources[0].bootstrap")
        assert said in line["reason"] and line["log_level"] == "warning"
