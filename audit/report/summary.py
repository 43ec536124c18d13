"""`summary.json`: the audit's answer for machines. Pure: verdict rows and notes in, one dictionary out.

The schema is a contract (`SUMMARY_VERSION` rises when a key changes its meaning; keys may be added). It is
told in full, with every field's type, by `summary.schema.json` beside this file (made from `document`):

    version         1
    verdict         PROVEN | COUNT_MATCH | UNKNOWN | DUPLICATE | LOSS; the worst wins, which is the last of
                    these. COUNT_MATCH: all is proven but for producers that do not number their records;
                    their counts agree, in which a loss and a duplicate would cancel
    exit_status     0, 1 or 2, as the job ends with: the same of what no standing waiver covers
    sentence        the verdict for a person
    next            what to do now, for a person; "" when nothing is to be done
    counts          acknowledged, seen {tier: distinct records}, missing, duplicates (extra copies),
                    unreported, unknown, explained, in_flight
    losses          [{topic, producer, stream, window_start, sequences [[first, last], ...], count,
                      lost_between [tier, tier], places [...], waived}]   `sequences` is empty for a producer
                    that only counts; `places` tell where some of them were last had (`neighbours`); `waived`
                    only where a standing waiver covers it
    duplicates      [{topic, producer, stream, window_start, sequences, count (extra copies), tier, waived}]
    windows         {PROVEN | COUNT_MATCH | UNKNOWN | DUPLICATE | LOSS | OPEN: how many}
    open            {windows, acknowledged, in_flight}: of the windows that are not settled, which the verdict
                    does not speak of (but for a loss or duplicate in one); `counts` has their records too
    tiers           [{name, upstream [names]}], in order
    topics          [{topic, verdict, windows, acknowledged, missing, duplicates, in_flight, unreported,
                      unknown, explained, tiers [{tier, seen, missing, duplicates, windows}]}]
    producers       [{topic, producer, published, consumed {tier: records}, missing, duplicates, verdict}]
    late            [{topic, producer, window_start, by_ms, kind}]: the latest first, at most MOST_LATE. Kind
                    `records`: the last record was appended `by_ms` after its window's end; `report`: the
                    window ended `by_ms` ago and its producer has not promised that it is complete
    latency         [{topic, between [tier, tier], windows, p50_ms, p99_ms, max_ms}]: estimates (`latency`)
    content         {compared, not_compared, differs}: windows, where content is audited
    watermarks      {topic: ISO time or null}: everything created before is proven or waived
    watermark_steps_back  [{topic, before, after}]: late data took a proof away; only where it did
    waivers         [{topic, window_start, stream, who, why, at, verdict, stands}]: of a window, or of a
                    stream where window_start is null; `stands` is false once the window has got worse
    revisions       [{topic, producer, window_start, revision, before, after}]
    untrusted       [{what, count, waived, older}]    what was read and could not be believed; `waived` where
                    a standing waiver accepts it
    untrusted_waivers  [{untrusted, count, who, why, at, stands}]: for what has these words in its name; only
                    where there are any. `stands` is false once more of it came
    reasons         [{reason, count}]                 why windows are unknown, the commonest first
    notes           [sentence]                        what else a reader should know; changes no verdict
    unaudited       records without an identity header, {tier: n}
    foreign         [{topic, tier, count}]: records that came into the topic with the identity of another
                    topic's stream; they are not audited
    older           {since, windows, streams, losses, duplicates}: findings that were told for long enough, of
                    before `since` (`reconciliation.horizon`): they are in nothing above, and decide neither
                    verdict nor status; only where there are any. `streams` is how many are in doubt as a
                    whole. `untrusted` has `older` in what decides no more
    at, window_ms   when it was taken (ISO 8601) and the window's length
    run             {records, bytes, seconds, state_bytes, state_files}: what the run read of the clusters
                    (bytes as they lie in their logs), how long it took up to its report, and how large the
                    state is now. Not of what was found, so `job` adds it

`window_start` is ISO 8601 UTC; null where no window can be named (a lost tail). Totals agree with the rows
of `reconciliation.parquet` by construction: both are made from the same verdicts (its rows are those of the
totals and those of `older`). `windows` counts such rows: one for each stream and window.

Called by `job`; read by `html`, the command line and users' scripts.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA, iso_time
from millrace.audit.reconciliation.verdicts import Fold, Verdict, WindowState, status_of
from millrace.audit.report.latency import Latencies
from millrace.audit.report.plain import is_calm, tier_column, tier_names
from millrace.audit.report.reasons import next_step, reasons_of
from millrace.audit.report.sentences import sentence
from millrace.audit.report.tier_states import TierState, tier_state

SUMMARY_VERSION = 1
MOST_LATE = 1000
_BATCH_ROWS = 20_000  # rows that are Python objects at one time
_COLUMNS = [name for name in VERDICT_SCHEMA.names if name not in ("ambiguous", "revision")]
_TIMES = ["topic", "producer", "window_start", "window_start_ms", "window_ms", "detail"]

Tier = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run took, for whoever pays for it."""

    records: int
    bytes: int
    seconds: float
    state_bytes: int
    state_files: int


def summarise(
    rows: pa.Table,
    *,
    tiers: Iterable[Tier],
    at_ms: int,
    window_ms: int,
    untrusted: Mapping[str, int],
    unaudited: Mapping[str, int],
    foreign: Mapping[tuple[str, str], int] | None = None,
    grace_ms: int = 0,
    accepted: Collection[str] = (),
    waived: Collection[tuple[str, int | str]] = (),
    doubted: bool | None = None,
    in_doubt: bool | None = None,
    older: pa.Table | None = None,
    older_untrusted: Collection[str] = (),
    since_ms: int | None = None,
    untrusted_waivers: Sequence[Mapping[str, Any]] = (),
    waivers: Sequence[Mapping[str, Any]] = (),
    watermarks: Mapping[str, str | None] | None = None,
    revisions: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The summary of the verdict rows.

    `tiers` in order, as names or as {"name", "upstream": [names]}; `accepted` those of `untrusted` that are
    waived; `waived` (topic, window's start or stream) what standing waivers cover and `in_doubt` whether
    anything of `untrusted` counts all the same, both for the exit status alone, and `doubted` whether
    anything of it does for the verdict (None: all of it does); `older` the rows that are older than
    `since_ms` (`horizon.split_older`), and `older_untrusted` what is; `waivers`, `untrusted_waivers`,
    `watermarks` and `revisions` as they stand in the summary.
    """
    order = [_tier(each) for each in tiers]
    gathered = _Gathered(order, at_ms, grace_ms, waived)
    gathered.add_all(rows)
    doubted = bool(untrusted) if doubted is None else doubted
    in_doubt = doubted if in_doubt is None else in_doubt
    totals = gathered.totals
    summary: dict[str, Any] = {
        "version": SUMMARY_VERSION,
        "verdict": str(gathered.fold.verdict(doubted)),
        "exit_status": status_of(gathered.unwaived.verdict(in_doubt)),
        "sentence": "",
        "next": "",
        "counts": {
            "acknowledged": totals["acknowledged"],
            "seen": dict(gathered.seen),
            **{name: totals[name] for name in _TOTALS if name != "acknowledged"},
        },
        "losses": gathered.losses,
        "duplicates": gathered.duplicates,
        "windows": dict(sorted(gathered.windows.items())),
        "open": {name: gathered.open[name] for name in ("windows", "acknowledged", "in_flight")},
        "tiers": order,
        "topics": [gathered.topics[topic].told() for topic in sorted(gathered.topics)],
        "producers": [_finished(gathered.producers[key]) for key in sorted(gathered.producers)],
        "late": gathered.late_first(),
        "latency": gathered.latencies.told(),
        "content": {name.replace(" ", "_"): gathered.content[name] for name in _CONTENT},
        "watermarks": dict(watermarks or {}),
        "waivers": [dict(each) for each in waivers],
        "revisions": [dict(each) for each in revisions],
        "untrusted": [
            {"what": what, "count": count}
            | ({"waived": True} if what in accepted else {})
            | ({"older": True} if what in older_untrusted else {})
            for what, count in sorted(untrusted.items())
        ],
        "reasons": [{"reason": reason, "count": count} for reason, count in gathered.reasons.most_common()],
        "notes": list(notes),
        "unaudited": dict(sorted(unaudited.items())),
        "foreign": [
            {"topic": topic, "tier": tier, "count": count}
            for (topic, tier), count in sorted((foreign or {}).items())
        ],
        "at": iso_time(at_ms),
        "window_ms": window_ms,
    }
    if older is not None and older.num_rows:
        past = _Gathered(order, at_ms, grace_ms, waived)
        past.add_all(older)
        summary["older"] = {
            "since": iso_time(since_ms),
            "windows": dict(sorted(past.windows.items())),
            "streams": older["window_start_ms"].null_count,
            "losses": past.losses,
            "duplicates": past.duplicates,
        }
    if untrusted_waivers:
        summary["untrusted_waivers"] = [dict(each) for each in untrusted_waivers]
    summary["sentence"] = sentence(summary)
    summary["next"] = next_step(summary)
    return summary


_TOTALS = {
    "acknowledged": "published",
    "missing": "missing",
    "duplicates": "duplicates",
    "unreported": "unreported",
    "unknown": "unknown",
    "explained": "explained",
    "in_flight": "in_flight",
}
_CONTENT = ("compared", "not compared", "differs")


def _tier(tier: Tier) -> dict[str, Any]:
    if isinstance(tier, str):
        return {"name": tier, "upstream": []}
    return {"name": tier["name"], "upstream": list(tier.get("upstream", ()))}


class _Gathered:
    """Everything that one walk over the rows adds up."""

    def __init__(
        self,
        tiers: Sequence[Mapping[str, Any]],
        at_ms: int,
        grace_ms: int,
        waived: Collection[tuple[str, int | str]] = (),
    ) -> None:
        self._at_ms, self._grace_ms, self._waived = at_ms, grace_ms, waived
        self._tiers = [tier["name"] for tier in tiers]
        self.totals: Counter[str] = Counter()
        self.seen: Counter[str] = Counter(dict.fromkeys(self._tiers, 0))
        self.windows: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.content: Counter[str] = Counter()
        self.losses: list[dict[str, Any]] = []
        self.duplicates: list[dict[str, Any]] = []
        self.producers: dict[tuple[str, str], dict[str, Any]] = {}
        self.topics: dict[str, _Topic] = {}
        self.latencies = Latencies({tier["name"]: tier["upstream"] for tier in tiers})
        self.fold, self.unwaived = Fold(), Fold()
        self._late: list[tuple[int, int, dict[str, Any]]] = []
        self._late_number = 0

    def add_all(self, rows: pa.Table) -> None:
        rows = rows.select(_COLUMNS)
        calm = is_calm(rows)
        self.add_calm(rows.filter(calm))
        for batch in rows.filter(pc.invert(calm)).to_batches(max_chunksize=_BATCH_ROWS):
            for row in batch.to_pylist():
                self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        start_ms = row["window_start_ms"]
        is_waived = (row["topic"], row["stream"] if start_ms is None else start_ms) in self._waived
        verdict, is_open = Verdict[row["verdict"]], row["state"] == WindowState.OPEN
        detail = {} if row["detail"] == "{}" else json.loads(row["detail"])
        seen = dict(row["seen"])
        for name, column in _TOTALS.items():
            self.totals[name] += row[column]
        self.seen.update(seen)
        marked = {"waived": True} if is_waived else {}
        self.losses.extend(each | marked for each in _losses(row, detail))
        self.duplicates.extend(each | marked for each in _duplicates(row, detail))
        _add_producer(self.producers, row, verdict)
        if verdict not in (Verdict.PROVEN, Verdict.COUNT_MATCH):
            self.reasons.update(reasons_of(detail))
        topic = self._topic(row["topic"])
        topic.add(row, detail, seen, "OPEN" if is_open else str(verdict))
        if row["window_start"] is not None:
            self.windows["OPEN" if is_open else str(verdict)] += 1
            self._note_lateness(row, detail)
        if row["content"]:
            self.content[row["content"]] += 1
        if "append_ms" in detail:
            self.latencies.add(row["topic"], detail["append_ms"])
        if is_open:
            self.open.update(windows=1, acknowledged=row["published"], in_flight=row["in_flight"])
        self.fold.add(verdict, row["state"])
        self.unwaived.add(Verdict.PROVEN if is_waived else verdict, row["state"])
        topic.fold.add(verdict, row["state"])

    def add_calm(self, rows: pa.Table) -> None:
        """Rows that only count (`is_calm`), summed by Arrow."""
        tiers = tier_names(rows, self._tiers)
        sums = [(column, "sum") for column in _TOTALS.values()]
        for group in rows.group_by(["topic", "verdict"]).aggregate([*sums, ("topic", "count")]).to_pylist():
            counts = {name: group[f"{column}_sum"] for name, column in _TOTALS.items()}
            verdict, number = Verdict[group["verdict"]], group["topic_count"]
            self.totals.update(counts)
            self.windows[str(verdict)] += number
            self._topic(group["topic"]).add_counts(counts, verdict, number)
            for fold in (self.fold, self.unwaived):
                fold.add(verdict, WindowState.SETTLED, number)
        for tier in tiers:
            here = pa.table(
                {"topic": rows["topic"], "state": rows["verdict"], "seen": tier_column(rows, tier, "seen")}
            )
            here = here.filter(pc.is_valid(here["seen"]))
            grouped = here.group_by(["topic", "state"]).aggregate([("seen", "sum"), ("seen", "count")])
            for group in grouped.to_pylist():
                self.seen[tier] += group["seen_sum"]
                self._topic(group["topic"]).add_tier(
                    tier, group["seen_sum"], TierState(group["state"]), group["seen_count"]
                )
        self._add_calm_producers(rows, tiers)
        for word in rows["content"].filter(pc.not_equal(rows["content"], "")).value_counts().to_pylist():
            self.content[word["values"]] += word["counts"]
        timed = rows.filter(pc.match_substring(rows["detail"], '"append_ms"'))
        for batch in timed.select(_TIMES).to_batches(max_chunksize=_BATCH_ROWS):
            for row in batch.to_pylist():
                detail = json.loads(row["detail"])
                self.latencies.add(row["topic"], detail["append_ms"])
                self._note_lateness(row, detail)

    def _add_calm_producers(self, rows: pa.Table, tiers: Sequence[str]) -> None:
        columns: dict[str, Any] = {name: rows[name] for name in ("topic", "producer", "published")}
        columns["counted"] = pc.equal(rows["verdict"], str(Verdict.COUNT_MATCH))
        columns |= {f"tier.{number}": tier_column(rows, tier) for number, tier in enumerate(tiers)}
        sums = ["published", *(f"tier.{number}" for number in range(len(tiers)))]
        grouped = pa.table(columns).group_by(["topic", "producer"])
        for group in grouped.aggregate([*((name, "sum") for name in sums), ("counted", "max")]).to_pylist():
            consumed = {tier: group[f"tier.{number}_sum"] for number, tier in enumerate(tiers)}
            told = {
                "topic": group["topic"],
                "producer": group["producer"],
                "published": group["published_sum"],
                "consumed": [(tier, count) for tier, count in consumed.items() if count is not None],
                "missing": 0,
                "duplicates": 0,
                "state": WindowState.SETTLED,
            }
            verdict = Verdict.COUNT_MATCH if group["counted_max"] else Verdict.PROVEN
            _add_producer(self.producers, told, verdict)

    def _topic(self, name: str) -> _Topic:
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = _Topic(name, self._tiers)
        return topic

    def _note_lateness(self, row: Mapping[str, Any], detail: Mapping[str, Any]) -> None:
        end_ms = row["window_start_ms"] + row["window_ms"]
        appended = detail.get("append_ms", {})
        first_tier = next((tier for tier in appended), None)
        if first_tier is not None and appended[first_tier][1] - end_ms > self._grace_ms:
            self._add_late(row, appended[first_tier][1] - end_ms, "records")
        if detail.get("unpromised") and self._at_ms - end_ms > self._grace_ms:
            self._add_late(row, self._at_ms - end_ms, "report")

    def _add_late(self, row: Mapping[str, Any], by_ms: int, kind: str) -> None:
        self._late_number += 1
        told = {
            "topic": row["topic"],
            "producer": row["producer"],
            "window_start": row["window_start"],
            "by_ms": by_ms,
            "kind": kind,
        }
        keep = heapq.heappush if len(self._late) < MOST_LATE else heapq.heappushpop
        keep(self._late, (by_ms, -self._late_number, told))

    def late_first(self) -> list[dict[str, Any]]:
        return [told for *_, told in sorted(self._late, key=lambda each: each[:2], reverse=True)]


class _Topic:
    """One topic's part of the summary, with each tier's."""

    def __init__(self, topic: str, tiers: Iterable[str]) -> None:
        self.topic = topic
        self.fold = Fold()
        self._counts: Counter[str] = Counter()
        self._windows: Counter[str] = Counter()
        self._tiers: dict[str, tuple[Counter[str], Counter[str]]] = {}
        self._order = list(tiers)

    def add(
        self, row: Mapping[str, Any], detail: Mapping[str, Any], seen: Mapping[str, int], word: str
    ) -> None:
        for name, column in _TOTALS.items():
            self._counts[name] += row[column]
        if row["window_start"] is not None:
            self._windows[word] += 1
        for tier, count in seen.items():
            self.add_tier(tier, count, tier_state(row, detail, tier))

    def add_counts(self, counts: Mapping[str, int], verdict: Verdict, number: int) -> None:
        """So many settled windows of one verdict."""
        self._counts.update(counts)
        self._windows[str(verdict)] += number
        self.fold.add(verdict, WindowState.SETTLED, number)

    def add_tier(self, tier: str, seen: int, state: TierState, number: int = 1) -> None:
        """So many windows that look the same in a tier."""
        held = self._tiers.get(tier)
        if held is None:
            held = self._tiers[tier] = (Counter(), Counter())
        counts, windows = held
        counts["seen"] += seen
        counts["missing"] += state.missing
        counts["duplicates"] += state.duplicates
        windows[state.state] += number

    def told(self) -> dict[str, Any]:
        ordered = [*self._order, *sorted(set(self._tiers) - set(self._order))]
        return {
            "topic": self.topic,
            "verdict": str(self.fold.verdict()),
            "windows": dict(sorted(self._windows.items())),
            **{name: self._counts[name] for name in _TOTALS},
            "tiers": [
                {
                    "tier": tier,
                    **{name: self._tiers[tier][0][name] for name in ("seen", "missing", "duplicates")},
                    "windows": dict(sorted(self._tiers[tier][1].items())),
                }
                for tier in ordered
                if tier in self._tiers
            ],
        }


def _losses(row: Mapping[str, Any], detail: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for lost in detail.get("missing", ()):
        sequences = lost["sequences"]
        yield _named(row, sequences, sum(last - first + 1 for first, last in sequences)) | {
            "lost_between": lost["between"],
            "places": lost.get("places", []),
        }
    for lost in detail.get("missing_count", ()):
        yield _named(row, [], lost["count"]) | {"lost_between": lost["between"], "places": []}


def _duplicates(row: Mapping[str, Any], detail: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    ranges = detail.get("duplicates", {})
    for tier, copies in detail.get("extra_copies", {}).items():
        yield _named(row, ranges.get(tier, []), copies) | {"tier": tier}


def _named(row: Mapping[str, Any], sequences: list[list[int]], count: int) -> dict[str, Any]:
    return {
        "topic": row["topic"],
        "producer": row["producer"],
        "stream": row["stream"],
        "window_start": row["window_start"],
        "sequences": sequences,
        "count": count,
    }


def _add_producer(
    producers: dict[tuple[str, str], dict[str, Any]], row: Mapping[str, Any], verdict: Verdict
) -> None:
    held = producers.setdefault(
        (row["topic"], row["producer"]),
        {
            "topic": row["topic"],
            "producer": row["producer"],
            "published": 0,
            "consumed": Counter(),
            "missing": 0,
            "duplicates": 0,
            "fold": Fold(),
        },
    )
    for name in ("published", "missing", "duplicates"):
        held[name] += row[name]
    held["consumed"].update(dict(row["consumed"]))
    held["fold"].add(verdict, row["state"])


def _finished(producer: dict[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in producer.items() if name != "fold"}
    return told | {"consumed": dict(producer["consumed"]), "verdict": str(producer["fold"].verdict())}


def exit_status(summary: Mapping[str, Any]) -> int:
    """0 all settled windows proven (or matched by count), 1 loss or duplicate, 2 unknown or unreported."""
    return int(summary["exit_status"])
