"""A run's verdicts as files of the state: written by Spark's executors, read part by part.

    verdicts/<run>/day=2013-01-02/…parquet   rows of streams (`settled.NUMBERED_SCHEMA`) by the day that their
                                             stretch of time begins on (`row_layout`); `day=none` for those
                                             without a window, `day=all` for all of them where they are few
    verdicts/<run>/lines.parquet             lines that no stream has (`settled.SETTLED_SCHEMA`): what the
                                             roster owes, and windows that earlier runs pruned
    verdicts/<run>/pruned.parquet            lines of windows that this run pruned; their rows are still in
                                             the files of their days, and count no more
    verdicts/<run>/spans.parquet             what is left of the lines of days that are long over
                                             (`spans.SPAN_SCHEMA`)
    verdicts/<run>/resting-….parquet         windows that came to rest with that run (`state.Resting`)

Up to version 5 of the state `verdicts/<run>.parquet` had all lines, those of streams too, and no rows: it is
read as a file of lines. Within a file rows are in the order of their windows, so that a stretch of time is
read without the rest. Whoever reads holds one part: some `PART_ROWS` rows, or one window.

Called by `job`, `next_commit`, `spark_cells`, `status`, `explain` and `waivers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millrace.audit.keeping.state import Resting, StateDamaged, StateFolder
from millrace.audit.reconciliation.row_keys import WINDOW
from millrace.audit.reconciliation.row_parts import in_order
from millrace.audit.reconciliation.settled import (
    KEPT,
    LINE_COLUMNS,
    NUMBERED_SCHEMA,
    SETTLED_SCHEMA,
    but,
    earlier_lines,
    lines_but,
    settled_now,
)
from millrace.audit.reconciliation.spans import SPAN_SCHEMA, outside
from millrace.audit.reconciliation.verdicts import WindowState
from millrace.broker.errors import MillraceError

PART_ROWS = 1 << 17
"""some 300 bytes each, of which whoever walks them holds up to four copies at a time"""
LINES, PRUNED, SPANS = "lines.parquet", "pruned.parquet", "spans.parquet"
_DAY = "/day="
_START = "window_start_ms"


def row_files(names: Sequence[str]) -> list[str]:
    """Those of a commit's `verdicts` that have rows of streams."""
    return [name for name in names if _DAY in name]


def line_files(names: Sequence[str]) -> list[str]:
    """Those that have lines."""
    return [name for name in names if _DAY not in name and name not in span_files(names)]


def span_files(names: Sequence[str]) -> list[str]:
    """Those that have spans; one, or none."""
    return [name for name in names if name.endswith(f"/{SPANS}")]


def pruned_files(names: Sequence[str]) -> list[str]:
    """Those of the lines of windows whose rows count no more."""
    return [name for name in names if name.endswith(f"/{PRUNED}")]


def read_lines(state: StateFolder, names: Sequence[str], wanted: pc.Expression | None = None) -> pa.Table:
    """What these files of lines have. Raises StateDamaged."""
    tables = [state.read_table(name, wanted) for name in names]
    return pa.concat_tables([SETTLED_SCHEMA.empty_table(), *(_whole(each) for each in tables)])


def read_spans(state: StateFolder, names: Sequence[str], topics: Sequence[str] | None = None) -> pa.Table:
    """The spans (SPAN_SCHEMA) that these files have, of these topics or of all. Raises StateDamaged."""
    wanted = None if topics is None else pc.field("topic").isin(pa.array(list(topics), pa.string()))
    tables = [state.read_table(name, wanted).cast(SPAN_SCHEMA) for name in span_files(names)]
    return pa.concat_tables([SPAN_SCHEMA.empty_table(), *tables])


def resting_spans(state: Tables, resting: Iterable[Resting], topics: Sequence[str] | None = None) -> pa.Table:
    """The windows at rest (SPAN_SCHEMA), of these topics or of all. Raises StateDamaged."""
    wanted = None if topics is None else pc.field("topic").isin(pa.array(list(topics), pa.string()))
    tables = [state.read_table(each.spans, wanted).cast(SPAN_SCHEMA) for each in resting]
    return pa.concat_tables([SPAN_SCHEMA.empty_table(), *tables])


def _whole(lines: pa.Table) -> pa.Table:
    """An older program's lines do not tell what is open: nothing was open again."""
    if "open" not in lines.column_names:
        lines = lines.append_column("open", pa.repeat(False, lines.num_rows))
    for name in ("folded", "open"):
        told = pc.fill_null(lines[name], False)
        lines = lines.set_column(lines.schema.get_field_index(name), name, told)
    return lines.select(SETTLED_SCHEMA.names).cast(SETTLED_SCHEMA)


class Tables(Protocol):
    """Where tables are read (`StateFolder`)."""

    def read_table(self, name: str, wanted: pc.Expression | None = None) -> pa.Table: ...


@dataclass(frozen=True, slots=True)
class _Group:
    """A stretch of one file: the first and last window in it, None where it has none, and whether it has rows
    without a window."""

    file: str
    number: int
    bounds: tuple[int, int] | None
    nulls: bool


@dataclass(slots=True)
class RowFiles:
    """The rows of a run's files, as `row_parts.Parted`. Few enough are read once and held.

    A run asks its rows some fifteen times, each time for other columns. `copies` is a folder of this machine
    for that: files that lie elsewhere are brought there once, whole, since the report has nearly all of them.
    Without it the columns asked for are read where they are.
    """

    state: StateFolder
    files: Sequence[str]
    copies: Path | None = None
    _held: pa.Table | None = field(default=None, init=False)
    _groups: list[_Group] = field(default_factory=list, init=False)
    _cuts: list[tuple[int, int]] | None = field(default=None, init=False)
    _at_hand: dict[str, Path] = field(default_factory=dict, init=False)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        if self._cuts is None:
            self._look()
        if self._held is not None:
            yield self._held if columns is None else self._held.select(list(columns))
            return
        for first, last in self._cuts or ():
            wanted = [each for each in self._groups if each.bounds and _meet(each.bounds, first, last)]
            inside = (pc.field(_START) >= first) & (pc.field(_START) <= last)
            yield self._read(wanted, inside, columns)
        yield self._read([each for each in self._groups if each.nulls], pc.field(_START).is_null(), columns)

    def _look(self) -> None:
        """Learn where which windows are, and cut them into parts."""
        counts: Counter[int | None] = Counter()
        if self.copies is not None:
            for number, name in enumerate(self.files):
                copy = self.copies / f"rows-{number}.parquet"
                self._at_hand[name] = self.state.files.at_hand(name, copy)
        for name in self.files:
            with self._reading(name) as file:
                for number in range(file.num_row_groups):
                    starts = file.read_row_group(number, columns=[_START])[_START]
                    counts.update(_counted(starts))
                    bounds = pc.min_max(starts).as_py()
                    there = None if bounds["min"] is None else (bounds["min"], bounds["max"])
                    self._groups.append(_Group(name, number, there, starts.null_count > 0))
        self._cuts = list(cuts_of(counts, PART_ROWS))
        if sum(counts.values()) <= PART_ROWS:
            self._held = self._read(self._groups, None, None)

    def _read(
        self, groups: Sequence[_Group], wanted: pc.Expression | None, columns: Sequence[str] | None
    ) -> pa.Table:
        names = list(NUMBERED_SCHEMA.names if columns is None else columns)
        read = list(dict.fromkeys([*names, _START]))
        schema = pa.schema([NUMBERED_SCHEMA.field(name) for name in read])
        found = [schema.empty_table()]
        by_file: dict[str, list[int]] = {}
        for each in groups:
            by_file.setdefault(each.file, []).append(each.number)
        for name, numbers in by_file.items():
            with self._reading(name) as file:
                rows = file.read_row_groups(numbers, columns=read).select(read).cast(schema)
            found.append(rows if wanted is None else rows.filter(wanted))
            del rows  # or the next file's would come beside it
        whole = pa.concat_tables(found)
        del found
        return in_order(whole).select(names)

    def _reading(self, name: str) -> _reading:
        return _reading(self.state, name, self._at_hand.get(name))


def _counted(starts: pa.ChunkedArray) -> dict[int | None, int]:
    return {row["values"]: row["counts"] for row in starts.value_counts().to_pylist()}


def _meet(bounds: tuple[int, int], first: int, last: int) -> bool:
    return bounds[0] <= last and first <= bounds[1]


def cuts_of(counts: Mapping[int | None, int], most: int) -> Iterator[tuple[int, int]]:
    """The first and last window of each part, of {window start: rows}. Pure."""
    starts = sorted(start for start in counts if start is not None)
    first = held = 0
    for number, start in enumerate(starts):
        if held and held + counts[start] > most:
            yield starts[first], starts[number - 1]
            first, held = number, 0
        held += counts[start]
    if starts:
        yield starts[first], starts[-1]


class _reading:
    """A Parquet file of the state, closed behind who reads it. Raises StateDamaged."""

    def __init__(self, state: StateFolder, name: str, copy: Path | None = None) -> None:
        self._where = f"{state.where}/{name}"
        self._state, self._name, self._copy = state, name, copy

    def __enter__(self) -> pq.ParquetFile:
        try:
            source = self._copy or self._state.files.source(self._name)
            self._file = pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)
        except MillraceError:
            raise
        except (OSError, pa.ArrowException) as problem:
            raise self._damaged(problem) from problem
        return self._file

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        self._file.close(force=True)
        if isinstance(problem, OSError | pa.ArrowException) and not isinstance(problem, MillraceError):
            raise self._damaged(problem) from problem

    def _damaged(self, problem: BaseException) -> StateDamaged:
        return StateDamaged(
            f"{self._where} cannot be read ({' '.join(str(problem).split())[:200]}); "
            f"{self._state.way_back(self._name)}"
        )


@dataclass(frozen=True, slots=True)
class SettledLines:
    """The settled lines of a commit's `verdicts` (SETTLED_SCHEMA), as `row_parts.Parted`; they have no
    `state`, for all are settled. A pruned window's line is not in the part of what came for it since. None is
    of a window that is `resting` (SPAN_SCHEMA)."""

    state: StateFolder
    names: Sequence[str]
    resting: pa.Table = field(default_factory=SPAN_SCHEMA.empty_table)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        names = SETTLED_SCHEMA.names
        names = names if columns is None else [name for name in columns if name in names]
        pruned = read_lines(self.state, pruned_files(self.names))
        yield settled_now(read_lines(self.state, line_files(self.names))).select(names)
        for part in RowFiles(self.state, row_files(self.names)).parts(LINE_COLUMNS):
            yield outside(settled_now(lines_but(part, pruned)), self.resting).select(names)

    def rows(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows that these lines are of, for what no line tells of them (`content`, `detail`); where there
        is a line and no row, it has neither."""
        pruned = read_lines(self.state, pruned_files(self.names))
        lines = settled_now(read_lines(self.state, line_files(self.names)))
        nothing = {"content": pa.repeat("", lines.num_rows), "detail": pa.nulls(lines.num_rows, pa.string())}
        yield pa.table({name: nothing[name] if name in nothing else lines[name] for name in columns})
        read = list(dict.fromkeys([*columns, *WINDOW, "state"]))
        for part in RowFiles(self.state, row_files(self.names)).parts(read):
            standing = part.filter(pc.is_in(part["state"], pa.array([str(WindowState.SETTLED), KEPT])))
            yield outside(but(standing, pruned), self.resting).select(list(columns))


def own_lines(
    state: StateFolder, names: Sequence[str], topics: Sequence[str] | None = None
) -> tuple[pa.Table, pa.Table]:
    """(LINE_SCHEMA of what the roster owed, SETTLED_SCHEMA of what was pruned) by these files, of these
    topics or of all."""
    lines, spans = (
        read_lines(state, line_files(names), pc.field("stream") == ""),
        read_spans(state, names, topics),
    )
    topics = lines["topic"].unique().to_pylist() if topics is None else topics
    return earlier_lines(lines, topics, spans)
