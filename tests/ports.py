"""Free ports for servers that tests start.

Taken from below the range that the kernel gives to outgoing connections (`ip_local_port_range`): a port of it
is free while it is looked at and may be some client's own when the server comes to bind it. Called by
everything in `tests` that starts a server on a port that it must know beforehand.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10_000
_LOCAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()


def _end() -> int:
    """The first port that outgoing connections may use."""
    try:
        return int(_LOCAL_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        return 32_768


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now and that this process has not given before. Raises
    RuntimeError when there is none."""
    end = max(_end(), _FIRST + 1_000)
    for _ in range(10_000):
        port = random.randrange(_FIRST, end)
        if port in _given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers bind it
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError(f"no free port among {_FIRST} to {end - 1}")
