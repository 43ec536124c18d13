"""The throttle of moves, as it is asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.reassignments import set_throttle


class Brokers(Cluster):
    """Brokers 2 and 3, of which 2 is the controller; broker 1 is dead."""

    def __init__(self) -> None:
        super().__init__("c", ["127.0.0.1:1"], client_id="x")
        self.asked: list[tuple[int, str]] = []

    async def metadata(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(controller_id=2, brokers={2: None, 3: None})

    async def request(self, request: Any, *, node_id: int | None = None, **_: Any) -> Any:
        assert node_id in (2, 3)
        self.asked.append((node_id, request.resources[0].resource_name))
        return SimpleNamespace(responses=[SimpleNamespace(error_code=0)])


def test_partitions_are_moved_off_a_dead_broker_at_a_throttle_as_well() -> None:
    cluster = Brokers()

    async def throttle() -> None:
        await set_throttle(cluster, {("t", 0): ((1, 2), (2, 3))}, 1_000)
        await cluster.close()

    asyncio.run(throttle())
    assert cluster.asked == [(2, "2"), (3, "3"), (2, "t")]
