"""What is wrong with certificates and passwords: said once, by name, and cured without a restart."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.mirror.checks.check import Severity
from millrace.mirror.checks.check import check as findings
from millrace.mirror.config import load_config
from tests.cluster.mirror_calls import check
from tests.cluster.mirror_process import MirrorProcess, until
from tests.cluster.secured_mirrors import (
    FROM_SECURED,
    TO_SECURED,
    Section,
    arrived,
    fill,
    nothing_shows,
    said_by,
    wrong_login,
)
from tests.pairs import Pair, in_pairs
from tests.secure_kafka import MECHANISMS, SecureKafka

pytestmark = [pytest.mark.java, pytest.mark.kafka]
FIRST = "SCRAM-SHA-256"
EACH_MECHANISM = [
    FIRST,
    *(pytest.param(each, marks=pytest.mark.long) for each in MECHANISMS if each != FIRST),
]


@pytest.mark.parametrize("mechanism", EACH_MECHANISM)
@in_pairs(*FROM_SECURED, only=FROM_SECURED)
def test_what_is_wrong_at_start_is_said_once_and_cured_without_a_restart(
    pair: Pair,
    secure_kafka: SecureKafka,
    launch: Callable[..., MirrorProcess],
    tmp_path: Path,
    mechanism: str,
) -> None:
    """A wrong password, or a token that has expired; and a CA that did not sign the server's certificate."""
    agg, jfks, ewrs = pair.target, pair.unique("wrong-password"), pair.unique("wrong-ca")
    secret, ca = tmp_path / "secret", tmp_path / "ca.pem"
    login = wrong_login(secure_kafka, mechanism, secret)
    ca.write_bytes(secure_kafka.stranger.pem.read_bytes())

    async def run() -> None:
        async with (
            Cluster("beside", [secure_kafka.peer.bootstrap]) as kafka,
            Cluster("agg", [agg.bootstrap]) as target,
        ):
            by_login, by_tls = await fill(kafka, jfks), await fill(kafka, ewrs)
            # Two mirrors, as one would not take the two names for one cluster.
            by_password: Section = {"protocol": "SASL_PLAINTEXT", "sasl": login.sasl}
            wrong: dict[str, tuple[str, str, Section]] = {
                "jfk": (secure_kafka.address("LOGIN"), jfks, by_password),
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
            causes = {"jfk": login.refusal, "ewr": f"not signed by a CA in {ca}"}
            for name, mirror in mirrors.items():
                assert causes[name] in (error_of(name) or "")
                assert not any(each["connected"] for each in mirror.status()["sources"])
                assert mirror.get("/healthz")[0] == 200
                checked, said = await asyncio.to_thread(check, mirror)
                assert checked != 0, said
                (line,) = (line for line in said.splitlines() if line.startswith("error"))
                (number,) = mirror.lines_of("security")
                place = f"mirror.yaml:{number}: sources[0].security: {name}: {wrong[name][0]}: "
                assert line.startswith(f"error    {place}") and causes[name] in line, line
                nothing_shows({**said_by(mirror), "check": said}, login.wrong)
                if name == "jfk":
                    assert line == f"error    {place}{login.refusal}"

            secret.write_text(login.right)
            ca.write_bytes(secure_kafka.authority.pem.read_bytes())
            await arrived(target, jfks, by_login, mirrors["jfk"])
            await arrived(target, ewrs, by_tls, mirrors["ewr"])

            async def all_is_well() -> bool:
                return not any(error_of(name) for name in wrong)

            await until(all_is_well, logs_of=[*mirrors.values()])
            for name, mirror in mirrors.items():
                (line,) = (line for line in mirror.log.splitlines() if causes[name] in line)
                assert f"source={name} " in f"{line} "
                nothing_shows(said_by(mirror), login.wrong, login.right)

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
        for each in asyncio.run(findings(load_config(mirror.config_path)))
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
                checked = await findings(load_config(mirror.config_path))
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


@pytest.mark.parametrize("mechanism", EACH_MECHANISM)
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
    login = wrong_login(secure_kafka, mechanism, secret)

    async def run() -> None:
        async with (
            Cluster("beside", [secure_kafka.peer.bootstrap]) as kafka,
            pair.source.cluster() as source,
        ):
            topic = pair.unique("refused-target")
            values = await fill(source, topic)
            security = {"protocol": "SASL_SSL", "ssl": secure_kafka.tls(), "sasl": login.sasl}
            address = secure_kafka.address("SECURE")
            mirror = launch(
                pair.unique("refused"),
                address,
                security,
                {"ewr": (pair.source.bootstrap, topic, None)},
            )

            async def refused() -> Any:
                return mirror.status().get("target", {}).get("error")

            reason = await until(refused, logs_of=[mirror])
            assert reason == f"{address}: {login.refusal}"

            async def is_logged() -> bool:
                lines = [line for line in mirror.log.splitlines() if login.refusal in line]
                return any("cluster=agg" in line for line in lines)

            await until(is_logged, logs_of=[mirror])
            assert mirror.process is not None and mirror.process.poll() is None
            checked, said = await asyncio.to_thread(check, mirror)
            assert checked != 0, said
            (number,) = mirror.lines_of("security")
            lines = [line for line in said.splitlines() if line.startswith("error")]
            assert lines == [f"error    mirror.yaml:{number}: target.security: agg: {reason}"]
            nothing_shows({**said_by(mirror), "check": said}, login.wrong)
            secret.write_text(login.right)
            await arrived(kafka, topic, values, mirror)

            async def is_well() -> bool:
                return mirror.status()["target"]["error"] is None

            await until(is_well, logs_of=[mirror])
            nothing_shows(said_by(mirror), login.wrong, login.right)

    asyncio.run(run())
