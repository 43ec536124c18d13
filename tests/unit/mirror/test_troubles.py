"""What is tried in vain shows: in the status, in the metrics, and in whether a worker is ready."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import TopicMetadata
from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.broker.client.retry import BackOff
from millrace.broker.errors import (
    InvalidTimestamp,
    NotEnoughReplicas,
    OffsetOutOfRange,
    OutOfOrderSequence,
    TopicAuthorizationFailed,
)
from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.mirror.config import parse_config
from millrace.mirror.control.http.bodies import StatusAnswer
from millrace.mirror.control.sight import trouble_gauges
from millrace.mirror.delivery import system_records
from millrace.mirror.delivery.beginnings import Begun, Start
from millrace.mirror.delivery.gap_records import GapRecords
from millrace.mirror.delivery.lane import Identity
from millrace.mirror.gaps.gaps import Gap, GapClass, GapPolicy
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.topics import topics as topics_module
from millrace.mirror.topics.own_topics import OFFSET_MAP, POSITIONS, STARTS
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.topics.topics import WantedTopic
from millrace.mirror.troubles import (
    ALL_TOPICS,
    HANGING_AFTER_MS,
    LASTING_AFTER_MS,
    Failure,
    Failures,
    Trouble,
)
from millrace.mirror.worker import Worker
from tests.unit.mirror.pipeline_stage import ORIGIN, answer, at, batch
from tests.unit.mirror.source_stage import answered, taken
from tests.waiting import until_async as until

WHERE = SourcePartition("ewr", "flights", 0)
CONFIG = parse_config(
    {
        "name": "aggregate",
        "delivery": "at_least_once",
        "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
        "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
    }
)


class Scene:
    """A worker that is ready and carries one partition; time is what the test says."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.target = Cluster("agg", ["127.0.0.1:1"])
        self.source = Cluster("ewr", ["127.0.0.1:2"])
        self.worker = Worker(CONFIG, self.target, {"ewr": self.source}, lambda: self.now_ms)
        self.worker.is_assigned = True
        self.worker.member.generation, self.worker.member._heard_at = 1, math.inf
        self.worker.operators.reader._ready.set()
        self.sink: Any = self.worker.delivery.sink_of(WHERE)
        self.sink.is_connected = True
        self.sink._identity = Identity(1, 0)
        target = self.worker.discovery.target_of(WHERE)
        self.pipeline = PartitionPipeline(WHERE, target, self.sink, self.worker._shared, lambda _: None)
        self.pipeline.ready(at(0))
        self.worker.owned[WHERE] = self.pipeline
        self.reader = self.worker.readers["ewr"]
        assert self.worker.status.is_ready()

    def passes(self, ms: int) -> None:
        self.now_ms += ms

    def told(self) -> list[tuple[str, int | None, str, int]]:
        status = self.worker.status.document()
        StatusAnswer.model_validate(status)
        return [
            (each["topic"], each["partition"], each["reason"], each["since_ms"])
            for each in status["troubles"]
        ]

    def gauge(self, name: str) -> dict[str, float]:
        lines = self.worker.metrics.text().decode().splitlines()
        rows = [line.rsplit(" ", 1) for line in lines if line.startswith(name + "{")]
        return {labels.removeprefix(name): float(value) for labels, value in rows}


def with_scene(story: Callable[[Scene], Any]) -> None:
    async def whole() -> None:
        scene = Scene()
        try:
            await story(scene)
        finally:
            await scene.target.close()
            await scene.source.close()

    asyncio.run(whole())


LABELS = '{partition="0",source="ewr",topic="flights"}'


async def until_lasting(scene: Scene, reason: str, labels: str = LABELS) -> None:
    """It began just now: it is told at once, and once it lasts the worker is not ready."""
    began_ms = scene.now_ms
    partition = None if 'partition=""' in labels else 0
    ((topic, number, told, since_ms),) = scene.told()
    assert (topic, number, since_ms) == ("flights", partition, began_ms)
    assert reason in told
    assert scene.worker.status.is_ready(), "a leader that moves is no trouble"
    scene.passes(LASTING_AFTER_MS)
    assert not scene.worker.status.is_ready()
    (line,) = scene.worker.status.waits_for()
    assert "for 30 s: " in line and reason in line
    assert scene.gauge("millrace_mirror_trouble_seconds") == {labels: LASTING_AFTER_MS / 1000}


def test_fetches_that_the_source_refuses_show_until_one_is_answered() -> None:
    async def story(scene: Scene) -> None:
        refused = replace(answered(TopicAuthorizationFailed.code), topic="flights")
        await taken(scene.reader, scene.pipeline, refused)
        began_ms = scene.now_ms
        await until_lasting(scene, "the source refuses the fetch")
        await taken(scene.reader, scene.pipeline, refused)
        assert scene.told()[0][3] == began_ms, "since the first of them"
        await taken(scene.reader, scene.pipeline, replace(answered(), topic="flights"))
        assert scene.told() == []
        assert scene.worker.status.is_ready()

    with_scene(story)


def test_batches_that_the_target_refuses_show_until_one_is_taken() -> None:
    async def story(scene: Scene) -> None:
        scene.pipeline.accept(answer(batch(0, [5] * 10), end=10))
        target = scene.pipeline.target
        lane = scene.sink._lanes[target]
        item = lane.next_to_send(0)
        refused = ProduceOutcome(TopicAuthorizationFailed.code)
        scene.sink._answered(target, item, refused, scene.now_ms, 0)
        await until_lasting(scene, "the target refuses flights-0")
        item = lane.next_to_send(1 << 40)
        scene.sink._answered(target, item, ProduceOutcome(0, 0), scene.now_ms, 0)
        assert scene.told() == []
        assert scene.worker.status.is_ready()

    with_scene(story)


def test_batch_that_the_target_fails_at_for_ever_is_told_and_logged_once_and_not_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Apache Kafka answers UNKNOWN_SERVER_ERROR where its own log fails it; only a person can help then."""
    left_out: list[Any] = []

    def refused(_pipeline: PartitionPipeline, item: Any, *_: object) -> list[Any]:
        left_out.append(item)
        return []

    monkeypatch.setattr(PartitionPipeline, "refused", refused)

    async def story(scene: Scene) -> None:
        scene.pipeline.accept(answer(batch(0, [5] * 10), end=10))
        target = scene.pipeline.target
        lane = scene.sink._lanes[target]
        scene.sink._answered(target, lane.next_to_send(0), ProduceOutcome(0, 0), scene.now_ms, 0)
        scene.pipeline.accept(answer(batch(10, [5] * 10), end=20))

        def answered_with(outcome: ProduceOutcome) -> list[Any]:
            with capture_logs() as lines:
                item = lane.next_to_send(1 << 40)
                assert item.offsets[0] == 10, "it is sent until it is taken"
                scene.sink._answered(target, item, outcome, scene.now_ms, 0)
            assert not left_out
            return [line for line in lines if "again and again" in line["event"]]

        failed = ProduceOutcome(-1, -1)
        assert answered_with(failed) == []
        await until_lasting(scene, "flights-0: UNKNOWN_SERVER_ERROR, unknown server error (source offset 10)")
        (line,) = answered_with(failed)
        assert (line["to"], line["source_offset"], line["for_s"]) == ("flights-0", 10, 30)
        assert line["error"].startswith("UNKNOWN_SERVER_ERROR")
        assert answered_with(failed) == []
        scene.passes(LASTING_AFTER_MS)
        assert answered_with(failed) == []
        assert answered_with(ProduceOutcome(0, 0)) == []
        assert scene.told() == []

    with_scene(story)


@dataclass
class OwnTopics:
    """The mirror's own, of which one does not take what is written, for the reason that is said now."""

    refusing: str
    reason: str | None = "not enough replicas"

    async def attempt(self, topic: str, records: list[Any], *_: object) -> int:
        if topic == self.refusing and self.reason is not None:
            raise NotEnoughReplicas(self.reason)
        return len(records)


def carried(scene: Scene, pipeline: PartitionPipeline) -> None:
    """Ten records more, which the target acknowledges."""
    pipeline.accept(answer(batch(pipeline.progress.fetch_offset, [5] * 10)))
    scene.sink._answered(
        pipeline.target,
        scene.sink._lanes[pipeline.target].next_to_send(0),
        ProduceOutcome(0, 0),
        scene.now_ms,
        0,
    )


async def settled(scene: Scene) -> None:
    carried(scene, scene.pipeline)
    await scene.worker.delivery.settle([scene.pipeline])


async def gap_recorded(scene: Scene) -> None:
    gap = Gap(WHERE, 0, 9, GapClass.EXPIRED, "it expired", scene.now_ms)
    await scene.worker._shared.gaps.record(gap)


async def begun(scene: Scene) -> None:
    await scene.worker._record_start(WHERE, at(0))


@pytest.mark.parametrize(
    ("topic", "write"),
    [
        (POSITIONS.of(CONFIG.name), settled),
        (OFFSET_MAP.of(CONFIG.name), settled),
        (AUDIT_TOPIC, gap_recorded),
        (POSITIONS.of(CONFIG.name), begun),
        (STARTS.of(CONFIG.name), begun),
    ],
)
def test_record_of_the_mirrors_own_that_is_not_taken_shows_until_it_is(
    topic: str, write: Callable[[Scene], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least once nothing else would tell: the batches themselves get through."""

    async def story(scene: Scene) -> None:
        async def metadata(*_: object, **__: object) -> Any:
            return SimpleNamespace(cluster_id="T")

        topics = OwnTopics(topic)
        monkeypatch.setattr(scene.target, "metadata", metadata)
        monkeypatch.setattr(scene.worker._system, "_attempt", topics.attempt)
        monkeypatch.setattr(system_records, "WRITE_BACK_OFF", BackOff(first_ms=1, limit_ms=1))
        scene.worker.delivery.began(scene.pipeline)
        began_ms = scene.now_ms
        with capture_logs() as lines:
            writing = asyncio.create_task(write(scene))
            await until(lambda: scene.told() != [])
            await until_lasting(scene, f"{topic} takes no record of it: not enough replicas")
            topics.reason = "the disk is full"
            await until(lambda: "the disk is full" in scene.told()[0][2])
            ((*_, since_ms),) = scene.told()
            assert since_ms == began_ms, "the newest reason, since the first"
            topics.reason = None
            await writing
        assert scene.told() == [] and scene.worker.status.is_ready()
        assert [line["topic"] for line in lines if line["log_level"] == "warning"] == [topic]

    with_scene(story)


def test_position_that_waits_behind_one_that_is_not_taken_shows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        topics, worker = OwnTopics(POSITIONS.of(CONFIG.name)), scene.worker
        monkeypatch.setattr(worker._system, "_attempt", topics.attempt)
        monkeypatch.setattr(system_records, "WRITE_BACK_OFF", BackOff(first_ms=1, limit_ms=1))
        for number in (1, 2):
            where = SourcePartition("ewr", "flights", number)
            target = worker.discovery.target_of(where)
            worker.owned[where] = PartitionPipeline(where, target, scene.sink, worker._shared, lambda _: None)
            worker.owned[where].ready(at(0))
        for pipeline in worker.owned.values():
            worker.delivery.began(pipeline)
        writing = asyncio.create_task(settled(scene))
        await until(lambda: scene.told() != [])
        carried(scene, worker.owned[where])
        assert sorted(number or 0 for _, number, *_ in scene.told()) == [0, 2], "1 has nothing to write"
        topics.reason = None
        await writing
        assert scene.told() == []

    with_scene(story)


def test_what_no_transaction_commits_shows_until_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        standing = {WHERE: Failure("the target does not acknowledge", scene.now_ms)}
        monkeypatch.setattr(scene.worker.delivery, "standing", lambda: iter(standing.items()))
        await until_lasting(scene, "the target does not acknowledge")
        standing.clear()
        assert scene.told() == []
        assert scene.worker.status.is_ready()

    with_scene(story)


def test_topic_that_the_target_does_not_take_shows_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        async def metadata(*_: object, **__: object) -> Any:
            return SimpleNamespace(topics={})

        async def configs(_cluster: object, names: list[str], *_: object) -> Any:
            return {name: {} for name in names}

        async def refuse(*_: object, **__: object) -> None:
            raise TopicAuthorizationFailed("no")

        async def take(*_: object, **__: object) -> None: ...

        monkeypatch.setattr(scene.target, "metadata", metadata)
        monkeypatch.setattr(topics_module, "describe_topics_configs", configs)
        monkeypatch.setattr(topics_module, "create_topic", refuse)
        topic = TopicMetadata("flights", ORIGIN.topic_id, False, {})
        wanted = [WantedTopic(topic, "flights", 1)]
        await scene.worker.discovery.topics.ensure(scene.source, wanted)
        await until_lasting(
            scene, "the target has not taken flights: no", '{partition="",source="ewr",topic="flights"}'
        )
        monkeypatch.setattr(topics_module, "create_topic", take)
        await scene.worker.discovery.topics.ensure(scene.source, wanted)
        assert scene.told() == []
        monkeypatch.setattr(topics_module, "create_topic", refuse)
        await scene.worker.discovery.topics.ensure(scene.source, wanted)
        assert scene.told() != []
        await scene.worker.discovery.topics.ensure(scene.source, [])
        assert scene.told() == [], "it is not wanted any more"

    with_scene(story)


def test_source_whose_topics_cannot_be_let_in_is_told() -> None:
    async def story(scene: Scene) -> None:
        scene.reader.view_failures.failed(ALL_TOPICS, "millrace.routes.m cannot be read", scene.now_ms)
        assert scene.told() == [("*", None, "millrace.routes.m cannot be read", scene.now_ms)]
        scene.passes(LASTING_AFTER_MS)
        assert scene.worker.status.waits_for() == ["ewr/* for 30 s: millrace.routes.m cannot be read"]
        assert not scene.worker.status.is_ready()

    with_scene(story)


def test_transaction_that_nobody_ends_at_the_source_is_lag_and_trouble() -> None:
    async def story(scene: Scene) -> None:
        held = replace(answer(batch(0, [5] * 4), end=4), high_watermark=10, last_stable_offset=4)
        scene.pipeline.accept(held)
        began_ms = scene.now_ms
        scene.passes(3_600_000)
        assert scene.gauge("millrace_mirror_stable_offset") == {LABELS: 4}
        assert scene.gauge("millrace_mirror_lag_records") == {LABELS: 10}
        assert scene.gauge("millrace_mirror_lag_seconds") == {LABELS: 3_600}
        ((_, _, reason, since_ms),) = scene.told()
        assert "holds back what follows offset 4" in reason
        assert since_ms == began_ms
        assert not scene.worker.status.is_ready()
        empty = replace(held, records=memoryview(b""), last_stable_offset=10)
        scene.pipeline.accept(empty)
        assert scene.told() == []

    with_scene(story)


def test_source_that_gives_nothing_though_its_log_goes_on_is_trouble_until_it_gives() -> None:
    async def story(scene: Scene) -> None:
        nothing = replace(answered(), topic="flights")
        began_ms = scene.now_ms
        for ms in (0, 1, LASTING_AFTER_MS - 2):
            scene.passes(ms)
            await taken(scene.reader, scene.pipeline, nothing)
            assert scene.told() == []
        scene.passes(1)
        await taken(scene.reader, scene.pipeline, nothing)
        ((_, partition, reason, since_ms),) = scene.told()
        assert (partition, since_ms) == (0, began_ms) and "gives nothing at offset 0" in reason
        assert not scene.worker.status.is_ready()
        assert scene.gauge("millrace_mirror_trouble_seconds") == {LABELS: LASTING_AFTER_MS / 1000}
        given = replace(answer(batch(0, [5] * 4), end=4))
        await taken(scene.reader, scene.pipeline, given)
        assert scene.told() == [] and scene.worker.status.is_ready()

    with_scene(story)


def stopping(scene: Scene) -> PartitionPipeline:
    """The partition, whose gaps are recorded by nobody."""
    shared = replace(scene.worker._shared, spawn=lambda work: work.close())
    scene.pipeline._shared = shared
    return scene.pipeline


@pytest.mark.parametrize(
    ("policy", "state"), [(GapPolicy.STOP, State.STOPPED), (GapPolicy.SKIP, State.SKIPPING)]
)
def test_what_a_source_said_before_a_partition_stood_at_a_gap_is_no_trouble(
    monkeypatch: pytest.MonkeyPatch, policy: GapPolicy, state: State
) -> None:
    """The gap itself is told elsewhere, and stays for as long as its operator likes."""
    monkeypatch.setattr(GapRecords, "policy", lambda *_: policy)

    async def story(scene: Scene) -> None:
        pipeline = stopping(scene)

        async def explain(*_: object, **__: object) -> None:
            pipeline.at_gap(GapClass.EXPIRED, 9, "retention deleted it", resume_at=9)

        monkeypatch.setattr(scene.reader._logs, "explain", explain)
        scene.reader.add(pipeline)
        await taken(scene.reader, pipeline, replace(answered(OffsetOutOfRange.code), topic="flights"))
        assert pipeline.state is state
        scene.reader._forget_what_stands()
        assert scene.told() == []

    with_scene(story)


def test_what_a_target_said_of_batches_behind_a_refused_one_is_no_trouble() -> None:
    """They were under way with it; nothing of the partition waits for the target any more."""

    async def story(scene: Scene) -> None:
        carried(scene, scene.pipeline)
        pipeline = stopping(scene)
        row = scene.sink._lanes[pipeline.target]
        for _ in range(2):  # answers of their own, or they would become one batch
            pipeline.accept(answer(batch(pipeline.progress.fetch_offset, [5])))
        refused, behind = row.next_to_send(0), row.next_to_send(0)
        for item, error in ((refused, InvalidTimestamp), (behind, OutOfOrderSequence)):
            scene.sink._answered(pipeline.target, item, ProduceOutcome(error.code), scene.now_ms, 0)
        assert pipeline.state is State.STOPPED
        assert len(row) == 0 and scene.told() == []

    with_scene(story)


def test_transaction_that_may_still_end_is_no_trouble() -> None:
    async def story(scene: Scene) -> None:
        lag = scene.pipeline.lag
        lag.sample(10, scene.now_ms, 4)
        scene.passes(HANGING_AFTER_MS - 1)
        assert scene.told() == []
        # Another one holds it back now: nobody can tell that none of them ends.
        lag.sample(20, scene.now_ms, 12)
        scene.passes(HANGING_AFTER_MS - 1)
        lag.sample(30, scene.now_ms, 12)
        assert scene.told() == []
        scene.passes(1)
        assert len(scene.told()) == 1

    with_scene(story)


def test_partition_with_two_troubles_has_one_gauge() -> None:
    """Prometheus takes no sample twice."""
    troubles = [Trouble(*WHERE, "fetch", 5_000), Trouble(*WHERE, "batch", 9_000)]
    ((_, _, labels, seconds),) = trouble_gauges(troubles, 10_000)
    assert (labels, seconds) == ({"source": "ewr", "topic": "flights", "partition": "0"}, 5.0)


def test_partition_that_cannot_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        may_begin = asyncio.Event()

        async def log_of(_partition: object) -> Any:
            if not may_begin.is_set():
                raise TopicAuthorizationFailed("no")
            return ORIGIN, 0, 0

        monkeypatch.setattr(scene.reader._logs, "_log_of", log_of)
        scene.pipeline.state = State.STARTING
        known = at(0)
        beginning = asyncio.create_task(
            scene.reader.begin(scene.pipeline, known, is_lost=False, start=Start("earliest"))
        )
        await until(lambda: scene.told() != [])
        assert "it cannot begin: no" in scene.told()[0][2]
        may_begin.set()
        await beginning
        assert scene.told() == []

    with_scene(story)


def test_partition_that_is_given_up_before_it_could_begin_is_no_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(scene: Scene) -> None:
        async def log_of(_partition: object) -> Any:
            raise TopicAuthorizationFailed("no")

        monkeypatch.setattr(scene.reader._logs, "_log_of", log_of)
        scene.pipeline.state = State.STARTING
        beginning = asyncio.create_task(
            scene.reader.begin(scene.pipeline, at(0), is_lost=False, start=Start("earliest"))
        )
        await until(lambda: scene.told() != [])
        scene.reader.remove(scene.pipeline)
        scene.pipeline.state = State.CLOSED
        await beginning
        assert scene.told() == []

    with_scene(story)


def test_partition_whose_first_look_is_not_taken_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its source nothing is on record, and until that is, nothing of it begins."""

    async def story(scene: Scene) -> None:
        topics, worker, pipeline = OwnTopics(STARTS.of(CONFIG.name)), scene.worker, scene.pipeline
        monkeypatch.setattr(worker._system, "_attempt", topics.attempt)
        monkeypatch.setattr(system_records, "WRITE_BACK_OFF", BackOff(first_ms=1, limit_ms=1))
        monkeypatch.setattr(worker._beginnings, "read", AsyncMock(return_value=Begun()))
        monkeypatch.setattr(scene.reader, "seen", AsyncMock())
        monkeypatch.setattr(worker, "_spawn", lambda beginning: beginning.close())
        pipeline.state = State.STARTING
        looking = asyncio.create_task(worker._begin_when_seen(scene.reader, [pipeline]))
        await until(lambda: scene.told() != [])
        scene.passes(LASTING_AFTER_MS)
        (line,) = worker.status.waits_for()
        assert "for 30 s: " in line and f"{topics.refusing} takes no record of it: not enough" in line
        topics.reason = None
        await looking
        assert scene.told() == []

    with_scene(story)


def test_failures_are_known_since_the_first_of_a_row() -> None:
    failures: Failures[str] = Failures()
    failures.failed("a", "one", 1)
    failures.failed("a", "two", 2)
    assert list(failures) == [("a", Failure("two", 1))]
    failures.over("a")
    failures.failed("a", "three", 3)
    assert failures.get("a") == Failure("three", 3)
