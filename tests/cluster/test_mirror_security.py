"""Mirrors between clusters that want TLS and logins: Apache Kafka with such listeners.

Our broker has none, so one secured cluster is Apache Kafka here, beside the pair or in place of its Kafka
source or target (`FROM_SECURED`, `TO_SECURED`: the pairs that have one). Where both ends are secured, the
other one is a second Apache Kafka, or a Millrace broker behind a front that wants certificates
(`tests/tls_front.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets, fetch_offsets
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.mirror.config import load_config
from tests.cluster.mirror_calls import check, command
from tests.cluster.mirror_process import MirrorProcess, until
from tests.cluster.secured_mirrors import Section, arrived, fill, more, nothing_shows, said_by, ways_in
from tests.pairs import SETTINGS, Pair, in_pairs
from tests.record_deletion import delete_records
from tests.secure_kafka import PASSWORD, SecureKafka
from tests.servers import BrokerProcess, ZooKeeper
from tests.tls_front import TlsFront

# (to Apache Kafka, from there); between them every mechanism, with and without TLS.
CHAINS = [("mtls", "tls"), ("plain-tls", "oauth-tls"), ("scram-512-tls", "scram-256"), ("oauth", "plain")]
# What is left of the ten ways in, at either end.
OTHER_CHAINS = [
    ("tls", "mtls"),
    ("plain", "plain-tls"),
    ("scram-256", "scram-256-tls"),
    ("scram-256-tls", "scram-512"),
    ("scram-512", "scram-512-tls"),
    ("oauth-tls", "oauth"),
]
pytestmark = [pytest.mark.java, pytest.mark.kafka]


@in_pairs("millrace-millrace", "kafka-kafka")
def test_through_apache_kafka_and_back(
    pair: Pair, secure_kafka: SecureKafka, launch: Callable[..., MirrorProcess], tmp_path: Path
) -> None:
    asyncio.run(there_and_back(pair, ways_in(secure_kafka, tmp_path), CHAINS, launch))


@pytest.mark.long
@in_pairs("millrace-millrace", "kafka-kafka")
def test_through_apache_kafka_and_back_in_every_other_way(
    pair: Pair, secure_kafka: SecureKafka, launch: Callable[..., MirrorProcess], tmp_path: Path
) -> None:
    ways = ways_in(secure_kafka, tmp_path)
    for end in range(2):
        assert sorted(chain[end] for chain in CHAINS + OTHER_CHAINS) == sorted(ways)
    # Not all at once: each chain is two mirrors.
    for few in (OTHER_CHAINS[:3], OTHER_CHAINS[3:]):
        asyncio.run(there_and_back(pair, ways, few, launch))


async def there_and_back(
    pair: Pair,
    ways: dict[str, tuple[str, Section]],
    chains: list[tuple[str, str]],
    launch: Callable[..., MirrorProcess],
) -> None:
    """All chains at the same time: the secured cluster stands between the pair's source and target."""
    async with pair.source.cluster() as source, pair.target.cluster() as target:
        under_way = []
        for there, back in chains:
            (to_address, to_security), (from_address, from_security) = ways[there], ways[back]
            topic = pair.unique(f"by-{there}-and-{back}")
            sent = await fill(source, topic)
            writer = launch(
                pair.unique(f"to-{there}"),
                to_address,
                to_security,
                {"src": (pair.source.bootstrap, topic, None)},
            )
            reader = launch(
                pair.unique(f"from-{back}"),
                pair.target.bootstrap,
                None,
                {"kafka": (from_address, topic, from_security)},
            )
            under_way.append((topic, sent, writer, reader))
        for topic, sent, writer, reader in under_way:
            await arrived(target, topic, sent, reader)

            async def all_is_well(writer: MirrorProcess = writer, reader: MirrorProcess = reader) -> bool:
                errors = writer.status()["target"]["error"], reader.status()["sources"][0]["error"]
                return errors == (None, None)

            await until(all_is_well, lambda writer=writer, reader=reader: writer.log + reader.log)
            for mirror in (writer, reader):
                nothing_shows(said_by(mirror), PASSWORD, "key password")


class FrontedBroker(BrokerProcess):
    """Its clients find it behind the front, whose CA is another than Apache Kafka's."""

    front: TlsFront

    def command(self) -> list[str]:
        return [*super().command(), "--advertised", self.front.address]


@pytest.fixture(scope="module")
def fronted(
    zookeeper: ZooKeeper, secure_kafka: SecureKafka, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrontedBroker]:
    broker = FrontedBroker(zookeeper.chroot(), tmp_path_factory.mktemp("fronted"), settings=SETTINGS)
    broker.front = TlsFront(secure_kafka.stranger, broker.port).start()
    try:
        yield broker.start()
    finally:
        broker.kill()
        broker.front.stop()


def test_mirror_with_both_ends_secured_shows_each_its_own_credentials(
    secure_kafka: SecureKafka,
    fronted: FrontedBroker,
    launch: Callable[..., MirrorProcess],
    tmp_path: Path,
) -> None:
    """Two CAs that know nothing of each other: by certificate at one end, by password at the other. One
    mirror each way."""
    own = secure_kafka.stranger.issue("mirror")
    certificate = {"ca": str(secure_kafka.stranger.pem), "cert": str(own.cert), "key": str(own.key)}
    by_certificate = {"protocol": "SSL", "ssl": certificate}
    address, by_password = ways_in(secure_kafka, tmp_path)["scram-512-tls"]
    name = f"both-{time.monotonic_ns()}"

    async def run() -> None:
        writer = launch(
            f"{name}-in", fronted.front.address, by_certificate, {"ewr": (address, f"{name}-in", by_password)}
        )
        reader = launch(
            f"{name}-out",
            address,
            by_password,
            {"jfk": (fronted.front.address, f"{name}-out", by_certificate)},
        )
        security = load_config(writer.config_path).target.security
        async with (
            Cluster("beside", [secure_kafka.peer.bootstrap]) as kafka,
            Cluster("fronted", [fronted.front.address], security=security) as millrace,
        ):
            coming, going = await fill(kafka, f"{name}-in"), await fill(millrace, f"{name}-out")
            await arrived(millrace, f"{name}-in", coming, writer)
            await arrived(kafka, f"{name}-out", going, reader)
        for mirror in (writer, reader):
            nothing_shows(said_by(mirror), PASSWORD)

    asyncio.run(run())


@pytest.mark.parametrize("way", ["there", pytest.param("back", marks=pytest.mark.long)])
def test_all_of_a_mirror_works_between_two_secured_kafkas_and_shows_no_secret(
    secure_kafka: SecureKafka,
    second_secure_kafka: SecureKafka,
    launch: Callable[..., MirrorProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """Each cluster has its CA, its user and its secret; by password and from the environment at one end, by
    token and from a file at the other."""
    source_kafka, target_kafka = secure_kafka, second_secure_kafka
    if way == "back":
        source_kafka, target_kafka = target_kafka, source_kafka
    token, variable = tmp_path / "token", "MILLRACE_TEST_PASSWORD"
    token.write_text(target_kafka.issuer.token(target_kafka.user) + "\n")
    monkeypatch.setenv(variable, source_kafka.secret)
    secrets = source_kafka.secret, target_kafka.secret, token.read_text().strip()

    def security(kafka: SecureKafka, sasl: Section) -> Section:
        return {"protocol": "SASL_SSL", "ssl": kafka.tls(), "sasl": sasl}

    by_password = security(source_kafka, source_kafka.login("SCRAM-SHA-256", password={"env": variable}))
    by_token = security(target_kafka, {"mechanism": "OAUTHBEARER", "token": {"file": str(token)}})
    name = f"secured-{way}-{time.monotonic_ns()}"
    moved, kept = f"{name}-moved", f"{name}-kept"

    async def run() -> None:
        async with (
            Cluster("beside", [source_kafka.peer.bootstrap]) as source,
            Cluster("beside", [target_kafka.peer.bootstrap]) as target,
        ):
            sent = await fill(source, name, 5)
            sent += await more(source, name, len(sent), 20)
            await delete_records(source, {(name, 0): 5})  # no offset is the same at both ends
            for group, offset in ((moved, 12), (kept, 7)):
                await commit_offsets(source, group, {(name, 0): CommittedOffset(offset)})
            mirror = launch(
                name,
                target_kafka.address("SECURE"),
                by_token,
                {"ewr": (source_kafka.address("SECURE"), name, by_password)},
                groups={"include": [kept], "interval_ms": 200},
            )
            await arrived(target, name, sent[5:], mirror)
            checked, said = await asyncio.to_thread(check, mirror)
            assert checked == 0, said
            assert {"ok       ewr: answers, with 1 broker", "ok       agg: answers, with 1 broker"} <= set(
                said.splitlines()
            )
            has_secrets = {variable: source_kafka.secret}
            outputs = {"check": said}
            for words, environment in (
                (["translate", "--group", moved, "--apply"], has_secrets),
                (["status"], {}),  # of a worker, which has them
            ):
                outputs[words[0]] = await asyncio.to_thread(command, mirror, *words, environment=environment)
            places = {record.value: record.offset async for record in read_topic_to_end(target, name)}

            async def stands_at(group: str) -> int | None:
                found = (await fetch_offsets(target, group)).get((name, 0))
                return None if found is None else found.offset

            assert await stands_at(moved) == places[sent[12]]

            async def is_kept_in_step() -> bool:
                return await stands_at(kept) == places[sent[7]]

            await until(is_kept_in_step, lambda: f"{mirror.status().get('groups')}\n{mirror.log[-3000:]}")
            nothing_shows({**outputs, **said_by(mirror)}, *secrets)

    asyncio.run(run())
