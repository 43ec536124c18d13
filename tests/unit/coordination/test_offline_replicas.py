"""What a broker tells the cluster of replicas that it cannot open, and what it says where it cannot tell."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from millrace.broker.coordination import paths
from millrace.broker.coordination.offline_replicas import TELL_AFTER_FAILURES, OfflineReporter, fitting
from millrace.broker.coordination.session import LARGEST_REQUEST, NodeMissing, SessionError, SessionState
from millrace.broker.coordination.transactions import MOST_BYTES


class OneZnode:
    """A session's view of `/brokers/offline/1`."""

    id = 7
    state = SessionState.CONNECTED

    def __init__(self) -> None:
        self.data: bytes | None = None
        self.failure: SessionError | None = None
        self.tries = 0

    async def get(self, path: str) -> SimpleNamespace:
        self.tries += 1
        if self.failure is not None:
            raise self.failure
        if self.data is None:
            raise NodeMissing(path)
        return SimpleNamespace(owner=self.id)

    async def create(self, path: str, data: bytes, *, ephemeral: bool) -> None:
        assert path == "/brokers/offline/1" and ephemeral
        await self.set(path, data)

    async def set(self, _path: str, data: bytes) -> None:
        assert len(data) < LARGEST_REQUEST
        self.data = data

    def told(self) -> set[str]:
        return {topic for topic, _ in paths.decode_offline(self.data)}


@pytest.fixture
def znode() -> OneZnode:
    return OneZnode()


def reported(znode: OneZnode, *reports: dict[str, list[int]]) -> list[dict]:
    """The lines of warnings while these are reported one after the other."""

    async def report() -> None:
        reporter = OfflineReporter(znode, 1)
        for offline in reports:
            await reporter.report(offline)

    with capture_logs() as lines:
        asyncio.run(report())
    return [line for line in lines if line["log_level"] == "warning"]


def test_of_more_than_a_znode_takes_a_part_is_told_and_the_rest_is_named_once(znode):
    many = {f"{number:04}-{'t' * 240}": [number] for number in range(5_000)}
    more = {**many, "another": [0]}
    (first, second) = reported(znode, many, many, more, more)
    assert (first["topics"], second["topics"]) == (5_000, 5_001), "once for each change"
    assert 3_000 < first["told"] == len(znode.told()) < 5_000
    assert "znode" in first and "mend" in first["event"]


def test_what_fits_is_told_whole(znode):
    few = {"t": [3, 0], "u": [1], "none": []}
    assert reported(znode, few) == []
    assert paths.decode_offline(znode.data) == {("t", 0), ("t", 3), ("u", 1)}


def test_as_many_topics_are_told_as_fit():
    offline = {"all": list(range(1_000)), "b": [1], "c": [2]}
    room = len(paths.encode_offline({"b": [1]})) + len(paths.encode_offline({"c": [2]}))
    assert fitting(offline, room) == {"b": [1], "c": [2]}, "a topic that does not fit holds up no other"
    assert fitting(offline, room - 1) == {"b": [1]}
    assert fitting(offline) is offline
    assert len(paths.encode_offline(fitting(offline, room))) <= room < MOST_BYTES


def test_a_report_that_fails_again_and_again_is_told_once_for_each_change(znode):
    znode.failure = SessionError("the connection was lost")
    one, other = {"t": [0]}, {"t": [0, 1]}
    assert reported(znode, *[one] * (TELL_AFTER_FAILURES - 1)) == [], "a connection comes and goes"
    lines = reported(znode, *[one] * 9, *[other] * 9)
    assert [line["error"] for line in lines] == ["the connection was lost"] * 2
    assert znode.tries == TELL_AFTER_FAILURES - 1 + 18, "and tried all the same"
    znode.failure = None
    assert reported(znode, one) == [] and znode.told() == {"t"}
