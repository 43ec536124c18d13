"""What producers' events cost the audit's driver: to be learnt, to be held, to be kept and known again.

    python -m tests.benchmarks.audit.bench_events [--streams 100] [--windows 360] [--content]

Every producer reports each of its windows once, as `encode_event` writes it, one minute after the other. The
topic is read twice, as in the source and where a mirror brought it. With `--content` reports have digests.
CPU time, and what the process holds beyond what it began with; the day of the audit's mark is
`--streams 10000 --windows 1440`. Known again is a process of its own. No broker, no Spark, one core.
"""

from __future__ import annotations

import argparse
import gc
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.audit.contract.events import CLOSED, EventLedger
from millrace.audit.runs import fact_rows
from tests.proofs.hashed_load import WINDOW_MS, count_text, producer_name, stream_event

RECORDS, VALUE_BYTES = 69, 140
FIRST_MS = 1_700_000_040_000
Text = tuple[bytes, bytes]
"""key and value of an event"""


def resident_bytes() -> int:
    gc.collect()
    pa.default_memory_pool().release_unused()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def minute(streams: int, window: int, *, content: bool) -> list[Text]:
    """What so many producers report of one window. Their bytes differ as those of real ones do."""
    start_ms, first = FIRST_MS + window * WINDOW_MS, window * RECORDS + 1
    found = []
    for number in range(streams):
        spread = (number * 7919 + window * 104_729) % 100
        key, value = count_text(
            f"{number + 1:016x}", producer_name(number), start_ms, first, first + RECORDS - 1,
            VALUE_BYTES + spread, start_ms + WINDOW_MS + spread,
        )  # fmt: skip
        if content:
            digest = (number * 1_000_003 + window) * 0x9E3779B97F4A7C15 % (1 << 64)
            value = value.replace(b'"digest":null', b'"digest":"%016x"' % digest)
        found.append((key, value))
    return found


def ends(streams: int, windows: int) -> list[Text]:
    at_ms = FIRST_MS + windows * WINDOW_MS
    return [stream_event(each, each + 1, CLOSED, windows * RECORDS, None, at_ms) for each in range(streams)]


def learn_day(ledger: EventLedger, streams: int, windows: int, *, content: bool) -> float:
    """CPU time of learning it, in seconds; the making of the events is not in it."""
    taken_s = 0.0
    for window in range(windows + 1):
        told = ends(streams, windows) if window == windows else minute(streams, window, content=content)
        begin = time.process_time()
        for key, value in told:
            ledger.add(key, value)
        taken_s += time.process_time() - begin
    return taken_s


def timed(what: str, count: int, work: Callable[[], Any]) -> Any:
    begin = time.process_time()
    found = work()
    tell_time(what, time.process_time() - begin, count)
    return found


def tell_time(what: str, seconds: float, count: int) -> None:
    print(f"{what:<24}{seconds / count * 1e6:8.2f} µs an event", flush=True)


def tell_size(what: str, bytes_taken: int, count: int) -> None:
    print(f"{what:<24}{bytes_taken / count:8,.0f} bytes a window", flush=True)


def warm_up(path: Path) -> None:
    """What is loaded once is no window's."""
    ledger = EventLedger()
    learn_day(ledger, 2, 2, content=False)
    fact_rows.digest(fact_rows.facts_table(ledger, {}))
    pq.write_table(fact_rows.facts_table(ledger, {}), path, compression="zstd")
    fact_rows.restore(pq.read_table(path), EventLedger())


def learn(path: Path, streams: int, windows: int, *, content: bool) -> None:
    warm_up(path)
    count, empty, ledger = streams * windows, resident_bytes(), EventLedger()
    for what in ("learnt", "read once more"):
        tell_time(what, learn_day(ledger, streams, windows, content=content), count)
        tell_size("  held", resident_bytes() - empty, count)
    table = timed("a table of facts", count, lambda: fact_rows.facts_table(ledger, {}))
    tell_size("  held with it", resident_bytes() - empty, count)
    timed("its digest", count, lambda: fact_rows.digest(table))
    pq.write_table(table, path, compression="zstd")
    tell_size("  in the state", path.stat().st_size, count)
    print(f"{'most of the process':<24}{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:8,.0f} MB")


def know_again(path: Path, count: int) -> None:
    warm_up(path.with_suffix(".small"))
    ledger = EventLedger()
    empty = resident_bytes()
    timed("known again", count, lambda: fact_rows.restore(pq.read_table(path), ledger))
    tell_size("  held", resident_bytes() - empty, count)
    table = timed("a table of facts again", count, lambda: fact_rows.facts_table(ledger, {}))
    tell_size("  held with it", resident_bytes() - empty, count)
    reports = sum(len(facts.windows) for facts in ledger.streams.values())
    if reports != count or table.num_rows != len(ledger.streams):
        raise RuntimeError(f"{reports} reports of {count} are known again")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--windows", type=int, default=360)
    parser.add_argument("--content", action="store_true")
    parser.add_argument("--again", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    count = given.streams * given.windows
    if given.again is not None:
        know_again(given.again, count)
        return
    print(f"{count:,} windows of {given.streams:,} streams", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "facts.parquet"
        learn(path, given.streams, given.windows, content=given.content)
        command = [sys.executable, "-m", "tests.benchmarks.audit.bench_events", "--again", str(path)]
        subprocess.run(
            [*command, "--streams", str(given.streams), "--windows", str(given.windows)], check=True
        )


if __name__ == "__main__":
    main()
