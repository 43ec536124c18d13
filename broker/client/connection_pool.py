"""The connections of one cluster's client: a lane to each broker for each purpose, and passing ones.

Held by `Cluster`, which says where a broker is and whom to ask; here a connection is opened, shared by
everyone who waits for it, replaced when its broker has come back elsewhere, and ended. Whether and when an
address that refused is asked again is `gates`' rule.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from millrace.broker.client.connection import Connection
from millrace.broker.client.frame_memory import FrameMemory
from millrace.broker.client.gates import Gates
from millrace.broker.client.lane import Lane
from millrace.broker.client.login import Access
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.client.opening import open_connection
from millrace.broker.client.retry import RECONNECT_BACK_OFF
from millrace.broker.client.security import Security
from millrace.broker.errors import NetworkException
from millrace.broker.protocol.address import Address

T = TypeVar("T")

CONNECT_TIMEOUT_MS = 10_000


class ConnectionPool:
    """See the module's text. On one event loop."""

    def __init__(
        self,
        name: str,
        *,
        client_id: str,
        request_timeout_ms: int,
        security: Security | None,
        max_response_size: int,
        frame_memory: FrameMemory | None,
        rng: random.Random,
        on_failed: Callable[[], None],
    ) -> None:
        """`name` is the cluster's, `on_failed` is called when a lane's connection could not be opened; the
        others are `Cluster`'s."""
        self.gates = Gates(rng)
        self.is_closed = False
        self.throttled_ms = 0  # asked for by servers over whose quotas this client was, in all
        self._throttled_until = 0.0
        self._name = name
        self._client_id = client_id
        self._request_timeout_ms = request_timeout_ms
        self._access = _access(security)
        self._max_response_size = max_response_size
        self._frame_memory = frame_memory
        self._rng = rng
        self._on_failed = on_failed
        self._lanes: dict[tuple[int, str], Lane] = {}
        self._background: set[asyncio.Task[Any]] = set()

    # --- life ---------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close every connection; requests under way fail with NetworkException."""
        self.is_closed = True
        for lane in self._lanes.values():
            lane.interrupt()
        for task in self._background:
            task.cancel()
        ending = [lane.opening for lane in self._lanes.values() if lane.opening is not None]
        await asyncio.gather(*ending, *self._background, return_exceptions=True)
        self._lanes.clear()

    def check_open(self) -> None:
        """Raises NetworkException after `close`."""
        if self.is_closed:
            raise NetworkException(f"cluster {self._name}: closed by this client")

    def take_security(self, security: Security | None) -> None:
        """See `Cluster.take_security`."""
        self._access = _access(security)
        self.gates = Gates(self._rng)
        for lane in self._lanes.values():
            lane.not_before, lane.failure_count = 0.0, 0
            lane.interrupt()

    def close_purpose(self, purpose: str, node_id: int | None) -> None:
        """See `Cluster.close_purpose`."""
        for key in [key for key in self._lanes if key[1] == purpose and node_id in (None, key[0])]:
            lane = self._lanes.pop(key)
            lane.is_given_up = True
            lane.interrupt()

    def retire_moved(self, view: ClusterMetadata) -> None:
        """Replace connections to brokers that have left or come back elsewhere; let their requests end."""
        self.gates.forget_others({broker.address for broker in view.brokers.values()})
        for (node_id, _), lane in self._lanes.items():
            broker = view.brokers.get(node_id)
            connection = lane.connection
            if connection is not None and (broker is None or broker.address != connection.address):
                lane.connection = None
                self._spawn(connection.close_when_idle(self._request_timeout_ms))

    @property
    def is_throttled(self) -> bool:
        """Whether a server wants nothing more from one of the connections now (a quota, KIP-219)."""
        return _now() < self._throttled_until

    def _throttled(self, throttle_ms: int) -> None:
        self.throttled_ms += throttle_ms
        self._throttled_until = max(self._throttled_until, _now() + throttle_ms / 1000)

    # --- lanes --------------------------------------------------------------------------------------

    def lane(self, node_id: int, purpose: str) -> Lane:
        return self._lanes.setdefault((node_id, purpose), Lane())

    def in_random_order(self, node_ids: Iterable[int], purpose: str) -> list[int]:
        """A random order: those with an open connection first, and last those that want nothing more now."""
        order = list(node_ids)
        self._rng.shuffle(order)

        def place(node_id: int) -> tuple[bool, bool]:
            lane = self._lanes.get((node_id, purpose)) or Lane()
            return lane.is_throttled, not lane.is_open

        return sorted(order, key=place)

    async def open_lane(self, lane: Lane, address: Address) -> Connection:
        """The lane's connection, opened if need be; everyone who waits for it shares one attempt."""
        if lane.connection is not None and lane.connection.is_open:
            return lane.connection
        self.check_open()
        if lane.opening is None:
            lane.opening = self._spawn(self.open(address))
            lane.opening.add_done_callback(lambda task: self._opened(lane, task))
        opening = lane.opening
        try:
            # Shielded: a caller that gives up must not take the connection from the others.
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not opening.cancelled() or (task is not None and task.cancelling()):
                raise
            # Nobody cancelled the caller: his task must not end without a word.
            raise NetworkException(f"cluster {self._name} at {address}: given up by this client") from None

    def _opened(self, lane: Lane, task: asyncio.Task[Connection]) -> None:
        lane.opening = None
        if task.cancelled():
            return
        if task.exception() is None:
            lane.connection = task.result()
            lane.failure_count = 0
            if lane.is_given_up:  # it had opened just before it was to be cancelled
                lane.connection.close()
            return
        self._on_failed()
        lane.failure_count += 1
        delay_ms = RECONNECT_BACK_OFF.delay_ms(lane.failure_count, self._rng.random())
        lane.not_before = _now() + delay_ms / 1000

    # --- connections --------------------------------------------------------------------------------

    async def open(
        self, address: Address, deadline: float = math.inf, wait_ms: float = math.inf
    ) -> Connection:
        """A connection of the caller's own, by `deadline` (the loop's time); where the address has refused
        and is not to be asked again within `wait_ms`, what it said is raised."""
        return await self.gates.open(address, lambda: self._open(address, deadline), wait_ms)

    async def _open(self, address: Address, deadline: float) -> Connection:
        self.check_open()
        left_ms = max(0.0, (deadline - _now()) * 1000)
        connection = await open_connection(
            self._name,
            address,
            client_id=self._client_id,
            timeout_ms=min(self._request_timeout_ms, CONNECT_TIMEOUT_MS, left_ms),
            access=self._access,
            max_response_size=self._max_response_size,
            frame_memory=self._frame_memory,
        )
        connection.on_throttle = self._throttled
        return connection

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task of the pool's own, ended by `close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _access(security: Security | None) -> Access | None:
    """None where connections are plain and nobody logs in."""
    return None if security is None or security.protocol == "PLAINTEXT" else Access(security)


def _now() -> float:
    return asyncio.get_running_loop().time()
