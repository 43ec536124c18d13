"""Which groups are kept in step, and which of their offsets are committed on the target."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.client.groups import GroupList, ListedGroup
from millrace.broker.errors import ClusterUnreachable, ConfigError, RequestTimedOut
from millrace.mirror.config import GroupSyncConfig, parse_config
from millrace.mirror.offsets import group_sync
from millrace.mirror.offsets.group_sync import (
    COMMIT_AGAIN_AFTER_MS,
    COMMIT_WITHIN_S,
    GroupPatterns,
    GroupSync,
    _Source,
    to_commit,
)
from millrace.mirror.offsets.translate import Outcome, Row
from millrace.mirror.reload import plan_reload
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.waiting import patience

NOW_MS = 10**12
KEY = ("agg.flights", 3)


def row(offset: int | None, outcome: Outcome = Outcome.EXACT) -> Row:
    where = SourcePartition("ewr", "flights", 3)
    return Row(where, TargetPartition(*KEY), CommittedOffset(5, 7, "note"), outcome, offset)


def test_forwards_only() -> None:
    wanted = {KEY: CommittedOffset(10, -1, "note")}
    assert to_commit([row(10)], {}, {}, NOW_MS) == wanted
    assert to_commit([row(10)], {KEY: CommittedOffset(9)}, {}, NOW_MS) == wanted
    assert to_commit([row(10)], {KEY: CommittedOffset(10)}, {}, NOW_MS) == {}
    assert to_commit([row(10)], {KEY: CommittedOffset(11)}, {}, NOW_MS) == {}


@pytest.mark.parametrize("outcome", [each for each in Outcome if each is not Outcome.EXACT])
def test_only_what_is_exact(outcome: Outcome) -> None:
    assert to_commit([row(10, outcome)], {}, {}, NOW_MS) == {}
    assert to_commit([row(None)], {}, {}, NOW_MS) == {}


def test_what_the_target_might_forget_is_committed_again() -> None:
    there = {KEY: CommittedOffset(10)}
    assert to_commit([row(10)], there, {KEY: NOW_MS - COMMIT_AGAIN_AFTER_MS + 1}, NOW_MS) == {}
    assert to_commit([row(10)], there, {KEY: NOW_MS - COMMIT_AGAIN_AFTER_MS}, NOW_MS)
    assert to_commit([row(10)], {KEY: CommittedOffset(11)}, {KEY: 0}, NOW_MS) == {}


def test_patterns_are_about_whole_names_of_consumer_groups() -> None:
    patterns = GroupPatterns(GroupSyncConfig(include=("billing", "orders-.*"), exclude=(".*-test",)))
    assert patterns.selects("billing", "consumer")
    assert patterns.selects("billing", "")  # has no members, was never more than offsets
    assert patterns.selects("orders-7", "consumer")
    assert not patterns.selects("billing-2", "consumer")
    assert not patterns.selects("orders-test", "consumer")
    assert not patterns.selects("billing", "millrace-mirror")
    assert not patterns.selects("billing", "connect")


def settings(**groups: object) -> dict[str, object]:
    source = {"cluster": "ewr", "bootstrap": ["a:1"], "topics": {"include": [".*"]}}
    return {
        "name": "m",
        "target": {"cluster": "agg", "bootstrap": ["b:1"]},
        "sources": [source | ({"groups": groups} if groups else {})],
    }


def test_the_section_is_checked() -> None:
    config = parse_config(settings(include=["a.*"]))
    assert config.sources[0].groups == GroupSyncConfig(include=("a.*",), interval_ms=10_000)
    mistakes: list[dict[str, object]] = [
        {"include": ["("]},
        {"include": []},
        {"exclude": ["a"]},
        {"include": ["a"], "interval_ms": 1},
    ]
    for wrong in mistakes:
        with pytest.raises(ConfigError, match=r"sources\[0\]\.groups"):
            parse_config(settings(**wrong))


def test_it_may_change_while_the_mirror_runs() -> None:
    without, one, two = (
        parse_config(each)
        for each in (settings(), settings(include=["a"]), settings(include=["b"], interval_ms=500))
    )
    for before, after in ((without, one), (one, two), (two, without)):
        plan = plan_reload(before, after)
        assert plan.changed
        assert not plan.refused


def test_the_group_that_shows_the_mirrors_progress_is_not_moved() -> None:
    patterns = GroupPatterns(GroupSyncConfig(include=(".*",)), "progress")
    assert patterns.selects("billing", "")
    assert not patterns.selects("progress", "")


# --- late commits -----------------------------------------------------------------------------------------


class Late:
    """A target where a worker stands still at a point of its choice; a group at 10 that is to go to 20."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, stands_still: Callable[[str], Awaitable[None]]
    ) -> None:
        self.now_s = 100.0
        self.is_leader = True
        self.committed: list[object] = []
        self.there = 10

        async def fetch_offsets(*_: object, **__: object) -> dict[Any, CommittedOffset]:
            await stands_still("read")
            return {KEY: CommittedOffset(self.there)}

        async def describe_group(*_: object) -> Any:
            await stands_still("described")
            return SimpleNamespace(members=())

        async def commit_offsets(_cluster: object, _name: str, wanted: object) -> None:
            await stands_still("commit")
            self.committed.append(wanted)

        for name, fake in (
            ("fetch_offsets", fetch_offsets),
            ("describe_group", describe_group),
            ("commit_offsets", commit_offsets),
        ):
            monkeypatch.setattr(group_sync, name, fake)

        async def rows(_commits: object) -> list[Row]:
            return [row(20)]

        async def refresh() -> None:
            self.refreshed += 1
            if self.trouble is not None:
                raise self.trouble

        self.refreshed = 0
        self.trouble: Exception | None = None
        cluster: Any = SimpleNamespace(name="ewr")
        config = parse_config(settings(include=[".*"]))
        self.sync = GroupSync(
            cluster, lambda: NOW_MS, lambda: self.is_leader, lambda: (config, {}), lambda: self.now_s
        )
        translator: Any = SimpleNamespace(rows=rows, refresh=refresh)
        self.sync._translator = translator
        self.source = _Source("ewr", cluster, GroupPatterns(GroupSyncConfig(include=(".*",))), 1)

    async def round(self) -> None:
        await self.sync._sync_group(self.source, "billing", {KEY: CommittedOffset(5)})


@pytest.mark.parametrize("at", ["read", "described"])
@pytest.mark.parametrize("how", ["stands still", "leads no longer"])
def test_worker_that_was_away_since_it_looked_commits_nothing(
    monkeypatch: pytest.MonkeyPatch, at: str, how: str
) -> None:
    """Who leads by now, or the group itself, may have gone on."""

    async def stands_still(point: str) -> None:
        if point == at and how == "stands still":
            late.now_s += COMMIT_WITHIN_S
        elif point == at:
            late.is_leader = False

    late = Late(monkeypatch, stands_still)
    with nullcontext() if how == "leads no longer" else pytest.raises(RequestTimedOut, match="s old"):
        asyncio.run(late.round())
    assert late.committed == []
    late.is_leader = True
    at = "never"
    asyncio.run(late.round())
    assert late.committed == [{KEY: CommittedOffset(20, -1, "note")}]


def test_commit_that_is_not_answered_is_given_up_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stands_still(point: str) -> None:
        if point == "commit":
            await asyncio.Event().wait()

    late = Late(monkeypatch, stands_still)
    monkeypatch.setattr(group_sync, "COMMIT_WITHIN_S", 0.01)
    with pytest.raises(RequestTimedOut, match="s old"):
        asyncio.run(asyncio.wait_for(late.round(), patience()))
    assert (late.committed, late.source.groups) == ([], {}), "nothing is said of what nobody knows"


@pytest.mark.parametrize(
    ("there", "state"), [(19, "synced"), (20, "synced"), (21, "ahead_on_target"), (9000, "ahead_on_target")]
)
def test_group_that_stands_further_on_at_the_target_is_not_called_synced(
    monkeypatch: pytest.MonkeyPatch, there: int, state: str
) -> None:
    async def goes_on(_point: str) -> None:
        return

    late = Late(monkeypatch, goes_on)
    late.there = there
    asyncio.run(late.round())
    shown = late.source.groups["billing"]
    assert shown.state.value == state
    assert (f"stands at {there}" in shown.reason) == (state == "ahead_on_target")


# --- groups of which nobody can tell ----------------------------------------------------------------------


def test_group_whose_broker_or_source_does_not_answer_is_failing_and_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_pause(_: str) -> None: ...

    listed: GroupList | Exception
    payments, orders = (
        ListedGroup(name, "consumer", "Stable", "classic", 1) for name in ("payments", "orders")
    )

    async def list_groups(_: object) -> GroupList:
        if isinstance(listed, Exception):
            raise listed
        return listed

    late = Late(monkeypatch, no_pause)
    late.sync._translator.selects = lambda *_: True  # type: ignore[union-attr, method-assign]
    late.sync._sources = [late.source]
    monkeypatch.setattr(group_sync, "list_groups", list_groups)

    def told(answer: GroupList | Exception) -> tuple[dict[str, tuple[str, str]], list[str]]:
        nonlocal listed
        listed = answer
        with capture_logs() as lines:
            asyncio.run(late.sync._sync_source(late.source))
        states = {each["group"]: (each["state"], each.get("reason", "")) for each in late.sync.status()}
        return states, [line["event"] for line in lines]

    well = ("synced", "")
    assert told(GroupList((payments, orders))) == ({"orders": well, "payments": well}, [])
    away = GroupList((payments,), {1: "broker 1 is away"})
    failing = ("failing", "broker 1 is away")
    news = ["not all groups can be listed", "a group cannot be synced"]
    assert told(away) == ({"orders": failing, "payments": well}, news)
    assert told(away) == ({"orders": failing, "payments": well}, [])
    assert told(GroupList((payments, orders)))[0] == {"orders": well, "payments": well}
    states, _ = told(ClusterUnreachable("ewr", "no server answers"))
    assert set(states.values()) == {("failing", "cluster ewr: no server answers")}
    assert told(GroupList((payments,)))[0] == {"payments": well}, "of the other it is known that it is gone"
    # What the mirror has written is read once, for all of them; where it cannot be, all of them are failing.
    before = late.refreshed
    late.trouble = RequestTimedOut("a transaction stays open")
    states, news = told(GroupList((payments, orders)))
    assert states == dict.fromkeys(("orders", "payments"), ("failing", "a transaction stays open"))
    assert news == ["groups cannot be read", *["a group cannot be synced"] * 2]
    late.trouble = None
    assert told(GroupList((payments, orders)))[0] == {"orders": well, "payments": well}
    assert late.refreshed == before + 2
