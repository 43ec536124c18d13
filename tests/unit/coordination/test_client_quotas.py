"""Quotas as they are followed in ZooKeeper: what is read when one changes, and what watches are set."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from millrace.broker.coordination import paths
from millrace.broker.coordination.client_quotas import CLIENTS, ClientQuotaStore, Limits
from millrace.broker.coordination.session import Node, NodeExists, NodeMissing, SessionError, SessionState
from tests.waiting import until_async

KEY = "producer_byte_rate"


class Folder:
    """A session over the folder of quotas, with watches that are kept until they are told of something."""

    state = SessionState.CONNECTED

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.watches: dict[str, list[Callable[[], None]]] = defaultdict(list)
        self.reads: Counter[str] = Counter()
        self.failures = 0
        self._listeners: list[Callable[[SessionState], None]] = []

    def on_state(self, listener: Callable[[SessionState], None]) -> None:
        self._listeners.append(listener)

    def reconnect(self) -> None:
        self.watches.clear()
        for listener in self._listeners:
            listener(SessionState.CONNECTED)

    def tell(self, path: str) -> None:
        for watch in self.watches.pop(path, []):
            watch()

    async def ensure(self, _path: str) -> None:
        return

    async def children(self, path: str, watch: Callable[[], None]) -> list[str]:
        await self._asked(path)
        self.watches[path].append(watch)
        return [each.rpartition("/")[2] for each in self.nodes]

    async def get(self, path: str, watch: Callable[[], None] | None = None) -> Node:
        await self._asked(path)
        if path not in self.nodes:
            raise NodeMissing(path)
        if watch is not None:
            self.watches[path].append(watch)
        return self.nodes[path]

    async def _asked(self, path: str) -> None:
        await asyncio.sleep(0)
        self.reads[path] += 1
        if self.failures:
            self.failures -= 1
            raise SessionError("the connection is lost")

    async def create(self, path: str, data: bytes) -> None:
        if path in self.nodes:
            raise NodeExists(path)
        self.nodes[path] = Node(data, 0, 0, 1)
        self.tell(CLIENTS)

    async def set(self, path: str, data: bytes, version: int = -1) -> None:
        self.nodes[path] = Node(data, version + 1, 0, 1)
        self.tell(path)

    def remove(self, name: str) -> None:
        del self.nodes[f"{CLIENTS}/{name}"]
        self.tell(f"{CLIENTS}/{name}")
        self.tell(CLIENTS)


def story(told: Callable[[Folder, ClientQuotaStore, list[Limits]], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        folder: Any = Folder()
        heard: list[Limits] = []
        store = ClientQuotaStore(folder, (KEY,), heard.append)
        await store.start()
        await told(folder, store, heard)
        await store.stop()

    asyncio.run(run())


async def settled(store: ClientQuotaStore) -> None:
    await until_async(lambda: not (store._changed.is_set() or store._reading.locked()))


def test_of_many_quotas_the_one_that_changes_is_read_and_watches_do_not_pile_up() -> None:
    async def told(folder: Folder, store: ClientQuotaStore, heard: list[Limits]) -> None:
        for number in range(30):
            await store.alter(f"client-{number}", {KEY: 1_000.0})
            assert heard[-1][f"client-{number}"] == {KEY: 1_000.0}
        await settled(store)
        before = folder.reads.copy()
        for rate in range(1, 31):
            await store.alter("client-7", {KEY: rate})
            assert heard[-1]["client-7"] == {KEY: rate}
            await settled(store)
        read = folder.reads - before
        assert set(read) == {f"{CLIENTS}/client-7"}
        assert max(len(watches) for watches in folder.watches.values()) <= 2

    story(told)


def test_what_others_set_and_remove_is_told_and_what_nobody_understands_is_no_limit() -> None:
    async def told(folder: Folder, store: ClientQuotaStore, heard: list[Limits]) -> None:
        path = f"{CLIENTS}/a"
        await folder.create(path, paths.encode_config({KEY: "5"}))
        await settled(store)
        assert heard[-1] == {"a": {KEY: 5.0}}
        await folder.set(path, b"{not json")
        await settled(store)
        assert heard[-1] == {}
        await folder.set(path, paths.encode_config({KEY: "6"}))
        await settled(store)
        assert heard[-1] == {"a": {KEY: 6.0}}
        folder.remove("a")
        await settled(store)
        assert heard[-1] == {}

    story(told)


def test_after_a_reconnection_everything_is_read_again_also_what_was_interrupted(monkeypatch: Any) -> None:
    monkeypatch.setattr("millrace.broker.coordination.client_quotas.RETRY_SECONDS", 0)

    async def told(folder: Folder, store: ClientQuotaStore, heard: list[Limits]) -> None:
        for name in ("a", "b"):
            await store.alter(name, {KEY: 1.0})
        await settled(store)
        folder.watches.clear()
        await folder.set(f"{CLIENTS}/a", paths.encode_config({KEY: "2"}))
        await folder.set(f"{CLIENTS}/b", paths.encode_config({KEY: "3"}))
        folder.failures = 2
        folder.reconnect()
        await until_async(lambda: heard[-1] == {"a": {KEY: 2.0}, "b": {KEY: 3.0}})
        assert set(folder.watches) == {CLIENTS, f"{CLIENTS}/a", f"{CLIENTS}/b"}

    story(told)
