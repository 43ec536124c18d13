"""A ZooKeeper server and its clients' sessions in virtual time, for simulations of whatever uses `Session`.

Time passes only when nothing is left to do. Every request takes a random time each way; a connection can be
cut at any moment, which loses answers and watches, and a session that is cut off for too long expires.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.broker.coordination.session import (
    Node,
    NodeExists,
    NodeMissing,
    SessionError,
    SessionState,
    VersionConflict,
)
from millrace.broker.errors import MillraceError


class _VirtualTime(selectors.DefaultSelector):
    """A selector that never waits: the time that it should wait is over at once."""

    now = 1_000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("nothing will ever happen again")
        self.now += timeout + 1e-6 if timeout > 0 else 0.0
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _VirtualTime()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


@dataclass
class Znode:
    data: bytes
    version: int = 0
    owner: int = 0


@dataclass
class VirtualZooKeeper:
    """The server: znodes, sessions, one-shot watches."""

    rng: random.Random
    nodes: dict[str, Znode] = field(default_factory=lambda: {"": Znode(b"")})
    live: set[int] = field(default_factory=set)
    watches: dict[tuple[str, str], list[Callable[[], None]]] = field(default_factory=dict)
    next_session: int = 1

    def latency(self) -> float:
        return self.rng.choice((0.001, 0.003, 0.01, self.rng.uniform(0.0, 0.2)))

    def open_session(self) -> int:
        self.next_session += 1
        self.live.add(self.next_session)
        return self.next_session

    def expire(self, session: int) -> None:
        if session in self.live:
            self.live.discard(session)
            for path in [path for path, node in self.nodes.items() if node.owner == session]:
                self.delete(path)

    def node(self, path: str) -> Znode:
        if path not in self.nodes:
            raise NodeMissing(path)
        return self.nodes[path]

    def children(self, path: str) -> list[str]:
        self.node(path)
        names = {each[len(path) + 1 :] for each in self.nodes if each.startswith(path + "/")}
        return sorted(name for name in names if "/" not in name)

    def create(self, path: str, data: bytes, owner: int = 0) -> None:
        parent = path.rpartition("/")[0]
        self.node(parent)
        if path in self.nodes:
            raise NodeExists(path)
        self.nodes[path] = Znode(data, 0, owner)
        self.fire(("data", path), ("children", parent))

    def ensure(self, path: str) -> None:
        parts = path.split("/")
        for end in range(2, len(parts) + 1):
            if "/".join(parts[:end]) not in self.nodes:
                self.create("/".join(parts[:end]), b"")

    def set(self, path: str, data: bytes, version: int = -1) -> None:
        node = self.node(path)
        if version not in (-1, node.version):
            raise VersionConflict(path)
        node.data = data
        node.version += 1
        self.fire(("data", path))

    def delete(self, path: str) -> None:
        self.node(path)
        del self.nodes[path]
        self.fire(("data", path), ("children", path), ("children", path.rpartition("/")[0]))

    def fire(self, *keys: tuple[str, str]) -> None:
        for key in keys:
            for callback in self.watches.pop(key, []):
                callback()


class VirtualSession:
    """What the registry and the connector use of `Session`. The connection can be cut at any moment: then
    requests under way fail, done or not, and watches are gone."""

    server: VirtualZooKeeper

    def __init__(self, hosts: str, *, session_timeout_ms: int, connection_timeout_ms: int) -> None:
        self._zk = self.server
        self.session_timeout_ms = session_timeout_ms
        self.id = 0
        self.state = SessionState.LOST
        self._listeners: list[Callable[[SessionState], None]] = []
        self._connection = 0
        self._is_cut = False
        self._heard = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._is_over = False

    async def start(self) -> None:
        self.id = self._zk.open_session()
        self._heard.set()
        self._tell(SessionState.CONNECTED)

    async def stop(self) -> None:
        self._is_over = True
        if not self._is_cut:
            self._zk.expire(self.id)

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append(listener)

    def _tell(self, state: SessionState) -> None:
        self.state = state
        for listener in self._listeners:
            listener(state)

    def cut(self, for_s: float | None) -> None:
        """Lose the connection; None: for ever (the process was killed)."""
        if self._is_cut or self._is_over:
            return
        loop = asyncio.get_running_loop()
        self._is_cut = True
        self._connection += 1
        timeout_s = self.session_timeout_ms / 1000
        session = self.id
        self._expiry = loop.call_later(timeout_s * self._zk.rng.uniform(1, 1.5), self._zk.expire, session)
        if for_s is not None:
            notice_s = self._zk.rng.uniform(0, timeout_s * 0.6)
            loop.call_later(notice_s, self._hear_of_it)
            loop.call_later(notice_s + for_s, self._reconnect)

    def _hear_of_it(self) -> None:
        if not self._is_over:
            self._heard.clear()
            self._tell(SessionState.SUSPENDED)

    def _reconnect(self) -> None:
        if self._is_over:
            return
        assert self._expiry is not None
        self._expiry.cancel()
        self._is_cut = False
        self._connection += 1
        if self.id not in self._zk.live:
            self._tell(SessionState.LOST)
            self.id = self._zk.open_session()
        self._heard.set()
        self._tell(SessionState.CONNECTED)

    async def _ask(self, action: Callable[[], Any]) -> Any:
        """One request: latency there, the action, latency back."""
        session = self.id
        await self._heard.wait()
        if session != self.id:
            raise SessionError("session expired")
        connection = self._connection
        await asyncio.sleep(self._zk.latency())
        await self._check(connection)
        try:
            result, error = action(), None
        except MillraceError as problem:
            result, error = None, problem
        await asyncio.sleep(self._zk.latency())
        await self._check(connection)
        if error is not None:
            raise error
        return result

    async def _check(self, connection: int) -> None:
        if self._connection != connection:
            # Silence, until the client notices that the connection is gone.
            while self._is_cut and self._heard.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            raise SessionError("connection loss")

    def _armed(self, kind: str, path: str, watch: Callable[[], None] | None) -> None:
        if watch is None:
            return
        connection, loop = self._connection, asyncio.get_running_loop()

        def fire() -> None:
            loop.call_later(self._zk.latency(), lambda: watch() if self._connection == connection else None)

        self._zk.watches.setdefault((kind, path), []).append(fire)

    async def get(self, path: str, watch: Callable[[], None] | None = None) -> Node:
        def action() -> Node:
            node = self._zk.node(path)
            self._armed("data", path, watch)
            return Node(node.data, node.version, node.owner, 0)

        return await self._ask(action)

    async def children(self, path: str, watch: Callable[[], None] | None = None) -> list[str]:
        def action() -> list[str]:
            names = self._zk.children(path)
            self._armed("children", path, watch)
            return names

        return await self._ask(action)

    async def exists(self, path: str, watch: Callable[[], None] | None = None) -> bool:
        def action() -> bool:
            self._armed("data", path, watch)
            return path in self._zk.nodes

        return await self._ask(action)

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        await self._ask(lambda: self._zk.create(path, data, self.id if ephemeral else 0))

    async def ensure(self, path: str) -> None:
        await self._ask(lambda: self._zk.ensure(path))

    async def set(self, path: str, data: bytes, version: int = -1) -> None:
        await self._ask(lambda: self._zk.set(path, data, version))

    async def delete(self, path: str, version: int = -1) -> None:
        await self._ask(lambda: self._zk.delete(path))
