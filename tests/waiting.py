"""Waiting in tests, all of it: until something holds, no longer than a deadline that a slow machine moves.

Called by every test and helper that waits for a server, a process, a thread or a turn of the event loop:
`until` and `until_async` ask again and again; `Deadline` is for loops that do the work themselves, as reading
records; `patience` is for limits that others enforce (`subprocess.run`, `asyncio.timeout`, a client's calls).

What passes a deadline raises `DeadlinePassed`, and nothing else does: it tells what never came from what came
and was wrong (`tests/second_try.py`). Times that the product is given (sessions, lags) are no patience of a
test and stay as they are written.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

T = TypeVar("T")

WITHIN_S = 60.0
"""On a quiet machine. Waiting costs nothing where it succeeds: this is no estimate of how long it takes."""
POLL_S, TURN_S = 0.02, 0.001
"""Between two looks from outside, and from inside an event loop."""
LAST_LOOK_S = 1.0
"""The least time that a coroutine gets for its answer, also when it is asked for the last time."""
VARIABLE = "MILLRACE_TEST_PATIENCE"
"""The factor, for whoever knows the machine better than one measurement does."""
MOST = 10.0
ROUNDS = 2_000_000
QUIET_S = 0.035
"""What `_piece` takes on a quiet core: several slices of the scheduler, so that neighbours are felt."""
LOG_END = 2_000
LONGEST = 1_000


class DeadlinePassed(AssertionError):
    """Something did not come in time, and of what came nothing was wrong."""


class HasLog(Protocol):
    """A server that tests start."""

    log_path: Path


@dataclass(frozen=True, slots=True)
class Clock:
    """Held as they are now: a test may put its own into `time` and `asyncio`."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    sleep_async: Callable[[float], Awaitable[None]] = asyncio.sleep


CLOCK = Clock()


def patience(seconds: float = WITHIN_S) -> float:
    """So many seconds of a quiet machine, as this one needs them."""
    return seconds * factor()


@functools.cache
def factor() -> float:
    """How many times longer than on a quiet core things may take, 1 to `MOST`: measured at the first wait."""
    given = os.environ.get(VARIABLE)
    return measured() if given is None else parsed(given)


def parsed(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{VARIABLE}={given}: a factor for deadlines is expected, such as 2.5")
    return value


def measured(
    piece: Callable[[], object] | None = None, now: Callable[[], float] = time.perf_counter
) -> float:
    piece = piece or _piece
    began = now()
    piece()
    return min(max((now() - began) / QUIET_S, 1.0), MOST)


def _piece() -> int:
    total = 0
    for number in range(ROUNDS):
        total ^= number
    return total


class Deadline:
    """Begins when it is made. `what` is awaited ("the topic is led"), or says so when asked; `logs_of` are
    servers, or log files, whose last words belong into a complaint."""

    def __init__(
        self,
        what: str | Callable[[], str],
        *,
        within_s: float = WITHIN_S,
        logs_of: Iterable[HasLog | Path] = (),
        clock: Clock = CLOCK,
    ) -> None:
        self._what = what
        self._within_s = within_s
        self._patience_s = patience(within_s)
        self._logs_of = tuple(logs_of)
        self._now = clock.now
        self._end = self._now() + self._patience_s

    @property
    def left_s(self) -> float:
        return max(self._end - self._now(), 0.0)

    @property
    def has_passed(self) -> bool:
        return self._now() >= self._end

    def check(self, seen: object = ...) -> None:
        """Raises DeadlinePassed when it is too late; `seen` is what there is instead."""
        if self.has_passed:
            raise self.passed(seen)

    def passed(self, seen: object = ...) -> DeadlinePassed:
        what = self._what if isinstance(self._what, str) else self._what()
        is_usual = self._patience_s == self._within_s
        usual = "" if is_usual else f" ({self._within_s:g} s × {self._patience_s / self._within_s:.1f})"
        last = "" if seen is ... else f"; last seen: {_shown(seen)}"
        said = "".join(map(_end_of_log, self._logs_of))
        return DeadlinePassed(f"not within {self._patience_s:.4g} s{usual}: {what}{last}{said}")


def until(
    condition: Callable[[], T],
    what: str | Callable[[], str] = "",
    *,
    within_s: float = WITHIN_S,
    retry: tuple[type[BaseException], ...] = (),
    logs_of: Iterable[HasLog | Path] = (),
    every_s: float = POLL_S,
    clock: Clock = CLOCK,
) -> T:
    """What `condition` returns when that is true at last. It may raise one of `retry` and is asked again;
    every other error goes through at once. It is asked once more after the deadline: who stood still
    meanwhile has not seen what came. A condition that says what it is needs no other description."""
    __tracebackhide__ = True
    what = what or functools.partial(source_of, condition)
    deadline = Deadline(what, within_s=within_s, logs_of=logs_of, clock=clock)
    while True:
        is_last = deadline.has_passed
        seen: object
        try:
            if value := condition():
                return value
            seen = value
        except retry as error:
            seen = error
        if is_last:
            raise deadline.passed(seen)
        clock.sleep(every_s)


async def until_async(
    condition: Callable[[], T | Awaitable[T]],
    what: str | Callable[[], str] = "",
    *,
    within_s: float = WITHIN_S,
    retry: tuple[type[BaseException], ...] = (),
    logs_of: Iterable[HasLog | Path] = (),
    every_s: float = TURN_S,
    clock: Clock = CLOCK,
) -> T:
    """The same in an event loop. `condition` may be a coroutine function, and one that hangs is given up at
    the deadline; `every_s=0` asks in each turn of the loop."""
    __tracebackhide__ = True
    what = what or functools.partial(source_of, condition)
    deadline = Deadline(what, within_s=within_s, logs_of=logs_of, clock=clock)
    while True:
        is_last = deadline.has_passed
        seen: object
        limit: asyncio.Timeout | None = None
        try:
            value = condition()
            if inspect.isawaitable(value):
                async with asyncio.timeout(max(deadline.left_s, LAST_LOOK_S)) as limit:
                    value = await value
            if value:
                return value
            seen = value
        except retry as error:
            seen = error
        except TimeoutError:
            if limit is None or not limit.expired():
                raise
            raise deadline.passed("no answer to the question") from None
        if is_last:
            raise deadline.passed(seen)
        await clock.sleep_async(every_s)


def source_of(condition: Callable[[], object]) -> str:
    """The lines that a condition is written in: what it waits for, where nothing else is said."""
    try:
        return _cut(" ".join(inspect.getsource(condition).split()))
    except (OSError, TypeError):
        return repr(condition)


def _shown(seen: object) -> str:
    text = f"{type(seen).__name__}: {seen}" if isinstance(seen, BaseException) else repr(seen)
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _end_of_log(of: HasLog | Path) -> str:
    path = of if isinstance(of, Path) else of.log_path
    try:
        with path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - LOG_END, 0))
            said = log.read().decode(errors="replace").strip()
    except OSError as error:
        said = f"it cannot be read: {error.strerror}"
    return f"\n--- the end of {path} ---\n{said}"
