"""Waivers: a person's decision to go on without a window's proof, with who and why.

`millrace audit waive` gives one for a settled window of a topic, or for a stream's own row (a producer that
fell silent, a hole in its reports), for which the stream's id is named instead of a window. It is kept in the
state as `waivers/<topic>-<window or stream>.<n>.json`, made only if absent and never changed: a second one
for the same window is number 2 beside it. A long topic has a digest in place of its end.

A waiver names what it was given for: the verdict of the last run and its counts. It *stands* while the window
is no worse than that. When late data makes it worse (a later revision with a worse verdict, or more records
missing, doubled or in doubt), the waiver has lapsed: the window counts again, and only a new waiver ends
that. Nothing is ever waived again by itself.

What a standing waiver does: the completeness watermark passes the window, and it no longer decides the job's
exit status. The verdict in the report stays what it is.

Called by `job`, `status`, `explain`, `runs.watermark_holds` and the command line.
"""

from __future__ import annotations

import getpass
import hashlib
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.keeping.state import (
    Commit,
    StateDamaged,
    StateFolder,
    guard_fits,
    guarded,
    guarded_body,
)
from millrace.audit.keeping.verdict_files import SettledLines, own_lines, pruned_files
from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import VERDICTS, Verdict
from millrace.audit.reconciliation.watermark import Waiver
from millrace.audit.reconciliation.window_totals import COLUMNS, window_totals
from millrace.broker.errors import ConfigError

MOST_OF_TOPIC = 150
"""characters of a topic in a file's name: Kafka allows 249, and 255 are all that a file's name may have"""
_STREAM = re.compile(r"[0-9a-f]{16}")

Target = tuple[str, int | str]
"""(topic, start of the window or id of the stream)"""


@dataclass(frozen=True, slots=True)
class Standing:
    """A waiver and whether it still stands."""

    waiver: Waiver
    stands: bool

    def told(self) -> dict[str, Any]:
        """As it stands in the summary."""
        waiver = self.waiver
        return {
            "topic": waiver.topic,
            "window_start": iso_time(waiver.window_start_ms),
            "stream": waiver.stream,
            "who": waiver.who,
            "why": waiver.why,
            "at": iso_time(waiver.at_ms),
            "verdict": waiver.verdict,
            "stands": self.stands,
        }


def here() -> str:
    """`user@host`: who waives when nobody is named."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def target_of(waiver: Waiver) -> Target:
    return (waiver.topic, waiver.stream if waiver.window_start_ms is None else waiver.window_start_ms)


def read_waivers(state: StateFolder) -> list[Waiver]:
    """All of them, oldest first. Raises StateDamaged."""
    found = []
    for entry in state.files.entries("waivers"):
        if entry.name.startswith(".") or not entry.name.endswith(".json"):
            continue
        name = f"waivers/{entry.name}"
        content = state.files.read(name)
        body = guarded_body(content, "waiver")
        if body is None or not guard_fits(content, "waiver"):
            raise StateDamaged(f"{state.where}/{name} is damaged; remove it and waive again")
        found.append(Waiver(**body))
    return sorted(found, key=lambda waiver: (waiver.at_ms, waiver.topic, str(target_of(waiver)[1])))


def newest_waiver(state: StateFolder, topic: str, target: int | str) -> Waiver | None:
    """The one that a further waiver of the same target replaces."""
    found = [each for each in read_waivers(state) if target_of(each) == (topic, target)]
    return found[-1] if found else None


def give_waiver(state: StateFolder, topic: str, target: int | str, who: str, why: str, at_ms: int) -> Waiver:
    """Keep a waiver for what the last run said. Raises ConfigError when there is nothing to waive."""
    if not why.strip():
        raise ConfigError("--why", why, "a reason: somebody will ask for it")
    if not who.strip():
        raise ConfigError("--who", who, "a name")
    latest = state.latest()
    found = None
    if latest.verdicts:
        settled = SettledLines(state, latest.verdicts)
        found = _by_target([settled], [(topic, target)]).get((topic, target))
    place = f"stream {target}" if isinstance(target, str) else f"{iso_time(target)}"
    if found is None:
        raise ConfigError(
            "window", place, f"a settled window of topic {topic}, or a stream with a row of its own"
        )
    if Verdict[found["verdict"]] <= Verdict.COUNT_MATCH:
        raise ConfigError("window", place, f"one that is not proven: this one is {found['verdict']}")
    waiver = Waiver(
        topic=topic,
        window_start_ms=target if isinstance(target, int) else None,
        who=" ".join(who.split()),
        why=" ".join(why.split()),
        at_ms=at_ms,
        stream=target if isinstance(target, str) else "",
        verdict=found["verdict"],
        missing=found["missing"],
        duplicates=found["duplicates"],
        doubtful=found["doubtful"],
    )
    content = guarded("waiver", asdict(waiver))
    number = 1
    while not state.files.create(f"waivers/{_short(topic)}-{target}.{number}.json", content):
        number += 1
    return waiver


def _short(topic: str) -> str:
    """The topic as a part of a file's name."""
    if len(topic) <= MOST_OF_TOPIC:
        return topic
    return f"{topic[:MOST_OF_TOPIC]}-{hashlib.sha256(topic.encode()).hexdigest()[:16]}"


def is_stream(text: str) -> bool:
    """Whether the argument names a stream and no window."""
    return _STREAM.fullmatch(text) is not None


def standing_waivers(
    waivers: Iterable[Waiver], rows: Rows, settled: pa.Table | None = None
) -> list[Standing]:
    """Whether each still covers what the rows say now (of the report, or the settled ones of the state); the
    newest of a target counts.

    The report has no rows of pruned windows; the lines that are left of them in `settled` are counted with
    it, so that what they were waived for does not cover what another stream lost since.
    """
    newest: dict[Target, Waiver] = {}
    for waiver in waivers:
        newest[target_of(waiver)] = waiver
    told: list[Rows] = [rows] if settled is None else [rows, settled.filter(settled["folded"])]
    worst = _by_target(told, newest)
    return [Standing(waiver, _covers(waiver, worst.get(target))) for target, waiver in newest.items()]


def pruned_beside(state: StateFolder, latest: Commit, report_at: str | None) -> pa.Table:
    """The lines of pruned windows (SETTLED_SCHEMA) that the report of that time has no rows of. What the
    `latest` commit's own run pruned is still among that run's rows."""
    names = latest.verdicts
    if report_at == iso_time(latest.at_ms):
        own = pruned_files(names)
        names = [name for name in names if name not in own]
    return own_lines(state, names)[1]


def _covers(waiver: Waiver, now: Mapping[str, Any] | None) -> bool:
    if now is None:
        return True  # pruned, or proven by now and without a row of its own
    return bool(
        Verdict[now["verdict"]] <= Verdict[waiver.verdict]
        and now["missing"] <= waiver.missing
        and now["duplicates"] <= waiver.duplicates
        and now["doubtful"] <= waiver.doubtful
    )


def _by_target(rows: Iterable[Rows], targets: Collection[Target]) -> dict[Target, dict[str, Any]]:
    """The worst verdict and the sums of these targets, over all streams of a window, or of a stream's own
    row; of what is open, only losses and duplicates."""
    if not targets:
        return {}  # as in most audits: no row need be read
    topics, starts, streams = (
        {topic for topic, _ in targets},
        {target for _, target in targets if isinstance(target, int)},
        {target for _, target in targets if isinstance(target, str)},
    )
    found: dict[Target, dict[str, Any]] = {}
    for table in (part for each in rows for part in parts_of(each, _read_of(each))):
        is_window = pc.is_in(table["window_start_ms"], pa.array(sorted(starts), pa.int64()))
        is_own = pc.and_(
            pc.is_null(table["window_start_ms"]),
            pc.is_in(table["stream"], pa.array(sorted(streams), pa.string())),
        )
        is_theirs = pc.is_in(table["topic"], pa.array(sorted(topics), pa.string()))
        theirs = table.filter(pc.and_(is_theirs, pc.or_(is_window, is_own)))
        for line in window_totals(theirs).to_pylist() if theirs.num_rows else ():
            start_ms = line["window_start_ms"]
            target: Target = (line["topic"], line["stream"] if start_ms is None else start_ms)
            if not line["telling"]:
                continue
            held = found.setdefault(
                target, {"verdict": str(Verdict.PROVEN), "missing": 0, "duplicates": 0, "doubtful": 0}
            )
            held["verdict"] = max(
                held["verdict"], VERDICTS[line["worst_told"]], key=lambda word: Verdict[word]
            )
            for name in ("missing", "duplicates", "doubtful"):
                held[name] += line[name]
    return found


def _read_of(rows: Rows) -> list[str]:
    """Lines of the state have no `state`: all are settled (`SettledLines` gives what it has)."""
    has_state = not isinstance(rows, pa.Table) or "state" in rows.column_names
    return [*COLUMNS, "state"] if has_state else [*COLUMNS]


def waived_targets(standing: Iterable[Standing]) -> set[Target]:
    return {target_of(each.waiver) for each in standing if each.stands}
