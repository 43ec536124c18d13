"""What was begun is known apart from the positions: none that is lost is taken for none that was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position
from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.delivery import beginnings as module
from millrace.mirror.delivery.beginnings import (
    Begun,
    FirstLook,
    SeenTopic,
    Start,
    encode_first_look,
    encode_marks,
)
from millrace.mirror.delivery.checkpoints import Positions, encode_records
from millrace.mirror.sharing.assignment import Share, encode_share
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.worker import Worker
from tests.unit.mirror.pipeline_stage import ORIGIN
from tests.unit.mirror.source_stage import NEW, OLD
from tests.waiting import patience
from tests.waiting import until_async as until

START_MS = 1_000


def part(number: int, topic: str = "flights") -> SourcePartition:
    return SourcePartition("ewr", topic, number)


def config(start: str) -> MirrorConfig:
    source = {"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": [".*"]}, "start": start}
    target = {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]}
    return parse_config({"name": "m", "delivery": "at_least_once", "target": target, "sources": [source]})


class Stage:
    """A mirror's own topics, and one worker after another that is assigned partitions of `ewr`."""

    def __init__(self, patch: pytest.MonkeyPatch, start: str) -> None:
        self.config = config(start)
        self.now_ms = START_MS
        self.topics = {"flights": SeenTopic(2)}
        self.starts: list[tuple[bytes | None, bytes | None]] = []
        self.positions: list[tuple[bytes, bytes]] = []
        self.done: list[str] = []
        self.is_killed_before_marks = False
        self.is_told_to_stop = False
        self.before_positions: Callable[[], Awaitable[object]] | None = None
        self.owed: dict[SourcePartition, UUID] = {}
        self.is_seen = asyncio.Event()
        self.is_seen.set()

        async def nothing(*_: object) -> int:
            return 1

        async def read(*_: object) -> Any:
            self.done.append("marks read")
            for key, value in list(self.starts):
                yield SimpleNamespace(key=key, value=value)

        patch.setattr(module, "ensure_topic", nothing)
        patch.setattr(module, "refuse_expiring_topic", nothing)
        patch.setattr(module, "read_topic_to_end", read)

    async def write(self, _topic: str, records: Iterable[tuple[bytes, bytes]], **_: object) -> None:
        self.done.append("marks written")
        await asyncio.sleep(0)
        self.starts += records

    async def read_positions(self) -> Positions:
        if (act := self.before_positions) is not None:
            self.before_positions = None
            await act()
        self.done.append("positions read")
        positions = Positions()
        for key, value in self.positions:
            positions.apply(key, value)
        return positions

    async def record_start(self, partition: SourcePartition, position: Position) -> None:
        self.done.append("position written")
        self.positions += encode_records([(partition, position)])

    async def assigned(self, *coming: SourcePartition) -> dict[SourcePartition, str | int]:
        """Where a new worker begins the partitions; "lost": nowhere by itself, "known": at the position. The
        topics that they are of: `owed`.
        A first position is recorded for those that begin."""
        begun: dict[SourcePartition, str | int] = {}
        worker = self.worker()
        reader: Any = worker.readers["ewr"]

        async def look() -> None:
            await self.is_seen.wait()
            self.show(reader)

        async def begin(pipeline: Any, known: Position | None, *, is_lost: bool, start: Start) -> None:
            begun[pipeline.partition] = "lost" if is_lost else start.at if known is None else "known"
            self.owed[pipeline.partition] = start.topic_id
            if not is_lost and known is None:
                position = Position(7, ORIGIN.cluster_id, ORIGIN.topic_id, -1, 0)
                if self.is_killed_before_marks:
                    await self.record_start(pipeline.partition, position)
                else:
                    await worker._record_start(pipeline.partition, position)
            pipeline.close()

        async def ready() -> None:
            worker.is_stopping = self.is_told_to_stop

        reader.begin = begin
        stubbed: Any = worker
        stubbed.operators = SimpleNamespace(
            ready=ready, take_crew=lambda _: None, began=lambda _: None, url="http://x"
        )
        stubbed.delivery.read_positions = self.read_positions
        stubbed.delivery.record_start = self.record_start
        if self.is_seen.is_set():
            self.show(reader)
        async with asyncio.timeout(patience()), asyncio.TaskGroup() as worker._tasks:
            worker._spawn(look())
            await worker._assigned(encode_share(Share(coming)))
            self.done.append("assigned")
        await close(worker)
        return begun

    def worker(self) -> Any:
        agg, ewr = Cluster("agg", ["127.0.0.1:1"]), Cluster("ewr", ["127.0.0.1:2"])
        worker: Any = Worker(self.config, agg, {"ewr": ewr}, lambda: self.now_ms)
        worker._system.write = self.write
        return worker

    def show(self, reader: Any) -> None:
        """What a look at the source gives now."""
        topics = {
            name: SimpleNamespace(
                name=name,
                internal=False,
                topic_id=topic.topic_id,
                partitions=dict.fromkeys(range(topic.partitions)),
            )
            for name, topic in self.topics.items()
        }
        reader.view = SimpleNamespace(topics=topics)
        reader.has_looked.set()

    async def looked_as_leader(self) -> None:
        worker = self.worker()

        async def looked(*_: object) -> None: ...

        stubbed: Any = worker
        stubbed.discovery.looked = looked
        stubbed.discovery.partitions = lambda _: set()
        worker.is_assigned = True
        stubbed.member = SimpleNamespace(is_leader=True, rejoin=lambda: None)
        for _ in range(3):
            self.show(worker.readers["ewr"])
            await worker._on_view(worker.readers["ewr"])
        await close(worker)


async def close(worker: Worker) -> None:
    await worker.target.close()
    await worker.readers["ewr"].cluster.close()


@pytest.mark.parametrize("start", ["latest", "earliest"])
def test_position_that_is_gone_is_lost_wherever_a_first_run_would_begin(
    start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        stage = Stage(monkeypatch, start)
        assert await stage.assigned(part(0), part(1)) == {part(0): start, part(1): start}
        assert await stage.assigned(part(0)) == {part(0): "known"}
        del stage.positions[0]  # one of them
        assert await stage.assigned(part(0), part(1)) == {part(0): "lost", part(1): "known"}
        stage.positions.clear()
        assert await stage.assigned(part(0), part(1)) == {part(0): "lost", part(1): "lost"}

    asyncio.run(story())


def test_who_is_told_to_stop_while_positions_are_read_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be drained when the seat is left, and nothing of it could be committed."""

    async def story() -> None:
        stage = Stage(monkeypatch, "earliest")
        stage.is_told_to_stop = True
        assert await stage.assigned(part(0)) == {}

    asyncio.run(story())


def test_position_without_a_mark_gets_one_and_can_be_lost_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a worker that was killed between the two, or of a version that set none."""

    async def story() -> None:
        stage = Stage(monkeypatch, "latest")
        stage.is_killed_before_marks = True
        assert await stage.assigned(part(0)) == {part(0): "latest"}
        assert await stage.assigned(part(0)) == {part(0): "known"}
        stage.positions.clear()
        assert await stage.assigned(part(0)) == {part(0): "lost"}

    asyncio.run(story())


def test_second_wave_of_a_first_run_begins_when_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at `latest` as it is by then, nor with all that the source ever had."""

    async def story() -> None:
        stage = Stage(monkeypatch, "latest")
        await stage.assigned(part(0))
        stage.now_ms += 3_600_000
        stage.topics = {"flights": SeenTopic(3), "new": SeenTopic(1)}
        assert await stage.assigned(part(0), part(1), part(2), part(0, "new")) == {
            part(0): "known",
            part(1): START_MS,
            part(2): "earliest",
            part(0, "new"): "earliest",
        }

    asyncio.run(story())


def test_worker_that_begins_while_another_does_begins_as_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read what was begun before the other wrote its first look, and the positions after its first."""

    async def story() -> None:
        stage = Stage(monkeypatch, "latest")
        stage.before_positions = lambda: stage.assigned(part(0))
        stage.now_ms += 5
        assert await stage.assigned(part(1)) == {part(1): stage.now_ms}

    asyncio.run(story())


def test_source_that_is_seen_late_is_begun_then_with_its_first_look_on_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The seat waits for no source. But what is begun before the first look is on record would make all that
    comes later begin with its first record, as if it had appeared since."""

    async def story() -> None:
        stage = Stage(monkeypatch, "latest")
        stage.is_seen.clear()
        first_wave = asyncio.create_task(stage.assigned(part(0)))
        await until(lambda: "assigned" in stage.done)
        assert not stage.starts and not stage.positions, "nothing is begun of what nobody has seen"
        stage.now_ms = START_MS + 3_600_000
        stage.is_seen.set()
        assert await first_wave == {part(0): "latest"}
        first_look = encode_first_look("ewr", FirstLook(START_MS + 3_600_000, {"flights": SeenTopic(2)}))
        assert stage.starts == [*first_look, *encode_marks([part(0)])]
        stage.now_ms += 1
        assert await stage.assigned(part(1)) == {part(1): START_MS + 3_600_000}

    asyncio.run(story())


def test_what_a_first_look_has_seen_is_owed_by_its_topic_id_until_it_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever begins it: the worker that looked, or one for which the name is another topic's by then. What
    has come since is owed by no id."""

    async def story() -> None:
        stage = Stage(monkeypatch, "latest")
        stage.topics = {"flights": SeenTopic(2, OLD)}
        await stage.assigned(part(0))
        stage.topics = {"flights": SeenTopic(3, NEW), "new": SeenTopic(1, NEW)}
        await stage.assigned(part(1), part(2), part(0, "new"))
        assert stage.owed == {
            part(0): OLD,
            part(1): OLD,
            part(2): NO_TOPIC_ID,
            part(0, "new"): NO_TOPIC_ID,
        }

    asyncio.run(story())


def test_who_sees_a_source_late_begins_as_the_worker_that_saw_it_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which wrote its first look after the late one had read what was begun."""

    async def story() -> None:
        stage, late = Stage(monkeypatch, "latest"), Stage(monkeypatch, "latest")
        late.is_seen.clear()
        late.starts, late.positions = stage.starts, stage.positions
        waiting = asyncio.create_task(late.assigned(part(1), part(2)))
        await until(lambda: "assigned" in late.done)
        assert await stage.assigned(part(0)) == {part(0): "latest"}
        late.topics, late.now_ms = {"flights": SeenTopic(3)}, START_MS + 3_600_000
        late.is_seen.set()
        assert await waiting == {part(1): START_MS, part(2): "earliest"}

    asyncio.run(story())


def test_partition_of_a_source_that_was_never_seen_says_so_until_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits without end waits in no silence, and for no longer than the source is the mirror's."""

    async def story() -> None:
        stage = Stage(monkeypatch, "latest")
        worker: Any = stage.worker()
        begins: list[asyncio.Task[None]] = []
        worker._spawn = lambda work: begins.append(asyncio.create_task(work))
        worker._begin([part(0)], Positions(), Begun(), {"ewr"})
        await until(lambda: worker.status.troubles() != [])
        (trouble,) = worker.status.troubles()
        assert trouble.reason == "it cannot begin: its source was never reached"
        await worker.remove_source("ewr")
        await until(lambda: all(each.done() for each in begins))
        assert not stage.starts
        await worker.target.close()

    asyncio.run(story())


def test_what_comes_to_a_source_that_was_seen_empty_begins_with_its_first_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has appeared since the first look; `latest` would skip what it holds when it is found."""

    async def story() -> None:
        stage = Stage(monkeypatch, "latest")
        stage.topics = {}
        await stage.looked_as_leader()
        assert stage.done == ["marks read", "marks written"], "read and written once, not at every look"
        stage.topics = {"flights": SeenTopic(2, OLD)}
        assert await stage.assigned(part(0)) == {part(0): "earliest"}
        assert stage.owed == {part(0): NO_TOPIC_ID}, "whichever it was before, the mirror never saw it"

    asyncio.run(story())


@pytest.mark.parametrize("start", ["earliest", 5_000])
def test_second_wave_begins_by_a_start_that_is_the_same_at_any_time(start: str | int) -> None:
    begun = Begun(first_looks={"ewr": FirstLook(START_MS, {"flights": SeenTopic(2, OLD)})})
    assert begun.start(part(1), start, is_first=False) == Start(start, OLD)


def test_marks_are_read_before_positions_and_written_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a partition that begins meanwhile would be taken for a lost one."""

    async def story() -> None:
        stage = Stage(monkeypatch, "latest")
        await stage.assigned(part(0))
        assert stage.done == [
            "marks read",
            "positions read",
            "assigned",
            "marks read",  # another worker may have seen the source meanwhile
            "marks written",  # the first look
            "position written",
            "marks written",
        ]

    asyncio.run(story())


def test_format_is_the_documented_one_and_reads_as_written() -> None:
    look = FirstLook(9, {"flights": SeenTopic(3, OLD), "of a source without ids": SeenTopic(1)})
    rows = [*encode_first_look("ewr", look), *encode_marks([part(0)])]
    assert rows == [
        (
            b'{"source":"ewr","topic":"flights"}',
            b'{"version":1,"partitions":3,"topic_id":"00000000-0000-0000-0000-000000000007"}',
        ),
        (b'{"source":"ewr","topic":"of a source without ids"}', b'{"version":1,"partitions":1}'),
        (b'{"source":"ewr"}', b'{"version":1,"at_ms":9}'),
        (b'{"source":"ewr","topic":"flights","partition":0}', b'{"version":1}'),
    ]
    begun = Begun()
    for key, value in [
        *rows,
        (b"of another kind", b"{}"),
        (None, None),
        (b'{"source":"x"}', b"{}"),
        (b'{"source":"x"}', b'{"at_ms":1e999}'),
        (b'{"source":"ewr","topic":"flights"}', b'{"partitions":4,"topic_id":"7"}'),
        (b'{"source":"ewr","topic":"flights"}', b'{"partitions":4,"topic_id":7}'),
    ]:
        begun.apply(key, value)
    assert (begun.partitions, begun.first_looks) == ({part(0)}, {"ewr": look})


def test_marks_that_come_together_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        stage = Stage(monkeypatch, "latest")
        many = [part(number) for number in range(500)]
        stage.topics = {"flights": SeenTopic(500)}
        await stage.assigned(*many)
        assert {key for key, _ in stage.starts} >= {key for key, _ in encode_marks(many)}
        assert stage.done.count("marks written") < 10

    asyncio.run(story())
