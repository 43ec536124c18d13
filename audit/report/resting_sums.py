"""What the report says of windows at rest, summed up once. Pure.

Of such windows there is nothing to tell but that they are proven, so the report needs their sums alone: made
when they come to rest (`runs.resting`), and added to those of the other rows by `summary` and `html`. Must
stay true: what is told is what would be told of their rows, but for the page's table, which sums up by
producer what is proven as soon as there is too much of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from millrace.audit.report.heatmap import Windows
from millrace.audit.report.plain import PlainRows, fold
from millrace.audit.report.tally import Tally


@dataclass(frozen=True, slots=True)
class RestingSums:
    """Of the windows that came to rest with one fold. `told` is JSON: `tally` (`Tally.proven_sums`), the
    `tiers` that `producers` (`PlainRows.rest`) number, `window_ms`, and of windows that were `revised` what
    `settled.revised` tells, [rows, how many]; `squares` are `heatmap.SQUARES`."""

    told: Mapping[str, Any]
    producers: pa.Table
    squares: pa.Table


class Summing:
    """Rows that come to rest, taken part by part. `tiers` as in the summary; `names` are all tiers' that a
    row counts."""

    def __init__(
        self, tiers: Sequence[Mapping[str, Any]], names: Sequence[str], at_ms: int, grace_ms: int
    ) -> None:
        self._tally = Tally(tiers, at_ms, grace_ms)
        self._plain = PlainRows(names)
        self._windows = Windows(names)

    def add(self, rows: pa.Table) -> None:
        """Settled and proven ones, of whole windows (`verdict_rows.VERDICT_SCHEMA`)."""
        self._tally.add_all(rows)
        self._plain.sum_up(fold(rows, self._plain.tiers))
        self._windows.add_part(rows)

    def sums(self, window_ms: int, revised: tuple[pa.Table, int]) -> RestingSums:
        told = {
            "tally": self._tally.proven_sums(),
            "tiers": list(self._plain.tiers),
            "window_ms": window_ms,
            "revised": [revised[0].to_pylist(), revised[1]],
        }
        return RestingSums(told, self._plain.rest, self._windows.squares())
