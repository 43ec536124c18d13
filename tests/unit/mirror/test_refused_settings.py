"""A setting that the target refuses is left out or said, and holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import InvalidConfig, KafkaError, PolicyViolation
from millrace.mirror.config import parse_config
from millrace.mirror.topics import topics as topics_module
from millrace.mirror.topics.topics import TargetTopics

CONFIG = parse_config(
    {
        "name": "aggregate",
        "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
        "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
    }
)
REFUSED, TAKEN = {"segment.bytes": "9"}, {"retention.ms": "1", "cleanup.policy": "compact"}


def with_target_topics(act: Callable[[TargetTopics], Awaitable[None]]) -> None:
    async def story() -> None:
        async with Cluster("agg", ["127.0.0.1:1"]) as target:
            await act(TargetTopics(CONFIG, target, lambda: 0, lambda: 0))

    asyncio.run(story())


@pytest.mark.parametrize("kind", [InvalidConfig, PolicyViolation])
def test_other_settings_are_written_beside_one_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: type[KafkaError]
) -> None:
    written: dict[str, str | None] = {}

    async def alter(_cluster: object, _name: str, changes: Mapping[str, str | None]) -> None:
        if "segment.bytes" in changes:
            raise kind("not here")
        written.update(changes)

    monkeypatch.setattr(topics_module, "alter_configs", alter)
    with_target_topics(lambda topics: topics._alter("flights", {**REFUSED, **TAKEN}))
    assert written == TAKEN


@pytest.mark.parametrize("cured_by", [REFUSED, {}], ids=["taken", "equal"])
def test_a_refusal_is_told_once_and_again_after_a_time_without(
    monkeypatch: pytest.MonkeyPatch, cured_by: dict[str, str | None]
) -> None:
    refusing = True

    async def alter(*_: object) -> None:
        if refusing:
            raise InvalidConfig("not here")

    async def act(topics: TargetTopics) -> None:
        nonlocal refusing
        for changes, refuses in [(REFUSED, True), (REFUSED, True), (cured_by, False), (REFUSED, True)]:
            refusing = refuses
            await topics._alter("flights", dict(changes))

    monkeypatch.setattr(topics_module, "alter_configs", alter)
    with capture_logs() as lines:
        with_target_topics(act)
    told = [each["event"] for each in lines if each["log_level"] == "warning"]
    assert told == ["the target does not take segment.bytes=9"] * 2


@pytest.mark.safety
def test_no_topic_is_made_without_the_policy_by_which_its_records_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, str]] = []

    async def create(*words: Any, validate_only: bool = False) -> None:
        if "cleanup.policy" in words[-1]:
            raise PolicyViolation("topics expire here")
        if not validate_only:
            made.append(words[-1])

    async def act(topics: TargetTopics) -> None:
        with pytest.raises(PolicyViolation, match="topics expire here"):
            await topics._create(source, wanted, TAKEN)

    monkeypatch.setattr(topics_module, "create_topic", create)
    source: Any = SimpleNamespace(name="ewr")
    wanted: Any = SimpleNamespace(target="flights", width=6, topic=SimpleNamespace(name="flights"))
    with_target_topics(act)
    assert made == []


@pytest.mark.parametrize("kind", [InvalidConfig, PolicyViolation])
def test_topic_is_made_without_a_setting_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: type[KafkaError]
) -> None:
    """Each setting is tried at the topic's width: a policy may be about that too."""
    made: list[dict[str, str]] = []

    async def create(
        _cluster: object,
        _name: str,
        width: int,
        _factor: int,
        configs: dict[str, str],
        validate_only: bool = False,
    ) -> None:
        if "segment.bytes" in configs or width != 6:
            raise kind("not here")
        if not validate_only:
            made.append(configs)

    monkeypatch.setattr(topics_module, "create_topic", create)
    source: Any = SimpleNamespace(name="ewr")
    wanted: Any = SimpleNamespace(target="flights", width=6, topic=SimpleNamespace(name="flights"))
    with_target_topics(lambda topics: topics._create(source, wanted, {**REFUSED, **TAKEN}))
    assert made == [TAKEN]
