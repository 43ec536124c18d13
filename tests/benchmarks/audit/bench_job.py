"""The whole audit of many records: `make bench-audit-job [ARGS="--records 100M --lose 2"]`.

    python -m tests.benchmarks.audit.bench_job [--records 100M] [--codec lz4] [--lose BATCHES]

A source is filled with audited records, a real mirror carries them to an aggregate, and `millrace audit run`
reads both clusters, as on any day: cells, verdicts, state and report. So twice `--records` are read. Batches
that are lost were told as acknowledged and never written, from the middle of the streams; the audit must name
each of their records and the hop, and without them it must say PROVEN, or the run fails. Then the same audit
again, with nothing new: what a scheduled run costs. Both brokers, the mirror and Spark share the machine, so
seconds are what it takes here, not what it costs elsewhere; the line on memory holds anywhere.

The data lies in build/bench-audit-job while it runs: 8 GB for 100 million records with lz4, twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from confluent_kafka import Producer
from pyroaring import BitMap64

from millrace.audit.clients.events_topic import ensure_events_topic
from millrace.audit.contract.events import CLOSED, CountEvent, Event, StreamEvent, encode_event
from tests.benchmarks.audit.bench_audit import BUILD, parse_count
from tests.benchmarks.audit.load import (
    RECORDS_PER_MS,
    BatchMaker,
    Shape,
    fill,
    producer_name,
    stream_number,
)
from tests.cluster.mirror_process import MirrorProcess
from tests.peak_memory import PeakMemory
from tests.servers import BrokerProcess, ZooKeeper

TOPIC, EVENTS_TOPIC = "flights", "millrace.audit"
WINDOW_MS = 60_000
PAST_MS = 600_000
"""The last record is so old: its window is over."""
MIRROR_TIMEOUT_S = 3_600.0
PROVEN, LOSS = 0, 1


@dataclass(frozen=True, slots=True)
class Load:
    """What the producers say that they have written: one stream a partition."""

    shape: Shape
    record_count: int
    partitions: int
    lost: frozenset[tuple[int, int]]
    start_ms: int

    @property
    def told_count(self) -> int:
        """Of a partition: whole batches."""
        batches = -(-(self.record_count // self.partitions) // self.shape.batch_records)
        return batches * self.shape.batch_records

    def events(self) -> Iterator[Event]:
        """Counts of each window and, after them, the word that a stream is closed."""
        value_bytes = BatchMaker(self.shape).value_bytes
        producer, at_ms = producer_name(0).decode(), time.time_ns() // 1_000_000
        first_window = self.start_ms - self.start_ms % WINDOW_MS
        for partition in range(self.partitions):
            stream = f"{stream_number(partition, 0):016x}"
            about = (stream, stream, TOPIC, producer)
            for window in range(first_window, at_ms, WINDOW_MS):
                bounds = ((edge - self.start_ms) * RECORDS_PER_MS for edge in (window, window + WINDOW_MS))
                first, end = (min(max(bound, 0), self.told_count) for bound in bounds)
                if first < end:
                    sequences = BitMap64(range(first + 1, end + 1))
                    size = (end - first) * value_bytes
                    yield CountEvent(
                        *about,
                        window,
                        WINDOW_MS,
                        1,
                        end - first,
                        size,
                        sequences,
                        BitMap64(),
                        BitMap64(),
                        at_ms,
                    )
            all_of_it = self.told_count, self.told_count
            yield StreamEvent(
                CLOSED, *about, "host-0000", "feed", "src", WINDOW_MS, *all_of_it, None, 60_000, at_ms
            )


def tell(bootstrap: str, events: Iterator[Event]) -> None:
    """Publish as any language does: to the events topic of the producers' own cluster."""
    client = {"bootstrap.servers": bootstrap, "enable.idempotence": True}
    ensure_events_topic(client, EVENTS_TOPIC, 60.0)
    producer = Producer(client)
    for event in events:
        key, value = encode_event(event)
        producer.produce(EVENTS_TOPIC, value, key)
        producer.poll(0)
    if producer.flush(60.0):
        raise RuntimeError("events were not acknowledged within 60 s")


def timed(what: str, work: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    found = work()
    print(f"  {what}: {time.perf_counter() - begin:.1f} s", flush=True)
    return found


def carry(folder: Path, source: BrokerProcess, target: BrokerProcess) -> None:
    """One mirror from its start until nothing is behind."""
    mirror = MirrorProcess(folder / "mirror", target.bootstrap, {"src": source.bootstrap}).start()
    try:
        deadline = time.monotonic() + MIRROR_TIMEOUT_S
        while not _is_done(mirror.status()):
            if time.monotonic() > deadline or mirror.process is None or mirror.process.poll() is not None:
                raise RuntimeError(f"the mirror does not come to the end:\n{mirror.log[-3000:]}")
            time.sleep(0.2)
        if status := mirror.terminate():
            raise RuntimeError(f"the mirror ended with {status}:\n{mirror.log[-3000:]}")
    finally:
        mirror.kill()


def _is_done(status: dict[str, Any]) -> bool:
    """Both topics are carried to their ends; lag is not told before it is known."""
    partitions = status.get("partitions", [])
    return {each["topic"] for each in partitions} == {TOPIC, EVENTS_TOPIC} and all(
        each.get("lag_records") == 0 and each["outstanding_bytes"] == 0 for each in partitions
    )


def audit(folder: Path, bootstraps: dict[str, str]) -> tuple[int, dict[str, Any], PeakMemory, float]:
    """Exit status, summary, memory and seconds of one `millrace audit run`."""
    config = folder / "audit.yaml"
    tiers = {"src": "source", "agg": "aggregate"}
    clusters = {name: {"bootstrap": [bootstraps[name]], "tier": tier} for name, tier in tiers.items()}
    config.write_text(yaml.safe_dump({"clusters": clusters, "topics": [TOPIC], "keep": "forever"}))
    words = [sys.executable, "-m", "millrace.deploy.cli", "audit", "run", "--config", str(config)]
    begin = time.perf_counter()
    process = subprocess.Popen([*words, "--master", "local[2]"], stdout=subprocess.PIPE, text=True)
    with PeakMemory(process.pid) as memory:
        said, _ = process.communicate()
    took_s = time.perf_counter() - begin
    print("".join(f"    {line}\n" for line in said.splitlines()), end="", flush=True)
    summary = json.loads((folder / "audit-report" / "summary.json").read_text())
    return process.returncode, summary, memory, took_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=parse_count, default=100_000_000)
    parser.add_argument("--codec", default="lz4")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--lose", type=int, default=0, help="so many batches")
    given = parser.parse_args()
    shape = Shape(given.codec)
    each = given.records // given.partitions
    middle = each // shape.batch_records // 2
    load = Load(
        shape,
        given.records,
        given.partitions,
        frozenset((at % given.partitions, middle + 2 * at) for at in range(given.lose)),
        time.time_ns() // 1_000_000 - PAST_MS - each // RECORDS_PER_MS,
    )
    folder = BUILD / "bench-audit-job"
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        zookeeper = ZooKeeper(folder / "zookeeper")
        stack.callback(zookeeper.stop)
        zookeeper.start()
        brokers = {}
        for name in ("src", "agg"):
            brokers[name] = BrokerProcess(zookeeper.chroot(), folder / name)
            stack.callback(brokers[name].kill)
            brokers[name].start()
        return _measure(load, folder, brokers)


def _measure(load: Load, folder: Path, brokers: dict[str, BrokerProcess]) -> int:
    source = brokers["src"].bootstrap
    print(f"{load.shape.name}, {load.partitions} partitions, {len(load.lost)} batches lost", flush=True)
    written, size = timed(
        "made",
        lambda: asyncio.run(
            fill(
                source,
                TOPIC,
                load.shape,
                load.record_count,
                load.partitions,
                start_ms=load.start_ms,
                without=load.lost,
            )
        ),
    )
    lost = len(load.lost) * load.shape.batch_records
    told = load.told_count * load.partitions
    print(f"  {told:,} records told as acknowledged, {written:,} written, {size / 1e6:,.0f} MB in the log")
    tell(source, load.events())
    timed("mirrored", lambda: carry(folder, brokers["src"], brokers["agg"]))
    bootstraps = {name: broker.bootstrap for name, broker in brokers.items()}
    for what in ("audited", "audited again, nothing new"):
        status, summary, memory, took_s = audit(folder, bootstraps)
        counts = summary["counts"]
        peaks = ", ".join(f"{kind} {peak:,.0f} MB" for kind, peak in sorted(memory.peak_mb.items()))
        print(f"  {what}: {took_s:.1f} s, status {status}, {counts}; peak of a process: {peaks}", flush=True)
        found = status, counts["acknowledged"], counts["seen"], counts["missing"], counts["duplicates"]
        expected = (LOSS if lost else PROVEN), told, {"src": written, "agg": written}, lost, 0
        if found != expected:
            print(f"wrong: found {found}, expected {expected}")
            return 1
    for loss in summary["losses"]:
        print(f"    {loss['count']} lost between {loss['lost_between']}, sequences {loss['sequences']}")
    print("  the audit was right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
