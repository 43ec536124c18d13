"""The audit's words for people: the one sentence of a summary, amounts and durations. Pure.

Called by `summary`, `html`, `explain` and the command line, so that report, console and scripts say the same;
what to do next is told by `reasons`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millrace.audit.reconciliation.verdicts import PRODUCED

MOST_HOPS = 3
MOST_TIERS = 4
MOST_TOPICS = 3


def sentence(summary: Mapping[str, Any]) -> str:
    """One plain sentence for the verdict. What is said to have arrived is said of settled windows."""
    match summary["verdict"]:
        case "PROVEN":
            told = f"All {_settled(summary)} arrived, each exactly once"
        case "COUNT_MATCH":
            told = (
                f"As many records arrived as the {_settled(summary)}, but not all producers number their "
                "records: a loss and a duplicate of one would not show"
            )
        case "LOSS":
            return _loss(summary)
        case "DUPLICATE":
            return _duplicate(summary)
        case _:
            return _unknown(summary)
    still_open = _open(summary)
    return f"{told}; {still_open}." if still_open else f"{told}."


def older_findings(summary: Mapping[str, Any]) -> str:
    """`2 records lost: of before 2026-10-24T00:00:00Z and told since, not in the verdict`; "" where there is
    nothing of the kind."""
    older = summary.get("older")
    if not older:
        return ""
    lost, copies = (
        sum(each["count"] for each in (*older[name], *older.get(f"{name}_more", ())))
        for name in ("losses", "duplicates")
    )
    differing = len(older["differing"]) + sum(each["findings"] for each in older.get("differing_more", ()))
    unknown, streams = older["windows"].get("UNKNOWN", 0), older["streams"]
    found = [
        f"{records(lost)} lost" if lost else "",
        f"{copies:,} extra {_copies(copies)}" if copies else "",
        f"other content in {differing:,} {'window' if differing == 1 else 'windows'}" if differing else "",
        f"{unknown:,} unknown {'window' if unknown == 1 else 'windows'}" if unknown else "",
        f"{streams:,} {'stream' if streams == 1 else 'streams'} in doubt" if streams else "",
    ]
    return f"{', '.join(filter(None, found))}: of before {older['since']} and told since, not in the verdict"


def _settled(summary: Mapping[str, Any]) -> str:
    still_open = summary["open"]
    count = summary["counts"]["acknowledged"] - still_open["acknowledged"]
    told = f"{records(count)} that producers had acknowledged"
    return f"{told} in settled windows" if still_open["windows"] else told


def _open(summary: Mapping[str, Any]) -> str:
    """`2 windows are still open (11 records acknowledged, 1 still on the way)`; "" where none is."""
    still_open = summary["open"]
    number, waiting = still_open["windows"], still_open["in_flight"]
    if not number:
        return ""
    told = f"{records(still_open['acknowledged'])} acknowledged" + (
        f", {waiting:,} still on the way" if waiting else ""
    )
    return f"{number:,} {'window is' if number == 1 else 'windows are'} still open ({told})"


def _loss(summary: Mapping[str, Any]) -> str:
    counts = summary["counts"]
    where = _hops([*summary["losses"], *summary.get("losses_more", ())])
    copies = counts["duplicates"]
    also = f" {copies:,} extra {_copies(copies)} arrived." if copies else ""
    if lost_content := summary["content"]["differs"]:
        windows = "window" if lost_content == 1 else "windows"
        also += f" In {lost_content:,} {windows} records arrived with other content than was sent."
    lost, acknowledged = counts["missing"], counts["acknowledged"]
    if not lost:
        return also.strip() or "Records arrived with other content than was sent."
    # As many as were acknowledged may be others: unreported ones. That a tier saw none tells.
    if lost == acknowledged and 0 in counts["seen"].values():
        all_of_them = f"All {lost:,} acknowledged records were" if lost > 1 else "The only record was"
        return f"{all_of_them} lost{where}.{also}"
    if lost > acknowledged:
        were = "was" if lost == 1 else "were"
        told = f"{records(lost)} {were} lost{where}, more than the {acknowledged:,} acknowledged.{also}"
    else:
        told = f"{lost:,} of {acknowledged:,} acknowledged records were lost{where}.{also}"
    return f"{_total_losses(summary)}{told}"


def _total_losses(summary: Mapping[str, Any]) -> str:
    """`Nothing that was acknowledged of topic orders arrived in agg. `: the loudest, and first."""
    nowhere = [
        (each["topic"], next(tier["tier"] for tier in each["tiers"] if _lost_all(each, tier)))
        for each in summary.get("topics", ())
        if any(_lost_all(each, tier) for tier in each["tiers"])
    ]
    if not nowhere:
        return ""
    named = ", and ".join(f"of topic {topic} arrived in {tier}" for topic, tier in nowhere[:MOST_TOPICS])
    more = len(nowhere) - MOST_TOPICS
    others = f", and of {more:,} more {'topics' if more > 1 else 'topic'}" if more > 0 else ""
    return f"Nothing that was acknowledged {named}{others}. "


def _lost_all(topic: Mapping[str, Any], tier: Mapping[str, Any]) -> bool:
    return bool(not tier["seen"] and tier["missing"] >= topic["acknowledged"] > 0)


def _hops(losses: Iterable[Mapping[str, Any]]) -> str:
    """` between ewr/jfk and agg, and between producers and lga`."""
    upstreams: dict[str, set[str]] = {}
    for loss in losses:
        upstream, downstream = loss["lost_between"]
        upstreams.setdefault(downstream, set()).add(hop_name(upstream))
    hops = [
        f"between {'/'.join(sorted(above)[:MOST_TIERS])}{'/…' if len(above) > MOST_TIERS else ''} and {tier}"
        for tier, above in sorted(upstreams.items())
    ]
    if not hops:
        return ""
    more = f", and before {len(hops) - MOST_HOPS} more tiers" if len(hops) > MOST_HOPS else ""
    return f" {', and '.join(hops[:MOST_HOPS])}{more}"


def hop_name(tier: str) -> str:
    return "producers" if tier == PRODUCED else tier


def _duplicate(summary: Mapping[str, Any]) -> str:
    acknowledged, copies = records(summary["counts"]["acknowledged"]), summary["counts"]["duplicates"]
    extra = f"{copies:,} extra {_copies(copies)} arrived"
    rest = [*_open_questions(summary), *filter(None, [_open(summary)])]
    if not rest and not summary["windows"].get("UNKNOWN"):
        return f"Nothing of {acknowledged} was lost, but {extra}."
    why = f": {'; '.join(rest)}" if rest else ""
    return f"No loss was found among {acknowledged}, but {extra}, and not all is proven{why}."


def _unknown(summary: Mapping[str, Any]) -> str:
    counts = summary["counts"]
    if not summary["windows"] and not counts["acknowledged"]:
        return "Nothing is proven: no producer reported and no audited record was seen."
    told = _open_questions(summary)
    if not told and summary["reasons"]:
        told.append(summary["reasons"][0]["reason"])
    why = "; ".join(told) or "no window is settled yet, or a producer has not reported"
    return f"No loss was found among {records(counts['acknowledged'])}, but not all is proven: {why}."


def _open_questions(summary: Mapping[str, Any]) -> list[str]:
    counts = summary["counts"]
    found = [
        f"{records(counts[name])} {text}"
        for name, text in (
            ("in_flight", "still on the way"),
            ("unreported", "seen but not reported by a producer"),
            ("explained", "skipped for a known cause"),
            ("unknown", "that cannot be told"),
        )
        if counts[name]
    ]
    amount = sum(each["count"] for each in summary["untrusted"] if not each.get("older"))
    if amount:
        found.append(f"{amount:,} {'thing' if amount == 1 else 'things'} that could not be trusted")
    return found


def records(count: int) -> str:
    return f"{count:,} {'record' if count == 1 else 'records'}"


def _copies(count: int) -> str:
    return "copy" if count == 1 else "copies"


def duration(ms: float) -> str:
    """`80 ms`, `3.2 s`, `14 min`, `5 h 20 min`, `12 d`: as exact as a person needs."""
    sign, ms = ("-", -ms) if ms < 0 else ("", ms)
    if ms < 1000:
        return f"{sign}{ms:.0f} ms"
    if ms < 60_000:
        return f"{sign}{ms / 1000:.3g} s"
    minutes = round(ms / 60_000)
    if minutes < 120:
        return f"{sign}{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{sign}{hours} h {minutes} min" if minutes else f"{sign}{hours} h"
    return f"{sign}{round(hours / 24)} d"
