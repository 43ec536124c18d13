"""A stream's reports by window, in columns: what 14 million windows a day leave on one machine. Pure.

Held by `event_ledger.StreamFacts`, kept between runs by `fact_rows`, unpacked by Spark's workers. A report as
an object is 1.5 KB. Nearly all are *plain*: of the stream's own producer and length of windows, numbered, one
run of acknowledged sequences and nothing else. Of those five numbers and the window's beginning are held, 40
bytes, and the report is made of them when it is asked for. Every other one is held as it is.

Three places, and a window is in one of them: rows, in the order of windows; plain reports that came out of
that order, until there are enough of them to be sorted in; the others. Rows of an earlier run stay packed
until one of them is asked for: a new window's report does not.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap64

from millrace.audit.contract import sequence_set
from millrace.audit.contract.event_values import CountEvent, InvalidEvent
from millrace.audit.contract.header import MAX_CREATED_MS, MAX_SEQUENCE

_ROW = struct.Struct("<IIqqq")
_COLUMNS = np.dtype(
    [("report", "<u4"), ("count", "<u4"), ("byte_count", "<i8"), ("first", "<i8"), ("at_ms", "<i8")]
)
_MAX_U4 = (1 << 32) - 1
_FEW = 32  # out of order; with more, a sixteenth of the rows, so that sorting them in costs each the same
_NUMBER = rb"(0|[1-9]\d{0,18})"
_PLAIN = re.compile(
    rb'\{"version":1,"type":"count","stream":"([0-9a-f]{16})",'
    rb'("session":"[^"\\]*","topic":"[^"\\]*","producer":"[^"\\]*"),"window_start_ms":%b,"window_ms":%b,'
    rb'"report":%b,"count":%b,"bytes":%b,"acknowledged":\[\[%b,%b\]\],"ambiguous":\[\],"failed":\[\],'
    rb'"digest":null,"at_ms":%b\}' % ((_NUMBER,) * 8)
)


class Row(NamedTuple):
    """What a plain report says beside its window; `first` is its lowest sequence."""

    report: int
    record_count: int
    byte_count: int
    first: int
    at_ms: int


class PlainText(NamedTuple):
    """A plain report as it was read: `said_by` is the text of its session, topic and producer, of which
    nothing is believed yet."""

    stream: str
    said_by: bytes
    window_start_ms: int
    window_ms: int
    row: Row


@dataclass(frozen=True, slots=True)
class Teller:
    """Whose plain reports these are, and how long their windows."""

    stream: str
    session: str
    topic: str
    producer: str
    window_ms: int

    def text(self) -> bytes:
        """As `PlainText.said_by`; a name that JSON escapes is in no such text."""
        return f'"session":"{self.session}","topic":"{self.topic}","producer":"{self.producer}"'.encode(
            "utf-8", "surrogatepass"
        )

    def row_of(self, start_ms: int, event: CountEvent) -> Row | None:
        """None for a report that is not plain, or not this teller's."""
        acknowledged = event.acknowledged
        if not (
            event.sequenced
            and event.digest is None
            and 0 < event.count <= _MAX_U4
            and event.report <= _MAX_U4
            and event.window_start_ms == start_ms
            and event.ambiguous_count == 0
            and len(acknowledged) == event.count
            and acknowledged.max() - acknowledged.min() + 1 == event.count
            and not event.ambiguous
            and not event.failed
            and Teller(event.stream, event.session, event.topic, event.producer, event.window_ms) == self
        ):
            return None
        return Row(event.report, event.count, event.byte_count, acknowledged.min(), event.at_ms)

    def event_of(self, start_ms: int, row: Row) -> CountEvent:
        return CountEvent(
            stream=self.stream,
            session=self.session,
            topic=self.topic,
            producer=self.producer,
            window_start_ms=start_ms,
            window_ms=self.window_ms,
            report=row.report,
            count=row.record_count,
            byte_count=row.byte_count,
            acknowledged=sequence_set.from_ranges(((row.first, row.first + row.record_count - 1),)),
            ambiguous=BitMap64(),
            failed=BitMap64(),
            at_ms=row.at_ms,
        )


def read_plain(key: bytes | None, value: bytes | memoryview) -> PlainText | None:
    """A plain report in the very words of `encode_event`, read seven times as fast as by `decode_event`. None
    for whatever else it is, which is no judgement: that one decides."""
    found = _PLAIN.fullmatch(value)
    if found is None or key is None:
        return None
    stream, said_by, start, *numbers = found.groups()
    if key != b"count/%b/%b" % (stream, start):
        return None
    window_ms, report, count, byte_count, first, last, at_ms = map(int, numbers)
    start_ms = int(start)
    if (
        not 0 < window_ms <= MAX_CREATED_MS
        or start_ms % window_ms
        or max(start_ms, at_ms) > MAX_CREATED_MS
        or not 1 <= first <= last <= MAX_SEQUENCE
        or last - first + 1 != count
        or max(count, report) > _MAX_U4
        or byte_count > MAX_SEQUENCE
    ):
        return None
    return PlainText(
        stream.decode(), said_by, start_ms, window_ms, Row(report, count, byte_count, first, at_ms)
    )


class WindowReports(MutableMapping[int, CountEvent]):
    """{window_start_ms: the newest report}, as a dictionary; a report that is asked for is a new object."""

    def __init__(self) -> None:
        self._teller: Teller | None = None
        self._text = b""
        self._packed = b""
        self._packed_count = 0  # of rows that are nowhere but in `_packed`
        self._is_packed = True  # `_packed` says all that the rows do
        self._starts = array("q")
        self._rows = bytearray()
        self._late: dict[int, CountEvent] = {}
        self._others: dict[int, CountEvent] = {}
        self._last_ms = -1

    def are_of(self, teller: Teller) -> None:
        """Before the first report: whose are plain."""
        self._teller, self._text = teller, teller.text()

    def take(self, told: PlainText) -> bool:
        """Put in a report of the stream's own teller if its window is after all others, or if it says what is
        known already; False, and nothing done, where any rule must be asked (`StreamFacts.learn_count`)."""
        teller, start_ms = self._teller, told.window_start_ms
        if teller is None or told.said_by != self._text or told.window_ms != teller.window_ms:
            return False
        if start_ms > self._last_ms:
            self._append(start_ms, told.row)
            return True
        at = self._find(start_ms)
        return at is not None and self._row_at(at) == told.row

    def lengths(self) -> set[int]:
        """The lengths of windows, in ms; asks no report of the stream's own teller."""
        lengths = {report.window_ms for report in self._others.values()}
        if self._teller is not None and len(self) > len(self._others):
            lengths.add(self._teller.window_ms)
        return lengths

    def spans(self) -> Iterator[tuple[int, int]]:
        """[beginning, end) of every window in ms, in no order; makes no report."""
        own_ms = 0 if self._teller is None else self._teller.window_ms
        for start_ms in self:
            other = self._others.get(start_ms)
            yield start_ms, start_ms + (own_ms if other is None else other.window_ms)

    def before(self, end_ms: int) -> list[int]:
        """The windows that begin before it, in no order. Where there is none, what was packed is so again:
        who asks thousands of streams holds the rows of one."""
        self._unpack()
        found = [*self._starts[: bisect_left(self._starts, end_ms)]]
        found += [start_ms for start_ms in (*self._late, *self._others) if start_ms < end_ms]
        if not found:
            self.pack()
        return found

    def others(self) -> list[CountEvent]:
        """The reports that `pack` leaves out, in the order of windows."""
        return [self._others[start_ms] for start_ms in sorted(self._others)]

    def plain(self) -> tuple[np.ndarray, np.ndarray]:
        """(windows in ms, ascending; `Row`s, with `count` for the records) of the plain ones."""
        self._unpack()
        self._sort_in()
        return np.array(self._starts, np.int64), np.frombuffer(bytes(self._rows), _COLUMNS)

    def but_plain(self, starts: np.ndarray) -> Iterator[CountEvent]:
        """Every report but the plain ones of these windows."""
        yield from (self[start_ms] for start_ms in set(self) - set(starts.tolist()))

    def drop_plain(self, starts: np.ndarray) -> None:
        """Take the plain reports of these windows out."""
        known, columns = self.plain()
        stays = ~np.isin(known, starts)
        self._hold(known[stays], columns[stays])
        self._is_packed = False

    def lay_aside(self, starts: np.ndarray) -> bytes:
        """Take the plain reports of these windows out; returns them as `pack` does."""
        known, columns = self.plain()
        goes = np.isin(known, starts)
        taken = WindowReports()
        taken._teller = self._teller
        taken._hold(known[goes], columns[goes])
        taken._is_packed = False
        self._hold(known[~goes], columns[~goes])
        self._is_packed = False
        return taken.pack()

    def put_back(self, packed: bytes, stream: str) -> list[CountEvent]:
        """Take what `lay_aside` returned in again. Returns those that it does not: who has reports of these
        windows by now, or of another teller, must ask the rules (`StreamFacts.learn_count`)."""
        taken = WindowReports()
        teller = taken.adopt(packed, stream)
        starts, columns = taken.plain()
        if self._teller is None and not len(self):
            self.are_of(teller)
        if teller != self._teller or not set(starts.tolist()).isdisjoint(self):
            return [taken[start_ms] for start_ms in taken]
        known, before = self.plain()
        self._hold(np.concatenate([known, starts]), np.concatenate([before, columns]))
        self._last_ms = max(self._last_ms, int(starts[-1]))
        self._is_packed = False
        return []

    def __getitem__(self, start_ms: int) -> CountEvent:
        found = self._others.get(start_ms) or self._late.get(start_ms)
        if found is not None:
            return found
        at = self._find(start_ms) if start_ms <= self._last_ms else None
        if at is None or self._teller is None:
            raise KeyError(start_ms)
        return self._teller.event_of(start_ms, self._row_at(at))

    def __setitem__(self, start_ms: int, event: CountEvent) -> None:
        row = None if self._teller is None else self._teller.row_of(start_ms, event)
        if start_ms > self._last_ms:
            if row is not None:
                self._append(start_ms, row)
            else:
                self._others[start_ms], self._last_ms = event, start_ms
            return
        at = self._find(start_ms)
        if at is not None and row is not None:
            _ROW.pack_into(self._rows, at * _ROW.size, *row)
            self._is_packed = False
            return
        self.pop(start_ms, None)
        if row is None:
            self._others[start_ms] = event
            return
        self._late[start_ms] = event
        self._is_packed = False
        if len(self._late) > _FEW + len(self._starts) // 16:
            self._sort_in()

    def __delitem__(self, start_ms: int) -> None:
        if self._others.pop(start_ms, None) is not None:
            return
        if self._late.pop(start_ms, None) is None:
            at = self._find(start_ms)
            if at is None:
                raise KeyError(start_ms)
            del self._starts[at]
            del self._rows[at * _ROW.size : (at + 1) * _ROW.size]
        self._is_packed = False

    def __iter__(self) -> Iterator[int]:
        self._unpack()
        yield from self._starts
        yield from self._late
        yield from self._others

    def __len__(self) -> int:
        return self._packed_count + len(self._starts) + len(self._late) + len(self._others)

    def pack(self) -> bytes:
        """All plain reports in few bytes, b"" where there is none. Equal for equal reports, in whatever order
        they came. What is held is packed with it."""
        if not self._is_packed:
            self._unpack()
            self._sort_in()
            self._packed = self._encoded()
            self._is_packed = True
        self._packed_count += len(self._starts)
        self._starts, self._rows = array("q"), bytearray()
        return self._packed

    def adopt(self, packed: bytes, stream: str) -> Teller:
        """Take over what `pack` returned, into reports that are empty; returns whose they are. Raises
        InvalidEvent for what it never returned, of the columns when one is asked for."""
        head, _, _ = packed.partition(b"\n")
        try:
            said = json.loads(head)
            count, last_ms = said.pop("reports"), said.pop("last_ms")
            teller = Teller(stream=stream, **said)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidEvent("packed reports without a head") from error
        self.are_of(teller)
        self._packed, self._packed_count, self._last_ms = packed, count, last_ms
        return teller

    def _append(self, start_ms: int, row: Row) -> None:
        self._starts.append(start_ms)
        self._rows += _ROW.pack(*row)
        self._last_ms = start_ms
        self._is_packed = False

    def _find(self, start_ms: int) -> int | None:
        """Where the window's row is."""
        self._unpack()
        at = bisect_left(self._starts, start_ms)
        return at if at < len(self._starts) and self._starts[at] == start_ms else None

    def _row_at(self, at: int) -> Row:
        return Row._make(_ROW.unpack_from(self._rows, at * _ROW.size))

    def _sort_in(self) -> None:
        if not self._late or self._teller is None:
            return
        late = sorted(self._late)
        rows = [self._teller.row_of(start_ms, self._late[start_ms]) for start_ms in late]
        starts = np.concatenate([np.frombuffer(self._starts, np.int64), np.array(late, np.int64)])
        columns = np.concatenate([np.frombuffer(self._rows, _COLUMNS), np.array(rows, _COLUMNS)])
        self._hold(starts, columns)
        self._late = {}

    def _hold(self, starts: np.ndarray, columns: np.ndarray) -> None:
        order = np.argsort(starts, kind="stable")
        self._starts = array("q", starts[order].tobytes())
        self._rows = bytearray(columns[order].tobytes())

    def _encoded(self) -> bytes:
        """A line of JSON, then six columns of differences, which are small or always the same, their bytes
        sorted by weight: the high ones are all alike."""
        teller = self._teller
        if teller is None or not self._starts:
            return b""
        starts, rows = np.frombuffer(self._starts, np.int64), np.frombuffer(self._rows, _COLUMNS)
        columns = np.empty((6, len(starts)), "<i8")
        columns[0] = np.diff(starts, prepend=0)
        columns[1], columns[2], columns[3] = rows["report"], rows["count"], rows["byte_count"]
        columns[4] = rows["first"]
        columns[4, 1:] -= rows["first"][:-1] + rows["count"][:-1]
        columns[5] = np.diff(rows["at_ms"], prepend=0)
        head = {
            "session": teller.session,
            "topic": teller.topic,
            "producer": teller.producer,
            "window_ms": teller.window_ms,
            "reports": len(starts),
            "last_ms": int(starts[-1]),
        }
        by_weight = columns.view(np.uint8).reshape(-1, 8).T.tobytes()
        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + zlib.compress(by_weight)

    def _unpack(self) -> None:
        """Have the rows of an earlier run where they can be asked for."""
        if not self._packed_count:
            return
        count, self._packed_count = self._packed_count, 0
        try:
            content = zlib.decompress(self._packed.partition(b"\n")[2])
            by_weight = np.frombuffer(content, np.uint8).reshape(8, 6 * count)
        except (zlib.error, ValueError) as error:
            raise InvalidEvent("packed reports that are damaged") from error
        columns = np.ascontiguousarray(by_weight.T).view("<i8").reshape(6, count)
        rows = np.empty(count, _COLUMNS)
        rows["report"], rows["count"], rows["byte_count"] = columns[1], columns[2], columns[3]
        rows["first"] = np.cumsum(columns[4])
        rows["first"][1:] += np.cumsum(columns[2])[:-1]
        rows["at_ms"] = np.cumsum(columns[5])
        # What came meanwhile is of later windows, or it would have been asked for.
        self._starts[0:0] = array("q", np.cumsum(columns[0]).tobytes())
        self._rows[0:0] = rows.tobytes()
