"""The whole mirror as lines of a table: what `millrace mirror status` shows. Pure.

Takes the document of `/mirror` (every worker's status, and which did not answer) and gives rows, worst first.
Nothing is wider than the terminal; names that do not fit lose their middle, because topics differ at both
ends. Only what is to be copied is whole, whatever its width: a terminal gives it as many rows as it needs.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.broker.wording import count_of
from millrace.mirror.topics.internal_topics import LeftOut, left_out_sentences

MIN_TOPIC_WIDTH = 12
# Of a table that has to be cut, its head and the two topics that are worst.
LEAST_TABLE = 3
_FIXED = ("PARTS", "BEHIND", "LAG", "REC/S", "B/S", "STATE")
_RIGHT = {"PARTS", "BEHIND", "LAG", "REC/S", "B/S"}

_GROUP_STATES = {
    "synced": "in step",
    "partly": "partly in step",
    "failing": "not in step",
    "active_on_target": "read on the target already",
    "ahead_on_target": "further on at the target",
}

NOTHING_CARRIED = (
    "nothing is carried: every worker that answers is drained; start one, unless one was started since"
)
OLD_CREW = (
    "the worker that was asked is drained: it names the workers of when it left, and none that came later; "
    "ask another"
)

Style = Callable[[str, str], str]
"""(text, colour) → text: how a terminal shows a colour; plain text stays as it is."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class TopicRow:
    """One topic of one source, over all workers. `lag_*` None: not known yet."""

    source: str
    topic: str
    partitions: int = 0
    lag_records: int | None = None
    lag_seconds: float | None = None
    records_per_second: float = 0.0
    bytes_per_second: float = 0.0
    states: Counter[str] = field(default_factory=Counter)
    is_connected: bool = True

    @property
    def state(self) -> str:
        """What is wrong in one word or two, or what it does."""
        if not self.is_connected:
            return "source down"
        for state in ("stopped", "skipping", "starting", "draining", "paused"):
            if count := self.states[state]:
                return state if count == self.partitions else f"{count} {state}"
        return "running" if self.partitions else "-"

    @property
    def badness(self) -> tuple[Any, ...]:
        """Sorts the worst first."""
        return (
            -self.states["stopped"],
            self.is_connected,
            -(self.lag_seconds or 0.0),
            -(self.lag_records or 0),
            self.source,
            self.topic,
        )


def answered(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The statuses of the workers that answered."""
    return [worker["status"] for worker in document["workers"] if worker["status"] is not None]


def silent(document: Mapping[str, Any]) -> list[str]:
    """A line for each worker that did not."""
    return [
        f"{worker['url'] or worker['id']} does not answer: {worker['error']}"
        for worker in document["workers"]
        if worker["status"] is None
    ]


def topic_rows(document: Mapping[str, Any]) -> list[TopicRow]:
    """Worst first. A source is down when a worker that carries something of it cannot reach it."""
    rows: dict[tuple[str, str], TopicRow] = {}

    def row(source: str, topic: str) -> TopicRow:
        return rows.setdefault((source, topic), TopicRow(source, topic))

    for status in answered(document):
        down = {each["cluster"] for each in status["sources"] if _is_down(each)}
        for each in status["partitions"]:
            found = row(each["source"], each["topic"])
            found.partitions += 1
            found.states[each["state"]] += 1
            found.is_connected &= each["source"] not in down
            if each.get("lag_records") is not None:
                found.lag_records = (found.lag_records or 0) + each["lag_records"]
                found.lag_seconds = max(found.lag_seconds or 0.0, each["lag_seconds"])
        for each in status["topics"]:
            found = row(each["source"], each["topic"])
            found.records_per_second += each["records_per_second"]
            found.bytes_per_second += each["bytes_per_second"]
    return sorted((each for each in rows.values() if each.partitions), key=lambda each: each.badness)


def stopped_partitions(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Partitions that wait for an operator, in order."""
    partitions = [each for status in answered(document) for each in status["partitions"]]
    waiting = [each for each in partitions if each["state"] == "stopped" and each.get("gap")]
    return sorted(waiting, key=lambda each: (each["source"], each["topic"], each["partition"]))


def is_drained(document: Mapping[str, Any]) -> bool:
    """Whether every worker that answered is drained: nothing is known to be carried. What was started since
    they left, none of them knows."""
    statuses = answered(document)
    return bool(statuses) and all(status["draining"] for status in statuses)


def is_starting(document: Mapping[str, Any]) -> bool:
    """Whether a worker that answered has not all of its share yet."""
    return any(_is_starting(status) for status in answered(document))


def as_json(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document, and the table's rows."""
    rows = [
        {
            "source": row.source,
            "topic": row.topic,
            "partitions": row.partitions,
            "state": row.state,
            "lag_records": row.lag_records,
            "lag_seconds": row.lag_seconds,
            "records_per_second": row.records_per_second,
            "bytes_per_second": row.bytes_per_second,
        }
        for row in topic_rows(document)
    ]
    return {**document, "topics": rows}


def lines(document: Mapping[str, Any], width: int | None, style: Style) -> list[str]:
    """What a person sees. `width` None: as wide as it is (a file or a pipe)."""
    return [line for part in _parts(document, width, style) for line in part]


def screen(document: Mapping[str, Any], width: int, height: int, style: Style) -> list[str]:
    """The same for so many rows of a terminal: topics that are well make room for what is stopped."""
    head, table, gaps = _parts(document, width, style)
    room = height - sum(rows_of(line, width) for line in (*head, *gaps))
    kept = max(room - 1, LEAST_TABLE)
    if len(table) > room and kept < len(table) - 1:
        table = [*table[:kept], f"… {count_of(len(table) - kept, 'topic')} more"]
    return fitted([*head, *table, *gaps], width, height)


def fitted(shown: Sequence[str], width: int, height: int) -> list[str]:
    """As many of the lines as so many rows of a terminal hold."""
    heights = [rows_of(line, width) for line in shown]
    if sum(heights) <= height:
        return list(shown)
    kept = used = 0
    while used + heights[kept] < height:
        used += heights[kept]
        kept += 1
    return [*shown[:kept], f"… {count_of(len(shown) - kept, 'line')} more"]


def rows_of(line: str, width: int) -> int:
    """How many rows of a terminal a line takes."""
    return max(1, -(-length(line) // width))


def length(line: str) -> int:
    """Without its colours."""
    return len(_COLOUR.sub("", line))


def _parts(document: Mapping[str, Any], width: int | None, style: Style) -> tuple[list[str], ...]:
    """What is above the table, the table, and what is below it."""
    rows = topic_rows(document)
    head = _heading(document, rows, width, style)
    for problem in _problems(document):
        head += [style(line, "red") for line in wrapped(f"! {problem}", width, indent="  ")]
    for limit in (*_limits(document), *_never_carried(document), *_groups(document)):
        head += wrapped(limit, width, indent="  ")
    table = _table(rows, width, style) if rows else ["no partition is carried yet"]
    gaps = [line for each in stopped_partitions(document) for line in ("", *_gap(each, width, style))]
    return [*head, ""], table, gaps


def _heading(
    document: Mapping[str, Any], rows: Sequence[TopicRow], width: int | None, style: Style
) -> list[str]:
    """One line, or two where it does not fit."""
    statuses = answered(document)
    workers = len(document["workers"])
    word = "worker" if workers == 1 else "workers"
    target = statuses[0]["target"]["cluster"] if statuses else "?"
    delivery = statuses[0]["delivery"].replace("_", " ") if statuses else "?"
    state, colour = overall(document)
    rate = quantity(sum(row.bytes_per_second for row in rows), "B/s")
    name = f"{document['mirror']} → {target}"
    parts = [f"{workers} {word}", rate, delivery]
    rest = " · ".join([style(state, colour), *parts])
    if width is not None and len(name) + 3 + len(" · ".join([state, *parts])) > width:
        return [name, rest]
    return [f"{name}   {rest}"]


def overall(document: Mapping[str, Any]) -> tuple[str, str]:
    """The mirror in a word, and the colour of it."""
    statuses = answered(document)
    if not statuses:
        return "no worker answers", "red"
    if is_drained(document):
        return "drained", "red"
    if any(_is_down(status["target"]) for status in statuses):
        return "target down", "red"
    if count := len(stopped_partitions(document)):
        return f"{count} stopped", "red"
    if any(_is_down(each) for status in statuses for each in status["sources"]):
        return "source down", "red"
    if silent(document):
        return "incomplete", "red"
    if is_starting(document):
        return "starting", "yellow"
    return "running", "green"


def _problems(document: Mapping[str, Any]) -> Iterable[str]:
    yield from silent(document)
    if is_drained(document):
        yield NOTHING_CARRIED
    if document.get("crew_is_old"):
        yield OLD_CREW
    for status in answered(document):
        if _is_down(status["target"]):
            yield f"{status['url']} cannot reach target {_why(status['target'])}"
        for each in status["sources"]:
            if _is_down(each):
                yield f"{status['url']} cannot reach source {_why(each)}"
        for role, each in (("target", status["target"]), *(("source", each) for each in status["sources"])):
            if each.get("over_quota"):
                yield f"{status['url']} is over its quota at {role} {each['cluster']}: it waits as told"
        if status["draining"]:
            yield f"{status['url']} is drained: it carries nothing and can be ended"
        elif not status["ready"]:
            yield from (f"{status['url']} waits: {text}" for text in status.get("waits_for", ()))
    refused = {
        f"{each['source']}/{each['topic']} is not carried: {each['reason']}"
        for status in answered(document)
        for each in status.get("refused_topics", ())
    }
    yield from sorted(refused)


def _never_carried(document: Mapping[str, Any]) -> Iterable[str]:
    """A line for each source whose patterns select topics that are never carried."""
    found = {
        (each["source"], each["topic"]): each["reason"]
        for status in answered(document)
        for each in status.get("internal_topics", ())
    }
    for source in sorted({source for source, _ in found}):
        topics = [LeftOut(topic, reason) for (of, topic), reason in sorted(found.items()) if of == source]
        yield f"never carried from {source}: {'; '.join(left_out_sentences(topics))}"


def _groups(document: Mapping[str, Any]) -> Iterable[str]:
    """Consumer groups that are kept in step: how many, and which of them are not."""
    groups = [each for status in answered(document) for each in status.get("groups", ())]
    counts = Counter(each["state"] for each in groups)
    known = [f"{counts[state]} {words}" for state, words in _GROUP_STATES.items() if counts[state]]
    if known:
        yield f"groups: {', '.join(known)}"
    for each in sorted(groups, key=lambda each: (each["source"], each["group"])):
        if each["state"] in ("failing", "partly", "ahead_on_target"):
            reason = f": {each['reason']}" if each.get("reason") else ""
            yield f"group {each['group']} of {each['source']}: {_GROUP_STATES[each['state']]}{reason}"


def _is_down(cluster: Mapping[str, Any]) -> bool:
    """Known not to answer. In the first moments of a worker nothing is known yet."""
    return not cluster["connected"] and not cluster.get("starting")


def _is_starting(status: Mapping[str, Any]) -> bool:
    if status["draining"]:
        return False
    is_unknown = any(each.get("starting") for each in (status["target"], *status["sources"]))
    return is_unknown or (not status["ready"] and not status.get("troubles"))


def _why(cluster: Mapping[str, Any]) -> str:
    return f"{cluster['cluster']}: {cluster['error']}" if cluster.get("error") else str(cluster["cluster"])


def _limits(document: Mapping[str, Any]) -> list[str]:
    statuses = answered(document)
    resumed = {scope: parts for status in statuses for scope, parts in status.get("resumed", {}).items()}
    paused = [
        scope + (f" (but not {', '.join(resumed[scope])})" if scope in resumed else "")
        for scope in sorted({scope for status in statuses for scope in status["paused"]})
    ]
    rates = {
        each["cluster"]: each["throttle_bytes_per_second"]
        for status in statuses
        for each in status["sources"]
        if each["throttle_bytes_per_second"] is not None
    }
    shown = [f"paused: {', '.join(paused)}"] if paused else []
    limits = [f"{cluster} {quantity(rate, 'B/s')}" for cluster, rate in sorted(rates.items())]
    return shown + ([f"throttled: {', '.join(limits)}"] if limits else [])


def _table(rows: Sequence[TopicRow], width: int | None, style: Style) -> list[str]:
    cells = [
        {
            "SOURCE": row.source,
            "TOPIC": row.topic,
            "PARTS": str(row.partitions),
            "BEHIND": quantity(row.lag_records),
            "LAG": duration(row.lag_seconds),
            "REC/S": quantity(row.records_per_second),
            "B/S": quantity(row.bytes_per_second),
            "STATE": row.state,
        }
        for row in rows
    ]
    columns = ["SOURCE", "TOPIC", *_FIXED]
    widths = {name: max(len(name), *(len(line[name]) for line in cells)) for name in columns}
    if width is not None:
        _fit(widths, width)
    shown = [style(_line({name: name for name in columns}, widths), "bold")]
    for row, line in zip(rows, cells, strict=True):
        text = _line(line, widths)
        shown.append(style(text, _colour(row)) if _colour(row) else text)
    return shown


def _fit(widths: dict[str, int], width: int) -> None:
    """Takes from the names first; where that is not enough, whole columns go."""

    def surplus() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - width

    for name in ("TOPIC", "SOURCE"):
        if surplus() > 0:
            widths[name] = max(min(widths[name], MIN_TOPIC_WIDTH), widths[name] - surplus())
    for name in ("REC/S", "PARTS", "B/S"):
        if surplus() > 0:
            del widths[name]


def _line(cells: Mapping[str, str], widths: Mapping[str, int]) -> str:
    parts = []
    for name, size in widths.items():
        text = shorten(cells[name], size)
        parts.append(text.rjust(size) if name in _RIGHT else text.ljust(size))
    return "  ".join(parts).rstrip()


def _colour(row: TopicRow) -> str:
    if row.states["stopped"] or not row.is_connected:
        return "red"
    return "yellow" if row.states["paused"] or row.states["skipping"] else ""


def _gap(partition: Mapping[str, Any], width: int | None, style: Style) -> list[str]:
    gap = partition["gap"]
    name = f"{partition['source']}/{partition['topic']}:{partition['partition']}"
    count = gap["to"] - gap["from"]
    records = "1 offset" if count == 1 else f"{count:,} offsets"
    behind = " and what came after" if gap.get("open") else ""
    first = f"{name} is stopped: {gap['class'].replace('_', ' ')}, {records} from {gap['from']}{behind}"
    shown = [style(line, "red") for line in wrapped(first, width, indent="  ")]
    for text in (gap["reason"], gap["todo"]):
        shown += wrapped(f"  {text}", width or 100, indent="  ")
    return [*shown, f"  millrace mirror retry {name}", f"  millrace mirror skip {name}"]


def wrapped(text: str, width: int | None, *, indent: str = "") -> list[str]:
    """Lines of at most `width` characters; names are never broken. `width` None: one line."""
    if width is None:
        return [text]
    return textwrap.wrap(
        text, max(20, width), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def shorten(text: str, width: int) -> str:
    """`orders.eu…invoices`: at most `width` characters, the middle left out."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    right = width - 1 - left
    return f"{text[:left]}…{text[len(text) - right :]}"


def quantity(value: float | None, unit: str = "") -> str:
    """`0`, `12`, `1.5k`, `12k`, `3.4M`: at most four characters of number; with a unit `3.4 MB/s`."""
    if value is None:
        return "-"
    size = float(value)
    for prefix in ("", "k", "M", "G", "T", "P"):
        if size < 999.5 or prefix == "P":
            break
        size /= 1000
    number = f"{size:.1f}" if (prefix or (unit == "" and 0 < size < 1)) and size < 9.95 else f"{size:.0f}"
    return f"{number} {prefix}{unit}" if unit else f"{number}{prefix}"


def duration(seconds: float | None) -> str:
    """`0s`, `12s`, `3m`, `2h 05m`, `4d`: how far behind, as one reads it."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    if whole < 172_800:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d"
