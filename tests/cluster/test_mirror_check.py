"""`millrace mirror check` against real clusters: what it finds, in which line of the config, how it ends."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import ClusterUnreachable
from millrace.broker.protocol.operations import Operation
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror import daemon
from millrace.mirror.checks import check as check_module
from millrace.mirror.checks.check import Finding, Severity, check, refuse_wrong_start, run
from millrace.mirror.config import MirrorConfig, load_config
from tests.cluster.mirror_calls import check as told_by
from tests.cluster.mirror_process import MirrorProcess, send
from tests.conftest import BrokerFactory
from tests.kafka_fixture import JVM_OPTIONS
from tests.pairs import Pair, in_pairs
from tests.peers.kafka import KafkaPeer
from tests.ports import free_port
from tests.raw_client import RawClient
from tests.servers import BrokerProcess, ZooKeeper
from tests.waiting import patience, until, until_async

TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID = 2, 3, 4, 5
ALL, DENY, ALLOW, LITERAL = 2, 2, 3, 3


def write_config(folder: Path, target: str, sources: dict[str, str], topics: list[str], **more: Any) -> Path:
    """A config whose sections have lines of their own: the target line 2, each source one from line 4 on."""
    lines = [
        f"name: {more.pop('name', 'checked')}",
        f"target: {{cluster: agg, bootstrap: ['{target}']}}",
        "sources:",
    ]
    include = ", ".join(f"'{pattern}'" for pattern in topics)
    for name, address in sources.items():
        lines.append(f"  - {{cluster: {name}, bootstrap: ['{address}'], topics: {{include: [{include}]}}}}")
    lines.append("control: {listen: '127.0.0.1:0'}")
    lines += [
        yaml.safe_dump({key: value}, default_flow_style=True).strip("{}\n") for key, value in more.items()
    ]
    path = folder / "mirror.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def findings(path: Path, *severities: Severity) -> list[Finding]:
    """The errors, where no severity is named."""
    wanted = severities or (Severity.ERROR,)
    return [each for each in asyncio.run(check(load_config(path))) if each.severity in wanted]


def make_topics(bootstrap: str, topics: dict[str, tuple[int, dict[str, str]]]) -> None:
    async def make() -> None:
        async with Cluster("made", [bootstrap]) as cluster:
            for name, (partitions, configs) in topics.items():
                await create_topic(cluster, name, partitions, 1, configs)

    asyncio.run(make())


@in_pairs("kafka-millrace", "millrace-kafka")
def test_what_the_target_makes_of_it_is_found_with_its_line(
    pair: Pair, broker_factory: BrokerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stem, other = pair.unique("seen"), broker_factory()
    make_topics(
        pair.source.bootstrap,
        {f"{stem}.wide": (4, {}), f"{stem}.again": (1, {}), f"{stem}.plain": (1, {})},
    )
    make_topics(other.bootstrap, {f"{stem}.wide": (2, {})})
    make_topics(
        pair.target.bootstrap,
        {f"{stem}.wide": (3, {}), f"{stem}.again": (1, {"compression.type": "zstd"})},
    )
    sources = {"one": pair.source.bootstrap, "two": other.bootstrap}
    path = write_config(tmp_path, pair.target.bootstrap, sources, [rf"{stem}\..*"], name=pair.unique("m"))
    renames = f"{{one/{stem}.plain: {stem}.new, one/{stem}.plian: {stem}.other}}"
    path.write_text(f"{path.read_text()}naming: {{rename: {renames}}}\n")
    assert findings(path) == []
    selects = f"selects 3 topics: {stem}.again, {stem}.plain → {stem}.new, {stem}.wide"
    assert selects in [each.message for each in findings(path, Severity.OK)]
    warnings = [str(each) for each in findings(path, Severity.WARNING)]
    for place, sentence in (
        (
            "mirror.yaml:5: sources[1].topics.include",
            f"agg/{stem}.wide: {stem}.wide gets 4 partitions, and its",
        ),
        (
            "mirror.yaml:4: sources[0].topics.include",
            f"agg/{stem}.wide: has 3 partitions, one/{stem}.wide needs 4",
        ),
        (
            "mirror.yaml:4: sources[0].topics.include",
            f"agg/{stem}.again: compression.type zstd makes the target",
        ),
        (
            f"mirror.yaml:7: naming.rename.one/{stem}.plian",
            f"one: {stem}.plian is no topic that is selected now",
        ),
    ):
        assert any(place in line and sentence in line for line in warnings), (place, sentence, warnings)
    assert run(path) == 0
    # A start says the same, and goes on.
    said: list[str] = []
    monkeypatch.setattr(check_module, "log", SimpleNamespace(warning=lambda _, finding: said.append(finding)))
    asyncio.run(refuse_wrong_start(load_config(path)))
    assert said == [line.removeprefix("warning  ") for line in warnings]
    assert any(
        "two" not in line and "mirror.yaml:4: sources[0].topics.include: agg/" in line for line in said
    )


class WithoutTransactions(BrokerProcess):
    """A broker that has never heard of transactions (Apache Kafka before 0.11, and others that speak its
    protocol): they are not among what it says it speaks."""

    LEFT_OUT = ("add_partitions_to_txn", "add_offsets_to_txn", "end_txn", "txn_offset_commit")
    PROGRAM = (
        "import sys; from millrace.broker.server import registry; left_out = sys.argv.pop(1).split(','); "
        "registry.MODULES = tuple(each for each in registry.MODULES "
        "if each.__name__.rpartition('.')[2] not in left_out); "
        "from millrace.deploy import cli; sys.exit(cli.run(sys.argv[1:]))"
    )

    def command(self) -> list[str]:
        python, _, _, *words = super().command()
        return [python, "-c", self.PROGRAM, ",".join(self.LEFT_OUT), *words]


@pytest.mark.java
def test_target_without_the_apis_of_transactions_is_told_and_at_least_once_is_offered(
    broker: BrokerProcess,
    zookeeper: ZooKeeper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    make_topics(broker.bootstrap, {"plain-a": (2, {})})
    target = WithoutTransactions(zookeeper.chroot(), tmp_path / "target").start()
    mirror = MirrorProcess(
        tmp_path / "mirror",
        target.bootstrap,
        {"one": broker.bootstrap},
        topics=["plain-a"],
        delivery="exactly_once",
    )
    try:
        status, said = told_by(mirror)
        assert status == 2
        (found,) = (line for line in said.splitlines() if line.startswith("error"))
        (number,) = mirror.lines_of("delivery")
        assert re.fullmatch(
            rf"error    mirror\.yaml:{number}: delivery: agg: it lacks transactions: .*: "
            "ADD_PARTITIONS_TO_TXN is spoken here in versions 1-3, there in none; choose `delivery: "
            "at_least_once`, which repeats records after a failure",
            found,
        ), found
        process = mirror.start().process
        assert process is not None and process.wait(patience(90)) == 2, mirror.log
        assert mirror.log.splitlines()[-1] == f"millrace mirror: {found.removeprefix('error    ')}"

        # Where the check says nothing (it could not look), the lanes do.
        async def silent(config: MirrorConfig) -> None:
            return None

        monkeypatch.setattr(daemon, "refuse_wrong_start", silent)
        mirror.settings["name"] = "unchecked"  # nobody waits for the seat of the one before
        mirror.rewrite()
        capfd.readouterr()
        assert daemon.run(mirror.config_path) != 0
        last = capfd.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("millrace mirror: target agg lacks what delivery: exactly_once needs (")
        assert last.endswith("set delivery: at_least_once in the mirror's config")

        # What is offered is taken, and works.
        mirror.settings |= {"name": "offered", "delivery": "at_least_once"}
        mirror.rewrite()
        status, said = told_by(mirror)
        assert status == 0 and "transaction" not in said, said
        asyncio.run(carries_a_hundred(mirror, broker, target, "plain-a"))
        assert mirror.terminate() == 0, mirror.log
    finally:
        mirror.kill()
        target.kill()


async def carries_a_hundred(
    mirror: MirrorProcess, source: BrokerProcess, target: BrokerProcess, topic: str
) -> None:
    """Before its start and after it, in both partitions."""
    async with Cluster("one", [source.bootstrap]) as one, Cluster("agg", [target.bootstrap]) as agg:
        numbers: dict[int, list[bytes]] = {0: [], 1: []}
        for number in range(100):
            if number == 50:
                mirror.start()
            value = f"{number}".encode()
            numbers[number % 2].append(value)
            now_ms = time.time_ns() // 1_000_000
            await send(one, topic, number % 2, build_batch([Record(None, value, (), now_ms)]))

        async def are_there() -> dict[int, list[bytes]] | None:
            found: dict[int, list[bytes]] = {0: [], 1: []}
            if topic in (await agg.metadata([topic], max_age_ms=0)).topics:
                async for record in read_topic_to_end(agg, topic, read_committed=False):
                    found[record.partition].append(record.value or b"")
            return found if sum(map(len, found.values())) >= 100 else None

        assert await until_async(are_there, logs_of=[mirror], every_s=0.1) == numbers


@pytest.mark.java
def test_clusters_that_are_away_are_named_with_their_line_and_a_status_of_their_own(
    broker: BrokerProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, broker.bootstrap, {"one": f"127.0.0.1:{free_port()}"}, ["flights"])
    assert run(path) == ClusterUnreachable.exit_status
    said = capfd.readouterr().out
    assert said.startswith(
        "error    mirror.yaml:4: sources[0].bootstrap: one: no server answers; tried 127.0.0.1:"
    )
    assert "ok       agg: answers, with 1 broker" in said


@pytest.mark.java
def test_wanted_rate_is_compared_with_what_round_trip_and_buffers_allow(
    broker: BrokerProcess, broker_factory: BrokerFactory, tmp_path: Path
) -> None:
    path = write_config(tmp_path, broker_factory().bootstrap, {"one": broker.bootstrap}, ["flights"])
    text = path.read_text().replace("cluster: one,", "cluster: one, wanted_mb_per_s: 100000000,")
    path.write_text(text)
    (finding,) = (each for each in findings(path, Severity.WARNING) if "round trip" in each.message)
    assert finding.place == "mirror.yaml:4: sources[0].wanted_mb_per_s"
    assert "100000000 MB/s" in finding.message.replace("1e+08", "100000000")


# --- permissions and transactions, on an Apache Kafka that has an authorizer -----------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaPeer]:
    """Everyone may do everything but what a test denies to everyone. One broker, transactions that want three
    replicas, and defaults of its own for new topics."""
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
        "transaction.state.log.replication.factor": "3",
        "message.max.bytes": "700000",
        "compression.type": "gzip",
    }
    folder = tmp_path_factory.mktemp("guarded")
    with KafkaPeer(folder, settings=settings, jvm_options=JVM_OPTIONS) as peer:
        yield peer


def deny(peer: KafkaPeer, *denied: tuple[int, str, Operation]) -> None:
    """Takes operations on resources (kind, name) from everyone; the rest stays allowed there."""
    creations = []
    for kind, name, operation in denied:
        for permission, what in ((ALLOW, ALL), (DENY, int(operation))):
            creations.append(
                {
                    "resource_type": kind,
                    "resource_name": name,
                    "resource_pattern_type": LITERAL,
                    "principal": "User:ANONYMOUS",
                    "host": "*",
                    "operation": what,
                    "permission_type": permission,
                }
            )
    with RawClient(int(peer.bootstrap.rpartition(":")[2])) as client:
        answer = client.ask(30, 2, creations=creations)
    assert [int(each.error_code) for each in answer.results] == [0] * len(creations)


def messages_once(path: Path, complete: Callable[[list[str]], bool], *severities: Severity) -> list[str]:
    """The findings, errors where no severity is named, once they are complete: an authorizer learns of its
    rules a moment later, of one after the other."""
    said: list[str] = []

    def is_complete() -> bool:
        said[:] = sorted(
            f"{each.place}: {each.where}: {each.message}" for each in findings(path, *severities)
        )
        return complete(said)

    until(is_complete, lambda: f"all findings; there are {said}", within_s=90, every_s=0.2)
    return said


@pytest.mark.java
@pytest.mark.kafka
def test_missing_permissions_on_a_source_are_listed_and_end_the_start(
    guarded: KafkaPeer, broker: BrokerProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_topics(guarded.bootstrap, {name: (1, {}) for name in ("src-a", "src-b", "src-unseen")})
    deny(
        guarded,
        (TOPIC, "src-a", Operation.READ),
        (TOPIC, "src-b", Operation.READ),
        (TOPIC, "src-b", Operation.DESCRIBE_CONFIGS),
        (TOPIC, "src-unseen", Operation.DESCRIBE),
    )
    path = write_config(tmp_path, broker.bootstrap, {"one": guarded.bootstrap}, ["src-[ab]", "src-unseen"])
    place = "mirror.yaml:4: sources[0].topics.include: one: not permitted: "

    def refused(said: list[str]) -> list[str]:
        return [line.removeprefix(place).split(" (")[0] for line in said]

    wanted = [
        "Describe on Topic src-unseen",
        "DescribeConfigs on Topic src-b, src-unseen",
        "Read on Topic src-a, src-b, src-unseen",
    ]
    assert refused(messages_once(path, lambda said: refused(said) == wanted)) == wanted
    capfd.readouterr()
    assert daemon.run(path) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"millrace mirror: {place}") and any(each in last for each in wanted), last


@pytest.mark.java
@pytest.mark.kafka
def test_missing_permissions_on_a_target_are_listed_and_end_the_start(
    guarded: KafkaPeer, broker: BrokerProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "denied"
    make_topics(broker.bootstrap, {"dst-a": (2, {}), "dst-b": (1, {}), "dst-new": (1, {})})
    make_topics(guarded.bootstrap, {"dst-a": (1, {}), "dst-b": (1, {})})
    deny(
        guarded,
        (TOPIC, "dst-a", Operation.ALTER),
        (TOPIC, "dst-b", Operation.WRITE),
        (TOPIC, "dst-b", Operation.ALTER_CONFIGS),
        (GROUP, f"millrace-mirror.{name}", Operation.READ),
        (TRANSACTIONAL_ID, f"millrace.{name}.0.0", Operation.DESCRIBE),
        (CLUSTER, "kafka-cluster", Operation.CREATE),
        (TOPIC, "dst-new", Operation.CREATE),
        (TOPIC, f"millrace.positions.{name}", Operation.CREATE),
    )
    path = write_config(
        tmp_path, guarded.bootstrap, {"one": broker.bootstrap}, ["dst-.*"], name=name, delivery="exactly_once"
    )
    wanted = (
        "mirror.yaml:2: target: agg: not permitted: Write on Topic dst-b (records cannot be carried there)",
        "mirror.yaml:2: target: agg: not permitted: Create on Topic dst-new (the topic cannot be created)",
        f"Create on Topic millrace.positions.{name} (positions cannot be kept)",
        f"mirror.yaml:1: name: agg: not permitted: Read on Group millrace-mirror.{name}",
        f"mirror.yaml:6: delivery: agg: not permitted: Describe on TransactionalId millrace.{name}.0.0 (",
        "agg/dst-a: has 1 partition, one/dst-a needs 2, and the mirror may not add them (Alter on",
        "mirror.yaml:6: delivery: agg: it lacks transactions: transaction.state.log.replication.factor=3",
        "AlterConfigs on Topic dst-b (its settings would not follow the source's",
    )

    def is_all_told(said: list[str]) -> bool:
        return all(any(each in line for line in said) for each in wanted)

    # Of both severities at once: where no coordinator is to be had, a look takes as long as a request may.
    said = "\n".join(messages_once(path, is_all_told, Severity.ERROR, Severity.WARNING))
    for expected in wanted:
        assert expected in said, (expected, said)
    capfd.readouterr()
    assert run(path) == 2
    assert daemon.run(path) == 2
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("millrace mirror: mirror.yaml:")
    assert any(line in last for line in said.splitlines()) and wanted[-1] not in last


@pytest.mark.java
@pytest.mark.kafka
def test_topics_that_are_yet_to_be_made_are_held_against_the_targets_defaults(
    guarded: KafkaPeer, broker: BrokerProcess, tmp_path: Path
) -> None:
    """One sets its limit itself and will have it there."""
    make_topics(broker.bootstrap, {f"new-{name}": (1, {}) for name in "ab"})
    make_topics(broker.bootstrap, {"new-own": (1, {"max.message.bytes": "900000"})})
    path = write_config(
        tmp_path, guarded.bootstrap, {"one": broker.bootstrap}, ["new-.*"], delivery="at_least_once"
    )
    place = "warning  mirror.yaml:4: sources[0].topics.include: agg/"
    wanted = [
        f"{place}new-a, agg/new-b: max.message.bytes 700000 is below the source's 1048588: larger batches "
        "are split, and a record that is too large alone stops its partition (gaps.too_large); raise it at "
        "the target",
        f"{place}new-a, agg/new-b, agg/new-own: compression.type gzip makes the target compress every batch "
        "again; with producer it keeps them as they are",
    ]
    said: list[str] = []

    def is_looked_at() -> bool:
        """In full: the first question for a coordinator is what makes it."""
        said[:] = [str(each) for each in findings(path, Severity.WARNING)]
        return not any("could not be looked at in full" in each for each in said)

    until(is_looked_at, lambda: str(said), every_s=0.2)
    assert said == wanted


@pytest.mark.java
@pytest.mark.kafka
def test_missing_permissions_on_groups_are_listed_and_the_start_goes_on(
    guarded: KafkaPeer, broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_topics(guarded.bootstrap, {"grp-a": (1, {})})
    make_topics(broker.bootstrap, {"grp-a": (1, {})})

    async def commit(bootstrap: str) -> None:
        async with Cluster("made", [bootstrap]) as cluster:
            for group in ("grp-read", "grp-none"):
                await commit_offsets(cluster, group, {("grp-a", 0): CommittedOffset(0, -1, "")})

    for bootstrap in (guarded.bootstrap, broker.bootstrap):
        asyncio.run(commit(bootstrap))
    deny(
        guarded,
        (GROUP, "grp-none", Operation.DESCRIBE),
        (GROUP, "grp-read", Operation.READ),
        (GROUP, "grp-progress", Operation.READ),
        (TOPIC, "grp-a", Operation.READ),
    )

    def config(source: str, target: str) -> Path:
        more = {"name": "grp", "delivery": "at_least_once"}
        path = write_config(tmp_path, target, {"one": source}, ["grp-a"], **more)
        groups = "groups: {include: ['grp-(read|none)', 'grp-unseen']}, progress_group: grp-progress"
        path.write_text(path.read_text().replace("cluster: one,", f"cluster: one, {groups},"))
        return path

    def refused(path: Path) -> list[str]:
        said = [str(each) for each in findings(path, Severity.WARNING)]
        return sorted(
            line.split(" (")[0].removeprefix("warning  mirror.yaml:4: sources[0].")
            for line in said
            if "not permitted" in line
        )

    def until_refused(path: Path, wanted: list[str]) -> None:
        until(lambda: refused(path) == wanted, lambda: f"{wanted}; there is {refused(path)}", every_s=0.2)

    wanted = [
        "groups: agg: not permitted: Describe on Group grp-none",
        "groups: agg: not permitted: Read on Group grp-none, grp-read",
        "groups: agg: not permitted: Read on Topic grp-a",
    ]
    path = config(broker.bootstrap, guarded.bootstrap)
    until_refused(path, wanted)
    said: list[str] = []
    monkeypatch.setattr(check_module, "log", SimpleNamespace(warning=lambda _, finding: said.append(finding)))
    asyncio.run(refuse_wrong_start(load_config(path)))
    assert all(any(each in line for line in said) for each in wanted)
    wanted = [
        "groups: one: not permitted: Describe on Group grp-none",
        "progress_group: one: not permitted: Read on Group grp-progress",
    ]
    until_refused(config(guarded.bootstrap, broker.bootstrap), wanted)


@pytest.mark.java
@pytest.mark.kafka
def test_target_whose_transactions_need_more_brokers_than_it_has_is_told(
    guarded: KafkaPeer, broker: BrokerProcess, tmp_path: Path
) -> None:
    make_topics(broker.bootstrap, {"txn-a": (1, {})})
    make_topics(guarded.bootstrap, {"txn-a": (1, {})})
    sources = {"one": broker.bootstrap}

    def told(delivery: str) -> list[str]:
        path = write_config(tmp_path, guarded.bootstrap, sources, ["txn-a"], name="txn", delivery=delivery)
        return [str(each) for each in findings(path) if "transactions" in each.message]

    (line,) = told("exactly_once")
    setting = "transaction.state.log.replication.factor"
    assert line == (
        f"error    mirror.yaml:6: delivery: agg: it lacks transactions: {setting}=3, and it has 1 broker, "
        f"so it cannot make the topic that transactions are kept in; add brokers or lower {setting}; or "
        "choose `delivery: at_least_once`, which repeats records after a failure"
    )
    assert told("at_least_once") == []


@pytest.mark.java
@pytest.mark.kafka
def test_rights_to_all_transactional_ids_are_looked_for(
    guarded: KafkaPeer, broker: BrokerProcess, tmp_path: Path
) -> None:
    """After the test before: its target has no topic for transactions, this one makes it by hand."""
    make_topics(broker.bootstrap, {"ids-a": (1, {})})
    make_topics(
        guarded.bootstrap, {"ids-a": (1, {}), "__transaction_state": (50, {"cleanup.policy": "compact"})}
    )
    sources = {"one": broker.bootstrap}

    def told(name: str, severity: Severity, **more: Any) -> list[str]:
        path = write_config(tmp_path, guarded.bootstrap, sources, ["ids-a"], name=name, lanes=2, **more)
        return [str(each) for each in findings(path, severity) if "Transactional" in each.message]

    def told_once(name: str, severity: Severity) -> list[str]:
        return until(lambda: told(name, severity), f"something is told of {name}", every_s=0.2)

    assert told("free", Severity.ERROR) == told("free", Severity.WARNING) == []
    # The second id of the second lane: the first worker cannot do without it.
    deny(guarded, (TRANSACTIONAL_ID, "millrace.needs.0.1.b", Operation.WRITE))
    (line,) = told_once("needs", Severity.ERROR)
    assert line == (
        "error    mirror.yaml: delivery: agg: not permitted: Write on TransactionalId millrace.needs.0.1.b "
        "(exactly once is not possible; `delivery: at_least_once` does without); grant it on the prefix "
        "millrace.needs. (`--resource-pattern-type prefixed`) to the principal that the mirror uses there"
    )
    assert told("needs", Severity.ERROR, delivery="at_least_once") == []
    # A lane that is made when it is needed, and another worker's.
    for name in ("millrace.grows.0.5", "millrace.grows.1.0.b"):
        deny(guarded, (TRANSACTIONAL_ID, name, Operation.DESCRIBE))
    wanted = "Describe on TransactionalId millrace.grows.0.5, millrace.grows.1.0.b (further workers"

    def is_told() -> bool:
        (line,) = told_once("grows", Severity.WARNING)
        return wanted in line

    until(is_told, lambda: f"{wanted}; told is {told('grows', Severity.WARNING)}", every_s=0.2)
    assert told("grows", Severity.ERROR) == []


@pytest.mark.java
def test_target_whose_transactions_can_never_be_in_sync_is_told(
    broker: BrokerProcess, broker_factory: BrokerFactory, tmp_path: Path
) -> None:
    target = broker_factory(transaction_state_log_replication_factor=1, transaction_state_log_min_isr=2)
    make_topics(broker.bootstrap, {"sync-a": (1, {})})
    path = write_config(tmp_path, target.bootstrap, {"one": broker.bootstrap}, ["sync-a"], name="sync")
    # The first look may be what makes the topic.
    (line,) = until(
        lambda: [str(each) for each in findings(path) if "min.insync.replicas" in each.message],
        "something is said of transactions",
        every_s=0.1,
    )
    what = "min.insync.replicas of __transaction_state is 2, and the topic that transactions are kept in"
    assert line.startswith(
        f"error    mirror.yaml: delivery: agg: it lacks transactions: {what} has 1 replica"
    )
    assert "`delivery: at_least_once`" in line
