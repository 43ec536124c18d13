"""A broken rule in one of the mirror's tasks ends the worker: in silence, its partitions would rest."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.broker.protocol.mirror_positions import Position
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.config import FetchConfig
from millrace.mirror.delivery import sink as sink_module
from millrace.mirror.delivery.beginnings import Start
from millrace.mirror.delivery.outgoing import Outgoing
from millrace.mirror.delivery.progress import BrokenCommitRule, Span
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.pipeline import State
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources.doubt import Doubt
from millrace.mirror.sources.fetch_memory import FetchBudget
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.sources.source_logs import SourceLogs
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.waiting import patience

TOPIC_ID = UUID(int=7)


class _View:
    def __init__(self) -> None:
        self.cluster_id = "c"
        topic = SimpleNamespace(name="t", internal=False, topic_id=TOPIC_ID, partitions={0: None})
        self.topics = {"t": topic}

    def leader(self, *_: object) -> int:
        return 1


class _Cluster:
    async def metadata(self, *_: object, **__: object) -> Any:
        return _View()

    async def api_version(self, *_: object) -> int:
        return 17


class _BrokenOwner:
    def delivered(self, *_: object) -> None:
        raise BrokenCommitRule("on purpose")

    def refused(self, *_: object) -> list[Outgoing]:
        return []


async def _ends_with(work: Any, expected: type[BaseException]) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        await asyncio.wait_for(work, patience())
    assert caught.value.subgroup(expected) is not None


def test_broken_rule_while_an_answer_is_handled_ends_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    async def identity(*_: object) -> tuple[int, int]:
        return 1, 0

    async def produce(_cluster: object, _node: int, batches: dict[Any, Any], **_: object) -> Any:
        return dict.fromkeys(batches, ProduceOutcome(0, 0))

    monkeypatch.setattr(sink_module, "init_producer_id", identity)
    monkeypatch.setattr(sink_module, "produce", produce)

    async def scenario() -> None:
        cluster: Any = _Cluster()
        sink = Sink(cluster, lambda: 0)
        batch = memoryview(build_batch([Record(b"k", b"v", (), 1)]))
        outgoing = Outgoing(batch, [0], Span(0, 1, 1, len(batch), -1), _BrokenOwner(), 0, "seen")
        sink.enqueue(TargetPartition("t", 0), outgoing)
        await _ends_with(sink.run(), BrokenCommitRule)

    asyncio.run(scenario())


def _reader(**more: Any) -> SourceReader:
    async def nothing(*_: object) -> None:
        return None

    topics = SimpleNamespace(include=["t"], exclude=[])
    config: Any = SimpleNamespace(cluster="ewr", topics=topics, connections=1)
    arguments: dict[str, Any] = {"on_view": nothing, "record_start": nothing, **more}
    cluster: Any = _Cluster()
    return SourceReader(
        config,
        cluster,
        FetchConfig(),
        FetchBudget(1 << 20),
        10,
        lambda: 0,
        arguments["on_view"],
        arguments["record_start"],
    )


def _pipeline(**more: Any) -> Any:
    progress = SimpleNamespace(outstanding_size=0, fetch_offset=0, fetched_leader_epoch=-1)
    pipeline = SimpleNamespace(
        partition=SourcePartition("ewr", "t", 0), state=State.RUNNING, progress=progress, retry_at_ms=0
    )
    pipeline.origin = source_module.Origin("c", TOPIC_ID)
    pipeline.wants_fetch = lambda *_: True
    pipeline.doubt = Doubt(0)
    pipeline.bytes_behind = 0
    for name, value in more.items():
        setattr(pipeline, name, value)
    return pipeline


def test_broken_rule_in_a_fetch_loop_ends_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(*_: object, **__: object) -> Any:
        return [FetchedPartition("t", 0, 0, 0, 0, 0, (), None, memoryview(b""))]

    def broken(*_: object) -> None:
        raise BrokenCommitRule("on purpose")

    monkeypatch.setattr(source_module, "fetch", fetch)

    async def scenario() -> None:
        reader = _reader()
        reader.add(_pipeline(accept=broken))
        await _ends_with(reader.run(), BrokenCommitRule)

    asyncio.run(scenario())


def test_assignment_that_ended_meanwhile_writes_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """`latest`, looked up late, may lie beyond what the new owner has delivered: as the newest record it
    would make the next owner skip what lies between."""
    written: list[Position] = []
    pipeline = _pipeline(state=State.STARTING, ready=lambda *_: None)

    async def record_start(_partition: object, position: Position) -> None:
        written.append(position)

    async def slow_look(_self: object, _partition: object) -> Any:
        pipeline.state = State.CLOSED  # the seat in the group is lost while the source is being asked
        return source_module.Origin("c", TOPIC_ID), 0, 500

    monkeypatch.setattr(SourceLogs, "_log_of", slow_look)
    reader = _reader(record_start=record_start)
    asyncio.run(reader.begin(pipeline, None, is_lost=False, start=Start("latest")))
    assert not written
