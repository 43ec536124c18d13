"""Free ports for servers that tests start.

Taken from below the range that the kernel gives to outgoing connections (`ip_local_port_range`): a port of it
is free while it is looked at and may be some client's own when the server comes to bind it. Called by
everything in `tests` that starts a server on a port that it must know beforehand. Runs of pytest side by side
have a stretch each (`tests/suite.py`), so that neither takes the port of a server that the other has killed
and is about to start again.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "MILLRACE_TEST_PORTS"
_FIRST = 10_000
_LEAST = 8_000
"""Where the kernel gives lower ones to connections, a few are lost to those."""
_LOCAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()


def all_ports() -> range:
    """What this machine has for servers of tests."""
    try:
        end = int(_LOCAL_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        end = 32_768
    return range(_FIRST, max(end, _FIRST + _LEAST))


def shares(count: int) -> Sequence[range]:
    """The same, in as many stretches."""
    whole = all_ports()
    size = len(whole) // count
    return [whole[number * size : (number + 1) * size] for number in range(count)]


def environment(share: range) -> dict[str, str]:
    """What a process gets whose ports these are to be."""
    return {VARIABLE: f"{share.start}-{share.stop}"}


def own_ports() -> range:
    """What this process may give."""
    if VARIABLE not in os.environ:
        return all_ports()
    first, _, end = os.environ[VARIABLE].partition("-")
    return range(int(first), int(end))


def is_free(port: int) -> bool:
    """Whether a server could bind it on 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers bind it
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now and that this process has not given before. Raises
    RuntimeError when there is none."""
    own = own_ports()
    for _ in range(10_000):
        port = random.choice(own)
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise RuntimeError(f"no free port among {own.start} to {own.stop - 1}: ss -ltnp shows who listens there")
