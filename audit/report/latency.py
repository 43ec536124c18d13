"""How long records took between tiers, estimated from the bounds that cells keep. Pure.

A cell keeps the append times of its first and last record, not of each. Of a window that both tiers saw, the
first records give one sample (downstream first - upstream first) and the last records another; both are exact
for that record while a mirror keeps the order within a partition. Percentiles are over these samples, so they
are estimates. Known only where brokers stamp append times (`message.timestamp.type=LogAppendTime`), by the
brokers' clocks. Called by `summary`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Hop = tuple[str, str]


class Latencies:
    """How often there was each sample, by (topic, upstream, downstream). `upstreams` is {tier: tiers before
    it}; a tier that is not in it follows the one named before it in the row."""

    def __init__(self, upstreams: Mapping[str, Sequence[str]]) -> None:
        self._upstreams = upstreams
        self._samples: dict[tuple[str, str, str], Counter[int]] = {}
        self._windows: dict[tuple[str, str, str], int] = {}

    def add(self, topic: str, append_ms: Mapping[str, Sequence[int]]) -> None:
        """One row's {tier: [first, last]}."""
        for upstream, downstream in self._hops(append_ms):
            first, last = append_ms[upstream]
            arrived_first, arrived_last = append_ms[downstream]
            key = (topic, upstream, downstream)
            self._samples.setdefault(key, Counter()).update((arrived_first - first, arrived_last - last))
            self._windows[key] = self._windows.get(key, 0) + 1

    def add_rows(self, topics: Any, first: Mapping[str, Any], last: Mapping[str, Any]) -> None:
        """Many rows' at once, Arrow's arrays: their topics, and by tier the first times and the last."""
        for upstream, downstream in self._hops(first):
            for times in (first, last):
                took = pc.subtract(times[downstream], times[upstream])
                grouped = pa.table({"topic": topics, "ms": took}).group_by(["topic", "ms"])
                for topic, took_ms, count in _counts(grouped.aggregate([([], "count_all")])):
                    self._samples.setdefault((topic, upstream, downstream), Counter())[took_ms] += count
            for each in pc.value_counts(topics).to_pylist():
                key = (each["values"], upstream, downstream)
                self._windows[key] = self._windows.get(key, 0) + each["counts"]

    def sums(self) -> list[dict[str, Any]]:
        """All of it, as JSON."""
        return [
            {"of": list(key), "windows": self._windows[key], "samples": sorted(samples.items())}
            for key, samples in sorted(self._samples.items())
        ]

    def join(self, sums: Sequence[Mapping[str, Any]]) -> None:
        """Add what another has summed up."""
        for each in sums:
            topic, upstream, downstream = each["of"]
            key = (topic, upstream, downstream)
            self._samples.setdefault(key, Counter()).update(dict(each["samples"]))
            self._windows[key] = self._windows.get(key, 0) + each["windows"]

    def _hops(self, append_ms: Mapping[str, Any]) -> Iterator[Hop]:
        known = [tier for tier in append_ms if self._upstreams.get(tier)]
        if not known:
            yield from itertools.pairwise(append_ms)
            return
        for downstream in known:
            allowed = set(self._upstreams[downstream])
            for upstream in append_ms:
                # Several source clusters of one stream are one tier, named a+b.
                if upstream != downstream and allowed.issuperset(upstream.split("+")):
                    yield upstream, downstream
                    break

    def told(self) -> list[dict[str, Any]]:
        """[{topic, between, windows, p50_ms, p99_ms, max_ms}], topics in order."""
        rows: list[dict[str, Any]] = []
        for key in sorted(self._samples):
            topic, upstream, downstream = key
            samples = sorted(self._samples[key].items())
            rows.append(
                {
                    "topic": topic,
                    "between": [upstream, downstream],
                    "windows": self._windows[key],
                    "p50_ms": percentile(samples, 0.5),
                    "p99_ms": percentile(samples, 0.99),
                    "max_ms": samples[-1][0],
                }
            )
        return rows


def _counts(grouped: pa.Table) -> Iterator[tuple[str, int, int]]:
    columns = (grouped[name].to_pylist() for name in ("topic", "ms", "count_all"))
    return zip(*columns, strict=True)


def percentile(ascending: Sequence[tuple[int, int]], share: float) -> int:
    """The nearest rank: the least value that at least `share` of all do not exceed. Of (value, how often)."""
    rank = max(1, math.ceil(share * sum(count for _, count in ascending)))
    for value, count in ascending:
        rank -= count
        if rank <= 0:
            return value
    return ascending[-1][0]
