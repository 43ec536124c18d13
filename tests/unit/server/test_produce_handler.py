"""What the produce handler refuses before a batch reaches the log, and what it answers after."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import (
    KafkaStorageError,
    RequestTimedOut,
    TransactionalIdAuthorizationFailed,
)
from millrace.broker.protocol import hot_produce
from millrace.broker.protocol.frames import decode_request
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication.replica_manager import Appended
from millrace.broker.server.handlers import produce
from millrace.broker.telemetry.metrics import BrokerMetrics

VERSION = 9


class _Replicas:
    def __init__(self) -> None:
        self.appended_count = 0

    def append_now(self, *_: object, **__: object) -> tuple[Appended, None]:
        self.appended_count += 1
        return Appended(0, 0, -1, 0, False), None


def _ask(replicas: Any, batches: dict[tuple[str, int], Any], timeout_ms: int, quota: Any = None) -> Any:
    """What the handler gives for a produce request of these batches."""
    broker = SimpleNamespace(
        replica_manager=replicas,
        metrics=BrokerMetrics(),
        quotas=SimpleNamespace(produce=quota or SimpleNamespace(active=False)),
        metadata_cache=MetadataCache(),
        clock=SimpleNamespace(steady_ms=lambda: 5),
    )
    request = b"".join(hot_produce.encode_request(VERSION, 1, "raw", batches, acks=-1, timeout_ms=timeout_ms))
    frame = memoryview(bytearray(request))[4:]
    head, position = decode_request(frame)
    context: Any = SimpleNamespace(broker=broker, head=head, client_address="")
    return produce.handle_frame(head, frame, position, context)


def _produce(quota: Any = None, **batch: Any) -> tuple[int, int]:
    """The partition's error code, and how many batches reached the log."""
    replicas = _Replicas()
    answer = _ask(replicas, {("t", 0): build_batch([Record(b"k", b"v", (), 1)], **batch)}, 1000, quota)
    assert isinstance(answer, bytes | bytearray)
    answers, _ = hot_produce.decode_response(memoryview(answer)[4:], VERSION)
    return answers[0].error_code, replicas.appended_count


def test_partitions_of_a_request_succeed_or_fail_each_by_its_own_wait() -> None:
    """One whose flush fails or comes late takes none of the others with it."""

    async def scenario() -> list[int]:
        loop = asyncio.get_running_loop()
        waits = [None, *(loop.create_future() for _ in range(3))]

        def append_now(_topic: str, partition: int, *_: object, **__: object) -> tuple[Appended, Any]:
            return Appended(0, 0, -1, 0, False), waits[partition]

        batches = {("t", number): build_batch([Record(b"k", b"v", (), 1)]) for number in range(4)}
        answer = _ask(SimpleNamespace(append_now=append_now), batches, 1)
        waits[1].set_result(None)
        waits[2].set_exception(KafkaStorageError("its disk failed"))
        answers, _ = hot_produce.decode_response(memoryview(await answer)[4:], VERSION)
        return [each.error_code for each in answers]

    assert asyncio.run(scenario()) == [0, 0, KafkaStorageError.code, RequestTimedOut.code]


def test_plain_batch_is_appended() -> None:
    assert _produce() == (0, 1)


def test_use_is_measured_by_the_steady_clock() -> None:
    """Set back, the time of day would count all that follows as one moment, and throttle for ever."""
    charged: list[tuple[str, int]] = []

    def charge(client_id: str, _size: int, at_ms: int) -> int:
        charged.append((client_id, at_ms))
        return 0

    assert _produce(SimpleNamespace(active=True, charge=charge)) == (0, 1)
    assert charged == [("raw", 5)]


def test_transactional_batch_without_a_transaction_is_refused() -> None:
    """In the log, it would stop every reader of committed data at its offset, for ever."""
    code = TransactionalIdAuthorizationFailed.code
    assert _produce(producer_id=7, producer_epoch=0, base_sequence=0, transactional=True) == (code, 0)
