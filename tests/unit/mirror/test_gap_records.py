"""The record of a gap: others hear of it from the target, and of each gap once."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.errors import RequestTimedOut
from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.mirror.delivery import gap_records as module
from millrace.mirror.delivery.gap_records import GapRecords
from millrace.mirror.gaps.gaps import Gap, GapClass
from millrace.mirror.topics.routes import SourcePartition

GAP = Gap(SourcePartition("ewr", "flights", 3), 3, 9, GapClass.EXPIRED, "it expired", 1_000, "")


def test_gap_names_the_target_however_long_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its name a mirror of the same name into another cluster would be taken to lack it too."""
    answers: list[Any] = [RequestTimedOut("away"), SimpleNamespace(cluster_id="T")]
    written: list[tuple[str, bytes, bytes]] = []
    counted: list[tuple[object, ...]] = []

    async def metadata(_topics: list[str]) -> Any:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def write(topic: str, records: list[tuple[bytes, bytes]], **_: object) -> None:
        ((key, value),) = records
        written.append((topic, key, value))

    monkeypatch.setattr(module, "ASK_PAUSE_S", 0)
    config: Any = SimpleNamespace(name="m")
    target: Any = SimpleNamespace(metadata=metadata)
    metrics: Any = SimpleNamespace(count_gap=lambda *what: counted.append(what))
    asyncio.run(GapRecords(config, target, SimpleNamespace(write=write), metrics).record(GAP))
    ((topic, key, value),) = written
    assert (topic, key) == (AUDIT_TOPIC, b"gap/m/ewr/flights/3/3/expired")
    assert json.loads(value)["target"] == "T"
    assert counted == [(key, "ewr", "expired")]
