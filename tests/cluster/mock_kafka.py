"""librdkafka's own in-memory cluster, an independent Kafka without Java, and what audited producers wrote.

Used by the tests of the audited producer; the cluster itself is the fixture `mock_cluster`.
"""

from __future__ import annotations

from millrace.audit.contract.events import EventLedger
from millrace.audit.contract.header import HEADER_KEY, RecordIdentity, decode_identity
from tests.cluster.audited_topics import ledger_of


def settings(cluster: str, **own: object) -> dict[str, object]:
    return {
        "bootstrap.servers": cluster,
        "linger.ms": 1,
        "log_level": 0,
        "millrace.producer": "AA@ewr",
        "millrace.datacenter": "ewr",
        "millrace.window.ms": 1000,
        **{key.replace("_", "."): value for key, value in own.items()},
    }


def identities(messages) -> list[RecordIdentity]:
    return [decode_identity(dict(message.headers())[HEADER_KEY]) for message in messages]


def told_by(cluster: str) -> EventLedger:
    return ledger_of(cluster, "millrace.audit")
