"""The completeness watermark of a topic: up to when its windows are proven, so that downstream may use
them. Pure.

Called by the job after reconciliation. The watermark is the end of the longest prefix of windows in which
every row is settled and proven (or count-matched), or waived by a person. It never jumps a hole, never
moves beyond what every known stream has promised, and is None while nothing is proven. Nor does it reach a
window that is not over: a stream that closed says nothing of those that have not begun to write.

A waiver is for what it names: the settled rows of a window, or a stream's own row. A waived window holds the
watermark all the same while a row of it is open, while a stream may still write into it, and while a stream's
own doubt reaches into it: that is another finding, which nobody has waived. `completeness` tells by name what
holds it, for `millrace audit waive` (`runs.watermark_holds`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from millrace.audit.contract.events import CLOSED, StreamFacts
from millrace.audit.reconciliation.verdicts import FELL_SILENT, Verdict, WindowState, WindowVerdict


@dataclass(frozen=True, slots=True)
class Waiver:
    """A person's decision to go on without a window's proof, or without that of a stream's own row (no
    window, `stream` named); kept with who and why, and with what it was given for (`waivers`).

    Of a stream's own row that is its `reasons`, and of a silence when the producer was last heard of; of a
    window in how many rows contents differ, None where in none. Older programs kept none of these."""

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
    reasons: tuple[str, ...] | None = None
    silent_from_ms: int | None = None
    differing: int | None = None

    @property
    def silence_ms(self) -> int | None:
        """The silence it is for: of a producer that was last heard of then, or before. None if it is for
        another doubt."""
        if not self.stream or (self.reasons is not None and FELL_SILENT not in self.reasons):
            return None
        return self.at_ms if self.silent_from_ms is None else self.silent_from_ms


@dataclass(frozen=True, slots=True)
class Completeness:
    """Everything of the topic created before `watermark_ms` is accounted for; None: nothing is known to be.
    And all that can hold it:

    windows    {start in ms: the worst row of it that nobody waived, or an open one}
    doubts     streams' own rows that nobody waived, each from its `not_before_ms` on (None: in all windows)
    promise    the living stream that promised least: windows that end after its `no_earlier_than_ms` wait
    """

    watermark_ms: int | None
    windows: Mapping[int, WindowVerdict]
    doubts: Sequence[WindowVerdict]
    promise: StreamFacts | None

    def until(self, end_ms: int) -> Completeness:
        """What of it holds windows that end at `end_ms` or before."""
        waits = self.promise is not None and _reaches(end_ms, self.promise.no_earlier_than_ms)
        return Completeness(
            self.watermark_ms,
            {start_ms: row for start_ms, row in self.windows.items() if start_ms < end_ms},
            [row for row in self.doubts if _reaches(end_ms, row.not_before_ms)],
            self.promise if waits else None,
        )

    @property
    def is_held(self) -> bool:
        return bool(self.windows or self.doubts or self.promise)


def completeness(
    topic: str,
    rows: Iterable[WindowVerdict],
    streams: Iterable[StreamFacts],
    waivers: Collection[Waiver] = (),
    *,
    over_ms: int,
    spans: Iterable[tuple[int, int, int]] = (),
) -> Completeness:
    """`rows` are all rows of the topic, of all its streams; `streams` everything that events told of them.
    `over_ms` is the time of the look less the grace: a window that ends later is open to whoever starts now,
    whatever is settled in it. `spans` are (start, end, length of a window) in ms of proven windows that
    follow one another, which have no rows any more."""
    waived = {waiver.window_start_ms for waiver in waivers if waiver.topic == topic}
    passed_over = {waiver.stream for waiver in waivers if waiver.topic == topic and waiver.stream}
    silenced = {waiver.stream: waiver.silence_ms for waiver in waivers if waiver.topic == topic}
    rows = list(rows)
    # A stream that fell silent promises no more; who waives its silence goes on without it. One that lives
    # has its promise, whatever else of it was waived, and so has one that spoke again after that silence.
    ended = {row.stream for row in rows if row.window_start_ms is None and FELL_SILENT in row.reasons}
    promise = _least_promise(
        topic,
        [each for each in streams if each.stream not in ended or each.at_ms > _until(silenced, each.stream)],
    )
    ends: dict[int, int] = {}
    still_open: dict[int, WindowVerdict] = {}
    doubtful: dict[int, WindowVerdict] = {}
    doubts: list[WindowVerdict] = []
    for row in rows:
        if row.topic != topic:
            continue
        if row.window_start_ms is None:
            if row.stream not in passed_over:
                doubts.append(row)
            continue
        start_ms = row.window_start_ms
        ends[start_ms] = max(ends.get(start_ms, 0), start_ms + row.window_ms)
        if row.state is WindowState.SETTLED and start_ms + row.window_ms > over_ms:
            still_open[start_ms] = _worse(still_open.get(start_ms), replace(row, state=WindowState.OPEN))
        elif row.state is not WindowState.SETTLED:
            still_open[start_ms] = _worse(still_open.get(start_ms), row)
        elif row.verdict > Verdict.COUNT_MATCH:
            doubtful[start_ms] = _worse(doubtful.get(start_ms), row)
    held = still_open | {start_ms: row for start_ms, row in doubtful.items() if start_ms not in waived}
    first_doubt = min(doubts, key=lambda row: _from_ms(row.not_before_ms), default=None)
    limits = [] if first_doubt is None else [_from_ms(first_doubt.not_before_ms)]
    limits += [] if promise is None else [_from_ms(promise.no_earlier_than_ms)]
    watermark = _passed(
        [*((start_ms, end_ms, end_ms - start_ms) for start_ms, end_ms in ends.items()), *spans],
        held,
        min(limits, default=None),
    )
    return Completeness(watermark, held, doubts, promise)


def _passed(
    windows: Iterable[tuple[int, int, int]], held: Collection[int], limit_ms: int | None
) -> int | None:
    """The end of the windows, (start, end, step), one after the other, up to the first that is held or ends
    beyond the limit; of a span of several, as many as end before it."""
    watermark: int | None = None
    for start_ms, end_ms, step_ms in sorted(windows):
        if start_ms in held:
            # A longer window that is proven may reach beyond this one.
            return None if watermark is None else min(watermark, start_ms)
        if limit_ms is not None and _reaches(end_ms, limit_ms):
            within_ms = start_ms + max(0, limit_ms - start_ms) // step_ms * step_ms
            if within_ms > start_ms:
                return within_ms if watermark is None else max(watermark, within_ms)
            return None if watermark is None else min(watermark, start_ms)
        watermark = end_ms if watermark is None else max(watermark, end_ms)
    return watermark


def _until(silenced: Mapping[str, int | None], stream: str) -> int:
    at_ms = silenced.get(stream)
    return -1 if at_ms is None else at_ms


def _worse(held: WindowVerdict | None, row: WindowVerdict) -> WindowVerdict:
    return row if held is None or row.verdict > held.verdict else held


def _from_ms(not_before_ms: int | None) -> int:
    return -1 if not_before_ms is None else not_before_ms


def _reaches(end_ms: int, not_before_ms: int | None) -> bool:
    """Whether what begins then is in a window that ends at `end_ms`."""
    return end_ms > _from_ms(not_before_ms)


def _least_promise(topic: str, streams: Iterable[StreamFacts]) -> StreamFacts | None:
    """The stream of which the next record may be the earliest: none will create one before its promise. None
    when no stream can create any more.

    A stream that has not promised anything bounds nothing here: its own rows stay open and stop the
    watermark, and while it has none, nobody knows that it will ever write.
    """
    living = [
        facts
        for facts in streams
        if facts.topic == topic and facts.state != CLOSED and facts.no_earlier_than_ms is not None
    ]
    return min(living, key=lambda facts: _from_ms(facts.no_earlier_than_ms), default=None)
