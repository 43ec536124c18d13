"""How long a reader of the mirror's own topics waits for an open transaction."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from millrace.broker.errors import RequestTimedOut
from millrace.mirror.delivery import topic_tail
from millrace.mirror.delivery.topic_tail import LIMIT_S, TopicTail

END = 5_000_000_000


@pytest.mark.parametrize(("left", "limit_s"), [(10, LIMIT_S), (1_000_000, LIMIT_S + 10)])
def test_limit_goes_by_what_is_left_to_read_and_not_by_where_the_log_ends(
    monkeypatch: pytest.MonkeyPatch, left: int, limit_s: float
) -> None:
    topic_id = uuid4()
    limits: list[float] = []
    timeout = asyncio.timeout

    def at_once(limit: float) -> asyncio.Timeout:
        limits.append(limit)
        return timeout(0)

    async def metadata(*_: object, **__: object) -> Any:
        return SimpleNamespace(topics={"map": SimpleNamespace(topic_id=topic_id, partitions={0: None})})

    async def list_offsets(asked: dict[Any, int]) -> Any:
        return {key: SimpleNamespace(offset=END) for key in asked}

    async def stays_open(_read: object) -> None:
        await asyncio.Event().wait()

    cluster: Any = SimpleNamespace(metadata=metadata, list_offsets=list_offsets, retrying=stays_open)
    tail = TopicTail(cluster, "map", lambda _: None, lambda: None, "test")
    tail._topic_id, tail._positions = topic_id, {0: END - left}
    monkeypatch.setattr(topic_tail.asyncio, "timeout", at_once)
    with pytest.raises(RequestTimedOut, match="stays open"):
        asyncio.run(tail.advance())
    assert limits == [pytest.approx(limit_s, abs=0.001)]
