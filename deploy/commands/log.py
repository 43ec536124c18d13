"""`millrace log`: look into the files of a partition, and check them. Reads only; a broker may be running."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.broker.wording import count_of
from millrace.deploy.commands.group import command_group

app = command_group("Look into the files of a broker's logs, and check them.")

_SHOWN_FIELD_SIZE = 100
_PROGRESS_S = 1.0


@app.command("dump")
def dump(
    file: Annotated[
        Path,
        typer.Argument(help=".log, .index, .timeindex, .txnindex or .snapshot file, or a checkpoint."),
    ],
    records: Annotated[
        bool, typer.Option("--records", "-r", help="Show the records of each batch too (.log).")
    ] = False,
    offset: Annotated[int, typer.Option("--offset", "-f", min=0, help="Begin at this offset.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, for programs; nothing is shortened.")
    ] = False,
) -> int:
    """Show what is in a file, one line a batch or entry.

    Ends with status 1 where a batch has a wrong CRC, its records are shown and cannot be read, or the file
    is damaged.
    """
    from millrace.broker.storage import file_dump

    if not file.is_file():
        hint = "a folder; name a file in it" if file.is_dir() else "not there"
        raise typer.BadParameter(f"{file} is {hint}", param_hint="FILE")
    printer = _Printer(file_dump.kind_of(file), as_json, offset)
    rows = iter(file_dump.dump(file, records=records, from_offset=offset))
    while True:
        try:
            row = next(rows, None)
        except (ValueError, OSError) as error:
            printer.end(is_whole=False)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            print(f"millrace: {file}: {reason}", file=sys.stderr)
            return 1
        if row is None:
            break
        printer.print(row)  # what goes wrong here is not the file's
    printer.end()
    return 1 if printer.problem_count else 0


class _Printer:
    """Prints rows as they come: a log may be larger than memory."""

    def __init__(self, kind: str, as_json: bool, from_offset: int) -> None:
        self._kind = kind
        self._as_json = as_json
        self._from_offset = from_offset
        self._row_count = 0
        self._record_count = 0
        self._size = 0
        self._offsets: list[int] = []
        self.problem_count = 0

    def print(self, row: dict[str, Any]) -> None:
        if row.get("problem") or any("problem" in record for record in row.get("records", ())):
            self.problem_count += 1
        if self._as_json:
            print(json.dumps(row))
            return
        if self._kind == ".log":
            self._print_batch(row)
        else:
            if self._row_count == 0:
                print("  ".join(_title(name) for name in row).rstrip())
            print("  ".join(_cell(name, value) for name, value in row.items()).rstrip())
        self._row_count += 1

    def _print_batch(self, row: dict[str, Any]) -> None:
        if self._row_count == 0:
            print(_BATCH_LINE.format(*_BATCH_TITLES).rstrip())
        self._record_count += row["count"]
        self._size += row["size"]
        self._offsets = [*self._offsets[:1], row["base_offset"], row["last_offset"]]
        first, last = row["base_offset"], row["last_offset"]
        print(
            _BATCH_LINE.format(
                str(first) if first == last else f"{first}-{last}",
                row["count"],
                _time(row["max_timestamp"]),
                row["size"],
                row["position"],
                row["leader_epoch"],
                row["codec"],
                _producer(row),
                _remarks(row),
            ).rstrip()
        )
        for record in row.get("records", ()):
            print("    " + _record_text(record))

    def end(self, *, is_whole: bool = True) -> None:
        """The last line: how much there was. Of a file that was not read to its end, nothing is no answer."""
        if self._as_json:
            return
        if self._row_count == 0:
            if is_whole:
                print(f"nothing from offset {self._from_offset} on" if self._from_offset else "nothing in it")
        elif self._kind == ".log":
            state = f"{self.problem_count} with problems" if self.problem_count else "all CRCs right"
            print(
                f"{count_of(self._row_count, 'batch', 'batches')}, {count_of(self._record_count, 'record')}, "
                f"offsets {self._offsets[0]} to {self._offsets[-1]}, {self._size:,} bytes, {state}"
            )
        else:
            print(count_of(self._row_count, "entry", "entries"))


_BATCH_TITLES = (
    "OFFSETS",
    "RECORDS",
    "NEWEST (UTC)",
    "BYTES",
    "AT BYTE",
    "EPOCH",
    "CODEC",
    "PRODUCER",
    "REMARKS",
)
_BATCH_LINE = "{:<17}  {:>7}  {:<23}  {:>9}  {:>10}  {:>5}  {:<6}  {:<22}  {}"
_WIDTHS = {"timestamp": 23, "producer_id": 11, "topic": 32}


def _title(name: str) -> str:
    return name.replace("_", " ").upper().ljust(_WIDTHS.get(name, 17))


def _cell(name: str, value: Any) -> str:
    if name == "timestamp":
        text = _time(value)
    else:
        text = "-" if value is None else str(value)
    return text.ljust(_WIDTHS.get(name, 17))


def _time(timestamp_ms: int) -> str:
    if timestamp_ms < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (ValueError, OverflowError):
        return f"{timestamp_ms} ms"
    return moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{timestamp_ms % 1000:03d}"


def _producer(row: dict[str, Any]) -> str:
    if row["producer_id"] < 0:
        return "-"
    text = f"{row['producer_id']} e{row['producer_epoch']}"
    if row["base_sequence"] >= 0:
        text += f" s{row['base_sequence']}"
    return text


def _remarks(row: dict[str, Any]) -> str:
    remarks = []
    if row["problem"]:
        remarks.append(row["problem"].upper())
    if row["control"]:
        remarks.append(row["control"])
    elif row["transactional"]:
        remarks.append("in transaction")
    if row["count"] == 0 and not row["control"]:
        remarks.append("emptied by compaction")
    if row["delete_horizon"] is not None:
        remarks.append(f"tombstones go after {_time(row['delete_horizon'])}")
    if row["timestamp_type"] == "LogAppendTime":
        remarks.append("log append time")
    return ", ".join(remarks)


def _record_text(record: dict[str, Any]) -> str:
    if "problem" in record:
        return record["problem"]
    text = f"{record['offset']}  {_time(record['timestamp'])}  {_short(record['key'])} = "
    text += _short(record["value"])
    if record["headers"]:
        text += "  [" + ", ".join(f"{name}: {_short(value)}" for name, value in record["headers"]) + "]"
    return text


def _short(text: str | None) -> str:
    if text is None:
        return "null"
    return text if len(text) <= _SHOWN_FIELD_SIZE else f"{text[:_SHOWN_FIELD_SIZE]}… ({len(text)} characters)"


@app.command("verify")
def verify(
    folder: Annotated[Path, typer.Argument(help="A broker's data folder, or one partition's folder in it.")],
) -> int:
    """Read everything and check it: CRCs, records, offsets, indexes, transactions, checkpoints.

    Prints one line a problem and ends with status 1 if there is any. Nothing is changed or locked, and the
    broker may be running.
    """
    from millrace.broker.storage import log_check

    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is not a folder", param_hint="DIR")
    folder = folder.resolve()
    is_partition = log_check.is_partition(folder)
    directories = [folder] if is_partition else log_check.partitions_in(folder)
    if not directories:
        print(f"millrace: {folder} holds no partition: name a data folder or a partition", file=sys.stderr)
        return 1
    totals = log_check.Totals()
    progress = _Progress(totals, len(directories))
    problem_count = 0
    for problem in _problems(folder.parent if is_partition else folder, directories, totals, progress):
        progress.clear()
        print(problem)
        problem_count += 1
    progress.clear()
    found = count_of(problem_count, "problem") if problem_count else "no problems"
    print(
        f"{count_of(totals.partitions, 'partition')}, {count_of(totals.segments, 'segment')}, "
        f"{count_of(totals.batches, 'batch', 'batches')}, {count_of(totals.records, 'record')}, "
        f"{_size(totals.size)}: {found}"
    )
    return 1 if problem_count else 0


def _problems(folder: Path, directories: list[Path], totals: Any, progress: _Progress) -> Iterator[str]:
    from millrace.broker.storage import log_check

    facts, problems = log_check.FolderFacts.read(folder)
    yield from problems
    for directory in directories:
        try:
            yield from log_check.check_partition(directory, facts, totals, progress)
        except OSError as error:
            yield f"{error.filename or directory}: cannot be read: {error.strerror}"


class _Progress:
    """A line on a terminal that says how far it has come; silent elsewhere."""

    def __init__(self, totals: Any, partition_count: int) -> None:
        self._totals = totals
        self._partition_count = partition_count
        self._is_on = sys.stderr.isatty()
        self._shown_at = time.monotonic()
        self._is_shown = False

    def __call__(self) -> None:
        if self._is_on and time.monotonic() - self._shown_at > _PROGRESS_S:
            self._shown_at = time.monotonic()
            self._is_shown = True
            text = (
                f"{self._totals.partitions} of {self._partition_count} partitions, {_size(self._totals.size)}"
            )
            print(f"\r\033[K{text} …", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._is_shown = False


def _size(size: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    return ""
