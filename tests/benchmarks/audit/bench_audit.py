"""How fast streams are audited: `make bench-audit`.

    python -m tests.benchmarks.audit.bench_audit [--short] [--rounds N] [--records 100M] [--only TEXT]
                                                   [--equal] [--scale PART]

Records per second in cells mode, Spark local[2] and one broker on the same machine, beside the same count per
producer and window through Spark's own connector (`spark-sql-kafka-0-10`), in the same run and by turns.
Spark's start is not counted, the pinning of offsets and the writing of cells are. Both must count the same,
or the run fails.

Rows go to build/bench-audit.jsonl, a table is printed. Without `--records`: the matrix of codecs, record
sizes, producers, keys that are hashed over 64 partitions, with and without content digest (`--short`: fewer
shapes, fewer records). With `--records 100M`: one topic of so many records, read in steps of ten from a
million on, to see that cost is linear and memory flat. The data lies in build/bench-audit while it runs: a
topic at a time, 3 to 4 GB; 8 GB for 100 million (lz4).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from millrace.broker.client.admin import delete_topic
from millrace.broker.client.cluster import Cluster
from tests.benchmarks.audit.load import Shape, fill, fill_hashed
from tests.benchmarks.audit.reader import CORES, Reader
from tests.benchmarks.peers.usage import peak_memory_mb, processor_seconds
from tests.servers import BrokerProcess, ZooKeeper

BUILD = Path(__file__).resolve().parents[3] / "build"
PAPER_MESSAGES = 1_000_000_000  # a day, of all activity data together
MARK_RECORDS, MARK_RATIO, MARK_HASHED_RATIO = 5_000_000, 10, 5
_UNITS = {"K": 1_000, "M": 1_000_000, "G": 1_000_000_000}


@dataclass(frozen=True, slots=True)
class Load:
    """A topic to measure. `records` are read by us, `connector_records` of them by the connector (0:
    none)."""

    shape: Shape
    records: int
    connector_records: int = 0
    digest: bool = True


def matrix(short: bool) -> list[Load]:
    """Every codec by name, two sizes of records, one producer, ten and a thousand, and a thousand whose keys
    are hashed."""
    bytes_each = (1_600 if short else 3_200) * 1_000_000
    loads = []
    for codec in ("none", "lz4", "snappy", "zstd", "gzip"):
        for record_bytes in (200, 1000):
            # gzip takes long to make, and in a short run only what is asked for by name is read in full.
            part = 8 if codec == "gzip" else 4 if short and codec in ("snappy", "zstd") else 1
            records = bytes_each // record_bytes // part
            beside = codec in ("none", "lz4") or not short
            loads.append(
                Load(
                    Shape(codec, record_bytes),
                    records,
                    min(records, 2_000_000 if short else 4_000_000) if beside else 0,
                )
            )
    for codec in ("none", "lz4"):
        records = bytes_each // 200
        connector = 0 if short else 4_000_000
        loads.append(Load(Shape(codec, 200, producers=1000), records, connector, digest=not short))
    for codec in ("none", "lz4", "zstd"):
        records = bytes_each // 200 // (4 if short else 2)
        for shape in (
            Shape(codec, producers=10),
            Shape(codec, producers=1000, hashed="sent"),
            Shape(codec, producers=1000, hashed="merged"),
        ):
            loads.append(Load(shape, records, 0 if short else 4_000_000, digest=False))
    loads.append(Load(Shape("lz4", 200, producers=16, mixed=True), bytes_each // 200, digest=False))
    loads.append(Load(Shape("lz4", 200, batch_bytes=16_000), bytes_each // 200, digest=False))
    return loads


class Rows:
    """What was measured, kept as it comes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        path.write_text("")
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self._path.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(
            f"  {row['shape']:<52} {row['system']:<20} {row['records']:>12,} records {row['seconds']:>8.2f} s"
            f" {row['records'] / row['seconds'] / 1e6:>7.3f} M/s",
            flush=True,
        )


class Bench:
    """A broker, and a reader of each system; use as a context manager."""

    def __init__(self, folder: Path, rows: Rows, rounds: int, with_connector: bool) -> None:
        self._folder, self._rows, self._rounds = folder, rows, rounds
        self._with_connector = with_connector
        self._stack = contextlib.ExitStack()
        self._topics = 0
        self._warm = False

    def __enter__(self) -> Bench:
        with contextlib.ExitStack() as undo:
            undo.push(self._stack)
            self._start()
            undo.pop_all()
        return self

    def _start(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        zookeeper = ZooKeeper(self._folder / "zookeeper")
        self._stack.callback(zookeeper.stop)
        zookeeper.start()
        self._broker = BrokerProcess(zookeeper.chroot(), self._folder / "broker")
        self._stack.callback(self._broker.kill)
        self._broker.start()
        names = ["millrace", "connector"] if self._with_connector else ["millrace"]
        self._readers = {}
        for name in names:
            self._readers[name] = reader = Reader(name, self._folder / name)
            self._stack.callback(reader.close)

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def topic(self, shape: Shape, records: int) -> Iterator[tuple[str, int, int]]:
        """A topic that is filled, and deleted afterwards: (name, records, bytes)."""
        self._topics += 1
        name = f"bench-{self._topics}"
        begin = time.perf_counter()
        make = fill_hashed if shape.hashed else fill
        written, size = asyncio.run(make(self._broker.bootstrap, name, shape, records))
        took = time.perf_counter() - begin
        print(
            f"{shape.name}: {written:,} records, {size / 1e6:,.0f} MB in the log, made in {took:.0f} s",
            flush=True,
        )
        try:
            yield name, written, size
        finally:
            asyncio.run(self._delete(name))

    async def _delete(self, name: str) -> None:
        async with Cluster("bench", [self._broker.bootstrap]) as cluster:
            await delete_topic(cluster, name)

    def warm_up(self) -> None:
        """Both systems count what nobody measures: compilers have seen the code, connections are known."""
        with self.topic(Shape("lz4"), 1_000_000) as (name, _, _):
            for reader in self._readers.values():
                for _ in range(2):
                    reader.count(self._broker.bootstrap, name)

    def measure(self, load: Load) -> None:
        with self.topic(load.shape, load.records) as (name, _, size):
            for number in range(self._rounds):
                self._one(load, name, number, size, "millrace")
                if load.digest:
                    self._one(load, name, number, size, "millrace", digest=True)
                if load.connector_records and "connector" in self._readers:
                    ours = self._one(
                        load, name, number, size, "millrace", records=load.connector_records, row=False
                    )
                    theirs = self._one(load, name, number, size, "connector", records=load.connector_records)
                    if ours["counts"] != theirs["counts"]:
                        raise RuntimeError(f"{load.shape.name}: the two do not count the same")

    def grow(self, shape: Shape, records: int, digest: bool) -> None:
        """Read the first million of a topic, ten million, and so on, to all of it."""
        with self.topic(shape, records) as (name, written, size):
            steps = [10**power for power in range(6, 12) if 10**power < written] + [written]
            for step in steps:
                for number in range(self._rounds):
                    load = Load(shape, step)
                    self._one(
                        load, name, number, size * step // written, "millrace", digest=digest, records=step
                    )

    def _one(
        self, load: Load, topic: str, number: int, size: int, system: str, *, row: bool = True, **order: Any
    ) -> dict[str, Any]:
        assert self._broker.process is not None
        before = processor_seconds(self._broker.process.pid)
        answer = self._readers[system].count(self._broker.bootstrap, topic, **order)
        answer["broker_cpu_s"] = processor_seconds(self._broker.process.pid) - before
        if answer["counted"] != answer["records"]:
            raise RuntimeError(f"{system} counted {answer['counted']:,} of {answer['records']:,} records")
        if order.get("digest") and answer["digests"] != answer["cells"]:
            raise RuntimeError("cells without a digest")
        if row:
            figures = {key: value for key, value in answer.items() if key != "counts"}
            name = system + (" with digest" if order.get("digest") else "")
            self._rows.add(
                {
                    "shape": load.shape.name,
                    **asdict(load.shape),
                    "system": name,
                    "round": number,
                    "log_bytes": size,
                }
                | figures
                | {"broker_peak_mb": peak_memory_mb(self._broker.process.pid)}
            )
        return answer


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For people: medians of the rounds with minimum and maximum, and where the processor's time went."""
    lines = [
        "",
        f"{'shape':<52} {'system':<20} {'M records/s (min - max)':>24} {'ratio':>7}  "
        f"{'CPU ns/record: Python / JVM / broker':>37} {'peak MB: Python / JVM':>22} {'cells':>7} "
        f"{'bits/record':>11}",
    ]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["shape"], row["system"], row["records"]), []).append(row)

    def speeds(group: Sequence[dict[str, Any]]) -> list[float]:
        return [row["records"] / row["seconds"] / 1e6 for row in group]

    ours = {shape: group for (shape, system, _), group in groups.items() if system == "millrace"}
    for (shape, system, records), group in groups.items():
        speed = speeds(group)
        ratio = ""
        if system == "connector" and shape in ours:
            ratio = f"1/{statistics.median(speeds(ours[shape])) / statistics.median(speed):.1f}"
        last = group[-1]
        cost = " / ".join(
            f"{statistics.median(row[f'{kind}_cpu_s'] for row in group) / records * 1e9:,.0f}"
            for kind in ("python", "jvm", "broker")
        )
        cells = f"{last['cells']:,}" if "cells" in last else ""
        bits = f"{last['bitmap_bytes'] * 8 / records:.3f}" if "cells" in last else ""
        size = (
            f" {records / 1e6:,.0f} M"
            if len({key[2] for key in groups if key[:2] == (shape, system)}) > 1
            else ""
        )
        speed_text = f"{statistics.median(speed):.3f} ({min(speed):.3f} - {max(speed):.3f})"
        memory = f"{last['python_peak_mb']:,.0f} / {last['jvm_peak_mb']:,.0f}"
        lines.append(
            f"{shape + size:<52} {system:<20} {speed_text:>24} {ratio:>7}  {cost:>37} {memory:>22} "
            f"{cells:>7} {bits:>11}"
        )
    return "\n".join(lines)


def conclusions(rows: Sequence[dict[str, Any]]) -> str:
    """The marks, what the paper's day would take, and how much of it is processor time: other load on the
    machine makes the seconds longer, hardly the processor time."""
    lines = [""]
    for codec in ("none", "lz4"):
        ours = [row for row in rows if (row["system"], row["shape"]) == ("millrace", Shape(codec).name)]
        ours = [row for row in ours if row["records"] == max(row["records"] for row in ours)]
        if not ours:
            continue
        speeds = [row["records"] / row["seconds"] for row in ours]
        spent = statistics.median(_processor_time(row) for row in ours)
        middle = statistics.median(speeds)
        lines.append(
            f"{codec}, 200 B: {middle / 1e6:.2f} M records/s, at best {max(speeds) / 1e6:.2f} "
            f"({_judged(middle, MARK_RECORDS, f'{MARK_RECORDS / 1e6:.0f} M')}); "
            f"the paper's billion a day: {PAPER_MESSAGES / middle:,.0f} s"
        )
        lines.append(
            f"    {spent * 1e9:,.0f} ns of processor time a record, with broker and JVM: where two cores do "
            f"nothing else, {CORES / spent / 1e6:.1f} M records/s and {PAPER_MESSAGES * spent / CORES:,.0f} s"
        )
    for row in (row for row in rows if row["system"] == "connector"):
        for mine in rows:
            same = all(mine[each] == row[each] for each in ("shape", "round"))
            if same and mine["system"] == "millrace":
                ratio = row["seconds"] / row["records"] / (mine["seconds"] / mine["records"])
                spent = _processor_time(row) / _processor_time(mine)
                mark = MARK_HASHED_RATIO if row["hashed"] else MARK_RATIO
                lines.append(
                    f"{row['shape']}, round {row['round'] + 1}: {ratio:.1f} x the connector's records/s "
                    f"({_judged(ratio, mark, str(mark))}), {spent:.1f} x less processor time"
                )
    return "\n".join(lines)


def _judged(reached: float, mark: float, told: str) -> str:
    return f"mark {told}: {'reached' if reached >= mark else 'MISSED'}"


def _processor_time(row: dict[str, Any]) -> float:
    """Seconds a record, of everything that works for it."""
    return float(row["python_cpu_s"] + row["jvm_cpu_s"] + row["broker_cpu_s"]) / int(row["records"])


def parse_count(text: str) -> int:
    """`100M`, `5000000`."""
    unit = _UNITS.get(text[-1:].upper(), 0)
    return int(float(text[:-1]) * unit) if unit else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--records", type=parse_count, help="one topic of so many records: 100M")
    parser.add_argument("--codec", default="lz4", help="with --records")
    parser.add_argument("--digest", action="store_true", help="with --records")
    parser.add_argument("--only", default="", help="shapes whose name has this in it")
    parser.add_argument("--without-connector", action="store_true")
    parser.add_argument("--equal", action="store_true", help="the connector reads as many records as we do")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the matrix's records")
    given = parser.parse_args()
    growing = given.records is not None
    rounds = given.rounds or (1 if growing or given.short else 3)
    rows = Rows(BUILD / "bench-audit.jsonl")
    begin = time.monotonic()
    with Bench(BUILD / "bench-audit", rows, rounds, not growing and not given.without_connector) as bench:
        bench.warm_up()
        try:
            if growing:
                bench.grow(Shape(given.codec), given.records, given.digest)
            else:
                for load in matrix(given.short):
                    if given.only in load.shape.name:
                        beside = load.connector_records and (
                            load.records if given.equal else load.connector_records
                        )
                        bench.measure(
                            replace(
                                load,
                                records=int(load.records * given.scale),
                                connector_records=int(beside * given.scale),
                            )
                        )
        finally:
            print(table(rows.rows))
            print(conclusions(rows.rows))
            print(f"\n{time.monotonic() - begin:.0f} s in all; rows in {BUILD / 'bench-audit.jsonl'}")


if __name__ == "__main__":
    main()
