"""What a verdict row costs the audit's driver, and how much of its memory.

    python -m tests.benchmarks.audit.bench_rows [--rows 1000000] [--stamped]

A row is a stream's window. Here they are a day of streams, all proven, as nearly all rows of a large audit
are, and the run before said the same of them; with `--stamped` brokers told append times. Each step that the
driver takes after reconciliation is timed by itself. CPU time; no broker, no Spark, one core.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from millrace.audit.keeping.waivers import standing_waivers
from millrace.audit.reconciliation.horizon import split_older
from millrace.audit.reconciliation.row_parts import parts_of
from millrace.audit.reconciliation.settled import lines_digest
from millrace.audit.reconciliation.verdict_rows import Evidence, evident_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.reconciliation.watermark import Waiver
from millrace.audit.report.heatmap import Windows
from millrace.audit.report.plain import PlainRows, by_producer, fold, table_data
from millrace.audit.report.summary import summarise
from millrace.audit.runs.watermarks import watermarks_of
from tests.settling import settle

TOPIC, TIERS = "flights", ["ewr", "agg"]
WINDOW_MS, DAY = 60_000, 1_440


def proven_rows(count: int, *, stamped: bool) -> pa.Table:
    """So many windows of streams that run for a day each."""
    counts = dict.fromkeys(TIERS, 69)
    verdict = WindowVerdict(
        topic=TOPIC, producer="", stream="", window_start_ms=0, window_ms=WINDOW_MS,
        state=WindowState.SETTLED, verdict=Verdict.PROVEN, published=69, consumed=counts, seen=counts,
    )  # fmt: skip
    times = {"ewr": [1, 59_000], "agg": [30, 59_040]} if stamped else {}
    rows = evident_rows([(verdict, Evidence(times))]).take(pa.array(np.zeros(count, np.int64)))
    streams, windows = np.divmod(np.arange(count), DAY)
    each = range(streams[-1] + 1)
    columns = {
        "producer": pa.array([f"feed@host{number:06}" for number in each]).take(pa.array(streams)),
        "stream": pa.array([f"{number:016x}" for number in each]).take(pa.array(streams)),
        "window_start_ms": pa.array(windows * WINDOW_MS),
    }
    for name, column in columns.items():
        rows = rows.set_column(rows.schema.get_field_index(name), name, column)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--stamped", action="store_true")
    given = parser.parse_args()
    pa.set_cpu_count(1)
    whole = 0.0

    def timed(what: str, work: Callable[[], Any]) -> Any:
        nonlocal whole
        begin = time.process_time()
        found = work()
        seconds = time.process_time() - begin
        whole += seconds
        print(f"{what:<28}{seconds / given.rows * 1e6:7.2f} µs a row")
        return found

    rows = proven_rows(given.rows, stamped=given.stamped)
    before = settle(rows, None, [TOPIC], 1).table
    settlement = timed("revisions", lambda: settle(rows, before, [TOPIC], 2))
    table = settlement.table
    rows = settlement.rows
    waiver = Waiver(TOPIC, WINDOW_MS, "ops", "known", 1)
    timed("waivers", lambda: standing_waivers([waiver], rows, table))
    timed("watermarks", lambda: watermarks_of(rows, table, [], [], [TOPIC]))
    dated = rows.append_column("settled_ms", settlement.made_ms)
    timed("horizon", lambda: [*parts_of(split_older(dated, 0)[0])])
    told: dict[str, Any] = {"at_ms": 1, "window_ms": WINDOW_MS, "untrusted": {}, "unaudited": {}}
    timed("summary", lambda: summarise(rows, tiers=TIERS, **told))
    timed("digest of the state's table", lambda: lines_digest(table))
    timed("producers.parquet", lambda: by_producer(rows))
    folded = timed("page: rows by producer", lambda: fold(rows, TIERS))
    plain = PlainRows(TIERS)
    timed("page: the worst of them", lambda: (plain.add(folded), table_data(plain)))
    timed("page: heatmap", lambda: Windows(rows, TIERS))
    print(f"{'all':<28}{whole / given.rows * 1e6:7.2f} µs a row")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    held = rows.nbytes + 2 * table.nbytes
    print(
        f"{given.rows:,} rows: {held / given.rows:.0f} bytes each, with the state's; peak {peak >> 20:,} MB"
    )


if __name__ == "__main__":
    main()
