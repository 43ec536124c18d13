"""Windows of a stream of which there is nothing to tell but that all is there, judged as columns. Pure.

Called by `verdict_rows` inside Spark's workers. Of a large audit nearly all windows are so: their report is
one run of acknowledged numbers, and every tier has these very numbers, once each. Such a window is proven
whatever else is known, and it has no part in what is found of the others: its numbers are in no other window,
nothing is missing from it, and no copy lies in it. So its row is made of columns, where a Python step for
each window would cost 70 us, and the rest of the stream is reconciled as if these windows had been pruned:
their numbers are accounted for (`StreamFacts.accounted`).

What must stay true: the rows are those that `reconcile_stream` would give of the whole stream, to the last
byte. `plain_windows` gives up where anything of the stream reaches over its windows: a conflict, numbers that
two windows share, a name in a header that is not the producer's, contents. It is no judgement: who is given
up is reconciled whole, and so is a stream that groups tell of, or one with few windows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyroaring import BitMap64

from millrace.audit.contract.events import StreamFacts
from millrace.audit.contract.sequence_set import from_ranges, joined_ranges
from millrace.audit.reconciliation.said import said_of
from millrace.audit.reconciliation.stream_case import settled_until_ms
from millrace.audit.reconciliation.tier_reading import TierReading
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.scanning.cell_columns import codes_of, earliest, latest, numbers_of
from millrace.audit.scanning.cells import NO_TIME, decode_bitmap
from millrace.audit.scanning.set_kernels import FIRST, LAST, SET, SMALL_SET_BYTES
from millrace.audit.scanning.stream_cells import StreamCells
from millrace.audit.scanning.united_sets import Bitmaps, runs_of

FEW_WINDOWS = 24
"""so few are reconciled one by one: columns take some milliseconds however few there are"""
_YEAR_10000_MS = 253_402_300_800_000  # Python's calendar ends there


@dataclass(frozen=True, slots=True)
class PlainWindows:
    """Windows that are proven: `starts` in ms, ascending, each with the number of its records, and per tier
    the first and last append time, NO_TIME where brokers told none. `rest` are the stream's other cells."""

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    append_ms: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
    numbers: BitMap64
    rest: StreamCells

    def take_out_of(self, facts: StreamFacts) -> None:
        """Leave the stream its other windows; the numbers of these are accounted for."""
        facts.windows.drop_plain(self.starts)
        facts.accounted = self.numbers | facts.accounted


def plain_windows(
    facts: StreamFacts, cells: StreamCells, tiers: Sequence[TierReading], window_ms: int
) -> PlainWindows | None:
    """Those of a stream whose tiers these are, groups not among them; None where it has few, or where
    something reaches over its windows. `window_ms` is the audit's."""
    if len(facts.windows) < FEW_WINDOWS or len(cells) == 0:
        return None
    if facts.conflicts or any(each != window_ms for each in facts.windows.lengths()):
        return None
    if set(cells.producers) - {"", facts.producer} or cells.rows["digest"].null_count < len(cells):
        return None
    if (numbers_of(cells.rows["window_start_ms"]) % window_ms).any():
        return None
    names = [each.name for each in tiers]
    if set(cells.rows["tier"].unique().to_pylist()) - set(names):
        return None
    # Whether a copy may lie in a topic that is gone hangs on the topics that all of the windows are in.
    was_made_anew = any(each.cause == "recreated" for tier in tiers for each in tier.unread)
    if was_made_anew and _has_several_topics(cells):
        return None
    return _Splitting(facts, cells, names).plain()


def _has_several_topics(cells: StreamCells) -> bool:
    """Whether some are in another topic of the same cluster than others, by its id."""
    topics = cells.rows.group_by(["cluster", "topic_id"]).aggregate([])
    return topics.num_rows > len(cells.clusters)


class _Splitting:
    """The columns of one stream while its windows are told apart."""

    def __init__(self, facts: StreamFacts, cells: StreamCells, tiers: Sequence[str]) -> None:
        self._facts, self._tiers = facts, tiers
        codes, names = codes_of(cells.rows["tier"])
        windows = numbers_of(cells.rows["window_start_ms"])
        order = np.lexsort((windows, codes))
        # Of a stream of hashed keys the sets are nearly all bytes: they stay where they are.
        self._cells, self._order = cells.rows, order
        self._rows = cells.rows.drop_columns(["bitmap"]).take(pa.array(order))
        codes, windows = codes[order], windows[order]
        is_first = np.concatenate(([True], (np.diff(codes) != 0) | (np.diff(windows) != 0)))
        self._begins = np.flatnonzero(is_first)
        self._group = np.cumsum(is_first) - 1  # of each row: its tier and window
        self._codes, self._windows, self._names = codes[self._begins], windows[self._begins], names

    def plain(self) -> PlainWindows | None:
        starts, columns = self._facts.windows.plain()
        firsts, counts = columns["first"].astype(np.int64), columns["count"].astype(np.int64)
        runs, unread = self._runs()
        found = self._are_runs(runs, starts, firsts, counts)
        is_plain = starts < _YEAR_10000_MS
        groups: dict[str, NDArray[np.int64]] = {}
        for name in self._tiers:
            if name not in self._names:
                return None
            theirs = np.flatnonzero((self._codes == self._names.index(name)) & found)
            at = np.searchsorted(self._windows[theirs], starts)
            at[at == len(theirs)] = 0
            there = len(theirs) > 0 and self._windows[theirs[at]] == starts
            is_plain &= there
            groups[name] = theirs[at] if len(theirs) else at
        ranges = joined_ranges(firsts[is_plain], counts[is_plain])
        if ranges is None or np.count_nonzero(is_plain) < FEW_WINDOWS:
            return None
        numbers = from_ranges(tuple((first, last) for first, last in ranges.tolist()))
        is_rest = ~np.isin(self._windows, starts[is_plain])[self._group]
        if not self._stands_apart(numbers, ranges, starts[is_plain], is_rest, runs, unread):
            return None
        first_ms = earliest(self._rows["first_append_ms"], self._begins)
        last_ms = latest(self._rows["last_append_ms"], self._begins)
        chosen = {name: each[is_plain] for name, each in groups.items()}
        append_ms = {name: (first_ms[each], last_ms[each]) for name, each in chosen.items()}
        rest = StreamCells(self._cells.take(pa.array(self._order[is_rest])))
        return PlainWindows(starts[is_plain], counts[is_plain], append_ms, numbers, rest)

    def _runs(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(rows (row, first, last) of what the cells hold, whether a row is left to the library)."""
        sets, bases = Bitmaps.of_column(self._cells["bitmap"]), numbers_of(self._rows["base"])
        sizes = sets.sizes[self._order]
        unread = sizes > SMALL_SET_BYTES
        chosen = np.flatnonzero((sizes > 0) & ~unread)
        runs, doubted = runs_of(sets, self._order[chosen], chosen)
        unread[chosen[doubted]] = True
        runs[:, FIRST] += bases[runs[:, SET]]
        runs[:, LAST] += bases[runs[:, SET]]
        return runs, unread

    def _are_runs(
        self,
        runs: NDArray[np.int64],
        starts: NDArray[np.int64],
        firsts: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Of each tier's windows, whether they hold the very numbers of a plain report, each once: their runs
        go from its first to its last without a hole, and there are as many records."""
        rows, count = self._rows, len(self._begins)
        if not len(starts) or not len(runs):
            return np.zeros(count, np.bool_)
        report = np.minimum(np.searchsorted(starts, self._windows), len(starts) - 1)
        found = starts[report] == self._windows
        found &= np.add.reduceat(numbers_of(rows["count"]), self._begins) == counts[report]
        found &= np.add.reduceat(numbers_of(rows["unsequenced_count"]), self._begins) == 0
        found &= np.add.reduceat(numbers_of(pc.list_value_length(rows["again"])), self._begins) == 0
        groups = self._group[runs[:, SET]]
        order = np.lexsort((runs[:, FIRST], groups))
        groups, low, high = groups[order], runs[order, FIRST], runs[order, LAST]
        begins = np.flatnonzero(np.diff(groups, prepend=-1))
        ends = np.append(begins[1:], len(groups)) - 1
        has_runs = groups[begins]
        report = report[has_runs]
        goes_on = np.ones(len(groups), np.bool_)
        goes_on[1:] = low[1:] == high[:-1] + 1
        goes_on[begins] = True
        whole = np.logical_and.reduceat(goes_on, begins)
        whole &= (low[begins] == firsts[report]) & (high[ends] == firsts[report] + counts[report] - 1)
        is_whole = np.zeros(count, np.bool_)
        is_whole[has_runs] = whole
        return found & is_whole

    def _stands_apart(
        self,
        numbers: BitMap64,
        ranges: NDArray[np.int64],
        starts: NDArray[np.int64],
        is_rest: NDArray[np.bool_],
        runs: NDArray[np.int64],
        unread: NDArray[np.bool_],
    ) -> bool:
        """Whether the numbers are nowhere else, and no two of the other reports tell of one."""
        if not numbers.isdisjoint(self._facts.accounted):
            return False
        acknowledged = BitMap64()
        for report in self._facts.windows.but_plain(starts):
            if not acknowledged.isdisjoint(report.acknowledged):
                return False  # a conflict, which is the whole stream's
            acknowledged |= report.acknowledged
            if not numbers.isdisjoint(report.acknowledged):
                return False
        others = runs[is_rest[runs[:, SET]]]
        at = np.searchsorted(ranges[:, 1], others[:, FIRST])  # the first range that ends behind it
        inside = at < len(ranges)
        if (ranges[np.minimum(at, len(ranges) - 1), 0] <= others[:, LAST])[inside].any():
            return False
        return all(numbers.isdisjoint(each) for each in self._sets(np.flatnonzero(is_rest & unread)))

    def _sets(self, rows: NDArray[np.int64]) -> Iterator[BitMap64]:
        for base, bitmap in zip(
            *(self._cells[name].take(pa.array(self._order[rows])).to_pylist() for name in ("base", "bitmap")),
            strict=True,
        ):
            yield decode_bitmap(base, bitmap)


def plain_columns(
    plain: PlainWindows, facts: StreamFacts, window_ms: int, grace_ms: int, now_ms: int
) -> dict[str, pa.Array]:
    """The rows of these windows, in the columns of `verdict_rows.ROW_SCHEMA`."""
    count, tiers = len(plain.starts), list(plain.append_ms)
    starts = pa.array(plain.starts)
    until_ms = settled_until_ms(facts, grace_ms, now_ms)
    settled = np.full(count, False) if until_ms is None else plain.starts + window_ms <= until_ms
    is_settled = pa.array(settled)
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * len(tiers))
    by_tier = pa.MapArray.from_arrays(
        offsets, pa.array(tiers * count, pa.string()), pa.array(np.repeat(plain.counts, len(tiers)))
    )
    nothing = pa.repeat(pa.scalar(0, pa.int64()), count)
    texts = {name: pa.repeat(getattr(facts, name), count) for name in ("topic", "producer", "stream")}
    return {
        **texts,
        "window_start": _calendar(starts),
        "window_start_ms": starts,
        "window_ms": pa.repeat(pa.scalar(window_ms, pa.int64()), count),
        "state": pc.if_else(is_settled, str(WindowState.SETTLED), str(WindowState.OPEN)),
        "verdict": pa.repeat(str(Verdict.PROVEN), count),
        "published": pa.array(plain.counts),
        "consumed": by_tier,
        "seen": by_tier,
        **dict.fromkeys(
            ("ambiguous", "missing", "duplicates", "in_flight", "unreported", "unknown", "explained"), nothing
        ),
        "content": pa.repeat("", count),
        "revision": pa.repeat(pa.scalar(0, pa.int32()), count),
        "detail": _details(plain, settled),
        "said": pc.if_else(is_settled, _said(plain, tiers), pa.scalar(None, pa.string())),
    }


def _calendar(starts: pa.Array) -> pa.Array:
    """As `verdict_rows.iso_time`."""
    at = starts.cast(pa.timestamp("ms", "UTC"))
    whole = pc.strftime(at.cast(pa.timestamp("s", "UTC"), safe=False), format="%Y-%m-%dT%H:%M:%SZ")
    is_whole = pc.equal(pc.subtract(starts, pc.multiply(pc.divide(starts, 1000), 1000)), 0)
    if pc.all(is_whole).as_py():
        return whole
    return pc.if_else(is_whole, whole, pc.strftime(at, format="%Y-%m-%dT%H:%M:%SZ"))


def _details(plain: PlainWindows, settled: NDArray[np.bool_]) -> pa.Array:
    """As `verdict_rows` tells them: append times by tier, and that more is to come."""
    if not any((last > NO_TIME).any() for _, last in plain.append_ms.values()):
        return pc.if_else(pa.array(settled), "{}", '{"unpromised":true}')
    times = [
        [f"{json.dumps(tier)}:[{pair[0]},{pair[1]}]" if pair[1] > NO_TIME else "" for pair in pairs]
        for tier, pairs in ((tier, np.stack(each, axis=1).tolist()) for tier, each in plain.append_ms.items())
    ]
    details = []
    for is_settled, *of_tiers in zip(settled.tolist(), *times, strict=True):
        told = ",".join(filter(None, of_tiers))
        members = [f'"append_ms":{{{told}}}'] if told else []
        if not is_settled:
            members.append('"unpromised":true')
        details.append(f"{{{','.join(members)}}}")
    return pa.array(details, pa.string())


def _said(plain: PlainWindows, tiers: Sequence[str]) -> pa.Array:
    """The rows' digests: one for each number of records that there is."""
    counts, which = np.unique(plain.counts, return_inverse=True)
    said = [
        said_of(
            WindowVerdict(
                "", "", "", 0, 1, WindowState.SETTLED, Verdict.PROVEN,
                published=count, consumed=dict.fromkeys(tiers, count),
            ),
            {},
        )
        for count in counts.tolist()
    ]  # fmt: skip
    return pa.array(said, pa.string()).take(pa.array(which))
