"""The one door to ZooKeeper: asyncio in front, kazoo behind. Nothing else imports kazoo.

kazoo runs its own threads; every answer, watch and state change crosses to the event loop with
`call_soon_threadsafe`, and nothing here blocks a kazoo thread. Watches are ZooKeeper's one-shot watches:
after each event the reader reads again. When the connection drops, ZooKeeper's watches on it are gone:
listeners hear SUSPENDED, and on CONNECTED they must read everything again. LOST means the session has
ended and with it every ephemeral node; kazoo starts a new session by itself, heard as CONNECTED.

Errors: `NodeMissing`, `NodeExists`, `VersionConflict`, and `SessionError` for a connection that was lost
while the answer was due (the operation may or may not have happened). `RequestTooLarge`, a SessionError too,
is raised before anything is sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import select
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Self

import structlog
from kazoo.client import KazooClient, KazooState
from kazoo.exceptions import (
    BadVersionError,
    KazooException,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.handlers.utils import fileobj_to_fd
from kazoo.retry import KazooRetry

from millrace.broker.errors import ConfigError, MillraceError, ZooKeeperUnreachable
from millrace.broker.protocol.address import CONNECT_EXPECTED

log = structlog.get_logger("millrace.broker")


class NodeMissing(MillraceError):
    """The znode (or its parent) is not there."""


class NodeExists(MillraceError):
    """The znode is there already."""


class VersionConflict(MillraceError):
    """The znode changed since it was read."""


class SessionError(MillraceError):
    """The connection was lost while an answer was due; the operation may have happened."""


class RequestTooLarge(SessionError):
    """ZooKeeper would close the connection on a request of this size: it was not sent."""


class SessionState(Enum):
    """What has become of the session."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Node:
    """A znode as read. `owner` is the session that an ephemeral node belongs to, 0 for a lasting one."""

    data: bytes
    version: int
    owner: int
    created_zxid: int


@dataclass(frozen=True, slots=True)
class Create:
    path: str
    data: bytes
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class SetData:
    path: str
    data: bytes
    version: int = -1


@dataclass(frozen=True, slots=True)
class Delete:
    path: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class Check:
    """The transaction holds only while `path` has this version."""

    path: str
    version: int


Operation = Create | SetData | Delete | Check

LARGEST_REQUEST = 0xFFFFF - 1_024
"""ZooKeeper's `jute.maxbuffer` where nobody has set it, less the head of a request."""

_HEAD_BYTES = 21
"""Of an operation in a transaction: its head, the lengths of path and data, the version."""
_ACCESS_BYTES = 27
"""Of a creation besides: who may do what, and the flags."""


def operation_bytes(operation: Operation) -> int:
    """How much of a request an operation is, at most, without the chroot."""
    match operation:
        case Create(path, data):
            return _HEAD_BYTES + len(path) + len(data) + _ACCESS_BYTES
        case SetData(path, data):
            return _HEAD_BYTES + len(path) + len(data)
        case Delete(path) | Check(path):
            return _HEAD_BYTES + len(path)


StateListener = Callable[[SessionState], None]

_STATES = {
    KazooState.CONNECTED: SessionState.CONNECTED,
    KazooState.SUSPENDED: SessionState.SUSPENDED,
    KazooState.LOST: SessionState.LOST,
}


class PollingHandler(SequentialThreadingHandler):
    """kazoo's threads, with one system call for a look at its sockets instead of four: a request and its
    answer take five looks, and a start reads thousands of znodes."""

    def select(
        self,
        rlist: Iterable[Any],
        wlist: Iterable[Any],
        xlist: Iterable[Any],
        timeout: float | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """As `select.select`, for any file descriptor; `xlist` is not looked at. What has failed or was
        closed by the other side is ready: using it says so. Raises TypeError for what was closed here."""
        masks: dict[int, int] = {}
        readers = [(fileobj_to_fd(each), each) for each in rlist]
        writers = [(fileobj_to_fd(each), each) for each in wlist]
        for members, mask in ((readers, select.POLLIN), (writers, select.POLLOUT)):
            for descriptor, _ in members:
                masks[descriptor] = masks.get(descriptor, 0) | mask
        poller = select.poll()
        for descriptor, mask in masks.items():
            poller.register(descriptor, mask)
        ready = dict(poller.poll(None if timeout is None else math.ceil(timeout * 1000)))
        return (
            [each for descriptor, each in readers if ready.get(descriptor, 0) & ~select.POLLOUT],
            [each for descriptor, each in writers if ready.get(descriptor, 0) & ~select.POLLIN],
            [],
        )


class Session:
    """A ZooKeeper session below one chroot. Call everything from the event loop that called `start`."""

    def __init__(self, hosts: str, *, session_timeout_ms: int, connection_timeout_ms: int) -> None:
        """`hosts` is ZooKeeper's connect string with the chroot: `a:2181,b:2181/dc1`."""
        self._servers, slash, chroot = hosts.partition("/")
        self._chroot = slash + chroot.strip("/") if chroot.strip("/") else ""
        self._session_timeout_ms = session_timeout_ms
        self._connection_timeout_ms = connection_timeout_ms
        self._client: KazooClient | None = None
        self._listeners: list[StateListener] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.state = SessionState.LOST

    @property
    def id(self) -> int:
        """The session's id, as `Node.owner` shows it; 0 while there is none."""
        client_id = self._kazoo.client_id
        return int(client_id[0]) if client_id else 0

    @property
    def session_timeout_ms(self) -> int:
        """The timeout that the server agreed to, which may differ from the one asked for."""
        return int(self._kazoo._session_timeout) or self._session_timeout_ms

    @property
    def _kazoo(self) -> KazooClient:
        if self._client is None:
            raise SessionError("the ZooKeeper session has not been started")
        return self._client

    async def start(self) -> Self:
        """Connect, and make the chroot. Raises ZooKeeperUnreachable, ConfigError."""
        self._loop = asyncio.get_running_loop()
        logger = logging.getLogger("kazoo.client")
        logger.setLevel(logging.ERROR)
        try:
            self._client = KazooClient(
                hosts=self._servers,
                timeout=self._session_timeout_ms / 1000,
                connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=2, max_jitter=0.2),
                logger=logger,
                handler=PollingHandler(),
            )
        except ValueError:
            raise ConfigError("zookeeper", self._servers, CONNECT_EXPECTED) from None
        self._client.add_listener(self._on_state)
        try:
            await asyncio.to_thread(self._client.start, self._connection_timeout_ms / 1000)
            if self._chroot:
                await asyncio.to_thread(self._client.ensure_path, self._chroot)
                self._client.chroot = self._chroot
        except ValueError:
            await self.stop()
            raise ConfigError("zookeeper", self._chroot, "a path without . or .. after the servers") from None
        except (KazooTimeoutError, KazooException) as error:
            await self.stop()
            reason = f": {error}" if str(error) and not isinstance(error, KazooTimeoutError) else ""
            raise ZooKeeperUnreachable(
                f"no ZooKeeper at {self._servers} within {self._connection_timeout_ms / 1000:g} s{reason}; "
                "start it or correct the zookeeper address"
            ) from None
        return self

    async def stop(self) -> None:
        """End the session: ephemeral nodes vanish at once, or when it expires where the connection hangs."""
        if self._client is None:
            return
        self._client.remove_listener(self._on_state)
        try:
            await asyncio.to_thread(self._client.stop)
            await asyncio.to_thread(self._client.close)
        except KazooException as error:
            log.warning("the ZooKeeper connection did not end", error=str(error))

    def on_state(self, listener: StateListener) -> None:
        """Hear of state changes, on the event loop, in order."""
        self._listeners.append(listener)

    def _on_state(self, state: str) -> None:
        self._cross(self._tell_state, _STATES[state])

    def _tell_state(self, state: SessionState) -> None:
        self.state = state
        for listener in self._listeners:
            listener(state)

    def _cross(self, callback: Callable[..., None], *arguments: Any) -> None:
        """From a kazoo thread to the event loop; a loop that has closed needs no answer any more."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not loop.is_closed():
                raise

    async def get(self, path: str, watch: Callable[[], None] | None = None) -> Node:
        """Read a znode; `watch` is called once, on the loop, when it changes next. Raises NodeMissing."""
        data, stat = await self._answer(self._kazoo.get_async(path, watch=self._watch(watch)))
        return Node(data or b"", stat.version, stat.ephemeralOwner, stat.czxid)

    async def children(self, path: str, watch: Callable[[], None] | None = None) -> list[str]:
        """Names of a znode's children. Raises NodeMissing."""
        return list(await self._answer(self._kazoo.get_children_async(path, watch=self._watch(watch))))

    async def exists(self, path: str, watch: Callable[[], None] | None = None) -> bool:
        """Whether the znode is there; `watch` also fires when it comes into being."""
        return await self._answer(self._kazoo.exists_async(path, watch=self._watch(watch))) is not None

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        """Raises NodeExists, RequestTooLarge, or NodeMissing when the parent is not there."""
        self._refuse_too_large([Create(path, data)])
        await self._answer(self._kazoo.create_async(path, data, ephemeral=ephemeral))

    async def ensure(self, path: str) -> None:
        """Make a lasting znode and its parents where they are missing."""
        await self._answer(self._kazoo.ensure_path_async(path))

    async def set(self, path: str, data: bytes, version: int = -1) -> None:
        """Raises NodeMissing, VersionConflict, RequestTooLarge."""
        self._refuse_too_large([SetData(path, data)])
        await self._answer(self._kazoo.set_async(path, data, version))

    async def delete(self, path: str, version: int = -1) -> None:
        """Raises NodeMissing, VersionConflict."""
        await self._answer(self._kazoo.delete_async(path, version))

    async def commit(self, operations: Sequence[Operation]) -> None:
        """All of it or none of it. Raises the error of the operation that failed, and RequestTooLarge."""
        self._refuse_too_large(operations)
        transaction = self._kazoo.transaction()
        for operation in operations:
            match operation:
                case Create(path, data, ephemeral):
                    transaction.create(path, data, ephemeral=ephemeral)
                case SetData(path, data, version):
                    transaction.set_data(path, data, version)
                case Delete(path, version):
                    transaction.delete(path, version)
                case Check(path, version):
                    transaction.check(path, version)
        results = await self._answer(transaction.commit_async())
        for operation, result in zip(operations, results, strict=True):
            if isinstance(result, Exception) and not isinstance(
                result, RolledBackError | RuntimeInconsistency
            ):
                raise _translated(result, operation.path)
        failed = next((result for result in results if isinstance(result, Exception)), None)
        if failed is not None:
            raise SessionError(f"a transaction was rolled back: {failed!r}")

    def _refuse_too_large(self, operations: Sequence[Operation]) -> None:
        size = sum(operation_bytes(operation) + len(self._chroot) for operation in operations)
        if size > LARGEST_REQUEST:
            raise RequestTooLarge(
                f"a request of {size} bytes, and ZooKeeper takes {LARGEST_REQUEST} (jute.maxbuffer); "
                f"its first znode is {operations[0].path}"
            )

    def _watch(self, callback: Callable[[], None] | None) -> Callable[[Any], None] | None:
        return None if callback is None else lambda _event: self._cross(callback)

    def _answer(self, result: Any) -> Awaitable[Any]:
        """kazoo's future as one of the loop's, with its errors translated."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        # kazoo's keeps whom it told: who is told keeps nothing of it, or each request would leave a cycle of
        # some thirty objects for the garbage collector, and thousands follow the creation of a topic.
        def settle(result: Any) -> None:
            if future.done():
                return
            error = result.exception
            if error is None:
                future.set_result(result.value)
            else:
                future.set_exception(_translated(error, ""))

        result.rawlink(partial(self._cross, settle))
        return future


def _translated(error: BaseException, path: str) -> Exception:
    where = path or str(error) or type(error).__name__
    if isinstance(error, NoNodeError):
        return NodeMissing(where)
    if isinstance(error, NodeExistsError):
        return NodeExists(where)
    if isinstance(error, BadVersionError):
        return VersionConflict(where)
    return SessionError(f"{type(error).__name__} {where}".strip())
