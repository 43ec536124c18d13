"""Events are read on from where the last run ended: what is known of the rest, and when all is read anew."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyroaring import BitMap64

from millrace.audit.contract.event_ledger import MAX_UNTRUSTED_KEPT
from millrace.audit.contract.events import (
    CLOSED,
    HEARTBEAT,
    EventLedger,
    GapEvent,
    StreamEvent,
    TierEvent,
    encode_event,
)
from millrace.audit.contract.group_counts import Claim, group_doubts
from millrace.audit.keeping import upkeep
from millrace.audit.keeping.state import Commit, ReadPosition, StateFolder
from millrace.audit.reconciliation.verdict_rows import ROW_SCHEMA
from millrace.audit.runs import event_reading, fact_rows, partition_pins
from millrace.audit.runs.capture import Capture
from millrace.audit.runs.event_reading import EventsRead, events_known, lost_counts, read_events, to_keep
from millrace.audit.runs.fact_rows import PrunedWindows, facts_table, restore, restore_pruned
from millrace.audit.runs.next_commit import next_commit
from millrace.audit.runs.untrusted import doubts_of
from millrace.audit.scanning.cell_notes import NOTE_SCHEMA
from millrace.broker.client.leader_epochs import MOST_EPOCHS
from tests.unit.audit_job.test_doubtful_captures import SESSION, STREAM, config, events, pin, run_of

TOPIC, PLACE = "millrace.audit", "ewr/millrace.audit/0"


@dataclass
class Topic:
    """One cluster's events topic; what is None was taken by compaction."""

    records: list = field(default_factory=list)
    start: int = 0
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    epochs: tuple = ((0, 0),)
    name: str = "ewr"
    read: list = field(default_factory=list)

    def tell(self, *told):
        self.records += [each if isinstance(each, tuple) else encode_event(each) for each in told]

    async def metadata(self, topics=None, max_age_ms=0):
        here = {TOPIC: SimpleNamespace(topic_id=self.id)} if self.id else {}
        keys = [(TOPIC, 0)] if here else []
        return SimpleNamespace(topics=here, topic_errors={}, partitions=lambda topic: keys)

    async def list_offsets(self, timestamps, read_committed=False):
        at = timestamps[TOPIC, 0]
        offset = self.start if at == partition_pins.EARLIEST else len(self.records)
        return {(TOPIC, 0): SimpleNamespace(offset=offset, leader_epoch=self.epochs[-1][0])}


@pytest.fixture
def topic(monkeypatch):
    async def read(cluster, topic, since, until):
        cluster.read.append((since[0], until[0]))
        for offset in range(max(since[0], cluster.start), until[0]):
            if cluster.records[offset] is not None:
                key, value = cluster.records[offset]
                yield SimpleNamespace(key=key, value=value, offset=offset, partition=0)

    async def histories(cluster, newest):
        return dict.fromkeys(newest, cluster.epochs)

    monkeypatch.setattr(event_reading, "read_topic_to_end", read)
    monkeypatch.setattr(partition_pins, "epoch_histories", histories)
    return Topic()


def look(topic, before=None, settings=None, claims=()):
    """One run's reading, on from the run `before`: (what it captured, its commit with its facts)."""
    settings = settings or config()
    commit, facts = before or (Commit(), None)
    ledger = EventLedger()
    origins, told = ({}, {}) if facts is None else restore(facts, ledger)
    captured = Capture(10_000_000, ledger)
    captured.claims = dict(claims)
    known = events_known(settings, commit, told)
    asyncio.run(read_events(captured, settings, {"ewr": topic}, known, commit))
    for stream, clusters in origins.items():
        captured.origins.setdefault(stream, set()).update(clusters)
    read = to_keep(captured.events, ledger)
    after = Commit(
        number=commit.number + 1,
        events_read=read.positions,
        events_ways=read.ways,
        events_doubted=read.doubts(),
        claims=[(*place, claim) for place, claim in captured.claims.items()],
    )
    return captured, (after, facts_of(captured, settings))


def facts_of(captured, settings):
    groups, told = settings.group_names(), captured.events.told
    return facts_table(captured.ledger, captured.origins, {}, groups, told)


def of_stream(at_ms, state=HEARTBEAT, lease_ms=60):
    return StreamEvent(
        state=state, stream=STREAM, session=SESSION, topic="flights", producer="AA", host="", application="",
        datacenter="", window_ms=60_000, last_assigned=3, last_settled=3, no_earlier_than_ms=None,
        lease_ms=lease_ms, at_ms=at_ms,
    )  # fmt: skip


def of_group(start_ms, sequences, total, report=1, group="billing"):
    return TierEvent(
        group, STREAM, "flights", "AA", start_ms, 60_000, report, len(sequences), 0, BitMap64(sequences), 5,
        session=SESSION, session_count=total,
    )  # fmt: skip


def same(one, other):
    """Two runs know the same, whatever they read."""
    settings = config()
    assert facts_of(one, settings) == facts_of(other, settings)
    assert one.ledger.untrusted == other.ledger.untrusted
    assert (one.ledger.gaps, set(one.told), one.origins) == (
        other.ledger.gaps,
        set(other.told),
        other.origins,
    )


UNREADABLE = (f"count/{STREAM}/0".encode(), b"no JSON")


def test_an_event_is_read_once_and_what_it_said_is_known_by_every_later_run(topic):
    topic.tell(*events([1, 2, 3]), UNREADABLE)
    _, first = look(topic)
    topic.tell(of_stream(7), *events([1, 2, 3, 4], at_ms=9))
    second, after = look(topic, first)
    assert topic.read == [(0, 3), (3, 6)]
    whole, _ = look(topic)
    assert whole.origins == {STREAM: {"ewr"}} and len(whole.ledger.untrusted) == 1
    assert whole.ledger.untrusted_streams == second.ledger.untrusted_streams != {}
    same(second, whole)
    third, again = look(topic, after)
    assert topic.read[-1] == (6, 6) and again[0].knows_as_much_as(after[0])
    same(third, whole)


def test_what_two_events_contradict_each_other_in_is_seen_however_long_ago_one_was_read(topic):
    """A stream that ended twice ended the first time; only the last word of it is among the kept events."""
    topic.tell(of_stream(100, CLOSED), of_stream(140))
    _, first = look(topic)
    topic.tell(of_stream(165))
    second, _ = look(topic, first)
    (conflict,) = second.ledger.streams[STREAM].conflicts
    assert conflict == "the stream goes on after its end: two producers use one stream id"
    same(second, look(topic)[0])


def test_the_manner_of_a_stream_is_known_when_all_that_it_told_is_pruned(topic):
    counted, _ = events([1, 2])
    topic.tell(counted)
    captured, (commit, _) = look(topic)
    captured.ledger.streams[STREAM].windows.clear()
    kept = commit, facts_of(captured, config())
    topic.tell(replace(counted, window_start_ms=120_000, window_ms=120_000))
    facts = look(topic, kept)[0].ledger.streams[STREAM]
    assert (facts.topic, facts.producer) == ("flights", "AA")
    assert [each for each in facts.conflicts if "length of the windows" in each]


def test_facts_of_before_reports_were_packed_are_read_as_they_are(topic):
    """Up to version 8 of the state all reports stood among the events."""
    counted, _ = events([1, 2])
    later = [
        replace(counted, window_start_ms=number * 60_000, acknowledged=BitMap64(told), count=len(told))
        for number, told in enumerate(([3, 4], [5, 7], [8]), 1)
    ]
    topic.tell(of_stream(100), counted, *later)
    _, (commit, facts) = look(topic)
    (row,) = facts.to_pylist()
    told = fact_rows.facts_of(row, None)
    assert len(told.windows) == 4 and len(told.windows.others()) == 1
    events_first, last = row["facts"].split(b"\n")[:1], row["facts"].split(b"\n")[-1:]
    every = [encode_event(each)[1] for each in told.windows.values()]
    older = pa.Table.from_pylist([{**row, "facts": b"\n".join(events_first + every + last)}], facts.schema)
    older = older.drop_columns(["reports"])
    assert fact_rows.facts_of(older.to_pylist()[0], None) == told
    topic.tell(replace(later[-1], report=2, acknowledged=BitMap64([8, 9]), count=2))
    second, (_, again) = look(topic, (commit, older))
    assert topic.read[-1] == (5, 6)
    same(second, look(topic)[0])
    assert again["reports"].null_count == 0


def test_what_could_not_be_believed_is_told_as_long_as_it_is_there(topic):
    settings = config(groups={"ewr": ["billing"]})
    topic.tell(of_group(0, [1, 2], 2), of_group(0, [1], 2, report=2), UNREADABLE)
    first, before = look(topic, settings=settings)
    assert len(first.ledger.distrusted_groups["billing"]) == 1
    second, before = look(topic, before, settings)
    assert second.ledger.distrusted_groups == first.ledger.distrusted_groups
    assert second.ledger.untrusted == first.ledger.untrusted and topic.read[-1] == (3, 3)
    topic.start = 3
    topic.tell(of_stream(1))
    third, _ = look(topic, before, settings)
    assert (third.ledger.distrusted_groups, third.ledger.untrusted) == ({}, [])
    assert third.events_lost == [], "it was read before it expired"


def test_a_stream_is_told_of_until_its_newest_event_has_expired(topic):
    """Until then a reading of all would bring it back, without its cells."""
    other = replace(of_stream(1), stream="0" * 15 + "1")
    topic.tell(of_stream(1), other, of_stream(2))
    _, before = look(topic)
    topic.start = 2
    second, before = look(topic, before)
    assert set(second.told) == {STREAM} == set(look(topic)[0].told)
    topic.start = 3
    assert set(look(topic, before)[0].told) == set()


def test_a_hole_of_compaction_is_nothing_lost(topic):
    topic.tell(of_stream(1), of_stream(2), of_stream(3))
    _, before = look(topic)
    topic.tell(of_stream(4), of_stream(5))
    topic.records[:4] = [None] * 4
    captured, _ = look(topic, before)
    assert captured.events_lost == [] and captured.ledger.streams[STREAM].at_ms == 5


def test_events_that_expired_before_they_were_read_are_in_doubt(topic):
    topic.tell(of_stream(1))
    first, before = look(topic)
    assert first.events_lost == []
    topic.tell(of_stream(2), of_stream(3), of_stream(4))
    topic.start = 3
    captured, _ = look(topic, before)
    told = "events that had expired before they were read, in cluster ewr, millrace.audit-0"
    assert lost_counts(captured.events_lost) == {told: 2}
    topic.start = 4
    assert lost_counts(look(topic)[0].events_lost) == {}, "nobody had looked before"


def test_events_that_were_never_read_hold_every_watermark_until_a_person_accepts_it(topic):
    topic.tell(of_stream(1))
    _, before = look(topic)
    topic.tell(of_stream(2), of_stream(3))
    topic.start = 2
    captured, _ = look(topic, before)
    captured.pins = [pin(), pin("agg")]
    cells = SimpleNamespace(notes=lambda tail: NOTE_SCHEMA.empty_table(), new_files=list, facts="")
    job = run_of(captured)
    after = next_commit(job, cells)
    what = "events that had expired before they were read, in cluster ewr, millrace.audit-0"
    assert after.untrusted == {what: 1} and after.events_read[PLACE].next_offset == 3
    doubts = doubts_of(job.config, captured, after, {}, {}, ROW_SCHEMA.empty_table(), [], job.now_ms)
    assert [(each.what, each.topic) for each in doubts.deciding()] == [(what, "")]
    assert doubts.held({"flights": 9}, {"flights": 5}) == {"flights": 5}


def test_a_log_that_was_shortened_is_read_again_from_where_it_differs(topic):
    """It has grown beyond where the audit stood: only its leader epochs tell."""
    topic.tell(of_stream(1), of_stream(2), UNREADABLE)
    _, before = look(topic)
    topic.records[1:] = [encode_event(event) for event in (*events([1, 2, 3]), of_stream(3))]
    topic.epochs = ((0, 0), (1, 1))
    captured, _ = look(topic, before)
    assert topic.read[-1] == (1, 4) and captured.ledger.untrusted == []
    assert list(lost_counts(captured.events_lost).values()) == [2]
    assert captured.ledger.streams[STREAM].windows[0].count == 3


def test_a_log_is_read_again_from_there_however_many_elections_came_since(topic, monkeypatch):
    """The leader tells its newest epochs, none of which was read, and is asked for the one that was."""
    asked = []

    async def older(_, histories, kept):
        asked.append(dict(kept))
        return {key: ((0, 0, 1),) for key in histories if kept.get(key)}

    monkeypatch.setattr(partition_pins, "older_ends", older)
    topic.tell(of_stream(1), of_stream(2))
    _, first = look(topic)
    topic.tell(of_stream(3), of_stream(4))
    topic.epochs = tuple((100 + number, 2) for number in range(MOST_EPOCHS))
    look(topic, first)
    assert asked == [{}, {(TOPIC, 0): ((0, 0),)}]
    assert topic.read == [(0, 2), (1, 4)]


def test_a_topic_made_anew_is_read_from_its_beginning(topic):
    topic.tell(of_stream(1), UNREADABLE)
    _, before = look(topic)
    topic.id, topic.records = uuid.uuid4(), []
    topic.tell(*events([1, 2, 3]), of_stream(2))
    captured, after = look(topic, before)
    assert topic.read[-1] == (0, 3) and captured.events_lost == [] and captured.ledger.untrusted == []
    assert captured.ledger.streams[STREAM].windows[0].count == 3
    assert after[0].events_read[PLACE] == ReadPosition(3, str(topic.id), ((0, 0),))


def test_a_topic_that_was_away_is_read_from_its_beginning(topic):
    topic.tell(of_stream(1), UNREADABLE)
    _, before = look(topic)
    there, topic.id = topic.id, None
    away, before = look(topic, before)
    assert (set(away.told), away.ledger.untrusted, len(away.silent_sources)) == (set(), [], 1)
    topic.id = there
    back, _ = look(topic, before)
    assert topic.read[-1] == (0, 2) and len(back.ledger.untrusted) == 1


def test_a_group_that_is_audited_from_now_on_is_heard_from_the_beginning(topic):
    """What a group that was not audited told is not kept."""
    topic.tell(of_group(0, [1, 2], 2))
    _, before = look(topic)
    settings = config(groups={"ewr": ["billing"]})
    captured, after = look(topic, before, settings)
    assert topic.read[-1] == (0, 1) and len(captured.ledger.tiers) == 1
    look(topic, after)
    assert topic.read[-1] == (1, 1), "with one less all is known"


def test_a_program_that_knows_more_events_reads_all_of_them(topic, monkeypatch):
    topic.tell(of_stream(1))
    _, before = look(topic)
    monkeypatch.setattr(event_reading, "known_types", lambda: ["event stream 1", "event new 1"])
    look(topic, before)
    assert topic.read[-1] == (0, 1)


def pruning(topic, before, starts_ms, *, is_anew):
    """A run that reads on, or all anew, and prunes these windows: (late reports, doubts of groups, its commit
    with its facts)"""
    settings = config(groups={"ewr": ["billing"]})
    if before is not None and is_anew:
        before = replace(before[0], events_ways=[]), before[1]
    captured, (commit, _) = look(topic, before, settings)
    pruned = {} if before is None else restore_pruned(before[1])
    late = upkeep.forget_pruned(captured.ledger, pruned)
    for start_ms in starts_ms:
        pruned.setdefault(STREAM, PrunedWindows(60_000)).add(start_ms, 60_000)
    upkeep.forget_pruned(captured.ledger, pruned, learn=True)
    upkeep.forget_streams(captured.ledger, pruned, captured.told, set(), 0, 10**9)
    told = captured.events.told
    facts = facts_table(captured.ledger, captured.origins, pruned, settings.group_names(), told)
    return late, group_doubts(captured.ledger), (commit, facts)


def test_what_is_left_of_pruned_windows_is_the_same_for_who_reads_all_events_and_who_reads_on(topic):
    """Late reports are told once, sessions that go on are whole, streams are forgotten at the same time."""
    count, end = events([1, 2, 3])
    later = replace(count, window_start_ms=60_000, acknowledged=BitMap64([4, 5]), count=2)
    longer = replace(count, report=2, count=4, acknowledged=BitMap64([1, 2, 3, 6]))
    rounds = [
        ([count, of_group(0, [1, 2], 2)], (), 0),
        ([later, count], (0,), 0),
        ([longer, of_group(60_000, [4], 3)], (60_000,), 0),
        ([of_group(60_000, [4, 5], 4, report=2), end], (), 0),
        ([], (), 4),
        ([], (), 8),
        ([], (), 8),
    ]
    on = anew = None
    for number, (told, starts_ms, begin) in enumerate(rounds):
        topic.tell(*told)
        topic.start = begin
        late, doubts, on = pruning(topic, on, starts_ms, is_anew=False)
        late_anew, doubts_anew, anew = pruning(topic, anew, starts_ms, is_anew=True)
        assert (late, doubts, on[1]) == (late_anew, doubts_anew, anew[1]), number
        assert bool(late) is (number == 2) and doubts == {}
    assert on[1].num_rows == 0, "forgotten, as no event can bring it back"


def test_before_a_session_is_in_doubt_all_events_are_read_again(topic):
    """Its earlier events were pruned with all that it had told; now it goes on."""
    settings = config(groups={"ewr": ["billing"]})
    topic.tell(of_group(0, [1, 2], 2), UNREADABLE)
    captured, (commit, _) = look(topic, settings=settings)
    captured.ledger.tiers.clear()
    pruned = commit, facts_of(captured, settings)
    topic.tell(of_group(60_000, [3], 3), of_group(0, [1], 9, group="others"))
    again, after = look(topic, pruned, settings)
    assert topic.read[-2:] == [(2, 4), (0, 4)] and "billing" not in group_doubts(again.ledger)
    assert len(again.ledger.untrusted) == again.ledger.untrusted_count == 1
    topic.tell(of_group(0, [1, 2], 9, report=2, group="others"))
    look(topic, after, settings)
    assert topic.read[-1] == (4, 5), "of others nothing is kept, and nothing said"


def test_a_claim_that_no_event_answers_is_looked_for_once(topic):
    settings = config(groups={"ewr": ["billing"]})
    topic.tell(of_group(0, [1, 2], 2))
    captured, (commit, _) = look(topic, settings=settings)
    captured.ledger.tiers.clear()
    pruned = commit, facts_of(captured, settings)
    claims = {("billing", SESSION): Claim(2)}
    found, _ = look(topic, pruned, settings, claims)
    assert topic.read[-2:] == [(1, 1), (0, 1)] and len(found.ledger.tiers) == 1
    _, lacking = look(topic, pruned, settings, {("billing", SESSION): Claim(5)})
    count = len(topic.read)
    look(topic, lacking, settings, {("billing", SESSION): Claim(5)})
    assert len(topic.read) == count + 1


def test_gaps_are_known_from_the_state_and_looked_for_behind_what_was_read(topic):
    gap = GapEvent("m", "ewr", "flights", 0, 2, 3, "oversized", 0)
    topic.tell(gap)
    captured, before = look(topic)
    assert captured.gaps_to == {"ewr": {0: 1}} and len(captured.ledger.gaps) == 1
    captured, _ = look(topic, before)
    assert captured.gaps_to == {"ewr": {0: 1}}


def test_of_more_doubts_than_are_named_all_is_read_anew(topic):
    topic.tell(*(UNREADABLE for _ in range(MAX_UNTRUSTED_KEPT + 1)))
    _, before = look(topic)
    assert before[0].events_read == {} and before[0].events_doubted == []
    captured, _ = look(topic, before)
    assert topic.read[-1] == (0, MAX_UNTRUSTED_KEPT + 1)
    assert captured.ledger.untrusted_count == MAX_UNTRUSTED_KEPT + 1


def test_a_commit_keeps_how_far_events_were_read_and_an_older_one_says_nothing_of_it(topic, tmp_path):
    topic.tell(of_stream(1), UNREADABLE)
    _, (commit, facts) = look(topic)
    state = StateFolder.open(tmp_path)
    state.commit(commit)
    assert state.latest() == commit and commit.events_read[PLACE].next_offset == 2
    older = replace(commit, events_read={}, events_ways=[], events_doubted=[])
    look(topic, (older, facts.drop_columns(["merged"])))
    assert topic.read[-1] == (0, 2)
    assert events_known(config(), older, {}) == EventsRead()
