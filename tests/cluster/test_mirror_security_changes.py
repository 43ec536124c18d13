"""Sessions, passwords and certificates that are renewed while a mirror runs."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.broker.client.cluster import Cluster
from millrace.mirror.checks.check import Severity, check
from millrace.mirror.config import load_config
from tests.cluster.mirror_process import MirrorProcess, until
from tests.cluster.secured_mirrors import FROM_SECURED, TO_SECURED, Section, arrived, fill, more
from tests.pairs import Pair, in_pairs
from tests.secure_kafka import CHANGING_USER, PASSWORD, SESSION_MS, SecureKafka

pytestmark = [pytest.mark.java, pytest.mark.kafka]


@in_pairs("millrace-millrace", "kafka-kafka")
def test_sessions_are_renewed_under_load(
    pair: Pair,
    secure_kafka: SecureKafka,
    launch: Callable[..., MirrorProcess],
) -> None:
    """Source → Apache Kafka → target, where that Kafka ends a session after 3 s: more than two of them pass
    under load, and nobody notices."""
    short, topic = secure_kafka.address("SHORT"), pair.unique("renewed")
    security = {"protocol": "SASL_PLAINTEXT", "sasl": secure_kafka.login("SCRAM-SHA-512")}

    async def run() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            sent = await fill(source, topic)
            there = launch(
                pair.unique("there"), short, security, {"ewr": (pair.source.bootstrap, topic, None)}
            )
            back = launch(
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
    pair: Pair, secure_kafka: SecureKafka, launch: Callable[..., MirrorProcess], tmp_path: Path
) -> None:
    def start(topic: str, address: str, security: Section) -> MirrorProcess:
        return launch(topic, pair.target.bootstrap, None, {"kafka": (address, topic, security)})

    def ends() -> tuple[Cluster, Cluster]:
        return Cluster("beside", [secure_kafka.peer.bootstrap]), pair.target.cluster()

    change_password(pair.unique("changing"), secure_kafka, ends, start, tmp_path)


@in_pairs(*TO_SECURED, only=TO_SECURED)
def test_a_password_of_the_target_changed_under_way(
    pair: Pair, secure_kafka: SecureKafka, launch: Callable[..., MirrorProcess], tmp_path: Path
) -> None:
    def start(topic: str, address: str, security: Section) -> MirrorProcess:
        return launch(topic, address, security, {"ewr": (pair.source.bootstrap, topic, None)})

    def ends() -> tuple[Cluster, Cluster]:
        return pair.source.cluster(), Cluster("beside", [secure_kafka.peer.bootstrap])

    change_password(pair.unique("changing"), secure_kafka, ends, start, tmp_path)


def change_password(
    topic: str,
    secure_kafka: SecureKafka,
    ends: Callable[[], tuple[Cluster, Cluster]],
    start: Callable[[str, str, Section], MirrorProcess],
    folder: Path,
) -> None:
    """The mirror that `start` makes goes on with the new password, without a restart."""
    password = folder / "password"
    password.write_text(PASSWORD)
    sasl = {"mechanism": "SCRAM-SHA-256", "username": CHANGING_USER, "password": {"file": str(password)}}
    security = {"protocol": "SASL_PLAINTEXT", "sasl": sasl}

    async def run() -> None:
        one, other = ends()
        async with one as source, other as target:
            sent = await fill(source, topic)
            mirror = start(topic, secure_kafka.address("SHORT"), security)
            await arrived(target, topic, sent, mirror)
            await secure_kafka.change_password("a new one")

            async def refused() -> Any:
                status = mirror.status()
                shown = [status.get("target", {}), *status.get("sources", ())]
                return next((each["error"] for each in shown if each.get("error")), None)

            said = await until(refused, logs_of=[mirror])
            assert "the login by SCRAM-SHA-256 is refused" in said
            sent += await more(source, topic, len(sent), 20)
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
    launch: Callable[..., MirrorProcess],
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
            mirror = launch(
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
    pair: Pair, secure_kafka: SecureKafka, launch: Callable[..., MirrorProcess]
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
            mirror = launch(
                pair.unique("expired"), pair.target.bootstrap, None, {"kafka": (address, topic, security)}
            )

            async def refused() -> Any:
                (source,) = mirror.status().get("sources", ({},))
                return source.get("error")

            cause = "the server's certificate has expired"
            assert cause in await until(refused, logs_of=[mirror])
            checked = await check(load_config(mirror.config_path))
            (found,) = (each for each in checked if each.severity is Severity.ERROR)
            assert found.where == "kafka" and cause in found.message
            assert re.fullmatch(r"mirror\.yaml:\d+: sources\[0\]\.security", found.place)

            async def is_logged() -> bool:
                return any(cause in line and "source=kafka" in line for line in mirror.log.splitlines())

            await until(is_logged, logs_of=[mirror])
            await secure_kafka.renew_certificate()
            await arrived(target, topic, sent, mirror)

    try:
        asyncio.run(run())
    finally:
        asyncio.run(secure_kafka.renew_certificate(expired=True))
