"""What happened when: one line per event, in the order in which they came, from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Timeline:
    """Times are seconds since the run began."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._say = say
        self.lines: list[str] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def note(self, text: str) -> None:
        line = f"{self.seconds:8.2f} s  {text}"
        with self._lock:
            self.lines.append(line)
            if self._say is not None:
                self._say(line)
