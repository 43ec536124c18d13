"""Quotas of client ids as ZooKeeper keeps them: `/config/clients/<client id>`, Apache Kafka's payload.

    /config/clients/<name>  {"version":1,"config":{"producer_byte_rate":"1048576","consumer_byte_rate":"..."}}

The name is URL-encoded, as a client id may hold anything; `<default>` (not encoded) is for every id without
a znode of its own. Other keys (such as `request_percentage`) are left alone and not told.

`ClientQuotaStore` follows the folder by watches and tells its listener the whole of it, and carries out
AlterClientQuotas by compare-and-set. What a watch has told of is read, and nothing else: there may be a quota
for each of thousands of clients, and a watch that is set before the last one was heard stays beside it.
Wired by `server/broker.py`; the listener is `ClientQuotas.apply`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from urllib.parse import quote, unquote

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.session import (
    NodeExists,
    NodeMissing,
    Session,
    SessionError,
    SessionState,
    VersionConflict,
)
from millrace.broker.errors import RequestTimedOut

log = structlog.get_logger("millrace.broker")

CLIENTS = "/config/clients"
DEFAULT_NAME = "<default>"
RETRY_SECONDS = 0.5

Limits = dict[str | None, dict[str, float]]
"""Client id (None: the default) -> quota key -> value."""


def encode_name(client_id: str | None) -> str:
    """The znode's name, as Apache Kafka encodes it: like a form's value, with %20 for a blank."""
    return DEFAULT_NAME if client_id is None else quote(client_id, safe="-._").replace("~", "%7E")


def decode_name(name: str) -> str | None:
    return None if name == DEFAULT_NAME else unquote(name)


class ClientQuotaStore:
    """The folder in ZooKeeper. `listener` is given all limits of the known `keys` whenever they change."""

    def __init__(self, session: Session, keys: Collection[str], listener: Callable[[Limits], None]) -> None:
        self._session = session
        self._keys = keys
        self._listener = listener
        self._limits: Limits = {}
        self._read_values: dict[str, dict[str, float]] = {}
        """By znode; nothing of one that could not be understood."""
        self._names_changed = True
        self._changed_names: set[str] = set()
        self._reading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """Read once, then follow, in the task that is returned: it ends only by `stop` or a defect."""
        await self._session.ensure(CLIENTS)
        self._session.on_state(self._on_state)
        await self._read()
        self._task = asyncio.create_task(self._follow(), name="client-quotas")
        return self._task

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_state(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            # Watches do not outlive a connection.
            self._changed_names |= self._read_values.keys()
            self._mark_names()

    def _mark_names(self) -> None:
        self._names_changed = True
        self._changed.set()

    def _mark(self, name: str) -> None:
        self._changed_names.add(name)
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._read()
            except SessionError as error:
                log.debug("reading quotas was interrupted", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                if self._session.state is SessionState.CONNECTED:
                    self._changed.set()

    async def _read(self) -> None:
        """What is marked as changed; one at a time, so that nothing older is taken in after it."""
        async with self._reading:
            if self._names_changed:
                self._names_changed = False
                try:
                    names = set(await self._session.children(CLIENTS, self._mark_names))
                except BaseException:
                    self._names_changed = True
                    raise
                for gone in self._read_values.keys() - names:
                    del self._read_values[gone]
                self._changed_names |= names - self._read_values.keys()
            while self._changed_names:
                name = min(self._changed_names)
                self._changed_names.discard(name)
                try:
                    await self._read_one(name)
                except BaseException:
                    self._changed_names.add(name)
                    raise
            self._tell()

    async def _read_one(self, name: str) -> None:
        try:
            node = await self._session.get(f"{CLIENTS}/{name}", partial(self._mark, name))
            values = self._values(paths.decode_config(node.data))
        except NodeMissing:
            self._read_values.pop(name, None)
            return
        except ValueError as error:
            log.error("a client's quota could not be understood", client=name, error=str(error))
            values = {}
        self._read_values[name] = values

    def _tell(self) -> None:
        limits = {decode_name(name): values for name, values in sorted(self._read_values.items()) if values}
        if limits != self._limits:
            self._limits = limits
            log.info("quotas changed", clients=len(limits))
            self._listener(limits)

    def _values(self, config: Mapping[str, str]) -> dict[str, float]:
        values = {key: float(text) for key, text in config.items() if key in self._keys}
        if any(not value > 0 for value in values.values()):
            raise ValueError(f"expected rates above 0, found {values}")
        return values

    async def alter(self, client_id: str | None, changes: Mapping[str, float | None]) -> None:
        """Set the values that are given, remove those that are None. Raises RequestTimedOut.

        Returns when this broker keeps to them, or when its picture is late.
        """
        path = f"{CLIENTS}/{encode_name(client_id)}"
        try:
            while True:
                try:
                    node = await self._session.get(path)
                except NodeMissing:
                    wanted = _changed({}, changes)
                    try:
                        await self._session.create(path, paths.encode_config(wanted))
                    except NodeExists:
                        continue
                    self._mark_names()
                    break
                wanted = _changed(_read_config(node.data), changes)
                try:
                    await self._session.set(path, paths.encode_config(wanted), node.version)
                except (VersionConflict, NodeMissing):
                    continue
                self._mark(encode_name(client_id))
                break
            await self._read()
        except SessionError as error:
            raise RequestTimedOut(f"ZooKeeper did not take the quota: {error}") from None
        log.info("quota altered", client=encode_name(client_id), **wanted)


def _read_config(data: bytes) -> dict[str, str]:
    try:
        return paths.decode_config(data)
    except ValueError:
        return {}  # what nobody understands is replaced


def _changed(config: Mapping[str, str], changes: Mapping[str, float | None]) -> dict[str, str]:
    kept = {key: value for key, value in config.items() if key not in changes}
    return kept | {key: _text(value) for key, value in changes.items() if value is not None}


def _text(value: float) -> str:
    """Rates are whole numbers in Apache Kafka's payload."""
    return str(int(value)) if value == int(value) else str(value)
