"""When a waiting fetch is answered."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import decode_request
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication.partition import PartitionState
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.server.handlers import fetch
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry.metrics import BrokerMetrics

VERSION = 12
MAX_WAIT_MS = 20_000


def _ask(services: Any) -> Any:
    request = hot_fetch.FetchRequest(MAX_WAIT_MS, 1, 1 << 20, False, (PartitionFetch("t", 0, 0, 1 << 20),))
    frame = memoryview(bytearray(hot_fetch.encode_request(VERSION, 1, "raw", request)))[4:]
    head, position = decode_request(frame)
    context: Any = SimpleNamespace(broker=services)
    return fetch.handle_frame(head, frame, position, context)


def test_append_between_a_fetch_and_its_wait_is_not_overlooked(tmp_path: Path) -> None:
    """Both requests arrive in one turn of the loop: the fetch finds nothing, the produce request comes before
    the fetch has begun to wait. It must not sleep until the next append, or until its time is up."""

    async def scenario() -> int:
        logs = LogManager([tmp_path], LogConfig())
        logs.start(0)
        metrics = BrokerMetrics()
        replicas = ReplicaManager(
            1, logs, LogConfig(), clock_ms=lambda: 0, is_known=lambda *_: True, metrics=metrics
        )
        settings = SimpleNamespace(fetch_max_bytes=1 << 20)
        services = SimpleNamespace(
            replica_manager=replicas, metrics=metrics, config=SimpleNamespace(settings=settings)
        )
        try:
            await replicas.apply_topic("t", uuid.UUID(int=1), {0: PartitionState(1, 0, (1,), 1)}, {})
            answer = _ask(services)
            replicas.append_now("t", 0, memoryview(build_batch([Record(b"k", b"v", (), 1)])), 1)
            buffers = await asyncio.wait_for(answer, 5)
            response = hot_fetch.decode_response(memoryview(b"".join(buffers))[4:], VERSION)
            return len(response.partitions[0].records)
        finally:
            replicas.close()
            logs.close(0)

    assert asyncio.run(scenario()) > 0
