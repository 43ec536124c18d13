"""What is wrong with certificates and passwords: said once, by name, and cured without a restart."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.mirror.checks.check import Severity, check
from millrace.mirror.config import load_config
from tests.cluster.mirror_process import MirrorProcess, until
from tests.cluster.secured_mirrors import FROM_SECURED, arrived, fill
from tests.pairs import Pair, in_pairs
from tests.secure_kafka import MECHANISMS, PASSWORD, USER, SecureKafka
from tests.waiting import patience

TO_SECURED = ("millrace-kafka", "kafka-kafka")
pytestmark = [pytest.mark.java, pytest.mark.kafka]


@in_pairs(*FROM_SECURED, only=FROM_SECURED)
def test_what_is_wrong_at_start_is_said_once_and_cured_without_a_restart(
    pair: Pair,
    secure_kafka: SecureKafka,
    launch: Callable[..., MirrorProcess],
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
                name: launch(pair.unique(f"cured-{name}"), agg.bootstrap, None, {name: source})
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
    pair: Pair, secure_kafka: SecureKafka, launch: Callable[..., MirrorProcess]
) -> None:
    tls = {"protocol": "SSL", "ssl": secure_kafka.tls()}
    address = secure_kafka.address("OTHERNAME")
    mirror = launch(pair.unique("othername"), pair.target.bootstrap, None, {"ewr": (address, "any", tls)})
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
    pair: Pair, secure_kafka: SecureKafka, launch: Callable[..., MirrorProcess]
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
                listener: launch(
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
    launch: Callable[..., MirrorProcess],
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
            mirror = launch(
                pair.unique("refused"),
                address,
                security,
                {"ewr": (pair.source.bootstrap, topic, None)},
            )

            async def refused() -> Any:
                return mirror.status().get("target", {}).get("error")

            said = await until(refused, logs_of=[mirror])
            assert refusal in said

            async def is_logged() -> bool:
                return any(refusal in line and "cluster=agg" in line for line in mirror.log.splitlines())

            await until(is_logged, logs_of=[mirror])
            assert mirror.process is not None and mirror.process.poll() is None
            secret.write_text(right)
            await arrived(kafka, topic, values, mirror)

            async def is_well() -> bool:
                return mirror.status()["target"]["error"] is None

            await until(is_well, logs_of=[mirror])

    asyncio.run(run())
