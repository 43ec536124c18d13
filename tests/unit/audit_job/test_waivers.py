"""Waivers: who and why, for what, and when they stand no longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace.audit.config import parse_config
from millrace.audit.keeping.state import Commit, StateDamaged, StateFolder
from millrace.audit.keeping.waivers import (
    give_waiver,
    is_stream,
    read_waivers,
    standing_waivers,
    waived_targets,
)
from millrace.audit.reconciliation.settled import lines_digest, without
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.status import lines, read_status
from millrace.broker.errors import ConfigError
from tests.settling import settle

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


def test_what_cannot_be_waived_is_one_line(tmp_path):
    state = state_of(tmp_path, row(), row(10, Verdict.PROVEN, 0))
    for target, why, message in ((20, "x", "settled window"), (10, "x", "PROVEN"), (0, " ", "reason")):
        with pytest.raises(ConfigError, match=message):
            give_waiver(state, "flights", target, "ops", why, 5)
    assert read_waivers(state) == []


def test_two_waivers_at_once_are_both_kept(tmp_path):
    state = state_of(tmp_path, row())
    for number in range(3):
        give_waiver(state, "flights", 0, f"ops{number}", "known", number)
    assert [each.who for each in read_waivers(state)] == ["ops0", "ops1", "ops2"]


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
