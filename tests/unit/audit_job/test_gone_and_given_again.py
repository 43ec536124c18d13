"""Topics that a cluster has not any more, streams whose own cluster is silent, offsets that were given out
again to those who read them: told as what they are, never as losses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from pyroaring import BitMap64

from millrace.audit.contract.events import EventLedger, GapEvent, TierEvent
from millrace.audit.contract.group_counts import Claim, commit_mark
from millrace.audit.job import _reconciler
from millrace.audit.keeping.state import Commit, ReadPosition, UnreadNote
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.report.reasons import advice
from millrace.audit.runs import capture as capture_module
from millrace.audit.runs import partition_pins
from millrace.audit.runs.capture import Capture, settle_claims
from millrace.audit.runs.reading_plan import plan_backfill, plan_ranges
from millrace.audit.runs.reconciling import groups_of
from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.errors import ClusterUnreachable, UnreadableRecord
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position, encode_key, encode_value
from tests.cells import table_of
from tests.unit.audit_job.test_doubtful_captures import (
    PLACE,
    STREAM,
    FakeCluster,
    captured_of,
    cell,
    config,
    no_sizes,
    pin,
    position,
    run_of,
    verdicts,
)


def without_topic(monkeypatch, settings, present, absent):
    """A capture of ewr with the topic and agg without it."""
    captured = captured_of(pins=[], positions=[position(2)])
    monkeypatch.setattr(capture_module, "bytes_per_offset", no_sizes)
    ends = {True: 2, False: 2}
    asyncio.run(
        capture_module._pin_cluster(captured, settings, FakeCluster("ewr", topics=present, ends=ends))
    )
    asyncio.run(capture_module._pin_cluster(captured, settings, FakeCluster("agg", topics=absent, ends=ends)))
    return captured


def test_a_topic_that_is_not_there_any_more_is_no_loss(monkeypatch):
    captured = without_topic(monkeypatch, config(), ["flights"], [])
    known = Commit(offsets={"agg/flights/0": ReadPosition(2, "old")})
    (row,) = verdicts(captured, [cell("ewr", [1, 2], topic_id="")], after=known)
    assert (row.verdict, row.missing, row.unknown) == (Verdict.UNKNOWN, {}, ((1, 2),))
    assert row.reasons == (
        "part of tier agg could not be read: topic flights is not on cluster agg any more",
    )
    assert "deleted" in advice(row.reasons[0])


def test_one_that_was_never_seen_there_excuses_nothing(monkeypatch):
    """A mirror that passed everything and brought nothing: a total loss, the loudest of all."""
    captured = without_topic(monkeypatch, config(), ["flights"], [])
    (row,) = verdicts(captured, [cell("ewr", [1, 2], topic_id="")])
    assert row.missing == {("ewr", "agg"): ((1, 2),)}


def test_nor_is_it_in_a_backfill_which_counts_anew_what_is_there():
    captured = captured_of(pins=[pin()], positions=[position(2)])
    captured.gone["agg", "flights"] = "flights"
    job = run_of(captured, before=Commit(offsets={"agg/flights/0": ReadPosition(2, "old")}))
    job.only = (0, 60_000)
    reconciler = _reconciler(job, Commit(offsets={"ewr/flights/0": ReadPosition(2, "new")}))
    ((row, _),) = reconciler.verdicts(table_of([cell("ewr", [1, 2])]), job.facts.to_pylist())
    assert (row.verdict, row.missing) == (Verdict.UNKNOWN, {})


def test_what_was_seen_of_it_before_stays_proven(monkeypatch):
    captured = without_topic(monkeypatch, config(), ["flights"], [])
    (row,) = verdicts(captured, [cell("ewr", [1, 2], topic_id=""), cell("agg", [1, 2])])
    assert row.verdict is Verdict.PROVEN


def test_of_several_names_one_that_was_never_there_excuses_nothing(monkeypatch):
    settings = config(clusters={"agg": {"topics": {"flights": ["a", "b"]}}})
    captured = without_topic(monkeypatch, settings, ["flights"], ["a"])
    cells = [cell("ewr", [1, 2], topic_id="")]
    assert verdicts(captured, cells, settings)[0].missing == {("ewr", "agg"): ((1, 2),)}
    known = Commit(offsets={"agg/flights@b/0": ReadPosition(2, "old")})
    assert not verdicts(captured, cells, settings, after=known)[0].missing


def test_a_stream_of_which_only_the_aggregate_tells_has_its_rows_under_the_audited_name():
    """Its producer calls the topic as its own cluster does, which has no events of it."""
    settings = config(clusters={"ewr": {"topics": {"flights": "raw"}}})
    captured = captured_of(topic="raw", origins=())
    (row,) = verdicts(captured, [], settings)
    assert (row.topic, row.stream, row.verdict, row.missing) == ("flights", STREAM, Verdict.UNKNOWN, {})
    assert verdicts(captured_of(topic="another", origins=()), [], settings) == []


def groups(offset, epoch, epochs, unread=()):
    settings = config(groups={"ewr": ["billing"]})
    captured = Capture(0, captured_of().ledger, pins=[pin(epochs=epochs)])
    captured.commits["ewr", "billing"] = {PLACE: offset}
    captured.commit_epochs["ewr", "billing"] = {PLACE: epoch}
    (group,) = groups_of(settings, captured, unread)
    return group.passed[PLACE].next_offset


def test_a_commit_from_before_a_log_was_shortened_has_passed_nothing_that_came_since():
    history = ((1, 0), (2, 3))
    assert groups(3, 1, history) == 3 and groups(8, 2, history) == 8
    assert groups(8, 1, history) == 3
    note = UnreadNote("ewr", "flights", 0, 3, 7, "truncated", 0, 1)
    assert groups(8, -1, history) == 8
    assert groups(8, -1, history, [note]) == 3 and groups(8, 2, history, [note]) == 8


def group_told(sequences, began=(), **more):
    fields = {
        "tier": "billing", "stream": STREAM, "topic": "flights", "producer": "AA", "window_start_ms": 0,
        "window_ms": 60_000, "report": 1, "count": len(sequences), "byte_count": 0,
        "seen": BitMap64(sequences), "at_ms": 0, "first_append_ms": 900_000, "last_append_ms": 900_000,
        "began": began,
    }  # fmt: skip
    return TierEvent(**{**fields, **more})


def group_row(began, cells, unread=(), topic_id="new", **more):
    """Records of long ago, of which a group that has come to offset 10 told number 1."""
    settings = config(groups={"ewr": ["billing"]})
    captured = captured_of(pins=[pin(topic_id=topic_id), pin("agg")], gaps=[group_told([1], began, **more)])
    captured.commits["ewr", "billing"] = {PLACE: 10}
    (row,) = verdicts(captured, cells, settings, after=Commit(unread=list(unread)))
    lost = {hop: ranges for hop, ranges in row.missing.items() if hop[1] == "group:billing"}
    return lost, row.unknown


def test_a_group_answers_for_what_lies_behind_where_it_began_however_old_it_is():
    hop, lost = ("ewr", "group:billing"), ((2, 2),)
    cells = [cell("ewr", [1], first=4), cell("ewr", [2], first=5), cell("agg", [1, 2])]
    assert group_row((), cells) == ({}, lost), "nobody says where it began"
    assert group_row(((0, 4),), cells) == ({hop: lost}, ())
    assert group_row(((0, 6),), cells) == ({}, lost), "it was passed before the group was audited"
    assert group_row(((1, 0),), cells) == ({}, lost), "another partition"
    across = [cell("ewr", [1, 2], first=4), cell("agg", [1, 2])]
    assert group_row(((0, 5),), across) == ({}, lost), "its cell lies across"


def test_a_group_answers_for_nothing_of_another_log_than_the_one_it_began_in():
    cells = [cell("ewr", [1], first=4), cell("ewr", [2], first=5), cell("agg", [1, 2])]
    for cause in ("truncated", "recreated"):
        note = UnreadNote("ewr", "flights", 0, 20, 30, cause, 0)
        assert group_row(((0, 4),), cells, [note]) == ({}, ((2, 2),))
    old = [cell("ewr", [2], first=5, topic_id="old"), *cells[::2]]
    assert group_row(((0, 4),), old) == ({}, ((2, 2),))


def test_cells_are_cut_where_a_group_began():
    """A session that began later takes nothing back, and a namesake on another cluster says nothing."""
    first, later = group_told([1], ((0, 4),)), group_told([2], ((0, 7),), session="0" * 15 + "1")
    namesake = group_told([2], ((0, 2),), session="0" * 15 + "2", cluster_id="J")
    captured = captured_of(pins=[pin()], gaps=[first, later, namesake])
    captured.cluster_ids = {"ewr": "E"}
    ranges, _ = plan_ranges(captured, config(groups={"ewr": ["billing"]}), Commit())
    assert [(each.first_offset, each.end_offset) for each in ranges if each.size] == [(0, 4), (4, 10)]


def test_what_a_member_committed_to_have_told_and_nobody_tells_makes_the_group_doubtful():
    cells = [cell("ewr", [1], first=4), cell("ewr", [2], first=5), cell("agg", [1, 2])]
    settings = config(groups={"ewr": ["billing"]})
    captured = captured_of(pins=[pin(), pin("agg")], gaps=[group_told([1], ((0, 4),), session_count=1)])
    captured.commits["ewr", "billing"] = {PLACE: 10}
    captured.claims["billing", "0" * 16] = Claim(2)
    (row,) = verdicts(captured, cells, settings)
    assert row.verdict is Verdict.UNKNOWN and row.unknown == ((2, 2),)
    assert any("counted 1 records that none of its events tells of" in reason for reason in row.reasons)


def test_what_stands_in_a_commits_metadata_is_read(monkeypatch):
    async def nothing(*_):
        return None

    async def committed(cluster, group):
        return {("flights", 0): CommittedOffset(7, 3, commit_mark("0" * 15 + "1", 5))}

    async def described(clusters):
        return {name: SimpleNamespace(cluster_id=name, topics={}) for name in clusters}

    for name in ("read_events", "_pin", "_read_positions", "read_new_gaps"):
        monkeypatch.setattr(capture_module, name, nothing)
    monkeypatch.setattr(capture_module, "fetch_offsets", committed)
    monkeypatch.setattr(capture_module, "_describe", described)
    settings = config(groups={"ewr": ["billing"]})
    captured = asyncio.run(capture_module.capture(settings, EventLedger(), lambda: 1))
    assert captured.commits == {("ewr", "billing"): {PLACE: 7}}
    assert captured.commit_epochs == {("ewr", "billing"): {PLACE: 3}}
    assert captured.claims == {("billing", "0" * 15 + "1"): Claim(5)}


def test_a_mirror_that_tells_no_epoch_is_not_believed_within_what_was_given_again():
    note = UnreadNote("ewr", "flights", 0, 0, 5, "truncated", 0, 1)
    pins, cells = [pin(epochs=((1, 0), (2, 3))), pin("agg")], [cell("ewr", [1, 2], first=3)]
    after = Commit(unread=[note])

    def fate(told):
        (row,) = verdicts(captured_of(pins=pins, positions=[told]), cells, after=after)
        return row.missing, row.in_flight, row.explained

    hop, lost = ("ewr", "agg"), ((1, 2),)
    assert fate(position(8, "new")) == ({}, {}, {"truncated": lost})
    assert fate(position(8, "new", leader_epoch=1)) == ({}, {hop: lost}, {})
    assert fate(position(8, "new", leader_epoch=2)) == ({hop: lost}, {}, {})


def test_nor_one_of_an_epoch_in_which_the_log_was_shortened_and_went_on():
    """It stands at 9, from before the log was cut at 3 and had grown again: the epochs do not tell."""
    cells = [cell("ewr", [1, 2], first=4)]

    def fate(epochs, told, note_epoch, *later):
        note = UnreadNote("ewr", "flights", 0, 3, 9, "truncated", 0, note_epoch)
        captured = captured_of(pins=[pin(end=8, epochs=epochs), pin("agg")], positions=[told])
        (row,) = verdicts(captured, cells, after=Commit(unread=[note, *later]))
        return row.missing, row.explained

    unsure, lost = ({}, {"truncated": ((1, 2),)}), ({("ewr", "agg"): ((1, 2),)}, {})
    assert fate(((1, 0),), position(9, "new", leader_epoch=1), 1) == unsure
    assert fate(((1, 0),), position(9, "new", leader_epoch=1), -1) == unsure, "nobody knows what was read"
    assert fate(((1, 0), (2, 3)), position(8, "new", leader_epoch=2), 1) == lost
    anew = UnreadNote("ewr", "flights", 0, 9, 9, "recreated", 0)
    assert fate(((1, 0),), position(9, "new", leader_epoch=1), 1, anew) == lost, "that was another topic"


def test_a_newer_epoch_of_the_log_that_is_gone_does_not_cut_off_what_was_in_it():
    """The audit had read epoch 1; the log went on in epoch 2, which the mirror told of, and all is gone. What
    the mirror had fetched behind its position still comes."""
    note = UnreadNote("ewr", "flights", 0, 0, 5, "truncated", 10_000_000, 1)
    cells = [cell("ewr", [1]), cell("agg", [1])]

    def fate(epochs, told):
        captured = captured_of(pins=[pin(epochs=epochs), pin("agg")], positions=[told])
        (row,) = verdicts(captured, cells, after=Commit(unread=[note]))
        return row.missing, row.unknown

    unsure, lost = ({}, ((2, 2),)), ({("produced", "ewr"): ((2, 2),)}, ())
    assert fate(((3, 0),), position(7, "new", leader_epoch=2)) == unsure
    assert fate(((2, 0), (3, 4)), position(7, "new", leader_epoch=2)) == unsure, "it was cut there again"
    assert fate(((3, 0),), position(7, "new", leader_epoch=3)) == lost
    assert fate(((2, 0), (3, 4)), position(4, "new", leader_epoch=2)) == lost


def test_a_position_tells_its_epoch_and_one_that_is_none_is_not_trusted():
    key = encode_key("ewr", "flights", 0)
    value = encode_value(Position(5, "E", NO_TOPIC_ID, 4, 0))
    told = capture_module._parse_position(key, value, "agg", "m", {"E": "ewr"})
    assert told.leader_epoch == 4
    for not_one in (b'"4"', b"4.0", b"true"):
        with pytest.raises(UnreadableRecord, match="leader_epoch is no whole number"):
            wrong = value.replace(b'"leader_epoch":4', b'"leader_epoch":' + not_one)
            capture_module._parse_position(key, wrong, "agg", "m", {"E": "ewr"})


def test_a_group_whose_member_left_nothing_but_its_commit_is_doubtful_and_not_a_loser():
    """The only report of the session that got record 2 was lost from the events topic."""
    cells = [cell("ewr", [1], first=4), cell("ewr", [2], first=5), cell("agg", [1, 2])]
    settings = config(groups={"ewr": ["billing"]})
    captured = captured_of(pins=[pin(), pin("agg")], gaps=[group_told([1], ((0, 4),), session_count=1)])
    captured.commits["ewr", "billing"] = {PLACE: 10}
    (row,) = verdicts(captured, cells, settings)
    assert row.missing == {("ewr", "group:billing"): ((2, 2),)}
    captured.claims["billing", "0" * 15 + "1"] = Claim(1)
    settle_claims(captured, Commit(at_ms=captured.taken_ms, answered=[("billing", "0" * 16, 1)]))
    (row,) = verdicts(captured, cells, settings)
    assert (row.verdict, row.missing, row.unknown) == (Verdict.UNKNOWN, {}, ((2, 2),))
    assert any("counted 1 records that none of its events tells of" in reason for reason in row.reasons)


def test_what_was_told_before_it_was_pruned_stays_answered():
    """Commits of idle partitions outlive the reports behind them."""
    told, gone = ("billing", "0" * 16), ("billing", "0" * 15 + "1")
    captured = captured_of(gaps=[group_told([1], ((0, 4),), session_count=1)])
    captured.claims = {told: Claim(1), gone: Claim(7)}
    answered = [(*gone, 7), ("billing", "0" * 15 + "2", 9)]
    settle_claims(captured, Commit(claims=[(*gone, Claim(6))], answered=answered))
    assert captured.claims == {} and captured.answered == {told: 1, gone: 7}
    captured.claims = {gone: Claim(8)}
    settle_claims(captured, Commit(answered=[(*gone, 7)]))
    assert {place: each.count for place, each in captured.claims.items()} == {gone: 8}
    assert captured.answered == {gone: 7}
    settle_claims(captured, Commit(claims=[(*told, Claim(2))]))
    counts = {place: each.count for place, each in captured.claims.items()}
    assert counts == {gone: 8, told: 2}, "a claim that an earlier run kept"


def test_a_backfill_knows_what_stood_in_logs_that_are_gone():
    """Earlier runs counted the deleted topic; it can be read no more, and is not lost for that."""
    settings = config()
    captured = captured_of(pins=[pin(), pin("agg")])
    since = Commit(offsets={"ewr/flights/0": ReadPosition(2, "old"), "agg/flights/0": ReadPosition(2, "new")})
    before = Commit(
        offsets={"ewr/flights/0": ReadPosition(0, "new"), "agg/flights/0": ReadPosition(2, "new")},
        unread=[
            UnreadNote("ewr", "flights", 0, 2, 2, "recreated", 20_000_000),
            UnreadNote("ewr", "flights", 0, 0, 1, "expired", 20_000_000),
        ],
    )
    for known in (since, before):
        ranges, unread = plan_backfill(captured, settings, known)
        assert [(note.cluster, note.cause) for note in unread] == [("ewr", "recreated")]
        assert {each.cluster: each.first_offset for each in ranges} == {"ewr": 0, "agg": 0}
        (row,) = verdicts(captured, [], settings, after=Commit(unread=unread))
        assert (row.verdict, row.missing, row.unknown) == (Verdict.UNKNOWN, {}, ((1, 2),))
    _, unread = plan_backfill(captured, settings, Commit())
    (row,) = verdicts(captured, [], settings, after=Commit(unread=unread))
    assert row.missing == {("produced", "ewr"): ((1, 2),)}


def test_a_backfill_cuts_where_the_log_was_shortened():
    note = UnreadNote("ewr", "flights", 0, 3, 7, "truncated", 0, 1)
    captured = captured_of(pins=[pin()])
    ranges, unread = plan_backfill(captured, config(), Commit(unread=[note]))
    assert [(each.first_offset, each.end_offset) for each in ranges if each.size] == [(0, 3), (3, 7), (7, 10)]
    assert unread == [note]


def recreated(tier, cells, *causes):
    notes = [UnreadNote(tier, "flights", 0, 2, 2, cause, 20_000_000) for cause in causes]
    captured = captured_of(pins=[pin(), pin("agg")], positions=[position(10, "new")])
    (row,) = verdicts(captured, cells, after=Commit(unread=notes))
    return row.verdict.name, row.duplicates, row.extra_copies


def test_copies_in_one_and_the_same_topic_are_copies_whatever_was_before_it():
    source = [cell("ewr", [1, 2])]
    twice = [*source, cell("agg", [1, 2]), cell("agg", [2], first=5)]
    named = ("DUPLICATE", {"agg": ((2, 2),)}, {"agg": 1})
    assert recreated("agg", twice) == recreated("agg", twice, "recreated") == named
    again = [*source, cell("agg", [1, 2], topic_id="old"), cell("agg", [1, 2], first=5)]
    assert recreated("agg", again, "recreated") == ("UNKNOWN", {}, {})
    both = [*again, cell("agg", [1], first=8)]
    assert recreated("agg", both, "recreated") == ("DUPLICATE", {"agg": ((1, 1),)}, {"agg": 1})
    assert recreated("agg", twice, "recreated", "truncated") == ("UNKNOWN", {}, {})
    above = [cell("ewr", [1, 2]), cell("ewr", [2], first=5), cell("agg", [1, 2]), cell("agg", [2], first=5)]
    assert recreated("agg", above, "recreated") == ("DUPLICATE", {"ewr": ((2, 2),)}, {"ewr": 1})


def test_a_gap_explains_what_was_in_its_own_topic():
    def cells_of(topic_id, gaps, older_key=True):
        told = [
            GapEvent("m", "ewr", "flights", 0, first, end, "too_large", at, topic_id=of, older_key=older_key)
            for first, end, at, of in gaps
        ]
        captured = captured_of(gaps=told, positions=[position(10, "new")])
        cells = [cell("ewr", [each], topic_id=topic_id, first=each - 1) for each in (1, 2)]
        (row,) = verdicts(captured, cells)
        return row.missing.get(("ewr", "agg"), ()), row.explained.get("too_large", ()), row.unknown

    whole, nothing = ((1, 2),), ()
    assert cells_of("new", [(0, 2, 5, "")]) == (nothing, whole, nothing), "one that tells no id: as ever"
    assert cells_of("old", [(0, 2, 5, "")]) == (nothing, whole, nothing)
    assert cells_of("new", [(0, 2, 5, "new")]) == (nothing, whole, nothing)
    assert cells_of("new", [(0, 2, 5, "old")]) == (whole, nothing, nothing)
    # Both topics had a gap from 0 on, under one key: seen both, or only the newer, which took its place.
    assert cells_of("old", [(0, 2, 5, "old"), (0, 1, 6, "new")]) == (nothing, whole, nothing)
    assert cells_of("new", [(0, 2, 5, "old"), (0, 1, 6, "new")]) == (((2, 2),), ((1, 1),), nothing)
    assert cells_of("old", [(0, 1, 6, "new")]) == (nothing, nothing, whole)
    assert cells_of("old", [(1, 2, 6, "new")]) == (((1, 1),), nothing, ((2, 2),))
    # Under keys with the topic's id none takes another's place.
    assert cells_of("old", [(0, 1, 6, "new")], older_key=False) == (whole, nothing, nothing)
    assert cells_of("old", [(0, 2, 5, "old"), (0, 1, 6, "new")], older_key=False) == (nothing, whole, nothing)
    assert cells_of("new", [(0, 1, 6, "new")], older_key=False) == (((2, 2),), ((1, 1),), nothing)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_gap_of_a_log_that_is_gone_explains_what_came_after_the_mirrors_last_look(is_open):
    """Both records lie behind what the event names. They are proven in no case."""
    gap = GapEvent("m", "ewr", "flights", 0, 0, 0, "recreated", 5, topic_id="old", has_open_end=is_open)
    captured = captured_of(gaps=[gap], positions=[position(10, "new")])
    (row,) = verdicts(captured, [cell("ewr", [1, 2], topic_id="old")])
    assert (row.explained.get("recreated", ()), row.missing.get(("ewr", "agg"), ())) == (
        (((1, 2),), ()) if is_open else ((), ((1, 2),))
    )
    (row,) = verdicts(captured, [cell("ewr", [1, 2], topic_id="new")])
    assert row.missing == {("ewr", "agg"): ((1, 2),)}


@pytest.mark.parametrize(("target", "explains"), [("A", True), ("", True), ("B", False)])
def test_a_gap_explains_what_its_own_target_lacks(target, explains):
    """A mirror of the same name carries into another cluster."""
    gap = GapEvent("m", "ewr", "flights", 0, 0, 2, "too_large", 5, target=target)
    captured = captured_of(gaps=[gap], positions=[position(10, "new")])
    captured.cluster_ids = {"agg": "A"}
    (row,) = verdicts(captured, [cell("ewr", [1, 2])])
    assert (bool(row.explained), bool(row.missing)) == (explains, not explains)


class Electing(FakeCluster):
    """Its leader changes while it is asked, so often: the log is shortened, and the offsets go again."""

    elections = 1
    epoch = 1
    asked = 0

    async def list_offsets(self, timestamps, read_committed=False):
        found = await super().list_offsets(timestamps, read_committed)
        return {
            key: SimpleNamespace(offset=each.offset, leader_epoch=self.epoch) for key, each in found.items()
        }


def pinned(monkeypatch, elections):
    cluster = Electing("ewr", topics=["flights"], ends={True: 9, False: 9})

    async def histories(_, latest):
        """A leader tells of the epochs up to the one that it is asked for, and not of its own."""
        cluster.asked += 1
        if cluster.asked <= elections:
            cluster.epoch += 1
        ((key, (newest, _)),) = latest.items()
        return {key: tuple((epoch, 3 * (epoch - 1)) for epoch in range(1, newest + 1))}

    monkeypatch.setattr(capture_module, "bytes_per_offset", no_sizes)
    monkeypatch.setattr(partition_pins, "epoch_histories", histories)
    captured = captured_of(pins=[])
    asyncio.run(capture_module._pin_cluster(captured, config(), cluster))
    (pin,) = captured.pins
    return pin.epochs


def test_a_log_that_gets_a_new_leader_between_its_ends_and_its_epochs_is_asked_again(monkeypatch):
    assert pinned(monkeypatch, 0) == ((1, 0),)
    assert pinned(monkeypatch, 1) == ((1, 0), (2, 3))
    assert pinned(monkeypatch, 3)[-1] == (4, 9)
    with pytest.raises(ClusterUnreachable, match=r"ewr.*new leaders"):
        pinned(monkeypatch, 100)


def test_a_leader_is_asked_for_the_epochs_in_which_its_log_was_read(monkeypatch):
    cluster = Electing("ewr", topics=["flights"], ends={True: 9, False: 9})

    async def histories(_, latest):
        return dict.fromkeys(latest, ((1, 0),))

    async def older(_, told, kept):
        return {key: tuple((epoch, epoch, 5) for epoch, _ in kept.get(key, ())) for key in told}

    monkeypatch.setattr(capture_module, "bytes_per_offset", no_sizes)
    monkeypatch.setattr(partition_pins, "epoch_histories", histories)
    monkeypatch.setattr(partition_pins, "older_ends", older)
    captured = captured_of(pins=[])
    captured.known = {"ewr/flights/0": ReadPosition(7, "", ((0, 0), (1, 5)))}
    asyncio.run(capture_module._pin_cluster(captured, config(), cluster))
    assert [pin.older_ends for pin in captured.pins] == [((0, 0, 5), (1, 1, 5))]
