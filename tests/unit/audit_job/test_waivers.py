"""Waivers: who and why, for what, and when they stand no longer."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from millrace.audit.config import parse_config
from millrace.audit.keeping.state import Commit, StateDamaged, StateFolder, guarded
from millrace.audit.keeping.verdict_files import SettledLines
from millrace.audit.keeping.waivers import (
    give_waiver,
    is_stream,
    newest_waiver,
    read_waivers,
    standing_waivers,
    waived_targets,
)
from millrace.audit.reconciliation.reconcile import NOT_COVERED
from millrace.audit.reconciliation.settled import LINE_SCHEMA, lines_digest, number_rows, without
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import (
    DIFFERS,
    FELL_SILENT,
    Verdict,
    WindowState,
    WindowVerdict,
)
from millrace.audit.status import lines, read_status
from millrace.broker.errors import ConfigError
from tests.settling import settle
from tests.unit.audit.trap_scene import Scene, Stream

STREAM = "00000000000000aa"


def row(start_ms=0, verdict=Verdict.LOSS, lost=1, state=WindowState.SETTLED, stream=STREAM, **more):
    return WindowVerdict(
        topic="flights", producer="AA", stream=stream, window_start_ms=start_ms, window_ms=10,
        state=state, verdict=verdict, missing={("ewr", "agg"): ((1, lost),)} if lost else {},
        **more,
    )  # fmt: skip


def settled_of(*verdicts):
    return settle(verdict_rows(verdicts), None, ["flights"], 1).table


def state_of(tmp_path, *verdicts, topic="flights"):
    state = StateFolder.open(tmp_path / "state")
    table = settle(verdict_rows(verdicts), None, [topic], 1).table
    state.write_table("verdicts/run.parquet", table)
    state.commit(
        Commit(
            number=1, at_ms=1000, window_ms=10, verdicts=["verdicts/run.parquet"],
            verdicts_digest=lines_digest(table), watermarks={"flights": 86_400_000},
        )
    )  # fmt: skip
    return state


def test_a_waiver_is_kept_with_what_it_was_given_for(tmp_path):
    state = state_of(tmp_path, row())
    given = give_waiver(state, "flights", 0, "ops@host", "replayed by hand", 5)
    assert (given.verdict, given.missing, given.who) == ("LOSS", 1, "ops@host")
    assert read_waivers(state) == [given]
    standing = standing_waivers(read_waivers(state), verdict_rows([row()]))
    assert waived_targets(standing) == {("flights", 0)}


def test_a_window_of_a_topic_with_the_longest_name_can_be_waived(tmp_path):
    """A file's name has 255 bytes, that of a temporary one too. Topics that begin alike are told apart."""
    for topic in ("t" * 249, "t" * 248 + "u"):
        state = state_of(tmp_path / topic[-1], replace(row(1_357_084_800_000), topic=topic), topic=topic)
        given = give_waiver(state, topic, 1_357_084_800_000, "ops", "known", 5)
        give_waiver(state, topic, 1_357_084_800_000, "ops", "again", 6)
        assert given.topic == topic and given in read_waivers(state)
    names = {path.name for each in "tu" for path in (tmp_path / each / "state" / "waivers").iterdir()}
    assert len(names) == 4


@pytest.mark.parametrize(
    "now",
    [
        row(lost=2),
        row(duplicates={"agg": ((5, 5),)}, extra_copies={"agg": 1}),
        row(in_flight={("ewr", "agg"): ((9, 9),)}),
    ],
)
def test_a_window_that_got_worse_is_waived_no_longer_until_somebody_does_it_again(tmp_path, now):
    state = state_of(tmp_path, row())
    give_waiver(state, "flights", 0, "ops", "known", 5)
    (standing,) = standing_waivers(read_waivers(state), verdict_rows([now]))
    assert not standing.stands and standing.told()["stands"] is False
    second = state_of(tmp_path / "later", now)
    again = give_waiver(second, "flights", 0, "ops", "this too", 6)
    (standing,) = standing_waivers([*read_waivers(state), again], verdict_rows([now]))
    assert standing.stands and standing.waiver.why == "this too"


def test_a_worse_word_ends_it_and_a_better_one_does_not(tmp_path):
    state = state_of(tmp_path, row(verdict=Verdict.UNKNOWN, lost=0, unknown=((1, 3),)))
    give_waiver(state, "flights", 0, "ops", "known", 5)
    waivers = read_waivers(state)
    worse = standing_waivers(waivers, verdict_rows([row(verdict=Verdict.LOSS)]))
    assert not worse[0].stands
    better = standing_waivers(waivers, verdict_rows([row(verdict=Verdict.PROVEN, lost=0)]))
    assert better[0].stands


def test_a_loss_in_a_waived_window_that_is_open_again_ends_the_waiver(tmp_path):
    """A killed producer comes back, or another stream writes back-dated records: nobody waived that."""
    state = state_of(tmp_path, row(verdict=Verdict.UNKNOWN, lost=0, unknown=((1, 3),)))
    give_waiver(state, "flights", 0, "ops", "known", 5)
    waivers = read_waivers(state)
    known = row(verdict=Verdict.UNKNOWN, lost=0, unknown=((1, 3),))
    came = row(lost=1000, state=WindowState.OPEN, stream="00000000000000bb")
    twice = row(
        verdict=Verdict.DUPLICATE, lost=0, state=WindowState.OPEN, duplicates={"agg": ((5, 5),)},
        extra_copies={"agg": 1},
    )  # fmt: skip
    for now in ([came], [known, came], [twice]):
        assert not standing_waivers(waivers, verdict_rows(now))[0].stands
    on_the_way = row(
        verdict=Verdict.UNKNOWN, lost=0, state=WindowState.OPEN, in_flight={("ewr", "agg"): ((1, 9),)}
    )
    assert standing_waivers(waivers, verdict_rows([known, on_the_way]))[0].stands


def test_what_a_pruned_window_was_waived_for_covers_no_other_streams_loss(tmp_path):
    state = state_of(tmp_path, row())
    give_waiver(state, "flights", 0, "ops", "known", 5)
    waivers, folded = read_waivers(state), without(settled_of(row()), [("flights", 0)])
    nothing_else = standing_waivers(waivers, verdict_rows([]), folded)
    assert nothing_else[0].stands
    other = verdict_rows([row(stream="00000000000000bb")])
    assert not standing_waivers(waivers, other, settle(other, folded, ["flights"], 2).table)[0].stands
    proven = verdict_rows([row(stream="00000000000000bb", verdict=Verdict.PROVEN, lost=0)])
    assert standing_waivers(waivers, proven, settle(proven, folded, ["flights"], 2).table)[0].stands


def test_a_streams_own_row_is_waived_by_its_name(tmp_path):
    silent = row(None, Verdict.UNKNOWN, 0)
    state = state_of(tmp_path, silent)
    assert is_stream(STREAM) and not is_stream("2013-01-01") and not is_stream("1356998400000")
    give_waiver(state, "flights", STREAM, "ops", "killed on purpose", 5)
    standing = standing_waivers(read_waivers(state), verdict_rows([silent]))
    assert waived_targets(standing) == {("flights", STREAM)}


def state_with_rows(tmp_path, *verdicts):
    """As a run of now leaves it."""
    state, name = StateFolder.open(tmp_path / "state"), "verdicts/1/day=all/rows.parquet"
    state.write_table(name, number_rows(verdict_rows(verdicts), LINE_SCHEMA.empty_table(), 1))
    state.commit(Commit(number=1, at_ms=1000, window_ms=10, verdicts=[name], verdicts_digest="d"))
    return state


HOLE, SILENT = (NOT_COVERED,), (FELL_SILENT,)


def own_row(reasons, silent_from_ms=None):
    return row(None, Verdict.UNKNOWN, 0, reasons=reasons, silent_from_ms=silent_from_ms)


@pytest.mark.parametrize(
    ("given", "now", "stands"),
    [
        (own_row(SILENT, 100), own_row(SILENT, 100), True),
        (own_row(SILENT, 100), own_row(SILENT, 101), False),  # it came back meanwhile
        (own_row(SILENT, 100), own_row(SILENT + HOLE, 100), False),
        (own_row(SILENT + HOLE, 100), own_row(HOLE), True),
        (own_row(SILENT + HOLE, 100), own_row(SILENT + HOLE, 101), False),
        (own_row(HOLE), own_row(SILENT + HOLE, 1), False),
    ],
)
def test_a_waiver_of_a_streams_row_is_for_its_reasons_and_for_one_silence(tmp_path, given, now, stands):
    """None of these is in any count."""
    state = state_with_rows(tmp_path, given)
    waiver = give_waiver(state, "flights", STREAM, "ops", "known", 500)
    assert read_waivers(state) == [waiver] and waiver.reasons == given.reasons
    again = state_with_rows(tmp_path / "later", now)
    for told in (verdict_rows([now]), SettledLines(again, again.latest().verdicts)):
        assert standing_waivers([waiver], told)[0].stands is stands
    assert standing_waivers([waiver], verdict_rows([]))[0].stands, "its doubt is gone"


def test_a_waiver_of_an_older_program_covers_no_silence_that_began_after_it(tmp_path):
    state = state_of(tmp_path, row(None, Verdict.UNKNOWN, 0))
    older = give_waiver(state, "flights", STREAM, "ops", "known", 500)
    assert older.reasons is None
    for silent_from_ms, stands in ((500, True), (501, False)):
        now = verdict_rows([own_row(SILENT, silent_from_ms)])
        assert standing_waivers([older], now)[0].stands is stands
    assert standing_waivers([older], verdict_rows([own_row(HOLE)]))[0].stands


def test_a_lost_record_that_is_waived_covers_no_contents_that_differ(tmp_path):
    """Of the same stream, or of another one in the window."""
    state = state_with_rows(tmp_path, row())
    waiver = give_waiver(state, "flights", 0, "ops", "one record", 5)
    assert waiver.differing is None and standing_waivers([waiver], verdict_rows([row()]))[0].stands
    other = row(stream="00000000000000bb", lost=0, content_checked=DIFFERS)
    for now in ([row(content_checked=DIFFERS)], [row(), other]):
        assert not standing_waivers([waiver], verdict_rows(now))[0].stands
        changed = state_with_rows(tmp_path / str(len(now)), *now)
        again = give_waiver(changed, "flights", 0, "ops", "this too", 6)
        assert again.differing == 1 and read_waivers(changed) == [again]
        assert standing_waivers([again], verdict_rows(now))[0].stands
        third = row(stream="00000000000000cc", lost=0, content_checked=DIFFERS)
        assert not standing_waivers([again], verdict_rows([*now, third]))[0].stands


def test_what_an_older_program_waived_of_contents_alone_stays_waived(tmp_path):
    changed = row(lost=0, content_checked=DIFFERS)
    older = give_waiver(state_of(tmp_path, changed), "flights", 0, "ops", "known", 5)
    assert (older.verdict, older.missing, older.differing) == ("LOSS", 0, None)
    assert standing_waivers([older], verdict_rows([changed]))[0].stands


def test_a_waiver_of_a_newer_program_is_refused_in_a_sentence(tmp_path):
    state = state_of(tmp_path, row())
    body = {**asdict(give_waiver(state, "flights", 0, "ops", "known", 5)), "more": 1}
    state.files.create("waivers/flights-0.2.json", guarded("waiver", body))
    with pytest.raises(StateDamaged, match="newer program"):
        read_waivers(state)


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def live_on(scene, *streams):
    scene.later()
    for each in streams:
        each.send(1)
    scene.later()
    for each in streams:
        each.report()
    scene.carry()


def test_a_second_silence_is_not_waived_with_the_first(scene):
    """A machine that is paused, comes back, and then dies with what it had not told."""
    paused, other = Stream(scene), Stream(scene)
    live_on(scene, paused, other)
    live_on(scene, other)
    scene.audit()
    assert scene.result.exit_status == 2
    scene.product.waive([("flights", paused.id)])
    scene.audit()
    assert scene.result.exit_status == 0
    live_on(scene, paused, other)
    live_on(scene, paused, other)
    scene.audit()
    assert (scene.result.exit_status, scene.result.summary["verdict"]) == (0, "PROVEN")
    before = scene.result.watermarks["flights"]
    paused.send(2, written=0)
    live_on(scene, other)
    scene.audit()
    assert scene.result.exit_status == 2 and not scene.result.summary["waivers"][0]["stands"]
    assert scene.result.watermarks["flights"] == before
    scene.product.waive([("flights", paused.id)])
    scene.audit()
    assert scene.result.exit_status == 0 and scene.result.watermarks["flights"] > before


def test_a_hole_that_is_waived_covers_no_silence_that_comes_after_it(scene):
    """Its producer is dead by then, and within its lease: five records that nobody told of are lost."""
    dead, other = Stream(scene), Stream(scene)
    dead.send(3, written=0)
    other.send(3)
    scene.later(2000)
    dead.report(lost=True)
    other.report()
    for each in (dead, other):
        each.send(1)
    scene.later(2000)
    dead.report()
    other.report()
    scene.carry()
    dead.send(5, written=0)
    scene.audit()
    scene.product.waive([("flights", dead.id)])
    live_on(scene, other)
    live_on(scene, other)
    scene.audit()
    assert scene.result.exit_status == 2 and not scene.result.summary["waivers"][0]["stands"]
    lost_ms = dead.sent[-1].created_ms
    assert (scene.result.watermarks["flights"] or 0) <= lost_ms


def test_what_cannot_be_waived_is_one_line(tmp_path):
    state = state_of(tmp_path, row(), row(10, Verdict.PROVEN, 0))
    for target, why, message in ((20, "x", "settled window"), (10, "x", "PROVEN"), (0, " ", "reason")):
        with pytest.raises(ConfigError, match=message):
            give_waiver(state, "flights", target, "ops", why, 5)
    assert read_waivers(state) == []


def test_two_waivers_at_once_are_both_kept(tmp_path):
    """Another is given between the look at what is there and the making of the file."""
    state = state_of(tmp_path, row())
    entries, own = state.files.entries, []

    def overtaken(folder):
        found = entries(folder)
        if not own:
            own.append(give_waiver(replace_files(state), "flights", 0, "first", "known", 1))
        return found

    late = replace_files(state)
    late.files.entries = overtaken
    give_waiver(late, "flights", 0, "second", "known", 0)
    assert [each.who for each in read_waivers(state)] == ["first", "second"]


def replace_files(state):
    """The same state, for another command."""
    return StateFolder(type(state.files)(state.files.root))


def test_the_waiver_that_was_given_last_counts_whatever_its_givers_clock(tmp_path):
    """Also where an earlier one of the window was damaged, and taken away as the line about it says."""
    state = state_of(tmp_path, row())
    for who, at_ms in (("ahead", 3_601_000), ("right", 2_000)):
        give_waiver(state, "flights", 0, who, "known", at_ms)
    assert newest_waiver(state, "flights", 0).who == "right"
    (standing,) = standing_waivers(read_waivers(state), verdict_rows([row()]))
    assert standing.waiver.who == "right"
    state.files.remove("waivers/flights-0.1.json")
    give_waiver(state, "flights", 0, "again", "known", 1_000)
    assert [each.who for each in read_waivers(state)] == ["right", "again"]


def test_a_damaged_waiver_is_an_error_and_not_no_waiver(tmp_path):
    state = state_of(tmp_path, row())
    give_waiver(state, "flights", 0, "ops", "known", 5)
    (path,) = (tmp_path / "state" / "waivers").iterdir()
    path.write_text(path.read_text().replace('"LOSS"', '"LOSE"'))
    with pytest.raises(StateDamaged, match="waive again"):
        read_waivers(state)


def test_status_fits_a_terminal_and_tells_watermark_verdicts_and_waivers(tmp_path):
    state = state_of(tmp_path, row(), row(10, Verdict.PROVEN, 0))
    give_waiver(state, "flights", 0, "ops", "known " * 40, 5)
    clusters = {"ewr": {"bootstrap": ["h:1"], "tier": "source"}}
    config = parse_config(
        {
            "clusters": clusters,
            "topics": ["flights", "a-very-long-name-of-a-topic-that-fills-the-line"],
            "state": str(tmp_path / "state"),
            "report": str(tmp_path / "report"),
        }
    )
    told = read_status(config)
    assert told["topics"]["flights"] == {
        "watermark": "1970-01-02T00:00:00Z", "windows": {"LOSS": 1, "PROVEN": 1}, "pruned": 0,
        "waivers": 1, "lapsed": 0,
    }  # fmt: skip
    assert told["run"] == 1 and told["size"]["files"] == 1 and told["size"]["bytes"] > 0
    text = lines(told)
    assert all(len(line) <= 79 for line in text)
    assert any(line.split()[:2] == ["flights", "1970-01-02T00:00:00Z"] for line in text)
    assert any("ops: known" in line for line in text)
    empty = config.model_copy(update={"state": tmp_path / "none"})
    assert lines(read_status(empty))[0].startswith("no run has been kept yet")
