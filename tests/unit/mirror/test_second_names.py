"""One cluster under two names in a config: its records are carried once."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.errors import ClusterUnreachable
from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.control import operators
from millrace.mirror.control.control import Control
from millrace.mirror.control.http.messages import Refusal
from millrace.mirror.topics import route_guard
from millrace.mirror.topics.route_guard import RouteGuard
from millrace.mirror.topics.route_records import RouteKey, read_routes
from millrace.mirror.topics.routes import Route
from millrace.mirror.topics.second_names import SecondNames
from millrace.mirror.worker import Worker

ID = "the-one-cluster"


def config(*names: str) -> MirrorConfig:
    sources = [
        {"cluster": name, "bootstrap": [f"{name}:1"], "topics": {"include": ["flights"]}} for name in names
    ]
    target = {"cluster": "agg", "bootstrap": ["agg:1"]}
    return parse_config({"name": "m", "target": target, "sources": sources, "delivery": "at_least_once"})


class FakeCluster:
    def __init__(self, name: str, cluster_id: str | None) -> None:
        self.name = name
        self.cluster_id = cluster_id
        self.is_away = self.is_closed = False

    async def metadata(self, *_: object, **__: object) -> ClusterMetadata:
        if self.is_away:
            raise ClusterUnreachable(self.name, "no server answers")
        return ClusterMetadata(self.cluster_id, 0, {}, {})

    async def close(self) -> None:
        self.is_closed = True


# --- the rule ------------------------------------------------------------------------------------------


def told(**since_ms: int) -> dict[RouteKey, Route]:
    """Carried from ID, each source's topic since then."""
    return {
        (name, "flights"): Route(ID, "flights", "id-agg", "flights", "m", at) for name, at in since_ms.items()
    }


def test_source_that_is_carried_stays_and_otherwise_the_one_that_was_seen_first() -> None:
    names = SecondNames()
    for name, cluster_id in (("jfk", ID), ("ewr", ID), ("lga", "another")):
        names.looked(name, cluster_id)
    sources = ["ewr", "jfk", "lga"]

    def refused(known: dict[RouteKey, Route]) -> set[str]:
        return {each for each in sources if names.refuses(each, ["flights"], sources, known)}

    assert refused({}) == {"ewr"}
    assert refused(told(ewr=5)) == {"jfk"}
    assert refused(told(ewr=5, jfk=4)) == {"ewr"}
    proposed = Route(ID, "flights", "id-agg", "flights", "m", 1, is_proposed=True, proposer="p")
    assert refused({("ewr", "flights"): proposed}) == {"ewr"}, "that one is not carried"
    assert names.refused[("ewr", "flights")] == (
        f"ewr is the same cluster as jfk (id {ID}); list each cluster once"
    )
    names.forget("jfk")
    sources.remove("jfk")
    assert (refused({}), names.refused) == (set(), {})


def test_source_that_was_not_seen_yet_counts_by_what_is_told_of_it() -> None:
    names = SecondNames()
    names.looked("ewr", ID)
    assert names.refuses("ewr", ["flights"], ["ewr", "jfk"], told(jfk=1))
    assert not names.refuses("ewr", ["flights"], ["ewr"], told(jfk=1)), "it has left the config"
    names.looked("jfk", "another")
    assert not names.refuses("ewr", ["flights"], ["ewr", "jfk"], told(jfk=1)), "it was that cluster once"


# --- the guard -----------------------------------------------------------------------------------------


def test_nothing_of_a_second_name_is_let_in_while_the_first_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[bytes, bytes | None]] = []

    async def write(_topic: str, records: list[tuple[bytes, bytes | None]], **_: object) -> None:
        written.extend(records)

    async def told_routes(*_: object) -> dict[RouteKey, Route]:
        return read_routes(written, mirror="m", cluster_id="id-agg")

    async def routes_seen_on(*_: object) -> dict[str, dict[RouteKey, Route]]:
        return {}

    monkeypatch.setattr(route_guard, "told_routes", told_routes)
    monkeypatch.setattr(route_guard, "routes_seen_on", routes_seen_on)
    agg: Any = FakeCluster("agg", "id-agg")
    system: Any = SimpleNamespace(write=write)
    guard = RouteGuard(config("ewr", "jfk"), agg, system, lambda: 1_000)

    async def look(name: str) -> bool:
        cluster: Any = FakeCluster(name, ID)
        for _ in range(3):
            await guard.admit(cluster, await cluster.metadata(), ["flights"])
        return guard.is_admitted(name, "flights")

    async def story() -> None:
        assert (await look("ewr"), await look("jfk"), await look("ewr")) == (True, False, True)
        assert set(guard.refusals()) == {("jfk", "flights")}
        other = RouteGuard(config("ewr", "jfk"), agg, system, lambda: 2_000)  # and had seen jfk first
        jfk: Any = FakeCluster("jfk", ID)
        await other.admit(jfk, await jfk.metadata(), ["flights"])
        assert not other.is_admitted("jfk", "flights"), "what another worker carries stays"
        guard.config = config("jfk")
        guard.forget("ewr")
        assert await look("jfk")
        assert guard.refusals() == {}

    asyncio.run(story())


# --- a reload ------------------------------------------------------------------------------------------


def reloaded(added: FakeCluster) -> tuple[Worker, str]:
    """A worker that carries ewr, and what it answers to a reload that adds the cluster."""
    agg: Any = FakeCluster("agg", "id-agg")
    ewr: Any = FakeCluster("ewr", ID)

    async def story() -> tuple[Worker, str]:
        worker = Worker(config("ewr"), agg, {"ewr": ewr}, lambda: 1_000)

        def connect(_: object) -> Any:
            return added

        try:
            answer = await Control(worker, connect).reload(config("ewr", added.name))
        except Refusal as refusal:
            return worker, str(refusal)
        return worker, str(json.loads(answer.body)["done"])

    return asyncio.run(story())


@pytest.mark.parametrize(("cluster_id", "first"), [(ID, "ewr"), ("id-agg", "agg")])
def test_reload_takes_no_second_name_for_a_cluster_that_is_there(cluster_id: str, first: str) -> None:
    jfk = FakeCluster("jfk", cluster_id)
    worker, said = reloaded(jfk)
    assert said == (
        f"nothing was changed: mirror.yaml: sources[1].bootstrap: jfk: is the same cluster as {first} "
        f"(id {cluster_id}); list each cluster once"
    )
    assert (list(worker.readers), worker.config.source("jfk"), jfk.is_closed) == (["ewr"], None, True)


def test_reload_takes_a_cluster_of_its_own_and_one_that_does_not_say_which_it_is() -> None:
    """The guard of routes looks again when it does."""
    away, old = FakeCluster("jfk", ID), FakeCluster("jfk", None)
    away.is_away = True
    for cluster in (FakeCluster("jfk", "another"), away, old):
        worker, said = reloaded(cluster)
        assert (said, list(worker.readers)) == ("reloaded: sources[jfk]", ["ewr", "jfk"])
        assert not cluster.is_closed


def test_reload_waits_for_no_cluster_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silence(*_: object) -> ClusterMetadata:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(operators, "ASKED_FOR_S", 0.01)
    jfk = FakeCluster("jfk", ID)
    monkeypatch.setattr(jfk, "metadata", silence)
    assert reloaded(jfk)[1] == "reloaded: sources[jfk]"
