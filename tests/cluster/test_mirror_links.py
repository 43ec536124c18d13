"""The way to the target swallows an answer, becomes slow, or ends at a full disk, or that of a commit to its
markers is held up, under a running mirror: every record is there once and in order, and nothing is given up.

The target is a server of this module's own, reached through a proxy by everybody. Faults at random are in
test_mirror_faults.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.mirror_faults.links import ProxyLinks
from tests.cluster.mirror_process import MirrorProcess
from tests.cluster.test_points_mirror import end_of_positions, open_on, position
from tests.cluster.transactional import create_topic, read
from tests.pairs import SETTINGS, SMALL_HEAP, SOURCE_NAME, TARGET_NAME, End, Kind, Pair, in_pairs
from tests.peers.kafka import KafkaPeer
from tests.points.fault import FaultAt, until
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess, ZooKeeper

TARGET, TEST, ANYBODY = "target", "test", ""
"""Nodes of the network. The mirror is anybody: it need not be known before it connects."""

SLOW_BYTES_PER_S = 1_000_000
PARTITIONS = 8
# Known by its name it waits for no session to end. It tries to fence its predecessor for half of one.
NAMED = {"instance_id": "one", "session_timeout_ms": 3_000, "rebalance_timeout_ms": 10_000}
ALL = 1_000_000

to_each_target = in_pairs("millrace-millrace", "millrace-kafka", target="proxied")


class ProxiedBroker(BrokerProcess):
    """Its clients, and itself, find it behind the proxy."""

    links: ProxyLinks

    @property
    def reached(self) -> str:
        return self.links.endpoint(TARGET, self.port).reached

    def command(self) -> list[str]:
        return [*super().command(), "--advertised", self.reached]

    def launch(self) -> None:
        super().launch()
        assert self.process is not None
        self.links.runs(TARGET, self.process.pid)


class ProxiedKafka(KafkaPeer):
    """The same of Apache Kafka."""

    links: ProxyLinks

    @property
    def reached(self) -> str:
        return self.links.endpoint(TARGET, self.port).reached

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def _write_properties(self) -> Path:
        controller = f"127.0.0.1:{self._controller_port}"
        self.settings["advertised.listeners"] = f"PLAINTEXT://{self.reached},CONTROLLER://{controller}"
        return super()._write_properties()

    def launch(self) -> None:
        super().launch()
        assert self.pid is not None
        self.links.runs(TARGET, self.pid)


Target = ProxiedBroker | ProxiedKafka


@pytest.fixture(scope="module")
def proxied_millrace_target(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    folder = tmp_path_factory.mktemp("linked-target")
    yield from proxied("millrace", ProxiedBroker(zookeeper.chroot(), folder, settings=SETTINGS))


@pytest.fixture(scope="module")
def proxied_kafka_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    folder = tmp_path_factory.mktemp("linked-kafka-target")
    yield from proxied("kafka", ProxiedKafka(folder, settings=SETTINGS, jvm_options=SMALL_HEAP))


def proxied(kind: Kind, server: Target) -> Iterator[End]:
    server.links = ProxyLinks()
    server.links.runs(TEST, os.getpid())
    try:
        server.start()
        yield End(kind, TARGET_NAME, server.reached, server.data, server)
    finally:
        server.kill()
        server.links.close()


@pytest.fixture
def target(pair: Pair) -> Target:
    server = pair.target.server
    assert isinstance(server, ProxiedBroker | ProxiedKafka)
    return server


def produce(pair: Pair, topic: str, values: list[bytes], partition: int = 0) -> None:
    """A batch for each ten."""
    with RawClient(pair.source.server.port) as client:
        for start in range(0, len(values), 10):
            now_ms = time.time_ns() // 1_000_000
            batch = batch_of(*values[start : start + 10], timestamp_ms=now_ms)
            (answer,) = client.produce({(topic, partition): batch}, acks=-1)
            assert answer.error_code == 0


def numbers(first: int, count: int, size: int = 0) -> list[bytes]:
    return [b"%d" % number + b"." * size for number in range(first, first + count)]


def carried(target: Target, topic: str, partitions: int = 1) -> list[bytes]:
    return read(target, topic, ALL, partitions=partitions)


def only_partition(mirror: MirrorProcess) -> dict[str, Any]:
    """Of its status; {} before it has it."""
    return dict(next(iter(mirror.status().get("partitions", ())), {}))


@pytest.mark.safety
@to_each_target
def test_commit_whose_answer_the_link_swallows_is_asked_for_again_and_repeats_nothing(
    pair: Pair, target: Target, fault_at: FaultAt
) -> None:
    """The target has committed, and the connection is gone before the mirror can know."""
    topic = pair.unique("cut")
    create_topic(pair.source.server, topic)
    produce(pair, topic, numbers(0, 30))
    mirror = pair.mirror([topic], start=False)
    fault = fault_at(mirror, "fence passed, end not asked for", "wait")
    mirror.start()
    fault.wait_until_reached()
    target.links.cut(TARGET, ANYBODY, both_ways=False)
    fault.go()
    until(lambda: carried(target, topic) == numbers(0, 30), "the target has committed")
    target.links.drop(ANYBODY, TARGET)
    target.links.heal(TARGET, ANYBODY)
    produce(pair, topic, numbers(30, 30))
    until(lambda: len(carried(target, topic)) >= 60, "they go on", logs_of=[mirror])
    assert carried(target, topic) == numbers(0, 60)


@pytest.mark.safety
@to_each_target
def test_at_least_once_a_batch_whose_answer_the_link_swallows_is_sent_again_and_is_there_once(
    pair: Pair, target: Target
) -> None:
    """The target has appended it, and the ones that went out behind it, and the connection is gone before the
    mirror can know."""
    topic = pair.unique("unheard")
    create_topic(pair.source.server, topic)
    produce(pair, topic, numbers(0, 30))
    # Each batch goes out by itself. No session ends meanwhile: that would repeat, and rightly.
    group = {"session_timeout_ms": 60_000, "rebalance_timeout_ms": 60_000}
    mirror = pair.mirror([topic], delivery="at_least_once", batches="pass_through", group=group)
    until(lambda: only_partition(mirror).get("position") == 30, "the first are carried", logs_of=[mirror])
    target.links.cut(TARGET, ANYBODY, both_ways=False)
    produce(pair, topic, numbers(30, 50))
    until(lambda: len(carried(target, topic)) > 30, "the target has appended", logs_of=[mirror])
    assert only_partition(mirror)["position"] == 30
    retries = mirror.status()["target"]["retries"]
    target.links.drop(ANYBODY, TARGET)
    target.links.heal(TARGET, ANYBODY)
    produce(pair, topic, numbers(80, 30))
    until(lambda: only_partition(mirror).get("position") == 110, "they go on", logs_of=[mirror])
    assert carried(target, topic) == numbers(0, 110)
    # Otherwise nothing was tried.
    assert mirror.status()["target"]["retries"] > retries


@pytest.mark.safety
@to_each_target
def test_heir_waits_for_the_markers_of_a_commit_that_was_decided_before_its_owner_died(
    pair: Pair, target: Target, fault_at: FaultAt
) -> None:
    """The positions that it holds stand in the log, and nobody is shown them yet: who took those before them
    would begin below."""
    topic, name = pair.unique("decided"), pair.unique("mirror")
    create_topic(pair.source.server, topic)
    produce(pair, topic, numbers(0, 30))
    mirror = pair.mirror([topic], start=False, name=name, group=NAMED)
    with markers_held(target, topic, mirror, fault_at):
        until(lambda: is_decided(pair, topic), "the commit is decided")
        mirror.kill()
        assert carried(target, topic) == []
        produce(pair, topic, numbers(30, 30))
        written = end_of_positions(pair, name)
        mirror.start()
        until(lambda: end_of_positions(pair, name) > written, "the heir has begun to read the positions")
        assert is_decided(pair, topic)
    until(lambda: len(carried(target, topic)) >= 60, "all is carried", logs_of=[mirror])
    assert carried(target, topic) == numbers(0, 60)
    until(lambda: position(pair, name, topic) == 60, "the position is the end")


def is_decided(pair: Pair, topic: str) -> bool:
    return "PrepareCommit" in {each.state for each in open_on(pair, topic)}


@contextmanager
def markers_held(target: Target, topic: str, mirror: MirrorProcess, fault_at: FaultAt) -> Iterator[None]:
    """Starts the mirror; within, it has committed what was to be carried, and no marker says so."""
    if isinstance(target, ProxiedKafka):  # which sends them to itself as to any other broker
        fault = fault_at(mirror, "fence passed, end not asked for", "wait")
        mirror.start()
        fault.wait_until_reached()
        target.links.cut(TARGET, TARGET, both_ways=True)
        fault.go()
    else:
        held = fault_at(target, "commit decided, its markers on their way", "hold", only=f"=True.*{topic}")
        target.stop()
        target.start()
        mirror.start()
        held.wait_until_reached()
    try:
        yield
    finally:
        if isinstance(target, ProxiedKafka):
            target.links.heal(TARGET, TARGET)
        else:
            held.go()


class Hurried(MirrorProcess):
    """It has found the target quick, and gives a transaction a second instead of twelve."""

    def command(self) -> list[str]:
        words = super().command()
        program = (
            "import sys; from millrace.mirror.delivery import transaction; "
            "transaction.FIRST_SIZE, transaction.MIN_SIZE = 8 << 20, 64 << 10; "
            "transaction.GIVE_UP_AFTER_MS = 1_200; "
            "transaction.FAILING_AFTER_MS = 500; "
            "from millrace.deploy.cli import main; sys.exit(main())"
        )
        return [sys.executable, "-c", program, *words[words.index("mirror") :]]


@to_each_target
def test_target_that_became_slow_gets_smaller_transactions_until_they_are_in_time(
    pair: Pair, target: Target
) -> None:
    """At 1 MB/s what is sent at once, a batch of each partition, takes longer than a transaction may last."""
    topic = pair.unique("slow")
    create_topic(pair.source.server, topic, PARTITIONS)
    values = [numbers(10 * each, 10, size=20_000) for each in range(PARTITIONS)]
    for partition, sent in enumerate(values):
        produce(pair, topic, sent, partition)
    mirror = Hurried(
        pair.folder / "hurried",
        target.reached,
        {SOURCE_NAME: pair.source.bootstrap},
        topics=[re.escape(topic)],
        target_name=TARGET_NAME,
        name=pair.unique("mirror"),
        lanes=1,
    )
    pair.mirrors.append(mirror)
    target.links.slow(TARGET, SLOW_BYTES_PER_S)
    try:
        mirror.start()
        until(
            lambda: len(carried(target, topic, PARTITIONS)) >= 10 * PARTITIONS,
            "all is carried",
            logs_of=[mirror],
        )
    finally:
        target.links.slow(TARGET, None)
    there = carried(target, topic, PARTITIONS)
    for sent in values:
        assert [each for each in there if each in set(sent)] == sent
    assert len(there) == 10 * PARTITIONS
    # Otherwise nothing was tried.
    assert mirror.status()["transactions"]["aborted"] > 0


@pytest.mark.safety
@to_each_target
def test_target_whose_disk_is_full_is_waited_for_and_nothing_is_given_up(pair: Pair, target: Target) -> None:
    """The system lets no file grow beyond what the topic's log has by now: for the broker that is no room.
    Apache Kafka ends, when that is its only disk, and is started again."""
    topic = pair.unique("full")
    create_topic(pair.source.server, topic)
    # More than any other file of the broker has, and less than a segment.
    first, then = numbers(0, 30, size=20_000), numbers(30, 30)
    produce(pair, topic, first)
    mirror = pair.mirror([topic])
    until(lambda: carried(target, topic) == first, "the first are carried", logs_of=[mirror])
    assert target.process is not None
    (log,) = (target.data / f"{topic}-0").glob("*.log")
    soft, hard = resource.prlimit(target.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(target.process.pid, resource.RLIMIT_FSIZE, (log.stat().st_size, hard))
    try:
        produce(pair, topic, then)

        ends = isinstance(target, ProxiedKafka)

        def is_told() -> bool:
            reasons = [each["reason"] for each in mirror.status()["troubles"]]
            refusal = f"the target refuses {topic}-0: "
            return bool(reasons) if ends else any(each.startswith(refusal) for each in reasons)

        if ends:
            until(lambda: target.process and target.process.poll() is not None, "Apache Kafka has ended")
        until(is_told, "the trouble is told", logs_of=[mirror, target])
        assert only_partition(mirror)["state"] == "running"
    finally:
        if target.process.poll() is None:
            resource.prlimit(target.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
        else:
            target.start()
    until(lambda: len(carried(target, topic)) >= 60, "all is carried", logs_of=[mirror])
    assert carried(target, topic) == first + then
    assert "gap" not in only_partition(mirror)
    until(lambda: not mirror.status()["troubles"], "the trouble is over", logs_of=[mirror])
