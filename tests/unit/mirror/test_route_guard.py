"""What a worker remembers of what it told, while several sources have their turns at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import ClusterMetadata
from millrace.mirror.config import parse_config
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.topics import route_guard
from millrace.mirror.topics.own_topics import ROUTES
from millrace.mirror.topics.proposals import DEAD_AFTER_MS
from millrace.mirror.topics.route_guard import TOLD_AT_ONCE, RouteGuard
from millrace.mirror.topics.route_records import WITHDRAWN, RouteKey, encode_key, encode_value, read_routes
from millrace.mirror.topics.routes import Route
from tests.waiting import patience

BACK = {("agg", "flights"): Route("id-agg", "flights", "id-ewr", "flights", "back", 5)}


class FakeCluster:
    def __init__(self, name: str) -> None:
        self.name = name

    async def metadata(self, topics: Sequence[str] | None = None, *, max_age_ms: float = 0) -> Any:
        tells = cast(Any, {ROUTES.of("back"): None})
        return ClusterMetadata(f"id-{self.name}", 0, {}, tells)


class Clusters:
    """What the routes topics hold, as guards read it here: the mirror's own, and of others on ewr. `hold`
    stops who reads those."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(route_guard, "told_routes", self.told_routes)
        monkeypatch.setattr(route_guard, "routes_seen_on", self.seen_on)
        self.told: list[tuple[bytes, bytes | None]] = []
        self.others: dict[RouteKey, Route] = {}
        self.hold = asyncio.Event()
        self.hold.set()
        self.is_held = asyncio.Event()

    async def write(
        self, topic: str, records: Sequence[tuple[bytes, bytes | None]], *, configs: Mapping[str, str]
    ) -> None:
        assert topic == ROUTES.of("there")
        await asyncio.sleep(0)
        self.told += records

    def routes(self) -> dict[RouteKey, Route]:
        found = read_routes(self.told, mirror="there", cluster_id="id-agg")
        return {key: route for key, route in found.items() if not route.is_withdrawn}

    async def told_routes(self, target: Cluster, mirror: str, target_id: str) -> dict[RouteKey, Route]:
        found = read_routes(self.told, mirror="there", cluster_id="id-agg")
        await asyncio.sleep(0)
        return found

    async def seen_on(self, cluster: Cluster, view: ClusterMetadata) -> dict[str, dict[RouteKey, Route]]:
        found = self.others if cluster.name == "ewr" else {}
        self.is_held.set()
        await self.hold.wait()
        return {"back": dict(found)}


SOURCE = {"bootstrap": ["a:1"], "topics": {"include": [".*"]}}
CONFIG_FIELDS: dict[str, Any] = {
    "name": "there",
    "target": {"cluster": "agg", "bootstrap": ["b:1"]},
    "sources": [{"cluster": "ewr", **SOURCE}, {"cluster": "lga", **SOURCE}],
    "naming": "identity",
}
CONFIG = parse_config(CONFIG_FIELDS)


def test_what_gave_way_is_not_carried_again_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another source reads what was told while one gives way: what it has read is from before."""

    async def main() -> None:
        clusters = Clusters(monkeypatch)
        steady_ms = 0
        ewr, lga, agg = (cast(Cluster, FakeCluster(name)) for name in ("ewr", "lga", "agg"))
        guard = RouteGuard(CONFIG, agg, cast(SystemRecords, clusters), lambda: 60_000, lambda: steady_ms)

        async def admit(cluster: Cluster, *topics: str) -> None:
            nonlocal steady_ms
            steady_ms += route_guard.READ_AGAIN_AFTER_MS  # others' routes are read at every turn
            await guard.admit(cluster, await cluster.metadata(), topics)

        await admit(ewr, "flights")
        assert guard.is_admitted("ewr", "flights") and ("ewr", "flights") in clusters.routes()

        clusters.others = BACK  # an older one, whose rules have changed
        clusters.is_held.clear()
        clusters.hold.clear()
        giving_way = asyncio.create_task(admit(ewr, "flights"))
        await asyncio.wait_for(clusters.is_held.wait(), patience())
        beside = asyncio.create_task(admit(lga, "orders"))  # a new topic: what was told is read again
        for _ in range(10):
            await asyncio.sleep(0)
        clusters.hold.set()
        await asyncio.gather(giving_way, beside)
        assert not guard.is_admitted("ewr", "flights") and ("ewr", "flights") not in clusters.routes()

        clusters.others = {}
        await admit(ewr, "flights")
        assert guard.is_admitted("ewr", "flights")
        assert ("ewr", "flights") in clusters.routes(), "who begins against it now would not know of it"
        assert not clusters.routes()["ewr", "flights"].is_proposed

    asyncio.run(main())


def test_worker_that_gives_way_takes_back_no_word_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers begin at once, one slowly, and a mirror whose clock is behind begins against them."""

    async def main() -> None:
        clusters = Clusters(monkeypatch)

        async def seen_on(cluster: Cluster, view: ClusterMetadata) -> dict[str, dict[RouteKey, Route]]:
            task = asyncio.current_task()
            if clusters.told and task is not None and task.get_name() == "slow":
                clusters.is_held.set()
                await clusters.hold.wait()
            return {"back": dict(clusters.others)}

        monkeypatch.setattr(route_guard, "routes_seen_on", seen_on)
        ewr, agg = (cast(Cluster, FakeCluster(name)) for name in ("ewr", "agg"))
        view = await ewr.metadata()
        slow, quick = (RouteGuard(CONFIG, agg, cast(SystemRecords, clusters), lambda: 1000) for _ in range(2))
        clusters.hold.clear()
        proposing = asyncio.create_task(slow.admit(ewr, view, ["flights"]), name="slow")
        await asyncio.wait_for(clusters.is_held.wait(), patience())
        await quick.admit(ewr, view, ["flights"])
        assert quick.is_admitted("ewr", "flights")
        clusters.others = {key: replace(route, is_proposed=True) for key, route in BACK.items()}
        clusters.hold.set()
        await proposing
        assert ("ewr", "flights") in clusters.routes(), "one worker carries, and nobody is told"
        assert not clusters.routes()["ewr", "flights"].is_proposed

    asyncio.run(main())


def test_hearsay_of_a_carried_route_tells_of_no_mere_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gives way, or dies, would be told of as long as this mirror lives, and by all behind it."""

    async def main() -> None:
        clusters = Clusters(monkeypatch)
        steady_ms = 0
        far = Route("id-far", "flights", "id-ewr", "flights", "up", 5, is_proposed=True, proposed_at_ms=1)
        clusters.others = {("far", "flights"): far}
        ewr, agg = (cast(Cluster, FakeCluster(name)) for name in ("ewr", "agg"))
        guard = RouteGuard(CONFIG, agg, cast(SystemRecords, clusters), lambda: 40_000, lambda: steady_ms)
        await guard.admit(ewr, await ewr.metadata(), ["flights"])
        assert guard.is_admitted("ewr", "flights")
        assert clusters.routes()["ewr", "flights"].via == ()
        steady_ms += route_guard.READ_AGAIN_AFTER_MS
        clusters.others = {("far", "flights"): replace(far, is_proposed=False, proposed_at_ms=0)}
        await guard.admit(ewr, await ewr.metadata(), ["flights"])
        assert [each.cluster_id for each in clusters.routes()["ewr", "flights"].via] == ["id-far"]

    asyncio.run(main())


def test_a_late_worker_joins_what_another_carries_after_a_fresh_look_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        clusters = Clusters(monkeypatch)
        passed_ms = 0
        ewr, agg = (cast(Cluster, FakeCluster(name)) for name in ("ewr", "agg"))
        view = await ewr.metadata()
        first, late, later = (
            RouteGuard(CONFIG, agg, cast(SystemRecords, clusters), lambda: 1000, lambda: passed_ms)
            for _ in range(3)
        )
        for guard in (late, later):
            await guard.admit(ewr, view, [])  # what others tell is read, and remembered for a while
        await first.admit(ewr, view, ["flights"])
        told = list(clusters.told)
        # One that is only proposed does not keep it waiting.
        clusters.others = {key: replace(route, is_proposed=True) for key, route in BACK.items()}
        await late.admit(ewr, view, ["flights"])
        assert late.is_admitted("ewr", "flights") and not late.refusals()
        assert clusters.told == told
        # The first may have died long ago, and another mirror carries against it: it is not joined, and not
        # taken back by one that does not carry, before who does has had its time.
        clusters.others = BACK
        await later.admit(ewr, view, ["flights"])
        assert not later.is_admitted("ewr", "flights")
        assert "would go round" in later.refusals()["ewr", "flights"]
        assert clusters.told == told
        passed_ms += DEAD_AFTER_MS
        await later.admit(ewr, view, ["flights"])
        assert not later.is_admitted("ewr", "flights")
        assert ("ewr", "flights") not in clusters.routes()

    asyncio.run(main())


def test_withdrawn_says_so_and_is_cleared_away_later_by_whoever_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        clusters = Clusters(monkeypatch)
        passed_ms = 0
        ewr, agg = (cast(Cluster, FakeCluster(name)) for name in ("ewr", "agg"))
        view = await ewr.metadata()
        one, other = (
            RouteGuard(CONFIG, agg, cast(SystemRecords, clusters), lambda: 1000, lambda: passed_ms)
            for _ in range(2)
        )
        await one.admit(ewr, view, ["flights"])
        (proposed, claimed, carried, withdrawn) = clusters.told
        assert proposed[0] == claimed[0] == withdrawn[0] != carried[0]
        assert withdrawn[1] == WITHDRAWN and json.loads(claimed[1] or b"")["claimed"] is True
        await other.admit(ewr, view, ["flights"])
        passed_ms += DEAD_AFTER_MS - 1
        await other.admit(ewr, view, ["flights"])
        assert len(clusters.told) == 4
        passed_ms += route_guard.READ_AGAIN_AFTER_MS
        await other.admit(ewr, view, ["flights"])
        assert clusters.told[4:] == [(withdrawn[0], None)]

    asyncio.run(main())


def test_word_of_a_route_to_elsewhere_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of a mirror were changed, which makes a loop with one that carries: it is the newcomer,
    however long it has carried the topic under another name."""

    async def main() -> None:
        clusters = Clusters(monkeypatch)
        elsewhere = Route("id-ewr", "flights", "id-agg", "ewr.flights", "there", 1)
        clusters.told = [(encode_key("ewr", "flights"), encode_value(elsewhere))]
        clusters.others = BACK
        ewr, agg = (cast(Cluster, FakeCluster(name)) for name in ("ewr", "agg"))
        guard = RouteGuard(CONFIG, agg, cast(SystemRecords, clusters), lambda: 1_000)
        await guard.admit(ewr, await ewr.metadata(), ["flights"])
        assert not guard.is_admitted("ewr", "flights") and ("ewr", "flights") in guard.refused
        assert clusters.routes()["ewr", "flights"] == elsewhere, "records of then lie there"
        clusters.others = {}
        await guard.admit(ewr, await ewr.metadata(), ["flights"])
        assert guard.is_admitted("ewr", "flights") and not guard.refused
        told = clusters.routes()["ewr", "flights"]
        assert (told.target_topic, told.since_ms) == ("flights", 1_000)

    asyncio.run(main())


def test_an_opposing_mirror_is_seen_in_time_although_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clusters = Clusters(monkeypatch)
    wall, steady = 10_000_000, 0

    async def story() -> None:
        nonlocal wall, steady
        ewr, agg = (cast(Cluster, FakeCluster(name)) for name in ("ewr", "agg"))
        guard = RouteGuard(CONFIG, agg, cast(SystemRecords, clusters), lambda: wall, lambda: steady)
        view = await ewr.metadata()
        await guard.admit(ewr, view, ["flights"])
        assert guard.is_admitted("ewr", "flights")
        clusters.others = BACK
        wall -= 3_600_000
        steady += route_guard.READ_AGAIN_AFTER_MS
        await guard.admit(ewr, view, ["flights"])
        assert not guard.is_admitted("ewr", "flights"), "it goes round"

    asyncio.run(story())


def test_of_many_topics_some_are_told_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of all would be larger than a target takes; of one topic all goes out together."""

    async def main() -> None:
        clusters, batches = Clusters(monkeypatch), []
        topics = [f"topic-{number}" for number in range(2 * TOLD_AT_ONCE + 1)]

        async def write(topic: str, records: list[Any], *, configs: Mapping[str, str]) -> None:
            batches.append([json.loads(key) for key, _ in records])
            await Clusters.write(clusters, topic, records, configs=configs)

        monkeypatch.setattr(clusters, "write", write)
        ewr, agg = (cast(Cluster, FakeCluster(name)) for name in ("ewr", "agg"))
        guard = RouteGuard(CONFIG, agg, cast(SystemRecords, clusters), lambda: 1_000)
        await guard.admit(ewr, await ewr.metadata(), topics)
        assert all(guard.is_admitted("ewr", topic) for topic in topics)
        assert [len(keys) for keys in batches] == [500, 500, 1] * 2 + [1_000, 1_000, 2]
        for keys in batches[6:]:  # carried, and no longer claimed
            assert {each["topic"] for each in keys if "topic" in each} == {
                each["proposal"][1] for each in keys if "proposal" in each
            }

    asyncio.run(main())


def test_a_topic_that_one_of_two_workers_excludes_stays_told_until_the_leader_excludes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reload reaches one worker after the other: what is told is what the leader shares out."""

    async def main() -> None:
        clusters = Clusters(monkeypatch)
        passed_ms = 0
        ewr, agg = (cast(Cluster, FakeCluster(name)) for name in ("ewr", "agg"))
        leads: dict[str, bool | None] = {"first": None, "second": None}
        first, second = (
            RouteGuard(
                CONFIG,
                agg,
                cast(SystemRecords, clusters),
                lambda: 1000 + passed_ms,
                lambda: passed_ms,
                lambda name=name: leads[name],
            )
            for name in leads
        )
        excluding = replace_topics(["orders"])

        async def look(*guards: RouteGuard) -> None:
            nonlocal passed_ms
            passed_ms += 40_000  # what was told is read again
            for guard in guards:
                topics = [
                    topic for topic in ("flights", "orders") if topic == "orders" or not excludes(guard)
                ]
                await guard.admit(ewr, await ewr.metadata(), topics)

        def excludes(guard: RouteGuard) -> bool:
            return guard.config is excluding

        def told() -> set[str]:
            return {key[1] for key in clusters.routes() if len(key) == 2}

        await look(first, second)
        assert told() == {"flights", "orders"}, "before anybody leads, whoever comes proposes"
        leads |= {"first": False, "second": True}
        first.config = excluding
        await look(first)
        assert told() == {"flights", "orders"}, "the leader's partitions are still carried"
        leads |= {"first": True, "second": False}
        await look(first)
        assert told() == {"orders"}, "free at the leader's next look"
        await look(second, first, second)
        assert told() == {"orders"}, "who does not lead tells nothing again"
        assert not second.is_admitted("ewr", "flights") and second.is_admitted("ewr", "orders")
        leads |= {"first": False, "second": True}
        await look(second)
        assert told() == {"flights", "orders"}, "now its config decides"

    asyncio.run(main())


def replace_topics(include: list[str]) -> Any:
    """CONFIG with other topics of ewr."""
    return parse_config(
        {
            "name": "there",
            "target": {"cluster": "agg", "bootstrap": ["b:1"]},
            "sources": [
                {"cluster": "ewr", "bootstrap": ["a:1"], "topics": {"include": include}},
                {"cluster": "lga", **SOURCE},
            ],
        }
    )


def test_copy_of_the_targets_topic_is_refused_by_its_name_where_nobody_tells_who_writes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other direction's routes may not be read here, or it is another product and tells none."""
    config = parse_config({**CONFIG_FIELDS, "naming": "{cluster}.{topic}"})

    async def main() -> None:
        clusters = Clusters(monkeypatch)
        steady_ms = 0
        ewr, agg = FakeCluster("ewr"), FakeCluster("agg")
        there = {"flights", "ewr.orders"}

        async def topics_of_target(topics: Sequence[str] | None = None, **_: object) -> Any:
            return ClusterMetadata("id-agg", 0, {}, cast(Any, dict.fromkeys(there & set(topics or ()))))

        monkeypatch.setattr(agg, "metadata", topics_of_target)
        target, source = cast(Cluster, agg), cast(Cluster, ewr)
        guard = RouteGuard(config, target, cast(SystemRecords, clusters), lambda: 1_000, lambda: steady_ms)

        async def admit(*topics: str) -> None:
            nonlocal steady_ms
            steady_ms += route_guard.READ_AGAIN_AFTER_MS
            await guard.admit(source, await source.metadata(), topics)

        await admit("orders", "agg.flights", "agg.ewr.orders", "agg.own")
        refused = guard.refusals()
        assert set(refused) == {("ewr", "agg.flights"), ("ewr", "agg.ewr.orders")}
        assert "has the name of a copy of agg/flights" in refused["ewr", "agg.flights"]
        admitted = {name for name in ("orders", "agg.flights", "agg.own") if guard.is_admitted("ewr", name)}
        assert admitted == {"orders", "agg.own"}

        # Another mirror tells that it writes the topic, from elsewhere: it is no copy of the target's.
        clusters.others = {("lga", "x"): Route("id-lga", "x", "id-ewr", "agg.flights", "back", 5)}
        await admit("orders", "agg.flights", "agg.own")
        assert guard.refusals() == {}
        assert guard.is_admitted("ewr", "agg.flights")

        # What is carried already stays, whatever the target has by now.
        there.add("own")
        await admit("orders", "agg.flights", "agg.own")
        assert guard.refusals() == {}

    asyncio.run(main())
