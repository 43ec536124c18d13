"""A source that a reload takes out of the config, while the group shares partitions out."""

from __future__ import annotations

import asyncio

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.mirror.config import parse_config
from millrace.mirror.delivery.beginnings import Begun
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.delivery.transactional_lane import TransactionalLane
from millrace.mirror.sharing.assignment import decode_claim
from millrace.mirror.sources.source import SourceReader
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.worker import Worker
from tests.unit.mirror.pipeline_stage import ORIGIN
from tests.waiting import patience

CONFIG = parse_config(
    {
        "name": "aggregate",
        "delivery": "at_least_once",
        "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
        "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
    }
)


def test_partitions_that_come_while_their_source_is_given_up_are_given_up_too() -> None:
    async def story() -> None:
        clusters = {name: Cluster(name, ["127.0.0.1:1"], request_timeout_ms=100) for name in ("agg", "ewr")}
        worker = Worker(CONFIG, clusters["agg"], {"ewr": clusters["ewr"]}, lambda: 1_000)
        async with asyncio.timeout(patience()), asyncio.TaskGroup() as worker._tasks:
            worker._begin([SourcePartition("ewr", "flights", 0)], Positions(), Begun(), set())
            leaving = asyncio.create_task(worker.remove_source("ewr"))
            await asyncio.sleep(0)
            worker._begin([SourcePartition("ewr", "flights", 1)], Positions(), Begun(), set())
            later = worker.owned[SourcePartition("ewr", "flights", 1)]
            await leaving
            left = dict(worker.owned)
            later.close()  # or what finds its start would go on
        await clusters["agg"].close()
        assert not left

    asyncio.run(story())


def test_claim_names_the_sources_that_the_worker_reads_now() -> None:
    """The leader gives it partitions of no other."""

    async def story() -> None:
        clusters = {name: Cluster(name, ["127.0.0.1:1"], request_timeout_ms=100) for name in ("agg", "ewr")}
        worker = Worker(CONFIG, clusters["agg"], {"ewr": clusters["ewr"]}, lambda: 1_000)
        ((_, claim),) = worker._claim()
        assert decode_claim(claim).sources == {"ewr"}
        await worker.remove_source("ewr")
        ((_, claim),) = worker._claim()
        assert decode_claim(claim).sources == frozenset()
        await clusters["agg"].close()

    asyncio.run(story())


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_source_and_lane_of_a_partition_hear_that_it_has_moved(
    delivery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its fetch loop would wait although there is room, and its position would not be written."""
    heard: list[object] = []
    monkeypatch.setattr(SourceReader, "moved", lambda _, pipeline: heard.append(("source", pipeline)))
    monkeypatch.setattr(TransactionalLane, "moved", lambda _, pipeline: heard.append(("lane", pipeline)))

    async def story() -> None:
        clusters = {name: Cluster(name, ["127.0.0.1:1"], request_timeout_ms=100) for name in ("agg", "ewr")}
        config = CONFIG.model_copy(update={"delivery": delivery})
        worker = Worker(config, clusters["agg"], {"ewr": clusters["ewr"]}, lambda: 1_000)
        worker.delivery.seated(0, lambda: None)
        async with asyncio.timeout(patience()), asyncio.TaskGroup() as worker._tasks:
            worker._begin([SourcePartition("ewr", "flights", 0)], Positions(), Begun(), set())
            (pipeline,) = worker.owned.values()
            pipeline.adopt(ORIGIN)
            lanes = [("lane", pipeline)] if delivery == "exactly_once" else []
            assert heard == [("source", pipeline), *lanes]
            pipeline.close()  # or what finds its start would go on
        for cluster in clusters.values():
            await cluster.close()

    asyncio.run(story())
