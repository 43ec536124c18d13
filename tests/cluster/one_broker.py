"""What tests that share one broker (`conftest.py`) ask it for before they begin."""

from __future__ import annotations

import uuid

from millrace.broker.protocol.frames import Api
from tests.raw_client import RawClient

TIMEOUT_MS = 60_000
"""What a request that changes topics may wait for: its answer comes once the change can be used."""


def create(client: RawClient, partition_count: int = 1, **config: str) -> str:
    name = f"topic-{uuid.uuid4().hex[:8]}"
    answer = client.ask(
        Api.CREATE_TOPICS,
        7,
        topics=[
            {
                "name": name,
                "num_partitions": partition_count,
                "replication_factor": 1,
                "configs": [{"name": key.replace("_", "."), "value": value} for key, value in config.items()],
            }
        ],
        timeout=TIMEOUT_MS,
    )
    assert answer.topics[0].error_code == 0, answer
    return name


def topic_id_of(client: RawClient, topic: str) -> uuid.UUID:
    return client.ask(Api.METADATA, 12, topics=[{"name": topic}]).topics[0].topic_id
