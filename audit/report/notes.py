"""What a reader of the report should know besides the verdict, and what changes no verdict. Pure.

Called by `job`; the sentences stand in the summary as `notes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from millrace.audit.config import duration_text
from millrace.audit.contract.events import StreamFacts
from millrace.audit.report.text import visible

MOST_NAMED = 3


def window_notes(streams: Iterable[StreamFacts], topics: Collection[str], window_ms: int) -> Iterator[str]:
    """A sentence for each topic and length of windows other than the audit's in which producers count."""
    found: dict[tuple[str, int], set[str]] = {}
    for facts in streams:
        if facts.topic not in topics:
            continue
        for length_ms in facts.windows.lengths() - {window_ms}:
            found.setdefault((facts.topic, length_ms), set()).add(facts.producer)
    for (topic, length_ms), producers in sorted(found.items()):
        told, configured = duration_text(length_ms), duration_text(window_ms)
        yield (
            f"{_named(producers)} in topic {visible(topic)} with windows of {told}, where the config says "
            f"{configured}: these are compared in the shortest length that both divide"
        )


def _named(producers: Collection[str]) -> str:
    names = [visible(each) for each in sorted(producers)[:MOST_NAMED]]
    rest = len(producers) - len(names)
    who = ", ".join(names) + (f" and {rest:,} more" if rest else "")
    return f"producer {who} counts" if len(producers) == 1 else f"producers {who} count"


def absent_notes(absent: Iterable[str], silent: Collection[str]) -> Iterator[str]:
    """Topics that a cluster has not, but for what is told among the untrusted already."""
    yield from sorted({each for each in absent if each not in silent})


def told(notes: Iterable[str]) -> list[str]:
    """Each once, as sentences."""
    return [f"{note[:1].upper()}{note[1:]}." for note in dict.fromkeys(notes)]
