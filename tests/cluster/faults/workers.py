"""A part of the load on a thread of its own, that can be halted at a place where nothing is under way.

`Worker.step` does a little; between steps a worker halts when asked to, after `settle` has come to an end
with what was begun. A worker that fails says so: the run must not go on with less load than it claims.
"""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod

from tests.waiting import Deadline, patience

STEP_S = 0.05


class Worker(ABC):
    """See the module."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failure: str | None = None
        self._halt = threading.Event()
        self._halted = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def step(self) -> None:
        """Do a little, in well under a second as a rule."""

    @abstractmethod
    def settle(self) -> bool:
        """Come to an end with what was begun; whether it is done. Called again until it is."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back, without waiting for the cluster."""

    def start(self) -> None:
        self._thread.start()

    def halt(self) -> None:
        self._halt.set()

    def wait_until_halted(self, deadline: Deadline) -> bool:
        while not self._halted.wait(STEP_S):
            if self.failure is not None or deadline.has_passed:
                return False
        return True

    def resume(self) -> None:
        self._halted.clear()
        self._halt.clear()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(patience(30))

    def pause(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self._halt.is_set():
                    self.step()
                elif self._halted.is_set():
                    self.pause(STEP_S)
                elif self.settle():
                    self._halted.set()
            self.close()
        except Exception:
            self.failure = traceback.format_exc()
