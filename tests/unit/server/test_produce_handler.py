"""What the produce handler refuses before a batch reaches the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import TransactionalIdAuthorizationFailed
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

    def append_now(self, *_: object) -> tuple[Appended, None]:
        self.appended_count += 1
        return Appended(0, 0, -1, 0, False), None


def _produce(quota: Any = None, **batch: Any) -> tuple[int, int]:
    """The partition's error code, and how many batches reached the log."""
    replicas = _Replicas()
    broker = SimpleNamespace(
        replica_manager=replicas,
        metrics=BrokerMetrics(),
        quotas=SimpleNamespace(produce=quota or SimpleNamespace(active=False)),
        metadata_cache=MetadataCache(),
        clock=SimpleNamespace(steady_ms=lambda: 5),
    )
    records = build_batch([Record(b"k", b"v", (), 1)], **batch)
    request = b"".join(
        hot_produce.encode_request(VERSION, 1, "raw", {("t", 0): records}, acks=-1, timeout_ms=1000)
    )
    frame = memoryview(bytearray(request))[4:]
    head, position = decode_request(frame)
    context: Any = SimpleNamespace(broker=broker, head=head, client_address="")
    answer = produce.handle_frame(head, frame, position, context)
    assert isinstance(answer, bytes | bytearray)
    answers, _ = hot_produce.decode_response(memoryview(answer)[4:], VERSION)
    return answers[0].error_code, replicas.appended_count


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
