"""What rows of the reconciliation come to, told by `summary` when all of them are in it. Pure.

Rows come in parts, and nothing depends on how they are cut or in which order they come: what is named is in
the order of its rows' keys. Rows that only count are summed by Arrow; the others are walked. When everything
is lost, no list of names helps anybody: the greatest `MOST_NAMED` are named, and the others summed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.verdict_rows import VERDICT_SCHEMA
from millrace.audit.reconciliation.verdicts import DIFFERS, GOOD, OPEN, Fold, Verdict, WindowState
from millrace.audit.report.append_times import timed_rows
from millrace.audit.report.latency import Latencies
from millrace.audit.report.plain import is_calm, tier_column, tier_names
from millrace.audit.report.reasons import CONTENT, reasons_of
from millrace.audit.report.tier_states import TierState, tier_state

MOST_LATE = 1000
MOST_NAMED = 10_000  # losses, and as many duplicates
TOTALS = {
    "acknowledged": "published",
    "missing": "missing",
    "duplicates": "duplicates",
    "unreported": "unreported",
    "unknown": "unknown",
    "explained": "explained",
    "in_flight": "in_flight",
}
"""{name in the summary: column of the rows}"""

PART_ROWS = 1 << 20
_BATCH_ROWS = 20_000  # rows that are Python objects at one time
_COLUMNS = [name for name in VERDICT_SCHEMA.names if name not in ("ambiguous", "revision")]
_TIMES = ["topic", "producer", "stream", "window_start", "window_start_ms", "window_ms", "detail"]

Target = tuple[str, int | str]
"""(topic, start of the window or id of the stream)"""

SortKey = tuple[str, str, str, bool, int, int]
"""Where something stands: topic, producer, stream, the stream's own row after its windows, start, number
within the row."""

Named = tuple[SortKey, Target, dict[str, Any]]


class Tally:
    """Everything that one walk over rows adds up. `tiers` as in the summary."""

    def __init__(self, tiers: Sequence[Mapping[str, Any]], at_ms: int, grace_ms: int) -> None:
        self._at_ms, self._grace_ms = at_ms, grace_ms
        self._tiers = [tier["name"] for tier in tiers]
        self.totals: Counter[str] = Counter()
        self.seen: Counter[str] = Counter(dict.fromkeys(self._tiers, 0))
        self.windows: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.content: Counter[str] = Counter()
        self.latencies = Latencies({tier["name"]: tier["upstream"] for tier in tiers})
        self.fold = Fold()
        self.own = 0  # rows without a window
        self.topics: dict[str, TopicTally] = {}
        self._calm = Fold()
        self._targets: dict[Target, Fold] = {}
        self._losses = _Findings("lost_between")
        self._duplicates = _Findings("tier")
        self._differing = _Findings("where")
        self._producers: dict[tuple[str, str], _Producer] = {}
        self._reasons: dict[str, tuple[int, SortKey]] = {}
        self._late: list[tuple[int, SortKey, dict[str, Any]]] = []
        self._late_windows: Counter[tuple[str, str]] = Counter()

    def losses(self, waived: Collection[Target]) -> list[dict[str, Any]]:
        return self._losses.told(waived)

    def duplicates(self, waived: Collection[Target]) -> list[dict[str, Any]]:
        return self._duplicates.told(waived)

    def differing(self, waived: Collection[Target]) -> list[dict[str, Any]]:
        return self._differing.told(waived)

    def more(self) -> dict[str, list[dict[str, Any]]]:
        """`losses_more`, `duplicates_more` and `differing_more` of the summary, where there are any."""
        found = {
            "losses_more": self._losses.more(),
            "duplicates_more": self._duplicates.more(),
            "differing_more": self._differing.more(),
        }
        return {name: told for name, told in found.items() if told}

    def unwaived(self, waived: Collection[Target]) -> Fold:
        """The verdict of all rows but for what a standing waiver covers, which is as good as proven."""
        found = Fold(self._calm.worst, self._calm.settled)
        for target, fold in self._targets.items():
            found.join(Fold(settled=fold.settled) if target in waived else fold)
        return found

    def reasons(self) -> list[tuple[str, int]]:
        """The commonest first; of equally common ones that of the first row."""
        ordered = sorted(self._reasons.items(), key=lambda each: (-each[1][0], each[1][1]))
        return [(reason, count) for reason, (count, _) in ordered]

    def late_first(self) -> list[dict[str, Any]]:
        self._keep_latest(0)
        return [told for *_, told in self._late[:MOST_LATE]]

    def late_more(self) -> list[dict[str, Any]]:
        """[{topic, kind, windows}] of those that are not among the latest."""
        named = Counter((each["topic"], each["kind"]) for each in self.late_first())
        more = sorted((self._late_windows - named).items())
        return [{"topic": topic, "kind": kind, "windows": windows} for (topic, kind), windows in more]

    def producers(self) -> list[dict[str, Any]]:
        return [
            {"topic": topic, "producer": producer, **self._producers[topic, producer].told()}
            for topic, producer in sorted(self._producers)
        ]

    def add_all(self, rows: Rows) -> None:
        """Part by part: what is made of one on the way need not be held of all."""
        for part in parts_of(rows, _COLUMNS):
            for first in range(0, part.num_rows, PART_ROWS):
                self._add_part(part.slice(first, PART_ROWS))

    def proven_sums(self) -> dict[str, Any]:
        """What `join` adds to another tally, as JSON; of rows that were settled and proven, all of them."""
        self._keep_latest(MOST_LATE)
        return {
            "totals": dict(self.totals),
            "seen": dict(self.seen),
            "windows": self.windows[str(Verdict.PROVEN)],
            "topics": [topic.proven_sums() for topic in self.topics.values()],
            "producers": [
                {"topic": topic, "producer": producer, **each.sums()}
                for (topic, producer), each in self._producers.items()
            ],
            "latencies": self.latencies.sums(),
            "late": [[by_ms, list(key), told] for by_ms, key, told in self._late],
            "late_windows": [[*key, count] for key, count in self._late_windows.items()],
        }

    def join(self, sums: Mapping[str, Any]) -> None:
        """Add rows that another tally has summed up (`proven_sums`)."""
        proven, count = Verdict.PROVEN, sums["windows"]
        if not count:
            return
        self.totals.update(sums["totals"])
        self.seen.update(sums["seen"])
        self.windows[str(proven)] += count
        for fold in (self.fold, self._calm):
            fold.add(proven, WindowState.SETTLED, count)
        for topic in sums["topics"]:
            self._topic(topic["topic"]).join(topic)
        for each in sums["producers"]:
            told = {**each, "missing": 0, "duplicates": 0, "state": WindowState.SETTLED}
            self._producer(each).add(told, proven)
        self.latencies.join(sums["latencies"])
        for by_ms, key, told in sums["late"]:
            self._late.append((by_ms, tuple(key), told))
        for topic, kind, windows in sums["late_windows"]:
            self._late_windows[topic, kind] += windows
        self._keep_latest(2 * MOST_LATE)

    def _add_part(self, part: pa.Table) -> None:
        calm = is_calm(part)
        self._add_calm(part.filter(calm))
        self.own += part["window_start_ms"].null_count
        for batch in part.filter(pc.invert(calm)).to_batches(max_chunksize=_BATCH_ROWS):
            for row in batch.to_pylist():
                self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        start_ms = row["window_start_ms"]
        target = (row["topic"], row["stream"] if start_ms is None else start_ms)
        verdict, is_open = Verdict[row["verdict"]], row["state"] == WindowState.OPEN
        detail = {} if row["detail"] == "{}" else json.loads(row["detail"])
        seen = dict(row["seen"])
        for name, column in TOTALS.items():
            self.totals[name] += row[column]
        self.seen.update(seen)
        for named, found in (
            (self._losses, _losses(row, detail)),
            (self._duplicates, _duplicates(row, detail)),
            (self._differing, _differing(row, detail)),
        ):
            for number, each in enumerate(found):
                named.add(_sort_key(row, number), target, each)
        self._producer(row).add(row, verdict)
        if verdict not in (Verdict.PROVEN, Verdict.COUNT_MATCH):
            for number, reason in enumerate(reasons_of(detail)):
                self._add_reason(reason, _sort_key(row, number))
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
        for fold in (self.fold, self._targets.setdefault(target, Fold()), topic.fold):
            fold.add(verdict, row["state"])

    def _add_calm(self, rows: pa.Table) -> None:
        """Rows that only count (`is_calm`), summed by Arrow."""
        if not rows.num_rows:
            return
        tiers = tier_names(rows, self._tiers)
        sums = [(column, "sum") for column in TOTALS.values()]
        for group in rows.group_by(["topic", "verdict"]).aggregate([*sums, ("topic", "count")]).to_pylist():
            counts = {name: group[f"{column}_sum"] for name, column in TOTALS.items()}
            verdict, number = Verdict[group["verdict"]], group["topic_count"]
            self.totals.update(counts)
            self.windows[str(verdict)] += number
            self._topic(group["topic"]).add_counts(counts, verdict, number)
            for fold in (self.fold, self._calm):
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
        for timed in timed_rows(rows.select(_TIMES), tiers):
            self.latencies.add_rows(timed.rows["topic"], timed.first, timed.last)
            ends_ms = pc.add(timed.rows["window_start_ms"], timed.rows["window_ms"])
            is_late = pc.greater(pc.subtract(next(iter(timed.last.values())), ends_ms), self._grace_ms)
            for batch in timed.rows.filter(pc.or_(is_late, timed.unpromised)).to_batches(_BATCH_ROWS):
                for row in batch.to_pylist():
                    self._note_lateness(row, json.loads(row["detail"]))

    def _add_calm_producers(self, rows: pa.Table, tiers: Sequence[str]) -> None:
        columns: dict[str, Any] = {name: rows[name] for name in ("topic", "producer", "published")}
        columns["counted"] = pc.equal(rows["verdict"], str(Verdict.COUNT_MATCH))
        columns |= {f"tier.{number}": tier_column(rows, tier) for number, tier in enumerate(tiers)}
        sums = ["published", *(f"tier.{number}" for number in range(len(tiers)))]
        grouped = pa.table(columns).group_by(["topic", "producer"])
        for group in grouped.aggregate([*((name, "sum") for name in sums), ("counted", "max")]).to_pylist():
            consumed = {tier: group[f"tier.{number}_sum"] for number, tier in enumerate(tiers)}
            told = {
                "published": group["published_sum"],
                "consumed": [(tier, count) for tier, count in consumed.items() if count is not None],
                "missing": 0,
                "duplicates": 0,
                "state": WindowState.SETTLED,
            }
            verdict = Verdict.COUNT_MATCH if group["counted_max"] else Verdict.PROVEN
            self._producer(group).add(told, verdict)

    def _producer(self, row: Mapping[str, Any]) -> _Producer:
        return self._producers.setdefault((row["topic"], row["producer"]), _Producer())

    def _topic(self, name: str) -> TopicTally:
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = TopicTally(name, self._tiers)
        return topic

    def _add_reason(self, reason: str, key: SortKey) -> None:
        count, first = self._reasons.get(reason, (0, key))
        self._reasons[reason] = (count + 1, min(first, key))

    def _note_lateness(self, row: Mapping[str, Any], detail: Mapping[str, Any]) -> None:
        end_ms = row["window_start_ms"] + row["window_ms"]
        appended = detail.get("append_ms", {})
        first_tier = next((tier for tier in appended), None)
        if first_tier is not None and appended[first_tier][1] - end_ms > self._grace_ms:
            self._add_late(row, appended[first_tier][1] - end_ms, "records")
        if detail.get("unpromised") and self._at_ms - end_ms > self._grace_ms:
            self._add_late(row, self._at_ms - end_ms, "report")

    def _add_late(self, row: Mapping[str, Any], by_ms: int, kind: str) -> None:
        told = {name: row[name] for name in ("topic", "producer", "window_start")}
        told |= {"by_ms": by_ms, "kind": kind}
        self._late_windows[row["topic"], kind] += 1
        self._late.append((-by_ms, _sort_key(row, int(kind == "report")), told))
        self._keep_latest(2 * MOST_LATE)

    def _keep_latest(self, least: int) -> None:
        """Put them in order, once there are more than so many, and forget the others."""
        if len(self._late) > least:
            self._late.sort(key=lambda each: each[:2])
            del self._late[MOST_LATE:]


class TopicTally:
    """One topic's part, with each tier's."""

    def __init__(self, topic: str, tiers: Iterable[str]) -> None:
        self.topic = topic
        self.fold = Fold()
        self._counts: Counter[str] = Counter()
        self._windows: Counter[str] = Counter()
        self._doubts: Counter[tuple[int, str]] = Counter()
        """{(start, verdict): settled windows that are not proven}"""
        self._tiers: dict[str, tuple[Counter[str], Counter[str]]] = {}
        self._order = list(tiers)

    def add(
        self, row: Mapping[str, Any], detail: Mapping[str, Any], seen: Mapping[str, int], word: str
    ) -> None:
        for name, column in TOTALS.items():
            self._counts[name] += row[column]
        if row["window_start"] is not None:
            self._windows[word] += 1
            if word not in (*GOOD, OPEN):
                self._doubts[row["window_start_ms"], word] += 1
        for tier, count in seen.items():
            self.add_tier(tier, count, tier_state(row, detail, tier))

    def add_counts(self, counts: Mapping[str, int], verdict: Verdict, number: int) -> None:
        """So many settled windows of one verdict."""
        self._counts.update(counts)
        self._windows[str(verdict)] += number
        self.fold.add(verdict, WindowState.SETTLED, number)

    def add_tier(self, tier: str, seen: int, state: TierState, number: int = 1) -> None:
        """So many windows that look the same in a tier."""
        counts, windows = self._tier(tier)
        counts["seen"] += seen
        counts["missing"] += state.missing
        counts["duplicates"] += state.duplicates
        windows[state.state] += number

    def proven_sums(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "counts": dict(self._counts),
            "windows": self._windows[str(Verdict.PROVEN)],
            "tiers": [
                [tier, counts["seen"], sum(words.values())] for tier, (counts, words) in self._tiers.items()
            ],
        }

    def join(self, sums: Mapping[str, Any]) -> None:
        """Add rows of the topic that another tally has summed up (`proven_sums`)."""
        self.add_counts(sums["counts"], Verdict.PROVEN, sums["windows"])
        for tier, seen, windows in sums["tiers"]:
            self.add_tier(tier, seen, TierState(str(Verdict.PROVEN)), windows)

    def told(self, waived: Collection[Target]) -> dict[str, Any]:
        """As it stands in the summary."""
        accepted: Counter[str] = Counter()
        for (start_ms, word), number in self._doubts.items():
            if (self.topic, start_ms) in waived:
                accepted[word] += number
        ordered = [*self._order, *sorted(set(self._tiers) - set(self._order))]
        return {
            "topic": self.topic,
            "verdict": str(self.fold.verdict()),
            "windows": dict(sorted(self._windows.items())),
            **({"waived": dict(sorted(accepted.items()))} if accepted else {}),
            **{name: self._counts[name] for name in TOTALS},
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

    def _tier(self, tier: str) -> tuple[Counter[str], Counter[str]]:
        return self._tiers.setdefault(tier, (Counter(), Counter()))


class _Producer:
    """One producer of a topic."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._consumed: Counter[str] = Counter()
        self._fold = Fold()

    def add(self, row: Mapping[str, Any], verdict: Verdict) -> None:
        self._counts.update({name: row[name] for name in ("published", "missing", "duplicates")})
        self._consumed.update(dict(row["consumed"]))
        self._fold.add(verdict, row["state"])

    def sums(self) -> dict[str, Any]:
        return {"published": self._counts["published"], "consumed": list(self._consumed.items())}

    def told(self) -> dict[str, Any]:
        return {
            "published": self._counts["published"],
            "consumed": dict(self._consumed),
            "missing": self._counts["missing"],
            "duplicates": self._counts["duplicates"],
            "verdict": str(self._fold.verdict()),
        }


def _sort_key(row: Mapping[str, Any], number: int) -> SortKey:
    start_ms = row["window_start_ms"]
    return (row["topic"], row["producer"], row["stream"], start_ms is None, start_ms or 0, number)


class _Findings:
    """Losses, duplicates or windows with other content by name: those of most records, where that is known;
    `where` is the field that says between or in which tiers, by which the others are summed."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._found: list[Named] = []
        self._others: dict[tuple[str, str | tuple[str, ...]], tuple[int, int | None]] = {}

    def add(self, key: SortKey, target: Target, told: dict[str, Any]) -> None:
        self._found.append((key, target, told))
        self._keep_greatest(2 * MOST_NAMED)

    def told(self, waived: Collection[Target]) -> list[dict[str, Any]]:
        """In the order of their rows."""
        self._keep_greatest(MOST_NAMED)
        return [
            told | {"waived": True} if target in waived else told
            for _, target, told in sorted(self._found, key=lambda each: each[0])
        ]

    def more(self) -> list[dict[str, Any]]:
        """[{topic, lost_between, tier or where, findings, count}] of those that are not named."""
        self._keep_greatest(MOST_NAMED)
        return [
            {"topic": topic, self._where: _as_told(where), "findings": findings}
            | ({} if count is None else {"count": count})
            for (topic, where), (findings, count) in sorted(self._others.items(), key=lambda each: each[0])
        ]

    def _keep_greatest(self, most: int) -> None:
        if len(self._found) <= most:
            return
        self._found.sort(key=lambda each: (-each[2].get("count", 0), each[0]))
        for _, _, told in self._found[MOST_NAMED:]:
            where = told[self._where]
            key = (told["topic"], tuple(where) if isinstance(where, list) else where)
            findings, count = self._others.get(key, (0, 0 if "count" in told else None))
            self._others[key] = (findings + 1, None if count is None else count + told["count"])
        del self._found[MOST_NAMED:]


def _as_told(where: str | tuple[str, ...]) -> str | list[str]:
    return where if isinstance(where, str) else list(where)


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


def _differing(row: Mapping[str, Any], detail: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of how many records the content differs, and of which, sums do not tell."""
    if row["content"] == DIFFERS:
        found = {name: row[name] for name in ("topic", "producer", "stream", "window_start")}
        yield found | {"where": [each for each in detail.get("reasons", ()) if each.startswith(CONTENT)]}


def _named(row: Mapping[str, Any], sequences: list[list[int]], count: int) -> dict[str, Any]:
    return {
        "topic": row["topic"],
        "producer": row["producer"],
        "stream": row["stream"],
        "window_start": row["window_start"],
        "sequences": sequences,
        "count": count,
    }
