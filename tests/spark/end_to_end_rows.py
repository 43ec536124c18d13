"""Rows of the reconciliation and of the truth in one shape, so that they can be compared."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.spark.end_to_end_truth import Key, Row, Truth
from tests.spark.end_to_end_world import AGGREGATE, ALIASES

RANKS = ("PROVEN", "COUNT_MATCH", "UNKNOWN", "DUPLICATE", "LOSS")


def status_of(rows: Iterable[Row]) -> int:
    """0 all settled windows proven, 1 loss or duplicate, 2 unknown or nothing settled."""
    worst, settled = 0, False
    for row in rows:
        settled |= row.state == "SETTLED"
        if row.state == "SETTLED" or row.verdict in ("LOSS", "DUPLICATE"):
            worst = max(worst, RANKS.index(row.verdict))
    worst = worst if settled else max(worst, RANKS.index("UNKNOWN"))
    return {2: 2, 3: 1, 4: 1}.get(worst, 0)


def numbers(ranges: Iterable[Iterable[int]]) -> set[int]:
    return {number for first, last in ranges for number in range(first, last + 1)}


def iso(start_ms: int | None) -> str | None:
    if start_ms is None:
        return None
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start_ms // 1000))


def name_of(row: dict[str, Any]) -> str:
    """What the truth calls the stream of a row, or of a finding in the summary."""
    return ALIASES.get(row["stream"], str(row["producer"]))


def told(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the reconciliation in plain sets."""
    detail = json.loads(row["detail"])
    return {
        "verdict": row["verdict"],
        "state": row["state"],
        "published": row["published"],
        "seen": {tier: count for tier, count in row["seen"] if count},
        "missing": {tuple(e["between"]): numbers(e["sequences"]) for e in detail.get("missing", ())},
        "missing_count": {tuple(e["between"]): e["count"] for e in detail.get("missing_count", ())},
        "in_flight": {tuple(e["between"]): numbers(e["sequences"]) for e in detail.get("in_flight", ())},
        "duplicates": {tier: numbers(each) for tier, each in detail.get("duplicates", {}).items()},
        "extra_copies": detail.get("extra_copies", {}),
        "unreported": numbers(detail.get("unreported", ())),
        "unknown": numbers(detail.get("unknown", ())),
        "explained": {cause: numbers(each) for cause, each in detail.get("explained", {}).items()},
        "content_differs": row["content"] == "differs",
    }


def wanted(row: Row) -> dict[str, Any]:
    return {
        "verdict": row.verdict,
        "state": row.state,
        "published": row.published,
        "seen": {tier: count for tier, count in row.seen.items() if count},
        "missing": row.missing,
        "missing_count": row.missing_count,
        "in_flight": row.in_flight,
        "duplicates": row.duplicates,
        "extra_copies": row.extra_copies,
        "unreported": row.unreported,
        "unknown": row.unknown,
        "explained": row.explained,
        "content_differs": row.content_differs,
    }


def kinds_of(key: Key, row: Row, truth: Truth) -> Counter[str]:
    """What a row had to name, as `test_end_to_end` counts it."""
    producer, start_ms = key
    stream = truth.streams[producer]
    on_the_hop = any(hop[1] == AGGREGATE for hop in row.missing)
    settled = row.state == "SETTLED"
    return +Counter(
        {
            "loss on the hop": on_the_hop,
            "loss in the group": any(hop[1].startswith("group:") for hop in row.missing),
            "duplicate in the aggregate": AGGREGATE in row.duplicates,
            "duplicate at the source": "ewr" in row.duplicates,
            "in flight": bool(row.in_flight),
            "unreported": bool(row.unreported),
            "unknown": bool(row.unknown) and start_ms is not None,
            "explained": bool(row.explained),
            "content": row.content_differs,
            "count short": bool(row.missing_count),
            "count over": bool(row.extra_copies) and not row.duplicates,
            "count match": row.verdict == "COUNT_MATCH",
            "proven": row.verdict == "PROVEN" and settled,
            "open": row.state == "OPEN",
            "fell silent": start_ms is None and stream.silent,
            "loss behind a foreign mirror": truth.foreign and on_the_hop,
            "counts lost": producer.startswith("untold") and bool(row.unreported),
            "clock ahead": stream.ahead and row.state == "OPEN",
            "clock behind": producer.startswith("behind") and settled,
            "two names": truth.is_doubted(stream),
        }
    )
