"""What is tried without end says why it fails: also when that becomes another reason than the first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.broker.errors import (
    ClusterUnreachable,
    NotLeaderOrFollower,
    TopicAuthorizationFailed,
)
from millrace.mirror.control import wish_reader
from millrace.mirror.delivery import sink, system_records
from millrace.mirror.delivery.beginnings import Start
from millrace.mirror.delivery.system_records import NewFailures, SystemRecords
from millrace.mirror.pipeline import State
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources import source_logs
from tests.unit.mirror.source_stage import Source, answered, logs_of, pipeline_at, reader_of, taken
from tests.waiting import patience

AWAY = ClusterUnreachable("agg", "no server answers")
REFUSED = TopicAuthorizationFailed("cluster agg: not authorized")


class Cluster:
    """Away at first, then it refuses, for ever; `until` is set after some refusals."""

    def __init__(self) -> None:
        self.asked_count = 0
        self.many = asyncio.Event()

    async def metadata(self, *_: object, **__: object) -> Any:
        self.asked_count += 1
        if self.asked_count == 6:
            self.many.set()
        raise AWAY if self.asked_count < 3 else REFUSED

    def invalidate(self) -> None: ...

    def close_purpose(self, *_: object) -> None: ...


def write(cluster: Any) -> Any:
    return SystemRecords(cluster, lambda: 0, 1).write("millrace.audit", [(b"k", b"v")], configs={})


def begin(cluster: Any) -> Any:
    pipeline = pipeline_at(0, state=State.STARTING)
    return logs_of(cluster).begin(pipeline, None, is_lost=False, start=Start("latest"))


def follow(cluster: Any) -> Any:
    unused: Any = None
    return wish_reader.WishReader(cluster, "t", 1, unused, unused, unused).run()


def number(cluster: Any) -> Any:
    return sink.Sink(cluster, lambda: 0).run()


@pytest.mark.parametrize("work", [write, begin, follow, number])
def test_reason_that_persists_is_told_though_another_came_first(
    work: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(_seconds: float) -> None:
        await no_sleep(0)

    async def init_producer_id(cluster: Cluster) -> Any:
        return await cluster.metadata()

    no_sleep = asyncio.sleep
    clock: Any = SimpleNamespace(**{**vars(asyncio), "sleep": at_once})
    for module in (system_records, source_logs, wish_reader, sink):
        monkeypatch.setattr(module, "asyncio", clock)
    monkeypatch.setattr(sink, "init_producer_id", init_producer_id)

    async def story() -> None:
        cluster = Cluster()
        working = asyncio.create_task(work(cluster))
        async with asyncio.timeout(patience()):
            await cluster.many.wait()
        working.cancel()
        await asyncio.wait([working])

    with capture_logs() as lines:
        asyncio.run(story())
    assert [line["error"] for line in lines] == [str(AWAY), str(REFUSED)]


def test_failure_after_a_success_is_news_again() -> None:
    failures = NewFailures()
    assert [failures.is_news(AWAY), failures.is_news(AWAY)] == [True, False]
    failures.over()
    assert failures.is_news(AWAY)


@pytest.mark.parametrize(
    ("code", "at_count"), [(TopicAuthorizationFailed.code, 1), (NotLeaderOrFollower.code, 40)]
)
def test_partition_whose_fetches_are_refused_is_told_of_once(code: int, at_count: int) -> None:
    reader, pipeline = reader_of(Source()), pipeline_at(40)

    def told_after(count: int) -> list[str]:
        with capture_logs() as lines:
            for _ in range(count):
                asyncio.run(taken(reader, pipeline, answered(code)))
        return [line["event"] for line in lines if line["log_level"] == "warning"]

    assert source_module.MANY_REFUSALS == 40
    assert told_after(at_count - 1) == []
    assert len(told_after(1)) == 1
    assert told_after(38) == []
    asyncio.run(taken(reader, pipeline, answered()))
    assert len(told_after(at_count)) == 1


def test_nothing_is_kept_of_a_partition_that_has_left() -> None:
    reader, pipeline = reader_of(Source()), pipeline_at(40)
    reader.add(pipeline)
    asyncio.run(taken(reader, pipeline, answered(NotLeaderOrFollower.code)))
    reader.remove(pipeline)
    assert not reader._refusals
