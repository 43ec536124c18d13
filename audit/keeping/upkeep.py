"""Upkeep of the state: which windows' evidence may go, and when cells are folded into few files. Pure.

Called by `job`, and by `next_commit` after the run reconciled, so that whatever it saw is in the verdicts
that stay. The policy (`keep:` of audit.yaml):

- a window of a topic is *pruned* when all its streams' rows are settled, proven (or matched by count) or
  waived by a waiver that stands, and none was revised for `keep`. Its cells and reports go; one line with the
  sums stays (`settled`), and per stream which sequences are accounted for (`fact_rows.PrunedWindows`);
- what is not proven stays with all its evidence until a person has waived it; where a mirror keeps no
  positions, that is all of its topic, since a later record that arrived is what calls an earlier one lost;
- windows in which a stream has numbers in common (a time that was changed on the way) go together or not at
  all: what is said of such a number in one of them hangs on the other's evidence;
- a window with cells above the mirrors' positions stays: they would be read again, and look like late ones;
- a stream is forgotten when all its windows are pruned, it has ended, no row of its own is in doubt that
  nobody waived, and no cluster's events tell of it any more: else they would bring it back without its cells,
  and all of it would look lost. One of a producer of the roster stays as long as it tells when that was heard
  of: else a member that closed had "never reported";
- a claim of a group that no event answers (`group_counts.Claim`) ends when no commit names it any more,
  `keep` has passed since, and no window is left from its time: without it, what is unknown there would look
  lost;
- counts of records without an identity that were not added to for `keep` are forgotten too; what could not
  be trusted is never forgotten here (`runs.untrusted` tells how it ends).

What comes later for a pruned window is counted and told as a thing that could not be trusted: whether it is a
copy or a record that was missing, nobody can know any more.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from millrace.audit.config import audited_topic
from millrace.audit.contract.events import CLOSED, EventLedger, StreamFacts
from millrace.audit.contract.group_counts import Claim
from millrace.audit.contract.sequence_set import from_ranges, joined_ranges
from millrace.audit.keeping.state import Commit
from millrace.audit.keeping.waivers import Target
from millrace.audit.reconciliation.roster import speaking_streams
from millrace.audit.reconciliation.row_keys import WINDOW, is_among, keys_of
from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.settled import LINE_COLUMNS, SETTLED_SCHEMA, lines_of, rows_of, without
from millrace.audit.reconciliation.stream_case import TOLD_TWICE
from millrace.audit.reconciliation.verdict_rows import counting_row
from millrace.audit.reconciliation.verdicts import GOOD, WindowState
from millrace.audit.runs.fact_rows import PrunedWindows
from millrace.audit.scanning.cell_rows import NOTE_UNAUDITED

FOLD_FILES = 64
"""so many loose files of cells (`RunCells.loose_files`) are folded into few"""
FOLD_EVERY_MS = 20 * 3_600_000
"""cells of one record each, where keys are hashed, wait for so long to be united: a day, less what a daily
run may be early"""
LOOKS_A_KEEP = 30
"""pruning is looked at so many times in the time that evidence is kept"""

LATE = "records for windows whose evidence was pruned (keep)"
LATE_REPORT = "a report for a window whose evidence was pruned (keep)"
PRUNED = "PRUNED"
"""The state of a row that counts late records; such rows never leave the job."""

_PLACE = ["stream", "window_start_ms"]
_ENTRIES = pa.list_(pa.struct([("key", pa.string()), ("value", pa.int64())]))


def is_due(before: Commit, file_count: int, keep_ms: int | None, now_ms: int) -> bool:
    """Whether this run should fold: there are many files, or it is time to look for what may go or be one."""
    if file_count >= FOLD_FILES:
        return True
    every_ms = FOLD_EVERY_MS if keep_ms is None else min(FOLD_EVERY_MS, keep_ms // LOOKS_A_KEEP)
    return before.number > 0 and now_ms - before.folded_ms >= every_ms


def prune(
    numbered: Rows,
    earlier: pa.Table,
    pruned: dict[str, PrunedWindows],
    waived: Collection[Target],
    held_back: Callable[[], Collection[tuple[str, int]]],
    keep_ms: int,
    now_ms: int,
    window_ms: int,
    *,
    sources: Collection[str] = (),
    places_decide: bool = False,
) -> pa.Table:
    """Add what may go to what is `pruned` of each stream; returns the lines that are left of these windows.

    `numbered` are this run's rows (`settled.NUMBERED_SCHEMA`): they are read part by part, without their
    details, which only windows that were waived are asked for. `earlier` are the lines of windows that were
    pruned before, `held_back` is asked once something may go; `sources` are the source clusters.
    `places_decide`: some mirror keeps no positions, so that what arrived in a window tells of records of
    others that they come no more. The ledger is for `forget_pruned`.
    """
    asked = functools.cache(held_back)
    whole = undecided_topics(numbered, waived) if places_decide else set()

    def may_go(part: pa.Table) -> pa.Table:
        here, rows = lines_of(part), rows_of(part)
        going = prunable(here, rows, waived, (), keep_ms, now_ms)
        if going.num_rows:
            going = prunable(here, rows, waived, asked(), keep_ms, now_ms)
        return going.filter(pc.invert(pc.is_in(going["topic"], pa.array(whole, pa.string()))))

    staying = tied_windows(numbered, waived, may_go)
    lines = [SETTLED_SCHEMA.empty_table()]
    waived_ones, places = [], []
    for part in parts_of(numbered, LINE_COLUMNS):
        going = may_go(part)
        going = going.filter(pc.invert(is_among(going.select(WINDOW), staying)))
        if not going.num_rows:
            continue
        _add_windows(pruned, going, window_ms)
        waived_ones.append(going.filter(pc.greater(going["unreported"], 0)).select(_PLACE))
        places.append(going.select(_PLACE))
        windows = going.group_by(WINDOW).aggregate([]).to_pylist()
        left = without(
            pa.concat_tables([earlier, lines_of(part)]),
            [(each["topic"], each["window_start_ms"]) for each in windows],
        )
        lines.append(left.filter(is_among(left.select(WINDOW), going.select(WINDOW))))
    _add_unreported(pruned, numbered, waived_ones)
    _add_sources(pruned, numbered, places, sources)
    return pa.concat_tables(lines)


def tied_windows(
    numbered: Rows, waived: Collection[Target], may_go: Callable[[pa.Table], pa.Table]
) -> pa.Table:
    """(topic, window_start_ms) of those waived that would go and stay, because a stream has numbers of theirs
    in another window that stays (`WindowVerdict.shared`). None of these is proven: what goes is waived."""
    windows = keys_of([(topic, at) for topic, at in waived if isinstance(at, int)], WINDOW)
    ties: dict[tuple[Any, ...], set[tuple[str, int]]] = {}
    for part in parts_of(numbered, [*LINE_COLUMNS, "detail"]) if windows.num_rows else ():
        part = part.filter(is_among(part.select(WINDOW), windows))
        told = rows_of(part).filter(pc.match_substring(rows_of(part)["detail"], '"shared":'))
        told = told.filter(is_among(told.select(WINDOW), may_go(part).select(WINDOW)))
        for row in told.to_pylist():
            together = json.loads(row["detail"]).get("shared")  # a tier may have that name, too
            if together:
                window = (row["topic"], row["window_start_ms"])
                ties.setdefault((row["stream"], *together), set()).add(window)
    stay: set[tuple[str, int]] = set()
    apart = True
    while apart:  # what stays for one stream, stays for all
        halves = [each for (*_, count), each in ties.items() if len(each - stay) not in (0, count)]
        stay.update(*halves)
        apart = bool(halves)
    return keys_of(stay, WINDOW)


def undecided_topics(rows: Rows, waived: Collection[Target]) -> set[str]:
    """Those with a settled window of a stream that is neither proven nor waived."""
    found = {
        (row["topic"], row["window_start_ms"])
        for part in parts_of(rows, [*WINDOW, "stream", "state", "verdict"])
        for row in part.filter(_is_undecided(part)).select(WINDOW).group_by(WINDOW).aggregate([]).to_pylist()
    }
    return {topic for topic, start_ms in found if (topic, start_ms) not in waived}


def _is_undecided(rows: pa.Table) -> pa.ChunkedArray:
    of_window = pc.and_(pc.is_valid(rows["window_start_ms"]), pc.not_equal(rows["stream"], ""))
    is_settled = pc.equal(rows["state"], str(WindowState.SETTLED))
    return pc.and_(pc.and_(of_window, is_settled), pc.invert(pc.is_in(rows["verdict"], pa.array(GOOD))))


def prunable(
    settled: pa.Table,
    rows: pa.Table,
    waived: Collection[Target],
    held_back: Collection[tuple[str, int]],
    keep_ms: int,
    now_ms: int,
) -> pa.Table:
    """(topic, stream, window_start_ms, window_ms, unreported) of the lines of windows whose evidence may go.

    `settled` are this run's lines (`settled`), `rows` the report's; `held_back` {(stream, window start)} of
    cells that are not kept yet.
    """
    lines = settled.filter(pc.and_not(pc.is_valid(settled["window_start_ms"]), settled["folded"]))
    windows = [(topic, at) for topic, at in waived if isinstance(at, int)]
    good = pc.or_(
        pc.is_in(lines["verdict"], value_set=pa.array(GOOD)),
        is_among(lines.select(WINDOW), keys_of(windows, WINDOW)),
    )
    is_old = pc.less_equal(lines["settled_ms"], now_ms - keep_ms)
    may_go = pc.and_not(pc.and_(good, is_old), is_among(lines.select(_PLACE), keys_of(held_back, _PLACE)))
    may_go = pc.fill_null(may_go, False)
    unsettled = rows.select([*WINDOW, "state"]).filter(pc.not_equal(rows["state"], str(WindowState.SETTLED)))
    stay = pa.concat_tables([lines.filter(pc.invert(may_go)).select(WINDOW), unsettled.select(WINDOW)])
    going = lines.filter(pc.and_(may_go, pc.not_equal(lines["stream"], "")))  # the roster has no evidence
    going = going.filter(pc.invert(is_among(going.select(WINDOW), stay)))
    return going.select(["topic", *_PLACE, "window_ms", "unreported"])


def _add_windows(pruned: dict[str, PrunedWindows], going: pa.Table, window_ms: int) -> None:
    for stream, start_ms, length_ms, topic in zip(
        *(going[name].to_pylist() for name in (*_PLACE, "window_ms", "topic")), strict=True
    ):
        left = pruned.setdefault(stream, PrunedWindows(window_ms))
        left.add(start_ms, length_ms)
        left.topic = topic


def _add_unreported(pruned: dict[str, PrunedWindows], numbered: Rows, going: Sequence[pa.Table]) -> None:
    """Sequences that no report told of, in windows that were waived, are accounted for with them."""
    places = pa.concat_tables(going) if going else None
    if places is None or not places.num_rows:
        return
    for part in parts_of(numbered, [*_PLACE, "state", "unreported", "detail"]):
        told = rows_of(part.filter(pc.greater(part["unreported"], 0)))
        for row in told.filter(is_among(told.select(_PLACE), places)).to_pylist():
            ranges = json.loads(row["detail"])["unreported"]
            pruned[row["stream"]].sequences |= from_ranges(tuple((first, last) for first, last in ranges))


def _add_sources(
    pruned: dict[str, PrunedWindows], numbered: Rows, going: Sequence[pa.Table], sources: Collection[str]
) -> None:
    """Where their records were is where the streams were produced to, also when no event says so."""
    places = pa.concat_tables(going) if going else None
    if places is None or not sources:
        return
    for part in parts_of(numbered, [*_PLACE, "state", "consumed"]):
        rows = rows_of(part)
        for stream, found in sources_of(rows.filter(is_among(rows.select(_PLACE), places)), sources).items():
            pruned[stream].sources |= found


def sources_of(rows: pa.Table, sources: Collection[str]) -> dict[str, set[str]]:
    """{stream: those of the source clusters of which its rows tell that they had records}"""
    rows = rows.select(["stream", "consumed"]).combine_chunks()
    maps = rows["consumed"].combine_chunks()
    of_row = pc.list_parent_indices(maps.cast(_ENTRIES))
    told = pa.table({"stream": rows["stream"].take(of_row), "tier": maps.keys, "count": maps.items})
    told = told.filter(pc.greater(told["count"], 0)).group_by(["stream", "tier"]).aggregate([])
    found: dict[str, set[str]] = {}
    for row in told.to_pylist():
        found.setdefault(row["stream"], set()).update({*row["tier"].split("+")} & set(sources))
    return found


def claims_to_keep(
    claims: Sequence[tuple[str, str, Claim]], rows: Rows, grace_ms: int, keep_ms: int | None, now_ms: int
) -> list[tuple[str, str, Claim]]:
    """Without those that have ended; `rows` are the report's, of windows that were not pruned."""
    oldest_ms = _oldest_ms(rows)

    def has_ended(claim: Claim) -> bool:
        if keep_ms is None or claim.commits or claim.until_ms is None or now_ms - claim.until_ms < keep_ms:
            return False
        return oldest_ms is None or bool(oldest_ms - grace_ms > claim.until_ms)

    return [each for each in claims if not has_ended(each[2])]


def _oldest_ms(rows: Rows) -> int | None:
    """The start of the first window that any row is of."""
    starts = [pc.min(part["window_start_ms"]).as_py() for part in parts_of(rows, ["window_start_ms"])]
    return min((each for each in starts if each is not None), default=None)


def forget_pruned(
    ledger: EventLedger,
    pruned: Mapping[str, PrunedWindows],
    topic_of: Mapping[str, str] | None = None,
    *,
    learn: bool = False,
) -> dict[str, int]:
    """Take reports of pruned windows out of the ledger: events tell them again in every run. `topic_of`
    {stream: audited topic}: a producer may call it by another name.

    Returns {what: count} of reports that tell of sequences which were not accounted for when their window was
    pruned; with `learn` they are, from now on, and that a sequence was acknowledged in two of them is not
    forgotten with their reports.
    """
    late: Counter[str] = Counter()
    for stream, left in pruned.items():
        facts = ledger.streams.get(stream)
        if facts is None:
            continue
        acknowledged = _forget_plain(facts, left, is_known=not learn)
        for start_ms in sorted(filter(left.has, facts.windows.before(left.end_ms))):
            report = facts.windows.pop(start_ms)
            told = report.acknowledged | report.ambiguous | report.failed
            if not learn and not told.issubset(left.sequences):
                late[_of_topic(LATE_REPORT, (topic_of or {}).get(stream, ""))] += 1
            if learn and not acknowledged.isdisjoint(report.acknowledged):
                facts.conflict(TOLD_TWICE)  # two windows with one number go together
            acknowledged |= report.acknowledged
            left.account_for(report)
            left.counted = left.counted or not report.sequenced
            if not report.sequenced and left.told is not None:
                left.told[start_ms] = max(left.told.get(start_ms, 0), report.count + report.ambiguous_count)
    living = {
        (event.tier, event.session)
        for event in ledger.tiers.values()
        if event.stream not in pruned or not pruned[event.stream].has(event.window_start_ms)
    }
    for key, event in list(ledger.tiers.items()):  # a session's total needs all of its events
        if (event.tier, event.session) not in living:
            del ledger.tiers[key]
    return dict(late)


def _forget_plain(facts: StreamFacts, left: PrunedWindows, *, is_known: bool) -> BitMap64:
    """`forget_pruned` for all plain reports of pruned windows at once, where there is nothing to tell of any:
    no two have a number in common, and if asked for, each number is accounted for already. Returns their
    numbers; none, and nothing is done, where each report must be looked at."""
    if not facts.windows.before(left.end_ms):
        return BitMap64()
    starts, rows = facts.windows.plain()
    going = left.have(starts)
    ranges = joined_ranges(rows["first"][going], rows["count"][going])
    if ranges is None or not len(ranges):
        return BitMap64()
    numbers = from_ranges(tuple((first, last) for first, last in ranges.tolist()))
    if is_known and not numbers.issubset(left.sequences):
        return BitMap64()
    facts.windows.drop_plain(starts[going])
    left.account_for_acknowledged(numbers, int(starts[going].min()))
    return numbers


def forget_streams(
    ledger: EventLedger,
    pruned: dict[str, PrunedWindows],
    told: Collection[str],
    needed: Collection[str],
    grace_ms: int,
    now_ms: int,
) -> None:
    """Drop streams of which nothing is left and of which no event can come back; none that is `needed`: in
    doubt, or by the roster."""
    testified = {event.stream for event in ledger.tiers.values()}
    for stream in list(pruned):
        facts = ledger.streams.get(stream)
        if (
            stream in told
            or stream in needed
            or stream in testified
            or (facts is not None and not _is_over(facts, grace_ms, now_ms))
        ):
            continue
        left = pruned[stream]
        if facts is not None and left.sequences and left.sequences.max() < facts.last_assigned:
            continue  # its lost tail must stay known
        pruned.pop(stream)
        ledger.streams.pop(stream, None)


def doubted_streams(rows: Rows, waived: Collection[Target]) -> set[str]:
    """Those with a row of their own that nobody has waived; `rows` are the report's."""
    own = [
        row
        for part in parts_of(rows, ["topic", "stream", "window_start_ms"])
        for row in part.filter(pc.is_null(part["window_start_ms"])).to_pylist()
    ]
    return {row["stream"] for row in own if (row["topic"], row["stream"]) not in waived}


def roster_streams(
    roster: Collection[str],
    ledger: EventLedger,
    rows: Rows,
    grace_ms: int,
    now_ms: int,
    at_rest_ms: int | None = None,
) -> set[str]:
    """Those without which another thing would be said of a producer of the `roster`. `at_rest_ms` is where
    the first window at rest begins."""
    if not roster:
        return set()
    known = [each for each in (_oldest_ms(rows), at_rest_ms) if each is not None]
    return speaking_streams(roster, ledger.streams.values(), min(known, default=None), grace_ms, now_ms)


def _is_over(facts: StreamFacts, grace_ms: int, now_ms: int) -> bool:
    ended = facts.state == CLOSED or facts.lapsed(now_ms, grace_ms)
    return ended and not facts.windows and not facts.conflicts


def late_counts(rows: Rows, *, again: bool = False) -> dict[str, int]:
    """{what: late records} of rows in state PRUNED, or of those alone that the next run reads `again`. A name
    ends with the topic: no other one's watermark waits for it (`runs.untrusted`)."""
    counts: dict[str, int] = {}
    told = "seen" if again else "consumed"
    for part in parts_of(rows, ["state", "topic", told]):
        for row in part.filter(pc.equal(part["state"], PRUNED)).to_pylist():
            for tier, count in row[told]:
                what = _of_topic(f"{LATE}, in {tier}", row["topic"])
                counts[what] = counts.get(what, 0) + count
    return counts


def late_to_keep(late: Mapping[str, int], again: Mapping[str, int]) -> dict[str, int]:
    """The late records whose cells a fold takes away, so that their count must stay. Those that are read
    again are counted by the next run."""
    kept = {what: count - again.get(what, 0) for what, count in late.items() if what.startswith(LATE)}
    return {what: count for what, count in kept.items() if count}


def _of_topic(what: str, topic: str) -> str:
    return f"{what}, topic {topic}" if topic else what


def late_row(topic: str, stream: str, late: pa.Table) -> dict[str, Any]:
    """The row that carries a stream's late records from a worker to the driver. `late` are their cells, of
    its own `topic` or, where no event names that (""), of any one: a cluster that merges topics is read for
    each of them, and shows every record under each name."""
    places = late["topic"].unique().to_pylist()
    own = topic or min(map(audited_topic, places))
    here = pa.array([each for each in places if audited_topic(each) == own] or places, pa.string())
    cells = late.filter(pc.is_in(late["topic"], here))
    return counting_row(PRUNED, topic, stream, _by_tier(cells), _by_tier(cells.filter(cells["tail"])))


def _by_tier(cells: pa.Table) -> dict[str, int]:
    found = cells.group_by("tier").aggregate([("count", "sum")]).to_pylist()
    return {row["tier"]: row["count_sum"] for row in found}


def is_unaudited(what: str) -> bool:
    """Whether the name in `Commit.untrusted` is that of records without an identity, which are no doubt."""
    return what.startswith(f"{NOTE_UNAUDITED}/")


def aged(
    untrusted: Mapping[str, int], last_ms: Mapping[str, int], keep_ms: int | None, now_ms: int
) -> tuple[dict[str, int], dict[str, int]]:
    """All doubts, and the counts of unaudited records that are not older than `keep`, with their ages; what
    is of unknown age begins now."""
    ages = {what: last_ms.get(what, now_ms) for what in untrusted}
    if keep_ms is not None:
        ages = {
            what: at_ms for what, at_ms in ages.items() if now_ms - at_ms < keep_ms or not is_unaudited(what)
        }
    return {what: untrusted[what] for what in ages}, ages
