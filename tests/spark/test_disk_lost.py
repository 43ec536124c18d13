"""A source broker's only copy of a topic is gone: the audit names what was acknowledged and never carried."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.audit import job
from millrace.audit.config import AuditConfig, parse_config
from tests.cluster.mirror_process import MirrorProcess
from tests.servers import BrokerProcess
from tests.spark.end_to_end_rows import numbers
from tests.spark.end_to_end_scenario import OLD_MS
from tests.spark.end_to_end_senders import Sender
from tests.spark.end_to_end_truth import Truth
from tests.spark.end_to_end_world import AGGREGATE, DEADLINE_S, EVENTS_TOPIC, Positions, Reader, World, until
from tests.waiting import patience

pytestmark = pytest.mark.java
TOPIC = "flights"
CARRIED, LOST = 300, 120


class Datacenter(World):
    """ewr has two brokers, each with its own disk: the first keeps the events, the second the data."""

    def __init__(self, zookeeper: Any, folder: Path) -> None:
        keep = {"log.retention.ms": -1}
        path = zookeeper.chroot()
        self.folder = folder
        self.brokers = {
            "ewr": BrokerProcess(path, folder / "ewr-1", settings=keep),
            "data": BrokerProcess(path, folder / "ewr-2", broker_id=2, settings=keep),
            AGGREGATE: BrokerProcess(zookeeper.chroot(), folder / AGGREGATE, settings=keep),
        }

    def start(self) -> Datacenter:
        for broker in self.brokers.values():
            broker.launch()
        for broker in self.brokers.values():
            broker.wait_until_serving()
        self.readers = {name: Reader(self.bootstrap(name)) for name in ("ewr", AGGREGATE)}
        admin = AdminClient({"bootstrap.servers": self.bootstrap("ewr")})
        until(
            lambda: len(admin.list_topics(timeout=DEADLINE_S).brokers) == 2,
            lambda: "broker 2 is not there",
        )
        compacted = {"cleanup.policy": "compact,delete"}
        topics = [
            NewTopic(TOPIC, 1, replica_assignment=[[2]]),
            NewTopic(EVENTS_TOPIC, 1, replica_assignment=[[1]], config=compacted),
        ]
        for made in admin.create_topics(topics).values():
            made.result(patience(DEADLINE_S))
        until(lambda: self.readers["ewr"].ends(TOPIC), lambda: f"no topic {TOPIC}")
        self.mirror = MirrorProcess(
            self.folder / "mirror",
            self.bootstrap(AGGREGATE),
            {"ewr": self.bootstrap("ewr")},
            topics=[TOPIC, EVENTS_TOPIC.replace(".", r"\.")],
            discovery_interval_ms=200,
            gaps={"default": "skip"},
        )
        self.mirror.start()
        self.positions = Positions(self.bootstrap(AGGREGATE))
        return self

    def lose_disk(self) -> None:
        """The broker dies, its disk is replaced by an empty one, it comes back."""
        broker = self.brokers["data"]
        broker.kill()
        shutil.rmtree(broker.data)
        broker.start()

        def is_empty() -> bool:
            try:
                return self.readers["ewr"].ends(TOPIC) == {0: 0}
            except KafkaException:  # it is not the leader yet
                return False

        until(is_empty, lambda: f"{TOPIC} is not there and empty")

    def config(self, folder: Path) -> AuditConfig:
        return parse_config(
            {
                "clusters": {
                    "ewr": {"bootstrap": [self.bootstrap("ewr")], "tier": "source"},
                    AGGREGATE: {"bootstrap": [self.bootstrap(AGGREGATE)], "tier": "aggregate"},
                },
                "topics": [TOPIC],
                "window": "1s",
                "grace": "0s",
                "state": str(folder / "state"),
                "report": str(folder / "report"),
            }
        )


@pytest.fixture
def datacenter(zookeeper: Any, tmp_path: Path) -> Iterator[Datacenter]:
    world = Datacenter(zookeeper, tmp_path)
    try:
        yield world.start()
    finally:
        world.stop()


def audited(config: AuditConfig) -> dict[str, Any]:
    result = job.run(config, "local[2]")
    assert result.summary is not None, result.problem
    return {**result.summary, "status": result.exit_status}


def named(summary: dict[str, Any]) -> dict[tuple[str, tuple[str, ...]], set[int]]:
    found: dict[tuple[str, tuple[str, ...]], set[int]] = {}
    for loss in summary["losses"]:
        key = (loss["producer"], tuple(loss["lost_between"]))
        found.setdefault(key, set()).update(numbers(loss["sequences"]))
    return found


@pytest.mark.long
def test_what_was_acknowledged_and_never_carried_is_named_when_a_disk_is_lost(
    spark: Any, datacenter: Datacenter, tmp_path: Path
) -> None:
    world, truth, rng = datacenter, Truth(TOPIC), random.Random(7)
    sender = Sender(world, truth, "ewr", "UA@ewr", rng, start_ms=OLD_MS)
    sender.send(CARRIED, 1)
    sender.report()
    world.wait_until_carried(TOPIC, ["ewr"])
    watching = world.config(tmp_path / "watching")
    before = audited(watching)
    assert before["losses"] == [] and before["counts"]["in_flight"] == 0
    world.pause(TOPIC, ["ewr"])
    sender.send(LOST, 1)
    sender.close()
    assert len(sender.stream.acknowledged) == CARRIED + LOST
    lagging = audited(watching)
    assert lagging["losses"] == [] and lagging["counts"]["in_flight"] == LOST

    world.lose_disk()
    lost = set(range(CARRIED + 1, CARRIED + LOST + 1))
    first_look = audited(world.config(tmp_path / "first-look"))
    assert named(first_look) == {("UA@ewr", ("produced", "ewr")): lost}
    assert first_look["status"] == 1
    assert first_look["counts"] | {"seen": {}} == {
        "acknowledged": CARRIED + LOST,
        "seen": {},
        "missing": LOST,
        "duplicates": 0,
        "unreported": 0,
        "unknown": 0,
        "explained": 0,
        "in_flight": 0,
    }
    assert first_look["counts"]["seen"] == {"ewr": 0, AGGREGATE: CARRIED}
    asleep = world.config(tmp_path / "asleep")  # it looks again when the new log has outgrown the old one
    shutil.copytree(tmp_path / "watching" / "state", tmp_path / "asleep" / "state")
    after = audited(watching)
    # One that had looked before knows that the log was cut, and nobody can tell it what stood there since.
    assert after["losses"] == [] and after["counts"]["unknown"] == LOST and after["status"] == 2
    assert [each["reason"] for each in after["reasons"]] == ["part of tier ewr could not be read: truncated"]
    details = pq.read_table(Path(watching.report) / "reconciliation.parquet")["detail"].to_pylist()
    doubted = [each for detail in details for each in json.loads(detail).get("unknown", ())]
    assert set(numbers(doubted)) == lost

    # The topic lives on: what comes now is carried, and nothing of the past is forgotten.
    world.resume(TOPIC, ["ewr"])
    again = Sender(world, truth, "ewr", "AA@ewr", rng, start_ms=OLD_MS)
    again.send(CARRIED + 50, 1)
    again.close()
    until(
        lambda: {end for end, _ in world.positions.known().values()} >= {CARRIED + 50},
        lambda: f"{world.positions.known()}; {world.mirror.log[-2000:]}",
    )
    for known in (world.config(tmp_path / "later"), watching, asleep):
        later = audited(known)
        assert named(later) == {("UA@ewr", ("produced", "ewr")): lost}
        assert (later["counts"]["missing"], later["counts"]["unknown"]) == (LOST, 0)
