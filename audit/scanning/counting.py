"""From runs to cells: the state that the counting kernel fills, and its roaring bitmaps.

Called by `task_reader` and `connector_reader` (one `CellCounter` per range of a partition), tests and
benchmarks; no I/O. The kernel's rules are told in `scan`. Cells are handed over in columns: keys that are
hashed over partitions make cells of one record, and a Python step for each would cost a hundred times what
counting the record did.

Invariants:
- a record is counted once: in a cell, as unaudited (no `_mr`), or as untrusted (a header that cannot be
  read); the rest of a malformed batch is not counted, the batch is;
- a cell may come in several fragments, so that memory stays flat; fragments merge by union, repeats add up,
  and a sequence in two fragments is one more repeat;
- what came again is held as ranges, never as one row a record: a stream may be carried twice as a whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millrace.audit.contract.producer_names import (
    MORE_PAIRS,
    MOST_PAIRS_NAMED,
    disagreement,
    is_shown,
    join_names,
    kept_name,
)
from millrace.audit.scanning.copy_ranges import COPY_COLUMNS, copies_of, encode_copies, summed
from millrace.audit.scanning.scan import (
    G_COUNT,
    G_LAST_RUN,
    G_NAME_FIRST,
    G_NAME_LAST,
    G_NAME_MIDDLE,
    G_NAME_POSITION,
    G_NAME_SIZE,
    G_NO_DIGEST,
    G_OTHER_POSITION,
    G_OTHER_SIZE,
    G_OTHERS,
    GROUP_COLUMNS,
    S_BAD_HEADER,
    S_BAD_VERSION,
    S_GROUPS,
    S_MALFORMED,
    S_NAMES,
    S_RECORDS,
    S_RUNS,
    S_UNAUDITED,
    SMALLEST_RECORD,
    STATE_SIZE,
    count_records,
    rebuild_table,
)
from millrace.audit.scanning.set_kernels import RUN_COLUMNS, merge_runs
from millrace.audit.scanning.united_sets import Bitmaps, encode_sets, in_order
from millrace.broker.protocol.batch_kernels import B_COUNT, B_END, B_RECORDS

# A fold sorts its runs once: a million keeps the arrays near 24 MB.
RUNS_PER_FOLD = 1 << 20
# Cells are handed over when this much is held, so that a worker's memory does not grow with the data.
GROUPS_PER_EMIT = 1 << 17
RECORDS_PER_EMIT = 1 << 25
UNSHOWN_NAME = "producer name that cannot be shown"
MOST_NAMES_KEPT = 1 << 16
_NAME_WORDS = (G_NAME_SIZE, G_NAME_LAST, G_NAME_FIRST, G_NAME_MIDDLE)


def most_records(batch: NDArray[np.int64]) -> int:
    """How many the batch can have: its header may claim any number. The kernel goes by the same bound."""
    return min(int(batch[B_COUNT]), int(batch[B_END] - batch[B_RECORDS]) // SMALLEST_RECORD + 1)


@dataclass(frozen=True, slots=True)
class CountedCells:
    """Fragments of cells, in columns: what one partition's offset chunks hold of streams and windows.

    `groups` are rows of `scan`'s groups. Each one's sequences, below the upper half in G_HIGH, are those of
    `bitmaps`, which are empty for a producer that only counts. What came more than once of row i are the
    bitmaps of `again` from `again_bounds[i]` to `again_bounds[i + 1]` (`copy_ranges.encode_copies`).
    `producers[producer_numbers[i]]` is the name in the headers, or the first two (`producer_names`); "" where
    they carry none. `digests` are the sums modulo 2^64 of the records' content digests (`content_digest`),
    `digested` where there is one.
    """

    groups: NDArray[np.int64]
    bitmaps: Bitmaps
    again: Bitmaps
    again_bounds: NDArray[np.int64]
    producers: list[str]
    producer_numbers: NDArray[np.int64]
    digested: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.groups)


@dataclass(slots=True)
class ScanTotals:
    """What was read, whether or not it could be filed. `reasons` counts by name what could not be trusted."""

    records: int = 0
    unaudited: int = 0
    untrusted: dict[str, int] = field(default_factory=dict)


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
        self._repeats = np.zeros((0, COPY_COLUMNS), np.int64)
        self._merged_count = 0  # runs that the last fold left
        self._taken_at = 0  # records read by then
        self._names = [""]
        self._are_shown = [True]
        self._numbers: dict[bytes, int] = {}  # of names, by their words
        self._group_names = np.zeros(1024, np.int64)  # by number of the group: the number of its first name
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
                self._make_room(most_records(index[done]))
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
        groups, runs, records = (int(self._state[each]) for each in (S_GROUPS, S_RUNS, S_RECORDS))
        if groups >= GROUPS_PER_EMIT or records - self._taken_at >= RECORDS_PER_EMIT:
            return True
        if runs >= RUNS_PER_FOLD:
            self._fold()
        return max(self._merged_count, len(self._repeats)) > RUNS_PER_FOLD // 2

    def take(self) -> CountedCells:
        """Hand over every cell counted so far and forget them."""
        self._fold()
        made = int(self._state[S_GROUPS])
        groups = self._groups[:made].copy()
        again, again_bounds = encode_copies(self._repeats, made)
        for reason, records in self._doubtful_names().items():
            self.distrust(reason, records)
        names, numbers = self._names, self._group_names[:made].copy()
        if self._other_names:
            names = list(names)
            for number, other in self._other_names.items():
                names.append(join_names((names[numbers[number]], other)))
                numbers[number] = len(names) - 1
        counted = CountedCells(
            groups=groups,
            bitmaps=encode_sets(self._runs[: self._state[S_RUNS]], made),
            again=again,
            again_bounds=again_bounds,
            producers=names,
            producer_numbers=numbers,
            digested=(groups[:, G_NO_DIGEST] == 0) & self._digest,
        )
        self._forget()
        return counted

    def _forget(self) -> None:
        self._state[S_GROUPS] = self._state[S_RUNS] = 0
        self._table.fill(-1)
        self._repeats = self._repeats[:0]
        self._merged_count = 0
        self._taken_at = int(self._state[S_RECORDS])
        self._group_names.fill(0)
        self._other_names = {}
        if len(self._names) > MOST_NAMES_KEPT:
            self._names, self._are_shown, self._numbers = [""], [True], {}

    def _capture_names(self, buffer: NDArray[np.uint8]) -> None:
        """Read the names that the last call met: their positions are only valid in its buffer."""
        if not self._state[S_NAMES]:
            return
        self._state[S_NAMES] = 0
        groups = self._groups[: self._state[S_GROUPS]]
        new = np.flatnonzero((groups[:, G_NAME_SIZE] > 0) & (groups[:, G_NAME_POSITION] >= 0))
        if len(new):
            self._group_names[new] = self._numbers_of(groups[new], buffer)
            groups[new, G_NAME_POSITION] = -1
        others = np.flatnonzero((groups[:, G_OTHER_SIZE] > 0) & (groups[:, G_OTHER_POSITION] >= 0))
        for number, position, size in zip(
            others.tolist(),
            groups[others, G_OTHER_POSITION].tolist(),
            groups[others, G_OTHER_SIZE].tolist(),
            strict=True,
        ):
            self._other_names[number] = kept_name(buffer[position : position + size].tobytes())
        groups[others, G_OTHER_POSITION] = -1

    def _numbers_of(self, groups: NDArray[np.int64], buffer: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The numbers of the groups' first names: a text is made once for each name, told by its words."""
        words = np.ascontiguousarray(groups[:, _NAME_WORDS])
        size, _, first, middle = range(len(_NAME_WORDS))
        words[words[:, size] < 8, first] = 0  # of a short name the kernel fills no more
        words[words[:, size] <= 16, middle] = 0
        keys = words.view(np.dtype((np.void, words.itemsize * len(_NAME_WORDS)))).ravel()
        _, firsts, which = np.unique(keys, return_index=True, return_inverse=True)
        numbers = np.empty(len(firsts), np.int64)
        for each, row in enumerate(firsts.tolist()):
            key = keys[row].tobytes()
            known = self._numbers.get(key)
            if known is None:
                position, size = int(groups[row, G_NAME_POSITION]), int(groups[row, G_NAME_SIZE])
                known = self._numbers[key] = len(self._names)
                self._names.append(kept_name(buffer[position : position + size].tobytes()))
                self._are_shown.append(is_shown(self._names[-1]))
            numbers[each] = known
        return numbers[which]

    def _doubtful_names(self) -> dict[str, int]:
        """{reason: records} of the groups that `take` has not handed over: names that cannot be shown, and
        second names under one stream id."""
        found: Counter[str] = Counter()
        made = int(self._state[S_GROUPS])
        are_shown = np.array(self._are_shown)[self._group_names[:made]]
        if not are_shown.all():  # the stream's id can be read, its records count
            groups = self._groups[:made][~are_shown]
            found[UNSHOWN_NAME] += int((groups[:, G_COUNT] - groups[:, G_OTHERS]).sum())
        for number, other in self._other_names.items():
            first = self._names[self._group_names[number]]
            records = int(self._groups[number, G_OTHERS])
            if not is_shown(other):
                found[UNSHOWN_NAME] += records
            elif is_shown(first):
                pair = disagreement(*sorted((first, other)))
                if pair not in self._pairs and len(self._pairs) >= MOST_PAIRS_NAMED:
                    pair = MORE_PAIRS
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
            names = np.zeros(len(grown), np.int64)
            names[:made] = self._group_names[:made]
            self._group_names = names
            self._rehash(1 << (4 * len(grown) - 1).bit_length())
        if int(self._state[S_RUNS]) + record_count <= len(self._runs):
            return
        size = min(2 * len(self._runs), RUNS_PER_FOLD)
        if len(self._runs) >= RUNS_PER_FOLD:
            self._fold()
            size = len(self._runs) + RUNS_PER_FOLD // 4  # or the next batch would have them sorted again
        used = int(self._state[S_RUNS])
        if used + record_count > len(self._runs):
            grown = np.zeros((max(size, used + record_count), RUN_COLUMNS), np.int64)
            grown[:used] = self._runs[:used]
            self._runs = grown

    def _rehash(self, slots: int) -> None:
        groups, made = self._groups, int(self._state[S_GROUPS])
        self._table = np.full(slots, -1, np.int32)
        rebuild_table(groups, made, self._table)

    def _fold(self) -> None:
        """Put the runs collected so far in order and make those that touch one, finding what came again."""
        used = int(self._state[S_RUNS])
        if not used:
            return
        runs = in_order(self._runs[:used])
        again = np.empty_like(runs)
        kept, found = merge_runs(runs, again)
        self._runs[:kept] = runs[:kept]
        self._state[S_RUNS] = self._merged_count = kept
        self._groups[: self._state[S_GROUPS], G_LAST_RUN] = -1
        if found:
            self._repeats = summed(np.concatenate((self._repeats, copies_of(again[:found]))))
