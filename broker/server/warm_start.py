"""The compiled loops of a starting broker (`numba`: most of a second).

The loops are loaded on a thread while logs are opened and the cluster is read from ZooKeeper, and are there
before the broker's replicas take their roles. Serving without them was tried: the first batch then waits on
the event loop (many seconds where no start has compiled them yet, longer than a session lives), and groups
stay in loading for a second, in which some clients take their offsets for absent (aiokafka reads no error but
a partition's).

Called by `server/broker.py`.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from millrace.broker.groups.offsets_replay import warm_kernels as warm_offsets_kernels
from millrace.broker.protocol.records import load_compiler, warm_kernels
from millrace.broker.storage.key_map import warm_kernels as warm_compaction_kernels
from millrace.broker.telemetry.compilation import told_when_slow
from millrace.broker.telemetry.memory import release_compiler_pages

log = structlog.get_logger("millrace.broker.server.warm_start")


async def load_loops(*, with_compaction: bool) -> None:
    """Loads the compiled loops, and gives back what only loading needed."""
    began = time.monotonic()
    with told_when_slow(log):
        await asyncio.to_thread(_load_kernels, with_compaction)
    release_compiler_pages()
    log.debug("compiled loops loaded", seconds=round(time.monotonic() - began, 2))


def _load_kernels(with_compaction: bool) -> None:
    # Importing the compiler and loading the kernels each touch their own part of it: given back between, the
    # two are never in memory together.
    load_compiler()
    release_compiler_pages()
    warm_kernels()
    warm_offsets_kernels()
    if with_compaction:
        warm_compaction_kernels()
