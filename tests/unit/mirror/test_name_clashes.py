"""Topics of one source that would meet in one topic of the target are never carried together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.errors import ConfigError
from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.topics import name_clashes, route_guard
from millrace.mirror.topics.name_clashes import NameClashes, taken_elsewhere, yielding
from millrace.mirror.topics.route_guard import RouteGuard
from millrace.mirror.topics.route_records import encode_key, encode_value
from millrace.mirror.topics.routes import Route
from tests.unit.mirror.test_route_guard import Clusters, FakeCluster

SOURCE = {"bootstrap": ["a:1"], "topics": {"include": [".*"]}}


def config(rename: dict[str, str], *sources: str, **more: Any) -> MirrorConfig:
    return parse_config(
        {
            "name": "there",
            "target": {"cluster": "agg", "bootstrap": ["b:1"]},
            "sources": [{"cluster": name, **SOURCE, **more} for name in sources or ("ewr", "lga")],
            "naming": {"rename": rename},
        }
    )


# --- the rule ---------------------------------------------------------------------------------------


def test_what_is_carried_stays_and_what_comes_later_is_not_carried() -> None:
    names = {"old": "dup", "dup": "dup", "other": "other"}
    assert yielding(names, {"old": 5, "other": 5}) == {"dup": "old"}
    assert yielding(names, {"dup": 5}) == {"old": "dup"}
    assert yielding({"old": "dup", "other": "other"}, {}) == {}


def test_where_none_is_carried_none_is_and_of_two_that_are_the_older_stays() -> None:
    names = {"flights": "mixed", "orders.eu": "mixed", "orders.us": "mixed", "other": "other"}
    assert yielding(names, {}) == {"flights": None, "orders.eu": None, "orders.us": None}
    assert yielding(names, {"orders.us": 3, "flights": 4}) == {
        "flights": "orders.us",
        "orders.eu": "orders.us",
    }


def test_a_refusal_is_logged_once_and_goes_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, dict[str, Any]]] = []

    class Log:
        def error(self, event: str, **fields: Any) -> None:
            said.append((event, fields))

        info = error

    monkeypatch.setattr(name_clashes, "log", Log())
    clashes = NameClashes()
    names = {"old": "dup", "dup": "dup"}
    for _ in range(3):
        assert clashes.admit("ewr", names, {"old": 1}, "mirror.yaml:7: naming") == ["old"]
    sentence = (
        "mirror.yaml:7: naming: it would become dup, and old is carried under that name; give it another "
        "name, or exclude it"
    )
    assert said == [("topic refused", {"source": "ewr", "topic": "dup", "reason": sentence})]
    assert clashes.refused == {("ewr", "dup"): sentence}
    assert clashes.admit("lga", {"dup": "dup"}, {}, "") == ["dup"]  # another source merges
    assert ("ewr", "dup") in clashes.refused
    assert clashes.admit("ewr", {"dup": "dup"}, {"old": 1}, "") == ["dup"]
    assert said[1:] == [("topic no longer refused", {"source": "ewr", "topic": "dup"})]
    clashes.admit("ewr", names, {}, "mirror.yaml:7: naming")
    assert clashes.refused["ewr", "old"] == clashes.refused["ewr", "dup"]
    assert "topics dup, old would all become dup; give them different names" in clashes.refused["ewr", "old"]
    clashes.admit("ewr", {"dup": "dup"}, {}, "")
    assert clashes.refused == {}, "what is not selected any more is not refused either"


# --- at the way in ----------------------------------------------------------------------------------


class Guarded:
    """A guard whose clusters are as the test says, and another worker of the same mirror."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: MirrorConfig) -> None:
        self.clusters = Clusters(monkeypatch)
        self.now_ms = self.passed_ms = 0
        self.guard, self.other = (self.worker(settings) for _ in range(2))

    def worker(self, settings: MirrorConfig) -> RouteGuard:
        def clock() -> int:
            self.now_ms += 1_000
            return self.now_ms

        agg = cast(Cluster, FakeCluster("agg"))
        return RouteGuard(settings, agg, cast(SystemRecords, self.clusters), clock, lambda: self.passed_ms)

    async def carried(self, *topics: str, source: str = "ewr", guard: RouteGuard | None = None) -> list[str]:
        """What of these topics is carried after a look."""
        guard, cluster = guard or self.guard, cast(Cluster, FakeCluster(source))
        await guard.admit(cluster, await cluster.metadata(), topics)
        return [topic for topic in topics if guard.is_admitted(source, topic)]

    @property
    def refused(self) -> list[tuple[str, str]]:
        return sorted(self.guard.refusals())


def test_nothing_of_a_clash_is_carried_from_the_first_look_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        stage = Guarded(monkeypatch, config({"flights": "mixed", "orders.eu": "mixed"}))
        assert await stage.carried("flights", "orders.eu", "other") == ["other"]
        assert stage.refused == [("ewr", "flights"), ("ewr", "orders.eu")]
        assert set(stage.clusters.routes()) == {("ewr", "other")}, "nothing is proposed of them either"
        # Another source has one of them alone.
        assert await stage.carried("flights", source="lga") == ["flights"]
        # One of them goes.
        assert await stage.carried("flights", "other") == ["flights", "other"]
        assert stage.refused == []

    asyncio.run(main())


def test_clash_that_appears_later_is_refused_by_every_worker_and_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        settings = config({"old": "dup"})
        stage = Guarded(monkeypatch, settings)
        assert await stage.carried("old") == ["old"]
        assert await stage.carried("dup", "old") == ["old"]
        assert stage.refused == [("ewr", "dup")]
        # Another worker, and the next process, know from what is told which of them is carried.
        assert await stage.carried("dup", "old", guard=stage.other) == ["old"]
        assert await stage.carried("dup", "old", guard=stage.worker(settings)) == ["old"]
        # The topic that stays is deleted at the source: the other has its name.
        assert await stage.carried("dup") == ["dup"]
        assert (stage.refused, set(stage.clusters.routes())) == ([], {("ewr", "dup"), ("ewr", "old")})
        # It might be one that another worker has just found; it stays away, so it is dropped.
        stage.passed_ms += route_guard.GONE_AFTER_MS
        assert await stage.carried("dup") == ["dup"]
        assert (stage.refused, set(stage.clusters.routes())) == ([], {("ewr", "dup")})
        assert await stage.carried("dup", "old") == ["dup"]

    asyncio.run(main())


def apart(*sources: str, **naming: Any) -> MirrorConfig:
    """Whose names at the target say which source they are of."""
    fields = {
        "name": "there",
        "target": {"cluster": "agg", "bootstrap": ["b:1"]},
        "sources": [{"cluster": name, **SOURCE} for name in sources],
        "naming": {"pattern": "{cluster}.{topic}", **naming},
    }
    return parse_config(fields)


def test_names_that_are_to_say_the_source_are_not_shared_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """`a.b.c`: by a dot that is in a cluster's name, or in a topic's."""

    async def main() -> None:
        settings = apart("a", "a.b")
        stage = Guarded(monkeypatch, settings)
        assert await stage.carried("b.c", "d", source="a") == ["b.c", "d"]
        assert await stage.carried("c", "d", source="a.b") == ["d"]
        assert stage.refused == [("a.b", "c")]
        assert (
            "it would become a.b.c, and a/b.c is carried under that name"
            in stage.guard.refusals()["a.b", "c"]
        )
        # Another worker, and the next process, know it from what is told, whichever source they see first.
        assert await stage.carried("c", "d", source="a.b", guard=stage.other) == ["d"]
        assert await stage.carried("b.c", "d", source="a", guard=stage.worker(settings)) == ["b.c", "d"]
        # The other source leaves the config: the name is free.
        stage.guard.config = apart("a.b")
        stage.guard.forget("a")
        assert await stage.carried("c", "d", source="a.b") == ["c", "d"]
        assert stage.refused == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "naming", [{"rename": {"a/b.c": "a.b.c"}}, {"pattern": "{topic}", "rename": {"b.c": "c"}}]
)
def test_names_that_somebody_gave_may_be_shared(
    monkeypatch: pytest.MonkeyPatch, naming: dict[str, Any]
) -> None:
    async def main() -> None:
        stage = Guarded(monkeypatch, apart("a", "a.b", **naming))
        assert await stage.carried("b.c", source="a") == ["b.c"]
        assert await stage.carried("c", source="a.b") == ["c"]

    asyncio.run(main())


def test_of_two_that_are_carried_under_one_name_the_older_stays() -> None:
    naming = apart("a", "a.b").naming_rule
    told: dict[Any, Route] = {
        key: Route(f"id-{key[0]}", key[1], "id-agg", "a.b.c", "there", since_ms)
        for key, since_ms in ((("a", "b.c"), 7), (("a.b", "c"), 5))
    }

    def taken(source: str, topic: str) -> dict[str, str]:
        return taken_elsewhere(naming, ["a", "a.b"], source, [topic], told)

    assert (taken("a", "b.c"), taken("a.b", "c")) == ({"b.c": "a.b/c"}, {})
    told["a.b", "c"] = replace(told["a.b", "c"], target_topic="elsewhere")  # before names were changed
    assert (taken("a", "b.c"), taken("a.b", "c")) == ({}, {"c": "a/b.c"})


def test_another_worker_that_carries_by_now_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had seen the one topic alone: its word is found while this worker proposes something else."""

    async def main() -> None:
        stage = Guarded(monkeypatch, config({"old": "dup"}))
        metadata = FakeCluster.metadata
        raced = False

        async def late(cluster: FakeCluster, *words: Any, **more: Any) -> ClusterMetadata:
            nonlocal raced
            if cluster.name == "ewr" and more.get("max_age_ms") == 0 and not raced:
                raced = True
                assert await stage.carried("old", "new", guard=stage.other) == ["old", "new"]
            return cast(ClusterMetadata, await metadata(cluster, *words, **more))

        view = await FakeCluster("ewr").metadata()
        monkeypatch.setattr(FakeCluster, "metadata", late)
        await stage.guard.admit(cast(Cluster, FakeCluster("ewr")), view, ["dup", "old", "new"])
        assert raced
        assert not stage.guard.is_admitted("ewr", "dup")
        assert "old is carried under that name" in stage.guard.refusals()["ewr", "dup"]
        assert await stage.carried("dup", "old", "new") == ["old", "new"]

    asyncio.run(main())


@pytest.mark.parametrize("is_proposed", [True, False])
def test_another_worker_that_sees_another_topic_first_does_not_carry_beside_this_one(
    is_proposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both topics are new, and of two brokers of the source each knows one of them so far."""

    async def main() -> None:
        stage = Guarded(monkeypatch, config({"old": "dup"}))
        ewr = FakeCluster("ewr")
        view, metadata = await ewr.metadata(), FakeCluster.metadata
        begun = asyncio.Event()

        async def late(cluster: FakeCluster, *words: Any, **more: Any) -> ClusterMetadata:
            if cluster.name == "ewr" and more.get("max_age_ms") == 0 and not begun.is_set():
                begun.set()
                if is_proposed:
                    route = Route("id-ewr", "old", "id-agg", "dup", "there", 1, is_proposed=True)
                    value = encode_value(route)
                    stage.clusters.told.append((encode_key("ewr", "old"), value))
                else:
                    assert await stage.carried("old", guard=stage.other) == ["old"]
            return cast(ClusterMetadata, await metadata(cluster, *words, **more))

        monkeypatch.setattr(FakeCluster, "metadata", late)
        await stage.guard.admit(cast(Cluster, ewr), view, ["dup"])
        assert begun.is_set() and not stage.guard.is_admitted("ewr", "dup")
        assert ("ewr", "old") in stage.clusters.routes(), "its word is not taken back"
        assert await stage.carried("dup", "old") == ([] if is_proposed else ["old"])

    asyncio.run(main())


def test_cluster_without_an_id_has_its_names_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        stage = Guarded(monkeypatch, config({"old": "dup"}))
        ewr, nameless = cast(Cluster, FakeCluster("ewr")), ClusterMetadata(None, 0, {}, {})

        async def carried(*topics: str) -> list[str]:
            await stage.guard.admit(ewr, nameless, topics)
            return [topic for topic in topics if stage.guard.is_admitted("ewr", topic)]

        assert await carried("old", "dup") == []
        assert await carried("old") == ["old"]
        assert await carried("dup", "old") == ["old"]

    asyncio.run(main())


def test_source_that_went_and_came_back_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        stage = Guarded(monkeypatch, config({"flights": "mixed", "orders": "mixed"}))
        assert await stage.carried("flights", "orders", "other") == ["other"]
        stage.guard.forget("ewr")
        assert (stage.refused, stage.guard.is_admitted("ewr", "other")) == ([], False)

    asyncio.run(main())


# --- in the config ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rename", "sources"),
    [
        ({"flights": "mixed", "orders.eu": "mixed"}, ("ewr",)),
        ({"ewr/flights": "mixed", "ewr/orders.eu": "mixed"}, ("ewr", "lga")),
    ],
)
def test_config_that_mixes_by_itself_is_refused_before_any_cluster_is_asked(
    rename: dict[str, str], sources: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(rename, *sources)
    last = list(rename)[-1]
    assert str(caught.value) == (
        f"mirror.yaml: naming.rename.{last}: got 'mixed', expected another name than flights of ewr has: "
        "their partitions would be mixed"
    )


@pytest.mark.parametrize(
    ("rename", "sources"),
    [
        ({"flights": "mixed", "orders": "mixed"}, ("ewr", "lga")),  # each may have one of them
        ({"ewr/flights": "mixed", "lga/orders": "mixed"}, ("ewr", "lga")),
        ({"flights": "mixed", "ewr/flights": "own", "ewr/orders": "mixed"}, ("ewr",)),
        ({"flights": "mixed", "__orders": "mixed"}, ("ewr",)),  # never carried
    ],
)
def test_config_that_may_merge_sources_is_taken(rename: dict[str, str], sources: tuple[str, ...]) -> None:
    config(rename, *sources)
