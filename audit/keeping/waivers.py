"""Waivers: a person's decision to go on without a window's proof, with who and why.

`millrace audit waive` gives one for a settled window of a topic, or for a stream's own row (a producer that
fell silent, a hole in its reports), for which the stream's id is named instead of a window. It is kept in the
state as `waivers/<topic>-<window or stream>.<n>.json` (`waiver_files`): a second one for the same window is
number 2 beside it, and the highest number is the one that counts. A long topic has a digest in place of its
end.

A waiver names what it was given for: the verdict of the last run and its counts, in how many rows contents
differ, and of a stream's own row its reasons. It *stands* while the window is no worse than that. When late
data makes it worse (a later revision with a worse verdict, or more records missing, doubled or in doubt), or
a stream is in doubt for another reason, or has spoken and fallen silent once more, the waiver has lapsed: the
window counts again, and only a new waiver ends that. Nothing is ever waived again by itself.

What a standing waiver does: the completeness watermark passes the window, and it no longer decides the job's
exit status. The verdict in the report stays what it is.

Called by `job`, `status`, `explain`, `runs.watermark_holds` and the command line.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.audit.keeping import waiver_files
from millrace.audit.keeping.state import Commit, StateDamaged, StateFolder
from millrace.audit.keeping.verdict_files import SettledLines, own_lines, pruned_files, resting_spans
from millrace.audit.reconciliation.row_keys import WINDOW, keys_of
from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.spans import are_in
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import FELL_SILENT, VERDICTS, Verdict
from millrace.audit.reconciliation.watermark import Waiver
from millrace.audit.reconciliation.window_totals import COLUMNS, window_totals
from millrace.broker.errors import ConfigError

MOST_OF_TOPIC = 150
"""characters of a topic in a file's name: Kafka allows 249, and 255 are all that a file's name may have"""
_ENDING = ".json"
_KIND = "waiver"
_KNOWN = {each.name for each in fields(Waiver)}
_ADDED = ("reasons", "silent_from_ms", "differing")
"""What older programs do not know of, and are not told where there is nothing to tell."""
_STREAM = re.compile(r"[0-9a-f]{16}")

_SUMS = ("missing", "duplicates", "doubtful", "differing")

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
    """All of them, of one target in the order in which they were given. Raises StateDamaged."""
    found = []
    for number, name, body in waiver_files.read(state, _ENDING, _KIND):
        if not _KNOWN.issuperset(body):
            raise StateDamaged(f"{state.where}/{name} is of a newer program; use that, or waive again")
        reasons = body.get("reasons")
        waiver = Waiver(**body | {"reasons": None if reasons is None else tuple(reasons)})
        found.append((number, waiver.at_ms, waiver.topic, str(target_of(waiver)[1]), waiver))
    return [waiver for *_, waiver in sorted(found, key=lambda each: each[:-1])]


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
    if found is None and isinstance(target, int) and _rests(state, latest, topic, target):
        found = {"verdict": str(Verdict.PROVEN)}
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
        reasons=found.get("reasons"),
        silent_from_ms=found.get("silent_from_ms"),
        differing=found["differing"] or None,
    )
    body = asdict(waiver)
    told = {name: body[name] for name in body if name not in _ADDED or body[name]}
    waiver_files.give(state, f"{_short(topic)}-{target}", _ENDING, _KIND, told)
    return waiver


def _short(topic: str) -> str:
    """The topic as a part of a file's name."""
    if len(topic) <= MOST_OF_TOPIC:
        return topic
    return f"{topic[:MOST_OF_TOPIC]}-{hashlib.sha256(topic.encode()).hexdigest()[:16]}"


def is_stream(text: str) -> bool:
    """Whether the argument names a stream and no window."""
    return _STREAM.fullmatch(text) is not None


def _rests(state: StateFolder, latest: Commit, topic: str, start_ms: int) -> bool:
    """Whether the window is at rest, so that no row tells of it."""
    spans = resting_spans(state, latest.resting, [topic])
    return bool(pc.any(are_in(keys_of([(topic, start_ms)], WINDOW), spans)).as_py())


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
        and (_covers_own(waiver, now) if waiver.stream else now["differing"] <= _differing(waiver))
    )


def _covers_own(waiver: Waiver, now: Mapping[str, Any]) -> bool:
    """A stream's row is of all its time: what is in it now may be another doubt than the one that was waived,
    or another silence."""
    reasons = now.get("reasons")
    if reasons is None:
        return True  # lines of an older program tell of none
    if waiver.reasons is not None and not set(reasons).issubset(waiver.reasons):
        return False
    silent = FELL_SILENT in reasons
    return not silent or (now["silent_from_ms"] or 0) <= (waiver.silence_ms or -1)


def _differing(waiver: Waiver) -> float:
    """In how many rows contents may differ. A loss of which nothing is missing is one of contents, in as many
    rows as there were where no number is kept."""
    if waiver.differing is not None:
        return waiver.differing
    return inf if waiver.verdict == str(Verdict.LOSS) and not waiver.missing else 0


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
    for table in (part for each in rows for part in _parts(each, _read_of(each))):
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
            held = found.setdefault(target, {"verdict": str(Verdict.PROVEN), **dict.fromkeys(_SUMS, 0)})
            held["verdict"] = max(
                held["verdict"], VERDICTS[line["worst_told"]], key=lambda word: Verdict[word]
            )
            for name in _SUMS:
                held[name] += line[name]
    for each in rows if streams else ():
        for target, detail in _own_details(each, streams):
            if target in found and detail is not None:
                told = json.loads(detail)
                found[target]["reasons"] = tuple(told.get("reasons", ()))
                found[target]["silent_from_ms"] = told.get("silent_from_ms")
    return found


def _own_details(rows: Rows, streams: Collection[str]) -> Iterator[tuple[Target, str | None]]:
    """The details of these streams' own rows, where rows have any."""
    if isinstance(rows, pa.Table) and "detail" not in rows.column_names:
        return
    for part in _parts(rows, ["topic", "stream", "window_start_ms", "detail"]):
        is_theirs = pc.is_in(part["stream"], pa.array(sorted(streams), pa.string()))
        own = part.filter(pc.and_(pc.is_null(part["window_start_ms"]), is_theirs))
        for row in own.to_pylist():
            yield (row["topic"], row["stream"]), row["detail"]


def _parts(rows: Rows, columns: Sequence[str]) -> Iterator[pa.Table]:
    return rows.rows(columns) if isinstance(rows, SettledLines) else parts_of(rows, columns)


def _read_of(rows: Rows) -> list[str]:
    """Lines of the state have no `state`: all are settled."""
    has_state = (
        "state" in rows.column_names if isinstance(rows, pa.Table) else not isinstance(rows, SettledLines)
    )
    return [*COLUMNS, "state"] if has_state else [*COLUMNS]


def waived_targets(standing: Iterable[Standing]) -> set[Target]:
    return {target_of(each.waiver) for each in standing if each.stands}
