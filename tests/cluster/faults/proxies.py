"""Cuts without privileges: every server is reached through a TCP proxy that can stop passing bytes on.

A proxy finds out which node a connection comes from by looking for the connection's socket among the open
files of the nodes' processes (`/proc`), so that exactly two nodes can be cut off from each other while
clients go on. Unlike a real cut, a new connection is accepted; nothing comes through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.faults.network import Endpoint
from tests.ports import free_port
from tests.threads import LoopThread, first_of

CHUNK_SIZE = 64 << 10
CONNECT_RETRY_S = 0.02


class ProxyNetwork:
    """A `network.Network` of proxies, which run on a thread of their own."""

    description = "TCP proxies that stop passing bytes on (no network namespaces here)"

    def __init__(self) -> None:
        self._targets: dict[str, int] = {}
        self._proxies: dict[tuple[str, int], int] = {}
        self._processes: dict[str, int] = {}
        self._closed: set[tuple[str, str]] = set()
        self._changed = asyncio.Event()
        self._between: dict[tuple[str, str], set[asyncio.Task[None]]] = {}
        self._thread = LoopThread("proxies")

    def endpoint(self, node: str, port: int) -> Endpoint:
        """Each of a node's ports is reached at a port of its own."""
        self._targets[node] = port
        if (node, port) not in self._proxies:
            self._thread.run(self._serve(node, port))
        return Endpoint(f"127.0.0.1:{port}", f"127.0.0.1:{self._proxies[node, port]}")

    def way(self, node: str, to: str) -> str:
        return f"127.0.0.1:{self._proxies[to, self._targets[to]]}"

    def command(self, node: str, words: Sequence[str]) -> list[str]:
        return list(words)

    def runs(self, node: str, process_id: int) -> None:
        self._processes[node] = process_id

    def cut(self, a: str, b: str, *, both_ways: bool) -> None:
        self._closed |= {(a, b), (b, a)} if both_ways else {(a, b)}

    def heal(self, a: str, b: str) -> None:
        self._closed -= {(a, b), (b, a)}
        self._thread.loop.call_soon_threadsafe(self._wake)

    def drop(self, a: str, b: str) -> None:
        """Ends the connections that `a` has to `b`; what they hold back is lost."""

        def end() -> None:
            for task in self._between.get((a, b), ()):
                task.cancel()

        self._thread.loop.call_soon_threadsafe(end)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        self._thread.stop()

    # -- on the thread -------------------------------------------------------------------------------

    async def _serve(self, node: str, target: int) -> None:
        port = free_port()
        await self._thread.serve(functools.partial(self._connection, node, target), port)
        self._proxies[node, target] = port

    async def _connection(
        self, node: str, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        source = self._source(writer.get_extra_info("peername")[1])
        task = asyncio.current_task()
        assert task is not None
        among = self._between.setdefault((source, node), set())
        among.add(task)
        task.add_done_callback(among.discard)
        ways = [writer]
        try:
            await self._passable(source, node)
            answers, onward = await asyncio.open_connection("127.0.0.1", target)
            ways.append(onward)
            await first_of(
                self._pump(reader, onward, source, node), self._pump(answers, writer, node, source)
            )
        except OSError:
            pass
        except asyncio.CancelledError:
            for way in ways:
                way.transport.abort()  # what it holds back is lost
            raise
        finally:
            for way in ways:
                way.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, source: str, target: str
    ) -> None:
        while data := await reader.read(CHUNK_SIZE):
            await self._passable(source, target)
            writer.write(data)
            await writer.drain()
        await self._passable(source, target)
        raise ConnectionResetError  # the whole connection ends with either half

    async def _passable(self, source: str, target: str) -> None:
        while (source, target) in self._closed:
            await self._changed.wait()

    def _source(self, port: int) -> str:
        """The node whose process has the connecting socket; "" for anybody else."""
        inode = _inode_of(port)
        for node, process_id in self._processes.items():
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{process_id}/fd"):
                    with contextlib.suppress(OSError):
                        if os.readlink(entry.path) == f"socket:[{inode}]":
                            return node
        return ""


def _inode_of(port: int) -> str:
    """The socket that is bound to this port of 127.0.0.1 (or of it in an IPv6 coat), by `/proc/net`."""
    wanted = f"{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[1].rpartition(":")[2] == wanted and fields[3] == f"{ESTABLISHED:02X}":
                    return fields[9]
    return ""


ESTABLISHED = int(getattr(socket, "TCP_ESTABLISHED", 1))
