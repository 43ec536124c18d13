"""What `check` says of routes that another mirror carries, and of those that it has only proposed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from millrace.broker.client.metadata import ClusterMetadata
from millrace.mirror.checks import check
from millrace.mirror.checks.findings import Finding, Selected, Severity
from millrace.mirror.config import parse_config
from millrace.mirror.topics.routes import Route

BACK = Route("id-agg", "flights", "id-ewr", "flights", "back", 5)
FIELDS: dict[str, Any] = {
    "name": "there",
    "target": {"cluster": "agg", "bootstrap": ["b:1"]},
    "sources": [{"cluster": "ewr", "bootstrap": ["a:1"], "topics": {"include": ["flights"]}}],
    "naming": "identity",
}
CONFIG = parse_config(FIELDS)


def found(monkeypatch: pytest.MonkeyPatch, *others: Route, told: Route | None = None) -> list[Finding]:
    async def told_routes(*_: object) -> dict[Any, Route]:
        return {} if told is None else {("ewr", "flights"): told}

    async def routes_seen_on(*_: object) -> dict[str, dict[Any, Route]]:
        return {"back": {("agg", each.source_topic): each for each in others}}

    monkeypatch.setattr(check, "told_routes", told_routes)
    monkeypatch.setattr(check, "routes_seen_on", routes_seen_on)
    clusters: Any = {"ewr": None, "agg": None}
    picture = check._Picture(clusters)
    picture.views = {name: ClusterMetadata(f"id-{name}", 0, {}, {}) for name in clusters}
    picture.selected = [Selected("ewr", "flights", 1, "flights", 0)]
    return asyncio.run(check._loops(CONFIG, picture))


def test_loop_with_what_is_carried_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = found(monkeypatch, BACK)
    assert finding.severity is Severity.ERROR
    assert "would go round" in finding.message


def test_loop_with_what_is_only_proposed_keeps_nobody_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mirror may be dead: who waits for it must not be refused at the start."""
    (finding,) = found(monkeypatch, replace(BACK, is_proposed=True))
    assert finding.severity is Severity.WARNING
    assert "is passed over after 120 s" in finding.message
    assert found(monkeypatch) == []


def test_mirror_that_has_told_what_must_give_way_may_start_to_take_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused at the start it never would, and the older mirror waits for that."""
    told = Route("id-ewr", "flights", "id-agg", "flights", "there", 9)
    (finding,) = found(monkeypatch, BACK, told=told)
    assert finding.severity is Severity.WARNING
    assert finding.message.endswith(". This mirror began later and gives way")
    (finding,) = found(monkeypatch, BACK, told=replace(told, since_ms=1))
    assert finding.severity is Severity.WARNING
    assert finding.message.endswith(". That mirror began later and gives way")
    (finding,) = found(monkeypatch, BACK, told=replace(told, since_ms=1, target_topic="ewr.flights"))
    assert finding.severity is Severity.ERROR, "it went elsewhere"


@pytest.mark.parametrize(("naming", "is_told"), [("{cluster}.{topic}", True), ("identity", False)])
def test_copy_of_the_targets_topic_is_told_by_its_name(
    naming: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody tells who writes it: another mirror's routes may not be read here."""

    async def nothing(*_: object) -> dict[Any, Any]:
        return {}

    monkeypatch.setattr(check, "told_routes", nothing)
    monkeypatch.setattr(check, "routes_seen_on", nothing)
    clusters: Any = {"ewr": None, "agg": None}
    picture = check._Picture(clusters)
    topics: Any = {"flights": None}
    picture.views = {
        "ewr": ClusterMetadata("id-ewr", 0, {}, {}),
        "agg": ClusterMetadata("id-agg", 0, {}, topics),
    }
    picture.selected = [Selected("ewr", name, 1, f"ewr.{name}", 0) for name in ("agg.flights", "agg.own")]
    config = parse_config({**FIELDS, "naming": naming})
    findings = asyncio.run(check._loops(config, picture))
    assert [finding.severity for finding in findings] == [Severity.WARNING] * is_told
    assert all("ewr/agg.flights has the name of a copy of agg/flights" in each.message for each in findings)
