"""The mirror as a process: `millrace mirror run`.

`run` is called by the command line with a config (or the path of one) and gives the exit status. SIGTERM and
SIGINT drain: what is under way is delivered, positions are written, the group is left. A second signal ends
it at once, which loses nothing either: what is not written down is sent again by the next owner.

A source or a target that is away is no reason to end: the mirror keeps asking, says so in its log and
metrics, and goes on where it was.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import structlog
import uvloop

from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import FatalError
from millrace.broker.telemetry.logs import configure
from millrace.mirror.config import MirrorConfig, load_config
from millrace.mirror.control import ControlServer
from millrace.mirror.pipeline import BetweenHook
from millrace.mirror.worker import Worker

log = structlog.get_logger("millrace.mirror")

# Together with the produce timeout: how long a broker may be silent before its connection is given up.
REQUEST_TIMEOUT_MS = 15_000
STOP_GRACE_S = 5.0


class Mirror:
    """One mirror process. `between` is a seam for tests and the demo, which no config reaches: see
    `pipeline.BetweenHook`."""

    def __init__(self, config: MirrorConfig, *, between: BetweenHook | None = None) -> None:
        self.config = config
        self._between = between
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self.worker: Worker | None = None
        self.control_port = 0

    def request_stop(self) -> None:
        """Asks for an orderly end; asked twice, for an end at once."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def run(self) -> int:
        """Serves until stopped. Raises FatalError when it cannot begin."""
        config = self.config
        client_id = f"millrace-mirror-{config.name}"
        target = self._cluster(config.target.cluster, config.target.bootstrap, client_id)
        sources = {
            source.cluster: self._cluster(source.cluster, source.bootstrap, client_id)
            for source in config.sources
        }
        worker = self.worker = Worker(config, target, sources, _now_ms, self._between)
        control = ControlServer(
            config.control.listen,
            metrics=worker.metrics.text,
            is_ready=worker.is_ready,
            status=worker.status,
        )
        await control.start()
        self.control_port = control.port
        log.info("mirror started", name=config.name, target=target.name, sources=",".join(sources))
        carrying = asyncio.get_running_loop().create_task(worker.run())
        try:
            await self._until_stopped(worker, carrying)
        finally:
            carrying.cancel()
            await asyncio.wait([carrying])
            await control.stop()
            for cluster in (target, *sources.values()):
                await cluster.close()
        log.info("mirror stopped", delivered_records=worker.metrics.delivered_records())
        return 0

    async def _until_stopped(self, worker: Worker, carrying: asyncio.Task[None]) -> None:
        stop = asyncio.get_running_loop().create_task(self._stop.wait())
        await asyncio.wait([stop, carrying], return_when=asyncio.FIRST_COMPLETED)
        if carrying.done():
            stop.cancel()
            raise _cause(carrying)
        log.info("draining")
        stopping = asyncio.get_running_loop().create_task(worker.stop())
        now = asyncio.get_running_loop().create_task(self._stop_now.wait())
        # Twice the drain timeout: once for the batches, once for the positions.
        limit_s = 2 * self.config.drain_timeout_ms / 1000 + STOP_GRACE_S
        await asyncio.wait([stopping, now], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, now):
            task.cancel()
        await asyncio.wait([stopping, now])

    @staticmethod
    def _cluster(name: str, bootstrap: tuple[str, ...], client_id: str) -> Cluster:
        return Cluster(name, bootstrap, client_id=client_id, request_timeout_ms=REQUEST_TIMEOUT_MS)


def run(config: MirrorConfig | Path | str, between: BetweenHook | None = None) -> int:
    """Runs a mirror process until it is told to stop; the exit status."""
    configure()
    try:
        settings = config if isinstance(config, MirrorConfig) else load_config(config)
        return uvloop.run(_serve(settings, between))
    except FatalError as error:
        sys.stderr.write(f"millrace mirror: {error}\n")
        return error.exit_status


async def _serve(config: MirrorConfig, between: BetweenHook | None) -> int:
    mirror = Mirror(config, between=between)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, mirror.request_stop)
    return await mirror.run()


def _cause(carrying: asyncio.Task[None]) -> BaseException:
    """Why the worker ended: the fatal error among what its tasks raised, otherwise all of it."""
    error = carrying.exception()
    if isinstance(error, BaseExceptionGroup):
        fatal: BaseException | None = error.split(FatalError)[0]
        while isinstance(fatal, BaseExceptionGroup):
            fatal = fatal.exceptions[0]
        return fatal or error
    return error or RuntimeError("the worker ended by itself")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
