"""The four pairs of clusters that a mirror is tested between: Millrace and Apache Kafka as source and as
target.

`@in_pairs("kafka-millrace", "millrace-kafka")` runs a test once in each named pair (source-target) and
gives it the fixture `pair`. `make test` runs the first that is named, the others are marked `long`.
`MILLRACE_PAIRS=all` runs every such test in all four (`make test-pairs`), `MILLRACE_PAIRS=kafka-kafka,…` in
the pairs that it lists.

The servers are shared by the whole session, started when the first test asks for them, and must be left
running and as they are: a test uses topics, mirrors and groups of its own (`pair.unique`), and a mirror's
include patterns match nothing but its test's topics. With `mortal=True` they are the module's own: its tests
kill, freeze and move them, and leave them running. Clusters of several brokers are in
`tests/cluster/several_brokers.py`; `second_source` is another cluster of the source's kind.

Where not all four make sense, `only=` says so: a cluster that wants TLS and logins is Apache Kafka, because
our broker has no such listeners (test_mirror_security). What is about one kind alone has no pair: an
authorizer's permissions, an old broker without transactions (test_mirror_check).
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from millrace.broker.client.cluster import Cluster
from tests.cluster.mirror_process import MirrorProcess
from tests.kafka_fixture import SAME_SETTINGS
from tests.peers.kafka import TEST_JVM_OPTIONS, KafkaPeer
from tests.servers import BrokerProcess, ZooKeeper

Kind = Literal["millrace", "kafka"]

PAIRS = ("millrace-millrace", "kafka-millrace", "millrace-kafka", "kafka-kafka")
"""Source-target."""

SOURCE_NAME, TARGET_NAME, SECOND_SOURCE_NAME = "src", "dst", "src-too"
"""What the clusters are called in configs and positions."""

SETTINGS = SAME_SETTINGS | {"group.min.session.timeout.ms": "1000"}
"""A worker that is killed may be missed as soon as its test likes."""

MORTAL_KAFKA = SETTINGS | {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "300"}
"""A killed broker is let in again when its session is over, which is 9 s otherwise."""

MORTAL_MILLRACE = SETTINGS | {"log.retention.check.interval.ms": "3600000"}
"""Nothing is flushed before it is lost: a look at what is idle would."""

EARLY_RETENTION = {"log.initial.task.delay.ms": "1000"}
"""Apache Kafka first looks for what has expired 30 s after its start otherwise."""

SMALL_HEAP = tuple("-Xmx320M" if option.startswith("-Xmx") else option for option in TEST_JVM_OPTIONS)

_numbers = itertools.count(1)
_session = secrets.token_hex(3)


@dataclass(frozen=True)
class End:
    """One cluster of a pair; `data` holds its partitions' files."""

    kind: Kind
    name: str
    bootstrap: str
    data: Path
    server: BrokerProcess | KafkaPeer

    @property
    def pid(self) -> int:
        """Of the server's process, which runs."""
        process = self.server.process
        assert process is not None
        return process.pid

    def cluster(self) -> Cluster:
        """A new client, to be used with `async with`."""
        return Cluster(self.name, [self.bootstrap])

    def log_folder(self, topic: str, partition: int) -> Path:
        """Where the files of a partition (`*.log`, `*.index`, …) lie."""
        return self.data / f"{topic}-{partition}"


@dataclass
class Pair:
    """A source and a target, and the mirrors that a test starts between them (ended with the test)."""

    name: str
    source: End
    target: End
    folder: Path
    mirrors: list[MirrorProcess] = field(default_factory=list)

    def unique(self, stem: str) -> str:
        """A name that nothing else in this session has; safe in a regular expression."""
        return f"{stem}-{_session}-{next(_numbers)}"

    def mirror(
        self, topics: Sequence[str], *, start: bool = True, also: Sequence[End] = (), **more: Any
    ) -> MirrorProcess:
        """A mirror of these topics (full names, not patterns), by default with a name of its own and started.

        `also`: further sources. `more`: further keys of the config, as `MirrorProcess` takes them. Several
        workers of one mirror are several calls with the same `name`.
        """
        process = MirrorProcess(
            self.folder / f"mirror-{len(self.mirrors)}",
            self.target.bootstrap,
            {each.name: each.bootstrap for each in (self.source, *also)},
            topics=[re.escape(topic) for topic in topics],
            target_name=self.target.name,
            **{"name": self.unique("mirror"), **more},
        )
        self.mirrors.append(process)
        return process.start() if start else process

    def stop_mirrors(self) -> None:
        for mirror in self.mirrors:
            mirror.kill()


class _Wanted(NamedTuple):
    name: str
    whose_source: str
    whose_target: str


def in_pairs(
    *names: str, mortal: bool = False, target: str = "", only: Sequence[str] = PAIRS
) -> Callable[[Any], Any]:
    """Decorator: the test runs in each of these pairs, or in those that MILLRACE_PAIRS says; never in one
    that is not in `only`. `mortal`: between servers that it may kill. `target`: to targets of the module's
    own, its fixtures `<target>_millrace_target` and `<target>_kafka_target`."""
    whose = "mortal" if mortal else "pair"
    chosen = [_Wanted(name, whose, target or whose) for name in _chosen(names) if name in only]
    parameters = [_parameter(each, is_long=number > 0 and not _asked()) for number, each in enumerate(chosen)]

    def decorate(test: Any) -> Any:
        return pytest.mark.pairs(pytest.mark.parametrize("pair", parameters, indirect=True)(test))

    return decorate


def _asked() -> str:
    return os.environ.get("MILLRACE_PAIRS", "")


def _chosen(names: Sequence[str]) -> Sequence[str]:
    asked = _asked()
    chosen = PAIRS if asked == "all" else tuple(filter(None, asked.split(","))) or names
    if unknown := set(chosen) - set(PAIRS):
        raise ValueError(f"no such pair: {', '.join(sorted(unknown))}; the pairs are {', '.join(PAIRS)}")
    return chosen


def _parameter(wanted: _Wanted, *, is_long: bool) -> Any:
    marks = [pytest.mark.java]
    marks += [pytest.mark.kafka] if "kafka" in wanted.name else []
    marks += [pytest.mark.long] if is_long else []
    return pytest.param(wanted, id=wanted.name, marks=marks)


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """The pair that `in_pairs` chose."""
    wanted: _Wanted = request.param
    source_kind, target_kind = wanted.name.split("-")
    source = request.getfixturevalue(f"{wanted.whose_source}_{source_kind}_source")
    target = request.getfixturevalue(f"{wanted.whose_target}_{target_kind}_target")
    made = Pair(wanted.name, source, target, tmp_path)
    try:
        yield made
    finally:
        made.stop_mirrors()


@pytest.fixture(scope="session")
def pair_millrace_source(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    yield from _millrace(zookeeper, tmp_path_factory.mktemp("pair-source"), SOURCE_NAME)


@pytest.fixture(scope="session")
def pair_millrace_target(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    yield from _millrace(zookeeper, tmp_path_factory.mktemp("pair-target"), TARGET_NAME)


@pytest.fixture(scope="session")
def pair_kafka_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    yield from _kafka(tmp_path_factory.mktemp("pair-kafka-source"), SOURCE_NAME)


@pytest.fixture(scope="session")
def pair_kafka_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    yield from _kafka(tmp_path_factory.mktemp("pair-kafka-target"), TARGET_NAME)


@pytest.fixture
def second_source(pair: Pair, request: pytest.FixtureRequest) -> End:
    """Another cluster of the source's kind, shared as the pair's are."""
    found: End = request.getfixturevalue(f"pair_{pair.source.kind}_second_source")
    return found


@pytest.fixture(scope="session")
def pair_millrace_second_source(
    zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[End]:
    yield from _millrace(zookeeper, tmp_path_factory.mktemp("pair-second-source"), SECOND_SOURCE_NAME)


@pytest.fixture(scope="session")
def pair_kafka_second_source(kafka_peer: KafkaPeer) -> End:
    return End("kafka", SECOND_SOURCE_NAME, kafka_peer.bootstrap, kafka_peer.directory / "data", kafka_peer)


@pytest.fixture(scope="module")
def mortal_millrace_source(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    folder = tmp_path_factory.mktemp("mortal-source")
    yield from _millrace(zookeeper, folder, SOURCE_NAME, MORTAL_MILLRACE)


@pytest.fixture(scope="module")
def mortal_millrace_target(zookeeper: ZooKeeper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    folder = tmp_path_factory.mktemp("mortal-target")
    yield from _millrace(zookeeper, folder, TARGET_NAME, MORTAL_MILLRACE)


@pytest.fixture(scope="module")
def mortal_kafka_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    yield from _kafka(tmp_path_factory.mktemp("mortal-kafka-source"), SOURCE_NAME, MORTAL_KAFKA)


@pytest.fixture(scope="module")
def mortal_kafka_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[End]:
    yield from _kafka(tmp_path_factory.mktemp("mortal-kafka-target"), TARGET_NAME, MORTAL_KAFKA)


def _millrace(
    zookeeper: ZooKeeper, folder: Path, name: str, settings: Mapping[str, str] = SETTINGS
) -> Iterator[End]:
    broker = BrokerProcess(zookeeper.chroot(), folder, settings=settings)
    try:
        broker.start()
        yield End("millrace", name, broker.bootstrap, broker.data, broker)
    finally:
        broker.kill()


def _kafka(folder: Path, name: str, settings: Mapping[str, str] = SETTINGS) -> Iterator[End]:
    with KafkaPeer(folder, settings={**settings, **EARLY_RETENTION}, jvm_options=SMALL_HEAP) as peer:
        yield End("kafka", name, peer.bootstrap, folder / "data", peer)
