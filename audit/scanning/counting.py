"""From runs to cells: the state that the counting kernel fills, and its roaring bitmaps.

Called by `spark_source` (one `CellCounter` per range of a partition), tests and benchmarks; no I/O. The
kernel's rules are told in `scan`.

Invariants:
- a record is counted once: in a cell, as unaudited (no `_mr`), or as untrusted (a header that cannot be
  read); the rest of a malformed batch is not counted, the batch is;
- a cell may come in several fragments, so that memory stays flat; fragments merge by union, repeats add up,
  and a sequence in two fragments is one more repeat.
"""

from __future__ import annotations

import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from millrace.audit.contract.content_digest import DIGEST_MASK
from millrace.audit.contract.producer_names import disagreement, is_shown, join_names, kept_name
from millrace.audit.scanning.scan import (
    COUNT_ONLY,
    G_BYTES,
    G_CHUNK,
    G_COUNT,
    G_DIGEST,
    G_FIRST_APPEND,
    G_FIRST_OFFSET,
    G_HIGH,
    G_LAST_APPEND,
    G_LAST_OFFSET,
    G_LAST_RUN,
    G_NAME_POSITION,
    G_NAME_SIZE,
    G_NO_DIGEST,
    G_OTHER_POSITION,
    G_OTHER_SIZE,
    G_OTHERS,
    G_STREAM,
    G_WINDOW,
    GROUP_COLUMNS,
    R_FIRST,
    R_GROUP,
    R_LAST,
    RUN_COLUMNS,
    S_BAD_HEADER,
    S_BAD_VERSION,
    S_GROUPS,
    S_MALFORMED,
    S_NAMES,
    S_RECORDS,
    S_RUNS,
    S_UNAUDITED,
    STATE_SIZE,
    count_records,
    expand_runs,
    rebuild_table,
)
from millrace.broker.protocol.batch_kernels import B_COUNT

# A fold sorts its runs once: a million keeps the arrays near 24 MB.
RUNS_PER_FOLD = 1 << 20
# Cells are handed over when this much is held, so that a worker's memory does not grow with the data.
GROUPS_PER_EMIT = 1 << 17
RECORDS_PER_EMIT = 1 << 25
UNSHOWN_NAME = "producer name that cannot be shown"
MOST_NAMES_KEPT = 1 << 16
MOST_PAIRS_NAMED = 20  # of producers that share a stream id; more are counted without their names
SHORT_GROUP_RUNS = 32  # below it, adding ranges one by one beats expanding them


@dataclass(slots=True)
class CellRow:
    """One fragment of a cell: what one partition's offset chunk holds of one stream and window.

    `sequences` are relative to `base` (a multiple of 2^32). `repeats` maps a relative sequence to how many
    times it was seen *beyond* the first. A count-only producer has `sequenced` False and no sequences.
    `byte_count` is the values' sizes, as the producer counts them. `digest` is the sum modulo 2^64 of the
    records' content digests (`content_digest`), None where they were not asked for or one could not be made.
    `producer` is the name in the headers, or the first two (`producer_names`); "" where they carry none.
    """

    stream: int
    window_start_ms: int
    chunk: int
    base: int
    sequenced: bool
    count: int
    byte_count: int
    first_offset: int
    last_offset: int
    first_append_ms: int
    last_append_ms: int
    producer: str
    sequences: BitMap
    repeats: dict[int, int]
    digest: int | None = None


@dataclass(slots=True)
class ScanTotals:
    """What was read, whether or not it could be filed. `reasons` counts by name what could not be trusted."""

    records: int = 0
    unaudited: int = 0
    untrusted: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Sequences:
    seen: BitMap = field(default_factory=BitMap)
    repeats: dict[int, int] = field(default_factory=dict)


class CellCounter:
    """Counts one topic-partition's batches into cells. Not thread-safe; one per range."""

    def __init__(self, window_ms: int, chunk_offsets: int, digest: bool = False) -> None:
        self._window_ms = window_ms
        self._chunk_offsets = chunk_offsets
        self._digest = digest
        self._groups = np.zeros((1024, GROUP_COLUMNS), np.int64)
        self._table = np.full(4096, -1, np.int32)
        self._runs = np.zeros((1 << 14, RUN_COLUMNS), np.int64)
        self._state = np.zeros(STATE_SIZE, np.int64)
        self._sequences: dict[int, _Sequences] = {}
        self._names: dict[bytes, str] = {}
        self._group_names: list[str] = []  # by number of the group: its first name
        self._other_names: dict[int, str] = {}  # and the first that differs
        self._pairs: set[str] = set()
        self._untrusted: dict[str, int] = {}

    def count(
        self, buffer: NDArray[np.uint8], index: NDArray[np.int64], from_offset: int, to_offset: int
    ) -> None:
        """Count the batches of `index` (rows of `batch_kernels`, uncompressed or decompressed ones)."""
        batch, last = 0, index.shape[0]
        while batch < last:
            done = count_records(
                buffer, index, batch, last, from_offset, to_offset, self._window_ms, self._chunk_offsets,
                self._digest, self._table, self._groups, self._runs, self._state,
            )  # fmt: skip
            self._capture_names(buffer)
            if done < last:
                self._make_room(int(index[done, B_COUNT]))
            batch = done

    def distrust(self, reason: str, count: int = 1) -> None:
        """Count something that could not be read at all (a corrupt batch, an unknown codec)."""
        self._untrusted[reason] = self._untrusted.get(reason, 0) + count

    def totals(self) -> ScanTotals:
        """What was read since the counter was made; untouched by `take`."""
        state = self._state
        untrusted = Counter(self._untrusted)
        untrusted.update(self._doubtful_names())
        for reason, slot in (
            ("header of an unknown version", S_BAD_VERSION),
            ("header cut short or impossible", S_BAD_HEADER),
            ("malformed batch", S_MALFORMED),
        ):
            if state[slot]:
                untrusted[reason] += int(state[slot])
        return ScanTotals(int(state[S_RECORDS]), int(state[S_UNAUDITED]), dict(untrusted))

    def is_full(self) -> bool:
        """Whether `take` should be called now to keep memory flat."""
        groups = self._groups[: self._state[S_GROUPS]]
        return len(groups) >= GROUPS_PER_EMIT or int(groups[:, G_COUNT].sum()) >= RECORDS_PER_EMIT

    def take(self) -> Iterator[CellRow]:
        """Yield every cell counted so far and forget them."""
        self._fold()
        count = int(self._state[S_GROUPS])
        groups = self._groups[:count].tolist()
        sequences, self._sequences = self._sequences, {}
        for reason, records in self._doubtful_names().items():
            self.distrust(reason, records)
        names, self._group_names = self._group_names, []
        others, self._other_names = self._other_names, {}
        self._state[S_GROUPS] = 0
        self._table.fill(-1)
        nothing = _Sequences()
        for number, group in enumerate(groups):
            held = sequences.get(number, nothing)
            held.seen.run_optimize()
            stream = group[G_STREAM] & 0xFFFFFFFFFFFFFFFF
            sequenced = group[G_HIGH] != COUNT_ONLY
            yield CellRow(
                stream=stream,
                window_start_ms=group[G_WINDOW],
                chunk=group[G_CHUNK],
                base=group[G_HIGH] << 32 if sequenced else 0,
                sequenced=sequenced,
                count=group[G_COUNT],
                byte_count=group[G_BYTES],
                first_offset=group[G_FIRST_OFFSET],
                last_offset=group[G_LAST_OFFSET],
                first_append_ms=group[G_FIRST_APPEND],
                last_append_ms=group[G_LAST_APPEND],
                producer=join_names((names[number], others[number])) if number in others else names[number],
                sequences=held.seen,
                repeats=held.repeats,
                digest=group[G_DIGEST] & DIGEST_MASK if self._digest and not group[G_NO_DIGEST] else None,
            )

    def _capture_names(self, buffer: NDArray[np.uint8]) -> None:
        """Read the names that the last call met: their positions are only valid in its buffer."""
        made = int(self._state[S_GROUPS])
        if self._state[S_NAMES]:
            self._state[S_NAMES] = 0
            groups = self._groups[:made]
            self._group_names.extend("" for _ in range(made - len(self._group_names)))
            for column, size_column, names in (
                (G_NAME_POSITION, G_NAME_SIZE, self._group_names),
                (G_OTHER_POSITION, G_OTHER_SIZE, self._other_names),
            ):
                new = np.flatnonzero((groups[:, size_column] > 0) & (groups[:, column] >= 0))
                for number, position, size in zip(
                    new.tolist(),
                    groups[new, column].tolist(),
                    groups[new, size_column].tolist(),
                    strict=True,
                ):
                    names[number] = self._name(buffer[position : position + size].tobytes())
                groups[new, column] = -1
        elif made > len(self._group_names):
            self._group_names.extend("" for _ in range(made - len(self._group_names)))

    def _name(self, name: bytes) -> str:
        known = self._names.get(name)
        if known is None:
            if len(self._names) >= MOST_NAMES_KEPT:
                self._names.clear()
            known = self._names[name] = kept_name(name)
        return known

    def _doubtful_names(self) -> dict[str, int]:
        """{reason: records} of the groups that `take` has not handed over: names that cannot be shown, and
        second names under one stream id."""
        found: Counter[str] = Counter()
        for number, name in enumerate(self._group_names):
            if not is_shown(name):  # the stream's id can be read, its records count
                group = self._groups[number]
                found[UNSHOWN_NAME] += int(group[G_COUNT] - group[G_OTHERS])
        for number, other in self._other_names.items():
            first, records = self._group_names[number], int(self._groups[number, G_OTHERS])
            if not is_shown(other):
                found[UNSHOWN_NAME] += records
            elif is_shown(first):
                pair = disagreement(*sorted((first, other)))
                if pair not in self._pairs and len(self._pairs) >= MOST_PAIRS_NAMED:
                    pair = "two producers use one stream id, and more such pairs"
                else:
                    self._pairs.add(pair)
                found[pair] += records
        return dict(found)

    def _make_room(self, record_count: int) -> None:
        """Grow the groups, fold the runs, or both, so that a batch of `record_count` records fits."""
        made = int(self._state[S_GROUPS])
        if made + record_count > len(self._groups):
            grown = np.zeros((max(2 * len(self._groups), made + record_count), GROUP_COLUMNS), np.int64)
            grown[:made] = self._groups[:made]
            self._groups = grown
            self._rehash(1 << (4 * len(grown) - 1).bit_length())
        if int(self._state[S_RUNS]) + record_count > len(self._runs):
            if len(self._runs) < RUNS_PER_FOLD or record_count > len(self._runs):
                grown = np.zeros((max(2 * len(self._runs), 2 * record_count), RUN_COLUMNS), np.int64)
                used = int(self._state[S_RUNS])
                grown[:used] = self._runs[:used]
                self._runs = grown
            else:
                self._fold()

    def _rehash(self, slots: int) -> None:
        groups, made = self._groups, int(self._state[S_GROUPS])
        self._table = np.full(slots, -1, np.int32)
        rebuild_table(groups, made, self._table)

    def _fold(self) -> None:
        """Turn the runs collected so far into bitmaps, finding sequences seen more than once."""
        used = int(self._state[S_RUNS])
        if not used:
            return
        runs = self._runs[:used]
        runs = np.ascontiguousarray(runs[np.argsort(runs[:, R_GROUP].astype(np.int32), kind="stable")])
        starts = np.flatnonzero(np.diff(runs[:, R_GROUP], prepend=-1))
        ends = np.append(starts[1:], used)
        sizes = np.add.reduceat(runs[:, R_LAST] - runs[:, R_FIRST] + 1, starts)
        for group, first, last, size in zip(
            runs[starts, R_GROUP].tolist(), starts.tolist(), ends.tolist(), sizes.tolist(), strict=True
        ):
            held = self._sequences.get(group)
            if held is None:
                held = self._sequences[group] = _Sequences()
            _add_runs(held, runs, first, last, size)
        self._state[S_RUNS] = 0
        self._groups[: self._state[S_GROUPS], G_LAST_RUN] = -1


def _add_runs(held: _Sequences, runs: NDArray[np.int64], first: int, last: int, size: int) -> None:
    """Add runs [first, last) of one group, `size` sequences in all, noting those seen before."""
    expanded: NDArray[np.uint32] | None = None
    if last - first <= SHORT_GROUP_RUNS:
        added = BitMap()
        for _, low, high in runs[first:last].tolist():
            added.add_range(low, high + 1)
    else:
        expanded = np.empty(size, np.uint32)
        expand_runs(runs, first, last, expanded)
        added = BitMap(array.array("I", expanded.tobytes()))
    if len(added) != size:
        if expanded is None:
            expanded = np.empty(size, np.uint32)
            expand_runs(runs, first, last, expanded)
        values, counts = np.unique(expanded, return_counts=True)
        for value, extra in zip(values[counts > 1].tolist(), (counts[counts > 1] - 1).tolist(), strict=True):
            held.repeats[value] = held.repeats.get(value, 0) + extra
    if held.seen:
        for value in held.seen & added:
            held.repeats[value] = held.repeats.get(value, 0) + 1
        held.seen |= added
    else:
        held.seen = added
