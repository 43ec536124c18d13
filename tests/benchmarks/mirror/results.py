"""What was measured, row by row: kept in a file as it comes, and put into tables at the end (or at an
interrupt)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.mirror.systems import VARIED

OURS = {"eos": "millrace-eos", "alo": "millrace-alo"}
DELIVERIES = {"eos": "exactly once", "alo": "at least once"}
VARIANTS = ("default", "tuned")
MARKS = (
    ("throughput", "backlog", "MB/s", 3.0),
    ("CPU per GB", "backlog", "CPU s/GB", 10.0),
    ("memory", "memory", "peak MB", 3.0),
    ("p99 latency", "latency", "p99 ms", 1.0),
)
"""(what, kind of row, its figure, so many times better than MirrorMaker 2)"""
SINGLE_MARK, SINGLES = 1.5, ("single", "1-none", "1-lz4")
"""Of the throughput, of workloads of a record a batch."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure set of one system in one round. `kind` is backlog, latency, memory, relay, link or
    failed."""

    kind: str
    ends: str
    system: str
    workload: str
    round: int
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""


class Results:
    """All rows of a run."""

    def __init__(self, path: Path) -> None:
        self.rows: list[Row] = []
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self._path.open("a") as out:
            out.write(json.dumps(asdict(row)) + "\n")
        figures = "  ".join(f"{name} {value:,.2f}" for name, value in row.figures.items())
        print(
            f"  {row.ends:<9} {row.system:<16} {row.workload:<10} {row.kind:<8} {figures} {row.note}",
            flush=True,
        )

    def of(self, kind: str, ends: str, system: str, workload: str, figure: str) -> dict[int, float]:
        """By round."""
        return {
            row.round: row.figures[figure]
            for row in self.rows
            if (row.kind, row.ends, row.system, row.workload) == (kind, ends, system, workload)
            and figure in row.figures
        }


def tables(results: Results, titles: dict[str, str]) -> str:
    """Everything that there is, for people."""
    ends = list(dict.fromkeys(row.ends for row in results.rows if row.ends))
    lines: list[str] = []
    for each in ends:
        lines += _backlogs(results, each, titles)
        lines += _counted(results, each, titles)
        lines += _varied(results, each)
        lines += _latencies(results, each)
        lines += _memory(results, each)
        lines += _links(results, each)
        lines += _marks(results, each, titles)
    failed = [row for row in results.rows if row.kind == "failed"]
    lines += [f"failed: {row.ends} {row.system} {row.workload}: {row.note}" for row in failed]
    return "\n".join(lines)


def _backlogs(results: Results, ends: str, titles: dict[str, str]) -> list[str]:
    lines = [
        "",
        f"{ends} at both ends: a backlog; MB/s of the source's log, CPU s/GB of the mirror's process; "
        "ratios are medians of the rounds (min-max)",
        f"{'':<50} {'':<14} {'millrace':>17} {'MM2 default':>17} {'MM2 tuned':>17}"
        f" {'MB/s: ours / default':>22} {'ours / tuned':>18} {'CPU: default / ours':>22} {'tuned / ours':>18}"
        f" {'of the relay':>13}",
    ]
    relay = results.of("relay", ends, "relay", "relay", "MB/s")
    empty = len(lines)
    for workload, title in titles.items():
        for delivery, words in DELIVERIES.items():
            ours = OURS[delivery]
            rates = {each: results.of("backlog", ends, each, workload, "MB/s") for each in _trio(delivery)}
            costs = {
                each: results.of("backlog", ends, each, workload, "CPU s/GB") for each in _trio(delivery)
            }
            if not any(rates.values()):
                continue
            cells = [f"{_median(rates[each]):>8} {_median(costs[each], 2):>8}" for each in _trio(delivery)]
            line = f"{title:<50} {words:<14} {' '.join(cells)}"
            for figures, upside_down in ((rates, False), (costs, True)):
                for variant in VARIANTS:
                    theirs = f"mm2-{variant}-{delivery}"
                    pairs = (
                        (figures[theirs], figures[ours]) if upside_down else (figures[ours], figures[theirs])
                    )
                    width = 22 if variant == "default" else 18
                    line += f" {_ratio(*pairs):>{width}}"
            share = _share(rates[ours], relay)
            lines.append(f"{line} {share:>13}")
    return lines if len(lines) > empty else []


def _counted(results: Results, ends: str, titles: dict[str, str]) -> list[str]:
    """Of what the figures are: a rate out of a tenth of a second says nothing."""
    found = list(
        dict.fromkeys(row.system for row in results.rows if (row.kind, row.ends) == ("backlog", ends))
    )
    if not found:
        return []
    lines = [
        "",
        f"{ends} at both ends: what was counted of a backlog after the warm-up; records, MB and seconds, "
        "medians of the rounds",
        f"{'':<50}" + "".join(f"{system:>34}" for system in found),
    ]
    for workload, title in titles.items():
        rows = [
            [results.of("backlog", ends, system, workload, figure) for figure in ("records", "MB", "seconds")]
            for system in found
        ]
        if not any(records for records, _, _ in rows):
            continue
        cells = (
            f"{_median(records, 0):>16} {_median(size):>9} {_median(seconds):>7}"
            for records, size, seconds in rows
        )
        lines.append(f"{title:<50}" + "".join(cells))
    return lines


def _varied(results: Results, ends: str) -> list[str]:
    title = f"{ends} at both ends: a backlog, ours with one setting or another"
    return _by_system(results, ends, "backlog", ("MB/s", "CPU s/GB"), title, only=VARIED)


def _latencies(results: Results, ends: str) -> list[str]:
    return _by_system(
        results,
        ends,
        "latency",
        ("p50 ms", "p99 ms", "max ms", "CPU s/GB"),
        f"{ends} at both ends: end-to-end latency at a fixed rate, to a read-committed consumer",
    )


def _memory(results: Results, ends: str) -> list[str]:
    return _by_system(results, ends, "memory", ("peak MB",), f"{ends} at both ends: peak resident memory")


def _links(results: Results, ends: str) -> list[str]:
    return _by_system(
        results,
        ends,
        "link",
        ("MB/s", "CPU s/GB"),
        f"{ends} at both ends: source behind a long link (a delaying relay; see relay.py for what it hides)",
    )


def _marks(results: Results, ends: str, titles: dict[str, str]) -> list[str]:
    """What is to be reached exactly once, beside each MirrorMaker 2, by the medians of the rounds' ratios."""
    ours, found = OURS["eos"], []
    for what, kind, figure, mark in MARKS:
        of_kind = [row for row in results.rows if (row.kind, row.ends) == (kind, ends)]
        for workload in dict.fromkeys(row.workload for row in of_kind):
            here = SINGLE_MARK if (what, workload in SINGLES) == ("throughput", True) else mark
            for variant in VARIANTS:
                pair = [
                    results.of(kind, ends, system, workload, figure)
                    for system in (ours, f"mm2-{variant}-eos")
                ]
                if ratios := _ratios(*(pair if what == "throughput" else reversed(pair))):
                    reached = statistics.median(ratios)
                    word = "reached" if reached >= here else "MISSED"
                    found.append(
                        f"{word:<8} {what}: {reached:.2f} times better than MirrorMaker 2 {variant} (mark "
                        f"{here:g}), {titles.get(workload, workload)}"
                    )
    return ["", f"{ends} at both ends: marks, exactly once", *found] if found else []


def _by_system(
    results: Results, ends: str, kind: str, figures: Sequence[str], title: str, *, only: str = ""
) -> list[str]:
    """`only`: of systems whose name holds that."""
    keys = list(
        dict.fromkeys(
            (row.system, row.workload)
            for row in results.rows
            if (row.kind, row.ends) == (kind, ends) and only in row.system
        )
    )
    if not keys:
        return []
    width = max(36, *(len(system) + len(workload) + 2 for system, workload in keys))
    lines = ["", title, f"{'':<{width}}" + "".join(f"{figure:>24}" for figure in figures)]
    for system, workload in keys:
        cells = "".join(
            f"{_spread(results.of(kind, ends, system, workload, figure).values()):>24}" for figure in figures
        )
        lines.append(f"{system + ' ' + workload:<{width}}{cells}")
    return lines


def _trio(delivery: str) -> tuple[str, ...]:
    return (OURS[delivery], *(f"mm2-{variant}-{delivery}" for variant in VARIANTS))


def _median(figures: dict[int, float], digits: int = 1) -> str:
    return f"{statistics.median(figures.values()):,.{digits}f}" if figures else "-"


def _ratio(above: dict[int, float], below: dict[int, float]) -> str:
    return _spread(_ratios(above, below), "{:.2f}")


def _ratios(above: dict[int, float], below: dict[int, float]) -> list[float]:
    """Of the rounds that have both."""
    return [above[key] / below[key] for key in above if below.get(key)]


def _share(rates: dict[int, float], relay: dict[int, float]) -> str:
    if not rates or not relay:
        return "-"
    return f"{statistics.median(rates.values()) / statistics.median(relay.values()):.0%}"


def _spread(values: Iterable[float], form: str = "{:,.1f}") -> str:
    found = sorted(values)
    if not found:
        return "-"
    middle: Callable[[float], str] = form.format
    return f"{middle(statistics.median(found))} ({middle(found[0])}-{middle(found[-1])})"
