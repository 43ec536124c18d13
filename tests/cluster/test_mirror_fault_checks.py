"""The judgement of the mirror's fault run is put to the test itself: each breach is seen, and nothing else
is."""

from __future__ import annotations

from collections import Counter

from tests.cluster.mirror_faults import spared_memory, summary
from tests.cluster.mirror_faults.checks import Seen, Verdict, judge
from tests.cluster.mirror_faults.plan import Kind, rounds
from tests.cluster.mirror_faults.records import (
    FLIGHTS,
    SHIFTING,
    Gap,
    Journal,
    Stream,
    identity_of,
    record_of,
)

STREAM = Stream("ewr", FLIGHTS, 0, 1)
SHIFTED = Stream("ewr", SHIFTING, 3, 1)


def journal(*runs: tuple[int, int, int], stream: Stream = STREAM, ended_ms: int | None = None) -> Journal:
    """Runs are (first number, count, first offset)."""
    return Journal(stream, max((first + count for first, count, _ in runs), default=0), list(runs), ended_ms)


def judged(known: Journal, *numbers: int, gaps: tuple[Gap, ...] = (), exactly_once: bool = True) -> Verdict:
    seen = Seen()
    for number in numbers:
        seen.add(number, "somewhere")
    return judge([known], {known.stream: seen}, gaps, exactly_once=exactly_once)


def test_what_was_acknowledged_is_there_once_and_in_order() -> None:
    known = journal((0, 3, 100), (5, 2, 103))
    assert judged(known, 0, 1, 2, 5, 6) == Verdict()
    # 3 and 4 had no answer: there or not.
    assert judged(known, 0, 1, 2, 3, 4, 5, 6) == Verdict()
    assert judged(known, 0, 1, 5, 6).missing == {STREAM: [2]}
    assert judged(known, 0, 1, 2, 5).missing == {STREAM: [6]}
    assert judged(known).missing == {STREAM: [0, 1, 2, 5, 6]}


def test_repeats_and_order() -> None:
    known = journal((0, 4, 0))
    twice = judged(known, 0, 1, 2, 1, 2, 3)
    assert twice.duplicate_count == 2
    assert "came more than once" in twice.lines()[0]
    assert judged(known, 0, 1, 2, 1, 2, 3, exactly_once=False).lines() == []
    for exactly_once in (True, False):
        assert "out of order" in judged(known, 0, 2, 1, 3, exactly_once=exactly_once).lines()[0]
    assert judged(known, 0, 2, 3, exactly_once=False).missing == {STREAM: [1]}


def test_what_the_sources_own_log_holds_twice_is_no_repeat_of_the_mirrors() -> None:
    known, seen = journal((0, 4, 0)), Seen()
    for number in (0, 1, 2, 1, 2, 3):
        seen.add(number, "somewhere")
    for again, repeats in (({1: 1, 2: 1}, 0), ({1: 1}, 1), ({1: 2}, 1), ({3: 1}, 2)):
        found = judge([known], {STREAM: seen}, [], exactly_once=True, at_source={STREAM: Counter[int](again)})
        assert (found.duplicate_count, found.source_duplicate_count) == (repeats, 2 - repeats)
        assert bool(found.lines()) == bool(repeats)


def test_records_that_nobody_wrote() -> None:
    assert "never written" in judged(journal((0, 2, 0)), 0, 1, 2).lines()[0]
    stranger = judge([], {STREAM: Seen(0, 1)}, [], exactly_once=True)
    assert "nobody wrote" in stranger.lines()[0]


def gap_at(
    from_offset: int,
    to_offset: int,
    at_ms: int = 51_000,
    gap_class: str = "recreated",
    topic: str = SHIFTING,
    is_open: bool = True,
) -> Gap:
    return Gap("ewr", topic, 1, from_offset, to_offset, gap_class, at_ms, is_open)


def test_only_a_gap_that_something_caused_explains() -> None:
    known = journal((0, 4, 10), stream=SHIFTED, ended_ms=50_000)
    found = judged(known, 0, 1, gaps=(gap_at(12, 14),))
    assert (found.explained_count, found.lines()) == (2, [])
    wrong_ones = (
        gap_at(12, 14, at_ms=40_000),
        gap_at(12, 14, gap_class="truncated"),
        gap_at(12, 14, topic=FLIGHTS),
    )
    for wrong in wrong_ones:
        found = judged(known, 0, 1, gaps=(wrong,))
        assert found.missing == {SHIFTED: [2, 3]}
        assert "a gap that nothing caused" in found.lines()[1]
    # Once an ended life was found whole, a later gap does not excuse it.
    known.settled_ms = 60_000
    assert judged(known, 0, 1, gaps=(gap_at(12, 14, at_ms=70_000),)).missing == {SHIFTED: [2, 3]}


def test_a_gap_explains_its_own_offsets_and_no_others() -> None:
    known = journal((0, 6, 10), stream=SHIFTED, ended_ms=50_000)

    def counts(*numbers: int, gaps: tuple[Gap, ...]) -> tuple[int, dict[Stream, list[int]]]:
        found = judged(known, *numbers, gaps=gaps)
        return found.explained_count, found.missing

    assert counts(0, 1, gaps=(gap_at(12, 16),)) == (4, {})
    # Before it: lost.
    assert counts(0, gaps=(gap_at(12, 16),)) == (4, {SHIFTED: [1]})
    # Behind it, to the end of a log that is gone: nobody could know of them, and the event says so.
    assert counts(0, 1, gaps=(gap_at(12, 13),)) == (4, {})
    assert counts(0, 1, gaps=(gap_at(12, 12),)) == (4, {})
    assert counts(gaps=(gap_at(10, 10),)) == (6, {})
    # Where it does not, they are lost.
    assert counts(0, 1, gaps=(gap_at(12, 13, is_open=False),)) == (1, {SHIFTED: [3, 4, 5]})
    # Behind it, but what came shows that the mirror had seen more of the log.
    assert counts(0, 1, 5, gaps=(gap_at(12, 13),)) == (1, {SHIFTED: [3, 4]})
    assert counts(0, 1, 4, gaps=(gap_at(12, 13),)) == (2, {SHIFTED: [3]})
    # Between two gaps: whoever met the second had seen what lies before it.
    assert counts(0, 1, gaps=(gap_at(12, 13), gap_at(14, 15))) == (3, {SHIFTED: [3]})
    # No gap, or none of this life's: nothing explains them.
    assert counts(0, 1, gaps=()) == (0, {SHIFTED: [2, 3, 4, 5]})
    assert counts(0, 1, gaps=(gap_at(12, 13, at_ms=40_000),)) == (0, {SHIFTED: [2, 3, 4, 5]})


def test_what_was_acknowledged_later_does_not_count_yet() -> None:
    known = journal((0, 2, 0), (2, 2, 2))
    seen = {STREAM: Seen(1, 2)}
    assert judge([known], seen, [], exactly_once=True, up_to={STREAM: 1}).missing == {}
    assert judge([known], seen, [], exactly_once=True, up_to={STREAM: 2}).missing == {STREAM: [2, 3]}


def test_records_can_be_told_apart() -> None:
    for number in range(500):
        record = record_of(STREAM, number)
        assert identity_of(record.key) == (STREAM, number)
        assert 100 <= len(record.value or b"") < 900
    assert record_of(STREAM, 1).value != record_of(STREAM, 2).value


def test_a_seed_brings_the_same_events_and_all_kinds() -> None:
    kinds = list(Kind)
    plan = list(rounds(5, 30, kinds))
    assert plan == list(rounds(5, 30, kinds)) != list(rounds(6, 30, kinds))
    counts = Counter(event.kind for events in plan for event in events)
    assert sum(counts.values()) == 30
    assert set(counts) == set(kinds)
    assert min(counts.values()) >= 2
    assert any(len(events) == 2 for events in plan)
    for events in plan:
        things = [thing for event in events for thing in event.things]
        assert len(things) == len(set(things)), "nothing is befallen by two at once"


def test_the_table_says_what_happened_and_what_became_of_the_records() -> None:
    verdict = Verdict({STREAM: [4, 5, 9]}, 17, duplicate_count=2, source_duplicate_count=6)
    table = summary.table(
        minutes=61.25,
        event_counts={"WORKER_KILLED": 3, "LINK_CUT": 12},
        round_count=9,
        acknowledged=1_234_567,
        carried=1_234_549,
        verdict=verdict,
        ended_count=1,
        memory_mb={"w1": (101.4, 99.6), "w2": (0.0, 250.5)},
        spared_mb=(101.2, 110.6),
    )
    assert [line.split("  ")[0] or line.split()[0] for line in table.splitlines()] == [
        "minutes",
        "events",
        "link_cut",
        "worker_killed",
        "records acknowledged",
        "records in the aggregate",
        "lost",
        "explained by a gap's event",
        "duplicated",
        "twice in the source's own log",
        "servers that ended by themselves",
        "resident memory of w1, start and end",
        "resident memory of w2, start and end",
        "of the one that was spared, early and late",
    ]
    told = [line[summary.NAME_WIDTH + 1 :] for line in table.splitlines()]
    assert told == [
        "61.2",
        "15 in 9 rounds",
        "12",
        "3",
        "1234567",
        "1234549",
        "3",
        "17",
        "2",
        "6",
        "1",
        "101 MB, 100 MB",
        "0 MB, 250 MB",
        "101 MB, 111 MB",
    ]
    assert all(line[summary.NAME_WIDTH] == " " for line in table.splitlines())


def test_a_worker_whom_nothing_befell_may_be_a_tenth_larger_in_the_end() -> None:
    warm_up, counted = [50.0] * spared_memory.WARM_UP_ROUNDS, 4 * spared_memory.WARM_UP_ROUNDS
    level = [*warm_up, *([100.0, 180.0, 100.0, 100.0, 100.0] * (counted // 5))]
    assert spared_memory.early_and_late(level) == (100.0, 100.0)
    assert spared_memory.problems(level) == []
    for step_mb, is_told in ((9.0 / counted, False), (20.0 / counted, True)):
        growing = [*warm_up, *(100.0 + step_mb * number for number in range(counted))]
        assert bool(spared_memory.problems(growing)) == is_told
    # Nothing is said of a short run.
    assert spared_memory.problems([50.0, *([100.0] * (spared_memory.LEAST_ROUNDS - 3)), 300.0]) == []
