"""ZooKeeper as the brokers see it: one order of all writes, sessions, ephemeral nodes, watches.

A session's requests, answers and watch events travel over one connection: in order, and held up, not lost,
while the network is cut. A session from which nothing was heard for its timeout is expired here; its owner
learns of it with the next thing that reaches it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.cluster.world import Action, Network, Process, World

NAME = "zookeeper"
RETRY_MS = 15


@dataclass(slots=True)
class ZNode:
    """`version` counts the writes of this node, `zxid` all writes of the cluster when it was written last."""

    value: Any
    version: int
    created: int
    zxid: int
    owner: int | None


@dataclass(frozen=True, slots=True)
class Check:
    path: str
    version: int


@dataclass(frozen=True, slots=True)
class Set:
    path: str
    value: Any
    version: int


@dataclass(frozen=True, slots=True)
class Make:
    path: str
    value: Any
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Remove:
    path: str


class Refused(Exception):
    """A version did not match, or a node was (not) there."""


class Expired(Exception):
    """The session is over."""


class _Pipe:
    """One direction of a connection."""

    def __init__(
        self, world: World, network: Network, source: str, target: Process | None, name: str
    ) -> None:
        self._world, self._network, self._source, self._target, self._name = (
            world,
            network,
            source,
            target,
            name,
        )
        self._life = target.life if target is not None else 0
        self._waiting: deque[tuple[int, Action, tuple[Any, ...]]] = deque()
        self._is_closed = False

    def push(self, action: Action, *arguments: Any) -> None:
        arrival = self._world.now_ms + self._world.rng.randint(1, 6)
        if self._waiting:
            arrival = max(arrival, self._waiting[-1][0])
        self._waiting.append((arrival, action, arguments))
        self._world.after(arrival - self._world.now_ms, self._pump)

    def close(self) -> None:
        self._is_closed = True
        self._waiting.clear()

    def _pump(self) -> None:
        if self._is_closed or not self._waiting:
            return
        if not self._network.reaches(self._source, self._name):
            self._world.after(RETRY_MS, self._pump)
            return
        while self._waiting and self._waiting[0][0] <= self._world.now_ms:
            _, action, arguments = self._waiting.popleft()
            if self._target is None:
                action(*arguments)
            else:
                self._target.deliver(self._life, action, *arguments)


class Session:
    """One broker's session. `on_watch(path)` is called in the broker, `on_expired()` too."""

    def __init__(
        self,
        zookeeper: VirtualZooKeeper,
        number: int,
        owner: Process,
        on_watch: Action,
        on_expired: Action,
        on_pong: Action,
    ) -> None:
        self.number = number
        self.is_over = False
        self.last_heard_ms = zookeeper.world.now_ms
        self._zookeeper = zookeeper
        self._owner = owner
        self._on_watch, self._on_expired, self._on_pong = on_watch, on_expired, on_pong
        self._there = _Pipe(zookeeper.world, zookeeper.network, owner.name, None, NAME)
        self._back = _Pipe(zookeeper.world, zookeeper.network, NAME, owner, owner.name)

    def ask(self, work: Callable[[VirtualZooKeeper], Any], answer: Callable[[Any], None]) -> None:
        """`answer` gets the result, or the exception that `work` raised; nothing once the session is over."""
        self._there.push(self._serve, work, answer)

    def ping(self) -> None:
        self._there.push(self._pinged)

    def notify(self, path: str) -> None:
        self._back.push(self._on_watch, path)

    def close(self) -> None:
        """The owner is gone; the server will notice by the silence."""
        self._there.close()
        self._back.close()

    def leave(self) -> None:
        """A clean end: the session is over at once, as far as the network carries the word."""
        self._there.push(self._zookeeper.expire, self)

    def _pinged(self) -> None:
        self._touch(self._on_pong)

    def _touch(self, then: Action, *arguments: Any) -> None:
        if self.is_over:
            self._back.push(self._on_expired)
            return
        self.last_heard_ms = self._zookeeper.world.now_ms
        self._back.push(then, *arguments)

    def _serve(self, work: Callable[[VirtualZooKeeper], Any], answer: Callable[[Any], None]) -> None:
        if self.is_over:
            self._back.push(self._on_expired)
            return
        self.last_heard_ms = self._zookeeper.world.now_ms
        self._zookeeper.acting = self.number
        try:
            result = work(self._zookeeper)
        except Refused as refusal:
            result = refusal
        self._back.push(answer, result)


class VirtualZooKeeper:
    """The nodes and the sessions. `on_write(path, node)` tells the truth-keeper of every write."""

    def __init__(self, world: World, network: Network, *, session_timeout_ms: int) -> None:
        self.world, self.network = world, network
        self.session_timeout_ms = session_timeout_ms
        self.nodes: dict[str, ZNode] = {}
        self.acting = 0
        self.on_write: Callable[[str, ZNode | None], None] = lambda path, node: None
        self._zxid = 0
        self._sessions: list[Session] = []
        self._numbers = 0
        world.after(session_timeout_ms / 4, self._tick)

    def connect(self, owner: Process, on_watch: Action, on_expired: Action, on_pong: Action) -> Session:
        self._numbers += 1
        session = Session(self, self._numbers, owner, on_watch, on_expired, on_pong)
        self._sessions.append(session)
        return session

    def read(self, path: str) -> tuple[Any, int, int] | None:
        """(value, version, zxid of its creation)."""
        node = self.nodes.get(path)
        return None if node is None else (node.value, node.version, node.created)

    def below(self, prefix: str) -> dict[str, tuple[Any, int, int]]:
        return {
            path: (node.value, node.version, node.created)
            for path, node in self.nodes.items()
            if path.startswith(prefix)
        }

    def commit(self, operations: Sequence[Check | Set | Make | Remove]) -> int:
        """All or nothing; the zxid. Raises Refused."""
        for operation in operations:
            node = self.nodes.get(operation.path)
            match operation:
                case Make():
                    if node is not None:
                        raise Refused(f"{operation.path} is there")
                case Remove():
                    if node is None:
                        raise Refused(f"{operation.path} is not there")
                case Check() | Set():
                    if node is None or node.version != operation.version:
                        raise Refused(f"{operation.path} has another version")
        self._zxid += 1
        for operation in operations:
            match operation:
                case Make(path, value, ephemeral):
                    owner = self.acting if ephemeral else None
                    self.nodes[path] = ZNode(value, 0, self._zxid, self._zxid, owner)
                case Set(path, value):
                    node = self.nodes[path]
                    node.value, node.version, node.zxid = value, node.version + 1, self._zxid
                case Remove(path):
                    del self.nodes[path]
                case Check():
                    continue
            self._changed(operation.path)
        return self._zxid

    def expire(self, session: Session) -> None:
        if session.is_over:
            return
        session.is_over = True
        self._sessions.remove(session)
        doomed = [path for path, node in self.nodes.items() if node.owner == session.number]
        for path in doomed:
            self.commit([Remove(path)])

    def _changed(self, path: str) -> None:
        self.on_write(path, self.nodes.get(path))
        for session in self._sessions:
            session.notify(path)

    def _tick(self) -> None:
        for session in list(self._sessions):
            if self.world.now_ms - session.last_heard_ms > self.session_timeout_ms:
                self.world.note(f"zookeeper: session {session.number} expires")
                self.expire(session)
        self.world.after(self.session_timeout_ms / 4, self._tick)
