"""The mirror's memory: flat over many gigabytes, and bounded while its target stands still.

    python -m tests.benchmarks.mirror.memory [--gb 20] [--delivery exactly_once] [--pair kafka-millrace]
    (or `make bench-mirror-memory`)

`flat` feeds a source in steps, each deleted at both ends once it was mirrored, and looks at the mirror's
resident memory all the time; after the warm-up no step's mean may be more than a tenth away from their
median. The warm-up begins with a target that stands still, so that from then on every buffer that the config
allows has been in use: what grows later, grows for another reason. `stalled` stops the target's process
(SIGSTOP) with a backlog at the source: what the mirror holds must stay within what its config says, and its
resident memory may grow by COPIES times that. The exit status is 1 when either does not hold. Both are
given a source and a target that they have for themselves meanwhile, of either kind.
`tests/cluster/test_mirror_memory.py` runs both, smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import LATEST
from millrace.broker.errors import MillraceError
from tests.benchmarks.mirror.workloads import LZ4, kilobyte_batch
from tests.benchmarks.peers.kafka_load import raw_produce
from tests.cluster.mirror_process import MirrorProcess
from tests.peers.kafka import KafkaPeer
from tests.record_deletion import delete_records
from tests.servers import BrokerProcess, ZooKeeper

Server = BrokerProcess | KafkaPeer

PARTITIONS = 4
MEBIBYTE = 1 << 20
SEGMENT_BYTES = 32 * MEBIBYTE
SAMPLE_S = 0.05
STEP_TIMEOUT_S = 300.0
START_TIMEOUT_S = 60.0
TOLERANCE = 0.1
WARM_UP_SHARE = 0.1
LEAST_WARM_UP_BYTES = 500_000_000
STALL_S = 6.0
COPIES = 3
"""A fetched answer and a request that is being written may each hold what is under way once more."""
# The largest part of what may be under way that is waited for while the target stands still, and how long.
FULL = 0.8
FILL_S = 4.0


@dataclass(slots=True)
class Flat:
    """Mean resident memory of each step in MB, and how far from their median a step was after the warm-up."""

    means: list[float] = field(default_factory=list)
    warm_up_steps: int = 0
    mirrored_bytes: int = 0

    @property
    def counted(self) -> list[float]:
        return self.means[self.warm_up_steps :]

    @property
    def deviation(self) -> float:
        middle = statistics.median(self.counted)
        return max(abs(each - middle) for each in self.counted) / middle


@dataclass(frozen=True, slots=True)
class Stalled:
    """Bytes: what the mirror says that it has under way, at most; and how its resident memory grew, at
    most."""

    in_flight: int
    growth: int
    allowed: int

    @property
    def is_bounded(self) -> bool:
        """Whether it kept to what was allowed, and came near enough to it for that to say something."""
        return self.allowed // 4 < self.in_flight <= self.allowed and self.growth <= COPIES * self.allowed


class _Watcher:
    """Looks at a process's resident memory all the time, on a thread."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._samples: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self) -> list[int]:
        """Bytes, since the last call."""
        taken, self._samples = self._samples, []
        return taken or [self._process.memory_info().rss]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            try:
                self._samples.append(self._process.memory_info().rss)
            except psutil.NoSuchProcess:
                return


class Setting:
    """A topic and a mirror between two servers that run. `with` ends the mirror."""

    def __init__(self, folder: Path, source: Server, target: Server, delivery: str, **more: Any) -> None:
        self.source, self.target = source, target
        self.topic = f"memory-{secrets.token_hex(4)}"
        self._folder, self._delivery, self._more = folder, delivery, more
        self.in_flight_bytes = int(more.get("in_flight_bytes", 64 * MEBIBYTE))
        self.mirror: MirrorProcess | None = None

    def __enter__(self) -> Setting:
        asyncio.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        if self.mirror is not None:
            self.mirror.kill()

    @property
    def pid(self) -> int:
        assert self.mirror is not None and self.mirror.process is not None
        return self.mirror.process.pid

    async def _begin(self) -> None:
        async with Cluster("src", [self.source.bootstrap]) as source:
            configs = {"retention.ms": "-1", "segment.bytes": str(SEGMENT_BYTES)}
            await create_topic(source, self.topic, PARTITIONS, 1, configs)
        self.mirror = MirrorProcess(
            self._folder / "mirror",
            self.target.bootstrap,
            {"src": self.source.bootstrap},
            topics=[self.topic],
            name=self.topic,
            delivery=self._delivery,
            **self._more,
        ).start()
        await self.until(lambda: len(self.status()) == PARTITIONS, START_TIMEOUT_S)

    def status(self) -> list[dict[str, Any]]:
        """The partitions that run."""
        assert self.mirror is not None
        partitions = self.mirror.status().get("partitions", [])
        return [each for each in partitions if each["state"] == "running"]

    async def until(self, condition: Any, timeout_s: float) -> None:
        assert self.mirror is not None
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not within {timeout_s:.0f} s; the mirror says: {self.mirror.log[-1500:]}"
                )
            await asyncio.sleep(0.05)

    def feed(self, size: int) -> int:
        """Writes so many bytes at the source; those that it were."""
        batch = kilobyte_batch(64, LZ4)
        records, _ = raw_produce(
            self.source.port,
            self.topic,
            batch,
            size // len(batch) * 64,
            acks=1,
            partitions=PARTITIONS,
            connections=PARTITIONS,
        )
        return records // 64 * len(batch)

    @contextlib.contextmanager
    def still_target(self) -> Iterator[None]:
        """The target answers nothing meanwhile."""
        assert self.target.process is not None
        os.kill(self.target.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.target.process.pid, signal.SIGCONT)

    def held(self) -> int:
        """Bytes that the mirror says it has under way."""
        return sum(each["outstanding_bytes"] for each in self.status())

    def use_all_buffers(self, size: int) -> int:
        """Mirrors `size` bytes, with as much under way as may be; those that it were."""
        with self.still_target():
            written = self.feed(size)
            deadline = time.monotonic() + FILL_S
            while self.held() < FULL * self.in_flight_bytes and time.monotonic() < deadline:
                time.sleep(SAMPLE_S)
        asyncio.run(self.mirrored_and_deleted())
        return written

    async def mirrored_and_deleted(self) -> None:
        """Once everything is at the target, it is deleted at both ends."""
        keys = {(self.topic, number): LATEST for number in range(PARTITIONS)}
        deadline = time.monotonic() + STEP_TIMEOUT_S
        async with (
            Cluster("src", [self.source.bootstrap]) as source,
            Cluster("dst", [self.target.bootstrap]) as target,
        ):
            ends = {key: found.offset for key, found in (await source.list_offsets(keys)).items()}
            while not self._has_passed(ends):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not mirrored within {STEP_TIMEOUT_S:.0f} s")
                await asyncio.sleep(0.05)
            await delete_records(source, ends)
            there = await target.list_offsets(keys, read_committed=True)
            with contextlib.suppress(MillraceError):  # what is left goes with the next step
                await delete_records(target, {key: found.offset for key, found in there.items()})

    def _has_passed(self, ends: dict[tuple[str, int], int]) -> bool:
        positions = {(each["topic"], each["partition"]): each["position"] for each in self.status()}
        return all((positions.get(key) or 0) >= end for key, end in ends.items())


def flat(
    folder: Path,
    source: Server,
    target: Server,
    *,
    total: int,
    step: int,
    delivery: str,
    say: Any = lambda line: None,
) -> Flat:
    """Mirrors `total` bytes in steps."""
    found = Flat()
    with Setting(folder, source, target, delivery) as setting:
        found.mirrored_bytes += setting.use_all_buffers(step)
        watcher = _Watcher(setting.pid)
        while found.mirrored_bytes < total:
            if found.mirrored_bytes < max(LEAST_WARM_UP_BYTES, total * WARM_UP_SHARE):
                found.warm_up_steps += 1  # what begins within the warm-up belongs to it
            found.mirrored_bytes += setting.feed(step)
            asyncio.run(setting.mirrored_and_deleted())
            found.means.append(statistics.fmean(watcher.take()) / 1e6)
            say(f"{found.mirrored_bytes / 1e9:6.1f} GB mirrored, {found.means[-1]:6.1f} MB resident")
        watcher.stop()
    return found


def stalled(
    folder: Path, source: Server, target: Server, *, allowed: int, delivery: str, least_s: float = STALL_S
) -> Stalled:
    """A target that stands still with several times `allowed` bytes waiting at the source: for `least_s`, and
    for STALL_S where the mirror takes its time to take what it may."""
    with Setting(folder, source, target, delivery, in_flight_bytes=allowed) as setting:
        setting.feed(max(4 * allowed, 200_000_000))
        asyncio.run(setting.mirrored_and_deleted())
        watcher = _Watcher(setting.pid)
        time.sleep(4 * SAMPLE_S)
        before = max(watcher.take())
        with setting.still_target(), ThreadPoolExecutor(1) as beside:
            # Looked at meanwhile: where the source's disk is slow, all is fed only after the mirror's session
            # with the target has ended, and with it all that it held.
            fed = beside.submit(setting.feed, 8 * allowed)
            in_flight, begun = 0, time.monotonic()
            while (passed_s := time.monotonic() - begun) < STALL_S and (
                passed_s < least_s or in_flight < FULL * allowed
            ):
                in_flight = max(in_flight, setting.held())
                time.sleep(SAMPLE_S)
            fed.result()
            growth = max(watcher.take()) - before
        watcher.stop()
        asyncio.run(setting.mirrored_and_deleted())
    return Stalled(in_flight, growth, allowed)


def servers(folder: Path, pair: str, stack: contextlib.ExitStack) -> tuple[Server, Server]:
    """A source and a target of these kinds (`millrace-kafka`), which the stack ends."""
    settings = {"log.retention.ms": "-1", "log.segment.bytes": str(SEGMENT_BYTES)}
    zookeeper: ZooKeeper | None = None
    made: list[Server] = []
    for name, kind in zip(("source", "target"), pair.split("-"), strict=True):
        if kind == "kafka":
            made.append(stack.enter_context(KafkaPeer(folder / name, settings=settings)))
            continue
        if zookeeper is None:
            zookeeper = ZooKeeper(folder / "zookeeper").start()
            stack.callback(zookeeper.stop)
        broker = BrokerProcess(zookeeper.chroot(), folder / name, settings=settings)
        stack.callback(broker.kill)
        made.append(broker.start())
    return made[0], made[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=20.0)
    parser.add_argument("--delivery", default="exactly_once", choices=("exactly_once", "at_least_once"))
    parser.add_argument("--pair", default="millrace-millrace", help="source-target, as in tests/pairs.py")
    parser.add_argument("--in-flight-mib", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-mirror-memory-") as name:
        folder = Path(name)
        with contextlib.ExitStack() as stack:
            source, target = servers(folder, options.pair, stack)
            total = int(options.gb * 1e9)
            found = flat(
                folder / "flat",
                source,
                target,
                total=total,
                step=max(100_000_000, total // 40),
                delivery=options.delivery,
                say=lambda line: print(line, flush=True),
            )
            held = stalled(
                folder / "stalled",
                source,
                target,
                allowed=options.in_flight_mib * MEBIBYTE,
                delivery=options.delivery,
            )
    middle = statistics.median(found.counted)
    print(
        f"resident memory over {found.mirrored_bytes / 1e9:.1f} GB: median {middle:.1f} MB after warm-up, "
        f"{min(found.counted):.1f} to {max(found.counted):.1f}, at most {found.deviation:.1%} from the median"
    )
    print(
        f"with a stalled target: {held.in_flight / 1e6:.1f} MB held, {held.allowed / 1e6:.1f} MB allowed, "
        f"resident memory grew by {held.growth / 1e6:.1f} MB, {COPIES * held.allowed / 1e6:.1f} MB allowed"
    )
    return exit_status(found, held)


def exit_status(found: Flat, held: Stalled) -> int:
    """0 when memory was flat and bounded, 1 when it was not."""
    return 0 if found.deviation <= TOLERANCE and held.is_bounded else 1


if __name__ == "__main__":
    raise SystemExit(main())
