"""Mirrors to and from Apache Kafka with TLS and logins: how to get in, and what must have arrived."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.secure_kafka import SecureKafka

Section = dict[str, Any]
FROM_SECURED = ("kafka-millrace", "kafka-kafka")
TO_SECURED = ("millrace-kafka", "kafka-kafka")


def ways_in(kafka: SecureKafka, folder: Path) -> dict[str, tuple[str, Section]]:
    """name → (address, security) of every way into the secured Apache Kafka."""
    token = folder / "token"
    token.write_text(kafka.issuer.token(kafka.user))
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


@dataclass(frozen=True, slots=True)
class WrongLogin:
    """One that the cluster refuses in these words, until the right secret is written into its file."""

    sasl: Section
    wrong: str
    right: str
    refusal: str


def wrong_login(kafka: SecureKafka, mechanism: str, secret: Path) -> WrongLogin:
    """A wrong password, or a token that has expired; it stands in the file."""
    if mechanism == "OAUTHBEARER":
        wrong, right = kafka.issuer.token(kafka.user, life_s=-30), kafka.issuer.token(kafka.user)
        sasl: Section = {"mechanism": mechanism, "token": {"file": str(secret)}}
        refusal = "the token is refused (it has expired); check security.sasl.token"
    else:
        wrong, right = "guessed-and-wrong-0815", kafka.secret
        sasl = kafka.login(mechanism, password={"file": str(secret)})
        refusal = f"the login by {mechanism} is refused; check security.sasl's username and password"
    secret.write_text(wrong)
    return WrongLogin(sasl, wrong, right, refusal)


def nothing_shows(outputs: Mapping[str, str], *secrets: str) -> None:
    """None of the secrets is in any of the outputs, neither as it is nor as Python, JSON, an address or a
    login would write it. Of a token it is what stands behind the first dot: what it begins with all have."""
    for secret in secrets:
        for piece in secret.split(".")[1:] or [secret]:
            encoded = b64encode(piece.encode()).decode().rstrip("=")
            forms = {piece, ascii(piece)[1:-1], json.dumps(piece)[1:-1], quote(piece), encoded}
            for name, text in outputs.items():
                assert text and not [form for form in forms if form in text], name


def said_by(mirror: MirrorProcess) -> dict[str, str]:
    """All that a worker says: its log, and its port at every address."""
    paths = json.loads(mirror.get("/openapi.json")[1])["paths"]
    shown = {path: mirror.get(path)[1] for path, methods in paths.items() if "get" in methods}
    assert {"/", "/status", "/mirror", "/metrics", "/openapi.json"} <= shown.keys()
    return {**shown, "log": mirror.log}


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
