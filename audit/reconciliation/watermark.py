"""The completeness watermark of a topic: up to when its windows are proven, so that downstream may use
them. Pure.

Called by the job after reconciliation. The watermark is the end of the longest prefix of windows in which
every row is settled and proven (or count-matched), or waived by a person. It never jumps a hole, never
moves beyond what every known stream has promised, and is None while nothing is proven.

A waiver is for what it names: the settled rows of a window, or a stream's own row. A waived window holds the
watermark all the same while a row of it is open, while a stream may still write into it, and while a stream's
own doubt reaches into it: that is another finding, which nobody has waived.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from millrace.audit.contract.events import CLOSED, StreamFacts
from millrace.audit.reconciliation.verdicts import FELL_SILENT, Verdict, WindowState, WindowVerdict


@dataclass(frozen=True, slots=True)
class Waiver:
    """A person's decision to go on without a window's proof, or without that of a stream's own row (no
    window, `stream` named); kept with who and why, and with what it was given for (`waivers`)."""

    topic: str
    window_start_ms: int | None
    who: str
    why: str
    at_ms: int
    stream: str = ""
    verdict: str = "LOSS"
    missing: int = 0
    duplicates: int = 0
    doubtful: int = 0


def completeness_watermark(
    topic: str,
    rows: Iterable[WindowVerdict],
    streams: Iterable[StreamFacts],
    waivers: Collection[Waiver] = (),
) -> int | None:
    """Everything of the topic created before this time (ms) is accounted for; None: nothing is known to be.

    `rows` are all rows of the topic, of all its streams; `streams` everything that events told of them.
    """
    waived = {waiver.window_start_ms for waiver in waivers if waiver.topic == topic}
    silenced = {waiver.stream: waiver.at_ms for waiver in waivers if waiver.topic == topic and waiver.stream}
    rows = list(rows)
    # A stream that fell silent promises no more; who waives its silence goes on without it. One that lives
    # has its promise, whatever else of it was waived, and so has one that spoke again after the waiver.
    ended = {row.stream for row in rows if row.window_start_ms is None and FELL_SILENT in row.reasons}
    bound_ms = _promised_bound(
        topic,
        [each for each in streams if each.stream not in ended or each.at_ms > silenced.get(each.stream, -1)],
    )
    ends: dict[int, int] = {}
    still_open: set[int] = set()
    doubtful: set[int] = set()
    first_doubt_ms: int | None = None
    for row in rows:
        if row.topic != topic:
            continue
        if row.window_start_ms is None:
            if row.stream in silenced:
                continue
            from_ms = -1 if row.not_before_ms is None else row.not_before_ms
            first_doubt_ms = from_ms if first_doubt_ms is None else min(first_doubt_ms, from_ms)
            continue
        start_ms = row.window_start_ms
        ends[start_ms] = max(ends.get(start_ms, 0), start_ms + row.window_ms)
        if row.state is not WindowState.SETTLED:
            still_open.add(start_ms)
        elif row.verdict > Verdict.COUNT_MATCH:
            doubtful.add(start_ms)
    held = still_open | (doubtful - waived)
    watermark: int | None = None
    for start_ms in sorted(ends):
        end_ms = ends[start_ms]
        in_doubt = first_doubt_ms is not None and end_ms > first_doubt_ms
        beyond = bound_ms is not None and end_ms > bound_ms
        if start_ms in held or in_doubt or beyond:
            # A longer window that is proven may reach beyond this one.
            return None if watermark is None else min(watermark, start_ms)
        watermark = end_ms
    return watermark


def _promised_bound(topic: str, streams: Iterable[StreamFacts]) -> int | None:
    """No stream will create a record before this time; None when none of them can create any more.

    A stream that has not promised anything bounds nothing here: its own rows stay open and stop the
    watermark, and while it has none, nobody knows that it will ever write.
    """
    promises = [
        facts.no_earlier_than_ms
        for facts in streams
        if facts.topic == topic and facts.state != CLOSED and facts.no_earlier_than_ms is not None
    ]
    return min(promises, default=None)
