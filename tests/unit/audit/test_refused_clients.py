"""A producer whose settings are refused leaves nothing half made behind: Python itself would complain of it
wherever the rest is collected, in a line that names neither the setting nor the place."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import Any

import pytest

from millrace.audit.aiokafka_producer import AuditedAIOKafkaProducer
from millrace.audit.client_producer import AuditedClientProducer
from millrace.audit.kafka_python_producer import AuditedKafkaProducer
from millrace.audit.producer import AuditedProducer
from millrace.broker.errors import ConfigError

MAKERS = {
    "kafka-python": lambda: AuditedKafkaProducer(millrace_window_ms=0),
    "aiokafka": lambda: AuditedAIOKafkaProducer(millrace_window_ms=0),
    "our client": lambda: AuditedClientProducer(None, millrace_window_ms=0),  # type: ignore[arg-type]
    "confluent-kafka": lambda: AuditedProducer({"millrace.window.ms": 0}),
}


@pytest.mark.parametrize("client", MAKERS)
def test_a_refused_producer_is_collected_in_silence(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)

    async def refused() -> None:
        with pytest.raises(ConfigError, match=r"millrace\.window\.ms"):
            MAKERS[client]()

    asyncio.run(refused())
    gc.collect()
    assert [repr(each.exc_value) for each in complaints] == []
