"""A made-up audit in which everything that the report can say is said: all verdicts, several tiers and
topics, hostile names. `rich()` is what tests look at; `many()` is large."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.reconciliation.verdict_rows import Evidence, evident_rows, iso_time
from millrace.audit.reconciliation.verdicts import PRODUCED, Verdict, WindowState, WindowVerdict
from millrace.audit.report.summary import summarise

HOUR_MS = 3_600_000
START_MS = 1_772_409_600_000  # 2026-03-02, a Monday
SCRIPT = "<script>document.title='owned'</script>"
IMAGE = "<img src=x onerror=document.title='owned'>"
ENDING = "</script><!--]]>'\"&"
CONTROL = "cash\x1b[31m\x00\u202edesk@till"
LONG = "warehouse-" + "x" * 10_000
TIERS = [
    {"name": "ewr", "upstream": [PRODUCED]},
    {"name": "jfk", "upstream": [PRODUCED]},
    {"name": "agg", "upstream": ["ewr", "jfk"]},
    {"name": "group:billing", "upstream": ["agg"]},
]
TOPICS = ("orders", "flights", "sensor-readings.celsius.v2")


def row(
    producer: str, window: int, *, topic: str = "orders", count: int = 1000, source: str = "ewr", **more: Any
) -> WindowVerdict:
    """A proven window of one producer; `more` changes it."""
    tiers = {source: count, "agg": count}
    if topic == "orders":
        tiers["group:billing"] = count
    return replace(
        WindowVerdict(
            topic=topic,
            producer=producer,
            stream=_stream(producer, topic),
            window_start_ms=START_MS + window * HOUR_MS,
            window_ms=HOUR_MS,
            state=WindowState.SETTLED,
            verdict=Verdict.PROVEN,
            published=count,
            consumed=tiers,
            seen=tiers,
        ),
        **more,
    )


def without(tier: str, lost: int) -> dict[str, Any]:
    """What the tiers count when one of them and all below it lack some records."""
    counts = {"ewr": 1000, "agg": 1000, "group:billing": 1000}
    below = list(counts)[list(counts).index(tier) :]
    seen = {name: count - (lost if name in below else 0) for name, count in counts.items()}
    return {"consumed": seen, "seen": seen}


def _stream(producer: str, topic: str) -> str:
    return random.Random(f"{producer}/{topic}".encode("utf-8", "replace")).randbytes(8).hex()


def producers(number: int) -> list[str]:
    return [
        f"{name}-{index:02d}@{site}"
        for index in range(-(-number // 8))
        for name in ("till", "web", "app", "api")
        for site in ("ewr", "jfk")
    ][:number]


def rich_verdicts(number: int, seed: int = 7) -> Iterator[tuple[WindowVerdict, Evidence]]:
    """Some producers over fourteen days of hours, and every kind of trouble among them."""
    rng = random.Random(seed)
    names = producers(number)
    for topic in TOPICS:
        here = names if topic == "orders" else names[: number // 3]
        for producer in here:
            source = producer.rpartition("@")[2]
            for window in range(336):
                count = 200 + rng.randrange(900)
                start_ms = START_MS + window * HOUR_MS
                lag_ms = rng.randrange(40, 900)
                times = {
                    source: [start_ms + 400, start_ms + HOUR_MS - 300],
                    "agg": [start_ms + 400 + lag_ms, start_ms + HOUR_MS - 300 + lag_ms * 3],
                }
                yield row(producer, window, topic=topic, count=count, source=source), Evidence(times)
    yield from _trouble()


def _trouble() -> Iterator[tuple[WindowVerdict, Evidence]]:
    none = Evidence()
    hop, first_hop = ("ewr", "agg"), (PRODUCED, "jfk")
    for window in (101, 102, 103):
        lost = ((31 + window, 34 + window), (900, 900))
        places = [
            {
                "sequences": [31 + window, 34 + window],
                "held": [{"tier": "ewr", "partition": 3, "offsets": [88_120, 89_119]}],
                "before": {
                    "sequence": 30 + window,
                    "tier": "agg",
                    "partition": 7,
                    "offsets": [410_001, 410_700],
                },
                "after": {
                    "sequence": 35 + window,
                    "tier": "agg",
                    "partition": 7,
                    "offsets": [410_701, 411_250],
                },
            }
        ]
        yield (
            row("ledger-01@ewr", window, verdict=Verdict.LOSS, missing={hop: lost}, **without("agg", 5)),
            Evidence(places={hop: places}),
        )
    yield row("ledger-02@jfk", 210, source="jfk", verdict=Verdict.LOSS, missing={first_hop: ((5, 5),)}), none
    yield (
        row(
            "meter-1@ewr",
            55,
            topic="sensor-readings.celsius.v2",
            verdict=Verdict.LOSS,
            missing_count={hop: 12},
        ),
        none,
    )
    for window in (40, 300):
        yield (
            row(
                "ledger-03@ewr",
                window,
                verdict=Verdict.DUPLICATE,
                duplicates={"agg": ((101, 140),)},
                extra_copies={"agg": 41},
            ),
            none,
        )
    yield (
        row(
            "ledger-04@ewr",
            60,
            verdict=Verdict.LOSS,
            reasons=("content differs between produced and agg",),
            content_checked="differs",
        ),
        none,
    )
    for window in range(61, 80):
        yield row("ledger-04@ewr", window, content_checked="compared"), none
    yield row("ledger-04@ewr", 80, content_checked="not compared"), none
    yield (
        row(
            "ledger-05@ewr",
            150,
            verdict=Verdict.UNKNOWN,
            unknown=((7, 90),),
            reasons=("part of tier agg could not be read: expired",),
        ),
        none,
    )
    yield row("ledger-06@ewr", 151, verdict=Verdict.UNKNOWN, explained={"too_large": ((3, 4),)}), none
    for window in (333, 334):
        yield (
            row("ledger-07@ewr", window, verdict=Verdict.UNKNOWN, in_flight={hop: ((500, 700),)}, count=900),
            none,
        )
    yield (
        row(
            "ledger-08@ewr",
            120,
            verdict=Verdict.UNKNOWN,
            unreported=((880, 1000),),
            reasons=("the producer fell silent: what it sent after its last report is not known",),
        ),
        none,
    )
    for window in range(330, 336):
        overdue = {"state": WindowState.OPEN, "verdict": Verdict.UNKNOWN, "promised": False}
        yield row("slow-1@jfk", window, source="jfk", **overdue), none
    for window in range(300, 336):
        yield row("plc-1@ewr", window, verdict=Verdict.COUNT_MATCH), none
    late = START_MS + 90 * HOUR_MS
    yield (
        row("batch-1@ewr", 90),
        Evidence({"ewr": [late, late + 5 * HOUR_MS], "agg": [late + 90, late + 5 * HOUR_MS + 700]}),
    )
    for name in (SCRIPT, IMAGE, ENDING, CONTROL, LONG, ""):
        yield (
            row(
                name,
                200,
                topic="flights",
                verdict=Verdict.DUPLICATE,
                duplicates={"agg": ((1, 1),)},
                extra_copies={"agg": 1},
            ),
            none,
        )
    yield (
        row(
            "ghost@ewr",
            0,
            window_start_ms=None,
            verdict=Verdict.UNKNOWN,
            published=0,
            consumed={},
            seen={},
            reasons=("a producer of the roster has never reported",),
        ),
        none,
    )


def rich(number: int = 40) -> tuple[dict[str, Any], pa.Table]:
    """(summary, rows) with everything in them, and so many producers without any trouble."""
    rows = evident_rows(rich_verdicts(number))
    at_ms = START_MS + 337 * HOUR_MS
    summary = summarise(
        rows,
        tiers=TIERS,
        at_ms=at_ms,
        window_ms=HOUR_MS,
        grace_ms=60_000,
        untrusted={
            "unknown version 9, in agg": 14,
            "header cut short, in ewr": 3,
            f"event {SCRIPT!r} ewr, offset 17: not JSON": 1,
            "event 'count/00aa' \x07\ud800 jfk, offset 3: field first is not a whole number from 0 to "
            + "9" * 5000: 1,
        },
        unaudited={"agg": 7_204, "ewr": 0},
        waivers=[
            {
                "topic": "orders",
                "window_start": iso_time(START_MS + 40 * HOUR_MS),
                "who": "dana",
                "why": f"Replayed by hand after the switch failed; copies removed downstream. {IMAGE}",
                "at": "2026-03-05T09:12:00Z",
            }
        ],
        watermarks={
            "orders": iso_time(START_MS + 60 * HOUR_MS),
            "flights": iso_time(START_MS + 200 * HOUR_MS),
            "sensor-readings.celsius.v2": None,
        },
        revisions=[
            {
                "topic": "orders",
                "producer": "batch-1@ewr",
                "window_start": iso_time(START_MS + 90 * HOUR_MS),
                "revision": 2,
                "before": "UNKNOWN",
                "after": "PROVEN",
            }
        ],
    )
    return summary, rows


def many(thousands: int = 100) -> tuple[dict[str, Any], pa.Table]:
    """(summary, rows) of a fleet: a thousand producers, an hour each thousand rows, here and there a loss."""
    rng = random.Random(3)
    lost = tuple((number, number) for number in range(10, 60, 2))
    made = []
    for index, name in enumerate(producers(1000)):
        more: dict[str, Any] = {}
        if rng.random() < 0.02:
            more = {"verdict": Verdict.LOSS, "missing": {("ewr", "agg"): lost}}
        made.append(row(name, 0, topic=f"topic-{index % 30:02d}", **more))
    hour = evident_rows((each, Evidence()) for each in made)
    rows = pa.concat_tables(_later(hour, number * HOUR_MS) for number in range(thousands))
    summary = summarise(
        rows,
        tiers=TIERS,
        at_ms=START_MS + 400 * HOUR_MS,
        window_ms=HOUR_MS,
        untrusted={},
        unaudited={},
    )
    return summary, rows


def _later(rows: pa.Table, by_ms: int) -> pa.Table:
    starts = pc.add(rows["window_start_ms"], pa.scalar(by_ms, pa.int64()))
    text = pc.strftime(pc.cast(starts, pa.timestamp("ms", "UTC")), "%Y-%m-%dT%H:%M:00Z")
    for name, column in (("window_start_ms", starts), ("window_start", text)):
        rows = rows.set_column(rows.column_names.index(name), name, column)
    return rows
