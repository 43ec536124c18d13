"""The roster: producers that the config names, and that must tell of every window of a topic, or of every one
since a time that it names. Pure.

Called by `runs.reconciling` with what events told and the windows that others' records and reports are in. A
stream speaks for the time from its opening to its end, whether it sent anything or not, and for the windows
that it reported; a window that none of a member's streams speaks for is not complete. One that fell silent
without a word ends with its lease: until then a row of its own is in doubt (`reconcile_stream`), and nobody
speaks for what comes after it, whether that row is waived, old or forgotten.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from millrace.audit.contract.events import CLOSED, UNANNOUNCED, StreamFacts
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict

Span = tuple[float, float]
"""[from, until) in ms"""


def roster_rows(
    roster: Mapping[str, int],
    streams: Iterable[StreamFacts],
    topic: str,
    window_ms: int,
    *,
    windows: Iterable[tuple[int, int]] = (),
    pruned_reports: Mapping[str, int] | None = None,
    grace_ms: int = 0,
    now_ms: int,
) -> list[WindowVerdict]:
    """UNKNOWN for every member and every window that it is silent about, never an empty PROVEN.

    `roster` {member: since when, ms}: of windows that end before, nothing is asked of it (0: of none).
    `streams` name the audited topics; `windows` are [start, end) of the topic's settled rows;
    `pruned_reports` {stream: start of the first window whose report went with its evidence}. A member that
    has never reported has one row, without a window, as soon as any is asked of it, and so have all windows
    after the end of one of which no stream lives and that has not come back.
    """
    known: dict[str, list[StreamFacts]] = {}
    for facts in streams:
        if facts.topic == topic:
            known.setdefault(facts.producer, []).append(facts)
    ordered = sorted(set(windows))
    rows = []
    for name, since_ms in sorted(roster.items()):
        if name not in known:
            if not since_ms or any(end_ms > since_ms for _, end_ms in ordered):
                rows.append(_row(name, topic, window_ms, "has never reported"))
            continue
        until_ms, how = _heard_until(known[name], grace_ms, now_ms)
        told = _spans(known[name], pruned_reports or {}, grace_ms, now_ms)
        for start_ms, end_ms in ordered:
            if end_ms <= since_ms:
                continue
            if start_ms >= until_ms + grace_ms:
                what = f"{how} and has not come back"
                rows.append(_row(name, topic, window_ms, what, not_before_ms=max(int(until_ms), since_ms)))
                break
            if not _touches(told, start_ms, end_ms):
                what = "told nothing of this window"
                rows.append(_row(name, topic, end_ms - start_ms, what, start_ms=start_ms))
    return rows


def speaking_streams(
    roster: Collection[str],
    streams: Iterable[StreamFacts],
    oldest_ms: int | None,
    grace_ms: int,
    now_ms: int,
) -> set[str]:
    """Streams of members that must stay known when their evidence is pruned and their events are gone: the
    last one of each, which tells since when it has not come back, and all that speak for a window since
    `oldest_ms`, the first of which any row is left."""
    last: dict[tuple[str, str], tuple[float, str]] = {}
    found: set[str] = set()
    for facts in streams:
        if facts.producer not in roster:
            continue
        end_ms = _end_of(facts, grace_ms, now_ms)
        if oldest_ms is not None and end_ms + grace_ms >= oldest_ms:
            found.add(facts.stream)
        name = (facts.topic, facts.producer)
        last[name] = max(last.get(name, (-1.0, "")), (end_ms, facts.stream))
    return found.union(stream for _, stream in last.values())


def _end_of(facts: StreamFacts, grace_ms: int, now_ms: int) -> float:
    """When the stream ended: by its word, or with the lease of its last one."""
    if facts.state == CLOSED:
        return facts.at_ms
    return facts.at_ms + facts.lease_ms if facts.lapsed(now_ms, grace_ms) else inf


def _heard_until(streams: Sequence[StreamFacts], grace_ms: int, now_ms: int) -> tuple[float, str]:
    """When the last of a producer's streams ended, and how; without an end while one lives."""
    return max(
        (_end_of(facts, grace_ms, now_ms), "closed" if facts.state == CLOSED else "fell silent")
        for facts in streams
    )


def _spans(
    streams: Iterable[StreamFacts], pruned_reports: Mapping[str, int], grace_ms: int, now_ms: int
) -> list[Span]:
    """What the streams speak for, in order and apart; clocks of producers may differ by the grace."""
    spans: list[Span] = []
    for facts in streams:
        spans += facts.windows.spans()
        if facts.state != UNANNOUNCED:
            opened_ms = facts.opened_at_ms
            if opened_ms is None:  # the word of it is gone
                # What a report told of the time after it stays true when its window is pruned.
                first_ms = pruned_reports.get(facts.stream, facts.at_ms)
                opened_ms = min([facts.at_ms, first_ms, *facts.windows])
            spans.append((opened_ms - grace_ms, _end_of(facts, grace_ms, now_ms) + 1 + grace_ms))
    merged: list[Span] = []
    for first, end in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def _touches(spans: Sequence[Span], start_ms: int, end_ms: int) -> bool:
    number = bisect_right(spans, (end_ms - 1, inf))
    return number > 0 and spans[number - 1][1] > start_ms


def _row(
    producer: str,
    topic: str,
    window_ms: int,
    what: str,
    *,
    start_ms: int | None = None,
    not_before_ms: int | None = None,
) -> WindowVerdict:
    return WindowVerdict(
        topic=topic,
        producer=producer,
        stream="",
        window_start_ms=start_ms,
        window_ms=window_ms,
        state=WindowState.SETTLED,
        verdict=Verdict.UNKNOWN,
        not_before_ms=not_before_ms,
        reasons=(f"a producer of the roster {what}",),
    )
