"""What `audit run` prints at its end: the verdict, what a person must know now, where the rest is. Pure.

The first line is the verdict and its sentence, alone with --quiet; nothing is longer than a terminal wants,
and no name can do anything to the terminal. Called by the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.audit.reconciliation.verdicts import Verdict, status_of
from millrace.audit.report.reasons import CONTENT
from millrace.audit.report.sentences import duration, hop_name, older_findings, records
from millrace.audit.report.summary import Cost
from millrace.audit.report.text import byte_size, ranges, sentence_text, visible

MOST_FINDINGS = 5
MOST_REASONS = 3
_NAME = 50
_STATUS = {
    0: "all settled windows are proven",
    1: "a loss or a duplicate",
    2: "not all is proven",
}


def console_lines(
    summary: Mapping[str, Any], where: str, config: str, status: int, cost: Cost | None = None
) -> Iterator[str]:
    """`where` is the report's page, `config` the config's path as it was given."""
    yield f"{summary['verdict']}   {summary['sentence']}"
    yield from _findings("lost", summary, "losses", _loss)
    yield from _findings("differs", summary, "differing", _differing)
    yield from _findings("twice", summary, "duplicates", _duplicate)
    yield from _reasons(summary)
    yield from _untrusted(summary["untrusted"])
    if older := older_findings(summary):
        yield _line("older", older)
    for back in summary.get("watermark_steps_back", ()):
        yield _line(
            "moved back",
            f"{visible(back['topic'], _NAME)}: was safe up to {back['before']}, is up to {back['after']}",
        )
    for topic, until in sorted(summary["watermarks"].items()):
        name = visible(topic, _NAME)
        yield _line("safe to use", f"{name} up to {until}" if until else f"nothing of {name} yet")
    lapsed = sum(not each["stands"] for each in summary.get("untrusted_waivers", ()))
    if lapsed:
        yield _line("waivers", f"{lapsed} no longer stand: more came that could not be trusted")
    lapsed = sum(not each.get("stands", True) for each in summary["waivers"])
    if lapsed:
        yield _line("waivers", f"{lapsed} no longer stand: their windows have got worse")
    following = summary["next"]
    if following.startswith("millrace "):
        following = f"{sentence_text(following)} --config {config}"
    if following:
        yield _line("next", following)
    if cost is not None:
        read = f"{records(cost.records)}, {byte_size(cost.bytes)}, in {duration(1000 * cost.seconds)}"
        yield _line("read", f"{read}; the state has {byte_size(cost.state_bytes)}")
    yield _line("report", where)
    meaning = _STATUS.get(status, "the run failed")
    if _is_waived(summary, status):
        given = [*summary["waivers"], *summary.get("untrusted_waivers", ())]
        standing = sum(each.get("stands", True) for each in given)
        cover = "1 waiver covers" if standing == 1 else f"{standing} waivers cover"
        meaning = {0: "nothing is unproven"}.get(status, meaning) + f" but what {cover}"
    elif summary["verdict"] == "COUNT_MATCH":
        meaning = "the counts agree"
    yield _line("exit status", f"{status}, {meaning}")


def _is_waived(summary: Mapping[str, Any], status: int) -> bool:
    return status_of(Verdict[summary["verdict"]]) != status


def _line(word: str, text: str) -> str:
    return f"  {word:<12} {text}"


def _findings(word: str, summary: Mapping[str, Any], kind: str, tell: Any) -> Iterator[str]:
    found = summary[kind]
    for each in found[:MOST_FINDINGS]:
        yield _line(word, tell(each))
    unnamed = sum(each["findings"] for each in summary.get(f"{kind}_more", ()))
    more = len(found) + unnamed - MOST_FINDINGS
    if more > 0:
        where = "reconciliation.parquet" if unnamed else "summary.json"
        yield _line("", f"and {more:,} more, all named in {where}")


def _loss(loss: Mapping[str, Any]) -> str:
    upstream, downstream = (hop_name(tier) for tier in loss["lost_between"])
    return f"{_named(loss)}, between {upstream} and {downstream}"


def _duplicate(each: Mapping[str, Any]) -> str:
    return f"{_named(each)}, first in {each['tier']}"


def _differing(each: Mapping[str, Any]) -> str:
    where = f"{visible(each['topic'], _NAME)} {each['window_start']}, {visible(each['producer'], _NAME)}"
    return f"{where}: {sentence_text('; '.join(each['where']))}{', waived' if each.get('waived') else ''}"


def _named(found: Mapping[str, Any]) -> str:
    numbers = f"#{ranges(found['sequences'][:3])}" if found["sequences"] else "not named"
    more = len(found["sequences"]) - 3
    where = f"{visible(found['topic'], _NAME)} {found['window_start'] or 'no window known'}"
    return (
        f"{found['count']:,} of {where}, {visible(found['producer'], _NAME)} "
        f"{numbers}{f' and {more:,} more ranges' if more > 0 else ''}"
        f"{', waived' if found.get('waived') else ''}"
    )


def _reasons(summary: Mapping[str, Any]) -> Iterator[str]:
    reasons = [each for each in summary["reasons"] if not each["reason"].startswith(CONTENT)]
    for each in reasons[:MOST_REASONS]:
        windows = "window" if each["count"] == 1 else "windows"
        yield _line("unknown", f"{sentence_text(each['reason'])} ({each['count']:,} {windows})")
    if len(reasons) > MOST_REASONS:
        yield _line("", f"and {len(reasons) - MOST_REASONS:,} more reasons")


def _untrusted(untrusted: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in untrusted[:MOST_REASONS]:
        waived = ", waived" if each.get("waived") else ", older" if each.get("older") else ""
        yield _line("not trusted", f"{visible(each['what'], 120)} ({each['count']:,}{waived})")
    if len(untrusted) > MOST_REASONS:
        yield _line("", f"and {len(untrusted) - MOST_REASONS:,} more kinds")
