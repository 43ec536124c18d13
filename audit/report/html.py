"""`index.html`: the audit for people, one self-contained file. Pure: summary and verdict rows in, text out.

Nothing is fetched when it is opened: style and script are inlined, the heatmaps are SVG made here, and the
page's own security policy forbids every other script and address. Everything that a producer or topic may
have named is made printable and short by `text`, then escaped by the template engine. The page is complete
without its script, which pages and filters the table and tells what a square stands for. However many rows
there are, it stays below 2 MB: the worst are shown, and the page says where the rest is. Called by `folder`.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from millrace.audit.reconciliation.row_parts import Rows, parts_of
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import (
    OPEN,
    OPEN_TOLD,
    OPEN_TONE,
    PRODUCED,
    STATES,
    Verdict,
)
from millrace.audit.report import text
from millrace.audit.report.drawing import MARKS, WORDS_OF_MANY, Drawings
from millrace.audit.report.heatmap import MOST_SQUARES, Windows, heatmaps, overview
from millrace.audit.report.plain import CALM, FOLDED, PlainRows, fold, script_json, table_data, tier_names
from millrace.audit.report.reasons import CONTENT, advice
from millrace.audit.report.resting_sums import RestingSums
from millrace.audit.report.sentences import duration, hop_name, older_findings, records

MOST_ROWS = 100  # of losses or duplicates; summary.json has more
MOST_PRODUCERS = 300
MOST_SENTENCES = 200
OPEN_ITEMS = 5  # of a hop, before a click shows more
STATE_WORDS = {state: OPEN_TOLD if state == OPEN else Verdict[state].told for state in STATES}
TONES = {state: OPEN_TONE if state == OPEN else Verdict[state].tone for state in STATES}


def _tones() -> str:
    """The colour of everything that is marked by a state."""
    return "".join(f".{state} {{ --tone: var(--{tone}); }}\n" for state, tone in TONES.items())


def render(summary: Mapping[str, Any], rows: Rows, resting: Sequence[RestingSums] = ()) -> str:
    """The whole page. `resting` are the sums of windows at rest, which have no `rows`."""
    tiers = tier_names(rows, [tier["name"] for tier in summary["tiers"]])
    tiers += sorted({tier for each in resting for tier in each.told["tiers"]} - set(tiers))
    waived = _waived(summary["waivers"])
    plain, windows = PlainRows(tiers), Windows(tiers)
    for part in parts_of(rows, FOLDED):
        plain.add(fold(part, tiers))
    windows.add_all(rows)
    for each in resting:
        plain.join(each.producers, each.told["tiers"], each.told["window_ms"])
        windows.join(each.squares, each.told["window_ms"])
    drawings = Drawings(waived, _standing(plain.doubtful, waived) if waived else ())
    picture = drawings.overview(overview(windows)) if windows.by_topic else None
    maps = [(each, drawings.heatmap(each)) for each in heatmaps(windows)]
    data: dict[str, Any] = {
        "table": table_data(plain, waived),
        "maps": drawings.data,
        "states": list(STATE_WORDS),
        "words": list(STATE_WORDS.values()),
        "calm": CALM,
        "daily": text.is_daily(summary["window_ms"]),
    }
    folder = files("millrace.audit.report")
    script = _file(folder, "report.js")
    environment = _environment(text.is_daily(summary["window_ms"]))
    return environment.from_string(_file(folder, "index.html.jinja")).render(
        summary=summary,
        title=Verdict[summary["verdict"]].title,
        words=STATE_WORDS,
        states=STATES,
        legend=[(state, WORDS_OF_MANY[state], MARKS.get(state, "")) for state in reversed(STATES)],
        tiers=tiers,
        flow=flow(summary, tiers),
        losses=by_hop(summary["losses"], MOST_ROWS, summary.get("losses_more", ())),
        duplicates=by_tier(summary["duplicates"], MOST_ROWS, summary.get("duplicates_more", ())),
        differing=_differing(rows),
        reasons=[each for each in summary["reasons"] if not each["reason"].startswith(CONTENT)],
        safe=safe_until(summary, plain.doubtful, waived),
        waived=waived,
        overview=picture,
        overview_left_out=overview(windows).left_out if windows.by_topic else 0,
        map_topics=_by_topic(maps),
        map_topics_left_out=len(windows.by_topic) - len({each.topic for each, _ in maps}),
        most_squares=MOST_SQUARES,
        square_ms=drawings.data[0]["square_ms"] if drawings.data else 0,
        older=older_findings(summary),
        late=late_producers(summary["late"]),
        producers=_worst_producers(summary["producers"]),
        total=plain.total,
        embedded=len(data["table"]["rows"]),
        revisions_more=summary.get("revisions_more", 0),
        first_rows=plain.worst.slice(0, 40).to_pylist(),
        most=MOST_ROWS,
        most_sentences=MOST_SENTENCES,
        open_items=OPEN_ITEMS,
        data=Markup(script_json(data)),
        style=Markup(_file(folder, "style.css") + _tones()),
        script=Markup(script),
        policy=_policy(script),
    )


def _environment(daily: bool) -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        count=text.count,
        ranges=text.ranges,
        day=functools.partial(text.day, daily=daily),
        span=text.length,
        time=iso_time,
        name=text.visible,
        sentence=text.sentence_text,
        moment=text.moment,
        instant=text.instant,
        place=text.place,
        duration=duration,
        records=records,
        advice=advice,
        commands=commands,
        begun=lambda told: told[:1].upper() + told[1:],
        hop=_hop,
    )
    return environment


def _file(folder: Any, name: str) -> str:
    return str(folder.joinpath(name).read_text("utf-8"))


def _policy(script: str) -> str:
    """Only the page's own script runs: were a name to slip through as markup, it would still do nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"


def commands(told: str) -> Markup:
    """A sentence for the page: what stands between backticks is something to type."""
    parts = told.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 and number < len(parts) - 1 else part
        for number, part in enumerate(parts)
    )


def _hop(tier: str) -> str:
    return text.visible(hop_name(tier))


def flow(summary: Mapping[str, Any], tiers: Sequence[str]) -> list[list[dict[str, Any]]]:
    """The way of the records, one column for each step: producers, sources, aggregates, groups."""
    missing: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for loss in (*summary["losses"], *summary.get("losses_more", ())):
        missing[loss["lost_between"][1]] += loss["count"]
    for each in (*summary["duplicates"], *summary.get("duplicates_more", ())):
        copies[each["tier"]] += each["count"]
    windows: dict[str, Counter[str]] = {}
    for topic in summary["topics"]:
        for tier in topic["tiers"]:
            windows.setdefault(tier["tier"], Counter()).update(tier["windows"])
    depths = _depths(summary["tiers"], tiers)
    told = {"name": "producers", "count": summary["counts"]["acknowledged"], "what": "acknowledged"}
    columns: list[list[dict[str, Any]]] = [[told | {"missing": 0, "copies": 0, "bar": []}]]
    columns += [[] for _ in range(max(depths.values(), default=0))]
    for tier in tiers:
        columns[depths[tier]].append(
            {
                "name": text.visible(tier),
                "count": summary["counts"]["seen"].get(tier, 0),
                "what": "seen",
                "missing": missing[tier],
                "copies": copies[tier],
                "bar": _bar(windows.get(tier, Counter())),
            }
        )
    return [column for column in columns if column]


def _depths(known: Sequence[Mapping[str, Any]], tiers: Iterable[str]) -> dict[str, int]:
    depths: dict[str, int] = {PRODUCED: 0}
    for tier in known:
        above = [depths.get(name, 0) for name in tier["upstream"]] or [max(depths.values())]
        depths[tier["name"]] = 1 + max(above)
    for name in tiers:
        # Several source clusters of one stream are one tier, named a+b.
        depths.setdefault(name, max((depths.get(part, 1) for part in name.split("+")), default=1))
    del depths[PRODUCED]
    return depths


def _bar(windows: Mapping[str, int]) -> list[dict[str, Any]]:
    """Shares of a tier's windows; what is not proven stays visible however rare it is."""
    whole = sum(windows.values())
    return [
        {"state": state, "count": windows[state], "share": max(100 * windows[state] / whole, 2)}
        for state in STATES
        if windows.get(state)
    ]


Findings = Sequence[Mapping[str, Any]]


def by_hop(losses: Findings, most: int, more: Findings = ()) -> list[dict[str, Any]]:
    """Losses by the hop that lost them, hops and their losses the greatest first; at most `most` are told one
    by one, and `more` have no name in the summary."""
    return _grouped(losses, lambda loss: tuple(loss["lost_between"]), most, more)


def by_tier(duplicates: Findings, most: int, more: Findings = ()) -> list[dict[str, Any]]:
    return _grouped(duplicates, lambda each: (each["tier"],), most, more)


def _grouped(found: Findings, key: Any, most: int, more: Findings) -> list[dict[str, Any]]:
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    unnamed: Counter[tuple[str, ...]] = Counter()
    for each in found:
        groups.setdefault(key(each), []).append(each)
        counts[key(each)] += each["count"]
    for each in more:
        groups.setdefault(key(each), [])
        counts[key(each)] += each["count"]
        unnamed[key(each)] += each["findings"]
    told = []
    for where, items in sorted(groups.items(), key=lambda group: -counts[group[0]]):
        shown = sorted(items, key=lambda each: -each["count"])[: max(most, OPEN_ITEMS)]
        most -= len(shown)
        told.append(
            {
                "where": where,
                "count": counts[where],
                "windows": len({(each["topic"], each["window_start"]) for each in items}),
                "producers": len({(each["topic"], each["producer"]) for each in items}),
                "items": shown,
                "rest": len(items) - len(shown) + unnamed[where],
                "unnamed": unnamed[where],
            }
        )
    return told


def _differing(rows: Rows) -> list[dict[str, Any]]:
    """Windows whose content differs, with the reasons that name the tiers."""
    names = ["topic", "producer", "window_start", "stream", "detail"]
    told: list[dict[str, Any]] = []
    for part in parts_of(rows, [*names, "content"]):
        found = part.filter(pc.equal(part["content"], "differs")).select(names)
        told += found.slice(0, MOST_ROWS - len(told)).to_pylist()
    for row in told:
        detail = json.loads(row.pop("detail"))
        row["where"] = [each for each in detail.get("reasons", ()) if each.startswith(CONTENT)]
        for tier, ranges in detail.get("differing", {}).items():
            row["where"].append(f"in {tier}: {text.ranges(ranges)}")
    return told


def _waived(waivers: Iterable[Mapping[str, Any]]) -> set[tuple[str, int]]:
    return {
        (each["topic"], _ms(each["window_start"]))
        for each in waivers
        if each["window_start"] is not None and each.get("stands", True)
    }


def _standing(doubtful: pa.Table, waived: Collection[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Windows in doubt that nobody has waived (`plain.PlainRows.doubtful`), but for those still open."""
    decided = doubtful.filter(pc.less(doubtful["state"], STATES.index(OPEN)))
    starts = zip(decided["topic"].to_pylist(), decided["window_start_ms"].to_pylist(), strict=True)
    return ((topic, ms) for topic, ms in starts if ms is not None and (topic, ms) not in waived)


def _ms(iso: str) -> int:
    return round(datetime.fromisoformat(iso).timestamp() * 1000)


def safe_until(
    summary: Mapping[str, Any], doubtful: pa.Table, waived: Collection[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Each topic's watermark, how far behind it is, and the first window that holds it up
    (`plain.PlainRows.doubtful`)."""
    at_ms = None if summary["at"] is None else _ms(summary["at"])
    told = []
    for topic, until in sorted(summary["watermarks"].items()):
        until_ms = None if until is None else _ms(until)
        told.append(
            {
                "topic": topic,
                "until": until,
                "behind_ms": None if until_ms is None or at_ms is None else at_ms - until_ms,
                "held_by": _first_doubt(doubtful, topic, until_ms, waived),
            }
        )
    if len(told) > MOST_ROWS:  # then those that are furthest behind
        told.sort(key=lambda each: -1 if each["behind_ms"] is None else 1 / (1 + max(0, each["behind_ms"])))
    return told


def _first_doubt(
    doubtful: pa.Table, topic: str, until_ms: int | None, waived: Collection[tuple[str, int]]
) -> dict[str, Any] | None:
    rows = doubtful.filter(pc.equal(doubtful["topic"], topic)).sort_by("window_start_ms")
    for row in rows.to_pylist():
        start_ms = row["window_start_ms"]
        if start_ms is None or (
            (until_ms is None or start_ms >= until_ms) and (topic, start_ms) not in waived
        ):
            return {"window_start": iso_time(start_ms), "state": STATES[row["state"]], **_who(row)}
    return None


def _who(row: Mapping[str, Any]) -> dict[str, str]:
    return {"producer": row["producer"]}


def late_producers(late: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Late windows by topic, producer and kind, the worst first."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for each in late:
        key = (each["topic"], each["producer"], each["kind"])
        held = found.setdefault(
            key,
            {"topic": key[0], "producer": key[1], "kind": key[2], "windows": 0, "worst": each},
        )
        held["windows"] += 1
        if each["by_ms"] > held["worst"]["by_ms"]:
            held["worst"] = each
    return sorted(found.values(), key=lambda each: (each["kind"] != "report", -each["worst"]["by_ms"]))


def _worst_producers(producers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    order = sorted(
        producers, key=lambda each: (STATES.index(each["verdict"]), each["topic"], each["producer"])
    )
    return {"shown": order[:MOST_PRODUCERS], "rest": max(0, len(order) - MOST_PRODUCERS)}


def _by_topic(maps: Sequence[tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Heatmaps side by side for each topic; open where there is only one topic."""
    topics: dict[str, dict[str, Any]] = {}
    for heatmap, picture in maps:
        held = topics.setdefault(
            heatmap.topic, {"topic": heatmap.topic, "square_ms": heatmap.square_ms, "maps": []}
        )
        held["maps"].append({"tier": heatmap.tier, "picture": picture})
    return list(topics.values())
