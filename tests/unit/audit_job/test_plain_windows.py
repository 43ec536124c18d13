"""Windows judged as columns: whatever a stream has, its rows are those of every window judged by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyroaring import BitMap, BitMap64

from millrace.audit.contract.events import CLOSED, HEARTBEAT, OPENED, CountEvent, EventLedger, StreamEvent
from millrace.audit.reconciliation import plain_windows
from millrace.audit.reconciliation.online_tiers import OnlineGroup
from millrace.audit.reconciliation.reconcile import Gap, Passage, UnreadRange
from millrace.audit.reconciliation.verdict_rows import ClusterReading, Reconciler, evident_rows, iso_time
from millrace.audit.runs.fact_rows import FACT_SCHEMA, PrunedWindows, facts_table, left_of
from millrace.audit.scanning.cells import BASE_STEP, Cell
from tests import seeds
from tests.cells import again_of, encode_bitmaps, table_of

STREAM, TOPIC, PRODUCER = "00000000000000ab", "flights", "AA@ewr"
MINUTE_MS, START_MS, GRACE_MS = 60_000, 1_700_000_040_000, 5_000
WINDOWS = 9
TIERS = ("ewr", "agg")
PLACE = ("ewr", TOPIC, 0)
ALL_PASSED = Passage(10**9, "id")


@dataclass
class Scene:
    """What a stream's events and cells say; `held` {(tier, window): (numbers, copies beyond the first)}."""

    reports: dict[int, CountEvent]
    held: dict[tuple[str, int], tuple[set[int], list[int]]]
    promised_ms: int | None = START_MS + 100 * MINUTE_MS
    state: str = HEARTBEAT
    now_ms: int = START_MS + 50 * MINUTE_MS
    last: int = 0
    pruned: PrunedWindows | None = None
    cell_changes: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    parts: int = 1
    unread: list[UnreadRange] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    passed: Passage | None = ALL_PASSED

    def facts(self) -> pa.Table:
        ledger = EventLedger()
        word = StreamEvent(
            stream=STREAM, session="0" * 16, topic=TOPIC, producer=PRODUCER, window_ms=MINUTE_MS,
            state=OPENED, host="", application="", datacenter="", last_assigned=0, last_settled=0,
            no_earlier_than_ms=None, lease_ms=3_600_000, at_ms=START_MS,
        )  # fmt: skip
        newest = replace(
            word, state=self.state, last_assigned=self.last, last_settled=self.last,
            no_earlier_than_ms=self.promised_ms, at_ms=START_MS + WINDOWS * MINUTE_MS,
        )  # fmt: skip
        for event in (word, *self.reports.values(), newest):
            ledger.learn(event)
        pruned = {STREAM: self.pruned} if self.pruned else {}
        return facts_table(ledger, {STREAM: {"ewr"}}, pruned).select(FACT_SCHEMA.names)

    def cells(self) -> pa.Table:
        made = [
            self._cells(
                tier, start_ms, part, sorted(each for each in numbers if each % self.parts == part), copies
            )
            for (tier, start_ms), (numbers, copies) in self.held.items()
            for part in range(self.parts)
        ]
        # Backwards, and so in another order than any in which they are looked at.
        return table_of([cell for cells in reversed(made) for cell in cells])

    def _cells(
        self, tier: str, start_ms: int, part: int, numbers: list[int], copies: list[int]
    ) -> Iterator[Cell]:
        first = 1000 * (start_ms - START_MS) // MINUTE_MS
        for base, bitmap in encode_bitmaps(np.array(numbers, np.uint64)):
            held = [each for each in numbers if each // BASE_STEP == base // BASE_STEP]
            extra = Counter(each for each in copies if each in held)
            yield replace(
                Cell(
                    tier=tier, cluster=tier, topic=TOPIC, partition=part, stream=STREAM, producer=PRODUCER,
                    window_start_ms=start_ms, chunk_start=first, count=len(held) + extra.total(),
                    byte_count=9, first_offset=first, last_offset=first + 999, base=base, bitmap=bitmap,
                    topic_id="id", again=again_of(extra, base),
                ),
                **self.cell_changes.get((tier, start_ms), {}),
            )  # fmt: skip

    def reconciler(self) -> Reconciler:
        clusters = [
            ClusterReading(
                name, name == "ewr", {TOPIC: TOPIC}, self.unread if name == "ewr" else (), {TOPIC: TOPIC}
            )
            for name in TIERS
        ]
        places = [("ewr", TOPIC, part) for part in range(self.parts)]
        passed = {} if self.passed is None else {"agg": dict.fromkeys(places, self.passed)}
        return Reconciler(clusters, passed, {"agg": self.gaps}, MINUTE_MS, GRACE_MS, self.now_ms, (TOPIC,))


def report(start_ms: int, numbers: Any, **changes: Any) -> CountEvent:
    acknowledged = BitMap64(numbers)
    told = CountEvent(
        stream=STREAM, session="0" * 16, topic=TOPIC, producer=PRODUCER, window_start_ms=start_ms,
        window_ms=MINUTE_MS, report=1, count=len(acknowledged), byte_count=9 * len(acknowledged),
        acknowledged=acknowledged, ambiguous=BitMap64(), failed=BitMap64(), at_ms=start_ms + MINUTE_MS,
    )  # fmt: skip
    return replace(told, **changes)


def scene(first: int = 1, sizes: tuple[int, ...] = (5,) * WINDOWS, from_ms: int = START_MS) -> Scene:
    """All is there, and settled."""
    reports, held = {}, {}
    for start_ms, size in zip(range(from_ms, from_ms + WINDOWS * MINUTE_MS, MINUTE_MS), sizes, strict=True):
        numbers = range(first, first + size)
        reports[start_ms] = report(start_ms, numbers)
        held |= {(tier, start_ms): (set(numbers), []) for tier in TIERS}
        first += size
    return Scene(reports, held, last=first - 1)


def judged(
    given: Scene, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[list[dict[str, Any]], int | None]:
    """The rows, and how many of them were made as columns; None where whoever decides gave up."""
    reconciler, cells, facts = (
        replace(given.reconciler(), **settings),
        given.cells(),
        given.facts().to_pylist(),
    )
    split, taken = plain_windows.plain_windows, []

    def noting(*some: Any) -> Any:
        found = split(*some)
        taken.append(None if found is None else len(found.starts))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(plain_windows, "FEW_WINDOWS", 1)
        patched.setattr(plain_windows, "plain_windows", noting)
        rows = reconciler.rows(cells, facts, left_of(facts))
    one_by_one = evident_rows(reconciler.verdicts(cells, facts))
    assert rows.to_pylist() == one_by_one.to_pylist()
    assert rows.equals(one_by_one)
    return rows.to_pylist(), taken[0] if taken else None


def test_all_windows_of_a_stream_that_lacks_nothing_are_columns(monkeypatch):
    rows, plain = judged(scene(), monkeypatch)
    assert plain == WINDOWS
    assert {(row["verdict"], row["state"], row["published"]) for row in rows} == {("PROVEN", "SETTLED", 5)}
    assert dict(rows[3]["seen"]) == {"ewr": 5, "agg": 5}
    assert (rows[0]["window_start"], rows[0]["detail"]) == ("2023-11-14T22:14:00Z", "{}")


def at(window: int) -> int:
    return START_MS + window * MINUTE_MS


def lose(given: Scene) -> None:
    given.held["agg", at(2)][0].discard(12)


def repeat(given: Scene) -> None:
    given.held["agg", at(2)][1].extend([12, 12, 13])


def keep_open(given: Scene) -> None:
    given.promised_ms = at(4)


def end(given: Scene) -> None:
    given.state, given.promised_ms = CLOSED, None


def leave_unannounced_tail(given: Scene) -> None:
    given.state, given.last = CLOSED, given.last + 3


def stamp(given: Scene) -> None:
    for tier, window, first, last in (
        ("ewr", 1, 5, 9),
        ("agg", 1, 6, 6),
        ("agg", 2, -1, 8),
        ("agg", 3, 4, 4),
    ):
        given.cell_changes[tier, at(window)] = {"first_append_ms": first, "last_append_ms": last}


def hash_keys(given: Scene) -> None:
    given.parts = 3


def tell_late(given: Scene) -> None:
    given.reports = dict(reversed(given.reports.items()))


def doubt(given: Scene) -> None:
    changed = given.reports[at(5)]
    given.reports[at(5)] = replace(
        changed, acknowledged=BitMap64([26, 27]), ambiguous=BitMap64([28]), failed=BitMap64([29, 30]), count=2
    )
    given.held["agg", at(5)][0].discard(28)


def say_nothing_of_one(given: Scene) -> None:
    del given.reports[at(3)]


def carry_without_a_report(given: Scene) -> None:
    given.held["agg", at(20)] = ({900, 901}, [])


def tell_it_failed_elsewhere(given: Scene) -> None:
    given.reports[at(7)] = replace(given.reports[at(7)], failed=BitMap64([3]))


def repeat_one_and_lose(lost: int, given: Scene) -> None:
    """As many records as there should be."""
    numbers, copies = given.held["agg", at(2)]
    numbers.discard(lost)
    copies.append(14 if lost != 14 else 12)


def say_nothing_of_a_copy(given: Scene) -> None:
    """A cell whose count leaves its copies out, which no writer of ours makes."""
    given.held["agg", at(2)][1].append(12)
    given.cell_changes["agg", at(2)] = {"count": 5}


def count_one_more_than_there_are(given: Scene) -> None:
    """Nor does one make this: a copy that is counted and not named."""
    given.cell_changes["agg", at(2)] = {"count": 6}


def lose_and_count(lost: int, given: Scene) -> None:
    """Nor this, of which the set alone tells the truth."""
    given.held["agg", at(2)][0].discard(lost)
    given.cell_changes["agg", at(2)] = {"count": 5}


def hold_every_second_one_twice(given: Scene) -> None:
    """As many as there should be, in a set that no loop of ours takes apart."""
    numbers = range(1000, 7000)
    given.reports[at(9)] = report(at(9), numbers)
    given.held["ewr", at(9)] = (set(numbers), [])
    given.held["agg", at(9)] = (set(numbers[::2]), list(numbers[::2]))


def make_anew(given: Scene) -> None:
    given.unread.append(UnreadRange(PLACE, 0, 9, "recreated", at(-100)))
    given.held["ewr", at(1)][1].append(7)
    given.cell_changes["ewr", at(8)] = {"topic_id": "older"}


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        (lose, WINDOWS - 1),
        (repeat, WINDOWS - 1),
        (keep_open, WINDOWS),
        (end, WINDOWS),
        (leave_unannounced_tail, WINDOWS),
        (stamp, WINDOWS),
        (hash_keys, WINDOWS),
        (tell_late, WINDOWS),
        (doubt, WINDOWS - 1),
        (say_nothing_of_one, WINDOWS - 1),
        (carry_without_a_report, WINDOWS),
        (tell_it_failed_elsewhere, WINDOWS - 1),
        (hold_every_second_one_twice, WINDOWS),
        (say_nothing_of_a_copy, WINDOWS - 1),
        (count_one_more_than_there_are, WINDOWS - 1),
        *((partial(repeat_one_and_lose, lost), WINDOWS - 1) for lost in (11, 13, 15)),
        *((partial(lose_and_count, lost), WINDOWS - 1) for lost in (11, 13, 15)),
    ],
)
def test_what_is_found_of_one_window_leaves_the_others_as_they_are(
    change: Callable[[Scene], None], plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = scene()
    change(given)
    _, found = judged(given, monkeypatch)
    assert found == plain


def share_a_number(given: Scene) -> None:
    given.held["agg", at(7)][0].add(3)


def acknowledge_twice(given: Scene) -> None:
    told = given.reports[at(7)]
    given.reports[at(7)] = replace(told, acknowledged=told.acknowledged | BitMap64([3]), count=6)


def acknowledge_twice_elsewhere(given: Scene) -> None:
    for window in (6, 7):
        told = given.reports[at(window)]
        given.reports[at(window)] = replace(told, acknowledged=told.acknowledged | BitMap64([300]), count=6)


def acknowledge_twice_in_columns(given: Scene) -> None:
    for tier in TIERS:
        given.held[tier, at(7)] = (set(range(35, 41)), [])
    given.reports[at(7)] = report(at(7), range(35, 41))


def have_two_sessions(given: Scene) -> None:
    given.reports[at(7)] = replace(given.reports[at(7)], session="1" * 16)


def name_another_producer(given: Scene) -> None:
    given.cell_changes["agg", at(7)] = {"producer": "BB@ewr"}


def digest(given: Scene) -> None:
    given.cell_changes["agg", at(7)] = {"digest": 77}


def file_it_between(given: Scene) -> None:
    given.held["agg", at(7) + 1] = ({900}, [])


def share_a_number_in_bytes_that_only_the_library_reads(given: Scene) -> None:
    given.held["agg", at(20)] = ({3}, [])
    given.cell_changes["agg", at(20)] = {"bitmap": BitMap([3]).serialize() + b"\0"}


def make_anew_with_a_number_in_two_windows(given: Scene) -> None:
    """The older topic is seen in a window that has everything."""
    given.unread.append(UnreadRange(PLACE, 0, 9, "recreated", at(-100)))
    given.cell_changes["ewr", at(8)] = {"topic_id": "older"}
    given.held["agg", at(1)][0].discard(7)
    given.held["ewr", at(2)][0].add(6)


def hold_it_where_no_tier_is(given: Scene) -> None:
    """A cluster that is in the config no more."""
    given.held["gone", at(3)] = (set(range(16, 21)), [])
    given.cell_changes["gone", at(3)] = {"first_append_ms": 5, "last_append_ms": 9}


def prune_its_number(given: Scene) -> None:
    pruned = PrunedWindows(MINUTE_MS)
    pruned.add(at(-5), MINUTE_MS)
    pruned.sequences |= BitMap64([3])
    given.pruned = pruned


def report_in_longer_windows(given: Scene) -> None:
    given.reports = {
        start_ms: replace(told, window_ms=2 * MINUTE_MS)
        for start_ms, told in given.reports.items()
        if start_ms % (2 * MINUTE_MS) == 0
    }


@pytest.mark.parametrize(
    "change",
    [
        share_a_number,
        acknowledge_twice,
        acknowledge_twice_elsewhere,
        acknowledge_twice_in_columns,
        have_two_sessions,
        name_another_producer,
        digest,
        file_it_between,
        share_a_number_in_bytes_that_only_the_library_reads,
        make_anew,
        make_anew_with_a_number_in_two_windows,
        hold_it_where_no_tier_is,
        prune_its_number,
        report_in_longer_windows,
    ],
)
def test_what_reaches_over_windows_is_judged_with_all_of_them(
    change: Callable[[Scene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = scene()
    change(given)
    _, plain = judged(given, monkeypatch)
    assert plain is None


def test_contents_and_arrivals_are_judged_one_by_one(monkeypatch):
    assert judged(scene(), monkeypatch, content=True)[1] is None
    given = scene()
    given.passed = None
    assert judged(given, monkeypatch)[1] is None


def test_groups_are_judged_one_by_one(monkeypatch):
    group = OnlineGroup("billing", "agg", {("agg", TOPIC, 0): Passage(10**9, "id")}, 0)
    rows, plain = judged(scene(), monkeypatch, groups=[group])
    assert plain is None and {row["missing"] for row in rows} == {5}


@pytest.mark.parametrize("first", [BASE_STEP - 20, 5 * BASE_STEP + 1])
def test_numbers_beyond_32_bits(first, monkeypatch):
    rows, plain = judged(scene(first), monkeypatch)
    assert plain == WINDOWS and {row["verdict"] for row in rows[:WINDOWS]} == {"PROVEN"}
    assert rows[WINDOWS]["verdict"] == "UNKNOWN"  # nobody told of the numbers before


def test_windows_beyond_the_calendar_have_no_date(monkeypatch):
    rows, plain = judged(scene(from_ms=253_402_300_800_000 - 5 * MINUTE_MS), monkeypatch)
    assert plain == 5 and [row["window_start"] for row in rows[4:6]] == ["9999-12-31T23:59:00Z", None]


def test_a_far_date_is_told_to_the_millisecond():
    assert iso_time(253_401_300_799_900) == "9999-12-20T10:13:19.900Z"
    assert iso_time(-1) == "1969-12-31T23:59:59.999Z"


def test_few_windows_are_not_worth_columns(monkeypatch):
    given = scene()
    assert plain_windows.FEW_WINDOWS > WINDOWS
    monkeypatch.setattr(plain_windows, "plain_columns", None)
    assert given.reconciler().rows(given.cells(), given.facts().to_pylist(), None).num_rows == WINDOWS


CHANGES: list[Callable[[Random, Scene], Any]] = [
    lambda random, given: pick(random, given)[0].discard(number(random, given)),
    lambda random, given: pick(random, given)[0].add(number(random, given)),
    lambda random, given: pick(random, given)[1].append(number(random, given)),
    lambda random, given: given.held.pop(random.choice(sorted(given.held))),
    lambda random, given: given.reports.pop(random.choice(sorted(given.reports))),
    lambda random, given: setattr(given, "promised_ms", at(random.randint(-1, 9))),
    lambda random, given: setattr(given, "now_ms", at(random.randint(1, 12))),
    lambda random, given: setattr(given, "state", CLOSED),
    lambda random, given: setattr(given, "parts", random.choice([2, 3])),
    lambda random, given: setattr(given, "passed", Passage(random.randint(0, 8000), "id")),
    lambda random, given: given.gaps.append(Gap(PLACE, 1000, random.randint(1500, 4000), "expired")),
    lambda random, given: given.unread.append(UnreadRange(PLACE, 0, 9, "expired", at(3))),
    lambda random, given: change_report(random, given, "failed"),
    lambda random, given: change_report(random, given, "ambiguous"),
    lambda random, given: change_report(random, given, "acknowledged"),
    lambda random, given: change_cell(random, given, unsequenced_count=1),
    lambda random, given: change_cell(random, given, producer=random.choice(["", "BB@ewr"])),
    lambda random, given: change_cell(random, given, first_append_ms=5, last_append_ms=random.choice([5, 9])),
]


def pick(random: Random, given: Scene) -> tuple[set[int], list[int]]:
    return given.held[random.choice(sorted(given.held))]


def number(random: Random, given: Scene) -> int:
    return random.randint(given.last - 60, given.last + 1)


def change_cell(random: Random, given: Scene, **changes: Any) -> None:
    given.cell_changes.setdefault(random.choice(sorted(given.held)), {}).update(changes)


def change_report(random: Random, given: Scene, name: str) -> None:
    """One number more that the window's report tells of in this way."""
    start_ms = random.choice(sorted(given.reports))
    told = given.reports[start_ms]
    one = BitMap64([number(random, given)])
    sets = {each: getattr(told, each) - one for each in ("acknowledged", "ambiguous", "failed")}
    sets[name] = sets[name] | one
    given.reports[start_ms] = replace(told, **sets, count=len(sets["acknowledged"]))


def test_whatever_a_stream_has_its_rows_are_those_of_each_window_by_itself(monkeypatch):
    random = Random(seeds.given())
    taken: Counter[str] = Counter()
    for _ in range(300):
        sizes = tuple(random.choice([1, 5, 40, 600]) for _ in range(WINDOWS))
        given = scene(random.choice([61, BASE_STEP - 70, 5 * BASE_STEP + 1]), sizes)
        for change in random.sample(CHANGES, random.choice([0, 1, 1, 2, 3])):
            change(random, given)
        _, plain = judged(given, monkeypatch)
        taken["given up" if plain is None else "all" if plain == WINDOWS else "some"] += 1
    assert min(taken[each] for each in ("all", "some", "given up")) >= 20, taken
