"""What a group committed to have told and nobody tells: how long that makes it doubtful, and when it ends."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pyarrow as pa
import pytest

from millrace.audit.contract.events import EventLedger
from millrace.audit.contract.group_counts import Claim, GroupDoubt, group_doubts, open_claims
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.keeping.upkeep import claims_to_keep
from millrace.audit.reconciliation.online_tiers import OnlineGroup
from millrace.audit.reconciliation.stream_case import StreamCase
from millrace.audit.reconciliation.tier_reading import TierReading, UnreadRange
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.runs.capture import Capture, settle_claims
from millrace.broker.protocol.system_topics import AUDIT_RETENTION_MS
from tests.unit.audit_job.test_doubtful_captures import PLACE, captured_of, cell, config, pin, verdicts
from tests.unit.audit_job.test_gone_and_given_again import group_told

DAY_MS = 86_400_000
NOW_MS = 400 * DAY_MS
GONE = ("billing", "a" * 16)
OTHER = ("billing", "b" * 16)


def run(now_ms: int, before: Commit, **named: Claim) -> Commit:
    """What an audit knows of claims that commits name then (`gone`, `other`), and keeps."""
    captured = Capture(now_ms, EventLedger())
    captured.claims = {{"gone": GONE, "other": OTHER}[who]: claim for who, claim in named.items()}
    settle_claims(captured, before)
    return Commit(
        at_ms=now_ms,
        claims=[
            (*place, each) for place, each in sorted(open_claims(captured.ledger, captured.claims).items())
        ],
        answered=[(*place, count) for place, count in captured.answered.items()],
    )


def claims_of(commit: Commit) -> dict[tuple[str, str], Claim]:
    return {(group, session): claim for group, session, claim in commit.claims}


KNOWN = Commit(at_ms=NOW_MS - 1000, answered=[(*OTHER, 5)])


def test_a_claim_holds_for_what_was_got_until_it_was_seen_and_until_another_session_took_its_place():
    first = run(NOW_MS, KNOWN, gone=Claim(5, 2))
    assert claims_of(first) == {GONE: Claim(5, 2, NOW_MS)}
    assert claims_of(run(NOW_MS + 9, first, gone=Claim(5, 2))) == claims_of(first)
    taken = run(NOW_MS + 20, first, gone=Claim(5, 1), other=Claim(5))
    assert claims_of(taken)[GONE] == Claim(5, 1, NOW_MS + 20)
    after = run(NOW_MS + 30, taken, other=Claim(5))
    assert claims_of(after)[GONE] == Claim(5, 0, NOW_MS + 30)
    assert claims_of(run(NOW_MS + 40, after))[GONE] == Claim(5, 0, NOW_MS + 30), "it changes no more"
    more = run(NOW_MS + 50, after, gone=Claim(7))
    assert claims_of(more)[GONE] == Claim(7, 1, NOW_MS + 50), "it was alive, and told more"


def test_a_session_without_events_whose_commit_may_be_older_than_they_are_kept_is_too_old_to_be_checked():
    def said(before: Commit) -> GroupDoubt:
        (doubt,) = group_doubts(EventLedger(), claims_of(run(NOW_MS, before, gone=Claim(500))))["billing"]
        return doubt

    for before in (Commit(), Commit(at_ms=NOW_MS - AUDIT_RETENTION_MS, answered=[(*OTHER, 5)])):
        doubt = said(before)
        assert "too old to be checked" in doubt.sentence and "90 days" in doubt.sentence
        assert "none of its events" not in doubt.sentence and doubt.until_ms == NOW_MS
    young = said(replace(KNOWN, at_ms=NOW_MS - AUDIT_RETENTION_MS + 1))
    assert young.sentence == f"consumer {GONE[1]} counted 500 records that none of its events tells of"
    kept = run(NOW_MS, KNOWN, gone=Claim(500))
    later = run(NOW_MS + 2 * AUDIT_RETENTION_MS, kept)
    assert not claims_of(later)[GONE].is_old, "it was not when it was seen"


def test_what_its_own_events_lack_may_be_any_of_its_records():
    ledger = EventLedger()
    ledger.learn(group_told([1], session="a" * 16, session_count=3))
    assert group_doubts(ledger, {GONE: Claim(2, 1, NOW_MS)})["billing"][0].until_ms is None
    (doubt,) = group_doubts(ledger, {GONE: Claim(9, 1, NOW_MS, True)})["billing"]
    assert doubt == GroupDoubt(f"consumer {GONE[1]} counted 8 records that none of its events tells of", None)


def case(start_ms: int, unread: UnreadRange, promised_ms: int | None, opened_ms: int | None = 0) -> list[str]:
    """Why a window may have records that were not seen; the grace is 100."""
    captured = captured_of()
    (stream,) = captured.ledger.streams.values()
    stream = replace(stream, opened_at_ms=opened_ms, no_earlier_than_ms=promised_ms)
    tier = TierReading("group:billing", unread=[unread])
    made = StreamCase(stream, {}, [tier], 1000, 100, 10_000)
    return made.unread_causes(tier, start_ms)


def test_a_claim_says_nothing_of_windows_that_began_later():
    """The stream had opened long before: it goes on, and its next windows can be judged again."""
    claim = UnreadRange(PLACE, 0, 0, "claim", 3000, by_window=True)
    assert case(3000, claim, 9000) == case(3100, claim, 9000) == ["claim"]
    assert case(3101, claim, 9000) == [] and case(3101, claim, 9000, None) == []
    for promised_ms in (None, 3100, 10_101):  # may have times of the application's own, or a wrong clock
        assert case(5000, claim, promised_ms) == ["claim"]
    assert case(5000, replace(claim, by_window=False), 9000) == ["claim"]
    assert case(5000, replace(claim, until_ms=None), 9000) == ["claim"]


@pytest.mark.parametrize(
    ("until_ms", "verdict"), [(None, Verdict.UNKNOWN), (0, Verdict.UNKNOWN), (-10 * DAY_MS, Verdict.LOSS)]
)
def test_a_real_loss_behind_an_old_claim_is_told(until_ms: int | None, verdict: Verdict):
    captured = captured_of(pins=[pin(), pin("agg")], gaps=[group_told([1], ((0, 4),), session_count=1)])
    captured.commits["ewr", "billing"] = {PLACE: 10}
    captured.claims = {GONE: Claim(500, 0, until_ms)}
    (facts,) = captured.ledger.streams.values()
    facts.no_earlier_than_ms = 60_000
    cells = [cell("ewr", [1], first=4), cell("ewr", [2], first=5), cell("agg", [1, 2])]
    (row,) = verdicts(captured, cells, config(groups={"ewr": ["billing"]}))
    assert row.verdict is verdict


def test_a_group_s_doubts_come_to_its_tier_with_their_time():
    group = OnlineGroup("billing", "ewr", doubts=[GroupDoubt("claim", 7), GroupDoubt("event")])
    claim, event, *_ = group.reading("ewr", "flights", ["flights"], [], 1000).unread
    place = ("ewr", "flights", -1)
    assert claim == UnreadRange(place, 0, 0, "claim", 7, by_window=True)
    assert event.cause == "event" and event.until_ms is None


def test_a_claim_ends_with_keep_when_no_commit_names_it_and_no_window_of_its_time_is_left():
    rows = pa.table({"window_start_ms": pa.array([None, 6000, 5000], pa.int64())})

    def kept(claim: Claim, table: pa.Table = rows, keep_ms: int | None = 1000, now_ms: int = 5000) -> bool:
        return bool(claims_to_keep([(*GONE, claim)], table, 100, keep_ms, now_ms))

    over = Claim(5, 0, 4000)
    assert not kept(over)
    assert not kept(over, rows.slice(0, 1)) and not kept(over, rows.slice(0, 0))
    assert kept(over, now_ms=4999) and kept(over, keep_ms=None)
    assert kept(replace(over, commits=1)), "it would come again, as if it were new"
    assert kept(replace(over, until_ms=4900), now_ms=9000), "what is unknown there would look lost"


def test_claims_come_out_of_the_state_as_they_were_put_in(tmp_path):
    state = StateFolder.open(tmp_path)
    commit = Commit(number=1, claims=[(*GONE, Claim(5, 2, 7, True))], answered=[(*OTHER, 3)])
    state.commit(commit)
    assert state.latest() == commit
    assert json.loads(json.dumps(asdict(commit)))["claims"][0][2]["until_ms"] == 7
