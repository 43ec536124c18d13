"""A broker's services as the fetch handler sees them, over real logs, and requests to it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import decode_request
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication.partition import PartitionState
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.server.context import ConnectionMemory
from millrace.broker.server.fetch_sessions import FetchSessionCache
from millrace.broker.server.handlers import fetch
from millrace.broker.server.memory_limits import UNBOUNDED, AnswerBacklog
from millrace.broker.server.quotas import ClientQuotas
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.telemetry.metrics import BrokerMetrics

VERSION = 12
MAX_WAIT_MS = 3_600_000
"""Longer than any test: what is answered was not waited for in vain."""


def frame_of(request: bytes | bytearray) -> tuple[Any, memoryview, int]:
    frame = memoryview(bytearray(request))[4:]
    return decode_request(frame)[0], frame, decode_request(frame)[1]


def ask(
    services: Any,
    *,
    min_bytes: int = 1,
    max_wait_ms: int = MAX_WAIT_MS,
    version: int = VERSION,
    session: tuple[int, int] = (0, -1),
    offsets: tuple[int, ...] = (0,),
    read_committed: bool = False,
) -> Any:
    """`session`: its id, and the epoch of this request in it. `offsets`: the partition stands there once for
    each."""
    asked = tuple(PartitionFetch("t", 0, offset, 1 << 20) for offset in offsets)
    session_id, epoch = session
    request = hot_fetch.FetchRequest(
        max_wait_ms, min_bytes, 1 << 20, read_committed, asked, session_id=session_id, session_epoch=epoch
    )
    head, frame, position = frame_of(hot_fetch.encode_request(version, 1, "raw", request))
    context: Any = SimpleNamespace(broker=services, memory=ConnectionMemory())
    return fetch.handle_frame(head, frame, position, context)


def decoded(buffers: Any, version: int = VERSION) -> hot_fetch.FetchResponse:
    return hot_fetch.decode_response(memoryview(b"".join(buffers))[4:], version)


def batch(value: bytes = b"v") -> memoryview:
    return memoryview(build_batch([Record(b"k", value, (), 1)]))


@asynccontextmanager
async def serving(
    folder: Path, *, leader: int = 1, largest_answer: int = 1 << 20, partitions: int = 1
) -> AsyncIterator[Any]:
    """The services of broker 1, which has a replica of t-0; with more `partitions`, so has broker 2, which
    is not in sync."""
    logs = LogManager([folder], LogConfig())
    logs.start(0)
    metrics = BrokerMetrics()
    replicas = ReplicaManager(
        1, logs, LogConfig(), clock_ms=lambda: 0, is_known=lambda *_: True, metrics=metrics
    )
    services = SimpleNamespace(
        replica_manager=replicas,
        metrics=metrics,
        metadata_cache=MetadataCache(),
        clock=SimpleNamespace(steady_ms=lambda: 0),  # the time of day is not asked for
        quotas=ClientQuotas(),
        fetch_sessions=FetchSessionCache(10),
        backlog=AnswerBacklog(UNBOUNDED, largest_answer, 1 << 20),
    )
    cache, topic_id = services.metadata_cache, uuid.UUID(int=1)
    for number in (1, 2):
        cache.set_broker(BrokerRegistration(number, f"host-{number}", 9090 + number))
    assignment: dict[int, tuple[int, ...]] = dict.fromkeys(range(partitions), (1, 2))
    cache.set_assignment("t", TopicAssignment(topic_id, assignment))
    state = PartitionState(leader, 5, (leader,), 1)
    for number in assignment:
        cache.set_state("t", number, state, 1)
    followed = assignment if partitions > 1 else {}
    try:
        await replicas.hosted.apply_topic("t", topic_id, dict.fromkeys(assignment, state), {}, followed)
        yield services
    finally:
        replicas.close()
        logs.close(0)
