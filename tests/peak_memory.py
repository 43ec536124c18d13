"""How much memory the processes of one audit take, while it runs."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import psutil

SAMPLE_S = 0.2
DRIVER, JVM, WORKER = "driver", "JVM", "a worker"


class PeakMemory:
    """The most that one process of each kind below a driver has resident, in MB; a context manager."""

    def __init__(self, pid: int) -> None:
        self.peak_mb: dict[str, float] = {}
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(self._pid)
                for process in (root, *root.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        kind = JVM if process.name() == "java" else WORKER
                        kind = DRIVER if process.pid == self._pid else kind
                        self.peak_mb[kind] = max(self.peak_mb.get(kind, 0.0), most_mb(process))


def most_mb(process: psutil.Process) -> float:
    """The most that it has had resident so far, as the kernel keeps it; what it has now, elsewhere."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return process.memory_info().rss / 1e6
