"""The foreign clients, each an implementation of the protocol of its own.

confluent-kafka (librdkafka, C), kafka-python and aiokafka; what they have in common is in `client_face.py`.
The Java client comes in as the console tools of Apache Kafka (`java_tools.py`), and an older librdkafka as
kcat.
"""

from __future__ import annotations

from tests.wire.client_aiokafka import AioKafka
from tests.wire.client_confluent import Confluent
from tests.wire.client_face import (
    CODECS,
    PATIENCE_S,
    ForeignClient,
    GroupMember,
    Received,
    Refused,
    Sent,
    error_name,
    wait_until,
)
from tests.wire.client_kafka_python import KafkaPython

CLIENTS: tuple[type[ForeignClient], ...] = (Confluent, KafkaPython, AioKafka)

__all__ = [
    "CLIENTS",
    "CODECS",
    "PATIENCE_S",
    "AioKafka",
    "Confluent",
    "ForeignClient",
    "GroupMember",
    "KafkaPython",
    "Received",
    "Refused",
    "Sent",
    "error_name",
    "wait_until",
]
