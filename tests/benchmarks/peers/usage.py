"""What a server's processes cost: processor time and peak memory, from the kernel's own accounting.

A process is looked at with all its children, because RabbitMQ's work is done by a child of what is started.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float:
    """User and system time of a process and its living children, all threads."""
    total = 0.0
    for process in _family(pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / TICKS
    return total


def peak_memory_mb(pid: int) -> float:
    """The most that was resident at once (`VmHWM`), in MB, of a process and its living children; ever, or
    since `begin_peak_anew`."""
    total = 0
    for process in _family(pid):
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
        total += int(line.split()[1])
    return total * 1024 / 1e6


def begin_peak_anew(pid: int) -> None:
    """From now on `peak_memory_mb` knows nothing of what was resident before (proc(5), `clear_refs`)."""
    for process in _family(pid):
        with suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text("5")


def _family(pid: int) -> list[int]:
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


class Cores(NamedTuple):
    """Where the measured server runs, and where everything else does."""

    server: frozenset[int]
    client: frozenset[int]


def pinned_cores() -> Cores:
    """One core for the server and one for the client, where the machine has two; else all for both."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return Cores(frozenset(cores), frozenset(cores))
    return Cores(frozenset(cores[:1]), frozenset(cores[1:2]))


@contextmanager
def running_on(cores: frozenset[int]) -> Iterator[None]:
    """What is started inside runs on these cores; processes inherit them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
