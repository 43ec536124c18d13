"""The networks of the brokers' fault run, with a link that can be made slow, and one that counts.

In namespaces a token bucket of the kernel (`tc tbf`) stands before the node, at the bridge; a proxy counts
bytes and waits. Both hold everything that is sent to the node to the rate, whoever sends it.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tests.cluster.faults.network import NamespaceNetwork, Network, enter_namespaces
from tests.cluster.faults.proxies import ProxyNetwork

BURST_BYTES = 64 << 10
CHUNK_SIZE = 16 << 10

__all__ = ["CountingLinks", "NamespaceLinks", "ProxyLinks", "SlowableNetwork", "enter_namespaces"]


class SlowableNetwork(Network, Protocol):
    """`Network`, and slow links."""

    can_slow: bool

    def slow(self, node: str, bytes_per_s: int | None) -> None:
        """What is sent to the node takes its time; None: no more."""
        ...


class NamespaceLinks(NamespaceNetwork):
    """See the module."""

    def __init__(self, nodes: Sequence[str]) -> None:
        super().__init__(nodes)
        self.description += ", slowed by a token bucket (tc tbf)"
        self.can_slow = True
        try:
            self.slow(nodes[0], 1 << 30)
            self.slow(nodes[0], None)
        except OSError:
            self.can_slow = False

    def slow(self, node: str, bytes_per_s: int | None) -> None:
        device = f"port{self._numbers[node]}"
        words = ["tc", "qdisc", "del", "dev", device, "root"]
        if bytes_per_s is not None:
            rate = [f"{bytes_per_s * 8}bit", "burst", str(BURST_BYTES), "latency", "400ms"]
            words = ["tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", *rate]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class ProxyLinks(ProxyNetwork):
    """See the module."""

    description = "TCP proxies that stop passing bytes on or take their time (no network namespaces here)"
    can_slow = True

    def __init__(self) -> None:
        super().__init__()
        self._rates: dict[str, int] = {}
        self._free_at: dict[str, float] = {}

    def slow(self, node: str, bytes_per_s: int | None) -> None:
        if bytes_per_s is None:
            self._rates.pop(node, None)
        else:
            self._rates[node] = bytes_per_s

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, target: str
    ) -> None:
        while data := await reader.read(CHUNK_SIZE):
            await self._passable(source, target)
            if rate := self._rates.get(target):
                # All connections to the node share the rate.
                now = time.monotonic()
                self._free_at[target] = max(now, self._free_at.get(target, now)) + len(data) / rate
                await asyncio.sleep(self._free_at[target] - now)
            writer.write(data)
            await writer.drain()
        await self._passable(source, target)
        raise ConnectionResetError  # the whole connection ends with either half


class CountingLinks(ProxyLinks):
    """`passed` has the bytes that went from one node to another: what a proxy holds back is not in it."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: Counter[tuple[str, str]] = Counter()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, target: str
    ) -> None:
        def count(size: int) -> None:
            self.passed[source, target] += size

        counted: Any = _Counted(writer, count)
        await super()._pump(reader, counted, source, target)


class _Counted:
    """What a pump uses of a StreamWriter."""

    def __init__(self, writer: asyncio.StreamWriter, count: Callable[[int], None]) -> None:
        self._writer, self._count = writer, count
        self.drain = writer.drain

    def write(self, data: bytes) -> None:
        self._count(len(data))
        self._writer.write(data)
