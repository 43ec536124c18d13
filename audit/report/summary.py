"""`summary.json`: the audit's answer for machines. Pure: verdict rows and notes in, one dictionary out.

The schema is a contract (`SUMMARY_VERSION` rises when a key changes its meaning; keys may be added):

    version         1
    verdict         PROVEN | COUNT_MATCH | UNKNOWN | DUPLICATE | LOSS; the worst wins, which is the last of
                    these. COUNT_MATCH: all is proven but for producers that do not number their records;
                    their counts agree, in which a loss and a duplicate would cancel
    sentence        the verdict for a person
    counts          acknowledged, seen {tier: distinct records}, missing, duplicates (extra copies),
                    unreported, unknown, explained, in_flight
    losses          [{topic, producer, stream, window_start, sequences [[first, last], ...], count,
                      lost_between [tier, tier]}]     `sequences` is empty for a producer that only counts
    duplicates      [{topic, producer, stream, window_start, sequences, count (extra copies), tier}]
    windows         {PROVEN | COUNT_MATCH | UNKNOWN | DUPLICATE | LOSS | OPEN: how many}
    producers       [{topic, producer, published, consumed {tier: records}, missing, duplicates, verdict}]
    untrusted       [{what, count}]                   what was read and could not be believed
    reasons         [{reason, count}]                 why windows are unknown
    unaudited       records without an identity header, {tier: n}
    at, window_ms   when it was taken (ISO 8601) and the window's length

`window_start` is ISO 8601 UTC; null where no window can be named (a lost tail). Totals agree with the rows of
`reconciliation.parquet` by construction: both are made from the same verdicts.

Called by `job`; read by `html`, the command line and users' scripts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from millrace.audit.verdict_rows import iso_time
from millrace.audit.verdicts import Verdict, WindowState

SUMMARY_VERSION = 1


def summarise(
    rows: pa.Table,
    *,
    tiers: Iterable[str],
    at_ms: int,
    window_ms: int,
    untrusted: Mapping[str, int],
    unaudited: Mapping[str, int],
) -> dict[str, Any]:
    """The summary of all verdict rows."""
    totals: Counter[str] = Counter()
    seen: Counter[str] = Counter(dict.fromkeys(tiers, 0))
    windows: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    losses: list[dict[str, Any]] = []
    duplicates: list[dict[str, Any]] = []
    producers: dict[tuple[str, str], dict[str, Any]] = {}
    worst = Verdict.PROVEN
    settled = 0
    for row in rows.to_pylist():
        verdict, is_open = Verdict[row["verdict"]], row["state"] == WindowState.OPEN
        detail = json.loads(row["detail"])
        totals.update({name: row[column] for name, column in _TOTALS.items()})
        seen.update(dict(row["seen"]))
        losses.extend(_losses(row, detail))
        duplicates.extend(_duplicates(row, detail))
        _add_producer(producers, row, verdict)
        if verdict not in (Verdict.PROVEN, Verdict.COUNT_MATCH):
            reasons.update(detail.get("reasons", ()))
        if row["window_start"] is not None:
            windows["OPEN" if is_open else str(verdict)] += 1
        settled += not is_open
        if not is_open or verdict >= Verdict.DUPLICATE:
            worst = max(worst, verdict)
    if settled == 0 or untrusted:
        worst = max(worst, Verdict.UNKNOWN)
    summary: dict[str, Any] = {
        "version": SUMMARY_VERSION,
        "verdict": str(worst),
        "sentence": "",
        "counts": {
            "acknowledged": totals["acknowledged"],
            "seen": dict(seen),
            **{name: totals[name] for name in _TOTALS if name != "acknowledged"},
        },
        "losses": losses,
        "duplicates": duplicates,
        "windows": dict(sorted(windows.items())),
        "producers": [_finished(producers[key]) for key in sorted(producers)],
        "untrusted": [{"what": what, "count": count} for what, count in sorted(untrusted.items())],
        "reasons": [{"reason": reason, "count": count} for reason, count in reasons.most_common()],
        "unaudited": dict(sorted(unaudited.items())),
        "at": iso_time(at_ms),
        "window_ms": window_ms,
    }
    summary["sentence"] = sentence(summary)
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


def _losses(row: Mapping[str, Any], detail: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for lost in detail.get("missing", ()):
        sequences = lost["sequences"]
        yield _named(row, sequences, sum(last - first + 1 for first, last in sequences)) | {
            "lost_between": lost["between"]
        }
    for lost in detail.get("missing_count", ()):
        yield _named(row, [], lost["count"]) | {"lost_between": lost["between"]}


def _duplicates(row: Mapping[str, Any], detail: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
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
            "verdict": Verdict.PROVEN,
        },
    )
    for name in ("published", "missing", "duplicates"):
        held[name] += row[name]
    held["consumed"].update(dict(row["consumed"]))
    if row["state"] != WindowState.OPEN or verdict >= Verdict.DUPLICATE:
        held["verdict"] = max(held["verdict"], verdict)


def _finished(producer: dict[str, Any]) -> dict[str, Any]:
    return producer | {"consumed": dict(producer["consumed"]), "verdict": str(producer["verdict"])}


def sentence(summary: Mapping[str, Any]) -> str:
    """One plain sentence for the verdict."""
    counts = summary["counts"]
    acknowledged = _records(counts["acknowledged"])
    match summary["verdict"]:
        case "PROVEN":
            return f"All {acknowledged} that producers had acknowledged arrived, each exactly once."
        case "COUNT_MATCH":
            return (
                f"As many records arrived as the {acknowledged} that producers had acknowledged, but not all "
                "producers number their records: a loss and a duplicate of one would not show."
            )
        case "LOSS":
            hops = sorted({f"{a} and {b}" for a, b in (loss["lost_between"] for loss in summary["losses"])})
            where = f" between {'; '.join(hops)}" if hops else ""
            copies = counts["duplicates"]
            also = f" {copies:,} extra {_copies(copies)} arrived." if copies else ""
            if not counts["missing"]:
                return f"Records arrived with other content than was sent.{also}"
            lost, all_told = counts["missing"], counts["acknowledged"]
            return f"{lost:,} of {all_told:,} acknowledged records were lost{where}.{also}"
        case "DUPLICATE":
            copies = counts["duplicates"]
            return f"Nothing of {acknowledged} was lost, but {copies:,} extra {_copies(copies)} arrived."
    return _unknown_sentence(summary, acknowledged)


def _unknown_sentence(summary: Mapping[str, Any], acknowledged: str) -> str:
    counts = summary["counts"]
    open_questions = [
        f"{_records(counts[name])} {text}"
        for name, text in (
            ("in_flight", "still on the way"),
            ("unreported", "seen but not reported by a producer"),
            ("explained", "skipped for a known cause"),
            ("unknown", "that cannot be told"),
        )
        if counts[name]
    ]
    if summary["untrusted"]:
        amount = sum(each["count"] for each in summary["untrusted"])
        open_questions.append(f"{amount:,} {'thing' if amount == 1 else 'things'} that could not be trusted")
    if not summary["windows"] and not counts["acknowledged"]:
        return "Nothing is proven: no producer reported and no audited record was seen."
    why = "; ".join(open_questions) or "no window is settled yet, or a producer has not reported"
    return f"No loss was found among {acknowledged}, but not all is proven: {why}."


def _records(count: int) -> str:
    return f"{count:,} {'record' if count == 1 else 'records'}"


def _copies(count: int) -> str:
    return "copy" if count == 1 else "copies"


def exit_status(summary: Mapping[str, Any]) -> int:
    """0 all settled windows proven (or matched by count), 1 loss or duplicate, 2 unknown or unreported."""
    return {"PROVEN": 0, "COUNT_MATCH": 0, "LOSS": 1, "DUPLICATE": 1}.get(summary["verdict"], 2)
