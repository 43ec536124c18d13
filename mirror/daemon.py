"""The mirror as a process: `millrace mirror run`.

`run` is called by the command line with a config (or the path of one) and gives the exit status. SIGTERM and
SIGINT drain: what is under way is delivered, positions are written, the group is left (by a worker with a
name only when its session ends: `seat`), within the drain timeout. A second signal ends it at once. Neither
loses anything: what is not on record is carried again by the next owner, and one line on stderr and exit
status 17 say that there is such a thing (`handover`).

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
from millrace.broker.client.frame_memory import FrameMemory
from millrace.broker.errors import FatalError
from millrace.broker.telemetry.compilation import told_when_slow
from millrace.broker.telemetry.garbage import settle
from millrace.broker.telemetry.logs import configure
from millrace.mirror.batches.between import BetweenHook
from millrace.mirror.batches.coalesce import load_kernels
from millrace.mirror.checks.check import refuse_wrong_start
from millrace.mirror.config import ClusterConfig, MirrorConfig, SourceConfig, load_config
from millrace.mirror.control.control import Control
from millrace.mirror.handover import drain_times
from millrace.mirror.worker import Worker

log = structlog.get_logger("millrace.mirror")

# Together with the produce timeout: how long a broker may be silent before its connection is given up.
REQUEST_TIMEOUT_MS = 15_000
CHECK_GRACE_S = 10.0
# Memory for answers that was not needed for so long is given back.
MEMORY_REST_S = 120.0


class Mirror:
    """One mirror process. `between` is a seam for tests and the demo, which no config reaches: see
    `between.BetweenHook`."""

    def __init__(
        self,
        config: MirrorConfig,
        *,
        between: BetweenHook | None = None,
        config_path: Path | None = None,
    ) -> None:
        self.config = config
        self._config_path = config_path
        self._reloads: set[asyncio.Task[None]] = set()
        self.control: Control | None = None
        self._between = between
        self._frame_memory = FrameMemory(self._memory_limit)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self.worker: Worker | None = None

    def request_stop(self) -> None:
        """Asks for an orderly end; asked twice, for an end at once."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def request_reload(self) -> None:
        """Asks for the config to be read again (SIGHUP); the log says what became of it."""
        if self.control is not None:
            task = asyncio.get_running_loop().create_task(self.control.reload_from_file())
            self._reloads.add(task)
            task.add_done_callback(self._reloads.discard)

    async def run(self) -> int:
        """Serves until stopped. Raises FatalError when it cannot begin, WorkLeft when the time for an orderly
        end ran out."""
        config = self.config
        with told_when_slow(log):
            load_kernels()  # before there is a seat in the group to lose: it may take seconds
        settle()
        client_id = f"millrace-mirror-{config.name}"
        target = self._cluster(config.target, client_id)

        def connect(source: SourceConfig) -> Cluster:
            return self._cluster(source, client_id)

        sources = {source.cluster: connect(source) for source in config.sources}
        worker = self.worker = Worker(config, target, sources, _now_ms, self._between)
        control = self.control = Control(worker, connect, self._config_path)
        await control.start()
        log.info("mirror started", name=config.name, target=target.name, sources=",".join(sources))
        carrying = asyncio.get_running_loop().create_task(self._carry(worker))
        try:
            await self._until_stopped(worker, carrying)
        finally:
            carrying.cancel()
            await asyncio.wait([carrying])
            await control.stop()
            for cluster in (target, *(reader.cluster for reader in worker.readers.values())):
                await cluster.close()
        log.info("mirror stopped", delivered_records=worker.metrics.delivered_records())
        if (left := worker.work_left()) is not None:
            raise left
        return 0

    async def _carry(self, worker: Worker) -> None:
        """Carries, and finds out meanwhile whether the config can work on these clusters at all: a cluster
        that is away must not hold up the others."""
        loop = asyncio.get_running_loop()
        carrying = loop.create_task(worker.run())
        checking = loop.create_task(refuse_wrong_start(self.config))
        resting = loop.create_task(self._give_memory_back())
        try:
            await asyncio.wait([carrying, checking], return_when=asyncio.FIRST_COMPLETED)
            if not checking.done():
                # What failed here may be what the check is about to explain, with the line of the config.
                await asyncio.wait([checking], timeout=CHECK_GRACE_S)
            if checking.done():
                checking.result()
            await carrying
        finally:
            for task in (carrying, checking, resting):
                task.cancel()
            await asyncio.wait([carrying, checking, resting])

    async def _give_memory_back(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_REST_S)
            self._frame_memory.rest()

    def _memory_limit(self) -> int:
        """What may be under way, and an answer that comes in meanwhile."""
        config = self.worker.config if self.worker is not None else self.config
        return config.in_flight_bytes + 2 * config.fetch.most_bytes

    async def _until_stopped(self, worker: Worker, carrying: asyncio.Task[None]) -> None:
        stop = asyncio.get_running_loop().create_task(self._stop.wait())
        await asyncio.wait([stop, carrying], return_when=asyncio.FIRST_COMPLETED)
        if carrying.done():
            stop.cancel()
            raise _cause(carrying)
        log.info("draining")
        stopping = asyncio.get_running_loop().create_task(worker.stop())
        now = asyncio.get_running_loop().create_task(self._stop_now.wait())
        limit_s = drain_times(worker.config.drain_timeout_ms).total_s
        # What ends the carrying leaves nobody who could deliver: to wait on would be for nothing.
        ends = [stopping, now, carrying]
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, now):
            task.cancel()
        await asyncio.wait([stopping, now])
        if carrying.done():
            raise _cause(carrying)
        if not stopping.cancelled() and stopping.exception() is not None:
            raise _cause(stopping)

    def _cluster(self, config: ClusterConfig, client_id: str) -> Cluster:
        return Cluster(
            config.cluster,
            config.bootstrap,
            client_id=client_id,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            security=config.security,
            frame_memory=self._frame_memory,
        )


def run(config: MirrorConfig | Path | str, between: BetweenHook | None = None) -> int:
    """Runs a mirror process until it is told to stop; the exit status."""
    configure()
    try:
        settings = config if isinstance(config, MirrorConfig) else load_config(config)
        path = None if isinstance(config, MirrorConfig) else Path(config)
        return uvloop.run(_serve(settings, between, path))
    except FatalError as error:
        sys.stderr.writelines(f"millrace mirror: {line}\n" for line in error.lines())
        return error.exit_status


async def _serve(config: MirrorConfig, between: BetweenHook | None, path: Path | None) -> int:
    mirror = Mirror(config, between=between, config_path=path)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, mirror.request_stop)
    loop.add_signal_handler(signal.SIGHUP, mirror.request_reload)
    return await mirror.run()


def _cause(ended: asyncio.Task[None]) -> BaseException:
    """Why the worker ended: the fatal error among what its tasks raised, otherwise all of it."""
    error = ended.exception()
    if isinstance(error, BaseExceptionGroup):
        fatal: BaseException | None = error.split(FatalError)[0]
        while isinstance(fatal, BaseExceptionGroup):
            fatal = fatal.exceptions[0]
        return fatal or error
    return error or RuntimeError("the worker ended by itself")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
