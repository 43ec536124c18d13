"""Windows at rest: proven, and looked at no more until something comes for them.

A window of a topic comes to rest with a fold that finds all its rows settled and proven. Its rows stay in the
files of that run, its cells and its streams' reports go into files of their own, and what the report needs of
them is summed up: no later run reads, judges or writes them, so that a run costs what is new and not what is
kept (`keep`). For who judges the other windows of its streams the same is left of it as of a pruned one
(`fact_rows.PrunedWindows`). Once nobody may ask for its evidence any more it *is* one: that is the end of all
that came to rest with one fold (`old_enough`, `prune`).

Must stay true: at rest is said what would be said of the window if it was judged. So it wakes, with all that
came to rest with it, as soon as any of this might be otherwise:

- its records, reports and promise: a report of it says something else than the one that is kept, its stream
  has a record of it, or one of its numbers elsewhere, contradicts itself, or promises less than its end;
- what it was judged by: clusters, topics, times and rosters of the configuration, a topic that was made anew,
  mirrors that tell no positions any more, a producer of the roster that owes it.

What events say is seen before anything is judged (`to_wake`), what records say by who judges (`hit_by`), and
then all streams are judged once more. Waking too much costs time, and no verdict.

Few rows are judged sooner than laid aside, so nothing rests in a small audit (`REST_ROWS`). Nor does anything
where a verdict may hang on other windows: where contents are compared, groups are audited, or a mirror keeps
no positions; and no window of which a report tells of more than records that were acknowledged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from millrace.audit.config import AuditConfig, audited_topic
from millrace.audit.contract.event_json import decode_event, encode_event
from millrace.audit.contract.event_ledger import EventLedger, StreamFacts, says
from millrace.audit.contract.event_values import CLOSED, CountEvent
from millrace.audit.contract.sequence_set import from_ranges, joined_ranges
from millrace.audit.contract.window_reports import WindowReports
from millrace.audit.keeping.state import UnreadNote
from millrace.audit.keeping.uniting import may_unite
from millrace.audit.keeping.upkeep import sources_of
from millrace.audit.keeping.verdict_files import Tables
from millrace.audit.reconciliation.row_keys import WINDOW, is_among, keys_of
from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.settled import NUMBERED_SCHEMA, lines_of, revised, rows_of
from millrace.audit.reconciliation.spans import SPAN_SCHEMA, are_in, joined
from millrace.audit.reconciliation.stream_case import settled_until_ms
from millrace.audit.reconciliation.verdicts import COUNTS, Verdict, WindowState
from millrace.audit.report.resting_sums import RestingSums, Summing
from millrace.audit.runs.at_rest import Asleep, AtRest
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.fact_rows import PrunedWindows
from millrace.audit.runs.waking import WAKING

REST_ROWS = 1 << 17
"""with so many rows to judge, windows come to rest"""

_MADE_ANEW = "recreated"
_PLACE = ["stream", "window_start_ms"]

LEFT_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("left", pa.binary()),
        ("reports", pa.binary()),
        ("others", pa.binary()),
    ]
)
"""What came to rest of each stream: `PrunedWindows`, and its reports, packed or as lines of JSON."""


def judged_by(config: AuditConfig) -> str:
    """A digest of all that decides verdicts and may be configured otherwise."""
    clusters = {
        name: [each.tier, each.mirror, {topic: each.topics_here(topic) for topic in config.topics}]
        for name, each in config.clusters.items()
    }
    told = [clusters, config.topics, config.window_ms, config.grace_ms, config.roster(), config.content]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def may_rest(config: AuditConfig, captured: Capture) -> bool:
    """Whether a window's verdict hangs on nothing but what is its own."""
    return may_unite(config, captured) and not config.groups and not config.content


def made_anew(unread: Iterable[UnreadNote]) -> set[str]:
    """Audited topics of which one was deleted and made again in some cluster: whether a copy may lie in the
    one that is gone hangs on the topics that all of a stream's windows are in."""
    return {audited_topic(each.topic) for each in unread if each.cause == _MADE_ANEW}


def to_wake(
    at_rest: AtRest,
    state: Tables,
    config: AuditConfig,
    captured: Capture,
    unread: Iterable[UnreadNote],
    by: str,
    now_ms: int,
) -> list[Asleep]:
    """What must be judged again for what is known before records are counted; reports that say what they said
    when their window came to rest are forgotten. `unread` are this run's notes, `by` is what the windows at
    rest were judged by."""
    if not at_rest.asleep:
        return []
    if by != judged_by(config) or not may_rest(config, captured):
        return list(at_rest.asleep)
    from_ms = _unpromised_from_ms(at_rest.left, captured.ledger, config.grace_ms, now_ms)
    anew = pa.array(sorted(made_anew(unread)), pa.string())
    again = _reports_again(at_rest.left, captured.ledger)
    return [
        each
        for each in at_rest.asleep
        if each.end_ms > from_ms
        or pc.any(pc.is_in(each.spans["topic"], anew)).as_py()
        or _has_other_reports(each, state, captured.ledger, again)
    ]


def _unpromised_from_ms(
    left: Mapping[str, PrunedWindows], ledger: EventLedger, grace_ms: int, now_ms: int
) -> float:
    """The end of the last window that is settled for all streams with windows at rest, as far as these reach:
    one that was silent may speak again. -1 where one contradicts itself."""
    from_ms = float("inf")
    for stream, windows in left.items():
        facts = ledger.streams.get(stream)
        until_ms = None if facts is None else settled_until_ms(facts, grace_ms, now_ms)
        if until_ms is None or facts is None or facts.conflicts:
            return -1
        if windows.end_ms > until_ms:
            from_ms = min(from_ms, until_ms)
    return from_ms


def _reports_again(left: Mapping[str, PrunedWindows], ledger: EventLedger) -> dict[str, list[int]]:
    """{stream: windows at rest of which a report was read}"""
    found: dict[str, list[int]] = {}
    for stream, windows in left.items():
        facts = ledger.streams.get(stream)
        near = [] if facts is None else facts.windows.before(windows.end_ms)
        again = [start_ms for start_ms in near if windows.has(start_ms)]
        if again:
            found[stream] = again
    return found


def _has_other_reports(
    each: Asleep, state: Tables, ledger: EventLedger, again: Mapping[str, Sequence[int]]
) -> bool:
    """Whether a report of one of its windows was read that says something else than the one that is kept.
    Those that say the same are taken out of the ledger."""
    if not again:
        return False
    is_other = False
    wanted = pc.field("stream").isin(pa.array(sorted(again), pa.string()))
    for row in state.read_table(each.files.facts, wanted).to_pylist():
        windows, known = PrunedWindows.decode(row["left"]), _reports_of(row)
        reports = ledger.streams[row["stream"]].windows
        for start_ms in again[row["stream"]]:
            if not windows.has(start_ms):
                continue
            if start_ms in known and says(known[start_ms]) == says(reports[start_ms]):
                del reports[start_ms]
            else:
                is_other = True
    return is_other


def _reports_of(row: Mapping[str, Any]) -> dict[int, CountEvent]:
    packed = WindowReports()
    if row["reports"]:
        packed.adopt(row["reports"], row["stream"])
    return {**packed, **{each.window_start_ms: each for each in _others_of(row)}}


def _others_of(row: Mapping[str, Any]) -> Iterator[CountEvent]:
    for line in (row["others"] or b"").splitlines():
        event = decode_event(line)
        if isinstance(event, CountEvent):
            yield event


def wake(at_rest: AtRest, hit: Collection[Asleep], state: Tables, ledger: EventLedger) -> None:
    """Have these windows judged again: their reports are known again, and their numbers stand for nothing but
    themselves. Their files are for who goes on from `at_rest.woke`."""
    for each in hit:
        for row in state.read_table(each.files.facts).to_pylist():
            stream = row["stream"]
            _take_away(at_rest.left, stream, PrunedWindows.decode(row["left"]))
            facts = ledger.facts(stream)
            loose = facts.windows.put_back(row["reports"], stream) if row["reports"] else []
            for event in (*loose, *_others_of(row)):
                ledger.learn(event)
    at_rest.asleep = [each for each in at_rest.asleep if each not in hit]
    at_rest.woke.extend(hit)


def _take_away(left: dict[str, PrunedWindows], stream: str, windows: PrunedWindows) -> None:
    left[stream].take_away(windows)
    if not left[stream].windows:
        del left[stream]


def hit_by(at_rest: AtRest, rows: Rows) -> list[Asleep]:
    """What must be judged again for what the rows (`settled.NUMBERED_SCHEMA`) say: records came for windows
    at rest, or one of these has a row all the same, of another stream or of what a producer of the roster
    owes: a window rests as a whole."""
    if not at_rest.asleep:
        return []
    hit: list[pa.Table] = []
    spans = at_rest.spans
    for part in parts_of(rows, ["state", *WINDOW]):
        with_window = part.filter(pc.is_valid(part["window_start_ms"])).select(WINDOW)
        hit.append(with_window.filter(are_in(with_window, spans)))
        if not pc.any(pc.equal(part["state"], WAKING)).as_py():
            continue
        for told in parts_of(rows, ["state", "topic", "detail"]):
            for row in told.filter(pc.equal(told["state"], WAKING)).to_pylist():
                windows = json.loads(row["detail"])["windows"]
                if windows is None:
                    return list(at_rest.asleep)
                hit.append(keys_of([(row["topic"], start_ms) for start_ms in windows], WINDOW))
    windows = pa.concat_tables(hit)
    return [each for each in at_rest.asleep if pc.any(are_in(windows, each.spans)).as_py()]


@dataclass(frozen=True, slots=True)
class Laid:
    """What a fold lays to rest: windows (SPAN_SCHEMA), what is left of them by stream, and their sums."""

    spans: pa.Table
    left: dict[str, PrunedWindows]
    sums: RestingSums


@dataclass(frozen=True, slots=True)
class Restless:
    """What does not come to rest now, whatever its rows and reports say: `topics` of which nothing does,
    windows beyond what is `promised` in their topics (`promised_until`), those of the lines that this run
    `pruned`, those that a waiver stands for (`waived`), and {(stream, window)} of cells that are not kept yet
    (`held_back`), asked once something may rest."""

    topics: Collection[str]
    promised: Mapping[str, int]
    pruned: pa.Table
    waived: Collection[tuple[str, int | str]]
    held_back: Callable[[], Collection[tuple[str, int]]]

    def may_rest(self, rows: pa.Table) -> pa.ChunkedArray:
        """Whether each row's window may, as far as topics and promises go."""
        topics = pa.array(sorted(self.topics), pa.string())
        return pc.and_not(_are_promised(rows, self.promised), pc.is_in(rows["topic"], topics))

    def windows(self) -> pa.Table:
        """Those that are known beforehand (WINDOW)."""
        waived = keys_of([(topic, at) for topic, at in self.waived if isinstance(at, int)], WINDOW)
        return pa.concat_tables([self.pruned.select(WINDOW), waived])


def lay(
    numbered: Rows, restless: Restless, config: AuditConfig, ledger: EventLedger, summing: Summing
) -> Laid | None:
    """What comes to rest of this run's rows (`settled.NUMBERED_SCHEMA`); None where nothing does. `summing`
    has had none yet."""
    left: dict[str, PrunedWindows] = {}
    pieces, lines = [SPAN_SCHEMA.empty_table()], [lines_of(NUMBERED_SCHEMA.empty_table())]
    stay = restless.windows()
    loose: pa.Table | None = None
    for rows in parts_of(numbered):
        rests = pc.and_(_rests(rows, config.window_ms), restless.may_rest(rows))
        if not pc.any(rests).as_py():
            continue
        if loose is None:
            loose = keys_of([*restless.held_back(), *_told_otherwise(ledger, config.window_ms)], _PLACE)
        rests = pc.and_not(rests, is_among(rows.select(_PLACE), loose))
        going = rows.filter(rests)
        stays = pa.concat_tables([stay, rows.filter(pc.invert(rests)).select(WINDOW)])
        going = going.filter(pc.invert(is_among(going.select(WINDOW), stays)))
        if not going.num_rows:
            continue
        summing.add(rows_of(going))
        lines.append(lines_of(going))
        pieces.append(_pieces(going))
        _leave(left, going, config)
    if not left:
        return None
    told = summing.sums(config.window_ms, revised(pa.concat_tables(lines)))
    return Laid(joined(pa.concat_tables(pieces)), left, told)


def _rests(rows: pa.Table, window_ms: int) -> pa.ChunkedArray:
    """Whether a row may rest, by what it says."""
    settled = pc.equal(rows["state"], str(WindowState.SETTLED))
    proven = pc.and_(settled, pc.equal(rows["verdict"], str(Verdict.PROVEN)))
    own = pc.and_(pc.equal(rows["window_ms"], window_ms), pc.not_equal(rows["stream"], ""))
    return pc.fill_null(pc.and_(pc.and_(proven, own), pc.is_valid(rows["window_start_ms"])), False)


def promised_until(streams: Iterable[StreamFacts], grace_ms: int, now_ms: int) -> dict[str, int]:
    """{audited topic: the end of the windows into which no living stream writes any more, in ms}. The
    `streams` name their audited topics. Who was cut off tells of hours that the others have settled: their
    windows would wake as soon as it is back."""
    found: dict[str, int] = {}
    for facts in streams:
        promise_ms = facts.no_earlier_than_ms
        if facts.state != CLOSED and not facts.lapsed(now_ms, grace_ms) and promise_ms is not None:
            found[facts.topic] = min(promise_ms, found.get(facts.topic, promise_ms))
    return found


def _are_promised(rows: pa.Table, promised: Mapping[str, int]) -> pa.ChunkedArray:
    topics, ends_ms = pa.array(list(promised), pa.string()), pa.array(list(promised.values()), pa.int64())
    until_ms = pc.take(ends_ms, pc.index_in(rows["topic"], value_set=topics))
    ends_ms = pc.add(rows["window_start_ms"], rows["window_ms"])
    return pc.fill_null(pc.less_equal(ends_ms, until_ms), True)


def _told_otherwise(ledger: EventLedger, window_ms: int) -> Iterator[tuple[str, int]]:
    """(stream, window) of reports that tell of more than records that were acknowledged."""
    for stream, facts in ledger.streams.items():
        for report in facts.windows.others():
            if report.ambiguous_count or report.ambiguous or report.failed or not report.sequenced:
                yield stream, report.window_start_ms - report.window_start_ms % window_ms


def _pieces(rows: pa.Table) -> pa.Table:
    """The windows of these rows (SPAN_SCHEMA)."""
    grouped = rows.group_by([*WINDOW, "window_ms", "verdict"])
    sums = grouped.aggregate([*((name, "sum") for name in COUNTS), ("settled_ms", "max")])
    start_ms = sums["window_start_ms"]
    told = {name: sums[name] for name in ("topic", "window_ms", "verdict")}
    told |= {"start_ms": start_ms, "end_ms": pc.add(start_ms, sums["window_ms"])}
    told |= {name: sums[f"{name}_sum"] for name in COUNTS} | {"settled_ms": sums["settled_ms_max"]}
    return pa.table([told[name] for name in SPAN_SCHEMA.names], SPAN_SCHEMA)


def _leave(left: dict[str, PrunedWindows], rows: pa.Table, config: AuditConfig) -> None:
    """Note of each stream which of its windows come to rest, and which source clusters had their records."""
    ordered = rows.select(["stream", "topic", "window_start_ms"]).sort_by("stream").combine_chunks()
    codes = ordered["stream"].combine_chunks().dictionary_encode().indices.to_numpy()
    begins = np.flatnonzero(np.diff(codes, prepend=-1))
    numbers = ordered["window_start_ms"].to_numpy() // config.window_ms
    for first, end in zip(begins.tolist(), [*begins[1:].tolist(), len(codes)], strict=True):
        stream, topic = (ordered[name][first].as_py() for name in ("stream", "topic"))
        windows = left.setdefault(stream, PrunedWindows(config.window_ms))
        windows.windows |= BitMap64(numbers[first:end])
        windows.topic = topic
    for stream, found in sources_of(rows, config.sources()).items():
        left[stream].sources |= found


def lay_reports(left: Mapping[str, PrunedWindows], ledger: EventLedger) -> pa.Table:
    """Take the reports of these windows out of the ledger, and account for their numbers (LEFT_SCHEMA)."""
    rows = []
    for stream, windows in sorted(left.items()):
        reports = ledger.facts(stream).windows
        starts, columns = reports.plain()
        goes = windows.have(starts)
        ranges = joined_ranges(columns["first"][goes], columns["count"][goes])
        packed = b""
        if ranges is not None and len(ranges):
            numbers = from_ranges(tuple((first, last) for first, last in ranges.tolist()))
            windows.account_for_acknowledged(numbers, int(starts[goes].min()))
            packed = reports.lay_aside(starts[goes])
        others = []
        for start_ms in sorted(filter(windows.has, reports.before(windows.end_ms))):
            report = reports.pop(start_ms)
            windows.account_for(report)
            others.append(encode_event(report)[1])
        rows.append(
            {"stream": stream, "left": windows.encode(), "reports": packed, "others": b"\n".join(others)}
        )
    return pa.Table.from_pylist(rows, LEFT_SCHEMA)


def old_enough(at_rest: AtRest, keep_ms: int | None, now_ms: int) -> list[Asleep]:
    """What rests for so long that nobody may ask for its evidence any more."""
    if keep_ms is None:
        return []
    return [each for each in at_rest.asleep if each.files.at_ms <= now_ms - keep_ms]


def prune(
    at_rest: AtRest, going: Collection[Asleep], state: Tables, pruned: dict[str, PrunedWindows]
) -> None:
    """Make windows at rest pruned ones."""
    for each in going:
        for row in state.read_table(each.files.facts).select(["stream", "left"]).to_pylist():
            windows = PrunedWindows.decode(row["left"])
            _take_away(at_rest.left, row["stream"], windows)
            pruned.setdefault(row["stream"], PrunedWindows(windows.window_ms)).add_all(windows)
    at_rest.asleep = [each for each in at_rest.asleep if each not in going]
