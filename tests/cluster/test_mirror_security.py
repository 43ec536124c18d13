"""Mirrors between clusters that want TLS and logins: Apache Kafka with such listeners.

Our broker has none, so one secured cluster is Apache Kafka here, beside the pair or in place of its Kafka
source or target (`FROM_SECURED`, `TO_SECURED`: the pairs that have one). Where both ends are secured, the
other one is a Millrace broker behind a front that wants certificates (`tests/tls_front.py`).
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.checks.check import Severity, check
from millrace.mirror.config import load_config
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.pairs import SETTINGS, Pair, in_pairs
from tests.secure_kafka import CHANGING_USER, MECHANISMS, PASSWORD, SESSION_MS, USER, SecureKafka
from tests.servers import BrokerProcess, ZooKeeper
from tests.tls_front import TlsFront
from tests.waiting import patience

pytestmark = [pytest.mark.java, pytest.mark.kafka]

Section = dict[str, Any]
FROM_SECURED = ("kafka-millrace", "kafka-kafka")
TO_SECURED = ("millrace-kafka", "kafka-kafka")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., MirrorProcess]]:
    """`start(name, target, target_security, sources)` with sources {name: (address, topic, security)}."""
    started: list[MirrorProcess] = []

    def make(
        name: str,
        target: str,
        target_security: Section | None,
        sources: dict[str, tuple[str, str, Section | None]],
    ) -> MirrorProcess:
        mirror = MirrorProcess(tmp_path / name, target, {}, name=name)
        settings = mirror.settings
        if target_security is not None:
            settings["target"]["security"] = target_security
        settings["sources"] = [
            {"cluster": cluster, "bootstrap": [address], "topics": {"include": [topic]}}
            | ({"security": security} if security is not None else {})
            for cluster, (address, topic, security) in sources.items()
        ]
        mirror.config_path.write_text(yaml.safe_dump(settings))
        started.append(mirror)
        return mirror.start()

    yield make
    for mirror in started:
        mirror.kill()


def ways_in(kafka: SecureKafka, folder: Path) -> dict[str, tuple[str, Section]]:
    """name → (address, security) of every way into the secured Apache Kafka."""
    token = folder / "token"
    token.write_text(kafka.issuer.token(USER))
    oauth = {"mechanism": "OAUTHBEARER", "token": {"file": str(token)}}
    ways: dict[str, tuple[str, Section]] = {
        "tls": (kafka.address("TLS"), {"protocol": "SSL", "ssl": kafka.tls()}),
        "mtls": (
            kafka.address("MTLS"),
            {"protocol": "SSL", "ssl": kafka.tls(**kafka.own_certificate())},
        ),
    }
    for name, sasl in {
        "plain": kafka.login("PLAIN"),
        "scram-256": kafka.login("SCRAM-SHA-256"),
        "scram-512": kafka.login("SCRAM-SHA-512"),
        "oauth": oauth,
    }.items():
        ways[name] = (kafka.address("LOGIN"), {"protocol": "SASL_PLAINTEXT", "sasl": sasl})
        secure = {"protocol": "SASL_SSL", "ssl": kafka.tls(), "sasl": sasl}
        ways[f"{name}-tls"] = (kafka.address("SECURE"), secure)
    return ways


async def fill(cluster: Cluster, topic: str, count: int = 20) -> list[bytes | None]:
    await create_topic(cluster, topic, 1, 1, {})
    return await more(cluster, topic, 0, count)


async def more(cluster: Cluster, topic: str, first: int, count: int) -> list[bytes | None]:
    values: list[bytes | None] = [f"{topic} {number}".encode() for number in range(first, first + count)]
    now_ms = int(time.time() * 1000)
    await send(cluster, topic, 0, build_batch([Record(None, value, (), now_ms) for value in values]))
    return values


async def values_of(cluster: Cluster, topic: str) -> list[bytes | None]:
    if topic not in (await cluster.metadata([topic], max_age_ms=0)).topics:
        return []
    return [record.value async for record in read_topic_to_end(cluster, topic)]


async def arrived(cluster: Cluster, topic: str, values: list[bytes | None], mirror: MirrorProcess) -> None:
    async def all_there() -> bool:
        return len(await values_of(cluster, topic)) >= len(values)

    await until(all_there, lambda: f"{topic}: {mirror.log[-3000:]}")
    assert await values_of(cluster, topic) == values


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


@in_pairs("millrace-millrace", "kafka-kafka")
def test_through_apache_kafka_and_back(
    pair: Pair, secure_kafka: SecureKafka, start: Callable[..., MirrorProcess], tmp_path: Path
) -> None:
    asyncio.run(there_and_back(pair, ways_in(secure_kafka, tmp_path), CHAINS, start))


@pytest.mark.long
@in_pairs("millrace-millrace", "kafka-kafka")
def test_through_apache_kafka_and_back_in_every_other_way(
    pair: Pair, secure_kafka: SecureKafka, start: Callable[..., MirrorProcess], tmp_path: Path
) -> None:
    ways = ways_in(secure_kafka, tmp_path)
    for end in range(2):
        assert sorted(chain[end] for chain in CHAINS + OTHER_CHAINS) == sorted(ways)
    # Not all at once: each chain is two mirrors.
    for few in (OTHER_CHAINS[:3], OTHER_CHAINS[3:]):
        asyncio.run(there_and_back(pair, ways, few, start))


async def there_and_back(
    pair: Pair,
    ways: dict[str, tuple[str, Section]],
    chains: list[tuple[str, str]],
    start: Callable[..., MirrorProcess],
) -> None:
    """All chains at the same time: the secured cluster stands between the pair's source and target."""
    async with pair.source.cluster() as source, pair.target.cluster() as target:
        under_way = []
        for there, back in chains:
            (to_address, to_security), (from_address, from_security) = ways[there], ways[back]
            topic = pair.unique(f"by-{there}-and-{back}")
            sent = await fill(source, topic)
            writer = start(
                pair.unique(f"to-{there}"),
                to_address,
                to_security,
                {"src": (pair.source.bootstrap, topic, None)},
            )
            reader = start(
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
                for text in (mirror.log, str(mirror.status()), mirror.get("/metrics")[1]):
                    assert PASSWORD not in text and "key password" not in text


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
    secure_kafka: SecureKafka, fronted: FrontedBroker, start: Callable[..., MirrorProcess], tmp_path: Path
) -> None:
    """Two CAs that know nothing of each other: by certificate at one end, by password at the other. One
    mirror each way."""
    own = secure_kafka.stranger.issue("mirror")
    certificate = {"ca": str(secure_kafka.stranger.pem), "cert": str(own.cert), "key": str(own.key)}
    by_certificate = {"protocol": "SSL", "ssl": certificate}
    address, by_password = ways_in(secure_kafka, tmp_path)["scram-512-tls"]
    name = f"both-{time.monotonic_ns()}"

    async def run() -> None:
        writer = start(
            f"{name}-in", fronted.front.address, by_certificate, {"ewr": (address, f"{name}-in", by_password)}
        )
        reader = start(
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
            assert PASSWORD not in mirror.log

    asyncio.run(run())


@in_pairs(*FROM_SECURED, only=FROM_SECURED)
def test_what_is_wrong_at_start_is_said_once_and_cured_without_a_restart(
    pair: Pair,
    secure_kafka: SecureKafka,
    start: Callable[..., MirrorProcess],
    tmp_path: Path,
) -> None:
    agg, jfks, ewrs = pair.target, pair.unique("wrong-password"), pair.unique("wrong-ca")
    password, ca = tmp_path / "password", tmp_path / "ca.pem"
    password.write_text("wrong")
    ca.write_bytes(secure_kafka.stranger.pem.read_bytes())
    sasl = {"mechanism": "SCRAM-SHA-256", "username": USER, "password": {"file": str(password)}}
    login = {"protocol": "SASL_PLAINTEXT", "sasl": sasl}

    async def run() -> None:
        async with (
            Cluster("beside", [secure_kafka.peer.bootstrap]) as kafka,
            Cluster("agg", [agg.bootstrap]) as target,
        ):
            by_login, by_tls = await fill(kafka, jfks), await fill(kafka, ewrs)
            # Two mirrors, as one would not take the two names for one cluster.
            wrong: dict[str, tuple[str, str, dict[str, Any]]] = {
                "jfk": (secure_kafka.address("LOGIN"), jfks, login),
                "ewr": (secure_kafka.address("TLS"), ewrs, {"protocol": "SSL", "ssl": {"ca": str(ca)}}),
            }
            mirrors = {
                name: start(pair.unique(f"cured-{name}"), agg.bootstrap, None, {name: source})
                for name, source in wrong.items()
            }

            def error_of(name: str) -> str | None:
                (source,) = mirrors[name].status().get("sources") or [{"error": None}]
                return source["error"]

            async def refused() -> bool:
                return all(error_of(name) for name in wrong)

            await until(refused, logs_of=[*mirrors.values()])
            causes = {
                "jfk": "the login by SCRAM-SHA-256 is refused",
                "ewr": f"not signed by a CA in {ca}",
            }
            assert f"{causes['jfk']}; check security.sasl's username" in (error_of("jfk") or "")
            for name, mirror in mirrors.items():
                assert causes[name] in (error_of(name) or "")
                assert not any(each["connected"] for each in mirror.status()["sources"])
                assert mirror.get("/healthz")[0] == 200
                checked = await asyncio.to_thread(
                    subprocess.run,
                    [
                        *(sys.executable, "-m", "millrace.deploy.cli"),
                        *("mirror", "check", "--config", mirror.config_path),
                    ],
                    capture_output=True,
                    text=True,
                    timeout=patience(180),
                    check=False,
                )
                assert checked.returncode != 0, checked
                lines = [line for line in checked.stdout.splitlines() if line.startswith("error")]
                assert all("sources[" in line and ".security" in line for line in lines), lines
                assert any(name in line and causes[name] in line for line in lines), lines

            password.write_text(PASSWORD)
            ca.write_bytes(secure_kafka.authority.pem.read_bytes())
            await arrived(target, jfks, by_login, mirrors["jfk"])
            await arrived(target, ewrs, by_tls, mirrors["ewr"])

            async def all_is_well() -> bool:
                return not any(error_of(name) for name in wrong)

            await until(all_is_well, logs_of=[*mirrors.values()])
            for name, mirror in mirrors.items():
                assert mirror.log.count(causes[name]) == 1, mirror.log
                assert "wrong\n" not in mirror.log

    asyncio.run(run())


@in_pairs(*FROM_SECURED, only=FROM_SECURED)
def test_a_source_of_another_host_name_is_named_with_its_cluster(
    pair: Pair, secure_kafka: SecureKafka, start: Callable[..., MirrorProcess]
) -> None:
    tls = {"protocol": "SSL", "ssl": secure_kafka.tls()}
    address = secure_kafka.address("OTHERNAME")
    mirror = start(pair.unique("othername"), pair.target.bootstrap, None, {"ewr": (address, "any", tls)})
    (found,) = (
        each
        for each in asyncio.run(check(load_config(mirror.config_path)))
        if each.severity is Severity.ERROR
    )
    assert found.where == "ewr" and re.fullmatch(r"mirror\.yaml:\d+: sources\[0\]\.security", found.place)
    assert "certificate" in found.message and "security.ssl.verify_hostname: false" in found.message

    async def refused() -> Any:
        (source,) = mirror.status().get("sources", [{}])
        return source.get("error")

    # A start waits for the certificate to be mended, as for a password.
    said = asyncio.run(until(refused, logs_of=[mirror]))
    assert said == found.message
    (line,) = (each for each in mirror.log.splitlines() if "is not for" in each)
    assert "source=ewr" in line and said in line, line
    assert mirror.get("/healthz")[0] == 200


@in_pairs(*TO_SECURED, only=TO_SECURED)
def test_a_target_whose_certificate_is_refused_is_named_until_it_is_renewed(
    pair: Pair, secure_kafka: SecureKafka, start: Callable[..., MirrorProcess]
) -> None:
    """Two mirrors: the certificate is for another host, or it has expired."""
    tls = {"protocol": "SSL", "ssl": secure_kafka.tls()}
    causes = {"OTHERNAME": "the server's certificate is not for ", "ROTATED": "certificate has expired"}

    async def refused(mirror: MirrorProcess) -> Any:
        return mirror.status().get("target", {}).get("error")

    async def run() -> None:
        async with (
            Cluster("beside", [secure_kafka.peer.bootstrap]) as kafka,
            pair.source.cluster() as source,
        ):
            topic = pair.unique("refused-certificate")
            values = await fill(source, topic)
            mirrors = {
                listener: start(
                    pair.unique(listener.lower()),
                    secure_kafka.address(listener),
                    tls,
                    {"ewr": (pair.source.bootstrap, topic, None)},
                )
                for listener in causes
            }
            for listener, cause in causes.items():
                mirror = mirrors[listener]
                checked = await check(load_config(mirror.config_path))
                (found,) = (each for each in checked if each.severity is Severity.ERROR)
                assert found.where == "agg" and cause in found.message
                assert re.fullmatch(r"mirror\.yaml:\d+: target\.security", found.place)
                said = await until(lambda mirror=mirror: refused(mirror), logs_of=[mirror])
                assert said == found.message

                async def is_logged(mirror: MirrorProcess = mirror, cause: str = cause) -> bool:
                    lines = [line for line in mirror.log.splitlines() if cause in line]
                    return any("cluster=agg" in line for line in lines)

                await until(is_logged, logs_of=[mirror])
                assert mirror.get("/healthz")[0] == 200
            await secure_kafka.renew_certificate()
            await arrived(kafka, topic, values, mirrors["ROTATED"])

    try:
        asyncio.run(run())
    finally:
        asyncio.run(secure_kafka.renew_certificate(expired=True))


@pytest.mark.parametrize(
    "mechanism",
    [
        "SCRAM-SHA-256",
        *(pytest.param(each, marks=pytest.mark.long) for each in MECHANISMS if each != "SCRAM-SHA-256"),
    ],
)
@in_pairs(*TO_SECURED, only=TO_SECURED)
def test_a_target_that_refuses_is_asked_until_it_does_not(
    pair: Pair,
    secure_kafka: SecureKafka,
    start: Callable[..., MirrorProcess],
    tmp_path: Path,
    mechanism: str,
) -> None:
    """A wrong password, or a token that has expired."""
    secret = tmp_path / "secret"
    if mechanism == "OAUTHBEARER":
        wrong, right = secure_kafka.issuer.token(USER, life_s=-30), secure_kafka.issuer.token(USER)
        sasl = {"mechanism": mechanism, "token": {"file": str(secret)}}
        refusal = "the token is refused (it has expired); check security.sasl.token"
    else:
        wrong, right = "wrong", PASSWORD
        sasl = {"mechanism": mechanism, "username": USER, "password": {"file": str(secret)}}
        refusal = f"the login by {mechanism} is refused; check security.sasl's username"
    secret.write_text(wrong)

    async def run() -> None:
        async with (
            Cluster("beside", [secure_kafka.peer.bootstrap]) as kafka,
            pair.source.cluster() as source,
        ):
            topic = pair.unique("refused-target")
            values = await fill(source, topic)
            security = {"protocol": "SASL_SSL", "ssl": secure_kafka.tls(), "sasl": sasl}
            address = secure_kafka.address("SECURE")
            mirror = start(
                pair.unique("refused"),
                address,
                security,
                {"ewr": (pair.source.bootstrap, topic, None)},
            )

            async def refused() -> Any:
                return mirror.status().get("target", {}).get("error")

            said = await until(refused, logs_of=[mirror])
            assert refusal in said
            assert mirror.process is not None and mirror.process.poll() is None
            secret.write_text(right)
            await arrived(kafka, topic, values, mirror)

            async def is_well() -> bool:
                return mirror.status()["target"]["error"] is None

            await until(is_well, logs_of=[mirror])

    asyncio.run(run())


@in_pairs("millrace-millrace", "kafka-kafka")
def test_sessions_are_renewed_under_load(
    pair: Pair,
    secure_kafka: SecureKafka,
    start: Callable[..., MirrorProcess],
) -> None:
    """Source → Apache Kafka → target, where that Kafka ends a session after 3 s: more than two of them pass
    under load, and nobody notices."""
    short, topic = secure_kafka.address("SHORT"), pair.unique("renewed")
    security = {"protocol": "SASL_PLAINTEXT", "sasl": secure_kafka.login("SCRAM-SHA-512")}

    async def run() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            sent = await fill(source, topic)
            there = start(
                pair.unique("there"), short, security, {"ewr": (pair.source.bootstrap, topic, None)}
            )
            back = start(
                pair.unique("back"), pair.target.bootstrap, None, {"kafka": (short, topic, security)}
            )
            await arrived(target, topic, sent, back)
            until_s = time.monotonic() + 2.2 * SESSION_MS / 1000
            while time.monotonic() < until_s:
                sent += await more(source, topic, len(sent), 10)
                await asyncio.sleep(0.02)
            await arrived(target, topic, sent, back)
            # A session that was not renewed in time would have been closed by Kafka.
            assert there.status()["target"]["retries"] == 0, there.log
            for mirror in (there, back):
                assert "does not answer" not in mirror.log and "log in again" not in mirror.log

    asyncio.run(run())


@in_pairs(*FROM_SECURED, only=FROM_SECURED)
def test_a_password_changed_under_way(
    pair: Pair,
    secure_kafka: SecureKafka,
    start: Callable[..., MirrorProcess],
    tmp_path: Path,
) -> None:
    topic, password = pair.unique("changing"), tmp_path / "password"
    password.write_text(PASSWORD)
    sasl = {"mechanism": "SCRAM-SHA-256", "username": CHANGING_USER, "password": {"file": str(password)}}
    security = {"protocol": "SASL_PLAINTEXT", "sasl": sasl}

    async def run() -> None:
        async with (
            Cluster("beside", [secure_kafka.peer.bootstrap]) as kafka,
            pair.target.cluster() as target,
        ):
            sent = await fill(kafka, topic)
            address = secure_kafka.address("SHORT")
            mirror = start(
                pair.unique("changing"), pair.target.bootstrap, None, {"kafka": (address, topic, security)}
            )
            await arrived(target, topic, sent, mirror)
            await secure_kafka.change_password("a new one")

            async def refused() -> Any:
                (source,) = mirror.status().get("sources", ({},))
                return source.get("error")

            said = await until(refused, logs_of=[mirror])
            assert "the login by SCRAM-SHA-256 is refused" in said
            sent += await more(kafka, topic, len(sent), 20)
            password.write_text("a new one")
            await arrived(target, topic, sent, mirror)

    try:
        asyncio.run(run())
    finally:
        asyncio.run(secure_kafka.change_password(PASSWORD))


@in_pairs(*FROM_SECURED, only=FROM_SECURED)
def test_security_settings_that_are_read_again_at_a_reload(
    pair: Pair,
    secure_kafka: SecureKafka,
    start: Callable[..., MirrorProcess],
    tmp_path: Path,
) -> None:
    """From a login by password to another mechanism, and back by way of one that is refused; the process and
    its partitions stay."""

    def by(mechanism: str, **more: Any) -> Section:
        return {
            "protocol": "SASL_SSL",
            "ssl": secure_kafka.tls(),
            "sasl": secure_kafka.login(mechanism) | more,
        }

    async def run() -> None:
        async with (
            Cluster("beside", [secure_kafka.peer.bootstrap]) as kafka,
            pair.target.cluster() as target,
        ):
            topic = pair.unique("reloaded")
            sent = await fill(kafka, topic)
            address = secure_kafka.address("SECURE")
            mirror = start(
                pair.unique("reloaded"),
                pair.target.bootstrap,
                None,
                {"kafka": (address, topic, by("PLAIN"))},
            )
            await arrived(target, topic, sent, mirror)
            generation = mirror.status()["generation"]

            async def reload(security: Section) -> None:
                count = mirror.log.count(" reloaded ")
                mirror.settings["sources"][0]["security"] = security
                mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
                assert mirror.process is not None
                mirror.process.send_signal(signal.SIGHUP)

                async def is_read() -> bool:
                    return mirror.log.count(" reloaded ") > count

                await until(is_read, logs_of=[mirror])

            wrong = tmp_path / "wrong"
            wrong.write_text("not the password")
            await reload(by("SCRAM-SHA-512", password={"file": str(wrong)}))

            async def refused() -> Any:
                (source,) = mirror.status().get("sources", ({},))
                return source.get("error")

            assert "the login by SCRAM-SHA-512 is refused" in await until(refused, logs_of=[mirror])
            sent += await more(kafka, topic, len(sent), 20)
            await reload(by("SCRAM-SHA-512"))
            await arrived(target, topic, sent, mirror)
            assert mirror.status()["generation"] == generation
            assert "sources[kafka].security.sasl" in mirror.log

    asyncio.run(run())


@in_pairs(*FROM_SECURED, only=FROM_SECURED)
def test_a_certificate_that_has_expired_and_is_renewed(
    pair: Pair, secure_kafka: SecureKafka, start: Callable[..., MirrorProcess]
) -> None:
    security = {"protocol": "SSL", "ssl": secure_kafka.tls()}

    async def run() -> None:
        async with (
            Cluster("beside", [secure_kafka.peer.bootstrap]) as kafka,
            pair.target.cluster() as target,
        ):
            topic = pair.unique("expired")
            sent = await fill(kafka, topic)
            address = secure_kafka.address("ROTATED")
            mirror = start(
                pair.unique("expired"), pair.target.bootstrap, None, {"kafka": (address, topic, security)}
            )

            async def refused() -> Any:
                (source,) = mirror.status().get("sources", ({},))
                return source.get("error")

            assert "the server's certificate has expired" in await until(refused, logs_of=[mirror])
            await secure_kafka.renew_certificate()
            await arrived(target, topic, sent, mirror)

    try:
        asyncio.run(run())
    finally:
        asyncio.run(secure_kafka.renew_certificate(expired=True))
