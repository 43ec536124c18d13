"""An asyncio event loop in virtual time: the product's shells run in the simulator as they are.

A `LoopProcess` has one loop for each of its lives. Whatever reaches the process (a message, a timer) runs in
its loop, and so does everything that becomes ready by it, before anything else happens in the world; timers
are the world's. When a life ends its tasks simply stop where they stand, like those of a killed process:
nothing of them runs any more, not even what stands in their `finally`.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from tests.simulation.cluster.world import Action, Process, World


class VirtualLoop(asyncio.AbstractEventLoop):
    """What asyncio needs of a loop: callbacks, timers, tasks. No I/O, no threads."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._ready: deque[asyncio.Handle] = deque()
        self._is_running = False
        self._is_dead = False

    def run(self, action: Action, *arguments: Any) -> None:
        """Run something in this loop, and then all that is ready."""
        if self._is_running:
            action(*arguments)
            return
        former = _get_running_loop()
        _set_running_loop(self)
        self._is_running = True
        ready = self._ready
        try:
            action(*arguments)
            while ready and not self._is_dead:
                handle = ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            self._is_running = False
            _set_running_loop(former)

    def kill(self) -> None:
        """Nothing runs here any more; what was under way is kept, so that nothing of it is finished."""
        self._is_dead = True
        self._ready.clear()
        self._world.abandoned.append(asyncio.all_tasks(self))

    # -- what asyncio calls --------------------------------------------------------------------------

    def time(self) -> float:
        return self._world.now_ms / 1000

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_dead

    def get_debug(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._is_dead:
            self._ready.append(handle)
            if not self._is_running:
                self._process.later(0, _nothing)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(self.time() + delay, callback, args, self, context)
        if not self._is_dead:
            self._process.later(delay * 1000, self._fire, timer)
        return timer

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self._is_dead:
            self._world.fail(error or RuntimeError(context.get("message")))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The world's timer comes all the same, and finds it cancelled."""

    def _fire(self, timer: asyncio.TimerHandle) -> None:
        if not timer.cancelled():
            timer._run()


class LoopProcess(Process):
    """A process whose work is written in coroutines."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.loop = VirtualLoop(self)

    def live(self) -> None:
        """A new life begins."""
        self.loop = VirtualLoop(self)
        self.is_alive = True

    def _run(self, action: Action, arguments: tuple[Any, ...]) -> None:
        self.loop.run(action, *arguments)

    def end(self) -> None:
        super().end()
        self.loop.kill()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this in the present life; it must not fail."""
        task = self.loop.create_task(work)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.world.fail(error)


def _nothing() -> None:
    """Lets a loop run what is ready."""
