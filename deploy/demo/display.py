"""What a person sees of the demo: one moving line in a terminal, a plain line now and then elsewhere, and the
closing table. Text only: nothing here decides anything."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from millrace.deploy.demo.tail import Latency, Span

PLAIN_INTERVAL_S = 2.0
PAPER_LATENCY_S = 10


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of the replay. `lag` is None while the mirrors do not tell."""

    published: int
    total: int
    mirrored: int
    lag: int | None

    def line(self, elapsed_s: float) -> str:
        lag = "?" if self.lag is None else f"{self.lag:,}"
        return (
            f"{elapsed_s:5.1f} s   published {self.published:>9,} of {self.total:,}"
            f"   mirrored {self.mirrored:>9,}   lag {lag:>8}"
        )


class Display:
    """Prints steps and progress; on a terminal progress stays on one line."""

    def __init__(self, out: TextIO | None = None):
        self._out = out or sys.stdout
        self._moving = self._out.isatty()
        self._begun = time.monotonic()
        self._next_plain = 0.0
        self._line_open = False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    def say(self, text: str) -> None:
        self._close_line()
        print(text, file=self._out, flush=True)

    def step(self, text: str) -> None:
        self.say(f"{self.elapsed_s:5.1f} s   {text}")

    def progress(self, progress: Progress, *, last: bool = False) -> None:
        line = progress.line(self.elapsed_s)
        if self._moving:
            print(f"\r\x1b[2K{line}", end="\n" if last else "", file=self._out, flush=True)
            self._line_open = not last
        elif last or self.elapsed_s >= self._next_plain:
            self._next_plain = self.elapsed_s + PLAIN_INTERVAL_S
            print(line, file=self._out, flush=True)

    def _close_line(self) -> None:
        if self._line_open:
            print(file=self._out)
            self._line_open = False


def latency_line(latency: Latency | None) -> str:
    if latency is None:
        return "latency from send to readable in the aggregate: not measured"

    def told(span: Span) -> str:
        return f"mean {span.mean_ms:,.0f} ms, p99 {span.p99_ms:,.0f} ms"

    return (
        f"latency from send to readable in the aggregate: {told(latency.whole)} "
        f"over {latency.count:,} records (the paper: about {PAPER_LATENCY_S} s)\n"
        f"  of it the producers' queues and the sources' answers: {told(latency.to_source)}; "
        f"mirror and aggregate: {told(latency.to_aggregate)}"
    )


def result_table(summary: Mapping[str, Any], sources: Iterable[str], aggregate: str) -> list[str]:
    """One row a datacenter: what its producers published and what arrived, from summary.json."""
    rows: list[tuple[str, ...]] = [
        ("datacenter", "producers", "published", "in the source", "in aggregate", "missing", "repeated")
    ]
    totals = [0] * 6
    for source in sources:
        mine = [row for row in summary["producers"] if row["consumed"].get(source)]
        figures = [
            len(mine),
            sum(row["published"] for row in mine),
            sum(row["consumed"].get(source, 0) for row in mine),
            sum(row["consumed"].get(aggregate, 0) for row in mine),
            sum(row["missing"] for row in mine),
            sum(row["duplicates"] for row in mine),
        ]
        totals = [total + figure for total, figure in zip(totals, figures, strict=True)]
        rows.append((source, *(f"{figure:,}" for figure in figures)))
    rows.append(("all", *(f"{figure:,}" for figure in totals)))
    return _aligned(rows)


def findings(summary: Mapping[str, Any], limit: int = 10) -> list[str]:
    """The losses and duplicates by name, the first `limit` of each."""
    lines = []
    for kind, title in (("losses", "lost"), ("duplicates", "repeated")):
        named = summary[kind]
        for finding in named[:limit]:
            between = finding.get("lost_between")
            hop = f" between {between[0]} and {between[1]}" if between else ""
            lines.append(
                f"{title:<9} {finding['producer']} {_sequences(finding['sequences'])} of window "
                f"{finding['window_start']}{hop}"
            )
        if len(named) > limit:
            lines.append(f"{title:<9} and {len(named) - limit} more in summary.json")
    return lines


def _sequences(ranges: Iterable[list[int]]) -> str:
    parts = [f"#{first}" if first == last else f"#{first}-{last}" for first, last in ranges]
    return ", ".join(parts[:5]) + (f" and {len(parts) - 5} more" if len(parts) > 5 else "")


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
