"""The sandbox of the demo: a cluster for each datacenter, an aggregate, mirror processes, on free ports."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from millrace.broker.errors import FatalError
from millrace.deploy.local.spec import SandboxSpec, parse_spec

AGGREGATE = "agg"
MIRROR = "aggregate"
MIRROR_PROCESSES = 2


def demo_sandbox(datacenters: list[str], folder: Path) -> SandboxSpec:
    """What the demo runs in `folder`; raises FatalError when a datacenter has the aggregate's name."""
    if AGGREGATE in datacenters:
        raise FatalError(f"a datacenter may not be called {AGGREGATE!r}: that is the aggregate's name")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2 + len(datacenters) + MIRROR_PROCESSES)]
    clusters = [*datacenters, AGGREGATE]
    return parse_spec(
        {
            "name": "demo",
            "data": folder,
            "zookeeper": {"listen": addresses.pop()},
            "clusters": {name: {"listen": addresses.pop()} for name in clusters},
            "mirrors": [
                {
                    "name": MIRROR,
                    "target": AGGREGATE,
                    "sources": datacenters,
                    "topics": {"include": [".*"]},
                    "control": addresses,
                }
            ],
        },
        where="demo",
    )


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different; held together so that none is given twice."""
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        return ports
