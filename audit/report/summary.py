"""`summary.json`: the audit's answer for machines. Pure: verdict rows and notes in, one dictionary out.

The schema is a contract (`SUMMARY_VERSION` rises when a key changes its meaning; keys may be added). It is
told in full, with every field's type, by `summary.schema.json` beside this file (made from `document`):

    version         1
    verdict         PROVEN | COUNT_MATCH | UNKNOWN | DUPLICATE | LOSS; the worst wins, which is the last of
                    these. COUNT_MATCH: all is proven but for producers that do not number their records;
                    their counts agree, in which a loss and a duplicate would cancel
    exit_status     0, 1 or 2, as the job ends with: the same of what no standing waiver covers
    sentence        the verdict for a person
    next            what to do now, for a person; "" when nothing is to be done
    counts          acknowledged, seen {tier: distinct records}, missing, duplicates (extra copies),
                    unreported, unknown, explained, in_flight
    losses          [{topic, producer, stream, window_start, sequences [[first, last], ...], count,
                      lost_between [tier, tier], places [...], waived}]   `sequences` is empty for a producer
                    that only counts; `places` tell where some of them were last had (`neighbours`); `waived`
                    only where a standing waiver covers it
    duplicates      [{topic, producer, stream, window_start, sequences, count (extra copies), tier, waived}]
    losses_more     [{topic, lost_between, findings, count}]: what is beyond the greatest `tally.MOST_NAMED`;
                    only where there is any. Each is named in `reconciliation.parquet`
    duplicates_more [{topic, tier, findings, count}]: the same of `duplicates`
    differing       [{topic, producer, stream, window_start, where [sentences], waived}]: windows in which
                    records arrived with other content than was sent, which is a loss; `where` tells between
                    which tiers, or of copies in one tier
    differing_more  [{topic, where, findings}]: the same of `differing`
    windows         {PROVEN | COUNT_MATCH | UNKNOWN | DUPLICATE | LOSS | OPEN: how many}
    open            {windows, acknowledged, in_flight}: of the windows that are not settled, which the verdict
                    does not speak of (but for a loss or duplicate in one); `counts` has their records too
    tiers           [{name, upstream [names]}], in order
    topics          [{topic, verdict, windows, waived, acknowledged, missing, duplicates, in_flight,
                      unreported, unknown, explained, tiers [{tier, seen, missing, duplicates, windows}]}];
                      `waived`: how many of `windows` a standing waiver covers, only where there are any
    producers       [{topic, producer, published, consumed {tier: records}, missing, duplicates, verdict}]
    late            [{topic, producer, window_start, by_ms, kind}]: the latest first, at most MOST_LATE. Kind
                    `records`: the last record was appended `by_ms` after its window's end; `report`: the
                    window ended `by_ms` ago and its producer has not promised that it is complete
    late_more       [{topic, kind, windows}]: how many there are beyond those; only where there are any
    latency         [{topic, between [tier, tier], windows, p50_ms, p99_ms, max_ms}]: estimates (`latency`)
    content         {compared, not_compared, differs}: windows, where content is audited
    watermarks      {topic: ISO time or null}: everything created before is proven or waived
    watermark_steps_back  [{topic, before, after}]: late data took a proof away; only where it did
    waivers         [{topic, window_start, stream, who, why, at, verdict, stands}]: of a window, or of a
                    stream where window_start is null; `stands` is false once the window has got worse
    revisions       [{topic, producer, window_start, revision, before, after}]
    revisions_more  how many there are beyond those that were made last; only where there are any
    untrusted       [{what, count, waived, older, holds [topics]}]    what was read and could not be believed;
                    `waived` where a standing waiver accepts it; `holds` the topics whose watermark waits
                    until it is gone or waived
    untrusted_waivers  [{untrusted, count, who, why, at, stands}]: for what has these words in its name; only
                    where there are any. `stands` is false once more of it came
    reasons         [{reason, count}]                 why windows are unknown, the commonest first
    notes           [sentence]                        what else a reader should know; changes no verdict
    unaudited       records without an identity header, {tier: n}
    foreign         [{topic, tier, count}]: records that came into the topic with the identity of another
                    topic's stream; they are not audited
    older           {since, windows, streams, losses, duplicates, differing}: findings that were told for long
                    enough, of before `since` (`reconciliation.horizon`): they are in nothing above, and
                    decide neither verdict nor status; only where there are any. `streams` is how many are
                    in doubt as a whole, `losses_more` and its like as above. `untrusted` has `older` in
                    what decides no more
    rows_at_rest    files of the report that have rows beside `reconciliation.parquet`, of windows at rest
                    (`folder`); only where there are any
    at, window_ms   when it was taken (ISO 8601) and the window's length
    run             {records, bytes, seconds, state_bytes, state_files}: what the run read of the clusters
                    (bytes as they lie in their logs), how long it took up to its report, and how large the
                    state is now. Not of what was found, so `job` adds it

`window_start` is ISO 8601 UTC; null where no window can be named (a lost tail). Totals agree with the rows
of `reconciliation.parquet` and `rows_at_rest` by construction: both are made from the same verdicts (the rows
are those of the totals and those of `older`). `windows` counts such rows: one for each stream and window.

Called by `job`; read by `html`, the command line and users' scripts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.audit.reconciliation.row_parts import Rows
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.reconciliation.verdicts import status_of
from millrace.audit.report.reasons import next_step
from millrace.audit.report.sentences import sentence
from millrace.audit.report.tally import TOTALS, Tally

SUMMARY_VERSION = 1

Tier = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run took, for whoever pays for it."""

    records: int
    bytes: int
    seconds: float
    state_bytes: int
    state_files: int


def summarise(
    rows: Rows,
    *,
    tiers: Iterable[Tier],
    at_ms: int,
    window_ms: int,
    untrusted: Mapping[str, int],
    unaudited: Mapping[str, int],
    foreign: Mapping[tuple[str, str], int] | None = None,
    grace_ms: int = 0,
    accepted: Collection[str] = (),
    waived: Collection[tuple[str, int | str]] = (),
    doubted: bool | None = None,
    in_doubt: bool | None = None,
    older: Rows | None = None,
    older_untrusted: Collection[str] = (),
    holds: Mapping[str, Sequence[str]] | None = None,
    since_ms: int | None = None,
    untrusted_waivers: Sequence[Mapping[str, Any]] = (),
    waivers: Sequence[Mapping[str, Any]] = (),
    watermarks: Mapping[str, str | None] | None = None,
    revisions: Sequence[Mapping[str, Any]] = (),
    revised_more: int = 0,
    notes: Sequence[str] = (),
    resting: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The summary of the verdict rows, and of those at rest, of which `resting` are sums
    (`Tally.proven_sums`).

    `tiers` in order, as names or as {"name", "upstream": [names]}; `accepted` those of `untrusted` that are
    waived; `waived` (topic, window's start or stream) what standing waivers cover and `in_doubt` whether
    anything of `untrusted` counts all the same, both for the exit status alone, and `doubted` whether
    anything of it does for the verdict (None: all of it does); `older` the rows that are older than
    `since_ms` (`horizon.split_older`), and `older_untrusted` what is; `holds` {what of `untrusted`: topics
    whose watermark it holds}; `waivers`, `untrusted_waivers`, `watermarks` and `revisions` as they stand in
    the summary.
    """
    order = [_tier(each) for each in tiers]
    tally = Tally(order, at_ms, grace_ms)
    tally.add_all(rows)
    for sums in resting:
        tally.join(sums)
    doubted = bool(untrusted) if doubted is None else doubted
    in_doubt = doubted if in_doubt is None else in_doubt
    totals = tally.totals
    summary: dict[str, Any] = {
        "version": SUMMARY_VERSION,
        "verdict": str(tally.fold.verdict(doubted)),
        "exit_status": status_of(tally.unwaived(waived).verdict(in_doubt)),
        "sentence": "",
        "next": "",
        "counts": {
            "acknowledged": totals["acknowledged"],
            "seen": dict(tally.seen),
            **{name: totals[name] for name in TOTALS if name != "acknowledged"},
        },
        "losses": tally.losses(waived),
        "duplicates": tally.duplicates(waived),
        "differing": tally.differing(waived),
        "windows": dict(sorted(tally.windows.items())),
        "open": {name: tally.open[name] for name in ("windows", "acknowledged", "in_flight")},
        "tiers": order,
        "topics": [tally.topics[topic].told(waived) for topic in sorted(tally.topics)],
        "producers": tally.producers(),
        "late": tally.late_first(),
        "latency": tally.latencies.told(),
        "content": {name.replace(" ", "_"): tally.content[name] for name in _CONTENT},
        "watermarks": dict(watermarks or {}),
        "waivers": [dict(each) for each in waivers],
        "revisions": [dict(each) for each in revisions],
        "untrusted": [
            {"what": what, "count": count}
            | ({"waived": True} if what in accepted else {})
            | ({"older": True} if what in older_untrusted else {})
            | ({"holds": list(holds[what])} if holds and holds.get(what) else {})
            for what, count in sorted(untrusted.items())
        ],
        "reasons": [{"reason": reason, "count": count} for reason, count in tally.reasons()],
        "notes": list(notes),
        "unaudited": dict(sorted(unaudited.items())),
        "foreign": [
            {"topic": topic, "tier": tier, "count": count}
            for (topic, tier), count in sorted((foreign or {}).items())
        ],
        "at": iso_time(at_ms),
        "window_ms": window_ms,
    }
    past = Tally(order, at_ms, grace_ms)
    if older is not None:
        past.add_all(older)
    if past.topics:
        summary["older"] = {
            "since": iso_time(since_ms),
            "windows": dict(sorted(past.windows.items())),
            "streams": past.own,
            "losses": past.losses(waived),
            "duplicates": past.duplicates(waived),
            "differing": past.differing(waived),
            **past.more(),
        }
    summary |= tally.more()
    if late_more := tally.late_more():
        summary["late_more"] = late_more
    if revised_more:
        summary["revisions_more"] = revised_more
    if untrusted_waivers:
        summary["untrusted_waivers"] = [dict(each) for each in untrusted_waivers]
    summary["sentence"] = sentence(summary)
    summary["next"] = next_step(summary)
    return summary


_CONTENT = ("compared", "not compared", "differs")


def _tier(tier: Tier) -> dict[str, Any]:
    if isinstance(tier, str):
        return {"name": tier, "upstream": []}
    return {"name": tier["name"], "upstream": list(tier.get("upstream", ()))}


def exit_status(summary: Mapping[str, Any]) -> int:
    """0 all settled windows proven (or matched by count), 1 loss or duplicate, 2 unknown or unreported."""
    return int(summary["exit_status"])
