"""One fault at a named point of one process: armed before the process starts, and told of afterwards.

    fault = fault_at(broker, "log flushed, recovery point not written")
    broker.start()
    … the client does what leads there …
    fault.wait_until_died()
    broker.start()  # as anybody would

`fault_at` (a fixture, for brokers and mirrors alike) puts the launcher before the process's program until the
fault has happened. A test whose fault was never reached fails with that word, whatever else it has seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from tests import forked, waiting
from tests.points.launcher import DIED, GO, REACHED
from tests.points.points import POINTS
from tests.servers import BrokerProcess

LAUNCHER = Path(__file__).with_name("launcher.py")


class Process(Protocol):
    """A broker or a mirror as tests start them."""

    program: Sequence[str]
    process: forked.Process | None

    @property
    def log(self) -> str: ...


class NeverReached(AssertionError):
    """The fault did not happen, so the test has shown nothing."""


class Fault:
    """See the module. `act` is one of the launcher's; `folder` is the fault's own."""

    def __init__(
        self,
        folder: Path,
        name: str,
        act: str = "die",
        *,
        nth: int | None = None,
        only: str | None = None,
        error: str = "EIO",
    ) -> None:
        point = POINTS[name]
        point = replace(point, nth=nth or point.nth, only=point.only if only is None else only)
        folder.mkdir(parents=True)
        self.name = name
        self.folder = folder
        self.program = (
            str(LAUNCHER),
            *("--at", point.at),
            *("--when", point.when),
            *("--nth", str(point.nth)),
            *("--only", point.only),
            *("--act", act),
            *("--error", error),
            *("--folder", str(folder)),
            "--",
        )
        self._process: Process | None = None
        self._ordinary: Sequence[str] = ()

    def put_before(self, process: Process) -> None:
        """From its next start on the process has the fault, until that has happened or `take_away`."""
        self._process, self._ordinary = process, process.program
        process.program = self.program

    def take_away(self) -> None:
        if self._process is not None:
            self._process.program = self._ordinary

    @property
    def was_reached(self) -> bool:
        return (self.folder / REACHED).exists()

    def go(self) -> None:
        """Who waits at the point goes on."""
        (self.folder / GO).touch()

    def check(self) -> None:
        """Raises NeverReached."""
        if not self.was_reached:
            raise NeverReached(f"the point was never reached: {self.name}{self._said()}")

    def wait_until_reached(self) -> None:
        """Raises NeverReached, at once when the process has ended elsewhere."""
        self._wait(lambda: self.was_reached)
        self.take_away()

    def wait_until_died(self) -> None:
        """Until the process has died of the fault. Raises NeverReached when it has ended otherwise."""
        process = self._running()
        self._wait(lambda: process.poll() is not None)
        if process.returncode != DIED:
            raise NeverReached(
                f"the point was never reached: {self.name}; the process ended with "
                f"{process.returncode}{self._said()}"
            )
        self.take_away()
        if isinstance(self._process, BrokerProcess):
            self._process.end_session()  # that a start waits for it: test_broker_lifecycle

    def _wait(self, is_over: Callable[[], bool]) -> None:
        process = self._running()
        deadline = waiting.Deadline(f"the process is at the point: {self.name}")
        while not is_over():
            if process.poll() is not None or deadline.has_passed:
                self.check()
                return
            time.sleep(waiting.POLL_S)

    def _running(self) -> forked.Process:
        if self._process is None or self._process.process is None:
            raise RuntimeError("the fault is in no process that was started")
        return self._process.process

    def _said(self) -> str:
        return f"\n{self._process.log[-2000:]}" if self._process is not None else ""


FaultAt = Callable[..., Fault]


@pytest.fixture
def fault_at(tmp_path: Path) -> Iterator[FaultAt]:
    """`fault_at(process, name, act, nth=…, only=…)` arms a process that has not been started yet."""
    faults: list[Fault] = []

    def arm(process: Process, name: str, act: str = "die", **more: object) -> Fault:
        fault = Fault(tmp_path / f"fault-{len(faults)}", name, act, **more)  # type: ignore[arg-type]
        faults.append(fault)
        fault.put_before(process)
        return fault

    yield arm
    for fault in faults:
        fault.check()


until = partial(waiting.until, retry=(OSError, EOFError))
"""The first true value; a server that is just away is no answer."""
