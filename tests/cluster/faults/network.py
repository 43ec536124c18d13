"""A network of its own for each server, in which any two of them can be cut off from each other.

`NamespaceNetwork` gives every node a network namespace with one interface on a common bridge; a cut points
the neighbour entry of the other node at an address that nobody has, so that packets vanish without a word,
also those of open connections, in one direction or in both. Everything lives in namespaces of this process
(`enter_namespaces`): nothing of the host is touched, and nothing stays when the process ends, however it
ends. That takes root, or a kernel that lets users have namespaces; `proxies.py` is for the others.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

NOBODY = "02:00:00:00:00:ff"
BRIDGE = "10.99.0.254"


class Endpoint(NamedTuple):
    """Where a server listens, and where the others reach it; both `host:port`."""

    listen: str
    reached: str


class Network(Protocol):
    """What a cluster needs of its network. Nodes are names such as `broker-1` or `zookeeper`."""

    description: str

    def endpoint(self, node: str, port: int) -> Endpoint:
        """A server of this node listens on `port` from now on."""
        ...

    def way(self, node: str, to: str) -> str:
        """`host:port` at which `node` reaches the server of `to`."""
        ...

    def command(self, node: str, words: Sequence[str]) -> list[str]:
        """The command line that runs `words` at a node."""
        ...

    def runs(self, node: str, process_id: int) -> None:
        """The node's process has this id now."""
        ...

    def cut(self, a: str, b: str, *, both_ways: bool) -> None:
        """Nothing that `a` sends reaches `b` (and the other way round) until `heal`."""
        ...

    def heal(self, a: str, b: str) -> None: ...

    def close(self) -> None: ...


class NamespaceNetwork:
    """See the module. To be made after `enter_namespaces`."""

    description = "network namespaces on a bridge, cut by neighbour entries that lead nowhere"

    def __init__(self, nodes: Sequence[str]) -> None:
        self._numbers = {node: number for number, node in enumerate(nodes, start=1)}
        self._namespaces: dict[str, int] = {}
        self._ports: dict[str, int] = {}
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "br0", "type", "bridge")
        _run("ip", "addr", "add", f"{BRIDGE}/24", "dev", "br0")
        _run("ip", "link", "set", "br0", "up")
        for node in nodes:
            self._connect(node)

    def _connect(self, node: str) -> None:
        number = self._numbers[node]
        self._namespaces[node] = _new_namespace()
        outside, inside = f"port{number}", f"in{number}"
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
        _run("ip", "link", "set", inside, "netns", self._path(node))
        _run("ip", "link", "set", outside, "master", "br0")
        _run("ip", "link", "set", outside, "up")
        at = self.command(node, ["ip"])
        _run(*at, "link", "set", "lo", "up")
        _run(*at, "link", "set", inside, "name", "eth0")
        _run(*at, "link", "set", "eth0", "address", self._hardware(node))
        _run(*at, "addr", "add", f"{self.host(node)}/24", "dev", "eth0")
        _run(*at, "link", "set", "eth0", "up")

    def _path(self, node: str) -> str:
        return f"/proc/{os.getpid()}/fd/{self._namespaces[node]}"

    def host(self, node: str) -> str:
        """The node's address."""
        return f"10.99.0.{self._numbers[node]}"

    def _hardware(self, node: str) -> str:
        return f"02:00:00:00:00:{self._numbers[node]:02x}"

    def endpoint(self, node: str, port: int) -> Endpoint:
        self._ports[node] = port
        address = f"{self.host(node)}:{port}"
        return Endpoint(address, address)

    def way(self, node: str, to: str) -> str:
        return f"{self.host(to)}:{self._ports[to]}"

    def command(self, node: str, words: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net={self._path(node)}", *words]

    def runs(self, node: str, process_id: int) -> None:
        """A namespace is where the process was started in."""

    def cut(self, a: str, b: str, *, both_ways: bool) -> None:
        self._neighbour(a, b, NOBODY)
        if both_ways:
            self._neighbour(b, a, NOBODY)

    def heal(self, a: str, b: str) -> None:
        self._neighbour(a, b, self._hardware(b))
        self._neighbour(b, a, self._hardware(a))

    def _neighbour(self, node: str, other: str, hardware: str) -> None:
        words = ["ip", "neigh", "replace", self.host(other), "lladdr", hardware, "dev", "eth0"]
        _run(*self.command(node, [*words, "nud", "permanent"]))

    def close(self) -> None:
        for descriptor in self._namespaces.values():
            os.close(descriptor)
        self._namespaces.clear()


def enter_namespaces() -> str | None:
    """This process gets a network and a view of file systems of its own. What is in the way, if anything
    (nothing has changed then). To be called before any thread is started."""
    if os.geteuid() == 0:
        kinds = CLONE_NEWNET | CLONE_NEWNS
    else:
        kinds = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUSER
    user, group = os.geteuid(), os.getegid()
    # Tried in a child first: a namespace without a bridge would be of no use, and there is no way back.
    child = os.fork()
    if child == 0:
        os._exit(0 if _try_namespaces(kinds, user, group) else 1)
    if os.waitpid(child, 0)[1] != 0:
        return "this user, or this kernel, can make no network namespaces with a bridge"
    _unshare(kinds, user, group)
    return None


def _try_namespaces(kinds: int, user: int, group: int) -> bool:
    try:
        _unshare(kinds, user, group)
        _run("ip", "link", "add", "br0", "type", "bridge")
        _run("ip", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
        _run("nsenter", f"--net=/proc/{os.getpid()}/ns/net", "ip", "link", "set", "lo", "up")
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _unshare(kinds: int, user: int, group: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(kinds) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if kinds & CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _run("mount", "--make-rprivate", "/")


def _new_namespace() -> int:
    """A file descriptor of a new network namespace, which lives as long as that is open."""
    found: list[int | OSError] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET) != 0:
            found.append(OSError(ctypes.get_errno(), "unshare"))
            return
        found.append(os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY))

    # A thread may have a namespace of its own; this one ends, and the descriptor stays.
    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
    (result,) = found
    if isinstance(result, OSError):
        raise result
    return result


def mount_memory(folder: Path, size_mib: int) -> None:
    """A small file system of its own at `folder`; it is gone when this process and its children are."""
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0755", "tmpfs", str(folder))


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
