"""A source cluster of one partition, the reader that fetches from it, and the answers that it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from millrace.broker.client.fetch_session import Answer, LogEnds
from millrace.broker.client.offsets import EARLIEST, EARLIEST_LOCAL, LATEST
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition
from millrace.broker.errors import RequestTimedOut, UnsupportedVersion
from millrace.mirror.config import FetchConfig
from millrace.mirror.gaps.open_gaps import Origin
from millrace.mirror.pipeline import PartitionPipeline, State
from millrace.mirror.sources.doubt import Doubt
from millrace.mirror.sources.epochs import EpochHistory
from millrace.mirror.sources.fetch_memory import FetchBudget
from millrace.mirror.sources.lag import LagSamples
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.sources.source_logs import SourceLogs
from millrace.mirror.sources.survey import Surveyor
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

OLD, NEW = UUID(int=7), UUID(int=8)


class Source:
    """A source cluster: one partition, its bounds, and the topic's id now."""

    def __init__(self, topic_id: UUID = OLD, earliest: int = 0, latest: int = 100) -> None:
        self.topic_id, self.earliest, self.latest = topic_id, earliest, latest
        self.local_start = 0  # -1: it is too old to tell
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
        if self.local_start < 0 and EARLIEST_LOCAL in wanted.values():
            raise UnsupportedVersion("ListOffsets 8")
        local_start = max(self.earliest, self.local_start)
        bounds = {EARLIEST: self.earliest, EARLIEST_LOCAL: local_start, LATEST: self.latest}
        return {key: SimpleNamespace(offset=bounds.get(at, self.latest)) for key, at in wanted.items()}

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
        target=TargetPartition("t", 0),
        state=State.RUNNING,
        progress=progress,
        retry_at_ms=0,
        lag=LagSamples(),
        origin=Origin("c", topic_id),
        doubt=Doubt(offset),
        take_question=lambda: None,
        bytes_behind=0,
        gaps=[],
        accepted=[],
    )
    made.at_gap = lambda gap_class, to, reason, **rest: made.gaps.append((gap_class.value, to, rest))
    made.accept = lambda answer, _frame=None: made.accepted.append(answer)
    made.adopt = lambda origin: setattr(made, "origin", origin)
    made.stands = lambda *_: False
    made.gets_on = made.may_get_on = lambda *_: True
    made.wants_fetch = lambda *_: True
    made.wants_the_same = lambda *_: False
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


def surveyor_of(source: Source) -> Surveyor:
    cluster: Any = source
    return Surveyor(cluster, lambda _size: None)


async def look(surveyor: Surveyor, pipeline: PartitionPipeline) -> bool:
    """Answers what the pipeline wants to know; whether there was anything."""
    question = pipeline.take_question()
    if question is None:
        return False
    pipeline.looked(question, await surveyor.look(pipeline.partition, OLD, question))
    return True


def heard(answer: FetchedPartition) -> Answer:
    """The same, as a session hears it."""
    ends = LogEnds(answer.high_watermark, answer.last_stable_offset)
    return Answer((answer.topic, answer.partition), ends, len(answer.records) > 0)


def answered(code: int = 0, diverging: tuple[int, int] | None = None) -> FetchedPartition:
    return FetchedPartition("t", 0, code, 100, 100, 0, (), diverging, memoryview(b""))


async def taken(reader: SourceReader, pipeline: Any, answer: FetchedPartition, **asked: Any) -> None:
    position = FetchPosition(
        **{"offset": pipeline.progress.fetch_offset, "topic_id": pipeline.origin.topic_id, **asked}
    )
    async with asyncio.TaskGroup() as reader._tasks:
        reader._take(pipeline, position, answer)


def with_records(data: bytes) -> FetchedPartition:
    return FetchedPartition("t", 0, 0, 100, 100, 0, (), None, memoryview(data))
