"""What a verdict row costs the audit's driver, and how much of its memory.

    python -m tests.benchmarks.audit.bench_rows [--rows 1000000] [--stamped]

A row is a stream's window. Here they are a day of streams, all proven, as nearly all rows of a large audit
are, in files as executors write them; with `--stamped` brokers told append times. Each step that the driver
takes after reconciliation is timed by itself. CPU time; no broker, no Spark, one core. The peak is this
process's: another one has written the files.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millrace.audit.keeping.state import StateFolder
from millrace.audit.keeping.upkeep import late_counts
from millrace.audit.keeping.verdict_files import RowFiles
from millrace.audit.keeping.waivers import standing_waivers
from millrace.audit.reconciliation.horizon import split_older
from millrace.audit.reconciliation.row_parts import View, parts_of
from millrace.audit.reconciliation.settled import (
    LINE_COLUMNS,
    LINE_SCHEMA,
    SETTLED_SCHEMA,
    lines_digest,
    lines_of,
    number_rows,
    revisions_of,
    rows_of,
)
from millrace.audit.reconciliation.verdict_rows import Evidence, evident_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.reconciliation.watermark import Waiver
from millrace.audit.report.folder import write_report
from millrace.audit.report.summary import summarise
from millrace.audit.runs.copied_headers import foreign_counts
from millrace.audit.runs.doubtful_names import doubtful_names
from millrace.audit.runs.watermarks import watermarks_of

TOPIC, TIERS = "flights", ["ewr", "agg"]
WINDOW_MS, HOUR, HOURS = 60_000, 60, 24
FOLDER = "verdicts/1"
GROUP_ROWS = 65_536


def proven_rows(streams: int, hour: int, *, stamped: bool) -> pa.Table:
    """An hour of so many streams, in the order of windows."""
    counts = dict.fromkeys(TIERS, 69)
    verdict = WindowVerdict(
        topic=TOPIC, producer="", stream="", window_start_ms=0, window_ms=WINDOW_MS,
        state=WindowState.SETTLED, verdict=Verdict.PROVEN, published=69, consumed=counts, seen=counts,
    )  # fmt: skip
    times = {"ewr": [1, 59_000], "agg": [30, 59_040]} if stamped else {}
    count = streams * HOUR
    rows = evident_rows([(verdict, Evidence(times))]).take(pa.array(np.zeros(count, np.int64)))
    windows, numbers = np.divmod(np.arange(count), streams)
    first = hour * count
    columns = {
        "producer": pa.array([f"feed@host{number:06}" for number in range(streams)]).take(pa.array(numbers)),
        "stream": pa.array([f"{number:016x}" for number in range(streams)]).take(pa.array(numbers)),
        "window_start_ms": pa.array((windows + hour * HOUR) * WINDOW_MS),
        "said": pa.array([f"{first + number:024x}" for number in range(count)]),
    }
    for name, column in columns.items():
        rows = rows.set_column(rows.schema.get_field_index(name), name, column)
    return rows


def write(state: Path, streams: int, *, stamped: bool) -> None:
    """As executors do: an hour in a file."""
    folder = state / FOLDER / "day=1970-01-01"
    folder.mkdir(parents=True)
    worker_s = 0.0
    for hour in range(HOURS):
        rows = proven_rows(streams, hour, stamped=stamped)
        begin = time.process_time()
        rows = number_rows(rows, LINE_SCHEMA.empty_table(), 1)
        worker_s += time.process_time() - begin
        path = folder / f"part-{hour:05}.parquet"
        pq.write_table(rows, path, row_group_size=GROUP_ROWS, compression="zstd")
    print(
        f"{'revisions, in workers':<28}{worker_s / (streams * HOURS * HOUR) * 1e6:7.2f} µs a row", flush=True
    )


def measure(state: Path, count: int) -> None:
    whole = 0.0

    def timed(what: str, work: Callable[[], Any]) -> Any:
        nonlocal whole
        begin = time.process_time()
        found = work()
        seconds = time.process_time() - begin
        whole += seconds
        print(f"{what:<28}{seconds / count * 1e6:7.2f} µs a row")
        return found

    folder = StateFolder.open(state)
    files = RowFiles(folder, folder.files_in(FOLDER))
    rows, lines = View(files, rows_of, ["state"]), View(files, lines_of, LINE_COLUMNS, makes=True)
    pruned = SETTLED_SCHEMA.empty_table()
    timed("where windows are", lambda: next(files.parts(["state"])))
    timed("what only counts", lambda: (foreign_counts(files), late_counts(files)))
    timed("names in doubt", lambda: [*doubtful_names(rows)])
    timed("waivers", lambda: standing_waivers([Waiver(TOPIC, WINDOW_MS, "ops", "known", 1)], rows, pruned))
    timed("watermarks", lambda: watermarks_of(rows, pruned, [], [], [TOPIC], over_ms=10**15))
    deciding, older = split_older(rows, 0)
    timed("horizon", lambda: sum(part.num_rows for part in parts_of(older, ["state"])))
    told: dict[str, Any] = {"at_ms": 1, "window_ms": WINDOW_MS, "untrusted": {}, "unaudited": {}}
    summary = timed("summary", lambda: summarise(deciding, tiers=TIERS, **told))
    timed("revisions for the summary", lambda: revisions_of(lines))
    timed("digest of what is kept", lambda: lines_digest(lines))
    with tempfile.TemporaryDirectory() as report:
        timed("the report", lambda: write_report(Path(report), summary, rows))
    print(f"{'all':<28}{whole / count * 1e6:7.2f} µs a row")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    size = sum(path.stat().st_size for path in state.rglob("*.parquet"))
    print(f"{count:,} rows: {size / count:.0f} bytes each in their files; peak {peak >> 20:,} MB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--stamped", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    pa.set_cpu_count(1)
    streams = -(-given.rows // (HOURS * HOUR))
    if given.write is not None:
        write(given.write, streams, stamped=given.stamped)
        return
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, "-m", "tests.benchmarks.audit.bench_rows", "--write", state]
        command += ["--rows", str(given.rows), *(["--stamped"] if given.stamped else [])]
        subprocess.run(command, check=True)
        measure(Path(state), streams * HOURS * HOUR)


if __name__ == "__main__":
    main()
