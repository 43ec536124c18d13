"""A target for the mirror's own records: `SystemRecords` writes to it, and its pauses take no time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client.raw_produce import ProduceOutcome
from millrace.mirror.delivery import system_records

MOST_PAUSES = 1_000


class OwnTarget:
    """What becomes of a batch is for `produce` to say."""

    name = "agg"
    partitions = 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        no_sleep = asyncio.sleep
        pauses = 0

        async def ensure_topic(*_: object) -> int:
            return self.partitions

        async def at_once(_seconds: float) -> None:
            nonlocal pauses
            pauses += 1
            assert pauses <= MOST_PAUSES, "asked without end"
            await no_sleep(0)

        monkeypatch.setattr(system_records, "produce", type(self).produce)
        monkeypatch.setattr(system_records, "init_producer_id", type(self).new_identity)
        monkeypatch.setattr(system_records, "ensure_topic", ensure_topic)
        monkeypatch.setattr(system_records.asyncio, "sleep", at_once)

    async def metadata(self, *_: object) -> Any:
        return SimpleNamespace(leader=lambda *_: 1)

    def observe(self, _code: int) -> None: ...

    async def new_identity(self) -> tuple[int, int]:
        return 1, 0

    async def produce(self, _node: int, batches: dict[Any, Any]) -> dict[Any, ProduceOutcome]:
        raise NotImplementedError
