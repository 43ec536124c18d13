"""The mirror's memory, smaller than `make bench-mirror-memory`: flat while gigabytes pass, bounded when
nothing can leave, also by the count of proxies between it and its sources. The pair's servers are frozen for
seconds, and then left as they were."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.compression import LZ4
from tests.benchmarks.mirror.memory import COPIES, TOLERANCE, Flat, Stalled, exit_status, flat, stalled
from tests.benchmarks.mirror.workloads import kilobyte_batch
from tests.benchmarks.peers.kafka_load import raw_produce
from tests.cluster.mirror_faults.links import CountingLinks
from tests.cluster.mirror_process import MirrorProcess, end_offset
from tests.cluster.test_mirror_links import ANYBODY, ProxiedBroker
from tests.cluster.test_mirror_links import TARGET as BEHIND_A_PROXY
from tests.cluster.transactional import create_topic
from tests.pairs import SETTINGS, TARGET_NAME, End, Kind, Pair, in_pairs
from tests.servers import ZooKeeper
from tests.waiting import until

MEGABYTE = 1_000_000
ALLOWED = 16 << 20
BY_DEFAULT = 64 << 20
"""`in_flight_bytes`, of all sources together."""
BACKLOG = BY_DEFAULT * 3 // 2
ANSWER_HEADS = 256 << 10
"""What is in answers beside batches, and in answers about topics, in seconds."""
RECORDS, PARTITIONS, MOST_SOURCES = 64, 4, 10
HOLD_S = 2.5
"""Of a target that takes nothing other rules are in force after a second."""

DELIVERIES = {"millrace-millrace": ("exactly_once",), "kafka-kafka": ("at_least_once",)}
"""By `make test-pairs` both in every pair."""


@pytest.mark.long
@in_pairs("millrace-millrace", "kafka-kafka")
def test_memory_stays_flat(pair: Pair) -> None:
    found = flat(
        pair.folder,
        pair.source.server,
        pair.target.server,
        total=1_200 * MEGABYTE,
        step=200 * MEGABYTE,
        delivery="exactly_once",
        say=print,
    )
    assert found.deviation <= TOLERANCE, found.means


@in_pairs(*DELIVERIES)
def test_stalled_target_does_not_fill_memory(pair: Pair) -> None:
    all_asked = os.environ.get("MILLRACE_PAIRS")
    for delivery in ("exactly_once", "at_least_once") if all_asked else DELIVERIES[pair.name]:
        found = stalled(
            pair.folder / delivery,
            pair.source.server,
            pair.target.server,
            allowed=ALLOWED,
            delivery=delivery,
            least_s=3.0,
        )
        print(delivery, found)
        assert found.in_flight <= ALLOWED
        assert found.growth <= COPIES * ALLOWED
        # Otherwise nothing was tried.
        assert found.in_flight > ALLOWED // 4


@pytest.fixture
def counted(zookeeper: ZooKeeper, tmp_path: Path) -> Iterator[list[ProxiedBroker]]:
    """Sources behind proxies that count, which are not started."""
    links = CountingLinks()
    brokers = [
        ProxiedBroker(zookeeper.chroot(), tmp_path / f"source-{number}", settings=SETTINGS)
        for number in range(MOST_SOURCES)
    ]
    for broker in brokers:
        broker.links = links
    yield brokers
    for broker in brokers:
        broker.kill()
    links.close()


@contextmanager
def frozen(end: End) -> Iterator[None]:
    os.kill(end.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(end.pid, signal.SIGCONT)


@pytest.mark.java
@pytest.mark.parametrize(
    ("kind", "delivery", "source_count"),
    [
        ("millrace", "at_least_once", 3),
        pytest.param("kafka", "exactly_once", MOST_SOURCES, marks=[pytest.mark.kafka, pytest.mark.long]),
    ],
)
def test_several_sources_send_no_more_than_is_allowed_to_a_mirror_whose_target_takes_nothing(
    kind: Kind,
    delivery: str,
    source_count: int,
    counted: list[ProxiedBroker],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """By the count of proxies: of what has passed them since the target stands still it has taken nothing."""
    target: End = request.getfixturevalue(f"pair_{kind}_target")
    sources, topic = counted[:source_count], f"counted-{time.time_ns()}"
    batch = kilobyte_batch(RECORDS, LZ4)
    for source in sources:
        source.start()
        create_topic(source, topic, PARTITIONS)
    links = sources[0].links
    assert isinstance(links, CountingLinks)
    mirror = MirrorProcess(
        tmp_path / "mirror",
        target.bootstrap,
        {f"source-{number}": source.reached for number, source in enumerate(sources)},
        topics=[topic],
        target_name=TARGET_NAME,
        name=topic,
        delivery=delivery,
        group={"session_timeout_ms": 60_000, "rebalance_timeout_ms": 60_000},
    ).start()

    def positions() -> list[int]:
        return [
            each["position"] for each in mirror.status().get("partitions", []) if each["state"] == "running"
        ]

    def passed() -> int:
        return links.passed[BEHIND_A_PROXY, ANYBODY] - before

    try:
        until(lambda: len(positions()) == source_count * PARTITIONS, "all are carried", logs_of=[mirror])
        links.cut(BEHIND_A_PROXY, ANYBODY, both_ways=False)
        for source in sources:
            count = BACKLOG // source_count // len(batch) * RECORDS
            raw_produce(
                source.port, topic, batch, count, acks=1, partitions=PARTITIONS, connections=PARTITIONS
            )
        with frozen(target):
            before = links.passed[BEHIND_A_PROXY, ANYBODY]
            links.heal(BEHIND_A_PROXY, ANYBODY)
            until(lambda: passed() > BY_DEFAULT * 3 // 4, "the mirror fills up", logs_of=[mirror])
            time.sleep(HOLD_S)
            under_way = passed()
        ends = [each for source in sources for each in asyncio.run(ends_of(source, topic))]
        until(lambda: sorted(positions()) == sorted(ends), "all has arrived", logs_of=[mirror])
        assert mirror.status()["transactions"]["aborted"] == 0, "what is carried again passes twice"
        # A batch comes whole.
        assert under_way <= BY_DEFAULT + source_count * len(batch) + ANSWER_HEADS
    finally:
        mirror.kill()


async def ends_of(source: ProxiedBroker, topic: str) -> list[int]:
    async with Cluster("source", [source.bootstrap]) as cluster:
        return [await end_offset(cluster, topic, number) for number in range(PARTITIONS)]


def test_the_verdict_is_the_exit_status() -> None:
    level, held = Flat([50.0, 100.0, 104.0, 98.0], warm_up_steps=1), Stalled(15 << 20, 40 << 20, ALLOWED)
    assert exit_status(level, held) == 0
    assert exit_status(Flat([100.0, 100.0, 112.0], warm_up_steps=0), held) == 1
    for wrong in (
        Stalled(ALLOWED + 1, 40 << 20, ALLOWED),
        Stalled(15 << 20, COPIES * ALLOWED + 1, ALLOWED),
        Stalled(ALLOWED // 4, 0, ALLOWED),
    ):
        assert exit_status(level, wrong) == 1
