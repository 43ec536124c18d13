"""Coordinators hear of leaderships, and loading is tried until it succeeds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from millrace.broker.errors import KafkaStorageError, RecordTooLarge, UnreadableRecord
from millrace.broker.server import internal_topics
from millrace.broker.server.internal_topics import CoordinatorLoader, InternalTopicLog
from millrace.broker.storage.log_config import LogConfig
from tests.waiting import patience, until_async


class Coordinator:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.failures: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.loader = CoordinatorLoader("topic", "things", self.load, self.unload, first_retry_seconds=0.001)

    async def load(self, partition: int) -> None:
        self.note("load", partition)
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.note("loaded", partition)

    def unload(self, partition: int) -> None:
        self.note("unload", partition)

    def note(self, what: str, partition: int) -> None:
        self.calls.append((what, partition))

    async def until(self, *calls: tuple[str, int]) -> None:
        await until_async(
            lambda: self.calls == list(calls), lambda: f"{calls} and no more; there are {self.calls}"
        )


def run(scenario) -> None:
    async def main() -> None:
        coordinator = Coordinator()
        try:
            await scenario(coordinator)
        finally:
            await coordinator.loader.close()

    asyncio.run(main())


def test_leadership_loads_and_unloads():
    async def scenario(it: Coordinator) -> None:
        it.loader.gained("other", 3)
        it.loader.lost("other", 3)
        it.loader.gained("topic", 3)
        await it.until(("load", 3), ("loaded", 3))
        it.loader.lost("topic", 3)
        assert it.calls[-1] == ("unload", 3)

    run(scenario)


@pytest.mark.parametrize(
    "failure",
    [KafkaStorageError("a bad disk"), OSError("gone"), UnreadableRecord("torn"), KeyError("a defect")],
)
def test_a_load_that_fails_is_tried_again(failure):
    async def scenario(it: Coordinator) -> None:
        it.failures = [failure, failure]
        it.loader.gained("topic", 0)
        await it.until(("load", 0), ("load", 0), ("load", 0), ("loaded", 0))

    run(scenario)


def test_why_a_load_fails_is_told_once_until_it_is_something_else():
    async def scenario(it: Coordinator) -> None:
        it.failures = [*(KeyError("a defect") for _ in range(3)), *(OSError("gone") for _ in range(2))]
        it.loader.gained("topic", 7)
        await it.until(*[("load", 7)] * 6, ("loaded", 7))

    with capture_logs() as told:
        run(scenario)
    defect, gone = told
    assert (defect["log_level"], defect["topic"], defect["partition"]) == ("error", "topic", 7)
    assert "defect" in defect["event"] and isinstance(defect["exc_info"], KeyError)
    assert "defect" not in gone["event"] and gone["error"] == "gone"


def test_a_lost_leadership_ends_the_trying():
    async def scenario(it: Coordinator) -> None:
        it.failures = [OSError("gone")] * 1_000
        it.loader.gained("topic", 0)
        await until_async(lambda: len(it.calls) > 2)
        it.loader.lost("topic", 0)
        count = len(it.calls)
        await asyncio.sleep(0.02)
        assert len(it.calls) == count

    run(scenario)


def test_a_new_epoch_loads_anew_in_place_of_the_old_one():
    async def scenario(it: Coordinator) -> None:
        it.gate.clear()
        it.loader.gained("topic", 0)
        await it.until(("load", 0))
        it.loader.gained("topic", 0)
        await it.until(("load", 0), ("load", 0))
        it.gate.set()
        await it.until(("load", 0), ("load", 0), ("loaded", 0))

    run(scenario)


def test_a_coordinator_that_waits_long_for_its_log_to_be_committed_says_so_once(monkeypatch):
    """Too few replicas in sync is an expected state that may last for ever."""
    partition = SimpleNamespace(
        replica=SimpleNamespace(high_watermark=4, isr=(1,), effective_min_insync=2, has_enough_in_sync=False)
    )
    replicas = SimpleNamespace(leader_of=lambda _topic, _partition: partition)
    monkeypatch.setattr(internal_topics, "COMMITTED_POLL_SECONDS", 0.001)
    monkeypatch.setattr(internal_topics, "TELL_AFTER_SECONDS", 0.02)
    topic = InternalTopicLog("topic", replicas, None, 1)

    async def scenario() -> None:
        waiting = asyncio.ensure_future(topic.until_committed(3, 5))
        await until_async(lambda: told)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        partition.replica.high_watermark = 5
        async with asyncio.timeout(patience()):
            await waiting

    with capture_logs() as told:
        asyncio.run(scenario())
    (line,) = told
    assert (line["log_level"], line["topic"], line["partition"]) == ("warning", "topic", 3)
    assert (line["in_sync"], line["needed"]) == ([1], 2)


def test_a_coordinators_write_for_a_client_is_no_larger_than_a_clients_own():
    partition = SimpleNamespace(log=SimpleNamespace(config=LogConfig(max_message_bytes=100)))
    sizes = []

    def append_now(_topic, _partition, batch, *_):
        sizes.append(len(batch))
        return SimpleNamespace(base_offset=0), None

    replicas = SimpleNamespace(leader_of=lambda _topic, _partition: partition, append_now=append_now)
    topic = InternalTopicLog("topic", replicas, None, 1)
    with pytest.raises(RecordTooLarge):
        topic.append_now(0, bytes(101), is_limited=True)
    topic.append_now(0, bytes(100), is_limited=True)
    topic.append_now(0, bytes(101))
    assert sizes == [100, 101]
