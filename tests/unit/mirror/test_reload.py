"""Which changes of a config need no restart; whatever is not known to be safe is refused by name."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.reload import RELOADABLE, plan_reload
from millrace.mirror.worker import Worker

BASE: dict[str, Any] = {
    "name": "aggregate",
    "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:9392"]},
    "sources": [
        {"cluster": "ewr", "bootstrap": ["127.0.0.1:9092"], "topics": {"include": ["flights"]}},
        {"cluster": "lhr", "bootstrap": ["127.0.0.1:9192"], "topics": {"include": ["flights"]}},
    ],
}


def changed(*path: Any, to: Any) -> MirrorConfig:
    settings = copy.deepcopy(BASE)
    place = settings
    for part in path[:-1]:
        place = place.setdefault(part, {}) if isinstance(place, dict) else place[part]
    place[path[-1]] = to
    return parse_config(settings)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("sources", 0, "topics", "include"), ["orders"], "sources[ewr].topics.include"),
        (("sources", 0, "topics", "exclude"), ["x"], "sources[ewr].topics.exclude"),
        (("sources", 1, "start"), "latest", "sources[lhr].start"),
        (("gaps", "expired"), "skip", "gaps.expired"),
        (("gaps", "default"), "skip", "gaps.default"),
        (("fetch", "max_bytes"), 1 << 20, "fetch.max_bytes"),
        (("in_flight_bytes",), 1 << 22, "in_flight_bytes"),
        (("discovery_interval_ms",), 100, "discovery_interval_ms"),
        (("position_interval_ms",), 100, "position_interval_ms"),
        (("sources", 0, "progress_group"), "mirror", "sources[ewr].progress_group"),
        (("target", "security"), {"protocol": "SSL"}, "target.security.protocol"),
        (("sources", 1, "security", "protocol"), "SSL", "sources[lhr].security.protocol"),
    ],
)
def test_what_can_be_reloaded_is_named(path: tuple[Any, ...], value: Any, named: str) -> None:
    plan = plan_reload(parse_config(BASE), changed(*path, to=value))
    assert (plan.changed, plan.refused) == ((named,), ())


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("name",), "other", "name"),
        (("target", "bootstrap"), ["127.0.0.1:1"], "target.bootstrap"),
        (("sources", 0, "bootstrap"), ["127.0.0.1:1"], "sources[ewr].bootstrap"),
        (("naming",), "{cluster}.{topic}", "naming.pattern"),
        (("control", "listen"), "127.0.0.1:1", "control.listen"),
        (("group", "session_timeout_ms"), 2_000, "group.session_timeout_ms"),
    ],
)
def test_what_needs_a_restart_is_refused_by_name(path: tuple[Any, ...], value: Any, named: str) -> None:
    plan = plan_reload(parse_config(BASE), changed(*path, to=value))
    assert (plan.changed, plan.refused) == ((), (named,))


def test_sources_that_come_and_go_are_told() -> None:
    settings = copy.deepcopy(BASE)
    settings["sources"][1] = {
        "cluster": "jfk",
        "bootstrap": ["127.0.0.1:9292"],
        "topics": {"include": ["f"]},
    }
    plan = plan_reload(parse_config(BASE), parse_config(settings))
    assert plan.changed == ("sources[jfk]", "sources[lhr]")
    assert (plan.added_sources, plan.removed_sources, plan.refused) == (("jfk",), ("lhr",), ())


def test_the_order_of_sources_is_a_setting_of_its_own_and_the_same_file_changes_nothing() -> None:
    """A topic that several feed has the settings of the first (`topic_configs.deciding_source`)."""
    settings = copy.deepcopy(BASE)
    assert plan_reload(parse_config(BASE), parse_config(settings)).changed == ()
    settings["sources"].reverse()
    plan = plan_reload(parse_config(BASE), parse_config(settings))
    assert (plan.changed, plan.refused) == (("sources",), ())
    further = {"cluster": "jfk", "bootstrap": ["127.0.0.1:9292"], "topics": {"include": ["f"]}}
    for place in (0, 1, 2):
        settings = copy.deepcopy(BASE)
        settings["sources"].insert(place, further)
        assert plan_reload(parse_config(BASE), parse_config(settings)).changed == ("sources[jfk]",)


def test_a_new_order_of_sources_takes_effect() -> None:
    settings = copy.deepcopy(BASE)
    settings["sources"].reverse()

    async def story() -> list[str]:
        agg, ewr, lhr = (cast(Any, SimpleNamespace(name=name)) for name in ("agg", "ewr", "lhr"))
        before = parse_config(BASE | {"delivery": "at_least_once"})
        worker = Worker(before, agg, {"ewr": ewr, "lhr": lhr}, lambda: 1_000)
        await worker.operators.reload(parse_config(settings | {"delivery": "at_least_once"}), lambda _: agg)
        return [each.cluster for each in worker.discovery.topics.config.sources]

    assert asyncio.run(story()) == ["lhr", "ewr"]


def test_a_field_that_is_not_listed_is_refused() -> None:
    """Fields to come are refused until someone has thought about them."""
    for path in ("delivery", "target.replication_factor", "sources[ewr].partition_offset", "new_field"):
        assert RELOADABLE.fullmatch(path) is None


def test_a_new_token_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_TEST_TOKEN", "a")
    plan = plan_reload(parse_config(BASE), changed("control", "token", to={"env": "MILLRACE_TEST_TOKEN"}))
    assert (plan.changed, plan.refused) == (("control.token",), ())
