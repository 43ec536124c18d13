"""The broker's tasks, why it ends, and how much of a hurry it is in.

Held by `broker.Broker`. Two kinds of tasks: those of its own (`spawn`, `every`), which nothing may end but
`end_tasks`; and those of parts, which stop them themselves and show them here (`watch`). A task of either
kind that fails ends the broker, and so does one of its own that is given up: a broker without one of its
tasks would stand still in silence (a partition that is not followed, a log that is not flushed), where a
restart lets others take over.

A stop that was asked for has no `failure`; one that comes while the broker ends is told all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import structlog

from millrace.broker.errors import MillraceError

log = structlog.get_logger("millrace.broker")


class Supervisor:
    """See the module's text. `failure` is what ends the broker, None while nothing but a wish does."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._stop_requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the end -------------------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        return self._stop_requested.is_set()

    async def until_stopped(self) -> None:
        """Returns when a stop was asked for. Raises the failure where that is why."""
        await self._stop_requested.wait()
        if self.failure is not None:
            raise self.failure

    async def until_hurried(self) -> None:
        """Returns when a stop was asked for twice."""
        await self._hurry.wait()

    def request_stop(self) -> None:
        """Asked twice, it leaves at once."""
        if self.is_stopping:
            self._hurry.set()
        self.begin_stop()

    def begin_stop(self) -> None:
        """From here on it is in order that tasks end."""
        self._stop_requested.set()

    def fail(self, failure: BaseException) -> None:
        """Ends the broker by this failure."""
        self.failure = failure
        self.begin_stop()

    async def end_tasks(self) -> None:
        """Cancels the broker's own tasks and waits for their ends."""
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # -- tasks ---------------------------------------------------------------------------------------

    def spawn(self, name: str, work: Coroutine[None, None, None]) -> None:
        """A task of the broker's own."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        self.watch(task)

    def every(
        self, interval_ms: int | Callable[[], int], name: str, work: Callable[[], Awaitable[None]]
    ) -> None:
        """A task that does the work again and again, first after one interval; a round that fails by the disk
        or by an expected failure is logged and the next one comes."""
        self.spawn(name, _repeat(interval_ms, work))

    def watch(self, task: asyncio.Task[None]) -> None:
        """A task whose failure ends the broker; parts that stop their own tasks pass them here."""
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        is_own = task in self._tasks  # the parts cancel theirs in the course of things, `end_tasks` these
        self._tasks.discard(task)
        if task.cancelled():
            if not is_own or self.is_stopping:
                return
            failure: BaseException = MillraceError(f"its task {task.get_name()!r} was given up: a defect")
        elif (raised := task.exception()) is None:
            return
        else:
            failure = raised
        if not isinstance(failure, MillraceError):
            log.error("a task of the broker failed", task=task.get_name(), exc_info=failure)
        self.fail(failure)


async def _repeat(interval_ms: int | Callable[[], int], work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep((interval_ms if isinstance(interval_ms, int) else interval_ms()) / 1000)
        try:
            await work()
        except (OSError, MillraceError) as error:
            log.error("housekeeping failed", error=str(error))
