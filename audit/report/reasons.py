"""Why a row is not proven, as sentences, and what a person can do about each. Pure.

`reasons_of` adds to the reasons that reconciliation told what the row's sets say: records on their way,
unreported ones, gaps. `advice` and `next_step` are what to do. Called by `summary`, `tier_states`, `html` and
`explain`, so that report, console and scripts say the same. A tier that is a consumer group is spoken of as
one: no mirror fills it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.audit.contract.group_counts import TIER_PREFIX
from millrace.audit.contract.producer_names import NO_NAME
from millrace.audit.reconciliation.tier_reading import NOT_BEGUN

ON_THE_WAY = "in flight to tier "
UNREPORTED = "records were seen that no report tells of"
GAP = "a gap that the mirror recorded: "
CONTENT = "content differs"
"""How the reasons of a loss by contents begin (`content_check`)."""
BEFORE = "records lie before the place at which their mirror began"
_WAIVE = "`millrace audit waive` goes on without them."


def reasons_of(detail: Mapping[str, Any]) -> list[str]:
    """Everything that keeps a row from a proof, each once. `detail` is the row's, decoded."""
    told = list(detail.get("reasons", ()))
    for held in detail.get("in_flight", ()):
        tier = held["between"][1]
        if not any(reason.startswith(f"group {tier.removeprefix(TIER_PREFIX)} ") for reason in told):
            told.append(f"{ON_THE_WAY}{tier}")
    if detail.get("unreported"):
        told.append(UNREPORTED)
    told += [BEFORE if cause == NOT_BEGUN else f"{GAP}{cause}" for cause in detail.get("explained", {})]
    return list(dict.fromkeys(told))


_ADVICE = (
    (
        "a producer of the roster told nothing of this window",
        "Did it run then, and reach its own cluster? If it did, its records are in no count. If it joined "
        f"later, name its `since` in producers:; if it had nothing to send, {_WAIVE}",
    ),
    (
        "a producer of the roster",
        "Is it running, and does it reach its own cluster? It stays here until its first event is read.",
    ),
    (
        "the producer fell silent",
        "With a journal its next start settles it. Without one, or if it never starts again, waive its row.",
    ),
    (
        "no stream event was read",
        "Its announcement is lost or not readable: see below, what could not be trusted.",
    ),
    (
        "a report was too large for the events topic",
        "Raise max.message.bytes of the events topic: a producer that keeps a journal tells it at its next "
        f"start. Without one nobody can, and {_WAIVE}",
    ),
    (
        "no report covers these sequences",
        "A count event is missing. A producer that keeps a journal sends it again at its next start; without "
        f"one nobody can tell of them, and {_WAIVE}",
    ),
    (
        UNREPORTED,
        "The producer ended before it could report them. If it keeps a journal, its next start tells; "
        f"without one nobody can, and {_WAIVE}",
    ),
    (f"{ON_THE_WAY}{TIER_PREFIX}", "Run the audit again when the group has read and committed them."),
    (ON_THE_WAY, "On the way: run the audit again when the mirror has caught up."),
    (f"a gap before tier {TIER_PREFIX}", "The group passed these offsets without them."),
    (
        "a gap",
        "The mirror recorded that it could not carry these offsets; `millrace mirror status` tells why.",
    ),
    (
        BEFORE,
        "It began at the source's end (`start: latest`, or a time) and never carries what was there already; "
        f"{_WAIVE}",
    ),
    ("two producers use one stream id", "A copied machine or journal: give each its own journal folder."),
    (
        NO_NAME,
        "No audited producer writes such a name: something else sends records under this stream id.",
    ),
    ("the stream goes on after its end", "A copied machine or journal: give each its own journal folder."),
    (
        "the length of the windows changed",
        "Two settings of one producer's windows are in use: start it anew with one of them, which begins a "
        f"new stream; what this one told stays doubtful, and {_WAIVE}",
    ),
    (
        "two different reports",
        "Two processes report for one stream, a copied machine or journal: give each its own journal folder.",
    ),
    (
        "records without numbers",
        "A producer sends no sequence numbers, and no report says that it only counts.",
    ),
    (
        "records are there that the producer reported as never sent",
        "Its report and the clusters disagree: look at the producer's log of that time.",
    ),
    (
        "a record came late that has the number",
        "A copy whose time was changed on the way, most likely: nobody can tell any more. Look for what "
        f"carries or sends again what is older than `keep`, and {_WAIVE}",
    ),
    (
        f"tier {TIER_PREFIX}",
        "What the group's consumers report disagrees with their cluster: are all of them of one version?",
    ),
    (
        "contents of tier",
        "Every producer and consumer needs `millrace.content.digest`; what was read before `content:` was "
        f"true has no digests, and of a record of unknown fate none is told. {_WAIVE}",
    ),
    (
        "tier",
        "Something on the way rewrites record headers or times; the windows of this tier cannot be compared.",
    ),
    ("consumer", "Its next report may bring them; otherwise the group's counts are not complete."),
    ("the producer may not have reported all", "It has not closed yet: its next report may settle it."),
)

_OF_A_GROUP = (
    (
        "the group has not reported",
        "It commits and tells nothing: its consumers must be AuditedConsumer, or send `tier` events.",
    ),
    (
        "the group's first report is later",
        "What was appended before the group began to count it may have passed unread: audited by the group's "
        f"own count it never will be, and {_WAIVE}",
    ),
    (
        "the group files its records in windows of another length",
        "Give its consumers a window that the audit's can be divided by.",
    ),
    (
        "consumer ",
        "Its events are lost, or gone with their age. If it still runs, its next report may bring them; else "
        f"{_WAIVE}",
    ),
    ("", "What the group counted is not known in full; its next report may bring it."),
)

_OF_A_CLUSTER = (
    (
        "expired",
        "Records were deleted before the audit read them: run it more often, or keep data longer. "
        f"Nothing brings these back; {_WAIVE}",
    ),
    (
        "recreated",
        f"The topic was deleted and made anew: what the old one still held, nobody knows. {_WAIVE}",
    ),
    (
        "truncated",
        f"The log was cut, by a lost disk or an unclean election, and offsets given anew. {_WAIVE}",
    ),
    (
        "topic ",
        f"It was deleted: what stood in it since the last run nobody can tell. Make it again; {_WAIVE}",
    ),
    (
        "cluster ",
        "Is the audit's user allowed to describe and to read the topic there? Nothing of it was looked at.",
    ),
    ("a transaction is open", "It hides what comes after it: run the audit again when it has ended."),
    (
        "no audited source cluster knows",
        "It is produced into a cluster that the config does not name: add that cluster with tier: source.",
    ),
    ("", f"Run the audit again; if this part stays unreadable, {_WAIVE}"),
)


def advice(reason: str) -> str:
    """What a person can do about a reason; "" when there is nothing more to say."""
    if reason.startswith("part of tier "):
        tier, _, cause = reason.removeprefix("part of tier ").partition(" could not be read: ")
        return _first(_OF_A_GROUP if tier.startswith(TIER_PREFIX) else _OF_A_CLUSTER, cause)
    if reason.startswith("group ") and reason.endswith("name its topics"):
        return (
            "In the config, groups: {cluster: [{name: the group, topics: [those it reads]}]}. If it should "
            "read this one, it has not begun, or it has another name."
        )
    if reason.startswith("group "):
        return "Is the group running, and does it subscribe to this topic?"
    return _first(_ADVICE, reason)


def _first(known: tuple[tuple[str, str], ...], reason: str) -> str:
    return next((words for begins, words in known if reason.startswith(begins)), "")


def next_step(summary: Mapping[str, Any]) -> str:
    """What a person should do now; "" when nothing is to be done."""
    counts = summary["counts"]
    for kind in ("losses", "differing", "duplicates"):
        for found in summary[kind]:
            if found["window_start"] is not None:
                return f"millrace audit explain {found['topic']} {found['window_start']}"
    if summary["verdict"] != "UNKNOWN":
        return ""
    reasons = [each["reason"] for each in summary["reasons"]]
    if counts["in_flight"]:
        return _when_it_arrived(reasons)
    if any(not each.get("waived") for each in summary["untrusted"]):
        return "Look at what could not be trusted: until it is understood, nothing is called proven."
    for reason in reasons:
        if words := advice(reason):
            return f"{reason[:1].upper()}{reason[1:]}. {words}"
    if summary["windows"].get("OPEN"):
        return "Windows are still open: run the audit again when their producers have reported."
    return ""


def _when_it_arrived(reasons: list[str]) -> str:
    """Of all that is on its way, to whom; a mirror comes first, groups read what it brought."""
    here = [reason for reason in reasons if reason.startswith(ON_THE_WAY)]
    if any(not reason.startswith(f"{ON_THE_WAY}{TIER_PREFIX}") for reason in here):
        return "Records are on the way: run the audit again when the mirror has caught up."
    if here:
        groups = sorted({reason.removeprefix(f"{ON_THE_WAY}{TIER_PREFIX}") for reason in here})
        named = ", ".join(groups[:3]) + (" and others" if len(groups) > 3 else "")
        several = len(groups) > 1
        have = "groups {} have" if several else "group {} has"
        return f"Records are on the way: run the audit again when {have.format(named)} committed them."
    idle = next((reason for reason in reasons if reason.startswith("group ")), "")
    return f"{idle[:1].upper()}{idle[1:]}. {advice(idle)}" if idle else ""
