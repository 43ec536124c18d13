"""What storage costs by itself: compaction, and starting over much data. Prints one line per figure.

    python tests/benchmarks/bench_storage.py compaction [--records 2000000] [--per-batch 50]
    python tests/benchmarks/bench_storage.py start [--partitions 1000] [--gb 20]

`compaction` also runs an event loop beside it and tells how late its timers were: compaction shares the
interpreter with everything a broker does. `start` writes real segments with real indexes and gives the room
back at the end; `--folder` names a disk with enough of it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import shutil
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from millrace.broker.protocol.batch import stamp_offset_and_epoch
from millrace.broker.protocol.records import Record, build_batch, warm_kernels
from millrace.broker.storage import key_map, producer_snapshot
from millrace.broker.storage.cleaner import CleanerConfig
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.broker.storage.producer_state import ProducerState

COMPACT = frozenset({"compact"})


def fill(log: Log, record_count: int, per_batch: int, compression: int) -> None:
    """Records of 200 bytes, a quarter as many keys as records."""
    rng = random.Random(7)
    value = rng.randbytes(180)
    number = 0
    while number < record_count:
        records = [
            Record(b"key-%011d" % rng.randrange(record_count // 4), value, (), number + n)
            for n in range(per_batch)
        ]
        number += per_batch
        log.append(build_batch(records, compression=compression), leader_epoch=0, now_ms=number)


async def lateness(done: asyncio.Event) -> list[float]:
    """How many ms late a timer of 1 ms was, each time."""
    late = []
    while not done.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append((time.perf_counter() - before) * 1000 - 1)
    return sorted(late)


async def bench_compaction(folder: Path, record_count: int, per_batch: int, compression: int) -> None:
    config = LogConfig(segment_bytes=64 << 20, cleanup_policy=COMPACT)
    manager = LogManager([folder], config, cleaner=CleanerConfig())
    manager.start(0)
    log = manager.create(("t", 0))
    fill(log, record_count, per_batch, compression)
    log.config = LogConfig(cleanup_policy=COMPACT, segment_ms=1)
    log.roll_if_due(10**15)
    log.flush(0)
    size = log.size
    key_map.warm_kernels()
    done = asyncio.Event()
    idle = asyncio.create_task(lateness(done))
    await asyncio.sleep(1)
    done.set()
    quiet = await idle
    done = asyncio.Event()
    beside = asyncio.create_task(lateness(done))
    started, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(1) as thread:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(thread, manager.cleaning.compact_due, 10**15, lambda tp: log.end_offset)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    done.set()
    late = await beside
    result = manager.cleaning.compactions[0][1]
    print(
        f"compaction, {per_batch} records a batch, codec {compression}: "
        f"{record_count / seconds:,.0f} records/s, {size / seconds / 1e6:,.0f} MB/s, "
        f"{cpu_seconds / record_count * 1e9:,.0f} ns of CPU a record; "
        f"{result.kept_record_count:,} of {result.record_count:,} records kept, "
        f"{size / 1e6:,.0f} -> {log.size / 1e6:,.0f} MB"
    )
    for name, values in (("quiet", quiet), ("beside the compaction", late)):
        print(
            f"  timer of 1 ms, {name}: p50 {values[len(values) // 2]:.2f}, "
            f"p99 {values[len(values) * 99 // 100]:.2f}, worst {values[-1]:.2f} ms late"
        )
    manager.close()


def write_partition(directory: Path, size: int, segment_size: int, batch: bytes, count: int) -> None:
    """Closed segments and an active one as a broker leaves them at a clean end, `size` bytes in all."""
    directory.mkdir(parents=True)
    chunk = bytearray()
    offset = 0
    left = size // len(batch)
    per_segment = segment_size // len(batch)
    while left > 0:
        here = min(left, per_segment)
        left -= here
        stem = str(directory / f"{offset:020d}")
        index, times = bytearray(), bytearray()
        base, position = offset, 0
        with open(stem + ".log", "wb") as file:
            for number in range(here):
                stamped = bytearray(batch)
                stamp_offset_and_epoch(stamped, offset, 0)
                chunk += stamped
                offset += count
                if number:
                    index += struct.pack(">II", offset - 1 - base, position)
                position += len(batch)
                if len(chunk) > 1 << 20:
                    file.write(chunk)
                    chunk.clear()
            file.write(chunk)
            chunk.clear()
        times += struct.pack(">qI", 1000, count - 1)
        Path(stem + ".index").write_bytes(index)
        Path(stem + ".timeindex").write_bytes(times)
        producer_snapshot.write(directory, ProducerState(end_offset=offset))
    (directory / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")


def forget_pages(folder: Path) -> None:
    """Lets the kernel forget what it has read of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def bench_start(folder: Path, partition_count: int, size: int) -> None:
    records = [Record(None, bytes(190), (), 1000) for _ in range(50)]
    batch = bytes(build_batch(records))
    per_partition = size // partition_count
    started = time.perf_counter()
    for number in range(partition_count):
        write_partition(folder / f"topic-{number}", per_partition, 8 << 20, batch, 50)
    print(
        f"wrote {partition_count} partitions, {size / 1e9:.1f} GB, in {time.perf_counter() - started:.0f} s"
    )
    warm_kernels()
    config = LogConfig(segment_bytes=8 << 20)
    (folder / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')
    for name in ("first start", "start after a clean stop", "the same, nothing of it in the page cache"):
        gc.collect()
        if "cache" in name:
            forget_pages(folder)
        manager = LogManager([folder], config)
        started, cpu = time.perf_counter(), time.process_time()
        manager.start(0)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        logs = manager.logs()
        segments = sum(len(log.segments) for log in logs.values())
        total = sum(log.size for log in logs.values())
        assert not manager.offline
        assert not manager.notes, manager.notes[:3]
        print(
            f"{name}: {seconds:.2f} s ({cpu_seconds:.2f} s of CPU) for {len(logs)} partitions, "
            f"{segments} segments, {total / 1e9:.1f} GB"
        )
        started = time.perf_counter()
        manager.close()
        print(f"  clean stop: {time.perf_counter() - started:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["compaction", "start"])
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--per-batch", type=int, default=50)
    parser.add_argument("--codec", type=int, default=0)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--gb", type=float, default=20)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-storage-", dir=options.folder))
    try:
        if options.what == "compaction":
            asyncio.run(bench_compaction(folder, options.records, options.per_batch, options.codec))
        else:
            free = shutil.disk_usage(folder).free
            if free < options.gb * 1.5e9:
                raise SystemExit(f"{folder} has {free / 1e9:.0f} GB free, {options.gb * 1.5:.0f} are needed")
            bench_start(folder, options.partitions, int(options.gb * 1e9))
    finally:
        shutil.rmtree(folder)
        os.sync()


if __name__ == "__main__":
    main()
