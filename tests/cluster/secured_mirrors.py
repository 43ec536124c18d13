"""Mirrors to and from Apache Kafka with TLS and logins: how to get in, and what must have arrived."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.secure_kafka import USER, SecureKafka

Section = dict[str, Any]
FROM_SECURED = ("kafka-millrace", "kafka-kafka")


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
