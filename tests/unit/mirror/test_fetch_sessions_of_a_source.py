"""Fetches of a source in a session (KIP-227): it does not repeat what it has said, so what was not taken is
asked for anew, and silence is heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from millrace.broker.client.fetch_session import FetchPosition, FetchSession, LogEnds
from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import NotLeaderOrFollower
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.pipeline import State
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources.doubt import Doubt
from millrace.mirror.sources.fetch_loop import QUIET_INTERVAL_MS, FetchLoop, Way
from millrace.mirror.steady import steady_ms
from millrace.mirror.troubles import LASTING_AFTER_MS
from tests.unit.mirror.source_stage import OLD, Source, heard, pipeline_at, reader_of
from tests.waiting import patience

FIRST, SECOND = ("t", 0), ("t", 1)
Said = dict[TopicPartition, FetchPosition]


def good(number: int, stable_end: int = 100, log_end: int = 100, records: bytes = b"") -> FetchedPartition:
    return FetchedPartition("t", number, 0, log_end, stable_end, 0, (), None, memoryview(records))


class Stage:
    """A reader whose source answers as it is told, within the session that it is asked in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 1_000_000
        self.reader = reader_of(Source(), lambda: self.now_ms)
        self.loop = FetchLoop(self.reader._budget)
        self.loop.quiet(steady_ms())
        self.loop.partitions = {key: pipeline_at(10) for key in (FIRST, SECOND)}
        for key, pipeline in self.loop.partitions.items():
            pipeline.partition = pipeline.partition._replace(partition=key[1])
        self.reader._pipelines = dict(self.loop.partitions)
        self.reader._loops[Way(1, 0)] = self.loop
        self.said: list[Said] = []
        """What each request said."""
        self.sessions: list[FetchSession | None] = []
        self.script: list[Callable[[], list[FetchedPartition]]] = []
        """What is answered to each fetch."""
        monkeypatch.setattr(source_module, "fetch", self.fetch)

    async def fetch(
        self,
        _cluster: object,
        _node: int,
        positions: Mapping[TopicPartition, FetchPosition],
        *,
        session: FetchSession | None,
        **_: object,
    ) -> list[FetchedPartition]:
        self.sessions.append(session)
        if not self.script:
            raise asyncio.CancelledError
        if session is not None:
            self.said.append(dict(session.want(positions, 1, by_id=True).partitions))
        answers = self.script.pop(0)()
        if session is not None:
            session.answered(5, list(map(heard, answers)))
        return answers

    def run(self, *script: Callable[[], list[FetchedPartition]]) -> None:
        self.script = list(script)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(asyncio.wait_for(self.reader._fetch_from(Way(1, 0), self.loop), patience(10)))

    def pipeline(self, key: TopicPartition) -> Any:
        return self.reader._pipelines[key]

    def time_passes(self, ms: int = 0) -> list[FetchedPartition]:
        """Nothing is new, and it is time to say so."""
        self.now_ms += ms
        self.loop._quiet_told_at_ms -= QUIET_INTERVAL_MS
        return []


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def both() -> list[FetchedPartition]:
    return [good(0), good(1)]


def nothing() -> list[FetchedPartition]:
    return []


def test_what_was_taken_is_not_asked_for_again(stage: Stage) -> None:
    stage.run(both, nothing, lambda: [good(1)], nothing)
    assert [each.keys() for each in stage.said] == [{FIRST, SECOND}, set(), set(), set()]
    assert len(stage.pipeline(SECOND).accepted) == 2


def test_answer_that_was_not_taken_is_asked_for_anew(stage: Stage) -> None:
    """It was drained, or went back, while the answer was under way; and may be back before the next one."""

    def while_it_goes_back() -> list[FetchedPartition]:
        stage.pipeline(SECOND).progress.fetch_offset -= 1
        return [good(1)]

    def while_it_is_paused() -> list[FetchedPartition]:
        stage.pipeline(SECOND).state = State.PAUSED
        return [good(1)]

    stage.run(both, while_it_goes_back, both, while_it_is_paused, both)
    assert [len(each) for each in stage.said] == [2, 0, 2, 0, 2]


def test_partition_that_is_taken_away_and_given_again_is_told_all(stage: Stage) -> None:
    def while_it_is_taken_away() -> list[FetchedPartition]:
        old = stage.pipeline(SECOND)
        stage.reader.remove(old)
        new = stage.reader._pipelines[SECOND] = stage.loop.partitions[SECOND] = pipeline_at(10)
        new.partition = old.partition
        return []

    stage.run(both, while_it_is_taken_away, both)
    assert stage.said[2].keys() == {FIRST, SECOND}
    assert len(stage.pipeline(SECOND).accepted) == 1


def test_one_that_is_asked_for_alone_is_none_of_the_session(stage: Stage) -> None:
    def while_it_needs_more() -> list[FetchedPartition]:
        stage.pipeline(SECOND).doubt = Doubt(10, needed_size=9 << 20)
        return both()

    stage.run(while_it_needs_more, lambda: [good(1, records=b"x")], lambda: [good(0)], lambda: [good(1)])
    assert [session is None for session in stage.sessions] == [False, True, False, True, False]
    assert [each.keys() for each in stage.said] == [{FIRST, SECOND}, set()]
    assert len(stage.pipeline(FIRST).accepted) == 2


def test_silence_is_an_answer_that_nothing_has_changed(stage: Stage) -> None:
    stage.pipeline(SECOND).lag.sample(70, 0, 60)  # somebody was told otherwise, before or meanwhile
    stage.run(
        lambda: [good(0, 10, 10), good(1, 10, 10)],
        lambda: stage.time_passes(700),
        lambda: stage.time_passes(700),
    )
    lag = stage.pipeline(SECOND).lag
    assert (lag.log_end, lag.stable_end, lag.sampled_at_ms) == (10, 10, stage.now_ms)


def test_end_that_came_with_what_was_not_taken_is_known_by_silence(stage: Stage) -> None:
    """Here beside an epoch at which histories part: the source has said the end, and does not do so again."""
    stage.pipeline(SECOND).lag.sample(100, 0, 100)

    def parted() -> list[FetchedPartition]:
        return [good(0), replace(good(1, 10, 10), diverging=(0, 10))]

    stage.run(parted, stage.time_passes)
    assert stage.pipeline(SECOND).gaps
    assert stage.pipeline(SECOND).lag.log_end == 10


def test_silence_ends_a_failure_and_is_told_where_the_log_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.loop.session, "end", lambda: None)

    def at_the_end_and_before() -> list[FetchedPartition]:
        return [good(0, 10, 10), good(1)]

    def while_one_failed() -> list[FetchedPartition]:
        stage.reader._refusals[FIRST] = 3
        stage.reader.failures.failed(FIRST, "on purpose", 0)
        return stage.time_passes(LASTING_AFTER_MS)

    stage.run(at_the_end_and_before, *[while_one_failed] * 4)
    assert stage.reader.failures.get(FIRST) is None
    assert stage.reader._refusals == {}
    told = stage.reader.failures.get(SECOND)
    assert told is not None
    assert "gives nothing at offset 10" in told.reason


@pytest.mark.parametrize(("with_room", "is_told"), [({FIRST}, False), ({FIRST, SECOND}, True)])
def test_silence_for_want_of_room_is_not_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, with_room: set[TopicPartition], is_told: bool
) -> None:
    monkeypatch.setattr(stage.loop.session, "had_room", lambda: with_room)
    monkeypatch.setattr(stage.loop.session, "end", lambda: None)
    stage.run(both, *[lambda: stage.time_passes(LASTING_AFTER_MS)] * 4)
    assert (stage.reader.failures.get(SECOND) is not None) is is_told


def test_stable_end_that_moves_alone_is_asked_for(stage: Stage) -> None:
    """A source need not say it: while a transaction is open, silence is no sample."""
    began_ms = stage.now_ms
    stage.pipeline(SECOND).lag.sample(100, began_ms, 10)
    stage.run(lambda: [good(0), good(1, stable_end=10)], lambda: stage.time_passes(700))
    assert stage.pipeline(SECOND).lag.sampled_at_ms == began_ms


def test_silence_about_one_that_moved_or_was_refused_says_nothing(stage: Stage) -> None:
    def while_both_move() -> list[FetchedPartition]:
        for key in (FIRST, SECOND):
            stage.pipeline(key).progress.fetch_offset += 1
        return stage.time_passes()

    stage.run(both, while_both_move)
    assert {stage.pipeline(key).lag.sampled_at_ms for key in (FIRST, SECOND)} == {-1}
    refused = replace(good(1), error_code=NotLeaderOrFollower.code, high_watermark=-1, last_stable_offset=-1)
    stage.run(lambda: [good(0), refused], stage.time_passes)
    assert stage.pipeline(SECOND).lag.sampled_at_ms == -1


def test_silence_is_heard_once_in_a_while() -> None:
    loop = FetchLoop(reader_of(Source())._budget)
    at_the_end = FetchPosition(100, topic_id=OLD)
    loop.session.want({FIRST: at_the_end}, 1, by_id=True)
    loop.session.answered(5, [heard(good(0))])
    loop.session.want({FIRST: at_the_end}, 1, by_id=True)
    loop.session.answered(5, [])
    assert loop.quiet(5_000) == {FIRST: LogEnds(100, 100)}
    assert loop.quiet(5_000 + QUIET_INTERVAL_MS - 1) == {}
    assert loop.quiet(5_000 + QUIET_INTERVAL_MS) == {FIRST: LogEnds(100, 100)}
    assert not loop.session.says_all_next


@pytest.mark.parametrize("count", [2, 3, 5])
def test_who_is_passed_over_is_first_before_long(stage: Stage, count: int) -> None:
    """As where a source reads for the first one alone, from a remote store (KIP-405), and in vain."""
    keys = [("t", number) for number in range(count)]
    stage.loop.partitions = {key: pipeline_at(10) for key in keys}
    first: list[TopicPartition] = []
    order: list[TopicPartition] = []

    def in_vain() -> list[FetchedPartition]:
        said = stage.said[-1]
        if stage.loop.session.said_all:
            order[:] = said
        first.append(order[0])
        stage.loop._quiet_told_at_ms -= QUIET_INTERVAL_MS // 2
        return [good(number) for _, number in said]

    stage.run(*[in_vain] * (4 * count))
    assert set(first) == set(keys)
    assert len(stage.said) - sum(map(bool, stage.said)) >= count, "not at every turn"
