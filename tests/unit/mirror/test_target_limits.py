"""What a target takes is what it says, and nothing is given up by a guess of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.broker.client.admin import ConfigValue
from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import RecordTooLarge, RequestTimedOut, TopicAuthorizationFailed
from millrace.mirror.checks.findings import Selected, settings
from millrace.mirror.config import parse_config
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.topics import topics as topics_module
from millrace.mirror.topics.topics import TargetTopics
from tests.unit.mirror.pipeline_stage import answer, batch, started

CONFIG = parse_config(
    {
        "name": "aggregate",
        "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
        "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
    }
)
LARGE = 1_500_000


def limit_of(monkeypatch: pytest.MonkeyPatch, told: Any) -> tuple[int, int]:
    """The limit before the target was asked, and behind its answer."""

    async def describe(_cluster: object, names: list[str], *_: object) -> Any:
        return dict.fromkeys(names, told)

    async def story() -> tuple[int, int]:
        async with Cluster("agg", ["127.0.0.1:1"]) as target:
            topics = TargetTopics(CONFIG, target, lambda: 0, lambda: 0)
            topics._partition_counts["flights"] = 1
            before = topics.max_batch_size("flights")
            await topics.refresh_limits("flights")
            return before, topics.max_batch_size("flights")

    monkeypatch.setattr(topics_module, "describe_topics_configs", describe)
    return asyncio.run(story())


def test_limit_that_is_not_known_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not asked yet, or not allowed to ask: Kafka's default may not be the target's."""
    before, after = limit_of(monkeypatch, TopicAuthorizationFailed("no"))
    assert min(before, after) > LARGE
    before, after = limit_of(monkeypatch, {"max.message.bytes": ConfigValue("2000000", False)})
    assert (before > LARGE, after) == (True, 2_000_000)


@pytest.mark.parametrize("told", [TopicAuthorizationFailed("no"), {}])
def test_limit_that_was_told_once_is_none_when_it_is_told_no_more(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been raised since, and a record between the two is one that the target takes."""
    answers = [{"max.message.bytes": ConfigValue("1000000", False)}, told]

    async def describe(*_: object) -> Any:
        return {"flights": answers.pop(0)}

    async def story() -> list[int]:
        async with Cluster("agg", ["127.0.0.1:1"]) as target:
            topics = TargetTopics(CONFIG, target, lambda: 0, lambda: 0)
            topics._partition_counts["flights"] = 1
            limits = []
            while answers:
                await topics.refresh_limits("flights")
                limits.append(topics.max_batch_size("flights"))
            return limits

    monkeypatch.setattr(topics_module, "describe_topics_configs", describe)
    before, after = asyncio.run(story())
    assert (before, after > LARGE) == (1_000_000, True)


def test_limits_that_cannot_be_read_are_told_again_after_they_could(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = TopicAuthorizationFailed("no")
    answers = [refused, refused, {"max.message.bytes": ConfigValue("1000000", False)}, refused]

    async def describe(*_: object) -> Any:
        return {"flights": answers.pop(0)}

    async def story() -> None:
        async with Cluster("agg", ["127.0.0.1:1"]) as target:
            topics = TargetTopics(CONFIG, target, lambda: 0, lambda: 0)
            topics._partition_counts["flights"] = 1
            while answers:
                await topics.refresh_limits("flights")

    monkeypatch.setattr(topics_module, "describe_topics_configs", describe)
    with capture_logs() as lines:
        asyncio.run(story())
    assert [each["event"] for each in lines] == ["the target's limits cannot be read"] * 2


def test_limit_is_asked_for_until_the_target_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the try of a partition that is stopped at a gap would end in silence."""
    answers = [RequestTimedOut("away"), {"flights": {"max.message.bytes": ConfigValue("2000000", False)}}]

    async def describe(*_: object) -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def story() -> int:
        async with Cluster("agg", ["127.0.0.1:1"]) as target:
            topics = TargetTopics(CONFIG, target, lambda: 0, lambda: 0)
            topics._partition_counts["flights"] = 1
            await topics.refresh_limits("flights")
            return topics.max_batch_size("flights")

    monkeypatch.setattr(topics_module, "describe_topics_configs", describe)
    monkeypatch.setattr(topics_module, "LIMITS_PAUSE_S", 0)
    assert asyncio.run(story()) == 2_000_000


def test_record_over_an_unknown_limit_is_the_targets_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        pipeline, target, around = started()
        around.limit, _ = limit
        pipeline.accept(answer(batch(0, [LARGE]), end=1))
        assert target.offsets() == [[0]]
        assert pipeline.gap is None
        target.refuse(RecordTooLarge("no"))
        assert pipeline.gap is not None
        assert pipeline.gap.gap_class is GapClass.TOO_LARGE
        assert "the target says" in pipeline.gap.reason

    limit = limit_of(monkeypatch, TopicAuthorizationFailed("no"))
    asyncio.run(story())


def test_check_compares_no_limit_that_nobody_told() -> None:
    selected = Selected("ewr", "flights", 1, "flights", 0)
    known: Any = {"max.message.bytes": SimpleNamespace(value="10", is_set=True)}
    assert list(settings(CONFIG, selected, {}, known)) == []
    assert list(settings(CONFIG, selected, known, {})) == []
