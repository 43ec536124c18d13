"""What consumer groups got, from the events of their members: a group is a tier without cells. Pure.

Called by the job, which hands the result to `reconcile` as the tier `group:<group>`.

Members of a group, and its restarts, count for themselves (`TierEvent.session`). A group's set is their
union. A record that two of them got is a repeat: after a crash or a rebalance the group is given again what
was not committed, which is honest at-least-once delivery, and still the application got it twice; the audit
tells it and does not guess whether the application minds.

What could be wrong with the testimony itself is told by `group_doubts`: a group with a doubt may have got
more than its events say, so what they lack is not lost but unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from millrace.audit.contract.content_digest import digest_sum
from millrace.audit.contract.event_ledger import EventLedger
from millrace.audit.contract.event_values import TierEvent
from millrace.audit.scanning.cells import NO_TIME, SeenByWindow, SeenSet
from millrace.broker.protocol.system_topics import AUDIT_RETENTION_MS

TIER_PREFIX = "group:"
_MARK = "millrace-audit/1 "


def tier_name(group: str) -> str:
    """The name of a consumer group's tier."""
    return TIER_PREFIX + group


def seen_by_group(events: Iterable[TierEvent], topics: Collection[str]) -> dict[str, dict[str, SeenByWindow]]:
    """{group: {stream: {window_start_ms: SeenSet}}} of events about any of the topics.

    Windows are as long as the consumers made them. A digest is given while no record came
    twice. A window's extra copies are told by sequence as far as the events say whose they are; the others
    are its `loose_copies`.
    """
    parts: dict[tuple[str, str, int], list[TierEvent]] = {}
    for event in events:
        if event.topic in topics:
            parts.setdefault((event.tier, event.stream, event.window_start_ms), []).append(event)
    seen: dict[str, dict[str, SeenByWindow]] = {}
    for (group, stream, start_ms), members in sorted(parts.items()):
        seen.setdefault(group, {}).setdefault(stream, {})[start_ms] = _merge(members)
    return seen


@dataclass(frozen=True, slots=True)
class Claim:
    """How many records the events of a session must tell of, as the commits that name it said.

    `commits` are how many name it now. The session can have got nothing of it after `until_ms`: then an audit
    saw it first, or saw that another session had taken the place of one of its commits (None: none saw it
    yet). `is_old`: nobody knows that it was made within the time that events are kept.
    """

    count: int
    commits: int = 1
    until_ms: int | None = None
    is_old: bool = False


@dataclass(frozen=True, slots=True)
class GroupDoubt:
    """What a group's events must be missing; of nothing that it got after `until_ms` (None: of anything)."""

    sentence: str
    until_ms: int | None = None


Claims = Mapping[tuple[str, str], Claim]
"""By (group, session)"""


def commit_mark(session: str, count: int) -> str:
    """What a consumer commits beside an offset, as metadata: how many records its session has told of before
    it committed. So a last report that was lost shows: no later one tells. "" before the first report."""
    return f"{_MARK}{session} {count}" if count else ""


def claim_of(mark: str) -> tuple[str, int] | None:
    """(session, count) of a commit's metadata; None for metadata that is somebody else's."""
    session, _, count = mark.removeprefix(_MARK).partition(" ")
    if not mark.startswith(_MARK) or len(session) != 16 or not (count.isascii() and count.isdigit()):
        return None
    return (session, int(count)) if len(count) < 20 else None


def told_by_sessions(ledger: EventLedger) -> dict[tuple[str, str], int]:
    """{(group, session): records that its events tell of}."""
    return told_and_claimed(ledger)[0]


def told_and_claimed(ledger: EventLedger) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """({(group, session): records that its events tell of}, {the same: how many they say there are})."""
    told: dict[tuple[str, str], int] = {}
    claimed: dict[tuple[str, str], int] = {}
    for event in ledger.tiers.values():
        place = (event.tier, event.session)
        told[place] = told.get(place, 0) + event.count
        claimed[place] = max(claimed.get(place, 0), event.session_count)
    return told, claimed


def open_claims(ledger: EventLedger, claims: Claims) -> dict[tuple[str, str], Claim]:
    """Those that the events do not fulfil: to be kept, for the next member's commit takes their place. A
    session of which no event is left at all is among them: its only report was lost. Claims that were
    answered by events which were pruned since are not given (`unanswered`)."""
    return unanswered(claims, told_and_claimed(ledger)[0])


def unanswered(claims: Claims, answered: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], Claim]:
    """The claims that events had not fulfilled before they were pruned (`answered`: what they told then)."""
    return {place: claim for place, claim in claims.items() if answered.get(place, 0) < claim.count}


def followed_claims(
    named: Claims, kept: Claims, known: Mapping[str, int], now_ms: int
) -> dict[tuple[str, str], Claim]:
    """What commits name now, with the times of what earlier audits kept. `known` {group: when its commits
    were last read}: what they did not say by then was committed since."""
    found: dict[tuple[str, str], Claim] = {}
    for place in {**kept, **named}:
        before, now = kept.get(place), named.get(place, Claim(0, 0))
        if before is None or now.count > before.count:
            is_old = now_ms - known.get(place[0], 0) >= AUDIT_RETENTION_MS
            found[place] = Claim(now.count, now.commits, now_ms, is_old)
        elif now.commits != before.commits:
            found[place] = replace(before, commits=now.commits, until_ms=now_ms)
        else:
            found[place] = before
    return found


def group_doubts(ledger: EventLedger, claims: Claims | None = None) -> dict[str, list[GroupDoubt]]:
    """By group what its events must be missing; what a group with a doubt lacks is not proven to be lost."""
    doubts = {group: [GroupDoubt(each) for each in told] for group, told in ledger.distrusted_groups.items()}
    told, claimed = told_and_claimed(ledger)
    open_ones = open_claims(ledger, claims or {})
    for group, session in sorted({*claimed, *open_ones}):
        place = (group, session)
        count, claim = told.get(place, 0), open_ones.get(place, Claim(0))
        lacking = max(claimed.get(place, 0), claim.count) - count
        if lacking <= 0:
            continue
        sentence = f"consumer {session} counted {lacking} records that none of its events tells of"
        if claim.is_old and place not in claimed:
            sentence = (
                f"consumer {session} committed that it counted {lacking} records and has no event: it may be "
                f"too old to be checked (events are kept for {AUDIT_RETENTION_MS // 86_400_000} days)"
            )
        # Where its own events tell of more than there are, it may be any of its records.
        until_ms = None if claimed.get(place, 0) > count else claim.until_ms
        doubts.setdefault(group, []).append(GroupDoubt(sentence, until_ms))
    return doubts


def _merge(members: list[TierEvent]) -> SeenSet:
    total = SeenSet()
    for event in members:
        total.repeats.add(total.sequences & event.seen)
        total.repeats.add(event.repeats)
        # An event tells which came again and how many in all, not how often each did.
        extra = event.count - event.unsequenced - len(event.seen)
        if len(event.repeats) == 1:
            total.repeats.add(event.repeats, extra - 1)
        elif extra > len(event.repeats):
            total.loose |= event.repeats
        total.sequences |= event.seen
        total.count += event.count
        total.byte_count += event.byte_count
        total.unsequenced_count += event.unsequenced
        if event.first_append_ms is not None and event.last_append_ms is not None:
            known = total.first_append_ms
            first_ms = event.first_append_ms
            total.first_append_ms = first_ms if known == NO_TIME else min(known, first_ms)
            total.last_append_ms = max(total.last_append_ms, event.last_append_ms)
    extra = total.count - total.unsequenced_count - len(total.sequences)
    total.loose_copies = extra - total.repeats.total
    digests = [event.digest for event in members]
    total.digest = None
    if not extra and all(digest is not None for digest in digests):
        total.digest = digest_sum(digest or 0 for digest in digests)
    return total
